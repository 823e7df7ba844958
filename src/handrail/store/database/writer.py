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

COUNTERS = sys.platform == "linux"


class Bell(Protocol):
    """For the one thread that waits at it. A ring that nobody waits for is kept; several are one."""

    def ring(self) -> None:
        """From any thread, also after :meth:`close`."""
        ...

    def wait(self) -> None:
        """Return when it was rung since the last wait."""
        ...

    def wait_for(self, seconds: float) -> bool:
        """The same with an end. Gives whether it was rung."""
        ...

    def close(self) -> None:
        """Nobody waits any more."""
        ...


def new_bell() -> Bell:
    with suppress(OSError):  # too many are open: it does without
        if COUNTERS:
            return _CounterBell()
    return _LockBell()


class _CounterBell:
    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._closing = threading.Lock()
        """Held while the descriptor is used from other threads: its number is another's once it is closed."""
        self._rung = False

    def ring(self) -> None:
        if not self._rung:  # it is taken back before whoever waited looks at anything
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


class _LockBell:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # it is ringing already
            pass

    def wait(self) -> None:
        self._lock.acquire()

    def wait_for(self, seconds: float) -> bool:
        return self._lock.acquire(timeout=seconds)

    def close(self) -> None:
        pass


class LoopBell:
    """Has an event loop call things. Made in the loop's own thread, rung from any other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.looks = False
        """Whether whoever has it has the loop look after something soon."""
        self._waiting: deque[Callable[[], object]] = deque()
        self._closing = threading.Lock()
        self._descriptor = -1
        if COUNTERS:
            self._poll = select.poll()
            with suppress(OSError):
                self._wait_at(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def _wait_at(self, descriptor: int) -> None:
        try:
            # In a context of its own: a copy of the caller's would keep alive whatever is in it.
            Context().run(self._loop.add_reader, descriptor, self._rung)
        except Exception:  # a loop of another kind, which waits for no descriptors
            os.close(descriptor)
        else:
            self._descriptor = descriptor
            self._poll.register(descriptor, select.POLLIN)

    @property
    def gone(self) -> bool:
        """Whether nothing is called any more."""
        return self._loop.is_closed()

    def call(self, callback: Callable[[], object]) -> None:
        """Have the loop call it, after what it was to call before; not at all where the loop is closed."""
        self._waiting.append(callback)
        with self._closing:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)
                return
        self._call_soon(self._call_all)

    def wait_for(self, seconds: float) -> None:
        """Have the loop stand still until there is something to call, and call it. In the loop's own thread; not at all where
        that waits for no descriptors."""
        until = monotonic() + seconds
        while self._descriptor >= 0 and self._poll.poll(max(until - monotonic(), 0) * 1000):
            called = bool(self._waiting)  # a ring may be for what was called by the one before it
            self._rung()
            if called:
                break

    def close(self) -> None:
        """From any thread. What it has still to call is called."""
        if self._descriptor >= 0 and not self._call_soon(self._close):
            self._close_descriptor()

    def _rung(self) -> None:
        with suppress(BlockingIOError):  # the loop has stood still for it since it saw it
            os.eventfd_read(self._descriptor)
        self._call_all()

    def _call_all(self) -> None:
        while self._waiting:
            self._waiting.popleft()()

    def _close(self) -> None:
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            self._close_descriptor()
        self._call_all()

    def _close_descriptor(self) -> None:
        with self._closing:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _call_soon(self, callback: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # it is closed, and whoever waited in it with it
            return False
        return True


# Futures of queued items: a caller waits until an item is durable, or can be read as well.

Waiting = asyncio.Future[None]


class Kept(asyncio.Future[None]):
    """Tells whether an item became durable, for somebody who does not read it back."""


class Written(asyncio.Future[None]):
    """Tells whether an item became durable. Whoever awaits it goes on only once that is known: a cancellation of their task
    is raised then, and not before."""

    def cancel(self, msg: object = None) -> bool:
        """Refused: the item is with the writer, and what becomes of it has to be known."""
        return False


class Promised(Written):
    """As :class:`Written`, for an item that has to be durable as soon as can be, and may be read a moment later."""


class Taken:
    """An item that has its place in the queue, and will be written with its neighbours soon. Whoever awaits it, as often as
    they like, hurries it along and goes on once it and everything before it is durable.

    :raises LogUnavailable: when awaited, where it could not be written; it will not be written later
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
    def durable(self) -> bool:
        """Whether it is known to be."""
        return self._written.done() and self._written.exception() is None

    def written(self) -> asyncio.Future[None]:
        """Hurry it along, and give what tells that it is durable."""
        if not self._written.done():
            self._hurry()
        return asyncio.shield(self._written)

    def __await__(self) -> Generator[Any, None, None]:
        return self.written().__await__()


