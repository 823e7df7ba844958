"""Changes to git configuration that a program with the capability ``vcs.config`` may leave behind.

The configuration files are read before the program starts and after it has ended. A file that differs in more than the
allow-list of :mod:`handrail.runtime.guard.gitconfig` is restored. So is a pointer to a repository (a ``.git`` file, a
``commondir``) that leads anywhere except to a repository in the same folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from handrail.contract.protected.protected import plain
from handrail.runtime.files.beneath import READ
from handrail.runtime.guard import gitconfig
from handrail.runtime.guard.gitconfig import Unreadable, beyond_the_list, read
from handrail.runtime.guard.quarantine import Kept, read_plain
from handrail.sandbox.view.protected import links_on_the_way
from handrail.sandbox.view.tree import Protected, Tree, check_passing

_CONFIGS = frozenset(("config", "config.worktree"))
_POINTERS = frozenset((".git", "commondir"))
_MOST_POINTED = 64
_LONGEST_POINTER = 8_192
_MOST_HOOKS = 1_000


class Pointed(NamedTuple):
    """The paths below a root that git's settings name. All are absolute.

    :param targets: what git runs or takes settings from, whether it exists or not
    :param links: the symbolic links on the way there; a changed link changes what git finds
    """

    targets: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


_pointed: dict[str, tuple[tuple[object, ...], Pointed]] = {}
"""By root: the last result of :func:`pointed_at`, and its key."""


def snapshot(tree: Tree) -> dict[str, Kept]:
    """Return the git configuration files and repository pointers, with their current content."""
    found: dict[str, Kept] = {}
    for entry in tree.protected().values():
        if entry.why.kind == "vcs" and not entry.folder and not entry.link:
            kept = read_plain(tree.root, entry.path)
            if kept is not None:
                found[entry.path] = kept
    return found


def pointed_at(tree: Tree) -> Pointed:
    """Return the paths in a tree that git runs or takes settings from because settings name them.

    The settings are those of the tree's repositories, of the user and of the machine. Hooks may lie in a folder of the
    repository (``core.hooksPath``), a file of the work tree may be included, and a command may be a script of the work
    tree.
    """
    places = [*((folder, None) for folder in tree.repositories()), *_above(tree.root)]
    person = gitconfig.of_person()
    key = (
        tree.version,
        person,
        tuple(gitconfig.of_file(path)[0] for folder, _ in places for path in _configs(folder)),
    )
    known = _pointed.get(tree.root)
    if known is not None and known[0] == key:
        return known[1]
    links: dict[str, None] = {}
    found: dict[str, None] = {}
    for folder, work_tree in places:
        found.update(dict.fromkeys(_pointed_by(tree.root, folder, person, work_tree, links)))
    found.update(dict.fromkeys(_resolved(tree.root, person, tree.root, links)))
    if len(_pointed) >= _MOST_POINTED:
        _pointed.clear()
    pointed = Pointed(tuple(found), tuple(links))
    _pointed[tree.root] = key, pointed
    return pointed


def pointed_around(root: str, path: str) -> Iterator[str]:
    """Yield such paths for one path below ``root``: those of the repositories around it.

    The paths that were found at the last start of a program are included.
    """
    if root in _pointed:
        yield from _pointed[root][1].targets
    person = gitconfig.of_person()
    yield from _resolved(root, person, root, {})
    folder = path.rpartition("/")[0]
    while folder:
        if (place := _git_directory(folder)) is not None:
            yield from _pointed_by(root, place, person, folder, {})
        folder = folder.rpartition("/")[0]


def _above(root: str) -> list[tuple[str, str]]:
    """Return the git directories and work trees that a root lies in."""
    found: list[tuple[str, str]] = []
    while root := root.rpartition("/")[0]:
        if (place := _git_directory(root)) is not None:
            found.append((place, root))
    return found


def _git_directory(work_tree: str) -> str | None:
    """Return the git directory of a work tree; None if it has none."""
    place = f"{work_tree}/.git"
    try:
        mode = Path(place).stat().st_mode
    except OSError:
        return None
    if stat.S_ISDIR(mode):
        return place
    text = _short_text(place)
    if not text.startswith("gitdir:"):
        return None
    return os.path.realpath(Path(work_tree, text.removeprefix("gitdir:").strip()))


def _short_text(path: str) -> str:
    """Return the only line of a file; empty if it is not a short regular file."""
    try:
        descriptor = os.open(path, READ)
    except OSError as error:
        check_passing(error, path)
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return os.pread(descriptor, _LONGEST_POINTER, 0).decode("utf-8", "surrogateescape").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _configs(folder: str) -> tuple[str, ...]:
    """Return the paths of the files with a git directory's settings."""
    found = (f"{folder}/config", f"{folder}/config.worktree")
    common = _short_text(f"{folder}/commondir") if os.path.lexists(f"{folder}/commondir") else ""
    return found if not common else (*found, f"{os.path.realpath(Path(folder, common))}/config")


