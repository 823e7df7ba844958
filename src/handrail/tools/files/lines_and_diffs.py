"""Text as lines: line ends, the splice of an edit, its unified diff, and hints about a text that was not found."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import accumulate

from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.text_encodings import replace_invalid_bytes
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

MAX_TEXT = 16 * 1024 * 1024
MAX_LINES = 1_000_000
"""The most lines of a file that is edited. Freeing them is one native step, which blocks the interpreter."""
MAX_DIFF_LINES = 200
_MAX_DIFF_LINE = 1_000
_CONTEXT = 3
_REFINED = 2_000
"""The most changed lines for which a minimal difference is worth its quadratic search."""
_PIECE = 256 * 1024
"""The characters that one native call processes. It blocks the interpreter meanwhile, in any thread."""
_ANY_LINE = compile_regex_lazily(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_LINES = 64 * 1024
"""The lines that one native call processes."""


def detect_line_separator(text: str) -> str:
    r"""Return the character at the end of each line: ``\n``, or ``\r`` in a text without any ``\n``."""
    return "\r" if "\r" in text and "\n" not in text else "\n"


def split_lines(text: str, mark: str = "\n") -> list[str]:
    """Split a text into lines with their ends, at each ``mark`` (see :func:`detect_line_separator`), as in ``read``."""
    lines: list[str] = []
    at = 0
    while at < len(text):
        end = text.find(mark, at + _PIECE) + 1 or len(text)
        parts = text[at:end].split(mark)
        lines += [f"{part}{mark}" for part in parts[:-1]]
        if parts[-1]:
            lines.append(parts[-1])
        at = end
    return lines


def find_uniform_line_end(text: str) -> str | None:
    """Return the line end that all lines of ``text`` have; None if they differ."""
    if "\r" not in text:
        return "\n"
    lines, windows = text.count("\n"), text.count("\r\n")
    if not lines:
        return "\r"
    return "\r\n" if windows == lines else None if windows else "\n"


def detect_line_end(text: str) -> str:
    """Return the line end that most lines of ``text`` have."""
    return find_uniform_line_end(text) or ("\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n")


def convert_line_ends(text: str, end: str) -> str:
    """Replace every line end of ``text`` by ``end``."""
    plain = text.replace("\r\n", "\n")
    return plain if end == "\n" else plain.replace("\n", end)


def normalise_line_ends(text: str) -> str:
    r"""Return ``text`` with ``\n`` at the end of each line, as ``read`` shows it."""
    return text.replace("\r", "\n") if detect_line_separator(text) == "\r" else text.replace("\r\n", "\n")


def describe_line_end_change(before: str, after: str) -> str | None:
    """Return the line ends of a changed text, and those before if they were others; None if all were and are LF."""
    if "\r" not in before and "\r" not in after:
        return None
    (was, old), (now, new) = _describe_ends(before), _describe_ends(after)
    if old and new and was != now:
        return f"changed from {old} to {new}"
    return None if now in (("LF",), ()) else new


def _describe_ends(text: str) -> tuple[tuple[str, ...], str]:
    """Return the kinds of line ends in ``text``, and a text about them."""
    windows, lines = text.count("\r\n"), text.count("\n")
    counts = {
        "CRLF": windows,
        "LF": lines - windows,
        "CR": text.count("\r") if detect_line_separator(text) == "\r" else 0,
    }
    kinds = tuple(kind for kind, count in counts.items() if count)
    if len(kinds) < 2:
        return kinds, "".join(kinds)
    return kinds, "mixed (" + ", ".join(f"{counts[kind]} {kind}" for kind in kinds) + ")"


def preserve_line_ends(replaced: str, new: str, end: str, mark: str = "\n") -> str:
    r"""Return ``new`` with the line ends of the lines ``replaced``.

    An equal line keeps its end. Any other line takes the end of the line that it replaces.

    :param end: for a line that replaces none
    :param mark: as in :func:`split_lines`; empty if ``\r`` alone ends a line as well
    """
    if mark:
        before = split_lines(replaced, mark)
        ends = [_line_end(line, mark) for line in before]
    else:
        before = [match[0] for match in _ANY_LINE.finditer(replaced)]
        ends = [line[len(line.rstrip("\r\n")) :] for line in before]
    lines = convert_line_ends(new, "\n").split("\n")
    kinds = set(filter(None, ends))
    if len(kinds) < 2:
        return (kinds.pop() if kinds else end).join(lines)
    bodies = [line.removesuffix(one) for line, one in zip(before, ends, strict=True)]
    if ends[-1]:
        bodies.append("")
        ends.append("")
    most = min(len(bodies), len(lines))
    head = next((n for n in range(most) if bodies[n] != lines[n]), most)
    tail = next((n for n in range(most - head) if bodies[-1 - n] != lines[-1 - n]), most - head)
    out: list[str] = []
    for number, line in enumerate(lines[:-1]):
        in_tail = number >= len(lines) - tail
        old = number - len(lines) + len(bodies) if in_tail else min(number, len(bodies) - tail - 1)
        if number < head or old >= head:
            end = ends[old] or end
        out += (line, end)
    return "".join((*out, lines[-1]))


def _line_end(line: str, mark: str) -> str:
    if not line.endswith(mark):
        return ""
    return "\r\n" if line.endswith("\r\n") else mark


def find_line_end_at(text: str, at: int) -> str:
    """Return the end of the line around a position, or of the line before it if that line has none."""
    mark = detect_line_separator(text)
    place = text.find(mark, at)
    if place == -1:
        place = text.rfind(mark, 0, at)
    if place == -1:
        return "\n"
    return "\r\n" if mark == "\n" and place and text[place - 1] == "\r" else mark


class SpanReplacement(Struct, frozen=True):
    """The characters ``[start, end)`` and their replacement."""

    start: int
    end: int
    new: str


class LineReplacement(Struct, frozen=True):
    """The lines ``[first, last)``, counted from 0, and their replacement."""

    first: int
    last: int
    new: tuple[str, ...]


def check_line_count(path: str, data: bytes) -> None:
    """Check that a file has at most ``MAX_LINES`` lines.

    :raises ToolError: ``limit`` otherwise
    """
    if (count := data.count(b"\n")) > MAX_LINES:
        raise ToolError(
            f"{path} has {count:,} lines. The maximum for edits is {MAX_LINES:,}. Change it with a program in bash.",
            kind="limit",
        )


def check_text_size(characters: int) -> None:
    """Check that an edited text has at most ``MAX_TEXT`` characters.

    :raises ToolError: ``limit`` otherwise
    """
    if characters > MAX_TEXT:
        raise ToolError(
            f"The edited text would have {characters:,} characters. The maximum is {MAX_TEXT:,}. Replace less at a time.",
            kind="limit",
        )


def apply_span_replacements(text: str, spans: Sequence[SpanReplacement]) -> str:
    """Replace each span of ``text``. Spans ascend and do not overlap."""
    parts: list[str] = []
    at = 0
    for span in spans:
        parts += (text[at : span.start], span.new)
        at = span.end
    parts.append(text[at:])
    return "".join(parts)


def replace_all_occurrences(text: str, old: str, new: str) -> str:
    """Return what ``text.replace(old, new)`` returns."""
    step = max(_PIECE, 2 * len(old))
    out: list[str] = []
    at = 0
    while len(text) - at > step:
        *found, rest = text[at : at + step].split(old)
        if found:
            out += (new.join(found), new)
            at += step - len(rest)
        else:  # an occurrence may begin at its end
            out.append(text[at : at + step - len(old) + 1])
            at += step - len(old) + 1
    out.append(text[at:].replace(old, new))
    return "".join(out)


def find_replaced_lines(text: str, spans: Sequence[SpanReplacement]) -> list[LineReplacement]:
    """Return the whole lines that ``spans`` change."""
    mark = detect_line_separator(text)
    lines = split_lines(text, mark)
    starts = [0]
    for at in range(0, len(lines), _LINES):
        starts += accumulate(map(len, lines[at : at + _LINES]), initial=starts.pop())
    found: list[LineReplacement] = []
    pending: list[SpanReplacement] = []
    first = last = 0

    def close() -> None:
        if pending:
            base, end = starts[first], starts[last]
            moved = [SpanReplacement(s.start - base, s.end - base, s.new) for s in pending]
            found.append(
                _trim_block(
                    lines,
                    LineReplacement(
                        first, last, tuple(split_lines(apply_span_replacements(text[base:end], moved), mark))
                    ),
                )
            )

    for span in spans:
        begins = min(bisect_right(starts, span.start) - 1, len(lines))
        ends = min(bisect_right(starts, span.end), len(lines))
        if pending and begins < last:
            last = max(last, ends)
            pending.append(span)
        else:
            close()
            pending = [span]
            first, last = begins, ends
    close()
    return [block for block in found if block.first != block.last or block.new]


def compute_line_replacements(before: Sequence[str], after: Sequence[str]) -> list[LineReplacement]:
    """Return the blocks that turn ``before`` into ``after``: minimal if cheap to compute, else one block."""
    whole = _trim_block(before, LineReplacement(0, len(before), tuple(after)))
    old = before[whole.first : whole.last]
    if not old and not whole.new:
        return []
    if len(old) + len(whole.new) > _REFINED:
        return [whole]
    return [
        LineReplacement(whole.first + i1, whole.first + i2, whole.new[j1:j2])
        for tag, i1, i2, j1, j2 in SequenceMatcher(None, old, whole.new).get_opcodes()
        if tag != "equal"
    ]


def _trim_block(before: Sequence[str], block: LineReplacement) -> LineReplacement:
    first, last, new = block.first, block.last, block.new
    start, end = 0, len(new)
    while first < last and start < end and before[first] == new[start]:
        first, start = first + 1, start + 1
    while first < last and start < end and before[last - 1] == new[end - 1]:
        last, end = last - 1, end - 1
    return LineReplacement(first, last, new[start:end])


class UnifiedDiff(Struct, frozen=True):
    """A unified diff of at most :data:`MAX_DIFF_LINES` lines. ``left_out`` counts the further ones."""

    text: str
    added: int
    removed: int
    left_out: int = 0

    def to_data(self) -> dict[str, object]:
        """Return the diff as members of a tool's data."""
        found: dict[str, object] = {"diff": self.text, "lines_added": self.added, "lines_removed": self.removed}
        if self.left_out:
            found["omitted_diff_lines"] = self.left_out
        return found


