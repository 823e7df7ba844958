"""A tool of an upstream MCP server: called directly by the SDK's client, through a kernel, by a client outside through the
gateway, and by one through FastMCP's proxy.

The upstream is a bare SDK server on stdio with one coroutine that only reads; directly it is started by the SDK's own
client, behind Handrail in a sandbox. Rounds are interleaved. Then, how soon the first ``tools/list`` is answered with 50
upstreams of 40 tools each, all of which were listed before, beside a bare SDK server with one tool.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp import StdioServerParameters

ROUNDS, CALLS = 30, 20
STARTS = 7
UPSTREAMS, TOOLS = 50, 40
IN_PROCESS, OUTSIDE, FIRST_LIST = 1.25, 2.3, 1.3
DIRECT, OURS, THROUGH = "SDK client, direct", "session.call", "outside client, through handrail"
PROXY = "outside client, through FastMCP's proxy"
BARE, MANY = "bare SDK server, 1 tool", f"handrail mcp, {UPSTREAMS} x {TOOLS} tools"
ROOT = Path(__file__).resolve().parent
STARTED = (sys.executable, str(ROOT / "mcp_gateway.py"))
HANDRAIL = (sys.executable, "-m", "handrail")


async def serve_bare() -> None:
    import mcp_types as types
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server

    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    add = types.Tool(name="add", description="Add two numbers.", input_schema=schema)

    async def on_list(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[add])

    async def on_call(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        given = params.arguments or {}
        text = types.TextContent(type="text", text=json.dumps({"sum": given["a"] + given["b"]}))
        return types.CallToolResult(content=[text])

    server = Server("bare", on_list_tools=on_list, on_call_tool=on_call)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())


def configured(folder: Path, names: list[str]) -> Path:
    """A configuration with these servers, each the bare one."""
    command = [*STARTED, "--serve", "bare"]
    lines: list[str] = []
    for name in names:
        lines += [f"[mcp.servers.{name}]", f"command = {json.dumps(command[0])}", f"args = {json.dumps(command[1:])}"]
        lines += [
            f"folders = {json.dumps([str(ROOT)])}",
            'side_effects = { "*" = "read" }',
            "connect_timeout_ms = 60000",
        ]
    file = folder / "config" / "handrail.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    (folder / "workspace").mkdir(exist_ok=True)
    file.write_text("\n".join(lines))
    return file


def opened(folder: Path, file: Path) -> Any:
    from handrail import open_kernel

    return open_kernel(
        folder / "workspace", rules=["allow mcp:*:*"], state=folder / "state", config=file, frontend="bench"
    )


async def serve_gateway(folder: Path) -> None:
    from handrail.frontends.mcp.mcp_stdio_server import serve_stdio
    from handrail.frontends.mcp.tool_listing import McpFrontendSettings

    async with opened(folder, folder / "config" / "handrail.toml") as kernel:
        await serve_stdio(kernel, McpFrontendSettings(discovery="all"))


async def serve_proxy() -> None:
    """FastMCP's own way to put one server before another, as its documentation has it."""
    from fastmcp.client.transports import StdioTransport
    from fastmcp.server import create_proxy

    upstream = StdioTransport(STARTED[0], [*STARTED[1:], "--serve", "bare"], keep_alive=True)
    await create_proxy(upstream, name="proxy").run_async("stdio", show_banner=False)


async def approved(folder: Path, name: str) -> None:
    from handrail.registry.definition_pins import StoredPins, ThirdPartyDefinition

    async with opened(folder, folder / "config" / "handrail.toml") as kernel:
        upstreams = kernel.components.upstreams
        await upstreams[name].ensure_listing_known()
        (source,) = (one for one in upstreams.sources if one.name == name)
        await kernel.components.publish_source_tools(source)
        found = [
            ThirdPartyDefinition.from_spec(entry.spec)
            for entry in kernel.generation.entries.values()
            if entry.third_party is not None and entry.third_party.name == name
        ]
        StoredPins(kernel.components.store.folders.state).approve(name, found)


def parameters(*command: str) -> StdioServerParameters:
    from mcp import StdioServerParameters

    return StdioServerParameters(command=command[0], args=list(command[1:]))


