"""Reads fields of the SDKs' objects, which are built from what a server sent without any check."""

from __future__ import annotations

import json
from typing import Any, cast


def get(value: object, name: str) -> object:
    """The field, or None where it is missing."""
    return getattr(value, name, None)


def text(value: object, name: str) -> str | None:
    """The field if it is a text of at least one character."""
    found = get(value, name)
    return found if isinstance(found, str) and found else None


def written(value: object, name: str) -> str | None:
    """The field as JSON text, which some servers send as the object itself; None where there is nothing in it."""
    found = get(value, name)
    return text(value, name) if found is None or isinstance(found, str) else json.dumps(found, default=str)


def count(value: object, name: str) -> int:
    """The field if it is a positive integer, else 0."""
    found = get(value, name)
    return found if isinstance(found, int) and found > 0 else 0


def plain(block: object) -> dict[str, Any] | None:
    """An SDK's object as the JSON that it was made of; None where it is none."""
    dump = getattr(block, "model_dump", None)
    if dump is None and not isinstance(block, dict):
        return None
    try:
        given = cast("Any", block) if dump is None else dump(mode="json", exclude_unset=True, warnings=False)
        plain: Any = json.loads(json.dumps(given))
    except (TypeError, ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", plain) if isinstance(plain, dict) else None
