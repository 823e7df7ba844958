r"""Whole lines of a file of any size, from either end, without loading the file.

A sparse index remembers the number of line ends before each mebibyte, so a file is counted once and not on every
call. Lines end at ``\n`` (a ``\r`` before it is dropped). Invalid bytes are shown as U+FFFD.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from threading import Lock

from handrail.contract.errors import ToolError
from handrail.contract.struct import Struct
from handrail.contract.text.text_encodings import UTF_8, TextEncoding

INDEX_STEP_BYTES = 1 << 20
"""Bytes between two marks of the index."""
MAX_SCAN_BYTES = 4 << 30
"""How many bytes one call searches for line ends, so that a huge sparse file does not block a thread."""
_CHUNK = 1 << 18

ReadRange = Callable[[int, int], bytes]
"""``read(offset, count)``: bytes of the file; fewer only at its end."""


class LineWindow(Struct, frozen=True):
    """A range of lines of a file.

    :param first: the number of the first line
    :param next: the number of the line to continue with; None at the end
    :param total: the number of lines, if the end was seen
    :param cut: the numbers of the lines that were shortened
    """

    lines: tuple[str, ...]
    first: int
    next: int | None
    total: int | None
    cut: tuple[int, ...]


class LineIndex:
    """An index of the line ends before each :data:`INDEX_STEP_BYTES` of one file, built as far as it is needed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._steps = -(-size // INDEX_STEP_BYTES)
        self._marks = [0]
        self._lock = Lock()

    def _count_lines_to(self, read: ReadRange, done: Callable[[int], bool]) -> None:
        with self._lock:
            scanned = 0
            while len(self._marks) <= self._steps and not done(self._marks[-1]):
                chunk = read((len(self._marks) - 1) * INDEX_STEP_BYTES, INDEX_STEP_BYTES)
                scanned += INDEX_STEP_BYTES
                if scanned > MAX_SCAN_BYTES:
                    raise ToolError(
                        f"The line is more than {MAX_SCAN_BYTES >> 30} GiB into the file. Read the file by bytes instead.",
                        kind="limit",
                    )
                self._marks.append(self._marks[-1] + chunk.count(b"\n"))

    def count_lines(self, read: ReadRange) -> int:
        """Return the number of lines; a last line without a line end counts."""
        self._count_lines_to(read, lambda _: False)
        open_end = self.size > 0 and read(self.size - 1, 1) != b"\n"
        return self._marks[-1] + open_end

    def line_count_if_known(self, read: ReadRange) -> int | None:
        """Return the number of lines if the file has already been counted to its end; else None."""
        return self.count_lines(read) if len(self._marks) > self._steps else None

    def find_line_start(self, line: int, read: ReadRange) -> int | None:
        """Return the offset at which ``line`` (1-based) starts; None past the last line."""
        if line <= 1:
            return 0
        ends = line - 1
        self._count_lines_to(read, lambda before: before >= ends)
        marks = self._marks
        if marks[-1] < ends:
            return None
        low, high = 0, len(marks) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if marks[middle] < ends else (low, middle)
        chunk = read(low * INDEX_STEP_BYTES, INDEX_STEP_BYTES)
        place = _find_nth_newline(chunk, ends - marks[low])
        start = low * INDEX_STEP_BYTES + place + 1
        return start if start < self.size else None


def _find_nth_newline(chunk: bytes, n: int) -> int:
    """Return the position of the ``n``-th line end in ``chunk``, found by bisection.

    Counting is far quicker than finding line ends one by one.
    """
    low, high = 0, len(chunk)
    while high - low > 4096:
        middle = (low + high) // 2
        if (before := chunk.count(b"\n", low, middle)) >= n:
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


class LineIndexCache:
    """A cache of the line indexes of recently read files, each valid for one state of one inode."""

    def __init__(self, max_files: int = 64) -> None:
        self._max_files = max_files
        self._kept: OrderedDict[tuple[int, int], tuple[tuple[int, int, int], LineIndex]] = OrderedDict()
        self._lock = Lock()

    def get_or_create_line_index(self, found: os.stat_result) -> LineIndex:
        """Return the index for a file, creating it if the file has changed."""
        key, state = (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        with self._lock:
            if (kept := self._kept.get(key)) is None or kept[0] != state:
                kept = (state, LineIndex(found.st_size))
                self._kept[key] = kept
            self._kept.move_to_end(key)
            while len(self._kept) > self._max_files:
                self._kept.popitem(last=False)
            return kept[1]


def read_line_window(
    read: ReadRange,
    index: LineIndex,
    first: int,
    count: int | None,
    max_bytes: int,
    max_line: int,
    encoding: TextEncoding = UTF_8,
) -> LineWindow:
    """Read the lines from ``first`` on, at most ``count`` lines and ``max_bytes`` bytes of text.

    :param first: 1-based, or below 0 to count from the end
    :param max_line: the maximum number of characters of a line
    :param encoding: one in which only a line end has the byte of a line end
    :raises ToolError: ``invalid_input`` for line 0 or an empty range, ``limit`` if a line lies too deep in the file
    """
    _check_range(first, count, max_bytes, max_line)
    if first < 0:
        first = max(1, index.count_lines(read) + first + 1)
    start = 0 if first == 1 else index.find_line_start(first, read)
    if start is None or index.size == 0:
        return LineWindow((), first, None, index.count_lines(read), ())
    offset, lines, used = _read_whole_lines(
        read, start or len(encoding.mark), index.size, count, max_bytes, max_line if encoding.is_utf8 else 0
    )
    cut: list[int] = []
    for raw, whole in _read_cut_lines(read, offset, index.size, keep=4 * max_line + 4):
        number = first + len(lines)
        if count is not None and len(lines) >= count:
            return LineWindow(tuple(lines), first, number, index.line_count_if_known(read), tuple(cut))
        text = raw.decode(encoding.codec, "replace")
        shortened = not whole or len(text) > max_line
        if shortened:
            text = text[:max_line]
        cost = 1 + (len(text) if text.isascii() else len(text.encode()))
        if used + cost > max_bytes:
            if lines:
                return LineWindow(tuple(lines), first, number, index.line_count_if_known(read), tuple(cut))
            text = text.encode()[: max_bytes - 1].decode("utf-8", "ignore")
            shortened = True
        if shortened:
            cut.append(number)
        lines.append(text)
        used += cost
    return LineWindow(tuple(lines), first, None, first + len(lines) - 1, tuple(cut))


def _read_whole_lines(
    read: ReadRange, start: int, size: int, count: int | None, max_bytes: int, max_line: int
) -> tuple[int, list[str], int]:
    """Read lines in UTF-8 with one decoding and one split, which is far quicker than line by line.

    :return: the offset after the lines, the lines, and their bytes; no lines if one is too long or not valid
    """
    piece = read(start, min(_CHUNK, max_bytes, size - start))
    piece = piece[: piece.rfind(b"\n") + 1]
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return start, [], 0
    lines = text.split("\n", -1 if count is None else count)
    rest = lines.pop()
    end = used = len(piece) - (len(rest) if text.isascii() else len(rest.encode()))
    if "\r" in text:
        used -= sum(line.endswith("\r") for line in lines)
        lines = [line.removesuffix("\r") for line in lines]
    if max(map(len, lines), default=0) > max_line:
        return start, [], 0
    return start + end, lines, used


def _check_range(first: int, count: int | None, max_bytes: int, max_line: int) -> None:
    if first == 0:
        raise ToolError(
            "Line 0 does not exist. Lines are numbered from 1, and -1 is the last line.", kind="invalid_input"
        )
    if (count is not None and count < 1) or max_bytes < 1 or max_line < 1:
        raise ToolError("The requested range is empty. Request at least one line and one byte.", kind="invalid_input")


def _read_cut_lines(read: ReadRange, start: int, size: int, keep: int) -> Iterator[tuple[bytes, bool]]:
    """Yield the first ``keep`` bytes of each line, and whether that is the whole line."""
    head = bytearray()
    whole = True
    offset = start
    while offset < size:
        if offset - start > MAX_SCAN_BYTES:
            raise ToolError(
                f"No line ends within {MAX_SCAN_BYTES >> 30} GiB. Read the file by bytes instead.", kind="limit"
            )
        if not (chunk := read(offset, min(_CHUNK, size - offset))):
            break
        offset += len(chunk)
        place = 0
        while True:
            end = chunk.find(b"\n", place)
            if end >= 0 and not head and end - place <= keep:  # most lines, without another copy
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
