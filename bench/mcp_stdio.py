"""One tool over MCP stdio: through our server, and as the same function on bare SDK servers; interleaved.

Every server is a process of its own, every call a round trip of the SDK's real client; the function is a
coroutine, which all three await on their event loop. Ours carries out all nine steps and keeps its log meanwhile.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ROUNDS, CALLS = 30, 20
BOUND = 1.3
STARTED = (sys.executable, __file__)
"""How each server is started."""
SERVERS = ("bare low-level Server", "bare MCPServer", "handrail")


async def add(a: int, b: int) -> dict[str, int]:
    """Add two numbers."""
    return {"sum": a + b}


async def serve_low_level() -> None:
    import json

    import mcp_types as types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }

    async def on_list(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(
            tools=[types.Tool(name="add", description="Add two numbers.", input_schema=schema)]
        )

    async def on_call(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        found = await add(**(params.arguments or {}))
        text = types.TextContent(type="text", text=json.dumps(found))
        return types.CallToolResult(content=[text], structured_content=found)

    server = Server("bare", on_list_tools=on_list, on_call_tool=on_call)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


def serve_high_level() -> None:
    from mcp.server import MCPServer

    server = MCPServer("bare")
    server.tool()(add)
    server.run("stdio")


async def serve_handrail(folder: Path) -> None:
    from handrail import open_kernel, tool
    from handrail.frontends.mcp.mcp_stdio_server import serve_stdio

    ours = tool(id="add", side_effect="read", locks=[])(add)
    (folder / "workspace").mkdir()
    async with open_kernel(
        folder / "workspace", tools=[ours], rules=["allow add"], state=folder / "state", config=None
    ) as kernel:
        await serve_stdio(kernel)


async def measure(folder: Path) -> dict[str, list[float]]:
    from mcp import Client, StdioServerParameters

    taken: dict[str, list[float]] = {name: [] for name in SERVERS}
    async with AsyncExitStack() as stack:
        clients: dict[str, Client] = {}
        for name in SERVERS:
            started = StdioServerParameters(command=STARTED[0], args=[*STARTED[1:], "--serve", name, str(folder)])
            clients[name] = await stack.enter_async_context(Client(started))
            for number in range(CALLS):
                result = await clients[name].call_tool("add", {"a": number, "b": 1})
                content = result.structured_content or {}
                if content.get("data", content) != {"sum": number + 1}:
                    raise SystemExit(f"{name} gave {result}")
        for _ in range(ROUNDS):
            for name, client in clients.items():
                for number in range(CALLS):
                    began = time.perf_counter()
                    await client.call_tool("add", {"a": number, "b": 1})
                    taken[name].append(time.perf_counter() - began)
    return taken


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        taken = asyncio.run(measure(Path(folder)))
    base = statistics.median(taken[SERVERS[0]])
    print(f"{'':24} {'ms p50':>8} {'ms p95':>8}   × {SERVERS[0]}")
    for name, times in taken.items():
        p50, p95 = statistics.median(times), statistics.quantiles(times, n=20)[-1]
        print(f"{name:24} {p50 * 1e3:8.2f} {p95 * 1e3:8.2f}   {p50 / base:.2f}")
    ratio = statistics.median(taken["handrail"]) / base
    print(f"\nhandrail: {ratio:.2f} × {SERVERS[0]} (bound {BOUND}): {'met' if ratio <= BOUND else 'MISSED'}")
    return 0 if ratio <= BOUND else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        if sys.argv[2] == SERVERS[0]:
            asyncio.run(serve_low_level())
        elif sys.argv[2] == SERVERS[1]:
            serve_high_level()
        else:
            asyncio.run(serve_handrail(Path(sys.argv[3])))
    else:
        sys.exit(main())
