"""Arguments are validated completely, strictly and within limits."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.schema.argument_validation import (
    _ELSEWHERE,  # pyright: ignore[reportPrivateUsage] - the names in it are checked
    MAX_PROBLEMS,
    InvalidSchemaError,
    compile_schema,
    format_json_path,
)
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools import BUILTINS
from handrail.tools.files.editing_tools import EditTool, WriteTool
from handrail.tools.files.reading_and_search import GrepTool
from handrail.tools.job_tools import ReadJobTool
from handrail.tools.shell_tools import BashTool, TerminalSendTool

TRANSFER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "source": {"type": "string", "minLength": 2},
        "amount": {"type": "number", "exclusiveMinimum": 0},
        "mode": {"enum": ["now", "later"]},
        "lines": {
            "type": "array",
            "items": {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False},
        },
    },
    "required": ["source", "amount"],
}


def problems(schema: dict[str, Any], arguments: dict[str, Any]) -> list[str]:
    return compile_schema(schema).list_problems(arguments)


@pytest.mark.proves("K-05")
def test_valid_arguments_have_no_problems() -> None:
    assert problems(TRANSFER, {"source": "ab", "amount": 1.5, "mode": "now", "lines": [{"name": "x"}]}) == []


@pytest.mark.proves("K-05")
def test_all_argument_errors_are_named_together_with_path_and_type_and_expectation() -> None:
    found = problems(
        TRANSFER, {"source": 7, "mode": "soon", "lines": [{"name": 1}, {"nam": "x"}], "amuont": 3, "weird key": 1}
    )
    assert set(found) == {
        "`amount` is missing (expected number)",
        "`source`: expected string, got integer",
        "`mode`: expected one of 'now', 'later', got string of 4 characters",
        "`lines[0].name`: expected string, got integer",
        "unknown argument `lines[1].nam` (did you mean `name`?)",
        "unknown argument `amuont` (did you mean `amount`?)",
        "unknown argument `['weird key']` (available: source, amount, mode, lines)",
    }


@pytest.mark.proves("K-05")
@given(st.text(alphabet="0123456789abcdef", min_size=12).map(lambda text: f"§{text}§"))
def test_a_problem_text_never_contains_the_value(secret: str) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"enum": ["x"]},
            "c": {"pattern": "^\\d{99}$"},
            "d": {"anyOf": [{"type": "null"}, {"const": "q"}]},
            "e": {"maxLength": 3},
        },
    }
    found = problems(schema, dict.fromkeys("abcde", secret))
    assert len(found) == 5
    assert not any(secret in text for text in found)


@pytest.mark.proves("K-05")
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("integer", "5"),
        ("integer", True),
        ("integer", 5.5),
        ("number", "5"),
        ("string", 5),
        ("boolean", 1),
        ("boolean", "true"),
        ("array", "a,b"),
        ("object", "{}"),
        ("null", ""),
    ],
)
def test_a_value_of_the_wrong_type_is_not_coerced(kind: str, value: object) -> None:
    assert problems({"type": "object", "properties": {"x": {"type": kind}}}, {"x": value}) != []


@pytest.mark.proves("K-05")
def test_an_unknown_argument_is_accepted_only_where_the_schema_allows_it() -> None:
    closed: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
    assert problems(closed, {"b": 1}) == ["unknown argument `b` (available: a)"]
    assert problems({"type": "object"}, {"b": 1}) == ["unknown argument `b` (no arguments are accepted here)"]
    assert problems({**closed, "additionalProperties": True}, {"b": 1}) == []
    assert problems({**closed, "additionalProperties": {"type": "string"}}, {"b": "x"}) == []
    assert problems({**closed, "patternProperties": {"^x-": {}}}, {"x-b": 1}) == []


@pytest.mark.parametrize(
    ("tool", "name", "meant"),
    [
        (EditTool, "old_string", "old"),
        (EditTool, "newString", "new"),
        (EditTool, "file_path", "path"),
        (WriteTool, "text", "content"),
        (BashTool, "cmd", "command"),
        (BashTool, "timeout", "timeout_ms"),
        (BashTool, "run_in_background", "background"),
        (GrepTool, "regex", "pattern"),
        (ReadJobTool, "bash_id", "job_id"),
        (TerminalSendTool, "chars", "text"),
    ],
)
def test_an_argument_name_of_another_agent_is_unknown_and_gets_a_suggestion(
    tool: type[Tool], name: str, meant: str
) -> None:
    found = problems(dict(tool.spec.parameters), {name: "x"})
    assert f"unknown argument `{name}` (did you mean `{meant}`?)" in found


def test_every_argument_name_suggested_for_another_agents_name_exists_in_a_builtin() -> None:
    def names(schema: dict[str, Any]) -> Iterator[str]:
        for name, about in schema.get("properties", {}).items():
            yield name
            yield from names(about)
        if "items" in schema:
            yield from names(schema["items"])

    taken = {name for one in BUILTINS for name in names(dict(one.spec.parameters))}
    assert {meant for names in _ELSEWHERE.values() for meant in names} <= taken
    assert all(name == name.lower() and name.isalpha() for name in _ELSEWHERE), "as a name is looked up"


@pytest.mark.proves("K-05")
def test_arguments_declared_through_allof_and_refs_are_known() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "allOf": [{"$ref": "#/$defs/paging"}],
        "$defs": {"paging": {"properties": {"limit": {"type": "integer"}}}},
    }
    assert problems(schema, {"a": "x", "limit": 3}) == []
    assert problems(schema, {"limt": 3}) == ["unknown argument `limt` (available: a)"]


def test_the_declared_schema_is_not_changed_by_its_compilation() -> None:
    declared: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
    assert compile_schema(declared).parameters == {"type": "object", "properties": {"a": {}}}
    assert "additionalProperties" not in declared


def test_a_problem_text_names_every_alternative() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "a": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
                ]
            }
        },
    }
    assert problems(schema, {"a": {"x": "1"}}) == [
        "`a`: expected string or (`a.x`: expected integer, got string of 1 characters), got object"
    ]


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"const": 3}, 4, "expected 3"),
        ({"minimum": 3}, 2, "expected at least 3"),
        ({"maximum": 3}, 4, "expected at most 3"),
        ({"exclusiveMinimum": 3}, 3, "expected more than 3"),
        ({"exclusiveMaximum": 3}, 3, "expected less than 3"),
        ({"multipleOf": 3}, 4, "expected a multiple of 3"),
        ({"minLength": 3}, "a", "expected at least 3 characters"),
        ({"maxLength": 3}, "aaaa", "expected at most 3 characters, got string of 4 characters"),
        ({"minItems": 2}, [1], "expected at least 2 items, got array of 1 items"),
        ({"maxItems": 1}, [1, 2], "expected at most 1 items"),
        ({"uniqueItems": True}, [1, 1], "items that are all different"),
        ({"minProperties": 1}, {}, "expected at least 1 keys"),
        ({"maxProperties": 0}, {"a": 1}, "expected at most 0 keys"),
        ({"pattern": "^a+$"}, "b", "text that matches the pattern '^a+$'"),
        ({"propertyNames": {"maxLength": 1}}, {"ab": 1}, "keys of this form"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 1}]}, 3, "exactly one matching alternative"),
        ({"not": {"type": "string"}}, "x", "satisfies 'not'"),
        (False, "x", "expected no value"),
    ],
)
def test_each_keyword_names_the_expected_value(schema: dict[str, Any] | bool, value: object, expected: str) -> None:
    [found] = problems({"type": "object", "properties": {"x": schema}}, {"x": value})
    assert found.startswith("`x`: expected ") and ", got " in found and expected in found


@pytest.mark.parametrize(
    ("unwanted", "said"),
    [
        ({"required": ["a", "b"]}, "`a` and `b`"),
        ({"anyOf": [{"required": ["a", "c"]}, {"required": ["a", "b"]}]}, "`a` and `b`"),
    ],
)
def test_arguments_that_exclude_each_other_are_named_in_the_problem(unwanted: dict[str, Any], said: str) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "not": unwanted}
    assert problems(schema, {"a": 1, "b": 2}) == [f"the arguments: {said} exclude each other; pass only one of them"]


INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
WITH_PARTS = {
    "type": "object",
    "properties": {
        "own": INTEGER,
        "maybe": {"anyOf": [INTEGER, {"type": "null"}]},
        "either": {"type": ["integer", "string"]},
        "number": NUMBER,
        "both": {"anyOf": [INTEGER, NUMBER]},
        "many": {"type": "array", "items": INTEGER},
        "numbers": {"type": "array", "items": NUMBER},
        "nested": {"type": "object", "properties": {"n": INTEGER}},
        "referred": {"$ref": "#/$defs/row"},
    },
    "$defs": {"row": {"type": "array", "items": INTEGER}},
}


@pytest.mark.proves("K-05")
@pytest.mark.parametrize(
    ("name", "given", "becomes"),
    [
        ("own", 2.0, 2),
        ("maybe", -2.0, -2),
        ("maybe", None, None),
        ("either", 2.0, 2),
        ("own", 1e30, 10**30 + 19884624838656),
        ("number", 2.0, 2.0),
        ("both", 2.0, 2.0),
        ("many", [1.0, 2], [1, 2]),
        ("numbers", [1.0, 2.5], [1.0, 2.5]),
        ("nested", {"n": 3.0, "more": [4.0, 1e300]}, {"n": 3, "more": [4, 1e300]}),
        ("referred", [5.0], [5]),
    ],
)
def test_an_integer_with_a_decimal_point_is_converted_to_an_integer(name: str, given: Any, becomes: Any) -> None:
    schema = compile_schema(WITH_PARTS)
    arguments = {name: given, "own": 7} if name != "own" else {name: given}
    before = repr(arguments)
    assert schema.list_problems(arguments) == []
    found = schema.coerce_integers(arguments)
    assert repr(found[name]) == repr(becomes) and repr(arguments) == before


def test_arguments_without_need_for_conversion_stay_the_same_object() -> None:
    arguments = {"own": 1, "number": 1.0, "many": [1], "nested": {"n": 1, "more": 0.5}}
    assert compile_schema(WITH_PARTS).coerce_integers(arguments) is arguments


def test_integers_in_additional_properties_are_coerced() -> None:
    schema = compile_schema({"type": "object", "additionalProperties": {"type": "array", "items": INTEGER}})
    assert repr(schema.coerce_integers({"any": [1.0]})) == repr({"any": [1]})


@pytest.mark.proves("K-06")
@pytest.mark.parametrize(
    "reference", ["http://localhost:9/schema", "https://example.invalid/a.json", "file:///etc/hostname", "other.json"]
)
def test_a_reference_outside_the_schema_is_refused_at_load(reference: str) -> None:
    with pytest.raises(InvalidSchemaError, match=r"(?s)schema must be self-contained"):
        compile_schema({"type": "object", "properties": {"a": {"$ref": reference}}})


@pytest.mark.proves("K-06")
def test_a_reference_to_a_missing_definition_is_refused_at_load() -> None:
    with pytest.raises(InvalidSchemaError, match="does not exist"):
        compile_schema({"type": "object", "properties": {"a": {"$ref": "#/$defs/gone"}}})


@pytest.mark.proves("K-06")
def test_an_invalid_schema_is_refused_with_every_path_and_reason() -> None:
    with pytest.raises(InvalidSchemaError) as caught:
        compile_schema(
            {
                "type": "object",
                "properties": {"a": {"minimum": "x"}, "b": 5, "c": {"pattern": "("}, "d": {"type": "strin"}},
                "required": "a",
            }
        )
    assert {place for place, _ in caught.value.problems} == {
        "properties.a.minimum",
        "properties.b",
        "properties.c.pattern",
        "properties.d.type",
        "required",
    }


@pytest.mark.proves("K-06")
@pytest.mark.parametrize("schema", [{}, {"type": "string"}, {"type": ["object", "null"]}, {"properties": {}}])
def test_parameters_that_do_not_describe_an_object_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchemaError, match='"type": "object"'):
        compile_schema(schema)


@pytest.mark.proves("K-06")
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {1, 2}}},
        {"type": "object", "properties": {1: {}}},
        {"type": "object", "$schema": "http://example.invalid/dialect"},
        {"type": "object", "properties": {"a": {"pattern": "(((a{100}){100}){100}){100}"}}},
    ],
)
def test_an_unusable_schema_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchemaError):
        compile_schema(schema)


@pytest.mark.proves("K-06")
def test_a_schema_that_is_too_deep_or_contains_itself_is_refused() -> None:
    deep: dict[str, Any] = {"type": "object"}
    inner = deep
    for _ in range(5000):
        inner["properties"] = {"a": {}}
        inner = inner["properties"]["a"]
    with pytest.raises(InvalidSchemaError, match="deeper than 128"):
        compile_schema(deep)
    looped: dict[str, Any] = {"type": "object"}
    looped["properties"] = {"a": looped}
    with pytest.raises(InvalidSchemaError, match="contains itself"):
        compile_schema(looped)


def test_a_wide_schema_is_not_mistaken_for_a_deep_one() -> None:
    wide = {"type": "object", "properties": {f"a{n}": {"type": "string"} for n in range(200)}, "title": "[" * 200}
    for schema in (wide, MappingProxyType(wide)):
        assert compile_schema(schema).list_problems({"a7": "x"}) == []


@pytest.mark.proves("K-06")
@pytest.mark.parametrize("pattern", ["^(a+)+$", "^(a|aa)+$", "^(a|a)*$", "(x+x+)+y", "^(([a-z])+.)+[A-Z]([a-z])+$"])
def test_patterns_with_catastrophic_backtracking_elsewhere_are_matched_in_linear_time(pattern: str) -> None:
    schema = compile_schema({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})
    assert len(schema.list_problems({"a": "a" * 200_000 + "!"})) == 1


@pytest.mark.proves("K-06")
def test_a_pattern_that_cannot_be_matched_in_linear_time_stops_at_a_limit() -> None:
    schema = compile_schema({"type": "object", "properties": {"a": {"pattern": "(?=(a|b)*$)((?!x)a|b|ab)*z"}}})
    assert schema.list_problems({"a": "ab" * 500}) == [
        "`a`: the string takes too long to match against its pattern; send a simpler one"
    ]


@pytest.mark.proves("K-05")
def test_a_recursive_schema_checks_nested_arguments() -> None:
    schema = compile_schema(
        {"type": "object", "properties": {"child": {"$ref": "#"}, "n": {"type": "integer"}}, "required": ["n"]}
    )
    assert schema.list_problems({"n": 1, "child": {"n": 2}}) == []
    assert schema.list_problems({"n": 1, "child": {"n": "2"}}) == [
        "`child.n`: expected integer, got string of 1 characters"
    ]


@pytest.mark.proves("K-06")
@pytest.mark.parametrize("levels", [100, 100_000])
def test_argument_objects_have_the_same_depth_limit_as_argument_text(levels: int) -> None:
    deep: dict[str, Any] = {}
    inner = deep
    for _ in range(levels):
        inner["a"] = {}
        inner = inner["a"]
    schema = compile_schema({"type": "object", "properties": {"a": {"$ref": "#"}}})
    try:
        [found] = schema.list_problems(deep)
        assert "deeper than 64 levels" in found
    finally:
        while deep:  # one level at a time: the interpreter would recurse
            deep = deep.pop("a", {})


@pytest.mark.parametrize("value", [b"x", {1, 2}, object(), float("nan"), float("-inf"), [float("nan")], {"a": b""}])
def test_values_that_are_not_json_are_a_problem_and_not_an_exception(value: object) -> None:
    [found] = problems({"type": "object", "properties": {"a": {}}}, {"a": value})
    assert "not JSON" in found


@pytest.mark.parametrize("arguments", [{"\ud800": 1}, {"a": "x\udcff"}, {"a": ["\ud800"]}])
def test_a_lone_surrogate_is_a_problem_and_not_an_exception(arguments: dict[str, Any]) -> None:
    [found] = problems({"type": "object", "properties": {"a": {}}}, arguments)
    assert "surrogate" in found


def test_values_that_share_an_object_are_checked_like_any_other() -> None:
    shared = ["x"]
    assert problems({"type": "object", "properties": {"a": {}}}, {"a": [shared, shared], "b": 1})
    assert problems({"type": "object", "properties": {"a": {}}}, {"a": [shared, shared]}) == []


def test_the_list_of_problems_is_bounded_and_counts_the_rest() -> None:
    schema = compile_schema({"type": "object", "properties": {"a": {"items": {"type": "string"}}}})
    found = schema.list_problems({"a": list(range(500))})
    assert len(found) == MAX_PROBLEMS + 1
    assert found[-1] == f"{500 - MAX_PROBLEMS} more problems"


def test_a_huge_wrong_argument_is_named_without_a_full_list_of_problems() -> None:
    schema = compile_schema({"type": "object", "properties": {"a": {"items": {"type": "string"}}, "b": {}}})
    assert schema.list_problems({"a": [1] * 40_000, "b": [1] * 40_000}) == [
        "`a`: the array of 40000 items does not match its schema, and it is too large to list every problem; "
        "send it in smaller parts"
    ]


@pytest.mark.parametrize(
    "dialect",
    [
        "http://json-schema.org/draft-04/schema#",
        "http://json-schema.org/draft-07/schema#",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    ],
)
def test_the_dialect_named_by_a_schema_is_used(dialect: str) -> None:
    schema = {"$schema": dialect, "type": "object", "properties": {"a": {"type": "string"}}}
    assert set(problems(schema, {"a": 1, "b": 2})) == {
        "unknown argument `b` (available: a)",
        "`a`: expected string, got integer",
    }
    with pytest.raises(InvalidSchemaError):
        compile_schema({**schema, "required": 3})


@given(st.lists(st.one_of(st.integers(0, 9), st.text(max_size=100)), max_size=5))
def test_a_formatted_json_path_is_always_printable(path: list[int | str]) -> None:
    assert format_json_path(path).isprintable()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.proves("K-05")
@given(st.dictionaries(st.sampled_from(["source", "amount", "mode", "lines", "other"]), json_values))
def test_any_json_arguments_are_checked_without_an_exception(arguments: dict[str, Any]) -> None:
    found = problems(TRANSFER, arguments)
    fits = (
        isinstance(arguments.get("source"), str)
        and len(arguments["source"]) >= 2
        and isinstance(arguments.get("amount"), (int, float))
        and not isinstance(arguments["amount"], bool)
        and arguments["amount"] > 0
        and "other" not in arguments
        and arguments.get("mode", "now") in ("now", "later")
        and isinstance(arguments.get("lines", []), list)
        and all(
            isinstance(line, dict) and not set(line) - {"name"} and isinstance(line.get("name", ""), str)  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
            for line in arguments.get("lines", [])
        )
    )
    assert (found == []) == fits
