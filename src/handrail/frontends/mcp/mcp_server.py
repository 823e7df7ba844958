"""The MCP server: the kernel's tools, resources and prompts, over any transport and protocol version.

Every action of a client except listing is a normal call: authorised, locked, logged and shaped. Calls of one client run in
parallel as far as their locks allow. A client's cancellation stops the call, like a cancellation by the user.
"""

from __future__ import annotations

import asyncio
import contextlib
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

from handrail.arbiter.output.audience_views import neutralise_for_model
from handrail.contract.calls_and_results import CallAnswer, ProposedCall, Result
from handrail.contract.errors import ErrorKind, HandrailError, ToolError
from handrail.contract.result_conversions import convert_result_to_mcp_content
from handrail.frontends.mcp.client_call import LOG_LEVELS, McpClientCall, OpenClientRequest, to_sdk_request_model
from handrail.frontends.mcp.client_manager import McpClientManager
from handrail.frontends.mcp.client_resources import SKILL_TOOL as SKILL
from handrail.frontends.mcp.client_resources import (
    CallOutputTooLong,
    collect_resources_and_prompts,
    collect_result_artifacts,
    inline_artifacts,
)
from handrail.frontends.mcp.mcp_responses import (
    adapt_tool_search_result,
    paginate_by_cursor,
    remove_client_prefix,
    strip_client_added_arguments,
    to_mcp_result,
    unwrap_tool_call,
)
from handrail.frontends.mcp.task_extension import McpTaskManager, get_unsupported_request_methods
from handrail.frontends.mcp.tool_listing import (
    CALL_TOOL,
    CALL_TOOL_ENTRY,
    EXTENSIONS,
    build_server_instructions,
    list_client_tools,
    to_mcp_tool,
)

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.models import InitializationOptions
    from mcp.server.session import ServerSession
    from mcp.server.subscriptions import ListenHandler

    from handrail.contract.tool.spec import ToolSpec
    from handrail.frontends.mcp.client_manager import McpClientState
    from handrail.frontends.mcp.client_messages import EarlyClient
    from handrail.frontends.mcp.connected_client import ConnectedMcpClient
    from handrail.frontends.mcp.mcp_stdio_server import ClientLineWriter
    from handrail.frontends.mcp.tool_listing import McpFrontendSettings
    from handrail.kernel.kernel_interface import Kernel

    Context = ServerRequestContext[dict[str, Any]]


# JSON-RPC errors for requests that the kernel itself cannot serve, for example if its log is damaged or its disk is full.
#
# The SDK would send "Internal server error". Here a call gets a result, which a model reads. Any other request gets an
# error with the same text.

Handler = Callable[[Any, Any], Awaitable[Any]]


def map_kernel_errors(method: str, answer: Handler) -> Handler:
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
        except MCPError:
            raise
        except Exception as error:  # the SDK would send its bare text, and write a traceback to stderr
            kind, text = "backend", f"Internal error of Handrail: {type(error).__name__}: {error}. Please report it."
            logger.warning("%s: %s", method, text)
        if method != "tools/call":
            raise MCPError(INTERNAL_ERROR, text, {"handrail/error_kind": kind})
        result = Result.error(kind, text)
        about = {f"handrail/{key}": value for key, value in result.metadata.items()}
        return {**convert_result_to_mcp_content(result, {}), "resultType": "complete", "_meta": about}

    return said


# A stream of change notifications that includes tasks. The SDK's own stream supports only lists and resources.
#
# Source: https://modelcontextprotocol.io/seps/2663-tasks-extension

logger = logging.getLogger("handrail.mcp")

TASK_NOTIFICATION = "notifications/tasks"


