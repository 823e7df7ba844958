"""What a peer may ask for, as a closed table, and how its requests are carried out beside each other."""

from __future__ import annotations

import asyncio
import logging
import types
from asyncio.tasks import _enter_task, _leave_task  # pyright: ignore[reportPrivateUsage] - documented for making tasks
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from handrail.contract.errors import HandrailError
from handrail.ipc.wire.framing import Message

MAX_RUNNING = 16_384
"""Requests of one peer that may be open at once; further ones are refused."""

logger = logging.getLogger("handrail.ipc")

Handler = Callable[[Any], Coroutine[Any, Any, Any]]
"""Answers one request: takes its body, returns the answer's, raises :class:`Refused`. JSON, hence ``Any``."""

LEAVING = "leaving"
"""The refusal of a holder that ends: nothing was begun, and another holder will take it."""
HANDED_ON = "handed-on"
"""The refusal of a holder that ends, of calls that it had taken: what became of each is on record, and those that had not
begun are the next holder's."""


class Refused(HandrailError):
    """The peer answered that it will not, or a handler's way to say so.

    :param kind: for programs: a word; ``unknown_op``, ``limit``, ``cancelled`` and ``defect`` are the wire's own,
        another :class:`HandrailError` of a handler arrives under its class's name
    :param text: for people: what was wrong, what was expected, what to do next
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


@dataclass(frozen=True, slots=True)
class Op:
    """One operation that a peer may ask for.

    Handlers begin in the order their requests arrived, within each way of beginning.

    :param handler: answers it; runs beside other handlers
    :param inline: run it up to its first wait before the next message is looked at. No task is made for one that never
        waits; until its first wait it has no current task, so ``asyncio.timeout`` and task groups must come later
    :param at_once: likewise, in a task of its own from the beginning, whose first step is this one: for handlers that
        mostly end without waiting, and need a current task when they do not
    :param cancel_when_lost: cancel it when the connection is lost. Otherwise it goes on: a dropped connection is no abort
    """

    handler: Handler
    inline: bool = False
    at_once: bool = False
    cancel_when_lost: bool = False


@dataclass(frozen=True, slots=True)
class Operations:
    """All that a peer may ask for and tell.

    :param requests: by name
    :param notices: by name; called in order of arrival, with the body, and must return at once
    """

    requests: Mapping[str, Op] = field(default_factory=dict[str, Op])
    notices: Mapping[str, Callable[[Any], None]] = field(default_factory=dict[str, Callable[[Any], None]])


class Desk:
    """Carries out what one peer asks for.

    :param reply: takes the answer to a request; called once for each, also for those that nobody waits for any more
    """

    def __init__(self, operations: Operations, reply: Callable[[Message], None]) -> None:
        self.operations = operations
        self._reply = reply
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, tuple[asyncio.Task[None], Op]] = {}
        self._standby: _Standby | None = None
        self._is_lost = False

    def __len__(self) -> int:
        """Requests that are not answered yet."""
        return len(self._running)

    def asked(self, number: int, name: str, body: Any) -> None:
        """Begin to answer a request, or refuse it."""
        op = self.operations.requests.get(name)
        if op is None:
            self._refuse(number, "unknown_op", f"the other process knows no operation {name[:80]!r}; use one version")
        elif len(self._running) >= MAX_RUNNING:
            self._refuse(number, "limit", f"{MAX_RUNNING:,} requests are open already; wait until some are answered")
        elif op.inline:
            self._step(number, op, body)
        elif op.at_once:
            self._begin(number, op, body)
        else:
            self._running[number] = (self._loop.create_task(self._carry_out(number, op.handler, body)), op)

    def told(self, name: str, body: Any) -> None:
        """Deal with a notice."""
        call = self.operations.notices.get(name)
        if call is None:
            logger.info("a notice of an unknown kind was left aside: %.80r", name)
            return
        try:
            call(body)
        except Exception:
            logger.exception("the notice %r could not be dealt with", name)

    def cancel(self, number: int) -> None:
        """Cancel the handler of a request, if it is still at work."""
        if (running := self._running.get(number)) is not None:
            self._cancel(running[0])

    def lost(self) -> None:
        """The peer is gone: cancel those handlers that are not to go on."""
        self._is_lost = True
        if self._standby is not None:
            self._standby.task.cancel()
        for task, op in list(self._running.values()):
            if op.cancel_when_lost:
                self._cancel(task)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        # Not before the task's first step, which stands in the loop's queue already: what has begun goes through its
        # handler's own code, and so can always tidy up.
        self._loop.call_soon(task.cancel)

    def _begin(self, number: int, op: Op, body: Any) -> None:
        """Run a handler up to its first wait here and now, in the task that stands by."""
        standby, self._standby = self._standby, None
        if standby is None:
            standby = _Standby(self._loop)
        if not standby.has_ended(self._carry_out(number, op.handler, body)):
            self._running[number] = (standby.task, op)
            if self._is_lost and op.cancel_when_lost:
                self._cancel(standby.task)
        elif standby.is_as_new and not self._is_lost:
            self._standby = standby
        else:
            standby.task.cancel()

    def _step(self, number: int, op: Op, body: Any) -> None:
        """Run a handler up to its first wait here and now; a task does the rest, if there is one."""
        context = copy_context()
        handling = context.run(op.handler, body)
        try:
            waited: Any = context.run(handling.send, None)
        except StopIteration as end:
            self._reply({"id": number, "ok": end.value})
        except (Exception, asyncio.CancelledError) as error:
            self._reply(_failure(number, error))
        else:
            rest = self._carry_out(number, lambda _: _continued(handling, waited), None)
            self._running[number] = (self._loop.create_task(rest, context=context), op)

    async def _carry_out(self, number: int, handler: Callable[[Any], Any], body: Any) -> None:
        try:
            message = {"id": number, "ok": await handler(body)}
        except asyncio.CancelledError as error:
            self._reply(_failure(number, error))
            raise
        except Exception as error:
            message = _failure(number, error)
        finally:
            self._running.pop(number, None)
        self._reply(message)

    def _refuse(self, number: int, kind: str, text: str) -> None:
        self._reply({"id": number, "error": {"kind": kind, "text": text}})


def _failure(number: int, error: BaseException) -> Message:
    """The answer for a handler that raised. Only what Handrail raises on purpose is told; a defect is logged here."""
    if isinstance(error, Refused):
        kind, text = error.kind, error.text
    elif isinstance(error, HandrailError):
        kind, text = type(error).__name__, str(error)
    elif isinstance(error, asyncio.CancelledError):
        kind, text = "cancelled", "it was cancelled"
    else:
        logger.error("a request failed", exc_info=error)
        kind, text = "defect", f"the other process failed with {type(error).__name__}; its log has more"
    return {"id": number, "error": {"kind": kind, "text": text}}


class _Standby(Coroutine[Any, Any, None]):
    """What a task runs that stands by for requests. Each handler takes its first step here and now, with that task as the
    current one: making a task for each would cost as much as carrying a call out. A handler that ends in its first step
    leaves the task standing by for the next one; one that waits takes the task with it."""

    __slots__ = ("_context", "_idle", "_idling", "_loop", "_unchanged", "_waits_for", "_work", "task")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._idle: asyncio.Future[None] = loop.create_future()
        self._idling = self._idle.__await__()
        self._work: Coroutine[Any, Any, None] | None = None
        self._waits_for: Any = _NOTHING
        self._context = copy_context()
        self._unchanged = copy_context()
        self.task: asyncio.Task[None] = loop.create_task(self, context=self._context)

    def has_ended(self, work: Coroutine[Any, Any, None]) -> bool:
        """Begin ``work``. Gives whether that was its end as well; otherwise the task goes on with it, and ends with it."""
        _enter_task(self._loop, self.task)
        try:
            self._waits_for = self._context.run(work.send, None)
        except (StopIteration, asyncio.CancelledError):
            return True
        finally:
            _leave_task(self._loop, self.task)
        self._work = work
        if not self._idle.done():
            self._idle.set_result(None)
        return False

    @property
    def is_as_new(self) -> bool:
        """Whether what was run has left nothing behind that the next would feel."""
        return not self._idle.done() and not self.task.cancelling() and self._context == self._unchanged

    def send(self, value: Any, /) -> Any:
        if self._work is None:
            return next(self._idling)
        if self._waits_for is _NOTHING:
            return self._work.send(value)
        waits_for, self._waits_for = self._waits_for, _NOTHING
        return waits_for

    def throw(self, *error: Any) -> Any:
        self._waits_for = _NOTHING  # it is there that the work hears it
        return (self._idling if self._work is None else self._work).throw(*error)

    def close(self) -> None:
        if self._work is not None:
            self._work.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("a task runs it, and nobody else")


_NOTHING = object()


@types.coroutine
def _continued(handling: Coroutine[Any, Any, Any], waited: Any) -> Generator[Any, Any, Any]:
    """The rest of a coroutine that was stepped once by hand and waits for ``waited``, as something to await."""
    while True:
        try:
            sent = yield waited
        except GeneratorExit:
            handling.close()
            raise
        except BaseException as error:
            step, value = handling.throw, error
        else:
            step, value = handling.send, sent
        try:
            waited = step(value)
        except StopIteration as end:
            return end.value
