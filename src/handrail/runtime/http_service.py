"""The network service of the runtime: HTTP fetches with every redirect authorised and every address checked.

The check is that of the sandbox's proxy (:mod:`handrail.sandbox.network.egress_check`): the call's set and the rules decide about
the host (ask counts as deny), all its addresses are checked, and a checked one is dialled. The certificate is verified for
the host's name. A redirect is a new request with a new check. Headers that a tool adds for one origin are not sent to
another.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from urllib.parse import quote, urljoin

import h11

from handrail.contract.errors import ToolError, UsageError, quote_text_or_length
from handrail.contract.network_route import DIRECT_ROUTE, OutboundConnectionSettings, build_proxy_authorization_header
from handrail.contract.sandbox_protocol import ConnectionAttempt
from handrail.contract.services.tool_runtime import HttpResponse
from handrail.contract.text.host_names import ParsedUrl, bracket_ipv6_host, parse_http_url
from handrail.contract.tool.requires import AccessCheck, CapabilitySet
from handrail.sandbox.network.egress_check import EgressCheck, HostResolver
from handrail.sandbox.network.trusted_authorities import load_trusted_ssl_context

# One HTTP exchange over a checked connection: strict in sending, bounded in reading and decoding.

MAX_HEAD_BYTES = 64 * 1024
_PIECE = 1 << 16
_STEP = 1 << 20
"""How far a compressed body may grow before other tasks get a turn."""
_MOST_INTERIM = 8
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_RUNTIME_FIELDS = frozenset(
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

HeaderFields = list[tuple[str, str]]


def explain_unsupported_http_method(method: str) -> str | None:
    """Return why a tool cannot use this HTTP method; None if it can."""
    if not _TOKEN.fullmatch(method) or method.upper() in ("CONNECT", "TRACE"):
        return f"{quote_text_or_length(method, 40)} is not an allowed HTTP method. Use GET, POST or another standard method."
    return None


def explain_forbidden_header(name: str, value: str) -> str | None:
    """Return why a tool cannot send this header field; None if it can."""
    if not _TOKEN.fullmatch(name):
        return (
            f"{quote_text_or_length(name, 100)} is not a valid name of a header field. Use letters, digits and hyphens."
        )
    if name.lower() in _RUNTIME_FIELDS:
        return f"The header field {name!r} is set by the runtime. Leave it out."
    if not _VALUE.fullmatch(value) or value != value.strip():
        return f"The value of the header field {name!r} contains characters that are not allowed. Remove them."
    return None


class HttpExchange:
    """One HTTP request and its answer on a connection, which cannot be used again."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def send_request(
        self, method: str, target: str, fields: Sequence[tuple[str, str]], body: bytes
    ) -> h11.Response:
        """Send the request and return the head of the answer.

        :raises ToolError: ``backend`` if the server violates the protocol
        """
        try:
            head = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
            out = self._http.send(h11.Request(method=method, target=target, headers=head))
            out = (out or b"") + ((self._http.send(h11.Data(data=body)) or b"") if body else b"")
            self._writer.write(out + (self._http.send(h11.EndOfMessage()) or b""))
            await self._writer.drain()
            for _ in range(_MOST_INTERIM):
                event = await self._next_event()
                if isinstance(event, h11.Response):
                    return event
                if not isinstance(event, h11.InformationalResponse) or event.status_code == 101:
                    break
        except h11.ProtocolError as error:
            raise _backend_error(f"The answer of the server is not valid HTTP: {error}. Use another URL.") from None
        except (ConnectionError, OSError) as error:
            raise _backend_error(f"The connection was lost: {error.strerror or error}. Try again.") from None
        raise _backend_error("The server closed the connection without an answer. Try again.")

    async def stream_raw_body(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives, still encoded.

        :raises ToolError: ``backend`` if the body is incomplete
        """
        try:
            while not isinstance(event := await self._next_event(), (h11.EndOfMessage, h11.ConnectionClosed)):
                if isinstance(event, h11.Data):
                    yield bytes(event.data)
        except h11.ProtocolError as error:
            raise _backend_error(
                f"The answer of the server is incomplete or not valid HTTP: {error}. Try again."
            ) from None
        except (ConnectionError, OSError) as error:
            raise _backend_error(f"The connection was lost: {error.strerror or error}. Try again.") from None

    async def _next_event(self) -> object:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_PIECE))
        return event


class BoundedBodyDecoder:
    """A collector that decodes a body up to a limit, however small its encoded form is.

    :param coding: the Content-Encoding of the answer
    :param on_piece: called with each kept piece
    :raises ToolError: ``backend`` for an encoding that was not offered
    """

    def __init__(self, coding: str, max_bytes: int, on_piece: Callable[[bytes], None] | None = None) -> None:
        self._inflate = _BodyDecoder(coding) if coding not in ("", "identity") else None
        self._max_bytes = max_bytes
        self._on_piece = on_piece
        self._raw_left = max_bytes + max_bytes // 8 + (1 << 16)
        self._kept = bytearray()
        self.is_truncated = False
        """Whether the body was longer than the limit."""

    async def collect(self, pieces: AsyncGenerator[bytes, None]) -> bytes:
        """Read the pieces and return the decoded body, cut at the limit.

        :raises ToolError: ``backend`` for damaged data, ``limit`` for data that decodes to nothing without end
        """
        try:
            async for piece in pieces:
                self._raw_left -= len(piece)
                if self._inflate is None:
                    self._append(piece)
                else:
                    await self._decode(self._inflate, piece)
                if self.is_truncated:
                    break
                if self._raw_left < 0:
                    raise ToolError(
                        "The server sends endless compressed data without content. The request was stopped. Use "
                        "another URL.",
                        kind="limit",
                    )
        finally:
            await pieces.aclose()
        if self._inflate is not None and not self.is_truncated and not self._inflate.complete:
            raise _backend_error("The compressed answer is incomplete. Try again.")
        return bytes(self._kept)

    async def _decode(self, inflate: _BodyDecoder, piece: bytes) -> None:
        while piece and not self.is_truncated:
            room = self._max_bytes - len(self._kept) + 1
            out, piece = inflate.decode_at_most(piece, min(room, _STEP))
            self._append(out)
            await asyncio.sleep(0)

    def _append(self, data: bytes) -> None:
        kept = data[: self._max_bytes - len(self._kept)]
        self.is_truncated = self.is_truncated or len(kept) < len(data)
        self._kept += kept
        if kept and self._on_piece is not None:
            self._on_piece(kept)


class _BodyDecoder:
    """A decoder for gzip (also several members) and deflate (also raw), in bounded steps."""

    def __init__(self, coding: str) -> None:
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise _backend_error(
                f"The server used the content encoding {quote_text_or_length(coding, 40)}, which was not requested. Use another URL."
            )
        self._gzip = coding != "deflate"
        self._inflate = zlib.decompressobj(31 if self._gzip else 15)
        self._begun = False
        self.complete = False

    def decode_at_most(self, data: bytes, most: int) -> tuple[bytes, bytes]:
        """Return at most ``most`` decoded bytes, and the rest of ``data``."""
        if self.complete:
            if not self._gzip or data[:1] != b"\x1f":
                return b"", b""  # padding after the end
            self._inflate, self.complete = zlib.decompressobj(31), False
        try:
            out = self._inflate.decompress(data, max(most, 1))
        except zlib.error as error:
            if self._gzip or self._begun:
                raise _backend_error(f"The compressed answer is damaged: {error}. Try again.") from None
            self._inflate = zlib.decompressobj(-15)
            self._begun = True
            return self.decode_at_most(data, most)
        self._begun = True
        self.complete = self._inflate.eof
        return out, self._inflate.unused_data if self.complete else self._inflate.unconsumed_tail


def _backend_error(text: str) -> ToolError:
    return ToolError(text, kind="backend")


MAX_BODY_BYTES = 256 * 1024 * 1024
MAX_REDIRECTS = 20
_ACCEPTED = "gzip, deflate"
_REDIRECTS = (301, 302, 303, 307, 308)
_CROSS_ORIGIN_FIELDS = frozenset(("accept", "accept-language", "content-type", "range", "user-agent"))
"""Fields that are sent on to another origin. Any other field may be a credential."""
_BODY_FIELDS = frozenset(("content-type", "content-encoding", "content-language", "content-location"))
_UNRESERVED = "".join(chr(code) for code in range(0x21, 0x7F))


class CheckedNetworkService:
    """A network service that implements :class:`handrail.contract.services.tool_runtime.NetworkService` with checks.

    :param may: evaluates ``net.fetch`` for ``host:port``
    :param on_attempt: called with each host once it is allowed or denied
    :param trust: the trusted certificates; the system's by default
    """

    def __init__(
        self,
        capabilities: CapabilitySet,
        may: AccessCheck,
        on_attempt: Callable[[ConnectionAttempt], None] | None = None,
        *,
        resolver: HostResolver | None = None,
        trust: ssl.SSLContext | None = None,
        route: OutboundConnectionSettings = DIRECT_ROUTE,
    ) -> None:
        self._egress = EgressCheck(
            capabilities, lambda host, port: may("net.fetch", f"{host}:{port}"), resolver, route=route
        )
        self._route = route
        self._on_attempt = on_attempt
        self._trust = trust

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        max_bytes: int = 16 * 1024 * 1024,
        timeout_ms: int = 30_000,
        max_redirects: int = 5,
        on_body: Callable[[bytes], None] | None = None,
    ) -> HttpResponse:
        fields = _check_request(method, headers or {}, max_bytes, timeout_ms, max_redirects)
        try:
            address = parse_http_url(url)
        except ValueError as error:
            raise ToolError(str(error), kind="invalid_input") from None
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._follow_redirects(
                    method.upper(), address, fields, body, max_bytes, max_redirects, on_body
                )
        except TimeoutError:
            text = (
                f"{address.host} did not send its whole answer within {timeout_ms} ms. Request less, or increase "
                "`timeout_ms`."
            )
            raise ToolError(text, kind="timeout") from None

    async def _follow_redirects(
        self,
        method: str,
        address: ParsedUrl,
        fields: HeaderFields,
        body: bytes,
        max_bytes: int,
        max_redirects: int,
        on_body: Callable[[bytes], None] | None,
    ) -> HttpResponse:
        passed: list[str] = []
        while True:
            reader, writer, proxy = await self._open_connection(method, address)
            try:
                exchange = HttpExchange(reader, writer)
                head = _build_head(address, method, fields, body)
                if credentials := build_proxy_authorization_header(proxy):
                    head.append(("proxy-authorization", credentials))
                answer = await exchange.send_request(method, str(address) if proxy else address.target, head, body)
                items = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in answer.headers]
                following = (
                    _build_redirected_request(method, address, fields, body, answer.status_code, items)
                    if max_redirects
                    else None
                )
                if following is None:
                    coding = ", ".join(value for name, value in items if name == "content-encoding").strip().lower()
                    if method == "HEAD" or answer.status_code in (204, 304):
                        coding = ""
                    gathering = BoundedBodyDecoder(coding, max_bytes, on_body)
                    content = await gathering.collect(exchange.stream_raw_body())
                    return HttpResponse(
                        str(address), answer.status_code, tuple(items), content, gathering.is_truncated, tuple(passed)
                    )
            finally:
                writer.transport.abort()
            if len(passed) >= max_redirects:
                hops = " → ".join((*passed, str(address)))
                raise ToolError(
                    f"The request was redirected more than {max_redirects} times: {hops}. Use the final URL, or "
                    "increase `max_redirects`.",
                    kind="limit",
                )
            passed.append(str(address))
            method, address, fields, body = following

    async def _open_connection(
        self, method: str, address: ParsedUrl
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
        """Open a connection to a checked address; with https, verify the host's certificate.

        :return: the connection, and the proxy to which it leads if the request is a plain one for a proxy
        :raises ToolError: ``denied`` if the host is not allowed, ``backend`` if it cannot be reached
        """
        host = address.host
        attempt = ConnectionAttempt(bracket_ipv6_host(host.name), host.port or 0, method)
        try:
            way = await self._egress.authorize_and_resolve_host(host, address.scheme)
        except ToolError as error:
            self._report_attempt(replace(attempt, refusal_reason=error.text))
            raise
        self._report_attempt(attempt)
        plain = address.scheme == "http"
        try:
            trust = load_trusted_ssl_context if self._trust is None and not plain else None
            context = await asyncio.to_thread(trust, self._route.ca_file) if trust is not None else self._trust
        except UsageError as error:
            raise ToolError(str(error), kind="backend") from None
        if way.proxy and plain:
            connection = await self._egress.connect_to_proxy(way)
        else:
            connection = await self._egress.connect_to_checked_address(way)
        try:
            if plain:
                return *await asyncio.open_connection(sock=connection), way.proxy
            streams = await asyncio.open_connection(sock=connection, ssl=context, server_hostname=address.host.name)
            return *streams, ""
        except ssl.SSLCertVerificationError as error:
            connection.close()
            text = (
                f"The certificate of {address.host} could not be verified: {error.verify_message}. Check the host "
                "name, or ask the user. If the network has its own authority, the user can set `ca_file` under [network]."
            )
            raise ToolError(text, kind="backend") from None
        except (ssl.SSLError, OSError) as error:
            connection.close()
            text = f"The connection to {address.host} failed: {error.strerror or error}. Check the URL, or try again."
            raise ToolError(text, kind="backend") from None
        except BaseException:
            connection.close()
            raise

    def _report_attempt(self, attempt: ConnectionAttempt) -> None:
        if self._on_attempt is not None:
            self._on_attempt(attempt)


def _check_request(
    method: str, headers: Mapping[str, str], max_bytes: int, timeout_ms: int, max_redirects: int
) -> HeaderFields:
    """Check the arguments of a request and return its header fields.

    :raises ToolError: ``invalid_input`` with the first problem
    """
    problem = explain_unsupported_http_method(method)
    for name, value in headers.items():
        problem = problem or explain_forbidden_header(name, value)
    if not 0 <= max_bytes <= MAX_BODY_BYTES:
        problem = problem or f"`max_bytes` is {max_bytes}. It must be from 0 to {MAX_BODY_BYTES}."
    if timeout_ms <= 0:
        problem = problem or f"`timeout_ms` is {timeout_ms}. It must be more than 0."
    if not 0 <= max_redirects <= MAX_REDIRECTS:
        problem = problem or f"`max_redirects` is {max_redirects}. It must be from 0 to {MAX_REDIRECTS}."
    if problem is not None:
        raise ToolError(problem, kind="invalid_input")
    return [(name.lower(), value) for name, value in headers.items()]


def _build_head(address: ParsedUrl, method: str, fields: HeaderFields, body: bytes) -> HeaderFields:
    names = {name for name, _ in fields}
    head: HeaderFields = [
        ("host", address.host_header_value),
        *fields,
        ("accept-encoding", _ACCEPTED),
        ("connection", "close"),
    ]
    if "user-agent" not in names:
        head.append(("user-agent", "handrail"))
    if "accept" not in names:
        head.append(("accept", "*/*"))
    if body or method in ("POST", "PUT", "PATCH"):
        head.append(("content-length", str(len(body))))
    return head


def _changes_to_get(status: int, method: str) -> bool:
    return (status == 303 and method != "HEAD") or (status in (301, 302) and method == "POST")


def _build_redirected_request(
    method: str, address: ParsedUrl, fields: HeaderFields, body: bytes, status: int, told: HeaderFields
) -> tuple[str, ParsedUrl, HeaderFields, bytes] | None:
    """Return the request that a redirect leads to; None without a redirect, or if the tool must follow it.

    A body is not sent to another origin: it was meant for the first one.
    """
    location = next((value for name, value in told if name == "location"), None)
    if status not in _REDIRECTS or location is None:
        return None
    try:
        following = parse_http_url(urljoin(str(address), quote(location.encode("latin-1"), safe=_UNRESERVED)))
    except ValueError as error:
        if body and not _changes_to_get(status, method):
            return None  # the first server has the body, so its answer counts
        raise ToolError(
            f"{address.host} redirects to {quote_text_or_length(location, 200)}, which cannot be followed: {error}",
            kind="denied",
        ) from None
    if _changes_to_get(status, method):
        method, body = "GET", b""
        fields = [field for field in fields if field[0] not in _BODY_FIELDS]
    if (following.scheme, following.host) != (address.scheme, address.host):
        if body:
            return None
        fields = [field for field in fields if field[0] in _CROSS_ORIGIN_FIELDS]
    return method, following, fields, body
