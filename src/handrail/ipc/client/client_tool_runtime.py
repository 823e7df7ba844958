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

from handrail.arbiter.client_requests import make_log_event_data
from handrail.arbiter.output.json_conversion import ValueTooLarge
from handrail.arbiter.stoppable_execution import STOPPED_TEXT, get_stop_error_kind
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ErrorKind, ToolError
from handrail.contract.json_codec import MalformedDataError, expect_json_object
from handrail.contract.services.client_services import LOG_LEVELS, ClientService, LogLevel
from handrail.contract.services.tool_runtime import Runtime, SecretService, UserContext
from handrail.contract.session_protocols import StopReason
from handrail.contract.tool.requires import CapabilitySet
from handrail.contract.tool.spec import ToolSpec
from handrail.ipc.codec.protocol_rpc import (
    CALL_METHOD,
    RUNTIME_PREFIX,
    RUNTIME_SERVICES,
    WIRE_CODEC,
    MethodSignature,
    collect_async_methods,
    inspect_method_signature,
    make_protocol_proxy,
)
from handrail.ipc.codec.tool_value_encoding import decode_tool_error, encode_return_value
from handrail.ipc.server.client_proxies import RemoteClientService
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import RemoteRequestError
from handrail.ipc.wire.peer_connection import ConnectionLost, IpcConnection
from handrail.runtime.secret_store import NO_SECRETS, SecretStore, ToolSecretService
from handrail.session.session_events import DROPPABLE_KINDS

if TYPE_CHECKING:
    from handrail.contract.services.channels_and_triggers import ChannelService, TriggerService
    from handrail.contract.services.file_services import FileService, SearchService
    from handrail.contract.services.history_and_skill_services import SkillService, TranscriptService
    from handrail.contract.services.job_and_tool_services import CatalogService, JobService, TerminalService
    from handrail.contract.services.language_services import LanguageService
    from handrail.contract.services.memory_service import MemoryService
    from handrail.contract.services.resource_services import ResourceService
    from handrail.contract.services.subagent_services import SubagentService
    from handrail.contract.services.task_services import TaskService
    from handrail.contract.services.tool_runtime import (
        DocumentService,
        ModeService,
        NetworkService,
        ShellService,
        ToolStateService,
        UserQuestionService,
    )
    from handrail.contract.tool.spec import ToolSession


class OutputListenerRegistry:
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

    def deliver(self, stream: int, piece: bytes) -> None:
        if (listener := self._listeners.get(stream)) is not None:
            listener(piece)


class RemoteCancellationToken:
    """A :class:`~handrail.contract.services.tool_runtime.CancellationToken` for a run in this process."""

    reason: StopReason | None = None

    @property
    def is_requested(self) -> bool:
        return self.reason is not None

    def raise_if_requested(self) -> None:
        if self.reason is not None:
            raise ToolError(
                f"The call was {STOPPED_TEXT[self.reason]}. Check its effect before you repeat it.",
                kind=get_stop_error_kind(self.reason),
            )


_MAX_PIECE_BYTES = 64 * 1024
"""The maximum size of output in one message, in bytes."""


_CONTEXT_VALUES = frozenset({"call_id", "session_id", "agent", "topic", "client_meta", "workdir", "config"})


