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

from handrail.contract.doors.peer import Ask, AskMethod
from handrail.contract.errors import ToolError
from handrail.upstream.client.conversation import ASKED_BY, INTERNAL, Lost, RpcError, TooLong

if TYPE_CHECKING:
    from handrail.contract.doors.runtime import Runtime
    from handrail.upstream.client.conversation import Conversation


# Requests that a server of the newer era answers with questions: the client gets all at once, and the request is repeated.
#
# Source: https://modelcontextprotocol.io/specification/2026-07-28 (multi-round-trip requests)

MOST_ROUNDS = 10
_PAUSES_S = (0.05, 0.1, 0.2, 0.25)
"""Before trying again where the server asks nothing and only wants to be called once more."""


async def with_input(
    once: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]],
    params: Mapping[str, Any],
    runtime: Runtime | None,
    name: str,
    grants: frozenset[str],
) -> dict[str, Any]:
    """The result of a request, with whatever input its server wants on the way.

    :param once: sends it
    :param name: what the operator calls the server
    :param grants: what it may ask of a client
    :raises ToolError: ``denied`` for what it may not ask; as the client's door says; ``backend`` without an end
    """
    said: dict[str, Any] = dict(params)
    for turn in range(MOST_ROUNDS + 1):
        result = await once(said)
        if result.get("resultType") != "input_required":
            return result
        said = dict(params)
        if isinstance(state := result.get("requestState"), str):
            said["requestState"] = state
        wanted = result.get("inputRequests")
        if isinstance(wanted, dict) and wanted:
            said["inputResponses"] = await asked(cast("dict[str, Any]", wanted), runtime, name, grants)
        elif turn < MOST_ROUNDS:
            await asyncio.sleep(_PAUSES_S[min(turn, len(_PAUSES_S) - 1)])
    raise ToolError(f"mcp server {name} asked for input more than {MOST_ROUNDS} times in one call", kind="backend")


async def asked(
    requests: Mapping[str, Any], runtime: Runtime | None, name: str, grants: frozenset[str]
) -> dict[str, Mapping[str, Any]]:
    """What the client answers to a server's requests, by their keys.

    :raises ToolError: as :func:`with_input` does
    """
    asks: dict[str, Ask] = {}
    for key, request in requests.items():
        said = cast("dict[str, Any]", request) if isinstance(request, dict) else {}
        method, params = said.get("method"), said.get("params")
        grant = ASKED_BY.get(method) if isinstance(method, str) else None
        if grant is None or grant not in grants:
            shown = str(method)[:60]
            raise ToolError(
                f"mcp server {name} wants {shown} of the client, which it is not granted; an operator allows it with "
                f"{grant or 'no setting'} = true under [mcp.servers.{name}]"
                if grant
                else f"mcp server {name} wants {shown!r} of the client, which there is not",
                kind="denied",
            )
        given = dict(cast("dict[str, Any]", params)) if isinstance(params, dict) else {}
        given.pop("_meta", None)
        asks[key] = Ask(cast("AskMethod", method), given, name)
    if runtime is None:
        raise ToolError(f"mcp server {name} wants input, and nobody's call is under way", kind="unavailable")
    return dict(await runtime.peer.ask(asks))


LOOKS_MS = (100, 1_000, 30_000)
"""How soon a task is looked at again: at least, where its server does not say, and at most."""
TOLD_MS = 5_000
"""The same of one that its server tells of."""
LET_GO_S = 5.0
_letting_go: set[asyncio.Task[None]] = set()


def needs_task(item: Mapping[str, Any]) -> bool:
    """Whether a tool of the older era cannot be called without one."""
    return _object(item.get("execution")).get("taskSupport") == "required"


async def carried_out(
    conversation: Conversation,
    params: Mapping[str, Any],
    runtime: Runtime | None,
    grants: frozenset[str],
    *,
    headers: Mapping[str, str] | None,
    as_task: bool,
) -> dict[str, Any]:
    """Call a tool; its result, also where that comes by a task.

    :param grants: what the server may ask of a client
    :param as_task: it cannot be called otherwise in the older era
    :raises ToolError: where the task has no result, or asks for what it may not
    :raises RpcError: as the server answered, or as the task failed
    """
    said = dict(params)
    if as_task and conversation.era == "legacy" and _takes_tasks(conversation.capabilities):
        said["task"] = dict[str, Any]()
    answer = await conversation.request("tools/call", said, runtime, headers=headers)
    older = _object(answer.get("task")) if "task" in said else {}
    newer = answer if conversation.era == "modern" and answer.get("resultType") == "task" else {}
    if not older and not newer:
        return answer
    task_id = _id_of(older or newer, conversation)
    ended = False
    try:
        if older:  # it is answered when the task has ended, and what is asked meanwhile comes on its stream
            result = await conversation.request("tasks/result", {"taskId": task_id}, runtime)
        else:
            result = await _followed(conversation, newer, task_id, runtime, grants)
        ended = True
        return result
    except RpcError:
        ended = True
        raise
    finally:
        if not ended:
            stopping = asyncio.create_task(_stopped(conversation, task_id, runtime))
            _letting_go.add(stopping)
            stopping.add_done_callback(_letting_go.discard)


