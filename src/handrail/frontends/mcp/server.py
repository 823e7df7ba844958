"""The MCP server: the kernel's tools, resources and prompts, over any transport and protocol version.

Every action of a client except listing is a normal call: authorised, locked, logged and shaped. Calls of one client run in
parallel as far as their locks allow. A client's cancellation stops the call, like a cancellation by the user.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import mcp_types as types
from mcp.server.caching import CACHEABLE_METHODS, CacheHint
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import SUBSCRIPTION_ID_META_KEY
from mcp_types import INTERNAL_ERROR
from pydantic import BaseModel

from handrail.arbiter.output.exposure import for_model
from handrail.contract.call import Answer, ProposedCall, Result
from handrail.contract.doors.peer import NOT_ANSWERED
from handrail.contract.envelopes import to_content
from handrail.contract.errors import ErrorKind, HandrailError, ToolError
from handrail.frontends.mcp.clients import House
from handrail.frontends.mcp.exchange import LEVELS, Exchange, Line, as_request
from handrail.frontends.mcp.listing import page_of, rendered, unwrapped, with_schemas
from handrail.frontends.mcp.resources import TOOL as SKILL
from handrail.frontends.mcp.resources import TooLong, offered_by, placed, with_bytes
from handrail.frontends.mcp.tasks import Tasks
from handrail.frontends.mcp.tools import DOOR, DOOR_TOOL, EXTENSIONS, as_tool, instructions, specs_of

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.models import InitializationOptions
    from mcp.server.session import ServerSession
    from mcp.server.subscriptions import ListenHandler

    from handrail.contract.tool.spec import ToolSpec
    from handrail.frontends.mcp.clients import Visit
    from handrail.frontends.mcp.stdio import LineWriter
    from handrail.frontends.mcp.tools import Serving
    from handrail.kernel.kernel import Kernel

    Context = ServerRequestContext[dict[str, Any]]


# JSON-RPC errors for requests that the kernel itself cannot serve, for example if its log is damaged or its disk is full.
#
# The SDK would send "Internal server error". Here a call gets a result, which a model reads. Any other request gets an
# error with the same text.

Handler = Callable[[Any, Any], Awaitable[Any]]


def told(method: str, answer: Handler) -> Handler:
    """Wrap a request handler so that errors of the kernel reach the client with their text.

    :param method: the protocol method that ``answer`` handles
    """

    async def said(context: Any, params: Any) -> Any:
        try:
            return await answer(context, params)
        except HandrailError as error:
            kind: ErrorKind = error.kind if isinstance(error, ToolError) else "unavailable"
            text = str(error)
        except sqlite3.Error as error:
            kind = "unavailable"
            text = f"The log could not be read: {error}. Ask the user to run `handrail doctor`."
        if method != "tools/call":
            raise MCPError(INTERNAL_ERROR, text, {"handrail/error_kind": kind})
        result = Result.error(kind, text)
        about = {f"handrail/{key}": value for key, value in result.metadata.items()}
        return {**to_content(result, {}), "resultType": "complete", "_meta": about}

    return said


# A stream of change notifications that includes tasks. The SDK's own stream supports only lists and resources.
#
# Source: https://modelcontextprotocol.io/seps/2663-tasks-extension

logger = logging.getLogger("handrail.mcp")

TASK_TOLD = "notifications/tasks"


async def listened(
    listen: ListenHandler,
    context: Context,
    params: types.SubscriptionsListenRequestParams,
    tasks: Mapping[str, AsyncIterator[Mapping[str, Any]]],
) -> types.SubscriptionsListenResult:
    """Send the requested notifications until the client disconnects or the server ends the stream.

    :param listen: sends all notifications except those of tasks
    :param tasks: for each task ID, the states that follow
    """
    if not tasks:
        return await listen(context, params)
    line = _Acknowledging(context.session, tuple(tasks))
    telling = [asyncio.create_task(_tell(context, line, states)) for states in tasks.values()]
    try:
        session: Any = line
        return await listen(replace(context, session=session), params)
    finally:
        for one in telling:
            one.cancel()


async def _tell(context: Context, line: _Acknowledging, states: AsyncIterator[Mapping[str, Any]]) -> None:
    await line.acknowledged.wait()
    meta = {SUBSCRIPTION_ID_META_KEY: context.request_id}
    try:
        async for state in states:
            told: Any = types.Notification[dict[str, Any], str](method=TASK_TOLD, params={**state, "_meta": meta})
            await context.session.send_notification(told, related_request_id=context.request_id)
    except Exception as error:  # usually the client has disconnected, which ends the stream itself
        logger.info("stopped the notifications of a task: %s", type(error).__name__)


class _Acknowledging:
    """A session wrapper that adds the accepted task IDs to the acknowledgement of a stream."""

    def __init__(self, session: ServerSession, task_ids: Sequence[str]) -> None:
        self.acknowledged = asyncio.Event()
        self._session = session
        self._task_ids = list(task_ids)

    async def send_notification(
        self, notification: types.ServerNotification, related_request_id: types.RequestId | None = None
    ) -> None:
        if isinstance(notification, types.SubscriptionsAcknowledgedNotification):
            agreed = notification.params.notifications.model_copy(update={"taskIds": self._task_ids})
            params = notification.params.model_copy(update={"notifications": agreed})
            notification = notification.model_copy(update={"params": params})
        await self._session.send_notification(notification, related_request_id)
        self.acknowledged.set()


NO_SUCH_RESOURCE = -32002
"""The error code of handshake versions for an unknown resource. The stateless version uses INVALID_PARAMS."""
_GIVE_UP_S = 30.0
"""Seconds for which a state token remains valid after its held call is abandoned."""


async def serve_on(kernel: Kernel, serving: Serving, ends: tuple[AsyncIterable[str], LineWriter] | None) -> None:
    """Serve one client until it disconnects.

    :param ends: the client's lines, and the writer for its answers; None for stdin and stdout of this process
    """
    house = House(kernel, serving)
    try:
        server = build(house)
        streams = stdio_server() if ends is None else stdio_server(*cast("Any", ends))
        async with streams as (incoming, outgoing):
            await server.run(incoming, outgoing, options_of(server))
    finally:
        await house.aclose()


def options_of(server: Server[dict[str, Any]]) -> InitializationOptions:
    """Return the initialization options for a client of a handshake version."""
    return server.create_initialization_options(_CHANGES)


_HINTS: Any = {method: CacheHint() for method in CACHEABLE_METHODS}  # the SDK types the names more narrowly
_CHANGES = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)


class _Server(Server[dict[str, Any]]):
    """An MCP server that announces change notifications on every transport.

    Over HTTP the SDK passes no options for this.
    """

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, Any]] | None = None,
        extensions: dict[str, dict[str, Any]] | None = None,
    ) -> InitializationOptions:
        return super().create_initialization_options(
            notification_options or _CHANGES, experimental_capabilities, extensions
        )


def build(house: House) -> Server[dict[str, Any]]:
    """Build the MCP server for all clients of ``house``."""
    faces = Doors(house)
    server = _Server(
        "handrail",
        version=version("handrail"),
        instructions=instructions(house.kernel, house.serving.discovery),
        get_tool_input_schema=faces.input_schema,
        cache_hints=_HINTS,  # each client has its own listings, and they may change at any time
    )
    server.extensions.update(EXTENSIONS)
    for method, params_type, handler in faces.handlers():
        server.add_request_handler(method, params_type, told(method, handler))
    security = RequestStateSecurity.ephemeral(ttl=house.serving.hold_s + _GIVE_UP_S)
    server.middleware.append(RequestStateBoundary(security, default_audience="handrail"))
    return server


class Doors:
    """The handlers for all requests of the protocol."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._kernel = house.kernel
        self._tasks = Tasks(house)

    def handlers(self) -> list[tuple[str, type[BaseModel], Any]]:
        """Return each method with its parameters type and its handler."""
        return [
            ("tools/list", types.PaginatedRequestParams, whole(self.on_list_tools)),
            ("tools/call", types.CallToolRequestParams, whole(self.on_call_tool)),
            ("resources/list", types.PaginatedRequestParams, whole(self.on_list_resources)),
            ("resources/templates/list", types.PaginatedRequestParams, whole(self.on_list_templates)),
            ("resources/read", types.ReadResourceRequestParams, whole(self.on_read_resource)),
            ("resources/subscribe", types.SubscribeRequestParams, self.on_subscribe),
            ("resources/unsubscribe", types.UnsubscribeRequestParams, self.on_unsubscribe),
            ("subscriptions/listen", types.SubscriptionsListenRequestParams, self.on_listen),
            ("prompts/list", types.PaginatedRequestParams, whole(self.on_list_prompts)),
            ("prompts/get", types.GetPromptRequestParams, whole(self.on_get_prompt)),
            ("completion/complete", types.CompleteRequestParams, whole(self.on_complete)),
            ("logging/setLevel", types.SetLevelRequestParams, self.on_set_level),
            *self._tasks.handlers(),
        ]

    # ── tools ────────────────────────────────────────────────────────────────────────────────────

    def input_schema(self, name: str) -> Mapping[str, Any] | None:
        """Return the input schema of a tool, by which the SDK checks the headers of a call."""
        entry = self._kernel.generation.resolve(name)
        return None if entry is None else entry.spec.parameters

    async def on_list_tools(self, context: Context, params: types.PaginatedRequestParams) -> dict[str, Any]:
        async with self._house.visited(context) as visit:
            visit.lists("tools", lambda: tuple(self._tools(visit)))
            discovery = self._house.serving.discovery
            tools = [as_tool(self._kernel, discovery, spec) for spec in self._tools(visit)]
            if self._has_door(Line(context)):
                tools.append(dict(DOOR_TOOL))
            return page_of("tools", tools, params.cursor)

    def _tools(self, visit: Visit) -> Sequence[ToolSpec]:
        return specs_of(self._kernel, self._house.serving.discovery, visit.guest.session)

    def _has_door(self, line: Line) -> bool:
        """Return whether this server offers its own tool for calls.

        A kernel tool of that name takes precedence.
        """
        core = self._house.serving.discovery == "core"
        return line.modern and core and self._kernel.generation.resolve(DOOR) is None

    async def on_call_tool(self, context: Context, params: types.CallToolRequestParams) -> Any:
        async with self._house.visited(context, params.request_state) as visit:
            line = _line(context, visit)
            name, arguments = params.name, cast("Mapping[str, Any]", params.arguments or {})
            if name == DOOR and self._has_door(line):
                name, arguments = unwrapped(arguments)
            entry = self._kernel.generation.resolve(name)
            if entry is not None:
                self._tasks.check(line, entry.spec, arguments)
            spec = entry.spec if entry is not None else None
            found = await self._carried_out(visit, line, params, ProposedCall(name, arguments), spec)
            if not isinstance(found, Answer):
                return found
            result = found.model
            if found.tool_id == SKILL:  # stateless clients share a session, so another client may have got the text
                given = visit.skills.whole(result)
                result = given if line.modern else result
            if line.modern and self._house.serving.discovery == "core":
                result = with_schemas(self._kernel, found.tool_id, result)
            if (waits := result.metadata.get("parked")) is not None:
                result = _to_collect(found.tool_id, waits, result)
            content = await rendered(self._kernel, visit, found.tool_id, result)
            if visit.may_have_changed():
                await visit.tell_of_changes()
            return content

    async def _carried_out(
        self,
        visit: Visit,
        line: Line,
        params: types.InputResponseRequestParams,
        proposed: ProposedCall,
        spec: ToolSpec | None = None,
    ) -> Answer | types.InputRequiredResult | dict[str, Any]:
        """Start or resume a call, and return its answer, its task, or the input that it requires.

        :param spec: the called tool, if the client may get a task as the answer
        :raises MCPError: if the call needs a capability that the client did not declare
        """
        guest = visit.guest
        given = _responses(line.context)
        if params.request_state is not None:
            exchange = self._house.take_up(guest, params.request_state)
        else:
            entry = self._kernel.generation.resolve(proposed.name)
            begun = guest.begin(entry.id if entry is not None else proposed.name, proposed, given)
            if isinstance(begun, Result):
                return Answer("", proposed.name, begun, begun)
            exchange = begun
        held = False
        try:
            if params.request_state is not None:
                exchange.answered(given)
            with self._tasks.in_time(line, spec, guest, exchange):
                found = await exchange.follow(line)
            if isinstance(found, Answer):
                if line.tasks and spec is not None and (task := await self._tasks.made_of(guest, exchange, found)):
                    held = True
                    return task
                if line.modern and (lacked := _lacked(exchange, found)):
                    raise _lacking(lacked, found)
                return found
            requests = {key: as_request(ask) for key, ask in found.items()}
            state = self._house.hold(guest, exchange)
            held = True
            return types.InputRequiredResult(input_requests=requests, request_state=state)
        finally:
            if not held:
                guest.end(exchange)

    # ── resources ────────────────────────────────────────────────────────────────────────────────

    async def on_list_resources(self, context: Context, params: types.PaginatedRequestParams) -> dict[str, Any]:
        async with self._house.visited(context) as visit:
            visit.lists("resources", lambda: self._resources(visit))
            return page_of("resources", self._resources(visit), params.cursor)

    def _resources(self, visit: Visit) -> list[dict[str, Any]]:
        return [*offered_by(self._kernel.generation).resources, *visit.outputs.listed]

    async def on_list_templates(self, context: Context, params: types.PaginatedRequestParams) -> dict[str, Any]:
        return page_of("resourceTemplates", offered_by(self._kernel.generation).templates, params.cursor)

    async def on_read_resource(self, context: Context, params: types.ReadResourceRequestParams) -> Any:
        async with self._house.visited(context, params.request_state) as visit:
            uri = str(params.uri)
            try:
                own = await visit.outputs.contents(uri)
            except (OSError, TooLong) as error:
                raise MCPError(types.INTERNAL_ERROR, f"Could not read `{uri}`: {error}", {"uri": uri}) from None
            if own is not None:
                return {"contents": own}
            line = _line(context, visit)
            found = await self._carried_out(visit, line, params, ProposedCall("resource.read", {"uri": uri}))
            return await self._whole(visit, line, found, {"uri": uri}) if isinstance(found, Answer) else found

    async def _whole(self, visit: Visit, line: Line, answer: Answer, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of an answer with its result metadata, such as its origin."""
        data = await self._data(visit, line, answer, about)
        said = {f"handrail/{key}": value for key, value in answer.model.metadata.items()}
        return {**data, "_meta": said} if said else data

    async def _data(self, visit: Visit, line: Line, answer: Answer, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of an answer in MCP's form, in full even if the result was truncated.

        :raises MCPError: for every error result, and for data over the read limit
        """
        result = answer.model
        given: object = result.data
        if result.ok and result.metadata.get("truncated"):
            try:
                given = await visit.outputs.whole(result)
            except (OSError, TooLong) as error:
                size = result.metadata.get("output_bytes", 0)
                text = f"The output of {size:,} bytes could not be returned in full: {error}"
                raise MCPError(types.INTERNAL_ERROR, text, dict(about)) from None
            result = for_model(Result("output", given, None, result.metadata))
            given = result.data
        if not result.ok or not isinstance(given, dict):
            kind = result.error_kind
            code = types.INTERNAL_ERROR
            if kind in ("invalid_input", "unknown_tool"):
                code = types.INVALID_PARAMS if line.modern or "uri" not in about else NO_SUCH_RESOURCE
            text = result.error_text or "The call returned no data."
            raise MCPError(code, text, {**about, "handrail/error_kind": kind})
        data = cast("dict[str, Any]", given)
        refs = placed(result)
        return with_bytes(data, await visit.outputs.bytes_of(refs) if refs else {})

    async def on_subscribe(self, context: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        async with self._house.visited(context) as visit:
            await self._subscribe(visit, _line(context, visit), str(params.uri))
            return types.EmptyResult()

    async def on_unsubscribe(self, context: Context, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        async with self._house.visited(context) as visit:
            await self._unsubscribe(visit, str(params.uri))
            return types.EmptyResult()

    async def _subscribe(self, visit: Visit, line: Line, uri: str) -> None:
        if visit.subscribe(uri):
            proposed = ProposedCall("resource.subscribe", {"uri": uri})
            (answer,) = await visit.guest.session.turn().call_all([proposed])
            if not answer.model.ok:
                visit.unsubscribe(uri)
                await self._data(visit, line, answer, {"uri": uri})

    async def _unsubscribe(self, visit: Visit, uri: str) -> None:
        if visit.unsubscribe(uri):
            await visit.guest.session.turn().call_all([ProposedCall("resource.unsubscribe", {"uri": uri})])

    async def on_listen(
        self, context: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        async with self._house.visited(context) as visit:
            line, wanted = _line(context, visit), params.notifications
            tasks = await self._tasks.heard(context, visit, (wanted.model_extra or {}).get("taskIds"))
            visit.lists("tools", lambda: tuple(self._tools(visit)))
            visit.lists("prompts", lambda: self._prompts(visit))
            visit.lists("resources", lambda: self._resources(visit))
            subscribed: list[str] = []
            visit.listening += 1
            try:
                for uri in dict.fromkeys(map(str, wanted.resource_subscriptions or ())):
                    try:
                        await self._subscribe(visit, line, uri)
                    except MCPError:
                        continue  # the protocol acknowledges such a subscription and sends nothing for it
                    subscribed.append(uri)
                return await listened(visit.listen, context, params, tasks)
            finally:
                visit.listening -= 1
                for uri in subscribed:
                    self._house.spawn(self._unsubscribe(visit, uri))

    # ── prompts, completion, logging ─────────────────────────────────────────────────────────────

    def _prompts(self, visit: Visit) -> Sequence[dict[str, Any]]:
        offered = offered_by(self._kernel.generation).prompts
        return [*offered, *visit.skills.listed({one["name"] for one in offered})]

    async def on_list_prompts(self, context: Context, params: types.PaginatedRequestParams) -> dict[str, Any]:
        async with self._house.visited(context) as visit:
            visit.lists("prompts", lambda: self._prompts(visit))
            return page_of("prompts", self._prompts(visit), params.cursor)

    async def on_get_prompt(self, context: Context, params: types.GetPromptRequestParams) -> Any:
        async with self._house.visited(context, params.request_state) as visit:
            line, arguments, about = _line(context, visit), dict(params.arguments or {}), {"name": params.name}
            taken = {one["name"] for one in offered_by(self._kernel.generation).prompts}
            if params.name not in taken and (skill := visit.skills.named(params.name, taken)) is not None:
                task = visit.skills.check(arguments)
                found = await self._carried_out(visit, line, params, ProposedCall(SKILL, {"name": skill.name}))
                if not isinstance(found, Answer):
                    return found
                found = found._replace(model=visit.skills.whole(found.model))
                return visit.skills.messages(skill, await self._data(visit, line, found, about), task)
            asked = {"name": params.name, "arguments": arguments}
            found = await self._carried_out(visit, line, params, ProposedCall("prompt.get", asked))
            return await self._whole(visit, line, found, about) if isinstance(found, Answer) else found

    async def on_complete(self, context: Context, params: types.CompleteRequestParams) -> dict[str, Any]:
        async with self._house.visited(context) as visit:
            asked: dict[str, Any] = {
                "ref": params.ref.model_dump(mode="json", by_alias=True, exclude_none=True),
                "argument": params.argument.model_dump(mode="json", by_alias=True, exclude_none=True),
            }
            if params.context is not None and params.context.arguments:
                asked["context"] = dict(params.context.arguments)
            (answer,) = await visit.guest.session.turn().call_all([ProposedCall("prompt.complete", asked)])
            return {"completion": await self._data(visit, _line(context, visit), answer, {"name": "completion"})}

    async def on_set_level(self, context: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        async with self._house.visited(context) as visit:
            visit.level = LEVELS.index(params.level)
            return types.EmptyResult()


def whole(answer: Callable[[Context, Any], Awaitable[Any]]) -> Callable[[Context, Any], Awaitable[Any]]:
    """Wrap a handler so that its results are marked as complete.

    The SDK leaves the mark out for versions of the protocol that do not have it.
    """

    async def said(context: Context, params: Any) -> Any:
        result = await answer(context, params)
        if isinstance(result, dict):
            cast("dict[str, Any]", result).setdefault("resultType", "complete")
        return result  # pyright: ignore[reportUnknownVariableType]

    return said


def _line(context: Context, visit: Visit) -> Line:
    line = Line(context)
    if not line.modern:
        line.level = visit.level
    elif (wanted := _meta(context).get(types.LOG_LEVEL_META_KEY)) in LEVELS:
        line.level = LEVELS.index(cast("str", wanted))
    return line


def _meta(context: Context) -> Mapping[str, Any]:
    meta: Any = (context.params or {}).get("_meta")
    return cast("Mapping[str, Any]", meta) if isinstance(meta, Mapping) else {}


def _responses(context: Context) -> Mapping[str, Any]:
    given: Any = (context.params or {}).get("inputResponses")
    return cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}


def _lacked(exchange: Exchange, answer: Answer) -> dict[str, Any]:
    """Return the capabilities that this failed call needs and the client did not declare."""
    text = answer.model.error_text or ""
    found: dict[str, Any] = {}
    for method, needed in exchange.lacked.items():
        if not answer.model.ok and f"{NOT_ANSWERED} {method}" in text:
            found |= needed
    return found


def _lacking(lacked: dict[str, Any], answer: Answer) -> MCPError:
    needed = types.ClientCapabilities.model_validate(lacked)
    about = types.MissingRequiredClientCapabilityErrorData(required_capabilities=needed)
    return MCPError(
        types.MISSING_REQUIRED_CLIENT_CAPABILITY,
        f"The client did not declare the capability {' and '.join(lacked)}: {answer.model.error_text}",
        about.model_dump(mode="json", by_alias=True, exclude_none=True),
    )


def _to_collect(tool_id: str, approval_id: str, result: Result) -> Result:
    text = (
        f"{tool_id} requires approval {approval_id} and has not run yet. Ask the user to run `handrail approve "
        f"{approval_id}`, then repeat the call with the same arguments to get its result."
    )
    return Result(result.type, result.data, text, result.metadata)


__all__: Sequence[str] = ("Doors", "build", "options_of", "serve_on")
