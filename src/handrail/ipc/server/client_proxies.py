"""The lease holder's proxies for a client process: its approval handlers, clients, models, watchdogs and resources."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from handrail.contract.approval_requests import ApprovalAnswer, ApprovalHandler, ApprovalRequest
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import HandrailError, ToolError
from handrail.contract.json_codec import MalformedDataError
from handrail.contract.services.client_services import (
    CLIENT_REQUEST_KINDS,
    METHOD_CAPABILITIES,
    ClientHandler,
    ClientMethod,
    ClientRequestKind,
    ClientService,
    EditorClientHandler,
    RequestToClient,
    classify_client_request,
)
from handrail.contract.services.resource_services import PromptSpec, ResourceSpec, ResourceTemplate
from handrail.contract.services.subagent_services import SubagentRunner, SubagentTask
from handrail.contract.services.tool_runtime import Runtime, UserQuestion
from handrail.contract.tool.spec import ToolSpec
from handrail.ipc.codec import wire_encoding
from handrail.ipc.codec.protocol_rpc import WIRE_CODEC, make_connection_invoker, make_protocol_proxy
from handrail.ipc.codec.tool_value_encoding import decode_tool_error
from handrail.ipc.codec.wire_encoding import (
    ClientWatchdogDescription,
    ResourceProviderDescription,
    ResourceProviderListing,
)
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import RemoteRequestError
from handrail.ipc.wire.peer_connection import ConnectionLost, IpcConnection
from handrail.policy.watchdogs.api import WatchdogCall, WatchdogDecision

APPROVAL_PREFIX, CLIENT_PREFIX, BUFFERS_PREFIX, SUBAGENT_PREFIX = "people.", "client.", "buffers.", "model."
"""The prefixes of the operations of :class:`ApprovalHandler`, :class:`ClientHandler`, :class:`EditorClientHandler` and :class:`SubagentRunner`."""
_MAX_KEPT_CALLS = 1_024
"""The number of calls whose client capabilities are remembered."""
_STAMP_TIMEOUT_S = 5.0
"""The time limit for a stamp of a resource; after it, the stamp counts as unknown."""


class RemoteApprovalHandler:
    """The approval handler of a client process. If the process has disconnected, it defers every request.

    :param session_id: the session that the process opened; its sub-agents' requests have other session ids
    :param shared: whether several clients share that session
    """

    def __init__(self, connection: IpcConnection, session_id: str, *, shared: bool = False) -> None:
        self.is_shared = shared
        self._proxy = make_protocol_proxy(
            ApprovalHandler, APPROVAL_PREFIX, make_connection_invoker(connection, people_of=session_id)
        )

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        try:
            return await self._proxy.approve(request)
        except ConnectionLost:
            # No user can answer now. The call waits in the store, and a client that reconnects can still approve it.
            return ApprovalAnswer("defer")

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        try:
            return await self._proxy.answer_questions(session_id, questions)
        except ConnectionLost:
            return None


# ── the client ───────────────────────────────────────────────────────────────────────────────────


def get_supported_client_request_kinds(peer: ClientHandler, call_id: str) -> list[ClientRequestKind]:
    return [
        kind for kind, (method, params) in CLIENT_REQUEST_KINDS.items() if _is_supported(peer, call_id, method, params)
    ]


def get_supported_tool_request_kinds(peer: ClientService) -> list[ClientRequestKind]:
    """Return the kinds of request that a tool may send and its client supports."""
    return [kind for kind, (method, params) in CLIENT_REQUEST_KINDS.items() if peer.supports(method, params)]


def _is_supported(peer: ClientHandler, call_id: str, method: ClientMethod, params: Mapping[str, Any]) -> bool:
    try:
        # Only `True`: a handler that returns another true value by mistake must not receive requests that it cannot
        # answer.
        return peer.supports(call_id, method, params) is True
    except Exception:  # a client handler that fails
        return False


class RemoteClientHandler:
    """A :class:`~handrail.contract.services.client_services.ClientHandler` in the lease holder for the client of a client process.

    The process reports the supported requests before each call, because they may differ between calls.

    :param kinds: the requests that the client supports when the session is opened
    """

    def __init__(self, connection: IpcConnection, session_id: str, kinds: Iterable[str]) -> None:
        self._connection = connection
        self._session_id = session_id
        self._proxy = make_protocol_proxy(
            ClientHandler, CLIENT_PREFIX, make_connection_invoker(connection, session=session_id)
        )
        self._latest = frozenset(kinds)
        self._by_call: dict[str, frozenset[str]] = {}

    def set_supported_requests(self, call: str, kinds: Iterable[str]) -> None:
        """Set the requests that the client supports during a call.

        :param call: the id of a call, or of a turn: a call id without the position
        """
        self._by_call[call] = self._latest = frozenset(kinds)
        if len(self._by_call) > _MAX_KEPT_CALLS:
            del self._by_call[next(iter(self._by_call))]

    def supports(self, call_id: str, method: ClientMethod, params: Mapping[str, Any]) -> bool:
        # The client reports once for all calls of a turn, and a call ID is the ID of its turn with a position.
        turn = call_id if call_id in self._by_call else call_id.rpartition(".")[0]
        return classify_client_request(method, params) in self._by_call.get(turn, self._latest)

    async def send_requests(
        self, call_id: str, requests: Mapping[str, RequestToClient]
    ) -> Mapping[str, Mapping[str, Any]]:
        try:
            return await self._proxy.send_requests(call_id, requests)
        except ConnectionLost:
            raise ToolError("The client has disconnected. Continue without it.", kind="unavailable") from None
        except HandrailError as error:
            raise error if isinstance(error, ToolError) else ToolError(str(error), kind="unavailable") from None

    def detach(self, call_id: str) -> None:
        self._connection.notify("client.let_go", {"session": self._session_id, "call": call_id})


class RemoteEditorHandler(RemoteClientHandler):
    """A :class:`RemoteClientHandler` for an editor.

    It also implements :class:`~handrail.contract.services.client_services.EditorClientHandler`.
    """

    def __init__(self, connection: IpcConnection, session_id: str, kinds: Iterable[str]) -> None:
        super().__init__(connection, session_id, kinds)
        self._shown = make_protocol_proxy(
            EditorClientHandler, BUFFERS_PREFIX, make_connection_invoker(connection, session=session_id)
        )

    async def read_unsaved_text(self, path: str) -> str | None:
        try:
            return await self._shown.read_unsaved_text(path)
        except HandrailError:  # disconnected, or no answer: the same as an editor without unsaved changes
            return None


class RemoteClientService:
    """A :class:`~handrail.contract.services.client_services.ClientService` for a tool that runs in a client process.

    :param there: the proxy of the call's service
    :param let_go: tells the other side that the call releases the client's connection
    :param open: the requests that the tool may send and the client supports
    """

    def __init__(self, there: ClientService, let_go: Callable[[], None], open: Iterable[str]) -> None:
        self._proxy = there
        self.detach = let_go
        self._supported = frozenset(open)

    def supports(self, method: ClientMethod, params: Mapping[str, Any] | None = None) -> bool:
        return method in METHOD_CAPABILITIES and classify_client_request(method, params or {}) in self._supported

    async def send_requests(self, requests: Mapping[str, RequestToClient]) -> Mapping[str, Mapping[str, Any]]:
        for key, ask in requests.items():
            if not isinstance(ask, RequestToClient):  # pyright: ignore[reportUnnecessaryIsInstance] - a tool may pass anything
                raise ToolError(f"Invalid client request {key!r}. Pass a RequestToClient.", kind="invalid_input")
        return await self._proxy.send_requests(requests)


# ── its model ────────────────────────────────────────────────────────────────────────────────────


class RemoteSubagentRunner:
    """A runner of sub-agents for a session whose model runs in a client process.

    That process opens the sessions of the sub-agents here.
    """

    def __init__(self, connection: IpcConnection, session_id: str) -> None:
        self._proxy = make_protocol_proxy(
            SubagentRunner, SUBAGENT_PREFIX, make_connection_invoker(connection, settle=True, session=session_id)
        )

    async def compact_conversation(self) -> Result:
        lost = "The process of the model disconnected during the compaction. Check the session before you repeat it."
        return await self._await_result(self._proxy.compact_conversation(), lost)

    async def run(self, call_id: str, delegation: SubagentTask) -> Result:
        lost = "The process of the sub-agent's model disconnected while it was working. Check what it has done before you delegate again."
        return await self._await_result(self._proxy.run(call_id, delegation), lost)

    async def _await_result(self, asked: Awaitable[Result], when_lost: str) -> Result:
        try:
            return await asked
        except ConnectionLost as lost:
            # Only a request that was never sent had certainly no effect. Otherwise the model must check before it
            # repeats the work.
            if not lost.sent:
                raise ToolError(
                    "The process of the model has disconnected. Nothing was delegated. Do the work yourself.",
                    kind="unavailable",
                ) from None
            raise ToolError(when_lost, kind="interrupted") from None
        except HandrailError as error:
            raise error if isinstance(error, ToolError) else ToolError(str(error), kind="unavailable") from None


# ── its watchdogs ────────────────────────────────────────────────────────────────────────────────


class RemoteWatchdog:
    """A watchdog of a client process. It runs there within its timeout, and any failure denies the call.

    :param number: the number by which that process knows it
    :param description: its name, timeout and filters
    """

    def __init__(self, connection: IpcConnection, number: int, description: ClientWatchdogDescription) -> None:
        self.name = description.name
        self.timeout_ms = description.timeout_ms
        self.after_failures = description.after_failures
        self._chooses = description.has_filter
        self._connection = connection
        self._number = number
        self._specs: dict[str, ToolSpec] = {}

    def concerns(self, spec: ToolSpec) -> bool:
        """Remember the declaration for the other process, which filters by it with each call. Return True."""
        if self._chooses:
            self._specs[spec.id] = spec
        return True

    async def __call__(self, call: WatchdogCall) -> WatchdogDecision:
        spec = self._specs.get(call.tool_id)
        body = {
            "number": self._number,
            "call": WIRE_CODEC.encode_value(WatchdogCall, call),
            "spec": WIRE_CODEC.encode_value(ToolSpec | None, spec),
        }
        try:
            answer = await self._connection.request("watchdog", body)
        except ConnectionLost:
            return WatchdogDecision(
                "deny", "The process of the watchdog has disconnected. Ask the user to start it again."
            )
        except RemoteRequestError as refused:
            return WatchdogDecision("deny", f"The watchdog could not be called: {refused.text}")
        if (failure := decode_tool_error(answer)) is not None:
            raise failure
        try:
            return WIRE_CODEC.get_type_reader(WatchdogDecision)(answer.get("value"))
        except MalformedDataError as error:
            return WatchdogDecision("deny", f"The process of the watchdog returned an invalid answer: {error}.")


# ── its resources and prompts ────────────────────────────────────────────────────────────────────

ProviderCall = Callable[[int, str, dict[str, Any], Runtime], Awaitable[object]]
"""Reads from a resource provider of the client process (:meth:`handrail.ipc.server.client_tools.ClientProcessTools.call_provider_method`)."""


class ResourceChangeCallbacks:
    """The callbacks for changes of a client process's resources, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._callbacks: dict[int, Callable[[str], None]] = {}

    def add_callback(self, updated: Callable[[str], None]) -> int:
        number = next(self._numbers)
        self._callbacks[number] = updated
        return number

    def remove(self, number: int) -> None:
        self._callbacks.pop(number, None)

    def invoke_change_callback(self, number: int, uri: str) -> None:
        """Call the callback of a subscription, because the client process reported a change."""
        if (value := self._callbacks.get(number)) is not None:
            value(uri)


