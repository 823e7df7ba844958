"""The encoded forms of a secret, and a search for them in a text.

A value is searched for as it is, inside JSON (once and twice encoded), in a URL (``quote``, ``quote_plus``, every byte
encoded, hexadecimal digits of either case), in HTML (by name, and any of its characters by number), in hexadecimal, and in
base64: either alphabet, with padding or without, at any of the three offsets in a longer base64 text, and across the line
ends of a wrapped one.

A *form* is a sequence of atoms, each with a few alternative texts. Most texts hold no secret, so the search looks for
*needles* first: pieces of which every occurrence contains at least one. Forms are tried only around needles that are found.
"""

from __future__ import annotations

import base64
import bisect
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple
from urllib.parse import quote

import orjson

Atom = tuple[str, ...]

MIN_BASE64 = 6
"""Characters of base64 that identify a value; fewer occur by chance."""
JSON_LEVELS = 3
"""JSON strings nested three times, as in an answer that quotes an answer."""
_LINE_ENDS = ("\n", "\r\n", "\\n", "\\r\\n", "\\\\n")
_UNBROKEN = 40
"""Base64 wraps in longer lines, so this many characters contain at most one line end."""
_HTML = {"&": "amp", "<": "lt", ">": "gt", '"': "quot", "'": "apos"}
_BY_NUMBER = "&#"
"""The beginning of every numeric reference."""
_AMPERSAND = ord("&")
"""Searched first: one byte is found ten times as fast as two."""
_NUMBERED = re.compile(r"(&#(?:[xX]0*[0-9a-fA-F]{1,6}(?![0-9a-fA-F])|0*[0-9]{1,7}(?![0-9]));?)")
_UNFINISHED = re.compile(r"&(?:#(?:[xX][0-9a-fA-F]*|[0-9]*))?")
_LONGEST_BY_NUMBER = 64
"""Characters of a numeric reference that a stream waits for. A longer one has leading zeros and is found only in whole texts.
"""
_GATE = 5
_SLICE = 64 * 1024
"""Characters that are decoded in one step, after which other threads may run."""
_SHORT = 8192
"""Characters. In a shorter text, one search for the beginnings of all needles is faster than one search per needle."""


class SecretOccurrence(NamedTuple):
    """One occurrence: ``text[start:end]`` is an encoding of the secret with this label."""

    start: int
    end: int
    label: str


class _SearchNeedle(NamedTuple):
    """A part that every occurrence of an encoding contains, or one of several alternatives, with its distance from the start."""

    text: str
    before_least: int
    before_most: int


@dataclass(frozen=True, slots=True)
class SecretEncoding:
    """One encoding of one secret."""

    atoms: tuple[Atom, ...]
    label: str
    literal: str = ""
    """The encoding as one string, if it has one; an occurrence that begins with it needs no other match."""
    needles: tuple[_SearchNeedle, ...] = field(default=(), compare=False)

    @property
    def max_length(self) -> int:
        return sum(max(map(len, atom)) for atom in self.atoms)

    def match_longest_at(self, text: str, start: int) -> tuple[int, bool]:
        """Return the end of the longest occurrence from ``start`` on, and whether it may be incomplete.

        The end is -1 if there is none. It may be incomplete if the end of ``text`` leaves an occurrence, or a longer one, open.
        """
        # The usual case of base64 on one line, without a walk through the atoms.
        if self.literal and text.startswith(self.literal, start):
            return start + len(self.literal), False
        size = len(text)
        ends = {start}
        is_open = False
        for atom in self.atoms:
            after: set[int] = set()
            for at in ends:
                for one in atom:
                    end = at + len(one)
                    piece = text[at:end]
                    # Escapes may be written in either case; the characters of the secret itself may not.
                    if piece == one or (one[0] in "%\\&" and piece.lower() == one.lower()):
                        after.add(end)
                    # The text ends inside this spelling. A stream must hold it back, since the next piece may complete
                    # the secret.
                    elif end > size and (one.startswith(piece) or one.lower().startswith(piece.lower())):
                        is_open = True
            if not after:
                return -1, is_open
            ends = after
        return max(ends), is_open


