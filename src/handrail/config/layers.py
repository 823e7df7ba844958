"""The layers of settings and their merge: the value in force, its origin, and the values without effect."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, cast

from handrail.config.mcp_settings import find_mcp_server_faults
from handrail.config.operator_settings import (
    LIST_KEYS,
    Settings,
    join_setting_key,
    list_setting_keys,
    split_setting_key,
)
from handrail.config.secret_references import find_secret_table_faults, find_tools_table_faults
from handrail.config.toml_file import find_unsupported_values
from handrail.contract.errors import Diagnostic, UsageError
from handrail.contract.permission_modes import MODES, Mode
from handrail.contract.schema.argument_validation import format_json_path
from handrail.contract.struct import Struct, field
from handrail.contract.tool.manifest import find_model_validation_faults
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

LayerKind = Literal["default", "configuration", "workspace", "environment", "flag"]


_TABLE_CHECKS = {"secrets": find_secret_table_faults, "tools": find_tools_table_faults}


class SettingOrigin(Struct, frozen=True):
    """The origin of a value: ``FILE:LINE``, a variable's name, a flag, or ``""`` for a default."""

    kind: LayerKind
    place: str = ""

    def __str__(self) -> str:
        return self.place or "default"


class LayerValue(Struct, frozen=True):
    """A value of one layer.

    :param key: the setting, such as ``limits.lock_wait_ms``; for an item of a list, the list (``rules``)
    :param inactive_reason: the reason why it has no effect; ``""`` if it is in force
    """

    key: str
    value: Any
    origin: SettingOrigin
    inactive_reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "value": self.value,
            "origin": {"kind": self.origin.kind, "place": self.origin.place},
            "in_force": not self.inactive_reason,
            "reason": self.inactive_reason,
        }


class ConfigLayer(Struct, frozen=True):
    """The settings of one source.

    :param locate: returns the place of a value, by its path (``rules[2]``)
    :param inactive_reason: returns the reason why a value must have no effect, by key and value; ``""`` if it may
    """

    kind: LayerKind
    table: Mapping[str, Any]
    locate: Callable[[str], str]
    inactive_reason: Callable[[str, Any], str] = field(default=lambda key, value: "")

    def find_faults(self) -> list[Diagnostic]:
        """Return the faults of the layer, each with its place."""
        problems = find_model_validation_faults(
            Settings, {key: value for key, value in self.table.items() if key not in _TABLE_CHECKS}
        )
        for key, faults_in in _TABLE_CHECKS.items():  # these checks do not repeat values, which may be secret
            if key in self.table:
                problems |= dict(faults_in(self.table[key]))
        if found := [Diagnostic(self.locate(where), where, text) for where, text in problems.items()]:
            return found
        settings = Settings.model_validate_json(json.dumps(self.table))
        if settings.ceiling is not None:
            for where, text in settings.ceiling.find_faults():
                inner = where.replace("requires", "ceiling", 1)
                found.append(Diagnostic(self.locate(inner), inner, text))
        return found

    def get(self, key: str) -> tuple[Any] | None:
        """Return the value of a key in a tuple, or None."""
        node: Any = self.table
        for part in split_setting_key(key):
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = cast("Mapping[str, Any]", node)[part]
        return (node,)


def separate_invalid_servers(layer: ConfigLayer) -> tuple[ConfigLayer, dict[str, tuple[Diagnostic, ...]]]:
    """Return the layer without the MCP servers that are not valid, and the faults of each by its name.

    A faulty server is unavailable with its reason. It never stops another command.
    """
    mcp: Any = layer.table.get("mcp")
    tables: Any = cast("Mapping[str, Any]", mcp).get("servers") if isinstance(mcp, Mapping) else None
    if layer.kind == "workspace" or not isinstance(tables, Mapping):
        return layer, {}
    sound: dict[str, Any] = {}
    unsound: dict[str, tuple[Diagnostic, ...]] = {}
    for name, server in cast("Mapping[str, Any]", tables).items():
        if faults := find_mcp_server_faults(name, server):
            place = format_json_path(("mcp", "servers", name))
            unsound[name] = tuple(
                Diagnostic(layer.locate(f"{place}.{where}" if where else place), where, text)
                for where, text in faults.items()
            )
        else:
            sound[name] = server
    if not unsound:
        return layer, {}
    table = {**layer.table, "mcp": {**cast("Mapping[str, Any]", mcp), "servers": sound}}
    return replace(layer, table=table), unsound


