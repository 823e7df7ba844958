"""OpenAI's chat completions API, and every server that speaks it.

https://platform.openai.com/docs/api-reference/chat-streaming
A call's block is closed by the start of the next one or by a finish reason that ends a whole reply. Some servers name all
their calls before any arguments arrive: a call without arguments when the next began is closed by the finish reason.

Servers add fields to their messages and calls, such as their reasoning. These go back unchanged, because several servers
reject a history without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import openai

from handrail.agent.model_protocol import (
    AssistantMessage,
    BlockEvent,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    CallResultsMessage,
    HistoryCallPart,
    ModelRequest,
    ProviderBlock,
    ProviderToolResult,
    ReplyFinished,
    ReplyStreamCut,
    TextDelta,
    TokenUsage,
    UserMessage,
)
from handrail.agent.providers.event_stream_client import Event, EventStreamClient, has_end_mark
from handrail.agent.providers.finish_reasons import classify_finish_reason, read_finish_reason
from handrail.agent.providers.openai_errors import KEY_VARIABLE, map_sdk_errors
from handrail.agent.providers.provider_errors import (
    convert_to_json_object,
    encode_field_as_json,
    find_error_text,
    get_nonempty_text_field,
    get_nonnegative_number_field,
    get_sdk_field,
    make_reported_error,
    parse_positive_count_field,
)
from handrail.agent.providers.request_forms import PLAIN_SCHEMAS, REFUSED_SCHEMA, AcceptedForms
from handrail.catalog.provider_dialects import OPENAI_CHAT, PLAIN_KEYWORDS, ProviderSchemaDialect
from handrail.catalog.schema_adapter import adapt_tool
from handrail.contract.struct import Struct, field

if TYPE_CHECKING:
    from openai.types.chat import (
        ChatCompletionChunk,
        ChatCompletionContentPartParam,
        ChatCompletionMessageParam,
        ChatCompletionToolUnionParam,
    )
    from openai.types.chat.completion_create_params import WebSearchOptions


MAX_CITED = 1_000
_CALLS_FIELDS = ("tool_calls", "tool_call", "toolCalls")
_CHOICE_FIELDS = ("text", *_CALLS_FIELDS, "function_call")
"""The fields that some servers put into the choice instead of a message."""


_OTHER_FORMS: Mapping[str, re.Pattern[str]] = {
    "no usage": re.compile(r"stream_options|include_usage"),
    "old limit": re.compile(r"max_completion_tokens"),
    "reasoning": re.compile(
        r"(?i)(?:missing|must|requires?|without|should|lacks?)\b.{0,80}reasoning_content|reasoning_content\W.{0,80}\b(?:missing|must|required?|passed back)"
    ),
    "signed calls": re.compile(
        r"(?i)missing (?:a )?`?thought_?signature|thought_?signature\b.{0,40}(?:missing|required)"
    ),
    "text content": re.compile(
        r"(?i)content.{0,60}(?:\bnull|\bnone\b|nil|must be a string|to be a string|valid string|expected (?:a )?string, received null)"
        r"|type must be string, but is null|missing field .?content|content.{0,30}(?:\bis (?:a )?required|field required)"
    ),
    "some content": re.compile(
        r"(?i)content.{0,60}(?:\bempty\b|\bblank\b|required)|non-?empty content|blank.{0,40}text field|text field.{0,60}\bblank"
        r"|at least one content|(?:message|assistant).{0,60}must not be empty"
    ),
    "no system": re.compile(
        r"(?i)system role (?:is )?not supported|system.{0,20}role.{0,40}(?:unsupported|not supported|not allowed)"
        r"|role.{0,20}does not support .?system|unexpected role .{0,2}system|first message.{0,30}\buser\b"
        r"|(?:system|developer) (?:messages?|prompts?|instructions?) (?:is|are) not (?:supported|allowed|enabled)"
    ),
    "no user after results": re.compile(r"(?i)role '?\"?user'?\"? after (?:role )?'?\"?tool|roles must alternate"),
    PLAIN_SCHEMAS: REFUSED_SCHEMA,
}
"""Other forms of a request, by the words of a refusal that demands them."""


def _whole_body_events(body: dict[str, Any]) -> Iterator[Event]:
    wrapped = (
        cast("dict[str, Any]", inner) for inner in body.values() if isinstance(inner, dict) and "choices" in inner
    )
    body = body if "choices" in body else next(wrapped, body)
    yield None, body
    choices = body.get("choices")
    for choice in cast("list[object]", choices)[:1] if isinstance(choices, list) else ():
        if isinstance(get_sdk_field(choice, "message"), dict) and not _find_finish_reason(choice):
            yield None, {"choices": [{"finish_reason": "stop"}]}  # a whole message is complete


def _find_finish_reason(choice: object) -> str | None:
    return read_finish_reason(get_sdk_field(choice, "finish_reason"))


class OpenAIModel:
    """A model behind the chat completions API.

    :param base_url: another server's address, ending before ``/chat/completions``; None for the SDK's default
    """

    takes_pictures = True

    def __init__(self, model: str, *, api_key: str, base_url: str | None = None) -> None:
        self._model = model
        self._forms = AcceptedForms(_OTHER_FORMS)
        self._client = openai.AsyncOpenAI(
            api_key=api_key,
            base_url=base_url,
            # The agent loop retries by itself, so that users see the delay and the budget counts each request.
            max_retries=0,
            http_client=EventStreamClient(self.name, _whole_body_events),
        )

    @property
    def name(self) -> str:
        return f"openai:{self._model}"

    @property
    def origin(self) -> str:
        return f"{self.name} {self._client.base_url}"

    @property
    def dialect(self) -> ProviderSchemaDialect:
        return OPENAI_CHAT

    async def aclose(self) -> None:
        await self._client.close()

    def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """Send one request and yield the reply; see :meth:`handrail.agent.model_protocol.Model.stream`."""
        return self._forms.stream(lambda: self._stream_once(request))

    async def _stream_once(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        reader = _ChunkReader([str(view["name"]) for view in request.tools])
        most = request.max_output_tokens or openai.omit
        forms = self._forms.chosen
        has_old_limit = "old limit" in forms
        with map_sdk_errors(self.name, self._client.base_url):
            chunks = await self._client.chat.completions.create(
                model=self._model,
                messages=list(_messages(request, forms)),
                tools=_tools(request.tools, forms) or openai.omit,
                max_completion_tokens=openai.omit if has_old_limit else most,
                max_tokens=most if has_old_limit else openai.omit,
                stream=True,
                stream_options=openai.omit if "no usage" in forms else {"include_usage": True},
                web_search_options=openai.omit if (wanted := _search_options(request)) is None else wanted,
            )
            async with chunks:
                async for chunk in chunks:
                    for event in reader.read(chunk):
                        yield event
            for event in reader.yield_stream_end_events(has_end_mark=has_end_mark(chunks.response)):
                yield event
        if reader.failure is not None:
            raise make_reported_error(self.name, KEY_VARIABLE, reader.failure)
        if reader.gave_up is not None:
            raise ReplyStreamCut(
                f"{self.name}: The provider interrupted the reply ({reader.gave_up}). Resume the run to ask again."
            )
        if not reader.finished:
            raise ReplyStreamCut(f"{self.name}: The stream ended without a finish reason. Resume the run to ask again.")


# Fields that servers add to a message or a call, such as ``reasoning_content`` or ``reasoning_details``.

PROVIDER = "openai"
_OWN_FIELDS = frozenset(
    {
        "role",
        "content",
        "refusal",
        *_CALLS_FIELDS,
        "function_call",
        "annotations",
        "audio",
        "images",
        "name",
        "citations",
    }
)
_ARGUMENT_FIELDS = ("arguments", "parameters", "input", "args")
_OWN_FUNCTION_FIELDS = frozenset({"name", *_ARGUMENT_FIELDS})
_OWN_CALL_FIELDS = frozenset({"index", "id", "type", "function"}) | _OWN_FUNCTION_FIELDS
_IN_PIECES = re.compile(r"reason|think|thought|text|summary|content")
"""Names of fields whose text arrives in pieces."""
_IN_ONE_PIECE = re.compile(
    r"(?:^|_)(?:channel|data|fingerprint|format|id|index|language|level|mode|model|name|object|phase|provider|recipient|role|"
    r"signature|state|status|tier|time|type|version)$"
)
"""Names of fields of which the last value counts. A field of any other name arrives in pieces if its values differ."""
MAX_ADDED_CHARACTERS = 4 * 1024 * 1024
"""The most characters of added fields in one reply. More are dropped, all together, because a part would be invalid."""


def merge_streamed_fields(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields whose pieces arrived in this order."""
    values: dict[str, list[Any]] = {}
    for piece in pieces:
        for key, value in piece.items():
            if value is not None and value != "":
                values.setdefault(key, []).append(value)
    return {key: _merge_values(key, given) for key, given in values.items()}


