"""The file service of the runtime: reading and replacing files below the session's roots.

Each access takes the same steps: the path becomes canonical, must lie below a root, is checked by the rules under that
canonical name, and is then opened below the root without following links. So the opened file is the checked one, and a
link swapped in between makes the open fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Literal, Protocol, TypeVar

from handrail.contract.errors import ToolError
from handrail.contract.protected.path_protection import (
    extract_path_from_git_folder,
    find_tool_write_protection,
    format_private_key_denial,
    is_private_key_path,
)
from handrail.contract.services.file_services import (
    FileByteRange,
    FileChange,
    FileKind,
    FileLineRange,
    FileStat,
    MoveOrDeleteResult,
    ResolvedPath,
    WriteResult,
)
from handrail.contract.text.text_encodings import UTF_8, convert_to_plain_utf8, detect_text_encoding
from handrail.contract.tool.requires import AccessCheck, Capability
from handrail.runtime.files import atomic_write, entry_moves, secure_open
from handrail.runtime.files.atomic_write import MAX_EDIT_BYTES
from handrail.runtime.files.git_write_checks import check_write_spares_git
from handrail.runtime.files.joint_changes import MultiFileChange, MultiFileChangeJournal
from handrail.runtime.files.line_windows import LineIndex, LineIndexCache, ReadRange, read_line_window
from handrail.runtime.files.session_roots import CACHED, PATH_FLAGS, SessionRoots, find_openat2_problem, is_beneath
from handrail.runtime.guard.running_programs import running_programs
from handrail.runtime.ripgrep import HiddenFileRecord

# Read tracking: the content hash of each file that a session has read, so that no tool overwrites unseen content.


class SeenFileHashes:
    """A record of the content hash of each file that a session last read or wrote. Thread-safe.

    It maps a canonical path to a SHA-256 hash in hex. A hash of the content detects two writes within one second that
    keep the size; a change time does not.

    :param max_files: above it, the file that was unused for longest is forgotten, and must be read again before an edit
    :param known: pairs of path and hash to start with, the longest unused first
    :param keep: called with each path and its new hash, or None if it is forgotten; must not block
    """

    def __init__(
        self,
        max_files: int = 65_536,
        *,
        known: Iterable[tuple[str, str]] = (),
        keep: Callable[[str, str | None], None] | None = None,
    ) -> None:
        self._max_files = max_files
        self._digests: OrderedDict[str, str] = OrderedDict(known)
        self._keep = keep
        self._lock = Lock()

    def record(self, path: str, sha256: str) -> None:
        """Record the content hash of a file that was read or written."""
        with self._lock:
            if self._keep is not None and self._digests.get(path) != sha256:
                self._keep(path, sha256)
            self._digests[path] = sha256
            self._digests.move_to_end(path)
            while len(self._digests) > self._max_files:
                self._digests.popitem(last=False)

    def find_seen_hash(self, path: str) -> str | None:
        """Return the hash of a canonical path; None if this session has never seen the file."""
        with self._lock:
            return self._digests.get(path)

    def rename(self, path: str, to: str) -> None:
        """Record that a file has another path now."""
        if (sha256 := self.find_seen_hash(path)) is not None:
            self.forget(path)
            self.record(to, sha256)

    def forget(self, path: str) -> None:
        """Forget the hash of a file."""
        with self._lock:
            if self._digests.pop(path, None) is not None and self._keep is not None:
                self._keep(path, None)


__all__ = ["MAX_EDIT_BYTES", "MAX_LIST_ENTRIES", "RootedFiles", "SeenFileHashes", "find_openat2_problem"]

MAX_LIST_ENTRIES = 100_000
"""The maximum number of entries in one listing."""
INLINE_BYTES = 64 * 1024
"""Cached files up to this size are read on the event loop: a thread would take five times as long."""

_DETECTED_BYTES = 256 * 1024
"""The bytes of a large file by which its encoding is detected."""
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_indexes = LineIndexCache()
_T = TypeVar("_T")


class OpenFileContent:
    """An open file, with its whole content if that is small enough to be hashed."""

    def __init__(self, descriptor: int, found: os.stat_result, data: bytes | None) -> None:
        self.descriptor = descriptor
        self.stat = found
        self.data = data
        self.size = found.st_size if data is None else len(data)

    def read(self, offset: int, count: int) -> bytes:
        """Read a range of the file."""
        if self.data is not None:
            return self.data[offset : offset + count]
        return os.pread(self.descriptor, count, offset)


class ChangeTracker(Protocol):
    """The tracker of one change, so that it can be undone."""

    def keep(self, before: bytes | None, mode: int | None, after: bytes, new_mode: int, /) -> None:
        """Keep what the write replaces, directly before it does."""

    def keep_deleted(self, entries: Sequence[str], aside: str, /) -> None:
        """Keep a tree directly before it is deleted. Until then, it has the name ``aside``."""

    def keep_moved(self, source: ResolvedPath, entries: Sequence[str], /) -> None:
        """Keep a tree directly before it is moved."""

    def discard(self) -> None:
        """Forget the change, since it failed."""


class RootedFiles:
    """A file service that implements :class:`handrail.contract.services.file_services.FileService` on ``SessionRoots``.

    :param seen: shared by all calls of one session
    :param may: evaluates the rules for each canonical path, for ``fs.read`` and ``fs.write``
    :param hidden: the hidden files that the session has met; they are not read under another name either
    :param track_change: returns the tracker of a change of a path, for undo; None if nothing is kept
    :param journal: the journal of the workspace; without it, no files are changed together
    """

    def __init__(
        self,
        roots: SessionRoots,
        seen: SeenFileHashes,
        may: AccessCheck,
        hidden: HiddenFileRecord | None = None,
        track_change: Callable[[ResolvedPath], ChangeTracker | None] = lambda _: None,
        journal: MultiFileChangeJournal | None = None,
    ) -> None:
        self._roots = roots
        self._seen = seen
        self._may = may
        self._hidden = HiddenFileRecord() if hidden is None else hidden
        self._track_change = track_change
        self._journal = journal

    async def stat(self, path: str) -> FileStat:
        located = self._authorize("fs.read", path)
        with contextlib.suppress(OSError):  # in the kernel's cache: no thread is needed
            descriptor = secure_open.open_beneath(located, PATH_FLAGS, CACHED)
            try:
                return _file_stat(located.display_path, os.fstat(descriptor))
            finally:
                os.close(descriptor)

        def look() -> FileStat:
            with _OpenWithModelErrors(located, PATH_FLAGS, "looking at") as descriptor:
                return _file_stat(located.display_path, os.fstat(descriptor))

        return await _run_in_thread(look)

    async def read_bytes(self, path: str, *, start: int = 0, max_bytes: int | None = None) -> FileByteRange:
        located = self._authorize("fs.read", path)
        if max_bytes is not None and max_bytes < 0:
            raise ToolError(f"`max_bytes` is {max_bytes}. It must be 0 or more.", kind="invalid_input")

        def take(content: OpenFileContent) -> FileByteRange:
            begin = max(0, content.size + start) if start < 0 else min(start, content.size)
            count = content.size - begin if max_bytes is None else min(max_bytes, content.size - begin)
            if content.data is None and count > MAX_EDIT_BYTES:
                raise ToolError(
                    f"{count} bytes of `{located.display_path}` are too many for one read. Request at most {MAX_EDIT_BYTES} "
                    "with `max_bytes`.",
                    kind="limit",
                )
            return FileByteRange(located.display_path, content.read(begin, count), begin, content.size)

        return await self._open_and_use_content(located, take)

    async def read_lines(
        self, path: str, *, first: int = 1, count: int | None = None, max_bytes: int = 200_000, max_line: int = 2_000
    ) -> FileLineRange:
        located = self._authorize("fs.read", path)

        def take(content: OpenFileContent) -> FileLineRange:
            if content.data is not None:
                plain, encoding = convert_to_plain_utf8(content.data)
                read: ReadRange = lambda offset, length: plain[offset : offset + length]  # noqa: E731
                got = read_line_window(read, LineIndex(len(plain)), first, count, max_bytes, max_line)
            else:
                encoding = detect_text_encoding(content.read(0, _DETECTED_BYTES), is_whole=False) or UTF_8
                if encoding.codec.startswith("utf-") and not encoding.is_utf8:
                    raise ToolError(
                        f"`{located.display_path}` has {content.size:,} bytes in {encoding.name}. Files over "
                        f"{MAX_EDIT_BYTES >> 20} MiB in this encoding cannot be read by lines. Convert it with a program, such "
                        f"as: iconv -f {encoding.name} -t UTF-8.",
                        kind="limit",
                    )
                index = _indexes.get_or_create_line_index(content.stat)
                got = read_line_window(content.read, index, first, count, max_bytes, max_line, encoding)
            return FileLineRange(
                *(located.display_path, got.lines, got.first, got.next, got.total, content.size, got.cut),
                encoding=None if encoding is None else encoding.label,
            )

        return await self._open_and_use_content(located, take)

    async def list(self, path: str) -> Sequence[FileStat]:
        located = self._authorize("fs.read", path)

        def look() -> list[FileStat]:
            with _OpenWithModelErrors(located, secure_open.FOLDER_FLAGS, "listing") as descriptor:
                found: list[FileStat] = []
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        if len(found) >= MAX_LIST_ENTRIES:
                            raise ToolError(
                                f"`{located.display_path}` has more than {MAX_LIST_ENTRIES} entries. Use glob with a pattern instead.",
                                kind="limit",
                            )
                        shown = self._roots.format_path_for_display(f"{located.absolute.rstrip('/')}/{entry.name}")
                        try:
                            found.append(_file_stat(shown, entry.stat(follow_symlinks=False)))
                        except FileNotFoundError:  # it was removed after it was listed
                            continue
                found.sort(key=lambda one: one.path)
                return found

        return await _run_in_thread(look)

    async def read_for_edit(self, path: str, *, max_bytes: int = MAX_EDIT_BYTES, require_seen: bool = True) -> bytes:
        located = self._authorize("fs.read", path)
        seen = self._seen.find_seen_hash(located.absolute)
        limit = min(max_bytes, MAX_EDIT_BYTES)

        def take(content: OpenFileContent) -> bytes:
            if content.data is None or content.size > limit:
                raise ToolError(
                    f"`{located.display_path}` has {content.size} bytes. At most {limit} bytes can be edited. Change it with "
                    "a program instead.",
                    kind="limit",
                )
            if require_seen:
                atomic_write.check_unchanged_since_seen(located, content.data, seen)
            return content.data

        return await self._open_and_use_content(located, take, note=False)

    async def write(self, path: str, data: bytes, *, expected: bytes | Literal["new", "seen"] = "seen") -> WriteResult:
        located = self._authorize("fs.write", path)
        self._require_writable(located)

        def put() -> WriteResult:
            check_write_spares_git(located, data)
            seen = self._seen.find_seen_hash(located.absolute)
            with self._tracked(located) as tracker:
                try:
                    keep = None if tracker is None else tracker.keep
                    done = atomic_write.write_file_atomically(located, data, expected, seen, keep)
                except OSError as error:
                    raise secure_open.translate_os_error_for_model(error, located, "writing") from error
            self._seen.record(located.absolute, done.sha256)
            return WriteResult(located.display_path, done.created, len(data), done.sha256, done.before)

        async with running_programs.reserve_file_replacement(located.absolute, located.display_path):
            return await _run_to_completion(put)

    async def change_atomically(self, changes: Sequence[FileChange]) -> Sequence[str]:
        if self._journal is None:
            raise ToolError("Several files cannot be changed together here. Change one at a time.", kind="unavailable")
        journal, places = self._journal, [self._locate_change(change) for change in changes]
        self._require_writable(*places)
        if len({located.absolute for located in places}) < len(places):
            shown = next(
                one.display_path
                for at, one in enumerate(places)
                if one.absolute in {other.absolute for other in places[:at]}
            )
            raise ToolError(f"Two changes name the same file: `{shown}`. Change each file once.", kind="invalid_input")
        like = [None if one.like is None else self._authorize("fs.read", one.like) for one in changes]

        def act() -> None:
            for located, change in zip(places, changes, strict=True):
                check_write_spares_git(located, change.after or b"")
            with contextlib.ExitStack() as tracked:
                steps = [
                    MultiFileChange(
                        located,
                        change.before,
                        change.after,
                        source,
                        change.is_executable,
                        partial(_keep_for_undo, tracked.enter_context(self._tracked(located)), located, change),
                    )
                    for located, change, source in zip(places, changes, like, strict=True)
                ]
                journal.change_atomically(steps)
            self._record_changes(places, changes)

        async with contextlib.AsyncExitStack() as reserved:
            for located in sorted(places, key=lambda one: one.absolute):
                await reserved.enter_async_context(self._reserve_entry(located))
            await _run_to_completion(act)
        return [located.display_path for located in places]

    def _locate_change(self, change: FileChange) -> ResolvedPath:
        """Return the place of a file that is changed with others."""
        return self._locate_entry(change.path) if change.after is None else self._authorize("fs.write", change.path)

    def _record_changes(self, places: Sequence[ResolvedPath], changes: Sequence[FileChange]) -> None:
        """Record what the session has seen after a change of several files.

        A file that it had not seen is not seen as a whole now.
        """
        seen = {change.path: self._has_seen(located, change) for located, change in zip(places, changes, strict=True)}
        for located, change in zip(places, changes, strict=True):
            if change.after is not None and seen.get(change.like or change.path, False):
                self._seen.record(located.absolute, hashlib.sha256(change.after).hexdigest())
            else:
                self._seen.forget(located.absolute)

    def _has_seen(self, located: ResolvedPath, change: FileChange) -> bool:
        if change.before is None:
            return change.like is None
        return self._seen.find_seen_hash(located.absolute) == hashlib.sha256(change.before).hexdigest()

    async def move(self, path: str, to: str) -> MoveOrDeleteResult:
        source, target = self._locate_entry(path), self._authorize("fs.write", to)
        self._require_writable(source, target)
        is_respelled = target.absolute == source.absolute and self._roots.find_final_symlink(to, target) is None
        if is_respelled and Path(to).name != Path(source.absolute).name:
            raise ToolError(
                f"`{source.display_path}` was not renamed: its file system treats both names as the same. Move it to "
                "another name first, and then to this one.",
                kind="invalid_input",
            )
        if is_beneath(target.absolute, source.absolute):
            raise ToolError(
                f"`{target.display_path}` is `{source.display_path}` or is inside it. Use another target.",
                kind="invalid_input",
            )
        entries = await _run_in_thread(lambda: entry_moves.list_tree_entries(source))
        for entry in entries:
            self._authorize("fs.read", beneath(source.absolute, entry.relative), is_canonical=True)
            self._authorize("fs.write", beneath(source.absolute, entry.relative), is_canonical=True)
            self._authorize("fs.write", beneath(target.absolute, entry.relative), is_canonical=True)

        def act() -> MoveOrDeleteResult:
            for entry in entries:
                head = _read_head(source, entry.relative) if entry.kind == "file" else b""
                for place in (source, target):
                    check_write_spares_git(
                        self._roots.locate_canonical_path(beneath(place.absolute, entry.relative)), head
                    )
            with self._tracked(target) as tracker:
                names = [entry.relative for entry in entries]
                keep = None if tracker is None else partial(tracker.keep_moved, source, names)
                entry_moves.move_entry(source, target, entries, keep)
            for entry in entries:
                self._seen.rename(beneath(source.absolute, entry.relative), beneath(target.absolute, entry.relative))
            return _describe_change(target, entries)

        async with self._reserve_entry(source), self._reserve_entry(target):
            return await _run_to_completion(act)

    async def delete(self, path: str, *, recursive: bool = False) -> MoveOrDeleteResult:
        located = self._locate_entry(path)
        self._require_writable(located)
        entries = await _run_in_thread(lambda: entry_moves.list_tree_entries(located))
        if len(entries) > 1 and not recursive:
            raise ToolError(
                f"`{located.display_path}` is a folder with {len(entries) - 1} entries. Pass `recursive` to delete all of them.",
                kind="conflict",
            )
        for entry in entries:
            self._authorize("fs.write", beneath(located.absolute, entry.relative), is_canonical=True)
        if (
            entries[0].kind == "file"
            and self._seen.find_seen_hash(located.absolute)
            and entries[0].size <= MAX_EDIT_BYTES
        ):
            await self.read_for_edit(path)  # a file that has changed since it was read is not deleted

        def act() -> MoveOrDeleteResult:
            for entry in entries:
                check_write_spares_git(
                    self._roots.locate_canonical_path(beneath(located.absolute, entry.relative)), b""
                )
            with self._tracked(located) as tracker:
                names = [entry.relative for entry in entries]
                keep = None if tracker is None else partial(tracker.keep_deleted, names)
                entry_moves.delete_entry(located, entries, keep)
            for entry in entries:
                self._seen.forget(beneath(located.absolute, entry.relative))
            return _describe_change(located, entries)

        async with self._reserve_entry(located):
            return await _run_to_completion(act)

    async def make_folder(self, path: str) -> FileStat:
        located = self._authorize("fs.write", path)
        self._require_writable(located)

        def act() -> FileStat:
            check_write_spares_git(located, b"")
            entry_moves.make_folder(located)
            with _OpenWithModelErrors(located, PATH_FLAGS, "looking at") as descriptor:
                return _file_stat(located.display_path, os.fstat(descriptor))

        return await _run_to_completion(act)

    @contextmanager
    def _tracked(self, located: ResolvedPath) -> Generator[ChangeTracker | None]:
        """Track a change, and forget it if it fails. A change that is made, but not durable, can be undone."""
        tracker = self._track_change(located)
        try:
            yield tracker
        except BaseException as error:
            is_made = isinstance(error, ToolError) and error.kind == "backend"
            if tracker is not None and not is_made:
                tracker.discard()
            raise

    def _locate_entry(self, path: str) -> ResolvedPath:
        """Return the place of an entry that is moved or deleted, which must not be a link.

        :raises ToolError: if it may not be written, is a link, or contains a root
        """
        located = self._authorize("fs.write", path)
        if (link := self._roots.find_final_symlink(path, located)) is not None:
            raise ToolError(
                f"`{link}` is a symbolic link to `{located.display_path}`. Links are neither moved nor deleted by name. "
                "Name the file itself, or use a program.",
                kind="invalid_input",
            )
        if any(is_beneath(root, located.absolute) for root in self._roots.writable):
            raise ToolError(
                f"`{located.display_path}` is or contains a root folder of this session. Name a file or folder in it.",
                kind="invalid_input",
            )
        return located

    @staticmethod
    def _require_writable(*places: ResolvedPath) -> None:
        for located in places:
            if not located.is_writable:
                raise ToolError(
                    f"`{located.display_path}` is in a read-only folder. Write inside the workspace instead.",
                    kind="denied",
                )

    @asynccontextmanager
    async def _reserve_entry(self, located: ResolvedPath) -> AsyncGenerator[None]:
        """Reserve an entry while it is moved or deleted, so that no program that has a file of it mounted over is ended."""
        async with running_programs.reserve_file_replacement(located.absolute, located.display_path):
            if (name := running_programs.find_program_mounting_beneath(located.absolute)) is not None:
                raise ToolError(
                    f"`{located.display_path}` was not changed: {name} runs with a file in it mounted over. "
                    "Wait until it has ended, or stop it, then retry.",
                    kind="conflict",
                )
            yield

    def _authorize(self, capability: Capability, path: str, *, is_canonical: bool = False) -> ResolvedPath:
        """Return the place of a path that may be used.

        :param is_canonical: whether ``path`` is canonical already, and names an entry that may be a link
        """
        located = self._roots.locate_canonical_path(path) if is_canonical else self._roots.resolve_path(path)
        if not located.is_inside:
            raise ToolError(self._roots.explain_path_outside_roots(located), kind="denied")
        if capability == "fs.write":
            found = find_tool_write_protection(extract_path_from_git_folder(located.root or "") + located.relative_path)
            if found is not None and not found.requires_approval:  # the rules decide on the others
                raise ToolError(found.format_write_denial(located.display_path), kind="denied")
        elif is_private_key_path(located.relative_path):
            raise ToolError(format_private_key_denial(located.display_path), kind="denied")
        if (refused := self._may(capability, located.absolute)) is not None:
            if capability == "fs.read":
                self._hidden.record_hidden_files([located.absolute])
            raise ToolError(refused, kind="denied")
        return located

    async def _open_and_use_content(
        self, located: ResolvedPath, take: Callable[[OpenFileContent], _T], *, note: bool = True
    ) -> _T:
        """Open a file, record its hash, and pass its content to ``take``.

        This runs in a thread, unless the whole content is in the page cache.
        """
        if (content := _read_without_waiting(located)) is not None:
            if self._hidden.known:
                self._check_not_hidden_alias(content.stat, located)
            if note and content.data is not None:
                self._seen.record(located.absolute, hashlib.sha256(content.data).hexdigest())
            return take(content)

        def read() -> _T:
            with _OpenWithModelErrors(located, secure_open.READ_FLAGS, "reading") as descriptor:
                found = secure_open.require_regular_file(descriptor, located)
                self._check_not_hidden_alias(found, located)
                whole = (
                    atomic_write.read_open_file_within_limit(descriptor, found.st_size)
                    if found.st_size <= MAX_EDIT_BYTES
                    else None
                )
                if whole is not None and len(whole) > MAX_EDIT_BYTES:  # it grew while it was read
                    found, whole = os.fstat(descriptor), None
                if note and whole is not None:
                    self._seen.record(located.absolute, hashlib.sha256(whole).hexdigest())
                return take(OpenFileContent(descriptor, found, whole))

        return await _run_in_thread(read)

    def _check_not_hidden_alias(self, found: os.stat_result, located: ResolvedPath) -> None:
        """Check that an open file is not a hidden file under another name.

        :raises ToolError: ``denied`` if it is
        """
        if (refused := self._hidden.explain_read_refusal(found, located, self._may)) is not None:
            raise ToolError(refused, kind="denied")


def _keep_for_undo(
    tracker: ChangeTracker | None, located: ResolvedPath, change: FileChange, mode: int | None, new_mode: int | None
) -> None:
    """Keep a file before it is changed with others."""
    if tracker is None:
        return
    if change.after is None:
        tracker.keep_deleted([""], located.relative_path.rpartition("/")[2])
    else:
        tracker.keep(change.before, mode, change.after, new_mode or 0)


class _OpenWithModelErrors:
    """A context manager that opens a file and maps the kernel's errors to errors for the model."""

    def __init__(self, located: ResolvedPath, flags: int, doing: str) -> None:
        self._located, self._flags, self._doing = located, flags, doing
        self._descriptor = -1

    def __enter__(self) -> int:
        try:
            self._descriptor = secure_open.open_beneath(self._located, self._flags)
        except OSError as error:
            raise secure_open.translate_os_error_for_model(error, self._located, self._doing) from error
        return self._descriptor

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError):
            raise secure_open.translate_os_error_for_model(error, self._located, self._doing) from error


