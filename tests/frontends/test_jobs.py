"""``handrail jobs``: the background jobs of a workspace, from any terminal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.frontends.conftest import Here, Program
from tests.kernel.test_agents import confined

from handrail import Runtime, open_kernel, tool


@tool(id="late", side_effect="external", mode="background", locks=[])
async def late(name: str, runtime: Runtime) -> str:
    """Take long."""
    runtime.write_output(f"began {name}\nand waits\n")
    await asyncio.Event().wait()
    return name


@pytest.mark.proves("X-05")
async def test_a_second_process_lists_reads_and_stops_jobs_of_the_first(handrail: Program, tmp_path: Path) -> None:
    async with open_kernel(handrail.workspace, state=handrail.state, tools=[late], rules=["allow late"]) as kernel:
        session = await kernel.session()
        job_id = (await session.call("late", {"name": "a"})).data["job_id"]
        while not (await session.jobs.get(job_id)).output_bytes:
            await asyncio.sleep(0)
        listed = await asyncio.to_thread(handrail, "jobs", "--json")
        assert [(job["id"], job["state"], job["summary"]) for job in map(json.loads, listed.out.splitlines())] == [
            (job_id, "running", "a")
        ]
        read = await asyncio.to_thread(handrail, "jobs", "read", job_id, "--lines", "1")
        assert (read.code, read.out) == (0, "and waits\n")
        waited = await asyncio.to_thread(handrail, "jobs", "wait", job_id, "--timeout", "0")
        assert waited.code == 1 and "continues" in waited.err
        stopped = await asyncio.to_thread(handrail, "jobs", "stop", job_id)
        assert (stopped.code, stopped.out) == (0, f"{job_id}: cancelled\n")


gates: list[asyncio.Event] = []


@tool(id="slow", side_effect="external", promotable=True, locks=[])
async def slow(name: str) -> str:
    """Take long, where somebody waits."""
    gates[0].set()
    await gates[1].wait()
    return f"done {name}"


@pytest.mark.proves("X-04")
async def test_another_process_moves_a_running_call_to_the_background(handrail: Program, tmp_path: Path) -> None:
    gates[:] = [asyncio.Event(), asyncio.Event()]
    async with open_kernel(
        handrail.workspace,
        state=handrail.state,
        tools=[slow],
        rules=["allow slow"],
        secrets={"KEY": "s3cr3t-of-a-test"},
    ) as kernel:
        session = await kernel.session()
        calling = asyncio.create_task(session.call("slow", {"name": "a"}))
        await gates[0].wait()
        listed = await asyncio.to_thread(handrail, "jobs", "background", "--json")
        (running,) = map(json.loads, listed.out.splitlines())
        assert (running["tool_id"], running["session_id"], running["summary"]) == ("slow", session.id, "a")
        other = await asyncio.to_thread(handrail, "jobs", "background", f"{session.id}/9.9")
        assert other.code == 1 and f"can move to the background: {running['call_id']}" in other.err
        promoted = await asyncio.to_thread(handrail, "jobs", "background", running["call_id"])
        job_id = (await calling).data["job_id"]
        assert (promoted.code, promoted.out) == (0, f"{job_id}: running\n"), "whoever waited is answered with the job"
        assert await kernel.jobs.list_running_calls() == []
        assert (await kernel.jobs.move_to_background(running["call_id"])).id == job_id, "twice is once"
        gates[1].set()
        result = await kernel.jobs.wait(job_id, timeout_ms=60_000)
        assert result is not None and result.ok


@confined
def test_the_process_that_runs_a_background_call_waits_for_its_job(here: Here) -> None:
    arguments = json.dumps({"command": "echo hi", "background": True})
    called = here("call", "bash", arguments, "--rule", "allow bash echo *")
    assert called.code == 0 and "hi" in called.out and "handrail jobs read" in called.err
    (job,) = (json.loads(line) for line in here("jobs", "--json").out.splitlines())
    assert job["state"] == "done" and here("jobs", "read", job["id"]).out == "hi\n"
    again = here("jobs", "stop", job["id"])
    assert again.code == 0 and "had already ended" in again.err
    assert "exit_code: 0" in here("jobs", "wait", job["id"]).out


def test_an_impossible_jobs_command_is_refused_with_an_explanation(here: Here) -> None:
    assert here("jobs", "read").code == 2 and here("jobs", "list", "x").code == 2
    assert here("jobs", "wait", "x", "--follow").code == 2
    unknown = here("jobs", "read", "bash_0")
    assert unknown.code == 1 and "no job" in unknown.err
    assert "No jobs." in here("jobs").err
    assert "No running call" in here("jobs", "background").err
