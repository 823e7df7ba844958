"""Conditions, choices of choices and references beside others, in each provider's dialect: no property of them is lost."""

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
def test_what_conditions_and_choices_of_choices_name_stands_among_the_properties(
    dialect: ProviderSchemaDialect, schema: dict[str, Any], names: set[str]
) -> None:
    fitted = adapt_schema(schema, dialect)
    assert fitted.parameters["properties"].keys() == names
    check_against_the_provider(fitted, dialect)
    for value in ({"how": "card", "number": "1"}, {"how": "bank", "iban": "1"}, {"text": "x", "list": "y"}, {}):
        if jsonschema_rs.is_valid(schema, value):
            assert jsonschema_rs.is_valid(cast("dict[str, Any]", fitted.parameters), value)


def test_what_two_conditions_ask_is_told_in_words_without_what_their_properties_say_already() -> None:
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
def test_a_form_that_holds_itself_beside_another_reference_comes_to_an_end(
    dialect: ProviderSchemaDialect, schema: dict[str, Any]
) -> None:
    fitted = adapt_schema({"type": "object", **schema, "$defs": {"a": {}}}, dialect)
    check_against_the_provider(fitted, dialect)


@pytest.mark.parametrize("reference", ["#/$defs/a%20b", "#place"])
@NARROW
def test_a_reference_leads_to_its_place_however_it_is_written(dialect: ProviderSchemaDialect, reference: str) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": reference}, "odd name": {"$ref": "#/properties/x"}},
        "$defs": {"a b": {"$anchor": "place", "type": "object", "properties": {"inner": {"type": "string"}}}},
    }
    fitted = adapt_schema(schema, dialect)
    validator = jsonschema_rs.validator_for(cast("dict[str, Any]", fitted.parameters))
    assert validator.is_valid({"x": {"inner": "y"}}) and not validator.is_valid({"x": {"inner": 5}})


def test_a_format_stands_in_each_alternative_where_a_provider_takes_nothing_beside_them() -> None:
    moment = {"anyOf": [{"type": "string"}, {"type": "null"}], "format": "date-time"}
    fitted = adapt_schema({"type": "object", "properties": {"when": moment}}, GEMINI)
    check_against_the_provider(fitted, GEMINI)
    assert fitted.parameters["properties"]["when"]["anyOf"][0] == {"type": "string", "format": "date-time"}


@NARROW
def test_a_choice_whose_parts_are_loosened_refuses_no_more_than_before(dialect: ProviderSchemaDialect) -> None:
    inner: dict[str, Any] = {"anyOf": [{}], "oneOf": [{}, {"type": "string", "$ref": "#"}]}
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": inner}}
    assert jsonschema_rs.is_valid(schema, {"a": ""})
    assert jsonschema_rs.is_valid(cast("dict[str, Any]", adapt_schema(schema, dialect).parameters), {"a": ""})
