"""Measure how long an event loop is blocked, as processor time, and by which code."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import Any

_LOOK_S = 0.01
_NOTICED_S = 0.02
_LETS_OTHERS_RUN = frozenset(
    {"_hashlib", "_io", "_socket", "_ssl", "fcntl", "posix", "select", "sqlite3", "time", "zlib"}
)
"""Modules whose native steps give the interpreter up meanwhile."""


class StallWatch:
    """Measures the longest stall of the running event loop while it is open.

    Two things hold a loop: a callback of its own, and a native step in another thread, which holds the interpreter. Of
    another thread a step is what it does between two calls or returns; only threads that were started after
    :func:`watch_threads` are seen.

    :ivar longest_ms: the most processor time of one thread within one callback, or within one native step
    """

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.stack = ""
        """What ran in the longest stall, as far as it was seen."""
        self._begun: float | None = None
        self._seen = ""
        self._over = threading.Event()

    async def __aenter__(self) -> StallWatch:
        if not gc.get_freeze_count():
            gc.collect()
            gc.freeze()  # what the tests themselves have made is not looked through meanwhile
        self._thread = threading.get_ident()
        self._run: Any = asyncio.Handle._run  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
        asyncio.Handle._run = self._timed  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        _open.append(self)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        await asyncio.sleep(0)  # from here on in a callback that is timed
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.sleep(0)  # the last stall counts, too
        asyncio.Handle._run = self._run  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        _open.remove(self)
        self._over.set()
        await asyncio.to_thread(self._watcher.join)

    @property
    def _timed(self) -> Any:
        def timed(handle: asyncio.Handle) -> None:
            if threading.get_ident() != self._thread:
                self._run(handle)
                return
            self._seen, self._begun, begun = "", time.monotonic(), time.thread_time()
            self._run(handle)
            held, self._begun = (time.thread_time() - begun) * 1000, None
            if held > self.longest_ms:
                self.longest_ms, self.stack = held, self._seen

        return timed

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            if (begun := self._begun) is not None and time.monotonic() - begun > _NOTICED_S:
                self._seen = _shown(sys._current_frames().get(self._thread))  # pyright: ignore[reportPrivateUsage]

    def stepped(self, held_ms: float, frame: FrameType, step: str) -> None:
        """Take note of a step of another thread."""
        if held_ms > self.longest_ms:
            self.longest_ms, self.stack = held_ms, f"{_shown(frame)}in a thread, {step}"


_open: list[StallWatch] = []
_last = threading.local()


def watch_threads() -> None:
    """Have the steps of threads that are started from now on measured, for every watch that is open then."""
    threading.setprofile(_stepped)


def _stepped(frame: FrameType, event: str, argument: Any) -> None:
    begun, now = getattr(_last, "at", None), time.thread_time()
    if begun is not None and _open and now - begun > _NOTICED_S and not (event == "c_return" and _lets_run(argument)):
        for watch in _open:
            watch.stepped((now - begun) * 1000, frame, f"{event} {argument!r:.100}")
    _last.at = time.thread_time()


def _lets_run(native: Any) -> bool:
    owner = getattr(native, "__module__", None) or type(getattr(native, "__self__", None)).__module__
    return owner in _LETS_OTHERS_RUN


def _shown(frame: FrameType | None) -> str:
    return "" if frame is None else "".join(traceback.format_stack(frame)[-7:])
