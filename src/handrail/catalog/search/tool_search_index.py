"""The search over a catalogue: for a need in plain words, the tools that serve it, or "nothing fits".

A :class:`ToolIndex` is an immutable value over one list of documents. Search by words works at once. Search by meaning is added
when the embedder's thread has the vectors. :attr:`ToolIndexSearchResult.search_method` names the methods behind an answer.
"""

from __future__ import annotations

import math
import threading
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from handrail.catalog.search.cache import SearchCache, hash_text
from handrail.catalog.search.encoder_thread import EncoderThread
from handrail.catalog.search.lexical_index import (
    DocumentScores,
    LexicalIndex,
    SearchableTool,
    TermVector,
    extract_searchable_fields,
    has_all_tool_name_words,
    make_embedding_text,
    make_term_vector,
)
from handrail.catalog.search.word_analysis import (
    extract_identifier_like_words,
    extract_stemmed_terms,
    find_uninformative_terms,
    is_filler_word,
    join_e_mail_words,
    split_request_into_needs,
    split_words,
    stem_unless_filler,
)
from handrail.contract.struct import Struct

if TYPE_CHECKING:
    from handrail.catalog.search.vector_index import VectorIndex


# Ranking: scores by words and by meaning, combined, and a choice of hits that together serve every part of a request.
#
# Meaning counts by how far a tool stands out among all tools, in standard deviations. Words count by their BM25 score, which
# already weighs a word by its rarity; in standard deviations one chance word would count for more the fewer tools match. For
# a request in parts, each next hit is the one that adds most: to a part that no earlier hit serves as well, and to the
# request as a whole. A second tool for the same part adds little there, so five places hold the tools for five needs rather
# than five near-copies of one. When every part has its tool, the next best tools of single parts come before those that are
# a little similar to several. A part that no tool is close to ("could you help me with two things?") counts less.

MEANING, WORDS = 0.75, 0.12
"""The weights of a standard deviation of meaning and of a point of BM25, fitted by leave-one-corpus-out."""

NAMED = 8.0
"""The standard deviations to add for a tool whose name is in the text, spelled as names are (``get_time``)."""

_COVERED, _OWN, _WEIGHED = 0.9, 3.0, 0.5
"""Weights of a tool for the parts of a request.

The first is the discount for a part that an earlier hit serves. The second is the bonus for the best tool of a part. The third
is the exponent of the similarity of a part's nearest tool, relative to other parts.
"""

POOL = 40
"""The number of best documents by words, and by meaning, to consider for each text."""


class RequestTextScores(Struct, frozen=True):
    """The scores of one text: the request, or a part of it.

    :param meaning: None if only words are available
    :param named: the documents that the text names
    :param unknown: the documents without a vector, which count by their words alone
    """

    words: DocumentScores
    meaning: DocumentScores | None
    named: Collection[int] = ()
    unknown: Collection[int] = ()

    def compute_document_relevance(self, number: int) -> float:
        """Return how far the document stands out for this text."""
        out = NAMED if number in self.named else 0.0
        if self.meaning is None or number in self.unknown:
            return out + self.words.compute_z_score(number)
        return out + WORDS * self.words.score(number) + MEANING * self.meaning.compute_z_score(number)

    @property
    def nearest_document_similarity(self) -> float:
        """The similarity of the nearest document to this text; 0 if unknown."""
        if self.meaning is None or not self.meaning.best:
            return 0.0
        return max(0.0, self.meaning.score(self.meaning.best[0]))


class RankedDocument(Struct, frozen=True):
    """A document in the order of hits. ``row`` is the text that it serves best."""

    number: int
    score: float
    row: int


