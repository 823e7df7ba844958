"""Anthropic's messages API, and every server that speaks it.

https://docs.anthropic.com/en/docs/build-with-claude/streaming
A call's block is closed by its ``content_block_stop``.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import anthropic
import httpx2

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
    ProviderError,
    ProviderToolResult,
    ReplyFinished,
    ReplyStreamCut,
    TextDelta,
    TextPart,
    TokenUsage,
    UserMessage,
    UserPicture,
)
from handrail.agent.providers.event_stream_client import Event, EventStreamClient
from handrail.agent.providers.finish_reasons import classify_finish_reason, read_finish_reason
from handrail.agent.providers.provider_errors import (
    convert_to_json_object,
    encode_field_as_json,
    get_nonempty_text_field,
    get_sdk_field,
    make_connection_error,
    make_reported_error,
    make_stream_format_error,
    make_timeout_error,
    parse_positive_count_field,
)
from handrail.agent.providers.request_forms import PLAIN_SCHEMAS, REFUSED_SCHEMA, AcceptedForms
from handrail.catalog.provider_dialects import ANTHROPIC, PLAIN_KEYWORDS, ProviderSchemaDialect
from handrail.catalog.schema_adapter import adapt_tool
from handrail.contract.text.strict_json import MAX_ARGUMENT_BYTES, InvalidJsonTextError, parse_json_object

if TYPE_CHECKING:
    from anthropic.types import MessageParam, RawMessageStreamEvent, ToolUnionParam


# Anthropic's server tools in a reply and in the history.
#
# https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/web-search-tool
# A use is a ``server_tool_use`` block, its result a block whose type ends in ``_tool_result``. Both are sent back
# unchanged.

_USE, _RESULT = "server_tool_use", "_tool_result"


class ServerToolBlockReader:
    """A reader of the server tool blocks of one reply."""

    def __init__(self) -> None:
        self._open: dict[int, dict[str, Any]] = {}
        self._input: dict[int, list[str]] = {}
        self._input_units: dict[int, int] = {}
        """The length of each input so far."""
        self._asked: dict[str, tuple[str, dict[str, Any]]] = {}
        """The name and arguments of each use, by the provider's id."""

    def is_server_tool_block(self, index: int) -> bool:
        """Return whether a block belongs to a server tool."""
        return index in self._open

    def start_block(self, index: int, kind: object, block: object) -> None:
        """Process the start of a block that has no other ``kind``."""
        if (
            isinstance(kind, str)
            and (kind == _USE or kind.endswith(_RESULT))
            and (data := convert_to_json_object(block)) is not None
        ):
            self._open[index] = data
            self._input[index], self._input_units[index] = [], 0

    def add_arguments_piece(self, index: int, piece: str) -> None:
        """Add a piece of a use's arguments."""
        if self._input_units[index] + len(piece) <= MAX_ARGUMENT_BYTES:
            self._input[index].append(piece)
            self._input_units[index] += len(piece)

    def stop_block(self, index: int) -> Iterator[BlockEvent]:
        block, text = self._open.pop(index), "".join(self._input.pop(index))
        if block["type"] == _USE:
            if text:
                try:
                    block["input"] = parse_json_object(text)
                except InvalidJsonTextError:
                    block["input"] = {}
            given = block.get("input")
            asked = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
            block["input"] = asked
            self._asked[str(block.get("id"))] = str(block.get("name") or ""), asked
            yield ProviderBlock("anthropic", block, said=True)
            return
        used = str(block.get("tool_use_id") or "")
        name, asked = self._asked.get(used, (str(block["type"]).removesuffix(_RESULT), {}))
        content: Any = block.get("content")
        yield ProviderToolResult(
            name, used, asked, content, _is_failed(content), ProviderBlock("anthropic", block, said=True)
        )


def drop_unpaired_server_tool_blocks(content: Sequence[dict[str, Any]], *, last: bool) -> list[dict[str, Any]]:
    """Return the blocks of a message without server tool uses or results that lack their counterpart.

    :param last: whether the message is the last of the history, in which a use may still await its result
    """
    uses = {block.get("id") for block in content if block.get("type") == _USE}
    results = {block.get("tool_use_id") for block in content if _is_result(block)}
    return [
        block
        for block in content
        if not (_is_result(block) and block.get("tool_use_id") not in uses)
        and not (block.get("type") == _USE and not last and block.get("id") not in results)
    ]


def _is_result(block: dict[str, Any]) -> bool:
    kind = str(block.get("type"))
    return kind.endswith(_RESULT) and kind != "tool_result"


