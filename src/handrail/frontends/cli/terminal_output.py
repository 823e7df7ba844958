"""All output of the command line: it makes text harmless for a terminal, and keeps every JSON value exact.

Names, paths, titles, errors and outputs come from models, servers, files and programs. Each function that writes escapes
control characters first, also for a pipe, because a pager or log viewer may show it on a terminal later. Two outputs are exact
in a pipe or a file, since programs read them: JSON, which escapes such characters, and a payload (:func:`print_terminal_safe_text`).
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast
from unicodedata import category

from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.frontends.cli.text_layout import MIN_WIDTH, get_terminal_width, measure_display_width, wrap_words

if TYPE_CHECKING:
    from handrail.contract.calls_and_results import Result

# Control characters except newline and tab, and invisible or reordering ones: soft hyphen, zero-width, bidi, tags.
_HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff\ud800-\udfff"
)
# Letters, marks and symbols that look empty or like a blank, although they are printable.
_BLANK = "\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\ufffc\U000e0100-\U000e01ef"
_INERT = compile_regex_lazily(f"[{_HIDDEN}]")
_LOOKS_EMPTY = compile_regex_lazily(f"[{_BLANK}]")
_JSON_ESCAPED = compile_regex_lazily(f"[{_HIDDEN}{_BLANK}]")
_MAX_MARKS = 8
"""Maximum number of combining marks on one letter. Hundreds would cover the lines above and below."""
_MARK_PILE = compile_regex_lazily(rf"[^\x00-\x7f\w\s]{{{_MAX_MARKS + 1},}}")
"""Text that may be a pile of combining marks: neither letters nor blanks."""
NAMES = {"\x1b": "\\e", "\r": "\\r", "\x07": "\\a", "\x08": "\\b", "\x00": "\\0"}
MAX_NAME = 200
"""Maximum characters of a cell that other cells are aligned to."""
MAX_CELL = 8_000
"""Maximum characters of the last cell of a row."""


def escape_for_terminal(text: str) -> str:
    """Return ``text`` with control and invisible characters escaped, so that it cannot control a terminal."""
    shown = _INERT.sub(_escape_match, text.replace("\r\n", "\n"))
    return shown if shown.isascii() else _MARK_PILE.sub(partial(_escape_excess_marks, _escape_character), shown)


def escape_invisible_characters(text: str) -> str:
    """Return ``text`` like :func:`escape_for_terminal`, with characters that look empty escaped too.

    Use it for text by which the user makes a decision.
    """
    if all(line.isprintable() for line in text.split("\n")) and _LOOKS_EMPTY.search(text) is None:
        return escape_for_terminal(text)
    return escape_for_terminal(
        "".join(
            c if c in "\n\t" or (c.isprintable() and _LOOKS_EMPTY.match(c) is None) else _escape_character(c)
            for c in text
        )
    )


def escape_to_one_line(text: str, most: int | None = None) -> str:
    """Return untrusted text as one line, escaped like :func:`escape_invisible_characters`.

    :param most: maximum characters; the number of the others follows
    """
    left = 0 if most is None else len(text) - most
    shown = escape_invisible_characters(text[:most] if left > 0 else text).replace("\n", "\\n").replace("\t", "\\t")
    return f"{shown}… ({left:,} more)" if left > 0 else shown


def _escape_to_one_line(text: str) -> str:
    return escape_for_terminal(text).replace("\n", "\\n").replace("\t", "\\t")


def format_terminal_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON, with ``\\u`` escapes for characters that could control a terminal."""
    text = _JSON_ESCAPED.sub(
        lambda match: _json_escape(match.group()), json.dumps(value, ensure_ascii=False, indent=indent, default=str)
    )
    return text if text.isascii() else _MARK_PILE.sub(partial(_escape_excess_marks, _json_escape), text)


def _json_escape(character: str) -> str:
    return "\\u007f" if character == "\x7f" else json.dumps(character)[1:-1]


def _escape_excess_marks(escape: Callable[[str], str], match: re.Match[str]) -> str:
    """Return a run of characters with the excess marks on one letter escaped."""
    marks, pieces = 0, list[str]()
    for character in match.group():
        marks = marks + 1 if category(character) in ("Mn", "Me") else 0
        pieces.append(character if marks <= _MAX_MARKS else escape(character))
    return "".join(pieces)


