"""Times and memory of the search, one measurement a process: ``make``, ``cold`` or ``search``, a count, a folder.

The tools are made up of words of many trades, each with a description and parameters. Their vectors are made up too
(a hash's random direction): what a model takes to encode is its own figure, and the search does not care.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ACTIONS = [
    "get",
    "list",
    "create",
    "update",
    "delete",
    "search",
    "convert",
    "calculate",
    "send",
    "book",
    "track",
    "compare",
    "analyze",
    "plan",
    "export",
]
THINGS = [
    "weather",
    "invoice",
    "flight",
    "hotel",
    "patient",
    "policy",
    "recipe",
    "ticket",
    "calendar",
    "contract",
    "shipment",
    "student",
    "portfolio",
    "sensor",
    "vehicle",
    "song",
    "article",
    "photo",
    "order",
    "budget",
    "employee",
    "route",
    "server",
    "database",
    "lawsuit",
    "gene",
    "planet",
    "reservation",
    "loan",
]
QUALITIES = [
    "daily",
    "local",
    "annual",
    "shared",
    "digital",
    "public",
    "private",
    "medical",
    "financial",
    "industrial",
    "regional",
    "open",
]


def documents(count: int) -> list[Any]:
    from handrail.catalog.search.lexical_index import SearchableTool

    out: list[Any] = []
    choose = random.Random(5)
    for number in range(count):
        action, quality, thing, other = (choose.choice(each) for each in (ACTIONS, QUALITIES, THINGS, THINGS))
        properties = {
            f"{choose.choice(THINGS)}_{name}": {
                "type": "string",
                "description": f"The {name} of the {thing} to {action}.",
            }
            for name in choose.sample(("id", "date", "name", "amount", "country", "status"), 3)
        }
        text = f"{action.capitalize()} the {quality} {thing} of a {other} by its {choose.choice(THINGS)} and region."
        schema = {"type": "object", "properties": properties}
        name = f"{action}_{quality}_{thing}_{number}"
        out.append(SearchableTool(name, text, schema, version=hashlib.sha256(name.encode()).hexdigest()))
    return out


REQUESTS = [
    f"I need to {action} the {quality} {thing} for my {other}"
    for action, quality, thing, other in zip(ACTIONS, QUALITIES, THINGS, reversed(THINGS), strict=False)
]


class Made:
    """Vectors out of a hash, in no time."""

    fingerprint = "made-up"

    def load(self) -> None:
        pass

    def encode(self, texts: Any) -> Any:
        import numpy

        out = numpy.empty((len(texts), 384), numpy.float32)
        for at, text in enumerate(texts):
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
            row = numpy.random.default_rng(seed).standard_normal(384)
            out[at] = row / numpy.linalg.norm(row)
        return out


def memory_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def main() -> None:
    what, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    from handrail.catalog.search.lexical_index import make_embedding_text

    made = documents(count)
    if what == "make":
        from handrail.catalog.embedders.minilm import MiniLMEmbedder
        from handrail.catalog.search.cache import SearchCache, hash_text
        from handrail.catalog.search.encoder_thread import BACKGROUND_TEXTS
        from handrail.catalog.search.tool_search_index import ToolIndex

        ToolIndex(made, cache=SearchCache(folder))
        background = [text for several in BACKGROUND_TEXTS.values() for text in several]
        known = dict(zip(map(hash_text, background), MiniLMEmbedder().encode(background), strict=True))
        texts = [make_embedding_text(each) for each in made]
        for begin in range(0, count, 1000):
            some = texts[begin : begin + 1000]
            known.update(zip(map(hash_text, some), Made().encode(some), strict=True))
        SearchCache(folder).store_vectors(MiniLMEmbedder().fingerprint, known)
        return
    before = memory_mb()
    start = time.perf_counter()
    from handrail.catalog.search.cache import SearchCache
    from handrail.catalog.search.tool_search_index import ToolIndex

    if what == "cold":
        from handrail.catalog.embedders.minilm import MiniLMEmbedder
        from handrail.catalog.search.encoder_thread import EncoderThread

        index = ToolIndex(made, encoder=EncoderThread(MiniLMEmbedder(), SearchCache(folder)), cache=SearchCache(folder))
        found = index.search(REQUESTS[0])
        words = time.perf_counter() - start
        index.wait_until_complete()
        found = index.search(REQUESTS[0])
        meaning = time.perf_counter() - start
        assert found.search_method == "lexical and meaning", found.note
        _say(count, "first search, by words, words kept", words * 1000, "ms")
        _say(count, "first search with meaning, vectors kept", meaning * 1000, "ms")
        _say(count, "memory beyond the tools, model loaded", memory_mb() - before, "MB")
        return
    from handrail.catalog.search.encoder_thread import EncoderThread

    index = ToolIndex(made, encoder=EncoderThread(Made()), cache=SearchCache(folder))
    lexical = ToolIndex(made, cache=SearchCache(folder))
    index.wait_until_complete()
    for each in REQUESTS:
        index.search(each)
    for name, one in (("words", lexical), ("words and meaning", index)):
        times: list[float] = []
        for _ in range(12):
            for each in REQUESTS:
                start = time.perf_counter()
                one.search(each)
                times.append(time.perf_counter() - start)
        _say(count, f"one search by {name}, without encoding, median", statistics.median(times) * 1000, "ms")
        _say(count, f"one search by {name}, without encoding, minimum", min(times) * 1000, "ms")
    start = time.perf_counter()
    after = lexical.updated_copy(documents(3), [made[7].id])
    _say(count, "a new index after three changes", (time.perf_counter() - start) * 1000, "ms")
    assert len(after) >= count - 1


def _say(count: int, what: str, value: float, unit: str) -> None:
    print(json.dumps({"tools": count, "measured": what, unit: round(value, 2)}))


if __name__ == "__main__":
    main()
