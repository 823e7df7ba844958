"""Assembly of one reply from block events: its text, and its calls as proposals in the order of their opening.

A provider's stream is hostile input. Every opened call becomes exactly one :class:`~handrail.contract.calls_and_results.ProposedCall`,
whatever arrives. A call that must not run carries a ``fault`` with the reason. Data after the end of a block never changes
a whole call into another.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence

from handrail.agent.model_protocol import (
    BlockEvent,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    FinishReason,
    HistoryCallPart,
    ProviderBlock,
    ProviderToolResult,
    ReplyFinished,
    TextDelta,
    TextPart,
    TokenUsage,
)
from handrail.catalog.schema_adapter import AdaptedSchema
from handrail.contract.calls_and_results import ProposedCall
from handrail.contract.struct import Struct, field
from handrail.contract.text.strict_json import (
    MAX_ARGUMENT_BYTES,
    InvalidJsonTextError,
    PreparsedArgumentText,
    parse_arguments_fast,
    parse_arguments_with_note,
    try_parse_model_json_fast,
)
from handrail.contract.tool.tool_ids_and_wire_names import wire_name

MAX_REPLY_UNITS = 32 * 1024 * 1024
"""The most characters of one reply, plus :data:`EVENT_UNITS` for each event. A longer stream is interrupted."""
EVENT_UNITS = 64
MAX_CALLS = 256
"""The most calls of one reply. A stream with more is interrupted."""
MAX_SHOWN_ARGUMENTS = 2_000
"""The characters that are stored of unusable arguments."""

MAX_PREVALIDATED_ARGUMENTS = 64 * 1024
"""The most characters of arguments that are parsed before their block is closed."""
MAX_AHEAD_UNITS = 1024 * 1024
"""The reply length, in units of :data:`MAX_REPLY_UNITS`, after which no arguments are parsed before their block is closed."""
MAX_PREVALIDATIONS = 16
"""The most attempts to parse the arguments of one open call. Each piece that may be the last causes one."""

NO_NAME = "The call has no tool name. Name one of the available tools."
LATE_ARGUMENTS = "The call is ambiguous: arguments arrived after the provider had closed it. Send the call again."
TOO_LONG = f"The arguments are longer than {MAX_ARGUMENT_BYTES:,} bytes. Write the content to a file and pass its path."
OUTPUT_LIMIT = "The call was not run: the reply reached its output limit during the call. Send a shorter call."
CONTENT_FILTERED = (
    "The call was not run: the provider's filter ended the reply during the call. Rephrase it or continue without it."
)
NEVER_CLOSED = "The call was not run: it is incomplete. Send the whole call again."

_CUT_TEXTS: Mapping[FinishReason, str] = {"length": OUTPUT_LIMIT, "refused": CONTENT_FILTERED}
"""The faults of the last call of a reply that ended early, by the finish reason."""


def make_cut_call_fault(reason: str) -> str:
    """Return the fault of a call that was open when its reply was interrupted."""
    return f"The call was not run: the reply was interrupted during the call. {reason} Send the whole call again."


def repair_surrogates(text: str) -> str:
    """Return ``text`` as valid UTF-8: surrogate pairs are joined, and single surrogates become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class ModelReply(Struct, frozen=True):
    """A complete reply, or the part of one that arrived.

    :param parts: texts, and for each call its position in :attr:`calls`, in order
    :param reason: None if the stream was interrupted or stopped
    """

    parts: tuple[TextPart | ProviderBlock | int, ...]
    calls: tuple[ProposedCall, ...]
    reason: FinishReason | None
    usage: TokenUsage | None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


