"""The fast path for arguments accepts only what the full validation reads in the same way."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from handrail.contract.text.strict_json import (
    MAX_ARGUMENT_DEPTH,
    InvalidJsonTextError,
    PreparsedArgumentText,
    parse_arguments,
    parse_arguments_fast,
    try_parse_model_json_fast,
)

values: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.proves("K-05")
@given(
    st.dictionaries(st.text(max_size=6), values, max_size=4),
    st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]),
)
@example({"a": ", ", "b": '": '}, (", ", ": "))
@example({"a": "x, ", "b": 1}, (", ", ": "))
@example({"a": 2**64, "b": -(2**63) - 1}, (",", ":"))
@example({"a": -0.0, "b": 1e300}, (",", ":"))
def test_the_fast_argument_parser_agrees_with_the_full_parser(value: dict[str, Any], marks: tuple[str, str]) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=marks)
    quick = try_parse_model_json_fast(text)
    if quick is None:
        return
    assert quick[0] == parse_arguments(text)
    assert json.dumps(quick[0]) == json.dumps(parse_arguments(text))  # 1 and 1.0 are equal, and not the same
    assert orjson.loads(quick[1]) == quick[0]


@pytest.mark.proves("K-05")
@pytest.mark.parametrize(
    "text", ['{"a":1,"b":"x"}', '{"a": 1, "b": "x\\n\\"y\\""}', '{"path": "ä/ö", "n": [1, 2.5, null]}']
)
def test_common_json_from_models_takes_the_fast_parser(text: str) -> None:
    parsed = try_parse_model_json_fast(text)
    assert (parsed is not None) == ("[1, 2.5" not in text), "a list with blanks is read carefully"


@pytest.mark.proves("K-05")
@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 1}',
        '{"a":1,"\\u0061":1}',
        '{"a": {"b": 1, "b": 2}}',
        '{"a": NaN}',
        '{"a": 1e400}',
        '{"a": 18446744073709551616}',
        '{"a": "\\ud800"}',
        '{"a":' + "[" * MAX_ARGUMENT_DEPTH + "]" * MAX_ARGUMENT_DEPTH + "}",
        "[1]",
        '"text"',
        "",
        "{",
        '{"a":1}{',
    ],
)
def test_unusual_json_is_left_to_the_full_parser(text: str) -> None:
    assert try_parse_model_json_fast(text) is None
    assert try_parse_model_json_fast(text.encode()) is None


def test_the_fast_parser_declines_bytes_that_are_not_text() -> None:
    assert try_parse_model_json_fast(b'{"a":"\xff"}') is None


@pytest.mark.proves("K-05")
@given(
    st.dictionaries(st.text(max_size=6), values, max_size=4),
    st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]),
)
@example({"a": {"b": [1]}, "c": 2**70}, (" , ", " : "))
def test_parsed_arguments_read_the_same_as_their_text(value: dict[str, Any], marks: tuple[str, str]) -> None:
    text = json.dumps(value, separators=marks)
    read = PreparsedArgumentText.parse(text)
    assert read == text and PreparsedArgumentText.parse(read) == text
    assert (
        json.dumps(parse_arguments(read)) == json.dumps(parse_arguments_fast(read)) == json.dumps(parse_arguments(text))
    )
    assert try_parse_model_json_fast(read) == try_parse_model_json_fast(text)


@pytest.mark.proves("K-05")
@pytest.mark.parametrize("text", ['{"a":{"b":[1]}}', '{"a" : {"b" : [1]}}', '{"a":1}', ""])
def test_a_reader_that_changes_its_arguments_does_not_affect_other_readers(text: str) -> None:
    read = PreparsedArgumentText.parse(text)
    mine = parse_arguments(read)
    mine.setdefault("a", {})
    if isinstance(mine["a"], dict):
        mine["a"]["more"] = True
    mine["c"] = 1
    assert parse_arguments(read) == parse_arguments_fast(read) == parse_arguments(text)


def test_invalid_json_text_never_becomes_parsed_arguments() -> None:
    with pytest.raises(InvalidJsonTextError, match="duplicate keys"):
        PreparsedArgumentText.parse('{"a": 1, "a": 2}')
