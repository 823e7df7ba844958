"""The comparison of a query's meaning with that of passages, by a model on this machine if one is installed."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from handrail.catalog.embedders.embedder_protocol import EmbedderError, normalize_rows

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder_protocol import Embedder

logger = logging.getLogger("handrail.session")

PATIENCE_S = 1.0
"""How long a query waits for vectors. Afterwards words alone decide, and the vectors are ready for a later query."""
_MOST_VECTORS = 20_000
_MOST_CHARACTERS = 1_000
"""The beginning of a passage that is compared."""
_BATCH = 8
_MOST_PENDING = 2
_PAUSE_S = 30.0
"""The pause after a failure of the model."""

MakeEmbedder = Callable[[], "tuple[Embedder | None, str]"]
"""Makes the model at its first use, or returns why there is none."""


class MeaningComparer:
    """Compares texts by the vectors of a model, in one thread. The vectors are only in memory.

    :param make_embedder: makes the model
    :param patience_s: the maximum wait of a query
    """

    def __init__(self, make_embedder: MakeEmbedder, *, patience_s: float = PATIENCE_S) -> None:
        self._make_embedder = make_embedder
        self._patience_s = patience_s
        self._embedder: Embedder | None = None
        self._why_none: str | None = None
        self._vectors: OrderedDict[bytes, Any] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._pending = 0
        self._rest_until = 0.0
        self._closed = threading.Event()

    async def compare(self, query: str, passages: Mapping[int, str]) -> dict[int, float] | None:
        """Return the similarity of each passage to the query by number, from -1 to 1; None if it is not ready in time."""
        if self._why_none or not passages or self._pending >= _MOST_PENDING or time.monotonic() < self._rest_until:
            return None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "handrail-memory")
        self._pending += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._compare, query, dict(passages))
        work.add_done_callback(self._finish)
        try:
            return await asyncio.wait_for(asyncio.shield(work), self._patience_s)
        except (TimeoutError, EmbedderError):
            return None

    def _finish(self, work: asyncio.Future[Any]) -> None:
        self._pending -= 1
        if not work.cancelled() and (error := work.exception()) is not None:
            self._rest_until = time.monotonic() + _PAUSE_S
            logger.info("memory: the meaning of passages is not compared: %s", error)

    def _compare(self, query: str, passages: Mapping[int, str]) -> dict[int, float] | None:
        if self._embedder is None:
            self._embedder, self._why_none = self._make_embedder()
        if self._embedder is None:
            return None
        texts = [query, *passages.values()]
        rows = self._encode(self._embedder, [text[:_MOST_CHARACTERS] or " " for text in texts])
        similar = [float(row @ rows[0]) for row in rows[1:]]
        return dict(zip(passages, similar, strict=True))

    def _encode(self, embedder: Embedder, texts: Sequence[str]) -> list[Any]:
        keys = [hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest() for text in texts]
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._vectors}
        every = list(missing.items())
        for start in range(0, len(every), _BATCH):
            if self._closed.is_set():
                raise EmbedderError("the kernel is closed")
            some = every[start : start + _BATCH]
            rows = normalize_rows(embedder.encode([text for _, text in some]), len(some))
            self._vectors.update((key, row) for (key, _), row in zip(some, rows, strict=True))
        found = [self._vectors[key] for key in keys]
        for key in keys:
            self._vectors.move_to_end(key)
        while len(self._vectors) > _MOST_VECTORS:
            self._vectors.popitem(last=False)
        return found

    def close(self) -> None:
        """End the thread after its current batch. A model that works when the process ends would crash it."""
        self._closed.set()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
