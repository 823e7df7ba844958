"""The only way out of a sandbox: an HTTP proxy on the host's side, which authorises every request and every tunnel.

``CONNECT host:port`` opens a tunnel. A request with a whole ``http://`` URL is made once and its connection closed; a
redirect is simply the client's next request. :class:`~handrail.sandbox.network.egress.Egress` checks each of them, and all
data that leaves through a tunnel. A refusal is a ``403`` with the reason and the next step.

In a tunnel the TLS hello must name the host that the tunnel was opened to; on port 443 there must be one. Open: inside TLS
(and in a tunnel to another port that is not TLS) a request may name another site of the same server.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Attempt
from handrail.contract.text.hosts import Host, bracketed, read_host, read_url
from handrail.sandbox.network import heads
from handrail.sandbox.network.egress import Egress
from handrail.sandbox.network.heads import Malformed, RequestHead

_PIECE = 1 << 16
TLS_PORT = 443
_MOST_INTERIM = 8
"""The limit of interim heads before the final response."""


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    """The limits of one proxy.

    ``head_s`` limits how long a head or hello may take, ``idle_s`` how long a connection may carry nothing.
    """

    head_s: float = 20.0
    idle_s: float = 300.0
    connections: int = 128
    bytes_out: int = 4 * 1024**3
    """For all connections together, as is ``bytes_in``. Connections end at the limit."""
    bytes_in: int = 16 * 1024**3


class _Refused(Exception):
    """An error that is answered with this HTTP status and text."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Ends(NamedTuple):
    """A connection: its reader and its writer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(slots=True)
class _Activity:
    """The time of the last transfer of a tunnel."""

    at: float


class _Over(Exception):
    """An error that ends the connection without an answer."""


class Proxy:
    """An HTTP proxy for one sandbox, with the rights of that sandbox alone.

    :param on_attempt: called with each requested host once it is allowed or denied
    """

    def __init__(
        self,
        egress: Egress,
        on_attempt: Callable[[Attempt], None] | None = None,
        limits: ProxyLimits | None = None,
    ) -> None:
        self._egress = egress
        self._on_attempt = on_attempt
        self._limits = limits or ProxyLimits()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.bytes_out = 0
        self.bytes_in = 0

    async def serve(self, listener: socket.socket) -> None:
        """Start to accept connections on ``listener``, and own it."""
        self._server = await asyncio.start_server(self._accepted, sock=listener, limit=heads.MAX_HEAD_BYTES)

    async def aclose(self) -> None:
        """Stop accepting, end every connection, and return when none is left."""
        if self._server is not None:
            self._server.close()
        while self._connections:
            for task in self._connections:
                task.cancel()
            await asyncio.wait(self._connections)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._server is None or not self._server.is_serving() or len(self._connections) >= self._limits.connections:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            await self._handled(Ends(reader, writer))
            writer.close()
            async with asyncio.timeout(self._limits.head_s):
                await writer.wait_closed()
        except (_Over, Malformed, OSError, asyncio.CancelledError):
            pass  # the client is not there any more
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _handled(self, here: Ends) -> None:
        try:
            request = heads.read_request(await self._head(here, self._limits.head_s))
        except Malformed as error:
            text = f"The request could not be read: {error}. Send a valid HTTP/1.1 request."
            await self._answer(here, _Refused(HTTPStatus.BAD_REQUEST, text))
            return
        try:
            if request.method == "CONNECT":
                await self._tunnel(request, here)
            else:
                await self._forward(request, here)
        except _Refused as refused:
            await self._answer(here, refused)

    async def _head(self, ends: Ends, limit_s: float) -> bytes:
        try:
            async with asyncio.timeout(limit_s):
                return await ends.reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise Malformed(f"the head is longer than {heads.MAX_HEAD_BYTES} bytes") from None
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise Malformed("the head is incomplete") from None
            raise _Over from None

    async def _reached(self, method: str, host: Host) -> Ends:
        """Connect to ``host`` after it was authorised and checked."""
        try:
            way = await self._egress.way(host)
        except ToolError as error:
            self._tell(method, host, error.text)
            status = HTTPStatus.BAD_GATEWAY if error.kind == "backend" else HTTPStatus.FORBIDDEN
            raise _Refused(status, error.text) from None
        self._tell(method, host, None)
        try:
            connection = await self._egress.dial(way)
        except ToolError as error:
            raise _Refused(HTTPStatus.BAD_GATEWAY, error.text) from None
        return Ends(*await asyncio.open_connection(sock=connection, limit=heads.MAX_HEAD_BYTES))

    def _tell(self, method: str, host: Host, refused: str | None) -> None:
        if self._on_attempt is not None:
            self._on_attempt(Attempt(bracketed(host.name), host.port or 0, method, refused))

    async def _answer(self, here: Ends, refused: _Refused) -> None:
        body = f"handrail: {refused.text}\n".encode("utf-8", "replace")
        line = f"HTTP/1.1 {refused.status.value} {refused.status.phrase}".encode()
        fields = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await self._send(here, heads.written(line, fields) + body)

    # ── tunnels ──────────────────────────────────────────────────────────────────────────────────

    async def _tunnel(self, request: RequestHead, here: Ends) -> None:
        try:
            host = read_host(request.target)
        except ValueError as error:
            raise _Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
        if host.port is None:
            text = f"{host} has no port. Open a tunnel with 'CONNECT {host}:{TLS_PORT}'."
            raise _Refused(HTTPStatus.BAD_REQUEST, text)
        if request.framing != 0:
            raise _Refused(HTTPStatus.BAD_REQUEST, "CONNECT cannot have a body. Send it without one.")
        there = await self._reached("CONNECT", host)
        try:
            await self._send(here, b"HTTP/1.1 200 Connection established\r\n\r\n")
            try:
                await self._opened(host, here, there)
            except heads.NotTLS as error:
                self._tell("CONNECT", host, str(error))
                await self._send(here, heads.UNRECOGNIZED_NAME)
                return
            await self._relay(host, here, there)
        finally:
            there.writer.transport.abort()

    async def _opened(self, host: Host, here: Ends, there: Ends) -> None:
        """Forward the first messages of a tunnel if they are allowed. Later data is not inspected.

        :raises NotTLS: if the tunnel must be closed
        """
        first = b""
        if host.port != TLS_PORT:
            first, spoken = await self._who_speaks_first(here, there)
            if spoken:
                await self._send(here, spoken)
            if not first or first[0] != heads.HANDSHAKE:
                await self._send(there, first, outwards=True)
                return
        said = await self._handshake(heads.Handshake(heads.CLIENT_HELLO), here, first)
        self._judge_hello(host, said)
        await self._send(there, said.records, outwards=True)
        answered = heads.Handshake(heads.SERVER_HELLO)
        try:
            answer = (await self._handshake(answered, there)).body
        except heads.NotTLS:  # an alert, which ends it
            answer = b""
        await self._send(here, answered.records + answered.rest)
        rest = said.rest
        if heads.asks_again(answer):
            again = await self._handshake(heads.Handshake(heads.CLIENT_HELLO, again=True), here, rest)
            self._judge_hello(host, again)
            rest = again.records + again.rest
        await self._send(there, rest, outwards=True)

    async def _who_speaks_first(self, here: Ends, there: Ends) -> tuple[bytes, bytes]:
        """Return the first data of the client and of the server, once one of them has sent some."""
        reads = [asyncio.ensure_future(ends.reader.read(_PIECE)) for ends in (here, there)]
        try:
            await asyncio.wait(reads, timeout=self._limits.idle_s, return_when=asyncio.FIRST_COMPLETED)
            if not any(read.done() for read in reads):
                raise _Over
            said = [read.result() if read.done() else b"" for read in reads]
        finally:
            await _ended(*reads)
        if not any(said):  # one of them has closed
            raise _Over
        return said[0], said[1]

    async def _handshake(self, handshake: heads.Handshake, ends: Ends, first: bytes = b"") -> heads.Handshake:
        """Read until the handshake message is complete.

        :raises NotTLS: if it cannot become one
        """
        piece = first
        while not (piece and handshake.feed(piece)):
            try:
                async with asyncio.timeout(self._limits.head_s):
                    piece = await ends.reader.read(_PIECE)
            except TimeoutError:
                raise heads.NotTLS("the TLS hello did not arrive in time") from None
            if not piece:
                raise _Over
        return handshake

    def _judge_hello(self, host: Host, said: heads.Handshake) -> None:
        refused = heads.refusal(heads.read_hello(said.body), host.name, is_address=host.address is not None)
        if refused is not None:
            raise heads.NotTLS(refused)

    async def _relay(self, host: Host, here: Ends, there: Ends) -> None:
        last = _Activity(asyncio.get_running_loop().time())
        pumps = [
            asyncio.ensure_future(self._pump(here, there, last, host)),
            asyncio.ensure_future(self._pump(there, here, last)),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            for pump in done:
                pump.result()
        finally:
            await _ended(*pumps)

    async def _pump(self, source: Ends, target: Ends, last: _Activity, host: Host | None = None) -> None:
        """Copy data from one side of a tunnel to the other.

        :param host: the target of outgoing data; it is authorised again for each piece, since rules change and calls
            end
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(last.at + self._limits.idle_s):
                    piece = await source.reader.read(_PIECE)
            except TimeoutError:
                if loop.time() < last.at + self._limits.idle_s:
                    continue  # the other direction was busy
                raise _Over from None
            if not piece:
                break
            last.at = loop.time()
            if host is not None and (refused := self._egress.refusal(host)) is not None:
                self._tell("CONNECT", host, refused)
                raise _Over
            await self._send(target, piece, outwards=host is not None)
        if target.writer.can_write_eof():
            target.writer.write_eof()

    # ── plain requests ───────────────────────────────────────────────────────────────────────────

    async def _forward(self, request: RequestHead, here: Ends) -> None:
        try:
            url = read_url(request.target)
        except ValueError as error:
            text = f"{str(error).rstrip('.')}. Send a full http:// URL to the proxy, or open a tunnel with CONNECT."
            raise _Refused(HTTPStatus.BAD_REQUEST, text) from None
        if url.scheme != "http":
            raise _Refused(HTTPStatus.BAD_REQUEST, "An https:// URL needs a tunnel. Open one with CONNECT.")
        there = await self._reached(request.method, url.host)
        try:
            fields = [(name, value) for name, value in heads.passed_on(request.fields) if name != b"host"]
            fields = [(b"host", url.authority.encode()), *fields, *_framed(request.fields), (b"connection", b"close")]
            await self._send(
                there, heads.written(f"{request.method} {url.target} HTTP/1.1".encode(), fields), outwards=True
            )
            upload = asyncio.ensure_future(self._body(here, there, request.framing, outwards=True))
            try:
                await self._response(request, here, there)
            finally:
                await _ended(upload)
        finally:
            there.writer.transport.abort()

    async def _response(self, request: RequestHead, here: Ends, there: Ends) -> None:
        for _ in range(_MOST_INTERIM):
            try:
                answer = heads.read_response(await self._head(there, self._limits.idle_s), request.method)
            except (Malformed, TimeoutError) as error:
                problem = str(error) or "it did not arrive in time"
                raise _Refused(
                    HTTPStatus.BAD_GATEWAY, f"The answer of the server could not be forwarded: {problem}. Try again."
                ) from None
            if answer.status == HTTPStatus.SWITCHING_PROTOCOLS:
                break
            fields = heads.passed_on(answer.fields)
            if answer.status < HTTPStatus.OK:
                await self._send(here, heads.written(answer.line, fields))
                continue
            framing = _framed(answer.fields)
            if request.old or request.method == "HEAD":
                framing = [field for field in framing if field[0] != b"transfer-encoding"]
            await self._send(here, heads.written(answer.line, [*fields, *framing, (b"connection", b"close")]))
            await self._body(there, here, answer.framing, chunked=not request.old)
            return
        raise _Refused(
            HTTPStatus.BAD_GATEWAY,
            "The server switched to another protocol, which the proxy does not forward. Use a plain HTTP request.",
        )

    async def _body(
        self, source: Ends, target: Ends, framing: heads.Framing, *, outwards: bool = False, chunked: bool = True
    ) -> None:
        """Forward one body. A chunked body is framed again, without its trailers."""
        reader = source.reader
        if framing != "chunked":
            await self._counted(source, target, None if framing == "to the end" else framing, outwards)
            return
        while size := heads.read_chunk_size(await self._line(reader)):
            if chunked:
                await self._send(target, b"%x\r\n" % size, outwards=outwards)
            await self._counted(source, target, size, outwards)
            if await self._line(reader):
                raise _Over
            if chunked:
                await self._send(target, b"\r\n", outwards=outwards)
        for _ in range(heads.MAX_FIELDS):
            if not await self._line(reader):
                break
        else:
            raise _Over
        if chunked:
            await self._send(target, b"0\r\n\r\n", outwards=outwards)

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._limits.idle_s):
                return (await reader.readuntil(b"\r\n"))[:-2]
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise _Over from None

    async def _counted(self, source: Ends, target: Ends, count: int | None, outwards: bool) -> None:
        """Forward ``count`` bytes; all bytes if it is None."""
        while count is None or count > 0:
            async with asyncio.timeout(self._limits.idle_s):
                piece = await source.reader.read(_PIECE if count is None else min(_PIECE, count))
            if not piece:
                if count is None:
                    return
                raise _Over
            count = None if count is None else count - len(piece)
            await self._send(target, piece, outwards=outwards)

    async def _send(self, ends: Ends, data: bytes, *, outwards: bool = False) -> None:
        """Write data and wait until it is sent. Bytes are counted in both directions, up to a limit."""
        if outwards:
            self.bytes_out += len(data)
        else:
            self.bytes_in += len(data)
        if self.bytes_out > self._limits.bytes_out or self.bytes_in > self._limits.bytes_in:
            raise _Over
        ends.writer.write(data)
        async with asyncio.timeout(self._limits.idle_s):
            await ends.writer.drain()


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _framed(fields: heads.Fields) -> heads.Fields:
    """Return the fields that say where the body ends, which a strict reader has found to agree."""
    return [(name, value) for name, value in fields if name in (b"content-length", b"transfer-encoding")]
