"""The report of an undo, done or planned: the result of ``handrail undo`` and ``session.undo()``."""

from __future__ import annotations

from typing import Literal

from handrail.contract.struct import Struct

UndoOutcome = Literal["restored", "removed", "conflict", "unavailable"]
"""The outcome for one path: it has its earlier state again, what the call made is removed, it has changed since and was left as
it is, or its earlier state was not kept."""


class UndoPathResult(Struct, frozen=True):
    """One path of an undo.

    :param path: relative to the workspace
    :param detail: why a path was left as it is; empty for the others
    """

    path: str
    outcome: UndoOutcome
    detail: str = ""


class UndoReport(Struct, frozen=True):
    """The result of an undo.

    :param id: the id by which this undo can itself be undone; empty if nothing was changed
    :param calls: the calls whose changes were undone
    :param problems: what calls changed in ways that are not known
    """

    id: str
    calls: tuple[str, ...]
    paths: tuple[UndoPathResult, ...]
    problems: tuple[str, ...] = ()
    is_dry_run: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether everything that the calls changed was given back."""
        return not self.problems and all(one.outcome in ("restored", "removed") for one in self.paths)

    def count(self, outcome: UndoOutcome) -> int:
        """Return the number of paths with an outcome."""
        return sum(one.outcome == outcome for one in self.paths)
