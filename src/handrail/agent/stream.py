"""Assembly of one reply from block events: its text, and its calls as proposals in the order of their opening.

A provider's stream is hostile input. Every opened call becomes exactly one :class:`~handrail.contract.call.ProposedCall`,
whatever arrives. A call that must not run carries a ``fault`` with the reason. Data after the end of a block never changes
a whole call into another.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from handrail.agent.model import (
    BlockEvent,
    CallArguments,
    CallClosed,
    CallOpened,
    CallPart,
    Finished,
    FinishReason,
    Kept,
    NativeGiven,
    TextDelta,
    TextPart,
    Usage,
)
from handrail.catalog.fitting import Fitted
from handrail.contract.call import ProposedCall
from handrail.contract.text.json import MAX_ARGUMENT_BYTES, ArgumentText, ParsedText, parsed
from handrail.contract.tool.names import wire_name

MAX_REPLY_UNITS = 32 * 1024 * 1024
"""Characters of one reply, plus :data:`EVENT_UNITS` for each event; a stream that brings more is cut."""
EVENT_UNITS = 64
MAX_CALLS = 256
"""Calls of one reply; a stream that opens more is cut."""
KEPT_HEAD = 2_000
"""Characters that are kept of arguments that nobody can use."""

MAX_LOOKED_AHEAD = 64 * 1024
"""Characters of arguments that are read before their block is closed."""
MAX_AHEAD_UNITS = 1024 * 1024
"""Of the whole reply, as :data:`MAX_REPLY_UNITS` counts; behind more nothing is read before its block is closed."""
MAX_LOOKS = 16
"""How often they are, of one call: each piece that may be the last has them read anew."""

NO_NAME = "the call has no name, so no tool can be meant; name one of the tools that were offered"
LATE = "more arguments came after the provider had closed this call, so it is not known what was meant; send it again"
TOO_LONG = (
    f"the arguments are longer than the {MAX_ARGUMENT_BYTES:,} bytes that are taken; pass a path to a file instead"
)
OUTPUT_LIMIT = "the reply reached its output limit in the middle of this call, so it was not run; make it shorter and send it again"
FILTERED = "the provider ended the reply in the middle of this call, so it was not run"
NEVER_CLOSED = "the call was never completed, so it was not run; send it again"

_BROKEN_OFF: Mapping[FinishReason, str] = {"length": OUTPUT_LIMIT, "refused": FILTERED}
"""What is said of the last call of a reply that ended so, where it may have been cut."""


def cut_text(reason: str) -> str:
    """The fault of a call that was open when its reply broke off."""
    return f"the reply was cut off in the middle of this call ({reason}), so it was not run; send the whole call again"


def whole_characters(text: str) -> str:
    """``text`` as UTF-8 can carry it: surrogate pairs joined, a half of one replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply, or as much of one as there was.

    :param parts: text, and for each call its position in :attr:`calls`, as they came
    :param reason: None when the stream broke off or was stopped before its end
    """

    parts: tuple[TextPart | Kept | int, ...]
    calls: tuple[ProposedCall, ...]
    reason: FinishReason | None
    usage: Usage | None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(slots=True)
class _Open:
    """A call while it is read."""

    name: str
    provider_id: str | None
    pieces: list[str] = field(default_factory=list[str])
    length: int = 0
    closed: bool = False
    looks: int = 0
    looked_at: bool = False
    """Whether its arguments, as they are now, were parsed."""
    read: ParsedText | None = None
    """What they are, where they are whole: parsed here once, for all who read the call."""
    fault: str | None = None
    form: Fitted | None = None
    """How its arguments get the tool's own names back, where they came under others."""

    def add(self, text: str) -> None:
        if self.closed:
            self.fault = self.fault or LATE
            return
        self.length += len(text)
        self.looked_at, self.read = False, None
        if self.length <= MAX_ARGUMENT_BYTES:
            self.pieces.append(text)
        elif self.fault is None:
            self.fault = TOO_LONG
            self.pieces = ["".join(self.pieces)[:KEPT_HEAD]]

    @property
    def whole(self) -> bool:
        """Whether no limit can have cut its arguments off: they are there, and JSON. Or it does not matter."""
        if self.fault is not None:
            return True
        if not self.looked_at:
            self.looked_at = True
            text = whole_characters("".join(self.pieces))
            with contextlib.suppress(ArgumentText):
                self.read = ParsedText.of(text) if text.strip() else None
        return self.read is not None

    def proposed(self, fault: str | None = None) -> ProposedCall:
        fault = self.fault or fault
        if fault is not None:
            head = whole_characters("".join(self.pieces))[:KEPT_HEAD]
            return ProposedCall(self.name, head, self.provider_id, fault)
        text = self.read if self.whole and self.read is not None else whole_characters("".join(self.pieces))
        if self.form is not None:
            with contextlib.suppress(ArgumentText):  # what is no JSON is refused as it came
                return ProposedCall(self.name, self.form.restored(parsed(text)), self.provider_id)
        return ProposedCall(self.name, text, self.provider_id)


