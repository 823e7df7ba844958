"""The program: ``python -m demos.pair [--keep]``."""

from __future__ import annotations

import sys

from demos.demonstration import parser, show
from demos.pair.guide import shown


def main() -> int:
    """Have the two at work. The exit code: 0 every effect is there, 1 one is not, 5 it cannot be shown."""
    given = parser(
        "pair",
        "Watch two scripted agents hand work to each other over channels, on a small repository with two bugs.",
        exit_codes="0 every effect is there, 1 one is not, 5 it cannot be shown on this machine",
    ).parse_args()
    return show("agents", lambda interruption: shown(interruption, keep=given.keep))


if __name__ == "__main__":
    sys.exit(main())
