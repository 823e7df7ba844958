"""The runtime of a tool that runs here for a call that is carried out in another process.

Every door asks the holder, which judges it as for a tool of its own. Safe to use from any thread of the tool's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from handrail.arbiter.execution import STOPPED_TEXT, kind_of_stop
from handrail.arbiter.output.plain import TooLarge
from handrail.arbiter.peers import said
from handrail.contract.call import Result
from handrail.contract.doors.files import FileBytes, FileLines, FileStat, Found, Written
from handrail.contract.doors.peer import LOG_LEVELS, LogLevel
from handrail.contract.doors.runtime import ClientContext, Question, Response, Secrets
from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Completed
from handrail.contract.session import StopReason
from handrail.contract.tool.requires import CapabilitySet
from handrail.contract.tool.spec import ToolSpec
from handrail.ipc.codec.descriptions import capabilities_of
from handrail.ipc.codec.doors import DOORS, NET_REQUEST, PREFIX, SHELL_RUN, STREAMS
from handrail.ipc.codec.values import Malformed, an_object, failure_of, pack
from handrail.ipc.delegating import ByCallOnly
from handrail.ipc.jobs import RemoteJobs
from handrail.ipc.joiner.catalog import RemoteCatalog
from handrail.ipc.peers import RemotePeerDoor
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Refused
from handrail.runtime.secrets import NO_SECRETS, DeclaredSecrets, SecretStore
from handrail.session.events import PASSING

Ask = Callable[..., Any]


class Streams:
    """The listeners to the output of programs, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._listeners: dict[int, Callable[[bytes], None]] = {}

    def open(self, listener: Callable[[bytes], None]) -> int:
        number = next(self._numbers)
        self._listeners[number] = listener
        return number

    def close(self, number: int) -> None:
        self._listeners.pop(number, None)

    def told(self, number: int, piece: bytes) -> None:
        if (listener := self._listeners.get(number)) is not None:
            listener(piece)


class RemoteCancellation:
    """Implements :class:`~handrail.contract.doors.runtime.Cancellation`."""

    reason: StopReason | None = None

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def check(self) -> None:
        if self.reason is not None:
            raise ToolError(f"the call was {STOPPED_TEXT[self.reason]}", kind=kind_of_stop(self.reason))


_PIECE = 64 * 1024
"""Bytes of output that one message carries."""


