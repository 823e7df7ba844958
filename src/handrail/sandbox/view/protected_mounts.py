"""The workspace paths that a sandbox mounts over: protected ones become read-only, hidden ones unreadable.

A program could bypass a path that is only bound read-only: rename its folder, make another of that name, and write there.
So every folder between the writable root and such a path is a mount too, which cannot be renamed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from handrail.contract.errors import ToolError
from handrail.contract.protected.path_protection import (
    WORKSPACE_FILE,
    PathProtection,
    extract_path_from_git_folder,
    find_path_protection,
)
from handrail.contract.sandbox_protocol import PathDenials, SandboxProfile
from handrail.sandbox.view.cached_folder_tree import CachedFolder, FolderTree, ProtectedEntry
from handrail.sandbox.view.sandbox_user import FileIdentity, LookupCache

MAX_UNFOLDED_MOUNTS = 400
"""The limit of mounts without folding, including the folders on the way. Each bind takes longer than the one before:
100 take 0.1 s, 400 take 0.6 s, 1,000 take 2.4 s and 2,000 take 15 s."""
_MAX_LINKS = 40
"""The kernel's limit for links on the way to one file."""
MAX_MOUNTS = 1_000
"""More are refused. bubblewrap accepts 9,000 words."""


def read_mounted_path_states(profile: SandboxProfile, look: LookupCache) -> tuple[tuple[str, FileIdentity, int], ...]:
    """Return the identity and change time of every path that a sandbox of this profile mounts over.

    A ready sandbox can be used only if this is unchanged: if a file was replaced, its mount stayed on the old file. The
    inode number alone does not show that, because it is often reused. A rename also updates the change time.
    """
    paths = {*profile.pinned, *profile.masked}
    for place in (profile.workspace, *profile.writable):
        paths.add(place)
        paths.add(f"{place.rstrip('/')}/{WORKSPACE_FILE}")
    for path in (*profile.pinned, *profile.masked):
        paths.update(find_folders_between(path, (profile.workspace, *profile.writable)))
    return tuple(
        # The change time of a folder moves with every file in it, so only its identity counts.
        (path, what, 0 if stat.S_ISDIR(what.mode) else look(_read_change_time, path))
        for path in sorted(paths)
        if (what := look.identify(path)) is not None
    )


def _read_change_time(path: str) -> int:
    try:
        return os.lstat(path).st_ctime_ns
    except OSError:
        return -1


def find_folders_between(path: str, roots: Iterable[str]) -> list[str]:
    """Return the folders between ``path`` and the innermost of ``roots`` that contains it, excluding both."""
    inner = max((root for root in roots if path.startswith(root.rstrip("/") + "/")), key=len, default=None)
    if inner is None:
        return []
    top = inner.rstrip("/")
    names = path[len(top) + 1 :].split("/")[:-1]
    return [f"{top}/{'/'.join(names[: count + 1])}" for count in range(len(names))]


def is_writable_by_programs(entry: ProtectedEntry, denials: PathDenials | None) -> bool:
    """Return whether programs may write a protected entry: a rule names it, or it is only loaded as code."""
    return entry.why.requires_approval and (
        not entry.why.applies_to_programs or (denials is not None and denials.is_protected_write_allowed(entry.path))
    )


def find_read_only_protected_paths(tree: FolderTree, denials: PathDenials | None = None) -> tuple[str, ...]:
    """Return the protected paths of a tree that programs may not write, to be bound read-only.

    A link cannot be mounted over. Its target inside the tree can, and so can the target of a link in a protected
    folder. If the target is a repository, its protected parts are found as such.
    """
    found: dict[str, None] = {}
    repositories = set(tree.list_git_directories())
    for entry in tree.get_protected_entries().values():
        path = entry.path
        # A path in a folder that is read-only already needs no separate mount.
        if is_writable_by_programs(entry, denials) or is_within_any_folder(path.rpartition("/")[0], found):
            continue
        if entry.link:
            path = os.path.realpath(path)
            # Only targets in this tree can be pinned by it, and one that is missing has nothing to mount over.
            if not path.startswith(tree.root.rstrip("/") + "/") or path in repositories or not os.path.lexists(path):
                continue
        found[path] = None
    for link in _find_inner_links(tree):
        path = os.path.realpath(link)
        if (
            path.startswith(tree.root.rstrip("/") + "/")
            and Path(path).is_file()
            and not is_within_any_folder(path, found)
        ):
            found[path] = None
    return tuple(found)


