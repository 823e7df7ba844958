"""One call of a client: its progress, its requests to the client, and its resumption by the client.

In the handshake versions (up to 2025) a call has one request, which stays open until it is answered. Its questions are
requests of the server. In the stateless version (2026) an open request cannot carry questions. So the call is *held*: its
request is answered with all questions, and the client sends the answers with a state token that names the held call.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, cast

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from handrail.contract.calls_and_results import CallAnswer, Event
from handrail.contract.errors import ToolError
from handrail.contract.schema.argument_validation import InvalidSchemaError, compile_schema
from handrail.contract.services.client_services import ClientMethod, RequestToClient
from handrail.contract.struct import Struct, field

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

TASKS_EXTENSION = "io.modelcontextprotocol/tasks"
"""The protocol extension by which a running call can be answered with a task."""
MAX_QUEUED_EVENTS = 1_000
"""Maximum number of queued messages to a client. Beyond it, progress is dropped."""
LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
_ANSWER_MODELS: Mapping[ClientMethod, type[types.Result]] = {
    "elicitation/create": types.ElicitResult,
    "roots/list": types.ListRootsResult,
}


DETACH_EVENT = Event("log", "", "", "", 0)
"""A queued message that closes the client's stream."""


class OpenClientRequest(Struct):
    """A request that a client has open for a call.

    :param log_level: the lowest log level that is sent, as an index into :data:`LOG_LEVELS`; the length of the list sends none
    """

    context: ServerRequestContext[Any]
    log_level: int = len(LOG_LEVELS)

    @property
    def is_stateless(self) -> bool:
        """Whether the request uses the stateless version of the protocol."""
        return self.context.protocol_version in MODERN_PROTOCOL_VERSIONS

    @property
    def accepts_tasks(self) -> bool:
        """Whether the client accepts a task as the answer. Each stateless request declares this for itself."""
        declared = self.context.session.client_capabilities
        return self.is_stateless and declared is not None and TASKS_EXTENSION in (declared.extensions or {})


