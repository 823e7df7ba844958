"""The Protocol by which an agent's conversation is stored: messages in order, as plain data."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

Entry = tuple[int, Mapping[str, Any]]
"""A message's position in its session, and the message as JSON-able data. :mod:`handrail.agent.conversation.history` says what is in
it; whoever keeps it need not know."""


class History(Protocol):
    """The messages of one session."""

    async def read(self) -> Sequence[Entry]:
        """All that is kept, by position.

        :raises HandrailError: when it cannot be read
        """
        ...

    def keep(self, entries: Sequence[Entry]) -> Awaitable[None]:
        """Take messages: they are kept soon, and durable once what this gives was awaited, as often as that is. Calls that
        are proposed afterwards by :meth:`~handrail.contract.session.Turn.submit` have no side effects before that.

        The same position again takes the place of what was there, so that a caller who does not know whether it came
        through may repeat it. Secrets are left out.

        :raises LogUnavailable: when awaited, where they cannot be made durable
        """
        ...

    async def attached(self, data: bytes, media_type: str) -> str:
        """Keep what a message brings beside its text, without secrets, and give what the message may name it by.

        :raises LogUnavailable: when it cannot be kept
        """
        ...

    async def attachment(self, ref: str) -> bytes:
        """What :meth:`attached` kept.

        :raises ToolError: where that is not there any more, or damaged
        """
        ...

    async def compacted(self, told: Mapping[str, Any]) -> None:
        """What was said so far is left out of what the model sees from here on: texts that are given once in a conversation
        may be given again. It is recorded.

        :param told: how much is left out and how much is kept, for the record
        :raises HandrailError: when that cannot be kept
        """
        ...

    async def provided(self, about: Mapping[str, Any], content: Any) -> Sequence[str]:
        """Keep what a provider's own tool gave, and that it did: ``content`` without secrets as an artifact, and each part
        of it that is binary as another. Gives their references, in that order.

        :param about: which tool, of which provider, asked for what
        :raises LogUnavailable: when it cannot be kept
        """
        ...
