"""Third-party text made safe for a model: control characters, invisible ones and false markers become escapes.

An escape is ``⟦U+001B⟧`` (one code point, or several of a run: ``⟦U+200B,200C⟧``) for a character that does not show
as itself, and ``⟦<⟧`` around the first character of a text that imitates a marker: chat templates (``<|im_start|>``,
``[INST]``), calls and results written as text, system and skill tags, Handrail's own envelope. Nothing is deleted,
and :func:`restore_escapes` returns the original. Text in the form of an escape stays unchanged, so escaping twice changes
nothing; :func:`restore_escapes` cannot tell such text from an escape.

Ordinary writing stays: joiners between emoji and in scripts that need them, the variation selector of an emoji, one
direction mark next to right-to-left letters, tabs and line ends.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import groupby
from typing import Literal, NamedTuple

from handrail.contract.text.lazy_patterns import compile_regex_lazily

EscapeKind = Literal["control", "invisible", "direction", "marker", "action", "envelope"]
OPEN, CLOSE = "⟦", "⟧"

_CONTROLS = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x9f"
_DIRECTIONS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_INVISIBLE = (
    "\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2028\u2029\u2060-\u2065\u206a-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_UNSEEN = f"[{_CONTROLS}{_DIRECTIONS}{_INVISIBLE}]"
_RUN = compile_regex_lazily(f"{_UNSEEN}{_UNSEEN}*")  # so that the search begins with a set of characters
_IS_CONTROL = compile_regex_lazily(f"[{_CONTROLS}]")
_IS_DIRECTION = compile_regex_lazily(f"[{_DIRECTIONS}]")

_TAGS = (
    "function_calls?|function_results?|function=|invoke|tool_calls?|tool_use|tool_results?|tool_response|tool_output|"
    "system|system-reminder|system_prompt|skill|skills|available_skills|start_of_turn|end_of_turn|antml:[a-z_]+"
)
# Each alternative begins with one literal character, so that the search looks for a set of characters.
_MARKS = compile_regex_lazily(
    r"<(?=\|[\w ./:-]{1,64}\|>)"
    r"|<(?=\uff5c)"
    r"|<(?=</?SYS>>|/SYS>>)"
    rf"|<(?=/?(?i:{_TAGS})(?![\w-]))"
    r"|\[(?=/?(?:INST|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|SYSTEM_PROMPT)\])"
    r"|A(?<![\w]A)(?=CTION:)"
    r"|A(?<=^A)(?=ction(?: Input)?:)"
    r"|A(?<=^A)(?=ssistant:)"
    r"|H(?<=^H)(?=uman:)"
    r'|\{(?=[ \t\r\n]*"type"[ \t\r\n]*:[ \t\r\n]*"(?:output|error)"[ \t\r\n]*,[ \t\r\n]*"(?:data|error_text|metadata)"[ \t\r\n]*:)',
    re.ASCII | re.MULTILINE,
)
# Each begins with one literal character, and what follows it is no literal: then the search goes from one to the next
# of these characters at once, ten times as fast as a search for all patterns.
_IN_JSON_BY_START = (
    rb"\\(?:u0|b|f)",
    rb"<(?:\||</?SYS|/SYS|(?i:/?(?:func|invo|tool|syst|skil|avai|star|end_|antm)))",
    rb"\[(?:/?(?:INST|TOOL_|AVAI|SYST))",
    rb"A(?:CTION:|ction(?: Input)?:|ssistant:)",
    rb"H(?=uman:)",
    rb"\{[ \\trn]*\\\"type",
)
_IN_JSON = compile_regex_lazily(b"|".join((rb"\x7f", *_IN_JSON_BY_START)))
_IN_LONG_JSON = tuple(zip((b"\\", b"<", b"[", b"A", b"H", b"{"), map(re.compile, _IN_JSON_BY_START), strict=True))
"""Each with its first character: a search for one character costs a tenth of one for a pattern."""
_LONG_JSON = 2_000
"""Bytes from which several searches cost less than one."""
_ESCAPE = compile_regex_lazily("⟦(?:U\\+([0-9A-F]{4,6}(?:,[0-9A-F]{4,6})*)|([<\\[{AH]))⟧")
_PART = compile_regex_lazily(f"{_ESCAPE.pattern}|\\w+|\\s+|.", re.DOTALL)
_MAX_ALIGNED = 4_000
"""The most parts of a text that are aligned, which is quadratic."""

_JOINING = "\u0600-\u08ff\u0900-\u0dff\u1000-\u109f\u1780-\u17ff\u1800-\u18af\ua840-\ua87f\U00011000-\U000117ff"
_JOINS = compile_regex_lazily(f"[{_JOINING}]")
_RIGHT_TO_LEFT = compile_regex_lazily("[\u0590-\u061b\u061d-\u08ff\ufb1d-\ufdff\ufe70-\ufefe]")
_EMOJI = compile_regex_lazily(
    "[\u00a9\u00ae\u203c\u2049\u2122\u2139\u2194-\u21aa\u231a-\u23ff\u24c2\u25aa-\u25fe\u2600-\u27bf\u2934\u2935"
    "\u2b00-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff]"
)


class EscapedTextRange(NamedTuple):
    """One range of a text that is replaced by an escape."""

    start: int
    end: int
    shown: str
    kind: EscapeKind


def neutralise_text(text: str) -> str:
    """Return ``text`` in the form for a model; the same object if nothing needs an escape."""
    if not (pieces := list(find_characters_to_escape(text))):
        return text
    out: list[str] = []
    at = 0
    for piece in pieces:
        out += (text[at : piece.start], piece.shown)
        at = piece.end
    return "".join((*out, text[at:]))


def restore_escapes(text: str) -> str:
    """Return ``text`` with each escape of :func:`neutralise_text` replaced by the characters that it stands for."""
    return _ESCAPE.sub(_original, text) if OPEN in text else text


def find_escapes(text: str) -> list[str]:
    """Return each escape of :func:`neutralise_text` in ``text`` once, in order."""
    return list(dict.fromkeys(found[0] for found in _ESCAPE.finditer(text))) if OPEN in text else []


def build_escape_regex_variants(pattern: str) -> tuple[str, str]:
    """Return two regular expressions: one for the escapes in ``pattern`` as text, and one for what they stand for."""
    if OPEN not in pattern:
        return pattern, pattern
    given = pattern.replace("⟦U\\+", "⟦U+")
    return _ESCAPE.sub(lambda found: re.escape(found[0]), given), _ESCAPE.sub(
        lambda found: re.escape(_original(found)), given
    )


def find_characters_to_escape(text: str) -> list[EscapedTextRange]:
    """Return every piece of ``text`` that needs an escape, in order."""
    pieces = [
        EscapedTextRange(m.start(), m.start() + 1, f"{OPEN}{m[0]}{CLOSE}", _kind_of_mark(m))
        for m in _MARKS.finditer(text)
    ]
    if not text.isascii() or _IS_CONTROL.search(text):
        pieces += _unseen(text)
        pieces.sort()
    return pieces


def may_need_escaping(json_text: bytes) -> bool:
    """Return whether some text in this JSON may need an escape.

    One quick look: True for all that need one, and for some that do not.
    """
    if not json_text.isascii():
        return True
    if len(json_text) < _LONG_JSON:
        return _IN_JSON.search(json_text) is not None
    for start, pattern in _IN_LONG_JSON:
        if start in json_text and pattern.search(json_text) is not None:
            return True
    return b"\x7f" in json_text


def _unseen(text: str) -> Iterator[EscapedTextRange]:
    for match in _RUN.finditer(text):
        start, end = match.span()
        if (kept := _end_of_belonging_part(text, start, end)) < end:
            run = text[kept:end]
            codes = ",".join(f"{ord(character):04X}" for character in run)
            yield EscapedTextRange(kept, end, f"{OPEN}U+{codes}{CLOSE}", _kind_of(run))


def _kind_of(run: str) -> EscapeKind:
    if _IS_DIRECTION.search(run):
        return "direction"
    return "control" if _IS_CONTROL.search(run) else "invisible"


def _kind_of_mark(match: re.Match[str]) -> EscapeKind:
    return {"A": "action", "H": "action", "{": "envelope"}.get(match[0], "marker")  # type: ignore[return-value]


def _end_of_belonging_part(text: str, start: int, end: int) -> int:
    """Return where the part of the run ``text[start:end]`` ends that belongs to the writing around it.

    That is all of it, its first character, or nothing.
    """
    before, after, run = text[start - 1 : start], text[end : end + 1], text[start:end]
    if run in ("\u200d", "\u200c"):
        return end if _is_legitimate_joiner(run, before, after) else start
    if run[0] in "\ufe0e\ufe0f" and _follows_emoji_base(before, after):
        return end if run[1:] == "\u200d" and _EMOJI.match(after) else start + 1
    if run in ("\u200e", "\u200f", "\u061c") and _RIGHT_TO_LEFT.search(text[max(0, start - 2) : end + 2]):
        return end
    return start


def _is_legitimate_joiner(joiner: str, before: str, after: str) -> bool:
    """Return whether a joiner, or a non-joiner, is between characters that it can join."""
    if _JOINS.match(before) and (_JOINS.match(after) or joiner == "\u200c"):
        return True
    return bool(joiner == "\u200d" and _EMOJI.match(before) and _EMOJI.match(after))


def _follows_emoji_base(before: str, after: str) -> bool:
    """Return whether a variation selector follows an emoji or the character of a keycap."""
    return bool(_EMOJI.match(before) or (before in "0123456789#*" and before and after == "\u20e3"))


def _original(match: re.Match[str]) -> str:
    if match[2] is not None:
        return match[2]
    codes = [int(code, 16) for code in match[1].split(",")]
    if any(code > 0x10FFFF or 0xD800 <= code < 0xE000 for code in codes):
        return match[0]
    characters = "".join(map(chr, codes))
    return characters if all(map(_RUN.match, characters)) else match[0]


class RestoredText(NamedTuple):
    """A text for a file, with the escapes restored that a model copied from what it was shown.

    :param elsewhere: escapes that were restored because the file has their characters, though not in the replaced text
    :param literal: escapes that were kept as text, because the file does not have their characters, or has both forms
    """

    text: str
    elsewhere: tuple[str, ...] = ()
    literal: tuple[str, ...] = ()


class _FoundEscapes(NamedTuple):
    """The escapes in the shown form of a text.

    :param real: escapes of characters
    :param characters: all these characters
    :param literal: escapes that the text itself has
    """

    real: frozenset[str]
    characters: frozenset[str]
    literal: frozenset[str]

    def has_escaped_characters(self, escape: str) -> bool:
        """Return whether the text has the characters of an escape, perhaps as a part of a longer run."""
        if escape in self.real:
            return True
        return escape.startswith(f"{OPEN}U+") and self.characters.issuperset(restore_escapes(escape))


@dataclass(slots=True)
class EscapedText:
    """A text with its escaped form, to find in the text what a model copied from the escaped form."""

    text: str
    shown: str = field(init=False)
    _pieces: list[EscapedTextRange] = field(init=False)
    _starts: list[int] = field(init=False)
    """Where each piece begins in :attr:`shown`."""

    def __post_init__(self) -> None:
        self._pieces = find_characters_to_escape(self.text)
        self._starts = []
        moved = 0
        for piece in self._pieces:
            self._starts.append(piece.start + moved)
            moved += len(piece.shown) - (piece.end - piece.start)
        self.shown = neutralise_text(self.text)

    @property
    def has_escapes(self) -> bool:
        """Whether the escaped form differs from the text."""
        return bool(self._pieces)

    def map_to_original_span(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the range of ``shown[start:end]`` in :attr:`text`; None if it begins or ends within an escape."""
        first, last = self._place(start), self._place(end)
        return None if first is None or last is None else (first, last)

    def restore_copied_escapes(self, new: str, start: int = 0, end: int | None = None) -> RestoredText:
        """Return ``new``, which replaces ``text[start:end]``, with the escapes restored that a model copied.

        An escape is restored if :attr:`text` has what it stands for, and not the literal text of the escape: first
        within the replaced range, then anywhere. If the range has both, the words around an escape decide.
        """
        if not (wanted := dict.fromkeys(match[0] for match in _ESCAPE.finditer(new))):
            return RestoredText(new)
        end = len(self.text) if end is None else end
        near, anywhere = self._find_escapes(start, end), self._find_escapes(0, len(self.text))
        elsewhere: list[str] = []
        literal: list[str] = []
        unclear: set[str] = set()
        restored: dict[str, str] = {}
        for escape in wanted:
            if near.has_escaped_characters(escape) and escape in near.literal:
                unclear.add(escape)
            elif near.has_escaped_characters(escape):
                restored[escape] = restore_escapes(escape)
            elif (
                escape not in near.literal
                and anywhere.has_escaped_characters(escape)
                and escape not in anywhere.literal
            ):
                restored[escape] = restore_escapes(escape)
                elsewhere.append(escape)
            elif escape not in near.literal:
                literal.append(escape)
        parts = _split_parts(new)
        origins = self._align(parts, start, end) if unclear else {}
        for at, part in enumerate(parts):
            if part in restored:
                parts[at] = restored[part]
            elif part in unclear and at not in origins:
                literal.append(part)
            elif part in unclear and origins[at]:
                parts[at] = restore_escapes(part)
        return RestoredText("".join(parts), tuple(elsewhere), tuple(dict.fromkeys(literal)))

    def _find_escapes(self, start: int, end: int) -> _FoundEscapes:
        pieces = self._pieces_within(start, end)
        characters = frozenset("".join(self.text[piece.start : piece.end] for piece in pieces))
        literal = frozenset(match[0] for match in _ESCAPE.finditer(self.text, start, end))
        return _FoundEscapes(frozenset(piece.shown for piece in pieces), characters, literal)

    def _pieces_within(self, start: int, end: int) -> list[EscapedTextRange]:
        return self._pieces[bisect_left(self._pieces, start, key=_start) : bisect_right(self._pieces, end, key=_end)]

    def _align(self, new: Sequence[str], start: int, end: int) -> dict[int, bool]:
        """Return, for each escape in the parts ``new`` with a counterpart in the range, whether that is restored."""
        old: list[str] = []
        real: set[int] = set()
        at = start
        for piece in self._pieces_within(start, end):
            old += _split_parts(self.text[at : piece.start])
            real.add(len(old))
            old.append(piece.shown)
            at = piece.end
        old += _split_parts(self.text[at:end])
        if max(len(old), len(new)) > _MAX_ALIGNED:
            return {}
        matching = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
        return {block.b + n: block.a + n in real for block in matching for n in range(block.size)}

    def _place(self, at: int) -> int | None:
        index = bisect_right(self._starts, at) - 1
        if index < 0:
            return at
        piece, start = self._pieces[index], self._starts[index]
        if at == start:
            return piece.start
        after = at - start - len(piece.shown)
        return None if after < 0 else piece.end + after


