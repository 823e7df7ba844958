"""Loopback servers with the providers' streaming protocols: scripted replies, recorded requests.

They are as strict as the real ones: a wrong key is answered with 401, an invalid history with 400 and every fault. Each
request gets the next reply. A rejected request uses no reply.
::

    async with OpenAIServer(Reply(Call("read", {"path": "a.txt"})), Reply("done")) as server:
        model = OpenAIModel("any", api_key=server.key, base_url=server.base_url)
        ...
        assert server.requests[1].body["messages"][-1]["role"] == "tool"
"""

from __future__ import annotations

import abc
import asyncio
import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from handrail.testing.provider_request_checks import (
    ReplyPause,
    ScriptedSearchCitations,
    ServerToolUse,
    check_call_id,
    collect_arguments_json_faults,
    collect_tool_name_faults,
    find_anthropic_faults,
    find_chat_completions_faults,
    find_tool_entry_faults,
    stream_content_blocks,
)

_MAX_REQUEST_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A call in a reply.

    :param arguments: an object, or the text to send instead
    :param id: the provider's ID; None generates one, ``""`` sends none
    :param pieces: number of deltas for the arguments
    :param cut_after: number of characters of the arguments after which the connection breaks
    :param is_closed: False leaves out the end of the block (Anthropic)
    :param index: the index of the block; None counts
    """

    name: str | None
    arguments: Mapping[str, Any] | str = field(default_factory=dict[str, Any])
    id: str | None = None
    pieces: int = 2
    cut_after: int | None = None
    is_closed: bool = True
    index: int | None = None

    def split_arguments(self) -> list[str]:
        """Return the text of the arguments, in pieces."""
        text = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)
        if self.cut_after is not None:
            text = text[: self.cut_after]
        size = max(1, -(-len(text) // self.pieces))
        return [text[at : at + size] for at in range(0, len(text), size)]


class ConnectionCut:
    """A point in a reply where the connection breaks."""


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error event of the provider in the middle of its stream."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    """A block of reasoning with its signature. :class:`OpenAIServer` leaves it out."""

    text: str
    signature: str


Part = (
    str
    | ReplyCall
    | ThinkingBlock
    | ServerToolUse
    | ScriptedSearchCitations
    | ConnectionCut
    | ReplyPause
    | StreamError
    | bytes
)
"""Text, a call, reasoning, a provider tool use, a break, a pause, an error event, or raw bytes as one event's data."""


class ScriptedReply:
    """One streamed reply.

    :param parts: the parts of the reply, in order
    :param finish: the provider's finish reason; None for the usual one
    :param usage: input and output tokens
    """

    def __init__(
        self, *parts: Part, finish: str | None = None, usage: tuple[int, int] = (10, 5), ended: bool = True
    ) -> None:
        self.parts = parts
        self.finish = finish
        self.usage = usage
        self.ended = ended
        """False closes the stream without the provider's end event."""

    @property
    def has_calls(self) -> bool:
        """Whether the reply calls a tool."""
        return any(isinstance(part, ReplyCall) for part in self.parts)


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An HTTP error instead of a reply.

    :param details: further details in the body (Gemini)
    """

    status: int
    message: str = "refused by the test"
    code: str = "error"
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    details: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class RawReply:
    """An HTTP answer exactly as given, such as a page of a proxy or an unusual event stream.

    :param body: the bytes of the body
    :param content_type: the header ``content-type``; ``""`` leaves it out
    """

    body: bytes
    content_type: str = "text/event-stream"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class RecordedProviderRequest:
    """One received request."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    faults: tuple[str, ...] = ()
    """The faults for which it was answered with 400."""


@dataclass(frozen=True, slots=True)
class ServerSentChunk:
    """One server-sent event."""

    data: bytes
    event: str | None = None

    def encode_event(self) -> bytes:
        head = f"event: {self.event}\n".encode() if self.event else b""
        return head + b"data: " + self.data + b"\n\n"


class _ConnectionCutError(Exception):
    """An internal signal to break the connection."""