class RemoteRuntime(ByCallOnly):
    """Implements :class:`~handrail.contract.doors.runtime.Runtime` over a connection.

    :param number: of the run, by which the holder knows which call's doors are used
    :param secrets: those of this process, which are for its own tools
    :param around: what does not change during a call; empty for a tool that takes no runtime
    """

    def __init__(
        self,
        connection: Connection,
        number: int,
        spec: ToolSpec,
        around: Mapping[str, Any],
        streams: Streams,
        secrets: SecretStore = NO_SECRETS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._number = number
        self._around = around
        self._streams = streams
        self._unsaid: Message | None = None
        self.tool_id = spec.id
        self.secrets: Secrets = DeclaredSecrets(spec, secrets)
        self.cancellation = RemoteCancellation()
        self.files = RemoteFiles(self)
        self.search = RemoteSearch(self)
        self.shell = RemoteShell(self)
        self.net = RemoteNet(self)
        self.state = RemoteState(self)
        self.people = RemotePeople(self)
        self.catalog = RemoteCatalog(self.ask)
        self.jobs = RemoteJobs(self.ask)

    @property
    def call_id(self) -> str:
        return self._around["call_id"]

    @property
    def session_id(self) -> str:
        return self._around["session_id"]

    @property
    def agent(self) -> str:
        return self._around["agent"]

    @property
    def topic(self) -> str | None:
        return self._around["topic"]

    @property
    def client(self) -> ClientContext | None:
        told = self._around["client"]
        return None if told is None else ClientContext(**told)

    @property
    def workdir(self) -> str:
        return self._around["workdir"]

    @property
    def capabilities(self) -> CapabilitySet:
        return capabilities_of(self._around["capabilities"])

    @property
    def config(self) -> Mapping[str, str]:
        return self._around["config"]

    @property
    def max_output(self) -> int:
        return self._around["max_output"]

    @property
    def peer(self) -> RemotePeerDoor:
        return RemotePeerDoor(self, self._around.get("peer", ()))

    def progress(
        self,
        message: str = "",
        *,
        fraction: float | None = None,
        done: float | None = None,
        total: float | None = None,
    ) -> None:
        self.tell("progress", {"message": str(message), "fraction": fraction, "done": done, "total": total})

    def log(self, level: LogLevel, data: Any, logger: str | None = None) -> None:
        if level not in LOG_LEVELS:
            raise ToolError(f"{level!r:.40} is no level; there are {', '.join(LOG_LEVELS)}", kind="invalid_input")
        self.tell("log", said(level, data, logger))

    def output(self, piece: str | bytes) -> None:
        data = piece.encode("utf-8", "backslashreplace") if isinstance(piece, str) else bytes(piece)
        for start in range(0, len(data), _PIECE):
            self.tell("shown", {"piece": data[start : start + _PIECE]})

    def tell(self, what: str, body: Message) -> None:
        """Send a notice, which is not answered, from any thread."""
        self._on_the_loop(partial(self._say, what), {"run": self._number, **body})

    def partial(self, data: Any) -> None:
        try:
            value = pack(data)
        except (TooLarge, MemoryError) as error:
            value = pack(f"<partial output that cannot be shown ({type(error).__name__})>")
        self._on_the_loop(self._keep, {"run": self._number, "value": value})

    async def call(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        return await self.ask("call", tool_id=tool_id, arguments=dict(arguments))

    def stop(self, reason: StopReason) -> None:
        """Note that the call was told to end."""
        self.cancellation.reason = self.cancellation.reason or reason
        self._say_partial(at_once=True)

    async def ask(self, door: str, **arguments: Any) -> Any:
        """Ask a door of the call's runtime in the holder.

        :raises ToolError: as that said, or when it cannot be asked
        """
        if asyncio.get_running_loop() is self._loop:
            return await self._asked(door, arguments)
        there = asyncio.run_coroutine_threadsafe(self._asked(door, arguments), self._loop)
        return await asyncio.wrap_future(there)

    async def _asked(self, door: str, arguments: Mapping[str, Any]) -> Any:
        body = {"run": self._number, "arguments": arguments}
        try:
            answer = an_object(await self._connection.request(PREFIX + door, body, settle=True))
            if (failure := failure_of(answer)) is not None:
                raise failure
            return DOORS[door].gives(answer.get("value"))
        except ConnectionLost:
            text = f"{door} cannot be asked: the process that holds the workspace has gone"
            raise ToolError(text, kind="unavailable") from None
        except Refused as refused:
            self.cancellation.check()
            kind = "limit" if refused.kind == "limit" else "cancelled" if refused.kind == "not_running" else "backend"
            raise ToolError(refused.text, kind=kind) from None
        except Malformed as error:
            raise ToolError(f"{door} was answered by what cannot be read: {error}", kind="backend") from None

    def streaming(self, listener: Callable[[bytes], None]) -> int:
        """A number by which pieces of a program's output find their way to ``listener``."""
        here = asyncio.get_running_loop()
        if here is self._loop:
            return self._streams.open(listener)
        return self._streams.open(lambda piece: _called_in(here, listener, piece))

    async def listening(self, door: str, listener: Callable[[bytes], None] | None, **arguments: Any) -> Any:
        """As :meth:`ask`, for a door that sends pieces to ``listener`` before it answers."""
        name = STREAMS[door]
        if listener is None:
            return await self.ask(door, **arguments, **{name: None})
        failures: list[BaseException] = []

        def listen(piece: bytes) -> None:
            try:
                if not failures:
                    listener(piece)
            except Exception as error:  # ends the run, as it does where the program is
                failures.append(error)
                running.cancel()

        stream = self.streaming(listen)
        running = asyncio.ensure_future(self.ask(door, **arguments, **{name: stream}))
        try:
            return await running
        except asyncio.CancelledError:
            if failures:
                raise failures[0] from None
            raise
        finally:
            self._streams.close(stream)

    def _on_the_loop(self, call: Callable[[Message], None], body: Message) -> None:
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            call(body)
        else:
            with contextlib.suppress(RuntimeError):  # closed: nobody hears it any more
                self._loop.call_soon_threadsafe(call, body)

    def _say(self, what: str, body: Message) -> None:
        with contextlib.suppress(Refused):  # longer than any message may be
            self._connection.notify(what, body, may_be_left_out=what in PASSING)

    def _keep(self, body: Message) -> None:
        """Keep partial data to send: of several at once only the last, and while the holder is behind only once it is needed."""
        if self._unsaid is None:
            self._loop.call_soon(self._say_partial)
        self._unsaid = body

    def _say_partial(self, *, at_once: bool = False) -> None:
        if (body := self._unsaid) is None:
            return
        try:
            if self._connection.notify("partial", body, may_be_left_out=not at_once):
                self._unsaid = None
        except Refused:  # too long to be sent
            self._unsaid = None


def _called_in(loop: asyncio.AbstractEventLoop, listener: Callable[[bytes], None], piece: bytes) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(listener, piece)


class RemoteFiles:
    """Implements :class:`~handrail.contract.doors.files.Files`."""

    def __init__(self, on: RemoteRuntime) -> None:
        self._on = on

    async def stat(self, path: str) -> FileStat:
        return await self._on.ask("files.stat", path=path)

    async def read_bytes(self, path: str, *, start: int = 0, max_bytes: int | None = None) -> FileBytes:
        return await self._on.ask("files.read_bytes", path=path, start=start, max_bytes=max_bytes)

    async def read_lines(
        self, path: str, *, first: int = 1, count: int | None = None, max_bytes: int = 200_000, max_line: int = 2_000
    ) -> FileLines:
        return await self._on.ask(
            "files.read_lines", path=path, first=first, count=count, max_bytes=max_bytes, max_line=max_line
        )

    async def list(self, path: str) -> Sequence[FileStat]:
        return await self._on.ask("files.list", path=path)

    async def read_for_edit(self, path: str, *, max_bytes: int = 16 * 1024 * 1024) -> bytes:
        return await self._on.ask("files.read_for_edit", path=path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes, *, over: bytes | Literal["new", "seen"] = "seen") -> Written:
        return await self._on.ask("files.write", path=path, data=data, over=over)


class RemoteSearch:
    """Implements :class:`~handrail.contract.doors.files.Search`."""

    def __init__(self, on: RemoteRuntime) -> None:
        self._on = on

    async def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        literal: bool = False,
        max_matches: int = 10_000,
    ) -> Found:
        return await self._on.ask(
            "search.grep",
            pattern=pattern,
            path=path,
            glob=glob,
            ignore_case=ignore_case,
            literal=literal,
            max_matches=max_matches,
        )

    async def glob(self, pattern: str, path: str = ".", *, hidden: bool = False, max_paths: int = 100_000) -> Found:
        return await self._on.ask("search.glob", pattern=pattern, path=path, hidden=hidden, max_paths=max_paths)


class RemoteShell:
    """Implements :class:`~handrail.contract.doors.runtime.Shell`."""

    def __init__(self, on: RemoteRuntime) -> None:
        self._on = on

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
        trusted: bool = False,
        on_output: Callable[[bytes], None] | None = None,
    ) -> Completed:
        given: Any = command if isinstance(command, str) else list(command)
        return await self._on.listening(
            SHELL_RUN,
            on_output,
            command=given,
            cwd=cwd,
            stdin=stdin,
            environment=None if environment is None else dict(environment),
            apart=apart,
            trusted=trusted,
        )

    async def hidden(self, paths: Sequence[str]) -> Sequence[str]:
        return await self._on.ask("shell.hidden", paths=list(paths))


