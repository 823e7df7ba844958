"""A port of a sandbox's own loopback behind which one granted address answers, for programs that do not speak HTTP.

A database server speaks its own protocol and knows no proxy. The operator grants the address, and every connection to it is
checked as those of the proxy are.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ConnectionAttempt
from handrail.contract.text.host_names import HostAddress, bracket_host
from handrail.sandbox.network.egress_check import EgressCheck

MAX_CONNECTIONS = 128
_CHUNK_BYTES = 1 << 16


class TcpForwarder:
    """Forwards the connections of one port of a sandbox to one address.

    :param target: the address, with its port
    :param on_attempt: called with each connection once it is allowed or denied
    """

    def __init__(
        self, egress: EgressCheck, target: HostAddress, on_attempt: Callable[[ConnectionAttempt], None] | None = None
    ) -> None:
        self._egress = egress
        self._target = target
        self._on_attempt = on_attempt
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def serve(self, listener: socket.socket) -> None:
        """Accept connections on a non-blocking ``listener`` from now on, and own it."""
        self._accepting = asyncio.create_task(self._accept(listener), name=f"forwards to {self._target}")

    async def aclose(self) -> None:
        """Stop accepting, end every connection, and return when none is left."""
        tasks = [*self._connections, *([self._accepting] if self._accepting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                connection, _ = await loop.sock_accept(listener)
                if len(self._connections) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                task = asyncio.create_task(self._forward(connection))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)

    async def _forward(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            try:
                way = await self._egress.authorize_and_resolve_host(self._target)
                self._report(None)
                far = await self._egress.connect_to_checked_address(way)
            except ToolError as error:
                if error.kind == "denied":
                    self._report(error.text)
                return  # the program sees a connection that closes
            with far:
                await asyncio.gather(_copy(connection, far), _copy(far, connection))

    def _report(self, refused: str | None) -> None:
        if self._on_attempt is not None:
            host = bracket_host(self._target.name)
            self._on_attempt(ConnectionAttempt(host, self._target.port or 0, "TCP", refused))


async def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until the source ends, then end that direction of the target."""
    loop = asyncio.get_running_loop()
    try:
        while piece := await loop.sock_recv(source, _CHUNK_BYTES):
            await loop.sock_sendall(target, piece)
    finally:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
