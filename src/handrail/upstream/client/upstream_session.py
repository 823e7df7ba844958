"""The session on one connection to a server: the version, requests with their answers, and messages from the server.

Both eras: up to 2025-11-25 a connection begins with ``initialize``; from 2026-07-28 each request names its client and the
client's capabilities. A caller waits for its answer in its own task and may stop waiting at any time, which cancels only its own
request.

Source: https://modelcontextprotocol.io/specification/2025-11-25/basic/lifecycle
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, cast

from handrail.contract.errors import ToolError
from handrail.contract.services.client_services import CLIENT_REQUEST_KINDS, ClientMethod, RequestToClient
from handrail.contract.struct import Struct, field
from handrail.upstream.client.json_rpc_messages import Message, encode_message
from handrail.upstream.server_definition import CAPABILITY_BY_GRANT

if TYPE_CHECKING:
    from handrail.contract.services.tool_runtime import Runtime


# The transport of one connection: the Protocols of transport and message handler, and the errors of its end.

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""The most bytes of one message of a server; longer messages are dropped."""


class RpcError(Exception):
    """An error that a server, or its transport, sent as the answer to a request."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class ResponseTooLong(Exception):
    """An answer exceeds the size limit. The connection stays open."""


class UpstreamConnectionLost(Exception):
    """The connection is closed.

    :param unsent: whether the request certainly did not reach the server's tools
    :param forgotten: whether the server is reachable but no longer knows this session
    """

    def __init__(self, why: str, *, unsent: bool = False, forgotten: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.is_unsent = unsent or forgotten
        self.is_session_expired = forgotten


_NAME_PARAMETERS = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_TASKS = "io.modelcontextprotocol/tasks"


def make_extension_announcement(method: str) -> dict[str, Any]:
    """Return the extensions to announce in the newer era: tasks, for requests that may become one."""
    follows = method in ("tools/call", "subscriptions/listen") or method.startswith("tasks/")
    return {"extensions": {_TASKS: {}}} if follows else {}


def make_protocol_headers(version: str, method: str, params: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the header fields that describe a message over HTTP in the newer era."""
    found = {"mcp-protocol-version": version, "mcp-method": method}
    key = _NAME_PARAMETERS.get(method, "taskId" if method.startswith("tasks/") else None)
    if key is not None and params is not None and isinstance(name := params.get(key), str):
        found["mcp-name"] = name
    return found


def make_error_response(number: str | float, code: int, text: str) -> Message:
    """Return an error as the answer to a request of a server."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}


class TransportCallbacks(Protocol):
    """Callbacks for messages received on a transport. Implementations must not block or raise."""

    def on_message(self, message: Message, related: int | None) -> None:
        """Handle a message.

        :param related: the id of the client's request on whose stream the message arrived, if the transport knows it
        """

    def on_request_failed(self, request: int | None, error: Exception) -> None:
        """Fail a request that will get no answer; None if the transport does not know which."""

    def on_connection_lost(self, why: UpstreamConnectionLost) -> None:
        """Handle the end of the connection. No message follows."""


class McpTransport(Protocol):
    """The transport of one connection. One task opens, closes and reads it; any task may write."""

    async def open(self, handler: TransportCallbacks) -> None:
        """Connect, and deliver messages to ``handler`` from now on.

        :raises UpstreamConnectionLost: if the server cannot be reached
        """

    async def send(self, message: Message, headers: Mapping[str, str] | None = None) -> None:
        """Send a message.

        :param headers: additional header fields, for transports that have them
        :raises UpstreamConnectionLost: if it cannot be sent
        """

    def abandon_request(self, request: int) -> bool:
        """Abandon a request, and return whether the transport itself notifies the server."""
        ...

    def watch_protected_paths(self) -> AbstractAsyncContextManager[None]:
        """Return a context for a call, which fails if the call changes a protected name.

        :raises ToolError: ``denied``, at the end of the context
        """
        ...

    def set_version(self, protocol: str, *, modern: bool) -> None:
        """Set the agreed protocol version."""

    async def aclose(self) -> None:
        """Close the transport and release all that it uses. Never raises."""


HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
_EARLY_VERSION = re.compile(r"2024-(?:0\d|10)-\d\d")
"""Versions before the first one of :data:`HANDSHAKE_VERSIONS`, whose messages are the same."""
MODERN_VERSIONS = ("2026-07-28",)
METHOD_NOT_FOUND, INVALID_REQUEST, INTERNAL_ERROR = -32601, -32600, -32603
UNSUPPORTED_VERSION = -32022
PROBE_S = 5.0
"""The timeout in seconds for a server's answer about the newest version; older servers often do not answer."""
UNRELATED_ERROR_S = 1.0
"""The time in seconds for an answer to the handshake after an error that names no request."""
LOG_LEVEL = "debug"
"""The level of log messages to request; the frontend filters them for each client."""
DRAIN_S = 2.0
"""The timeout in seconds for pending requests to fail by themselves after the server has forgotten the session."""
MAX_SERVER_REQUESTS = 16
"""The most requests of a server that are processed at the same time."""
MAX_PENDING_REPLIES = 256
"""The most replies that wait for a server; above that the connection is closed, since the server does not read."""
MAX_REQUEST_NOTIFICATIONS = 10_000
"""The most notifications about one request that are passed on."""
_ABANDON_S = 5.0
_META = "io.modelcontextprotocol/"

