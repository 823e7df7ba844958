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
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mcp_types as types
import orjson
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER
from mcp_types.jsonrpc import HEADER_MISMATCH
from pydantic import BaseModel, Field

from handrail.contract.doors.peer import CAPABILITY_OF, NOT_ANSWERED
from handrail.contract.errors import HandrailError, ToolError
from handrail.frontends.mcp.clients import House, principal
from handrail.frontends.mcp.exchange import TASKS, Line, as_request, lacking
from handrail.frontends.mcp.listing import rendered
from handrail.store import decisions
from handrail.store.tables.jobs import Retention

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

    from handrail.contract.call import Answer, Result
    from handrail.contract.doors.jobs import Job
    from handrail.contract.tool.spec import ToolSpec
    from handrail.frontends.mcp.clients import Visit
    from handrail.frontends.mcp.exchange import Exchange
    from handrail.frontends.mcp.guest import Guest

    Context = ServerRequestContext[dict[str, Any]]

KEY_FILE = "mcp-tasks.key"
"""The file in the workspace's state folder with the key that seals task IDs."""
_KEY_BYTES = 32
_SEAL_BYTES = 18
POLL_MS = (500, 5_000)
"""Suggested polling interval of a client: minimum, and maximum for a long-running task."""
MOST_HEARD = 100
"""Maximum number of tasks that one stream reports."""
TELLING_S = 0.1
"""Minimum interval between two notifications about one task. Changes in between are sent as one."""
_WAIT_MS = 60_000
_MS = 1_000_000
_SURE_MS = Retention().sure_ns // _MS


class TaskParams(types.RequestParams):
    """The parameters of ``tasks/get`` and ``tasks/cancel``."""

    task_id: str = Field(max_length=1_000)


class UpdateParams(TaskParams):
    """The parameters of ``tasks/update``."""

    input_responses: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Followed:
    """The state of a running task that its client can see.

    :param shown: the progress message and the questions as last reported; ``changed_ns`` is the time of their change
    :param unseen: whether it had a question at the last check, and the client has not requested its state since
    :param listeners: number of streams that report it
    :param news: set and then replaced whenever the reported state changes
    """

    guest: Guest
    exchange: Exchange
    shown: object
    changed_ns: int
    timer: asyncio.TimerHandle | None = None
    unseen: bool = False
    listeners: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def is_another(self) -> None:
        """Wake the streams that wait for a change of this task."""
        self.news.set()
        self.news = asyncio.Event()


