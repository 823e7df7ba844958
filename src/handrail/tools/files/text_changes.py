"""The new text of a file: by an exact replacement, by line operations, or whole. Pure functions.

A model sees a file with plain line ends and with escapes for hidden characters. So its texts are matched in that form. New
text gets the line ends of the lines that it replaces, and the characters of the escapes that the model copied.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any

from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.struct import Struct, field
from handrail.contract.text.neutralisation import OPEN, EscapedText, RestoredText, neutralise_text
from handrail.contract.text.text_encodings import replace_invalid_bytes
from handrail.tools.files.lines_and_diffs import (
    LineReplacement,
    SpanReplacement,
    apply_span_replacements,
    check_text_size,
    compute_line_replacements,
    convert_line_ends,
    count_line_characters,
    detect_line_end,
    detect_line_separator,
    explain_missing_text,
    find_line_end_at,
    find_line_numbers_of_text,
    find_uniform_line_end,
    normalise_line_ends,
    preserve_line_ends,
    replace_all_occurrences,
    split_lines,
)

_MANY = 1_000
"""The occurrences above which they are replaced in one step and the texts are compared afterwards."""
_MAX_SHOWN = 512 * 1024
"""The most characters of a text in which escapes are searched."""


class EscapeWarnings(Struct):
    """Notes for a result about escapes in new text whose meaning was not certain."""

    elsewhere: dict[str, None] = field(default_factory=dict[str, None])
    literal: dict[str, None] = field(default_factory=dict[str, None])

    def take(self, restored: RestoredText) -> str:
        """Return the restored text, and note what was not certain."""
        self.elsewhere.update(dict.fromkeys(restored.elsewhere))
        self.literal.update(dict.fromkeys(restored.literal))
        return restored.text

    def to_data(self) -> dict[str, object]:
        """Return the notes as members of a tool's data."""
        parts: list[str] = []
        if self.elsewhere:
            parts.append(
                f"{_join(self.elsewhere)} was written as the character that it stands for, as elsewhere in the file."
            )
        if self.literal:
            parts.append(
                f"{_join(self.literal)} was written literally, as text. If you copied it from a result, where it stands for a "
                "character, replace it with that character itself."
            )
        return {"escapes": " ".join(parts)} if parts else {}


def _join(escapes: dict[str, None]) -> str:
    shown = ", ".join(list(escapes)[:5])
    return f"{shown} and {len(escapes) - 5} more" if len(escapes) > 5 else shown


# Exact replacements.


def check_replacement_differs(old: str, new: str) -> None:
    if old == new:
        raise ToolError("`old` and `new` are equal. Pass a `new` that differs.", kind="invalid_input")


class ReplacedText(Struct, frozen=True):
    """A text after a replacement.

    :param spans: the replaced places; None if they are too many
    """

    text: str
    count: int
    spans: Sequence[SpanReplacement] | None


@dataclasses.dataclass(slots=True)
class _ShownText:
    r"""A text as a model saw it: with ``\n`` at the end of each line, and with escapes.

    :param plain: the text with plain line ends
    """

    text: str
    plain: str = dataclasses.field(init=False)
    _returns: list[int] = dataclasses.field(init=False)
    """The places in :attr:`plain` before which a carriage return is left out."""
    _escaped: EscapedText | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self.plain = normalise_line_ends(self.text)
        self._returns = []
        if len(self.plain) < len(self.text):
            at = self.text.find("\r\n")
            while at != -1:
                self._returns.append(at - len(self._returns))
                at = self.text.find("\r\n", at + 2)

    def find(self, old: str, step: int) -> Iterator[tuple[int, int]]:
        """Yield the range of each occurrence of ``old`` in :attr:`plain`. The next begins at least ``step`` later."""
        at = self.plain.find(old)
        while at != -1:
            yield at, at + len(old)
            at = self.plain.find(old, at + step)

    def find_escaped_matches(self, old: str, step: int) -> Iterator[tuple[int, int]]:
        """Yield the range in :attr:`plain` of each occurrence of ``old`` in the escaped form."""
        if OPEN not in old or (view := self.escaped) is None or not view.has_escapes:
            return
        at = view.shown.find(old)
        while at != -1:
            if (span := view.map_to_original_span(at, at + len(old))) is not None:
                yield span
            at = view.shown.find(old, at + step)

    @property
    def escaped(self) -> EscapedText | None:
        """:attr:`plain` with its escaped form; None if it is too long."""
        if self._escaped is None and len(self.plain) <= _MAX_SHOWN:
            self._escaped = EscapedText(self.plain)
        return self._escaped

    def map_to_original_offset(self, at: int) -> int:
        """Return the place in the text of a place in :attr:`plain`."""
        return at + bisect_left(self._returns, at)

    def restore(self, new: str, start: int, end: int, notes: EscapeWarnings) -> str:
        """Return ``new`` with the escapes restored that a model copied. It replaces a range of :attr:`plain`."""
        if OPEN not in new:
            return new
        view = self.escaped
        if view is None:
            view = EscapedText("")  # too long to be searched: each escape is noted as literal
            start = end = 0
        return notes.take(view.restore_copied_escapes(new, start, end))


