"""Notices: what a session's agent hears outside of its calls' answers, such as a job that ended or a trigger that fired.

A notice is durable and is taken once. It is data for a model, never an order of the user's: whoever shows it to a model says
what it is and where it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

NoticeKind = Literal["job", "agent", "trigger", "message"]
"""A job ended; a sub-agent did; a trigger fired; something came over a channel."""

MAX_PENDING = 10_000
"""Notices that may wait in one session."""


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to be told.

    :param id: of the delivery, unique in the workspace: the same one twice is told once
    :param source: the job's id, the trigger's name, the channel
    :param text: as its model reads it, with no secret in it and nothing that could act
    :param at_ns: wall-clock time
    :param untrusted: where the text comes from, where that is not the operator or the user
    """

    id: str
    session_id: str
    kind: NoticeKind
    source: str
    text: str
    at_ns: int
    data: Mapping[str, Any] | None = None
    untrusted: str | None = None


class Notices(Protocol):
    """What waits to be told in one session, for whoever runs its agent."""

    async def pending(self) -> Sequence[Notice]:
        """Those that nobody has taken, in the order in which they came; of very many the first.

        :raises LogUnavailable: when the store cannot tell
        """
        ...

    async def take(self, ids: Sequence[str]) -> None:
        """They are part of the conversation now. Durable on return; again is nothing.

        :raises LogUnavailable: when that cannot be made durable
        """
        ...

    async def arrived(self) -> None:
        """Return when there is one that nobody has taken; at once where there is."""
        ...

    async def awaited(self) -> bool:
        """Likewise, and give True; give False as soon as there is none, and nothing runs in this session that will leave
        one."""
        ...


class NoticeBox(Notices, Protocol):
    """The same, as those see it who have something to tell."""

    async def post(self, notice: Notice) -> None:
        """Leave ``notice``, whichever session it is for. Durable on return; one that was left before is not left again.

        :raises UsageError: when :data:`MAX_PENDING` wait in that session
        :raises LogUnavailable: when it cannot be made durable
        """
        ...

    def expect(self, source: str) -> None:
        """Something runs that will leave one, such as a job by its id: an agent that works until it is idle waits for it."""
        ...

    def forget(self, source: str) -> None:
        """It will not after all. That it has left one needs no word."""
        ...
