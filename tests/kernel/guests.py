"""Processes that join by hand: a bare connection to a kernel's socket, to say what no kernel of ours would say."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from handrail import Kernel, open_kernel
from handrail.contract.codec import write
from handrail.ipc.codec.mirror import Hello
from handrail.ipc.wire.connection import Connection
from handrail.ipc.wire.meeting import connect
from handrail.ipc.wire.operations import Operations
from handrail.kernel.held import HeldKernel
from handrail.kernel.joined import JoinedKernel
from handrail.store.folders import locate
from handrail.store.lease import holder_of

OPENING: dict[str, Any] = {
    "agent": None,
    "headless": True,
    "peer": None,
    "editor": False,
    "topic": None,
    "client": None,
    "rules": [],
    "mode": None,
    "shared": False,
    "interaction": 0,
    "brought": [],
}


def second(folder: Path, **options: Any) -> AbstractAsyncContextManager[Kernel]:
    """Another kernel on the workspace of ``temporary_kernel(folder)``."""
    return open_kernel(folder / "ws", state=folder / "state", config=folder / "config" / "handrail.toml", **options)


@asynccontextmanager
async def joined_kernel(folder: Path, **options: Any) -> AsyncGenerator[JoinedKernel]:
    """The same, which has to have joined."""
    async with second(folder, **options) as kernel:
        assert isinstance(kernel, JoinedKernel)
        yield kernel


def greeting(**more: Any) -> dict[str, Any]:
    return {**write(Hello, Hello("test", "default")), **more}


@asynccontextmanager
async def guest(
    folder: Path, operations: Operations | None = None, hello: dict[str, Any] | None = None
) -> AsyncGenerator[Connection]:
    """A bare connection to whoever holds the workspace of ``temporary_kernel(folder)``."""
    folders = locate(folder / "ws", folder / "state")
    holder = holder_of(folders)
    assert holder is not None
    connection = await connect(folders.own, holder.socket, operations, greeting() if hello is None else hello)
    try:
        yield connection
    finally:
        await connection.aclose("the test ends")


async def opened(connection: Connection, session_id: str, **more: Any) -> str:
    """Open a session over a bare connection."""
    await connection.request("open", {"id": session_id, **OPENING, **more})
    return session_id


def reply_of(connection: Connection, session_id: str, turn: object, *calls: object) -> dict[str, Any]:
    """The body of a reply."""
    return {
        "session": session_id,
        "turn": turn,
        "token": connection.about["token"],
        "generation": connection.about["generation"]["number"],
        "calls": list(calls),
    }


def call(tool: str, arguments: str = "{}") -> list[Any]:
    """A call as it crosses the wire."""
    return [tool, arguments, None, None, "invalid_input"]


def sizes(kernel: HeldKernel) -> dict[str, int]:
    """What a kernel keeps of those who joined, and of its sessions: how many of each."""
    server = kernel.server
    guests = list(server.guests)
    kept = {f"guest.{name}": _count(guests, name) for name in _OF_A_GUEST}
    return {
        **kept,
        "sessions": len(kernel.sessions.by_id),
        "closing": len(kernel.sessions.closing),
        "left": len(server._left),  # pyright: ignore[reportPrivateUsage]
        "ending": len(server._ending),  # pyright: ignore[reportPrivateUsage]
        "guests": len(server.guests),
        "authorities": sum(len(shelf.authorities) for _, shelf in kernel.rooms.shelves.values()),
        "watchers": sum(len(shelf.watchers) for _, shelf in kernel.rooms.shelves.values()),
    }


_OF_A_GUEST: Sequence[str] = ("_sessions", "_watched", "_generations", "_contexts")


def _count(guests: Sequence[object], name: str) -> int:
    found = 0
    for one in guests:
        kept: Sequence[object] = getattr(one, name)
        found += len(kept)
    return found
