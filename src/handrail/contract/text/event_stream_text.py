"""A cleaner for streams of server-sent events, of which several servers write a form that strict readers do not take.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

_BOM = b"\xef\xbb\xbf"
_MAX_LINE_BYTES = 32 * 1024 * 1024
"""A longer line passes in pieces as it is."""


class EventStreamCleaner:
    """A cleaner of one stream, which takes bytes in pieces.

    It removes a byte order mark, spaces before a field and events without data. It adds the empty line after an event and
    the field name of a line that is only JSON.

    :param needs_names: whether an event without a name gets the one that its data has as ``type``
    :param repair: corrects the data of one line
    """

    def __init__(self, *, needs_names: bool = False, repair: Callable[[bytes], bytes] | None = None) -> None:
        self._needs_names = needs_names
        self._repair = repair
        self._has_name = False
        self.last_data = b""
        """The data of the last line that has some."""
        self.has_end_mark = False
        """Whether the mark of a complete reply, ``[DONE]``, arrived."""
        self._has_waiting_end_mark = False
        self._waiting: list[bytes] = []
        """The pieces of a line that has no end yet."""
        self._waiting_bytes = 0
        self._is_start = True
        self._data_lines = 0
        """How many lines of data the event has so far."""

    def feed(self, piece: bytes) -> bytes:
        """Return the clean lines that end in ``piece``."""
        self._waiting.append(piece)
        self._waiting_bytes += len(piece)
        if b"\n" not in piece and b"\r" not in piece and self._waiting_bytes <= _MAX_LINE_BYTES:
            return b""
        *lines, rest = self._take_waiting().splitlines(keepends=True) or [b""]
        if rest.endswith(b"\n") or len(rest) > _MAX_LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._waiting, self._waiting_bytes = [rest], len(rest)
        return b"".join(map(self._clean_line, lines)) + self._take_end_mark()

    def close(self) -> bytes:
        """Return the rest of a stream that ended. A whole event counts without the empty line after it."""
        rest = b"".join(map(self._clean_line, self._take_waiting().splitlines(keepends=True))) + self._take_end_mark()
        return rest + b"\n\n" if self._has_whole_data() else rest

    def _take_end_mark(self) -> bytes:
        """Return the end mark after all that came with it. Some servers send the usage behind it."""
        is_waiting, self._has_waiting_end_mark = self._has_waiting_end_mark, False
        return b"\ndata: [DONE]\n\n" if is_waiting else b""

    def _take_waiting(self) -> bytes:
        text = b"".join(self._waiting)
        self._waiting, self._waiting_bytes = [], 0
        if self._is_start:
            text = text.removeprefix(_BOM)
        self._is_start = False
        return text

    def _clean_line(self, line: bytes) -> bytes:
        if not (text := line.strip()):
            self._data_lines, self._has_name = 0, False
            return line
        if text.startswith(b"data:") and (inner := text[5:].lstrip()).startswith(
            b"data:"
        ):  # a proxy added the name again
            text, line = inner, inner + b"\n"
        if text == b"data:":
            return b""
        if text.removeprefix(b"data:").strip(b' "').upper() in (b"[DONE]", b"DONE"):
            self.has_end_mark = self._has_waiting_end_mark = True
            return b""
        is_json = text.startswith(b"{") and text.endswith(b"}")
        is_data = is_json or text.startswith(b"data:")
        separator = b"\n" if is_data and self._has_whole_data() else b""
        self._has_name = (self._has_name and not separator) or text.startswith(b"event:")
        if is_data:
            self._data_lines = 1 if separator else self._data_lines + 1
            self.last_data = text if is_json else text[5:].strip()
            if self._repair is not None and (repaired := self._repair(self.last_data)) != self.last_data:
                self.last_data, line, is_json = repaired, b"data: " + repaired + b"\n", False
            if self._needs_names and not self._has_name:
                separator += self._make_name_line()
        return separator + (b"data: " if is_json else b"") + line.lstrip(b" \t")

    def _make_name_line(self) -> bytes:
        """Return the line with the name of an event by its data; empty if the data has none."""
        self._has_name = True
        try:
            data: Any = json.loads(self.last_data)
        except (ValueError, RecursionError):
            return b""
        fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
        kind: object = fields.get("type") or ("error" if fields.get("error") else None)
        return f"event: {kind}\n".encode() if isinstance(kind, str) and kind.isprintable() else b""

    def _has_whole_data(self) -> bool:
        """Return whether the event has one line of data, which is whole."""
        if self._data_lines != 1 or not self.last_data.endswith((b"}", b"]")):
            return False
        try:
            return isinstance(json.loads(self.last_data), dict | list)
        except (ValueError, RecursionError):
            return False
