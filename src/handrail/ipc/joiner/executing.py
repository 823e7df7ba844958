"""Tools, offerings and watchdogs of a joined process, run here for the process that holds the workspace."""

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
"""How long what is open may take to end with its process."""
_LONGEST_S = 60.0
"""A clock that is set, or a machine that slept, is noticed after this long at most."""


@dataclass(frozen=True, slots=True)
class Step:
    """Which step of which state of a stateful tool is asked for.

    :param sent: the step's input
    """

    state: int
    first: bool
    sent: Any
    closes: bool


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
    :param redact: takes secrets out of the text of a failing watchdog
    :raises LoadError: with every fault of these
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
        """What the holder may ask for. Runs are begun at once, so that a stop which follows finds what it is about."""
        self.notices: Mapping[str, Callable[[Any], None]] = {
            "stop": heeding(self._stop),
            "output": heeding(self._streams.told),
            "forget": heeding(self._steps.forget),
        }

    @property
    def told_offerings(self) -> list[Any]:
        """What its offerings list now, for whoever holds the workspace."""
        told = [ToldOffering(mirror.shown(one), isinstance(one, Stamped)) for one in self._offerings]
        return WIRE.write(Sequence[ToldOffering], told)

    @property
    def told_watchdogs(self) -> list[Any]:
        """What its watchdogs say of themselves, for whoever holds the workspace."""
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
        self._unsubscribe_all()

    def _unsubscribe_all(self) -> None:
        """End what the last holder had subscribed to."""
        stops, self._subscribed = self._subscribed, {}
        for stop in stops.values():
            task = asyncio.ensure_future(stop())
            self._left.add(task)
            task.add_done_callback(self._let_go)

    async def aclose(self) -> None:
        """End the tools, each once.

        :raises ExceptionGroup: of what went wrong, after every tool was told
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
        """What one of the offerings gives, for a call of a tool that is carried out in the holder."""
        found = self._offering(offering)
        give = _GIVES.get(method)
        if give is None:
            raise Refused("malformed", f"an offering has no {method[:80]!r}")
        runtime = self._runtime(run, ToolSpec(WIRE.reader_of(str)(around.get("tool_id")), ""), around)
        return await self._run(run, runtime, partial(give, found, arguments, runtime))

    def _runtime(self, run: int, spec: ToolSpec, around: Mapping[str, Any]) -> RemoteRuntime:
        if self._connection is None:
            raise Refused("unavailable", "the process that brought it is not ready yet")
        return RemoteRuntime(self._connection, run, spec, around, self._streams, self._secrets)

    async def _run(
        self, number: int, runtime: RemoteRuntime, work: Callable[[], Awaitable[object]], *, blocking: bool = False
    ) -> Message:
        """Carry something out for a call of the holder's, which may stop it by its number."""
        running = _Running(runtime, blocking)
        running.work = asyncio.get_running_loop().create_task(_guarded(work))
        table = self._running
        table[number] = running
        try:
            await asyncio.wait((running.work,))
            return await _answer(runtime.tool_id, running)
        except asyncio.CancelledError:  # the holder is gone, and so are the locks of this call
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
            if not isinstance(fired, Fired) or not isinstance(fired.text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - it is anybody's
                raise TypeError(f"wait() gave {type(fired).__name__}, and a Fired with a text was expected")
            return {"value": {"text": fired.text, "position": fired.position, "last": fired.last is True}}
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return of_failure(RuntimeError("wait() ended by a cancellation that was not its own"))
        except (Exception, SystemExit) as error:  # a class's sys.exit() would end the process
            return of_failure(error)

    async def _watchdog(self, number: int, call: WatchdogCall, spec: ToolSpec | None) -> Message:
        if not 0 <= number < len(self._watchdogs):
            raise Refused("unavailable", "the process that brought it does not have it any more")
        watchdog = self._watchdogs[number]
        try:
            if spec is not None and _passes(watchdog, spec):
                return {"value": {"action": "allow", "reason": ""}}
            return {"value": await answer_of(watchdog, call, self._redact)}
        except (Exception, SystemExit) as error:  # of whatever it raises a no is made where it was asked for
            return of_failure(error)

    # ── offerings ────────────────────────────────────────────────────────────────────────────────

    def _offering(self, number: int) -> Offering:
        if not 0 <= number < len(self._offerings):
            raise Refused("unavailable", "the process that brought it does not have it any more")
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
        """
        :raises Refused: for what is no class of triggers
        """
        found = self._tool(tool, definition)
        if not isinstance(found, TriggerTool):
            raise Refused("malformed", f"{tool[:80]!r} is no class of triggers")
        return found

    def _tool(self, tool: str, definition: str) -> Tool:
        """
        :raises Refused: when there is no such tool here
        """
        found = self._tools.get((tool, definition))
        if found is None:
            raise Refused("unavailable", "the process that brought it does not have it any more")
        return found

    def _let_go(self, work: asyncio.Task[Any]) -> None:
        self._left.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            logger.info("a call went on after the process that asked for it had gone, and failed: %s", error)

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
"""What an offering gives for a call."""


def _text(given: Mapping[str, Any], name: str) -> str:
    return WIRE.reader_of(str)(given.get(name))


def _passes(watchdog: Watchdog, spec: ToolSpec) -> bool:
    """Whether a watchdog says that it does not look at calls of this tool. One that fails to say is asked, and denies by failing."""
    try:
        return getattr(watchdog, "concerns")(spec) is False  # noqa: B009 - not every watchdog has it
    except Exception:
        return False


async def _guarded(work: Callable[[], Awaitable[object]]) -> object:
    try:
        return await work()
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a tool's sys.exit() would end the event loop
        raise RuntimeError(f"it raised {type(error).__name__}: {error}") from error


async def _waited(tool: TriggerTool, waiting: Waiting) -> Fired:
    """When a trigger of a class fires next, whichever way that says so."""
    if not tool.by_time:
        return await tool.wait(waiting)
    since = waiting.since_ns if waiting.position is None else waiting.position
    at = time_of(tool, waiting.arguments, since)
    if at is None:  # its class has changed its mind: it never fires again
        return Fired(last=True)
    while (now := time.time_ns()) < at:  # noqa: ASYNC110 - the clock that is meant is no loop's
        await asyncio.sleep(min((at - now) / 1e9, _LONGEST_S))
    now = max(at, time.time_ns())  # what was missed by then is not told one by one
    return Fired(position=now, last=time_of(tool, waiting.arguments, now) is None)


async def _answer(tool_id: str, running: _Running) -> Message:
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
        return {"value": await _packed(value, tool_id)}
    except TooLarge:
        text = f"{tool_id} ran, and its output has too many parts to be shown; ask for less at once"
        return of_failure(ToolError(text, kind="limit"))
    except Exception as error:
        text = f"{tool_id} ran, and its output cannot be shown ({type(error).__name__})"
        return of_failure(ToolError(text, kind="backend"))


async def _packed(value: object, name: str) -> Message:
    try:
        return pack(value, INLINE_PARTS)
    except TooLarge:
        packed: Any = await in_a_thread_of_its_own(partial(pack, value), f"{name}-output")
        return packed


# ── stateful tools ───────────────────────────────────────────────────────────────────────────────


class OpenSteps:
    """What is open here, by the numbers that the holder gave."""

    def __init__(self) -> None:
        self._open: dict[int, Steps] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def take(self, tool: Tool, arguments: dict[str, Any], runtime: Runtime, step: Step) -> object:
        """One step, or the end, of one.

        :return: what it yields, as JSON values; :data:`OVER` where there is no further step
        """
        number = step.state
        steps = self._open.get(number)
        if steps is None:
            if not step.first:
                raise ToolError(
                    f"what {tool.spec.id} had open in its process is not there any more", kind="interrupted"
                )
            none = f"no step of {tool.spec.id} runs: it touches things only while one does"
            steps = self._open[number] = Steps(lambda of: steps_of(tool, arguments, of), tool.spec.id, none)
        try:
            if step.closes:
                await steps.close(runtime)
                return OVER
            value = await steps.next(runtime, step.sent)
        except NotEnding:
            text = f"{tool.spec.id} went on when it was told to end; its author lets it end at GeneratorExit"
            raise ToolError(text, kind="backend") from None
        finally:
            if steps.over:
                self._open.pop(number, None)
        return tool.finished(value) if isinstance(tool, FunctionTool) and value is not OVER else value

    def forget(self, state: int) -> None:
        """End one that no call ends."""
        if (steps := self._open.pop(state, None)) is not None:
            task = asyncio.get_running_loop().create_task(_close(steps))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def forget_all(self) -> None:
        """The holder is another one, or gone."""
        for number in tuple(self._open):
            self.forget(number)

    async def aclose(self) -> None:
        """End all, and wait until what stands in their ``finally`` has run; not for ever."""
        self.forget_all()
        if self._ending:
            _, left = await asyncio.wait(set(self._ending), timeout=GRACE_S)
            for task in left:
                task.cancel()


async def _close(steps: Steps) -> None:
    with contextlib.suppress(Exception):  # nobody is left to be told
        await steps.close()


# Requests of the holder to the people, the client and the model of a joined process.

NO_CLIENT = "no client is attached to this session"


class Serving:
    """Answers the holder for the sessions of this process.

    :param session_of: one of them, also while it is being opened; None where it is none
    """

    def __init__(self, session_of: Callable[[str], JoinedSession | None]) -> None:
        self._session_of = session_of
        requests: dict[str, Request] = {
            **served(Attendant, PEOPLE, self._attendant),
            **served(Peer, CLIENT, self._peer),
            **served(Buffers, BUFFERS, self._buffers),
            **served(Delegates, MODEL, self._delegates),
        }
        # Asked again by the next holder: an answer to this one would reach nobody.
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