def rank_documents(
    rows: Sequence[RequestTextScores], limit: int, permitted: Callable[[int], bool] | None = None
) -> list[RankedDocument]:
    """Return the best documents, best first.

    :param rows: the scores of the request as a whole, then of its parts if it has several
    :param permitted: a test for documents that may be returned; default: all
    """
    whole, parts = rows[0], rows[1:]
    candidates = _candidates(rows, permitted)
    stands = {number: whole.compute_document_relevance(number) for number in candidates}
    if not parts:
        best = sorted(candidates, key=lambda number: (-stands[number], number))[:limit]
        return [RankedDocument(number, stands[number], 0) for number in best]
    serves = {number: [row.compute_document_relevance(number) for row in parts] for number in candidates}
    heavy = _weigh_request_parts(parts)
    own = _share_of_best_document(serves, heavy)
    covered = [0.0] * len(parts)
    out: list[RankedDocument] = []
    left = {number: stands[number] + _OWN * own[number] for number in candidates}
    while left and len(out) < limit:
        worth = {number: stood + _compute_gain_of_hit(serves[number], covered, heavy) for number, stood in left.items()}
        best_number = max(sorted(worth), key=worth.__getitem__)
        del left[best_number]
        held = serves[best_number]
        gains = [max(0.0, s - c) for s, c in zip(held, covered, strict=True)]
        part = max(range(len(parts)), key=lambda at: (gains[at], held[at], -at))
        out.append(RankedDocument(best_number, stands[best_number], part + 1))
        covered = [max(s, c) for s, c in zip(held, covered, strict=True)]
    return out


def _weigh_request_parts(parts: Sequence[RequestTextScores]) -> list[float]:
    near = [row.nearest_document_similarity for row in parts]
    most = max(near)
    return [(each / most) ** _WEIGHED if most > 0 else 1.0 for each in near]


def _candidates(rows: Sequence[RequestTextScores], permitted: Callable[[int], bool] | None) -> list[int]:
    """Return the documents that stand out for any of the texts, by words, meaning or name."""
    pools = [scores.best for row in rows for scores in (row.words, row.meaning) if scores is not None]
    pools += [sorted(row.named) for row in rows if row.named]
    return sorted({number for best in pools for number in _first(best, permitted)})


def _share_of_best_document(serves: Mapping[int, Sequence[float]], heavy: Sequence[float]) -> dict[int, float]:
    """Return how well each document serves its best part, relative to the best document for that part."""
    tops = [max((held[at] for held in serves.values()), default=0.0) for at in range(len(heavy))]
    return {
        number: max(w * s / top if top > 0 else 0.0 for w, s, top in zip(heavy, held, tops, strict=True))
        for number, held in serves.items()
    }


def _first(best: Sequence[int], permitted: Callable[[int], bool] | None) -> list[int]:
    return list(islice((number for number in best if permitted is None or permitted(number)), POOL))


def _compute_gain_of_hit(serves: Sequence[float], covered: Sequence[float], heavy: Sequence[float]) -> float:
    """Return how much better the parts are served with one more hit."""
    return sum(w * max(0.0, s - _COVERED * c) for s, c, w in zip(serves, covered, heavy, strict=True))


# Confidence: the probability that a hit serves the request, the threshold for "nothing fits", and hits not worth loading.
#
# All are logistic in a few measures, fitted by ``bench/finding/calibrate.py`` on requests with known tools of three public
# corpora, put to catalogues of 10 to 10,000 tools drawn from them: some with their tools, some without these and similar
# ones, and on requests of the other corpora. A fit without one corpus holds on it nearly as well if its requests are of a
# similar kind (the same command prints that, by size). The weight of a tool's full name in a request is fitted with the
# rest.

_CONSIDERED = 5
"""The number of hits by which a request is evaluated."""

FEWEST, MOST = 5, 10_000
"""The sizes of a catalogue between which more tools mean better chance hits.

Larger catalogues count as the largest that was measured. Extrapolated beyond it, "nothing fits" would come too often.
"""

LEAST, LEAST_BY_WORDS = 0.08, 0.1
"""The probability that something fits below which the answer is "nothing fits".

Measured on three corpora, each with a fit on the others. With meaning, it loses 0 to 4 % of the found tools (2 to 11 % for chat,
14 % among 10,000 tools), and detects 20 to 60 % of the requests without a tool. By words alone, it loses up to 3 % (16 % for
chat), and detects 10 % in small catalogues and 40 % in large ones.
"""

NAMED_SURE = 0.02
"""The minimum confidence of a hit worth loading. Without such a hit, nothing fits.

On the three corpora it loses at most 0.2 % of the found tools, and detects 1 to 3 % more of the requests without a tool. With
0.03 it would lose 0.8 % for chat, and detect 3 to 6 % more.
"""

_BESIDE = 0.1
"""The minimum confidence of a hit worth loading, relative to the best hit for the same need.

It leaves one or two of five hits, and loses 2 % of the found tools.
"""


