"""The tokens that a catalog costs at the start of a turn, with and without progressive loading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.catalog.stock import CORE, entry, generation, many

from handrail.catalog.provider_dialects import GEMINI, MCP
from handrail.catalog.schema_adapter import adapt_tool
from handrail.catalog.tool_prompt import (
    build_tool_prompt_sections,
    compute_token_costs,
    derive_source_group_name,
    estimate_json_tokens,
    estimate_llm_view_tokens,
    estimate_loaded_tool_tokens,
    estimate_tokens,
    format_unloaded_tool_index,
)
from handrail.catalog.view import CatalogOptions, CatalogView
from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.tool.tool_ids_and_wire_names import RESOURCE_IDS
from handrail.contract.tool_generation import ThirdPartySourceInfo, ToolEntry
from handrail.registry.generation_loader import load_generation
from handrail.registry.sources.code_sources import BuiltinSource

OPTIONS = CatalogOptions()


def view(*entries: object) -> CatalogView:
    return CatalogView(generation(*entries), OPTIONS)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def realistic(number: int) -> ToolEntry:
    """One of the tools that other systems have by the hundred: a sentence, and a few parameters with one each."""
    properties = {
        f"{name}_{number % 7}": {"type": kind, "description": f"The {name} that the {kind} of this request is for."}
        for name, kind in (("account", "string"), ("limit", "integer"), ("begin", "string"))
    }
    return entry(
        f"area{number % 40:02d}.action_{number:04d}",
        description=f"Looks up what area {number % 40} has recorded for an account since a day, action {number}.",
        parameters={"type": "object", "properties": properties, "required": list(properties)[:1]},
        category=f"area{number % 40:02d}",
    )


def shipped() -> list[ToolEntry]:
    entries = load_generation([BuiltinSource()], tier=SandboxTier("test", "")).entries.values()
    return [entry for entry in entries if entry.unavailable_reason is None]


@pytest.mark.proves("D-10")
def test_a_view_of_a_thousand_tools_costs_at_most_a_thirtieth_of_all_tokens() -> None:
    costs = compute_token_costs(
        view(shipped(), [realistic(n) for n in range(1_000 - len(shipped()) + len(RESOURCE_IDS))]), OPTIONS.index_tokens
    )
    assert len(costs.tools) == 1_000 and costs.index_tokens > 100
    assert {tool.standing for tool in costs.active_tools} == {"core"} and "read" in {
        tool.id for tool in costs.active_tools
    }
    assert costs.active_tokens * 30 <= costs.total_tokens
    assert costs.total_tokens < 200 * 1_000, "the others are no larger than tools are elsewhere"


@pytest.mark.proves("D-10")
def test_token_costs_by_tool_category_and_source_each_add_up_to_the_total() -> None:
    foreign = [replace(one, third_party=ThirdPartySourceInfo("mail")) for one in many(30, "letters")]
    arranged = view(CORE, many(12, "git"), foreign, entry("off", withheld="it cannot run here"))
    costs = compute_token_costs(arranged, OPTIONS.index_tokens)
    assert costs.total_tokens == sum(estimate_llm_view_tokens(one.spec) for one in arranged.available_tools.values()), (
        "each provider is given the same"
    )
    for shares in (costs.costs_by_category, costs.costs_by_source):
        assert sum(share.tokens for share in shares) == costs.total_tokens
        assert sum(share.in_view for share in shares) + costs.index_tokens == costs.active_tokens
        assert sum(share.tools for share in shares) == len(costs.tools) == 47
    assert {share.name: share.tools for share in costs.costs_by_category} == {"core": 5, "git": 12, "mail": 30}
    assert {share.name: share.tools for share in costs.costs_by_source} == {"built-in": 5, "here": 12, "mail": 30}
    assert costs.index_tokens == estimate_tokens(
        "# More tools\n\n" + format_unloaded_tool_index(arranged, OPTIONS.index_tokens)
    )
    assert [tool.tokens for tool in costs.tools] == sorted((tool.tokens for tool in costs.tools), reverse=True)


@pytest.mark.proves("D-10")
def test_a_view_of_all_tools_has_no_index_and_counts_their_guidance() -> None:
    guided = entry("a.guided", guidance="Call it first.")
    costs = compute_token_costs(view(guided, entry("b.plain")), OPTIONS.index_tokens)
    assert costs.index_tokens == 0 and costs.active_tokens == costs.total_tokens == sum(
        tool.tokens for tool in costs.tools
    )
    assert estimate_loaded_tool_tokens(guided.spec, MCP) == estimate_llm_view_tokens(guided.spec) + estimate_tokens(
        build_tool_prompt_sections("", [guided.spec])[0]
    )
    assert compute_token_costs(view(), OPTIONS.index_tokens).to_dict()["whole"] == 0


def test_token_costs_use_the_form_of_the_provider_with_the_largest_request() -> None:
    held = {
        f"d{n}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "ab"}} for n in range(6)
    }
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": {**held, "d6": {"type": "string"}},
    }
    one = entry("grow", parameters=parameters)
    costs = compute_token_costs(view(one), OPTIONS.index_tokens)
    sent = adapt_tool(one.spec.build_llm_view(), GEMINI)[0]
    assert costs.dialect == costs.to_dict()["dialect"] == "gemini"
    assert costs.total_tokens > 2 * estimate_llm_view_tokens(one.spec)
    assert costs.total_tokens == pytest.approx(estimate_json_tokens(sent), rel=0.02)


def test_a_source_groups_tools_by_folder_package_entry_point_or_server() -> None:
    assert derive_source_group_name(entry("a", source="/config/tools/a.json")) == "/config/tools"
    assert derive_source_group_name(entry("a", source="bank.tools.transfer")) == "bank.tools"
    assert derive_source_group_name(entry("a", source="entry point a (b.c:d)")) == "entry point a (b.c:d)"
    assert derive_source_group_name(entry("a", source="mail: a", foreign=ThirdPartySourceInfo("mail"))) == "mail"
