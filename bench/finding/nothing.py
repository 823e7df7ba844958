"""Requests that no tool serves: how many are told so, and what that costs the requests that a tool does serve."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import handrail.catalog.search.tool_search_index as searching
from handrail.catalog.search.lexical_index import make_embedding_text
from handrail.catalog.search.tool_search_index import estimate_any_match_probability

if TYPE_CHECKING:
    from finding.calibrate import Fit
    from retrieval import Corpus

    from handrail.catalog.embedders.minilm import MiniLMEmbedder
    from handrail.catalog.search.tool_search_index import ToolIndex, ToolIndexSearchResult

ASKED = 1_200
"""Requests of each corpus that are put to its own tools, and to those of the others together."""

ALIKE = 0.45
"""Cosine of two tools' vectors from which one resembles the other."""

LOSSES = (0.01, 0.02, 0.03, 0.05, 0.10)


def nothing_fits(
    held: Sequence[tuple[Corpus, ToolIndex]], model: MiniLMEmbedder, fits: Mapping[str, Fit] | None = None
) -> Iterator[dict[str, Any]]:
    """One line a corpus: what is detected at each loss of recall@5, the area under the curve, and at the floor that ships.

    :param fits: for each corpus what judges whether anything fits; what ships where it is not given
    """
    vectors = {
        corpus.name: model.encode([make_embedding_text(each) for each in corpus.documents]) for corpus, _ in held
    }
    for corpus, index in held:
        choose = random.Random(11)
        searching.estimate_any_match_probability = fits[corpus.name] if fits else estimate_any_match_probability
        own = choose.sample(corpus.queries, min(ASKED, len(corpus.queries)))
        asked = [(found, _recall(found, each["gold"])) for each, found in _asked(index, own)]
        served = [(_fit(found), recall) for found, recall in asked]
        unserved: list[float] = []
        told: list[bool] = []
        others = [other for other, _ in held if other is not corpus]
        for other in others:
            at = {each["id"]: number for number, each in enumerate(other.tools)}
            single = [each for each in other.queries if len(each["gold"]) == 1]
            for each in choose.sample(single, min(ASKED // len(others), len(single))):
                gold = vectors[other.name][[at[name] for name in each["gold"]]]
                alike = (vectors[corpus.name] @ gold.T).max(axis=1) >= ALIKE
                left = {tool["id"] for tool, out in zip(corpus.tools, alike, strict=True) if not out}
                found = index.search(each["query"], 5, among=left.__contains__, patience_s=60)
                unserved.append(_fit(found))
                told.append(found.nothing_fits)
        total = sum(recall for _, recall in served)
        row: dict[str, Any] = {"corpus": corpus.name, "method": "nothing fits, left out" if fits else "nothing fits"}
        for loss in LOSSES:
            floor = _floor(served, loss * total)
            row[f"told at {loss:.0%} lost"] = round(100 * sum(fit < floor for fit in unserved) / len(unserved), 1)
        better = sum((own_fit > fit) + 0.5 * (own_fit == fit) for own_fit, _ in served for fit in unserved)
        row["auc"] = round(better / len(served) / len(unserved), 3)
        row["told as shipped"] = round(100 * sum(told) / len(told), 1)
        row["lost as shipped"] = round(100 * sum(recall for found, recall in asked if found.nothing_fits) / total, 1)
        searching.estimate_any_match_probability = estimate_any_match_probability
        yield row


def _asked(
    index: ToolIndex, queries: Sequence[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], ToolIndexSearchResult]]:
    for each in queries:
        yield each, index.search(each["query"], 5, patience_s=60)


def _fit(found: ToolIndexSearchResult) -> float:
    return found.fit_probability


def _recall(found: ToolIndexSearchResult, gold: Sequence[str]) -> float:
    return len({hit.id for hit in found.hits} & set(gold)) / len(gold)


def _floor(served: Sequence[tuple[float, float]], most: float) -> float:
    """The highest floor below which no more than ``most`` of recall lies."""
    lost = 0.0
    for fit, recall in sorted(served):
        lost += recall
        if lost > most:
            return fit
    return 1.0
