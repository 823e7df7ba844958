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

from handrail.contract.errors import Diagnostic, LoadError
from handrail.contract.schema.argument_validation import format_json_path
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.text_encodings import decode_settings_text

# Line numbers of the values in a TOML text, which the standard library's reader does not give.

_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2}(?!"))'
    r"|'''.*?'''(?:'{0,2}(?!'))"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE = compile_regex_lazily(r"[A-Za-z0-9_-]+")
_COMMENT = re.compile(r"#[^\n]*")

KeyPath = tuple[str | int, ...]


def find_toml_value_lines(text: str) -> dict[str, int]:
    """Return the line, from 1, of each value, by its path (``limits.lock_wait_ms``, ``rules[2]``).

    :param text: a valid TOML text; otherwise the lines may be wrong
    """
    return {format_json_path(path): line for path, line in _find_key_lines(text)}


def _find_key_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    at, line = 0, 1
    while at < len(text):
        character = text[at]
        if character in " \t\r\n":
            line += character == "\n"
            at += 1
        elif character == "#":
            at = _skip_pattern(_COMMENT, text, at)
        elif character == "[":
            end = _find_end_outside_quotes(text, at + 1 + text.startswith("[[", at), "]")
            repeated = text.startswith("[[", at)
            path = _split_dotted_key(text[at + 1 + repeated : end])
            table = (*_insert_array_index(path[:-1], counts), *path[-1:])
            if repeated:
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            yield table, line
            at = end + 1 + repeated
        else:
            end = _find_end_outside_quotes(text, at, "=\n")
            key = (*table, *_split_dotted_key(text[at:end]))
            yield key, line
            elements, at, line = _skip_value(text, end + 1, line)
            yield from (((*key, number), begins) for number, begins in enumerate(elements))


def _skip_value(text: str, at: int, line: int) -> tuple[list[int], int, int]:
    """Skip one value, and return the lines of an array's elements, and the position and line after it."""
    elements: list[int] = []
    depth, is_array, fresh = 0, False, False
    while at < len(text):
        character = text[at]
        if character == "\n":
            line, at = line + 1, at + 1
            if depth == 0:
                break
        elif character == "#":
            at = _skip_pattern(_COMMENT, text, at)
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
                end = _skip_pattern(_STRING, text, at)
                line, at = line + text.count("\n", at, end), end
            else:
                if character in "[{":
                    if depth == 0:
                        is_array = fresh = character == "["
                    depth += 1
                at += 1
    return elements, at, line


def _skip_pattern(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match is not None else at + 1


def _find_end_outside_quotes(text: str, at: int, ends: str) -> int:
    """Return the position of the first character of ``ends`` outside quotes."""
    while at < len(text) and text[at] not in ends:
        at = _skip_pattern(_STRING, text, at) if text[at] in "\"'" else at + 1
    return at


def _split_dotted_key(text: str) -> tuple[str, ...]:
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


def _insert_array_index(path: KeyPath, counts: dict[KeyPath, int]) -> KeyPath:
    """Return ``path`` with the index of the last element inserted after each array of tables."""
    found: KeyPath = ()
    for part in path:
        found = (*found, part)
        if found in counts:
            found = (*found, counts[found])
    return found


MAX_CONFIG_BYTES = 256 * 1024
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_NONBLOCK", 0)


def read_config_file_bytes(path: Path, *, follow_no_link: bool = False) -> bytes | None:
    """Return the bytes of a regular file, or None if it does not exist.

    :param follow_no_link: reject a symbolic link, and a file with several hard links, since another name could change the file
    :raises LoadError: with the reason why it cannot be read
    """
    try:
        descriptor = os.open(path, _FLAGS | (getattr(os, "O_NOFOLLOW", 0) if follow_no_link else 0))
    except FileNotFoundError:
        if path.is_symlink():
            raise _fault(path, "is a broken symbolic link; replace it with the file itself, or remove it") from None
        return None
    except OSError as error:
        if follow_no_link and error.errno == errno.ELOOP:
            raise _fault(path, "is a symbolic link; replace it with the file itself, or remove it") from None
        step = (
            "; make it readable for this user, or set HOME to this user's home folder"
            if error.errno == errno.EACCES
            else ""
        )
        raise _fault(path, f"cannot be read: {error.strerror or error}{step}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _fault(path, "is not a regular file; expected a TOML file")
        if follow_no_link and found.st_nlink > 1:
            raise _fault(
                path,
                (f"has {found.st_nlink} hard links, so it could be changed under another name; replace it with a copy"),
            )
        content = _read_whole(descriptor)
    except OSError as error:
        raise _fault(path, f"cannot be read: {error.strerror or error}") from None
    finally:
        os.close(descriptor)
    if len(content) > MAX_CONFIG_BYTES:
        raise _fault(path, f"is too large; the limit is {MAX_CONFIG_BYTES // 1024} KiB")
    return content


def _read_whole(descriptor: int) -> bytes:
    parts: list[bytes] = []
    left = MAX_CONFIG_BYTES + 1
    while left > 0 and (part := os.read(descriptor, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def parse_config_file(path: Path, content: bytes) -> tuple[dict[str, Any], Mapping[str, int]]:
    """Return the table of a file, and the line of each value.

    :raises LoadError: if it is not TOML, or has values that no setting accepts
    """
    try:
        text = decode_settings_text(content)
        table = tomllib.loads(text)
    except ValueError as error:  # also for a number with too many digits
        raise _fault(path, f"is not TOML: {error}") from None
    except RecursionError:
        raise _fault(path, "is nested too deeply; the limit is 32 levels") from None
    lines = find_toml_value_lines(text.replace("\r\n", "\n"))
    faults = [
        Diagnostic(f"{path}:{line}" if (line := lines.get(where)) else str(path), where, problem)
        for where, problem in find_unsupported_values(table)
    ]
    if faults:
        raise LoadError(faults)
    return table, lines


def find_unsupported_values(value: Any, path: tuple[str | int, ...] = (), depth: int = 0) -> list[tuple[str, str]]:
    """Return ``(place, problem)`` for each value that TOML allows and no setting accepts."""
    if depth > 32:
        return [(format_json_path(path), "is nested too deeply; the limit is 32 levels")]
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return [(format_json_path(path), f"is a date or a time ({value.isoformat()}), which no setting accepts")]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return [(format_json_path(path), f"is {value}; expected a finite number")]
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(cast("dict[str | int, Any]", value).items())
    elif isinstance(value, list):
        items = list(enumerate(cast("list[Any]", value)))
    return [fault for key, inner in items for fault in find_unsupported_values(inner, (*path, key), depth + 1)]


def _fault(path: Path, problem: str) -> LoadError:
    return LoadError([Diagnostic(str(path), "", problem)])
