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
    """Where a value comes from. ``place``: ``FILE:LINE``, a variable's name, a flag, or ``""`` for a default."""

    kind: Kind
    place: str = ""

    def __str__(self) -> str:
        return self.place or "default"


@dataclass(frozen=True, slots=True)
class Value:
    """One value of one layer.

    :param key: ``limits.lock_wait_ms``; of a list, the one it is put into (``rules``)
    :param not_in_force: why it does not count; ``""`` where it does
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
    """What one source says.

    :param place: where a value of it stands, by its path (``rules[2]``)
    :param holds_back: why a value of it must not count, by key and value; ``""`` where it may
    """

    kind: Kind
    table: Mapping[str, Any]
    place: Callable[[str], str]
    holds_back: Callable[[str, Any], str] = field(default=lambda key, value: "")

    def faults(self) -> list[Fault]:
        """What is wrong with it, each at its place."""
        problems = faults_of(Settings, {key: value for key, value in self.table.items() if key not in _APART})
        for key, faults_in in _APART.items():  # what is wrong with one is said without repeating it
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
        """The value of a key in a tuple of its own, or None."""
        node: Any = self.table
        for part in path_of(key):
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = cast("Mapping[str, Any]", node)[part]
        return (node,)


def merged(layers: Sequence[Layer]) -> tuple[Settings, tuple[Value, ...]]:
    """The settings in force, and every value there is. Lists add up; of anything else the last layer's value holds.

    :param layers: without faults, the weakest first
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
    """Every setting, and in the place of ``tools`` each setting of each tool that a layer names: what one layer sets for
    a tool leaves what another one sets."""
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
    """The default and each layer's value, of which the last that may count is in force."""
    found = [Value(key, _default(key), Origin("default"))]
    holding = 0
    for layer in layers:
        if (given := layer.get(key)) is None:
            continue
        reason = layer.holds_back(key, given[0])
        if reason and key == "mode" and _narrows(given[0], found[holding].value):
            reason = ""  # whoever wrote it, it lets less run
        if not reason and key == "ceiling" and layer.kind == "workspace" and found[holding].origin.kind != "default":
            reason = (
                f"the ceiling of this machine stands ({found[holding].origin}); a workspace's file cannot change it"
            )
        found.append(Value(key, given[0], Origin(layer.kind, layer.place(path_text(path_of(key)))), reason))
        if not reason:
            holding = len(found) - 1
    return _with_overridden(found, holding)


def _with_overridden(found: Sequence[Value], holding: int) -> list[Value]:
    """The values, each of those that could be in force with the place that overrides it."""
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
"""What tools and watchdogs are told, which may start Handrail in turn."""
OTHERS = frozenset(PREFIX + name for name in (*_PROGRAMS, *_TOLD))
"""Variables of that prefix that are no settings."""

_TEXT = frozenset({"agent", "mode", "sandbox.provider"})


def variable(key: str) -> str:
    """The variable that gives a setting."""
    return PREFIX + key.upper().replace(".", "__")


def of_environment(environment: Mapping[str, str]) -> tuple[Layer, list[Fault]]:
    """The layer of ``HANDRAIL_*``. An empty variable is as good as none.

    :return: the layer, and each variable that is none of ours or cannot be read
    """
    by_variable = {variable(key): key for key in keys()}
    layer = _Given("environment")
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in OTHERS or not environment[name]:
            continue
        key = by_variable.get(name)
        if key is None:
            near = nearest(name, (*by_variable, *(PREFIX + program for program in _PROGRAMS)), 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(by_variable)}"
            layer.faults.append(Fault(name, "", f"no setting has this variable; {hint}"))
        else:
            layer.add(key, environment[name], name)
    return layer.made(), layer.faults


def of_flags(flags: Iterable[str]) -> tuple[Layer, list[Fault]]:
    """The layer of ``KEY=VALUE`` texts; of one key given twice the last one holds, lists add up.

    :raises UsageError: for a text without ``=``
    """
    known = list(keys())
    layer = _Given("flag")
    for text in flags:
        key, sign, value = text.partition("=")
        key = key.strip()
        if not sign or not key:
            raise UsageError(f"--set {text!r} is no KEY=VALUE, as in --set limits.lock_wait_ms=20000")
        if key in known:
            layer.add(key, value.strip(), f"--set {key}")
            continue
        if (of_tool := _of_tool(key)) is not None:
            layer.add(of_tool, value.strip(), f"--set {of_tool}")
            continue
        near = nearest(key, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        layer.faults.append(Fault(f"--set {key}", "", f"unknown key; {hint}"))
    return layer.made(), layer.faults


def _of_tool(key: str) -> str | None:
    """``key`` in its one spelling where it names a setting of a tool, as in ``tools."mail.send".timeout_ms``."""
    try:
        path = path_of(key)
    except ValueError:
        return None
    return key_of(path) if path[0] == "tools" and len(path) > 2 else None


class _Given:
    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind
        self._table: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        self.faults: list[Fault] = []

    def add(self, key: str, text: str, place: str) -> None:
        path = path_of(key)
        value = _rules(text) if key == "rules" else text if key in _TEXT else _value(text)
        if path[0] == "tools" and path[2:3] == ("config",) and isinstance(value, (bool, int, float)):
            value = text  # a tool's settings are texts
        if problems := unsayable(value):
            self.faults += [Fault(place, where, problem) for where, problem in problems]
            return
        *outer, last = path
        table = self._table
        for part in outer:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                self.faults.append(Fault(place, "", f"{part} is set to what is no table; give one of the two"))
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
        """By the longest key that ``where`` begins with."""
        found = [key for key in self._places if where == key or where.startswith((f"{key}.", f"{key}["))]
        if found:
            return self._places[max(found, key=len)]
        return next((place for key, place in self._places.items() if key.startswith(f"{where}.")), self._kind)


def _rules(text: str) -> Any:
    """An array as JSON or TOML has it, or one rule on each line."""
    if text.lstrip().startswith("["):
        return _value(text)
    return [line.strip() for line in text.splitlines() if line.strip()]


def _value(text: str) -> Any:
    """A value as JSON or TOML writes it; anything else is text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        read = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return read["value"] if set(read) == {"value"} else text
