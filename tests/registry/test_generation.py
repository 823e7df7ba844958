"""Generations as values: lookup by any name, and comparison."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.schema.argument_validation import compile_schema
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import wire_name
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import Generation, GenerationDiff, ToolEntry


class _Tool(Tool):
    def __init__(self, tool_id: str, description: str) -> None:
        self.spec = ToolSpec(id=tool_id, description=description)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return None


def entry(tool_id: str, description: str = "x", withheld: str | None = None) -> ToolEntry:
    tool = _Tool(tool_id, description)
    return ToolEntry(tool.spec, tool, compile_schema(tool.spec.parameters), "here", tool.spec.definition_hash, withheld)


@pytest.mark.proves("R-06", "K-04")
def test_a_tool_is_found_by_id_alias_and_wire_name() -> None:
    generation = Generation(3, [entry("email.send"), entry("read")], {"mail": "email.send"})
    for name in ("email.send", "email__send", "mail"):
        assert generation.resolve_tool_name(name) is generation.entries["email.send"]
    assert generation.resolve_tool_name("Read") is None
    assert generation.resolve_tool_name("") is None
    assert (generation.number, len(generation), list(generation.entries)) == (3, 2, ["email.send", "read"])


@pytest.mark.proves("R-06")
def test_a_generation_is_immutable() -> None:
    generation = Generation(1, [entry("read")], {"r": "read"})
    with pytest.raises(TypeError):
        generation.entries["write"] = entry("write")  # type: ignore[index]  # pyright: ignore[reportIndexIssue]
    with pytest.raises(TypeError):
        generation.aliases["x"] = "read"  # type: ignore[index]  # pyright: ignore[reportIndexIssue]


@pytest.mark.proves("R-05")
@pytest.mark.parametrize(
    ("ids", "aliases"),
    [
        (["a", "a"], {}),
        (["a.b", "a__b"], {}),
        (["a"], {"b": "gone"}),
        (["a", "b"], {"a": "b"}),
        (["a.b"], {"a__b": "a.b"}),
    ],
)
def test_a_generation_refuses_ambiguous_names_and_aliases(ids: list[str], aliases: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="'"):
        Generation(1, [entry(i) for i in ids], aliases)


@pytest.mark.proves("D-09")
def test_suggestions_for_an_unknown_tool_name_are_available_tools() -> None:
    generation = Generation(
        1, [entry("email.send"), entry("email.seen", withheld="no"), entry("read")], {"mail": "email.send"}
    )
    for name in ("email.sent", "email__sent", "email.seen_"):
        assert generation.nearest_names(name)[0] == "email.send"
        assert "email.seen" not in generation.nearest_names(name)
    assert generation.nearest_names("raed") == ["read"]
    assert generation.nearest_names("maill")[0] == "mail"
    assert generation.nearest_names("qqqqqqq") == []


@pytest.mark.proves("R-06")
def test_a_diff_of_two_generations_names_added_removed_and_changed_tools() -> None:
    old = Generation(1, [entry("a"), entry("b"), entry("c"), entry("d")])
    new = Generation(2, [entry("b", "other words"), entry("c"), entry("d", withheld="off"), entry("e")])
    assert new.compute_diff_from(old) == GenerationDiff(added=("e",), removed=("a",), changed=("b", "d"))
    assert old.compute_diff_from(new) == GenerationDiff(added=("a",), removed=("e",), changed=("b", "d"))
    assert not old.compute_diff_from(old)


ids = st.from_regex(r"[a-c](\.[a-c_]{1,2})?", fullmatch=True)


@pytest.mark.proves("K-04", "R-05")
@given(st.lists(st.tuples(ids, st.sampled_from(["x", "y"])), max_size=8))
def test_a_generation_with_clashing_names_is_refused_and_otherwise_each_name_finds_its_tool(
    given_: list[tuple[str, str]],
) -> None:
    entries = [entry(tool_id, words) for tool_id, words in given_]
    unique = len({wire_name(tool_id) for tool_id, _ in given_}) == len(given_)
    try:
        generation = Generation(1, entries)
    except ValueError:
        assert not unique
    else:
        assert unique
        assert all(
            generation.resolve_tool_name(e.id) is e and generation.resolve_tool_name(e.wire_name) is e for e in entries
        )
        assert not generation.compute_diff_from(generation)
        assert generation.compute_diff_from(Generation(0, [])).added == tuple(e.id for e in entries)


def test_a_generation_of_two_thousand_tools_resolves_every_wire_name() -> None:
    entries = [entry(f"tool.n{n}") for n in range(2_000)]
    generation = Generation(1, entries)
    assert all(generation.resolve_tool_name(f"tool__n{n}") is entries[n] for n in range(2_000))
