"""Room in a full view: what a search found longest ago and nobody has called makes it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.catalog.stock import CORE, generation, many
from tests.tools.desk import Memory

from handrail.catalog import interaction
from handrail.catalog.interaction import InteractionState
from handrail.catalog.view import ActiveSet, CatalogOptions
from handrail.contract.errors import ToolError
from handrail.contract.generation import Generation, ToolEntry
from handrail.contract.services.jobs import ToolMatch, ToolSearchResult

pytestmark = pytest.mark.proves("D-03", "D-05")
NAMES = [one.id for one in CORE]
MOST = 12
STOCK = [one.id for one in many(40)]
THERE = generation(CORE, many(40), many(4, "few"))


class Asked:
    """Finds what the query names."""

    async def find(
        self, generation: Generation, query: str, *, limit: int, source: Callable[[ToolEntry], str], **_: Any
    ) -> ToolSearchResult:
        return ToolSearchResult(tuple(ToolMatch(tool_id, "", 1.0, 1.0) for tool_id in query.split()[:limit]))

    def preload_index(self, generation: Generation) -> None:
        return None

    def find_similar(self, generation: Generation, name: str, count: int = 2) -> list[str]:
        return []


@pytest.fixture(autouse=True)
def few_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interaction, "MAX_ACTIVE_TOOLS", MOST)


def full() -> InteractionState:
    return InteractionState("s", CatalogOptions(), Memory(), Asked())


def shown(of: InteractionState) -> list[str]:
    return [spec.id for spec in of.active_specs(THERE)]


async def find(of: InteractionState, ids: Sequence[str]) -> ToolSearchResult:
    return await of.make_catalog(THERE).search(" ".join(ids), limit=len(ids))


def apart(before: list[str], now: list[str]) -> tuple[list[str], list[str]]:
    return [one for one in before if one not in now], [one for one in now if one not in before]


FEW = STOCK[:16]
SOME = st.lists(st.sampled_from(FEW), min_size=1, max_size=6, unique=True)
DOINGS = st.lists(
    st.tuples(st.just("find"), SOME)
    | st.tuples(st.sampled_from(["call", "call", "load"]), st.sampled_from(FEW).map(lambda one: [one]))
    | st.tuples(st.sampled_from(["category", "turn", "copy"]), st.just([""])),
    max_size=30,
)


@given(DOINGS)
async def test_a_view_is_never_larger_than_what_is_given_and_only_what_was_found_and_not_called_leaves_it(
    doings: list[tuple[str, list[str]]],
) -> None:
    of, copy = full(), full()
    of.on_change = lambda steps, _: void(copy.active.apply_steps(steps))
    stays: set[str] = set()
    turns: list[tuple[interaction.ActiveState, list[str]]] = []
    for what, ids in doings:
        before, left = shown(of), list[str]()
        loose = [one for one in before if one not in NAMES and one not in stays]
        try:
            if what == "find":
                found = await find(of, ids)
                left = list(found.unloaded)
                hits = [hit.tool_id for hit in found.matches]
                assert set(hits) <= set(shown(of)), "what was found is there"
                assert set(ids) <= set(hits) or not set(loose) & set(shown(of)) - set(ids), (
                    "as much as there is room for"
                )
            elif what == "call":
                of.mark_called(ids[0])
                stays.update(one for one in ids if one in before)
            elif what in ("load", "category"):
                brought = await of.make_catalog(THERE).load(ids[0] if what == "load" else "few")
                left = list(brought.unloaded)
                stays.update(brought.tools)
            elif what == "turn":
                turns.append((of.start_turn(THERE), shown(of)))
            else:
                of = again(of, copy)
        except ToolError as full_up:
            assert full_up.kind == "conflict" and shown(of) == before
            room = MOST - len(before) + len([one for one in loose if one not in ids])
            assert room < len([one for one in (ids if what != "category" else ["few"] * 4) if one not in before])
        now = shown(of)
        gone, came = apart(before, now)
        assert len(now) <= MOST and now[: len(NAMES)] == NAMES
        assert gone == [one for one in before if one in left] and not stays & set(gone)
        assert now == [*(one for one in before if one not in gone), *came], "what stays keeps its place"
        assert gone == [one for one in loose if one not in ids][: len(gone)], "what was found longest ago goes first"
        assert not gone or len(now) == MOST, "nothing goes as long as there is room"
        assert shown(copy) == now and copy.active.evictable == of.active.evictable
    for in_view, then in turns:
        assert [spec.id for spec in of.active_specs(THERE, in_view)] == then, "a turn keeps what it began with"


def void(_: object) -> None:
    pass


def again(of: InteractionState, copy: InteractionState) -> InteractionState:
    """As another holder of the workspace goes on with it, told by the one who had a copy."""
    new = full()
    new.start(1, copy.active.minimal_steps())
    new.on_change = of.on_change
    return new


async def test_what_one_call_found_makes_no_room_for_what_else_it_finds() -> None:
    of = full()
    door = of.make_catalog(THERE)
    first = await door.search(" ".join(STOCK[:5]), limit=8)
    second = await door.search(" ".join(STOCK[5:13]), limit=8)
    assert [len(found.matches) for found in (first, second)] == [5, MOST - len(NAMES) - 5] and not second.unloaded
    with pytest.raises(ToolError, match="The search result would load 8 tools"):
        await door.search(" ".join(STOCK[16:24]), limit=8)
    third = await find(of, STOCK[16:18])
    assert list(third.unloaded) == STOCK[:2]


async def test_what_was_found_and_called_is_known_when_the_session_is_open_again() -> None:
    values = Memory()
    of = InteractionState("s", CatalogOptions(), values, Asked())
    await find(of, STOCK[:3])
    of.mark_called(STOCK[0])
    await find(of, STOCK[3:4])
    back = InteractionState("s", CatalogOptions(), values, Asked())
    await back.restore()
    assert shown(back) == [*NAMES, *STOCK[:4]] and back.active.evictable == tuple(STOCK[1:4])


def test_an_active_set_keeps_order_and_counts_each_once() -> None:
    active = ActiveSet(["a"])
    assert active.apply_steps(["b", "a", "?c", "?b", "c", "c", "-d"]) == ("b", "?c", "c")
    assert (active.ids_after(), active.ids_after(2), len(active), "c" in active, "d" in active) == (("a", "b", "c"), ("a", "b"), 4, True, False)  # fmt: skip
    active.apply_steps(["-b", "?b"])
    assert (active.ids_after(), active.ids_after(4), active.minimal_steps()) == (
        ("a", "c", "b"),
        ("a", "b", "c"),
        ("a", "c", "?b"),
    )


def test_an_interaction_of_days_does_not_keep_all_that_ever_was_in_view() -> None:
    of = full()
    first = of.start_turn(THERE)
    for number in range(2_000):
        of.load_tools(THERE, [STOCK[number % 40]], found=True)
    now = shown(of)
    last = of.start_turn(THERE)
    assert len(of.active) < 100 and shown(of) == now
    assert [spec.id for spec in of.active_specs(THERE, first)] == NAMES and [
        spec.id for spec in of.active_specs(THERE, last)
    ] == now
    assert all(of.was_shown(THERE, tool_id) for tool_id in now) and not of.was_shown(THERE, "few.t0000")