def _merge_values(key: str, values: list[Any]) -> Any:
    if all(isinstance(value, str) for value in values):
        if _is_cumulative(values):
            return values[-1]
        is_joined = _IN_PIECES.search(key) or not (_IN_ONE_PIECE.search(key) or len(set(values)) == 1)
        return "".join(values) if is_joined else values[-1]
    if all(isinstance(value, dict) for value in values):
        return merge_streamed_fields(values)
    if all(isinstance(value, list) for value in values):
        return _merge_items([item for value in values for item in cast("list[Any]", value)])
    return values[-1]


_LEAST_REPEATED = 8
"""The characters of a text from which its repetition at the start of the next piece is no coincidence."""


def _is_cumulative(pieces: Sequence[str]) -> bool:
    """Return whether each piece repeats all of the text before it, as some servers send it."""
    if len(pieces) < 2 or len(pieces[-2].strip()) < _LEAST_REPEATED:
        return False
    return all(later.startswith(earlier) for earlier, later in pairwise(pieces))


def _merge_items(items: list[Any]) -> list[Any]:
    """Join the items of a list that are pieces of one: same type and index, or texts of one type in a row."""
    groups: list[list[Any]] = []
    by_index: dict[tuple[str, int], list[Any]] = {}
    for item in items:
        members: dict[str, Any] = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        index: Any = members.get("index")
        last = groups[-1] if groups else None
        if isinstance(index, int):
            key = (str(members.get("type")), index)
            if key not in by_index:
                by_index[key] = []
                groups.append(by_index[key])
            by_index[key].append(item)
        elif last is not None and _continues(last[-1], item):
            last.append(item)
        else:
            groups.append([item])
    return [group[0] if len(group) == 1 else merge_streamed_fields(group) for group in groups]


