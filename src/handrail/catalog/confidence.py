"""How likely a hit serves the request, and when to say that nothing does.

Both are logistic in a few measures, fitted on requests with known tools of three public corpora, whole and in parts of
60 to 4,000 tools, and on requests of the other corpora put to tools that do not serve them. What was fitted without
a corpus holds on it nearly as well (``bench/retrieval.py`` prints that curve for any corpora).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_CONSIDERED = 5
"""Hits by which a request is judged."""

_FEWEST, _MOST = 20, 20_000
"""Sizes of a catalogue between which more tools were seen to mean better chance hits."""

LEAST = 0.14
"""The likelihood that something fits, of two equally likely cases, below which the answer is that nothing does: on
the three corpora, each with a query adapter fitted without it, 2 % of the tools that there are get lost by it and 40 %
of the requests without one are told. By words alone it is 1 % and 6 %: words tell little about what is not there."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one hit, each by the part of the request that it serves best.

    :param near: similarity of meaning, -1 to 1, or None where only words were searched
    :param shared: the part of what words could score at most, 0 to 1
    :param standing: how far it stands out among all tools, in standard deviations
    """

    near: float | None
    shared: float
    standing: float


def confidences(hits: Sequence[Evidence], tools: int) -> list[float]:
    """For each hit the share of hits with such evidence that serve their request.

    :param tools: in the catalogue
    """
    out: list[float] = []
    for at, each in enumerate(hits):
        others = [other.standing for number, other in enumerate(hits[:_CONSIDERED]) if number != at]
        ahead = each.standing - (sum(others) / len(others) if others else 0.0)
        words = math.sqrt(max(0.0, each.shared))
        if each.near is None:
            out.append(_logistic(-6.26 + 5.28 * words + 0.29 * ahead + 0.69 * _chance(tools)))
        else:
            out.append(_logistic(-4.68 + 6.93 * each.near + 0.46 * words + 0.58 * ahead))
    return out


def fitting(hits: Sequence[Evidence], tools: int) -> float:
    """How likely any tool serves the request, where as many requests have one as have none.

    :param hits: the best ones, best first
    :param tools: in the catalogue: the more there are, the better is the best of those that do not fit
    """
    best = hits[:_CONSIDERED]
    if not best:
        return 0.0
    rest = [each.standing for each in best[1:]]
    ahead = best[0].standing - (sum(rest) / len(rest) if rest else 0.0)
    words = math.sqrt(max(0.0, best[0].shared))
    chance = _chance(tools)
    nears = [each.near for each in best if each.near is not None]
    if not nears or best[0].near is None:
        return _logistic(2.36 + 8.30 * words + 0.14 * ahead - 1.70 * chance)
    return _logistic(2.30 + 4.84 * best[0].near + 7.01 * max(nears) + 2.82 * words + 0.26 * ahead - 2.47 * chance)


def _chance(tools: int) -> float:
    """How far the best of so many stands out by chance, in standard deviations."""
    return math.sqrt(2 * math.log(min(max(tools, _FEWEST), _MOST)))


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))