def _read_without_waiting(located: ResolvedPath) -> OpenFileContent | None:
    """Return a small file's content if it can be read without waiting for a disk; else None."""
    if not _NOWAIT:
        return None
    try:
        descriptor = secure_open.open_beneath(located, secure_open.READ_FLAGS, CACHED)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EINVAL):
            return None
        raise secure_open.translate_os_error_for_model(error, located, "reading") from error
    try:
        found = secure_open.require_regular_file(descriptor, located)
        if found.st_size > INLINE_BYTES:
            return None
        buffer = bytearray(found.st_size + 1)
        try:
            count = os.preadv(descriptor, [buffer], 0, _NOWAIT)
        except OSError:  # not in the cache, or the file system does not support this
            return None
        return OpenFileContent(descriptor, found, bytes(buffer[:count])) if count == found.st_size else None
    finally:
        os.close(descriptor)


def _read_head(located: ResolvedPath, relative: str) -> bytes:
    """Return the first bytes of a file in a tree that is moved, which tell whether git takes it for its HEAD."""
    inner = beneath(located.relative_path, relative)
    place = ResolvedPath("", located.display_path, True, located.root, relative_path=inner)
    with _OpenWithModelErrors(place, secure_open.READ_FLAGS | os.O_NOFOLLOW, "reading") as descriptor:
        return os.pread(descriptor, 256, 0)


def _describe_change(located: ResolvedPath, entries: Sequence[entry_moves.TreeEntry]) -> MoveOrDeleteResult:
    size = sum(entry.size for entry in entries)
    return MoveOrDeleteResult(located.display_path, entries[0].kind, len(entries), size)


def beneath(folder: str, relative: str) -> str:
    """Return a path in a folder; the folder itself for an empty relative path."""
    return f"{folder}/{relative}" if relative else folder


def _file_stat(shown: str, found: os.stat_result) -> FileStat:
    kind: FileKind = "other"
    if stat.S_ISREG(found.st_mode):
        kind = "file"
    elif stat.S_ISDIR(found.st_mode):
        kind = "directory"
    elif stat.S_ISLNK(found.st_mode):
        kind = "symlink"
    return FileStat(shown, kind, found.st_size, found.st_mtime_ns)


async def _run_in_thread(work: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(None, work)


async def _run_to_completion(work: Callable[[], _T]) -> _T:
    """Run ``work`` in a thread, and finish it even if the caller is cancelled.

    The cancellation is raised once the thread has finished. So no write lands after its call was answered as cancelled.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # retrieve it, so that asyncio does not report it as never retrieved
        raise
