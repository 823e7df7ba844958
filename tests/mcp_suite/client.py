"""The client scenarios of the conformance suite, as a user of a library would write them.

The suite starts a server of its own per scenario and this beside it, with the server's address as the last argument, the
scenario's name in ``MCP_CONFORMANCE_SCENARIO``, the protocol in ``MCP_CONFORMANCE_PROTOCOL_VERSION`` and, for some, what the
client has to know in ``MCP_CONFORMANCE_CONTEXT``. ``--sdk`` plays them with the SDK's client alone, for the table.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

Call = Callable[[str, Mapping[str, Any]], Awaitable[Any]]


class Server(Protocol):
    """A connected server, whichever client is under test."""

    async def tools(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Names and input schemas, all pages of them."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any: ...

    async def rest(self) -> None:
        """List and read the first of its resources and prompts, where it has some."""
        ...


Connect = Callable[[str], AbstractAsyncContextManager[Server]]


def context() -> dict[str, Any]:
    """Return the context that the scenario passes to its client."""
    return json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))


def answers_to_form(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in a form as an agreeing user: its defaults, otherwise minimal values."""
    least: dict[str, Any] = {"boolean": True, "integer": 1, "number": 1.0, "array": []}
    filled: dict[str, Any] = {}
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        if "default" in field:
            filled[name] = field["default"]
        elif name in required:
            filled[name] = field.get("enum", [least.get(field.get("type"), "text")])[0]
    return filled


async def play(scenario: str, server: Server) -> None:
    """:raises Exception: where the client fails; the suite judges by what its server has seen as well"""
    tools = await server.tools()
    names = [name for name, _ in tools]
    match scenario:
        case "initialize":
            return
        case "tools_call":
            await server.call("add_numbers", {"a": 5, "b": 3})
        case "sse-retry":
            await server.call("test_reconnection", {})
        case "elicitation-sep1034-client-defaults":
            await server.call("test_client_elicitation_defaults", {})
        case "http-custom-headers":
            for call in context()["toolCalls"]:
                await server.call(call["name"], call["arguments"])
        case "json-schema-2020-12-preservation":
            schema = next(schema for name, schema in tools if name == "json_schema_2020_12_tool")
            (echo,) = (name for name in names if name != "json_schema_2020_12_tool")
            await server.call(echo, {"schema": schema})
        case "sep-2322-client-request-state":
            # one of its tools leaves out what a result must say: the others go on
            await asyncio.gather(*(server.call(name, {}) for name in names), return_exceptions=True)
        case _:
            for name, schema in tools:
                await server.call(name, least_arguments(schema))
            await server.rest()


def least_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    return answers_to_form({"properties": schema.get("properties", {}), "required": schema.get("required", ())})


def main() -> int:
    from tests.mcp_suite.sdk_client import connect as by_sdk

    scenario, url = os.environ["MCP_CONFORMANCE_SCENARIO"], sys.argv[-1]
    connect: Connect = by_sdk
    if "--sdk" not in sys.argv:
        from tests.mcp_suite.our_client import connect as by_us

        connect = by_us

    async def run() -> None:
        async with connect(url) as server:
            await play(scenario, server)

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
