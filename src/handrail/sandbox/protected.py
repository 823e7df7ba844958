"""Which paths of a workspace a sandbox mounts over: what is protected stays as it is, what is hidden is not seen.

A path that is only bound read-only can be walked around: rename the folder that it lies in, make another of that
name, and write there. So every folder on the way from the writable root to such a path is a mount too, which cannot
be renamed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Hashable, Iterable

from handrail.contract.errors import ToolError
from handrail.contract.protected import WORKSPACE_FILE
from handrail.contract.sandbox import Denials, Profile
from handrail.sandbox.looks import Looks, What
from handrail.sandbox.tree import Folder, Protected, Tree

MOST_MOUNTS = 400
"""Paths mounted over in one sandbox. Each mount takes longer than the one before: 400 take half a second."""
_FOLD_FROM = 6
"""So many hidden files in one folder, and the folder is hidden instead, where there are too many in all."""


def standing(profile: Profile, look: Looks) -> tuple[tuple[str, What], ...]:
    """Everything that a sandbox of this profile mounts over, as it stands now, with what each path is.

    A sandbox that was made earlier does what this profile says only if this is the same for it: where a file was
    replaced since, the mount went with the file that it was on.
    """
    paths = {*profile.pinned, *profile.masked}
    for place in (profile.workspace, *profile.writable):
        paths.add(place)
        paths.add(f"{place.rstrip('/')}/{WORKSPACE_FILE}")
    for path in (*profile.pinned, *profile.masked):
        paths.update(on_the_way(path, (profile.workspace, *profile.writable)))
    return tuple((path, what) for path in sorted(paths) if (what := look.at(path)) is not None)


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

    A link cannot be mounted over; what it leads to inside the tree can. Of a repository that one leads to, the parts
    that are protected are found as such.
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
    return tuple(found)


def fixed(tree: Tree, named: Callable[[str], bool], key: Hashable) -> tuple[str, ...]:
    """The outermost paths of a tree that ``named`` says yes to, to be bound read-only.

    A folder in which something is not named is bound by what is named in it.

    :raises ToolError: ``unavailable`` where there are too many to be mounted over
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
    if len(outermost) > MOST_MOUNTS:
        raise ToolError(
            f"the rules keep {len(outermost)} places of the workspace from being written, and a sandbox can keep "
            f"{MOST_MOUNTS}; a rule that names their folder keeps them all at once",
            kind="unavailable",
        )
    return tuple(outermost)


def masks(tree: Tree, hidden: Callable[[str], bool], key: Hashable) -> tuple[str, ...]:
    """The paths of a tree that ``hidden`` names, and the folders that nobody could look into.

    A folder is hidden whole where it is named itself and so is everything in it.

    :param hidden: takes an absolute path
    :param key: the same for the same answers
    :raises ToolError: ``unavailable`` where there are too many to be mounted over
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
    if sum(map(len, files.values())) + len(folders) > MOST_MOUNTS:
        for path in [path for path, inner in files.items() if len(inner) >= _FOLD_FROM and path != tree.root]:
            del files[path]
            folders = [other for other in folders if not other.startswith(path + "/")]
            folders.append(path)
            for other in [other for other in files if other.startswith(path + "/")]:
                del files[other]
    found = (*folders, *(path for inner in files.values() for path in inner))
    if len(found) > MOST_MOUNTS:
        raise ToolError(
            f"the rules hide {len(found)} places of the workspace from programs, and a sandbox can hide {MOST_MOUNTS}; "
            "a rule that names their folder hides them all at once, and one that allows reading them hides none",
            kind="unavailable",
        )
    return tuple(found)


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
        raise ToolError(f"{path} was changed into a link while the sandbox was prepared; try again", kind="conflict")
    return True
