"""The tools of a client process: arbitrated and recorded here, executed there.

The lease holder does every step of a call. Only the tool's function runs in the client process. Its requests to the runtime
come back over the wire to the real runtime of the call: only while that call runs, and only from that process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from handrail.arbiter.execution import Execution
from handrail.arbiter.generators import OVER, running
from handrail.arbiter.peers import MAX_MESSAGE
from handrail.contract.codec import Malformed, an_object, read_fields
from handrail.contract.doors.peer import CAPABILITY_OF, LogLevel
from handrail.contract.doors.runtime import ClientContext, Question, Runtime
from handrail.contract.errors import ToolError
from handrail.contract.session import StopReason
from handrail.contract.tool.requires import CapabilitySet
from handrail.contract.tool.tool import Tool
from handrail.contract.tool.triggers import OWN, Fired, TriggerTool, Waiting
from handrail.ipc.codec.interfaces import PREFIX, WIRE, DoorMethod, NamedClass, door_methods, heeding, method_of
from handrail.ipc.codec.mirror import Description, read_descriptions
from handrail.ipc.codec.values import failure_of, of_failure, unpack
from handrail.ipc.holder.remote import kinds_open
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Op, Refused
from handrail.store.encoding import decode, encode

_GONE = "The process that provides `{}` has disconnected. Nothing was run. Ask the user to start it again."
_OF_CLIENTS = frozenset(CAPABILITY_OF.values())


class _NotThere(ToolError):
    """The client process has disconnected."""


class _Run:
    """One call that is running in the client process."""

    __slots__ = ("doors", "kept", "number", "over", "runtime", "tool_id")

    def __init__(self, number: int, tool_id: str, runtime: Runtime) -> None:
        self.number = number
        self.tool_id = tool_id
        self.runtime = runtime
        self.doors: set[asyncio.Task[Any]] = set()
        self.kept: Any = None
        self.over = False


class BroughtTools:
    """The tools of one client process.

    :param connection: the connection to the process; nothing is sent on it yet
    :param described: the tools, as :func:`~handrail.ipc.codec.mirror.describe` describes them
    :param secrets: the names of the secrets that the process has for them
    :raises LoadError: with all faults of the descriptions
    """

    def __init__(self, connection: Connection, described: object, secrets: Iterable[str] = ()) -> None:
        self.secrets = frozenset(secrets)
        self._connection = connection
        self._numbers = itertools.count(1)
        self.states = itertools.count(1)
        self._runs: dict[int, _Run] = {}
        self.tools: tuple[Tool, ...] = self.replaced(described)
        self.requests: Mapping[str, Op] = {
            PREFIX + name: Op(partial(self._through, name, door), cancel_when_lost=True)
            for name, door in door_methods().items()
        }
        """The requests that the client process may send: the runtime services of the calls that it runs."""
        self.notices: Mapping[str, Callable[[Any], None]] = {
            "progress": heeding(self._progress),
            "partial": heeding(self._partial),
            "log": heeding(self._log),
            "shown": heeding(self._shown),
            "let_go": heeding(self._let_go),
        }

    @property
    def process(self) -> str:
        """The name of the process in texts for users."""
        peer = self._connection.peer
        return f"process {peer.pid}" if peer is not None and peer.pid else "another process"

    def replaced(self, described: object) -> tuple[Tool, ...]:
        """Replace the tools of the process, and return the new ones. Running calls of the old tools continue.

        :raises LoadError: with all faults; the old tools stay
        """
        process = self.process
        self.tools = tuple(_brought(one, process, self) for one in read_descriptions(described, process))
        return self.tools

    def forget(self, state: int) -> None:
        """End the open state of a stateful tool in the client process.

        Its code cannot use the runtime meanwhile.
        """
        self._connection.notify("forget", {"state": state})

    async def carry_out(
        self, tool: BroughtTool, args: dict[str, Any], runtime: Runtime, step: Message | None = None
    ) -> object:
        """Execute a tool in the client process; see :meth:`BroughtTool.execute`.

        :param step: the step of a stateful tool
        """
        tool_id = tool.spec.id
        clients = not _OF_CLIENTS.isdisjoint(tool.spec.requires.capabilities)
        body: Message = {
            "tool": tool_id,
            "definition": tool.definition,
            "arguments": _exactly(tool_id, args),
            "around": _around(runtime, clients=clients) if tool.takes_runtime else None,
            "step": None if step is None else _exactly(tool_id, step),
        }
        return await self._run("execute", tool_id, runtime, body)

    async def offer(self, number: int, method: str, arguments: dict[str, Any], runtime: Runtime) -> object:
        """Call a method of one of the process's resource providers, for the call of ``runtime``.

        :param number: the number of the provider
        """
        body: Message = {
            "offering": number,
            "method": method,
            "arguments": _exactly(runtime.tool_id, arguments),
            "around": {**_around(runtime, clients=False), "tool_id": runtime.tool_id},
        }
        return await self._run("offer", runtime.tool_id, runtime, body)

    async def _run(self, op: str, tool_id: str, runtime: Runtime, body: Message) -> object:
        """Run an operation in the client process for a call, and serve the call's runtime to it meanwhile."""
        cancellation = runtime.cancellation
        if cancellation.requested:  # since the last check
            raise asyncio.CancelledError
        run = _Run(next(self._numbers), tool_id, runtime)
        self._runs[run.number] = run
        if isinstance(cancellation, Execution):
            cancellation.told = partial(self._stop, run)
        try:
            asking = asyncio.ensure_future(self._connection.request(op, {"run": run.number, **body}))
            return _outcome(await self._answer(run, asking))
        except ConnectionLost as lost:
            raise self._gone(run, lost) from None
        except Refused as refused:
            raise _refusal(run, refused) from None
        except Malformed as error:
            raise ToolError(
                f"The process of `{tool_id}` returned an invalid answer: {error}. Ask the user to restart it.",
                kind="backend",
            ) from None
        finally:
            if isinstance(cancellation, Execution):
                cancellation.told = None
            run.over = True
            del self._runs[run.number]
            await _ended(run.doors)

    async def questions(self, tool: BroughtTool, args: dict[str, Any]) -> Sequence[Question]:
        """Return the tool's questions to the user; see :meth:`~handrail.contract.tool.tool.Tool.questions`."""
        body = {"arguments": _exactly(tool.spec.id, args)}
        return await self._asked(tool, "questions", body, Sequence[Question], settle=True)

    async def never(self, tool: BroughtTool, arguments: Mapping[str, Any]) -> bool:
        """Return whether a trigger with times would never fire."""
        body = {"arguments": dict(arguments), "now_ns": time.time_ns()}
        return await self._asked(tool, "due", body, int | None) is None

    async def wait(self, tool: BroughtTool, waiting: Waiting) -> Fired:
        """Wait until a trigger fires; see :meth:`~handrail.contract.tool.triggers.TriggerTool.wait`.

        If the process has disconnected, nothing fires until another process with this tool opens the session.
        """
        try:
            return await self._asked(tool, "wait", {"waiting": WIRE.write(Waiting, waiting)}, Fired)
        except _NotThere:
            return await asyncio.get_running_loop().create_future()

    async def _asked(self, tool: BroughtTool, asks: str, body: Message, gives: Any, *, settle: bool = False) -> Any:
        """Send a request about a tool that is not a call of it.

        :param gives: the type of the answer
        :raises ToolError: the error of the tool; ``unavailable`` if the process has disconnected or refuses, ``backend`` if the
            answer is invalid
        """
        tool_id = tool.spec.id
        asked = {"tool": tool_id, "definition": tool.definition, **body}
        try:
            told = an_object(await self._connection.request(asks, asked, settle=settle))
            if (failure := failure_of(told)) is not None:
                raise failure
            return WIRE.form_of(gives).read(told.get("value"))
        except ConnectionLost:
            raise _NotThere(_GONE.format(tool_id), kind="unavailable") from None
        except Refused as refused:
            raise ToolError(f"`{tool_id}` is unavailable: {refused.text}", kind="unavailable") from None
        except Malformed as error:
            raise ToolError(
                f"The process of `{tool_id}` returned an invalid answer: {error}. Ask the user to restart it.",
                kind="backend",
            ) from None

    async def _answer(self, run: _Run, asking: asyncio.Future[Any]) -> Any:
        """Wait until the call has ended, also if this wait is cancelled.

        Its locks are released only when nothing of it runs.
        """
        while not asking.done():
            try:
                await asyncio.wait((asking,))
            except asyncio.CancelledError:
                self._stop(run, "user")
        return asking.result()

    def _stop(self, run: _Run, reason: StopReason) -> None:
        self._connection.notify("stop", {"run": run.number, "reason": reason})

    def _gone(self, run: _Run, lost: ConnectionLost) -> ToolError:
        if not lost.sent:
            return ToolError(_GONE.format(run.tool_id), kind="unavailable")
        return ToolError(
            f"The process of `{run.tool_id}` disconnected during the call. It is unknown whether the call took effect. "
            "Check the result before you call it again.",
            kind="interrupted",
            data=run.kept,
        )

    # ── requests of the client process ───────────────────────────────────────────────────────────

    async def _through(self, name: str, door: DoorMethod, body: Any) -> Message:
        """Call a runtime service of a call that the process is running."""
        of, method = door.of, method_of(door.function)
        try:
            asked = read_fields(body, {"run": WIRE.reader_of(int), "arguments": an_object})
            arguments = read_fields(asked["arguments"], method.readers)
        except Malformed as error:
            raise Refused("malformed", f"Invalid request `{name}`: {error}.") from None
        run = self._runs.get(asked["run"])
        if run is None or run.over:
            raise Refused(
                "not_running", f"`{name}` is only available during a call: run {asked['run']} is not running."
            )
        if method.hears is not None and (stream := arguments[method.hears]) is not None:
            arguments[method.hears] = partial(self._output, stream)
        task = asyncio.current_task()
        assert task is not None
        run.doors.add(task)
        try:
            for key, one in arguments.items():
                if type(one) is NamedClass:
                    arguments[key] = await self._class(one, arguments["arguments"])
            answer = await of(run.runtime)(**arguments)
            return {"value": answer if method.gives.write is None else method.gives.write(answer)}
        except Exception as error:  # the tool may catch the errors of its runtime
            return of_failure(error)
        finally:
            run.doors.discard(task)

    async def _class(self, named: NamedClass, arguments: Mapping[str, Any]) -> BroughtTrigger:
        """Return a trigger class of the client process.

        :param arguments: the arguments of the trigger that will be added
        :raises ToolError: ``invalid_input`` if the process has no such class, or if the trigger would never fire
        """
        for tool in self.tools:
            if isinstance(tool, BroughtTrigger) and (tool.spec.id, tool.definition) == (named.tool, named.definition):
                await tool.check_time(arguments)
                return tool
        raise ToolError(
            f"{named.tool[:80]!r} is not a trigger class of this process. Pass one of its trigger classes.",
            kind="invalid_input",
        )

    def _output(self, stream: int, piece: bytes) -> None:
        self._connection.notify("output", {"stream": stream, "piece": piece})

    def _progress(
        self, run: int, message: str, fraction: float | None, done: float | None, total: float | None
    ) -> None:
        if (found := self._runs.get(run)) is not None:
            found.runtime.progress(message[:MAX_MESSAGE], fraction=fraction, done=done, total=total)

    def _shown(self, run: int, piece: bytes) -> None:
        if (found := self._runs.get(run)) is not None:
            found.runtime.output(piece)

    def _log(self, run: int, level: LogLevel, data: Any, logger: str | None) -> None:
        if (found := self._runs.get(run)) is not None:
            found.runtime.log(level, data, logger)

    def _let_go(self, run: int) -> None:
        if (found := self._runs.get(run)) is not None:
            found.runtime.peer.let_go()

    def _partial(self, run: int, value: object) -> None:
        if (found := self._runs.get(run)) is not None:
            found.kept = value
            found.runtime.partial(value)


