"""One run of interruptible work, and the reason of its end: completion, time-out, user or shutdown.

There are two ways to run. *Inline* awaits the work in the caller's own task, which costs almost nothing and suits short
reads. *Apart* gives the work its own task. If the work ignores its cancellation, the caller is answered after a grace
period, while the locks stay held until the work ends.
"""

from __future__ import annotations

import asyncio
from asyncio import _enter_task, _leave_task  # pyright: ignore[reportPrivateUsage] - documented, for tasks of another kind
from collections.abc import Callable, Coroutine, Generator
from contextvars import copy_context
from typing import Any, TypeVar

from handrail.contract.errors import ErrorKind, ToolError
from handrail.contract.session import StopReason
from handrail.store.database.writer import Written

# Tasks that take their first step at once, like eager tasks in Python 3.12.
#
# The next turn of the event loop may have much else to do first. Even an idle loop costs as much for it as one step of a
# call.


def begin_at_once(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], known: Callable[[asyncio.Task[T]], object]
) -> asyncio.Task[T]:
    """A task of ``loop``, the running one, that does ``work`` and has taken its first step: in that task and its context.

    :param known: given the task before that step, which may already stop it
    """
    context, begun = copy_context(), BegunInTask(work)
    task: asyncio.Task[T] = loop.create_task(begun, context=context)
    known(task)
    caller = asyncio.current_task(loop)
    if caller is not None:
        _leave_task(loop, caller)
    _enter_task(loop, task)
    try:
        context.run(begun.begin)
    finally:
        _leave_task(loop, task)
        if caller is not None:
            _enter_task(loop, caller)
    return task


class BegunInTask(Coroutine[Any, Any, Any]):
    """What such a task runs. How the first step ends is told in the task's first turn."""

    __slots__ = ("_ended", "_first", "_is_first", "_owed", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._is_first = True
        self._first: Any = None
        """What it waits for then."""
        self._ended: BaseException | None = None
        """How it ended with that."""
        self._owed: asyncio.CancelledError | None = None
        """To be raised once what it waits for is there, which could not be cancelled."""

    def begin(self) -> None:
        """Take the first step."""
        try:
            self._first = self._work.send(None)
        except BaseException as ended:
            self._ended = ended

    def send(self, value: Any) -> Any:
        if self._is_first:
            return self._took_first()
        if self._owed is not None:
            return self.throw(self._owed)
        return self._work.send(value)

    def throw(self, error: Any, *more: Any) -> Any:
        if self._is_first:
            if self._ended is not None:
                return self._took_first()
            first: object = self._first
            if isinstance(error, asyncio.CancelledError) and asyncio.isfuture(first) and not first.done():
                if not first.cancel():  # as a task does where it waits
                    self._owed = error
                return self._took_first()
        self._is_first = False
        if self._owed is not None:
            error, more, self._owed = self._owed, (), None
        return self._work.throw(error, *more)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            first = self.send(None)
        except StopIteration as ended:
            return ended.value
        return (yield from Begun(self, first).__await__())

    def _took_first(self) -> Any:
        self._is_first = False
        first, ended = self._first, self._ended
        self._first = self._ended = None  # not kept alive while the work goes on
        if ended is not None:
            raise ended
        return first


class Begun:
    """Awaits a coroutine whose first step was already taken, in the same task."""

    __slots__ = ("_first", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any], first: Any) -> None:
        self._work = work
        self._first = first

    def __await__(self) -> Generator[Any, Any, Any]:
        waited_for = self._first
        try:
            while True:
                try:
                    sent = yield waited_for
                except GeneratorExit:
                    self._work.close()
                    raise
                except BaseException as error:
                    waited_for = self._work.throw(error)
                else:
                    waited_for = self._work.send(sent)
        except StopIteration as ended:
            return ended.value


T = TypeVar("T")

STOPPED_TEXT: dict[StopReason, str] = {
    "timeout": "timed out",
    "budget": "ended, since the time that its run may take is used up",
    "user": "stopped by the user",
    "call": "stopped by a call of its own session",
    "shutdown": "stopped because the kernel is shutting down",
    "parent": "aborted by parent",
}


def kind_of_stop(reason: StopReason) -> ErrorKind:
    """The kind of error that what was stopped for ``reason`` ends as."""
    return "timeout" if reason == "timeout" else "limit" if reason == "budget" else "cancelled"


class Stopped(Exception):
    """The work was ended before it returned."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(STOPPED_TEXT[reason])
        self.reason: StopReason = reason


class StillRunning(Stopped):
    """The work was told to end and did not: :attr:`task` is still at it."""

    def __init__(self, reason: StopReason, task: asyncio.Task[Any]) -> None:
        super().__init__(reason)
        self.task = task


class HandedOver(BaseException):
    """The work goes on, and somebody else awaits it from here on. No failure of the work's: nothing may take it for one."""


