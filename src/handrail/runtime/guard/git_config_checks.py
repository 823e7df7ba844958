"""Changes to git configuration that a program with the capability ``vcs.config`` may leave behind.

The configuration files are read before the program starts and after it has ended. A file that differs in more than the
allow-list of :mod:`handrail.runtime.guard.git_config_reader` is restored. So is a pointer to a repository (a ``.git`` file, a
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

from handrail.contract.protected.path_protection import normalise_file_name
from handrail.runtime.files.secure_open import READ_FLAGS, is_git_directory
from handrail.runtime.guard import git_config_reader
from handrail.runtime.guard.git_config_reader import UnreadableGitConfigError, find_changed_unsafe_keys, parse_config
from handrail.runtime.guard.quarantine import FileSnapshot, snapshot_single_link_file
from handrail.sandbox.view.cached_folder_tree import FolderTree, ProtectedEntry, raise_if_resource_shortage
from handrail.sandbox.view.protected_mounts import find_links_on_path

_CONFIGS = frozenset(("config", "config.worktree"))
_POINTERS = frozenset((".git", "commondir"))
_MAX_CACHED_ROOTS = 64
_LONGEST_POINTER = 8_192
_MOST_HOOKS = 1_000


class GitNamedPaths(NamedTuple):
    """The paths below a root that git's settings name. All are absolute.

    :param targets: what git runs or takes settings from, whether it exists or not
    :param links: the symbolic links on the way there; a changed link changes what git finds
    """

    targets: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


_GIT_TARGETS: dict[str, tuple[tuple[object, ...], GitNamedPaths]] = {}
"""By root: the last result of :func:`find_paths_named_by_git`, and its key."""


def snapshot_configs(tree: FolderTree) -> dict[str, FileSnapshot]:
    """Return the git configuration files and repository pointers, with their current content."""
    found: dict[str, FileSnapshot] = {}
    for entry in tree.get_protected_entries().values():
        if entry.why.kind == "vcs" and not entry.folder and not entry.link:
            kept = snapshot_single_link_file(tree.root, entry.path)
            if kept is not None:
                found[entry.path] = kept
    return found


def find_paths_named_by_git(tree: FolderTree) -> GitNamedPaths:
    """Return the paths in a tree that git runs or takes settings from because settings name them.

    The settings are those of the tree's repositories, of the user and of the machine. Hooks may lie in a folder of the
    repository (``core.hooksPath``), a file of the work tree may be included, and a command may be a script of the work
    tree.
    """
    places = [*((folder, None) for folder in tree.list_git_directories()), *_find_outer_repositories(tree.root)]
    person = git_config_reader.read_user_and_system_git_paths()
    key = (
        tree.version,
        person,
        tuple(
            git_config_reader.read_paths_named_in_file(path)[0]
            for folder, _ in places
            for path in _config_paths(folder)
        ),
    )
    if (known := _GIT_TARGETS.get(tree.root)) is not None and known[0] == key:
        return known[1]
    links: dict[str, None] = {}
    found: dict[str, None] = {}
    for folder, work_tree in places:
        found.update(dict.fromkeys(_find_paths_named_by_config(tree.root, folder, person, work_tree, links)))
    found.update(dict.fromkeys(_resolve_named(tree.root, person, tree.root, links)))
    if len(_GIT_TARGETS) >= _MAX_CACHED_ROOTS:
        _GIT_TARGETS.clear()
    pointed = GitNamedPaths(tuple(found), tuple(links))
    _GIT_TARGETS[tree.root] = key, pointed
    return pointed


def find_paths_git_names_near(root: str, path: str) -> Iterator[str]:
    """Yield such paths for one path below ``root``: those of the repositories around it.

    The paths that were found at the last start of a program are included.
    """
    if root in _GIT_TARGETS:
        yield from _GIT_TARGETS[root][1].targets
    person = git_config_reader.read_user_and_system_git_paths()
    yield from _resolve_named(root, person, root, {})
    folder = path.rpartition("/")[0]
    while folder:
        if (place := _find_git_directory(folder)) is not None:
            yield from _find_paths_named_by_config(root, place, person, folder, {})
        folder = folder.rpartition("/")[0]


def _find_outer_repositories(root: str) -> list[tuple[str, str]]:
    """Return the git directories and work trees that a root lies in."""
    found: list[tuple[str, str]] = []
    while root := root.rpartition("/")[0]:
        if (place := _find_git_directory(root)) is not None:
            found.append((place, root))
    return found


def _find_git_directory(work_tree: str) -> str | None:
    """Return the git directory of a work tree; None if it has none."""
    place = f"{work_tree}/.git"
    try:
        mode = Path(place).stat().st_mode
    except OSError:
        return None
    if stat.S_ISDIR(mode):
        return place
    text = _read_single_line_file(place)
    if not text.startswith("gitdir:"):
        return None
    return os.path.realpath(Path(work_tree, text.removeprefix("gitdir:").strip()))


class RepositoryLocation(NamedTuple):
    """The folders of the repository that git finds from a folder, as the files outside of any sandbox say.

    :param work_tree: the folder with the ``.git``
    :param common: the git directory, which all linked work trees share
    :param objects: the further folders with its objects
    :param is_valid: whether the git directory exists, and belongs to this work tree
    """

    work_tree: str
    common: str
    objects: tuple[str, ...]
    is_valid: bool


def find_enclosing_repository(folder: str) -> RepositoryLocation | None:
    """Return the repository that git would find from a folder if it saw all files; None without one."""
    while folder:
        if (place := _find_git_directory(folder)) is not None:
            break
        folder = folder.rpartition("/")[0]
    else:
        return None
    if Path(place).is_symlink():  # as some programs that manage many repositories make it
        place = os.path.realpath(place)
    common, _, name = place.rpartition("/worktrees/")
    is_linked = bool(common) and "/" not in name
    if not is_linked:
        common = place
    return RepositoryLocation(folder, common, _list_borrowed_objects(common), _belongs_to(place, folder, is_linked))


def _belongs_to(directory: str, work_tree: str, is_linked: bool) -> bool:
    """Return whether a folder is a git directory that does not name another work tree."""
    if not is_git_directory(directory):
        return False
    if is_linked:
        return os.path.realpath(_read_single_line_file(f"{directory}/gitdir")) == os.path.realpath(f"{work_tree}/.git")
    entries = git_config_reader.read_paths_named_in_file(f"{directory}/config")[1]
    named = [entry.value for entry in entries if entry.key == "core.worktree" and entry.value]
    return not named or os.path.realpath(Path(directory, named[-1])) == work_tree


def _list_borrowed_objects(common: str) -> tuple[str, ...]:
    """Return the folders of objects that a repository takes from others (gitrepository-layout(5), alternates)."""
    lines = _read_single_line_file(f"{common}/objects/info/alternates").splitlines()
    paths = (os.path.realpath(Path(f"{common}/objects", line)) for line in lines if line and "\0" not in line)
    return tuple(path for path in paths if path.endswith("/objects") and Path(path).is_dir())


def _read_single_line_file(path: str) -> str:
    """Return the only line of a file; empty if it is not a short regular file."""
    try:
        descriptor = os.open(path, READ_FLAGS)
    except OSError as error:
        raise_if_resource_shortage(error, path)
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return os.pread(descriptor, _LONGEST_POINTER, 0).decode("utf-8", "surrogateescape").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _config_paths(folder: str) -> tuple[str, ...]:
    """Return the paths of the files with a git directory's settings."""
    found = (f"{folder}/config", f"{folder}/config.worktree")
    common = _read_single_line_file(f"{folder}/commondir") if os.path.lexists(f"{folder}/commondir") else ""
    return found if not common else (*found, f"{os.path.realpath(Path(folder, common))}/config")


