"""BM25 over the fields of tools, which finds tools that share telling words with a request. Standard library only.

The weight of a term in a tool is its count in each field times that field's weight. BM25 divides by the sum of all weights.
Only the first few repetitions of a term in a field count for it, but all count as length, so a description stuffed with
keywords pays for each one. Postings are flat arrays, written to and read from disk unchanged. If numpy is already loaded, it
scores big catalogues, with the same results.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import re
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from handrail.catalog.search.word_analysis import (
    MAX_COMPOUND_LETTERS,
    extract_compound_words,
    extract_stemmed_terms,
    join_e_mail_words,
    may_be_compound,
    split_words,
    stem_unless_filler,
)
from handrail.contract.struct import Struct

# The searched fields of a tool, each cut to a length that no honest tool needs.
#
# Definitions come from anywhere, so the code assumes nothing about them. A description may be a number, parameters a list,
# a name a megabyte long, and a schema a thousand levels deep.

_NAME, _DESCRIPTION, _PARAMETER, _PARAMETERS = 200, 2_000, 300, 40
"""The maximum characters of a name, a description and a parameter's text, and the maximum parameters of a tool."""

_MAX_PASSAGE_PARAMETERS = 20
"""The maximum number of parameters of one tool whose names a model reads."""

_DEPTH, _VALUES = 3, 12
"""The maximum levels of nested parameters, and the maximum values of one enum."""


class SearchableTool(Struct, frozen=True):
    """A tool as the search sees it.

    :param parameters: its JSON schema
    :param keywords: further words by which it should be found
    :param version: the hash of this definition; if empty, it is computed from the content
    """

    id: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    category: str = ""
    aliases: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    version: str = ""

    @property
    def content_key(self) -> str:
        """A key that two documents share exactly if everything that is searched is the same."""
        if not (version := self.version):
            found = extract_searchable_fields(self)
            content = "\0".join((found.description, found.parameter_names, found.parameter_texts))
            version = hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=16).hexdigest()
        return "\0".join((self.id, self.category, *self.aliases, "", *self.keywords, "", version))


class SearchableToolFields(Struct, frozen=True):
    """The searchable texts of one tool. ``also`` has aliases and keywords."""

    name: str
    description: str
    parameter_names: str
    parameter_texts: str
    also: str
    category: str


def extract_searchable_fields(document: SearchableTool) -> SearchableToolFields:
    """Return the fields of ``document``, cut to their maximum lengths."""
    names: list[str] = []
    texts: list[str] = []
    for name, text in _parameter_names_and_texts(document.parameters, _DEPTH):
        names.append(name)
        if text:
            texts.append(text)
        if len(names) == _PARAMETERS:
            break
    return SearchableToolFields(
        document.id[:_NAME],
        _text(document.description)[:_DESCRIPTION],
        " ".join(names),
        " ".join(texts),
        " ".join((*document.aliases, *document.keywords))[:_DESCRIPTION],
        document.category[:_NAME],
    )


def make_embedding_text(document: SearchableTool) -> str:
    """Return the text of a tool for a model: its name as words, its description, and its parameters' names."""
    name = " ".join(split_words(document.id[:_NAME]))
    description = _text(document.description)[:_DESCRIPTION]
    text = f"{name}: {description}" if description else name
    takes = (
        " ".join(split_words(each))
        for each, _ in islice(_parameter_names_and_texts(document.parameters, _DEPTH), _MAX_PASSAGE_PARAMETERS)
    )
    taken = ", ".join(dict.fromkeys(each for each in takes if each))
    return join_e_mail_words(f"{text} ({taken})" if taken else text)


def _parameter_names_and_texts(schema: object, depth: int) -> Iterator[tuple[str, str]]:
    """Yield name and text of each parameter, outer ones first."""
    if depth == 0 or not isinstance(schema, (dict, Mapping)):  # the first is quicker
        return
    held = cast(Mapping[str, object], schema)
    properties = held.get("properties")
    if not isinstance(properties, (dict, Mapping)):
        yield from _parameter_names_and_texts(held.get("items"), depth - 1)
        return
    inner: list[object] = []
    for name, value in cast(Mapping[str, object], properties).items():
        if not isinstance(value, (dict, Mapping)):
            yield str(name)[:_NAME], ""
            continue
        about = cast(Mapping[str, object], value)
        choices = about.get("enum")
        listed = cast(list[object], choices)[:_VALUES] if isinstance(choices, list) else []
        text = " ".join([_text(about.get("description")), *(str(each)[:_NAME] for each in listed)])
        yield str(name)[:_NAME], text.strip()[:_PARAMETER]
        inner.append(about)
    for about in inner:
        yield from _parameter_names_and_texts(about, depth - 1)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


