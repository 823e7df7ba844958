"""The runtime of a tool that runs in this process for a call of the lease holder.

Every service sends requests to the lease holder, which evaluates them as for its own tools. The runtime is safe to use from
any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from handrail.arbiter.execution import STOPPED_TEXT, kind_of_stop
from handrail.arbiter.output.plain import TooLarge
from handrail.arbiter.peers import said
from handrail.contract.call import Result
from handrail.contract.codec import Malformed, an_object
from handrail.contract.doors.peer import LOG_LEVELS, LogLevel, PeerDoor
from handrail.contract.doors.runtime import ClientContext, Runtime, Secrets
from handrail.contract.errors import ToolError
from handrail.contract.session import StopReason
from handrail.contract.tool.requires import CapabilitySet
from handrail.contract.tool.spec import ToolSpec
from handrail.ipc.codec.interfaces import CALL, DOORS, PREFIX, WIRE, Method, method_of, methods_of, proxy
from handrail.ipc.codec.values import failure_of, pack
from handrail.ipc.holder.remote import RemotePeerDoor
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Refused
from handrail.runtime.secrets import NO_SECRETS, DeclaredSecrets, SecretStore
from handrail.session.events import PASSING

if TYPE_CHECKING:
    from handrail.contract.doors.agents import Agents
    from handrail.contract.doors.channels import Channels, Triggers
    from handrail.contract.doors.files import Files, Search
    from handrail.contract.doors.jobs import Catalog, Jobs, Terminals
    from handrail.contract.doors.memory import Skills, Transcript
    from handrail.contract.doors.offers import Offers
    from handrail.contract.doors.runtime import Net, People, Shell, State
    from handrail.contract.tool.spec import Opened


class Streams:
    """The listeners for the output of programs, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._listeners: dict[int, Callable[[bytes], None]] = {}

    def open(self, listener: Callable[[bytes], None]) -> int:
        number = next(self._numbers)
        self._listeners[number] = listener
        return number

    def close(self, number: int) -> None:
        self._listeners.pop(number, None)

    def told(self, stream: int, piece: bytes) -> None:
        if (listener := self._listeners.get(stream)) is not None:
            listener(piece)


class RemoteCancellation:
    """A :class:`~handrail.contract.doors.runtime.Cancellation` for a run in this process."""

    reason: StopReason | None = None

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def check(self) -> None:
        if self.reason is not None:
            raise ToolError(f"The call was {STOPPED_TEXT[self.reason]}.", kind=kind_of_stop(self.reason))


_PIECE = 64 * 1024
"""The maximum size of output in one message, in bytes."""


