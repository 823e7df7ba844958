"""The tools, resources and watchdogs of a client process, which run here for the lease holder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from handrail.arbiter.generators import OVER, NotEnding, Steps
from handrail.arbiter.output.plain import TooLarge
from handrail.arbiter.running import in_a_thread_of_its_own
from handrail.contract.approvals import Attendant
from handrail.contract.codec import an_object
from handrail.contract.doors.agents import NO_MODEL, Delegates
from handrail.contract.doors.peer import Buffers, Peer
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.session import StopReason
from handrail.contract.tool.decorator import FunctionTool, steps_of
from handrail.contract.tool.offering import Offering, Stamped
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.contract.tool.triggers import Fired, TriggerTool, Waiting
from handrail.ipc.codec import mirror
from handrail.ipc.codec.interfaces import WIRE, Request, heeding, op_of, request, served
from handrail.ipc.codec.mirror import ToldOffering, ToldWatchdog, describe, usable
from handrail.ipc.codec.values import INLINE_PARTS, of_failure, pack
from handrail.ipc.holder.remote import BUFFERS, CLIENT, MODEL, PEOPLE
from handrail.ipc.joiner.runtime import RemoteRuntime, Streams
from handrail.ipc.joiner.session import JoinedSession
from handrail.ipc.wire.connection import Connection
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Op, Refused, logger
from handrail.policy.watchdogs.watchdog import DEFAULT_TIMEOUT_MS, Watchdog, WatchdogCall, answer_of, name_of
from handrail.runtime.secrets import NO_SECRETS, SecretStore
from handrail.runtime.surface import NOBODY_TO_ASK
from handrail.session.arrivals.waits import time_of

__all__ = ["Bench", "describe"]

GRACE_S = 5.0
"""The time limit for ending open states at shutdown."""
_LONGEST_S = 60.0
"""The maximum time until a changed clock or a suspended machine is noticed."""


@dataclass(frozen=True, slots=True)
class Step:
    """A request for one step of a stateful tool.

    :param state: the number of the state
    :param first: whether the step opens the state
    :param sent: the input of the step
    :param closes: whether the step ends the state
    """

    state: int
    first: bool
    sent: Any
    closes: bool


class _Running:
    """One call that is running here."""

    __slots__ = ("blocking", "runtime", "stopped", "work")

    def __init__(self, runtime: RemoteRuntime, blocking: bool) -> None:
        self.runtime = runtime
        self.blocking = blocking
        self.work: asyncio.Task[Any]
        self.stopped = False

    def stop(self, reason: StopReason) -> None:
        """Stop the call. A thread cannot be stopped: it notices the stop when it checks."""
        self.stopped = True
        self.runtime.stop(reason)
        if not self.blocking:
            self.work.cancel()


class Bench:
    """A host that runs the tools, resources and watchdogs of this process.

    :param tools: tools, tool classes or modules
    :param secrets: the secrets that the tools may receive; they do not come from the lease holder
    :param redact: removes secrets from the error text of a watchdog
    :raises LoadError: with all faults of the tools
    """

    def __init__(
        self,
        tools: Iterable[object],
        secrets: SecretStore = NO_SECRETS,
        offerings: Sequence[Offering] = (),
        watchdogs: Sequence[Watchdog] = (),
        redact: Callable[[str], str] = str,
    ) -> None:
        self._secrets = secrets
        self._tools: dict[tuple[str, str], Tool] = {}
        self._offerings = offerings
        self._watchdogs = watchdogs
        self._redact = redact
        self._connection: Connection | None = None
        self._running: dict[int, _Running] = {}
        self._streams = Streams()
        self._left: set[asyncio.Task[Any]] = set()
        self._steps = OpenSteps()
        self._subscribed: dict[int, Callable[[], Awaitable[None]]] = {}
        self.bring(tools)
        self.requests: Mapping[str, Op] = {
            name: op_of(name, request(handler), inline=name in ("execute", "offer"), cancel_when_lost=True)
            for name, handler in {
                "execute": self._execute,
                "offer": self._offer,
                "questions": self._questions,
                "due": self._due,
                "wait": self._wait,
                "watchdog": self._watchdog,
                "offering.subscribe": self._subscribe,
                "offering.unsubscribe": self._unsubscribe,
                "offering.stamp": self._stamp,
                "offering.glance": self._glance,
            }.items()
        }
        """The requests of the lease holder. Runs start immediately, so that a later stop finds its run."""
        self.notices: Mapping[str, Callable[[Any], None]] = {
            "stop": heeding(self._stop),
            "output": heeding(self._streams.told),
            "forget": heeding(self._steps.forget),
        }

    @property
    def told_offerings(self) -> list[Any]:
        """The current listings of its resource providers, for the lease holder."""
        told = [ToldOffering(mirror.shown(one), isinstance(one, Stamped)) for one in self._offerings]
        return WIRE.write(Sequence[ToldOffering], told)

    @property
    def told_watchdogs(self) -> list[Any]:
        """The descriptions of its watchdogs, for the lease holder."""
        told = [
            ToldWatchdog(
                name_of(one),
                float(getattr(one, "timeout_ms", DEFAULT_TIMEOUT_MS)),
                bool(getattr(one, "after_failures", False)),
                hasattr(one, "concerns"),
            )
            for one in self._watchdogs
        ]
        return WIRE.write(Sequence[ToldWatchdog], told)

    def bring(self, tools: Iterable[object]) -> None:
        """Add tools. Earlier tools stay for turns that started with them.

        Of two tools with the same definition, the later one runs.

        :raises LoadError: with all faults
        """
        for found in usable(tools):
            self._tools[found.tool.spec.id, found.tool.spec.definition_hash] = found.tool

    def attach(self, connection: Connection) -> None:
        """Use a new connection to the lease holder, and end the states and subscriptions of the old one."""
        self._connection = connection
        self._running = {}
        self._steps.forget_all()
        self._unsubscribe_all()

    def _unsubscribe_all(self) -> None:
        """End the subscriptions of the last lease holder."""
        stops, self._subscribed = self._subscribed, {}
        for stop in stops.values():
            task = asyncio.ensure_future(stop())
            self._left.add(task)
            task.add_done_callback(self._let_go)

    async def aclose(self) -> None:
        """End all tools, each once.

        :raises ExceptionGroup: with all errors, after every tool was called
        """
        self._unsubscribe_all()
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

    async def _execute(
        self,
        run: int,
        tool: str,
        definition: str,
        arguments: dict[str, Any],
        around: dict[str, Any] | None,
        step: Step | None,
    ) -> Message:
        found = self._tool(tool, definition)
        runtime = self._runtime(run, found.spec, around or {})
        work = partial(self._carried_out, found, arguments, runtime, step)
        return await self._run(run, runtime, work, blocking=bool(getattr(found, "blocking", False)))

    async def _offer(
        self, run: int, offering: int, method: str, arguments: dict[str, Any], around: dict[str, Any]
    ) -> Message:
        """Call a method of a resource provider, for a call of a tool that runs in the lease holder."""
        found = self._offering(offering)
        give = _GIVES.get(method)
        if give is None:
            raise Refused("malformed", f"Unknown method: {method[:80]!r}. Expected one of: {', '.join(_GIVES)}.")
        runtime = self._runtime(run, ToolSpec(WIRE.reader_of(str)(around.get("tool_id")), ""), around)
        return await self._run(run, runtime, partial(give, found, arguments, runtime))

    def _runtime(self, run: int, spec: ToolSpec, around: Mapping[str, Any]) -> RemoteRuntime:
        if self._connection is None:
            raise Refused("unavailable", "The process of the tool is not ready yet. Try again.")
        return RemoteRuntime(self._connection, run, spec, around, self._streams, self._secrets)

    async def _run(
        self, number: int, runtime: RemoteRuntime, work: Callable[[], Awaitable[object]], *, blocking: bool = False
    ) -> Message:
        """Run something for a call of the lease holder, which can stop it by its number."""
        running = _Running(runtime, blocking)
        running.work = asyncio.get_running_loop().create_task(_guarded(work))
        table = self._running
        table[number] = running
        try:
            await asyncio.wait((running.work,))
            return await _answer(runtime.tool_id, running)
        except asyncio.CancelledError:  # the lease holder has disconnected; the locks of this call are released
            running.stop("shutdown")
            if not running.work.done():
                self._left.add(running.work)
                running.work.add_done_callback(self._let_go)
            raise
        finally:
            del table[number]

    async def _carried_out(
        self, tool: Tool, arguments: dict[str, Any], runtime: RemoteRuntime, step: Step | None
    ) -> object:
        if step is not None:
            return await self._steps.take(tool, arguments, runtime, step)
        tool.check(arguments)
        if isinstance(tool, FunctionTool) and tool.blocking:
            return await in_a_thread_of_its_own(partial(tool.run_blocking, arguments, runtime), tool.spec.id)
        return await tool.execute(arguments, runtime)

    async def _questions(self, tool: str, definition: str, arguments: dict[str, Any]) -> Message:
        found = self._tool(tool, definition)
        try:
            questions = found.questions(arguments)
            if isinstance(questions, Awaitable):
                questions = await questions
            return {"value": WIRE.write(Sequence[Question], questions)}
        except Exception as error:
            return of_failure(error)

    async def _due(self, tool: str, definition: str, arguments: dict[str, Any], now_ns: int) -> Message:
        found = self._class(tool, definition)
        try:
            return {"value": time_of(found, arguments, now_ns)}
        except ToolError as error:
            return of_failure(error)

    async def _wait(self, tool: str, definition: str, waiting: Waiting) -> Message:
        found = self._class(tool, definition)
        try:
            fired = await _waited(found, waiting)
            if not isinstance(fired, Fired) or not isinstance(fired.text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - third-party code
                raise TypeError(f"wait() returned {type(fired).__name__}; expected a Fired with a text")
            return {"value": {"text": fired.text, "position": fired.position, "last": fired.last is True}}
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return of_failure(RuntimeError("wait() was cancelled from within the tool"))
        except (Exception, SystemExit) as error:  # sys.exit() in a tool would end the process
            return of_failure(error)

    async def _watchdog(self, number: int, call: WatchdogCall, spec: ToolSpec | None) -> Message:
        if not 0 <= number < len(self._watchdogs):
            raise Refused("unavailable", "The process no longer has this watchdog.")
        watchdog = self._watchdogs[number]
        try:
            if spec is not None and _passes(watchdog, spec):
                return {"value": {"action": "allow", "reason": ""}}
            return {"value": await answer_of(watchdog, call, self._redact)}
        except (Exception, SystemExit) as error:  # the lease holder denies the call for any error
            return of_failure(error)

    # ── resources and prompts ────────────────────────────────────────────────────────────────────

    def _offering(self, number: int) -> Offering:
        if not 0 <= number < len(self._offerings):
            raise Refused("unavailable", "The process no longer has these resources and prompts.")
        return self._offerings[number]

    async def _subscribe(self, offering: int, number: int, uri: str) -> None:
        connection = self._connection

        loop = asyncio.get_running_loop()

        def tell(uri: str) -> None:
            if connection is not None:
                connection.notify("offering.updated", {"number": number, "uri": uri})

        def updated(uri: str) -> None:  # from any thread
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, uri)

        self._subscribed[number] = await self._offering(offering).subscribe(uri, updated)

    async def _unsubscribe(self, number: int) -> None:
        if (stop := self._subscribed.pop(number, None)) is not None:
            await stop()

    async def _stamp(self, offering: int, uri: str) -> str:
        found = self._offering(offering)
        return await asyncio.to_thread(found.stamp, uri) if isinstance(found, Stamped) else ""

    async def _glance(self, offering: int, uri: str) -> str:
        found = self._offering(offering)
        return await asyncio.to_thread(found.glance, uri) if isinstance(found, Stamped) else ""

    def _class(self, tool: str, definition: str) -> TriggerTool:
        """Return a trigger class.

        :raises Refused: if the tool does not exist or is not a trigger class
        """
        found = self._tool(tool, definition)
        if not isinstance(found, TriggerTool):
            raise Refused("malformed", f"{tool[:80]!r} is not a trigger class.")
        return found

    def _tool(self, tool: str, definition: str) -> Tool:
        """Return a tool by its id and definition hash.

        :raises Refused: if the tool does not exist
        """
        found = self._tools.get((tool, definition))
        if found is None:
            raise Refused("unavailable", "The process no longer has this tool. Use another tool, or start a new turn.")
        return found

    def _let_go(self, work: asyncio.Task[Any]) -> None:
        self._left.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            logger.info("a call that continued after the lease holder disconnected has failed: %s", error)

    def _stop(self, run: int, reason: StopReason) -> None:
        if (running := self._running.get(run)) is not None:
            running.stop(reason)


_GIVES: Mapping[str, Callable[[Offering, Mapping[str, Any], Runtime], Coroutine[Any, Any, object]]] = {
    "read": lambda of, given, on: of.read(_text(given, "uri"), on),
    "prompt": lambda of, given, on: of.prompt(_text(given, "name"), an_object(given.get("arguments")), on),
    "complete": lambda of, given, on: of.complete(
        an_object(given.get("ref")), an_object(given.get("argument")), an_object(given.get("context")), on
    ),
}
"""The methods of a resource provider for calls, by name."""


def _text(given: Mapping[str, Any], name: str) -> str:
    return WIRE.reader_of(str)(given.get(name))


def _passes(watchdog: Watchdog, spec: ToolSpec) -> bool:
    """Return whether a watchdog skips calls of this tool.

    If its filter fails, the watchdog is called, and denies by failing.
    """
    try:
        return getattr(watchdog, "concerns")(spec) is False  # noqa: B009 - not every watchdog has it
    except Exception:
        return False


async def _guarded(work: Callable[[], Awaitable[object]]) -> object:
    try:
        return await work()
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # sys.exit() in a tool would end the event loop
        raise RuntimeError(f"the tool raised {type(error).__name__}: {error}") from error


async def _waited(tool: TriggerTool, waiting: Waiting) -> Fired:
    """Wait until a trigger fires, for both kinds of trigger class."""
    if not tool.by_time:
        return await tool.wait(waiting)
    since = waiting.since_ns if waiting.position is None else waiting.position
    at = time_of(tool, waiting.arguments, since)
    if at is None:  # the answer of its class has changed: it never fires again
        return Fired(last=True)
    while (now := time.time_ns()) < at:  # noqa: ASYNC110 - the wall clock counts, not the loop's clock
        await asyncio.sleep(min((at - now) / 1e9, _LONGEST_S))
    now = max(at, time.time_ns())  # missed times are not reported one by one
    return Fired(position=now, last=time_of(tool, waiting.arguments, now) is None)


async def _answer(tool_id: str, running: _Running) -> Message:
    """Return the answer for a run that has ended."""
    work = running.work
    if work.cancelled():
        if running.stopped:
            return {"cancelled": True}
        return of_failure(RuntimeError("the tool awaited a task that was cancelled (CancelledError)"))
    if (error := work.exception()) is not None:
        return of_failure(error)
    value = work.result()
    if value is OVER:
        return {"over": True}
    try:
        return {"value": await _packed(value, tool_id)}
    except TooLarge:
        text = f"`{tool_id}` ran, but its output has too many parts to be shown. Request less at once."
        return of_failure(ToolError(text, kind="limit"))
    except Exception as error:
        text = f"`{tool_id}` ran, but its output cannot be shown ({type(error).__name__}). Check its effect before you repeat it."
        return of_failure(ToolError(text, kind="backend"))


async def _packed(value: object, name: str) -> Message:
    try:
        return pack(value, INLINE_PARTS)
    except TooLarge:
        packed: Any = await in_a_thread_of_its_own(partial(pack, value), f"{name}-output")
        return packed


# ── stateful tools ───────────────────────────────────────────────────────────────────────────────


class OpenSteps:
    """The open states of stateful tools, by the numbers of the lease holder."""

    def __init__(self) -> None:
        self._open: dict[int, Steps] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def take(self, tool: Tool, arguments: dict[str, Any], runtime: Runtime, step: Step) -> object:
        """Run one step of a state, or end it.

        :return: the yielded value as JSON values; :data:`OVER` after the last step
        """
        number = step.state
        steps = self._open.get(number)
        if steps is None:
            if not step.first:
                raise ToolError(
                    f"The open state of `{tool.spec.id}` no longer exists in its process. Open a new one.",
                    kind="interrupted",
                )
            none = f"No step of `{tool.spec.id}` is running. It can use its runtime only during a step."
            steps = self._open[number] = Steps(lambda of: steps_of(tool, arguments, of), tool.spec.id, none)
        try:
            if step.closes:
                await steps.close(runtime)
                return OVER
            value = await steps.next(runtime, step.sent)
        except NotEnding:
            text = f"`{tool.spec.id}` continued after it was asked to end. Ask the user to fix the tool: it must end at GeneratorExit."
            raise ToolError(text, kind="backend") from None
        finally:
            if steps.over:
                self._open.pop(number, None)
        return tool.finished(value) if isinstance(tool, FunctionTool) and value is not OVER else value

    def forget(self, state: int) -> None:
        """End a state outside a call."""
        if (steps := self._open.pop(state, None)) is not None:
            task = asyncio.get_running_loop().create_task(_close(steps))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def forget_all(self) -> None:
        """End all states, because the lease holder has changed or disconnected."""
        for number in tuple(self._open):
            self.forget(number)

    async def aclose(self) -> None:
        """End all states, and wait a limited time for their ``finally`` blocks."""
        self.forget_all()
        if self._ending:
            _, left = await asyncio.wait(set(self._ending), timeout=GRACE_S)
            for task in left:
                task.cancel()


async def _close(steps: Steps) -> None:
    with contextlib.suppress(Exception):  # no caller remains that could receive the error
        await steps.close()


# Requests of the lease holder to the approval handlers, clients and models of a client process.

NO_CLIENT = "No client is attached to this session. Continue without it."


class Serving:
    """The request handlers for the lease holder, on behalf of the sessions of this process.

    :param session_of: returns a session, also while it is being opened; None if it does not exist
    """

    def __init__(self, session_of: Callable[[str], JoinedSession | None]) -> None:
        self._session_of = session_of
        requests: dict[str, Request] = {
            **served(Attendant, PEOPLE, self._attendant),
            **served(Peer, CLIENT, self._peer),
            **served(Buffers, BUFFERS, self._buffers),
            **served(Delegates, MODEL, self._delegates),
        }
        # The next lease holder sends the request again: an answer to this one would be lost.
        self.requests: Mapping[str, Op] = {
            name: op_of(name, one, cancel_when_lost=True) for name, one in requests.items()
        }
        self.notices: Mapping[str, Callable[[Any], None]] = {"client.let_go": heeding(self._let_go)}

    def _attendant(self, people_of: str) -> Attendant:
        session = self._session_of(people_of)
        if session is None or session.attendant is None:
            raise UsageError(NOBODY_TO_ASK)
        return session.attendant

    def _peer(self, session: str) -> Peer:
        found = self._session_of(session)
        if found is None or found.peer is None:
            raise UsageError(NO_CLIENT)
        return found.peer

    def _buffers(self, session: str) -> Buffers:
        peer = self._peer(session)
        if not isinstance(peer, Buffers):
            raise UsageError(NO_CLIENT)
        return peer

    def _delegates(self, session: str) -> Delegates:
        found = self._session_of(session)
        if found is None or found.delegates is None:
            raise ToolError(NO_MODEL, kind="unavailable")
        return found.delegates

    def _let_go(self, session: str, call: str) -> None:
        found = self._session_of(session)
        if found is not None and found.peer is not None:
            found.peer.let_go(call)
