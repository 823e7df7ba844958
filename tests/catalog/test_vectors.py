"""Comparison of vectors: exact and by sign bits."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from handrail.catalog.search.vector_index import VectorIndex, center_and_normalize, compute_smoothed_mean

DRAW = numpy.random.default_rng(4)


def _unit(rows: Any) -> Any:
    return (rows / numpy.linalg.norm(rows, axis=1, keepdims=True)).astype(numpy.float32)


def _clustered(count: int, width: int) -> Any:
    """Vectors as texts have them: around topics, none alone."""
    topics = DRAW.standard_normal((40, width))
    return _unit(topics[DRAW.integers(0, 40, count)] + 0.7 * DRAW.standard_normal((count, width)))


USUAL = _clustered(36, 384)


def test_the_best_hits_are_ordered_by_similarity() -> None:
    rows = _clustered(500, 96)
    usual = _clustered(10, 96)
    request = _unit(_clustered(1, 96))[0]
    found = VectorIndex(rows, usual).score_by_similarity(request, 10)
    seen = center_and_normalize(rows, compute_smoothed_mean(rows, usual))
    assert list(found.best) == sorted(range(500), key=lambda n: (-float(seen[n] @ request), n))[:10]
    assert found.score(3) == pytest.approx(float(seen[3] @ request), abs=1e-6)
    assert found.mean == pytest.approx(float((seen @ request).mean()), abs=1e-6)


def test_a_sign_based_search_finds_nearly_the_same_documents_as_an_exact_search() -> None:
    rows = _clustered(6_000, 384)
    exact, signs = VectorIndex(rows, USUAL), VectorIndex(rows, USUAL, exact_up_to=0)
    same = total = 0
    for request in _unit(rows[:30] + 0.05 * DRAW.standard_normal((30, 384))):
        one, other = exact.score_by_similarity(request, 10), signs.score_by_similarity(request, 10)
        same += len(set(one.best) & set(other.best))
        total += 10
        top = one.best[0]
        assert other.score(top) == pytest.approx(one.score(top), abs=2e-3)
        assert other.mean == pytest.approx(one.mean, abs=1e-4)
        assert other.deviation == pytest.approx(one.deviation, rel=0.1)
    assert same / total > 0.95


def test_a_search_for_all_documents_ranks_each_of_them() -> None:
    """Somebody who searches among a few tools of many has all of them in order, and picks."""
    rows = _clustered(9_000, 128)
    exact, signs = (
        VectorIndex(rows, USUAL[:, :128], exact_up_to=9_000),
        VectorIndex(rows, USUAL[:, :128], exact_up_to=0),
    )
    request = _unit(_clustered(1, 128))[0]
    one, other = exact.score_by_similarity(request, 9_000), signs.score_by_similarity(request, 9_000)
    assert sorted(other.best) == list(range(9_000))
    assert all(other.score(number) == pytest.approx(one.score(number), abs=2e-3) for number in range(0, 9_000, 7))
    assert [one.score(number) for number in other.best] == pytest.approx(
        sorted(map(one.score, range(9_000)))[::-1], abs=4e-3
    )


def test_a_search_also_scores_requested_documents_without_adding_them_to_the_best_ones() -> None:
    rows = _clustered(2_000, 384)
    exact, signs = VectorIndex(rows, USUAL), VectorIndex(rows, USUAL, exact_up_to=0)
    request = _unit(rows[3:4] + 0.05 * DRAW.standard_normal((1, 384)))[0]
    one, plain = exact.score_by_similarity(request, 2_000), signs.score_by_similarity(request, 10)
    asked = [*plain.best[:2], *one.best[-3:]]
    found = signs.score_by_similarity(request, 10, asked)
    assert found.best == plain.best
    for number in (*asked, one.best[1_000]):
        assert found.score(number) == pytest.approx(one.score(number), abs=2e-3)


def test_vectors_of_a_width_that_fills_no_whole_word_are_searched_by_signs() -> None:
    rows = _clustered(300, 100)
    found = VectorIndex(rows, _clustered(5, 100), exact_up_to=0).score_by_similarity(rows[7], 5)
    assert found.best[0] == 7


def test_the_similarity_of_out_of_domain_tools_depends_on_the_nearest_not_their_number() -> None:
    rows, request = _clustered(20, 64), _unit(_clustered(1, 64))
    far, usual = _clustered(30, 64), _clustered(5, 64)

    def near(*several: Any) -> float:
        return float(
            VectorIndex(rows, usual, out_of_domain=numpy.concatenate(several)).compute_common_tool_similarity(request)[
                0
            ]
        )

    assert near(far, far) == pytest.approx(near(far), abs=1e-5)
    assert near(far[1:], request) > near(far) + 0.1
    assert near(usual) == pytest.approx(
        float(VectorIndex(rows, usual).compute_common_tool_similarity(request)[0]), abs=1e-6
    )


def test_a_document_without_a_vector_has_a_similarity_of_zero() -> None:
    rows = _clustered(20, 64)
    rows[5] = 0
    found = VectorIndex(rows, _clustered(5, 64)).score_by_similarity(rows[2], 20)
    assert found.score(5) == 0
    assert found.best[0] == 2


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("exact_up_to", [0, 2])
def test_a_search_among_few_documents_returns_all_of_them(count: int, exact_up_to: int) -> None:
    rows = _clustered(count, 64)
    found = VectorIndex(rows, _clustered(5, 64), exact_up_to=exact_up_to).score_by_similarity(rows[0], 5)
    assert found.best[0] == 0
    assert len(found.best) == count


def test_a_direction_that_all_requests_share_gives_no_tool_an_advantage() -> None:
    """A tool that is a little like everything is nearest to requests as they come, and not to what they say."""
    shared = _unit(DRAW.standard_normal((1, 64)))[0]
    topics = _unit(DRAW.standard_normal((30, 64)))
    requests = _unit(topics + 2.0 * shared)
    tools = _unit(topics + 0.5 * shared)
    hub = _unit(shared[None, :] + 0.2 * topics.mean(axis=0))
    rows = numpy.concatenate((hub, tools))
    raw = [int((rows @ request).argmax()) for request in requests]
    assert raw.count(0) > 15
    vicinity = VectorIndex(rows, tools[:10])
    seen = center_and_normalize(requests, requests.mean(axis=0))
    best = [vicinity.score_by_similarity(request, 1).best[0] for request in seen]
    assert best.count(0) == 0
    assert sum(found == number + 1 for number, found in enumerate(best)) > 25
