"""The layers of settings and their merge: the value in force, its origin, and the values without effect."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, cast

from handrail.config.reading import unsayable
from handrail.config.secrets import faults_in_secrets, faults_in_tools
from handrail.config.settings import LISTS, Settings, key_of, keys, path_of
from handrail.contract.errors import Fault, UsageError
from handrail.contract.modes import MODES, Mode
from handrail.contract.schema.schema import path_text
from handrail.contract.tool.manifest import faults_of
from handrail.contract.tool.names import nearest

Kind = Literal["default", "configuration", "workspace", "environment", "flag"]


_APART = {"secrets": faults_in_secrets, "tools": faults_in_tools}


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a value: ``FILE:LINE``, a variable's name, a flag, or ``""`` for a default."""

    kind: Kind
    place: str = ""

    def __str__(self) -> str:
        return self.place or "default"


@dataclass(frozen=True, slots=True)
class Value:
    """A value of one layer.

    :param key: the setting, such as ``limits.lock_wait_ms``; for an item of a list, the list (``rules``)
    :param not_in_force: the reason why it has no effect; ``""`` if it is in force
    """

    key: str
    value: Any
    origin: Origin
    not_in_force: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "value": self.value,
            "origin": {"kind": self.origin.kind, "place": self.origin.place},
            "in_force": not self.not_in_force,
            "reason": self.not_in_force,
        }


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of one source.

    :param place: returns the place of a value, by its path (``rules[2]``)
    :param holds_back: returns the reason why a value must have no effect, by key and value; ``""`` if it may
    """

    kind: Kind
    table: Mapping[str, Any]
    place: Callable[[str], str]
    holds_back: Callable[[str, Any], str] = field(default=lambda key, value: "")

    def faults(self) -> list[Fault]:
        """Return the faults of the layer, each with its place."""
        problems = faults_of(Settings, {key: value for key, value in self.table.items() if key not in _APART})
        for key, faults_in in _APART.items():  # these checks do not repeat values, which may be secret
            if key in self.table:
                problems |= dict(faults_in(self.table[key]))
        found = [Fault(self.place(where), where, text) for where, text in problems.items()]
        if found:
            return found
        settings = Settings.model_validate_json(json.dumps(self.table))
        if settings.ceiling is not None:
            for where, text in settings.ceiling.faults():
                inner = where.replace("requires", "ceiling", 1)
                found.append(Fault(self.place(inner), inner, text))
        return found

    def get(self, key: str) -> tuple[Any] | None:
        """Return the value of a key in a tuple, or None."""
        node: Any = self.table
        for part in path_of(key):
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = cast("Mapping[str, Any]", node)[part]
        return (node,)


def merged(layers: Sequence[Layer]) -> tuple[Settings, tuple[Value, ...]]:
    """Return the settings in force, and the values of all layers.

    Lists are merged. For other settings the last layer wins.

    :param layers: valid layers, the weakest first
    """
    values: list[Value] = []
    table: dict[str, Any] = {}
    for key in _given_keys(layers):
        found = _items(layers, key) if key in LISTS else _candidates(layers, key)
        values += found
        in_force = [value.value for value in found if not value.not_in_force and value.origin.kind != "default"]
        if in_force:
            _put(table, key, in_force if key in LISTS else in_force[-1])
    return Settings.model_validate_json(json.dumps(table), strict=True), tuple(values)


def _given_keys(layers: Sequence[Layer]) -> Iterator[str]:
    """Yield every key; for ``tools``, one key for each setting of each tool."""
    for key in keys():
        of_tools = dict.fromkeys(inner for layer in layers for inner in _of_tools(layer)) if key == "tools" else ()
        yield from of_tools or (key,)


def _of_tools(layer: Layer) -> Iterator[str]:
    tools: Mapping[str, Mapping[str, Any]] = (layer.get("tools") or ({},))[0]
    for tool, settings in tools.items():
        for name, value in settings.items():
            config: Mapping[str, Any] = value if name == "config" else {}
            yield from (key_of(("tools", tool, name, key)) for key in config)
            if name != "config":
                yield key_of(("tools", tool, name))


def _items(layers: Sequence[Layer], key: str) -> list[Value]:
    found: list[Value] = []
    for layer in layers:
        for number, item in enumerate((layer.get(key) or ([],))[0]):
            origin = Origin(layer.kind, layer.place(f"{key}[{number}]"))
            found.append(Value(key, item, origin, layer.holds_back(key, item)))
    return found


def _candidates(layers: Sequence[Layer], key: str) -> list[Value]:
    """Return the default and each layer's value; the last one that may have an effect is in force."""
    found = [Value(key, _default(key), Origin("default"))]
    holding = 0
    for layer in layers:
        if (given := layer.get(key)) is None:
            continue
        reason = layer.holds_back(key, given[0])
        if reason and key == "mode" and _narrows(given[0], found[holding].value):
            reason = ""  # a stricter mode is accepted from any source
        if not reason and key == "ceiling" and layer.kind == "workspace" and found[holding].origin.kind != "default":
            reason = (
                f"the ceiling of this machine ({found[holding].origin}) applies, and a workspace file cannot change it"
            )
        found.append(Value(key, given[0], Origin(layer.kind, layer.place(path_text(path_of(key)))), reason))
        if not reason:
            holding = len(found) - 1
    return _with_overridden(found, holding)


