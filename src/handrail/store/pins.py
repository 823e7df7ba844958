"""The definitions of a foreign source's tools that a person has approved: a file a source, for all workspaces of this user.

What cannot be read as a record counts as none: then nothing of the source is approved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from handrail.store import private
from handrail.store.folders import unwritable

VERSION = 1
MAX_BYTES = 64 * 1024 * 1024


def read(state: Path, source: str) -> bytes | None:
    """The record of what was approved of a source, or None where there is none.

    :param state: the root of all state
    """
    return private.read(_path(state, source), MAX_BYTES)


def tools_in(content: bytes, source: str) -> dict[str, dict[str, Any]]:
    """By tool id, what a record says was approved of each; empty where it is no record of ``source``."""
    try:
        data: Any = json.loads(content)
        tools: Any = data["tools"] if data["version"] == VERSION and data["source"] == source else {}
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(tools, dict):
        return {}
    held = cast("dict[str, Any]", tools)
    return {tool_id: cast("dict[str, Any]", kept) for tool_id, kept in held.items() if isinstance(kept, dict)}


def write(state: Path, source: str, tools: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep this, instead of what was approved of the source before.

    :raises StartError: when the state folder cannot be written
    """
    path = _path(state, source)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path.parent, error) from None
    whole = {"version": VERSION, "source": source, "tools": dict(tools)}
    private.write(path, json.dumps(whole, ensure_ascii=True, sort_keys=True).encode())


def _path(state: Path, source: str) -> Path:
    name = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    return state / "sources" / f"{name}.json"
