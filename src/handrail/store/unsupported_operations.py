"""Operations that some file systems do not have, with what happens there: syncs, permissions, owners, replaced names.

A sync of a folder fails on many file systems: FUSE, 9p, SMB and shared folders of a host. They make names durable in their own
way, so a write does not fail then. It fails if the disk is full or broken.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

UNSUPPORTED_ERRORS = frozenset((errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOTTY, 524))
"""The errors of a file system for an operation that it does not have. 524 is ENOTSUPP, which some pass on from the kernel."""
_UNSUPPORTED_FOR_FOLDERS = UNSUPPORTED_ERRORS | {errno.EBADF, errno.EACCES, errno.EPERM, errno.EISDIR}


def sync_descriptor(descriptor: int) -> None:
    """Make an open file durable, if its file system can.

    :raises OSError: if the disk fails
    """
    _sync(descriptor, UNSUPPORTED_ERRORS)


def sync_folder_descriptor(descriptor: int) -> None:
    """Make the names in an open folder durable, if its file system can.

    :raises OSError: if the disk fails
    """
    _sync(descriptor, _UNSUPPORTED_FOR_FOLDERS)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if the system and the file system can.

    :raises OSError: if the disk fails, or the folder cannot be opened
    """
    if os.name == "nt":  # no folder can be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync_folder_descriptor(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int, unsupported: frozenset[int]) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in unsupported:
            raise


@contextmanager
def ignore_unsupported_operation() -> Generator[None]:
    """Ignore that the file system does not have, or does not permit, what the block asks for."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPERM, *UNSUPPORTED_ERRORS):
            raise


def make_temporary_name() -> str:
    """Return a name for a file that exists only while another one is replaced."""
    return f".handrail-{secrets.token_hex(8)}.tmp"


def replace_name(parent: int, old: str, new: str) -> None:
    """Rename an entry to a name that another file in its folder has, and remove that file.

    On a file system that replaces no name, the other file gets a temporary name first.

    :raises OSError: with the kernel's error; each name is as before then
    """
    try:
        os.rename(old, new, src_dir_fd=parent, dst_dir_fd=parent)
        return
    except (FileExistsError, PermissionError):
        aside = make_temporary_name()
        os.rename(new, aside, src_dir_fd=parent, dst_dir_fd=parent)
    try:
        os.rename(old, new, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        os.rename(aside, new, src_dir_fd=parent, dst_dir_fd=parent)
        raise
    os.unlink(aside, dir_fd=parent)