ProtocolEra = Literal["legacy", "modern"]
TimeLimiter = Callable[[float], AbstractAsyncContextManager[object]]
"""Limits the time of a block in seconds, like :func:`asyncio.timeout`."""
GRANT_BY_METHOD: Mapping[str, str] = {
    "sampling/createMessage": "sampling",
    "elicitation/create": "elicitation",
    "roots/list": "roots",
}


class _PendingServerRequest(Struct, eq=False):
    method: str
    answer: asyncio.Future[dict[str, Any]]
    runtime: Runtime | None
    acknowledged: asyncio.Event | None = None
    notification_count: int = 0
    server_requests: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])


class UpstreamSessionCallbacks(Struct, frozen=True):
    """The callbacks of a session to its owner. They must not block.

    :param on_list_changed: called when one of the server's lists has changed
    :param on_resource_updated: called with the URI of a subscribed resource that has changed
    :param on_connection_lost: called when the connection is closed
    """

    on_list_changed: Callable[[], None]
    on_resource_updated: Callable[[str], None]
    on_connection_lost: Callable[[UpstreamConnectionLost], None]


class UpstreamSession:
    """The MCP client session with one server. For one event loop.

    :param name: the operator's name of the server
    :param grants: the requests that the server may send to a client
    """

    def __init__(
        self, transport: McpTransport, name: str, grants: frozenset[str], version: str, hooks: UpstreamSessionCallbacks
    ) -> None:
        self.name = name
        self.transport = transport
        self.era: ProtocolEra | None = None
        self.protocol = ""
        self.capabilities: Mapping[str, Any] = {}
        self.server: Mapping[str, Any] = {}
        self.answered_count = 0
        """The number of answered requests after the start."""
        self.end_reason: UpstreamConnectionLost | None = None
        self.task_listeners: dict[str, Callable[[Mapping[str, Any]], None]] = {}
        """By task id, the callback for notifications about a task."""
        self._grants = grants
        self._client = {"name": "handrail", "version": version}
        self._hooks = hooks
        self._next = 0
        self._pending: dict[int, _PendingServerRequest] = {}
        self._server_requests: dict[object, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: set[asyncio.Task[None]] = set()

    async def negotiate_version(
        self, hint: ProtocolEra | None, timeout_s: float, limit_time: TimeLimiter = asyncio.timeout
    ) -> None:
        """Agree on a version with the server.

        If it fails without the hint ``legacy``, the probe for the newest version may be the reason. Then connect again
        with that hint.

        :param hint: the era of the last connection
        :param limit_time: limits the time of a block in seconds
        :raises UpstreamConnectionLost: if the connection ends
        :raises RpcError: if the server refuses
        :raises TimeoutError: if the server does not answer
        """
        async with limit_time(timeout_s):
            if hint != "legacy":
                # The newest version is tried first. Older servers answer the unknown method with an error, or not at
                # all.
                if not await self._discover(timeout_s, limit_time):
                    async with limit_time(PROBE_S):  # it is awake, unless the probe has upset it
                        await self._initialize()
                return
            try:
                await self._initialize()
            except RpcError as error:
                # The first question may have been answered too late; the server speaks the newest version only.
                newer = error.code in (UNSUPPORTED_VERSION, METHOD_NOT_FOUND)
                if not newer or not await self._discover(timeout_s, limit_time):
                    raise

    async def _discover(
        self, timeout_s: float, limit_time: TimeLimiter, version: str = MODERN_VERSIONS[-1], *, again: bool = True
    ) -> bool:
        try:
            async with limit_time(min(PROBE_S, timeout_s / 2)):
                found = await self.request(
                    "server/discover", {}, headers=make_protocol_headers(version, "server/discover"), version=version
                )
        except RpcError as error:
            data = _object(error.data).get("supported")
            supported = cast("list[Any]", data) if isinstance(data, list) else None
            if error.code == UNSUPPORTED_VERSION and supported is not None:
                # One more try is enough, because the server has named the versions that it supports.
                if again and (known := [one for one in MODERN_VERSIONS if one in supported]):
                    return await self._discover(timeout_s, limit_time, known[-1], again=False)
                if not set(HANDSHAKE_VERSIONS) & set(map(str, supported)):
                    raise
            return False
        given = found.get("supportedVersions", found.get("protocolVersion"))
        versions = cast("list[Any]", given) if isinstance(given, list) else [given]
        if version not in versions:
            return False
        self.era, self.protocol = "modern", version
        self.capabilities = _object(found.get("capabilities"))
        self.server = _object(_object(found.get("_meta")).get(f"{_META}serverInfo"))
        self.transport.set_version(version, modern=True)
        return True

    async def _initialize(self) -> None:
        offered = {
            "protocolVersion": HANDSHAKE_VERSIONS[-1],
            "capabilities": self._client_capabilities(),
            "clientInfo": self._client,
        }
        self.transport.set_version("", modern=False)
        found = await self.request("initialize", offered)
        version = found.get("protocolVersion")
        if not isinstance(version, str) or _EARLY_VERSION.fullmatch(version):
            version = HANDSHAKE_VERSIONS[0]
        if version not in HANDSHAKE_VERSIONS:
            raise RpcError(
                INVALID_REQUEST,
                f"the server speaks version {version[:40]!r}; Handrail supports {', '.join(HANDSHAKE_VERSIONS)}",
            )
        self.era, self.protocol = "legacy", version
        self.capabilities, self.server = _object(found.get("capabilities")), _object(found.get("serverInfo"))
        self.transport.set_version(self.protocol, modern=False)
        await self.notify("notifications/initialized")
        if "logging" in self.capabilities:
            self._spawn(self._enable_logging())

    async def _enable_logging(self) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await self.request("logging/setLevel", {"level": LOG_LEVEL})
        except (RpcError, UpstreamConnectionLost, TimeoutError):
            pass  # then the server chooses the level

    def _client_capabilities(self, runtime: Runtime | None = None) -> dict[str, Any]:
        """Return the client capabilities that the server may use, of the call's client if there is a call."""
        # A server that has no grant must not learn what the user's client can do.
        if not self._grants:
            return {}
        kinds = _allowed_request_kinds(runtime)
        offered: dict[str, Any] = {}
        if "sampling" in self._grants and "sample" in kinds:
            offered["sampling"] = {"tools": {}} if "sample-tools" in kinds else {}
        if "elicitation" in self._grants and (modes := [mode for mode in ("form", "url") if mode in kinds]):
            offered["elicitation"] = {mode: {} for mode in modes}
        if "roots" in self._grants and "roots" in kinds:
            offered["roots"] = {"listChanged": False}
        return offered

    async def request(
        self,
        method: str,
        params: Mapping[str, Any],
        runtime: Runtime | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        version: str = "",
        acknowledged: asyncio.Event | None = None,
    ) -> dict[str, Any]:
        """Send a request and return its result.

        :param runtime: the runtime of the call that needs the request, which receives the notifications about it
        :param acknowledged: set when the server acknowledges a subscription
        :param version: the newer era's version for this request, before a version is agreed
        :raises RpcError: if the server answered with an error
        :raises UpstreamConnectionLost: if the connection ends before the answer
        :raises ResponseTooLong: if the answer exceeds the size limit
        """
        if self.end_reason is not None:
            raise UpstreamConnectionLost(self.end_reason.why, unsent=True)
        self._next += 1
        number = self._next
        # In the newer era, every request carries the version. No session remembers it.
        version = version or (self.protocol if self.era == "modern" else "")
        fields: dict[str, Any] = dict(params)
        if version:
            headers = {**make_protocol_headers(version, method, fields), **(headers or {})}
        if meta := {**fields.get("_meta", {}), **self._meta(number, method, version, runtime)}:
            fields["_meta"] = meta
        message: Message = {"jsonrpc": "2.0", "id": number, "method": method}
        if fields:
            message["params"] = fields
        pending = self._pending[number] = _PendingServerRequest(
            method, asyncio.get_running_loop().create_future(), runtime, acknowledged
        )
        try:
            await self.transport.send(message, headers)
            found = await pending.answer
        except asyncio.CancelledError:
            # The server must stop the work, or it would continue to change things after the call has ended.
            self._cancel_request(number, method)
            raise
        finally:
            self._pending.pop(number, None)
            if not pending.answer.cancel() and not pending.answer.cancelled():
                pending.answer.exception()  # mark the error as retrieved, also if sending failed
            for task in pending.server_requests:
                task.cancel()
        if self.era is not None:
            self.answered_count += 1
        return found

    def _meta(self, number: int, method: str, version: str, runtime: Runtime | None) -> dict[str, Any]:
        """Return the metadata of a request.

        :param version: the version of the newer era; empty in the older one
        """
        meta: dict[str, Any] = {}
        if runtime is not None:
            meta["progressToken"] = number
        if version:
            meta |= {
                f"{_META}protocolVersion": version,
                f"{_META}clientInfo": self._client,
                f"{_META}clientCapabilities": {
                    **self._client_capabilities(runtime),
                    **make_extension_announcement(method),
                },
            }
            if runtime is not None:
                meta[f"{_META}logLevel"] = LOG_LEVEL
        return meta

    async def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        """Send a notification.

        :raises UpstreamConnectionLost: if it cannot be sent
        """
        message: Message = {"jsonrpc": "2.0", "method": method}
        if params:
            message["params"] = dict(params)
        await self.transport.send(message)

    def _cancel_request(self, number: int, method: str) -> None:
        """Cancel a request that no caller waits for."""
        if (
            self.end_reason is None
            and not self.transport.abandon_request(number)
            and method not in ("initialize", "server/discover")
        ):
            self._spawn(self._send_cancelled(number))

    async def _send_cancelled(self, number: int) -> None:
        try:
            async with asyncio.timeout(_ABANDON_S):
                await self.notify(
                    "notifications/cancelled", {"requestId": number, "reason": "the caller cancelled the request"}
                )
        except (UpstreamConnectionLost, TimeoutError):
            pass

    # ── messages from the server ────────────────────────────────────────────────────────────────

    def on_message(self, message: Message, related: int | None) -> None:
        method, number = message.get("method"), message.get("id")
        is_answer = "result" in message and self._find_pending(number) is not None  # some repeat the method, too
        if isinstance(method, str) and not is_answer:
            given = message.get("params")
            params = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
            if (own := self._find_pending(number)) is not None and own.method == method:
                return  # the program, or its terminal, repeats what it reads
            if number is None:
                self._handle_notification(method, params, related)
            elif isinstance(number, (str, int, float)):
                self._handle_server_request(number, method, params, related)
            return
        result, error = message.get("result"), message.get("error")
        if "result" in message and not error:
            error = None  # some servers write an empty error, too
        if number is None and error is not None and self.era is None:
            self._handle_unrelated_error(parse_rpc_error(error))
        if number is None and isinstance(result, dict) and "content" in result:
            calls = [one for one, pending in self._pending.items() if pending.method == "tools/call"]
            number = calls[0] if len(calls) == 1 else None  # the answer can belong to no other request
        pending = self._find_pending(number)
        # A late or repeated answer has no request any more.
        if pending is None or pending.answer.done():
            return
        if error is not None:
            pending.answer.set_exception(parse_rpc_error(error))
        elif isinstance(result, dict):
            pending.answer.set_result(cast("dict[str, Any]", result))
        else:  # some servers answer with the content itself, or with null for an empty result
            pending.answer.set_result({} if result is None else {"content": result})

    def _handle_unrelated_error(self, error: RpcError) -> None:
        """Handle an error without a number before the handshake: the server could not read a request, or a part of one.

        The answer to the handshake may still come.
        """
        waiting = [number for number, one in self._pending.items() if one.method == "initialize"]
        if waiting:
            loop = asyncio.get_running_loop()
            loop.call_later(UNRELATED_ERROR_S, self.on_request_failed, waiting[0], error)
        else:
            self.on_request_failed(None, error)

    def on_request_failed(self, request: int | None, error: Exception) -> None:
        # The transport could not read the answer, but only one request can be meant.
        if request is None and len(self._pending) == 1:
            request = next(iter(self._pending))
        pending = self._pending.get(request) if request is not None else None
        if pending is not None and not pending.answer.done():
            pending.answer.set_exception(error)

    def on_connection_lost(self, why: UpstreamConnectionLost) -> None:
        if self.end_reason is not None:
            return
        self.end_reason = why
        if not why.is_session_expired:  # else each pending request fails by its own answer
            self._fail_all(why)
        self._hooks.on_connection_lost(why)

    def _fail_all(self, why: UpstreamConnectionLost) -> None:
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(UpstreamConnectionLost(why.why))

    def _find_pending(self, number: object) -> _PendingServerRequest | None:
        """Return the pending request for an answer's id, which some servers return as text or as a float."""
        pending = self._pending.get(int(number)) if _is_number(number) and number == int(number) else None
        if pending is None and isinstance(number, str) and len(number) < 19 and number.isdecimal():
            pending = self._pending.get(int(number))
        return pending

    def _handle_notification(self, method: str, params: dict[str, Any], related: int | None) -> None:
        match method:
            case "notifications/progress":
                self._progress(params)
            case "notifications/message":
                self._handle_log(params, related)
            case "notifications/tools/list_changed" | "notifications/resources/list_changed":
                self._hooks.on_list_changed()
            case "notifications/prompts/list_changed":
                self._hooks.on_list_changed()
            case "notifications/resources/updated":
                if isinstance(uri := params.get("uri"), str):
                    self._hooks.on_resource_updated(uri)
            case "notifications/tasks":
                if (tell := self.task_listeners.get(str(params.get("taskId")))) is not None:
                    tell(params)
            case "notifications/subscriptions/acknowledged":
                self._handle_acknowledged(params, related)
            case "notifications/cancelled":
                self._cancel_server_request(params.get("requestId"))
            case _:
                pass

    def _handle_acknowledged(self, params: dict[str, Any], related: int | None) -> None:
        number = related if related is not None else _object(params.get("_meta")).get(f"{_META}subscriptionId")
        pending = self._pending.get(number) if isinstance(number, int) else None
        if pending is not None and pending.acknowledged is not None:
            pending.acknowledged.set()

    def _cancel_server_request(self, number: object) -> None:
        """Cancel a request of the server's that is being answered."""
        task = self._server_requests.get(number) if isinstance(number, (str, int)) else None
        if task is not None:
            task.cancel()

    def _progress(self, params: dict[str, Any]) -> None:
        token, done, total, text = (params.get(key) for key in ("progressToken", "progress", "total", "message"))
        pending = self._find_pending(token)
        if pending is None or pending.runtime is None or not _is_number(done):
            return
        pending.notification_count += 1
        if pending.notification_count > MAX_REQUEST_NOTIFICATIONS:
            return
        whole = cast("float", total) if _is_number(total) and cast("float", total) > 0 else None
        share = None if whole is None else min(1.0, max(0.0, cast("float", done) / whole))
        message = text if isinstance(text, str) else ""
        pending.runtime.report_progress(message, fraction=share, done=cast("float", done), total=whole)

    def _handle_log(self, params: dict[str, Any], related: int | None) -> None:
        pending = self._find_related_call(params, related)
        if pending is None or pending.runtime is None:
            return
        pending.notification_count += 1
        if pending.notification_count > MAX_REQUEST_NOTIFICATIONS:
            return
        level, logger = params.get("level"), params.get("logger")
        try:
            pending.runtime.log(cast("Any", level), params.get("data"), logger if isinstance(logger, str) else None)
        except ToolError:
            pass  # an unknown level

    def _find_related_call(self, params: dict[str, Any], related: int | None) -> _PendingServerRequest | None:
        """Return the pending call that a message belongs to, or None if that is not certain.

        It is the call of the stream on which the message arrived, or the one that the message names, or the only one.
        """
        named: Any = _object(params.get("_meta")).get("progressToken")
        for number in (related, named):
            if (found := self._find_pending(number)) is not None:
                return found if found.runtime is not None else None
        # With several calls in flight, a guess could show one user's question to another.
        calls = [one for one in self._pending.values() if one.runtime is not None]
        return calls[0] if len(calls) == 1 and related is None else None

    def _handle_server_request(
        self, number: str | float, method: str, params: dict[str, Any], related: int | None
    ) -> None:
        if method == "ping":
            self._reply_soon({"jsonrpc": "2.0", "id": number, "result": {}})
            return
        if len(self._server_requests) >= MAX_SERVER_REQUESTS or number in self._server_requests:
            self._reply_soon(
                make_error_response(
                    number, INTERNAL_ERROR, "too many requests at the same time; wait for an answer before the next one"
                )
            )
            return
        pending = self._find_related_call(params, related)
        task = self._spawn(self._answer_server_request(number, method, params, pending))
        self._server_requests[number] = task
        task.add_done_callback(lambda _: self._server_requests.pop(number, None))
        if pending is not None:
            pending.server_requests.add(task)
            task.add_done_callback(pending.server_requests.discard)

    async def _answer_server_request(
        self, number: str | float, method: str, params: dict[str, Any], pending: _PendingServerRequest | None
    ) -> None:
        grant = GRANT_BY_METHOD.get(method)
        # In the newer era, a server asks through the result of a call, never with a request.
        if grant is None or grant not in self._grants or self.era == "modern":
            await self._reply(make_error_response(number, METHOD_NOT_FOUND, f"{method} is not granted to this server"))
            return
        runtime = pending.runtime if pending is not None else None
        if runtime is None:
            text = (
                f"{method} cannot be related to a call; send it on the stream of that call, or run one call at a time"
            )
            await self._reply(make_error_response(number, INVALID_REQUEST, text))
            return
        params.pop("_meta", None)
        try:
            answers = await runtime.client.send_requests(
                {"it": RequestToClient(cast("ClientMethod", method), params, self.name)}
            )
            answer: Message = {"jsonrpc": "2.0", "id": number, "result": dict(answers["it"])}
        except ToolError as error:
            answer = make_error_response(number, INVALID_REQUEST, error.text)
        await self._reply(answer)

    def _reply_soon(self, message: Message) -> None:
        # A server that sends without reading would make this process keep every reply.
        if len(self._replies) >= MAX_PENDING_REPLIES:
            self.on_connection_lost(
                UpstreamConnectionLost(f"the server sent {MAX_PENDING_REPLIES} requests without reading the answers")
            )
        else:
            self._replies.add(task := self._spawn(self._reply(message)))
            task.add_done_callback(self._replies.discard)

    async def _reply(self, message: Message) -> None:
        try:
            await self.transport.send(message)
        except UpstreamConnectionLost:
            pass

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.add(task := asyncio.create_task(work, name=f"mcp {self.name}"))
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """Stop everything that is in progress, and close the transport."""
        self.on_connection_lost(UpstreamConnectionLost("the connection was closed"))
        if self.end_reason is not None and self.end_reason.is_session_expired and self._pending:
            await asyncio.wait([one.answer for one in self._pending.values()], timeout=DRAIN_S)
        self._fail_all(UpstreamConnectionLost("the connection was closed"))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.transport.aclose()


def parse_rpc_error(error: object) -> RpcError:
    """Return the error of an answer, which some servers write as a text."""
    if not isinstance(error, dict):
        return RpcError(INTERNAL_ERROR, str(error)[:4000])
    fields = cast("dict[str, Any]", error)
    code, said, data = fields.get("code"), fields.get("message"), fields.get("data")
    if isinstance(code, str | float) and re.fullmatch(r"\s*-?\d{1,9}(?:\.0)?\s*", str(code)):
        code = int(float(code))
    if not isinstance(said, str):
        said = "" if said is None else encode_message(said).decode()
    return RpcError(code if isinstance(code, int) else INTERNAL_ERROR, said[:4000], data)


def _allowed_request_kinds(runtime: Runtime | None) -> set[str]:
    """Return the kinds of requests that the client of a call answers; all kinds without a call."""
    return {kind for kind, asked in CLIENT_REQUEST_KINDS.items() if runtime is None or runtime.client.supports(*asked)}


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and abs(value) < 1e300


assert set(GRANT_BY_METHOD.values()) == set(CAPABILITY_BY_GRANT)
