"""Arguments as text, the way a model or a shell hands them over: parsed strictly and within bounds."""

from __future__ import annotations

import json
from typing import Any, cast

MAX_ARGUMENT_BYTES = 8 * 1024 * 1024
MAX_ARGUMENT_DEPTH = 64


class ArgumentText(ValueError):
    """The text is not acceptable JSON; ``str()`` says what was wrong and what was expected."""


def parse_arguments(text: str | bytes, *, max_bytes: int = MAX_ARGUMENT_BYTES) -> dict[str, Any]:
    """A JSON object from ``text``.

    Refused, each with its own message: more than ``max_bytes``, nested deeper than 64 levels, duplicate
    keys, NaN and infinities, invalid UTF-8, anything that is not one object. Empty text is an empty object,
    since several providers send that for a tool without parameters.

    :raises ArgumentText: when refused
    """
    if len(text) > max_bytes:
        raise ArgumentText(
            f"the arguments are {len(text):,} bytes long; at most {max_bytes:,} are taken. Pass a path to a file instead"
        )
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise ArgumentText(f"the arguments are not UTF-8 (byte {error.start}); send JSON encoded as UTF-8") from None
    if not decoded.strip():
        return {}
    check_depth(decoded)
    value: Any
    try:
        value = json.loads(decoded, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ArgumentText(
            f"the arguments are not JSON: {error.msg} at line {error.lineno}, column {error.colno}; expected one JSON object"
        ) from None
    except ArgumentText:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise ArgumentText(f"the arguments hold a number that cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ArgumentText(f'the arguments are a JSON {json_type(value)}; expected an object such as {{"path": "…"}}')
    if "\\ud" in decoded or "\\uD" in decoded:
        _refuse_lone_surrogates(cast("object", value))
    return cast("dict[str, Any]", value)


def json_type(value: object) -> str:
    """JSON's name for the type of ``value``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    if isinstance(value, (list, tuple)):
        return "array"
    return "object" if isinstance(value, dict) else type(value).__name__


def check_depth(text: str, limit: int = MAX_ARGUMENT_DEPTH) -> None:
    """Refuse deep nesting before a recursive parser sees it.

    :raises ArgumentText: when the text nests deeper than ``limit``
    """
    if text.count("[") + text.count("{") <= limit:
        return
    depth = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            if depth > limit:
                raise ArgumentText(f"the arguments are nested deeper than {limit} levels; flatten them")
        elif char in "]}":
            depth -= 1


def _refuse_lone_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ArgumentText(
            "the arguments hold half of a surrogate pair (\\udXXX), which is no character; send whole characters"
        ) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = sorted({key for key, _ in pairs if key in seen or seen.add(key)})
        raise ArgumentText(
            f"the arguments name {', '.join(repr(k[:80]) for k in twice[:5])} twice in one object; give each key once"
        )
    return found


def _no_constant(name: str) -> Any:
    raise ArgumentText(f"the arguments hold {name}, which is not JSON; use a number or null")