def make_diff_of_replacements(
    path: str, before: Sequence[str], blocks: Sequence[LineReplacement], *, created: bool = False, mark: str = "\n"
) -> UnifiedDiff:
    r"""Return the unified diff of ``blocks``, with three lines of context.

    The blocks ascend and do not touch each other. If a block changes line ends, the diff shows each ``\r``.
    """
    added = sum(len(b.new) for b in blocks)
    removed = sum(b.last - b.first for b in blocks)
    if not blocks:
        return UnifiedDiff("", 0, 0)
    out = [f"--- {'/dev/null' if created else 'a/' + path}", f"+++ b/{path}"]
    total = 2
    shift = 0
    for group in _group_blocks(blocks):
        low = max(group[0].first - _CONTEXT, 0)
        high = min(group[-1].last + _CONTEXT, len(before))
        grown = sum(len(b.new) - (b.last - b.first) for b in group)
        out.append(f"@@ -{_range(low, high - low)} +{_range(low + shift, high - low + grown)} @@")
        total += 1
        at = low
        for block in group:
            parts = (
                (" ", before[at : block.first]),
                ("-", before[block.first : block.last]),
                ("+", block.new),
            )
            total += sum(len(lines) for _, lines in parts)
            ends_differ = _changes_line_ends(parts[1][1], parts[2][1], mark)
            for sign, lines in parts:
                _append(out, sign, lines, mark, keep_return=ends_differ and sign != " ")
            at = block.last
        total += high - at
        _append(out, " ", before[at:high], mark)
        shift += grown
    out = out[: MAX_DIFF_LINES + 2]
    left_out = max(total - MAX_DIFF_LINES - 2, 0)
    if left_out:
        out.append(f"… {left_out} more lines of this diff are not shown")
    return UnifiedDiff(replace_invalid_bytes("\n".join(out)), added, removed, left_out)