class Execution:
    """Runs one piece of work at a time and can be told to stop it, from the same event loop.

    Also the :class:`~handrail.contract.doors.runtime.Cancellation` that the tool sees.
    """

    # What a run that is not stopped never sets stands on the class, which keeps making one cheap.
    reason: StopReason | None = None
    owed: asyncio.CancelledError | None = None
    """The awaiting task itself was cancelled, by this: it is raised again once the call is on record."""
    _task: asyncio.Task[Any] | None = None
    _child: asyncio.Task[Any] | None = None
    _cancellable: bool = True
    _waiter: asyncio.Future[None] | None = None
    _overdue: bool = False
    _grace: asyncio.TimerHandle | None = None
    _requests: int = 0
    _timer: asyncio.TimerHandle | None = None
    _pauses: int = 0
    _left_s: float | None = None
    """Of its time-out, while that is paused."""
    handing: asyncio.Future[bool] | None = None
    """While it is being decided whether somebody else awaits the rest; nobody is answered before that."""
    told: Callable[[StopReason], None] | None = None
    """Called each time it is told to stop, before its work is: for work whose end is not in this process's hands."""

    def __init__(self, loop: asyncio.AbstractEventLoop, grace_s: float) -> None:
        self.loop = loop
        self.grace_s = grace_s

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def check(self) -> None:
        if self.reason is not None:
            raise ToolError(f"the call was {STOPPED_TEXT[self.reason]}", kind=kind_of_stop(self.reason))

    def stop(self, reason: StopReason) -> None:
        """Ask the work to end; the first reason counts. Does nothing when nothing runs any more, but is remembered."""
        if self.reason is None:
            self.reason = reason
        if self.told is not None:
            self.told(self.reason)
        if self._child is not None:
            if self._cancellable:
                self._strike(self._child)
            if self._grace is None:
                self._grace = self.loop.call_later(self.grace_s, self._give_up)
        elif self._task is not None:
            self._strike(self._task)
            # Work that swallows its cancellation is told again: it has no task of its own to be left behind in.
            self.loop.call_later(self.grace_s, self._insist, self._task)

    def pause(self) -> None:
        """From here on its time-out does not count, until each pause has its :meth:`resume`: somebody else is waited for."""
        self._pauses += 1
        if self._timer is not None:
            self._left_s = max(self._timer.when() - self.loop.time(), 0.0)
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        """Its time-out counts again, from where it was; see :meth:`pause`."""
        self._pauses -= 1
        if not self._pauses and self._left_s is not None:
            self._timer = self.loop.call_later(self._left_s, self.stop, "timeout")
            self._left_s = None

    def _count_down(self, timeout_s: float) -> None:
        if self._pauses:
            self._left_s = timeout_s
        else:
            self._timer = self.loop.call_later(timeout_s, self.stop, "timeout")

    def _stop_counting(self) -> None:
        self._left_s = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def inline(self, work: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        """Await ``work`` in this task.

        :raises Stopped: when it ended because it was told to
        """
        try:
            first = self.first_step(work)
        except StopIteration as ended:
            return ended.value
        return await self.rest(work, first, timeout_s)

    def first_step(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Begin ``work`` in this task. Most short reads end with it: no timer, nothing to stop. Otherwise :meth:`rest`
        awaits what is left.

        :return: what it waits for
        :raises StopIteration: with what it returned, when it never had to wait
        :raises Stopped: when it was told to end before it began
        """
        if self.reason is not None:
            work.close()
            raise Stopped(self.reason)
        try:
            return work.send(None)
        except _ORDINARY:
            raise
        except BaseException as error:
            raise _own_failure(error) from error

    async def rest(self, work: Coroutine[Any, Any, Any], first: Any, timeout_s: float | None) -> Any:
        """Await in this task what is left of ``work`` after its :meth:`first_step`.

        :param timeout_s: from now on
        :raises Stopped: when it ended because it was told to
        """
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._task = task
        if self.reason is not None:  # stopped in its first step
            self.stop(self.reason)
        if timeout_s is not None:
            self._count_down(timeout_s)
        struck: asyncio.CancelledError | None = None
        try:
            return await Begun(work, first)
        except asyncio.CancelledError as cancellation:
            struck = cancellation
        except _ORDINARY:
            raise
        except BaseException as error:
            raise _own_failure(error) from error
        finally:
            self._task = None
            if timeout_s is not None:
                self._stop_counting()
            while self._requests:
                self._requests -= 1
                task.uncancel()
            # What is still counted was asked for by others, whatever the work made of it. The caller may also have
            # cancelled its own task just before, so that it strikes here.
            if task.cancelling() > before or (struck and self.reason is None and before and self.owed is None):
                self.owed = struck or asyncio.CancelledError()
                self.reason = self.reason or "user"
        if self.reason is not None:
            raise Stopped(self.reason) from None
        raise _own_failure(struck or asyncio.CancelledError()) from struck

    async def apart(self, work: Coroutine[Any, Any, Any], timeout_s: float, *, cancellable: bool = True) -> Any:
        """Await ``work`` in a task of its own, which takes its first step at once: the next turn of the event loop may have much
        else to do first.

        :param cancellable: False for work in a thread, which can only be asked through :attr:`requested`
        :raises Stopped: when it ended because it was told to
        :raises StillRunning: when it was told to and did not end within the grace period
        :raises HandedOver: when somebody else awaits it from here on, by :meth:`to_its_end`
        """
        if self.reason is not None:
            work.close()
            raise Stopped(self.reason)
        self._cancellable = cancellable
        begin_at_once(self.loop, _contained(work), self._begins)
        self._count_down(timeout_s)
        return await self.to_its_end()

    def _begins(self, child: asyncio.Task[Any]) -> None:
        child.add_done_callback(self._wake)
        self._child = child

    async def to_its_end(self) -> Any:
        """Await what runs apart; see :meth:`apart`."""
        child = self._child
        assert child is not None
        while not (child.done() or self._overdue) or self.handing is not None:
            if self.handing is not None and self.handing.done():
                handed_over, self.handing = self.handing.result(), None
                if handed_over:
                    raise HandedOver  # it is stopped, timed and given up as before
                if self.owed is not None:
                    self.stop("user")
                continue
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError as cancellation:
                self.owed = cancellation
                if self.handing is None:
                    self.stop("user")
        self._stop_counting()
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self._child = self._waiter = None
        if not child.done():
            raise StillRunning(self.reason or "user", child)
        if not child.cancelled():
            return child.result()
        if self.reason is None:
            raise _own_failure(asyncio.CancelledError())
        raise Stopped(self.reason)

    def hand_over(self) -> asyncio.Future[bool]:
        """Begin to let somebody else await the rest of what runs apart. Whoever awaits it now is answered only once the
        future that this gives is set: by :class:`HandedOver` where that is true, else as if nothing had been asked.

        :raises ToolError: ``conflict`` where nothing runs apart, or that has ended or is about to
        """
        if self._child is None or self._child.done() or self.reason is not None or self.handing is not None:
            raise ToolError("it has ended, or is about to", kind="conflict")
        self.handing = self.loop.create_future()
        self.handing.add_done_callback(self._wake)
        return self.handing

    def _strike(self, task: asyncio.Task[Any]) -> None:
        """Cancel the work where it waits. Asked by the work itself, that is where it waits next: a running task would
        keep the cancellation for whatever it awaits after the work."""
        if task is asyncio.current_task(self.loop):
            self.loop.call_soon(self._cancel, task)
        else:
            self._cancel(task)

    def _cancel(self, task: asyncio.Task[Any]) -> None:
        if task is self._child:
            task.cancel()
        elif task is self._task:
            self._requests += 1
            task.cancel()

    def _give_up(self) -> None:
        self._overdue = True
        self._wake()

    def _wake(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _insist(self, task: asyncio.Task[Any]) -> None:
        if self._task is task:
            self._cancel(task)
            self.loop.call_later(self.grace_s, self._insist, task)


_ORDINARY = (Exception, KeyboardInterrupt, GeneratorExit)
"""What work may raise and passes on as it is. Anything else, as a tool's ``sys.exit()``, would end the kernel or pass
by everything that answers its call."""


def _own_failure(error: BaseException) -> RuntimeError:
    """What work raised that must not reach the kernel as it is."""
    if isinstance(error, asyncio.CancelledError):
        return RuntimeError("it awaited something that had been cancelled (CancelledError)")
    return RuntimeError(f"it raised {type(error).__name__}: {error}")


async def _contained(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (*_ORDINARY, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _own_failure(error) from error


async def until_known(written: Written, execution: Execution) -> None:
    """Await what becomes of records that were handed to the log; a cancellation of this task is owed afterwards.

    :raises LogUnavailable: when they could not be written
    """
    try:
        await written
    except asyncio.CancelledError as cancellation:
        execution.owed = cancellation
        written.result()


async def uninterrupted(work: Coroutine[Any, Any, T] | asyncio.Future[T], execution: Execution) -> T:
    """Await ``work`` to its end even if this task is cancelled meanwhile; the cancellation is owed afterwards."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as cancellation:
            execution.owed = cancellation
    return task.result()
