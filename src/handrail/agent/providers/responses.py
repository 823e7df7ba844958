"""OpenAI's responses API.

https://platform.openai.com/docs/api-reference/responses-streaming
Each item of a reply is opened and closed by its own event. The provider stores nothing: each request carries the history,
with the encrypted reasoning that belongs to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
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
    HistoryCallPart,
    Message,
    ModelRequest,
    ProviderBlock,
    ProviderToolResult,
    ReplyFinished,
    ReplyStreamCut,
    TextDelta,
    TextPart,
    TokenUsage,
    UserMessage,
)
from handrail.agent.providers.event_stream_client import Event, EventStreamClient
from handrail.agent.providers.openai import KEY_VARIABLE, map_sdk_errors
from handrail.agent.providers.provider_errors import (
    convert_to_json_object,
    encode_field_as_json,
    get_nonempty_text_field,
    get_nonnegative_number_field,
    get_sdk_field,
    make_reported_error,
    parse_positive_count_field,
)
from handrail.catalog.provider_dialects import OPENAI_RESPONSES, ProviderSchemaDialect
from handrail.catalog.schema_adapter import adapt_tool

if TYPE_CHECKING:
    from openai.types.responses import ResponseInputItemParam, ResponseStreamEvent, ToolParam

PROVIDER = "openai-responses"
_INCOMPLETE: dict[str, FinishReason] = {
    "max_output_tokens": "length",
    "content_filter": "refused",
    "max_messages": "length",
}
_REASONS_ENCRYPTED = re.compile(r"o\d|gpt-[5-9]|gpt-\d\d")
"""Models that return encrypted reasoning. Others reject a request for it."""
_NATIVE = {
    "web_search_call": "web_search",
    "image_generation_call": "image_generation",
    "code_interpreter_call": "code_interpreter",
}
_GOES_BACK = frozenset({"reasoning", "web_search_call"})
"""Provider items that later requests contain unchanged. Others are large or not needed."""
_ASKED = frozenset({"code", "revised_prompt"})
"""Fields of a provider item that contain the model's arguments."""


def _whole_body_events(body: dict[str, Any]) -> Iterator[Event]:
    if body.get("object") != "response":
        yield None, body if "error" in body else {"type": "error", **body}
        return
    kind = {"incomplete": "incomplete", "failed": "failed"}.get(str(body.get("status")), "completed")
    yield f"response.{kind}", {"type": f"response.{kind}", "response": body}


class ResponsesModel:
    """A model behind the responses API.

    :param base_url: another server's address, ending before ``/responses``; None for the SDK's default
    """

    takes_pictures = True

    def __init__(self, model: str, *, api_key: str, base_url: str | None = None) -> None:
        self._model = model
        self._client = openai.AsyncOpenAI(
            api_key=api_key,
            base_url=base_url,
            max_retries=0,
            http_client=EventStreamClient(self.name, _whole_body_events),
        )

    @property
    def name(self) -> str:
        return f"{PROVIDER}:{self._model}"

    @property
    def origin(self) -> str:
        return f"{self.name} {self._client.base_url}"

    @property
    def dialect(self) -> ProviderSchemaDialect:
        return OPENAI_RESPONSES

    async def aclose(self) -> None:
        await self._client.close()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """Send one request and yield the reply; see :meth:`handrail.agent.model_protocol.Model.stream`."""
        reader = _ItemReader()
        with map_sdk_errors(self.name, self._client.base_url):
            events = await self._client.responses.create(
                model=self._model,
                instructions=request.system or openai.omit,
                input=list(_items(request.messages)),
                tools=_tools(request) or openai.omit,
                max_output_tokens=request.max_output_tokens or openai.omit,
                include=["reasoning.encrypted_content"] if _REASONS_ENCRYPTED.match(self._model) else openai.omit,
                store=False,
                stream=True,
            )
            async with events:
                async for event in events:
                    for block in reader.read(event):
                        yield block
        if reader.failure is not None:
            raise make_reported_error(self.name, KEY_VARIABLE, reader.failure)
        if not reader.finished:
            raise ReplyStreamCut(
                f"{self.name}: The stream ended without the event response.completed. Resume the run to ask again."
            )