def make_diff_of_texts(path: str, before: str, after: str, *, created: bool) -> UnifiedDiff:
    """Return the unified diff of two texts, or only its counts if one has too many lines."""
    removed, added = before.count("\n"), after.count("\n")
    if max(removed, added) > MAX_LINES:
        return UnifiedDiff("", added, removed, added + removed)
    mark = detect_line_separator(before or after)
    lines = split_lines(before, mark)
    blocks = compute_line_replacements(lines, split_lines(after, mark))
    return make_diff_of_replacements(path, lines, blocks, created=created, mark=mark)


def count_line_characters(lines: Sequence[str], first: int, last: int) -> int:
    """Return the number of characters in ``lines[first:last]``."""
    return sum(sum(map(len, lines[at : min(at + _LINES, last)])) for at in range(first, last, _LINES))


def _group_blocks(blocks: Sequence[LineReplacement]) -> list[list[LineReplacement]]:
    groups: list[list[LineReplacement]] = []
    for block in blocks:
        if groups and block.first - groups[-1][-1].last <= 2 * _CONTEXT:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _range(start: int, length: int) -> str:
    if length == 1:
        return str(start + 1)
    return f"{start + 1 if length else start},{length}"


def _changes_line_ends(old: Sequence[str], new: Sequence[str], mark: str) -> bool:
    """Return whether lines get other ends."""
    ends = [{end for line in lines[:MAX_DIFF_LINES] if (end := _line_end(line, mark))} for lines in (old, new)]
    if all(ends) and ends[0] != ends[1]:
        return True
    bodies = [[line.rstrip("\r\n") for line in lines[:MAX_DIFF_LINES]] for lines in (old, new)]
    return bodies[0] == bodies[1]


