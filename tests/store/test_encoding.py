"""Any value becomes JSON: exactly if JSON can express it, otherwise marked."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_every_json_value_is_encoded_and_decoded_unchanged(value: Any) -> None:
    assert decode_json_with_fallback(encode_json_with_fallback(value)) == value


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text of me")


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cycle() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"\xff\x00", {"$bytes": "/wA="}),
        (math.nan, None),
        ([math.inf, "\ud800"], [None, "\ud800"]),
        ({1: "a", "\udfff": 2}, {"1": "a", "\udfff": 2}),
        ({"n": 10**30, "raw": orjson.Fragment(b'{"a":[1]}')}, {"n": 10**30, "raw": {"a": [1]}}),
        ({"x"}, ["x"]),
        (Broken(), {"$object": "Broken", "text": "<Broken: RuntimeError>"}),
        ({"\ud800": Broken()}, {"\ud800": {"$object": "Broken", "text": "<Broken: RuntimeError>"}}),
    ],
)
def test_values_that_json_cannot_represent_are_encoded_in_a_marked_form(value: Any, expected: Any) -> None:
    assert decode_json_with_fallback(encode_json_with_fallback(value)) == expected


@pytest.mark.parametrize("value", [nested(100_000), cycle(), {"n": 10**50_000}])
def test_depth_cycles_and_giant_numbers_never_prevent_a_record(value: Any) -> None:
    encoded = encode_json_with_fallback({"kept": 1, "hostile": value})
    assert decode_json_with_fallback(encoded)["kept"] == 1
    assert json.loads(encoded)["hostile"] is not None


def test_an_oversized_value_keeps_its_length_and_beginning() -> None:
    kept = decode_json_with_fallback(encode_json_with_fallback({"text": "ä" * 1000}, max_bytes=400))
    assert kept["$oversized"] > 2000 and kept["head"].startswith('{"text":"ää')
