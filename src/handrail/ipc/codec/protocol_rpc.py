"""Remote calls of the contract's Protocols: the caller has a proxy, the other side a handler, both made from annotations.

The modules that use them list the Protocols and functions. The resulting table of operations is closed: a peer cannot reach
any other name.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

from handrail.contract.calls_and_results import ProposedCall
from handrail.contract.errors import ERROR_KINDS, HandrailError, ToolError
from handrail.contract.json_codec import (
    Codec,
    JsonTypeCodec,
    MalformedDataError,
    Reader,
    decode_exact_fields,
    expect_json_list,
)
from handrail.contract.sandbox_protocol import CompletedProcess
from handrail.contract.services.channels_and_triggers import ChannelService, CustomTriggerTool, TriggerService
from handrail.contract.services.client_services import ClientService
from handrail.contract.services.file_services import FileService, SearchService
from handrail.contract.services.history_and_skill_services import SkillService, TranscriptService
from handrail.contract.services.job_and_tool_services import CatalogService, JobService, TerminalService
from handrail.contract.services.language_services import LanguageService
from handrail.contract.services.memory_service import MemoryService
from handrail.contract.services.resource_services import ResourceService, SourceResources, SourceResponse
from handrail.contract.services.subagent_services import SubagentService
from handrail.contract.services.task_services import TaskService
from handrail.contract.services.tool_runtime import (
    DocumentService,
    ModeService,
    NetworkService,
    Runtime,
    ShellService,
    ToolStateService,
    UserQuestionService,
)
from handrail.contract.struct import Struct
from handrail.contract.tool.spec import ToolSession
from handrail.ipc.codec import wire_encoding
from handrail.ipc.codec.tool_value_encoding import decode_return_value, encode_return_value
from handrail.ipc.codec.wire_encoding import ResourceProviderListing
from handrail.ipc.wire.operation_dispatch import LEAVING, OperationSpec, RemoteRequestError
from handrail.ipc.wire.peer_connection import IpcConnection

T = TypeVar("T")

SHUTDOWN_TEXT = "The process that holds the workspace is shutting down."
WORKSPACE_JOBS_PREFIX = "workspace-jobs."
"""The prefix of the operations of :class:`~handrail.contract.services.job_and_tool_services.WorkspaceJobService`, the jobs of all sessions."""


class TriggerClassRef(Struct, frozen=True):
    """A reference to a trigger class: the id and the definition hash of its tool."""

    tool: str
    definition: str


def validate_and_decode_call(value: Any) -> ProposedCall:
    """Read what :func:`~handrail.ipc.codec.wire_encoding.encode_proposed_call` writes."""
    given = expect_json_list(value)
    if len(given) != 6:
        raise MalformedDataError("expected a call as name, arguments, provider id, fault, kind of fault and metadata")
    name, arguments, provider_id, fault, kind, client_meta = given
    if type(name) is not str or type(arguments) is not str or type(kind) is not str or kind not in ERROR_KINDS:
        raise MalformedDataError("expected the name and the arguments of a call as texts, and a kind of fault")
    if any(one is not None and type(one) is not str for one in (provider_id, fault)):
        raise MalformedDataError("expected the provider id and the fault of a call as texts")
    if client_meta is not None and not isinstance(client_meta, dict):
        raise MalformedDataError("expected the metadata of a call as an object")
    return wire_encoding.decode_proposed_call(given)


def _read_source_response(value: Any) -> SourceResponse:
    fields = decode_exact_fields(value, {"data": lambda data: data, "source": WIRE_CODEC.get_type_reader(str)})
    data = decode_return_value(fields["data"])
    return SourceResponse(cast("Mapping[str, Any]", data) if isinstance(data, Mapping) else {}, fields["source"])


def _read_listing(value: Any) -> ResourceProviderListing:
    return WIRE_CODEC.get_type_reader(ResourceProviderListing)(value)


def _read_trigger_class(value: Any) -> TriggerClassRef:
    return WIRE_CODEC.get_type_reader(TriggerClassRef)(value)


def _write_listing(one: SourceResources) -> Any:
    return WIRE_CODEC.encode_value(ResourceProviderListing, wire_encoding.snapshot_source_resources(one))


WIRE_CODEC = Codec(
    {
        object: JsonTypeCodec(decode_return_value, (object,), encode_return_value),
        SourceResponse: JsonTypeCodec(
            _read_source_response,
            (SourceResponse,),
            lambda given: {"data": encode_return_value(dict(given.data)), "source": given.source},
        ),
        SourceResources: JsonTypeCodec(_read_listing, (object,), _write_listing),
        ProposedCall: JsonTypeCodec(validate_and_decode_call, (ProposedCall,), wire_encoding.encode_proposed_call),
        CustomTriggerTool: JsonTypeCodec(
            _read_trigger_class, (object,), lambda tool: {"tool": tool.spec.id, "definition": tool.spec.definition_hash}
        ),
    }
)
"""The wire forms of all types. Values of tools (``object``) are packed."""


class MethodSignature(NamedTuple):
    """The signature of one method or function, from its annotations.

    :param forms: the form of each argument by its name; all arguments are sent
    :param result_form: the form of the result
    :param callback: the argument that is a callback for pieces before the answer; it is sent as a number, or None
    """

    forms: Mapping[str, JsonTypeCodec[Any]]
    readers: Mapping[str, Reader[Any]]
    result_form: JsonTypeCodec[Any]
    callback: str | None
    signature: inspect.Signature

    def encode_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Encode the arguments; a callback stays unchanged."""
        fields: dict[str, Any] = {}
        for name, value in arguments.items():
            write = self.forms[name].write
            fields[name] = value if write is None or name == self.callback else write(value)
        return fields


