"""The reference of shipped tools is correct: calls return what it says, and errors read as shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.kernel.test_agents import confined
from tests.kind_reference import METADATA
from tests.tool_reference import TABLE, render, sections, shipped, where
from tests.tool_results import RESULTS, always, meanings
from tests.tools.example_calls import CALLS, EXAMPLES, FAILURES, decisions, opened, play, recorded, served

from handrail.tools import ALIASES, BUILTINS


@pytest.mark.proves("T-10")
def test_every_shipped_tool_has_one_section_in_an_up_to_date_reference() -> None:
    ids = [tool.spec.id for tool in BUILTINS]
    assert list(sections()) == ids and len(set(ids)) == len(ids)
    assert set(RESULTS) == set(CALLS) == set(ids), "a tool without the keys of its result, or without a call"
    assert {tool_id for tool_id, _ in FAILURES} <= set(ids)
    assert TABLE.read_text(encoding="utf-8") == render(), "run: make docs"


@pytest.mark.proves("T-10")
def test_a_reference_section_documents_everything_that_its_tool_declares() -> None:
    generation = shipped()
    for tool_id, text in sections().items():
        spec = generation.entries[tool_id].spec
        assert text.startswith(f"## `{tool_id}`\n\n{spec.description}\n")
        for parameter in spec.parameters.get("properties", {}):
            default = "required" if parameter in spec.parameters.get("required", ()) else ""
            row = next(line for line in text.splitlines() if line.startswith(f"| `{parameter}` |"))
            assert ("| required |" in row) == bool(default)
        assert all(f"`{lock.resource}`" in text for lock in spec.effective_locks) and f"`{spec.side_effect}`" in text
        assert all(f"`{one.cmd}`" in text for one in spec.requires.shell)
        assert all(f"`{pattern}`" in text for pattern in (*spec.requires.fs.read, *spec.requires.fs.write))
        assert all(f"`{capability}`" in text for capability in spec.requires.capabilities)
        assert ("network access" in where(spec)) == bool(spec.requires.net.hosts)
        assert f"Category: {spec.category}." in text and ("core tool" in text) == (spec.tier == "core")
        assert f"{spec.timeout_ms:,} ms" in text and f"{spec.max_output:,} bytes" in text
        assert all(f"`{alias}`" in text for alias, of in ALIASES.items() if of == tool_id)


@confined
@pytest.mark.proves("T-10")
async def test_each_tool_returns_the_documented_fields_and_runs_in_the_documented_place(tmp_path: Path) -> None:
    generation = shipped()
    async with served(tmp_path) as host, opened(tmp_path, host) as session:
        played = [one async for one in play(session, host)]
    for one in played[: len(CALLS)]:
        data, metadata = one.result.data, one.result.metadata
        assert one.result.ok, (one.tool_id, one.result.error_text)
        assert always(one.tool_id) <= set(data) <= set(meanings(one.tool_id)), one.tool_id
        in_sandbox = "+" in str(metadata["sandbox"])
        assert in_sandbox == ("sandbox" in where(generation.entries[one.tool_id].spec)), one.tool_id
    known = {key for keys in METADATA.values() for key in keys}
    assert not {key for one in played for key in one.result.metadata} - known
    (plain := tmp_path / "plain").mkdir()
    found = recorded(played, await decisions(plain), tmp_path)
    assert found == json.loads(EXAMPLES.read_text(encoding="utf-8")), "run: python -m tests.tools.example_calls"
    assert {alias: getattr(generation.resolve_tool_name(alias), "id", None) for alias in ALIASES} == dict(ALIASES)
