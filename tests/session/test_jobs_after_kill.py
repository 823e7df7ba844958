"""kill -9 at each step of a job: only a recorded new attempt runs again, and the session is notified."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.session.crashing import die_by_itself, records_of

from handrail import Kernel, Session, tool
from handrail.contract.errors import LogUnavailable
from handrail.contract.tool.tool_protocol import Tool
from handrail.record.log_reader import LoggedRecord
from handrail.record.verification import verify_log
from handrail.store.tables.job_tables import JobRetention
from handrail.testing.scripted_kernel import temporary_kernel

EACH_STEP = """
import asyncio, os, sqlite3, sys
from handrail import ApprovalAnswer
from pathlib import Path
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel
from tests.session.test_jobs_after_kill import RULES, job_tools

folder = Path(sys.argv[1])
held = None

def executed():
    "From now on nothing can be recorded."
    global held
    held = sqlite3.connect(next((folder / "state").rglob("handrail.db")), isolation_level=None)
    held.execute("BEGIN IMMEDIATE")

async def until(condition):
    while not condition():
        await asyncio.sleep(0)

async def main():
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    tools = job_tools(folder / "effects", executed)
    async with temporary_kernel(folder, tools=tools, rules=RULES) as kernel:
        session = await kernel.session("ses_jobs", approval_handler=person)
        begun, waiting = set(), set()
        def watch(event):
            if event.kind == "started": begun.add(event.call_id)
            if event.kind == "awaiting-locks": waiting.add(event.call_id)
        session.watch_events(watch)
        async def start(tool, name, where=begun):
            result = await session.call(tool, {"name": name})
            assert result.ok, result
            call_id = f"ses_jobs/{session.last_turn}.0"
            await until(lambda: call_id in where)
            return result.data["job_id"]
        ended = await start("again", "ended")
        await session.jobs.wait(ended, timeout_ms=60000)
        await start("once", "running-hold")
        await start("again", "running-again-hold")
        await start("again", "granted-hold")
        await start("again", "given-up-hold")
        await start("locked", "queued", waiting)
        await start("locked_again", "queued-again", waiting)
        direct = asyncio.ensure_future(session.call("direct", {"name": "promoted-hold"}))
        promoted = lambda: f"ses_jobs/{session.last_turn}.0"
        await until(lambda: promoted() in begun)
        await session.move_to_background(promoted())
        assert (await direct).ok
        await kernel.log.flush()
        asyncio.ensure_future(session.call("again", {"name": "executed-last"}))
        await until(lambda: held is not None)
        DIE

