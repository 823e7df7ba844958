"""A second scan of the sources validates only new tools and gives the result of a first scan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import LoadError
from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.tool.operator_tool_settings import ToolSettingsLayer
from handrail.contract.tool.requires import Requires, ShellRequires
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import (
    DiscoveredTool,
    Generation,
    SourceContents,
    SourceRank,
    ToolEntry,
    ToolSource,
)
from handrail.registry.definition_pins import StoredPins, ThirdPartyDefinition
from handrail.registry.generation_loader import LoadCache, load_generation
from handrail.runtime.secret_store import SecretStore
from handrail.testing import ThirdPartySource

from .conftest import CONFINING, SimpleTool, turned_off

pytestmark = pytest.mark.proves("R-06")


class CountingSource:
    """The operator's source, which counts its scans."""

    rank: SourceRank = "code"
    is_third_party = False

    def __init__(self, *tools: Tool) -> None:
        self.tools = tools
        self.looks = 0

    def load(self) -> SourceContents:
        self.looks += 1
        return SourceContents(tuple(DiscoveredTool(tool, "here") for tool in self.tools))


def load(memory: LoadCache | None, *sources: Any, tier: SandboxTier = CONFINING, **more: Any) -> Generation:
    return load_generation(sources, tier=tier, cache=memory, **more)


def test_a_second_load_reuses_unchanged_entries_and_judges_new_tools() -> None:
    memory, a, b = LoadCache(), SimpleTool("a"), SimpleTool("b")
    first = load(memory, CountingSource(a, b))
    second = load(memory, CountingSource(a, SimpleTool("b"), SimpleTool("c")))
    assert second.entries["a"] is first.entries["a"]
    assert second.entries["b"] is not first.entries["b"] and second.entries["b"].tool is not b
    assert list(second.entries) == ["a", "b", "c"]
    assert second.compute_diff_from(first).added == ("c",)


def test_a_tool_with_a_changed_spec_is_checked_again() -> None:
    memory, one = LoadCache(), SimpleTool("a")
    load(memory, CountingSource(one))
    one.spec = SimpleTool("a", description="Does something else.").spec
    assert load(memory, CountingSource(one)).entries["a"].spec.description == "Does something else."


@pytest.mark.parametrize(
    ("changed", "withheld"),
    [
        ({"settings": [turned_off("a")]}, "the operator has disabled it"),
        ({"secrets": SecretStore({"other": "x"})}, "secrets that are not known"),
        ({"tier": SandboxTier("none", "no sandbox")}, "cannot be confined"),
    ],
)
def test_a_tool_is_checked_again_after_the_secrets_or_the_sandbox_change(
    changed: dict[str, Any], withheld: str
) -> None:
    memory = LoadCache()
    one = SimpleTool("a", secrets=("key",), requires=Requires(shell=(ShellRequires(cmd="git"),)))
    known: dict[str, Any] = {"secrets": SecretStore({"key": "x"}), "tier": CONFINING}
    source = CountingSource(one)
    assert load(memory, source, **known).entries["a"].unavailable_reason is None
    assert withheld in (load(memory, source, **{**known, **changed}).entries["a"].unavailable_reason or "")
    assert load(memory, source, **known).entries["a"].unavailable_reason is None


def test_an_approval_or_revocation_takes_effect_at_the_next_load(tmp_path: Path) -> None:
    memory, pins, one = LoadCache(), StoredPins(tmp_path / "state"), SimpleTool("w_now")
    source = ThirdPartySource("w", [one])
    assert load(memory, source, pins=pins).entries["w_now"].status == "quarantined"
    StoredPins(tmp_path / "state").approve("w", [ThirdPartyDefinition.from_spec(one.spec)])  # another process
    approved = load(memory, source, pins=pins)
    assert approved.entries["w_now"].unavailable_reason is None
    assert load(memory, source, pins=pins).entries["w_now"] is approved.entries["w_now"]
    StoredPins(tmp_path / "state").revoke("w")
    assert load(memory, source, pins=pins).entries["w_now"].status == "quarantined"


def test_a_load_of_changed_sources_does_not_read_the_other_sources() -> None:
    memory, own, other = (
        LoadCache(),
        CountingSource(SimpleTool("a"), SimpleTool("b_2")),
        ThirdPartySource("b", [SimpleTool("b_1"), SimpleTool("b_2")]),
    )
    assert [fault.location for fault in load(memory, own, other).quarantined] == ["llm.name"]
    other.offer_tools(SimpleTool("b_3"))
    own.tools = ()
    found = load(memory, own, other, only=[other])
    assert list(found.entries) == ["a", "b_2", "b_1", "b_3"] and own.looks == 1
    assert [fault.location for fault in found.quarantined] == ["llm.name"], "what an earlier look found still stands"
    assert list(load(memory, own, other).entries) == ["b_1", "b_2", "b_3"]


def test_a_failed_load_is_not_cached() -> None:
    memory, a = LoadCache(), SimpleTool("a")
    first = load(memory, CountingSource(a))
    with pytest.raises(LoadError):
        load(memory, CountingSource(a, SimpleTool("a")))
    assert memory.entries == first.entries


_tools = [SimpleTool(tool_id) for tool_id in ("a", "b", "a.b", "a__b", "read")]
_tools += [SimpleTool(tool_id, description="Otherwise.") for tool_id in ("a", "b")]
_held = st.lists(st.sampled_from(_tools), max_size=5)


@given(st.lists(st.tuples(_held, _held, _held, st.booleans()), min_size=2, max_size=5))
def test_a_load_with_a_cache_gives_the_same_generation_as_a_load_without(
    looks: list[tuple[list[Tool], list[Tool], list[Tool], bool]],
) -> None:
    memory = LoadCache()
    own, x, y = CountingSource(), ThirdPartySource("x"), ThirdPartySource("y", about="Of y.")
    sources: list[ToolSource] = [own, x, y]
    for held, x.tools, y.tools, put_out in looks:
        own.tools = tuple(held)
        settings = [turned_off("a")] if put_out else []
        assert outcome(memory, sources, settings) == outcome(None, sources, settings)


def outcome(memory: LoadCache | None, sources: list[ToolSource], settings: list[ToolSettingsLayer]) -> object:
    def plain(entry: ToolEntry) -> object:
        return (
            entry.id,
            entry.tool,
            entry.source,
            entry.unavailable_reason,
            entry.status,
            entry.untrusted_source,
            entry.third_party,
        )

    try:
        generation = load(memory, *sources, settings=settings)
    except LoadError as error:
        return [str(fault) for fault in error.diagnostics]
    return list(map(plain, generation.entries.values())), [str(fault) for fault in generation.quarantined]
