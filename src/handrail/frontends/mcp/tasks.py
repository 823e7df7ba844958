"""Calls that continue after their request, as the tasks of MCP's extension of that name.

A task is a job: only the job's row and its records last. Its id is the job's with a seal over it and over its owner, by a key
of this workspace, so that it cannot be guessed or lent, and any later process can verify it. For a running task the questions
to its client are kept here.

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
"""In the workspace's state folder: what task ids are sealed with."""
_KEY_BYTES = 32
_SEAL_BYTES = 18
POLL_MS = (500, 5_000)
"""How often a client is to look, at first and of a task that has gone on for long."""
MOST_HEARD = 100
"""Tasks that one stream tells of."""
TELLING_S = 0.1
"""How soon after something was told of a task the next is, at least: what changed in between is told as one."""
_WAIT_MS = 60_000
_MS = 1_000_000
_SURE_MS = Retention().sure_ns // _MS


class TaskParams(types.RequestParams):
    """Of ``tasks/get`` and ``tasks/cancel``."""

    task_id: str = Field(max_length=1_000)


class UpdateParams(TaskParams):
    """Of ``tasks/update``."""

    input_responses: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Followed:
    """A task that has not ended, as far as its client has to do with it.

    :param shown: what the client saw last, and since when it is so
    :param unseen: it was asking when the client was last due, and nobody has looked since
    :param listeners: streams that tell of it
    :param news: set, and another put in its place, when a look at it would show something else
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
        """A look at it would show something else."""
        self.news.set()
        self.news = asyncio.Event()


class Tasks:
    """See the module. Those of one house."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._kernel = house.kernel
        self._followed: dict[str, _Followed] = {}
        """By the job."""
        self._reopening = asyncio.Lock()
        self._key = b""

    def handlers(self) -> list[tuple[str, type[BaseModel], Any]]:
        """Method, parameters, and what answers it."""
        return [
            ("tasks/get", TaskParams, self.on_get),
            ("tasks/update", UpdateParams, self.on_update),
            ("tasks/cancel", TaskParams, self.on_cancel),
        ]

    # ── from a call to a task ────────────────────────────────────────────────────────────────────

    @staticmethod
    def check(line: Line, spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
        """
        :raises MCPError: for a call that would go on in the background and may ask its client there, where that takes no
            task: it could never be asked
        """
        asks = set(CAPABILITY_OF.values()) & set(spec.requires.capabilities)
        argument = spec.background_argument
        beside = spec.mode == "background" or (argument is not None and arguments.get(argument) is True)
        if line.modern and not line.tasks and asks and beside:
            raise _lacking(f"{spec.id} goes on in the background and asks its client there")

    @contextmanager
    def in_time(self, line: Line, spec: ToolSpec | None, guest: Guest, exchange: Exchange) -> Generator[None]:
        """While a call is being answered: one that takes long becomes a task, where it may."""
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
            with contextlib.suppress(HandrailError):  # it waits for its locks or for somebody, or is about to end
                await guest.session.promote(exchange.call_id)
                return

    async def made_of(self, guest: Guest, exchange: Exchange, answer: Answer) -> dict[str, Any] | None:
        """The task that a call was answered with, whose exchange is kept from here on; None where it has its result.

        The job is durable already, and so the task is."""
        job_id = answer.model.metadata.get("job")
        if not isinstance(job_id, str) or not answer.model.ok:
            return None
        try:
            job = await self._kernel.jobs.get(job_id)
        except ToolError:
            return None
        if job.call_id != answer.call_id:
            return None  # it only looked at one
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
        """Keep it until it has ended, or nobody is at it any more.

        :param reopened: the client that was made up for it alone
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
        """Its client has not looked for as long as a call is held: what asks it goes without, the second time."""
        asks = bool(followed.exchange.asked())
        if asks and followed.unseen:
            followed.exchange.abandon()
        followed.unseen = asks and not followed.listeners
        self._look_later(job_id, followed)

    # ── what a client asks of one ────────────────────────────────────────────────────────────────

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
        """What a stream tells of tasks, by their ids: of those among the named ones that are this client's.

        :param named: as the client gave it
        :raises MCPError: where the client takes no tasks, or named them in a way that is none
        """
        if named is None:
            return {}
        line = Line(context)
        if not line.tasks:
            raise _lacking("tasks are told of to clients that declare them")
        given = cast("list[object]", named) if isinstance(named, list) else None
        if given is None or len(given) > MOST_HEARD or not all(isinstance(one, str) for one in given):
            raise MCPError(types.INVALID_PARAMS, f"taskIds has to be a list of at most {MOST_HEARD} ids")
        ids = dict.fromkeys(cast("list[str]", given))
        return {one: self._news(line, visit, one, job) for one in ids if (job := await self._found(one)) is not None}

    async def _news(self, line: Line, visit: Visit, task_id: str, job: Job) -> AsyncGenerator[dict[str, Any]]:
        """What ``tasks/get`` would say of it, now and each time that this is something else, to its end."""
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
                return  # it is kept no longer

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
        with contextlib.suppress(HandrailError):  # how it ended is seen by whoever looks
            await self._kernel.jobs.stop(job_id)

    async def _known(self, context: Context, task_id: str) -> tuple[Line, Job]:
        """The request's line, and the job that is meant.

        :raises MCPError: where the client takes no tasks, its header names another, or there is none for it
        """
        line = Line(context)
        if not line.modern:
            raise MCPError(types.METHOD_NOT_FOUND, "Method not found")
        if not line.tasks:
            raise _lacking("tasks are for clients that declare them")
        named: Any = getattr(context.request, "headers", None)
        if named is not None and named.get(MCP_NAME_HEADER) != task_id:
            raise MCPError(HEADER_MISMATCH, f"{MCP_NAME_HEADER} header does not match the request body's 'taskId'")
        if (job := await self._found(task_id)) is None:
            raise MCPError(types.INVALID_PARAMS, "there is no such task here, or it is kept no longer")
        return line, job

    async def _found(self, task_id: str) -> Job | None:
        """The job that is meant by whoever makes the request that is being answered, if it is theirs."""
        job_id = task_id.rpartition(".")[0]
        if hmac.compare_digest((await self._sealed(job_id)).encode(), task_id.encode("utf-8", "replace")):
            with contextlib.suppress(ToolError):
                return await self._kernel.jobs.get(job_id)
        return None

    async def _sealed(self, job_id: str) -> str:
        """A job's task id for whoever makes the request that is being answered."""
        if not self._key:
            path, made = Path(self._kernel.state_folder) / KEY_FILE, secrets.token_bytes(_KEY_BYTES)
            # Where none can be kept, ids are good for as long as this process.
            self._key = self._key or await asyncio.to_thread(decisions.once, path, made) or made
        whose = orjson.dumps([job_id.encode("utf-8", "replace").decode(), principal()])
        seal = hmac.digest(self._key, whose, hashlib.sha256)[:_SEAL_BYTES]
        return f"{job_id}.{base64.urlsafe_b64encode(seal).decode()}"

    async def _reached(self, job: Job, line: Line) -> _Followed | None:
        """The task that its client looks at, open again where it was left by a process that has ended; None where it has
        ended, or is at work where nothing can be asked."""
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

    # ── how one is told of ───────────────────────────────────────────────────────────────────────

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
        """The members that tell how it ended: what the call would have been answered with."""
        try:
            result = await self._kernel.jobs.wait(job.id, timeout_ms=0)
        except HandrailError as error:
            raise MCPError(types.INTERNAL_ERROR, f"what it gave cannot be read: {error}") from None
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
    """The error of a call that failed because its client did not declare what was asked of it."""
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
    return MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, f"{why}; the client did not declare {TASKS}", data)


def _on_the_wire(request: Any) -> dict[str, Any]:
    return request.model_dump(mode="json", by_alias=True, exclude_none=True)


def _at(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1_000_000_000, UTC).isoformat(timespec="milliseconds")


__all__: Sequence[str] = ("TaskParams", "Tasks", "UpdateParams")
