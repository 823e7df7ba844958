"""Stateful tools of a client process: it runs the generators, and the holder authorizes and records each step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.ipc.workshop import workshop

from handrail import Runtime, ToolError, tool

pytestmark = pytest.mark.proves("X-03")


entered = asyncio.Event()


@tool(id="far.notes", mode="stateful", side_effect="write", locks=["shelf:X"], requires={"fs": {"write": ["."]}})
async def notes(ended: str, runtime: Runtime) -> AsyncGenerator[Any, Any]:
    """Write a note for each input, and one at the end."""
    number, sent = 0, None
    try:
        while sent != "enough":
            if sent == "fail":
                raise ToolError("no paper")
            if sent == "wait":
                entered.set()
                await asyncio.Event().wait()
            sent = yield {"number": number, "call": runtime.call_id}
            number += 1
            await runtime.files.write(f"{number}.txt", b"x")
    finally:
        await runtime.files.write(ended, b"x")


async def test_client_tool_steps_and_cleanup_use_the_runtime_of_the_current_call(tmp_path: Path) -> None:
    async with workshop(tmp_path, notes, rules=["allow fs.write **"]) as there:
        session, workspace = there.session, tmp_path / "ws"

        async def opened(ended: str) -> dict[str, Any]:
            return {"id": (await session.call("far.notes", {"ended": ended})).data["state_id"]}

        state = await opened("last.txt")
        second = await session.call("tool.step", {**state, "input": 1})
        assert second.data["step"] == {"number": 1, "call": f"{session.id}/2.0"} and (workspace / "1.txt").exists()
        assert (await session.call("tool.step", {**state, "input": "enough"})).data["done"] is True
        assert (workspace / "last.txt").exists()

        state = await opened("closed.txt")
        assert (await session.call("tool.close", state)).data["closed"] is True
        assert (workspace / "closed.txt").exists(), "with the runtime of the call that closes it"

        state = await opened("failed.txt")
        await session.call("tool.step", {**state, "input": 1})
        failed = await session.call("tool.step", {**state, "input": "fail"})
        assert failed.error_kind == "failed" and "no paper. The tool session" in str(failed.error_text)
        assert (workspace / "failed.txt").exists()

        state = await opened("stopped.txt")
        going = asyncio.create_task(session.call("tool.step", {**state, "input": "wait"}))
        await entered.wait()
        session.cancel_running_calls()
        assert (await going).error_kind == "cancelled"
        assert (await session.call("tool.step", state)).error_kind == "conflict"


let_go = asyncio.Event()


class _Unreadable:
    """A value without a JSON form."""


@tool(id="far.odd", mode="stateful", side_effect="read", locks=[])
async def odd(runtime: Runtime) -> AsyncGenerator[Any, Any]:
    """Give one step that can be told, and one that cannot."""
    try:
        yield 1
        yield _Unreadable()
    finally:
        for _ in range(10):
            await asyncio.sleep(0)
        let_go.set()


async def test_an_unserialisable_step_result_ends_the_tool_session_in_both_processes(tmp_path: Path) -> None:
    async with workshop(tmp_path, odd, rules=["allow far.odd"]) as there:
        state = {"id": (await there.session.call("far.odd", {})).data["state_id"]}
        wrong = await there.session.call("tool.step", state)
        assert wrong.error_kind == "backend" and "that is not JSON" in str(wrong.error_text)
        await let_go.wait()
        assert (await there.session.call("tool.step", state)).error_kind == "conflict"


async def test_a_tool_session_ends_when_the_process_that_runs_it_leaves(tmp_path: Path) -> None:
    async with workshop(tmp_path, notes, odd, rules=["allow fs.write **"]) as there:
        state = {"id": (await there.session.call("far.notes", {"ended": "last.txt"})).data["state_id"]}
        assert (await there.session.call("far.odd", {})).ok
        let_go.clear()
        await there.theirs.aclose()
        await there.bench.aclose()
        assert let_go.is_set(), "what stands in its finally has run before its process ends"
        gone = await there.session.call("tool.step", state)
        assert gone.error_kind == "unavailable" and "has ended" in str(gone.error_text)
        assert (await there.session.call("tool.step", state)).error_kind == "conflict"
