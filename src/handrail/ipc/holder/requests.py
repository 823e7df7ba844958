"""What the holder and a process that joined ask of each other: each request with its fields, read before it is heeded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, cast, get_args

from pydantic import ValidationError

from handrail.contract.approvals import ApprovalAnswer, Choice
from handrail.contract.call import DEFAULT_FAULT_KIND, ProposedCall
from handrail.contract.doors.memory import Entry
from handrail.contract.doors.runtime import ClientContext
from handrail.contract.errors import ERROR_KINDS, ErrorKind, HandrailError
from handrail.contract.rules import MODES, Mode, RuleEntry, entry_of
from handrail.ipc import jobs
from handrail.ipc.codec import mirror
from handrail.ipc.codec.values import (
    Malformed,
    Reader,
    a_list,
    a_stop_reason,
    an_object,
    anything,
    each,
    fields,
    flag,
    one_of,
    optional,
    shape,
    some_bytes,
    text,
    whole,
)
from handrail.ipc.delegating import BEGUN
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import LEAVING, Op, Refused

ENDING = "the process that holds the workspace is ending"
HANDED_ON = "handed-on"
"""The refusal of a holder that ends, of calls that it had taken: what became of each is on record, and those that had not
begun are the next holder's."""

MAX_TURNS = 1_000_000_000
"""Of one session. A number is part of call ids, which are compared and kept."""

_tuple: Any = tuple
_new_call: Callable[..., ProposedCall] = _tuple.__new__
"""Makes a ``ProposedCall`` in half the time of its own constructor."""

Shape = Mapping[str, Reader[Any]]
"""The fields of a body, all of them given, and how each is read."""


def a_call(value: Any) -> ProposedCall:
    """The data that :func:`~handrail.ipc.codec.mirror.of_call` makes."""
    given = a_list(value)
    if len(given) != 5:
        raise Malformed("expected a call as its name, arguments, provider's id, fault and kind of fault")
    name, arguments, provider_id, fault, kind = given
    return mirror.call_of([text(name), text(arguments), _maybe(provider_id), _maybe(fault), _fault_kind(kind)])


def a_turn(value: Any) -> int:
    """Its number."""
    number = whole(value)
    if not 0 < number < MAX_TURNS:
        raise Malformed(f"expected a number from 1 to {MAX_TURNS - 1:,}")
    return number


def an_entry(value: Any) -> Entry:
    """A message of a session with its position."""
    given = a_list(value)
    if len(given) != 2 or not 0 <= whole(given[0]) < 1 << 62:
        raise Malformed("expected a message as its position, from 0, and its data")
    return given[0], an_object(given[1])


def a_rule(value: Any) -> str | RuleEntry:
    """Its line, or a table with examples that it is tried on here."""
    if type(value) is str:
        return value
    try:
        return entry_of(an_object(value))
    except ValidationError:
        raise Malformed("expected a rule as its line, or as a table with rule, match and not_match") from None


def a_door(value: Any) -> str:
    """By which an answer came, for the record."""
    return text(value)[:80]


a_decision = shape(ApprovalAnswer, choice=one_of(*get_args(Choice)), message=text, arguments=optional(an_object))
"""What a person decided."""
some_answers = optional(each(each(text)))
"""What a person said to questions; None when nobody is there now."""
_maybe = optional(text)
_fault_kind = cast("Reader[ErrorKind]", one_of(*ERROR_KINDS))
_client = optional(
    shape(ClientContext, time=optional(text), place=optional(text), locale=optional(text), device=optional(text))
)
_a_mode = cast("Reader[Mode | None]", optional(one_of(*MODES)))
_of_session: Shape = {"session": text}

REQUESTS: Mapping[str, Shape] = {
    "open": {
        "id": text,
        "agent": optional(text),
        "headless": flag,
        "peer": optional(each(text)),
        "topic": optional(text),
        "client": _client,
        "rules": each(a_rule),
        "mode": _a_mode,
        "shared": flag,
        "interaction": whole,
        "brought": each(text),
    },
    "child": BEGUN,
    "begin": {**_of_session, "interaction": whole, "text": text, "headless": flag},
    "reply": {**_of_session, "turn": a_turn, "token": whole, "generation": whole, "calls": each(a_call)},
    "call": {
        **_of_session,
        "turn": a_turn,
        "position": whole,
        "token": whole,
        "generation": whole,
        "call": a_call,
        "behind": whole,
    },
    "keyed": {**_of_session, "call": a_call, "key": text},
    "recall": {**_of_session, "calls": each(text)},
    "waiting": _of_session,
    "parked": _of_session,
    "instructions": _of_session,
    "stop": {**_of_session, "reason": a_stop_reason},
    "suspend": {**_of_session, "reason": a_stop_reason, "why": text},
    "close": _of_session,
    "history": _of_session,
    "keep": {**_of_session, "entries": each(an_entry), "number": whole},
    "attached": {**_of_session, "data": some_bytes, "media_type": text},
    "attachment": {**_of_session, "ref": text},
    "compacted": {**_of_session, "told": an_object},
    "notices": _of_session,
    "notices.take": {**_of_session, "ids": each(text)},
    "notices.awaited": {**_of_session, "idle": flag},
    "provided": {**_of_session, "about": an_object, "content": anything},
    "explain": {"tool": text, "arguments": an_object, "rules": each(a_rule), "headless": flag},
    "statuses": {},
    "find": {"query": text, "limit": whole, "patience_ms": optional(whole), "by_words": flag},
    "reload": {"tools": optional(anything)},
    "flush": {},
    "fork": {"id": text, "forked": text},
    "close-session": {"id": text},
    **jobs.REQUESTS,
    "approvals.decide": {"id": text, "answer": a_decision, "by": a_door},
    "approvals.answer": {"id": text, "answers": each(each(text)), "by": a_door},
    "approvals.forget": {"id": text},
}
"""What every process that joined may ask for, beside the doors of the runtimes of its own tools' calls."""

