"""The search over a catalogue: a need in plain words, the tools that serve it, or "nothing fits".

An :class:`Index` is an immutable value over one list of documents. Words are searched from the first moment. Meaning is added
when the embedder's thread has the vectors; :attr:`Found.means` names the methods behind an answer.
"""

from __future__ import annotations

import math
import threading
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from handrail.catalog.search.cache import Cache, key_of
from handrail.catalog.search.encoding import Encoder
from handrail.catalog.search.lexical import Bag, Document, Lexical, Scores, bag, fields, passage, says_whole_name
from handrail.catalog.search.words import filler, hollow, names_in, parts, spelled, term_of, terms, words

if TYPE_CHECKING:
    from handrail.catalog.search.vectors import Vicinity


# Ranking: scores by words and by meaning, combined, and a choice of hits that together serve every part of a request.
#
# Meaning counts by how far a tool stands out among all tools, in standard deviations. Words count by their BM25 score, which
# already weighs a word by its rarity; in standard deviations one chance word would count for more the fewer tools match. For
# a request in parts, each next hit is the one that adds most: to a part that no earlier hit serves as well, and to the
# request as a whole. A second tool for the same part adds little there, so five places hold the tools for five needs rather
# than five near-copies of one. When every part has its tool, the next best tools of single parts come before those that are
# a little similar to several. A part that no tool is close to ("could you help me with two things?") counts less.

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
    candidates = _candidates(rows, permitted)
    stands = {number: whole.standing(number) for number in candidates}
    if not parts:
        best = sorted(candidates, key=lambda number: (-stands[number], number))[:limit]
        return [Ranked(number, stands[number], 0) for number in best]
    serves = {number: [row.standing(number) for row in parts] for number in candidates}
    heavy = _weights(parts)
    own = _shares(serves, heavy)
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


def _candidates(rows: Sequence[Row], permitted: Callable[[int], bool] | None) -> list[int]:
    """The documents that stand out for any of the texts, by any of what speaks for one."""
    pools = [scores.best for row in rows for scores in (row.words, row.meaning) if scores is not None]
    pools += [sorted(row.named) for row in rows if row.named]
    return sorted({number for best in pools for number in _first(best, permitted)})


def _shares(serves: Mapping[int, Sequence[float]], heavy: Sequence[float]) -> dict[int, float]:
    """How well each document serves the part that it serves best, beside the document that serves that part best."""
    tops = [max((held[at] for held in serves.values()), default=0.0) for at in range(len(heavy))]
    return {
        number: max(w * s / top if top > 0 else 0.0 for w, s, top in zip(heavy, held, tops, strict=True))
        for number, held in serves.items()
    }


def _first(best: Sequence[int], permitted: Callable[[int], bool] | None) -> list[int]:
    return list(islice((number for number in best if permitted is None or permitted(number)), POOL))


def _added(serves: Sequence[float], covered: Sequence[float], heavy: Sequence[float]) -> float:
    """How much better the parts are served with one more hit."""
    return sum(w * max(0.0, s - _COVERED * c) for s, c, w in zip(serves, covered, heavy, strict=True))


# Confidence: the probability that a hit serves the request, the threshold for "nothing fits", and hits not worth loading.
#
# All are logistic in a few measures, fitted by ``bench/finding/calibrate.py`` on requests with known tools of three public
# corpora, put to catalogues of 10 to 10,000 tools drawn from them: some with their tools, some without these and similar
# ones, and on requests of the other corpora. A fit without one corpus holds on it nearly as well if its requests are of a
# similar kind (the same command prints that, by size). The weight of a tool's full name in a request is fitted with the
# rest.

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

NAMED_SURE = 0.02
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
    :param standing: how far it stands out among all tools, as :mod:`~handrail.catalog.search.index` weighs words and meaning
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
    return [value < max(NAMED_SURE, _BESIDE * best[each.part]) for each, value in zip(hits, sure, strict=True)]


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


