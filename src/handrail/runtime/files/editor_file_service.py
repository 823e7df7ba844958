"""The file service of a session in an editor: reading a file returns the editor's text, with unsaved changes.

The editor is asked by a path, and opens the file that is there by then. A program in the sandbox could put a link there
between our check and the editor's, and so read a file outside the workspace. So the editor's text counts only if no folder
on the way has changed since well before the request. The operating system sets that change time, and no program can forge
it. Writing has no such check, since it would come too late: this process writes files, never the editor. A file with
unsaved changes in the editor is not written.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar
from weakref import WeakKeyDictionary

from handrail.contract.errors import ToolError
from handrail.contract.services.client_services import EditorClientHandler
from handrail.contract.services.file_services import FileChange, MoveOrDeleteResult, ResolvedPath, WriteResult
from handrail.contract.text.text_encodings import convert_to_plain_utf8, detect_text_encoding
from handrail.contract.tool.requires import AccessCheck
from handrail.runtime.files.atomic_write import MAX_EDIT_BYTES
from handrail.runtime.files.joint_changes import MultiFileChangeJournal
from handrail.runtime.files.rooted_file_service import ChangeTracker, OpenFileContent, RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.ripgrep import HiddenFileRecord

SETTLED_NS = 200_000_000
"""How old a folder's last change must be, so that another change is visible: file clocks tick every 10 ms."""
FRESH_NS = 2_000_000_000
"""An editor may not have noticed a write that is younger than this."""
EDITOR_TIMEOUT_S = 5.0
_MAX_FILES = 4_096
_MAX_TEXTS = 8

_T = TypeVar("_T")
_FolderStates = tuple[tuple[int, int, int], ...]


