"""The renderer of the terminal: texts wrapped at words, Markdown, diffs, and tables, in color only where that is wanted.

Every text that it writes is escaped by :func:`~handrail.frontends.cli.terminal_output.escape_for_terminal`, also in a pipe. Styles are
names such as ``bold`` or ``bold red``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

from handrail.frontends.cli.terminal_output import MAX_CELL, MAX_NAME, escape_for_terminal, escape_to_one_line
from handrail.frontends.cli.text_layout import (
    MIN_WIDTH,
    StyledText,
    fold_text,
    get_terminal_width,
    measure_display_width,
    should_use_color,
    wrap_styled_text,
    wrap_words,
)

if TYPE_CHECKING:
    from handrail.contract.calls_and_results import Result
    from handrail.contract.undo_reports import UndoPathResult, UndoReport

_CODES = {
    "bold": "1",
    "dim": "2",
    "italic": "3",
    "underline": "4",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
"""The codes of a terminal's styles. Only the 8 basic colors, which every theme makes readable."""
_ASCII = str.maketrans(
    {"→": ">", "✗": "x", "✓": "+", "│": "|", "┆": ":", "…": "~", "•": "*", "▌": "|", "─": "-", "·": "-"}
)
"""For a stream that cannot encode the others: one character for each, so that widths stay."""
_MAX_BLANK_LINES = 2
"""The most blank lines in a row of a block. More would push the rest out of view, so their number is shown instead."""
_UNLIMITED = 1 << 30
HEAD_LINES = 6
"""The lines of a result that a view of a run shows."""
DIFF_LINES = 40
_DIFF_STYLES = (("@@", "cyan"), ("+++", "bold"), ("---", "bold"), ("diff ", "bold"), ("+", "green"), ("-", "red"))

Cell = str | StyledText


