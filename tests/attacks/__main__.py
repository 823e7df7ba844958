"""``python -m tests.attacks [--json FILE] [PYTEST ARGUMENTS]``: run all attacks and print their table.

Anybody may run it. Root gives its own identity away before anything is tried; what only root can look at is looked at
when root runs it. Nothing is written into the checkout.
"""

from __future__ import annotations

import os
import sys
import tempfile

import pytest

_WHERE = ("tests/attacks", "tests/policy/test_shell_cases.py", "tests/policy/test_shell_decisions.py")
_HOW = ("-n", "2", "--dist", "loadgroup", "-p", "tests.attacks.report", "-p", "no:cacheprovider", "--timeout", "1800")


def main(arguments: list[str]) -> int:
    if "--json" in arguments:
        at = arguments.index("--json")
        if at + 1 == len(arguments):
            print("attack: --json needs a file to write to", file=sys.stderr)
            return 2
        os.environ["HANDRAIL_ATTACK_JSON"] = os.path.abspath(arguments[at + 1])
        del arguments[at : at + 2]
    with tempfile.TemporaryDirectory(prefix="handrail-attack-") as folder:
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        return int(pytest.main([*_WHERE, *_HOW, *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
