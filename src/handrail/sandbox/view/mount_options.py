"""The file system of a sandbox, as bubblewrap's arguments, derived from one capability set.

The system's programs and configuration are read-only, without files that only root may read. /proc, /dev and /tmp are
private, the toolchains read-only. Of the profile's folders exactly those are mounted that the capability set reaches; the
scratch is the home. Everything else is not hidden but absent.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

from handrail.contract.errors import ToolError
from handrail.contract.protected.path_protection import WORKSPACE_FILE
from handrail.contract.sandbox_protocol import SandboxProfile
from handrail.contract.struct import Struct
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet
from handrail.sandbox.filters.resource_limits import compute_sandbox_inotify_limits
from handrail.sandbox.view import mount_comparison, protected_mounts
from handrail.sandbox.view.cached_folder_tree import raise_if_resource_shortage
from handrail.sandbox.view.mount_comparison import ExpectedMounts
from handrail.sandbox.view.public_config_copy import PublicConfigCopy
from handrail.sandbox.view.sandbox_user import FileIdentity, LookupCache
from handrail.sandbox.view.toolchains import SYSTEM_FOLDERS, ToolchainSet

_PRIVATE_CONFIGURATION = ("/etc", "/usr/local/etc")
_SYSTEM_FOLDERS = (*SYSTEM_FOLDERS, "/etc")

_MAX_DEPTH = 100
_USER_SETTINGS = "/proc/sys/user"

MountAccess = Literal["ro", "rw"]
_Mount = tuple[str, str]
"""A path, and how it is mounted: ``ro``, ``rw``, ``hidden file``, ``hidden folder``, ``listed`` (empty, for the mounts in it),
``link:`` with the target of a link, or ``gone``."""


def build_mount_options(
    folders: Mapping[str, MountAccess], profile: SandboxProfile, look: LookupCache
) -> tuple[str, ...]:
    """Return the mount options in the order in which they are applied.

    :param folders: the result of :func:`compute_mount_access`
    :raises ToolError: ``invalid_input`` for a path with a NUL character
    """
    system = _build_program_options(), look(_configuration_now), _build_proc_options()
    outer = tuple(folders)
    for folder in _find_configuration_folders(outer):
        look(_ensure_mount_point, folder)
    mounts: list[_Mount] = [*folders.items()]
    for path in profile.hidden:
        # The kernel mounts over the target of a link, so the target decides what kind of mask fits.
        real = look.resolve(path)
        within = any(is_beneath(real, folder) for folder in folders)
        mounts.append((real, _how_to_mask_path(look.identify(real if within else look(_resolve_shown, real)))))
    mounts += _find_restricting_mounts(folders, profile, look)
    sizes = profile.limits.shm_bytes, profile.limits.tmp_bytes
    return _assemble_options(system, sizes, outer, tuple(mounts))


@lru_cache(maxsize=64)
def _find_configuration_folders(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders that lie in a configuration folder of which programs may see a copy."""
    return tuple(folder for folder in folders if any(is_beneath(folder, top) for top in _PRIVATE_CONFIGURATION))


