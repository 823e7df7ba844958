"""Each return value becomes plain JSON, and the metadata lists the conversions."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import math
import pathlib
import uuid
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from handrail.arbiter.output.json_conversion import JsonConversion, ValueTooLarge, encode_if_plain_json
from handrail.contract.calls_and_results import Blob, Result

pytestmark = pytest.mark.proves("K-07")


class Colour(enum.Enum):
    RED = "red"
    NONE = None


class Level(enum.IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Inner:
    names: set[str]
    when: datetime.date


class Model(BaseModel):
    inner: Inner
    password: SecretStr = SecretStr("hunter2")
    tags: tuple[str, ...] = ()


class Text(str):
    __slots__ = ()


class Breaks:
    @property
    def nothing(self) -> None: ...

    def __str__(self) -> str:
        raise RuntimeError("no")


class BrokenMapping(collections.UserDict[str, int]):
    def items(self) -> Any:
        raise OSError("gone")


@dataclasses.dataclass
class BrokenField:
    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            raise ValueError("no")
        return super().__getattribute__(name)

    value: int = 1


SAYABLE: list[tuple[Any, Any]] = [
    (None, None),
    ({"a": [1, 2.5, True, None, "é"]}, {"a": [1, 2.5, True, None, "é"]}),
    ((1, (2,)), [1, [2]]),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset({"b", "a"}), ["a", "b"]),
    (collections.deque([1, 2]), [1, 2]),
    (range(3), [0, 1, 2]),
    ({"a": 1}.keys(), ["a"]),
    (MappingProxyType({"a": 1}), {"a": 1}),
    (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    (Point(1, 2), {"x": 1, "y": 2}),
    (Colour.RED, "red"),
    (Colour.NONE, None),
    (Level.HIGH, 3),
    (Text("sub"), "sub"),
    (datetime.datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"),
    (datetime.timedelta(seconds=90), "0:01:30"),
    (decimal.Decimal("1.10"), "1.10"),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (pathlib.PurePosixPath("a/b"), "a/b"),
    (ValueError("wrong"), "ValueError: wrong"),
    (
        {1: "a", None: "b", False: "c", 2.5: "d", (1, 2): "e"},
        {"1": "a", "null": "b", "false": "c", "2.5": "d", "(1, 2)": "e"},
    ),
    (Inner({"b", "a"}, datetime.date(2026, 1, 2)), {"names": ["a", "b"], "when": "2026-01-02"}),
    (
        Model(inner=Inner({"a"}, datetime.date(2026, 1, 2)), tags=("x",)),
        {"inner": {"names": ["a"], "when": "2026-01-02"}, "password": "**********", "tags": ["x"]},
    ),
    (
        [Result.error("failed", "no", n=1)],
        [{"type": "error", "error_text": "no", "metadata": {"n": 1, "error_kind": "failed"}}],
    ),
]


@pytest.mark.parametrize(("value", "plain"), SAYABLE)
def test_values_with_a_json_form_are_converted_to_it(value: object, plain: object) -> None:
    made = JsonConversion(value)
    assert made.data == plain
    assert not made.binaries
    assert orjson.loads(orjson.dumps(made.data)) == plain


@pytest.mark.parametrize(
    ("value", "plain", "note"),
    [
        ({"a": [math.nan]}, {"a": ["NaN"]}, ".a[0] is NaN"),
        (-math.inf, "-Infinity", "the output is -Infinity"),
        (2**64, "18446744073709551616", "64 bits"),
        (-(2**63) - 1, "-9223372036854775809", "64 bits"),
        ("a\udc80b", "a\\udc80b", "not valid Unicode"),
        ({"k\udc80": 1}, {"k\\udc80": 1}, "not valid Unicode"),
        ({1: "a", "1": "b"}, {"1": "a", "1 (2)": "b"}, "two keys have the same text"),
        (Breaks(), "<Breaks>", "a Breaks cannot be read (RuntimeError)"),
        ([BrokenMapping()], ["<BrokenMapping>"], "[0] a BrokenMapping cannot be read (OSError)"),
        ({"a": BrokenField()}, {"a": "<BrokenField>"}, ".a a BrokenField cannot be read (ValueError)"),
    ],
)
def test_values_without_a_json_form_become_text_with_a_note(value: object, plain: object, note: str) -> None:
    made = JsonConversion(value)
    assert made.data == plain
    assert len(made.notes) == 1 and note in made.notes[0]
    json.dumps(made.data, allow_nan=False).encode()


def test_a_very_large_integer_becomes_hexadecimal() -> None:
    assert JsonConversion(1 << 20_000).data == hex(1 << 20_000)


def test_a_cycle_is_cut_and_the_depth_is_limited() -> None:
    ring: dict[str, Any] = {"a": []}
    ring["a"].append(ring)
    assert JsonConversion(ring).data == {"a": ["<cycle>"]}
    shared = [1]
    assert JsonConversion([shared, shared]).data == [[1], [1]], "twice is no cycle"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    made = JsonConversion(deep)
    assert orjson.dumps(made.data).count(b"[") == 100
    assert "deeper than 100" in made.notes[0]


def test_an_iterator_is_not_consumed() -> None:
    endless = iter(int, 1)
    made = JsonConversion({"stream": endless})
    assert made.data["stream"].startswith("<callable_iterator")
    with pytest.raises(ValueTooLarge):
        JsonConversion(range(10**18), 1000)


def test_notes_beyond_the_limit_are_only_counted() -> None:
    made = JsonConversion([math.nan] * 8)
    assert len(made.notes) == 5 and made.more_notes == 3


def test_binary_parts_are_replaced_by_placeholders() -> None:
    made = JsonConversion(
        {"image": Blob(b"\x89PNG", "image/png"), "raw": [b"ab", bytearray(b"cd")], "odd": Blob(b"", "a\nb")}
    )
    assert made.data["image"] == {"artifact": None, "media_type": "image/png", "bytes": 4}
    assert [(part.data, part.media_type) for part in made.binaries] == [
        (b"\x89PNG", "image/png"),
        (b"ab", "application/octet-stream"),
        (b"cd", "application/octet-stream"),
        (b"", "application/octet-stream"),
    ]
    assert made.binaries[0].placeholder is made.data["image"]


def test_the_text_size_and_the_number_of_parts_are_limited() -> None:
    JsonConversion(["x" * 200] * 9, 10)
    for value in (["x"] * 10, "x" * 256 * 11):
        with pytest.raises(ValueTooLarge):
            JsonConversion(value, 10)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.dates()
    | st.decimals()
    | st.builds(object),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner)
        | st.dictionaries(st.text(st.characters(codec=None)) | st.integers() | st.floats() | st.none(), inner)
    ),
    max_leaves=20,
)


@given(anything)
def test_any_value_becomes_json_that_orjson_and_json_read_equally(value: object) -> None:
    data = JsonConversion(value).data
    assert orjson.loads(orjson.dumps(data)) == data == json.loads(json.dumps(data, allow_nan=False))


@given(anything)
def test_a_value_encoded_as_plain_json_needs_no_conversion(value: object) -> None:
    encoded = encode_if_plain_json(value)
    if encoded is not None:
        made = JsonConversion(value)
        assert orjson.loads(encoded) == made.data and not made.notes and not made.binaries
