"""Tools that a process brought when it joined: arbitrated and recorded here, carried out there.

The holder does every step of a call; only the function runs in the process that brought it. What it asks of its runtime
comes back over the wire to the real runtime of the call, and only while that call runs, and only from that process.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import orjson

from handrail.arbiter.execution import Execution
from handrail.arbiter.generators import OVER
from handrail.arbiter.peers import MAX_MESSAGE
from handrail.contract.doors.peer import CAPABILITY_OF, LOG_LEVELS
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.errors import ToolError
from handrail.contract.session import StopReason
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.contract.tool.triggers import Fired, Waiting
from handrail.ipc.codec.descriptions import of_capabilities, read_descriptions
from handrail.ipc.codec.doors import DOORS, PREFIX, STREAMS, Door, questions
from handrail.ipc.codec.values import (
    Malformed,
    Reader,
    an_object,
    anything,
    failure_of,
    fields,
    number,
    of_failure,
    one_of,
    optional,
    some_bytes,
    text,
    unpack,
    whole,
)
from handrail.ipc.holder.brought_tool import BroughtTool, brought
from handrail.ipc.peers import kinds_open
from handrail.ipc.triggering import a_firing, a_time, exactly, of_waiting
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Op, Refused, logger
from handrail.store.encoding import decode, encode

_T = TypeVar("_T")
_GONE = "the process that brought {} has gone, so nothing was run; start it again"
_OF_CLIENTS = frozenset(CAPABILITY_OF.values())
_FIGURES = ("fraction", "done", "total")


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
    :param described: what it says of them, as :func:`~handrail.ipc.codec.descriptions.describe` makes it
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
            PREFIX + name: Op(partial(self._through, name, door), cancel_when_lost=True) for name, door in DOORS.items()
        }
        """What the other process may ask for: the doors of the calls that it runs."""
        self.notices: Mapping[str, Callable[[Any], None]] = {
            "progress": self._progress,
            "partial": self._partial,
            "log": self._log,
            "shown": self._shown,
            "let_go": self._let_go,
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
        self.tools = tuple(brought(one, process, self) for one in read_descriptions(described, process))
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
        cancellation = runtime.cancellation
        if cancellation.requested:  # between the last look and here
            raise asyncio.CancelledError
        run = _Run(next(self._numbers), tool.spec.id, runtime)
        body: Message = {
            "run": run.number,
            "tool": run.tool_id,
            "definition": tool.definition,
            "arguments": _exactly(run.tool_id, args),
            "around": _around(runtime, tool.spec) if tool.takes_runtime else None,
            "step": None if step is None else _exactly(run.tool_id, step),
        }
        self._runs[run.number] = run
        if isinstance(cancellation, Execution):
            cancellation.told = partial(self._stop, run)
        try:
            asking = asyncio.ensure_future(self._connection.request("execute", body))
            return _outcome(await self._answer(run, asking))
        except ConnectionLost as lost:
            raise self._gone(run, lost) from None
        except Refused as refused:
            raise _refusal(run, refused) from None
        except Malformed as error:
            raise ToolError(
                f"{run.tool_id}: its process answered what cannot be read: {error}", kind="backend"
            ) from None
        finally:
            if isinstance(cancellation, Execution):
                cancellation.told = None
            run.over = True
            del self._runs[run.number]
            await _ended(run.doors)

    async def questions(self, tool: BroughtTool, args: dict[str, Any]) -> Sequence[Question]:
        """See :meth:`~handrail.contract.tool.tool.Tool.questions`."""
        body = {"arguments": _exactly(tool.spec.id, args)}
        return await self._asked(tool, "questions", body, questions, settle=True)

    async def never(self, tool: BroughtTool, arguments: Mapping[str, Any]) -> bool:
        """Whether a trigger of a class that goes by time would never fire."""
        return (
            await self._asked(tool, "due", {"arguments": exactly(dict(arguments)), "now_ns": time.time_ns()}, a_time)
            is None
        )

    async def wait(self, tool: BroughtTool, waiting: Waiting) -> Fired:
        """See :meth:`~handrail.contract.tool.triggers.TriggerTool.wait`. Where its process has gone nothing fires, until the
        session is opened with one that has it."""
        try:
            return await self._asked(tool, "wait", {"waiting": of_waiting(waiting)}, a_firing)
        except _NotThere:
            return await asyncio.get_running_loop().create_future()

    async def _asked(
        self, tool: BroughtTool, asks: str, body: Message, read: Reader[_T], *, settle: bool = False
    ) -> _T:
        """Ask its process something about a tool that is no call of it.

        :raises ToolError: as it was raised there; ``unavailable`` where the process has gone or refuses, ``backend`` for an
            answer that cannot be read
        """
        tool_id = tool.spec.id
        asked = {"tool": tool_id, "definition": tool.definition, **body}
        try:
            told = an_object(await self._connection.request(asks, asked, settle=settle))
            if (failure := failure_of(told)) is not None:
                raise failure
            return read(told.get("value"))
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

    async def _through(self, name: str, door: Door, body: Any) -> Message:
        """Ask one door of the runtime of a call that runs for this process now."""
        try:
            asked = fields(body, {"run": whole, "arguments": an_object})
            arguments = fields(asked["arguments"], door.takes)
        except Malformed as error:
            raise Refused("malformed", f"{name}: {error}") from None
        run = self._runs.get(asked["run"])
        if run is None or run.over:
            raise Refused("not_running", f"{name}: no call of this process runs under the number {asked['run']}")
        if (listener := STREAMS.get(name)) is not None and (stream := arguments[listener]) is not None:
            arguments[listener] = partial(self._output, stream)
        task = asyncio.current_task()
        assert task is not None
        run.doors.add(task)
        try:
            return {"value": await door.ask(run.runtime, arguments)}
        except Exception as error:  # for the tool: it may catch what its runtime raises
            return of_failure(error)
        finally:
            run.doors.discard(task)

    def _output(self, stream: int, piece: bytes) -> None:
        self._connection.notify("output", {"stream": stream, "piece": piece})

    def _progress(self, body: Any) -> None:
        try:
            told = fields(body, {"run": whole, "message": text, **dict.fromkeys(_FIGURES, optional(number))})
        except Malformed as error:
            logger.info("a notice of progress was left aside: %s", error)
            return
        if (run := self._runs.get(told["run"])) is not None:
            run.runtime.progress(told["message"][:MAX_MESSAGE], **{name: told[name] for name in _FIGURES})

    def _shown(self, body: Any) -> None:
        try:
            told = fields(body, {"run": whole, "piece": some_bytes})
        except Malformed as error:
            logger.info("a piece of output was left aside: %s", error)
            return
        if (run := self._runs.get(told["run"])) is not None:
            run.runtime.output(told["piece"])

    def _log(self, body: Any) -> None:
        try:
            told = fields(
                body, {"run": whole, "level": one_of(*LOG_LEVELS), "data": anything, "logger": optional(text)}
            )
        except Malformed as error:
            logger.info("a message of a tool was left aside: %s", error)
            return
        if (run := self._runs.get(told["run"])) is not None:
            run.runtime.log(told["level"], told["data"], told["logger"])

    def _let_go(self, body: Any) -> None:
        try:
            told = fields(body, {"run": whole})
        except Malformed as error:
            logger.info("a notice was left aside: %s", error)
            return
        if (run := self._runs.get(told["run"])) is not None:
            run.runtime.peer.let_go()

    def _partial(self, body: Any) -> None:
        try:
            told = fields(body, {"run": whole, "value": unpack})
        except Malformed as error:
            logger.info("a partial output was left aside: %s", error)
            return
        if (run := self._runs.get(told["run"])) is not None:
            run.kept = told["value"]
            run.runtime.partial(run.kept)


def _around(runtime: Runtime, spec: ToolSpec) -> Message:
    client = runtime.client
    return {
        "call_id": runtime.call_id,
        "session_id": runtime.session_id,
        "agent": runtime.agent,
        "topic": runtime.topic,
        "client": None if client is None else asdict(client),
        "workdir": runtime.workdir,
        "capabilities": of_capabilities(runtime.capabilities),
        "config": dict(runtime.config),
        "max_output": runtime.max_output,
        "peer": kinds_open(runtime.peer) if not _OF_CLIENTS.isdisjoint(spec.requires.capabilities) else [],
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
