"""Messages as frames: a length of four bytes, big-endian, then one JSON object; read in whatever pieces they come."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import orjson

from handrail.store.encoding import encode

MAX_FRAME = 128 * 1024 * 1024
"""Bytes of one message; a call's arguments may be 100 MB."""

ROOM = 64 * 1024
"""Bytes that are kept ready for reading; more only for a message that is longer, as it comes."""

_HEAD = 4
_BLANK = ord(" ")
_UNLIMITED = 1 << 62
_length = struct.Struct(">I").unpack_from

Message = dict[str, Any]
"""One decoded JSON object; ``Any`` because each operation has a body of its own."""


class TooLong(ValueError):
    """A message of our own is longer than a frame may be.

    :param size: its length in bytes
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"the message is {size:,} bytes long; at most {MAX_FRAME:,} go through in one")
        self.size = size


def frame(message: Mapping[str, Any]) -> bytes:
    """``message`` as it goes over the wire. What is not JSON goes as :mod:`handrail.store.encoding` writes it.

    :raises TooLong: beyond :data:`MAX_FRAME`
    """
    try:
        body = orjson.dumps(message)
    except Exception:  # holds what JSON has no form for
        body = encode(message, _UNLIMITED)
    if len(body) > MAX_FRAME:
        raise TooLong(len(body))
    return len(body).to_bytes(_HEAD, "big") + body


class Inbox:
    """Takes bytes in pieces of any size and gives the messages they complete.

    Memory follows what has come, never what was announced: at most :data:`ROOM`, or twice the bytes received of one
    unfinished message.

    :param limit: bytes that one message may have; may be changed between messages
    """

    __slots__ = ("_buffer", "_end", "_view", "fault", "limit")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self.fault: str | None = None
        """Why nothing more is read: the bytes are no messages."""
        self._hold(bytearray(ROOM))
        self._end = 0

    @property
    def unfinished(self) -> int:
        """Bytes received of a message that is not complete."""
        return self._end

    @property
    def kept(self) -> int:
        """Bytes of memory held."""
        return len(self._buffer)

    def room(self, sizehint: int = -1) -> memoryview:
        """Where the next bytes are to be written; never empty. A BufferedProtocol's ``get_buffer``."""
        return self._view[self._end :] if self._end else self._view

    def filled(self, count: int) -> list[Message]:
        """What ``count`` more bytes, written into :meth:`room`, complete: oldest first, up to a fault if there is one."""
        messages: list[Message] = []
        if self.fault is not None:
            return messages
        view = self._view
        if not self._end and _HEAD < count == _HEAD + _length(view)[0] and count <= self.limit:
            only = _decoded(view[_HEAD:count])  # nearly always: one message, whole, that came by itself
            if type(only) is dict:
                messages.append(only)
                return messages
        begin, end = 0, self._end + count
        wanted = _HEAD
        while end - begin >= _HEAD:
            length = int.from_bytes(view[begin : begin + _HEAD], "big")
            if length > self.limit:
                self._fail(f"a message of {length:,} bytes was announced, at most {self.limit:,} are taken here")
                return messages
            wanted = _HEAD + length
            if end - begin < wanted:
                break
            message = _decoded(view[begin + _HEAD : begin + wanted])
            if isinstance(message, str):
                self._fail(message)
                return messages
            messages.append(message)
            begin += wanted
            wanted = _HEAD
        self._tidy(begin, end, wanted)
        return messages

    def feed(self, data: bytes) -> list[Message]:
        """:meth:`filled` for bytes that are elsewhere, in as many steps as it takes."""
        messages: list[Message] = []
        rest = memoryview(data)
        while len(rest) and self.fault is None:
            room = self.room()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            messages += self.filled(count)
        return messages

    def _tidy(self, begin: int, end: int, wanted: int) -> None:
        """Make room again: unfinished bytes to the front, and more space only when what there is is full."""
        have = end - begin
        size = len(self._buffer)
        if not have:
            if size != ROOM:
                self._hold(bytearray(ROOM))
        elif begin:
            self._buffer[:have] = self._buffer[begin:end]
        elif have == size:
            # A new one, since whoever filled this may still hold a view of it. Never beyond this message's end, so
            # that it is empty, and given back, as soon as the message is complete.
            larger = bytearray(min(2 * have, wanted))
            larger[:have] = self._buffer
            self._hold(larger)
        self._end = have

    def _fail(self, reason: str) -> None:
        self.fault = reason
        self._hold(bytearray(1))
        self._end = 0

    def _hold(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)


def _decoded(body: memoryview) -> Message | str:
    """The message, or why it is none."""
    try:
        value: Any = json.loads(bytes(body)) if len(body) and body[0] == _BLANK else orjson.loads(body)
    except (ValueError, RecursionError) as error:
        return f"a message of {len(body):,} bytes is not JSON: {str(error)[:200]}"
    if type(value) is not dict:
        return f"a message is a JSON {type(value).__name__}, expected an object"
    return value  # pyright: ignore[reportUnknownVariableType] - a call of `cast` costs as much as the look before it
