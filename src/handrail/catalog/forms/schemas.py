"""Schemas put together and taken apart: what two of them ask at once, what either of several takes.

What these give is never narrower than what they were given; where that cannot be said in one schema it is looser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from handrail.catalog.forms.dialects import ANNOTATIONS

_MAX_SAID = 240
_BUNDLES = (
    ("if", "then", "else"),
    ("contains", "minContains", "maxContains"),
    ("minimum", "exclusiveMinimum"),
    ("maximum", "exclusiveMaximum"),
    ("items", "prefixItems", "additionalItems"),
)
"""Keywords that change what each other mean, so that one schema's are never put beside another's."""
_APART = ("anyOf", "oneOf", "not", "if", "dependentSchemas")
"""Of two schemas that both have one of these, the other's stays a schema of its own: they name properties."""
_ASKED_OF = {
    **dict.fromkeys(
        ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
        "object",
    ),
    **dict.fromkeys(
        ("maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "propertyOrdering"),
        "object",
    ),
    **dict.fromkeys(
        ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains"), "array"
    ),
    **dict.fromkeys(("maxContains", "unevaluatedItems", "additionalItems"), "array"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"), "string"),
}
_WIDER = {"integer": "number"}


Node = Mapping[str, Any]


def both_of(one: Node, other: Node) -> dict[str, Any]:
    """What both ask, or less: of a keyword that both have, the first one's stays, which is never narrower than both."""
    both = dict(one)
    for keyword, value in other.items():
        bundle = _bundle(keyword)
        if not any(of in one for of in bundle):
            both[keyword] = value
        elif keyword == "properties":
            mine = cast("Node", one[keyword])
            both[keyword] = {**value, **mine}
            for name in value.keys() & mine.keys():
                if value[name] != mine[name]:
                    both[keyword][name] = {"allOf": [mine[name], value[name]]}
        elif keyword == "required":
            both[keyword] = list(dict.fromkeys([*both[keyword], *value]))
        elif keyword in ("allOf", "description"):
            both[keyword] = [*both[keyword], *value] if keyword == "allOf" else f"{both[keyword]} {value}"
    if apart := _kept_apart(one, other):
        both["allOf"] = [*both.get("allOf", ()), apart]
    parts = (one, other)
    if any("patternProperties" in part for part in parts):
        for keyword in ("additionalProperties", "unevaluatedProperties"):
            both.pop(keyword, None)
    elif any(part.get("additionalProperties") is False for part in parts):  # each closes what it names itself
        names = set(both.get("properties", ()))
        for part in parts:
            if part.get("additionalProperties") is False:
                names &= set(part.get("properties", ()))
        both["properties"] = {name: schema for name, schema in both.get("properties", {}).items() if name in names}
    return both


def _bundle(keyword: str) -> tuple[str, ...]:
    return next((keywords for keywords in _BUNDLES if keyword in keywords), (keyword,))


def _kept_apart(one: Node, other: Node) -> dict[str, Any]:
    """The alternatives and conditions of ``other`` that have no place beside those of ``one``."""
    clashing = (of for of in _APART if of in one and of in other and one[of] != other[of])
    return {keyword: other[keyword] for of in clashing for keyword in _bundle(of) if keyword in other}


def united(root: dict[str, Any], branches: Sequence[Node]) -> dict[str, Any]:
    """The root taking what any of its alternatives takes."""
    properties: dict[str, list[Any]] = {}
    for part in branches:
        for name, schema in part.get("properties", {}).items():
            forms = properties.setdefault(name, [])
            if schema not in forms:
                forms.append(schema)
    if (
        root.get("additionalProperties", False) is not False
    ):  # where an alternative does not name it, anything may stand there
        for name, forms in properties.items():
            if {} not in forms and any(name not in part.get("properties", {}) for part in branches):
                forms.append({})
    own: Node = root.get("properties", {})
    flat = dict(root)
    flat["properties"] = {
        **own,
        **{
            name: forms[0] if len(forms) == 1 else {"anyOf": forms}
            for name, forms in properties.items()
            if name not in own
        },
    }
    common = set[str].intersection(*(set(part.get("required", ())) for part in branches))
    required = list(dict.fromkeys([*root.get("required", ()), *sorted(common)]))
    if required:
        flat["required"] = required
    return flat


def choice(keyword: str, branches: Sequence[Node]) -> str:
    """Which properties go together, as a sentence."""
    groups = [
        " and ".join(map(str, part.get("required", ()))) or " or ".join(part.get("properties", ())) for part in branches
    ]
    groups = [group for group in dict.fromkeys(groups) if group]
    how = "exactly one" if keyword == "oneOf" else "at least one"
    return f"Give {how} of: {'; '.join(groups)}." if groups else said(keyword, list(branches))


def by_type(node: dict[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """A list of types as alternatives, each with what is asked of that type."""
    rest = {key: value for key, value in node.items() if key != "type"}
    if "anyOf" in rest and len(types) > 1:
        return rest  # two lists of alternatives cannot stand side by side
    values = rest.pop("enum", None)
    shown = {key: rest.pop(key) for key in tuple(rest) if key in ANNOTATIONS and key != "format"}
    branches: list[dict[str, Any]] = []
    for name in types:
        branch = {
            "type": name,
            **{key: value for key, value in rest.items() if _ASKED_OF.get(key, name) in (name, _WIDER.get(name))},
        }
        if values is not None:
            fits = [value for value in values if kind_of(value) in (name, _WIDER.get(name))]
            if not fits:
                continue
            if name in ("string", "number", "integer"):
                branch["enum"] = fits
        branches.append(branch)
    return {**shown, **branches[0]} if len(branches) == 1 else {**shown, "anyOf": branches} if branches else shown


def pushed_in(node: dict[str, Any]) -> dict[str, Any]:
    """Alternatives that stand alone: what is asked beside them is asked in each."""
    shown = {key: value for key, value in node.items() if key in ANNOTATIONS and key != "format"}
    beside = {key: value for key, value in node.items() if key != "anyOf" and key not in shown}
    if beside:
        given = cast("list[Node | bool]", node["anyOf"])
        node["anyOf"] = [branch if isinstance(branch, bool) else both_of(branch, beside) for branch in given]
    return {**shown, "anyOf": node["anyOf"]}


def bare(value: object) -> Any:
    """A schema without what tells of its properties, for where they stand elsewhere too."""
    if isinstance(value, list):
        return [bare(one) for one in cast("list[object]", value)]
    if not isinstance(value, Mapping):
        return value
    node = cast("Node", value)
    return {key: bare(one) for key, one in node.items() if key not in ANNOTATIONS or not isinstance(one, str)}


def kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def said(keyword: str, value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    return f"({keyword}: {text if len(text) <= _MAX_SAID else text[:_MAX_SAID] + '…'})"