@cache
def inspect_method_signature(function: Callable[..., Any]) -> MethodSignature:
    """Read the annotations of a function, or of a method whose first parameter is ``self``."""
    hints = get_type_hints(function, localns={"CompletedProcess": CompletedProcess}, include_extras=True)
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    hears = next((one.name for one in parameters if _is_callback(hints[one.name])), None)
    takes = {
        one.name: WIRE_CODEC.get_type_codec(int | None if one.name == hears else hints[one.name]) for one in parameters
    }
    readers = {name: form.read for name, form in takes.items()}
    return MethodSignature(
        takes, readers, WIRE_CODEC.get_type_codec(hints["return"]), hears, signature.replace(parameters=parameters)
    )


def _is_callback(annotation: Any) -> bool:
    return any(get_origin(one) is cast("Any", Callable) for one in get_args(annotation))


@cache
def collect_async_methods(protocol: type) -> Mapping[str, Callable[..., Any]]:
    """Return the asynchronous methods of a Protocol and its bases by name. Other methods are not requests.

    Their annotations are read at the first use of a method: reading all of them would take longer than most calls.
    """
    found: dict[str, Any] = {}
    for kind in reversed(protocol.__mro__):
        found |= {name: one for name, one in vars(kind).items() if inspect.iscoroutinefunction(one) and name[0] != "_"}
    return found


# ── the caller ───────────────────────────────────────────────────────────────────────────────────


class RemoteMethodInvoker(Protocol):
    """A callable that invokes one method on the other side."""

    def __call__(self, op: str, method: MethodSignature, fields: dict[str, Any]) -> Awaitable[Any]:
        """Invoke one method on the other side.

        :param fields: the encoded arguments
        :return: the decoded result
        """
        ...


class _ProxyBase:
    def __init__(self, prefix: str, ask: RemoteMethodInvoker) -> None:
        self._prefix = prefix
        self._ask = ask


def make_protocol_proxy(protocol: type[T], prefix: str, ask: RemoteMethodInvoker) -> T:
    """Return an object that implements ``protocol`` by invoking its methods through ``ask``."""
    return cast("T", _proxy_class(protocol)(prefix, ask))


