"""Two hundred kills in one workspace, and ten thousand calls in one session."""

from __future__ import annotations

import asyncio
import gc
import resource
from functools import lru_cache
from pathlib import Path

import pytest
from tests.session.crashing import CrashingWorkspace

from handrail import Event, tool
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.slow


@pytest.mark.timeout(1800)
async def test_two_hundred_kills_lose_no_acknowledged_result(tmp_path: Path) -> None:
    for part in range(10):  # so that looking through the log after each kill stays quick
        crashes = CrashingWorkspace(tmp_path / str(part), seed=part)
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


CACHE = type(lru_cache(len))


def count_tracked_objects() -> int:
    """Objects that the collector looks after, without what caches with a bound hold of what was last: how many of their
    tuples it looks after at a moment says nothing.
    """
    gc.unfreeze()  # what was loaded before the tests, caches among it
    for each in gc.get_objects():
        if type(each) is CACHE and each.cache_info().maxsize is not None:
            each.cache_clear()
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.timeout(600)
async def test_ten_thousand_calls_use_no_more_memory_than_one_thousand(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look, write], rules=["allow long.*"]) as kernel:
        session = await kernel.session()
        seen = 0

        def count(event: Event) -> None:
            nonlocal seen
            seen += 1

        session.watch_events(count)

        async def some(start: int, calls: int) -> None:
            for number in range(start, start + calls, 4):
                name = f"f{number}"
                await session.call_all([("long.look", {"name": name}), ("long.write", {"name": name})])
                await session.call("long.look", '{"name": 1}')
                await session.call("long.write", {"name": name}, key=f"k{number}")
            await kernel.log.flush()

        await some(0, 1_000)
        objects, most = count_tracked_objects(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await some(1_000, 9_000)
        grown = count_tracked_objects() - objects, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most
        assert grown[0] < 500, grown  # of 9,000 calls
        assert grown[1] < 64 * 1024  # KiB
        assert seen > 20_000
