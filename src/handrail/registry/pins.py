"""Pinned definitions: the definitions of third-party tools that a person has approved, and their changes since.

A model acts on the name, description, schema, guidance and manual of a third-party tool. They count once a person has
approved them. When one of them changes afterwards, the tool is off until a person has reviewed the difference. Parts that no
model sees (limits, locks) are not pinned.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import orjson

from handrail.contract.tool.spec import TOLD_BESIDE, ToolSpec
from handrail.store import decisions as stored


@dataclass(frozen=True, slots=True)
class Definition:
    """What a foreign tool says of itself, as far as a model is told of it.

    :param further: by name, what of :data:`~handrail.contract.tool.spec.TOLD_BESIDE` it says
    """

    id: str
    description: str
    parameters: Mapping[str, Any] = field(hash=False)
    further: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    @staticmethod
    def of(spec: ToolSpec) -> Definition:
        return Definition(spec.id, spec.description, spec.parameters, _further(lambda name: getattr(spec, name)))

    @property
    def hash(self) -> str:
        """SHA-256 of its canonical JSON, in hexadecimal."""
        return hashlib.sha256(_canonical(self.as_data()).encode("utf-8", "surrogatepass")).hexdigest()

    def is_as(self, other: Definition) -> bool:
        """Whether both have the same :attr:`hash`."""
        try:
            one, two = (orjson.dumps(each.as_data(), option=orjson.OPT_SORT_KEYS) for each in (self, other))
        except orjson.JSONEncodeError:  # such as half of a surrogate pair, which there is a hash of
            return self.hash == other.hash
        return one == two

    def as_data(self) -> dict[str, Any]:
        return {"id": self.id, **self.parts()}

    def parts(self) -> dict[str, Any]:
        """What can change while it stays the same tool, by name."""
        return {"description": self.description, "parameters": dict(self.parameters), **self.further}

    def lines(self) -> list[str]:
        """It as text, in an order that does not depend on how it was sent: two that differ have other lines.

        The description stands as it is, then the schema, then the rest under its names and further in.
        """
        found = [*text_lines(self.description), "", *_schema_lines(self.parameters)]
        for name in sorted(self.further):
            value = self.further[name]
            told = text_lines(value) if isinstance(value, str) else _schema_lines(value)
            found += ["", f"{name}:", *(f"  {line}" if line else "" for line in told)]
        return found


def _further(said: Callable[[str], Any]) -> dict[str, Any]:
    return {name: value for name in TOLD_BESIDE if (value := said(name))}


def text_lines(text: str) -> list[str]:
    """A text, line by line, for a person who decides by it; two that differ have other lines.

    A line with something in it that is not seen is in quotes, as JSON spells it: the last one where it has a line end, one
    with blanks at its end, one with a character that does not print.
    """
    lines = text.split("\n")
    if len(lines) > 1 and not lines[-1]:
        lines[-2:] = [f"{lines[-2]}\n"]
    return [line if _is_seen(line) else _spelled(line) for line in lines]


def _is_seen(line: str) -> bool:
    return line.replace("\t", " ").isprintable() and line == line.rstrip() and not line.startswith('"')


def _spelled(value: object, indent: int | None = None) -> str:
    """A value as JSON, with nothing in it that does not print."""
    text = json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=False)
    return "".join(one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text)


def _schema_lines(value: object) -> list[str]:
    return _spelled(value, indent=2).split("\n")


class Pins(Protocol):
    """What has been approved."""

    def approved(self, source: str) -> Mapping[str, Definition]:
        """By tool id, the definitions of a source that a person has approved; the same object while nothing changes."""
        ...


_NOTHING: Mapping[str, Definition] = MappingProxyType({})


class _Nothing:
    def approved(self, source: str) -> Mapping[str, Definition]:
        return _NOTHING


NO_PINS: Pins = _Nothing()
"""Nothing has been approved."""


@dataclass(frozen=True, slots=True)
class StoredPins:
    """What this user has approved, for all workspaces.

    :param state: the root of all state
    """

    state: Path
    _read: dict[str, tuple[bytes, Mapping[str, Definition]]] = field(
        default_factory=dict[str, tuple[bytes, Mapping[str, Definition]]], init=False, repr=False, compare=False
    )
    """By source, the digest of its file as it was read last, and what stood in it."""

    def approved(self, source: str) -> Mapping[str, Definition]:
        content = stored.read_pins(self.state, source)
        if content is None:
            return _NOTHING
        digest = hashlib.sha256(content).digest()
        known = self._read.get(source)
        if known is None or known[0] != digest:
            known = self._read[source] = digest, MappingProxyType(_definitions(stored.tools_in(content, source)))
        return known[1]

    def approve(self, source: str, definitions: Iterable[Definition]) -> None:
        """Approve these from now on, beside what else was approved of the source.

        :raises StartError: when the state folder cannot be written
        """
        kept = {**self.approved(source), **{one.id: one for one in definitions}}
        stored.write_pins(self.state, source, {tool_id: one.as_data() for tool_id, one in kept.items()})

    def forget(self, source: str, tool_ids: Iterable[str] | None = None) -> int:
        """Approve these no longer; None for all that was. Gives how many there were.

        :raises StartError: when the state folder cannot be written
        """
        before = self.approved(source)
        gone = set(before) if tool_ids is None else set(before) & set(tool_ids)
        if gone:
            stored.write_pins(self.state, source, {i: one.as_data() for i, one in before.items() if i not in gone})
        return len(gone)


def _definitions(tools: Mapping[str, dict[str, Any]]) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for tool_id, kept in tools.items():
        description, parameters = kept.get("description"), kept.get("parameters")
        if isinstance(description, str) and isinstance(parameters, dict):
            further = _further(kept.get)
            found[tool_id] = Definition(tool_id, description, cast("dict[str, Any]", parameters), further)
    return found


_MAX_COMPARED = 2_000
"""Lines of two definitions that are compared."""


@dataclass(frozen=True, slots=True)
class Review:
    """One tool of a foreign source that waits for a person.

    :param before: what was approved of it, or None for a tool that is new
    """

    now: Definition
    before: Definition | None

    @property
    def reason(self) -> str:
        """Why it is off."""
        if self.before is None:
            return "it is new, and nobody has approved what it says of itself"
        before, now = self.before.parts(), self.now.parts()
        changed = [name for name in {**now, **before} if _canonical(before.get(name)) != _canonical(now.get(name))]
        return f"its {' and '.join(changed)} changed after a person had approved it"

    def difference(self) -> list[str]:
        """What changed, as the lines of a unified diff; of a new tool, all of it."""
        if self.before is None:
            return [f"+{line}" for line in self.now.lines()]
        before, now = self.before.lines(), self.now.lines()
        if len(before) + len(now) > _MAX_COMPARED:  # looking for the smallest difference takes quadratic time
            return [*(f"-{line}" for line in before), *(f"+{line}" for line in now)]
        return list(difflib.unified_diff(before, now, "approved", "now", lineterm="", n=3))


def review(spec: ToolSpec, approved: Mapping[str, Definition]) -> Review | None:
    """What a person has to look at before a foreign tool is on; None where it is as it was approved."""
    now, before = Definition.of(spec), approved.get(spec.id)
    return None if before is not None and before.is_as(now) else Review(now, before)


def reviews(source: str, specs: Iterable[ToolSpec], pins: Pins) -> dict[str, Review]:
    """The tools of ``source`` that nobody has approved as they are now, by id."""
    approved = pins.approved(source)
    return {spec.id: found for spec in specs if (found := review(spec, approved)) is not None}


def hash_of(source: str, waiting: Mapping[str, Review]) -> str:
    """By what a person says which definitions they have looked at: 32 hexadecimal digits, of all of them as they are now. As many
    as that, since whoever writes the definitions could look for others that have the same few."""
    said = [source, sorted((tool_id, one.now.hash) for tool_id, one in waiting.items())]
    return hashlib.sha256(_canonical(said).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
