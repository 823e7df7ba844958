"""The lease holder's proxies for a client process: its approval handlers, clients, models, watchdogs and resources."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from handrail.contract.approvals import ApprovalAnswer, ApprovalRequest, Attendant
from handrail.contract.call import Result
from handrail.contract.codec import Malformed
from handrail.contract.doors.agents import Delegates, Delegation
from handrail.contract.doors.offers import PromptSpec, ResourceSpec, ResourceTemplate
from handrail.contract.doors.peer import (
    ASK_KINDS,
    CAPABILITY_OF,
    Ask,
    AskKind,
    AskMethod,
    Buffers,
    Peer,
    PeerDoor,
    kind_of,
)
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.errors import HandrailError, ToolError
from handrail.contract.tool.spec import ToolSpec
from handrail.ipc.codec import mirror
from handrail.ipc.codec.interfaces import WIRE, over, proxy
from handrail.ipc.codec.mirror import ShownOffering, ToldOffering, ToldWatchdog
from handrail.ipc.codec.values import failure_of
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Refused
from handrail.policy.watchdogs.watchdog import Opinion, WatchdogCall

PEOPLE, CLIENT, BUFFERS, MODEL = "people.", "client.", "buffers.", "model."
"""The prefixes of the operations of :class:`Attendant`, :class:`Peer`, :class:`Buffers` and :class:`Delegates`."""
_MOST_KEPT = 1_024
"""The number of calls whose client capabilities are remembered."""
_STAMP_S = 5.0
"""The time limit for a stamp of a resource; after it, the stamp counts as unknown."""


class RemotePerson:
    """The approval handler of a client process. If the process has disconnected, it defers every request.

    :param session_id: the session that the process opened; its sub-agents' requests have other session ids
    :param shared: whether several clients share that session
    """

    def __init__(self, connection: Connection, session_id: str, *, shared: bool = False) -> None:
        self.shared = shared
        self._there = proxy(Attendant, PEOPLE, over(connection, people_of=session_id))

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        try:
            return await self._there.approve(request)
        except ConnectionLost:
            return ApprovalAnswer("later")

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        try:
            return await self._there.answer(session_id, questions)
        except ConnectionLost:
            return None


# ── the client ───────────────────────────────────────────────────────────────────────────────────


def kinds_offered(peer: Peer, call_id: str) -> list[AskKind]:
    """Return the kinds of request that the client of a call supports."""
    return [kind for kind, (method, params) in ASK_KINDS.items() if _offers(peer, call_id, method, params)]


def kinds_open(peer: PeerDoor) -> list[AskKind]:
    """Return the kinds of request that a tool may send and its client supports."""
    return [kind for kind, (method, params) in ASK_KINDS.items() if peer.offers(method, params)]


def _offers(peer: Peer, call_id: str, method: AskMethod, params: Mapping[str, Any]) -> bool:
    try:
        return peer.offers(call_id, method, params) is True
    except Exception:  # a client handler that fails
        return False


class RemotePeer:
    """A :class:`~handrail.contract.doors.peer.Peer` in the lease holder for the client of a client process.

    The process reports the supported requests before each call, because they may differ between calls.

    :param kinds: the requests that the client supports when the session is opened
    """

    def __init__(self, connection: Connection, session_id: str, kinds: Iterable[str]) -> None:
        self._connection = connection
        self._session_id = session_id
        self._there = proxy(Peer, CLIENT, over(connection, session=session_id))
        self._latest = frozenset(kinds)
        self._by_call: dict[str, frozenset[str]] = {}

    def told(self, call: str, kinds: Iterable[str]) -> None:
        """Set the requests that the client supports during a call.

        :param call: the id of a call, or of a turn: a call id without the position
        """
        self._by_call[call] = self._latest = frozenset(kinds)
        if len(self._by_call) > _MOST_KEPT:
            del self._by_call[next(iter(self._by_call))]

    def offers(self, call_id: str, method: AskMethod, params: Mapping[str, Any]) -> bool:
        turn = call_id if call_id in self._by_call else call_id.rpartition(".")[0]
        return kind_of(method, params) in self._by_call.get(turn, self._latest)

    async def ask(self, call_id: str, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        try:
            return await self._there.ask(call_id, asks)
        except ConnectionLost:
            raise ToolError("The client has disconnected. Continue without it.", kind="unavailable") from None
        except HandrailError as error:
            raise error if isinstance(error, ToolError) else ToolError(str(error), kind="unavailable") from None

    def let_go(self, call_id: str) -> None:
        self._connection.notify("client.let_go", {"session": self._session_id, "call": call_id})


class RemoteEditor(RemotePeer):
    """A :class:`RemotePeer` for an editor.

    It also implements :class:`~handrail.contract.doors.peer.Buffers`.
    """

    def __init__(self, connection: Connection, session_id: str, kinds: Iterable[str]) -> None:
        super().__init__(connection, session_id, kinds)
        self._shown = proxy(Buffers, BUFFERS, over(connection, session=session_id))

    async def unsaved(self, path: str) -> str | None:
        try:
            return await self._shown.unsaved(path)
        except HandrailError:  # disconnected, or no answer: the same as an editor without unsaved changes
            return None


class RemotePeerDoor:
    """A :class:`~handrail.contract.doors.peer.PeerDoor` for a tool that runs in a client process.

    :param there: the proxy of the call's service
    :param let_go: tells the other side that the call releases the client's connection
    :param open: the requests that the tool may send and the client supports
    """

    def __init__(self, there: PeerDoor, let_go: Callable[[], None], open: Iterable[str]) -> None:
        self._there = there
        self.let_go = let_go
        self._open = frozenset(open)

    def offers(self, method: AskMethod, params: Mapping[str, Any] | None = None) -> bool:
        return method in CAPABILITY_OF and kind_of(method, params or {}) in self._open

    async def ask(self, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        for key, ask in asks.items():
            if not isinstance(ask, Ask):  # pyright: ignore[reportUnnecessaryIsInstance] - a tool may pass anything
                raise ToolError(f"Invalid client request {key!r}: expected an Ask.", kind="invalid_input")
        return await self._there.ask(asks)


# ── its model ────────────────────────────────────────────────────────────────────────────────────


class RemoteDelegates:
    """A runner of sub-agents for a session whose model runs in a client process.

    That process opens the sessions of the sub-agents here.
    """

    def __init__(self, connection: Connection, session_id: str) -> None:
        self._there = proxy(Delegates, MODEL, over(connection, settle=True, session=session_id))

    async def compact(self) -> Result:
        lost = "The process of the model disconnected during the compaction. Check the session before you repeat it."
        return await self._asked(self._there.compact(), lost)

    async def run(self, call_id: str, delegation: Delegation) -> Result:
        lost = "The process of the sub-agent's model disconnected while it was working. Check what it has done before you delegate again."
        return await self._asked(self._there.run(call_id, delegation), lost)

    async def _asked(self, asked: Awaitable[Result], when_lost: str) -> Result:
        try:
            return await asked
        except ConnectionLost as lost:
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
    :param told: its name, timeout and filters
    """

    def __init__(self, connection: Connection, number: int, told: ToldWatchdog) -> None:
        self.name = told.name
        self.timeout_ms = told.timeout_ms
        self.after_failures = told.after_failures
        self._chooses = told.chooses
        self._connection = connection
        self._number = number
        self._specs: dict[str, ToolSpec] = {}

    def concerns(self, spec: ToolSpec) -> bool:
        """Remember the declaration for the other process, which filters by it with each call. Return True."""
        if self._chooses:
            self._specs[spec.id] = spec
        return True

    async def __call__(self, call: WatchdogCall) -> Opinion:
        spec = self._specs.get(call.tool_id)
        body = {
            "number": self._number,
            "call": WIRE.write(WatchdogCall, call),
            "spec": WIRE.write(ToolSpec | None, spec),
        }
        try:
            told = await self._connection.request("watchdog", body)
        except ConnectionLost:
            return Opinion("deny", "The process of the watchdog has disconnected. Ask the user to start it again.")
        except Refused as refused:
            return Opinion("deny", f"The watchdog could not be called: {refused.text}")
        if (failure := failure_of(told)) is not None:
            raise failure
        try:
            return WIRE.reader_of(Opinion)(told.get("value"))
        except Malformed as error:
            return Opinion("deny", f"The process of the watchdog returned an invalid answer: {error}.")


