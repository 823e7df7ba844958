"""OpenAI's chat completions API, and every server that speaks it.

https://platform.openai.com/docs/api-reference/chat-streaming
A call's block is closed by the start of the next one or by a finish reason that ends a whole reply. Some servers name all
their calls before any arguments arrive: a call without arguments when the next began is closed by the finish reason.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import openai

from handrail.agent.model_protocol import (
    AssistantMessage,
    BlockEvent,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    CallResultsMessage,
    FinishReason,
    Message,
    ModelRequest,
    ProviderToolResult,
    ReplyFinished,
    ReplyStreamCut,
    TextDelta,
    TokenUsage,
    UserMessage,
)
from handrail.agent.providers.provider_errors import (
    get_amount,
    get_json_text,
    get_nonempty_text,
    get_positive_count,
    get_sdk_field,
    make_connection_error,
    make_request_error,
    make_stream_format_error,
    make_timeout_error,
    to_plain_json,
)
from handrail.catalog.provider_dialects import OPENAI_CHAT, ProviderSchemaDialect
from handrail.catalog.schema_adapter import adapt_tool

if TYPE_CHECKING:
    from openai.types.chat import (
        ChatCompletionChunk,
        ChatCompletionContentPartParam,
        ChatCompletionMessageFunctionToolCallParam,
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
        raise make_request_error(
            name, KEY_VARIABLE, error.status_code, error.code, error.message, error.response.headers
        ) from error
    except openai.APITimeoutError as error:
        raise make_timeout_error(name, address) from error
    except openai.APIConnectionError as error:
        raise make_connection_error(name, address, error) from error
    except openai.APIError as error:
        raise make_request_error(name, KEY_VARIABLE, None, error.code or error.type, error.message, {}) from error
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


class OpenAIModel:
    """A model behind the chat completions API.

    :param base_url: another server's address, ending before ``/chat/completions``; None for the SDK's default
    """

    takes_pictures = True

    def __init__(self, model: str, *, api_key: str, base_url: str | None = None) -> None:
        self._model = model
        self._client = openai.AsyncOpenAI(api_key=api_key, base_url=base_url, max_retries=0)

    @property
    def name(self) -> str:
        return f"openai:{self._model}"

    @property
    def dialect(self) -> ProviderSchemaDialect:
        return OPENAI_CHAT

    async def aclose(self) -> None:
        await self._client.close()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """Send one request and yield the reply; see :meth:`handrail.agent.model_protocol.Model.stream`."""
        reader = _ChunkReader()
        with map_sdk_errors(self.name, self._client.base_url):
            chunks = await self._client.chat.completions.create(
                model=self._model,
                messages=list(_messages(request)),
                tools=_tools(request.tools) or openai.omit,
                max_completion_tokens=request.max_output_tokens or openai.omit,
                stream=True,
                stream_options={"include_usage": True},
                web_search_options=openai.omit if (wanted := _search_options(request)) is None else wanted,
            )
            async with chunks:
                async for chunk in chunks:
                    for event in reader.read(chunk):
                        yield event
        if reader.gave_up is not None:
            raise ReplyStreamCut(f"{self.name}: The provider interrupted the reply ({reader.gave_up}).")
        if not reader.finished:
            raise ReplyStreamCut(f"{self.name}: The stream ended without a finish reason.")


@dataclass(slots=True, eq=False)
class _StreamedCall:
    """A call of a reply while it is streamed."""

    number: int
    id: str | None
    has_arguments: bool = False
    _announced: bool = False
    _closed: bool = False

    def announce(self, name: str = "") -> Iterator[BlockEvent]:
        if not self._announced:
            self._announced = True
            yield CallBlockOpened(self.number, self.id, name)

    def close(self) -> Iterator[BlockEvent]:
        if not self._closed:
            self._closed = True
            yield from self.announce()
            yield CallBlockClosed(self.number)


class _ChunkReader:
    """A converter of chunks into block events.

    It assumes no fields, because the SDK does not validate them.
    """

    def __init__(self) -> None:
        self.finished = False
        self.gave_up: str | None = None
        """The finish reason with which the server interrupted the reply."""
        self._calls: list[_StreamedCall] = []
        self._last: _StreamedCall | None = None
        """The call that is being streamed."""
        self._slot: object = None
        """The number of that call."""
        self._by_slot: dict[int, _StreamedCall] = {}
        """The last call of each number."""
        self._cited: list[dict[str, Any]] = []

    def read(self, chunk: ChatCompletionChunk) -> Iterator[BlockEvent]:
        usage = get_sdk_field(chunk, "usage")
        if usage is not None:
            cached = get_positive_count(get_sdk_field(usage, "prompt_tokens_details"), "cached_tokens")
            given = get_positive_count(usage, "prompt_tokens"), get_positive_count(usage, "completion_tokens")
            yield TokenUsage(*given, cached, cost=get_amount(usage, "cost"))
        choices = get_sdk_field(chunk, "choices")
        if self.finished or self.gave_up is not None or not isinstance(choices, list) or not choices:
            return
        choice = cast("list[object]", choices)[0]
        delta = get_sdk_field(choice, "delta")
        for field in ("content", "refusal"):
            if said := get_nonempty_text(delta, field):
                yield TextDelta(said)
        self._collect_search_sources(get_sdk_field(delta, "annotations"))
        fragments = get_sdk_field(delta, "tool_calls")
        if isinstance(fragments, list):
            for fragment in cast("list[object]", fragments):
                yield from self._fragment(fragment)
        if reason := get_nonempty_text(choice, "finish_reason"):
            yield from self._end(reason)

    def _end(self, reason: str) -> Iterator[BlockEvent]:
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
        yield ReplyFinished((_WHOLE | _CUT).get(reason, "other"))

    def _fragment(self, fragment: object) -> Iterator[BlockEvent]:
        slot, call_id, function = (
            get_sdk_field(fragment, "index"),
            get_nonempty_text(fragment, "id"),
            get_sdk_field(fragment, "function"),
        )
        name, arguments = get_nonempty_text(function, "name"), get_json_text(function, "arguments")
        if call_id is None and name is None and arguments is None:
            return
        call = self._find_call(slot, call_id, name)
        if call is None:
            if self._last is not None and self._last.has_arguments:
                yield from self._last.close()
            self._last = call = _StreamedCall(len(self._calls), call_id)
            self._calls.append(call)
            if isinstance(slot, int):
                self._by_slot[slot] = call
            self._slot = slot
        elif call.id is None:
            call.id = call_id
        if name is not None:
            yield from call.announce(name)
        if arguments is not None:
            yield from call.announce()
            call.has_arguments = True
            yield CallArgumentsDelta(call.number, arguments)

    def _find_call(self, slot: object, call_id: str | None, name: str | None) -> _StreamedCall | None:
        """Return the call to which a fragment belongs, or None if it starts a call.

        Some servers number every call 0 and distinguish them by id. Some leave the number out.
        """
        last = self._last
        if last is not None and slot in (None, self._slot):
            return last if call_id is None or last.id in (None, call_id) else None
        earlier = self._by_slot.get(slot) if isinstance(slot, int) else None
        if earlier is None or (name is not None if call_id is None else call_id != earlier.id):
            return None
        return earlier

    def _collect_search_sources(self, annotations: object) -> None:
        """Collect the sources of a provider's search, the only output that this API reports."""
        for note in cast("list[object]", annotations) if isinstance(annotations, list) else []:
            cited: object = (to_plain_json(note) or {}).get("url_citation")
            if isinstance(cited, dict) and len(self._cited) < MAX_CITED:
                self._cited.append(cast("dict[str, Any]", cited))