class KnownFileTexts:
    """A record of texts that files are known to have had: an editor that shows one is only outdated."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()

    def record(self, path: str, data: bytes) -> None:
        """Record a text of a file."""
        mark = _hash_text(data)
        texts = self._known.setdefault(path, OrderedDict())
        self._known.move_to_end(path)
        texts[mark] = None
        texts.move_to_end(mark)
        while len(texts) > _MAX_TEXTS:
            texts.popitem(last=False)
        while len(self._known) > _MAX_FILES:
            self._known.popitem(last=False)

    def is_known(self, path: str, data: bytes) -> bool:
        """Return whether a file is known to have had this text."""
        return _hash_text(data) in self._known.get(path, ())


_KNOWN_TEXTS: WeakKeyDictionary[EditorClientHandler, KnownFileTexts] = WeakKeyDictionary()
"""The known texts of each open session."""


class EditorFiles(RootedFiles):
    """A file service for a session whose client is an editor, with the user's unsaved changes.

    :param buffers: asks the editor for the text of a file; one for each session
    """

    def __init__(
        self,
        roots: SessionRoots,
        seen: SeenFileHashes,
        may: AccessCheck,
        buffers: EditorClientHandler,
        hidden: HiddenFileRecord | None = None,
        track_change: Callable[[ResolvedPath], ChangeTracker | None] = lambda _: None,
        journal: MultiFileChangeJournal | None = None,
    ) -> None:
        super().__init__(roots, seen, may, hidden, track_change, journal)
        self._buffers = buffers
        self._texts = _KNOWN_TEXTS.setdefault(buffers, KnownFileTexts())

    async def write(self, path: str, data: bytes, *, expected: bytes | Literal["new", "seen"] = "seen") -> WriteResult:
        located = self._authorize("fs.write", path)
        await self._refuse_unsaved(located)
        written = await super().write(path, data, expected=expected)
        if written.previous_content is not None:
            self._texts.record(located.absolute, written.previous_content)
        self._texts.record(located.absolute, data)
        return written

    async def change_atomically(self, changes: Sequence[FileChange]) -> Sequence[str]:
        places = [self._authorize("fs.write", change.path) for change in changes]
        for located, change in zip(places, changes, strict=True):
            if change.before is not None:
                await self._refuse_unsaved(located)
        shown = await super().change_atomically(changes)
        for located, change in zip(places, changes, strict=True):
            for data in (change.before, change.after):
                if data is not None:
                    self._texts.record(located.absolute, data)
        return shown

    async def move(self, path: str, to: str) -> MoveOrDeleteResult:
        await self._refuse_unsaved(self._authorize("fs.write", path))
        return await super().move(path, to)

    async def delete(self, path: str, *, recursive: bool = False) -> MoveOrDeleteResult:
        await self._refuse_unsaved(self._authorize("fs.write", path))
        return await super().delete(path, recursive=recursive)

    async def _refuse_unsaved(self, located: ResolvedPath) -> None:
        """Check that a file has no unsaved changes.

        :raises ToolError: ``conflict`` if it has
        """
        try:
            unsaved = await self._read_unsaved(located)
        except ToolError:  # the file cannot be read: the change itself reports why
            return
        if unsaved is not None:
            raise build_unsaved_changes_error(located)

    async def _open_and_use_content(
        self, located: ResolvedPath, take: Callable[[OpenFileContent], _T], *, note: bool = True
    ) -> _T:
        """Pass the content of a file to ``take``: the editor's unsaved text, else the text on disk.

        :param note: whether the content is shown to the model. If not, it is to be changed, and unsaved changes raise
            an error.
        """
        if (unsaved := await self._read_unsaved(located)) is None:
            return await super()._open_and_use_content(located, take, note=note)
        if not note:
            raise build_unsaved_changes_error(located)
        on_disk = await super()._open_and_use_content(located, lambda content: content.stat, note=True)
        return take(OpenFileContent(-1, on_disk, unsaved))

    async def _read_unsaved(self, located: ResolvedPath) -> bytes | None:
        """Return the unsaved text that the editor shows for a file; None if there is none to trust."""
        data, found = await super()._open_and_use_content(
            located, lambda content: (content.data, content.stat), note=False
        )
        if data is None or not located.is_writable or detect_text_encoding(data) is None:
            return None
        self._texts.record(located.absolute, data)
        way = _read_folder_states(located, found)
        if way is None or found.st_mtime_ns > time.time_ns() - FRESH_NS:
            return None
        try:
            async with asyncio.timeout(EDITOR_TIMEOUT_S):
                text = await self._buffers.read_unsaved_text(located.absolute)
        except TimeoutError:
            return None
        if text is None or len(text) > MAX_EDIT_BYTES or way != _read_folder_states(located, found):
            return None
        shown = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
        as_utf8 = data.decode("utf-8", "replace").encode()  # in an editor that takes every file for UTF-8
        if len(shown) > MAX_EDIT_BYTES or _normalize_editor_text(shown) in map(_normalize_editor_text, (data, as_utf8)):
            return None
        if self._texts.is_known(located.absolute, shown):
            return None
        return shown


def build_unsaved_changes_error(located: ResolvedPath) -> ToolError:
    """Return the error for a write to a file with unsaved changes."""
    return ToolError(
        f"`{located.display_path}` was not changed: the user has unsaved changes to it in their editor. Ask the "
        "user to save or discard them, then read the file again.",
        kind="conflict",
    )


def _hash_text(data: bytes) -> bytes:
    return hashlib.sha256(_normalize_editor_text(data)).digest()


def _normalize_editor_text(data: bytes) -> bytes:
    """Return a text without the differences that editors make: encoding, line ends, last newline, byte order mark."""
    return convert_to_plain_utf8(data)[0].replace(b"\r\n", b"\n").rstrip(b"\n")


def _read_folder_states(located: ResolvedPath, found: os.stat_result) -> _FolderStates | None:
    """Return the state of each folder from the root to the file; None if it cannot be trusted.

    It cannot be trusted if a folder changed too recently or is a link, or if the file is not the one that was found.
    """
    settled = time.time_ns() - SETTLED_NS
    if os.name == "nt":  # its file times have another meaning
        return None
    way: list[tuple[int, int, int]] = []
    folder: str = os.path.dirname(located.absolute)  # noqa: PTH120 - texts, in step with what is judged
    try:
        file = os.lstat(located.absolute)
        while True:
            one = os.lstat(folder)
            if not stat.S_ISDIR(one.st_mode) or one.st_ctime_ns > settled:
                return None
            way.append((one.st_dev, one.st_ino, one.st_ctime_ns))
            if folder in ("/", located.root):
                break
            folder = os.path.dirname(folder)  # noqa: PTH120
    except OSError:
        return None
    if not stat.S_ISREG(file.st_mode) or (file.st_dev, file.st_ino) != (found.st_dev, found.st_ino):
        return None
    return tuple(way)
