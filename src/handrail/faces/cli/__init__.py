"""The command line: one program, one command per thing a person wants of the kernel."""

from __future__ import annotations


def main() -> None:
    """The ``handrail`` program. Nothing of the kernel is loaded before a command needs it."""
    import sys

    from handrail.faces.cli.app import run

    sys.exit(run(sys.argv[1:]))
