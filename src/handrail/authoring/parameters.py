"""Parameters that are a valid schema and still no good: no call fits them, or a part of them says what nobody can mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, cast
from urllib.parse import quote

from handrail.contract.schema.schema import InvalidSchema, compile_schema

Node = Mapping[str, Any]

_SCHEMAS_IN = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_LISTS_IN = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS_IN = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_ELSEWHERE = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else", "dependentSchemas", "not")
"""Where a schema may have properties beside those under ``properties``."""
_BOUNDS = (
    ("minimum", "maximum", False),
    ("minimum", "exclusiveMaximum", True),
    ("exclusiveMinimum", "maximum", True),
    ("exclusiveMinimum", "exclusiveMaximum", True),
    ("minLength", "maxLength", False),
    ("minItems", "maxItems", False),
    ("minProperties", "maxProperties", False),
)
"""A lower and an upper bound, and whether nothing is left where they are equal."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A schema within parameters.

    :param path: the keys that lead there
    :param place: the same as an author would say it: ``parameters.filter.field``
    :param needed: every call has something that it is about
    """

    path: tuple[str, ...]
    place: str
    node: Node
    needed: bool


def never_right(parameters: Node) -> Iterator[tuple[str, str]]:
    """``(place, why)`` for what no call can ever fulfil."""
    for part in _parts(parameters):
        if part.needed:
            yield from _required_and_refused(part, parameters)


def never_meant(parameters: Node) -> Iterator[tuple[str, str]]:
    """``(place, why)`` for what keeps a part of the parameters from ever being given, or gives a wrong example of it."""
    for part in _parts(parameters):
        if not part.needed:
            yield from _required_and_refused(part, parameters)
        if part.node.get("enum") == []:
            yield part.place, "has an empty enum, which no value fits; list its values, or leave it out"
        yield from _crossed(part)
        yield from _wrong_default(part, parameters)


def _required_and_refused(part: _Part, root: Node) -> Iterator[tuple[str, str]]:
    node = part.node
    required: Any = node.get("required")
    if not isinstance(required, list) or not _refuses_others(node, whole=not part.path):
        return
    for name in cast("list[str]", required):
        if name not in node.get("properties", ()) and not _has_pattern(node, name) and not _said_elsewhere(part, name):
            yield (
                f"{part.place}.required",
                f"names {name!r}, which properties lacks, and what properties lacks is refused, so that no call can be "
                "right; add it to properties, or take it out of required",
            )


def _refuses_others(node: Node, *, whole: bool) -> bool:
    """Whether properties that are not named are refused: a tool's whole arguments are closed where nothing is said."""
    if "additionalProperties" in node:
        return node["additionalProperties"] is False
    return whole and "unevaluatedProperties" not in node


def _has_pattern(node: Node, name: str) -> bool:
    for pattern in node.get("patternProperties", ()):
        try:
            if re.search(pattern, name):
                return True
        except re.error:  # of another kind than Python's: what it matches is not known
            return True
    return False


def _said_elsewhere(part: _Part, name: str) -> bool:
    """Whether another schema could give the property: never where ``additionalProperties`` is false, which sees only its own."""
    if "additionalProperties" in part.node or not any(keyword in part.node for keyword in _ELSEWHERE):
        return False
    others = (one.node for one in _parts(part.node) if one.path)
    return any(keyword in part.node for keyword in ("$ref", "$dynamicRef")) or any(
        name in other.get("properties", ()) or _has_pattern(other, name) or "$ref" in other for other in others
    )


def _crossed(part: _Part) -> Iterator[tuple[str, str]]:
    for low, high, exclusive in _BOUNDS:
        least, most = part.node.get(low), part.node.get(high)
        if not _is_number(least) or not _is_number(most):
            continue
        if least > most or (exclusive and least == most):
            yield part.place, f"has {low} {least} and {high} {most}, which nothing fits; raise {high} or lower {low}"


def _wrong_default(part: _Part, root: Node) -> Iterator[tuple[str, str]]:
    if "default" not in part.node:
        return
    pointer = "".join("/" + quote(key.replace("~", "~0").replace("/", "~1"), safe="~") for key in part.path)
    dialect = str(root.get("$schema", "https://json-schema.org/draft/2020-12/schema"))
    named = "id" if "draft-04" in dialect else "$id"
    whole = {
        "$schema": dialect,
        "type": "object",
        "properties": {"default": {"$ref": f"urn:handrail:parameters#{pointer}"}},
        "$defs" if "/draft/20" in dialect else "definitions": {"all": {**root, named: "urn:handrail:parameters"}},
    }
    try:
        problems = compile_schema(whole).problems({"default": part.node["default"]})
    except InvalidSchema:  # it has names of its own inside, by which its parts are not found from here
        return
    if problems:
        yield part.place, f"has a default that does not fit it: {'; '.join(problems)}; give one that does, or none"


def _parts(root: Node) -> Iterator[_Part]:
    """Every schema within one, itself first, outer ones before inner ones."""
    rest = [_Part((), "parameters", root, True)]
    while rest:
        part = rest.pop(0)
        yield part
        rest += _within(part)


def _within(part: _Part) -> Iterator[_Part]:
    for keyword in _SCHEMAS_IN:
        yield from _inner(part, part.node.get(keyword), (keyword,), f"{part.place}.{keyword}")
    for keyword in _LISTS_IN:
        listed: Any = part.node.get(keyword)
        for at, one in enumerate(cast("list[object]", listed) if isinstance(listed, list) else ()):
            needed = keyword == "allOf"
            yield from _inner(part, one, (keyword, str(at)), f"{part.place}.{keyword}[{at}]", needed=needed)
    required: Any = part.node.get("required")
    for keyword in _MAPS_IN:
        held: Any = part.node.get(keyword)
        own = keyword == "properties"
        for name, one in cast("Node", held if isinstance(held, Mapping) else {}).items():
            place = f"{part.place}.{name}" if own else f"{part.place}.{keyword}.{name}"
            needed = own and isinstance(required, list) and name in required
            yield from _inner(part, one, (keyword, name), place, needed=needed)


def _inner(part: _Part, one: object, keys: tuple[str, ...], place: str, *, needed: bool = False) -> Iterator[_Part]:
    if isinstance(one, Mapping):
        yield _Part((*part.path, *keys), place, cast("Node", one), part.needed and needed)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
