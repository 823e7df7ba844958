"""Tools that a process brought when it joined: arbitrated and recorded here, carried out there.

The holder does every step of a call; only the function runs in the process that brought it. What it asks of its runtime
comes back over the wire to the real runtime of the call, and only while that call runs, and only from that process.
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

_GONE = "the process that brought {} has gone, so nothing was run; start it again"
_OF_CLIENTS = frozenset(CAPABILITY_OF.values())


class _NotThere(ToolError):
    """The process has gone."""


class _Run:
    """One call that runs in the other process now."""

    __slots__ = ("doors", "kept", "number", "over", "runtime", "tool_id")

    def __init__(self, number: int, tool_id: str, runtime: Runtime) -> None:
        self.number = number
        self.tool_id = tool_id
        self.runtime = runtime
        self.doors: set[asyncio.Task[Any]] = set()
        self.kept: Any = None
        self.over = False


class BroughtTools:
    """What one process brought.

    :param connection: to it; nothing is sent on it yet
    :param described: what it says of them, as :func:`~handrail.ipc.codec.mirror.describe` makes it
    :param secrets: the names of those that it has for them
    :raises LoadError: with every fault of that
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
        """What the other process may ask for: the doors of the calls that it runs."""
        self.notices: Mapping[str, Callable[[Any], None]] = {
            "progress": heeding(self._progress),
            "partial": heeding(self._partial),
            "log": heeding(self._log),
            "shown": heeding(self._shown),
            "let_go": heeding(self._let_go),
        }

    @property
    def process(self) -> str:
        """How people are told which one it is."""
        peer = self._connection.peer
        return f"process {peer.pid}" if peer is not None and peer.pid else "another process"

    def replaced(self, described: object) -> tuple[Tool, ...]:
        """The tools that it has from now on; calls of the others go on.

        :raises LoadError: with every fault; what there was stays
        """
        process = self.process
        self.tools = tuple(_brought(one, process, self) for one in read_descriptions(described, process))
        return self.tools

    def forget(self, state: int) -> None:
        """End what a stateful tool has open there, without anything that it could touch."""
        self._connection.notify("forget", {"state": state})

    async def carry_out(
        self, tool: BroughtTool, args: dict[str, Any], runtime: Runtime, step: Message | None = None
    ) -> object:
        """See :meth:`BroughtTool.execute`.

        :param step: which one, of a stateful tool
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
        """Have one of its offerings give something, for the call that ``runtime`` is of.

        :param number: which of its offerings
        """
        body: Message = {
            "offering": number,
            "method": method,
            "arguments": _exactly(runtime.tool_id, arguments),
            "around": {**_around(runtime, clients=False), "tool_id": runtime.tool_id},
        }
        return await self._run("offer", runtime.tool_id, runtime, body)

    async def _run(self, op: str, tool_id: str, runtime: Runtime, body: Message) -> object:
        """Have the other process carry out something for a call, and open the doors of the call's runtime to it meanwhile."""
        cancellation = runtime.cancellation
        if cancellation.requested:  # between the last look and here
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
            raise ToolError(f"{tool_id}: its process answered what cannot be read: {error}", kind="backend") from None
        finally:
            if isinstance(cancellation, Execution):
                cancellation.told = None
            run.over = True
            del self._runs[run.number]
            await _ended(run.doors)

    async def questions(self, tool: BroughtTool, args: dict[str, Any]) -> Sequence[Question]:
        """See :meth:`~handrail.contract.tool.tool.Tool.questions`."""
        body = {"arguments": _exactly(tool.spec.id, args)}
        return await self._asked(tool, "questions", body, Sequence[Question], settle=True)

    async def never(self, tool: BroughtTool, arguments: Mapping[str, Any]) -> bool:
        """Whether a trigger of a class that goes by time would never fire."""
        body = {"arguments": dict(arguments), "now_ns": time.time_ns()}
        return await self._asked(tool, "due", body, int | None) is None

    async def wait(self, tool: BroughtTool, waiting: Waiting) -> Fired:
        """See :meth:`~handrail.contract.tool.triggers.TriggerTool.wait`. Where its process has gone nothing fires, until the
        session is opened with one that has it."""
        try:
            return await self._asked(tool, "wait", {"waiting": WIRE.write(Waiting, waiting)}, Fired)
        except _NotThere:
            return await asyncio.get_running_loop().create_future()

    async def _asked(self, tool: BroughtTool, asks: str, body: Message, gives: Any, *, settle: bool = False) -> Any:
        """Ask its process something about a tool that is no call of it.

        :param gives: the type of the answer
        :raises ToolError: as it was raised there; ``unavailable`` where the process has gone or refuses, ``backend`` for an
            answer that cannot be read
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
            raise ToolError(f"{tool_id}: {refused.text}", kind="unavailable") from None
        except Malformed as error:
            raise ToolError(f"{tool_id}: its process answered what cannot be read: {error}", kind="backend") from None

    async def _answer(self, run: _Run, asking: asyncio.Future[Any]) -> Any:
        """Wait to the end, whoever cancels this: the locks of a call are given back when nothing of it runs any more."""
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
            f"the process that runs {run.tool_id} has gone; nobody knows whether it took effect. "
            "Look at the state of things before you call it again",
            kind="interrupted",
            data=run.kept,
        )

    # ── what the other process may ask ───────────────────────────────────────────────────────────

    async def _through(self, name: str, door: DoorMethod, body: Any) -> Message:
        """Ask one door of the runtime of a call that runs for this process now."""
        of, method = door.of, method_of(door.function)
        try:
            asked = read_fields(body, {"run": WIRE.reader_of(int), "arguments": an_object})
            arguments = read_fields(asked["arguments"], method.readers)
        except Malformed as error:
            raise Refused("malformed", f"{name}: {error}") from None
        run = self._runs.get(asked["run"])
        if run is None or run.over:
            raise Refused("not_running", f"{name}: no call of this process runs under the number {asked['run']}")
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
        except Exception as error:  # for the tool: it may catch what its runtime raises
            return of_failure(error)
        finally:
            run.doors.discard(task)

    async def _class(self, named: NamedClass, arguments: Mapping[str, Any]) -> BroughtTrigger:
        """A class of triggers of the other process.

        :param arguments: of the trigger that is to be added
        :raises ToolError: ``invalid_input`` where it has brought none of that name, and for a trigger that never fires
        """
        for tool in self.tools:
            if isinstance(tool, BroughtTrigger) and (tool.spec.id, tool.definition) == (named.tool, named.definition):
                await tool.check_time(arguments)
                return tool
        raise ToolError(
            f"{named.tool[:80]!r} is no class of triggers that this process has brought", kind="invalid_input"
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
    """What does not change during a call.

    :param clients: whether it may ask the client at the face
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
    """The arguments, if they arrive as they are. That they are JSON values was checked with the schema.

    :raises ToolError: ``invalid_input``, for what a program passed and the wire has no form for
    """
    try:
        return orjson.Fragment(orjson.dumps(args))
    except TypeError:  # keys that are no text, half characters, integers of more than 64 bits
        pass
    try:
        exact = decode(encode(args, 1 << 62)) == _as_lists(args)
    except RecursionError:
        exact = False
    if not exact:
        raise ToolError(
            f"{tool_id} runs in another process, and its arguments do not go there as they are (keys that are no text, "
            "integers of thousands of digits); pass plain JSON values",
            kind="invalid_input",
        )
    return args


