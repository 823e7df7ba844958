"""A generation is transferred complete, and parts that the peer has are not sent again."""

from __future__ import annotations

import json

import pytest
from tests.catalog.stock import BUILT_IN, built_in, entry, generation

from handrail.contract.tool_generation import Generation, ThirdPartySourceInfo, ToolEntry
from handrail.ipc.codec import wire_encoding
from handrail.policy.rules.rules_and_modes import build_default_rule_book, with_mode

FROM = ThirdPartySourceInfo("github", "Our repositories.")


def crossed(told: Generation, before: Generation | None = None) -> Generation:
    return wire_encoding.decode_generation(json.loads(json.dumps(wire_encoding.encode_generation(told))), before)


def plain(one: ToolEntry) -> object:
    of = (one.id, one.spec, one.source, one.definition_hash, one.unavailable_reason, one.sandbox, one.is_blocking)
    return *of, one.third_party, one.status


@pytest.mark.proves("R-06")
def test_a_later_generation_rebuilds_only_the_changed_entries() -> None:
    stays, moves, changes = built_in("read"), entry("a.moves", foreign=FROM), entry("a.changes", description="Before.")
    first = crossed(generation(stays, moves, changes))
    later = generation(
        entry("a.new"),
        stays,
        entry("a.moves", withheld="it is away"),
        entry("a.changes", description="After."),
        number=2,
    )
    second = crossed(later, first)
    assert second.entries["read"] is first.entries["read"] and first.entries["read"].source == BUILT_IN
    moved = second.entries["a.moves"]
    assert (moved.unavailable_reason, moved.third_party) == ("it is away", None) and moved.tool is first.entries[
        "a.moves"
    ].tool
    assert list(map(plain, second.entries.values())) == list(map(plain, later.entries.values()))
    assert list(map(plain, crossed(later).entries.values())) == list(map(plain, later.entries.values()))
    assert second.entries["a.changes"] is not first.entries["a.changes"]


def test_rules_are_unchanged_after_encoding_and_decoding() -> None:
    book = with_mode(build_default_rule_book(), "accept-edits")
    assert any(rule.any_case for rule in book)
    assert (
        wire_encoding.decode_rule_book(json.loads(json.dumps(wire_encoding.encode_rule_book(book)))).rules == book.rules
    )
