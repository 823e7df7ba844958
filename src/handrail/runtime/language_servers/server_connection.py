"""The connection to one language server: JSON-RPC messages over the pipes of its process.

A message is a header with its length, and a body of JSON. The client is small because lsprotocol and pygls take 0.9 s to
import, check every field of an answer, and start the server outside of a sandbox. Servers are other people's programs: a message
that is too long or not a message ends the connection with a reason, and nothing waits without a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import orjson

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process
from handrail.contract.struct import Struct

MAX_HEADER_BYTES = 8 * 1024
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The longest message. References of a common name in a large repository take a few MiB."""
_MAX_WAITING_MESSAGES = 1_000
"""Messages to the server that it has not read."""
_MAX_PROGRESS_TASKS = 100
_MAX_DIAGNOSED_FILES = 1_000
_MAX_DIAGNOSTICS_BYTES = MAX_MESSAGE_BYTES
"""The bytes of the messages whose diagnostics are kept."""
_READ_BYTES = 1 << 16
_LARGE_BYTES = 1 << 20
"""Bodies from this size on are parsed in a thread."""
_EXIT_S = 1.0
_MAX_QUOTED = 300
_LENGTH = re.compile(rb"content-length\s*:\s*(\d{1,18})\s*\Z", re.IGNORECASE)
_FIELD = re.compile(rb"[!-9;-~]+:[^\r\n]*\Z")
_METHOD_NOT_FOUND = -32601


class MalformedMessage(Exception):
    """Output of a server that is not a message; the text says what was expected."""


class LanguageServerFailure(Exception):
    """The server has ended, or its output cannot be understood. The text is the reason."""


