"""Fit what ``confidence.py`` has of constants, and print how it holds: by size, and on a corpus it was not fitted on.

    python bench/finding/calibrate.py --data DIR [--cache FILE]

``DIR`` holds three corpora or more, as ``bench/retrieval.py`` reads them. First come the coefficients by meaning and by
words, in the order in which ``confidence.py`` has them, the last one of a name that the request says in full. Then comes
the curve of the floor: for each size of a catalogue what part of the requests without a tool is told, and what part of
those whose tool was found is lost. "left out" are the same of one corpus, fitted on the others, with the floor at which
3 % of that corpus are lost. Last, what a place in view costs and keeps: the hits that are brought of five, and how many
of the tools that were found are among them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

sys.path.insert(0, str(Path(__file__).parent.parent))

from finding.adapter import without
from finding.evidence import Judged, judged
from finding.known import Known
from retrieval import Corpus, corpora

from handrail.catalog.search.tool_search_index import (
    FEWEST,
    LEAST,
    LEAST_BY_WORDS,
    MOST,
    HitEvidence,
    compute_hit_confidences,
    estimate_any_match_probability,
    flag_weak_hits,
)

Fit = Callable[[Sequence[HitEvidence], int], float]
"""As :func:`~handrail.catalog.search.tool_search_index.estimate_any_match_probability`."""

FLOORS = (0.04, 0.06, 0.08, 0.1, 0.12, 0.15, 0.18)


def of_request(each: Judged) -> list[float]:
    """What ``fitting`` goes by."""
    best = each.hits[0]
    nears = [hit.similarity for hit in each.hits if hit.similarity is not None]
    named = float(any(hit.named for hit in each.hits))
    if not nears:
        return [1.0, math.sqrt(max(0.0, best.word_share)), best.relevance, _extent(each), named]
    nearest = max(each.hits, key=lambda hit: hit.similarity or -1.0)
    return [1.0, max(nears), best.relevance, nearest.out_of_domain, _extent(each), named]


def of_hit(each: Judged, at: int) -> list[float]:
    """What ``compute_hit_confidences`` goes by."""
    hit = each.hits[at]
    told = [] if hit.similarity is None else [hit.similarity]
    return [1.0, *told, math.sqrt(max(0.0, hit.word_share)), _ahead(each, at), _extent(each), float(hit.named)]


def _ahead(each: Judged, at: int) -> float:
    others = [hit.relevance for number, hit in enumerate(each.hits) if number != at]
    return each.hits[at].relevance - (sum(others) / len(others) if others else 0.0)


def _extent(each: Judged) -> float:
    return math.log(min(max(each.tools, FEWEST), MOST))


def logistic(rows: Sequence[Sequence[float]], right: Sequence[float], weights: Sequence[float]) -> Any:
    """Coefficients by Newton's method, a little drawn to zero."""
    given, wanted, weigh = numpy.array(rows), numpy.array(right), numpy.array(weights) / sum(weights)
    scale = numpy.maximum(given.std(axis=0), 1e-9)
    scale[0] = 1.0
    given = given / scale
    out = numpy.zeros(given.shape[1])
    for _ in range(40):
        said = 1 / (1 + numpy.exp(-numpy.clip(given @ out, -30, 30)))
        slope = given.T @ (weigh * (said - wanted)) + 1e-4 * out
        bend = (given * (weigh * said * (1 - said))[:, None]).T @ given + 1e-4 * numpy.eye(len(out))
        out = out - numpy.linalg.solve(bend, slope)
    return out / scale


def fit(rows: Sequence[Sequence[float]], right: Sequence[float], weights: Sequence[float]) -> Any:
    """Coefficients, the last one (a name that is said in full) beside the others, which are fitted without it: in one
    corpus nine of ten requests say their tool's name, and what else speaks for a tool would count for less by that.
    """
    given, wanted, weigh = numpy.array(rows), numpy.array(right), numpy.array(weights)
    rest = logistic([row[:-1] for row in rows], right, weights)
    stands = given[:, -1] > 0
    base, wanted, weigh = given[stands][:, :-1] @ rest, wanted[stands], weigh[stands]
    named = 0.0
    for _ in range(40):
        said = 1 / (1 + numpy.exp(-(base + named)))
        named += (weigh * (wanted - said)).sum() / (weigh * said * (1 - said)).sum()
    return numpy.append(rest, named)


def weights(several: Sequence[Judged]) -> list[float]:
    """Each size the same, and in it requests with a tool the same as those without."""
    counts = Counter((each.size, each.needs > 0) for each in several)
    sizes = len({each.size for each in several})
    return [1 / counts[each.size, each.needs > 0] / sizes for each in several]


