"""The paths that git repositories of the workspace store, now and in their history, read from their files.

A rule hides a file from programs, and the sandbox masks it in the work tree. No mask covers what a repository stores of it.
So a command that can print stored files requires approval if the repository stores a path that the rules hide. The index and
the objects are read as files, so no program of the workspace runs. A repository that cannot be read, or that is too large,
has unknown paths.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from handrail.contract.struct import Struct, field
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell.parser import ShellScript
from handrail.policy.shell.stored_file_forms import find_stored_file_accesses

_MAX_INDEX_BYTES = 64 * 1024 * 1024
_MAX_QUICK_INDEX_BYTES = 512 * 1024
"""The longest index that is read at once. A longer one is read in a thread."""
_MAX_TEXT_BYTES = 64 * 1024
_MAX_HEADER_BYTES = 64
"""The most bytes before the content of an object in a pack file."""
_MAX_OBJECTS = 1_000_000
_MAX_TREE_BYTES = 256 * 1024 * 1024
_MAX_ONE_TREE_BYTES = 8 * 1024 * 1024
_MAX_SCAN_S = 20.0
_MAX_STORES = 8
_MAX_REPOSITORIES = 32
_MAX_READS = 3
"""The most reads before one decision: of the paths, of their check, and once more if a program changed them."""
_TREE_ENTRY = compile_regex_lazily(rb"(\d{1,6}) ([^\0]+)\0(.{20})", re.DOTALL)
_COMMIT_TREE = compile_regex_lazily(rb"tree ([0-9a-f]{40})\n")
_GIT_FILE = compile_regex_lazily(r"gitdir: (.+)\n?")
_COMMIT, _TREE, _OFFSET_DELTA, _NAMED_DELTA = 1, 2, 6, 7
_ID = 20


PathCheck = Callable[[str, frozenset[str]], str]


class UnreadableRepositoryError(Exception):
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
        """Whether :func:`load_and_check_repository_history` would find paths that are not known yet."""
        if self.git_folder is None:
            return False
        if _entry(self.git_folder).unchecked:
            return True
        is_indexed, indexed = get_current_index_paths(self.git_folder)
        # A broken index makes the answer unknown. The history cannot improve that.
        if self.scope == "index" or (is_indexed and indexed is None):
            return not is_indexed
        return not is_indexed or not get_known_history_paths(self.git_folder)[0]

    def find_hidden(self, find: PathCheck, is_quick: Callable[[str, frozenset[str]], bool]) -> str | None:
        """Return a stored path that the rules hide, and an empty text if there is none; None if that is unknown.

        :param find: returns the hidden one of the paths in a folder. If it is slow, :func:`load_and_check_repository_history` calls it, in a thread
        :param is_quick: returns whether ``find`` has the answer, or finds it soon
        """
        paths = self.list_paths()
        if paths is None or self.git_folder is None:
            return None
        if is_quick(self.work_tree, paths):
            return find(self.work_tree, paths)
        # Comparing many paths would block the event loop. A thread compares them before the decision.
        _entry(self.git_folder).unchecked[find, self.work_tree] = paths
        return None

    def list_paths(self) -> frozenset[str] | None:
        """Return the stored paths that the command may print; None if they are unknown."""
        if self.git_folder is None:
            return None
        _, indexed = get_current_index_paths(self.git_folder)
        if self.scope == "index" or indexed is None:
            return indexed
        is_current, history = get_known_history_paths(self.git_folder)
        return history if is_current else None


class StoredPaths(Struct):
    """The known paths of one repository, relative to its work tree; None if they are unknown.

    :ivar unchecked: the paths whose check by rules takes long, by the check and the work tree
    """

    indexed: frozenset[str] | None = None
    index_state: object = None
    history: frozenset[str] | None = None
    history_state: object = None
    store: _ObjectStore | None = None
    unchecked: dict[tuple[PathCheck, str], frozenset[str]] = field(
        default_factory=dict["tuple[PathCheck, str]", frozenset[str]]
    )
    lock: threading.Lock = field(default_factory=threading.Lock)


_known: dict[str, StoredPaths] = {}


def find_git_folder(work_tree: str) -> str | None:
    """Return the git folder of a work tree; None if it has none.

    :raises UnreadableRepositoryError: if a file or link that names it cannot be followed
    """
    place = os.path.join(work_tree, ".git")  # noqa: PTH118 - a hot path
    try:
        found = os.stat(place)  # noqa: PTH116
        if stat.S_ISDIR(found.st_mode):
            return place
        match = _GIT_FILE.fullmatch(_read_text(place)[:4_096])
    except FileNotFoundError:
        if os.path.islink(place):  # noqa: PTH114 - a hot path
            raise UnreadableRepositoryError from None
        return None
    except OSError:
        raise UnreadableRepositoryError from None
    # A .git file of another form may still mean something to git, so the repository counts as unreadable.
    if match is None:
        raise UnreadableRepositoryError
    return os.path.normpath(os.path.join(work_tree, match.group(1)))  # noqa: PTH118


def get_current_index_paths(git_folder: str) -> tuple[bool, frozenset[str] | None]:
    """Return whether the index was read since it last changed, and its paths; None in their place if they are unknown."""
    known = _entry(git_folder)
    try:
        found = os.stat(os.path.join(git_folder, "index"))  # noqa: PTH116, PTH118
    except FileNotFoundError:
        return True, frozenset()
    except OSError:
        return True, None
    if known.index_state != _file_state(found) and found.st_size <= _MAX_QUICK_INDEX_BYTES:
        _load_index(git_folder, known)
    is_current = known.index_state == _file_state(found)
    return is_current, known.indexed if is_current else None


def _load_index(git_folder: str, known: StoredPaths) -> None:
    path = os.path.join(git_folder, "index")  # noqa: PTH118
    try:
        state = _file_state(os.stat(path))  # noqa: PTH116
        # The state is taken before the file is read. A change during the reading therefore leads to another reading.
        if known.index_state != state:
            known.indexed = _read_index(path)
            known.index_state = state
    except OSError:
        known.index_state = None


def _file_state(found: os.stat_result) -> object:
    """Return what changes whenever a file changes. No program can set the time of the last change of its state."""
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def get_known_history_paths(git_folder: str) -> tuple[bool, frozenset[str] | None]:
    """Return whether the history was read since it last changed, and its paths; None in their place if they are unknown."""
    known = _entry(git_folder)
    try:
        return known.history_state == _history_state(git_folder), known.history
    except UnreadableRepositoryError:
        return True, None


def load_and_check_repository_history(git_folder: str) -> None:
    """Read the paths of the index and of all objects of a repository, and check them by the rules.

    This can take seconds, so it runs in a thread.
    """
    known = _entry(git_folder)
    with known.lock:
        while known.unchecked:
            (find, work_tree), paths = known.unchecked.popitem()
            find(work_tree, paths)
        _load_index(git_folder, known)
        try:
            state = _history_state(git_folder)
        except UnreadableRepositoryError:
            return
        if known.history_state == state:
            return
        try:
            if known.store is None or not known.store.read_new_objects():
                known.store = None  # also if reading fails
                store = _ObjectStore(git_folder)
                store.read_new_objects()
                known.store = store
            paths = frozenset(known.store.paths)
        # A repository can be made to break the reader. Unknown paths make the command require approval.
        except (UnreadableRepositoryError, OSError, zlib.error, ValueError, LookupError):
            paths = known.store = None
        known.history, known.history_state = paths, state


async def load_and_check_repository_histories(list_unread: Callable[[], Iterable[PrintedRepository]]) -> None:
    """Read and check the history of each repository, in a thread.

    :param list_unread: returns the repositories that a decision needs, and makes the decision again
    """
    for _ in range(_MAX_READS):
        unread = {one.git_folder for one in list_unread() if one.git_folder is not None}
        for git_folder in unread:
            await asyncio.to_thread(load_and_check_repository_history, git_folder)
        if not unread:
            return


def _entry(git_folder: str) -> StoredPaths:
    found = _known.get(git_folder)
    if found is None:
        if len(_known) >= _MAX_REPOSITORIES:
            _known.clear()
        found = _known[git_folder] = StoredPaths()
    return found


def _open_regular_file(path: str | Path, *, follow: bool = True) -> tuple[int, int]:
    """Return the descriptor and the length of a file, without waiting for a pipe or a device.

    :raises OSError: if it cannot be opened, or is not a regular file
    """
    # A FIFO in place of the file would block the open, and a terminal would become the process's own.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode):
        return descriptor, found.st_size
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def read_regular_file(path: str | Path, max_bytes: int, *, follow: bool = True) -> bytes:
    """Return the content of a regular file.

    :param follow: whether it may be a symbolic link
    :raises OSError: if it cannot be read, or is too large
    """
    descriptor, length = _open_regular_file(path, follow=follow)
    try:
        # One byte more than allowed shows that the file has grown since its length was read.
        content = b"" if length > max_bytes else os.pread(descriptor, max_bytes + 1, 0)
    finally:
        os.close(descriptor)
    if max(length, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, "is too large", str(path))
    return content


def _read_text(path: str | Path) -> str:
    return read_regular_file(path, _MAX_TEXT_BYTES).decode("utf-8", "surrogateescape")


def _read_optional_text(path: Path) -> str | None:
    """Return the text of a file of a repository, or None if it does not exist.

    :raises UnreadableRepositoryError: if it exists and cannot be read: git could read something else in its place
    """
    try:
        return _read_text(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        raise UnreadableRepositoryError from None


def _read_index(path: str) -> frozenset[str] | None:
    """Return the paths of an index (gitformat-index(5), versions 2 to 4); None if it cannot be read."""
    try:
        data = read_regular_file(path, _MAX_INDEX_BYTES)
    except OSError:
        return None
    version = int.from_bytes(data[4:8])
    # A split index has most of its paths in another file.
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


def _read_offset(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of git's offset encoding, and where it ends."""
    byte = data[at]
    value = byte & 0x7F
    while byte & 0x80:
        at += 1
        byte = data[at]
        value = ((value + 1) << 7) | (byte & 0x7F)
    return value, at + 1


