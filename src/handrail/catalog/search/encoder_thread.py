"""The encoder thread: it encodes requests first, then tools without a vector.

A search waits for the vectors of its request for a bounded time. It does not wait at all while an earlier call blocks the
embedder, and then searches by words. So a model that is still loading, or an endpoint that hangs, delays no search.

If an embedder refuses texts (:class:`~handrail.catalog.embedders.embedder_protocol.EmbeddingTextsRejected`), it gets them one by one and
shortened. Texts that it still refuses are excluded, and found by words. Only a complete failure turns semantic search off.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from handrail.catalog.embedders.embedder_protocol import (
    AdaptiveEmbedder,
    Embedder,
    EmbedderError,
    EmbeddingTextsRejected,
    MonolingualEmbedder,
    check_and_normalise_rows,
)
from handrail.catalog.search.cache import SearchCache, hash_text
from handrail.catalog.search.vector_index import BACKGROUND_REQUESTS, BACKGROUND_TOOLS
from handrail.catalog.search.word_analysis import remove_filler_words
from handrail.contract.struct import Struct, field

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder_protocol import Vectors

_BATCH_SIZE = 16
"""The number of texts to encode between two checks for a request."""

BACKGROUND_TEXTS = {
    "requests": BACKGROUND_REQUESTS,
    "told": tuple(map(remove_filler_words, BACKGROUND_REQUESTS)),
    "tools": BACKGROUND_TOOLS,
}
"""The texts to encode before all others."""

_TELLING_WEIGHT = 0.25
"""The weight of a request's telling words against its full text, because chatter around a need has no direction."""

_REMEMBERED = 512
"""The number of request texts whose vectors stay in memory."""

_PAUSE_S = 30.0
"""The pause after a failure of the embedder, in seconds."""

_SHORTEST = 300
"""The minimum characters of a refused text that is shortened."""

_SAVE_EVERY_S = 60.0

HANGS_S = 25.0
"""The time after which the shutdown does not wait for a batch. A model on this machine is faster even under load."""

ProgressCallback = Callable[[int, int], None]
"""A callback with the number of encoded texts and of all texts."""


class _QueryTexts(Struct):
    texts: tuple[str, ...]
    answered: threading.Event = field(default_factory=threading.Event)
    vectors: dict[str, Any] | None = None
    given_up: bool = False


class VectorConsumer(Protocol):
    """A consumer of vectors of texts. All methods are called in the encoder's thread."""

    def texts_to_encode(self) -> Mapping[bytes, str]:
        """Return the texts by key. Called once."""
        ...

    def accept_vectors(self, known: Mapping[bytes, Any]) -> None:
        """Accept vectors: those that are known at the start if they are many, and all at the end."""


class _PendingRequest:
    """The remaining work for one consumer, while the consumer exists."""

    def __init__(self, consumer: VectorConsumer) -> None:
        self._of = weakref.ref(consumer)
        self.texts: Mapping[bytes, str] | None = None
        self.missing: list[bytes] = []
        """Keys without a vector, those of short texts last."""

    @property
    def request(self) -> VectorConsumer | None:
        return self._of()


