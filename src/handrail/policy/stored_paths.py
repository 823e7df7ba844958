"""The paths that git repositories of the workspace store, now and in their history, read from their files.

A rule hides a file from programs, and the sandbox masks it in the work tree. No mask covers what a repository stores of it.
So a command that can print stored files requires approval if the repository stores a path that the rules hide. The index and
the objects are read as files, so no program of the workspace runs. A repository that cannot be read, or that is too large,
has unknown paths.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from handrail.contract.struct import Struct, field
from handrail.contract.text.lazy_patterns import compile_on_first_use
from handrail.policy.shell.parser import ShellScript
from handrail.policy.shell.stored_file_forms import find_stored_file_accesses

_MAX_INDEX_BYTES = 64 * 1024 * 1024
_MAX_OBJECTS = 1_000_000
_MAX_TREE_BYTES = 256 * 1024 * 1024
_MAX_ONE_TREE_BYTES = 8 * 1024 * 1024
_MAX_SCAN_S = 20.0
_MAX_STORES = 8
_MAX_REPOSITORIES = 32
_TREE_ENTRY = compile_on_first_use(rb"(\d{1,6}) ([^\0]+)\0(.{20})", re.DOTALL)
_COMMIT_TREE = compile_on_first_use(rb"tree ([0-9a-f]{40})\n")
_GIT_FILE = compile_on_first_use(r"gitdir: (.+)\n?")
_COMMIT, _TREE, _OFFSET_DELTA, _NAMED_DELTA = 1, 2, 6, 7
_ID = 20


class UnreadableStoreError(Exception):
    """A repository whose stored paths are unknown."""


class PrintedRepository(NamedTuple):
    """A repository of which a command may print stored files.

    :param shown: the command as a message names it
    :param scope: the files in the index, or all of the history
    :param work_tree: the absolute folder that the paths are relative to
    :param git_folder: None if it is unknown
    """

    shown: str
    scope: str
    work_tree: str
    git_folder: str | None

    @property
    def has_unread_history(self) -> bool:
        """Whether :func:`load_history` would find paths that are not known yet."""
        return self.scope == "history" and self.git_folder is not None and not list_history_paths(self.git_folder)[0]

    def list_paths(self) -> frozenset[str] | None:
        """Return the stored paths that the command may print; None if they are unknown."""
        if self.git_folder is None:
            return None
        indexed = list_indexed_paths(self.git_folder)
        if self.scope == "index" or indexed is None:
            return indexed
        is_current, history = list_history_paths(self.git_folder)
        return history if is_current else None


class StoredPaths(Struct):
    """The known paths of one repository, relative to its work tree; None if they are unknown."""

    indexed: frozenset[str] | None = None
    index_state: object = None
    history: frozenset[str] | None = None
    history_state: object = None
    store: _ObjectStore | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_known: dict[str, StoredPaths] = {}


def find_git_folder(work_tree: str) -> str | None:
    """Return the git folder of a work tree; None if it has none.

    :raises UnreadableStoreError: if a file or link that names it cannot be followed
    """
    place = os.path.join(work_tree, ".git")  # noqa: PTH118 - a hot path
    try:
        found = os.stat(place)  # noqa: PTH116
        if stat.S_ISDIR(found.st_mode):
            return place
        match = _GIT_FILE.fullmatch(Path(place).read_text(encoding="utf-8", errors="surrogateescape")[:4_096])
    except FileNotFoundError:
        if os.path.islink(place):  # noqa: PTH114 - a hot path
            raise UnreadableStoreError from None
        return None
    except OSError:
        raise UnreadableStoreError from None
    if match is None:
        raise UnreadableStoreError
    return os.path.normpath(os.path.join(work_tree, match.group(1)))  # noqa: PTH118


def list_indexed_paths(git_folder: str) -> frozenset[str] | None:
    """Return the paths that the index of a repository has; None if they are unknown."""
    known = _entry(git_folder)
    try:
        found = os.stat(os.path.join(git_folder, "index"))  # noqa: PTH116, PTH118
    except FileNotFoundError:
        return frozenset()
    except OSError:
        return None
    state = (found.st_ino, found.st_size, found.st_mtime_ns)
    if known.index_state != state:
        known.indexed = _read_index(Path(git_folder, "index"), found)
        known.index_state = state
    return known.indexed


def list_history_paths(git_folder: str) -> tuple[bool, frozenset[str] | None]:
    """Return whether the history was read since it last changed, and its paths; None in their place if they are unknown."""
    known = _entry(git_folder)
    state = _history_state(git_folder)
    return known.history_state == state, known.history


def load_history(git_folder: str) -> None:
    """Read the paths of all objects of a repository. This can take seconds, so it runs in a thread."""
    known = _entry(git_folder)
    with known.lock:
        state = _history_state(git_folder)
        if known.history_state == state:
            return
        try:
            if known.store is None or not known.store.read_new_objects():
                known.store = None  # also if reading fails
                store = _ObjectStore(git_folder)
                store.read_new_objects()
                known.store = store
            paths = frozenset(known.store.paths)
        except (UnreadableStoreError, OSError, zlib.error, ValueError, IndexError):
            paths = known.store = None
        known.history, known.history_state = paths, state


async def load_histories(repositories: Iterable[PrintedRepository]) -> None:
    """Read the history of each repository, in a thread."""
    for one in repositories:
        if one.git_folder is not None:
            await asyncio.to_thread(load_history, one.git_folder)


def _entry(git_folder: str) -> StoredPaths:
    found = _known.get(git_folder)
    if found is None:
        if len(_known) >= _MAX_REPOSITORIES:
            _known.clear()
        found = _known[git_folder] = StoredPaths()
    return found


def _read_index(path: Path, found: os.stat_result) -> frozenset[str] | None:
    """Return the paths of an index (gitformat-index(5), versions 2 to 4); None if it cannot be read."""
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_INDEX_BYTES:
        return None
    try:
        data = path.read_bytes()
    except OSError:
        return None
    version = int.from_bytes(data[4:8])
    if data[:4] != b"DIRC" or version not in (2, 3, 4) or b"link" in data[-64:]:
        return None
    names: list[bytes] = []
    at, name = 12, b""
    try:
        for _ in range(int.from_bytes(data[8:12])):
            start = at + 62 + (2 if data[at + 60] & 0x40 else 0)
            if version == 4:
                removed, start = _read_offset(data, start)
                end = data.index(b"\0", start)
                name = name[: len(name) - removed] + data[start:end]
                at = end + 1
            else:
                end = data.index(b"\0", start)
                name = data[start:end]
                at += (end - at + 8) & ~7
            names.append(name)
    except (ValueError, IndexError):
        return None
    return frozenset(name.decode("utf-8", "surrogateescape") for name in names)


def _read_offset(data: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    """Return a number of git's offset encoding, and where it ends."""
    byte = data[at]
    value = byte & 0x7F
    while byte & 0x80:
        at += 1
        byte = data[at]
        value = ((value + 1) << 7) | (byte & 0x7F)
    return value, at + 1


