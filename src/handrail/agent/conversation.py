"""The conversation of one agent: whole exchanges only, each message stored as it is added.

A provider can accept the conversation at any moment. A reply is stored before its calls are proposed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from handrail.agent.model_protocol import (
    MAX_PICTURES,
    PICTURE_NOT_ANSWERED,
    PICTURE_TYPES,
    AssistantMessage,
    CallResult,
    CallResultsMessage,
    HistoryCallPart,
    Message,
    ProviderBlock,
    TextPart,
    UserMessage,
    UserPicture,
    load_pictures_into_messages,
    load_pictures_into_result,
)
from handrail.agent.reply_assembly import HistoryCallIdAllocator, ModelReply, make_history_call, repair_surrogates
from handrail.agent.run_budget import count_message_characters
from handrail.contract.calls_and_results import CallAnswer, Result
from handrail.contract.result_conversions import list_artifact_media_types
from handrail.contract.services.history_and_skill_services import ConversationHistory, HistoryEntry
from handrail.contract.struct import Struct, field
from handrail.contract.tool.tool_ids_and_wire_names import wire_name

# The stored form of a conversation: rows of plain data. A partial set of rows still gives a history that a provider
# accepts.
#
# Each message is one JSON object with ``v`` (the form's version) and ``role``:
#
# - ``user``: ``text``; with ``pictures``, each ``{"artifact", "media_type"}``, it shows these; with ``notices``, it holds
#   the notifications with these delivery ids instead of the user's words; with ``headless``, no user could be asked then
# - ``assistant``: ``parts``, each ``{"text"}``, ``{"call": <wire id>, "name", "arguments", "id": <the kernel's call id>}``,
#   with ``theirs`` if the provider's own id differs, or ``{"kept": <provider>, "block"}``, with ``said`` and ``artifacts``
#   if the provider used one of its own tools; ``by`` is the model with its address
# - ``results``: ``results``, each ``{"of": <wire id>, "text", "error"}``, with ``pictures`` like a user's; with ``partial``,
#   some calls of the message before have no answer yet, and a later ``results`` has all of them
# - ``compacted``: ``text`` replaces all messages before the position ``from``
# - ``changed``: the messages before the position ``until`` lack their ``blocks`` or ``pictures``, or have results of at most
#   ``most`` characters, because the provider rejected them
#
# A reply with calls is stored before its calls are proposed. So a process that ends in the middle leaves calls without
# results, each with the id under which the log has its outcome.

VERSION = 1
LOST = json.dumps(
    Result.error(
        "interrupted", "The result of this call was not stored. Check its effects before you repeat it."
    ).to_dict(),
    separators=(",", ":"),
)
"""The answer to an earlier call whose own answer was lost."""


class UnansweredExchange(Struct):
    """A reply whose calls are not all answered yet, so that it is not part of the history.

    :param call_ids: the kernel's ids of the message's calls; ``""`` for an unknown one
    :param results: the answers so far, by wire id
    """

    message: AssistantMessage
    call_ids: tuple[str, ...]
    results: dict[str, CallResult] = field(default_factory=dict[str, CallResult])

    @property
    def unanswered_calls(self) -> list[tuple[int, HistoryCallPart, str]]:
        """The position, call and kernel id of each call without an answer."""
        calls = zip(self.message.calls, self.call_ids, strict=True)
        return [(n, part, call_id) for n, (part, call_id) in enumerate(calls) if part.wire_id not in self.results]

    def build_call_results_message(self, otherwise: str = LOST) -> CallResultsMessage:
        """Return the answers in call order.

        :param otherwise: the text for calls without an answer
        """
        return CallResultsMessage(
            tuple(
                self.results.get(part.wire_id) or CallResult(part.wire_id, otherwise, is_error=True)
                for part in self.message.calls
            )
        )


class RestoredConversation(Struct, frozen=True):
    """A conversation read from its stored rows.

    :param messages: whole exchanges only, beginning with a user message
    :param open: the last reply, if some of its calls are not answered
    :param ids: knows every call id in use
    :param next_position: the first free position
    :param positions: the stored position of each message; ``open_at`` is that of the open reply
    :param delivered_ids: the ids of the notifications that were delivered
    :param headless: whether there was no user to ask when the last message was added
    """

    messages: list[Message]
    open: UnansweredExchange | None
    ids: HistoryCallIdAllocator
    next_position: int
    delivered_ids: set[str] = field(default_factory=set[str])
    positions: list[int] = field(default_factory=list[int])
    open_at: int = 0
    headless: bool = False


def encode_message(message: Message, call_ids: Sequence[str] = (), *, partial: bool = False) -> dict[str, Any]:
    """Return one message in its stored form.

    :param call_ids: the kernel's ids of an assistant message's calls, in order
    :param partial: whether a results message leaves calls without an answer
    """
    match message:
        case UserMessage(text, pictures):
            return {"v": VERSION, "role": "user", "text": text, **_picture_data(pictures)}
        case AssistantMessage(parts, origin):
            ids = iter(call_ids)
            data = {"v": VERSION, "role": "assistant", "parts": [_part_data(part, ids) for part in parts]}
            return {**data, "by": origin} if origin else data
        case CallResultsMessage(results):
            items = [
                {"of": result.wire_id, "text": result.text, "error": result.is_error, **_picture_data(result.pictures)}
                for result in results
            ]
            data = {"v": VERSION, "role": "results", "results": items}
            return {**data, "partial": True} if partial else data


def _picture_data(pictures: Sequence[UserPicture]) -> dict[str, Any]:
    shown = [{"artifact": picture.ref, "media_type": picture.media_type} for picture in pictures]
    return {"pictures": shown} if shown else {}


class HistoryReduction(NamedTuple):
    """A change of the messages before a position, because the provider rejected them as they are.

    :param until: the stored position of the first message that stays as it is
    :param without_blocks: whether the blocks of providers are left out
    :param without_pictures: whether the pictures are left out
    :param most_characters: the longest text of a result; None for any
    :param for_good: whether the model takes no pictures at all
    """

    until: int
    without_blocks: bool = False
    without_pictures: bool = False
    most_characters: int | None = None
    for_good: bool = False


def apply_history_reduction(
    messages: Sequence[Message], positions: Sequence[int], change: HistoryReduction
) -> list[Message]:
    """Return the messages with ``change``.

    :param positions: the stored position of each message
    """
    count = bisect_left(positions, change.until)
    return [*(_change_message(message, change) for message in messages[:count]), *messages[count:]]


def _change_message(message: Message, change: HistoryReduction) -> Message:
    match message:
        case AssistantMessage(parts, origin) if change.without_blocks:
            return AssistantMessage(tuple(part for part in parts if not isinstance(part, ProviderBlock)), origin)
        case UserMessage(text, pictures) if pictures and change.without_pictures:
            return UserMessage(f"{text}\n{PICTURE_REFUSED}")
        case CallResultsMessage(results):
            return CallResultsMessage(tuple(_change_result(result, change) for result in results))
        case _:
            return message


def _change_result(result: CallResult, change: HistoryReduction) -> CallResult:
    if change.without_pictures and result.pictures:
        result = replace(result, text=f"{result.text}\n{PICTURE_REFUSED}", pictures=())
    most, text = change.most_characters, result.text
    if most is None or len(text) <= most + len(SHORTENED):
        return result
    head = most * 2 // 3
    return replace(result, text=f"{text[:head]}{SHORTENED}{text[len(text) - (most - head) :]}", pictures=())


PICTURE_REFUSED = "[The image here is not shown: the model's provider rejected it.]"
SHORTENED = (
    "\n[… The middle of this result is left out to free up your context. If you need it, call the tool again for a "
    "smaller part. …]\n"
)


def encode_compaction(first: int, text: str) -> dict[str, Any]:
    """Return the stored form of a compaction: ``text`` replaces the messages before position ``first``."""
    return {"v": VERSION, "role": "compacted", "from": first, "text": text}


def _part_data(part: TextPart | HistoryCallPart | ProviderBlock, ids: Iterator[str]) -> dict[str, Any]:
    match part:
        case TextPart(text):
            return {"text": text}
        case ProviderBlock(provider, block, said, artifacts):
            kept: dict[str, Any] = {"kept": provider, "block": dict(block)}
            return {**kept, "said": True, "artifacts": list(artifacts)} if said else kept
        case HistoryCallPart(wire_id, name, arguments, provider_id):
            call_id = next(ids, "")
            made = {"call": wire_id, "name": name, "arguments": dict(arguments), "id": call_id}
            return {**made, "theirs": provider_id} if provider_id else made


def restore_conversation(entries: Iterable[HistoryEntry]) -> RestoredConversation:
    """Read a conversation from its stored rows. Never fails.

    Rows that are damaged, of a later version or out of place are left out. Earlier calls without results are answered by
    :data:`LOST`. A call id that is unusable or occurs twice is replaced in the call and its result.
    """
    reading = _ConversationReader()
    following = 0
    for position, data in entries:
        following = max(following, position + 1)
        # A newer version may have written the row. Its meaning is unknown here, and a guess could change the
        # conversation.
        if data.get("v") == VERSION:
            reading.take(position, data)
    return RestoredConversation(
        reading.messages,
        reading.open,
        reading.ids,
        following,
        reading.delivered_ids,
        reading.positions,
        reading.open_at,
        reading.headless,
    )


class _ConversationReader:
    """The state of reading a conversation, between two rows."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.positions: list[int] = []
        self.open: UnansweredExchange | None = None
        self.open_at = 0
        self.ids = HistoryCallIdAllocator()
        self.delivered_ids: set[str] = set()
        self.headless = False
        self._renamed: dict[str, str] = {}
        """The stored ids of the open exchange's calls, with the ids that they have now."""

    def take(self, position: int, data: Mapping[str, Any]) -> None:
        if (role := data.get("role")) == "user":
            text = data.get("text")
            if isinstance(text, str):
                self._settle()
                self.messages.append(UserMessage(repair_surrogates(text), _parse_pictures(data)))
                self.positions.append(position)
                self.headless = data.get("headless") is True
                if "notices" in data:
                    self.delivered_ids.update(_parse_texts(data, "notices"))
        elif role == "assistant":
            self._settle()
            if self.messages:  # providers accept only a history that begins with a user message
                origin = data.get("by")
                self._reply(position, _parse_objects(data.get("parts")), origin if isinstance(origin, str) else "")
        elif role == "results" and self.open is not None:
            self._results(self.open, _parse_objects(data.get("results")))
        elif role == "compacted":
            first, text = data.get("from"), data.get("text")
            if isinstance(first, int) and isinstance(text, str):
                self._settle()
                count = bisect_left(self.positions, first)
                self.messages[:count], self.positions[:count] = [UserMessage(repair_surrogates(text))], [first - 1]
        elif role == "changed":
            until, most = data.get("until"), data.get("most")
            if isinstance(until, int):
                self._settle()
                change = HistoryReduction(
                    until,
                    data.get("blocks") is False,
                    data.get("pictures") is False,
                    max(most, 0) if isinstance(most, int) else None,
                )
                self.messages = apply_history_reduction(self.messages, self.positions, change)

    def _settle(self) -> None:
        """Answer the open calls, because another message follows."""
        if self.open is not None:
            self._close(self.open)

    def _close(self, exchange: UnansweredExchange) -> None:
        self.messages += (exchange.message, exchange.build_call_results_message())
        self.positions += (self.open_at, self.open_at)
        self.open = None

    # Plain look-ups, because pattern matching takes three times as long and a history is long.

    def _reply(self, position: int, kept: list[dict[str, Any]], origin: str) -> None:
        parts: list[TextPart | HistoryCallPart | ProviderBlock] = []
        call_ids: list[str] = []
        has_text = False
        renamed = self._renamed = {}
        for data in kept:
            if "call" in data:
                wire_id, name = data["call"], data.get("name")
                if not isinstance(wire_id, str) or not isinstance(name, str) or wire_id in renamed:
                    continue
                arguments, call_id = data.get("arguments"), data.get("id")
                renamed[wire_id] = new = self.ids.allocate_unique_id(wire_id)
                given = cast("dict[str, Any]", arguments) if isinstance(arguments, dict) else {}
                theirs = self.ids.reserve_stored_id(data["theirs"]) if "theirs" in data else ""
                parts.append(HistoryCallPart(new, wire_name(name) or "unnamed", given, theirs))
                call_ids.append(call_id if isinstance(call_id, str) else "")
            elif "text" in data:
                text = data["text"]
                if isinstance(text, str) and text.strip():
                    parts.append(TextPart(repair_surrogates(text)))
                    has_text = True
            elif "kept" in data:
                provider, block = data["kept"], data.get("block")
                if isinstance(provider, str) and isinstance(block, dict):
                    part = ProviderBlock(
                        provider,
                        cast("dict[str, Any]", block),
                        data.get("said") is True,
                        _parse_texts(data, "artifacts"),
                    )
                    parts.append(part)
                    has_text = has_text or part.said
        if call_ids:
            self.open = UnansweredExchange(AssistantMessage(tuple(parts), origin), tuple(call_ids))
            self.open_at = position
        elif has_text:
            self.messages.append(AssistantMessage(tuple(parts), origin))
            self.positions.append(position)

    def _results(self, exchange: UnansweredExchange, kept: list[dict[str, Any]]) -> None:
        results, renamed = exchange.results, self._renamed
        for data in kept:
            wire_id, text = data.get("of"), data.get("text")
            # A result without its call would make every provider reject the whole history.
            if isinstance(wire_id, str) and isinstance(text, str) and wire_id in renamed:
                new = renamed[wire_id]
                results[new] = CallResult(
                    new, repair_surrogates(text), data.get("error") is True, _parse_pictures(data)
                )
        if len(results) == len(exchange.call_ids):
            self._close(exchange)


