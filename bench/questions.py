"""Questions of each mode: the commands of `questions.txt`, decided by a real kernel. No command runs.

    python bench/questions.py                counts by mode and kind of command; exit code 1 if a target is missed
    python bench/questions.py --show auto    also lists the questions of one mode, each with its reason

The workspace is a git repository in a temporary folder, with an own state and configuration. Targets: the default mode
asks about at most 30 of 158 commands, without those that reach the network or destroy; ``auto`` asks about at most 4 that
destroy nothing and need no network; and each command that destroys something is asked about or denied, in every mode.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import handrail

LIST = Path(__file__).with_name("questions.txt")
MODES = ("ask", "accept-edits", "auto")
DEFAULT_MODE = "ask"
HARMLESS = ("reads", "runs", "changes")
MOST_ASKED_BY_DEFAULT = 30 / 158
MOST_FALSE_IN_AUTO = 4

TRACKED = {
    "README.md": "# Demo\n\nRun `make test`.\n",
    "src/app.py": "import os\n\n\ndef main() -> None:\n    print(os.getcwd())\n",
    "src/util.py": "VALUE = 1\n",
    "tests/test_app.py": "def test_main() -> None:\n    assert True\n",
    "frontend/package.json": '{"scripts": {"test": "true", "build": "true"}}\n',
    "pyproject.toml": '[project]\nname = "demo"\nversion = "1"\n',
    "scripts/check.sh": "#!/bin/sh\ntrue\n",
    "Makefile": "test:\n\ttrue\n",
    ".gitignore": "build/\ndist/\nnode_modules/\n__pycache__/\n*.pyc\n.pytest_cache/\n.venv/\n",
}
UNTRACKED = {
    "notes.txt": "one:1\ntwo:2\n",
    "build/out.o": "x",
    "dist/demo.whl": "x",
    "node_modules/left-pad/index.js": "x",
    "src/__pycache__/app.cpython-311.pyc": "x",
}


class Question(NamedTuple):
    """One command, and what it does: reads, runs, changes, network or destroys."""

    kind: str
    command: str


class Decision(NamedTuple):
    """The decision about one command in one mode."""

    question: Question
    action: str
    reason: str


def read_questions() -> list[Question]:
    """Return the commands of the list."""
    found: list[Question] = []
    kind = ""
    for line in LIST.read_text(encoding="utf-8").split("\n"):
        if line.startswith("| ") or line == "|":
            found[-1] = Question(kind, f"{found[-1].command}\n{line[2:]}")
        elif line.startswith("[") and line.endswith("]") and line[1:-1].isalpha():
            kind = line[1:-1]
        elif line and not line.startswith("#"):
            found.append(Question(kind, line))
    return found


def make_workspace(folder: Path) -> None:
    """Make a git repository with tracked, untracked and ignored files."""
    for files in (TRACKED, UNTRACKED):
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    identity = ("-c", "user.name=Bench", "-c", "user.email=bench@example.org")
    for words in (("init", "-q", "-b", "main"), ("add", *TRACKED), (*identity, "commit", "-qm", "Begin")):
        subprocess.run(
            ["git", "-C", str(folder), *words], check=True, env={"PATH": "/usr/bin:/bin", "HOME": str(folder)}
        )


async def decide(questions: list[Question], mode: str) -> list[Decision]:
    """Return the decisions of one mode, each by a kernel with the shipped rules only."""
    found: list[Decision] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        workspace = folder / "ws"
        workspace.mkdir()
        make_workspace(workspace)
        (folder / "handrail.toml").write_text("", encoding="utf-8")
        async with handrail.open_kernel(
            workspace, state=folder / "state", config=folder / "handrail.toml", mode=mode
        ) as kernel:
            for question in questions:
                explained = await kernel.explain_call("bash", {"command": question.command}, headless=False)
                found.append(Decision(question, explained.action, explained.reason))
    return found


def print_counts(decided: dict[str, list[Decision]]) -> None:
    """Print how many commands of each kind are allowed, asked about and denied."""
    print(f"{'mode':<14}{'kind':<10}{'all':>5}{'allowed':>9}{'asked':>7}{'denied':>8}")
    for mode, decisions in decided.items():
        counts = Counter((one.question.kind, one.action) for one in decisions)
        for kind in dict.fromkeys(one.question.kind for one in decisions):
            allowed, asked, denied = (counts[kind, action] for action in ("allow", "ask", "deny"))
            print(f"{mode:<14}{kind:<10}{allowed + asked + denied:>5}{allowed:>9}{asked:>7}{denied:>8}")


def find_missed_targets(decided: dict[str, list[Decision]]) -> list[str]:
    """Return each target that the decisions miss, as a line."""
    missed: list[str] = []
    harmless = [one for one in decided[DEFAULT_MODE] if one.question.kind in HARMLESS]
    asked = sum(one.action != "allow" for one in harmless)
    if asked > len(harmless) * MOST_ASKED_BY_DEFAULT:
        missed.append(f"the default mode asks about {asked} of {len(harmless)} harmless commands")
    false = sum(one.action != "allow" for one in decided["auto"] if one.question.kind in HARMLESS)
    if false > MOST_FALSE_IN_AUTO:
        missed.append(f"auto asks about {false} harmless commands")
    for mode, decisions in decided.items():
        missed += [
            f"{mode} allows `{one.question.command}`"
            for one in decisions
            if one.question.kind == "destroys" and one.action == "allow"
        ]
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", choices=MODES, help="list the questions of this mode")
    parser.add_argument("--first", type=int, default=None, help="decide only the first N commands of each kind")
    options = parser.parse_args()
    questions = read_questions()
    if options.first is not None:
        kinds = dict.fromkeys(one.kind for one in questions)
        questions = [one for kind in kinds for one in [q for q in questions if q.kind == kind][: options.first]]
    decided = {mode: asyncio.run(decide(questions, mode)) for mode in MODES}
    for one in decided.get(options.show or "", ()):
        if one.action != "allow":
            print(f"{one.question.kind}\t{one.action}\t{one.question.command!r}\n\t\t{one.reason}")
    print_counts(decided)
    missed = find_missed_targets(decided)
    for line in missed:
        print(f"missed: {line}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
