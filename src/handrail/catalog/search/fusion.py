"""Two ways of scoring, one order: words and meaning weighed together, and hits that between them serve every part.

Meaning counts by how far a tool stands out among all tools, in standard deviations. Words count as BM25 has them: it weighs
by how rare a word is already, and in standard deviations one chance word would count for more the fewer tools have any. For a request in parts, each next hit is the one that adds most: to a part that no earlier hit serves as
well, and to the request as a whole. A second tool for the same part adds little there, so five places hold the tools
for five needs rather than five near-copies of one; when all have theirs, the next best tools of single parts come before
those that are a little like several. A part that no tool is near to ("could you help me with two things?") counts less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from handrail.catalog.search.lexical import Scores

MEANING, WORDS = 0.75, 0.12
"""What a standard deviation of meaning counts, and what a point of BM25 does: the best mean over corpora, each left out once."""

NAMED = 8.0
"""Standard deviations that a tool stands out further whose very name a text has, written as names are (``get_time``)."""

_COVERED, _OWN, _WEIGHED = 0.9, 3.0, 0.5
"""What a tool counts for that serves a part as its best one before it did; what it counts to be a part's best, beside the
standard deviations that it adds; the power by which a part counts of how near its nearest tool is, beside other parts'."""

POOL = 40
"""The best documents by words, and by meaning, that are looked at for each text."""


@dataclass(frozen=True, slots=True)
class Row:
    """One text (the request, or a part of it), scored both ways.

    :param meaning: None where only words are at hand
    :param named: the documents that the text calls by name
    :param unknown: those without a vector, which stand by their words alone
    """

    words: Scores
    meaning: Scores | None
    named: Collection[int] = ()
    unknown: Collection[int] = ()

    def standing(self, number: int) -> float:
        """How far the document stands out for this text."""
        out = NAMED if number in self.named else 0.0
        if self.meaning is None or number in self.unknown:
            return out + self.words.standing(number)
        return out + WORDS * self.words.score(number) + MEANING * self.meaning.standing(number)

    @property
    def nearest(self) -> float:
        """How near the nearest document is to this text; 0 where that cannot be said."""
        if self.meaning is None or not self.meaning.best:
            return 0.0
        return max(0.0, self.meaning.score(self.meaning.best[0]))


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document in the order of hits; ``row`` is the text it serves best."""

    number: int
    score: float
    row: int


def ranked(rows: Sequence[Row], limit: int, permitted: Callable[[int], bool] | None = None) -> list[Ranked]:
    """The best documents, best first.

    :param rows: of the request as a whole, then of its parts where it has several
    :param permitted: which documents may be among them; all where it is not given
    """
    whole, parts = rows[0], rows[1:]
    pools = [scores.best for row in rows for scores in (row.words, row.meaning) if scores is not None]
    pools += [sorted(row.named) for row in rows if row.named]
    candidates = sorted({number for best in pools for number in _first(best, permitted)})
    stands = {number: whole.standing(number) for number in candidates}
    if not parts:
        best = sorted(candidates, key=lambda number: (-stands[number], number))[:limit]
        return [Ranked(number, stands[number], 0) for number in best]
    serves = {number: [row.standing(number) for row in parts] for number in candidates}
    heavy = _weights(parts)
    tops = [max((held[at] for held in serves.values()), default=0.0) for at in range(len(parts))]
    own = {
        number: max(w * s / top if top > 0 else 0.0 for w, s, top in zip(heavy, held, tops, strict=True))
        for number, held in serves.items()
    }
    covered = [0.0] * len(parts)
    out: list[Ranked] = []
    left = {number: stands[number] + _OWN * own[number] for number in candidates}
    while left and len(out) < limit:
        worth = {number: stood + _added(serves[number], covered, heavy) for number, stood in left.items()}
        best_number = max(sorted(worth), key=worth.__getitem__)
        del left[best_number]
        held = serves[best_number]
        gains = [max(0.0, s - c) for s, c in zip(held, covered, strict=True)]
        part = max(range(len(parts)), key=lambda at: (gains[at], held[at], -at))
        out.append(Ranked(best_number, stands[best_number], part + 1))
        covered = [max(s, c) for s, c in zip(held, covered, strict=True)]
    return out


def _weights(parts: Sequence[Row]) -> list[float]:
    """What each part counts."""
    near = [row.nearest for row in parts]
    most = max(near)
    return [(each / most) ** _WEIGHED if most > 0 else 1.0 for each in near]


def _first(best: Sequence[int], permitted: Callable[[int], bool] | None) -> list[int]:
    return list(islice((number for number in best if permitted is None or permitted(number)), POOL))


def _added(serves: Sequence[float], covered: Sequence[float], heavy: Sequence[float]) -> float:
    """How much better the parts are served with one more hit."""
    return sum(w * max(0.0, s - _COVERED * c) for s, c, w in zip(serves, covered, heavy, strict=True))
