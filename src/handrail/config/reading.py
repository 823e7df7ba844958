"""A configuration file, opened once and read whole: what is hashed is what is parsed."""

from __future__ import annotations

import datetime
import errno
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from handrail.config.lines import lines_of
from handrail.contract.errors import Fault, LoadError
from handrail.contract.schema.schema import path_text

MAX_BYTES = 256 * 1024
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_NONBLOCK", 0)


def content_of(path: Path, *, alone: bool = False) -> bytes | None:
    """The bytes of a regular file; None where there is no such file.

    :param alone: the file itself, by its only name: neither a symbolic link nor one of several hard links, which
        somebody could change in another place
    :raises LoadError: saying what it is instead, or why it cannot be read
    """
    try:
        descriptor = os.open(path, _FLAGS | (getattr(os, "O_NOFOLLOW", 0) if alone else 0))
    except FileNotFoundError:
        if path.is_symlink():
            raise _fault(path, "is a symbolic link to nothing; put the file itself there, or remove it") from None
        return None
    except OSError as error:
        if alone and error.errno == errno.ELOOP:
            raise _fault(path, "is a symbolic link; put the file itself there, or remove it") from None
        raise _fault(path, f"cannot be read: {error.strerror or error}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _fault(path, "is no regular file; a configuration is a TOML file")
        if alone and found.st_nlink > 1:
            raise _fault(
                path,
                f"has {found.st_nlink} hard links, so it could be changed under another name; copy it to a file of its own",
            )
        content = _whole(descriptor)
    except OSError as error:
        raise _fault(path, f"cannot be read: {error.strerror or error}") from None
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise _fault(path, f"has more than {MAX_BYTES // 1024} KiB; a configuration is smaller")
    return content


def _whole(descriptor: int) -> bytes:
    parts: list[bytes] = []
    left = MAX_BYTES + 1
    while left > 0 and (part := os.read(descriptor, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def parsed(path: Path, content: bytes) -> tuple[dict[str, Any], Mapping[str, int]]:
    """The table of a file, and the line of each value.

    :raises LoadError: when it is not TOML, or holds what no setting takes
    """
    try:
        text = content.decode("utf-8-sig")
        table = tomllib.loads(text)
    except ValueError as error:  # a number of too many digits, too
        raise _fault(path, f"is not TOML: {error}") from None
    except RecursionError:
        raise _fault(path, "is nested too deeply; settings are at most a few tables deep") from None
    lines = lines_of(text.replace("\r\n", "\n"))
    faults = [
        Fault(f"{path}:{line}" if (line := lines.get(where)) else str(path), where, problem)
        for where, problem in unsayable(table)
    ]
    if faults:
        raise LoadError(faults)
    return table, lines


def unsayable(value: Any, path: tuple[str | int, ...] = (), depth: int = 0) -> list[tuple[str, str]]:
    """``(place, problem)`` of what TOML can say and no setting takes."""
    if depth > 32:
        return [(path_text(path), "is nested too deeply")]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return [(path_text(path), f"is a date or a time ({value.isoformat()}); no setting takes one")]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return [(path_text(path), f"is {value}; a finite number was expected")]
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(cast("dict[str | int, Any]", value).items())
    elif isinstance(value, list):
        items = list(enumerate(cast("list[Any]", value)))
    return [fault for key, inner in items for fault in unsayable(inner, (*path, key), depth + 1)]


def _fault(path: Path, problem: str) -> LoadError:
    return LoadError([Fault(str(path), "", problem)])
