"""Recording an agent's generations in the log: every tool of the first, then the changes from one to the next.

Whoever reads it goes back from a change to the generation that it ``after`` names, until one names the tool. So that the
way stays short, a generation is told whole again once the changes since would name as many tools.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from handrail.contract.generation import Difference, Entry, Generation

MOST_CHANGES = 50
"""Generations in a row that are told by what changed."""


class Chronicle:
    """One agent's. Not to be shared between threads."""

    __slots__ = ("_changes", "_named", "_told")

    def __init__(self) -> None:
        self._told: int | None = None
        self._changes = self._named = 0

    def told(self, generation: Generation, difference: Difference | None = None) -> dict[str, Any]:
        """The body of the record of ``generation``: which tools, by which definition, from where.

        :param difference: to the generation that was told last
        """
        after, self._told = self._told, generation.number
        if difference is not None and after is not None and self._is_short(difference, len(generation)):
            new = (*difference.added, *difference.changed)
            self._changes += 1
            self._named += len(new) + len(difference.removed)
            tools = _named(generation.entries[tool_id] for tool_id in new)
            return {"number": generation.number, "after": after, "difference": asdict(difference), "tools": tools}
        self._changes = self._named = 0
        changes = {} if difference is None else {"difference": asdict(difference)}
        return {"number": generation.number, "tools": _named(generation.entries.values()), **changes}

    def _is_short(self, difference: Difference, count: int) -> bool:
        named = len(difference.added) + len(difference.changed) + len(difference.removed)
        return self._changes < MOST_CHANGES and self._named + named < count


def _named(entries: Iterable[Entry]) -> dict[str, Any]:
    return {
        entry.id: {
            "definition": entry.definition_hash,
            "source": entry.source,
            "withheld": entry.withheld,
            "status": entry.status,
            "confined_by": entry.confined_by,
            **({} if entry.behind is None else {"answered_by": entry.behind.id}),
        }
        for entry in entries
    }
