"""Remote calls of the contract's Protocols: the caller has a proxy, the other side a handler, both made from annotations.

The modules that use them list the Protocols and functions. The resulting table of operations is closed: a peer cannot reach
any other name.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints

from handrail.contract.call import ProposedCall
from handrail.contract.codec import Codec, Form, Malformed, Reader, a_list, read_fields
from handrail.contract.doors.agents import Agents
from handrail.contract.doors.channels import Channels, TriggerClass, Triggers
from handrail.contract.doors.files import Files, Search
from handrail.contract.doors.jobs import Catalog, Jobs, Terminals
from handrail.contract.doors.memory import Skills, Transcript
from handrail.contract.doors.offers import Given, Listing, Offers
from handrail.contract.doors.peer import PeerDoor
from handrail.contract.doors.runtime import Net, People, Runtime, Shell, State
from handrail.contract.errors import ERROR_KINDS, HandrailError, ToolError
from handrail.contract.sandbox import Completed
from handrail.contract.tool.spec import Opened
from handrail.ipc.codec import mirror
from handrail.ipc.codec.mirror import ShownOffering
from handrail.ipc.codec.values import pack, unpack
from handrail.ipc.wire.connection import Connection
from handrail.ipc.wire.operations import LEAVING, Op, Refused

T = TypeVar("T")

ENDING = "The process that holds the workspace is shutting down."
WORKSPACE_JOBS = "workspace-jobs."
"""The prefix of the operations of :class:`~handrail.contract.doors.jobs.WorkspaceJobs`, the jobs of all sessions."""


@dataclass(frozen=True, slots=True)
class NamedClass:
    """A reference to a trigger class: the id and the definition hash of its tool."""

    tool: str
    definition: str


def a_call(value: Any) -> ProposedCall:
    """Read what :func:`~handrail.ipc.codec.mirror.of_call` writes."""
    given = a_list(value)
    if len(given) != 5:
        raise Malformed("expected a call as name, arguments, provider id, fault and kind of fault")
    name, arguments, provider_id, fault, kind = given
    if type(name) is not str or type(arguments) is not str or type(kind) is not str or kind not in ERROR_KINDS:
        raise Malformed("expected the name and the arguments of a call as texts, and a kind of fault")
    if any(one is not None and type(one) is not str for one in (provider_id, fault)):
        raise Malformed("expected the provider id and the fault of a call as texts")
    return mirror.call_of(given)


def _given(value: Any) -> Given:
    told = read_fields(value, {"data": lambda data: data, "source": WIRE.reader_of(str)})
    data = unpack(told["data"])
    return Given(cast("Mapping[str, Any]", data) if isinstance(data, Mapping) else {}, told["source"])


def _listing_of(value: Any) -> ShownOffering:
    return WIRE.reader_of(ShownOffering)(value)


def _class_of(value: Any) -> NamedClass:
    return WIRE.reader_of(NamedClass)(value)


def _listing(one: Listing) -> Any:
    return WIRE.write(ShownOffering, mirror.shown(one))


WIRE = Codec(
    {
        object: Form(unpack, (object,), pack),
        Given: Form(_given, (Given,), lambda given: {"data": pack(dict(given.data)), "source": given.source}),
        Listing: Form(_listing_of, (object,), _listing),
        ProposedCall: Form(a_call, (ProposedCall,), mirror.of_call),
        TriggerClass: Form(
            _class_of,
            (object,),
            lambda tool: {"tool": tool.spec.id, "definition": tool.spec.definition_hash},
        ),
    }
)
"""The wire forms of all types. Values of tools (``object``) are packed."""


class Method(NamedTuple):
    """The signature of one method or function, from its annotations.

    :param takes: the form of each argument by its name; all arguments are sent
    :param gives: the form of the result
    :param hears: the argument that is a callback for pieces before the answer; it is sent as a number, or None
    """

    takes: Mapping[str, Form[Any]]
    readers: Mapping[str, Reader[Any]]
    gives: Form[Any]
    hears: str | None
    signature: inspect.Signature

    def written(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Encode the arguments; a callback stays unchanged."""
        told: dict[str, Any] = {}
        for name, value in arguments.items():
            write = self.takes[name].write
            told[name] = value if write is None or name == self.hears else write(value)
        return told


