"""One call that a client makes: its progress, its requests to the client meanwhile, and its resumption by the client.

In the sessions of 2025 a call has one request, which stays open until it is answered; its questions are requests of the
server. In the stateless era of 2026 an open request cannot carry questions: the call is *held*, its request is answered
with all questions at that moment, and the client returns with the answers and a state that names the held call.
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
"""The extension by which a call that goes on is answered with a task."""
MOST_WAITING = 1_000
"""Messages to a client that may be queued; beyond that, progress is dropped."""
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
_ANSWERS: Mapping[AskMethod, type[types.Result]] = {
    "elicitation/create": types.ElicitResult,
    "roots/list": types.ListRootsResult,
}


LET_GO = Event("log", "", "", "", 0)
"""A queued message that closes the client's stream."""


@dataclass(slots=True)
class Line:
    """The request that a client has open for a call.

    :param level: the lowest log level that is sent, as an index into :data:`LEVELS`; past the end for none
    """

    context: ServerRequestContext[Any]
    level: int = len(LEVELS)

    @property
    def modern(self) -> bool:
        """Whether it is a request of the stateless era."""
        return self.context.protocol_version in MODERN_PROTOCOL_VERSIONS

    def offers(self, method: AskMethod, params: Mapping[str, Any]) -> bool:
        """Whether the client declared that it answers such requests."""
        return not lacking(self.context.session.client_capabilities, method, params)

    @property
    def tasks(self) -> bool:
        """Whether it accepts a task as the answer, which each request of the stateless era says for itself."""
        declared = self.context.session.client_capabilities
        return self.modern and declared is not None and TASKS in (declared.extensions or {})