def _find_paths_named_by_config(
    root: str,
    folder: str,
    person: Iterable[git_config_reader.GitNamedPath],
    work_tree: str | None,
    links: dict[str, None],
) -> Iterator[str]:
    """Yield the paths below a root that the settings of a git directory and its user name.

    :param work_tree: a work tree that is known to belong to the git directory
    :param links: receives the links on the way
    """
    named: dict[git_config_reader.GitNamedPath, None] = dict.fromkeys(person)
    trees = [folder.rpartition("/")[0] if normalise_file_name(folder.rpartition("/")[2]) == ".git" else folder]
    for path in _config_paths(folder):
        found, entries = git_config_reader.read_paths_named_in_file(path)
        named.update(dict.fromkeys(found))
        trees += [str(Path(folder, entry.value)) for entry in entries if entry.key == "core.worktree" and entry.value]
    if linked := _read_single_line_file(f"{folder}/gitdir") if os.path.lexists(f"{folder}/gitdir") else "":
        trees.append(str(Path(folder, linked).parent))
    if work_tree is not None:
        trees.append(work_tree)
    for tree in dict.fromkeys(trees):
        for target in _resolve_named(root, named, tree, links):
            yield target
            yield from _find_hook_targets(root, target, links)
    for path in dict.fromkeys(path.rpartition("/")[0] for path in _config_paths(folder)):
        yield from _find_hook_targets(root, f"{path}/hooks", links)


def _find_hook_targets(root: str, hooks: str, links: dict[str, None]) -> Iterator[str]:
    """Yield the targets of links in a hooks folder that lie below a root; git runs the target."""
    top = root.rstrip("/") + "/"
    try:
        with os.scandir(hooks) as entries:
            found = [entry.path for entry in islice(entries, _MOST_HOOKS) if entry.is_symlink()]
    except OSError as error:
        raise_if_resource_shortage(error, hooks)
        return
    for link in found:
        target = os.path.realpath(link)
        links.update(dict.fromkeys(find_links_on_path(root, link)))
        if target.startswith(top):
            yield target


def _resolve_named(
    root: str, named: Iterable[git_config_reader.GitNamedPath], work_tree: str, links: dict[str, None]
) -> Iterator[str]:
    top = root.rstrip("/") + "/"
    for value, base, of_command in named:
        path = Path(work_tree if base is None else base, value)
        target = os.path.realpath(path)
        if of_command and Path(target).is_dir():
            continue
        links.update(dict.fromkeys(find_links_on_path(root, str(path))))
        if target.startswith(top):
            yield target


