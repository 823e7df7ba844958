"""Sidecars: files that hold the whole of a truncated output, and the disk quotas of outputs in a workspace."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from handrail.contract.services.job_and_tool_services import JobOutputChunk

# The disk quota of job outputs in one workspace.
#
# If space runs out, the outputs of ended jobs are removed, the first ended first. A note replaces each, so that a later
# reader learns of the removal.

JOB_SUFFIX = ".job.txt"
"""The end of the name of a job's output file."""
REMOVED_SUFFIX = ".removed"
"""Appended to the name of an output file for the note that replaces it."""
_MIB = 1024 * 1024
_MAX_NOTE = 4096


class JobOutputQuota:
    """The disk quota for the outputs of all jobs of one workspace. Use it on the kernel's event loop.

    :param most: bytes for all of them together
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._ended: dict[str, int] = {}
        """Bytes of removable outputs by file, the next one to remove first."""
        self._removable = 0

    @property
    def quota_used_up_text(self) -> str:
        """Why the quota is used up, as a part of a sentence."""
        return f"the limit for the outputs of all jobs is {self.most / _MIB:,.4g} MiB (limits.job_output_mib)"

    def reserve(self, size: int) -> bool:
        """Reserve bytes, and remove outputs if necessary; return whether there is space.

        If there is not, nothing is removed.
        """
        # The first test comes before any removal: outputs must not be lost for a request that cannot be met anyway.
        if self._used - self._removable + size > self.most or not self.remove_outputs_for_space(size):
            return False
        self._used += size
        return True

    def remove_outputs_for_space(self, size: int = 0) -> bool:
        """Remove outputs until ``size`` bytes are free, and return whether they are."""
        while self._used + size > self.most and self._ended:
            path = next(iter(self._ended))
            removable = self._ended.pop(path)
            self._removable -= removable
            # Only bytes that are really free count. A file that cannot be removed still takes its space.
            if _remove_output(path, self.quota_used_up_text):
                self._used -= removable
        return self._used + size <= self.most

    def free(self, size: int) -> None:
        """Free reserved bytes."""
        self._used -= size

    def register_former_output(self, path: str, size: int, *, ended: bool) -> None:
        """Add an output of an earlier process. Add those of ended jobs in the order of their ends."""
        self._used += size
        if ended:
            self.mark_output_removable(path, size)

    def mark_output_removable(self, path: str, size: int) -> None:
        """Mark an output as removable, since its job has ended.

        :param size: the bytes reserved for it
        """
        if size:
            # Removing the old entry moves the file to the end of the order, behind the outputs whose jobs ended before.
            self._removable += size - self._ended.pop(path, 0)
            self._ended[path] = size

    def release_bytes_of_outputs(self, paths: Iterable[str]) -> None:
        """Free the bytes of outputs that are removed together with their ended jobs."""
        for path in paths:
            size = self._ended.pop(path, 0)
            self._removable -= size
            self._used -= size

    def release_bytes_of_folder(self, folder: Path) -> None:
        """Free the bytes of all outputs in a removed folder."""
        self.release_bytes_of_outputs([path for path in self._ended if Path(path).parent == folder])


def read_removal_note_as_output(path: str, cursor: int) -> JobOutputChunk | None:
    """Return the note of a removed output as the output from a cursor on; None if there is none. Blocks."""
    try:
        # Without following links: a link must not lead to a file outside the folder.
        with os.fdopen(os.open(f"{path}{REMOVED_SUFFIX}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            size, _, note = file.read(_MAX_NOTE).decode("utf-8", "replace").partition("\n")
        end = int(size)
    except (OSError, ValueError):
        return None
    return JobOutputChunk(note if cursor < end else "", end, has_more=False, skipped_bytes=max(end - max(cursor, 0), 0))


def delete_outputs_and_notes(paths: Iterable[str]) -> None:
    """Remove outputs and the notes that replaced them. Blocks."""
    for path in paths:
        if path:
            for name in (path, f"{path}{REMOVED_SUFFIX}"):
                with suppress(OSError, ValueError):
                    Path(name).unlink(missing_ok=True)


def _remove_output(path: str, why: str) -> bool:
    """Replace an output with a note, and return whether its disk space is free."""
    try:
        size = os.lstat(path).st_size
        note = f"{size}\n[this output of {size:,} bytes was removed to free space: {why}, and the oldest outputs are removed first]\n"
        noted = _write_note(
            f"{path}{REMOVED_SUFFIX}", note
        )  # first, so that a reader always finds the output or the note
        Path(path).unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    if not noted:  # the disk was full before
        _write_note(f"{path}{REMOVED_SUFFIX}", note)
    return True


def _write_note(path: str, text: str) -> bool:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(text.encode())
    except OSError:
        return False
    return True


# The disk quota of sidecars in one workspace.
#
# If space runs out, the sidecars of closed sessions are removed, the oldest first. A note replaces each, so that a reopened
# session learns of the removal. The files of open sessions stay, and so do files that a fork shares.

NOTE_SUFFIX = ".note"
"""Appended to the name of a file for its note, before the note replaces it."""
_WORTH = 4096
"""Bytes. Removing a smaller file frees too little."""
_NOTED = 512
"""The most bytes of a note."""
_OTHERS = (JOB_SUFFIX, f"{JOB_SUFFIX}{REMOVED_SUFFIX}")
"""Outputs of jobs, which have a separate quota."""


class _SidecarFile(NamedTuple):
    written_ns: int
    path: Path
    size: int


class OutputFileQuota:
    """The disk quota for the output files of all sessions of one workspace. For any thread. Blocks.

    :param folder: contains the output folders of the sessions
    :param most: bytes for all of them together
    :ivar in_use: returns whether the files of a session must stay; by default all must
    """

    def __init__(self, folder: Path, most: int) -> None:
        # The safe default until the kernel knows its sessions: nothing is removed.
        self.in_use: Callable[[str], bool] = lambda session_id: True
        self._folder = folder
        self._most = most
        self._lock = threading.Lock()
        # As if the quota were used up, so that the first write scans the files of earlier processes.
        self._used = most
        """An upper bound of the bytes in use; exact after each scan."""
        self._oldest: list[_SidecarFile] = []
        """The removable files of the last scan."""
        self._changed = True
        """Whether another scan may find more removable files or fewer bytes in use."""

    @property
    def quota_used_up_text(self) -> str:
        """Why the quota is used up, as a part of a sentence."""
        return (
            f"the limit for truncated outputs of all sessions is {self._most / _MIB:,.4g} MiB (limits.output_files_mib)"
        )

    def mark_usage_outdated(self) -> None:
        """Note that files were removed elsewhere."""
        self._changed = True

    @contextmanager
    def reserve_while_writing(self) -> Generator[Callable[[int], None]]:
        """Write a file in this block, and reserve its bytes before. If the block raises, they are free again.

        :return: the function that reserves bytes; it raises OSError if there is no space
        """
        reserved = 0

        def reserve(size: int) -> None:
            nonlocal reserved
            if not self._has_room_for(size):
                raise OSError(
                    f"{self.quota_used_up_text}, and it is used up. Request less, or ask the user to close old sessions."
                )
            self._used += size
            self._changed = True
            reserved += size

        with self._lock:  # also during the write, so that a scan counts all files
            try:
                yield reserve
            except BaseException:
                self._used -= reserved
                raise

    def _has_room_for(self, size: int) -> bool:
        while self._used + size > self._most and not self._remove_oldest_files(size):
            # Nothing has changed since the last scan, so another one would find the same and only delay the call.
            if not self._changed:
                return False
            self._changed = False  # first, so that a later change causes another scan
            self._scan_files()
        return True

    def _remove_oldest_files(self, size: int) -> bool:
        """Remove the oldest removable files if that frees enough, and return whether ``size`` bytes are free."""
        spare = [one for one in self._oldest if not self.in_use(one.path.parent.name)]
        # Removal would not be enough, so the files are spared: the write fails in either case.
        if self._used + size - sum(one.size - _NOTED for one in spare) > self._most:
            return False
        gone: set[_SidecarFile] = set()
        for one in spare:
            if self._used + size <= self._most:
                break
            self._replace_with_note(one.path)
            gone.add(one)
        self._oldest = [one for one in self._oldest if one not in gone]
        return self._used + size <= self._most

    def _scan_files(self) -> None:
        sizes: dict[tuple[int, int], int] = {}
        found: list[_SidecarFile] = []
        for folder in _entries(self._folder):
            for file in _entries(folder.path) if folder.is_dir(follow_symlinks=False) else ():
                with suppress(OSError):
                    about = file.stat(follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode) and not file.name.endswith(_OTHERS):
                        # By inode, since a fork links the same file, which takes its space only once.
                        sizes[about.st_dev, about.st_ino] = about.st_size  # a fork shares the file
                        # Removing one of two links frees nothing and would take the output from one of the sessions.
                        if about.st_nlink == 1 and about.st_size > _WORTH:
                            found.append(_SidecarFile(about.st_mtime_ns, Path(file.path), about.st_size))
        self._used = sum(sizes.values())
        self._oldest = sorted(found)

    def _replace_with_note(self, path: Path) -> None:
        """Replace a file with a note, unless a fork shares it."""
        with suppress(OSError):  # it stays
            about = path.lstat()
            if about.st_nlink > 1:
                return
            text = (
                f"[this output of {about.st_size:,} bytes was removed to free space: {self.quota_used_up_text}, and the oldest outputs of "
                "closed sessions are removed first]\n"
            )
            note = path.with_name(f"{path.name}{NOTE_SUFFIX}")
            note.unlink(missing_ok=True)  # left by a process that was killed
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with os.fdopen(os.open(note, flags, 0o600), "wb") as file:
                    file.write(text.encode())
                note.replace(path)  # atomic, so that a reader always finds the file or the whole note
            except OSError:
                note.unlink(missing_ok=True)
                raise
            self._used += len(text) - about.st_size


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


MAX_SIDECAR_BYTES = 64 * 1024 * 1024
"""Bytes. A longer text is cut, and the last line of the file says so."""

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME = 100
_MAX_SAME_NAME = 100


def write_output_file(
    room: OutputFileQuota, folder: Path, call_id: str, pieces: Iterable[bytes], ending: str = ".txt"
) -> tuple[Path, int]:
    """Write a new output file named for the call, which only its owner can read. Blocks.

    If it fails, it leaves no partial file.

    :param room: the quota of all output files together
    :param pieces: UTF-8, cut anywhere; all of them are taken, also if the file does not hold them
    :return: the file, and how many bytes of the pieces it contains
    :raises OSError: if it cannot be written, or the quota is used up
    """
    with room.reserve_while_writing() as reserve:
        path, descriptor = _create_file(folder, make_file_name_for_call(call_id), ending)
        try:
            with os.fdopen(descriptor, "r+b") as file:
                kept = total = 0
                for piece in pieces:
                    total += len(piece)
                    # After the first cut, later pieces are only counted: a shorter one must not be appended behind a
                    # gap.
                    if kept == total - len(piece):
                        part = piece[: MAX_SIDECAR_BYTES - kept]
                        reserve(len(part))
                        kept += file.write(part)
                if kept < total:
                    kept = _note_cut(file, total)
        except BaseException:
            path.unlink(missing_ok=True)  # a full disk needs the space
            raise
    return path, kept


def _note_cut(file: BinaryIO, total: int) -> int:
    """Replace the end of a full output file by a note, at a whole character, and return how much remains before it."""
    note = f"\n[this file ends here: it contains the first {MAX_SIDECAR_BYTES:,} of {total:,} bytes]\n".encode()
    end = MAX_SIDECAR_BYTES - len(note)
    file.seek(end - 3)
    around = file.read(4)
    while around and around[-1] & 0xC0 == 0x80:  # the cut is within a character
        around, end = around[:-1], end - 1
    file.seek(end)
    file.write(note)
    file.truncate()
    return end


def make_file_name_for_call(call_id: str) -> str:
    """Return a file name for ``call_id``: the id itself if it is a valid name, otherwise a part of it and a hash."""
    name = _NOT_IN_A_NAME.sub("_", call_id)[:_MAX_NAME]
    if name == call_id and name:
        return name
    # The hash keeps two IDs apart that differ only in replaced characters or after the cut.
    return f"{name}-{hashlib.sha256(call_id.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}"


def _create_file(folder: Path, name: str, ending: str) -> tuple[Path, int]:
    """Create a new file. An earlier attempt of the same call keeps its own file."""
    # Exclusive and without following links, so that no existing file is overwritten.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    for attempt in range(1, _MAX_SAME_NAME):
        path = folder / (f"{name}{ending}" if attempt == 1 else f"{name}-{attempt}{ending}")
        try:
            return path, os.open(path, flags, 0o600)
        except FileExistsError:
            continue
    raise FileExistsError(17, f"this call already has {_MAX_SAME_NAME} output files", str(folder / name))
