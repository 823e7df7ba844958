"""A schema check beyond the budget runs in a process with limits of time and memory."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from handrail import Tool, ToolSpec
from handrail.contract.schema.argument_validation import CoarseProblemList, compile_schema
from handrail.testing.scripted_kernel import temporary_kernel

CELL: dict[str, Any] = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "c": {"$ref": "#/$defs/cell"}},
            "required": ["kind", "c"],
        }
        for kind in "abcdefghijklmnop"
    ]
    + [{"type": "string"}]
}
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": {"$ref": "#/$defs/cell"}}},
    "$defs": {"cell": CELL},
}
"""Recursive alternatives that are told apart by a key, as published schemas have them. The check is quick, and the estimate
does not know."""
CHILD: dict[str, Any] = {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}
DOUBLED: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/n"}},
    "$defs": {"n": {"oneOf": [CHILD, CHILD, {"type": "string"}]}},
}
"""Recursive alternatives that are the same, so that listing what is wrong 30 deep takes hours and terabytes."""


def row(depth: int, leaf: object = "x") -> Any:
    for level in range(depth):
        leaf = {"kind": "abcdefgh"[level % 8], "c": leaf}
    return leaf


def doubled(depth: int) -> Any:
    leaf: Any = 1
    for _ in range(depth):
        leaf = {"c": leaf}
    return leaf


class SchemaTool(Tool):
    """Takes what its schema takes."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self.spec = ToolSpec(
            id="test.take", description="Take.", parameters=dict(parameters), side_effect="external", locks=()
        )
        self.got: list[Any] = []

    async def execute(self, args: dict[str, Any], runtime: object) -> object:
        self.got.append(args)
        return "taken"


LARGE = {"rows": [row(20)] * 450}


def children() -> set[int]:
    return {int(one) for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_the_cost_estimate_alone_refuses_large_valid_arguments() -> None:
    schema = compile_schema(TREE)
    assert schema.matches_without_budget(LARGE)
    problems = schema.list_problems(LARGE)
    assert isinstance(problems, CoarseProblemList) and not problems.checked


@pytest.mark.parametrize("parsed", [False, True])
async def test_large_valid_arguments_are_accepted_after_a_check_in_a_subprocess(tmp_path: Path, parsed: bool) -> None:
    taking = SchemaTool(TREE)
    async with temporary_kernel(tmp_path, tools=[taking], rules=["allow test.take"]) as kernel:
        session = await kernel.session()
        before = children()
        result = await session.call("test.take", json.dumps(LARGE) if parsed else LARGE)
        assert result.ok, result.error_text
        assert taking.got == [LARGE] and (parsed or taking.got[0] is not LARGE)
        assert children() <= before


async def test_a_result_says_how_large_arguments_were_read_that_are_almost_json(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[SchemaTool(TREE)], rules=["allow test.take"]) as kernel:
        result = await (await kernel.session()).call("test.take", f"```json\n{json.dumps(LARGE)}\n```")
        assert result.ok, result.error_text
        assert list(result.metadata["arguments_read_as"]) == ["(all arguments)"]


async def test_a_check_beyond_the_estimate_budget_lists_the_exact_problems(tmp_path: Path) -> None:
    arguments = {"rows": [row(2, 1)]}
    assert isinstance(compile_schema(TREE).list_problems(arguments), CoarseProblemList)
    async with temporary_kernel(tmp_path, tools=[SchemaTool(TREE)], rules=["allow test.take"]) as kernel:
        result = await (await kernel.session()).call("test.take", arguments)
        assert result.metadata["error_kind"] == "invalid_input"
        assert result.error_text is not None
        assert "rows[0].c" in result.error_text and "too large to list" not in result.error_text


async def test_a_check_that_no_process_finishes_is_refused_without_blocking_the_event_loop(tmp_path: Path) -> None:
    taking = SchemaTool(DOUBLED)
    async with temporary_kernel(tmp_path, tools=[taking], rules=["allow test.take"]) as kernel:
        session = await kernel.session()
        before, beats = children(), 0
        working = asyncio.ensure_future(session.call("test.take", {"x": doubled(30)}))
        while not working.done():
            beats += 1
            await asyncio.sleep(0)
        result = working.result()
        assert result.metadata["error_kind"] == "invalid_input" and not taking.got
        assert result.error_text is not None
        assert "`x`: the object does not match its schema" in result.error_text
        assert beats > 20 and children() <= before


async def test_a_cancelled_call_ends_its_validation_process(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[SchemaTool(DOUBLED)], rules=["allow test.take"]) as kernel:
        session = await kernel.session()
        before = children()
        working = asyncio.ensure_future(session.call("test.take", {"x": doubled(30)}))
        while children() <= before:
            await asyncio.sleep(0)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert children() <= before


async def test_the_check_process_runs_no_code_from_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process runs outside any sandbox, so it must not load code that a call could have written."""
    planted = tmp_path / "ws" / "lib"
    planted.mkdir(parents=True)
    (planted / "json.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (planted / "jsonschema_rs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr(sys, "path", [str(planted), *sys.path])
    taking = SchemaTool(TREE)
    async with temporary_kernel(tmp_path, tools=[taking], rules=["allow test.take"]) as kernel:
        result = await (await kernel.session()).call("test.take", LARGE)
        assert result.ok, result.error_text
    assert not (tmp_path / "ran").exists()
