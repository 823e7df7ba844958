"""Moves and deletions of files and folders below a root, and new folders.

The tree that moves or disappears is listed first, and each entry is checked by the caller. The step itself is one rename,
which replaces nothing. Afterwards the tree is listed again: if it is not the checked one, the rename is undone. So nothing
takes a new name, or disappears, that was not checked. Links in a tree are moved and removed as links.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import FileKind, ResolvedPath
from handrail.runtime.files import atomic_write, secure_open
from handrail.runtime.files.session_roots import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, PATH_FLAGS, openat2
from handrail.store.unsupported_operations import make_temporary_name

MAX_TREE_ENTRIES = 1_000
"""The maximum number of entries in a folder that is moved or deleted, with all its subfolders."""
MAX_TREE_DEPTH = 100
_STRICT = BENEATH | NO_SYMLINKS | NO_MAGICLINKS


class TreeEntry(NamedTuple):
    """One entry of a tree that is moved or deleted.

    :param relative: the path in the tree; empty for the top
    :param identity: distinguishes it from any other entry that takes its place
    :param modified_ns: the time of its last change
    """

    relative: str
    kind: FileKind
    identity: tuple[int, int]
    size: int
    modified_ns: int


def list_tree_entries(located: ResolvedPath) -> list[TreeEntry]:
    """Return the entries of the tree at ``located``, the top first.

    :raises ToolError: if it does not exist, is too large, or has an entry that is not a file, folder or link
    """
    with _open_parent(located) as parent:
        return _list_tree(parent, _name_of(located), located)


def move_entry(
    source: ResolvedPath, target: ResolvedPath, checked: Sequence[TreeEntry], keep: Callable[[], None] | None = None
) -> None:
    """Give an entry a path that no entry has, and create the folders of that path.

    :param checked: the tree as :func:`list_tree_entries` returned it
    :param keep: keeps the tree for undo; called directly before the move
    :raises ToolError: ``conflict`` if the target exists or the tree has changed
    """
    old, new = _name_of(source), _name_of(target)
    with (
        _open_parent(source) as parent,
        _open_parent(target, create=True) as new_parent,
        _map_errors(target, "moving to"),
    ):
        if keep is not None:
            keep()
        with _open_entry(parent, old) as entry:
            atomic_write.rename_without_overwriting(parent, old, new, new_parent)
            has_changed = _has_changed(new_parent, new, target, checked, entry)
        if has_changed:
            atomic_write.rename_without_overwriting(new_parent, new, old, parent)
            raise _changed_error(source)
        atomic_write.sync_parent_folder(new_parent, target, "moved")
        atomic_write.sync_parent_folder(parent, target, "moved")


def delete_entry(
    located: ResolvedPath, checked: Sequence[TreeEntry], keep: Callable[[str], None] | None = None
) -> None:
    """Delete a file, or a folder with everything in it.

    :param checked: the tree as :func:`list_tree_entries` returned it
    :param keep: keeps the tree for undo; called directly before the deletion, with the name that it has then
    :raises ToolError: ``conflict`` if the tree has changed, ``failed`` if a part of it cannot be deleted
    """
    name, aside = _name_of(located), make_temporary_name()
    with _open_parent(located) as parent, _map_errors(located, "deleting"):
        with _open_entry(parent, name) as entry:
            atomic_write.rename_without_overwriting(parent, name, aside, parent)
            has_changed = _has_changed(parent, aside, located, checked, entry)
        if has_changed:
            atomic_write.rename_without_overwriting(parent, aside, name, parent)
            raise _changed_error(located)
        try:
            if keep is not None:
                keep(aside)
            if checked[0].kind == "directory":
                shutil.rmtree(aside, dir_fd=parent)
            else:
                os.unlink(aside, dir_fd=parent)
        except OSError:
            with contextlib.suppress(OSError):
                atomic_write.rename_without_overwriting(parent, aside, name, parent)
            raise
        atomic_write.sync_parent_folder(parent, located, "deleted")


def make_folder(located: ResolvedPath) -> bool:
    """Create a folder and its parents, and return whether it is new.

    :raises ToolError: ``conflict`` if a file has the path
    """
    with _open_parent(located, create=True) as parent, _map_errors(located, "creating"):
        try:
            os.mkdir(_name_of(located), 0o777, dir_fd=parent)
        except FileExistsError:
            found = os.stat(_name_of(located), dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                raise ToolError(
                    f"`{located.display_path}` already exists, and is not a folder. Use another name.", kind="conflict"
                ) from None
            return False
        atomic_write.set_owner_like_parent(parent, _name_of(located))
        atomic_write.sync_parent_folder(parent, located, "created")
        return True


@contextmanager
def _open_parent(located: ResolvedPath, *, create: bool = False) -> Generator[int]:
    """Open the folder of an entry below its root, without following links."""
    assert located.root is not None
    folder = located.relative_path.rpartition("/")[0]
    if create:
        with (
            _map_errors(located, "creating the folder of"),
            atomic_write.open_or_create_parent(located, folder) as parent,
        ):
            yield parent
        return
    with _map_errors(located, "opening the folder of"):
        root = secure_open.open_root(located.root)
        try:
            parent = openat2(root, folder or ".", secure_open.FOLDER_FLAGS, _STRICT)
        finally:
            os.close(root)
    try:
        yield parent
    finally:
        os.close(parent)


@contextmanager
def _map_errors(located: ResolvedPath, doing: str) -> Generator[None]:
    try:
        yield
    except FileExistsError:
        raise ToolError(
            f"`{located.display_path}` already exists. Nothing was changed. Use another name, or delete it first.",
            kind="conflict",
        ) from None
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise ToolError(
                f"`{located.display_path}` is on another file system. Nothing was changed. Copy it with a program instead.",
                kind="failed",
            ) from error
        raise secure_open.translate_os_error_for_model(error, located, doing) from error


def _name_of(located: ResolvedPath) -> str:
    """Return the name of an entry in its folder.

    :raises ToolError: if it is a root
    """
    if located.relative_path == ".":
        raise ToolError(
            f"`{located.display_path}` is a root folder of this session. Name a file or folder in it.",
            kind="invalid_input",
        )
    return located.relative_path.rpartition("/")[2]


def _list_tree(parent: int, name: str, located: ResolvedPath) -> list[TreeEntry]:
    with _map_errors(located, "listing"):
        found = [_read_entry(parent, name, "", located)]
        if found[0].kind != "directory":
            return found
        for folder, folders, files, descriptor in os.fwalk(name, dir_fd=parent, follow_symlinks=False, onerror=_raise):
            below = folder[len(name) + 1 :]
            if below.count("/") >= MAX_TREE_DEPTH:
                raise _too_large_error(located)
            for entry in (*folders, *files):
                found.append(_read_entry(descriptor, entry, f"{below}/{entry}" if below else entry, located))
                if len(found) > MAX_TREE_ENTRIES:
                    raise _too_large_error(located)
        return found


def _raise(error: OSError) -> None:
    raise error


def _read_entry(folder: int, name: str, relative: str, located: ResolvedPath) -> TreeEntry:
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    kinds: dict[int, FileKind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    if (kind := kinds.get(stat.S_IFMT(found.st_mode))) is None:
        shown = f"{located.display_path}/{relative}" if relative else located.display_path
        raise ToolError(
            f"`{shown}` is a device, FIFO or socket. Only files, folders and links can be moved or deleted.",
            kind="denied",
        )
    size = found.st_size if kind == "file" else 0
    return TreeEntry(relative, kind, (found.st_dev, found.st_ino), size, found.st_mtime_ns)


@contextmanager
def _open_entry(parent: int, name: str) -> Generator[int]:
    """Open an entry by its name only, so that it is known again under another name."""
    descriptor = os.open(name, PATH_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _has_changed(parent: int, name: str, located: ResolvedPath, checked: Sequence[TreeEntry], entry: int) -> bool:
    """Return whether a renamed tree is another one than was checked.

    :param entry: the descriptor of its top, from before the rename
    """
    try:
        now = _list_tree(parent, name, located)
    except ToolError:
        return True
    if {one[:3] for one in now} == {one[:3] for one in checked}:
        return False
    top = os.fstat(entry)
    if now[0].identity != (top.st_dev, top.st_ino) or now[0].identity == checked[0].identity:
        return True
    # The same entry has another number now, so the numbers of this file system follow the names.
    return {(one[:2], one[3:]) for one in now} != {(one[:2], one[3:]) for one in checked}


def _changed_error(located: ResolvedPath) -> ToolError:
    return ToolError(
        f"`{located.display_path}` changed meanwhile. Nothing was changed. List the folder again, then retry.",
        kind="conflict",
    )


def _too_large_error(located: ResolvedPath) -> ToolError:
    return ToolError(
        f"`{located.display_path}` has more than {MAX_TREE_ENTRIES} entries or {MAX_TREE_DEPTH} levels. Use a program "
        "instead, or name smaller folders.",
        kind="limit",
    )
