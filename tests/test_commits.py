"""The subjects of commits are short and imperative, from a fixed commit on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SINCE = "ff043768"
"""The last commit before this rule."""
MOST = 72
_AREA = re.compile(r"[\w./ -]{1,30}: (?=\S)")
_VERBS = frozenset(
    {"address", "bring", "discuss", "embed", "express", "feed", "guess", "need", "pass", "press", "process", "skip"}
)
"""Imperatives that end as other forms do."""
_ENDINGS = ("ed", "ing", "s", "ly")
_OPENERS = frozenset(
    [
        "a",
        "an",
        "the",
        "this",
        "that",
        "what",
        "when",
        "where",
        "whoever",
        "which",
        "who",
        "how",
        "it",
        "no",
        "nobody",
        "there",
        "of",
        "in",
        "on",
        "for",
        "with",
    ]
)


def faults(subject: str) -> Iterator[str]:
    """Yield what is wrong with the subject of a commit."""
    if len(subject) > MOST:
        yield f"{len(subject)} characters, at most {MOST}"
    if subject.endswith("."):
        yield "ends with a full stop"
    first = _AREA.sub("", subject, count=1).partition(" ")[0]
    if not first[:1].isupper() and first == subject.partition(" ")[0]:
        yield "begins with a small letter"
    word = first.lower().rstrip(",")
    if word in _OPENERS or (word.endswith(_ENDINGS) and word not in _VERBS):
        yield f"begins with {first!r}; write an imperative, such as Add or Fix"


def subjects() -> list[str]:
    """Return the subjects since the rule, or skip the test without a history."""
    command = ["git", "log", "--no-merges", "--format=%s", f"{SINCE}..HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("the history of this copy does not reach back to the rule")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("subject", "good"),
    [
        ("Add a reference of events", True),
        ("docs: describe the sandbox", True),
        ("Process the queue in order", True),
        ("A call that is cancelled waits", False),
        ("Fixed the race", False),
        ("Update the figures.", False),
        ("Describe " + "the sandbox " * 8, False),
    ],
)
def test_an_invalid_commit_subject_is_detected(subject: str, good: bool) -> None:
    assert (not list(faults(subject))) == good


def test_the_subjects_of_new_commits_are_short_and_imperative() -> None:
    problems = [f"{subject}: {fault}" for subject in subjects() for fault in faults(subject)]
    assert not problems, "\n".join(problems)
