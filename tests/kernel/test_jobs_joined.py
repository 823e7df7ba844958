"""Jobs of sessions in client processes: they run in the lease holder and can be managed from anywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kernel.test_joined import second

from handrail import Runtime, ToolError, tool
from handrail.testing.scripted_kernel import temporary_kernel

RULES = ["allow *", "allow bash *", "allow fs.write **", "allow shell.run *"]


class Place:
    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.entered = asyncio.Event()


place = Place()


@tool(id="own", side_effect="external", mode="background", locks=[], promotable=True)
async def own(name: str, runtime: Runtime) -> str:
    """Take long, in the process that brought it."""
    runtime.write_output(f"began {name}\n".encode())
    place.entered.set()
    await place.open.wait()
    return name


@tool(id="slow", side_effect="external", locks=[], promotable=True)
async def slow(name: str, runtime: Runtime) -> str:
    """Take long."""
    runtime.write_output(f"began {name}\n")
    place.entered.set()
    await place.open.wait()
    return name


@tool(id="looks", side_effect="read", locks=[], requires={"capabilities": ["jobs"]})
async def looks(job_id: str, runtime: Runtime) -> dict[str, object]:
    """Look at jobs through the runtime."""
    listed = [job.id for job in await runtime.jobs.list()]
    read = await runtime.jobs.read_output_bytes(job_id)
    lines = await runtime.jobs.read_line_range(job_id, offset=-1, count=1)
    waited = await runtime.jobs.wait(job_id, timeout_ms=0)
    stopped = await runtime.jobs.stop(job_id)
    return {
        "listed": listed,
        "read": read.text,
        "lines": lines.text,
        "waited": waited is not None,
        "state": (await runtime.jobs.get(job_id)).state,
        "stopped": stopped.state,
    }


@pytest.fixture(autouse=True)
def a_fresh_place() -> None:
    place.__init__()


@pytest.mark.proves("X-05", "L-07")
async def test_a_job_of_a_joined_session_outlives_it_and_is_managed_from_any_process(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[slow], rules=RULES) as held:
        script = tmp_path / "ws" / "wait.sh"
        script.write_text("#!/bin/sh\nsleep infinity\n")
        script.chmod(0o755)
        async with second(tmp_path, tools=[own, looks], rules=RULES) as joined:
            session = await joined.session()
            seen: list[str] = []
            session.watch_events(lambda event: seen.append(event.kind))
            job_id = (await session.call("own", {"name": "a"})).data["job_id"]
            await place.entered.wait()
            while not (await session.jobs.read_output_bytes(job_id)).text:
                await asyncio.sleep(0)
            assert (await session.jobs.read_output_bytes(job_id)).text == "began a\n"
            assert (await session.jobs.read_line_range(job_id, offset=-1)).text == "began a\n"
            assert await session.jobs.wait(job_id, timeout_ms=1) is None
            assert (
                [job.id for job in await held.jobs.list()] == [job.id for job in await joined.jobs.list()] == [job_id]
            )
            with pytest.raises(ToolError, match="Job `bash_0` does not exist"):
                await session.jobs.get("bash_0")
            looked = (await session.call("looks", {"job_id": job_id})).data
            assert looked == {
                "listed": [job_id],
                "read": "began a\n",
                "lines": "began a\n",
                "waited": False,
                "state": "cancelled",
                "stopped": "cancelled",
            }
            assert "backgrounded" in seen and (await joined.jobs.stop(job_id)).state == "cancelled"
            theirs = await session.call("bash", {"command": "./wait.sh", "background": True})
            assert theirs.ok or not held.sandbox_tier.is_confining, theirs.error_text
        if theirs.ok:
            assert not (await held.jobs.get(theirs.data["job_id"])).has_ended, "it is the holder's, whoever leaves"


@pytest.mark.proves("X-04")
async def test_a_running_call_of_a_joined_session_can_move_to_the_background(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=RULES), second(tmp_path, tools=[slow], rules=RULES) as joined:
        session = await joined.session()
        caller = asyncio.create_task(session.call("slow", {"name": "a"}))
        await place.entered.wait()
        job = await session.move_to_background(f"{session.id}/1.0")
        assert (await caller).data["job_id"] == job.id
        place.open.set()
        result = await session.jobs.wait(job.id, timeout_ms=30_000)
        assert result is not None and result.data == "a"
        with pytest.raises(ToolError, match="is not running in session"):
            await session.move_to_background(f"{session.id}/1.0")