def find_protected_links(
    tree: FolderTree, entries: Iterable[ProtectedEntry], denials: PathDenials | None = None
) -> dict[str, PathProtection]:
    """Return the links of a tree that programs may not change, by name or folder, with their protection.

    :param entries: the protected entries of the tree
    """
    found = {entry.path: entry.why for entry in entries if entry.link and not is_writable_by_programs(entry, denials)}
    for path in _find_inner_links(tree):
        if (
            why := find_path_protection(
                extract_path_from_git_folder(tree.root) + path[len(tree.root.rstrip("/")) + 1 :]
            )
        ) is not None:
            found[path] = why
    return found


def _find_inner_links(tree: FolderTree) -> Iterator[str]:
    """Yield the links in folders that are protected with all their contents."""
    for folder in tree.order:
        if folder.is_in_protected:
            yield from (folder.get_child_paths(name)[0] for name in folder.links)


def find_links_on_path(root: str, path: str) -> tuple[str, ...]:
    """Return the symbolic links below a root that ``path`` passes, each by a path without links."""
    found: dict[str, None] = {}
    top, done, followed = root.rstrip("/") + "/", "", 0
    names = path.split("/")[::-1]
    while names:
        name = names.pop()
        if name in ("", "."):
            continue
        if name == "..":
            done = done.rpartition("/")[0]
            continue
        here = f"{done}/{name}"
        try:
            target = os.readlink(here)  # noqa: PTH115 - on the way of each start
        except (OSError, ValueError):
            done = here
            continue
        followed += 1
        # The kernel refuses such a path too, so no program can use it.
        if followed > _MAX_LINKS:
            break
        if here.startswith(top):
            found[here] = None
        if target.startswith("/"):
            done = ""
        names += target.split("/")[::-1]
    return tuple(found)


_READ_BY_DEFAULT = frozenset(
    (".git", ".gitignore", ".gitattributes", ".gitmodules", ".mailmap", ".ignore", ".rgignore")
)


def find_blocking_pipes(tree: FolderTree, *, every: bool) -> tuple[str, ...]:
    """Return the FIFOs that git or ripgrep would open and wait for, to be hidden from programs.

    These are all FIFOs in git directories, and FIFOs named like files that such a program reads by default. For a link
    to a FIFO, the result is the target, wherever it lies.

    :param every: whether to return all FIFOs in the tree; for git itself, whose configuration may name any file
    """
    found: dict[str, None] = {}
    repositories = frozenset(tree.list_git_directories())
    for folder in tree.order:
        of_git = bool(folder.pipes) and is_within_any_folder(folder.path, repositories)
        for name in folder.pipes:
            # Other FIFOs stay visible: a program that opens one by its name wants to wait for it.
            if every or of_git or name in _READ_BY_DEFAULT:
                found[folder.get_child_paths(name)[0]] = None
    found.update(dict.fromkeys(target for _, target in _find_links_of_git(tree) if is_named_pipe(target)))
    return tuple(found)


def find_link_to_device(tree: FolderTree) -> tuple[str, str] | None:
    """Return a link that git would read without end, and the device or file of the system that it leads to, or None."""
    for path, target in _find_links_of_git(tree):
        try:
            is_device = stat.S_IFMT(os.stat(target).st_mode) in (stat.S_IFCHR, stat.S_IFBLK)  # noqa: PTH116 - see above
        except OSError:
            continue
        if target != "/dev/null" and (is_device or target.startswith(("/proc/", "/sys/"))):
            return path, target
    return None


def _find_links_of_git(tree: FolderTree) -> Iterator[tuple[str, str]]:
    """Yield the links in git directories, and those named like files that git reads by default, each with its target."""
    repositories = frozenset(tree.list_git_directories())
    for folder in tree.order:
        of_git = bool(folder.links) and is_within_any_folder(folder.path, repositories)
        for name in folder.links:
            if of_git or name in _READ_BY_DEFAULT:
                path = folder.get_child_paths(name)[0]
                yield path, os.path.realpath(path)


def is_named_pipe(path: str) -> bool:
    """Return whether a FIFO is at the path itself."""
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except OSError:
        return False


