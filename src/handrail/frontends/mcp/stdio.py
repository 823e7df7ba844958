"""The stdio transport of the MCP server on the event loop, and early answers while the SDK loads.

The SDK's own transport reads stdin in a thread, which nothing can wake: a signal would not end the server before
its client hangs up. It also accepts lines of any length. Parsing and framing remain the SDK's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import sys
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson

from handrail.contract.text.json import (
    MAX_ARGUMENT_BYTES,
    MAX_ARGUMENT_VALUES,
    ArgumentText,
    check_depth,
    values_in_text,
)
from handrail.frontends.mcp.tools import DOOR, DOOR_TOOL, EXTENSIONS, Serving, as_tool, greeting, page_from, specs_of

if TYPE_CHECKING:
    from handrail.kernel.kernel import Kernel


MAX_MESSAGE_BYTES = 2 * MAX_ARGUMENT_BYTES
"""Longer messages are dropped while they arrive; a request is answered with an error."""
_INVALID_PARAMS = -32602
MAX_MESSAGE_DEPTH = 150
"""Deeper messages are not parsed by the SDK, which would leave a request without an answer."""
MAX_MESSAGE_VALUES = 2 * MAX_ARGUMENT_VALUES
"""JSON values in a message. The SDK goes through all of them several times, and nothing else runs meanwhile."""
_ENDS_KEPT = 4096
"""Bytes of each end of an over-long message, where its id is looked for."""
_ID = rb'"id"\s*:\s*(-?\d{1,18}|"[^"\\\x00-\x1f]{1,200}")'
_OTHERS = rb'"(?:jsonrpc|method)"\s*:\s*"[^"\\]{1,200}"'
# Only an id that is certainly in the outermost object: an id inside the params could be that of another request.
_ID_AT_THE_BEGINNING = re.compile(rb"\s*\{\s*(?:" + _OTHERS + rb"\s*,\s*)*" + _ID + rb"\s*[,}]")
_ID_AT_THE_END = re.compile(rb"[\]}\",]\s*,?\s*" + _ID + rb"\s*(?:,\s*" + _OTHERS + rb"\s*)*\}\s*\Z")


@asynccontextmanager
async def wire() -> AsyncGenerator[tuple[Lines, Output] | None]:
    """The two ends of a client on stdin and stdout; until the block ends, stdin is empty and stdout goes to stderr. None
    where the event loop cannot watch them."""
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
        protocol = asyncio.StreamReaderProtocol(reader)
        incoming, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(os.dup(wire_in), "rb", buffering=0))
        transports.append(incoming)
        flow = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        outgoing, _ = await loop.connect_write_pipe(lambda: flow, os.fdopen(os.dup(wire_out), "wb", buffering=0))
        transports.append(outgoing)
        writer = asyncio.StreamWriter(outgoing, flow, None, loop)
        output = Output(writer)
        yield Lines(reader, writer.write, output.end_soon), output
    finally:
        for transport in transports:
            transport.close()
        # The descriptions may be shared with a shell that goes on after us.
        os.set_blocking(wire_in, blocking_in)
        os.set_blocking(wire_out, blocking_out)
        os.dup2(wire_in, 0)
        os.dup2(wire_out, 1)
        os.close(wire_in)
        os.close(wire_out)


def _is_watchable(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


def check_form(text: str) -> None:
    """Refuse a message whose form would hold up all others.

    :raises ArgumentText: for one that is nested deeper than :data:`MAX_MESSAGE_DEPTH` or holds more values than
        :data:`MAX_MESSAGE_VALUES`; the text follows "the parameters"
    """
    if values_in_text(text, MAX_MESSAGE_VALUES) > MAX_MESSAGE_VALUES:
        raise ArgumentText(
            f"hold more than {MAX_MESSAGE_VALUES:,} values; send less in one message, or a path to a file"
        )
    check_depth(text, MAX_MESSAGE_DEPTH)


class Lines:
    """The lines of a stream as text, none longer than the reader's limit and none deeper than a parser takes.

    :param reply: takes the answer to a request that is not passed on
    :param ended: called when there are no more
    """

    def __init__(
        self, reader: asyncio.StreamReader, reply: Callable[[bytes], None], ended: Callable[[], None] = lambda: None
    ) -> None:
        self._reader = reader
        self._reply = reply
        self._ended = ended
        self._skipped: _Skipped | None = None

    def __aiter__(self) -> Lines:
        return self

    async def __anext__(self) -> str:
        while True:
            try:
                line = await self._reader.readuntil(b"\n")
            except asyncio.IncompleteReadError as ended:
                line = ended.partial
                if not line or self._skipped is not None:
                    self._ended()
                    raise StopAsyncIteration from None
            except asyncio.LimitOverrunError as over:
                piece = await self._reader.readexactly(over.consumed)
                self._skipped = self._skipped or _Skipped(piece[:_ENDS_KEPT])
                self._skipped.add(piece)
                continue
            if self._skipped is not None:
                skipped, self._skipped = self._skipped, None
                skipped.add(line)
                limit = f"at most {MAX_MESSAGE_BYTES:,} are taken. Pass a path to a file instead"
                self._refuse(skipped.head, skipped.tail, f"the message is {skipped.size:,} bytes long; {limit}")
            elif (text := self._checked(line)) is not None:
                return text

    def _checked(self, line: bytes) -> str | None:
        text = line.decode(errors="replace")
        try:
            check_form(text)
        except ArgumentText as error:
            self._refuse(line[:_ENDS_KEPT], line[-_ENDS_KEPT:], f"the parameters {error}")
            return None
        return text

    def _refuse(self, head: bytes, tail: bytes, text: str) -> None:
        """Answer a request that cannot be read. Without an id to be found there is nobody to answer."""
        found = _ID_AT_THE_BEGINNING.match(head) or _ID_AT_THE_END.search(tail)
        if found is not None:
            error = {"code": _INVALID_PARAMS, "message": text}
            answer = {"jsonrpc": "2.0", "id": orjson.Fragment(found.group(1)), "error": error}
            with contextlib.suppress(orjson.JSONEncodeError):
                self._reply(orjson.dumps(answer) + b"\n")


class _Skipped:
    """The ends and the length of a message that is dropped while it arrives."""

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.tail = b""
        self.size = 0

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self.tail = (self.tail + piece[-_ENDS_KEPT:])[-_ENDS_KEPT:]


class Output:
    """A pipe that text is written to, at the pace of its reader.

    :param patience_s: how long a reader that says no more may leave it full
    """

    def __init__(self, writer: asyncio.StreamWriter, patience_s: float = 5.0) -> None:
        self._writer = writer
        self._patience_s = patience_s
        self._bound: float | None = None
        self._flushing: set[asyncio.Timeout] = set()

    async def write(self, text: str) -> None:
        self._writer.write(text.encode(errors="backslashreplace"))

    async def flush(self) -> None:
        """
        :raises OSError: when nobody reads it any more
        """
        try:
            async with asyncio.timeout(self._bound) as bound:
                self._flushing.add(bound)
                try:
                    await self._writer.drain()
                finally:
                    self._flushing.discard(bound)
        except TimeoutError:
            raise BrokenPipeError("the client has hung up, and reads no more") from None

    def end_soon(self) -> None:
        """Whoever reads it says no more: they may have gone and left a pipe that nobody reads."""
        self._bound = self._patience_s
        for bound in self._flushing:
            bound.reschedule(asyncio.get_running_loop().time() + self._patience_s)


# Early answers to a client on stdin and stdout, before the SDK is loaded.
#
# Loading the SDK takes longer than opening a kernel. Meanwhile this code answers the first messages of nearly every client,
# its hello and its request for the tools, if they have the plainest form. The server then receives all of them again, and its
# answers are held back. So the server knows the client as if it had answered by itself. If it would have listed other tools,
# the client is notified that the list has changed.

OLDER = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
NEWER = "2026-07-28"
"""The versions of the protocol whose first requests are answered here."""
MOST_EARLY = 8
"""Messages that are taken here; a client that says more is past its beginning."""
PATIENCE_S = 0.5
"""After a hello with nothing behind it, the server is made ready all the same."""
_ENVELOPE = "io.modelcontextprotocol/"
_CAPABILITIES = {"roots", "sampling", "elicitation", "experimental", "extensions", "tasks"}
_CHANGED = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
_Json = dict[str, Any]


class LineWriter(Protocol):
    """What takes lines for a client."""

    async def write(self, text: str) -> None: ...

    async def flush(self) -> None: ...


async def serve(kernel: Kernel, serving: Serving | None = None, started: Callable[[], object] = lambda: None) -> None:
    """Serve one client on this process's stdin and stdout until it hangs up. Nothing else may use stdout meanwhile.

    :param started: called when all that is needed is loaded
    """
    serving = serving or Serving()
    async with wire() as ends:
        if ends is None:
            server = import_module("handrail.frontends.mcp.server")
            started()
            await server.serve_on(kernel, serving, None)
            return
        lines, output = ends
        reception = Reception(kernel, serving, output)
        if await reception.receive(lines):
            server = await reception.server()
            started()
            try:
                await server.serve_on(kernel, serving, (reception.resumed(lines), reception.answers()))
            except* ConnectionError:
                pass  # it has hung up, and reads no more


class Reception:
    """See the module.

    :param output: what takes the answers, each a line
    """

    def __init__(self, kernel: Kernel, serving: Serving, output: LineWriter) -> None:
        self._kernel = kernel
        self._serving = serving
        self._output = output
        self._read: list[str] = []
        """All that the client has said."""
        self._given: dict[object, _Json] = {}
        """What was answered, by the request's id."""
        self._hello: _Json | None = None
        """What the older era's handshake, or each request of the newer one, said of the client."""
        self._loading: asyncio.Task[Any] | None = None

    async def receive(self, lines: AsyncIterator[str]) -> bool:
        """Answer what can be answered here, up to the first message that cannot; whether the client is still there."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        try:
            async for line in lines:
                self._read.append(line)
                message = _message(line)
                if message is None or len(self._read) > MOST_EARLY:
                    return True
                answer = self._answer(message)
                if answer is None and message.get("method") != "notifications/initialized":
                    return True
                if answer is not None:
                    self._given[message["id"]] = answer
                    await self._say({"jsonrpc": "2.0", "id": message["id"], "result": answer})
                    if "tools" in answer:
                        return True
                    timer = timer or loop.call_later(PATIENCE_S, self._load)
        except ConnectionError:
            pass  # it has hung up
        finally:
            if timer is not None:
                timer.cancel()
        return False

    async def server(self) -> Any:
        """The module of the server, once it is loaded. The event loop goes on meanwhile."""
        return await self._load()

    async def resumed(self, lines: AsyncIterable[str]) -> AsyncIterator[str]:
        """All that the client has said, from the beginning."""
        for line in self._read:
            yield line
        async for line in lines:
            yield line

    def answers(self) -> Answers:
        """What takes the server's answers for the client."""
        tells = self._hello is not None and "protocolVersion" in self._hello
        return Answers(self._output, self._given, tells=tells)

    def _load(self) -> asyncio.Task[Any]:
        if self._loading is None:
            loaded = asyncio.to_thread(import_module, "handrail.frontends.mcp.server")
            self._loading = asyncio.create_task(loaded, name="mcp server: loading")
        return self._loading

    async def _say(self, message: Mapping[str, Any]) -> None:
        await self._output.write(orjson.dumps(message).decode() + "\n")
        await self._output.flush()

    # ── what is answered ─────────────────────────────────────────────────────────────────────────

    def _answer(self, message: _Json) -> _Json | None:
        """The result of a request, as the server would give it; None for what is left to the server."""
        method, params = message.get("method"), message.get("params", {})
        if not _is_id(message.get("id")) or message["id"] in self._given or not isinstance(params, dict):
            return None
        given = cast("_Json", params)
        try:
            if method == "initialize":
                return self._initialize(given)
            if method == "server/discover":
                return self._discover(given)
            return self._list(given) if method == "tools/list" else None
        except (orjson.JSONEncodeError, RecursionError):
            return None

    def _initialize(self, params: _Json) -> _Json | None:
        if self._hello is not None or params.keys() != {"protocolVersion", "capabilities", "clientInfo"}:
            return None
        wanted = params["protocolVersion"]
        if wanted not in OLDER or not _is_client(params["clientInfo"], params["capabilities"]):
            return None
        self._hello = params
        return {"protocolVersion": wanted, **greeting(self._kernel, self._serving.discovery)}

    def _discover(self, params: _Json) -> _Json | None:
        if params.keys() != {"_meta"} or not self._is_same(params["_meta"]):
            return None
        said = greeting(self._kernel, self._serving.discovery)
        capabilities = {**said["capabilities"], "extensions": EXTENSIONS}
        about = {"capabilities": capabilities, "instructions": said["instructions"]}
        return self._whole({"supportedVersions": [NEWER], **about}, said["serverInfo"])

    def _list(self, params: _Json) -> _Json | None:
        newer = self._hello is None or "protocolVersion" not in self._hello
        if newer and (params.keys() != {"_meta"} or not self._is_same(params["_meta"])):
            return None
        if not newer and (params.keys() - {"_meta"} or not _is_plain_meta(params.get("_meta", {}))):
            return None
        discovery, kernel = self._serving.discovery, self._kernel
        tools = [as_tool(kernel, discovery, spec) for spec in specs_of(kernel, discovery, None)]
        if newer and discovery == "core" and kernel.generation.resolve(DOOR) is None:
            tools.append(dict(DOOR_TOOL))
        page = page_from("tools", tools, 0)
        return self._whole(page, greeting(kernel, discovery)["serverInfo"]) if newer else page

    @staticmethod
    def _whole(result: _Json, about: Mapping[str, str]) -> _Json:
        """What every result of the newer era says."""
        stamp = {f"{_ENVELOPE}serverInfo": about}
        return {"cacheScope": "private", "resultType": "complete", "ttlMs": 0, **result, "_meta": stamp}

    def _is_same(self, envelope: object) -> bool:
        """Whether a request of the newer era is of a client that is known, or of the first one."""
        if not isinstance(envelope, dict) or (self._hello is not None and envelope != self._hello):
            return False
        said = cast("_Json", envelope)
        if said.keys() != {f"{_ENVELOPE}{key}" for key in ("protocolVersion", "clientInfo", "clientCapabilities")}:
            return False
        client, capabilities = said[f"{_ENVELOPE}clientInfo"], said[f"{_ENVELOPE}clientCapabilities"]
        if said[f"{_ENVELOPE}protocolVersion"] != NEWER or not _is_client(client, capabilities):
            return False
        self._hello = said
        return True


