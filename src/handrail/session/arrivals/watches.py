"""Triggers that watch a channel: each message of it is told to their session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from handrail.contract.doors.channels import ChannelMessage, Trigger
from handrail.contract.text.neutral import neutralised
from handrail.session.arrivals.channels import SessionChannels
from handrail.store.tables.channels import Kept


class Teller(Protocol):
    """Who tells a session that one of its triggers has fired."""

    clock: Callable[[], int]

    async def tell(self, trigger: Trigger, delivery: str, now: int, *, about: str, **more: Any) -> bool: ...


class Watch:
    """A trigger that takes the messages of a channel; see :class:`~handrail.session.arrivals.channels.Watcher`."""

    def __init__(self, teller: Teller, trigger: Trigger, channels: SessionChannels) -> None:
        assert trigger.channel is not None
        self._teller = teller
        self._trigger = trigger
        self.key = channels.key(trigger.channel)

    @property
    def reader(self) -> str:
        return f"trigger/{self._trigger.session_id}/{self._trigger.name}"

    def wants(self, message: ChannelMessage) -> bool:
        return self._trigger.sender in (None, message.sender)

    async def take(self, kept: Kept) -> bool:
        message = kept.message
        return await self._teller.tell(
            self._trigger,
            f"message/{kept.number}",
            self._teller.clock(),
            about=f"A message came over {message.channel}, which the trigger {self._trigger.name} watches",
            message=f"{neutralised(message.sender)}: {neutralised(message.text)}",
            untrusted=f"a message of the agent {message.sender}",
        )
