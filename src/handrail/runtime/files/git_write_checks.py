"""Checks of writes near git directories, also of those without the name ``.git``.

Any folder with a HEAD, ``objects`` and ``refs`` is one.

A user who types ``git status`` in such a folder runs the commands in its ``config``, although its path has an
ordinary name. So each write is checked together with the files around it. No tool writes in a git directory, or adds
the piece that completes one. The same holds for files that git's settings name: hooks, included files, scripts of a
configured command.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice

from handrail.contract.errors import ToolError
from handrail.contract.protected.path_protection import (
    GIT,
    GIT_NAMES,
    PathProtection,
    find_path_protection,
    normalise_file_name,
)
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.runtime.files import secure_open
from handrail.runtime.files.session_roots import PATH_FLAGS, is_beneath
from handrail.runtime.guard import git_config_checks as vcs
from handrail.sandbox.view.cached_folder_tree import raise_if_resource_shortage

_HEAD = "head"
_REFERENCE = compile_regex_lazily(rb"\s*(?:ref:|[0-9a-fA-F]{40})")
_GIT_FOLDERS = frozenset(("objects", "refs"))
_MOST_ENTRIES = 5_000
"""How many entries of a folder are checked for links."""
_GIT_NAME_HINTS = ("config", "head", "hooks", "commondir", "objects", "refs")


def check_write_spares_git(located: ResolvedPath, data: bytes) -> None:
    """Check that a write does not change what git runs, and does not make a git directory.

    :raises ToolError: ``denied`` if it does
    """
    assert located.root is not None
    for path in vcs.find_paths_git_names_near(located.root, located.absolute):
        if is_beneath(located.absolute, path):
            raise ToolError(PathProtection("hook").format_write_denial(located.display_path), kind="denied")
    if (found := _find_link_protection(located)) is not None:
        raise ToolError(found.format_write_denial(located.display_path), kind="denied")
    parts = located.relative_path.split("/")
    for count in range(len(parts)):
        if _is_git_directory(located, parts[:count]):
            raise ToolError(PathProtection("state").format_write_denial(located.display_path), kind="denied")
    relative = located.relative_path
    low = relative.lower() if relative.isascii() else "".join(map(normalise_file_name, relative))
    if any(name in low for name in _GIT_NAME_HINTS):
        _check_git_marking_names(located, parts, data)


def _check_git_marking_names(located: ResolvedPath, parts: Sequence[str], data: bytes) -> None:
    """Check that a file name and its content do not mark or change a git directory.

    :raises ToolError: ``denied`` if they do
    """
    names = [normalise_file_name(part) for part in parts]
    if names[-1] == _HEAD and _REFERENCE.match(data):
        raise ToolError(
            f"`{located.display_path}` with this content marks its folder as a git repository, from which git reads "
            "its configuration. No tool writes such a file. Use another file name, or create the repository with "
            "git.init.",
            kind="denied",
        )
    for index, name in enumerate(names):
        if (found := GIT_NAMES.get(name)) is None and name not in _GIT_FOLDERS:
            continue
        folder = parts[:index]
        if not _path_entry_exists(located, [*folder, "HEAD"]):
            continue
        raise ToolError((found or PathProtection("vcs")).format_write_denial(located.display_path), kind="denied")


def _find_link_protection(located: ResolvedPath) -> PathProtection | None:
    """Return the protection of a path that a link with a protected name leads to; None without one.

    A user may have made a link with a protected name, or a link in a protected folder. Writing the file behind such a
    link writes the protected file. The links are looked for in the root, in the path's folder and in the protected
    folders of both.
    """
    assert located.root is not None
    own = located.absolute.rpartition("/")[0] or "/"
    for folder in dict.fromkeys((located.root, own)):
        for link, found in _protected_links(located.root, folder):
            if is_beneath(located.absolute, os.path.realpath(link)):
                return found
    return None


def _protected_links(root: str, folder: str, *, inner: bool = True) -> Iterator[tuple[str, PathProtection]]:
    """Yield the links in a folder that no tool may write, each with its protection.

    :param inner: whether to include the links in protected subfolders
    """
    below = folder[len(root.rstrip("/")) + 1 :]
    try:
        with os.scandir(folder) as entries:
            looked_at = list(islice(entries, _MOST_ENTRIES))
    except OSError as error:
        raise_if_resource_shortage(error, folder)
        return
    for entry in looked_at:
        if not (link := entry.is_symlink()) and not (inner and entry.is_dir(follow_symlinks=False)):
            continue
        found = find_path_protection(f"{below}/{entry.name}" if below else entry.name)
        if found is None or found.requires_approval:
            continue
        if link:
            yield entry.path, found
        elif normalise_file_name(entry.name) != GIT:
            yield from _protected_links(root, entry.path, inner=False)


def _is_git_directory(located: ResolvedPath, folder: list[str]) -> bool:
    """Return whether git takes a folder for a git directory; False if the folder cannot be read.

    In that case the write itself fails.
    """
    if not _path_entry_exists(located, [*folder, "HEAD"], unseen=False):
        return False
    contents = all(_path_entry_exists(located, [*folder, part], unseen=False) for part in _GIT_FOLDERS)
    return contents or _path_entry_exists(located, [*folder, "commondir"], unseen=False)


def _path_entry_exists(located: ResolvedPath, parts: list[str], *, unseen: bool = True) -> bool:
    """Return whether an entry of any kind exists.

    :param unseen: the answer if the entry cannot be looked at
    """
    assert located.root is not None
    inner = "/".join(parts)
    place = ResolvedPath(f"{located.root.rstrip('/')}/{inner}", "", True, located.root, relative_path=inner)
    try:
        os.close(secure_open.open_beneath(place, PATH_FLAGS | os.O_NOFOLLOW))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return unseen
    return True
