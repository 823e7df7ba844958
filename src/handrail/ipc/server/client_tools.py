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

from handrail.arbiter.client_requests import MAX_PROGRESS_CHARACTERS
from handrail.arbiter.generator_steps import END_OF_STEPS, get_current_step_runtime
from handrail.arbiter.stoppable_execution import StoppableTaskRunner
from handrail.contract.errors import ToolError
from handrail.contract.json_codec import MalformedDataError, decode_exact_fields, expect_json_object
from handrail.contract.services.client_services import METHOD_CAPABILITIES, LogLevel
from handrail.contract.services.tool_runtime import Runtime, UserContext, UserQuestion
from handrail.contract.session_protocols import StopReason
from handrail.contract.tool.requires import CapabilitySet
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool.trigger_tools import COMMON_PARAMETERS, TriggerContext, TriggerEvent, TriggerTool
from handrail.ipc.codec.protocol_rpc import (
    RUNTIME_PREFIX,
    WIRE_CODEC,
    RuntimeServiceMethod,
    TriggerClassRef,
    collect_runtime_methods,
    inspect_method_signature,
    make_notification_handler,
)
from handrail.ipc.codec.tool_value_encoding import decode_return_value, decode_tool_error, encode_tool_error
from handrail.ipc.codec.wire_encoding import ClientToolDescription, decode_tool_descriptions
from handrail.ipc.server.client_proxies import get_supported_tool_request_kinds
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import OperationSpec, RemoteRequestError
from handrail.ipc.wire.peer_connection import ConnectionLost, IpcConnection
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback

_DISCONNECTED_TEXT = "The process that provides `{}` has disconnected. Nothing was run. Ask the user to start it again."
_CLIENT_CAPABILITIES = frozenset(METHOD_CAPABILITIES.values())


class _ClientDisconnected(ToolError):
    """The client process has disconnected."""


class _RunningToolCall:
    """One call that is running in the client process."""

    __slots__ = ("doors", "kept", "number", "over", "runtime", "tool_id")

    def __init__(self, number: int, tool_id: str, runtime: Runtime) -> None:
        self.number = number
        self.tool_id = tool_id
        self.runtime = runtime
        self.doors: set[asyncio.Task[Any]] = set()
        self.kept: Any = None
        self.over = False


