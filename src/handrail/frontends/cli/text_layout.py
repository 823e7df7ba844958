"""The layout of text on a terminal: its width, whether it has colors, and lines that are wrapped at words."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO
from unicodedata import category, east_asian_width

from handrail.contract.text.lazy_patterns import compile_regex_lazily

DEFAULT_WIDTH = 80
"""Columns of a terminal of unknown size, and of a pipe or a file."""
MIN_WIDTH = 20
_PIECE = compile_regex_lazily(r"\s+|\S+")

StyledText = tuple[str, str]
"""A text, and its style."""

_color_is_off = False


@contextmanager
def apply_color_option(*, is_off: bool) -> Generator[None]:
    """Write without colors in the block if ``is_off``, also on a terminal."""
    global _color_is_off
    before, _color_is_off = _color_is_off, _color_is_off or is_off
    try:
        yield
    finally:
        _color_is_off = before


def should_use_color(stream: TextIO) -> bool:
    """Return whether a stream gets colors: it is a terminal, and neither the options nor the environment forbid it."""
    if _color_is_off or os.environ.get("NO_COLOR") or os.environ.get("TERM", "") in ("", "dumb"):
        return False
    return stream.isatty()


def get_terminal_width(stream: TextIO) -> int:
    """Return the columns for a stream: those of ``COLUMNS`` or of its terminal, else 80."""
    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdigit() and int(given):
        return max(MIN_WIDTH, int(given))
    with suppress(OSError, ValueError):
        if stream.isatty() and (columns := os.get_terminal_size(stream.fileno()).columns):
            return max(MIN_WIDTH, columns)
    return DEFAULT_WIDTH


def measure_display_width(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(character: str) -> int:
    if east_asian_width(character) in "WF":
        return 2
    return 0 if category(character) in ("Mn", "Me") else 1


def fold_text(text: str, width: int) -> list[str]:
    """Return a text in pieces of at most ``width`` columns, broken anywhere."""
    if measure_display_width(text) <= width:
        return [text]
    pieces, piece, used = list[str](), "", 0
    for character in text:
        cells = _cells_of(character)
        if used + cells > width:
            pieces.append(piece)
            piece, used = "", 0
        piece, used = piece + character, used + cells
    return [*pieces, piece]


def wrap_words(text: str, width: int, *, break_words: bool = True) -> list[str]:
    """Return one line of text in lines of at most ``width`` columns, broken between words if possible."""
    wrapped = wrap_styled_text([(text, "")], width, break_words=break_words)
    return ["".join(part for part, _ in line) for line in wrapped]


def wrap_styled_text(
    parts: Iterable[StyledText], width: int, *, break_words: bool = True, first_width: int | None = None
) -> list[list[StyledText]]:
    """Return styled texts in lines of at most ``width`` columns, broken between words if possible.

    White space at the beginning stays.

    :param break_words: break a word that is wider than a line anywhere; otherwise it stays whole, to be copied
    :param first_width: the width of the first line, if it is another
    """
    given = list(parts)
    width = max(width, 1)
    first_width = width if first_width is None else max(first_width, 1)
    if sum(measure_display_width(text) for text, _ in given) <= first_width:
        return [given]
    lines: list[list[StyledText]] = [[]]
    used = width - first_width
    for before, word in _words_of(given):
        gap = before
        size, space = (
            sum(measure_display_width(text) for text, _ in word),
            sum(measure_display_width(text) for text, _ in gap),
        )
        if lines[-1] and used + space + size > width:
            lines.append([])
            used, space, gap = 0, 0, []
        elif not lines[-1] and len(lines) > 1:
            space, gap = 0, []
        lines[-1] += gap
        used += space
        for text, style in word:
            room = width - used if size > width else width
            for number, piece in enumerate(_fold_word(text, room, width) if break_words else (text,)):
                if number:
                    lines.append([])
                    used = 0
                lines[-1].append((piece, style))
                used += measure_display_width(piece)
    return lines


def _words_of(parts: Iterable[StyledText]) -> Iterator[tuple[list[StyledText], list[StyledText]]]:
    """Yield each word with the white space before it. A word may have several styles."""
    gap: list[StyledText] = []
    word: list[StyledText] = []
    for text, style in parts:
        for piece in _PIECE.findall(text):
            if not piece.isspace():
                word.append((piece, style))
                continue
            if word:
                yield gap, word
                gap, word = [], []
            gap.append((piece, style))
    if word:
        yield gap, word


def _fold_word(text: str, first: int, width: int) -> list[str]:
    if measure_display_width(text) <= first:
        return [text]
    if first < 1:
        return ["", *fold_text(text, width)]
    head, *rest = fold_text(text, first)
    return [head, *fold_text("".join(rest), width)]
