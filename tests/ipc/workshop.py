"""A kernel whose tools come from the other end of a real socket, both in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from handrail import Kernel, Session
from handrail.contract.approval_requests import ApprovalHandler
from handrail.ipc.client.tool_host import ToolHost, describe_client_tools
from handrail.ipc.server.client_tools import ClientProcessTools
from handrail.ipc.wire.operation_dispatch import OperationTable
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.testing.scripted_kernel import temporary_kernel


@dataclass
class ConnectionPair:
    """:ivar theirs: the joining end of the connection, which executes; ``ours``: the holder's end"""

    theirs: IpcConnection
    ours: IpcConnection
    bench: ToolHost
    brought: ClientProcessTools


@dataclass
class Open(ConnectionPair):
    kernel: Kernel
    session: Session


async def connected() -> tuple[IpcConnection, IpcConnection]:
    """Two ends of one wire that have greeted."""
    loop = asyncio.get_running_loop()
    first, second = socket.socketpair()
    _, theirs = await loop.create_unix_connection(IpcConnection, sock=first)
    _, ours = await loop.create_unix_connection(IpcConnection, sock=second)
    return theirs, ours


@asynccontextmanager
async def joined(tools: Sequence[object]) -> AsyncGenerator[ConnectionPair]:
    """The ends of a connection between two processes. No exception may have gone through the event loop at its end."""
    through_the_loop: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: through_the_loop.append(context))
    theirs, ours = await connected()
    bench = ToolHost(tools)
    theirs.finish_handshake(OperationTable(bench.requests, bench.notifications), {})
    bench.attach_connection(theirs)
    brought = ClientProcessTools(ours, describe_client_tools(tools))
    ours.finish_handshake(OperationTable(brought.requests, brought.notifications), {})
    try:
        yield ConnectionPair(theirs, ours, bench, brought)
    finally:
        await ours.aclose()
        await theirs.closed.wait()
        await bench.aclose()
    assert not through_the_loop


@asynccontextmanager
async def workshop(
    folder: Path,
    *tools: object,
    rules: Sequence[str] = (),
    approval_handler: ApprovalHandler | None = None,
    grace_ms: int = 20,
    also: Sequence[Any] = (),
) -> AsyncGenerator[Open]:
    """A kernel with ``tools`` brought to it, everything of theirs allowed, and a session.

    :param also: tools of the holder's own
    """
    async with joined(tools) as both:
        given = [*both.brought.tools, *also]
        allowed = [f"allow {tool.spec.id}" for tool in given]
        async with temporary_kernel(
            folder, tools=given, rules=[*allowed, *rules], settings=f"[limits]\ngrace_ms = {grace_ms}\n"
        ) as kernel:
            session = await kernel.session(headless=approval_handler is None, approval_handler=approval_handler)
            yield Open(both.theirs, both.ours, both.bench, both.brought, kernel, session)
