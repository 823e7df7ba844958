"""The stdio transport: a program of this machine, started in its own sandbox, with lines of JSON.

The program belongs to no call: it is started for the first one and ends with its owner. Its operator grants the files and
hosts that it may reach, whoever calls. Of its stderr the part is kept that explains its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import orjson

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Process
from handrail.registry.sources.executables import ending, tail
from handrail.runtime.guard.guard import GuardedProcess, Vetoed
from handrail.upstream.client.conversation import (
    MAX_MESSAGE_BYTES,
    Ears,
    Lost,
    Message,
    TooLong,
)

GRACE_S = 1.0
"""How long a program may take to end by itself once its stdin is closed."""
MOST_GARBAGE = 1_000
"""Lines that are no messages, after which a server is given up."""
MOST_AT_ONCE = 100
"""Messages in one list."""
_MOST_SHOWN = 8
_READ = 1 << 16
_EDGE = 256
_FIRST = re.compile(rb'\A\s*\{\s*(?:"jsonrpc"\s*:\s*"2\.0"\s*,\s*)?"id"\s*:\s*(\d{1,18})\b')
_LAST = re.compile(rb'"id"\s*:\s*(\d{1,18})\s*\}\s*\Z')


class StdioChannel:
    """Implements :class:`~handrail.upstream.client.conversation.Channel`.

    :param start: starts the program
    :param unseen: paths among its arguments that are there and that it was granted nothing of, each with what would
        grant it: said where it complains of one
    """

    def __init__(self, start: Callable[[], Awaitable[Process]], unseen: Mapping[str, str] | None = None) -> None:
        self._start = start
        self._unseen = unseen or {}
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._garbage = 0
        self._closed = False
        self._calls = 0
        self._beginning = asyncio.Lock()

    async def open(self, ears: Ears) -> None:
        try:
            self._process = await self._start()
        except ToolError as error:
            raise Lost(error.text, unsent=True) from None
        self._reader = asyncio.create_task(self._read(self._process, ears), name="mcp: reads a server's stdout")

    async def send(self, message: Message, headers: Mapping[str, str] | None = None) -> None:
        process = self._process
        if process is None or self._closed:
            raise Lost("it has ended", unsent=True)
        line = orjson.dumps(message) + b"\n"
        async with self._writing:
            await process.write(line)

    def abandon(self, request: int) -> bool:
        return False

    @asynccontextmanager
    async def watched(self) -> AsyncGenerator[None]:
        guarded = self._process if isinstance(self._process, GuardedProcess) else None
        if guarded is None:
            yield
            return
        async with self._beginning:
            if not self._calls and (appeared := await guarded.begin()):
                raise ToolError(_appeared(appeared), kind="conflict")
            self._calls += 1
        try:
            try:
                yield
            except Exception:  # it may have done something before it failed
                await _settled(guarded)
                raise
            await _settled(guarded)
        finally:
            self._calls -= 1

    def settled(self, protocol: str, *, modern: bool) -> None:
        pass

    async def aclose(self) -> None:
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(Exception):  # however it takes the request to end, it is killed next
                await process.close_stdin()
                with contextlib.suppress(TimeoutError, ToolError):
                    async with asyncio.timeout(GRACE_S):
                        await process.wait()
            with contextlib.suppress(Exception):
                await process.kill()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._reader

    async def _read(self, process: Process, ears: Ears) -> None:
        """Every line, as it comes. Only what is read is held, and at most one message of it."""
        kept = bytearray()
        skipping = False
        try:
            while piece := await process.read(_READ):
                at = 0
                while (end := piece.find(b"\n", at)) >= 0:
                    if skipping:
                        kept += piece[max(at, end - _EDGE) : end]
                        self._too_long(ears, bytes(kept))
                        skipping = False
                    elif kept:
                        kept += piece[at:end]
                        self._line(ears, bytes(kept))
                    else:
                        self._line(ears, piece[at:end])
                    kept.clear()
                    at = end + 1
                rest = piece[at:]
                if skipping:
                    kept[_EDGE:] = (bytes(kept[_EDGE:]) + rest)[-_EDGE:]
                else:
                    kept += rest
                    if len(kept) > MAX_MESSAGE_BYTES:
                        skipping = True
                        kept[_EDGE:] = kept[-_EDGE:]
                if self._garbage > MOST_GARBAGE:
                    ears.lost(
                        Lost(f"it wrote {MOST_GARBAGE} lines to its stdout that are no messages; logs belong on stderr")
                    )
                    return
            ears.lost(Lost(await self._ending(process)))
        except ToolError as error:
            ears.lost(Lost(error.text))

    def _line(self, ears: Ears, line: bytes) -> None:
        if len(line) > MAX_MESSAGE_BYTES:
            self._too_long(ears, line[:_EDGE] + line[-_EDGE:])
            return
        if not line.strip():
            return
        for message in messages_in(line):
            if message is None:
                self._garbage += 1
                if len(line) > 1 and line.lstrip()[:1] in (b"{", b"["):
                    ears.failed(None, Lost("it answered something that is no JSON"))
            else:
                ears.heard(message, None)

    @staticmethod
    def _too_long(ears: Ears, edges: bytes) -> None:
        found = _FIRST.match(edges) or _LAST.search(edges)
        ears.failed(
            int(found[1]) if found else None,
            TooLong(f"its answer is longer than {MAX_MESSAGE_BYTES // 2**20} MiB; ask it for less at a time"),
        )

    async def _ending(self, process: Process) -> str:
        """What became of a program that closed its stdout."""
        try:
            async with asyncio.timeout(GRACE_S):
                said = ending(await process.wait())
        except TimeoutError:
            return "it closed its stdout"
        except ToolError as error:
            return error.text
        errors = await _errors_of(process)
        remedies = [
            f"; {path} is there, and not in its sandbox: {how}" for path, how in self._unseen.items() if path in errors
        ]
        return f"{said}; stderr: {errors}{''.join(remedies)}" if errors else said


async def _settled(guarded: GuardedProcess) -> None:
    """
    :raises ToolError: ``denied``, for what a call made under a protected name
    """
    try:
        await guarded.settle()
    except Vetoed as veto:
        raise ToolError(veto.text, kind="denied") from None


def _appeared(paths: Sequence[str]) -> str:
    shown = ", ".join(paths[:_MOST_SHOWN]) + (
        f" and {len(paths) - _MOST_SHOWN} more" if len(paths) > _MOST_SHOWN else ""
    )
    return (
        f"nothing was called: since the last call of this server, under names that no program may write, {shown} appeared. "
        "The server, which stays up between its calls, made it, or somebody else did. Have a person look at it, and "
        "remove what nobody wanted; the next call takes things as they are then"
    )


def messages_in(text: bytes) -> list[Message | None]:
    """The messages of a line, or of an HTTP body: one, or several in a list; None for what is none."""
    try:
        message = orjson.loads(text)
    except (orjson.JSONDecodeError, RecursionError):
        return [None]
    if isinstance(message, dict):
        return [cast("Message", message)]
    if isinstance(message, list):
        several = cast("list[Any]", message)[:MOST_AT_ONCE]
        return [cast("Message", one) if isinstance(one, dict) else None for one in several] or [None]
    return [None]


async def _errors_of(process: Process) -> str:
    try:
        _, errors, _ = await process.communicate(b"", 0)
    except ToolError:
        return ""
    return tail(bytearray(errors))
