"""Values between two processes: they arrive unchanged, and unsupported ones are reported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail import ToolError
from handrail.arbiter.output.json_conversion import JsonConversion
from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.json_codec import MalformedDataError, expect_json_object, reader_of
from handrail.ipc.codec.tool_value_encoding import (
    decode_return_value,
    decode_tool_error,
    encode_return_value,
    encode_tool_error,
)
from handrail.ipc.wire.message_frames import FrameReceiveBuffer, encode_frame


@dataclasses.dataclass(frozen=True)
class Point:
    x: object
    y: object


def over_the_wire(message: dict[str, Any]) -> Any:
    """As the other side has it."""
    (arrived,) = FrameReceiveBuffer().feed_bytes(encode_frame({"body": message}))
    return arrived["body"]


def convert_value(value: object) -> tuple[Any, list[tuple[bytes, str]], list[str]]:
    plain = JsonConversion(value)
    return plain.data, [(binary.data, binary.media_type) for binary in plain.binaries], plain.notes


_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**64)
    | st.floats()
    | st.text(st.characters(codec=None, exclude_categories=()))
    | st.binary(max_size=20)
    | st.builds(Blob, st.binary(max_size=20), st.sampled_from(["image/png", "text/plain; charset=x", "no type"]))
)
_keys = st.text(max_size=8) | st.sampled_from(["$bytes", "$blob", "artifact", "data", "blobs", "error", ""])
_values = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(_keys | st.integers(), inner, max_size=4)
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=3)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=20,
)


@given(_values)
def test_a_return_value_arrives_as_it_would_appear_in_its_own_process(value: object) -> None:
    data, binaries, notes = convert_value(value)
    arrived = decode_return_value(over_the_wire(encode_return_value(value)))
    adapted: list[str] = []
    if isinstance(arrived, Result):
        adapted = arrived.metadata["conversions"]
        arrived = arrived.data
    data_there, binaries_there, notes_there = convert_value(arrived)
    assert data_there == data
    assert binaries_there == binaries
    assert adapted[:5] == notes
    assert notes_there == []


@given(_values, st.none() | st.text(), st.dictionaries(st.text(), _scalars, max_size=3))
def test_a_result_object_arrives_with_its_text_and_metadata(
    value: object, text: str | None, more: dict[str, Any]
) -> None:
    sent = Result("output" if text is None else "error", value, text, more)
    arrived = decode_return_value(over_the_wire(encode_return_value(sent)))
    assert isinstance(arrived, Result)
    assert (arrived.type, arrived.error_text) == (sent.type, text)
    assert convert_value(arrived.data)[0] == convert_value(value)[0]
    adapted = {"conversions": convert_value(value)[2]} if convert_value(value)[2] else {}
    expected = {**convert_value(more)[0], **adapted}
    assert {key: arrived.metadata[key] for key in expected if key != "conversions"} == {
        key: item for key, item in expected.items() if key != "conversions"
    }


@given(st.text(), _values)
def test_a_tool_error_is_raised_with_its_kind_text_and_data(text: str, data: object) -> None:
    raised = decode_tool_error(over_the_wire(encode_tool_error(ToolError(text, kind="conflict", data=data))))
    assert isinstance(raised, ToolError)
    assert (raised.text, raised.kind) == (text, "conflict")
    assert convert_value(raised.data)[:2] == convert_value(data)[:2]


def test_any_other_exception_keeps_only_its_class_name_and_text() -> None:
    raised = decode_tool_error(over_the_wire(encode_tool_error(ZeroDivisionError("by zero"))))
    assert type(raised).__name__ == "ZeroDivisionError"
    assert str(raised) == "by zero"
    assert not isinstance(raised, ZeroDivisionError)


def test_a_peer_exception_never_becomes_a_tool_error_or_ends_the_process() -> None:
    for name in ("SystemExit", "KeyboardInterrupt", "CancelledError", "__import__('os')", "ToolError", ""):
        raised = decode_tool_error({"raised": [name, "x"]})
        assert isinstance(raised, Exception)
        assert not isinstance(raised, ToolError)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
_messages = st.fixed_dictionaries(
    {},
    optional={
        "data": _json,
        "blobs": _json | st.lists(st.tuples(_json, _json, _json).map(list), max_size=3),
        "notes": _json,
        "result": _json
        | st.fixed_dictionaries({"type": st.sampled_from(["output", "error"])}, optional={"metadata": _json}),
        "error": _json | st.fixed_dictionaries({"kind": _json, "text": _json}),
        "raised": _json | st.lists(_json, max_size=3),
    },
)


@given(_json | _messages)
def test_any_peer_message_is_decoded_or_refused_as_malformed(message: Any) -> None:
    readers: list[Callable[[Any], object]] = [
        decode_return_value,
        reader_of(bytes),
        lambda sent: decode_tool_error(expect_json_object(sent)),
    ]
    for read in readers:
        try:
            read(message)
        except MalformedDataError as error:
            assert str(error)


def test_a_binary_part_is_placed_only_at_an_existing_path() -> None:
    nothing: list[Any] = [None]
    part: list[Any] = [{"$bytes": "aGk="}, "image/png"]
    ways: list[Any] = [["a", "b"], [0], ["a", 1], [True], ["missing"], "a", [["a"]], ["a", 0, "c"]]
    for way in ways:
        with pytest.raises(MalformedDataError):
            decode_return_value({"data": {"a": [None]}, "blobs": [[way, *part]]})
    assert decode_return_value({"data": {"a": nothing}, "blobs": [[["a", 0], *part]]}) == {
        "a": [Blob(b"hi", "image/png")]
    }
    assert decode_return_value({"data": None, "blobs": [[nothing[1:], *part]]}) == Blob(b"hi", "image/png")


def test_numbers_without_a_json_form_arrive_as_text_with_a_noted_conversion() -> None:
    arrived = decode_return_value(over_the_wire(encode_return_value({"x": math.nan})))
    assert isinstance(arrived, Result)
    assert arrived.data == {"x": "NaN"}
    assert "NaN" in arrived.metadata["conversions"][0]
