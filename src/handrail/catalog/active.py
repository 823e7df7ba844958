"""The active set of one interaction: what was brought into a model's view, in the order in which it was."""

from __future__ import annotations

from collections.abc import Iterable


class ActiveSet:
    """Ids, each once. It only grows: an interaction that begins has another one, so what was seen once at a position
    stays there, and a length says which of its states is meant."""

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self._ids: dict[str, None] = dict.fromkeys(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, tool_id: object) -> bool:
        return tool_id in self._ids

    def bring(self, ids: Iterable[str]) -> tuple[str, ...]:
        """Add those of ``ids`` that it has not, in order, and give them."""
        mine = self._ids
        added = tuple(tool_id for tool_id in dict.fromkeys(ids) if tool_id not in mine)
        mine.update(dict.fromkeys(added))
        return added

    def first(self, count: int | None = None) -> tuple[str, ...]:
        """The first ``count``, all by default."""
        ids = tuple(self._ids)
        return ids if count is None else ids[:count]
