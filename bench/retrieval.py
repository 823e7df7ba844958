"""How well a request finds its tools: ours beside FastMCP's BM25, SQLite's FTS5 and pydantic-ai's keywords, in one run.

    python bench/retrieval.py [--data DIR] [--json] [--limit N] [--cache FILE] [--held-out] [--speed]
    python bench/retrieval.py --speed [--json]
    python bench/retrieval.py --shipped [--json] [--limit N]

``DIR`` is one corpus or a folder of them: ``tools.jsonl`` (id, name, description, parameters), ``queries.jsonl``
(query, gold: the ids it needs) and ``META.json``. Without it BFCL's single-turn requests are taken from the package
``bfcl-eval``, which is fetched once into the user's cache. With two corpora or more the requests of one are put to the
tools of the others, with every tool taken out that resembles one they are for: how many are told "nothing fits".
The query adapter that ships was fitted on three public corpora; ``--held-out`` adds, for each corpus, ours with one that
was fitted on the others of this run, and with three corpora judges "nothing fits" by that and by coefficients of which the
same is true. ``--speed`` measures one search, the first
search of a process, and memory, at 10,000 and 100,000 made-up tools: after the rest, or alone where no data is named.
``--shipped`` puts developers' requests to ``find_tools`` of a kernel as it ships, likewise: how many of the built-in tools that
they need are loaded afterwards, or are core tools, which always are.

How far it is, with the seconds since its start, goes to the standard error. Three corpora with 8,000 requests take a few
minutes on one core, most of it for encoding, which ``--cache`` saves the second time.

recall@k counts the tools that a request needs and that are among the first k; all@5 the requests all of whose tools
are among the first five; ms is the median of one search, of requests that are encoded already. "not live" are the requests of BFCL that its authors wrote, without those that users sent in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).parent))

from finding.bfcl import bfcl

from handrail import open_kernel
from handrail.catalog.embedders.minilm import MiniLMEmbedder, explain_model_unavailable
from handrail.catalog.search.encoder_thread import EncoderThread
from handrail.catalog.search.lexical_index import SearchableTool, make_embedding_text
from handrail.catalog.search.tool_search_index import ToolIndex, build_request_texts
from handrail.catalog.search.word_analysis import join_e_mail_words, remove_filler_words
from handrail.contract.services.resource_services import PromptSpec, ResourceSpec
from handrail.tools import BUILTINS

if TYPE_CHECKING:
    from finding.calibrate import Fit

Search = Callable[[str], Sequence[str]]
"""A request's tools, best first, at most ten."""

SIZES = (10_000, 100_000)
"""Of the catalogues whose speed is measured."""


@dataclass(frozen=True)
class Corpus:
    name: str
    tools: list[dict[str, Any]]
    queries: list[dict[str, Any]]

    @property
    def documents(self) -> list[SearchableTool]:
        return [
            SearchableTool(
                each["id"], each.get("description") or "", each.get("parameters") or None, each.get("category") or ""
            )
            for each in self.tools
        ]


def corpora(folder: Path | None, limit: int | None) -> Iterator[Corpus]:
    """Every corpus under ``folder``, or BFCL's."""
    if folder is None:
        tools, queries = bfcl()
        yield Corpus("bfcl_v4", tools, _some(queries, limit))
        return
    found = [folder] if (folder / "tools.jsonl").is_file() else sorted(p.parent for p in folder.glob("*/tools.jsonl"))
    if not found:
        sys.exit(f"bench: {folder} holds no corpus: a folder with tools.jsonl and queries.jsonl is needed")
    for place in found:
        meta = place / "META.json"
        name = json.loads(meta.read_text())["name"] if meta.is_file() else place.name
        yield Corpus(name, _lines(place / "tools.jsonl"), _some(_lines(place / "queries.jsonl"), limit))


def _some(queries: list[dict[str, Any]], limit: int | None) -> list[dict[str, Any]]:
    return queries if limit is None or limit >= len(queries) else random.Random(3).sample(queries, limit)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


