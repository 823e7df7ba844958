"""An agent's roots beside the workspace: real folders, apart from everything that Handrail itself relies on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from handrail.contract.agent import AgentRoot
from handrail.runtime.files.roots import FurtherRoots, is_beneath
from handrail.store.broad import too_broad

_OF_THE_SYSTEM = ("/proc", "/sys", "/dev", "/run", "/boot", "/etc", "/usr/local/etc")
"""What a sandbox masks in parts or makes anew; a mount over it would undo that."""


def further_roots(
    roots: Sequence[AgentRoot], workspace: str, apart: Iterable[str | Path]
) -> tuple[FurtherRoots, list[tuple[str, str]]]:
    """The folders that ``roots`` name now, and ``(place, problem)`` for each that cannot be one.

    A writable root in the workspace adds nothing to it and is left out.

    :param workspace: canonical
    :param apart: folders that no root may meet: Handrail's state and configuration
    """
    own = [os.path.realpath(folder) for folder in apart]
    found: dict[str, Literal["read", "write"]] = {}
    faults: list[tuple[str, str]] = []
    for index, root in enumerate(roots):
        real = _real(root)
        problem = _problem(root, real, workspace, own)
        if problem is not None:
            faults.append((f"roots[{index}].path", problem))
        elif not is_beneath(real, workspace) and found.setdefault(real, root.access) != root.access:
            faults.append((f"roots[{index}].access", f"{real} is named twice, once to read and once to write"))
    faults += _inside_writable(roots, found)
    readable = (real for real, access in found.items() if access == "read")
    writable = (real for real, access in found.items() if access == "write")
    return FurtherRoots(tuple(readable), tuple(writable)), faults


def _problem(root: AgentRoot, real: str, workspace: str, own: Sequence[str]) -> str | None:
    if not real or not Path(real).is_dir():
        return f"there is no folder {root.path!r}; make it, or leave the root out"
    if what := too_broad(Path(real)):
        return f"{root.path!r} is {what}; name a project's folder"
    for folder in own:
        if _meet(real, folder):
            return f"{root.path!r} meets {folder}, where Handrail keeps its own; name a folder apart from it"
    for folder in _OF_THE_SYSTEM:
        if _meet(real, folder):
            return f"{root.path!r} meets {folder}, which a sandbox guards; name a folder apart from it"
    if root.access == "read" and is_beneath(real, workspace):
        return (
            f"{root.path!r} lies in the workspace {workspace}, which may be written; a rule such as "
            "'deny fs.write FOLDER/**' keeps a part of it from being changed"
        )
    if root.access == "write" and real != workspace and is_beneath(workspace, real):
        return f"{root.path!r} holds the workspace {workspace}; open that folder as the workspace instead"
    return None


def _inside_writable(
    roots: Sequence[AgentRoot], found: dict[str, Literal["read", "write"]]
) -> Iterator[tuple[str, str]]:
    """A folder to be read only, in one that may be written, would not stay as it is."""
    for index, root in enumerate(roots):
        real = _real(root)
        if found.get(real) != "read":
            continue
        for other, access in found.items():
            if access == "write" and other != real and is_beneath(real, other):
                yield (
                    f"roots[{index}].access",
                    f"{root.path!r} lies in {other}, which may be written; write 'write' here too",
                )


def _real(root: AgentRoot) -> str:
    """The canonical path; empty for a text that can name none."""
    try:
        return os.path.realpath(Path(root.path).expanduser())
    except (OSError, RuntimeError, ValueError):
        return ""


def _meet(one: str, other: str) -> bool:
    return is_beneath(one, other) or is_beneath(other, one)