def _parse_texts(data: Mapping[str, Any], field: str) -> tuple[str, ...]:
    given: object = data.get(field)
    items = cast("list[object]", given) if isinstance(given, list) else []
    return tuple(item for item in items if isinstance(item, str))


def _parse_pictures(data: Mapping[str, Any]) -> tuple[UserPicture, ...]:
    if "pictures" not in data:
        return ()
    named = ((one.get("artifact"), one.get("media_type")) for one in _parse_objects(data["pictures"]))
    return tuple(UserPicture(ref, kind) for ref, kind in named if isinstance(ref, str) and kind in PICTURE_TYPES)


def _parse_objects(value: object) -> list[dict[str, Any]]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]


HIDDEN_METADATA = frozenset({"duration_ms", "lock_wait_ms", "sandbox", "artifacts"})
"""Metadata on which the model cannot act. Without times, equal results are equal texts."""


def format_result_for_model(result: Result) -> str:
    """Return ``result`` as its model reads it: compact JSON, the same bytes each time.

    The object has ``type``, ``data`` or ``error_text``, and ``metadata``.
    """
    wire = result.to_dict()
    if metadata := {key: value for key, value in sorted(result.metadata.items()) if key not in HIDDEN_METADATA}:
        wire["metadata"] = metadata
    else:
        del wire["metadata"]
    return repair_surrogates(json.dumps(wire, ensure_ascii=False, separators=(",", ":"), default=str))