class RemoteNet:
    """Implements :class:`~handrail.contract.doors.runtime.Net`: the holder judges, dials and reads."""

    def __init__(self, on: RemoteRuntime) -> None:
        self._on = on

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        max_bytes: int = 16 * 1024 * 1024,
        timeout_ms: int = 30_000,
        max_redirects: int = 5,
        on_body: Callable[[bytes], None] | None = None,
    ) -> Response:
        return await self._on.listening(
            NET_REQUEST,
            on_body,
            method=method,
            url=url,
            headers=None if headers is None else dict(headers),
            body=body,
            max_bytes=max_bytes,
            timeout_ms=timeout_ms,
            max_redirects=max_redirects,
        )


class RemoteState:
    """Implements :class:`~handrail.contract.doors.runtime.State`."""

    def __init__(self, on: RemoteRuntime) -> None:
        self._on = on

    async def get(self, key: str) -> Any:
        return await self._on.ask("state.get", key=key)

    async def put(self, key: str, value: Any) -> None:
        await self._on.ask("state.put", key=key, value=value)


class RemotePeople:
    """Implements :class:`~handrail.contract.doors.runtime.People`."""

    def __init__(self, on: RemoteRuntime) -> None:
        self._on = on

    async def answer(self, questions: Sequence[Question]) -> list[list[str]]:
        return await self._on.ask("people.answer", questions=[asdict(question) for question in questions])