# The language of a request without hits: the search may not read it.

STEMS = "English"
"""What a search by words reads: its stems and its filler are of that."""

_HARDLY = 1 / 4
"""The part of a request's telling words up to which hardly any of them is known."""

_LAST_LATIN = "\u024f"


def unread(request: str, reads: str, known: Callable[[str], bool]) -> str:
    """Why ``request`` may not have been understood, and what to do, as half a sentence; empty where it was.

    :param reads: the one language that the search reads; empty where it reads several, or it is not known which
    :param known: whether any tool has a term
    """
    if not reads:
        return ""
    if _mostly_foreign(request):
        return f"most of the request is not in Latin letters, and this search reads {reads}: ask again in {reads}"
    empty = hollow(request)
    said = {term_of(word) for word in words(request) if not filler(word) and word not in empty}
    if said and sum(map(known, said)) <= _HARDLY * len(said):
        return (
            f"hardly a word of the request is known here, and this search reads {reads}: if it is in another language, "
            f"ask again in {reads}"
        )
    return ""


def _mostly_foreign(text: str) -> bool:
    letters = [char for char in unicodedata.normalize("NFKD", text) if char.isalpha()]
    return 2 * sum(char > _LAST_LATIN for char in letters) > len(letters)


Means = Literal["lexical", "lexical and meaning"]

PATIENCE_S = 2.0
"""How long one search waits for the vectors of its request."""

_PLACES = 2_048
"""Found documents whose terms are kept for giving reasons."""

_JUDGED = 5
"""Hits at least by which it is judged whether anything fits."""

_COPIES = 0.85
"""Likeness of two tools from which they do the same: an area and a circumference of circles come to less."""