def find_rebase_exec_steps(tree: FolderTree) -> dict[str, tuple[bytes, ...]]:
    """Return the steps of unfinished rebases and sequences that run a command, by file.

    Git runs these commands when the user continues the operation.
    """
    found: dict[str, tuple[bytes, ...]] = {}
    for folder in tree.list_git_directories():
        for name in _STEPS:
            path = f"{folder}/{name}"
            if os.path.lexists(path):
                kept = snapshot_single_link_file(tree.root, path)
                lines = () if kept is None else map(bytes.strip, kept.data.splitlines())
                found[path] = (_NO_FILE,) if kept is None else tuple(filter(_runs_command, lines))
    return found


def remove_rebase_exec_steps(tree: FolderTree, path: str, known: Collection[bytes]) -> FileSnapshot | None:
    """Return the file without unknown steps that run a command; None if it is not a regular file."""
    if (kept := snapshot_single_link_file(tree.root, path)) is None:
        return None
    lines = [line for line in kept.data.splitlines(keepends=True) if not _runs_command(line) or line.strip() in known]
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


def _runs_command(line: bytes) -> bool:
    words = line.split(None, 1)
    return bool(words) and not words[0].startswith(b"#") and words[0] not in _RUNS_NOTHING


def explain_protected_entry_fault(tree: FolderTree, entry: ProtectedEntry, before: FileSnapshot | None) -> str | None:
    """Return why a protected entry may not stay as it is; None if it may.

    :param before: the earlier content; None if the entry is new
    """
    name = normalise_file_name(entry.path.rpartition("/")[2])
    if entry.why.kind == "hook" and entry.folder and name == "hooks":
        return _explain_hooks_fault(tree, entry.path)
    if entry.why.kind != "vcs" or entry.folder or entry.link:
        return "it is new" if before is None else "it is not a regular file with one name"
    folder = entry.path.rpartition("/")[0]
    repositories = set(tree.list_git_directories())
    if name in _CONFIGS and folder in repositories:
        return _explain_config_fault(tree, entry.path, folder, before)
    if name in _POINTERS and (name == ".git" or folder in repositories):
        return _explain_pointer_fault(tree, entry.path, repositories)
    return "it is new" if before is None else None


def explain_lost_config_restoration(tree: FolderTree, path: str, before: FileSnapshot) -> str | None:
    """Return why a missing configuration must be restored; None if it need not be."""
    folder = path.rpartition("/")[0]
    if normalise_file_name(path.rpartition("/")[2]) not in _CONFIGS or folder not in tree.list_git_directories():
        return None  # its repository is missing too
    keys = _find_unlisted_keys(tree, folder, before.data, b"")
    return None if not keys else f"it is gone, and it had {', '.join(keys[:5])}"


def _explain_config_fault(tree: FolderTree, path: str, folder: str, before: FileSnapshot | None) -> str | None:
    if (now := snapshot_single_link_file(tree.root, path)) is None:
        return "it is not a regular file with one name"
    if before is not None and now.data == before.data:
        return None
    try:
        keys = _find_unlisted_keys(tree, folder, b"" if before is None else before.data, now.data)
    except UnreadableGitConfigError as error:
        return f"git cannot read it: {error}"
    return None if not keys else f"{', '.join(keys[:5])} may not be set by a tool"


def _find_unlisted_keys(tree: FolderTree, folder: str, before: bytes, after: bytes) -> list[str]:
    def inside(value: str) -> bool:
        target = os.path.realpath(Path(folder, value))
        return target.startswith(tree.root.rstrip("/") + "/") or target == tree.root

    try:
        had = parse_config(before)
    except UnreadableGitConfigError:
        had = []  # git could not read it either, so none of its entries applied
    return find_changed_unsafe_keys(had, parse_config(after), inside)


def _explain_pointer_fault(tree: FolderTree, path: str, repositories: Collection[str]) -> str | None:
    if (now := snapshot_single_link_file(tree.root, path)) is None:
        return "it is not a regular file with one name"
    text = now.data.decode("utf-8", "surrogateescape").strip()
    if normalise_file_name(path.rpartition("/")[2]) == ".git":
        marker, _, text = text.partition(":")
        if marker != "gitdir":
            return "it does not name a repository"
        text = text.strip()
    if not text or "\n" in text or "\0" in text:
        return "it does not name a repository"
    target = os.path.realpath(Path(path.rpartition("/")[0], text))
    return None if target in repositories else "it does not lead to a repository in this folder"


def _explain_hooks_fault(tree: FolderTree, path: str) -> str | None:
    """Return why a hooks folder may not stay; git never runs samples, but everything else in it."""
    for folder in tree.order:
        if folder.path == path:
            others = [
                name for name in (*folder.files, *folder.folders, *folder.links) if not _is_sample(folder.files, name)
            ]
            return None if not others and not folder.is_closed else f"{', '.join(others[:5])} would be run by git"
    return None


def _is_sample(files: Collection[str], name: str) -> bool:
    return name in files and name.endswith(".sample")