def replace_exact_text(
    path: str, text: str, old: str, new: str, *, replace_all: bool, notes: EscapeWarnings | None = None
) -> ReplacedText:
    """Replace ``old`` by ``new`` in ``text``. Both are in the form that ``read`` shows.

    If they differ in line ends only, they mean those of the text.

    :raises ToolError: ``invalid_input`` if ``old`` is missing or occurs more than once, ``limit`` if the text becomes too
        large
    """
    check_replacement_differs(old, new)
    notes = notes or EscapeWarnings()
    end = find_uniform_line_end(text)
    if convert_line_ends(old, "\n") == convert_line_ends(new, "\n"):
        return _replace_literally(path, text, old, new, replace_all=replace_all)
    is_plain = end is not None and OPEN not in old and OPEN not in new
    if is_plain and (end != "\n" or "\r" not in text or convert_line_ends(old, "\n") in text):
        assert end is not None
        return _replace_literally(
            path, text, convert_line_ends(old, end), convert_line_ends(new, end), replace_all=replace_all
        )
    mark = detect_line_separator(text)
    shown = _ShownText(text)
    old, new = (convert_line_ends(one, "\n") for one in (old, new))
    if mark == "\r":
        old = old.replace("\r", "\n")
    step, most = (len(old), None) if replace_all else (1, _MANY)
    places = sorted({*islice(shown.find(old, step), most), *islice(shown.find_escaped_matches(old, step), most)})
    if not places and "\r" in shown.plain:
        mark, shown.plain = "", shown.plain.replace("\r", "\n")
        places = list(islice(shown.find(old, step), most))
    if not places:
        raise _missing_error(path, text, old)
    if not replace_all and len(places) > 1:
        lines = [shown.plain.count("\n", 0, start) + 1 for start, _ in places[:11]]
        raise _ambiguous_error(path, len(places), lines)
    spans: list[SpanReplacement] = []
    for start, stop in places:
        first, last = shown.map_to_original_offset(start), shown.map_to_original_offset(stop)
        if spans and first < spans[-1].end:
            continue
        made = shown.restore(new, start, stop, notes)
        next_end = find_line_end_at(text, last)
        if "\n" in made and mark == "\n" and "\n" not in (made[-1], old[0]) and text.startswith(next_end, last):
            made += "\n"  # so that the last line keeps its end before further lines
            last += len(next_end)
        if "\n" in made:
            made = preserve_line_ends(text[first:last], made, end or find_line_end_at(text, last), mark)
        spans.append(SpanReplacement(first, last, made))
    return _replace_spans(text, spans)


def _replace_literally(path: str, text: str, old: str, new: str, *, replace_all: bool) -> ReplacedText:
    at = text.find(old)
    if at == -1:
        raise _missing_error(path, text, old)
    if not replace_all:
        if text.find(old, at + 1) != -1:
            raise _ambiguous_error(path, _count_occurrences(text, old), find_line_numbers_of_text(text, old, 11))
        return _replace_spans(text, [SpanReplacement(at, at + len(old), new)])
    count = text.count(old)
    if count > _MANY:
        check_text_size(len(text) + count * (len(new) - len(old)))
        return ReplacedText(replace_all_occurrences(text, old, new), count, None)
    spans: list[SpanReplacement] = []
    while at != -1:
        spans.append(SpanReplacement(at, at + len(old), new))
        at = text.find(old, at + len(old))
    return _replace_spans(text, spans)


def _missing_error(path: str, text: str, old: str) -> ToolError:
    return ToolError(f"`old` was not found in {path}. {explain_missing_text(text, old)}", kind="invalid_input")


def _ambiguous_error(path: str, count: int, lines: Sequence[int]) -> ToolError:
    shown = ", ".join(map(str, lines[:10])) + (" and more" if len(lines) > 10 else "")
    return ToolError(
        f"`old` occurs {count} times in {path}, at lines {shown}. Include more of the surrounding "
        "lines to make it unique, or set `replace_all`.",
        kind="invalid_input",
    )


def _replace_spans(text: str, spans: Sequence[SpanReplacement]) -> ReplacedText:
    check_text_size(len(text) + sum(len(span.new) - (span.end - span.start) for span in spans))
    return ReplacedText(apply_span_replacements(text, spans), len(spans), spans)


