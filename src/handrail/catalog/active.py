"""The active set of one interaction: what was brought into a model's view, in the order in which it was.

It is kept as steps that are only added to, so that a length says which of its states is meant, and whoever has a copy needs
the new steps only. A step is one text:

- ``ID``: it is in view, and stays there; also of one that was there already, and might have had to make room
- ``?ID``: a search has found it; it makes room for others as long as nobody calls it
- ``-ID``: it has made room
"""

from __future__ import annotations

from collections.abc import Iterable

FOUND, LEFT = "?", "-"
_MANY = 1_000
"""Steps of which most may be without a trace."""


class ActiveSet:
    """Ids, each once."""

    __slots__ = ("_in_view", "_steps")

    def __init__(self, steps: Iterable[str] = ()) -> None:
        self._steps: list[str] = []
        self._in_view: dict[str, bool] = {}
        """What is there now, and whether it makes room for others."""
        self.take(steps)

    def __len__(self) -> int:
        """How many steps led here."""
        return len(self._steps)

    def __contains__(self, tool_id: object) -> bool:
        return tool_id in self._in_view

    def take(self, steps: Iterable[str]) -> tuple[str, ...]:
        """Go on by ``steps``. Gives those that changed anything."""
        taken = tuple(step for step in steps if _go(self._in_view, step))
        self._steps += taken
        return taken

    def may_leave(self, tool_id: str) -> bool:
        return self._in_view.get(tool_id, False)

    @property
    def loose(self) -> tuple[str, ...]:
        """What makes room for others, what was found longest ago first."""
        return tuple(tool_id for tool_id, loose in self._in_view.items() if loose)

    def first(self, count: int | None = None) -> tuple[str, ...]:
        """What was in view after ``count`` steps, in order; now by default."""
        if count is None or count >= len(self._steps):
            return tuple(self._in_view)
        found: dict[str, bool] = {}
        for step in self._steps[:count]:
            _go(found, step)
        return tuple(found)

    def steps(self) -> tuple[str, ...]:
        """The fewest that lead to what is in view now."""
        return tuple(f"{FOUND}{tool_id}" if loose else tool_id for tool_id, loose in self._in_view.items())

    def shortened(self) -> ActiveSet:
        """Another one with the same in view where this one has very many steps, else itself. Lengths are of this one."""
        return ActiveSet(self.steps()) if len(self._steps) > _MANY + 2 * len(self._in_view) else self


def _go(in_view: dict[str, bool], step: str) -> bool:
    """Change what is in view by one step. Gives whether that changed anything."""
    if step.startswith(LEFT):
        return in_view.pop(step[1:], None) is not None
    if step.startswith(FOUND):
        if step[1:] in in_view:
            return False
        in_view[step[1:]] = True
    elif in_view.get(step) is False:
        return False
    else:
        in_view[step] = False
    return True