def find_hard_links_of_pinned(trees: Sequence[FolderTree], pinned: Collection[str]) -> tuple[str, ...]:
    """Return the other names (hard links) of files that are pinned or lie in a pinned folder."""
    if not any(tree.list_hard_linked_files() for tree in trees):
        return ()
    places = frozenset(pinned)
    names: dict[tuple[int, int], list[str]] = {}
    for tree in trees:
        for file, (paths, _) in tree.list_hard_linked_files().items():
            names.setdefault(file, []).extend(paths)
    found: dict[str, None] = {}
    for paths in names.values():
        free = [path for path in paths if not is_within_any_folder(path, places)]
        # At least one name is pinned. A write through a free name would change the pinned file.
        if len(free) < len(paths):
            found.update(dict.fromkeys(free))
    return tuple(found)


def find_outermost_matching_paths(tree: FolderTree, named: Callable[[str], bool], key: Hashable) -> tuple[str, ...]:
    """Return the outermost paths of a tree for which ``named`` is true, to be bound read-only.

    A folder with other paths in it is bound by the paths in it.
    """
    judged = [(folder, frozenset(names)) for folder, names in tree.find_matching_entries(named, key)]
    mixed: set[str] = set()
    for folder, names in reversed(judged):  # the inner before the outer
        children = (folder.get_child_paths(name)[0] for name in folder.folders)
        if len(names) < len(folder.files) + len(folder.folders) or any(child in mixed for child in children):
            mixed.add(folder.path)
    if named(tree.root) and tree.root not in mixed:
        return (tree.root,)
    outermost: dict[str, None] = {}
    for folder, names in judged:
        if not names or is_within_any_folder(folder.path, outermost):
            continue
        for name in sorted(names):
            path = folder.get_child_paths(name)[0]
            if path not in mixed:
                outermost[path] = None
    return tuple(outermost)


def find_hidden_and_unreadable_paths(tree: FolderTree, hidden: Callable[[str], bool], key: Hashable) -> tuple[str, ...]:
    """Return the paths of a tree for which ``hidden`` is true, and the folders that could not be read.

    A folder is hidden as a whole if it and everything in it is hidden.

    :param hidden: takes an absolute path
    :param key: equal for equal answers
    """
    named: dict[str, tuple[CachedFolder, tuple[str, ...]]] = {}
    for folder, names in tree.find_matching_entries(hidden, key):
        if names or folder.is_closed:
            named[folder.path] = (folder, names)
    if not named:
        return ()
    # One mount over a folder replaces the mounts of all files in it, and each mount makes the start slower.
    whole = _find_fully_matching_folders(tree, named)
    files: dict[str, list[str]] = {}
    folders: list[str] = []
    for path, (folder, names) in named.items():
        if is_within_any_folder(path, whole):
            continue
        if folder.is_closed:
            folders.append(path)
            continue
        inside = set(folder.folders)
        for name in names:
            there = folder.get_child_paths(name)[0]
            if name not in inside:
                files.setdefault(path, []).append(there)
            elif there in whole:
                folders.append(there)
    return (*folders, *(path for inner in files.values() for path in inner))


