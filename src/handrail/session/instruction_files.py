"""Instruction files of a repository above the workspace, which no tool of the session can reach.

The process that holds the workspace reads them, under the session's rules: a file that the rules keep from the tool
``read`` is not read here either. Links are not followed. A record without a call lists the files that were read, with the
hash of the text that the model gets of each.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from handrail.contract.agent_manifest import MANIFEST_KEYS
from handrail.contract.text.text_encodings import decode_file_text, replace_invalid_bytes
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.call_evaluation import ToolPolicy
from handrail.policy.call_targets import CallTarget
from handrail.policy.rules.matchers import PathSubject
from handrail.policy.rules.rules_and_modes import RuleBook
from handrail.registry.sources.tool_folder_source import explain_unsafe_permissions

# The folders from a workspace up to the top of its repository.

_MAX_UP = 32


def iterate_parent_repository_folders(workspace: Path) -> Iterator[Path]:
    """Yield the workspace and the folders above it, up to the top of its repository.

    Stops at a folder that other users may write, because its files are not the user's.
    """
    top = next((f for f in (workspace, *workspace.parents[:_MAX_UP]) if os.path.lexists(f / ".git")), workspace)
    folder = workspace
    while True:
        yield folder
        if folder == top or folder == folder.parent:
            return
        folder = folder.parent
        try:
            if explain_unsafe_permissions(folder) is not None:
                return
        except OSError:
            return


MAX_BYTES = 128 * 1024
"""The bytes that are read of one file. The model is shown less than that."""
_ANYWHERE = CapabilitySet((CapabilityLayer("the operator", fs_read=("/**",)),))
"""Capabilities that allow all paths: only the rules decide, because the session reads the files, not a tool."""


class ParentInstructionFile(NamedTuple):
    """An instruction file above the workspace.

    :param text: its text; None if a rule denies reading it
    """

    path: Path
    text: str | None

    def to_record(self) -> dict[str, Any]:
        """Return the members of the log record about the file."""
        if self.text is None:
            return {"path": str(self.path), "skipped_by": "a rule"}
        digest = hashlib.sha256(self.text.encode("utf-8", "backslashreplace")).hexdigest()
        return {"path": str(self.path), "sha256": digest, "characters": len(self.text)}


def read_parent_instructions(
    workspace: Path, permitted: Callable[[str], bool], redact: Callable[[str], str]
) -> list[ParentInstructionFile]:
    """Return the instruction files above the workspace, the farthest first.

    The list is empty if the workspace is in no repository.

    :param workspace: canonical
    :param redact: removes secrets from a text
    """
    found: list[ParentInstructionFile] = []
    for folder in reversed(list(iterate_parent_repository_folders(workspace))[1:]):
        for path in (folder / name for name in MANIFEST_KEYS):
            with suppress(OSError):
                if not permitted(str(path)):
                    found += [ParentInstructionFile(path, None)] if stat.S_ISREG(os.lstat(path).st_mode) else []
                elif (content := _read_beginning(path)) is not None:
                    found.append(
                        ParentInstructionFile(path, redact(replace_invalid_bytes(decode_file_text(content).text)))
                    )
    return found


def make_read_permission_check(reader: ToolSpec, rules: RuleBook) -> Callable[[str], bool]:
    """Return a function that says whether ``reader`` may read a path without asking the user."""
    prepared = ToolPolicy(reader, rules, _ANYWHERE)

    def permitted(path: str) -> bool:
        target = CallTarget("fs.read", path, path, PathSubject(path, None))
        deciding = prepared.evaluate_targets({"path": path}, (target,)).deciding_finding
        return deciding.action == "allow" or deciding.cause == "no rule"

    return permitted


def _read_beginning(path: Path) -> bytes | None:
    """Return the beginning of a regular file, or None for anything else.

    :raises OSError: if it cannot be read
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # checked first, because os.fdopen raises for a folder
            return None
        with os.fdopen(file, "rb", closefd=False) as opened:
            return opened.read(MAX_BYTES)
    finally:
        os.close(file)
