"""The methods of Google's APIs as tool definitions, out of the package ``google-api-python-client`` (Apache-2.0).

Its wheel holds the description of every API: the methods' names, what they do, what they take. It is fetched alone, once,
and never installed.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from finding.bfcl import fetched

VERSION = "2.202.0"

_PLACE = re.compile(r"documents/(?P<api>[^.]+)\.(?P<version>.+)\.json$")
_STABLE = re.compile(r"v(\d+)(?:[._](\d+))?")


def google() -> Iterator[dict[str, Any]]:
    """Every method of the latest version of every API, those of small APIs first."""
    latest: dict[str, tuple[tuple[bool, list[int], str], str]] = {}
    with zipfile.ZipFile(fetched("google-api-python-client", VERSION)) as wheel:
        for place in wheel.namelist():
            if found := _PLACE.search(place):
                rank = _rank(found["version"])
                latest[found["api"]] = max(latest.get(found["api"], (rank, place)), (rank, place))
        apis = [json.loads(wheel.read(place)) for _, place in latest.values()]
    several = [list(_methods(api, api.get("schemas") or {})) for api in apis]
    for methods in sorted(several, key=lambda each: (len(each), each[0]["name"] if each else "")):
        yield from methods


def _rank(version: str) -> tuple[bool, list[int], str]:
    """Later is higher, and whatever is a beta is lower than what is not."""
    stable = _STABLE.fullmatch(version)
    return stable is not None, [int(each or 0) for each in stable.groups()] if stable else [], version


def _methods(held: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for method in (held.get("methods") or {}).values():
        properties = {name: _plain(each) for name, each in (method.get("parameters") or {}).items()}
        body = schemas.get((method.get("request") or {}).get("$ref", ""), {})
        properties |= {name: _plain(each) for name, each in (body.get("properties") or {}).items()}
        required = [name for name, each in (method.get("parameters") or {}).items() if each.get("required")]
        yield {
            "name": method["id"],
            "description": method.get("description") or "",
            "parameters": {"type": "object", "properties": properties, "required": required},
        }
    for inner in (held.get("resources") or {}).values():
        yield from _methods(inner, schemas)


def _plain(said: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = (
        {"type": said["type"]} if said.get("type") in ("string", "integer", "number", "boolean") else {}
    )
    if said.get("description"):
        out["description"] = said["description"]
    if said.get("enum") and out.get("type") == "string":
        out["enum"] = said["enum"]
    return out
