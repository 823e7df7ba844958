"""The stdio transport of the MCP server on the event loop, and early answers while the SDK loads.

The SDK's own transport reads stdin in a thread that cannot be interrupted, so a signal would not end the server before its
client disconnects. It also accepts lines of any length. Parsing and framing remain the SDK's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson

from handrail.catalog.view import DISCOVERY_TOOLS
from handrail.contract.calls_and_results import ProposedCall
from handrail.contract.errors import HandrailError
from handrail.contract.session_protocols import ClientInfo
from handrail.contract.text.strict_json import (
    MAX_ARGUMENT_BYTES,
    MAX_ARGUMENT_VALUES,
    InvalidJsonTextError,
    check_nesting_depth,
    compute_value_count_bound,
)
from handrail.contract.tool_generation import BUILT_IN, ToolEntry
from handrail.frontends.mcp.client_messages import (
    BATCH_VERSION,
    INVALID_PARAMS,
    KEPT_END_BYTES,
    PARSE_ERROR,
    BatchResponseCollector,
    EarlyClient,
    make_json_rpc_error,
    parse_client_messages,
    parse_requested_protocol_version,
    recover_message_id,
    to_json_line,
)
from handrail.frontends.mcp.client_resources import SKILL_TOOL
from handrail.frontends.mcp.mcp_responses import has_stored_output, to_mcp_result_with_outputs
from handrail.frontends.mcp.startup_answers import (
    EarlyAnswers,
    HandshakeResponder,
    StoredContent,
    is_plain_meta,
    is_request_id,
    parse_message,
)
from handrail.frontends.mcp.tool_listing import KernelStartupContent, McpFrontendSettings

if TYPE_CHECKING:
    from handrail.kernel.kernel_interface import Kernel


MAX_MESSAGE_BYTES = 2 * MAX_ARGUMENT_BYTES
"""Maximum bytes of a message. A longer one is discarded while it arrives, and a request is answered with an error."""
MAX_MESSAGE_DEPTH = 150
"""Maximum nesting depth of a message. The SDK does not parse deeper ones, and would leave a request without an answer."""
MAX_MESSAGE_VALUES = 2 * MAX_ARGUMENT_VALUES
"""Maximum number of JSON values in a message. The SDK processes all of them several times, and blocks the event loop."""
_HEADER = re.compile(rb"(?i)\s*content-(?:length|type)\s*:")
_CONTENT_LENGTH = re.compile(rb"(?i)\s*content-length\s*:\s*(\d{1,15})\s*\Z")


@asynccontextmanager
async def take_over_stdio_streams(
    early: EarlyAnswers | None = None,
) -> AsyncGenerator[tuple[LimitedMessageReader, PipeWriter] | None]:
    """Yield the client's lines on stdin, and the output to it on stdout.

    Yield None if the event loop cannot watch stdin and stdout. Until the block ends, stdin is empty for other code, and stdout goes to stderr.

    :param early: what was read and written before
    """
    if sys.platform == "win32" or not (_is_watchable(0) and _is_watchable(1)):
        yield None
        return
    loop = asyncio.get_running_loop()
    sys.stdout.flush()
    wire_in, wire_out = os.dup(0), os.dup(1)
    blocking_in, blocking_out = os.get_blocking(wire_in), os.get_blocking(wire_out)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    transports: list[asyncio.BaseTransport] = []
    try:
        reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
        if early is not None and early.consumed:
            reader.feed_data(bytes(early.consumed))
        protocol = asyncio.StreamReaderProtocol(reader)
        incoming, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(os.dup(wire_in), "rb", buffering=0))
        transports.append(incoming)
        flow = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        outgoing, _ = await loop.connect_write_pipe(lambda: flow, os.fdopen(os.dup(wire_out), "wb", buffering=0))
        transports.append(outgoing)
        writer = asyncio.StreamWriter(outgoing, flow, None, loop)
        if early is not None:
            writer.write(early.unwritten)
        batches = BatchResponseCollector()
        output = PipeWriter(writer, batches=batches)
        ended, framed = output.limit_flush_time, output.enable_content_length_headers
        yield LimitedMessageReader(reader, output.write_line, ended, batches, framed), output
    finally:
        for transport in transports:
            transport.close()
        # A shell that continues after this process may share the open file descriptions.
        os.set_blocking(wire_in, blocking_in)
        os.set_blocking(wire_out, blocking_out)
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        os.close(wire_in)
        os.close(wire_out)


def _is_watchable(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


def check_message_complexity(text: str) -> None:
    """Check the nesting depth and the number of values of a message, before it is parsed.

    :raises InvalidJsonTextError: for a message over :data:`MAX_MESSAGE_DEPTH` or :data:`MAX_MESSAGE_VALUES`. Its text continues
        the subject "The parameters".
    """
    if compute_value_count_bound(text, MAX_MESSAGE_VALUES) > MAX_MESSAGE_VALUES:
        raise InvalidJsonTextError(
            f"contain more than {MAX_MESSAGE_VALUES:,} values. Send less in one message, or a path to a file."
        )
    check_nesting_depth(text, MAX_MESSAGE_DEPTH)


class LimitedMessageReader:
    """An iterator over the messages in the lines of a stream, within limits of length, depth and number of values.

    A message that cannot be served is answered here, and not passed on. A message after a ``Content-Length`` header, as
    language servers have it, is read too, and the answers get the same header from then on.

    :param reply: called with the answer to a request that is not passed on
    :param ended: called at the end of the stream
    :param batches: the batches whose answers are sent together; None if the protocol has none
    :param framed: called when a message has a header
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        reply: Callable[[bytes], None],
        ended: Callable[[], None] = lambda: None,
        batches: BatchResponseCollector | None = None,
        framed: Callable[[], None] = lambda: None,
    ) -> None:
        self._reader = reader
        self._reply = reply
        self._ended = ended
        self._framed = framed
        self._batches = batches
        self._serves_batches = False
        self._skipped: _SkippedMessage | None = None
        self._read: deque[str] = deque()
        """Messages that are read and not passed on yet."""

    def __aiter__(self) -> LimitedMessageReader:
        return self

    async def __anext__(self) -> str:
        while not self._read:
            try:
                line = await self._reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as ended:
                line = ended.partial
                if not line or self._skipped is not None:
                    self._ended()
                    raise StopAsyncIteration from None
            except asyncio.LimitOverrunError as over:
                piece = await self._reader.readexactly(over.consumed)
                self._skipped = self._skipped or _SkippedMessage(piece[:KEPT_END_BYTES])
                self._skipped.add(piece)
                continue
            if self._skipped is not None:
                skipped, self._skipped = self._skipped, None
                skipped.add(line)
                self._refuse_long(skipped, skipped.size)
            elif _HEADER.match(line) is not None:
                await self._read_framed(line)
            else:
                self._read_line(line)
        return self._read.popleft()

    async def _read_framed(self, line: bytes) -> None:
        """Read the rest of the headers and the message after them, or what there is of it."""
        self._framed()
        size = -1
        try:
            while line.strip():
                if (length := _CONTENT_LENGTH.match(line)) is not None:
                    size = int(length[1])
                line = await self._reader.readline()
            if size <= MAX_MESSAGE_BYTES:
                return self._read_line(await self._reader.readexactly(size))
            skipped = _SkippedMessage(await self._reader.readexactly(KEPT_END_BYTES))
            while (left := size - KEPT_END_BYTES - skipped.size) > 0:
                skipped.add(await self._reader.readexactly(min(left, MAX_MESSAGE_BYTES)))
        except asyncio.IncompleteReadError as ended:
            return self._read_line(ended.partial)
        except ValueError:
            text = "Invalid headers of a message. Send each message as one line of JSON without headers."
            return self._reply(to_json_line(make_json_rpc_error(None, PARSE_ERROR, text)))
        return self._refuse_long(skipped, size)

    def _read_line(self, line: bytes) -> None:
        try:
            check_message_complexity(line.decode(errors="replace"))
        except InvalidJsonTextError as error:
            return self._refuse(line, line, f"The parameters {error}")
        messages = parse_client_messages(line, serves_batches=self._serves_batches)
        if messages.is_batch and self._batches is not None:
            if answers := self._batches.add(messages):
                self._reply(to_json_line(answers))
        else:
            for error in messages.errors:
                self._reply(to_json_line(error))
        for text in messages.texts:
            if '"initialize"' in text:
                self._serves_batches = (
                    self._batches is not None and parse_requested_protocol_version(text) == BATCH_VERSION
                )
            self._read.append(f"{text}\n")
        return None

    def _refuse_long(self, skipped: _SkippedMessage, size: int) -> None:
        limit = f"The limit is {MAX_MESSAGE_BYTES:,}. Pass a path to a file instead."
        self._refuse(skipped.head, skipped.tail, f"The message is {size:,} bytes long. {limit}")

    def _refuse(self, head: bytes, tail: bytes, text: str) -> None:
        """Answer a request that was not read, if its ID can be found."""
        if (found := recover_message_id(head, tail)) is not None:
            self._reply(to_json_line(make_json_rpc_error(found, INVALID_PARAMS, text)))


