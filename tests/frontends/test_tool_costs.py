"""``handrail tools --cost``: the share of a model's context that the tools take."""

from __future__ import annotations

import json

import pytest
from tests.frontends.conftest import Here


@pytest.mark.proves("D-10")
def test_tools_cost_lists_tokens_by_tool_category_and_source_with_the_largest_first(here: Here) -> None:
    told = json.loads(here("tools", "--cost", "--json").out)
    tokens = [tool["tokens"] for tool in told["tools"]]
    assert tokens == sorted(tokens, reverse=True) and sum(tokens) == told["whole"] > told["in_view"] > told["index"] > 0
    assert {"core", "git", "files"} < {share["name"] for share in told["categories"]}
    assert [share["name"] for share in told["sources"]] == ["built-in"] and told["estimated"] is True
    lines = here("tools", "--cost").out.splitlines()
    assert f"about {told['in_view']:,} tokens loaded" in lines[0] and f"{told['whole']:,} with every tool" in lines[0]
    assert f"the form for {told['dialect']}" in lines[2]
    dearest = told["tools"][0]
    row = next(line.split() for line in lines if line.startswith(f"{dearest['id']} "))
    assert f"{dearest['tokens']:,}" in row and f"{100 * dearest['tokens'] / told['whole']:.1f}" in row
    assert any(line.startswith("CATEGORY") for line in lines) and any(line.startswith("SOURCE") for line in lines)


@pytest.mark.proves("D-10")
def test_a_smaller_index_lowers_the_index_cost_and_keeps_the_total(here: Here) -> None:
    few = json.loads(here("tools", "--cost", "--json", "--set", "catalog.index_tokens=0").out)
    more = json.loads(here("tools", "--cost", "--json").out)
    assert few["index"] < more["index"] and few["whole"] == more["whole"]


@pytest.mark.proves("D-10")
def test_doctor_reports_the_tokens_of_tools_in_one_line(here: Here) -> None:
    told = json.loads(here("tools", "--cost", "--json").out)
    (check,) = [check for check in json.loads(here("doctor", "--json").out) if check["name"] == "tokens of tools"]
    assert f"{told['in_view']:,} tokens" in check["detail"] and f"{told['whole']:,} with" in check["detail"]