class ProviderServer(abc.ABC):
    """The base of all servers: a small HTTP/1.1 server on a free loopback port, for ``async with``."""

    key = "test-key"
    """The key that requests must carry."""

    def __init__(self, *replies: ScriptedReply | ErrorReply | RawReply) -> None:
        self._replies = list(replies)
        self._played = 0
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.requests: list[RecordedProviderRequest] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._on_connected, "127.0.0.1", 0, limit=_MAX_REQUEST_BYTES)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        """The URL ``http://127.0.0.1:PORT``."""
        assert self._server is not None, "The server is not running. Use it with 'async with'."
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def remaining_replies(self) -> int:
        """The number of remaining replies."""
        return len(self._replies) - self._played

    async def _on_connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._connections.add(task)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, _ConnectionCutError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ", 2)
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        if method != "POST" or not self.handles_path(path.partition("?")[0]):
            await self._refuse(writer, ErrorReply(404, f"unknown endpoint: {method} {path}", "not_found_error"))
            return
        if not self._is_authorized(headers):
            await self._refuse(writer, ErrorReply(401, "the key is wrong", "authentication_error"))
            return
        body = cast("dict[str, Any]", json.loads(raw))
        faults = self._faults(body)
        self.requests.append(RecordedProviderRequest(path, headers, body, tuple(faults)))
        if faults:
            await self._refuse(writer, ErrorReply(400, "; ".join(faults), "invalid_request_error"))
            return
        if not self.remaining_replies:
            await self._refuse(writer, ErrorReply(400, "the test has no further reply", "invalid_request_error"))
            return
        reply = self._replies[self._played]
        self._played += 1
        if isinstance(reply, RawReply):
            await self._send_raw(writer, reply)
        elif isinstance(reply, ErrorReply):
            await self._refuse(writer, reply)
        else:
            await self._stream(writer, reply, str(body.get("model", "")))

    async def _refuse(self, writer: asyncio.StreamWriter, refusal: ErrorReply) -> None:
        error_body = self._error(refusal.code, refusal.message)
        if refusal.details:
            error_body["error"]["details"] = list(refusal.details)
        await self._send_raw(
            writer, RawReply(json.dumps(error_body).encode(), "application/json", refusal.status, refusal.headers)
        )

    async def _send_raw(self, writer: asyncio.StreamWriter, reply: RawReply) -> None:
        lines = [
            f"HTTP/1.1 {reply.status} Answer",
            *([f"content-type: {reply.content_type}"] if reply.content_type else []),
            f"content-length: {len(reply.body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in reply.headers.items()),
        ]
        writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + reply.body)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, reply: ScriptedReply, model: str) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        )
        for step in self._steps(reply, model):
            if isinstance(step, ReplyPause):
                await step.wait()
            elif isinstance(step, ConnectionCut):
                await writer.drain()
                raise _ConnectionCutError
            else:
                data = step.encode_event()
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @property
    @abc.abstractmethod
    def base_url(self) -> str:
        """The base URL for the provider's SDK."""

    @abc.abstractmethod
    def handles_path(self, path: str) -> bool:
        """Return whether the provider's API has this path."""

    @abc.abstractmethod
    def _is_authorized(self, headers: Mapping[str, str]) -> bool: ...

    @abc.abstractmethod
    def _faults(self, body: Mapping[str, Any]) -> list[str]: ...

    @abc.abstractmethod
    def _error(self, code: str, message: str) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _steps(self, reply: ScriptedReply, model: str) -> Iterator[ServerSentChunk | ReplyPause | ConnectionCut]: ...


