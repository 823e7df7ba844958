"""The program: ``python -m handrail.faces.cli.pair [--keep]``."""

from __future__ import annotations

import argparse
import os
import sys

from handrail.contract.errors import HandrailError
from handrail.faces.cli.app import CANNOT_START, ERROR
from handrail.faces.cli.driving import drive
from handrail.faces.cli.pair.guide import shown
from handrail.faces.cli.show import note
from handrail.faces.cli.tour.project import IDENTITY


def main() -> int:
    """Have the two at work. The exit code: 0 every effect is there, 1 one is not, 5 it cannot be shown."""
    parser = argparse.ArgumentParser(
        prog="python -m handrail.faces.cli.pair",
        description="Watch two scripted agents hand work to each other over channels, on a small repository with two bugs.",
        epilog="Exit codes: 0 every effect is there, 1 one is not, 5 it cannot be shown on this machine.",
    )
    parser.add_argument("--keep", action="store_true", help="keep the repository, its state and its log afterwards")
    keep: bool = parser.parse_args().keep
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    os.environ.update(IDENTITY)  # commits in the sandbox are nobody's whom this machine knows
    try:
        return drive(lambda interruption: shown(interruption, keep=keep))
    except HandrailError as error:
        note(f"agents: {error}")
        return CANNOT_START
    except BrokenPipeError:  # whoever watched has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR


if __name__ == "__main__":
    sys.exit(main())