def _split_parts(text: str) -> list[str]:
    """Split a text into escapes, words, runs of blanks and single characters."""
    return [match[0] for match in _PART.finditer(text)]


def _start(piece: EscapedTextRange) -> int:
    return piece.start


def _end(piece: EscapedTextRange) -> int:
    return piece.end


# Names and paths. Their escapes have the form above, and cover every character that a reader can miss or mistake.

_EDGE_SPACES = compile_regex_lazily(r"(?:(?<=/)|\A) +| +(?=/|\Z)")


def escape_terminal_controls(text: str) -> str:
    """Return a name or path in the form to show, which :func:`unescape_displayed_path` takes back.

    Escaped are control and invisible characters, other spaces than U+0020, spaces at the start or end of a name, bytes
    that are not UTF-8, and text in the form of an escape.
    """
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    hidden = {at for piece in _unseen(text) for at in range(piece.start, piece.end)}
    hidden.update(at for at, char in enumerate(text) if not char.isprintable())
    hidden.update(at for spaces in _EDGE_SPACES.finditer(text) for at in range(*spaces.span()))
    hidden.update(escape.start() for escape in _ESCAPE.finditer(text))
    out: list[str] = []
    for is_hidden, run in groupby(range(len(text)), hidden.__contains__):
        characters = [text[at] for at in run]
        if is_hidden:
            out.append(f"{OPEN}U+{','.join(f'{ord(character):04X}' for character in characters)}{CLOSE}")
        else:
            out += characters
    return "".join(out)


