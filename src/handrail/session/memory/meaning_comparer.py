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
from typing import TYPE_CHECKING, Any, Protocol

from handrail.catalog.embedders.embedder_protocol import EmbedderError, check_and_normalise_rows
from handrail.store.memory.knowledge_store import KnowledgeUnavailable

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder_protocol import Embedder

logger = logging.getLogger("handrail.session")

PATIENCE_S = 1.0
"""The maximum wait of a query for vectors, in seconds. After it, only words decide; a later query can use the vectors."""
_MOST_VECTORS = 20_000
_MOST_CHARACTERS = 1_000
"""The number of characters of a passage that are compared, from its beginning."""
_BATCH = 8
_MOST_PENDING = 2
_MOST_MISSING = 8
"""The number of vectors that a query makes itself. If more are missing, words decide, and the vectors are made afterwards."""
_PAUSE_S = 30.0
"""The pause after a failure of the model, in seconds."""

MakeEmbedder = Callable[[], "tuple[Embedder | None, str]"]
"""Makes the model at its first use, or returns why there is none."""


class PassageVectorCache(Protocol):
    """A store of the vectors of passages by number. Its methods are called in the comparer's thread."""

    def load_vectors(self, numbers: Sequence[int], model: str) -> dict[int, bytes]: ...

    def store_vectors(self, vectors: Mapping[int, bytes], model: str) -> None: ...


class EmbeddingComparer:
    """A comparer of texts by the vectors of a model, in one thread. Vectors stay in memory, unless a store is passed.

    :param make_embedder: makes the model
    :param patience_s: the maximum wait of a query, in seconds
    """

    def __init__(self, make_embedder: MakeEmbedder, *, patience_s: float = PATIENCE_S) -> None:
        self._make_embedder = make_embedder
        self.patience_s = patience_s
        self._embedder: Embedder | None = None
        self._why_none: str | None = None
        self._vectors: OrderedDict[bytes, Any] = OrderedDict()
        self._threads: ThreadPoolExecutor | None = None
        self._pending = 0
        self._rest_until = 0.0
        self._closed = threading.Event()

    async def compare(
        self, query: str, passages: Mapping[int, str], *, vectors: PassageVectorCache | None = None
    ) -> dict[int, float] | None:
        """Return the similarity of each passage to the query by number, from -1 to 1; None if it is not ready in time.

        :param vectors: stores the vectors of the passages. If many are missing, they are made for later queries
        """
        if self._why_none or not passages or self._pending >= _MOST_PENDING or time.monotonic() < self._rest_until:
            return None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "handrail-memory")
        self._pending += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._compare, query, dict(passages), vectors)
        work.add_done_callback(self._finish)
        try:
            return await asyncio.wait_for(asyncio.shield(work), self.patience_s)
        except (TimeoutError, EmbedderError):
            return None

    def _finish(self, work: asyncio.Future[Any]) -> None:
        self._pending -= 1
        if not work.cancelled() and (error := work.exception()) is not None:
            self._rest_until = time.monotonic() + _PAUSE_S
            logger.info("memory: the meaning of passages is not compared: %s", error)

    def _compare(
        self, query: str, passages: Mapping[int, str], vectors: PassageVectorCache | None
    ) -> dict[int, float] | None:
        if self._embedder is None:
            self._embedder, self._why_none = self._make_embedder()
        if self._embedder is None:
            return None
        if vectors is not None:
            if (known := self._load_stored(self._embedder, vectors, passages)) is None:
                return None
        else:
            known = dict(zip(passages, self._encode(self._embedder, [*passages.values()]), strict=True))
        (wanted,) = self._encode(self._embedder, [query])
        return {number: float(row @ wanted) for number, row in known.items()}

    def _load_stored(
        self, embedder: Embedder, vectors: PassageVectorCache, passages: Mapping[int, str]
    ) -> dict[int, Any] | None:
        """Return the stored vectors of passages, or None after many had to be made."""
        import numpy

        model = embedder.fingerprint
        stored = vectors.load_vectors([*passages], model)
        known = {number: numpy.frombuffer(row, numpy.float16).astype(numpy.float32) for number, row in stored.items()}
        if missing := [number for number in passages if number not in known]:
            if len(missing) > _MOST_MISSING:
                assert self._threads is not None
                self._threads.submit(self._make_missing, embedder, vectors, {n: passages[n] for n in missing})
                return None
            known |= self._make_missing(embedder, vectors, {number: passages[number] for number in missing})
        return known

    def _make_missing(
        self, embedder: Embedder, vectors: PassageVectorCache, passages: Mapping[int, str]
    ) -> dict[int, Any]:
        import numpy

        made = dict(zip(passages, self._encode(embedder, [*passages.values()]), strict=True))
        rows = {number: row.astype(numpy.float16).tobytes() for number, row in made.items()}
        try:
            vectors.store_vectors(rows, embedder.fingerprint)
        except KnowledgeUnavailable as error:
            logger.info("memory: vectors are not stored: %s", error)
        return made

    def _encode(self, embedder: Embedder, texts: Sequence[str]) -> list[Any]:
        texts = [text[:_MOST_CHARACTERS] or " " for text in texts]
        keys = [hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest() for text in texts]
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._vectors}
        every = list(missing.items())
        for start in range(0, len(every), _BATCH):
            if self._closed.is_set():
                raise EmbedderError("the kernel is closed")
            some = every[start : start + _BATCH]
            rows = check_and_normalise_rows(embedder.encode([text for _, text in some]), len(some))
            self._vectors.update((key, row) for (key, _), row in zip(some, rows, strict=True))
        found = [self._vectors[key] for key in keys]
        for key in keys:
            self._vectors.move_to_end(key)
        while len(self._vectors) > _MOST_VECTORS:
            self._vectors.popitem(last=False)
        return found

    def close(self) -> None:
        """End the thread after its current batch. If the process ended while the model computes, it would crash."""
        self._closed.set()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
