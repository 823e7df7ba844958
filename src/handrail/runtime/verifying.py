"""What a search found, checked against the files that may be read.

A search walks names and opens them later, in another process: a file that is swapped for a link, or renamed, in
between is reported under a name that it does not have. So each result is checked here. The file that was judged is
opened beneath its root without links, and only what stands in it at the reported place is shown.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from threading import Lock
from typing import NamedTuple

from handrail.contract.tool.requires import May
from handrail.runtime.files import beneath
from handrail.runtime.files.openat2 import BENEATH, HANDLE, NO_MAGICLINKS, NO_SYMLINKS, openat2
from handrail.runtime.files.roots import Located
from handrail.runtime.ripgrep import MAX_TEXT, is_line

_MOST_KNOWN = 10_000
_MOST_SHOWN = 16 * MAX_TEXT
"""Bytes of a line that are compared: ripgrep cuts a long line after so many signs, which may take several bytes each."""
_MOST_DECODED = 64 * 1024 * 1024
_UTF_8_MARK = b"\xef\xbb\xbf"
_UTF_16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


class HiddenFiles:
    """The files that were found under a hidden name, known by what they are. Safe from any thread.

    A hidden file that is renamed, or has a second name, is still the file that a rule hides. A file is known by its
    device, inode, size and time of change of its content: one that is written later is another one.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], tuple[int, int, str]] = {}
        self._lock = Lock()

    def note(self, paths: Iterable[str]) -> None:
        """Remember the regular files at these paths."""
        for path in paths:
            try:
                found = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                with self._lock:
                    self._names.pop((found.st_dev, found.st_ino), None)
                    self._names[found.st_dev, found.st_ino] = (found.st_size, found.st_mtime_ns, path)
                    while len(self._names) > _MOST_KNOWN:
                        del self._names[next(iter(self._names))]

    def refusal(self, found: os.stat_result, located: Located, may: May) -> str | None:
        """Return why an open file is not to be read under this name; None where nothing is known against it."""
        known = self._names.get((found.st_dev, found.st_ino))
        if known is None or known[:2] != (found.st_size, found.st_mtime_ns) or known[2] == located.absolute:
            return None
        reason = may("fs.read", known[2])
        if reason is None:
            return None
        return (
            f"{located.shown} is the same file as one that is hidden under another name. {reason} "
            "If this content is meant to be read, a person copies it to a new file"
        )


class Hit(NamedTuple):
    """One match that is to be checked.

    :param located: the file that was judged
    """

    located: Located
    line: int
    offset: int
    text: bytes


def verified_hits(hits: Sequence[Hit], hidden: HiddenFiles, may: May) -> Iterator[Hit]:
    """Give those whose line stands in the file that was judged, at the reported place."""
    for located, same in groupby(hits, key=lambda hit: hit.located):
        try:
            descriptor = beneath.open_beneath(located, beneath.READ)
        except OSError:
            continue  # it became a link, or is gone
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or hidden.refusal(found, located, may) is not None:
                continue
            content = _Text(descriptor, found.st_size)
            yield from (hit for hit in same if is_line(hit.text, content.at(hit.offset)))
        except OSError:
            continue
        finally:
            os.close(descriptor)


def verified_paths(paths: Sequence[Located]) -> Iterator[Located]:
    """Give those that are there as regular files, in folders that are reached by no link."""
    for (root, folder), same in groupby(paths, key=lambda one: (one.root, one.absolute.rpartition("/")[0])):
        assert root is not None
        try:
            top = beneath.open_root(root)
            try:
                inside = folder[len(root) :].strip("/") or "."
                parent = openat2(top, inside, HANDLE | os.O_DIRECTORY, BENEATH | NO_SYMLINKS | NO_MAGICLINKS)
            finally:
                os.close(top)
        except OSError:
            continue
        try:
            yield from (one for one in same if _is_file(one.absolute.rpartition("/")[2], parent))
        finally:
            os.close(parent)


def _is_file(name: str, parent: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except OSError:
        return False


class _Text:
    """The content of an open file as ripgrep counts it: without a byte order mark, and in UTF-8."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._decoded: bytes | None = None
        mark = os.pread(descriptor, 3, 0)
        self._skipped = 3 if mark == _UTF_8_MARK else 0
        if (encoding := _UTF_16.get(mark[:2])) is not None:
            whole = os.pread(descriptor, min(size, _MOST_DECODED), 2)
            self._decoded = whole.decode(encoding, "replace").encode("utf-8", "replace")

    def at(self, offset: int) -> bytes:
        if self._decoded is not None:
            return self._decoded[offset : offset + _MOST_SHOWN]
        return os.pread(self._descriptor, _MOST_SHOWN, offset + self._skipped)
