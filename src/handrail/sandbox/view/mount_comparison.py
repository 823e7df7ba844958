"""A comparison of the mounts that a sandbox must have with those that it has.

Bubblewrap makes each mount by path, and a program that can write in the workspace can meanwhile replace a folder by another
file or a link. So the plan says which file or folder each mount must show, and the launcher compares that with the actual
mounts before it starts anything.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from handrail.contract.errors import ToolError
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.sandbox.view.cached_folder_tree import raise_if_resource_shortage
from handrail.sandbox.view.sandbox_user import LookupCache

MOUNT_TABLE_FILE = "/proc/self/mountinfo"
_AS_INSTALLED = frozenset(
    ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/dev/null", "/proc/sys")
)
"""Sources that only root can replace, and that a distribution may have made links."""
_VALUES = {
    "--perms": 1,
    "--size": 1,
    "--dir": 1,
    "--symlink": 2,
    "--tmpfs": 1,
    "--proc": 1,
    "--dev": 1,
    "--remount-ro": 1,
}
_MADE = frozenset(("--tmpfs", "--dev", "--proc"))
_ESCAPED = compile_regex_lazily(r"\\([0-7]{3})")


class ExpectedMount(NamedTuple):
    """One mount that a sandbox must have.

    :param point: its mount point in the sandbox
    :param content: ``DEVICE:INODE`` of the file or folder that it shows, ``+`` for a file system that is made for the
        sandbox, or ``=MAJOR:MINOR ROOT`` for a mount that is beneath a bound folder on this machine
    """

    point: str
    read_only: bool
    content: str


class ExpectedMounts(NamedTuple):
    """The mounts that a sandbox must have.

    :param mounts: all of them, each after the one that it is on
    :param kept: paths that must keep their names while a program runs, the outer before the inner
    :param passed: folders on the way to a mount that are not mounts themselves, each with its ``DEVICE:INODE``
    """

    mounts: tuple[ExpectedMount, ...] = ()
    kept: tuple[str, ...] = ()
    passed: tuple[tuple[str, str], ...] = ()

    def without_mount_points(self, points: Container[str]) -> ExpectedMounts:
        """Return the same without the mounts at these points."""
        left = (mount for mount in self.mounts if mount.point not in points)
        return ExpectedMounts(tuple(left), tuple(path for path in self.kept if path not in points), self.passed)


class HostMount(NamedTuple):
    """One mount of this process's namespace, as mountinfo(5) shows it.

    :param root: as it is written there
    """

    id: int
    parent: int
    device: str
    root: str
    point: str


class HostMountCache:
    """The mounts of this process's namespace, read again only when the kernel reports a change.

    Thread-safe. It holds one descriptor from the first question until :meth:`forget`.
    """

    def __init__(self) -> None:
        self._asked = threading.Lock()
        self._descriptor = -1
        self._changed = select.poll()
        self._found: tuple[HostMount, ...] = ()
        self._points: list[str] = []

    def current(self) -> tuple[HostMount, ...]:
        """Return the mounts, ordered by mount point.

        :raises ToolError: ``unavailable`` if the system is short of a resource; the next call reads them
        """
        with self._asked:
            return self._find_current()[0]

    def beneath(self, folder: str) -> list[HostMount]:
        """Return the mounts whose mount point is in ``folder``."""
        with self._asked:
            mounts, points = self._find_current()
        start = f"{folder.rstrip('/')}/"
        first = bisect_left(points, start)
        last = first
        while last < len(mounts) and mounts[last].point.startswith(start):
            last += 1
        return [mount for mount in mounts[first:last] if mount.point != "/"]

    def forget(self) -> None:
        """Close the descriptor, and read the mounts again the next time.

        The kernel does not report the rename of a folder that contains a mount point.
        """
        with self._asked:
            self._close_descriptor()

    def reset_after_fork(self) -> None:
        """Reset the state in a forked process, whose mounts may differ and which lacks the other threads."""
        self._asked = threading.Lock()
        self._close_descriptor()

    def _find_current(self) -> tuple[tuple[HostMount, ...], list[str]]:
        # The kernel marks the open file when any mount changes, so an unchanged table costs one system call.
        if self._descriptor < 0 or self._changed.poll(0):
            self._read()
        return self._found, self._points

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        self._changed = select.poll()
        if descriptor >= 0:
            os.close(descriptor)

    def _read(self) -> None:
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(MOUNT_TABLE_FILE, os.O_RDONLY | os.O_CLOEXEC)
                self._changed.register(self._descriptor, select.POLLPRI)
            lines = os.fsdecode(Path(MOUNT_TABLE_FILE).read_bytes()).rstrip("\n").split("\n")
        except OSError as error:
            self._close_descriptor()  # the kernel reports a change once, and the last reading may be older
            raise_if_resource_shortage(error, MOUNT_TABLE_FILE)
            raise
        found = sorted(map(_parse_mount, lines), key=_get_point)
        self._found, self._points = tuple(found), [mount.point for mount in found]


def _get_point(mount: HostMount) -> str:
    return mount.point


def _parse_mount(line: str) -> HostMount:
    number, parent, device, root, point, _ = line.split(" ", 5)
    return HostMount(int(number), int(parent), device, root, _unescape_path(point))


def _unescape_path(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text) if "\\" in text else text


def escape_mountinfo_path(path: str) -> str:
    """Write a path as mountinfo(5) does."""
    for sign in "\\ \t\n":
        path = path.replace(sign, f"\\{ord(sign):03o}")
    return path


host_mounts = HostMountCache()
os.register_at_fork(after_in_child=host_mounts.reset_after_fork)


def derive_expected_mounts(options: Sequence[str], look: LookupCache) -> ExpectedMounts:
    """Derive the mounts that bubblewrap must make from its options.

    :raises ToolError: ``conflict`` if a source has been replaced since it was looked at
    """
    found = [ExpectedMount("/", read_only=False, content="+")]
    links: dict[str, str] = {}
    sources: dict[str, str] = {}
    look(host_mounts.current)
    at = 0
    while at < len(options):
        option = options[at]
        if option in ("--bind", "--ro-bind"):
            source, point = options[at + 1], _resolve_mount_point(options[at + 2], links)
            sources[point] = source
            found += _expand_bind(source, point, option == "--ro-bind", look)
            at += 3
            continue
        value = options[at + _VALUES[option]]
        if option == "--symlink":
            links[value] = os.path.normpath(f"{os.path.dirname(value)}/{options[at + 1]}")  # noqa: PTH120
        elif option in _MADE:
            found.append(ExpectedMount(_resolve_mount_point(value, links), read_only=False, content="+"))
        elif option == "--remount-ro":
            point = _resolve_mount_point(value, links)
            # A later mount at the same point covers the earlier ones, so only the last one is made read-only.
            number = max(number for number, mount in enumerate(found) if mount.point == point)
            found[number] = found[number]._replace(read_only=True)
        at += 1 + _VALUES[option]
    kept, passed = _find_names_to_keep(found, sources)
    return ExpectedMounts(
        tuple(found), kept, tuple((path, _format_device_and_inode(source, look)) for path, source in passed.items())
    )


def _resolve_mount_point(point: str, links: dict[str, str]) -> str:
    """Return a mount point with the sandbox's own links followed, such as ``/var/tmp``."""
    for link, target in links.items():
        if point == link or point.startswith(f"{link}/"):
            return target + point.removeprefix(link)
    return point


