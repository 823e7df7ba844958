"""Views of jobs, for one session or the whole workspace: list, read, wait, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from handrail.arbiter.call_state import Call, Lane, LiveJob
from handrail.arbiter.jobs import output_stream
from handrail.arbiter.jobs.background_jobs import (
    BackgroundJobManager,
    format_arguments_on_one_line,
    make_job_notification_id,
)
from handrail.arbiter.output.shaper import OutputShaper
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.services.job_and_tool_services import BackgroundableCall, Job, JobOutputChunk
from handrail.contract.session_protocols import StopReason
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.spec import JobArgumentSpec
from handrail.store.tables.job_tables import JobRow

_MOST_NAMED = 10


class JobView:
    """Jobs of one session or of the workspace (:class:`~handrail.contract.services.job_and_tool_services.JobService`).

    :param session_id: the session whose jobs it shows; None for all
    """

    _stopped_by: StopReason = "user"

    def __init__(self, jobs: BackgroundJobManager, session_id: str | None = None) -> None:
        self._jobs = jobs
        self._session_id = session_id

    def check_named_job_exists(self, of_job: JobArgumentSpec, job_id: str) -> None:
        """Check the job that a call names.

        :raises ToolError: ``invalid_input`` if it is not a job of the session and of the tool; ``conflict`` if it has ended and the
            call needs a running one
        """
        job = self._row_after_pending_writes(self._find_row(job_id)).job
        if of_job.tool_id not in (None, job.tool_id):
            text = f"Job `{job.id}` belongs to tool `{job.tool_id}`, not to `{of_job.tool_id}`. Use read_job and stop_task."
            raise ToolError(text, kind="invalid_input")
        if of_job.running and job.has_ended:
            text = (
                f"Job `{job.id}` has ended ({job.state}). Use read_job for its output or wait for its result, or start another "
                f"one with `{of_job.tool_id}`."
            )
            raise ToolError(text, kind="conflict")

    async def list(self) -> Sequence[Job]:
        table, session_id = self._jobs.table, self._session_id
        rows = table.list_newest() if session_id is None else table.list_for_session(session_id)
        rows = [self._row_after_pending_writes(row) for row in rows]
        return await asyncio.to_thread(lambda: [self._to_job(row) for row in rows])

    async def get(self, job_id: str) -> Job:
        return self._to_job(self._row_after_pending_writes(self._find_row(job_id)))

    async def read_output_bytes(self, job_id: str, *, cursor: int = 0, max_bytes: int = 65_536) -> JobOutputChunk:
        row = self._find_row(job_id)
        return await asyncio.to_thread(
            output_stream.read_output_from_cursor,
            row.output,
            cursor,
            max_bytes,
            grows=not self._row_after_pending_writes(row).job.has_ended,
        )

    async def read_line_range(self, job_id: str, *, offset: int = 0, count: int = 200) -> JobOutputChunk:
        row = self._find_row(job_id)
        grows = not self._row_after_pending_writes(row).job.has_ended
        return await asyncio.to_thread(output_stream.read_output_lines, row.output, offset, count, grows=grows)

    async def wait(self, job_id: str, *, timeout_ms: int) -> Result | None:
        row = self._find_row(job_id)
        if (live := self._jobs.running.get(job_id)) is not None:
            try:
                async with asyncio.timeout(max(timeout_ms, 0) / 1000):
                    await live.ended.wait()
            except TimeoutError:
                return None
            row = live.row
        return await self._jobs.get_model_visible_result(row) if row.job.has_ended else None

    async def stop(self, job_id: str) -> Job:
        row = self._find_row(job_id)
        if (live := self._jobs.running.get(job_id)) is not None:
            await self._jobs.stop(live, self._stopped_by)
            row = live.row
        elif not row.job.has_ended:
            row = await self._jobs.cancel_deferred_job(row)
        return self._to_job(row)

    def _find_row(self, job_id: str) -> JobRow:
        live = self._jobs.running.get(job_id)
        row = self._jobs.table.get(job_id) if live is None else live.row
        if row is not None and self._session_id in (None, row.job.session_id):
            return row
        raise ToolError(
            f"Job `{escape_terminal_controls(job_id[:80])}` does not exist. {self._describe_jobs()}",
            kind="invalid_input",
        )

    def _describe_jobs(self) -> str:
        whose = "This workspace" if self._session_id is None else "This session"
        table = self._jobs.table
        rows = (
            table.list_newest(limit=_MOST_NAMED)
            if self._session_id is None
            else table.list_for_session(self._session_id)
        )
        named = ", ".join(row.id for row in rows[-_MOST_NAMED:])
        return f"{whose} has the jobs {named}." if named else f"{whose} has no jobs."

    def _row_after_pending_writes(self, row: JobRow) -> JobRow:
        """Return the present row, since the latest write may not be durable yet."""
        live: LiveJob | None = self._jobs.running.get(row.id)
        return row if live is None else live.row

    def _to_job(self, row: JobRow) -> Job:
        try:
            size = Path(row.output).stat().st_size if row.output else 0
        except (OSError, ValueError):
            size = 0
        return replace(
            row.job, output_bytes=size, is_suspended=not row.job.has_ended and row.id not in self._jobs.running
        )


class WorkspaceJobView(JobView):
    """The jobs of the whole workspace (:class:`~handrail.contract.services.job_and_tool_services.WorkspaceJobService`).

    :param lanes: returns the lanes of all open sessions
    :param shaper: redacts the arguments of calls
    """

    def __init__(self, jobs: BackgroundJobManager, lanes: Callable[[], Iterable[Lane]], shaper: OutputShaper) -> None:
        super().__init__(jobs)
        self._lanes = lanes
        self._shaper = shaper

    async def list_running_calls(self) -> Sequence[BackgroundableCall]:
        return [
            BackgroundableCall(call.id, call.session_id, call.tool_id, self._summarize_call(call), int(call.elapsed_ms))
            for lane in self._lanes()
            for call in lane.awaited_calls
            if call.parent is None and call.started and call.entry is not None and call.entry.spec.promotable
        ]

    async def move_to_background(self, call_id: str) -> Job:
        for lane in self._lanes():
            if call_id in lane.running_calls:
                return await self._jobs.move_to_background(lane, call_id)
        there = ", ".join(call.call_id for call in (await self.list_running_calls())[:_MOST_NAMED])
        text = f"Call `{escape_terminal_controls(call_id[:80])}` is not running. "
        text += (
            f"Calls that can move to the background: {there}." if there else "No call can move to the background now."
        )
        raise ToolError(text, kind="invalid_input")

    def _summarize_call(self, call: Call) -> str:
        return (
            format_arguments_on_one_line(self._shaper.redact_to_json(call.arguments), call.entry.spec)
            if call.entry is not None
            else ""
        )


class SessionJobView(JobView):
    """The jobs of one session, as a call of that session sees them.

    If the call reports the end of a job, the notification of that end counts as delivered once the call is recorded as successful.
    """

    _stopped_by = "call"

    def __init__(self, jobs: BackgroundJobManager, call: Call) -> None:
        super().__init__(jobs, call.session_id)
        self._call = call

    async def wait(self, job_id: str, *, timeout_ms: int) -> Result | None:
        if (result := await super().wait(job_id, timeout_ms=timeout_ms)) is not None:
            self._mark_notified(job_id)
        return result

    async def stop(self, job_id: str) -> Job:
        job = await super().stop(job_id)
        if job.has_ended:
            self._mark_notified(job_id)
        return job

    def _mark_notified(self, job_id: str) -> None:
        call = self._call
        while call.parent is not None:
            call = call.parent
        if (known := make_job_notification_id(job_id)) not in call.delivered_notifications:
            call.delivered_notifications = (*call.delivered_notifications, known)