def _common_folder(git_folder: str) -> Path:
    """Return the folder with the objects: another one for a linked work tree."""
    try:
        named = Path(git_folder, "commondir").read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return Path(git_folder)
    return Path(os.path.normpath(os.path.join(git_folder, named)))  # noqa: PTH118


def _history_state(git_folder: str) -> object:
    """Return what changes whenever an object is added."""
    found: list[object] = []
    for store in _list_stores(_common_folder(git_folder) / "objects"):
        try:
            with os.scandir(store) as entries:
                folders = [entry.path for entry in entries if len(entry.name) == 2 or entry.name == "pack"]
            found += [(folder, os.stat(folder).st_mtime_ns) for folder in sorted(folders)]  # noqa: PTH116
        except OSError:
            found.append(store)
    return tuple(found)


def _list_stores(first: Path) -> list[Path]:
    """Return a folder of objects, and those that it borrows objects from."""
    stores: list[Path] = [first]
    for store in stores:
        try:
            lines = (store / "info/alternates").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        except OSError:
            continue
        for line in lines:
            other = Path(os.path.normpath(os.path.join(store, line)))  # noqa: PTH118
            if line and not line.startswith("#") and other not in stores and len(stores) < _MAX_STORES:
                stores.append(other)
    return stores


class _ObjectStore:
    """The trees and commits of a repository.

    :ivar paths: the path of every file of every stored tree that was read
    """

    def __init__(self, git_folder: str) -> None:
        self.paths: set[str] = set()
        self._common = _common_folder(git_folder)
        self._trees: dict[bytes, bytes] = {}
        """The trees that were read now."""
        self._roots: set[bytes] = set()
        self._known: set[bytes] = set()
        """The trees that were read before, whose content is not kept."""
        self._walked: set[tuple[bytes, bytes]] = set()
        self._read: set[str] = set()
        """The names of the packs and of the loose objects that were read."""
        self._objects = 0
        self._bytes = 0
        self._end = 0.0

    def read_new_objects(self) -> bool:
        """Read the objects that were added since, and return whether that was possible without reading the others again.

        :raises UnreadableStoreError: if the store is too large, or of another format
        """
        self._end = time.thread_time() + _MAX_SCAN_S
        try:
            config = (self._common / "config").read_text(encoding="utf-8", errors="replace").lower()
        except FileNotFoundError:
            config = ""
        if re.search(r"objectformat\s*=\s*\"?sha256", config):
            raise UnreadableStoreError
        for store in _list_stores(self._common / "objects"):
            self._read_loose_objects(store)
            for index in sorted((store / "pack").glob("*.idx")):
                if str(index) not in self._read:
                    self._read_pack(index)
                    self._read.add(str(index))
        complete = self._walk()
        self._known |= self._trees.keys()
        self._trees.clear()
        self._roots.clear()
        self._bytes = 0
        return complete

    def _walk(self) -> bool:
        children = {
            match[3] for data in self._trees.values() for match in _TREE_ENTRY.finditer(data) if match[1] == b"40000"
        }
        paths: set[bytes] = set()
        waiting = [(b"", tree) for tree in self._roots | (self._trees.keys() - children)]
        while waiting:
            item = waiting.pop()
            if item in self._walked:
                continue
            self._walked.add(item)
            prefix, tree = item
            self._check_bounds(len(self._walked))
            if tree not in self._trees and tree in self._known:
                return False  # a known folder has a new name
            for mode, name, other in _TREE_ENTRY.findall(self._trees.get(tree, b"")):
                if mode == b"40000":
                    waiting.append((prefix + name + b"/", other))
                elif mode != b"160000":
                    paths.add(prefix + name)
        self.paths.update(path.decode("utf-8", "surrogateescape") for path in paths)
        return True

    def _check_bounds(self, count: int) -> None:
        if count > _MAX_OBJECTS or self._bytes > _MAX_TREE_BYTES or time.thread_time() > self._end:
            raise UnreadableStoreError

    def _add(self, kind: int, name: bytes, data: bytes) -> None:
        if kind == _TREE:
            self._trees[name] = data
            self._bytes += len(data)
        elif (match := _COMMIT_TREE.match(data)) is not None:
            self._roots.add(bytes.fromhex(match.group(1).decode()))
        self._check_bounds(self._objects)

    def _read_loose_objects(self, store: Path) -> None:
        for folder in sorted(store.glob("[0-9a-f][0-9a-f]")):
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries if len(entry.name) == 2 * _ID - 2]
            for name in names:
                if (whole := folder.name + name) in self._read:
                    continue
                self._read.add(whole)
                reader = zlib.decompressobj()
                with open(folder / name, "rb") as file:  # noqa: PTH123 - thousands of files
                    raw = file.read(4_096)
                    start = reader.decompress(raw, 256)
                    kind, _, _ = start.partition(b" ")
                    self._objects += 1
                    self._check_bounds(self._objects)
                    if kind not in (b"tree", b"commit"):
                        continue
                    size = int(start.partition(b"\0")[0].partition(b" ")[2])
                    if size > _MAX_ONE_TREE_BYTES:
                        raise UnreadableStoreError
                    rest = reader.unconsumed_tail + file.read(size + 65_536)
                data = (start + reader.decompress(rest, size + 64)).partition(b"\0")[2]
                self._add(_TREE if kind == b"tree" else _COMMIT, bytes.fromhex(whole), data)

    def _read_pack(self, index_path: Path) -> None:
        index = index_path.read_bytes()
        pack_path = index_path.with_suffix(".pack")
        if index[:8] != b"\xfftOc\0\0\0\2" or not pack_path.exists():
            raise UnreadableStoreError
        with pack_path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            pack = _PackFile(index, data)
            self._objects += len(pack.names)
            for count, (offset, name) in enumerate(sorted(pack.names.items())):
                if not count % 512:
                    self._check_bounds(self._objects)
                kind = pack.get_error_kind(offset)
                if kind in (_TREE, _COMMIT):
                    self._add(kind, name, pack.read_object(offset))


