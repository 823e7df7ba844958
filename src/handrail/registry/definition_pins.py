"""Pinned definitions: the definitions of third-party tools that the user has approved, and their changes since.

A model acts on the name, description, schema, guidance and documentation of a third-party tool. They count once the user has
approved them. If one of them changes afterwards, the tool is off until the user has reviewed the difference. Parts that no
model sees (limits, locks) are not pinned.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

import orjson

from handrail.contract.schema.foreign_schemas import sort_unordered_lists
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.spec import MODEL_TEXT_FIELDS, ToolSpec
from handrail.store import operator_decisions as stored


@dataclass(frozen=True, slots=True)
class ThirdPartyDefinition:
    """The part of a third-party tool's definition that a model acts on.

    :param other_fields: the values of the fields in :data:`~handrail.contract.tool.spec.MODEL_TEXT_FIELDS`, by name
    """

    id: str
    description: str
    parameters: Mapping[str, Any] = field(hash=False)
    other_fields: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    @staticmethod
    def from_spec(spec: ToolSpec) -> ThirdPartyDefinition:
        return ThirdPartyDefinition(
            spec.id, spec.description, spec.parameters, _further(lambda name: getattr(spec, name))
        )

    @property
    def hash(self) -> str:
        """The SHA-256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(_to_canonical_json(self.to_dict()).encode("utf-8", "surrogatepass")).hexdigest()

    def matches(self, other: ThirdPartyDefinition) -> bool:
        """Return whether both definitions have the same :attr:`hash`."""
        try:
            one, two = (orjson.dumps(each.to_dict(), option=orjson.OPT_SORT_KEYS) for each in (self, other))
        except orjson.JSONEncodeError:  # such as half of a surrogate pair, which the hash covers
            return self.hash == other.hash
        return one == two

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, **self.collect_changeable_parts()}

    def collect_changeable_parts(self) -> dict[str, Any]:
        """Return the parts that may change while the tool stays the same, by name.

        Lists of a schema whose order has no meaning are sorted, so that another order is no change.
        """
        others = dict(self.other_fields)
        for name in ("output_schema", "step_parameters"):
            if name in others:
                others[name] = sort_unordered_lists(others[name])
        return {"description": self.description, "parameters": sort_unordered_lists(dict(self.parameters)), **others}

    def to_review_lines(self) -> list[str]:
        """Return the definition as text lines that do not depend on the order in which the server sent it.

        The description comes first, then the schema, then the other fields under their names. Two definitions that differ have
        different lines.
        """
        parts = self.collect_changeable_parts()
        found = [*split_lines_for_review(self.description), "", *_schema_lines(parts["parameters"])]
        for name in sorted(self.other_fields):
            value = parts[name]
            value_lines = split_lines_for_review(value) if isinstance(value, str) else _schema_lines(value)
            found += ["", f"{name}:", *(f"  {line}" if line else "" for line in value_lines)]
        return found


def _further(read_value: Callable[[str], Any]) -> dict[str, Any]:
    return {name: value for name in MODEL_TEXT_FIELDS if (value := read_value(name))}


def split_lines_for_review(text: str) -> list[str]:
    """Return the lines of a text, with invisible characters spelled out, for a user who reviews it.

    A line with trailing blanks, a line with an unprintable character, and a last line with a line end are quoted as JSON.
    Two texts that differ have different lines.
    """
    lines = text.split("\n")
    if len(lines) > 1 and not lines[-1]:
        lines[-2:] = [f"{lines[-2]}\n"]
    return [line if _is_visible(line) else _format_visible_json(line) for line in lines]


