"""Processes with a bare connection to a kernel's socket, which send what no kernel of ours would send."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from handrail import Kernel, open_kernel
from handrail.contract.json_codec import write
from handrail.ipc.codec.wire_encoding import ClientGreeting
from handrail.ipc.wire.operation_dispatch import OperationTable
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.ipc.wire.socket_handshake import connect_to_lease_holder
from handrail.kernel.local_kernel import LocalKernel
from handrail.kernel.remote_kernel import RemoteKernel
from handrail.store.lease import find_lease_holder
from handrail.store.state_folders import locate_folders

OPENING: dict[str, Any] = {
    "agent": None,
    "headless": True,
    "client": None,
    "editor": False,
    "client_info": None,
    "topic": None,
    "user_context": None,
    "rules": [],
    "mode": None,
    "shared": False,
    "interaction": 0,
    "loaded_tools": [],
}


def second(folder: Path, **options: Any) -> AbstractAsyncContextManager[Kernel]:
    """Another kernel on the workspace of ``temporary_kernel(folder)``."""
    return open_kernel(folder / "ws", state=folder / "state", config=folder / "config" / "handrail.toml", **options)


@asynccontextmanager
async def joined_kernel(folder: Path, **options: Any) -> AsyncGenerator[RemoteKernel]:
    """The same, which has to have joined."""
    async with second(folder, **options) as kernel:
        assert isinstance(kernel, RemoteKernel)
        yield kernel


def greeting(**more: Any) -> dict[str, Any]:
    return {**write(ClientGreeting, ClientGreeting("test", "default")), **more}


@asynccontextmanager
async def guest(
    folder: Path, operations: OperationTable | None = None, hello: dict[str, Any] | None = None
) -> AsyncGenerator[IpcConnection]:
    """A bare connection to the lease holder of ``temporary_kernel(folder)``."""
    folders = locate_folders(folder / "ws", folder / "state")
    holder = find_lease_holder(folders)
    assert holder is not None
    connection = await connect_to_lease_holder(
        folders.workspace_state_folder, holder.socket, operations, greeting() if hello is None else hello
    )
    try:
        yield connection
    finally:
        await connection.aclose("the test ends")


async def opened(connection: IpcConnection, session_id: str, **more: Any) -> str:
    """Open a session over a bare connection."""
    await connection.request("open", {"id": session_id, **OPENING, **more})
    return session_id


def reply_of(connection: IpcConnection, session_id: str, turn: object, *calls: object) -> dict[str, Any]:
    """The body of a reply."""
    return {
        "session": session_id,
        "turn": turn,
        "token": connection.peer_greeting["token"],
        "generation": connection.peer_greeting["generation"]["number"],
        "calls": list(calls),
    }


def call(tool: str, arguments: str = "{}") -> list[Any]:
    """A call as it crosses the wire."""
    return [tool, arguments, None, None, "invalid_input", None]


def sizes(kernel: LocalKernel) -> dict[str, int]:
    """Return how many objects a kernel keeps for its clients and sessions."""
    server = kernel.server
    guests = list(server.clients)
    kept = {f"guest.{name}": _count(guests, name) for name in _OF_A_GUEST}
    return {
        **kept,
        "sessions": len(kernel.sessions.sessions_by_id),
        "closing": len(kernel.sessions.closing_session_ids),
        "left": len(server._releasing),  # pyright: ignore[reportPrivateUsage]
        "ending": len(server._ending),  # pyright: ignore[reportPrivateUsage]
        "guests": len(server.clients),
        "authorities": sum(len(shelf.authorities) for _, shelf in kernel.components.shared_shelves.values()),
        "watchers": sum(len(shelf.watchers) for _, shelf in kernel.components.shared_shelves.values()),
    }


_OF_A_GUEST: Sequence[str] = ("_sessions", "_watched", "_generations", "_contexts")


def _count(guests: Sequence[object], name: str) -> int:
    found = 0
    for one in guests:
        kept: Sequence[object] = getattr(one, name)
        found += len(kept)
    return found
