"""Registered secrets, replaced by their names wherever a text, bytes or JSON would carry them.

Every occurrence goes, in the forms a value takes on its way: as it is, inside a JSON string (once and twice
encoded), and percent-encoded in a URL. Where occurrences overlap, all of their characters go. Whoever registers
nothing pays nothing: every method then gives back what it was given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

import orjson

from handrail.runtime.surface import Values

MIN_SECRET = 4
"""Characters. A shorter value would occur in ordinary text and redact that."""
_NAME = re.compile(r"[\w./:-]+")


class Redactor:
    """Knows the secrets of one kernel, those that its processes brought along included."""

    __slots__ = ("_binary", "_binary_forms", "_forms", "_labels", "_numeric", "_secrets", "_text", "active")

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        """
        :param secrets: name to value; a name may be shown to anybody
        :raises ValueError: for a value that cannot be redacted; the text gives its name and never the value
        """
        self._secrets: dict[str, frozenset[str]] = {}
        self._labels: dict[str, str] = {}
        self.learn(secrets or {})

    def learn(self, secrets: Mapping[str, str]) -> None:
        """Redact these too from now on, beside all that were known before. A name may stand for several values.

        :raises ValueError: for a value that cannot be redacted; the text gives its name and never the value
        """
        every = dict(self._secrets)
        for name, value in secrets.items():
            every[name] = every.get(name, frozenset()) | {value}
        labels = _labels_of(every)
        self._secrets, self._labels = every, labels
        # The longest first: an alternation takes the first that fits.
        self._forms = tuple(sorted(self._labels, key=len, reverse=True))
        self._binary_forms = tuple(form.encode() for form in self._forms)
        self._text = re.compile("|".join(map(re.escape, self._forms)))
        self._binary = re.compile(b"|".join(map(re.escape, self._binary_forms)))
        self._numeric = any(set(form) <= set("0123456789.eE+-") for form in self._forms)
        self.active = bool(self._labels)
        """Whether there is anything to look for."""

    def text(self, text: str) -> str:
        """``text`` without secrets; the same object when there are none in it."""
        if not self.active or not any(form in text for form in self._forms):
            return text
        return self._cut(text, len(text), 0)[0]

    def binary(self, data: bytes) -> bytes:
        """``data`` without secrets in UTF-8."""
        if not self.active or not self.found_in(data):
            return data
        out: list[bytes] = []
        shown = at = 0
        while match := self._binary.search(data, at):
            if match.start() >= shown:
                out += (data[shown : match.start()], self._labels[match[0].decode()].encode())
            shown, at = max(shown, match.end()), match.start() + 1
        return b"".join((*out, data[shown:]))

    def found_in(self, data: bytes) -> bool:
        """Whether UTF-8 or JSON text has a secret in it."""
        for form in self._binary_forms:  # noqa: SIM110 - a third of the time that any() takes, on every call's way
            if form in data:
                return True
        return False

    def value(self, value: Any) -> Any:
        """Plain JSON data without secrets, in keys as well; parts without any are the same objects.

        A number whose digits are a secret becomes its name. Keys that become the same are told apart by a count.
        """
        return self._walk(value) if self.active else value

    def stream(self) -> RedactedStream:
        """For text that comes in pieces."""
        return RedactedStream(self)

    def _walk(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return self._walk_object(cast("dict[str, Any]", value))
        if isinstance(value, (list, tuple)):
            items = cast("list[Any] | tuple[Any, ...]", value)
            walked = [self._walk(item) for item in items]
            return items if all(new is old for new, old in zip(walked, items, strict=True)) else walked
        if self._numeric and type(value) in (int, float):
            written = orjson.dumps(value).decode()
            redacted = self.text(written)
            return value if redacted is written else redacted
        return value

    def _walk_object(self, value: dict[str, Any]) -> dict[str, Any]:
        walked: dict[str, Any] = {}
        changed = False
        for key, item in value.items():
            new_key, new_item = self.text(key), self._walk(item)
            changed = changed or new_key is not key or new_item is not item
            count = 2
            unique = new_key
            while unique in walked or (unique is not key and unique in value):
                unique = f"{new_key} ({count})"
                count += 1
            walked[unique] = new_item
        return walked if changed else value

    def _cut(self, text: str, upto: int, covered: int) -> tuple[str, int]:
        """Redact what begins before ``upto``.

        :param covered: how many characters at the start belong to an occurrence whose label was already written
        :return: the text to show, and how many characters after ``upto`` belong to what it ends with
        """
        out: list[str] = []
        shown, at = covered, 0
        while (match := self._text.search(text, at)) and match.start() < upto:
            if match.start() >= shown:
                out += (text[shown : match.start()], self._labels[match[0]])
            shown, at = max(shown, match.end()), match.start() + 1
        if shown < upto:
            out.append(text[shown:upto])
            shown = upto
        return "".join(out), shown - upto

    def _held_back(self, text: str) -> int:
        """Where the first possible beginning of a secret stands that the end of ``text`` leaves open."""
        first = len(text)
        for form in self._forms:
            at = max(0, len(text) - len(form) + 1)
            while (at := text.find(form[0], at, first)) >= 0:
                if form.startswith(text[at:]):
                    first = at
                    break
                at += 1
        return first


class RedactedStream:
    """Redacts text that comes in pieces, as if it had come whole. Holds back what may be a secret's beginning."""

    __slots__ = ("_covered", "_pending", "_redactor")

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._pending = ""
        self._covered = 0

    def feed(self, chunk: str) -> str:
        """What may be shown now."""
        return chunk if not self._redactor.active else self._advance(self._pending + chunk, end=False)

    def finish(self) -> str:
        """The rest, after the last chunk."""
        return self._advance(self._pending, end=True) if self._pending else ""

    def _advance(self, text: str, *, end: bool) -> str:
        upto = len(text) if end else self._redactor._held_back(text)  # pyright: ignore[reportPrivateUsage]
        shown, self._covered = self._redactor._cut(text, upto, self._covered)  # pyright: ignore[reportPrivateUsage]
        self._pending = text[upto:]
        return shown


