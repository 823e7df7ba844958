"""Two ends of a connection for a test: a listener, its clients, and peers that send raw bytes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import orjson

from handrail.ipc.wire.message_frames import FrameReceiveBuffer, Message, encode_frame
from handrail.ipc.wire.operation_dispatch import OperationTable
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.ipc.wire.socket_handshake import (
    PROTOCOL_VERSION,
    SocketListener,
    connect_to_lease_holder,
    listen_on_socket,
)

NAME = "socket"
HELLO = encode_frame({"hello": {"handrail": "0", "protocol": PROTOCOL_VERSION}})


class ListenerFixture:
    """A listener and its peers; :attr:`accepted` yields the holder's end of each connection, in order."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.folder = folder
        self.accepted: asyncio.Queue[IpcConnection] = asyncio.Queue()
        self.listener: SocketListener
        self._stack = stack

    async def join(self, operations: OperationTable | None = None) -> IpcConnection:
        joined = await connect_to_lease_holder(self.folder, NAME, operations)
        self._stack.push_async_callback(joined.aclose)
        return joined

    async def both(self, operations: OperationTable | None = None) -> tuple[IpcConnection, IpcConnection]:
        """The joined end and the holder's."""
        return await self.join(operations), await self.accepted.get()

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new raw connection."""
        reader, writer = await asyncio.open_unix_connection(self.listener.path)
        self._stack.callback(writer.transport.abort)
        return reader, writer

    async def greeted(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, IpcConnection]:
        """A raw peer that has been let in, and the holder's end."""
        reader, writer = await self.raw()
        writer.write(HELLO)
        assert "welcome" in await next_message(reader)
        return reader, writer, await self.accepted.get()


@asynccontextmanager
async def house(
    folder: Path, operations: OperationTable | None = None, **options: Any
) -> AsyncGenerator[ListenerFixture]:
    """A listener in ``folder``. No exception may have gone through the event loop when it ends."""
    folder.mkdir(mode=0o700, exist_ok=True)
    through_the_loop: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: through_the_loop.append(context))
    async with AsyncExitStack() as stack:
        made = ListenerFixture(folder, stack)

        def accept(connection: IpcConnection, hello: Message) -> tuple[OperationTable, Message]:
            made.accepted.put_nowait(connection)
            return operations or OperationTable(), {"greeting": "hi"}

        made.listener = await listen_on_socket(folder, NAME, accept, **options)
        stack.push_async_callback(made.listener.aclose)
        yield made
    assert not through_the_loop


async def next_message(reader: asyncio.StreamReader) -> Message:
    length = int.from_bytes(await reader.readexactly(4), "big")
    return orjson.loads(await reader.readexactly(length))


async def until_closed(reader: asyncio.StreamReader) -> list[Message]:
    """Return the data until the other side closes."""
    data = bytearray()
    try:
        while more := await reader.read(65536):
            data += more
    except ConnectionResetError:
        pass
    return FrameReceiveBuffer().feed_bytes(bytes(data))


@contextmanager
def process(text: str, *arguments: object) -> Generator[subprocess.Popen[str]]:
    """Run Python code in its own process, which ends with the block."""
    started = subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


async def line_of(started: subprocess.Popen[str]) -> str:
    """Return the next line of the process, or its error output if it has ended."""
    assert started.stdout and started.stderr
    line = await asyncio.to_thread(started.stdout.readline)
    assert line, await asyncio.to_thread(started.stderr.read)
    return line.strip()