def _continues(earlier: Any, later: Any) -> bool:
    if not (isinstance(earlier, dict) and isinstance(later, dict)):
        return False
    before, after = cast("dict[str, Any]", earlier), cast("dict[str, Any]", later)
    same = all(before.get(key) == after.get(key) for key in ("type", "index")) and after.get("id") in (
        None,
        before.get("id"),
    )
    return same and not before.get("signature") and any(key in before and key in after for key in _JOINED)


_JOINED = ("text", "summary", "thinking")


def _added_fields(value: object, own: Collection[str]) -> dict[str, Any]:
    """Return the fields of an SDK object, or of plain JSON, that its API does not have."""
    more: Any = cast("Any", value) if isinstance(value, dict) else getattr(value, "model_extra", None)
    if not isinstance(more, dict):
        return {}
    given = cast("dict[str, Any]", more)
    return (
        convert_to_json_object({key: value for key, value in given.items() if key not in own and value is not None})
        or {}
    )


class _StreamedCall(Struct, eq=False):
    """A call of a reply while it is streamed."""

    number: int
    id: str | None
    name: str = ""
    """The name so far. Some servers send it in pieces, others repeat it."""
    arguments: list[str] = field(default_factory=list[str])
    added: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    added_sent: int = 0
    """How many of the added fields are yielded."""
    _units: int = 0
    """The length of the arguments so far."""
    _sent: int = 0
    """How many pieces of the arguments are yielded."""
    _announced: bool = False
    _closed: bool = False

    @property
    def has_arguments(self) -> bool:
        return bool(self.arguments)

    @property
    def is_complete(self) -> bool:
        """Whether the arguments so far are one JSON object."""
        if not self.arguments or not self.arguments[-1].rstrip().endswith("}"):
            return False
        try:
            return isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return False

    @property
    def has_placeholder_arguments(self) -> bool:
        """Whether the arguments so far may only stand for arguments that follow."""
        return len(self.arguments) < 5 and "".join(self.arguments).strip() in ("{}", "null")

    def repeats(self, arguments: str | None) -> bool:
        """Return whether ``arguments`` are all that arrived once more, which some servers send at the end."""
        if arguments is None or len(arguments) < 2 or self._units != len(arguments):
            return False
        return self.is_complete and "".join(self.arguments) == arguments

    def _repeats_and_continues(self, piece: str) -> bool:
        """Return whether a piece has all arguments so far again, with more. Some servers send each piece like this."""
        if not piece.startswith("{") or not 2 < self._units < len(piece):
            return False
        so_far = "".join(self.arguments)
        # An object may follow these, so that the repetition may be a value.
        return piece.startswith(so_far) and not so_far.rstrip().endswith((":", "[", ","))

    def append_name_fragment(self, piece: str, known: Collection[str]) -> None:
        """Add a piece of the name, which may be a repetition of the name so far."""
        if self._announced or (self.name in known and self.name + piece not in known):
            return
        self.name = piece if piece.startswith(self.name) and self.name + piece not in known else self.name + piece

    def append_arguments_fragment(self, piece: str) -> Iterator[BlockEvent]:
        """Add a piece of the arguments, and yield what is certain. The name may follow its arguments."""
        if self.has_placeholder_arguments and piece.lstrip().startswith("{") and not self._sent:
            self.arguments.clear()
            self._units = 0
        elif self._repeats_and_continues(piece):
            piece = piece[self._units :]
        self.arguments.append(piece)
        self._units += len(piece)
        if self.name and not self.has_placeholder_arguments:
            yield from self.announce()

    def announce(self) -> Iterator[BlockEvent]:
        if not self._announced:
            self._announced = True
            yield CallBlockOpened(self.number, self.id, self.name)
        if self.has_placeholder_arguments and not self._closed:
            return
        for piece in self.arguments[self._sent :]:
            yield CallArgumentsDelta(self.number, piece)
        self._sent = len(self.arguments)

    def close(self) -> Iterator[BlockEvent]:
        if not self._closed:
            self._closed = True
            if self.has_placeholder_arguments and not self._sent and "".join(self.arguments).strip() == "null":
                self.arguments.clear()  # a call without arguments
            yield from self.announce()
            yield CallBlockClosed(self.number)


