"""A project's instruction files above the workspace: those of its repository, which no tool of the session can reach.

Read by whoever holds the workspace, and by the session's rules all the same: what they keep from the tool that reads files
is not read here either. No link is followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from handrail.contract.instructions import NAMES
from handrail.contract.requires import CapabilitySet, Layer
from handrail.contract.spec import ToolSpec
from handrail.policy.matching import PathSubject
from handrail.policy.questions import Prepared
from handrail.policy.rules import RuleBook
from handrail.policy.targets import Target
from handrail.session.repository import upwards

MAX_BYTES = 128 * 1024
"""Of one file; more of it would have no room among what is shown."""
_ANYWHERE = CapabilitySet((Layer("the operator", fs_read=("/**",)),))
"""What its roots bound is the session's own reading. Here the rules alone speak."""


def files_above(workspace: Path, permitted: Callable[[str], bool]) -> list[tuple[str, str]]:
    """What stands in them, the farthest first, each by its path from the workspace. Nothing where there is no repository.

    :param workspace: canonical
    """
    found: list[tuple[str, str]] = []
    for folder in reversed(list(upwards(workspace))[1:]):
        for name, text in _in(folder, permitted):
            found.append((os.path.relpath(folder / name, workspace), text))
    return found


def permitting(reader: ToolSpec, rules: RuleBook) -> Callable[[str], bool]:
    """Whether the rules let ``reader`` read the file at a path, with nobody there to be asked."""
    prepared = Prepared(reader, rules, _ANYWHERE)

    def permitted(path: str) -> bool:
        target = Target("fs.read", path, path, PathSubject(path, None))
        deciding = prepared.judge_targets({"path": path}, (target,)).deciding
        return deciding.action == "allow" or deciding.cause == "no rule"

    return permitted


def _in(folder: Path, permitted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    for name in NAMES:
        if not permitted(str(folder / name)):
            continue
        try:
            content = _content(folder / name)
        except OSError:
            continue
        if content is not None:
            yield name, content.decode("utf-8-sig", "replace")


def _content(path: Path) -> bytes | None:
    """The beginning of a regular file; None for anything else.

    :raises OSError: when it cannot be read
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # looked at first: a folder becomes no file object
            return None
        with os.fdopen(file, "rb", closefd=False) as opened:
            return opened.read(MAX_BYTES)
    finally:
        os.close(file)
