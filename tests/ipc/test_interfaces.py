"""The codec derived from the contract's types, and the proxies and requests derived from its Protocols."""

from __future__ import annotations

import asyncio
import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from tests.ipc.workshop import connected
from tests.kernel.guests import guest, joined_kernel, opened

from handrail.catalog.view import CatalogOptions
from handrail.config.operator_settings import CatalogSettings
from handrail.contract.approval_requests import (
    Approval,
    ApprovalAnswer,
    ApprovalHandler,
    ApprovalRequest,
    ApprovalService,
    StoredProjectRule,
)
from handrail.contract.calls_and_results import Event
from handrail.contract.errors import ToolError
from handrail.contract.json_codec import Codec, MalformedDataError, reader_of, write
from handrail.contract.rule_forms import RuleWithExamples
from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.services.channels_and_triggers import NotificationQueue
from handrail.contract.services.client_services import ClientHandler, EditorClientHandler
from handrail.contract.services.history_and_skill_services import ConversationHistory
from handrail.contract.services.job_and_tool_services import ToolSearchResult, WorkspaceJobService
from handrail.contract.services.resource_services import SourceResources, SourceResponse
from handrail.contract.services.subagent_services import SubagentRunner
from handrail.contract.services.tool_runtime import Runtime, UserContext
from handrail.contract.tool.operator_tool_settings import ToolSettings
from handrail.contract.tool.requires import CapabilitySet, Requires, ShellRequires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.trigger_tools import TriggerContext, TriggerEvent
from handrail.contract.tool_generation import GenerationDiff, ToolStatus
from handrail.ipc.client.tool_host import ToolStepRequest
from handrail.ipc.codec.protocol_rpc import (
    RUNTIME_SERVICES,
    WIRE_CODEC,
    TriggerClassRef,
    collect_async_methods,
    collect_runtime_methods,
    make_connection_invoker,
    make_protocol_handlers,
    make_protocol_proxy,
    make_request_handler,
    make_request_operation,
)
from handrail.ipc.codec.wire_encoding import ClientGreeting, ClientToolDescription
from handrail.ipc.wire.operation_dispatch import OperationTable, RemoteRequestError
from handrail.ipc.wire.peer_connection import ConnectionLost
from handrail.policy.decision_explanation import PolicyExplanation
from handrail.policy.watchdogs.api import WatchdogCall, WatchdogDecision
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("L-07")

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_requires = st.builds(
    Requires, shell=st.lists(st.builds(ShellRequires, cmd=st.text(min_size=1, max_size=3)), max_size=2).map(tuple)
)
_models: dict[type[BaseModel], st.SearchStrategy[Any]] = {
    Requires: _requires,
    ShellRequires: st.builds(ShellRequires, cmd=st.text(min_size=1, max_size=3)),
    ToolSettings: st.builds(ToolSettings, config=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)),
    CatalogSettings: st.builds(CatalogSettings, preload=st.integers(0, 3)),
    RuleWithExamples: st.builds(
        RuleWithExamples, rule=st.just("allow read"), match=st.just(("a",)), not_match=st.just(())
    ),
}


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, by its annotations."""
    origin, arguments = get_origin(kind), get_args(kind)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        Any: _json,
        str: st.text(max_size=5),
        int: st.integers(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        bytes: st.binary(max_size=5),
        types.NoneType: st.none(),
    }
    if kind in simple:
        return simple[kind]
    if origin is Annotated:
        return values_of(arguments[0])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(values_of, arguments))
    if origin in (tuple, list, frozenset, Sequence, Collection):
        made: Any = origin if origin in (tuple, frozenset) else list
        return st.lists(values_of(arguments[0]), max_size=2).map(made)
    if origin in (dict, Mapping):
        return st.dictionaries(st.text(max_size=3), values_of(arguments[1]), max_size=2)
    if kind in _models:
        return _models[kind]
    hints = get_type_hints(kind, include_extras=True)
    if dataclasses.is_dataclass(kind):
        hints = {one.name: hints[one.name] for one in dataclasses.fields(kind) if one.init}
    made = kind
    return st.deferred(lambda: st.builds(made, **{name: values_of(hint) for name, hint in hints.items()}))


_BY_HAND = (object, SourceResponse, SourceResources)
"""What is packed or shown: see ``test_values`` and ``test_remote_runtime``."""


def _is_listed(kind: Any) -> bool:
    return kind not in _BY_HAND and not any(map(_mentions_hand, get_args(kind)))


def _mentions_hand(kind: Any) -> bool:
    return (
        kind in _BY_HAND
        or getattr(kind, "__name__", "") == "CustomTriggerTool"
        or get_origin(kind) is typing.get_origin(Callable[[], None])
    )


def listed() -> list[Any]:
    """Every type that crosses the wire by its annotations: those of the Protocols, and those that are sent by themselves."""
    found: dict[Any, None] = dict.fromkeys(
        [
            Approval, ApprovalAnswer, ApprovalRequest, CapabilitySet, CatalogOptions, UserContext, ClientToolDescription, GenerationDiff,
            Event, PolicyExplanation, ToolSearchResult, TriggerEvent, ClientGreeting, TriggerClassRef, WatchdogDecision, ToolStepRequest, StoredProjectRule, SandboxTier, ToolSpec, TriggerContext,
            WatchdogCall,
        ]
    )  # fmt: skip
    found[Sequence[ToolStatus]] = None
    for protocol in [
        *RUNTIME_SERVICES.values(),
        Runtime,
        ApprovalService,
        ApprovalHandler,
        EditorClientHandler,
        SubagentRunner,
        ConversationHistory,
        NotificationQueue,
        ClientHandler,
        WorkspaceJobService,
    ]:
        for name in collect_async_methods(protocol):
            from handrail.contract.sandbox_protocol import CompletedProcess

            hints = get_type_hints(
                getattr(protocol, name), localns={"CompletedProcess": CompletedProcess}, include_extras=True
            )
            found |= {hint: None for hint in hints.values() if _is_listed(hint) and not _mentions_hand(hint)}
    return list(found)


@pytest.mark.parametrize("kind", listed(), ids=lambda kind: getattr(kind, "__name__", str(kind))[:60])
def test_every_listed_type_survives_a_round_trip(kind: Any) -> None:
    @given(values_of(kind))
    def crosses(value: Any) -> None:
        arrived = WIRE_CODEC.get_type_codec(kind).read(
            decode_json_with_fallback(encode_json_with_fallback(WIRE_CODEC.encode_value(kind, value), 1 << 62))
        )
        assert arrived == value

    crosses()


@pytest.mark.parametrize("kind", listed(), ids=lambda kind: getattr(kind, "__name__", str(kind))[:60])
def test_malformed_data_is_refused_with_an_error_text(kind: Any) -> None:
    @given(_json)
    def refused(sent: Any) -> None:
        try:
            WIRE_CODEC.get_type_codec(kind).read(sent)
        except MalformedDataError as error:
            assert str(error)

    refused()


class Pair(NamedTuple):
    first: int
    second: str


@pytest.mark.parametrize(
    ("kind", "sent", "said"),
    [
        (int, True, "a whole number, not a bool"),
        (int, 1.0, "a whole number, not a float"),
        (bool, 1, "true or false, not a int"),
        (str, None, "text, not a NoneType"),
        (bytes, {"$bytes": "?"}, "not base64"),
        (bytes, {"$bytes": "", "more": 1}, "bytes as"),
        (Literal["a", "b"], "c", "one of a, b"),
        (Literal["a", "b"], ["a"], "one of a, b"),
        (Sequence[str], "ab", "a list, not a str"),
        (Sequence[str], {"0": "a"}, "a list, not a dict"),
        (Mapping[str, int], {"k": "v"}, "k: expected a whole number"),
        (int | None, "1", "a whole number"),
        (str | Sequence[str], 1, "a list, not a int"),
        (Pair, [1], "a list of 2, not of 1"),
        (WatchdogDecision, {"action": "allow"}, "differs in reason"),
        (WatchdogDecision, {"action": "allow", "reason": "", "__class__": "x"}, "differs in __class__"),
        (ApprovalAnswer, {"choice": "all", "message": "", "arguments": None}, "choice: expected one of"),
        (RuleWithExamples, {"rule": 1}, "rule"),
    ],
)
def test_a_reader_error_names_the_place_and_the_expected_type(kind: Any, sent: Any, said: str) -> None:
    with pytest.raises(MalformedDataError) as refused:
        Codec().get_type_codec(kind).read(sent)
    assert said in str(refused.value)


@pytest.mark.parametrize("kind", [Callable[[], None], Mapping[int, str], object, ClientHandler])
def test_a_type_without_a_json_form_raises_a_type_error(kind: Any) -> None:
    with pytest.raises(TypeError, match="no JSON form"):
        Codec().get_type_codec(kind)


def test_data_nested_too_deeply_is_refused_by_the_reader() -> None:
    deep: Any = None
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(MalformedDataError, match="arguments: expected an object"):
        reader_of(ApprovalAnswer)({"choice": "once", "message": "", "arguments": deep})
    assert b"$depth" in encode_json_with_fallback(write(TriggerEvent, TriggerEvent(position=deep)))


# ── proxies and requests ─────────────────────────────────────────────────────────────────────────


class Shelf(Protocol):
    """A Protocol of the test's."""

    async def put(self, name: str, data: bytes, *, twice: bool = False) -> Sequence[str]: ...
    async def fail(self, how: Literal["tool", "defect"]) -> None: ...
    def look(self) -> int: ...


