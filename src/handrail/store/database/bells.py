"""Wake-up signals for a thread or an event loop from another thread, as fast as the platform can.

On Linux both wait on a counter of the kernel (eventfd). From rest that takes a third of the time of a released lock, and
half of that of the socket pair by which asyncio wakes its loops.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from time import monotonic
from typing import Protocol

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
