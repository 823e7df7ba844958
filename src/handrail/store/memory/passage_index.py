"""The full-text index of passages, and the order in which a query finds them.

Each passage is indexed with its context: the text around it and its date. Words of the passage count twice as much as words
of its context. A little is added for passages near other hits, and for passages whose meaning is close to the query. Meaning
alone finds less than words alone in conversations, so it never counts as much as words.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from handrail.contract.text.lazy_patterns import compile_regex_lazily

CREATE_INDEX = (
    "CREATE VIRTUAL TABLE passage USING fts5(text, context, tokenize = 'porter unicode61 remove_diacritics 2')"
)
"""The statement that creates the index. Its row ids are the numbers of passages."""
MOST_TERMS = 20
MOST_CANDIDATES = 300
"""The number of best passages by words that are ranked further."""
MOST_COMPARED = 50
"""The number of best passages by words whose meaning is compared with the query."""
_FREQUENT = 1_000
"""A word in more passages than this is used only if all words of the query are as frequent."""
_MOST_SCORED = 3_000
"""About how many passages a query may score, so that its time does not grow with the index."""
_SUBSTRING_ROWS = 5_000
"""The number of latest passages that are searched for parts of words, if no whole word is found."""
_MEANING_WEIGHT = 0.4
_NEIGHBOUR_WEIGHT = 0.2
_NEIGHBOUR_DISTANCE = 8
_NEIGHBOUR_HITS = 20
"""The number of best passages that lift their neighbours."""

_TERM = compile_regex_lazily(r'"([^"]+)"|(\S+)')
_WORD = compile_regex_lazily(r"\w+")
_TRIMMED_CHARACTERS = ".,;:!?()[]{}<>'\"`*"
_STOP_WORDS = frozenset(
    [
        "a",
        "about",
        "after",
        "also",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "been",
        "before",
        "but",
        "by",
        "can",
        "could",
        "d",
        "did",
        "do",
        "does",
        "doing",
        "during",
        "for",
        "from",
        "had",
        "has",
        "have",
        "he",
        "her",
        "hers",
        "him",
        "his",
        "how",
        "i",
        "if",
        "in",
        "into",
        "is",
        "it",
        "its",
        "just",
        "ll",
        "m",
        "me",
        "my",
        "no",
        "not",
        "of",
        "on",
        "or",
        "our",
        "re",
        "s",
        "she",
        "should",
        "so",
        "some",
        "t",
        "than",
        "that",
        "the",
        "their",
        "them",
        "then",
        "there",
        "they",
        "this",
        "to",
        "up",
        "us",
        "ve",
        "was",
        "we",
        "were",
        "what",
        "when",
        "where",
        "which",
        "who",
        "whom",
        "whose",
        "why",
        "will",
        "with",
        "would",
        "you",
        "your",
    ]
)


class QueryTerms(NamedTuple):
    """The terms of a query, in lower case and each once.

    :param words: single words without stop words, unless it has no others
    :param phrases: the words of each phrase in double quotes, or of a term such as ``src/main.py``
    :param texts: all terms as they are written, for the search of parts of words and for excerpts
    """

    words: tuple[str, ...]
    phrases: tuple[str, ...]
    texts: tuple[str, ...]

    @property
    def is_single(self) -> bool:
        """Whether the query is one word or phrase, which must be in the passage itself and not only in its context."""
        return len(self.words) + len(self.phrases) <= 1


class RankedPassage(NamedTuple):
    """The number of a passage, and its score: 1.0 for the best one by words."""

    number: int
    score: float


def parse_query(query: str) -> QueryTerms:
    """Return the words and phrases of a query."""
    words: dict[str, None] = {}
    phrases: dict[str, None] = {}
    texts: dict[str, None] = {}
    parts_of_terms: list[str] = []
    for quoted, term in _TERM.findall(query):
        parts = _WORD.findall((quoted or term).lower().replace("_", " "))
        if not parts:
            continue
        texts[(quoted or term.strip(_TRIMMED_CHARACTERS)).lower()] = None
        is_phrase = len(parts) > 1 and (quoted or sum(part not in _STOP_WORDS for part in parts) > 1)
        if is_phrase:
            phrases[" ".join(parts)] = None
            parts_of_terms += () if quoted else parts
        else:
            words.update(dict.fromkeys(parts))
    telling = [word for word in words if word not in _STOP_WORDS]
    if len(telling) + len(phrases) > 1:
        telling = list(dict.fromkeys([*telling, *(part for part in parts_of_terms if part not in _STOP_WORDS)]))
    chosen = telling or ([] if phrases else list(words))
    return QueryTerms(tuple(chosen)[:MOST_TERMS], tuple(phrases)[:MOST_TERMS], tuple(texts)[:MOST_TERMS])


def find_passages(
    connection: sqlite3.Connection, terms: QueryTerms, among: str = "", *, with_context: bool = False
) -> list[RankedPassage]:
    """Return the best passages by words, at most :data:`MOST_CANDIDATES`; for a single term the latest ones.

    :param among: an SQL condition on ``passage.rowid``; empty for all passages
    :param with_context: whether a single term can be in the context, because that says what the passage is about
    :raises sqlite3.Error: if the index cannot be read
    """
    condition = f" AND {among}" if among else ""
    score, order = ("1.0", "rowid DESC") if terms.is_single else ("-bm25(passage, 2.0, 1.0)", "score DESC, rowid DESC")
    sql = (
        f"SELECT rowid, {score} AS score FROM passage "  # noqa: S608
        f"WHERE passage MATCH ?{condition} ORDER BY {order} LIMIT {MOST_CANDIDATES}"
    )
    rows: list[tuple[int, float]] = []
    for match in _build_matches(connection, terms, with_context=with_context):
        if rows := connection.execute(sql, (match,)).fetchall():
            break
    if not rows:
        rows = _find_parts_of_words(connection, terms.texts, condition)
    best = max((score for _, score in rows), default=0.0) or 1.0
    return [RankedPassage(number, score / best) for number, score in rows]


def count_passages(connection: sqlite3.Connection, terms: QueryTerms, among: str = "", *, most: int) -> int:
    """Return how many passages contain a term, at most ``most``.

    :raises sqlite3.Error: if the index cannot be read
    """
    column = "{text} : " if terms.is_single else ""
    quoted = [f'{column}"{term}"' for term in (*terms.words, *terms.phrases)]
    condition = f" AND {among}" if among else ""
    sql = f"SELECT count(*) FROM (SELECT 1 FROM passage WHERE passage MATCH ?{condition} LIMIT ?)"  # noqa: S608
    return int(connection.execute(sql, (" OR ".join(quoted), most)).fetchone()[0]) if quoted else 0


def rank_passages(
    found: Sequence[RankedPassage],
    terms: QueryTerms,
    meaning: Mapping[int, float] | None = None,
    *,
    neighbours: bool = True,
) -> list[RankedPassage]:
    """Return the passages of :func:`find_passages` in their final order.

    :param terms: a single term has no use for the passages around a hit
    :param meaning: how close the meaning of passages is to that of the query, by number; None if unknown
    :param neighbours: whether passages with near numbers belong together
    """
    if terms.is_single:
        return list(found)
    scores = {one.number: one.score for one in found}
    if meaning:
        low, high = min(meaning.values()), max(meaning.values())
        for number, value in meaning.items():
            scores[number] = scores.get(number, 0.0) + _MEANING_WEIGHT * (value - low) / ((high - low) or 1.0)
    best = sorted(scores, key=lambda number: -scores[number])[:_NEIGHBOUR_HITS]
    lifts = _sum_neighbours(scores, best) if neighbours else {}
    most = max(lifts.values(), default=0.0) or 1.0
    lifted = [
        RankedPassage(number, score + _NEIGHBOUR_WEIGHT * lifts.get(number, 0.0) / most)
        for number, score in scores.items()
    ]
    return sorted(lifted, key=lambda one: (-one.score, -one.number))


def _sum_neighbours(scores: Mapping[int, float], best: Collection[int]) -> dict[int, float]:
    """Return for each passage the scores of the best ones near it."""
    lifts: dict[int, float] = {}
    for number in best:
        for near in range(number - _NEIGHBOUR_DISTANCE, number + _NEIGHBOUR_DISTANCE + 1):
            if near != number and near in scores:
                lifts[near] = lifts.get(near, 0.0) + scores[number]
    return lifts


def _build_matches(connection: sqlite3.Connection, terms: QueryTerms, *, with_context: bool) -> list[str]:
    """Return the match expressions to try, the best first.

    Frequent words are left out if there are rarer ones. If all are frequent, passages with all of them come first.
    """
    sql = "SELECT count(*) FROM (SELECT 1 FROM passage WHERE passage MATCH ? LIMIT ?)"
    column = "{text} : " if terms.is_single and not with_context else ""
    quoted = [f'{column}"{term}"' for term in (*terms.phrases, *terms.words)]
    counted = sorted((connection.execute(sql, (one, _FREQUENT + 1)).fetchone()[0], one) for one in quoted)
    chosen: list[str] = []
    total = 0
    for count, one in counted:
        if count > _FREQUENT or (chosen and total + count > _MOST_SCORED):
            break
        if count:
            chosen.append(one)
            total += count
    if chosen:
        return [" OR ".join(chosen)]
    frequent = [one for count, one in counted if count]
    return [" AND ".join(frequent), frequent[0]] if frequent else []


def _find_parts_of_words(
    connection: sqlite3.Connection, texts: Sequence[str], condition: str
) -> list[tuple[int, float]]:
    """Return the latest passages that contain a term within a word, such as a part of an identifier."""
    if not texts:
        return []
    sql = (
        f"SELECT rowid, {' + '.join(['(instr(lower(text), ?) > 0)'] * len(texts))} AS score FROM passage "  # noqa: S608
        f"WHERE rowid > (SELECT coalesce(max(rowid), 0) FROM passage) - {_SUBSTRING_ROWS} AND score > 0{condition} "
        f"ORDER BY score DESC, rowid DESC LIMIT {MOST_CANDIDATES}"
    )
    return [(number, float(score)) for number, score in connection.execute(sql, texts)]