class _ItemReader:
    """A converter of the API's events into block events.

    It assumes no fields, because the SDK does not validate them.
    """

    def __init__(self) -> None:
        self.finished = False
        self.failure: object = None
        """The error that the provider sent in place of the end."""
        self._open: dict[int, bool] = {}
        """Open calls by the number of their item, and whether arguments arrived."""
        self._over: set[tuple[int, str]] = set()
        """Finished calls by number and id, so that repeats are ignored. Numbers alone may all be the same."""
        self._calls = self._has_text = False
        self._items: set[int] = set()
        """The numbers of the items that were streamed."""

    def read(self, event: ResponseStreamEvent) -> Iterator[BlockEvent]:
        if self.finished or self.failure is not None:
            return
        index, kind = get_sdk_field(event, "output_index"), get_sdk_field(event, "type")
        match kind:
            case "response.output_text.delta" | "response.refusal.delta":
                if text := get_nonempty_text_field(event, "delta"):
                    self._has_text = True
                    yield TextDelta(text)
            case "response.output_item.added" if isinstance(index, int):
                item = get_sdk_field(event, "item")
                if (
                    get_sdk_field(item, "type") == "function_call"
                    and index not in self._open
                    and not self._is_finished(index, item)
                ):
                    self._open[index] = False
                    self._calls = True
                    yield CallBlockOpened(
                        index, get_nonempty_text_field(item, "call_id"), get_nonempty_text_field(item, "name") or ""
                    )
            case "response.function_call_arguments.delta" if isinstance(index, int) and index in self._open:
                if piece := get_nonempty_text_field(event, "delta"):
                    self._open[index] = True
                    yield CallArgumentsDelta(index, piece)
            case "response.function_call_arguments.done" if isinstance(index, int) and self._open.get(index) is False:
                if whole := encode_field_as_json(event, "arguments"):
                    self._open[index] = True
                    yield CallArgumentsDelta(index, whole)
            case "response.output_item.done" if isinstance(index, int):
                yield from self._finish_item(index, get_sdk_field(event, "item"))
            case "response.completed" | "response.incomplete":
                yield from self._end(get_sdk_field(event, "response"), whole=kind == "response.completed")
            case "response.failed":
                response = get_sdk_field(event, "response")
                self.failure = get_sdk_field(response, "error") or {"message": "no reason given"}
            case "error":
                named = {key: get_sdk_field(event, key) for key in ("code", "message", "param", "error")}
                self.failure = {key: value for key, value in named.items() if value is not None}
            case _:
                pass

    def _finish_item(self, index: int, item: object) -> Iterator[BlockEvent]:
        self._items.add(index)
        kind = get_nonempty_text_field(item, "type") or ""
        if kind == "function_call":
            if self._is_finished(index, item):
                return
            if (id := get_nonempty_text_field(item, "call_id")) is not None:
                self._over.add((index, id))
            if index not in self._open:  # some servers send a whole item at once
                self._calls = True
                self._open[index] = False
                yield CallBlockOpened(
                    index, get_nonempty_text_field(item, "call_id"), get_nonempty_text_field(item, "name") or ""
                )
            if not self._open.pop(index) and (whole := encode_field_as_json(item, "arguments")):
                yield CallArgumentsDelta(index, whole)
            if get_sdk_field(item, "status") != "incomplete":
                yield CallBlockClosed(index)
        elif (block := convert_to_json_object(item)) is not None:
            if kind in _NATIVE:
                yield _provider_tool_result(_NATIVE[kind], kind, block)
            elif kind == "reasoning" and block.get("encrypted_content"):  # other ids are known only to the provider
                yield ProviderBlock(PROVIDER, block)

    def _finish_item_unless_known(self, index: int, item: object) -> Iterator[BlockEvent]:
        known = set(self._items)
        yield from self._finish_item(index, item)
        self._items = known

    def _is_finished(self, index: int, item: object) -> bool:
        return (index, get_nonempty_text_field(item, "call_id") or "") in self._over

    def _find_texts(self, item: object) -> Iterator[str]:
        content = get_sdk_field(item, "content")
        for part in cast("list[object]", content) if isinstance(content, list) else ():
            if text := get_nonempty_text_field(part, "text") or get_nonempty_text_field(part, "refusal"):
                yield text

    def _end(self, response: object, *, whole: bool) -> Iterator[BlockEvent]:
        output = get_sdk_field(response, "output")
        for index, item in enumerate(cast("list[object]", output) if isinstance(output, list) else ()):
            if get_sdk_field(item, "type") == "message" and not self._has_text:
                yield from map(TextDelta, self._find_texts(item))
            if not self._items or index in self._open:  # the server streamed no items, or not the end of this one
                yield from self._finish_item_unless_known(index, item)
        if whole:
            yield from map(CallBlockClosed, self._open)
            self._open.clear()
        usage = get_sdk_field(response, "usage")
        if usage is not None:
            cached = parse_positive_count_field(get_sdk_field(usage, "input_tokens_details"), "cached_tokens")
            given = (
                parse_positive_count_field(usage, "input_tokens"),
                parse_positive_count_field(usage, "output_tokens"),
            )
            yield TokenUsage(*given, cached, cost=get_nonnegative_number_field(usage, "cost"))
        self.finished = True
        why = get_nonempty_text_field(get_sdk_field(response, "incomplete_details"), "reason") or ""
        yield ReplyFinished(("calls" if self._calls else "end") if whole else _INCOMPLETE.get(why, "other"))


