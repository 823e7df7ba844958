"""The conversation on one connection: the version, requests with their answers, and messages from the server.

Both eras: up to 2025-11-25 a connection begins with ``initialize``; from 2026-07-28 each request names its client and the
client's abilities. A caller waits for its answer in its own task and may leave at any time; that ends its request and nothing
else.

Source: https://modelcontextprotocol.io/specification/2025-11-25/basic/lifecycle
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from handrail.contract.doors.peer import ASK_KINDS, Ask, AskMethod
from handrail.contract.errors import ToolError
from handrail.upstream.definition import GRANTS

if TYPE_CHECKING:
    from handrail.contract.doors.runtime import Runtime


# The transport of one connection: the Protocols of channel and listener, and the errors of its end.

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of one message of a server; a longer one is not kept."""


class RpcError(Exception):
    """A server answered a request with an error, or its transport did."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class TooLong(Exception):
    """An answer is longer than is kept; everything else goes on."""


class Lost(Exception):
    """The connection is no more.

    :param unsent: whether the request is known not to have reached the server's tools
    :param forgotten: the server is there, and knows nothing of this connection any more
    """

    def __init__(self, why: str, *, unsent: bool = False, forgotten: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.unsent = unsent or forgotten
        self.forgotten = forgotten


_NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_TASKS = "io.modelcontextprotocol/tasks"


def extensions_of(method: str) -> dict[str, Any]:
    """What the client says that it can do beside, in the newer era: follow a task, where a call may become one."""
    follows = method in ("tools/call", "subscriptions/listen") or method.startswith("tasks/")
    return {"extensions": {_TASKS: {}}} if follows else {}


def headers_of(version: str, method: str, params: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What a transport over HTTP says beside the message, in the newer era."""
    found = {"mcp-protocol-version": version, "mcp-method": method}
    key = _NAMED.get(method, "taskId" if method.startswith("tasks/") else None)
    if key is not None and params is not None and isinstance(name := params.get(key), str):
        found["mcp-name"] = name
    return found


def refusal(number: str | int, code: int, text: str) -> Message:
    """The answer to a request of a server that is not carried out."""
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}


class Ears(Protocol):
    """Who is told what comes over a channel. None of these blocks, none raises."""

    def heard(self, message: Message, related: int | None) -> None:
        """:param related: the request of ours on whose stream it came, where the transport tells"""
        ...

    def failed(self, request: int | None, error: Exception) -> None:
        """A request will not be answered; None where nobody can tell which."""
        ...

    def lost(self, why: Lost) -> None:
        """Nothing will come any more."""
        ...


class Channel(Protocol):
    """Opened, closed and read by one task; written to by any."""

    async def open(self, ears: Ears) -> None:
        """
        :raises Lost: where the server cannot be reached
        """
        ...

    async def send(self, message: Message, headers: Mapping[str, str] | None = None) -> None:
        """
        :param headers: further fields, for a transport that has such
        :raises Lost: where it cannot be sent
        """
        ...

    def abandon(self, request: int) -> bool:
        """Nobody waits for the answer any more. Whether the transport itself tells the server so."""
        ...

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Around a call of a server that may write: what it made under a protected name meanwhile fails the call.

        :raises ToolError: ``denied``, when it ends
        """
        ...

    def settled(self, protocol: str, *, modern: bool) -> None:
        """The version that is spoken from now on."""
        ...

    async def aclose(self) -> None:
        """End it, and return when nothing of it is left. Never raises."""
        ...


HANDSHAKE = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN = ("2026-07-28",)
METHOD_NOT_FOUND, INVALID_REQUEST, INTERNAL = -32601, -32600, -32603
UNSUPPORTED_VERSION = -32022
PROBE_S = 5.0
"""How long a server may take to say whether it speaks the newest version; many that do not simply say nothing."""
LOG_LEVEL = "debug"
"""Of what a server logs all is asked for: the face shows each client what that one wants of it."""
DRAIN_S = 2.0
"""How long the requests that are under way may take to be told that the server has forgotten their session."""
MOST_ASKS = 16
"""Requests of a server that are under way at once."""
MOST_REPLIES = 256
"""Answers that wait for a server to take them, after which it is given up: it asks, and does not read."""
MOST_TOLD = 10_000
"""Notifications about one request that are passed on."""
_ABANDON_S = 5.0
_META = "io.modelcontextprotocol/"

Era = Literal["legacy", "modern"]
ASKED_BY: Mapping[str, str] = {
    "sampling/createMessage": "sampling",
    "elicitation/create": "elicitation",
    "roots/list": "roots",
}


@dataclass(slots=True, eq=False)
class _Pending:
    answer: asyncio.Future[dict[str, Any]]
    runtime: Runtime | None
    heard: asyncio.Event | None = None
    told: int = 0
    asks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a connection's owner is told of; nothing of it blocks.

    :param changed: one of the server's lists is another now
    :param updated: a resource that is subscribed to
    :param lost: the connection is no more
    """

    changed: Callable[[], None]
    updated: Callable[[str], None]
    lost: Callable[[Lost], None]


