"""Costs of large numbers: many sessions with many tools, and many tools from their functions to the first search.

    python bench/many.py            prints two tables; exit code 1 if a target is missed

First, calls of a random tool in a random session of 10,000 with 100 tools each. Their peer, in interleaved rounds of the same
run, are calls in one session of one of 14 tools. Second, 100,000 functions become tools of a kernel: the processor time of
`@tool` for all of them, of opening the kernel with the first search, and the memory that this adds.
"""

from __future__ import annotations

import asyncio
import logging
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from handrail import Kernel, Session, open_kernel, tool
from handrail.contract.tool.tool_protocol import Tool

SESSIONS, TOOLS, FEW_TOOLS = 10_000, 100, 14
ROUNDS, CALLS = 10, 500
MANY_TOOLS = 100_000
BOUND_P50, BOUND_P99 = 1.2, 2.0
BOUND_S, BOUND_MB = 8.0, 500
ARGUMENTS = '{"account": "a"}'


def make_tools(count: int) -> list[Tool]:
    """Return tools of functions in the shapes that real ones have."""

    def make(number: int) -> Tool:
        async def look_up(account: str, limit: int = number % 9, begin: str | None = None) -> str:
            return account

        look_up.__doc__ = f"Look up what area {number % 60} has recorded of an account, as action {number} does."
        return tool(id=f"area{number % 60:02d}.action_{number}", side_effect="read", locks=[])(look_up)

    return [make(number) for number in range(count)]


def make_kernel(folder: Path, tools: Sequence[Tool]) -> AbstractAsyncContextManager[Kernel]:
    (folder / "workspace").mkdir()
    config = folder / "handrail.toml"
    config.write_text('[search]\nembedder = "none"\n')
    return open_kernel(folder / "workspace", tools=tools, rules=["allow area*"], state=folder / "state", config=config)


async def call_at_random(kernel: Kernel, sessions: Sequence[Session], tools: Sequence[str]) -> list[float]:
    """Return the microseconds of each call. The log is flushed afterwards, untimed."""
    taken: list[float] = []
    for _ in range(CALLS):
        session, name = random.choice(sessions), random.choice(tools)
        began = time.perf_counter_ns()
        answer = await session.call(name, ARGUMENTS)
        taken.append((time.perf_counter_ns() - began) / 1000)
        assert answer.ok, answer
    await kernel.log.flush()
    return taken


async def measure_sessions() -> bool:
    tools = make_tools(TOOLS)
    names = [one.spec.id for one in tools]
    with tempfile.TemporaryDirectory() as folder:
        async with make_kernel(Path(folder), tools) as kernel:
            sessions = [await kernel.session() for _ in range(SESSIONS)]
            few: list[float] = []
            many: list[float] = []
            await call_at_random(kernel, sessions[:1], names)
            for _ in range(ROUNDS):
                few += await call_at_random(kernel, sessions[:1], names[:FEW_TOOLS])
                many += await call_at_random(kernel, sessions, names)
    met = True
    print(f"{'a call of one of':32} {'p50 µs':>8} {'p99 µs':>8}")
    for title, taken in ((f"1 × {FEW_TOOLS} tools", few), (f"{SESSIONS:,} sessions × {TOOLS} tools", many)):
        print(f"{title:32} {statistics.median(taken):8.1f} {statistics.quantiles(taken, n=100)[98]:8.1f}")
    for what, point, bound in (("p50", 49, BOUND_P50), ("p99", 98, BOUND_P99)):
        ratio = statistics.quantiles(many, n=100)[point] / statistics.quantiles(few, n=100)[point]
        met = met and ratio <= bound
        print(f"{what}: {ratio:.2f} × (bound {bound}): {'met' if ratio <= bound else 'MISSED'}")
    return met


async def measure_tools() -> bool:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    tools = make_tools(MANY_TOOLS)
    decorated, began = time.process_time() - began, time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        async with make_kernel(Path(folder), tools) as kernel:
            session = await kernel.session()
            opened = time.process_time() - began
            found = await session.call("find_tools", {"query": "look up account records"})
            searched = time.process_time() - began
            assert found.ok, found
            began = time.perf_counter_ns()
            await session.call(tools[-1].spec.id, ARGUMENTS)
            called = (time.perf_counter_ns() - began) / 1000
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{MANY_TOOLS:,} tools, seconds of the processor: @tool {decorated:.1f}, open {opened:.1f}", end="")
    print(f", open with the first search {searched:.1f} (bound {BOUND_S}); a call then {called:.0f} µs")
    met = searched <= BOUND_S and used <= BOUND_MB
    print(f"memory: {used:,.0f} MB (bound {BOUND_MB}): {'met' if met else 'MISSED'}")
    return met


async def main() -> int:
    logging.disable(logging.WARNING)
    met = [await measure_sessions()]
    print()
    met.append(await measure_tools())
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
