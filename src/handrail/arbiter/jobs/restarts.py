"""Recovering jobs whose process has ended: found at the next start, resumed when their session is opened again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from handrail.arbiter.approvals.desk import Approvals
from handrail.arbiter.calls.call import Call, Lane, LiveJob
from handrail.arbiter.calls.repeats import recorded_result
from handrail.arbiter.jobs.jobs import DetachedCalls
from handrail.arbiter.jobs.texts import MOST_ATTEMPTS, NOT_BEGUN, state_of
from handrail.contract.call import ProposedCall
from handrail.contract.generation import Generation
from handrail.contract.result import Result
from handrail.record.log import Interrupted, Record
from handrail.record.reading import LoggedRecord
from handrail.store.tables.jobs import JobRow


class Restarts:
    """For one workspace.

    :param make: a call at the start of its way, by id, proposal, lane and generation
    """

    def __init__(
        self, jobs: DetachedCalls, approvals: Approvals, make: Callable[[str, ProposedCall, Lane, Generation], Call]
    ) -> None:
        self._jobs = jobs
        self._approvals = approvals
        self._make = make

    async def recover(self, interrupted: Iterable[Interrupted]) -> None:
        """At start, when the log has been recovered: what became of those that a former process left, and of what it asked.
        Those that may be run again are, once their session is opened; a sub-agent's never is.

        :param interrupted: the calls that had begun
        :raises LogUnavailable: when the log cannot tell, or cannot take the records
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
        """How a job that nobody carries has ended, by what is on record; None where it is to be run again."""
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
        """It did not end and is not run again: that is on record, too."""
        if outcome is None:
            body = {"tool": row.job.tool_id, "job": row.id, "outcome": "not-begun", "reason": NOT_BEGUN}
            await self._jobs.log.commit([Record("interrupted", row.job.session_id, row.job.call_id, body)])
        return row.moved("interrupted", self._jobs.clock())

    async def take_up(self, lane: Lane) -> None:
        """A session was opened: its jobs are its own again, those that are to be run again are, and it is told of those that
        ended without its knowing.

        :raises LogUnavailable: when the database cannot tell
        """
        rows = self._jobs.table.waiting(lane.session_id)
        for row in rows:
            if (live := self._jobs.live.get(row.id)) is not None:
                self._adopt(live, lane)
        for known in [row for row in rows if row.id not in self._jobs.live]:
            row = self._jobs.table.get(known.id)  # it may have ended while others were seen to
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
        call.delegates = call.delegates or before.delegates
        call.lane, call.watched = lane, lane.listeners
        if not live.ended.is_set():
            lane.running[call.id] = call
        if lane.notices is not None:
            lane.notices.expect(live.row.id)

    async def _again(self, row: JobRow, lane: Lane) -> None:
        """Run it again, as another attempt that is recorded: all nine steps, by the rules of now."""
        assert row.arguments is not None and lane.current is not None
        generation = lane.current()
        proposed = ProposedCall(row.job.tool_id, row.arguments)
        entry = generation.resolve(row.job.tool_id)
        if entry is None or entry.definition_hash != row.definition:
            fault = f"{row.job.tool_id} is no longer defined as it was when the job {row.id} began; call it anew"
            proposed = ProposedCall(row.job.tool_id, row.arguments, fault=fault, fault_kind="conflict")
        row = row.moved("pending", attempt=row.job.attempt + 1)
        call = self._make(row.job.call_id, proposed, lane, generation)
        call.resumed = True
        live = LiveJob(row, call, self._jobs.output(row), Result.output(None), ())
        call.job = live
        self._jobs.live[row.id] = live  # first: whoever stops it from here on stops this attempt
        try:
            await self._jobs.table.commit(self._jobs.table.move(row))
            known = self._jobs.table.get(row.id)
        except BaseException:
            self._let_go(live)
            raise
        if known is None or known.job.ended:  # somebody has stopped it before
            self._let_go(live)
            if known is not None:
                await self._jobs.tell(lane, known, await self._jobs.result_of(known))
            return
        live.output.write(f"[the process ended; attempt {row.job.attempt}]\n")
        lane.running[call.id] = call
        self._jobs.start(live, ())

    def _let_go(self, live: LiveJob) -> None:
        """It does not begin after all."""
        del self._jobs.live[live.row.id]
        live.ended.set()