def merge_layers(layers: Sequence[ConfigLayer]) -> tuple[Settings, tuple[LayerValue, ...]]:
    """Return the settings in force, and the values of all layers.

    Lists are merged. For other settings the last layer wins.

    :param layers: valid layers, the weakest first
    """
    values: list[LayerValue] = []
    table: dict[str, Any] = {}
    for key in _list_set_keys(layers):
        found = _items(layers, key) if key in LIST_KEYS else _candidates(layers, key)
        values += found
        in_force = [value.value for value in found if not value.inactive_reason and value.origin.kind != "default"]
        if in_force:
            _put(table, key, in_force if key in LIST_KEYS else in_force[-1])
    return Settings.model_validate_json(json.dumps(table), strict=True), tuple(values)


def _list_set_keys(layers: Sequence[ConfigLayer]) -> Iterator[str]:
    """Yield every key; for ``tools``, one key for each setting of each tool."""
    for key in list_setting_keys():
        of_tools = (
            dict.fromkeys(inner for layer in layers for inner in _list_tool_keys(layer)) if key == "tools" else ()
        )
        yield from of_tools or (key,)


def _list_tool_keys(layer: ConfigLayer) -> Iterator[str]:
    tools: Mapping[str, Mapping[str, Any]] = (layer.get("tools") or ({},))[0]
    for tool, settings in tools.items():
        for name, value in settings.items():
            config: Mapping[str, Any] = value if name == "config" else {}
            yield from (join_setting_key(("tools", tool, name, key)) for key in config)
            if name != "config":
                yield join_setting_key(("tools", tool, name))


def _items(layers: Sequence[ConfigLayer], key: str) -> list[LayerValue]:
    found: list[LayerValue] = []
    for layer in layers:
        for number, item in enumerate((layer.get(key) or ([],))[0]):
            origin = SettingOrigin(layer.kind, layer.locate(f"{key}[{number}]"))
            found.append(LayerValue(key, item, origin, layer.inactive_reason(key, item)))
    return found


def _candidates(layers: Sequence[ConfigLayer], key: str) -> list[LayerValue]:
    """Return the default and each layer's value; the last one that may have an effect is in force."""
    found = [LayerValue(key, _default(key), SettingOrigin("default"))]
    holding = 0
    for layer in layers:
        if (given := layer.get(key)) is None:
            continue
        reason = layer.inactive_reason(key, given[0])
        if reason and key == "mode" and _narrows(given[0], found[holding].value):
            reason = ""  # a stricter mode is accepted from any source
        if not reason and key == "ceiling" and layer.kind == "workspace" and found[holding].origin.kind != "default":
            reason = (
                f"the ceiling of this machine ({found[holding].origin}) applies, and a workspace file cannot change it"
            )
        found.append(
            LayerValue(
                key, given[0], SettingOrigin(layer.kind, layer.locate(format_json_path(split_setting_key(key)))), reason
            )
        )
        if not reason:
            holding = len(found) - 1
    return _mark_overridden(found, holding)


def _mark_overridden(found: Sequence[LayerValue], holding: int) -> list[LayerValue]:
    """Return the values, and mark each weaker value with the origin that overrides it."""
    over = found[holding].origin
    return [
        value
        if number == holding or value.inactive_reason
        else LayerValue(value.key, value.value, value.origin, f"{over} overrides it")
        for number, value in enumerate(found)
        if number == holding or value.origin.kind != "default"
    ]


def _narrows(mode: str, than: str) -> bool:
    return MODES.index(cast("Mode", mode)) < MODES.index(cast("Mode", than))


def _default(key: str) -> Any:
    node: Any = _defaults()
    for part in split_setting_key(key):
        node = node.get(part, {})
    return copy.deepcopy(node)


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
    return Settings().model_dump(mode="json")


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = split_setting_key(key)
    for part in outer:
        table = table.setdefault(part, {})
    table[last] = value


# Settings from the environment (``HANDRAIL_LIMITS__GRACE_MS=…``) and from flags (``--set limits.grace_ms=…``).

VARIABLE_PREFIX = "HANDRAIL_"
_PROGRAMS = ("STATE", "HEADLESS", "DEBUG", "MODEL")
_PASSED_TO_PROGRAMS = ("TOOL", "CALL_ID", "SESSION_ID", "WORKSPACE", "CONFIG", "WATCHDOG", "SECRETS_FD")
"""The variables that Handrail sets for tools and watchdogs, which may start Handrail in turn."""
OTHER_VARIABLES = frozenset(VARIABLE_PREFIX + name for name in (*_PROGRAMS, *_PASSED_TO_PROGRAMS))
"""Variables with this prefix that are not settings."""

