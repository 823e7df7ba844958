"""What one session has read: the content hash of each file, so that nothing unseen is written over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock


class SeenFiles:
    """Canonical path → sha256 (hex) of the content last read or written in this session. Safe from any thread.

    Content, not the time of change: two writes within one second that keep the size are still told apart.

    :param max_files: beyond it the file longest unused is forgotten, and has to be read again before an edit
    :param known: pairs of path and hash to begin with, the longest unused first
    :param keep: told each path and its new hash, None for one that is forgotten; it must not wait
    """

    def __init__(
        self,
        max_files: int = 65_536,
        *,
        known: Iterable[tuple[str, str]] = (),
        keep: Callable[[str, str | None], None] | None = None,
    ) -> None:
        self._max_files = max_files
        self._digests: OrderedDict[str, str] = OrderedDict(known)
        self._keep = keep
        self._lock = Lock()

    def note(self, path: str, sha256: str) -> None:
        with self._lock:
            if self._keep is not None and self._digests.get(path) != sha256:
                self._keep(path, sha256)
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
            if self._digests.pop(path, None) is not None and self._keep is not None:
                self._keep(path, None)
