"""A conversation as rows of plain data, and back. Reading a partial set of rows still gives a history that a provider accepts.

Each message is one JSON object with ``v`` (the form's version) and ``role``:

- ``user``: ``text``; with ``pictures``, each ``{"artifact", "media_type"}``, it shows these; with ``notices``, it is not the user's word but tells of what these delivery ids stand for; with
  ``headless``, nobody could be asked then
- ``assistant``: ``parts``, each ``{"text"}``, ``{"call": <wire id>, "name", "arguments", "id": <the kernel's call id>}``
  or ``{"kept": <provider>, "block"}``, with ``said`` and ``artifacts`` where the provider used a tool of its own
- ``results``: ``results``, each ``{"of": <wire id>, "text", "error"}``; with ``partial``, calls of the message before
  are still without an answer, and a later ``results`` has all of them

- ``compacted``: ``text`` stands in the place of all messages before the position ``from``

A reply with calls is kept before its calls are proposed. So a process that ends in the middle leaves calls without
results, each with the id under which the log knows what became of it.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from handrail.agent.model import (
    AssistantMessage,
    CallPart,
    CallResult,
    Kept,
    Message,
    Picture,
    ResultsMessage,
    TextPart,
    UserMessage,
)
from handrail.agent.streaming.stream import WireIds, whole_characters
from handrail.contract.doors.history import Entry
from handrail.contract.result import Result
from handrail.contract.tool.names import wire_name

VERSION = 1
KINDS = ("image/png", "image/jpeg", "image/gif", "image/webp")
"""Of pictures."""
LOST = json.dumps(
    Result.error("interrupted", "what came of this call was not kept; look before you do it again").to_dict(),
    separators=(",", ":"),
)
"""The answer to a call in the middle of a history whose own was lost."""


@dataclass(slots=True)
class Exchange:
    """A reply whose calls are not all answered: no part of the history yet.

    :param call_ids: the kernel's id of each of the message's calls, ``""`` where it is not known
    :param results: by wire id, as far as there are any
    """

    message: AssistantMessage
    call_ids: tuple[str, ...]
    results: dict[str, CallResult] = field(default_factory=dict[str, CallResult])

    @property
    def missing(self) -> list[tuple[int, CallPart, str]]:
        """Position, call and kernel id of each call that has no answer."""
        calls = zip(self.message.calls, self.call_ids, strict=True)
        return [(n, part, call_id) for n, (part, call_id) in enumerate(calls) if part.wire_id not in self.results]

    def answered(self, otherwise: str = LOST) -> ResultsMessage:
        """The answers in call order.

        :param otherwise: the text for calls that have none
        """
        return ResultsMessage(
            tuple(
                self.results.get(part.wire_id) or CallResult(part.wire_id, otherwise, is_error=True)
                for part in self.message.calls
            )
        )


@dataclass(frozen=True, slots=True)
class Restored:
    """What could be read of a kept conversation.

    :param messages: whole exchanges only, beginning with what a user said
    :param open: the reply at the end whose calls are not all answered, if there is one
    :param ids: knows every call id in use
    :param next: the first free position
    :param positions: of each message, where it is kept; ``open_at`` of the open reply
    :param heard: ids of the notices that were told in it
    :param headless: nobody could be asked when the last thing was said or told to the model
    """

    messages: list[Message]
    open: Exchange | None
    ids: WireIds
    next: int
    heard: set[str] = field(default_factory=set[str])
    positions: list[int] = field(default_factory=list[int])
    open_at: int = 0
    headless: bool = False


def as_data(message: Message, call_ids: Sequence[str] = (), *, partial: bool = False) -> dict[str, Any]:
    """One message as it is kept.

    :param call_ids: the kernel's ids of an assistant message's calls, in order
    :param partial: of a results message that leaves calls unanswered
    """
    match message:
        case UserMessage(text, pictures):
            shown = [{"artifact": picture.ref, "media_type": picture.media_type} for picture in pictures]
            return {"v": VERSION, "role": "user", "text": text, **({"pictures": shown} if shown else {})}
        case AssistantMessage(parts):
            ids = iter(call_ids)
            return {"v": VERSION, "role": "assistant", "parts": [_part(part, ids) for part in parts]}
        case ResultsMessage(results):
            told = [{"of": result.wire_id, "text": result.text, "error": result.is_error} for result in results]
            data = {"v": VERSION, "role": "results", "results": told}
            return {**data, "partial": True} if partial else data


def compacted(first: int, text: str) -> dict[str, Any]:
    """What is kept of messages before the position ``first`` that are left out from here on."""
    return {"v": VERSION, "role": "compacted", "from": first, "text": text}


def _part(part: TextPart | CallPart | Kept, ids: Iterator[str]) -> dict[str, Any]:
    match part:
        case TextPart(text):
            return {"text": text}
        case Kept(provider, block, said, artifacts):
            kept: dict[str, Any] = {"kept": provider, "block": dict(block)}
            return {**kept, "said": True, "artifacts": list(artifacts)} if said else kept
        case CallPart(wire_id, name, arguments):
            call_id = next(ids, "")
            return {"call": wire_id, "name": name, "arguments": dict(arguments), "id": call_id}


def restored(entries: Iterable[Entry]) -> Restored:
    """Read a conversation. Never fails: rows that are damaged, of a later version, or without what they belong to
    are left out, and calls in the middle whose results are not there are answered by :data:`LOST`.

    Call ids come back as they were, unless they cannot have been: one that no provider takes, or that is there twice,
    is replaced in the call and its result alike.
    """
    reading = _Reading()
    following = 0
    for position, data in entries:
        following = max(following, position + 1)
        if data.get("v") == VERSION:
            reading.take(position, data)
    return Restored(
        reading.messages,
        reading.open,
        reading.ids,
        following,
        reading.heard,
        reading.positions,
        reading.open_at,
        reading.headless,
    )


class _Reading:
    """The state between two rows."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.positions: list[int] = []
        self.open: Exchange | None = None
        self.open_at = 0
        self.ids = WireIds()
        self.heard: set[str] = set()
        self.headless = False
        self._renamed: dict[str, str] = {}
        """Of the open exchange: a call's id as it was kept, to the one it has now."""

    def take(self, position: int, data: Mapping[str, Any]) -> None:
        role = data.get("role")
        if role == "user":
            text = data.get("text")
            if isinstance(text, str):
                self._settle()
                self.messages.append(UserMessage(whole_characters(text), _pictures(data)))
                self.positions.append(position)
                self.headless = data.get("headless") is True
                if "notices" in data:
                    self.heard.update(_texts(data, "notices"))
        elif role == "assistant":
            self._settle()
            if self.messages:  # no provider takes a history that does not begin with its user
                self._reply(position, _objects(data.get("parts")))
        elif role == "results" and self.open is not None:
            self._results(self.open, _objects(data.get("results")))
        elif role == "compacted":
            first, text = data.get("from"), data.get("text")
            if isinstance(first, int) and isinstance(text, str):
                self._settle()
                count = bisect_left(self.positions, first)
                self.messages[:count], self.positions[:count] = [UserMessage(whole_characters(text))], [first - 1]

    def _settle(self) -> None:
        """Whatever comes next, no call before it stays without an answer."""
        if self.open is not None:
            self._close(self.open)

    def _close(self, exchange: Exchange) -> None:
        self.messages += (exchange.message, exchange.answered())
        self.positions += (self.open_at, self.open_at)
        self.open = None

    # Plain look-ups below: matching the same by patterns takes three times as long, and a history is long.

    def _reply(self, position: int, kept: list[dict[str, Any]]) -> None:
        parts: list[TextPart | CallPart | Kept] = []
        call_ids: list[str] = []
        said = False
        renamed = self._renamed = {}
        for data in kept:
            if "call" in data:
                wire_id, name = data["call"], data.get("name")
                if not isinstance(wire_id, str) or not isinstance(name, str) or wire_id in renamed:
                    continue
                arguments, call_id = data.get("arguments"), data.get("id")
                renamed[wire_id] = new = self.ids.take(wire_id)
                given = cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {}
                parts.append(CallPart(new, wire_name(name) or "unnamed", given))
                call_ids.append(call_id if isinstance(call_id, str) else "")
            elif "text" in data:
                text = data["text"]
                if isinstance(text, str) and text.strip():
                    parts.append(TextPart(whole_characters(text)))
                    said = True
            elif "kept" in data:
                provider, block = data["kept"], data.get("block")
                if isinstance(provider, str) and isinstance(block, dict):
                    part = Kept(
                        provider, cast("dict[str, Any]", block), data.get("said") is True, _texts(data, "artifacts")
                    )
                    parts.append(part)
                    said = said or part.said
        if call_ids:
            self.open = Exchange(AssistantMessage(tuple(parts)), tuple(call_ids))
            self.open_at = position
        elif said:
            self.messages.append(AssistantMessage(tuple(parts)))
            self.positions.append(position)

    def _results(self, exchange: Exchange, kept: list[dict[str, Any]]) -> None:
        results, renamed = exchange.results, self._renamed
        for data in kept:
            wire_id, text = data.get("of"), data.get("text")
            if isinstance(wire_id, str) and isinstance(text, str) and wire_id in renamed:
                new = renamed[wire_id]
                results[new] = CallResult(new, whole_characters(text), data.get("error") is True)
        if len(results) == len(exchange.call_ids):
            self._close(exchange)


def _texts(data: Mapping[str, Any], field: str) -> tuple[str, ...]:
    given: object = data.get(field)
    items = cast("list[object]", given) if isinstance(given, list) else []
    return tuple(item for item in items if isinstance(item, str))


def _pictures(data: Mapping[str, Any]) -> tuple[Picture, ...]:
    if "pictures" not in data:
        return ()
    named = ((one.get("artifact"), one.get("media_type")) for one in _objects(data["pictures"]))
    return tuple(Picture(ref, kind) for ref, kind in named if isinstance(ref, str) and kind in KINDS)


def _objects(value: object) -> list[dict[str, Any]]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]
