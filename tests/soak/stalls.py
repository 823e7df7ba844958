"""How long an event loop is held: measured as processor time of the process between two beats, and by whom."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
import traceback
from types import TracebackType

_BEAT_S = 0.001
_LOOK_S = 0.01
_NOTICED_S = 0.03
_WAITING = re.compile(r"work_queue\.get|acquire\(|eventfd_read|_selector|selector\.poll|\.wait\(")
"""The last line of a thread that has nothing to do."""


class StallWatch:
    """Measures the longest stall of the running event loop while it is open.

    The watch counts processor time, so a busy machine causes no stall. It counts that of the whole process: a native step
    in another thread holds the interpreter, and so the loop. A second thread records the stacks of the others when no beat
    has come for a while.
    """

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.stack = ""
        """What ran in the longest stall, as far as it was seen."""
        self._beats = 0
        self._seen = ""
        self._over = threading.Event()

    async def __aenter__(self) -> StallWatch:
        self._loop = asyncio.get_running_loop()
        self._at = time.process_time()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        self._beat()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.sleep(2 * _BEAT_S)  # one more beat: the last stall counts, too
        self._handle.cancel()
        self._over.set()
        await asyncio.to_thread(self._watcher.join)

    def _beat(self) -> None:
        now = time.process_time()
        held = (now - self._at) * 1000
        if held > self.longest_ms:
            self.longest_ms, self.stack = held, self._seen
        self._at = now
        self._seen = ""
        self._beats += 1
        self._handle = self._loop.call_later(_BEAT_S, self._beat)

    def _watch(self) -> None:
        last, since = self._beats, time.monotonic()
        while not self._over.wait(_LOOK_S):
            if self._beats != last:
                last, since = self._beats, time.monotonic()
            elif time.monotonic() - since > _NOTICED_S:
                frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - there is no other way
                own = threading.get_ident()
                stacks = (traceback.format_stack(frame)[-6:] for of, frame in frames.items() if of != own)
                self._seen = "\n".join("".join(stack) for stack in stacks if not _WAITING.search(stack[-1]))
