"""The stdio transport: a program of this machine in its own sandbox, which exchanges lines of JSON.

The program belongs to no call: it is started for the first one and ends with its connection manager. The operator grants the
files and hosts that it may reach, for all callers. The last part of its stderr is kept to explain its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process
from handrail.registry.sources.executable_tools import describe_exit, extract_output_tail
from handrail.runtime.guard.guarded_sandbox import GuardedProcess, ProtectedPathViolation
from handrail.upstream.client.json_rpc_messages import (
    Message,
    encode_message,
    is_rpc_message,
    is_truncated_rpc_response,
    looks_like_rpc_response,
    parse_json_rpc_messages,
)
from handrail.upstream.client.upstream_session import (
    MAX_MESSAGE_BYTES,
    ResponseTooLong,
    TransportCallbacks,
    UpstreamConnectionLost,
)

GRACE_S = 1.0
"""The timeout in seconds for a program to end after its stdin is closed."""
HOLD_S = 0.5
"""The time in seconds in which the next lines may complete an answer that broke off."""
MAX_HELD_BYTES, MAX_HELD_ATTEMPTS = 1024 * 1024, 200
"""The most bytes of an answer over several lines that begins like any other, and how often it is read."""
MAX_INVALID_LINES = 10_000
"""The most lines in a row without a message, after which the connection is closed."""
_MOST_SHOWN = 8
_READ_BYTES = 1 << 16
_EDGE_BYTES = 256
_HEADER = re.compile(rb"(?i)\Acontent-(?:length\s*:\s*(\d{1,15})|type\s*:.*)\s*\Z")
_LEADING_ID = re.compile(rb'\A\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,18})\b')
_TRAILING_ID = re.compile(rb'"id"\s*:\s*(\d{1,18})\s*\}\s*\Z')


class StdioTransport:
    """The stdio transport of one server.

    :param start: starts the program
    :param hidden_paths: the paths among its arguments that its sandbox hides, each with the setting that would show it
    """

    def __init__(self, start: Callable[[], Awaitable[Process]], hidden_paths: Mapping[str, str] | None = None) -> None:
        self._start = start
        self._unseen = hidden_paths or {}
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._garbage = 0
        self._spread = bytearray()
        """The lines so far of a message that a server writes over several lines."""
        self._hold_timer: asyncio.TimerHandle | None = None
        """Fails an answer that broke off, unless the next lines complete it."""
        self._attempts = 0
        """How often these lines were read as a message."""
        self._announced: int | None = None
        """The length in the headers that are being read."""
        self._body_bytes: int | None = None
        """The length of the message that comes next, if headers came before it."""
        self.has_output = False
        """Whether the program has written anything to its stdout."""
        self._closed = False
        self._calls = 0
        self._beginning = asyncio.Lock()

    async def open(self, handler: TransportCallbacks) -> None:
        try:
            self._process = await self._start()
        except ToolError as error:
            raise UpstreamConnectionLost(error.text, unsent=True) from None
        self._reader = asyncio.create_task(
            self._read_messages(self._process, handler), name="mcp: reads a server's stdout"
        )

    async def send(self, message: Message, headers: Mapping[str, str] | None = None) -> None:
        process = self._process
        if process is None or self._closed:
            raise UpstreamConnectionLost("the server's program has ended", unsent=True)
        line = encode_message(message) + b"\n"
        # One message at a time, or the parts of two long ones could mix in the pipe.
        async with self._writing:
            await process.write(line)

    def abandon_request(self, request: int) -> bool:
        return False

    @asynccontextmanager
    async def watch_protected_paths(self) -> AsyncGenerator[None]:
        guarded = self._process if isinstance(self._process, GuardedProcess) else None
        if guarded is None:
            yield
            return
        async with self._beginning:
            # Only the first of several concurrent calls looks: later ones would take changes of a running call for the
            # server's own.
            if not self._calls and (appeared := await guarded.begin_call()):
                raise ToolError(_describe_violations(appeared), kind="conflict")
            self._calls += 1
        try:
            try:
                yield
            except Exception:  # it may have changed something before it failed
                await _raise_for_changed_names(guarded)
                raise
            await _raise_for_changed_names(guarded)
        finally:
            self._calls -= 1

    def set_version(self, protocol: str, *, modern: bool) -> None:
        pass

    async def aclose(self) -> None:
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(Exception):  # on any error, the program is killed next
                # The end of its input is the polite request to end, which most servers follow. The kill is for the
                # others.
                await process.close_stdin()
                with contextlib.suppress(TimeoutError, ToolError):
                    async with asyncio.timeout(GRACE_S):
                        await process.wait()
            with contextlib.suppress(Exception):
                await process.kill()
        if self._hold_timer is not None:
            self._hold_timer.cancel()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._reader

    async def _read_messages(self, process: Process, handler: TransportCallbacks) -> None:
        """Read lines until the end of the program, keeping at most one message in memory.

        A message after a ``Content-Length`` header, as language servers have it, needs no line break at its end.
        """
        kept = bytearray()
        skipping = False
        try:
            while piece := await process.read(_READ_BYTES):
                self.has_output = True
                at = 0
                while (end := self._find_end(piece, at, len(kept))) >= 0:
                    if skipping:
                        kept += piece[max(at, end - _EDGE_BYTES) : end]
                        # Only the edges are kept. One of them usually has the ID, so that the right request fails and
                        # not all of them.
                        self._too_long(handler, bytes(kept))
                        skipping = False
                    elif kept:
                        kept += piece[at:end]
                        self._line(handler, bytes(kept))
                    else:
                        self._line(handler, piece[at:end])
                    kept.clear()
                    at = end + 1 if piece.startswith(b"\n", end) else end
                rest = piece[at:]
                if not skipping and self._is_whole_message(kept, rest):
                    self._line(handler, bytes(kept) + rest)
                    kept.clear()
                    rest = b""
                if skipping:
                    kept[_EDGE_BYTES:] = (bytes(kept[_EDGE_BYTES:]) + rest)[-_EDGE_BYTES:]
                else:
                    kept += rest
                    if len(kept) > MAX_MESSAGE_BYTES:
                        skipping = True
                        # The middle is dropped: a server must not fill the memory with one endless line.
                        kept[_EDGE_BYTES:] = kept[-_EDGE_BYTES:]
                if self._garbage > MAX_INVALID_LINES:
                    handler.on_connection_lost(
                        UpstreamConnectionLost(
                            f"the server wrote {MAX_INVALID_LINES} lines to its stdout that are not messages; logs belong on "
                            "stderr"
                        )
                    )
                    return
            handler.on_connection_lost(UpstreamConnectionLost(await self._describe_ending(process)))
        except ToolError as error:
            handler.on_connection_lost(UpstreamConnectionLost(error.text))

    def _is_whole_message(self, kept: bytearray, rest: bytes) -> bool:
        """Return whether the beginning of a line is already a message, whose server writes no line end."""
        if self._body_bytes is not None or not rest.rstrip().endswith(b"}") or len(kept) + len(rest) > MAX_HELD_BYTES:
            return False
        return is_rpc_message(bytes(kept) + rest)

    def _find_end(self, piece: bytes, at: int, before: int) -> int:
        """Return where the line or the message from ``at`` ends, or -1. ``before`` bytes of it were read earlier."""
        if self._body_bytes is None:
            return piece.find(b"\n", at)
        end = at + self._body_bytes - before
        return end if end <= len(piece) else -1

    def _line(self, ears: TransportCallbacks, line: bytes) -> None:
        if len(line) > MAX_MESSAGE_BYTES:
            self._too_long(ears, line[:_EDGE_BYTES] + line[-_EDGE_BYTES:])
            return
        announced, self._announced, self._body_bytes = self._announced, None, None
        if not line.strip():
            self._body_bytes = announced
            if self._hold_timer is not None and len(self._spread) < MAX_HELD_BYTES:
                self._spread += line + b"\n"  # a part of the answer's text
            return
        if (header := _HEADER.match(line)) is not None:
            self._announced = int(header[1]) if header[1] else announced
            # The length is not believed. Lines are searched for again, so that one false header does not block the
            # connection.
            if self._announced is not None and self._announced > MAX_MESSAGE_BYTES:
                self._announced = None
            return
        messages = parse_json_rpc_messages(line)
        if messages:
            self._fail_held_answer(ears)
            self._spread.clear()
            self._garbage = 0
        for message in messages:
            ears.on_message(message, None)
        if messages:
            return
        # Reset by each message, so that a server with some log lines between its answers is never cut off.
        self._garbage += 1
        # The request fails now instead of at its time limit, since no further answer will arrive.
        if is_truncated_rpc_response(line):
            self._fail_held_answer(ears)
            self._spread[:] = line + b"\n"
            self._attempts = 0
            self._hold_timer = asyncio.get_running_loop().call_later(HOLD_S, self._fail_held_answer, ears)
            return
        self._collect_spread_message(ears, line)

    def _fail_held_answer(self, ears: TransportCallbacks) -> None:
        """Fail the request whose answer broke off, if there is one."""
        if self._hold_timer is None:
            return
        self._hold_timer.cancel()
        self._hold_timer = None
        failed = UpstreamConnectionLost("the server's answer is not valid JSON")
        ears.on_request_failed(_find_id(bytes(self._spread[:_EDGE_BYTES])), failed)
        self._spread.clear()

    def _collect_spread_message(self, ears: TransportCallbacks, line: bytes) -> None:
        """Collect a message that a server writes over several lines, as JSON with indents or a text with line ends."""
        bare, is_held = line.rstrip(), self._hold_timer is not None
        if bare not in (b"{", b"[") and not self._spread:
            return
        if bare in (b"{", b"[") and not is_held:
            self._spread.clear()
            self._attempts = 0
        self._spread += line + b"\n"
        if len(self._spread) > (MAX_HELD_BYTES if is_held else MAX_MESSAGE_BYTES) or self._attempts > MAX_HELD_ATTEMPTS:
            self._fail_held_answer(ears)
            self._spread.clear()
        elif is_held and not bare.endswith((b"}", b"]")):
            self._garbage -= 1
        elif bare in (b"}", b"]") or is_held:
            self._attempts += 1
            messages = parse_json_rpc_messages(bytes(self._spread))
            if is_held and not messages:
                return
            if self._hold_timer is not None:
                self._hold_timer.cancel()
                self._hold_timer = None
            self._spread.clear()
            self._garbage = 0 if messages else self._garbage
            for message in messages:
                ears.on_message(message, None)
        else:
            # A line of a message that is still incomplete is not invalid.
            self._garbage -= 1

    @staticmethod
    def _too_long(ears: TransportCallbacks, edges: bytes) -> None:
        if looks_like_rpc_response(edges):
            why = ResponseTooLong(f"it exceeds the limit of {MAX_MESSAGE_BYTES // 2**20} MiB")
            ears.on_request_failed(_find_id(edges), why)

    async def _describe_ending(self, process: Process) -> str:
        """Return how a program ended that closed its stdout."""
        try:
            async with asyncio.timeout(GRACE_S):
                exit_text = describe_exit(await process.wait())
        except TimeoutError:
            return "the program closed its stdout"
        except ToolError as error:
            return error.text
        # Read only after the end: most servers write log lines to stderr while they work.
        errors = await _errors_of(process)
        remedies = [
            f"; {path} exists but is not in its sandbox: {how}" for path, how in self._unseen.items() if path in errors
        ]
        return f"{exit_text}; stderr: {errors}{''.join(remedies)}" if errors else exit_text


def _find_id(edges: bytes) -> int | None:
    """Return the id of an answer from the edges of its text; None if they do not have it."""
    found = _LEADING_ID.match(edges) or _TRAILING_ID.search(edges)
    return int(found[1]) if found else None


async def _raise_for_changed_names(guarded: GuardedProcess) -> None:
    """Check the protected names after a call.

    :raises ToolError: ``denied`` if the call changed a protected name
    """
    try:
        await guarded.end_call()
    except ProtectedPathViolation as veto:
        raise ToolError(veto.text, kind="denied") from None


def _describe_violations(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:_MOST_SHOWN]) + (
        f" and {len(paths) - _MOST_SHOWN} more" if len(paths) > _MOST_SHOWN else ""
    )
    return f"The server was not called. Since its last call, {shown} appeared, where no program can write. The server or another program created it. Ask the user to check it, and to remove it if it is not wanted; the next call accepts the current state."


async def _errors_of(process: Process) -> str:
    try:
        _, errors, _ = await process.communicate(b"", 0)
    except ToolError:
        return ""
    return extract_output_tail(bytearray(errors))
