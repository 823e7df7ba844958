"""The file door of the runtime: reading and replacing files beneath the session's roots.

Each touch goes the same way: the path is made canonical, lies beneath a root or is refused, is judged by the
rules under that canonical name, and is then opened beneath the root with links refused. So what is opened is
what was judged, and a link swapped in between makes the open fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from handrail.contract.doors.files import FileBytes, FileKind, FileLines, FileStat, Written
from handrail.contract.errors import ToolError
from handrail.contract.protected.protected import is_key, key_refusal, tool_protection
from handrail.contract.tool.requires import Capability, May
from handrail.runtime.files import beneath, lines, replace, repositories
from handrail.runtime.files.openat2 import CACHED, HANDLE, openat2_works
from handrail.runtime.files.replace import MAX_EDIT_BYTES
from handrail.runtime.files.roots import Located, Roots
from handrail.runtime.files.seen import SeenFiles
from handrail.runtime.guard.running import running_programs
from handrail.runtime.verifying import HiddenFiles

__all__ = ["MAX_EDIT_BYTES", "MAX_LIST", "RootedFiles", "SeenFiles", "openat2_works"]

MAX_LIST = 100_000
"""Entries one listing gives at most."""
INLINE_BYTES = 64 * 1024
"""Files up to this size that lie in the page cache are read at once: a thread would cost five times the read."""

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_indexes = lines.LineIndexes()
_T = TypeVar("_T")


class Content:
    """An open file: its whole content where that is small enough to be hashed, else ranges of it."""

    def __init__(self, descriptor: int, found: os.stat_result, data: bytes | None) -> None:
        self.descriptor = descriptor
        self.stat = found
        self.data = data
        self.size = found.st_size if data is None else len(data)

    def read(self, offset: int, count: int) -> bytes:
        if self.data is not None:
            return self.data[offset : offset + count]
        return os.pread(self.descriptor, count, offset)


class RootedFiles:
    """Implements :class:`handrail.contract.doors.files.Files` on :class:`~handrail.runtime.files.roots.Roots`.

    :param seen: shared by all calls of one session
    :param may: judges each canonical path for ``fs.read`` and ``fs.write``
    :param hidden: the hidden files that the session has met, which are not read under another name either
    """

    def __init__(self, roots: Roots, seen: SeenFiles, may: May, hidden: HiddenFiles | None = None) -> None:
        self._roots = roots
        self._seen = seen
        self._may = may
        self._hidden = HiddenFiles() if hidden is None else hidden

    async def stat(self, path: str) -> FileStat:
        located = self._judged("fs.read", path)
        with contextlib.suppress(OSError):  # in the kernel's cache: no thread is needed
            descriptor = beneath.open_beneath(located, HANDLE, CACHED)
            try:
                return _file_stat(located.shown, os.fstat(descriptor))
            finally:
                os.close(descriptor)

        def look() -> FileStat:
            with _Opened(located, HANDLE, "looking at") as descriptor:
                return _file_stat(located.shown, os.fstat(descriptor))

        return await _in_thread(look)

    async def read_bytes(self, path: str, *, start: int = 0, max_bytes: int | None = None) -> FileBytes:
        located = self._judged("fs.read", path)
        if max_bytes is not None and max_bytes < 0:
            raise ToolError(f"max_bytes is {max_bytes}; 0 or more was expected", kind="invalid_input")

        def take(content: Content) -> FileBytes:
            begin = max(0, content.size + start) if start < 0 else min(start, content.size)
            count = content.size - begin if max_bytes is None else min(max_bytes, content.size - begin)
            if content.data is None and count > MAX_EDIT_BYTES:
                raise ToolError(
                    f"{located.shown}: {count} bytes at once are too many; ask for at most {MAX_EDIT_BYTES} with max_bytes",
                    kind="limit",
                )
            return FileBytes(located.shown, content.read(begin, count), begin, content.size)

        return await self._with_content(located, take)

    async def read_lines(
        self, path: str, *, first: int = 1, count: int | None = None, max_bytes: int = 200_000, max_line: int = 2_000
    ) -> FileLines:
        located = self._judged("fs.read", path)

        def take(content: Content) -> FileLines:
            index = lines.LineIndex(content.size) if content.data is not None else _indexes.of(content.stat)
            got = lines.window(content.read, index, first, count, max_bytes, max_line)
            return FileLines(located.shown, got.lines, got.first, got.next, got.total, content.size, got.cut)

        return await self._with_content(located, take)

    async def list(self, path: str) -> Sequence[FileStat]:
        located = self._judged("fs.read", path)

        def look() -> list[FileStat]:
            with _Opened(located, beneath.FOLDER, "listing") as descriptor:
                found: list[FileStat] = []
                with os.scandir(descriptor) as entries:
                    for entry in entries:
                        if len(found) >= MAX_LIST:
                            raise ToolError(
                                f"{located.shown} has more than {MAX_LIST} entries; use glob with a pattern",
                                kind="limit",
                            )
                        shown = self._roots.shown(f"{located.absolute.rstrip('/')}/{entry.name}")
                        try:
                            found.append(_file_stat(shown, entry.stat(follow_symlinks=False)))
                        except FileNotFoundError:  # gone since it was listed
                            continue
                found.sort(key=lambda one: one.path)
                return found

        return await _in_thread(look)

    async def read_for_edit(self, path: str, *, max_bytes: int = MAX_EDIT_BYTES) -> bytes:
        located = self._judged("fs.read", path)
        seen = self._seen.digest(located.absolute)
        limit = min(max_bytes, MAX_EDIT_BYTES)

        def take(content: Content) -> bytes:
            if content.data is None or content.size > limit:
                raise ToolError(
                    f"{located.shown} has {content.size} bytes; at most {limit} can be edited", kind="limit"
                )
            replace.check_seen(located, content.data, seen)
            return content.data

        return await self._with_content(located, take, note=False)

    async def write(self, path: str, data: bytes, *, over: bytes | Literal["new", "seen"] = "seen") -> Written:
        located = self._judged("fs.write", path)
        if not located.writable:
            raise ToolError(f"{located.shown} lies in a read-only folder; write inside the workspace", kind="denied")

        def put() -> Written:
            repositories.check_write(located, data)
            try:
                done = replace.replace(located, data, over, self._seen.digest(located.absolute))
            except OSError as error:
                raise beneath.explained(error, located, "writing") from error
            self._seen.note(located.absolute, done.sha256)
            return Written(located.shown, done.created, len(data), done.sha256, done.before)

        async with running_programs.replacing(located.absolute, located.shown):
            return await _to_its_end(put)

    def _judged(self, capability: Capability, path: str) -> Located:
        located = self._roots.locate(path)
        if not located.inside:
            raise ToolError(self._roots.outside(located), kind="denied")
        if capability == "fs.write":
            found = tool_protection(beneath.relative(located))
            if found is not None and not found.asks:  # the rules ask about the others
                raise ToolError(found.refusal(located.shown), kind="denied")
        elif is_key(beneath.relative(located)):
            raise ToolError(key_refusal(located.shown), kind="denied")
        refused = self._may(capability, located.absolute)
        if refused is not None:
            if capability == "fs.read":
                self._hidden.note([located.absolute])
            raise ToolError(refused, kind="denied")
        return located

    async def _with_content(self, located: Located, take: Callable[[Content], _T], *, note: bool = True) -> _T:
        """Open, note the hash, and let ``take`` pick its part; in a thread unless all of it is at hand."""
        content = _at_hand(located)
        if content is not None:
            self._check_identity(content.stat, located)
            if note:
                self._note(located, content)
            return take(content)

        def read() -> _T:
            with _Opened(located, beneath.READ, "reading") as descriptor:
                found = beneath.regular(descriptor, located)
                self._check_identity(found, located)
                whole = replace.read_whole(descriptor, found.st_size) if found.st_size <= MAX_EDIT_BYTES else None
                if whole is not None and len(whole) > MAX_EDIT_BYTES:  # it grew while it was read
                    found, whole = os.fstat(descriptor), None
                content = Content(descriptor, found, whole)
                if note:
                    self._note(located, content)
                return take(content)

        return await _in_thread(read)

    def _check_identity(self, found: os.stat_result, located: Located) -> None:
        """:raises ToolError: ``denied`` for a hidden file under another name"""
        refused = self._hidden.refusal(found, located, self._may)
        if refused is not None:
            raise ToolError(refused, kind="denied")

    def _note(self, located: Located, content: Content) -> None:
        if content.data is not None:
            self._seen.note(located.absolute, hashlib.sha256(content.data).hexdigest())


class _Opened:
    """A descriptor for the length of a ``with``; the kernel's refusals become the model's."""

    def __init__(self, located: Located, flags: int, doing: str) -> None:
        self._located, self._flags, self._doing = located, flags, doing
        self._descriptor = -1

    def __enter__(self) -> int:
        try:
            self._descriptor = beneath.open_beneath(self._located, self._flags)
        except OSError as error:
            raise beneath.explained(error, self._located, self._doing) from error
        return self._descriptor

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError):
            raise beneath.explained(error, self._located, self._doing) from error


def _at_hand(located: Located) -> Content | None:
    """The whole of a small file if the kernel can give it without waiting for a disk; else None."""
    if not _NOWAIT:
        return None
    try:
        descriptor = beneath.open_beneath(located, beneath.READ, CACHED)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EINVAL):
            return None
        raise beneath.explained(error, located, "reading") from error
    try:
        found = beneath.regular(descriptor, located)
        if found.st_size > INLINE_BYTES:
            return None
        buffer = bytearray(found.st_size + 1)
        try:
            count = os.preadv(descriptor, [buffer], 0, _NOWAIT)
        except OSError:  # not in the cache, or a file system that cannot say
            return None
        return Content(descriptor, found, bytes(buffer[:count])) if count == found.st_size else None
    finally:
        os.close(descriptor)


def _file_stat(shown: str, found: os.stat_result) -> FileStat:
    kind: FileKind = "other"
    if stat.S_ISREG(found.st_mode):
        kind = "file"
    elif stat.S_ISDIR(found.st_mode):
        kind = "directory"
    elif stat.S_ISLNK(found.st_mode):
        kind = "symlink"
    return FileStat(shown, kind, found.st_size, found.st_mtime_ns)


async def _in_thread(work: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(None, work)


async def _to_its_end(work: Callable[[], _T]) -> _T:
    """Run ``work`` in a thread; a caller that is cancelled is told so only when the thread has finished.

    So no write lands after its call was answered as cancelled.
    """
    running = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if not running.done():
            await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at, so that it is not reported as never retrieved
        raise