def _around(runtime: Runtime, *, clients: bool) -> Message:
    """Return the values that stay constant during a call.

    :param clients: whether the tool may send requests to the client
    """
    return {
        "call_id": runtime.call_id,
        "session_id": runtime.session_id,
        "agent": runtime.agent,
        "topic": runtime.topic,
        "client": WIRE.write(ClientContext | None, runtime.client),
        "workdir": runtime.workdir,
        "capabilities": WIRE.write(CapabilitySet, runtime.capabilities),
        "config": dict(runtime.config),
        "max_output": runtime.max_output,
        "peer": kinds_open(runtime.peer) if clients else [],
    }


def _exactly(tool_id: str, args: dict[str, Any]) -> Any:
    """Return the arguments in a form that arrives unchanged.

    The schema has checked that they are JSON values.

    :raises ToolError: ``invalid_input`` if a program passed values that the wire cannot express
    """
    try:
        return orjson.Fragment(orjson.dumps(args))
    except TypeError:  # keys that are not texts, half characters, integers of more than 64 bits
        pass
    try:
        exact = decode(encode(args, 1 << 62)) == _as_lists(args)
    except RecursionError:
        exact = False
    if not exact:
        raise ToolError(
            f"The arguments of `{tool_id}` cannot be sent to its process unchanged. "
            "Pass JSON values only: text keys, and integers with fewer than a thousand digits.",
            kind="invalid_input",
        )
    return args