def _expand_bind(source: str, point: str, read_only: bool, look: LookupCache) -> Iterator[ExpectedMount]:
    """Yield the mount of one source, and the mounts below it that a bind includes."""
    # All other sources must be without links: a link that a program can replace must fail the comparison.
    real = look.resolve(source) if source in _AS_INSTALLED else source
    yield ExpectedMount(point, read_only, _format_device_and_inode(real, look))
    if inner := host_mounts.beneath(real):
        for mount in _find_submounts(inner, _read_mount_id(real)):
            content = f"={mount.device} {mount.root}"
            yield ExpectedMount(point + mount.point.removeprefix(real), read_only=False, content=content)


def _format_device_and_inode(path: str, look: LookupCache) -> str:
    """Return ``DEVICE:INODE`` of a path without links, as it was looked at."""
    what = look.identify(path)
    descriptor = -1
    try:
        # The kernel reports the path that it opened: another one if it followed a link.
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened, shown = os.fstat(descriptor), os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - as it is there
        # The path must still lead to the file that was checked when the plan was made.
        if what is None or shown != path or what[:2] != (opened.st_dev, opened.st_ino):
            raise make_replaced_mount_error(path)
        return f"{what.device}:{what.inode}"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise make_replaced_mount_error(path) from None
        raise_if_resource_shortage(error, path)
        raise ToolError(
            f"`{path}` cannot be mounted in a sandbox: {error.strerror}. Ask the user to grant the account that runs Handrail access to it.",
            kind="unavailable",
        ) from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _read_mount_id(path: str) -> int:
    """Return the id of the mount that a path is on. If it is swapped meanwhile, the comparison fails."""
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_bytes().splitlines()
    except OSError as error:
        raise_if_resource_shortage(error, path)
        raise
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return next((int(line.partition(b":")[2]) for line in lines if line.startswith(b"mnt_id:")), -1)