def _pointed_by(
    root: str, folder: str, person: Iterable[gitconfig.Named], work_tree: str | None, links: dict[str, None]
) -> Iterator[str]:
    """Yield the paths below a root that the settings of a git directory and its user name.

    :param work_tree: a work tree that is known to belong to the git directory
    :param links: receives the links on the way
    """
    named: dict[gitconfig.Named, None] = dict.fromkeys(person)
    trees = [folder.rpartition("/")[0] if plain(folder.rpartition("/")[2]) == ".git" else folder]
    for path in _configs(folder):
        found, entries = gitconfig.of_file(path)
        named.update(dict.fromkeys(found))
        trees += [str(Path(folder, entry.value)) for entry in entries if entry.key == "core.worktree" and entry.value]
    if linked := _short_text(f"{folder}/gitdir") if os.path.lexists(f"{folder}/gitdir") else "":
        trees.append(str(Path(folder, linked).parent))
    if work_tree is not None:
        trees.append(work_tree)
    for tree in dict.fromkeys(trees):
        for target in _resolved(root, named, tree, links):
            yield target
            yield from _linked_from(root, target, links)
    for path in dict.fromkeys(path.rpartition("/")[0] for path in _configs(folder)):
        yield from _linked_from(root, f"{path}/hooks", links)


def _linked_from(root: str, hooks: str, links: dict[str, None]) -> Iterator[str]:
    """Yield the targets of links in a hooks folder that lie below a root; git runs the target."""
    top = root.rstrip("/") + "/"
    try:
        with os.scandir(hooks) as entries:
            found = [entry.path for entry in islice(entries, _MOST_HOOKS) if entry.is_symlink()]
    except OSError as error:
        check_passing(error, hooks)
        return
    for link in found:
        target = os.path.realpath(link)
        links.update(dict.fromkeys(links_on_the_way(root, link)))
        if target.startswith(top):
            yield target


def _resolved(root: str, named: Iterable[gitconfig.Named], work_tree: str, links: dict[str, None]) -> Iterator[str]:
    top = root.rstrip("/") + "/"
    for value, base, of_command in named:
        path = Path(work_tree if base is None else base, value)
        target = os.path.realpath(path)
        if of_command and Path(target).is_dir():
            continue
        links.update(dict.fromkeys(links_on_the_way(root, str(path))))
        if target.startswith(top):
            yield target


def steps_that_run(tree: Tree) -> dict[str, tuple[bytes, ...]]:
    """Return the steps of unfinished rebases and sequences that run a command, by file.

    Git runs these commands when the user continues the operation.
    """
    found: dict[str, tuple[bytes, ...]] = {}
    for folder in tree.repositories():
        for name in _STEPS:
            path = f"{folder}/{name}"
            if os.path.lexists(path):
                kept = read_plain(tree.root, path)
                lines = () if kept is None else map(bytes.strip, kept.data.splitlines())
                found[path] = (_NO_FILE,) if kept is None else tuple(filter(_runs, lines))
    return found


def without_steps(tree: Tree, path: str, known: Collection[bytes]) -> Kept | None:
    """Return the file without unknown steps that run a command; None if it is not a regular file."""
    kept = read_plain(tree.root, path)
    if kept is None:
        return None
    lines = [line for line in kept.data.splitlines(keepends=True) if not _runs(line) or line.strip() in known]
    return replace(kept, data=b"".join(lines))