class HitEvidence(Struct, frozen=True):
    """The evidence for one hit, each value for the part of the request that it serves best.

    :param similarity: similarity of meaning, -1 to 1, or None if only words were searched
    :param word_share: the share of the maximum score by words, 0 to 1
    :param relevance: how far the hit stands out among all tools, with the weights of :mod:`~handrail.catalog.search.tool_search_index`
    :param part: the number of that part
    :param named: whether that part contains every word of the tool's name, which has two or more
    :param out_of_domain: the similarity of common tools to the part that this tool is nearest to
    """

    similarity: float | None
    word_share: float
    relevance: float
    part: int = 0
    named: bool = False
    out_of_domain: float = 0.0


def compute_hit_confidences(hits: Sequence[HitEvidence], tools: int) -> list[float]:
    """Return the confidence of each hit: the share of hits with such evidence that serve their request.

    The fit assumes that half of all requests have a tool.

    :param tools: the number of tools in the catalogue
    """
    out: list[float] = []
    for at, each in enumerate(hits):
        others = [other.relevance for number, other in enumerate(hits[:_CONSIDERED]) if number != at]
        ahead = each.relevance - (sum(others) / len(others) if others else 0.0)
        words = math.sqrt(max(0.0, each.word_share))
        if each.similarity is None:
            log_odds = -2.99 + 9.55 * words + 0.24 * ahead - 0.56 * _compute_extent(tools) + 2.55 * each.named
        else:
            log_odds = (
                -4.67
                + 9.45 * each.similarity
                + 2.66 * words
                + 0.79 * ahead
                - 0.44 * _compute_extent(tools)
                + 1.23 * each.named
            )
        out.append(_logistic(log_odds))
    return out


def pool_equivalent_hit_confidences(sure: Sequence[float], alike: Sequence[Sequence[bool]]) -> list[float]:
    """Return the confidence of each hit, shared among hits that do the same, because any of them serves.

    The fit used requests with one known tool each. For a tool among near copies, it tells how likely it is the known one.

    :param alike: for each hit, which hits do the same, itself included
    """
    return [
        max(own, 1 - math.prod(1 - one for one, same in zip(sure, row, strict=True) if same))
        for own, row in zip(sure, alike, strict=True)
    ]


def flag_weak_hits(hits: Sequence[HitEvidence], sure: Sequence[float]) -> list[bool]:
    """Return for each hit whether its evidence is too weak, absolutely or relative to others, to load it.

    :param sure: the confidences of the hits
    """
    best: dict[int, float] = {}
    for each, value in zip(hits, sure, strict=True):
        best[each.part] = max(value, best.get(each.part, 0.0))
    return [value < max(NAMED_SURE, _BESIDE * best[each.part]) for each, value in zip(hits, sure, strict=True)]


def estimate_any_match_probability(hits: Sequence[HitEvidence], tools: int) -> float:
    """Return the probability that any tool serves the request.

    The fit assumes that as many requests have a tool as have none.

    :param hits: the best ones, best first
    :param tools: the number of tools in the catalogue; with more tools, the best false hit is better
    """
    if not (best := hits[:_CONSIDERED]):
        return 0.0
    stands, extent = best[0].relevance, _compute_extent(tools)
    nears = [each.similarity for each in best if each.similarity is not None]
    named = any(each.named for each in best)
    if not nears:  # the lead of the best hit tells nothing more, because several may do the same
        words = math.sqrt(max(0.0, best[0].word_share))
        return _logistic(-2.21 + 9.61 * words + 0.08 * stands - 0.51 * extent + 2.22 * named)
    # The relevance of the best hit includes words already. As an extra term they help on some corpora and harm on others.
    elsewhere = max(best, key=lambda each: -1.0 if each.similarity is None else each.similarity).out_of_domain
    return _logistic(-2.76 + 11.75 * max(nears) + 0.53 * stands - 12.55 * elsewhere - 0.70 * extent + 1.10 * named)


def _compute_extent(tools: int) -> float:
    return math.log(min(max(tools, FEWEST), MOST))


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-max(-30.0, min(30.0, value))))


# The language of a request without hits, which the search may not understand.

STEMS = "English"
"""The language of a search by words, which has English stems and filler words."""

