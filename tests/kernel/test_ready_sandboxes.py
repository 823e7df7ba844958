"""A kernel keeps sandboxes ready for the next calls, and none after a session or the kernel is closed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from handrail import Runtime, Tool, ToolSpec
from handrail.sandbox import tier_probe
from handrail.sandbox.start.ready_sandbox_pool import MAX_AGE_S
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="this machine cannot confine programs")


_of_others: set[str] = set()
"""Sandboxes that were there before a test, of another test in this process."""


@pytest.fixture(autouse=True)
def others() -> None:
    _of_others.clear()
    _of_others.update(waiting())


def waiting() -> set[str]:
    """The sandboxes that this process has started since the test began and that are still there."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                alive = "State:\tZ" not in Path(f"/proc/{child}/status").read_text()
                if alive and Path(f"/proc/{child}/comm").read_text() == "bwrap\n":
                    found.add(child)
            except OSError:
                continue
    return found - _of_others


async def appeared() -> set[str]:
    async with asyncio.timeout(300):
        while not (found := waiting()):
            await asyncio.sleep(0.01)
        return found


async def wait_until_none_ready() -> None:
    """Wait until none is ready, for less time than an unused one lasts."""
    async with asyncio.timeout(MAX_AGE_S / 2):
        while waiting():
            await asyncio.sleep(0.01)


@pytest.mark.proves("S-10")
async def test_the_next_call_takes_a_prepared_sandbox_and_closing_removes_it(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow bash", "allow shell.run"]) as kernel:
        first = await kernel.session()
        assert waiting() == set()  # nothing before the first call
        assert (await first.call("bash", {"command": "true"})).ok
        ready = await appeared()
        assert (await first.call("bash", {"command": "true"})).ok
        async with asyncio.timeout(300):
            while ready & waiting():  # it was taken
                await asyncio.sleep(0.01)
        await appeared()
        await first.close()
        await wait_until_none_ready()
        second = await kernel.session()
        assert (await second.call("bash", {"command": "true"})).ok
        await appeared()
    assert waiting() == set()


class FailingEndTool(Tool):
    """A tool whose end goes wrong."""

    spec = ToolSpec(id="test.breaks", description="Breaks.", side_effect="read", locks=())

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return None

    async def aclose(self) -> None:
        raise RuntimeError("it broke")


@pytest.mark.proves("S-10")
async def test_prepared_sandboxes_end_with_their_kernel_even_after_a_tool_fails_to_close(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup, match="did not end cleanly"):
        async with temporary_kernel(
            tmp_path, tools=[FailingEndTool()], rules=["allow bash", "allow shell.run"]
        ) as kernel:
            assert (await (await kernel.session()).call("bash", {"command": "true"})).ok
            await appeared()
    assert waiting() == set()
