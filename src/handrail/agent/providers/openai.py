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
from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, cast

import openai

from handrail.agent.model_protocol import (
    AssistantMessage,
    BlockEvent,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    CallResultsMessage,
    FinishReason,
    HistoryCallPart,
    ModelRequest,
    ProviderBlock,
    ProviderError,
    ProviderToolResult,
    ReplyFinished,
    ReplyStreamCut,
    RequestRejected,
    TextDelta,
    TokenUsage,
    UserMessage,
)
from handrail.agent.providers.event_stream_client import Event, EventStreamClient
from handrail.agent.providers.provider_errors import (
    get_amount,
    get_json_text,
    get_nonempty_text,
    get_positive_count,
    get_sdk_field,
    make_connection_error,
    make_reported_error,
    make_stream_format_error,
    make_timeout_error,
    to_plain_json,
)
from handrail.catalog.provider_dialects import OPENAI_CHAT, ProviderSchemaDialect
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


# Errors of the OpenAI SDK, translated by :mod:`handrail.agent.providers.provider_errors`; for both of its APIs.

KEY_VARIABLE = "OPENAI_API_KEY"


@contextmanager
def map_sdk_errors(name: str, address: object) -> Generator[None]:
    """Map the SDK's errors during one request and its stream to :class:`ProviderError`.

    :param name: the model, as the operator wrote it
    :param address: the address of the server
    :raises ProviderError: for an error of the SDK
    """
    try:
        yield
    except openai.APIStatusError as error:
        raise make_reported_error(
            name, KEY_VARIABLE, error.body or error.message, error.status_code, error.response.headers
        ) from error
    except openai.APITimeoutError as error:
        raise make_timeout_error(name, address) from error
    except openai.APIConnectionError as error:
        if isinstance(cause := error.__cause__, ProviderError):
            raise cause from None
        raise make_connection_error(name, address, error) from error
    except openai.APIError as error:
        raise make_reported_error(name, KEY_VARIABLE, error.body or error.message) from error
    except ValueError as error:
        raise make_stream_format_error(name, error) from error


MAX_CITED = 1_000
_WHOLE: dict[str, FinishReason] = {
    "stop": "end",
    "tool_calls": "calls",
    "function_call": "calls",
    # of other servers that speak this API
    "end_turn": "end",
    "eos": "end",
    "eos_token": "end",
    "stop_sequence": "end",
    "tool_use": "calls",
}
"""Finish reasons of a complete reply."""
_CUT: dict[str, FinishReason] = {
    "length": "length",
    "content_filter": "refused",
    # of other servers that speak this API
    "max_tokens": "length",
    "model_length": "length",
}
"""Finish reasons of a reply that may end in its last block."""
_GAVE_UP = frozenset({"abort", "error", "insufficient_system_resource"})
"""Finish reasons of servers that interrupted the reply."""


RequestForm = Literal["no usage", "old limit", "reasoning", "text content", "no system", "no user after results"]
"""A form of requests that some servers demand, as their first refusal says."""
_OTHER_FORMS: Mapping[RequestForm, re.Pattern[str]] = {
    "no usage": re.compile(r"stream_options|include_usage"),
    "old limit": re.compile(r"max_completion_tokens"),
    "reasoning": re.compile(
        r"(?i)(?:missing|must|requires?|without|should|lacks?)\b.{0,80}reasoning_content|reasoning_content\W.{0,80}\b(?:missing|must|required?|passed back)"
    ),
    "text content": re.compile(
        r"(?i)content.{0,60}(?:\bnull|\bnone\b|nil|must be a string|valid string|expected (?:a )?string, received null)"
    ),
    "no system": re.compile(
        r"(?i)system role (?:is )?not supported|system.{0,20}role.{0,40}(?:unsupported|not supported|not allowed)"
    ),
    "no user after results": re.compile(r"(?i)role '?\"?user'?\"? after (?:role )?'?\"?tool"),
}


def _whole_body_events(body: dict[str, Any]) -> Iterator[Event]:
    yield None, body