@cache
def method_of(function: Callable[..., Any]) -> Method:
    """Read the annotations of a function, or of a method whose first parameter is ``self``."""
    hints = get_type_hints(function, localns={"Completed": Completed}, include_extras=True)
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    hears = next((one.name for one in parameters if _is_told(hints[one.name])), None)
    takes = {one.name: WIRE.form_of(int | None if one.name == hears else hints[one.name]) for one in parameters}
    readers = {name: form.read for name, form in takes.items()}
    return Method(takes, readers, WIRE.form_of(hints["return"]), hears, signature.replace(parameters=parameters))


def _is_told(annotation: Any) -> bool:
    return any(get_origin(one) is cast("Any", Callable) for one in get_args(annotation))


@cache
def methods_of(protocol: type) -> Mapping[str, Callable[..., Any]]:
    """Return the asynchronous methods of a Protocol and its bases by name. Other methods are not requests.

    Their annotations are read at the first use of a method: reading all of them would take longer than most calls.
    """
    found: dict[str, Any] = {}
    for kind in reversed(protocol.__mro__):
        found |= {name: one for name, one in vars(kind).items() if inspect.iscoroutinefunction(one) and name[0] != "_"}
    return found


# ── the caller ───────────────────────────────────────────────────────────────────────────────────


class Ask(Protocol):
    """A callable that invokes one method on the other side."""

    def __call__(self, op: str, method: Method, told: dict[str, Any]) -> Awaitable[Any]:
        """Invoke one method on the other side.

        :param told: the encoded arguments
        :return: the decoded result
        """
        ...


class _Proxy:
    def __init__(self, prefix: str, ask: Ask) -> None:
        self._prefix = prefix
        self._ask = ask


def proxy(protocol: type[T], prefix: str, ask: Ask) -> T:
    """Return an object that implements ``protocol`` by invoking its methods through ``ask``."""
    return cast("T", _proxies(protocol)(prefix, ask))


@cache
def _proxies(protocol: type) -> Callable[[str, Ask], Any]:
    members = {name: _asking(name, function) for name, function in methods_of(protocol).items()}
    return type(f"Remote{protocol.__name__}", (_Proxy,), members)


def _asking(name: str, function: Callable[..., Any]) -> Any:
    async def asking(self: _Proxy, *args: Any, **kwargs: Any) -> Any:
        method = method_of(function)
        bound = method.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return await self._ask(self._prefix + name, method, method.written(bound.arguments))  # pyright: ignore[reportPrivateUsage]

    return asking


def over(connection: Connection, *, settle: bool = False, **keys: Any) -> Ask:
    """Return an :class:`Ask` for a connection. Errors of the other side are raised here.

    :param settle: see :meth:`~handrail.ipc.wire.connection.Connection.request`
    :param keys: further fields of each request, which identify the target object
    """

    async def ask(op: str, method: Method, told: dict[str, Any]) -> Any:
        try:
            return method.gives.read(await connection.request(op, {**keys, **told}, settle=settle))
        except Refused as refused:
            raise mirror.error_of(refused) from None
        except Malformed as error:
            raise ToolError(
                f"`{op}` returned an invalid answer: {error}. Use the same Handrail version for all processes.",
                kind="backend",
            ) from None

    return ask


class Holder(Protocol):
    """A sender of requests to the lease holder.

    See :meth:`handrail.ipc.joiner.membership.Membership.request`.
    """

    async def request(self, op: str, body: Any = None, *, settle: bool = False, repeatable: bool = False) -> Any: ...


def asking(holder: Holder, *, repeatable: bool = True, **keys: Any) -> Ask:
    """Return an :class:`Ask` for the current lease holder.

    :param repeatable: the methods are idempotent: send the request to the next holder if one disconnects before it answers
    :param keys: further fields of each request, which identify the target object
    """

    async def ask(op: str, method: Method, told: dict[str, Any]) -> Any:
        return method.gives.read(await holder.request(op, {**keys, **told}, repeatable=repeatable))

    return ask


# ── the handler ──────────────────────────────────────────────────────────────────────────────────