class HtmlDecodedText:
    """A text with its numeric HTML references (``&#116;``, ``&#x0074``) decoded.

    :param as_bytes: each character of the text stands for a byte, before and after decoding
    """

    def __init__(self, text: str, as_bytes: bool) -> None:
        # Split, not searched: a text may consist of references only, and one Python step for each would delay a call. Each
        # slice takes a few steps that hold the interpreter.
        self._pieces: list[str] = [""]
        self._read: list[str] = [""]
        characters: dict[str, str] = {}
        for piece in _split_between_references(text):
            pieces = _NUMBERED.split(piece)
            numbered = pieces[1::2]
            characters |= {one: _decode_html_reference(one, as_bytes) for one in set(numbered).difference(characters)}
            read = pieces[:]
            read[1::2] = map(characters.__getitem__, numbered)
            for whole, more in ((self._pieces, pieces), (self._read, read)):
                # Both lists must keep alternating between plain pieces and references, also across slices: odd places
                # are references.
                whole[-1] += more[0]
                whole.extend(more[1:])
        self.text = "".join(self._read)

    @cached_property
    def _piece_end_positions(self) -> tuple[list[int], list[int]]:
        """Return where each piece ends, in the text and in its decoded form."""
        return _list_piece_ends(self._pieces), _list_piece_ends(self._read)

    def map_to_source_start(self, index: int) -> int:
        """Return where the character at ``index`` of the decoded text starts in the original."""
        return self._source_index(index, index)

    def map_to_source_end(self, index: int) -> int:
        """Return where the character before ``index`` of the decoded text ends in the original."""
        if index <= 0:
            return index
        nth = bisect.bisect_right(self._piece_end_positions[1], index - 1)
        ends = self._piece_end_positions[0]
        if nth >= len(ends):
            return ends[-1] + index - self._piece_end_positions[1][-1]
        return ends[nth] if nth % 2 else self._source_index(index - 1, index - 1) + 1

    def _source_index(self, index: int, behind: int) -> int:
        there, read = self._piece_end_positions
        if (nth := bisect.bisect_right(read, index)) >= len(read):
            return there[-1] + index - read[-1]
        begin = there[nth - 1] if nth else 0
        return begin if nth % 2 else begin + index - (read[nth - 1] if nth else 0)


def _split_between_references(text: str) -> Iterator[str]:
    """Yield the text in parts that do not split a numeric reference."""
    begin = 0
    while begin < len(text):
        end = len(text) if len(text) - begin <= _SLICE else text.rfind("&", begin + 1, begin + _SLICE)
        if end < 0 and (end := text.find("&", begin + _SLICE)) < 0:
            end = len(text)
        yield text[begin:end]
        begin = end


def _list_piece_ends(pieces: Sequence[str]) -> list[int]:
    ends = [0]
    for begin in range(0, len(pieces), _SLICE):
        ends += accumulate(map(len, pieces[begin : begin + _SLICE]), initial=ends.pop())
    return ends[1:]


def _decode_html_reference(numbered: str, as_bytes: bool) -> str:
    """Return the character of a numeric reference; the reference itself if the number is invalid."""
    digits = numbered[2:].removesuffix(";")
    number = int(digits[1:], 16) if digits[0] in "xX" else int(digits.lstrip("0") or "0")
    # Browsers show a replacement character for these, so they cannot spell a part of a secret.
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        return numbered
    return chr(number).encode().decode("latin-1") if as_bytes else chr(number)


