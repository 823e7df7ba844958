"""Schemas of other dialects and with common mistakes, and lists whose order is irrelevant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.field.odd_servers import faults_of, odd_server

from handrail.contract.schema.argument_validation import compile_schema
from handrail.contract.schema.foreign_schemas import normalise_foreign_schema, sort_unordered_lists

Schema = dict[str, Any]
Arguments = dict[str, Any]


def accepts(schema: Any, arguments: Arguments) -> bool:
    return not compile_schema(normalise_foreign_schema(schema)).list_problems(arguments)


DIALECTS = [
    f"{scheme}://json-schema.org/{name}{end}"
    for scheme in ("http", "https")
    for name in ("draft-03/schema", "draft-04/schema", "draft-05/schema", "draft-06/schema", "draft-07/schema")
    for end in ("", "#")
] + [
    *("https://json-schema.org/draft/2019-09/schema", "https://json-schema.org/draft/2020-12/schema"),
    *("http://json-schema.org/draft/2020-12/schema#", "http://json-schema.org/schema#", "https://example.com/mine"),
]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_schemas_of_every_dialect_are_enforced(dialect: str) -> None:
    schema: Schema = {
        "$schema": dialect,
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1}, "r": {"$ref": "#/definitions/r"}},
        "required": ["n"],
        "definitions": {"r": {"type": "string"}},
    }
    assert accepts(schema, {"n": 1, "r": "x"})
    assert not accepts(schema, {"n": 0}) and not accepts(schema, {}) and not accepts(schema, {"n": 1, "r": 2})


def of(**one: Any) -> Schema:
    return {"type": "object", "properties": {"a": one}}


MEANT: dict[str, tuple[Any, list[Arguments], list[Arguments]]] = {
    "draft 4 bound": (of(type="number", minimum=0, exclusiveMinimum=True), [{"a": 1}], [{"a": 0}, {"a": -1}]),
    "draft 4 upper bound": (of(type="number", maximum=9, exclusiveMaximum=True), [{"a": 8}], [{"a": 9}]),
    "draft 4 open bound": (of(type="number", minimum=0, exclusiveMinimum=False), [{"a": 0}], [{"a": -1}]),
    "bound without bound": (of(type="number", exclusiveMinimum=True), [{"a": 0}], [{"a": "x"}]),
    "object alone": ({"type": "object"}, [{}, {"x": 1, "y": [2]}], []),
    "object with a title": ({"type": "object", "title": "Any", "required": ["x"]}, [{"x": 1}], [{}]),
    "no members": ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
    "members as a list": ({"type": "object", "properties": []}, [{}], [{"x": 1}]),
    "empty list": ([], [{}, {"x": 1}], []),
    "members of empty lists": ({"type": "object", "properties": {"a": []}}, [{"a": 1}], [{"b": 1}]),
    "items of an empty list": (of(type="array", items=[]), [{"a": [1]}, {"a": []}], [{"a": 1}]),
    "tuple of an empty list": (of(type="array", prefixItems=[]), [{"a": [1]}], [{"a": 1}]),
    "definitions as a list": ({**of(type="string"), "$defs": [], "definitions": None}, [{"a": "x"}], [{"a": 1}]),
    "dependencies as a list": (
        {**of(type="string"), "dependentRequired": [], "dependentSchemas": []},
        [{"a": "x"}],
        [{"a": 1}],
    ),
    "closed by a text": ({**of(type="string"), "additionalProperties": "false"}, [{"a": "x"}], [{"a": 1}]),
    "enumeration as a text": (of(type="string", enum="x"), [{"a": "x"}], [{"a": 1}]),
    "enumeration twice": (of(enum=["x", "x", None]), [{"a": "x"}], [{"a": "y"}]),
    "a name required that is no member": ({**of(type="string"), "required": ["b"]}, [{"b": 1}], [{"a": "x"}]),
    "identifier that is no address": ({**of(type="string"), "$id": "%%%", "$anchor": "a b"}, [{"a": "x"}], [{"a": 1}]),
    "identifier null": ({**of(type="string"), "$id": None, "$schema": None}, [{"a": "x"}], [{"a": 1}]),
    "reference to the whole": (of(**{"$ref": "#"}), [{"a": {"a": {}}}], [{"a": 1}]),
    "empty reference": (of(**{"$ref": ""}), [{"a": {"a": {}}}], []),
    "step of zero": (of(type="number", multipleOf=0), [{"a": 1.5}], [{"a": "x"}]),
    "length of a fraction": (of(type="string", maxLength=2.0), [{"a": "xx"}], [{"a": "xxx"}]),
    "endless bounds": (of(type="number", maximum=1e308, minimum=-1e308), [{"a": 5}], [{"a": "x"}]),
    "const and type": (of(type="string", const="x"), [{"a": "x"}], [{"a": "y"}]),
    "members null": ({"type": "object", "properties": None, "required": None}, [{}, {"x": 1}], []),
    "choice of nothing": (of(type="string", enum=[]), [{"a": "x"}], [{"a": 1}]),
    "no regular expression": (of(type="string", pattern="(?P<x>["), [{"a": "x"}], [{"a": 1}]),
    "look-ahead": (of(type="string", pattern="^(?!x)\\w+$"), [{"a": "y"}], [{"a": "x"}]),
    "nothing": ({}, [{}, {"x": 1}], []),
    "null": (None, [{}, {"x": 1}], []),
    "true": (True, [{}, {"x": 1}], []),
    "no type": ({"properties": {"a": {"type": "string"}}}, [{"a": "x"}], [{"a": 1}]),
    "type list": ({"type": ["object", "null"], "properties": {"a": {}}}, [{"a": 1}], [{"b": 1}]),
    "nullable": (of(type="string", nullable=True), [{"a": None}, {"a": "x"}], [{"a": 1}]),
    "nullable choice": (of(type="string", enum=["x"], nullable=True), [{"a": None}, {"a": "x"}], [{"a": "y"}]),
    "nullable alternatives": (of(anyOf=[{"type": "string"}], nullable=True), [{"a": None}], [{"a": 1}]),
    "type of several": (of(type=["string", "null"]), [{"a": None}, {"a": "x"}], [{"a": 1}]),
    "type in a text": (of(type="string|null"), [{"a": None}, {"a": "x"}], [{"a": 1}]),
    "type of a language": (of(type="int"), [{"a": 1}], [{"a": "x"}]),
    "type of nothing": (of(type="any"), [{"a": 1}, {"a": "x"}], []),
    "type null": (of(type=None), [{"a": 1}], []),
    "boolean schemas": ({"type": "object", "properties": {"a": True, "b": False}}, [{"a": 1}], [{"b": 1}]),
    "unknown format": (of(type="string", format="uuid-v9"), [{"a": "x"}], [{"a": 1}]),
    "format null": (of(type="string", format=None, description=None, title=None), [{"a": "x"}], [{"a": 1}]),
    "tuple": (
        of(type="array", items=[{"type": "string"}], additionalItems=False),
        [{"a": ["x"]}],
        [{"a": [1]}, {"a": ["x", "y"]}],
    ),
    "marked members": (of(type="string", required=True), [{"a": "x"}], [{}]),
    "unmarked members": (of(type="string", required=False), [{}, {"a": "x"}], []),
    "required null": ({**of(type="string"), "required": None}, [{}], [{"a": 1}]),
    "required twice": ({**of(type="string"), "required": ["a", "a"]}, [{"a": "x"}], [{}]),
    "bounds as text": (of(type="string", minLength="2"), [{"a": "x"}], [{"a": 1}]),
    "examples as a text": (of(type="string", examples="x"), [{"a": "x"}], [{"a": 1}]),
    "alternatives without any": (of(type="string", anyOf=[]), [{"a": "x"}], [{"a": 1}]),
    "words of one's own": ({**of(type="string"), "x-order": 3, "propertyOrder": ["a"]}, [{"a": "x"}], [{"b": 1}]),
}


@pytest.mark.parametrize(("schema", "good", "bad"), MEANT.values(), ids=MEANT)
def test_a_schema_with_a_common_slip_is_read_as_intended(
    schema: Any, good: list[Arguments], bad: list[Arguments]
) -> None:
    for arguments in good:
        assert accepts(schema, arguments), arguments
    for arguments in bad:
        assert not accepts(schema, arguments), arguments


def test_a_valid_schema_is_not_changed() -> None:
    for dialect in ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"):
        schema: Schema = {
            "$schema": dialect,
            "type": "object",
            "properties": {
                "b": {"type": "string", "format": "uri", "default": {"required": ["z", "a"]}},
                "required": {},
            },
            "required": ["b"],
            "additionalProperties": False,
            "x-own": None,
        }
        assert json.dumps(normalise_foreign_schema(schema)) == json.dumps(schema)


async def test_an_unusable_schema_disables_only_its_tool_and_is_reported(tmp_path: Path) -> None:
    habit = """