async def _followed(
    conversation: Conversation,
    task: Mapping[str, Any],
    task_id: str,
    runtime: Runtime | None,
    grants: frozenset[str],
) -> dict[str, Any]:
    hearing = _Hearing(conversation, task_id)
    try:
        return await _to_its_end(conversation, task, task_id, runtime, grants, hearing)
    finally:
        hearing.end()


class _Hearing:
    """What a server says of a task by itself. Of several states that nobody has read yet the last one counts."""

    def __init__(self, conversation: Conversation, task_id: str) -> None:
        self._conversation = conversation
        self._task_id = task_id
        self._latest: Mapping[str, Any] | None = None
        self._news = asyncio.Event()
        self._stream: asyncio.Future[Any] | None = None
        self._told = False

    def begin(self) -> None:
        """Ask for it, once. Whether it is told is seen when something comes."""
        if self._stream is None:
            self._conversation.told_of[self._task_id] = self._said
            asks = {"notifications": {"taskIds": [self._task_id]}}
            self._stream = asyncio.ensure_future(self._conversation.request("subscriptions/listen", asks))
            self._stream.add_done_callback(self._deaf)

    def end(self) -> None:
        self._conversation.told_of.pop(self._task_id, None)
        if self._stream is not None:
            self._stream.cancel()

    def _said(self, task: Mapping[str, Any]) -> None:
        self._latest, self._told = task, True
        self._news.set()

    def _deaf(self, stream: asyncio.Future[Any]) -> None:
        """It ended, or never was: from here on the task is looked at as its server would have it."""
        if not stream.cancelled():
            stream.exception()  # seen
            self._told = False
            self._news.set()

    async def within(self, asked_ms: object) -> Mapping[str, Any] | None:
        """What it says next, or None when it is time to look."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TOLD_MS / 1000 if self._told else _pause_s(asked_ms)):
                await self._news.wait()
        self._news.clear()
        latest, self._latest = self._latest, None
        return latest


def _id_of(task: Mapping[str, Any], conversation: Conversation) -> str:
    task_id = task.get("taskId")
    if not isinstance(task_id, str) or not task_id:
        raise ToolError(f"mcp server {conversation.name} answered with a task that has no id", kind="backend")
    return task_id


async def _to_its_end(
    conversation: Conversation,
    task: Mapping[str, Any],
    task_id: str,
    runtime: Runtime | None,
    grants: frozenset[str],
    hearing: _Hearing,
) -> dict[str, Any]:
    answered: set[str] = set()
    told = ""
    while True:
        said = await hearing.within(task.get("pollIntervalMs"))
        task = said if said is not None else await conversation.request("tasks/get", {"taskId": task_id}, runtime)
        message = task.get("statusMessage")
        told = _passed_on(message, told, runtime)
        match task.get("status"):
            case "working":
                hearing.begin()
            case "input_required":
                new = {key: one for key, one in _object(task.get("inputRequests")).items() if key not in answered}
                if new:
                    given = await asked(new, runtime, conversation.name, grants)
                    answered |= new.keys()
                    await conversation.request("tasks/update", {"taskId": task_id, "inputResponses": given}, runtime)
                hearing.begin()
            case "completed":
                return _object(task.get("result"))
            case "failed":
                raise _failure(_object(task.get("error")), message)
            case "cancelled":
                raise ToolError(f"mcp server {conversation.name} says that the task was cancelled: {told or 'not why'}")
            case other:
                raise ToolError(
                    f"mcp server {conversation.name} says that its task is {str(other)[:40]!r}, which is no state",
                    kind="backend",
                )


def _passed_on(message: object, told: str, runtime: Runtime | None) -> str:
    """Tell the call what its task says, unless that is what it was told last. Returns what it was told last."""
    if runtime is None or not isinstance(message, str) or message in ("", told):
        return told
    runtime.progress(message)
    return message


def _failure(error: Mapping[str, Any], message: object) -> RpcError:
    """:param message: what the task said last, for an error that says nothing"""
    code = error.get("code")
    said = str(error.get("message", message or "its task failed"))[:4000]
    return RpcError(code if isinstance(code, int) else INTERNAL, said, error.get("data"))


def _pause_s(asked_ms: object) -> float:
    least, usual, most = LOOKS_MS
    known = isinstance(asked_ms, (int, float)) and not isinstance(asked_ms, bool) and asked_ms == asked_ms
    return max(least, min(most, cast("float", asked_ms) if known else usual)) / 1000


async def _stopped(conversation: Conversation, task_id: str, runtime: Runtime | None) -> None:
    """Nobody waits for it any more."""
    try:
        async with asyncio.timeout(LET_GO_S):
            await conversation.request("tasks/cancel", {"taskId": task_id}, runtime)
    except (RpcError, Lost, TooLong, TimeoutError):
        pass  # it had ended, or its server has gone


def _takes_tasks(capabilities: Mapping[str, Any]) -> bool:
    requests = _object(_object(capabilities.get("tasks")).get("requests"))
    return "call" in _object(requests.get("tools"))


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
