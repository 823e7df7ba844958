"""What a sandbox sees of the file system, as bubblewrap's arguments, derived from one capability set.

The system's programs and configuration read-only, without what only root may read; a private /proc, /dev and
/tmp; the toolchains read-only; of the profile's folders exactly those the capability set reaches; the scratch
as home. Everything else is not hidden but absent.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from handrail.contract.errors import ToolError
from handrail.contract.protected import WORKSPACE_FILE
from handrail.contract.requires import CapabilitySet, Layer
from handrail.contract.sandbox import Profile
from handrail.sandbox import protected
from handrail.sandbox.public_copy import PublicCopy
from handrail.sandbox.toolchains import SYSTEM, Toolchains

_PRIVATE_CONFIGURATION = ("/etc", "/usr/local/etc")
_ALWAYS_THERE = (*SYSTEM, "/etc")

_DEEP = 100

Access = Literal["ro", "rw"]
_Mount = tuple[str, Literal["ro", "rw", "hidden file", "hidden folder", "gone"]]


def arguments(folders: Mapping[str, Access], profile: Profile) -> list[str]:
    """The mount options, in the order they are to be carried out.

    :param folders: what :func:`folder_access` gives
    """
    now = time.monotonic()
    system = _programs(), _configuration.options(now), _kernel()
    for folder in folders:
        _configuration.place_for(folder, now)
    mounts: list[_Mount] = [*folders.items()]
    for path in profile.hidden:
        real = os.path.realpath(path)
        within = any(is_beneath(real, folder) for folder in folders)
        mounts.append((real, _kind(real if within else _configuration.shown(real, now))))
    mounts += _kept(folders, profile)
    sizes = profile.limits.shm_bytes, profile.limits.tmp_bytes
    return [*_assembled(system, sizes, tuple(folders), tuple(mounts))]


@lru_cache(maxsize=64)
def _assembled(
    system: tuple[tuple[str, ...], ...],
    sizes: tuple[int | None, int | None],
    folders: tuple[str, ...],
    mounts: tuple[_Mount, ...],
) -> tuple[str, ...]:
    """:func:`arguments` of what has been looked at: the same for the same, and so remembered."""
    options = [option for part in system for option in part]
    for place, size in zip(("/dev/shm", "/tmp"), sizes, strict=True):  # noqa: S108
        options += ["--perms", "1777", "--size", str(size), "--tmpfs", place]
    sealed: list[str] = []
    for path, access in sorted(mounts, key=lambda mount: (mount[0].count("/"), mount[0])):  # the outer first
        if access in ("rw", "ro"):
            options += ["--bind" if access == "rw" else "--ro-bind", path, path]
        elif access != "gone" and any(is_beneath(path, place) for place in (*folders, *_ALWAYS_THERE)):
            inner = any(folder != path and is_beneath(folder, path) for folder in folders)
            if access == "hidden file":
                options += ["--ro-bind", "/dev/null", path]
            elif inner:  # only the way to what is mounted in it is left, to be sealed last
                options += ["--perms", "0711", "--tmpfs", path]
            else:
                options += ["--perms", "0000", "--size", "4096", "--tmpfs", path, "--remount-ro", path]
            sealed += ["--remount-ro", path] if inner else []
    return (*options, *sealed, "--remount-ro", "/dev", "--remount-ro", "/")


def _kept(folders: Mapping[str, Access], profile: Profile) -> list[_Mount]:
    """What is mounted over within the profile's folders: protected paths read-only, hidden ones unreadable.

    Where the folder around may be written, the folders on the way are bound onto themselves: as mounts they can be
    neither renamed nor removed.
    """
    kept: dict[str, Access | Literal["hidden"]] = {}
    fixed = [(path, "ro") for path in (*_workspace_files(profile), *profile.pinned)]
    for path, access in (*fixed, *((path, "hidden") for path in profile.masked)):
        inner = max((folder for folder in folders if is_beneath(path, folder)), key=len, default=None)
        if inner is None or (access == "ro" and folders[inner] == "ro"):
            continue
        if protected.check_real(path) is None:
            continue
        ways = protected.on_the_way(path, (inner,)) if folders[inner] == "rw" else []
        # What is hidden for lying so deep that nobody looks there is hidden wherever it is moved.
        if access == "ro" or len(ways) < _DEEP:
            for way in ways:
                kept.setdefault(way, "rw")
        kept[path] = "hidden" if access == "hidden" else "ro"
    masked = frozenset(profile.masked)
    return [
        (path, _kind(path) if access == "hidden" else access)
        for path, access in kept.items()
        if (path not in folders or access != "rw")
        and not protected.beneath_any(path.rpartition("/")[0], masked)  # there is nothing in what is hidden
    ]


def _workspace_files(profile: Profile) -> Iterator[str]:
    """A workspace's own configuration, where it is a file that exists."""
    for place in (profile.workspace, *profile.writable):
        path = f"{place.rstrip('/')}/{WORKSPACE_FILE}"
        try:
            if stat.S_ISREG(os.lstat(path).st_mode):
                yield path
        except OSError:
            continue  # none there