class RemoteRuntime:
    """A :class:`~handrail.contract.doors.runtime.Runtime` over a connection.

    :param number: the number of the run, by which the lease holder finds the call
    :param spec: the spec of the tool; for resources and prompts, a spec without secrets
    :param around: the values that stay constant during a call; empty for a tool without a runtime
    :param secrets: the secrets of this process, for its own tools
    """

    if TYPE_CHECKING:  # each is created at its first use
        agents: Agents
        catalog: Catalog
        channels: Channels
        files: Files
        jobs: Jobs
        net: Net
        offers: Offers
        opened: Opened
        people: People
        search: Search
        shell: Shell
        skills: Skills
        state: State
        terminals: Terminals
        transcript: Transcript
        triggers: Triggers

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

    def __getattr__(self, name: str) -> Any:
        protocol = DOORS.get(name)
        if protocol is None:
            raise AttributeError(name)
        door: object = proxy(cast("type[object]", protocol), f"{name}.", self.ask)
        setattr(self, name, door)
        return door

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
        return WIRE.form_of(ClientContext | None).read(self._around["client"])

    @property
    def workdir(self) -> str:
        return self._around["workdir"]

    @property
    def capabilities(self) -> CapabilitySet:
        return WIRE.reader_of(CapabilitySet)(self._around["capabilities"])

    @property
    def config(self) -> Mapping[str, str]:
        return self._around["config"]

    @property
    def max_output(self) -> int:
        return self._around["max_output"]

    @property
    def peer(self) -> PeerDoor:
        there = proxy(PeerDoor, "peer.", self.ask)
        return RemotePeerDoor(there, partial(self.tell, "let_go", {}), self._around.get("peer", ()))

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
            raise ToolError(
                f"Invalid log level: {level!r:.40}. Expected one of: {', '.join(LOG_LEVELS)}.", kind="invalid_input"
            )
        self.tell("log", said(level, data, logger))

    def output(self, piece: str | bytes) -> None:
        data = piece.encode("utf-8", "backslashreplace") if isinstance(piece, str) else bytes(piece)
        for start in range(0, len(data), _PIECE):
            self.tell("shown", {"piece": data[start : start + _PIECE]})

    def tell(self, what: str, body: Message) -> None:
        """Send a notification, from any thread."""
        self._on_the_loop(partial(self._say, what), {"run": self._number, **body})

    def partial(self, data: Any) -> None:
        try:
            value = pack(data)
        except (TooLarge, MemoryError) as error:
            value = pack(f"<partial output cannot be shown ({type(error).__name__})>")
        self._on_the_loop(self._keep, {"run": self._number, "value": value})

    async def call(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        method = method_of(methods_of(Runtime)[CALL])
        return await self.ask(CALL, method, {"tool_id": tool_id, "arguments": dict(arguments)})

    def stop(self, reason: StopReason) -> None:
        """Mark the call as stopped."""
        self.cancellation.reason = self.cancellation.reason or reason
        self._say_partial(at_once=True)

    async def ask(self, op: str, method: Method, told: dict[str, Any]) -> Any:
        """Invoke a service method of the call's runtime in the lease holder.

        :raises ToolError: the error of the service, or if the lease holder is not available
        """
        if method.hears is not None and told[method.hears] is not None:
            return await self._listening(op, method, told)
        if asyncio.get_running_loop() is self._loop:
            return await self._asked(op, method, told)
        there = asyncio.run_coroutine_threadsafe(self._asked(op, method, told), self._loop)
        return await asyncio.wrap_future(there)

    async def _asked(self, door: str, method: Method, told: Mapping[str, Any]) -> Any:
        body = {"run": self._number, "arguments": told}
        try:
            answer = an_object(await self._connection.request(PREFIX + door, body, settle=True))
            if (failure := failure_of(answer)) is not None:
                raise failure
            return method.gives.read(answer.get("value"))
        except ConnectionLost:
            text = f"`{door}` is unavailable: the process that holds the workspace has disconnected."
            raise ToolError(text, kind="unavailable") from None
        except Refused as refused:
            self.cancellation.check()
            kind = "limit" if refused.kind == "limit" else "cancelled" if refused.kind == "not_running" else "backend"
            raise ToolError(refused.text, kind=kind) from None
        except Malformed as error:
            raise ToolError(f"`{door}` returned an invalid answer: {error}.", kind="backend") from None

    def streaming(self, listener: Callable[[bytes], None]) -> int:
        """Register a listener for the output of a program, and return its number."""
        here = asyncio.get_running_loop()
        if here is self._loop:
            return self._streams.open(listener)
        return self._streams.open(lambda piece: _called_in(here, listener, piece))

    async def _listening(self, op: str, method: Method, told: dict[str, Any]) -> Any:
        """Invoke a service method that sends pieces before its answer; see :meth:`ask`."""
        assert method.hears is not None
        listener: Callable[[bytes], None] = told[method.hears]
        failures: list[BaseException] = []

        def listen(piece: bytes) -> None:
            try:
                if not failures:
                    listener(piece)
            except Exception as error:  # it ends the run, as in the process of the program
                failures.append(error)
                running.cancel()

        stream = self.streaming(listen)
        asked = {**told, method.hears: stream}
        if asyncio.get_running_loop() is self._loop:
            running: asyncio.Future[Any] = asyncio.ensure_future(self._asked(op, method, asked))
        else:
            there = asyncio.run_coroutine_threadsafe(self._asked(op, method, asked), self._loop)
            running = asyncio.wrap_future(there)
        try:
            return await running
        except asyncio.CancelledError:
            running.cancel()
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
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call, body)

    def _say(self, what: str, body: Message) -> None:
        with contextlib.suppress(Refused):  # too long for a message
            self._connection.notify(what, body, may_be_left_out=what in PASSING)

    def _keep(self, body: Message) -> None:
        """Queue partial data.

        Only the latest is sent, and while the lease holder is behind, only when it is needed.
        """
        if self._unsaid is None:
            self._loop.call_soon(self._say_partial)
        self._unsaid = body

    def _say_partial(self, *, at_once: bool = False) -> None:
        if (body := self._unsaid) is None:
            return
        try:
            if self._connection.notify("partial", body, may_be_left_out=not at_once):
                self._unsaid = None
        except Refused:  # too long for a message
            self._unsaid = None


def _called_in(loop: asyncio.AbstractEventLoop, listener: Callable[[bytes], None], piece: bytes) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(listener, piece)