# The methods: each takes a corpus and gives a search over it.


def ours_lexical(corpus: Corpus) -> Search:
    index = ToolIndex(corpus.documents)
    return lambda query: [hit.id for hit in index.search(query, 10).hits]


def ours(corpus: Corpus, model: MiniLMEmbedder) -> tuple[ToolIndex, Search]:
    """Words, meaning and parts, as shipped; ready when every tool has its vector."""
    index = ToolIndex(corpus.documents, encoder=EncoderThread(model))
    index.wait_until_complete()
    return index, lambda query: [hit.id for hit in index.search(query, 10, patience_s=60).hits]


def ours_unsplit(index: ToolIndex) -> Search:
    """The same without looking for parts."""
    import handrail.catalog.search.tool_search_index as module

    kept = module.split_request_into_needs

    def search(query: str) -> Sequence[str]:
        module.split_request_into_needs = lambda request: [request.strip()]
        try:
            return [hit.id for hit in index.search(query, 10, patience_s=60).hits]
        finally:
            module.split_request_into_needs = kept

    return search


def ours_semantic(index: ToolIndex) -> Search:
    """Meaning alone, of the whole request."""
    import handrail.catalog.search.tool_search_index as module

    whole, kept = ours_unsplit(index), module.WORDS

    def search(query: str) -> Sequence[str]:
        module.WORDS = 0.0
        try:
            return whole(query)
        finally:
            module.WORDS = kept

    return search


def fastmcp_bm25(corpus: Corpus) -> Search:
    """FastMCP's own index over FastMCP's own text of a tool."""
    from fastmcp.server.transforms.search.bm25 import _BM25Index

    index = _BM25Index()
    texts: list[str] = []
    for each in corpus.tools:  # as its _extract_searchable_text: name, description, parameters with theirs
        parts = [each["name"], each.get("description") or ""]
        for name, about in ((each.get("parameters") or {}).get("properties") or {}).items():
            parts += [name, (about.get("description") or "") if isinstance(about, dict) else ""]
        texts.append(" ".join(part for part in parts if part))
    index.build(texts)
    return lambda query: [corpus.tools[number]["id"] for number in index.query(query, 10)]


def fts5(corpus: Corpus) -> Search:
    """SQLite's full-text search, Porter stemming, name weighed three times, any word of the request."""
    database = sqlite3.connect(":memory:")
    database.execute(
        "CREATE VIRTUAL TABLE tools USING fts5(name, description, parameters, tokenize='porter unicode61')"
    )
    for number, each in enumerate(corpus.tools):
        told = json.dumps((each.get("parameters") or {}).get("properties") or {})
        name = each["name"].replace("_", " ").replace(".", " ")
        row = (number, name, each.get("description") or "", told)
        database.execute("INSERT INTO tools(rowid, name, description, parameters) VALUES (?, ?, ?, ?)", row)

    def search(query: str) -> Sequence[str]:
        words = dict.fromkeys("".join(c if c.isalnum() else " " for c in query.lower()).split())
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in list(words)[:200])
        found = database.execute(
            "SELECT rowid FROM tools WHERE tools MATCH ? ORDER BY bm25(tools, 3, 1, 1) LIMIT 10", (match,)
        )
        return [corpus.tools[number]["id"] for (number,) in found]

    return search


def pydantic_ai_keywords(corpus: Corpus) -> Search:
    """pydantic-ai's own keyword search."""
    from pydantic_ai.tools import ToolDefinition
    from pydantic_ai.toolsets._tool_search import keywords_search_fn

    definitions = [ToolDefinition(name=each["id"], description=each.get("description") or "") for each in corpus.tools]
    context: Any = None
    return lambda query: keywords_search_fn(context, [query], definitions)[:10]