def folder_access(capabilities: CapabilitySet, profile: Profile, toolchains: Toolchains) -> dict[str, Access]:
    """Each folder (or file) to mount with its access, the outer before the inner.

    :raises ToolError: ``unavailable`` for a set that whole-folder mounts cannot enforce
    """
    if profile.workspace == "/":
        raise ToolError("the whole file system as a workspace cannot be confined; open a folder", kind="unavailable")
    found: dict[str, Access] = {}
    for folder in toolchains.mounts:
        if os.access(folder, os.F_OK):  # at every start, and canonical already
            found[folder] = "ro"
    for folder in profile.readable:
        real = os.path.realpath(folder)
        if os.path.exists(real) and not any(is_beneath(real, system) for system in SYSTEM):  # noqa: PTH110
            found[real] = "ro"
    writable: list[str] = []
    for place in (profile.workspace, *profile.writable, *profile.further):
        may_write = profile.workspace_writable
        seen: dict[str, bool] = {}
        for part in _reached(capabilities, "fs.write", place, seen) if place not in profile.further else ():
            found[part] = "rw" if may_write else "ro"
            if may_write:
                writable.append(part)
        for part in _reached(capabilities, "fs.read", place, seen):
            if not any(is_beneath(part, other) for other in writable):
                found[part] = "ro"
    found[profile.scratch] = "rw"
    return dict(_outer_first(tuple(found.items())))


@lru_cache(maxsize=64)
def _outer_first(folders: tuple[tuple[str, Access], ...]) -> tuple[tuple[str, Access], ...]:
    return tuple(sorted(folders, key=lambda item: (item[0].count("/"), item[0])))


_Patterned = Literal["fs.read", "fs.write"]


def _reached(capabilities: CapabilitySet, capability: _Patterned, place: str, seen: dict[str, bool]) -> Iterator[str]:
    """The parts of ``place`` that the set covers whole.

    :param seen: those that were looked at for this very start, which are added to; and whether each is a folder
    """
    patterns = tuple((layer.fs_read, layer.fs_write)[capability == "fs.write"] for layer in capabilities.layers)
    for part, covers_folder, covers_file in _parts(patterns, capability, place):
        if part not in seen:
            try:
                is_folder, real = _stands(part)
            except (OSError, ValueError):
                continue
            if real != part:
                raise ToolError(
                    f"{part} has become a symbolic link; a sandbox mounts real folders only", kind="conflict"
                )
            seen[part] = is_folder
        if not (covers_folder if seen[part] else covers_file):
            raise ToolError(
                f"{capability} names only some of the files in {part}, and a sandbox mounts whole folders; "
                "name a folder in requires instead",
                kind="unavailable",
            )
        yield part


def _stands(path: str) -> tuple[bool, str]:
    """Whether it is a folder, and its canonical path: the kernel says that sooner than it can be found out."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        return is_folder, os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - at every start
    finally:
        os.close(descriptor)


@lru_cache(maxsize=256)
def _parts(
    patterns: tuple[tuple[str, ...], ...], capability: _Patterned, place: str
) -> tuple[tuple[str, bool, bool], ...]:
    """What these patterns, of one layer each, reach of ``place``; and whether all of it where that is a folder or a file."""
    capabilities = CapabilitySet(tuple(Layer("", fs_read=one, fs_write=one) for one in patterns))
    found: list[tuple[str, bool, bool]] = []
    for folder in capabilities.folders(capability):
        if is_beneath(folder, place):
            part = folder
        elif is_beneath(place, folder):
            part = place
        else:
            continue
        # Nothing in it is outside the set: tried on names that no pattern was written for.
        probes = (f"{part}/~handrail-probe", f"{part}/.~handrail-probe/.~~/~", f"{part}/~/~/~/~handrail.probe~")
        whole = all(capabilities.allows(capability, probe) for probe in probes)
        found.append((part, whole, capabilities.allows(capability, part)))
    return tuple(found)


def _kind(path: str) -> Literal["hidden file", "hidden folder", "gone"]:
    """What a path is that is to be unreadable."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return "gone"
    return "hidden folder" if stat.S_ISDIR(mode) else "hidden file"


