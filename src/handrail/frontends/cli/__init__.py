"""The command line: one program, with one command for each task."""

from __future__ import annotations


def main() -> None:
    """The ``handrail`` program. Nothing of the kernel is loaded before a command needs it."""
    from handrail.origins.search_path import leave_out_current_folder

    leave_out_current_folder()
    import gc
    import sys

    gc.set_threshold(
        25_000, 10, 10
    )  # what is loaded stays: looking through it again and again took an eighth of a call
    from handrail.frontends.cli.app import run

    code = run(sys.argv[1:])
    gc.freeze()
    sys.exit(code)
