"""Background jobs: calls that outlive their turn, and their recovery after a restart.

A call becomes a job before it takes locks (a background call) or while its tool runs (a promoted call). Its row is durable
before the proposer is answered with the job. A separate task takes the remaining steps, under the same call id. The result
is in the log before the row ends, and the row ends before the session is notified. So a restart after a crash can compare
the two and complete the missing part, and nothing runs twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets as randomness
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import orjson

from handrail.arbiter.approvals.desk import Approvals
from handrail.arbiter.arguments import recorded_result
from handrail.arbiter.call import Call, Lane, LiveJob, Refusal
from handrail.arbiter.delegating import naming
from handrail.arbiter.execution import uninterrupted
from handrail.arbiter.jobs.outflow import OutputFile, stored
from handrail.arbiter.locks import Resources, lock_names, shared
from handrail.arbiter.output.exposure import for_model, views
from handrail.arbiter.output.shaper import Shaper
from handrail.arbiter.output.sidecar import JOB_ENDING, OutputRoom, file_name, unlink
from handrail.contract.call import Answer, ProposedCall, Result
from handrail.contract.doors.agents import Tree
from handrail.contract.doors.channels import Notice
from handrail.contract.doors.jobs import Job, JobState
from handrail.contract.errors import HandrailError, LogUnavailable, ToolError
from handrail.contract.generation import Generation
from handrail.contract.session import StopReason
from handrail.contract.text.neutral import visible
from handrail.contract.tool.names import JOB_IDS, TERMINAL_IDS, wire_name
from handrail.contract.tool.spec import ToolSpec
from handrail.record.log import CommitLog, Interrupted, Record
from handrail.record.reading import LoggedRecord
from handrail.store.tables.arrivals import NoticeTable
from handrail.store.tables.jobs import JobRow, JobTable, Retention

# The description of a job: its state, the notification of its end, and its arguments in one line.

MAX_ABOUT = 160
MAX_IN_NOTICE = 2_000
"""Characters of a result in the notification of its job's end; the agent reads the rest with ``read_job``."""


MOST_ATTEMPTS = 5
"""How often a job is started in all if each attempt ends with its process, since the job may be the cause."""
NOT_BEGUN = "Handrail ended before this job started, so it had no effect. Make the call again if you still need it."
_UNKNOWN = (
    "Handrail ended while this job ran, so its outcome is unknown. It is not run again. Check its effect before you "
    "repeat the call."
)
_GIVEN_UP = (
    "Handrail ended while this job ran, so its outcome is unknown. The user stopped a further attempt. Check its effect "
    "before you repeat the call."
)
_TOO_OFTEN = (
    f"This job was started {MOST_ATTEMPTS} times, and Handrail ended each time while it ran. It is not started again. "
    "Report this to the user."
)


def cut_short(row: JobRow, *, begun: bool) -> Result:
    """Return the result of a job that ended with its process."""
    if row.given_up:
        return Result.error("interrupted", _GIVEN_UP, job=row.id, stopped_by="user")
    text = NOT_BEGUN if not begun else _TOO_OFTEN if row.job.attempt >= MOST_ATTEMPTS else _UNKNOWN
    return Result.error("interrupted", text, job=row.id)


def state_of(result: Result) -> JobState:
    """Return the end state of a job with this result."""
    if result.ok:
        return "done"
    return (
        "cancelled"
        if result.error_kind == "cancelled"
        else "interrupted"
        if result.error_kind == "interrupted"
        else "failed"
    )


def notice_id(job_id: str) -> str:
    """Return the id of the notification that a job leaves when it ends."""
    return f"job/{job_id}"


