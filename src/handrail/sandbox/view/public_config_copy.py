"""A copy of the publicly readable files of a system configuration folder, shown to root's sandboxes.

Root in a user namespace is still the owner of everything that root owns, so of ``/etc`` itself its sandboxes could read the
password hashes. Mounts over private files would vanish whenever the machine replaces such a file: the kernel takes a mount
away with the name that it is on. A copy has never had anything private in it, and is one mount.

The copy is in a folder that only root writes. It has the contents that were publicly readable at the moment of their
opening: regular files, folders and symbolic links, below public folders only, walked to without following a link. It is
compared with its source every few seconds and updated file by file, so a running program sees a new name server as it would
in ``/etc``; a file that becomes private is removed. The copy stays for the next process and is shared by all that see the
same source. It is removed when another is made and no process uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import orjson

from handrail.contract.errors import ToolError

REFRESH_INTERVAL_S = 10.0
MOST_BYTES, MOST_ENTRIES = 64 << 20, 20_000
"""Beyond these limits the outermost entries come first, and the rest is absent."""
_FORM = 2
"""The version of the list of a copy's contents. A copy with another version is made again."""
_FOLDER, _OPEN = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK_TIMEOUT_S = 5.0
_COPY_FOLDER_MODE = 0o711
"""The mode of a copy's own folder. Users who may only pass it cannot open it, so they cannot hold its lock."""

CopyEntries = dict[str, list[Any]]
"""By path below the source, the outer before the inner: kind and identity."""


