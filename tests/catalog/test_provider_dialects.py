"""Schemas of parameters in each provider's dialect: complete, not narrower, and accepted by the provider."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.catalog.providers import DIALECT, NARROW, check_against_the_provider, nodes

from handrail.catalog.provider_dialects import (
    ANTHROPIC,
    DIALECTS,
    GEMINI,
    MCP,
    OPENAI_CHAT,
    OPENAI_RESPONSES,
    ProviderSchemaDialect,
)
from handrail.catalog.schema_adapter import (
    ALWAYS_ALLOWED,
    MAX_GROWTH,
    adapt_schema,
    adapt_tool,
    append_notes_and_truncate,
    compute_schema_request_length,
)

# --- what is kept -------------------------------------------------------------------------------------------------

NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "filter": {
            "type": "object",
            "properties": {
                "field": {"type": "string"},
                "deep": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "integer"}}}},
            },
            "required": ["field"],
        },
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["filter"],
}


@DIALECT
@pytest.mark.proves("D-11")
def test_nested_properties_and_enums_are_preserved(dialect: ProviderSchemaDialect) -> None:
    found = adapt_schema(NESTED, dialect).parameters
    assert found["properties"]["filter"]["properties"]["deep"]["items"]["properties"]["x"]["type"] == "integer"
    assert found["properties"]["filter"]["required"] == ["field"]
    assert found["properties"]["colour"]["enum"] == ["red", "green"]
    assert found["required"] == ["filter"]


@pytest.mark.proves("D-11")
def test_a_tool_is_formatted_for_each_provider() -> None:
    view: dict[str, Any] = {
        "name": "git__log",
        "description": "The log.",
        "parameters": {"type": "object", "properties": {}},
    }
    forms = {name: adapt_tool(view, dialect)[0] for name, dialect in DIALECTS.items()}
    empty: dict[str, Any] = {"type": "object", "properties": {}}
    assert forms == {
        "openai-chat": {
            "type": "function",
            "function": {"name": "git__log", "description": "The log.", "parameters": empty},
        },
        "openai-responses": {
            "type": "function",
            "name": "git__log",
            "description": "The log.",
            "parameters": empty,
            "strict": False,
        },
        "anthropic": {"name": "git__log", "description": "The log.", "input_schema": empty},
        "gemini": {"name": "git__log", "description": "The log.", "parametersJsonSchema": empty},
        "mcp": {"name": "git__log", "description": "The log.", "inputSchema": empty},
    }


@pytest.mark.proves("D-11")
def test_alternatives_at_the_root_become_optional_properties_and_a_sentence_in_the_description() -> None:
    schema = {
        "type": "object",
        "properties": {"note": {"type": "string"}},
        "oneOf": [
            {"properties": {"path": {"type": "string"}}, "required": ["path"]},
            {"properties": {"url": {"type": "string"}, "depth": {"type": "integer"}}, "required": ["url", "depth"]},
        ],
    }
    tool, fitted = adapt_tool({"name": "a", "description": "Fetch it.", "parameters": schema}, ANTHROPIC)
    assert set(tool["input_schema"]["properties"]) == {"note", "path", "url", "depth"}
    assert "required" not in fitted.parameters
    assert tool["description"] == "Fetch it. Give exactly one of: path; url and depth."
    assert adapt_schema(schema, MCP).parameters is schema


@pytest.mark.proves("D-11")
def test_a_reference_that_a_provider_does_not_follow_is_inlined() -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point", "description": "where"}},
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    }
    assert adapt_schema(schema, GEMINI).parameters["properties"]["at"] == {
        "type": "object",
        "properties": {"x": {"type": "number"}},
        "required": ["x"],
        "description": "where",
    }
    assert adapt_schema(schema, OPENAI_CHAT).parameters is schema


@pytest.mark.proves("D-11")
def test_a_recursive_schema_is_inlined_twice_and_then_named() -> None:
    tree = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    }
    found = adapt_schema(
        {"type": "object", "properties": {"root": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}}, GEMINI
    )
    text = json.dumps(found.parameters)
    assert text.count('"name"') == 2
    assert "same schema as the enclosing tree" in text
    check_against_the_provider(found, GEMINI)


def fan(depth: int, width: int) -> dict[str, Any]:
    """Definitions that hold no other twice on the way down, and name the next one several times each."""
    held: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {f"k{k}": {"$ref": f"#/$defs/d{n + 1}"} for k in range(width)}}
        for n in range(depth)
    }
    return {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d0"}, "last": {"type": "string", "description": "said after it"}},
        "$defs": {**held, f"d{depth}": {"type": "integer"}},
    }


def mutual(number: int, **further: Any) -> dict[str, Any]:
    """Definitions that all reference each other and themselves."""
    members = {f"p{n}": {"$ref": f"#/$defs/d{n}"} for n in range(number)}
    held = {f"d{n}": {"type": "object", "properties": {**members, **further}} for n in range(number)}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": held}


def repeated(keyword: str) -> dict[str, Any]:
    """A schema that contains itself by ``keyword`` instead of a plain reference."""
    member = {keyword: [{"$ref": "#/$defs/d"}], "description": "one more"}
    return {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d"}},
        "$defs": {"d": {"type": "object", "properties": {"l": member, "m": member, "r": member}}},
    }


def branching() -> dict[str, Any]:
    """A large schema without references: many alternatives next to properties that each must repeat."""
    beside = {f"property_{n}": {"type": "string", "description": "what it is"} for n in range(80)}
    either = [{"properties": {f"x{n}": {"type": "integer"}}} for n in range(60)]
    return {"type": "object", "properties": {"a": {"type": "object", "properties": beside, "anyOf": either}}}


GROWING = {
    "fan of two": fan(12, 2),
    "fan of eight": fan(8, 8),
    "mutual": mutual(6),
    "mutual with an odd name": mutual(6, **{"odd name": {"type": "string"}}),
    "by allOf": repeated("allOf"),
    "by anyOf": repeated("anyOf"),
    "without references": branching(),
    "of itself": {"type": "object", "properties": {k: {"$ref": "#"} for k in "abcdefgh"}},
}


@DIALECT
@pytest.mark.parametrize("schema", GROWING.values(), ids=GROWING.keys())
def test_the_size_of_an_adapted_schema_is_limited_relative_to_the_original(
    dialect: ProviderSchemaDialect, schema: dict[str, Any]
) -> None:
    fitted = adapt_schema(schema, dialect)
    assert compute_schema_request_length(fitted.parameters) <= max(
        MAX_GROWTH * compute_schema_request_length(schema), ALWAYS_ALLOWED
    )
    check_against_the_provider(fitted, dialect)


@pytest.mark.parametrize("schema", [fan(12, 2), fan(8, 8)], ids=["two", "eight"])
def test_cut_references_are_followed_to_the_same_depth_and_the_cut_is_noted(
    schema: dict[str, Any],
) -> None:
    found = adapt_schema(schema, GEMINI).parameters["properties"]
    assert found["last"] == {"type": "string", "description": "said after it"}
    assert {json.dumps(one) for one in found["a"]["properties"].values()} == {
        json.dumps(found["a"]["properties"]["k0"])
    }
    assert "too large to show here; use info for the full schema" in json.dumps(found["a"])


def test_renaming_a_property_keeps_references_intact() -> None:
    schema = mutual(6, **{"odd name": {"type": "string"}})
    fitted = adapt_schema(schema, ANTHROPIC)
    assert compute_schema_request_length(fitted.parameters) < 2 * compute_schema_request_length(schema)
    assert fitted.parameters["properties"]["a"] == {"$ref": "#/$defs/d0"}
    ((sent, own),) = fitted.renamed.items()
    assert own == "odd name" and sent in fitted.parameters["$defs"]["d3"]["properties"]
    given = {"a": {"p3": {"p3": {sent: "x", "p0": {sent: "y"}}}}}
    validator = jsonschema_rs.validator_for(cast("dict[str, Any]", fitted.parameters))
    assert validator.is_valid(given) and not validator.is_valid({"a": {"p3": {"p1": {"p3": {sent: 5}}}}})
    assert fitted.restore_property_names(given) == {"a": {"p3": {"p3": {"odd name": "x", "p0": {"odd name": "y"}}}}}


def deep_values(names: list[str]) -> st.SearchStrategy[Any]:
    nothing: st.SearchStrategy[Any] = st.builds(dict[str, Any])
    odd: st.SearchStrategy[Any] = st.builds(lambda: {"odd name": "x"})

    def holding(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.dictionaries(st.sampled_from(names), inner, max_size=3)

    return st.recursive(nothing | odd, holding, max_leaves=20)


@DIALECT
@pytest.mark.parametrize("which", ["mutual with an odd name", "by allOf", "by anyOf", "of itself"])
@given(data=st.data())
def test_an_adapted_schema_accepts_deeply_nested_values(
    dialect: ProviderSchemaDialect, which: str, data: st.DataObject
) -> None:
    schema = GROWING[which]
    value: dict[str, Any] = {"a": data.draw(deep_values([*"almr", "p0", "p1", "p5"]))}
    if not jsonschema_rs.is_valid(schema, value):
        return
    fitted = adapt_schema(schema, dialect)
    wire = {name: wire for wire, name in fitted.renamed.items()}
    assert jsonschema_rs.is_valid(cast("dict[str, Any]", fitted.parameters), renamed(value, wire))


def renamed(given: Any, wire: Mapping[str, str]) -> Any:
    if isinstance(given, dict):
        return {wire.get(name, name): renamed(one, wire) for name, one in cast("dict[str, Any]", given).items()}
    return [renamed(one, wire) for one in cast("list[Any]", given)] if isinstance(given, list) else given


@pytest.mark.proves("D-11")
def test_a_keyword_that_a_provider_lacks_is_moved_to_the_description() -> None:
    schema = {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{3}$", "description": "Airport."},
            "n": {"type": ["integer", "null"], "exclusiveMinimum": 0},
        },
    }
    found = adapt_schema(schema, GEMINI).parameters["properties"]
    assert found["code"] == {"type": "string", "description": 'Airport. (pattern: "^[A-Z]{3}$")'}
    assert found["n"]["anyOf"] == [{"type": "integer", "description": "(exclusiveMinimum: 0)"}, {"type": "null"}]


@NARROW
@pytest.mark.proves("D-11")
def test_a_property_name_that_a_provider_refuses_is_renamed_and_restored(dialect: ProviderSchemaDialect) -> None:
    schema = {
        "type": "object",
        "properties": {
            "$filter": {"type": "string"},
            "größe": {"type": "object", "properties": {"in cm": {"type": "number"}}},
        },
        "required": ["$filter"],
    }
    fitted = adapt_schema(schema, dialect)
    check_against_the_provider(fitted, dialect)
    wire = {name: wire for wire, name in fitted.renamed.items()}
    sent = {wire.get("$filter", "$filter"): "x", wire.get("größe", "größe"): {wire.get("in cm", "in cm"): 1.5}}
    assert fitted.parameters["required"] == [wire.get("$filter", "$filter")]
    assert fitted.restore_property_names(sent) == {"$filter": "x", "größe": {"in cm": 1.5}}
    assert jsonschema_rs.is_valid(cast("dict[str, Any]", fitted.parameters), sent)


@pytest.mark.proves("D-11")
def test_a_long_description_ends_with_a_sentence_and_a_pointer_to_the_rest() -> None:
    text = "One sentence of a long manual. " * 60
    told = append_notes_and_truncate(text.strip(), (), OPENAI_RESPONSES.max_description)
    assert len(told) <= 1024
    assert told.endswith("manual. … (use info for the rest)")
    assert len(append_notes_and_truncate("x" * 5000, (), 1024)) <= 1024
    assert append_notes_and_truncate("short", ("Give a.",), 1024) == "short Give a."


# --- never narrower -----------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "c", "größe", "$top", "x y"])
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "string": st.sampled_from(["", "red", "x", "ABC"]),
    "integer": st.integers(-3, 9),
    "number": st.sampled_from([0.5, -1.5, 2.0]),
    "boolean": st.booleans(),
    "null": st.none(),
}


@st.composite
def cases(draw: st.DrawFn, depth: int = 0) -> tuple[dict[str, Any], Any]:
    """A schema, and a value that it takes."""
    kinds = ["scalar", "enum", "types"] + (["object", "array", "anyOf", "allOf", "ref"] if depth < 3 else [])
    match draw(st.sampled_from(kinds)):
        case "enum":
            values = draw(st.lists(st.one_of(*SCALARS.values()), min_size=1, max_size=4, unique_by=repr))
            return {"enum": values}, draw(st.sampled_from(values))
        case "types":
            names = draw(st.lists(st.sampled_from(sorted(SCALARS)), min_size=1, max_size=3, unique=True))
            bounds = draw(st.sampled_from([{}, {"minimum": -5}, {"maxLength": 3}, {"pattern": "^[A-Zrx]*"}]))
            return {"type": names, **bounds}, draw(SCALARS[draw(st.sampled_from(names))])
        case "object":
            return draw(objects(depth + 1))
        case "array":
            schema, value = draw(cases(depth + 1))
            return {"type": "array", "items": schema, "minItems": 1}, [value]
        case "anyOf":
            made = draw(st.lists(cases(depth + 1), min_size=1, max_size=3))
            return {"anyOf": [schema for schema, _ in made], "description": "either"}, draw(st.sampled_from(made))[1]
        case "allOf":
            schema, value = draw(cases(depth + 1))
            return {"allOf": [schema, draw(st.sampled_from([{}, schema, {"description": "also"}]))]}, value
        case "ref":
            schema, value = draw(cases(depth + 1))
            return {"$ref": "#/$defs/held", "held": schema}, value
        case _:
            name = draw(st.sampled_from(sorted(SCALARS)))
            return {"type": name}, draw(SCALARS[name])


@st.composite
def objects(draw: st.DrawFn, depth: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    members = draw(st.dictionaries(NAMES, cases(depth + 1), max_size=3))
    schema: dict[str, Any] = {"type": "object", "properties": {name: made[0] for name, made in members.items()}}
    value = {name: made[1] for name, made in members.items()}
    if members and draw(st.booleans()):
        schema["required"] = sorted(draw(st.sets(st.sampled_from(sorted(members)), min_size=1)))
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.booleans())
    elif draw(st.booleans()):
        schema["patternProperties"] = {"^p": {"type": "integer"}}
        schema["additionalProperties"] = False
        value["p1"] = 4
    return schema, value


@st.composite
def roots(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of a tool, and arguments that they take."""
    schema, value = draw(objects())
    keyword = draw(st.sampled_from(["", "anyOf", "oneOf", "allOf"]))
    if keyword:
        name = draw(st.sampled_from(["d", "e"]))
        inner, chosen = draw(cases(2))
        branches = [{"properties": {name: inner}, "required": [name]}]
        if keyword != "allOf":
            branches.append({"properties": {"other": {"type": "string"}}, "required": ["other"]})
        schema = {**schema, keyword: branches}
        schema.pop("additionalProperties", None)
        schema.pop("patternProperties", None)
        value = {**value, name: chosen}
    return drawn_together(schema), value