_TEXT_TYPES = ("text", "output_text", "refusal")
"""The types of parts that are text, also if it is empty."""


def _find_part_text(part: object) -> str | None:
    """Return the text of one part of a message's content, or None if it has none."""
    if isinstance(part, str | int | float) and not isinstance(part, bool):
        return str(part)
    if re.search(r"reason|think|thought", get_nonempty_text_field(part, "type") or ""):
        return None
    for name in ("text", "content", "refusal"):
        if text := get_nonempty_text_field(part, name) or get_nonempty_text_field(get_sdk_field(part, name), "value"):
            return text
    return None


def _find_error(value: object) -> object:
    """Return the error of a chunk or of its choice. Some servers send an empty one with every chunk."""
    error = get_sdk_field(value, "error")
    plain = convert_to_json_object(error)
    return None if plain is not None and not any(plain.values()) else error


def _is_error_object(chunk: object) -> bool:
    """Return whether a chunk without a choice is an error itself."""
    if get_sdk_field(chunk, "object") == "error" or get_sdk_field(chunk, "errors") or find_error_text(chunk):
        return True
    return parse_positive_count_field(get_sdk_field(chunk, "base_resp"), "status_code") > 0


def _count_of(usage: object, *names: str) -> int:
    return next((count for name in names if (count := parse_positive_count_field(usage, name))), 0)


