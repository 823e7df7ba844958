"""Calls that a server answers with a task or questions, followed to their end so that the caller gets the result.

In the newer era tasks are an extension: the server's answer names the task, and the client polls it until it has ended. The
client also listens to a running task, and polls rarely if the server reports it. Up to 2025-11-25 the client requests a task,
for tools that cannot be called otherwise. In both cases a call that is cancelled or times out stops its task.

Sources: https://modelcontextprotocol.io/seps/2663-tasks-extension and
https://modelcontextprotocol.io/specification/2025-11-25/basic/utilities/tasks
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from handrail.contract.errors import ToolError
from handrail.contract.services.client_services import ClientMethod, RequestToClient
from handrail.upstream.client.upstream_session import (
    GRANT_BY_METHOD,
    INTERNAL_ERROR,
    ResponseTooLong,
    RpcError,
    UpstreamConnectionLost,
)

if TYPE_CHECKING:
    from handrail.contract.services.tool_runtime import Runtime
    from handrail.upstream.client.upstream_session import UpstreamSession


# Requests that a server of the newer era answers with questions: the client gets all at once, and then the request is sent again.
#
# Source: https://modelcontextprotocol.io/specification/2026-07-28 (multi-round-trip requests)

MAX_INPUT_ROUNDS = 10
_PAUSES_S = (0.05, 0.1, 0.2, 0.25)
"""Delays in seconds before the next attempt, if the server asks nothing and only wants the request again."""


async def send_request_answering_input(
    once: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]],
    params: Mapping[str, Any],
    runtime: Runtime | None,
    name: str,
    grants: frozenset[str],
) -> dict[str, Any]:
    """Return the result of a request, and answer the server's input requests before it.

    :param once: sends the request
    :param name: the operator's name of the server
    :param grants: the requests that the server may send to a client
    :raises ToolError: ``denied`` for a request without a grant; ``backend`` for too many rounds; or the client's error
    """
    fields: dict[str, Any] = dict(params)
    for turn in range(MAX_INPUT_ROUNDS + 1):
        result = await once(fields)
        if result.get("resultType") != "input_required":
            return result
        fields = dict(params)
        if isinstance(state := result.get("requestState"), str):
            fields["requestState"] = state
        wanted = result.get("inputRequests")
        if isinstance(wanted, dict) and wanted:
            fields["inputResponses"] = await answer_input_requests(
                cast("dict[str, Any]", wanted), runtime, name, grants
            )
        elif turn < MAX_INPUT_ROUNDS:
            await asyncio.sleep(_PAUSES_S[min(turn, len(_PAUSES_S) - 1)])
    raise ToolError(
        f"MCP server {name} requested input more than {MAX_INPUT_ROUNDS} times in one call. The call was "
        "stopped. Continue without it.",
        kind="backend",
    )


async def answer_input_requests(
    requests: Mapping[str, Any], runtime: Runtime | None, name: str, grants: frozenset[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the client's answers to a server's requests, by key.

    :raises ToolError: as :func:`send_request_answering_input` does
    """
    asks: dict[str, RequestToClient] = {}
    for key, request in requests.items():
        fields = cast("dict[str, Any]", request) if isinstance(request, dict) else {}
        method, params = fields.get("method"), fields.get("params")
        grant = GRANT_BY_METHOD.get(method) if isinstance(method, str) else None
        # Before any of the questions is asked: the user must not answer for a request that fails in the end.
        if grant is None or grant not in grants:
            shown = str(method)[:60]
            raise ToolError(
                f"MCP server {name} sent {shown} to the client, which is not granted. Continue without it, or "
                f"ask the user to set {grant or 'no setting'} = true under [mcp.servers.{name}]."
                if grant
                else f"MCP server {name} sent {shown!r} to the client, which does not exist. Continue without it.",
                kind="denied",
            )
        given = dict(cast("dict[str, Any]", params)) if isinstance(params, dict) else {}
        given.pop("_meta", None)
        asks[key] = RequestToClient(cast("ClientMethod", method), given, name)
    if runtime is None:
        raise ToolError(
            f"MCP server {name} requested input outside a tool call, so the request was rejected. Continue without it.",
            kind="unavailable",
        )
    return dict(await runtime.client.send_requests(asks))