async def calls(folder: Path) -> dict[str, list[float]]:
    from mcp import Client

    here, there = folder / "here", folder / "there"
    for place in (here, there):
        configured(place, ["bare"])
        await approved(place, "bare")
    async with AsyncExitStack() as stack:
        bare = parameters(*STARTED, "--serve", "bare")
        behind = parameters(*STARTED, "--serve", "gateway", str(there))
        direct = await stack.enter_async_context(Client(bare))
        outside = await stack.enter_async_context(Client(behind, read_timeout_seconds=60))
        kernel = await stack.enter_async_context(opened(here, here / "config" / "handrail.toml"))
        session = await kernel.session()

        async def by_client(client: Client, name: str, number: int) -> str:
            result = await client.call_tool(name, {"a": number, "b": 1})
            return str(getattr(result.content[0], "text", result))

        async def by_session(number: int) -> str:
            return str((await session.call("bare_add", {"a": number, "b": 1})).data)

        ways = {
            DIRECT: lambda number: by_client(direct, "add", number),
            OURS: by_session,
            THROUGH: lambda number: by_client(outside, "bare_add", number),
        }
        if find_spec("fastmcp") is None:
            print("bench: the proxy is left out: fastmcp is not installed (bench/requirements.txt)", file=sys.stderr)
        else:
            proxy = parameters(*STARTED, "--serve", "proxy")
            beside = await stack.enter_async_context(Client(proxy, read_timeout_seconds=60))
            ways[PROXY] = lambda number: by_client(beside, "add", number)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for round_ in range(ROUNDS + 1):
            for name, way in ways.items():
                for number in range(CALLS):
                    began = time.perf_counter()
                    answer = await way(number)
                    took = time.perf_counter() - began
                    if json.loads(answer) != {"sum": number + 1}:
                        raise SystemExit(f"{name} gave {answer}")
                    if round_:
                        taken[name].append(took)
    return taken


async def first_lists(folder: Path) -> dict[str, list[float]]:
    from mcp import Client

    from handrail.registry.definition_pins import StoredPins, ThirdPartyDefinition
    from handrail.upstream.mcp_tool import build_tool_spec
    from handrail.upstream.server_config_loader import load_enabled_servers as servers_in
    from handrail.upstream.server_definition import ServerListing, write_cached_listing

    names = [f"server{number}" for number in range(UPSTREAMS)]
    file = configured(folder, names)
    from handrail import config

    schema = {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}
    for definition in servers_in(config.load_configuration(file)):
        items = tuple(
            {
                "name": f"tool_{number}",
                "description": f"What {definition.name} knows of {number}.",
                "inputSchema": schema,
            }
            for number in range(TOOLS)
        )
        kept = ServerListing(tools=items, capabilities={"tools": {}}, protocol="2025-11-25")
        state = folder / "state"
        state.mkdir(mode=0o700, exist_ok=True)
        write_cached_listing(state, definition.name, definition.definition_hash, kept)
        specs = [build_tool_spec(item, definition, definition.requires) for item in items]
        StoredPins(state).approve(definition.name, [ThirdPartyDefinition.from_spec(spec) for spec in specs])
    taken: dict[str, list[float]] = {BARE: [], MANY: []}
    served = [*HANDRAIL, "mcp", "--discovery", "all", "--workspace", str(folder / "workspace")]
    ways = {
        BARE: [*STARTED, "--serve", "bare"],
        MANY: [*served, "--state", str(folder / "state"), "--config", str(file)],
    }
    for _ in range(STARTS + 1):
        for name, command in ways.items():
            began = time.perf_counter()
            async with Client(parameters(*command), mode="legacy", read_timeout_seconds=120) as client:
                found = 0
                page = await client.list_tools()
                took = time.perf_counter() - began
                found = len(page.tools)
            if name == MANY and found < UPSTREAMS * TOOLS and page.next_cursor is None:
                raise SystemExit(f"{found} tools were listed, expected {UPSTREAMS * TOOLS}")
            taken[name].append(took)
    return {name: times[1:] for name, times in taken.items()}


def told(taken: dict[str, list[float]], base: str, bounds: dict[str, float]) -> bool:
    floor = statistics.median(taken[base])
    print(f"{'':40} {'ms p50':>8} {'ms min':>8}   x {base}")
    for name, times in taken.items():
        print(
            f"{name:40} {statistics.median(times) * 1e3:8.2f} {min(times) * 1e3:8.2f}   {statistics.median(times) / floor:.2f}"
        )
    met = True
    for name, bound in bounds.items():
        ratio = statistics.median(taken[name]) / floor
        met = met and ratio <= bound
        print(f"{name}: {ratio:.2f} x {base} (bound {bound}): {'met' if ratio <= bound else 'MISSED'}")
    print()
    return met


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        one = told(asyncio.run(calls(Path(folder))), DIRECT, {OURS: IN_PROCESS, THROUGH: OUTSIDE})
    with tempfile.TemporaryDirectory() as folder:
        other = told(asyncio.run(first_lists(Path(folder))), BARE, {MANY: FIRST_LIST})
    return 0 if one and other else 1


if __name__ == "__main__":
    if sys.argv[1:3] == ["--serve", "bare"]:
        asyncio.run(serve_bare())
    elif sys.argv[1:3] == ["--serve", "proxy"]:
        asyncio.run(serve_proxy())
    elif sys.argv[1:3] == ["--serve", "gateway"]:
        asyncio.run(serve_gateway(Path(sys.argv[3])))
    else:
        sys.exit(main())