def settle(futures: Sequence[asyncio.Future[Any]], failure: str | None) -> None:
    """Answer callers, in their own loop's thread."""
    for future in futures:
        if not future.done():
            if failure is None:
                future.set_result(None)
            else:
                future.set_exception(LogUnavailable(failure))
                if isinstance(future, Kept):
                    future.exception()  # seen: nobody has to await it


# The sink that the writer writes to, and the errors by which it refuses.

T_contra = TypeVar("T_contra", contravariant=True)


class SinkUnavailable(Exception):
    """The sink as a whole cannot take anything now (full disk, read-only, damaged); the text says why."""


class SinkLost(SinkUnavailable):
    """The sink will never take anything again from this process; what waits for it is dropped."""


class Sink(Protocol[T_contra]):
    """Where groups go. Used by the writer's thread only."""

    def promise(self, batch: Sequence[T_contra]) -> bool:
        """Make a batch durable in a quicker way, before it is written. It is given to :meth:`write` soon, as the first of a
        group and behind what was promised before; if that never happens, whoever opens the sink next writes it.

        Raises nothing: False where it cannot be, and then nothing is promised
        """
        ...

    def rouse(self) -> None:
        """A promise may be asked for soon: do what can be done for it. Raises nothing."""
        ...

    def write(self, batch: Sequence[T_contra]) -> None:
        """Make the whole batch durable, or none of it.

        :raises SinkUnavailable: for a failure that no other batch would escape. Any other exception is taken
            for a fault of an item, and the batch is tried again item by item
        """
        ...

    def reopen(self) -> None:
        """After :class:`SinkUnavailable`: begin anew, and prove that writing works.

        :raises SinkUnavailable: when it does not
        """
        ...

    def close(self) -> None: ...


T = TypeVar("T")
Q = TypeVar("Q")


class _Flush:
    """Stands in the queue for a caller who waits for what is before it."""


class _Promise:
    """Stands in the place of a caller who went on when an item was promised."""


_FLUSH = _Flush()
_PROMISE = _Promise()
_CLOSED = "the log is closed: the kernel has been shut down"
MOMENT_S = 0.001
"""For how long an event loop may stand still for a promise."""
_MOST_PROMISED = 256
"""Items that are durable and not written yet."""
_Entry = tuple[T | _Flush, Waiting | _Promise | None]


