"""The MCP server over streamable HTTP, for many clients at once.

A web page can reach every port of its machine. So the server answers only requests with a known host name and a known page
origin. Requests from other machines need a token.

Source: https://modelcontextprotocol.io/specification/2025-11-25/basic/transports
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import secrets
import socket
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from mcp.server.auth.middleware.auth_context import AuthContextMiddleware
from mcp.server.auth.middleware.bearer_auth import BearerAuthBackend, RequireAuthMiddleware
from mcp.server.auth.provider import TokenVerifier
from mcp.server.auth.routes import build_resource_metadata_url, create_protected_resource_routes
from mcp.server.streamable_http import EventCallback, EventMessage, EventStore
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecurityMiddleware, TransportSecuritySettings
from mcp_types import JSONRPCMessage
from pydantic import AnyHttpUrl
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from handrail.config.mcp_settings import McpServeSettings, PrefixedSecretReference
from handrail.contract.errors import StartError, UsageError
from handrail.contract.text.strict_json import InvalidJsonTextError
from handrail.frontends.mcp.client_manager import McpClientManager, McpFrontendSettings
from handrail.frontends.mcp.client_messages import BATCH_VERSION, ClientMessages, parse_client_messages, to_json_line
from handrail.frontends.mcp.http.http_limits import (
    BACKLOG,
    MAX_CONNECTIONS,
    AmbiguousRequestFilter,
    BoundedHttpSessionManager,
    CredentialConcurrencyLimiter,
    make_bounded_connection_class,
    reject_http_request,
    send_json_response,
)
from handrail.frontends.mcp.http.token_verifiers import (
    MIN_TOKEN_LENGTH,
    CombinedTokenVerifier,
    IntrospectionSettings,
    IntrospectionTokenVerifier,
    JwtTokenVerifier,
    StaticTokenVerifier,
    make_token_check_failure_response,
    read_token_file,
    require_secure_url,
)
from handrail.frontends.mcp.mcp_server import build_mcp_server
from handrail.frontends.mcp.mcp_stdio_server import MAX_MESSAGE_BYTES, check_message_complexity
from handrail.runtime.secret_store import NO_SECRETS, SecretStore

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from handrail.kernel.kernel_interface import Kernel


# Resumable HTTP streams: the server keeps recent events, so that a client can continue after its connection broke.

MAX_EVENTS = 10_000
MAX_STREAM_EVENTS = 1_000
MAX_REPLAY_BYTES = 32 * 1024 * 1024
_NO_MESSAGE = 64
"""Bytes that an event without a message counts for."""


class BoundedEventStore(EventStore):
    """An event store with the last events of all streams, within bounds.

    The oldest events are removed first. Event IDs cannot be guessed, because an ID is enough to get the events after it.
    """

    def __init__(self) -> None:
        self._events: OrderedDict[str, tuple[str, JSONRPCMessage | None, int]] = OrderedDict()
        self._streams: dict[str, deque[str]] = {}
        self._bytes = 0

    async def store_event(self, stream_id: str, message: JSONRPCMessage | None) -> str:
        event_id = secrets.token_urlsafe(12)
        size = _NO_MESSAGE if message is None else len(message.model_dump_json())
        self._events[event_id] = (stream_id, message, size)
        stream = self._streams.setdefault(stream_id, deque())
        stream.append(event_id)
        self._bytes += size
        if len(stream) > MAX_STREAM_EVENTS:
            self._forget(stream[0])
        while self._events and (len(self._events) > MAX_EVENTS or self._bytes > MAX_REPLAY_BYTES):
            self._forget(next(iter(self._events)))
        return event_id

    def _forget(self, event_id: str) -> None:
        stream_id, _, size = self._events.pop(event_id)
        self._bytes -= size
        stream = self._streams[stream_id]
        stream.remove(event_id)
        if not stream:
            del self._streams[stream_id]

    async def replay_events_after(self, last_event_id: str, send_callback: EventCallback) -> str | None:
        known = self._events.get(last_event_id)
        if known is None:
            return None
        stream_id = known[0]
        passed = False
        for event_id in tuple(self._streams[stream_id]):
            if passed and (event := self._events.get(event_id)) is not None and event[1] is not None:
                await send_callback(EventMessage(event[1], event_id))
            passed = passed or event_id == last_event_id
        return stream_id


PATH = "/mcp"
RETRY_MS = 500
"""Milliseconds after which a client reconnects when the server closed its stream."""
MAX_SESSIONS = 1_000
MAX_SESSIONS_PER_CREDENTIAL = 250
"""Maximum number of sessions of one credential."""
GRACE_S = 3
"""Seconds that open connections have when the server stops."""


@dataclass(frozen=True, slots=True)
class HttpFrontendSettings:
    """The address of the HTTP server, and the clients that it accepts.

    :param public_url: the URL by which clients reach the server; None for the address itself
    :param tokens: accepted bearer tokens with their names
    :param auth_server: the OAuth authorization server whose access tokens are accepted
    :param introspection: how to query the authorization server about its tokens; None if they are signed
    """

    host: str
    port: int
    public_url: str | None = None
    tokens: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    auth_server: str | None = None
    scopes: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    introspection: IntrospectionSettings | None = None

    @staticmethod
    def from_options(
        address: str,
        token_file: str | None = None,
        auth_server: str | None = None,
        public_url: str | None = None,
        scopes: tuple[str, ...] = (),
        origins: tuple[str, ...] = (),
        configured: McpServeSettings | None = None,
        secrets: SecretStore = NO_SECRETS,
    ) -> HttpFrontendSettings:
        """Return the settings from the operator's options and configuration.

        :param address: ``HOST:PORT``, with brackets around an IPv6 address; port 0 for any
        :param configured: the configuration, for values that the options leave out
        :param secrets: the store with the secrets that the configuration names
        :raises UsageError: for invalid options, or an address beyond this machine without tokens
        :raises StartError: for an unusable token file or secret
        """
        own = configured or McpServeSettings()
        auth_server, public_url = auth_server or own.auth_server or None, public_url or own.public_url or None
        scopes = scopes or own.scopes
        host, port = _host_and_port(address)
        if auth_server is not None:
            require_secure_url(auth_server, "--auth-server")
        if public_url is not None:
            _check_public(public_url)
        for origin in origins:
            _check_origin(origin)
        if scopes and auth_server is None:
            raise UsageError("`--scope` requires `--auth-server`. Pass both, or leave out `--scope`.")
        tokens = read_token_file(token_file) if token_file is not None else {}
        _add_configured_tokens(tokens, own, secrets)
        asked = _introspection_settings(own, auth_server, secrets)
        found = HttpFrontendSettings(host, port, public_url, tokens, auth_server, scopes, origins, asked)
        found._check()
        return found

    def _check(self) -> None:
        """Check that the server is protected and has an address that clients know.

        :raises UsageError: if it is not
        """
        if not self.is_local and not self.tokens and self.auth_server is None:
            raise UsageError(
                f"{self.host} can be reached from other machines. Pass `--token-file FILE` or `--auth-server URL`, set tokens "
                "in `[mcp.serve]` of handrail.toml, or listen on 127.0.0.1."
            )
        if self.host in ("0.0.0.0", "::") and self.public_url is None:  # noqa: S104 - it is compared, not bound
            raise UsageError(f"{self.host} is not an address that clients can use. Pass `--public-url URL`.")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def list_allowed_hosts_and_origins(self, port: int) -> tuple[list[str], list[str]]:
        """Return the hosts and the origins that requests may name."""
        shown = (f"[{self.host}]" if ":" in self.host else self.host).lower()
        hosts = ["127.0.0.1", "localhost", "[::1]"] if self.is_local else [shown]
        found = [*hosts, *(f"{host}:{port}" for host in hosts)]
        origins = [f"http://{host}" for host in found]
        if self.public_url is not None:
            parts = urlsplit(self.public_url)
            found.append(parts.netloc.lower())
            origins.append(f"{parts.scheme}://{parts.netloc}".lower())
        return found, [*origins, *self.origins]


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, digits = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (digits.isascii() and digits.isdigit()) or int(digits) > 65_535:
        raise UsageError(f"Invalid value for `--http`: {address!r}. Expected HOST:PORT, such as 127.0.0.1:8080.")
    return host, int(digits)


def _check_public(url: str) -> None:
    if not urlsplit(url).path.rstrip("/"):
        raise UsageError(
            f"Invalid value for `--public-url`: {url!r}. Expected a URL with a path, such as https://…{PATH}."
        )
    require_secure_url(url, "--public-url")


def _check_origin(origin: str) -> None:
    """Check that a value is an origin: scheme, host and port only.

    :raises UsageError: if it is not
    """
    parts = urlsplit(origin)
    if parts.scheme not in ("http", "https") or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != origin:
        expected = "Expected an origin, such as https://app.example.org."
        raise UsageError(f"Invalid value for `--allow-origin`: {origin!r}. {expected}")


def _add_configured_tokens(tokens: dict[str, str], own: McpServeSettings, secrets: SecretStore) -> None:
    """Add the configured tokens with their names to ``tokens``.

    :raises UsageError: for a token that is too short, or equal to another
    :raises StartError: for a secret without a value
    """
    for name, token in own.tokens.items():
        value = _secret_value(token, secrets, f"[mcp.serve] tokens.{name}")
        if len(value) < MIN_TOKEN_LENGTH or value in tokens:
            raise UsageError(
                f"Invalid token `tokens.{name}` in [mcp.serve]. A token needs at least {MIN_TOKEN_LENGTH} characters, and must "
                "differ from all others."
            )
        tokens[value] = name


def _secret_value(named: PrefixedSecretReference, secrets: SecretStore, place: str) -> str:
    """Return the value of a secret.

    :raises StartError: if the secret has no value
    """
    if (why := secrets.explain_missing_secret(named.secret)) is not None:
        raise StartError(f"The secret of `{place}` is not available: {why}. Set it, and start again.")
    return named.prefix + secrets.select([named.secret])[named.secret]


def _introspection_settings(
    own: McpServeSettings, auth_server: str | None, secrets: SecretStore
) -> IntrospectionSettings | None:
    if (given := own.introspection) is None:
        return None
    place = "[mcp.serve.introspection]"
    if auth_server is None:
        raise UsageError(
            f"{place} requires an authorization server. Set `auth_server` in [mcp.serve], or pass `--auth-server URL`."
        )
    if given.url:
        require_secure_url(given.url, f"{place} url")
    secret = _secret_value(given.client_secret, secrets, f"{place} client_secret")
    return IntrospectionSettings(given.client_id, secret, given.url, given.method, given.cache_s)


async def serve_http(
    kernel: Kernel, serving: McpFrontendSettings, settings: HttpFrontendSettings, on_address: Callable[[str], object]
) -> None:
    """Serve clients until cancelled.

    :param on_address: called with the address when the server is ready
    :raises StartError: if the server cannot listen on the address
    """
    logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # otherwise any request could fill the terminal
    async with open_http_server(kernel, serving, settings) as (address, running):
        on_address(address)
        await running


@asynccontextmanager
async def open_http_server(
    kernel: Kernel, serving: McpFrontendSettings, settings: HttpFrontendSettings
) -> AsyncGenerator[tuple[str, asyncio.Task[None]]]:
    """Serve clients until the block ends, and yield the address and the server's task."""
    waiting = _bind_socket(settings)
    port = waiting.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    clients = McpClientManager(kernel, serving, over_http=True)
    try:
        security = _security_settings(settings, port)
        manager = BoundedHttpSessionManager(
            app=build_mcp_server(clients),
            event_store=BoundedEventStore(),
            retry_interval=RETRY_MS,
            security_settings=security,
            session_idle_timeout=serving.idle_s,
            max_request_body_size=MAX_MESSAGE_BYTES,
            most=MAX_SESSIONS,
            most_of_one=MAX_SESSIONS_PER_CREDENTIAL,
            at_work=clients.has_running_calls,
        )
        address = f"http://{host}:{port}{PATH}"
        protocol = make_bounded_connection_class(MAX_CONNECTIONS, clients.close_disconnected_sessions)
        app = _build_app(manager, settings, address, security, max(4, protocol.most // 4))
        config = uvicorn.Config(
            app,
            http=protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            limit_concurrency=protocol.most + 5 * protocol.most_at_once,
            backlog=protocol.most_at_once,
            timeout_graceful_shutdown=GRACE_S,
            ws="none",
        )
        server = _UvicornServer(config)
        async with manager.run():
            running = asyncio.create_task(server.serve(sockets=[waiting]))
            try:
                yield address, running
            finally:
                server.should_exit = True
                await clients.aclose()
                await _wait_for_task_end(running)
    finally:
        await clients.aclose()
        waiting.close()


async def _wait_for_task_end(running: asyncio.Task[None]) -> None:
    """Wait until the task has ended, also if the waiting task is cancelled."""
    while not running.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((running,))
    if not running.cancelled():
        running.exception()


class _UvicornServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its caller, and waiting connections to the operating system."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # asyncio has set the number of connections that one step accepts

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _bind_socket(listening: HttpFrontendSettings) -> socket.socket:
    try:
        (family, _, _, _, where), *_ = socket.getaddrinfo(listening.host, listening.port, type=socket.SOCK_STREAM)
        waiting = socket.create_server(where[:2], family=family, backlog=BACKLOG)  # type: ignore[arg-type]
        # Connections inherit it. asyncio would not set it, because it does not know this socket's protocol.
        waiting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        why = "another program uses it" if taken else getattr(error, "strerror", None) or error
        where = f"{listening.host}:{listening.port}"
        raise StartError(f"Could not listen on {where}: {why}. Pass another HOST:PORT.") from None
    waiting.setblocking(False)
    return waiting


def _security_settings(listening: HttpFrontendSettings, port: int) -> TransportSecuritySettings:
    hosts, origins = listening.list_allowed_hosts_and_origins(port)
    return TransportSecuritySettings(enable_dns_rebinding_protection=True, allowed_hosts=hosts, allowed_origins=origins)


def _build_app(
    manager: StreamableHTTPSessionManager,
    listening: HttpFrontendSettings,
    address: str,
    security: TransportSecuritySettings,
    most_of_one: int,
) -> Starlette:
    """:param most_of_one: maximum number of concurrent requests of one credential"""
    resource = listening.public_url or address
    endpoint: ASGIApp = CredentialConcurrencyLimiter(
        RequestBodyLimiter(StreamableHTTPASGIApp(manager), security), most_of_one
    )
    routes: list[BaseRoute] = []
    middleware: list[Middleware] = [Middleware(AmbiguousRequestFilter)]
    if (verifier := _token_verifier(listening, resource)) is not None:
        own = AnyHttpUrl(resource)
        metadata = build_resource_metadata_url(own) if listening.auth_server is not None else None
        endpoint = RequireAuthMiddleware(endpoint, list(listening.scopes), metadata)
        backend = BearerAuthBackend(verifier, resource_server_url=own)
        known = Middleware(AuthenticationMiddleware, backend=backend, on_error=make_token_check_failure_response)
        middleware += [known, Middleware(AuthContextMiddleware)]
        if listening.auth_server is not None:
            routes += create_protected_resource_routes(
                own, [AnyHttpUrl(listening.auth_server)], list(listening.scopes) or None, "handrail"
            )
    if listening.origins:
        middleware.insert(
            1,
            Middleware(
                CORSMiddleware,
                allow_origins=listening.origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["Mcp-Session-Id", "WWW-Authenticate"],
            ),
        )
    return Starlette(routes=[*routes, Route(PATH, endpoint=endpoint)], middleware=middleware)


def _token_verifier(listening: HttpFrontendSettings, resource: str) -> TokenVerifier | None:
    found: list[TokenVerifier] = []
    if listening.tokens:
        found.append(StaticTokenVerifier(listening.tokens, resource, listening.scopes))
    if listening.auth_server is not None and listening.introspection is not None:
        found.append(IntrospectionTokenVerifier(listening.auth_server, resource, listening.introspection))
    elif listening.auth_server is not None:
        found.append(JwtTokenVerifier(listening.auth_server, resource))
    return CombinedTokenVerifier(found) if found else None


_UNKNOWN_CALLER = {
    421: "Unknown host. Expected the address that the server printed at its start. Start it with `--public-url URL` for another.",
    403: "Unknown page origin. Expected that of this server. Start it with `--allow-origin ORIGIN` for another.",
}
"""The answer to a request with an unknown host or page origin, by its status."""


class RequestBodyLimiter:
    """An ASGI middleware that rejects bodies that are too long, or nested too deeply.

    It reads nothing of a request with an unknown host or an unknown page origin.
    """

    def __init__(self, app: ASGIApp, security: TransportSecuritySettings) -> None:
        self._app = app
        self._named = TransportSecurityMiddleware(security)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        if (unknown := await self._named.validate_request(Request(scope))) is not None:
            text = _UNKNOWN_CALLER.get(unknown.status_code)
            if text is not None:
                return await reject_http_request(send, unknown.status_code, text)
            unknown.headers["connection"] = "close"  # nothing further is read from this connection
            return await unknown(scope, receive, send)
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        too_long = f"The message is too long. The limit is {MAX_MESSAGE_BYTES:,} bytes. Pass a path to a file instead."
        if declared.isdigit() and int(declared[:20]) > MAX_MESSAGE_BYTES:
            return await reject_http_request(send, 413, too_long, receive)
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None  # the client has disconnected
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > MAX_MESSAGE_BYTES:
                return await reject_http_request(send, 413, too_long, receive)
            if not message.get("more_body", False):
                break
        body = b"".join(pieces)
        try:
            check_message_complexity(body.decode("utf-8", "replace"))
        except InvalidJsonTextError as error:
            return await reject_http_request(send, 400, f"The parameters {error}")
        version = next((value for name, value in scope["headers"] if name == b"mcp-protocol-version"), b"")
        messages = parse_client_messages(body, serves_batches=version in (b"", BATCH_VERSION.encode()))
        if len(messages.texts) == 1 and not messages.errors:
            return await self._app(scope, _replay(messages.texts[0], receive), send)
        if messages.texts:
            return await _serve_together(self._app, messages, scope, receive, send)
        errors: Any = list(messages.errors)
        return await send_json_response(send, 400 if errors else 202, errors[0] if len(errors) == 1 else errors or None)


def _replay(text: str, receive: Receive) -> Receive:
    again: list[Message] = [{"type": "http.request", "body": text.encode(), "more_body": False}]

    async def replayed() -> Message:
        return again.pop() if again else await receive()

    return replayed


async def _serve_together(app: ASGIApp, messages: ClientMessages, scope: Scope, receive: Receive, send: Send) -> None:
    """Serve each message of a batch by itself, and send all of their events on one stream."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})

    async def send_event(body: bytes) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def serve(text: str) -> None:
        is_stream = False

        async def send_part(part: Message) -> None:
            nonlocal is_stream
            if part["type"] == "http.response.start":
                is_stream = any(value.startswith(b"text/event-stream") for _, value in part["headers"])
            elif body := part.get("body", b""):
                await send_event(body if is_stream else b"event: message\ndata: %s\n\n" % body)

        await app(scope, _replay(text, receive), send_part)

    for error in messages.errors:
        await send_event(b"event: message\ndata: %s\n" % to_json_line(error))
    await asyncio.gather(*(serve(text) for text in messages.texts))
    await send({"type": "http.response.body", "body": b""})
