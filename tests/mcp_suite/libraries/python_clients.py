"""``python python_clients.py LIBRARY JSON``: seven checks of one client library for Python, on a running or started server.

It needs only Python and the library. The JSON object has ``command`` or ``url``, the ``workspace``, and ``approve``, the command
that approves a call. It prints a JSON object with what each check found: ``ok``, ``parked``, ``at close``, ``-``, or the fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

WAIT_S = 60.0
IMAGE = re.compile(r"iVBORw0KGgo|image/png|PngImageFile|ImageContent|<Image|Image\(|image.{0,40}bytes")
Call = Callable[[str, dict[str, Any]], Awaitable[object]]


@dataclass(slots=True)
class Server:
    """A server to connect to.

    :param command: starts it on stdin and stdout; empty if it serves at ``url``
    """

    command: list[str]
    url: str | None
    workspace: Path
    approve: list[str]

    @property
    def entry(self) -> dict[str, Any]:
        """The server as most configurations have it."""
        if self.url is not None:
            return {"url": self.url}
        return {"command": self.command[0], "args": self.command[1:]}


@dataclass(slots=True)
class Seen:
    """The values that the library passed to its callbacks."""

    asked: list[object] = field(default_factory=list[object])
    progress: list[object] = field(default_factory=list[object])

    async def report(self, *told: object, **more: object) -> None:
        self.progress.append((told, more))


@dataclass(slots=True)
class Opened:
    """A connected library: the names that it lists, and a way to call them."""

    names: list[str]
    call: Call


Open = Callable[[Server, Seen], Any]


def names_of(tools: Any) -> list[str]:
    return [str(getattr(one, "name", one)) for one in tools]


def accept_once(seen: Seen, module: str) -> Any:
    """Return a callback of the SDK that answers each form with ``once``."""
    types = import_module(module)

    async def answer(*given: Any, **_more: Any) -> Any:
        seen.asked.append(given)
        return types.ElicitResult(action="accept", content={"decision": "once"})

    return answer


@asynccontextmanager
async def open_sdk_session(server: Server, seen: Seen) -> AsyncGenerator[Any]:
    """A session of the official SDK, version 1."""
    mcp = import_module("mcp")
    async with AsyncExitStack() as stack:
        if server.url is None:
            stdio = import_module("mcp.client.stdio")
            parameters = mcp.StdioServerParameters(**server.entry)
            streams = await stack.enter_async_context(stdio.stdio_client(parameters))
        else:
            http = import_module("mcp.client.streamable_http")
            streams = await stack.enter_async_context(http.streamable_http_client(server.url))
        asks = accept_once(seen, "mcp.types")
        session = await stack.enter_async_context(mcp.ClientSession(*streams[:2], elicitation_callback=asks))
        await session.initialize()
        yield session


@asynccontextmanager
async def open_mcp1(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
    """The official SDK, version 1."""
    async with open_sdk_session(server, seen) as session:

        async def call(name: str, arguments: dict[str, Any]) -> object:
            return await session.call_tool(name, arguments, progress_callback=seen.report)

        yield Opened(names_of((await session.list_tools()).tools), call)


def open_mcp2(mode: str) -> Open:
    """The official SDK, version 2, in one of its modes."""

    @asynccontextmanager
    async def opened(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
        mcp = import_module("mcp")
        there = server.url or mcp.StdioServerParameters(**server.entry)
        asks = accept_once(seen, "mcp.types")
        async with mcp.Client(there, mode=mode, elicitation_callback=asks, read_timeout_seconds=WAIT_S) as client:

            async def call(name: str, arguments: dict[str, Any]) -> object:
                return await client.call_tool(name, arguments, progress_callback=seen.report)

            yield Opened(names_of((await client.list_tools()).tools), call)

    return opened


@asynccontextmanager
async def open_fastmcp(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
    """FastMCP's client."""
    fastmcp = import_module("fastmcp")

    async def answer(*given: Any) -> Any:
        seen.asked.append(given)
        return {"decision": "once"}

    there = server.url or {"mcpServers": {"handrail": server.entry}}
    async with fastmcp.Client(there, elicitation_handler=answer, progress_handler=seen.report) as client:

        async def call(name: str, arguments: dict[str, Any]) -> object:
            return await client.call_tool(name, arguments)

        yield Opened(names_of(await client.list_tools()), call)


