"""Which calls of a session have failed, and how often: made when the first one does."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_KEPT = 500
_NOT_COUNTED = frozenset({"cancelled", "interrupted"})
"""Ends that say nothing about the call."""


@dataclass(slots=True)
class _Failing:
    times: int = 0
    in_a_row: int = 0
    at: int = 0


class FailedCalls:
    """Counts by tool and arguments."""

    __slots__ = ("_calls", "_successes")

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple[str, str], _Failing] = OrderedDict()
        self._successes = 0

    def ended(self, tool: str, arguments_hash: str, error_kind: str | None, side_effect: str) -> None:
        """
        :param error_kind: None where it succeeded
        """
        key = (tool, arguments_hash)
        if error_kind is None:
            self._successes += 1
            if side_effect == "read":
                self._calls.pop(key, None)
            else:
                self._calls.clear()  # what failed before may go well now
        elif error_kind not in _NOT_COUNTED:
            failing = self._calls.setdefault(key, _Failing())
            self._calls.move_to_end(key)
            failing.in_a_row = failing.in_a_row + 1 if failing.at == self._successes else 1
            failing.times += 1
            failing.at = self._successes
            if len(self._calls) > MAX_KEPT:
                self._calls.popitem(last=False)

    def before(self, tool: str, arguments_hash: str) -> tuple[int, int]:
        """How often this very call has failed, and how often of that since anything succeeded."""
        failing = self._calls.get((tool, arguments_hash))
        if failing is None:
            return 0, 0
        return failing.times, failing.in_a_row if failing.at == self._successes else 0

    def __bool__(self) -> bool:
        return bool(self._calls)
