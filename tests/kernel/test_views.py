"""The tools loaded in an interaction: more from turn to turn, and none after the interaction."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import Opens, by_both_doors
from tests.kernel.test_agents import put_agent

from handrail import Tool, open_kernel, tool
from handrail.catalog import loaded_tools
from handrail.contract.calls_and_results import ProposedCall
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.scripted_kernel import temporary_kernel

kernel_in = by_both_doors(rules=["allow *"])
CORE = ["read", "write", "edit", "glob", "grep", "bash", "todo", "question", "skill", "web_fetch"]
FINDERS = ["browse_tools", "load_tools", "find_tools", "tool_search", "info"]


def tools(category: str, count: int, **declared: Any) -> list[Tool]:
    def made(number: int) -> Tool:
        given: dict[str, Any] = {"side_effect": "read", "locks": [], "category": category, **declared}

        @tool(id=f"{category}.t{number:02d}", description=f"Counts {category} number {number}.", **given)
        async def count_up(at: int) -> int:
            return at + number

        return count_up

    return [made(number) for number in range(count)]


MANY = [*tools("sales", 12), *tools("stock", 12)]


def list_ids(specs: Iterable[Any]) -> list[str]:
    return [spec.id for spec in specs]


@pytest.mark.proves("D-01a", "D-02", "D-03")
async def test_loaded_tools_appear_at_the_next_turn_and_are_unloaded_with_the_interaction(
    tmp_path: Path, kernel_in: Opens
) -> None:
    async with kernel_in(tmp_path, tools=MANY) as kernel:
        session = await kernel.session()
        first = session.start_turn()
        assert list_ids(first.tool_specs) == [*CORE, *FINDERS]
        browsed = (await session.call("browse_tools", {})).data["categories"]
        counts = {one["name"]: one["tool_count"] for one in browsed}
        assert (counts["sales"], counts["stock"], counts["files"]) == (12, 12, 9)
        assert all(set(one) == {"name", "description", "tool_count"} for one in browsed)
        (answer,) = await first.call_all([("load_tools", {"category": "stock"})])
        assert answer.result.data == {
            "loaded": "stock",
            "tools_added": [one.spec.id for one in MANY[12:]],
            "message": "12 stock tools are now available.",
        }
        assert list_ids(first.tool_specs) == [*CORE, *FINDERS], "the turn that is under way keeps its own"
        second = session.start_turn()
        assert list_ids(second.tool_specs) == [*CORE, *FINDERS, *(one.spec.id for one in MANY[12:])]
        again = (await session.call("load_tools", {"category": "stock"})).data
        assert (again["tools_added"], again["message"]) == ([], "All 12 stock tools were already loaded.")
        one = (await session.call("load_tools", {"tool": "sales__t03"})).data
        assert (one["tools_added"], one["message"]) == (["sales.t03"], "sales.t03 is now available.")
        core = (await session.call("load_tools", {"tool": "bash"})).data
        assert (core["tools_added"], core["message"]) == ([], "bash is a core tool: always loaded.")
        assert list_ids(session.active_tools)[-2:] == ["stock.t11", "sales.t03"]
        await session.start_interaction("another matter")
        assert list_ids(session.active_tools) == list_ids(session.start_turn().tool_specs) == [*CORE, *FINDERS]


@pytest.mark.proves("D-02")
async def test_a_failed_load_lists_the_available_categories(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=MANY) as kernel:
        session = await kernel.session()
        refused = await session.call("load_tools", {"category": "sails"})
        assert refused.error_kind == "invalid_input"
        assert "Did you mean sales" in str(refused.error_text) and "sales, stock" in str(refused.error_text)
        for unclear in ({}, {"category": "sales", "tool": "sales.t01"}):
            told = await session.call("load_tools", unclear)
            assert told.error_kind == "invalid_input" and "Pass `category` with a name from" in str(told.error_text)


@pytest.mark.proves("D-04")
async def test_a_tool_outside_the_view_can_still_be_called(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=MANY) as kernel:
        session = await kernel.session()
        (answer,) = await session.start_turn().call_all([("stock__t05", {"at": 2})])
        assert answer.result.data == 7
        assert list_ids(session.active_tools) == [*CORE, *FINDERS]


@pytest.mark.proves("D-04")
async def test_an_invalid_call_of_an_unloaded_tool_returns_the_schema_and_loads_the_tool(
    tmp_path: Path, kernel_in: Opens
) -> None:
    async with kernel_in(tmp_path, tools=MANY) as kernel:
        session = await kernel.session()
        (answer,) = await session.start_turn().call_all([ProposedCall("stock__t05", {"number": 2})])
        assert answer.result.error_kind == "invalid_input"
        assert answer.result.data["tool"] == "stock.t05"
        assert answer.result.data["parameters"]["properties"]["at"] == {"type": "integer"}
        assert answer.model.to_dict()["data"]["parameters"]["required"] == ["at"]
        turn = session.start_turn()
        assert list_ids(turn.tool_specs)[-1] == "stock.t05"
        (seen,) = await turn.call_all([("stock__t05", {"number": 2})])
        assert seen.result.data is None, "its schema stands in the request"
        (core,) = await session.start_turn().call_all([("read", {"file": "x"})])
        assert core.result.error_kind == "invalid_input" and core.result.data is None


@pytest.mark.proves("D-13")
async def test_a_tool_that_requires_documentation_names_the_info_call_to_make_first(
    tmp_path: Path, kernel_in: Opens
) -> None:
    careful = tools("press", 1, documentation_required=True, documentation="Warm up first.")
    async with kernel_in(tmp_path, tools=[*MANY, *careful]) as kernel:
        session = await kernel.session()
        call = ("press__t00", {"at": 1})
        refused = await session.call(*call)
        assert refused.error_kind == "conflict"
        assert 'call info with {"tool": "press.t00"}' in str(refused.error_text)
        assert (await session.call("press.t00", {})).error_kind == "invalid_input", "what cannot run is not put off"
        manual = (await session.call("info", {"tool": "press.t00"})).data
        assert manual["documentation"] == "Warm up first." and manual["example"] == {"at": 1}
        assert manual["category"] == "press" and "side_effect" not in manual
        assert (await session.call(*call)).data == 1
        await session.suspend()
        again = await kernel.session(session.id)
        assert (await again.call(*call)).data == 1, "that it was read is kept with the session"
        assert (await (await kernel.session()).call(*call)).error_kind == "conflict"


async def test_a_refusal_includes_the_documentation_when_the_agent_cannot_read_it(
    tmp_path: Path, kernel_in: Opens
) -> None:
    put_agent(tmp_path, "narrow", 'tools = ["press.*"]')
    careful = tools("press", 1, documentation_required=True, documentation="Warm up first.")
    async with kernel_in(tmp_path, tools=careful, agent="narrow") as kernel:
        session = await kernel.session()
        refused = await session.call("press.t00", {"at": 1})
        assert (refused.error_kind, refused.data) == ("conflict", {"manual": "Warm up first."})
        assert (await session.call("press.t00", {"at": 1})).ok


@pytest.mark.proves("D-09")
async def test_a_call_of_an_unknown_tool_suggests_similar_tools(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=MANY) as kernel:
        session = await kernel.session()
        await session.call("find_tools", {"query": "count the stock"})
        refused = await session.call("search_files_regular_expression_line_by_line", {})
        assert refused.error_kind == "unknown_tool" and "grep" in str(refused.error_text)
        assert str(refused.error_text).count(" or ") <= 3


@pytest.mark.proves("D-05")
async def test_tools_that_a_search_finds_are_loaded(tmp_path: Path, kernel_in: Opens) -> None:
    mailer = tools("mail", 1)[0]
    gone = tools("gone", 1, config={})  # withheld below, by a secret that nobody has
    async with kernel_in(tmp_path, tools=[*MANY, mailer, *gone]) as kernel:
        session = await kernel.session()
        found = await session.call("find_tools", {"query": "count mail", "limit": 1})
        assert [one["id"] for one in found.data["tools"]] == ["mail.t00"]
        assert "loaded; you can call" in found.data["message"]
        assert list_ids(session.start_turn().tool_specs)[-1] == "mail.t00"
        both = await session.call("find_tools", {"queries": ["count mail", "count sales"], "limit": 2})
        assert {one["id"].partition(".")[0] for one in both.data["tools"]} >= {"mail", "sales"}
        for wrong in ({}, {"query": "a", "queries": ["b"]}, {"query": "?!"}):
            refused = await session.call("find_tools", wrong)
            assert refused.error_kind == "invalid_input", wrong
        hits = await kernel.find_tools("count mail", limit=1)
        assert [hit.tool_id for hit in hits.matches] == ["mail.t00"] and "name: mail" in hits.matches[0].reason


@pytest.mark.proves("D-03", "D-05")
async def test_a_full_view_unloads_uncalled_found_tools_and_the_result_names_them(
    tmp_path: Path, kernel_in: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        loaded_tools, "MAX_ACTIVE_TOOLS", len(CORE) + len(FINDERS) + 1 + 2
    )  # and task, where there is a model
    async with kernel_in(tmp_path, tools=MANY) as kernel:
        session = await kernel.session()
        found = (await session.call("find_tools", {"query": "count sales", "limit": 2})).data["tools"]
        first, second = (one["id"] for one in found)
        before = session.start_turn()
        assert (await session.call(first, {"at": 1})).ok
        told = (await session.call("find_tools", {"query": "count stock number 7", "limit": 1})).data
        assert told["unloaded"]["tools"] == [second]
        now = [*CORE, *FINDERS, first, told["tools"][0]["id"]]
        assert list_ids(session.active_tools) == list_ids(session.start_turn().tool_specs) == now
        assert list_ids(before.tool_specs)[-2:] == [first, second], "the turn that is under way keeps its own"
        assert (await session.call(second, {"at": 1})).ok, "a call of what has left is carried out all the same"


@pytest.mark.proves("D-06")
async def test_an_extension_search_excludes_built_in_tools(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=MANY) as kernel:
        session = await kernel.session()
        found = (await session.call("tool_search", {"query": "count sales files"})).data
        assert 0 < len(found["tools"]) <= 10
        assert all(set(one) == {"id", "description"} and len(one["description"]) <= 200 for one in found["tools"])
        assert {one["id"].partition(".")[0] for one in found["tools"]} <= {"sales", "stock"}
        assert set(list_ids(session.active_tools)) >= {one["id"] for one in found["tools"]}


@pytest.mark.proves("D-03")
async def test_a_tool_with_the_catalog_capability_loads_other_tools(tmp_path: Path, kernel_in: Opens) -> None:
    """Through the same door as ours, wherever it runs."""

    @tool(id="prepare", side_effect="read", locks=[], requires={"capabilities": ["catalog"]})
    async def prepare(runtime: Any) -> dict[str, Any]:
        """Get ready for a stock-taking."""
        catalog = runtime.catalog
        brought = await catalog.load("stock")
        listed = [one.name for one in await catalog.list_categories()]
        manual = await catalog.read_documentation("sales.t01")
        found = await catalog.search_and_load("count sales number 3", limit=2)
        return {
            "added": list(brought.added),
            "categories": listed,
            "example": manual.example,
            "hits": [hit.tool_id for hit in found.matches],
            "active": list(await catalog.list_active())[-2:],
        }

    async with kernel_in(tmp_path, tools=[*MANY, prepare]) as kernel:
        session = await kernel.session()
        told = (await session.call("prepare", {})).data
        assert len(told["added"]) == 12 and "sales" in told["categories"] and told["example"] == {"at": 1}
        assert "sales.t03" in told["hits"] and len(told["hits"]) == 2
        assert told["active"] == list_ids(session.active_tools)[-2:] and "sales.t03" in told["active"]


async def test_a_tool_without_the_catalog_capability_cannot_read_the_catalog(tmp_path: Path, kernel_in: Opens) -> None:
    @tool(id="nosy", side_effect="read", locks=[])
    async def nosy(runtime: Any) -> object:
        """Look around."""
        return await runtime.catalog.list_categories()

    async with kernel_in(tmp_path, tools=[nosy]) as kernel:
        refused = await (await kernel.session()).call("nosy", {})
        assert refused.error_kind == "denied" and "catalog" in str(refused.error_text)


@pytest.mark.proves("D-08")
async def test_the_tool_index_of_a_turn_does_not_depend_on_loaded_tools(tmp_path: Path, kernel_in: Opens) -> None:
    settings = "[catalog]\nindex_tokens = 520\ncategories = { sales = 'What we sold.' }\n"
    async with kernel_in(tmp_path, tools=MANY, settings=settings) as kernel:
        session = await kernel.session()
        index = session.start_turn().tool_index
        assert "sales (12): What we sold." in index and "sales__t11" in index
        await session.call("load_tools", {"category": "sales"})
        assert session.start_turn().tool_index == index
        await session.start_interaction()
        assert session.start_turn().tool_index == index


@pytest.mark.proves("D-07", "D-08")
async def test_tools_that_match_the_users_message_are_preloaded_when_configured(
    tmp_path: Path, kernel_in: Opens
) -> None:
    settings = "[catalog]\npreload = 3\npreload_tokens = 400\n"
    mailer = tools("mail", 1)
    async with kernel_in(tmp_path, tools=[*MANY, *mailer], settings=settings) as kernel:
        session = await kernel.session()
        await session.start_interaction("please count mail number 0")
        assert "mail.t00" in list_ids(session.start_turn().tool_specs)
        await session.start_interaction("")
        assert list_ids(session.start_turn().tool_specs) == [*CORE, *FINDERS]


@pytest.mark.proves("D-01a", "K-13")
async def test_an_agents_core_tools_are_always_in_view(tmp_path: Path, kernel_in: Opens) -> None:
    put_agent(tmp_path, "clerk", 'core = ["stock.t07"]')
    async with kernel_in(tmp_path, tools=MANY, agent="clerk") as kernel:
        session = await kernel.session()
        assert list_ids(session.active_tools) == [*CORE, *FINDERS, "stock.t07"]
        await session.start_interaction()
        assert list_ids(session.active_tools) == [*CORE, *FINDERS, "stock.t07"]


async def test_loaded_tools_follow_new_generations(tmp_path: Path, kernel_in: Opens) -> None:
    async with kernel_in(tmp_path, tools=MANY) as kernel:
        session = await kernel.session()
        await session.call("load_tools", {"category": "stock"})
        old = session.start_turn()
        await kernel.reload_tools(tools=[*MANY[:13], *tools("new", 3)])
        assert list_ids(session.active_tools)[len(CORE) + len(FINDERS) :] == ["stock.t00"]
        assert "stock.t11" in list_ids(old.tool_specs), "a turn keeps its generation"
        await session.call("load_tools", {"category": "new"})
        assert list_ids(session.active_tools)[-3:] == ["new.t00", "new.t01", "new.t02"]


@pytest.mark.proves("D-03")
async def test_a_suspended_interaction_resumes_with_its_loaded_tools(tmp_path: Path, kernel_in: Opens) -> None:
    """Also in another process: it is one interaction until the user is answered."""
    async with kernel_in(tmp_path, tools=MANY) as kernel:
        session = await kernel.session()
        await session.start_interaction("count the stock")
        await session.call("load_tools", {"category": "stock"})
        before = list_ids(session.active_tools)
        assert len(before) == len(CORE) + len(FINDERS) + 12
        await session.suspend()
    async with kernel_in(tmp_path, tools=MANY) as kernel:
        again = await kernel.session(session.id)
        assert list_ids(again.start_turn().tool_specs) == before
        await again.start_interaction("and now something else")
        assert list_ids(again.active_tools) == [*CORE, *FINDERS]
        await again.suspend()
        assert list_ids((await kernel.session(session.id)).active_tools) == [*CORE, *FINDERS]


async def test_loaded_tools_stay_loaded_after_a_takeover(tmp_path: Path) -> None:
    """The joined process continues with the next holder, and with the tools its model had loaded."""
    async with temporary_kernel(tmp_path) as holder:
        joined = open_kernel(
            holder.workdir,
            tools=MANY,
            state=tmp_path / "state",
            config=tmp_path / "config" / "handrail.toml",
        )
        kernel = await joined.__aenter__()
        session = await kernel.session()
        await session.start_interaction("first")
        await session.call("load_tools", {"category": "stock"})
        before = list_ids(session.active_tools)
    try:
        assert isinstance(holder, LocalKernel)
        (refused,) = await session.start_turn().call_all([("stock.t03", {"wrong": 1})])
        assert refused.result.error_kind == "invalid_input" and refused.result.data is None, "it was in view"
        assert list_ids(session.active_tools) == before and len(before) == len(CORE) + len(FINDERS) + 12
        await session.start_interaction("second")
        assert list_ids(session.active_tools) == [*CORE, *FINDERS]
    finally:
        await joined.__aexit__(None, None, None)
