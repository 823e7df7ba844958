"""Limits of the loaded tools: only unused search hits are evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.catalog.stock import CORE, generation, many
from tests.tools.desk import SessionValues

from handrail.catalog import loaded_tools
from handrail.catalog.loaded_tools import InteractionLoadedTools
from handrail.catalog.view import CatalogOptions, LoadedToolSet
from handrail.contract.errors import ToolError
from handrail.contract.services.job_and_tool_services import ToolMatch, ToolSearchResult
from handrail.contract.tool_generation import Generation, ToolEntry

pytestmark = pytest.mark.proves("D-03", "D-05")
NAMES = [one.id for one in CORE]
MOST = 12
STOCK = [one.id for one in many(40)]
THERE = generation(CORE, many(40), many(4, "few"))


class NamedToolSearch:
    """Finds what the query names."""

    async def find(
        self, generation: Generation, query: str, *, limit: int, source: Callable[[ToolEntry], str], **_: Any
    ) -> ToolSearchResult:
        return ToolSearchResult(tuple(ToolMatch(tool_id, "", 1.0, 1.0) for tool_id in query.split()[:limit]))

    def preload_index(self, generation: Generation) -> None:
        return None

    def find_tools_for_unknown_name(self, generation: Generation, name: str, count: int = 2) -> list[str]:
        return []


SEARCH: Any = NamedToolSearch()


@pytest.fixture(autouse=True)
def few_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_tools, "MAX_ACTIVE_TOOLS", MOST)


def full() -> InteractionLoadedTools:
    return InteractionLoadedTools("s", CatalogOptions(), SessionValues(), SEARCH)


def list_visible_ids(of: InteractionLoadedTools) -> list[str]:
    return [spec.id for spec in of.loaded_tool_specs(THERE)]


async def find(of: InteractionLoadedTools, ids: Sequence[str]) -> ToolSearchResult:
    return await of.make_call_catalog(THERE).search_and_load(" ".join(ids), limit=len(ids))


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
async def test_a_full_view_drops_only_tools_that_were_found_and_never_called(
    doings: list[tuple[str, list[str]]],
) -> None:
    of, copy = full(), full()
    of.on_change = lambda steps, _: void(copy.active.apply_loading_steps(steps))
    stays: set[str] = set()
    turns: list[tuple[loaded_tools.ActiveState, list[str]]] = []
    for what, ids in doings:
        before, left = list_visible_ids(of), list[str]()
        loose = [one for one in before if one not in NAMES and one not in stays]
        try:
            if what == "find":
                found = await find(of, ids)
                left = list(found.unloaded)
                hits = [hit.tool_id for hit in found.matches]
                assert set(hits) <= set(list_visible_ids(of)), "what was found is there"
                assert set(ids) <= set(hits) or not set(loose) & set(list_visible_ids(of)) - set(ids), (
                    "as much as there is room for"
                )
            elif what == "call":
                of.pin_called_tool(ids[0])
                stays.update(one for one in ids if one in before)
            elif what in ("load", "category"):
                brought = await of.make_call_catalog(THERE).load(ids[0] if what == "load" else "few")
                left = list(brought.unloaded)
                stays.update(brought.tools)
            elif what == "turn":
                turns.append((of.begin_turn(THERE), list_visible_ids(of)))
            else:
                of = again(of, copy)
        except ToolError as full_up:
            assert full_up.kind == "conflict" and list_visible_ids(of) == before
            room = MOST - len(before) + len([one for one in loose if one not in ids])
            assert room < len([one for one in (ids if what != "category" else ["few"] * 4) if one not in before])
        now = list_visible_ids(of)
        gone, came = apart(before, now)
        assert len(now) <= MOST and now[: len(NAMES)] == NAMES
        assert gone == [one for one in before if one in left] and not stays & set(gone)
        assert now == [*(one for one in before if one not in gone), *came], "what stays keeps its place"
        assert gone == [one for one in loose if one not in ids][: len(gone)], "what was found longest ago goes first"
        assert not gone or len(now) == MOST, "nothing goes as long as there is room"
        assert list_visible_ids(copy) == now and copy.active.evictable_tools == of.active.evictable_tools
    for in_view, then in turns:
        assert [spec.id for spec in of.loaded_tool_specs(THERE, in_view)] == then, "a turn keeps what it began with"


def void(_: object) -> None:
    pass


def again(of: InteractionLoadedTools, copy: InteractionLoadedTools) -> InteractionLoadedTools:
    """Restore it as another lease holder does, from the copy of a client."""
    new = full()
    new.start_next_interaction(1, copy.active.build_minimal_loading_steps())
    new.on_change = of.on_change
    return new


async def test_tools_found_by_one_call_are_not_unloaded_by_its_next_search() -> None:
    of = full()
    door = of.make_call_catalog(THERE)
    first = await door.search_and_load(" ".join(STOCK[:5]), limit=8)
    second = await door.search_and_load(" ".join(STOCK[5:13]), limit=8)
    assert [len(found.matches) for found in (first, second)] == [5, MOST - len(NAMES) - 5] and not second.unloaded
    with pytest.raises(ToolError, match="The search result would load 8 tools"):
        await door.search_and_load(" ".join(STOCK[16:24]), limit=8)
    third = await find(of, STOCK[16:18])
    assert list(third.unloaded) == STOCK[:2]


async def test_found_and_called_tools_are_restored_with_the_session() -> None:
    values = SessionValues()
    of = InteractionLoadedTools("s", CatalogOptions(), values, SEARCH)
    await find(of, STOCK[:3])
    of.pin_called_tool(STOCK[0])
    await find(of, STOCK[3:4])
    back = InteractionLoadedTools("s", CatalogOptions(), values, SEARCH)
    await back.restore_loaded_tools()
    assert list_visible_ids(back) == [*NAMES, *STOCK[:4]] and back.active.evictable_tools == tuple(STOCK[1:4])


def test_a_loaded_tool_set_keeps_its_order_and_counts_each_tool_once() -> None:
    active = LoadedToolSet(["a"])
    assert active.apply_loading_steps(["b", "a", "?c", "?b", "c", "c", "-d"]) == ("b", "?c", "c")
    assert (active.list_loaded_ids_at_step(), active.list_loaded_ids_at_step(2), len(active), "c" in active, "d" in active) == (("a", "b", "c"), ("a", "b"), 4, True, False)  # fmt: skip
    active.apply_loading_steps(["-b", "?b"])
    assert (
        active.list_loaded_ids_at_step(),
        active.list_loaded_ids_at_step(4),
        active.build_minimal_loading_steps(),
    ) == (
        ("a", "c", "b"),
        ("a", "b", "c"),
        ("a", "c", "?b"),
    )


def test_a_very_long_interaction_does_not_keep_every_tool_that_was_ever_loaded() -> None:
    of = full()
    first = of.begin_turn(THERE)
    for number in range(2_000):
        of.load_tools(THERE, [STOCK[number % 40]], found=True)
    now = list_visible_ids(of)
    last = of.begin_turn(THERE)
    assert len(of.active) < 100 and list_visible_ids(of) == now
    assert [spec.id for spec in of.loaded_tool_specs(THERE, first)] == NAMES and [
        spec.id for spec in of.loaded_tool_specs(THERE, last)
    ] == now
    assert all(of.was_schema_shown(THERE, tool_id) for tool_id in now) and not of.was_schema_shown(THERE, "few.t0000")
