"""The position of the log's last written record, stored outside the log to detect an older copy of the database.

The chain shows a changed record, but not records cut from its end: an older copy is intact. After each group that is durable
in the database, the number and the hash of its last record are written here, in place, into a file of fixed length in
another folder of the state. It is not synced: after a power cut it may name an earlier record, which the log has as well.
"""

from __future__ import annotations

import os
import stat
import struct
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from handrail.contract.errors import StartError
from handrail.store.folders import Folders, unwritable

_FORMAT = b"HRH1"
_HEAD = struct.Struct(">4sQ32s")
_DIGEST = 16
_LENGTH = _HEAD.size + _DIGEST
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
    if len(content) != _LENGTH or content[_HEAD.size :] != _digest(content[: _HEAD.size]):
        raise _damaged(path, "it is not what was written")
    form, sequence, digest = _HEAD.unpack(content[: _HEAD.size])
    if form != _FORMAT:
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
    head = _HEAD.pack(_FORMAT, sequence, digest)
    return head + _digest(head)


def _digest(head: bytes) -> bytes:
    return blake2b(head, digest_size=_DIGEST).digest()
