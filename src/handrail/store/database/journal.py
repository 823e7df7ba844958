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
import re
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from time import monotonic

from handrail.contract.errors import StartError
from handrail.store.folders import Folders, unwritable

CAPACITY = 256 * 1024
"""Bytes of the file. What does not fit goes to the database at once."""

SPARE = 64 * 1024 * 1024
"""Free bytes on the disk below which nothing is noted: the database is to find out first whether it still has room."""

_FORMAT = b"HRJ1\0\0\0\0"
"""What the file begins with."""
_HEAD = struct.Struct("<QI")
"""Of a note: its number, and the bytes of its content."""
_DIGEST = 16
_LEFT = ".left"
"""The end of the name of a journal that was put aside."""
_EMPTY = _FORMAT.ljust(CAPACITY, b"\0")
_LOOK_EVERY_S = 1.0
_MISSING = "calls that had just begun may then be missing in the log"
_NAME = re.compile(r"journal-(\d+)(\.left)?")
_sync = getattr(os, "fdatasync", os.fsync)

SUPPORTED = hasattr(os, "pwrite")


class Journal:
    """The file of one holder of the workspace, by its fencing token. For one thread.

    Whoever counts the next token puts it aside first (:func:`set_aside`), and reads it after that. So a holder which was only
    paused finds that it is superseded, or its note is found.

    :raises OSError: when it cannot be made
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
            # Zeros, not a hole: what is written in place later needs nothing but its own blocks.
            if os.pwrite(self._descriptor, _EMPTY, 0) != CAPACITY:
                raise OSError(f"there is no room for {self.path}")
            os.fsync(self._descriptor)
            beside = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(beside)  # its name as well
            finally:
                os.close(beside)
            self._inode = os.fstat(self._descriptor).st_ino
        except BaseException:
            self.remove()
            raise

    def note(self, content: bytes) -> bool:
        """Make ``content`` durable. False when it does not fit, the disk is nearly full, or somebody else has counted a token
        by now.

        :raises OSError: when it cannot be made durable; use it no more
        """
        head = _HEAD.pack(self.last + 1, len(content))
        whole = head + _digest(head, content) + content
        if self._end + len(whole) > CAPACITY or self._is_nearly_full():
            return False
        self.last += 1  # also where it fails: part of it may stand there, so its number is used up
        written = os.pwrite(self._descriptor, whole, self._end)
        if written != len(whole):
            raise OSError(f"{written} of {len(whole)} bytes were written to {self.path}")
        _sync(self._descriptor)
        self._end += len(whole)
        try:
            return os.stat(self._name, follow_symlinks=False).st_ino == self._inode  # noqa: PTH116 - a fifth of the time
        except FileNotFoundError:
            return False

    def rouse(self) -> None:
        """Wake the disk: from rest, which begins within a millisecond, a sync takes two to ten times as long as behind another.

        :raises OSError: when it cannot be written
        """
        os.pwrite(self._descriptor, _FORMAT, 0)  # what stands there already
        _sync(self._descriptor)

    def _is_nearly_full(self) -> bool:
        """Whether the disk is; looked at once in a second, since from rest that takes a tenth of what a note does."""
        if (now := monotonic()) >= self._look_again:
            disk = os.fstatvfs(self._descriptor)
            self._nearly_full = disk.f_bavail * disk.f_frsize < SPARE
            self._look_again = now + _LOOK_EVERY_S
        return self._nearly_full

    def reuse(self) -> None:
        """The database has all notes: the next one is written over the first."""
        self._end = len(_FORMAT)

    def erase(self) -> None:
        """Leave nothing of the notes in the file, of which the database has all.

        :raises OSError: when it cannot be written
        """
        if os.pwrite(self._descriptor, _EMPTY, 0) != CAPACITY:
            raise OSError(f"{self.path} was not written whole")
        _sync(self._descriptor)
        self._end = len(_FORMAT)

    def close(self) -> None:
        """Leave it to whoever opens the workspace next."""
        with suppress(OSError):
            os.close(self._descriptor)

    def remove(self) -> None:
        """Close it, and leave nothing."""
        self.close()
        with suppress(OSError):
            self.path.unlink()


def set_aside(folder: Path) -> None:
    """Take the journals away from who has held the workspace up to now. To be called by whoever is about to count a token,
    before anybody can see that token.

    :raises OSError: when the folder cannot be read
    :raises StartError: when one cannot be renamed
    """
    for _, path in journals(folder):
        if path.suffix != _LEFT:
            try:
                path.rename(f"{path}{_LEFT}")
            except OSError as error:
                raise StartError(
                    f"{path} was left by a former process and cannot be renamed to {path.name}{_LEFT}: "
                    f"{error.strerror or error}. See what stands there, and move it away for inspection"
                ) from None


def left_behind(folder: Path) -> list[tuple[int, Path]]:
    """The journals that were put aside, with their holders' tokens, the oldest first.

    :raises OSError: when the folder cannot be read
    """
    return [(token, path) for token, path in journals(folder) if path.suffix == _LEFT]


def journals(folder: Path) -> list[tuple[int, Path]]:
    """All journals of a workspace, with their holders' tokens, the oldest first.

    :raises OSError: when the folder cannot be read
    """
    with os.scandir(folder) as entries:
        named = [(entry.path, _NAME.fullmatch(entry.name)) for entry in entries]
    return sorted((int(name[1]), Path(path)) for path, name in named if name)


def notes_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The notes in a journal, with their numbers.

    :raises FileNotFoundError: when it has gone
    :raises StartError: when it cannot be read, is none, or of a newer handrail
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StartError(
                    f"{path} should be a file of notes; see who put something else there, and move it away"
                )
            content = file.read(CAPACITY)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StartError(
            f"{path} holds what was noted for the log, and cannot be read: {error.strerror or error}. Make it readable for "
            f"this user, or move it away for inspection; {_MISSING}"
        ) from None
    if (begun := content[: len(_FORMAT)]) != _FORMAT:
        if begun.strip(b"\0"):
            raise StartError(unreadable(path))
        return  # nothing was ever noted
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


def outstanding(kept: Iterable[tuple[int, Path]], marked: tuple[int, int]) -> Iterator[tuple[Path, bytes]]:
    """The notes in ``kept`` that the database has not got, in order.

    :param marked: the token, and the number of the latest note in that holder's journal, that the database has
    :raises StartError: see :func:`notes_of`; one that has gone meanwhile is none
    """
    for token, path in kept:
        with suppress(FileNotFoundError):
            for number, content in notes_of(path):
                if (token, number) > marked:
                    yield path, content


def unreadable(path: Path) -> str:
    """What to do about a journal that this handrail cannot read."""
    return (
        f"{path} holds what another version of handrail noted for the log. Start that version once, which takes it over, "
        f"or move the file away for inspection; {_MISSING}"
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

Written = tuple[int, bytes]
"""The number of the last record that was written, and the hash of its group."""


class HeadFile:
    """The file of one workspace, for one thread."""

    def __init__(self, folders: Folders) -> None:
        self._path = folders.head
        self._descriptor = -1

    def note(self, sequence: int, digest: bytes) -> None:
        """Keep that everything up to record ``sequence`` is durable. An earlier number than the one there is ignored.

        What cannot be kept is not: the log itself has it, and the next group brings a later number.
        """
        with suppress(OSError):
            if self._descriptor < 0 or not os.fstat(self._descriptor).st_nlink:
                self.close()
                self._descriptor = _opened(self._path)
            there = os.pread(self._descriptor, _LENGTH, 0)
            if len(there) == _LENGTH and int.from_bytes(there[_SEQUENCE], "big") >= sequence:
                return
            os.pwrite(self._descriptor, _packed(sequence, digest), 0)

    def replace(self, sequence: int, digest: bytes) -> None:
        """Keep this number whatever stands there: a person has acknowledged that the log ends earlier.

        :raises StartError: when it cannot be written
        """
        try:
            if self._descriptor < 0:
                self._descriptor = _opened(self._path)
            os.pwrite(self._descriptor, _packed(sequence, digest), 0)
            os.fsync(self._descriptor)
        except OSError as error:
            raise unwritable(self._path.parent, error) from None

    def close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1


def written(folders: Folders) -> Written | None:
    """How far the log of a workspace was written; None where that is not known.

    :raises StartError: when the file is not what Handrail writes
    """
    path = folders.head
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    try:
        content = os.read(descriptor, _LENGTH + 1) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)
    if len(content) != _LENGTH or content[_HEAD_FIELDS.size :] != _head_digest(content[: _HEAD_FIELDS.size]):
        raise _damaged(path, "it is not what was written")
    form, sequence, digest = _HEAD_FIELDS.unpack(content[: _HEAD_FIELDS.size])
    if form != _HEAD_FORMAT:
        raise _damaged(path, "it is of another version")
    return sequence, digest


def _damaged(path: Path, why: str) -> StartError:
    return StartError(
        f"{path} tells how far the log was written, and cannot be read: {why}. See who changed it; "
        "handrail log acknowledge begins with what the log holds now"
    )


def _opened(path: Path) -> int:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0), 0o600)


def _packed(sequence: int, digest: bytes) -> bytes:
    head = _HEAD_FIELDS.pack(_HEAD_FORMAT, sequence, digest)
    return head + _head_digest(head)


def _head_digest(head: bytes) -> bytes:
    return blake2b(head, digest_size=_DIGEST).digest()