def find_missing_capability(
    declared: types.ClientCapabilities | None, method: ClientMethod, params: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the undeclared capability that a client needs for a request, or None if it declared it."""
    given = declared or types.ClientCapabilities()
    if method == "roots/list":
        return None if given.roots is not None else {"roots": {}}
    if method == "sampling/createMessage":
        tools = bool(params.get("tools") or params.get("toolChoice"))
        return None if _supports_sampling(given.sampling, tools=tools) else {"sampling": {"tools": {}} if tools else {}}
    mode = "url" if params.get("mode") == "url" else "form"
    return None if _supports_elicitation(given.elicitation, mode) else {"elicitation": {mode: {}}}


def _supports_sampling(declared: types.SamplingCapability | None, *, tools: bool) -> bool:
    return declared is not None and (not tools or declared.tools is not None)


def _supports_elicitation(declared: types.ElicitationCapability | None, mode: str) -> bool:
    """Return whether the client answers this mode.

    An empty declaration means forms, the first mode that existed.
    """
    if declared is None or mode == "url":
        return declared is not None and declared.url is not None
    return declared.form is not None or declared.url is None


class _ClientRequestGroup(Struct, eq=False):
    """Requests to the client that were made together and wait for answers.

    :param asks: the unanswered requests: the client's key to the caller's key and the request
    """

    asks: dict[str, tuple[str, RequestToClient]]
    waiting: asyncio.Future[None]
    answers: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])


class McpClientCall:
    """One call of a client, with its progress and its requests to the client, on one event loop.

    :param call_id: the ID of the call
    :param given: answers that came with its first request, before any question
    """

    def __init__(self, call_id: str, given: Mapping[str, Any] | None = None) -> None:
        self.call_id = call_id
        self.request: OpenClientRequest | None = None
        """The open request; None while the call is held."""
        self.last_request: OpenClientRequest | None = None
        """The last open request."""
        self.task: asyncio.Task[CallAnswer] | None = None
        self.missing_capabilities: dict[ClientMethod, dict[str, Any]] = {}
        """Capabilities that the client did not declare and that the call asked for, by method."""
        self.may_hold: Callable[[], bool] = lambda: True
        """Returns whether one more call may be held."""
        self.is_task = False
        """Whether the call was answered with a task. Then it sends nothing on the stream of a request."""
        self.status_message = ""
        """The last progress message."""
        self.on_change: Callable[[], object] = lambda: None
        """Called when the progress message or the open requests change."""
        self._is_abandoned = False
        """Whether the client did not send its next request in time."""
        self._early_answers = dict(given or {})
        self._groups: list[_ClientRequestGroup] = []
        self._used_keys: set[str] = set()
        """All keys that were sent to the client. A key is never used twice."""
        self._outbox: deque[Event] = deque()
        self._is_detaching = False
        """Whether the outbox contains the message that closes the client's stream."""
        self._wake = asyncio.Event()
        self._reported = -math.inf

    def start(self, call: Coroutine[Any, Any, CallAnswer]) -> None:
        """Start the call in its own task.

        The SDK's cancellation interrupts every await of a task. A stopped call still has to end its processes and be
        recorded, so it runs outside the SDK's task.
        """
        self.task = asyncio.create_task(call)
        self.task.add_done_callback(lambda _: self._wake.set())

    def cancel_call(self) -> None:
        """Cancel the call."""
        if self.task is not None:
            self.task.cancel()

    async def send_events_until_answered(self, request: OpenClientRequest) -> CallAnswer | dict[str, RequestToClient]:
        """Send the client the events of the call until it has an answer.

        In the stateless version, also return if the call has questions, with the questions. If this is cancelled, the call is stopped.
        """
        assert self.task is not None
        self.request = self.last_request = request
        try:
            while True:
                self._wake.clear()
                while self._outbox:
                    await self._send_event(request, self._outbox.popleft())
                if self.task.done():
                    return self.task.result()
                if request.is_stateless and (asked := self.list_unanswered_requests()):
                    return asked
                await self._wake.wait()
        except asyncio.CancelledError:
            self.cancel_call()
            raise
        finally:
            self.request = None

    # ── events ───────────────────────────────────────────────────────────────────────────────────

    def queue_call_event(self, event: Event) -> None:
        """Queue an event of the call for the client."""
        if event.kind == "progress" and isinstance(message := event.data.get("message"), str) and message:
            self.status_message = message
            self.on_change()
        if self.is_task:
            return
        if event.kind == "progress" and len(self._outbox) >= MAX_QUEUED_EVENTS:
            return
        if len(self._outbox) < 10 * MAX_QUEUED_EVENTS:
            self._outbox.append(event)
            self._wake.set()

    async def _send_event(self, request: OpenClientRequest, event: Event) -> None:
        if event is DETACH_EVENT:
            self._is_detaching = False
            if request.context.close_sse_stream is not None:
                await request.context.close_sse_stream()
        elif event.kind == "progress":
            progress = self._progress_values(event.data)
            if progress is not None:
                await request.context.session.report_progress(*progress)
        elif (level := event.data.get("level")) in LOG_LEVELS and LOG_LEVELS.index(level) >= request.log_level:
            params = types.LoggingMessageNotificationParams(
                level=level, data=event.data.get("data"), logger=event.data.get("logger")
            )
            await request.context.session.send_notification(
                types.LoggingMessageNotification(params=params), related_request_id=request.context.request_id
            )

    def _progress_values(self, data: Mapping[str, Any]) -> tuple[float, float | None, str | None] | None:
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

    def supports(self, method: ClientMethod, params: Mapping[str, Any]) -> bool:
        """Return whether the client answers such requests, as its last request declared."""
        if self.last_request is None or self._is_abandoned:
            return False
        lacks = find_missing_capability(self.last_request.context.session.client_capabilities, method, params)
        if lacks is not None:
            self.missing_capabilities[method] = lacks
        return lacks is None

    async def send_requests(
        self, requests: Mapping[str, RequestToClient], *, believed: bool = True
    ) -> Mapping[str, Mapping[str, Any]]:
        """Ask the client, and return every answer by its key.

        It follows :meth:`handrail.contract.services.client_services.ClientHandler.send_requests`.

        :param believed: whether answers count that the client sent before the question
        :raises ToolError: if the client disconnected, does not answer, or sends an invalid answer
        """
        if (line := self.last_request) is None or self._is_abandoned:
            raise ToolError("The client has disconnected. Continue without its answer.", kind="unavailable")
        for ask in requests.values():
            to_sdk_request_model(ask)  # an invalid request is an error for the caller and does not reach the client
        if not line.is_stateless:
            return await self._ask_on_stream(line, requests)
        answers: dict[str, Mapping[str, Any]] = {}
        if believed:
            for key, ask in requests.items():
                if (given := parse_client_answer(ask, self._early_answers.pop(key, None))) is not None:
                    answers[key] = given
        left = {key: ask for key, ask in requests.items() if key not in answers}
        return {**answers, **(await self._ask_on_return(left) if left else {})}

    async def _ask_on_stream(
        self, request: OpenClientRequest, asks: Mapping[str, RequestToClient]
    ) -> Mapping[str, Mapping[str, Any]]:
        """Send all requests at once on the stream of the client's open request."""
        put = {key: asyncio.ensure_future(_send_request(request, ask)) for key, ask in asks.items()}
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

    async def _ask_on_return(self, asks: Mapping[str, RequestToClient]) -> Mapping[str, Mapping[str, Any]]:
        if not self.may_hold():
            text = "Too many calls wait for answers of this client. Wait until some are answered, then call again."
            raise ToolError(text, kind="limit")
        named: dict[str, tuple[str, RequestToClient]] = {}
        for key, ask in asks.items():
            name, number = key, 2
            while name in self._used_keys:
                name, number = f"{key}-{number}", number + 1
            named[name] = (key, ask)
            self._used_keys.add(name)
        group = _ClientRequestGroup(named, asyncio.get_running_loop().create_future())
        self._groups.append(group)
        self._wake.set()
        self.on_change()
        try:
            await group.waiting
        finally:
            self._groups.remove(group)
            self.on_change()
        return group.answers

    def list_unanswered_requests(self) -> dict[str, RequestToClient]:
        """Return the unanswered requests by the client's key."""
        return {
            name: ask for group in self._groups if not group.waiting.done() for name, (_, ask) in group.asks.items()
        }

    def apply_client_answers(self, given: Mapping[str, Any]) -> None:
        """Take the client's answers. A request with a missing or invalid answer stays open."""
        for group in self._groups:
            for name, (key, ask) in tuple(group.asks.items()):
                if (answer := parse_client_answer(ask, given.get(name))) is not None:
                    group.answers[key] = answer
                    del group.asks[name]
            if not group.asks and not group.waiting.done():
                group.waiting.set_result(None)
        self.on_change()

    def continue_as_task(self) -> None:
        """Continue the call as a task, without an open request."""
        self.is_task = True
        self._outbox.clear()

    def record_task_state_request(self, request: OpenClientRequest) -> None:
        """Record that the client requested the state of the task, also after it was abandoned."""
        self.last_request, self._is_abandoned = request, False

    def fail_client_requests(self) -> None:
        """Fail the open and all further requests to the client, because it sent no request in time."""
        self._is_abandoned = True
        for group in self._groups:
            if not group.waiting.done():
                text = "The client did not send an answer in time. Continue without it."
                group.waiting.set_exception(ToolError(text, kind="unavailable"))

    def close_client_stream(self) -> None:
        """Close the client's stream after the queued events, if the client can resume it for the rest."""
        if not self._is_detaching:
            self._is_detaching = True
            self._outbox.append(DETACH_EVENT)
            self._wake.set()


def parse_client_answer(ask: RequestToClient, given: object) -> Mapping[str, Any] | None:
    """Return a client's answer in MCP's form, or None if it is invalid."""
    if not isinstance(given, Mapping):
        return None
    try:
        read = _answer_model(ask).model_validate(given, by_name=False)
    except ValidationError:
        return None
    answer = read.model_dump(mode="json", by_alias=True, exclude_none=True)
    answer.pop("resultType", None)
    if ask.method == "elicitation/create" and answer.get("action") == "accept" and ask.params.get("mode") != "url":
        content: Any = answer.setdefault("content", {})
        _replace_shown_options(ask, content)
        if not _matches_schema(ask.params.get("requestedSchema"), content):
            return None
    return answer


def _replace_shown_options(ask: RequestToClient, content: dict[str, Any]) -> None:
    """Replace the titles of options by their values, since some clients send what they show."""
    fields = _as_object(_as_object(ask.params.get("requestedSchema")).get("properties"))
    for name, described in fields.items():
        values, given = _list_shown_options(_as_object(described)), content.get(name)
        if isinstance(given, list):
            content[name] = [values.get(one, one) if isinstance(one, str) else one for one in cast("list[Any]", given)]
        elif isinstance(given, str):
            content[name] = values.get(given, given)


def _list_shown_options(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a field's options by their titles, without titles that are values or that several have."""
    options = _as_object(described.get("items")) or described
    titled = [_as_object(one) for one in _as_list(options.get("oneOf") or options.get("anyOf"))]
    pairs: list[tuple[Any, Any]] = [(one.get("const"), one.get("title")) for one in titled]
    pairs += zip(_as_list(options.get("enum")), _as_list(options.get("enumNames")), strict=False)
    values = {value for value, _ in pairs if isinstance(value, str)}
    titles = Counter(title for _, title in pairs if isinstance(title, str))
    return {
        title: value for value, title in pairs if isinstance(title, str) and title not in values and titles[title] == 1
    }


def _as_object(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _as_list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _matches_schema(schema: Any, content: dict[str, Any]) -> bool:
    if not isinstance(schema, Mapping):
        return True
    try:
        opened = {"additionalProperties": True, **cast("Mapping[str, Any]", schema)}  # clients may add fields
        return not compile_schema(opened).list_problems(dict(content))
    except InvalidSchemaError:
        return True  # the caller sent an invalid schema, and has to check the answer


def _answer_model(ask: RequestToClient) -> type[types.Result]:
    if ask.method == "sampling/createMessage":
        tools = ask.params.get("tools") or ask.params.get("toolChoice")
        return types.CreateMessageResultWithTools if tools else types.CreateMessageResult
    return _ANSWER_MODELS[ask.method]


async def _send_request(request: OpenClientRequest, ask: RequestToClient) -> Mapping[str, Any]:
    """Send one request to a client of a handshake version, on the stream of its open request."""
    related = ServerMessageMetadata(related_request_id=request.context.request_id)
    answer = await request.context.session.send_request(to_sdk_request_model(ask), _answer_model(ask), metadata=related)
    found = answer.model_dump(mode="json", by_alias=True, exclude_none=True)
    if ask.method == "elicitation/create" and isinstance(content := found.get("content"), dict):
        _replace_shown_options(ask, cast("dict[str, Any]", content))
    return found


def to_sdk_request_model(ask: RequestToClient) -> Any:
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
