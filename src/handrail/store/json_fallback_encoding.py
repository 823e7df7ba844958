"""JSON encoding that never fails: a value without a JSON form is stored in a marked substitute form.

The fast path is orjson. Values that it rejects (half surrogate pairs, integers beyond 64 bits, keys that are not text,
cycles, depth) take a slower path. Its texts begin with a blank, which selects the standard library's decoder; that one reads
everything back unchanged that JSON can express. Other values are replaced:

- NaN and infinities become ``null``: JSON has neither
- bytes become ``{"$bytes": "<base64>"}``; sets and tuples become arrays
- any other object becomes ``{"$object": "<type>", "text": "<its str, cut>"}``
- values deeper than 200 levels, or in a cycle, become ``{"$depth": 200}``
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Set
from typing import Any, cast

import msgspec
import orjson

from handrail.contract.struct import Struct

MAX_DEPTH = 200
MAX_BYTES = 16 * 1024 * 1024
_MAX_TEXT = 2_000


def encode_json_with_fallback(value: object, max_bytes: int = MAX_BYTES) -> bytes:
    """Return ``value`` as JSON. Never raises.

    :param max_bytes: a longer text is replaced with ``{"$oversized": <its length>, "head": "<its beginning>"}``
    """
    try:
        encoded = orjson.dumps(value, default=_substitute)
    except Exception:  # every value must be recorded
        encoded = _encode_slowly(value)
    if len(encoded) > max_bytes:
        head = encoded[: max_bytes // 4].decode("utf-8", "replace")
        encoded = orjson.dumps({"$oversized": len(encoded), "head": head})
    return encoded


def decode_json_with_fallback(encoded: bytes) -> Any:
    """Return the inverse of :func:`encode_json_with_fallback`.

    :raises ValueError: if the bytes are not JSON
    """
    return json.loads(encoded) if encoded[:1] == b" " else orjson.loads(encoded)


def decode_stored_object(encoded: object) -> dict[str, Any] | None:
    """Return a stored JSON object; None if it is damaged."""
    try:
        found: Any = decode_json_with_fallback(encoded) if isinstance(encoded, bytes) else None
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def _encode_slowly(value: object) -> bytes:
    try:
        return b" " + json.dumps(_to_plain(value, 0), separators=(",", ":")).encode("ascii")
    except Exception as error:
        note = {"$object": type(value).__name__, "text": f"not encodable: {type(error).__name__}"}
        return json.dumps(note).encode("ascii")


def _to_plain(value: object, depth: int) -> object:
    """Return ``value`` in types that the standard library's encoder accepts."""
    if value is None or isinstance(value, (bool, str)):
        return value if not isinstance(value, enum.Enum) else _to_plain(value.value, depth)
    if isinstance(value, int):
        number = int(value)
        return number if number.bit_length() < 10_000 else {"$integer": hex(number)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return {"$depth": MAX_DEPTH} if depth >= MAX_DEPTH else _compound_to_plain(value, depth)


def _compound_to_plain(value: object, depth: int) -> object:
    if isinstance(value, Mapping):
        items = list(cast("Mapping[object, object]", value).items())
        return {key if isinstance(key, str) else _show_value(key): _to_plain(inner, depth + 1) for key, inner in items}
    if isinstance(value, (list, tuple, Set)):
        return [_to_plain(inner, depth + 1) for inner in list(cast("list[object]", value))]
    if isinstance(value, orjson.Fragment):
        return _to_plain(decode_json_with_fallback(orjson.dumps(value)), depth)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name), depth + 1) for field in dataclasses.fields(value)}
    return _substitute(value)


def _substitute(value: object) -> object:
    """Return the substitute for an object without a JSON form."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": base64.b64encode(bytes(cast("bytes", value))).decode("ascii")}
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else _show_value(key): inner
            for key, inner in list(cast("Mapping[object, object]", value).items())
        }
    if isinstance(value, Set):
        return list(cast("Set[object]", value))
    if isinstance(value, Struct):
        return msgspec.structs.asdict(value)
    return {"$object": type(value).__name__, "text": _show_value(value)}


def _show_value(value: object) -> str:
    try:
        return str(value)[:_MAX_TEXT]
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__}>"
