"""Tool IDs and provider names: each provider name maps to exactly one tool."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.tool.tool_ids_and_wire_names import (
    LOCKED_IDS,
    MAX_WIRE_NAME,
    find_tool_id_fault,
    nearest_names,
    wire_name,
)

part = st.text(alphabet="abcXYZ019_-", min_size=1, max_size=40)
ids = st.lists(part, min_size=1, max_size=4).map(lambda parts: "a" + ".".join(parts)).filter(lambda i: len(i) <= 128)


@pytest.mark.proves("K-04")
@given(ids)
def test_every_id_has_a_wire_name_that_every_provider_accepts(tool_id: str) -> None:
    assert find_tool_id_fault(tool_id) is None
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", wire_name(tool_id))
    assert wire_name(tool_id) == wire_name(tool_id)


@pytest.mark.proves("K-04")
def test_long_ids_with_the_same_start_get_distinct_wire_names() -> None:
    ids = [f"{'x' * 100}.{n}" for n in range(50)]
    names = {wire_name(one) for one in ids}
    assert len(names) == 50
    assert all(len(name) == MAX_WIRE_NAME == 64 for name in names)


@pytest.mark.proves("K-04")
@pytest.mark.parametrize(
    "tool_id", ["a" * length for length in range(60, 129)] + [f"{'b' * n}.c" for n in range(58, 68)]
)
def test_a_wire_name_has_at_most_64_characters_for_ids_of_any_length(tool_id: str) -> None:
    """64 is what OpenAI and Anthropic take."""
    assert find_tool_id_fault(tool_id) is None and len(wire_name(tool_id)) <= 64


@pytest.mark.proves("K-04")
@pytest.mark.parametrize("tool_id", ["read", "email.send", "choir.fs.read", "github_create_issue", "a-b.c-d", "A.1"])
def test_ids_may_be_namespaced(tool_id: str) -> None:
    assert find_tool_id_fault(tool_id) is None


@pytest.mark.parametrize(
    "tool_id",
    ["", ".a", "a.", "a..b", "1a", "_a", "a b", "a/b", "a:b", "é", "a\n", "a\x00", "rеad", "a" * 129, "*", "a.*"],
)
def test_an_invalid_tool_id_is_refused(tool_id: str) -> None:
    assert find_tool_id_fault(tool_id)


def test_the_nearest_names_come_first_and_are_at_most_three() -> None:
    known = ["read", "write", "edit", "web_search", "web_fetch", "tool_search"]
    assert nearest_names("raed", known)[0] == "read"
    assert nearest_names("web_serch", known)[0] == "web_search"
    assert len(nearest_names("e", known)) <= 3
    assert nearest_names("zzzzzzzz", known) == []
    assert nearest_names("x" * 10_000_000, known) == []


def test_thirteen_locked_ids_are_their_own_wire_names() -> None:
    assert len(set(LOCKED_IDS)) == 13
    assert all(wire_name(tool_id) == tool_id and find_tool_id_fault(tool_id) is None for tool_id in LOCKED_IDS)


def test_the_nearest_of_very_many_long_names_is_found_with_bounded_work() -> None:
    known = [f"{'ab' * 100}{number}" for number in range(100_000)] + ["report-final.txt"]
    assert nearest_names("reprot-final.txt", known) == ["report-final.txt"]
    assert len(nearest_names("ab" * 500_000, known)) == 3