def _find_result_pictures(result: Result) -> tuple[UserPicture, ...]:
    """Return the pictures that the kernel stored for a result, without their content."""
    placed: object = result.metadata.get("artifacts")
    stored = cast("list[object]", placed) if isinstance(placed, list) else []
    return tuple(
        UserPicture(ref, media_type)
        for ref, media_type in (list_artifact_media_types(result.data) if stored else ())
        if ref in stored and media_type in PICTURE_TYPES
    )


READ = "read"
_LEAST_REPEATED = 1_000
"""The characters below which a text is repeated. A note would be as long."""
_UNCHANGED = (
    "The text is left out, because it is the same as in your earlier read of these lines since the user's last message. Use that "
    "answer."
)


class _ShownReadResults:
    """The results of ``read`` since the user's last message that are still in the conversation."""

    def __init__(self) -> None:
        self._given: dict[str, bytes] = {}
        """The hash of each returned text, by path and range."""

    def forget_shown_results(self) -> None:
        """Forget all reads, because a user message came or messages were left out."""
        self._given.clear()

    def replace_repeated_text(self, answer: CallAnswer) -> Result:
        """Return the result for the model. A text that it has already is replaced by a note."""
        result = answer.model
        whole: object = result.data
        if answer.tool_id != READ or not result.ok or not isinstance(whole, Mapping):
            return result
        data = dict(cast("Mapping[str, Any]", whole))
        text = data.pop("text", None)
        if not isinstance(text, str) or len(text) < _LEAST_REPEATED or result.metadata.get("truncated"):
            return result
        # Another range of the same file is another text, so the range belongs to the key.
        place = json.dumps([data.get(key) for key in ("path", "first_line", "last_line", "start", "end")])
        digest = hashlib.sha256(
            json.dumps([data, text], sort_keys=True, default=str).encode("utf-8", "surrogatepass")
        ).digest()
        if self._given.get(place) != digest:
            self._given[place] = digest
            return result
        return Result.output({**data, "message": _UNCHANGED}, **{**result.metadata, "unchanged": True})


