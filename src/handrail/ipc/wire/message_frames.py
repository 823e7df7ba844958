"""Messages as frames: a length of four bytes, big-endian, then one JSON object; read in whatever pieces they come."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import orjson

from handrail.store.json_fallback_encoding import encode_json_with_fallback

MAX_FRAME = 128 * 1024 * 1024
"""The maximum size of one message, in bytes; a call's arguments may take 100 MB."""

BUFFER_BYTES = 64 * 1024
"""The size of the read buffer, in bytes. It grows only while a longer message arrives."""

_LENGTH_BYTES = 4
_BLANK = ord(" ")
_UNLIMITED = 1 << 62
_length = struct.Struct(">I").unpack_from

Message = dict[str, Any]
"""One decoded JSON object; ``Any`` because each operation has its own body."""


class FrameTooLong(ValueError):
    """An outgoing message is longer than a frame may be.

    :param size: its length in bytes
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"the message has {size:,} bytes; the maximum is {MAX_FRAME:,}")
        self.size = size


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """Encode ``message`` as a frame. :mod:`handrail.store.json_fallback_encoding` writes values that are not JSON.

    :raises FrameTooLong: if it is longer than :data:`MAX_FRAME`
    """
    try:
        body = orjson.dumps(message)
    except Exception:  # it contains values that JSON cannot express
        body = encode_json_with_fallback(message, _UNLIMITED)
    if len(body) > MAX_FRAME:
        raise FrameTooLong(len(body))
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameReceiveBuffer:
    """A buffer that receives bytes in pieces of any size and returns the completed messages.

    Memory depends on the received bytes, never on the announced length: at most :data:`BUFFER_BYTES`, or twice the received bytes of
    one unfinished message.

    :param limit: the maximum size of one message in bytes; may be changed between messages
    """

    __slots__ = ("_buffer", "_end", "_view", "fault", "limit")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self.limit = limit
        self.fault: str | None = None
        """The reason why reading stopped, if the bytes are not valid messages."""
        self._set_buffer(bytearray(BUFFER_BYTES))
        self._end = 0

    @property
    def pending_byte_count(self) -> int:
        """The number of received bytes of an incomplete message."""
        return self._end

    @property
    def buffer_size(self) -> int:
        """The size of the buffer in bytes."""
        return len(self._buffer)

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Return the buffer for the next bytes, which is never empty: ``get_buffer`` of a BufferedProtocol."""
        return self._view[self._end :] if self._end else self._view

    def read_messages(self, count: int) -> list[Message]:
        """Return the messages that ``count`` more bytes in :meth:`room` complete, oldest first, up to a fault."""
        messages: list[Message] = []
        if self.fault is not None:
            return messages
        view = self._view
        if not self._end and _LENGTH_BYTES < count == _LENGTH_BYTES + _length(view)[0] and count <= self.limit:
            only = _decode_body(view[_LENGTH_BYTES:count])  # the usual case: exactly one complete message
            if type(only) is dict:
                messages.append(only)
                return messages
        begin, end = 0, self._end + count
        wanted = _LENGTH_BYTES
        while end - begin >= _LENGTH_BYTES:
            length = int.from_bytes(view[begin : begin + _LENGTH_BYTES], "big")
            if length > self.limit:
                self._fail(f"a message of {length:,} bytes was announced; the maximum is {self.limit:,}")
                return messages
            wanted = _LENGTH_BYTES + length
            if end - begin < wanted:
                break
            message = _decode_body(view[begin + _LENGTH_BYTES : begin + wanted])
            if isinstance(message, str):
                self._fail(message)
                return messages
            messages.append(message)
            begin += wanted
            wanted = _LENGTH_BYTES
        self._compact(begin, end, wanted)
        return messages

    def feed_bytes(self, data: bytes) -> list[Message]:
        """Copy ``data`` into the buffer, and return the completed messages like :meth:`read_messages`."""
        messages: list[Message] = []
        rest = memoryview(data)
        while len(rest) and self.fault is None:
            room = self.get_buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            messages += self.read_messages(count)
        return messages

    def _compact(self, begin: int, end: int, wanted: int) -> None:
        """Move unfinished bytes to the front, and enlarge the buffer only if it is full."""
        have = end - begin
        size = len(self._buffer)
        if not have:
            if size != BUFFER_BYTES:
                self._set_buffer(bytearray(BUFFER_BYTES))
        elif begin:
            self._buffer[:have] = self._buffer[begin:end]
        elif have == size:
            # A new buffer, because the caller may still have a view of the old one. It never extends beyond the end of this
            # message, so it is empty and released as soon as the message is complete.
            larger = bytearray(min(2 * have, wanted))
            larger[:have] = self._buffer
            self._set_buffer(larger)
        self._end = have

    def _fail(self, reason: str) -> None:
        self.fault = reason
        self._set_buffer(bytearray(1))
        self._end = 0

    def _set_buffer(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self._view = memoryview(buffer)


def _decode_body(body: memoryview) -> Message | str:
    """Return the message, or the reason why the body is invalid."""
    try:
        value: Any = json.loads(bytes(body)) if len(body) and body[0] == _BLANK else orjson.loads(body)
    except (ValueError, RecursionError) as error:
        return f"a message of {len(body):,} bytes is not JSON: {str(error)[:200]}"
    if type(value) is not dict:
        return f"a message is a JSON {type(value).__name__}; expected an object"
    return value  # pyright: ignore[reportUnknownVariableType] - a call of `cast` costs as much as the check above
