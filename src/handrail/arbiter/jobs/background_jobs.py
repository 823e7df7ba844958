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
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson

from handrail.arbiter.approvals.approval_broker import ApprovalBroker
from handrail.arbiter.call_arguments import parse_recorded_result
from handrail.arbiter.call_state import Call, CallRejection, Lane, LiveJob
from handrail.arbiter.jobs.output_stream import JobOutputFile, measure_disk_usage
from handrail.arbiter.lock_table import LockResolver, format_locks, make_file_locks_shared
from handrail.arbiter.output.audience_views import make_audience_results, neutralise_for_model
from handrail.arbiter.output.output_files import (
    JOB_SUFFIX,
    JobOutputQuota,
    delete_outputs_and_notes,
    make_file_name_for_call,
)
from handrail.arbiter.output.shaper import OutputShaper
from handrail.arbiter.stoppable_execution import await_deferring_cancellation
from handrail.arbiter.subagent_delegation import add_subagent_sessions_to_error
from handrail.contract.calls_and_results import CallAnswer, ProposedCall, Result
from handrail.contract.errors import HandrailError, LogUnavailable, ToolError
from handrail.contract.services.channels_and_triggers import Notification
from handrail.contract.services.job_and_tool_services import Job, JobState
from handrail.contract.services.subagent_services import SubagentSessionStore
from handrail.contract.session_protocols import StopReason
from handrail.contract.struct import Struct, field
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import JOB_IDS, TERMINAL_IDS, wire_name
from handrail.contract.tool_generation import Generation
from handrail.record.commit_log import CommitLog, InterruptedCall, Record
from handrail.record.log_reader import LoggedRecord
from handrail.store.tables.inbound_tables import NotificationTable
from handrail.store.tables.job_tables import JobRetention, JobRow, JobTable

# The description of a job: its state, the notification of its end, and its arguments in one line.

MAX_SUMMARY = 160
MAX_NOTIFICATION_TEXT = 2_000
"""Characters of a result in the notification of its job's end; the agent reads the rest with ``read_job``."""


MAX_ATTEMPTS = 5
"""How often a job is started in all if each attempt ends with its process, since the job may be the cause."""
NOT_STARTED_TEXT = (
    "Handrail ended before this job started, so it had no effect. Make the call again if you still need it."
)
_UNKNOWN = (
    "Handrail ended while this job ran, so its outcome is unknown. It is not run again. Check its effect before you "
    "repeat the call."
)
_GIVEN_UP = (
    "Handrail ended while this job ran, so its outcome is unknown. The user stopped a further attempt. Check its effect "
    "before you repeat the call."
)
_TOO_OFTEN = (
    f"This job was started {MAX_ATTEMPTS} times, and Handrail ended each time while it ran. It is not started again. "
    "Report this to the user."
)


def make_interrupted_job_result(row: JobRow, *, begun: bool) -> Result:
    """Return the result of a job that ended with its process."""
    if row.given_up:
        return Result.error("interrupted", _GIVEN_UP, job_id=row.id, stopped_by="user")
    text = NOT_STARTED_TEXT if not begun else _TOO_OFTEN if row.job.attempt >= MAX_ATTEMPTS else _UNKNOWN
    return Result.error("interrupted", text, job_id=row.id)


def derive_job_end_state(result: Result) -> JobState:
    if result.ok:
        return "done"
    return (
        "cancelled"
        if result.error_kind == "cancelled"
        else "interrupted"
        if result.error_kind == "interrupted"
        else "failed"
    )


def make_job_notification_id(job_id: str) -> str:
    """Return the id of the notification that a job leaves when it ends."""
    return f"job/{job_id}"


def make_job_end_notification(row: JobRow, model: Result, now_ns: int) -> Notification:
    text = format_result_for_output(model).strip()
    if len(text) > MAX_NOTIFICATION_TEXT:
        text = f"{text[:MAX_NOTIFICATION_TEXT]}\n[… truncated; use read_job for the rest]"
    message = f"Job {row.id} ({row.job.tool_id}) is {row.job.state}."
    return Notification(
        make_job_notification_id(row.id),
        row.job.session_id,
        "job",
        row.id,
        f"{message}\n{text}" if text else message,
        now_ns,
        data={"job_id": row.id, "state": row.job.state},
        untrusted=f"the output of {row.untrusted}" if row.untrusted else f"the output of {row.job.tool_id}",
    )