@cache
def _proxy_class(protocol: type) -> Callable[[str, RemoteMethodInvoker], Any]:
    members = {name: _make_proxy_method(name, function) for name, function in collect_async_methods(protocol).items()}
    return type(f"Remote{protocol.__name__}", (_ProxyBase,), members)


def _make_proxy_method(name: str, function: Callable[..., Any]) -> Any:
    async def asking(self: _ProxyBase, *args: Any, **kwargs: Any) -> Any:
        method = inspect_method_signature(function)
        bound = method.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return await self._ask(self._prefix + name, method, method.encode_arguments(bound.arguments))  # pyright: ignore[reportPrivateUsage]

    return asking


def make_connection_invoker(connection: IpcConnection, *, settle: bool = False, **keys: Any) -> RemoteMethodInvoker:
    """Return an :class:`RemoteMethodInvoker` for a connection. Errors of the other side are raised here.

    :param settle: see :meth:`~handrail.ipc.wire.peer_connection.IpcConnection.request`
    :param keys: further fields of each request, which identify the target object
    """

    async def ask(op: str, method: MethodSignature, fields: dict[str, Any]) -> Any:
        try:
            return method.result_form.read(await connection.request(op, {**keys, **fields}, settle=settle))
        except RemoteRequestError as refused:
            raise wire_encoding.restore_error(refused) from None
        except MalformedDataError as error:
            raise ToolError(
                f"`{op}` returned an invalid answer: {error}. Use the same Handrail version for all processes.",
                kind="backend",
            ) from None

    return ask


class HolderSender(Protocol):
    """A sender of requests to the lease holder.

    See :meth:`handrail.ipc.client.reconnecting_client.ReconnectingClient.request`.
    """

    async def request(self, op: str, body: Any = None, *, settle: bool = False, repeatable: bool = False) -> Any: ...


def make_lease_holder_caller(sender: HolderSender, *, repeatable: bool = True, **keys: Any) -> RemoteMethodInvoker:
    """Return an :class:`RemoteMethodInvoker` for the current lease holder.

    :param repeatable: the methods are idempotent: send the request to the next holder if one disconnects before it answers
    :param keys: further fields of each request, which identify the target object
    """

    async def ask(op: str, method: MethodSignature, fields: dict[str, Any]) -> Any:
        return method.result_form.read(await sender.request(op, {**keys, **fields}, repeatable=repeatable))

    return ask


# ── the handler ──────────────────────────────────────────────────────────────────────────────────


class RequestHandler:
    """A handler of one kind of request.

    :param carry_out: called with the fields of the request by name
    :param functions: their parameters are the required fields; the last function's result is the answer
    """

    def __init__(self, carry_out: Callable[..., Awaitable[Any]], *functions: Callable[..., Any]) -> None:
        self._handler = carry_out
        self._functions = functions

    @cached_property
    def field_readers(self) -> Mapping[str, Reader[Any]]:
        """The fields of the request, each with its reader."""
        *others, last = self._functions
        keys = (name for one in others for name in inspect.signature(one).parameters if name != "self")
        return {**dict.fromkeys(keys, WIRE_CODEC.get_type_reader(str)), **inspect_method_signature(last).readers}

    async def answer_peer_request(self, given: Mapping[str, Any]) -> Any:
        """Answer the request, and return the encoded result."""
        found = await self._handler(**given)
        write = inspect_method_signature(self._functions[-1]).result_form.write
        return found if write is None else write(found)


def make_request_handler(handler: Callable[..., Awaitable[Any]]) -> RequestHandler:
    """Return a request that a function answers; the fields follow from its annotations."""
    return RequestHandler(handler, getattr(handler, "__func__", handler))