_TEXT = frozenset({"agent", "mode", "sandbox.provider"})


def format_environment_variable_name(key: str) -> str:
    return VARIABLE_PREFIX + key.upper().replace(".", "__")


def build_environment_layer(environment: Mapping[str, str]) -> tuple[ConfigLayer, list[Diagnostic]]:
    """Return the layer of ``HANDRAIL_*`` variables. Empty variables are ignored.

    :return: the layer, and a fault for each unknown or invalid variable
    """
    by_variable = {format_environment_variable_name(key): key for key in list_setting_keys()}
    layer = _LayerBuilder("environment")
    for name in sorted(environment):
        if not name.startswith(VARIABLE_PREFIX) or name in OTHER_VARIABLES or not environment[name]:
            continue
        if (key := by_variable.get(name)) is None:
            near = nearest_names(name, (*by_variable, *(VARIABLE_PREFIX + program for program in _PROGRAMS)), 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(by_variable)}"
            layer.faults.append(Diagnostic(name, "", f"no setting has this variable; {hint}"))
        else:
            layer.add(key, environment[name], name)
    return layer.build(), layer.faults


def build_flags_layer(flags: Iterable[str]) -> tuple[ConfigLayer, list[Diagnostic]]:
    """Return the layer of ``KEY=VALUE`` texts.

    For a repeated key the last value wins. Lists are merged.

    :raises UsageError: for a text without ``=``
    """
    known = list(list_setting_keys())
    layer = _LayerBuilder("flag")
    for text in flags:
        key, sign, value = text.partition("=")
        key = key.strip()
        if not sign or not key:
            raise UsageError(
                f"Option --set {text!r} is not valid. Expected KEY=VALUE, as in --set limits.lock_wait_ms=20000."
            )
        if key in known:
            layer.add(key, value.strip(), f"--set {key}")
            continue
        if (of_tool := _normalize_tool_key(key)) is not None:
            layer.add(of_tool, value.strip(), f"--set {of_tool}")
            continue
        near = nearest_names(key, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        layer.faults.append(Diagnostic(f"--set {key}", "", f"unknown key; {hint}"))
    return layer.build(), layer.faults


def _normalize_tool_key(key: str) -> str | None:
    """Return a key such as ``tools."mail.send".timeout_ms`` in its canonical form, or None."""
    try:
        path = split_setting_key(key)
    except ValueError:
        return None
    return join_setting_key(path) if path[0] == "tools" and len(path) > 2 else None


class _LayerBuilder:
    """A builder of a layer from variables or flags."""

    def __init__(self, kind: LayerKind) -> None:
        self._kind: LayerKind = kind
        self._table: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        self.faults: list[Diagnostic] = []

    def add(self, key: str, text: str, place: str) -> None:
        path = split_setting_key(key)
        value = _rules(text) if key == "rules" else text if key in _TEXT else _parse_json_or_toml_value(text)
        if path[0] == "tools" and path[2:3] == ("config",) and isinstance(value, (bool, int, float)):
            value = text  # settings of tools are strings
        if problems := find_unsupported_values(value):
            self.faults += [Diagnostic(place, where, problem) for where, problem in problems]
            return
        *outer, last = path
        table = self._table
        for part in outer:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                self.faults.append(
                    Diagnostic(place, "", f"{part} is also set to a value that is not a table; remove one of the two")
                )
                return
            table = cast("dict[str, Any]", inner)
        if key in LIST_KEYS and isinstance(value, list) and isinstance(table.get(last), list):
            table[last] += value
        else:
            table[last] = value
        self._places[format_json_path(path)] = place

    def build(self) -> ConfigLayer:
        return ConfigLayer(self._kind, self._table, self._find_place_of_key)

    def _find_place_of_key(self, where: str) -> str:
        """Return the place of the longest known key that ``where`` begins with."""
        if found := [key for key in self._places if where == key or where.startswith((f"{key}.", f"{key}["))]:
            return self._places[max(found, key=len)]
        return next((place for key, place in self._places.items() if key.startswith(f"{where}.")), self._kind)


def _rules(text: str) -> Any:
    """Return the rules in a JSON or TOML array, or on separate lines."""
    if text.lstrip().startswith("["):
        return _parse_json_or_toml_value(text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def _parse_json_or_toml_value(text: str) -> Any:
    """Return a value in JSON or TOML syntax; any other text is a string."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return read["value"] if set(read) == {"value"} else text
