"""The file and search services of a runtime, and a path once it is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

FileKind = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True, slots=True)
class FileStat:
    """One entry of a file system; sizes are bytes, times wall-clock nanoseconds."""

    path: str
    kind: FileKind
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FileBytes:
    """A range of a file: ``data`` is ``[start, start + len(data))`` of ``size`` bytes."""

    path: str
    data: bytes
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + len(self.data)


@dataclass(frozen=True, slots=True)
class FileLines:
    """Whole lines ``first … last`` (1-based) without their ends; ``next`` is where to go on, or None at the end.

    ``total`` is the number of lines, or None where the end was not reached. ``cut`` lists the line numbers
    that were longer than the limit for one line and were shortened.
    """

    path: str
    lines: tuple[str, ...]
    first: int
    next: int | None
    total: int | None
    size: int
    cut: tuple[int, ...] = ()

    @property
    def last(self) -> int:
        return self.first + len(self.lines) - 1


@dataclass(frozen=True, slots=True)
class Written:
    """What :meth:`Files.write` did."""

    path: str
    created: bool
    size: int
    sha256: str
    before: bytes | None
    """The content that was replaced, for a diff; None if there was no such file."""


class Files(Protocol):
    """Files beneath the roots, resolved by the operating system so that no link or race leaves them.

    Reading a file, whole or in part, records the hash of its content for the session. Writing over an existing file
    requires that its content still has this hash; otherwise, or if it was never read, it is a ``conflict``.

    Every method raises :class:`~handrail.contract.errors.ToolError`: ``denied`` for a path outside the roots or one that
    rules close, ``failed`` for one that is not there.
    """

    async def stat(self, path: str) -> FileStat: ...

    async def read_bytes(self, path: str, *, start: int = 0, max_bytes: int | None = None) -> FileBytes:
        """``start`` below 0 counts from the end."""
        ...

    async def read_lines(
        self, path: str, *, first: int = 1, count: int | None = None, max_bytes: int = 200_000, max_line: int = 2_000
    ) -> FileLines:
        """``first`` below 0 counts lines from the end (-1 is the last). Invalid UTF-8 is shown as U+FFFD."""
        ...

    async def list(self, path: str) -> Sequence[FileStat]:
        """The entries of a folder."""
        ...

    async def read_for_edit(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        """The whole content, checked against what this session has read.

        :raises ToolError: ``conflict`` if never read or changed since; ``limit`` if larger
        """
        ...

    async def write(self, path: str, data: bytes, *, over: bytes | Literal["new", "seen"] = "seen") -> Written:
        """Replace atomically, creating parent folders.

        :param over: what must be there now: these exact bytes, ``"new"`` (nothing), or ``"seen"``
            (nothing, or what this session has read)
        :raises ToolError: ``conflict`` when something else is there
        """
        ...


@dataclass(frozen=True, slots=True)
class Match:
    """A line that a search found; ``line`` is counted from 1."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """Search results, at most as many as asked for; ``more`` if the search was stopped there."""

    matches: tuple[Match, ...] = ()
    paths: tuple[str, ...] = ()
    more: bool = False
    skipped: int = 0
    """How many paths were left out because a rule denies them. Matches that were left out are not counted: their number,
    for one pattern and another, would reveal what is in the file."""


class Search(Protocol):
    """ripgrep beneath the roots: honours ignore files, follows no links, is bounded, harmless on hostile patterns."""

    async def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        literal: bool = False,
        max_matches: int = 10_000,
    ) -> Found: ...

    async def glob(self, pattern: str, path: str = ".", *, hidden: bool = False, max_paths: int = 100_000) -> Found: ...


# A path once it is resolved, for every room that reads, rules over or locks files. Pure.


class Located(NamedTuple):
    """One path, resolved.

    :param absolute: canonical: no ``..``, no link in what exists; a tail that does not exist yet is kept as written
    :param shown: relative inside the workspace, absolute elsewhere; control characters and bytes that are no
        UTF-8 are escaped
    :param inside: whether it lies beneath any root
    :param root: the root it lies beneath, or None
    :param writable: whether that root may be written at all
    :param inner: the path from the root to it, by which it is opened; ``.`` for the root itself
    """

    absolute: str
    shown: str
    inside: bool
    root: str | None = None
    writable: bool = False
    inner: str = ""


class PathRoots(Protocol):
    """What resolves a session's paths: :class:`~handrail.runtime.files.roots.Roots`, for rooms below it."""

    workspace: str
    """Absolute, canonical."""

    def locate(self, path: str, /) -> Located:
        """Return where ``path`` is now.

        :raises ToolError: for a text that can name no file
        """
        ...
