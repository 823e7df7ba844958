"""Tools for the tasks extension in the conformance suite: slow, failing, and with questions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from handrail import Tool, ToolError, tool
from handrail.contract.services.client_services import RequestToClient
from handrail.contract.services.tool_runtime import Runtime

TASK_AFTER_S = 0.5
"""After which the suite's server has a call of a promotable tool go on by itself."""


def _form(message: str, name: str) -> RequestToClient:
    """A form with two fields, of which one has to be filled in: the suite fills in both."""
    fields = {"name": {"type": "string"}, "confirm": {"type": "boolean"}}
    schema = {"type": "object", "properties": fields, "required": [name]}
    return RequestToClient("elicitation/create", {"mode": "form", "message": message, "requestedSchema": schema})


def _said(answer: Mapping[str, Any], name: str) -> Any:
    content: Mapping[str, Any] = answer.get("content") or {}
    return content.get(name)


@tool(id="greet", side_effect="read", locks=[])
async def greet(name: str) -> str:
    """Greet somebody."""
    return f"Hello, {name}!"


@tool(id="slow_compute", side_effect="read", locks=[], promotable=True)
async def slow_compute(seconds: float, label: str = "") -> str:
    """Take a while."""
    await asyncio.sleep(seconds)
    return f"computed {label} in {seconds} s"


@tool(id="failing_job", side_effect="read", locks=[], mode="background", requires={"capabilities": ["elicit"]})
async def failing_job(runtime: Runtime) -> str:
    """Fail after a while; would ask on the way, if it came so far."""
    await asyncio.sleep(1)
    raise ToolError("this job always fails")


@tool(id="protocol_error_job", side_effect="read", locks=[], mode="background", requires={"capabilities": ["roots"]})
async def protocol_error_job(runtime: Runtime) -> str:
    """Ask for what the suite's client has not declared."""
    answers = await runtime.client.send_requests({"where": RequestToClient("roots/list", {})})
    return f"{len(answers['where']['roots'])} roots"


@tool(id="confirm_delete", side_effect="read", locks=[], mode="background", requires={"capabilities": ["elicit"]})
async def confirm_delete(filename: str, runtime: Runtime) -> str:
    """Ask once whether something is to go, which stays."""
    answers = await runtime.client.send_requests({"confirm": _form(f"Delete {filename}?", "confirm")})
    return f"{filename}: {'confirmed' if _said(answers['confirm'], 'confirm') else 'kept'}"


@tool(id="multi_input", side_effect="read", locks=[], mode="background", requires={"capabilities": ["elicit"]})
async def multi_input(runtime: Runtime) -> str:
    """Ask two things at once."""
    asks = {"name": _form("What is your name?", "name"), "sure": _form("Sure?", "confirm")}
    answers = await runtime.client.send_requests(asks)
    return f"{_said(answers['name'], 'name')}: {_said(answers['sure'], 'confirm')}"


@tool(id="test_tool_with_task", side_effect="read", locks=[], promotable=True, requires={"capabilities": ["elicit"]})
async def asks_first(runtime: Runtime) -> str:
    """Ask who it is, then take a while."""
    name = _said(
        (await runtime.client.send_requests({"user_name": _form("What is your name?", "name")}))["user_name"], "name"
    )
    await asyncio.sleep(3 * TASK_AFTER_S)
    return f"done for {name}"


TASK_TOOLS: tuple[Tool, ...] = (
    greet,
    slow_compute,
    failing_job,
    protocol_error_job,
    confirm_delete,
    multi_input,
    asks_first,
)
TASK_RULES = tuple(f"allow {one.spec.id}" for one in TASK_TOOLS)
