"""Where in a reply's text no call begins: in fences of code, and in what a model thinks before it speaks."""

from __future__ import annotations

import re

_FENCE = re.compile(r"[ \t]{0,3}(`{3,}(?=[^`]*$)|~{3,})")
_THOUGHTS = re.compile(r"[ \t]*<(think|thinking)>")
_MOST_SEEN = 80
"""Characters of a line's beginning that are looked at."""


class Quoting:
    """Reads a reply's lines as they come, in pieces of any length."""

    def __init__(self) -> None:
        self._fence: str | None = None
        self._thoughts_end: str | None = None
        self._line = ""
        """The line so far, as far as a fence would show in it."""
        self._tail = ""
        """Its end, in which the end of thoughts may have begun."""

    @property
    def inside(self) -> bool:
        """Whether what comes next, at the beginning of a line, stands in one of them."""
        return self._fence is not None or self._thoughts_end is not None

    def take(self, piece: str) -> None:
        """More of a line; with its line feed, where that is there."""
        text = piece.removesuffix("\n")
        self._line = (self._line + text[:_MOST_SEEN])[:_MOST_SEEN]
        if self._thoughts_end is None and self._fence is None and (begun := _THOUGHTS.match(self._line)) is not None:
            self._thoughts_end = f"</{begun[1]}>"
        if self._thoughts_end is not None:
            if self._thoughts_end in self._tail + text:
                self._thoughts_end, self._line = None, "-"  # the rest of this line begins nothing
            self._tail = (self._tail + text)[-len("</thinking>") :]
        if piece.endswith("\n"):
            if self._thoughts_end is None:
                self._end_of_line()
            self._line = self._tail = ""

    def _end_of_line(self) -> None:
        if self._fence is None:
            fence = _FENCE.match(self._line)
            self._fence = None if fence is None else fence[1]
        elif (line := self._line.strip()).startswith(self._fence) and not line.strip(self._fence[0]):
            self._fence = None