def make_protocol_handlers(
    protocol: type[T], prefix: str, resolve_target: Callable[..., T]
) -> dict[str, RequestHandler]:
    """Return the requests for the methods of ``protocol``, by operation name.

    :param resolve_target: returns the target object for the fields that its parameters name, which are texts; the caller receives its
        errors
    """
    keys = tuple(inspect.signature(resolve_target).parameters)

    async def carry_out(name: str, /, **given: Any) -> Any:
        one = resolve_target(**{key: given.pop(key) for key in keys})
        return await getattr(one, name)(**given)  # a name of the Protocol

    return {
        prefix + name: RequestHandler(partial(carry_out, name), resolve_target, function)
        for name, function in collect_async_methods(protocol).items()
    }


def make_request_operation(
    name: str,
    handler: RequestHandler,
    *,
    is_leaving: Callable[[], bool] = lambda: False,
    inline: bool = False,
    at_once: bool = False,
    cancel_when_lost: bool = False,
) -> OperationSpec:
    """Return the operation of a request. Errors are sent under the names of their classes.

    :param is_leaving: returns whether this process is shutting down and accepts no requests
    """

    async def handled(body: Any) -> Any:
        if is_leaving():
            raise RemoteRequestError(LEAVING, SHUTDOWN_TEXT)
        try:
            given = decode_exact_fields(body, handler.field_readers)
        except MalformedDataError as error:
            raise RemoteRequestError("UsageError", f"Invalid request `{name}`: {error}.") from None
        try:
            return await handler.answer_peer_request(given)
        except RemoteRequestError:
            raise
        except HandrailError as error:
            raise wire_encoding.convert_to_remote_error(error) from None

    return OperationSpec(handled, inline, at_once, cancel_when_lost)


def make_notification_handler(handler: Callable[..., None]) -> Callable[[Any], None]:
    """Return the handler of a notification; the fields follow from the annotations of the function."""
    function = getattr(handler, "__func__", handler)

    def heard(body: Any) -> None:
        handler(**decode_exact_fields(body, inspect_method_signature(function).readers))

    return heard


# ── the runtime of a call ────────────────────────────────────────────────────────────────────────

RUNTIME_SERVICES: Mapping[str, type] = {
    "catalog": CatalogService,
    "channels": ChannelService,
    "client": ClientService,
    "files": FileService,
    "jobs": JobService,
    "language_servers": LanguageService,
    "mode": ModeService,
    "documents": DocumentService,
    "memory": MemoryService,
    "net": NetworkService,
    "resources": ResourceService,
    "search": SearchService,
    "shell": ShellService,
    "skills": SkillService,
    "state": ToolStateService,
    "subagents": SubagentService,
    "tasks": TaskService,
    "terminals": TerminalService,
    "tool_session": ToolSession,
    "transcript": TranscriptService,
    "triggers": TriggerService,
    "user": UserQuestionService,
}
"""The services of a runtime with asynchronous methods."""
CALL_METHOD = "call"
"""The asynchronous method of the runtime itself."""
RUNTIME_PREFIX = "runtime."
"""The prefix of the operations of a runtime's services."""


class RuntimeServiceMethod(NamedTuple):
    """A method that a tool may call on its runtime.

    :param get_function: returns the bound function of a runtime
    :param function: the function of the Protocol
    """

    get_function: Callable[[Runtime], Callable[..., Awaitable[Any]]]
    function: Callable[..., Any]


@cache
def collect_runtime_methods() -> Mapping[str, RuntimeServiceMethod]:
    """Return the asynchronous methods of a runtime and its services, by operation name."""
    found = {CALL_METHOD: RuntimeServiceMethod(attrgetter(CALL_METHOD), collect_async_methods(Runtime)[CALL_METHOD])}
    for door, protocol in RUNTIME_SERVICES.items():
        for name, function in collect_async_methods(protocol).items():
            found[f"{door}.{name}"] = RuntimeServiceMethod(attrgetter(f"{door}.{name}"), function)
    return found
