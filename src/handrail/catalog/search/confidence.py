"""How likely a hit serves the request, when to say that nothing does, and which hits are not worth a place in view.

All are logistic in a few measures, fitted by ``bench/finding/calibrate.py`` on requests with known tools of three public
corpora, put to catalogues of 10 to 10,000 tools drawn from them: some with their tools, some without and without all that
resembles those, and on requests of the other corpora. What was fitted without a corpus holds on it nearly as well where
its requests are of a kind with the others (the same command prints that, by size). What a tool's name counts for that
the request says in full is fitted beside the rest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_CONSIDERED = 5
"""Hits by which a request is judged."""

FEWEST, MOST = 5, 10_000
"""Sizes of a catalogue between which more tools mean better chance hits. Larger ones than were measured count as the largest
that was; continued beyond, the line tells too often that nothing fits."""

LEAST, LEAST_BY_WORDS = 0.08, 0.1
"""The likelihood that something fits, of two equally likely cases, below which the answer is that nothing does: on the
three corpora, each searched with what was learned without it, 0 to 4 % of the tools that were found get lost by it (of
requests as people chat 2 to 11 %, 14 % among 10,000 tools) and of the requests without one two to six in ten are told.
By words alone it is up to 3 % (of chat up to 16 %) and one in ten in small catalogues to four in ten in large ones: words tell
less about what is not there."""

NAMED = 0.02
"""The confidence from which a hit is worth being named, and so a place in view; where no hit comes to it, nothing fits. That
loses 0.2 % at most of the tools that were found on the three corpora and tells 1 to 3 % more of the requests without one; 0.03
would lose 0.8 % of requests as people chat, and tell 3 to 6 %."""

_BESIDE = 0.1
"""What a hit's confidence must come to beside that of the best hit for the same need, too, to be worth a place in view:
one or two of five hits are then, and 2 % of the tools that were found are not."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of one hit, each by the part of the request that it serves best.

    :param near: similarity of meaning, -1 to 1, or None where only words were searched
    :param shared: the part of what words could score at most, 0 to 1
    :param standing: how far it stands out among all tools, as :mod:`~handrail.catalog.search.fusion` weighs words and meaning
    :param part: the number of that part
    :param named: that part says every word of the tool's name, which has two or more
    :param elsewhere: how near tools that others have lie to the part to which this one is nearest
    """

    near: float | None
    shared: float
    standing: float
    part: int = 0
    named: bool = False
    elsewhere: float = 0.0


def confidences(hits: Sequence[Evidence], tools: int) -> list[float]:
    """For each hit the share of hits with such evidence that serve their request, where half of all requests have a tool.

    :param tools: in the catalogue
    """
    out: list[float] = []
    for at, each in enumerate(hits):
        others = [other.standing for number, other in enumerate(hits[:_CONSIDERED]) if number != at]
        ahead = each.standing - (sum(others) / len(others) if others else 0.0)
        words = math.sqrt(max(0.0, each.shared))
        if each.near is None:
            told = -2.99 + 9.55 * words + 0.24 * ahead - 0.56 * _extent(tools) + 2.55 * each.named
        else:
            told = -4.67 + 9.45 * each.near + 2.66 * words + 0.79 * ahead - 0.44 * _extent(tools) + 1.23 * each.named
        out.append(_logistic(told))
    return out


def together(sure: Sequence[float], alike: Sequence[Sequence[bool]]) -> list[float]:
    """The confidence of each hit where those that do the same share theirs: any of them serves.

    What was measured on requests with one known tool each says of a tool among its near copies how likely it is the one
    that was known.

    :param alike: for each hit, which hits do the same as it, itself among them
    """
    return [
        max(own, 1 - math.prod(1 - one for one, same in zip(sure, row, strict=True) if same))
        for own, row in zip(sure, alike, strict=True)
    ]


def tail(hits: Sequence[Evidence], sure: Sequence[float]) -> list[bool]:
    """For each hit whether so little speaks for it, at all or beside the others, that it is not worth a place in view.

    :param sure: their confidences
    """
    best: dict[int, float] = {}
    for each, value in zip(hits, sure, strict=True):
        best[each.part] = max(value, best.get(each.part, 0.0))
    return [value < max(NAMED, _BESIDE * best[each.part]) for each, value in zip(hits, sure, strict=True)]


def fitting(hits: Sequence[Evidence], tools: int) -> float:
    """How likely any tool serves the request, where as many requests have one as have none.

    :param hits: the best ones, best first
    :param tools: in the catalogue: the more there are, the better is the best of those that do not fit
    """
    best = hits[:_CONSIDERED]
    if not best:
        return 0.0
    stands, extent = best[0].standing, _extent(tools)
    nears = [each.near for each in best if each.near is not None]
    named = any(each.named for each in best)
    if not nears:  # how far the best is ahead of the others says no more: several may do the same
        words = math.sqrt(max(0.0, best[0].shared))
        return _logistic(-2.21 + 9.61 * words + 0.08 * stands - 0.51 * extent + 2.22 * named)
    # words are in what the best stands out by already; beside it they say more on some corpora and less on others
    elsewhere = max(best, key=lambda each: -1.0 if each.near is None else each.near).elsewhere
    return _logistic(-2.76 + 11.75 * max(nears) + 0.53 * stands - 12.55 * elsewhere - 0.70 * extent + 1.10 * named)


def _extent(tools: int) -> float:
    return math.log(min(max(tools, FEWEST), MOST))


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))