def measure(corpus: Corpus, method: str, search: Search) -> Iterator[dict[str, Any]]:
    """One method's figures over one corpus, in per cent."""
    asked: list[tuple[dict[str, Any], Sequence[str], float]] = []
    for each in corpus.queries:
        start = time.perf_counter()
        found = list(search(each["query"]))
        asked.append((each, found, time.perf_counter() - start))
    yield _figures(corpus, corpus.name, method, asked)
    written = [row for row in asked if not row[0].get("split", "").startswith("live")]
    if 0 < len(written) < len(asked):
        yield _figures(corpus, f"{corpus.name} (not live)", method, written)


def _figures(
    corpus: Corpus, name: str, method: str, asked: Sequence[tuple[dict[str, Any], Sequence[str], float]]
) -> dict[str, Any]:
    sums = {1: 0.0, 3: 0.0, 5: 0.0, 10: 0.0}
    whole, gain = 0, 0.0
    for each, found, _ in asked:
        gold = set(each["gold"])
        for k in sums:
            sums[k] += len(gold & set(found[:k])) / len(gold)
        whole += gold <= set(found[:5])
        best = sum(1 / math.log2(at + 2) for at in range(min(5, len(gold))))
        gain += sum(1 / math.log2(at + 2) for at, name in enumerate(found[:5]) if name in gold) / best
    count = len(asked)
    return {
        "corpus": name,
        "method": method,
        **{f"recall@{k}": round(100 * value / count, 1) for k, value in sums.items()},
        "all@5": round(100 * whole / count, 1),
        "ndcg@5": round(100 * gain / count, 1),
        "ms": round(1000 * statistics.median(taken for _, _, taken in asked), 2),
        "queries": count,
        "tools": len(corpus.tools),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="a corpus, or a folder of corpora; BFCL's where it is not given")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--limit", type=int, help="only so many requests of each corpus, chosen at random")
    parser.add_argument("--cache", type=Path, help="keep vectors in this file between two runs")
    parser.add_argument("--held-out", action="store_true", help="an adapter fitted on the other corpora for each")
    parser.add_argument("--speed", action="store_true", help="measure time and memory, too")
    parser.add_argument("--shipped", action="store_true", help="measure the tools that ship, through a kernel")
    given = parser.parse_args()
    if why := explain_model_unavailable():
        sys.exit(f"bench: {why}")
    if not (given.speed or given.shipped) or given.data or given.held_out:
        compare(given)
    if given.shipped:
        for row in asyncio.run(shipped(given.limit)):
            _print(row, given.json)
    if given.speed:
        for row in speed():
            _print(row, given.json)


def compare(given: argparse.Namespace) -> None:
    """Every method on every corpus, then requests that nothing serves."""
    from finding.adapter import without
    from finding.known import Known

    model = Known(given.cache)
    held: list[tuple[Corpus, ToolIndex]] = []
    every = list(corpora(given.data, given.limit))
    if given.held_out and len(every) < 2:
        sys.exit("bench: --held-out needs two corpora at least")
    for corpus in every:
        _tell(f"{corpus.name}: {len(corpus.tools)} tools and {len(corpus.queries)} requests are encoded")
        model.encode([make_embedding_text(each) for each in corpus.documents])
        said = [join_e_mail_words(text) for each in corpus.queries for text in build_request_texts([each["query"]])]
        model.encode([*said, *map(remove_filler_words, said)])
        model.keep()
    for corpus in every:
        index, hybrid = ours(corpus, model)
        apart, blind = index, hybrid
        if given.held_out:
            _tell(f"{corpus.name}: an adapter is fitted on the others")
            apart, blind = ours(corpus, model.with_turn(without(corpus, every, model)))
        held.append((corpus, apart))
        methods: dict[str, Callable[[], Search]] = {
            "handrail: words": lambda corpus=corpus: ours_lexical(corpus),
            "handrail: meaning": lambda index=index: ours_semantic(index),
            "handrail: words and meaning": lambda index=index: ours_unsplit(index),
            "handrail: words, meaning, parts": lambda hybrid=hybrid: hybrid,
            **({"handrail: adapter without this corpus": lambda blind=blind: blind} if given.held_out else {}),
            "FastMCP BM25": lambda corpus=corpus: fastmcp_bm25(corpus),
            "SQLite FTS5": lambda corpus=corpus: fts5(corpus),
            "pydantic-ai keywords": lambda corpus=corpus: pydantic_ai_keywords(corpus),
        }
        for name, made in methods.items():
            try:
                search = made()
            except ImportError as error:
                print(
                    f"bench: {name} is left out: {error.name} is not installed (bench/requirements.txt)",
                    file=sys.stderr,
                )
                continue
            _tell(f"{corpus.name}: {name}")
            for row in measure(corpus, name, search):
                _print(row, given.json)
    if len(held) > 1:
        from finding.nothing import nothing_fits

        _tell("requests that no tool serves")
        fits: dict[str, Fit] | None = None
        if given.held_out and len(held) > 2:
            from finding.calibrate import left_out

            fits = {}
            for corpus in every:
                _tell(f"{corpus.name}: how likely anything fits is fitted on the others")
                fits[corpus.name] = left_out(corpus, every, model)
        for row in nothing_fits(held, model, fits):
            _print(row, given.json)
    model.keep()