def fit_requests(several: Sequence[Sequence[Judged]]) -> Any:
    """Of the requests that no tool serves only those of other corpora count: what tells them tells as many of a corpus's own
    whose tools were kept out as a fit on both, and more of itself.
    """
    kept = [[each for each in some if each.needs or not each.own] for some in several]
    every = [each for some in kept for each in some]
    heavy = [weight for some in kept for weight in weights(some)]
    return fit([of_request(each) for each in every], [float(any(each.serves)) for each in every], heavy)


def left_out(corpus: Corpus, every: Sequence[Corpus], model: Known) -> Fit:
    """How likely anything fits, by coefficients in which ``corpus`` has no part: not in the requests, nor in what they were
    searched with.
    """
    others = [each for each in every if each.name != corpus.name]
    held = [judged(each, others, model, without(each, others, model), by_words=False) for each in others]
    told = fit_requests([[each for each in some if each.hits] for some in held])

    def said(hits: Sequence[HitEvidence], tools: int) -> float:
        if not hits:
            return 0.0
        one = Judged(hits[:5], [], 0, 0, True, tools)
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, float(numpy.dot(of_request(one), told))))))

    return said


def fit_hits(several: Sequence[Sequence[Judged]]) -> Any:
    rows: list[list[float]] = []
    right: list[float] = []
    heavy: list[float] = []
    for some in several:
        for each, weight in zip(some, weights(some), strict=True):
            for at, serves in enumerate(each.serves):
                rows.append(of_hit(each, at))
                right.append(float(serves))
                heavy.append(weight)
    return fit(rows, right, heavy)


def by_size(several: Sequence[Judged], told: Callable[[Sequence[Judged]], str]) -> str:
    sizes = sorted({each.size for each in several})
    return "  ".join(f"{size}: {told([each for each in several if each.size == size])}" for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep vectors in this file between two runs")
    given = parser.parse_args()
    model = Known(given.cache)
    every = list(corpora(given.data, None))
    turns = {corpus.name: without(corpus, every, model) for corpus in every}
    for by_words in (False, True):
        held: dict[str, list[Judged]] = {}
        for corpus in every:
            put = judged(corpus, every, model, turns[corpus.name], by_words=by_words)
            held[corpus.name] = [each for each in put if each.hits]
        print("by words" if by_words else "by words and meaning")
        print("  fitting    ", fit_requests(list(held.values())).round(2))
        print("  confidences", fit_hits(list(held.values())).round(2))
        for floor in FLOORS:
            shipped = " (shipped)" if floor == (LEAST_BY_WORDS if by_words else LEAST) else ""
            for name, some in held.items():
                print(
                    f"  floor {floor}{shipped}, {name}, told/lost in %  ",
                    by_size(some, told_and_lost(floor, shipped_fit)),
                )
        for name, some in held.items():
            alone = fit_requests([others for other, others in held.items() if other != name])
            print(f"  left out: {name}, told in % at 3 % lost, AUC  ", by_size(some, apart(alone)))
            print(f"  in view: {name}, hits brought, % of found tools kept  ", by_size(some, brought))
    model.keep()


def shipped_fit(each: Judged) -> float:
    return estimate_any_match_probability(each.hits, each.tools)


def told_and_lost(floor: float, fit: Callable[[Judged], float]) -> Callable[[Sequence[Judged]], str]:
    def said(some: Sequence[Judged]) -> str:
        none = [fit(each) < floor for each in some if not each.needs]
        found = [fit(each) < floor for each in some if any(each.serves)]
        return f"{100 * sum(none) / len(none):.0f}/{100 * sum(found) / len(found):.1f}"

    return said


def apart(alone: Any) -> Callable[[Sequence[Judged]], str]:
    def said(some: Sequence[Judged]) -> str:
        fits = [(each, float(numpy.dot(of_request(each), alone))) for each in some]
        found = sorted(fit for each, fit in fits if any(each.serves))
        none = [fit for each, fit in fits if not each.needs]
        floor = found[int(0.03 * len(found))]
        with_one = [fit for each, fit in fits if each.needs]
        better = sum(one > other for one in with_one for other in none) / len(with_one) / len(none)
        return f"{100 * sum(fit < floor for fit in none) / len(none):.0f} {better:.3f}"

    return said


def brought(some: Sequence[Judged]) -> str:
    count = kept = found = asked = 0
    for each in some:
        if not each.needs or shipped_fit(each) < (LEAST_BY_WORDS if each.hits[0].similarity is None else LEAST):
            continue
        last = flag_weak_hits(each.hits, compute_hit_confidences(each.hits, each.tools))
        asked += 1
        count += len(last) - sum(last)
        found += sum(each.serves)
        kept += sum(serves and not out for serves, out in zip(each.serves, last, strict=True))
    return f"{count / asked:.1f} {100 * kept / found:.0f}"


if __name__ == "__main__":
    main()
