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
from handrail.contract.protected.protected import WORKSPACE_FILE, Protection, protection
from handrail.contract.sandbox import Denials, Profile
from handrail.sandbox.view.identity import Looks, What
from handrail.sandbox.view.tree import Folder, Protected, Tree

EASY_MOUNTS = 400
"""Mounts of one sandbox, the folders on the way included, that are made without folding. bubblewrap takes longer for each bind
than for the one before: measured, 100 take 0.1 s, 400 take 0.6 s, 1,000 take 2.4 s and 2,000 take 15 s."""
_MOST_LINKS = 40
"""The kernel follows no more on the way to one file."""
MOST_MOUNTS = 1_000
"""More are refused. bubblewrap takes 9,000 words."""


def standing(profile: Profile, look: Looks) -> tuple[tuple[str, What, int], ...]:
    """Everything that a sandbox of this profile mounts over, as it stands now, with what each path is.

    A sandbox that was made earlier does what this profile says only if this is the same for it: where a file was
    replaced since, the mount went with the file that it was on. A file's number alone does not tell that: the next file
    but one often gets it again. A rename changes the time, too.
    """
    paths = {*profile.pinned, *profile.masked}
    for place in (profile.workspace, *profile.writable):
        paths.add(place)
        paths.add(f"{place.rstrip('/')}/{WORKSPACE_FILE}")
    for path in (*profile.pinned, *profile.masked):
        paths.update(on_the_way(path, (profile.workspace, *profile.writable)))
    return tuple(
        (path, what, 0 if stat.S_ISDIR(what.mode) else look(_changed_at, path))
        for path in sorted(paths)
        if (what := look.at(path)) is not None
    )


def _changed_at(path: str) -> int:
    try:
        return os.lstat(path).st_ctime_ns
    except OSError:
        return -1


def on_the_way(path: str, roots: Iterable[str]) -> list[str]:
    """The folders between the innermost of ``roots`` that holds ``path`` and ``path`` itself, both left out."""
    inner = max((root for root in roots if path.startswith(root.rstrip("/") + "/")), key=len, default=None)
    if inner is None:
        return []
    top = inner.rstrip("/")
    names = path[len(top) + 1 :].split("/")[:-1]
    return [f"{top}/{'/'.join(names[: count + 1])}" for count in range(len(names))]


def is_open(entry: Protected, denials: Denials | None) -> bool:
    """Whether programs may write a protected entry: tools load it as code, or a rule names it."""
    return entry.why.asks and (not entry.why.held or (denials is not None and denials.opens(entry.path)))


def pins(tree: Tree, denials: Denials | None = None) -> tuple[str, ...]:
    """Return the protected paths of a tree that are there and that programs may not write, to be bound read-only.

    A link cannot be mounted over; what it leads to inside the tree can, and so can a file that a link in a protected
    folder leads to. Of a repository that one leads to, the parts that are protected are found as such.
    """
    found: dict[str, None] = {}
    repositories = set(tree.repositories())
    for entry in tree.protected().values():
        path = entry.path
        if is_open(entry, denials) or beneath_any(path.rpartition("/")[0], found):
            continue
        if entry.link:
            path = os.path.realpath(path)
            if not path.startswith(tree.root.rstrip("/") + "/") or path in repositories or not os.path.lexists(path):
                continue
        found[path] = None
    for link in _inner_links(tree):
        path = os.path.realpath(link)
        if path.startswith(tree.root.rstrip("/") + "/") and Path(path).is_file() and not beneath_any(path, found):
            found[path] = None
    return tuple(found)


def held_links(tree: Tree, entries: Iterable[Protected], denials: Denials | None = None) -> dict[str, Protection]:
    """Return the links of a tree that programs may not change, by their names or in a protected folder, and why.

    :param entries: the protected ones of the tree
    """
    found = {entry.path: entry.why for entry in entries if entry.link and not is_open(entry, denials)}
    for path in _inner_links(tree):
        if (why := protection(path[len(tree.root.rstrip("/")) + 1 :])) is not None:
            found[path] = why
    return found


def _inner_links(tree: Tree) -> Iterator[str]:
    """Yield the links in folders that are protected with all that is in them."""
    for folder in tree.order:
        if folder.within:
            yield from (folder.child(name)[0] for name in folder.links)


def links_on_the_way(root: str, path: str) -> tuple[str, ...]:
    """Return the symbolic links beneath a root by which ``path`` leads on, each by a path without links."""
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
        if followed > _MOST_LINKS:
            break
        if here.startswith(top):
            found[here] = None
        if target.startswith("/"):
            done = ""
        names += target.split("/")[::-1]
    return tuple(found)


_READ_UNASKED = frozenset((".git", ".gitignore", ".gitattributes", ".gitmodules", ".mailmap", ".ignore", ".rgignore"))


