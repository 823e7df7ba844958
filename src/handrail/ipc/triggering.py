"""Classes of triggers that a process brought: what is added is kept where the workspace is held, and waited for there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Literal, cast

from handrail.contract.tool.triggers import Fired, TriggerTool, Waiting
from handrail.ipc.codec.values import Reader, an_object, fields, flag, one_of, optional, shape, text, whole
from handrail.ipc.wire.framing import Message
from handrail.session.arrivals.waits import time_of
from handrail.store.encoding import decode, encode

TriggerKind = Literal["", "wait", "time"]
KINDS: tuple[TriggerKind, ...] = ("", "wait", "time")
"""What a tool is: none of them, a class that waits, or one that goes by time."""
_LONGEST_S = 60.0
"""A clock that is set, or a machine that slept, is noticed after this long at most."""

a_kind = cast("Reader[TriggerKind]", one_of(*KINDS))


def kind_of(tool: object) -> TriggerKind:
    """One that adds its triggers in a way of its own is none: that would run where no trigger can be added."""
    if not isinstance(tool, TriggerTool) or type(tool).execute is not TriggerTool.execute:
        return ""
    return "time" if tool.by_time else "wait"


# ── on the wire ──────────────────────────────────────────────────────────────────────────────────


def _exact(value: Any) -> Any:
    """JSON that may be more than the wire has a form for."""
    return decode(text(value).encode())


a_waiting = shape(
    Waiting, name=text, session_id=text, workdir=text, arguments=_exact, position=_exact, fired=whole, since_ns=whole
)
_a_firing: Mapping[str, Reader[Any]] = {"text": text, "position": _exact, "last": flag}
DUE: Mapping[str, Reader[Any]] = {"tool": text, "definition": text, "arguments": _exact, "now_ns": whole}
"""How the holder asks when one of a class would fire first."""
WAIT: Mapping[str, Reader[Any]] = {"tool": text, "definition": text, "waiting": a_waiting}
"""How it has one waited for."""
a_time = optional(whole)


def exactly(value: Any) -> str:
    """The inverse of what is read of it; whatever is no JSON stands there in a form that says so."""
    return encode(value, 1 << 62).decode()


def of_waiting(waiting: Waiting) -> Message:
    return {
        "name": waiting.name,
        "session_id": waiting.session_id,
        "workdir": waiting.workdir,
        "arguments": exactly(dict(waiting.arguments)),
        "position": exactly(waiting.position),
        "fired": waiting.fired,
        "since_ns": waiting.since_ns,
    }


def of_firing(fired: object) -> Message:
    """
    :raises TypeError: for what is none
    """
    if not isinstance(fired, Fired) or not isinstance(fired.text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - it is anybody's
        raise TypeError(f"wait() gave {type(fired).__name__}, and a Fired with a text was expected")
    return {"text": fired.text, "position": exactly(fired.position), "last": fired.last is True}


def a_firing(told: Any) -> Fired:
    return Fired(**fields(an_object(told), _a_firing))


# ── where the class is ───────────────────────────────────────────────────────────────────────────


async def waited(tool: TriggerTool, waiting: Waiting) -> Fired:
    """When a trigger of a class fires next, whichever way that says so."""
    if not tool.by_time:
        return await tool.wait(waiting)
    since = waiting.since_ns if waiting.position is None else waiting.position
    at = time_of(tool, waiting.arguments, since)
    if at is None:  # its class has changed its mind: it never fires again
        return Fired(last=True)
    while (now := time.time_ns()) < at:  # noqa: ASYNC110 - the clock that is meant is no loop's
        await asyncio.sleep(min((at - now) / 1e9, _LONGEST_S))
    now = max(at, time.time_ns())  # what was missed by then is not told one by one
    return Fired(position=now, last=time_of(tool, waiting.arguments, now) is None)