def _find_submounts(inner: Sequence[HostMount], top: int) -> Iterator[HostMount]:
    """Yield the mounts of ``inner`` that a recursive bind of a folder on the mount ``top`` copies."""
    above = {top}
    rest = list(inner)
    while True:
        copied = [mount for mount in rest if mount.parent in above]
        if not copied:
            return
        yield from copied
        above = {mount.id for mount in copied}
        rest = [mount for mount in rest if mount.id not in above]


class _RequiredMountAtPlace(NamedTuple):
    """The mount that must be at one place.

    :param parent: the place of the mount that it is on; None for a mount that came from this machine with a folder
    :param access: the beginning of its options
    :param number: of the identity that the launcher reports for it; -1 if a later mount covers it, or for ``=``
    """

    parent: str | None
    access: str
    content: str
    number: int


@lru_cache(maxsize=64)
def _index_mounts(table: ExpectedMounts) -> tuple[dict[str, _RequiredMountAtPlace], tuple[str, ...]]:
    """Return the mounts by place, and the paths that the launcher must look at.

    A place is a mount point as mountinfo(5) writes it, followed by a newline for each earlier mount at that point.
    """
    parents, covered = _number_stacked_mounts(table.mounts)
    places: list[str] = []
    wanted: dict[str, _RequiredMountAtPlace] = {}
    looked: list[str] = []
    for number, mount in enumerate(table.mounts):
        place = escape_mountinfo_path(mount.point)
        # A point can have several mounts on top of each other. Each gets a key that only the parser of the report makes
        # again.
        while place in wanted:
            place += "\n"
        places.append(place)
        ours = not mount.content.startswith("=")
        shown = ours and number not in covered
        parent = (places[parents[number]] if number else "-") if ours else None
        wanted[place] = _RequiredMountAtPlace(
            parent, "ro" if mount.read_only else "", mount.content, len(looked) if shown else -1
        )
        if shown:
            looked.append(mount.point)
    return wanted, (*looked, *(folder for folder, _ in table.passed))


def list_paths_to_identify(table: ExpectedMounts) -> tuple[str, ...]:
    """Return the paths in the sandbox whose device and inode :func:`find_first_mount_mismatch` needs."""
    return _index_mounts(table)[1]


@lru_cache(maxsize=64)  # the kernel gives the same numbers again once they are free
def find_first_mount_mismatch(table: ExpectedMounts, described: bytes) -> str | None:
    """Return the first path in a sandbox whose mount is not the expected one; None if all are right.

    :param described: items, each after its length in 4 bytes: the sandbox's own mountinfo(5), and ``DEVICE:INODE`` of
        each path of :func:`list_paths_to_identify`, empty for a missing one
    """
    wanted, looked = _index_mounts(table)
    text, *identities = _split_items(described)
    # Every expected mount is removed when it is found. The rest is missing in the sandbox.
    left = dict(wanted)
    places: dict[str, str] = {}
    for line in os.fsdecode(text).rstrip("\n").split("\n"):
        number, parent, device, root, point, options, _ = line.split(" ", 6)
        place = point
        while place not in left and f"{place}\n" in wanted:
            place += "\n"
        mount = left.pop(place, None)
        if mount is None:
            if point.startswith(("/proc/", "/dev/")):
                continue  # bubblewrap itself fills these, and no other process can
            # An unexpected mount is as bad as a missing one: it may cover a file that must be visible or hidden.
            return _unescape_path(point)
        places[number] = place
        # The right mount on the wrong parent has been moved with a folder, and its path in the sandbox leads elsewhere.
        on = mount.parent is None or mount.parent == places.get(parent, "-")
        if not on or not options.startswith(mount.access) or not _is_shown(mount, device, root, identities):
            return _unescape_path(point)
    for (folder, content), found in zip(table.passed, identities[len(looked) - len(table.passed) :], strict=True):
        if found != content.encode():
            return folder
    # Mounts in /proc appear and disappear with their use.
    gone = (place for place, mount in left.items() if mount.parent is not None or not place.startswith("/proc/"))
    return next((_unescape_path(place.rstrip("\n")) for place in gone), None)


