"""The file that holds the whole of a truncated output, in the folder its session may read."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from handrail.arbiter.output.sidecar_room import SidecarRoom

MAX_SIDECAR = 64 * 1024 * 1024
"""Bytes. What is longer is cut there, and the file's last line says so."""

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")
_MAX_NAME = 100
_MAX_SAME_NAME = 100


def write(room: SidecarRoom, folder: Path, call_id: str, text: str, ending: str = ".txt") -> tuple[Path, int]:
    """Write a new file named for the call, readable by its owner alone.

    Blocks; leaves no part of a file behind when it fails.

    :param room: what all of them may take together
    :return: the file, and how many bytes of ``text`` are in it
    :raises OSError: when it cannot be written, or has no room
    """
    encoded = text.encode("utf-8", "backslashreplace")
    kept = len(encoded)
    if kept > MAX_SIDECAR:
        note = f"\n[this file ends here: it holds the first {MAX_SIDECAR:,} of {kept:,} bytes]\n".encode()
        head = encoded[: MAX_SIDECAR - len(note)].decode("utf-8", "ignore").encode()
        kept, encoded = len(head), head + note
    with room.taken(len(encoded)):
        path, descriptor = _new(folder, file_name(call_id), ending)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(encoded)
        except BaseException:
            path.unlink(missing_ok=True)  # on a full disk its part is worth more as free space
            raise
    return path, kept


def file_name(call_id: str) -> str:
    """``call_id`` as a file's name: itself where it is one, else what fits of it and a hash of the whole."""
    name = _NOT_IN_A_NAME.sub("_", call_id)[:_MAX_NAME]
    if name == call_id and name:
        return name
    return f"{name}-{hashlib.sha256(call_id.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}"


def _new(folder: Path, name: str, ending: str) -> tuple[Path, int]:
    """A file that was not there before: an earlier attempt of the same call keeps its own."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    for attempt in range(1, _MAX_SAME_NAME):
        path = folder / (f"{name}{ending}" if attempt == 1 else f"{name}-{attempt}{ending}")
        try:
            return path, os.open(path, flags, 0o600)
        except FileExistsError:
            continue
    raise FileExistsError(17, f"there are {_MAX_SAME_NAME} outputs of this call already", str(folder / name))
