"""What many tools cost: tokens in view of a thousand at the start of a turn, and publishing a generation of ten thousand.

The tools are made up in the shapes that real ones have. While a generation is published calls go on: their longest wait for
the event loop is printed, beside the same without anything to publish. The last part is what a change of one of many other
sources (servers, say) takes.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from handrail.catalog.tool_prompt import estimate_llm_view_tokens
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.kernel.doctor.machine_checks import compute_agent_token_costs
from handrail.kernel.local_kernel import LocalKernel
from handrail.registry.definition_pins import StoredPins, ThirdPartyDefinition
from handrail.testing.scripted_kernel import ThirdPartySource, temporary_kernel

TOKENS_TOOLS, SHARE = 1_000, 0.03
PUBLISHED, BOUND_MS = 10_000, 300.0
ROUNDS = 5
SOURCES, EACH = 50, 40
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


class Offered(Made):
    """One of another source."""

    def __init__(self, source: int, number: int) -> None:
        super().__init__(number)
        self.spec = replace(self.spec, id=f"server{source}_{number}")


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
        costs = compute_agent_token_costs(kernel.generation, kernel.config, kernel.default_agent)
    share = costs.active_tokens / costs.total_tokens
    print(
        f"{len(costs.tools):,} tools: about {costs.total_tokens:,} tokens with all in view, {costs.active_tokens:,} at the start of a turn"
    )
    print(
        f"  ({costs.index_tokens:,} of them the index; {costs.total_tokens / len(costs.tools):.0f} a tool, {estimate_llm_view_tokens(Made(3).spec)} one of these)"
    )
    met = share <= SHARE
    print(f"in view: {100 * share:.1f} % of all (bound {100 * SHARE:.0f} %): {'met' if met else 'MISSED'}")
    return met


async def publishing() -> bool:
    tools = [Made(n) for n in range(PUBLISHED)]
    async with temporary_kernel() as kernel:
        await begun(kernel)
        began = time.perf_counter()
        await kernel.reload_tools(tools)
        first = (time.perf_counter() - began) * 1e3

        async def another(number: int) -> None:
            tools[number] = Made(PUBLISHED + number)
            await kernel.reload_tools(tools)

        taken = await watched(another)
        idle = (await watched(lambda _: asyncio.sleep(statistics.median(taken.ms) / 1e3))).waits
    met = min(taken.ms) <= BOUND_MS
    print(f"a generation of {PUBLISHED:,} tools, none known before: {first:,.0f} ms")
    print(f"the next one, one tool of it changed: {taken}")
    print(f"  longest wait for the event loop without anything to publish: {min(idle):.0f} ms")
    print(f"published: {min(taken.ms):,.0f} ms (bound {BOUND_MS:.0f}): {'met' if met else 'MISSED'}")
    return met


async def refreshing() -> bool:
    own = [Made(n) for n in range(PUBLISHED - SOURCES * EACH)]
    sources = [ThirdPartySource(f"server{at}", [Offered(at, n) for n in range(EACH)]) for at in range(SOURCES)]
    async with temporary_kernel() as kernel:
        await begun(kernel)
        shelf = kernel.own_context.generations
        shelf.sources = replace(shelf.sources, extra_sources=lambda: sources)
        assert isinstance(shelf.sources.pins, StoredPins)
        for source in sources:
            shelf.sources.pins.approve(
                source.name, [ThirdPartyDefinition.from_spec(tool.spec) for tool in source.tools]
            )
        await kernel.reload_tools(own)

        async def changed(number: int) -> None:
            source = sources[number]
            source.withdraw(source.tools[0].spec.id)
            await shelf.reload_changed_sources([source])

        async def together(number: int) -> None:
            for source in sources:
                source.withdraw(source.tools[0].spec.id)
            await asyncio.gather(*(shelf.reload_changed_sources([source]) for source in sources))

        one, all_of_them = await watched(changed), await watched(together)
        assert all(
            entry.unavailable_reason is None for entry in kernel.generation.entries.values() if entry.third_party
        )
    met = min(one.ms) <= BOUND_MS
    print(f"one of {SOURCES} sources with {EACH} tools each has one tool less, of {PUBLISHED:,} in all: {one}")
    print(f"all of them at once: {all_of_them}")
    print(f"published: {min(one.ms):,.0f} ms (bound {BOUND_MS:.0f}): {'met' if met else 'MISSED'}")
    return met


@dataclass
class Taken:
    """What something took each time, in milliseconds: on the clock, of the processors, and others for the event loop."""

    ms: list[float]
    used: list[float]
    waits: list[float]

    def __str__(self) -> str:
        return (
            f"{min(self.ms):,.0f} ms at best, {statistics.median(self.ms):,.0f} in the middle; processor time "
            f"{min(self.used):,.0f}; longest wait for the event loop {min(self.waits):.0f} to {max(self.waits):.0f}"
        )


async def watched(work: Callable[[int], Awaitable[None]]) -> Taken:
    """``work`` again and again, with its number."""
    found = Taken([], [], [])
    for number in range(ROUNDS):
        done = asyncio.Event()
        watch = asyncio.create_task(longest_wait(done))
        await asyncio.sleep(0)
        began, at = time.perf_counter(), time.process_time()
        await work(number)
        found.ms.append((time.perf_counter() - began) * 1e3)
        found.used.append((time.process_time() - at) * 1e3)
        done.set()
        found.waits.append(await watch)
    return found


async def begun(kernel: LocalKernel) -> None:
    """With a session, so that generations are on record."""
    await (await kernel.session()).call("todo", {})


async def main() -> int:
    met = [await tokens()]
    print()
    met.append(await publishing())
    print()
    met.append(await refreshing())
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
