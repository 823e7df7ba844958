"""All that reaches a workspace's sessions from outside of their turns: notices, channels, triggers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from handrail.arbiter.calls.call import Lane
from handrail.arbiter.secrets.redaction import Redactor
from handrail.contract.tool.triggers import TriggerTool
from handrail.record.reading import LogReader
from handrail.session.arrivals.channels import SessionChannels, Switchboard
from handrail.session.arrivals.notices import Noticeboard
from handrail.session.arrivals.triggers import Clockwork, SessionTriggers
from handrail.session.past.transcript import SessionTranscript
from handrail.session.session import HeldSession
from handrail.store.database.connection import readable
from handrail.store.database.database import Database
from handrail.store.opening import Store


class Arrivals:
    """In the process that holds the workspace."""

    def __init__(self, store: Store, redactor: Redactor, clock: Callable[[], int] = time.time_ns) -> None:
        self.notices = Noticeboard(store.notices, redactor)
        self.channels = Switchboard(store.channels, redactor, clock, partial(_went_well, store.database))
        self.triggers = Clockwork(store.triggers, self.notices, self.channels, redactor, clock)
        self._database = store.database
        self._begun = False
        self._beginning = asyncio.Lock()

    async def enter(self, session: HeldSession, lane: Lane, top: str) -> None:
        """A session is open. With the first one the triggers of all go on.

        :param top: the session at the top of its tree
        """
        session.notices = lane.notices = self.notices.of(session.id)
        lane.around.transcript = SessionTranscript(session.id, self._database)
        channels = lane.channels = SessionChannels(self.channels, session.id, top, lane.around.agent)
        triggers = lane.triggers = SessionTriggers(
            self.triggers, session.id, channels, session.workdir, partial(_class_of, session)
        )
        await self._begin()
        await triggers.take_up()

    async def _begin(self) -> None:
        """Have the triggers of all go on. Whoever is cut off in it leaves it to the next, and who comes meanwhile waits."""
        async with self._beginning:
            if not self._begun:
                await self.triggers.begin()
                self._begun = True

    def leave(self, session_id: str) -> None:
        """It is not open any more. What waits for it stays."""
        self.notices.forget(session_id)

    async def end(self, session_id: str) -> None:
        """A sub-agent has ended: nobody would hear what its triggers tell, and what they would take is others' to read."""
        for trigger in self.triggers.of(session_id):
            await self.triggers.remove(session_id, trigger.name)
        await self.triggers.remove_all(session_id)  # what a call that was cut off was adding meanwhile

    async def discard(self, session_id: str) -> None:
        """It is closed for good."""
        await self.triggers.remove_all(session_id)
        await self.channels.remove(session_id)

    async def aclose(self) -> None:
        await self.triggers.aclose()
        await self.channels.aclose()


def _class_of(session: HeldSession, tool_id: str) -> TriggerTool | None:
    """The class of triggers that a tool of a session is, where it may run here."""
    entry = session.generation.entries.get(tool_id)
    return entry.tool if entry is not None and entry.withheld is None and isinstance(entry.tool, TriggerTool) else None


def _went_well(database: Database, call_id: str) -> bool | None:
    """Whether a call did, by the log; None where that does not say."""
    with readable(database.path):
        outcome = LogReader(database.reading).outcome_of(call_id)
    if outcome is None:
        return None
    result: Any = (outcome.body or {}).get("result")
    return outcome.kind == "committed" and not (isinstance(result, dict) and cast("Any", result).get("type") == "error")
