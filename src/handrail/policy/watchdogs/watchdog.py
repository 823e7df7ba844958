"""Watchdogs: an operator's own look at every call before it runs. They narrow, never widen, and failing means no."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from handrail.policy.questions import Verdict
from handrail.policy.rules.rules import STRICTNESS
from handrail.policy.verdict import Step
from handrail.policy.watchdogs.external import ExternalWatchdog
from handrail.policy.watchdogs.opinions import DEFAULT_TIMEOUT_MS, Opinion, WatchdogCall, allow, ask, deny

Answer = Opinion | Literal["allow"]
Watchdog = Callable[[WatchdogCall], Answer | Awaitable[Answer]]
"""A function, sync (run in a thread) or async, or an object such as :class:`ExternalWatchdog`. An async one runs on the
kernel's own event loop: what computes or blocks without awaiting stops every call of the process, its time-out too, so
write that as a plain function. It gets a copy of the arguments, so it cannot change them. Its attribute ``timeout_ms``, if any, replaces the default of 5 s. With a method
``concerns(spec)`` it says of which tools it looks at calls at all, once for each; with an attribute ``after_failures``
that is true, only at calls that have failed before."""


async def watched(
    verdict: Verdict, watchdogs: Sequence[Watchdog], call: WatchdogCall, redact: Callable[[str], str] = str
) -> Verdict:
    """Ask each in order until one denies; the strictest answer of all, the verdict's own included, holds.

    :param redact: takes secrets out of a text, before it is cut: what is left of a cut one would not be found
    """
    for watchdog in watchdogs:
        name = name_of(watchdog)
        opinion = await _opinion(watchdog, name, call, redact)
        reason = opinion.reason.strip()
        step = Step("watchdog", opinion.action, f"{name}: {reason}" if reason else name)
        if STRICTNESS[opinion.action] <= STRICTNESS[verdict.action]:
            verdict = verdict.noted(step)
            continue
        verb = "denies it" if opinion.action == "deny" else "asks for approval"
        text = f"{call.tool_id}: the watchdog {name} {verb}: {reason.rstrip('.') or 'it gave no reason'}."
        verdict = verdict.narrowed(opinion.action, text, step)
        if opinion.action == "deny":
            break
    return verdict


def name_of(watchdog: Watchdog) -> str:
    """How messages call it."""
    name: object = getattr(watchdog, "name", None) or getattr(watchdog, "__name__", None)
    return str(name) if name else type(watchdog).__name__


async def _opinion(watchdog: Watchdog, name: str, call: WatchdogCall, redact: Callable[[str], str]) -> Opinion:
    timeout_ms = float(getattr(watchdog, "timeout_ms", DEFAULT_TIMEOUT_MS))
    try:
        own = replace(call, arguments=copy.deepcopy(dict(call.arguments)))
        async with asyncio.timeout(timeout_ms / 1000):
            answer = await _answer(watchdog, own)
    except TimeoutError:
        return deny(f"it did not answer within {timeout_ms:g} ms")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return deny("it was cancelled from within")
    except (Exception, SystemExit) as error:  # whatever went wrong in it: a failing watchdog is a no
        return deny(f"it failed ({type(error).__name__}: {redact(str(error))[:300]})")
    return _checked(answer, name, redact)


async def _answer(watchdog: Watchdog, call: WatchdogCall) -> object:
    function = watchdog if inspect.isroutine(watchdog) else cast("Any", watchdog).__call__
    if inspect.iscoroutinefunction(function):
        return await cast("Awaitable[object]", watchdog(call))
    answer = await _in_thread(watchdog, call)
    return await answer if inspect.isawaitable(answer) else answer


async def _in_thread(watchdog: Watchdog, call: WatchdogCall) -> object:
    """In a thread of its own: one that never returns takes no worker from others and does not hold up the end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[object] = loop.create_future()

    def settle(answer: object, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(answer) if error is None else done.set_exception(error)

    def run() -> None:
        answer: object = None
        failure: BaseException | None = None
        try:
            answer = watchdog(call)
        except BaseException as error:  # handed over whole, to be a deny there
            failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # nobody waits any more: the loop has ended
            loop.call_soon_threadsafe(settle, answer, failure)

    threading.Thread(target=run, name=f"watchdog {name_of(watchdog)}", daemon=True).start()
    return await done


def _checked(answer: object, name: str, redact: Callable[[str], str]) -> Opinion:
    """The answer if it is one; anything else, None above all, is a deny."""
    if answer == "allow":
        return allow()
    if isinstance(answer, Opinion) and answer.action in STRICTNESS and isinstance(cast("object", answer.reason), str):
        return answer
    shown = repr(redact(answer)) if isinstance(answer, str) else redact(repr(answer))
    return deny(f"{name} answered {shown[:200]}, which is none of allow(), deny(reason), ask(reason)")


__all__ = [
    "Answer",
    "ExternalWatchdog",
    "Opinion",
    "Watchdog",
    "WatchdogCall",
    "allow",
    "ask",
    "deny",
    "name_of",
    "watched",
]