class SecretEncodingMatcher:
    """All encodings of all secrets.

    :param secrets: label to the values of a secret
    :param as_bytes: for texts in which each character stands for a byte
    """

    def __init__(self, secrets: Mapping[str, Iterable[str]], *, as_bytes: bool = False) -> None:
        forms: dict[tuple[Atom, ...], SecretEncoding] = {}
        for label, values in secrets.items():
            for value in values:
                for form in _encodings_of(value, label, as_bytes=as_bytes):
                    # Two names may have the same value. One form is enough, and the first name is shown.
                    forms.setdefault(form.atoms, form)
        self._as_bytes = as_bytes
        self._forms = tuple(forms.values())
        self._uses: dict[str, list[tuple[SecretEncoding, _SearchNeedle]]] = {}
        for form in self._forms:
            for needle in form.needles:
                self._uses.setdefault(needle.text, []).append((form, needle))
        self._needles = tuple(self._uses)
        self._binary = tuple(needle.encode("latin-1" if as_bytes else "utf-8") for needle in self._needles)
        # Only the first characters of the needles: a short pattern is compiled into a fast search, and a rare false hit
        # costs one full search.
        self._gate = re.compile(_trie_pattern(needle[:_GATE] for needle in self._needles))
        self._binary_gate = re.compile(
            _trie_pattern(n.decode("latin-1")[:_GATE] for n in self._binary).encode("latin-1")
        )
        starts = {alternative[0] for form in self._forms for alternative in form.atoms[0]}
        self._starts = re.compile(_trie_pattern(starts))
        self._longest = max((form.max_length for form in self._forms), default=0)

    def may_contain_secret(self, text: str) -> bool:
        """Return whether a full search is necessary. Quick, and True for every text with an occurrence."""
        # One search of a short text is faster with one pattern; `in` is a vectorised search and wins for long texts.
        if len(text) < _SHORT:
            if self._gate.search(text) is not None:
                return True
        else:
            for needle in self._needles:
                if needle in text:
                    return True
        return "&" in text and _BY_NUMBER in text and self._has_needle_start(HtmlDecodedText(text, self._as_bytes).text)

    def may_bytes_contain_secret(self, data: bytes) -> bool:
        """Return the same for bytes."""
        if len(data) < _SHORT:
            if self._binary_gate.search(data) is not None:
                return True
        else:
            for needle in self._binary:
                if needle in data:
                    return True
        return (
            _AMPERSAND in data
            and b"&#" in data
            and self._has_needle_start(HtmlDecodedText(data.decode("latin-1"), self._as_bytes).text)
        )

    def _has_needle_start(self, text: str) -> bool:
        """Return whether a text contains the beginning of a needle."""
        steps = range(0, len(text), _SLICE)
        return any(self._gate.search(text, at, at + _SLICE + _GATE) is not None for at in steps)

    def find_secret_occurrences(self, text: str) -> list[SecretOccurrence]:
        """Return all occurrences in order, including overlapping ones; the longest first among those with one start."""
        found = self._find_occurrences(text)
        if _BY_NUMBER in text:
            read = HtmlDecodedText(text, self._as_bytes)
            found |= {
                SecretOccurrence(read.map_to_source_start(start), read.map_to_source_end(end), label)
                for start, end, label in self._find_occurrences(read.text)
            }
        return sorted(found, key=lambda one: (one.start, -one.end, one.label))

    def _find_occurrences(self, text: str) -> set[SecretOccurrence]:
        found: set[SecretOccurrence] = set()
        tried: set[tuple[int, int]] = set()
        for needle, uses in self._uses.items():
            at = text.find(needle)
            while at >= 0:
                for form, of in uses:
                    for start in range(max(0, at - of.before_most), at - of.before_least + 1):
                        if (id(form), start) not in tried:
                            tried.add((id(form), start))
                            end, _ = form.match_longest_at(text, start)
                            if end >= 0:
                                found.add(SecretOccurrence(start, end, form.label))
                # From the next character, since occurrences may overlap, as in `aaaa` with a secret `aaa`.
                at = text.find(needle, at + 1)
        return found

    def find_incomplete_secret_start(self, text: str) -> int:
        """Return where the first possible beginning of a secret starts that the end of ``text`` leaves open."""
        held = self._find_open_start(text)
        # Bounded, or a stream with one `&` and no end of the reference would be held back for ever.
        tail = max(text.rfind("&", max(0, len(text) - _LONGEST_BY_NUMBER)), 0)
        whole = tail if _UNFINISHED.fullmatch(text, tail) else len(text)
        if _BY_NUMBER in text or whole < len(text):
            read = HtmlDecodedText(text[:whole], self._as_bytes)
            held = min(held, whole, read.map_to_source_start(self._find_open_start(read.text)))
        return held

    def _find_open_start(self, text: str) -> int:
        for match in self._starts.finditer(text, max(0, len(text) - self._longest)):
            start = match.start()
            if any(form.match_longest_at(text, start)[1] for form in self._forms):
                return start
        return len(text)