def _as_lists(value: Any) -> Any:
    """Convert tuples to lists, as they arrive."""
    if isinstance(value, dict):
        return {key: _as_lists(inner) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [_as_lists(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _outcome(answer: object) -> object:
    """Return the return value of the tool.

    :raises Exception: the exception that the tool raised
    :raises asyncio.CancelledError: if the tool ended because the call was stopped
    :raises Malformed: if the answer is invalid
    """
    told = an_object(answer)
    if told.get("cancelled") is True:
        raise asyncio.CancelledError
    if told.get("over") is True:
        return OVER
    if (failure := failure_of(told)) is not None:
        raise failure
    return unpack(told.get("value"))


def _refusal(run: _Run, refused: Refused) -> ToolError:
    if refused.kind == "limit":
        ran = " ran, and " if refused.text.startswith("the answer") else ": "
        return ToolError(f"`{run.tool_id}`{ran}{refused.text}", kind="limit")
    if refused.kind == "cancelled":
        return ToolError(
            f"The process of `{run.tool_id}` is shutting down. It is unknown whether the call took effect. "
            "Check the result before you call it again.",
            kind="interrupted",
            data=run.kept,
        )
    kind = "unavailable" if refused.kind in ("unavailable", "unknown_op") else "backend"
    return ToolError(f"`{run.tool_id}` failed: {refused.text}", kind=kind)


async def _ended(doors: set[asyncio.Task[Any]]) -> None:
    """End the open service requests of a call, also if this task is cancelled.

    It runs before the locks of the call are released.
    """
    cancelled: asyncio.CancelledError | None = None
    for task in tuple(doors):
        task.cancel()
    while doors:
        try:
            await asyncio.wait(tuple(doors))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


# ── the tools on the lease holder's side ─────────────────────────────────────────────────────────


class BroughtTool(Tool):
    """One tool of a client process.

    It has the same label as the lease holder's Python tools (:attr:`~handrail.contract.tool.tool.Tool.trusted`): it is code of
    the same operator, confined by the checks of the runtime, not by the operating system.
    """

    blocking = True
    """A cancellation here does not end the work there: the process is asked to stop it, and the locks stay until it has."""

    def __init__(self, description: Description, process: str, home: BroughtTools) -> None:
        self.spec = description.spec
        self.own_secrets = home.secrets.union(description.settings)
        self.definition = description.definition
        self.takes_runtime = description.takes_runtime
        self.asks_source = description.asks_source
        self.goes_on = description.goes_on
        self._home = home
        # The origin in texts for users.
        place, _, name = description.source.rpartition(".")
        self.__module__ = place or "joined"
        self.__qualname__ = f"{name} ({process})"

    def __repr__(self) -> str:
        return f"<tool {self.spec.id} of another process>"

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        """Execute the tool in its process.

        :raises ToolError: the error of the tool; ``interrupted`` if its process disconnects during the call, ``unavailable`` if
            it had disconnected before
        """
        return await self._home.carry_out(self, args, runtime)


class AskingTool(BroughtTool):
    """A tool of a client process that may have questions for the user before it runs."""

    async def questions(self, args: dict[str, Any]) -> Sequence[Question]:
        return await self._home.questions(self, args)


class SteppingTool(BroughtTool):
    """A stateful tool of a client process: its generator runs there, and this one requests each step."""

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        home = self._home
        step: Message = {"state": next(home.states), "first": True, "sent": None, "closes": False}
        while True:
            try:
                value = await home.carry_out(self, args, running(runtime), step)
            except BaseException:
                home.forget(step["state"])  # its generator may have advanced although the answer failed
                raise
            if value is OVER:
                return
            try:
                sent: Any = yield value  # pyright: ignore[reportUnknownVariableType]
            except GeneratorExit:
                await self._close(args, runtime, {**step, "first": False, "sent": None, "closes": True})
                raise
            step = {**step, "first": False, "sent": sent}

    async def _close(self, args: dict[str, Any], runtime: Runtime, step: Message) -> None:
        try:
            now = running(runtime)
        except ToolError:  # it ends without a call
            self._home.forget(step["state"])
        else:
            await self._home.carry_out(self, args, now, step)


class AskingSteppingTool(SteppingTool):
    """A stateful tool of a client process that may have questions for the user before it is opened."""

    questions = AskingTool.questions


class BroughtTrigger(BroughtTool, TriggerTool):
    """A trigger class of a client process: its triggers are added here, and its process waits for them."""

    def __init__(self, description: Description, process: str, home: BroughtTools) -> None:
        super().__init__(description, process, home)
        self._by_time = description.trigger == "time"
        self.blocking = description.adds_itself

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        if self.blocking:  # it has its own `execute`, which runs in its process
            return await BroughtTool.execute(self, args, runtime)
        await self.check_time({key: value for key, value in args.items() if key not in OWN})
        return await TriggerTool.execute(self, args, runtime)

    async def check_time(self, arguments: Mapping[str, Any]) -> None:
        """Check that a trigger with times fires at least once.

        :raises ToolError: ``invalid_input`` if it would never fire
        """
        if self._by_time and await self._home.never(self, arguments):
            raise ToolError(
                f"The trigger was not added: with these arguments, `{self.spec.id}` would never fire. Change the arguments.",
                kind="invalid_input",
            )

    async def wait(self, waiting: Waiting) -> Fired:
        return await self._home.wait(self, waiting)


_KINDS: Mapping[tuple[bool, bool], Callable[[Description, str, BroughtTools], BroughtTool]] = {
    (False, False): BroughtTool,
    (False, True): AskingTool,
    (True, False): SteppingTool,
    (True, True): AskingSteppingTool,
}
"""The classes by whether the tool is stateful, and whether it has questions."""


def _brought(description: Description, process: str, home: BroughtTools) -> BroughtTool:
    """Return the tool for a description from a client process."""
    if description.trigger:
        return BroughtTrigger(description, process, home)
    steps = description.spec.mode == "stateful" and description.goes_on is None
    return _KINDS[steps, description.asks_first](description, process, home)