def _count_occurrences(text: str, part: str) -> int:
    """Return how often ``part`` occurs, including overlaps."""
    plain = text.count(part)
    return plain if plain > 1 else len(find_line_numbers_of_text(text, part))


# A whole new text.


def adapt_content_to_original(before: str, content: str, notes: EscapeWarnings | None = None) -> str:
    r"""Return ``content``, which replaces the whole text ``before``, with the line ends and characters of that.

    A line that the model copied stays the same, with invalid bytes. Line ends with ``\r`` in ``content`` are kept as they
    are. A single ``\r`` in a line is no line end.
    """
    notes = notes or EscapeWarnings()
    has_invalid = "\ufffd" in content and not before.isascii() and replace_invalid_bytes(before) != before
    end, mark = find_uniform_line_end(before), detect_line_separator(before)
    has_own_ends = "\r\n" in content or ("\r" in content and (mark == "\r" or "\n" not in content))
    if OPEN not in content and not has_invalid and (end is not None or has_own_ends):
        return content if has_own_ends or end is None else convert_line_ends(content, end)
    shown = _ShownText(before)
    if has_own_ends:
        return shown.restore(content, 0, len(shown.plain), notes)
    lines = split_lines(before, mark)
    view = shown.escaped
    seen = split_lines(replace_invalid_bytes(shown.plain if view is None else view.shown))
    starts = [*accumulate(map(len, split_lines(shown.plain)), initial=0)]
    wanted = split_lines(content)
    default = detect_line_end(before)
    out: list[str] = []
    at = 0
    for block in (*compute_line_replacements(seen, wanted), LineReplacement(len(lines), len(lines), ())):
        out += lines[at : block.first]
        new = shown.restore("".join(block.new), starts[block.first], starts[block.last], notes)
        around = find_line_end_at(lines[block.first - 1], 0) if block.first else default
        out.append(preserve_line_ends("".join(lines[block.first : block.last]), new, around, mark) if new else "")
        at = block.last
    return "".join(out)


# Line operations on a text: replace a range, insert at a line, append.

_FIELDS = {
    "replace": ({"first_line", "last_line", "content"}, "first_line, last_line and content"),
    "insert": ({"line", "content"}, "line and content"),
    "append": ({"content"}, "content"),
}


def check_patch_operations(operations: Sequence[dict[str, Any]]) -> None:
    """Check what can be checked without the file.

    :raises ToolError: ``invalid_input`` for an invalid operation
    """
    for number, operation in enumerate(operations, 1):
        wanted, text = _FIELDS[op := operation["op"]]
        given = operation.keys() - {"op", "expect"}
        if given != wanted:
            raise ToolError(
                f"Operation {number} ({op!r}) has the wrong fields: {', '.join(sorted(given)) or 'none'}. "
                f"Pass {text}, and optionally expect.",
                kind="invalid_input",
            )
        if op != "replace" and not operation["content"]:
            raise ToolError(
                f"Operation {number} has an empty `content`. Pass the lines to add; a blank line is '\\n'.",
                kind="invalid_input",
            )


def convert_patch_operations(
    text: str, operations: Sequence[dict[str, Any]], notes: EscapeWarnings | None = None
) -> list[LineReplacement]:
    """Return the changes of checked ``operations``. All line numbers refer to ``text``.

    New lines get the ends of the lines that they replace, or of the line before. A text without a final line end stays
    without one.

    :raises ToolError: ``invalid_input`` if lines do not exist or overlap, ``conflict`` if ``expect`` does not match
    """
    patched = PatchedText(text, notes or EscapeWarnings())
    blocks = sorted(
        (patched.build_line_replacement(number, operation) for number, operation in enumerate(operations, 1)),
        key=lambda block: (block.first, block.last),
    )
    for before, block in pairwise(blocks):
        if block.first < before.last:
            raise ToolError(
                f"Two operations change line {block.first + 1}. Change each line in one operation only.",
                kind="invalid_input",
            )
    return patched.merge_adjacent_replacements(blocks)


def apply_line_replacements(text: str, blocks: Sequence[LineReplacement]) -> str:
    """Return ``text`` with ``blocks`` applied."""
    lines = split_lines(text, detect_line_separator(text))
    out: list[str] = []
    line = at = 0
    for block in blocks:
        start = at + count_line_characters(lines, line, block.first)
        out += (text[at:start], *block.new)
        line, at = block.last, start + count_line_characters(lines, block.first, block.last)
    return "".join((*out, text[at:]))


