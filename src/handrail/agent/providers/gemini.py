"""Google's Gemini API.

https://ai.google.dev/api/generate-content#method:-models.streamgeneratecontent
A call arrives as one whole part, so its block is closed when it is opened. The signature of a part (the model's hidden
reasoning) is sent back in front of the same part.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import httpx2
from google import genai
from google.genai import errors, types

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
    ReplyFinished,
    ReplyStreamCut,
    TextDelta,
    TextPart,
    TokenUsage,
    UserMessage,
)
from handrail.agent.providers.event_stream_client import Event, EventStreamClient
from handrail.agent.providers.finish_reasons import classify_finish_reason, read_finish_reason
from handrail.agent.providers.provider_errors import (
    get_nonempty_text_field,
    get_sdk_field,
    make_connection_error,
    make_reported_error,
    make_stream_format_error,
    make_timeout_error,
    parse_positive_count_field,
)
from handrail.agent.providers.request_forms import AcceptedForms
from handrail.catalog.provider_dialects import GEMINI, ProviderSchemaDialect
from handrail.catalog.schema_adapter import adapt_tool

PROVIDER = "gemini"
_SIGNS_CALLS = re.compile(r"gemini-(?:[3-9]|\d\d)")
"""Models that reject a turn whose first call has no signature."""
_NO_SIGNATURE = b"skip_thought_signature_validator"
"""The signature that the API documents for calls of another model."""
_OTHER_FORMS: Mapping[str, re.Pattern[str]] = {
    "signed calls": re.compile(r"(?i)missing (?:a )?`?thought_?signature"),
    "no system": re.compile(r"(?i)(?:developer|system) instructions? (?:is|are) not (?:enabled|supported)"),
}
"""Other forms of a request, by the words of a refusal that demands them."""
_MOST_TOKENS = 1e12
_FROM_URL_LETTERS = str.maketrans("-_", "+/")
_UNPARSED = "$unparsed"
"""The key of arguments that are no object."""


def _repair_data(data: bytes) -> bytes:
    """Return the data of an event in a form that the SDK reads. It refuses the whole event for one unusual field."""
    try:
        chunk: object = json.loads(data)
        return json.dumps(_repair_chunk(cast("dict[str, Any]", chunk))).encode() if isinstance(chunk, dict) else data
    except (ValueError, RecursionError):
        return data


def _repair_chunk(fields: dict[str, Any]) -> dict[str, Any]:
    if (error := fields.get("error")) is not None and not isinstance(get_sdk_field(error, "code"), int):
        return {"error": {"code": 500, "message": error if isinstance(error, str) else json.dumps(error)}}
    for candidate in _objects(fields.get("candidates")):
        for content in _objects(candidate.get("content")):
            content["parts"] = _objects(content.get("parts"))
            for part in content["parts"]:
                _repair_part(part)
    for usage in _objects(fields.get("usageMetadata")):
        usage.update(
            {
                key: int(count) if abs(count) < _MOST_TOKENS else None
                for key, count in usage.items()
                if isinstance(count, float)
            }
        )
    return fields


def _repair_part(part: dict[str, Any]) -> None:
    for call in _objects(part.get("functionCall")):
        if (given := call.get("args")) is not None and not isinstance(given, dict):
            call["args"] = {_UNPARSED: given if isinstance(given, str) else json.dumps(given)}
    if "thoughtSignature" in part and (signature := _signature(part.pop("thoughtSignature"))) is not None:
        part["thoughtSignature"] = base64.b64encode(signature).decode()
    if "thought" in part:
        part["thought"] = bool(part["thought"])


def _objects(value: object) -> list[dict[str, Any]]:
    """Return the objects in a list. A value without a list counts as a list of it."""
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    return [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]


def _whole_body_events(body: dict[str, Any]) -> Iterator[Event]:
    yield None, _repair_chunk(body)


class GeminiModel:
    """A model behind the Gemini API.

    :param base_url: another server's address, ending before ``/v1``; None for the SDK's default
    """

    takes_pictures = True

    def __init__(self, model: str, *, api_key: str, base_url: str | None = None) -> None:
        self._model = model
        self._needs_signatures = _SIGNS_CALLS.search(model) is not None
        self._address = base_url or "the Gemini API"
        self._forms = AcceptedForms(_OTHER_FORMS)
        self._http = EventStreamClient(self.name, _whole_body_events, repair=_repair_data)
        options = types.HttpOptions(base_url=base_url, httpx_async_client=cast("Any", self._http))
        # Set explicitly, because environment variables could select another service.
        self._client = genai.Client(vertexai=False, api_key=api_key, http_options=options)

    @property
    def name(self) -> str:
        return f"{PROVIDER}:{self._model}"

    @property
    def origin(self) -> str:
        return f"{self.name} {self._address}"

    @property
    def dialect(self) -> ProviderSchemaDialect:
        return GEMINI

    async def aclose(self) -> None:
        await self._http.aclose()

    def stream(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        """Send one request and yield the reply; see :meth:`handrail.agent.model_protocol.Model.stream`."""
        return self._forms.stream(lambda: self._stream_once(request))

    async def _stream_once(self, request: ModelRequest) -> AsyncGenerator[BlockEvent, None]:
        reader = _PartReader()
        forms = self._forms.chosen
        messages = list(request.messages)
        if "no system" in forms and request.system:
            messages.insert(0, UserMessage(request.system))
            request = replace(request, system="")
        needs_signatures = self._needs_signatures or "signed calls" in forms
        try:
            models: Any = self._client.aio.models
            chunks: AsyncIterator[types.GenerateContentResponse] = await models.generate_content_stream(
                model=self._model, contents=_contents(messages, needs_signatures), config=_config(request)
            )
            async for chunk in chunks:
                for event in reader.read(chunk):
                    yield event
        except errors.APIError as error:
            raise self._make_error(error) from error
        except httpx2.TimeoutException as error:
            raise make_timeout_error(self.name, self._address) from error
        except httpx2.TransportError as error:
            raise make_connection_error(self.name, self._address, error) from error
        except ValueError as error:
            raise make_stream_format_error(self.name, error) from error
        if reader.unreadable is not None:
            raise ReplyStreamCut(
                f"{self.name}: The provider could not parse the model's call ({reader.unreadable}). Resume the run to ask again."
            )
        if not reader.finished:
            raise ReplyStreamCut(f"{self.name}: The stream ended without a finish reason. Resume the run to ask again.")

    def _make_error(self, error: errors.APIError) -> ProviderError:
        headers = dict(cast("Mapping[str, str]", getattr(get_sdk_field(error, "response"), "headers", None) or {}))
        body = get_sdk_field(error, "details") or error.message or error.status
        return make_reported_error(self.name, "GEMINI_API_KEY", body, error.code, headers)


class _PartReader:
    """A converter of chunks into block events."""

    def __init__(self) -> None:
        self.finished = False
        self.unreadable: str | None = None
        self._calls = 0

    def read(self, chunk: types.GenerateContentResponse) -> Iterator[BlockEvent]:
        if (usage := chunk.usage_metadata) is not None:
            given = parse_positive_count_field(usage, "candidates_token_count") + parse_positive_count_field(
                usage, "thoughts_token_count"
            )
            yield TokenUsage(
                parse_positive_count_field(usage, "prompt_token_count")
                + parse_positive_count_field(usage, "tool_use_prompt_token_count"),
                given,
                parse_positive_count_field(usage, "cached_content_token_count"),
            )
        if self.unreadable is not None:
            return
        if not chunk.candidates:
            if get_sdk_field(chunk.prompt_feedback, "block_reason") is not None:
                self.finished = True
                yield ReplyFinished("refused")
            return
        candidate = chunk.candidates[0]
        for part in (candidate.content and candidate.content.parts) or ():
            yield from self._part(part)
        reason = read_finish_reason(candidate.finish_reason and candidate.finish_reason.value)
        if reason is not None:  # some servers send one with each chunk
            ended = classify_finish_reason(reason)
            if ended == "gave up":
                self.unreadable = reason
                return
            self.finished = True
            yield ReplyFinished("calls" if ended == "end" and self._calls else ended)

    def _part(self, part: types.Part) -> Iterator[BlockEvent]:
        if part.thought:
            return
        if part.thought_signature:
            yield ProviderBlock(PROVIDER, {"signature": base64.b64encode(part.thought_signature).decode()})
        if text := get_nonempty_text_field(part, "text"):
            yield TextDelta(text)
        if (call := part.function_call) is not None:
            index, self._calls = self._calls, self._calls + 1
            yield CallBlockOpened(
                index, get_nonempty_text_field(call, "id"), get_nonempty_text_field(call, "name") or ""
            )
            given = call.args or {}
            unparsed: object = given.get(_UNPARSED) if len(given) == 1 else None
            yield CallArgumentsDelta(index, unparsed if isinstance(unparsed, str) else json.dumps(given))
            yield CallBlockClosed(index)


def _config(request: ModelRequest) -> types.GenerateContentConfig:
    declared = [types.FunctionDeclaration.model_validate(adapt_tool(view, GEMINI)[0]) for view in request.tools]
    return types.GenerateContentConfig(
        system_instruction=request.system or None,
        tools=[types.Tool(function_declarations=declared)] if declared else None,
        max_output_tokens=request.max_output_tokens,
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )


def _contents(messages: Iterable[Message], needs_signatures: bool = False) -> list[types.Content]:
    """Convert messages to alternating roles. Consecutive messages of one role are joined.

    :param needs_signatures: whether the model rejects calls without a signature, such as those of another model
    """
    joined: list[types.Content] = []
    names: dict[str, str] = {}
    for message in messages:
        role = "model" if isinstance(message, AssistantMessage) else "user"
        if isinstance(message, AssistantMessage):
            names = {call.wire_id: call.name for call in message.calls}
        parts = list(_parts(message, names))
        first = next((part for part in parts if part.function_call is not None), None)
        if needs_signatures and first is not None and not first.thought_signature:
            first.thought_signature = _NO_SIGNATURE
        if joined and joined[-1].role == role:
            joined[-1].parts = [*(joined[-1].parts or ()), *parts]
        elif parts:
            joined.append(types.Content(role=role, parts=parts))
    return joined


def _parts(message: Message, names: dict[str, str]) -> Iterator[types.Part]:
    match message:
        case UserMessage(pictures=pictures):
            for picture in pictures:
                yield types.Part(inline_data=types.Blob(data=picture.data, mime_type=picture.media_type))
            yield types.Part(text=message.text if message.text.strip() else "(empty)")
        case AssistantMessage(parts):
            signature: bytes | None = None
            for part in parts:
                match part:
                    case ProviderBlock(provider, block):
                        if provider == PROVIDER:
                            signature = _signature(block.get("signature")) or signature
                        continue
                    case TextPart():
                        yield types.Part(text=part.text, thought_signature=signature)
                    case HistoryCallPart(wire_id, name, arguments):
                        call = types.FunctionCall(id=wire_id, name=name, args=dict(arguments))
                        yield types.Part(function_call=call, thought_signature=signature)
                signature = None
            if signature is not None:
                yield types.Part(text="", thought_signature=signature)
        case CallResultsMessage(results):
            for result in results:
                given = types.FunctionResponse(
                    id=result.wire_id, name=names.get(result.wire_id, "unknown"), response=_response(result.text)
                )
                yield types.Part(function_response=given)
            for result in results:
                for picture in result.pictures:
                    yield types.Part(text=f"[Image of the result of call {result.wire_id}]")
                    yield types.Part(inline_data=types.Blob(data=picture.data, mime_type=picture.media_type))


def _signature(kept: object) -> bytes | None:
    """Return the bytes of a signature in either alphabet, with or without padding; None for anything else."""
    if not isinstance(kept, str):
        return None
    text = kept.translate(_FROM_URL_LETTERS).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _response(result: str) -> dict[str, Any]:
    """Return a result's text as the object that this API requires."""
    try:
        value = json.loads(result)
    except ValueError:
        value = None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {"output": result}