class OpenAIServer(ProviderServer):
    """A server for OpenAI's ``POST /v1/chat/completions`` with ``stream: true``."""

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def handles_path(self, path: str) -> bool:
        return path == "/v1/chat/completions"

    def _is_authorized(self, headers: Mapping[str, str]) -> bool:
        return headers.get("authorization") == f"Bearer {self.key}"

    def _faults(self, body: Mapping[str, Any]) -> list[str]:
        found = find_chat_completions_faults(body)
        return found if body.get("stream") is True else [*found, "this server streams only; send stream: true"]

    def _error(self, code: str, message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": code, "param": None, "code": code}}

    def _steps(self, reply: ScriptedReply, model: str) -> Iterator[ServerSentChunk | ReplyPause | ConnectionCut]:
        def chunk(delta: Mapping[str, Any], finish: str | None = None) -> ServerSentChunk:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            return whole([choice], None)

        def whole(choices: Sequence[Mapping[str, Any]], usage: Mapping[str, int] | None) -> ServerSentChunk:
            body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
            return ServerSentChunk(json.dumps({**body, "choices": choices, "usage": usage}).encode())

        yield chunk({"role": "assistant", "content": ""})
        number = 0
        for part in reply.parts:
            match part:
                case str():
                    yield from (chunk({"content": piece}) for piece in split_into_two_pieces(part))
                case ReplyCall():
                    yield from self._call_steps(part, number, chunk)
                    number += 1
                case ThinkingBlock() | ServerToolUse():
                    pass
                case ScriptedSearchCitations():
                    yield chunk({"annotations": part.annotations()})
                case StreamError(code, message):
                    yield ServerSentChunk(json.dumps(self._error(code, message)).encode())
                case bytes():
                    yield ServerSentChunk(part)
                case _:
                    yield part
        if reply.ended:
            yield chunk({}, reply.finish or ("tool_calls" if reply.has_calls else "stop"))
            tokens = {"prompt_tokens": reply.usage[0], "completion_tokens": reply.usage[1]}
            yield whole([], {**tokens, "total_tokens": sum(reply.usage)})
        yield ServerSentChunk(b"[DONE]")

    def _call_steps(
        self, call: ReplyCall, number: int, chunk: Callable[[Mapping[str, Any]], ServerSentChunk]
    ) -> Iterator[ServerSentChunk | ConnectionCut]:
        index = number if call.index is None else call.index
        call_id = f"call_{self._played}_{number}" if call.id is None else call.id
        opening: dict[str, Any] = {"index": index, "type": "function"}
        opening["function"] = {"arguments": ""} if call.name is None else {"name": call.name, "arguments": ""}
        if call_id:
            opening["id"] = call_id
        yield chunk({"tool_calls": [opening]})
        for text in call.split_arguments():
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        if call.cut_after is not None:
            yield ConnectionCut()


class AnthropicServer(ProviderServer):
    """A server for Anthropic's ``POST /v1/messages`` with ``stream: true``."""

    @property
    def base_url(self) -> str:
        return self.address

    def handles_path(self, path: str) -> bool:
        return path == "/v1/messages"

    def _is_authorized(self, headers: Mapping[str, str]) -> bool:
        sent = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        return sent == self.key and bool(headers.get("anthropic-version"))

    def _faults(self, body: Mapping[str, Any]) -> list[str]:
        found = find_anthropic_faults(body)
        return found if body.get("stream") is True else [*found, "this server streams only; send stream: true"]

    def _error(self, code: str, message: str) -> dict[str, Any]:
        return {"type": "error", "error": {"type": code, "message": message}}

    def _steps(self, reply: ScriptedReply, model: str) -> Iterator[ServerSentChunk | ReplyPause | ConnectionCut]:
        message: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "content": []}
        usage = {"input_tokens": reply.usage[0], "output_tokens": 1}
        yield _event("message_start", message={**message, "stop_reason": None, "stop_sequence": None, "usage": usage})
        yield _event("ping")
        number = 0
        for part in reply.parts:
            match part:
                case str():
                    deltas = [{"type": "text_delta", "text": piece} for piece in split_into_two_pieces(part)]
                    yield from _whole_block(number, {"type": "text", "text": ""}, deltas)
                    number += 1
                case ReplyCall():
                    yield from self._call_steps(part, number)
                    number += 1
                case ThinkingBlock(text, signature):
                    deltas = [{"type": "thinking_delta", "thinking": piece} for piece in split_into_two_pieces(text)]
                    deltas.append({"type": "signature_delta", "signature": signature})
                    yield from _whole_block(number, {"type": "thinking", "thinking": "", "signature": ""}, deltas)
                    number += 1
                case ServerToolUse():
                    for block, asked in stream_content_blocks(part):
                        yield from _whole_block(number, block, () if asked is None else _deltas_of(asked))
                        number += 1
                case ScriptedSearchCitations():
                    pass
                case StreamError(code, text):
                    yield _event("error", error={"type": code, "message": text})
                case bytes():
                    yield ServerSentChunk(part, "content_block_delta")
                case _:
                    yield part
        if reply.ended:
            yield from self._last_steps(reply)

    def _call_steps(self, call: ReplyCall, number: int) -> Iterator[ServerSentChunk | ConnectionCut]:
        index = number if call.index is None else call.index
        call_id = f"toolu_{self._played}_{number}" if call.id is None else call.id
        block: dict[str, Any] = {"type": "tool_use", "input": {}}
        block |= {"name": call.name} if call.name is not None else {}
        block |= {"id": call_id} if call_id else {}
        yield _event("content_block_start", index=index, content_block=block)
        for text in call.split_arguments():
            yield _event("content_block_delta", index=index, delta={"type": "input_json_delta", "partial_json": text})
        if call.cut_after is not None:
            yield ConnectionCut()
        if call.is_closed:
            yield _event("content_block_stop", index=index)

    def _last_steps(self, reply: ScriptedReply) -> Iterator[ServerSentChunk]:
        reason = reply.finish or ("tool_use" if reply.has_calls else "end_turn")
        delta = {"stop_reason": reason, "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage={"output_tokens": reply.usage[1]})
        yield _event("message_stop")


def _event(kind: str, **more: object) -> ServerSentChunk:
    return ServerSentChunk(json.dumps({"type": kind, **more}).encode(), kind)


def _whole_block(
    index: int, block: Mapping[str, Any], deltas: Iterable[Mapping[str, Any]]
) -> Iterator[ServerSentChunk]:
    yield _event("content_block_start", index=index, content_block=block)
    for delta in deltas:
        yield _event("content_block_delta", index=index, delta=delta)
    yield _event("content_block_stop", index=index)


def _deltas_of(arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for piece in split_into_two_pieces(json.dumps(arguments)):
        yield {"type": "input_json_delta", "partial_json": piece}


def split_into_two_pieces(text: str) -> list[str]:
    """Return a text in two pieces, without empty ones."""
    middle = len(text) // 2
    return [piece for piece in (text[:middle], text[middle:]) if piece]


# A loopback server for OpenAI's responses API, as strict as the real one.

_NATIVE = frozenset({"web_search", "code_interpreter", "image_generation"})


class ResponsesServer(ProviderServer):
    """A server for OpenAI's ``POST /v1/responses`` with ``stream: true``.

    ``ThinkingBlock`` is sent as an encrypted reasoning item. ``ServerToolUse`` is sent as an item of its tool, with the fields of its
    ``content``.
    """

    @property
    def base_url(self) -> str:
        return f"{self.address}/v1"

    def handles_path(self, path: str) -> bool:
        return path == "/v1/responses"

    def _is_authorized(self, headers: Mapping[str, str]) -> bool:
        return headers.get("authorization") == f"Bearer {self.key}"

    def _faults(self, body: Mapping[str, Any]) -> list[str]:
        found = find_responses_faults(body)
        return found if body.get("stream") is True else [*found, "this server streams only; send stream: true"]

    def _error(self, code: str, message: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": code, "param": None, "code": code}}

    def _steps(self, reply: ScriptedReply, model: str) -> Iterator[ServerSentChunk | ReplyPause | ConnectionCut]:
        sent = 0

        def event(kind: str, **more: object) -> ServerSentChunk:
            nonlocal sent
            sent += 1
            return ServerSentChunk(json.dumps({"type": kind, "sequence_number": sent, **more}).encode(), kind)

        response: dict[str, Any] = {"id": "resp_1", "object": "response", "model": model, "output": []}
        yield event("response.created", response={**response, "status": "in_progress"})
        for number, part in enumerate(reply.parts):
            item: dict[str, Any]
            match part:
                case str():
                    item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": []}
                    yield event("response.output_item.added", output_index=number, item=item)
                    for piece in split_into_two_pieces(part):
                        yield event("response.output_text.delta", output_index=number, item_id=item["id"], delta=piece)
                    yield event("response.output_item.done", output_index=number, item=item)
                case ReplyCall():
                    limited = reply.finish is not None and number == len(reply.parts) - 1
                    yield from self._call_steps(part, number, event, limited=limited)
                case ThinkingBlock(text, signature):
                    item = {
                        "type": "reasoning",
                        "id": f"rs_{number}",
                        "summary": [{"type": "summary_text", "text": text}],
                    }
                    item["encrypted_content"] = signature
                    yield event("response.output_item.done", output_index=number, item=item)
                case ServerToolUse():
                    item = {"type": f"{part.name}_call", "id": f"ws_{number}", **cast("dict[str, Any]", part.content)}
                    yield event("response.output_item.done", output_index=number, item=item)
                case ScriptedSearchCitations():
                    pass
                case StreamError(code, text):
                    yield event("error", code=code, message=text, param=None)
                case bytes():
                    yield ServerSentChunk(part)
                case _:
                    yield part
        if reply.ended:
            usage = {"input_tokens": reply.usage[0], "output_tokens": reply.usage[1], "total_tokens": sum(reply.usage)}
            if reply.finish is None:
                yield event("response.completed", response={**response, "status": "completed", "usage": usage})
            else:
                ended = {**response, "status": "incomplete", "incomplete_details": {"reason": reply.finish}}
                yield event("response.incomplete", response={**ended, "usage": usage})

    def _call_steps(
        self, call: ReplyCall, number: int, event: Callable[..., ServerSentChunk], *, limited: bool
    ) -> Iterator[ServerSentChunk | ConnectionCut]:
        item: dict[str, Any] = {"type": "function_call", "id": f"fc_{number}", "arguments": "", "status": "in_progress"}
        call_id = f"call_{self._played}_{number}" if call.id is None else call.id
        item |= {"name": call.name} if call.name is not None else {}
        item |= {"call_id": call_id} if call_id else {}
        yield event("response.output_item.added", output_index=number, item=item)
        for text in call.split_arguments():
            yield event("response.function_call_arguments.delta", output_index=number, delta=text)
        if call.cut_after is not None:
            yield ConnectionCut()
        if call.is_closed:
            whole = {
                **item,
                "arguments": "".join(call.split_arguments()),
                "status": "incomplete" if limited else "completed",
            }
            yield event("response.output_item.done", output_index=number, item=whole)


def find_responses_faults(body: Mapping[str, Any]) -> list[str]:
    """Return every fault of a responses request; none for a valid one."""
    found = _faults_in_response_tools([cast("dict[str, Any]", tool) for tool in body.get("tools") or ()])
    if body.get("store") is not False:
        found.append("store: expected false")
    items = [cast("dict[str, Any]", item) for item in body.get("input") or ()]
    if not items:
        found.append("input: at least one item is required")
    seen: set[str] = set()
    waiting: list[str] = []
    for number, item in enumerate(items):
        found += _find_item_faults(item, f"input[{number}]", seen, waiting)
    found += [f"no tool output found for function call {call_id}" for call_id in waiting]
    return found


def _find_item_faults(item: Mapping[str, Any], where: str, seen: set[str], waiting: list[str]) -> list[str]:
    """Return the faults of an item.

    The ID of a call is added to ``waiting``, and the ID of an output is removed from it.
    """
    found: list[str] = []
    match item.get("type", "message"):
        case "message":
            if item.get("role") not in ("user", "assistant") or not _is_content(item):
                found.append(f"{where}: not a message: {item}")
        case "function_call":
            waiting.append(check_call_id(item.get("call_id"), where, seen, found))
            collect_tool_name_faults(item.get("name"), where, found)
            collect_arguments_json_faults(item.get("arguments"), where, found)
        case "function_call_output":
            if item.get("call_id") in waiting:
                waiting.remove(item["call_id"])
            else:
                found.append(f"{where}: no tool call found for function call output {item.get('call_id')!r}")
            if not isinstance(item.get("output"), str) and not _is_content(
                {"role": "user", "content": item.get("output")}
            ):
                found.append(f"{where}: output is neither text nor a list of texts and images")
        case "reasoning":
            if not item.get("encrypted_content"):
                found.append(f"{where}: item {item.get('id')!r} not found: nothing is stored")
        case "web_search_call":
            pass
        case kind:
            found.append(f"{where}: type {kind!r}")
    return found


def _faults_in_response_tools(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    own = [tool for tool in tools if tool.get("type") == "function"]
    found = find_tool_entry_faults(
        [({k: v for k, v in tool.items() if k not in ("type", "strict")}, "parameters") for tool in own]
    )
    found += [f"tools: type {tool.get('type')!r}" for tool in tools if tool.get("type") not in (*_NATIVE, "function")]
    if any(tool.get("strict") is not False for tool in own):
        found.append("tools: strict would make every property required")
    return found


def _is_content(item: Mapping[str, Any]) -> bool:
    """Return whether the content is text, or a user's list of texts and images."""
    content = item.get("content")
    if isinstance(content, str):
        return True
    parts = cast("list[dict[str, Any]]", content) if isinstance(content, list) else []
    members = {"input_text": "text", "input_image": "image_url"}
    known = (isinstance(part.get(members.get(str(part.get("type")), "")), str) for part in parts)
    return item.get("role") == "user" and bool(parts) and all(known)


# A loopback server for the Gemini API, as strict as the real one.


class GeminiServer(ProviderServer):
    """A server for Gemini's ``POST /v1/models/NAME:streamGenerateContent?alt=sse``.

    ``ThinkingBlock`` is sent as a hidden thought, with its signature at the next part. A call is one part.
    """

    @property
    def base_url(self) -> str:
        return self.address

    def handles_path(self, path: str) -> bool:
        return path.startswith(("/v1/models/", "/v1beta/models/")) and path.endswith(":streamGenerateContent")

    def _is_authorized(self, headers: Mapping[str, str]) -> bool:
        return headers.get("x-goog-api-key") == self.key

    def _faults(self, body: Mapping[str, Any]) -> list[str]:
        return find_gemini_faults(body)

    def _error(self, code: str, message: str) -> dict[str, Any]:
        return {"error": {"code": 400, "message": message, "status": code.upper()}}

    def _steps(self, reply: ScriptedReply, model: str) -> Iterator[ServerSentChunk | ReplyPause | ConnectionCut]:
        def chunk(*parts: Mapping[str, Any], finish: str | None = None, **more: object) -> ServerSentChunk:
            candidate: dict[str, Any] = {"content": {"role": "model", "parts": list(parts)}, "index": 0}
            candidate |= {"finishReason": finish} if finish else {}
            return ServerSentChunk(json.dumps({"candidates": [candidate], "modelVersion": model, **more}).encode())

        signed: dict[str, str] = {}
        for number, part in enumerate(reply.parts):
            match part:
                case str():
                    for piece in split_into_two_pieces(part):
                        yield chunk({"text": piece, **signed})
                        signed = {}
                case ReplyCall():
                    if part.cut_after is not None:
                        yield ConnectionCut()
                    yield chunk({"functionCall": self._function_call(part, number), **signed})
                    signed = {}
                case ThinkingBlock(text, signature):
                    yield chunk({"text": text, "thought": True})
                    signed = {"thoughtSignature": base64.b64encode(signature.encode()).decode()}
                case ServerToolUse() | ScriptedSearchCitations():
                    pass
                case StreamError(code, text):
                    yield ServerSentChunk(
                        json.dumps({"error": {"code": 500, "status": code.upper(), "message": text}}).encode()
                    )
                case bytes():
                    yield ServerSentChunk(part)
                case _:
                    yield part
        if reply.ended:
            usage = {"promptTokenCount": reply.usage[0], "candidatesTokenCount": reply.usage[1]}
            yield chunk(finish=reply.finish or "STOP", usageMetadata=usage)

    def _function_call(self, part: ReplyCall, number: int) -> dict[str, Any]:
        call: dict[str, Any] = {"args": json.loads("".join(part.split_arguments()) or "{}")}
        call_id = f"fc-{self._played}-{number}" if part.id is None else part.id
        call |= {"name": part.name} if part.name is not None else {}
        call |= {"id": call_id} if call_id else {}
        return call


def find_gemini_faults(body: Mapping[str, Any]) -> list[str]:
    """Return every fault of a Gemini request; none for a valid one."""
    found = _faults_in_declarations(body)
    contents = [cast("dict[str, Any]", content) for content in body.get("contents") or ()]
    if not contents:
        found.append("contents is not specified")
    expected, waiting = "user", list[tuple[str, str]]()
    for number, content in enumerate(contents):
        where, role = f"contents[{number}]", content.get("role")
        if role != expected:
            found.append(f"{where}: please ensure that roles alternate; expected {expected!r}, found {role!r}")
        expected = "model" if role == "user" else "user"
        waiting = _check_parts(content, where, waiting, found)
    found += [f"function call {call_id} has no response" for call_id, _ in waiting]
    return found


def _faults_in_declarations(body: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    declared = [one for tool in body.get("tools") or () for one in tool.get("functionDeclarations") or ()]
    names = [cast("dict[str, Any]", one).get("name") for one in declared]
    for name in names:
        collect_tool_name_faults(name, "tools", found)
    found += [f"tools: duplicate function declaration {name}" for name in set(names) if names.count(name) > 1]
    return found


def _check_parts(
    content: Mapping[str, Any], where: str, waiting: Sequence[tuple[str, str]], found: list[str]
) -> list[tuple[str, str]]:
    """Check the parts of one turn, whose responses answer the waiting calls.

    :return: the calls of the turn, each with ID and name
    """
    parts = [cast("dict[str, Any]", part) for part in content.get("parts") or ()]
    if not parts:
        found.append(f"{where}: parts is empty")
    answers = [part["functionResponse"] for part in parts if "functionResponse" in part]
    if sorted((str(one.get("id")), str(one.get("name"))) for one in answers) != sorted(waiting):
        found.append(f"{where}: function response parts must equal function call parts of the turn before")
    found += [
        f"{where}: a function response is not an object" for one in answers if not isinstance(one.get("response"), dict)
    ]
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    for call in calls:
        collect_tool_name_faults(call.get("name"), where, found)
    return [(str(call.get("id")), str(call.get("name"))) for call in calls]