# The history as one model gets it.

_NARROW_ID = re.compile(r"[A-Za-z0-9]{9}\Z")
"""The form of call ids that every provider accepts, also those that reject another provider's."""


def adapt_history_to_model(messages: Sequence[Message], origin: str) -> tuple[Message, ...]:
    """Return the messages for the model of this ``origin``.

    A model gets its own blocks and call ids back. Those of another model, or of the same one at another address, would be
    rejected: its blocks are left out, and its call ids get a form that every provider accepts.
    """
    adapted: list[Message] = []
    ids: dict[str, str] = {}
    for message in messages:
        match message:
            case AssistantMessage(parts, by):
                ids = {
                    call.wire_id: new for call in message.calls if (new := _id_for(call, by == origin)) != call.wire_id
                }
                if ids or (by != origin and any(isinstance(part, ProviderBlock) for part in parts)):
                    kept = (part for part in parts if by == origin or not isinstance(part, ProviderBlock))
                    adapted.append(AssistantMessage(tuple(_with_id(part, ids) for part in kept), by))
                else:
                    adapted.append(message)
            case CallResultsMessage(results) if ids:
                renamed = (replace(result, wire_id=ids.get(result.wire_id, result.wire_id)) for result in results)
                adapted.append(CallResultsMessage(tuple(renamed)))
            case _:
                adapted.append(message)
    return tuple(adapted)