@lru_cache(maxsize=64)
def _assemble_options(
    system: tuple[tuple[str, ...], ...],
    sizes: tuple[int | None, int | None],
    folders: tuple[str, ...],
    mounts: tuple[_Mount, ...],
) -> tuple[str, ...]:
    """Return the result of :func:`build_mount_options` from all lookups, cached for equal arguments."""
    options = [option for part in system for option in part]
    # These come before the mounts of the workspace, so that a workspace in /tmp is mounted on top and stays visible.
    for place, size in zip(("/dev/shm", "/tmp"), sizes, strict=True):  # noqa: S108
        options += ["--perms", "1777", "--size", str(size), "--tmpfs", place]
    # A folder that is made read-only takes no further mount points, so all of these are sealed after the last mount.
    sealed: list[str] = []
    for path, access in sorted(mounts, key=lambda mount: (mount[0].count("/"), mount[0])):  # the outer first
        if access in ("rw", "ro"):
            options += ["--bind" if access == "rw" else "--ro-bind", path, path]
        elif access == "listed":
            options += ["--perms", "0755", "--tmpfs", path]
            sealed += ["--remount-ro", path]
        elif access.startswith("link:"):
            options += ["--symlink", access.removeprefix("link:"), path]
        elif access != "gone" and any(is_beneath(path, place) for place in (*folders, *_SYSTEM_FOLDERS)):
            inner = any(folder != path and is_beneath(folder, path) for folder in folders)
            options += _build_masking_options(path, is_file=access == "hidden file", inner=inner)
            sealed += ["--remount-ro", path] if inner else []
    # The options are separated by NUL characters. One within a path would begin an option that no plan contains.
    if "\0" in "".join(options):
        raise ToolError("The path of a folder contains a NUL character. Use another folder.", kind="invalid_input")
    return (*options, *sealed, "--remount-ro", "/dev", "--remount-ro", "/")


def _build_masking_options(path: str, *, is_file: bool, inner: bool) -> list[str]:
    """Return the options that mount something empty over a path.

    :param inner: whether something is mounted in it
    """
    if is_file:
        return ["--ro-bind", "/dev/null", path]
    if inner:  # only the way to the inner mounts is left, to be sealed last
        return ["--perms", "0711", "--tmpfs", path]
    return ["--perms", "0000", "--size", "4096", "--tmpfs", path, "--remount-ro", path]


def _find_restricting_mounts(
    folders: Mapping[str, MountAccess], profile: SandboxProfile, look: LookupCache
) -> list[_Mount]:
    """Return the mounts over paths in the profile's folders: read-only or unreadable.

    If the folder around a path can be written, the folders on the way are bound onto themselves. As mounts they can
    neither be renamed nor removed.
    """
    fixed = (*_workspace_configuration_files(profile, look), *profile.pinned)
    if not fixed and not profile.masked:
        return []
    kept: dict[str, MountAccess | Literal["hidden"]] = {}
    for path in fixed:
        # A read-only folder needs no pins: nothing in it can be renamed or replaced.
        around = _find_innermost(folders, path)
        if around is not None and folders[around] == "rw" and protected_mounts.is_mount_target_present(path, look):
            _keep_in_place(kept, protected_mounts.find_folders_between(path, (around,)))
            kept[path] = "ro"
    for path in profile.masked:
        _keep_hidden(kept, path, folders, look)
    # A mount beneath a hidden folder would need a mount point in it, and the folder is mounted empty.
    masked = frozenset(profile.masked)
    pinned = frozenset(fixed)
    if profile.listed:
        return _list_entry_by_entry(folders, profile, look, kept, pinned)
    return [
        (path, _how_to_mask_path(look.identify(path)) if access == "hidden" else access)
        for path, access in kept.items()
        if (access != "rw" or (path not in folders and not protected_mounts.is_within_any_folder(path, pinned)))
        and not protected_mounts.is_within_any_folder(path.rpartition("/")[0], masked)  # a hidden folder is empty
    ]