class Answers:
    """Passes on what a server says but its answers to what was answered before it.

    :param given: by the request's id, what was answered
    :param tells: whether the client is told of changes without having asked for it
    """

    def __init__(self, output: LineWriter, given: Mapping[object, _Json], *, tells: bool) -> None:
        self._output = output
        self._given = dict(given)
        self._tells = tells

    async def write(self, text: str) -> None:
        if self._given and (message := _message(text)) is not None and "method" not in message:
            given = self._given.pop(message.get("id"), None)
            if given is not None:
                if not self._tells or "tools" not in given or message.get("result") == given:
                    return
                text = orjson.dumps(_CHANGED).decode() + "\n"
        await self._output.write(text)

    async def flush(self) -> None:
        await self._output.flush()


def _message(line: str) -> _Json | None:
    """A JSON-RPC message, as far as it is one."""
    with contextlib.suppress(orjson.JSONDecodeError):
        message: object = orjson.loads(line)
        if isinstance(message, dict):
            found = cast("_Json", message)
            known = found.keys() <= {"jsonrpc", "id", "method", "params", "result", "error"}
            return found if known and found.get("jsonrpc") == "2.0" else None
    return None


def _is_id(given: object) -> bool:
    return isinstance(given, (int, str)) and not isinstance(given, bool)


def _is_client(about: object, capabilities: object) -> bool:
    """Whether a client says of itself what every version of the protocol takes, in the plainest form."""
    if not isinstance(about, dict) or not isinstance(capabilities, dict):
        return False
    texts, can = cast("_Json", about), cast("_Json", capabilities)
    if not {"name", "version"} <= texts.keys() or not all(isinstance(one, str) for one in texts.values()):
        return False
    return can.keys() <= _CAPABILITIES and all(map(_is_plain, can.values()))


def _is_plain(value: object) -> bool:
    """Whether it is an object of such objects, beside whether it tells of changes."""
    if not isinstance(value, dict):
        return False
    items = cast("_Json", value).items()
    return all(isinstance(one, bool) if key == "listChanged" else _is_plain(one) for key, one in items)


def _is_plain_meta(meta: object) -> bool:
    return isinstance(meta, dict) and meta.keys() <= {"progressToken"} and all(map(_is_id, meta.values()))  # pyright: ignore[reportUnknownMemberType,reportUnknownArgumentType]
