"""The status of each tool with its reason, in the holder and in joined processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.upstream.scripted_mcp_servers import StdioServerProgram, approve_server_tools

from handrail import Runtime, Tool, ToolSpec, open_kernel, tool
from handrail.contract.tool.spec import ConfigKey
from handrail.contract.tool_generation import ToolStatus
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.scripted_kernel import temporary_kernel


@tool(id="mine.plain", side_effect="read", locks=[])
def plain() -> None:
    """Do nothing."""


@tool(id="mine.keyed", side_effect="read", locks=[], config={"station": ConfigKey("Its number")})
def keyed() -> None:
    """Do nothing."""


@tool(id="mine.set", side_effect="read", locks=[], config={"units": ConfigKey("Which", default="metric")})
def with_default() -> None:
    """Do nothing."""


class Later(Tool):
    spec = ToolSpec(id="mine.later", description="Do it.", side_effect="read", locks=(), cancellable="process")

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return None


@tool(id="t_echo", side_effect="read", locks=[])
def clashing() -> None:
    """Take a name that the server's tool has too."""


TOOLS = (plain, keyed, with_default, Later())


def of(statuses: Iterable[ToolStatus], tool_id: str, source: str = "") -> tuple[str, str]:
    (found,) = [one for one in statuses if one.tool == tool_id and (not source or one.source == source)]
    return found.status, found.reason


@pytest.mark.proves("R-11")
async def test_holder_and_joined_kernels_report_each_tool_status_with_its_reason(tmp_path: Path) -> None:
    server, state, config = StdioServerProgram(tmp_path), tmp_path / "state", tmp_path / "config" / "handrail.toml"
    settings = server.settings_toml("t") + "[tools.glob]\nenabled = false\n"
    how = {"tools": TOOLS, "state": state, "config": config}
    async with (
        temporary_kernel(tmp_path, tools=TOOLS, settings=settings) as kernel,
        open_kernel(tmp_path / "ws", **how) as joined,  # pyright: ignore[reportArgumentType]
    ):
        assert not isinstance(joined, LocalKernel)
        await kernel.components.upstreams["t"].ensure_listing_known()
        (source,) = kernel.components.upstreams.sources
        await kernel.components.publish_source_tools(source)
        for one in (kernel, joined):
            told = await one.tool_statuses()
            assert of(told, "read") == of(told, "mine.plain") == ("system", "")
            assert of(told, "mine.set") == ("connected", "")
            status, reason = of(told, "mine.keyed")
            assert status == "available" and 'add station = "…"' in reason
            status, reason = of(told, "mine.later")
            assert status == "error" and "worker process" in reason
            status, reason = of(told, "glob")
            assert status == "disabled" and '[tools."glob"] enabled = false' in reason
            status, reason = of(told, "t_echo")
            assert status == "quarantined" and "handrail sources review t" in reason
        await approve_server_tools(kernel, "t")
        for one in (kernel, joined):
            assert of(await one.tool_statuses(), "t_echo") == ("connected", "")


@pytest.mark.proves("R-11", "R-07")
async def test_a_tool_of_an_unreachable_server_is_offline_and_a_clashing_tool_is_quarantined(
    tmp_path: Path,
) -> None:
    server, state, config = StdioServerProgram(tmp_path), tmp_path / "state", tmp_path / "config" / "handrail.toml"
    async with temporary_kernel(tmp_path, settings=server.settings_toml("t")) as kernel:
        await approve_server_tools(kernel, "t")
        assert of(await kernel.tool_statuses(), "t_echo") == ("connected", "")
    gone = server.settings_toml("t").replace("command = ", 'command = "/nowhere/server"\n# ')
    async with (
        temporary_kernel(tmp_path, settings=gone) as kernel,
        open_kernel(tmp_path / "ws", state=state, config=config) as joined,
    ):
        for one in (kernel, joined):
            status, reason = of(await one.tool_statuses(), "", "t")
            assert status == "offline" and "/nowhere/server" in reason
    async with temporary_kernel(tmp_path, tools=[clashing], settings=server.settings_toml("t")) as kernel:
        told = await kernel.tool_statuses()
        assert of(told, "t_echo", "t")[0] == "quarantined" and "already the id" in of(told, "t_echo", "t")[1]
        assert ("system", "") in [(one.status, one.reason) for one in told if one.tool == "t_echo"]


@pytest.mark.proves("R-11")
async def test_tools_of_a_lost_server_are_offline_with_the_reason(tmp_path: Path) -> None:
    server, state, config = (
        StdioServerProgram(tmp_path, ["echo", "die"]),
        tmp_path / "state",
        tmp_path / "config" / "handrail.toml",
    )
    rules = ["allow mcp:t:*"]
    async with temporary_kernel(tmp_path, settings=server.settings_toml("t"), rules=rules) as kernel:
        await approve_server_tools(kernel, "t")
        async with open_kernel(tmp_path / "ws", state=state, config=config) as joined:
            assert of(await joined.tool_statuses(), "t_echo") == ("connected", "")
            session = await kernel.session()
            server.set_plan(["echo", "die"], dies_at_start=True)
            assert not (await session.call("t_die", {})).ok
            while kernel.components.upstreams["t"].state != "waiting":
                await asyncio.sleep(0)
            for one in (kernel, joined):
                status, reason = of(await one.tool_statuses(), "t_echo")
                assert status == "offline" and "exit code" in reason and "next attempt" in reason
