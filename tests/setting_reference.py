"""Generate the reference page of the configuration from :mod:`handrail.config.operator_settings`.

``python -m tests.conformance`` writes the page to ``docs/reference/configuration.md`` and compares it with ``--check``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from handrail.config.layers import format_environment_variable_name
from handrail.config.operator_settings import OPERATOR_ONLY, Settings, list_setting_keys

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "configuration.md"

_HEAD = """\
# Configuration

This page describes every setting of `handrail.toml`. `make docs` writes it from the settings themselves, and a test fails if
one is missing. [Configure Handrail](../how-to/configure.md) shows how to use them.

## Places

A setting can come from five places. A later one overrides an earlier one. The lists `rules` and `watchdogs` are merged over all
places.

1. The default.
2. Your own `handrail.toml` in the platform's configuration folder, or the file of `--config`.
3. The workspace file, `handrail.toml` in the workspace.
4. An environment variable. Its value is JSON, TOML or text. `rules` also takes one rule a line.
5. `--set KEY=VALUE` on the command line.

Each section says what a workspace file can do:

- **yes**: the value applies once you trust the file with `handrail trust`.
- **stricter**: an untrusted file can choose a stricter mode. A trusted file can choose any mode.
- **restricting**: rules of an untrusted file apply if they deny or ask. Rules that allow apply once you trust the file.
- **no**: Handrail rejects the key in a workspace file.

`handrail config` prints each value in force and where it comes from. `handrail config --schema` prints the JSON schema.
"""
_WORKSPACE = {"mode": "stricter", "rules": "restricting"}
_NOTES = {"ceiling": " It cannot change a ceiling that another place sets."}
_LINKED = {"Requires": "a table of permissions, as `[requires]` of an [agent manifest](agent-manifest.md)"}
"""Models that another page describes."""


class Setting(NamedTuple):
    """One row of the page."""

    key: str
    type: str
    default: str
    range: str
    meaning: str


def schema() -> dict[str, Any]:
    """Return the JSON schema of all settings."""
    return Settings.model_json_schema()


def settings() -> dict[str, list[Setting]]:
    """Return the settings of each top-level key."""
    whole = schema()
    return {name: list(_settings(name, node, whole)) for name, node in whole["properties"].items()}


def render() -> str:
    """Return the page as Markdown."""
    whole, variables = schema(), {key: format_environment_variable_name(key) for key in list_setting_keys()}
    lines = [_HEAD]
    for name, found in settings().items():
        node = whole["properties"][name]
        lines += [f"## `{name}` {{#{name}}}", "", str(node["description"]), ""]
        reason = OPERATOR_ONLY.get(name)
        allowed = "no" if reason else _WORKSPACE.get(name, "yes")
        lines += [f"Workspace file: **{allowed}**.{f' It {reason}.' if reason else _NOTES.get(name, '')}", ""]
        if name in variables and [one.key for one in found] != [name]:
            lines += [f"Environment variable: `{variables[name]}`.", ""]
        lines += ["| key, environment variable | type | default | range | meaning |", "|---|---|---|---|---|"]
        for one in found:
            named = f"<br>`{variables[one.key]}`" if one.key in variables else ""
            lines.append(f"| `{one.key}`{named} | {one.type} | {one.default} | {one.range} | {one.meaning} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _settings(key: str, node: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield a setting, or the settings of a table."""
    model = _model(node, whole)
    if model is not None and key not in ("ceiling",):
        inner, title = model
        prefix = f"{key}{title}"
        if "." in key and key in set(list_setting_keys()):
            yield Setting(key, "table", "none", "–", _escaped(_apart(node)[0]))
        for name, below in inner["properties"].items():
            yield from _settings(f"{prefix}.{name}", below, whole)
        if "oneOf" not in json.dumps(node):
            return
    meaning, default = _apart(node)
    yield Setting(key, _type(node, whole), default, _range(node), _escaped(meaning))


def _model(node: Mapping[str, Any], whole: Mapping[str, Any]) -> tuple[Mapping[str, Any], str] | None:
    """Return the table that a node is, or has under names or as items, and what follows its key."""
    candidates: list[Any] = [(node, "")]
    candidates += [(one, "") for one in node.get("anyOf", ())]
    if isinstance(more := _members(node), dict):
        candidates.append((more, ".NAME"))
    if isinstance(items := node.get("items"), dict):
        candidates += [(items, "[]"), *((one, "[]") for one in cast("dict[str, Any]", items).get("oneOf", ()))]
    for one, title in candidates:
        if "$ref" in one:
            name = str(one["$ref"]).rpartition("/")[2]
            if name not in _LINKED and name not in ("PrefixedSecretReference", "NamedSecretReference"):
                return whole["$defs"][name], title
    return None


def _members(node: Mapping[str, Any]) -> Any:
    """Return the schema of the members of a table whose keys the user chooses, if it has one."""
    return next(iter(node.get("patternProperties", {}).values()), node.get("additionalProperties"))


def _type(node: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    if "$ref" in node:
        name = str(node["$ref"]).rpartition("/")[2]
        if name in _LINKED:
            return _LINKED[name]
        return '`{ secret = "NAME" }`' if name in ("PrefixedSecretReference", "NamedSecretReference") else "table"
    if "enum" in node:
        return ", ".join(f"`{one}`" for one in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    for word in ("anyOf", "oneOf"):
        if word in node:
            return " or ".join(_type(one, whole) for one in node[word] if one.get("type") != "null")
    kind = node.get("type")
    if kind == "array":
        items: Any = node.get("items", {})
        return f"array of {_type(items, whole)}"
    if kind == "object":
        more = _members(node)
        return "table" if not isinstance(more, dict) else f"table of {_type(cast('dict[str, Any]', more), whole)}"
    return str(kind or "any JSON")


def _apart(node: Mapping[str, Any]) -> tuple[str, str]:
    """Return the meaning, and the default as it is written in TOML."""
    text = str(node.get("description", "")).rstrip()
    meaning, found, _ = text.partition(" Default")
    if "default" not in node:
        return (meaning if found else text), "required"
    value = node["default"]
    return (meaning if found else text), "none" if value in (None, "", [], {}) else f"`{json.dumps(value)}`"


def _range(node: Mapping[str, Any]) -> str:
    nodes = [node, *cast("Iterable[dict[str, Any]]", node.get("anyOf", ()))]
    low = next((one["minimum"] for one in nodes if "minimum" in one), None)
    low = next((one["exclusiveMinimum"] + 1 for one in nodes if "exclusiveMinimum" in one), low)
    high = next((one["maximum"] for one in nodes if "maximum" in one), None)
    if high == 2**31 - 1:
        high = None
    if low is None and high is None:
        return "–"
    return f"{low} to {high}" if high is not None else f"at least {low}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
