"""The program: ``python -m handrail.faces.cli.tour [--keep]``."""

from __future__ import annotations

import argparse
import os
import sys

from handrail.contract.errors import HandrailError
from handrail.faces.cli.app import CANNOT_START
from handrail.faces.cli.driving import drive
from handrail.faces.cli.show import note
from handrail.faces.cli.tour.guide import guided
from handrail.faces.cli.tour.project import IDENTITY


def main() -> int:
    """Give the tour. Its exit code: 0 every effect is there, 1 one is not, 5 the machine withholds what it needs."""
    parser = argparse.ArgumentParser(
        prog="python -m handrail.faces.cli.tour",
        description="Watch a scripted model work on a small repository through the kernel, and check every effect.",
        epilog="Exit codes: 0 every effect is there, 1 one is not, 5 what the machine cannot confine was withheld.",
    )
    parser.add_argument("--keep", action="store_true", help="keep the repository, its state and its log afterwards")
    keep: bool = parser.parse_args().keep
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    os.environ.update(IDENTITY)  # commits in the sandbox are nobody's whom this machine knows
    try:
        return drive(lambda interruption: guided(interruption, keep=keep))
    except HandrailError as error:
        note(f"tour: {error}")
        return CANNOT_START
    except BrokenPipeError:  # whoever watched has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