# ── its resources and prompts ────────────────────────────────────────────────────────────────────

Offer = Callable[[int, str, dict[str, Any], Runtime], Awaitable[object]]
"""Reads from a resource provider of the client process (:meth:`handrail.ipc.holder.brought.BroughtTools.offer`)."""


class Subscribed:
    """The callbacks for changes of a client process's resources, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._told: dict[int, Callable[[str], None]] = {}

    def add(self, updated: Callable[[str], None]) -> int:
        number = next(self._numbers)
        self._told[number] = updated
        return number

    def remove(self, number: int) -> None:
        self._told.pop(number, None)

    def updated(self, number: int, uri: str) -> None:
        """Call the callback of a subscription, because the client process reported a change."""
        if (told := self._told.get(number)) is not None:
            told(uri)


class RemoteOffering:
    """An :class:`~handrail.contract.tool.offering.Offering` of a client process.

    Its listing is the one that the process sent when it connected, or at its last reload. Its content comes from the process.

    :param number: the number by which that process knows it
    """

    def __init__(
        self, connection: Connection, number: int, lists: ShownOffering, offer: Offer, subscribed: Subscribed
    ) -> None:
        self._connection = connection
        self._number = number
        self.lists = lists
        self._offer = offer
        self._subscribed = subscribed

    @property
    def source(self) -> str:
        return self.lists.source

    @property
    def foreign(self) -> bool:
        return self.lists.foreign

    @property
    def resources(self) -> Sequence[ResourceSpec]:
        return self.lists.resources

    @property
    def templates(self) -> Sequence[ResourceTemplate]:
        return self.lists.templates

    @property
    def prompts(self) -> Sequence[PromptSpec]:
        return self.lists.prompts

    def has(self, uri: str) -> bool:
        return self.lists.has(uri)

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        return await self._given("read", {"uri": uri}, runtime)

    async def prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        return await self._given("prompt", {"name": name, "arguments": dict(arguments)}, runtime)

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        asked = {"ref": dict(ref), "argument": dict(argument), "context": dict(context)}
        return await self._given("complete", asked, runtime)

    async def _given(self, method: str, arguments: dict[str, Any], runtime: Runtime) -> Mapping[str, Any]:
        given = await self._offer(self._number, method, arguments, runtime)
        if not isinstance(given, Mapping):
            raise ToolError(
                f"Invalid answer of {self.source or 'the source'} to `{method}`: {type(given).__name__}. "
                "Expected an object. Continue without it.",
                kind="backend",
            )
        return given  # pyright: ignore[reportUnknownVariableType] - the caller checks it

    async def subscribe(self, uri: str, updated: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        number = self._subscribed.add(updated)
        body: Message = {"offering": self._number, "number": number, "uri": uri}
        try:
            await self._asked("subscribe", body)
        except BaseException:
            self._subscribed.remove(number)
            raise

        async def stop() -> None:
            self._subscribed.remove(number)
            if self._connection.lost is None:
                await self._asked("unsubscribe", {"number": number})

        return stop

    async def _asked(self, what: str, body: Message) -> Any:
        try:
            return await self._connection.request(f"offering.{what}", body)
        except ConnectionLost:
            raise ToolError(
                f"The process of {self.source or 'the source'} has disconnected. Ask the user to start it again.",
                kind="unavailable",
            ) from None
        except Refused as refused:
            error = mirror.error_of(refused)
            raise error if isinstance(error, ToolError) else ToolError(str(error), kind="unavailable") from None


class RemoteStampedOffering(RemoteOffering):
    """A :class:`RemoteOffering` that is polled for changes.

    It also implements :class:`~handrail.contract.tool.offering.Stamped`.
    """

    def __init__(self, connection: Connection, *rest: Any) -> None:
        super().__init__(connection, *rest)
        self._loop = asyncio.get_running_loop()

    def stamp(self, uri: str) -> str:
        return self._look("stamp", uri)

    def glance(self, uri: str) -> str:
        return self._look("glance", uri)

    def _look(self, how: str, uri: str) -> str:
        """Request a stamp from the client process.

        Call it in a thread: it blocks until the event loop answers.
        """
        looking = asyncio.run_coroutine_threadsafe(self._asked(how, {"offering": self._number, "uri": uri}), self._loop)
        try:
            found = looking.result(_STAMP_S)
        except (ToolError, TimeoutError):
            looking.cancel()
            return ""
        return found if isinstance(found, str) else ""


def remote_offering(
    connection: Connection, number: int, told: ToldOffering, offer: Offer, subscribed: Subscribed
) -> RemoteOffering:
    """Return the resource provider for a description from a client process."""
    kind = RemoteStampedOffering if told.stamped else RemoteOffering
    return kind(connection, number, told.lists, offer, subscribed)
