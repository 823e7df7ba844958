"""How things look on a terminal: results as text, nothing that could move the cursor, colours where wanted."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

    from handrail.contract.result import Result

# Control characters but newline and tab, and what is invisible or reorders text: soft hyphen, zero-width, bidi, tags.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)
# Letters, marks and symbols that are drawn as nothing or as a blank, though they count as printable.
_LIKE_NOTHING = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\ufffc\U000e0100-\U000e01ef]"
)
NAMES = {"\x1b": "\\e", "\r": "\\r", "\x07": "\\a", "\x08": "\\b", "\x00": "\\0"}


def visible(text: str) -> str:
    """``text`` with every control or invisible character written out, so that it cannot act on a terminal."""
    return _HIDDEN.sub(_name, text.replace("\r\n", "\n"))


def spelled_out(text: str) -> str:
    """``text`` for somebody who decides by it: :func:`visible`, and also what looks like a blank or like nothing."""
    if all(line.isprintable() for line in text.split("\n")) and _LIKE_NOTHING.search(text) is None:
        return text
    return "".join(
        c if c in "\n\t" or (c.isprintable() and _LIKE_NOTHING.match(c) is None) else _spelled(c) for c in text
    )


def _name(match: re.Match[str]) -> str:
    return _spelled(match.group())


def _spelled(character: str) -> str:
    code = ord(character)
    return NAMES.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{{{code:x}}}")


def out(text: str = "", *, stream: TextIO | None = None) -> None:
    """Write a line of foreign text: as it is into a pipe or file, made visible on a terminal."""
    to = sys.stdout if stream is None else stream
    to.write((visible(text) if to.isatty() else text) + "\n")


def note(text: str) -> None:
    """A remark beside the output, on stderr. Where that takes nothing (a full disk, a reader that went away) it is lost:
    what is done does not hang on it."""
    with suppress(OSError):
        out(text, stream=sys.stderr)


def out_json(value: Any) -> None:
    """Write one JSON value: laid out on a terminal, one line elsewhere."""
    out(json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None, default=str))


def console(stream: TextIO | None = None) -> Console:
    """A rich console that adds nothing of its own: no markup, no highlighting, no colours where none are wanted."""
    from rich.console import Console

    return Console(
        file=sys.stdout if stream is None else stream, highlight=False, markup=False, emoji=False, soft_wrap=True
    )


def shown_result(result: Result) -> None:
    """Print a result for a person: its data on stdout, what is to be known about it on stderr."""
    if result.data is not None:
        # In one piece, also where Python does not buffer: a reader that stops at what it looked for has had all of it.
        out("\n".join(laid_out(result.data)))
    sys.stdout.flush()
    if not result.ok:
        note(f"{result.error_kind}: {result.error_text}")
    if result.metadata.get("truncated"):
        whole = result.metadata.get("output_path")
        note(f"truncated{f'; the whole output is in {whole}' if whole else ''}")
    if "unrecorded" in result.metadata:
        note(f"warning: the outcome could not be recorded: {result.metadata['unrecorded']}")


def laid_out(data: Any) -> list[str]:
    """JSON-able data as lines a person can read; text stays text."""
    if isinstance(data, str):
        return [data.removesuffix("\n")]
    if isinstance(data, Mapping):
        lines: list[str] = []
        for key, value in cast("Mapping[str, Any]", data).items():
            inner = laid_out(value)
            if len(inner) == 1 and "\n" not in inner[0]:
                lines.append(f"{key}: {inner[0]}")
            else:
                lines.append(f"{key}:")
                lines += [f"  {part}" for block in inner for part in block.split("\n")]
        return lines or ["{}"]
    if isinstance(data, Sequence):
        items = cast("Sequence[Any]", data)
        return ["[]"] if not items else [_compact(item) for item in items]
    return [_compact(data)]


def _compact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def amount(count: int) -> str:
    """Bytes as a person reads them."""
    if count < 1024:
        return f"{count} bytes"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            break
    return f"{size:.1f} {unit}"


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as lines, every column but the last padded to its widest cell."""
    table = [list(row) for row in rows]
    if not table:
        return []
    widths = [max(len(row[index]) for row in table) for index in range(len(table[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in table
    ]