def _id_for(call: HistoryCallPart, is_own: bool) -> str:
    if is_own:
        return call.provider_id or call.wire_id
    if _NARROW_ID.match(call.wire_id):
        return call.wire_id
    # Derived from the ID and not counted, so that each request has the same text and the provider's prompt cache
    # applies.
    return f"h{base64.b32encode(hashlib.sha256(call.wire_id.encode()).digest()).decode()[:8].lower()}"


def _with_id(
    part: TextPart | HistoryCallPart | ProviderBlock, ids: Mapping[str, str]
) -> TextPart | HistoryCallPart | ProviderBlock:
    return (
        replace(part, wire_id=ids[part.wire_id]) if isinstance(part, HistoryCallPart) and part.wire_id in ids else part
    )


class _ReplyDraft(NamedTuple):
    """The additions of a reply to the conversation, computed before the reply is proposed.

    :param new: the calls that were not proposed before
    :param data: the stored form; empty for a reply without calls
    """

    reply: ModelReply
    call_ids: Sequence[str]
    new: Sequence[HistoryCallPart]
    message: AssistantMessage
    data: Mapping[str, Any]


class Conversation:
    """The messages of one agent over all its runs.

    :param history: stores each message as it is added; None keeps the messages in memory only
    :param repeat_reads: whether to repeat the text of a file that was read already and is unchanged
    :param origin: the model that replies; see :func:`handrail.agent.model_protocol.get_model_origin`
    """

    def __init__(
        self, history: ConversationHistory | None = None, *, repeat_reads: bool = True, origin: str = ""
    ) -> None:
        self._history = history
        self._origin = origin
        self._reads = None if repeat_reads else _ShownReadResults()
        self._messages: list[Message] = []
        self._characters = 0
        self._positions: list[int] = []
        """The stored position of each message."""
        self._open_at = 0
        self._open: UnansweredExchange | None = None
        self._ids = HistoryCallIdAllocator()
        self._draft: _ReplyDraft | None = None
        self._next = 0
        self._unsaved: list[HistoryEntry] = []
        self._handed_on_count = 0
        """The number of unsaved messages that are queued for writing."""
        self._keeping: list[Awaitable[None]] = []
        self._loaded = history is None
        self.delivered_ids: set[str] = set()
        """The ids of the notifications that were delivered."""
        self._headless = self.carried = False
        """``carried`` is true if the conversation was headless when it was loaded, which the session does not know."""

    @property
    def is_unattended(self) -> bool:
        """Whether no user can be asked.

        A run that a trigger started stays headless until a user message comes.
        """
        return self._headless

    @is_unattended.setter
    def is_unattended(self, headless: bool) -> None:
        self._headless, self.carried = headless, False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of whole exchanges."""
        return tuple(self._messages)

    @property
    def positions(self) -> Sequence[int]:
        """The stored position of each message."""
        return self._positions

    def get_stored_position(self, index: int) -> int:
        """Return the stored position of a message, or the next free one for the end of the messages."""
        return self._positions[index] if index < len(self._positions) else self._next

    @property
    def approximate_character_count(self) -> int:
        """The approximate length of the messages, counted as they are added."""
        return self._characters

    @property
    def open_exchange(self) -> UnansweredExchange | None:
        """The last reply while some of its calls have no answer.

        No other message may be added before they have.
        """
        return self._open

    @property
    def is_awaiting_answer(self) -> bool:
        """Whether calls have no answer, or the last message has no reply."""
        return self._open is not None or (bool(self._messages) and not isinstance(self._messages[-1], AssistantMessage))

    async def load_stored_messages(self) -> None:
        """Read the stored conversation, once.

        :raises HandrailError: if it cannot be read
        """
        if self._loaded or self._history is None:
            return
        found = restore_conversation(await self._history.read_stored_messages())
        self._messages = await load_pictures_into_messages(found.messages, self._history)
        self._characters = sum(map(count_message_characters, self._messages))
        self._open = found.open
        self._positions, self._open_at = found.positions, found.open_at
        self._ids, self._next, self.delivered_ids = found.ids, found.next_position, found.delivered_ids
        self._headless = self.carried = found.headless
        # Last, so that a failed read is tried again by the next run.
        self._loaded = True

    async def load_latest_result_pictures(self) -> None:
        """Load the pictures of the latest results, before the model gets them.

        :raises HandrailError: if they cannot be read now
        """
        last = self._messages[-1] if self._messages else None
        if self._history is None or not isinstance(last, CallResultsMessage):
            return
        if any(not picture.data for result in last.results for picture in result.pictures):
            loaded = [await load_pictures_into_result(result, self._history) for result in last.results]
            self._messages[-1] = CallResultsMessage(tuple(loaded))

    def reduce_rejected_history(self, change: HistoryReduction) -> None:
        """Change earlier messages, because the provider rejected them. The stored messages stay."""
        self._messages = apply_history_reduction(self._messages, self._positions, change)
        self._characters = sum(map(count_message_characters, self._messages))
        data: dict[str, Any] = {"v": VERSION, "role": "changed", "until": change.until}
        data |= {"blocks": False} if change.without_blocks else {}
        data |= {"pictures": False} if change.without_pictures else {}
        data |= {"most": change.most_characters} if change.most_characters is not None else {}
        self._store(data)

    def queue_messages_for_storage(self) -> None:
        """Queue the new messages for writing, before any effect of the calls that are proposed next."""
        if self._history is not None and len(self._unsaved) > self._handed_on_count:
            entries = self._unsaved[self._handed_on_count :]
            self._handed_on_count += len(entries)
            self._keeping.append(self._history.store_messages(entries))

    async def store_new_messages(self) -> None:
        """Store the new messages durably.

        :raises LogUnavailable: if they cannot be stored now; the next save tries again
        """
        self.queue_messages_for_storage()
        count, keeping = self._handed_on_count, self._keeping
        self._keeping = []
        try:
            for kept in keeping:
                await kept
        except BaseException:
            self._handed_on_count = 0
            raise
        del self._unsaved[:count]
        self._handed_on_count -= count

    def add_user_message(self, said: str | UserMessage) -> str:
        assert self._open is None, "calls before it have no answer"
        self._drop_unanswered_pictures()
        message = said if isinstance(said, UserMessage) else UserMessage(said)
        self._add(replace(message, text=repair_surrogates(message.text)))
        return message.text

    def _drop_unanswered_pictures(self) -> None:
        """Remove pictures that got no answer.

        A provider that refused them would refuse every later request too.
        """
        for place in range(len(self._messages) - 1, -1, -1):
            if not isinstance(message := self._messages[place], UserMessage):
                return
            if message.pictures:
                self._messages[place] = plain = UserMessage(f"{message.text}\n{PICTURE_NOT_ANSWERED}")
                self._characters += count_message_characters(plain) - count_message_characters(message)
                if self._history is not None:
                    self._unsaved.append((self._positions[place], encode_message(plain)))

    def add_notification_message(self, text: str, ids: Sequence[str]) -> None:
        assert self._open is None, "calls before it have no answer"
        message = UserMessage(repair_surrogates(text))
        self.delivered_ids.update(ids)
        self._add(message, notices=list(ids), **({"headless": True} if self.is_unattended else {}))

    def add_reply(self, reply: ModelReply, call_ids: Sequence[str]) -> None:
        """Add a reply, or the part received so far, before its calls are proposed.

        A longer part of the same reply replaces the shorter one. An empty reply adds nothing.

        :param call_ids: the ids that the kernel gives its calls, in order
        """
        growing, draft = self._open, self._draft
        assert growing is None or not growing.results, "calls before it have no answer"
        if draft is None or draft.reply != reply or draft.call_ids != call_ids:
            self._drop_draft()
            draft = self._make_draft(reply, call_ids)
        self._draft, message = None, draft.message
        if growing is not None and message == growing.message:
            return
        if reply.calls:
            self._open = UnansweredExchange(message, tuple(call_ids))
            if growing is not None:
                self._next -= 1
            self._open_at = self._next
            self._store(draft.data)
        elif any(not isinstance(part, ProviderBlock) or part.said for part in message.parts):
            self._add(message)

    def prepare_reply_draft(self, reply: ModelReply, call_ids: Sequence[str]) -> None:
        """Compute in advance what :meth:`add_reply` adds if it gets exactly this reply."""
        self._drop_draft()
        self._draft = self._make_draft(reply, call_ids)

    def _make_draft(self, reply: ModelReply, call_ids: Sequence[str]) -> _ReplyDraft:
        known = [] if self._open is None else list(self._open.message.calls)  # these do not change
        new: list[HistoryCallPart] = []
        for call in reply.calls[len(known) :]:
            wire_id, provider_id = self._ids.allocate_call_ids(call.provider_id)
            part = make_history_call(call, wire_id)
            new.append(replace(part, provider_id=provider_id) if provider_id else part)
        known += new
        parts: list[TextPart | HistoryCallPart | ProviderBlock] = []
        for part in reply.parts:
            if isinstance(part, int):
                parts.append(known[part])
            elif not isinstance(part, TextPart) or part.text.strip():
                parts.append(part)
        message = AssistantMessage(tuple(parts), self._origin)
        return _ReplyDraft(reply, call_ids, new, message, encode_message(message, call_ids) if reply.calls else {})

    def _drop_draft(self) -> None:
        if self._draft is not None:
            self._ids.release_latest_ids(self._draft.new)
            self._draft = None

    def add_call_answers(self, answers: Mapping[int, CallAnswer]) -> None:
        """Add answers to the calls of the open reply. With the last answer the reply joins the history.

        :param answers: by the position of the call in the reply
        """
        if (exchange := self._open) is None or not answers:
            return
        calls = exchange.message.calls
        for position, answer in answers.items():
            wire_id = calls[position].wire_id
            result = answer.model if self._reads is None else self._reads.replace_repeated_text(answer)
            pictures = _find_result_pictures(result)
            text = format_result_for_model(result)
            if len(pictures) > MAX_PICTURES:
                text += f"\n[The images after the first {MAX_PICTURES} are not shown.]"
            exchange.results[wire_id] = CallResult(wire_id, text, not result.ok, pictures[:MAX_PICTURES])
        if exchange.unanswered_calls:
            items = [exchange.results[call.wire_id] for call in calls if call.wire_id in exchange.results]
            self._store(encode_message(CallResultsMessage(tuple(items)), partial=True))
        else:
            self._open = None
            self._messages.append(exchange.message)
            self._characters += count_message_characters(exchange.message)
            self._positions.append(self._open_at)
            self._add(exchange.build_call_results_message())

    def replace_older_messages(self, first: int, text: str) -> None:
        """Replace the messages before the ``first``-th by ``text``. The messages stay stored."""
        assert self._open is None, "calls before it have no answer"
        if self._reads is not None:
            self._reads.forget_shown_results()
        place, outline = self._positions[first], UserMessage(text)
        self._characters += count_message_characters(outline) - sum(
            map(count_message_characters, self._messages[:first])
        )
        self._messages[:first], self._positions[:first] = [outline], [place - 1]
        self._store(encode_compaction(place, text))

    def _add(self, message: Message, **more: Any) -> None:
        if self._reads is not None and isinstance(message, UserMessage):
            self._reads.forget_shown_results()
        self._messages.append(message)
        self._characters += count_message_characters(message)
        self._positions.append(self._next)
        self._store({**encode_message(message), **more})

    def _store(self, data: Mapping[str, Any]) -> None:
        if self._history is not None:
            self._unsaved.append((self._next, data))
        self._next += 1