class _UnfinishedCall(Struct):
    """A call that is still being read."""

    name: str
    provider_id: str | None
    pieces: list[str] = field(default_factory=list[str])
    length: int = 0
    closed: bool = False
    looks: int = 0
    looked_at: bool = False
    """Whether the current arguments were parsed."""
    read: PreparsedArgumentText | None = None
    """The parsed arguments, if they are complete."""
    fault: str | None = None
    form: AdaptedSchema | None = None
    """Restores the tool's property names, if the arguments use others."""

    def add(self, text: str) -> None:
        if self.closed:
            self.fault = self.fault or LATE_ARGUMENTS
            return
        self.length += len(text)
        self.looked_at, self.read = False, None
        if self.length <= MAX_ARGUMENT_BYTES:
            self.pieces.append(text)
        elif self.fault is None:
            self.fault = TOO_LONG
            # The call will be refused. Only a beginning is kept, for the error and the log.
            self.pieces = ["".join(self.pieces)[:MAX_SHOWN_ARGUMENTS]]

    @property
    def is_complete(self) -> bool:
        """Whether no limit can have cut the arguments: they are complete JSON, or the call is faulty anyway."""
        if self.fault is not None:
            return True
        if not self.looked_at:
            self.looked_at = True
            text = repair_surrogates("".join(self.pieces))
            with contextlib.suppress(InvalidJsonTextError):
                self.read = PreparsedArgumentText.parse(text) if text.strip() else None
        return self.read is not None

    def to_proposed_call(self, fault: str | None = None) -> ProposedCall:
        fault = self.fault or fault
        if fault is not None:
            head = repair_surrogates("".join(self.pieces))[:MAX_SHOWN_ARGUMENTS]
            return ProposedCall(self.name, head, self.provider_id, fault)
        text = self.read if self.is_complete and self.read is not None else repair_surrogates("".join(self.pieces))
        if self.form is not None:
            with contextlib.suppress(InvalidJsonTextError):  # invalid JSON is rejected unchanged
                return ProposedCall(
                    self.name, self.form.restore_property_names(parse_arguments_fast(text)), self.provider_id
                )
        return ProposedCall(self.name, text, self.provider_id)


class ReplyTooLong(Exception):
    """The stream exceeds the limits of a reply."""


