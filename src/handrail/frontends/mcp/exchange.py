"""One call of a client: its progress, its requests to the client, and its resumption by the client.

In the handshake versions (up to 2025) a call has one request, which stays open until it is answered. Its questions are
requests of the server. In the stateless version (2026) an open request cannot carry questions. So the call is *held*: its
request is answered with all questions, and the client sends the answers with a state token that names the held call.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from handrail.contract.call import Answer, Event
from handrail.contract.doors.peer import Ask, AskMethod
from handrail.contract.errors import ToolError
from handrail.contract.schema.schema import InvalidSchema, compile_schema

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

TASKS = "io.modelcontextprotocol/tasks"
"""The protocol extension by which a running call can be answered with a task."""
MOST_WAITING = 1_000
"""Maximum number of queued messages to a client. Beyond it, progress is dropped."""
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
_ANSWERS: Mapping[AskMethod, type[types.Result]] = {
    "elicitation/create": types.ElicitResult,
    "roots/list": types.ListRootsResult,
}


LET_GO = Event("log", "", "", "", 0)
"""A queued message that closes the client's stream."""


@dataclass(slots=True)
class Line:
    """A request that a client has open for a call.

    :param level: the lowest log level that is sent, as an index into :data:`LEVELS`; the length of the list sends none
    """

    context: ServerRequestContext[Any]
    level: int = len(LEVELS)

    @property
    def modern(self) -> bool:
        """Whether the request uses the stateless version of the protocol."""
        return self.context.protocol_version in MODERN_PROTOCOL_VERSIONS

    def offers(self, method: AskMethod, params: Mapping[str, Any]) -> bool:
        """Return whether the client declared that it answers such requests."""
        return not lacking(self.context.session.client_capabilities, method, params)

    @property
    def tasks(self) -> bool:
        """Whether the client accepts a task as the answer. Each stateless request declares this for itself."""
        declared = self.context.session.client_capabilities
        return self.modern and declared is not None and TASKS in (declared.extensions or {})