class _SkippedMessage:
    """The ends and the length of a message that is discarded while it arrives."""

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.tail = b""
        self.size = 0

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self.tail = (self.tail + piece[-KEPT_END_BYTES:])[-KEPT_END_BYTES:]


class PipeWriter:
    """A writer of messages to a pipe, at the speed of its reader.

    A client that has closed its side gets the answers that are ready, and nothing else. Some clients fail at a message
    that they did not ask for, or that says only that they have disconnected.

    :param patience_s: seconds that a client which has closed its side may leave the pipe full
    :param batches: the batches whose answers are sent together
    """

    def __init__(
        self, writer: asyncio.StreamWriter, patience_s: float = 5.0, batches: BatchResponseCollector | None = None
    ) -> None:
        self._writer = writer
        self._patience_s = patience_s
        self._batches = batches or BatchResponseCollector()
        self._has_headers = False
        self._bound: float | None = None
        self._flushing: set[asyncio.Timeout] = set()

    def enable_content_length_headers(self) -> None:
        """Begin each message with a ``Content-Length`` header, as the client's messages do."""
        self._has_headers = True

    def write_line(self, line: bytes) -> None:
        """Write one message, which ends with a line break."""
        self._writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(line), line) if self._has_headers else line)

    async def write(self, text: str) -> None:
        if self._bound is not None and not _is_ready_answer(text):
            return
        line = text.encode(errors="backslashreplace")
        if self._batches.is_waiting and (message := parse_message(text)) is not None:
            answers = self._batches.take(message)
            line = line if answers is None else to_json_line(answers) if answers else b""
        if line:
            self.write_line(line)

    async def flush(self) -> None:
        """Wait until the reader has taken the text.

        :raises OSError: if the client no longer reads
        """
        try:
            async with asyncio.timeout(self._bound) as bound:
                self._flushing.add(bound)
                try:
                    await self._writer.drain()
                finally:
                    self._flushing.discard(bound)
        except TimeoutError:
            raise BrokenPipeError("The client has disconnected and no longer reads.") from None

    def limit_flush_time(self) -> None:
        """Limit the time of writes from now on, because the client closed its side and may no longer read."""
        self._bound = self._patience_s
        for bound in self._flushing:
            bound.reschedule(asyncio.get_running_loop().time() + self._patience_s)