class _ChunkReader:
    """A converter of chunks into block events.

    It assumes no fields, because the SDK does not validate them.

    :param tool_names: the wire names of the tools in the request
    """

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        self.finished = False
        self.gave_up: str | None = None
        """The finish reason with which the server interrupted the reply."""
        self.failure: object = None
        """The error that the server sent instead of a reply or in the middle of one."""
        self._tool_names = frozenset(tool_names)
        self._calls: list[_StreamedCall] = []
        self._last: _StreamedCall | None = None
        """The call that is being streamed."""
        self._by_slot: dict[object, _StreamedCall] = {}
        """The last call of each number."""
        self._by_id: dict[str, _StreamedCall] = {}
        """The last call of each id."""
        self._reason: str = ""
        """The finish reason."""
        self._is_open = False
        """Whether more of the reply arrived after its finish reason."""
        self._input_tokens = self._output_tokens = 0
        self._has_text = False
        self._added: list[dict[str, Any]] = []
        """The added fields of the message that are not yielded yet."""
        self._added_units = 0
        self._cited: list[dict[str, Any]] = []

    def read(self, chunk: ChatCompletionChunk) -> Iterator[BlockEvent]:
        """Convert one chunk. Some servers send more of a reply after its finish reason."""
        choices = get_sdk_field(chunk, "choices")
        given = cast("list[object]", choices) if isinstance(choices, list) else [choices]
        choice = next((one for one in given if one is not None), None)
        for usage in (get_sdk_field(place, "usage") for place in (chunk, get_sdk_field(chunk, "x_groq"), choice)):
            yield from self._read_usage(usage)
        if self.gave_up is not None or self.failure is not None:
            return
        error = _find_error(chunk) or _find_error(choice) or _find_error(get_sdk_field(chunk, "x_groq"))
        if not error and choice is None and _is_error_object(chunk):
            error = convert_to_json_object(chunk)
        # After the finish reason the reply is complete, so an error no longer matters.
        if error and not self.finished:
            self.failure = error
            return
        message, delta = get_sdk_field(choice, "message"), get_sdk_field(choice, "delta")
        if isinstance(delta, str):
            delta = {"content": delta}
        bare = {
            name: found
            for name in _CHOICE_FIELDS
            if (found := get_sdk_field(choice, name))
            and not get_sdk_field(delta, "content" if name == "text" else name)  # some servers send it in both
        }
        others = [get_sdk_field(one, "message") for one in given if one is not choice]  # some servers split a reply
        for one, is_whole in ((delta, False), (bare or None, False), *((one, True) for one in (message, *others))):
            for event in self._read_message(one, is_whole=is_whole):
                self._is_open = True
                yield event
        if (reason := _find_finish_reason(choice)) is not None:
            yield from self._end(reason)

    def yield_stream_end_events(self, *, has_end_mark: bool) -> Iterator[BlockEvent]:
        """Yield the events of the end of the stream. The end mark of a stream without a finish reason completes the reply."""
        if self.gave_up is not None or self.failure is not None:
            return
        if self.finished or (has_end_mark and (self._has_text or self._calls)):
            yield from self._end(self._reason, is_over=True)

    def _read_usage(self, usage: object) -> Iterator[BlockEvent]:
        sent = _count_of(usage, "prompt_tokens", "input_tokens")
        made = _count_of(usage, "completion_tokens", "output_tokens")
        if not sent and not made:
            return
        if not made:
            made = max(parse_positive_count_field(usage, "total_tokens") - sent, 0)
        self._input_tokens, self._output_tokens = sent or self._input_tokens, made or self._output_tokens
        details = get_sdk_field(usage, "prompt_tokens_details")
        cached = _count_of(details, "cached_tokens") or _count_of(usage, "prompt_cache_hit_tokens", "cached_tokens")
        yield TokenUsage(
            self._input_tokens, self._output_tokens, cached, cost=get_nonnegative_number_field(usage, "cost")
        )

    def _read_message(self, message: object, *, is_whole: bool) -> Iterator[BlockEvent]:
        """Read a piece of the message.

        :param is_whole: whether it is a whole message. Servers that do not stream send one, and others repeat the streamed
            message in one, which adds only what is new.
        """
        if message is None:
            return
        calls = list(self._find_fragments(message))
        if not (is_whole and (self._added or self._added_units)):
            self._collect_added_fields(message)
        if not (is_whole and self._has_text):
            for text in self._find_texts(message):
                self._has_text = True
                yield TextDelta(text)
        self._collect_search_sources(get_sdk_field(message, "annotations"))
        if not (is_whole and self._calls):
            seen: list[_StreamedCall] = []
            for fragment in calls:
                yield from self._fragment(fragment, () if is_whole else seen, is_whole=is_whole)
                seen.extend((self._last,) if self._last is not None else ())

    def _find_texts(self, message: object) -> Iterator[str]:
        content = get_sdk_field(message, "content")
        parts: list[object] = cast("list[object]", content) if isinstance(content, list) else [content]
        for part in parts:
            if text := _find_part_text(part):
                yield text
        for name in ("text", "refusal") if content is None else ("refusal",):
            if piece := get_nonempty_text_field(message, name):
                yield piece

    def _find_fragments(self, message: object) -> Iterator[object]:
        fragments = next((found for name in _CALLS_FIELDS if (found := get_sdk_field(message, name)) is not None), None)
        if isinstance(fragments, list):
            yield from cast("list[object]", fragments)
        elif isinstance(fragments, dict) and all(key.isdecimal() for key in cast("dict[str, object]", fragments)):
            for number, fragment in cast("dict[str, object]", fragments).items():
                yield {"index": int(number), **cast("dict[str, Any]", fragment)} if isinstance(fragment, dict) else None
        elif fragments is not None:
            yield fragments
        if (legacy := get_sdk_field(message, "function_call")) is not None and not fragments:
            yield {"index": "function_call", "function": legacy}

    def _collect_added_fields(self, message: object) -> None:
        added = _added_fields(message, _OWN_FIELDS)
        if get_sdk_field(message, "content") is None:
            added.pop("text", None)  # the content of some servers
        content = get_sdk_field(message, "content")
        if isinstance(content, list):  # parts that are not text, such as thinking
            parts = [convert_to_json_object(part) for part in cast("list[object]", content)]
            others = [part for part in parts if part is not None and part.get("type", "text") not in _TEXT_TYPES]
            if others := [part for part in others if _find_part_text(part) is None]:
                added["content"] = others
        if added and self._has_room(added):
            self._added.append(added)

    def _has_room(self, added: Mapping[str, Any]) -> bool:
        """Count added fields, and return whether all of them are still kept."""
        self._added_units += len(str(added))
        if self._added_units > MAX_ADDED_CHARACTERS:
            self._added.clear()
        return self._added_units <= MAX_ADDED_CHARACTERS

    def _take_added_fields(self) -> Iterator[BlockEvent]:
        if self._added:
            with suppress(RecursionError):  # a server may nest them without end
                yield ProviderBlock(PROVIDER, {"message": merge_streamed_fields(self._added)})
            self._added = []

    def _end(self, reason: str, *, is_over: bool = False) -> Iterator[BlockEvent]:
        """End the reply. A call that may continue stays open until the stream is over."""
        kind = classify_finish_reason(reason)
        yield from self._take_added_fields()
        for call in self._calls:
            yield from call.announce()
            # An unknown reason ends the reply too, but a call without arguments may be incomplete.
            ends = kind in ("end", "calls") or (call.has_arguments and kind == "other")
            if not reason:  # only the end mark
                ends = call.is_complete and not call.has_placeholder_arguments
            if ends and (is_over or call.is_complete or not call.has_arguments):
                yield from call.close()
        if kind == "gave up":
            self.gave_up = reason
            return
        if self.finished and not self._is_open and reason == self._reason:
            return
        self.finished, self._is_open, self._reason = True, False, reason
        if self._cited:
            yield ProviderToolResult("web_search", "", {}, self._cited)
            self._cited = []
        for call in self._calls:
            if len(call.added) > call.added_sent:
                call.added_sent = len(call.added)
                with suppress(RecursionError):
                    yield ProviderBlock(PROVIDER, {"call": call.number, "fields": merge_streamed_fields(call.added)})
        yield ReplyFinished(kind if reason else "end")

    def _fragment(self, fragment: object, siblings: Sequence[_StreamedCall], *, is_whole: bool) -> Iterator[BlockEvent]:
        """Read a fragment of a call.

        :param siblings: the calls of earlier fragments in the same chunk. A fragment with a name, and without number and id,
            starts another one
        """
        slot, call_id, function = (
            get_sdk_field(fragment, "index"),
            get_nonempty_text_field(fragment, "id"),
            get_sdk_field(fragment, "function"),
        )
        if not isinstance(slot, int | float | str):
            slot = None
        if function is None:
            function = fragment  # some servers leave out the object in between
        name = get_nonempty_text_field(function, "name")
        arguments = next(
            (text for one in _ARGUMENT_FIELDS if (text := encode_field_as_json(function, one)) is not None), None
        )
        if call_id is None and name is None and arguments is None:
            if (known := self._last if slot is None else self._by_slot.get(slot)) is not None:
                self._collect_added_call_fields(known, fragment, function)  # such as a signature that comes alone
            return
        call = None if is_whole else self._find_call(slot, call_id, name, arguments)
        if slot is None and call_id is None and name is not None and call in siblings:
            call = None
        if call is None:
            yield from self._take_added_fields()
            for earlier in self._calls:
                yield from earlier.announce()
                if earlier.is_complete:
                    yield from earlier.close()
            call = _StreamedCall(len(self._calls), call_id)
            self._calls.append(call)
        elif call.repeats(arguments):
            return  # the same arguments once more
        elif call.id is None:
            call.id = call_id
        self._last = call
        if slot is not None:
            self._by_slot[slot] = call
        if call_id is not None:
            self._by_id[call_id] = call
        self._collect_added_call_fields(call, fragment, function)
        if name is not None:
            call.append_name_fragment(name, self._tool_names)
        if arguments is not None:
            yield from call.append_arguments_fragment(arguments)

    def _collect_added_call_fields(self, call: _StreamedCall, fragment: object, function: object) -> None:
        added = _added_fields(fragment, _OWN_CALL_FIELDS)
        if inner := _added_fields(function, _OWN_FUNCTION_FIELDS):
            added["function"] = inner
        if added and self._has_room(added):
            call.added.append(added)

    def _find_call(
        self, slot: object, call_id: str | None, name: str | None, arguments: str | None
    ) -> _StreamedCall | None:
        """Return the call to which a fragment belongs, or None if it starts a call.

        Some servers number every call 0 and distinguish them by id. Some leave out the number, the id, or both. Some give
        every fragment another id.
        """
        by_id = self._by_id.get(call_id) if call_id is not None else None
        found = self._last if slot is None else self._by_slot.get(slot)
        if by_id is not None and found is not None and found.id != call_id:
            found = by_id
        if found is None:  # a fragment with neither name nor id cannot start a call
            last = self._last
            return last if name is None and call_id is None and last is not None and not last.is_complete else None
        is_same_id = call_id is None or found.id in (None, call_id) or by_id is found
        if name is None:
            return found if is_same_id or arguments is not None else None
        if not is_same_id:
            return None
        is_repeated = name == found.name and (arguments is None or found.repeats(arguments))
        is_replaced = found.has_placeholder_arguments and call_id is not None and name == found.name
        return found if is_repeated or is_replaced or not found.is_complete else None

    def _collect_search_sources(self, annotations: object) -> None:
        """Collect the sources of a provider's search, the only output that this API reports."""
        for note in cast("list[object]", annotations) if isinstance(annotations, list) else []:
            cited: object = (convert_to_json_object(note) or {}).get("url_citation")
            if isinstance(cited, dict) and len(self._cited) < MAX_CITED:
                self._cited.append(cast("dict[str, Any]", cited))


