"""The greeting: who is there, in which version, and whether it may come in. One message each way, within a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from handrail.contract.errors import StartError
from handrail.ipc.wire.connection import Connection
from handrail.ipc.wire.credentials import foreign, peer_of
from handrail.ipc.wire.framing import Message, frame
from handrail.ipc.wire.operations import Operations, Refused, logger

PROTOCOL = 1
"""Of the messages. Another number means that the two sides cannot understand each other."""

GREETING_SECONDS = 5.0
MAX_HELLO = 16 * 1024 * 1024
"""Bytes of the first message: a process that is not let in yet gets no more memory."""


_NOT_IN = "the process that holds the workspace did not let this one in"


class NotLetIn(StartError):
    """The process that holds the workspace refused this one.

    :param kind: ``version``, ``user``, ``full``, or a word of the holder's own
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class NoAnswer(StartError):
    """Somebody listens, and does not greet: stopped, overloaded, or gone while we waited."""


@cache
def own_version() -> str:
    """The installed version of Handrail."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("handrail")
    except PackageNotFoundError:
        return "unknown"


Accept = Callable[[Connection, Message], tuple[Operations, Message]]
"""Decides on one who greeted: what it may ask for and what it is told. Raises :class:`Refused` to turn it away."""


class Reception:
    """The holder's side of one greeting.

    :param accept: called with the connection and the greeting's fields; may not send anything on it yet
    :param seconds: within which the greeting must be complete
    """

    def __init__(self, accept: Accept, *, seconds: float = GREETING_SECONDS) -> None:
        self._accept = accept
        self._seconds = seconds
        self._late: asyncio.TimerHandle | None = None

    def begun(self, connection: Connection) -> None:
        try:
            connection.peer = peer_of(connection.transport.get_extra_info("socket"))
            reason = foreign(connection.peer)
        except OSError as error:
            reason = f"who it is cannot be known: {error}"
        if reason is not None:  # nothing has been read yet, and nothing will be
            self._turn_away(connection, "user", reason)
            return
        connection.limit(MAX_HELLO)
        self._late = asyncio.get_running_loop().call_later(
            self._seconds, connection.drop, f"no whole greeting came within {self._seconds:g} s"
        )

    def heard(self, connection: Connection, message: Message) -> None:
        hello = message.get("hello")
        if not isinstance(hello, dict):
            connection.drop("the first message was no greeting; the other end is no Handrail process")
            return
        told = cast("Message", hello)
        if (reason := _another_version(told, "the process that wants to join")) is not None:
            self._turn_away(connection, "version", reason)
            return
        try:
            operations, welcome = self._accept(connection, told)
        except Refused as refusal:
            self._turn_away(connection, refusal.kind, refusal.text)
            return
        self.lost("")
        connection.say({"welcome": {**welcome, **_self()}})
        connection.open(operations, told)

    def lost(self, reason: str) -> None:
        if self._late is not None:
            self._late.cancel()

    def _turn_away(self, connection: Connection, kind: str, text: str) -> None:
        logger.warning("a process was not let in: %s", text)
        connection.say({"refused": {"kind": kind, "text": text}})
        connection.drop(text, quietly=True)


class Introduction:
    """The joining side of one greeting. :attr:`done` gets the result.

    :param operations: what the holder may ask of us
    :param hello: fields of our own
    """

    def __init__(self, operations: Operations, hello: Message) -> None:
        self._operations = operations
        self._hello = hello
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begun(self, connection: Connection) -> None:
        connection.say(_hello(self._hello))

    def heard(self, connection: Connection, message: Message) -> None:
        welcome, refused = message.get("welcome"), message.get("refused")
        if isinstance(welcome, dict):
            told = cast("Message", welcome)
            reason = _another_version(told, "the process that holds the workspace")
            if reason is None:
                connection.open(self._operations, told)
                if not self.done.done():
                    self.done.set_result(None)
                return
            error: StartError = NotLetIn("version", reason)
        elif isinstance(refused, dict):
            fields = cast("Message", refused)
            error = NotLetIn(str(fields.get("kind"))[:80], f"joining was refused: {str(fields.get('text'))[:2000]}")
        elif type(bye := message.get("bye")) is str:  # it ends just now
            error = NoAnswer(f"{_NOT_IN}: {bye[:500]}")
        else:
            error = StartError("what listens at the workspace's socket did not greet; it is no Handrail process")
        self._fail(error)
        connection.drop(str(error), quietly=True)

    def lost(self, reason: str) -> None:
        self._fail(NoAnswer(f"{_NOT_IN}: {reason}"))

    def _fail(self, error: StartError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def check_greeting(hello: Message) -> None:
    """
    :raises StartError: when nobody would read so much of it
    """
    size = len(frame(_hello(hello)))
    if size > MAX_HELLO:
        raise StartError(
            f"what this process brings (its tools, rules and secrets) is {size:,} bytes long; at most {MAX_HELLO:,} "
            "can be brought to a workspace that another process holds: bring less, or start this process first"
        )


def _hello(hello: Message) -> Message:
    return {"hello": {**hello, **_self()}}


def _self() -> dict[str, Any]:
    return {"handrail": own_version(), "protocol": PROTOCOL}


def _another_version(told: Message, who: str) -> str | None:
    protocol = told.get("protocol")
    if type(protocol) is int and protocol == PROTOCOL:
        return None
    theirs = str(told.get("handrail"))[:40]
    return (
        f"{who} is Handrail {theirs} and speaks protocol {str(protocol)[:20]}, "
        f"the other is Handrail {own_version()} and speaks protocol {PROTOCOL}; use the same version for both: "
        "update the older one, then stop the process that holds the workspace and start again"
    )