def drawn_together(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas next to references, as definitions of the root."""
    held: dict[str, Any] = {}

    def moved(node: Any) -> Any:
        if isinstance(node, list):
            return [moved(one) for one in cast("list[Any]", node)]
        if not isinstance(node, dict):
            return node
        found = {key: moved(value) for key, value in cast("dict[str, Any]", node).items()}
        if "held" in found and "$ref" in found:
            name = f"d{len(held)}"
            held[name] = found.pop("held")
            found["$ref"] = f"#/$defs/{name}"
        return found

    whole = moved(schema)
    return {**whole, "$defs": held} if held else whole


@DIALECT
@given(made=roots())
@pytest.mark.proves("D-11")
def test_an_adapted_schema_accepts_each_value_of_the_original_and_suits_the_provider(
    dialect: ProviderSchemaDialect, made: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    schema, value = made
    assert jsonschema_rs.is_valid(schema, value)
    fitted = adapt_schema(schema, dialect)
    check_against_the_provider(fitted, dialect)
    wire = {name: wire for wire, name in fitted.renamed.items()}
    assert jsonschema_rs.is_valid(cast("dict[str, Any]", fitted.parameters), renamed(value, wire))
    assert fitted.restore_property_names(renamed(value, wire)) == value


@DIALECT
@given(made=roots())
@pytest.mark.proves("D-11")
def test_an_adapted_schema_names_every_property_of_the_tool(
    dialect: ProviderSchemaDialect, made: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    text = json.dumps(adapt_schema(made[0], dialect).parameters, ensure_ascii=False)
    for node in nodes(made[0]):
        for name in node.get("properties", {}):
            assert name in text


def test_a_schema_with_many_references_stays_within_the_size_limit() -> None:
    again = {"$ref": "#/$defs/n"}
    wide = {
        "type": "object",
        "properties": {f"p{number}": again for number in range(200)},
        "$defs": {"n": {"type": "object", "properties": {f"q{number}": again for number in range(30)}}},
    }
    for dialect in (GEMINI, OPENAI_CHAT):
        assert compute_schema_request_length(adapt_schema(wide, dialect).parameters) <= max(
            MAX_GROWTH * compute_schema_request_length(wide), ALWAYS_ALLOWED
        )
