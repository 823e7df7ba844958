"""Two ways of scoring, one order: words and meaning weighed together, and hits that between them serve every part.

Scores of words and of meaning are made comparable by how far a tool stands out among all tools, in standard
deviations. For a request in parts, each next hit is the one that adds most: to a part that no earlier hit serves as
well, and to the request as a whole. A second tool for the same part adds nothing there, so five places hold the tools
for five needs rather than five near-copies of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from handrail.catalog.lexical import Scores

WORDS = 0.25
"""What words count of the whole, beside meaning: the best mean over corpora, each left out once."""

POOL = 40
"""The best documents by words, and by meaning, that are looked at for each text."""


@dataclass(frozen=True, slots=True)
class Row:
    """One text (the request, or a part of it), scored both ways; ``meaning`` is None where only words are at hand."""

    words: Scores
    meaning: Scores | None

    def standing(self, number: int) -> float:
        """How far the document stands out for this text."""
        if self.meaning is None:
            return self.words.standing(number)
        return WORDS * self.words.standing(number) + (1 - WORDS) * self.meaning.standing(number)


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
    candidates = sorted({number for best in pools for number in _first(best, permitted)})
    stands = {number: whole.standing(number) for number in candidates}
    if not parts:
        best = sorted(candidates, key=lambda number: (-stands[number], number))[:limit]
        return [Ranked(number, stands[number], 0) for number in best]
    serves = {number: [row.standing(number) for row in parts] for number in candidates}
    covered = [0.0] * len(parts)
    out: list[Ranked] = []
    left = dict(stands)
    while left and len(out) < limit:
        worth = {number: stood + _added(serves[number], covered) for number, stood in left.items()}
        best_number = max(sorted(worth), key=worth.__getitem__)
        held = serves[best_number]
        gains = [max(0.0, s - c) for s, c in zip(held, covered, strict=True)]
        part = max(range(len(parts)), key=lambda at: (gains[at], held[at], -at))
        out.append(Ranked(best_number, left.pop(best_number), part + 1))
        covered = [max(s, c) for s, c in zip(held, covered, strict=True)]
    return out


def _first(best: Sequence[int], permitted: Callable[[int], bool] | None) -> list[int]:
    return list(islice((number for number in best if permitted is None or permitted(number)), POOL))


def _added(serves: Sequence[float], covered: Sequence[float]) -> float:
    """How much better the parts are served with one more hit."""
    return sum(s - c for s, c in zip(serves, covered, strict=True) if s > c)
