"""The tools that this process brought, carried out here for whoever holds the workspace."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from handrail.arbiter.generators import OVER
from handrail.arbiter.output.plain import TooLarge
from handrail.arbiter.running import in_a_thread_of_its_own
from handrail.contract.errors import ToolError
from handrail.contract.session import StopReason
from handrail.contract.tool.decorator import FunctionTool
from handrail.contract.tool.tool import Tool
from handrail.contract.tool.triggers import TriggerTool
from handrail.ipc.codec.descriptions import describe, usable
from handrail.ipc.codec.values import (
    INLINE_PARTS,
    Malformed,
    Reader,
    a_stop_reason,
    an_object,
    fields,
    of_failure,
    pack,
    some_bytes,
    text,
    whole,
)
from handrail.ipc.joiner.runtime import RemoteRuntime, Streams
from handrail.ipc.joiner.stepping import OpenSteps, a_step
from handrail.ipc.triggering import DUE, WAIT, of_firing, waited
from handrail.ipc.wire.connection import Connection
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Op, Refused, logger
from handrail.runtime.secrets import NO_SECRETS, SecretStore
from handrail.session.arrivals.waits import time_of

__all__ = ["Bench", "describe"]


class _Running:
    """One call at work here."""

    __slots__ = ("blocking", "runtime", "stopped", "work")

    def __init__(self, runtime: RemoteRuntime, blocking: bool) -> None:
        self.runtime = runtime
        self.blocking = blocking
        self.work: asyncio.Task[Any]
        self.stopped = False

    def stop(self, reason: StopReason) -> None:
        """Tell it to end. A thread hears it when it asks; it cannot be ended."""
        self.stopped = True
        self.runtime.stop(reason)
        if not self.blocking:
            self.work.cancel()


class Bench:
    """Where this process carries out what it brought.

    :param tools: tools, classes of tools or modules of such
    :param secrets: what these may be given; they do not come from the holder
    :raises LoadError: with every fault of these
    """

    def __init__(self, tools: Iterable[object], secrets: SecretStore = NO_SECRETS) -> None:
        self._secrets = secrets
        self._tools: dict[tuple[str, str], Tool] = {}
        self._connection: Connection | None = None
        self._running: dict[int, _Running] = {}
        self._streams = Streams()
        self._left: set[asyncio.Task[Any]] = set()
        self._steps = OpenSteps()
        self.bring(tools)
        self.requests: Mapping[str, Op] = {
            "execute": Op(self._execute, inline=True, cancel_when_lost=True),
            "questions": Op(self._questions, cancel_when_lost=True),
            "due": Op(self._due, cancel_when_lost=True),
            "wait": Op(self._wait, cancel_when_lost=True),
        }
        """What the holder may ask for. Begun at once, so that a stop which follows finds what it is about."""
        self.notices: Mapping[str, Callable[[Any], None]] = {
            "stop": self._stop,
            "output": self._output,
            "forget": self._forget,
        }

    def bring(self, tools: Iterable[object]) -> None:
        """Have these as well; the earlier ones stay for turns that began with them.

        Of two with the same definition the later one is run.

        :raises LoadError: with every fault
        """
        for found in usable(tools):
            self._tools[found.tool.spec.id, found.tool.spec.definition_hash] = found.tool

    def attach(self, connection: Connection) -> None:
        """From now on the holder is at the other end of this one."""
        self._connection = connection
        self._running = {}
        self._steps.forget_all()

    async def aclose(self) -> None:
        """End the tools, each once.

        :raises ExceptionGroup: of what went wrong, after every tool was told
        """
        await self._steps.aclose()
        problems: list[Exception] = []
        tools, self._tools = {id(tool): tool for tool in self._tools.values()}, {}
        for tool in tools.values():
            try:
                await tool.aclose()
            except Exception as error:
                problems.append(error)
        if problems:
            raise ExceptionGroup("some tools did not end cleanly", problems)

    async def _execute(self, body: Any) -> Message:
        try:
            asked = fields(
                body,
                {
                    "run": whole,
                    "tool": text,
                    "definition": text,
                    "arguments": an_object,
                    "around": _or_empty,
                    "step": a_step,
                },
            )
        except Malformed as error:
            raise Refused("malformed", f"execute: {error}") from None
        connection, tool = self._connection, self._tool(asked)
        if connection is None:
            raise Refused("unavailable", "the process that brought it is not ready yet")
        number: int = asked["run"]
        runtime = RemoteRuntime(connection, number, tool.spec, asked["around"], self._streams, self._secrets)
        running = _Running(runtime, bool(getattr(tool, "blocking", False)))
        running.work = asyncio.get_running_loop().create_task(self._carried_out(tool, asked, runtime))
        table = self._running
        table[number] = running
        try:
            await asyncio.wait((running.work,))
            return await _answer(tool, running)
        except asyncio.CancelledError:  # the holder is gone, and so are the locks of this call
            running.stop("shutdown")
            if not running.work.done():
                self._left.add(running.work)
                running.work.add_done_callback(self._let_go)
            raise
        finally:
            del table[number]

    async def _carried_out(self, tool: Tool, asked: Mapping[str, Any], runtime: RemoteRuntime) -> object:
        arguments = asked["arguments"]
        try:
            if asked["step"] is not None:
                return await self._steps.take(tool, arguments, runtime, asked["step"])
            tool.check(arguments)
            if isinstance(tool, FunctionTool) and tool.blocking:
                return await in_a_thread_of_its_own(partial(tool.run_blocking, arguments, runtime), tool.spec.id)
            return await tool.execute(arguments, runtime)
        except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # a tool's sys.exit() would end the event loop
            raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error

    async def _questions(self, body: Any) -> Message:
        try:
            asked = fields(body, {"tool": text, "definition": text, "arguments": an_object})
        except Malformed as error:
            raise Refused("malformed", f"questions: {error}") from None
        tool = self._tool(asked)
        try:
            questions = tool.questions(asked["arguments"])
            if isinstance(questions, Awaitable):
                questions = await questions
            return {"value": [asdict(question) for question in questions]}
        except Exception as error:
            return of_failure(error)

    async def _due(self, body: Any) -> Message:
        asked, tool = self._class(body, DUE)
        try:
            return {"value": time_of(tool, asked["arguments"], asked["now_ns"])}
        except ToolError as error:
            return of_failure(error)

    async def _wait(self, body: Any) -> Message:
        asked, tool = self._class(body, WAIT)
        try:
            return {"value": of_firing(await waited(tool, asked["waiting"]))}
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return of_failure(RuntimeError("wait() ended by a cancellation that was not its own"))
        except (Exception, SystemExit) as error:  # a class's sys.exit() would end the process
            return of_failure(error)

    def _class(self, body: Any, reads: Mapping[str, Reader[Any]]) -> tuple[dict[str, Any], TriggerTool]:
        """What is asked of a class of triggers, and that class.

        :raises Refused: for what is none
        """
        try:
            asked = fields(body, reads)
        except (ValueError, TypeError) as error:
            raise Refused("malformed", f"triggers: {error}") from None
        tool = self._tool(asked)
        if not isinstance(tool, TriggerTool):
            raise Refused("malformed", f"{asked['tool'][:80]!r} is no class of triggers")
        return asked, tool

    def _tool(self, asked: Mapping[str, Any]) -> Tool:
        """
        :raises Refused: when there is no such tool here
        """
        tool = self._tools.get((asked["tool"], asked["definition"]))
        if tool is None:
            raise Refused("unavailable", "the process that brought it does not have it any more")
        return tool

    def _let_go(self, work: asyncio.Task[Any]) -> None:
        self._left.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            logger.info("a call went on after the process that asked for it had gone, and failed: %s", error)

    def _stop(self, body: Any) -> None:
        try:
            told = fields(body, {"run": whole, "reason": a_stop_reason})
        except Malformed as error:
            logger.info("a stop was left aside: %s", error)
            return
        if (running := self._running.get(told["run"])) is not None:
            running.stop(told["reason"])

    def _forget(self, body: Any) -> None:
        try:
            self._steps.forget(fields(body, {"state": whole})["state"])
        except Malformed as error:
            logger.info("the end of a state was left aside: %s", error)

    def _output(self, body: Any) -> None:
        try:
            told = fields(body, {"stream": whole, "piece": some_bytes})
        except Malformed as error:
            logger.info("a piece of output was left aside: %s", error)
            return
        self._streams.told(told["stream"], told["piece"])


def _or_empty(value: Any) -> dict[str, Any]:
    return {} if value is None else an_object(value)


async def _answer(tool: Tool, running: _Running) -> Message:
    """How it ended."""
    work = running.work
    if work.cancelled():
        if running.stopped:
            return {"cancelled": True}
        return of_failure(RuntimeError("it awaited something that had been cancelled (CancelledError)"))
    if (error := work.exception()) is not None:
        return of_failure(error)
    value = work.result()
    if value is OVER:
        return {"over": True}
    try:
        return {"value": await _packed(value, tool.spec.id)}
    except TooLarge:
        text = f"{tool.spec.id} ran, and its output has too many parts to be shown; ask for less at once"
        return of_failure(ToolError(text, kind="limit"))
    except Exception as error:
        text = f"{tool.spec.id} ran, and its output cannot be shown ({type(error).__name__})"
        return of_failure(ToolError(text, kind="backend"))


async def _packed(value: object, name: str) -> Message:
    try:
        return pack(value, INLINE_PARTS)
    except TooLarge:
        packed: Any = await in_a_thread_of_its_own(partial(pack, value), f"{name}-output")
        return packed