def _escape_match(match: re.Match[str]) -> str:
    return _escape_character(match.group())


def _escape_character(character: str) -> str:
    code = ord(character)
    return NAMES.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{{{code:x}}}")


def print_escaped_line(text: str = "") -> None:
    """Write one line, escaped. A terminal gets it wrapped at words. Text in it cannot place a line at the left edge."""
    _write_wrapped(_escape_to_one_line(text))


def print_escaped_lines(text: str) -> None:
    """Write lines, escaped. A terminal gets them wrapped at words."""
    _write_wrapped(escape_for_terminal(text))


def _write_wrapped(text: str) -> None:
    if sys.stdout.isatty():
        width = get_terminal_width(sys.stdout)
        text = "\n".join(piece for line in text.split("\n") for piece in _wrap_note(line, width))
    sys.stdout.write(text + "\n")


def print_terminal_safe_text(text: str, end: str = "\n") -> None:
    """Write requested text, such as a file's: escaped on a terminal, exact in a pipe or a file."""
    sys.stdout.write((escape_for_terminal(text) if sys.stdout.isatty() else text) + end)


def print_stderr_note(text: str) -> None:
    """Write a note to stderr. Its further lines are indented, so that none looks like another note.

    If stderr takes no output (a full disk, a closed pipe), the note is lost without an error.
    """
    first, *further = escape_for_terminal(text).replace("\t", "\\t").split("\n")
    print_stderr_block(
        "\n".join([first, *(line if not line or line.startswith("  ") else f"  {line}" for line in further)])
    )


def print_stderr_block(text: str) -> None:
    """Write lines to stderr, escaped, with the error handling of :func:`print_stderr_note`. A terminal gets them wrapped at words."""
    shown = escape_for_terminal(text)
    if sys.stderr.isatty():
        width = get_terminal_width(sys.stderr)
        shown = "\n".join(piece for line in shown.split("\n") for piece in _wrap_note(line, width))
    with suppress(OSError):
        sys.stderr.write(shown + "\n")
        sys.stderr.flush()


def _wrap_note(line: str, width: int) -> list[str]:
    """Return a line of a note in lines for a terminal. A command to copy at its end stays whole, in a separate line."""
    indent = "  " + " " * (len(line) - len(line.lstrip()))
    text, found, command = line.rpartition(": handrail ")
    if not found or measure_display_width(line) <= width:
        text, found = line, ""
    first, *further = wrap_words(text + found[:1], width)
    lines = [first, *(f"{indent}{piece}" for part in further for piece in wrap_words(part, width - len(indent)))]
    return [*lines, f"{indent}handrail {command}"] if found else lines


def print_prompt(text: str) -> None:
    """Write a prompt for the user's input."""
    sys.stderr.write(escape_for_terminal(text))
    sys.stderr.flush()


def read_line_with_editing(prompt: str) -> str:
    """Read a line from the terminal, with the editing and the history of Python's readline if it is there.

    :raises EOFError: at the end of the input
    """
    with suppress(ImportError):
        import_module("readline")  # input() then uses it
    return input(escape_for_terminal(prompt))


def ask_for_line(question: str) -> str:
    """Ask a question and return the line that the user types, which may be empty."""
    import click

    return str(click.prompt(escape_for_terminal(question), default="", show_default=False))


def ask_yes_or_no(question: str, *, err: bool = False) -> bool:
    """Ask the user a yes-or-no question, and return the answer.

    :raises click.Abort: if the input ends
    """
    import click

    return click.confirm(escape_for_terminal(question), default=False, err=err)


def print_json(value: Any, *, lines: bool = False) -> None:
    """Write one JSON value: indented on a terminal, one line otherwise.

    :param lines: write one line also on a terminal
    """
    indent = 2 if not lines and sys.stdout.isatty() else None
    sys.stdout.write(format_terminal_json(value, indent) + "\n")


