"""Every argument of every shipped tool, given every hostile value, through a whole kernel: nothing holds the event loop.

The bound is processor time of the process between two beats, and far above what any call takes. What took more than
:data:`REPORTED_MS` is printed, as data.
"""

from __future__ import annotations

import asyncio
import copy
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from tests.soak.hostile import VALUES, texts
from tests.soak.stalls import StallWatch

from handrail import ApprovalAnswer, ApprovalRequest, tool
from handrail.contract.doors.runtime import Question
from handrail.testing.kernels import temporary_kernel

pytestmark = pytest.mark.slow

REPORTED_MS = 50
BOUND_MS = 250
_SECRETS = {"KEY": "s3cr3t-Value-0123456789abcdef"}
_EDITING = frozenset({"write", "edit", "multi_edit", "file.patch", "json_write"})
Place = tuple[str | int, ...]
Schema = Mapping[str, Any]


class Agreeing:
    """A person who says yes to every call and answers every question with nothing."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        return ApprovalAnswer("once")

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]]:
        return [[""] for _ in questions]


def ordinary(schema: Schema, path: str) -> Any:
    """A small value that fits."""
    if schema.get("format") == "path":
        return path
    for keyword in ("default", "enum"):
        if keyword in schema:
            return schema[keyword] if keyword == "default" else schema[keyword][0]
    match schema.get("type"):
        case "string":
            return "abc"
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return False
        case "array":
            return [ordinary(schema["items"], path)] * max(1, schema.get("minItems", 1))
        case "object":
            return {name: ordinary(schema["properties"][name], path) for name in schema.get("required", ())}
        case _:
            return 1


def places(schema: Schema, before: Place = ()) -> Iterator[tuple[Place, Schema]]:
    """Every argument, and every part of one that its schema names."""
    for name, part in cast("Mapping[str, Schema]", schema.get("properties", {})).items():
        yield (*before, name), part
        if part.get("type") == "object":
            yield from places(part, (*before, name))
        elif part.get("type") == "array":
            yield (*before, name, 0), part["items"]
            yield from places(part["items"], (*before, name, 0))


def placed(arguments: Mapping[str, Any], schema: Schema, place: Place, value: object, path: str) -> dict[str, Any]:
    """``arguments`` with ``value`` there, and ordinary values on the way to it."""
    whole = copy.deepcopy(dict(arguments))
    at: Any = whole
    for step, following in pairwise(place):
        schema = cast("Schema", schema["items"] if isinstance(step, int) else schema["properties"][step])
        if isinstance(step, str) and step not in at:
            at[step] = [ordinary(schema["items"], path)] if following == 0 else ordinary(schema, path)
        at = at[step]
    at[place[-1]] = value
    return whole


def fits_roughly(value: object, schema: Schema) -> bool:
    """Whether more is tried of ``value`` than that it is of the wrong type, which a few kinds show."""
    kind = schema.get("type")
    return kind is None or (kind == "string") == isinstance(value, str)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("size", [500_000, 1_000_000, 60_000, 8_000])
async def test_no_argument_of_any_tool_holds_the_event_loop(tmp_path: Path, size: int) -> None:
    kinds: dict[str, Any] = {**texts(size), **VALUES}
    workspace = tmp_path / "ws"
    workspace.mkdir()
    subprocess.run(["git", "init", "-q", str(workspace)], check=True)
    for kind, text in texts(size).items():
        (workspace / f"{kind}.txt").write_text(text)
    (workspace / "small.txt").write_text("abc\nabc\n")
    held: list[str] = []
    async with temporary_kernel(tmp_path, secrets=_SECRETS) as kernel:
        session = await kernel.session(attendant=Agreeing())
        for tool_id, entry in kernel.generation.entries.items():
            schema = entry.spec.parameters
            tried: list[tuple[Place, Schema]] = [*places(schema), (("unknown",), {"type": "object"})]
            for place, part in tried:
                for kind, value in kinds.items():
                    if not fits_roughly(value, part) and kind not in ("letters", "many-items", "number", "entities"):
                        continue
                    path = f"{kind}.txt" if isinstance(value, str) and place[-1] != "path" else "small.txt"
                    required = {name: ordinary(schema["properties"][name], path) for name in schema.get("required", ())}
                    arguments = placed(required, schema, place, value, path)
                    if tool_id in _EDITING and place != ("path",):
                        await session.call("read", {"path": path, "limit": 1})
                    async with StallWatch() as watch:
                        await asyncio.wait_for(session.call(tool_id, arguments), 120)
                    if watch.longest_ms > REPORTED_MS:
                        held.append(f"{watch.longest_ms:.0f} ms: {tool_id} {place} {kind}\n{watch.stack}")
                        print(held[-1])
    assert not [one for one in held if float(one.split()[0]) > BOUND_MS], "\n".join(held)


@pytest.mark.timeout(3600)
async def test_no_output_of_a_tool_holds_the_event_loop(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {**texts(8_000_000), **VALUES}
    given: list[Any] = []

    @tool(id="test.out", side_effect="external")
    async def out() -> object:
        """Give something."""
        return given[0]

    @tool(id="test.fail", side_effect="read")
    async def fail() -> object:
        """Fail with something."""
        raise ValueError(given[0])

    held: list[str] = []
    async with temporary_kernel(tmp_path, tools=[out, fail], rules=["allow test.*"], secrets=_SECRETS) as kernel:
        session = await kernel.session()
        for kind, value in kinds.items():
            for name, shape in (("test.out", value), ("test.out", {"a": value, "b": 1}), ("test.fail", value)):
                given[:] = [shape]
                async with StallWatch() as watch:
                    await session.call(name, {})
                if watch.longest_ms > REPORTED_MS:
                    held.append(f"{watch.longest_ms:.0f} ms: {name} {kind}\n{watch.stack}")
                    print(held[-1])
    assert not [one for one in held if float(one.split()[0]) > BOUND_MS], "\n".join(held)