async def stream_notifications(
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
    line = _TaskAcknowledger(context.session, tuple(tasks))
    telling = [asyncio.create_task(_notify_task_states(context, line, states)) for states in tasks.values()]
    try:
        session: Any = line
        return await listen(replace(context, session=session), params)
    finally:
        for one in telling:
            one.cancel()


async def _notify_task_states(
    context: Context, request: _TaskAcknowledger, states: AsyncIterator[Mapping[str, Any]]
) -> None:
    await request.acknowledged.wait()
    meta = {SUBSCRIPTION_ID_META_KEY: context.request_id}
    try:
        async for state in states:
            notification: Any = types.Notification[dict[str, Any], str](
                method=TASK_NOTIFICATION, params={**state, "_meta": meta}
            )
            await context.session.send_notification(notification, related_request_id=context.request_id)
    except Exception as error:  # usually the client has disconnected, which ends the stream itself
        logger.info("stopped the notifications of a task: %s", type(error).__name__)


class _TaskAcknowledger:
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


MAX_REPEATED_CALLS = 3
"""Number of equal answers to one waiting call after which the model is asked to stop repeating it."""
RESOURCE_NOT_FOUND = -32002
"""The error code of handshake versions for an unknown resource. The stateless version uses INVALID_PARAMS."""
_STATE_GRACE_S = 30.0
"""Seconds for which a state token remains valid after its held call is abandoned."""


async def serve_single_client(
    kernel: Kernel,
    serving: McpFrontendSettings,
    ends: tuple[AsyncIterable[str], ClientLineWriter] | None,
    early_client: EarlyClient | None = None,
) -> None:
    """Serve one client until it disconnects.

    :param ends: the client's lines, and the writer for its answers; None for stdin and stdout of this process
    :param early_client: what the client has called before
    """
    clients = McpClientManager(kernel, serving)
    clients.early_client = early_client
    try:
        server = build_mcp_server(clients)
        streams = stdio_server() if ends is None else stdio_server(*cast("Any", ends))
        async with streams as (incoming, outgoing):
            await server.run(incoming, outgoing, make_initialization_options(server))
    finally:
        await clients.aclose()


def make_initialization_options(server: Server[dict[str, Any]]) -> InitializationOptions:
    """Return the initialization options for a client of a handshake version."""
    return server.create_initialization_options(_CHANGES)


_HINTS: Any = {method: CacheHint() for method in CACHEABLE_METHODS}  # the SDK types the names more narrowly
_CHANGES = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)


class _McpServer(Server[dict[str, Any]]):
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


def build_mcp_server(clients: McpClientManager) -> Server[dict[str, Any]]:
    """Build the MCP server for all clients of ``clients``."""
    logging.getLogger("mcp").addHandler(logging.NullHandler())  # otherwise any odd message could fill the terminal
    handlers = McpRequestHandlers(clients)
    server = _McpServer(
        "handrail",
        version=version("handrail"),
        instructions=build_server_instructions(clients.kernel, clients.settings.discovery),
        get_tool_input_schema=handlers.get_header_validation_schema,
        cache_hints=_HINTS,  # each client has its own listings, and they may change at any time
    )
    server.extensions.update(EXTENSIONS)
    for method, params_type, handler in handlers.list_method_handlers():
        server.add_request_handler(method, params_type, map_kernel_errors(method, handler))
    security = RequestStateSecurity.ephemeral(ttl=clients.settings.hold_s + _STATE_GRACE_S)
    server.middleware.append(RequestStateBoundary(security, default_audience="handrail"))
    return server