class TerminalRenderer:
    """A writer of texts for people on one stream.

    :param stream: the stream; None for stdout
    :param width: the columns; None for those of the stream
    """

    def __init__(self, stream: TextIO | None = None, *, width: int | None = None) -> None:
        self.stream = sys.stdout if stream is None else stream
        self.width = get_terminal_width(self.stream) if width is None else width
        self.is_colored = should_use_color(self.stream)
        self._has_status = False
        self._breaks_words = width is not None or self.stream.isatty()
        """Whether words that are too wide are broken. In a pipe they stay whole."""
        self._wraps_rows = self._breaks_words or bool(os.environ.get("COLUMNS"))
        """Whether the rows of a table are wrapped. In a pipe of unknown width, each row is one line."""
        encoding: str | None = getattr(self.stream, "encoding", None)
        self._is_unicode = encoding is None or encoding.lower().replace("-", "") == "utf8"

    # ── texts ────────────────────────────────────────────────────────────────────────────────────

    def print_text(self, *parts: Cell, indent: str = "", further: str | None = None) -> None:
        """Write texts one after the other, wrapped at words. A newline begins another line.

        :param indent: what the first line begins with
        :param further: what further lines begin with; None for the width of ``indent``, at least 2, so that no text can
            place a line of its own at the left edge
        """
        rest = " " * max(2, measure_display_width(indent)) if further is None else further
        room, first_room = self.width - measure_display_width(rest), self.width - measure_display_width(indent)
        first = True
        for line in _split_lines(parts):
            first_width = first_room if first else room
            for piece in wrap_styled_text(line, room, break_words=self._breaks_words, first_width=first_width):
                self.write_line((indent if first else rest, ""), *piece)
                first = False

    def print_block(self, text: str, *, style: str = "", mark: str = "  │ ") -> None:
        """Write the lines of a text, each after ``mark``. A part of a folded line has another mark."""
        room = max(8, self.width - measure_display_width(mark))
        for line in _fold_blank_lines(_lines_of(text)):
            for number, piece in enumerate(fold_text(line, room) if self._breaks_words else (line,)):
                self.write_line((mark.replace("│", "┆") if number else mark, "dim"), (piece, style))

    def print_diff(self, text: str, *, mark: str = "  │ ") -> None:
        """Write a unified diff, with its lines in color."""
        for line in _lines_of(text):
            self.print_block(line, style=choose_diff_line_style(line), mark=mark)

    def print_heading(self, text: str, about: str = "") -> None:
        """Write the heading of a group."""
        self.print_text((text, "bold"), (f"  {about}" if about else "", "dim"))

    def print_markdown(self, text: str, *, indent: str = "") -> None:
        """Write a Markdown text."""
        formatter = MarkdownFormatter()
        for line in text.split("\n"):
            self.print_markdown_line(formatter, line, indent=indent)

    def print_markdown_line(self, formatter: MarkdownFormatter, line: str, *, indent: str = "") -> None:
        """Write the next line of a Markdown text.

        :param formatter: the state of the text so far
        """
        if (made := formatter.format_line(_plain_line(line))) is None:
            return
        first, further, parts, is_code = made
        if is_code:
            self.print_block(parts[0][0], style=parts[0][1], mark=indent + first)
        else:
            self.print_text(*parts, indent=indent + first, further=indent + further)

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def print_call(
        self, mark: Cell, tool: str, arguments: Mapping[str, Any] | None, *notes: Cell, indent: str = ""
    ) -> None:
        """Write one call: its mark, its tool, its subject and notes. A long subject is cut to three lines.

        :param arguments: the arguments; None for those that are not known
        """
        text, style = (mark, "") if isinstance(mark, str) else mark
        subject = "" if arguments is None else format_call_arguments(arguments)
        most = 3 * self.width
        shown = escape_to_one_line(
            subject if len(subject) <= most else f"{subject[:most]}… ({len(subject) - most:,} more)"
        )
        note_parts = [part for note in notes for part in (("  ", ""), note)]
        self.print_text(
            (text, style),
            " ",
            (escape_to_one_line(tool), "bold"),
            f"  {shown}" if shown else "",
            *note_parts,
            indent=indent,
            further=f"{indent}    ",
        )

    def print_result(self, result: Result, *, mark: str = "  │ ") -> None:
        """Write the head of a result: its first lines, its diff, or its error."""
        if not result.ok:
            self.print_text((f"{result.error_text}", ""), indent=mark.replace("│", " "))
            return
        lines, is_diff = format_result_preview(result.data)
        for line in lines:
            piece = _plain_line(line)
            room = self.width - measure_display_width(mark)
            shown = piece if measure_display_width(piece) <= room else f"{fold_text(piece, max(1, room - 1))[0]}…"
            self.write_line((mark, "dim"), (shown, choose_diff_line_style(line) if is_diff else "dim"))
        if result.metadata.get("truncated"):
            path = result.metadata.get("output_path")
            self.print_text(f"The output is truncated.{f' The full output is in {path}.' if path else ''}", indent=mark)

    # ── tables ───────────────────────────────────────────────────────────────────────────────────

    def print_table(
        self, head: Sequence[str], rows: Iterable[Sequence[Cell]], *, right: Iterable[int] = (), indent: str = ""
    ) -> None:
        """Write rows below their headers. Cells that are too wide for the terminal are wrapped at words.

        :param right: the columns that are aligned to the right
        """
        self.print_grouped_table(head, [("", rows)], right=right, indent=indent)

    def print_grouped_table(
        self,
        head: Sequence[str],
        groups: Iterable[tuple[str, Iterable[Sequence[Cell]]]],
        *,
        right: Iterable[int] = (),
        indent: str = "",
    ) -> None:
        """Write several groups of rows with common columns, each below its title."""
        made = [(title, [_clean_row(row) for row in rows]) for title, rows in groups]
        if not (every := [row for _, rows in made for row in rows]):
            return
        widths = _choose_widths(head, every, self.width - len(indent) if self._wraps_rows else _UNLIMITED)
        numbers = set(right)
        self._print_row([(text, "bold") for text in head], widths, numbers, indent)
        for title, rows in made:
            if title and rows:
                self.write_line()
                self.print_text((title, "bold cyan"), indent=indent)
            for row in rows:
                self._print_row(row, widths, numbers, indent)

    def _print_row(self, row: Sequence[StyledText], widths: Sequence[int], right: set[int], indent: str) -> None:
        whole = {"break_words": self._breaks_words}
        cells = [wrap_words(text, width, **whole) for (text, _), width in zip(row, widths, strict=True)]
        first, *further = cells[0]  # indented, so that no name can place a line of its own at the left edge
        cells[0] = [first, *(f"  {piece}" for part in further for piece in wrap_words(part, max(1, widths[0] - 2)))]
        for number in range(max(map(len, cells))):
            line: list[StyledText] = [(indent, "")]
            for column, ((_, style), pieces, width) in enumerate(zip(row, cells, widths, strict=True)):
                piece = pieces[number] if number < len(pieces) else ""
                gap = " " * (width - measure_display_width(piece))
                line += [(gap, ""), (piece, style)] if column in right else [(piece, style), (gap, "")]
                line.append(("  ", ""))
            self.write_line(*_strip_end(line))

    def show_status(self, text: str) -> None:
        """Show a line at the end of a terminal that the next output replaces. Elsewhere, show nothing."""
        if self.is_colored:
            shown = fold_text(escape_to_one_line(text), self.width - 1)[0]
            self.stream.write(f"\r\x1b[K{self.style_text(shown, 'dim')}")
            self.stream.flush()
            self._has_status = True

    def clear_status(self) -> None:
        """Remove the line of :meth:`show_status`."""
        if self._has_status:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
            self._has_status = False

    # ── the only output ──────────────────────────────────────────────────────────────────────────

    def write_line(self, *parts: StyledText) -> None:
        """Write exactly one line of styled texts, escaped."""
        self.clear_status()
        self.stream.write("".join(self.style_text(text, style) for text, style in parts) + "\n")

    def style_text(self, text: str, style: str) -> str:
        """Return a text for one line: escaped, and in its style if the stream has colors."""
        shown = escape_for_terminal(text).replace("\n", "\\n").replace("\t", "    ")
        if not self._is_unicode:
            shown = shown.translate(_ASCII)
        if not shown or not style or not self.is_colored:
            return shown
        return f"\x1b[{';'.join(_CODES[name] for name in style.split())}m{shown}\x1b[0m"


