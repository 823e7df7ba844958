"""stdin and stdout for an MCP server, read and written on the event loop.

The SDK's own transport reads stdin in a thread, which nothing can wake: a signal would not end the server before
its client hangs up. It also takes lines of any length. Parsing and framing stay the SDK's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import orjson

from handrail.contract.text.json import MAX_ARGUMENT_BYTES, ArgumentText, check_depth

MAX_MESSAGE_BYTES = 2 * MAX_ARGUMENT_BYTES
"""Longer messages are dropped while they arrive; a request is answered with an error."""
_INVALID_PARAMS = -32602
MAX_MESSAGE_DEPTH = 150
"""Deeper messages are not parsed by the SDK, which would leave a request without an answer."""
_ENDS_KEPT = 4096
"""Bytes of each end of an over-long message, where its id is looked for."""
_ID = rb'"id"\s*:\s*(-?\d{1,18}|"[^"\\\x00-\x1f]{1,200}")'
_OTHERS = rb'"(?:jsonrpc|method)"\s*:\s*"[^"\\]{1,200}"'
# Only what is sure to stand in the outermost object: an id inside the params could be that of another request.
_ID_AT_THE_BEGINNING = re.compile(rb"\s*\{\s*(?:" + _OTHERS + rb"\s*,\s*)*" + _ID + rb"\s*[,}]")
_ID_AT_THE_END = re.compile(rb"[\]}\",]\s*,?\s*" + _ID + rb"\s*(?:,\s*" + _OTHERS + rb"\s*)*\}\s*\Z")


@asynccontextmanager
async def wire() -> AsyncGenerator[tuple[Lines, Output] | None]:
    """The two ends of a client on stdin and stdout; until the block ends, stdin is empty and stdout goes to stderr. None
    where the event loop cannot watch them."""
    if sys.platform == "win32" or not (_is_watchable(0) and _is_watchable(1)):
        yield None
        return
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
        output = Output(writer)
        yield Lines(reader, writer.write, output.end_soon), output
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


def _is_watchable(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


class Lines:
    """The lines of a stream as text, none longer than the reader's limit and none deeper than a parser takes.

    :param reply: takes the answer to a request that is not passed on
    :param ended: called when there are no more
    """

    def __init__(
        self, reader: asyncio.StreamReader, reply: Callable[[bytes], None], ended: Callable[[], None] = lambda: None
    ) -> None:
        self._reader = reader
        self._reply = reply
        self._ended = ended
        self._skipped: _Skipped | None = None

    def __aiter__(self) -> Lines:
        return self

    async def __anext__(self) -> str:
        while True:
            try:
                line = await self._reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as ended:
                line = ended.partial
                if not line or self._skipped is not None:
                    self._ended()
                    raise StopAsyncIteration from None
            except asyncio.LimitOverrunError as over:
                piece = await self._reader.readexactly(over.consumed)
                self._skipped = self._skipped or _Skipped(piece[:_ENDS_KEPT])
                self._skipped.add(piece)
                continue
            if self._skipped is not None:
                skipped, self._skipped = self._skipped, None
                skipped.add(line)
                limit = f"at most {MAX_MESSAGE_BYTES:,} are taken. Pass a path to a file instead"
                self._refuse(skipped.head, skipped.tail, f"the message is {skipped.size:,} bytes long; {limit}")
            elif (text := self._checked(line)) is not None:
                return text

    def _checked(self, line: bytes) -> str | None:
        text = line.decode(errors="replace")
        try:
            check_depth(text, MAX_MESSAGE_DEPTH)
        except ArgumentText as error:
            self._refuse(line[:_ENDS_KEPT], line[-_ENDS_KEPT:], f"the parameters {error}")
            return None
        return text

    def _refuse(self, head: bytes, tail: bytes, text: str) -> None:
        """Answer a request that cannot be read. Without an id to be found there is nobody to answer."""
        found = _ID_AT_THE_BEGINNING.match(head) or _ID_AT_THE_END.search(tail)
        if found is not None:
            error = {"code": _INVALID_PARAMS, "message": text}
            answer = {"jsonrpc": "2.0", "id": orjson.Fragment(found.group(1)), "error": error}
            with contextlib.suppress(orjson.JSONEncodeError):
                self._reply(orjson.dumps(answer) + b"\n")


class _Skipped:
    """The ends and the length of a message that is dropped while it arrives."""

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.tail = b""
        self.size = 0

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self.tail = (self.tail + piece[-_ENDS_KEPT:])[-_ENDS_KEPT:]


class Output:
    """A pipe that text is written to, at the pace of its reader.

    :param patience_s: how long a reader that says no more may leave it full
    """

    def __init__(self, writer: asyncio.StreamWriter, patience_s: float = 5.0) -> None:
        self._writer = writer
        self._patience_s = patience_s
        self._bound: float | None = None
        self._flushing: set[asyncio.Timeout] = set()

    async def write(self, text: str) -> None:
        self._writer.write(text.encode(errors="backslashreplace"))

    async def flush(self) -> None:
        """
        :raises OSError: when nobody reads it any more
        """
        try:
            async with asyncio.timeout(self._bound) as bound:
                self._flushing.add(bound)
                try:
                    await self._writer.drain()
                finally:
                    self._flushing.discard(bound)
        except TimeoutError:
            raise BrokenPipeError("the client has hung up, and reads no more") from None

    def end_soon(self) -> None:
        """Whoever reads it says no more: they may have gone and left a pipe that nobody reads."""
        self._bound = self._patience_s
        for bound in self._flushing:
            bound.reschedule(asyncio.get_running_loop().time() + self._patience_s)