class PublicConfigCopy:
    """A copy of the public files of one folder.

    :param source: a canonical path
    :param places: where copies may be kept; the first that belongs to this user, or can be made, is used
    """

    def __init__(self, source: str, places: tuple[str, ...] | None = None) -> None:
        self._source = source
        self._places = places
        self._at: Path | None = None
        self._tree = ""
        self._use = -1
        self._known: CopyEntries | None = None
        self._points: dict[str, bool] = {}
        self._looked_at = float("-inf")

    @property
    def next_comparison_time(self) -> float:
        """When :meth:`folder` will compare the copy again."""
        return self._looked_at + REFRESH_INTERVAL_S

    def get_current_copy_folder(self, now: float) -> str:
        """Return the path of the copy, which was compared with its source within the last seconds.

        :param now: of a monotonic clock, in seconds
        :raises ToolError: ``unavailable`` if no copy can be made
        """
        if self._at is None or now - self._looked_at > REFRESH_INTERVAL_S:
            try:
                self._update()
            except OSError as error:
                raise ToolError(
                    f"The copy of the public files in {self._source}, which programs of root can read, could not be "
                    f"created: {error}. Ask the user to free space in /var/cache, or to run Handrail as an ordinary "
                    "user.",
                    kind="unavailable",
                ) from error
            self._looked_at = now
        return self._tree

    def ensure_private_mount_point(self, path: str, now: float) -> None:
        """Ensure a mount point in the copy for a path below the source that is not public."""
        inner = os.path.relpath(path, self._source)
        if not os.path.lexists(f"{self.get_current_copy_folder(now)}/{inner}"):
            self._points[inner] = os.path.isdir(path)  # noqa: PTH112 - at every start
            self._looked_at = float("-inf")
            self.get_current_copy_folder(now)

    def _update(self) -> None:
        if self._at is None or not (self._at / "list").exists():
            self._at, self._known = self._claim_copy_folder(), None
            self._tree = str(self._at / "tree")
        # Most starts find the copy unchanged. They need no lock.
        if self._find_wanted() == self._known:
            return
        with _lock_copy(self._at):
            written = _read_copy_contents(self._at)
            for inner, entry in (written or {}).items():
                if entry[0] == "place":  # another process has mounted something on it, perhaps
                    self._points.setdefault(inner, entry[1])
            # The source is read again under the lock, since it may have changed while this process waited.
            wanted = self._find_wanted()
            self._known = written if written == wanted else self._write_changes(written or {}, wanted)

    def _find_wanted(self) -> CopyEntries:
        found: CopyEntries = {}
        for inner, is_folder in self._points.items():
            for above in reversed(Path(inner).parents[:-1]):
                found[str(above)] = ["folder"]
            found[inner] = ["place", is_folder]
        return found | find_public_entries(self._source)

    def _claim_copy_folder(self) -> Path:
        """Return the folder of this source, as this process sees it, and mark it as in use."""
        about = os.stat(self._source)  # noqa: PTH116
        seen = f"{self._source} {about.st_dev} {about.st_ino} {os.readlink('/proc/self/ns/mnt')}"  # noqa: PTH115
        # Another mount namespace can show other files at the same path, so it is a part of the name.
        name = "public-" + hashlib.sha256(seen.encode()).hexdigest()[:16]
        base = _find_own_folder(
            self._places or ("/var/cache/handrail", f"{tempfile.gettempdir()}/handrail-{os.geteuid()}")
        )
        until = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            with contextlib.suppress(FileExistsError):
                (base / name).mkdir(_COPY_FOLDER_MODE)
                _remove_unused_copies(base, name)
            if (used := _mark_copy_as_in_use(base / name, fcntl.LOCK_SH)) is not None:
                break
            if time.monotonic() > until:
                raise FileExistsError(f"{base / name} is being removed by another process")
            time.sleep(0.01)
        if self._use >= 0:
            os.close(self._use)
        # The descriptor stays open: its lock keeps other processes from removing the copy.
        self._use = used
        (base / name).chmod(_COPY_FOLDER_MODE)
        return base / name

    def _write_changes(self, before: CopyEntries, wanted: CopyEntries) -> CopyEntries:
        assert self._at is not None
        tree, fresh, listed = self._at / "tree", self._at / "new", self._at / "list"
        # Without its list a copy counts as unknown. A crash in the middle therefore leads to a complete new copy.
        listed.unlink(missing_ok=True)
        tree.mkdir(0o755, exist_ok=True)
        tree.chmod(0o755)
        for folder, folders, files in os.walk(tree, topdown=False):
            for name in (*folders, *files):
                path = f"{folder}/{name}"
                entry = wanted.get(os.path.relpath(path, tree))
                if entry is None or _is_folder(entry) != stat.S_ISDIR(os.lstat(path).st_mode):
                    _remove_tree(path)
        done: CopyEntries = {}
        top = os.open(self._source, _FOLDER)
        try:
            for inner, entry in wanted.items():
                path, shown = tree / inner, entry
                if _is_folder(entry):
                    with contextlib.suppress(FileExistsError):
                        path.mkdir(0o755)
                    path.chmod(0o755)
                elif before.get(inner) == entry and os.path.lexists(path):
                    pass
                elif entry[0] == "link":
                    fresh.unlink(missing_ok=True)
                    fresh.symlink_to(entry[1])
                    # Running sandboxes have this copy mounted. A rename shows them the old file or the new one, never a
                    # part.
                    fresh.replace(path)
                elif entry[0] == "place":
                    fresh.unlink(missing_ok=True)
                    fresh.touch(0o444)
                    fresh.replace(path)
                elif (copied := _copy_file(top, inner, fresh)) is not None:
                    shown = copied
                    fresh.replace(path)
                else:  # it was removed, or became private
                    path.unlink(missing_ok=True)
                    continue
                done[inner] = shown
        finally:
            os.close(top)
        listing = {_to_json_text(inner): [*map(_to_json_text, entry)] for inner, entry in done.items()}
        fresh.write_bytes(orjson.dumps({"form": _FORM, "boot": _read_boot_id(), "entries": listing}))
        fresh.replace(listed)
        return done


def _to_json_text(value: Any) -> Any:
    """Return a name as text that JSON can hold: its bytes, which need not be text in any encoding."""
    return os.fsencode(value).decode("latin-1") if isinstance(value, str) else value


def _from_json_text(value: Any) -> Any:
    return os.fsdecode(value.encode("latin-1")) if isinstance(value, str) else value


def _is_folder(entry: list[Any]) -> bool:
    return entry == ["folder"] or entry == ["place", True]


def find_public_entries(source: str) -> CopyEntries:
    """Return the public entries below ``source``, the outer before the inner."""
    found: CopyEntries = {}
    held = 0
    top = os.open(source, _FOLDER)
    try:
        # A private folder ends the walk there, because its files are private whatever their own modes are.
        waiting = [""] if _is_public(os.fstat(top)) else []
        for folder in waiting:
            try:
                at = _open_folder(top, folder)
            except OSError:
                continue  # it was removed, or became private
            try:
                for name, about in _read_folder(at):
                    if len(found) >= MOST_ENTRIES:
                        return found
                    inner = f"{folder}/{name}" if folder else name
                    if isinstance(about, str):
                        found[inner] = ["link", about]
                    elif stat.S_ISDIR(about.st_mode) and _is_public(about):
                        found[inner] = ["folder"]
                        waiting.append(inner)
                    elif stat.S_ISREG(about.st_mode) and _is_public(about) and held + about.st_size <= MOST_BYTES:
                        held += about.st_size
                        found[inner] = _build_stamp(about)
            finally:
                os.close(at)
    finally:
        os.close(top)
    return found


