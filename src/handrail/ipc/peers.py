"""The client at a process that joined, as the holder's tools ask it; and that process's side of it.

Which requests a client answers is told before each call, since one without a session of its own says so anew with each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from handrail.contract.doors.peer import ASK_KINDS, CAPABILITY_OF, Ask, AskKind, AskMethod, Peer, PeerDoor, kind_of
from handrail.contract.errors import ToolError
from handrail.ipc.codec import mirror
from handrail.ipc.codec.values import Malformed, an_object, fields, one_of, shape, text
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Refused

_MOST_KEPT = 1_024
"""Calls of which it is kept what their client answers."""

_ask = shape(Ask, method=one_of(*CAPABILITY_OF), params=an_object, origin=text)


def some_asks(value: Any) -> dict[str, Ask]:
    """Requests to a client, each under its key."""
    return {key: _ask(one) for key, one in an_object(value).items()}


def of_asks(asks: Mapping[str, Ask]) -> dict[str, Any]:
    """The inverse of :func:`some_asks`.

    :raises ToolError: ``invalid_input`` for what is none
    """
    told: dict[str, Any] = {}
    for key, ask in asks.items():
        if not isinstance(ask, Ask):  # pyright: ignore[reportUnnecessaryIsInstance] - a tool may pass anything
            raise ToolError(f"{key!r} is no request to a client", kind="invalid_input")
        told[key] = {"method": ask.method, "params": dict(ask.params), "origin": ask.origin}
    return told


def some_answers(value: Any) -> dict[str, dict[str, Any]]:
    return {key: an_object(one) for key, one in an_object(value).items()}


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
    """Implements :class:`~handrail.contract.doors.peer.Peer` in the holder, over the connection of a process that joined.

    :param kinds: what its client answers, as far as it is known when the session is opened
    """

    def __init__(self, connection: Connection, session_id: str, kinds: Iterable[str]) -> None:
        self._connection = connection
        self._session_id = session_id
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
        body = {"session": self._session_id, "call": call_id, "asks": of_asks(asks)}
        try:
            return some_answers(await self._connection.request("peer.ask", body))
        except ConnectionLost:
            raise ToolError("the client has gone, with the process it was at", kind="unavailable") from None
        except Refused as refused:
            error = mirror.error_of(refused)
            raise error if isinstance(error, ToolError) else ToolError(str(error), kind="unavailable") from None
        except Malformed as error:
            raise ToolError(f"the client's answer cannot be read: {error}", kind="backend") from None

    def let_go(self, call_id: str) -> None:
        self._connection.notify("peer.let_go", {"session": self._session_id, "call": call_id})


async def asked(peer: Peer | None, body: Any) -> Message:
    """Ask the client of this process for the holder."""
    told = fields(body, {"session": text, "call": text, "asks": some_asks})
    if peer is None:
        raise Refused("UsageError", "no client is attached to this session")
    try:
        answers = cast("Mapping[str, Any]", await peer.ask(told["call"], told["asks"]))
        return {str(key): dict(answer) for key, answer in answers.items()}
    except ToolError as error:
        raise mirror.refusal_of(error) from None


class RemotePeerDoor:
    """Implements :class:`~handrail.contract.doors.peer.PeerDoor` for a tool whose call is carried out in another process.

    :param open: what it may ask for, of what its client answers
    """

    def __init__(self, on: Any, open: Iterable[str]) -> None:
        self._on = on
        self._open = frozenset(open)

    def offers(self, method: AskMethod, params: Mapping[str, Any] | None = None) -> bool:
        return method in CAPABILITY_OF and kind_of(method, params or {}) in self._open

    async def ask(self, asks: Mapping[str, Ask]) -> Mapping[str, Mapping[str, Any]]:
        return await self._on.ask("peer.ask", asks=of_asks(asks))

    def let_go(self) -> None:
        self._on.tell("let_go", {})