def _as_lists(value: Any) -> Any:
    """Tuples as the lists that they arrive as."""
    if isinstance(value, dict):
        return {key: _as_lists(inner) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [_as_lists(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _outcome(answer: object) -> object:
    """What the tool returned.

    :raises Exception: what it raised
    :raises asyncio.CancelledError: when it ended because it was told to
    :raises Malformed: for what no Handrail process answers
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
        return ToolError(f"{run.tool_id}{ran}{refused.text}", kind="limit")
    if refused.kind == "cancelled":
        return ToolError(
            f"the process that runs {run.tool_id} is ending; nobody knows whether it took effect",
            kind="interrupted",
            data=run.kept,
        )
    kind = "unavailable" if refused.kind in ("unavailable", "unknown_op") else "backend"
    return ToolError(f"{run.tool_id}: {refused.text}", kind=kind)


async def _ended(doors: set[asyncio.Task[Any]]) -> None:
    """End what a call left open at its doors, before its locks go; also when this task is being cancelled."""
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


# ── the tools, as the holder has them ────────────────────────────────────────────────────────────


class BroughtTool(Tool):
    """One tool of a process that joined.

    Labelled like the holder's own Python (:attr:`~handrail.contract.tool.tool.Tool.trusted`): it is the code of the same
    operator, which the runtime's checks hold and the operating system does not.
    """

    blocking = True
    """A cancellation here does not end what runs there: it is told to end, and its locks stay until it has."""

    def __init__(self, description: Description, process: str, home: BroughtTools) -> None:
        self.spec = description.spec
        self.own_secrets = home.secrets.union(description.settings)
        self.definition = description.definition
        self.takes_runtime = description.takes_runtime
        self.asks_source = description.asks_source
        self.goes_on = description.goes_on
        self._home = home
        # Where people are told that it comes from.
        place, _, name = description.source.rpartition(".")
        self.__module__ = place or "joined"
        self.__qualname__ = f"{name} ({process})"

    def __repr__(self) -> str:
        return f"<tool {self.spec.id} of another process>"

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        """Have it carried out where it is from.

        :raises ToolError: as it raised it there; ``interrupted`` when its process goes meanwhile, ``unavailable`` when
            it had gone before
        """
        return await self._home.carry_out(self, args, runtime)


class AskingTool(BroughtTool):
    """One that people may have to be asked about before it runs."""

    async def questions(self, args: dict[str, Any]) -> Sequence[Question]:
        return await self._home.questions(self, args)


class SteppingTool(BroughtTool):
    """One that is gone through step by step: its generator is in the other process, this one asks it for each step."""

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        home = self._home
        step: Message = {"state": next(home.states), "first": True, "sent": None, "closes": False}
        while True:
            try:
                value = await home.carry_out(self, args, running(runtime), step)
            except BaseException:
                home.forget(step["state"])  # it may have yielded there what could not be told here
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
        except ToolError:  # no call ends it
            self._home.forget(step["state"])
        else:
            await self._home.carry_out(self, args, now, step)


class AskingSteppingTool(SteppingTool):
    """The same for which people may have to be asked before it is opened."""

    questions = AskingTool.questions


class BroughtTrigger(BroughtTool, TriggerTool):
    """One that adds triggers of a class of its own: they are added here, and waited for in its process."""

    def __init__(self, description: Description, process: str, home: BroughtTools) -> None:
        super().__init__(description, process, home)
        self._by_time = description.trigger == "time"
        self.blocking = description.adds_itself

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        if self.blocking:  # it adds its triggers in a way of its own, which runs there
            return await BroughtTool.execute(self, args, runtime)
        await self.check_time({key: value for key, value in args.items() if key not in OWN})
        return await TriggerTool.execute(self, args, runtime)

    async def check_time(self, arguments: Mapping[str, Any]) -> None:
        """
        :raises ToolError: ``invalid_input`` for a trigger that never fires
        """
        if self._by_time and await self._home.never(self, arguments):
            raise ToolError(f"{self.spec.id} says that this never fires; nothing was added", kind="invalid_input")

    async def wait(self, waiting: Waiting) -> Fired:
        return await self._home.wait(self, waiting)


_KINDS: Mapping[tuple[bool, bool], Callable[[Description, str, BroughtTools], BroughtTool]] = {
    (False, False): BroughtTool,
    (False, True): AskingTool,
    (True, False): SteppingTool,
    (True, True): AskingSteppingTool,
}
"""By whether they are stateful, and whether they ask first."""


def _brought(description: Description, process: str, home: BroughtTools) -> BroughtTool:
    """The tool that a process has told of."""
    if description.trigger:
        return BroughtTrigger(description, process, home)
    steps = description.spec.mode == "stateful" and description.goes_on is None
    return _KINDS[steps, description.asks_first](description, process, home)