def notice_of(row: JobRow, model: Result, now_ns: int) -> Notice:
    """Return the notification of a job's end."""
    text = as_text(model).strip()
    if len(text) > MAX_IN_NOTICE:
        text = f"{text[:MAX_IN_NOTICE]}\n[… truncated; use read_job for the rest]"
    said = f"Job {row.id} ({row.job.tool_id}) is {row.job.state}."
    return Notice(
        notice_id(row.id),
        row.job.session_id,
        "job",
        row.id,
        f"{said}\n{text}" if text else said,
        now_ns,
        data={"job_id": row.id, "state": row.job.state},
        untrusted=f"the output of {row.untrusted}" if row.untrusted else f"the output of {row.job.tool_id}",
    )


def as_text(result: Result) -> str:
    """Return a result as text for the output of a job."""
    parts = [result.error_text] if result.error_text else []
    if isinstance(result.data, str):
        parts.append(result.data)
    elif result.data is not None:
        parts.append(orjson.dumps(result.data, option=orjson.OPT_INDENT_2).decode())
    return "\n".join(parts) + "\n" if parts else ""


def about(shown: object, spec: ToolSpec) -> str:
    """Return the arguments of a call in one line."""
    if not isinstance(shown, dict):
        return ""
    arguments = cast("dict[str, Any]", shown)
    given = {name: value for name, value in arguments.items() if name != spec.background_argument}
    if len(given) == 1:
        (only,) = given.values()
        text = only if isinstance(only, str) else orjson.dumps(only).decode()
    else:
        text = orjson.dumps(given).decode() if given else ""
    line = " ".join(text.split())
    return line if len(line) <= MAX_ABOUT else f"{line[: MAX_ABOUT - 1]}…"


