"""Small files of the operator's own decisions: written whole, and read only where nobody else could have written them."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from handrail.contract.errors import StartError
from handrail.store.folders import unwritable


def read(path: Path, max_bytes: int) -> bytes | None:
    """The content of a file that its owner alone could have written; None for anything else, or a longer one."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > max_bytes:
            return None
        if os.name != "nt" and (found.st_uid != os.geteuid() or found.st_mode & 0o077):
            return None
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def write(path: Path, content: bytes) -> None:
    """Put ``content`` in the place of what was there, whole or not at all, durable when this returns.

    :raises StartError: when its folder cannot be written
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), stat.S_IRUSR | stat.S_IWUSR
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise unwritable(path.parent, error) from None


def once(path: Path, content: bytes) -> bytes | None:
    """Put ``content`` there unless there is something already; what is there then, or None where that cannot be trusted.

    However many do so at once, all get the same.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    if not path.exists():
        with suppress(StartError, OSError):
            write(temporary, content)
            try:
                os.link(temporary, path)
            finally:
                temporary.unlink()
    return read(path, len(content))
