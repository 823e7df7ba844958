"""An index of the text files below a root, for searches by the meaning-bearing words of a task.

The index is never stale: each search passes the current files with their state, and a file whose state has changed is read
again. It only grows in memory up to a limit, and is lost with its process.
"""

from __future__ import annotations

import ast
import math
import os
import re
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from handrail.contract.services.file_services import OutlineEntry
from handrail.contract.text.lazy_patterns import compile_on_first_use

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
_TERM = compile_on_first_use(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_A-Za-z]+|\d{2,}")
_COUNT_BITS = 12
_MAX_COUNT = (1 << _COUNT_BITS) - 1
_PATH_WEIGHT, _SYMBOL_WEIGHT, _DOCUMENTATION_WEIGHT = 16, 3, 2
_K1, _B = 2.0, 0.6
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
        """Return the state that a ``stat`` reports."""
        return IndexedFileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


class _IndexedText:
    __slots__ = ("length", "lines", "number", "state")

    def __init__(self, number: int, state: IndexedFileState, lines: int | None, length: int) -> None:
        self.number = number
        self.state = state
        self.lines = lines
        self.length = length


class RepositoryIndex:
    """The words of files, by absolute path. Safe in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._documents: dict[str, _IndexedText] = {}
        self._lengths = array("L")
        """The length of each document in weighted words, by number; 0 for a document that is replaced."""
        self._postings: dict[str, array[int]] = {}
        self._size = 0
        self._stems: dict[str, str] = {}

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
        found = self._documents.get(absolute)
        return None if found is None else found.lines

    def rank(self, files: Sequence[str], query: str, limit: int) -> list[tuple[str, float]]:
        """Return the absolute paths of the files that match best, with their scores, the best first.

        :param files: the absolute paths to choose from
        """
        with self._lock:
            numbers = {found.number: one for one in files if (found := self._documents.get(one)) is not None}
            if not numbers:
                return []
            count = len(numbers)
            average = sum(self._lengths[number] for number in numbers) / count or 1.0
            wanted = Counter(self._terms_of(query, without_stop_words=True))
            by_weight = sorted(
                ((self._inverse_frequency(term, count), term, times) for term, times in wanted.items()), reverse=True
            )
            scores: dict[int, float] = {}
            for weight, term, times in by_weight[:_MAX_QUERY_TERMS]:
                factor = weight * (1 + math.log(times))
                for packed in self._postings.get(term, ()):
                    number = packed >> _COUNT_BITS
                    if number in numbers:
                        frequency = packed & _MAX_COUNT
                        norm = _K1 * (1 - _B + _B * self._lengths[number] / average)
                        scores[number] = scores.get(number, 0.0) + factor * frequency * (_K1 + 1) / (frequency + norm)
            best = sorted(scores.items(), key=lambda item: (-item[1], numbers[item[0]]))[:limit]
            return [(numbers[number], score) for number, score in best]

    def _inverse_frequency(self, term: str, count: int) -> float:
        found = min(len(self._postings.get(term, ())), count)
        return math.log(1 + (count - found + 0.5) / (found + 0.5)) if found else 0.0

    def _replace(self, absolute: str, relative: str, state: IndexedFileState, content: bytes | None) -> None:
        """Index a file again under a new number. The old number matches nothing any more."""
        if (old := self._documents.get(absolute)) is not None:
            self._lengths[old.number] = 0
        text = None if content is None else decode_text(content)
        counts: Counter[str] = Counter()
        for term in self._terms_of(relative):
            counts[term] += _PATH_WEIGHT
        if text is not None:
            for term in self._terms_of(text):
                counts[term] += 1
            for term in self._terms_of("\n".join(entry.text for entry in _match_definitions(relative, text))):
                counts[term] += _SYMBOL_WEIGHT
            for term in self._terms_of(_find_documentation(text)):
                counts[term] += _DOCUMENTATION_WEIGHT
        if time.time_ns() - state.changed_ns < _SETTLED_NS:
            state = state._replace(changed_ns=-1)
        number = len(self._lengths)
        self._lengths.append(max(1, sum(counts.values())))
        lines = None if text is None else text.count("\n") + (not text.endswith("\n") and text != "")
        self._documents[absolute] = _IndexedText(number, state, lines, self._lengths[number])
        for term, times in counts.items():
            self._postings.setdefault(term, array("Q")).append(number << _COUNT_BITS | min(times, _MAX_COUNT))
        self._size += len(counts)

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
        self._size = 0
        for term, packed in list(self._postings.items()):
            kept = array(
                "Q",
                (
                    moved[one >> _COUNT_BITS] << _COUNT_BITS | one & _MAX_COUNT
                    for one in packed
                    if one >> _COUNT_BITS in moved
                ),
            )
            if kept:
                self._postings[term] = kept
            else:
                del self._postings[term]
            self._size += len(kept)
        self._lengths = lengths

    def _terms_of(self, text: str, *, without_stop_words: bool = False) -> Iterable[str]:
        stems = self._stems
        if len(stems) > 500_000:
            stems.clear()
        for word in _TERM.findall(text):
            stem = stems.get(word)
            if stem is None:
                stem = stems[word] = _stem(word.lower())
            if len(stem) > 1 and not (without_stop_words and word.lower() in _STOP_WORDS):
                yield stem


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
    pattern = _COMPILED.get(suffix)
    if pattern is None:
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


_COMMENT = compile_on_first_use(
    r'\A(?:#![^\n]*\n)?\s*(?:[rRuU]?"""(.*?)"""|\'\'\'(.*?)\'\'\'|/\*(.*?)\*/|((?:(?:#|//|--|;)[^\n]*\n)+))', re.DOTALL
)


def _find_documentation(text: str) -> str:
    """Return the text with which a file describes itself: its first string or comment, or its first lines."""
    match = _COMMENT.match(text[:8_000])
    if match is None:
        return ""
    return next((group for group in match.groups() if group), "")[:2_000]
