"""Settings given by the environment (``HANDRAIL_LIMITS__GRACE_MS=…``) and by flags (``--set limits.grace_ms=…``)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, cast

from handrail.config.layers import Kind, Layer
from handrail.config.reading import unsayable
from handrail.config.settings import LISTS, key_of, keys, path_of
from handrail.contract.errors import Fault, UsageError
from handrail.contract.schema.schema import path_text
from handrail.contract.tool.names import nearest

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
