"""Cache files that are either whole or absent: what a search keeps on disk between two starts.

One file is a magic line, a JSON head (what it is, of which version, how long each block is), the blocks, and a digest
of all before it. It is replaced at once, readable by its owner alone. Whatever is cut short, altered, of another
version or of another kind is not used; it is made again, and the reason is told.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

_MAGIC = b"handrail search 1\n"
_DIGEST = 32
_LARGEST = 2 << 30


class Unusable(Exception):
    """The file cannot be used; the text says why."""


def write(path: Path, head: Mapping[str, Any], blocks: Sequence[bytes | memoryview]) -> None:
    """Replace ``path`` by a file of ``head`` and ``blocks``.

    :raises OSError: it cannot be written; what was there stays
    """
    sizes = [len(block) for block in blocks]
    line = json.dumps({**head, "sizes": sizes}).encode() + b"\n"
    digest = hashlib.blake2b(digest_size=_DIGEST)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for block in (_MAGIC, line, *blocks):
                digest.update(block)
                file.write(block)
            file.write(digest.digest())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read(path: Path, head: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[memoryview]] | None:
    """The head and the blocks of ``path``, or None where there is no such file.

    :param head: what the file's head must say, at least
    :raises Unusable: it is not such a file, or no longer whole
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"cannot be opened: {error.strerror}") from None
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_size > _LARGEST:
        os.close(descriptor)
        raise Unusable("is no file of this kind")
    if os.name != "nt" and (about.st_uid != os.geteuid() or about.st_mode & 0o022):
        os.close(descriptor)
        raise Unusable("could have been written by somebody else")
    with os.fdopen(descriptor, "rb") as file:
        try:
            content = memoryview(file.read())
        except OSError as error:
            raise Unusable(f"cannot be read: {error.strerror}") from None
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise Unusable("is no file of this kind")
    if hashlib.blake2b(content[:-_DIGEST], digest_size=_DIGEST).digest() != bytes(content[-_DIGEST:]):
        raise Unusable("is not whole")
    return _taken_apart(content[len(_MAGIC) : -_DIGEST], head)


def _taken_apart(content: memoryview, head: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[memoryview]]:
    try:
        end = bytes(content[: 64 << 10]).index(b"\n")
        found = cast(object, json.loads(bytes(content[:end])))
    except ValueError:
        raise Unusable("has no head") from None
    if not isinstance(found, dict):
        raise Unusable("has no head")
    held = cast(dict[str, Any], found)
    for name, value in head.items():
        if held.get(name) != value:
            raise Unusable(f"is of another {name}")
    sizes = held.get("sizes")
    rest = content[end + 1 :]
    if not isinstance(sizes, list) or not all(isinstance(n, int) and n >= 0 for n in cast(list[object], sizes)):
        raise Unusable("has no head")
    lengths = cast(list[int], sizes)
    if sum(lengths) != len(rest):
        raise Unusable("is not as long as it says")
    blocks: list[memoryview] = []
    for length in lengths:
        blocks.append(rest[:length])
        rest = rest[length:]
    return held, blocks