_STEPS = ("rebase-merge/git-rebase-todo", "rebase-merge/git-rebase-todo.backup", "sequencer/todo")
_NO_FILE = b"a file that is not a regular file with one name"
_RUNS_NOTHING = frozenset(
    (
        *(
            b"pick",
            b"p",
            b"reword",
            b"r",
            b"edit",
            b"e",
            b"squash",
            b"s",
            b"fixup",
            b"f",
            b"break",
            b"b",
            b"drop",
            b"d",
        ),
        *(b"label", b"l", b"reset", b"t", b"merge", b"m", b"update-ref", b"u", b"noop", b"revert"),
    )
)
"""Steps of git itself, see git-rebase(1). Any other step counts as one that runs a command."""


def _runs(line: bytes) -> bool:
    words = line.split(None, 1)
    return bool(words) and not words[0].startswith(b"#") and words[0] not in _RUNS_NOTHING


def fault(tree: Tree, entry: Protected, before: Kept | None) -> str | None:
    """Return why a protected entry may not stay as it is; None if it may.

    :param before: the earlier content; None if the entry is new
    """
    name = plain(entry.path.rpartition("/")[2])
    if entry.why.kind == "hook" and entry.folder and name == "hooks":
        return _fault_in_hooks(tree, entry.path)
    if entry.why.kind != "vcs" or entry.folder or entry.link:
        return "it is new" if before is None else "it is not a regular file with one name"
    folder = entry.path.rpartition("/")[0]
    repositories = set(tree.repositories())
    if name in _CONFIGS and folder in repositories:
        return _fault_in_config(tree, entry.path, folder, before)
    if name in _POINTERS and (name == ".git" or folder in repositories):
        return _fault_in_pointer(tree, entry.path, repositories)
    return "it is new" if before is None else None


def lost(tree: Tree, path: str, before: Kept) -> str | None:
    """Return why a missing configuration must be restored; None if it need not be."""
    folder = path.rpartition("/")[0]
    if plain(path.rpartition("/")[2]) not in _CONFIGS or folder not in tree.repositories():
        return None  # its repository is missing too
    keys = _beyond(tree, folder, before.data, b"")
    return None if not keys else f"it is gone, and it had {', '.join(keys[:5])}"


def _fault_in_config(tree: Tree, path: str, folder: str, before: Kept | None) -> str | None:
    now = read_plain(tree.root, path)
    if now is None:
        return "it is not a regular file with one name"
    if before is not None and now.data == before.data:
        return None
    try:
        keys = _beyond(tree, folder, b"" if before is None else before.data, now.data)
    except Unreadable as error:
        return f"git cannot read it: {error}"
    return None if not keys else f"{', '.join(keys[:5])} may not be set by a tool"


def _beyond(tree: Tree, folder: str, before: bytes, after: bytes) -> list[str]:
    def inside(value: str) -> bool:
        target = os.path.realpath(Path(folder, value))
        return target.startswith(tree.root.rstrip("/") + "/") or target == tree.root

    try:
        had = read(before)
    except Unreadable:
        had = []  # git could not read it either, so none of its entries applied
    return beyond_the_list(had, read(after), inside)


def _fault_in_pointer(tree: Tree, path: str, repositories: Collection[str]) -> str | None:
    now = read_plain(tree.root, path)
    if now is None:
        return "it is not a regular file with one name"
    text = now.data.decode("utf-8", "surrogateescape").strip()
    if plain(path.rpartition("/")[2]) == ".git":
        marker, _, text = text.partition(":")
        if marker != "gitdir":
            return "it does not name a repository"
        text = text.strip()
    if not text or "\n" in text or "\0" in text:
        return "it does not name a repository"
    target = os.path.realpath(Path(path.rpartition("/")[0], text))
    return None if target in repositories else "it does not lead to a repository in this folder"


def _fault_in_hooks(tree: Tree, path: str) -> str | None:
    """Return why a hooks folder may not stay; git never runs samples, but everything else in it."""
    for folder in tree.order:
        if folder.path == path:
            others = [
                name for name in (*folder.files, *folder.folders, *folder.links) if not _is_sample(folder.files, name)
            ]
            return None if not others and not folder.closed else f"{', '.join(others[:5])} would be run by git"
    return None


def _is_sample(files: Collection[str], name: str) -> bool:
    return name in files and name.endswith(".sample")