class ReplyAssembler:
    """An assembler of one reply from its events, in order. Use a new one for each reply."""

    def __init__(self, forms: Mapping[str, AdaptedSchema] | None = None) -> None:
        """Create an assembler.

        :param forms: the tools whose properties have other names on the wire, by wire name
        """
        self._forms = forms or {}
        self._parts: list[list[str] | ProviderBlock | int] = []
        self._calls: list[_UnfinishedCall] = []
        self._by_index: dict[int, int] = {}
        self._half = ""
        self._coming: ModelReply | None = None
        """The last result of :meth:`coming`, while it is valid."""
        self._units = 0
        self.usage: TokenUsage | None = None
        self.reason: FinishReason | None = None

    def feed_event(self, event: BlockEvent) -> str | int | None:
        """Process one event.

        :return: text to show, or the position of a call that is now closed, or None
        :raises ReplyTooLong: if the reply exceeds :data:`MAX_REPLY_UNITS` or :data:`MAX_CALLS`
        """
        # Any event may change the reply, so the prepared one is used only if the next event closes the call.
        coming, self._coming = self._coming, None
        match event:
            case TextDelta(text):
                self._add_units(len(text))
                return self._add_text(text)
            case CallBlockOpened(index, provider_id, name):
                self._add_units(len(name) + len(provider_id or ""))
                self._open_call(index, provider_id, name)
            case CallArgumentsDelta(index, text):
                self._add_units(len(text))
                # Some providers send the arguments before the name of the call.
                if index not in self._by_index:
                    self._open_call(index, None, "")
                self._calls[self._by_index[index]].add(text)
            case CallBlockClosed(index):
                if (position := self._by_index.get(index)) is not None and not self._calls[position].closed:
                    self._calls[position].closed = True
                    self._coming = coming
                    return position
            case ProviderBlock():
                self._add_units(len(str(event.block)))
                self._parts.append(event)
            case ProviderToolResult(block=kept):
                self._add_units(0 if kept is not None else len(str(event.content)))
                if kept is not None:
                    self.feed_event(kept)
            case TokenUsage():
                self.usage = event
            case ReplyFinished(reason):
                self.reason = reason
        return None

    @property
    def reply_length_units(self) -> int:
        """The length of the reply so far, in units of :data:`MAX_REPLY_UNITS`."""
        return self._units

    def find_startable_call_end(self, first: int) -> int:
        """Return the position up to which calls may start before the reply ends, from ``first`` on.

        Their blocks are closed, and later parts of the reply cannot change them. The output limit may have cut the last block
        although its provider closed it. Without complete arguments it waits for the next block.
        """
        position = first
        while position < len(self._calls) and self._calls[position].closed:
            position += 1
        if position > first and self._parts[-1] == position - 1 and not self._calls[position - 1].is_complete:
            position -= 1
        return position

    def predict_reply_until_call(self, position: int) -> ModelReply | None:
        """Return the reply up to the call at this position, as if the call's open block closed now.

        Returns it once, when the arguments become complete, and None before, afterwards, and for a faulty call.
        """
        if len(self._calls) <= position:
            return None
        call = self._calls[position]
        # Only a piece that ends with a brace can complete an object. This cheap test comes before any parsing.
        if call.read is not None or call.closed or call.fault or not call.pieces or not call.pieces[-1].endswith("}"):
            return None
        if (
            call.length > MAX_PREVALIDATED_ARGUMENTS
            or call.looks >= MAX_PREVALIDATIONS
            or self._units > MAX_AHEAD_UNITS
        ):
            return None
        call.looks += 1
        self._coming = self._make_reply_until(position + 1, None) if call.is_complete else None
        return self._coming

    def get_reply_until_call(self, count: int) -> ModelReply:
        coming = self._coming
        if coming is not None and len(coming.calls) == count and self._calls[count - 1].closed:
            return coming
        return self._make_reply_until(count, NEVER_CLOSED)

    def _make_reply_until(self, count: int, never_closed: str | None) -> ModelReply:
        calls = [call.to_proposed_call(None if call.closed else never_closed) for call in self._calls[:count]]
        until = 1 + self._parts.index(count - 1) if count else 0
        return ModelReply(_join_parts(self._parts[:until]), tuple(calls), None, self.usage)

    def get_reply_so_far(self, cut: str | None = None) -> ModelReply:
        """Return the reply so far.

        :param cut: why the reply is incomplete; None if it ended by itself
        """
        # Half of a character is left at the end of the reply. It has no second half any more.
        if self._half:
            self._append_text("\ufffd")
            self._half = ""
        # The finish reason of an interrupted reply is not the provider's word about the whole of it.
        if cut is not None:
            self.reason = None
        unfinished = (
            make_cut_call_fault(cut) if cut is not None else OUTPUT_LIMIT if self.reason == "length" else NEVER_CLOSED
        )
        calls: list[ProposedCall] = []
        for call in self._calls:
            calls.append(call.to_proposed_call(None if call.closed else unfinished))
        broken_off = _CUT_TEXTS.get(self.reason or "end")
        if broken_off and self._parts and isinstance(self._parts[-1], int) and not self._calls[-1].is_complete:
            # The last block of an interrupted reply, which Anthropic closes like a complete one.
            calls[-1] = self._calls[-1].to_proposed_call(broken_off)
        return ModelReply(_join_parts(self._parts), tuple(calls), self.reason, self.usage)

    def _open_call(self, index: int, provider_id: str | None, name: str) -> None:
        if len(self._calls) >= MAX_CALLS:
            raise ReplyTooLong(f"The reply has more than {MAX_CALLS} calls. Ask the model to make fewer in one reply.")
        name = repair_surrogates(name).strip()[:MAX_SHOWN_ARGUMENTS]
        fault = None if name else NO_NAME
        self._by_index[index] = len(self._calls)
        self._parts.append(len(self._calls))
        self._calls.append(
            _UnfinishedCall(name, _usable_provider_id(provider_id), fault=fault, form=self._forms.get(name))
        )

    def _add_text(self, text: str) -> str | None:
        text = self._half + text
        self._half = ""
        if text and "\ud800" <= text[-1] <= "\udbff":  # some servers split a character over two events
            text, self._half = text[:-1], text[-1]
        text = repair_surrogates(text)
        if not text:
            return None
        self._append_text(text)
        return text

    def _append_text(self, text: str) -> None:
        if self._parts and isinstance(self._parts[-1], list):
            self._parts[-1].append(text)
        else:
            self._parts.append([text])

    def _add_units(self, characters: int) -> None:
        self._units += characters + EVENT_UNITS
        if self._units > MAX_REPLY_UNITS:
            raise ReplyTooLong(
                f"The reply is longer than {MAX_REPLY_UNITS:,} characters. Ask the model for a shorter one."
            )


