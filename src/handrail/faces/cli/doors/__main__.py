"""The program: ``python -m handrail.faces.cli.doors [--edits N] [--keep]``."""

from __future__ import annotations

import argparse
import os
import sys

from handrail.contract.errors import HandrailError
from handrail.faces.cli.app import CANNOT_START, ERROR
from handrail.faces.cli.doors.guide import LAST, shown
from handrail.faces.cli.doors.opened import Stuck
from handrail.faces.cli.driving import drive
from handrail.faces.cli.show import note
from handrail.faces.cli.tour.project import IDENTITY

LEAST, MOST = LAST + 1, 100


def main() -> int:
    """Open the doors. The exit code: 0 every edit is there or reported, 1 something is not so, 5 it cannot be shown."""
    parser = argparse.ArgumentParser(
        prog="python -m handrail.faces.cli.doors",
        description="Watch four processes edit one file through one kernel while the one that holds it is killed.",
        epilog="Exit codes: 0 every edit is there or reported, in one verified log; 1 something is not so; "
        "5 it cannot be shown on this machine.",
    )
    parser.add_argument(
        "--edits", type=int, default=6, metavar="N", help=f"for each door, {LEAST} to {MOST} (default 6)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the repository, its state and its log afterwards")
    given = parser.parse_args()
    if not LEAST <= given.edits <= MOST:
        parser.error(f"--edits {given.edits}: a number from {LEAST} to {MOST} was expected")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    os.environ.update(IDENTITY)
    try:
        return drive(lambda interruption: shown(interruption, edits=given.edits, keep=given.keep))
    except Stuck as error:
        note(f"doors: {error}")
        return ERROR
    except HandrailError as error:
        note(f"doors: {error}")
        return CANNOT_START
    except BrokenPipeError:  # whoever watched has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR


if __name__ == "__main__":
    sys.exit(main())
