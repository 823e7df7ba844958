"""The server for client processes: each has its own contexts and sessions, under the same arbiter.

A lost connection does not abort calls. Proposed calls run to their end and are recorded. After the last call has ended, its
session is suspended, and any process can open it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.session_protocols import StoppedWork
from handrail.ipc.codec.protocol_rpc import make_request_handler, make_request_operation
from handrail.ipc.server.client_process import ClientFacingKernel, ClientProcess
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import LEAVING, OperationTable, RemoteRequestError, logger
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.ipc.wire.socket_handshake import CONTROL_GREETING, SocketListener, listen_on_socket
from handrail.session.local_session import ABORTED, LocalSession

_DRAIN_TIMEOUT_S = 10.0
"""The maximum time that a shutdown waits for calls of client processes."""
DRAIN_LOG_DELAY_S = 1.0
"""The time after which it logs the calls that it waits for."""
_MAX_NAMED = 5
_CLOSE_TIMEOUT_S = 5.0
"""The time limit for ending the tools of client processes at shutdown."""


class IpcServer:
    """A server that lets client processes use one kernel."""

    def __init__(self, host: ClientFacingKernel) -> None:
        self.host = host
        self.clients: set[ClientProcess] = set()
        self.is_shutting_down = False
        self._answering: set[asyncio.Task[Any]] = set()
        """The requests to stop work that are still to be answered."""
        self._listener: SocketListener | None = None
        self._releasing: dict[str, asyncio.Task[None]] = {}
        """By session: the task that waits for its calls after its process has disconnected."""
        self._ending: set[asyncio.Task[None]] = set()
        """The tasks that clean up after processes that have disconnected."""

    async def start_listening(self, folder: Path, name: str) -> None:
        """Start to listen on a socket file in ``folder``.

        :raises StartError: if the socket cannot be created
        """
        self._listener = await listen_on_socket(folder, name, self._accept)

    async def drain_running_calls(self) -> None:
        """Accept no more calls from client processes, and wait a limited time for running calls.

        Calls that have not started go to the next lease holder.
        """
        self.is_shutting_down = True
        sessions = [session for client in self.clients for session in client.sessions]
        for session in sessions:
            session.stop_unstarted_calls()
        log_timer = asyncio.get_running_loop().call_later(DRAIN_LOG_DELAY_S, _log_running_calls, sessions)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                    await asyncio.gather(*(session.wait_until_idle() for session in sessions))
        finally:
            log_timer.cancel()

    async def aclose(self) -> None:
        """Close all connections. The kernel must have ended their sessions."""
        self.is_shutting_down = True
        if self._answering:
            await asyncio.wait(self._answering, timeout=_CLOSE_TIMEOUT_S)
        if self._listener is not None:
            await self._listener.aclose()
        if self._ending:
            _, stuck = await asyncio.wait(self._ending, timeout=_CLOSE_TIMEOUT_S)
            for task in stuck:
                task.cancel()

    def _accept(self, connection: IpcConnection, hello: Message) -> tuple[OperationTable, Message]:
        if self.is_shutting_down:
            raise RemoteRequestError(LEAVING, "The process that holds the workspace is shutting down. Try again.")
        if hello.items() >= CONTROL_GREETING.items():
            return self._control_operations(), {}
        client = ClientProcess(self, connection, hello)
        self.clients.add(client)
        connection.add_loss_callback(client.handle_disconnect)
        return client.operations, client.make_greeting_response()

    def _control_operations(self) -> OperationTable:
        """Return the operations of a process that only answers approval requests or stops work.

        An answer is durable when the operation returns. The process reads the outcome from the database.
        """
        approvals = self.host.approvals

        async def decide(id: str, answer: ApprovalAnswer, by: str) -> None:
            await approvals.decide(id, answer, by=by)

        async def answer(id: str, answers: Sequence[Sequence[str]], by: str) -> None:
            await approvals.answer_questions(id, answers, by=by)

        async def forget(id: str) -> None:
            await approvals.revoke_rule(id)

        async def stop(target: str, by: str) -> StoppedWork:
            # The stopped work can be the last of this process, which then closes: the answer is sent before.
            if (answering := asyncio.current_task()) is not None:
                self._answering.add(answering)
                answering.add_done_callback(self._answering.discard)
            return await self.host.stop_work(target, by)

        handlers = {
            "approvals.decide": decide,
            "approvals.answer": answer,
            "approvals.forget": forget,
            "stop-work": stop,
        }
        return OperationTable(
            {
                name: make_request_operation(
                    name, make_request_handler(asked), is_leaving=lambda: self.is_shutting_down
                )
                for name, asked in handlers.items()
            }
        )

    def release_lost_client(self, client: ClientProcess, sessions: Iterable[LocalSession]) -> None:
        """Release a client process that has disconnected.

        Its sessions are suspended after their calls have ended. Then its registrations end.
        """
        self.clients.discard(client)
        loop = asyncio.get_running_loop()
        leaving: list[asyncio.Task[None]] = []
        for session in sessions:
            task = self._releasing[session.id] = loop.create_task(self._suspend(session))
            leaving.append(task)
        ending = loop.create_task(_close_client(client, leaving))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def wait_for_orphaned_calls(self, session_id: str) -> None:
        """Wait until no call runs in a session whose client process has disconnected."""
        if (leaving := self._releasing.get(session_id)) is not None:
            await asyncio.wait((leaving,))

    async def _suspend(self, session: LocalSession) -> None:
        try:
            if session.tree_node.parent_ref is not None:  # its model was in that process and cannot receive answers
                await session.suspend(ABORTED, "parent")
                return
            await session.wait_until_idle()
            await session.suspend("was left by its process. Open it again by its id.")
        except Exception as error:  # for example a full disk; the end of this process suspends it as well
            logger.warning("cannot suspend session %s: %s", session.id, error)
        finally:
            del self._releasing[session.id]


def _log_running_calls(sessions: Iterable[LocalSession]) -> None:
    running = [call for session in sessions for call in session.lane.running_calls.values()]
    if running:
        named = ", ".join(f"{call.tool_id} ({call.id})" for call in running[:_MAX_NAMED])
        more = f" and {len(running) - _MAX_NAMED:,} more" if len(running) > _MAX_NAMED else ""
        logger.warning("shutdown waits for calls of other processes, at most %g s: %s%s", _DRAIN_TIMEOUT_S, named, more)


async def _close_client(client: ClientProcess, leaving: Iterable[asyncio.Task[None]]) -> None:
    for task in leaving:
        await asyncio.wait((task,))
    try:
        await client.aclose()
    except Exception as error:
        logger.warning("some tools of a client process did not end cleanly: %s", error)