_HARDLY = 1 / 4
"""The maximum share of known words in a request that counts as not understood."""

_LAST_LATIN = "\u024f"


def explain_unsearchable_request(request: str, reads: str, known: Callable[[str], bool]) -> str:
    """Return why the search may not understand ``request``, and what to do; empty if it does.

    :param reads: the only language that the search reads; empty if it reads several, or it is unknown
    :param known: returns whether any tool has a term
    """
    if not reads:
        return ""
    if _is_mostly_other_language(request):
        return f"most of the request is not in Latin letters, but this search reads {reads}; search again in {reads}"
    empty = find_uninformative_terms(request)
    known_words = {
        stem_unless_filler(word) for word in split_words(request) if not is_filler_word(word) and word not in empty
    }
    if known_words and sum(map(known, known_words)) <= _HARDLY * len(known_words):
        return (
            f"hardly a word of the request is known, and this search reads {reads}. If it is in another language, search "
            f"again in {reads}"
        )
    return ""


def _is_mostly_other_language(text: str) -> bool:
    letters = [char for char in unicodedata.normalize("NFKD", text) if char.isalpha()]
    return 2 * sum(char > _LAST_LATIN for char in letters) > len(letters)


SearchMethod = Literal["lexical", "lexical and meaning"]

PATIENCE_S = 2.0
"""The maximum wait of one search for the vectors of its request, in seconds."""

_PLACES = 2_048
"""The number of found documents whose terms are cached for the reasons."""

_JUDGED = 5
"""The minimum number of hits for the decision whether anything fits."""

_COPIES = 0.85
"""The similarity from which two tools do the same. Tools for the area and the circumference of circles have less."""

_WEAK = 0.5
"""The confidence below which a hit is weak."""


class ToolIndexHit(Struct, frozen=True):
    """One tool in a search result.

    :param score: how far it stands out among all tools, with the weights of :mod:`~handrail.catalog.search.tool_search_index`
    :param confidence: the probability that it serves the request, 0 to 1, measured on requests with known answers
    :param reasons: the reasons for the hit, each in a few words
    :param weak: whether it probably does not serve the request
    :param tail: whether its evidence is too weak, absolutely or relative to others, to load it
    """

    id: str
    score: float
    confidence: float
    reasons: tuple[str, ...]
    weak: bool
    tail: bool


class ToolIndexSearchResult(Struct, frozen=True):
    """The result of a search.

    :param hits: best first; with ``nothing_fits`` they are the nearest ones
    :param nothing_fits: whether no tool is likely to serve the request, or no hit is worth loading
    :param fit_probability: the probability that a tool serves the request, if as many requests have a tool as have none
    :param search_method: the methods behind the result
    :param note: why the search used words only, for all tools or some; else empty
    :param unread: with ``nothing_fits``, the result of :func:`~handrail.catalog.search.tool_search_index.explain_unsearchable_request`
    """

    hits: tuple[ToolIndexHit, ...]
    nothing_fits: bool
    fit_probability: float
    search_method: SearchMethod
    note: str = ""
    unread: str = ""


