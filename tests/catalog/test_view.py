"""Core tools, and the further tools that an interaction has loaded."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.catalog.stock import CORE, built_in, entry, generation, many
from tests.tools.desk import SessionValues

from handrail.catalog.loaded_tools import ActiveState, InteractionLoadedTools
from handrail.catalog.view import MAX_INITIALLY_ACTIVE, CatalogOptions, CatalogView, get_view
from handrail.contract.errors import ToolError
from handrail.contract.tool_generation import Generation, ThirdPartySourceInfo

NAMES = [one.id for one in CORE]


def interaction(**options: object) -> InteractionLoadedTools:
    return InteractionLoadedTools("s", CatalogOptions(**options), SessionValues())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def list_visible_ids(of: InteractionLoadedTools, at: Generation, in_view: ActiveState | None = None) -> list[str]:
    return [spec.id for spec in of.loaded_tool_specs(at, in_view)]


@pytest.mark.proves("D-06")
def test_a_view_starts_with_up_to_twenty_tools_or_with_the_core_tools_only() -> None:
    few = generation(CORE, many(MAX_INITIALLY_ACTIVE - len(CORE)))
    assert len(list_visible_ids(interaction(), few)) == MAX_INITIALLY_ACTIVE
    assert list_visible_ids(interaction(), generation(CORE, many(MAX_INITIALLY_ACTIVE - len(CORE) + 1))) == NAMES


@pytest.mark.proves("D-06")
@pytest.mark.parametrize("count", [19, 20, 21, 25, 26])
def test_a_view_shows_at_most_twenty_tools_that_were_not_loaded(count: int) -> None:
    there = generation(CORE, many(count - len(CORE)))
    assert len(list_visible_ids(interaction(), there)) == (count if count <= 20 else len(CORE))
    beside_shipped = generation(
        CORE, many(count - len(CORE)), [built_in(f"git.t{n}", category="git") for n in range(30)]
    )
    assert len(list_visible_ids(interaction(), beside_shipped)) == (count if count <= 20 else len(CORE))


@pytest.mark.proves("D-06")
def test_a_few_operator_tools_are_in_view_however_many_tools_ship() -> None:
    shipped = [built_in(f"git.t{n}", category="git") for n in range(30)]
    theirs = entry("x_a", foreign=ThirdPartySourceInfo("x"))
    of = interaction()
    few = generation(CORE, shipped, many(3), theirs)
    assert list_visible_ids(of, few) == [*(one.id for one in CORE), "reports.t0000", "reports.t0001", "reports.t0002"]
    assert CatalogView(few, CatalogOptions()).get_tool_status(few.entries["reports.t0001"]) == "active"
    assert CatalogView(few, CatalogOptions()).get_tool_status(theirs) == "deferred"
    more = generation(CORE, shipped, many(MAX_INITIALLY_ACTIVE - len(CORE) + 1))
    assert list_visible_ids(interaction(), more) == [one.id for one in CORE]


def test_withheld_tools_are_neither_counted_nor_shown() -> None:
    there = generation(CORE, many(15), many(30, "gone", withheld="no"), built_in("git.x", core=True, withheld="no"))
    of = interaction()
    assert len(list_visible_ids(of, there)) == 20
    of.load_tools(there, ["gone.t0001", "git.x", "nowhere"])
    assert (
        len(list_visible_ids(of, there)) == 20 and "gone" not in CatalogView(there, CatalogOptions()).category_members
    )


@pytest.mark.proves("D-01a")
def test_core_tools_of_an_agents_manifest_follow_the_shipped_ones() -> None:
    there = generation(many(30), CORE)
    assert list_visible_ids(interaction(core=("reports.t0009", "reports.t0001", "read")), there) == [
        *NAMES,
        "reports.t0009",
        "reports.t0001",
    ]


@pytest.mark.proves("D-01a")
def test_a_third_party_tool_that_claims_to_be_core_stays_in_its_category() -> None:
    claims = entry("x_a", tier="core", foreign=ThirdPartySourceInfo("x"))
    there = generation(CORE, many(30), claims)
    assert list_visible_ids(interaction(), there) == NAMES and CatalogView(there, CatalogOptions()).category_members[
        "x"
    ] == ("x_a",)


@pytest.mark.proves("D-01a")
def test_an_agent_that_cannot_load_tools_sees_all_its_tools() -> None:
    assert len(list_visible_ids(interaction(), generation(built_in("read", core=True), many(50)))) == 51


@pytest.mark.proves("D-03")
def test_the_initial_view_of_an_interaction_stays_when_more_tools_arrive() -> None:
    of = interaction()
    before = list_visible_ids(of, generation(CORE, many(10)))
    after = list_visible_ids(of, generation(CORE, many(100), number=2))
    assert after == before and len(after) == 15
    of.start_next_interaction()
    assert list_visible_ids(of, generation(CORE, many(100), number=3)) == NAMES


@pytest.mark.proves("D-02", "D-03")
async def test_a_load_adds_a_category_or_a_tool_and_nothing_twice() -> None:
    there = generation(CORE, many(12), many(12, "sales"), entry("one.off", category="other"))
    of = interaction()
    door = of.make_call_catalog(there)
    turn = of.begin_turn(there)
    brought = await door.load("sales")
    assert (brought.name, len(brought.tools), brought.added) == ("sales", 12, brought.tools)
    assert list_visible_ids(of, there, turn) == NAMES, "the turn that is under way keeps what it began with"
    assert list_visible_ids(of, there) == [*NAMES, *brought.tools]
    again = await door.load("sales")
    assert (again.tools, again.added) == (brought.tools, ())
    assert (await door.load("one.off")).added == ("one.off",)
    assert (await door.load("one__off")).name == "one.off"
    assert (await door.load("read")).is_core and (await door.load("core")).is_core
    assert list_visible_ids(of, there) == [*NAMES, *brought.tools, "one.off"] == list(await door.list_active())
    empty = await door.load("hooks")
    assert (empty.kind, empty.tools) == ("category", ())


@pytest.mark.proves("D-02")
async def test_an_error_for_an_unknown_name_lists_the_existing_names() -> None:
    there = generation(CORE, many(30), many(3, "sales"), entry("no.go", category="x", withheld="its key is missing"))
    door = interaction().make_call_catalog(there)
    with pytest.raises(
        ToolError, match=r"No category or tool has the name 'sale'\. Did you mean sales.*: reports, sales\.$"
    ) as told:
        await door.load("sale")
    assert told.value.kind == "invalid_input"
    with pytest.raises(ToolError, match="its key is missing") as told:
        await door.load("no.go")
    assert told.value.kind == "unavailable"
    crowd = interaction().make_call_catalog(generation(CORE, *(many(1, f"d{n}") for n in range(100))))
    with pytest.raises(ToolError, match="and 70 more, which browse_tools lists") as told:
        await crowd.load("?" * 5_000)
    assert len(told.value.text) < 700


async def test_category_tool_counts_follow_the_current_generation() -> None:
    of = interaction()
    first = await of.make_call_catalog(generation(CORE, many(30), many(2, "git"))).list_categories()
    assert [(one.name, one.tool_count) for one in first if one.tool_count] == [("git", 2), ("reports", 30)]
    second = await of.make_call_catalog(
        generation(CORE, many(30), many(5, "git"), many(1, "zoo", withheld="x"), number=2)
    ).list_categories()
    assert [(one.name, one.tool_count) for one in second if one.tool_count] == [("git", 5), ("reports", 30)]


@pytest.mark.proves("D-03")
@given(st.data())
def test_a_view_only_grows_at_its_end_until_the_next_interaction(data: st.DataObject) -> None:
    there = generation(CORE, many(40))
    of = interaction()
    known = [*NAMES, *(one.id for one in many(40)), "nowhere"]
    history = [list_visible_ids(of, there)]
    for _ in range(data.draw(st.integers(0, 12))):
        if data.draw(st.booleans()):
            ids = data.draw(st.lists(st.sampled_from(known), max_size=5))
            before = set(history[-1])
            added, left = of.load_tools(there, ids)
            assert not left
            assert set(added) == set(ids) - before - {"nowhere"} and len(set(added)) == len(added)
            now = list_visible_ids(of, there)
            assert now == [*history[-1], *added]
        else:
            of.start_next_interaction()
            now = list_visible_ids(of, there)
            assert now == NAMES
            history = [now]
        history.append(now)
        assert len(set(now)) == len(now) and now[: len(NAMES)] == NAMES
        assert list_visible_ids(of, there, of.begin_turn(there)) == now
        assert all(of.was_schema_shown(there, tool_id) for tool_id in now)


def test_a_view_does_not_keep_its_generation_alive() -> None:
    """Its tools could never end."""
    there = generation(CORE, many(3))
    of = interaction()
    get_view(there, CatalogOptions())
    of.begin_turn(there)
    gone = weakref.ref(there)
    del there
    gc.collect()
    assert gone() is None