class ClientProcessTools:
    """The tools of one client process.

    :param connection: the connection to the process; nothing is sent on it yet
    :param described: the tools, as :func:`~handrail.ipc.codec.wire_encoding.describe_client_tools` describes them
    :param secrets: the names of the secrets that the process has for them
    :raises LoadError: with all faults of the descriptions
    """

    def __init__(self, connection: IpcConnection, described: object, secrets: Iterable[str] = ()) -> None:
        self.secrets = frozenset(secrets)
        self._connection = connection
        self._numbers = itertools.count(1)
        self.state_numbers = itertools.count(1)
        self._runs: dict[int, _RunningToolCall] = {}
        self.tools: tuple[Tool, ...] = self.replace_tools(described)
        self.requests: Mapping[str, OperationSpec] = {
            RUNTIME_PREFIX + name: OperationSpec(
                partial(self._call_service, name, service_method), cancel_when_lost=True
            )
            for name, service_method in collect_runtime_methods().items()
        }
        """The requests that the client process may send: the runtime services of the calls that it runs."""
        self.notifications: Mapping[str, Callable[[Any], None]] = {
            "progress": make_notification_handler(self._progress),
            "partial": make_notification_handler(self._partial),
            "log": make_notification_handler(self._log),
            "shown": make_notification_handler(self._show_output),
            "detach": make_notification_handler(self._detach),
        }

    @property
    def process_display_name(self) -> str:
        """The name of the process in texts for users."""
        peer = self._connection.peer
        return f"process {peer.pid}" if peer is not None and peer.pid else "another process"

    def replace_tools(self, described: object) -> tuple[Tool, ...]:
        """Replace the tools of the process, and return the new ones. Running calls of the old tools continue.

        :raises LoadError: with all faults; the old tools stay
        """
        process = self.process_display_name
        self.tools = tuple(
            _make_client_tool(one, process, self) for one in decode_tool_descriptions(described, process)
        )
        return self.tools

    def end_tool_state(self, state: int) -> None:
        """End the open state of a stateful tool in the client process.

        Its code cannot use the runtime meanwhile.
        """
        self._connection.notify("forget", {"state": state})

    async def execute_tool(
        self, tool: ClientTool, args: dict[str, Any], runtime: Runtime, step: Message | None = None
    ) -> object:
        """Execute a tool in the client process; see :meth:`ClientTool.execute`.

        :param step: the step of a stateful tool
        """
        tool_id = tool.spec.id
        clients = not _CLIENT_CAPABILITIES.isdisjoint(tool.spec.requires.capabilities)
        body: Message = {
            "tool": tool_id,
            "definition": tool.definition,
            "arguments": _to_exact_arguments(tool_id, args),
            "around": _get_constant_call_values(runtime, clients=clients) if tool.takes_runtime else None,
            "step": None if step is None else _to_exact_arguments(tool_id, step),
        }
        return await self._run_client_operation("execute", tool_id, runtime, body)

    async def call_provider_method(
        self, number: int, method: str, arguments: dict[str, Any], runtime: Runtime
    ) -> object:
        """Call a method of one of the process's resource providers, for the call of ``runtime``.

        :param number: the number of the provider
        """
        body: Message = {
            "offering": number,
            "method": method,
            "arguments": _to_exact_arguments(runtime.tool_id, arguments),
            "around": {**_get_constant_call_values(runtime, clients=False), "tool_id": runtime.tool_id},
        }
        return await self._run_client_operation("offer", runtime.tool_id, runtime, body)

    async def _run_client_operation(self, op: str, tool_id: str, runtime: Runtime, body: Message) -> object:
        """Run an operation in the client process for a call, and serve the call's runtime to it meanwhile."""
        cancellation = runtime.cancellation
        if cancellation.is_requested:  # since the last check
            raise asyncio.CancelledError
        run = _RunningToolCall(next(self._numbers), tool_id, runtime)
        self._runs[run.number] = run
        if isinstance(cancellation, StoppableTaskRunner):
            cancellation.on_stop = partial(self._stop, run)
        try:
            asking = asyncio.ensure_future(self._connection.request(op, {"run": run.number, **body}))
            return _read_return_value(await self._wait_for_answer(run, asking))
        except ConnectionLost as lost:
            raise self._disconnect_error(run, lost) from None
        except RemoteRequestError as refused:
            raise _refusal_error(run, refused) from None
        except MalformedDataError as error:
            raise ToolError(
                f"The process of `{tool_id}` returned an invalid answer: {error}. Ask the user to restart it.",
                kind="backend",
            ) from None
        finally:
            if isinstance(cancellation, StoppableTaskRunner):
                cancellation.on_stop = None
            run.over = True
            del self._runs[run.number]
            await _end_service_tasks(run.doors)

    async def request_tool_questions(self, tool: ClientTool, args: dict[str, Any]) -> Sequence[UserQuestion]:
        """Return the tool's questions to the user; see :meth:`~handrail.contract.tool.tool_protocol.Tool.questions`."""
        body = {"arguments": _to_exact_arguments(tool.spec.id, args)}
        return await self._send_tool_request(tool, "questions", body, Sequence[UserQuestion], settle=True)

    async def would_trigger_never_fire(self, tool: ClientTool, arguments: Mapping[str, Any]) -> bool:
        body = {"arguments": dict(arguments), "now_ns": time.time_ns()}
        return await self._send_tool_request(tool, "due", body, int | None) is None

    async def wait_for_trigger(self, tool: ClientTool, waiting: TriggerContext) -> TriggerEvent:
        """Wait until a trigger fires; see :meth:`~handrail.contract.tool.trigger_tools.TriggerTool.wait`.

        If the process has disconnected, nothing fires until another process with this tool opens the session.
        """
        try:
            return await self._send_tool_request(
                tool, "wait", {"waiting": WIRE_CODEC.encode_value(TriggerContext, waiting)}, TriggerEvent
            )
        except _ClientDisconnected:
            return await asyncio.get_running_loop().create_future()

    async def _send_tool_request(
        self, tool: ClientTool, asks: str, body: Message, gives: Any, *, settle: bool = False
    ) -> Any:
        """Send a request about a tool that is not a call of it.

        :param gives: the type of the answer
        :raises ToolError: the error of the tool; ``unavailable`` if the process has disconnected or refuses, ``backend`` if the
            answer is invalid
        """
        tool_id = tool.spec.id
        asked = {"tool": tool_id, "definition": tool.definition, **body}
        try:
            fields = expect_json_object(await self._connection.request(asks, asked, settle=settle))
            if (failure := decode_tool_error(fields)) is not None:
                raise failure
            return WIRE_CODEC.get_type_codec(gives).read(fields.get("value"))
        except ConnectionLost:
            raise _ClientDisconnected(_DISCONNECTED_TEXT.format(tool_id), kind="unavailable") from None
        except RemoteRequestError as refused:
            raise ToolError(f"`{tool_id}` is unavailable: {refused.text}", kind="unavailable") from None
        except MalformedDataError as error:
            raise ToolError(
                f"The process of `{tool_id}` returned an invalid answer: {error}. Ask the user to restart it.",
                kind="backend",
            ) from None

    async def _wait_for_answer(self, run: _RunningToolCall, asking: asyncio.Future[Any]) -> Any:
        """Wait until the call has ended, also if this wait is cancelled.

        Its locks are released only when nothing of it runs.
        """
        while not asking.done():
            try:
                await asyncio.wait((asking,))
            except asyncio.CancelledError:
                self._stop(run, "user")
        return asking.result()

    def _stop(self, run: _RunningToolCall, reason: StopReason) -> None:
        self._connection.notify("stop", {"run": run.number, "reason": reason})

    def _disconnect_error(self, run: _RunningToolCall, lost: ConnectionLost) -> ToolError:
        if not lost.sent:
            return ToolError(_DISCONNECTED_TEXT.format(run.tool_id), kind="unavailable")
        return ToolError(
            f"The process of `{run.tool_id}` disconnected during the call. It is unknown whether the call took effect. "
            "Check the result before you call it again.",
            kind="interrupted",
            data=run.kept,
        )

    # ── requests of the client process ───────────────────────────────────────────────────────────

    async def _call_service(self, name: str, service_method: RuntimeServiceMethod, body: Any) -> Message:
        """Call a runtime service of a call that the process is running."""
        of, method = service_method.get_function, inspect_method_signature(service_method.function)
        try:
            asked = decode_exact_fields(body, {"run": WIRE_CODEC.get_type_reader(int), "arguments": expect_json_object})
            arguments = decode_exact_fields(asked["arguments"], method.readers)
        except MalformedDataError as error:
            raise RemoteRequestError("malformed", f"Invalid request `{name}`: {error}.") from None
        if (run := self._runs.get(asked["run"])) is None or run.over:
            raise RemoteRequestError(
                "not_running", f"`{name}` is only available during a call: run {asked['run']} is not running."
            )
        if method.callback is not None and (stream := arguments[method.callback]) is not None:
            arguments[method.callback] = partial(self._output, stream)
        task = asyncio.current_task()
        assert task is not None
        run.doors.add(task)
        try:
            for key, one in arguments.items():
                if type(one) is TriggerClassRef:
                    arguments[key] = await self._find_trigger_class(one, arguments["arguments"])
            answer = await of(run.runtime)(**arguments)
            return {"value": answer if method.result_form.write is None else method.result_form.write(answer)}
        except Exception as error:  # the tool may catch the errors of its runtime
            return encode_tool_error(error)
        finally:
            run.doors.discard(task)

    async def _find_trigger_class(self, named: TriggerClassRef, arguments: Mapping[str, Any]) -> ClientTriggerTool:
        """Return a trigger class of the client process.

        :param arguments: the arguments of the trigger that will be added
        :raises ToolError: ``invalid_input`` if the process has no such class, or if the trigger would never fire
        """
        for tool in self.tools:
            if isinstance(tool, ClientTriggerTool) and (tool.spec.id, tool.definition) == (
                named.tool,
                named.definition,
            ):
                await tool.require_firing_time(arguments)
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
            found.runtime.report_progress(message[:MAX_PROGRESS_CHARACTERS], fraction=fraction, done=done, total=total)

    def _show_output(self, run: int, piece: bytes) -> None:
        if (found := self._runs.get(run)) is not None:
            found.runtime.write_output(piece)

    def _log(self, run: int, level: LogLevel, data: Any, logger: str | None) -> None:
        if (found := self._runs.get(run)) is not None:
            found.runtime.log(level, data, logger)

    def _detach(self, run: int) -> None:
        if (found := self._runs.get(run)) is not None:
            found.runtime.client.detach()

    def _partial(self, run: int, value: object) -> None:
        if (found := self._runs.get(run)) is not None:
            found.kept = value
            found.runtime.set_partial_result(value)