asyncio.run(main())
"""
RULES = ["allow *", "ask again name=granted-hold"]


def job_tools(effects: Path, executed: object = None, *, hold: bool = True) -> list[Tool]:
    """Tools that leave each run in a file; those named so do not end, or lock the database when they have run."""
    descriptor = os.open(effects, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    async def ran(name: str) -> str:
        os.write(descriptor, f"{name}\n".encode())
        if name.endswith("-hold") and hold:
            await asyncio.Event().wait()
        if name.endswith("-last") and callable(executed):
            executed()
        return name

    @tool(id="once", side_effect="external", mode="background", locks=[], locks_background=["shelf:X"])
    async def once(name: str) -> str:
        """Run once."""
        return await ran(name)

    @tool(id="again", side_effect="external", mode="background", locks=[], idempotent=True)
    async def again(name: str) -> str:
        """Run as often as needed."""
        return await ran(name)

    @tool(id="locked", side_effect="external", mode="background", locks=[], locks_background=["shelf:X"])
    async def locked(name: str) -> str:
        """Wait for a lock."""
        return await ran(name)

    @tool(
        id="locked_again",
        side_effect="external",
        mode="background",
        locks=[],
        locks_background=["shelf:X"],
        idempotent=True,
    )
    async def locked_again(name: str) -> str:
        """Wait for a lock, as often as needed."""
        return await ran(name)

    @tool(id="direct", side_effect="external", locks=["desk:X"], promotable=True)
    async def direct(name: str) -> str:
        """Begin in the turn."""
        return await ran(name)

    return [once, again, locked, locked_again, direct]


async def states(jobs: Iterable[object]) -> dict[str, tuple[str, int]]:
    return {str(getattr(job, "summary")): (getattr(job, "state"), getattr(job, "attempt")) for job in jobs}  # noqa: B009


@pytest.mark.proves("X-06", "G-05")
async def test_jobs_are_recovered_after_a_kill_at_each_step(tmp_path: Path) -> None:
    die_by_itself(tmp_path, EACH_STEP)
    before = ["ended", "running-hold", "running-again-hold", "granted-hold", "given-up-hold", "promoted-hold"]
    before.append("executed-last")
    effects = tmp_path / "effects"
    assert sorted(effects.read_text().split()) == sorted(before)
    async with temporary_kernel(tmp_path, tools=job_tools(effects, hold=False), rules=["allow *"]) as kernel:
        assert verify_log(kernel.log.reader).ok
        lost = {"running-hold", "granted-hold", "promoted-hold", "queued"}
        found = await states(await kernel.jobs.list())
        assert found.pop("ended") == ("done", 1)
        assert {about for about, state in found.items() if state == ("interrupted", 1)} == lost
        assert {about for about, state in found.items() if state == ("pending", 1)} == set(found) - lost
        assert sorted(effects.read_text().split()) == sorted(before), "nothing runs before its session is opened"
        (given_up,) = [job for job in await kernel.jobs.list() if job.summary == "given-up-hold"]
        assert (await kernel.jobs.stop(given_up.id)).state == "interrupted"
        result = await kernel.jobs.wait(given_up.id, timeout_ms=0)
        assert result is not None and result.metadata["stopped_by"] == "user"
        assert "The user stopped a further attempt" in str(result.error_text)
        lost.add("given-up-hold")
        session = await kernel.session("ses_jobs")
        jobs = {job.summary: job for job in await session.jobs.list()}
        for about, job in jobs.items():
            result = await session.jobs.wait(job.id, timeout_ms=60_000)
            assert result is not None
            if about in lost:
                assert result.error_kind == "interrupted"
                assert ("had no effect" in str(result.error_text)) == (about == "queued")
            else:
                assert result.data == about
        assert await states(await session.jobs.list()) == {
            "ended": ("done", 1),
            **dict.fromkeys(lost, ("interrupted", 1)),
            **dict.fromkeys(("running-again-hold", "queued-again", "executed-last"), ("done", 2)),
        }
        again = ["running-again-hold", "queued-again", "executed-last"]
        assert sorted(effects.read_text().split()) == sorted([*before, *again]), "what may not, never ran again"
        assert await list_notice_sources(session) == sorted(job.id for job in jobs.values()), "of each once"
        records = {jobs[about].call_id: about for about in again}
    for call_id, about in records.items():
        kinds = [kind for kind, _ in records_of(tmp_path)[call_id]]
        assert kinds.count("resumed") == 1 and kinds[-1] == "committed", about
    async with temporary_kernel(tmp_path, tools=job_tools(effects, hold=False), rules=["allow *"]) as kernel:
        session = await kernel.session("ses_jobs")
        assert await list_notice_sources(session) == sorted(job.id for job in jobs.values()), "and not again"
        assert len(effects.read_text().split()) == len(before) + len(again)


async def list_notice_sources(session: Session) -> list[str]:
    notices = session.notifications
    assert notices is not None
    return sorted(notice.source for notice in await notices.list_pending())


@pytest.mark.proves("X-06")
async def test_a_restarted_kernel_runs_repeatable_jobs_again_and_reports_the_others_as_cancelled(
    tmp_path: Path,
) -> None:
    effects = tmp_path / "effects"

    async def opened(kernel: Kernel) -> Session:
        return await kernel.session("ses_jobs")

    async with temporary_kernel(tmp_path, tools=job_tools(effects), rules=["allow *"]) as kernel:
        session = await opened(kernel)
        for name in ("once", "again"):
            assert (await session.call(name, {"name": f"{name}-hold"})).ok
        while len(effects.read_text().split()) < 2:
            await asyncio.sleep(0)
    async with temporary_kernel(tmp_path, tools=job_tools(effects, hold=False), rules=["allow *"]) as kernel:
        assert await states(await kernel.jobs.list()) == {"once-hold": ("cancelled", 1), "again-hold": ("pending", 1)}
        session = await opened(kernel)
        for job in await session.jobs.list():
            await session.jobs.wait(job.id, timeout_ms=60_000)
        assert await states(await session.jobs.list()) == {"once-hold": ("cancelled", 1), "again-hold": ("done", 2)}
        assert len(await list_notice_sources(session)) == 2
    assert sorted(effects.read_text().split()) == ["again-hold", "again-hold", "once-hold"]


@pytest.mark.proves("X-06")
@pytest.mark.parametrize("first", ["stop", "open"])
async def test_a_job_stopped_while_its_session_opens_ends_exactly_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    effects = tmp_path / "effects"
    async with temporary_kernel(tmp_path, tools=job_tools(effects), rules=["allow *"]) as kernel:
        session = await kernel.session("ses_jobs")
        assert (await session.call("again", {"name": "again-hold"})).ok
        while not effects.read_text():
            await asyncio.sleep(0)
    async with temporary_kernel(tmp_path, tools=job_tools(effects), rules=["allow *"]) as kernel:
        (job,) = await kernel.jobs.list()
        arbiter, reached, may_go_on = kernel.components.arbiter, asyncio.Event(), asyncio.Event()
        outcome_of = arbiter.log.find_outcome

        async def slow(call_id: str) -> LoggedRecord | None:
            found = await outcome_of(call_id)
            if not reached.is_set():
                reached.set()
                await may_go_on.wait()
            return found

        monkeypatch.setattr(arbiter.log, "find_outcome", slow)
        if first == "stop":
            stopping = asyncio.ensure_future(kernel.jobs.stop(job.id))
            await reached.wait()
            session = await kernel.session("ses_jobs")
            may_go_on.set()
            stopped = await stopping
        else:
            opening = asyncio.ensure_future(kernel.session("ses_jobs"))
            await reached.wait()
            stopped = await kernel.jobs.stop(job.id)
            may_go_on.set()
            session = await opening
        assert stopped.has_ended and not arbiter.jobs.running, "and nothing of it runs"
        await kernel.log.flush()
        assert (await kernel.jobs.get(job.id)).state == stopped.state
        assert await list_notice_sources(session) == [job.id]
        assert len(effects.read_text().split()) <= 2


async def test_a_job_survives_a_suspended_session_and_ends_when_the_session_closes(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with temporary_kernel(tmp_path, tools=job_tools(effects), rules=["allow *"]) as kernel:
        session = await kernel.session("ses_jobs")
        job_id = (await session.call("once", {"name": "a-hold"})).data["job_id"]
        await session.suspend()
        assert not (await kernel.jobs.get(job_id)).has_ended
        session = await kernel.session("ses_jobs")
        assert [job.id for job in await session.jobs.list()] == [job_id]
        await session.close()
        assert await kernel.jobs.list() == []


@pytest.mark.proves("X-06")
async def test_a_suspended_session_is_notified_of_its_job_however_many_other_jobs_have_ended(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with temporary_kernel(tmp_path, tools=job_tools(effects), rules=["allow *"]) as kernel:
        arbiter = kernel.components.arbiter
        arbiter.jobs.limits = replace(arbiter.jobs.limits, retention=JobRetention(max_jobs=2, min_age_ns=0))
        session, other = await kernel.session("ses_jobs"), await kernel.session("ses_other")
        job_id = (await session.call("once", {"name": "a-hold"})).data["job_id"]
        await session.suspend()
        await kernel.jobs.stop(job_id)
        for name in "bcd":
            ended = (await other.call("again", {"name": name})).data["job_id"]
            await other.jobs.wait(ended, timeout_ms=30_000)
        await kernel.log.flush()
        await arbiter.jobs.remove_old()
        assert len(await other.jobs.list()) == 2, "those it was told of make room"
        session = await kernel.session("ses_jobs")
        assert await list_notice_sources(session) == [job_id]
        await kernel.log.flush()
        await arbiter.jobs.remove_old()
        assert not await session.jobs.list()


@pytest.mark.proves("X-06")
@pytest.mark.parametrize("what", ["end", "notice"])
async def test_the_end_of_a_job_that_cannot_be_stored_is_stored_and_reported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    failed, full = asyncio.Event(), True

    def while_full(keep: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def kept(*given: Any) -> None:
            if full:
                failed.set()
                raise LogUnavailable("the disk is full")
            await keep(*given)

        return kept

    async with temporary_kernel(tmp_path, tools=job_tools(tmp_path / "effects"), rules=["allow *"]) as kernel:
        session, jobs = await kernel.session("ses_jobs"), kernel.components.arbiter.jobs
        jobs.limits = replace(jobs.limits, retry_s=0.0)
        job_id = (await session.call("once", {"name": "a-hold"})).data["job_id"]
        owner, name = (
            (jobs.table, "commit") if what == "end" else (kernel.inbound_services.notifications, "store_notification")
        )
        monkeypatch.setattr(owner, name, while_full(getattr(owner, name)))
        assert (await session.jobs.stop(job_id)).state == "cancelled"
        await failed.wait()
        assert (await session.jobs.get(job_id)).state == "cancelled" and not (
            await session.jobs.get(job_id)
        ).is_suspended
        result = await session.jobs.wait(job_id, timeout_ms=30_000)
        assert result is not None and result.error_kind == "cancelled" and await list_notice_sources(session) == []
        full = False
        assert session.notifications is not None and await session.notifications.wait_for_next()
        assert await list_notice_sources(session) == [job_id]
        while jobs.running:
            await asyncio.sleep(0)
        assert (await session.jobs.get(job_id)).state == "cancelled"
        full = True
        kept = (await session.call("once", {"name": "b-hold"})) if what == "notice" else None
    assert kept is None or kept.ok, "and a kernel that ends does not wait for room"


async def test_a_job_row_without_the_recorded_end_is_repaired_from_the_log(tmp_path: Path) -> None:
    """As a process leaves it that was killed, or whose disk was full, just between the two."""
    effects = tmp_path / "effects"

    async def ended() -> tuple[str, str]:
        async with temporary_kernel(tmp_path, tools=job_tools(effects), rules=["allow *"]) as kernel:
            session = await kernel.session("ses_jobs")
            job_id = (await session.call("again", {"name": "a"})).data["job_id"]
            await session.jobs.wait(job_id, timeout_ms=60_000)
            return job_id, (await session.jobs.get(job_id)).state

    def forget(job_id: str) -> None:
        (database,) = (tmp_path / "state").rglob("handrail.db")
        with closing(sqlite3.connect(database)) as connection:
            sql = "UPDATE job SET state = 'running', ended_ns = NULL, notified = 0 WHERE id = ?"
            connection.execute(sql, (job_id,))
            connection.commit()

    job_id, state = await ended()
    assert state == "done"
    forget(job_id)
    async with temporary_kernel(tmp_path, tools=job_tools(effects), rules=["allow *"]) as kernel:
        assert (await kernel.jobs.get(job_id)).state == "done"
        forget(job_id)
        session = await kernel.session("ses_jobs")
        assert (await session.jobs.get(job_id)).state == "done", "also while the kernel lives"
        assert await list_notice_sources(session) == [job_id]
    assert effects.read_text().split() == ["a"], "it never ran again"
