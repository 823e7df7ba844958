"""The holder's side of joining: each process that joined has contexts and sessions of its own, under the one arbiter.

A dropped connection is no abort. Calls that were proposed go on to their end and are recorded; the sessions they
belong to are suspended once the last has ended, and can be opened again by whoever joins next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from handrail.contract.approvals import ApprovalAnswer
from handrail.ipc.codec.interfaces import op_of, request
from handrail.ipc.holder.guest import Guest, Host
from handrail.ipc.wire.connection import Connection
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.meeting import ONLY_ANSWERS, Listener, listen
from handrail.ipc.wire.operations import LEAVING, Operations, Refused, logger
from handrail.session.session import ABORTED, HeldSession

_DRAIN_S = 10.0
"""How long the end of a holder waits for calls of others."""
SILENT_S = 1.0
"""How long it waits before it logs what it is waiting for."""
_MOST_NAMED = 5
_PATIENCE_S = 5.0
"""How long tools that processes brought may take to end when the holder ends."""


class Server:
    """Lets processes join one kernel."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.guests: set[Guest] = set()
        self.leaving = False
        self._listener: Listener | None = None
        self._left: dict[str, asyncio.Task[None]] = {}
        """Session to the task that waits for its calls, when its process is gone while they still run."""
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that end what is left of processes that are gone."""

    async def open(self, folder: Path, name: str) -> None:
        """:raises StartError: when no socket can be made"""
        self._listener = await listen(folder, name, self._accept)

    async def drain(self) -> None:
        """Start nothing more for processes that joined, and let what has started come to its end, within bounds. Calls that
        had not started go to the next holder."""
        self.leaving = True
        sessions = [session for guest in self.guests for session in guest.sessions]
        for session in sessions:
            session.hand_on()
        said = asyncio.get_running_loop().call_later(SILENT_S, _tell_what_runs, sessions)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    await asyncio.gather(*(session.settled() for session in sessions))
        finally:
            said.cancel()

    async def aclose(self) -> None:
        """Close all connections. Their sessions have been ended before, by the end of the kernel."""
        self.leaving = True
        if self._listener is not None:
            await self._listener.aclose()
        if self._ending:
            _, stuck = await asyncio.wait(self._ending, timeout=_PATIENCE_S)
            for task in stuck:
                task.cancel()

    def _accept(self, connection: Connection, hello: Message) -> tuple[Operations, Message]:
        if self.leaving:
            raise Refused(LEAVING, "the process that holds the workspace is ending; try again")
        if hello.items() >= ONLY_ANSWERS.items():
            return self._answers(), {}
        guest = Guest(self, connection, hello)
        self.guests.add(guest)
        connection.when_lost(guest.lost)
        return guest.operations, guest.welcome()

    def _answers(self) -> Operations:
        """What a process may ask for that only answers requests. Each is durable when it is answered; what became of it stands
        in the database."""
        desk = self.host.approvals

        async def decide(id: str, answer: ApprovalAnswer, by: str) -> None:
            await desk.decide(id, answer, by=by)

        async def answer(id: str, answers: Sequence[Sequence[str]], by: str) -> None:
            await desk.answer(id, answers, by=by)

        async def forget(id: str) -> None:
            await desk.forget_rule(id)

        handlers = {"approvals.decide": decide, "approvals.answer": answer, "approvals.forget": forget}
        return Operations(
            {name: op_of(name, request(asked), is_leaving=lambda: self.leaving) for name, asked in handlers.items()}
        )

    def leave(self, guest: Guest, sessions: Iterable[HeldSession]) -> None:
        """The process is gone: let the calls of its sessions end, then suspend them and end what it brought."""
        self.guests.discard(guest)
        loop = asyncio.get_running_loop()
        leaving: list[asyncio.Task[None]] = []
        for session in sessions:
            task = self._left[session.id] = loop.create_task(self._suspend(session))
            leaving.append(task)
        ending = loop.create_task(_ended(guest, leaving))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def is_left(self, session_id: str) -> None:
        """Wait until nothing runs any more in a session whose process was lost."""
        if (leaving := self._left.get(session_id)) is not None:
            await asyncio.wait((leaving,))

    async def _suspend(self, session: HeldSession) -> None:
        try:
            if session.family.under is not None:  # its model was there, so nobody takes its answers
                await session.suspend(ABORTED, "parent")
                return
            await session.settled()
            await session.suspend("was left by the process that had it open; open it again by its id")
        except Exception as error:  # as when the disk is full: the end of this process suspends it, too
            logger.warning("session %s could not be suspended: %s", session.id, error)
        finally:
            del self._left[session.id]


def _tell_what_runs(sessions: Iterable[HeldSession]) -> None:
    running = [call for session in sessions for call in session.lane.running.values()]
    if running:
        named = ", ".join(f"{call.tool_id} ({call.id})" for call in running[:_MOST_NAMED])
        more = f" and {len(running) - _MOST_NAMED:,} more" if len(running) > _MOST_NAMED else ""
        logger.warning("ending waits for calls of other processes, at most %g s: %s%s", _DRAIN_S, named, more)


async def _ended(guest: Guest, leaving: Iterable[asyncio.Task[None]]) -> None:
    for task in leaving:
        await asyncio.wait((task,))
    try:
        await guest.aclose()
    except Exception as error:
        logger.warning("some tools of a process that joined did not end cleanly: %s", error)
