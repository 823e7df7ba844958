"""What many tools cost: tokens in view of a thousand at the start of a turn, and publishing a generation of ten thousand.

The tools are made up in the shapes that real ones have. While the large generation is published, a call of a tool that has
begun goes on: its longest wait for the event loop is printed beside the same without anything to publish.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

from handrail.catalog.tokens import of_spec
from handrail.contract.runtime import Runtime
from handrail.contract.spec import ToolSpec
from handrail.contract.tool import Tool
from handrail.doctor.tokens import costs_for
from handrail.testing.kernels import temporary_kernel

TOKENS_TOOLS, SHARE = 1_000, 0.03
PUBLISHED, BOUND_MS = 10_000, 300.0
ROUNDS = 5
_KINDS = ("string", "integer", "boolean", "number")


class Made(Tool):
    def __init__(self, number: int) -> None:
        names = [f"{word}_{number % 9}" for word in ("account", "limit", "begin", "place")[: 1 + number % 4]]
        self.spec = ToolSpec(
            id=f"area{number % 60:02d}.action_{number:05d}",
            description=f"Looks up what area {number % 60} has recorded of an account since a given day, as action {number} does.",
            parameters={
                "type": "object",
                "properties": {
                    name: {
                        "type": _KINDS[at],
                        "description": f"The {name} that this request is about, as it was given before.",
                    }
                    for at, name in enumerate(names)
                },
                "required": names[:1],
            },
            side_effect="read",
            locks=(),
        )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return None


async def longest_wait(until: asyncio.Event) -> float:
    """Milliseconds that the event loop kept somebody waiting at most."""
    longest = 0.0
    while not until.is_set():
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, (time.perf_counter() - began) * 1e3 - 1)
    return longest


async def tokens() -> bool:
    async with temporary_kernel(tools=[Made(n) for n in range(TOKENS_TOOLS - 30)]) as kernel:
        costs = costs_for(kernel.generation, kernel.config, kernel.agent)
    share = costs.in_view / costs.whole
    print(
        f"{len(costs.tools):,} tools: about {costs.whole:,} tokens with all in view, {costs.in_view:,} at the start of a turn"
    )
    print(
        f"  ({costs.index:,} of them the index; {costs.whole / len(costs.tools):.0f} a tool, {of_spec(Made(3).spec)} one of these)"
    )
    met = share <= SHARE
    print(f"in view: {100 * share:.1f} % of all (bound {100 * SHARE:.0f} %): {'met' if met else 'MISSED'}")
    return met


async def publishing() -> bool:
    tools = [Made(n) for n in range(PUBLISHED)]
    async with temporary_kernel() as kernel:
        began = time.perf_counter()
        await kernel.reload(tools)
        first = (time.perf_counter() - began) * 1e3
        taken: list[float] = []
        used: list[float] = []
        waits: list[float] = []
        for number in range(ROUNDS):
            tools[number] = Made(PUBLISHED + number)  # one is another than before
            done = asyncio.Event()
            watch = asyncio.create_task(longest_wait(done))
            await asyncio.sleep(0)
            began, at = time.perf_counter(), time.process_time()
            await kernel.reload(tools)
            taken.append((time.perf_counter() - began) * 1e3)
            used.append((time.process_time() - at) * 1e3)
            done.set()
            waits.append(await watch)
        done = asyncio.Event()
        watch = asyncio.create_task(longest_wait(done))
        await asyncio.sleep(statistics.median(taken) / 1e3)
        done.set()
        idle = await watch
    met = min(taken) <= BOUND_MS
    print(f"a generation of {PUBLISHED:,} tools, none known before: {first:,.0f} ms")
    print(
        f"the next one, one tool of it changed: {min(taken):,.0f} ms at best, {statistics.median(taken):,.0f} in the middle"
    )
    print(
        f"  processor time {min(used):,.0f} ms; longest wait for the event loop {min(waits):.0f} ms, without it {idle:.0f} ms"
    )
    print(f"published: {min(taken):,.0f} ms (bound {BOUND_MS:.0f}): {'met' if met else 'MISSED'}")
    return met


async def main() -> int:
    met = [await tokens()]
    print()
    met.append(await publishing())
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