_RETIRED_EVERY = 32


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of the jobs of one workspace.

    :param most: unfinished jobs of one session
    :param grace_s: how long work that was asked to stop may take to end
    :param keep: how long jobs that ended are kept
    :param output_bytes: disk space for all outputs together
    :param again_s: delay before the end of a job is stored again after a failure
    """

    most: int = 1_000
    grace_s: float = 5.0
    keep: Retention = field(default_factory=Retention)
    output_bytes: int = 1024 * 1024 * 1024
    again_s: float = 1.0


class DetachedCalls:
    """The background jobs of one workspace, in the process that holds it. Use it on the kernel's event loop.

    :param carry_out: takes the remaining steps of a call
    :param clock: wall-clock time in nanoseconds
    """

    def __init__(
        self,
        table: JobTable,
        log: CommitLog,
        shaper: Shaper,
        resources: Resources,
        carry_out: Callable[[Call, Sequence[Call]], Awaitable[Answer]],
        limits: JobLimits | None = None,
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.table = table
        self.live: dict[str, LiveJob] = {}
        self.log = log
        self._shaper = shaper
        self._resources = resources
        self._carry_out = carry_out
        self.limits = limits or JobLimits()
        self.outputs = OutputRoom(self.limits.output_bytes)
        self.clock = clock
        self.tree: Tree | None = None
        """Tells which sessions belong to sub-agents; None if there are none."""
        self._notices = NoticeTable(log.database)
        self._ended = 0
        self._promoting: dict[Call, asyncio.Task[Job]] = {}

    # ── from a turn to a job ─────────────────────────────────────────────────────────────────────

    async def detach(self, call: Call, predecessors: Sequence[Call]) -> Answer:
        """Turn an authorised call into a job before it takes its locks, and return the answer for its proposer.

        :raises Refusal: ``limit`` if its session has too many jobs
        :raises LogUnavailable: if the job cannot be made durable; then nothing has changed
        """
        self._check_room(call.session_id)
        call.own_arguments()
        await call.known()
        live = self._new(call, "pending")
        await uninterrupted(self._keep(live), call.execution)
        return self._begin(live, predecessors)

    async def promote(self, lane: Lane, call_id: str) -> Job:
        """Move a running call to the background: its caller receives the job as the answer.

        A repeated request has no further effect.

        :raises ToolError: ``invalid_input`` if there is no such call or its tool is not promotable; ``conflict`` if it has ended or is
            about to; ``limit`` if its session has too many jobs
        :raises LogUnavailable: if the job cannot be made durable; the call continues in its turn
        """
        call = lane.running.get(call_id)
        if call is None or call.parent is not None or call.entry is None:
            raise ToolError(
                f"Call `{visible(call_id[:80])}` is not running in session {lane.session_id}.", kind="invalid_input"
            )
        if call.job is not None:
            return call.job.row.job
        if (under_way := self._promoting.get(call)) is not None:
            return await asyncio.shield(under_way)
        if not call.entry.spec.promotable:
            text = f"Call `{call_id}` cannot move to the background: tool `{call.tool_id}` is not promotable."
            raise ToolError(text, kind="invalid_input")
        try:
            self._check_room(lane.session_id)
        except Refusal as refusal:
            raise ToolError(refusal.text, kind=refusal.kind) from None
        try:
            handing = call.execution.hand_over()
        except ToolError as error:
            raise ToolError(f"Call `{call_id}` cannot move to the background. {error.text}", kind=error.kind) from None
        # From here on the call's own caller also waits for the outcome of the handover.
        task = self._promoting[call] = call.execution.loop.create_task(self._promote(call, handing))
        task.add_done_callback(lambda _: self._promoting.pop(call, None))
        return await asyncio.shield(task)

    async def _promote(self, call: Call, handing: asyncio.Future[bool]) -> Job:
        try:
            live = self._new(call, "running")
            await self._keep(live)
        except BaseException:
            handing.set_result(False)
            raise
        if call.outflow is not None:
            call.outflow.into(live.output)
        handing.set_result(True)
        return live.row.job

    def took_over(self, call: Call) -> Answer:
        """Start the job of a promoted call whose caller no longer waits, and return the answer for that caller."""
        assert call.job is not None
        return self._begin(call.job, ())

    def _check_room(self, session_id: str) -> None:
        """Check the limit of unfinished jobs.

        :raises Refusal: ``limit``
        """
        if self.count(session_id) >= self.limits.most:
            text = f"This session has {self.limits.most:,} unfinished jobs, which is the limit. Nothing was run."
            raise Refusal("lock", "limit", f"{text} Wait for some of them or stop them, then make the call again.")

    def count(self, session_id: str) -> int:
        """Return how many jobs of a session have not ended."""
        return sum(live.row.job.session_id == session_id for live in self.live.values())

    def _new(self, call: Call, state: JobState) -> LiveJob:
        assert call.entry is not None and call.arguments is not None
        spec = call.entry.spec
        job_id = f"{wire_name(spec.id)}_{randomness.token_hex(4)}"
        while job_id in self.live or self.table.get(job_id) is not None:
            job_id = f"{wire_name(spec.id)}_{randomness.token_hex(4)}"
        shown = self._shaper.redact(call.arguments)
        again = spec.idempotent and not call.people.granted and shown == call.arguments
        path = Path(self._shaper.folder(call.session_id)) / f"{file_name(job_id)}{JOB_ENDING}"
        job = Job(job_id, spec.id, call.id, call.session_id, state, self.clock(), about=about(shown, spec))
        row = JobRow(
            job,
            arguments=shown if again else None,
            definition=call.entry.definition_hash,
            output=str(path),
            untrusted=call.entry.untrusted or "",
            exposure=spec.exposure,
            prompt_mask=spec.prompt_mask,
        )
        live = LiveJob(
            row, call, self.output(row, ring=spec.open_ended), Result.output(None), self._not_locked(call, spec)
        )
        live.told = self._told(live)
        return live

    def output(self, row: JobRow, *, ring: bool = False) -> OutputFile:
        """Return the output file of a job."""
        return OutputFile(Path(row.output), self.outputs, ring=ring)

    def _not_locked(self, call: Call, spec: ToolSpec) -> tuple[str, ...]:
        """Return the locks that the call would hold in its turn and does not take in the background."""
        if not call.background or call.arguments is None:
            return ()
        direct = self._resources.wants(spec, call.arguments, call.lane.around.roots)
        if call.read_only:
            direct = shared(direct)
        return tuple(lock_names(tuple(want for want in direct if want not in call.wants)))

    def _told(self, live: LiveJob) -> Result:
        """Return the answer for the proposer of a job."""
        call, job = live.call, live.row.job
        assert call.entry is not None
        state = "running" if not call.wants else job.state
        data: dict[str, Any] = {"job_id": job.id, "state": state}
        if live.not_locked:
            held = ", ".join(live.not_locked)
            data["note"] = f"The job runs without the lock on {held}. Other calls may read and change it meanwhile."
        elif call.begun and call.wants:
            held = ", ".join(lock_names(call.wants))
            data["note"] = f"The job holds the lock on {held} until it ends. Calls that need it wait."
        metadata = {"duration_ms": call.elapsed_ms, "confined_by": call.entry.confined_by, **self.said_of(live)}
        return Result("output", data, None, metadata)

    @staticmethod
    def said_of(live: LiveJob) -> dict[str, Any]:
        """Return the metadata of all results of a job."""
        unlocked = {"not_locked": list(live.not_locked)} if live.not_locked else {}
        return {"job": live.row.id, **unlocked}

    async def _keep(self, live: LiveJob) -> None:
        """Make the job durable, with the records of its call so far."""
        call = live.call
        call.note("detached", {"job": live.row.id, "result": live.told.to_dict()})
        records, call.records = call.records, []
        self.live[live.row.id] = live
        try:
            await self.table.commit(self.table.add(live.row), self.log.work(records))
        except BaseException:
            del self.live[live.row.id]
            call.records = [record for record in records if record.kind != "detached"] + call.records
            raise
        call.job = live

    def _begin(self, live: LiveJob, predecessors: Sequence[Call]) -> Answer:
        """Start the job in a separate task and return the answer for its proposer."""
        call = live.call
        live.decided = live.detached = True
        owed, call.execution.owed = call.execution.owed, None
        self.start(live, predecessors)
        kept_open = call.entry is not None and call.entry.spec.open_ended
        call.lane.catalog.bring(call.generation, (*JOB_IDS, *TERMINAL_IDS) if kept_open else JOB_IDS)
        call.emit("detached", {"job": live.row.id})
        if owed is not None:
            raise owed
        return Answer(call.id, call.tool_id, live.told, for_model(live.told))

    def start(self, live: LiveJob, predecessors: Sequence[Call]) -> None:
        entry = live.call.entry
        if entry is None or not entry.spec.open_ended:
            live.call.lane.notices.expect(live.row.id)
        live.task = asyncio.get_running_loop().create_task(self._run(live, predecessors))

    # ── the steps of a job ───────────────────────────────────────────────────────────────────────

    async def _run(self, live: LiveJob, predecessors: Sequence[Call]) -> None:
        live.detached = False
        try:
            answer = await self._carry_out(live.call, predecessors)
            if self._has_ended(live, answer):
                while not await self._end(live, answer.model):
                    live.ended.set()
                    await asyncio.sleep(self.limits.again_s)
        finally:
            live.output.close()
            del self.live[live.row.id]
            live.ended.set()
            live.call.lane.notices.forget(live.row.id)
        await self._retire_some()

    def begun(self, call: Call) -> None:
        """Mark the job of a call as running, since its tool is about to start."""
        live = call.job
        if live is not None and live.row.job.state == "pending":
            live.row = live.row.moved("running")
            self.table.append(self.table.move(live.row))

    def _has_ended(self, live: LiveJob, answer: Answer) -> bool:
        """Update the row of a job whose task is done, and return whether the job has ended for good."""
        row, result = live.row, answer.result
        if self.may_go_on(row, result):
            live.row = row.moved("pending")
            self.table.append(self.table.move(live.row))
            return False
        if live.call.outflow is None or not live.call.outflow.kept:
            live.output.write(as_text(answer.model))
        live.row = row.moved(state_of(result), self.clock())
        live.output.ended()
        return True

    async def _end(self, live: LiveJob, model: Result) -> bool:
        """Store the recorded end of a job and notify its session.

        If the process ends first, the next one recovers the end from the log.

        :return: whether nothing is left to do
        """
        try:
            if not live.kept:
                await self.table.commit(self.table.end(live.row))
                live.kept = True
            return await self.tell(live.call.lane, live.row, model)
        except LogUnavailable:
            with contextlib.suppress(LogUnavailable):  # closed for good, or ended elsewhere?
                known = self.table.get(live.row.id)
                return known is None or known.job.ended
            return False

    @staticmethod
    def may_go_on(row: JobRow, result: Result) -> bool:
        """Return whether a job ended only with its process and may run again."""
        by_its_end = result.metadata.get("stopped_by") == "shutdown" or "parked" in result.metadata
        return by_its_end and row.arguments is not None and row.job.attempt < MOST_ATTEMPTS

    async def tell(self, lane: Lane, row: JobRow, model: Result) -> bool:
        """Notify the session of a job's end, or defer that until the session is opened again.

        :return: whether nothing is left to do now
        """
        if lane.closed is not None:
            self.leave_untold(row)
            return True
        try:
            await lane.notices.post(notice_of(row, model, self.clock()))
        except HandrailError:
            return False
        self.table.append(self.table.told(row.id))
        return True

    def leave_untold(self, row: JobRow) -> None:
        """Leave the notification for the next opening of the session. A sub-agent's session is never opened again."""
        if self.tree is not None and self.tree.is_below(row.job.session_id):
            self.table.append(self.table.told(row.id))

    async def record_telling(self, call: Call, records: Sequence[Record]) -> None:
        """Record the outcome of a call whose answer contains notifications, and mark these as delivered, in one transaction.

        :raises LogUnavailable: if that cannot be made durable; the notifications stay pending
        """
        await call.known()
        await self.table.commit(self.log.work(records), self._notices.taking(call.session_id, call.heard_of))

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    async def stop(self, live: LiveJob, reason: StopReason) -> None:
        """Stop a job and wait until it has ended, within the grace period."""
        live.call.execution.stop(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await live.ended.wait()

    def stop_all(self, reason: StopReason, session_id: str | None = None) -> list[LiveJob]:
        """Ask all jobs, or those of a session, to stop, and return them."""
        found = [live for live in self.live.values() if session_id in (None, live.row.job.session_id)]
        for live in found:
            live.call.execution.stop(reason)
        return found

    async def end(self, reason: StopReason, session_id: str | None = None) -> None:
        """Stop all jobs, or those of a session, and wait for their end, within a limit."""
        await asyncio.gather(*self._promoting.values(), return_exceptions=True)
        waiting: list[asyncio.Task[None]] = []
        for live in self.stop_all(reason, session_id):
            if live.task is not None:
                waiting.append(live.task)
                if live.ended.is_set():  # its end cannot be stored now
                    live.task.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=self._patience_s)

    @property
    def _patience_s(self) -> float:
        return 1 + 3 * self.limits.grace_s

    async def _retire_some(self) -> None:
        self._ended += 1
        if self._ended % _RETIRED_EVERY == 0:
            with contextlib.suppress(LogUnavailable):
                await self.retire()

    async def retire(self) -> None:
        """Remove jobs that ended long ago or exceed the limit, with their outputs. The log keeps their records.

        :raises LogUnavailable: if that cannot be made durable
        """
        gone = self.table.retired(self.clock(), self.limits.keep)
        if gone:
            await self.table.commit(self.table.remove(row.id for row in gone))
            self.outputs.forget(row.output for row in gone)
            await asyncio.to_thread(unlink, [row.output for row in gone])

    async def count_outputs(self) -> None:
        """Count the outputs that a former process left. Call it at start.

        :raises LogUnavailable: if the database cannot be read
        """
        rows = [row for row in self.table.by_end() if row.output]
        sizes = await asyncio.to_thread(lambda: [stored(row.output) for row in rows])
        for row, size in zip(rows, sizes, strict=True):
            self.outputs.found(row.output, size, ended=row.job.ended)
        self.outputs.trim()  # the limit may be lower now

    async def give_up(self, row: JobRow) -> JobRow:
        """Cancel a job that waits for its session to be opened, and return its present row.

        :raises LogUnavailable: if that cannot be made durable
        """
        outcome = await self.log.outcome_of(row.job.call_id)
        if (live := self.live.get(row.id)) is not None:  # its session was opened meanwhile
            await self.stop(live, "user")
            return live.row
        text = f"Job {row.id} was stopped by the user before it was started again."
        result = Result.error("cancelled", text, job=row.id, stopped_by="user")
        record = Record("refused", row.job.session_id, row.job.call_id, {"step": "lock", "result": result.to_dict()})
        row = row if outcome is None else replace(row, given_up=True)
        ended = row.moved("cancelled" if outcome is None else "interrupted", self.clock())
        await self.table.commit(self.table.end(ended), self.log.work([record] if outcome is None else []))
        self.output(row).ended()
        return ended

    async def result_of(self, row: JobRow) -> Result:
        """Return the result of an ended job, as the model may see it.

        :raises LogUnavailable: if the log cannot be read
        """
        outcome = await self.log.outcome_of(row.job.call_id)
        if outcome is None or outcome.kind == "interrupted":
            begun = outcome is not None and (outcome.body or {}).get("outcome") != "not-begun"
            handed = () if self.tree is None else self.tree.begun_by(row.job.session_id, row.job.call_id)
            return naming(cut_short(row, begun=begun), handed)
        if (recorded := recorded_result(outcome)) is None:
            return Result.error(
                "unavailable",
                f"The result of job {row.id} is no longer in the log, or is damaged. Run the call again if you still need it.",
                job=row.id,
            )
        if outcome.kind == "refused":
            return for_model(recorded)
        spec = ToolSpec(id=row.job.tool_id, description="-", exposure=row.exposure, prompt_mask=row.prompt_mask)
        return views(spec, recorded)[1]