class OpenAIModel:
    """A model behind the chat completions API.

    :param base_url: another server's address, ending before ``/chat/completions``; None for the SDK's default
    """

    takes_pictures = True

    def __init__(self, model: str, *, api_key: str, base_url: str | None = None) -> None:
        self._model = model
        self._forms: tuple[RequestForm, ...] = ()
        """The other forms that the server demands."""
        self._client = openai.AsyncOpenAI(
            api_key=api_key,
            base_url=base_url,
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

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """Send one request and yield the reply; see :meth:`handrail.agent.model_protocol.Model.stream`.

        If the server rejects the form of the request, the request is sent again in the form that it accepts.
        """
        known = self._forms
        while True:
            begun = False
            try:
                async for event in self._stream_once(request):
                    begun = True
                    yield event
                return
            except RequestRejected as refused:
                form: RequestForm | None = next(
                    (one for one, words in _OTHER_FORMS.items() if words.search(str(refused))), None
                )
                if begun or form is None or form in self._forms:
                    self._forms = known  # a form that does not help is not kept
                    raise
                self._forms = (*self._forms, form)

    async def _stream_once(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        reader = _ChunkReader([str(view["name"]) for view in request.tools])
        most = request.max_output_tokens or openai.omit
        has_old_limit = "old limit" in self._forms
        with map_sdk_errors(self.name, self._client.base_url):
            chunks = await self._client.chat.completions.create(
                model=self._model,
                messages=list(_messages(request, self._forms)),
                tools=_tools(request.tools) or openai.omit,
                max_completion_tokens=openai.omit if has_old_limit else most,
                max_tokens=most if has_old_limit else openai.omit,
                stream=True,
                stream_options=openai.omit if "no usage" in self._forms else {"include_usage": True},
                web_search_options=openai.omit if (wanted := _search_options(request)) is None else wanted,
            )
            async with chunks:
                async for chunk in chunks:
                    for event in reader.read(chunk):
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
    {"role", "content", "refusal", "tool_calls", "function_call", "annotations", "audio", "images", "name", "citations"}
)
_OWN_CALL_FIELDS = frozenset({"index", "id", "type", "function"})
_OWN_FUNCTION_FIELDS = frozenset({"name", "arguments"})
_IN_PIECES = re.compile(r"reason|think|thought|text|summary|content")
"""Names of fields whose text arrives in pieces. Of other fields the last value counts."""
MAX_ADDED_CHARACTERS = 4 * 1024 * 1024
"""The most characters of added fields in one reply. More are dropped, all together, because a part would be invalid."""


def merge_added_fields(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields whose pieces arrived in this order."""
    values: dict[str, list[Any]] = {}
    for piece in pieces:
        for key, value in piece.items():
            if value is not None and value != "":
                values.setdefault(key, []).append(value)
    return {key: _merge_values(key, given) for key, given in values.items()}


def _merge_values(key: str, values: list[Any]) -> Any:
    if all(isinstance(value, str) for value in values):
        return "".join(values) if _IN_PIECES.search(key) else values[-1]
    if all(isinstance(value, dict) for value in values):
        return merge_added_fields(values)
    if all(isinstance(value, list) for value in values):
        return _merge_items([item for value in values for item in cast("list[Any]", value)])
    return values[-1]


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
    return [group[0] if len(group) == 1 else merge_added_fields(group) for group in groups]


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
    return to_plain_json({key: value for key, value in given.items() if key not in own and value is not None}) or {}


class _StreamedCall(Struct, eq=False):
    """A call of a reply while it is streamed."""

    number: int
    id: str | None
    name: str = ""
    """The name so far. Some servers send it in pieces, others repeat it."""
    arguments: list[str] = field(default_factory=list[str])
    added: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _announced: bool = False
    _closed: bool = False

    @property
    def has_arguments(self) -> bool:
        return bool(self.arguments)

    @property
    def is_complete(self) -> bool:
        """Whether the arguments so far are one JSON object."""
        try:
            return isinstance(json.loads("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return False

    def add_name(self, piece: str, known: Collection[str]) -> None:
        """Add a piece of the name, which may be a repetition of the name so far."""
        if self._announced or (self.name in known and self.name + piece not in known):
            return
        self.name = piece if piece.startswith(self.name) and self.name + piece not in known else self.name + piece

    def announce(self) -> Iterator[BlockEvent]:
        if not self._announced:
            self._announced = True
            yield CallBlockOpened(self.number, self.id, self.name)

    def close(self) -> Iterator[BlockEvent]:
        if not self._closed:
            self._closed = True
            yield from self.announce()
            yield CallBlockClosed(self.number)


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
        self._slot: object = None
        """The number of that call."""
        self._by_slot: dict[int | str, _StreamedCall] = {}
        """The last call of each number."""
        self._has_text = False
        self._added: list[dict[str, Any]] = []
        """The added fields of the message that are not yielded yet."""
        self._added_units = 0
        self._cited: list[dict[str, Any]] = []

    def read(self, chunk: ChatCompletionChunk) -> Iterator[BlockEvent]:
        usage = get_sdk_field(chunk, "usage")
        cached = get_positive_count(get_sdk_field(usage, "prompt_tokens_details"), "cached_tokens")
        given = get_positive_count(usage, "prompt_tokens"), get_positive_count(usage, "completion_tokens")
        if any(given):
            yield TokenUsage(*given, cached, cost=get_amount(usage, "cost"))
        if self.finished or self.gave_up is not None or self.failure is not None:
            return
        choices = get_sdk_field(chunk, "choices")
        choice = cast("list[object]", choices)[0] if isinstance(choices, list) and choices else None
        error = get_sdk_field(chunk, "error") or get_sdk_field(choice, "error")
        if not error and choice is None and get_sdk_field(chunk, "object") == "error":
            error = chunk
        if error:
            self.failure = error
            return
        yield from self._read_message(get_sdk_field(choice, "delta"), is_whole=False)
        yield from self._read_message(get_sdk_field(choice, "message"), is_whole=True)
        if reason := get_nonempty_text(choice, "finish_reason"):
            yield from self._end(reason)

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
            for fragment in calls:
                yield from self._fragment(fragment, is_whole=is_whole)

    def _find_texts(self, message: object) -> Iterator[str]:
        content = get_sdk_field(message, "content")
        for part in cast("list[object]", content) if isinstance(content, list) else ():
            if isinstance(part, str):
                yield part
            elif text := get_nonempty_text(part, "text"):
                yield text
        for name in ("content", "refusal"):
            if piece := get_nonempty_text(message, name):
                yield piece

    def _find_fragments(self, message: object) -> Iterator[object]:
        fragments = get_sdk_field(message, "tool_calls")
        if isinstance(fragments, list):
            yield from cast("list[object]", fragments)
        elif fragments is not None:
            yield fragments
        if (legacy := get_sdk_field(message, "function_call")) is not None and not fragments:
            yield {"index": "function_call", "function": legacy}

    def _collect_added_fields(self, message: object) -> None:
        added = _added_fields(message, _OWN_FIELDS)
        content = get_sdk_field(message, "content")
        if isinstance(content, list):  # parts that are not text, such as thinking
            parts = [to_plain_json(part) for part in cast("list[object]", content)]
            if others := [part for part in parts if part is not None and not isinstance(part.get("text"), str)]:
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
                yield ProviderBlock(PROVIDER, {"message": merge_added_fields(self._added)})
            self._added = []

    def _end(self, reason: str) -> Iterator[BlockEvent]:
        yield from self._take_added_fields()
        for call in self._calls:
            yield from call.announce()
            # An unknown reason ends the reply too, but a call without arguments may be incomplete.
            if reason in _WHOLE or (call.has_arguments and reason not in _CUT and reason not in _GAVE_UP):
                yield from call.close()
        if reason in _GAVE_UP:
            self.gave_up = reason
            return
        self.finished = True
        if self._cited:
            yield ProviderToolResult("web_search", "", {}, self._cited)
        for call in self._calls:
            if call.added:
                with suppress(RecursionError):
                    yield ProviderBlock(PROVIDER, {"call": call.number, "fields": merge_added_fields(call.added)})
        yield ReplyFinished((_WHOLE | _CUT).get(reason, "other"))

    def _fragment(self, fragment: object, *, is_whole: bool = False) -> Iterator[BlockEvent]:
        slot, call_id, function = (
            get_sdk_field(fragment, "index"),
            get_nonempty_text(fragment, "id"),
            get_sdk_field(fragment, "function"),
        )
        name, arguments = get_nonempty_text(function, "name"), get_json_text(function, "arguments")
        if call_id is None and name is None and arguments is None:
            return
        call = None if is_whole else self._find_call(slot, call_id, name)
        if call is None:
            yield from self._take_added_fields()
            for earlier in self._calls:
                yield from earlier.announce()
            if self._last is not None and self._last.has_arguments:
                yield from self._last.close()
            self._last = call = _StreamedCall(len(self._calls), call_id)
            self._calls.append(call)
            if isinstance(slot, int | str):
                self._by_slot[slot] = call
            self._slot = slot
        elif name is not None and name == call.name and arguments == "".join(call.arguments) and call.is_complete:
            return  # the same call once more
        elif call.id is None:
            call.id = call_id
        self._collect_added_call_fields(call, fragment, function)
        if name is not None:
            call.add_name(name, self._tool_names)
        if arguments is not None:
            yield from call.announce()
            call.arguments.append(arguments)
            yield CallArgumentsDelta(call.number, arguments)

    def _collect_added_call_fields(self, call: _StreamedCall, fragment: object, function: object) -> None:
        added = _added_fields(fragment, _OWN_CALL_FIELDS)
        if inner := _added_fields(function, _OWN_FUNCTION_FIELDS):
            added["function"] = inner
        if added and self._has_room(added):
            call.added.append(added)

    def _find_call(self, slot: object, call_id: str | None, name: str | None) -> _StreamedCall | None:
        """Return the call to which a fragment belongs, or None if it starts a call.

        Some servers number every call 0 and distinguish them by id. Some leave out the number, the id, or both.
        """
        last = self._last
        if last is not None and slot in (None, self._slot):
            if call_id is None:
                return None if name is not None and last.is_complete else last
            return last if last.id in (None, call_id) else None
        earlier = self._by_slot.get(slot) if isinstance(slot, int | str) else None
        if earlier is None or (name is not None if call_id is None else call_id != earlier.id):
            return None
        return earlier

    def _collect_search_sources(self, annotations: object) -> None:
        """Collect the sources of a provider's search, the only output that this API reports."""
        for note in cast("list[object]", annotations) if isinstance(annotations, list) else []:
            cited: object = (to_plain_json(note) or {}).get("url_citation")
            if isinstance(cited, dict) and len(self._cited) < MAX_CITED:
                self._cited.append(cast("dict[str, Any]", cited))


def _messages(request: ModelRequest, forms: Collection[RequestForm] = ()) -> Iterator[ChatCompletionMessageParam]:
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


_FILLER = "(The results are above.)"
"""A reply between results and a user's message, for servers that require one."""


def _user_messages(messages: Sequence[UserMessage]) -> Iterator[ChatCompletionMessageParam]:
    """Yield one message for all ``messages``; none for none."""
    if not messages:
        return
    if not any(message.pictures for message in messages):
        yield {"role": "user", "content": "\n\n".join(message.text for message in messages)}
        return
    parts: list[ChatCompletionContentPartParam] = []
    for message in messages:
        parts.append({"type": "text", "text": message.text or "(empty)"})
        parts.extend({"type": "image_url", "image_url": {"url": picture.url}} for picture in message.pictures)
    yield {"role": "user", "content": parts}


def _assistant_message(
    message: AssistantMessage, forms: Collection[RequestForm]
) -> Iterator[ChatCompletionMessageParam]:
    blocks = [part.block for part in message.parts if isinstance(part, ProviderBlock) and part.provider == PROVIDER]
    of_calls = {block["call"]: block.get("fields") for block in blocks if isinstance(block.get("call"), int)}
    calls = [_call(call, of_calls.get(number)) for number, call in enumerate(message.calls)]
    if not calls and not message.text:  # a message with blocks of another provider only is empty here
        return
    added = merge_added_fields(
        [cast("dict[str, Any]", found) for block in blocks if isinstance(found := block.get("message"), dict)]
    )
    content: Any = message.text or ("" if "text content" in forms else None)
    if "reasoning" in forms:
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


def _tools(views: Iterable[Mapping[str, Any]]) -> list[ChatCompletionToolUnionParam]:
    return [cast("ChatCompletionToolUnionParam", adapt_tool(view, OPENAI_CHAT)[0]) for view in views]
