"""One complete in-process call of a short read-only tool, beside what its peers do for the same function.

Ours is all nine steps: resolve, validate, authorise by a rule, a lock, the intent on record, run, shape, commit,
release. Arguments go in as the JSON text a model sends, where the peer takes text. Every contender runs in one
process and one event loop, in interleaved rounds; the figure is the median of single-call times. After a round of ours
the log is flushed, untimed, so that its writer's thread does not slow the peers that come next.

Then what a program feels that has these frameworks loaded. Calls in a row, with the flush of the log in the time, and the
longest collection of the garbage collector meanwhile. Calls of many callers at once to a function that waits 2 ms.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

Call = Callable[[], Awaitable[Any]]
ROUNDS, CALLS = 30, 200
TEXT = '{"a": 1, "b": 2}'
SUSTAINED, CALLERS, CALLS_OF_EACH = 20_000, 256, 40
BOUND_ALONE, BOUND_SUSTAINED, BOUND_PAUSE_MS, BOUND_P99 = 1.0, 2.0, 5.0, 1.5


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def nap(a: int, b: int) -> int:
    """Add two numbers, after 2 ms."""
    await asyncio.sleep(0.002)
    return a + b


async def openai_agents() -> dict[str, Call]:
    from agents import function_tool
    from agents.tool import invoke_function_tool
    from agents.tool_context import ToolContext

    tool = function_tool(add)

    def context() -> ToolContext[None]:
        """It holds one call's id and arguments, so each call has one of its own."""
        return ToolContext(None, tool_name="add", tool_call_id="x", tool_arguments=TEXT)

    shared = context()
    return {
        "openai-agents on_invoke_tool": lambda: tool.on_invoke_tool(context(), TEXT),
        "openai-agents on_invoke_tool, context shared": lambda: tool.on_invoke_tool(shared, TEXT),
        "openai-agents invoke_function_tool": lambda: invoke_function_tool(
            function_tool=tool, context=context(), arguments=TEXT
        ),
    }


async def pydantic_ai() -> dict[str, Call]:
    from pydantic_ai.messages import ToolCallPart
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.tool_manager import ToolManager
    from pydantic_ai.tools import RunContext
    from pydantic_ai.toolsets import FunctionToolset
    from pydantic_ai.usage import RunUsage

    toolset: FunctionToolset[None] = FunctionToolset([add, nap])
    context = RunContext(deps=None, model=TestModel(), usage=RunUsage(), run_step=0)
    manager = await ToolManager(toolset).for_run_step(context)
    part = ToolCallPart("add", TEXT, tool_call_id="x")
    napping = ToolCallPart("nap", TEXT, tool_call_id="x")
    return {
        "pydantic-ai ToolManager": lambda: manager.handle_call(part),
        _NAPPING: lambda: manager.handle_call(napping),
    }


async def langchain() -> dict[str, Call]:
    from langchain_core.messages import AIMessage
    from langchain_core.tools import tool
    from langgraph.graph import END, START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode

    added = tool(add)
    graph = StateGraph(MessagesState)
    graph.add_node("tools", ToolNode([added]))
    graph.add_edge(START, "tools")
    graph.add_edge("tools", END)
    node = graph.compile()
    message = AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1, "b": 2}, "id": "x", "type": "tool_call"}])
    return {
        "langchain-core ainvoke": lambda: added.ainvoke({"a": 1, "b": 2}),
        "LangGraph ToolNode": lambda: node.ainvoke({"messages": [message]}),
    }


async def fastmcp() -> dict[str, Call]:
    from fastmcp import Client, FastMCP

    server = FastMCP("bench")
    server.tool(add)
    client = Client(server)
    await client.__aenter__()
    return {"FastMCP in-memory client": lambda: client.call_tool("add", {"a": 1, "b": 2})}


async def measure(contenders: dict[str, Call], settle: Call) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for call in contenders.values():
        for _ in range(20):
            await call()
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            kept = times[name]
            for _ in range(CALLS if "MCP" not in name and "Graph" not in name else 20):
                began = time.perf_counter_ns()
                await call()
                kept.append((time.perf_counter_ns() - began) / 1000)
            await settle()
    return times


_NAPPING = "pydantic-ai ToolManager, nap"


def say(what: str, figure: float, bound: float, unit: str = "×") -> bool:
    print(f"{what}: {figure:.2f} {unit} (bound {bound}): {'met' if figure <= bound else 'MISSED'}")
    return figure <= bound