def _is_failed(content: object) -> bool:
    if not isinstance(content, dict):
        return False
    inner = cast("dict[str, Any]", content)
    return str(inner.get("type", "")).endswith("_error") or bool(inner.get("error_code"))


DEFAULT_MAX_OUTPUT_TOKENS = 16_384
"""The API requires a number. Most models allow this one."""
_LEAST_MAX_OUTPUT_TOKENS = 4_096
"""The number that every model allows."""
_KEPT_DELTAS = {"thinking_delta": "thinking", "signature_delta": "signature"}
_DELTAS = {"text_delta": "text", "input_json_delta": "partial_json", **_KEPT_DELTAS}
_OTHER_FORMS: Mapping[str, re.Pattern[str]] = {
    "short output": re.compile(
        r"max_tokens: \d+ > \d+|max_tokens\b.{0,60}(?:too large|exceed|at most|less than|maximum)"
    ),
    "no cache marks": re.compile(r"cache_control"),
    "system text": re.compile(r"(?i)\bsystem\b.{0,40}(?:valid string|be a string|expected (?:a )?string)"),
    PLAIN_SCHEMAS: REFUSED_SCHEMA,
}
"""Other forms of a request, by the words of a refusal that demands them."""


def _whole_body_events(body: dict[str, Any]) -> Iterator[Event]:
    if body.get("type", "message") != "message" or "error" in body or "content" not in body:
        yield "error", body
        return
    content: Any = body.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    yield "message_start", {"type": "message_start", "message": {**body, "content": []}}
    for index, block in enumerate(cast("list[Any]", content) if isinstance(content, list) else ()):
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": block}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": body.get("stop_reason")}
    yield "message_delta", {"type": "message_delta", "delta": delta, "usage": body.get("usage")}
    yield "message_stop", {"type": "message_stop"}


