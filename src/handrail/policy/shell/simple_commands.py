"""The simple commands of a shell text: their words with marks for what only the shell knows, and their redirections."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily

ANY_TEXT, GLOB, NO_OPTION, SPLIT = "\x01\x02\x03\x04"
"""The marks in a word of an argv for a part that only the shell knows.

- ``ANY_TEXT``: any text, within one word (``"$x"``)
- ``GLOB``: any text, in any number of words that begin alike (``src/*.py``)
- ``NO_OPTION``: text within one word that does not begin with ``-`` (``$?``)
- ``SPLIT``: any text, in any number of words (``$x``)

No text that is understood has such a character, so a marked word equals no literal word.
"""
_MARKS = compile_regex_lazily(r"[\x01-\x04]")
SPLIT_OR_EXPANDED = compile_regex_lazily(r"[\s*?\[\]\\]")
"""The characters of a variable's value that a shell splits or expands if the variable is not quoted."""
_QUOTES = compile_regex_lazily(r"[\"'\\]")
_RUNS_TEXT = compile_regex_lazily(r"\b(?:source|eval)\s|(?:^|[;&|({\n]|\b(?:do|then|else)\b)[^\S\n]*\.\s")
_NAME = compile_regex_lazily(r"(?<![\w$.{/-])[A-Za-z_]\w*")
_MAX_FOLDERS = 4
_SHOWN_MARKS = str.maketrans({ANY_TEXT: "$…", GLOB: "*", NO_OPTION: "$…", SPLIT: "$…"})


def is_marked(word: str) -> bool:
    """Return whether a part of the word is unknown."""
    return _MARKS.search(word) is not None


def has_marks(argv: Sequence[str]) -> bool:
    """Return whether a part of one of these words is unknown."""
    return _MARKS.search("".join(argv)) is not None


def is_open(word: str) -> bool:
    """Return whether the shell may make an option of this word, or further words after it."""
    if (mark := _MARKS.search(word)) is None:
        return False
    if SPLIT in word or word[0] in (ANY_TEXT, GLOB):
        return True
    return word[0] == "-" and "=" not in word[: mark.start()]


def merge_loop_values(words: Sequence[str]) -> str:
    """Return a text with marks that each of a loop's values fits."""
    if len(words) == 1 and SPLIT not in words[0]:
        return words[0]
    if not words or any(is_open(word) or word[:1] == "-" or not word for word in words):
        return ANY_TEXT
    prefix = posixpath.commonprefix(list(words))
    mark = min((prefix.find(one) for one in (ANY_TEXT, GLOB, NO_OPTION) if one in prefix), default=len(prefix))
    plain = all(not is_marked(word) and SPLIT_OR_EXPANDED.search(word) is None for word in words)
    return prefix[:mark] + (NO_OPTION if plain or not prefix[:mark] else ANY_TEXT)


def merge_possible_working_folders(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders of two ways through a text; none if one of them is unknown."""
    if one == other or not one or not other:
        return one if one == other else ()
    merged = tuple(dict.fromkeys((*one, *other)))
    return merged if len(merged) <= _MAX_FOLDERS else ()


def show_marks(text: str) -> str:
    """Return a text with its marks in a form for people."""
    return text.translate(_SHOWN_MARKS)


class ShellRedirection(Struct, frozen=True):
    """One redirection of a command.

    :param operator: as written, with the number of the descriptor (``2>>``)
    :param target: without quotes: a path, or the number of another descriptor
    :param capability: the access to the file ``target``; None if no file of the user is opened (``/dev/null``, ``2>&1``)
    """

    operator: str
    target: str
    capability: Literal["fs.read", "fs.write"] | None = None

    def __str__(self) -> str:
        return f"{self.operator}{self.target}"


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A simple command: ``argv`` without quotes, and its redirections."""

    argv: tuple[str, ...]
    redirections: tuple[ShellRedirection, ...] = ()
    source: tuple[str, ...] = ()
    """The words as written, quotes and all."""
    folders: tuple[str, ...] = (".",)
    """The folders that the command may run in, relative to the first one. None of them is known if it is empty."""
    in_background: bool = field(default=False, compare=False)
    """Whether a ``&`` follows it or the list that it is in, so that the shell continues meanwhile."""


_PART = compile_regex_lazily(
    r"""\\(?P<escaped>.)|'(?P<raw>[^']*)'|"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^'"\\]+)""", re.DOTALL
)
QUOTED_ESCAPE = compile_regex_lazily(r'\\([\\"$`])')


def remove_quotes(word: str) -> str:
    """Return the word without its quotes, as far as possible."""
    if "'" not in word and '"' not in word and "\\" not in word:
        return word
    out: list[str] = []
    for match in _PART.finditer(word):
        kind = match.lastgroup
        text = match.group(kind) if kind else ""
        out.append(QUOTED_ESCAPE.sub(r"\1", text) if kind == "quoted" else text)
    return "".join(out)


def get_redirection_capability(operator: str, target: str) -> Literal["fs.read", "fs.write"] | None:
    """Return the access of a redirection to the file that it names."""
    if target in ("/dev/null", "/dev/stdout", "/dev/stderr"):
        return None
    if operator.endswith(">&") and target.isascii() and target.isdigit():
        return None
    return "fs.read" if operator.lstrip("0123456789") == "<" else "fs.write"


def count_assignable_names(text: str) -> Mapping[str, int]:
    """Return how often a text has each name that a command could set; nothing if it can run a text that is not in it."""
    bare = _QUOTES.sub("", text)
    return {} if _RUNS_TEXT.search(bare) is not None else Counter(_NAME.findall(bare))


def classify_printed_word_count(argv: tuple[str, ...]) -> int:
    """Return 1 if a command prints one word that is no option, 2 if it prints such a text, and 0 for any other command."""
    if argv in _ONE_WORD:
        return 1
    if (
        argv[:2] == ("git", "merge-base")
        and len(argv) == 4
        and not any(map(is_open, argv))
        and "-" not in (argv[2][:1], argv[3][:1])
    ):
        return 1
    if argv in _NO_OPTIONS or (argv[:1] == ("date",) and len(argv) == 2 and re.fullmatch(r"\+%[\w%:. -]+", argv[1])):
        return 2
    return 0


_ONE_WORD = frozenset(
    {
        *(("nproc",), ("whoami",), ("id", "-u"), ("id", "-g"), ("uname", "-m"), ("uname", "-s"), ("arch",), ("mktemp",)),
        *(("git", "rev-parse", "HEAD"), ("git", "rev-parse", "--short", "HEAD"), ("mktemp", "-d")),
        *(("git", "rev-parse", "--abbrev-ref", "HEAD"), ("git", "branch", "--show-current")),
        *(("git", "describe", "--tags", "--abbrev=0"), ("date", "+%s"), ("date", "+%F")),
    }
)  # fmt: skip
_NO_OPTIONS = frozenset({("pwd",), ("git", "rev-parse", "--show-toplevel"), ("uname",), ("hostname",)})
