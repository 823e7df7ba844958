"""Tools are validated in parallel to running calls, and a validated spec is not validated again."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.requires import NO_REQUIREMENTS, PathVariables
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool, check_spec
from handrail.contract.tool_generation import DiscoveredTool, SourceContents, SourceRank
from handrail.policy.call_targets import agent_layer
from handrail.registry.generation_lifecycle import GenerationLifecycle
from handrail.registry.generation_loader import LoadCache
from handrail.session.session_context import AgentGenerations
from handrail.testing.scripted_kernel import temporary_kernel


@pytest.mark.proves("R-06")
async def test_calls_run_while_the_next_generation_loads() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Tool):
        spec = ToolSpec(id="slow", description="Takes long to be made.", side_effect="read", locks=())

        def __init__(self) -> None:
            begun.set()
            go_on.wait()

        async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
            return "done"

    given: list[Any] = [Slow]
    async with temporary_kernel(rules=["allow *"]) as kernel:
        session = await kernel.session()
        reloading = asyncio.create_task(kernel.reload_tools(given))
        try:
            await asyncio.to_thread(begun.wait)
            assert (await session.call("todo", {})).ok and "slow" not in kernel.generation.entries
        finally:
            go_on.set()
        assert (await reloading).added == ("slow",)
        assert (await session.call("slow", {})).data == "done"


def test_an_unchanged_spec_is_checked_once_and_a_changed_one_again() -> None:
    spec = ToolSpec(id="a", description="Does a.", side_effect="read", locks=())
    assert check_spec(spec) is check_spec(spec) and check_spec(spec).definition_hash == spec.definition_hash
    other = ToolSpec(id="a", description="", side_effect="read", locks=())
    assert check_spec(other).problems and check_spec(other) is not check_spec(other), "what is faulty is not kept"


class _Held:
    """A third-party source that waits at a chosen point."""

    def __init__(self, name: str) -> None:
        self.name, self.is_third_party = name, True
        self.rank: SourceRank = "package"
        self.tools: tuple[Tool, ...] = ()
        self.looks = 0
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def load(self) -> SourceContents:
        self.looks += 1
        self.begun.set()
        self.go_on.wait()
        return SourceContents(tuple(DiscoveredTool(tool, self.name) for tool in self.tools), name=self.name)


@pytest.mark.proves("R-06")
async def test_sources_that_change_during_a_reload_are_reloaded_together(tmp_path: Path) -> None:
    sources = {name: _Held(name) for name in ("one", "two", "three")}
    async with temporary_kernel(tmp_path) as kernel:
        before = kernel.own_context.generations
        shelf = AgentGenerations(
            replace(before.sources, extra_sources=lambda: list(sources.values()), cache=LoadCache()),
            GenerationLifecycle(kernel.generation),
            lambda generations: agent_layer("default", NO_REQUIREMENTS, (), PathVariables()),
            count(2).__next__,
            lambda told: None,
        )
        try:
            await shelf.reload_all_sources()
            looks = {name: one.looks for name, one in sources.items()}
            sources["one"].begun.clear()
            sources["one"].go_on.clear()
            for name, one in sources.items():
                one.tools = (Named(f"{name}_tool"),)
            first = asyncio.create_task(shelf.reload_changed_sources([sources["one"]]))
            await asyncio.to_thread(sources["one"].begun.wait)
            others = [
                asyncio.create_task(shelf.reload_changed_sources([sources[name]])) for name in ("two", "three", "two")
            ]
            await asyncio.sleep(0)
            others[0].cancel()  # who gives up keeps nobody from what was begun
            sources["one"].go_on.set()
            assert (await first).added == ("one_tool",)
            assert (await others[1]).added == (await others[2]).added == ("two_tool", "three_tool")
            assert {name: one.looks - looks[name] for name, one in sources.items()} == dict.fromkeys(sources, 1)
            assert shelf.succession.current.number == 4
        finally:
            sources["one"].go_on.set()
            await shelf.succession.aclose()


class Named(Tool):
    def __init__(self, tool_id: str) -> None:
        self.spec = ToolSpec(id=tool_id, description="Does it.", side_effect="read", locks=())

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return None