class ClientToolRuntime:
    """A :class:`~handrail.contract.services.tool_runtime.Runtime` over a connection.

    :param number: the number of the run, by which the lease holder finds the call
    :param spec: the spec of the tool; for resources and prompts, a spec without secrets
    :param context: the values that stay constant during a call; empty for a tool without a runtime
    :param secrets: the secrets of this process, for its own tools
    """

    if TYPE_CHECKING:  # from the context
        call_id: str
        session_id: str
        agent: str
        topic: str | None
        client_meta: Mapping[str, Any]
        workdir: str
        config: Mapping[str, str]
        # each is created at its first use
        subagents: SubagentService
        catalog: CatalogService
        channels: ChannelService
        files: FileService
        jobs: JobService
        language_servers: LanguageService
        mode: ModeService
        documents: DocumentService
        net: NetworkService
        resources: ResourceService
        tool_session: ToolSession
        user: UserQuestionService
        search: SearchService
        shell: ShellService
        skills: SkillService
        state: ToolStateService
        tasks: TaskService
        terminals: TerminalService
        transcript: TranscriptService
        memory: MemoryService
        triggers: TriggerService

    def __init__(
        self,
        connection: IpcConnection,
        number: int,
        spec: ToolSpec,
        context: Mapping[str, Any],
        streams: OutputListenerRegistry,
        secrets: SecretStore = NO_SECRETS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._number = number
        self._context = context
        self._streams = streams
        self._pending_partial: Message | None = None
        self.tool_id = spec.id
        self.secrets: SecretService = ToolSecretService(spec, secrets)
        self.cancellation = RemoteCancellationToken()

    def __getattr__(self, name: str) -> Any:
        if name in _CONTEXT_VALUES:
            return self._context[name]
        if (protocol := RUNTIME_SERVICES.get(name)) is None:
            raise AttributeError(name)
        service: object = make_protocol_proxy(cast("type[object]", protocol), f"{name}.", self.invoke_runtime_service)
        setattr(self, name, service)
        return service

    @property
    def user_context(self) -> UserContext | None:
        return WIRE_CODEC.get_type_codec(UserContext | None).read(self._context["user_context"])

    @property
    def capabilities(self) -> CapabilitySet:
        return WIRE_CODEC.get_type_reader(CapabilitySet)(self._context["capabilities"])

    @property
    def max_output_bytes(self) -> int:
        return self._context["max_output"]

    @property
    def client(self) -> ClientService:
        there = make_protocol_proxy(ClientService, "client.", self.invoke_runtime_service)
        return RemoteClientService(there, partial(self.notify, "detach", {}), self._context.get("client", ()))

    def report_progress(
        self, message: str = "", *, fraction: float | None = None, done: float | None = None, total: float | None = None
    ) -> None:
        self.notify("progress", {"message": str(message), "fraction": fraction, "done": done, "total": total})

    def log(self, level: LogLevel, data: Any, logger: str | None = None) -> None:
        if level not in LOG_LEVELS:
            raise ToolError(
                f"Invalid log level: {level!r:.40}. Expected one of: {', '.join(LOG_LEVELS)}.", kind="invalid_input"
            )
        self.notify("log", make_log_event_data(level, data, logger))

    def write_output(self, piece: str | bytes) -> None:
        data = piece.encode("utf-8", "backslashreplace") if isinstance(piece, str) else bytes(piece)
        for start in range(0, len(data), _MAX_PIECE_BYTES):
            self.notify("shown", {"piece": data[start : start + _MAX_PIECE_BYTES]})

    def notify(self, what: str, body: Message) -> None:
        """Send a notification, from any thread."""
        self._run_on_loop(partial(self._send, what), {"run": self._number, **body})

    def set_partial_result(self, data: Any) -> None:
        try:
            value = encode_return_value(data)
        except (ValueTooLarge, MemoryError) as error:
            value = encode_return_value(f"<partial output cannot be shown ({type(error).__name__})>")
        self._run_on_loop(self._queue_partial_result, {"run": self._number, "value": value})

    async def call(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        method = inspect_method_signature(collect_async_methods(Runtime)[CALL_METHOD])
        return await self.invoke_runtime_service(
            CALL_METHOD, method, {"tool_id": tool_id, "arguments": dict(arguments)}
        )

    def mark_call_stopped(self, reason: StopReason) -> None:
        self.cancellation.reason = self.cancellation.reason or reason
        self._send_partial(at_once=True)

    async def invoke_runtime_service(self, op: str, method: MethodSignature, fields: dict[str, Any]) -> Any:
        """Invoke a service method of the call's runtime in the lease holder.

        :raises ToolError: the error of the service, or if the lease holder is not available
        """
        if method.callback is not None and fields[method.callback] is not None:
            return await self._request_streamed(op, method, fields)
        if asyncio.get_running_loop() is self._loop:
            return await self._request(op, method, fields)
        there = asyncio.run_coroutine_threadsafe(self._request(op, method, fields), self._loop)
        return await asyncio.wrap_future(there)

    async def _request(self, service: str, method: MethodSignature, fields: Mapping[str, Any]) -> Any:
        body = {"run": self._number, "arguments": fields}
        try:
            answer = expect_json_object(await self._connection.request(RUNTIME_PREFIX + service, body, settle=True))
            if (failure := decode_tool_error(answer)) is not None:
                raise failure
            return method.result_form.read(answer.get("value"))
        except ConnectionLost:
            text = f"`{service}` is unavailable: the process that holds the workspace has disconnected. Try again."
            raise ToolError(text, kind="unavailable") from None
        except RemoteRequestError as refused:
            self.cancellation.raise_if_requested()
            kinds: Mapping[str, ErrorKind] = {"limit": "limit", "answer_too_large": "limit", "not_running": "cancelled"}
            raise ToolError(refused.text, kind=kinds.get(refused.kind, "backend")) from None
        except MalformedDataError as error:
            raise ToolError(
                f"`{service}` returned an invalid answer: {error}. Use the same Handrail version for all processes.",
                kind="backend",
            ) from None

    def add_output_listener(self, listener: Callable[[bytes], None]) -> int:
        """Register a listener for the output of a program, and return its number."""
        here = asyncio.get_running_loop()
        if here is self._loop:
            return self._streams.open(listener)
        return self._streams.open(lambda piece: _call_in_loop(here, listener, piece))

    async def _request_streamed(self, op: str, method: MethodSignature, fields: dict[str, Any]) -> Any:
        """Invoke a service method that sends pieces before its answer; see :meth:`invoke_runtime_service`."""
        assert method.callback is not None
        listener: Callable[[bytes], None] = fields[method.callback]
        failures: list[BaseException] = []

        def listen(piece: bytes) -> None:
            try:
                if not failures:
                    listener(piece)
            except Exception as error:  # it ends the run, as in the process of the program
                failures.append(error)
                running.cancel()

        stream = self.add_output_listener(listen)
        asked = {**fields, method.callback: stream}
        if asyncio.get_running_loop() is self._loop:
            running: asyncio.Future[Any] = asyncio.ensure_future(self._request(op, method, asked))
        else:
            there = asyncio.run_coroutine_threadsafe(self._request(op, method, asked), self._loop)
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

    def _run_on_loop(self, call: Callable[[Message], None], body: Message) -> None:
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            call(body)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call, body)

    def _send(self, what: str, body: Message) -> None:
        with contextlib.suppress(RemoteRequestError):  # too long for a message
            self._connection.notify(what, body, skip_when_behind=what in DROPPABLE_KINDS)

    def _queue_partial_result(self, body: Message) -> None:
        """Queue partial data.

        Only the latest is sent, and while the lease holder is behind, only when it is needed.
        """
        if self._pending_partial is None:
            self._loop.call_soon(self._send_partial)
        self._pending_partial = body

    def _send_partial(self, *, at_once: bool = False) -> None:
        if (body := self._pending_partial) is None:
            return
        try:
            if self._connection.notify("partial", body, skip_when_behind=not at_once):
                self._pending_partial = None
        except RemoteRequestError:  # too long for a message
            self._pending_partial = None


def _call_in_loop(loop: asyncio.AbstractEventLoop, listener: Callable[[bytes], None], piece: bytes) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(listener, piece)