def lacking(
    declared: types.ClientCapabilities | None, method: AskMethod, params: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The capability that a client would have to declare for a request; None if it has."""
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
    """An empty object stands for forms, from before there was anything else."""
    if declared is None or mode == "url":
        return declared is not None and declared.url is not None
    return declared.form is not None or declared.url is None


@dataclass(slots=True, eq=False)
class _Group:
    """Requests to the client that were made together and wait for answers.

    :param asks: those without an answer, by the key that the client has: the asker's own key, and the request
    """

    asks: dict[str, tuple[str, Ask]]
    waiting: asyncio.Future[None]
    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


class Exchange:
    """See the module. It lives on one event loop.

    :param call_id: the call that it makes
    :param given: answers that came along with its first request, before anything was asked
    """

    def __init__(self, call_id: str, given: Mapping[str, Any] | None = None) -> None:
        self.call_id = call_id
        self.line: Line | None = None
        """None while it is held."""
        self.latest: Line | None = None
        """The last one that it had."""
        self.task: asyncio.Task[Answer] | None = None
        self.lacked: dict[AskMethod, dict[str, Any]] = {}
        """What the client would have had to declare for requests that were looked for, by their methods."""
        self.may_hold: Callable[[], bool] = lambda: True
        """Whether one more call may be held."""
        self.beside = False
        """The call was answered with a task, so nothing about it is sent on a request's stream any more."""
        self.said = ""
        """What it told last of how far it is."""
        self.news: Callable[[], object] = lambda: None
        """Told when it says or asks something else."""
        self._gone = False
        """The client did not come back in time."""
        self._given = dict(given or {})
        self._groups: list[_Group] = []
        self._named: set[str] = set()
        """Each key that the client was ever asked by: the same one never means two things."""
        self._outbox: deque[Event] = deque()
        self._hangs_up = False
        """Its line is to be hung up, which waits among what is told."""
        self._wake = asyncio.Event()
        self._reported = -math.inf

    def begin(self, call: Coroutine[Any, Any, Answer]) -> None:
        """Start the call in a task of its own: the SDK cancels by a scope that strikes again at every await until its task
        is gone, and a call that was stopped still has to end its processes and be recorded."""
        self.task = asyncio.create_task(call)
        self.task.add_done_callback(lambda _: self._wake.set())

    def stop(self) -> None:
        """The client wants it no more."""
        if self.task is not None:
            self.task.cancel()

    async def follow(self, line: Line) -> Answer | dict[str, Ask]:
        """Tell the client what happens, until there is an answer, or, in the stateless era, something to ask.

        The call is stopped when this is cancelled.
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

    # ── what it tells ────────────────────────────────────────────────────────────────────────────

    def happened(self, event: Event) -> None:
        """Something of the call to tell the client of, in order."""
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
        """Figure, total and message; None for what would go back, which the protocol has not."""
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

    # ── what it asks ─────────────────────────────────────────────────────────────────────────────

    def offers(self, method: AskMethod, params: Mapping[str, Any]) -> bool:
        """Whether its client answers this; while it is held, as it said last."""
        if self.latest is None or self._gone:
            return False
        lacks = lacking(self.latest.context.session.client_capabilities, method, params)
        if lacks is not None:
            self.lacked[method] = lacks
        return lacks is None

    async def ask(self, asks: Mapping[str, Ask], *, believed: bool = True) -> Mapping[str, Mapping[str, Any]]:
        """Every answer under its key; see :meth:`handrail.contract.doors.peer.Peer.ask`.

        :param believed: whether answers may be taken that the client gave before it was asked
        """
        if (line := self.latest) is None or self._gone:
            raise ToolError("the client has gone", kind="unavailable")
        for ask in asks.values():
            as_request(ask)  # what cannot be put at all is told to whoever asks it, not to the client
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
        """As requests of the server's, all at once, on the stream of the client's own request."""
        put = {key: asyncio.ensure_future(_request(line, ask)) for key, ask in asks.items()}
        try:
            await asyncio.gather(*put.values())
        except MCPError as error:
            raise ToolError(f"the client did not answer: {error.error.message[:500]}", kind="unavailable") from None
        except ValidationError:
            raise ToolError("the client gave an answer that is none", kind="unavailable") from None
        finally:
            for one in put.values():
                one.cancel()
        return {key: one.result() for key, one in put.items()}

    async def _ask_later(self, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        if not self.may_hold():
            raise ToolError("too many calls wait for this client's answers already", kind="limit")
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
        """All that waits for an answer, by the client's key."""
        return {
            name: ask for group in self._groups if not group.waiting.done() for name, (_, ask) in group.asks.items()
        }

    def answered(self, given: Mapping[str, Any]) -> None:
        """The client came back. What it left out, or what is no answer, stays asked."""
        for group in self._groups:
            for name, (key, ask) in tuple(group.asks.items()):
                if (answer := read_answer(ask, given.get(name))) is not None:
                    group.answers[key] = answer
                    del group.asks[name]
            if not group.asks and not group.waiting.done():
                group.waiting.set_result(None)
        self.news()

    def go_beside(self) -> None:
        """The call goes on without a line from now on: its client looks at it when it likes."""
        self.beside = True
        self._outbox.clear()

    def seen(self, line: Line) -> None:
        """Its client, which may have been given up, looked at it."""
        self.latest, self._gone = line, False

    def abandon(self) -> None:
        """The client did not come back: whoever waits for its answers goes without, and whoever asks from now on."""
        self._gone = True
        for group in self._groups:
            if not group.waiting.done():
                gone = ToolError("the client did not come back with an answer in time", kind="unavailable")
                group.waiting.set_exception(gone)

    def let_go(self) -> None:
        """Hang up, where the client comes back by itself for the rest, once it has been told what happened so far."""
        if not self._hangs_up:
            self._hangs_up = True
            self._outbox.append(LET_GO)
            self._wake.set()


def read_answer(ask: Ask, given: object) -> Mapping[str, Any] | None:
    """A client's answer to a request as MCP writes it, or None where it is none."""
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
        return True  # whoever asked by it has to make sense of the answer


def _model(ask: Ask) -> type[types.Result]:
    if ask.method == "sampling/createMessage":
        tools = ask.params.get("tools") or ask.params.get("toolChoice")
        return types.CreateMessageResultWithTools if tools else types.CreateMessageResult
    return _ANSWERS[ask.method]


async def _request(line: Line, ask: Ask) -> Mapping[str, Any]:
    """Put one request to the client of an older era, on the line of its own request."""
    related = ServerMessageMetadata(related_request_id=line.context.request_id)
    answer = await line.context.session.send_request(as_request(ask), _model(ask), metadata=related)
    return answer.model_dump(mode="json", by_alias=True, exclude_none=True)


def as_request(ask: Ask) -> Any:
    """As the SDK has it.

    :raises ToolError: ``invalid_input`` for parameters that are none of that method
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
        raise ToolError(f"{ask.method} cannot be asked so: {place}: {first['msg']}", kind="invalid_input") from None
