"""Room for the outputs of jobs: how much those of a workspace may take together, and whose is removed where there is none.

Those of jobs that ended are removed, the first that ended first. In the place of each stands a note of what was there, so
that whoever reads it later is told what happened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from handrail.contract.doors.jobs import JobOutput

JOB_ENDING = ".job.txt"
"""What an output's file name ends with."""
REMOVED = ".removed"
"""What follows an output's file name in that of the note in its place."""
_MIB = 1024 * 1024
_MAX_NOTE = 4096


class OutputRoom:
    """The outputs of all jobs of one workspace. For the event loop's thread.

    :param most: bytes that they may take together
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._ended: dict[str, int] = {}
        """Bytes of the outputs that may be removed, by their files, the next one first."""
        self._removable = 0

    @property
    def full(self) -> str:
        """Why there is none, as a part of a sentence."""
        return f"the outputs of all jobs here may take {self.most / _MIB:,.4g} MiB together (limits.job_output_mib)"

    def take(self, size: int) -> bool:
        """Take so many bytes, and remove outputs where that makes room for them. Gives whether there is room; else nothing
        was removed."""
        if self._used - self._removable + size > self.most or not self.trim(size):
            return False
        self._used += size
        return True

    def trim(self, size: int = 0) -> bool:
        """Remove outputs until so many bytes have room. Gives whether they have."""
        while self._used + size > self.most and self._ended:
            path = next(iter(self._ended))
            removable = self._ended.pop(path)
            self._removable -= removable
            if _remove(path, self.full):
                self._used -= removable
        return self._used + size <= self.most

    def give(self, size: int) -> None:
        """So many are free again."""
        self._used -= size

    def found(self, path: str, size: int, *, ended: bool) -> None:
        """An earlier process left one; call it for those of jobs that ended in the order of their ends."""
        self._used += size
        if ended:
            self.ended(path, size)

    def ended(self, path: str, size: int) -> None:
        """The job of one has ended, so it may be removed.

        :param size: bytes of it that were taken
        """
        if size:
            self._removable += size - self._ended.pop(path, 0)
            self._ended[path] = size

    def forget(self, paths: Iterable[str]) -> None:
        """Outputs of jobs that ended are removed with all that is known of these."""
        for path in paths:
            size = self._ended.pop(path, 0)
            self._removable -= size
            self._used -= size

    def forget_in(self, folder: Path) -> None:
        """All that were in a folder are."""
        self.forget([path for path in self._ended if Path(path).parent == folder])


def removal_of(path: str, cursor: int) -> JobOutput | None:
    """What is read of an output that was removed, from a cursor on; None where none was. Blocks."""
    try:
        with os.fdopen(os.open(f"{path}{REMOVED}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            size, _, note = file.read(_MAX_NOTE).decode("utf-8", "replace").partition("\n")
        end = int(size)
    except (OSError, ValueError):
        return None
    return JobOutput(note if cursor < end else "", end, more=False, skipped=max(end - max(cursor, 0), 0))


def unlink(paths: Iterable[str]) -> None:
    """Remove outputs, and the notes of those that were removed before. Blocks."""
    for path in paths:
        if path:
            for name in (path, f"{path}{REMOVED}"):
                with suppress(OSError, ValueError):
                    Path(name).unlink(missing_ok=True)


def _remove(path: str, why: str) -> bool:
    """Remove one that is full of what nobody may need any more. Gives whether its place on the disk is free."""
    try:
        size = os.lstat(path).st_size
        note = f"{size}\n[this output of {size:,} bytes was removed to make room: {why}, and those of the jobs that ended first go first]\n"
        noted = _write(f"{path}{REMOVED}", note)  # first: nobody finds nothing at all
        Path(path).unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    if not noted:  # for which the disk was too full
        _write(f"{path}{REMOVED}", note)
    return True


def _write(path: str, text: str) -> bool:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(text.encode())
    except OSError:
        return False
    return True
