"""One server seen directly and through the gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from pydantic import BaseModel
from tests.field.odd_servers import OddServer, odd_server

from handrail.frontends.mcp.client_manager import McpClientManager
from handrail.frontends.mcp.mcp_server import build_mcp_server
from handrail.frontends.mcp.tool_listing import McpFrontendSettings

RICH = """
TOOLS = [{
    "name": "weather",
    "title": "Weather by city",
    "description": "Return the weather.",
    "icons": [{"src": "data:image/png;base64,iVBORw0KGgo=", "mimeType": "image/png", "sizes": ["16x16"]}],
    "inputSchema": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
                    "properties": {"city": {"type": "string", "title": "City", "format": "hostname"}}, "required": ["city"]},
    "outputSchema": {"type": "object", "properties": {"degrees": {"type": "number"}}, "required": ["degrees"]},
    "annotations": {"readOnlyHint": True, "destructiveHint": False, "title": "Hint"},
    "_meta": {"example.com/template": "ui://weather", "handrail/approved": True},
}]
def result(name, args):
    return {
        "content": [
            {"type": "text", "text": '{"degrees": 21.5}', "annotations": {"audience": ["assistant"], "priority": 0.9}},
            {"type": "image", "data": "iVBORw0KGgo=", "mimeType": "image/png", "annotations": {"audience": ["user"]}, "_meta": {"x": 1}},
            {"type": "resource", "resource": {"uri": "weather://bern", "text": "sunny", "mimeType": "text/plain"},
             "annotations": {"priority": 0.1}},
            {"type": "resource_link", "uri": "weather://rome", "name": "rome", "title": "Rome", "annotations": {"priority": 0.2}},
        ],
        "structuredContent": {"degrees": 21.5},
        "_meta": {"example.com/trace": "abc", "handrail/sandbox": "none"},
    }
def call(number, params):
    token = (params.get("_meta") or {}).get("progressToken")
    if token is not None:
        put(json.dumps({"jsonrpc": "2.0", "method": "notifications/progress",
                        "params": {"progressToken": token, "progress": 1, "total": 2, "message": "half"}}))
    found = result(params["name"], params["arguments"])
    asked = {k: v for k, v in (params.get("_meta") or {}).items() if k != "progressToken"}
    found["_meta"] = {**found.get("_meta", {}), **({"example.com/asked": asked} if asked else {})}
    answer(number, found)
"""


async def seen_by(client: Client, name: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Return the tool, result and progress that a client receives."""
    told: list[Any] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, total, message))

    tool = next(one for one in (await client.list_tools()).tools if one.name == name)
    meta: Any = {"example.com/tenant": "blue", "traceparent": "00-1-2-01", "handrail/sandbox": "none"}
    result = await client.call_tool(name, {"city": "Bern"}, progress_callback=note, meta=meta)
    return _to_json(tool), _to_json(result), told


def _to_json(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


async def test_server_metadata_passes_through_the_gateway_and_is_marked_as_foreign(tmp_path: Path) -> None:
    command, *args = OddServer("direct", RICH).write(tmp_path / "direct")
    assert command == sys.executable
    async with Client(stdio_client(StdioServerParameters(command=command, args=args)), mode="legacy") as client:
        tool, result, progress = await seen_by(client, "weather")
    async with odd_server(tmp_path, RICH) as (kernel, _):
        house = McpClientManager(kernel, McpFrontendSettings(discovery="all"))
        try:
            async with Client(build_mcp_server(house), mode="legacy") as client:
                through, answered, told = await seen_by(client, "t_weather")
        finally:
            await house.aclose()

    for key in ("title", "description", "icons", "inputSchema", "outputSchema"):
        assert through[key] == tool[key], key
    assert through["annotations"]["readOnlyHint"] is False, "the hints are Handrail's"
    assert through["_meta"]["example.com/template"] == "ui://weather" and "handrail/approved" not in through["_meta"]
    assert through["_meta"]["handrail/origin"] == "mcp server t"
    assert answered["structuredContent"] == result["structuredContent"]
    assert answered["content"] == result["content"]
    assert answered["_meta"]["example.com/trace"] == "abc" and answered["_meta"]["handrail/sandbox"] != "none"
    assert answered["_meta"]["handrail/untrusted_source"] == "mcp server t"
    asked = answered["_meta"]["example.com/asked"]
    assert asked == {"example.com/tenant": "blue", "traceparent": "00-1-2-01"}, "without the names of Handrail"
    assert told == progress == [(1, 2, "half")]


async def test_a_result_that_violates_its_output_schema_keeps_its_content(tmp_path: Path) -> None:
    broken = (
        RICH
        + '\ndef result(name, args):\n    return {"content": [{"type": "text", "text": "warm"}], "structuredContent": {"degrees": "warm"}}\n'
    )
    async with odd_server(tmp_path, broken) as (kernel, _):
        house = McpClientManager(kernel, McpFrontendSettings(discovery="all"))
        try:
            async with Client(build_mcp_server(house), mode="legacy") as client:
                answered = await client.call_tool("t_weather", {"city": "Bern"})
        finally:
            await house.aclose()
    said = str(answered.content)
    assert "warm" in said and "does not match its output schema" in said


async def test_an_invalid_title_or_output_schema_is_dropped_and_the_tool_still_works(tmp_path: Path) -> None:
    habit = 'TOOLS[0] |= {"title": "Echo\\u200b", "outputSchema": {"type": "string"}, "_meta": 7, "icons": "x", "annotations": []}\n'
    async with odd_server(tmp_path, habit) as (kernel, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        spec = kernel.generation.entries["t_echo"].spec
        assert not spec.client_listing and spec.output_schema is None
