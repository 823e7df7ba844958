"""The output of a running call: sent to listeners, and stored in a file if the call is a job.

The output arrives in pieces, from any thread, and is redacted before anyone receives it. A piece that may begin a secret is
held back until more arrives. All buffers are bounded.
"""

from __future__ import annotations

import codecs
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from handrail.arbiter.output.output_files import MAX_SIDECAR_BYTES, JobOutputQuota, read_removal_note_as_output
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.contract.services.job_and_tool_services import JobOutputChunk

MAX_EVENT_BYTES = 256 * 1024
"""Bytes of one call's output that listeners receive; later output is only stored."""
MAX_PIECE_CHARACTERS = 16 * 1024
"""Characters of one event."""
MAX_HELD_CHARACTERS = 256 * 1024
"""Characters that are held for a call that may become a job."""
MAX_READ_BYTES = 1024 * 1024
"""The most bytes that one read of a job's output returns."""
MAX_LINES = 10_000
MIN_RETAINED_BYTES = 4 * 1024 * 1024
"""The fewest bytes that remain of an output whose end matters."""
_BLOCK = 64 * 1024
PUNCH_INTERVAL_BYTES = 1024 * 1024
_KEEP_SIZE, _PUNCH_HOLE = 1, 2


class JobOutputFile:
    """The output of a job, in a file that only its owner may write. It is created with the first byte.

    A file holds at most 64 MiB, and its last line says if there was more output.

    :param room: the quota of all outputs together; None for no quota
    :param ring: keep the end instead of the beginning, 4 to 5 MiB. The earlier part becomes a hole in the file, so positions stay
        valid. A file system without holes keeps the beginning.
    :ivar size: bytes up to the end, including a hole
    """

    def __init__(self, path: Path, room: JobOutputQuota | None = None, *, ring: bool = False) -> None:
        self.path = path
        self.size = 0
        self._room = room
        self._ring = ring
        self._hole = 0
        self.dropped = 0
        self._descriptor = -1

    def append_piece(self, text: str) -> None:
        """Append a piece. It is dropped if the disk is full, the file cannot be opened, or the quota is used up."""
        data = text.encode("utf-8", "backslashreplace")
        if self.dropped or not self._open():
            self.dropped += len(data)
            return
        if (why := self._reserve(len(data))) is not None:
            self.dropped = len(data)
            data = f"\n[more output follows; {why}]\n".encode()
            if self._room is not None:
                self._room.free(-len(data))
        try:
            while data:
                written = os.write(self._descriptor, data)
                self.size += written
                data = data[written:]
        except OSError:
            self.dropped += len(data)
            if self._room is not None:
                self._room.free(len(data))
        if self._ring and self.size - self._hole >= MIN_RETAINED_BYTES + PUNCH_INTERVAL_BYTES:
            self._free_disk_space_before((self.size - MIN_RETAINED_BYTES) // _BLOCK * _BLOCK)

    def _open(self) -> bool:
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                self._descriptor = os.open(self.path, flags, 0o600)
                self.size = os.fstat(self._descriptor).st_size  # the output of an earlier attempt stays
            except OSError:
                return False
        return True

    def _reserve(self, length: int) -> str | None:
        """Reserve space for ``length`` bytes; return the reason if that fails."""
        if self.size - self._hole + length > MAX_SIDECAR_BYTES and not self._ring:
            return f"only the first {self.size:,} bytes are stored"
        if self._room is not None and not self._room.reserve(length):
            return f"it is not stored: {self._room.quota_used_up_text}"
        return None

    def _free_disk_space_before(self, end: int) -> None:
        """Free the disk space before ``end`` by punching a hole in the file."""
        if _load_fallocate()(self._descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, end):
            self._ring = False  # the file system has no holes
        else:
            if self._room is not None:
                self._room.free(end - self._hole)
            self._hole = end

    def mark_output_complete(self) -> None:
        """Mark the output as complete, so that it may be removed when the quota needs space."""
        if self._room is not None:
            path = str(self.path)
            self._room.mark_output_removable(
                path, self.size - self._hole if self._descriptor >= 0 else measure_disk_usage(path)
            )

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class CallOutputWriter:
    """The output of one call. Use it on the kernel's event loop.

    :param tell: called with each piece while there are listeners; None if the frontend may not see the output
    :param keep: whether the call may become a job whose output a model reads
    """

    def __init__(self, redactor: SecretRedactor, tell: Callable[[str], None] | None, *, keep: bool) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stream = redactor.create_stream_redactor()
        self._tell = tell
        self._keep = keep
        self._told = 0
        self._held: list[str] = []
        self._held_length = 0
        self._file: JobOutputFile | None = None
        self.truncated = False
        """Whether any of it is stored, so that readers of the job find it."""

    def feed(self, piece: str | bytes) -> None:
        """Take the next piece."""
        text = self._decoder.decode(piece) if isinstance(piece, bytes) else piece.encode("utf-8", "replace").decode()
        self._show(self._stream.redact_piece(text))

    def flush_held_output(self) -> None:
        """Flush what was held back, since the output is complete."""
        self._show(self._stream.redact_piece(self._decoder.decode(b"", final=True)) + self._stream.flush_held_text())

    def start_storing_in_file(self, file: JobOutputFile) -> None:
        """Store the output in ``file`` from now on, starting with what is held, since the call has become a job."""
        if not self._keep:
            return
        self._file, held = file, "".join(self._held)
        self._held.clear()
        if held:
            file.append_piece(held)
        if self._held_length > MAX_HELD_CHARACTERS:
            more = self._held_length - MAX_HELD_CHARACTERS
            file.append_piece(f"\n[{more:,} characters from before the call became a job are omitted]\n")

    def _show(self, text: str) -> None:
        if not text:
            return
        self.truncated = self._keep
        if self._file is not None:
            self._file.append_piece(text)
        elif self._keep:
            if self._held_length < MAX_HELD_CHARACTERS:
                self._held.append(text[: MAX_HELD_CHARACTERS - self._held_length])
            self._held_length += len(text)
        if self._tell is not None and self._told < MAX_EVENT_BYTES:
            text = text[: MAX_EVENT_BYTES - self._told]
            self._told += len(text)
            for start in range(0, len(text), MAX_PIECE_CHARACTERS):
                self._tell(text[start : start + MAX_PIECE_CHARACTERS])
            if self._told >= MAX_EVENT_BYTES:
                self._tell("\n[further output is not shown while the call runs]\n")


# Reading a job's output file.


def read_output_from_cursor(path: str, cursor: int, max_bytes: int, *, grows: bool) -> JobOutputChunk:
    """Read a job's output from a cursor on, in whole characters. Blocks.

    :param cursor: below 0: from the beginning; beyond the end: nothing, with the cursor of the end
    :param grows: whether more output may follow
    """
    with _OutputReader(path) as file:
        if not file.exists and (removed := read_removal_note_as_output(path, cursor)) is not None:
            return removed
        start = min(max(cursor, 0), file.size)
        asked, start = start, max(start, file.begins)
        data = file.read_at(start, min(max(max_bytes, 4), MAX_READ_BYTES))
        if start + len(data) < file.size or grows:
            data = data[: _count_whole_char_bytes(data)]
        end = start + len(data)
        return JobOutputChunk(
            data.decode("utf-8", "replace"), end, grows or end < file.size, skipped_bytes=start - asked
        )


def read_output_lines(path: str, offset: int, count: int, *, grows: bool) -> JobOutputChunk:
    """Read ``count`` lines from line ``offset`` on. Blocks.

    A negative offset counts from the end. An unfinished last line counts.
    """
    count = min(max(count, 1), MAX_LINES)
    with _OutputReader(path) as file:
        if not file.exists and (removed := read_removal_note_as_output(path, 0)) is not None:
            return replace(removed, first_line=0)
        # Lines are counted from where the file begins now.
        first = max(file.count_lines() + offset, 0) if offset < 0 else offset
        start = file.find_line_start(first)
        end = file.find_lines_end(start, count)
        data = file.read_at(start, min(end - start, MAX_READ_BYTES))
        if start + len(data) < end:
            data = data[: _count_whole_char_bytes(data)]
        end = start + len(data)
        return JobOutputChunk(data.decode("utf-8", "replace"), end, grows or end < file.size, first)


def measure_disk_usage(path: str) -> int:
    """Return how many bytes a job's output occupies on disk, without holes. Blocks."""
    with _OutputReader(path) as file:
        return file.size - file.begins


class _OutputReader:
    """A job's output file while it is read, which may not exist yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1
        self.size = 0
        self.begins = 0
        """The position at which the stored output begins."""

    def __enter__(self) -> _OutputReader:
        with suppress(OSError, ValueError):
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            self.size = os.fstat(self._descriptor).st_size
            self.begins = os.lseek(self._descriptor, 0, os.SEEK_DATA) if self.size else 0
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    @property
    def exists(self) -> bool:
        return self._descriptor >= 0

    def read_at(self, start: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, start) if self._descriptor >= 0 and length > 0 else b""

    def count_lines(self) -> int:
        count, last = 0, b"\n"
        for place in range(self.begins, self.size, _BLOCK):
            block = self.read_at(place, _BLOCK)
            count, last = count + block.count(b"\n"), block[-1:]
        return count + (last != b"\n")

    def find_line_start(self, line: int) -> int:
        """Return where a line begins; the end if there are fewer lines."""
        return self.find_lines_end(self.begins, line) if line > 0 else self.begins

    def find_lines_end(self, start: int, count: int) -> int:
        while start < self.size:
            block = self.read_at(start, _BLOCK)
            if (ends := block.count(b"\n")) < count:
                count, start = count - ends, start + len(block)
                continue
            place = -1
            for _ in range(count):
                place = block.index(b"\n", place + 1)
            return start + place + 1
        return self.size


@lru_cache(maxsize=1)
def _load_fallocate() -> Callable[[int, int, int, int], int]:
    """Return fallocate(2) with 64-bit offsets, or a function that fails if the system has none."""
    found: Any = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if found is None:
        return _reject_holes
    found.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    found.restype = ctypes.c_int
    return found


def _reject_holes(descriptor: int, mode: int, start: int, length: int) -> int:
    return -1


def _count_whole_char_bytes(data: bytes) -> int:
    """Return how many bytes of ``data`` form whole characters."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if length > back else len(data)
    return len(data)
