"""What one session has read: the content hash of each file, so that nothing unseen is written over."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock


class SeenFiles:
    """Canonical path → sha256 (hex) of the content last read or written in this session. Safe from any thread.

    Content, not the time of change: two writes within one second that keep the size are still told apart.

    :param max_files: beyond it the file longest unused is forgotten, and has to be read again before an edit
    """

    def __init__(self, max_files: int = 65_536) -> None:
        self._max_files = max_files
        self._digests: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()

    def note(self, path: str, sha256: str) -> None:
        with self._lock:
            self._digests[path] = sha256
            self._digests.move_to_end(path)
            while len(self._digests) > self._max_files:
                self._digests.popitem(last=False)

    def digest(self, path: str) -> str | None:
        """The hash noted for a canonical path, or None if this session never saw it."""
        with self._lock:
            return self._digests.get(path)

    def forget(self, path: str) -> None:
        with self._lock:
            self._digests.pop(path, None)
