"""One server seen directly and through the gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from pydantic import BaseModel
from tests.field.odd_servers import OddServer, odd_server

from handrail.contract.schema.mcp_members import select_valid_members
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


ODD_LISTS = """
CAPABILITIES = {"tools": {}, "resources": {}, "prompts": {}}
ODD = [
    {"icons": ["x"]}, {"icons": [{}]}, {"icons": [{"src": 5}]}, {"icons": {"src": "x"}}, {"_meta": [1]}, {"_meta": 5},
    {"icons": [{"src": "data:,", "sizes": "any", "theme": "blue", "mimeType": 5}]}, {"title": 5}, {"title": []},
    {"annotations": {"title": 5, "readOnlyHint": "yes"}}, {"annotations": "x"}, {"execution": {"taskSupport": "maybe"}},
    {"outputSchema": {"type": "object", "properties": []}}, {"outputSchema": []}, {"description": {}},
]
TOOLS += [{"name": "odd%d" % number, "inputSchema": SCHEMA, **odd} for number, odd in enumerate(ODD)]
FURTHER = [*ODD, {"annotations": {"priority": 7, "audience": "user", "lastModified": 5}}, {"mimeType": 5}, {"size": "1"}]
LISTS = {
    "resources/list": ("resources", "uri", "x:%d"),
    "resources/templates/list": ("resourceTemplates", "uriTemplate", "x:{a}/%d"),
    "prompts/list": ("prompts", "name", "p%d"),
}
def other(number, method, params):
    if method in LISTS:
        key, name, form = LISTS[method]
        answer(number, {key: [{name: form % at, "name": form % at, **odd} for at, odd in enumerate(FURTHER)]})
    elif method == "prompts/get":
        answer(number, {"messages": [{"role": "user", "content": one} for one in BLOCKS]})
    elif number is not None:
        fail(number, -32601)
BLOCKS = [
    *({"type": "text", "text": "said", "annotations": one} for one in (
        {"priority": 5}, {"audience": "user"}, {"audience": ["model"]}, "high", {"lastModified": 5}, [])),
    {"type": "text", "text": "said", "_meta": "m"}, {"type": "text", "text": 5},
    {"type": "resource_link", "uri": "a:b"}, {"type": "chart", "rows": 1}, {},
    {"type": "resource_link", "uri": "a:b", "name": "n", "size": "big", "icons": [5], "title": 7, "mimeType": {}},
    {"type": "resource", "resource": {"text": "said"}}, {"type": "resource", "resource": {"uri": 5, "text": "said"}},
    {"type": "resource", "resource": {"uri": "a:b", "text": "said", "_meta": [], "mimeType": 5}, "annotations": {"priority": "1"}},
    {"type": "resource", "resource": {"uri": "a:b", "blob": "!!"}}, {"type": "resource", "resource": "x"},
    {"type": "image", "data": "iVBORw0KGgo=", "annotations": {"priority": -1}, "_meta": []},
    {"type": "image", "data": "!!", "mimeType": "image/png"}, {"type": "audio", "data": 5},
]
def result(name, args):
    return {"content": BLOCKS}
"""


async def test_odd_members_of_one_item_do_not_harm_the_lists_of_a_client(tmp_path: Path) -> None:
    async with odd_server(tmp_path, ODD_LISTS) as (kernel, _):
        house = McpClientManager(kernel, McpFrontendSettings(discovery="all"))
        try:
            async with Client(build_mcp_server(house), mode="legacy") as client:
                tools = {one.name for one in (await client.list_tools()).tools}
                assert "t_echo" in tools and len([one for one in tools if one.startswith("t_odd")]) == 15
                assert len([one for one in (await client.list_resources()).resources if one.uri.startswith("x:")]) == 18
                assert len((await client.list_resource_templates()).resource_templates) == 18
                prompts = [one.name for one in (await client.list_prompts()).prompts]
                assert len([one for one in prompts if one.startswith("t_p")]) == 18
                result = await client.call_tool("t_echo", {"text": "x"})
                assert not result.is_error and len(result.content) == 20
                assert len((await client.get_prompt("t_p0")).messages) == 20
        finally:
            await house.aclose()


VALID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all": (
        {
            "annotations": {"audience": ["user"], "priority": 1, "lastModified": "2025-01-01"},
            "_meta": {"a": 1},
            "size": 0,
        },
        {
            "annotations": {"audience": ["user"], "priority": 1, "lastModified": "2025-01-01"},
            "_meta": {"a": 1},
            "size": 0,
        },
    ),
    "an icon": (
        {"icons": [{"src": "data:,", "sizes": ["48x48"], "theme": "dark", "mimeType": "image/png"}]},
        {"icons": [{"src": "data:,", "sizes": ["48x48"], "theme": "dark", "mimeType": "image/png"}]},
    ),
    "an icon with sizes as a text": (
        {"icons": [{"src": "x", "sizes": "16x16 any"}, None]},
        {"icons": [{"src": "x", "sizes": ["16x16", "any"]}]},
    ),
    "own members": ({"annotations": {"mine": 1}, "own": [1]}, {"annotations": {"mine": 1}, "own": [1]}),
    "nothing valid": ({"annotations": {"priority": True}, "icons": [], "_meta": None, "size": True, "title": 1}, {}),
}


@pytest.mark.parametrize(("given", "kept"), VALID.values(), ids=VALID)
def test_only_members_that_the_protocol_does_not_allow_are_left_out(
    given: dict[str, Any], kept: dict[str, Any]
) -> None:
    assert select_valid_members(given) == kept
