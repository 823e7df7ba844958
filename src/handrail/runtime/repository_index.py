"""An index of the text files below a root, for searches by the meaning-bearing words of a task.

The index is never stale: each search passes the current files with their state, and a file whose state has changed is read
again. It only grows in memory up to a limit, and is lost with its process.
"""

from __future__ import annotations

import ast
import heapq
import math
import os
import re
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from handrail.contract.services.file_services import OutlineEntry
from handrail.contract.text.lazy_patterns import compile_regex_lazily

MAX_TEXT_BYTES = 256 * 1024
"""The bytes of a file that are indexed."""
MAX_POSTINGS = 12_000_000
"""The pairs of word and file that are kept, at 8 bytes each. Further files are found by their paths only."""
_MOST_ABSENT = 20_000
"""The files beyond those of a search that are kept in the index."""
_SETTLED_NS = 100_000_000
"""A file that changed so recently may change again with the same times, so it is read again."""
_MAX_QUERY_TERMS = 48
_MAX_OUTLINE = 60
_TERM = compile_regex_lazily(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_A-Za-z]+|\d{2,}")
_NAME = compile_regex_lazily(r"[A-Za-z]\w*(?:-\w+)*")
_TEST_AFFIX = compile_regex_lazily(
    r"^(?:tests?[_-](?=.)|Tests?(?=[A-Z]))|(?:[._-](?:tests?|spec)|(?<=[a-z])(?:Tests?|Spec))$"
)
_FOLDER_NAMES = frozenset(("__init__", "__main__", "index", "main", "mod"))
"""The names of files that have the subject of their folder."""
_COUNT_BITS = 12
_MAX_COUNT = (1 << _COUNT_BITS) - 1
_TEXT_WEIGHT, _SYMBOL_WEIGHT, _DOCUMENTATION_WEIGHT = 2, 4, 3
"""The counts that a word has in the text, in a definition in addition, and in the documentation in addition."""
_PATH_WEIGHT, _FILE_NAME_WEIGHT = 8, 6
_K1, _B, _RARITY = 4.0, 0.8, 0.8
_SUBJECT_WEIGHT = 1.5
"""The weight of a word in the first line of a query. Further lines weigh 1."""
_NAME_WEIGHT, _NAME_K1 = 1.5, 1.2
_NEIGHBOUR_SOURCES = 40
"""The best files whose neighbours gain."""
_NEIGHBOUR_SHARE, _PAIR_SHARE = 0.4, 0.2
_MOST_IN_PAIR = 4
_LONGEST_NAME, _SHORTEST_MENTION = 80, 5
_MOST_SAME_NAMES = 3
_HISTORY_SHARE = 0.7
"""The part of the best score that the files of the most similar commits gain."""
_SIMILAR_COMMITS = 60
_MOST_CHANGED = 30
"""A commit that changed more files says little about each."""
_MOST_MESSAGE_TERMS = 400
_MOST_HISTORIES = 8
_MOST_MENTIONING = 0.1
"""The part of the files above which a name mentioned in them says nothing."""
_STOP_WORDS = frozenset(
    [
        "a",
        "about",
        "add",
        "after",
        "all",
        "also",
        "an",
        "and",
        "any",
        "are",
        "as",
        "at",
        "be",
        "because",
        "been",
        "before",
        "but",
        "by",
        "can",
        "change",
        "do",
        "does",
        "each",
        "every",
        "for",
        "from",
        "get",
        "has",
        "have",
        "how",
        "if",
        "in",
        "instead",
        "into",
        "is",
        "it",
        "its",
        "make",
        "more",
        "new",
        "no",
        "not",
        "now",
        "of",
        "on",
        "one",
        "only",
        "or",
        "other",
        "out",
        "over",
        "set",
        "should",
        "so",
        "some",
        "such",
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
        "two",
        "under",
        "up",
        "use",
        "used",
        "using",
        "was",
        "what",
        "when",
        "where",
        "which",
        "while",
        "who",
        "will",
        "with",
        "without",
        "you",
    ]
)


