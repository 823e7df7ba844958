"""The search indexes: one for each generation, made on its first search and kept as long as the generation.

Threads build and search the indexes. A new index reads only the changes since the last generation. The first index and the
model for semantic search are made shortly after a model gets a catalog with tools that are not loaded. An earlier search waits
for them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from handrail.catalog.embedders.embedder_selection import EmbedderSettings, make_encoder_factory
from handrail.catalog.view import find_non_core_category_name, is_non_builtin_tool, list_unusable_resource_tools
from handrail.contract.errors import ToolError
from handrail.contract.services.job_and_tool_services import ToolMatch, ToolSearchResult
from handrail.contract.tool_generation import BUILT_IN, Generation, ToolEntry

if TYPE_CHECKING:
    from handrail.catalog.search import tool_search_index as searching
    from handrail.catalog.search.cache import SearchCache
    from handrail.catalog.search.encoder_thread import EncoderThread
    from handrail.catalog.search.lexical_index import SearchableTool
    from handrail.catalog.search.tool_search_index import ToolIndexSearchResult

    Made = tuple[dict[str, str], searching.ToolIndex]
    """The versions of an index's documents by id, and the index."""

logger = logging.getLogger("handrail")

_DISCOVERY_TOOLS = frozenset({"browse_tools", "load_tools", "find_tools", "tool_search", "info"})
"""The discovery tools, which a model that searches has already."""
MAX_QUERY = 8_000
"""The maximum characters of a query; the rest is ignored."""
FIRST_WAIT_S = 20.0
"""The seconds after the start of an index for which a search waits for semantic search.

The local model loads in one second. The shipped tools are encoded in two more, once on a machine. A busy machine takes a few
times as long.
"""
AHEAD_S = 1.0
"""The delay in seconds before loading begins without a search.

So loading does not slow down a program that ends sooner, or the first answers of one that stays.
"""
_PATIENCE_S = 30.0
"""The maximum wait at shutdown for a model that is busy. No model takes as long."""