class RemoteResourceProvider:
    """An :class:`~handrail.contract.tool.resource_provider.ResourceProvider` of a client process.

    Its listing is the one that the process sent when it connected, or at its last reload. Its content comes from the process.

    :param number: the number by which that process knows it
    """

    def __init__(
        self,
        connection: IpcConnection,
        number: int,
        lists: ResourceProviderListing,
        offer: ProviderCall,
        subscribed: ResourceChangeCallbacks,
    ) -> None:
        self._connection = connection
        self._number = number
        self.listing = lists
        self._offer = offer
        self._subscribed = subscribed

    @property
    def source(self) -> str:
        return self.listing.source

    @property
    def is_third_party(self) -> bool:
        return self.listing.is_third_party

    @property
    def resources(self) -> Sequence[ResourceSpec]:
        return self.listing.resources

    @property
    def templates(self) -> Sequence[ResourceTemplate]:
        return self.listing.templates

    @property
    def prompts(self) -> Sequence[PromptSpec]:
        return self.listing.prompts

    def has_resource(self, uri: str) -> bool:
        return self.listing.has_resource(uri)

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        return await self._request_content("read", {"uri": uri}, runtime)

    async def get_prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        return await self._request_content("prompt", {"name": name, "arguments": dict(arguments)}, runtime)

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        asked = {"ref": dict(ref), "argument": dict(argument), "context": dict(context)}
        return await self._request_content("complete", asked, runtime)

    async def _request_content(self, method: str, arguments: dict[str, Any], runtime: Runtime) -> Mapping[str, Any]:
        given = await self._offer(self._number, method, arguments, runtime)
        if not isinstance(given, Mapping):
            raise ToolError(
                f"Invalid answer of {self.source or 'the source'} to `{method}`: {type(given).__name__}. "
                "Expected an object. Continue without it.",
                kind="backend",
            )
        return given  # pyright: ignore[reportUnknownVariableType] - the caller checks it

    async def subscribe(self, uri: str, on_update: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        # Before the request: the first change may be reported before its answer arrives.
        number = self._subscribed.add_callback(on_update)
        body: Message = {"offering": self._number, "number": number, "uri": uri}
        try:
            await self._request("subscribe", body)
        except BaseException:
            # Also when the wait is cancelled: a callback without a subscription would stay for as long as the process
            # does.
            self._subscribed.remove(number)
            raise

        async def stop() -> None:
            self._subscribed.remove(number)
            if self._connection.lost_reason is None:
                await self._request("unsubscribe", {"number": number})

        return stop

    async def _request(self, what: str, body: Message) -> Any:
        try:
            return await self._connection.request(f"offering.{what}", body)
        except ConnectionLost:
            raise ToolError(
                f"The process of {self.source or 'the source'} has disconnected. Ask the user to start it again.",
                kind="unavailable",
            ) from None
        except RemoteRequestError as refused:
            error = wire_encoding.restore_error(refused)
            raise error if isinstance(error, ToolError) else ToolError(str(error), kind="unavailable") from None


class PolledResourceProvider(RemoteResourceProvider):
    """A :class:`RemoteResourceProvider` that is polled for changes.

    It also implements :class:`~handrail.contract.tool.resource_provider.PollableResourceProvider`.
    """

    def __init__(self, connection: IpcConnection, *rest: Any) -> None:
        super().__init__(connection, *rest)
        self._loop = asyncio.get_running_loop()

    def content_stamp(self, uri: str) -> str:
        return self._request_stamp("stamp", uri)

    def quick_stamp(self, uri: str) -> str:
        return self._request_stamp("glance", uri)

    def _request_stamp(self, how: str, uri: str) -> str:
        """Request a stamp from the client process.

        Call it in a thread: it blocks until the event loop answers.
        """
        looking = asyncio.run_coroutine_threadsafe(
            self._request(how, {"offering": self._number, "uri": uri}), self._loop
        )
        try:
            found = looking.result(_STAMP_TIMEOUT_S)
        except (ToolError, TimeoutError):
            # The caller has given up waiting. Without this, the request would stay open in the loop.
            looking.cancel()
            return ""
        return found if isinstance(found, str) else ""


def make_remote_resource_provider(
    connection: IpcConnection,
    number: int,
    told: ResourceProviderDescription,
    offer: ProviderCall,
    subscribed: ResourceChangeCallbacks,
) -> RemoteResourceProvider:
    """Return the resource provider for a description from a client process."""
    kind = PolledResourceProvider if told.is_pollable else RemoteResourceProvider
    return kind(connection, number, told.listing, offer, subscribed)