def _common_folder(git_folder: str) -> Path:
    """Return the folder with the objects: another one for a linked work tree.

    :raises UnreadableRepositoryError: if the file that names it cannot be read
    """
    named = _read_optional_text(Path(git_folder, "commondir"))
    return Path(os.path.normpath(os.path.join(git_folder, (named or "").strip())))  # noqa: PTH118


def _history_state(git_folder: str) -> object:
    """Return what changes whenever an object is added.

    :raises UnreadableRepositoryError: if a file that names another folder cannot be read
    """
    found: list[object] = []
    for store in _list_stores(_common_folder(git_folder) / "objects"):
        try:
            with os.scandir(store) as entries:
                folders = [entry.path for entry in entries if len(entry.name) == 2 or entry.name == "pack"]
            found += [(folder, _file_state(os.stat(folder))) for folder in sorted(folders)]  # noqa: PTH116
        except OSError:
            found.append(store)
    return tuple(found)


def _list_stores(first: Path) -> list[Path]:
    """Return a folder of objects, and those that it borrows objects from.

    :raises UnreadableRepositoryError: if they cannot be read, or are too many
    """
    stores: list[Path] = [first]
    for store in stores:
        for line in (_read_optional_text(store / "info/alternates") or "").splitlines():
            other = Path(os.path.normpath(os.path.join(store, line)))  # noqa: PTH118
            if line and not line.startswith("#") and other not in stores:
                stores.append(other)
                # Stores can borrow from each other in a long chain, each of which costs a scan.
                if len(stores) > _MAX_STORES:
                    raise UnreadableRepositoryError
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
        self._path_bytes = 0
        self._end = 0.0

    def read_new_objects(self) -> bool:
        """Read the objects that were added since, and return whether that was possible without reading the others again.

        :raises UnreadableRepositoryError: if the store is too large, or of another format
        """
        # The time of this thread counts, so that a busy machine does not change the answer.
        self._end = time.thread_time() + _MAX_SCAN_S
        config = (_read_optional_text(self._common / "config") or "").lower()
        # Its ids are longer, and this reader would misread every tree.
        if re.search(r"objectformat\s*=\s*\"?sha256", config):
            raise UnreadableRepositoryError
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
                # A submodule is a commit of another repository, which has its own answer.
                if mode == b"160000":
                    continue
                self._path_bytes += len(prefix) + len(name)
                if self._path_bytes > _MAX_TREE_BYTES:
                    raise UnreadableRepositoryError
                if mode == b"40000":
                    waiting.append((prefix + name + b"/", other))
                else:
                    paths.add(prefix + name)
        self.paths.update(path.decode("utf-8", "surrogateescape") for path in paths)
        return True

    def _check_bounds(self, count: int) -> None:
        if count > _MAX_OBJECTS or self._bytes > _MAX_TREE_BYTES or time.thread_time() > self._end:
            raise UnreadableRepositoryError

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
                descriptor, _ = _open_regular_file(folder / name)
                try:
                    raw = os.read(descriptor, 4_096)
                    start = reader.decompress(raw, 256)
                    kind, _, _ = start.partition(b" ")
                    self._objects += 1
                    self._check_bounds(self._objects)
                    if kind not in (b"tree", b"commit"):
                        continue
                    size = int(start.partition(b"\0")[0].partition(b" ")[2])
                    if size > _MAX_ONE_TREE_BYTES:
                        raise UnreadableRepositoryError
                    rest = reader.unconsumed_tail + os.read(descriptor, size + 65_536)
                finally:
                    os.close(descriptor)
                data = (start + reader.decompress(rest, size + 64)).partition(b"\0")[2]
                self._add(_TREE if kind == b"tree" else _COMMIT, bytes.fromhex(whole), data)

    def _read_pack(self, index_path: Path) -> None:
        index = read_regular_file(index_path, _MAX_INDEX_BYTES)
        if index[:8] != b"\xfftOc\0\0\0\2":
            raise UnreadableRepositoryError
        descriptor, length = _open_regular_file(index_path.with_suffix(".pack"))
        try:
            pack = _PackFile(index, descriptor, length)
            self._objects += len(pack.names)
            for count, (offset, name) in enumerate(sorted(pack.names.items())):
                if not count % 512:
                    self._check_bounds(self._objects)
                kind = pack.get_object_kind(offset)
                if kind in (_TREE, _COMMIT):
                    self._add(kind, name, pack.read_object(offset))
        finally:
            os.close(descriptor)


