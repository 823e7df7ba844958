"""Parts of the answers that several git tools give: bounded lists, hidden paths, conflicts, filters not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from handrail.contract.errors import ToolError
from handrail.tools.git import forms
from handrail.tools.git.repository import Repository

_T = TypeVar("_T")
MOST_LISTED = 500
STATUS = ("status", "--porcelain=v2", "--branch", "-z", "--ignore-submodules=dirty", "--find-renames")


def listed(name: str, found: Sequence[_T], row: Callable[[_T], Any]) -> dict[str, Any]:
    """The rows of what was ``found`` under ``name``, as far as an answer lists them, and how many it does not."""
    told: dict[str, Any] = {name: [row(one) for one in found[:MOST_LISTED]]}
    if len(found) > MOST_LISTED:
        told[f"{name}_not_listed"] = len(found) - MOST_LISTED
    return told


def hidden(repository: Repository, paths: Iterable[bytes], consequence: str) -> dict[str, Any]:
    """Which paths rules keep from being read, if any, and what follows for the answer."""
    kept = sorted(map(repository.shown, paths))[:MOST_LISTED]
    return {"hidden": {"paths": kept, "why": f"rules keep these from being read, so {consequence}"}} if kept else {}


def conflicts(repository: Repository, state: forms.State) -> list[dict[str, str]]:
    """The files whose two sides were not brought together, each with what became of it."""
    return [{"path": repository.shown(path), "change": how} for path, how in state.unmerged]


async def check_conflicts(repository: Repository, problem: str, then: str) -> forms.State:
    """The state of the tracked files, where there are no conflicts among them.

    :param problem: what they are told with; ``{}`` in it is how many files they are in
    :param then: the next step
    :raises ToolError: ``conflict`` with the files, where there are any
    """
    state = await repository.read(forms.status, *STATUS, "--untracked-files=no")
    if found := conflicts(repository, state):
        text = f"{problem.format(len(found))}; {then}"
        raise ToolError(text, kind="conflict", data={"conflicts": found[:MOST_LISTED]})
    return state


def filters_noted(repository: Repository) -> dict[str, Any]:
    """What a result says where filters were left out."""
    if not repository.filters:
        return {}
    names = ", ".join(sorted(repository.filters)[:5])
    return {
        "filters_not_run": f"{names}: the repository's configuration names programs for these filters, and none is run; "
        "files under them may show as changed though they are not"
    }
