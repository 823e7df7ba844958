"""Whole lines out of a file of any size, from either end, without loading it.

A sparse index remembers how many line ends come before each mebibyte, so a file is counted once and not once a
call. Lines end at ``\\n`` (with a ``\\r`` before it dropped); bytes that are no UTF-8 are shown as U+FFFD.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock

from handrail.contract.errors import ToolError

STEP = 1 << 20
"""One mark of the index per so many bytes."""
MAX_SCAN = 4 << 30
"""How many bytes one call looks through for line ends; a sparse file of a tebibyte must not hold a thread."""
_CHUNK = 1 << 18

Read = Callable[[int, int], bytes]
"""``read(offset, count)``: bytes of the file, fewer only at its end."""


@dataclass(frozen=True, slots=True)
class Window:
    """Lines ``first …``; ``next`` where to go on or None at the end; ``total`` where the end was seen."""

    lines: tuple[str, ...]
    first: int
    next: int | None
    total: int | None
    cut: tuple[int, ...]


class LineIndex:
    """Counts of line ends before each :data:`STEP` of one file's content, built as far as it was needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._marks = [0]
        self._lock = Lock()

    @property
    def _steps(self) -> int:
        return -(-self.size // STEP)

    def _count_to(self, read: Read, done: Callable[[int], bool]) -> None:
        with self._lock:
            scanned = 0
            while len(self._marks) <= self._steps and not done(self._marks[-1]):
                chunk = read((len(self._marks) - 1) * STEP, STEP)
                scanned += STEP
                if scanned > MAX_SCAN:
                    raise ToolError(
                        f"the line is more than {MAX_SCAN >> 30} GiB into the file; read it by bytes", kind="limit"
                    )
                self._marks.append(self._marks[-1] + chunk.count(b"\n"))

    def total(self, read: Read) -> int:
        """The number of lines; a last one without an end counts."""
        self._count_to(read, lambda _: False)
        open_end = self.size > 0 and read(self.size - 1, 1) != b"\n"
        return self._marks[-1] + open_end

    def known_total(self, read: Read) -> int | None:
        """:meth:`total` if the file has been counted to its end before."""
        return self.total(read) if len(self._marks) > self._steps else None

    def start_of(self, line: int, read: Read) -> int | None:
        """The offset where ``line`` (1-based) starts; None past the last."""
        if line <= 1:
            return 0
        ends = line - 1
        self._count_to(read, lambda before: before >= ends)
        marks = self._marks
        if marks[-1] < ends:
            return None
        low, high = 0, len(marks) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if marks[middle] < ends else (low, middle)
        chunk = read(low * STEP, STEP)
        place = _nth(chunk, ends - marks[low])
        start = low * STEP + place + 1
        return start if start < self.size else None


def _nth(chunk: bytes, n: int) -> int:
    """Where the ``n``-th line end of ``chunk`` is, by halving: counting is far quicker than finding one by one."""
    low, high = 0, len(chunk)
    while high - low > 4096:
        middle = (low + high) // 2
        before = chunk.count(b"\n", low, middle)
        if before >= n:
            high = middle
        else:
            n -= before
            low = middle
    place = low - 1
    for _ in range(n):
        place = chunk.find(b"\n", place + 1)
        if place < 0:  # the file shrank since it was counted
            return len(chunk)
    return place


class LineIndexes:
    """The indexes of the files last read by line, each valid for one state of one inode."""

    def __init__(self, max_files: int = 64) -> None:
        self._max_files = max_files
        self._kept: OrderedDict[tuple[int, int], tuple[tuple[int, int, int], LineIndex]] = OrderedDict()
        self._lock = Lock()

    def of(self, found: os.stat_result) -> LineIndex:
        key, state = (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept[0] != state:
                kept = (state, LineIndex(found.st_size))
                self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > self._max_files:
                self._kept.popitem(last=False)
            return kept[1]


def window(read: Read, index: LineIndex, first: int, count: int | None, max_bytes: int, max_line: int) -> Window:
    """The lines from ``first`` on, at most ``count`` and ``max_bytes`` of text, each at most ``max_line`` characters.

    :param first: 1-based, or below 0 from the end
    :raises ToolError: ``invalid_input`` for line 0 or an empty window, ``limit`` where a line lies too deep
    """
    if first == 0:
        raise ToolError("lines are numbered from 1; -1 is the last", kind="invalid_input")
    if (count is not None and count < 1) or max_bytes < 1 or max_line < 1:
        raise ToolError("ask for at least one line and one byte", kind="invalid_input")
    if first < 0:
        first = max(1, index.total(read) + first + 1)
    start = index.start_of(first, read)
    if start is None or index.size == 0:
        return Window((), first, None, index.total(read), ())
    lines: list[str] = []
    cut: list[int] = []
    used = 0
    for raw, whole in _raw_lines(read, start, index.size, keep=4 * max_line + 4):
        number = first + len(lines)
        if count is not None and len(lines) >= count:
            return Window(tuple(lines), first, number, index.known_total(read), tuple(cut))
        text = raw.decode("utf-8", "replace")
        shortened = not whole or len(text) > max_line
        if shortened:
            text = text[:max_line]
        cost = 1 + (len(text) if text.isascii() else len(text.encode()))
        if used + cost > max_bytes:
            if lines:
                return Window(tuple(lines), first, number, index.known_total(read), tuple(cut))
            text = text.encode()[: max_bytes - 1].decode("utf-8", "ignore")
            shortened = True
        if shortened:
            cut.append(number)
        lines.append(text)
        used += cost
    return Window(tuple(lines), first, None, first + len(lines) - 1, tuple(cut))


def _raw_lines(read: Read, start: int, size: int, keep: int) -> Iterator[tuple[bytes, bool]]:
    """Each line's first ``keep`` bytes, and whether that is all of it."""
    head = bytearray()
    whole = True
    offset = start
    while offset < size:
        if offset - start > MAX_SCAN:
            raise ToolError(f"no line ends within {MAX_SCAN >> 30} GiB; read the file by bytes", kind="limit")
        chunk = read(offset, min(_CHUNK, size - offset))
        if not chunk:
            break
        offset += len(chunk)
        place = 0
        while True:
            end = chunk.find(b"\n", place)
            if end >= 0 and not head and end - place <= keep:  # most lines, without a copy in between
                yield chunk[place:end].removesuffix(b"\r"), True
                place = end + 1
                continue
            stop = end if end >= 0 else len(chunk)
            room = keep - len(head)
            if stop - place > room:
                whole = False
            head += chunk[place : min(stop, place + room)]
            if end < 0:
                break
            yield (bytes(head).removesuffix(b"\r") if whole else bytes(head)), whole
            head.clear()
            whole = True
            place = end + 1
    if head:
        yield bytes(head), whole