class Real:
    """Implements it."""

    secret = "never reached"

    def __init__(self) -> None:
        self.kept: list[tuple[str, bytes]] = []

    async def put(self, name: str, data: bytes, *, twice: bool = False) -> Sequence[str]:
        self.kept += [(name, data)] * (2 if twice else 1)
        return [kept for kept, _ in self.kept]

    async def fail(self, how: Literal["tool", "defect"]) -> None:
        if how == "tool":
            raise ToolError("it is full", kind="limit")
        raise ValueError(how)

    def look(self) -> int:
        return 1


async def test_a_proxy_calls_the_methods_of_its_protocol_in_the_other_process() -> None:
    real = Real()
    theirs, ours = await connected()

    def of(owner: str) -> Shelf:
        if owner != "me":
            raise ToolError("not yours", kind="denied")
        return real

    requests = make_protocol_handlers(Shelf, "shelf.", of)
    assert sorted(requests) == ["shelf.fail", "shelf.put"], "what is awaited, and nothing else"
    ours.finish_handshake(
        OperationTable({name: make_request_operation(name, one) for name, one in requests.items()}), {}
    )
    theirs.finish_handshake(OperationTable(), {})
    shelf = make_protocol_proxy(Shelf, "shelf.", make_connection_invoker(theirs, owner="me"))
    assert await shelf.put("a", b"\x00\xff") == ["a"]
    assert await shelf.put("b", data=b"", twice=True) == ["a", "b", "b"]
    assert real.kept[0] == ("a", b"\x00\xff")
    with pytest.raises(ToolError, match="it is full") as full:
        await shelf.fail("tool")
    assert full.value.kind == "limit"
    with pytest.raises(RemoteRequestError, match="Its log has the details"):
        await shelf.fail("defect")
    with pytest.raises(ToolError, match="not yours"):
        await make_protocol_proxy(Shelf, "shelf.", make_connection_invoker(theirs, owner="you")).put("c", b"")
    with pytest.raises(TypeError):
        await shelf.put("a")  # pyright: ignore[reportCallIssue]
    assert not hasattr(shelf, "look") and not hasattr(shelf, "secret")
    await theirs.aclose()
    with pytest.raises(ConnectionLost):
        await shelf.put("a", b"")
    await ours.closed.wait()