class McpRequestHandlers:
    """The handlers for all requests of the protocol."""

    def __init__(self, clients: McpClientManager) -> None:
        self._clients = clients
        self._kernel = clients.kernel
        self._tasks = McpTaskManager(clients)

    def list_method_handlers(self) -> list[tuple[str, type[BaseModel], Any]]:
        """Return each method with its parameters type and its handler."""
        return [
            ("tools/list", types.PaginatedRequestParams, mark_results_complete(self.on_list_tools)),
            ("tools/call", types.CallToolRequestParams, mark_results_complete(self.on_call_tool)),
            ("resources/list", types.PaginatedRequestParams, mark_results_complete(self.on_list_resources)),
            ("resources/templates/list", types.PaginatedRequestParams, mark_results_complete(self.on_list_templates)),
            ("resources/read", types.ReadResourceRequestParams, mark_results_complete(self.on_read_resource)),
            ("resources/subscribe", types.SubscribeRequestParams, self.on_subscribe),
            ("resources/unsubscribe", types.UnsubscribeRequestParams, self.on_unsubscribe),
            ("subscriptions/listen", types.SubscriptionsListenRequestParams, self.on_listen),
            ("prompts/list", types.PaginatedRequestParams, mark_results_complete(self.on_list_prompts)),
            ("prompts/get", types.GetPromptRequestParams, mark_results_complete(self.on_get_prompt)),
            ("completion/complete", types.CompleteRequestParams, mark_results_complete(self.on_complete)),
            ("logging/setLevel", types.SetLevelRequestParams, self.on_set_level),
            *self._tasks.list_method_handlers(),
        ]

    # ── tools ────────────────────────────────────────────────────────────────────────────────────

    def get_header_validation_schema(self, name: str) -> Mapping[str, Any] | None:
        """Return the input schema of a tool, by which the SDK checks the headers of a call."""
        entry = self._kernel.generation.resolve_tool_name(name)
        return None if entry is None else entry.spec.parameters

    async def on_list_tools(self, context: Context, params: types.PaginatedRequestParams) -> dict[str, Any]:
        async with self._clients.acquire_request_client(context) as client_state:
            client_state.watch_listing_changes("tools", lambda: tuple(self._listed_tools(client_state)))
            discovery = self._clients.settings.discovery
            tools = [to_mcp_tool(self._kernel, discovery, spec) for spec in self._listed_tools(client_state)]
            if self._has_call_tool():
                tools.append(dict(CALL_TOOL_ENTRY))
            return paginate_by_cursor("tools", tools, params.cursor)

    def _listed_tools(self, client: McpClientState) -> Sequence[ToolSpec]:
        return list_client_tools(self._kernel, self._clients.settings.discovery, client.client.session)

    def _has_call_tool(self) -> bool:
        """Return whether this server offers its own tool for calls, because it does not list all tools.

        A kernel tool of that name takes precedence.
        """
        core = self._clients.settings.discovery == "core"
        return core and self._kernel.generation.resolve_tool_name(CALL_TOOL) is None

    def _is_tool_name(self, name: str) -> bool:
        known = self._kernel.generation.resolve_tool_name(name) is not None
        return known or (name == CALL_TOOL and self._has_call_tool())

    async def on_call_tool(self, context: Context, params: types.CallToolRequestParams) -> Any:
        async with self._clients.acquire_request_client(context, params.request_state) as client_state:
            line = _open_request(context, client_state)
            name = remove_client_prefix(params.name, self._is_tool_name)
            arguments = cast("Mapping[str, Any]", params.arguments or {})
            removed: set[str] = set()
            if name == CALL_TOOL and self._has_call_tool():
                arguments = strip_client_added_arguments(arguments, CALL_TOOL_ENTRY["inputSchema"], removed)
                name, arguments = unwrap_tool_call(arguments)
                name = remove_client_prefix(name, self._is_tool_name)
            entry = self._kernel.generation.resolve_tool_name(name)
            if entry is not None:
                arguments = strip_client_added_arguments(arguments, entry.spec.parameters, removed)
            if entry is not None:
                self._tasks.require_task_support(line, entry.spec, arguments)
            spec = entry.spec if entry is not None else None
            proposed = ProposedCall(name, arguments, client_meta=_request_meta(context) or None)
            found = await self._run_call(client_state, line, params, proposed, spec)
            if not isinstance(found, CallAnswer):
                return found
            result = found.model
            if removed:
                about = {**result.metadata, "removed_arguments": sorted(removed)}
                result = Result(result.type, result.data, result.error_text, about)
            if found.tool_id == SKILL:  # stateless clients share a session, so another client may have got the text
                given = client_state.skills.restore_skill_text(result)
                result = given if line.is_stateless else result
            result = adapt_tool_search_result(self._kernel, self._clients.settings.discovery, found.tool_id, result)
            if (waits := result.metadata.get("awaiting_approval")) is not None:
                result = self._explain_approval(client_state.client, found.tool_id, str(waits), result)
            content = await to_mcp_result(self._kernel, client_state, found.tool_id, result)
            if client_state.detect_possible_listing_change():
                await client_state.send_listing_change_notifications()
            return content

    def _explain_approval(self, client: ConnectedMcpClient, tool_id: str, approval_id: str, result: Result) -> Result:
        """Return the result of a call that waits for approval, with the reason and what the user can do."""
        text = f"{tool_id} has not run: it requires approval {approval_id}."
        allowing = f"Ask the user to run `handrail approve {approval_id}` in the workspace"
        with contextlib.suppress(HandrailError):
            request = self._kernel.approvals.get(approval_id).request
            text += f" {request.reason}"
            if request.suggested_rule is not None:
                allowing += f", or to add the rule `{request.suggested_rule}`"
        if approval_id in client.declined_requests:
            text += " The client declined to ask, maybe without showing the request to the user."
        text += f" {allowing}. Continue with other work."
        if (count := client.waiting_answers[approval_id]) >= MAX_REPEATED_CALLS:
            text += f" You have made this call {count} times. Do not repeat it until the user says that it is approved."
        else:
            text += " After the approval, repeat the call once with the same arguments to get its result."
        return Result(result.type, result.data, text, result.metadata)

    async def _run_call(
        self,
        client: McpClientState,
        request: OpenClientRequest,
        params: types.InputResponseRequestParams,
        proposed: ProposedCall,
        spec: ToolSpec | None = None,
    ) -> CallAnswer | types.InputRequiredResult | dict[str, Any]:
        """Start or resume a call, and return its answer, its task, or the input that it requires.

        :param spec: the called tool, if the client may get a task as the answer
        :raises MCPError: if the call needs a capability that the client did not declare
        """
        connected = client.client
        given = _input_responses(request.context)
        if params.request_state is not None:
            client_call = self._clients.take_held_call(connected, params.request_state)
        else:
            entry = self._kernel.generation.resolve_tool_name(proposed.name)
            tool_id = entry.id if entry is not None else proposed.name
            early_client = self._clients.early_client
            early = None if early_client is None else early_client.answers.pop(request.context.request_id, None)
            if early is not None and "awaiting_approval" not in early.model.metadata:
                return early
            if early is not None:
                connected.keep_answer_awaiting_approval(tool_id, proposed, early)
            begun = connected.start_call(tool_id, proposed, given)
            if isinstance(begun, Result):
                return CallAnswer("", proposed.name, begun, begun)
            client_call = begun
        held = False
        try:
            if params.request_state is not None:
                client_call.apply_client_answers(given)
            with self._tasks.move_slow_call_to_background(request, spec, connected, client_call):
                found = await client_call.send_events_until_answered(request)
            if isinstance(found, CallAnswer):
                if (
                    request.accepts_tasks
                    and spec is not None
                    and (task := await self._tasks.convert_job_to_task(connected, client_call, found))
                ):
                    held = True
                    return task
                if request.is_stateless and (lacked := _missing_capabilities(client_call, found)):
                    raise _missing_capability_error(lacked, found)
                return found
            requests = {key: to_sdk_request_model(ask) for key, ask in found.items()}
            state = self._clients.hold_call_until_request(connected, client_call)
            held = True
            return types.InputRequiredResult(input_requests=requests, request_state=state)
        finally:
            if not held:
                connected.end_call(client_call)

    # ── resources ────────────────────────────────────────────────────────────────────────────────

    async def on_list_resources(self, context: Context, params: types.PaginatedRequestParams) -> dict[str, Any]:
        async with self._clients.acquire_request_client(context) as client_state:
            client_state.watch_listing_changes("resources", lambda: self._listed_resources(client_state))
            return paginate_by_cursor("resources", self._listed_resources(client_state), params.cursor)

    def _listed_resources(self, client: McpClientState) -> list[dict[str, Any]]:
        return [*collect_resources_and_prompts(self._kernel.generation).resources, *client.outputs.listed_resources]

    async def on_list_templates(self, context: Context, params: types.PaginatedRequestParams) -> dict[str, Any]:
        return paginate_by_cursor(
            "resourceTemplates", collect_resources_and_prompts(self._kernel.generation).templates, params.cursor
        )

    async def on_read_resource(self, context: Context, params: types.ReadResourceRequestParams) -> Any:
        async with self._clients.acquire_request_client(context, params.request_state) as client_state:
            uri = str(params.uri)
            try:
                own = await client_state.outputs.read_output_resource(uri)
            except (OSError, CallOutputTooLong) as error:
                raise MCPError(types.INTERNAL_ERROR, f"Could not read `{uri}`: {error}", {"uri": uri}) from None
            if own is not None:
                return {"contents": own}
            line = _open_request(context, client_state)
            found = await self._run_call(client_state, line, params, ProposedCall("resource.read", {"uri": uri}))
            return (
                await self._answer_data_with_origin(client_state, line, found, {"uri": uri})
                if isinstance(found, CallAnswer)
                else found
            )

    async def _answer_data_with_origin(
        self, client: McpClientState, request: OpenClientRequest, answer: CallAnswer, about: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the data of an answer with its result metadata, such as its origin."""
        data = await self._result_data(client, request, answer, about)
        fields = {f"handrail/{key}": value for key, value in answer.model.metadata.items()}
        return {**data, "_meta": fields} if fields else data

    async def _result_data(
        self, client: McpClientState, request: OpenClientRequest, answer: CallAnswer, about: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the data of an answer in MCP's form, in full even if the result was truncated.

        :raises MCPError: for every error result, and for data over the read limit
        """
        result = answer.model
        given: object = result.data
        if result.ok and result.metadata.get("truncated"):
            try:
                given = await client.outputs.read_full_result_data(result)
            except (OSError, CallOutputTooLong) as error:
                size = result.metadata.get("output_bytes", 0)
                text = f"The output of {size:,} bytes could not be returned in full: {error}"
                raise MCPError(types.INTERNAL_ERROR, text, dict(about)) from None
            result = neutralise_for_model(Result("output", given, None, result.metadata))
            given = result.data
        if not result.ok or not isinstance(given, dict):
            kind = result.error_kind
            code = types.INTERNAL_ERROR
            if kind in ("invalid_input", "unknown_tool"):
                code = types.INVALID_PARAMS if request.is_stateless or "uri" not in about else RESOURCE_NOT_FOUND
            text = result.error_text or "The call returned no data."
            raise MCPError(code, text, {**about, "handrail/error_kind": kind})
        data = cast("dict[str, Any]", given)
        refs = collect_result_artifacts(result)
        return inline_artifacts(data, await client.outputs.read_artifacts(refs) if refs else {})

    async def on_subscribe(self, context: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        async with self._clients.acquire_request_client(context) as client_state:
            await self._subscribe(client_state, _open_request(context, client_state), str(params.uri))
            return types.EmptyResult()

    async def on_unsubscribe(self, context: Context, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        async with self._clients.acquire_request_client(context) as client_state:
            await self._unsubscribe(client_state, str(params.uri))
            return types.EmptyResult()

    async def _subscribe(self, client: McpClientState, request: OpenClientRequest, uri: str) -> None:
        if client.add_subscription(uri):
            proposed = ProposedCall("resource.subscribe", {"uri": uri})
            (answer,) = await client.client.session.start_turn().call_all([proposed])
            if not answer.model.ok:
                client.remove_subscription(uri)
                await self._result_data(client, request, answer, {"uri": uri})

    async def _unsubscribe(self, client: McpClientState, uri: str) -> None:
        if client.remove_subscription(uri):
            await client.client.session.start_turn().call_all([ProposedCall("resource.unsubscribe", {"uri": uri})])

    async def on_listen(
        self, context: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        async with self._clients.acquire_request_client(context) as client_state:
            line, wanted = _open_request(context, client_state), params.notifications
            tasks = await self._tasks.watch_task_states(
                context, client_state, (wanted.model_extra or {}).get("taskIds")
            )
            client_state.watch_listing_changes("tools", lambda: tuple(self._listed_tools(client_state)))
            client_state.watch_listing_changes("prompts", lambda: self._listed_prompts(client_state))
            client_state.watch_listing_changes("resources", lambda: self._listed_resources(client_state))
            subscribed: list[str] = []
            client_state.listener_count += 1
            try:
                for uri in dict.fromkeys(map(str, wanted.resource_subscriptions or ())):
                    try:
                        await self._subscribe(client_state, line, uri)
                    except MCPError:
                        continue  # the protocol acknowledges such a subscription and sends nothing for it
                    subscribed.append(uri)
                return await stream_notifications(client_state.listen, context, params, tasks)
            finally:
                client_state.listener_count -= 1
                for uri in subscribed:
                    self._clients.spawn_server_task(self._unsubscribe(client_state, uri))

    # ── prompts, completion, logging ─────────────────────────────────────────────────────────────

    def _listed_prompts(self, client: McpClientState) -> Sequence[dict[str, Any]]:
        offered = collect_resources_and_prompts(self._kernel.generation).prompts
        return [*offered, *client.skills.list_prompts({one["name"] for one in offered})]

    async def on_list_prompts(self, context: Context, params: types.PaginatedRequestParams) -> dict[str, Any]:
        async with self._clients.acquire_request_client(context) as client_state:
            client_state.watch_listing_changes("prompts", lambda: self._listed_prompts(client_state))
            return paginate_by_cursor("prompts", self._listed_prompts(client_state), params.cursor)

    async def on_get_prompt(self, context: Context, params: types.GetPromptRequestParams) -> Any:
        async with self._clients.acquire_request_client(context, params.request_state) as client_state:
            line, arguments, about = (
                _open_request(context, client_state),
                dict(params.arguments or {}),
                {"name": params.name},
            )
            taken = {one["name"] for one in collect_resources_and_prompts(self._kernel.generation).prompts}
            if (
                params.name not in taken
                and (skill := client_state.skills.find_skill_by_prompt_name(params.name, taken)) is not None
            ):
                task = client_state.skills.get_task_argument(arguments)
                found = await self._run_call(client_state, line, params, ProposedCall(SKILL, {"name": skill.name}))
                if not isinstance(found, CallAnswer):
                    return found
                found = found._replace(model=client_state.skills.restore_skill_text(found.model))
                return client_state.skills.make_skill_prompt(
                    skill, await self._result_data(client_state, line, found, about), task
                )
            asked = {"name": params.name, "arguments": arguments}
            found = await self._run_call(client_state, line, params, ProposedCall("prompt.get", asked))
            return (
                await self._answer_data_with_origin(client_state, line, found, about)
                if isinstance(found, CallAnswer)
                else found
            )

    async def on_complete(self, context: Context, params: types.CompleteRequestParams) -> dict[str, Any]:
        async with self._clients.acquire_request_client(context) as client_state:
            asked: dict[str, Any] = {
                "ref": params.ref.model_dump(mode="json", by_alias=True, exclude_none=True),
                "argument": params.argument.model_dump(mode="json", by_alias=True, exclude_none=True),
            }
            if params.context is not None and params.context.arguments:
                asked["context"] = dict(params.context.arguments)
            (answer,) = await client_state.client.session.start_turn().call_all(
                [ProposedCall("prompt.complete", asked)]
            )
            return {
                "completion": await self._result_data(
                    client_state, _open_request(context, client_state), answer, {"name": "completion"}
                )
            }

    async def on_set_level(self, context: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
        async with self._clients.acquire_request_client(context) as client_state:
            client_state.log_level = LOG_LEVELS.index(params.level)
            return types.EmptyResult()


def mark_results_complete(answer: Callable[[Context, Any], Awaitable[Any]]) -> Callable[[Context, Any], Awaitable[Any]]:
    """Wrap a handler so that its results are marked as complete.

    The SDK leaves the mark out for versions of the protocol that do not have it.
    """

    async def said(context: Context, params: Any) -> Any:
        result = await answer(context, params)
        if isinstance(result, dict):
            cast("dict[str, Any]", result).setdefault("resultType", "complete")
        return result  # pyright: ignore[reportUnknownVariableType]

    return said


def _open_request(context: Context, client: McpClientState) -> OpenClientRequest:
    line = OpenClientRequest(context)
    if not line.is_stateless:
        line.log_level = client.log_level
    elif (wanted := _request_meta(context).get(types.LOG_LEVEL_META_KEY)) in LOG_LEVELS:
        line.log_level = LOG_LEVELS.index(cast("str", wanted))
    return line


def _request_meta(context: Context) -> Mapping[str, Any]:
    meta: Any = (context.params or {}).get("_meta")
    return cast("Mapping[str, Any]", meta) if isinstance(meta, Mapping) else {}


def _input_responses(context: Context) -> Mapping[str, Any]:
    given: Any = (context.params or {}).get("inputResponses")
    return cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {}


def _missing_capabilities(call: McpClientCall, answer: CallAnswer) -> dict[str, Any]:
    """Return the capabilities that this failed call needs and the client did not declare."""
    found: dict[str, Any] = {}
    for method in get_unsupported_request_methods(answer.model):
        found |= call.missing_capabilities.get(method, {})
    return found


def _missing_capability_error(lacked: dict[str, Any], answer: CallAnswer) -> MCPError:
    needed = types.ClientCapabilities.model_validate(lacked)
    about = types.MissingRequiredClientCapabilityErrorData(required_capabilities=needed)
    return MCPError(
        types.MISSING_REQUIRED_CLIENT_CAPABILITY,
        f"The client did not declare the capability {' and '.join(lacked)}: {answer.model.error_text}",
        about.model_dump(mode="json", by_alias=True, exclude_none=True),
    )


__all__: Sequence[str] = (
    "McpRequestHandlers",
    "build_mcp_server",
    "make_initialization_options",
    "serve_single_client",
)
