"""The file and search services of a runtime, and a path once it is resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from handrail.contract.struct import Struct, field

FileKind = Literal["file", "directory", "symlink", "other"]
SearchOmission = Literal["hidden", "ignored", "binary", "case", "deeper", "inside"]
"""Why a search left a file out. ``case``: its name is in another letter case. ``deeper``: it is below the folder of the pattern.
``inside``: it is in a folder that the pattern names."""


class FileStat(Struct, frozen=True):
    """One entry of a file system. Sizes are bytes, times are wall-clock nanoseconds."""

    path: str
    kind: FileKind
    size: int
    mtime_ns: int


class FileByteRange(Struct, frozen=True):
    """A range of a file: ``data`` is ``[start, start + len(data))`` of ``size`` bytes."""

    path: str
    data: bytes
    start: int
    size: int

    @property
    def end_offset(self) -> int:
        """The position after the last byte of ``data``."""
        return self.start + len(self.data)


class FileLineRange(Struct, frozen=True):
    """Whole lines ``first … last`` of a file, 1-based and without line ends.

    :param next: the line to continue at, or None at the end
    :param total: the number of lines, or None if the end was not reached
    :param truncated_lines: the numbers of lines that were longer than the limit and were shortened
    :param encoding: the encoding of the file, such as ``UTF-8`` or ``ISO-8859-1``; None if it is not text
    """

    path: str
    lines: tuple[str, ...]
    first: int
    next: int | None
    total: int | None
    size: int
    truncated_lines: tuple[int, ...] = ()
    encoding: str | None = "UTF-8"

    @property
    def last_line_number(self) -> int:
        """The number of the last line."""
        return self.first + len(self.lines) - 1


class WriteResult(Struct, frozen=True):
    """The result of :meth:`FileService.write`."""

    path: str
    created: bool
    size: int
    sha256: str
    previous_content: bytes | None
    """The replaced content, for a diff; None if the file is new."""


class MoveOrDeleteResult(Struct, frozen=True):
    """The result of moving or deleting a file or folder.

    :param path: the path that it has now, or had before it was deleted
    :param entries: the number of files, folders and links, with everything in a folder
    :param size: the bytes of all its files
    """

    path: str
    kind: FileKind
    entries: int
    size: int


class FileChange(Struct, frozen=True):
    """The change of one file in :meth:`FileService.change_atomically`.

    :param before: what must be there now; None if nothing
    :param after: the new content; None deletes the file
    :param like: the path of the file whose permissions a new file gets, such as the one from which it moves
    :param is_executable: whether it can be executed afterwards; None keeps that
    """

    path: str
    before: bytes | None
    after: bytes | None
    like: str | None = None
    is_executable: bool | None = None


class FileService(Protocol):
    """Files below the roots of the session.

    The operating system resolves paths, so no link or race leaves a root. Reading a file, whole or in part, records
    the hash of its content for the session. Writing over an existing file requires that its content still has this
    hash. A changed or never read file is a ``conflict``.

    Every method raises :class:`~handrail.contract.errors.ToolError`: ``denied`` for a path outside the roots or one
    that a rule denies, ``failed`` for a missing file.
    """

    async def stat(self, path: str) -> FileStat:
        """Return the kind, size and time of one entry."""
        ...

    async def read_bytes(self, path: str, *, start: int = 0, max_bytes: int | None = None) -> FileByteRange:
        """``start`` below 0 counts from the end."""
        ...

    async def read_lines(
        self, path: str, *, first: int = 1, count: int | None = None, max_bytes: int = 200_000, max_line: int = 2_000
    ) -> FileLineRange:
        r"""Read whole lines of a text file in any common encoding. Invalid bytes become U+FFFD.

        In a file without any ``\n``, each ``\r`` ends a line.

        :param first: the first line; below 0 it counts from the end (-1 is the last line)
        """
        ...

    async def list(self, path: str) -> Sequence[FileStat]:
        """Return the entries of a folder."""
        ...

    async def read_for_edit(self, path: str, *, max_bytes: int = 16 * 1024 * 1024, require_seen: bool = True) -> bytes:
        """Read the whole content and check it against what this session has read.

        :param require_seen: whether to check that; a patch shows by its context what its author has read
        :raises ToolError: ``conflict`` if the file was never read or has changed since; ``limit`` if it is larger
        """
        ...

    async def write(self, path: str, data: bytes, *, expected: bytes | Literal["new", "seen"] = "seen") -> WriteResult:
        """Replace a file atomically and create its parent folders.

        :param expected: what must be there now: these exact bytes, ``"new"`` (nothing), or ``"seen"`` (nothing, or what
            this session has read)
        :raises ToolError: ``conflict`` if something else is there
        """
        ...

    async def change_atomically(self, changes: Sequence[FileChange]) -> Sequence[str]:
        """Create, replace and delete several files, all or none, and return their paths as shown.

        A process that is killed meanwhile leaves a journal, from which the next one finishes or reverts the changes.

        :raises ToolError: ``conflict`` if one file is not as expected; then none is changed
        """
        ...

    async def move(self, path: str, to: str) -> MoveOrDeleteResult:
        """Move a file or folder to a path that does not exist yet, and create its parent folders.

        The rules must allow reading the old path and writing both. Each entry of a folder is checked.

        :raises ToolError: ``conflict`` if ``to`` exists or the folder changes meanwhile; ``limit`` for a large folder
        """
        ...

    async def delete(self, path: str, *, recursive: bool = False) -> MoveOrDeleteResult:
        """Delete a file or an empty folder.

        :param recursive: also delete a folder with everything in it
        :raises ToolError: ``conflict`` if the folder is not empty, or changed since it was read; ``limit`` for a large folder
        """
        ...

    async def make_folder(self, path: str) -> FileStat:
        """Create a folder and its parents. An existing folder is left as it is."""
        ...


class LineMatch(Struct, frozen=True):
    """A line that a search found. ``line`` counts from 1.

    :param encoding: that of the file, if it is not UTF-8
    """

    path: str
    line: int
    text: str
    encoding: str | None = None


class FileSearchResult(Struct, frozen=True):
    """The results of a search, at most as many as requested. ``is_truncated`` is true if the search stopped there."""

    matches: tuple[LineMatch, ...] = ()
    paths: tuple[str, ...] = ()
    is_truncated: bool = False
    denied_count: int = 0
    """How many paths a rule denied. Denied matches are not counted: their number, for different patterns, would
    reveal the content of a file."""
    unsearched_count: int = 0
    """How many text files have an encoding that the search does not know."""
    searched_count: int | None = None
    """If nothing was found: how many files were searched, or None if counting took too long."""
    omissions: Mapping[str, int] = field(default_factory=dict[str, int])
    """If nothing was found: how many files would have matched, by :data:`SearchOmission`, the reason for
    which they were left out."""


class SurveyedFile(NamedTuple):
    """A file below a surveyed folder.

    :param lines: None if it is not text
    """

    path: str
    lines: int | None


class OutlineEntry(NamedTuple):
    """A definition in a file."""

    line: int
    text: str


class RankedFile(NamedTuple):
    """A file that matches, with its first definitions."""

    path: str
    score: float
    outline: tuple[OutlineEntry, ...]


class FileSurvey(Struct, frozen=True):
    """The files below a folder.

    :param path: of the folder
    :param ranked: those that match best, the best first
    :param texts: the text of files that were asked for by name
    :param denied_count: how many files may not be read
    :param is_truncated: whether there are more files than a survey lists
    :param is_partial: whether the index is full, so that some files were ranked by their paths only
    """

    path: str
    files: tuple[SurveyedFile, ...]
    ranked: tuple[RankedFile, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    denied_count: int = 0
    is_truncated: bool = False
    is_partial: bool = False


class SearchService(Protocol):
    """ripgrep below the roots: it respects ignore files, follows no links and is bounded for any pattern.

    A folder that a call names is searched even if it is hidden or ignored, whether in ``path`` or at the start of the
    pattern.
    """

    async def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        literal: bool = False,
        hidden: bool = False,
        ignored: bool = False,
        max_matches: int = 10_000,
    ) -> FileSearchResult:
        """Search file contents with a regular expression.

        :param hidden: also search hidden files
        :param ignored: also search files that an ignore file excludes
        """
        ...

    async def glob(
        self, pattern: str, path: str = ".", *, hidden: bool = False, ignored: bool = False, max_paths: int = 100_000
    ) -> FileSearchResult:
        """Find files by a path pattern.

        :param hidden: also find hidden files; without it, only those that a part of the pattern with a dot names
        :param ignored: also find files that an ignore file excludes
        """
        ...

    async def survey_files(
        self, path: str = ".", *, focus: str = "", limit: int = 10, read_names: Sequence[str] = ()
    ) -> FileSurvey:
        """Return all files below a folder, and those that match a text best.

        Files are left out as in :meth:`glob`. Their content does not count as read by the session.

        :param focus: a task or question; empty for no ranking
        :param limit: the number of ranked files
        :param read_names: names of files directly in the folder whose text is returned
        """
        ...


# Resolved paths, for every room that reads, evaluates or locks files. Pure.


class ResolvedPath(NamedTuple):
    """One resolved path.

    :param absolute: canonical: no ``..`` and no link in the existing part; a tail that does not exist yet stays as
        written
    :param display_path: relative inside the workspace, absolute elsewhere; characters that a reader can
        miss are escaped, and :meth:`PathResolver.resolve_path` takes the escapes back
    :param is_inside: whether the path is below any root
    :param root: that root, or None
    :param is_writable: whether that root may be written at all
    :param relative_path: the path relative to the root, by which it is opened; ``.`` for the root itself
    :param same_looking: other entries whose paths differ only in how an accent is encoded, spelled out
    """

    absolute: str
    display_path: str
    is_inside: bool
    root: str | None = None
    is_writable: bool = False
    relative_path: str = ""
    same_looking: tuple[str, ...] = ()


class PathResolver(Protocol):
    """The resolver of a session's paths: :class:`~handrail.runtime.files.session_roots.SessionRoots`, for lower rooms."""

    workspace: str
    """Absolute and canonical."""

    def resolve_path(self, path: str, /) -> ResolvedPath:
        """Resolve a path of a tool's argument as it is now. It may be spelled as a message showed it.

        :raises ToolError: for a text that cannot name a file
        """
        ...

    def resolve_exact_path(self, path: str, /) -> ResolvedPath:
        """Resolve a path that is spelled as on the disk, such as a word of a shell text.

        :raises ToolError: for a text that cannot name a file
        """
        ...