class IndexedFileState(NamedTuple):
    """What changes when a file changes. The time of change of its inode cannot be set back."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @staticmethod
    def of(found: os.stat_result) -> IndexedFileState:
        return IndexedFileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _IndexedText:
    """A file in the index.

    :param subject: the key of the file's name without the signs of a test
    :param mentioned: the keys of the compound names in the text
    """

    __slots__ = ("length", "lines", "mentioned", "number", "state", "subject")

    def __init__(
        self,
        number: int,
        state: IndexedFileState,
        lines: int | None,
        length: int,
        subject: str,
        mentioned: tuple[str, ...],
    ) -> None:
        self.number = number
        self.state = state
        self.lines = lines
        self.length = length
        self.subject = subject
        self.mentioned = mentioned


class CommitHistory:
    """The messages of earlier commits, each with the files that it changed. Immutable.

    :param commits: the message of each, and the paths of its files
    :param terms_of: returns the words of a text that bear meaning
    """

    def __init__(self, commits: Iterable[tuple[str, Sequence[str]]], terms_of: Callable[[str], Iterable[str]]) -> None:
        self._files: list[tuple[str, ...]] = []
        self._lengths: list[int] = []
        self._postings: dict[str, list[tuple[int, int]]] = {}
        """The commits whose messages have a word, each with its count."""
        for message, files in commits:
            if not 0 < len(files) <= _MOST_CHANGED:
                continue
            counts = Counter(islice(terms_of(message), _MOST_MESSAGE_TERMS))
            for term, count in counts.items():
                self._postings.setdefault(term, []).append((len(self._files), count))
            self._files.append(tuple(map(sys.intern, files)))
            self._lengths.append(counts.total())

    def score_files(self, wanted: Mapping[str, float]) -> dict[str, float]:
        """Return the files of the commits with the most similar messages, each with a score.

        A file gains from each of these commits, more from one that changed few files.

        :param wanted: the weight of each word of the task
        """
        count = len(self._files)
        average = sum(self._lengths) / count if count else 1.0
        similar: dict[int, float] = {}
        for term, weight in wanted.items():
            found = self._postings.get(term, ())
            rarity = math.log(1 + (count - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                norm = 1.2 * (0.25 + 0.75 * self._lengths[number] / average)
                similar[number] = similar.get(number, 0.0) + weight * rarity * times * 2.2 / (times + norm)
        scores: dict[str, float] = {}
        for number, similarity in heapq.nlargest(_SIMILAR_COMMITS, similar.items(), key=lambda item: item[1]):
            files = self._files[number]
            for path in files:
                scores[path] = scores.get(path, 0.0) + similarity**2 / math.sqrt(len(files))
        return scores


class RepositoryWordIndex:
    """The words of files, by absolute path, and the history of their folders. Safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._documents: dict[str, _IndexedText] = {}
        self._lengths = array("L")
        """The length of each text in weighted words, by number; 0 for a document that is replaced."""
        self._postings: dict[str, array[int]] = {}
        """The documents of each word in texts, and of each compound name under its key."""
        self._path_postings: dict[str, array[int]] = {}
        self._size = 0
        self._stems: dict[str, str] = {}
        self._histories: dict[str, tuple[object, CommitHistory]] = {}

    def find_history(self, folder: str, state: object) -> CommitHistory | None:
        """Return the history of a folder; None if it has not been indexed in this state.

        :param state: what changes with each new commit
        """
        known, history = self._histories.get(folder, (None, None))
        return history if known == state else None

    def index_history(self, folder: str, state: object, commits: Iterable[tuple[str, Sequence[str]]]) -> CommitHistory:
        """Index the history of a folder in place of the one that was indexed before.

        :param commits: the message of each, and the paths of its files below the folder
        """
        top = folder.rstrip("/")
        absolute = ((message, [f"{top}/{path}" for path in paths]) for message, paths in commits)
        with self._lock:
            history = CommitHistory(absolute, lambda text: self._terms_of(text, without_stop_words=True))
            if len(self._histories) >= _MOST_HISTORIES:
                self._histories.clear()
            self._histories[folder] = state, history
        return history

    def update(self, files: Sequence[tuple[str, str, IndexedFileState]], read: Callable[[int], bytes | None]) -> bool:
        """Index the files that are new or have changed, and return whether the index is full.

        :param files: the absolute path, the path below the root and the state of each
        :param read: returns the first bytes of the file at an index of ``files``; None if it cannot be read
        """
        with self._lock:
            if len(self._documents) > 2 * len(files) + _MOST_ABSENT:
                current = {absolute for absolute, _, _ in files}
                for absolute in [one for one in self._documents if one not in current]:
                    self._lengths[self._documents.pop(absolute).number] = 0
            for index, (absolute, relative, state) in enumerate(files):
                known = self._documents.get(absolute)
                if known is None or known.state != state:
                    self._replace(absolute, relative, state, read(index) if self._size < MAX_POSTINGS else None)
            self._compact()
            return self._size >= MAX_POSTINGS

    def count_lines(self, absolute: str) -> int | None:
        """Return the lines of an indexed file; None if it is not text."""
        return None if (found := self._documents.get(absolute)) is None else found.lines

    def rank(
        self, files: Sequence[str], query: str, limit: int, history: CommitHistory | None = None
    ) -> list[tuple[str, float]]:
        """Return the absolute paths of the files that match best, with their scores, the best first.

        A file also gains from good files that mention it, that it mentions, or that test it, and from commits with similar
        messages that changed it.

        :param files: the absolute paths to choose from
        """
        with self._lock:
            documents = {found.number: (one, found) for one in files if (found := self._documents.get(one)) is not None}
            if not documents:
                return []
            wanted = self._weigh_terms(query)
            scores = self._score_words(documents, wanted)
            self._score_compound_names(scores, documents, query)
            self._add_neighbours(scores, documents)
            if history is not None:
                self._add_history(scores, documents, history.score_files(wanted))
            best = sorted(scores.items(), key=lambda item: (-item[1], documents[item[0]][0]))[:limit]
            return [(documents[number][0], score) for number, score in best]

    def _weigh_terms(self, query: str) -> dict[str, float]:
        """Return the words of a query with their weights."""
        subject, _, rest = query.strip().partition("\n")
        wanted: dict[str, float] = {}
        for text, weight in ((subject, _SUBJECT_WEIGHT), (rest, 1.0)):
            for term, times in Counter(self._terms_of(text, without_stop_words=True)).items():
                wanted[term] = wanted.get(term, 0.0) + weight * (1 + math.log(times))
        return wanted

    def _score_words(
        self, documents: Mapping[int, tuple[str, _IndexedText]], wanted: Mapping[str, float]
    ) -> dict[int, float]:
        """Return the scores of the documents by the words of a query in their texts and paths (BM25F)."""
        count = len(documents)
        average = sum(found.length for _, found in documents.values()) / count or 1.0
        by_weight = sorted(
            ((weight * self._inverse_frequency(term, count) ** _RARITY, term) for term, weight in wanted.items()),
            reverse=True,
        )
        scores: dict[int, float] = {}
        for weight, term in by_weight[:_MAX_QUERY_TERMS]:
            frequencies: dict[int, float] = {}
            for packed in self._postings.get(term, ()):
                number = packed >> _COUNT_BITS
                if number in documents:
                    norm = _TEXT_WEIGHT * (1 - _B + _B * self._lengths[number] / average)
                    frequencies[number] = (packed & _MAX_COUNT) / norm
            for packed in self._path_postings.get(term, ()):
                number = packed >> _COUNT_BITS
                if number in documents:
                    frequencies[number] = frequencies.get(number, 0.0) + (packed & _MAX_COUNT)
            for number, frequency in frequencies.items():
                scores[number] = scores.get(number, 0.0) + weight * frequency * (_K1 + 1) / (frequency + _K1)
        return scores

    def _score_compound_names(
        self, scores: dict[int, float], documents: Mapping[int, tuple[str, _IndexedText]], query: str
    ) -> None:
        """Add to the scores what the compound names in a query are worth, such as ``parse_line``."""
        for key in dict.fromkeys(_list_name_keys(query)):
            weight = _NAME_WEIGHT * self._inverse_frequency(key, len(documents))
            for packed in self._postings.get(key, ()):
                number, times = packed >> _COUNT_BITS, packed & _MAX_COUNT
                if number in documents:
                    gain = weight * times * (_NAME_K1 + 1) / (times + _NAME_K1)
                    scores[number] = scores.get(number, 0.0) + gain

    def _add_neighbours(self, scores: dict[int, float], documents: Mapping[int, tuple[str, _IndexedText]]) -> None:
        """Add to each score a share of the best score of a file that mentions it, that it mentions, or that tests it."""
        named: dict[str, list[int]] = {}
        for number, (_, found) in documents.items():
            named.setdefault(found.subject, []).append(number)
        most_mentioning = max(2.0, _MOST_MENTIONING * len(documents))
        gains: dict[int, float] = {}
        best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:_NEIGHBOUR_SOURCES]
        for number, score in best:
            _, found = documents[number]
            if len(named[found.subject]) <= _MOST_SAME_NAMES:
                _raise_gains(gains, self._list_mentioning(found.subject, documents), number, score)
            distinctive = (
                same
                for key in found.mentioned
                if (same := named.get(key)) is not None
                and len(same) <= _MOST_SAME_NAMES
                and len(self._postings[key]) <= most_mentioning
            )
            _raise_gains(gains, list(chain.from_iterable(distinctive)), number, score)
        for number, gain in gains.items():
            scores[number] = scores.get(number, 0.0) + _NEIGHBOUR_SHARE * gain
        best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:_NEIGHBOUR_SOURCES]
        for number, score in reversed(best):
            pair = named[documents[number][1].subject]
            if len(pair) <= _MOST_IN_PAIR:
                top = max(scores.get(other, 0.0) for other in pair)
                for other in pair:
                    if scores.get(other, 0.0) < score == top:
                        scores[other] = scores.get(other, 0.0) + _PAIR_SHARE * score

    def _add_history(
        self,
        scores: dict[int, float],
        documents: Mapping[int, tuple[str, _IndexedText]],
        found: Mapping[str, float],
    ) -> None:
        """Add to the scores what earlier commits say about the files. The best file gains a share of the best score."""
        gains = {
            document.number: gain
            for path, gain in found.items()
            if (document := self._documents.get(path)) is not None and document.number in documents
        }
        most, best = max(gains.values(), default=0.0), max(scores.values(), default=1.0)
        for number, gain in gains.items():
            scores[number] = scores.get(number, 0.0) + _HISTORY_SHARE * best * math.sqrt(gain / most)

    def _list_mentioning(self, subject: str, documents: Mapping[int, tuple[str, _IndexedText]]) -> list[int]:
        """Return the documents whose texts mention the name of a file, if they are few."""
        key = subject
        if len(subject) < _SHORTEST_MENTION:
            return []
        if key not in self._postings and len(terms := list(self._terms_of(subject))) == 1:
            key = terms[0]
        found = [packed >> _COUNT_BITS for packed in self._postings.get(key, ())]
        found = [number for number in found if number in documents]
        return found if len(found) <= max(2.0, _MOST_MENTIONING * len(documents)) else []

    def _inverse_frequency(self, term: str, count: int) -> float:
        found = min(max(len(self._postings.get(term, ())), len(self._path_postings.get(term, ()))), count)
        return math.log(1 + (count - found + 0.5) / (found + 0.5)) if found else 0.0

    def _replace(self, absolute: str, relative: str, state: IndexedFileState, content: bytes | None) -> None:
        """Index a file again under a new number. The old number matches nothing any more."""
        if (old := self._documents.get(absolute)) is not None:
            self._lengths[old.number] = 0
        text = None if content is None else decode_text(content)
        path_counts = Counter(dict.fromkeys(self._terms_of(relative), _PATH_WEIGHT))
        subject = _find_subject(relative)
        for term in set(self._terms_of(subject)):
            path_counts[term] += _FILE_NAME_WEIGHT
        counts: Counter[str] = Counter()
        names: Counter[str] = Counter(_list_name_keys(relative))
        length = 0
        if text is not None:
            for term in self._terms_of(text):
                counts[term] += _TEXT_WEIGHT
                length += 1
            for term in self._terms_of("\n".join(entry.text for entry in _match_definitions(relative, text))):
                counts[term] += _SYMBOL_WEIGHT
            for term in self._terms_of(_find_documentation(text)):
                counts[term] += _DOCUMENTATION_WEIGHT
            names.update(_list_name_keys(text))
        if time.time_ns() - state.changed_ns < _SETTLED_NS:
            state = state._replace(changed_ns=-1)
        number = len(self._lengths)
        self._lengths.append(max(1, length))
        lines = None if text is None else text.count("\n") + (not text.endswith("\n") and text != "")
        self._documents[absolute] = _IndexedText(
            number, state, lines, self._lengths[number], sys.intern(_name_key(subject)), tuple(map(sys.intern, names))
        )
        for postings, found in ((self._postings, counts), (self._postings, names), (self._path_postings, path_counts)):
            for term, times in found.items():
                postings.setdefault(term, array("Q")).append(number << _COUNT_BITS | min(times, _MAX_COUNT))
        self._size += len(counts) + 2 * len(names) + len(path_counts)

    def _compact(self) -> None:
        """Remove the documents that were replaced, if they are many."""
        dead = len(self._lengths) - len(self._documents)
        if dead < 1_000 or dead * 3 < len(self._lengths):
            return
        moved: dict[int, int] = {}
        lengths = array("L")
        for document in self._documents.values():
            moved[document.number] = len(lengths)
            lengths.append(self._lengths[document.number])
            document.number = moved[document.number]
        self._size = sum(len(document.mentioned) for document in self._documents.values())
        for postings in (self._postings, self._path_postings):
            for term, packed in list(postings.items()):
                kept = array(
                    "Q",
                    (
                        moved[one >> _COUNT_BITS] << _COUNT_BITS | one & _MAX_COUNT
                        for one in packed
                        if one >> _COUNT_BITS in moved
                    ),
                )
                if kept:
                    postings[term] = kept
                else:
                    del postings[term]
                self._size += len(kept)
        self._lengths = lengths

    def _terms_of(self, text: str, *, without_stop_words: bool = False) -> Iterable[str]:
        stems = self._stems
        if len(stems) > 500_000:
            stems.clear()
        for word in _TERM.findall(text):
            if (stem := stems.get(word)) is None:
                stem = stems[word] = _stem(word.lower())
            if len(stem) > 1 and not (without_stop_words and word.lower() in _STOP_WORDS):
                yield stem


