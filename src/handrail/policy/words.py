"""Rule patterns as words: quotes make a word literal, everything else in it is a glob.

``allow bash git commit -m 'fix: *'`` has four words, the last of which is a literal star. So any argv, quoted as
for a shell, is a pattern that matches exactly itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from handrail.contract.patterns import escape, has_wildcard, text_regex

_PART = re.compile(
    r"""(?P<blank>[ \t\n]+)|'(?P<raw>[^']*)'|"(?P<quoted>(?:[^"\\]|\\.)*)"|\\(?P<escaped>.)|(?P<bare>[^\s'"\\]+)""",
    re.DOTALL,
)


class WordFault(ValueError):
    """The pattern cannot be read as words."""


def pattern_words(pattern: str) -> tuple[str, ...]:
    """The words of ``pattern``, each as a glob in which quoted and escaped characters stand for themselves.

    :raises WordFault: for a quote that is not closed
    """
    words: list[str] = []
    word: list[str] | None = None
    position = 0
    while position < len(pattern):
        match = _PART.match(pattern, position)
        if match is None:
            raise WordFault(f"a quote is not closed at {pattern[position : position + 20]!r}")
        position = match.end()
        kind = match.lastgroup
        if kind == "blank":
            if word is not None:
                words.append("".join(word))
            word = None
            continue
        word = [] if word is None else word
        text = match.group(kind) if kind else ""
        if kind == "bare":
            word.append(text)
        else:
            word.append(escape(re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL) if kind == "quoted" else text))
    if word is not None:
        words.append("".join(word))
    return tuple(words)


def bare_words(pattern: str) -> tuple[str, ...]:
    """The words of ``pattern`` in which nothing is quoted or escaped.

    :raises WordFault: for a quote that is not closed
    """
    found: list[str] = []
    bare = ""
    plain = True
    position = 0
    while position < len(pattern):
        match = _PART.match(pattern, position)
        if match is None:
            raise WordFault(f"a quote is not closed at {pattern[position : position + 20]!r}")
        position = match.end()
        if match.lastgroup == "blank":
            found += [bare] if bare and plain else []
            bare, plain = "", True
        elif match.lastgroup == "bare":
            bare += match.group()
        else:
            plain = False
    return (*found, bare) if bare and plain else tuple(found)


def literal_words(argv: Iterable[str]) -> str:
    """A pattern that matches exactly ``argv``."""
    return shlex.join(argv)


class ArgvPattern:
    """A command pattern, ready to be compared with an argv word by word.

    A last word ``*`` stands for any further words, none included; a last word ``-*`` for one or more further
    words that begin with ``-``. When the pattern belongs to an *allow* rule, a wildcard at the beginning of a
    word never takes a word that begins with ``-``. In the others ``*`` takes every word, and whatever follows
    the word that ``-*`` took.
    """

    __slots__ = ("_rest", "_strict", "_words", "literal_words")

    def __init__(self, words: Sequence[str], *, allowing: bool) -> None:
        rest = words[-1] if words and words[-1] in ("*", "-*") else None
        fixed = words[:-1] if rest is not None else words
        self._rest = rest
        self._strict = allowing
        self._words = tuple((_unescaped(w), None) if not has_wildcard(w) else (w, text_regex(w)) for w in fixed)
        self.literal_words = frozenset(i for i, (_, regex) in enumerate(self._words) if regex is None)
        """Which words of a matching argv are named by literal words of the pattern."""

    @property
    def program(self) -> str | None:
        """The literal first word, if it is one."""
        return self._words[0][0] if self._words and 0 in self.literal_words else None

    def matches(self, argv: Sequence[str]) -> bool:
        count = len(self._words)
        if len(argv) < count or (self._rest is None and len(argv) > count):
            return False
        for (want, regex), have in zip(self._words, argv, strict=False):
            if regex is None:
                if have != want:
                    return False
            elif regex.match(have) is None or (self._strict and have[:1] == "-" and want[:1] != "-"):
                return False
        if self._rest is None or (self._rest == "*" and not self._strict):
            return True
        further = argv[count:]
        if self._rest == "*":
            return not any(word[:1] == "-" for word in further)
        if not self._strict:
            return bool(further) and further[0][:1] == "-"
        return bool(further) and all(word[:1] == "-" for word in further)


def _unescaped(word: str) -> str:
    return re.sub(r"\[([*?[])\]", r"\1", word)
