"""OpenAI chat completions, and every server that speaks them.

https://platform.openai.com/docs/api-reference/chat-streaming
A call's block is closed by the start of the next one or by a finish reason that ends a whole reply.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import openai

from handrail.agent.model import (
    AssistantMessage,
    BlockEvent,
    CallArguments,
    CallClosed,
    CallOpened,
    Finished,
    FinishReason,
    Message,
    ModelRequest,
    NativeGiven,
    ResultsMessage,
    StreamCut,
    TextDelta,
    Usage,
    UserMessage,
)
from handrail.agent.providers.fields import count, get, plain, text
from handrail.agent.providers.openai_failures import explained
from handrail.catalog.dialects import OPENAI_CHAT, Dialect
from handrail.catalog.fitting import offered

if TYPE_CHECKING:
    from openai.types.chat import (
        ChatCompletionChunk,
        ChatCompletionContentPartParam,
        ChatCompletionMessageFunctionToolCallParam,
        ChatCompletionMessageParam,
        ChatCompletionToolUnionParam,
    )
    from openai.types.chat.completion_create_params import WebSearchOptions

MAX_CITED = 1_000
_REASONS: dict[str, FinishReason] = {
    "stop": "end",
    "tool_calls": "calls",
    "function_call": "calls",
    "length": "length",
    "content_filter": "refused",
}


class OpenAIModel:
    """One model behind the chat completions API.

    :param base_url: another server's address, ending before ``/chat/completions``; None: the SDK's default
    """

    takes_pictures = True

    def __init__(self, model: str, *, api_key: str, base_url: str | None = None) -> None:
        self._model = model
        self._client = openai.AsyncOpenAI(api_key=api_key, base_url=base_url, max_retries=0)

    @property
    def name(self) -> str:
        return f"openai:{self._model}"

    @property
    def dialect(self) -> Dialect:
        return OPENAI_CHAT

    async def aclose(self) -> None:
        await self._client.close()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """See :meth:`handrail.agent.model.Model.stream`."""
        reader = _ChunkReader()
        with explained(self.name, self._client.base_url):
            chunks = await self._client.chat.completions.create(
                model=self._model,
                messages=list(_messages(request)),
                tools=_tools(request.tools) or openai.omit,
                max_completion_tokens=request.max_output_tokens or openai.omit,
                stream=True,
                stream_options={"include_usage": True},
                web_search_options=openai.omit if (wanted := _search(request)) is None else wanted,
            )
            async with chunks:
                async for chunk in chunks:
                    for event in reader.read(chunk):
                        yield event
        if not reader.finished:
            raise StreamCut(f"{self.name}: the stream ended without a finish reason")


class _ChunkReader:
    """Turns chunks into block events. The SDK does not validate them, so nothing is taken to be there."""

    def __init__(self) -> None:
        self.finished = False
        self._next = 0
        self._slot: object = None
        self._id: str | None = None
        self._announced = True
        self._open: int | None = None
        self._cited: list[dict[str, Any]] = []

    def read(self, chunk: ChatCompletionChunk) -> Iterator[BlockEvent]:
        usage = get(chunk, "usage")
        if usage is not None:
            yield Usage(count(usage, "prompt_tokens"), count(usage, "completion_tokens"))
        choices = get(chunk, "choices")
        if self.finished or not isinstance(choices, list) or not choices:
            return
        choice = cast("list[object]", choices)[0]
        delta = get(choice, "delta")
        for field in ("content", "refusal"):
            if said := text(delta, field):
                yield TextDelta(said)
        self._cite(get(delta, "annotations"))
        fragments = get(delta, "tool_calls")
        if isinstance(fragments, list):
            for fragment in cast("list[object]", fragments):
                yield from self._fragment(fragment)
        if reason := text(choice, "finish_reason"):
            if reason not in ("length", "content_filter"):  # those end a reply in the middle of its last block
                yield from self._close()
            elif self._open is not None:
                yield from self._announce("")
            self.finished = True
            if self._cited:
                yield NativeGiven("web_search", "", {}, self._cited)
            yield Finished(_REASONS.get(reason, "other"))

    def _fragment(self, fragment: object) -> Iterator[BlockEvent]:
        slot, call_id, function = get(fragment, "index"), text(fragment, "id"), get(fragment, "function")
        name, arguments = text(function, "name"), text(function, "arguments")
        if call_id is None and name is None and arguments is None:
            return
        # Some servers number every call 0 and tell them apart by id; some leave the number out.
        other_slot = slot is not None and slot != self._slot
        other_id = call_id is not None and self._id is not None and call_id != self._id
        if self._open is None or other_slot or other_id:
            yield from self._close()
            self._open, self._slot, self._id, self._announced = self._next, slot, call_id, False
            self._next += 1
        elif self._id is None:
            self._id = call_id
        if name is not None:
            yield from self._announce(name)
        if arguments is not None:
            yield from self._announce("")
            assert self._open is not None
            yield CallArguments(self._open, arguments)

    def _cite(self, annotations: object) -> None:
        """What a search of the provider's own is said to stand on: all that this API tells of it."""
        for note in cast("list[object]", annotations) if isinstance(annotations, list) else []:
            cited: object = (plain(note) or {}).get("url_citation")
            if isinstance(cited, dict) and len(self._cited) < MAX_CITED:
                self._cited.append(cast("dict[str, Any]", cited))

    def _announce(self, name: str) -> Iterator[BlockEvent]:
        if not self._announced and self._open is not None:
            self._announced = True
            yield CallOpened(self._open, self._id, name)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield from self._announce("")
            yield CallClosed(self._open)
            self._open = None


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
            elif message.text:  # what is made of another provider's blocks alone says nothing here
                yield {"role": "assistant", "content": message.text}
        case ResultsMessage(results):
            for result in results:
                yield {"role": "tool", "tool_call_id": result.wire_id, "content": result.text}


def _search(request: ModelRequest) -> WebSearchOptions | None:
    """The one tool of the provider's own that this API has is a parameter."""
    for form in request.native:
        if "web_search_options" in form:
            return cast("WebSearchOptions", form["web_search_options"])
    return None


def _tools(views: Iterable[Mapping[str, Any]]) -> list[ChatCompletionToolUnionParam]:
    return [cast("ChatCompletionToolUnionParam", offered(view, OPENAI_CHAT)[0]) for view in views]