_SUBJECTS = ("command", "path", "pattern", "url", "query", "to", "name", "id", "job_id")
"""Arguments that say what a call is about, from the most telling."""
_MAX_ARGUMENT = 60


def format_call_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call in one line: the value of the one that says most, then the others by name."""
    first = next((name for name in _SUBJECTS if isinstance(arguments.get(name), str) and arguments[name]), None)
    rest = {name: value for name, value in arguments.items() if name != first}
    if first is None and len(rest) == 1:
        ((_, only),) = rest.items()
        return only if isinstance(only, str) else _json(only)
    descriptions = [] if first is None else [str(arguments[first])]
    for name, value in rest.items():
        text = value if isinstance(value, str) else _json(value)
        descriptions.append(f"{name}={text if len(text) <= _MAX_ARGUMENT else f'{text[:_MAX_ARGUMENT]}…'}")
    return "  ".join(descriptions)


def format_result_preview(data: object) -> tuple[list[str], bool]:
    """Return the lines of a result that show most, and whether they are a diff."""
    if isinstance(data, str):
        return _head_lines(data.splitlines()), False
    if not isinstance(data, Mapping):
        return _head_lines([_json(data)]), False
    members = cast("Mapping[str, Any]", data)
    if isinstance(changes := members.get("diff", members.get("patch")), str) and changes:
        hunks = [line for line in changes.splitlines() if not line.startswith(("diff ", "index ", "--- ", "+++ "))]
        return _head_lines(hunks, DIFF_LINES), True
    if "exit_code" in members:
        output = [line for line in _output_text(members).splitlines() if line.strip()]
        code = members["exit_code"]
        return (_head_lines(output) if not code else [f"exit code {code}", *_tail_lines(output)]), False
    for name in ("paths", "matches", "head", "results", "locations", "diagnostics", "edits", "hits"):
        if isinstance(entries := members.get(name), list):
            return _head_lines([_describe_entry(one) for one in cast("list[Any]", entries)]), False
    for name in ("text", "content", "output"):
        if isinstance(members.get(name), str):
            return _head_lines(members[name].splitlines()), False
    return _head_lines([_json(members)]), False


def _output_text(members: Mapping[str, Any]) -> str:
    """Return the output of a program, or the parts that are left of it."""
    return str(members.get("output", f"{members.get('head', '')}\n{members.get('tail', '')}"))


def _describe_entry(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    match = cast("Mapping[str, Any]", entry) if isinstance(entry, Mapping) else None
    if match is None or not {"text", "message"} & match.keys():
        return _json(cast("object", entry))
    place = f"{match['path']}:{match.get('line')}: " if "path" in match else ""
    text = f"{match.get('severity', 'note')}: {match['message']}" if "message" in match else str(match["text"])
    return f"{place}{text}"


def _head_lines(lines: Sequence[str], most: int = HEAD_LINES) -> list[str]:
    return [*lines] if len(lines) <= most else [*lines[: most - 1], f"… {len(lines) - most + 1:,} more lines"]


def _tail_lines(lines: Sequence[str]) -> list[str]:
    most = HEAD_LINES
    return [*lines] if len(lines) <= most else [f"… {len(lines) - most + 1:,} lines before", *lines[1 - most :]]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _fold_blank_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, with the number of blank ones in place of a long run of them."""
    blank = 0
    for line in (*lines, None):
        if line is not None and not line.strip():
            blank += 1
            continue
        if blank > _MAX_BLANK_LINES:
            yield f"({blank:,} blank lines)"
        else:
            yield from [""] * blank
        blank = 0
        if line is not None:
            yield line


