"""A server of the tour's own, on the loopback interface, that nobody in a sandbox may reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress


class Listener:
    """Counts who connects."""

    def __init__(self) -> None:
        self.accepted = 0
        self.port = 0
        self._came = asyncio.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @staticmethod
    @asynccontextmanager
    async def open() -> AsyncGenerator[Listener]:
        """Listen, and see that a connection from here is counted: otherwise counting none would prove nothing.

        :raises OSError: where the loopback interface is down
        """
        listener = Listener()
        server = await asyncio.start_server(listener._accept, "127.0.0.1", 0)
        async with server:
            listener.port = server.sockets[0].getsockname()[1]
            _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            await listener._came.wait()
            writer.close()
            listener.accepted = 0
            yield listener

    async def _accept(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._came.set()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
