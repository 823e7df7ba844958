"""BERT's uncased WordPiece tokenizer, in plain Python: text to the ids that a MiniLM or BERT model reads.

Follows the reference implementation of BERT (``BasicTokenizer`` and ``WordpieceTokenizer``): clean, set CJK
characters apart, strip accents (NFD, without marks), lower, split at blanks and punctuation, then the longest
known piece first. ``uncased.txt`` beside this file is the vocabulary of bert-base-uncased (Apache-2.0), one piece
a line, the line's number its id.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"

_LONGEST_WORD = 100
"""A longer run without a blank is one unknown piece, as in the reference."""

_CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)

_KEPT, _DROPPED, _BLANK, _APART = range(4)


@lru_cache(maxsize=65_536)
def _kind(char: str) -> int:
    """What becomes of one character: kept, dropped, a blank, or a word of its own."""
    if char.isspace() and not "\x1c" <= char <= "\x1f":  # blanks to Python, control characters to Unicode
        return _BLANK
    code = ord(char)
    category = unicodedata.category(char)
    if code in (0, 0xFFFD) or category in ("Cc", "Cf", "Co", "Cs"):
        return _DROPPED
    if category.startswith("P") or (code < 128 and not char.isalnum()):
        return _APART
    return _APART if any(low <= code <= high for low, high in _CJK) else _KEPT


def basic_words(text: str) -> list[str]:
    """``text`` cut into lower-case words and single punctuation marks, without accents."""
    if not text.isascii():
        cleaned = "".join(" " if (kind := _kind(c)) == _BLANK else "" if kind == _DROPPED else c for c in text)
        spaced = "".join(f" {c} " if any(low <= ord(c) <= high for low, high in _CJK) else c for c in cleaned)
        bare = (c for c in unicodedata.normalize("NFD", spaced) if unicodedata.category(c) != "Mn")
        text = "".join(bare)
    return "".join(map(_spaced, text.lower())).split()


@lru_cache(maxsize=65_536)
def _spaced(char: str) -> str:
    kind = _kind(char)
    return char if kind == _KEPT else f" {char} " if kind == _APART else " " if kind == _BLANK else ""


class WordPiece:
    """Text to piece ids.

    :param pieces: the vocabulary in order of id; it must know the four special pieces
    :raises ValueError: when a special piece is missing
    """

    def __init__(self, pieces: Iterable[str]) -> None:
        self._ids = {piece: number for number, piece in enumerate(pieces)}
        missing = [piece for piece in (PAD, UNKNOWN, START, END) if piece not in self._ids]
        if missing:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}: it is not one of BERT's kind")
        self.pad, self.unknown, self.start, self.end = (self._ids[p] for p in (PAD, UNKNOWN, START, END))
        self._cut = lru_cache(maxsize=32_768)(self._pieces_of)

    @classmethod
    def uncased(cls) -> WordPiece:
        """The tokenizer of bert-base-uncased, from the vocabulary shipped beside this file."""
        text = Path(__file__).with_name("uncased.txt").read_text(encoding="utf-8")
        return cls(text.split("\n")[:-1])

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, text: str, longest: int) -> list[int]:
        """The ids of ``text`` between start and end piece, at most ``longest`` in all; the rest is cut off."""
        out = [self.start]
        for word in basic_words(text):
            out.extend(self._cut(word))
            if len(out) >= longest:
                break
        return [*out[: longest - 1], self.end]

    def _pieces_of(self, word: str) -> tuple[int, ...]:
        if len(word) > _LONGEST_WORD:
            return (self.unknown,)
        out: list[int] = []
        begin = 0
        while begin < len(word):
            prefix = "##" if begin else ""
            for stop in range(len(word), begin, -1):
                found = self._ids.get(prefix + word[begin:stop])
                if found is not None:
                    out.append(found)
                    begin = stop
                    break
            else:
                return (self.unknown,)
        return tuple(out)