def _list_entry_by_entry(
    folders: Mapping[str, MountAccess],
    profile: SandboxProfile,
    look: LookupCache,
    kept: Mapping[str, MountAccess | Literal["hidden"]],
    pinned: frozenset[str],
) -> list[_Mount]:
    """Return the mounts of a profile with folders of which a program sees only what they list.

    In such a folder, every entry is a separate mount in an empty folder. So no other spelling of a name leads to a file
    that is masked or read-only.

    :param kept: how each restricted path, and each folder on the way, is mounted
    """
    found: dict[str, _Mount] = {}
    others = {*folders, *map(look.resolve, profile.hidden)}  # these have mounts already
    for folder in sorted(profile.listed, key=len):
        around = _find_innermost(folders, folder)
        if around is None or protected_mounts.is_within_any_folder(folder, frozenset(profile.masked)):
            continue
        found[folder] = (folder, "listed")
        for name, kind in look(_list_entries, folder):
            path = f"{folder.rstrip('/')}/{name}"
            access = "ro" if protected_mounts.is_within_any_folder(path, pinned) else folders[around]
            # Devices, FIFOs and sockets are left out: a program may block on them or reach a process of the machine.
            if kind != "other" and path not in kept and path not in others:
                found.setdefault(path, (path, kind if kind.startswith("link:") else access))
    for path, access in kept.items():
        if protected_mounts.is_within_any_folder(path.rpartition("/")[0], frozenset(profile.masked)):
            continue
        # The folder has a mount already, so it cannot be renamed. A second mount would only cost time.
        if path in others and access == "rw":
            continue
        shown = _how_to_mask_path(look.identify(path)) if access == "hidden" else access
        is_fixed = access == "rw" and protected_mounts.is_within_any_folder(path, pinned)
        found.setdefault(path, (path, "ro" if is_fixed else shown))
    return list(found.values())