K1, B = 1.5, 0.75
"""BM25's saturation of repetitions and its weight of length, with the usual values."""

WEIGHTS: Mapping[str, float] = {
    "name": 3.0,
    "also": 2.0,
    "description": 1.0,
    "parameter_names": 1.0,
    "parameter_texts": 0.5,
}
"""The weight of one occurrence in each field."""

_MOST_TERMS = 64
"""The maximum number of different terms of one request; further ones are ignored."""

_BY_NUMPY = 1_000
"""The number of postings from which numpy is faster."""

_LETTERS = frozenset("ex")
"""Letters that begin a compound: e-mail, x-ray."""

_PART = 3
"""The minimum letters of each part of a compound."""

_BEFORE_LAST = re.compile(r"^.*(?:[.:/]|__)")
"""The server or namespace before the name of a tool, with its separator."""

_LONGEST_NAME = 200
"""The maximum characters of a name or category that is compared."""

_MIN_NAME_WORDS = 2
"""The minimum number of different words in a name for which a request that has them all is evidence."""

_SLIGHT = 0.01
"""The share of its score that a document with only hollow terms keeps, which is enough to be the nearest."""

_REPEATED = 3
"""The number of repetitions of a term in one field that count for it."""


class TermVector(Struct, frozen=True):
    """The terms of one tool with their weights, and the sum of all weights as its length."""

    weights: Mapping[str, float]
    length: float


def make_term_vector(found: SearchableToolFields) -> TermVector:
    weights: dict[str, float] = {}
    length = 0.0
    for name, weight in WEIGHTS.items():
        terms = extract_stemmed_terms(getattr(found, name))
        length += weight * len(terms)
        different = dict.fromkeys(terms)
        for term in different:
            count = 1 if len(different) == len(terms) else min(terms.count(term), _REPEATED)
            weights[term] = weights.get(term, 0.0) + weight * count
    return TermVector(weights, length)


class DocumentScores(Struct, frozen=True):
    """The scores of one text against all documents.

    :param best: the numbers of the best documents, best first
    :param mean: the mean score of all documents; ``deviation`` is their standard deviation
    :param score: returns the score of a document
    """

    best: Sequence[int]
    mean: float
    deviation: float
    score: Callable[[int], float]

    def compute_z_score(self, number: int) -> float:
        """Return how many standard deviations the document is above the mean."""
        return (self.score(number) - self.mean) / self.deviation if self.deviation > 1e-9 else 0.0