async def call_in_a_row(call: Call, settle: Call) -> tuple[float, float]:
    """Return the microseconds of one of many calls, with the flush, and the milliseconds of the longest collection."""
    longest, began_ns = 0, 0

    def watch(phase: str, _info: dict[str, int]) -> None:
        nonlocal longest, began_ns
        if phase == "start":
            began_ns = time.perf_counter_ns()
        else:
            longest = max(longest, time.perf_counter_ns() - began_ns)

    gc.collect()
    gc.callbacks.append(watch)
    began = time.perf_counter()
    for _ in range(SUSTAINED):
        await call()
    await settle()
    taken = (time.perf_counter() - began) / SUSTAINED * 1e6
    gc.callbacks.remove(watch)
    return taken, longest / 1e6


async def call_at_once(call: Call, settle: Call) -> float:
    """Return the p99 in milliseconds of the calls of many callers at once."""
    taken: list[float] = []

    async def caller() -> None:
        for _ in range(CALLS_OF_EACH):
            began = time.perf_counter()
            await call()
            taken.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    await settle()
    return statistics.quantiles(taken, n=100)[98]


async def measure_program(ours: Call, ours_nap: Call, peers: dict[str, Call], settle: Call) -> bool:
    """Print what a program feels that has the frameworks loaded."""

    async def nothing() -> None:
        return

    in_a_row, pause = await call_in_a_row(ours, settle)
    print(f"\nin a row, with the log: {in_a_row:.1f} µs a call; longest collection {pause:.1f} ms")
    met = say("longest collection", pause, BOUND_PAUSE_MS, "ms")
    if (peer := peers.get("openai-agents on_invoke_tool")) is not None:
        base, _ = await call_in_a_row(peer, nothing)
        met = say("in a row, with the log, × openai-agents", in_a_row / base, BOUND_SUSTAINED) and met
    p99 = statistics.median([await call_at_once(ours_nap, settle) for _ in range(3)])
    print(f"{CALLERS} callers at once, p99 of a 2 ms read: {p99:.1f} ms")
    if (peer := peers.get(_NAPPING)) is not None:
        base = statistics.median([await call_at_once(peer, nothing) for _ in range(3)])
        met = say("× pydantic-ai", p99 / base, BOUND_P99) and met
    return met


async def main() -> int:
    from handrail import open_kernel, tool

    logging.disable(logging.WARNING)
    ours = tool(id="bench.add", side_effect="read", locks=["bench:S"])(add)
    napping = tool(id="bench.nap", side_effect="read", locks=["bench:S"])(nap)
    with tempfile.TemporaryDirectory() as folder:
        workspace, state = Path(folder, "ws"), Path(folder, "state")
        workspace.mkdir()
        empty = Path(folder, "handrail.toml")
        empty.touch()
        async with open_kernel(
            workspace, tools=[ours, napping], rules=["allow bench.*"], state=state, config=empty
        ) as kernel:
            session = await kernel.session()
            contenders: dict[str, Call] = {
                "bare await": lambda: add(a=1, b=2),
                "handrail, nine steps": lambda: session.call("bench.add", TEXT),
            }
            for make in (openai_agents, pydantic_ai, langchain, fastmcp):
                try:
                    contenders |= await make()
                except ImportError as error:
                    print(
                        f"bench: {make.__name__} is left out: {error.name} is not installed (bench/requirements.txt)",
                        file=sys.stderr,
                    )
            assert (await session.call("bench.add", TEXT)).data == 3
            singly = {name: call for name, call in contenders.items() if name != _NAPPING}
            times = await measure(singly, kernel.log.flush)
            met = await measure_program(
                contenders["handrail, nine steps"],
                lambda: session.call("bench.nap", TEXT),
                contenders,
                kernel.log.flush,
            )
    base = statistics.median(times["handrail, nine steps"])
    print(f"{'one call of add(1, 2)':45} {'p50 µs':>9} {'× handrail':>11}")
    for name, kept in times.items():
        p50 = statistics.median(kept)
        print(f"{name:45} {p50:9.1f} {p50 / base:11.2f}")
    if (peer := times.get("openai-agents on_invoke_tool")) is not None:
        met = say("p50, × openai-agents", base / statistics.median(peer), BOUND_ALONE) and met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