class EncoderThread:
    """Runs one embedder in its own thread, which starts with the first work.

    :param cache: stores vectors between two starts
    :param progress: called with the progress of the encoding
    :param hangs_s: the time after which :meth:`close` does not wait for a batch. A thread that computes in this process can crash
        it at exit. A thread that waits for a remote answer can be left alone
    """

    def __init__(
        self,
        embedder: Embedder,
        cache: SearchCache | None = None,
        progress: ProgressCallback | None = None,
        *,
        hangs_s: float = HANGS_S,
    ) -> None:
        self._embedder, self._cache, self._progress, self._hangs_s = embedder, cache, progress, hangs_s
        self._change = threading.Condition()
        self._queries: deque[_QueryTexts] = deque()
        self._requests: list[_PendingRequest] = []
        self._known: dict[bytes, Any] = {}
        """The vectors that are needed now; without a cache, all vectors."""
        self._new: dict[bytes, Any] = {}
        """The known vectors that are not stored yet."""
        self._saved_at = time.monotonic()
        self._recent: OrderedDict[str, Any] = OrderedDict()
        self._excluded: set[bytes] = set()
        """Keys of texts that the embedder refuses at any length."""
        self._alone = 0
        """The number of tools to encode one by one next, because their texts were refused together."""
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None
        self._rest_until = 0.0
        self._closed = False
        self._usual: dict[str, Any] = {}
        """The vectors of typical texts, by the kinds of ``BACKGROUND_TEXTS``."""
        self.state = "not started"
        """Why semantic search is not ready, or not for all tools, as text for people; empty if it is ready."""

    def encode_in_background(self, consumer: VectorConsumer) -> None:
        """Encode the texts of ``consumer`` in the background. The smallest set comes first.

        The work is dropped when nothing refers to ``consumer`` any more.
        """
        with self._change:
            self._requests.append(_PendingRequest(consumer))
            self._start()
            self._change.notify_all()

    def encode_query(self, texts: Sequence[str], patience_s: float) -> list[Vectors] | None:
        """Return the directions of the texts of a request, or None if they are not ready in time."""
        with self._change:
            known = {text: self._recent[text] for text in texts if text in self._recent}
            if len(known) == len(set(texts)):
                return [known[text] for text in texts]
            now = time.monotonic()
            stuck = self._busy_since is not None and now - self._busy_since > patience_s
            if self._closed or stuck or now < self._rest_until:
                return None
            asked = _QueryTexts(tuple(dict.fromkeys(texts)))
            self._queries.append(asked)
            self._start()
            self._change.notify_all()
        asked.answered.wait(patience_s)
        with self._change:
            asked.given_up = True
            if asked.vectors is None:
                return None
            return [asked.vectors[text] for text in texts]

    @property
    def language(self) -> str:
        """The only language that the embedder reads; empty if unknown."""
        return self._embedder.language if isinstance(self._embedder, MonolingualEmbedder) else ""

    @property
    def excluded_tools_description(self) -> str:
        """A text about the tools that are only found by words, because the embedder rejects their texts.

        It is empty if there are none.
        """
        number = len(self._excluded)
        several = "1 tool is" if number == 1 else f"{number} tools are"
        return f"{several} searched by words only, because the embedder rejects their texts" if number else ""

    def is_text_excluded(self, key: bytes) -> bool:
        """Return whether the embedder refuses the text of this key at any length; only for use on its thread."""
        return key in self._excluded

    def reference_tool_vectors(self) -> Vectors:
        """Return the vectors of typical texts of tools; only for use on its thread."""
        return self._usual["tools"]

    def compute_common_tool_vectors(self) -> Vectors:
        """Return the vectors of common tools; only for use on its thread.

        There are many for the local model. For others, they are the vectors of :meth:`reference_tool_vectors`.
        """
        return (
            self._embedder.compute_common_tool_vectors()
            if isinstance(self._embedder, AdaptiveEmbedder)
            else self._usual["tools"]
        )

    def adapt_tool_vectors(self, tools: Vectors) -> Vectors:
        """Return directions of tools, moved by the local model towards their requests.

        Only for use on the encoder thread.
        """
        return self._embedder.adapt_tool_vectors(tools) if isinstance(self._embedder, AdaptiveEmbedder) else tools

    def wait_for_event_or_failure(self, done: threading.Event, timeout_s: float | None = None) -> bool:
        """Wait until ``done`` is set or the embedder fails. Return whether it is set."""
        with self._change:
            self._change.wait_for(
                lambda: done.is_set() or self._closed or time.monotonic() < self._rest_until, timeout_s
            )
        return done.is_set()

    def close(self, wait_s: float = 0.0) -> None:
        """End the thread after its current batch, and store what was encoded.

        :param wait_s: the maximum wait. A thread that works in a library when the process ends crashes the process. A thread that
            hangs is not waited for
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
        until = time.monotonic() + wait_s
        while self._thread is not None and self._thread.is_alive() and (now := time.monotonic()) < until:
            if self._busy_since is not None and now - self._busy_since > self._hangs_s:
                break
            self._thread.join(min(0.1, until - now))

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="handrail-encoder", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                asked, wishes = None, ()  # do not keep the texts of finished work alive while idle
                with self._change:
                    self._requests = [pending for pending in self._requests if pending.request is not None]
                    while not (self._closed or self._queries or self._has_due_work()):
                        rest = self._rest_until - time.monotonic()
                        self._change.wait(rest if self._requests and rest > 0 else None)
                    if self._closed:
                        break
                    asked = self._queries.popleft() if self._queries else None
                    wishes = tuple(self._requests)
                self._do_one_step(asked, wishes)
            self._save()
        finally:
            with self._change:
                self._closed = True
                for asked in self._queries:
                    asked.answered.set()
                self._change.notify_all()

    def _has_due_work(self) -> bool:
        return bool(self._requests) and time.monotonic() >= self._rest_until

    def _fail(self, why: str, asked: _QueryTexts | None) -> None:
        with self._change:
            self.state = why
            self._rest_until = time.monotonic() + _PAUSE_S
            for each in (asked, *self._queries):
                if each is not None:
                    each.answered.set()
            self._queries.clear()
            self._change.notify_all()

    def _encode(self, texts: Sequence[str]) -> Vectors:
        self._busy_since = time.monotonic()
        try:
            rows = self._embedder.encode(texts)
        finally:
            self._busy_since = None
        rows = check_and_normalise_rows(rows, len(texts))
        if self._usual and rows.shape[1] != (before := self._usual["tools"].shape[1]):
            if self._cache is not None:
                self._cache.delete_vectors(self._embedder.fingerprint)
            raise EmbedderError(
                f"the embedder now returns vectors of {rows.shape[1]} numbers instead of {before}, so its name belongs to another "
                "model; the stored vectors are computed again at the next start"
            )
        return rows

    def _encode_background_texts(self) -> None:
        """Encode the background texts, once."""
        if self._usual:
            return
        self.state = "the model is loading"
        self._embedder.load()
        import numpy

        self.state = "the model is encoding its first texts"
        texts = {hash_text(text): text for several in BACKGROUND_TEXTS.values() for text in several}
        missing = self._find_missing(texts)
        try:
            self._learn(missing, [texts[key] for key in missing])
        except EmbeddingTextsRejected:  # too many at once. Each is short, so an embedder that refuses one is useless
            for key in missing:
                self._learn([key], [texts[key]])
        self._usual = {
            kind: numpy.stack([self._known[hash_text(text)] for text in several]).astype(numpy.float32)
            for kind, several in BACKGROUND_TEXTS.items()
        }

    def _answer(self, asked: _QueryTexts) -> None:
        if asked.given_up:
            return
        try:
            seen = self._query_directions(asked.texts)
        except EmbeddingTextsRejected:  # only this request falls back to words
            asked.answered.set()
            return
        with self._change:
            asked.vectors = dict(zip(asked.texts, seen, strict=True))
            self._recent.update(asked.vectors)
            while len(self._recent) > _REMEMBERED:
                self._recent.popitem(last=False)
        asked.answered.set()

    def _query_directions(self, texts: Sequence[str]) -> Vectors:
        """Return where requests point.

        The direction comes from their text and, for the local model, a little from their telling words.
        """
        from handrail.catalog.search.vector_index import center_and_normalize

        usual = self._usual["requests"].mean(axis=0)
        if not isinstance(self._embedder, AdaptiveEmbedder):
            return center_and_normalize(self._encode_each(texts), usual)
        rows = self._encode_each([*texts, *map(remove_filler_words, texts)])
        directions: Any = center_and_normalize(rows[: len(texts)], usual)
        full_text_directions: Any = center_and_normalize(rows[len(texts) :], self._usual["told"].mean(axis=0))
        return self._embedder.adapt_request_vectors(
            (1 - _TELLING_WEIGHT) * directions + _TELLING_WEIGHT * full_text_directions
        )

    def _do_one_step(self, asked: _QueryTexts | None, wishes: Sequence[_PendingRequest]) -> None:
        """Do one step: a request, or else one batch of background work."""
        try:
            self._encode_background_texts()
            if asked is not None:
                self._answer(asked)
            else:
                self._encode_next(wishes)
        except EmbedderError as error:
            self._fail(str(error), asked)
        except Exception as error:
            self._fail(f"the embedder failed: {type(error).__name__}: {error}", asked)

    def _encode_next(self, wishes: Sequence[_PendingRequest]) -> None:
        """Encode one batch for the smallest of ``wishes``, or finish it."""
        for pending in wishes:
            if pending.texts is None:
                self._begin(pending)
        pending = min(wishes, key=lambda one: len(one.missing))
        if self._encode_missing_texts(pending):
            if not pending.missing:
                self._finish(pending)
            elif time.monotonic() - self._saved_at > _SAVE_EVERY_S:
                self._save()

    def _encode_missing_texts(self, pending: _PendingRequest) -> bool:
        """Encode the next missing texts of a consumer.

        :returns: whether that is done; otherwise they have to be tried again one by one
        """
        texts: Mapping[bytes, str] = pending.texts or {}
        left = pending.missing[-1 if self._alone else -_BATCH_SIZE :]
        # another consumer may have had it encoded
        some = [key for key in left if key not in self._known and key not in self._excluded]
        self.state = f"{len(texts) - len(pending.missing)} of {len(texts)} tools are encoded"
        try:
            self._learn(some, [texts[key] for key in some])
        except EmbeddingTextsRejected:
            self._check_embedder_works()
            if len(some) > 1:
                self._alone = len(left)
                return False  # the same texts again, with a check for a request between any two
            self._encode_refused_text(some[0], texts[some[0]])
        self._alone = max(0, self._alone - len(left))
        del pending.missing[-len(left) :]
        if some and self._progress is not None:
            self._progress(len(texts) - len(pending.missing), len(texts))
        return True

    def _finish(self, pending: _PendingRequest) -> None:
        if (consumer := pending.request) is not None:
            consumer.accept_vectors(self._known)
        with self._change:
            self._requests.remove(pending)
            if not (waiting := tuple(self._requests)):
                self.state = self.excluded_tools_description
        if self._save():
            needed = {key for one in waiting for key in one.texts or ()}
            self._known = {key: row for key, row in self._known.items() if key in needed}
        with self._change:
            self._change.notify_all()

    def _begin(self, pending: _PendingRequest) -> None:
        consumer = pending.request
        texts: Mapping[bytes, str] = {} if consumer is None else consumer.texts_to_encode()
        pending.texts = texts
        pending.missing = self._find_missing(texts)
        if consumer is not None and pending.missing and len(pending.missing) * 2 <= len(texts):
            consumer.accept_vectors(self._known)

    def _find_missing(self, texts: Mapping[bytes, str]) -> list[bytes]:
        """Return the keys of texts without a vector, after a look into the cache."""
        missing = [key for key in texts if key not in self._known]
        if missing and self._cache is not None:
            self._known.update(self._cache.load_vectors(self._embedder.fingerprint, missing))
            missing = [key for key in missing if key not in self._known]
        return sorted(missing, key=lambda key: -len(texts[key]))

    def _learn(self, keys: Sequence[bytes], texts: Sequence[str]) -> None:
        if keys:
            self._keep(keys, self._encode(texts))

    def _keep(self, keys: Sequence[bytes], rows: Vectors) -> None:
        import numpy

        for key, row in zip(keys, rows.astype(numpy.float16), strict=True):
            self._known[key] = self._new[key] = row

    def _encode_refused_text(self, key: bytes, text: str) -> None:
        """Encode as much of a refused text as the embedder accepts. If it accepts nothing, exclude the text."""
        try:
            self._keep((key,), self._encode_beginning(_first_half_of_text(text)))
        except EmbeddingTextsRejected:
            self._excluded.add(key)

    def _encode_each(self, texts: Sequence[str]) -> Vectors:
        """Return the vectors of a request's texts, shortened where the embedder refuses them.

        :raises EmbeddingTextsRejected: if it accepts nothing of one of them
        """
        try:
            return self._encode(texts)
        except EmbeddingTextsRejected:
            self._check_embedder_works()
        import numpy

        return numpy.concatenate([self._encode_beginning(text) for text in texts])

    def _encode_beginning(self, text: str) -> Vectors:
        """Return the vector of a text, or of as much of its beginning as the embedder accepts.

        :raises EmbeddingTextsRejected: if it accepts nothing
        """
        while True:
            try:
                return self._encode([text])
            except EmbeddingTextsRejected:
                if len(text) <= _SHORTEST:
                    raise
                text = _first_half_of_text(text)

    def _check_embedder_works(self) -> None:
        """Test after a refusal whether the embedder accepts any text.

        :raises EmbedderError: if it refuses even a short text
        """
        try:
            self._encode(BACKGROUND_TOOLS[:1])
        except EmbeddingTextsRejected as error:
            raise EmbedderError(f"{error}, for every text") from None

    def _save(self) -> bool:
        """Store new vectors. Return whether all known ones are stored."""
        self._saved_at = time.monotonic()
        if self._cache is None:
            return False
        if not self._cache.store_vectors(self._embedder.fingerprint, self._new):
            return False
        self._new = {}
        return True


def _first_half_of_text(text: str) -> str:
    """Return the first half of a text, but not less than the minimum."""
    return text[: max(len(text) // 2, _SHORTEST)]