def _list_entries(folder: str) -> tuple[tuple[str, str], ...]:
    """Return the name and kind of each entry of a folder: ``plain``, ``link:`` with the target, or ``other``."""
    found: list[tuple[str, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            plain = entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)
            link = f"link:{Path(entry.path).readlink()}" if entry.is_symlink() else "other"
            found.append((entry.name, "plain" if plain else link))
    return tuple(sorted(found))


def _find_innermost(folders: Mapping[str, MountAccess], path: str) -> str | None:
    return max((folder for folder in folders if is_beneath(path, folder)), key=len, default=None)


def _keep_in_place(kept: dict[str, MountAccess | Literal["hidden"]], ways: Iterable[str]) -> None:
    for way in ways:
        kept.setdefault(way, "rw")


def _keep_hidden(
    kept: dict[str, MountAccess | Literal["hidden"]], path: str, folders: Mapping[str, MountAccess], look: LookupCache
) -> None:
    around = _find_innermost(folders, path)
    if around is None:
        return
    if not protected_mounts.is_mount_target_present(path, look):  # it existed a moment ago, and may have been moved
        raise mount_comparison.make_replaced_mount_error(path)
    ways = protected_mounts.find_folders_between(path, (around,)) if folders[around] == "rw" else []
    if len(ways) < _MAX_DEPTH:  # a path that is hidden for its depth stays hidden wherever it is moved
        _keep_in_place(kept, ways)
    kept[path] = "hidden"


def _workspace_configuration_files(profile: SandboxProfile, look: LookupCache) -> Iterator[str]:
    """Yield each workspace configuration file that exists."""
    for place in (profile.workspace, *profile.writable):
        path = f"{place.rstrip('/')}/{WORKSPACE_FILE}"
        found = look.identify(path)
        if found is not None and stat.S_ISREG(found.mode):
            yield path


def compute_mount_access(
    capabilities: CapabilitySet, profile: SandboxProfile, toolchains: ToolchainSet, look: LookupCache
) -> dict[str, MountAccess]:
    """Return each folder or file to mount with its access, the outer before the inner.

    :raises ToolError: ``unavailable`` for a set that mounts of whole folders cannot enforce
    """
    # With the whole file system as the workspace, its mount would undo every mount before it.
    if profile.workspace == "/":
        raise ToolError(
            "The workspace is the whole file system, which cannot be confined. Ask the user to open a folder instead.",
            kind="unavailable",
        )
    found = _find_read_only_folders(profile, toolchains, look)
    patterns = tuple((layer.fs_write, layer.fs_read) for layer in capabilities.layers)
    writable: set[str] = set()
    for part in _find_covered_parts(patterns, (profile.workspace, *profile.writable), profile.read_only_roots):
        path = part.path
        kind = _classify_path(path, look)
        if kind is None:
            continue
        # A link would be mounted at its target, which may be outside all folders of the session.
        if kind == "moved":
            raise ToolError(
                f"`{path}` has become a symbolic link. A sandbox mounts only real folders. Ask the user to "
                "restore the folder.",
                kind="conflict",
            )
        _check_complete(part, kind)
        if part.capability == "fs.write" and profile.workspace_writable:
            found[path] = "rw"
            writable.add(path)
        # A readable part of a writable folder must not become a read-only mount over it.
        elif writable.isdisjoint(part.within):
            found[path] = "ro"
    # The home folder is set last, so no pattern of a capability set can make it read-only.
    found[profile.scratch] = "rw"
    return dict(_sort_outer_first(tuple(found.items())))


def _find_read_only_folders(
    profile: SandboxProfile, toolchains: ToolchainSet, look: LookupCache
) -> dict[str, MountAccess]:
    """Return the toolchains and the profile's readable folders that exist."""
    found: dict[str, MountAccess] = {}
    for folder in toolchains.mounts:
        if look.identify(folder) is not None:  # canonical already
            found[folder] = "ro"
    for folder in profile.readable:
        real = look.resolve(folder)
        # System folders have their mounts already, with parts that are masked. Another mount would show these parts
        # again.
        if look.identify(real) is not None and not any(is_beneath(real, system) for system in SYSTEM_FOLDERS):
            found[real] = "ro"
    return found


@lru_cache(maxsize=64)
def _sort_outer_first(folders: tuple[tuple[str, MountAccess], ...]) -> tuple[tuple[str, MountAccess], ...]:
    return tuple(sorted(folders, key=lambda item: (item[0].count("/"), item[0])))


_Patterned = Literal["fs.read", "fs.write"]


class _CoveredFolderPart(Struct, frozen=True):
    """A part of one of the profile's places that a capability set covers.

    :param covers_folder: whether it covers all of it, if it is a folder
    :param covers_file: whether it covers it, if it is a file
    :param within: the writable parts that this part lies in
    """

    path: str
    capability: _Patterned
    covers_folder: bool
    covers_file: bool
    within: frozenset[str]


def _check_complete(part: _CoveredFolderPart, kind: Literal["folder", "file"]) -> None:
    if not (part.covers_folder if kind == "folder" else part.covers_file):
        raise ToolError(
            f"{part.capability} names only some of the files in `{part.path}`, but a sandbox mounts whole "
            "folders. Name a folder in `requires` instead.",
            kind="unavailable",
        )


def _classify_path(path: str, look: LookupCache) -> Literal["folder", "file", "moved"] | None:
    """Return what is at a path, ``moved`` if it is no longer canonical, or None if there is nothing."""
    found = look.identify(path)
    if found is None or (found.is_link and not look(os.path.exists, path)):
        return None
    if not look.is_canonical(path):
        # The plan compares paths as text, so only a canonical path means the folder that was checked.
        return "moved"
    return "folder" if stat.S_ISDIR(found.mode) else "file"


@lru_cache(maxsize=256)
def _find_covered_parts(
    patterns: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...], places: tuple[str, ...], further: tuple[str, ...]
) -> tuple[_CoveredFolderPart, ...]:
    """Return the parts of these places that a set covers, the writable ones of each first.

    :param patterns: for each layer, what may be written and what may be read
    :param further: places that are read-only
    """
    capabilities = CapabilitySet(tuple(CapabilityLayer("", fs_write=write, fs_read=read) for write, read in patterns))
    found: list[_CoveredFolderPart] = []
    writable: list[str] = []
    for place in (*places, *further):
        if place not in further:
            parts = [
                _build_part(capabilities, "fs.write", part, ())
                for part in _find_reached(capabilities, "fs.write", place)
            ]
            writable += [part.path for part in parts]
            found += parts
        found += (
            _build_part(capabilities, "fs.read", part, writable)
            for part in _find_reached(capabilities, "fs.read", place)
        )
    return tuple(found)


