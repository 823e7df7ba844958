"""Atomic replacement of one file's content, also across a crash, and private copies of hard-linked files.

The new content goes to a temporary file in the same folder, becomes durable there, and takes the name in one step. The
displaced file is checked after that step. If it is not the expected one (another process wrote in the meantime), the step
is undone and reported as a conflict, so no edit is lost silently.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.struct import Struct
from handrail.runtime.files.secure_open import (
    FOLDER_FLAGS,
    READ_FLAGS,
    build_not_regular_file_error,
    open_root,
    require_regular_file,
    translate_os_error_for_model,
)
from handrail.runtime.files.session_roots import BENEATH, NO_MAGICLINKS, NO_SYMLINKS, openat2
from handrail.runtime.guard.quarantine import open_parent
from handrail.sandbox.view.cached_folder_tree import FolderTree, raise_if_resource_shortage
from handrail.store.unsupported_operations import (
    UNSUPPORTED_ERRORS,
    ignore_unsupported_operation,
    make_temporary_name,
    replace_name,
    sync_descriptor,
    sync_folder_descriptor,
)

MAX_EDIT_BYTES = 16 * 1024 * 1024
"""The largest file that can be replaced. Larger files can be read."""

STRICT = BENEATH | NO_SYMLINKS | NO_MAGICLINKS
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_ACCESS_LIST = "system.posix_acl_access"
_libc = ctypes.CDLL(None, use_errno=True)
_NAME_LOCKS = [threading.Lock() for _ in range(256)]
"""Locks for the last step of a write: writers of one name take turns; several names share a lock."""


class FileWriteResult(Struct, frozen=True):
    """The result of writing a file: whether it is new, its old content and its new hash."""

    created: bool
    before: bytes | None
    sha256: str


KeepContent = Callable[[bytes | None, int | None, bytes, int], None]
"""Keeps what a write replaces: the content and permissions before (None for a new file), and those after."""


def write_file_atomically(
    located: ResolvedPath,
    data: bytes,
    over: bytes | Literal["new", "seen"],
    seen: str | None,
    keep: KeepContent | None = None,
) -> FileWriteResult:
    """Write ``data`` to the file that ``located`` names, creating parent folders.

    :param over: the expected old content: these bytes, ``"new"`` (no file), or ``"seen"`` (no file, or content with the
        hash ``seen``)
    :param keep: called directly before the file takes its name
    :raises ToolError: ``conflict`` if the file is not as expected, ``denied`` if it is not a regular file with one name
    :raises OSError: with the kernel's error
    """
    if (path := located.relative_path) == ".":
        raise ToolError(f"`{located.display_path}` is a folder. Name a file to write.", kind="invalid_input")
    parent_path, _, name = path.rpartition("/")
    assert located.root is not None
    with open_or_create_parent(located, parent_path) as parent:
        before = read_current_file(parent, name, located)
        # The content is compared before anything is written, and again at the moment of the exchange.
        _check_expected(located, before, over, seen)
        _write_and_swap(parent, name, data, before, located, keep)
        # Without this, a crash could bring back the old name although the content is durable.
        sync_parent_folder(parent, located)
    return FileWriteResult(before is None, before.data if before else None, hashlib.sha256(data).hexdigest())


class OwnerAndPermissions(Struct, frozen=True):
    """The owner of a file, and who may use it: by its mode and by its access control list.

    :param attributes: extended attributes that the user, or the access control list, has set
    """

    stat: os.stat_result
    attributes: Mapping[str, bytes]

    @classmethod
    def read(cls, descriptor: int) -> OwnerAndPermissions:
        """Read those of an open file."""
        attributes: dict[str, bytes] = {}
        names: list[str] = []
        with contextlib.suppress(OSError):  # a file system without them
            names = os.listxattr(descriptor)
        for name in names:
            if name.startswith("user.") or name == _ACCESS_LIST:
                with contextlib.suppress(OSError):  # the loss of one must not lose the others
                    attributes[name] = os.getxattr(descriptor, name)
        return cls(os.fstat(descriptor), attributes)


class CurrentFile(Struct, frozen=True):
    """The content of a file as it is now, and its permissions."""

    data: bytes
    permissions: OwnerAndPermissions

    @property
    def stat(self) -> os.stat_result:
        """The status of the file."""
        return self.permissions.stat


def read_open_file_within_limit(descriptor: int, size: int) -> bytes:
    """Read all bytes of an open regular file, at most one more than :data:`MAX_EDIT_BYTES`."""
    parts: list[bytes] = []
    offset = 0
    while offset <= MAX_EDIT_BYTES:
        if not (part := os.pread(descriptor, max(size - offset, 0) + 1 if offset <= size else 1 << 16, offset)):
            break
        parts.append(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@contextlib.contextmanager
def open_or_create_parent(located: ResolvedPath, path: str) -> Generator[int]:
    """Open the folder ``path`` of a file below its root, creating missing folders. They are removed if the block fails."""
    assert located.root is not None
    root = open_root(located.root)
    made: list[str] = []
    try:
        parent = _open_or_create(root, path, located, made)
        try:
            yield parent
        finally:
            os.close(parent)
    except BaseException:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                _remove_empty_folder(root, folder)
        raise
    finally:
        os.close(root)


def _remove_empty_folder(root: int, path: str) -> None:
    """Remove a folder without files, following no link that has taken the place of one of its folders."""
    above, _, name = path.rpartition("/")
    parent = openat2(root, above or ".", FOLDER_FLAGS, STRICT)
    try:
        os.rmdir(name, dir_fd=parent)
    finally:
        os.close(parent)


def _open_or_create(root: int, path: str, located: ResolvedPath, made: list[str]) -> int:
    """Open a folder, creating missing folders one by one, each below the one before.

    :param made: gets the path of each new folder
    """
    try:
        return openat2(root, path or ".", FOLDER_FLAGS, STRICT)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise translate_os_error_for_model(error, located, "opening the folder of") from error
    here = os.dup(root)
    try:
        parts = path.split("/")
        for count, name in enumerate(parts, 1):
            try:
                below = openat2(here, name, FOLDER_FLAGS, STRICT)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):  # another process has just made it
                    os.mkdir(name, 0o777, dir_fd=here)
                    made.append("/".join(parts[:count]))
                below = openat2(here, name, FOLDER_FLAGS, STRICT)
                set_owner_like(below, os.fstat(here))
            os.close(here)
            here = below
    except BaseException:
        os.close(here)
        raise
    # The walk began at an O_PATH handle; fsync needs one that is open for reading.
    return here


def read_current_file(parent: int, name: str, located: ResolvedPath) -> CurrentFile | None:
    """Read the file that has a name now; None if there is none."""
    try:
        descriptor = openat2(parent, name, READ_FLAGS, STRICT)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ToolError(
                f"`{located.display_path}` is now a symbolic link. List the folder again, then retry.", kind="conflict"
            ) from error
        if error.errno == errno.ENXIO:
            raise build_not_regular_file_error(located) from error
        raise
    try:
        found = require_regular_file(descriptor, located)
        # A second name may be outside the workspace, where no rule has allowed the write.
        if found.st_nlink > 1:
            raise ToolError(
                f"`{located.display_path}` has {found.st_nlink} hard links, so a write could change a file outside the "
                "workspace. Copy it to a new name, and write the copy.",
                kind="denied",
            )
        data = read_open_file_within_limit(descriptor, found.st_size) if found.st_size <= MAX_EDIT_BYTES else b""
        if max(found.st_size, len(data)) > MAX_EDIT_BYTES:
            raise ToolError(
                f"`{located.display_path}` is too large to edit: {found.st_size:,} bytes. "
                f"The maximum is {MAX_EDIT_BYTES:,}. You can read it. Change it with a program instead.",
                kind="limit",
            )
        return CurrentFile(data, OwnerAndPermissions.read(descriptor))
    finally:
        os.close(descriptor)


def _check_expected(
    located: ResolvedPath, before: CurrentFile | None, over: bytes | Literal["new", "seen"], seen: str | None
) -> None:
    if over == "new":
        if before is not None:
            raise ToolError(
                f"`{located.display_path}` already exists, but a new file was expected. Read it first, or use another name.",
                kind="conflict",
            )
    elif over == "seen":
        if before is not None:
            check_unchanged_since_seen(located, before.data, seen)
    elif before is None:
        raise ToolError(
            f"`{located.display_path}` no longer exists. It existed when you read it. List the folder again.",
            kind="conflict",
        )
    elif before.data != over:
        raise build_changed_file_error(located)


def check_unchanged_since_seen(located: ResolvedPath, data: bytes, seen: str | None) -> None:
    """Check that ``data`` is the content that the session saw last.

    :raises ToolError: ``conflict`` if it is not
    """
    if seen is None:
        raise ToolError(
            f"`{located.display_path}` has not been read in this session. Read it, then write.", kind="conflict"
        )
    if hashlib.sha256(data).hexdigest() != seen:
        raise build_changed_file_error(located)


def build_changed_file_error(located: ResolvedPath) -> ToolError:
    """Return the error for a file that has changed since it was read."""
    return ToolError(
        f"`{located.display_path}` has changed since it was read. Nothing was written. Read it again and repeat the edit.",
        kind="conflict",
    )


def write_temporary_file(
    parent: int, temporary: str, data: bytes, like: OwnerAndPermissions | None, *, is_executable: bool | None = None
) -> int:
    """Create a durable file with a temporary name in a folder, and return its permissions.

    :param like: the owner and permissions that it gets; None for a new one
    :param is_executable: whether it can be executed; None: like ``like``
    :raises OSError: with the kernel's error
    """
    mode = 0o666 if like is None else 0o600  # for a new file, less the umask of the process
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=parent
    )
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if like is not None:
            # The owner comes before the mode, because a change of the owner clears some bits of the mode.
            _set_owner_and_permissions(descriptor, like)
        else:
            set_owner_like(descriptor, os.fstat(parent))
        if is_executable is not None:
            now = stat.S_IMODE(os.fstat(descriptor).st_mode)
            set_mode(descriptor, now | (now & 0o444) >> 2 if is_executable else now & ~0o111)
        sync_descriptor(descriptor)
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def _write_and_swap(
    parent: int, name: str, data: bytes, before: CurrentFile | None, located: ResolvedPath, keep: KeepContent | None
) -> None:
    temporary = make_temporary_name()
    try:
        new_mode = write_temporary_file(parent, temporary, data, None if before is None else before.permissions)
        # What undo needs is stored before the file gets its name, so a crash cannot lose the old content.
        if keep is not None and before is None:
            keep(None, None, data, new_mode)
        elif keep is not None and before is not None:
            keep(before.data, stat.S_IMODE(before.stat.st_mode), data, new_mode)
        folder = os.fstat(parent)
        # Two writers of one file in this process take turns. Between processes, the exchange decides.
        with _NAME_LOCKS[hash((folder.st_dev, folder.st_ino, name)) % len(_NAME_LOCKS)]:
            if before is None:
                _publish_as_new_file(parent, temporary, name, located)
            else:
                _publish_over_unchanged_file(parent, temporary, name, before, located)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=parent)


def sync_parent_folder(parent: int, located: ResolvedPath, done: str = "written") -> None:
    """Make the name of a changed entry durable.

    :param done: what was done to the entry
    :raises ToolError: ``backend`` if that fails: the change is made then
    """
    try:
        sync_folder_descriptor(parent)
    except OSError as error:
        raise ToolError(
            f"`{located.display_path}` was {done}, but its folder could not be made durable: {error.strerror}. The change "
            "may be lost if the machine crashes now. Ask the user to check the disk.",
            kind="backend",
        ) from error


def set_mode(descriptor: int, mode: int) -> None:
    """Give a file permissions, if its file system has any."""
    with ignore_unsupported_operation():
        os.fchmod(descriptor, mode)


def _set_owner_and_permissions(descriptor: int, like: OwnerAndPermissions) -> None:
    """Give a new file those of the one that it replaces, as far as the system permits it."""
    now = os.fstat(descriptor)
    set_owner_like(descriptor, like.stat)
    if os.geteuid() != 0 and now.st_gid != like.stat.st_gid:
        with ignore_unsupported_operation():  # permitted for a group of the user
            os.fchown(descriptor, -1, like.stat.st_gid)
    if _ACCESS_LIST not in like.attributes:
        with contextlib.suppress(OSError):  # it has the list of its folder, if any
            os.removexattr(descriptor, _ACCESS_LIST)
    set_mode(descriptor, stat.S_IMODE(like.stat.st_mode) & 0o777)
    for name, value in like.attributes.items():
        with contextlib.suppress(OSError):
            os.setxattr(descriptor, name, value)


def set_owner_like(descriptor: int, like: os.stat_result) -> None:
    """Give a file made by root the owner of the file it replaces or of its folder.

    So a workspace stays its user's.
    """
    if os.geteuid() == 0 and (like.st_uid, like.st_gid) != (0, 0):
        with ignore_unsupported_operation():
            os.fchown(descriptor, like.st_uid, like.st_gid)


def _publish_as_new_file(parent: int, temporary: str, name: str, located: ResolvedPath) -> None:
    try:
        rename_without_overwriting(parent, temporary, name)
    except FileExistsError as error:
        raise ToolError(
            f"`{located.display_path}` was just created by another process. Read it first, then write.", kind="conflict"
        ) from error


def _publish_over_unchanged_file(
    parent: int, temporary: str, name: str, before: CurrentFile, located: ResolvedPath
) -> None:
    """Give the temporary file the name of a file that still is exactly ``before``."""
    # The file may have changed since it was read at the beginning of the write.
    now = read_current_file(parent, name, located)
    if now is None or now.data != before.data:
        raise build_changed_file_error(located)
    try:
        exchanged = _rename(parent, temporary, name, _RENAME_EXCHANGE)
    except FileNotFoundError as error:
        raise build_changed_file_error(located) from error
    if not exchanged:  # a file system without exchange: the check above must suffice
        replace_name(parent, temporary, name)
        return
    try:
        # After the exchange, the temporary name has the file that was really replaced. It must be the expected one.
        displaced = read_current_file(parent, temporary, located)
        same = displaced is not None and displaced.data == before.data
    except (ToolError, OSError):
        same = False
    # Another process wrote in between. Its version gets its name back.
    if not same:
        _rename(parent, temporary, name, _RENAME_EXCHANGE)
        raise build_changed_file_error(located)


def exchange_names(parent: int, one: str, other: str) -> bool:
    """Exchange two names in a folder; return False if the file system cannot do that.

    :raises OSError: with the kernel's error
    """
    return _rename(parent, one, other, _RENAME_EXCHANGE)


def rename_without_overwriting(parent: int, old: str, new: str, new_parent: int | None = None) -> None:
    """Rename an entry to a name that no entry of its new folder has.

    :param new_parent: the new folder; None for the same one
    :raises FileExistsError: if one has it
    :raises OSError: with the kernel's error
    """
    there = parent if new_parent is None else new_parent
    if _rename(parent, old, new, _RENAME_NOREPLACE, there):
        return
    is_folder = stat.S_ISDIR(os.stat(old, dir_fd=parent, follow_symlinks=False).st_mode)
    # A hard link fails if the name exists, which a plain rename does not.
    if not is_folder:
        try:
            os.link(old, new, src_dir_fd=parent, dst_dir_fd=there, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            pass
        else:
            os.unlink(old, dir_fd=parent)
            return
    # A folder takes the place of an empty folder only. For a file, the lock of the name and this look must suffice.
    if os.access(new, os.F_OK, dir_fd=there, follow_symlinks=False):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    try:
        os.rename(old, new, src_dir_fd=parent, dst_dir_fd=there)
    except OSError as error:
        if is_folder and error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from error
        raise


def set_owner_like_parent(parent: int, name: str) -> None:
    """Give an entry that root made the owner of its folder."""
    descriptor = openat2(parent, name, READ_FLAGS, STRICT)
    try:
        set_owner_like(descriptor, os.fstat(parent))
    finally:
        os.close(descriptor)


def _rename(parent: int, old: str, new: str, flags: int, new_parent: int | None = None) -> bool:
    """Call renameat2; return False if the system does not support ``flags``.

    :param new_parent: the new folder; None for the same one
    :raises OSError: with the kernel's error
    """
    if (call := getattr(_libc, "renameat2", None)) is None:
        return False
    if call(parent, os.fsencode(old), parent if new_parent is None else new_parent, os.fsencode(new), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED_ERRORS:
        return False
    raise OSError(number, os.strerror(number), new)


# Private copies of workspace files that have further names outside the workspace (hard links).
#
# Package managers (pnpm, uv, bun) link the files of a project to one store, so a program that writes such a file in
# place changes every other project. So before a program starts, a copy with the same content, permissions and times
# takes the file's name in the workspace. All copies are durable before the first takes its name. A copy replaces only
# the file that it was made from, so an edit in between is not lost.

MAX_COPIED_FILES = 20_000
MAX_COPIED_BYTES = 256 * 1024 * 1024
"""The limit of one start. Files beyond it are read-only for that program, and copied before later ones."""
_BATCH_SIZE = 500
_PIECE = 8 * 1024 * 1024
_FICLONE = 0x40049409
"""FICLONE: share the blocks of another file until one of the files is written, if the file system can."""
_SPACE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS))


def find_outside_hard_links(trees: Sequence[FolderTree]) -> Mapping[str, tuple[int, int]]:
    """Return the paths in these trees whose files also have names outside, with device and inode."""
    if not any(tree.list_hard_linked_files() for tree in trees):
        return {}
    known: dict[tuple[int, int], tuple[set[str], int]] = {}
    for tree in trees:
        for file, (paths, names) in tree.list_hard_linked_files().items():
            known.setdefault(file, (set(), names))[0].update(paths)
    return {path: file for file, (paths, names) in known.items() if len(paths) < names for path in sorted(paths)}


def replace_hard_links_by_copies(root: str, files: Iterable[tuple[str, tuple[int, int]]]) -> set[str]:
    """Replace each of these paths below ``root`` by a copy of its file, and return the paths done.

    Paths of the same file get one copy each.

    :raises ToolError: ``unavailable`` if the system is short of descriptors or memory
    """
    done: set[str] = set()
    room = _CopyBudget(MAX_COPIED_FILES, MAX_COPIED_BYTES)
    batch: list[_PrivateCopy] = []
    try:
        for path, file in files:
            if room.files <= 0:
                break
            try:
                copy = _copy_file(root, path, file, room)
            except OSError as error:
                raise_if_resource_shortage(error, path)
                if error.errno in _SPACE_ERRORS:
                    break
                continue
            if copy is not None:
                batch.append(copy)
            if len(batch) >= _BATCH_SIZE:
                done.update(_publish_copies(batch))
                batch.clear()
        done.update(_publish_copies(batch))
        batch.clear()
    finally:
        for copy in batch:
            copy.discard_copy()
    return done


class _CopyBudget(Struct):
    """How many files and bytes may still be copied."""

    files: int
    bytes: int


class _PrivateCopy(Struct, frozen=True):
    """A copy that does not have its final name yet.

    :param parent: the descriptor of the folder
    :param seen: the state of the file while it was copied
    """

    path: str
    parent: int
    name: str
    temporary: str
    seen: tuple[int, ...]

    def discard_copy(self) -> None:
        """Remove the temporary file and close the folder."""
        with contextlib.suppress(OSError):
            os.unlink(self.temporary, dir_fd=self.parent)
        os.close(self.parent)


def _copy_file(root: str, path: str, file: tuple[int, int], room: _CopyBudget) -> _PrivateCopy | None:
    """Copy one file next to itself; None if it changed, or does not fit into the limits.

    :raises OSError: if it cannot be copied
    """
    if (parent := open_parent(root, path)) is None:
        return None
    name = path.rpartition("/")[2]
    temporary = make_temporary_name()
    copied = False
    try:
        source = openat2(parent, name, READ_FLAGS | os.O_NOFOLLOW, STRICT)
        try:
            before = os.fstat(source)
            if not stat.S_ISREG(before.st_mode) or (before.st_dev, before.st_ino) != file or before.st_nlink < 2:
                return None
            if before.st_size > room.bytes:
                return None
            target = os.open(
                temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent
            )
            try:
                _copy_content(source, target, before)
            finally:
                os.close(target)
            if _file_state(os.fstat(source)) != _file_state(before):
                return None  # another process writes it now
        finally:
            os.close(source)
        room.files -= 1
        room.bytes -= before.st_size
        copied = True
        return _PrivateCopy(path, parent, name, temporary, _file_state(before))
    finally:
        if not copied:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            os.close(parent)


def _copy_content(source: int, target: int, found: os.stat_result) -> None:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        rest = found.st_size
        while rest > 0 and (count := os.sendfile(target, source, None, min(rest, _PIECE))) > 0:
            rest -= count
    with contextlib.suppress(OSError):
        for attribute in os.listxattr(source):
            if attribute.startswith("user."):
                os.setxattr(target, attribute, os.getxattr(source, attribute))
    if os.geteuid() == 0:
        os.fchown(target, found.st_uid, found.st_gid)
    os.fchmod(target, stat.S_IMODE(found.st_mode))
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _publish_copies(batch: Sequence[_PrivateCopy]) -> Iterator[str]:
    """Make the copies durable, give each its name, and yield the paths that were replaced."""
    if not batch:
        return
    device = None
    for copy in batch:
        # One sync of the whole file system is faster than one for each of many files.
        if copy.seen[0] != device:
            device = copy.seen[0]
            _libc.syncfs(copy.parent)
    for copy in batch:
        try:
            if _take_name(copy):
                yield copy.path
        except OSError:
            pass  # it stays a shared file, and so is read-only for the program
        finally:
            copy.discard_copy()


def _take_name(copy: _PrivateCopy) -> bool:
    def is_seen(name: str) -> bool:
        return _file_state(os.stat(name, dir_fd=copy.parent, follow_symlinks=False)) == copy.seen

    if not is_seen(copy.name):
        return False
    if not exchange_names(copy.parent, copy.temporary, copy.name):
        replace_name(copy.parent, copy.temporary, copy.name)
        return True
    found = os.stat(copy.temporary, dir_fd=copy.parent, follow_symlinks=False)
    if _file_state(found) == copy.seen:
        return True
    exchange_names(copy.parent, copy.temporary, copy.name)  # another file took the name in between
    return False


def _file_state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