def _read_folder(folder: int) -> Iterator[tuple[str, os.stat_result | str]]:
    """Yield the entries of a folder: the target of each link, and the status of everything else."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            try:
                if entry.is_symlink():
                    yield entry.name, os.readlink(entry.name, dir_fd=folder)
                else:
                    yield entry.name, entry.stat(follow_symlinks=False)
            except OSError:
                continue  # it was removed


def _open_folder(top: int, inner: str) -> int:
    """Open a folder below ``top``, through real and public folders only.

    :raises OSError: if one of them is neither
    """
    at = os.dup(top)
    try:
        for name in inner.split("/") if inner else ():
            # Each step starts from an open folder, so a rename between two steps cannot lead elsewhere.
            further = os.open(name, os.O_RDONLY | _FOLDER, dir_fd=at)
            os.close(at)
            at = further
            if not _is_public(os.fstat(at)):
                raise PermissionError(name)
    except OSError:
        os.close(at)
        raise
    return at


def _copy_file(top: int, inner: str, to: Path) -> list[Any] | None:
    """Copy one file and return its entry; None if it is not public at this moment."""
    folder, _, name = inner.rpartition("/")
    try:
        at = _open_folder(top, folder)
        try:
            source = os.open(name, os.O_RDONLY | _OPEN, dir_fd=at)
        finally:
            os.close(at)
    except OSError:
        return None
    with open(source, "rb") as reading:  # noqa: PTH123 - a descriptor
        about = os.fstat(source)
        # The check is repeated on the open file: the mode may have changed since the folder was listed.
        if not stat.S_ISREG(about.st_mode) or not _is_public(about):
            return None
        to.unlink(missing_ok=True)
        content = reading.read(about.st_size)
        to.write_bytes(content)
    to.chmod(0o755 if about.st_mode & 0o001 else 0o644)
    os.utime(to, ns=(about.st_mtime_ns, about.st_mtime_ns))
    return _build_stamp(about)


def _build_stamp(about: os.stat_result) -> list[Any]:
    return ["file", about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def _is_public(about: os.stat_result) -> bool:
    wanted = 0o005 if stat.S_ISDIR(about.st_mode) else 0o004
    return about.st_mode & wanted == wanted


def _find_own_folder(places: tuple[str, ...]) -> Path:
    failures: list[str] = []
    for place in map(Path, places):
        try:
            for folder in (*reversed(place.parents), place):
                if not folder.exists():
                    folder.mkdir(0o755)
                    folder.chmod(0o755)
            about = place.lstat()
        except OSError as error:
            failures.append(str(error))
            continue
        # Another user who can write here could replace the files that every sandbox of this user trusts.
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022:
            return place
        failures.append(f"{place} is not a folder that only this user can write")
    raise PermissionError("; ".join(failures))


def _remove_unused_copies(base: Path, besides: str) -> None:
    """Remove the copies that no process uses."""
    for other in base.glob("public-*"):
        if other.name != besides and (alone := _mark_copy_as_in_use(other, fcntl.LOCK_EX)) is not None:
            shutil.rmtree(other, ignore_errors=True)
            os.close(alone)


def _mark_copy_as_in_use(place: Path, how: int) -> int | None:
    """Return a descriptor that marks a copy as in use; None if another process prevents it."""
    try:
        at = os.open(place, os.O_RDONLY | _FOLDER)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(at, how | fcntl.LOCK_NB)
        # The folder may have been removed and made again between the open and the lock.
        if os.path.samestat(os.fstat(at), place.lstat()):
            return at
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(at)
    return None


@contextlib.contextmanager
def _lock_copy(place: Path) -> Generator[None]:
    """Lock a copy, so that only this process changes it."""
    at = os.open(place / "changing", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + _LOCK_TIMEOUT_S
    try:
        while True:
            try:
                fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(at)


def _read_copy_contents(place: Path) -> CopyEntries | None:
    """Return the contents of a copy; None if they are not known."""
    try:
        listed = orjson.loads((place / "list").read_bytes())
        fits = listed["form"] == _FORM and listed["boot"] == _read_boot_id()
        if not fits:
            return None
        return {_from_json_text(inner): [*map(_from_json_text, entry)] for inner, entry in listed["entries"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_boot_id() -> str:
    """Return the id of this boot: files written before a crash of the machine may be missing."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""


def _remove_tree(path: str) -> None:
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)  # noqa: PTH108