def _raise_gains(gains: dict[int, float], neighbours: Sequence[int], source: int, score: float) -> None:
    """Raise the gain of each neighbour to its part of the score. Many neighbours gain less each."""
    part = score / math.sqrt(max(1, len(neighbours)))
    for number in neighbours:
        if number != source and gains.get(number, 0.0) < part:
            gains[number] = part


def _find_subject(relative: str) -> str:
    """Return the name of a file without its ending and the signs of a test; of a package's main file, its folder's name."""
    folder, _, name = relative.rpartition("/")
    stem = _TEST_AFFIX.sub("", name.rpartition(".")[0] or name).lstrip(".").partition(".")[0]
    return folder.rpartition("/")[2] if stem in _FOLDER_NAMES and folder else stem or name


def _name_key(name: str) -> str:
    """Return the key of a name, which is the same in each style of writing it."""
    return "=" + name.replace("_", "").replace("-", "").lower()


def _list_name_keys(text: str) -> Iterator[str]:
    """Yield the key of each name of several words in a text, such as ``parse_line``, ``parseLine`` and ``parse-line``."""
    for found in _NAME.findall(text):
        name = found.rstrip("_-")
        has_one_word = name.islower() or name.isupper() or name.istitle()
        if len(name) <= _LONGEST_NAME and ("_" in name or "-" in name or not has_one_word):
            yield _name_key(name)


