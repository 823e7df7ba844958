"""The parameter schemas that each provider accepts by its documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest

from handrail.catalog.provider_dialects import ANTHROPIC, DIALECTS, GEMINI, OPENAI_CHAT, ProviderSchemaDialect
from handrail.catalog.schema_adapter import AdaptedSchema

DIALECT = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS.keys())
NARROW = pytest.mark.parametrize("dialect", [ANTHROPIC, GEMINI, OPENAI_CHAT], ids=lambda one: one.name)


def nodes(schema: object) -> Iterator[Mapping[str, Any]]:
    """Yield every schema inside a schema."""
    if not isinstance(schema, Mapping):
        return
    node = cast("Mapping[str, Any]", schema)
    yield node
    for keyword in ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"):
        yield from nodes(node.get(keyword))
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for one in node.get(keyword, ()):
            yield from nodes(one)
    for keyword in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
        for one in node.get(keyword, {}).values():
            yield from nodes(one)


def check_against_the_provider(fitted: AdaptedSchema, dialect: ProviderSchemaDialect) -> None:
    """Raise for schemas that the provider answers with status 400, by its documentation."""
    root = fitted.parameters
    assert root["type"] == "object"
    if dialect.plain_root:
        assert not {"oneOf", "anyOf", "allOf", "not", "enum", "if", "$ref"} & root.keys()
    for node in nodes(root):
        if dialect.property_names:
            assert all(dialect.property_names.match(name) for name in node.get("properties", {}))
        if dialect.keywords is not None:
            assert node.keys() <= dialect.keywords
            assert isinstance(node.get("type", ""), str)
            assert all(
                isinstance(value, (str, int, float)) and not isinstance(value, bool) for value in node.get("enum", [])
            )
            if "anyOf" in node:
                assert node.keys() <= {"anyOf", "title", "description"}