@asynccontextmanager
async def open_langchain(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
    """langchain-mcp-adapters as its first example has it: one connection for the list, and one for each call."""
    client_module = import_module("langchain_mcp_adapters.client")
    callbacks = import_module("langchain_mcp_adapters.callbacks").Callbacks(
        on_progress=seen.report, on_elicitation=accept_once(seen, "mcp.types")
    )
    entry = {**server.entry, "transport": "stdio" if server.url is None else "streamable_http"}
    client = client_module.MultiServerMCPClient({"handrail": entry}, callbacks=callbacks)
    tools = {tool.name: tool for tool in await client.get_tools()}

    async def call(name: str, arguments: dict[str, Any]) -> object:
        return await tools[name].ainvoke({"type": "tool_call", "id": "1", "name": name, "args": arguments})

    yield Opened(list(tools), call)


@asynccontextmanager
async def open_pydantic_ai(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
    """The toolset of pydantic-ai."""
    module = import_module("pydantic_ai.mcp")

    async def answer(*given: Any) -> Any:
        seen.asked.append(given)
        return {"decision": "once"}

    there: Any = server.url
    if there is None:
        transports = import_module("fastmcp.client.transports")
        there = transports.StdioTransport(server.command[0], server.command[1:])
    toolset = module.MCPToolset(there, elicitation_handler=answer, progress_handler=seen.report)
    async with toolset:
        yield Opened(names_of(await toolset.list_tools()), toolset.direct_call_tool)


@asynccontextmanager
async def open_openai_agents(server: Server, _seen: Seen) -> AsyncGenerator[Opened]:
    """The servers of openai-agents."""
    module = import_module("agents.mcp")
    made = module.MCPServerStdio if server.url is None else module.MCPServerStreamableHttp
    async with made(server.entry, client_session_timeout_seconds=WAIT_S) as client:
        yield Opened(names_of(await client.list_tools()), client.call_tool)


@asynccontextmanager
async def open_smolagents(server: Server, _seen: Seen) -> AsyncGenerator[Opened]:
    """The client of smolagents, which is mcpadapt's."""
    smolagents = import_module("smolagents")
    entry: Any = {"url": server.url, "transport": "streamable-http"}
    if server.url is None:
        entry = import_module("mcp").StdioServerParameters(**server.entry)
    more = {"client_session_timeout_seconds": WAIT_S, "connect_timeout": int(WAIT_S)}
    client = await asyncio.to_thread(smolagents.MCPClient, entry, structured_output=False, adapter_kwargs=more)
    tools = {tool.name: tool for tool in client.get_tools()}

    async def call(name: str, arguments: dict[str, Any]) -> object:
        return await asyncio.to_thread(tools[name], **arguments)

    yield Opened(list(tools), call)
    await asyncio.to_thread(client.disconnect)


@asynccontextmanager
async def open_mcp_use(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
    """The client of mcp-use."""
    module = import_module("mcp_use")
    client = module.MCPClient(
        {"mcpServers": {"handrail": server.entry}}, elicitation_callback=accept_once(seen, "mcp.types")
    )
    session = await client.create_session("handrail")
    yield Opened(names_of(await session.list_tools()), session.call_tool)
    await client.close_all_sessions()


@asynccontextmanager
async def open_autogen(server: Server, _seen: Seen) -> AsyncGenerator[Opened]:
    """The workbench of autogen."""
    module = import_module("autogen_ext.tools.mcp")
    made = module.StdioServerParams if server.url is None else module.StreamableHttpServerParams
    more = {"read_timeout_seconds": WAIT_S} if server.url is None else {}
    async with module.McpWorkbench(made(**server.entry, **more)) as bench:
        yield Opened([tool["name"] for tool in await bench.list_tools()], bench.call_tool)


@asynccontextmanager
async def open_llama_index(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
    """The basic client of llama-index, which connects for each call."""
    module = import_module("llama_index.tools.mcp")
    there = (server.url,) if server.url is not None else (server.command[0], server.command[1:])
    client = module.BasicMCPClient(*there, timeout=WAIT_S)

    async def call(name: str, arguments: dict[str, Any]) -> object:
        return await client.call_tool(name, arguments, progress_callback=seen.report)

    yield Opened(names_of((await client.list_tools()).tools), call)


@asynccontextmanager
async def open_agno(server: Server, _seen: Seen) -> AsyncGenerator[Opened]:
    """The tools of agno."""
    module = import_module("agno.tools.mcp")
    stdio = server.url is None
    entry: dict[str, Any] = {"url": server.url, "transport": "streamable-http"}
    if stdio:
        entry = {"server_params": import_module("mcp").StdioServerParameters(**server.entry), "transport": "stdio"}
    async with module.MCPTools(**entry, timeout_seconds=int(WAIT_S)) as tools:

        async def call(name: str, arguments: dict[str, Any]) -> object:
            return await tools.functions[name].entrypoint(**arguments)

        yield Opened(list(tools.functions), call)


@asynccontextmanager
async def open_strands(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
    """The client of strands."""
    module = import_module("strands.tools.mcp")

    def connect() -> Any:
        if server.url is None:
            stdio = import_module("mcp.client.stdio")
            return stdio.stdio_client(import_module("mcp").StdioServerParameters(**server.entry))
        return import_module("mcp.client.streamable_http").streamable_http_client(server.url)

    client = module.MCPClient(
        connect, elicitation_callback=accept_once(seen, "mcp.types"), progress_callback=seen.report
    )
    await asyncio.to_thread(client.start)
    listed = await asyncio.to_thread(client.list_tools_sync)

    async def call(name: str, arguments: dict[str, Any]) -> object:
        return await client.call_tool_async("1", name, arguments)

    yield Opened([tool.tool_name for tool in listed], call)
    await asyncio.to_thread(client.stop, None, None, None)


@asynccontextmanager
async def open_adk(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
    """The toolset of Google's agent development kit."""
    module = import_module("google.adk.tools.mcp_tool")
    manager = import_module("google.adk.tools.mcp_tool.mcp_session_manager")
    if server.url is None:
        parameters = import_module("mcp").StdioServerParameters(**server.entry)
        there = manager.StdioConnectionParams(server_params=parameters, timeout=WAIT_S)
    else:
        there = manager.StreamableHTTPConnectionParams(url=server.url, timeout=WAIT_S)
    toolset = module.McpToolset(
        connection_params=there,
        elicitation_callback=accept_once(seen, "mcp.types"),
        progress_callback=seen.report,
    )
    tools = {tool.name: tool for tool in await toolset.get_tools()}

    async def call(name: str, arguments: dict[str, Any]) -> object:
        context = import_module("unittest.mock").MagicMock()
        return await tools[name].run_async(args=arguments, tool_context=context)

    yield Opened(list(tools), call)
    await toolset.close()


@asynccontextmanager
async def open_crewai(server: Server, _seen: Seen) -> AsyncGenerator[Opened]:
    """The server adapter of CrewAI's tools."""
    module = import_module("crewai_tools")
    entry: Any = {"url": server.url, "transport": "streamable-http"}
    if server.url is None:
        entry = import_module("mcp").StdioServerParameters(**server.entry)
    adapter = await asyncio.to_thread(module.MCPServerAdapter, entry, connect_timeout=int(WAIT_S))
    tools = {tool.name: tool for tool in adapter.tools}

    async def call(name: str, arguments: dict[str, Any]) -> object:
        return await asyncio.to_thread(tools[name].run, **arguments)

    yield Opened(list(tools), call)
    await asyncio.to_thread(adapter.stop)


@asynccontextmanager
async def open_haystack(server: Server, _seen: Seen) -> AsyncGenerator[Opened]:
    """The toolset of Haystack."""
    module = import_module("haystack_integrations.tools.mcp")
    if server.url is None:
        there = module.StdioServerInfo(command=server.command[0], args=server.command[1:])
    else:
        there = module.StreamableHttpServerInfo(url=server.url)

    def connect() -> Any:
        return module.MCPToolset(
            server_info=there, connection_timeout=WAIT_S, invocation_timeout=WAIT_S, eager_connect=True
        )

    toolset = await asyncio.to_thread(connect)
    tools = {tool.name: tool for tool in toolset}

    async def call(name: str, arguments: dict[str, Any]) -> object:
        return await asyncio.to_thread(tools[name].invoke, **arguments)

    yield Opened(list(tools), call)
    await asyncio.to_thread(toolset.close)


@asynccontextmanager
async def open_agent_framework(server: Server, _seen: Seen) -> AsyncGenerator[Opened]:
    """The tools of Microsoft's agent framework."""
    module = import_module("agent_framework")
    if server.url is None:
        made = module.MCPStdioTool("handrail", command=server.command[0], args=server.command[1:])
    else:
        made = module.MCPStreamableHTTPTool("handrail", url=server.url)
    async with made as tool:

        async def call(name: str, arguments: dict[str, Any]) -> object:
            return await tool.call_tool(name, **arguments)

        yield Opened(names_of(tool.functions), call)


@asynccontextmanager
async def open_semantic_kernel(server: Server, _seen: Seen) -> AsyncGenerator[Opened]:
    """The plugins of Semantic Kernel."""
    module = import_module("semantic_kernel.connectors.mcp")
    if server.url is None:
        made = module.MCPStdioPlugin("handrail", command=server.command[0], args=server.command[1:])
    else:
        made = module.MCPStreamableHttpPlugin("handrail", url=server.url)
    async with made as plugin:
        listed = await plugin.session.list_tools()

        async def call(name: str, arguments: dict[str, Any]) -> object:
            return [one.model_dump() for one in await plugin.call_tool(name, **arguments)]

        yield Opened([name for name in names_of(listed.tools) if hasattr(plugin, name)], call)


@asynccontextmanager
async def open_dspy(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
    """The tools of DSPy, over the SDK's session."""
    dspy = import_module("dspy")
    mcp = import_module("mcp")
    there = server.url or mcp.StdioServerParameters(**server.entry)
    async with mcp.Client(there, elicitation_callback=accept_once(seen, "mcp.types")) as client:
        listed = (await client.list_tools()).tools
        tools = {tool.name: dspy.Tool.from_mcp_tool(client, tool) for tool in listed}

        async def call(name: str, arguments: dict[str, Any]) -> object:
            return await tools[name].acall(**arguments)

        yield Opened(list(tools), call)


@asynccontextmanager
async def open_camel(server: Server, _seen: Seen) -> AsyncGenerator[Opened]:
    """The client of CAMEL."""
    module = import_module("camel.utils.mcp_client")
    async with module.MCPClient({**server.entry, "timeout": WAIT_S}) as client:
        yield Opened([tool.get_function_name() for tool in client.get_tools()], client.call_tool)


@asynccontextmanager
async def open_beeai(server: Server, seen: Seen) -> AsyncGenerator[Opened]:
    """The tools of BeeAI, over the SDK's session."""
    module = import_module("beeai_framework.tools.mcp")
    async with open_sdk_session(server, seen) as session:
        tools = {tool.name: tool for tool in await module.MCPTool.from_session(session)}

        async def call(name: str, arguments: dict[str, Any]) -> object:
            return (await tools[name].run(arguments)).get_text_content()

        yield Opened(list(tools), call)


@asynccontextmanager
async def open_griptape(server: Server, _seen: Seen) -> AsyncGenerator[Opened]:
    """The tool of Griptape, which connects for each call."""
    module = import_module("griptape.tools.mcp.tool")
    entry = {**server.entry, "transport": "stdio" if server.url is None else "streamable_http"}
    tool = await asyncio.to_thread(module.MCPTool, name="Handrail", connection=entry)
    names = [found.name for found in tool.activities()]

    async def call(name: str, arguments: dict[str, Any]) -> object:
        return (await tool._run_activity(name, arguments)).value

    yield Opened(names, call)


LIBRARIES: Mapping[str, Open] = {
    "mcp1": open_mcp1,
    "mcp2": open_mcp2("auto"),
    "mcp2-legacy": open_mcp2("legacy"),
    "fastmcp": open_fastmcp,
    "langchain": open_langchain,
    "pydantic-ai": open_pydantic_ai,
    "openai-agents": open_openai_agents,
    "smolagents": open_smolagents,
    "mcp-use": open_mcp_use,
    "autogen": open_autogen,
    "llama-index": open_llama_index,
    "agno": open_agno,
    "strands": open_strands,
    "adk": open_adk,
    "crewai": open_crewai,
    "haystack": open_haystack,
    "agent-framework": open_agent_framework,
    "semantic-kernel": open_semantic_kernel,
    "dspy": open_dspy,
    "camel": open_camel,
    "beeai": open_beeai,
    "griptape": open_griptape,
}


def running(marker: str) -> bool:
    """Return whether a program with this word in its command line runs on the machine."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in file.read_bytes().split(b"\0"):
                return True
    return False


async def until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition of another process, which nothing else reports."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.02)
    return True


async def text_of(call: Call, name: str, arguments: dict[str, Any]) -> str:
    """Return a result, or an exception, as text."""
    try:
        result: Any = await asyncio.wait_for(call(name, arguments), WAIT_S)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # some print a picture only as a type
        return f"{result!r} {result.model_dump_json()}"
    return repr(result)


async def check(opened: Opened, server: Server, seen: Seen, found: dict[str, str]) -> str:
    """Run the checks that need an open connection, and return the word of the program to be cancelled."""
    plain = {name.rpartition("handrail_")[2]: name for name in opened.names}
    missing = {"read", "bash", "call_tool", "test_tool_with_progress"} - plain.keys()
    found["list"] = f"without {sorted(missing)}" if missing else "ok"

    async def text(name: str, arguments: dict[str, Any]) -> str:
        return await text_of(opened.call, plain.get(name, name), arguments)

    said = await text("read", {"path": "notes.txt"})
    found["call"] = "ok" if "forty-two" in said else said
    said = await text("read", {"path": "dot.png"})
    found["image"] = "ok" if IMAGE.search(said) else said
    said = await text("read", {"path": "absent.txt"})
    found["error"] = "ok" if "absent.txt" in said and "exist" in said else said
    wanted = {"path": f"made-{time.time_ns()}.txt", "content": "made"}
    said = await text("write", wanted)
    if (server.workspace / wanted["path"]).exists():
        found["ask"] = "ok" if seen.asked else "written without a question"
    elif (waiting := re.search(r"apr_\w+", said)) is None:
        found["ask"] = said
    else:
        approved = await asyncio.to_thread(
            subprocess.run, [*server.approve, waiting[0], "--once"], capture_output=True, text=True, check=False
        )
        said = await text("write", wanted)
        again = "rule only" if "was withdrawn" in approved.stderr else f"{approved.stderr}{said}"
        found["ask"] = "parked" if (server.workspace / wanted["path"]).exists() else again
    said = await text("test_tool_with_progress", {})
    works = "three times" in said
    found["progress"] = ("ok" if seen.progress else "-") if works else said
    marker = f"60.{time.time_ns() % 10**9}"
    task = asyncio.ensure_future(text("bash", {"command": f"tail -s {marker} -f /dev/null"}))
    if not await until(lambda: running(marker) or task.done(), WAIT_S) or task.done():
        found["cancel"] = f"the program did not start: {task.result() if task.done() else ''}"
        return ""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await asyncio.wait_for(task, 5)
    found["cancel"] = "ok" if await until(lambda: not running(marker), 3) else ""
    return marker


async def main(library: str, server: Server) -> None:
    found: dict[str, str] = {}
    seen, marker = Seen(), ""
    try:
        connection = LIBRARIES[library](server, seen)
        opened = await connection.__aenter__()
        marker = await check(opened, server, seen, found)
        async with asyncio.timeout(20):
            await connection.__aexit__(None, None, None)
    except BaseException as error:
        traceback.print_exc()
        found["close" if "cancel" in found else "list"] = f"{type(error).__name__}: {error}"
    if found.get("cancel") == "":
        gone = await until(lambda: not running(marker), 10)
        found["cancel"] = "at close" if gone else "the program runs on after the client has closed"
    print(json.dumps(found), flush=True)
    os._exit(0)  # a thread that waits for an answer would keep the process


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    there = Server(given["command"], given["url"], Path(given["workspace"]), given["approve"])
    asyncio.run(main(sys.argv[1], there))