def _get_constant_call_values(runtime: Runtime, *, clients: bool) -> Message:
    """Return the values that stay constant during a call.

    :param clients: whether the tool may send requests to the client
    """
    return {
        "call_id": runtime.call_id,
        "session_id": runtime.session_id,
        "agent": runtime.agent,
        "topic": runtime.topic,
        "user_context": WIRE_CODEC.encode_value(UserContext | None, runtime.user_context),
        "client_meta": dict(runtime.client_meta),
        "workdir": runtime.workdir,
        "capabilities": WIRE_CODEC.encode_value(CapabilitySet, runtime.capabilities),
        "config": dict(runtime.config),
        "max_output": runtime.max_output_bytes,
        "client": get_supported_tool_request_kinds(runtime.client) if clients else [],
    }


def _to_exact_arguments(tool_id: str, args: dict[str, Any]) -> Any:
    """Return the arguments in a form that arrives unchanged.

    The schema has checked that they are JSON values.

    :raises ToolError: ``invalid_input`` if a program passed values that the wire cannot express
    """
    try:
        return orjson.Fragment(orjson.dumps(args))
    except TypeError:  # keys that are not texts, half characters, integers of more than 64 bits
        pass
    try:
        exact = decode_json_with_fallback(encode_json_with_fallback(args, 1 << 62)) == _tuples_to_lists(args)
    except RecursionError:
        exact = False
    if not exact:
        raise ToolError(
            f"The arguments of `{tool_id}` cannot be sent to its process unchanged. "
            "Pass JSON values only: text keys, and integers with fewer than a thousand digits.",
            kind="invalid_input",
        )
    return args