def _messages(request: ModelRequest) -> Iterator[ChatCompletionMessageParam]:
    if request.system:
        yield {"role": "system", "content": request.system}
    for message in request.messages:
        yield from _message(message)


def _message(message: Message) -> Iterator[ChatCompletionMessageParam]:
    match message:
        case UserMessage(said, pictures) if pictures:
            parts: list[ChatCompletionContentPartParam] = [{"type": "text", "text": said or "(empty)"}]
            parts.extend({"type": "image_url", "image_url": {"url": picture.url}} for picture in pictures)
            yield {"role": "user", "content": parts}
        case UserMessage():
            yield {"role": "user", "content": message.text}
        case AssistantMessage():
            calls: list[ChatCompletionMessageFunctionToolCallParam] = [
                {
                    "id": call.wire_id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":")),
                    },
                }
                for call in message.calls
            ]
            if calls:
                yield {"role": "assistant", "content": message.text or None, "tool_calls": calls}
            elif message.text:  # a message with blocks of another provider only is empty here
                yield {"role": "assistant", "content": message.text}
        case CallResultsMessage(results):
            for result in results:
                yield {"role": "tool", "tool_call_id": result.wire_id, "content": result.text}


def _search_options(request: ModelRequest) -> WebSearchOptions | None:
    """Return the web search parameter, the only provider tool of this API."""
    for form in request.native:
        if "web_search_options" in form:
            return cast("WebSearchOptions", form["web_search_options"])
    return None


def _tools(views: Iterable[Mapping[str, Any]]) -> list[ChatCompletionToolUnionParam]:
    return [cast("ChatCompletionToolUnionParam", adapt_tool(view, OPENAI_CHAT)[0]) for view in views]