@lru_cache(maxsize=1)
def _programs() -> tuple[str, ...]:
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    return (*options, "--dir", "/run", "--dir", "/var", "--symlink", "../tmp", "/var/tmp")  # noqa: S108


@lru_cache(maxsize=1)
def _kernel() -> tuple[str, ...]:
    """/proc has parts that are the host's own and that its root may write, also from within a user namespace: for root it
    is read-only as a whole, which is one mount and leaves nothing out. For others that is only the kernel's settings."""
    if os.geteuid() == 0:
        return ("--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev")
    return ("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev")


def _configuration_folders() -> Iterator[str]:
    for top in _PRIVATE_CONFIGURATION:
        if os.path.isdir(top) and not os.path.islink(top):  # noqa: PTH112, PTH114 - every few seconds
            yield top


class _Configuration:
    """What programs see of /etc and /usr/local/etc.

    For root, a copy of what everybody may read in them (:mod:`handrail.sandbox.public_copy`): root in a user namespace
    still owns what root owns. For others /etc as it is, which gives them no more than they may read anyway; what they may
    read and not everybody may, by a group, is masked. The folders are looked through again every few seconds.
    """

    RESCAN_S = 10.0

    def __init__(self) -> None:
        self._scanned_at = float("-inf")
        self._masks: list[tuple[str, list[str]]] = []
        self._options: tuple[str, ...] = ()
        self._copies: dict[str, PublicCopy] = {}

    def options(self, now: float) -> tuple[str, ...]:
        """What was there at the last look, to be gone through by :meth:`without_gone`.

        :raises ToolError: ``unavailable`` where root's programs cannot be given a copy
        """
        if os.geteuid() == 0:
            if now - self._scanned_at > self.RESCAN_S:
                self._copies = {top: self._copies.get(top) or PublicCopy(top) for top in _configuration_folders()}
                self._scanned_at = now
            return tuple(word for top, copy in self._copies.items() for word in ("--ro-bind", copy.folder(now), top))
        if now - self._scanned_at > self.RESCAN_S:
            self._masks = [mask for top in _PRIVATE_CONFIGURATION for mask in _private_entries(top)]
            self._options = ("--ro-bind", "/etc", "/etc", *(word for _, mask in self._masks for word in mask))
            self._scanned_at = now
        return self._options

    def shown(self, path: str, now: float) -> str:
        """Where that lies which programs see by this path."""
        for top, copy in self._copies.items():
            if is_beneath(path, top):
                return copy.folder(now) + path.removeprefix(top)
        return path

    def place_for(self, path: str, now: float) -> None:
        """See that there is something to mount this path on."""
        for top, copy in self._copies.items():
            if is_beneath(path, top):
                copy.place_for(path, now)

    def without_gone(self, options: Sequence[str]) -> list[str]:
        """``options`` without the masks of what is gone since: a mount point that is not there fails the whole start."""
        left = list(options)
        for path, mask in self._masks:
            if not os.path.lexists(path):
                size = len(mask)
                at = next((at for at in range(len(left)) if left[at : at + size] == mask), len(left))
                del left[at : at + size]
        return left


_configuration = _Configuration()


def as_they_stand(options: Sequence[str]) -> list[str]:
    """Options that :func:`arguments` gave, to be carried out now."""
    return _configuration.without_gone(options)


def _private_entries(top: str) -> Iterator[tuple[str, list[str]]]:
    for folder, names, files in os.walk(top):
        for name in list(names):
            path = f"{folder}/{name}"
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode) and mode & 0o005 != 0o005:
                names.remove(name)
                if os.access(path, os.X_OK):
                    # Nothing of anybody's is in it, so it need not be sealed, which takes as long as it takes to mount.
                    yield path, ["--perms", "0000", "--size", "4096", "--tmpfs", path]
        for name in files:
            path = f"{folder}/{name}"
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                continue
            if not stat.S_ISLNK(mode) and not mode & 0o004 and os.access(path, os.R_OK):
                yield path, ["--ro-bind", "/dev/null", path]


def is_beneath(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
