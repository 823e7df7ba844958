"""Schemas of other people's tools, read as what they mean: other dialects, words of OpenAPI, and slips that are common.

A server checks its own arguments. So a word that no reader can understand costs only its own check here, and the tool stays.
A schema that describes no object, or refers to another document, remains a fault of its tool.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import jsonschema_rs as rs

_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_TYPE_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("int", "long"), "integer"),
    **dict.fromkeys(("float", "double", "decimal"), "number"),
    **dict.fromkeys(("str", "text", "date", "datetime", "file"), "string"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "tuple"), "array"),
    "bool": "boolean",
    "none": "null",
}
_ONE_SCHEMA = (
    *("additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$ref", "$comment", "deprecated"})
_UNORDERED = ("required", "type", "enum")
_MEMBER_WORDS = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"),
    }
)
_MAX_DEPTH = 100


def _is_count(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and value == int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_expression(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        rs.Draft202012Validator({"pattern": value})
    except ValueError:
        return False
    return True


def _is_map_of_names(value: object) -> bool:
    lists = cast("dict[str, object]", value).values() if isinstance(value, dict) else [None]
    return all(isinstance(one, list) and all(map(_is_text, cast("list[object]", one))) for one in lists)


_ADDRESS = re.compile(r"(?:[A-Za-z0-9._~:/?#@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*")
_ANCHOR = re.compile(r"[A-Za-z_][-A-Za-z0-9._]*")
_VALUE_CHECKS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _is_count),
    **dict.fromkeys(("minContains", "maxContains"), _is_count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    "pattern": _is_expression,
    "multipleOf": lambda value: _is_number(value) and cast("float", value) > 0,
    **dict.fromkeys(("title", "description", "format", "$comment", "$ref"), _is_text),
    "$id": lambda value: isinstance(value, str) and _ADDRESS.fullmatch(value) is not None,
    **dict.fromkeys(
        ("$anchor", "$dynamicAnchor"), lambda value: isinstance(value, str) and _ANCHOR.fullmatch(value) is not None
    ),
    "dependentRequired": _is_map_of_names,
    **dict.fromkeys(("contentEncoding", "contentMediaType", "$schema"), _is_text),
    **dict.fromkeys(("uniqueItems", "deprecated", "readOnly", "writeOnly"), _is_flag),
    "enum": lambda value: isinstance(value, list) and bool(cast("list[object]", value)),
    "examples": _is_list,
}
"""The words whose value must have a type. A word with another value is left out."""


def find_dialect(declared: object) -> str | None:
    """Return the short name of a declared dialect, such as ``draft-07``; None if it is unknown or not declared.

    Schemes, trailing signs and upper case do not matter.
    """
    if not isinstance(declared, str):
        return None
    name = declared.strip().lower().rstrip("#/").partition("://")[2]
    name = name.removeprefix("www.").removeprefix("json-schema.org/").removesuffix("/schema")
    name = name.removeprefix("draft/")
    return name if name in ("2020-12", "2019-09", "draft-07", "draft-06", "draft-05", "draft-04", "draft-03") else None


def normalise_foreign_schema(schema: object) -> dict[str, Any]:
    """Return the parameters of a tool from a schema that a server wrote.

    A missing schema, and an object without any word about its members, take every argument.

    :raises RecursionError: if it is nested too deeply
    """
    if isinstance(schema, bool) or schema is None or schema == []:  # some programs write an empty object as a list
        return {"type": "object", "additionalProperties": True}
    if not isinstance(schema, dict):
        raise ValueError("has an inputSchema that is not an object")
    given = cast("dict[str, Any]", schema)
    dialect = find_dialect(given.get("$schema"))
    modern = dialect not in ("2019-09", "draft-07", "draft-06")
    found = _SchemaMender(modern, dialect).mend(given, 0)
    assert isinstance(found, dict)
    if modern and dialect != "2020-12":
        found.pop("$schema", None)
    if (kind := found.get("type")) is None or (isinstance(kind, list) and "object" in kind):
        found = {**found, "type": "object"} if "type" in found else {"type": "object", **found}
    if found.get("type") == "object" and not found.keys() & _MEMBER_WORDS:
        found["additionalProperties"] = True
    members = found.get("properties")
    if isinstance(members, dict) and not found.keys() & {
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
    }:
        named = cast("dict[str, Any]", members)  # without it, no arguments would fit
        found["properties"] = {**named, **{name: True for name in found.get("required", ()) if name not in named}}
    return found


class _SchemaMender:
    """One pass through a schema.

    :param modern: whether the result is of dialect 2020-12
    :param dialect: the declared dialect
    """

    def __init__(self, modern: bool, dialect: str | None) -> None:
        self._modern = modern
        self._dialect = dialect

    def mend(self, schema: object, depth: int) -> dict[str, Any] | bool:
        """Return a schema in standard words. A value that is not a schema becomes one that accepts everything."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            return {"type": schema} if isinstance(schema, str) and schema in _TYPES else True
        if depth > _MAX_DEPTH:
            raise RecursionError("the schema is nested too deeply")
        given = cast("dict[str, Any]", schema)
        if "$ref" in given and self._dialect in ("draft-03", "draft-04", "draft-05"):
            given = {key: value for key, value in given.items() if key in _ANNOTATIONS}  # the others do not count there
        found: dict[str, Any] = {}
        for key, value in given.items():
            self._take(found, key, value, depth)
        _mend_bounds(found, given)
        if found.pop("nullable", None) is True:
            _allow_null(found)
        return found

    def _take(self, found: dict[str, Any], key: str, value: Any, depth: int) -> None:
        """Add one word to a schema, if it has a meaning."""
        if key == "type":
            if (kind := self._mend_type(value)) is not None:
                found[key] = kind
        elif key == "required":
            if isinstance(value, list):
                names = list(dict.fromkeys(one for one in cast("list[Any]", value) if isinstance(one, str)))
                found[key] = [*names, *(one for one in found.get(key, ()) if one not in names)]
        elif key in _SCHEMA_MAPS:
            if isinstance(value, dict):
                found[key] = {name: self.mend(one, depth + 1) for name, one in cast("dict[str, Any]", value).items()}
                if key == "properties":
                    self._require_marked(found, cast("dict[str, Any]", value))
            elif key == "properties" and value is not None:
                found[key] = {}  # some programs write an empty object as a list
        elif key == "items" and value == []:
            pass  # any items
        elif key == "items" and isinstance(value, list):
            rest = [self.mend(one, depth + 1) for one in cast("list[Any]", value)]
            found["prefixItems" if self._modern else "items"] = rest
        elif key == "additionalItems" and self._modern:
            if "prefixItems" in found:
                found["items"] = self.mend(value, depth + 1)
        elif key in _ONE_SCHEMA:
            if isinstance(value, (dict, bool)):
                found[key] = self.mend(cast("object", value), depth + 1)
        elif key in _SCHEMA_LISTS:
            if isinstance(value, list) and value:
                found[key] = [self.mend(one, depth + 1) for one in cast("list[Any]", value)]
        elif key not in _VALUE_CHECKS or _VALUE_CHECKS[key](value):
            found[key] = value

    @staticmethod
    def _require_marked(found: dict[str, Any], properties: Mapping[str, Any]) -> None:
        """Require the members that are marked ``required: true`` themselves, as in draft 3."""
        marked = [
            name
            for name, one in properties.items()
            if isinstance(one, dict) and cast("dict[str, Any]", one).get("required") is True
        ]
        if marked:
            found["required"] = list(dict.fromkeys([*found.get("required", ()), *marked]))

    @staticmethod
    def _mend_type(value: object) -> str | list[str] | None:
        """Return the types that a word means; None for any type."""
        named = cast("list[Any]", value) if isinstance(value, list) else [value]
        names = [part.strip().lower() for one in named if isinstance(one, str) for part in one.split("|")]
        kinds = list(dict.fromkeys(_TYPE_WORDS.get(one, one) for one in names))
        if not kinds or any(one not in _TYPES for one in kinds):
            return None
        return kinds[0] if len(kinds) == 1 and not isinstance(value, list) else kinds


