"""What a process that joined has for the calls of its sessions, as the holder asks it: its people, its client, its model, its
watchdogs and its offerings."""

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
"""Before the names of the methods of :class:`Attendant`, :class:`Peer`, :class:`Buffers` and :class:`Delegates`."""
_MOST_KEPT = 1_024
"""Calls of which it is kept what their client answers."""
_STAMP_S = 5.0
"""How long a look at what is offered may take, after which it counts as nothing seen."""


class RemotePerson:
    """Whoever sits at a process that joined. When that is gone, nobody is here now: what was asked is parked.

    :param session_id: of the session that it opened; the calls of its sub-agents are asked about by another's id
    :param shared: several clients share that session
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


# ── the client at the face ───────────────────────────────────────────────────────────────────────


def kinds_offered(peer: Peer, call_id: str) -> list[AskKind]:
    """What the client of a call says that it answers."""
    return [kind for kind, (method, params) in ASK_KINDS.items() if _offers(peer, call_id, method, params)]


def kinds_open(peer: PeerDoor) -> list[AskKind]:
    """What a tool may ask for, and its client answers."""
    return [kind for kind, (method, params) in ASK_KINDS.items() if peer.offers(method, params)]


def _offers(peer: Peer, call_id: str, method: AskMethod, params: Mapping[str, Any]) -> bool:
    try:
        return peer.offers(call_id, method, params) is True
    except Exception:  # a face that cannot tell
        return False


class RemotePeer:
    """Implements :class:`~handrail.contract.doors.peer.Peer` in the holder. Which requests a client answers is told before
    each call, since one without a session of its own says so anew with each.

    :param kinds: what its client answers, as far as it is known when the session is opened
    """

    def __init__(self, connection: Connection, session_id: str, kinds: Iterable[str]) -> None:
        self._connection = connection
        self._session_id = session_id
        self._there = proxy(Peer, CLIENT, over(connection, session=session_id))
        self._latest = frozenset(kinds)
        self._by_call: dict[str, frozenset[str]] = {}

    def told(self, call: str, kinds: Iterable[str]) -> None:
        """
        :param call: a call's id, or that of a turn without the place in it
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
            raise ToolError("the client has gone, with the process it was at", kind="unavailable") from None
        except HandrailError as error:
            raise error if isinstance(error, ToolError) else ToolError(str(error), kind="unavailable") from None

    def let_go(self, call_id: str) -> None:
        self._connection.notify("client.let_go", {"session": self._session_id, "call": call_id})


class RemoteEditor(RemotePeer):
    """The same of a client that is an editor; implements :class:`~handrail.contract.doors.peer.Buffers` beside."""

    def __init__(self, connection: Connection, session_id: str, kinds: Iterable[str]) -> None:
        super().__init__(connection, session_id, kinds)
        self._shown = proxy(Buffers, BUFFERS, over(connection, session=session_id))

    async def unsaved(self, path: str) -> str | None:
        try:
            return await self._shown.unsaved(path)
        except HandrailError:  # gone, or without an answer: as an editor that does not say
            return None


class RemotePeerDoor:
    """Implements :class:`~handrail.contract.doors.peer.PeerDoor` for a tool whose call is carried out in another process.

    :param there: the door of the call, asked over the wire
    :param let_go: tells the other side that the client need not hold the line
    :param open: what it may ask for, of what its client answers
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
                raise ToolError(f"{key!r} is no request to a client", kind="invalid_input")
        return await self._there.ask(asks)


# ── its model ────────────────────────────────────────────────────────────────────────────────────


class RemoteDelegates:
    """Implements :class:`~handrail.contract.doors.agents.Delegates` in the holder: the model of a session is in the process
    that opened it, and that one has the sub-agents' sessions opened here."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self._there = proxy(Delegates, MODEL, over(connection, settle=True, session=session_id))

    async def compact(self) -> Result:
        lost = "the process that has the model has gone; look into its session before you ask again"
        return await self._asked(self._there.compact(), lost)

    async def run(self, call_id: str, delegation: Delegation) -> Result:
        lost = "the line to the process that has the model was lost while the sub-agent was at work; look at what it has done before you hand this over again"
        return await self._asked(self._there.run(call_id, delegation), lost)

    async def _asked(self, asked: Awaitable[Result], when_lost: str) -> Result:
        try:
            return await asked
        except ConnectionLost as lost:
            if not lost.sent:
                raise ToolError(
                    "the process that has the model has gone; nothing was handed over", kind="unavailable"
                ) from None
            raise ToolError(when_lost, kind="interrupted") from None
        except HandrailError as error:
            raise error if isinstance(error, ToolError) else ToolError(str(error), kind="unavailable") from None


# ── its watchdogs ────────────────────────────────────────────────────────────────────────────────


class RemoteWatchdog:
    """A watchdog of a process that joined. It is asked there within its time; any failure is a no.

    :param number: by which that process knows it
    :param told: its name, its time-out, and what it says of itself
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
        """Keep the declaration for the other process, which says with each call whether it looks at calls of this tool."""
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
            return Opinion("deny", "the process that it runs in has gone; start it again")
        except Refused as refused:
            return Opinion("deny", f"it could not be asked: {refused.text}")
        if (failure := failure_of(told)) is not None:
            raise failure
        try:
            return WIRE.reader_of(Opinion)(told.get("value"))
        except Malformed as error:
            return Opinion("deny", f"its process answered what cannot be read: {error}")


# ── its offerings ────────────────────────────────────────────────────────────────────────────────

Offer = Callable[[int, str, dict[str, Any], Runtime], Awaitable[object]]
"""Has an offering of the other process give something (:meth:`handrail.ipc.holder.brought.BroughtTools.offer`)."""


class Subscribed:
    """Who is told of the changes of what a process that joined offers, by number."""

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
        """Pass on what the other process tells."""
        if (told := self._told.get(number)) is not None:
            told(uri)


class RemoteOffering:
    """Implements :class:`~handrail.contract.tool.offering.Offering`: it lists what its process said when it joined, or at its
    last reload, and what it gives comes from there.

    :param number: by which that process knows it
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
            raise ToolError(f"{self.source or 'the source'} gave no {method}", kind="backend")
        return given  # pyright: ignore[reportUnknownVariableType] - whoever asked looks into it

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
            raise ToolError("the process that offers it has gone; start it again", kind="unavailable") from None
        except Refused as refused:
            error = mirror.error_of(refused)
            raise error if isinstance(error, ToolError) else ToolError(str(error), kind="unavailable") from None


class RemoteStampedOffering(RemoteOffering):
    """The same of one that is looked at; implements :class:`~handrail.contract.tool.offering.Stamped` beside."""

    def __init__(self, connection: Connection, *rest: Any) -> None:
        super().__init__(connection, *rest)
        self._loop = asyncio.get_running_loop()

    def stamp(self, uri: str) -> str:
        return self._look("stamp", uri)

    def glance(self, uri: str) -> str:
        return self._look("glance", uri)

    def _look(self, how: str, uri: str) -> str:
        """Called in a thread, so this waits for the event loop's answer."""
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
    """One of the offerings that a process says it brings."""
    kind = RemoteStampedOffering if told.stamped else RemoteOffering
    return kind(connection, number, told.lists, offer, subscribed)