def lacking(
    declared: types.ClientCapabilities | None, method: AskMethod, params: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the undeclared capability that a client needs for a request, or None if it declared it."""
    given = declared or types.ClientCapabilities()
    if method == "roots/list":
        return None if given.roots is not None else {"roots": {}}
    if method == "sampling/createMessage":
        tools = bool(params.get("tools") or params.get("toolChoice"))
        return None if _samples(given.sampling, tools=tools) else {"sampling": {"tools": {}} if tools else {}}
    mode = "url" if params.get("mode") == "url" else "form"
    return None if _elicits(given.elicitation, mode) else {"elicitation": {mode: {}}}


def _samples(declared: types.SamplingCapability | None, *, tools: bool) -> bool:
    return declared is not None and (not tools or declared.tools is not None)


def _elicits(declared: types.ElicitationCapability | None, mode: str) -> bool:
    """Return whether the client answers this mode.

    An empty declaration means forms, the first mode that existed.
    """
    if declared is None or mode == "url":
        return declared is not None and declared.url is not None
    return declared.form is not None or declared.url is None


@dataclass(slots=True, eq=False)
class _Group:
    """Requests to the client that were made together and wait for answers.

    :param asks: the unanswered requests: the client's key to the caller's key and the request
    """

    asks: dict[str, tuple[str, Ask]]
    waiting: asyncio.Future[None]
    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


class Exchange:
    """One call of a client, with its progress and its requests to the client, on one event loop.

    :param call_id: the ID of the call
    :param given: answers that came with its first request, before any question
    """

    def __init__(self, call_id: str, given: Mapping[str, Any] | None = None) -> None:
        self.call_id = call_id
        self.line: Line | None = None
        """The open request; None while the call is held."""
        self.latest: Line | None = None
        """The last open request."""
        self.task: asyncio.Task[Answer] | None = None
        self.lacked: dict[AskMethod, dict[str, Any]] = {}
        """Capabilities that the client did not declare and that the call asked for, by method."""
        self.may_hold: Callable[[], bool] = lambda: True
        """Returns whether one more call may be held."""
        self.beside = False
        """Whether the call was answered with a task. Then it sends nothing on the stream of a request."""
        self.said = ""
        """The last progress message."""
        self.news: Callable[[], object] = lambda: None
        """Called when the progress message or the open requests change."""
        self._gone = False
        """Whether the client did not send its next request in time."""
        self._given = dict(given or {})
        self._groups: list[_Group] = []
        self._named: set[str] = set()
        """All keys that were sent to the client. A key is never used twice."""
        self._outbox: deque[Event] = deque()
        self._hangs_up = False
        """Whether the outbox contains the message that closes the client's stream."""
        self._wake = asyncio.Event()
        self._reported = -math.inf

    def begin(self, call: Coroutine[Any, Any, Answer]) -> None:
        """Start the call in its own task.

        The SDK's cancellation interrupts every await of a task. A stopped call still has to end its processes and be
        recorded, so it runs outside the SDK's task.
        """
        self.task = asyncio.create_task(call)
        self.task.add_done_callback(lambda _: self._wake.set())

    def stop(self) -> None:
        """Cancel the call."""
        if self.task is not None:
            self.task.cancel()

    async def follow(self, line: Line) -> Answer | dict[str, Ask]:
        """Send the client the events of the call until it has an answer.

        In the stateless version, also return if the call has questions, with the questions. If this is cancelled, the call is stopped.
        """
        assert self.task is not None
        self.line = self.latest = line
        try:
            while True:
                self._wake.clear()
                while self._outbox:
                    await self._tell(line, self._outbox.popleft())
                if self.task.done():
                    return self.task.result()
                if line.modern and (asked := self.asked()):
                    return asked
                await self._wake.wait()
        except asyncio.CancelledError:
            self.stop()
            raise
        finally:
            self.line = None

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def happened(self, event: Event) -> None:
        """Queue an event of the call for the client."""
        if event.kind == "progress" and isinstance(message := event.data.get("message"), str) and message:
            self.said = message
            self.news()
        if self.beside:
            return
        if event.kind == "progress" and len(self._outbox) >= MOST_WAITING:
            return
        if len(self._outbox) < 10 * MOST_WAITING:
            self._outbox.append(event)
            self._wake.set()

    async def _tell(self, line: Line, event: Event) -> None:
        if event is LET_GO:
            self._hangs_up = False
            if line.context.close_sse_stream is not None:
                await line.context.close_sse_stream()
        elif event.kind == "progress":
            told = self._progress(event.data)
            if told is not None:
                await line.context.session.report_progress(*told)
        elif (level := event.data.get("level")) in LEVELS and LEVELS.index(level) >= line.level:
            params = types.LoggingMessageNotificationParams(
                level=level, data=event.data.get("data"), logger=event.data.get("logger")
            )
            await line.context.session.send_notification(
                types.LoggingMessageNotification(params=params), related_request_id=line.context.request_id
            )

    def _progress(self, data: Mapping[str, Any]) -> tuple[float, float | None, str | None] | None:
        """Return progress, total and message, or None if the progress does not increase.

        The protocol requires that the progress increases.
        """
        message: Any = data.get("message") or None
        total: float | None = None
        if isinstance(done := data.get("done"), (int, float)):
            figure, total = done, data.get("total")
        elif isinstance(fraction := data.get("fraction"), (int, float)):
            figure, total = fraction, 1.0
        else:
            figure = math.floor(self._reported) + 1 if self._reported > -math.inf else 1
        if figure <= self._reported:
            return None
        self._reported = figure
        return figure, total, message

    # ── requests to the client ───────────────────────────────────────────────────────────────────

    def offers(self, method: AskMethod, params: Mapping[str, Any]) -> bool:
        """Return whether the client answers such requests, as its last request declared."""
        if self.latest is None or self._gone:
            return False
        lacks = lacking(self.latest.context.session.client_capabilities, method, params)
        if lacks is not None:
            self.lacked[method] = lacks
        return lacks is None

    async def ask(self, asks: Mapping[str, Ask], *, believed: bool = True) -> Mapping[str, Mapping[str, Any]]:
        """Ask the client, and return every answer by its key.

        It follows :meth:`handrail.contract.doors.peer.Peer.ask`.

        :param believed: whether answers count that the client sent before the question
        :raises ToolError: if the client disconnected, does not answer, or sends an invalid answer
        """
        if (line := self.latest) is None or self._gone:
            raise ToolError("The client has disconnected. Continue without its answer.", kind="unavailable")
        for ask in asks.values():
            as_request(ask)  # an invalid request is an error for the caller and does not reach the client
        if not line.modern:
            return await self._ask_now(line, asks)
        answers: dict[str, Mapping[str, Any]] = {}
        if believed:
            for key, ask in asks.items():
                if (given := read_answer(ask, self._given.pop(key, None))) is not None:
                    answers[key] = given
        left = {key: ask for key, ask in asks.items() if key not in answers}
        return {**answers, **(await self._ask_later(left) if left else {})}

    async def _ask_now(self, line: Line, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        """Send all requests at once on the stream of the client's open request."""
        put = {key: asyncio.ensure_future(_request(line, ask)) for key, ask in asks.items()}
        try:
            await asyncio.gather(*put.values())
        except MCPError as error:
            text = f"The client did not answer: {error.error.message[:500]}. Continue without its answer."
            raise ToolError(text, kind="unavailable") from None
        except ValidationError:
            methods = ", ".join(f"`{method}`" for method in dict.fromkeys(ask.method for ask in asks.values()))
            text = f"The client returned an invalid answer to {methods}. Continue without it."
            raise ToolError(text, kind="unavailable") from None
        finally:
            for one in put.values():
                one.cancel()
        return {key: one.result() for key, one in put.items()}

    async def _ask_later(self, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        if not self.may_hold():
            text = "Too many calls wait for answers of this client. Wait until some are answered, then call again."
            raise ToolError(text, kind="limit")
        named: dict[str, tuple[str, Ask]] = {}
        for key, ask in asks.items():
            name, number = key, 2
            while name in self._named:
                name, number = f"{key}-{number}", number + 1
            named[name] = (key, ask)
            self._named.add(name)
        group = _Group(named, asyncio.get_running_loop().create_future())
        self._groups.append(group)
        self._wake.set()
        self.news()
        try:
            await group.waiting
        finally:
            self._groups.remove(group)
            self.news()
        return group.answers

    def asked(self) -> dict[str, Ask]:
        """Return the unanswered requests by the client's key."""
        return {
            name: ask for group in self._groups if not group.waiting.done() for name, (_, ask) in group.asks.items()
        }

    def answered(self, given: Mapping[str, Any]) -> None:
        """Take the client's answers. A request with a missing or invalid answer stays open."""
        for group in self._groups:
            for name, (key, ask) in tuple(group.asks.items()):
                if (answer := read_answer(ask, given.get(name))) is not None:
                    group.answers[key] = answer
                    del group.asks[name]
            if not group.asks and not group.waiting.done():
                group.waiting.set_result(None)
        self.news()

    def go_beside(self) -> None:
        """Continue the call as a task, without an open request."""
        self.beside = True
        self._outbox.clear()

    def seen(self, line: Line) -> None:
        """Record that the client requested the state of the task, also after it was abandoned."""
        self.latest, self._gone = line, False

    def abandon(self) -> None:
        """Fail the open and all further requests to the client, because it sent no request in time."""
        self._gone = True
        for group in self._groups:
            if not group.waiting.done():
                text = "The client did not send an answer in time. Continue without it."
                group.waiting.set_exception(ToolError(text, kind="unavailable"))

    def let_go(self) -> None:
        """Close the client's stream after the queued events, if the client can resume it for the rest."""
        if not self._hangs_up:
            self._hangs_up = True
            self._outbox.append(LET_GO)
            self._wake.set()


def read_answer(ask: Ask, given: object) -> Mapping[str, Any] | None:
    """Return a client's answer in MCP's form, or None if it is invalid."""
    if not isinstance(given, Mapping):
        return None
    try:
        read = _model(ask).model_validate(given, by_name=False)
    except ValidationError:
        return None
    answer = read.model_dump(mode="json", by_alias=True, exclude_none=True)
    answer.pop("resultType", None)
    if ask.method == "elicitation/create" and answer.get("action") == "accept" and ask.params.get("mode") != "url":
        content: Any = answer.setdefault("content", {})
        if not _fits(ask.params.get("requestedSchema"), content):
            return None
    return answer


def _fits(schema: Any, content: dict[str, Any]) -> bool:
    if not isinstance(schema, Mapping):
        return True
    try:
        return not compile_schema(cast("Mapping[str, Any]", schema)).problems(dict(content))
    except InvalidSchema:
        return True  # the caller sent an invalid schema, and has to check the answer


def _model(ask: Ask) -> type[types.Result]:
    if ask.method == "sampling/createMessage":
        tools = ask.params.get("tools") or ask.params.get("toolChoice")
        return types.CreateMessageResultWithTools if tools else types.CreateMessageResult
    return _ANSWERS[ask.method]


async def _request(line: Line, ask: Ask) -> Mapping[str, Any]:
    """Send one request to a client of a handshake version, on the stream of its open request."""
    related = ServerMessageMetadata(related_request_id=line.context.request_id)
    answer = await line.context.session.send_request(as_request(ask), _model(ask), metadata=related)
    return answer.model_dump(mode="json", by_alias=True, exclude_none=True)


def as_request(ask: Ask) -> Any:
    """Return the request as a model of the SDK.

    :raises ToolError: ``invalid_input`` if the parameters do not match the method
    """
    params = dict(ask.params)
    try:
        match ask.method:
            case "roots/list":
                return types.ListRootsRequest()
            case "sampling/createMessage":
                return types.CreateMessageRequest.model_validate({"params": params}, by_name=False)
            case "elicitation/create":
                return types.ElicitRequest.model_validate({"params": params}, by_name=False)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        text = f"The parameters of `{ask.method}` are invalid: `{place}`: {first['msg']}. Correct them and call again."
        raise ToolError(text, kind="invalid_input") from None