class ReplyTooLong(Exception):
    """The stream brings more than any reply may hold."""


class ReplyAssembly:
    """Takes one reply's events in order. Use one for each reply."""

    def __init__(self, forms: Mapping[str, Fitted] | None = None) -> None:
        """:param forms: by wire name, the tools whose properties travel under other names"""
        self._forms = forms or {}
        self._parts: list[list[str] | Kept | int] = []
        self._calls: list[_Open] = []
        self._by_index: dict[int, int] = {}
        self._half = ""
        self._coming: Reply | None = None
        """What :meth:`coming` gave, while it holds."""
        self._units = 0
        self.usage: Usage | None = None
        self.reason: FinishReason | None = None

    def feed(self, event: BlockEvent) -> str | int | None:
        """Take one event.

        :return: text that may be shown, or the position of a call that is now closed, or None
        :raises ReplyTooLong: when the reply passes :data:`MAX_REPLY_UNITS` or :data:`MAX_CALLS`
        """
        coming, self._coming = self._coming, None
        match event:
            case TextDelta(text):
                self._weigh(len(text))
                return self._text(text)
            case CallOpened(index, provider_id, name):
                self._weigh(len(name) + len(provider_id or ""))
                self._open(index, provider_id, name)
            case CallArguments(index, text):
                self._weigh(len(text))
                if index not in self._by_index:
                    self._open(index, None, "")
                self._calls[self._by_index[index]].add(text)
            case CallClosed(index):
                position = self._by_index.get(index)
                if position is not None and not self._calls[position].closed:
                    self._calls[position].closed = True
                    self._coming = coming
                    return position
            case Kept():
                self._weigh(len(str(event.block)))
                self._parts.append(event)
            case NativeGiven(kept=kept):
                self._weigh(0 if kept is not None else len(str(event.content)))
                if kept is not None:
                    self.feed(kept)
            case Usage():
                self.usage = event
            case Finished(reason):
                self.reason = reason
        return None

    @property
    def units(self) -> int:
        """How much there is so far, as :data:`MAX_REPLY_UNITS` counts it."""
        return self._units

    def ready(self, first: int) -> int:
        """Up to which position, from ``first`` on, the calls may be started before the reply ends: their blocks are closed,
        and nothing that may still come makes them others.

        The last block of a reply may be one that the output limit cut or emptied, and its provider closed all the same:
        without whole arguments it waits for what comes next.
        """
        position = first
        while position < len(self._calls) and self._calls[position].closed:
            position += 1
        if position > first and self._parts[-1] == position - 1 and not self._calls[position - 1].whole:
            position -= 1
        return position

    def coming(self, position: int) -> Reply | None:
        """The reply up to the call at this position, as it will be if that call's block, which is open, closes now. Given once,
        when the piece that makes its arguments whole has come; None before and afterwards, and where nothing sound can become
        of it."""
        if len(self._calls) <= position:
            return None
        call = self._calls[position]
        if call.read is not None or call.closed or call.fault or not call.pieces or not call.pieces[-1].endswith("}"):
            return None
        if call.length > MAX_LOOKED_AHEAD or call.looks >= MAX_LOOKS or self._units > MAX_AHEAD_UNITS:
            return None
        call.looks += 1
        self._coming = self._until(position + 1, None) if call.whole else None
        return self._coming

    def so_far(self, count: int) -> Reply:
        """The reply up to its ``count``-th call."""
        coming = self._coming
        if coming is not None and len(coming.calls) == count and self._calls[count - 1].closed:
            return coming
        return self._until(count, NEVER_CLOSED)

    def _until(self, count: int, never_closed: str | None) -> Reply:
        calls = [call.proposed(None if call.closed else never_closed) for call in self._calls[:count]]
        until = 1 + self._parts.index(count - 1) if count else 0
        return Reply(_whole(self._parts[:until]), tuple(calls), None, self.usage)

    def finish(self, cut: str | None = None) -> Reply:
        """The reply so far. ``cut`` says why there is no more of it, where it did not end by itself."""
        if self._half:
            self._append_text("\ufffd")
            self._half = ""
        if cut is not None:
            self.reason = None
        unfinished = cut_text(cut) if cut is not None else OUTPUT_LIMIT if self.reason == "length" else NEVER_CLOSED
        calls: list[ProposedCall] = []
        for call in self._calls:
            calls.append(call.proposed(None if call.closed else unfinished))
        broken_off = _BROKEN_OFF.get(self.reason or "end")
        if broken_off and self._parts and isinstance(self._parts[-1], int) and not self._calls[-1].whole:
            # The last block of a reply that was not let to its end: Anthropic closes it like a whole one.
            calls[-1] = self._calls[-1].proposed(broken_off)
        return Reply(_whole(self._parts), tuple(calls), self.reason, self.usage)

    def _open(self, index: int, provider_id: str | None, name: str) -> None:
        if len(self._calls) >= MAX_CALLS:
            raise ReplyTooLong(f"the reply opens more than {MAX_CALLS} calls")
        name = whole_characters(name)[:KEPT_HEAD]
        fault = None if name.strip() else NO_NAME
        self._by_index[index] = len(self._calls)
        self._parts.append(len(self._calls))
        self._calls.append(
            _Open(name, provider_id[:200] if provider_id else None, fault=fault, form=self._forms.get(name))
        )

    def _text(self, text: str) -> str | None:
        text = self._half + text
        self._half = ""
        if text and "\ud800" <= text[-1] <= "\udbff":  # some servers split a character over two events
            text, self._half = text[:-1], text[-1]
        text = whole_characters(text)
        if not text:
            return None
        self._append_text(text)
        return text

    def _append_text(self, text: str) -> None:
        if self._parts and isinstance(self._parts[-1], list):
            self._parts[-1].append(text)
        else:
            self._parts.append([text])

    def _weigh(self, characters: int) -> None:
        self._units += characters + EVENT_UNITS
        if self._units > MAX_REPLY_UNITS:
            raise ReplyTooLong(f"the reply is longer than {MAX_REPLY_UNITS:,} characters")


