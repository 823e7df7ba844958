"""Tools are looked through beside the calls that go on, and what a spec was found to be is not found out again."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from handrail.contract.runtime import Runtime
from handrail.contract.spec import ToolSpec
from handrail.contract.tool import Tool
from handrail.registry.checking import checked
from handrail.testing.kernels import temporary_kernel


@pytest.mark.proves("R-06")
async def test_calls_are_carried_out_while_the_next_generation_is_made() -> None:
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
        reloading = asyncio.create_task(kernel.reload(given))
        try:
            await asyncio.to_thread(begun.wait)
            assert (await session.call("todo", {})).ok and "slow" not in kernel.generation.entries
        finally:
            go_on.set()
        assert (await reloading).added == ("slow",)
        assert (await session.call("slow", {})).data == "done"


def test_a_spec_is_looked_at_once_and_another_one_with_its_name_anew() -> None:
    spec = ToolSpec(id="a", description="Does a.", side_effect="read", locks=())
    assert checked(spec) is checked(spec) and checked(spec).definition_hash == spec.definition_hash
    other = ToolSpec(id="a", description="", side_effect="read", locks=())
    assert checked(other).problems and checked(other) is not checked(other), "what is faulty is not kept"
