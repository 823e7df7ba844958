"""Several layers of settings made one: which value holds, where it comes from, and which do not hold and why."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, cast

from handrail.config.secrets import faults_in_secrets, faults_in_tools
from handrail.config.settings import LISTS, Settings, key_of, keys, path_of
from handrail.contract.errors import Fault
from handrail.contract.modes import MODES, Mode
from handrail.contract.schema.schema import path_text
from handrail.contract.tool.checked import faults_of

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