class Conversation:
    """Implements :class:`~handrail.upstream.client.conversation.Ears`. For one event loop.

    :param name: what the operator calls the server
    :param grants: what it may ask of a client
    """

    def __init__(self, channel: Channel, name: str, grants: frozenset[str], version: str, hooks: Hooks) -> None:
        self.name = name
        self.channel = channel
        self.era: Era | None = None
        self.protocol = ""
        self.capabilities: Mapping[str, Any] = {}
        self.server: Mapping[str, Any] = {}
        self.answered = 0
        """How many requests have been, after it began."""
        self.end: Lost | None = None
        self.told_of: dict[str, Callable[[Mapping[str, Any]], None]] = {}
        """By the task: who hears what the server says of it by itself."""
        self._grants = grants
        self._client = {"name": "handrail", "version": version}
        self._hooks = hooks
        self._next = 0
        self._pending: dict[int, _Pending] = {}
        self._theirs: dict[object, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: set[asyncio.Task[None]] = set()

    async def begin(self, hint: Era | None, timeout_s: float) -> None:
        """Agree on a version.

        :param hint: the era that it spoke the last time
        :raises Lost: when the connection ends
        :raises RpcError: when the server does not want to
        :raises TimeoutError: when it says nothing
        """
        async with asyncio.timeout(timeout_s):
            if hint != "legacy" and await self._discovered(timeout_s):
                return
            try:
                await self._initialized()
            except RpcError as error:
                # It may have taken the question before, slowly, and speaks the newest version since.
                if error.code != UNSUPPORTED_VERSION or not await self._discovered(timeout_s):
                    raise

    async def _discovered(self, timeout_s: float, version: str = MODERN[-1], *, again: bool = True) -> bool:
        try:
            async with asyncio.timeout(min(PROBE_S, timeout_s / 2)):
                found = await self.request(
                    "server/discover", {}, headers=headers_of(version, "server/discover"), version=version
                )
        except TimeoutError:
            return False
        except RpcError as error:
            data = _object(error.data).get("supported")
            supported = cast("list[Any]", data) if isinstance(data, list) else None
            if error.code == UNSUPPORTED_VERSION and supported is not None:
                if again and (known := [one for one in MODERN if one in supported]):
                    return await self._discovered(timeout_s, known[-1], again=False)
                if not set(HANDSHAKE) & set(map(str, supported)):
                    raise
            return False
        versions = found.get("supportedVersions")
        if not isinstance(versions, list) or version not in versions:
            return False
        self.era, self.protocol = "modern", version
        self.capabilities = _object(found.get("capabilities"))
        self.server = _object(_object(found.get("_meta")).get(f"{_META}serverInfo"))
        self.channel.settled(version, modern=True)
        return True

    async def _initialized(self) -> None:
        offered = {"protocolVersion": HANDSHAKE[-1], "capabilities": self._offered(), "clientInfo": self._client}
        self.channel.settled("", modern=False)
        found = await self.request("initialize", offered)
        version = found.get("protocolVersion")
        if version not in HANDSHAKE:
            raise RpcError(
                INVALID_REQUEST, f"it speaks version {str(version)[:40]!r}, and Handrail {', '.join(HANDSHAKE)}"
            )
        self.era, self.protocol = "legacy", str(version)
        self.capabilities, self.server = _object(found.get("capabilities")), _object(found.get("serverInfo"))
        self.channel.settled(self.protocol, modern=False)
        await self.notify("notifications/initialized")
        if "logging" in self.capabilities:
            self._spawn(self._with_logging())

    async def _with_logging(self) -> None:
        try:
            async with asyncio.timeout(PROBE_S):
                await self.request("logging/setLevel", {"level": LOG_LEVEL})
        except (RpcError, Lost, TimeoutError):
            pass  # then it says what it likes

    def _offered(self, runtime: Runtime | None = None) -> dict[str, Any]:
        """What the client can do, as far as the server may use it; what the one of a call can, where there is a call."""
        if not self._grants:
            return {}
        kinds = _kinds_offered(runtime)
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
        heard: asyncio.Event | None = None,
    ) -> dict[str, Any]:
        """Ask the server, and give its result.

        :param runtime: of the call on whose behalf, which is told what the server tells meanwhile
        :param heard: set once the server says that it tells from now on what was asked for
        :param version: that of the newer era which this request is made by, before one is agreed on
        :raises RpcError: as it answered
        :raises Lost: when the connection ends before the answer
        :raises TooLong: when its answer is larger than is kept
        """
        if self.end is not None:
            raise Lost(self.end.why, unsent=True)
        self._next += 1
        number = self._next
        version = version or (self.protocol if self.era == "modern" else "")
        said: dict[str, Any] = dict(params)
        if version:
            headers = {**headers_of(version, method, said), **(headers or {})}
        if meta := {**said.get("_meta", {}), **self._meta(number, method, version, runtime)}:
            said["_meta"] = meta
        message: Message = {"jsonrpc": "2.0", "id": number, "method": method}
        if said:
            message["params"] = said
        pending = self._pending[number] = _Pending(asyncio.get_running_loop().create_future(), runtime, heard)
        try:
            await self.channel.send(message, headers)
            found = await pending.answer
        except asyncio.CancelledError:
            self._abandon(number, method)
            raise
        finally:
            self._pending.pop(number, None)
            if not pending.answer.cancel() and not pending.answer.cancelled():
                pending.answer.exception()  # seen, also where sending it failed
            for task in pending.asks:
                task.cancel()
        if self.era is not None:
            self.answered += 1
        return found

    def _meta(self, number: int, method: str, version: str, runtime: Runtime | None) -> dict[str, Any]:
        """What a request says of itself beside its parameters.

        :param version: of the newer era; empty in the older one
        """
        meta: dict[str, Any] = {}
        if runtime is not None:
            meta["progressToken"] = number
        if version:
            meta |= {
                f"{_META}protocolVersion": version,
                f"{_META}clientInfo": self._client,
                f"{_META}clientCapabilities": {**self._offered(runtime), **extensions_of(method)},
            }
            if runtime is not None:
                meta[f"{_META}logLevel"] = LOG_LEVEL
        return meta

    async def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        """
        :raises Lost: where it cannot be sent
        """
        message: Message = {"jsonrpc": "2.0", "method": method}
        if params:
            message["params"] = dict(params)
        await self.channel.send(message)

    def _abandon(self, number: int, method: str) -> None:
        """Nobody waits for an answer any more: the server may stop."""
        if self.end is None and not self.channel.abandon(number) and method not in ("initialize", "server/discover"):
            self._spawn(self._cancelled(number))

    async def _cancelled(self, number: int) -> None:
        try:
            async with asyncio.timeout(_ABANDON_S):
                await self.notify(
                    "notifications/cancelled", {"requestId": number, "reason": "the caller has stopped it"}
                )
        except (Lost, TimeoutError):
            pass

    # ── what comes ──────────────────────────────────────────────────────────────────────────────

    def heard(self, message: Message, related: int | None) -> None:
        method, number = message.get("method"), message.get("id")
        if isinstance(method, str):
            given = message.get("params")
            params = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
            if number is None:
                self._told(method, params, related)
            elif isinstance(number, (str, int)):
                self._asked(number, method, params, related)
            return
        pending = self._answered_by(number)
        if pending is None or pending.answer.done():
            return
        result, error = message.get("result"), message.get("error")
        if isinstance(error, dict):
            said = cast("dict[str, Any]", error)
            code = said.get("code")
            text = str(said.get("message", ""))[:4000]
            pending.answer.set_exception(RpcError(code if isinstance(code, int) else INTERNAL, text, said.get("data")))
        elif isinstance(result, dict):
            pending.answer.set_result(cast("dict[str, Any]", result))
        else:
            pending.answer.set_exception(RpcError(INTERNAL, "it answered neither a result nor an error"))

    def failed(self, request: int | None, error: Exception) -> None:
        if request is None and len(self._pending) == 1:
            request = next(iter(self._pending))
        pending = self._pending.get(request) if request is not None else None
        if pending is not None and not pending.answer.done():
            pending.answer.set_exception(error)

    def lost(self, why: Lost) -> None:
        if self.end is not None:
            return
        self.end = why
        if not why.forgotten:  # else each of the others is told by its own answer
            self._fail_all(why)
        self._hooks.lost(why)

    def _fail_all(self, why: Lost) -> None:
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(Lost(why.why))

    def _answered_by(self, number: object) -> _Pending | None:
        """The request that an answer of this id is for; some servers give the id back as text."""
        pending = self._pending.get(number) if isinstance(number, int) else None
        if pending is None and isinstance(number, str) and len(number) < 19 and number.isdecimal():
            pending = self._pending.get(int(number))
        return pending

    def _told(self, method: str, params: dict[str, Any], related: int | None) -> None:
        match method:
            case "notifications/progress":
                self._progress(params)
            case "notifications/message":
                self._logged(params, related)
            case "notifications/tools/list_changed" | "notifications/resources/list_changed":
                self._hooks.changed()
            case "notifications/prompts/list_changed":
                self._hooks.changed()
            case "notifications/resources/updated":
                if isinstance(uri := params.get("uri"), str):
                    self._hooks.updated(uri)
            case "notifications/tasks":
                if (tell := self.told_of.get(str(params.get("taskId")))) is not None:
                    tell(params)
            case "notifications/subscriptions/acknowledged":
                self._acknowledged(params, related)
            case "notifications/cancelled":
                self._stop_asked(params.get("requestId"))
            case _:
                pass

    def _acknowledged(self, params: dict[str, Any], related: int | None) -> None:
        number = related if related is not None else _object(params.get("_meta")).get(f"{_META}subscriptionId")
        pending = self._pending.get(number) if isinstance(number, int) else None
        if pending is not None and pending.heard is not None:
            pending.heard.set()

    def _stop_asked(self, number: object) -> None:
        """Stop answering a request of the server's."""
        task = self._theirs.get(number) if isinstance(number, (str, int)) else None
        if task is not None:
            task.cancel()

    def _progress(self, params: dict[str, Any]) -> None:
        token, done, total, text = (params.get(key) for key in ("progressToken", "progress", "total", "message"))
        pending = self._pending.get(token) if isinstance(token, int) else None
        if pending is None or pending.runtime is None or not _is_number(done):
            return
        pending.told += 1
        if pending.told > MOST_TOLD:
            return
        whole = cast("float", total) if _is_number(total) and cast("float", total) > 0 else None
        share = None if whole is None else min(1.0, max(0.0, cast("float", done) / whole))
        said = text if isinstance(text, str) else ""
        pending.runtime.progress(said, fraction=share, done=cast("float", done), total=whole)

    def _logged(self, params: dict[str, Any], related: int | None) -> None:
        pending = self._behalf(params, related)
        if pending is None or pending.runtime is None:
            return
        pending.told += 1
        if pending.told > MOST_TOLD:
            return
        level, logger = params.get("level"), params.get("logger")
        try:
            pending.runtime.log(cast("Any", level), params.get("data"), logger if isinstance(logger, str) else None)
        except ToolError:
            pass  # no level that there is

    def _behalf(self, params: dict[str, Any], related: int | None) -> _Pending | None:
        """The request of a call that something is about: the one on whose stream it came, that it names, or the only
        one there is. With several and no sign, nobody's: it could be told to the wrong one."""
        named: Any = _object(params.get("_meta")).get("progressToken")
        for number in (related, named):
            if isinstance(number, int) and (found := self._pending.get(number)) is not None:
                return found if found.runtime is not None else None
        calls = [one for one in self._pending.values() if one.runtime is not None]
        return calls[0] if len(calls) == 1 and related is None else None

    def _asked(self, number: str | int, method: str, params: dict[str, Any], related: int | None) -> None:
        if method == "ping":
            self._reply_soon({"jsonrpc": "2.0", "id": number, "result": {}})
            return
        if len(self._theirs) >= MOST_ASKS or number in self._theirs:
            self._reply_soon(refusal(number, INTERNAL, "too many requests are under way"))
            return
        pending = self._behalf(params, related)
        task = self._spawn(self._answered(number, method, params, pending))
        self._theirs[number] = task
        task.add_done_callback(lambda _: self._theirs.pop(number, None))
        if pending is not None:
            pending.asks.add(task)
            task.add_done_callback(pending.asks.discard)

    async def _answered(self, number: str | int, method: str, params: dict[str, Any], pending: _Pending | None) -> None:
        grant = ASKED_BY.get(method)
        if grant is None or grant not in self._grants or self.era == "modern":
            await self._reply(refusal(number, METHOD_NOT_FOUND, f"{method} is not offered to this server"))
            return
        runtime = pending.runtime if pending is not None else None
        if runtime is None:
            text = f"{method} belongs to no single call: send it on the stream of the call that it is for, or do one at a time"
            await self._reply(refusal(number, INVALID_REQUEST, text))
            return
        params.pop("_meta", None)
        try:
            answers = await runtime.peer.ask({"it": Ask(cast("AskMethod", method), params, self.name)})
            answer: Message = {"jsonrpc": "2.0", "id": number, "result": dict(answers["it"])}
        except ToolError as error:
            answer = refusal(number, INVALID_REQUEST, error.text)
        await self._reply(answer)

    def _reply_soon(self, message: Message) -> None:
        if len(self._replies) >= MOST_REPLIES:
            self.lost(Lost(f"it asked {MOST_REPLIES} times and does not read the answers"))
        else:
            self._replies.add(task := self._spawn(self._reply(message)))
            task.add_done_callback(self._replies.discard)

    async def _reply(self, message: Message) -> None:
        try:
            await self.channel.send(message)
        except Lost:
            pass

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.add(task := asyncio.create_task(work, name=f"mcp {self.name}"))
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self) -> None:
        """End everything that is under way, and the channel. Called by whoever opened it."""
        self.lost(Lost("the connection was closed"))
        if self.end is not None and self.end.forgotten and self._pending:
            await asyncio.wait([one.answer for one in self._pending.values()], timeout=DRAIN_S)
        self._fail_all(Lost("the connection was closed"))
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.channel.aclose()


def _kinds_offered(runtime: Runtime | None) -> set[str]:
    """What may be asked of the client of a call; all there is where there is no call."""
    return {kind for kind, asked in ASK_KINDS.items() if runtime is None or runtime.peer.offers(*asked)}


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and abs(value) < 1e300


assert set(ASKED_BY.values()) == set(GRANTS)
