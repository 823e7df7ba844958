"""OpenAI's responses API.

https://platform.openai.com/docs/api-reference/responses-streaming
Each item of a reply is opened and closed by its own event. The provider stores nothing: each request carries the history,
with the encrypted reasoning that belongs to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
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
from handrail.catalog.provider_dialects import OPENAI_RESPONSES, PLAIN_KEYWORDS, ProviderSchemaDialect
from handrail.catalog.schema_adapter import adapt_tool
from handrail.contract.struct import Struct

if TYPE_CHECKING:
    from openai.types.responses import ResponseInputItemParam, ResponseStreamEvent, ToolParam

PROVIDER = "openai-responses"
_REASONS_ENCRYPTED = re.compile(r"(?:^|/)(?:o\d|gpt-[5-9]|gpt-\d\d)")
"""Models that return encrypted reasoning. Many others reject a request for it."""
_OTHER_FORMS: Mapping[str, re.Pattern[str]] = {
    "no encrypted reasoning": re.compile(
        r"(?i)encrypted content is not supported|reasoning\.encrypted_content|(?:unknown|unsupported|unrecogni[sz]ed|extra).{0,40}\binclude\b|\binclude\b.{0,40}not (?:supported|permitted|allowed)"
    ),
    "no output limit": re.compile(r"(?i)(?:unknown|unsupported|unrecogni[sz]ed).{0,40}max_output_tokens"),
    PLAIN_SCHEMAS: REFUSED_SCHEMA,
}
"""Other forms of a request, by the words of a refusal that demands them."""
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
    if body.get("object") != "response" and "output" not in body:
        yield None, body if "error" in body else {"type": "error", **body}
        return
    status = str(body.get("status"))
    kind = status if status in ("incomplete", "failed", "cancelled") else "completed"
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
        self._forms = AcceptedForms(_OTHER_FORMS)

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

    def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """Send one request and yield the reply; see :meth:`handrail.agent.model_protocol.Model.stream`."""
        return self._forms.stream(lambda: self._stream_once(request))

    async def _stream_once(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        reader = _ItemReader()
        forms = self._forms.chosen
        wants_reasoning = _REASONS_ENCRYPTED.search(self._model) and "no encrypted reasoning" not in forms
        has_limit = request.max_output_tokens and "no output limit" not in forms
        with map_sdk_errors(self.name, self._client.base_url):
            events = await self._client.responses.create(
                model=self._model,
                instructions=request.system or openai.omit,
                input=list(_items(request.messages)),
                tools=_tools(request, forms) or openai.omit,
                max_output_tokens=request.max_output_tokens if has_limit else openai.omit,
                include=["reasoning.encrypted_content"] if wants_reasoning else openai.omit,
                store=False,
                stream=True,
            )
            async with events:
                async for event in events:
                    for block in reader.read(event):
                        yield block
            for block in reader.yield_stream_end_events(has_end_mark=has_end_mark(events.response)):
                yield block
        if reader.failure is not None:
            raise make_reported_error(self.name, KEY_VARIABLE, reader.failure)
        if not reader.finished:
            raise ReplyStreamCut(
                f"{self.name}: The stream ended without the event response.completed. Resume the run to ask again."
            )


class _OpenCall(Struct, eq=False):
    """A call of a reply that is not finished.

    :param slot: the number that the server gave its item; several items may have one
    :param first_arguments: the arguments at its start, which are usually empty
    """

    number: int
    slot: object
    name: str
    call_id: str | None
    item_id: str | None
    first_arguments: str | None
    has_arguments: bool = False


class _ItemReader:
    """A converter of the API's events into block events.

    It assumes no fields, because the SDK does not validate them.
    """

    def __init__(self) -> None:
        self.finished = False
        self.failure: object = None
        """The error that the provider sent in place of the end."""
        self._open: list[_OpenCall] = []
        self._over: set[tuple[object, str]] = set()
        """Finished calls by number and id, so that repeats are ignored. Numbers alone may all be the same."""
        self._call_count = 0
        self._texts: set[tuple[object, object]] = set()
        """The item and part numbers of the texts that were yielded."""
        self._items: set[object] = set()
        """The numbers of the items that were streamed."""

    def read(self, event: ResponseStreamEvent) -> Iterator[BlockEvent]:
        if self.finished or self.failure is not None:
            return
        slot, part_slot = (_read_number(event, name) for name in ("output_index", "content_index"))
        kind = get_sdk_field(event, "type")
        match kind:
            case "response.output_text.delta" | "response.refusal.delta" | "response.content_part.delta":
                text = get_nonempty_text_field(event, "delta")
                yield from self._add_text(slot, part_slot, text or _find_text(get_sdk_field(event, "delta")))
            case "response.output_text.done" | "response.refusal.done" if (slot, part_slot) not in self._texts:
                yield from self._add_text(slot, part_slot, _find_text(event))
            case "response.output_item.added":
                item = get_sdk_field(event, "item")
                is_call = get_sdk_field(item, "type") == "function_call" and get_nonempty_text_field(item, "name")
                if is_call and not self._is_known(slot, item):  # one without a name is read at its end
                    yield self._open_call(slot, item)
            case "response.function_call_arguments.delta":
                piece, call = encode_field_as_json(event, "delta"), self._find_open_call(slot, event)
                if piece and call is not None:
                    call.has_arguments = True
                    yield CallArgumentsDelta(call.number, piece)
            case "response.function_call_arguments.done":
                whole, call = encode_field_as_json(event, "arguments"), self._find_open_call(slot, event)
                if whole and call is not None and not call.has_arguments:
                    call.has_arguments = True
                    yield CallArgumentsDelta(call.number, whole)
            case "response.output_item.done":
                yield from self._finish_item(slot, get_sdk_field(event, "item"))
            case (
                "response.completed"
                | "response.incomplete"
                | "response.failed"
                | "response.cancelled"
                | "response.done"
            ):
                response = get_sdk_field(event, "response")
                status = str(kind).partition(".")[2]
                yield from self._end(response, str(get_sdk_field(response, "status")) if status == "done" else status)
            case "error":
                named = {key: get_sdk_field(event, key) for key in ("code", "message", "param", "error")}
                self.failure = {key: value for key, value in named.items() if value is not None}
            case None if find_error_text(event):
                self.failure = convert_to_json_object(event)
            case _:
                pass

    def yield_stream_end_events(self, *, has_end_mark: bool) -> Iterator[BlockEvent]:
        """Yield the events of the end of the stream. The end mark completes a reply whose last event is missing."""
        if has_end_mark and not self.finished and self.failure is None and (self._texts or self._call_count):
            self.finished = True
            yield ReplyFinished("calls" if self._call_count else "end")

    def _add_text(self, slot: object, part_slot: object, text: str | None) -> Iterator[BlockEvent]:
        if text:
            self._texts.add((slot, part_slot))
            yield TextDelta(text)

    def _open_call(self, slot: object, item: object) -> CallBlockOpened:
        name, call_id, item_id = (get_nonempty_text_field(item, key) for key in ("name", "call_id", "id"))
        given = encode_field_as_json(item, "arguments")
        call = _OpenCall(self._call_count, slot, name or "", call_id, item_id, given)
        self._call_count += 1
        self._open.append(call)
        return CallBlockOpened(call.number, call_id, call.name)

    def _find_open_call(self, slot: object, event: object) -> _OpenCall | None:
        """Return the call of an event with arguments.

        Some servers give all items one number, and others give every event another id.
        """
        item_id = get_nonempty_text_field(event, "item_id")
        same_slot = [call for call in self._open if call.slot == slot]
        by_id = [call for call in same_slot or self._open if item_id is not None and call.item_id == item_id]
        return next(iter((*by_id, *reversed(same_slot))), None)

    def _find_finished_call(self, slot: object, item: object) -> _OpenCall | None:
        call_id = get_nonempty_text_field(item, "call_id")
        same_slot = [call for call in self._open if call.slot == slot]
        return next((call for call in same_slot or self._open if call.call_id == call_id), None) or next(
            (call for call in same_slot if None in (call.call_id, call_id)), None
        )

    def _find_renamed_call(self, slot: object, item: object) -> _OpenCall | None:
        """Return the only open call that a finished item with another call id can be."""
        name = get_nonempty_text_field(item, "name")
        same = [call for call in self._open if call.slot == slot and call.name == name]
        return same[0] if len(same) == 1 else None

    def _is_known(self, slot: object, item: object) -> bool:
        return self._is_finished(slot, item) or self._find_finished_call(slot, item) is not None

    def _finish_item(self, slot: object, item: object) -> Iterator[BlockEvent]:
        self._items.add(slot)
        kind = get_nonempty_text_field(item, "type") or ""
        if kind == "function_call":
            if self._is_finished(slot, item):
                return
            if (id := get_nonempty_text_field(item, "call_id")) is not None:
                self._over.add((slot, id))
            call = self._find_finished_call(slot, item) or self._find_renamed_call(slot, item)
            if call is None:  # some servers send a whole item at once
                yield self._open_call(slot, item)
                call = self._open[-1]
            self._open.remove(call)
            if not call.has_arguments and (whole := encode_field_as_json(item, "arguments") or call.first_arguments):
                yield CallArgumentsDelta(call.number, whole)
            if get_sdk_field(item, "status") != "incomplete":
                yield CallBlockClosed(call.number)
        elif kind == "message":
            if all(of_item != slot for of_item, _ in self._texts):
                for part_slot, text in enumerate(self._find_texts(item)):
                    yield from self._add_text(slot, part_slot, text)
        elif (block := convert_to_json_object(item)) is not None:
            if kind in _NATIVE:
                yield _provider_tool_result(_NATIVE[kind], kind, block)
            elif kind == "reasoning" and block.get("encrypted_content"):  # other ids are known only to the provider
                yield ProviderBlock(PROVIDER, block)

    def _is_finished(self, slot: object, item: object) -> bool:
        return (slot, get_nonempty_text_field(item, "call_id") or "") in self._over

    def _find_texts(self, item: object) -> Iterator[str]:
        content = get_sdk_field(item, "content")
        parts = cast("list[object]", content) if isinstance(content, list) else [{"text": content}]
        yield from filter(None, map(_find_text, parts))

    def _end(self, response: object, status: str) -> Iterator[BlockEvent]:
        if status in ("failed", "cancelled"):
            self.failure = get_sdk_field(response, "error") or {"message": "no reason given"}
            return
        output = get_sdk_field(response, "output")
        has_items, has_texts = bool(self._items), bool(self._texts)
        for slot, item in enumerate(cast("list[object]", output) if isinstance(output, list) else ()):
            is_text = get_sdk_field(item, "type") == "message"
            # The server streamed no items, or not the end of this one.
            if not has_texts if is_text else (not has_items or any(call.slot == slot for call in self._open)):
                yield from self._finish_item(slot, item)
        for call in self._open if status != "incomplete" else ():
            if not call.has_arguments and call.first_arguments:
                call.has_arguments = True
                yield CallArgumentsDelta(call.number, call.first_arguments)
            if call.has_arguments:  # a call whose arguments never came is incomplete
                yield CallBlockClosed(call.number)
        usage = get_sdk_field(response, "usage")
        if usage is not None:
            cached = parse_positive_count_field(get_sdk_field(usage, "input_tokens_details"), "cached_tokens")
            given = (
                parse_positive_count_field(usage, "input_tokens"),
                parse_positive_count_field(usage, "output_tokens"),
            )
            yield TokenUsage(*given, cached, cost=get_nonnegative_number_field(usage, "cost"))
        self.finished = True
        if status != "incomplete":
            yield ReplyFinished("calls" if self._call_count else "end")
            return
        why = get_sdk_field(get_sdk_field(response, "incomplete_details"), "reason")
        reason = classify_finish_reason(read_finish_reason(why) or "")
        yield ReplyFinished("other" if reason == "gave up" else reason)


def _read_number(event: object, name: str) -> int | str | None:
    """Return the number of an item or part, or None if it has none."""
    found = get_sdk_field(event, name)
    return found if isinstance(found, int | str) else None


def _find_text(part: object) -> str | None:
    return get_nonempty_text_field(part, "text") or get_nonempty_text_field(part, "refusal")


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


_PLAIN_RESPONSES = replace(OPENAI_RESPONSES, keywords=PLAIN_KEYWORDS)


def _tools(request: ModelRequest, forms: Collection[str]) -> list[ToolParam]:
    dialect = _PLAIN_RESPONSES if PLAIN_SCHEMAS in forms else OPENAI_RESPONSES
    own = [adapt_tool(view, dialect)[0] for view in request.tools]
    return [cast("ToolParam", tool) for tool in (*own, *request.native)]