class _Note:
    """A resource and a prompt, without which the tools for these are of no use and are not found."""

    source, foreign, templates = "", False, ()
    resources = (ResourceSpec("note://a", "a"),)
    prompts = (PromptSpec("greet"),)


async def shipped(limit: int | None) -> list[dict[str, Any]]:
    """The tools that ``find_tools`` loads for each request in ``finding/shipped.tsv``, in a new session each."""
    lines = (Path(__file__).parent / "finding" / "shipped.tsv").read_text(encoding="utf-8").splitlines()
    wanted = [tuple(line.split("\t")) for line in lines if line and not line.startswith("#")]
    core = {one.spec.id for one in BUILTINS if one.spec.tier == "core"}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        workspace, config = Path(folder, "workspace"), Path(folder, "handrail.toml")
        workspace.mkdir()
        config.touch()
        offerings = [cast("Any", _Note())]
        async with open_kernel(workspace, state=Path(folder, "state"), config=config, resources=offerings) as kernel:
            for part in ("seen", "unseen"):
                asked = [(gold, query) for name, gold, query in wanted if name == part][:limit]
                firsts = fives = loaded = needed = 0
                for gold, query in asked:
                    ids = [hit.tool_id for hit in (await kernel.find_tools(query, limit=10, timeout_s=60)).matches]
                    session = await kernel.session()
                    given: Any = (await session.call("find_tools", {"query": query})).data
                    await session.close()
                    firsts, fives = firsts + (gold in ids[:1]), fives + (gold in ids[:5])
                    loaded += gold in core or gold in [one["id"] for one in given["tools"]]
                    needed += 1
                if needed:
                    share = {"recall@1": firsts, "recall@5": fives, "loaded": loaded}
                    figures = {name: round(100 * count / needed, 1) for name, count in share.items()}
                    rows.append({"corpus": f"shipped, {part}", **figures, "queries": needed, "tools": len(BUILTINS)})
    return rows


def speed() -> Iterator[dict[str, Any]]:
    """Each measured in a process of its own."""
    for count in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            for what in ("make", "cold", "search"):
                _tell(f"{count} made-up tools: {what}")
                done = subprocess.run(
                    [sys.executable, str(Path(__file__).parent / "finding" / "speed.py"), what, str(count), folder],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                for line in done.stdout.splitlines():
                    yield json.loads(line)


START = time.monotonic()


def _tell(what: str) -> None:
    print(f"bench: {time.monotonic() - START:5.0f} s  {what}", file=sys.stderr, flush=True)


def _print(row: dict[str, Any], as_json: bool) -> None:
    print(json.dumps(row) if as_json else "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
