"""Conversion of any return value to plain JSON data: always a fresh copy, never an exception.

Sets and tuples become arrays, models and dataclasses objects, dates their ISO text. Values that JSON cannot hold (NaN, huge
integers, half a surrogate pair, cycles, foreign objects) become text, and a note records the place and the reason. Binary
parts are taken out for the caller to store. Large outputs are encoded in short steps.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast
from uuid import UUID

import orjson
from pydantic import BaseModel

from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.struct import Struct

# JSON of large outputs, encoded in steps that each hold the interpreter for a few milliseconds.
#
# A thread would not keep the event loop free during one native call: orjson takes 50 to 100 ms for a text of 8 MB and does
# not release the interpreter. So long texts and large containers are encoded in pieces.

PIECE_CHARACTERS = 128 * 1024
"""Characters that one native call encodes; for containers, about as many bytes."""
_WEIGHT = 8
"""Bytes that a value counts in addition to its text."""
_MAX_DEPTH = 100


class NotPlainJson(Exception):
    """The value has another form in JSON."""


def encode_json(value: object, option: int | None = None) -> bytes:
    """Return what ``orjson.dumps`` returns, and raise what it raises."""
    return orjson.dumps(_FragmentEncoder(option, whole=True).encode(value)[0], None, option)


def encode_indented_json(value: object) -> bytes:
    """Return JSON with line ends. Only long texts are written in pieces."""
    option = orjson.OPT_INDENT_2
    return orjson.dumps(_FragmentEncoder(option, whole=False).encode(value)[0], None, option)


def copy_through_json(value: Any) -> Any:
    """Return what ``orjson.loads(orjson.dumps(value))`` returns. Strings are shared.

    :raises NotPlainJson: for a value that has another form in JSON
    """
    kind: object = type(value)  # pyright: ignore[reportUnknownVariableType]
    if value is None or kind is str or kind is int or kind is float or kind is bool:
        return value
    if kind is dict:
        members = cast("dict[Any, Any]", value)
        # Only plain texts: JSON has no other keys, and a subclass of `str` may compare in another way.
        if not all(type(key) is str for key in members):
            raise NotPlainJson
        return {key: copy_through_json(item) for key, item in members.items()}
    if kind is list or kind is tuple:
        return [copy_through_json(item) for item in value]
    raise NotPlainJson


def is_estimated_within_size(value: Any, most: int) -> bool:
    """Return whether the strings and members of a container add up to at most ``most``: a quick estimate before it is encoded."""
    return _remaining(value, most, 0) >= 0


def _remaining(value: Any, left: int, depth: int) -> int:
    items = cast("Collection[Any]", value.values() if type(value) is dict else value)
    left -= len(items)
    # The depth is limited because this walk recurses and a tool may return a list that contains itself.
    if left < 0 or depth > _MAX_DEPTH:
        return -1
    for item in items:
        kind: object = type(item)  # pyright: ignore[reportUnknownVariableType]
        if kind is str:
            left -= len(item)
        elif (kind is dict or kind is list) and item:
            left = _remaining(item, left, depth + 1)
            if left < 0:
                break
    return left


class _FragmentEncoder:
    """An encoder of large parts in pieces.

    :param whole: encode large containers in groups of members, not only long strings in pieces
    """

    def __init__(self, option: int | None, *, whole: bool) -> None:
        self._option, self._whole = option, whole

    def encode(self, value: Any) -> tuple[Any, int]:
        """Return ``value`` with its large parts already encoded, and the size of the remainder."""
        kind: object = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind is str:
            if len(value) > PIECE_CHARACTERS:
                return _fragment(b'"', _encode_pieces(value), b'"'), _WEIGHT
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
            light, size = self.encode(item)
            # The group so far is encoded as an array of its own, and its brackets are cut off, so that the pieces can
            # be joined with commas.
            if self._whole and weight + size > PIECE_CHARACTERS and group:
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
            light, size = self.encode(item)
            size += len(key) if type(key) is str else 0
            if self._whole and weight + size > PIECE_CHARACTERS and group:
                written.append(orjson.dumps(group, None, self._option)[1:-1])
                group, weight = {}, 0
            group[key] = light
            weight += size
            changed = changed or light is not item
        if not written:
            return (group if changed else value), weight + _WEIGHT
        written.append(orjson.dumps(group, None, self._option)[1:-1])
        return _fragment(b"{", [b",".join(written)], b"}"), _WEIGHT


# A JSON string may be split between any two characters, because each is escaped by itself.
def _encode_pieces(text: str) -> Iterator[bytes]:
    return (orjson.dumps(text[at : at + PIECE_CHARACTERS])[1:-1] for at in range(0, len(text), PIECE_CHARACTERS))


def _fragment(opening: bytes, inner: Any, closing: bytes) -> orjson.Fragment:
    return orjson.Fragment(b"".join((opening, *inner, closing)))


MAX_DEPTH = 100
MAX_PARTS = 5_000_000
_MAX_NOTES = 5
_MAX_FOREIGN_TEXT = 10_000
_AS_TEXT = (Decimal, UUID, Fraction, complex, datetime.timedelta)
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,80}/[A-Za-z0-9!#$&^_.+-]{1,80}(;[ -~]{0,100})?")
_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
"""Options under which orjson refuses values that :class:`JsonConversion` converts in its own way."""

_dumps = orjson.dumps


class ValueTooLarge(Exception):
    """The value has more parts than allowed; the conversion has no result."""


class BinaryPart(Struct):
    """One binary part. ``place`` is the object that replaces it in the data, with ``artifact`` still None."""

    placeholder: dict[str, Any]
    data: bytes
    media_type: str


def encode_if_plain_json(value: object, *, large: bool = False) -> bytes | None:
    """Return the JSON of a value that is already plain; None if it is not, or that is unclear without a full walk.

    :param large: encode in pieces, so that the event loop continues meanwhile
    """
    try:
        encoded = encode_json(value, _STRICT) if large else _dumps(value, None, _STRICT)
    except (TypeError, ValueError, RecursionError):
        return None
    # orjson writes NaN and the infinities as null, too. Then there are more of them than members that are None.
    if value is None or b"null" not in encoded:
        return encoded
    members = cast("dict[Any, Any]", value).values() if type(value) is dict else ()
    return encoded if encoded.count(b"null") == sum(member is None for member in members) else None


class JsonConversion:
    """The conversion of one value to plain JSON: :attr:`data`, its :attr:`binaries`, and :attr:`notes` about changes."""

    __slots__ = ("_left", "_open", "_where", "binaries", "data", "more_notes", "notes")

    def __init__(self, value: object, max_parts: int = MAX_PARTS) -> None:
        """Convert ``value``.

        :param max_parts: how many parts to convert; a long string counts by its length
        :raises ValueTooLarge: if there are more
        """
        self._left = max_parts
        self._open: set[int] = set()
        self._where: list[str | int] = []
        self.binaries: list[BinaryPart] = []
        self.notes: list[str] = []
        self.more_notes = 0
        self.data: Any = self._convert(value)

    def _convert(self, value: object) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueTooLarge
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self._convert_text(cast("str", value))
        if kind is int:
            return self._convert_integer(cast("int", value))
        if kind is float:
            return self._convert_float(cast("float", value))
        try:
            return self._convert_other_type(value)
        except (ValueTooLarge, MemoryError):
            raise
        except (
            Exception
        ) as error:  # code of the value runs here (properties, iterators, __str__) and may raise anything
            return self._add_note(f"<{kind.__name__}>", f"a {kind.__name__} cannot be read ({type(error).__name__})")

    def _convert_other_type(self, value: object) -> Any:
        """Convert a value that has none of the four simple types.

        Each container is entered once at a time: a container inside itself is a cycle.
        """
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._add_binary(bytes(cast("bytes", value)), "application/octet-stream")
        if isinstance(value, Blob):
            return self._add_binary(value.data, value.media_type)
        # Before the simple types: an `IntEnum` or `StrEnum` is also one of those, and its value may be of another kind.
        if isinstance(value, enum.Enum):
            return self._convert(value.value)
        if (simple := self._convert_simple(value)) is not None:
            return simple
        if id(value) in self._open:
            return self._add_note("<cycle>", f"a {type(value).__name__} contains itself")
        if len(self._open) >= MAX_DEPTH:
            return self._add_note("<nested too deep>", f"is nested deeper than {MAX_DEPTH} levels")
        # Identities, not values: a container in an equal one is no cycle, and a foreign `__eq__` is not called.
        self._open.add(id(value))
        depth = len(self._where)
        try:
            return self._convert_container(value)
        finally:
            del self._where[depth:]
            self._open.discard(id(value))

    def _convert_simple(self, value: object) -> Any:
        """Convert a single value; return None for a container or a foreign object."""
        if isinstance(value, str):
            # The method of the base class, since a subclass may override it with code that raises or lies about the
            # text.
            return self._convert_text(str.__str__(value))
        if isinstance(value, int):
            return self._convert_integer(int.__int__(value))
        if isinstance(value, float):
            return self._convert_float(float.__float__(value))
        if isinstance(value, (datetime.date, datetime.time)):
            return value.isoformat()
        if isinstance(value, _AS_TEXT):
            return str(value)
        if isinstance(value, os.PathLike):
            return self._convert_text(os.fsdecode(cast("os.PathLike[str]", value)))
        if isinstance(value, BaseException):
            return self._convert_text(_object_text(f"{type(value).__name__}: {value}"))
        return None

    def _convert_container(self, value: object) -> Any:
        # Before a copy is made: some sequences, such as range(10**18), are larger than any memory.
        if isinstance(value, (Mapping, Sequence, Set)) and len(cast("Sequence[object]", value)) > self._left:
            raise ValueTooLarge
        if isinstance(value, Mapping):
            return self._convert_object(list(cast("Mapping[object, object]", value).items()))
        # Before sequences, since a named tuple is one, and its names would be lost.
        if isinstance(value, tuple) and (names := getattr(cast("object", value), "_fields", None)) is not None:
            return self._convert_object(list(zip(names, cast("tuple[object, ...]", value), strict=True)))
        if isinstance(value, Set):
            # A set has no stable order, and the same output must give the same hash and log record each time.
            return self._convert_array(sorted(cast("Set[object]", value), key=_sort_key))
        if isinstance(value, Sequence):  # list, tuple, deque, range, …; strings and bytes are handled before
            return self._convert_array(list(cast("Sequence[object]", value)))
        if isinstance(value, Result):
            return self._convert_object(list(value.to_dict().items()))
        if isinstance(value, BaseModel):
            return self._convert(value.model_dump())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._convert_object(
                [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
            )
        text = self._convert_text(_object_text(str(value)))
        return self._add_note(text, f"a {type(value).__name__} has no JSON form, sent as text")

    def _convert_object(self, items: Sequence[tuple[object, object]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for key, item in items:
            name = unique = self._convert_key(key)
            # `1` and `"1"` are different keys in Python and equal in JSON. Neither value may be lost silently.
            while unique in made:
                count = counts[name] = counts.get(name, 1) + 1
                unique = f"{name} ({count})"
            self._where.append(unique)
            if unique != name:
                self._add_note(None, "two keys have the same text")
            made[unique] = self._convert(item)
            self._where.pop()
        return made

    def _convert_array(self, items: Sequence[object]) -> list[Any]:
        made: list[Any] = []
        for index, item in enumerate(items):
            self._where.append(index)
            made.append(self._convert(item))
            self._where.pop()
        return made

    def _convert_key(self, key: object) -> str:
        if type(key) is str:
            return self._convert_text(key)
        if key is None or isinstance(key, (bool, int, float)):
            made = self._convert(key)
            return made if isinstance(made, str) else orjson.dumps(made).decode()
        made = self._convert_simple(key)
        return made if isinstance(made, str) else self._convert_text(_object_text(str(key)))

    def _convert_text(self, text: str) -> str:
        # A long text counts as several parts, so that a few huge texts cannot escape the limit on parts.
        self._left -= len(text) >> 8
        if self._left < 0:
            raise ValueTooLarge
        if text.isascii():
            return text
        try:
            text.encode()
        except UnicodeEncodeError:
            shown = text.encode("utf-8", "backslashreplace").decode()
            return self._add_note(shown, "is not valid Unicode; the invalid characters are written as \\udcXX")
        return text

    def _convert_integer(self, number: int) -> int | str:
        if -(2**63) <= number < 2**64:
            return number
        # `str` takes quadratic time for a large integer, and Python refuses more than 4,300 digits. `hex` is linear.
        shown = str(number) if number.bit_length() <= 4096 else hex(number)
        return self._add_note(shown, "is an integer of more than 64 bits, sent as text")

    def _convert_float(self, number: float) -> float | str:
        if math.isfinite(number):
            return number
        shown = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
        return self._add_note(shown, f"is {shown}, which has no JSON form, sent as text")

    def _add_binary(self, data: bytes, media_type: object) -> dict[str, Any]:
        # The media type comes from the tool and ends up in the log and in prompts, so only the plain form is accepted.
        known = isinstance(media_type, str) and _MEDIA_TYPE.fullmatch(media_type)
        name = str(media_type) if known else "application/octet-stream"
        place: dict[str, Any] = {"artifact": None, "media_type": name, "bytes": len(data)}
        self.binaries.append(BinaryPart(place, bytes(data), name))
        return place

    def _add_note(self, shown: Any, why: str) -> Any:
        if len(self.notes) < _MAX_NOTES:
            where = "".join(
                f"[{step}]" if isinstance(step, int) else f".{step if len(step) <= 40 else '(a long key)'}"
                # Only the last steps: a path of 100 levels would be longer than the note itself.
                for step in self._where[-8:]
            )
            self.notes.append(f"{where or 'the output'} {why}")
        else:
            self.more_notes += 1
        return shown


def _object_text(text: str) -> str:
    """Return the text of a foreign object, or only its length if it is long: part of a secret would not be found."""
    return text if len(text) <= _MAX_FOREIGN_TEXT else f"(a text of {len(text):,} characters)"


def _sort_key(value: object) -> tuple[str, str]:
    """Return a sort key, so that the same set always gives the same output."""
    return type(value).__name__, str(value)
