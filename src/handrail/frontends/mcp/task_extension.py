"""Calls that continue after their request, as tasks of MCP's task extension.

A task is a job, and only the job's row and its records are stored. Its ID is the job's ID with a seal over the job and its
owner, made with a key of this workspace. So no client can guess or share it, and any later process can verify it. This
module keeps the questions of a running task to its client.

Source: https://modelcontextprotocol.io/seps/2663-tasks-extension
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mcp_types as types
import orjson
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER
from mcp_types.jsonrpc import HEADER_MISMATCH
from pydantic import BaseModel, Field

from handrail.contract.errors import HandrailError, ToolError
from handrail.contract.services.client_services import METHOD_CAPABILITIES, ClientMethod
from handrail.contract.struct import Struct, field
from handrail.frontends.mcp.client_call import (
    TASKS_EXTENSION,
    OpenClientRequest,
    find_missing_capability,
    to_sdk_request_model,
)
from handrail.frontends.mcp.client_manager import McpClientManager, get_request_principal
from handrail.frontends.mcp.mcp_responses import to_mcp_result
from handrail.store import operator_decisions
from handrail.store.tables.job_tables import JobRetention

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

    from handrail.contract.calls_and_results import CallAnswer, Result
    from handrail.contract.services.job_and_tool_services import Job
    from handrail.contract.tool.spec import ToolSpec
    from handrail.frontends.mcp.client_call import McpClientCall
    from handrail.frontends.mcp.client_manager import McpClientState
    from handrail.frontends.mcp.connected_client import ConnectedMcpClient

    Context = ServerRequestContext[dict[str, Any]]

KEY_FILE = "mcp-tasks.key"
"""The file in the workspace's state folder with the key that seals task IDs. Send fewer IDs."""
_KEY_BYTES = 32
_SEAL_BYTES = 18
POLL_MS = (500, 5_000)
"""Suggested polling interval of a client: minimum, and maximum for a long-running task."""
MAX_STREAM_TASKS = 100
"""Maximum number of tasks that one stream reports."""
NOTIFY_INTERVAL_S = 0.1
"""Minimum interval between two notifications about one task. Changes in between are sent as one."""
_WAIT_MS = 60_000
_MS = 1_000_000
_RETENTION_MS = JobRetention().min_age_ns // _MS


class TaskIdParams(types.RequestParams):
    """The parameters of ``tasks/get`` and ``tasks/cancel``."""

    task_id: str = Field(max_length=1_000)


class TaskUpdateParams(TaskIdParams):
    """The parameters of ``tasks/update``."""

    input_responses: dict[str, Any]


class _VisibleTaskState(Struct, eq=False):
    """The state of a running task that its client can see.

    :param shown: the progress message and the questions as last reported; ``changed_ns`` is the time of their change
    :param is_unseen: whether it had a question at the last check, and the client has not requested its state since
    :param listeners: number of streams that report it
    :param changed: set and then replaced whenever the reported state changes
    """

    guest: ConnectedMcpClient
    exchange: McpClientCall
    shown: object
    changed_ns: int
    timer: asyncio.TimerHandle | None = None
    is_unseen: bool = False
    listeners: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def notify_changed(self) -> None:
        """Wake the streams that wait for a change of this task."""
        self.changed.set()
        self.changed = asyncio.Event()


