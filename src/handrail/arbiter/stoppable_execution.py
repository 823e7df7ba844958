"""One run of interruptible work, and the reason of its end: completion, time-out, user or shutdown.

There are two ways to run. *Inline* awaits the work in the caller's own task, which costs almost nothing and suits short
reads. *Apart* gives the work its own task. If the work ignores its cancellation, the caller is answered after a grace
period, while the locks stay held until the work ends.
"""

from __future__ import annotations

import asyncio
from asyncio import _enter_task, _leave_task  # pyright: ignore[reportPrivateUsage] - documented, for tasks of another kind
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from handrail.contract.errors import ErrorKind, ToolError
from handrail.contract.session_protocols import StopReason
from handrail.store.database.group_writer import UncancellableWriteFuture

# Tasks that take their first step at once, like eager tasks in Python 3.12.
#
# The next turn of the event loop may have much else to do first. Even an idle loop costs as much for it as one step of a
# call.


def start_eager_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], known: Callable[[asyncio.Task[T]], object]
) -> asyncio.Task[T]:
    """Create a task of the running ``loop`` for ``work`` and take its first step at once, in the task's own context.

    :param known: called with the task before that step, which may already stop it
    """
    context, begun = copy_context(), EagerTaskCoroutine(work)
    task: asyncio.Task[T] = loop.create_task(begun, context=context)
    # The caller must know the task before its first step, which may stop it already.
    known(task)
    # Libraries such as timeouts ask for the current task, so the loop must name the new one during its first step.
    caller = asyncio.current_task(loop)
    if caller is not None:
        _leave_task(loop, caller)
    _enter_task(loop, task)
    try:
        context.run(begun.take_first_step)
    finally:
        _leave_task(loop, task)
        if caller is not None:
            _enter_task(loop, caller)
    return task


class EagerTaskCoroutine(Coroutine[Any, Any, Any]):
    """The coroutine of such a task. The task's first loop turn reports how the first step ended."""

    __slots__ = ("_ended", "_first", "_is_first", "_owed", "_work")

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._is_first = True
        self._first: Any = None
        """The future that the first step waits for."""
        self._ended: BaseException | None = None
        """The exception that the first step ended with."""
        self._owed: asyncio.CancelledError | None = None
        """A cancellation to raise after the wait of the first step, which could not be cancelled."""

    def take_first_step(self) -> None:
        """Take the first step."""
        try:
            self._first = self._work.send(None)
        except BaseException as ended:
            self._ended = ended

    def send(self, value: Any) -> Any:
        if self._is_first:
            return self._take_first_result()
        if self._owed is not None:
            return self.throw(self._owed)
        return self._work.send(value)

    def throw(self, error: Any, *more: Any) -> Any:
        if self._is_first:
            if self._ended is not None:
                return self._take_first_result()
            first: object = self._first
            if isinstance(error, asyncio.CancelledError) and asyncio.isfuture(first) and not first.done():
                if not first.cancel():  # as a task does where it waits
                    self._owed = error
                return self._take_first_result()
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
        return (yield from StartedCoroutine(self, first).__await__())

    def _take_first_result(self) -> Any:
        self._is_first = False
        first, ended = self._first, self._ended
        self._first = self._ended = None  # released while the work continues
        if ended is not None:
            raise ended
        return first


class StartedCoroutine:
    """An awaitable that continues a coroutine whose first step has already run, in the same task."""

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


class TimedWork(Protocol):
    """Work with a time-out."""

    def time_out(self) -> None:
        """End, since the time is over."""


class SharedTimeout:
    """The time-outs of one length on one loop, which have one timer together.

    A timer of the loop costs as much as several steps of a call. Time-outs of one length end in the order in which they began,
    so only the first one needs a timer. It stays when that one has stopped, and then finds the next one.
    """

    __slots__ = ("_length_s", "_loop", "_running", "_siblings")

    def __init__(self, loop: asyncio.AbstractEventLoop, length_s: float, siblings: dict[float, SharedTimeout]) -> None:
        self._loop = loop
        self._length_s = length_s
        self._siblings = siblings
        self._running: OrderedDict[TimedWork, float] = OrderedDict()
        """The ends of the time-outs, as times of the loop."""
        self._set_timer(loop.time() + length_s)

    def start(self, work: TimedWork) -> None:
        self._running[work] = self._loop.time() + self._length_s

    def stop(self, work: TimedWork) -> float:
        """Stop a time-out before its end, and return the seconds until its end."""
        return self._running.pop(work, 0.0) - self._loop.time()

    def _set_timer(self, at: float) -> None:
        Context().run(
            self._loop.call_at, at, self._end_due
        )  # a copy of the caller's context would keep its values alive

    def _end_due(self) -> None:
        now = self._loop.time()
        while self._running:
            work, end = next(iter(self._running.items()))
            # The first one was stopped, and the next one has time left. The timer moves there.
            if end > now:
                self._set_timer(end)
                return
            del self._running[work]
            work.time_out()
        # No time-out of this length is left. A new one starts a new timer.
        del self._siblings[self._length_s]