# Early answers to a client on stdin and stdout, before the SDK is loaded.
#
# The import of the SDK takes longer than opening a kernel. Meanwhile this code answers the first messages of nearly every
# client, its handshake and its request for the tools, if they have the simplest form. Answers that the client has had from the
# cache of the last start are not sent again. Then the server receives the same messages, and its answers to them are dropped.
# So the server knows the client as if it had answered itself. If the server would have listed other tools, the client gets a
# notification that the list has changed.

MAX_EARLY_MESSAGES = 8
"""Maximum number of messages that are answered here."""
LOAD_DELAY_S = 0.5
"""Seconds after the handshake until the server is loaded, also if no further message comes."""
BETWEEN_REQUESTS_S = 0.1
"""Seconds after another answer until the server is loaded. To load it meanwhile would slow the answer to a further request."""
_CHANGED = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
_CONNECTION_CLOSED = -32000
"""The error code of the SDK for a request whose client has disconnected."""
_Json = dict[str, Any]


class ClientLineWriter(Protocol):
    """A writer of lines to a client."""

    async def write(self, text: str) -> None: ...

    async def flush(self) -> None: ...


async def serve_stdio(
    kernel: Kernel,
    serving: McpFrontendSettings | None = None,
    started: Callable[[], object] = lambda: None,
    take_early_answers: Callable[[], EarlyAnswers] = EarlyAnswers,
) -> None:
    """Serve one client on stdin and stdout of this process until it disconnects.

    No other code may use stdout meanwhile.

    :param started: called when the server is loaded
    :param take_early_answers: ends the answers from the cache, and returns what the client has sent and received
    """
    serving = serving or McpFrontendSettings()
    early = await asyncio.to_thread(take_early_answers)
    async with take_over_stdio_streams(early) as ends:
        if ends is None:
            server = import_module("handrail.frontends.mcp.mcp_server")
            started()
            await server.serve_single_client(kernel, serving, None)
            return
        lines, output = ends
        reception = StartupResponder(kernel, serving, output, early.given)
        try:
            is_connected = await reception.answer_until_server_needed(lines)
            if early.cache is not None:
                content = StoredContent.copy(KernelStartupContent(kernel, serving.discovery))
                await asyncio.to_thread(early.cache.save, content)
            if is_connected:
                server = await reception.load_server_module()
                started()
                streams = reception.replay_client_lines(lines), reception.make_early_answer_filter()
                await server.serve_single_client(kernel, serving, streams, reception.client)
        except* ConnectionError:
            pass  # the client has disconnected
        finally:
            if reception.client.session is not None and not reception.client.is_adopted:
                await reception.client.session.close()