_CALLS_FILLER = "(calls)"
"""The content of a reply that has only calls, for servers that require some."""
_UNKNOWN_SIGNATURE: Mapping[str, Any] = {"google": {"thought_signature": "skip_thought_signature_validator"}}
"""The signature that Gemini documents for calls of another model."""
_FILLER = "(The results are above.)"
"""A reply between results and a user's message, for servers that require one."""


def _messages(request: ModelRequest, forms: Collection[str] = ()) -> Iterator[ChatCompletionMessageParam]:
    """Convert messages. Users' messages in a row are joined, because several servers require alternating roles."""
    waiting: list[UserMessage] = []
    if request.system and "no system" in forms:
        waiting.append(UserMessage(request.system))
    elif request.system:
        yield {"role": "system", "content": request.system}
    has_results = False
    for message in (*request.messages, None):
        if isinstance(message, UserMessage):
            waiting.append(message)
            continue
        if waiting and has_results and "no user after results" in forms:
            yield {"role": "assistant", "content": _FILLER}
        yield from _user_messages(waiting)
        waiting = []
        has_results = isinstance(message, CallResultsMessage)
        if isinstance(message, AssistantMessage):
            yield from _assistant_message(message, forms)
        elif message is not None:
            for result in message.results:
                yield {"role": "tool", "tool_call_id": result.wire_id, "content": result.text}
                if result.pictures:  # a result is text only in this API
                    waiting.append(UserMessage(f"[Image of the result of call {result.wire_id}]", result.pictures))