def _find_reached(capabilities: CapabilitySet, capability: _Patterned, place: str) -> Iterator[str]:
    for folder in capabilities.compute_covering_folders(capability):
        if is_beneath(folder, place):
            yield folder
        elif is_beneath(place, folder):
            yield place


def _build_part(
    capabilities: CapabilitySet, capability: _Patterned, part: str, writable: Iterable[str]
) -> _CoveredFolderPart:
    # Nothing in it may be outside the set: test with names that no pattern was written for.
    probes = (f"{part}/~handrail-probe", f"{part}/.~handrail-probe/.~~/~", f"{part}/~/~/~/~handrail.probe~")
    whole = all(capabilities.allows(capability, probe) for probe in probes)
    within = frozenset(other for other in writable if is_beneath(part, other))
    return _CoveredFolderPart(part, capability, whole, capabilities.allows(capability, part), within)


def _how_to_mask_path(found: FileIdentity | None) -> Literal["hidden file", "hidden folder", "gone"]:
    """Return how a path of this kind is made unreadable."""
    if found is None:
        return "gone"
    return "hidden folder" if stat.S_ISDIR(found.mode) else "hidden file"


@lru_cache(maxsize=1)
def _build_program_options() -> tuple[str, ...]:
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    return (*options, "--dir", "/run", "--dir", "/var", "--symlink", "../tmp", "/var/tmp")  # noqa: S108


@lru_cache(maxsize=1)
def _build_proc_options() -> tuple[str, ...]:
    """Return the options for /proc and /dev.

    /proc has parts that belong to the host and that its root may write, even from a user namespace. For root it is
    read-only as a whole, which is one mount and leaves nothing out. For other users only the kernel's settings are
    read-only.

    The launcher writes the settings of the sandbox's own user namespace
    (:func:`handrail.sandbox.filters.resource_limits.compute_sandbox_inotify_limits`). No other process can, since that takes a capability in that
    namespace, which the launcher gives up.
    """
    private = ("--remount-ro", "/proc") if os.geteuid() == 0 else ("--ro-bind", "/proc/sys", "/proc/sys")
    settings = ("--bind", _USER_SETTINGS, _USER_SETTINGS) if compute_sandbox_inotify_limits() else ()
    return ("--proc", "/proc", *private, *settings, "--dev", "/dev")


def _configuration_folders() -> Iterator[str]:
    for top in _PRIVATE_CONFIGURATION:
        if os.path.isdir(top) and not os.path.islink(top):  # noqa: PTH112, PTH114 - every few seconds
            yield top


