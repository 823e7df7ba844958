"""The tools, resources and watchdogs of a client process, which run here for the lease holder."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from handrail.arbiter.generator_steps import END_OF_STEPS, GeneratorIgnoredClose, GeneratorSteps
from handrail.arbiter.output.json_conversion import ValueTooLarge
from handrail.arbiter.tool_runner import run_in_daemon_thread
from handrail.contract.approval_requests import ApprovalHandler
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.json_codec import expect_json_object
from handrail.contract.services.client_services import ClientHandler, EditorClientHandler
from handrail.contract.services.subagent_services import NO_MODEL, SubagentRunner
from handrail.contract.services.tool_runtime import Runtime, UserQuestion
from handrail.contract.session_protocols import StopReason
from handrail.contract.struct import Struct
from handrail.contract.tool.decorator import FunctionTool, iterate_generator_steps
from handrail.contract.tool.resource_provider import PollableResourceProvider, ResourceProvider
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool.trigger_tools import TriggerContext, TriggerEvent, TriggerTool
from handrail.ipc.client.client_tool_runtime import ClientToolRuntime, OutputListenerRegistry
from handrail.ipc.client.remote_session import RemoteSession
from handrail.ipc.codec import wire_encoding
from handrail.ipc.codec.protocol_rpc import (
    WIRE_CODEC,
    RequestHandler,
    make_notification_handler,
    make_protocol_handlers,
    make_request_handler,
    make_request_operation,
)
from handrail.ipc.codec.tool_value_encoding import INLINE_PARTS, encode_return_value, encode_tool_error
from handrail.ipc.codec.wire_encoding import (
    ClientWatchdogDescription,
    ResourceProviderDescription,
    collect_tools_from_objects,
    describe_client_tools,
)
from handrail.ipc.server.client_proxies import APPROVAL_PREFIX, BUFFERS_PREFIX, CLIENT_PREFIX, SUBAGENT_PREFIX
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import OperationSpec, RemoteRequestError, logger
from handrail.ipc.wire.peer_connection import IpcConnection
from handrail.policy.watchdogs.api import (
    DEFAULT_TIMEOUT_MS,
    Watchdog,
    WatchdogCall,
    ask_watchdog_without_timeout,
    watchdog_name,
)
from handrail.runtime.call_runtime import NO_USER_ATTACHED
from handrail.runtime.secret_store import NO_SECRETS, SecretStore
from handrail.session.inbound.trigger_waits import compute_next_class_firing_ns

__all__ = ["ToolHost", "describe_client_tools"]

CLOSE_GRACE_S = 5.0
"""The time limit for ending open states at shutdown."""
_MAX_SLEEP_S = 60.0
"""The maximum time until a changed clock or a suspended machine is noticed."""


class ToolStepRequest(Struct, frozen=True):
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


class _RunningCall:
    """One call that is running here."""

    __slots__ = ("blocking", "runtime", "stopped", "work")

    def __init__(self, runtime: ClientToolRuntime, blocking: bool) -> None:
        self.runtime = runtime
        self.blocking = blocking
        self.work: asyncio.Task[Any]
        self.stopped = False

    def stop(self, reason: StopReason) -> None:
        """Stop the call. A thread cannot be stopped: it notices the stop when it checks."""
        self.stopped = True
        self.runtime.mark_call_stopped(reason)
        if not self.blocking:
            self.work.cancel()


class ToolHost:
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
        offerings: Sequence[ResourceProvider] = (),
        watchdogs: Sequence[Watchdog] = (),
        redact: Callable[[str], str] = str,
    ) -> None:
        self._secrets = secrets
        self._tools: dict[tuple[str, str], Tool] = {}
        self._offerings = offerings
        self._watchdogs = watchdogs
        self._redact = redact
        self._connection: IpcConnection | None = None
        self._running: dict[int, _RunningCall] = {}
        self._streams = OutputListenerRegistry()
        self._orphaned: set[asyncio.Task[Any]] = set()
        self._states = OpenToolStates()
        self._subscriptions: dict[int, Callable[[], Awaitable[None]]] = {}
        self.add_tools(tools)
        self.requests: Mapping[str, OperationSpec] = {
            name: make_request_operation(
                name, make_request_handler(handler), inline=name in ("execute", "offer"), cancel_when_lost=True
            )
            for name, handler in {
                "execute": self._execute,
                "offer": self._execute_provider,
                "questions": self._questions,
                "due": self._next_due,
                "wait": self._wait,
                "watchdog": self._watchdog,
                "offering.subscribe": self._subscribe,
                "offering.unsubscribe": self._unsubscribe,
                "offering.stamp": self._stamp,
                "offering.glance": self._read_quick_stamp,
            }.items()
        }
        """The requests of the lease holder. Runs start immediately, so that a later stop finds its run."""
        self.notifications: Mapping[str, Callable[[Any], None]] = {
            "stop": make_notification_handler(self._stop),
            "output": make_notification_handler(self._streams.deliver),
            "forget": make_notification_handler(self._states.end_state),
        }

    @property
    def provider_descriptions(self) -> list[Any]:
        """The current listings of its resource providers, for the lease holder."""
        items = [
            ResourceProviderDescription(
                wire_encoding.snapshot_source_resources(one), isinstance(one, PollableResourceProvider)
            )
            for one in self._offerings
        ]
        return WIRE_CODEC.encode_value(Sequence[ResourceProviderDescription], items)

    @property
    def watchdog_descriptions(self) -> list[Any]:
        """The descriptions of its watchdogs, for the lease holder."""
        items = [
            ClientWatchdogDescription(
                watchdog_name(one),
                float(getattr(one, "timeout_ms", DEFAULT_TIMEOUT_MS)),
                bool(getattr(one, "after_failures", False)),
                hasattr(one, "concerns"),
            )
            for one in self._watchdogs
        ]
        return WIRE_CODEC.encode_value(Sequence[ClientWatchdogDescription], items)

    def add_tools(self, tools: Iterable[object]) -> None:
        """Add tools. Earlier tools stay for turns that started with them.

        Of two tools with the same definition, the later one runs.

        :raises LoadError: with all faults
        """
        for found in collect_tools_from_objects(tools):
            self._tools[found.tool.spec.id, found.tool.spec.definition_hash] = found.tool

    def attach_connection(self, connection: IpcConnection) -> None:
        """Use a new connection to the lease holder, and end the states and subscriptions of the old one."""
        self._connection = connection
        self._running = {}
        self._states.end_all_states()
        self._unsubscribe_all()

    def _unsubscribe_all(self) -> None:
        """End the subscriptions of the last lease holder."""
        stops, self._subscriptions = self._subscriptions, {}
        for stop in stops.values():
            task = asyncio.ensure_future(stop())
            self._orphaned.add(task)
            task.add_done_callback(self._discard_task)

    async def aclose(self) -> None:
        """End all tools, each once.

        :raises ExceptionGroup: with all errors, after every tool was called
        """
        self._unsubscribe_all()
        await self._states.aclose()
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
        step: ToolStepRequest | None,
    ) -> Message:
        found = self._find_tool(tool, definition)
        runtime = self._make_runtime(run, found.spec, around or {})
        work = partial(self._run_tool, found, arguments, runtime, step)
        return await self._run_stoppable(run, runtime, work, blocking=bool(getattr(found, "blocking", False)))

    async def _execute_provider(
        self, run: int, offering: int, method: str, arguments: dict[str, Any], around: dict[str, Any]
    ) -> Message:
        """Call a method of a resource provider, for a call of a tool that runs in the lease holder."""
        found = self._find_provider(offering)
        if (give := _PROVIDER_METHODS.get(method)) is None:
            raise RemoteRequestError(
                "malformed", f"Unknown method: {method[:80]!r}. Expected one of: {', '.join(_PROVIDER_METHODS)}."
            )
        runtime = self._make_runtime(run, ToolSpec(WIRE_CODEC.get_type_reader(str)(around.get("tool_id")), ""), around)
        return await self._run_stoppable(run, runtime, partial(give, found, arguments, runtime))

    def _make_runtime(self, run: int, spec: ToolSpec, around: Mapping[str, Any]) -> ClientToolRuntime:
        if self._connection is None:
            raise RemoteRequestError("unavailable", "The process of the tool is not ready yet. Try again.")
        return ClientToolRuntime(self._connection, run, spec, around, self._streams, self._secrets)

    async def _run_stoppable(
        self, number: int, runtime: ClientToolRuntime, work: Callable[[], Awaitable[object]], *, blocking: bool = False
    ) -> Message:
        """Run something for a call of the lease holder, which can stop it by its number."""
        running = _RunningCall(runtime, blocking)
        running.work = asyncio.get_running_loop().create_task(_run_guarded(work))
        table = self._running
        table[number] = running
        try:
            await asyncio.wait((running.work,))
            return await _make_run_answer(runtime.tool_id, running)
        except asyncio.CancelledError:  # the lease holder has disconnected; the locks of this call are released
            running.stop("shutdown")
            if not running.work.done():
                self._orphaned.add(running.work)
                running.work.add_done_callback(self._discard_task)
            raise
        finally:
            del table[number]

    async def _run_tool(
        self, tool: Tool, arguments: dict[str, Any], runtime: ClientToolRuntime, step: ToolStepRequest | None
    ) -> object:
        if step is not None:
            return await self._states.run_state_step(tool, arguments, runtime, step)
        tool.check(arguments)
        if isinstance(tool, FunctionTool) and tool.blocking:
            return await run_in_daemon_thread(partial(tool.run_in_current_thread, arguments, runtime), tool.spec.id)
        return await tool.execute(arguments, runtime)

    async def _questions(self, tool: str, definition: str, arguments: dict[str, Any]) -> Message:
        found = self._find_tool(tool, definition)
        try:
            questions = found.questions(arguments)
            if isinstance(questions, Awaitable):
                questions = await questions
            return {"value": WIRE_CODEC.encode_value(Sequence[UserQuestion], questions)}
        except Exception as error:
            return encode_tool_error(error)

    async def _next_due(self, tool: str, definition: str, arguments: dict[str, Any], now_ns: int) -> Message:
        found = self._find_trigger(tool, definition)
        try:
            return {"value": compute_next_class_firing_ns(found, arguments, now_ns)}
        except ToolError as error:
            return encode_tool_error(error)

    async def _wait(self, tool: str, definition: str, waiting: TriggerContext) -> Message:
        found = self._find_trigger(tool, definition)
        try:
            fired = await _wait_for_trigger(found, waiting)
            if not isinstance(fired, TriggerEvent) or not isinstance(fired.text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - third-party code
                raise TypeError(f"wait() returned {type(fired).__name__}; expected a Fired with a text")
            return {"value": {"text": fired.text, "position": fired.position, "is_last": fired.is_last is True}}
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            return encode_tool_error(RuntimeError("wait() was cancelled from within the tool"))
        except (Exception, SystemExit) as error:  # sys.exit() in a tool would end the process
            return encode_tool_error(error)

    async def _watchdog(self, number: int, call: WatchdogCall, spec: ToolSpec | None) -> Message:
        if not 0 <= number < len(self._watchdogs):
            raise RemoteRequestError("unavailable", "The process no longer has this watchdog. Start a new turn.")
        watchdog = self._watchdogs[number]
        try:
            if spec is not None and _skips_tool(watchdog, spec):
                return {"value": {"action": "allow", "reason": ""}}
            return {"value": await ask_watchdog_without_timeout(watchdog, call, self._redact)}
        except (Exception, SystemExit) as error:  # the lease holder denies the call for any error
            return encode_tool_error(error)

    # ── resources and prompts ────────────────────────────────────────────────────────────────────

    def _find_provider(self, number: int) -> ResourceProvider:
        if not 0 <= number < len(self._offerings):
            raise RemoteRequestError(
                "unavailable", "The process no longer has these resources and prompts. Start a new turn."
            )
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

        self._subscriptions[number] = await self._find_provider(offering).subscribe(uri, updated)

    async def _unsubscribe(self, number: int) -> None:
        if (stop := self._subscriptions.pop(number, None)) is not None:
            await stop()

    async def _stamp(self, offering: int, uri: str) -> str:
        found = self._find_provider(offering)
        return await asyncio.to_thread(found.content_stamp, uri) if isinstance(found, PollableResourceProvider) else ""

    async def _read_quick_stamp(self, offering: int, uri: str) -> str:
        found = self._find_provider(offering)
        return await asyncio.to_thread(found.quick_stamp, uri) if isinstance(found, PollableResourceProvider) else ""

    def _find_trigger(self, tool: str, definition: str) -> TriggerTool:
        """Return a trigger class.

        :raises RemoteRequestError: if the tool does not exist or is not a trigger class
        """
        found = self._find_tool(tool, definition)
        if not isinstance(found, TriggerTool):
            raise RemoteRequestError(
                "malformed", f"{tool[:80]!r} is not a trigger class. Pass a class that this process registered."
            )
        return found

    def _find_tool(self, tool: str, definition: str) -> Tool:
        """Return a tool by its id and definition hash.

        :raises RemoteRequestError: if the tool does not exist
        """
        if (found := self._tools.get((tool, definition))) is None:
            raise RemoteRequestError(
                "unavailable", "The process no longer has this tool. Use another tool, or start a new turn."
            )
        return found

    def _discard_task(self, work: asyncio.Task[Any]) -> None:
        self._orphaned.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            logger.info("a call that continued after the lease holder disconnected has failed: %s", error)

    def _stop(self, run: int, reason: StopReason) -> None:
        if (running := self._running.get(run)) is not None:
            running.stop(reason)


_PROVIDER_METHODS: Mapping[
    str, Callable[[ResourceProvider, Mapping[str, Any], Runtime], Coroutine[Any, Any, object]]
] = {
    "read": lambda of, given, on: of.read(_read_text(given, "uri"), on),
    "prompt": lambda of, given, on: of.get_prompt(
        _read_text(given, "name"), expect_json_object(given.get("arguments")), on
    ),
    "complete": lambda of, given, on: of.complete(
        expect_json_object(given.get("ref")),
        expect_json_object(given.get("argument")),
        expect_json_object(given.get("context")),
        on,
    ),
}
"""The methods of a resource provider for calls, by name."""


def _read_text(given: Mapping[str, Any], name: str) -> str:
    return WIRE_CODEC.get_type_reader(str)(given.get(name))


def _skips_tool(watchdog: Watchdog, spec: ToolSpec) -> bool:
    """Return whether a watchdog skips calls of this tool.

    If its filter fails, the watchdog is called, and denies by failing.
    """
    try:
        return getattr(watchdog, "concerns")(spec) is False  # noqa: B009 - not every watchdog has it
    except Exception:
        return False


async def _run_guarded(work: Callable[[], Awaitable[object]]) -> object:
    try:
        return await work()
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # sys.exit() in a tool would end the event loop
        raise RuntimeError(f"the tool raised {type(error).__name__}: {error}") from error


async def _wait_for_trigger(tool: TriggerTool, waiting: TriggerContext) -> TriggerEvent:
    """Wait until a trigger fires, for both kinds of trigger class."""
    if not tool.is_scheduled:
        return await tool.wait(waiting)
    since = waiting.since_ns if waiting.position is None else waiting.position
    at = compute_next_class_firing_ns(tool, waiting.arguments, since)
    if at is None:  # the answer of its class has changed: it never fires again
        return TriggerEvent(is_last=True)
    while (now := time.time_ns()) < at:  # noqa: ASYNC110 - the wall clock counts, not the loop's clock
        await asyncio.sleep(min((at - now) / 1e9, _MAX_SLEEP_S))
    now = max(at, time.time_ns())  # missed times are not reported one by one
    return TriggerEvent(position=now, is_last=compute_next_class_firing_ns(tool, waiting.arguments, now) is None)


async def _make_run_answer(tool_id: str, running: _RunningCall) -> Message:
    work = running.work
    if work.cancelled():
        if running.stopped:
            return {"cancelled": True}
        return encode_tool_error(RuntimeError("the tool awaited a task that was cancelled (CancelledError)"))
    if (error := work.exception()) is not None:
        return encode_tool_error(error)
    value = work.result()
    if value is END_OF_STEPS:
        return {"over": True}
    try:
        return {"value": await _pack_value(value, tool_id)}
    except ValueTooLarge:
        text = f"`{tool_id}` ran, but its output has too many parts to be shown. Request less at a time."
        return encode_tool_error(ToolError(text, kind="limit"))
    except Exception as error:
        text = f"`{tool_id}` ran, but its output cannot be shown ({type(error).__name__}). Check its effect before you repeat it."
        return encode_tool_error(ToolError(text, kind="backend"))


async def _pack_value(value: object, name: str) -> Message:
    try:
        return encode_return_value(value, INLINE_PARTS)
    except ValueTooLarge:
        packed: Any = await run_in_daemon_thread(partial(encode_return_value, value), f"{name}-output")
        return packed


# ── stateful tools ───────────────────────────────────────────────────────────────────────────────


class OpenToolStates:
    """The open states of stateful tools, by the numbers of the lease holder."""

    def __init__(self) -> None:
        self._open: dict[int, GeneratorSteps] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def run_state_step(
        self, tool: Tool, arguments: dict[str, Any], runtime: Runtime, step: ToolStepRequest
    ) -> object:
        """Run one step of a state, or end it.

        :return: the yielded value as JSON values; :data:`END_OF_STEPS` after the last step
        """
        number = step.state
        if (steps := self._open.get(number)) is None:
            if not step.first:
                raise ToolError(
                    f"The open state of `{tool.spec.id}` no longer exists in its process. Open a new one.",
                    kind="interrupted",
                )
            none = f"No step of `{tool.spec.id}` is running. It can use its runtime only during a step."
            steps = self._open[number] = GeneratorSteps(
                lambda of: iterate_generator_steps(tool, arguments, of), tool.spec.id, none
            )
        try:
            if step.closes:
                await steps.close(runtime)
                return END_OF_STEPS
            value = await steps.take_step(runtime, step.sent)
        except GeneratorIgnoredClose:
            text = f"`{tool.spec.id}` continued after it was asked to end. Ask the user to fix the tool: it must end when it receives GeneratorExit."
            raise ToolError(text, kind="backend") from None
        finally:
            if steps.has_ended:
                self._open.pop(number, None)
        return (
            tool.convert_return_value_to_json(value)
            if isinstance(tool, FunctionTool) and value is not END_OF_STEPS
            else value
        )

    def end_state(self, state: int) -> None:
        """End a state outside a call."""
        if (steps := self._open.pop(state, None)) is not None:
            task = asyncio.get_running_loop().create_task(_close(steps))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def end_all_states(self) -> None:
        """End all states, because the lease holder has changed or disconnected."""
        for number in tuple(self._open):
            self.end_state(number)

    async def aclose(self) -> None:
        """End all states, and wait a limited time for their ``finally`` blocks."""
        self.end_all_states()
        if self._ending:
            _, left = await asyncio.wait(set(self._ending), timeout=CLOSE_GRACE_S)
            for task in left:
                task.cancel()


async def _close(steps: GeneratorSteps) -> None:
    with contextlib.suppress(Exception):  # no caller remains that could receive the error
        await steps.close()


# Requests of the lease holder to the approval handlers, clients and models of a client process.

NO_CLIENT_TEXT = "No client is attached to this session. Continue without it."


class SessionRequestHandlers:
    """The request handlers for the lease holder, on behalf of the sessions of this process.

    :param session_of: returns a session, also while it is being opened; None if it does not exist
    """

    def __init__(self, session_of: Callable[[str], RemoteSession | None]) -> None:
        self._session_of = session_of
        requests: dict[str, RequestHandler] = {
            **make_protocol_handlers(ApprovalHandler, APPROVAL_PREFIX, self._find_approval_handler),
            **make_protocol_handlers(ClientHandler, CLIENT_PREFIX, self._find_client_handler),
            **make_protocol_handlers(EditorClientHandler, BUFFERS_PREFIX, self._find_buffers),
            **make_protocol_handlers(SubagentRunner, SUBAGENT_PREFIX, self._find_subagent_runner),
        }
        # The next lease holder sends the request again: an answer to this one would be lost.
        self.requests: Mapping[str, OperationSpec] = {
            name: make_request_operation(name, one, cancel_when_lost=True) for name, one in requests.items()
        }
        self.notifications: Mapping[str, Callable[[Any], None]] = {
            "client.let_go": make_notification_handler(self._detach)
        }

    def _find_approval_handler(self, people_of: str) -> ApprovalHandler:
        if (session := self._session_of(people_of)) is None or session.attendant is None:
            raise UsageError(NO_USER_ATTACHED)
        return session.attendant

    def _find_client_handler(self, session: str) -> ClientHandler:
        if (found := self._session_of(session)) is None or found.client is None:
            raise UsageError(NO_CLIENT_TEXT)
        return found.client

    def _find_buffers(self, session: str) -> EditorClientHandler:
        peer = self._find_client_handler(session)
        if not isinstance(peer, EditorClientHandler):
            raise UsageError(NO_CLIENT_TEXT)
        return peer

    def _find_subagent_runner(self, session: str) -> SubagentRunner:
        if (found := self._session_of(session)) is None or found.delegates is None:
            raise ToolError(NO_MODEL, kind="unavailable")
        return found.delegates

    def _detach(self, session: str, call: str) -> None:
        if (found := self._session_of(session)) is not None and found.client is not None:
            found.client.detach(call)
