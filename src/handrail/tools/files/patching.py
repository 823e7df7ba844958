"""Line operations on a text: replace a range, insert at a line, append. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.text.excerpts import excerpt
from handrail.contract.text.neutral import OPEN, Shown, neutralised
from handrail.tools.files.text import Block, line_end, lines_of, readable

_FIELDS = {
    "replace": ({"first_line", "last_line", "content"}, "first_line, last_line and content"),
    "insert": ({"line", "content"}, "line and content"),
    "append": ({"content"}, "content"),
}


def check_operations(operations: Sequence[dict[str, Any]]) -> None:
    """:raises ToolError: ``invalid_input`` for an operation that can be none, whatever is in the file"""
    for number, operation in enumerate(operations, 1):
        wanted, text = _FIELDS[op := operation["op"]]
        given = operation.keys() - {"op", "expect"}
        if given != wanted:
            raise ToolError(
                f"operation {number} is {op!r}, which takes {text}, and may have expect; this one has "
                f"{', '.join(sorted(given)) or 'none of them'}",
                kind="invalid_input",
            )
        if op != "replace" and not operation["content"]:
            raise ToolError(
                f"operation {number} adds nothing: its content is empty; one blank line is '\\n'", kind="invalid_input"
            )


def blocks_of_operations(text: str, operations: Sequence[dict[str, Any]]) -> list[Block]:
    """What ``operations``, which were checked, change; all of their line numbers mean ``text`` as it is now.

    New lines take the line end that most lines have; a text without a final line end stays without one.

    :raises ToolError: ``invalid_input`` for lines that are not there or overlap, ``conflict`` where ``expect`` is untrue
    """
    lines = lines_of(text)
    end = line_end(text)
    blocks = sorted(
        (_block(number, operation, lines, end) for number, operation in enumerate(operations, 1)),
        key=lambda block: (block.first, block.last),
    )
    joined: list[Block] = []
    for block in blocks:
        if joined and block.first < joined[-1].last:
            raise ToolError(
                f"two operations change line {block.first + 1}; give each line to one operation", kind="invalid_input"
            )
        if joined and block.first == joined[-1].last:
            joined[-1] = Block(joined[-1].first, block.last, joined[-1].new + block.new)
        else:
            joined.append(block)
    if lines and not lines[-1].endswith("\n") and joined[-1].last == len(lines) and joined[-1].new:
        tail = joined[-1]
        if tail.first == len(lines):
            tail = Block(tail.first - 1, tail.last, (lines[-1] + end, *tail.new))
        joined[-1] = Block(tail.first, tail.last, (*tail.new[:-1], tail.new[-1].removesuffix(end)))
    return joined


def patched(text: str, blocks: Sequence[Block]) -> str:
    """``text`` with ``blocks`` put in."""
    lines = lines_of(text)
    out: list[str] = []
    at = 0
    for block in blocks:
        out += (*lines[at : block.first], *block.new)
        at = block.last
    return "".join((*out, *lines[at:]))


def _block(number: int, operation: dict[str, Any], lines: Sequence[str], end: str) -> Block:
    op, content = operation["op"], operation["content"]
    total = len(lines)
    if OPEN in content:
        content = _written(content, operation, lines)
    new = tuple(f"{line}{end}" for line in _content_lines(content))
    if op == "replace":
        first, last = operation["first_line"], operation["last_line"]
        if not first <= last <= total:
            raise ToolError(
                f"operation {number} replaces lines {first} to {last}; the file has {total} lines", kind="invalid_input"
            )
        _check(number, operation, lines[first - 1 : last], f"lines {first} to {last}")
        return Block(first - 1, last, new)
    if op == "insert":
        line = operation["line"]
        if line > total + 1:
            raise ToolError(
                f"operation {number} inserts before line {line}; the file has {total} lines, so at most {total + 1}",
                kind="invalid_input",
            )
        _check(number, operation, lines[line - 1 : line], f"line {line}")
        return Block(line - 1, line - 1, new)
    _check(number, operation, lines[-1:], "the last line")
    return Block(total, total, new)


def _written(content: str, operation: dict[str, Any], lines: Sequence[str]) -> str:
    """``content`` with those characters in it that the lines around it have, where a model copied how it was shown them."""
    first = operation.get("first_line") or operation.get("line") or len(lines)
    around = "".join(lines[max(0, first - 2) : operation.get("last_line", first) + 1])
    return Shown(around).written(content, 0, len(around))


def _content_lines(content: str) -> list[str]:
    plain = content.replace("\r\n", "\n")
    return plain.removesuffix("\n").split("\n") if plain else []


def _check(number: int, operation: dict[str, Any], have: Sequence[str], where: str) -> None:
    if "expect" not in operation:
        return
    want = _content_lines(operation["expect"])
    found = [line.removesuffix("\n").removesuffix("\r") for line in have]
    if want != found and want != neutralised("\n".join(found)).split("\n"):
        shown = readable("\n".join(found))
        raise ToolError(
            f"operation {number} expects other text at {where}; there is {excerpt(shown, 500)}. Nothing was changed: "
            "read the file again and correct the line numbers",
            kind="conflict",
        )