def _user_messages(messages: Sequence[UserMessage]) -> Iterator[ChatCompletionMessageParam]:
    """Yield one message for all ``messages``; none for none."""
    if not messages:
        return
    if not any(message.pictures for message in messages):
        text = "\n\n".join(message.text for message in messages)
        yield {"role": "user", "content": text if text.strip() else "(empty)"}
        return
    parts: list[ChatCompletionContentPartParam] = []
    for message in messages:
        parts.append({"type": "text", "text": message.text if message.text.strip() else "(empty)"})
        parts.extend({"type": "image_url", "image_url": {"url": picture.url}} for picture in message.pictures)
    yield {"role": "user", "content": parts}


def _assistant_message(message: AssistantMessage, forms: Collection[str]) -> Iterator[ChatCompletionMessageParam]:
    blocks = [part.block for part in message.parts if isinstance(part, ProviderBlock) and part.provider == PROVIDER]
    of_calls = {block["call"]: block.get("fields") for block in blocks if isinstance(block.get("call"), int)}
    calls = [_call(call, of_calls.get(number)) for number, call in enumerate(message.calls)]
    if not calls and not message.text:  # a message with blocks of another provider only is empty here
        return
    if calls and "signed calls" in forms:
        calls[0].setdefault("extra_content", _UNKNOWN_SIGNATURE)
    added = merge_streamed_fields(
        [cast("dict[str, Any]", found) for block in blocks if isinstance(found := block.get("message"), dict)]
    )
    content: Any = message.text or ("" if "text content" in forms else None)
    if "some content" in forms and not message.text.strip():
        content = _CALLS_FILLER
    if "reasoning" in forms:
        # The server demands the field, and the reasoning of this reply is not known here.
        added.setdefault("reasoning_content", " ")
    if isinstance(parts := added.pop("content", None), list):
        content = [*cast("list[Any]", parts), *([{"type": "text", "text": message.text}] if message.text else ())]
    made: dict[str, Any] = {"role": "assistant", "content": content, **added}
    if calls:
        made["tool_calls"] = calls
    yield cast("ChatCompletionMessageParam", made)


def _call(call: HistoryCallPart, added: object) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":"))
    function = {"name": call.name, "arguments": arguments}
    more = dict(cast("dict[str, Any]", added)) if isinstance(added, dict) else {}
    if isinstance(inner := more.pop("function", None), dict):
        function |= inner
    return {"id": call.wire_id, "type": "function", "function": function, **more}


def _search_options(request: ModelRequest) -> WebSearchOptions | None:
    """Return the web search parameter, the only provider tool of this API."""
    for form in request.native:
        if "web_search_options" in form:
            return cast("WebSearchOptions", form["web_search_options"])
    return None


_PLAIN_CHAT = replace(OPENAI_CHAT, keywords=PLAIN_KEYWORDS)


def _tools(views: Iterable[Mapping[str, Any]], forms: Collection[str]) -> list[ChatCompletionToolUnionParam]:
    dialect = _PLAIN_CHAT if PLAIN_SCHEMAS in forms else OPENAI_CHAT
    return [cast("ChatCompletionToolUnionParam", adapt_tool(view, dialect)[0]) for view in views]