def _tuples_to_lists(value: Any) -> Any:
    """Convert tuples to lists, as they arrive."""
    if isinstance(value, dict):
        return {key: _tuples_to_lists(inner) for key, inner in value.items()}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple)):
        return [_tuples_to_lists(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _read_return_value(answer: object) -> object:
    """Return the return value of the tool.

    :raises Exception: the exception that the tool raised
    :raises asyncio.CancelledError: if the tool ended because the call was stopped
    :raises MalformedDataError: if the answer is invalid
    """
    fields = expect_json_object(answer)
    if fields.get("cancelled") is True:
        raise asyncio.CancelledError
    if fields.get("over") is True:
        return END_OF_STEPS
    if (failure := decode_tool_error(fields)) is not None:
        raise failure
    return decode_return_value(fields.get("value"))


def _refusal_error(run: _RunningToolCall, refused: RemoteRequestError) -> ToolError:
    if refused.kind == "answer_too_large":
        return ToolError(f"`{run.tool_id}` ran. {refused.text} Request less at a time.", kind="limit")
    if refused.kind == "limit":
        return ToolError(f"`{run.tool_id}` was not called. {refused.text}", kind="limit")
    if refused.kind == "cancelled":
        return ToolError(
            f"The process of `{run.tool_id}` is shutting down. It is unknown whether the call took effect. "
            "Check the result before you call it again.",
            kind="interrupted",
            data=run.kept,
        )
    kind = "unavailable" if refused.kind in ("unavailable", "unknown_op") else "backend"
    return ToolError(f"`{run.tool_id}` failed: {refused.text}", kind=kind)


async def _end_service_tasks(doors: set[asyncio.Task[Any]]) -> None:
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


class ClientTool(Tool):
    """One tool of a client process.

    It has the same label as the lease holder's Python tools (:attr:`~handrail.contract.tool.tool_protocol.Tool.trusted`): it is code of
    the same operator, confined by the checks of the runtime, not by the operating system.
    """

    blocking = True
    """A cancellation here does not end the work there: the process is asked to stop it, and the locks stay until it has."""

    def __init__(self, description: ClientToolDescription, process: str, home: ClientProcessTools) -> None:
        self.spec = description.spec
        self.own_secrets = home.secrets.union(description.settings)
        self.definition = description.definition
        self.takes_runtime = description.takes_runtime
        self.source_request = description.source_request
        self.state_arguments = description.state_arguments
        self._client_tools = home
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
        return await self._client_tools.execute_tool(self, args, runtime)


class ClientToolWithUpfrontQuestions(ClientTool):
    """A tool of a client process that may have questions for the user before it runs."""

    async def questions(self, args: dict[str, Any]) -> Sequence[UserQuestion]:
        return await self._client_tools.request_tool_questions(self, args)


class StatefulClientTool(ClientTool):
    """A stateful tool of a client process: its generator runs there, and this one requests each step."""

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        home = self._client_tools
        step: Message = {"state": next(home.state_numbers), "first": True, "sent": None, "closes": False}
        while True:
            try:
                value = await home.execute_tool(self, args, get_current_step_runtime(runtime), step)
            except BaseException:
                home.end_tool_state(step["state"])  # its generator may have advanced although the answer failed
                raise
            if value is END_OF_STEPS:
                return
            try:
                sent: Any = yield value  # pyright: ignore[reportUnknownVariableType]
            except GeneratorExit:
                await self._close(args, runtime, {**step, "first": False, "sent": None, "closes": True})
                raise
            step = {**step, "first": False, "sent": sent}

    async def _close(self, args: dict[str, Any], runtime: Runtime, step: Message) -> None:
        try:
            now = get_current_step_runtime(runtime)
        except ToolError:  # it ends without a call
            self._client_tools.end_tool_state(step["state"])
        else:
            await self._client_tools.execute_tool(self, args, now, step)


class StatefulClientToolWithQuestions(StatefulClientTool):
    """A stateful tool of a client process that may have questions for the user before it is opened."""

    questions = ClientToolWithUpfrontQuestions.questions


class ClientTriggerTool(ClientTool, TriggerTool):
    """A trigger class of a client process: its triggers are added here, and its process waits for them."""

    def __init__(self, description: ClientToolDescription, process: str, home: ClientProcessTools) -> None:
        super().__init__(description, process, home)
        self._by_time = description.trigger == "time"
        self.blocking = description.adds_itself

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        if self.blocking:  # it has its own `execute`, which runs in its process
            return await ClientTool.execute(self, args, runtime)
        await self.require_firing_time({key: value for key, value in args.items() if key not in COMMON_PARAMETERS})
        return await TriggerTool.execute(self, args, runtime)

    async def require_firing_time(self, arguments: Mapping[str, Any]) -> None:
        """Check that a trigger with times fires at least once.

        :raises ToolError: ``invalid_input`` if it would never fire
        """
        if self._by_time and await self._client_tools.would_trigger_never_fire(self, arguments):
            raise ToolError(
                f"The trigger was not added: with these arguments, `{self.spec.id}` would never fire. Change the arguments.",
                kind="invalid_input",
            )

    async def wait(self, context: TriggerContext) -> TriggerEvent:
        return await self._client_tools.wait_for_trigger(self, context)


_TOOL_CLASSES: Mapping[tuple[bool, bool], Callable[[ClientToolDescription, str, ClientProcessTools], ClientTool]] = {
    (False, False): ClientTool,
    (False, True): ClientToolWithUpfrontQuestions,
    (True, False): StatefulClientTool,
    (True, True): StatefulClientToolWithQuestions,
}
"""The classes by whether the tool is stateful, and whether it has questions."""


def _make_client_tool(description: ClientToolDescription, process: str, home: ClientProcessTools) -> ClientTool:
    if description.trigger:
        return ClientTriggerTool(description, process, home)
    steps = description.spec.mode == "stateful" and description.state_arguments is None
    return _TOOL_CLASSES[steps, description.has_questions](description, process, home)
