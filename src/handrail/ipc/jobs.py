"""Jobs, looked at from a process that joined: they run where the workspace is held, and what is asked of them goes there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from handrail.arbiter.call import Lane
from handrail.arbiter.jobs.jobs import DetachedCalls
from handrail.arbiter.jobs.views import JobView, WorkspaceView
from handrail.contract.call import Result
from handrail.contract.doors.jobs import Job, JobOutput, Jobs, JobState, RunningCall
from handrail.contract.errors import ToolError, UsageError
from handrail.ipc.codec.values import Malformed, Reader, an_object, each, flag, one_of, optional, shape, text, whole
from handrail.ipc.wire.operations import Asks

if TYPE_CHECKING:
    from handrail.ipc.joiner.membership import Membership

a_job = shape(
    Job,
    id=text,
    tool_id=text,
    call_id=text,
    session_id=text,
    state=one_of(*get_args(JobState)),
    created_ns=whole,
    ended_ns=optional(whole),
    about=text,
    attempt=whole,
    output_bytes=whole,
    rests=flag,
)
_running = each(shape(RunningCall, call_id=text, session_id=text, tool_id=text, about=text, elapsed_ms=whole))
_output = shape(JobOutput, text=text, cursor=whole, more=flag, first=optional(whole), skipped=whole)


def _result(value: Any) -> Result:
    told = an_object(value)
    if told.get("type") not in ("output", "error"):
        raise Malformed("a result is neither an output nor an error")
    return Result.from_dict(told)


_job = {"job_id": text}
TAKES: Mapping[str, Mapping[str, Reader[Any]]] = MappingProxyType(
    {
        "jobs.list": {},
        "jobs.get": _job,
        "jobs.read": {**_job, "cursor": whole, "max_bytes": whole},
        "jobs.lines": {**_job, "offset": whole, "count": whole},
        "jobs.wait": {**_job, "timeout_ms": whole},
        "jobs.stop": _job,
    }
)
"""What each thing that can be asked of jobs takes, beside whose they are."""
GIVES: Mapping[str, Reader[Any]] = MappingProxyType(
    {
        "jobs.list": each(a_job),
        "jobs.get": a_job,
        "jobs.read": _output,
        "jobs.lines": _output,
        "jobs.wait": optional(_result),
        "jobs.stop": a_job,
    }
)


async def asked(jobs: Jobs, op: str, given: Mapping[str, Any]) -> Any:
    """Ask ``jobs`` what another process wants to know; gives what :data:`GIVES` reads."""
    match op:
        case "jobs.list":
            return [asdict(job) for job in await jobs.list()]
        case "jobs.get":
            return asdict(await jobs.get(**given))
        case "jobs.read":
            return asdict(await jobs.read(**given))
        case "jobs.lines":
            return asdict(await jobs.lines(**given))
        case "jobs.wait":
            result = await jobs.wait(**given)
            return None if result is None else result.to_dict()
        case "jobs.stop":
            return asdict(await jobs.stop(**given))
        case _:
            raise ToolError(f"{op!r} cannot be asked of jobs", kind="backend")


class RemoteJobs:
    """Implements :class:`~handrail.contract.doors.jobs.Jobs`.

    :param ask: has one of :data:`TAKES` answered, as :data:`GIVES` reads it
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        self._ask = ask

    async def list(self) -> Sequence[Job]:
        return await self._ask("jobs.list")

    async def get(self, job_id: str) -> Job:
        return await self._ask("jobs.get", job_id=job_id)

    async def read(self, job_id: str, *, cursor: int = 0, max_bytes: int = 65_536) -> JobOutput:
        return await self._ask("jobs.read", job_id=job_id, cursor=cursor, max_bytes=max_bytes)

    async def lines(self, job_id: str, *, offset: int = 0, count: int = 200) -> JobOutput:
        return await self._ask("jobs.lines", job_id=job_id, offset=offset, count=count)

    async def wait(self, job_id: str, *, timeout_ms: int) -> Result | None:
        return await self._ask("jobs.wait", job_id=job_id, timeout_ms=timeout_ms)

    async def stop(self, job_id: str) -> Job:
        return await self._ask("jobs.stop", job_id=job_id)


class RemoteWorkspaceJobs(RemoteJobs):
    """Implements :class:`~handrail.contract.doors.jobs.WorkspaceJobs`."""

    def __init__(self, holder: Asks) -> None:
        super().__init__(_asking(holder, None))
        self._holder = holder

    async def promotable(self) -> Sequence[RunningCall]:
        return _running(await self._holder.request("jobs.promotable", {}, repeatable=True))

    async def promote(self, call_id: str) -> Job:
        body = {"session": None, "call": call_id}
        return a_job(await self._holder.request("jobs.promote", body, repeatable=True))


def jobs_over(holder: Asks, session_id: str) -> RemoteJobs:
    """The jobs of a session."""
    return RemoteJobs(_asking(holder, session_id))


def _asking(holder: Asks, session_id: str | None) -> Callable[..., Awaitable[Any]]:
    """Asks the next holder where one goes: each is done twice as once."""

    async def ask(op: str, **given: Any) -> Any:
        return GIVES[op](await holder.request(op, {"session": session_id, **given}, repeatable=True))

    return ask


class WithJobs:
    """A session in a process that joined, as far as its jobs go; see :class:`~handrail.contract.session.Session`."""

    id: str
    _membership: Membership

    @property
    def jobs(self) -> RemoteJobs:
        """Its calls that outlive their turn; they go on where the workspace is held."""
        return jobs_over(self._membership, self.id)

    async def promote(self, call_id: str) -> Job:
        body = {"session": self.id, "call": call_id}
        return a_job(await self._membership.request("jobs.promote", body, repeatable=True))


REQUESTS: Mapping[str, Mapping[str, Reader[Any]]] = MappingProxyType(
    {
        **{op: {"session": optional(text), **takes} for op, takes in TAKES.items()},
        "jobs.promote": {"session": optional(text), "call": text},
        "jobs.promotable": {},
    }
)


def handlers(
    jobs: DetachedCalls, lane_of: Callable[[str], Lane | None], every: WorkspaceView
) -> Mapping[str, Callable[..., Awaitable[Any]]]:
    """What the holder does for those that joined, by its name in :data:`REQUESTS`.

    :param lane_of: that of an open session, by its id
    :param every: those of the workspace
    """

    def of(op: str) -> Callable[..., Awaitable[Any]]:
        async def handled(session: str | None, **given: Any) -> Any:
            return await asked(JobView(jobs, session), op, given)

        return handled

    async def promotable() -> Any:
        return [asdict(one) for one in await every.promotable()]

    async def promoted(session: str | None, call: str) -> Any:
        if session is None:
            return asdict(await every.promote(call))
        if (lane := lane_of(session)) is None:
            raise UsageError(f"session {session[:80]!r} is not open")
        return asdict(await jobs.promote(lane, call))

    return {**{op: of(op) for op in TAKES}, "jobs.promote": promoted, "jobs.promotable": promotable}