class AnthropicModel:
    """A model behind the messages API.

    :param base_url: another server's address, ending before ``/v1/messages``; None for the SDK's default
    """

    takes_pictures = True

    def __init__(self, model: str, *, api_key: str, base_url: str | None = None) -> None:
        self._model = model
        self._client = anthropic.AsyncAnthropic(
            api_key=api_key,
            base_url=base_url,
            max_retries=0,
            http_client=EventStreamClient(self.name, _whole_body_events, needs_names=True),
        )
        self._forms = AcceptedForms(_OTHER_FORMS)

    @property
    def name(self) -> str:
        return f"anthropic:{self._model}"

    @property
    def origin(self) -> str:
        return f"{self.name} {self._client.base_url}"

    @property
    def dialect(self) -> ProviderSchemaDialect:
        return ANTHROPIC

    async def aclose(self) -> None:
        await self._client.close()

    def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """Send one request and yield the reply; see :meth:`handrail.agent.model_protocol.Model.stream`."""
        return self._forms.stream(lambda: self._stream_once(request))

    async def _stream_once(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        reader = _EventReader()
        forms = self._forms.chosen
        usual_most = _LEAST_MAX_OUTPUT_TOKENS if "short output" in forms else DEFAULT_MAX_OUTPUT_TOKENS
        try:
            events = await self._client.messages.create(
                model=self._model,
                max_tokens=request.max_output_tokens or usual_most,
                system=_system(request.system, forms) if request.system else anthropic.omit,
                messages=_messages(request.messages, has_cache_marks="no cache marks" not in forms),
                tools=_tools(request, forms) or anthropic.omit,
                stream=True,
            )
            async with events:
                async for event in events:
                    for block in reader.read(event):
                        yield block
            for block in reader.yield_stream_end_events():
                yield block
        except anthropic.APIStatusError as error:
            raise make_reported_error(
                self.name, "ANTHROPIC_API_KEY", error.body or error.message, error.status_code, error.response.headers
            ) from error
        except anthropic.APITimeoutError as error:
            raise make_timeout_error(self.name, self._client.base_url) from error
        except (anthropic.APIConnectionError, httpx2.TransportError) as error:
            if isinstance(cause := error.__cause__, ProviderError):
                raise cause from None
            raise make_connection_error(self.name, self._client.base_url, error) from error
        except ValueError as error:
            raise make_stream_format_error(self.name, error) from error
        if reader.gave_up is not None:
            raise ReplyStreamCut(
                f"{self.name}: The provider interrupted the reply ({reader.gave_up}). Resume the run to ask again."
            )
        if not reader.finished:
            raise ReplyStreamCut(
                f"{self.name}: The stream ended without the event message_stop. Resume the run to ask again."
            )


class _EventReader:
    """A converter of the API's events into block events.

    It assumes no fields, because the SDK does not validate them.
    """

    def __init__(self) -> None:
        self.finished = False
        self.gave_up: str | None = None
        """The stop reason with which the server interrupted the reply."""
        self._reason: str | None = None
        self._input = self._cache_read = self._cache_write = 0
        self._calls: dict[int, object] = {}
        """Open calls with the input of their start. Some servers send the whole input there, and no deltas."""
        self._kept: dict[int, dict[str, Any]] = {}
        self._kept_pieces: dict[int, dict[str, list[str]]] = {}
        """The pieces of the texts in a kept block, by field."""
        self._native = ServerToolBlockReader()
        self._unnumbered = 0
        """How many blocks without a number began. They get negative numbers."""

    def read(self, event: RawMessageStreamEvent) -> Iterator[BlockEvent]:
        index, kind = get_sdk_field(event, "index"), get_sdk_field(event, "type")
        if not isinstance(index, int):
            self._unnumbered += kind == "content_block_start"
            index = -self._unnumbered
        match kind:
            case "message_start":
                yield from self._usage(get_sdk_field(get_sdk_field(event, "message"), "usage"))
            case "content_block_start":
                yield from self._start(index, get_sdk_field(event, "content_block"))
            case "content_block_delta":
                yield from self._delta(index, get_sdk_field(event, "delta"))
            case "content_block_stop":
                if self._native.is_server_tool_block(index):
                    yield from self._native.stop_block(index)
                elif index in self._calls:
                    yield from self._close_call(index)
                elif index in self._kept:
                    yield self._close_kept_block(index)
            case "message_delta":
                given = get_sdk_field(get_sdk_field(event, "delta"), "stop_reason")
                self._reason = read_finish_reason(given) or self._reason
                yield from self._usage(get_sdk_field(event, "usage"))
            case "message_stop":
                yield from self._end()
            case _:
                pass

    def yield_stream_end_events(self) -> Iterator[BlockEvent]:
        """Yield the events of the end of the stream. A stop reason completes a reply whose last event is missing."""
        if not self.finished and self._reason is not None:
            yield from self._end()

    def _end(self) -> Iterator[BlockEvent]:
        reason = "other" if self._reason is None else classify_finish_reason(self._reason)
        yield from self._close_kept_blocks()
        if reason == "gave up":
            self.gave_up = self._reason
            return
        if reason in ("calls", "end"):  # some servers do not close the blocks of a whole reply
            for open_index in list(self._calls):
                yield from self._close_call(open_index)
        self.finished = True
        yield ReplyFinished(reason)

    def _close_kept_blocks(self) -> Iterator[BlockEvent]:
        for index in list(self._kept):
            yield self._close_kept_block(index)

    def _close_kept_block(self, index: int) -> ProviderBlock:
        block = self._kept.pop(index)
        for name, pieces in self._kept_pieces.pop(index, {}).items():
            block[name] += "".join(pieces)
        return ProviderBlock("anthropic", block)

    def _close_call(self, index: int) -> Iterator[BlockEvent]:
        if whole := self._calls.pop(index):
            yield CallArgumentsDelta(index, whole if isinstance(whole, str) else json.dumps(whole))
        yield CallBlockClosed(index)

    def _start(self, index: int, block: object) -> Iterator[BlockEvent]:
        yield from self._close_kept_blocks()  # some servers do not close a block before the next one
        match get_sdk_field(block, "type"):
            case "text":
                if text := get_nonempty_text_field(block, "text"):
                    yield TextDelta(text)
            case "tool_use":
                self._calls[index] = get_sdk_field(block, "input")
                yield CallBlockOpened(
                    index, get_nonempty_text_field(block, "id"), get_nonempty_text_field(block, "name") or ""
                )
            case "thinking":
                begun = {key: get_nonempty_text_field(block, key) or "" for key in ("thinking", "signature")}
                self._kept[index] = {**(convert_to_json_object(block) or {}), **begun}
            case "redacted_thinking":
                self._kept[index] = convert_to_json_object(block) or {}
            case kind:
                self._native.start_block(index, kind, block)

    def _delta(self, index: int, delta: object) -> Iterator[BlockEvent]:
        kind = get_sdk_field(delta, "type") or next(
            (name for name, member in _DELTAS.items() if get_sdk_field(delta, member) is not None), None
        )
        if kind == "text_delta":
            if text := get_nonempty_text_field(delta, "text"):
                yield TextDelta(text)
        elif kind == "input_json_delta":
            if piece := encode_field_as_json(delta, "partial_json"):
                if self._native.is_server_tool_block(index):
                    self._native.add_arguments_piece(index, piece)
                    return
                if index in self._calls:
                    self._calls[index] = None
                yield CallArgumentsDelta(index, piece)
        elif isinstance(kind, str) and kind in _KEPT_DELTAS and index in self._kept:
            field = _KEPT_DELTAS[kind]
            if (piece := get_nonempty_text_field(delta, field)) and isinstance(self._kept[index].get(field), str):
                self._kept_pieces.setdefault(index, {}).setdefault(field, []).append(piece)

    def _usage(self, usage: object) -> Iterator[BlockEvent]:
        """Yield the usage so far.

        The start has the input tokens, including cached ones, and the end has the output tokens.
        """
        if usage is None:
            return
        input_tokens = sum(
            parse_positive_count_field(usage, field)
            for field in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        )
        self._input = max(self._input, input_tokens)
        self._cache_read = max(self._cache_read, parse_positive_count_field(usage, "cache_read_input_tokens"))
        self._cache_write = max(self._cache_write, parse_positive_count_field(usage, "cache_creation_input_tokens"))
        yield TokenUsage(
            self._input, parse_positive_count_field(usage, "output_tokens"), self._cache_read, self._cache_write
        )


def _system(text: str, forms: Collection[str]) -> Any:
    if "system text" in forms:
        return text
    mark = {} if "no cache marks" in forms else {"cache_control": {"type": "ephemeral"}}
    return [{"type": "text", "text": text, **mark}]


def _messages(messages: Iterable[Message], *, has_cache_marks: bool = True) -> list[MessageParam]:
    """Convert messages to alternating roles. Consecutive messages of one role are joined, results first."""
    joined: list[tuple[str, list[dict[str, Any]]]] = []
    for message in messages:
        role = "assistant" if isinstance(message, AssistantMessage) else "user"
        content = list(_content(message))
        if joined and joined[-1][0] == role:
            joined[-1][1].extend(content)
        elif content:
            joined.append((role, content))
    every, joined = joined, []
    for number, (role, content) in enumerate(every, 1):
        kept = drop_unpaired_server_tool_blocks(content, last=number == len(every))
        if joined and joined[-1][0] == role:  # the message between had nothing else
            joined[-1][1].extend(kept)
        elif kept:
            joined.append((role, kept))
    # The end of the request before is marked again: the provider looks back 20 blocks only, and one turn may add more.
    users = [content for role, content in joined if role == "user" and content]
    for content in users[-2:] if has_cache_marks and joined and joined[-1][0] == "user" else ():
        content[-1]["cache_control"] = {"type": "ephemeral"}
    return [cast("MessageParam", {"role": role, "content": content}) for role, content in joined]


def _content(message: Message) -> Iterator[dict[str, Any]]:
    match message:
        case UserMessage(pictures=pictures):
            yield from map(_image, pictures)
            yield {"type": "text", "text": message.text if message.text.strip() else "(empty)"}
        case AssistantMessage(parts):
            for part in parts:
                match part:
                    case TextPart():
                        yield {"type": "text", "text": part.text}
                    case HistoryCallPart(wire_id, name, arguments):
                        yield {"type": "tool_use", "id": wire_id, "name": name, "input": dict(arguments)}
                    case ProviderBlock(provider, block):
                        if provider == "anthropic":
                            yield dict(block)
        case CallResultsMessage(results):
            for result in results:
                content: Any = result.text
                if result.pictures and not result.is_error:
                    content = [{"type": "text", "text": result.text}, *map(_image, result.pictures)]
                yield {
                    "type": "tool_result",
                    "tool_use_id": result.wire_id,
                    "content": content,
                    "is_error": result.is_error,
                }
            for result in results:
                if result.is_error:  # the content of an error is text only
                    yield from map(_image, result.pictures)


def _image(picture: UserPicture) -> dict[str, Any]:
    source = {"type": "base64", "media_type": picture.media_type, "data": picture.base64}
    return {"type": "image", "source": source}


_PLAIN_ANTHROPIC = replace(ANTHROPIC, keywords=PLAIN_KEYWORDS)


def _tools(request: ModelRequest, forms: Collection[str]) -> list[ToolUnionParam]:
    dialect = _PLAIN_ANTHROPIC if PLAIN_SCHEMAS in forms else ANTHROPIC
    own = [adapt_tool(view, dialect)[0] for view in request.tools]
    return [cast("ToolUnionParam", tool) for tool in (*own, *request.native)]
