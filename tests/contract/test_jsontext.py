"""Arguments as text: strict, bounded JSON from any model or shell."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.text.strict_json import (
    MAX_ARGUMENT_BYTES,
    MAX_ARGUMENT_DEPTH,
    MAX_ARGUMENT_VALUES,
    InvalidJsonTextError,
    check_nesting_depth,
    find_arguments_size_fault,
    get_json_type_name,
    parse_arguments,
    parse_json_object,
)


def refused(text: str | bytes) -> str:
    with pytest.raises(InvalidJsonTextError) as caught:
        parse_arguments(text)
    return str(caught.value)


@pytest.mark.proves("K-05")
@pytest.mark.parametrize("text", ["", "  \n", b""])
def test_empty_text_is_parsed_as_a_call_without_arguments(text: str | bytes) -> None:
    assert parse_arguments(text) == {}


@pytest.mark.parametrize("text", ["", " "])
def test_empty_text_is_refused_where_an_object_is_required(text: str) -> None:
    with pytest.raises(InvalidJsonTextError):
        parse_json_object(text)


@pytest.mark.proves("K-05")
@pytest.mark.parametrize("text", ["{", "{'a': 1}", '{"a": 1,}', "nonsense", '{"a": tru}', '{"a": 1} {"b": 2}'])
def test_invalid_json_is_refused_with_its_position(text: str) -> None:
    assert "not JSON" in refused(text) and "line 1, column" in refused(text)


@pytest.mark.proves("K-05")
@pytest.mark.parametrize(
    ("text", "kind"), [("[1]", "array"), ('"x"', "string"), ("3", "integer"), ("1.5", "number"), ("null", "null")]
)
def test_arguments_that_are_not_an_object_are_refused_with_their_type(text: str, kind: str) -> None:
    assert f"a JSON {kind}" in refused(text)


@pytest.mark.proves("K-05")
def test_arguments_of_a_hundred_megabytes_are_refused_with_their_size() -> None:
    text = b'{"a":"' + b"x" * 100_000_000 + b'"}'
    assert "100,000,008 bytes" in refused(text)


def test_arguments_at_the_size_limit_are_accepted() -> None:
    text = '{"a":"' + "[" * (MAX_ARGUMENT_BYTES - 8) + '"}'
    assert len(parse_arguments(text)["a"]) == MAX_ARGUMENT_BYTES - 8


@pytest.mark.proves("K-05")
@pytest.mark.parametrize(
    "text",
    [
        "[" * 10_000 + "]" * 10_000,
        "[" * 10_000,
        '{"a":' * 10_000 + "1" + "}" * 10_000,
        '{"a":[' * 5_000 + "]}" * 5_000,
        '{"a":[[],' + "[" * 10_000 + "1" + "]" * 10_000 + "]}",
        '{"a":"\\"",' + '"b":[' * 100 + "]" * 100 + "}",
    ],
)
def test_arguments_with_ten_thousand_levels_are_refused(text: str) -> None:
    assert f"deeper than {MAX_ARGUMENT_DEPTH} levels" in refused(text)


def test_arguments_at_the_depth_limit_are_accepted_and_one_level_more_is_refused() -> None:
    for level in (MAX_ARGUMENT_DEPTH, MAX_ARGUMENT_DEPTH + 1):
        text = '{"a":' + "[" * (level - 1) + "]" * (level - 1) + "}"
        if level == MAX_ARGUMENT_DEPTH:
            assert parse_arguments(text)
        else:
            assert "deeper" in refused(text)


def test_brackets_inside_strings_do_not_count_as_nesting() -> None:
    text = json.dumps({"code": "[{" * 5_000 + '\\"' * 100 + "[[" * 100})
    assert parse_arguments(text) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    ['"' + '\\"' * 500_000, '{"[' + '\\"[' * 300_000 + "\\", "[}" * 500_000, '"[' * 500_000, "]" * 65 + "[" * 65],
)
def test_malformed_text_is_refused_in_linear_time(text: str) -> None:
    refused(text)


@pytest.mark.proves("K-05")
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_outside_the_json_standard_are_refused(number: str) -> None:
    assert number in refused(f'{{"a": [{number}]}}')


def test_an_integer_with_too_many_digits_is_refused() -> None:
    assert "cannot be read" in refused('{"a": ' + "9" * 5_000 + "}")


@pytest.mark.proves("K-05")
def test_duplicate_keys_are_refused_at_any_depth() -> None:
    assert "duplicate keys in one object: 'a'" in refused('{"a": 1, "a": 2}')
    assert "duplicate keys in one object: 'b'" in refused('{"a": [{"b": 1, "c": 1, "b": 1}]}')
    assert "duplicate keys in one object: 'a'" in refused('{"a": 1, "\\u0061": 2}')


@pytest.mark.proves("K-05")
@pytest.mark.parametrize(
    "text", ['{"a": "\\ud800"}', '{"a": "\\uDC00 x"}', '{"\\ud800": 1}', '{"a": "\ud800"}', '{"a": ["\\udfff\\ud800"]}']
)
def test_a_lone_surrogate_is_refused(text: str) -> None:
    assert "surrogate" in refused(text)


def test_a_surrogate_pair_is_read_as_one_character() -> None:
    assert parse_arguments('{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.proves("K-05")
def test_bytes_that_are_not_utf8_are_refused_with_their_position() -> None:
    assert "not UTF-8 (byte 6)" in refused(b'{"a":"\xff"}')


def test_an_error_message_names_the_text_that_was_parsed() -> None:
    with pytest.raises(InvalidJsonTextError, match=r"\Athe contents of x are nested deeper"):
        parse_json_object("[" * 99, what="the contents of x")


json_objects = st.dictionaries(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    ),
)


@given(json_objects, st.booleans())
def test_every_json_object_is_parsed_to_the_value_it_was_written_from(value: dict[str, Any], ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_arguments(text) == value
    assert parse_arguments(text.encode()) == value


@given(st.text(alphabet='[]{}",:\\ a1\n') | st.text())
def test_the_argument_parser_raises_only_invalid_json_text(text: str) -> None:
    try:
        value = parse_arguments(text)
    except InvalidJsonTextError as error:
        assert str(error).startswith("the arguments ")
    else:
        assert value == (json.loads(text) if text.strip() else {})


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, "null"),
        (True, "boolean"),
        (1, "integer"),
        (1.5, "number"),
        ("", "string"),
        ([], "array"),
        ((), "array"),
        ({}, "object"),
        (b"", "bytes"),
    ],
)
def test_values_have_json_type_names(value: object, name: str) -> None:
    assert get_json_type_name(value) == name


def test_arguments_with_too_many_values_for_a_call_are_refused() -> None:
    whole = ",".join(["1"] * (MAX_ARGUMENT_VALUES - 2))
    assert len(parse_arguments(f'{{"a":[{whole}]}}')["a"]) == MAX_ARGUMENT_VALUES - 2
    for more in (f'{{"a":[{whole},1,1,1]}}', '{"a":[' + "{}," * MAX_ARGUMENT_VALUES + "1]}"):
        with pytest.raises(InvalidJsonTextError, match="more than 20,000 values"):
            parse_arguments(more)
    given = {"a": [{"b": 1}] * (MAX_ARGUMENT_VALUES // 2)}
    assert "more than 20,000 values" in (find_arguments_size_fault(given) or "")
    assert find_arguments_size_fault({"a": [{"b": 1}] * 100}) is None
    assert "more than" in (find_arguments_size_fault({"a": ["x" * MAX_ARGUMENT_BYTES, "y"]}) or "")


def test_commas_and_brackets_inside_strings_do_not_count_as_values() -> None:
    assert parse_arguments('{"a":"' + ",[{" * 50_000 + '"}') == {"a": ",[{" * 50_000}
    assert parse_arguments('{"a":"' + '\\",[' * 50_000 + '"}') == {"a": '",[' * 50_000}


@given(
    st.recursive(
        st.text(alphabet='a[{"\\', max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="b]", max_size=2), inner, max_size=3)
        ),
    ),
    st.integers(0, 6),
)
def test_the_depth_check_of_a_text_agrees_with_the_depth_of_its_value(value: Any, limit: int) -> None:
    def depth(part: Any) -> int:
        if not isinstance(part, (dict, list)):
            return 0
        inner = cast("Collection[Any]", part.values() if isinstance(part, dict) else part)
        return 1 + max(map(depth, inner), default=0)

    text = json.dumps(value)
    if depth(value) <= limit:
        check_nesting_depth(text, limit)
    else:
        with pytest.raises(InvalidJsonTextError, match="nested deeper"):
            check_nesting_depth(text, limit)
