"""The first search of a process also uses embeddings: preloading, waiting, and the note without them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from tests.catalog.stock import CORE, built_in, entry, generation, many
from tests.catalog.texts_of import HashEmbedder
from tests.kernel.doors import Opens, by_both_doors
from tests.tools.desk import SessionValues

from handrail.catalog.loaded_tools import InteractionLoadedTools
from handrail.catalog.search.cache import SearchCache
from handrail.catalog.search.encoder_thread import EncoderThread
from handrail.catalog.search.search_indexes import KernelSearchIndexes
from handrail.catalog.view import CatalogOptions
from handrail.contract.services.job_and_tool_services import ToolSearchResult
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool_generation import Generation
from handrail.tools.discovery_tools import ExtensionToolSearchTool, FindToolsTool

kernel_in = by_both_doors(rules=["allow *"])
MAIL = entry("mail.send", description="Sends a letter to one or more recipients.")
THERE = generation(CORE, many(25), MAIL)
WHOLE = generation(CORE, MAIL)
NEED = "send a letter"


@dataclass
class Around:
    catalog: object


class SearchFixture:
    """Searches with one embedder, and how often it was made."""

    def __init__(self, embedder: HashEmbedder, **options: Any) -> None:
        self.embedder, self.made = embedder, 0
        self.searches = KernelSearchIndexes(None, self._make, **options)
        self.of = InteractionLoadedTools("s", CatalogOptions(), SessionValues(), self.searches)

    def _make(self, cache: SearchCache | None) -> tuple[EncoderThread, str]:
        self.made += 1
        return EncoderThread(self.embedder, cache, hangs_s=0.01), ""

    async def find(self, there: Generation = THERE, **how: Any) -> ToolSearchResult:
        return await self.of.find(there, NEED, limit=3, **how)

    async def told(self, tool: FindToolsTool | ExtensionToolSearchTool) -> dict[str, Any]:
        return cast(
            "dict[str, Any]",
            await tool.execute({"query": NEED}, cast("Runtime", Around(self.of.make_call_catalog(THERE)))),
        )


@pytest.fixture
async def desk() -> AsyncGenerator[Callable[..., SearchFixture]]:
    made: list[SearchFixture] = []

    def make(until: threading.Event | None = None, **options: Any) -> SearchFixture:
        made.append(SearchFixture(HashEmbedder(until), **options))
        return made[-1]

    yield make
    for one in made:
        if one.embedder.until is not None:
            one.embedder.until.set()
        await one.searches.aclose()


@pytest.mark.proves("D-05", "D-07")
async def test_the_first_searches_share_one_model_load_and_compare_meanings(desk: Callable[..., SearchFixture]) -> None:
    at = desk(until=threading.Event(), first_wait_s=600)
    first = [asyncio.create_task(at.find()) for _ in range(6)]
    await asyncio.to_thread(at.embedder.entered.wait)
    by_words = await at.find(by_words=True)
    assert by_words.search_method.startswith("words only") and not any(task.done() for task in first), (
        "others go on meanwhile"
    )
    assert at.embedder.until is not None
    at.embedder.until.set()
    for found in await asyncio.gather(*first):
        assert (found.search_method, found.matches[0].tool_id) == ("words and meaning", "mail.send")
    of_tools = [text for text in at.embedder.encoded if text != NEED]
    assert at.made == 1 and len(of_tools) == len(set(of_tools)), "no text of a tool is encoded twice"


@pytest.mark.proves("D-05", "D-07")
@pytest.mark.parametrize("tool", [FindToolsTool(), ExtensionToolSearchTool()], ids=lambda tool: tool.spec.id)
async def test_a_search_reports_that_the_model_is_still_loading(
    desk: Callable[..., SearchFixture], tool: FindToolsTool | ExtensionToolSearchTool
) -> None:
    at = desk(until=threading.Event(), first_wait_s=0.01)
    message = (await at.told(tool))["message"]
    assert "Compared by words only, not by meaning (the model is " in message
    assert at.embedder.until is not None
    at.embedder.until.set()
    assert (await at.find(patience_s=600)).search_method == "words and meaning"
    assert "Compared" not in str(await at.told(tool))


@pytest.mark.proves("D-07")
async def test_a_search_does_not_wait_for_a_failed_model_and_reports_the_reason(
    desk: Callable[..., SearchFixture],
) -> None:
    at = desk(first_wait_s=600)
    at.embedder.broken = "the file of the model is damaged"
    message = (await at.told(FindToolsTool()))["message"]
    assert "Compared by words only, not by meaning (the file of the model is damaged)" in message


@pytest.mark.proves("D-05")
async def test_only_the_first_search_waits_for_a_model_load_that_hangs(desk: Callable[..., SearchFixture]) -> None:
    at = desk(until=threading.Event(), first_wait_s=0.01)
    assert (await at.find()).search_method.startswith("words only")
    assert (await at.find()).search_method == "words only: the model is encoding its first texts"


@pytest.mark.proves("D-05")
async def test_model_loading_starts_when_a_turn_begins_with_tools_that_are_not_loaded(
    desk: Callable[..., SearchFixture],
) -> None:
    at = desk(ahead_s=0)
    at.of.begin_turn(WHOLE)
    narrow = generation(many(25), [built_in("browse_tools", core=True), built_in("load_tools", core=True)])
    InteractionLoadedTools("t", CatalogOptions(), SessionValues(), at.searches).begin_turn(narrow)
    await at.find(WHOLE, by_words=True)  # whatever was due at once has begun by now
    assert at.made == 0, "nothing can be searched for"
    at.of.begin_turn(THERE)
    at.of.begin_turn(THERE)
    await asyncio.to_thread(at.embedder.entered.wait)
    assert at.made == 1
    assert (await at.find()).search_method == "words and meaning" and at.made == 1


@pytest.mark.proves("D-05")
async def test_a_remote_embedder_receives_nothing_before_the_first_search(desk: Callable[..., SearchFixture]) -> None:
    at = desk(ahead_s=None)
    at.of.begin_turn(THERE)
    await at.find(by_words=True)
    assert at.made == 0
    assert (await at.find()).search_method == "words and meaning"


@pytest.mark.proves("D-05")
async def test_the_first_tool_search_by_kernel_or_session_compares_meanings(tmp_path: Path, kernel_in: Opens) -> None:
    """With the model that ships, whose vectors of the tools were kept by an earlier process."""
    async with kernel_in(tmp_path, settings="[search]\n") as kernel:
        assert (await kernel.find_tools("undo my last commit", timeout_s=60)).search_method == "words and meaning"
    async with kernel_in(tmp_path, settings="[search]\n") as kernel:
        session = await kernel.session()
        told = (await session.call("find_tools", {"query": "undo my last commit"})).data
        assert told["tools"] and "Compared" not in told["message"]
        assert (await kernel.find_tools("undo my last commit")).search_method == "words and meaning"