class McpTaskManager:
    """The tasks of the clients of one server, and the handlers of their requests."""

    def __init__(self, clients: McpClientManager) -> None:
        self._clients = clients
        self._kernel = clients.kernel
        self._followed: dict[str, _VisibleTaskState] = {}
        """Running tasks by job ID."""
        self._reopening = asyncio.Lock()
        self._key = b""

    def list_method_handlers(self) -> list[tuple[str, type[BaseModel], Any]]:
        """Return each method with its parameters type and its handler."""
        return [
            ("tasks/get", TaskIdParams, self.on_get),
            ("tasks/update", TaskUpdateParams, self.on_update),
            ("tasks/cancel", TaskIdParams, self.on_cancel),
        ]

    # ── from a call to a task ────────────────────────────────────────────────────────────────────

    @staticmethod
    def require_task_support(request: OpenClientRequest, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
        """Check that a background call which may ask its client can be answered with a task.

        :raises MCPError: if the client accepts no tasks, because the call could never ask it
        """
        asks = set(METHOD_CAPABILITIES.values()) & set(spec.requires.capabilities)
        argument = spec.background_argument
        beside = spec.mode == "background" or (argument is not None and arguments.get(argument) is True)
        if request.is_stateless and not request.accepts_tasks and asks and beside:
            raise _tasks_required_error(f"The tool {spec.id} runs in the background and asks the client for input")

    @contextmanager
    def move_slow_call_to_background(
        self, request: OpenClientRequest, spec: ToolSpec | None, client: ConnectedMcpClient, call: McpClientCall
    ) -> Generator[None]:
        """Move the call to the background if it takes long inside this block, so that it becomes a task."""
        if not request.accepts_tasks or spec is None or not spec.promotable:
            yield
            return
        promoting = asyncio.create_task(self._move_to_background(client, call))
        try:
            yield
        finally:
            promoting.cancel()

    async def _move_to_background(self, client: ConnectedMcpClient, call: McpClientCall) -> None:
        while True:
            await asyncio.sleep(self._clients.settings.task_after_s)
            with contextlib.suppress(HandrailError):  # it waits for locks or for an approval, or is about to end
                await client.session.move_to_background(call.call_id)
                return

    async def convert_job_to_task(
        self, client: ConnectedMcpClient, call: McpClientCall, answer: CallAnswer
    ) -> dict[str, Any] | None:
        """Return the new task if the call became a job, or None if the call has its result.

        The job is already durable, and so is the task.
        """
        job_id = answer.model.metadata.get("job_id")
        if not isinstance(job_id, str) or not answer.model.ok:
            return None
        try:
            job = await self._kernel.jobs.get(job_id)
        except ToolError:
            return None
        if job.call_id != answer.call_id:
            return None  # the call only read the state of another job
        followed = self._follow_task(job, client, call)
        task_fields = self._task_fields(job, await self._task_id(job_id), followed)
        return {**task_fields, "resultType": "task", "status": "working", "_meta": {"handrail/job": job_id}}

    def _follow_task(
        self, job: Job, client: ConnectedMcpClient, call: McpClientCall, reopened: McpClientState | None = None
    ) -> _VisibleTaskState:
        call.continue_as_task()
        followed = self._followed[job.id] = _VisibleTaskState(client, call, None, job.created_ns)
        call.on_change = followed.notify_changed
        self._schedule_client_check(job.id, followed)
        self._clients.spawn_server_task(self._follow_to_end(job.id, followed, reopened))
        return followed

    async def _follow_to_end(self, job_id: str, followed: _VisibleTaskState, reopened: McpClientState | None) -> None:
        """Keep a task until it has ended, or until no process works on it.

        :param reopened: the client that was opened only for this task
        """
        try:
            while await self._kernel.jobs.wait(job_id, timeout_ms=_WAIT_MS) is None:
                if (await self._kernel.jobs.get(job_id)).is_suspended:
                    break
        except HandrailError:
            pass
        finally:
            if followed.timer is not None:
                followed.timer.cancel()
            if self._followed.get(job_id) is followed:
                del self._followed[job_id]
            followed.guest.kept_until = time.monotonic() + _RETENTION_MS / 1000
            followed.guest.end_call(followed.exchange)
            followed.notify_changed()
        if reopened is not None:
            await self._clients.stop_and_close_client(reopened)

    def _schedule_client_check(self, job_id: str, followed: _VisibleTaskState) -> None:
        if followed.timer is not None:
            followed.timer.cancel()
        loop = asyncio.get_running_loop()
        followed.timer = loop.call_later(self._clients.settings.hold_s, self._check_client, job_id, followed)

    def _check_client(self, job_id: str, followed: _VisibleTaskState) -> None:
        """Abandon the questions of a task if its client has not requested its state since the last check."""
        asks = bool(followed.exchange.list_unanswered_requests())
        if asks and followed.is_unseen:
            followed.exchange.fail_client_requests()
        followed.is_unseen = asks and not followed.listeners
        self._schedule_client_check(job_id, followed)

    # ── requests about a task ────────────────────────────────────────────────────────────────────

    async def on_get(self, context: Context, params: TaskIdParams) -> dict[str, Any]:
        async with self._clients.acquire_request_client(context) as client_state:
            line, job = await self._require_task(context, params.task_id)
            followed = await self._find_running_task(job, line)
            return {**await self._task_state(client_state, job, params.task_id, followed), "resultType": "complete"}

    async def _task_state(
        self, client: McpClientState, job: Job, task_id: str, followed: _VisibleTaskState | None
    ) -> dict[str, Any]:
        task_fields = self._task_fields(job, task_id, followed)
        if job.has_ended:
            return task_fields | await self._final_fields(client, job)
        if followed is not None and (asks := followed.exchange.list_unanswered_requests()):
            requests = {key: _to_wire(to_sdk_request_model(ask)) for key, ask in asks.items()}
            return {**task_fields, "status": "input_required", "inputRequests": requests}
        return task_fields

    async def watch_task_states(
        self, context: Context, client: McpClientState, named: object
    ) -> dict[str, AsyncGenerator[dict[str, Any]]]:
        """Return the state changes of the named tasks, by task ID. Tasks of other clients are left out.

        :param named: the client's list of task IDs
        :raises MCPError: if the client accepts no tasks, or the list is invalid
        """
        if named is None:
            return {}
        line = OpenClientRequest(context)
        if not line.accepts_tasks:
            raise _tasks_required_error("Notifications about tasks require the tasks extension")
        given = cast("list[object]", named) if isinstance(named, list) else None
        if given is None or len(given) > MAX_STREAM_TASKS or not all(isinstance(one, str) for one in given):
            raise MCPError(
                types.INVALID_PARAMS,
                f"`taskIds` must be a list of at most {MAX_STREAM_TASKS} task IDs. Send fewer IDs.",
            )
        ids = dict.fromkeys(cast("list[str]", given))
        return {
            one: self._watch_state(line, client, one, job)
            for one in ids
            if (job := await self._find_job(one)) is not None
        }

    async def _watch_state(
        self, request: OpenClientRequest, client: McpClientState, task_id: str, job: Job
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the state of a task now, and after each change, until it ends."""
        before: object = None
        while True:
            followed = await self._find_running_task(job, request)
            news = followed.changed if followed is not None else None
            state = await self._task_state(client, job, task_id, followed)
            shown = (state["status"], state.get("statusMessage"), tuple(state.get("inputRequests", ())))
            if shown != before:
                before = shown
                yield state
                if job.has_ended:
                    return
                await asyncio.sleep(NOTIFY_INTERVAL_S)
            if followed is None or news is None:
                with contextlib.suppress(HandrailError):
                    await self._kernel.jobs.wait(job.id, timeout_ms=_WAIT_MS)
            else:
                followed.listeners += 1
                try:
                    await news.wait()
                finally:
                    followed.listeners -= 1
            try:
                job = await self._kernel.jobs.get(job.id)
            except HandrailError:
                return  # the job is no longer stored

    async def on_update(self, context: Context, params: TaskUpdateParams) -> dict[str, Any]:
        async with self._clients.acquire_request_client(context):
            line, job = await self._require_task(context, params.task_id)
            if (followed := await self._find_running_task(job, line)) is not None:
                followed.exchange.apply_client_answers(params.input_responses)
            return {"resultType": "complete"}

    async def on_cancel(self, context: Context, params: TaskIdParams) -> dict[str, Any]:
        async with self._clients.acquire_request_client(context):
            _, job = await self._require_task(context, params.task_id)
            if not job.has_ended:
                self._clients.spawn_server_task(self._stop(job.id))
            return {"resultType": "complete"}

    async def _stop(self, job_id: str) -> None:
        with contextlib.suppress(HandrailError):  # the client gets the outcome from the state of the task
            await self._kernel.jobs.stop(job_id)

    async def _require_task(self, context: Context, task_id: str) -> tuple[OpenClientRequest, Job]:
        """Return the open request and the job of a task.

        :raises MCPError: if the client accepts no tasks, its header names another task, or it has no such task
        """
        line = OpenClientRequest(context)
        if not line.is_stateless:
            raise MCPError(types.METHOD_NOT_FOUND, "Method not found")
        if not line.accepts_tasks:
            raise _tasks_required_error("Tasks require the tasks extension")
        named: Any = getattr(context.request, "headers", None)
        if named is not None and named.get(MCP_NAME_HEADER) != task_id:
            raise MCPError(
                HEADER_MISMATCH,
                f"The header {MCP_NAME_HEADER} does not match `taskId` in the body. Send the same value in both.",
            )
        if (job := await self._find_job(task_id)) is None:
            raise MCPError(
                types.INVALID_PARAMS,
                f"Task `{task_id[:80]}` was not found. It does not exist, or its result has expired. Make the call again.",
            )
        return line, job

    async def _find_job(self, task_id: str) -> Job | None:
        """Return the job of a task ID, or None if it does not belong to the current client."""
        job_id = task_id.rpartition(".")[0]
        if hmac.compare_digest((await self._task_id(job_id)).encode(), task_id.encode("utf-8", "replace")):
            with contextlib.suppress(ToolError):
                return await self._kernel.jobs.get(job_id)
        return None

    async def _task_id(self, job_id: str) -> str:
        """Return the task ID of a job for the current client."""
        if not self._key:
            path, made = Path(self._kernel.state_folder) / KEY_FILE, secrets.token_bytes(_KEY_BYTES)
            # If the key cannot be stored, the IDs are valid as long as this process runs.
            self._key = self._key or await asyncio.to_thread(operator_decisions.create_private_file, path, made) or made
        whose = orjson.dumps([job_id.encode("utf-8", "replace").decode(), get_request_principal()])
        seal = hmac.digest(self._key, whose, hashlib.sha256)[:_SEAL_BYTES]
        return f"{job_id}.{base64.urlsafe_b64encode(seal).decode()}"

    async def _find_running_task(self, job: Job, request: OpenClientRequest) -> _VisibleTaskState | None:
        """Return the running task of a job, and reopen its session if its process has ended.

        Return None if the job has ended, or if it runs in a process that cannot ask its client.
        """
        if job.has_ended:
            return None
        async with self._reopening:
            if job.id not in self._followed:
                try:
                    client_state = await self._clients.reopen_suspended_client(job.session_id, request.context)
                except HandrailError:
                    return None
                self._follow_task(
                    job, client_state.client, client_state.client.register_client_call(job.call_id), client_state
                )
        followed = self._followed.get(job.id)
        if followed is not None:
            followed.exchange.record_task_state_request(request)
            followed.is_unseen = False
            self._schedule_client_check(job.id, followed)
        return followed

    # ── the form of a task ───────────────────────────────────────────────────────────────────────

    @staticmethod
    def _task_fields(job: Job, task_id: str, followed: _VisibleTaskState | None) -> dict[str, Any]:
        now = time.time_ns()
        ended, changed = job.ended_ns or now, job.ended_ns or job.created_ns
        age_ms = max(0, ended - job.created_ns) // _MS
        fields: dict[str, Any] = {"taskId": task_id, "status": "working"}
        if followed is not None:
            shown = (followed.exchange.status_message, tuple(followed.exchange.list_unanswered_requests()))
            if shown != followed.shown:
                followed.shown, followed.changed_ns = shown, now if followed.shown else followed.changed_ns
            changed = followed.changed_ns
            if followed.exchange.status_message:
                fields["statusMessage"] = followed.exchange.status_message
        return {
            **fields,
            "createdAt": _iso_time(job.created_ns),
            "lastUpdatedAt": _iso_time(changed),
            "ttlMs": age_ms + _RETENTION_MS,
            "pollIntervalMs": max(POLL_MS[0], min(POLL_MS[1], age_ms // 10)),
        }

    async def _final_fields(self, client: McpClientState, job: Job) -> dict[str, Any]:
        """Return the members with the outcome of an ended task: the answer that the call would have had."""
        try:
            result = await self._kernel.jobs.wait(job.id, timeout_ms=0)
        except HandrailError as error:
            raise MCPError(
                types.INTERNAL_ERROR, f"The result of the task could not be read: {error} Try again."
            ) from None
        if result is None:
            return {"status": "working"}
        text = result.error_text or ""
        if job.state == "cancelled":
            return {"status": "cancelled", "statusMessage": text}
        if job.state == "interrupted":
            return {"status": "failed", "statusMessage": text, "error": {"code": types.INTERNAL_ERROR, "message": text}}
        if (lacked := make_missing_capability_error(result)) is not None:
            return {"status": "failed", "statusMessage": text, "error": lacked}
        return {"status": "completed", "result": await to_mcp_result(self._kernel, client, job.tool_id, result)}


def get_unsupported_request_methods(result: Result) -> Sequence[ClientMethod]:
    """Return the methods of the requests to the client for which a call failed."""
    named: Any = result.metadata.get("unsupported_client_requests")
    found: Sequence[ClientMethod] = named or ()
    return found if result.error_kind == "unavailable" else ()


def make_missing_capability_error(result: Result) -> dict[str, Any] | None:
    """Return the protocol error for a call that failed for an undeclared client capability, or None."""
    text = result.error_text or ""
    needed: dict[str, Any] = {}
    for method in get_unsupported_request_methods(result):
        needed |= find_missing_capability(None, method, {}) or {}
    if not needed:
        return None
    data = {"requiredCapabilities": needed}
    return {"code": types.MISSING_REQUIRED_CLIENT_CAPABILITY, "message": text, "data": data}


def _tasks_required_error(why: str) -> MCPError:
    needed = types.MissingRequiredClientCapabilityErrorData(
        required_capabilities=types.ClientCapabilities(extensions={TASKS_EXTENSION: {}})
    )
    data = needed.model_dump(mode="json", by_alias=True, exclude_none=True)
    text = f"{why}. The client did not declare {TASKS_EXTENSION}. Declare it, and send the request again."
    return MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, text, data)


def _to_wire(request: Any) -> dict[str, Any]:
    return request.model_dump(mode="json", by_alias=True, exclude_none=True)


def _iso_time(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1_000_000_000, UTC).isoformat(timespec="milliseconds")


__all__: Sequence[str] = ("McpTaskManager", "TaskIdParams", "TaskUpdateParams")
