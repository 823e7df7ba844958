"""stdin and stdout for an MCP server, read and written on the event loop.

The SDK's own transport reads stdin in a thread, which nothing can wake: a signal would not end the server before
its client hangs up. It also takes lines of any length. Parsing and framing stay the SDK's.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from mcp.server.stdio import stdio_server

from handrail.contract.jsontext import MAX_ARGUMENT_BYTES

if TYPE_CHECKING:
    import anyio

MAX_MESSAGE_BYTES = 2 * MAX_ARGUMENT_BYTES
"""Longer messages are dropped while they arrive and answered as a parse error."""
_NO_MESSAGE = "over-long"  # not JSON, so the SDK answers it as what it is


def streams() -> AbstractAsyncContextManager[tuple[Any, Any]]:
    """The two streams for ``Server.run``. Until the block ends, stdin is empty and stdout goes to stderr."""
    if sys.platform == "win32" or not (_is_watchable(0) and _is_watchable(1)):
        return stdio_server()
    return _on_the_loop()


def _is_watchable(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


@asynccontextmanager
async def _on_the_loop() -> AsyncGenerator[tuple[Any, Any]]:
    loop = asyncio.get_running_loop()
    sys.stdout.flush()
    wire_in, wire_out = os.dup(0), os.dup(1)
    blocking_in, blocking_out = os.get_blocking(wire_in), os.get_blocking(wire_out)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    transports: list[asyncio.BaseTransport] = []
    try:
        reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        incoming, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(os.dup(wire_in), "rb", buffering=0))
        transports.append(incoming)
        flow = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        outgoing, _ = await loop.connect_write_pipe(lambda: flow, os.fdopen(os.dup(wire_out), "wb", buffering=0))
        transports.append(outgoing)
        writer = asyncio.StreamWriter(outgoing, flow, None, loop)
        async with stdio_server(
            cast("anyio.AsyncFile[str]", Lines(reader)), cast("anyio.AsyncFile[str]", Output(writer))
        ) as both:
            yield both
    finally:
        for transport in transports:
            transport.close()
        # The descriptions may be shared with a shell that goes on after us.
        os.set_blocking(wire_in, blocking_in)
        os.set_blocking(wire_out, blocking_out)
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        os.close(wire_in)
        os.close(wire_out)


class Lines:
    """The lines of a stream as text, none longer than the reader's limit."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._skipping = False

    def __aiter__(self) -> Lines:
        return self

    async def __anext__(self) -> str:
        while True:
            try:
                line = await self._reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as ended:
                line = ended.partial
                if not line or self._skipping:
                    raise StopAsyncIteration from None
            except asyncio.LimitOverrunError as over:
                await self._reader.readexactly(over.consumed)
                self._skipping = True
                continue
            if self._skipping:
                self._skipping = False
                return _NO_MESSAGE
            return line.decode(errors="replace")


class Output:
    """A pipe that text is written to, at the pace of its reader."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def write(self, text: str) -> None:
        self._writer.write(text.encode(errors="backslashreplace"))

    async def flush(self) -> None:
        await self._writer.drain()