def _provider_tool_result(name: str, kind: str, block: dict[str, Any]) -> ProviderToolResult:
    used = str(block.get("id") or "")
    asked = block.get("action") if kind == "web_search_call" else {k: block[k] for k in _ASKED & block.keys()}
    content = {key: value for key, value in block.items() if key not in _ASKED | {"id", "type", "action"}}
    if kind == "image_generation_call" and isinstance(data := block.get("result"), str):
        media_type = f"image/{block.get('output_format') or 'png'}"
        content["result"] = {"type": "base64", "media_type": media_type, "data": data}
    kept = block if kind in _GOES_BACK else {"type": kind, "id": used}
    return ProviderToolResult(
        name,
        used,
        cast("dict[str, Any]", asked) if isinstance(asked, dict) else {},
        content,
        block.get("status") in ("failed", "incomplete"),
        ProviderBlock(PROVIDER, kept, said=True),
    )


def _items(messages: Iterable[Message]) -> Iterator[ResponseInputItemParam]:
    for message in messages:
        for item in _message_items(message):
            yield cast("ResponseInputItemParam", item)


def _message_items(message: Message) -> Iterator[Mapping[str, Any]]:
    match message:
        case UserMessage(text, pictures) if pictures:
            shown = ({"type": "input_image", "image_url": picture.url, "detail": "auto"} for picture in pictures)
            yield {"role": "user", "content": [{"type": "input_text", "text": text or "(empty)"}, *shown]}
        case UserMessage():
            yield {"role": "user", "content": message.text}
        case AssistantMessage(parts):
            for part in parts:
                match part:
                    case TextPart():
                        yield {"role": "assistant", "content": part.text}
                    case HistoryCallPart(wire_id, name, arguments):
                        given = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
                        yield {"type": "function_call", "call_id": wire_id, "name": name, "arguments": given}
                    case ProviderBlock(provider, block):
                        if provider == PROVIDER and block.get("type") in _GOES_BACK:
                            yield block
        case CallResultsMessage(results):
            for result in results:
                output: Any = result.text
                if result.pictures:
                    shown = ({"type": "input_image", "image_url": one.url, "detail": "auto"} for one in result.pictures)
                    output = [{"type": "input_text", "text": result.text}, *shown]
                yield {"type": "function_call_output", "call_id": result.wire_id, "output": output}


def _tools(request: ModelRequest) -> list[ToolParam]:
    own = [adapt_tool(view, OPENAI_RESPONSES)[0] for view in request.tools]
    return [cast("ToolParam", tool) for tool in (*own, *request.native)]