@dataclasses.dataclass(slots=True)
class PatchedText:
    """A text whose lines are replaced.

    :ivar lines: its lines with their ends
    :ivar end: the line end that most lines have
    """

    text: str
    notes: EscapeWarnings
    lines: Sequence[str] = dataclasses.field(init=False)
    end: str = dataclasses.field(init=False)
    _shown: _ShownText | None = dataclasses.field(default=None, init=False)
    _starts: list[int] = dataclasses.field(default_factory=list[int], init=False)

    def __post_init__(self) -> None:
        self.lines = split_lines(self.text, detect_line_separator(self.text))
        self.end = detect_line_end(self.text)

    def merge_adjacent_replacements(
        self, blocks: Iterable[LineReplacement], *, has_end: bool | None = None
    ) -> list[LineReplacement]:
        """Return ``blocks``, which ascend and do not overlap, without any that touch each other.

        :param has_end: whether the last line gets a line end; None keeps what it has
        """
        lines, joined = self.lines, list[LineReplacement]()
        for block in blocks:
            if joined and block.first == joined[-1].last:
                joined[-1] = LineReplacement(joined[-1].first, block.last, joined[-1].new + block.new)
            else:
                joined.append(block)
        had_end = not lines or lines[-1].endswith(self.end[-1])
        has_end = had_end if has_end is None else has_end
        if lines and has_end != had_end and (not joined or joined[-1].last < len(lines)):
            joined.append(LineReplacement(len(lines) - 1, len(lines), (lines[-1].rstrip("\r\n") + self.end,)))
        if joined and joined[-1].last == len(lines) and joined[-1].new and not (had_end and has_end):
            tail = joined[-1]
            if tail.first == len(lines) and not had_end:
                tail = LineReplacement(tail.first - 1, tail.last, (lines[-1] + self.end, *tail.new))
            last = tail.new[-1] if has_end else tail.new[-1].rstrip("\r\n")
            joined[-1] = LineReplacement(tail.first, tail.last, (*tail.new[:-1], last))
        return joined

    def build_line_replacement(self, number: int, operation: dict[str, Any]) -> LineReplacement:
        """Return the change of one operation."""
        op, total = operation["op"], len(self.lines)
        if op == "replace":
            first, last = operation["first_line"] - 1, operation["last_line"]
            if not first < last <= total:
                raise ToolError(
                    f"The range of operation {number} is invalid: lines {first + 1} to {last}. The file has {total} lines. "
                    "Correct the numbers.",
                    kind="invalid_input",
                )
            _check_old_lines(number, operation, self.lines[first:last], f"lines {first + 1} to {last}")
        elif op == "insert":
            first = last = operation["line"] - 1
            if first > total:
                raise ToolError(
                    f"Operation {number} inserts before line {first + 1}, but the file has {total} lines. "
                    f"Use at most {total + 1}, or op 'append'.",
                    kind="invalid_input",
                )
            _check_old_lines(number, operation, self.lines[first : first + 1], f"line {first + 1}")
        else:
            first = last = total
            _check_old_lines(number, operation, self.lines[-1:], "the last line")
        return LineReplacement(first, last, self.fit_new_lines(operation["content"], first, last))

    def fit_new_lines(self, content: str, first: int, last: int) -> tuple[str, ...]:
        """Return the lines of ``content`` with the ends and characters of the lines that they replace."""
        new = "".join(f"{line}\n" for line in _content_lines(content))
        if OPEN in new:
            if self._shown is None:
                self._shown = _ShownText(self.text)
                self._starts = [*accumulate(map(len, split_lines(self._shown.plain)), initial=0)]
            new = self._shown.restore(new, self._starts[first], self._starts[last], self.notes)
        before = self.lines[first - 1] if first else ""
        end = find_line_end_at(before, 0) if before.endswith(self.end[-1]) else self.end
        fitted = preserve_line_ends("".join(self.lines[first:last]), new, end, self.end[-1])
        return tuple(split_lines(fitted, self.end[-1]))


def _content_lines(content: str) -> list[str]:
    plain = content.replace("\r\n", "\n")
    return plain.removesuffix("\n").split("\n") if plain else []


def _check_old_lines(number: int, operation: dict[str, Any], have: Sequence[str], where: str) -> None:
    if "expect" not in operation:
        return
    want = _content_lines(operation["expect"])
    found = [line.rstrip("\r\n") for line in have]
    shown = replace_invalid_bytes("\n".join(found))
    if want not in (found, shown.split("\n"), neutralise_text(shown).split("\n")):
        raise ToolError(
            f"`expect` of operation {number} does not match {where}: {quote_text_or_length(shown, 500)}. Nothing was changed. "
            "Read the file again and correct the line numbers.",
            kind="conflict",
        )