def escape_non_ascii_path(text: str) -> str:
    """Return a path with an escape for every character beyond ASCII, so that it looks like no other path."""
    return re.sub(
        r"[^\x20-\x7e]+", lambda run: f"{OPEN}U+{','.join(f'{ord(char):04X}' for char in run[0])}{CLOSE}", text
    )


def unescape_displayed_path(text: str) -> str:
    """Return the name or path that :func:`escape_terminal_controls` or :func:`neutralise_text` showed as ``text``.

    An escape of a character that neither of them escapes stays as it is, so that it cannot spell a ``/``.
    """
    return _ESCAPE.sub(_path_original, text) if OPEN in text else text


def _path_original(match: re.Match[str]) -> str:
    if match[2] is not None:
        return match[2]
    codes = [int(code, 16) for code in match[1].split(",")]
    return "".join(map(chr, codes)) if all(map(_is_escaped_in_paths, codes)) else match[0]


def _is_escaped_in_paths(code: int) -> bool:
    if code < 0x80:
        return 0 < code <= 0x20 or code == 0x7F
    return code <= 0x10FFFF and not (0xD800 <= code < 0xDC80 or 0xDCFF < code < 0xE000)


def normalise_unicode_spelling(name: str) -> str:
    """Return one spelling for all names that look alike: accents as single characters, and every space as U+0020."""
    if name.isascii():
        return name
    return "".join(" " if char.isspace() and char >= "\x80" else char for char in unicodedata.normalize("NFC", name))