def waiting(tree: Tree, *, every: bool) -> tuple[str, ...]:
    """The FIFOs that git or ripgrep would open and then wait on: all in git directories, and those that have the name of a
    file that such a program reads unasked. They are to be hidden, so that opening one fails at once.

    Of a link that leads to one, it is the target, wherever that lies.

    :param every: all that are in the tree; for git itself, which configuration can have read any file
    """
    found: dict[str, None] = {}
    repositories = frozenset(tree.repositories())
    for folder in tree.order:
        if not folder.pipes and not folder.links:
            continue
        of_git = beneath_any(folder.path, repositories)
        for name in folder.pipes:
            if every or of_git or name in _READ_UNASKED:
                found[folder.child(name)[0]] = None
        for name in folder.links:
            if of_git or name in _READ_UNASKED:
                target = os.path.realpath(folder.child(name)[0])
                if is_pipe(target):
                    found[target] = None
    return tuple(found)


def is_pipe(path: str) -> bool:
    """Whether a FIFO is at the path itself."""
    try:
        return stat.S_ISFIFO(os.lstat(path).st_mode)
    except OSError:
        return False


def second_names(trees: Sequence[Tree], pinned: Collection[str]) -> tuple[str, ...]:
    """The paths by which files that are pinned, or lie in a folder that is, could be written all the same (hard links)."""
    if not any(tree.linked() for tree in trees):
        return ()
    places = frozenset(pinned)
    names: dict[tuple[int, int], list[str]] = {}
    for tree in trees:
        for file, (paths, _) in tree.linked().items():
            names.setdefault(file, []).extend(paths)
    found: dict[str, None] = {}
    for paths in names.values():
        free = [path for path in paths if not beneath_any(path, places)]
        if len(free) < len(paths):
            found.update(dict.fromkeys(free))
    return tuple(found)


def fixed(tree: Tree, named: Callable[[str], bool], key: Hashable) -> tuple[str, ...]:
    """The outermost paths of a tree that ``named`` says yes to, to be bound read-only.

    A folder in which something is not named is bound by what is named in it.
    """
    judged = [(folder, frozenset(names)) for folder, names in tree.judged(named, key)]
    mixed: set[str] = set()
    for folder, names in reversed(judged):  # the inner before the outer
        children = (folder.child(name)[0] for name in folder.folders)
        if len(names) < len(folder.files) + len(folder.folders) or any(child in mixed for child in children):
            mixed.add(folder.path)
    if named(tree.root) and tree.root not in mixed:
        return (tree.root,)
    outermost: dict[str, None] = {}
    for folder, names in judged:
        if not names or beneath_any(folder.path, outermost):
            continue
        for name in sorted(names):
            path = folder.child(name)[0]
            if path not in mixed:
                outermost[path] = None
    return tuple(outermost)


def masks(tree: Tree, hidden: Callable[[str], bool], key: Hashable) -> tuple[str, ...]:
    """The paths of a tree that ``hidden`` names, and the folders that nobody could look into.

    A folder is hidden whole where it is named itself and so is everything in it.

    :param hidden: takes an absolute path
    :param key: the same for the same answers
    """
    named: dict[str, tuple[Folder, tuple[str, ...]]] = {}
    for folder, names in tree.judged(hidden, key):
        if names or folder.closed:
            named[folder.path] = (folder, names)
    if not named:
        return ()
    whole = _whole(tree, named)
    files: dict[str, list[str]] = {}
    folders: list[str] = []
    for path, (folder, names) in named.items():
        if beneath_any(path, whole):
            continue
        if folder.closed:
            folders.append(path)
            continue
        inside = set(folder.folders)
        for name in names:
            there = folder.child(name)[0]
            if name not in inside:
                files.setdefault(path, []).append(there)
            elif there in whole:
                folders.append(there)
    return (*folders, *(path for inner in files.values() for path in inner))