class ServerErrorResponse(Exception):
    """An error that the server answered.

    :param code: of JSON-RPC or of the protocol
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class ServerMessageReader:
    """A reader that cuts the output of a server into the bodies of its messages. It keeps at most one message."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._length: int | None = None

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the bodies that are complete with this piece.

        :raises MalformedMessage: for output that is not a message, or a message that is too long
        """
        self._buffer += piece
        while True:
            if self._length is None:
                if (end := self._buffer.find(b"\r\n\r\n", 0, MAX_HEADER_BYTES)) < 0:
                    self._check_partial_header()
                    return
                self._length = _parse_header(bytes(self._buffer[:end]))
                del self._buffer[: end + 4]
            if len(self._buffer) < self._length:
                return
            body = bytes(self._buffer[: self._length])
            del self._buffer[: self._length]
            self._length = None
            yield body

    def _check_partial_header(self) -> None:
        first = bytes(self._buffer[: MAX_HEADER_BYTES + 1])
        if len(first) > MAX_HEADER_BYTES or (b"\n" in first and _FIELD.match(first.partition(b"\r\n")[0]) is None):
            raise MalformedMessage(f"it wrote {_quote(first)}, which is not the header of a message")


def _parse_header(header: bytes) -> int:
    lengths: list[int] = []
    for line in header.split(b"\r\n"):
        if _FIELD.match(line) is None:
            raise MalformedMessage(f"it wrote {_quote(line)}, which is not the header of a message")
        if (found := _LENGTH.match(line)) is not None:
            lengths.append(int(found[1]))
    if len(lengths) != 1:
        raise MalformedMessage(f"it wrote a header without exactly one Content-Length: {_quote(header)}")
    if lengths[0] > MAX_MESSAGE_BYTES:
        raise MalformedMessage(
            f"it sent a message of {lengths[0]:,} bytes, and the maximum is {MAX_MESSAGE_BYTES // 2**20} MiB"
        )
    return lengths[0]


def _quote(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace"))


def parse_body(body: bytes) -> dict[str, Any]:
    """Return the message in a body.

    :raises MalformedMessage: if it is not an object of JSON
    """
    try:
        found: Any = orjson.loads(body)
    except ValueError:
        try:  # half of a surrogate pair is no reason to lose a server
            found = json.loads(body.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            raise MalformedMessage(f"it sent a message that is not JSON: {_quote(body)}") from None
    if not isinstance(found, dict):
        raise MalformedMessage(f"it sent a message that is not an object: {_quote(body)}")
    return cast("dict[str, Any]", found)


def encode_message(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


class PublishedDiagnostics(Struct):
    """The last diagnostics that a server sent for a file.

    :param version: of the document; None if the server does not say
    :param number: counts all such messages of the server
    :param size: the bytes of the message
    """

    version: int | None
    diagnostics: list[Any]
    number: int
    size: int


class WorkProgress(Struct):
    """A task that the server reports, such as indexing."""

    title: str
    message: str = ""
    percentage: int | None = None

    def __str__(self) -> str:
        share = "" if self.percentage is None else f", {self.percentage} %"
        text = " ".join(f"{self.title} {self.message}".split())
        return f"{text[:120]}{share}"


class LanguageServerConnection:
    """A connection to a running server. It owns the process.

    :param answer_request: returns the result of a request from the server, or NotImplemented
    """

    def __init__(self, process: Process, answer_request: Callable[[str, Any], Any]) -> None:
        self.process = process
        self._answer_request = answer_request
        self._number = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._change = asyncio.Event()
        self.lost_reason: str | None = None
        """Why the connection has ended; None while it is open."""
        self.progress: dict[str, WorkProgress] = {}
        """The tasks that the server reports, by token."""
        self.diagnostics: dict[str, PublishedDiagnostics] = {}
        """The last diagnostics of each file, by URI."""
        self.diagnostics_count = 0
        self._tasks = [asyncio.ensure_future(self._read_messages()), asyncio.ensure_future(self._write_messages())]

    async def request(self, method: str, params: object, timeout_s: float) -> Any:
        """Send a request and return the result.

        :raises LanguageServerFailure: if the server ends
        :raises ServerErrorResponse: if it answers with an error
        :raises TimeoutError: if it does not answer in time
        """
        self._raise_if_lost()
        self._number += 1
        number = self._number
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except (TimeoutError, asyncio.CancelledError):
            if self.lost_reason is None:
                self.notify("$/cancelRequest", {"id": number})
            raise
        finally:
            self._waiting.pop(number, None)

    def notify(self, method: str, params: object) -> None:
        """Send a notification. Does nothing after the end."""
        if self.lost_reason is None:
            self._send({"jsonrpc": "2.0", "method": method, "params": params})

    @property
    def pending_request_count(self) -> int:
        """How many requests have no answer yet."""
        return len(self._waiting)

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait until the server reports progress or diagnostics, asks something, or ends; return False if it does not."""
        change = self._change
        try:
            async with asyncio.timeout(timeout_s):
                await change.wait()
        except TimeoutError:
            return False
        return True

    async def aclose(self) -> None:
        """End the process and all that it started."""
        self._fail("it was stopped")
        for task in self._tasks:
            task.cancel()
        ending = asyncio.ensure_future(self.process.kill())
        with contextlib.suppress(ToolError):
            await asyncio.shield(ending)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _raise_if_lost(self) -> None:
        if self.lost_reason is not None:
            raise LanguageServerFailure(self.lost_reason)

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._outgoing.qsize() >= _MAX_WAITING_MESSAGES:
            self._fail("it does not read its input")
            return
        self._outgoing.put_nowait(encode_message(message))

    async def _write_messages(self) -> None:
        while True:
            await self.process.write(await self._outgoing.get())

    async def _read_messages(self) -> None:
        reader = ServerMessageReader()
        try:
            while piece := await self.process.read(_READ_BYTES):
                for body in reader.feed(piece):
                    large = len(body) >= _LARGE_BYTES
                    message = await asyncio.to_thread(parse_body, body) if large else parse_body(body)
                    self._handle(message, len(body))
            reason = await self._describe_end()
        except MalformedMessage as error:
            reason = str(error)
        except ToolError as error:
            reason = error.text
        except Exception as error:  # a message of an unexpected form must not leave a question waiting
            reason = f"its messages could not be read: {type(error).__name__}: {error}"[:_MAX_QUOTED]
        self._fail(reason)

    def _handle(self, message: dict[str, Any], size: int) -> None:
        method, number = message.get("method"), message.get("id")
        if not isinstance(method, str):
            self._resolve(number, message)
        elif "id" in message:
            if len(str(number)) > _MAX_QUOTED:  # each answer repeats it, and answers wait in memory
                raise MalformedMessage(f"it sent a request whose id has {len(str(number)):,} characters")
            self._answer(method, number, message.get("params"))
        elif method == "$/progress":
            self._note_progress(_to_object(message.get("params")))
        elif method == "textDocument/publishDiagnostics":
            self._keep_diagnostics(_to_object(message.get("params")), size)

    def _resolve(self, number: object, message: dict[str, Any]) -> None:
        answer = self._waiting.get(number) if isinstance(number, int) else None
        if answer is None or answer.done():
            return
        if "error" in message:
            error = _to_object(message["error"])
            code = error.get("code")
            error_text = str(error.get("message", "no details"))[:_MAX_QUOTED]
            answer.set_exception(ServerErrorResponse(code if isinstance(code, int) else 0, error_text))
        else:
            answer.set_result(message.get("result"))

    def _answer(self, method: str, number: Any, params: Any) -> None:
        result = self._answer_request(method, params)
        if result is NotImplemented:
            error = {"code": _METHOD_NOT_FOUND, "message": f"{method[:80]} is not supported"}
            self._send({"jsonrpc": "2.0", "id": number, "error": error})
        else:
            self._send({"jsonrpc": "2.0", "id": number, "result": result})
        self._wake()  # it may have registered a capability

    def _note_progress(self, params: dict[str, Any]) -> None:
        token, value = str(params.get("token"))[:_MAX_QUOTED], _to_object(params.get("value"))
        kind, percentage = value.get("kind"), value.get("percentage")
        share = int(percentage) if isinstance(percentage, (int, float)) else None
        if kind == "begin" and not value.get("title"):
            return  # pyright's check of open files, which can stay open for ever and which no answer waits for
        if kind == "begin" and len(self.progress) < _MAX_PROGRESS_TASKS:
            self.progress[token] = WorkProgress(
                str(value.get("title", ""))[:_MAX_QUOTED], str(value.get("message", ""))[:_MAX_QUOTED], share
            )
        elif kind == "report" and (known := self.progress.get(token)) is not None:
            known.message = str(value.get("message", known.message))[:_MAX_QUOTED]
            known.percentage = known.percentage if share is None else share
        elif kind == "end":
            self.progress.pop(token, None)
        self._wake()

    def _keep_diagnostics(self, params: dict[str, Any], size: int) -> None:
        found, version = params.get("diagnostics"), params.get("version")
        self.diagnostics_count += 1
        self.diagnostics.pop(uri := str(params.get("uri")), None)
        kept = sum(one.size for one in self.diagnostics.values())
        while self.diagnostics and (
            len(self.diagnostics) >= _MAX_DIAGNOSED_FILES or kept + size > _MAX_DIAGNOSTICS_BYTES
        ):
            kept -= self.diagnostics.pop(next(iter(self.diagnostics))).size
        self.diagnostics[uri] = PublishedDiagnostics(
            version if isinstance(version, int) else None,
            cast("list[Any]", found) if isinstance(found, list) else [],
            self.diagnostics_count,
            size,
        )
        self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _fail(self, reason: str) -> None:
        if self.lost_reason is not None:
            return
        self.lost_reason = reason
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(LanguageServerFailure(reason))
        self._wake()

    async def _describe_end(self) -> str:
        """Return how a server ended that closed its output."""
        try:
            async with asyncio.timeout(_EXIT_S):
                code = await self.process.wait()
            _, errors, _ = await self.process.communicate(b"", 0)
        except TimeoutError:
            return "it closed its output"
        how = f"it ended with exit code {code}" if code >= 0 else f"it was ended by signal {-code}"
        error_tail = " ".join(errors.decode("utf-8", "replace").split())[-_MAX_QUOTED:]
        return f"{how}: {error_tail}" if error_tail else how


def _to_object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
