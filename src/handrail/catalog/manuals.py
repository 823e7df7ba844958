"""A tool's manual, and which manuals a session has read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol, cast

from handrail.catalog.view import View
from handrail.contract.doors.jobs import Manual
from handrail.contract.errors import ToolError
from handrail.contract.generation import Entry
from handrail.contract.tool.names import wire_name

READER = "info"
"""The tool that reads manuals, under whose name a session keeps which it has read."""
_KEY = "manuals"
_MAX_DEPTH = 6


class Values(Protocol):
    """Where session values are kept."""

    async def get(self, session_id: str, tool_id: str, key: str) -> Any: ...

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None: ...


class ManualsRead:
    """Of one session; kept with it. What was read is a definition: a tool that has changed is read again."""

    def __init__(self, session_id: str, values: Values) -> None:
        self._session_id = session_id
        self._values = values
        self._known: dict[str, str] | None = None

    async def has(self, entry: Entry) -> bool:
        """:raises LogUnavailable: when it cannot be told"""
        return (await self._read()).get(entry.id) == entry.definition_hash

    async def note(self, entry: Entry) -> None:
        """It has been read.

        :raises LogUnavailable: when that cannot be kept
        """
        known = await self._read()
        if known.get(entry.id) != entry.definition_hash:
            known[entry.id] = entry.definition_hash
            await self._values.put(self._session_id, READER, _KEY, dict(known))

    async def _read(self) -> dict[str, str]:
        if self._known is None:
            kept = await self._values.get(self._session_id, READER, _KEY)
            if self._known is None:
                self._known = dict(cast("dict[str, str]", kept)) if isinstance(kept, dict) else {}
        return self._known


def manual_of(entry: Entry, view: View) -> Manual:
    """The manual of ``entry``. It lists what goes in, so that no other field of the runtime view reaches a model."""
    spec = entry.spec
    return Manual(
        id=spec.id,
        name=wire_name(spec.id),
        category=view.category(spec.id),
        description=spec.description,
        parameters=spec.parameters,
        documentation=spec.documentation.strip(),
        guidance=spec.guidance.strip(),
        example=example_of(entry),
        source="" if entry.foreign is None else view.category(spec.id),
    )


def example_of(entry: Entry) -> dict[str, Any] | None:
    """Arguments of the least kind that the tool takes: those that are required, each as its schema says first, and one more
    where it does not take these alone."""
    schema = entry.spec.parameters
    made = _example(schema, schema, 0)
    if not isinstance(made, dict):
        return None
    required = cast("dict[str, Any]", made)
    properties = cast("Mapping[str, Any]", schema.get("properties") or {})
    more = ({name: _example(of, schema, 1, name)} for name, of in properties.items() if name not in required)
    for one in ({}, *more):
        with suppress(ToolError):
            entry.admitted(arguments := {**required, **one})
            return arguments
    return None


def _example(schema: object, root: Mapping[str, Any], depth: int, name: str = "text") -> Any:
    """A value for ``schema``, which belongs to ``name``, or None where none can be made up."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    node = cast("Mapping[str, Any]", schema)
    if isinstance(node.get("$ref"), str):
        return _example(_referred(node["$ref"], root), root, depth + 1, name)
    for key in ("examples", "enum"):
        if isinstance(node.get(key), list) and node[key]:
            return node[key][0]
    for key in ("const", "default"):
        if key in node:
            return node[key]
    for key in ("oneOf", "anyOf", "allOf"):
        if isinstance(node.get(key), list) and node[key] and "properties" not in node:
            return _example(node[key][0], root, depth + 1, name)
    kind = node.get("type", "object" if "properties" in node else "string")
    if isinstance(kind, list):
        kind = cast("list[Any]", kind)[0] if kind else "null"
    if kind == "object":
        properties = cast("Mapping[str, Any]", node.get("properties") or {})
        required = cast("list[str]", node.get("required") or [])
        return {inner: _example(properties.get(inner), root, depth + 1, inner) for inner in required}
    if kind == "array":
        count = node.get("minItems", 0)
        return [_example(node.get("items"), root, depth + 1, name)] * min(count, 5) if isinstance(count, int) else []
    if kind == "string":
        return _TEXTS.get(str(node.get("format")), name if "pattern" in node else f"<{name}>")
    if kind in ("integer", "number"):
        least = node.get("minimum", 1)
        return least if isinstance(least, (int, float)) else 1
    return True if kind == "boolean" else None


_TEXTS = {
    "path": "notes.md",
    "uri": "https://example.org/",
    "host": "example.org",
    "command": "git status",
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "email": "somebody@example.org",
}


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for step in reference.removeprefix("#/").split("/"):
        if not isinstance(found, Mapping):
            return None
        found = cast("Mapping[str, object]", found).get(step.replace("~1", "/").replace("~0", "~"))
    return found
