"""The program: ``python -m demos.tour [--keep]``."""

from __future__ import annotations

import sys

from demos.demonstration import parser, show
from demos.tour.guide import guided


def main() -> int:
    """Give the tour. Its exit code: 0 every effect is there, 1 one is not, 5 the machine withholds what it needs."""
    given = parser(
        "tour",
        "Watch a scripted model work on a small repository through the kernel, and check every effect.",
        exit_codes="0 every effect is there, 1 one is not, 5 what the machine cannot confine was withheld",
    ).parse_args()
    return show("tour", lambda interruption: guided(interruption, keep=given.keep))


if __name__ == "__main__":
    sys.exit(main())