class KernelSearchIndexes:
    """The search indexes of one kernel, bound to its event loop.

    :param folder: the folder of the cache; None for no cache
    :param encoder: makes the encoder for semantic search, or returns why there is none; called once, at the first search or load
    :param ahead_s: see :meth:`preload_index`; None to load nothing before a search
    :param first_wait_s: how long after the start of an index a search waits for semantic search
    """

    def __init__(
        self,
        folder: Path | None,
        encoder: Callable[[SearchCache | None], tuple[EncoderThread | None, str]] | None = None,
        *,
        ahead_s: float | None = AHEAD_S,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self._folder = folder
        self._make_encoder = encoder or make_encoder_factory(EmbedderSettings())
        self._ahead_s, self._first_wait_s = ahead_s, first_wait_s
        self._ahead: asyncio.TimerHandle | None = None
        self._threads = ThreadPoolExecutor(2, "handrail-search")
        self._waiting = ThreadPoolExecutor(4, "handrail-search-wait")
        """The threads of searches that wait for the encoder. Other searches continue meanwhile."""
        self._indexes: weakref.WeakKeyDictionary[Generation, asyncio.Task[searching.ToolIndex]] = (
            weakref.WeakKeyDictionary()
        )
        self._latest: Made | None = None
        """The latest index, with the versions of its documents."""
        self._encoder: EncoderThread | None = None
        self._cache: SearchCache | None = None
        self._without: str | None = None
        self._beginning = threading.Lock()

    async def find(
        self,
        generation: Generation,
        query: str,
        *,
        limit: int,
        extensions_only: bool = False,
        source: Callable[[ToolEntry], str],
        patience_s: float | None = None,
        by_words: bool = False,
    ) -> ToolSearchResult:
        """Return the tools that match ``query``, among those that can be called.

        :param source: returns the third-party source of a tool's description, or ``""``
        :param patience_s: the maximum wait if semantic search is not ready yet; None for the usual time of loading
        :param by_words: do not load a model for this search
        :raises ToolError: ``invalid_input`` for a query without any words
        """
        asked = query.strip()[:MAX_QUERY]
        if not any(char.isalnum() for char in asked):
            raise ToolError(
                "The `query` contains no words. Describe the capability that you need, as in 'send an e-mail'.",
                kind="invalid_input",
            )
        index = await self._index(generation, by_words=by_words)
        if not (by_words or index.is_complete):
            await self._wait_for_meaning(index, patience_s)

        searched = partial(_search_index, index, asked, limit, extensions_of=generation if extensions_only else None)
        found, ships = await asyncio.get_running_loop().run_in_executor(self._threads, searched)
        top = max((hit.score for hit in found.hits), default=0.0) or 1.0
        hits = [_make_hit(hit, top, generation.entries[hit.id], source) for hit in found.hits]
        nothing = (
            found.nothing_fits or all(hit.is_below_threshold for hit in hits) or ships
        )  # the best match ships with Handrail
        means = "words and meaning" if found.search_method != "lexical" else "words only"
        return ToolSearchResult(tuple(hits), nothing, f"{means}: {found.note}" if found.note else means, found.unread)

    async def _wait_for_meaning(self, index: searching.ToolIndex, patience_s: float | None) -> None:
        wait_s = self._first_wait_s - index.age_s if patience_s is None else patience_s
        if wait_s > 0:
            await asyncio.get_running_loop().run_in_executor(self._waiting, index.wait_until_complete, wait_s)

    def preload_index(self, generation: Generation) -> None:
        """Load what a search needs after a short delay, unless that has begun.

        This happens once for all generations, because a later one needs little more.
        """
        if self._ahead is None and self._ahead_s is not None:
            known = weakref.ref(generation)
            self._ahead = asyncio.get_running_loop().call_later(self._ahead_s, self._begin_encoding, known)

    def _begin_encoding(self, known: weakref.ref[Generation]) -> None:
        generation = known()
        if generation is not None and self._latest is None and not self._indexes:
            self._task(generation).add_done_callback(_ignore_task_failure)

    def find_tools_for_unknown_name(self, generation: Generation, name: str, count: int = 2) -> list[str]:
        """Return tools that share words with an unknown name.

        The caller waits, so the result is empty if no index exists yet.
        """
        task = self._indexes.get(generation)
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return []
        found = task.result().search(name[:200], count, patience_s=0.0)
        return [] if found.nothing_fits else [hit.id for hit in found.hits]

    async def aclose(self) -> None:
        """End the threads once they have finished their current work."""
        if self._ahead is not None:
            self._ahead.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._waiting.shutdown(wait=False, cancel_futures=True)
        if self._encoder is not None:
            await asyncio.to_thread(self._encoder.close, _PATIENCE_S)

    async def _index(self, generation: Generation, *, by_words: bool) -> searching.ToolIndex:
        """Return the index of ``generation``.

        :param by_words: an index without a model is enough
        """
        if by_words and self._indexes.get(generation) is None:
            work = partial(self._build_lexical, generation)
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        return await asyncio.shield(self._task(generation))  # other searches may wait for it, too

    def _task(self, generation: Generation) -> asyncio.Task[searching.ToolIndex]:
        """Return the task that makes the index of ``generation``, or has made it."""
        task = self._indexes.get(generation)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.get_running_loop().create_task(self._make_index(generation))
            self._indexes[generation] = task
        return task

    async def _make_index(self, generation: Generation) -> searching.ToolIndex:
        work = partial(self._build, generation, self._latest)
        made = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._latest = made
        return made[1]

    def _build(self, generation: Generation, latest: Made | None) -> Made:
        from handrail.catalog.search.tool_search_index import ToolIndex

        documents = _make_documents(generation)
        versions = {tool_id: one.version for tool_id, one in documents.items()}
        if latest is not None:
            had, before = latest
            new = [one for tool_id, one in documents.items() if had.get(tool_id) != one.version]
            if 2 * len(new) <= len(documents):
                return versions, before.updated_copy(new, had.keys() - documents.keys())
        with self._beginning:  # two generations may be read at once
            if self._without is None:
                self._begin()
        assert self._without is not None
        return versions, ToolIndex(documents.values(), encoder=self._encoder, cache=self._cache, without=self._without)

    def _build_lexical(self, generation: Generation) -> searching.ToolIndex:
        from handrail.catalog.search.tool_search_index import ToolIndex

        return ToolIndex(_make_documents(generation).values(), cache=self._get_cache(), without="as requested")

    def _begin(self) -> None:
        self._encoder, self._without = self._make_encoder(self._get_cache())

    def _get_cache(self) -> SearchCache | None:
        from handrail.catalog.search.cache import SearchCache

        if self._cache is None and self._folder is not None:  # the first write creates the folder
            self._cache = SearchCache(self._folder, lambda text: logger.info("search: %s", text))
        return self._cache


def _make_hit(
    hit: searching.ToolIndexHit, top: float, entry: ToolEntry, source: Callable[[ToolEntry], str]
) -> ToolMatch:
    """Return a hit for the caller.

    :param top: the score of the best hit
    """
    return ToolMatch(
        tool_id=hit.id,
        description=entry.spec.description,
        relevance=min(1.0, max(0.0, hit.score / top)),
        confidence=hit.confidence,
        is_weak=hit.weak,
        is_below_threshold=hit.tail,
        reason="; ".join(hit.reasons),
        source=source(entry),
    )


def _search_index(
    index: searching.ToolIndex, query: str, limit: int, *, extensions_of: Generation | None
) -> tuple[ToolIndexSearchResult, bool]:
    """Search an index.

    :param extensions_of: the generation of which only extensions are to be found, or None
    :returns: the result, and whether it has only weak extensions while the best match ships with Handrail
    """
    if extensions_of is None:
        return index.search(query, limit), False
    among = index.search(query, limit, among=lambda tool_id: is_non_builtin_tool(extensions_of.entries[tool_id]))
    if not (among.hits and among.hits[0].weak):
        return among, False
    best = index.search(query, 1).hits
    return among, bool(best) and best[0].id != among.hits[0].id


def _ignore_task_failure(task: asyncio.Task[searching.ToolIndex]) -> None:
    """Consume the failure of a task. The search that needs its result gets the failure, and tries again."""
    if not task.cancelled():
        task.exception()


def _make_documents(generation: Generation) -> dict[str, SearchableTool]:
    """Return the searched documents: the tools that can be called."""
    from handrail.catalog.search.lexical_index import SearchableTool

    idle = list_unusable_resource_tools(generation)
    aliases: dict[str, list[str]] = {}
    for alias, tool_id in generation.aliases.items():
        aliases.setdefault(tool_id, []).append(alias)
    return {
        tool_id: SearchableTool(
            tool_id,
            entry.spec.description,
            entry.spec.parameters,
            find_non_core_category_name(entry),
            tuple(aliases.get(tool_id, ())),
            version=entry.definition_hash,
        )
        for tool_id, entry in generation.entries.items()
        if entry.unavailable_reason is None
        and tool_id not in idle
        and not (entry.source == BUILT_IN and tool_id in _DISCOVERY_TOOLS)
    }