class _PackFile:
    """One pack file (gitformat-pack(5)).

    It is read and never mapped: a program may cut it meanwhile, and a read beyond the end of a mapped file ends the process.

    :param index: the content of its index
    """

    def __init__(self, index: bytes, descriptor: int, length: int) -> None:
        count = int.from_bytes(index[8 + 255 * 4 : 8 + 256 * 4])
        names_at = 8 + 256 * 4
        offsets_at = names_at + count * (_ID + 4)
        large_at = offsets_at + count * 4
        # The counts come from the file. They are compared with its length before anything is read by them.
        if len(index) < large_at or count > _MAX_OBJECTS:
            raise UnreadableRepositoryError
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
        self._ends = dict(zip(starts, [*starts[1:], length], strict=True))
        self._descriptor = descriptor
        self._kinds: dict[int, int] = {}
        self._recent: dict[int, bytes] = {}
        self._recent_bytes = 0

    def _header(self, offset: int) -> tuple[int, int, int, int]:
        """Return the kind, size, place of the content and base of an object; base 0 if it is not a delta."""
        data, at = os.pread(self._descriptor, _MAX_HEADER_BYTES, offset), 0
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
            return kind, size, offset + at, offset - distance
        if kind == _NAMED_DELTA:
            return kind, size, offset + at + _ID, self._offsets.get(data[at : at + _ID], -1)
        return kind, size, offset + at, 0

    def get_object_kind(self, offset: int) -> int:
        """Return the kind of an object; that of its base for a delta, and 0 if the base is elsewhere."""
        chain: list[int] = []
        at = offset
        while at not in self._kinds:
            chain.append(at)
            kind, _, _, base = self._header(at)
            if kind not in (_OFFSET_DELTA, _NAMED_DELTA):
                self._kinds[at] = kind
            elif base <= 0 or len(chain) > 10_000:
                raise UnreadableRepositoryError
            else:
                at = base
        found = self._kinds[at]
        for one in chain:
            self._kinds[one] = found
        return found

    def read_object(self, offset: int) -> bytes:
        """Return the content of an object."""
        deltas: list[tuple[int, bytes]] = []
        at, held = offset, 0
        while (content := self._recent.get(at)) is None:
            kind, size, start, base = self._header(at)
            held += size
            # A chain of deltas can grow far beyond the size of the pack.
            if held > 2 * _MAX_ONE_TREE_BYTES:
                raise UnreadableRepositoryError
            stored = os.pread(self._descriptor, max(0, min(self._ends[at] - start, size + size // 8 + 1_024)), start)
            raw = zlib.decompressobj().decompress(stored, size) if size else b""
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
        if len(self._recent) > 4_096 or self._recent_bytes > 4 * _MAX_ONE_TREE_BYTES:
            self._recent.clear()
            self._recent_bytes = 0
        self._recent[offset] = content
        self._recent_bytes += len(content)


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
            raise UnreadableRepositoryError
        out.append(piece)
        length += len(piece)
        if length > _MAX_ONE_TREE_BYTES:
            raise UnreadableRepositoryError
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
                except UnreadableRepositoryError:
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
