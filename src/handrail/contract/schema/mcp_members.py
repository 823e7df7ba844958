"""Members of MCP's objects whose values clients check: annotations, icons, metadata and texts.

A client refuses a whole list or result for one icon without an address. So Handrail leaves out a value that MCP does not
allow, in definitions of its own tools and of other servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

_ROLES = ("user", "assistant")
_THEMES = ("light", "dark")


def select_valid_members(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a listed item or a content block without values that MCP does not allow. Other members stay as they are."""
    found: dict[str, Any] = {}
    for key, value in fields.items():
        read = _READERS.get(key)
        valid = value if read is None else read(value)
        if valid is not None:
            found[key] = valid
    return found


def _read_annotations(value: object) -> dict[str, Any] | None:
    """Return annotations for clients without invalid members; None without any."""
    if not isinstance(value, Mapping):
        return None
    found = dict(cast("Mapping[str, Any]", value))
    audience, priority = found.pop("audience", None), found.pop("priority", None)
    several = cast("list[Any]", audience) if isinstance(audience, list) else [audience]
    if roles := [one for one in several if one in _ROLES]:
        found["audience"] = roles
    if isinstance(priority, int | float) and not isinstance(priority, bool) and 0 <= priority <= 1:
        found["priority"] = priority
    if not isinstance(found.get("lastModified", ""), str):
        del found["lastModified"]
    return found or None


def _read_icons(value: object) -> list[dict[str, Any]] | None:
    """Return the icons that have an address; None without any."""
    listed = cast("list[object]", value) if isinstance(value, list) else []
    return [icon for one in listed if (icon := _read_icon(one)) is not None] or None


def _read_icon(value: object) -> dict[str, Any] | None:
    icon = dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}
    if not isinstance(icon.get("src"), str):
        return None
    sizes = icon.pop("sizes", None)
    several = sizes.split() if isinstance(sizes, str) else cast("list[Any]", sizes) if isinstance(sizes, list) else []
    if texts := [one for one in several if isinstance(one, str)]:
        icon["sizes"] = texts
    if not isinstance(icon.get("mimeType", ""), str):
        del icon["mimeType"]
    if icon.get("theme", "light") not in _THEMES:
        del icon["theme"]
    return icon


def _read_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _read_size(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_metadata(value: object) -> dict[str, Any] | None:
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else None


_READERS: Mapping[str, Callable[[object], Any]] = {
    "annotations": _read_annotations,
    "icons": _read_icons,
    "_meta": _read_metadata,
    **dict.fromkeys(("title", "description", "mimeType"), _read_text),
    "size": _read_size,
}
