"""Tools with everything that an MCP server transports, a user who fills in forms, and both eras of servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mcp.types as types
import pytest
from mcp import Client

from handrail import ToolError, tool
from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.services.client_services import RequestToClient
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.tool_protocol import Tool
from handrail.frontends.mcp.client_manager import McpClientManager
from handrail.frontends.mcp.mcp_server import build_mcp_server
from handrail.frontends.mcp.tool_listing import McpFrontendSettings
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.scripted_kernel import temporary_kernel

Era = Literal["legacy", "auto"]
ERAS = pytest.mark.parametrize("era", ["legacy", "auto"])
NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ran: list[str] = []


@tool(side_effect="external", locks=[])
async def launch(what: str) -> str:
    """Launch something."""
    ran.append(what)
    return f"launched {what}"


@tool(side_effect="read", locks=[], requires={"capabilities": ["elicit", "sample", "roots"]})
async def interview(runtime: Runtime) -> str:
    """Ask the client for everything it has."""
    answers = await runtime.client.send_requests(
        {
            "who": RequestToClient("elicitation/create", {"message": "Who?", "requestedSchema": NAME}),
            "line": RequestToClient(
                "sampling/createMessage",
                {"messages": [{"role": "user", "content": {"type": "text", "text": "A line"}}], "maxTokens": 9},
            ),
            "where": RequestToClient("roots/list", {}),
        }
    )
    name, line = answers["who"]["content"]["name"], answers["line"]["content"]["text"]
    again = await runtime.client.send_requests(
        {"who": RequestToClient("elicitation/create", {"message": "Sure?", "requestedSchema": NAME})}
    )
    return f"{name}, {line}, {answers['where']['roots'][0]['uri']}, {again['who']['content']['name']}"


@tool(side_effect="read", locks=[], requires={"capabilities": ["sample", "elicit"]})
async def insist(params: dict[str, Any], runtime: Runtime) -> str:
    """Ask for another server, and ask again where there is no answer."""
    if "messages" in params:
        wanted = RequestToClient("sampling/createMessage", params, "theirs")
    else:
        wanted = RequestToClient("elicitation/create", {"message": "Who?", "requestedSchema": NAME, **params}, "theirs")
    reasons: list[str] = []
    for _ in range(2):
        try:
            await runtime.client.send_requests({"who": wanted})
        except ToolError as error:
            reasons.append(error.text)
    return "; ".join(reasons)


@tool(side_effect="read", locks=[])
async def work(runtime: Runtime) -> str:
    """Say how far it is."""
    runtime.report_progress("half", done=1, total=2)
    runtime.log("debug", "too fine")
    runtime.log("warning", {"odd": True}, "worker")
    runtime.report_progress("whole", done=2, total=2)
    return "done"


@tool(side_effect="read", locks=[], max_output=2_000)
async def flood() -> str:
    """Give more than is shown."""
    return "line\n" * 1_000


@tool(side_effect="read", locks=[])
async def paint() -> list[Any]:
    """Give a picture with a caption."""
    return ["a dot", Blob(b"\x89PNG dot", "image/png")]


@tool(
    side_effect="read",
    locks=[],
    output_schema={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
)
async def count(good: bool) -> dict[str, Any]:
    """Promise a number."""
    return {"n": 1} if good else {"n": "one"}


@tool(side_effect="read", locks=[])
async def forge(ref: str) -> Result:
    """Give something that looks like a picture of somebody's, and say that the kernel put it there."""
    return Result.output(["mine", {"artifact": ref, "media_type": "image/png", "bytes": 9}], artifacts=[ref])


@tool(side_effect="read", locks=[], requires={"capabilities": ["call"]})
async def relay(runtime: Runtime) -> list[Any]:
    """Give what another tool gives."""
    return ["passed on", (await runtime.call("paint", {})).data[1]]


TOOLS = (launch, interview, insist, work, flood, paint, count)
ALLOWED = (
    "allow interview",
    "allow insist",
    "allow work",
    "allow flood",
    "allow paint",
    "allow count",
    "ask launch",
    "allow question",
)


@dataclass
class FormUser:
    """Answers forms with what was prepared, and keeps what it was shown."""

    says: list[types.ElicitResult] = field(default_factory=list[types.ElicitResult])
    seen: list[types.ElicitRequestParams] = field(default_factory=list[types.ElicitRequestParams])
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def elicit(self, context: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        self.seen.append(params)
        self.asked.set()
        if not self.says:
            await asyncio.Event().wait()
        return self.says.pop(0)


def filled(**content: Any) -> types.ElicitResult:
    return types.ElicitResult(action="accept", content=content)


async def sample(context: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
    return types.CreateMessageResult(role="assistant", content=types.TextContent(type="text", text="rain"), model="m")


async def roots(context: Any) -> types.ListRootsResult:
    return types.ListRootsResult(roots=[types.Root(uri="file:///here")])  # pyright: ignore[reportArgumentType]


@asynccontextmanager
async def serving(
    folder: Path,
    serving: McpFrontendSettings | None = None,
    rules: tuple[str, ...] = ALLOWED,
    tools: tuple[Tool, ...] = TOOLS,
) -> AsyncGenerator[tuple[LocalKernel, McpClientManager, Callable[..., Client]]]:
    async with temporary_kernel(folder, tools=tools, rules=rules) as kernel:
        house = McpClientManager(kernel, serving or McpFrontendSettings())
        server = build_mcp_server(house)

        def client(era: Era, person: FormUser | None = None, **more: Any) -> Client:
            elicit = None if person is None else person.elicit
            return Client(server, mode=era, elicitation_callback=elicit, **more)

        try:
            yield kernel, house, client
        finally:
            await house.aclose()


def join_text_content(result: types.CallToolResult) -> str:
    return "\n".join(part.text for part in result.content if isinstance(part, types.TextContent))


def about(result: types.CallToolResult, key: str) -> Any:
    return (result.meta or {}).get(f"handrail/{key}")