TOOLS += [
    {"name": "far", "inputSchema": {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}},
    {"name": "lost", "inputSchema": {"type": "object", "properties": {"a": {"$ref": "#/definitions/none"}}}},
    {"name": "text", "inputSchema": {"type": "string"}},
    {"name": "words", "inputSchema": "a text"},
    {"name": "plain"},
    {"name": "old", "inputSchema": {"$schema": "https://json-schema.org/draft-04/schema#", "type": "object",
     "properties": {"text": {"type": "string"}, "n": {"type": "number", "minimum": 0, "exclusiveMinimum": True}}}},
]
"""
    async with odd_server(tmp_path, habit) as (kernel, session):
        for name in ("t_echo", "t_old", "t_plain"):
            assert (await session.call(name, {"text": "hi"})).data == "said hi"
        told = "\n".join(faults_of(kernel))
        assert (
            "example.com/a.json" in told
            and "/definitions/none" in told
            and "an inputSchema that is not an object" in told
        )
        assert not {"t_far", "t_lost", "t_text", "t_words"} & kernel.generation.entries.keys()


async def test_a_change_of_irrelevant_order_leaves_the_tool_definition_the_same(tmp_path: Path) -> None:
    habit = """
class Order(dict):
    count = 0
def list_tools(number, params):
    Order.count += 1
    names, kinds = ["text", "n"], ["string", "null"]
    if Order.count % 2 == 0:
        names, kinds = names[::-1], kinds[::-1]
    properties = {one: {"type": kinds, "enum": ["hi", None][::1 if Order.count % 2 else -1]} for one in names}
    schema = {"type": "object", "properties": properties, "required": names}
    answer(number, {"tools": [{"name": "echo", "description": "Echo.", "inputSchema": schema}]})
def call(number, params):
    put(json.dumps({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}))
    answer(number, text("said hi"))
CAPABILITIES = {"tools": {"listChanged": True}}
"""
    async with odd_server(tmp_path, habit) as (kernel, session):
        for _ in range(4):
            result = await session.call("t_echo", {"text": "hi", "n": None})
            assert result.data == "said hi", result.error_text
            upstream = kernel.components.upstreams["t"]
            await upstream._list(upstream._conversation)  # pyright: ignore  # as after a change
        entry = kernel.generation.resolve_tool_name("t_echo")
        assert entry is not None and entry.unavailable_reason is None


def test_a_change_of_relevant_order_changes_the_sorted_schema() -> None:
    one: Schema = {"properties": {"required": {"default": ["b", "a"]}, "x": {"prefixItems": [{"type": "string"}, {}]}}}
    other: Schema = {
        "properties": {"required": {"default": ["a", "b"]}, "x": {"prefixItems": [{}, {"type": "string"}]}}
    }
    assert sort_unordered_lists(one) == one and sort_unordered_lists(one) != sort_unordered_lists(other)