_INSTRUCTION = compile_regex_lazily(
    r"\b(?:ignore|disregard|forget|override)\b.{0,40}\b(?:previous|prior|above|other|all|any|instruction|rule)"
    r"|\b(?:you must|you should|always|never|do not|don't|important|mandatory|before (?:using|calling)|first (?:call|send|read|run)|send|upload)\b"
    r"|\b(?:system prompt|secrets?|passwords?|credentials?|keys|api key|private key|\.env|id_rsa|ssh)\b"
    r"|</?(?:system|important|instruction|assistant|user)\b|\b(?:do not|don't|without) (?:tell|mention|inform|ask)"
    r"|https?://|\bbase64\b|\u202e|[\U000e0000-\U000e007f\u200b-\u200f\u2060-\u2064]",
    re.IGNORECASE,
)
_MAX_INSTRUCTIONS, _MAX_SENTENCE = 8, 200


def find_instruction_like_lines(definition: ThirdPartyDefinition) -> list[str]:
    """Return the sentences of a definition that may be meant as instructions to a model, for a person who reviews it.

    They come from all texts that a model reads, also from the descriptions of arguments. A sentence that is not among them
    may still be one.
    """
    found: dict[str, None] = {}
    rest: list[object] = [definition.description, definition.collect_changeable_parts()]
    while rest and len(found) < _MAX_INSTRUCTIONS:
        value = rest.pop(0)
        if isinstance(value, str):
            for sentence in re.split(r"(?<=[.!?])\s+|\n+", value):
                if _INSTRUCTION.search(sentence):
                    text = sentence.strip()
                    found[text if len(text) <= _MAX_SENTENCE else f"{text[:_MAX_SENTENCE]}…"] = None
        elif isinstance(value, dict):
            rest += cast("dict[str, object]", value).values()
        elif isinstance(value, list):
            rest += cast("list[object]", value)
    return list(found)[:_MAX_INSTRUCTIONS]


def _is_visible(line: str) -> bool:
    return line.replace("\t", " ").isprintable() and line == line.rstrip() and not line.startswith('"')


def _format_visible_json(value: object, indent: int | None = None) -> str:
    """Return a value as JSON without unprintable characters."""
    text = json.dumps(value, indent=indent, sort_keys=True, ensure_ascii=False)
    return "".join(one if one.isprintable() or one == "\n" else json.dumps(one)[1:-1] for one in text)


def _schema_lines(value: object) -> list[str]:
    return _format_visible_json(value, indent=2).split("\n")


class DefinitionPins(Protocol):
    """The definitions of third-party tools that the user has approved."""

    def approved_definitions(self, source: str) -> Mapping[str, ThirdPartyDefinition]:
        """Return the approved definitions of a source, by tool id.

        The object is the same while nothing changes.
        """
        ...


_NOTHING: Mapping[str, ThirdPartyDefinition] = MappingProxyType({})


class _NoPins:
    def approved_definitions(self, source: str) -> Mapping[str, ThirdPartyDefinition]:
        return _NOTHING


NO_PINS: DefinitionPins = _NoPins()
"""A set of pins without any approved definition."""


@dataclass(frozen=True, slots=True)
class StoredPins:
    """The definitions that this user has approved, for all workspaces.

    :param state: the root folder of all state
    """

    state: Path
    _cache: dict[str, tuple[bytes, Mapping[str, ThirdPartyDefinition]]] = field(
        default_factory=dict[str, tuple[bytes, Mapping[str, ThirdPartyDefinition]]],
        init=False,
        repr=False,
        compare=False,
    )
    """By source, the digest of the file at the last read, and its definitions."""

    def approved_definitions(self, source: str) -> Mapping[str, ThirdPartyDefinition]:
        if (content := stored.read_approved_definitions(self.state, source)) is None:
            return _NOTHING
        digest = hashlib.sha256(content).digest()
        known = self._cache.get(source)
        if known is None or known[0] != digest:
            known = self._cache[source] = (
                digest,
                MappingProxyType(_definitions(stored.parse_approved_definitions(content, source))),
            )
        return known[1]

    def approve(self, source: str, definitions: Iterable[ThirdPartyDefinition]) -> None:
        """Approve these definitions, in addition to those already approved for the source.

        :raises StartError: if the state folder cannot be written
        """
        kept = {**self.approved_definitions(source), **{one.id: one for one in definitions}}
        stored.write_approved_definitions(self.state, source, {tool_id: one.to_dict() for tool_id, one in kept.items()})

    def revoke(self, source: str, tool_ids: Iterable[str] | None = None) -> int:
        """Revoke the approval of some tools of a source and return how many were approved.

        :param tool_ids: the tools; None for all of the source
        :raises StartError: if the state folder cannot be written
        """
        before = self.approved_definitions(source)
        gone = set(before) if tool_ids is None else set(before) & set(tool_ids)
        if gone:
            stored.write_approved_definitions(
                self.state, source, {i: one.to_dict() for i, one in before.items() if i not in gone}
            )
        return len(gone)