def fit(
    trees: Sequence[Tree], pinned: tuple[str, ...], masked: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What to mount over instead, where ``pinned`` and ``masked`` are more than a sandbox is quickly made with.

    Folders are then taken whole: hidden where anything in them is to be hidden, else read-only. Those come first in which the
    least else is. The root of a tree is never taken.

    :raises ToolError: ``unavailable`` where there are still too many
    """
    roots = tuple(tree.root for tree in trees)
    folding = _Folding(roots, pinned, masked)
    if folding.cost <= EASY_MOUNTS:
        return pinned, masked
    entries: dict[str, int] = {}
    for tree in trees:
        for folder in reversed(tree.order):  # the inner before the outer
            inner = sum(entries.get(folder.child(name)[0], 0) for name in folder.folders)
            entries[folder.path] = inner + len(folder.files) + len(folder.links) + len(folder.folders)
    candidates = [(count / max(1, entries.get(path, 1)), path) for path, count in folding.beneath_of().items()]
    for _, path in sorted(candidates, key=lambda one: (-one[0], -one[1].count("/"), one[1])):
        if folding.cost <= EASY_MOUNTS:
            break
        folding.take(path)
    if folding.cost > MOST_MOUNTS:
        places = (*pinned, *masked)
        fullest = max(roots, key=lambda root: sum(path.startswith(root.rstrip("/") + "/") for path in places))
        raise ToolError(
            f"No program was started: a sandbox can have {MOST_MOUNTS:,} mounts, but {len(masked):,} paths in "
            f"{fullest} are hidden from programs and {len(pinned):,} are read-only for them. Move them into "
            "separate folders, or ask the user to allow reading what holds no secret: "
            f"{shown_of(roots, places)}.",
            kind="unavailable",
        )
    return folding.result()


def shown_of(roots: Sequence[str], paths: Sequence[str]) -> str:
    """The first few of ``paths``, relative to their roots."""
    names = [
        next((p[len(r.rstrip("/")) + 1 :] for r in roots if p.startswith(r.rstrip("/") + "/")), p) for p in paths[:3]
    ]
    return ", ".join(name.encode("unicode_escape", "surrogateescape").decode("ascii") for name in names) + (
        " …" if len(paths) > len(names) else ""
    )


class _Folding:
    """Mounts, and the folders on the way to them, which are mounts too."""

    def __init__(self, roots: tuple[str, ...], pinned: Iterable[str], masked: Iterable[str]) -> None:
        self._roots = roots
        self._kinds: dict[str, Literal["pinned", "masked"]] = {}
        self._ways: dict[str, int] = {}
        self._beneath: dict[str, list[str]] = {}
        kinds: tuple[tuple[Literal["pinned", "masked"], Iterable[str]], ...] = (("pinned", pinned), ("masked", masked))
        for kind, paths in kinds:
            for path in paths:
                if path not in self._kinds:
                    for way in on_the_way(path, roots):
                        self._ways[way] = self._ways.get(way, 0) + 1
                        self._beneath.setdefault(way, []).append(path)
                self._kinds[path] = kind

    @property
    def cost(self) -> int:
        return len(self._kinds) + len(self._ways)

    def beneath_of(self) -> dict[str, int]:
        return {way: len(paths) for way, paths in self._beneath.items()}

    def take(self, folder: str) -> None:
        """Mount over this folder instead of what lies in it."""
        if beneath_any(folder, self._kinds):
            return
        inner = [path for path in self._beneath[folder] if path in self._kinds]
        kinds = {self._kinds.pop(path) for path in inner}
        for path in inner:
            for way in on_the_way(path, self._roots):
                self._ways[way] -= 1
                if not self._ways[way]:
                    del self._ways[way]
        if kinds:
            self._kinds[folder] = "masked" if "masked" in kinds else "pinned"
            for way in on_the_way(folder, self._roots):
                self._ways[way] = self._ways.get(way, 0) + 1
                self._beneath[way].append(folder)

    def result(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What is pinned, and what is masked."""
        pinned = tuple(path for path, kind in self._kinds.items() if kind == "pinned")
        return pinned, tuple(path for path, kind in self._kinds.items() if kind == "masked")


def _whole(tree: Tree, named: dict[str, tuple[Folder, tuple[str, ...]]]) -> frozenset[str]:
    """The folders that are named, with all that is in them: the inner ones first."""
    whole: set[str] = set()
    known = {folder.path: folder for folder in tree.order}
    candidates = {folder.child(name)[0] for folder, names in named.values() for name in names if name in folder.folders}
    for path in sorted(candidates, key=lambda one: one.count("/"), reverse=True):
        folder = known.get(path)
        if folder is None or folder.closed:
            whole.add(path)
            continue
        names = set(named.get(path, (folder, ()))[1])
        if (
            names.issuperset(folder.files)
            and not folder.links
            and all(folder.child(name)[0] in whole for name in folder.folders)
        ):
            whole.add(path)
    return frozenset(whole)


def beneath_any(path: str, folders: Container[str]) -> bool:
    """Whether ``path`` is one of ``folders``, or in one."""
    if path in folders:
        return True
    while (path := path.rpartition("/")[0]) != "":
        if path in folders:
            return True
    return False


def check_real(path: str, look: Looks) -> bool:
    """Whether anything is at a path that is to be mounted over.

    :raises ToolError: ``conflict`` where the way to it has become a link since it was found
    """
    if look.at(path) is None:
        return False
    if not look.by_no_link(path):
        raise ToolError(f"`{path}` became a link while the sandbox was prepared. Try again.", kind="conflict")
    return True
