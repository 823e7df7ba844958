"""The search over a catalogue: ask for what is needed in plain words, get the tools that do it, or "nothing fits".

An :class:`Index` is an immutable value over one list of documents. Words are searched from the first moment; meaning
joins in when the embedder's thread has what it needs, and :attr:`Found.means` says which of both an answer is made of.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from handrail.catalog.search.cache import Cache, key_of
from handrail.catalog.search.confidence import LEAST, LEAST_BY_WORDS, Evidence, confidences, fitting, tail, together
from handrail.catalog.search.encoding import Encoder
from handrail.catalog.search.fusion import POOL, Ranked, Row, ranked
from handrail.catalog.search.lexical import Bag, Lexical, bag, says_whole_name
from handrail.catalog.search.reading import STEMS, unread
from handrail.catalog.search.texts import Document, fields, passage
from handrail.catalog.words.splitting import parts
from handrail.catalog.words.words import filler, hollow, names_in, spelled, term_of, terms, words

if TYPE_CHECKING:
    from handrail.catalog.search.vectors import Vicinity

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

    :param score: how far it stands out among all tools, as :mod:`~handrail.catalog.search.fusion` weighs words and meaning
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
    :param unread: where nothing fits, why the request may not have been understood: see :func:`~handrail.catalog.search.reading.unread`
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
        rows: list[Row] = []
        for at, each in enumerate(wanted):
            by_words = self._lexical.scores(each, pool, hollow(texts[at]))
            meaning = vicinity.scores(vectors[at], pool, by_words.best) if vicinity is not None else None
            rows.append(Row(by_words, meaning, self._called(texts[at]), self._unknown))
        order = ranked(rows, max(limit, _JUDGED), self._permitted(among))
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
        fit = fitting(evidence, len(self._documents))
        sure = confidences(evidence, len(self._documents))
        if alike is not None:
            sure = together(sure, [[likeness >= _COPIES for likeness in each] for each in alike])
        order, evidence, sure = order[:limit], evidence[:limit], sure[:limit]
        judged = zip(order, evidence, sure, tail(evidence, sure), strict=True)
        hits = tuple(self._hit(*each, texts, wanted) for each in judged)
        nothing = fit < (LEAST_BY_WORDS if vicinity is None else LEAST) or all(hit.tail for hit in hits)
        reads = STEMS if vicinity is None or self._encoder is None else self._encoder.reads
        strange = unread(texts[0], reads, self._lexical.terms.__contains__) if nothing else ""
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
