"""Whether a program that stays up would be another one if it were started now."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MOST_FILES = 1_000
MOST_BYTES = 64 * 1024 * 1024
_PIECE = 1 << 20


class _TooMuch(Exception):
    """More than is looked through each time."""


def digest_of(executable: Path, folder: Path, *, own: bool) -> bytes | None:
    """A hash of the program and of the files that it may load, or None where nobody can tell, which is never the same.

    :param folder: the canonical folder that the program sees
    :param own: that folder is this tool's alone, so that all in it counts; else, what lies beside the program and is neither
        a manifest nor a program
    """
    found, left = hashlib.sha256(), MOST_BYTES
    try:
        for number, path in enumerate((executable, *(_within(folder) if own else _beside(folder)))):
            if number > MOST_FILES:
                raise _TooMuch
            found.update(os.fsencode(path) + b"\0")
            left -= _taken_in(found, path, left)
    except (OSError, _TooMuch):
        return None
    return found.digest()


def _within(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        linked = (name for name in folders if Path(parent, name).is_symlink())
        yield from (Path(parent, name) for name in sorted((*files, *linked)))


def _beside(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(".") and path.suffix != ".json":
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and not mode & 0o111):
                yield path


def _taken_in(found: hashlib._Hash, path: Path, most: int) -> int:  # pyright: ignore[reportPrivateUsage]
    """Of a file its content, of a link where it leads; the size, in bytes."""
    if path.is_symlink():
        found.update(os.fsencode(path.readlink()) + b"\0")
        return 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or size > most:
            raise _TooMuch
        found.update(f"{size}\0".encode())
        read = 0
        while piece := file.read(_PIECE):
            read += len(piece)
            if read > most:
                raise _TooMuch
            found.update(piece)
    return read