class Request:
    """A handler of one kind of request.

    :param carry_out: called with the fields of the request by name
    :param functions: their parameters are the required fields; the last function's result is the answer
    """

    def __init__(self, carry_out: Callable[..., Awaitable[Any]], *functions: Callable[..., Any]) -> None:
        self._carry_out = carry_out
        self._functions = functions

    @cached_property
    def takes(self) -> Mapping[str, Reader[Any]]:
        """The fields of the request, each with its reader."""
        *others, last = self._functions
        keys = (name for one in others for name in inspect.signature(one).parameters if name != "self")
        return {**dict.fromkeys(keys, WIRE.reader_of(str)), **method_of(last).readers}

    async def answer(self, given: Mapping[str, Any]) -> Any:
        """Answer the request, and return the encoded result."""
        found = await self._carry_out(**given)
        write = method_of(self._functions[-1]).gives.write
        return found if write is None else write(found)


def request(handler: Callable[..., Awaitable[Any]]) -> Request:
    """Return a request that a function answers; the fields follow from its annotations."""
    return Request(handler, getattr(handler, "__func__", handler))


def served(protocol: type[T], prefix: str, of: Callable[..., T]) -> dict[str, Request]:
    """Return the requests for the methods of ``protocol``, by operation name.

    :param of: returns the target object for the fields that its parameters name, which are texts; the caller receives its
        errors
    """
    keys = tuple(inspect.signature(of).parameters)

    async def carry_out(name: str, /, **given: Any) -> Any:
        one = of(**{key: given.pop(key) for key in keys})
        return await getattr(one, name)(**given)  # a name of the Protocol

    return {
        prefix + name: Request(partial(carry_out, name), of, function)
        for name, function in methods_of(protocol).items()
    }


def op_of(
    name: str,
    of: Request,
    *,
    is_leaving: Callable[[], bool] = lambda: False,
    inline: bool = False,
    at_once: bool = False,
    cancel_when_lost: bool = False,
) -> Op:
    """Return the operation of a request. Errors are sent under the names of their classes.

    :param is_leaving: returns whether this process is shutting down and accepts no requests
    """

    async def handled(body: Any) -> Any:
        if is_leaving():
            raise Refused(LEAVING, ENDING)
        try:
            given = read_fields(body, of.takes)
        except Malformed as error:
            raise Refused("UsageError", f"Invalid request `{name}`: {error}.") from None
        try:
            return await of.answer(given)
        except Refused:
            raise
        except HandrailError as error:
            raise mirror.refusal_of(error) from None

    return Op(handled, inline, at_once, cancel_when_lost)


def heeding(handler: Callable[..., None]) -> Callable[[Any], None]:
    """Return the handler of a notification; the fields follow from the annotations of the function."""
    function = getattr(handler, "__func__", handler)

    def heard(body: Any) -> None:
        handler(**read_fields(body, method_of(function).readers))

    return heard


# ── the runtime of a call ────────────────────────────────────────────────────────────────────────

DOORS: Mapping[str, type] = {
    "agents": Agents,
    "catalog": Catalog,
    "channels": Channels,
    "files": Files,
    "jobs": Jobs,
    "net": Net,
    "offers": Offers,
    "opened": Opened,
    "peer": PeerDoor,
    "people": People,
    "search": Search,
    "shell": Shell,
    "skills": Skills,
    "state": State,
    "terminals": Terminals,
    "transcript": Transcript,
    "triggers": Triggers,
}
"""The services of a runtime with asynchronous methods."""
CALL = "call"
"""The asynchronous method of the runtime itself."""
PREFIX = "runtime."
"""The prefix of the operations of a runtime's services."""


class DoorMethod(NamedTuple):
    """A method that a tool may call on its runtime.

    :param of: returns the bound function of a runtime
    :param function: the function of the Protocol
    """

    of: Callable[[Runtime], Callable[..., Awaitable[Any]]]
    function: Callable[..., Any]


@cache
def door_methods() -> Mapping[str, DoorMethod]:
    """Return the asynchronous methods of a runtime and its services, by operation name."""
    found = {CALL: DoorMethod(attrgetter(CALL), methods_of(Runtime)[CALL])}
    for door, protocol in DOORS.items():
        for name, function in methods_of(protocol).items():
            found[f"{door}.{name}"] = DoorMethod(attrgetter(f"{door}.{name}"), function)
    return found