def _whole(parts: Iterable[list[str] | Kept | int]) -> tuple[TextPart | Kept | int, ...]:
    return tuple(TextPart("".join(part)) if isinstance(part, list) else part for part in parts)


class WireIds:
    """Call ids for the history: the provider's own while it is usable and new in this conversation, else ours.

    Ours are nine letters and digits, the narrowest form that any supported API asks for.
    """

    _USABLE = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._next = 0

    def take(self, provider_id: str | None) -> str:
        """An id that no call of this conversation has."""
        if provider_id is not None and self._USABLE.match(provider_id) and provider_id not in self._used:
            wire_id = provider_id
        else:
            wire_id = self._own()
        self._used.add(wire_id)
        return wire_id

    def give_back(self, wire_ids: Sequence[str]) -> None:
        """These, the latest, were taken for calls that were never made: the next call gets what it would have got without."""
        self._used.difference_update(wire_ids)
        for wire_id in reversed(wire_ids):
            if wire_id == _own_id(self._next):
                self._next -= 1

    def _own(self) -> str:
        while True:
            self._next += 1
            wire_id = _own_id(self._next)
            if wire_id not in self._used:
                return wire_id


def _own_id(number: int) -> str:
    return f"hr{number:07d}"


def call_part(call: ProposedCall, wire_id: str) -> CallPart:
    """``call`` as the history shows it. Arguments that are no object stand under ``unreadable_arguments``."""
    name = wire_name(call.name) or "unnamed"
    if isinstance(call.arguments, (str, bytes)):
        try:
            arguments = parsed(call.arguments)
        except ArgumentText:
            text = call.arguments if isinstance(call.arguments, str) else call.arguments.decode("utf-8", "replace")
            arguments = {"unreadable_arguments": text[:KEPT_HEAD]}
    else:
        arguments = dict(call.arguments)
    return CallPart(wire_id, name, arguments)