def _split_items(part: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(part):
        start = at + 4
        at = start + int.from_bytes(part[at:start], "big")
        yield part[start:at]


def _is_shown(mount: _RequiredMountAtPlace, device: str, root: str, identities: Sequence[bytes]) -> bool:
    if mount.content.startswith("="):
        return mount.content == f"={device} {root}"
    if mount.number < 0:
        return True
    found = identities[mount.number].decode()
    if mount.content != "+":
        return found == mount.content
    # A file system that was made for this sandbox has no device, and must be the visible one.
    shown = int(found.partition(":")[0] or -1)
    return shown >= 0 and os.major(shown) == 0 and device == f"0:{os.minor(shown)}"


def _find_names_to_keep(
    table: Sequence[ExpectedMount], sources: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the paths that must keep their names, and the folders among them that are not mounts.

    A mount moves with the file that it is on, and another file can then take the name. So these paths are the mount
    points in a bound folder. If the program cannot write there, and so no folder on the way is a mount, they include
    those folders. The folders that are not mounts come with their sources.
    """
    parents, _ = _number_stacked_mounts(table)
    kept: dict[str, None] = {}
    passed: dict[str, str] = {}
    for number, mount in enumerate(table):
        above = table[parents[number]]
        # Mount points in the sandbox's own file systems cannot be renamed by programs of this machine.
        if mount.content.startswith("=") or above.content[:1] in ("+", "=") or above.point in _AS_INSTALLED:
            continue
        path = mount.point
        while path != above.point and path not in kept:
            kept[path] = None
            if path != mount.point:
                passed[path] = sources[above.point] + path.removeprefix(above.point)
            path = path.rpartition("/")[0] if above.read_only else above.point
    return tuple(sorted(kept, key=lambda path: path.count("/"))), passed


def _number_stacked_mounts(table: Sequence[ExpectedMount]) -> tuple[list[int], set[int]]:
    """Return for each mount the number of the mount below it, and the numbers of covered mounts."""
    latest: dict[str, int] = {}
    above: set[str] = set()
    parents: list[int] = []
    covered: set[int] = set()
    for number, mount in enumerate(table):
        point = mount.point
        parents.append(_find_innermost(point, latest) if number else 0)
        if point in latest:
            covered.add(latest[point])
        # A mount over a folder hides every mount below that folder.
        if point in above and number:
            for other in [other for other in latest if other.startswith(f"{point}/")]:
                covered.add(latest.pop(other))
        latest[point] = number
        while (point := point.rpartition("/")[0]) and point not in above:
            above.add(point)
    return parents, covered


def _find_innermost(point: str, latest: Mapping[str, int]) -> int:
    while point not in latest:
        point = point.rpartition("/")[0] or "/"
    return latest[point]


def make_replaced_mount_error(path: str) -> ToolError:
    """Return the error for a mount that shows another file than the one it was made for."""
    return ToolError(f"`{path}` was replaced while the sandbox was prepared. Try again.", kind="conflict")


def make_ended_mount_error(path: str) -> ToolError:
    """Return the error for a sandbox that was ended because one of its mounts had ended."""
    return ToolError(
        f"`{path}` was replaced, moved or removed while a program was running. This ended its mount in "
        "the sandbox, and the program with it. Check what the program did, then try again.",
        kind="conflict",
    )
