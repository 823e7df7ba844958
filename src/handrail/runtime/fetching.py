"""One HTTP exchange over a connection that is already checked: sent strictly, read with bounds, decoded with bounds."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence

import h11

from handrail.contract.errors import ToolError
from handrail.contract.text.excerpts import excerpt

MAX_HEAD_BYTES = 64 * 1024
_PIECE = 1 << 16
_STEP = 1 << 20
"""How much a compressed body may grow before others get their turn."""
_MOST_INTERIM = 8
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_OURS = frozenset(
    (
        "host",
        "connection",
        "content-length",
        "transfer-encoding",
        "accept-encoding",
        "expect",
        "upgrade",
        "te",
        "trailer",
        "keep-alive",
        "proxy-connection",
        "proxy-authorization",
    )
)

Fields = list[tuple[str, str]]


def fault_in_method(method: str) -> str | None:
    if not _TOKEN.fullmatch(method) or method.upper() in ("CONNECT", "TRACE"):
        return f"{excerpt(method, 40)} is no method to fetch with; use GET, POST or another one of HTTP"
    return None


def fault_in_field(name: str, value: str) -> str | None:
    """Why a tool cannot send this header field, or None."""
    if not _TOKEN.fullmatch(name):
        return f"{excerpt(name, 100)} is no name of a header field"
    if name.lower() in _OURS:
        return f"the header field {name!r} is written by the runtime; leave it out"
    if not _VALUE.fullmatch(value) or value != value.strip():
        return f"the value of the header field {name!r} has characters in it that none can have"
    return None


class Exchange:
    """One request and its answer. The connection is of no use afterwards."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def ask(self, method: str, target: str, fields: Sequence[tuple[str, str]], body: bytes) -> h11.Response:
        """Send the request and give the head of its answer.

        :raises ToolError: ``backend`` when the server does not keep to the protocol
        """
        try:
            head = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
            out = self._http.send(h11.Request(method=method, target=target, headers=head))
            out = (out or b"") + ((self._http.send(h11.Data(data=body)) or b"") if body else b"")
            self._writer.write(out + (self._http.send(h11.EndOfMessage()) or b""))
            await self._writer.drain()
            for _ in range(_MOST_INTERIM):
                event = await self._event()
                if isinstance(event, h11.Response):
                    return event
                if not isinstance(event, h11.InformationalResponse) or event.status_code == 101:
                    break
        except h11.ProtocolError as error:
            raise _backend(f"the server's answer is no HTTP: {error}") from None
        except (ConnectionError, OSError) as error:
            raise _backend(f"the connection broke: {error.strerror or error}") from None
        raise _backend("the server ended the connection without an answer")

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, still encoded.

        :raises ToolError: ``backend`` when it ends before its end
        """
        try:
            while not isinstance(event := await self._event(), (h11.EndOfMessage, h11.ConnectionClosed)):
                if isinstance(event, h11.Data):
                    yield bytes(event.data)
        except h11.ProtocolError as error:
            raise _backend(f"the server's answer is cut, or no HTTP: {error}") from None
        except (ConnectionError, OSError) as error:
            raise _backend(f"the connection broke: {error.strerror or error}") from None

    async def _event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_PIECE))
        return event


class Body:
    """Gathers a decoded body up to a bound, however little of it was sent.

    :param coding: the answer's Content-Encoding
    :param on_piece: told each kept piece
    :raises ToolError: ``backend`` for a coding that was not offered
    """

    def __init__(self, coding: str, max_bytes: int, on_piece: Callable[[bytes], None] | None = None) -> None:
        self._inflate = _Inflate(coding) if coding not in ("", "identity") else None
        self._max_bytes = max_bytes
        self._on_piece = on_piece
        self._raw_left = max_bytes + max_bytes // 8 + (1 << 16)
        self._kept = bytearray()
        self.more = False
        """Whether there was more than was kept."""

    async def gather(self, pieces: AsyncGenerator[bytes, None]) -> bytes:
        """
        :raises ToolError: ``backend`` for data that is not what it says, ``limit`` where it grows by nothing for ever
        """
        try:
            async for piece in pieces:
                self._raw_left -= len(piece)
                if self._inflate is None:
                    self._keep(piece)
                else:
                    await self._inflated(self._inflate, piece)
                if self.more:
                    break
                if self._raw_left < 0:
                    raise ToolError("the server sends compressed data without end and without content", kind="limit")
        finally:
            await pieces.aclose()
        if self._inflate is not None and not self.more and not self._inflate.complete:
            raise _backend("the compressed answer is cut before its end")
        return bytes(self._kept)

    async def _inflated(self, inflate: _Inflate, piece: bytes) -> None:
        while piece and not self.more:
            room = self._max_bytes - len(self._kept) + 1
            out, piece = inflate.step(piece, min(room, _STEP))
            self._keep(out)
            await asyncio.sleep(0)

    def _keep(self, data: bytes) -> None:
        kept = data[: self._max_bytes - len(self._kept)]
        self.more = self.more or len(kept) < len(data)
        self._kept += kept
        if kept and self._on_piece is not None:
            self._on_piece(kept)


class _Inflate:
    """gzip (also of several members) or deflate (also raw), a bounded step at a time."""

    def __init__(self, coding: str) -> None:
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise _backend(f"the server answered in the coding {excerpt(coding, 40)}, which was not asked for")
        self._gzip = coding != "deflate"
        self._inflate = zlib.decompressobj(31 if self._gzip else 15)
        self._begun = False
        self.complete = False

    def step(self, data: bytes, most: int) -> tuple[bytes, bytes]:
        """At most ``most`` bytes of content, and what is left of ``data``."""
        if self.complete:
            if not self._gzip or data[:1] != b"\x1f":
                return b"", b""  # padding after the end
            self._inflate, self.complete = zlib.decompressobj(31), False
        try:
            out = self._inflate.decompress(data, max(most, 1))
        except zlib.error as error:
            if self._gzip or self._begun:
                raise _backend(f"the compressed answer is damaged: {error}") from None
            self._inflate = zlib.decompressobj(-15)
            self._begun = True
            return self.step(data, most)
        self._begun = True
        self.complete = self._inflate.eof
        return out, self._inflate.unused_data if self.complete else self._inflate.unconsumed_tail


def _backend(text: str) -> ToolError:
    return ToolError(text, kind="backend")
