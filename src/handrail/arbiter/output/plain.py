"""Whatever a tool returns, as plain JSON data: a fresh copy, every time, without an exception.

What JSON has a way to say is said in it (sets and tuples are arrays, models and dataclasses objects, dates their ISO
text). What it cannot hold (NaN, huge integers, half a surrogate pair, cycles, foreign objects) becomes text, and a
note says where and why. Binary parts are taken out, for whoever stores them.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
import os
import re
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast
from uuid import UUID

import orjson
from pydantic import BaseModel

from handrail.arbiter import in_pieces
from handrail.contract.result import Blob, Result

MAX_DEPTH = 100
MAX_PARTS = 5_000_000
_MAX_NOTES = 5
_MAX_FOREIGN_TEXT = 10_000
_AS_TEXT = (Decimal, UUID, Fraction, complex, datetime.timedelta)
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,80}/[A-Za-z0-9!#$&^_.+-]{1,80}(;[ -~]{0,100})?")
_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_SUBCLASS
"""orjson then refuses what it would otherwise write in its own way, and it is left to :class:`Plain`."""

_dumps = orjson.dumps


class TooLarge(Exception):
    """The value has more parts than were allowed for; nothing was made of it."""


@dataclasses.dataclass(slots=True)
class Binary:
    """One binary part: ``place`` is the object that stands for it in the data, its ``artifact`` still None."""

    place: dict[str, Any]
    data: bytes
    media_type: str


def encoded_as_it_is(value: object, *, large: bool = False) -> bytes | None:
    """JSON text of a value that is plain already; None if it is not, or only a look at each part can tell.

    :param large: it is written in pieces, so that the event loop continues meanwhile
    """
    try:
        encoded = in_pieces.dumps(value, _STRICT) if large else _dumps(value, None, _STRICT)
    except (TypeError, ValueError, RecursionError):
        return None
    # orjson writes NaN and the infinities as null.
    return None if b"null" in encoded and value is not None else encoded


class Plain:
    """One value made plain: :attr:`data`, the :attr:`binaries` taken out of it, and :attr:`notes` on what was changed."""

    __slots__ = ("_left", "_open", "_where", "binaries", "data", "more_notes", "notes")

    def __init__(self, value: object, max_parts: int = MAX_PARTS) -> None:
        """
        :param max_parts: how many parts to go through, a long text counting by its length
        :raises TooLarge: when there are more
        """
        self._left = max_parts
        self._open: set[int] = set()
        self._where: list[str | int] = []
        self.binaries: list[Binary] = []
        self.notes: list[str] = []
        self.more_notes = 0
        self.data: Any = self._plain(value)

    def _plain(self, value: object) -> Any:
        self._left -= 1
        if self._left < 0:
            raise TooLarge
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            return self._text(cast("str", value))
        if kind is int:
            return self._integer(cast("int", value))
        if kind is float:
            return self._float(cast("float", value))
        try:
            return self._part(value)
        except (TooLarge, MemoryError):
            raise
        except Exception as error:  # its own code runs here (properties, iterators, __str__), and may do anything
            return self._note(f"<{kind.__name__}>", f"a {kind.__name__} cannot be read ({type(error).__name__})")

    def _part(self, value: object) -> Any:
        """Anything but the four simple types. Containers are entered once: inside themselves they are a cycle."""
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._binary(bytes(cast("bytes", value)), "application/octet-stream")
        if isinstance(value, Blob):
            return self._binary(value.data, value.media_type)
        if isinstance(value, enum.Enum):
            return self._plain(value.value)
        if (simple := self._simple(value)) is not None:
            return simple
        if id(value) in self._open:
            return self._note("<cycle>", f"a {type(value).__name__} contains itself")
        if len(self._open) >= MAX_DEPTH:
            return self._note("<nested too deep>", f"is nested deeper than {MAX_DEPTH} levels")
        self._open.add(id(value))
        depth = len(self._where)
        try:
            return self._container(value)
        finally:
            del self._where[depth:]
            self._open.discard(id(value))

    def _simple(self, value: object) -> Any:
        """What is one value and not a container; None if it is something else."""
        if isinstance(value, str):
            return self._text(str.__str__(value))
        if isinstance(value, int):
            return self._integer(int.__int__(value))
        if isinstance(value, float):
            return self._float(float.__float__(value))
        if isinstance(value, (datetime.date, datetime.time)):
            return value.isoformat()
        if isinstance(value, _AS_TEXT):
            return str(value)
        if isinstance(value, os.PathLike):
            return self._text(os.fsdecode(cast("os.PathLike[str]", value)))
        if isinstance(value, BaseException):
            return self._text(_foreign(f"{type(value).__name__}: {value}"))
        return None

    def _container(self, value: object) -> Any:
        # Before a copy is made: some sequences are longer than any memory, as range(10**18) is.
        if isinstance(value, (Mapping, Sequence, Set)) and len(cast("Sequence[object]", value)) > self._left:
            raise TooLarge
        if isinstance(value, Mapping):
            return self._object(list(cast("Mapping[object, object]", value).items()))
        if isinstance(value, tuple) and (names := getattr(cast("object", value), "_fields", None)) is not None:
            return self._object(list(zip(names, cast("tuple[object, ...]", value), strict=True)))
        if isinstance(value, Set):
            return self._array(sorted(cast("Set[object]", value), key=_in_some_order))
        if isinstance(value, Sequence):  # list, tuple, deque, range, …; texts and bytes do not come here
            return self._array(list(cast("Sequence[object]", value)))
        if isinstance(value, Result):
            return self._object(list(value.to_dict().items()))
        if isinstance(value, BaseModel):
            return self._plain(value.model_dump())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._object([(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)])
        text = self._text(_foreign(str(value)))
        return self._note(text, f"a {type(value).__name__} is not JSON, sent as its text")

    def _object(self, items: Sequence[tuple[object, object]]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for key, item in items:
            name = unique = self._key(key)
            while unique in made:
                count = counts[name] = counts.get(name, 1) + 1
                unique = f"{name} ({count})"
            self._where.append(unique)
            if unique != name:
                self._note(None, "two keys have the same text")
            made[unique] = self._plain(item)
            self._where.pop()
        return made

    def _array(self, items: Sequence[object]) -> list[Any]:
        made: list[Any] = []
        for index, item in enumerate(items):
            self._where.append(index)
            made.append(self._plain(item))
            self._where.pop()
        return made

    def _key(self, key: object) -> str:
        if type(key) is str:
            return self._text(key)
        if key is None or isinstance(key, (bool, int, float)):
            made = self._plain(key)
            return made if isinstance(made, str) else orjson.dumps(made).decode()
        made = self._simple(key)
        return made if isinstance(made, str) else self._text(_foreign(str(key)))

    def _text(self, text: str) -> str:
        self._left -= len(text) >> 8
        if self._left < 0:
            raise TooLarge
        if text.isascii():
            return text
        try:
            text.encode()
        except UnicodeEncodeError:
            shown = text.encode("utf-8", "backslashreplace").decode()
            return self._note(shown, "is no valid Unicode text; the faulty characters are written as \\udcXX")
        return text

    def _integer(self, number: int) -> int | str:
        if -(2**63) <= number < 2**64:
            return number
        shown = str(number) if number.bit_length() <= 4096 else hex(number)
        return self._note(shown, "is an integer of more than 64 bits, sent as text")

    def _float(self, number: float) -> float | str:
        if math.isfinite(number):
            return number
        shown = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
        return self._note(shown, f"is {shown}, which JSON has not, sent as text")

    def _binary(self, data: bytes, media_type: object) -> dict[str, Any]:
        known = isinstance(media_type, str) and _MEDIA_TYPE.fullmatch(media_type)
        name = str(media_type) if known else "application/octet-stream"
        place: dict[str, Any] = {"artifact": None, "media_type": name, "bytes": len(data)}
        self.binaries.append(Binary(place, bytes(data), name))
        return place

    def _note(self, shown: Any, why: str) -> Any:
        if len(self.notes) < _MAX_NOTES:
            where = "".join(
                f"[{step}]" if isinstance(step, int) else f".{step if len(step) <= 40 else '(a long key)'}"
                for step in self._where[-8:]
            )
            self.notes.append(f"{where or 'the output'} {why}")
        else:
            self.more_notes += 1
        return shown


def _foreign(text: str) -> str:
    """What an object says of itself: whole, since a secret that is cut is found no more, or not at all."""
    return text if len(text) <= _MAX_FOREIGN_TEXT else f"(a text of {len(text):,} characters)"


def _in_some_order(value: object) -> tuple[str, str]:
    """Sets have no order; the same set should give the same output."""
    return type(value).__name__, str(value)
