"""Notifications, channels and triggers of a lease holder on a real store, with a fixed clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.contract.services.channels_and_triggers import Notification
from handrail.session.inbound.channel_broker import ChannelBroker, SessionChannels, WorkspaceNotifications
from handrail.session.inbound.trigger_scheduler import SessionTriggers, TriggerScheduler
from handrail.store.workspace_store import WorkspaceStore

SECOND = 1_000_000_000


@dataclass
class Clock:
    """A clock that is set by hand."""

    now: int = int(datetime(2026, 3, 2, 8, 0).timestamp()) * SECOND

    def __call__(self) -> int:
        return self.now


class InboundFixture:
    """The channels and triggers of a lease holder, on a real store."""

    def __init__(self, store: WorkspaceStore, clock: Clock, outcomes: Mapping[str, bool | None]) -> None:
        redactor = SecretRedactor()
        self.store = store
        self.board = WorkspaceNotifications(store.notifications, redactor)
        self.switchboard = ChannelBroker(store.channels, redactor, clock, outcomes.get)
        self.clockwork = TriggerScheduler(store.triggers, self.board, self.switchboard, redactor, clock)

    def channels(self, session: str, top: str | None = None, agent: str = "default") -> SessionChannels:
        return SessionChannels(self.switchboard, session, top or session, agent)

    def triggers(self, session: str) -> SessionTriggers:
        return SessionTriggers(self.clockwork, session, self.channels(session))

    async def told(self, session: str) -> list[Notification]:
        return list(await self.board.attach_session(session).list_pending())


@asynccontextmanager
async def place(
    folder: Path, clock: Clock | None = None, outcomes: Mapping[str, bool | None] = MappingProxyType({})
) -> AsyncGenerator[InboundFixture]:
    (folder / "ws").mkdir(exist_ok=True)
    store = await asyncio.to_thread(WorkspaceStore.open, folder / "ws", folder / "state")
    there = InboundFixture(store, clock or Clock(), outcomes)
    try:
        yield there
    finally:
        await there.clockwork.aclose()
        await store.aclose()
