"""The reader of a configuration file, which opens it once, so that the hashed text is the parsed text."""

from __future__ import annotations

import datetime
import errno
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from handrail.contract.errors import Fault, LoadError
from handrail.contract.schema.schema import path_text

# Line numbers of the values in a TOML text, which the standard library's reader does not give.

_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2}(?!"))'
    r"|'''.*?'''(?:'{0,2}(?!'))"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_COMMENT = re.compile(r"#[^\n]*")

KeyPath = tuple[str | int, ...]


def lines_of(text: str) -> dict[str, int]:
    """``limits.lock_wait_ms``, ``rules[2]``, … to the line (from 1) each begins on.

    :param text: what tomllib has read without an error; of anything else the answer is a guess
    """
    return {path_text(path): line for path, line in _found(text)}


def _found(text: str) -> Iterator[tuple[KeyPath, int]]:
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    at, line = 0, 1
    while at < len(text):
        character = text[at]
        if character in " \t\r\n":
            line += character == "\n"
            at += 1
        elif character == "#":
            at = _past(_COMMENT, text, at)
        elif character == "[":
            end = _until(text, at + 1 + text.startswith("[[", at), "]")
            repeated = text.startswith("[[", at)
            path = _keys(text[at + 1 + repeated : end])
            table = (*_in_array(path[:-1], counts), *path[-1:])
            if repeated:
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            yield table, line
            at = end + 1 + repeated
        else:
            end = _until(text, at, "=\n")
            key = (*table, *_keys(text[at:end]))
            yield key, line
            elements, at, line = _value(text, end + 1, line)
            yield from (((*key, number), begins) for number, begins in enumerate(elements))


def _value(text: str, at: int, line: int) -> tuple[list[int], int, int]:
    """Pass over one value: the line of each element where it is an array, and the place and line after it."""
    elements: list[int] = []
    depth, is_array, fresh = 0, False, False
    while at < len(text):
        character = text[at]
        if character == "\n":
            line, at = line + 1, at + 1
            if depth == 0:
                break
        elif character == "#":
            at = _past(_COMMENT, text, at)
        elif character in " \t\r":
            at += 1
        elif character == "," and depth == 1:
            fresh, at = is_array, at + 1
        elif character in "]}":
            depth, at = depth - 1, at + 1
        else:
            if depth == 1 and fresh:
                fresh = False
                elements.append(line)
            if character in "\"'":
                end = _past(_STRING, text, at)
                line, at = line + text.count("\n", at, end), end
            else:
                if character in "[{":
                    if depth == 0:
                        is_array = fresh = character == "["
                    depth += 1
                at += 1
    return elements, at, line


def _past(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match is not None else at + 1


def _until(text: str, at: int, ends: str) -> int:
    """Where the first of ``ends`` stands outside quotes."""
    while at < len(text) and text[at] not in ends:
        at = _past(_STRING, text, at) if text[at] in "\"'" else at + 1
    return at


def _keys(text: str) -> tuple[str, ...]:
    """The parts of a dotted key."""
    if _BARE.fullmatch(text.strip()):
        return (text.strip(),)
    try:
        node: Any = tomllib.loads(f"{text.strip()} = 0")
    except (ValueError, RecursionError):
        return (text.strip(),)
    found: list[str] = []
    while isinstance(node, dict) and node:
        name, node = next(iter(node.items()))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        found.append(str(name))  # pyright: ignore[reportUnknownArgumentType]
    return tuple(found)


def _in_array(path: KeyPath, counts: dict[KeyPath, int]) -> KeyPath:
    """``path`` with the number of the last element put in behind each array of tables on its way."""
    found: KeyPath = ()
    for part in path:
        found = (*found, part)
        if found in counts:
            found = (*found, counts[found])
    return found


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
