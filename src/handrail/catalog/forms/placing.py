"""Where schemas stand within a schema, and where its references lead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast
from urllib.parse import unquote

SCHEMAS_IN = (
    "items",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
)
LISTS_IN = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS_IN = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LOCAL = re.compile(r"#/(?:\$defs|definitions)/[^/]+\Z")
"""A reference to one of the definitions of the whole."""
Node = Mapping[str, Any]


def names_in(node: Node) -> Iterable[str]:
    properties: Any = node.get("properties")
    return cast("Mapping[str, Any]", properties) if isinstance(properties, Mapping) else ()


def made_of(node: Node) -> tuple[str, ...]:
    """The references that ``node`` is made of, itself and by ``allOf``."""
    reference = node.get("$ref")
    own = (reference,) if isinstance(reference, str) else ()
    parts = cast("list[Node | bool]", node.get("allOf", ()))
    return (*own, *(one for part in parts if not isinstance(part, bool) for one in made_of(part)))


def references_in(root: Node) -> Iterator[str]:
    for node in schemas_in(root):
        for keyword in ("$ref", "$dynamicRef"):
            if isinstance(node.get(keyword), str):
                yield node[keyword]


def schemas_in(root: Node) -> Iterator[Node]:
    """Every schema within one, itself first."""
    rest: list[object] = [root]
    while rest:
        one = rest.pop()
        if not isinstance(one, Mapping):
            continue
        node = cast("Node", one)
        yield node
        rest += [node.get(keyword) for keyword in SCHEMAS_IN]
        for keyword in LISTS_IN:
            rest += node.get(keyword) or ()
        for keyword in _MAPS_IN:
            inner: Any = node.get(keyword)
            if isinstance(inner, Mapping):
                rest += cast("Mapping[str, Any]", inner).values()


def found_at(root: Node, reference: str) -> object:
    """What a reference leads to, by its path or by an anchor; None where it leads nowhere here."""
    if not reference.startswith("#"):
        return None
    fragment = unquote(reference[1:])
    if fragment and not fragment.startswith("/"):
        anchored = (one for one in schemas_in(root) if fragment in (one.get("$anchor"), one.get("$dynamicAnchor")))
        return next(anchored, None)
    found: Any = root
    for part in fragment.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = cast("Mapping[str, Any]", found)[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(cast("list[Any]", found)):
            found = cast("list[Any]", found)[int(key)]
        else:
            return None
    return found