def _definitions(tools: Mapping[str, dict[str, Any]]) -> dict[str, ThirdPartyDefinition]:
    found: dict[str, ThirdPartyDefinition] = {}
    for tool_id, kept in tools.items():
        description, parameters = kept.get("description"), kept.get("parameters")
        if isinstance(description, str) and isinstance(parameters, dict):
            further = _further(kept.get)
            found[tool_id] = ThirdPartyDefinition(tool_id, description, cast("dict[str, Any]", parameters), further)
    return found


_MAX_COMPARED = 2_000
"""The most lines of two definitions together that get a minimal diff."""


class DefinitionReview(Struct, frozen=True):
    """A tool of a third-party source that requires a review by the user.

    :param current: the definition that the source lists now
    :param approved: the approved definition, or None for a new tool
    """

    current: ThirdPartyDefinition
    approved: ThirdPartyDefinition | None

    @property
    def disabled_reason(self) -> str:
        """The reason why the tool is off."""
        if self.approved is None:
            return "the tool is new, and the user has not approved its definition"
        before, now = self.approved.collect_changeable_parts(), self.current.collect_changeable_parts()
        changed = [
            name
            for name in {**now, **before}
            if _to_canonical_json(before.get(name)) != _to_canonical_json(now.get(name))
        ]
        return f"its {' and '.join(changed)} changed after the user approved it"

    def diff_lines(self) -> list[str]:
        """Return the change as the lines of a unified diff; for a new tool, every line."""
        if self.approved is None:
            return [f"+{line}" for line in self.current.to_review_lines()]
        before, now = self.approved.to_review_lines(), self.current.to_review_lines()
        if len(before) + len(now) > _MAX_COMPARED:  # looking for the smallest difference takes quadratic time
            return [*(f"-{line}" for line in before), *(f"+{line}" for line in now)]
        return list(difflib.unified_diff(before, now, "approved", "now", lineterm="", n=3))


def find_required_review(spec: ToolSpec, approved: Mapping[str, ThirdPartyDefinition]) -> DefinitionReview | None:
    """Return the review that a third-party tool requires, or None if its approved definition is unchanged."""
    now, before = ThirdPartyDefinition.from_spec(spec), approved.get(spec.id)
    return None if before is not None and before.matches(now) else DefinitionReview(now, before)


def find_unapproved_definitions(
    source: str, specs: Iterable[ToolSpec], pins: DefinitionPins
) -> dict[str, DefinitionReview]:
    """Return the tools of ``source`` whose present definitions are not approved, by id."""
    approved = pins.approved_definitions(source)
    return {spec.id: found for spec in specs if (found := find_required_review(spec, approved)) is not None}


def hash_definitions_to_review(source: str, pending: Mapping[str, DefinitionReview]) -> str:
    """Return a hash of the definitions to review, by which the user confirms them.

    The hash has 32 hexadecimal digits, so an author of definitions cannot find others with the same hash.
    """
    items = [source, sorted((tool_id, one.current.hash) for tool_id, one in pending.items())]
    return hashlib.sha256(_to_canonical_json(items).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _to_canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