_WEAK = 0.5
"""Confidence below which a hit says that it is weak."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One tool that was found.

    :param score: how far it stands out among all tools, as :mod:`~handrail.catalog.search.index` weighs words and meaning
    :param confidence: how likely it is that it serves the request, 0 to 1, as measured on requests with known answers
    :param reasons: what speaks for it, each in a few words
    :param weak: whether it is more likely than not that it does not serve the request
    :param tail: whether so little speaks for it, at all or beside the others, that it is not worth a place in view
    """

    id: str
    score: float
    confidence: float
    reasons: tuple[str, ...]
    weak: bool
    tail: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to.

    :param hits: best first; with ``nothing_fits`` they are the nearest there are
    :param nothing_fits: no tool is likely to serve the request, or none of the hits is worth a place in view
    :param fitting: how likely it is that one does, of two equally likely cases
    :param means: what the search went by
    :param note: why it went by words alone where it did, for all tools or some; else empty
    :param unread: where nothing fits, why the request may not have been understood: see :func:`~handrail.catalog.search.index.unread`
    """

    hits: tuple[Hit, ...]
    nothing_fits: bool
    fitting: float
    means: Means
    note: str = ""
    unread: str = ""


class Index:
    """Searches one list of documents. Safe to use from any thread.

    :param documents: each id counts once, the last one wins
    :param encoder: what makes vectors; without it the search goes by words
    :param cache: where the words of the whole list are kept between two starts
    :param without: why there is no encoder, for :attr:`Found.note`
    """

    def __init__(
        self,
        documents: Iterable[Document],
        *,
        encoder: Encoder | None = None,
        cache: Cache | None = None,
        without: str = "",
    ) -> None:
        self._documents = tuple(sorted({each.id: each for each in documents}.values(), key=lambda each: each.id))
        self._encoder, self._cache, self._without = encoder, cache, without
        self._vicinity: Vicinity | None = None
        self._unknown: Collection[int] = ()
        """The documents without a vector, where others have one."""
        self._places: dict[str, Sequence[tuple[str, frozenset[str]]]] = {}
        self._lexical = self._words()
        self._ready = threading.Event()
        self._begin()

    def with_changes(self, added: Iterable[Document], removed: Iterable[str] = ()) -> Index:
        """The index after a change; only what is new is read and encoded. This one stays what it is.

        :param added: new documents, and changed ones in place of those of the same id
        """
        gone = set(removed)
        coming = {each.id: each for each in added}
        held = {each.id: each for each in self._documents}
        after = {**{name: each for name, each in held.items() if name not in gone}, **coming}
        out = Index.__new__(Index)
        out._documents = tuple(sorted(after.values(), key=lambda each: each.id))
        out._encoder, out._cache, out._without = self._encoder, self._cache, self._without
        out._vicinity, out._unknown, out._places = None, (), {}
        before = {each.id: number for number, each in enumerate(self._documents)}
        kept: dict[int, int] = {}
        new: dict[int, Bag] = {}
        for number, each in enumerate(out._documents):
            if each.id in coming:
                new[number] = bag(fields(each))
            else:
                kept[before[each.id]] = number
        out._lexical = self._lexical.changed(kept, new)
        out._ready = threading.Event()
        out._begin()
        return out

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def complete(self) -> bool:
        """Whether every tool has its vector that can have one, so that there is nothing to wait for."""
        return self._ready.is_set()

    @property
    def age_s(self) -> float:
        """Seconds since it was begun."""
        return time.monotonic() - self._begun

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every tool has its vector that can have one, not beyond a failure of the embedder; whether that is so."""
        return self._encoder is not None and self._encoder.wait(self._ready, timeout_s)

    def search(
        self,
        query: str,
        limit: int = 5,
        *,
        among: Callable[[str], bool] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Found:
        """The tools that serve ``query``, best first, at most ``limit``.

        Any text is a request, to be taken literally: patterns and instructions in it mean nothing here.

        :param among: which ids may be found; all of them where it is not given
        """
        return self.search_all([query], limit, among=among, patience_s=patience_s)

    def search_all(
        self,
        queries: Sequence[str],
        limit: int = 5,
        *,
        among: Callable[[str], bool] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> Found:
        """The tools that between them serve all of ``queries``: each is a need, and may hold several."""
        texts = texts_of(queries)
        if not texts or not self._documents or limit < 1:
            return Found((), True, 0.0, "lexical", "" if texts else "the request says nothing")
        wanted = [self._lexical.understood(text) for text in texts]
        vicinity, vectors, note = self._vectors(texts, patience_s)
        pool = POOL if among is None else max(POOL, len(self._documents))
        rows = self._rows(texts, wanted, vicinity, vectors, pool)
        order = ranked(rows, max(limit, _JUDGED), self._permitted(among))
        evidence, alike = self._judged(order, rows, wanted, vicinity, vectors)
        fit = fitting(evidence, len(self._documents))
        sure = self._sure(evidence, alike)
        order, evidence, sure = order[:limit], evidence[:limit], sure[:limit]
        judged = zip(order, evidence, sure, tail(evidence, sure), strict=True)
        hits = tuple(self._hit(*each, texts, wanted) for each in judged)
        nothing = fit < (LEAST_BY_WORDS if vicinity is None else LEAST) or all(hit.tail for hit in hits)
        strange = self._unread(texts[0], vicinity) if nothing else ""
        return Found(hits, nothing, fit, "lexical" if vicinity is None else "lexical and meaning", note, strange)

    def _called(self, text: str) -> frozenset[int]:
        """The documents whose very names ``text`` has, written as no ordinary words are."""
        called = [each.casefold() for each in names_in(text)]
        return frozenset(self._names[each] for each in called if each in self._names) if called else frozenset()

    @cached_property
    def _names(self) -> Mapping[str, int]:
        """Which document each name is of."""
        documents = enumerate(self._documents)
        return {name.casefold(): number for number, each in documents for name in (*each.aliases, each.id)}

    def _rows(
        self,
        texts: Sequence[str],
        wanted: Sequence[Sequence[str]],
        vicinity: Vicinity | None,
        vectors: Any,
        pool: int,
    ) -> list[Row]:
        """How far the documents stand out for each text.

        :param wanted: the terms of each text
        """
        rows: list[Row] = []
        for at, each in enumerate(wanted):
            by_words = self._lexical.scores(each, pool, hollow(texts[at]))
            meaning = vicinity.scores(vectors[at], pool, by_words.best) if vicinity is not None else None
            rows.append(Row(by_words, meaning, self._called(texts[at]), self._unknown))
        return rows

    def _judged(
        self,
        order: Sequence[Ranked],
        rows: Sequence[Row],
        wanted: Sequence[Sequence[str]],
        vicinity: Vicinity | None,
        vectors: Any,
    ) -> tuple[list[Evidence], list[list[float]] | None]:
        """What speaks for each of the ranked documents, and how near each lies to each; None where that cannot be said."""
        near, alike, elsewhere = None, None, None
        if vicinity is not None and order:
            compared = vicinity.beside([each.number for each in order], vectors)
            near, alike = compared[0].tolist(), compared[1].tolist()
            elsewhere = vicinity.elsewhere(vectors).tolist()
        attainable = [self._lexical.attainable(each) for each in wanted]
        evidence = [
            self._evidence(each, rows, wanted[each.row], attainable, near and near[at], elsewhere)
            for at, each in enumerate(order)
        ]
        return evidence, alike

    def _sure(self, evidence: Sequence[Evidence], alike: Sequence[Sequence[float]] | None) -> Sequence[float]:
        sure = confidences(evidence, len(self._documents))
        if alike is None:
            return sure
        return together(sure, [[likeness >= _COPIES for likeness in each] for each in alike])

    def _unread(self, text: str, vicinity: Vicinity | None) -> str:
        reads = STEMS if vicinity is None or self._encoder is None else self._encoder.reads
        return unread(text, reads, self._lexical.terms.__contains__)

    def _permitted(self, among: Callable[[str], bool] | None) -> Callable[[int], bool] | None:
        if among is None:
            return None

        def permitted(number: int) -> bool:
            return among(self._documents[number].id)

        return permitted

    def _vectors(self, texts: Sequence[str], patience_s: float) -> tuple[Vicinity | None, Any, str]:
        vicinity, encoder = self._vicinity, self._encoder
        if encoder is None:
            return None, None, self._without
        if vicinity is None:
            return None, None, encoder.state
        vectors = encoder.request([spelled(text) for text in texts], patience_s)
        left_out = encoder.left_out
        if vectors is None:
            why = encoder.state if encoder.state != left_out else ""
            return None, None, why or f"no vector of the request within {patience_s:g} s"
        import numpy

        return vicinity, numpy.stack(vectors), left_out if self.complete else encoder.state

    def _evidence(
        self,
        found: Ranked,
        rows: Sequence[Row],
        wanted: Sequence[str],
        attainable: Sequence[float],
        near: Sequence[float] | None,
        elsewhere: Sequence[float] | None,
    ) -> Evidence:
        """What speaks for one document, each by the text it serves best.

        :param wanted: the terms of the text for which it was found
        :param attainable: what words could score at most, for each text
        :param near: how near it lies to each text, and ``elsewhere`` how near tools that others have
        """
        shared = max(
            row.words.score(found.number) / most if most > 0 else 0.0
            for row, most in zip(rows, attainable, strict=True)
        )
        standing = max(row.standing(found.number) for row in rows)
        document = self._documents[found.number]
        named = says_whole_name(wanted, document.id, document.category)
        if near is None or elsewhere is None or found.number in self._unknown:
            return Evidence(None, shared, standing, found.row, named)
        text = max(range(len(near)), key=near.__getitem__)
        return Evidence(near[text], shared, standing, found.row, named, elsewhere[text])

    def _hit(
        self,
        found: Ranked,
        evidence: Evidence,
        sure: float,
        last: bool,
        texts: Sequence[str],
        wanted: Sequence[Sequence[str]],
    ) -> Hit:
        document = self._documents[found.number]
        reasons = self._shared(document, texts[found.row], wanted[found.row])
        if evidence.near is not None:
            reasons.append(f"meaning {evidence.near:.2f}")
        if found.row:
            reasons.append(f"for “{_short(texts[found.row])}”")
        return Hit(document.id, round(found.score, 4), round(sure, 3), tuple(reasons), sure < _WEAK, last)

    def _shared(self, document: Document, text: str, understood: Sequence[str]) -> list[str]:
        """Where the document has the request's words, as the request says them; compounds as the documents do."""
        said: dict[str, str] = {}
        for word in words(text):
            if not filler(word):
                said.setdefault(term_of(word) or word, word)
        for term in understood:
            said.setdefault(term, term)
        out: list[str] = []
        for name, there in self._places_of(document):
            common = [term for term in said if term in there]
            if common:
                common.sort(key=lambda term: -self._lexical.tells(term))
                out.append(f"{name}: {', '.join(said[term] for term in common[:4])}")
                for term in common:
                    said.pop(term)
        return out

    def _places_of(self, document: Document) -> Sequence[tuple[str, frozenset[str]]]:
        """The terms of each place of ``document``, kept for those that are found again and again."""
        known = self._places.get(document.id)
        if known is None:
            held = fields(document)
            contents = {
                "name": held.name,
                "alias or keyword": held.also,
                "description": held.description,
                "parameters": f"{held.parameter_names} {held.parameter_texts}",
            }
            known = [(name, frozenset(terms(content))) for name, content in contents.items()]
            if len(self._places) >= _PLACES:
                self._places.clear()
            self._places[document.id] = known
        return known

    def _words(self) -> Lexical:
        if self._cache is None:
            return Lexical.of([bag(fields(each)) for each in self._documents])
        keys = [each.key for each in self._documents]
        held = self._cache.lexical(keys)
        if held is not None and len(held) == len(self._documents):
            return held
        made = Lexical.of([bag(fields(each)) for each in self._documents])
        self._cache.keep_lexical(keys, made)
        return made

    def _begin(self) -> None:
        """Have vectors made of what has none. Reading the documents for it is the encoder's thread's work."""
        self._begun = time.monotonic()
        if self._encoder is not None and self._documents:
            self._encoder.wish(self)

    def passages(self) -> Mapping[bytes, str]:
        """See :class:`~handrail.catalog.search.encoding.Wishing`."""
        texts = [passage(each) for each in self._documents]
        self._keys = [key_of(text) for text in texts]
        return dict(zip(self._keys, texts, strict=True))

    def joined(self, known: Mapping[bytes, Any]) -> None:
        """See :class:`~handrail.catalog.search.encoding.Wishing`: some vectors at first, then all."""
        import numpy

        from handrail.catalog.search.vectors import Vicinity

        assert self._encoder is not None
        usual = self._encoder.usual_tools()
        rows = numpy.zeros((len(self._documents), usual.shape[1]), numpy.float32)
        unknown: set[int] = set()
        for number, key in enumerate(self._keys):
            row = known.get(key)
            if row is None:
                unknown.add(number)
            else:
                rows[number] = row
        self._unknown = unknown
        self._vicinity = Vicinity(rows, usual, elsewhere=self._encoder.elsewhere(), drawn=self._encoder.drawn)
        if all(self._encoder.is_aside(self._keys[number]) for number in unknown):
            self._ready.set()


def texts_of(queries: Sequence[str]) -> list[str]:
    """The request as a whole, then its parts where it has several."""
    needs = [query.strip() for query in queries if query.strip()]
    if not needs:
        return []
    pieces = [piece for need in needs for piece in parts(need)]
    whole = "\n".join(needs)[:8_000]
    return [whole, *dict.fromkeys(pieces)] if len(pieces) > 1 else [whole]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