def _encodings_of(value: str, label: str, *, as_bytes: bool) -> Iterator[SecretEncoding]:
    encoded = value.encode()
    yield _make_encoding([_spellings_of_character(character, as_bytes) for character in value], label)
    # Some programs also escape the characters that need no escape in a URL.
    yield _make_encoding([(f"%{byte:02x}",) for byte in encoded], label)
    for digits in (encoded.hex(), encoded.hex().upper()):
        yield _make_encoding([(digits,)], label)
    # Base64 encodes groups of three bytes, so a value has three encodings, depending on what comes before it.
    for place in range(3):
        yield from _base64_encodings(encoded, place, label)


def _spellings_of_character(character: str, as_bytes: bool) -> Atom:
    """Return the spellings of one character: plain, and as in JSON, URLs, HTML and quoting messages."""
    found = [character.encode().decode("latin-1") if as_bytes else character]
    level = [character]
    quoted = "\\'" if character == "'" else repr(character)[1:-1]
    if quoted.isascii() and quoted != json.dumps(character)[1:-1]:
        level.append(quoted)
        found.append(quoted)
    for _ in range(JSON_LEVELS):
        level = [form for one in level for form in (orjson.dumps(one).decode()[1:-1], json.dumps(one)[1:-1])]
        found += [one.encode().decode("latin-1") if as_bytes else one for one in dict.fromkeys(level)]
    found.append(quote(character, safe=""))
    if character == " ":
        found.append("+")
    elif character == "/":
        found.append("\\/")
    elif (name := _HTML.get(character)) is not None:
        found.append(f"&{name};")
    return tuple(dict.fromkeys(found))