def _stem(word: str) -> str:
    """Return a word without common English endings."""
    for ending, rest in (("ies", "y"), ("sses", "ss"), ("ing", ""), ("ed", ""), ("es", ""), ("ly", ""), ("s", "")):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            stem = word[: -len(ending)] + rest
            if ending in ("ing", "ed") and len(stem) > 3 and stem[-1] == stem[-2] and stem[-1] not in "lsz":
                stem = stem[:-1]
            return stem.removesuffix("e")
    return word.removesuffix("e") if len(word) > 3 else word


def decode_text(content: bytes) -> str | None:
    """Return the text of a file; None if it is binary."""
    for mark, name in ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if content.startswith(mark):
            return content[2:].decode(name, "replace")
    if b"\0" in content[:8192]:
        return None
    return content.decode("utf-8", "replace").removeprefix("\ufeff")


# The definitions of a file. A language without a pattern, or a file that cannot be parsed, has none.

_C_LIKE = r"^(?:[A-Za-z_][\w:<>,*&\s]*?[\s*&])?([A-Za-z_]\w*)\s*\([^;{}]*\)\s*(?:const\s*)?\{"
_JAVASCRIPT = (
    r"^\s*(?:export\s+)?(?:default\s+)?(?:declare\s+)?(?:abstract\s+)?(?:async\s+)?"
    r"(?:class|function\*?|interface|type|enum|namespace)\s+[A-Za-z_$][\w$]*|"
    r"^\s*(?:export\s+)?(?:const|let|var)\s+[A-Za-z_$][\w$]*\s*(?::[^=]+)?=\s*(?:async\s*)?(?:\(|function|[A-Za-z_$][\w$]*\s*=>)"
)
_JAVA = (
    r"^\s*(?:(?:public|private|protected|internal|static|final|abstract|sealed|override|open|data|partial|async|virtual)\s+)*"
    r"(?:class|interface|enum|record|struct|object|trait|fun|def)\s+\w+|"
    r"^\s*(?:(?:public|private|protected|internal|static|final|abstract|override|async|virtual)\s+)+[\w<>\[\],.?\s]+\s\w+\s*\("
)
_PATTERNS: dict[str, str] = {
    **dict.fromkeys(("py", "pyi"), r"^\s*(?:async\s+)?(?:def|class)\s+\w+"),
    **dict.fromkeys(("js", "jsx", "mjs", "cjs", "ts", "tsx", "mts", "cts", "vue", "svelte"), _JAVASCRIPT),
    "go": r"^(?:func\s+(?:\([^)]*\)\s*)?\w+|type\s+\w+)",
    "rs": r"^\s*(?:pub(?:\([^)]*\))?\s+)?(?:async\s+|unsafe\s+|const\s+|extern\s+\"[^\"]*\"\s+)*"
    r"(?:fn|struct|enum|trait|mod|type|impl|macro_rules!)\b[^{(;=]*",
    **dict.fromkeys(("java", "kt", "kts", "cs", "scala", "groovy", "swift", "dart"), _JAVA),
    **dict.fromkeys(
        ("c", "h", "cc", "cpp", "cxx", "hpp", "hh", "m", "mm"),
        _C_LIKE + r"|^(?:class|struct|enum|namespace|typedef)\b.*\w",
    ),
    "rb": r"^\s*(?:def|class|module)\s+[\w.:?!]+",
    "php": r"^\s*(?:(?:public|private|protected|static|abstract|final)\s+)*(?:function|class|interface|trait|enum)\s+\w+",
    **dict.fromkeys(("sh", "bash", "zsh"), r"^\s*(?:function\s+[\w-]+|[\w-]+\s*\(\)\s*\{?)"),
    **dict.fromkeys(("lua", "jl"), r"^\s*(?:local\s+)?function\s+[\w.:!]+"),
    **dict.fromkeys(("ex", "exs"), r"^\s*(?:defmodule|defp?|defmacro)\s+[\w.?!]+"),
    **dict.fromkeys(("md", "rst"), r"^#{1,3}\s+\S.*"),
    "sql": r"(?i)^\s*create\s+(?:or\s+replace\s+)?(?:table|view|function|procedure|index|trigger)\s+[\w.\"]+",
    "proto": r"^\s*(?:message|service|enum|rpc)\s+\w+",
}
_COMPILED: dict[str, re.Pattern[str]] = {}


