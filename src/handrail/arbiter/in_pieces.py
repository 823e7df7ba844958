"""JSON of large outputs, in steps that each hold the interpreter for a few milliseconds.

A thread does not help the event loop while one native call is under way: orjson takes 50 to 100 ms for a text of 8 MB and
does not give the interpreter up. So a long text is written in pieces, and so is a container that comes to much.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import orjson

PIECE = 128 * 1024
"""Characters that one native call writes, and in containers about so many bytes."""
_WEIGHT = 8
"""Bytes that a value counts in addition to its text."""
_MAX_DEPTH = 100


class NotPlain(Exception):
    """A value that JSON has in another form."""


def dumps(value: object, option: int | None = None) -> bytes:
    """Return what ``orjson.dumps`` returns, and raise what it raises."""
    return orjson.dumps(_Lightened(option, whole=True).of(value)[0], None, option)


def dumps_indented(value: object) -> bytes:
    """Return JSON with line ends. Only long texts are written in pieces."""
    option = orjson.OPT_INDENT_2
    return orjson.dumps(_Lightened(option, whole=False).of(value)[0], None, option)


def copied(value: Any) -> Any:
    """Return what ``orjson.loads(orjson.dumps(value))`` returns. Texts are shared.

    :raises NotPlain: for a value that JSON has in another form
    """
    kind: object = type(value)  # pyright: ignore[reportUnknownVariableType]
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return value
    if kind is dict:
        members = cast("dict[Any, Any]", value)
        if not all(type(key) is str for key in members):
            raise NotPlain
        return {key: copied(item) for key, item in members.items()}
    if kind is list or kind is tuple:
        return [copied(item) for item in value]
    raise NotPlain


def fits(value: Any, most: int) -> bool:
    """Return whether the texts and members of a container come to ``most`` at most: a quick look before it is written."""
    return _rest(value, most, 0) >= 0


def _rest(value: Any, left: int, depth: int) -> int:
    items = cast("Collection[Any]", value.values() if type(value) is dict else value)
    left -= len(items)
    if left < 0 or depth > _MAX_DEPTH:
        return -1
    for item in items:
        kind: object = type(item)  # pyright: ignore[reportUnknownVariableType]
        if kind is str:
            left -= len(item)
        elif (kind is dict or kind is list) and item:
            left = _rest(item, left, depth + 1)
            if left < 0:
                break
    return left


class _Lightened:
    """:param whole: containers that come to much are written in groups of members, not only texts in pieces"""

    def __init__(self, option: int | None, *, whole: bool) -> None:
        self._option, self._whole = option, whole

    def of(self, value: Any) -> tuple[Any, int]:
        """``value`` with what is large in it written already, and what the rest of it comes to."""
        kind: object = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind is str:
            if len(value) > PIECE:
                return _fragment(b'"', _pieces(value), b'"'), _WEIGHT
            return value, len(value) + _WEIGHT
        if kind is list or kind is tuple:
            return self._array(value)
        if kind is dict:
            return self._object(value)
        return value, _WEIGHT

    def _array(self, value: Any) -> tuple[Any, int]:
        written: list[bytes] = []
        group: list[Any] = []
        weight, changed = 0, False
        for item in value:
            light, size = self.of(item)
            if self._whole and weight + size > PIECE and group:
                written.append(orjson.dumps(group, None, self._option)[1:-1])
                group, weight = [], 0
            group.append(light)
            weight += size
            changed = changed or light is not item
        if not written:
            return (group if changed else value), weight + _WEIGHT
        written.append(orjson.dumps(group, None, self._option)[1:-1])
        return _fragment(b"[", [b",".join(written)], b"]"), _WEIGHT

    def _object(self, value: Any) -> tuple[Any, int]:
        written: list[bytes] = []
        group: dict[Any, Any] = {}
        weight, changed = 0, False
        for key, item in value.items():
            light, size = self.of(item)
            size += len(key) if type(key) is str else 0
            if self._whole and weight + size > PIECE and group:
                written.append(orjson.dumps(group, None, self._option)[1:-1])
                group, weight = {}, 0
            group[key] = light
            weight += size
            changed = changed or light is not item
        if not written:
            return (group if changed else value), weight + _WEIGHT
        written.append(orjson.dumps(group, None, self._option)[1:-1])
        return _fragment(b"{", [b",".join(written)], b"}"), _WEIGHT


def _pieces(text: str) -> Iterator[bytes]:
    return (orjson.dumps(text[at : at + PIECE])[1:-1] for at in range(0, len(text), PIECE))


def _fragment(opening: bytes, inner: Any, closing: bytes) -> orjson.Fragment:
    return orjson.Fragment(b"".join((opening, *inner, closing)))