@pytest.mark.parametrize(
    "name", ["shelf.look", "shelf.secret", "shelf.__class__", "shelf.put.__globals__", "shelf.", ""]
)
async def test_an_operation_outside_the_table_is_refused(name: str) -> None:
    theirs, ours = await connected()
    requests = make_protocol_handlers(Shelf, "shelf.", lambda: Real())  # noqa: PLW0108 - a lambda has no annotation of what it gives
    ours.finish_handshake(OperationTable({of: make_request_operation(of, one) for of, one in requests.items()}), {})
    theirs.finish_handshake(OperationTable(), {})
    with pytest.raises(RemoteRequestError) as refused:
        await theirs.request(name, {})
    assert refused.value.kind == "unknown_op"
    await theirs.aclose()
    await ours.closed.wait()


async def test_a_request_must_have_exactly_the_parameters_of_its_function() -> None:
    async def area(width: int, height: int) -> int:
        return width * height

    answer = make_request_operation("area", make_request_handler(area)).handler
    assert await answer({"width": 3, "height": 4}) == 12
    bodies: list[Any] = [None, [], {}, {"width": 3}, {"width": 3, "height": "4"}, {"width": 3, "height": 4, "depth": 5}]
    for body in bodies:
        with pytest.raises(RemoteRequestError, match="Invalid request `area`"):
            await answer(body)


async def test_a_hostile_peer_loses_its_connection_and_other_clients_are_unaffected(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as held, guest(tmp_path) as hostile, joined_kernel(tmp_path) as friend:
        session = await friend.session()
        await opened(hostile, "ses_h")
        for name in ("session.__init__", "_operations", "people.approve", "runtime.files.stat", "jobs.__class__"):
            with pytest.raises(RemoteRequestError) as refused:
                await hostile.request(name, {})
            assert refused.value.kind in ("unknown_op", "malformed")
        with pytest.raises(RemoteRequestError, match="entries"):
            await hostile.request("keep", {"session": "ses_h", "entries": [[-1, {}]], "number": 1})
        deep = b'{"id": 99, "op": "explain", "body": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
        hostile.transport.write(len(deep).to_bytes(4, "big") + deep)
        await hostile.closed.wait()
        assert hostile.lost_reason is not None and "not JSON" in hostile.lost_reason
        assert (await session.call("glob", {"pattern": "*"})).ok
        while len(held.server.clients) > 1:
            await asyncio.sleep(0)


def test_every_awaitable_runtime_method_is_in_the_service_table() -> None:
    doors = {name for name, kind in get_type_hints(Runtime).items() if kind} | set(vars(Runtime))
    waited = {name for name in doors if isinstance(vars(Runtime).get(name), property)}
    for name in waited:
        gives = get_type_hints(vars(Runtime)[name].fget)["return"]
        if getattr(gives, "_is_protocol", False) and collect_async_methods(gives):
            assert RUNTIME_SERVICES[name] is gives
    assert (
        len(collect_runtime_methods()) == sum(len(collect_async_methods(one)) for one in RUNTIME_SERVICES.values()) + 1
    )