class _PackFile:
    """One pack file (gitformat-pack(5))."""

    def __init__(self, index: bytes, data: mmap.mmap) -> None:
        count = int.from_bytes(index[8 + 255 * 4 : 8 + 256 * 4])
        names_at = 8 + 256 * 4
        offsets_at = names_at + count * (_ID + 4)
        large_at = offsets_at + count * 4
        if len(index) < large_at:
            raise UnreadableStoreError
        self.names: dict[int, bytes] = {}
        self._offsets: dict[bytes, int] = {}
        for number in range(count):
            name = index[names_at + number * _ID : names_at + (number + 1) * _ID]
            offset = int.from_bytes(index[offsets_at + number * 4 : offsets_at + number * 4 + 4])
            if offset & 0x80000000:
                place = large_at + (offset & 0x7FFFFFFF) * 8
                offset = int.from_bytes(index[place : place + 8])
            self.names[offset] = name
            self._offsets[name] = offset
        starts = sorted(self.names)
        self._ends = dict(zip(starts, [*starts[1:], len(data)], strict=True))
        self._data = data
        self._kinds: dict[int, int] = {}
        self._recent: dict[int, bytes] = {}

    def _header(self, offset: int) -> tuple[int, int, int, int]:
        """Return the kind, size, place of the content and base of an object; base 0 if it is not a delta."""
        data, at = self._data, offset
        byte = data[at]
        kind, size, shift = (byte >> 4) & 7, byte & 15, 4
        while byte & 0x80:
            at += 1
            byte = data[at]
            size |= (byte & 0x7F) << shift
            shift += 7
        at += 1
        if kind == _OFFSET_DELTA:
            distance, at = _read_offset(data, at)
            return kind, size, at, offset - distance
        if kind == _NAMED_DELTA:
            return kind, size, at + _ID, self._offsets.get(data[at : at + _ID], -1)
        return kind, size, at, 0

    def get_error_kind(self, offset: int) -> int:
        """Return the kind of an object; that of its base for a delta, and 0 if the base is elsewhere."""
        chain: list[int] = []
        at = offset
        while at not in self._kinds:
            chain.append(at)
            kind, _, _, base = self._header(at)
            if kind not in (_OFFSET_DELTA, _NAMED_DELTA):
                self._kinds[at] = kind
            elif base <= 0 or len(chain) > 10_000:
                raise UnreadableStoreError
            else:
                at = base
        found = self._kinds[at]
        for one in chain:
            self._kinds[one] = found
        return found

    def read_object(self, offset: int) -> bytes:
        """Return the content of an object."""
        deltas: list[tuple[int, bytes]] = []
        at = offset
        while (content := self._recent.get(at)) is None:
            kind, size, start, base = self._header(at)
            if size > _MAX_ONE_TREE_BYTES:
                raise UnreadableStoreError
            raw = zlib.decompressobj().decompress(self._data[start : self._ends[at]], size) if size else b""
            if kind not in (_OFFSET_DELTA, _NAMED_DELTA):
                content = raw
                break
            deltas.append((at, raw))
            at = base
        self._keep(at, content)
        for place, delta in reversed(deltas):
            content = _apply_delta(content, delta)
            self._keep(place, content)
        return content

    def _keep(self, offset: int, content: bytes) -> None:
        if len(self._recent) > 4_096:
            self._recent.clear()
        self._recent[offset] = content


