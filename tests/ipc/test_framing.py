"""Frames: any split gives the same messages, nothing raises, and memory is bounded by the input."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.ipc.wire import message_frames
from handrail.ipc.wire.message_frames import BUFFER_BYTES, MAX_FRAME, FrameReceiveBuffer, FrameTooLong, encode_frame

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(st.dictionaries(st.text(max_size=8), JSON, max_size=4), max_size=8)


@st.composite
def pieces(draw: st.DrawFn, data: bytes) -> list[bytes]:
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=20)))
    return [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def receive_frames(parts: list[bytes], limit: int = MAX_FRAME) -> tuple[list[dict[str, Any]], bool]:
    inbox = FrameReceiveBuffer(limit)
    messages = [message for part in parts for message in inbox.feed_bytes(part)]
    return messages, inbox.fault is not None


@given(MESSAGES, st.data())
def test_messages_are_decoded_unchanged_however_the_bytes_are_split(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    stream = b"".join(encode_frame(message) for message in messages)
    assert receive_frames(data.draw(pieces(stream))) == (messages, False)


@given(MESSAGES, st.binary(max_size=200), MESSAGES, st.data())
def test_garbage_ends_reading_at_the_same_place_for_any_split_of_the_stream(
    before: list[dict[str, Any]], garbage: bytes, after: list[dict[str, Any]], data: st.DataObject
) -> None:
    stream = b"".join(map(encode_frame, before)) + garbage + b"".join(map(encode_frame, after))
    whole = receive_frames([stream])
    assert whole[0][: len(before)] == before
    assert receive_frames(data.draw(pieces(stream))) == whole


@given(st.binary(min_size=4, max_size=64))
def test_only_a_complete_frame_with_an_object_is_a_message(data: bytes) -> None:
    messages, fault = receive_frames([data])
    length = int.from_bytes(data[:4], "big")
    assert fault or len(data) < 4 + length or messages
    assert not (length > MAX_FRAME and not fault)


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b'{"hello": {}}\n',
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\0\0\x02[]",
        b"\0\0\0\x04null",
        b"\0\0\0\x02{]",
        b"\0\0\0\x02\xff\xfe",
        b"\0\x01\x00\x00" + b"[" * 65_536,
        b"\0\x01\x00\x00" + b" " + b"[" * 65_535,
        b"\0\0\x13\x88" + b" " + b"9" * 4_999,
    ],
)
def test_an_invalid_message_sets_a_fault_with_a_reason(stream: bytes) -> None:
    inbox = FrameReceiveBuffer()
    assert inbox.feed_bytes(stream) == []
    assert inbox.fault
    assert inbox.feed_bytes(encode_frame({"id": 1})) == []


def test_an_announced_frame_length_allocates_no_memory() -> None:
    inbox = FrameReceiveBuffer()
    assert inbox.feed_bytes(MAX_FRAME.to_bytes(4, "big") + b"{") == []
    assert inbox.fault is None
    assert inbox.buffer_size == BUFFER_BYTES
    assert inbox.pending_byte_count == 5


def test_a_long_message_uses_at_most_twice_the_received_bytes_and_frees_its_buffer() -> None:
    message = {"text": "x" * (3 * 1024 * 1024)}
    stream = encode_frame(message) + encode_frame({"next": 1})
    inbox = FrameReceiveBuffer()
    came: list[Any] = []
    for begin in range(0, len(stream), 10_000):
        came += inbox.feed_bytes(stream[begin : begin + 10_000])
        assert inbox.buffer_size <= max(BUFFER_BYTES, 2 * (begin + 10_000))
    assert came == [message, {"next": 1}]
    assert inbox.buffer_size == BUFFER_BYTES


def test_messages_that_orjson_cannot_encode_arrive_unchanged() -> None:
    message = {"half": "\ud800", "long": 2**200, "plain": 1}
    assert receive_frames([encode_frame(message)]) == ([message], False)


def test_a_message_over_the_size_limit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_frames, "MAX_FRAME", 100)
    with pytest.raises(FrameTooLong, match="111 bytes; the maximum is 100"):
        encode_frame({"text": "x" * 100})
