"""The journal, which makes notes durable before the database has them, and the position of the log's last record.

A call with side effects waits until its intent is on the disk. For that a transaction of the database takes two to three
times as long as the one unavoidable sync. So the intent is noted here first, in one write and one sync. The database has it
moments later, mostly in one transaction with the call's outcome. After a crash, the next process that opens the workspace
copies notes into the database that only the journal has.

Notes are numbered from 1 and follow each other from the file's beginning. Once the database has them all, the next one is
written over the first; older notes may remain behind it, and their numbers identify them. Reading ends at a note that was
only partly written; no caller was notified that it is durable.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from time import monotonic

from handrail.contract.errors import StartError
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.store.state_folders import StateFolders, make_unwritable_state_error
from handrail.store.unsupported_operations import sync_folder

CAPACITY_BYTES = 256 * 1024
"""Bytes of the file. Larger notes are written to the database at once."""

MIN_FREE_BYTES = 64 * 1024 * 1024
"""Free disk space below which nothing is noted, so that the database detects a full disk first."""

_FORMAT = b"HRJ1\0\0\0\0"
"""The beginning of the file."""
_HEAD = struct.Struct("<QI")
"""The head of a note: its number, and the length of its content."""
_DIGEST = 16
_LEFT = ".left"
"""The end of the name of an orphaned journal."""
_EMPTY = _FORMAT.ljust(CAPACITY_BYTES, b"\0")
_LOOK_EVERY_S = 1.0
_MISSING = "Calls that had just started may then be missing in the log"
_NAME = compile_regex_lazily(r"journal-(\d+)(\.left)?")
_sync = getattr(os, "fdatasync", os.fsync)

IS_SUPPORTED = hasattr(os, "pwrite")


class Journal:
    """The journal file of one holder of the workspace, named by its fencing token. For one thread.

    A new holder renames it first (:func:`mark_journals_orphaned`) and reads it afterwards. So a holder that was only paused either notices that
    it lost the lease, or its note is found.

    :raises OSError: if it cannot be created
    """

    def __init__(self, folder: Path, token: int) -> None:
        self.path = folder / f"journal-{token}"
        self.last = 0
        """The number of the latest note."""
        self._end = len(_FORMAT)
        self._nearly_full = False
        self._look_again = 0.0
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._name = str(self.path)
        self._descriptor = os.open(self._name, flags, 0o600)
        try:
            # Zeros, not a hole: a later write in place then needs no further blocks.
            if os.pwrite(self._descriptor, _EMPTY, 0) != CAPACITY_BYTES:
                raise OSError(f"The disk has no space for {self.path}.")
            os.fsync(self._descriptor)
            sync_folder(folder)  # its name as well
            self._inode = os.fstat(self._descriptor).st_ino
        except BaseException:
            self.close_and_delete()
            raise

    def append_journal_entry(self, content: bytes) -> bool:
        """Make ``content`` durable, and return whether that is certain.

        It is not if the note does not fit, the disk is nearly full, or another process has counted a token.

        :raises OSError: if it cannot be made durable; do not use the journal any more
        """
        head = _HEAD.pack(self.last + 1, len(content))
        whole = head + _digest(head, content) + content
        if self._end + len(whole) > CAPACITY_BYTES or self._is_nearly_full():
            return False
        self.last += 1  # also on failure: a part of the note may be written, so its number is used up
        written = os.pwrite(self._descriptor, whole, self._end)
        if written != len(whole):
            raise OSError(f"Only {written} of {len(whole)} bytes were written to {self.path}.")
        _sync(self._descriptor)
        self._end += len(whole)
        try:
            return os.stat(self._name, follow_symlinks=False).st_ino == self._inode  # noqa: PTH116 - a fifth of the time
        except FileNotFoundError:
            return False

    def wake_disk(self) -> None:
        """Wake the disk. After a millisecond of rest, a sync takes two to ten times as long.

        :raises OSError: if it cannot be written
        """
        os.pwrite(self._descriptor, _FORMAT, 0)  # the same bytes again
        _sync(self._descriptor)

    def _is_nearly_full(self) -> bool:
        """Return whether the disk is nearly full, checked once a second: a check takes a tenth of the time of a note."""
        if (now := monotonic()) >= self._look_again:
            disk = os.fstatvfs(self._descriptor)
            self._nearly_full = disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES
            self._look_again = now + _LOOK_EVERY_S
        return self._nearly_full

    def rewind_to_start(self) -> None:
        """Overwrite the notes from now on, since the database contains all of them."""
        self._end = len(_FORMAT)

    def erase(self) -> None:
        """Erase the notes, since the database contains all of them.

        :raises OSError: if it cannot be written
        """
        if os.pwrite(self._descriptor, _EMPTY, 0) != CAPACITY_BYTES:
            raise OSError(f"{self.path} was only partly written.")
        _sync(self._descriptor)
        self._end = len(_FORMAT)

    def close(self) -> None:
        """Close the file and leave it for the next process that opens the workspace."""
        with suppress(OSError):
            os.close(self._descriptor)

    def close_and_delete(self) -> None:
        self.close()
        with suppress(OSError):
            self.path.unlink()


def mark_journals_orphaned(folder: Path) -> None:
    """Rename the journals of the present holder. Call it before a new token is counted.

    :raises OSError: if the folder cannot be read
    :raises StartError: if a journal cannot be renamed
    """
    for _, path in list_journals(folder):
        if path.suffix != _LEFT:
            try:
                path.rename(f"{path}{_LEFT}")
            except OSError as error:
                raise StartError(
                    f"Journal {path} of a former process cannot be renamed to {path.name}{_LEFT}: "
                    f"{error.strerror or error}. Check the folder, and move the file away for inspection."
                ) from None


def list_orphaned_journals(folder: Path) -> list[tuple[int, Path]]:
    """Return the orphaned journals with the tokens of their holders, the oldest first.

    :raises OSError: if the folder cannot be read
    """
    return [(token, path) for token, path in list_journals(folder) if path.suffix == _LEFT]


def list_journals(folder: Path) -> list[tuple[int, Path]]:
    """Return all journals of a workspace with the tokens of their holders, the oldest first.

    :raises OSError: if the folder cannot be read
    """
    with os.scandir(folder) as entries:
        named = [(entry.path, _NAME.fullmatch(entry.name)) for entry in entries]
    return sorted((int(name[1]), Path(path)) for path, name in named if name)


def read_journal_entries(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the notes of a journal with their numbers.

    :raises FileNotFoundError: if it was removed
    :raises StartError: if it cannot be read, is not a journal, or belongs to a newer Handrail
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StartError(
                    f"{path} should be a journal file, but is not a regular file. Check who created it, and move it away."
                )
            content = file.read(CAPACITY_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StartError(
            f"Journal {path} cannot be read: {error.strerror or error}. Make it readable for this user, or move it away for "
            f"inspection. {_MISSING}."
        ) from None
    if (begun := content[: len(_FORMAT)]) != _FORMAT:
        if begun.strip(b"\0"):
            raise StartError(describe_unreadable_journal(path))
        return  # the journal never had a note
    at, expected = len(_FORMAT), None
    while len(content) - at >= _HEAD.size + _DIGEST:
        head = content[at : at + _HEAD.size]
        number, length = _HEAD.unpack(head)
        begin = at + _HEAD.size + _DIGEST
        noted = content[begin : begin + length]
        if expected not in (None, number) or _digest(head, noted) != content[at + _HEAD.size : begin]:
            return
        yield number, noted
        at, expected = begin + length, number + 1


def iterate_unwritten_entries(
    kept: Iterable[tuple[int, Path]], marked: tuple[int, int]
) -> Iterator[tuple[Path, bytes]]:
    """Yield the notes in ``kept`` that the database does not contain, in order.

    :param marked: the token and the number of the latest note that the database contains
    :raises StartError: see :func:`read_journal_entries`; a removed journal is skipped
    """
    for token, path in kept:
        with suppress(FileNotFoundError):
            for number, content in read_journal_entries(path):
                if (token, number) > marked:
                    yield path, content


def describe_unreadable_journal(path: Path) -> str:
    """Return the error text for a journal of another version."""
    return (
        f"Journal {path} was written by another version of Handrail. Start that version once, which completes the log, or "
        f"move the file away for inspection. {_MISSING}."
    )


def _digest(head: bytes, content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST, key=head).digest()


# The position of the log's last written record, stored outside the log to detect an older copy of the database.
#
# The chain shows a changed record, but not records cut from its end: an older copy is intact. After each group
# that is durable in the database, the number and the hash of its last record are written here, in place, into a
# file of fixed length in another folder of the state. It is not synced: after a power cut it may name an
# earlier record, which the log has as well.

_HEAD_FORMAT = b"HRH1"
_HEAD_FIELDS = struct.Struct(">4sQ32s")
_LENGTH = _HEAD_FIELDS.size + _DIGEST
_SEQUENCE = slice(4, 12)

LogHead = tuple[int, bytes]
"""The number of the last written record, and the hash of its group."""


class LogHeadFile:
    """The file with the position of one workspace's log. For one thread."""

    def __init__(self, folders: StateFolders) -> None:
        self._path = folders.log_head_file
        self._descriptor = -1

    def advance(self, sequence: int, digest: bytes) -> None:
        """Store that all records up to ``sequence`` are durable, unless the file has a later one.

        Failures are ignored: the log itself has the record, and the next group stores a later number.
        """
        with suppress(OSError):
            if self._descriptor < 0 or not os.fstat(self._descriptor).st_nlink:
                self.close()
                self._descriptor = _open_file(self._path)
            there = os.pread(self._descriptor, _LENGTH, 0)
            if len(there) == _LENGTH and int.from_bytes(there[_SEQUENCE], "big") >= sequence:
                return
            os.pwrite(self._descriptor, _pack_head(sequence, digest), 0)

    def overwrite_log_head(self, sequence: int, digest: bytes) -> None:
        """Store this number in any case, since a user acknowledged that the log ends earlier.

        :raises StartError: if it cannot be written
        """
        try:
            if self._descriptor < 0:
                self._descriptor = _open_file(self._path)
            os.pwrite(self._descriptor, _pack_head(sequence, digest), 0)
            os.fsync(self._descriptor)
        except OSError as error:
            raise make_unwritable_state_error(self._path.parent, error) from None

    def close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def read_log_head(folders: StateFolders) -> LogHead | None:
    """Return how far the log of a workspace was written; None if unknown.

    :raises StartError: if the file is damaged
    """
    path = folders.log_head_file
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged_error(path, error.strerror or str(error)) from None
    try:
        content = os.read(descriptor, _LENGTH + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)
    if len(content) != _LENGTH or content[_HEAD_FIELDS.size :] != _head_digest(content[: _HEAD_FIELDS.size]):
        raise _damaged_error(path, "its content was changed")
    form, sequence, digest = _HEAD_FIELDS.unpack(content[: _HEAD_FIELDS.size])
    if form != _HEAD_FORMAT:
        raise _damaged_error(path, "its format is unknown")
    return sequence, digest


def _damaged_error(path: Path, why: str) -> StartError:
    return StartError(
        f"The position file of the log, {path}, cannot be read: {why}. Check who changed it. To accept the current log, run "
        "`handrail log acknowledge`."
    )


def _open_file(path: Path) -> int:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o600)


def _pack_head(sequence: int, digest: bytes) -> bytes:
    head = _HEAD_FIELDS.pack(_HEAD_FORMAT, sequence, digest)
    return head + _head_digest(head)


def _head_digest(head: bytes) -> bytes:
    return blake2b(head, digest_size=_DIGEST).digest()
