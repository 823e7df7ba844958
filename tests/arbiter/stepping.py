"""Stateful tools for tests, with their pauses and effects, and helpers that call their steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from handrail import Result, Runtime, Session, Tool, ToolError, ToolSpec, tool


class StepRecorder:
    """The events that the tools of these tests wait for, and their effects."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.entered = asyncio.Event()
        self.left = asyncio.Event()
        self.seen: list[Any] = []
        self.tasks: set[Any] = set()


bench = StepRecorder()


@tool(id="st.count", side_effect="write", locks=["shelf:X"], requires={"fs": {"write": ["."]}})
async def write(path: str, runtime: Runtime) -> str:
    """Write."""
    await runtime.files.write(path, b"x")
    return path


@tool(id="st.notes", mode="stateful", side_effect="write", locks=["shelf:X"], requires={"fs": {"write": ["."]}})
async def notes(runtime: Runtime, first: int = 0) -> AsyncGenerator[dict[str, Any], Any]:
    """Write a note for each input."""
    files, number, sent = runtime.files, first, None
    try:
        while sent != "enough":
            bench.tasks.add(asyncio.current_task())
            async with asyncio.timeout(60):  # which is left in the task that it was entered in
                sent = yield {"number": number, "got": sent, "call": runtime.call_id}
            number += 1
            await files.write(f"{number}.txt", str(sent).encode())
    finally:
        bench.seen.append("ended")
        bench.left.set()


@tool(id="st.slow", mode="stateful", side_effect="read", locks=["shelf:X"], timeout_ms=600_000)
async def slow(how: str = "") -> AsyncGenerator[str, Any]:
    """Take long in its second step."""
    told = 0
    yield "first"
    while True:
        bench.entered.set()
        try:
            await bench.open.wait()
        except asyncio.CancelledError:
            told += 1
            bench.seen.append(f"told {told}")
            if how == "yields" and told == 1:
                yield "all the same"
                bench.seen.append("went on")
            if how == "returns":
                return
            if how != "deaf":
                raise
        else:
            yield "opened"


@tool(id="st.short", mode="stateful", side_effect="read", locks=[], timeout_ms=20)
async def short(when: int) -> AsyncGenerator[int, Any]:
    """Never yield its n-th step."""
    for number in range(when):
        yield number
    await asyncio.Event().wait()


@tool(id="st.fails", mode="stateful", side_effect="read", locks=[])
async def fails(how: str) -> AsyncGenerator[Any, Any]:
    """Fail in its second step."""
    if how == "at once":
        return
    yield 1
    if how == "tool":
        raise ToolError("no paper", kind="failed", data={"left": 0})
    if how == "exit":
        raise SystemExit(3)
    if how == "cancelled":
        raise asyncio.CancelledError
    if how == "no JSON":
        try:
            yield object()
        finally:
            bench.left.set()
    if how == "error":
        yield Result.error("failed", "this page cannot be read")
        yield 3
    raise KeyError(how)


@tool(id="st.stubborn", mode="stateful", side_effect="read", locks=[])
async def stubborn(times: int) -> AsyncGenerator[int, Any]:
    """Go on when it is told to end."""
    for number in range(times + 1):
        try:
            yield number
        except GeneratorExit:
            bench.seen.append(number)


@tool(
    id="st.asks",
    mode="stateful",
    side_effect="read",
    locks=[],
    step_parameters={
        "type": "object",
        "properties": {"page": {"$ref": "#/$defs/page"}},
        "required": ["page"],
        "$defs": {"page": {"type": "integer", "minimum": 1}},
    },
)
async def asks(opened: int = 0) -> AsyncGenerator[Any, Any]:
    """Take pages."""
    sent: Any = None
    while True:
        sent = yield sent


class YieldingTool(Tool):
    """A class whose execute yields."""

    spec = ToolSpec("st.held", "Go on.", side_effect="write", mode="stateful", locks=())

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        bench.seen.append(runtime)
        sent: Any = yield runtime.call_id  # pyright: ignore[reportUnknownVariableType]
        yield sent


@tool(
    id="st.outer",
    side_effect="write",
    locks=["shelf:X"],
    requires={"fs": {"write": ["."]}, "capabilities": ["call"]},
)
async def outer(runtime: Runtime) -> list[Any]:
    """Go through another."""
    opened = await runtime.call("st.notes", {})
    state = {"id": opened.data["state_id"]}
    both = await asyncio.gather(runtime.call("tool.step", {**state, "input": 1}), runtime.call("tool.step", state))
    ended = await runtime.call("tool.close", state)
    return [one.data if one.ok else one.error_kind for one in (opened, *both, ended)]


TOOLS = [write, notes, slow, short, fails, stubborn, asks, YieldingTool(), outer]
SETTINGS = "[limits]\ngrace_ms = 20\nopen_tool_sessions = 3\n"


async def opened(session: Session, name: str, **arguments: Any) -> str:
    result = await session.call(name, arguments)
    assert result.ok, result.error_text
    return str(result.data["state_id"])


async def step(session: Session, state: str, sent: Any = None) -> Result:
    return await session.call("tool.step", {"id": state} if sent is None else {"id": state, "input": sent})


async def close(session: Session, state: str) -> Result:
    return await session.call("tool.close", {"id": state})
