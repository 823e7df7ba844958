"""Cost limits of schema checks: an estimate refuses a slow check before it starts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from handrail.contract.schema.argument_validation import MAX_SCHEMA_BYTES, InvalidSchemaError, compile_schema
from handrail.contract.schema.schema_check_cost import (
    CHECK_BUDGET,
    LIST_BUDGET,
    MAX_COUNTED,
    MAX_VALUES,
    SchemaCheckCost,
    estimate_regex_state_count,
)

pytestmark = pytest.mark.proves("K-06")

EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
"""As a widespread library of schemas writes it, with look-around."""
AGAIN: dict[str, Any] = {"$ref": "#/$defs/n"}
CHILD: dict[str, Any] = {"type": "object", "properties": {"c": AGAIN}, "required": ["c"]}


def of(x: Any, **beside: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": x}, **beside}


def recursive(n: dict[str, Any]) -> dict[str, Any]:
    return of(AGAIN, **{"$defs": {"n": n}})


def nested(levels: int, leaf: object, key: str = "c") -> dict[str, Any]:
    for _ in range(levels):
        leaf = {key: leaf}
    return {"x": leaf}


RECURSIVE: dict[str, dict[str, Any]] = {
    "oneOf": {"oneOf": [CHILD, CHILD, {"type": "string"}]},
    "anyOf": {"anyOf": [CHILD, CHILD, {"type": "string"}]},
    "allOf": {"type": ["object", "string"], "allOf": [{"properties": {"c": AGAIN}}] * 2},
    "if": {"type": ["object", "string"], "if": CHILD, "then": CHILD, "else": {"type": "string"}},
    "not": {"type": ["object", "string"], "not": {"not": CHILD}, "properties": {"c": AGAIN}},
    "dependentSchemas": {
        "type": ["object", "string"],
        "dependentSchemas": {"c": {"properties": {"c": AGAIN}}},
        "properties": {"c": AGAIN},
    },
    "patternProperties": {"type": ["object", "string"], "patternProperties": {"^c": AGAIN, "c$": AGAIN, "^.$": AGAIN}},
    "unevaluatedProperties": {
        "type": ["object", "string"],
        "anyOf": [CHILD, {"properties": {"d": AGAIN}}],
        "unevaluatedProperties": AGAIN,
    },
    "mutual": {"anyOf": [{**CHILD, "properties": {"c": {"oneOf": [CHILD, AGAIN]}}}, CHILD, {"type": "string"}]},
}


@pytest.mark.parametrize("name", RECURSIVE)
@pytest.mark.parametrize("levels", [3, 16, 60])
def test_a_wrong_leaf_deep_in_branches_is_reported_in_a_short_text(name: str, levels: int) -> None:
    found = compile_schema(recursive(RECURSIVE[name])).list_problems(nested(levels, 1))
    assert found
    assert all("`x" in text for text in found)
    assert sum(map(len, found)) < 20_000


@pytest.mark.parametrize("name", [name for name in RECURSIVE if name not in ("oneOf", "if", "mutual", "not")])
def test_deep_arguments_that_match_a_recursive_schema_are_accepted(name: str) -> None:
    assert compile_schema(recursive(RECURSIVE[name])).list_problems(nested(60, "leaf")) == []


def test_a_dynamic_reference_counts_towards_the_check_cost() -> None:
    again = {"$dynamicRef": "#n"}
    branch = {"type": "object", "properties": {"c": again}, "required": ["c"]}
    schema = of(
        {"$ref": "urn:example:n"},
        **{
            "$defs": {
                "n": {"$id": "urn:example:n", "$dynamicAnchor": "n", "anyOf": [branch, branch, {"type": "string"}]}
            }
        },
    )
    [found] = compile_schema(schema).list_problems(nested(40, 1))
    assert found.startswith("`x`: the object does not match its schema, and it is too large to list every problem")


def test_a_recursive_reference_of_draft_2019_09_counts_towards_the_check_cost() -> None:
    branch = {"type": "object", "properties": {"x": {"$recursiveRef": "#"}}, "required": ["x"]}
    schema = {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "$recursiveAnchor": True,
        "type": "object",
        "properties": {"x": {"anyOf": [branch, branch, {"type": "string"}]}},
    }
    [found] = compile_schema(schema).list_problems(nested(40, 1, "x"))
    assert "too large to list every problem" in found


def doubled(how: Callable[[dict[str, Any]], dict[str, Any]], times: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"a{n}": how({"$ref": f"#/$defs/a{n + 1}"}) for n in range(times)}
    return of({"$ref": "#/$defs/a0"}, **{"$defs": {**definitions, f"a{times}": {"type": "string"}}})


DOUBLINGS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "allOf": lambda one: {"allOf": [one, one]},
    "anyOf": lambda one: {"anyOf": [one, one]},
    "oneOf": lambda one: {"oneOf": [one, one]},
    "not": lambda one: {"not": {"allOf": [one, one]}},
    "if": lambda one: {"if": one, "then": one, "else": one},
    "dependentSchemas": lambda one: {"dependentSchemas": {"a": one, "b": one}},
    "unevaluated": lambda one: {"allOf": [one], "unevaluatedProperties": False},
}


@pytest.mark.parametrize("name", DOUBLINGS)
@pytest.mark.parametrize("times", [15, 24, 200])
def test_a_schema_whose_references_multiply_exponentially_is_refused_at_load(name: str, times: int) -> None:
    with pytest.raises(InvalidSchemaError, match=r"written out|levels deep"):
        compile_schema(doubled(DOUBLINGS[name], times))


def test_a_schema_that_uses_one_definition_in_many_places_is_accepted() -> None:
    one = {"$ref": "#/$defs/colour"}
    schema = of(
        one, y=one, z={"items": one}, **{"$defs": {"colour": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
    )
    assert compile_schema(schema).list_problems({"x": None}) == []


@pytest.mark.parametrize(
    "definition", [AGAIN, {"anyOf": [AGAIN, AGAIN]}, {"allOf": [AGAIN]}, {"not": AGAIN}, {"if": AGAIN}]
)
def test_a_reference_that_leads_back_to_itself_within_one_value_is_refused(definition: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchemaError, match="leads back to itself"):
        compile_schema(recursive(definition))


def test_a_long_chain_of_definitions_is_refused_before_the_checker_recurses_into_it() -> None:
    definitions: dict[str, Any] = {f"a{n}": {"properties": {"c": {"$ref": f"#/$defs/a{n + 1}"}}} for n in range(900)}
    with pytest.raises(InvalidSchemaError, match="chain of references has more than"):
        compile_schema(of({"$ref": "#/$defs/a0"}, **{"$defs": {**definitions, "a900": {"type": "string"}}}))


def test_a_schema_with_one_id_for_two_parts_is_refused() -> None:
    part = {"$id": "urn:example:a", "type": "string"}
    schema = of({"$ref": "urn:example:a"}, **{"$defs": {"a": part, "b": {**part, "type": "integer"}}})
    with pytest.raises(InvalidSchemaError):
        compile_schema(schema)


@pytest.mark.parametrize("reference", ["#/components/schemas/n", "#n", "#/properties/y", "urn:example:other#/$defs/m"])
def test_branches_count_towards_the_check_cost_wherever_a_reference_leads(reference: str) -> None:
    again = {"$ref": reference}
    child = {"type": "object", "properties": {"c": again}, "required": ["c"]}
    n: dict[str, Any] = {"anyOf": [child, child, {"type": "string"}]}
    place: dict[str, Any] = {
        "#/components/schemas/n": of(again, components={"schemas": {"n": n}}),
        "#n": of(again, **{"$defs": {"n": {"$anchor": "n", **n}}}),
        "#/properties/y": {"type": "object", "properties": {"x": again, "y": n}},
        "urn:example:other#/$defs/m": of(again, **{"$defs": {"o": {"$id": "urn:example:other", "$defs": {"m": n}}}}),
    }[reference]
    schema = compile_schema(place)
    assert schema.list_problems(nested(40, "leaf")) == []
    [found] = schema.list_problems(nested(40, 1))
    assert "too large to list every problem" in found


@pytest.mark.parametrize("pattern", [r"(.*)\1$", r"^(?:(a+)\1)+b", r"(?=(a+))\1b", r"(?<n>a+)\k<n>", r"^(a|b\\)(c)\2"])
def test_a_pattern_with_a_back_reference_is_refused_at_load(pattern: str) -> None:
    for schema in (of({"pattern": pattern}), of({"patternProperties": {pattern: {}}})):
        with pytest.raises(InvalidSchemaError, match="back-reference"):
            compile_schema(schema)


def test_an_escaped_backslash_before_a_digit_is_accepted_in_a_pattern() -> None:
    assert compile_schema(of({"pattern": r"^\\1$"})).list_problems({"x": "\\1"}) == []


def test_a_lookaround_pattern_checks_hundreds_of_email_addresses() -> None:
    schema = compile_schema(of({"items": {"type": "string", "pattern": EMAIL}}))
    assert schema.list_problems({"x": ["some.person.name@example.com"] * 500}) == []
    assert schema.list_problems({"x": ["some.person.name@example.com", "no..one@example.com"]}) == [
        f"`x[1]`: expected text that matches the pattern {EMAIL[:200]!r}, got string of 19 characters"
    ]


@pytest.mark.parametrize(
    ("pattern", "length"),
    [(r"(?:a|b)*a(?:a|b){1000}c", 100_000), (r"[ab]*a[ab]{16}c", 1_000_000), (r"(?=(a|b)*$)(a|b|ab)*z", 10_000)],
)
def test_a_text_that_is_too_long_for_its_pattern_is_refused_by_name(pattern: str, length: int) -> None:
    for schema, value in (
        (of({"pattern": pattern}), "ab" * (length // 2)),
        (of({"patternProperties": {pattern: {}}}), {"ab" * (length // 2): 1}),
        (of({"propertyNames": {"pattern": pattern}}), {"ab" * (length // 2): 1}),
        (of({"items": {"pattern": pattern}}), ["ab" * (length // 2)]),
    ):
        [found] = compile_schema(schema).list_problems(
            {"y": 1, "x": value} if "y" in schema["properties"] else {"x": value}
        )
        assert found.startswith("`x`: the ")
        assert "too large to check" in found


@pytest.mark.parametrize(
    "pattern", [r"\p{L}{1,1000}", "((a{100}){100}){100}", "(?:" * 30 + "a" + "){9}" * 30, "a{1,999999999}"]
)
def test_patterns_that_expand_too_much_are_refused_before_compilation(pattern: str) -> None:
    with pytest.raises(InvalidSchemaError, match="is too large: over"):
        compile_schema(of({"pattern": pattern}))


def test_many_small_patterns_are_counted_together() -> None:
    with pytest.raises(InvalidSchemaError, match="alone or with those before it"):
        compile_schema(of({"anyOf": [{"pattern": f"^{n}[a-z]{{1,90}}$"} for n in range(200)]}))


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("^[a-z0-9_-]{1,64}$", 64, 300),
        ("a{3}{3}", 9, 20),
        ("(ab|c){10}", 30, 60),
        (r"\d{4}-\d{2}", 6, 40),
        ("[]a]{5}", 5, 40),
        ("", 0, 5),
        ("(((", 0, 5),
        ("{5}", 0, 5),
        ("[", 0, 5),
        ("\\", 0, 5),
        (r"\p{L}{2}", 800, 1000),
    ],
)
def test_the_state_estimate_of_a_pattern_includes_its_repetitions(pattern: str, least: float, most: float) -> None:
    assert least <= estimate_regex_state_count(pattern) <= most


def test_a_schema_with_too_many_values_or_bytes_is_refused() -> None:
    with pytest.raises(InvalidSchemaError, match=f"more than {MAX_VALUES:,} values"):
        compile_schema(of({"enum": list(range(MAX_VALUES + 1))}))
    with pytest.raises(InvalidSchemaError, match="bytes; the maximum is"):
        compile_schema(of({"description": "x" * MAX_SCHEMA_BYTES}))


@pytest.mark.parametrize("keyword", ["not", "items", "additionalProperties", "if"])
def test_a_schema_with_too_deep_nesting_is_refused(keyword: str) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {keyword: schema}
    with pytest.raises(InvalidSchemaError, match="nested deeper than 128"):
        compile_schema(of(schema))


def test_the_faults_of_a_large_invalid_schema_are_not_listed_one_by_one() -> None:
    with pytest.raises(InvalidSchemaError) as raised:
        compile_schema(of({}, **{"$defs": {f"d{n}": {"type": "x", "minLength": -1} for n in range(1_500)}}))
    assert len(str(raised.value)) < 1_000


LARGE: dict[str, tuple[dict[str, Any], object]] = {
    "items against a long enum": ({"items": {"enum": [{"a": n} for n in range(1_000)]}}, [{"a": 999}] * 20_000),
    "items against a long const": ({"items": {"const": ["a"] * 5_000}}, [["a"] * 5_000] * 1_000),
    "contains of a long enum": ({"contains": {"enum": [[n] for n in range(1_000)]}}, [1] * 40_000),
    "unique items of many": ({"uniqueItems": True}, [[n] for n in range(100_000)]),
    "keys against many patterns": (
        {"patternProperties": {f"^k{n}[a-z]*x$": {} for n in range(300)}},
        {f"{'k' * 50}{n}": 1 for n in range(20_000)},
    ),
    "keys of many rules": (
        {"allOf": [{"additionalProperties": {"type": "integer"}}] * 60},
        {str(n): 1 for n in range(20_000)},
    ),
    "more values than are counted": ({"items": {"type": "integer"}}, [1] * (MAX_COUNTED + 1)),
}


@pytest.mark.parametrize("name", LARGE)
def test_values_that_cost_too_much_to_check_are_refused_unchecked(name: str) -> None:
    schema, value = LARGE[name]
    [found] = compile_schema(of(schema)).list_problems({"x": value})
    assert found.startswith("`x`: the ")
    assert "too large to check" in found


def test_values_without_schema_rules_do_not_count_towards_the_check_cost() -> None:
    assert compile_schema(of({})).list_problems({"x": [[1]] * 60_000}, parsed=True) == []


def test_a_call_with_far_too_many_arguments_is_refused_with_one_problem() -> None:
    [found] = compile_schema({"type": "object"}).list_problems({f"k{n}": 1 for n in range(10_000)})
    assert found.startswith("too many arguments to check: 10,000")


def test_the_estimate_for_an_argument_uses_only_its_part_of_the_schema() -> None:
    many = {f"p{n}": {"items": {"properties": {f"q{m}": {"type": "string"} for m in range(20)}}} for n in range(20)}
    rows = [{"q1": "a", "q2": "b"}] * 5_000
    assert compile_schema({"type": "object", "properties": many}).list_problems({"p3": rows}) == []


def test_missing_arguments_are_named_even_if_other_problems_are_too_many_to_list() -> None:
    schema = {**recursive(RECURSIVE["oneOf"]), "required": ["x", "z"]}
    found = compile_schema(schema).list_problems(nested(40, 1))
    assert found[0] == "`z` is missing (expected a value)"
    assert found[1].startswith("`x`: the object does not match its schema")


@pytest.mark.parametrize("seed", range(300))
def test_a_cost_estimate_bounds_the_check_of_any_schema(seed: int) -> None:
    """Random schemas that refer to each other, and values that go deep: nothing is let through that never ends."""
    chance = random.Random(seed)
    names = ["a", "b", "e"][: chance.randint(1, 3)]
    schema = of({"$ref": f"#/$defs/{names[0]}"}, **{"$defs": {name: _any_schema(chance, 3, names) for name in names}})
    try:
        made = compile_schema(schema)
    except InvalidSchemaError:
        return
    effort = SchemaCheckCost(schema, {"^c": 1.0, "c$": 1.0})
    for _ in range(3):
        arguments = {"x": _any_value(chance, chance.choice([3, 16, 60]))}
        estimate = effort.estimate(arguments)
        found = made.list_problems(arguments)
        if estimate.check > CHECK_BUDGET:
            assert "too large to check" in found[0]
        if estimate.listing <= LIST_BUDGET:
            assert not any("too large to list" in text for text in found)
        assert sum(map(len, found)) < 60_000


def _any_schema(chance: random.Random, depth: int, names: list[str]) -> Any:
    def part() -> Any:
        return _any_schema(chance, depth - 1, names)

    if depth <= 0 or chance.random() < 0.12:
        return chance.choice([{"type": "string"}, {"type": "integer"}, True, {"minLength": 3}, {"enum": ["a", 1]}])
    if chance.random() < 0.35:
        return {"$ref": f"#/$defs/{chance.choice(names)}"}
    several = [part() for _ in range(chance.randint(1, 3))]
    return chance.choice(
        [
            {chance.choice(["allOf", "anyOf", "oneOf"]): several},
            {"not": part()},
            {"if": part(), "then": part(), "else": part()},
            {"properties": {"c": part(), "d": part()}, "required": ["c"]},
            {"anyOf": several, "properties": {"d": part()}, "unevaluatedProperties": part()},
            {"anyOf": several, "unevaluatedItems": part()},
            {"dependentSchemas": {"c": part()}, "properties": {"c": part()}},
            {"patternProperties": {"^c": part(), "c$": part()}},
            {"prefixItems": several, "items": part(), "contains": part()},
            {"additionalProperties": part(), "items": part(), "anyOf": several},
        ]
    )


def _any_value(chance: random.Random, depth: int) -> Any:
    if depth <= 0:
        return chance.choice([1, "a", None, "long"])
    inner = _any_value(chance, depth - 1)
    return chance.choice([{"c": inner}, {"c": inner, "d": 1}, [inner], {"d": inner, "c": "x"}])
