"""The fixtures of the conformance suite, served by Handrail over streamable HTTP.

``python -m tests.mcp_suite.our_server --port N``: the fixture pack as a folder of tools, through the kernel.
``--gateway``: nothing of its own; the plain SDK server stands behind it as an upstream without a prefix.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.mcp_suite.task_tools import TASK_AFTER_S, TASK_RULES, TASK_TOOLS
from tests.mcp_suite.timed_tools import TIMED_TOOLS

from handrail import Tool, tool
from handrail.frontends.mcp.http.http_server import HttpFrontendSettings, serve_http
from handrail.frontends.mcp.tool_listing import McpFrontendSettings
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.scripted_kernel import temporary_kernel

ROOT = Path(__file__).resolve().parents[2]
PACK = Path(__file__).parent / "pack"
RULES = ("allow test_*", "allow json_schema_2020_12_tool", *TASK_RULES)
GATEWAY_RULES = ("allow mcp:plain:*",)


def triggers(offering: Path) -> tuple[list[Tool], list[LocalKernel]]:
    """The two fixtures that change what there is: a tool comes and goes, a prompt comes and goes. They are given the kernel
    when it is open."""
    kernels: list[LocalKernel] = []
    now: list[Tool] = []

    @tool(id="test_dynamic_tool", side_effect="read", locks=[])
    async def dynamic() -> str:
        """Come and go."""
        return "still there"

    @tool(id="test_trigger_tool_change", side_effect="read", locks=[])
    async def tool_change() -> str:
        """Change which tools there are."""
        now[:] = own if dynamic in now else [*own, dynamic]
        await kernels[0].reload_tools(now)
        return "another list of tools"

    @tool(id="test_trigger_prompt_change", side_effect="read", locks=[])
    async def prompt_change() -> str:
        """Change which prompts there are."""
        said = json.loads(offering.read_text())
        kept = [one for one in said["prompts"] if one["name"] != "test_dynamic_prompt"]
        if len(kept) == len(said["prompts"]):
            said_once = [{"role": "user", "content": "Come and go."}]
            kept.append({"name": "test_dynamic_prompt", "description": "Come and go.", "messages": said_once})
        offering.write_text(json.dumps({**said, "prompts": kept}))
        await kernels[0].reload_tools(now)
        return "another list of prompts"

    own: list[Tool] = [tool_change, prompt_change, *TIMED_TOOLS, *TASK_TOOLS]
    now += own
    return own, kernels


async def main(port: int, *, gateway: bool) -> None:
    serving, listening = (
        McpFrontendSettings(discovery="all", task_after_s=TASK_AFTER_S),
        HttpFrontendSettings("127.0.0.1", port),
    )
    with tempfile.TemporaryDirectory(prefix="handrail-conformance-") as made:
        folder = Path(made)
        if gateway:
            async with (
                temporary_kernel(folder, rules=GATEWAY_RULES) as kernel,
                kernel.mcp_servers.connect(
                    "plain",
                    command=sys.executable,
                    args=["-m", "tests.mcp_suite.plain_server"],
                    env={"PYTHONPATH": str(ROOT)},
                    folders=[str(ROOT)],
                    prefix="",
                    sampling=True,
                    elicitation=True,
                    roots=True,
                    side_effects={"*": "read"},
                ) as upstream,
            ):
                await upstream.approve_tool_definitions()
                await serve_http(kernel, serving, listening, print)
            return
        tools = folder / "config" / "tools"
        timed = (f"{one.spec.id}.json" for one in TIMED_TOOLS)
        shutil.copytree(PACK, tools, ignore=shutil.ignore_patterns("__pycache__", *timed))
        own, kernels = triggers(tools / "resources.json")
        async with temporary_kernel(folder, tools=own, rules=RULES) as kernel:
            kernels.append(kernel)
            await serve_http(kernel, serving, listening, print)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gateway", action="store_true")
    given = parser.parse_args()
    asyncio.run(main(given.port, gateway=given.gateway))