AT_ONCE = ("reply", "call", "keyed", "keep")
"""Calls, which mostly end without waiting: their answers do not wait for the event loop's next round. And what is kept
before them, so that they come behind it."""

ENDLESS = ("notices.awaited",)
"""Waits that only somebody's end may end: they end with the connection."""

_parts_of_a_reply = cast("Callable[[Any], tuple[Any, ...]]", itemgetter(*REQUESTS["reply"]))


def a_reply(body: Any) -> tuple[str, int, int, int, Sequence[ProposedCall]]:
    """The fields of a reply, in the order of their table: nearly all that is ever read of a process that joined, so the
    common one, of one call that is as it should be, is read the short way.

    :raises Refused: naming the field that is not as expected
    """
    try:
        session, turn, token, generation, calls = _parts_of_a_reply(body)
        [[name, arguments, provider_id, fault, kind]] = calls
        if (
            type(session) is type(name) is type(arguments) is str
            and type(turn) is type(token) is type(generation) is int
            and type(calls) is type(calls[0]) is list
            and 0 < turn < MAX_TURNS
            and provider_id is fault is None
            and kind == DEFAULT_FAULT_KIND
            and arguments.isascii()
            and len(body) == len(REQUESTS["reply"])
        ):
            return session, turn, token, generation, (_new_call(ProposedCall, (name, arguments, None, None, kind)),)
    except (KeyError, TypeError, ValueError):
        pass
    try:
        session, turn, token, generation, calls = fields(body, REQUESTS["reply"]).values()
    except Malformed as error:
        raise Refused("UsageError", f"the request 'reply' cannot be read: {error}") from None
    return session, turn, token, generation, calls


NOTICES: Mapping[str, Shape] = {
    "watch": _of_session,
    "unwatch": _of_session,
    "rules": {**_of_session, "rules": each(text)},
    "mode": {**_of_session, "mode": _a_mode},
    "client": {**_of_session, "call": text, "kinds": each(text)},
    "delegates": {**_of_session, "there": flag},
}

GREETING: Shape = {
    "face": text,
    "agent": text,
    "rules": each(a_rule),
    "mode": _a_mode,
    "configured_mode": _a_mode,
    "secrets": an_object,
    "tool_config": an_object,
    "tools": a_list,
}
"""What a process says of itself when it joins, beside its version."""


def greeting(hello: Message) -> dict[str, Any]:
    """The fields of a greeting.

    :raises Refused: naming the one that is not as expected
    """
    given: dict[str, Any] = {"mode": None, "configured_mode": None, "tool_config": {}}
    given |= {name: hello[name] for name in GREETING if name in hello}
    try:
        found = fields(given, GREETING)
        for name, value in found["secrets"].items():
            if type(value) is not str:
                raise Malformed(f"secrets: expected the value of {name[:80]!r} as text")
        for name, config in found["tool_config"].items():
            if type(config) is not dict or any(
                type(value) is not str for value in cast("dict[str, Any]", config).values()
            ):
                raise Malformed(f"tool_config: expected texts by their keys for {name[:80]!r}")
    except Malformed as error:
        raise Refused("StartError", f"the greeting cannot be read: {error}") from None
    return found


def answering(name: str, handler: Callable[..., Awaitable[Any]], reads: Shape, is_leaving: Callable[[], bool]) -> Op:
    """``handler``, called with the fields of each request's body by name. Errors travel under their names.

    :param is_leaving: whether the holder ends, and begins nothing any more
    """

    async def handled(body: Any) -> Any:
        if is_leaving():
            raise Refused(LEAVING, ENDING)
        try:
            return await handler(**fields(body, reads))
        except Malformed as error:
            raise Refused("UsageError", f"the request {name!r} cannot be read: {error}") from None
        except Refused:
            raise
        except HandrailError as error:
            raise mirror.refusal_of(error) from None

    return Op(handled, at_once=name in AT_ONCE, cancel_when_lost=name in ENDLESS)


def heeding(handler: Callable[..., None], reads: Shape) -> Callable[[Any], None]:
    """``handler``, called with the fields of each notice's body by name."""

    def heard(body: Any) -> None:
        handler(**fields(body, reads))

    return heard