def _with_overridden(found: Sequence[Value], holding: int) -> list[Value]:
    """Return the values, and mark each weaker value with the origin that overrides it."""
    over = found[holding].origin
    return [
        value
        if number == holding or value.not_in_force
        else Value(value.key, value.value, value.origin, f"{over} overrides it")
        for number, value in enumerate(found)
        if number == holding or value.origin.kind != "default"
    ]


def _narrows(mode: str, than: str) -> bool:
    return MODES.index(cast("Mode", mode)) < MODES.index(cast("Mode", than))


def _default(key: str) -> Any:
    node: Any = _defaults()
    for part in path_of(key):
        node = node.get(part, {})
    return copy.deepcopy(node)


@lru_cache(maxsize=1)
def _defaults() -> dict[str, Any]:
    return Settings().model_dump(mode="json")


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    *outer, last = path_of(key)
    for part in outer:
        table = table.setdefault(part, {})
    table[last] = value


# Settings from the environment (``HANDRAIL_LIMITS__GRACE_MS=…``) and from flags (``--set limits.grace_ms=…``).

PREFIX = "HANDRAIL_"
_PROGRAMS = ("STATE", "HEADLESS", "DEBUG", "MODEL")
_TOLD = ("TOOL", "CALL_ID", "SESSION_ID", "WORKSPACE", "CONFIG", "WATCHDOG", "SECRETS_FD")
"""The variables that Handrail sets for tools and watchdogs, which may start Handrail in turn."""
OTHERS = frozenset(PREFIX + name for name in (*_PROGRAMS, *_TOLD))
"""Variables with this prefix that are not settings."""

_TEXT = frozenset({"agent", "mode", "sandbox.provider"})


def variable(key: str) -> str:
    """Return the name of the environment variable of a setting."""
    return PREFIX + key.upper().replace(".", "__")


def of_environment(environment: Mapping[str, str]) -> tuple[Layer, list[Fault]]:
    """Return the layer of ``HANDRAIL_*`` variables. Empty variables are ignored.

    :return: the layer, and a fault for each unknown or invalid variable
    """
    by_variable = {variable(key): key for key in keys()}
    layer = _Given("environment")
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in OTHERS or not environment[name]:
            continue
        key = by_variable.get(name)
        if key is None:
            near = nearest(name, (*by_variable, *(PREFIX + program for program in _PROGRAMS)), 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(by_variable)}"
            layer.faults.append(Fault(name, "", f"no setting has this variable; {hint}"))
        else:
            layer.add(key, environment[name], name)
    return layer.made(), layer.faults


def of_flags(flags: Iterable[str]) -> tuple[Layer, list[Fault]]:
    """Return the layer of ``KEY=VALUE`` texts.

    For a repeated key the last value wins. Lists are merged.

    :raises UsageError: for a text without ``=``
    """
    known = list(keys())
    layer = _Given("flag")
    for text in flags:
        key, sign, value = text.partition("=")
        key = key.strip()
        if not sign or not key:
            raise UsageError(f"--set {text!r} is not valid. Expected KEY=VALUE, as in --set limits.lock_wait_ms=20000.")
        if key in known:
            layer.add(key, value.strip(), f"--set {key}")
            continue
        if (of_tool := _of_tool(key)) is not None:
            layer.add(of_tool, value.strip(), f"--set {of_tool}")
            continue
        near = nearest(key, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        layer.faults.append(Fault(f"--set {key}", "", f"unknown key; {hint}"))
    return layer.made(), layer.faults


def _of_tool(key: str) -> str | None:
    """Return a key such as ``tools."mail.send".timeout_ms`` in its canonical form, or None."""
    try:
        path = path_of(key)
    except ValueError:
        return None
    return key_of(path) if path[0] == "tools" and len(path) > 2 else None


class _Given:
    """A builder of a layer from variables or flags."""

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind
        self._table: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        self.faults: list[Fault] = []

    def add(self, key: str, text: str, place: str) -> None:
        path = path_of(key)
        value = _rules(text) if key == "rules" else text if key in _TEXT else _value(text)
        if path[0] == "tools" and path[2:3] == ("config",) and isinstance(value, (bool, int, float)):
            value = text  # settings of tools are strings
        if problems := unsayable(value):
            self.faults += [Fault(place, where, problem) for where, problem in problems]
            return
        *outer, last = path
        table = self._table
        for part in outer:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                self.faults.append(
                    Fault(place, "", f"{part} is also set to a value that is not a table; remove one of the two")
                )
                return
            table = cast("dict[str, Any]", inner)
        if key in LISTS and isinstance(value, list) and isinstance(table.get(last), list):
            table[last] += value
        else:
            table[last] = value
        self._places[path_text(path)] = place

    def made(self) -> Layer:
        return Layer(self._kind, self._table, self._place)

    def _place(self, where: str) -> str:
        """Return the place of the longest known key that ``where`` begins with."""
        found = [key for key in self._places if where == key or where.startswith((f"{key}.", f"{key}["))]
        if found:
            return self._places[max(found, key=len)]
        return next((place for key, place in self._places.items() if key.startswith(f"{where}.")), self._kind)


def _rules(text: str) -> Any:
    """Return the rules in a JSON or TOML array, or on separate lines."""
    if text.lstrip().startswith("["):
        return _value(text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def _value(text: str) -> Any:
    """Return a value in JSON or TOML syntax; any other text is a string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return read["value"] if set(read) == {"value"} else text
