"""A new generation replaces the old one in one step, and its tools close after the last use."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from handrail.contract.schema.argument_validation import compile_schema
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import Generation, GenerationDiff, ToolEntry
from handrail.registry.generation_lifecycle import GenerationLifecycle, SharedToolUses

pytestmark = pytest.mark.proves("R-06")


class _Tool(Tool):
    def __init__(self, tool_id: str, fails: bool = False) -> None:
        self.spec = ToolSpec(id=tool_id, description="x")
        self.fails = fails
        self.ended = 0
        self.over = asyncio.Event()

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return None

    async def aclose(self) -> None:
        self.ended += 1
        self.over.set()
        if self.fails:
            raise RuntimeError("it does not end")


def generation(number: int, *tools: _Tool) -> Generation:
    schema = compile_schema({"type": "object", "properties": {}})
    return Generation(number, [ToolEntry(tool.spec, tool, schema, "here", tool.spec.definition_hash) for tool in tools])


async def test_a_published_generation_is_current_at_once_and_its_difference_is_returned() -> None:
    a, b, c = _Tool("a"), _Tool("b"), _Tool("c")
    succession = GenerationLifecycle(generation(1, a, b))
    second = generation(2, b, c)
    assert succession.publish(second) == GenerationDiff(added=("c",), removed=("a",))
    assert succession.current is second
    await succession.aclose()
    assert [tool.ended for tool in (a, b, c)] == [1, 1, 1]


@pytest.mark.parametrize("number", [0, 1])
async def test_a_generation_is_published_only_with_a_higher_number(number: int) -> None:
    succession = GenerationLifecycle(first := generation(1))
    with pytest.raises(ValueError, match=rf"Generation {number} cannot be published\. Its number must be above 1"):
        succession.publish(generation(number))
    assert succession.current is first


async def test_a_tool_closes_when_the_last_generation_that_has_it_is_released() -> None:
    dropped, carried, returning = _Tool("dropped"), _Tool("carried"), _Tool("returning")
    held = generation(1, dropped, carried, returning)
    succession = GenerationLifecycle(held)
    succession.publish(generation(2, carried))
    succession.publish(generation(3, carried, returning))
    gc.collect()
    await asyncio.sleep(0)
    assert {one.number for one in succession.generations_in_use} == {1, 3}
    assert [tool.ended for tool in (dropped, carried, returning)] == [0, 0, 0]
    del held
    gc.collect()
    await dropped.over.wait()
    assert {one.number for one in succession.generations_in_use} == {3}
    assert [tool.ended for tool in (dropped, carried, returning)] == [1, 0, 0]
    await succession.aclose()
    assert [tool.ended for tool in (dropped, carried, returning)] == [1, 1, 1]


async def test_a_generation_released_in_a_thread_closes_its_tools_on_the_event_loop() -> None:
    tool = _Tool("a")
    holder = [generation(1, tool)]
    succession = GenerationLifecycle(holder[0])
    succession.publish(generation(2))
    await asyncio.to_thread(holder.clear)
    gc.collect()
    await tool.over.wait()
    assert tool.ended == 1


async def test_a_tool_that_fails_to_close_does_not_keep_others_from_closing() -> None:
    stubborn, other = _Tool("a", fails=True), _Tool("b")
    succession = GenerationLifecycle(generation(1, stubborn, other))
    with pytest.raises(ExceptionGroup):
        await succession.aclose()
    assert (stubborn.ended, other.ended) == (1, 1)


async def test_a_tool_shared_by_two_agents_closes_once_after_the_last_agent() -> None:
    shared, own = _Tool("shared"), _Tool("own")
    open_tools = SharedToolUses()
    one = GenerationLifecycle(generation(1, shared, own), open_tools)
    other = GenerationLifecycle(generation(2, shared), open_tools)
    await one.aclose()
    assert (shared.ended, own.ended) == (0, 1)
    await other.aclose()
    assert (shared.ended, own.ended) == (1, 1)
