"""The writer: one thread that writes for all callers, in groups, without waiting to fill a group.

While one group is being made durable the next one gathers, so a lone caller waits for one sync and sixty-four
callers share a few. Only items without a waiting caller may wait for others to join them.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from contextvars import Context
from functools import partial
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from handrail.contract.errors import LogUnavailable

# Wake-up signals for a thread or an event loop from another thread, as fast as the platform can.
#
# On Linux both wait on a counter of the kernel (eventfd). From rest that takes a third of the time of a
# released lock, and half of that of the socket pair by which asyncio wakes its loops.

HAS_EVENTFD = sys.platform == "linux"


class WakeupSignal(Protocol):
    """A wake-up signal for one waiting thread. A signal without a waiter is remembered; several count as one."""

    def set(self) -> None:
        """Send the signal, from any thread, also after :meth:`close`."""

    def wait(self) -> None:
        """Wait until it was sent since the last wait."""

    def wait_for(self, seconds: float) -> bool:
        """Wait for at most ``seconds``, and return whether it was sent."""
        ...

    def close(self) -> None:
        """Release the signal, since no thread waits any more."""


def create_wakeup() -> WakeupSignal:
    with suppress(OSError):  # too many open files: use a lock instead
        if HAS_EVENTFD:
            return _EventfdWakeup()
    return _LockWakeup()


class _EventfdWakeup:
    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._closing = threading.Lock()
        """Held while other threads use the descriptor, whose number may be reused once it is closed."""
        self._rung = False

    def set(self) -> None:
        if not self._rung:  # the waiter resets it before it looks for work
            with self._closing:
                if self._descriptor >= 0:
                    self._rung = True
                    os.eventfd_write(self._descriptor, 1)

    def wait(self) -> None:
        os.eventfd_read(self._descriptor)
        self._rung = False

    def wait_for(self, seconds: float) -> bool:
        if not self._poll.poll(seconds * 1000):
            return False
        self.wait()
        return True

    def close(self) -> None:
        with self._closing:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _LockWakeup:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # the signal is already set
            pass

    def wait(self) -> None:
        self._lock.acquire()

    def wait_for(self, seconds: float) -> bool:
        return self._lock.acquire(timeout=seconds)

    def close(self) -> None:
        pass


class EventLoopWakeup:
    """A wake-up signal for an event loop, which runs callbacks. Create it on the loop's thread, and use it from any other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.looks = False
        """Whether its owner has scheduled a check in the loop."""
        self._waiting: deque[Callable[[], object]] = deque()
        self._closing = threading.Lock()
        self._descriptor = -1
        if HAS_EVENTFD:
            self._poll = select.poll()
            with suppress(OSError):
                self._wait_at(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def _wait_at(self, descriptor: int) -> None:
        try:
            # In an empty context: a copy of the caller's context would keep its values alive.
            Context().run(self._loop.add_reader, descriptor, self._on_set)
        except Exception:  # a loop of another kind, which cannot wait for descriptors
            os.close(descriptor)
        else:
            self._descriptor = descriptor
            self._poll.register(descriptor, select.POLLIN)

    @property
    def is_closed(self) -> bool:
        """Whether the loop is closed, so that no callback runs any more."""
        return self._loop.is_closed()

    def schedule(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` in the loop, after earlier ones. A closed loop drops it."""
        self._waiting.append(callback)
        with self._closing:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)
                return
        self._call_soon(self._run_callbacks)

    def block_until_callback(self, seconds: float) -> None:
        """Block the loop until a callback is due, and run it. Call it on the loop's thread.

        Returns at once if the loop cannot wait for descriptors.
        """
        until = monotonic() + seconds
        while self._descriptor >= 0 and self._poll.poll(max(until - monotonic(), 0) * 1000):
            called = bool(self._waiting)  # the callback of a signal may have run with the signal before it
            self._on_set()
            if called:
                break

    def close(self) -> None:
        """Release the signal, from any thread. Pending callbacks still run."""
        if self._descriptor >= 0 and not self._call_soon(self._close):
            self._close_descriptor()

    def _on_set(self) -> None:
        with suppress(BlockingIOError):  # wait_for has already read it
            os.eventfd_read(self._descriptor)
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        while self._waiting:
            self._waiting.popleft()()

    def _close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            self._close_descriptor()
        self._run_callbacks()

    def _close_descriptor(self) -> None:
        with self._closing:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _call_soon(self, callback: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed, together with its tasks
            return False
        return True


# Futures of queued items: a caller waits until an item is durable, or can be read as well.

CallerFuture = asyncio.Future[None]


class DurabilityFuture(asyncio.Future[None]):
    """A future that tells whether an item is durable, for callers who do not read it back."""


class UncancellableWriteFuture(asyncio.Future[None]):
    """A future that tells whether an item is durable, and that cannot be cancelled.

    A cancellation of the waiting task is raised once the outcome is known.
    """

    def cancel(self, msg: object = None) -> bool:
        """Refuse the cancellation, since the writer has the item and its outcome must be known."""
        return False


class PromisedWriteFuture(UncancellableWriteFuture):
    """A :class:`UncancellableWriteFuture` for an item that must be durable as soon as possible and may become readable a moment later."""


class QueuedWrite:
    """An item in the queue that is written soon. Awaiting it requests an early write and waits until it is durable.

    It may be awaited several times.

    :raises LogUnavailable: when awaited, if it could not be written; it is not written later
    """

    __slots__ = ("_hurry", "_written")

    def __init__(self, written: asyncio.Future[None], hurry: Callable[[], None]) -> None:
        self._written = written
        self._hurry = hurry

    @property
    def failure(self) -> BaseException | None:
        """Why it was not written, once that is known."""
        return self._written.exception() if self._written.done() else None

    @property
    def is_durable(self) -> bool:
        return self._written.done() and self._written.exception() is None

    def request_flush(self) -> asyncio.Future[None]:
        """Request an early write, and return a future that tells when it is durable."""
        if not self._written.done():
            self._hurry()
        return asyncio.shield(self._written)

    def __await__(self) -> Generator[Any, None, None]:
        return self.request_flush().__await__()


def complete_durability_futures(futures: Sequence[asyncio.Future[Any]], failure: str | None) -> None:
    """Resolve futures, on the thread of their loop."""
    for future in futures:
        if not future.done():
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(LogUnavailable(failure))
                if isinstance(future, DurabilityFuture):
                    future.exception()  # retrieved, since it need not be awaited


# The sink that the writer writes to, and the errors by which it refuses.

T_contra = TypeVar("T_contra", contravariant=True)


class SinkUnavailable(Exception):
    """The sink cannot take any item now (full disk, read-only, damaged); the text says why."""


class SinkPermanentlyLost(SinkUnavailable):
    """The sink never takes an item of this process again; waiting items are dropped."""


class WriteSink(Protocol[T_contra]):
    """The target of groups. Only the writer's thread uses it."""

    def write_ahead(self, batch: Sequence[T_contra]) -> bool:
        """Make a batch durable in a faster way before it is written, and return whether that succeeded. Never raises.

        The batch is given to :meth:`write` soon, after earlier promised batches and before others. If that never happens, the next
        process that opens the sink writes it.
        """
        ...

    def warm_up(self) -> None:
        """Prepare for a :meth:`start_journalled_write` that may follow soon. Never raises."""

    def write(self, batch: Sequence[T_contra]) -> None:
        """Make the whole batch durable, or none of it.

        :raises SinkUnavailable: for a failure that concerns every batch. For any other exception, the writer assumes a faulty
            item and writes the items one by one
        """

    def reopen(self) -> None:
        """Start again after :class:`SinkUnavailable`, and check that writing works.

        :raises SinkUnavailable: if it does not
        """

    def close(self) -> None: ...


T = TypeVar("T")
Q = TypeVar("Q")


class _FlushMarker:
    """A queue entry of a caller who waits for earlier items."""


class _PromiseMarker:
    """The waiter of an item whose caller continued when the item was promised."""


_FLUSH = _FlushMarker()
_PROMISE = _PromiseMarker()
_CLOSED = "The log is closed, since the kernel has shut down."
PROMISE_GRACE_S = 0.001
"""How long an event loop may block for a promise."""
_MOST_PROMISED = 256
"""Items that are durable and not written yet."""
_Entry = tuple[T | _FlushMarker, CallerFuture | _PromiseMarker | None]


class GroupWriter(Generic[T]):
    """A writer thread that takes items from any thread and writes them in order, in groups.

    After a failure, waiting callers receive the error. Items without a waiter are kept, at most ``max_retained``, and are
    written again every ``retry_s`` seconds and with each commit. :attr:`lost` counts dropped items. After :class:`SinkPermanentlyLost`
    nothing is kept.

    :param linger_s: how long items without a waiter may gather before they are written
    """

    def __init__(
        self,
        sink: WriteSink[T],
        *,
        linger_s: float = 0.02,
        retry_s: float = 1.0,
        max_batch: int = 1024,
        max_retained: int = 10_000,
    ) -> None:
        self._sink = sink
        self._linger_s = linger_s
        self._retry_s = retry_s
        self._max_batch = max_batch
        self._max_retained = max_retained
        self._queue: deque[_Entry[T]] = deque()
        self._in_flight = 0
        self._bell = create_wakeup()
        self._loops: dict[asyncio.AbstractEventLoop, EventLoopWakeup] = {}
        """The wake-up signals of the callers' loops."""
        self._asleep = False
        self._urgent = False
        self._promising = False
        self._rousing = False
        self._quick = False
        """Whether the latest promise took less than a moment."""
        self._unwritten = 0
        """Promised items that cannot be read yet."""
        self._closing = False
        self._ended = False
        self._refusal: str | None = None
        self._sink_lost = False
        self._low_water: deque[tuple[int, CallerFuture]] = deque()
        self.transactions = 0
        """Groups made durable."""
        self.commits = 0
        """Callers whose item became durable."""
        self.lost = 0
        """Appended items that were dropped."""
        self._thread = threading.Thread(target=self._run, name="handrail-writer", daemon=True)
        self._thread.start()

    @property
    def unavailable_reason(self) -> str | None:
        """Why nothing can be written now; None if it can."""
        return _CLOSED if self._closing else self._refusal

    @property
    def backlog(self) -> int:
        """The number of items that are not durable yet."""
        return len(self._queue) + self._in_flight

    def has_backlog_below(self, backlog: int) -> bool:
        """Return whether the writer accepts items now and fewer than ``backlog`` of them are not durable."""
        return self._refusal is None and len(self._queue) + self._in_flight < backlog and not self._closing

    def queue_without_waiting(self, item: T) -> None:
        """Queue an item without waiting. Never blocks or raises; after :meth:`close` it counts as lost."""
        if self._closing:
            self.lost += 1
            return
        self._queue.append((item, None))
        if self._asleep:
            self._bell.set()
        if self._ended:
            self._resolve_and_count_lost()

    async def commit(self, item: T) -> None:
        """Queue an item, and return when it and all earlier ones are durable and can be read.

        Cancelling the wait does not remove the item.

        :raises LogUnavailable: if it could not be written; it is not written later
        """
        await self._wait_for(item)

    def start_commit(self, item: T) -> UncancellableWriteFuture:
        """Queue an item, and return a future for callers who must know the outcome before they continue."""
        written = UncancellableWriteFuture(loop=asyncio.get_running_loop())
        self._queue_for(item, written, urgent=True)
        return written

    def start_journalled_write(self, item: T) -> PromisedWriteFuture:
        """Queue an item that must be durable as soon as possible and is not read back at once.

        If the writer is idle and the disk was fast the last time, the outcome is usually known on return: the event loop blocks for a
        moment, since its other work would delay the writer.
        """
        loop = asyncio.get_running_loop()
        promised = PromisedWriteFuture(loop=loop)
        self._promising = True
        at_once = self._asleep and self._quick
        self._queue_for(item, promised, urgent=True)
        if at_once and (bell := self._loops.get(loop)) is not None:
            bell.block_until_callback(PROMISE_GRACE_S)
        return promised

    def warm_up(self) -> None:
        """Prepare an idle sink for a promise that follows soon, but not in the same turn of the event loop."""
        if self._quick:
            asyncio.get_running_loop().call_soon(self._warm_up, self.commits)

    def _warm_up(self, commits: int) -> None:
        if self._asleep and self.commits == commits:
            self._rousing = True
            self._bell.set()

    def queue_awaitable(self, item: T) -> QueuedWrite:
        """Queue an item that need not be durable before its result is awaited."""
        kept = DurabilityFuture(loop=asyncio.get_running_loop())
        self._queue_for(item, kept, urgent=False)
        if kept.done():
            kept.exception()  # retrieved, since it need not be awaited
        return QueuedWrite(kept, self._request_flush)

    async def flush(self) -> None:
        """Return when all queued items are durable. If the writer refuses items, try again whether writing works.

        :raises LogUnavailable: if it does not
        """
        if self._refusal is None and not self.backlog:
            return
        await self._wait_for(_FLUSH)

    async def wait_for_promised_items(self) -> None:
        """Return when all promised items can be read.

        :raises LogUnavailable: if they cannot be written now
        """
        if self._unwritten:
            await self._wait_for(_FLUSH)

    async def wait_for_backlog(self, count: int) -> None:
        """Return when fewer than ``count`` items wait to be written, or at once while the writer refuses items.

        :raises LogUnavailable: if the writer is closed
        """
        if self.backlog < count or self._refusal is not None:
            return
        self._check_open()
        waiting: CallerFuture = asyncio.get_running_loop().create_future()
        self._low_water.append((count, waiting))
        self._urgent = True
        self._bell.set()
        if self._ended:
            self._resolve_and_count_lost()
        await waiting

    def close(self) -> None:
        """Write the queued items if possible, and end the thread. Blocks until then."""
        self._closing = True
        self._bell.set()
        self._thread.join()
        self._bell.close()
        for loop in list(self._loops):
            self._loops.pop(loop).close()

    def _wait_for(self, item: T | _FlushMarker) -> CallerFuture:
        waiting: CallerFuture = asyncio.get_running_loop().create_future()
        self._queue_for(item, waiting, urgent=True)
        return waiting

    def _queue_for(self, item: T | _FlushMarker, waiting: CallerFuture, *, urgent: bool) -> None:
        try:
            self._check_open()
        except LogUnavailable as closed:
            waiting.set_exception(closed)
            return
        loop = waiting.get_loop()
        bell = self._loops.get(loop) or self._get_loop_wakeup(loop)
        self._queue.append((item, waiting))
        if urgent:
            self._request_flush()
        else:  # a thread that is woken now would only compete with this one
            if not bell.looks:
                bell.looks = True
                loop.call_later(self._linger_s, self._wait_at_loop, bell)
        if self._ended:  # another thread has ended it meanwhile
            self._resolve_and_count_lost()

    def _get_loop_wakeup(self, loop: asyncio.AbstractEventLoop) -> EventLoopWakeup:
        for other, bell in list(self._loops.items()):
            if bell.is_closed:
                self._loops.pop(other, bell).close()
        bell = self._loops[loop] = EventLoopWakeup(loop)
        return bell

    def _wait_at_loop(self, bell: EventLoopWakeup) -> None:
        bell.looks = False
        if self.backlog:
            self._request_flush()

    def _request_flush(self) -> None:
        self._urgent = True
        self._bell.set()

    def _check_open(self) -> None:
        if self._closing:
            raise LogUnavailable(_CLOSED)

    # --- the writer's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            if not self._queue and not self._low_water:
                if self._closing:
                    break
                self._sleep()
                if not self._queue:
                    continue
            self._wait_to_fill_group()
            self._urgent = False
            closing = self._closing
            promising, self._promising = self._promising, False
            # Counted before they leave the queue, so that no moment shows fewer than there are.
            self._in_flight = min(len(self._queue), self._max_batch)
            batch = [self._queue.popleft() for _ in range(self._in_flight)]
            if promising and not closing and self._write_ahead(batch):
                self._queue.extendleft((item, _PROMISE) for item, _ in reversed(batch))
            elif batch:
                self._write_round(batch)
            self._in_flight = 0
            batch.clear()  # not kept alive while this thread sleeps
            self._notify_low_backlog()
            if closing and self._refusal is not None:
                self._resolve_and_count_lost()
        self._ended = True  # first, so that a caller who comes too late for the last round cleans up itself
        self._resolve_and_count_lost()
        self._sink.close()

    def _sleep(self) -> None:
        """Wait for a signal unless there is work."""
        self._asleep = True
        # Checked again after setting the flag, since earlier appends sent no signal.
        if not self._queue and not self._closing:
            self._bell.wait()
            rousing, self._rousing = self._rousing, False
            if rousing and not self._queue:
                self._sink.warm_up()  # the thread still counts as asleep, so a promise meanwhile may wait at once
        self._asleep = False

    def _wait_to_fill_group(self) -> None:
        """Wait for more items until a caller is waiting or the time is over."""
        while not self._urgent and not self._closing:  # a signal alone may come from a caller who was already served
            if not self._bell.wait_for(self._linger_s if self._refusal is None else self._retry_s):
                break

    def _write_round(self, batch: list[_Entry[T]]) -> None:
        full = len(batch) == self._max_batch
        self._keep_for_retry(self._write(batch))
        if self._refusal is not None and (full or self._sink_lost):
            self._fail_unreachable_callers(self._refusal)
        elif full:  # the rest may contain callers who signalled for this round
            self._urgent = True

    def _resolve_all_futures(self, waiting: list[CallerFuture], failure: str | None) -> None:
        """Resolve futures with one wake-up per event loop, from any thread."""
        loops: dict[asyncio.AbstractEventLoop, list[CallerFuture]] = {}
        for future in waiting:
            loops.setdefault(future.get_loop(), []).append(future)
        for loop, futures in loops.items():
            answer = partial(complete_durability_futures, futures, failure)
            if (bell := self._loops.get(loop)) is not None:
                bell.schedule(answer)
            else:
                with suppress(RuntimeError):  # that loop is closed, together with its callers
                    loop.call_soon_threadsafe(answer)

    def _write_ahead(self, batch: list[_Entry[T]]) -> bool:
        """Make a batch durable without writing it, if that is enough for all its callers."""
        new = [entry for entry in batch if entry[1] is not _PROMISE]
        waiting = _waiting_callers(new)
        if (
            self._refusal is not None
            or len(batch) > _MOST_PROMISED
            or not all(isinstance(future, (PromisedWriteFuture, DurabilityFuture)) for future in waiting)
            or not any(isinstance(future, PromisedWriteFuture) for future in waiting)
        ):
            return False
        began = monotonic()
        promised = self._sink.write_ahead([item for item, _ in new if not isinstance(item, _FlushMarker)])
        self._quick = promised and monotonic() - began < PROMISE_GRACE_S
        if not promised:
            return False
        self._unwritten = len(batch)  # before any future is resolved
        self.commits += len(waiting)
        self._resolve_all_futures(waiting, None)
        return True

    def _write(self, batch: list[_Entry[T]]) -> list[_Entry[T]]:
        """Write a batch, resolve its futures, and return the entries to retry."""
        items: list[T] = [item for item, _ in batch if not isinstance(item, _FlushMarker)]
        waiting = _waiting_callers(batch)
        try:
            if self._refusal is not None:
                self._sink.reopen()
            if items:
                self._sink.write(items)
                self.transactions += 1
        except SinkUnavailable as error:
            self._refusal = str(error) or "The log cannot be written."
            self._resolve_all_futures(waiting, self._refusal)
            self._sink_lost = isinstance(error, SinkPermanentlyLost)
            return _entries_to_retry(batch)
        except Exception as error:
            if len(batch) > 1 and batch[-1][1] is not _PROMISE:
                return self._write_singly(batch)
            self.lost += len(batch) - len(waiting)
            self._unwritten = 0
            self._resolve_all_futures(waiting, f"The record cannot be written: {type(error).__name__}: {error}")
            return []
        self._refusal = None
        self._unwritten = 0  # promised items come first, so they are written
        self.commits += len(waiting)
        self._resolve_all_futures(waiting, None)
        return []

    def _write_singly(self, batch: list[_Entry[T]]) -> list[_Entry[T]]:
        """Write the items one by one to isolate a faulty one. Promised items stay together."""
        promised = sum(waiter is _PROMISE for _, waiter in batch)
        begins = [0, *range(promised or 1, len(batch))]
        for begin, end in zip(begins, [*begins[1:], len(batch)], strict=True):
            kept = self._write(batch[begin:end])
            if self._refusal is not None:
                rest = batch[end:]
                self._resolve_all_futures(_waiting_callers(rest), self._refusal)
                return kept + _entries_to_retry(rest)
        return []

    def _keep_for_retry(self, kept: list[_Entry[T]]) -> None:
        queue = self._queue
        queue.extendleft(reversed(kept))
        first = sum(waiter is _PROMISE for _, waiter in kept)  # promised items stay
        # Waiting callers are never dropped: the next round, which their signal starts, answers them.
        while len(queue) > max(self._max_retained, first) and queue[first][1] is None and self._refusal is not None:
            del queue[first]
            self.lost += 1

    def _fail_unreachable_callers(self, refusal: str) -> None:
        """Fail the callers behind a full batch of retained items, which would never be reached. A lost sink retains nothing."""
        rest = [self._queue.popleft() for _ in range(len(self._queue))]
        kept = _entries_to_retry(rest)
        if self._sink_lost:
            self.lost += sum(waiter is None for _, waiter in kept)  # a successor writes promised items
        else:
            self._queue.extendleft(reversed(kept))
        self._resolve_all_futures(_waiting_callers(rest), refusal)

    def _notify_low_backlog(self) -> None:
        if not self._low_water:
            return
        reached: list[CallerFuture] = []
        for _ in range(len(self._low_water)):
            count, future = self._low_water.popleft()
            if self._refusal is not None or self._closing or len(self._queue) < count:
                reached.append(future)
            else:
                self._low_water.append((count, future))
                self._urgent = True
        self._resolve_all_futures(reached, None)

    def _resolve_and_count_lost(self) -> None:
        """Resolve all waiting futures and count the unwritten items at the end. Any thread may call it."""
        left, low_water = list(_drain_shared_queue(self._queue)), list(_drain_shared_queue(self._low_water))
        self.lost += sum(waiter is None for _, waiter in left)
        self._resolve_all_futures(_waiting_callers(left), _CLOSED)
        self._resolve_all_futures([future for _, future in low_water], _CLOSED if self._ended else None)


def _waiting_callers(batch: Sequence[_Entry[Any]]) -> list[CallerFuture]:
    return [waiter for _, waiter in batch if isinstance(waiter, asyncio.Future)]


def _entries_to_retry(batch: Sequence[_Entry[T]]) -> list[_Entry[T]]:
    """Return the entries of a failed batch to retry: those without a waiting caller."""
    return [entry for entry in batch if not isinstance(entry[1], asyncio.Future)]


def _drain_shared_queue(queue: deque[Q]) -> Iterator[Q]:
    """Yield each item to only one of several threads that drain a queue."""
    while True:
        try:
            yield queue.popleft()
        except IndexError:
            return
