"""The weights of keyword and embedding scores."""

from __future__ import annotations

from handrail.catalog.search.lexical_index import DocumentScores
from handrail.catalog.search.tool_search_index import RequestTextScores, rank_documents


def scores(held: dict[int, float], mean: float, deviation: float) -> DocumentScores:
    return DocumentScores(
        sorted(held, key=lambda one: -held[one]), mean, deviation, lambda number: held.get(number, 0.0)
    )


def test_one_accidental_rare_word_does_not_outweigh_meaning() -> None:
    """One of 400 tools has a common word of the request and is 20 deviations above the others by it."""
    words = scores({7: 3.0}, mean=3 / 400, deviation=0.15)
    meaning = scores({1: 0.5, 7: 0.1}, mean=0.05, deviation=0.1)
    assert [each.number for each in rank_documents([RequestTextScores(words, meaning)], 2)] == [1, 7]


def test_a_distinctive_word_outweighs_a_slightly_higher_similarity() -> None:
    words = scores({7: 25.0}, mean=25 / 400, deviation=1.25)
    meaning = scores({1: 0.4, 7: 0.2}, mean=0.05, deviation=0.1)
    assert [each.number for each in rank_documents([RequestTextScores(words, meaning)], 2)] == [7, 1]
