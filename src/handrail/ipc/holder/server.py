"""The server for client processes: each has its own contexts and sessions, under the same arbiter.

A lost connection does not abort calls. Proposed calls run to their end and are recorded. After the last call has ended, its
session is suspended, and any process can open it again.
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
"""The maximum time that a shutdown waits for calls of client processes."""
SILENT_S = 1.0
"""The time after which it logs the calls that it waits for."""
_MOST_NAMED = 5
_PATIENCE_S = 5.0
"""The time limit for ending the tools of client processes at shutdown."""


class Server:
    """A server that lets client processes use one kernel."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.guests: set[Guest] = set()
        self.leaving = False
        self._listener: Listener | None = None
        self._left: dict[str, asyncio.Task[None]] = {}
        """By session: the task that waits for its calls after its process has disconnected."""
        self._ending: set[asyncio.Task[None]] = set()
        """The tasks that clean up after processes that have disconnected."""

    async def open(self, folder: Path, name: str) -> None:
        """Start to listen on a socket file in ``folder``.

        :raises StartError: if the socket cannot be created
        """
        self._listener = await listen(folder, name, self._accept)

    async def drain(self) -> None:
        """Accept no more calls from client processes, and wait a limited time for running calls.

        Calls that have not started go to the next lease holder.
        """
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
        """Close all connections. The kernel must have ended their sessions."""
        self.leaving = True
        if self._listener is not None:
            await self._listener.aclose()
        if self._ending:
            _, stuck = await asyncio.wait(self._ending, timeout=_PATIENCE_S)
            for task in stuck:
                task.cancel()

    def _accept(self, connection: Connection, hello: Message) -> tuple[Operations, Message]:
        if self.leaving:
            raise Refused(LEAVING, "The process that holds the workspace is shutting down. Try again.")
        if hello.items() >= ONLY_ANSWERS.items():
            return self._answers(), {}
        guest = Guest(self, connection, hello)
        self.guests.add(guest)
        connection.when_lost(guest.lost)
        return guest.operations, guest.welcome()

    def _answers(self) -> Operations:
        """Return the operations of a process that only answers approval requests.

        An answer is durable when the operation returns. The process reads the outcome from the database.
        """
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
        """Release a client process that has disconnected.

        Its sessions are suspended after their calls have ended. Then its registrations end.
        """
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
        """Wait until no call runs in a session whose client process has disconnected."""
        if (leaving := self._left.get(session_id)) is not None:
            await asyncio.wait((leaving,))

    async def _suspend(self, session: HeldSession) -> None:
        try:
            if session.family.under is not None:  # its model was in that process and cannot receive answers
                await session.suspend(ABORTED, "parent")
                return
            await session.settled()
            await session.suspend("was left by its process; open it again by its id")
        except Exception as error:  # for example a full disk; the end of this process suspends it as well
            logger.warning("cannot suspend session %s: %s", session.id, error)
        finally:
            del self._left[session.id]


def _tell_what_runs(sessions: Iterable[HeldSession]) -> None:
    running = [call for session in sessions for call in session.lane.running.values()]
    if running:
        named = ", ".join(f"{call.tool_id} ({call.id})" for call in running[:_MOST_NAMED])
        more = f" and {len(running) - _MOST_NAMED:,} more" if len(running) > _MOST_NAMED else ""
        logger.warning("shutdown waits at most %g s for calls of other processes: %s%s", _DRAIN_S, named, more)


async def _ended(guest: Guest, leaving: Iterable[asyncio.Task[None]]) -> None:
    for task in leaving:
        await asyncio.wait((task,))
    try:
        await guest.aclose()
    except Exception as error:
        logger.warning("some tools of a client process did not end cleanly: %s", error)
