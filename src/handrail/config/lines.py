"""The line number of each value in a TOML text, which the standard library's reader does not give."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from handrail.contract.schema.schema import path_text

_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"""(?:"{0,2}(?!"))'
    r"|'''.*?'''(?:'{0,2}(?!'))"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_COMMENT = re.compile(r"#[^\n]*")

Path = tuple[str | int, ...]


def lines_of(text: str) -> dict[str, int]:
    """``limits.lock_wait_ms``, ``rules[2]``, … to the line (from 1) each begins on.

    :param text: what tomllib has read without an error; of anything else the answer is a guess
    """
    return {path_text(path): line for path, line in _found(text)}


def _found(text: str) -> Iterator[tuple[Path, int]]:
    counts: dict[Path, int] = {}
    table: Path = ()
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
            fresh, at = True, at + 1
        elif character in "]}":
            depth, at = depth - 1, at + 1
        else:
            if depth == 1 and is_array and fresh:
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


def _in_array(path: Path, counts: dict[Path, int]) -> Path:
    """``path`` with the number of the last element put in behind each array of tables on its way."""
    found: Path = ()
    for part in path:
        found = (*found, part)
        if found in counts:
            found = (*found, counts[found])
    return found