class _ConfigurationFolderView:
    """The view that programs have of /etc and /usr/local/etc.

    For root it is a copy of the public files (:mod:`handrail.sandbox.view.public_config_copy`), because root in a user
    namespace still owns root's files. For other users it is /etc itself, with files masked that they may read by a
    group and that are not public. The folders are scanned again every few seconds.
    """

    RESCAN_S = 10.0

    def __init__(self) -> None:
        self._scanned_at = float("-inf")
        self._masks: list[tuple[str, list[str]]] = []
        self._options: tuple[str, ...] = ()
        self._good_until = float("-inf")
        self._copies: dict[str, PublicConfigCopy] = {}

    def get_last_scanned_mount_options(self, now: float) -> tuple[str, ...]:
        """Return the mount options of the last scan; :meth:`gone` finds the entries missing since.

        :raises ToolError: ``unavailable`` if root's programs cannot get a copy
        """
        # Only root owns the private files of /etc within the sandbox, so only root needs the copy.
        if os.geteuid() == 0:
            if now > self._good_until:
                self._refresh_copies(now)
        elif now - self._scanned_at > self.RESCAN_S:
            self._masks = [mask for top in _PRIVATE_CONFIGURATION for mask in _private_entries(top)]
            self._options = ("--ro-bind", "/etc", "/etc", *(word for _, mask in self._masks for word in mask))
            self._scanned_at = now
        return self._options

    def _refresh_copies(self, now: float) -> None:
        """Update the copies."""
        if now - self._scanned_at > self.RESCAN_S:
            self._copies = {top: self._copies.get(top) or PublicConfigCopy(top) for top in _configuration_folders()}
            self._scanned_at = now
        bound = (("--ro-bind", copy.get_current_copy_folder(now), top) for top, copy in self._copies.items())
        self._options = tuple(word for words in bound for word in words)
        looked = (copy.next_comparison_time for copy in self._copies.values())
        self._good_until = min(self._scanned_at + self.RESCAN_S, *looked)

    def resolve_path_in_view(self, path: str, now: float) -> str:
        """Return where the file lies that programs see at this path."""
        for top, copy in self._copies.items():
            if is_beneath(path, top):
                return copy.get_current_copy_folder(now) + path.removeprefix(top)
        return path

    def ensure_mount_point(self, path: str, now: float) -> None:
        """Ensure that there is something to mount this path on."""
        for top, copy in self._copies.items():
            if is_beneath(path, top):
                copy.ensure_private_mount_point(path, now)
                # The new mount point must be in the copy that the next start uses.
                self._good_until = float("-inf")

    def find_masks_of_missing_paths(self) -> list[tuple[str, list[str]]]:
        """Return the masks of missing paths, with their mount points: a missing one fails the whole start."""
        return [(path, mask) for path, mask in self._masks if not os.path.lexists(path)]


_configuration = _ConfigurationFolderView()


def _configuration_now() -> tuple[str, ...]:
    return _configuration.get_last_scanned_mount_options(time.monotonic())


def _resolve_shown(path: str) -> str:
    return _configuration.resolve_path_in_view(path, time.monotonic())


def _ensure_mount_point(path: str) -> None:
    _configuration.ensure_mount_point(path, time.monotonic())


def refresh_mount_options(options: Sequence[str], table: ExpectedMounts) -> tuple[list[str], ExpectedMounts]:
    """Return the options of :func:`build_mount_options`, and their mounts, without missing paths."""
    left = list(options)
    gone = _configuration.find_masks_of_missing_paths()
    for _, mask in gone:
        size = len(mask)
        # A mask is several words. Only the whole sequence is removed, because a single word can belong to another
        # mount.
        at = next((at for at in range(len(left)) if left[at : at + size] == mask), len(left))
        del left[at : at + size]
    return left, table.without_mount_points({path for path, _ in gone}) if gone else table


def _private_entries(top: str) -> Iterator[tuple[str, list[str]]]:
    for folder, names, files in os.walk(top, onerror=_raise_walk_error):
        for name in list(names):
            path = f"{folder}/{name}"
            mode = os.lstat(path).st_mode
            # A folder that others cannot list is private to its group, which the programs would inherit from this
            # process.
            if stat.S_ISDIR(mode) and mode & 0o005 != 0o005:
                names.remove(name)
                if os.access(path, os.X_OK):
                    # It is empty, so it need not be sealed, which takes as long as mounting it.
                    yield path, ["--perms", "0000", "--size", "4096", "--tmpfs", path]
        for name in files:
            path = f"{folder}/{name}"
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                continue
            # A file that this user cannot read needs no mask: the programs run as the same user.
            if not stat.S_ISLNK(mode) and not mode & 0o004 and os.access(path, os.R_OK):
                yield path, ["--ro-bind", "/dev/null", path]


def _raise_walk_error(error: OSError) -> None:
    """Raise an error if a folder could not be read, since its files would not be masked.

    :raises ToolError: ``unavailable`` if the system is short of a resource
    """
    raise_if_resource_shortage(error, str(error.filename))


def is_beneath(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
