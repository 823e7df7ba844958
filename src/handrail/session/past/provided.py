"""Storing what a provider's own tool returned: its JSON, and the files that it carries as base64."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any, cast

_DATA_URL = re.compile(r"data:([A-Za-z0-9!#$&^_.+-]{1,100}/[A-Za-z0-9!#$&^_.+-]{1,100})(?:;[^,;]{0,100})*;base64,")
_MAX_DEPTH = 64
File = tuple[bytes, str]
"""Its content, and its media type."""


def split(content: Any) -> tuple[Any, list[File]]:
    """``content`` with ``{"file": n, "media_type", "bytes"}`` in the place of its n-th file, and the files."""
    files: list[File] = []
    return _walk(content, files, 0), files


def _walk(value: Any, files: list[File], depth: int) -> Any:
    if isinstance(value, str):
        found = _DATA_URL.match(value)
        taken = None if found is None else _taken(value[found.end() :], found[1], files)
        return value if taken is None else taken
    if depth >= _MAX_DEPTH:
        return "(nested too deeply to be kept)" if isinstance(value, (dict, list)) else value
    if isinstance(value, Mapping):
        inner = cast("Mapping[str, Any]", value)
        data, media_type = inner.get("data"), inner.get("media_type")
        if inner.get("type") == "base64" and isinstance(data, str) and isinstance(media_type, str):
            taken = _taken(data, media_type, files)
            if taken is not None:
                return taken
        return {key: _walk(one, files, depth + 1) for key, one in inner.items()}
    if isinstance(value, list):
        return [_walk(one, files, depth + 1) for one in cast("list[Any]", value)]
    return value


def _taken(text: str, media_type: str, files: list[File]) -> dict[str, Any] | None:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    files.append((data, media_type))
    return {"file": len(files), "media_type": media_type, "bytes": len(data)}
