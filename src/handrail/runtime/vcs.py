"""What a program with the capability ``vcs.config`` may leave behind: configuration with harmless keys, and samples.

Its configuration files are read before it starts and after it has ended. What differs in more than the allow-list of
:mod:`handrail.runtime.gitconfig` is put back as it was, and so is word of where a repository is (a ``.git`` file, a
``commondir``) that leads anywhere but to a repository in the same folder.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from handrail.contract.protected import plain
from handrail.runtime.gitconfig import MAX_CONFIG_BYTES, Unreadable, beyond_the_list, read
from handrail.runtime.kept import Kept, read_plain
from handrail.sandbox.tree import Protected, Tree, check_passing

_CONFIGS = frozenset(("config", "config.worktree"))
_POINTERS = frozenset((".git", "commondir"))
_MOST_CONFIGS = 1_000
_read_pointers: dict[str, tuple[tuple[object, ...], list[tuple[str, str]]]] = {}
"""By path of a configuration: what it was when it was read, and what it names."""


def snapshot(tree: Tree) -> dict[str, Kept]:
    """The configuration and the words of where repositories are, as they stand now."""
    found: dict[str, Kept] = {}
    for entry in tree.protected().values():
        if entry.why.kind == "vcs" and not entry.folder and not entry.link:
            kept = read_plain(tree.root, entry.path)
            if kept is not None:
                found[entry.path] = kept
    return found


def pointed_at(tree: Tree) -> tuple[str, ...]:
    """What the configurations of a tree's repositories make hooks and configuration, wherever it lies in the tree.

    A repository may keep its hooks in a folder of its own (``core.hooksPath``) and include a file of the work tree.
    Absolute paths, whether there is something or not.
    """
    return tuple(dict.fromkeys(path for folder in tree.repositories() for path in pointed_by(tree.root, folder)))


def pointed_by(root: str, folder: str) -> list[str]:
    """The same of one git directory, whether there is one or not; costs two looks where it names nothing."""
    top = root.rstrip("/") + "/"
    targets = (
        os.path.realpath(Path(base, value))
        for name in ("config", "config.worktree")
        for value, base in _pointers(f"{folder}/{name}", folder)
    )
    return [target for target in targets if target.startswith(top)]


def _pointers(path: str, folder: str) -> list[tuple[str, str]]:
    """``(path as written, the folder it is relative to)`` of what one configuration names."""
    try:
        status = os.lstat(path)
    except OSError:
        return []
    key = (path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if (known := _read_pointers.get(path)) is not None and known[0] == key:
        return known[1]
    found: list[tuple[str, str]] = []
    work_tree = folder.rpartition("/")[0] if plain(folder.rpartition("/")[2]) == ".git" else folder
    try:
        entries = read(_config_bytes(path)) if status.st_size <= MAX_CONFIG_BYTES else []
    except Unreadable:
        entries = []
    except OSError as error:
        check_passing(error, path)
        return []
    for entry in entries:
        if not entry.value or entry.value.startswith("~"):
            continue
        if entry.key == "core.hookspath":
            found.append((entry.value, work_tree))
        elif entry.key == "include.path" or (entry.key.startswith("includeif.") and entry.key.endswith(".path")):
            found.append((entry.value, folder))
    if len(_read_pointers) > _MOST_CONFIGS:
        _read_pointers.clear()
    _read_pointers[path] = key, found
    return found


def _config_bytes(path: str) -> bytes:
    """The content of a configuration, which may have become a FIFO since it was looked at: never wait for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        plain_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return os.pread(descriptor, MAX_CONFIG_BYTES + 1, 0) if plain_file else b""
    finally:
        os.close(descriptor)


def fault(tree: Tree, entry: Protected, before: Kept | None) -> str | None:
    """Why a protected entry that is there now may not stay as it is; None where it may.

    :param before: what was there; None where nothing was
    """
    name = plain(entry.path.rpartition("/")[2])
    if entry.why.kind == "hook" and entry.folder and name == "hooks":
        return _fault_in_hooks(tree, entry.path)
    if entry.why.kind != "vcs" or entry.folder or entry.link:
        return "it is new" if before is None else "it is no plain file of one name"
    folder = entry.path.rpartition("/")[0]
    repositories = set(tree.repositories())
    if name in _CONFIGS and folder in repositories:
        return _fault_in_config(tree, entry.path, folder, before)
    if name in _POINTERS and (name == ".git" or folder in repositories):
        return _fault_in_pointer(tree, entry.path, repositories)
    return "it is new" if before is None else None


def lost(tree: Tree, path: str, before: Kept) -> str | None:
    """Why a configuration that is gone has to be put back; None where nothing is the matter."""
    folder = path.rpartition("/")[0]
    if plain(path.rpartition("/")[2]) not in _CONFIGS or folder not in tree.repositories():
        return None  # what it was about is gone with it
    keys = _beyond(tree, folder, before.data, b"")
    return None if not keys else f"it is gone, and it had {', '.join(keys[:5])}"


def _fault_in_config(tree: Tree, path: str, folder: str, before: Kept | None) -> str | None:
    now = read_plain(tree.root, path)
    if now is None:
        return "it is no plain file of one name"
    if before is not None and now.data == before.data:
        return None
    try:
        keys = _beyond(tree, folder, b"" if before is None else before.data, now.data)
    except Unreadable as error:
        return f"git could not read it: {error}"
    return None if not keys else f"{', '.join(keys[:5])} may not be set by a tool"


def _beyond(tree: Tree, folder: str, before: bytes, after: bytes) -> list[str]:
    def inside(value: str) -> bool:
        target = os.path.realpath(Path(folder, value))
        return target.startswith(tree.root.rstrip("/") + "/") or target == tree.root

    try:
        had = read(before)
    except Unreadable:
        had = []  # git could not read it either, so nothing of it counted
    return beyond_the_list(had, read(after), inside)


def _fault_in_pointer(tree: Tree, path: str, repositories: Collection[str]) -> str | None:
    now = read_plain(tree.root, path)
    if now is None:
        return "it is no plain file of one name"
    text = now.data.decode("utf-8", "surrogateescape").strip()
    if plain(path.rpartition("/")[2]) == ".git":
        marker, _, text = text.partition(":")
        if marker != "gitdir":
            return "it does not say where its repository is"
        text = text.strip()
    if not text or "\n" in text or "\0" in text:
        return "it does not say where its repository is"
    target = os.path.realpath(Path(path.rpartition("/")[0], text))
    return None if target in repositories else "it leads to no repository in this folder"


def _fault_in_hooks(tree: Tree, path: str) -> str | None:
    """Samples are never run; anything else in it would be."""
    for folder in tree.order:
        if folder.path == path:
            others = [
                name for name in (*folder.files, *folder.folders, *folder.links) if not _is_sample(folder.files, name)
            ]
            return None if not others and not folder.closed else f"{', '.join(others[:5])} would be run by git"
    return None


def _is_sample(files: Collection[str], name: str) -> bool:
    return name in files and name.endswith(".sample")