_shared_timeouts: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, SharedTimeout]] = WeakKeyDictionary()


def start_shared_timeout(loop: asyncio.AbstractEventLoop, work: TimedWork, length_s: float) -> SharedTimeout:
    """Start the time-out of ``work``. The caller stops it if the work ends earlier."""
    of_loop = _shared_timeouts.setdefault(loop, {})
    if (shared := of_loop.get(length_s)) is None:
        shared = of_loop[length_s] = SharedTimeout(loop, length_s, of_loop)
    shared.start(work)
    return shared


T = TypeVar("T")

STOPPED_TEXT: dict[StopReason, str] = {
    "timeout": "timed out",
    "budget": "stopped because the time budget of its run is used up",
    "user": "stopped by the user",
    "call": "stopped by another call of this session",
    "shutdown": "stopped because the kernel is shutting down",
    "parent": "aborted by parent",
}


def get_stop_error_kind(reason: StopReason) -> ErrorKind:
    """Return the error kind of work that was stopped for ``reason``."""
    return "timeout" if reason == "timeout" else "limit" if reason == "budget" else "cancelled"


class WorkStopped(Exception):
    """The work was stopped before it returned."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(STOPPED_TEXT[reason])
        self.reason: StopReason = reason


class WorkStillRunning(WorkStopped):
    """The work was asked to stop and still runs, in :attr:`task`."""

    def __init__(self, reason: StopReason, task: asyncio.Task[Any]) -> None:
        super().__init__(reason)
        self.task = task


class WorkTransferred(BaseException):
    """The work continues, and another task awaits it from now on.

    It derives from ``BaseException``, so that no handler takes it for a failure of the work.
    """


class StoppableTaskRunner:
    """A runner of one piece of work at a time, which can be asked to stop on the same event loop.

    It is also the :class:`~handrail.contract.services.tool_runtime.CancellationToken` that the tool sees.
    """

    # Attributes that only a stopped run sets have their default on the class, so an object is cheap to make.
    reason: StopReason | None = None
    owed_cancellation: asyncio.CancelledError | None = None
    """The cancellation of the awaiting task, which is raised again once the call is recorded."""
    _task: asyncio.Task[Any] | None = None
    _child: asyncio.Task[Any] | None = None
    _cancellable: bool = True
    _waiter: asyncio.Future[None] | None = None
    _overdue: bool = False
    _grace: asyncio.TimerHandle | None = None
    _requests: int = 0
    _timeout: SharedTimeout | None = None
    _pauses: int = 0
    _left_s: float | None = None
    """The rest of the time-out while it is paused."""
    handover: asyncio.Future[bool] | None = None
    """Set while a handover is being decided; no caller is answered before the decision."""
    on_stop: Callable[[StopReason], None] | None = None
    """Called on each request to stop, before the work is cancelled: for work that another process carries out."""

    def __init__(self, loop: asyncio.AbstractEventLoop, grace_s: float) -> None:
        self.loop = loop
        self.grace_s = grace_s

    @property
    def is_requested(self) -> bool:
        return self.reason is not None

    def raise_if_requested(self) -> None:
        if self.reason is not None:
            raise ToolError(
                f"The call was {STOPPED_TEXT[self.reason]}. Check its effect before you repeat it.",
                kind=get_stop_error_kind(self.reason),
            )

    def stop(self, reason: StopReason) -> None:
        """Ask the work to stop. The first reason counts, also if nothing runs yet or any more."""
        if self.reason is None:
            self.reason = reason
        if self.on_stop is not None:
            self.on_stop(self.reason)
        if self._child is not None:
            # A thread cannot be cancelled. It only sees the request to stop.
            if self._cancellable:
                self._cancel_at_wait(self._child)
            if self._grace is None:
                # Work that ignores the stop must not keep its caller waiting. After this time, it continues alone.
                self._grace = self.loop.call_later(self.grace_s, self._end_waiting)
        elif self._task is not None:
            self._cancel_at_wait(self._task)
            # Work that swallows its cancellation is cancelled again: it has no separate task that could be abandoned.
            self.loop.call_later(self.grace_s, self._cancel_again, self._task)

    def pause_timeout(self) -> None:
        """Pause the time-out until each pause has its :meth:`resume_timeout`, since the work waits for others."""
        self._pauses += 1
        if self._timeout is not None:
            # Time that the user takes to answer must not count against the tool.
            self._left_s = max(self._timeout.stop(self), 0.0)
            self._timeout = None

    def resume_timeout(self) -> None:
        """Continue the time-out where it was paused; see :meth:`pause_timeout`."""
        self._pauses -= 1
        if not self._pauses and self._left_s is not None:
            self._timeout = start_shared_timeout(self.loop, self, self._left_s)
            self._left_s = None

    def time_out(self) -> None:
        self.stop("timeout")

    def _start_timer(self, timeout_s: float) -> None:
        if self._pauses:
            self._left_s = timeout_s
        else:
            self._timeout = start_shared_timeout(self.loop, self, timeout_s)

    def _stop_timer(self) -> None:
        self._left_s = None
        if self._timeout is not None:
            self._timeout.stop(self)
            self._timeout = None

    async def run_in_current_task(self, work: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> Any:
        """Await ``work`` in this task.

        :raises WorkStopped: if it ended because it was asked to
        """
        try:
            first = self.run_first_step(work)
        except StopIteration as ended:
            return ended.value
        return await self.run_remaining_steps(work, first, timeout_s)

    def run_first_step(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Start ``work`` in this task. Most short reads finish here; otherwise :meth:`run_remaining_steps` awaits the remainder.

        :return: the future that it waits for
        :raises StopIteration: with its result, if it never had to wait
        :raises WorkStopped: if it was asked to stop before it started
        """
        if self.reason is not None:
            # A coroutine that never starts would leave a warning of Python in the program's output.
            work.close()
            raise WorkStopped(self.reason)
        try:
            return work.send(None)
        except _ORDINARY:
            raise
        except BaseException as error:
            raise _wrap_failure(error) from error

    async def run_remaining_steps(self, work: Coroutine[Any, Any, Any], first: Any, timeout_s: float | None) -> Any:
        """Await the remainder of ``work`` in this task, after its :meth:`run_first_step`.

        :param timeout_s: counted from now on
        :raises WorkStopped: if it ended because it was asked to
        """
        task = asyncio.current_task()
        assert task is not None
        # The caller's own cancellations are counted apart from those that this runner requests.
        before = task.cancelling()
        self._task = task
        if self.reason is not None:  # stopped in its first step
            self.stop(self.reason)
        if timeout_s is not None:
            self._start_timer(timeout_s)
        cancellation_received: asyncio.CancelledError | None = None
        try:
            return await StartedCoroutine(work, first)
        # Whether this is the stop of the call or a cancellation of the caller is decided at the end.
        except asyncio.CancelledError as cancellation:
            cancellation_received = cancellation
        except _ORDINARY:
            raise
        except BaseException as error:
            raise _wrap_failure(error) from error
        finally:
            self._task = None
            if timeout_s is not None:
                self._stop_timer()
            # Requests of this runner are taken back, so that the structured concurrency of the caller does not count them.
            while self._requests:
                self._requests -= 1
                task.uncancel()
            # Cancellations that are still counted came from elsewhere, whatever the work did with them. The caller may
            # also have cancelled its own task just before, so that the cancellation arrives here.
            if task.cancelling() > before or (
                cancellation_received and self.reason is None and before and self.owed_cancellation is None
            ):
                self.owed_cancellation = cancellation_received or asyncio.CancelledError()
                self.reason = self.reason or "user"
        if self.reason is not None:
            raise WorkStopped(self.reason) from None
        raise _wrap_failure(cancellation_received or asyncio.CancelledError()) from cancellation_received

    async def run_in_separate_task(
        self, work: Coroutine[Any, Any, Any], timeout_s: float, *, cancellable: bool = True
    ) -> Any:
        """Await ``work`` in a separate task, which takes its first step at once.

        :param cancellable: False for work in a thread, which only sees :attr:`is_requested`
        :raises WorkStopped: if it ended because it was asked to
        :raises WorkStillRunning: if it was asked to stop and did not within the grace period
        :raises WorkTransferred: if another task awaits it from now on, with :meth:`wait_for_separate_task`
        """
        if self.reason is not None:
            work.close()
            raise WorkStopped(self.reason)
        self._cancellable = cancellable
        start_eager_task(self.loop, _contain_failures(work), self._track_task)
        self._start_timer(timeout_s)
        return await self.wait_for_separate_task()

    def _track_task(self, child: asyncio.Task[Any]) -> None:
        child.add_done_callback(self._wake)
        self._child = child

    async def wait_for_separate_task(self) -> Any:
        """Await the work that runs apart; see :meth:`run_in_separate_task`."""
        child = self._child
        assert child is not None
        while not (child.done() or self._overdue) or self.handover is not None:
            if self.handover is not None and self.handover.done():
                handed_over, self.handover = self.handover.result(), None
                if handed_over:
                    raise WorkTransferred  # stop, time-out and grace period apply as before
                if self.owed_cancellation is not None:
                    self.stop("user")
                continue
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError as cancellation:
                self.owed_cancellation = cancellation
                if self.handover is None:
                    self.stop("user")
        self._stop_timer()
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self._child = self._waiter = None
        if not child.done():
            raise WorkStillRunning(self.reason or "user", child)
        if not child.cancelled():
            return child.result()
        if self.reason is None:
            raise _wrap_failure(asyncio.CancelledError())
        raise WorkStopped(self.reason)

    def start_handover(self) -> asyncio.Future[bool]:
        """Start to hand the work that runs apart over to another waiter, and return the future of that decision.

        The present waiter is answered only after the future is set: with :class:`WorkTransferred` if it is true, otherwise as usual.

        :raises ToolError: ``conflict`` if no work runs apart, or it has ended or is about to
        """
        if self._child is None or self._child.done() or self.reason is not None or self.handover is not None:
            raise ToolError("The call has ended or is about to end. Use its result.", kind="conflict")
        self.handover = self.loop.create_future()
        self.handover.add_done_callback(self._wake)
        return self.handover

    def _cancel_at_wait(self, task: asyncio.Task[Any]) -> None:
        """Cancel the work at its present wait, or at its next one if the work itself asks for it.

        A running task would otherwise keep the cancellation for its first wait after the work.
        """
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

    def _end_waiting(self) -> None:
        self._overdue = True
        self._wake()

    def _wake(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _cancel_again(self, task: asyncio.Task[Any]) -> None:
        if self._task is task:
            self._cancel(task)
            self.loop.call_later(self.grace_s, self._cancel_again, task)


_ORDINARY = (Exception, KeyboardInterrupt, GeneratorExit)
"""Exceptions that work may raise and that are passed on. Any other, such as ``SystemExit``, would end the kernel or bypass
the code that answers the call.
"""


def _wrap_failure(error: BaseException) -> RuntimeError:
    """Return a plain exception for one that must not reach the kernel."""
    if isinstance(error, asyncio.CancelledError):
        return RuntimeError("the tool awaited a task that was cancelled (CancelledError)")
    return RuntimeError(f"the tool raised {type(error).__name__}: {error}")


async def _contain_failures(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except (*_ORDINARY, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _wrap_failure(error) from error


async def wait_until_records_written(written: UncancellableWriteFuture, execution: StoppableTaskRunner) -> None:
    """Wait until records are durable or failed. A cancellation of this task is raised later, as ``execution.owed_cancellation``.

    :raises LogUnavailable: if they could not be written
    """
    try:
        await written
    except asyncio.CancelledError as cancellation:
        execution.owed_cancellation = cancellation
        written.result()


async def await_deferring_cancellation(
    work: Coroutine[Any, Any, T] | asyncio.Future[T], execution: StoppableTaskRunner
) -> T:
    """Await ``work`` to its end. A cancellation of this task is raised later, as ``execution.owed_cancellation``."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as cancellation:
            execution.owed_cancellation = cancellation
    return task.result()