def outline(path: str, text: str) -> list[OutlineEntry]:
    """Return the definitions of a file in their order."""
    if path.endswith((".py", ".pyi")):
        try:
            return list(_outline_of_python(ast.parse(text).body, ""))[:_MAX_OUTLINE]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            pass  # names by a pattern are better than none
    return _match_definitions(path, text)


def _match_definitions(path: str, text: str) -> list[OutlineEntry]:
    """Return the definitions that the pattern of the language finds, which parses nothing."""
    suffix = path.rpartition(".")[2].lower() if "." in path.rpartition("/")[2] else ""
    if (pattern := _COMPILED.get(suffix)) is None:
        if suffix not in _PATTERNS:
            return []
        pattern = _COMPILED[suffix] = re.compile(_PATTERNS[suffix])
    found: list[OutlineEntry] = []
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) <= 400 and (match := pattern.match(line)) is not None:
            found.append(OutlineEntry(number, " ".join(match.group().rstrip(" {(=").split())[:120]))
            if len(found) >= _MAX_OUTLINE:
                break
    return found


def _outline_of_python(body: Sequence[ast.stmt], prefix: str) -> Iterable[OutlineEntry]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield OutlineEntry(node.lineno, f"{prefix}class {node.name}")
            yield from _outline_of_python(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [one.arg for one in (*node.args.posonlyargs, *node.args.args) if one.arg not in ("self", "cls")]
            yield OutlineEntry(node.lineno, f"{prefix}{node.name}({', '.join(arguments)})"[:120])


_COMMENT = compile_regex_lazily(
    r'\A(?:#![^\n]*\n)?\s*(?:[rRuU]?"""(.*?)"""|\'\'\'(.*?)\'\'\'|/\*(.*?)\*/|((?:(?:#|//|--|;)[^\n]*\n)+))', re.DOTALL
)


def _find_documentation(text: str) -> str:
    """Return the text with which a file describes itself: its first string or comment, or its first lines."""
    if (match := _COMMENT.match(text[:8_000])) is None:
        return ""
    return next((group for group in match.groups() if group), "")[:2_000]


# The history of a repository, as git reports it: a mark, the message, another mark, and the changed files of each commit.
# A message is untrusted. One that imitates the marks can only change the order of the files.

_MOST_COMMITS = 2_000
HISTORY_ENVIRONMENT: Mapping[str, str] = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_PAGER": "cat",
    "LC_ALL": "C.UTF-8",
}
HISTORY_ARGUMENTS: Sequence[str] = (
    *("-c", "safe.directory=*", "-c", "safe.bareRepository=explicit", "-c", "core.fsmonitor=false"),
    *("-c", "core.hooksPath=/dev/null", "-c", "i18n.logOutputEncoding=UTF-8", "--no-pager", "log", "-z", "--no-merges"),
    *("--format=%x01%s%n%b%x02", "--name-only", "--no-renames", "--relative", "--no-color", "--no-ext-diff"),
    *("--no-textconv", "--no-show-signature", "--no-notes", "--ignore-submodules=all", f"--max-count={_MOST_COMMITS}"),
    *("--", "."),
)
"""The arguments with which git lists the commits of a folder. Nothing that the repository configures is run."""


def parse_history(output: bytes) -> Iterator[tuple[str, list[str]]]:
    """Yield the message of each commit that git lists, with the paths that it changed."""
    message: str | None = None
    paths: list[str] = []
    for raw in output.split(b"\0"):
        word = raw.lstrip(b"\n")
        if word.startswith(b"\x01") and word.endswith(b"\x02"):
            if message is not None:
                yield message, paths
            message, paths = word[1:-1].decode("utf-8", "replace"), []
        elif word:
            paths.append(os.fsdecode(word))
    if message is not None:
        yield message, paths