def print_result(result: Result) -> None:
    """Print a result for the user: its data on stdout, its error and notes on stderr."""
    if result.data is not None:
        # Write all at once, also if Python does not buffer, so that a reader which stops early has got all of it.
        width = get_terminal_width(sys.stdout) if sys.stdout.isatty() else None
        print_terminal_safe_text("\n".join(format_data_as_lines(result.data, width)))
    sys.stdout.flush()
    if not result.ok:
        print_stderr_note(f"{result.error_kind}: {result.error_text}")
    if result.metadata.get("truncated"):
        whole = result.metadata.get("output_path")
        print_stderr_note(f"The output is truncated.{f' The full output is in {whole}.' if whole else ''}")
    if "log_error" in result.metadata:
        print_stderr_note(f"warning: The outcome could not be recorded: {result.metadata['log_error']}")


def format_data_as_lines(data: Any, width: int | None = None) -> list[str]:
    """Return JSON data as readable lines. A text of several lines, such as a file's, is not changed.

    :param width: the columns that names with their values, and entries of lists, are wrapped to; None for one line each
    """
    if isinstance(data, str):
        return [data.removesuffix("\n")]
    if isinstance(data, Mapping):
        lines: list[str] = []
        room = None if width is None else max(MIN_WIDTH, width - 2)
        for key, value in cast("Mapping[str, Any]", data).items():
            inner = format_data_as_lines(value)
            if len(inner) == 1 and "\n" not in inner[0]:
                lines += _wrap_data_line(f"{key}: {inner[0]}", width)
            else:
                lines.append(f"{key}:")
                blocks = inner if room is None else format_data_as_lines(value, room)
                lines += [f"  {part}" for block in blocks for part in block.split("\n")]
        return lines or ["{}"]
    if isinstance(data, Sequence):
        items = [_compact(item) for item in cast("Sequence[Any]", data)]
        return ["[]"] if not items else [part for item in items for part in _wrap_data_line(item, width)]
    return [_compact(data)]


def _wrap_data_line(line: str, width: int | None) -> list[str]:
    return [line] if width is None or "\n" in line else _wrap_note(escape_for_terminal(line), width)


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


MAX_SHOWN_CHARACTERS = 160


def shorten(text: str, most: int = MAX_SHOWN_CHARACTERS) -> str:
    """Return text as one line of at most ``most`` characters, with the number of left-out ones."""
    line = text.replace("\n", "\\n")
    return line if len(line) <= most else f"{line[:most]}… ({len(line) - most:,} more)"


_DAY_NS = 86_400 * 10**9
_UNITS = ((_DAY_NS, "d"), (3_600 * 10**9, "h"), (60 * 10**9, "min"), (10**9, "s"))


def format_time_since(at_ns: int) -> str:
    """Return the time since ``at_ns`` in its largest unit."""
    passed = max(0, time.time_ns() - at_ns)
    for size, unit in _UNITS:
        if passed >= size:
            return f"{passed // size} {unit} ago"
    return "now"


def first_sentence(text: str) -> str:
    """Return the first sentence of a description."""
    line = " ".join(text.split())
    return line if (end := re.search(r"[.!?](?= [A-Z])", line)) is None else line[: end.end()]


def format_byte_count(count: int) -> str:
    """Return a number of bytes in a readable unit."""
    if count < 1024:
        return f"{count} bytes"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            break
    return f"{size:.1f} {unit}"


class ProgressLine:
    """A line on stderr that shows the progress of a long copy, on a terminal only."""

    _INTERVAL_S = 0.2

    def __enter__(self) -> ProgressLine:
        self._shows = sys.stderr.isatty()
        self._next = 0.0
        self._shown = False
        return self

    def __exit__(self, *exc: object) -> None:
        if self._shown:
            self._write("")

    def show(self, what: str, done: int, total: int) -> None:
        """Show how many bytes of how many are copied."""
        percent = 100 if not total else done * 100 // total
        self._update(f"{what}: {percent} % of {format_byte_count(total)}")

    def show_count(self, what: str, count: int) -> None:
        """Show a number of items."""
        self._update(f"{count:,} {what}")

    def _update(self, text: str) -> None:
        if self._shows and (now := time.monotonic()) >= self._next:
            self._next = now + self._INTERVAL_S
            self._write(text)
            self._shown = bool(text)

    @staticmethod
    def _write(text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(f"\r\x1b[K{_escape_to_one_line(text)}")
            sys.stderr.flush()