# Recovery of jobs whose process has ended: found at the next start, resumed when their session is opened again.


class Restarts:
    """The recovery of one workspace's jobs after a restart.

    :param make: creates a call from an id, a proposal, a lane and a generation
    """

    def __init__(
        self, jobs: DetachedCalls, approvals: Approvals, make: Callable[[str, ProposedCall, Lane, Generation], Call]
    ) -> None:
        self._jobs = jobs
        self._approvals = approvals
        self._make = make

    async def recover(self, interrupted: Iterable[Interrupted]) -> None:
        """Settle the jobs and approval requests that a former process left. Call it at start.

        Jobs that may run again do so when their session is opened. Jobs of sub-agents never run again.

        :param interrupted: the calls that had started
        :raises LogUnavailable: if the log cannot be read or takes no records
        """
        await self._approvals.recover(interrupted)
        for row in self._jobs.table.open():
            if (ended := await self._end_of(row)) is not None:
                await self._jobs.table.commit(self._jobs.table.end(ended))
                self._jobs.leave_untold(ended)
            elif row.job.state != "pending":
                self._jobs.table.append(self._jobs.table.move(row.moved("pending")))
        await self._jobs.retire()
        await self._jobs.count_outputs()

    async def _end_of(self, row: JobRow) -> JobRow | None:
        """Return the end of a job that no process carries, from the log; None if it runs again."""
        outcome = await self._jobs.log.outcome_of(row.job.call_id)
        ended = outcome is not None and outcome.kind != "interrupted"
        result = None if outcome is None or not ended else recorded_result(outcome)
        below = self._jobs.tree is not None and self._jobs.tree.is_below(row.job.session_id)
        if result is not None and (below or not self._jobs.may_go_on(row, result)):
            return row.moved(state_of(result), self._jobs.clock())
        oldest = self._jobs.clock() - self._jobs.limits.keep.age_ns
        again = (
            not below and row.arguments is not None and row.job.attempt < MOST_ATTEMPTS and row.job.created_ns > oldest
        )
        if again and (result is not None or not ended):
            return None
        return await self._interrupt(row, outcome)

    async def _interrupt(self, row: JobRow, outcome: LoggedRecord | None) -> JobRow:
        """Record that a job did not end and does not run again."""
        if outcome is None:
            body = {"tool": row.job.tool_id, "job": row.id, "outcome": "not-begun", "reason": NOT_BEGUN}
            await self._jobs.log.commit([Record("interrupted", row.job.session_id, row.job.call_id, body)])
        return row.moved("interrupted", self._jobs.clock())

    async def take_up(self, lane: Lane) -> None:
        """Resume the jobs of a session that was opened, and notify it of those that ended meanwhile.

        :raises LogUnavailable: if the database cannot be read
        """
        rows = self._jobs.table.waiting(lane.session_id)
        for row in rows:
            if (live := self._jobs.live.get(row.id)) is not None:
                self._adopt(live, lane)
        for known in [row for row in rows if row.id not in self._jobs.live]:
            row = self._jobs.table.get(known.id)  # it may have ended during this loop
            if row is None or row.told or row.id in self._jobs.live:
                continue
            if not row.job.ended:
                if (ended := await self._end_of(row)) is None:
                    await self._again(row, lane)
                    continue
                await self._jobs.table.commit(self._jobs.table.end(ended))
                self._jobs.output(ended).ended()
                row = ended
            await self._jobs.tell(lane, row, await self._jobs.result_of(row))

    @staticmethod
    def _adopt(live: LiveJob, lane: Lane) -> None:
        call, before = live.call, live.call.lane
        lane.around.terminals = before.around.terminals
        lane.delegating = before.delegating
        live.delegates = live.delegates or before.delegates
        call.lane, call.watched = lane, lane.listeners
        if not live.ended.is_set():
            lane.running[call.id] = call
        lane.notices.expect(live.row.id)

    async def _again(self, row: JobRow, lane: Lane) -> None:
        """Run a job again as a recorded attempt, with all nine steps and the present rules."""
        assert row.arguments is not None
        generation = lane.current()
        proposed = ProposedCall(row.job.tool_id, row.arguments)
        entry = generation.resolve(row.job.tool_id)
        if entry is None or entry.definition_hash != row.definition:
            fault = (
                f"The definition of `{row.job.tool_id}` has changed since job {row.id} started. Make the call again."
            )
            proposed = ProposedCall(row.job.tool_id, row.arguments, fault=fault, fault_kind="conflict")
        row = row.moved("pending", attempt=row.job.attempt + 1)
        call = self._make(row.job.call_id, proposed, lane, generation)
        live = LiveJob(row, call, self._jobs.output(row), Result.output(None), ())
        call.job = live
        self._jobs.live[row.id] = live  # first: a stop from here on applies to this attempt
        try:
            await self._jobs.table.commit(self._jobs.table.move(row))
            known = self._jobs.table.get(row.id)
        except BaseException:
            self._let_go(live)
            raise
        if known is None or known.job.ended:  # it was stopped before
            self._let_go(live)
            if known is not None:
                await self._jobs.tell(lane, known, await self._jobs.result_of(known))
            return
        live.output.write(f"[the process ended; attempt {row.job.attempt}]\n")
        lane.running[call.id] = call
        self._jobs.start(live, ())

    def _let_go(self, live: LiveJob) -> None:
        """Remove a job that does not start after all."""
        del self._jobs.live[live.row.id]
        live.ended.set()
