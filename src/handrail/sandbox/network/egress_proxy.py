"""The only way out of a sandbox: an HTTP proxy on the host's side, which authorises every request and every tunnel.

``CONNECT host:port`` opens a tunnel. A request with a whole ``http://`` URL is made once and its connection closed; a
redirect is simply the client's next request. :class:`~handrail.sandbox.network.egress_check.EgressCheck` checks each of them, and all
data that leaves through a tunnel. A refusal is a ``403`` with the reason and the next step.

In a tunnel the TLS hello must name the host that the tunnel was opened to; on port 443 there must be one. Open: inside TLS
(and in a tunnel to another port that is not TLS) a request may name another site of the same server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from handrail.contract.errors import ToolError
from handrail.contract.network_route import build_proxy_authorization_header
from handrail.contract.sandbox_protocol import ConnectionAttempt
from handrail.contract.struct import Struct
from handrail.contract.text.host_names import HostAddress, bracket_ipv6_host, parse_host_address, parse_http_url
from handrail.sandbox.network import http_and_tls_parsers
from handrail.sandbox.network.egress_check import EgressCheck
from handrail.sandbox.network.http_and_tls_parsers import MalformedHead, RequestHead

_CHUNK_BYTES = 1 << 16
TLS_PORT = 443
_MAX_INTERIM = 8
"""The limit of interim heads before the final response."""


class ProxyLimits(Struct, frozen=True):
    """The limits of one proxy.

    ``head_s`` limits how long a head or hello may take, ``idle_s`` how long a connection may carry nothing.
    """

    head_s: float = 20.0
    idle_s: float = 300.0
    connections: int = 128
    bytes_out: int = 4 * 1024**3
    """For all connections together, as is ``bytes_in``. Connections end at the limit."""
    bytes_in: int = 16 * 1024**3


class _RefusedWithStatus(Exception):
    """An error that is answered with this HTTP status and text."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class ConnectionStreams(NamedTuple):
    """A connection: its reader and its writer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class _TunnelLastActivity(Struct):
    """The time of the last transfer of a tunnel."""

    time_s: float


class _ConnectionEndedSilently(Exception):
    """An error that ends the connection without an answer."""


class EgressProxy:
    """An HTTP proxy for one sandbox, with the rights of that sandbox alone.

    :param on_attempt: called with each requested host once it is allowed or denied
    """

    def __init__(
        self,
        egress: EgressCheck,
        on_attempt: Callable[[ConnectionAttempt], None] | None = None,
        limits: ProxyLimits | None = None,
    ) -> None:
        self._egress = egress
        self._on_attempt = on_attempt
        self._limits = limits or ProxyLimits()
        self._listener: socket.socket | None = None
        """Until the first connection arrives: most programs never reach for a host."""
        self._server: asyncio.Server | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_closed = False
        self._connections: set[asyncio.Task[None]] = set()
        self.bytes_out = 0
        self.bytes_in = 0

    def serve(self, listener: socket.socket) -> None:
        """Accept connections on a non-blocking ``listener`` from now on, and own it."""
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._begin)

    def _begin(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener.fileno())
            self._starting = loop.create_task(self._start_server(listener))

    async def _start_server(self, listener: socket.socket) -> None:
        if self._is_closed:
            listener.close()
            return
        self._server = await asyncio.start_server(
            self._accept, sock=listener, limit=http_and_tls_parsers.MAX_HEAD_BYTES
        )

    def stop_accepting(self) -> None:
        """Accept no further connection."""
        self._is_closed = True
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        if self._server is not None:
            self._server.close()

    async def aclose(self) -> None:
        """Stop accepting, end every connection, and return when none is left."""
        self._is_closed = True
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        for _ in range(3):  # a server that closes while it accepts a connection would leave that one open
            await asyncio.sleep(0)
        self.stop_accepting()
        while self._connections:
            for task in self._connections:
                task.cancel()
            await asyncio.wait(self._connections)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        # No answer: reading the request of one connection too many would already use memory for it.
        if self._is_closed or len(self._connections) >= self._limits.connections:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            await self._handle(ConnectionStreams(reader, writer))
            writer.close()
            async with asyncio.timeout(self._limits.head_s):
                await writer.wait_closed()
        except (_ConnectionEndedSilently, MalformedHead, OSError, asyncio.CancelledError):
            pass  # the client is not there any more
        finally:
            writer.transport.abort()
            self._connections.discard(task)

    async def _handle(self, here: ConnectionStreams) -> None:
        try:
            # The short limit keeps a client that sends its head byte by byte from occupying a connection.
            request = http_and_tls_parsers.parse_request_head(await self._read_head(here, self._limits.head_s))
        except MalformedHead as error:
            text = f"The request could not be read: {error}. Send a valid HTTP/1.1 request."
            await self._send_refusal(here, _RefusedWithStatus(HTTPStatus.BAD_REQUEST, text))
            return
        try:
            if request.method == "CONNECT":
                await self._tunnel(request, here)
            else:
                await self._forward(request, here)
        except _RefusedWithStatus as refused:
            await self._send_refusal(here, refused)

    async def _read_head(self, ends: ConnectionStreams, limit_s: float) -> bytes:
        try:
            async with asyncio.timeout(limit_s):
                return await ends.reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise MalformedHead(f"the head is longer than {http_and_tls_parsers.MAX_HEAD_BYTES} bytes") from None
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise MalformedHead("the head is incomplete") from None
            raise _ConnectionEndedSilently from None

    async def _connect_to_checked_host(self, method: str, host: HostAddress) -> tuple[ConnectionStreams, str]:
        """Connect to ``host`` after it was authorised and checked.

        :return: the connection, and the proxy to which it leads; a tunnel leads to the host itself
        """
        tunnel = method == "CONNECT"
        try:
            # The name is resolved once, and only the checked address is connected to. A second lookup could give
            # another address.
            way = await self._egress.authorize_and_resolve_host(host, "https" if tunnel else "http")
        except ToolError as error:
            self._report_attempt(method, host, error.text)
            status = HTTPStatus.BAD_GATEWAY if error.kind == "backend" else HTTPStatus.FORBIDDEN
            raise _RefusedWithStatus(status, error.text) from None
        self._report_attempt(method, host, None)
        try:
            if way.proxy and not tunnel:
                connection = await self._egress.connect_to_proxy(way)
            else:
                connection = await self._egress.connect_to_checked_address(way)
        except ToolError as error:
            raise _RefusedWithStatus(HTTPStatus.BAD_GATEWAY, error.text) from None
        streams = await asyncio.open_connection(sock=connection, limit=http_and_tls_parsers.MAX_HEAD_BYTES)
        return ConnectionStreams(*streams), "" if tunnel else way.proxy

    def _report_attempt(self, method: str, host: HostAddress, refused: str | None) -> None:
        if self._on_attempt is not None:
            self._on_attempt(ConnectionAttempt(bracket_ipv6_host(host.name), host.port or 0, method, refused))

    async def _send_refusal(self, here: ConnectionStreams, refused: _RefusedWithStatus) -> None:
        body = f"handrail: {refused.text}\n".encode("utf-8", "replace")
        line = f"HTTP/1.1 {refused.status.value} {refused.status.phrase}".encode()
        fields = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await self._send_counted(here, http_and_tls_parsers.encode_http_head(line, fields) + body)

    # ── tunnels ──────────────────────────────────────────────────────────────────────────────────

    async def _tunnel(self, request: RequestHead, here: ConnectionStreams) -> None:
        try:
            host = parse_host_address(request.target)
        except ValueError as error:
            raise _RefusedWithStatus(HTTPStatus.BAD_REQUEST, str(error)) from None
        if host.port is None:
            text = f"{host} has no port. Open a tunnel with 'CONNECT {host}:{TLS_PORT}'."
            raise _RefusedWithStatus(HTTPStatus.BAD_REQUEST, text)
        # The bytes of a body would become the first bytes of the tunnel, behind the check of the hello.
        if request.framing != 0:
            raise _RefusedWithStatus(HTTPStatus.BAD_REQUEST, "CONNECT cannot have a body. Send it without one.")
        there, _ = await self._connect_to_checked_host("CONNECT", host)
        try:
            # A client sends its hello only after this answer, so the tunnel must be accepted before its content is
            # known.
            await self._send_counted(here, b"HTTP/1.1 200 Connection established\r\n\r\n")
            try:
                await self._forward_first_messages(host, here, there)
            except http_and_tls_parsers.NotTlsHandshake as error:
                self._report_attempt("CONNECT", host, str(error))
                # The client expects TLS by now, so the refusal is a TLS alert. Text would be reported as a broken
                # connection.
                await self._send_counted(here, http_and_tls_parsers.UNRECOGNIZED_NAME)
                return
            await self._forward_both_directions(host, here, there)
        finally:
            there.writer.transport.abort()

    async def _forward_first_messages(
        self, host: HostAddress, here: ConnectionStreams, there: ConnectionStreams
    ) -> None:
        """Forward the first messages of a tunnel if they are allowed. Later data is not inspected.

        :raises NotTlsHandshake: if the tunnel must be closed
        """
        first = b""
        # On other ports the protocol is unknown, and in some protocols the server speaks first.
        if host.port != TLS_PORT:
            first, spoken = await self._read_first_tunnel_data(here, there)
            if spoken:
                await self._send_counted(here, spoken)
            if not first or first[0] != http_and_tls_parsers.HANDSHAKE:
                await self._send_counted(there, first, outwards=True)
                return
        handshake = await self._read_handshake(
            http_and_tls_parsers.HandshakeReader(http_and_tls_parsers.CLIENT_HELLO), here, first
        )
        self._check_hello(host, handshake)
        await self._send_counted(there, handshake.records, outwards=True)
        answered = http_and_tls_parsers.HandshakeReader(http_and_tls_parsers.SERVER_HELLO)
        try:
            answer = (await self._read_handshake(answered, there)).body
        except http_and_tls_parsers.NotTlsHandshake:  # an alert, which ends it
            answer = b""
        await self._send_counted(here, answered.records + answered.rest)
        rest = handshake.rest
        # After a retry the client sends a second hello, which could name another host.
        if http_and_tls_parsers.is_hello_retry_request(answer):
            again = await self._read_handshake(
                http_and_tls_parsers.HandshakeReader(http_and_tls_parsers.CLIENT_HELLO, again=True), here, rest
            )
            self._check_hello(host, again)
            rest = again.records + again.rest
        await self._send_counted(there, rest, outwards=True)

    async def _read_first_tunnel_data(self, here: ConnectionStreams, there: ConnectionStreams) -> tuple[bytes, bytes]:
        """Return the first data of the client and of the server, once one of them has sent some."""
        reads = [asyncio.ensure_future(ends.reader.read(_CHUNK_BYTES)) for ends in (here, there)]
        try:
            await asyncio.wait(reads, timeout=self._limits.idle_s, return_when=asyncio.FIRST_COMPLETED)
            if not any(read.done() for read in reads):
                raise _ConnectionEndedSilently
            items = [read.result() if read.done() else b"" for read in reads]
        finally:
            await _close_writers(*reads)
        if not any(items):  # one of them has closed
            raise _ConnectionEndedSilently
        return items[0], items[1]

    async def _read_handshake(
        self, handshake: http_and_tls_parsers.HandshakeReader, ends: ConnectionStreams, first: bytes = b""
    ) -> http_and_tls_parsers.HandshakeReader:
        """Read until the handshake message is complete.

        :raises NotTlsHandshake: if it cannot become one
        """
        piece = first
        while not (piece and handshake.feed(piece)):
            try:
                async with asyncio.timeout(self._limits.head_s):
                    piece = await ends.reader.read(_CHUNK_BYTES)
            except TimeoutError:
                raise http_and_tls_parsers.NotTlsHandshake("the TLS hello did not arrive in time") from None
            if not piece:
                raise _ConnectionEndedSilently
        return handshake

    def _check_hello(self, host: HostAddress, handshake: http_and_tls_parsers.HandshakeReader) -> None:
        refused = http_and_tls_parsers.explain_forbidden_client_hello(
            http_and_tls_parsers.parse_hello(handshake.body), host.name, is_address=host.address is not None
        )
        if refused is not None:
            raise http_and_tls_parsers.NotTlsHandshake(refused)

    async def _forward_both_directions(
        self, host: HostAddress, here: ConnectionStreams, there: ConnectionStreams
    ) -> None:
        last = _TunnelLastActivity(asyncio.get_running_loop().time())
        pumps = [
            asyncio.ensure_future(self._copy_tunnel_side(here, there, last, host)),
            asyncio.ensure_future(self._copy_tunnel_side(there, here, last)),
        ]
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            for pump in done:
                pump.result()
        finally:
            await _close_writers(*pumps)

    async def _copy_tunnel_side(
        self,
        source: ConnectionStreams,
        target: ConnectionStreams,
        last: _TunnelLastActivity,
        host: HostAddress | None = None,
    ) -> None:
        """Copy data from one side of a tunnel to the other.

        :param host: the target of outgoing data; it is authorised again for each piece, since rules change and calls
            end
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(last.time_s + self._limits.idle_s):
                    piece = await source.reader.read(_CHUNK_BYTES)
            except TimeoutError:
                if loop.time() < last.time_s + self._limits.idle_s:
                    continue  # the other direction was busy
                raise _ConnectionEndedSilently from None
            if not piece:
                break
            last.time_s = loop.time()
            # A rule or an answer of the user can end the permission while the tunnel is open.
            if host is not None and (refused := self._egress.explain_refusal(host)) is not None:
                self._report_attempt("CONNECT", host, refused)
                raise _ConnectionEndedSilently
            await self._send_counted(target, piece, outwards=host is not None)
        # Only one direction has ended. The other may still have an answer to deliver.
        if target.writer.can_write_eof():
            target.writer.write_eof()

    # ── plain requests ───────────────────────────────────────────────────────────────────────────

    async def _forward(self, request: RequestHead, here: ConnectionStreams) -> None:
        try:
            url = parse_http_url(request.target)
        except ValueError as error:
            text = f"{str(error).rstrip('.')}. Send a full http:// URL to the proxy, or open a tunnel with CONNECT."
            raise _RefusedWithStatus(HTTPStatus.BAD_REQUEST, text) from None
        if url.scheme != "http":
            raise _RefusedWithStatus(HTTPStatus.BAD_REQUEST, "An https:// URL needs a tunnel. Open one with CONNECT.")
        there, proxy = await self._connect_to_checked_host(request.method, url.host)
        try:
            fields = [
                (name, value)
                for name, value in http_and_tls_parsers.remove_hop_by_hop_fields(request.fields)
                if name != b"host"
            ]
            fields = [
                (b"host", url.host_header_value.encode()),
                *fields,
                *_body_framing_fields(request.fields),
                (b"connection", b"close"),
            ]
            if credentials := build_proxy_authorization_header(proxy):
                fields.append((b"proxy-authorization", credentials.encode()))
            target = str(url) if proxy else url.target
            await self._send_counted(
                there,
                http_and_tls_parsers.encode_http_head(f"{request.method} {target} HTTP/1.1".encode(), fields),
                outwards=True,
            )
            upload = asyncio.ensure_future(self._forward_body(here, there, request.framing, outwards=True))
            try:
                await self._forward_response(request, here, there)
            finally:
                await _close_writers(upload)
        finally:
            there.writer.transport.abort()

    async def _forward_response(self, request: RequestHead, here: ConnectionStreams, there: ConnectionStreams) -> None:
        for _ in range(_MAX_INTERIM):
            try:
                answer = http_and_tls_parsers.parse_response_head(
                    await self._read_head(there, self._limits.idle_s), request.method
                )
            except (MalformedHead, TimeoutError) as error:
                problem = str(error) or "it did not arrive in time"
                raise _RefusedWithStatus(
                    HTTPStatus.BAD_GATEWAY, f"The answer of the server could not be forwarded: {problem}. Try again."
                ) from None
            # After a switch the proxy could no longer find the bounds of messages, and so could not check the next
            # request.
            if answer.status == HTTPStatus.SWITCHING_PROTOCOLS:
                break
            fields = http_and_tls_parsers.remove_hop_by_hop_fields(answer.fields)
            if answer.status < HTTPStatus.OK:
                await self._send_counted(here, http_and_tls_parsers.encode_http_head(answer.line, fields))
                continue
            framing = _body_framing_fields(answer.fields)
            # An HTTP/1.0 client does not know chunks, so it gets the plain body up to the end of the connection.
            if request.is_http_1_0 or request.method == "HEAD":
                framing = [field for field in framing if field[0] != b"transfer-encoding"]
            await self._send_counted(
                here, http_and_tls_parsers.encode_http_head(answer.line, [*fields, *framing, (b"connection", b"close")])
            )
            await self._forward_body(there, here, answer.framing, chunked=not request.is_http_1_0)
            return
        raise _RefusedWithStatus(
            HTTPStatus.BAD_GATEWAY,
            "The server switched to another protocol, which the proxy does not forward. Use a plain HTTP request.",
        )

    async def _forward_body(
        self,
        source: ConnectionStreams,
        target: ConnectionStreams,
        framing: http_and_tls_parsers.BodyFraming,
        *,
        outwards: bool = False,
        chunked: bool = True,
    ) -> None:
        """Forward one body. A chunked body is framed again, without its trailers."""
        reader = source.reader
        if framing != "chunked":
            await self._forward_byte_count(source, target, None if framing == "to the end" else framing, outwards)
            return
        while size := http_and_tls_parsers.parse_chunk_size(await self._read_line(reader)):
            if chunked:
                await self._send_counted(target, b"%x\r\n" % size, outwards=outwards)
            await self._forward_byte_count(source, target, size, outwards)
            # Data between a chunk and its end means that both sides count differently, which hides requests from the
            # proxy.
            if await self._read_line(reader):
                raise _ConnectionEndedSilently
            if chunked:
                await self._send_counted(target, b"\r\n", outwards=outwards)
        # Trailers are read but not forwarded: they could carry fields that the proxy removed from the head.
        for _ in range(http_and_tls_parsers.MAX_FIELDS):
            if not await self._read_line(reader):
                break
        else:
            raise _ConnectionEndedSilently
        if chunked:
            await self._send_counted(target, b"0\r\n\r\n", outwards=outwards)

    async def _read_line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            async with asyncio.timeout(self._limits.idle_s):
                return (await reader.readuntil(b"\r\n"))[:-2]
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            raise _ConnectionEndedSilently from None

    async def _forward_byte_count(
        self, source: ConnectionStreams, target: ConnectionStreams, count: int | None, outwards: bool
    ) -> None:
        """Forward ``count`` bytes; all bytes if it is None."""
        while count is None or count > 0:
            async with asyncio.timeout(self._limits.idle_s):
                piece = await source.reader.read(_CHUNK_BYTES if count is None else min(_CHUNK_BYTES, count))
            if not piece:
                if count is None:
                    return
                raise _ConnectionEndedSilently
            count = None if count is None else count - len(piece)
            await self._send_counted(target, piece, outwards=outwards)

    async def _send_counted(self, ends: ConnectionStreams, data: bytes, *, outwards: bool = False) -> None:
        """Write data and wait until it is sent. Bytes are counted in both directions, up to a limit."""
        if outwards:
            self.bytes_out += len(data)
        else:
            self.bytes_in += len(data)
        # The limit bounds what a call can send out or download, whatever hosts it may reach.
        if self.bytes_out > self._limits.bytes_out or self.bytes_in > self._limits.bytes_in:
            raise _ConnectionEndedSilently
        ends.writer.write(data)
        async with asyncio.timeout(self._limits.idle_s):
            await ends.writer.drain()


async def _close_writers(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _body_framing_fields(fields: http_and_tls_parsers.HeadFields) -> http_and_tls_parsers.HeadFields:
    """Return the fields that say where the body ends, which a strict reader has found to agree."""
    return [(name, value) for name, value in fields if name in (b"content-length", b"transfer-encoding")]


# Forwarders: a port of a sandbox's own loopback behind which one granted address answers. A database server speaks its own
# protocol and knows no proxy. The operator grants the address, and every connection is checked as those of the proxy are.

_MAX_FORWARDED = 128


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
                # The connection is accepted and closed, because an unaccepted one would let the client wait for its own
                # timeout.
                if len(self._connections) >= _MAX_FORWARDED:
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
            host = bracket_ipv6_host(self._target.name)
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
