"""Rows of jobs: states with one end each, and tables of bounded size."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from handrail.contract.errors import LogUnavailable
from handrail.contract.services.job_and_tool_services import FINAL_JOB_STATES, Job, JobState
from handrail.store.tables.job_tables import JobRetention, JobRow, JobTable
from handrail.store.workspace_store import WorkspaceStore

ENDS = sorted(FINAL_JOB_STATES)


def row(number: int, state: JobState = "pending", session: str = "ses") -> JobRow:
    return JobRow(Job(f"bash_{number:08x}", "bash", f"{session}/{number}.0", session, state, number))


class JobStateMachine(RuleBasedStateMachine):
    """Any order of transitions by any process, and the invariants."""

    loop: asyncio.AbstractEventLoop
    store: WorkspaceStore

    @initialize(folder=st.builds(Path, st.just("/nowhere")))
    def begin(self, folder: Path) -> None:
        table = JobTable(self.store.database)
        self.table = table
        self.expected: dict[str, JobRow] = {}
        self.made = _made[0]

    def _commit(self, *works: Any) -> None:
        self.loop.run_until_complete(self.table.commit(*works))

    @rule(state=st.sampled_from(["pending", "running"]))
    def add(self, state: JobState) -> None:
        _made[0] += 1
        new = row(_made[0], state)
        self._commit(self.table.add(new))
        self.expected[new.id] = new

    @rule(which=st.integers(0, 50), to=st.sampled_from(["pending", "running"]), attempt=st.integers(1, 3))
    def move(self, which: int, to: JobState, attempt: int) -> None:
        if not self.expected:
            return
        before = self.expected[sorted(self.expected)[which % len(self.expected)]]
        moved = before.with_state(to, attempt=attempt)
        self._commit(self.table.build_update_unfinished_job_work(moved))
        if not before.job.has_ended:
            self.expected[before.id] = moved

    @rule(which=st.integers(0, 50), to=st.sampled_from(ENDS), at=st.integers(1, 100))
    def end(self, which: int, to: JobState, at: int) -> None:
        if not self.expected:
            return
        before = self.expected[sorted(self.expected)[which % len(self.expected)]]
        if before.job.has_ended:
            with pytest.raises(LogUnavailable):
                self._commit(self.table.end(before.with_state(to, at)))
        else:
            ended = before.with_state(to, at)
            self._commit(self.table.end(ended))
            self.expected[before.id] = ended

    @rule(which=st.integers(0, 50))
    def remove(self, which: int) -> None:
        if not self.expected:
            return
        job_id = sorted(self.expected)[which % len(self.expected)]
        self._commit(self.table.remove([job_id]))
        if self.expected[job_id].job.has_ended:
            del self.expected[job_id]

    @invariant()
    def what_is_kept_is_what_was_done(self) -> None:
        if hasattr(self, "expected"):
            kept = {one.id: one for one in self.table.list_newest() if one.job.created_ns > self.made}
            assert kept == self.expected
            still = {one.id for one in self.table.list_unfinished() if one.job.created_ns > self.made}
            assert still == {one.id for one in self.expected.values() if not one.job.has_ended}


_made = [0]


@pytest.mark.proves("X-06")
def test_a_job_has_exactly_one_end_under_any_sequence_of_operations(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    JobStateMachine.loop = asyncio.new_event_loop()
    JobStateMachine.store = WorkspaceStore.open(tmp_path / "ws", tmp_path / "state")
    try:
        case: Any = JobStateMachine.TestCase  # pyright: ignore[reportUnknownMemberType]
        case.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
        case().runTest()
    finally:
        JobStateMachine.loop.run_until_complete(JobStateMachine.store.aclose())
        JobStateMachine.loop.close()


async def test_ended_jobs_are_removed_by_number_and_age(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    store = WorkspaceStore.open(tmp_path / "ws", tmp_path / "state")
    table = store.jobs
    rows = [row(number) for number in range(1, 9)]
    await table.commit(*(table.add(one) for one in rows))
    await table.commit(*(table.end(one.with_state("done", one.job.created_ns * 10)) for one in rows[:6]))
    keep = JobRetention(max_jobs=0, age_ns=1_000, min_age_ns=0)
    assert table.list_removable(100, keep) == [], "of what nobody was told nothing goes to make room"
    await table.commit(*(table.build_mark_notified_work(one.id) for one in rows[:6]))
    keep = JobRetention(max_jobs=3, age_ns=1_000, min_age_ns=0)
    assert [one.id for one in table.list_removable(100, keep)] == [one.id for one in rows[:3]], "the newest three stay"
    young = JobRetention(max_jobs=3, age_ns=1_000, min_age_ns=75)
    assert [one.id for one in table.list_removable(100, young)] == [one.id for one in rows[:2]], (
        "nor one that is too young"
    )
    assert {one.id for one in table.list_removable(1_045, keep)} == {one.id for one in rows[:4]}, (
        "and none that is too old"
    )
    await table.commit(table.remove(one.id for one in rows))
    assert [one.id for one in table.list_newest()] == [one.id for one in rows[6:]], (
        "what has not ended is never removed"
    )
    await store.aclose()


async def test_a_stored_job_is_read_unchanged_and_an_unknown_id_returns_none(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    store = WorkspaceStore.open(tmp_path / "ws", tmp_path / "state")
    await store.jobs.commit(store.jobs.add(row(1)))
    assert get_args(JobState) and store.jobs.get("bash_00000001") == row(1)
    assert store.jobs.get("bäsh") is None
    await store.aclose()
