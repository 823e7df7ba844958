"""Two hundred kills of one workspace, and ten thousand calls of one session."""

from __future__ import annotations

import asyncio
import gc
import resource
from pathlib import Path

import pytest
from tests.session.crashing import Crashes

from handrail import Event, tool
from handrail.testing.kernels import temporary_kernel

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
async def test_two_hundred_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    for part in range(10):  # so that looking through the log after each kill stays quick
        crashes = Crashes(tmp_path / str(part), seed=part)
        crashes.folder.mkdir()
        for _ in range(20):
            crashes.live_and_die()
        await crashes.settle()
        assert crashes.interrupted and crashes.acknowledged


@tool(id="long.look", side_effect="read", locks=["file:{name}:S"])
async def look(name: str) -> str:
    """Look."""
    return name


@tool(id="long.write", side_effect="write", locks=["file:{name}:X"])
async def write(name: str) -> str:
    """Write."""
    await asyncio.sleep(0)
    return name


@pytest.mark.timeout(600)
async def test_ten_thousand_calls_leave_no_more_in_memory_than_a_thousand(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look, write], rules=["allow long.*"]) as kernel:
        session = await kernel.session()
        seen = 0

        def count(event: Event) -> None:
            nonlocal seen
            seen += 1

        session.watch(count)

        async def some(start: int, calls: int) -> None:
            for number in range(start, start + calls, 4):
                name = f"f{number}"
                await session.call_all([("long.look", {"name": name}), ("long.write", {"name": name})])
                await session.call("long.look", '{"name": 1}')
                await session.call("long.write", {"name": name}, key=f"k{number}")
            await kernel.log.flush()
            gc.collect()

        await some(0, 1_000)
        objects, most = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await some(1_000, 9_000)
        grown = len(gc.get_objects()) - objects, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
        assert grown[0] < 2_500  # what caches with bounds, of locks and statements, still take
        assert grown[1] < 64 * 1024  # KiB
        assert seen > 20_000