POLL_INTERVALS_MS = (100, 1_000, 30_000)
"""The minimum, default and maximum interval in milliseconds at which a task is polled."""
NOTIFIED_POLL_MS = 5_000
"""The polling interval in milliseconds for a task that its server sends notifications of."""
CANCEL_TIMEOUT_S = 5.0
_cancelling: set[asyncio.Task[None]] = set()


def requires_task_call(item: Mapping[str, Any]) -> bool:
    """Return whether a tool of the older era can be called only as a task."""
    return _object(item.get("execution")).get("taskSupport") == "required"


async def call_tool_until_result(
    conversation: UpstreamSession,
    params: Mapping[str, Any],
    runtime: Runtime | None,
    grants: frozenset[str],
    *,
    headers: Mapping[str, str] | None,
    as_task: bool,
) -> dict[str, Any]:
    """Call a tool and return its result, also if a task provides it.

    :param grants: the requests that the server may send to a client
    :param as_task: whether the tool can be called only as a task in the older era
    :raises ToolError: if the task has no result, or sends a request without a grant
    :raises RpcError: if the server answered with an error, or the task failed
    """
    fields = dict(params)
    if as_task and conversation.era == "legacy" and _supports_tasks(conversation.capabilities):
        fields["task"] = dict[str, Any]()
    answer = await conversation.request("tools/call", fields, runtime, headers=headers)
    older = _object(answer.get("task")) if "task" in fields else {}
    newer = answer if conversation.era == "modern" and answer.get("resultType") == "task" else {}
    if not older and not newer:
        return answer
    task_id = _id_of(older or newer, conversation)
    ended = False
    try:
        if older:  # answered when the task has ended; requests meanwhile arrive on its stream
            result = await conversation.request("tasks/result", {"taskId": task_id}, runtime)
        else:
            result = await _follow_task(conversation, newer, task_id, runtime, grants)
        ended = True
        return result
    except RpcError:
        ended = True
        raise
    finally:
        if not ended:
            stopping = asyncio.create_task(_cancel_task(conversation, task_id, runtime))
            _cancelling.add(stopping)
            stopping.add_done_callback(_cancelling.discard)


async def _follow_task(
    conversation: UpstreamSession,
    task: Mapping[str, Any],
    task_id: str,
    runtime: Runtime | None,
    grants: frozenset[str],
) -> dict[str, Any]:
    hearing = _TaskUpdates(conversation, task_id)
    try:
        return await _wait_until_done(conversation, task, task_id, runtime, grants, hearing)
    finally:
        hearing.stop()