class StartupResponder:
    """A responder that answers the first requests of a client while the server is loaded.

    :param output: the writer for the answers
    :param given: the answers that the client has had before, by request ID
    """

    def __init__(
        self,
        kernel: Kernel,
        serving: McpFrontendSettings,
        output: ClientLineWriter,
        given: Mapping[object, _Json] | None = None,
    ) -> None:
        self._kernel = kernel
        self._serving = serving
        self._output = output
        self._content = KernelStartupContent(kernel, serving.discovery)
        self._handshake = HandshakeResponder(lambda: self._content)
        self._given = dict(given or {})
        self._loading: asyncio.Task[Any] | None = None
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.client = EarlyClient()
        """The client with its session, if it makes calls before the server is loaded."""

    async def answer_until_server_needed(self, lines: AsyncIterator[str]) -> bool:
        """Answer messages until the server is loaded, or up to the first message that needs it.

        :return: whether the client is still connected
        """
        timer: asyncio.TimerHandle | None = None
        try:
            while (line := await self._read_until_loaded(lines)) is not None:
                self._handshake.received.append(line)
                message = parse_message(line)
                if message is None or len(self._handshake.received) > MAX_EARLY_MESSAGES:
                    return True
                answer = self._handshake.answer_request(message) or await self._answer_call(message)
                if answer is None and message.get("method") != "notifications/initialized":
                    return True
                if answer is not None:
                    if message["id"] not in self._given:
                        await self._send({"jsonrpc": "2.0", "id": message["id"], "result": answer})
                    delay_s = BETWEEN_REQUESTS_S if message["method"] in ("tools/list", "tools/call") else LOAD_DELAY_S
                    if timer is not None:
                        timer.cancel()
                    timer = asyncio.get_running_loop().call_later(delay_s, self._load)
        except (StopAsyncIteration, ConnectionError):
            return False  # the client has disconnected
        finally:
            if timer is not None:
                timer.cancel()
        return True

    async def _read_until_loaded(self, lines: AsyncIterator[str]) -> str | None:
        """Return the next line, or None if the server is loaded first.

        :raises StopAsyncIteration: at the end of the lines
        """
        reading = asyncio.ensure_future(cast("Coroutine[Any, Any, str]", anext(lines)))
        await asyncio.wait({reading, self._loaded}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            return await reading
        return None

    async def load_server_module(self) -> Any:
        """Return the module of the server. It is loaded in a thread."""
        return await self._load()

    async def replay_client_lines(self, lines: AsyncIterable[str]) -> AsyncIterator[str]:
        """Yield all lines of the client, from the beginning."""
        for line in self._handshake.received:
            yield line
        async for line in lines:
            yield line

    def make_early_answer_filter(self) -> DuplicateAnswerFilter:
        """Return the writer for the server's answers, which drops repeated ones."""
        tells = self._handshake.client_info is not None and "protocolVersion" in self._handshake.client_info
        return DuplicateAnswerFilter(self._output, {**self._handshake.answered, **self._given}, tells=tells)

    def _load(self) -> asyncio.Task[Any]:
        if self._loading is None:
            loaded = asyncio.to_thread(import_module, "handrail.frontends.mcp.mcp_server")
            self._loading = asyncio.create_task(loaded, name="mcp server: loading")
            self._loading.add_done_callback(lambda _: self._loaded.done() or self._loaded.set_result(None))
        return self._loading

    async def _send(self, message: Mapping[str, Any]) -> None:
        await self._output.write(orjson.dumps(message).decode() + "\n")
        await self._output.flush()

    async def _answer_call(self, message: _Json) -> _Json | None:
        """Return the result of a call of a built-in tool that only reads, or None to leave the call to the server.

        The server does not get a call that was answered here. If only the server can send the answer, it gets both.
        """
        params, about = message.get("params"), (self._handshake.client_info or {}).get("clientInfo")
        if message.get("method") != "tools/call" or not isinstance(params, dict) or not isinstance(about, dict):
            return None
        given, request_id = cast("_Json", params), message.get("id")
        name, arguments, meta = given.get("name"), given.get("arguments", {}), given.get("_meta", {})
        if given.keys() - {"name", "arguments", "_meta"} or not isinstance(arguments, dict) or not is_plain_meta(meta):
            return None
        if not is_request_id(request_id) or request_id in self._handshake.answered or not isinstance(name, str):
            return None
        entry = self._kernel.generation.resolve_tool_name(name)
        if entry is None or not _can_run_early(entry, cast("_Json", arguments)):
            return None
        proposed = ProposedCall(name, cast("_Json", arguments), client_meta=meta or None)
        try:
            if self.client.session is None:
                info = ClientInfo(about["name"], about["version"])  # pyright: ignore[reportUnknownArgumentType]
                asks = None if self._serving.headless else self.client
                self.client.session = await self._kernel.session(
                    headless=asks is None, approval_handler=asks, client=self.client, client_info=info
                )
            (answer,) = await self.client.session.start_turn().call_all([proposed])
        except HandrailError:
            return None  # the server reports it
        result = answer.model
        if "awaiting_approval" in result.metadata or has_stored_output(result):
            self.client.answers[request_id] = answer
            return None
        self._handshake.received.pop()
        return to_mcp_result_with_outputs(self._kernel, answer.tool_id, result, {}, None)


class DuplicateAnswerFilter:
    """A writer that passes on the server's messages, except answers to requests that were answered early.

    :param given: the early answers by request ID
    :param tells: whether the client gets change notifications without a subscription
    """

    def __init__(self, output: ClientLineWriter, given: Mapping[object, _Json], *, tells: bool) -> None:
        self._output = output
        self._given = dict(given)
        self._tells = tells

    async def write(self, text: str) -> None:
        if self._given and (message := parse_message(text)) is not None and "method" not in message:
            given = self._given.pop(message.get("id"), None)
            if given is not None:
                # An error says only that the client has disconnected, or that the server is busy. The list is the same.
                if not self._tells or "tools" not in given or message.get("result", given) == given:
                    return
                text = orjson.dumps(_CHANGED).decode() + "\n"
        await self._output.write(text)

    async def flush(self) -> None:
        await self._output.flush()


def _is_ready_answer(text: str) -> bool:
    """Return whether a message is an answer, and not the SDK's error for a request that the client has left."""
    message = parse_message(text)
    if message is None or "method" in message:
        return message is None
    error: object = message.get("error")
    return not (isinstance(error, dict) and cast("_Json", error).get("code") == _CONNECTION_CLOSED)


def _can_run_early(entry: ToolEntry, arguments: Mapping[str, Any]) -> bool:
    """Return whether the server would do nothing with a call but run it, and the call takes a moment."""
    declared: Mapping[str, Any] = entry.spec.parameters.get("properties", {})
    is_plain = entry.source == BUILT_IN and entry.is_inline and entry.id not in (*DISCOVERY_TOOLS, SKILL_TOOL)
    return is_plain and arguments.keys() <= declared.keys()