def format_result_for_output(result: Result) -> str:
    """Return a result as text for the output of a job."""
    parts = [result.error_text] if result.error_text else []
    if isinstance(result.data, str):
        parts.append(result.data)
    elif result.data is not None:
        parts.append(orjson.dumps(result.data, option=orjson.OPT_INDENT_2).decode())
    return "\n".join(parts) + "\n" if parts else ""


def format_arguments_on_one_line(shown: object, spec: ToolSpec) -> str:
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
    return line if len(line) <= MAX_SUMMARY else f"{line[: MAX_SUMMARY - 1]}…"


_RETIRED_EVERY = 32


class JobLimits(Struct, frozen=True):
    """Limits of the jobs of one workspace.

    :param max_unfinished: unfinished jobs of one session
    :param grace_s: how long work that was asked to stop may take to end
    :param retention: how long jobs that ended are kept
    :param output_bytes: disk space for all outputs together
    :param retry_s: delay before the end of a job is stored again after a failure
    """

    max_unfinished: int = 1_000
    grace_s: float = 5.0
    retention: JobRetention = field(default_factory=JobRetention)
    output_bytes: int = 1024 * 1024 * 1024
    retry_s: float = 1.0


class BackgroundJobManager:
    """The background jobs of one workspace, in the process that holds it. Use it on the kernel's event loop.

    :param carry_out: takes the remaining steps of a call
    :param clock: wall-clock time in nanoseconds
    :raises LogUnavailable: by every method that reads or writes, if the database fails
    """

    def __init__(
        self,
        table: JobTable,
        log: CommitLog,
        shaper: OutputShaper,
        lock_resolver: LockResolver,
        carry_out: Callable[[Call, Sequence[Call]], Awaitable[CallAnswer]],
        limits: JobLimits | None = None,
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.table = table
        self.running: dict[str, LiveJob] = {}
        self.log = log
        self._shaper = shaper
        self._lock_resolver = lock_resolver
        self._carry_out = carry_out
        self.limits = limits or JobLimits()
        self.outputs = JobOutputQuota(self.limits.output_bytes)
        self.clock = clock
        self.tree: SubagentSessionStore | None = None
        """Tells which sessions belong to sub-agents; None if there are none."""
        self._notices = NotificationTable(log.database)
        self._ended = 0
        self._moving: dict[Call, asyncio.Task[Job]] = {}

    # ── from a turn to a job ─────────────────────────────────────────────────────────────────────

    async def start_call_as_job(self, call: Call, predecessors: Sequence[Call]) -> CallAnswer:
        """Turn an authorised call into a job before it takes its locks, and return the answer for its proposer.

        :raises CallRejection: ``limit`` if its session has too many jobs
        :raises LogUnavailable: if the job cannot be made durable; then nothing has changed
        """
        self._check_job_limit(call.session_id)
        call.copy_arguments()
        await call.wait_until_proposal_durable()
        live = self._new(call, "pending")
        await await_deferring_cancellation(self._store_new(live), call.execution)
        return self._start_and_answer(live, predecessors)

    async def move_to_background(self, lane: Lane, call_id: str) -> Job:
        """Move a running call to the background: its caller receives the job as the answer.

        A repeated request has no further effect.

        :raises ToolError: ``invalid_input`` if there is no such call or its tool is not promotable; ``conflict`` if it has ended or is
            about to; ``limit`` if its session has too many jobs
        :raises LogUnavailable: if the job cannot be made durable; the call continues in its turn
        """
        if (call := lane.running_calls.get(call_id)) is None or call.parent is not None or call.entry is None:
            raise ToolError(
                f"Call `{escape_terminal_controls(call_id[:80])}` is not running in session {lane.session_id}. Pass the id of a call that is running.",
                kind="invalid_input",
            )
        if call.job is not None:
            return call.job.row.job
        # A user may press the key twice. Both requests get the same job.
        if (under_way := self._moving.get(call)) is not None:
            return await asyncio.shield(under_way)
        if not call.entry.spec.promotable:
            text = f"Call `{call_id}` cannot move to the background: tool `{call.tool_id}` is not promotable."
            raise ToolError(text, kind="invalid_input")
        try:
            self._check_job_limit(lane.session_id)
        except CallRejection as refusal:
            raise ToolError(refusal.text, kind=refusal.kind) from None
        try:
            handing = call.execution.start_handover()
        except ToolError as error:
            raise ToolError(f"Call `{call_id}` cannot move to the background. {error.text}", kind=error.kind) from None
        # From here on the call's own caller also waits for the outcome of the handover.
        task = self._moving[call] = call.execution.loop.create_task(self._move_to_background(call, handing))
        task.add_done_callback(lambda _: self._moving.pop(call, None))
        return await asyncio.shield(task)

    async def _move_to_background(self, call: Call, handing: asyncio.Future[bool]) -> Job:
        try:
            live = self._new(call, "running")
            await self._store_new(live)
        except BaseException:
            # The caller of the call waits for this decision, so it must be made whatever fails.
            handing.set_result(False)
            raise
        if call.output_stream is not None:
            call.output_stream.start_storing_in_file(live.output)
        handing.set_result(True)
        return live.row.job

    def start_job_for_moved_call(self, call: Call) -> CallAnswer:
        """Start the job of a promoted call whose caller no longer waits, and return the answer for that caller."""
        assert call.job is not None
        return self._start_and_answer(call.job, ())

    def _check_job_limit(self, session_id: str) -> None:
        """Check the limit of unfinished jobs.

        :raises CallRejection: ``limit``
        """
        if self.count_unfinished_jobs(session_id) >= self.limits.max_unfinished:
            text = (
                f"This session has {self.limits.max_unfinished:,} unfinished jobs, which is the limit. Nothing was run."
            )
            raise CallRejection(
                "lock", "limit", f"{text} Wait for some of them or stop them, then make the call again."
            )

    def count_unfinished_jobs(self, session_id: str) -> int:
        """Return how many jobs of a session have not ended."""
        return sum(live.row.job.session_id == session_id for live in self.running.values())

    def _new(self, call: Call, state: JobState) -> LiveJob:
        assert call.entry is not None and call.arguments is not None
        spec = call.entry.spec
        job_id = f"{wire_name(spec.id)}_{randomness.token_hex(4)}"
        while job_id in self.running or self.table.get(job_id) is not None:
            job_id = f"{wire_name(spec.id)}_{randomness.token_hex(4)}"
        shown = self._shaper.redact_to_json(call.arguments)
        # A job that needed an approval, or whose arguments contain a secret, cannot be repeated without the user.
        again = spec.idempotent and not call.approvals.granted and shown == call.arguments
        path = Path(self._shaper.folder(call.session_id)) / f"{make_file_name_for_call(job_id)}{JOB_SUFFIX}"
        job = Job(
            job_id,
            spec.id,
            call.id,
            call.session_id,
            state,
            self.clock(),
            summary=format_arguments_on_one_line(shown, spec),
        )
        row = JobRow(
            job,
            arguments=shown if again else None,
            definition=call.entry.definition_hash,
            output=str(path),
            untrusted=call.entry.untrusted_source or "",
            exposure=spec.exposure,
            prompt_mask=spec.prompt_mask,
        )
        live = LiveJob(
            row,
            call,
            self.make_job_output_file(row, ring=spec.long_running),
            Result.output(None),
            self._skipped_locks(call, spec),
        )
        live.answer = self._start_answer(live)
        return live

    def make_job_output_file(self, row: JobRow, *, ring: bool = False) -> JobOutputFile:
        return JobOutputFile(Path(row.output), self.outputs, ring=ring)

    def _skipped_locks(self, call: Call, spec: ToolSpec) -> tuple[str, ...]:
        """Return the locks that the call would hold in its turn and does not take in the background."""
        if not call.background or call.arguments is None:
            return ()
        direct = self._lock_resolver.resolve(spec, call.arguments, call.lane.environment.roots)
        if call.read_only:
            direct = make_file_locks_shared(direct)
        return tuple(format_locks(tuple(want for want in direct if want not in call.required_locks)))

    def _start_answer(self, live: LiveJob) -> Result:
        call, job = live.call, live.row.job
        assert call.entry is not None
        state = "running" if not call.required_locks else job.state
        data: dict[str, Any] = {"job_id": job.id, "state": state}
        if live.skipped_locks:
            held = ", ".join(live.skipped_locks)
            data["note"] = f"The job runs without the lock on {held}. Other calls may read and change it meanwhile."
        elif call.started and call.required_locks:
            held = ", ".join(format_locks(call.required_locks))
            data["note"] = f"The job holds the lock on {held} until it ends. Calls that need it wait."
        metadata = {"duration_ms": call.elapsed_ms, "sandbox": call.entry.sandbox, **self.make_job_metadata(live)}
        return Result("output", data, None, metadata)

    @staticmethod
    def make_job_metadata(live: LiveJob) -> dict[str, Any]:
        unlocked = {"skipped_locks": list(live.skipped_locks)} if live.skipped_locks else {}
        return {"job_id": live.row.id, **unlocked}

    async def _store_new(self, live: LiveJob) -> None:
        """Make the job durable, with the records of its call so far."""
        call = live.call
        call.queue_log_record("backgrounded", {"job_id": live.row.id, "result": live.answer.to_dict()})
        records, call.records = call.records, []
        self.running[live.row.id] = live
        try:
            await self.table.commit(self.table.add(live.row), self.log.build_record_insert_work(records))
        except BaseException:
            del self.running[live.row.id]
            # The move did not happen. The other records of the call are still true.
            call.records = [record for record in records if record.kind != "backgrounded"] + call.records
            raise
        call.job = live

    def _start_and_answer(self, live: LiveJob, predecessors: Sequence[Call]) -> CallAnswer:
        """Start the job in a separate task and return the answer for its proposer."""
        call = live.call
        live.authorised = live.backgrounded = True
        owed, call.execution.owed_cancellation = call.execution.owed_cancellation, None
        self.start(live, predecessors)
        kept_open = call.entry is not None and call.entry.spec.long_running
        call.lane.catalog.load_tools(call.generation, (*JOB_IDS, *TERMINAL_IDS) if kept_open else JOB_IDS)
        call.emit("backgrounded", {"job_id": live.row.id})
        if owed is not None:
            raise owed
        return CallAnswer(call.id, call.tool_id, live.answer, neutralise_for_model(live.answer))

    def start(self, live: LiveJob, predecessors: Sequence[Call]) -> None:
        if (entry := live.call.entry) is None or not entry.spec.long_running:
            live.call.lane.notifications.expect_from(live.row.id)
        live.task = asyncio.get_running_loop().create_task(self._run(live, predecessors))

    # ── the steps of a job ───────────────────────────────────────────────────────────────────────

    async def _run(self, live: LiveJob, predecessors: Sequence[Call]) -> None:
        live.backgrounded = False
        try:
            answer = await self._carry_out(live.call, predecessors)
            if self._record_end(live, answer):
                # The end must not be lost while the disk is full, so it is stored again until that succeeds.
                while not await self._store_end(live, answer.model):
                    live.ended.set()
                    await asyncio.sleep(self.limits.retry_s)
        finally:
            live.output.close()
            del self.running[live.row.id]
            live.ended.set()
            live.call.lane.notifications.stop_expecting(live.row.id)
        await self._remove_old_sometimes()

    def mark_job_running(self, call: Call) -> None:
        """Mark the job of a call as running, since its tool is about to start."""
        if (live := call.job) is not None and live.row.job.state == "pending":
            live.row = live.row.with_state("running")
            self.table.write_soon(self.table.build_update_unfinished_job_work(live.row))

    def _record_end(self, live: LiveJob, answer: CallAnswer) -> bool:
        """Update the row of a job whose task is done, and return whether the job has ended for good."""
        row, result = live.row, answer.result
        # The process is ending, and not the job. The row stays unfinished for the next process.
        if self.may_rerun_interrupted_job(row, result):
            live.row = row.with_state("pending")
            self.table.write_soon(self.table.build_update_unfinished_job_work(live.row))
            return False
        if live.call.output_stream is None or not live.call.output_stream.truncated:
            live.output.append_piece(format_result_for_output(answer.model))
        live.row = row.with_state(derive_job_end_state(result), self.clock())
        live.output.mark_output_complete()
        return True

    async def _store_end(self, live: LiveJob, model: Result) -> bool:
        """Store the recorded end of a job and notify its session.

        If the process ends first, the next one recovers the end from the log.

        :return: whether nothing is left to do
        """
        try:
            if not live.end_stored:
                await self.table.commit(self.table.end(live.row))
                live.end_stored = True
            return await self.notify_or_defer_job_end(live.call.lane, live.row, model)
        except LogUnavailable:
            with contextlib.suppress(LogUnavailable):  # closed for good, or ended elsewhere?
                known = self.table.get(live.row.id)
                return known is None or known.job.has_ended
            return False

    @staticmethod
    def may_rerun_interrupted_job(row: JobRow, result: Result) -> bool:
        """Return whether a job ended only with its process and may run again."""
        by_its_end = result.metadata.get("stopped_by") == "shutdown" or "awaiting_approval" in result.metadata
        return by_its_end and row.arguments is not None and row.job.attempt < MAX_ATTEMPTS

    async def notify_or_defer_job_end(self, lane: Lane, row: JobRow, model: Result) -> bool:
        """Notify the session of a job's end, or defer that until the session is opened again.

        :return: whether nothing is left to do now
        """
        # A closed session has no agent that could read the notification.
        if lane.closed_reason is not None:
            self.defer_notification(row)
            return True
        try:
            await lane.notifications.post(make_job_end_notification(row, model, self.clock()))
        except HandrailError:
            return False
        self.table.write_soon(self.table.build_mark_notified_work(row.id))
        return True

    def defer_notification(self, row: JobRow) -> None:
        """Leave the notification for the next opening of the session. A sub-agent's session is never opened again."""
        if self.tree is not None and self.tree.is_subagent(row.job.session_id):
            self.table.write_soon(self.table.build_mark_notified_work(row.id))

    async def record_call_end_and_delivery(self, call: Call, records: Sequence[Record]) -> None:
        """Record the outcome of a call whose answer contains notifications, and mark these as delivered, in one transaction.

        :raises LogUnavailable: if that cannot be made durable; the notifications stay pending
        """
        # The notifications count as delivered only if the conversation has the call that delivered them.
        await call.wait_until_proposal_durable()
        await self.table.commit(
            self.log.build_record_insert_work(records),
            self._notices.build_mark_delivered_work(call.session_id, call.delivered_notifications),
        )

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    async def stop(self, live: LiveJob, reason: StopReason) -> None:
        """Stop a job and wait until it has ended, within the grace period."""
        live.call.execution.stop(reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                await live.ended.wait()

    def request_stop_of_jobs(self, reason: StopReason, session_id: str | None = None) -> list[LiveJob]:
        """Ask all jobs, or those of a session, to stop, and return them."""
        found = [live for live in self.running.values() if session_id in (None, live.row.job.session_id)]
        for live in found:
            live.call.execution.stop(reason)
        return found

    async def stop_jobs_and_wait(self, reason: StopReason, session_id: str | None = None) -> None:
        """Stop all jobs, or those of a session, and wait for their end, within a limit."""
        # A call that is moving becomes a job in a moment, and that job must be stopped as well.
        await asyncio.gather(*self._moving.values(), return_exceptions=True)
        waiting: list[asyncio.Task[None]] = []
        for live in self.request_stop_of_jobs(reason, session_id):
            if live.task is not None:
                waiting.append(live.task)
                if live.ended.is_set():  # its end cannot be stored now
                    live.task.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=self._patience_s)

    @property
    def _patience_s(self) -> float:
        return 1 + 3 * self.limits.grace_s

    async def _remove_old_sometimes(self) -> None:
        self._ended += 1
        if self._ended % _RETIRED_EVERY == 0:
            with contextlib.suppress(LogUnavailable):
                await self.remove_old()

    async def remove_old(self) -> None:
        """Remove jobs that ended long ago or exceed the limit, with their outputs. The log keeps their records."""
        if gone := self.table.list_removable(self.clock(), self.limits.retention):
            await self.table.commit(self.table.remove(row.id for row in gone))
            self.outputs.release_bytes_of_outputs(row.output for row in gone)
            await asyncio.to_thread(delete_outputs_and_notes, [row.output for row in gone])

    async def charge_former_outputs_to_quota(self) -> None:
        """Count the outputs that a former process left. Call it at start."""
        rows = [row for row in self.table.list_jobs_by_end_time() if row.output]
        sizes = await asyncio.to_thread(lambda: [measure_disk_usage(row.output) for row in rows])
        for row, size in zip(rows, sizes, strict=True):
            self.outputs.register_former_output(row.output, size, ended=row.job.has_ended)
        self.outputs.remove_outputs_for_space()  # the limit may be lower now

    async def cancel_deferred_job(self, row: JobRow) -> JobRow:
        """Cancel a job that waits for its session to be opened, and return its present row."""
        outcome = await self.log.find_outcome(row.job.call_id)
        if (live := self.running.get(row.id)) is not None:  # its session was opened meanwhile
            await self.stop(live, "user")
            return live.row
        text = f"Job {row.id} was stopped by the user before it was started again."
        result = Result.error("cancelled", text, job_id=row.id, stopped_by="user")
        record = Record("rejected", row.job.session_id, row.job.call_id, {"step": "lock", "result": result.to_dict()})
        row = row if outcome is None else replace(row, given_up=True)
        ended = row.with_state("cancelled" if outcome is None else "interrupted", self.clock())
        await self.table.commit(
            self.table.end(ended), self.log.build_record_insert_work([record] if outcome is None else [])
        )
        self.make_job_output_file(row).mark_output_complete()
        return ended

    async def get_model_visible_result(self, row: JobRow) -> Result:
        """Return the result of an ended job, as the model may see it.

        :raises LogUnavailable: if the log cannot be read
        """
        outcome = await self.log.find_outcome(row.job.call_id)
        # Without an outcome in the log it is unknown whether the job had an effect, so the answer says that.
        if outcome is None or outcome.kind == "interrupted":
            begun = outcome is not None and (outcome.body or {}).get("outcome") != "not-begun"
            handed = () if self.tree is None else self.tree.list_delegated_by_call(row.job.session_id, row.job.call_id)
            return add_subagent_sessions_to_error(make_interrupted_job_result(row, begun=begun), handed)
        if (recorded := parse_recorded_result(outcome)) is None:
            return Result.error(
                "unavailable",
                f"The result of job {row.id} is no longer in the log, or is damaged. Run the call again if you still need it.",
                job_id=row.id,
            )
        if outcome.kind == "rejected":
            return neutralise_for_model(recorded)
        spec = ToolSpec(id=row.job.tool_id, description="-", exposure=row.exposure, prompt_mask=row.prompt_mask)
        return make_audience_results(spec, recorded)[1]


# Recovery of jobs whose process has ended: found at the next start, resumed when their session is opened again.


class JobRecovery:
    """The recovery of one workspace's jobs after a restart.

    :param make: creates a call from an id, a proposal, a lane and a generation
    """

    def __init__(
        self,
        jobs: BackgroundJobManager,
        approvals: ApprovalBroker,
        make: Callable[[str, ProposedCall, Lane, Generation], Call],
    ) -> None:
        self._jobs = jobs
        self._approvals = approvals
        self._make = make

    async def settle_former_jobs(self, interrupted: Iterable[InterruptedCall]) -> None:
        """Settle the jobs and approval requests that a former process left. Call it at start.

        Jobs that may run again do so when their session is opened. Jobs of sub-agents never run again.

        :param interrupted: the calls that had started
        :raises LogUnavailable: if the log cannot be read or takes no records
        """
        await self._approvals.withdraw_interrupted_requests(interrupted)
        for row in self._jobs.table.list_unfinished():
            if (ended := await self._find_logged_end(row)) is not None:
                await self._jobs.table.commit(self._jobs.table.end(ended))
                self._jobs.defer_notification(ended)
            elif row.job.state != "pending":
                self._jobs.table.write_soon(
                    self._jobs.table.build_update_unfinished_job_work(row.with_state("pending"))
                )
        await self._jobs.remove_old()
        await self._jobs.charge_former_outputs_to_quota()

    async def _find_logged_end(self, row: JobRow) -> JobRow | None:
        """Return the end of a job that no process carries, from the log; None if it runs again."""
        outcome = await self._jobs.log.find_outcome(row.job.call_id)
        ended = outcome is not None and outcome.kind != "interrupted"
        result = None if outcome is None or not ended else parse_recorded_result(outcome)
        # The agent that delegated the work has ended, so no session would receive the result of another run.
        below = self._jobs.tree is not None and self._jobs.tree.is_subagent(row.job.session_id)
        if result is not None and (below or not self._jobs.may_rerun_interrupted_job(row, result)):
            return row.with_state(derive_job_end_state(result), self._jobs.clock())
        oldest = self._jobs.clock() - self._jobs.limits.retention.age_ns
        again = (
            not below and row.arguments is not None and row.job.attempt < MAX_ATTEMPTS and row.job.created_ns > oldest
        )
        if again and (result is not None or not ended):
            return None
        return await self._record_interruption(row, outcome)

    async def _record_interruption(self, row: JobRow, outcome: LoggedRecord | None) -> JobRow:
        """Record that a job did not end and does not run again."""
        if outcome is None:
            body = {"tool": row.job.tool_id, "job_id": row.id, "outcome": "not-begun", "reason": NOT_STARTED_TEXT}
            await self._jobs.log.commit([Record("interrupted", row.job.session_id, row.job.call_id, body)])
        return row.with_state("interrupted", self._jobs.clock())

    async def resume_session(self, lane: Lane) -> None:
        """Resume the jobs of a session that was opened, and notify it of those that ended meanwhile.

        :raises LogUnavailable: if the database cannot be read
        """
        rows = self._jobs.table.list_jobs_without_end_notification(lane.session_id)
        for row in rows:
            if (live := self._jobs.running.get(row.id)) is not None:
                self._move_to_session(live, lane)
        for known in [row for row in rows if row.id not in self._jobs.running]:
            row = self._jobs.table.get(known.id)  # it may have ended during this loop
            if row is None or row.notified or row.id in self._jobs.running:
                continue
            if not row.job.has_ended:
                if (ended := await self._find_logged_end(row)) is None:
                    await self._run_again(row, lane)
                    continue
                await self._jobs.table.commit(self._jobs.table.end(ended))
                self._jobs.make_job_output_file(ended).mark_output_complete()
                row = ended
            await self._jobs.notify_or_defer_job_end(lane, row, await self._jobs.get_model_visible_result(row))

    @staticmethod
    def _move_to_session(live: LiveJob, lane: Lane) -> None:
        call, before = live.call, live.call.lane
        # The programs of the job run in the terminals of the former lane.
        lane.environment.terminals = before.environment.terminals
        lane.delegating_calls = before.delegating_calls
        live.subagent_runner = live.subagent_runner or before.subagent_runner
        call.lane, call.listeners = lane, lane.listeners
        if not live.ended.is_set():
            lane.running_calls[call.id] = call
        lane.notifications.expect_from(live.row.id)

    async def _run_again(self, row: JobRow, lane: Lane) -> None:
        """Run a job again as a recorded attempt, with all nine steps and the present rules."""
        assert row.arguments is not None
        generation = lane.current_generation()
        proposed = ProposedCall(row.job.tool_id, row.arguments)
        entry = generation.resolve_tool_name(row.job.tool_id)
        # The arguments were valid for the old definition. The new one could do something else with them.
        if entry is None or entry.definition_hash != row.definition:
            fault = (
                f"The definition of `{row.job.tool_id}` has changed since job {row.id} started. Make the call again."
            )
            proposed = ProposedCall(row.job.tool_id, row.arguments, problem=fault, problem_kind="conflict")
        row = row.with_state("pending", attempt=row.job.attempt + 1)
        call = self._make(row.job.call_id, proposed, lane, generation)
        live = LiveJob(row, call, self._jobs.make_job_output_file(row), Result.output(None), ())
        call.job = live
        self._jobs.running[row.id] = live  # first: a stop from here on applies to this attempt
        try:
            await self._jobs.table.commit(self._jobs.table.build_update_unfinished_job_work(row))
            known = self._jobs.table.get(row.id)
        except BaseException:
            self._remove_unstarted_job(live)
            raise
        if known is None or known.job.has_ended:  # it was stopped before
            self._remove_unstarted_job(live)
            if known is not None:
                await self._jobs.notify_or_defer_job_end(lane, known, await self._jobs.get_model_visible_result(known))
            return
        live.output.append_piece(f"[the process ended; attempt {row.job.attempt}]\n")
        lane.running_calls[call.id] = call
        self._jobs.start(live, ())

    def _remove_unstarted_job(self, live: LiveJob) -> None:
        """Remove a job that does not start after all."""
        del self._jobs.running[live.row.id]
        live.ended.set()