def _mend_bounds(found: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Read ``exclusiveMinimum: true`` as in draft 4: the bound itself does not count."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if given.get(exclusive) is True and bound in found:
            found[exclusive] = found.pop(bound)


def _allow_null(found: dict[str, Any]) -> None:
    """Let a schema of OpenAPI's ``nullable`` take null."""
    kind: Any = found.get("type")
    if isinstance(kind, (str, list)):
        kinds = cast("list[str]", kind) if isinstance(kind, list) else [kind]
        found["type"] = list(dict.fromkeys([*kinds, "null"]))
        if isinstance(choices := found.get("enum"), list) and None not in choices:
            found["enum"] = [*cast("list[Any]", choices), None]
        return
    for key in ("anyOf", "oneOf"):
        if key in found:
            found[key] = [*found[key], {"type": "null"}]
            return
    if "$ref" in found:
        found["anyOf"] = [{"$ref": found.pop("$ref")}, {"type": "null"}]


def sort_unordered_lists(schema: Any) -> Any:
    """Return a schema with the lists sorted whose order has no meaning: ``required``, ``type`` and ``enum``.

    Two schemas that differ only in such an order are then equal. Values such as defaults and examples stay as they are.
    """
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", schema).items():
        several = cast("list[Any]", value) if isinstance(value, list) else None
        named = cast("dict[str, Any]", value) if isinstance(value, dict) else None
        if key in _UNORDERED and several is not None:
            found[key] = sorted(several, key=repr)
        elif key == "dependentRequired" and named is not None:
            found[key] = {name: sort_unordered_lists({"required": one})["required"] for name, one in named.items()}
        elif key in _SCHEMA_MAPS and named is not None:
            found[key] = {name: sort_unordered_lists(one) for name, one in named.items()}
        elif key in (*_SCHEMA_LISTS, "items") and several is not None:
            found[key] = [sort_unordered_lists(one) for one in several]
        elif key in _ONE_SCHEMA:
            found[key] = sort_unordered_lists(value)
        else:
            found[key] = value
    return found