def _append(out: list[str], sign: str, lines: Sequence[str], mark: str, *, keep_return: bool = False) -> None:
    for line in lines:
        if len(out) > MAX_DIFF_LINES + 2:
            return
        body = line.removesuffix(mark)
        if not keep_return:
            body = body.removesuffix("\r")
        if len(body) > _MAX_DIFF_LINE:
            body = f"{body[:_MAX_DIFF_LINE]}… ({len(body) - _MAX_DIFF_LINE} more characters)"
        out.append(sign + body)
        if not line.endswith(mark):
            out.append("\\ No newline at end of file")


def find_line_numbers_of_text(text: str, part: str, at_most: int = 10) -> list[int]:
    """Return the lines, counted from 1, where the first occurrences of ``part`` begin, including overlaps."""
    found: list[int] = []
    at, line, counted = text.find(part), 1, 0
    while at != -1 and len(found) < at_most:
        line += text.count("\n", counted, at)
        counted = at
        found.append(line)
        at = text.find(part, at + 1)
    return found


def explain_missing_text(text: str, part: str) -> str:
    """Explain why ``part`` was not found: other whitespace, other case, or the most similar line."""
    if "\ufffd" in part:
        return "`old` contains U+FFFD, which replaces bytes that are not UTF-8. Leave out those characters."
    mark = detect_line_separator(text)
    lines = [line.removesuffix(_line_end(line, mark)) for line in split_lines(text, mark)]
    wanted = part.replace("\r\n", "\n").split("\n")
    while len(wanted) > 1 and not wanted[-1].strip():
        wanted.pop()
    while len(wanted) > 1 and not wanted[0].strip():
        wanted.pop(0)
    stripped = [line.strip() for line in lines]
    bare = [line.strip() for line in wanted]
    index = _find_line_sequence(stripped, bare) if any(bare) else None
    if index is not None:
        for offset, (have, want) in enumerate(zip(lines[index : index + len(bare)], wanted, strict=True)):
            if have != want:
                number = index + offset + 1
                return f"Line {number} differs only in whitespace: it is {_quote_line(have)}, not {_quote_line(want)}."
        return f"Lines {index + 1} to {index + len(bare)} match except for blank lines around them."
    lower = "".join(text[at : at + _PIECE].lower() for at in range(0, len(text), _PIECE))
    at = lower.find(part.lower())
    if at != -1:
        return f"Line {text.count(chr(10), 0, at) + 1} has it in a different case."
    near = nearest_names(max(bare, key=len), dict.fromkeys(filter(None, stripped[:2_000])), 1, cutoff=0.6)
    if near:
        index = stripped.index(near[0])
        return (
            f"The most similar line is {index + 1}: {_quote_line(lines[index])}. Read the file again and copy the text."
        )
    return "No similar text exists. Read the file again and copy the text exactly."


def _find_line_sequence(lines: Sequence[str], wanted: Sequence[str]) -> int | None:
    """Return the first index at which the lines ``wanted`` follow each other, or None. Takes linear time."""
    joined, sought = ("\n".join(("", *found, "")) for found in (lines, wanted))
    at = joined.find(sought)
    index = joined.count("\n", 0, at) if at != -1 else 0
    return index if at != -1 and list(lines[index : index + len(wanted)]) == list(wanted) else None


def _quote_line(line: str) -> str:
    return quote_text_or_length(replace_invalid_bytes(line), 200)
