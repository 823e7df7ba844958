"""Pinned definitions: the definitions of third-party tools that the user has approved, and their changes since.

A model acts on the name, description, schema, guidance and documentation of a third-party tool. They count once the user has
approved them. If one of them changes afterwards, the tool is off until the user has reviewed the difference. Parts that no
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
    """The part of a third-party tool's definition that a model acts on.

    :param further: the values of the fields in :data:`~handrail.contract.tool.spec.TOLD_BESIDE`, by name
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
        """The SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(_canonical(self.as_data()).encode("utf-8", "surrogatepass")).hexdigest()

    def is_as(self, other: Definition) -> bool:
        """Return whether both definitions have the same :attr:`hash`."""
        try:
            one, two = (orjson.dumps(each.as_data(), option=orjson.OPT_SORT_KEYS) for each in (self, other))
        except orjson.JSONEncodeError:  # such as half of a surrogate pair, which the hash covers
            return self.hash == other.hash
        return one == two

    def as_data(self) -> dict[str, Any]:
        return {"id": self.id, **self.parts()}

    def parts(self) -> dict[str, Any]:
        """Return the parts that may change while the tool stays the same, by name."""
        return {"description": self.description, "parameters": dict(self.parameters), **self.further}

    def lines(self) -> list[str]:
        """Return the definition as text lines that do not depend on the order in which the server sent it.

        The description comes first, then the schema, then the other fields under their names. Two definitions that differ have
        different lines.
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
    """Return the lines of a text, with invisible characters spelled out, for a user who reviews it.

    A line with trailing blanks, a line with an unprintable character, and a last line with a line end are quoted as JSON.
    Two texts that differ have different lines.
    """
    lines = text.split("\n")
    if len(lines) > 1 and not lines[-1]:
        lines[-2:] = [f"{lines[-2]}\n"]
    return [line if _is_seen(line) else _spelled(line) for line in lines]


def _is_seen(line: str) -> bool:
    return line.replace("\t", " ").isprintable() and line == line.rstrip() and not line.startswith('"')


def _spelled(value: object, indent: int | None = None) -> str:
    """Return a value as JSON without unprintable characters."""
    text = json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=False)
    return "".join(one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text)


def _schema_lines(value: object) -> list[str]:
    return _spelled(value, indent=2).split("\n")


class Pins(Protocol):
    """The definitions of third-party tools that the user has approved."""

    def approved(self, source: str) -> Mapping[str, Definition]:
        """Return the approved definitions of a source, by tool id.

        The object is the same while nothing changes.
        """
        ...


_NOTHING: Mapping[str, Definition] = MappingProxyType({})


class _Nothing:
    def approved(self, source: str) -> Mapping[str, Definition]:
        return _NOTHING


NO_PINS: Pins = _Nothing()
"""A set of pins without any approved definition."""


@dataclass(frozen=True, slots=True)
class StoredPins:
    """The definitions that this user has approved, for all workspaces.

    :param state: the root folder of all state
    """

    state: Path
    _read: dict[str, tuple[bytes, Mapping[str, Definition]]] = field(
        default_factory=dict[str, tuple[bytes, Mapping[str, Definition]]], init=False, repr=False, compare=False
    )
    """By source, the digest of the file at the last read, and its definitions."""

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
        """Approve these definitions, in addition to those already approved for the source.

        :raises StartError: if the state folder cannot be written
        """
        kept = {**self.approved(source), **{one.id: one for one in definitions}}
        stored.write_pins(self.state, source, {tool_id: one.as_data() for tool_id, one in kept.items()})

    def forget(self, source: str, tool_ids: Iterable[str] | None = None) -> int:
        """Revoke the approval of some tools of a source and return how many were approved.

        :param tool_ids: the tools; None for all of the source
        :raises StartError: if the state folder cannot be written
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
"""The most lines of two definitions together that get a minimal diff."""


@dataclass(frozen=True, slots=True)
class Review:
    """A tool of a third-party source that requires a review by the user.

    :param now: the definition that the source lists now
    :param before: the approved definition, or None for a new tool
    """

    now: Definition
    before: Definition | None

    @property
    def reason(self) -> str:
        """The reason why the tool is off."""
        if self.before is None:
            return "the tool is new, and the user has not approved its definition"
        before, now = self.before.parts(), self.now.parts()
        changed = [name for name in {**now, **before} if _canonical(before.get(name)) != _canonical(now.get(name))]
        return f"its {' and '.join(changed)} changed after the user approved it"

    def difference(self) -> list[str]:
        """Return the change as the lines of a unified diff; for a new tool, every line."""
        if self.before is None:
            return [f"+{line}" for line in self.now.lines()]
        before, now = self.before.lines(), self.now.lines()
        if len(before) + len(now) > _MAX_COMPARED:  # looking for the smallest difference takes quadratic time
            return [*(f"-{line}" for line in before), *(f"+{line}" for line in now)]
        return list(difflib.unified_diff(before, now, "approved", "now", lineterm="", n=3))


def review(spec: ToolSpec, approved: Mapping[str, Definition]) -> Review | None:
    """Return the review that a third-party tool requires, or None if its approved definition is unchanged."""
    now, before = Definition.of(spec), approved.get(spec.id)
    return None if before is not None and before.is_as(now) else Review(now, before)


def reviews(source: str, specs: Iterable[ToolSpec], pins: Pins) -> dict[str, Review]:
    """Return the tools of ``source`` whose present definitions are not approved, by id."""
    approved = pins.approved(source)
    return {spec.id: found for spec in specs if (found := review(spec, approved)) is not None}


def hash_of(source: str, waiting: Mapping[str, Review]) -> str:
    """Return a hash of the definitions to review, by which the user confirms them.

    The hash has 32 hexadecimal digits, so an author of definitions cannot find others with the same hash.
    """
    said = [source, sorted((tool_id, one.now.hash) for tool_id, one in waiting.items())]
    return hashlib.sha256(_canonical(said).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
