"""The tools for jobs, with bash in the background."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_agents import confined

from handrail import Session, tool
from handrail.testing.scripted_kernel import temporary_kernel


@tool(id="later", side_effect="external", mode="background", locks=[])
async def later() -> str:
    """Never end."""
    await asyncio.Event().wait()
    return ""


@pytest.fixture
async def session(tmp_path: Path) -> AsyncGenerator[Session]:
    async with temporary_kernel(tmp_path, tools=[later], rules=["allow bash *", "allow later"]) as kernel:
        steps = tmp_path / "ws" / "steps.sh"
        steps.write_text("#!/bin/sh\necho one\nuntil [ -e go ]; do sleep 0.01; done\necho two\necho three\n")
        steps.chmod(0o755)
        yield await kernel.session()


async def data(session: Session, name: str, **arguments: Any) -> dict[str, Any]:
    result = await session.call(name, arguments)
    assert result.ok, result.error_text
    return result.data


@confined
@pytest.mark.proves("X-02", "X-05", "X-10", "X-12")
async def test_a_background_command_can_be_read_awaited_and_listed_while_it_runs(session: Session) -> None:
    told: list[str] = []
    heard = asyncio.Event()

    def hear(event: Any) -> None:
        if "output" in event.data:
            told.append(event.data["output"])
            heard.set()

    session.watch_events(hear)
    answered = await data(session, "bash", command="./steps.sh", background=True)
    job_id = answered["job_id"]
    assert "workspace:X" in answered["note"]
    await heard.wait()
    assert "".join(told) == "one\n", "while it runs"
    read = await data(session, "read_job", job_id=job_id)
    assert (read["text"], read["state"], read["has_more"]) == ("one\n", "running", True)
    waited = await data(session, "wait", job_id=job_id, timeout_ms=1)
    assert waited["state"] == "running" and "keeps running" in waited["note"]
    assert [job["job_id"] for job in (await data(session, "jobs", running_only=True))["jobs"]] == [job_id]
    assert (await data(session, "bash", command="touch go"))["exit_code"] == 0, "the workspace is not held"
    result = (await data(session, "wait", job_id=job_id))["result"]
    assert result["data"] == {"exit_code": 0, "output": "one\ntwo\nthree\n"}
    rest = await data(session, "read_job", job_id=job_id, cursor=read["cursor"])
    assert (rest["text"], rest["has_more"]) == ("two\nthree\n", False)
    last = await data(session, "read_job", job_id=job_id, offset=-1)
    assert (last["text"], last["first_line"]) == ("three\n", 2)
    assert {"wait", "read_job", "stop_task", "jobs"} <= {spec.id for spec in session.active_tools}, (
        "they came into view"
    )


@pytest.mark.proves("X-05")
async def test_a_long_wait_ends_with_its_job_and_a_second_stop_reports_the_state(session: Session) -> None:
    job_id = (await data(session, "later"))["job_id"]
    waiting = asyncio.create_task(session.call("wait", {"job_id": job_id, "timeout_ms": 10**12}))
    await asyncio.sleep(0)
    assert (await data(session, "stop_task", job_id=job_id))["state"] == "cancelled"
    ended = await waiting
    assert ended.ok and ended.data["state"] == "cancelled" and ended.data["result"]["type"] == "error"
    assert (await data(session, "stop_task", job_id=job_id))["note"] == "The job had ended before: cancelled."
    unknown = await session.call("read_job", {"job_id": "bash_0"})
    assert unknown.error_kind == "invalid_input" and job_id in str(unknown.error_text)
    both = await session.call("read_job", {"job_id": job_id, "cursor": 1, "offset": 1})
    assert both.error_kind == "invalid_input"


@confined
@pytest.mark.proves("S-05", "X-07")
async def test_a_job_ends_with_its_timeout_or_kernel_and_leaves_no_process(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    async with temporary_kernel(tmp_path, rules=["allow bash ./wait.sh *"]) as kernel:
        script = tmp_path / "ws" / "wait.sh"
        script.write_text("#!/bin/sh\nsleep infinity &\necho up\nwait\n")
        script.chmod(0o755)
        session = await kernel.session()
        command = {"command": f"./wait.sh {mark}", "background": True}
        timed = (await session.call("bash", {**command, "timeout_ms": 300})).data["job_id"]
        result = await session.jobs.wait(timed, timeout_ms=60_000)
        assert result is not None and result.error_kind == "timeout"
        assert (await session.jobs.get(timed)).state == "failed"
        running = (await session.call("bash", command)).data["job_id"]
        while not (await session.jobs.read_output_bytes(running)).text:
            await asyncio.sleep(0.01)
        assert left_over(mark)
    assert left_over(mark) == []


def left_over(mark: str) -> list[bytes]:
    found: list[bytes] = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            line = process.read_bytes()
            if mark.encode() in line:
                found.append(line)
    return found


@pytest.mark.proves("K-05")
async def test_integer_arguments_may_have_a_decimal_point(session: Session, tmp_path: Path) -> None:
    job_id = (await data(session, "later"))["job_id"]
    for given in ({"cursor": 0.0}, {"offset": -1.0, "lines": 2.0}):
        assert (await data(session, "read_job", job_id=job_id, **given))["job_id"] == job_id
    (tmp_path / "ws" / "numbers.txt").write_text("one\ntwo\nthree\n")
    read = await data(session, "read", path="numbers.txt", offset=1.0, limit=1.0)
    assert repr(read) == repr(await data(session, "read", path="numbers.txt", offset=1, limit=1))


@pytest.mark.proves("X-05")
async def test_a_cursor_excludes_other_read_positions(session: Session) -> None:
    job_id = (await data(session, "later"))["job_id"]
    for other in ({"lines": 1}, {"offset": 0}):
        refused = await session.call("read_job", {"job_id": job_id, "cursor": 0, **other})
        assert refused.error_kind == "invalid_input"
        assert f"`cursor` and `{next(iter(other))}` exclude each other" in (refused.error_text or "")


@pytest.mark.proves("X-08")
async def test_the_result_of_a_job_stopped_by_a_call_does_not_name_the_user(session: Session) -> None:
    for by in ("user", "call"):
        job_id = (await data(session, "later"))["job_id"]
        if by == "user":
            await session.jobs.stop(job_id)
        else:
            await data(session, "stop_task", job_id=job_id)
        result = (await data(session, "wait", job_id=job_id))["result"]
        assert result["metadata"]["stopped_by"] == by
        assert ("by the user" in result["error_text"]) == (by == "user")
