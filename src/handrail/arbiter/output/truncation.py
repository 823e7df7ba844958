"""Cutting one output to its tool's limits: a head for whoever reads the result, the whole for the sidecar.

Pure: plain data in, a :class:`Cut` out. Three shapes, in this order:

- a list longer than ``max_entries``, alone or as the only list of an object: ``head`` is its first entries, and
  the whole has one entry a line (``path:line:text`` for a match, the text itself for a text, else JSON);
- a text, alone or as the one long text of an object: ``head`` is its beginning;
- anything else: ``head`` is the beginning of its JSON text.

The other keys of an object are kept beside ``head`` as they are, where they are small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import orjson

from handrail.arbiter import in_pieces
from handrail.contract.tool.spec import ToolSpec

_SMALL = 4
"""What stands beside the head may take one part in so many of the limit."""


class Cut(NamedTuple):
    """What is left of an output, and the whole of it."""

    data: dict[str, Any]
    """``head``, and the small other keys."""
    counts: dict[str, Any]
    """For the metadata: ``head_is``, and ``output_bytes`` and ``omitted_bytes`` or ``entries`` and ``omitted_entries``."""
    whole: str
    """The sidecar's text."""


def cut(data: Any, encoded: bytes, spec: ToolSpec, redact: Callable[[str], str]) -> Cut | None:
    """``data`` within the limits of ``spec``, or None where it is within them already.

    :param encoded: the compact JSON of ``data``
    :param redact: looks through a text that was put together here, before it is cut
    """
    if spec.max_entries is not None and (
        found := _cut_entries(data, encoded, spec.max_output, spec.max_entries, redact)
    ):
        return found
    if len(encoded) <= spec.max_output:
        return None
    if isinstance(data, str):
        return _cut_text(data, None, {}, 0, spec.max_output)
    if isinstance(data, dict):
        members = cast("dict[str, Any]", data)
        texts = [(len(value), key) for key, value in members.items() if isinstance(value, str)]
        if texts:
            key = max(texts)[1]
            others, size = _beside(members, key)
            if size <= spec.max_output // _SMALL and "head" not in others:
                return _cut_text(members[key], key, others, size, spec.max_output)
    # Indented, so that the sidecar can be read and searched by lines.
    return _cut_text(
        redact(in_pieces.dumps_indented(cast("object", data)).decode()), None, {}, 0, spec.max_output, "JSON text"
    )


def first_bytes(encoded: bytes, count: int) -> str:
    """At most ``count`` bytes of UTF-8, ending at a character's end."""
    return encoded[: max(0, count)].decode("utf-8", "ignore")


def _cut_text(
    text: str, key: str | None, others: dict[str, Any], size: int, max_output: int, kind: str = "text"
) -> Cut | None:
    encoded = text.encode()
    limit = max_output - size
    if len(encoded) <= limit and kind == "text":
        return None  # only its escapes in JSON made it too long
    head = first_bytes(encoded, limit)
    counts = {
        "head_is": kind if key is None else f"{kind} of {key!r}",
        "output_bytes": len(encoded),
        "omitted_bytes": len(encoded) - len(head.encode()),
    }
    return Cut({"head": head, **others}, counts, text)


def _cut_entries(
    data: Any, encoded: bytes, max_output: int, max_entries: int, redact: Callable[[str], str]
) -> Cut | None:
    entries, key = _only_list(data)
    if entries is None or (len(entries) <= max_entries and len(encoded) <= max_output):
        return None
    others, size = ({}, 0) if key is None else _beside(data, key)
    if size > max_output // _SMALL or "head" in others:
        return None
    head: list[Any] = []
    size += 1  # two brackets, and one comma less than entries
    for entry in entries[:max_entries]:
        size += len(orjson.dumps(entry)) + 1
        if size > max_output:
            break
        head.append(entry)
    if len(head) == len(entries):  # too long by its key only
        head.pop()
    if not head:
        return None
    whole = redact("\n".join(map(_line, entries)) + "\n")
    counts = {
        "head_is": "entries" if key is None else f"entries of {key!r}",
        "entries": len(entries),
        "omitted_entries": len(entries) - len(head),
        "output_bytes": len(whole.encode()),
    }
    return Cut({"head": head, **others}, counts, whole)


def _only_list(data: Any) -> tuple[list[Any] | None, str | None]:
    if isinstance(data, list):
        return cast("list[Any]", data), None
    if isinstance(data, dict):
        members = cast("dict[str, Any]", data)
        lists = [key for key, value in members.items() if isinstance(value, list)]
        if len(lists) == 1:
            return members[lists[0]], lists[0]
    return None, None


def _beside(data: dict[str, Any], key: str) -> tuple[dict[str, Any], int]:
    """The other keys, and the bytes of JSON they take."""
    others = {other: value for other, value in data.items() if other != key}
    return others, len(orjson.dumps(others)) if others else 0


def _line(entry: Any) -> str:
    """One entry as one line."""
    text: str | None = entry if isinstance(entry, str) else None
    if isinstance(entry, dict):
        match = cast("dict[str, Any]", entry)
        if (
            match.keys() == {"path", "line", "text"}
            and isinstance(match["path"], str)
            and isinstance(match["text"], str)
        ):
            text = f"{match['path']}:{match['line']}:{match['text']}"
    if text is None or "\n" in text or "\r" in text:
        return orjson.dumps(entry).decode()
    return text