def _base64_encodings(value: bytes, place: int, label: str) -> Iterator[SecretEncoding]:
    """Yield the base64 encodings of ``value`` after ``place`` bytes of an incomplete group.

    Characters that ``value`` shares with its neighbours are left out, and with its last one if it is at the end.
    """
    encoded = base64.b64encode(b"\0" * place + value).decode()
    # Only characters whose six bits all belong to the value are certain.
    first, end = -(-place * 8 // 6), (place + len(value)) * 8 // 6
    certain, rest = encoded[first:end], encoded[end:]
    parts = [certain, certain + rest[:1], certain + rest] if rest else [certain]
    for text in parts:
        # A shorter piece would occur by chance in ordinary output.
        if len(text) >= MIN_BASE64:
            yield _make_encoding(
                [_base64_atom(character, wraps=index > 0) for index, character in enumerate(text)],
                label,
                text,
                _split_for_line_end(text),
            )


def _base64_atom(character: str, *, wraps: bool) -> Atom:
    alternatives: tuple[str, ...] = (character,)
    if character in "+/=":
        alternatives += (f"%{ord(character):02x}", *{"+": "-", "/": "_"}.get(character, ""))
    # Programs wrap base64 at 64 or 76 characters, and the output may be quoted in JSON, so the line end may be escaped.
    if wraps:
        alternatives += tuple(end + one for end in _LINE_ENDS for one in alternatives)
    return alternatives


def _split_for_line_end(text: str) -> list[tuple[int, int]]:
    """Return two stretches of which a single line end leaves one intact."""
    reach = min(len(text), _UNBROKEN)
    return [(0, reach // 2), (reach // 2, reach)]


def _make_encoding(
    atoms: Sequence[Atom], label: str, literal: str = "", stretches: Sequence[tuple[int, int]] | None = None
) -> SecretEncoding:
    needles = [
        needle
        for lo, hi in (stretches or [(0, len(atoms))])
        for needle in _choose_needles(atoms, lo, hi, bool(literal))
    ]
    return SecretEncoding(_join_atoms(atoms), label, literal, tuple(needles))


def _choose_needles(atoms: Sequence[Atom], lo: int, hi: int, wrapped: bool) -> list[_SearchNeedle]:
    """Return the longest run of atoms without alternatives, apart from line ends, or all spellings of the first two atoms."""

    def choices(index: int) -> tuple[str, ...]:
        alternatives = atoms[index]
        if wrapped:
            alternatives = tuple(one for one in alternatives if not one.startswith(_LINE_ENDS))
        return tuple(way for one in alternatives for way in _case_variants(one))

    best: tuple[int, int] = (lo, lo)
    begin = lo
    for index in range(lo, hi + 1):
        if index == hi or len(choices(index)) != 1:
            if index - begin > best[1] - best[0]:
                best = (begin, index)
            begin = index + 1
    if best[1] - best[0] >= 2 or len(choices(best[0])[0]) >= 4:
        ways = ["".join(choices(index)[0] for index in range(*best))]
    else:
        best = (lo, min(lo + 2, hi))
        # A line end at the first character leaves a stretch intact; one inside it leaves the other stretch intact.
        ways = ["".join(parts) for parts in itertools.product(*(choices(index) for index in range(*best)))]
    before = atoms[: best[0]]
    least = sum(min(map(len, atom)) for atom in before)
    most = sum(max(map(len, atom)) for atom in before) if not wrapped else least + _max_shift(before, atoms[best[0]])
    return [_SearchNeedle(way, least, most) for way in ways]


def _max_shift(before: Sequence[Atom], at: Atom) -> int:
    """Return by how much a line end and characters with several spellings can shift what follows."""
    spread = sum(2 for atom in before if len(atom[0]) == 1 and any(one.startswith("%") for one in atom))
    return spread + max(map(len, _LINE_ENDS)) * (1 + len(before) // _UNBROKEN) * bool(len(at) > 1 or before)


def _case_variants(text: str) -> tuple[str, ...]:
    """Return an escape with its hexadecimal digits in either case, and mixed."""
    if len(text) < 2 or text[0] not in "%\\&":
        return (text,)
    return tuple("".join(parts) for parts in itertools.product(*(dict.fromkeys((c.lower(), c.upper())) for c in text)))


def _join_atoms(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """Return the atoms with neighbours without alternatives joined."""
    joined: list[Atom] = []
    run: list[str] = []
    for atom in atoms:
        if len(atom) == 1 and atom[0][0] not in "%\\&":
            run.append(atom[0])
            continue
        if run:
            joined.append(("".join(run),))
            run = []
        joined.append(atom)
    if run:
        joined.append(("".join(run),))
    return tuple(joined)


def _trie_pattern(words: Iterable[str]) -> str:
    """Return a pattern that finds the first of many words, as a trie."""
    root: dict[str, dict[str, object]] = {}
    for word in words:
        node: dict[str, object] = root  # pyright: ignore[reportAssignmentType]
        for character in word:
            node = node.setdefault(character, {})  # pyright: ignore[reportAssignmentType]
        node[""] = {}
    return _branch_pattern(root) if root else "(?!)"  # pyright: ignore[reportArgumentType]


def _branch_pattern(node: dict[str, dict[str, object]]) -> str:
    if "" in node:
        return ""
    ways = [re.escape(character) + _branch_pattern(inner) for character, inner in node.items()]  # pyright: ignore[reportArgumentType]
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"