def choose_diff_line_style(line: str) -> str:
    """Return the style of a line of a unified diff."""
    return next((style for begin, style in _DIFF_STYLES if line.startswith(begin)), "")


def _lines_of(text: str) -> list[str]:
    return [_plain_line(line) for line in text.replace("\r\n", "\n").split("\n")]


def _plain_line(line: str) -> str:
    """Return a line as it will be written, so that its width is known."""
    return escape_for_terminal(line).expandtabs(4)


def _split_lines(parts: Iterable[Cell]) -> Iterator[list[StyledText]]:
    line: list[StyledText] = []
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        for number, piece in enumerate(_lines_of(text)):
            if number:
                yield line
                line = []
            line.append((piece, style))
    yield line


def _clean_row(row: Sequence[Cell]) -> list[StyledText]:
    given = [(cell, "") if isinstance(cell, str) else cell for cell in row]
    last = len(given) - 1
    return [
        (escape_to_one_line(text, MAX_CELL if at == last else MAX_NAME), style)
        for at, (text, style) in enumerate(given)
    ]


def _strip_end(line: list[StyledText]) -> list[StyledText]:
    while line and not line[-1][0].strip():
        line.pop()
    return line


def _choose_widths(head: Sequence[str], rows: Sequence[Sequence[StyledText]], room: int) -> list[int]:
    """Return the width of each column. If they do not fit, the widest ones shrink, down to their longest word."""
    columns = [[title, *(row[number][0] for row in rows)] for number, title in enumerate(head)]
    widths = [max(map(measure_display_width, column)) for column in columns]
    most = room - 2 * (len(widths) - 1)
    least = [
        min(width, max(measure_display_width(word) for text in column for word in (text.split() or [""])), most // 2)
        for width, column in zip(widths, columns, strict=True)
    ]
    least[-1] = min(least[-1], MIN_WIDTH)
    while (over := sum(widths) - most) > 0:
        wide = max(range(len(widths)), key=lambda number: widths[number] - least[number])
        spare = widths[wide] - least[wide]
        if spare <= 0:
            break
        others = sorted((widths[n] for n in range(len(widths)) if n != wide and widths[n] > least[n]), reverse=True)
        step = widths[wide] - others[0] if others and others[0] < widths[wide] else spare
        widths[wide] -= max(1, min(over, spare, step or 1))
    return widths


# Markdown of a model, line by line as it arrives. Nothing is hidden: an address stays visible, and HTML is text.

_FENCE = re.compile(r"\s{0,3}(```+|~~~+)\s*([\w+-]*)")
_HEADING = re.compile(r"(#{1,6})\s+(.*)$")
_ITEM = re.compile(r"(\s*)([-*+]|\d{1,3}[.)])\s+(.*)$")
_QUOTE = re.compile(r"\s{0,3}>\s?(.*)$")
_LINE = re.compile(r"\s{0,3}([-*_])(\s*\1){2,}\s*$")
_INLINE = re.compile(
    r"(?P<code>`+)(?P<inner>.+?)(?P=code)"
    r"|\*\*(?P<bold>\S(?:.*?\S)?)\*\*|__(?P<bold2>\S(?:.*?\S)?)__"
    r"|(?<![\w*])\*(?P<italic>[^\s*](?:[^*]*[^\s*])?)\*(?!\w)|(?<!\w)_(?P<italic2>[^\s_](?:[^_]*[^\s_])?)_(?!\w)"
    r"|!?\[(?P<text>[^\[\]]*)\]\((?P<link>[^()\s]+)\)"
)
_MAX_LINE = 4_000
"""The most characters of a line that are searched for inline marks."""

FormattedLine = tuple[str, str, list[StyledText], bool]
"""The beginning of the first line, that of further ones, the styled texts, and whether it is a line of code."""


class MarkdownFormatter:
    """A formatter of one Markdown text that gets it line by line."""

    def __init__(self) -> None:
        self._fence = ""

    def format_line(self, line: str) -> FormattedLine | None:
        """Return the next line for a terminal, or None if it shows nothing.

        :param line: an escaped line without tabs
        """
        fence = _FENCE.match(line)
        if self._fence:
            if fence is not None and fence[1].startswith(self._fence) and not line.strip("`~ "):
                self._fence = ""
                return None
            return "  │ ", "  │ ", [(line, "cyan")], True
        if fence is not None:
            self._fence = fence[1]
            return None
        if found := _HEADING.match(line):
            return "", "", [(found[2].rstrip("#").rstrip(), "bold underline" if len(found[1]) == 1 else "bold")], False
        if _LINE.match(line):
            return "", "", [("─" * 20, "dim")], False
        if found := _ITEM.match(line):
            mark = f"{found[1]}{'•' if found[2] in '-*+' else found[2]} "
            return mark, " " * len(mark), format_inline_markdown(found[3]), False
        if found := _QUOTE.match(line):
            return "▌ ", "▌ ", format_inline_markdown(found[1], "dim"), False
        indent = line[: len(line) - len(line.lstrip())]
        return indent, indent, format_inline_markdown(line.lstrip()), False


def format_inline_markdown(text: str, style: str = "") -> list[StyledText]:
    """Return a line of Markdown as styled texts. The address of a link follows its text."""
    parts: list[StyledText] = []
    end = 0
    for found in _INLINE.finditer(text, 0, _MAX_LINE):
        parts.append((text[end : found.start()], style))
        end = found.end()
        if (code := found["inner"]) is not None:
            parts.append((code.strip() or code, f"{style} cyan".strip()))
        elif (bold := found["bold"] or found["bold2"]) is not None:
            parts.append((bold, f"{style} bold".strip()))
        elif (italic := found["italic"] or found["italic2"]) is not None:
            parts.append((italic, f"{style} italic".strip()))
        else:
            shown = found["text"] if found["text"] and found["text"] != found["link"] else ""
            parts.append((shown, style))
            parts.append((f" ({found['link']})" if shown else found["link"], f"{style} underline".strip()))
    return [part for part in (*parts, (text[end:], style)) if part[0]] or [("", style)]


_MOST_UNDONE_PATHS = 50
"""Maximum number of paths in the text; ``--json`` lists all."""


def format_undo_report(report: UndoReport) -> Iterator[str]:
    """Yield the lines for people: the paths, what is not known, and what was done."""
    for one in report.paths[:_MOST_UNDONE_PATHS]:
        yield _format_undone_path(one, is_dry_run=report.is_dry_run)
    if len(report.paths) > _MOST_UNDONE_PATHS:
        yield f"… and {len(report.paths) - _MOST_UNDONE_PATHS:,} more paths (--json lists all)"
    for problem in report.problems:
        yield f"not known: {problem}"
    given_back = report.count("restored") + report.count("removed")
    verb = "Would undo" if report.is_dry_run else "Undid"
    shown = ", ".join(report.calls[:3]) + (f" and {len(report.calls) - 3} more calls" if len(report.calls) > 3 else "")
    if given_back:
        yield f"{verb} {shown}: {given_back:,} {'path' if given_back == 1 else 'paths'}."
    elif report.paths:
        yield (
            f"{verb} nothing of {shown}. `handrail undo --overwrite` also undoes files that changed since, and keeps them. "
            "`handrail undo CALL` undoes another call."
        )
    else:
        yield f"Nothing to undo: the changes of {shown} are already undone."


def _format_undone_path(one: UndoPathResult, *, is_dry_run: bool) -> str:
    verbs = {"restored": "restore", "removed": "remove"}
    outcome = verbs.get(one.outcome, one.outcome) if is_dry_run else one.outcome
    return f"{outcome:<11} {one.path}" + (f": {one.detail}" if one.detail else "")