class ToolIndex:
    """A search index over one list of documents. Safe to use from any thread.

    :param documents: of several with one id, the last one counts
    :param encoder: makes vectors; without it, the search uses words only
    :param cache: stores the word index between two starts
    :param without: why there is no encoder, for :attr:`ToolIndexSearchResult.note`
    """

    def __init__(
        self,
        documents: Iterable[SearchableTool],
        *,
        encoder: EncoderThread | None = None,
        cache: SearchCache | None = None,
        without: str = "",
    ) -> None:
        self._documents = tuple(sorted({each.id: each for each in documents}.values(), key=lambda each: each.id))
        self._encoder, self._cache, self._without = encoder, cache, without
        self._vicinity: VectorIndex | None = None
        self._unknown: Collection[int] = ()
        """The documents without a vector, where others have one."""
        self._places: dict[str, Sequence[tuple[str, frozenset[str]]]] = {}
        self._lexical = self._load_lexical()
        self._ready = threading.Event()
        self._request_vectors()

    def updated_copy(self, added: Iterable[SearchableTool], removed: Iterable[str] = ()) -> ToolIndex:
        """Return the index after a change. It reads and encodes only what is new. This index stays unchanged.

        :param added: new documents, and changed ones that replace those with the same id
        """
        gone = set(removed)
        coming = {each.id: each for each in added}
        held = {each.id: each for each in self._documents}
        after = {**{name: each for name, each in held.items() if name not in gone}, **coming}
        out = ToolIndex.__new__(ToolIndex)
        out._documents = tuple(sorted(after.values(), key=lambda each: each.id))
        out._encoder, out._cache, out._without = self._encoder, self._cache, self._without
        out._vicinity, out._unknown, out._places = None, (), {}
        before = {each.id: number for number, each in enumerate(self._documents)}
        kept: dict[int, int] = {}
        new: dict[int, TermVector] = {}
        for number, each in enumerate(out._documents):
            if each.id in coming:
                new[number] = make_term_vector(extract_searchable_fields(each))
            else:
                kept[before[each.id]] = number
        out._lexical = self._lexical.updated_copy(kept, new)
        out._ready = threading.Event()
        out._request_vectors()
        return out

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def is_complete(self) -> bool:
        """Whether every tool has a vector that can have one, so that there is nothing to wait for."""
        return self._ready.is_set()

    @property
    def age_s(self) -> float:
        """The seconds since the index was started."""
        return time.monotonic() - self._begun

    def wait_until_complete(self, timeout_s: float | None = None) -> bool:
        """Wait until the index is complete or the embedder fails. Return whether it is complete."""
        return self._encoder is not None and self._encoder.wait_for_event_or_failure(self._ready, timeout_s)

    def search(
        self, query: str, limit: int = 5, *, among: Callable[[str], bool] | None = None, patience_s: float = PATIENCE_S
    ) -> ToolIndexSearchResult:
        """Return the tools that serve ``query``, best first, at most ``limit``.

        Any text is taken literally. Patterns and instructions in it have no meaning here.

        :param among: a test for ids that may be found; default: all
        """
        return self.search_multiple_queries([query], limit, among=among, patience_s=patience_s)

    def search_multiple_queries(
        self,
        queries: Sequence[str],
        limit: int = 5,
        *,
        among: Callable[[str], bool] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> ToolIndexSearchResult:
        """Return the tools that together serve all of ``queries``. Each may contain several needs."""
        texts = build_request_texts(queries)
        if not texts or not self._documents or limit < 1:
            return ToolIndexSearchResult((), True, 0.0, "lexical", "" if texts else "the request is empty")
        wanted = [self._lexical.extract_request_terms(text) for text in texts]
        vicinity, vectors, note = self._vectors(texts, patience_s)
        pool = POOL if among is None else max(POOL, len(self._documents))
        rows = self._score_texts(texts, wanted, vicinity, vectors, pool)
        order = rank_documents(rows, max(limit, _JUDGED), self._make_filter(among))
        evidence, alike = self._collect_evidence(order, rows, wanted, vicinity, vectors)
        fit = estimate_any_match_probability(evidence, len(self._documents))
        sure = self._compute_confidences(evidence, alike)
        order, evidence, sure = order[:limit], evidence[:limit], sure[:limit]
        judged = zip(order, evidence, sure, flag_weak_hits(evidence, sure), strict=True)
        hits = tuple(self._hit(*each, texts, wanted) for each in judged)
        nothing = fit < (LEAST_BY_WORDS if vicinity is None else LEAST) or all(hit.tail for hit in hits)
        strange = self._unread(texts[0], vicinity) if nothing else ""
        return ToolIndexSearchResult(
            hits, nothing, fit, "lexical" if vicinity is None else "lexical and meaning", note, strange
        )

    def _find_named(self, text: str) -> frozenset[int]:
        """Return the documents that ``text`` names in a spelling that only names have."""
        called = [each.casefold() for each in extract_identifier_like_words(text)]
        return frozenset(self._names[each] for each in called if each in self._names) if called else frozenset()

    @cached_property
    def _names(self) -> Mapping[str, int]:
        documents = enumerate(self._documents)
        return {name.casefold(): number for number, each in documents for name in (*each.aliases, each.id)}

    def _score_texts(
        self,
        texts: Sequence[str],
        wanted: Sequence[Sequence[str]],
        vicinity: VectorIndex | None,
        vectors: Any,
        pool: int,
    ) -> list[RequestTextScores]:
        """Return how far the documents stand out for each text.

        :param wanted: the terms of each text
        """
        rows: list[RequestTextScores] = []
        for at, each in enumerate(wanted):
            by_words = self._lexical.score_documents(each, pool, find_uninformative_terms(texts[at]))
            meaning = vicinity.score_by_similarity(vectors[at], pool, by_words.best) if vicinity is not None else None
            rows.append(RequestTextScores(by_words, meaning, self._find_named(texts[at]), self._unknown))
        return rows

    def _collect_evidence(
        self,
        order: Sequence[RankedDocument],
        rows: Sequence[RequestTextScores],
        wanted: Sequence[Sequence[str]],
        vicinity: VectorIndex | None,
        vectors: Any,
    ) -> tuple[list[HitEvidence], list[list[float]] | None]:
        """Return the evidence for each ranked document, and their similarity to each other, or None."""
        near, alike, elsewhere = None, None, None
        if vicinity is not None and order:
            compared = vicinity.compute_document_similarities([each.number for each in order], vectors)
            near, alike = compared[0].tolist(), compared[1].tolist()
            elsewhere = vicinity.compute_common_tool_similarity(vectors).tolist()
        attainable = [self._lexical.compute_max_score(each) for each in wanted]
        evidence = [
            self._evidence(each, rows, wanted[each.row], attainable, near and near[at], elsewhere)
            for at, each in enumerate(order)
        ]
        return evidence, alike

    def _compute_confidences(
        self, evidence: Sequence[HitEvidence], alike: Sequence[Sequence[float]] | None
    ) -> Sequence[float]:
        sure = compute_hit_confidences(evidence, len(self._documents))
        if alike is None:
            return sure
        return pool_equivalent_hit_confidences(sure, [[likeness >= _COPIES for likeness in each] for each in alike])

    def _unread(self, text: str, vicinity: VectorIndex | None) -> str:
        reads = STEMS if vicinity is None or self._encoder is None else self._encoder.language
        return explain_unsearchable_request(text, reads, self._lexical.terms.__contains__)

    def _make_filter(self, among: Callable[[str], bool] | None) -> Callable[[int], bool] | None:
        if among is None:
            return None

        def permitted(number: int) -> bool:
            return among(self._documents[number].id)

        return permitted

    def _vectors(self, texts: Sequence[str], patience_s: float) -> tuple[VectorIndex | None, Any, str]:
        vicinity, encoder = self._vicinity, self._encoder
        if encoder is None:
            return None, None, self._without
        if vicinity is None:
            return None, None, encoder.state
        vectors = encoder.encode_query([join_e_mail_words(text) for text in texts], patience_s)
        left_out = encoder.excluded_tools_description
        if vectors is None:
            why = encoder.state if encoder.state != left_out else ""
            return None, None, why or f"the embedder returned no vector of the request within {patience_s:g} s"
        import numpy

        return vicinity, numpy.stack(vectors), left_out if self.is_complete else encoder.state

    def _evidence(
        self,
        found: RankedDocument,
        rows: Sequence[RequestTextScores],
        wanted: Sequence[str],
        attainable: Sequence[float],
        near: Sequence[float] | None,
        elsewhere: Sequence[float] | None,
    ) -> HitEvidence:
        """Return the evidence for one document, each value for the text that it serves best.

        :param wanted: the terms of the text for which it was found
        :param attainable: the maximum score by words, for each text
        :param near: its similarity to each text, with the similarity of common tools in ``elsewhere``
        """
        shared = max(
            row.words.score(found.number) / most if most > 0 else 0.0
            for row, most in zip(rows, attainable, strict=True)
        )
        standing = max(row.compute_document_relevance(found.number) for row in rows)
        document = self._documents[found.number]
        named = has_all_tool_name_words(wanted, document.id, document.category)
        if near is None or elsewhere is None or found.number in self._unknown:
            return HitEvidence(None, shared, standing, found.row, named)
        text = max(range(len(near)), key=near.__getitem__)
        return HitEvidence(near[text], shared, standing, found.row, named, elsewhere[text])

    def _hit(
        self,
        found: RankedDocument,
        evidence: HitEvidence,
        sure: float,
        last: bool,
        texts: Sequence[str],
        wanted: Sequence[Sequence[str]],
    ) -> ToolIndexHit:
        document = self._documents[found.number]
        reasons = self._find_shared_words(document, texts[found.row], wanted[found.row])
        if evidence.similarity is not None:
            reasons.append(f"meaning {evidence.similarity:.2f}")
        if found.row:
            reasons.append(f"for “{_short(texts[found.row])}”")
        return ToolIndexHit(document.id, round(found.score, 4), round(sure, 3), tuple(reasons), sure < _WEAK, last)

    def _find_shared_words(self, document: SearchableTool, text: str, understood: Sequence[str]) -> list[str]:
        """Return where the document has the request's words, in the request's spelling."""
        fields: dict[str, str] = {}
        for word in split_words(text):
            if not is_filler_word(word):
                fields.setdefault(stem_unless_filler(word) or word, word)
        for term in understood:
            fields.setdefault(term, term)
        out: list[str] = []
        for name, there in self._terms_by_field(document):
            if common := [term for term in fields if term in there]:
                common.sort(key=lambda term: -self._lexical.compute_inverse_document_frequency(term))
                out.append(f"{name}: {', '.join(fields[term] for term in common[:4])}")
                for term in common:
                    fields.pop(term)
        return out

    def _terms_by_field(self, document: SearchableTool) -> Sequence[tuple[str, frozenset[str]]]:
        """Return the terms of each field of ``document``, cached for documents that are found often."""
        if (known := self._places.get(document.id)) is None:
            held = extract_searchable_fields(document)
            contents = {
                "name": held.name,
                "alias or keyword": held.also,
                "description": held.description,
                "parameters": f"{held.parameter_names} {held.parameter_texts}",
            }
            known = [(name, frozenset(extract_stemmed_terms(content))) for name, content in contents.items()]
            if len(self._places) >= _PLACES:
                self._places.clear()
            self._places[document.id] = known
        return known

    def _load_lexical(self) -> LexicalIndex:
        if self._cache is None:
            return self._build_lexical()
        keys = [each.content_key for each in self._documents]
        held = self._cache.load_word_index(keys)
        if held is not None and len(held) == len(self._documents):
            return held
        made = self._build_lexical()
        self._cache.store_word_index(keys, made)
        return made

    def _build_lexical(self) -> LexicalIndex:
        return LexicalIndex.build_from_vectors(
            make_term_vector(extract_searchable_fields(each)) for each in self._documents
        )

    def _request_vectors(self) -> None:
        """Request vectors for the documents. The encoder's thread reads the documents."""
        self._begun = time.monotonic()
        if self._encoder is not None and self._documents:
            self._encoder.encode_in_background(self)

    def texts_to_encode(self) -> Mapping[bytes, str]:
        """Implement :class:`~handrail.catalog.search.encoder_thread.VectorConsumer`."""
        texts = [make_embedding_text(each) for each in self._documents]
        self._keys = [hash_text(text) for text in texts]
        return dict(zip(self._keys, texts, strict=True))

    def accept_vectors(self, known: Mapping[bytes, Any]) -> None:
        """Implement :class:`~handrail.catalog.search.encoder_thread.VectorConsumer`.

        The first call may have only some of the vectors.
        """
        import numpy

        from handrail.catalog.search.vector_index import VectorIndex

        assert self._encoder is not None
        usual = self._encoder.reference_tool_vectors()
        rows = numpy.zeros((len(self._documents), usual.shape[1]), numpy.float32)
        unknown: set[int] = set()
        for number, key in enumerate(self._keys):
            if (row := known.get(key)) is None:
                unknown.add(number)
            else:
                rows[number] = row
        self._unknown = unknown
        self._vicinity = VectorIndex(
            rows,
            usual,
            out_of_domain=self._encoder.compute_common_tool_vectors(),
            adapt_tools=self._encoder.adapt_tool_vectors,
        )
        if all(self._encoder.is_text_excluded(self._keys[number]) for number in unknown):
            self._ready.set()


def build_request_texts(queries: Sequence[str]) -> list[str]:
    """Return the request as a whole, then its parts if it has several."""
    needs = [query.strip() for query in queries if query.strip()]
    if not needs:
        return []
    pieces = [piece for need in needs for piece in split_request_into_needs(need)]
    whole = "\n".join(needs)[:8_000]
    return [whole, *dict.fromkeys(pieces)] if len(pieces) > 1 else [whole]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
