"""The program: ``python -m demos.doors [--edits N] [--keep]``."""

from __future__ import annotations

import sys

from demos.demonstration import parser, show
from demos.doors.guide import LAST, shown

LEAST, MOST = LAST + 1, 100


def main() -> int:
    """Open the doors. The exit code: 0 every edit is there or reported, 1 something is not so, 5 it cannot be shown."""
    arguments = parser(
        "doors",
        "Watch four processes edit one file through one kernel while the one that holds it is killed.",
        exit_codes="0 every edit is there or reported, in one verified log; 1 something is not so; "
        "5 it cannot be shown on this machine",
    )
    arguments.add_argument(
        "--edits", type=int, default=6, metavar="N", help=f"for each door, {LEAST} to {MOST} (default 6)"
    )
    given = arguments.parse_args()
    if not LEAST <= given.edits <= MOST:
        arguments.error(f"--edits {given.edits}: a number from {LEAST} to {MOST} was expected")
    return show("doors", lambda interruption: shown(interruption, edits=given.edits, keep=given.keep))


if __name__ == "__main__":
    sys.exit(main())