@dataclass(frozen=True, slots=True)
class LexicalIndex:
    """An immutable BM25 index. Documents are numbers from 0 on.

    :param terms: each term's position in ``starts``
    :param starts: where the postings of each term begin, and the end of the last ones
    :param documents: the document of each posting; ``weights`` has its weight
    :param lengths: the length of each document: the sum of its weights
    :param average: the mean length
    """

    terms: Mapping[str, int]
    starts: array[int]
    documents: array[int]
    weights: array[float]
    lengths: array[float]
    average: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "average", (math.fsum(self.lengths) / len(self.lengths) if self.lengths else 0.0) or 1.0
        )

    @classmethod
    def build_from_vectors(cls, bags: Iterable[TermVector]) -> LexicalIndex:
        """Return the index of ``bags``, in their order. It reads them one by one and keeps none."""
        places: dict[str, int] = {}
        documents_of: list[array[int]] = []
        weights_of: list[array[float]] = []
        lengths = array("f")
        for number, each in enumerate(bags):
            lengths.append(each.length)
            for term, weight in each.weights.items():
                place = places.setdefault(term, len(documents_of))
                if place == len(documents_of):
                    documents_of.append(array("i", (number,)))
                    weights_of.append(array("f", (weight,)))
                else:
                    documents_of[place].append(number)
                    weights_of[place].append(weight)
        starts, documents, weights = array("i", [0]), array("i"), array("f")
        for held, weighed in zip(documents_of, weights_of, strict=True):
            documents += held
            weights += weighed
            starts.append(len(documents))
        return cls(places, starts, documents, weights, lengths)

    def updated_copy(self, kept: Mapping[int, int], added: Mapping[int, TermVector]) -> LexicalIndex:
        """Return the index after a change.

        :param kept: old number to new number, for the documents that stay
        :param added: new number to terms, for new documents
        """
        numbers = [-1] * len(self)
        lengths = array("f", bytes(4 * (len(kept) + len(added))))
        for old, new in kept.items():
            numbers[old] = new
            lengths[new] = self.lengths[old]
        coming: dict[str, list[tuple[int, float]]] = {}
        for number, each in added.items():
            lengths[number] = each.length
            for term, weight in each.weights.items():
                coming.setdefault(term, []).append((number, weight))
        renumbered = array("i", [numbers[number] for number in self.documents])
        gone = iter([at for at, number in enumerate(renumbered) if number < 0])
        places: dict[str, int] = {}
        starts, documents, weights = array("i", [0]), array("i"), array("f")
        next_gone = next(gone, len(renumbered))
        for term, place in self.terms.items():  # in the order of their places
            begin, end = self.starts[place], self.starts[place + 1]
            while next_gone < end:
                documents += renumbered[begin:next_gone]
                weights += self.weights[begin:next_gone]
                begin, next_gone = next_gone + 1, next(gone, len(renumbered))
            documents += renumbered[begin:end]
            weights += self.weights[begin:end]
            if term in coming:
                _extend(documents, weights, coming.pop(term))
            if len(documents) > starts[-1]:
                places[term] = len(places)
                starts.append(len(documents))
        for term, held in coming.items():
            _extend(documents, weights, held)
            places[term] = len(places)
            starts.append(len(documents))
        return LexicalIndex(places, starts, documents, weights, lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def compute_inverse_document_frequency(self, term: str) -> float:
        """Return the inverse document frequency of ``term``, which is highest if no document has it."""
        place = self.terms.get(term)
        count = 0 if place is None else self.starts[place + 1] - self.starts[place]
        return math.log(1 + (len(self) - count + 0.5) / (count + 0.5))

    def extract_request_terms(self, text: str) -> list[str]:
        """Return the terms of a request, with compounds spelled as in the documents.

        "e mail" becomes "email" if a document has that. "website" becomes "web" and "site" if no document has the one word and
        one has both.
        """
        found = split_words(text)
        out: dict[str, None] = {}
        whole = [
            term for word in extract_compound_words(text, found) if (term := stem_unless_filler(word)) in self.terms
        ]
        at = 0
        while at < len(found) and len(out) < _MOST_TERMS:
            word, after = found[at], found[at + 1] if at + 1 < len(found) else ""
            at += 1
            if word in _LETTERS and (joined := stem_unless_filler(word + after)) in self.terms:
                out[joined] = None
                at += 1
                continue
            if after and may_be_compound(word, after) and (joined := stem_unless_filler(word + after)) in self.terms:
                whole.append(joined)
            if term := stem_unless_filler(word):
                out.update(dict.fromkeys([term] if term in self.terms else self._split_compound(word) or [term]))
        return list(dict.fromkeys((*out, *whole)))

    def _split_compound(self, word: str) -> list[str]:
        """Return the two terms that ``word`` consists of, if one document has both."""
        if len(word) > MAX_COMPOUND_LETTERS or not word.isalpha():
            return []
        for cut in range(_PART, len(word) - _PART + 1):
            first, second = stem_unless_filler(word[:cut]), stem_unless_filler(word[cut:])
            places = [self.terms[term] for term in (first, second) if term in self.terms]
            if len(places) == 2 and self._documents_with(places[:1]) & self._documents_with(places[1:]):
                return [first, second]
        return []

    def _documents_with(self, places: Iterable[int]) -> set[int]:
        """Return the documents that have a term at any of these positions."""
        return set[int]().union(*(self.documents[self.starts[at] : self.starts[at + 1]] for at in places))

    def compute_max_score(self, wanted: Sequence[str]) -> float:
        """Return the limit of the score of a document with all of ``wanted``.

        It includes terms that no document has.
        """
        return (K1 + 1) * math.fsum(self.compute_inverse_document_frequency(term) for term in dict.fromkeys(wanted))

    def score_documents(self, wanted: Sequence[str], pool: int, hollow: Collection[str] = ()) -> DocumentScores:
        """Return the BM25 scores of all documents for the terms ``wanted``, with the ``pool`` best ones.

        :param hollow: terms that count only together with others. "3" distinguishes one tool for models from another. By itself
            it tells nothing about the need, however rare it is
        """
        places: list[tuple[int, float]] = []
        telling: list[int] = []
        for term in list(dict.fromkeys(wanted))[:_MOST_TERMS]:
            if (place := self.terms.get(term)) is not None:
                places.append((place, self.compute_inverse_document_frequency(term) * (K1 + 1)))
                if term not in hollow:
                    telling.append(place)
        postings = sum(self.starts[place + 1] - self.starts[place] for place, _ in places)
        damped = len(telling) < len(places)
        numpy = _loaded_numpy()
        if numpy is not None and postings >= _BY_NUMPY:
            return self._by_numpy(numpy, places, telling if damped else None, pool)
        found: dict[int, float] = {}
        lengths, base, slope = self.lengths, K1 * (1 - B), K1 * B / self.average
        for place, tells in places:
            begin, end = self.starts[place], self.starts[place + 1]
            for number, weight in zip(self.documents[begin:end], self.weights[begin:end], strict=True):
                norm = base + slope * lengths[number]
                found[number] = found.get(number, 0.0) + tells * weight / (weight + norm)
        count = max(len(self), 1)
        mean = math.fsum(found.values()) / count
        square = math.fsum(score * score for score in found.values()) / count
        deviation = math.sqrt(max(0.0, square - mean * mean))
        if damped:  # after the mean and the deviation, which include matches by chance
            for number in found.keys() - self._documents_with(telling):
                found[number] *= _SLIGHT
        best = heapq.nsmallest(pool, found.items(), key=lambda item: (-item[1], item[0]))
        return DocumentScores([number for number, _ in best], mean, deviation, lambda number: found.get(number, 0.0))

    def _by_numpy(
        self, numpy: Any, places: Sequence[tuple[int, float]], telling: Sequence[int] | None, pool: int
    ) -> DocumentScores:
        """Return the scores, computed with numpy.

        :param telling: positions of terms; a document without any of them loses most of its score. None: every document counts
        """
        documents = numpy.frombuffer(self.documents, numpy.int32)
        weights = numpy.frombuffer(self.weights, numpy.float32)
        lengths = numpy.frombuffer(self.lengths, numpy.float32)
        total = numpy.zeros(len(self))
        for place, tells in places:
            begin, end = self.starts[place], self.starts[place + 1]
            numbers, held = documents[begin:end], weights[begin:end].astype(float)
            norm = K1 * (1 - B) + K1 * B / self.average * lengths[numbers].astype(float)
            total[numbers] += tells * held / (held + norm)
        mean, deviation = float(total.mean()), float(total.std())
        if telling is not None:
            bare = numpy.ones(len(self), bool)
            for place in telling:
                bare[documents[self.starts[place] : self.starts[place + 1]]] = False
            total[bare] *= _SLIGHT
        best = [number for number in find_top_value_indices(numpy, total, pool) if total[number] > 0]
        return DocumentScores(best, mean, deviation, lambda number: float(total[number]))


def _extend(documents: array[int], weights: array[float], held: Sequence[tuple[int, float]]) -> None:
    documents.extend([number for number, _ in held])
    weights.extend([weight for _, weight in held])


def has_all_tool_name_words(request_words: Collection[str], name: str, category: str = "") -> bool:
    """Return whether a request contains every word of a tool's name, at least two different ones.

    The part before the last separator of the name (a server, a namespace) may be missing. So may the category at its beginning,
    if two words or more remain.

    :param request_words: the request's terms, from :meth:`LexicalIndex.extract_request_terms`
    """
    if len(name) > _LONGEST_NAME:
        return False
    if _contains_all_words(request_words, split_words(name)):
        return True
    last, of = split_words(_BEFORE_LAST.sub("", name)), split_words(category[:_LONGEST_NAME])
    return _contains_all_words(request_words, last) or (
        bool(of) and last[: len(of)] == of and _contains_all_words(request_words, last[len(of) :])
    )


def _contains_all_words(request_words: Collection[str], found: Sequence[str]) -> bool:
    """Return whether a request contains all words. Two words that the request joins count as one."""
    matched_words: set[str] = set()
    at = 0
    while at < len(found):
        term, both = stem_unless_filler(found[at]), found[at : at + 2]
        at += 1
        if term in request_words:
            matched_words.add(term)
        elif len(both) > 1 and (joined := stem_unless_filler("".join(both))) in request_words:
            matched_words.add(joined)
            at += 1
        elif term:
            return False
    return len(matched_words) >= _MIN_NAME_WORDS


def _loaded_numpy() -> Any:
    """Return numpy if it is loaded; None while another thread still imports it."""
    numpy = sys.modules.get("numpy")
    return None if getattr(getattr(numpy, "__spec__", None), "_initializing", False) else numpy


def find_top_value_indices(numpy: Any, total: Any, count: int) -> list[int]:
    """Return the numbers of the ``count`` highest values, highest first.

    Of equal values, the lower number comes first.
    """
    several = min(count, len(total))
    if several == 0:
        return []
    least = numpy.partition(total, len(total) - several)[len(total) - several]
    above = numpy.flatnonzero(total > least)
    found = numpy.concatenate((above, numpy.flatnonzero(total == least)[: several - len(above)]))
    return found[numpy.lexsort((found, -total[found]))].tolist()