def _apply_delta(base: bytes, delta: bytes) -> bytes:
    at = 0
    for _ in range(2):  # the sizes of the base and of the result
        while delta[at] & 0x80:
            at += 1
        at += 1
    out: list[bytes] = []
    length = 0
    while at < len(delta):
        code = delta[at]
        at += 1
        if code & 0x80:
            start = size = 0
            for bit in range(4):
                if code & (1 << bit):
                    start |= delta[at] << (8 * bit)
                    at += 1
            for bit in range(3):
                if code & (0x10 << bit):
                    size |= delta[at] << (8 * bit)
                    at += 1
            piece = base[start : start + (size or 0x10000)]
        elif code:
            piece = delta[at : at + code]
            at += code
        else:
            raise UnreadableStoreError
        out.append(piece)
        length += len(piece)
        if length > _MAX_ONE_TREE_BYTES:
            raise UnreadableStoreError
    return b"".join(out)


def find_printed_repositories(script: ShellScript, text: str, workspace: str) -> tuple[PrintedRepository, ...]:
    """Return the repositories of which the commands of a text may print stored files. A folder without one has nothing to print."""
    found: dict[PrintedRepository, None] = {}
    for access in find_stored_file_accesses(script, text):
        for folder in access.folders or (".",):
            for work_tree in _list_work_trees(workspace, folder):
                try:
                    git_folder = find_git_folder(work_tree)
                    if git_folder is None:
                        continue
                except UnreadableStoreError:
                    git_folder = None
                known = None if access.scope == "unknown" else git_folder
                found[PrintedRepository(access.shown, access.scope, work_tree, known)] = None
                break
    return tuple(found)


def _list_work_trees(workspace: str, folder: str) -> Iterator[str]:
    """Yield the folders in which git looks for its data: from one up to the workspace, or up to the root if it is outside."""
    at: str = os.path.normpath(os.path.join(workspace, folder))  # noqa: PTH118
    while True:
        yield at
        if at in (workspace, "/"):
            return
        at = os.path.dirname(at)  # noqa: PTH120