class Writer(Generic[T]):
    """Takes items from any thread and writes them in order, a group at a time.

    After a failure nothing is lost and nothing pretends: who waits for durability is told, what was only
    appended is kept (at most ``max_retained`` items; what had to be let go is counted in :attr:`lost`) and is
    tried again every ``retry_s`` seconds and with every commit. After :class:`SinkLost` nothing is kept.

    :param linger_s: how long items that nobody waits for may gather before they are written
    """

    def __init__(
        self,
        sink: Sink[T],
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
        self._bell = new_bell()
        self._loops: dict[asyncio.AbstractEventLoop, LoopBell] = {}
        """Of callers."""
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
        self._low_water: deque[tuple[int, Waiting]] = deque()
        self.transactions = 0
        """Groups made durable."""
        self.commits = 0
        """Callers who waited for durability and got it."""
        self.lost = 0
        """Appended items that could never be written."""
        self._thread = threading.Thread(target=self._run, name="handrail-writer", daemon=True)
        self._thread.start()

    @property
    def refusal(self) -> str | None:
        """Why nothing can be written at the moment, or None."""
        return _CLOSED if self._closing else self._refusal

    @property
    def backlog(self) -> int:
        """Items taken and not yet durable."""
        return len(self._queue) + self._in_flight

    def takes(self, backlog: int) -> bool:
        """Whether nothing is refused now and fewer than ``backlog`` items are taken and not yet durable."""
        return self._refusal is None and len(self._queue) + self._in_flight < backlog and not self._closing

    def append(self, item: T) -> None:
        """Take an item that nobody waits for. Never blocks, never raises; after :meth:`close` it counts as lost."""
        if self._closing:
            self.lost += 1
            return
        self._queue.append((item, None))
        if self._asleep:
            self._bell.ring()
        if self._ended:
            self._give_up()

    async def commit(self, item: T) -> None:
        """Take an item, and return when it and everything before it is durable and can be read.

        Cancelling the wait does not take the item back.

        :raises LogUnavailable: when it could not be written; it will not be written later
        """
        await self._wait_for(item)

    def begin(self, item: T) -> Written:
        """The first half of :meth:`commit`, for callers who may not go on before they know what became of it."""
        written = Written(loop=asyncio.get_running_loop())
        self._queue_for(item, written, urgent=True)
        return written

    def promise(self, item: T) -> Promised:
        """As :meth:`begin`, for who needs it durable as soon as can be and does not read it back at once.

        Where nobody else is at it and the disk was quick the last time, it is mostly known on return: the event loop stands
        still for a moment, since what it would do meanwhile holds the writer up.
        """
        loop = asyncio.get_running_loop()
        promised = Promised(loop=loop)
        self._promising = True
        at_once = self._asleep and self._quick
        self._queue_for(item, promised, urgent=True)
        if at_once and (bell := self._loops.get(loop)) is not None:
            bell.wait_for(MOMENT_S)
        return promised

    def rouse(self) -> None:
        """A promise may follow soon: have the sink ready by then, where nobody is at it. Not if it follows in this very turn of
        the event loop."""
        if self._quick:
            asyncio.get_running_loop().call_soon(self._rouse, self.commits)

    def _rouse(self, commits: int) -> None:
        if self._asleep and self.commits == commits:
            self._rousing = True
            self._bell.ring()

    def take(self, item: T) -> Taken:
        """Take an item now that need not be durable before somebody awaits it."""
        kept = Kept(loop=asyncio.get_running_loop())
        self._queue_for(item, kept, urgent=False)
        if kept.done():
            kept.exception()  # seen: nobody has to await it
        return Taken(kept, self._hurry)

    async def flush(self) -> None:
        """Return when everything taken so far is durable; while refusing, try whether writing works again.

        :raises LogUnavailable: when it does not
        """
        if self._refusal is None and not self.backlog:
            return
        await self._wait_for(_FLUSH)

    async def written(self) -> None:
        """Return when all that was promised can be read.

        :raises LogUnavailable: when it cannot be written now
        """
        if self._unwritten:
            await self._wait_for(_FLUSH)

    async def backlog_below(self, count: int) -> None:
        """Return when fewer than ``count`` items wait to be written, or at once while the writer refuses.

        :raises LogUnavailable: when the writer is closed
        """
        if self.backlog < count or self._refusal is not None:
            return
        self._check_open()
        waiting: Waiting = asyncio.get_running_loop().create_future()
        self._low_water.append((count, waiting))
        self._urgent = True
        self._bell.ring()
        if self._ended:
            self._give_up()
        await waiting

    def close(self) -> None:
        """Write what is left, if that is possible, and end the thread. Blocks for as long as that takes."""
        self._closing = True
        self._bell.ring()
        self._thread.join()
        self._bell.close()
        for loop in list(self._loops):
            self._loops.pop(loop).close()

    def _wait_for(self, item: T | _Flush) -> Waiting:
        waiting: Waiting = asyncio.get_running_loop().create_future()
        self._queue_for(item, waiting, urgent=True)
        return waiting

    def _queue_for(self, item: T | _Flush, waiting: Waiting, *, urgent: bool) -> None:
        try:
            self._check_open()
        except LogUnavailable as closed:
            waiting.set_exception(closed)
            return
        loop = waiting.get_loop()
        bell = self._loops.get(loop) or self._know(loop)
        self._queue.append((item, waiting))
        if urgent:
            self._hurry()
        else:  # woken now, the thread would only take turns with this one until it is hurried
            if not bell.looks:
                bell.looks = True
                loop.call_later(self._linger_s, self._look, bell)
        if self._ended:  # by another thread, since it was looked at
            self._give_up()

    def _know(self, loop: asyncio.AbstractEventLoop) -> LoopBell:
        for other, bell in list(self._loops.items()):
            if bell.gone:
                self._loops.pop(other, bell).close()
        bell = self._loops[loop] = LoopBell(loop)
        return bell

    def _look(self, bell: LoopBell) -> None:
        bell.looks = False
        if self.backlog:
            self._hurry()

    def _hurry(self) -> None:
        self._urgent = True
        self._bell.ring()

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
            self._linger()
            self._urgent = False
            closing = self._closing
            promising, self._promising = self._promising, False
            # Counted before they leave the queue, so that no moment shows fewer than there are.
            self._in_flight = min(len(self._queue), self._max_batch)
            batch = [self._queue.popleft() for _ in range(self._in_flight)]
            if promising and not closing and self._promised(batch):
                self._queue.extendleft((item, _PROMISE) for item, _ in reversed(batch))
            elif batch:
                self._write_round(batch)
            self._in_flight = 0
            batch.clear()  # not kept alive while this thread sleeps
            self._tell_low_water()
            if closing and self._refusal is not None:
                self._give_up()
        self._ended = True  # first: who comes too late for this last look finds it so, and looks after itself
        self._give_up()
        self._sink.close()

    def _sleep(self) -> None:
        """Wait for a ring, unless there is something to do."""
        self._asleep = True
        # Looked at again after saying so: whoever appended before did not ring.
        if not self._queue and not self._closing:
            self._bell.wait()
            rousing, self._rousing = self._rousing, False
            if rousing and not self._queue:
                self._sink.rouse()  # and whoever promises something meanwhile finds nobody else at it
        self._asleep = False

    def _linger(self) -> None:
        """Wait for more to write together, until somebody is in a hurry or it has been long enough."""
        while not self._urgent and not self._closing:  # a ring alone may be of somebody who was served already
            if not self._bell.wait_for(self._linger_s if self._refusal is None else self._retry_s):
                break

    def _write_round(self, batch: list[_Entry[T]]) -> None:
        full = len(batch) == self._max_batch
        self._retain(self._write(batch))
        if self._refusal is not None and (full or self._sink_lost):
            self._refuse_rest(self._refusal)
        elif full:  # what is left may hold callers who rang for this round
            self._urgent = True

    def _settle_all(self, waiting: list[Waiting], failure: str | None) -> None:
        """Answer the callers: one wake-up per event loop, not one per caller. From any thread."""
        loops: dict[asyncio.AbstractEventLoop, list[Waiting]] = {}
        for future in waiting:
            loops.setdefault(future.get_loop(), []).append(future)
        for loop, futures in loops.items():
            answer = partial(settle, futures, failure)
            if (bell := self._loops.get(loop)) is not None:
                bell.call(answer)
            else:
                with suppress(RuntimeError):  # that loop has been closed, and its callers with it
                    loop.call_soon_threadsafe(answer)

    def _promised(self, batch: list[_Entry[T]]) -> bool:
        """Make a batch durable without writing it, if that is enough for everybody who waits for it."""
        new = [entry for entry in batch if entry[1] is not _PROMISE]
        waiting = _callers(new)
        if (
            self._refusal is not None
            or len(batch) > _MOST_PROMISED
            or not all(isinstance(future, (Promised, Kept)) for future in waiting)
            or not any(isinstance(future, Promised) for future in waiting)
        ):
            return False
        began = monotonic()
        promised = self._sink.promise([item for item, _ in new if not isinstance(item, _Flush)])
        self._quick = promised and monotonic() - began < MOMENT_S
        if not promised:
            return False
        self._unwritten = len(batch)  # before anybody is told
        self.commits += len(waiting)
        self._settle_all(waiting, None)
        return True

    def _write(self, batch: list[_Entry[T]]) -> list[_Entry[T]]:
        """Write a batch, answer its callers, and return what is to be kept for another try."""
        items: list[T] = [item for item, _ in batch if not isinstance(item, _Flush)]
        waiting = _callers(batch)
        try:
            if self._refusal is not None:
                self._sink.reopen()
            if items:
                self._sink.write(items)
                self.transactions += 1
        except SinkUnavailable as error:
            self._refusal = str(error) or "the log cannot be written"
            self._settle_all(waiting, self._refusal)
            self._sink_lost = isinstance(error, SinkLost)
            return _left(batch)
        except Exception as error:
            if len(batch) > 1 and batch[-1][1] is not _PROMISE:
                return self._write_singly(batch)
            self.lost += len(batch) - len(waiting)
            self._unwritten = 0
            self._settle_all(waiting, f"the record cannot be written: {type(error).__name__}: {error}")
            return []
        self._refusal = None
        self._unwritten = 0  # it stands in front
        self.commits += len(waiting)
        self._settle_all(waiting, None)
        return []

    def _write_singly(self, batch: list[_Entry[T]]) -> list[_Entry[T]]:
        """One item is faulty: find it, so that it takes none of its neighbours with it. What was promised stays together."""
        promised = sum(waiter is _PROMISE for _, waiter in batch)
        begins = [0, *range(promised or 1, len(batch))]
        for begin, end in zip(begins, [*begins[1:], len(batch)], strict=True):
            kept = self._write(batch[begin:end])
            if self._refusal is not None:
                rest = batch[end:]
                self._settle_all(_callers(rest), self._refusal)
                return kept + _left(rest)
        return []

    def _retain(self, kept: list[_Entry[T]]) -> None:
        queue = self._queue
        queue.extendleft(reversed(kept))
        first = sum(waiter is _PROMISE for _, waiter in kept)  # what was promised stays
        # Callers who wait are never dropped: the next round, which their ring starts, answers them.
        while len(queue) > max(self._max_retained, first) and queue[first][1] is None and self._refusal is not None:
            del queue[first]
            self.lost += 1

    def _refuse_rest(self, refusal: str) -> None:
        """Callers behind more than a batch of what is kept would never be reached; for a lost sink nothing is kept."""
        rest = [self._queue.popleft() for _ in range(len(self._queue))]
        kept = _left(rest)
        if self._sink_lost:
            self.lost += sum(waiter is None for _, waiter in kept)  # what was promised, a successor writes
        else:
            self._queue.extendleft(reversed(kept))
        self._settle_all(_callers(rest), refusal)

    def _tell_low_water(self) -> None:
        if not self._low_water:
            return
        reached: list[Waiting] = []
        for _ in range(len(self._low_water)):
            count, future = self._low_water.popleft()
            if self._refusal is not None or self._closing or len(self._queue) < count:
                reached.append(future)
            else:
                self._low_water.append((count, future))
                self._urgent = True
        self._settle_all(reached, None)

    def _give_up(self) -> None:
        """At the end: whoever still waits is told, whatever could not be written is counted. Any thread may come here."""
        left, low_water = list(_emptied(self._queue)), list(_emptied(self._low_water))
        self.lost += sum(waiter is None for _, waiter in left)
        self._settle_all(_callers(left), "the log is closed")
        self._settle_all([future for _, future in low_water], "the log is closed" if self._ended else None)


def _callers(batch: Sequence[_Entry[Any]]) -> list[Waiting]:
    """Those who wait for entries of a batch."""
    return [waiter for _, waiter in batch if isinstance(waiter, asyncio.Future)]


def _left(batch: Sequence[_Entry[T]]) -> list[_Entry[T]]:
    """What is kept for another try of a batch that could not be written: all that nobody waits for any more."""
    return [entry for entry in batch if not isinstance(entry[1], asyncio.Future)]


def _emptied(queue: deque[Q]) -> Iterator[Q]:
    """Each item to one of several threads that empty it."""
    while True:
        try:
            yield queue.popleft()
        except IndexError:
            return
