"""Schemas, arguments and outputs that make their validation slow while other calls wait."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.attacks.case import Case, breach
from tests.attacks.victim import AgreeingUser, VictimHome

from handrail import tool
from handrail.contract.schema.argument_validation import InvalidSchemaError, compile_schema

_HELD_S = 1.0
"""Processor time of the loop's thread that no single call may take; each took many seconds."""


def _recursive(keyword: str) -> dict[str, Any]:
    again = {"$ref": "#/$defs/n"}
    child = {"type": "object", "properties": {"c": again}, "required": ["c"]}
    n = {keyword: [child, child, {"type": "string"}]}
    return {"type": "object", "properties": {"x": again}, "$defs": {"n": n}}


def _doubled(keyword: str) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"a{n}": {keyword: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    definitions["a40"] = {"type": "string"}
    return {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": definitions}


async def _schemas(home: VictimHome) -> str | None:
    """Each schema is refused at load, or a wrong value deep in it is reported immediately."""
    value: Any = 1
    for _ in range(60):
        value = {"c": value}
    slow: list[str] = []
    schemas = {
        f"{make.__name__} {keyword}": make(keyword)
        for make in (_recursive, _doubled)
        for keyword in ("allOf", "anyOf", "oneOf")
    }
    schemas["back-reference"] = {"type": "object", "properties": {"x": {"pattern": "(?=(a+))\\1b"}}}
    for name, schema in schemas.items():
        begun = time.thread_time()
        try:
            made = compile_schema(schema)
        except InvalidSchemaError:
            continue
        for given in ({"x": value}, {"x": "a" * 50_000}):
            made.list_problems(given)
        if time.thread_time() - begun > _HELD_S:
            slow.append(name)
    return breach(slow, "took long to judge")


async def _calls(home: VictimHome) -> str | None:
    """Long arguments for shipped tools, with a heartbeat that measures how long the loop was blocked."""
    longest = last = 0.0

    async def beat() -> None:
        nonlocal longest, last
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            longest, last = max(longest, (now := time.thread_time()) - last), now

    @tool(id="test.external", side_effect="external")
    async def external(text: str) -> str:
        """Take a text."""
        return text

    held: list[str] = []
    calls: list[tuple[str, dict[str, Any]]] = [
        ("glob", {"pattern": "{a," * 300_000}),
        ("glob", {"pattern": "a" * 1_000_000}),
        ("grep", {"pattern": "[" * 9_000}),
        ("bash", {"command": "echo " + "a|" * 400_000}),
        ("question", {"questions": [{"question": "a"}] * 200_000}),
        ("todo", {"todos": list(range(300_000))}),
        ("read", {"path": "&#65;" * 90_000}),
        ("find_tools", {"query": "ab " * 300_000}),
        ("x" * 1_000_000, {}),
        ("test.external", {"text": "-eyJaaaaaaaaaa" * 30_000}),
    ]
    async with home.kernel(name="judged", tools=[external], secrets={"KEY": "s3cr3t-Value-0123456789"}) as kernel:
        session = await kernel.session(approval_handler=AgreeingUser())
        beating = asyncio.ensure_future(beat())
        for name, arguments in calls:
            longest = 0.0
            await session.call(name, arguments)
            await asyncio.sleep(0.01)
            if longest > _HELD_S:
                held.append(f"{name[:20]}: {longest:.1f} s")
        beating.cancel()
    return breach(held, "held the event loop")


CASES = [
    Case(
        "schemas that multiply",
        "model-facing",
        "recursive alternatives and doubled references in a tool's schema, a back-reference in its pattern",
        "each is refused at load, or judged within a budget",
        _schemas,
    ),
    Case(
        "arguments made to be slow",
        "model-facing",
        "a megabyte of braces for glob, of brackets for grep, of numbered characters, of beginnings of tokens",
        "no call holds the others up",
        _calls,
    ),
]
