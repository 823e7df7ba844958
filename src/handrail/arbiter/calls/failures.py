"""Which calls of a session have failed, and how often. Created with the first failure."""

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
    """Counts by tool and arguments, until something in the session changes anything."""

    __slots__ = ("_calls", "_successes", "tools")

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple[str, str], _Failing] = OrderedDict()
        self._successes = 0
        self.tools: set[str] = set()
        """Those of which some call has failed."""

    def failed(self, tool: str, arguments_hash: str, error_kind: str) -> None:
        """A call has ended with an error."""
        if error_kind in _NOT_COUNTED:
            return
        failing = self._calls.setdefault((tool, arguments_hash), _Failing())
        self._calls.move_to_end((tool, arguments_hash))
        self.tools.add(tool)
        failing.in_a_row = failing.in_a_row + 1 if failing.at == self._successes else 1
        failing.times += 1
        failing.at = self._successes
        if len(self._calls) > MAX_KEPT:
            self._calls.popitem(last=False)

    def succeeded(self, tool: str, arguments_hash: str | None) -> None:
        """A call that changes nothing went well.

        :param arguments_hash: None where no call of that tool has failed
        """
        self._successes += 1
        if arguments_hash is not None:
            self._calls.pop((tool, arguments_hash), None)

    def before(self, tool: str, arguments_hash: str) -> tuple[int, int]:
        """How often this very call has failed, and how often of that since anything else succeeded."""
        failing = self._calls.get((tool, arguments_hash))
        if failing is None:
            return 0, 0
        return failing.times, failing.in_a_row if failing.at == self._successes else 0
