"""Confidence of search hits, searches without a match, and hits that are not loaded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.catalog.search.tool_search_index import (
    LEAST,
    LEAST_BY_WORDS,
    NAMED_SURE,
    HitEvidence,
    compute_hit_confidences,
    estimate_any_match_probability,
    flag_weak_hits,
    pool_equivalent_hit_confidences,
)

_FIGURE = st.floats(-1, 1, allow_nan=False)
_EVIDENCE = st.builds(
    HitEvidence, st.none() | _FIGURE, st.floats(0, 1), st.floats(-5, 30), st.integers(0, 3), st.booleans()
)
_HITS = st.lists(_EVIDENCE, min_size=1, max_size=8)


@given(_HITS, st.integers(1, 200_000))
def test_every_hit_has_a_confidence_and_the_best_is_weak_only_below_the_threshold(
    hits: list[HitEvidence], tools: int
) -> None:
    sure = compute_hit_confidences(hits, tools)
    assert all(0 <= each <= 1 for each in sure) and 0 <= estimate_any_match_probability(hits, tools) <= 1
    last = flag_weak_hits(hits, sure)
    assert last[sure.index(max(sure))] == (max(sure) < NAMED_SURE)
    assert all(out for at, out in enumerate(last) if sure[at] < NAMED_SURE)
    assert all(sure[at] < max(sure) for at, out in enumerate(last) if out and sure[at] >= NAMED_SURE)


def test_more_similarity_more_words_and_a_larger_distance_raise_the_confidence() -> None:
    others = [HitEvidence(0.1, 0.05, 1.0)] * 4
    base = [HitEvidence(0.3, 0.2, 4.0), *others]
    for more in (HitEvidence(0.4, 0.2, 4.0), HitEvidence(0.3, 0.3, 4.0), HitEvidence(0.3, 0.2, 5.0)):
        assert compute_hit_confidences([more, *others], 100)[0] > compute_hit_confidences(base, 100)[0]
        if more.word_share == base[0].word_share:  # words make a tool stand out: by that they count once
            assert estimate_any_match_probability([more, *others], 100) > estimate_any_match_probability(base, 100)
    assert estimate_any_match_probability([HitEvidence(None, 0.3, 4.0)], 100) > estimate_any_match_probability(
        [HitEvidence(None, 0.2, 4.0)], 100
    )


@pytest.mark.parametrize("near", [0.3, None])
def test_a_request_with_the_whole_name_of_a_tool_raises_the_confidence_in_it(
    near: float | None,
) -> None:
    said, unsaid = (
        HitEvidence(near, 0.2, 4.0, named=True, out_of_domain=0.5),
        HitEvidence(near, 0.2, 4.0, out_of_domain=0.5),
    )
    for at in range(5):
        hits = [said if place == at else unsaid for place in range(5)]
        assert compute_hit_confidences(hits, 5_000)[at] > 2 * compute_hit_confidences([unsaid] * 5, 5_000)[at]
        assert estimate_any_match_probability(hits, 5_000) > 2 * estimate_any_match_probability([unsaid] * 5, 5_000)
    assert estimate_any_match_probability([*[unsaid] * 5, said], 5_000) == estimate_any_match_probability(
        [unsaid] * 5, 5_000
    )


def test_a_tool_named_with_another_meaning_stays_below_the_threshold() -> None:
    assert estimate_any_match_probability([HitEvidence(-0.1, 0.02, 1.0, named=True)], 5_000) < LEAST
    assert estimate_any_match_probability([HitEvidence(None, 0.02, 1.0, named=True)], 5_000) < LEAST_BY_WORDS


def test_the_same_evidence_counts_less_among_more_tools() -> None:
    for near in (0.3, None):
        hits = [HitEvidence(near, 0.2, 4.0), HitEvidence(near, 0.1, 2.0)]
        assert (
            estimate_any_match_probability(hits, 20)
            > estimate_any_match_probability(hits, 200)
            > estimate_any_match_probability(hits, 20_000)
        )


def test_a_second_need_keeps_its_best_hit_and_a_close_alternative_stays() -> None:
    hits = [
        HitEvidence(0.8, 0.5, 8.0, 1),
        HitEvidence(0.75, 0.5, 7.8, 1),
        HitEvidence(0.1, 0.0, 0.5, 1),
        HitEvidence(0.35, 0.2, 3.5, 2),
    ]
    assert flag_weak_hits(hits, [0.95, 0.9, 0.05, 0.06]) == [False, False, True, False]
    assert flag_weak_hits(hits, [0.95, 0.9, 0.05, 0.01]) == [False, False, True, True]


def test_tools_for_the_same_purpose_share_confidence_and_other_tools_gain_none() -> None:
    same = [[True, True, False], [True, True, False], [False, False, True]]
    assert pool_equivalent_hit_confidences([0.4, 0.3, 0.2], same) == pytest.approx([0.58, 0.58, 0.2])