def _join_parts(parts: Iterable[list[str] | ProviderBlock | int]) -> tuple[TextPart | ProviderBlock | int, ...]:
    return tuple(TextPart("".join(part)) if isinstance(part, list) else part for part in parts)


MAX_PROVIDER_ID = 32 * 1024
"""The most characters of a provider's call id. Some proxies put signatures into it."""


def _usable_provider_id(provider_id: str | None) -> str | None:
    return repair_surrogates(provider_id) if provider_id and len(provider_id) <= MAX_PROVIDER_ID else None


class HistoryCallIdAllocator:
    """Call ids for the history: the provider's ids where they can be used, else generated ones.

    A provider's id must be unique in the conversation. One that only its provider accepts is kept next to a generated id.
    Generated ids have nine letters and digits, the narrowest form that a supported API requires.
    """

    _USABLE = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._next = 0

    def allocate_unique_id(self, provider_id: str | None) -> str:
        """Return an id that no call of this conversation has."""
        # The provider's own id keeps its cache of the conversation valid. Some providers repeat ids, which would join
        # two calls.
        if provider_id is not None and self._USABLE.match(provider_id) and provider_id not in self._used:
            wire_id = provider_id
        else:
            wire_id = self._next_own_id()
        self._used.add(wire_id)
        return wire_id

    def allocate_call_ids(self, provider_id: str | None) -> tuple[str, str]:
        """Return a unique id that every provider accepts, and the provider's own id if it differs, else ``""``."""
        wire_id = self.allocate_unique_id(provider_id)
        if provider_id is None or provider_id == wire_id or provider_id in self._used:
            return wire_id, ""
        self._used.add(provider_id)
        return wire_id, provider_id

    def reserve_stored_id(self, provider_id: object) -> str:
        """Return a stored provider's id, or ``""`` if it is unusable or in use."""
        if not isinstance(provider_id, str) or not (kept := _usable_provider_id(provider_id)) or kept in self._used:
            return ""
        self._used.add(kept)
        return kept

    def release_latest_ids(self, calls: Sequence[HistoryCallPart]) -> None:
        """Return the ids of the latest calls to the pool, because these were never made."""
        self._used.difference_update(call.wire_id for call in calls)
        self._used.difference_update(call.provider_id for call in calls)
        for call in reversed(calls):
            if call.wire_id == _make_id(self._next):
                self._next -= 1

    def _next_own_id(self) -> str:
        while True:
            self._next += 1
            if (wire_id := _make_id(self._next)) not in self._used:
                return wire_id


def _make_id(number: int) -> str:
    return f"hr{number:07d}"


def make_history_call(call: ProposedCall, wire_id: str) -> HistoryCallPart:
    """Return ``call`` for the history. Arguments that are not an object go under ``unreadable_arguments``."""
    name = wire_name(call.name) or "unnamed"
    if isinstance(call.arguments, (str, bytes)):
        try:
            quick = try_parse_model_json_fast(call.arguments)
            arguments = parse_arguments_with_note(call.arguments)[0] if quick is None else quick[0]
        except InvalidJsonTextError:
            text = call.arguments if isinstance(call.arguments, str) else call.arguments.decode("utf-8", "replace")
            arguments = {"unreadable_arguments": text[:MAX_SHOWN_ARGUMENTS]}
    else:
        arguments = dict(call.arguments)
    return HistoryCallPart(wire_id, name, arguments)