def _labels_of(secrets: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Every form of every value, and what is put in its place."""
    labels: dict[str, str] = {}
    for name, values in secrets.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for a secret; expected letters, digits and any of . _ - / :")
        for value in values:
            if fault := _fault(value):
                raise ValueError(f"the secret {name!r} {fault}")
            for form in _forms(value):
                labels.setdefault(form, f"[secret:{name}]")
    for form in labels:
        for label in set(labels.values()):
            if form in label:
                raise ValueError(
                    f"the secret {labels[form][8:-1]!r} has a value that is part of {label!r}, which would be put "
                    "in a secret's place; use a longer, random value"
                )
    return labels


@dataclass(frozen=True, slots=True)
class RedactedValues:
    """What tools keep in a session, without secrets; implements :class:`~handrail.runtime.surface.Values`."""

    values: Values
    redactor: Redactor

    async def get(self, session_id: str, tool_id: str, key: str) -> Any:
        return await self.values.get(session_id, tool_id, self.redactor.text(key))

    async def put(self, session_id: str, tool_id: str, key: str, value: Any) -> None:
        await self.values.put(session_id, tool_id, self.redactor.text(key), self.redactor.value(value))


def _fault(value: object) -> str | None:
    if not isinstance(value, str):
        return f"is a {type(value).__name__}; expected text"
    if len(value) < MIN_SECRET:
        return f"has {len(value)} characters; expected at least {MIN_SECRET}, since a shorter value occurs in ordinary text"
    if not value.strip():
        return "is only white space; expected a value that does not occur in ordinary text"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "has half of a surrogate pair in it; expected valid Unicode text"
    return None


def _forms(value: str) -> set[str]:
    once = {orjson.dumps(value).decode()[1:-1], json.dumps(value)[1:-1]}
    twice = {orjson.dumps(form).decode()[1:-1] for form in once}
    return {value, quote(value, safe=""), *once, *twice}