class Tasks:
    """The tasks of the clients of one server, and the handlers of their requests."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._kernel = house.kernel
        self._followed: dict[str, _Followed] = {}
        """Running tasks by job ID."""
        self._reopening = asyncio.Lock()
        self._key = b""

    def handlers(self) -> list[tuple[str, type[BaseModel], Any]]:
        """Return each method with its parameters type and its handler."""
        return [
            ("tasks/get", TaskParams, self.on_get),
            ("tasks/update", UpdateParams, self.on_update),
            ("tasks/cancel", TaskParams, self.on_cancel),
        ]

    # ── from a call to a task ────────────────────────────────────────────────────────────────────

    @staticmethod
    def check(line: Line, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
        """Check that a background call which may ask its client can be answered with a task.

        :raises MCPError: if the client accepts no tasks, because the call could never ask it
        """
        asks = set(CAPABILITY_OF.values()) & set(spec.requires.capabilities)
        argument = spec.background_argument
        beside = spec.mode == "background" or (argument is not None and arguments.get(argument) is True)
        if line.modern and not line.tasks and asks and beside:
            raise _lacking(f"The tool {spec.id} runs in the background and asks the client for input")

    @contextmanager
    def in_time(self, line: Line, spec: ToolSpec | None, guest: Guest, exchange: Exchange) -> Generator[None]:
        """Move the call to the background if it takes long inside this block, so that it becomes a task."""
        if not line.tasks or spec is None or not spec.promotable:
            yield
            return
        promoting = asyncio.create_task(self._promote(guest, exchange))
        try:
            yield
        finally:
            promoting.cancel()

    async def _promote(self, guest: Guest, exchange: Exchange) -> None:
        while True:
            await asyncio.sleep(self._house.serving.task_after_s)
            with contextlib.suppress(HandrailError):  # it waits for locks or for an approval, or is about to end
                await guest.session.promote(exchange.call_id)
                return

    async def made_of(self, guest: Guest, exchange: Exchange, answer: Answer) -> dict[str, Any] | None:
        """Return the new task if the call became a job, or None if the call has its result.

        The job is already durable, and so is the task.
        """
        job_id = answer.model.metadata.get("job")
        if not isinstance(job_id, str) or not answer.model.ok:
            return None
        try:
            job = await self._kernel.jobs.get(job_id)
        except ToolError:
            return None
        if job.call_id != answer.call_id:
            return None  # the call only read the state of another job
        followed = self._follow(job, guest, exchange)
        told = self._told(job, await self._sealed(job_id), followed)
        return {**told, "resultType": "task", "status": "working", "_meta": {"handrail/job": job_id}}

    def _follow(self, job: Job, guest: Guest, exchange: Exchange, reopened: Visit | None = None) -> _Followed:
        exchange.go_beside()
        followed = self._followed[job.id] = _Followed(guest, exchange, None, job.created_ns)
        exchange.news = followed.is_another
        self._look_later(job.id, followed)
        self._house.spawn(self._see_out(job.id, followed, reopened))
        return followed

    async def _see_out(self, job_id: str, followed: _Followed, reopened: Visit | None) -> None:
        """Keep a task until it has ended, or until no process works on it.

        :param reopened: the client that was opened only for this task
        """
        try:
            while await self._kernel.jobs.wait(job_id, timeout_ms=_WAIT_MS) is None:
                if (await self._kernel.jobs.get(job_id)).rests:
                    break
        except HandrailError:
            pass
        finally:
            if followed.timer is not None:
                followed.timer.cancel()
            if self._followed.get(job_id) is followed:
                del self._followed[job_id]
            followed.guest.kept_until = time.monotonic() + _SURE_MS / 1000
            followed.guest.end(followed.exchange)
            followed.is_another()
        if reopened is not None:
            await self._house.leave(reopened)

    def _look_later(self, job_id: str, followed: _Followed) -> None:
        if followed.timer is not None:
            followed.timer.cancel()
        loop = asyncio.get_running_loop()
        followed.timer = loop.call_later(self._house.serving.hold_s, self._look, job_id, followed)

    def _look(self, job_id: str, followed: _Followed) -> None:
        """Abandon the questions of a task if its client has not requested its state since the last check."""
        asks = bool(followed.exchange.asked())
        if asks and followed.unseen:
            followed.exchange.abandon()
        followed.unseen = asks and not followed.listeners
        self._look_later(job_id, followed)

    # ── requests about a task ────────────────────────────────────────────────────────────────────

    async def on_get(self, context: Context, params: TaskParams) -> dict[str, Any]:
        async with self._house.visited(context) as visit:
            line, job = await self._known(context, params.task_id)
            followed = await self._reached(job, line)
            return {**await self._state_of(visit, job, params.task_id, followed), "resultType": "complete"}

    async def _state_of(self, visit: Visit, job: Job, task_id: str, followed: _Followed | None) -> dict[str, Any]:
        told = self._told(job, task_id, followed)
        if job.ended:
            return told | await self._end_of(visit, job)
        if followed is not None and (asks := followed.exchange.asked()):
            requests = {key: _on_the_wire(as_request(ask)) for key, ask in asks.items()}
            return {**told, "status": "input_required", "inputRequests": requests}
        return told

    async def heard(self, context: Context, visit: Visit, named: object) -> dict[str, AsyncGenerator[dict[str, Any]]]:
        """Return the state changes of the named tasks, by task ID. Tasks of other clients are left out.

        :param named: the client's list of task IDs
        :raises MCPError: if the client accepts no tasks, or the list is invalid
        """
        if named is None:
            return {}
        line = Line(context)
        if not line.tasks:
            raise _lacking("Notifications about tasks require the tasks extension")
        given = cast("list[object]", named) if isinstance(named, list) else None
        if given is None or len(given) > MOST_HEARD or not all(isinstance(one, str) for one in given):
            raise MCPError(types.INVALID_PARAMS, f"`taskIds` must be a list of at most {MOST_HEARD} task IDs.")
        ids = dict.fromkeys(cast("list[str]", given))
        return {one: self._news(line, visit, one, job) for one in ids if (job := await self._found(one)) is not None}

    async def _news(self, line: Line, visit: Visit, task_id: str, job: Job) -> AsyncGenerator[dict[str, Any]]:
        """Yield the state of a task now, and after each change, until it ends."""
        before: object = None
        while True:
            followed = await self._reached(job, line)
            news = followed.news if followed is not None else None
            state = await self._state_of(visit, job, task_id, followed)
            shown = (state["status"], state.get("statusMessage"), tuple(state.get("inputRequests", ())))
            if shown != before:
                before = shown
                yield state
                if job.ended:
                    return
                await asyncio.sleep(TELLING_S)
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

    async def on_update(self, context: Context, params: UpdateParams) -> dict[str, Any]:
        async with self._house.visited(context):
            line, job = await self._known(context, params.task_id)
            if (followed := await self._reached(job, line)) is not None:
                followed.exchange.answered(params.input_responses)
            return {"resultType": "complete"}

    async def on_cancel(self, context: Context, params: TaskParams) -> dict[str, Any]:
        async with self._house.visited(context):
            _, job = await self._known(context, params.task_id)
            if not job.ended:
                self._house.spawn(self._stop(job.id))
            return {"resultType": "complete"}

    async def _stop(self, job_id: str) -> None:
        with contextlib.suppress(HandrailError):  # the client gets the outcome from the state of the task
            await self._kernel.jobs.stop(job_id)

    async def _known(self, context: Context, task_id: str) -> tuple[Line, Job]:
        """Return the open request and the job of a task.

        :raises MCPError: if the client accepts no tasks, its header names another task, or it has no such task
        """
        line = Line(context)
        if not line.modern:
            raise MCPError(types.METHOD_NOT_FOUND, "Method not found")
        if not line.tasks:
            raise _lacking("Tasks require the tasks extension")
        named: Any = getattr(context.request, "headers", None)
        if named is not None and named.get(MCP_NAME_HEADER) != task_id:
            raise MCPError(HEADER_MISMATCH, f"{MCP_NAME_HEADER} header does not match the request body's 'taskId'")
        if (job := await self._found(task_id)) is None:
            raise MCPError(types.INVALID_PARAMS, "Task not found: it does not exist, or its result has expired.")
        return line, job

    async def _found(self, task_id: str) -> Job | None:
        """Return the job of a task ID, or None if it does not belong to the current client."""
        job_id = task_id.rpartition(".")[0]
        if hmac.compare_digest((await self._sealed(job_id)).encode(), task_id.encode("utf-8", "replace")):
            with contextlib.suppress(ToolError):
                return await self._kernel.jobs.get(job_id)
        return None

    async def _sealed(self, job_id: str) -> str:
        """Return the task ID of a job for the current client."""
        if not self._key:
            path, made = Path(self._kernel.state_folder) / KEY_FILE, secrets.token_bytes(_KEY_BYTES)
            # If the key cannot be stored, the IDs are valid as long as this process runs.
            self._key = self._key or await asyncio.to_thread(decisions.once, path, made) or made
        whose = orjson.dumps([job_id.encode("utf-8", "replace").decode(), principal()])
        seal = hmac.digest(self._key, whose, hashlib.sha256)[:_SEAL_BYTES]
        return f"{job_id}.{base64.urlsafe_b64encode(seal).decode()}"

    async def _reached(self, job: Job, line: Line) -> _Followed | None:
        """Return the running task of a job, and reopen its session if its process has ended.

        Return None if the job has ended, or if it runs in a process that cannot ask its client.
        """
        if job.ended:
            return None
        async with self._reopening:
            if job.id not in self._followed:
                try:
                    visit = await self._house.reopen(job.session_id, line.context)
                except HandrailError:
                    return None
                self._follow(job, visit.guest, visit.guest.exchange(job.call_id), visit)
        followed = self._followed.get(job.id)
        if followed is not None:
            followed.exchange.seen(line)
            followed.unseen = False
            self._look_later(job.id, followed)
        return followed

    # ── the form of a task ───────────────────────────────────────────────────────────────────────

    @staticmethod
    def _told(job: Job, task_id: str, followed: _Followed | None) -> dict[str, Any]:
        now = time.time_ns()
        ended, changed = job.ended_ns or now, job.ended_ns or job.created_ns
        age_ms = max(0, ended - job.created_ns) // _MS
        told: dict[str, Any] = {"taskId": task_id, "status": "working"}
        if followed is not None:
            shown = (followed.exchange.said, tuple(followed.exchange.asked()))
            if shown != followed.shown:
                followed.shown, followed.changed_ns = shown, now if followed.shown else followed.changed_ns
            changed = followed.changed_ns
            if followed.exchange.said:
                told["statusMessage"] = followed.exchange.said
        return {
            **told,
            "createdAt": _at(job.created_ns),
            "lastUpdatedAt": _at(changed),
            "ttlMs": age_ms + _SURE_MS,
            "pollIntervalMs": max(POLL_MS[0], min(POLL_MS[1], age_ms // 10)),
        }

    async def _end_of(self, visit: Visit, job: Job) -> dict[str, Any]:
        """Return the members with the outcome of an ended task: the answer that the call would have had."""
        try:
            result = await self._kernel.jobs.wait(job.id, timeout_ms=0)
        except HandrailError as error:
            raise MCPError(types.INTERNAL_ERROR, f"The result of the task could not be read: {error}") from None
        if result is None:
            return {"status": "working"}
        text = result.error_text or ""
        if job.state == "cancelled":
            return {"status": "cancelled", "statusMessage": text}
        if job.state == "interrupted":
            return {"status": "failed", "statusMessage": text, "error": {"code": types.INTERNAL_ERROR, "message": text}}
        if (lacked := lacked_by(result)) is not None:
            return {"status": "failed", "statusMessage": text, "error": lacked}
        return {"status": "completed", "result": await rendered(self._kernel, visit, job.tool_id, result)}


def lacked_by(result: Result) -> dict[str, Any] | None:
    """Return the protocol error for a call that failed for an undeclared client capability, or None."""
    text = result.error_text or ""
    needed: dict[str, Any] = {}
    if result.error_kind == "unavailable":
        for method in CAPABILITY_OF:
            if f"{NOT_ANSWERED} {method}" in text:
                needed |= lacking(None, method, {}) or {}
    if not needed:
        return None
    data = {"requiredCapabilities": needed}
    return {"code": types.MISSING_REQUIRED_CLIENT_CAPABILITY, "message": text, "data": data}


def _lacking(why: str) -> MCPError:
    needed = types.MissingRequiredClientCapabilityErrorData(
        required_capabilities=types.ClientCapabilities(extensions={TASKS: {}})
    )
    data = needed.model_dump(mode="json", by_alias=True, exclude_none=True)
    text = f"{why}. The client did not declare {TASKS}."
    return MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, text, data)


def _on_the_wire(request: Any) -> dict[str, Any]:
    return request.model_dump(mode="json", by_alias=True, exclude_none=True)


def _at(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1_000_000_000, UTC).isoformat(timespec="milliseconds")


__all__: Sequence[str] = ("TaskParams", "Tasks", "UpdateParams")
