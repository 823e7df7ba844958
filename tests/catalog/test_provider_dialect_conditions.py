"""Conditions, nested choices and references in each provider's dialect: no property is lost."""

from __future__ import annotations

from typing import Any, cast

import jsonschema_rs
import pytest
from tests.catalog.providers import DIALECT, NARROW, check_against_the_provider

from handrail.catalog.provider_dialects import ANTHROPIC, GEMINI, OPENAI_CHAT, OPENAI_RESPONSES, ProviderSchemaDialect
from handrail.catalog.schema_adapter import adapt_schema

WHEN_CARD: dict[str, Any] = {
    "if": {"properties": {"how": {"const": "card"}}},
    "then": {"properties": {"number": {"type": "string"}}},
}
WHEN_BANK: dict[str, Any] = {
    "if": {"properties": {"how": {"const": "bank"}}},
    "then": {"properties": {"iban": {"type": "string"}}},
}
HOW: dict[str, Any] = {"type": "object", "properties": {"how": {"enum": ["card", "bank"]}}}
LETTER: dict[str, Any] = {
    "oneOf": [{"properties": {"text": {"type": "string"}}}, {"properties": {"html": {"type": "string"}}}]
}
TOWARDS: dict[str, Any] = {
    "oneOf": [{"properties": {"person": {"type": "string"}}}, {"properties": {"list": {"type": "string"}}}]
}


NAMING: dict[str, tuple[dict[str, Any], set[str]]] = {
    "if": ({**HOW, **WHEN_CARD, "else": {"properties": {"iban": {"type": "string"}}}}, {"how", "number", "iban"}),
    "two ifs": ({**HOW, "allOf": [WHEN_CARD, WHEN_BANK]}, {"how", "number", "iban"}),
    "two ifs, closed": (
        {**HOW, "allOf": [WHEN_CARD, WHEN_BANK], "unevaluatedProperties": False},
        {"how", "number", "iban"},
    ),
    "dependent": ({**HOW, "dependentSchemas": {"how": WHEN_CARD["then"]}}, {"how", "number"}),
    "two choices": ({"type": "object", "allOf": [LETTER, TOWARDS]}, {"text", "html", "person", "list"}),
    "choices of choices": ({"type": "object", "anyOf": [LETTER, TOWARDS]}, {"text", "html", "person", "list"}),
    "by reference": (
        {"type": "object", "oneOf": [{"$ref": "#/$defs/l"}, {"required": []}], "$defs": {"l": LETTER}},
        {"text", "html"},
    ),
}


@pytest.mark.parametrize("dialect", [ANTHROPIC, GEMINI, OPENAI_CHAT, OPENAI_RESPONSES], ids=lambda one: one.name)
@pytest.mark.parametrize(("schema", "names"), NAMING.values(), ids=NAMING.keys())
@pytest.mark.proves("D-11")
def test_properties_in_conditions_and_nested_choices_become_top_level_properties(
    dialect: ProviderSchemaDialect, schema: dict[str, Any], names: set[str]
) -> None:
    fitted = adapt_schema(schema, dialect)
    assert fitted.parameters["properties"].keys() == names
    check_against_the_provider(fitted, dialect)
    for value in ({"how": "card", "number": "1"}, {"how": "bank", "iban": "1"}, {"text": "x", "list": "y"}, {}):
        if jsonschema_rs.is_valid(schema, value):
            assert jsonschema_rs.is_valid(cast("dict[str, Any]", fitted.parameters), value)


def test_notes_on_two_conditions_omit_the_descriptions_of_their_properties() -> None:
    told = {"properties": {"number": {"type": "string", "description": "as it stands on the card " * 20}}}
    notes = " ".join(adapt_schema({**HOW, "allOf": [{**WHEN_CARD, "then": told}, WHEN_BANK]}, OPENAI_CHAT).notes)
    assert '"card"' in notes and '"number"' in notes and '"bank"' in notes and '"iban"' in notes
    assert "stands on the card" not in notes


@DIALECT
@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#"}], "$ref": "#/$defs/a"},
        {"properties": {"a": {"allOf": [{"$ref": "#"}], "$ref": "#/$defs/a"}}},
        {"properties": {"a": {"allOf": [{"$ref": "#/properties/a"}], "$ref": "#"}}, "const": {}},
    ],
)
def test_the_adaptation_of_a_recursive_schema_with_another_reference_ends(
    dialect: ProviderSchemaDialect, schema: dict[str, Any]
) -> None:
    fitted = adapt_schema({"type": "object", **schema, "$defs": {"a": {}}}, dialect)
    check_against_the_provider(fitted, dialect)


@pytest.mark.parametrize("reference", ["#/$defs/a%20b", "#place"])
@NARROW
def test_an_escaped_reference_and_an_anchor_both_resolve_to_their_target(
    dialect: ProviderSchemaDialect, reference: str
) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": reference}, "odd name": {"$ref": "#/properties/x"}},
        "$defs": {"a b": {"$anchor": "place", "type": "object", "properties": {"inner": {"type": "string"}}}},
    }
    fitted = adapt_schema(schema, dialect)
    validator = jsonschema_rs.validator_for(cast("dict[str, Any]", fitted.parameters))
    assert validator.is_valid({"x": {"inner": "y"}}) and not validator.is_valid({"x": {"inner": 5}})


def test_a_format_is_moved_into_the_alternatives_for_a_provider_that_requires_it() -> None:
    moment = {"anyOf": [{"type": "string"}, {"type": "null"}], "format": "date-time"}
    fitted = adapt_schema({"type": "object", "properties": {"when": moment}}, GEMINI)
    check_against_the_provider(fitted, GEMINI)
    assert fitted.parameters["properties"]["when"]["anyOf"][0] == {"type": "string", "format": "date-time"}


@NARROW
def test_loosening_a_choice_does_not_reject_values_that_were_valid(dialect: ProviderSchemaDialect) -> None:
    inner: dict[str, Any] = {"anyOf": [{}], "oneOf": [{}, {"type": "string", "$ref": "#"}]}
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": inner}}
    assert jsonschema_rs.is_valid(schema, {"a": ""})
    assert jsonschema_rs.is_valid(cast("dict[str, Any]", adapt_schema(schema, dialect).parameters), {"a": ""})
