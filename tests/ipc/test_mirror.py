"""A generation crosses the wire whole; of what was told before nothing is read or made again."""

from __future__ import annotations

import json

import pytest
from tests.catalog.stock import BUILT_IN, built_in, entry, generation

from handrail.contract.generation import Entry, Foreign, Generation
from handrail.ipc.codec import mirror
from handrail.policy.rules.rules import default_book, in_mode

FROM = Foreign("github", "Our repositories.")


def crossed(told: Generation, before: Generation | None = None) -> Generation:
    return mirror.generation_of(json.loads(json.dumps(mirror.of_generation(told))), before)


def plain(one: Entry) -> object:
    of = (one.id, one.spec, one.source, one.definition_hash, one.withheld, one.confined_by, one.blocking)
    return *of, one.foreign, one.status


@pytest.mark.proves("R-06")
def test_of_a_later_generation_only_what_changed_is_made_anew() -> None:
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
    assert (moved.withheld, moved.foreign) == ("it is away", None) and moved.tool is first.entries["a.moves"].tool
    assert list(map(plain, second.entries.values())) == list(map(plain, later.entries.values()))
    assert list(map(plain, crossed(later).entries.values())) == list(map(plain, later.entries.values()))
    assert second.entries["a.changes"].schema is not first.entries["a.changes"].schema


def test_rules_cross_the_wire_whole() -> None:
    book = in_mode(default_book(), "accept-edits")
    assert any(rule.any_case for rule in book)
    assert mirror.rules_of(json.loads(json.dumps(mirror.of_rules(book)))).rules == book.rules