def fold_mounts_into_folders(
    trees: Sequence[FolderTree], pinned: tuple[str, ...], masked: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Replace paths by whole folders if there are too many for a sandbox to start quickly.

    A folder is hidden if anything in it is to be hidden, else it is read-only. Folders with few other files come first.
    The root of a tree is never replaced.

    :raises ToolError: ``unavailable`` if there are still too many
    """
    roots = tuple(tree.root for tree in trees)
    folding = _MountFolders(roots, pinned, masked)
    if folding.cost <= MAX_UNFOLDED_MOUNTS:
        return pinned, masked
    entries: dict[str, int] = {}
    for tree in trees:
        for folder in reversed(tree.order):  # the inner before the outer
            inner = sum(entries.get(folder.get_child_paths(name)[0], 0) for name in folder.folders)
            entries[folder.path] = inner + len(folder.files) + len(folder.links) + len(folder.folders)
    candidates = [
        (count / max(1, entries.get(path, 1)), path) for path, count in folding.count_paths_by_folder().items()
    ]
    # The folder with the highest share of protected entries loses the fewest other files. The path makes the order
    # repeatable.
    for _, path in sorted(candidates, key=lambda one: (-one[0], -one[1].count("/"), one[1])):
        if folding.cost <= MAX_UNFOLDED_MOUNTS:
            break
        folding.fold_into_folder(path)
    if folding.cost > MAX_MOUNTS:
        places = (*pinned, *masked)
        fullest = max(roots, key=lambda root: sum(path.startswith(root.rstrip("/") + "/") for path in places))
        raise ToolError(
            f"No program was started: a sandbox can have {MAX_MOUNTS:,} mounts, but {len(masked):,} paths in "
            f"{fullest} are hidden from programs and {len(pinned):,} are read-only for them. Move them into "
            "separate folders, or ask the user to allow reading what holds no secret: "
            f"{format_first_paths(roots, places)}.",
            kind="unavailable",
        )
    return folding.result()


def format_first_paths(roots: Sequence[str], paths: Sequence[str]) -> str:
    """Return the first few of ``paths``, relative to their roots, for a message."""
    names = [
        next((p[len(r.rstrip("/")) + 1 :] for r in roots if p.startswith(r.rstrip("/") + "/")), p) for p in paths[:3]
    ]
    return ", ".join(name.encode("unicode_escape", "surrogateescape").decode("ascii") for name in names) + (
        " …" if len(paths) > len(names) else ""
    )


class _MountFolders:
    """The mounts of a sandbox, with the folders on the way, which are mounts too."""

    def __init__(self, roots: tuple[str, ...], pinned: Iterable[str], masked: Iterable[str]) -> None:
        self._roots = roots
        self._kinds: dict[str, Literal["pinned", "masked"]] = {}
        self._ways: dict[str, int] = {}
        self._beneath: dict[str, list[str]] = {}
        kinds: tuple[tuple[Literal["pinned", "masked"], Iterable[str]], ...] = (("pinned", pinned), ("masked", masked))
        for kind, paths in kinds:
            for path in paths:
                if path not in self._kinds:
                    for way in find_folders_between(path, roots):
                        self._ways[way] = self._ways.get(way, 0) + 1
                        self._beneath.setdefault(way, []).append(path)
                self._kinds[path] = kind

    @property
    def cost(self) -> int:
        return len(self._kinds) + len(self._ways)

    def count_paths_by_folder(self) -> dict[str, int]:
        return {way: len(paths) for way, paths in self._beneath.items()}

    def fold_into_folder(self, folder: str) -> None:
        """Mount over this folder instead of the paths in it."""
        if is_within_any_folder(folder, self._kinds):
            return
        inner = [path for path in self._beneath[folder] if path in self._kinds]
        kinds = {self._kinds.pop(path) for path in inner}
        for path in inner:
            for way in find_folders_between(path, self._roots):
                self._ways[way] -= 1
                if not self._ways[way]:
                    del self._ways[way]
        if kinds:
            # The stricter kind wins: a hidden file must not become readable because it shares a folder with a read-only
            # one.
            self._kinds[folder] = "masked" if "masked" in kinds else "pinned"
            for way in find_folders_between(folder, self._roots):
                self._ways[way] = self._ways.get(way, 0) + 1
                self._beneath[way].append(folder)

    def result(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the pinned and the masked paths."""
        pinned = tuple(path for path, kind in self._kinds.items() if kind == "pinned")
        return pinned, tuple(path for path, kind in self._kinds.items() if kind == "masked")


def _find_fully_matching_folders(
    tree: FolderTree, named: dict[str, tuple[CachedFolder, tuple[str, ...]]]
) -> frozenset[str]:
    """Return the named folders in which everything is named."""
    whole: set[str] = set()
    known = {folder.path: folder for folder in tree.order}
    candidates = {
        folder.get_child_paths(name)[0] for folder, names in named.values() for name in names if name in folder.folders
    }
    for path in sorted(candidates, key=lambda one: one.count("/"), reverse=True):
        folder = known.get(path)
        # The contents are unknown, so the folder is hidden as a whole.
        if folder is None or folder.is_closed:
            whole.add(path)
            continue
        names = set(named.get(path, (folder, ()))[1])
        if (
            names.issuperset(folder.files)
            and not folder.links
            and all(folder.get_child_paths(name)[0] in whole for name in folder.folders)
        ):
            whole.add(path)
    return frozenset(whole)


def is_within_any_folder(path: str, folders: Container[str]) -> bool:
    """Return whether ``path`` is one of ``folders`` or lies in one."""
    if path in folders:
        return True
    while (path := path.rpartition("/")[0]) != "":
        if path in folders:
            return True
    return False


def is_mount_target_present(path: str, look: LookupCache) -> bool:
    """Return whether something is at a path that is to be mounted over.

    :raises ToolError: ``conflict`` if a part of the path has become a link since it was found
    """
    if look.identify(path) is None:
        return False
    if not look.is_canonical(path):
        raise ToolError(f"`{path}` became a link while the sandbox was prepared. Try again.", kind="conflict")
    return True