class _TaskUpdates:
    """The notifications of a server about a task. Of several unread states only the last one counts."""

    def __init__(self, conversation: UpstreamSession, task_id: str) -> None:
        self._conversation = conversation
        self._task_id = task_id
        self._latest: Mapping[str, Any] | None = None
        self._news = asyncio.Event()
        self._stream: asyncio.Future[Any] | None = None
        self._told = False

    def subscribe_to_task(self) -> None:
        """Subscribe to the task, once."""
        if self._stream is None:
            self._conversation.task_listeners[self._task_id] = self._on_update
            asks = {"notifications": {"taskIds": [self._task_id]}}
            self._stream = asyncio.ensure_future(self._conversation.request("subscriptions/listen", asks))
            self._stream.add_done_callback(self._on_stream_ended)

    def stop(self) -> None:
        self._conversation.task_listeners.pop(self._task_id, None)
        if self._stream is not None:
            self._stream.cancel()

    def _on_update(self, task: Mapping[str, Any]) -> None:
        self._latest, self._told = task, True
        self._news.set()

    def _on_stream_ended(self, stream: asyncio.Future[Any]) -> None:
        """Return to polling after the stream has ended or failed."""
        if not stream.cancelled():
            stream.exception()  # mark as retrieved
            self._told = False
            self._news.set()

    async def wait_for_next_state(self, asked_ms: object) -> Mapping[str, Any] | None:
        """Return the next state that the server sends, or None when the task has to be polled."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NOTIFIED_POLL_MS / 1000 if self._told else _pause_s(asked_ms)):
                await self._news.wait()
        self._news.clear()
        latest, self._latest = self._latest, None
        return latest


def _id_of(task: Mapping[str, Any], conversation: UpstreamSession) -> str:
    task_id = task.get("taskId")
    if not isinstance(task_id, str) or not task_id:
        raise ToolError(
            f"MCP server {conversation.name} returned a task without an id. Continue without this tool, "
            "or ask the user to check the server.",
            kind="backend",
        )
    return task_id


async def _wait_until_done(
    conversation: UpstreamSession,
    task: Mapping[str, Any],
    task_id: str,
    runtime: Runtime | None,
    grants: frozenset[str],
    updates: _TaskUpdates,
) -> dict[str, Any]:
    answered: set[str] = set()
    last_message = ""
    while True:
        next_state = await updates.wait_for_next_state(task.get("pollIntervalMs"))
        task = (
            next_state
            if next_state is not None
            else await conversation.request("tasks/get", {"taskId": task_id}, runtime)
        )
        message = task.get("statusMessage")
        last_message = _report_progress(message, last_message, runtime)
        match task.get("status"):
            case "working":
                updates.subscribe_to_task()
            case "input_required":
                new = {key: one for key, one in _object(task.get("inputRequests")).items() if key not in answered}
                if new:
                    given = await answer_input_requests(new, runtime, conversation.name, grants)
                    answered |= new.keys()
                    await conversation.request("tasks/update", {"taskId": task_id, "inputResponses": given}, runtime)
                updates.subscribe_to_task()
            case "completed":
                return _object(task.get("result"))
            case "failed":
                raise _task_error(_object(task.get("error")), message)
            case "cancelled":
                raise ToolError(
                    f"MCP server {conversation.name} cancelled the task: {last_message or 'no reason given'}. Try again, "
                    "or continue without it."
                )
            case other:
                raise ToolError(
                    f"MCP server {conversation.name} returned the unknown task state {str(other)[:40]!r}. "
                    "Continue without this tool, or ask the user to check the server.",
                    kind="backend",
                )


def _report_progress(message: object, last_message: str, runtime: Runtime | None) -> str:
    """Report a new status message of a task to its call, and return the message reported last."""
    if runtime is None or not isinstance(message, str) or message in ("", last_message):
        return last_message
    runtime.report_progress(message)
    return message


def _task_error(error: Mapping[str, Any], message: object) -> RpcError:
    """Return the error of a failed task.

    :param message: the last status message, for an error without a text
    """
    code = error.get("code")
    text = str(error.get("message", message or "the task failed"))[:4000]
    return RpcError(code if isinstance(code, int) else INTERNAL_ERROR, text, error.get("data"))


def _pause_s(asked_ms: object) -> float:
    least, usual, most = POLL_INTERVALS_MS
    known = isinstance(asked_ms, (int, float)) and not isinstance(asked_ms, bool) and asked_ms == asked_ms
    return max(least, min(most, cast("float", asked_ms) if known else usual)) / 1000


async def _cancel_task(conversation: UpstreamSession, task_id: str, runtime: Runtime | None) -> None:
    """Cancel a task on the server, and ignore errors."""
    try:
        async with asyncio.timeout(CANCEL_TIMEOUT_S):
            await conversation.request("tasks/cancel", {"taskId": task_id}, runtime)
    except (RpcError, UpstreamConnectionLost, ResponseTooLong, TimeoutError):
        pass  # it has ended, or the server is disconnected


def _supports_tasks(capabilities: Mapping[str, Any]) -> bool:
    requests = _object(_object(capabilities.get("tasks")).get("requests"))
    return "call" in _object(requests.get("tools"))


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
