"""The one thread that encodes: requests first, then whatever tools have no vector yet.

A search waits for its request's vectors only so long, and not at all while the embedder is stuck in an earlier call;
it then goes by words. So a model that is still loading, or an endpoint that hangs, delays nobody.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from handrail.catalog.cache import Cache, key_of
from handrail.catalog.embedder import Embedder, EmbedderError, Turning
from handrail.catalog.usual import REQUESTS, TOOLS

if TYPE_CHECKING:
    from handrail.catalog.embedder import Vectors

_AT_ONCE = 16
"""Texts encoded between two looks for a request."""

_REMEMBERED = 512
"""Texts of requests whose vectors are kept in memory."""

_PAUSE_S = 30.0
"""After a failure, how long the embedder is left alone."""

_SAVE_EVERY_S = 60.0

_HANGS_S = 5.0
"""A batch that takes longer is not waited for at the end: no model on this machine takes as long."""

Progress = Callable[[int, int], None]
"""Told how many of how many texts are encoded."""


@dataclass
class _Asked:
    texts: tuple[str, ...]
    answered: threading.Event = field(default_factory=threading.Event)
    vectors: dict[str, Any] | None = None
    given_up: bool = False


@dataclass(frozen=True)
class Wish:
    """Texts that somebody wants vectors of.

    :param texts: gives the texts by key; called in the encoder's thread, once
    :param ready: called in the encoder's thread: once with what is known at the start, and once when all is
    """

    texts: Callable[[], Mapping[bytes, str]]
    ready: Callable[[Mapping[bytes, Any]], None]


class Encoder:
    """Runs one embedder in a thread of its own. Starts with the first wish or request.

    :param cache: where vectors are kept between two starts
    :param progress: told how far the encoding is
    """

    def __init__(self, embedder: Embedder, cache: Cache | None = None, progress: Progress | None = None) -> None:
        self._embedder, self._cache, self._progress = embedder, cache, progress
        self._change = threading.Condition()
        self._asked: deque[_Asked] = deque()
        self._wish: Wish | None = None
        self._begun: Wish | None = None
        self._texts: Mapping[bytes, str] = {}
        self._known: dict[bytes, Any] = {}
        self._recent: OrderedDict[str, Any] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._busy_since: float | None = None
        self._rest_until = 0.0
        self._unsaved = False
        self._closed = False
        self._usual: tuple[Any, Any] | None = None
        self.state = "not started"
        """Why there is no meaning yet or now, for people; empty where there is."""

    def wish(self, wish: Wish) -> None:
        """Have these texts encoded; an earlier wish that is not done is dropped."""
        with self._change:
            self._wish = wish
            self._start()
            self._change.notify_all()

    def request(self, texts: Sequence[str], patience_s: float) -> list[Vectors] | None:
        """The directions of the texts of a request, or None where they cannot be had in time."""
        with self._change:
            known = {text: self._recent[text] for text in texts if text in self._recent}
            if len(known) == len(set(texts)):
                return [known[text] for text in texts]
            now = time.monotonic()
            stuck = self._busy_since is not None and now - self._busy_since > patience_s
            if self._closed or stuck or now < self._rest_until:
                return None
            asked = _Asked(tuple(dict.fromkeys(texts)))
            self._asked.append(asked)
            self._start()
            self._change.notify_all()
        asked.answered.wait(patience_s)
        with self._change:
            asked.given_up = True
            if asked.vectors is None:
                return None
            return [asked.vectors[text] for text in texts]

    def usual_tools(self) -> Vectors:
        """The vectors of what tools commonly say; only in ``ready``."""
        assert self._usual is not None
        return self._usual[1]

    def wait(self, done: threading.Event, timeout_s: float | None = None) -> bool:
        """Wait for the ``done`` of a wish, not beyond a failure; whether it came."""
        with self._change:
            self._change.wait_for(
                lambda: done.is_set() or self._closed or time.monotonic() < self._rest_until, timeout_s
            )
        return done.is_set()

    def close(self, wait_s: float = 0.0) -> None:
        """End the thread after what it is at, and keep what was encoded.

        :param wait_s: how long to wait for that: a thread that is at work in a library when the process ends takes the process
            down with it. One that hangs is not waited for
        """
        with self._change:
            self._closed = True
            self._change.notify_all()
        until = time.monotonic() + wait_s
        while self._thread is not None and self._thread.is_alive() and (now := time.monotonic()) < until:
            if self._busy_since is not None and now - self._busy_since > _HANGS_S:
                break
            self._thread.join(min(0.1, until - now))

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="handrail-encoder", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self.state = "the kept vectors are being read"
            if self._cache is not None:
                self._known = self._cache.vectors(self._embedder.fingerprint)
            while True:
                with self._change:
                    while not (self._closed or self._asked or self._due()):
                        rest = self._rest_until - time.monotonic()
                        self._change.wait(rest if self._wish is not None and rest > 0 else None)
                    if self._closed:
                        break
                    asked = self._asked.popleft() if self._asked else None
                    wish = self._wish
                try:
                    self._prepare()
                    if asked is not None:
                        self._answer(asked)
                    elif wish is not None:
                        self._fulfil(wish)
                except EmbedderError as error:
                    self._fail(str(error), asked)
                except Exception as error:
                    self._fail(f"the embedder failed: {type(error).__name__}: {error}", asked)
            if self._unsaved:
                self._save()
        finally:
            with self._change:
                self._closed = True
                for asked in self._asked:
                    asked.answered.set()
                self._change.notify_all()

    def _due(self) -> bool:
        return self._wish is not None and time.monotonic() >= self._rest_until

    def _fail(self, why: str, asked: _Asked | None) -> None:
        with self._change:
            self.state = why
            self._rest_until = time.monotonic() + _PAUSE_S
            for each in (asked, *self._asked):
                if each is not None:
                    each.answered.set()
            self._asked.clear()
            self._change.notify_all()

    def _encode(self, texts: Sequence[str]) -> Vectors:
        self._busy_since = time.monotonic()
        try:
            return self._embedder.encode(texts)
        finally:
            self._busy_since = None

    def _prepare(self) -> None:
        """The background, once."""
        if self._usual is not None:
            return
        self.state = "the model is loading"
        self._embedder.load()
        import numpy

        self.state = "the model is at its first texts"
        texts = {key_of(text): text for text in (*REQUESTS, *TOOLS)}
        missing = [key for key in texts if key not in self._known]
        if missing:
            for key, row in zip(missing, self._encode([texts[key] for key in missing]), strict=True):
                self._known[key] = row.astype(numpy.float16)
            self._unsaved = True
        rows = [
            numpy.stack([self._known[key_of(text)] for text in several]).astype(numpy.float32)
            for several in (REQUESTS, TOOLS)
        ]
        self._usual = (rows[0].mean(axis=0), rows[1])

    def _answer(self, asked: _Asked) -> None:
        if asked.given_up:
            return
        from handrail.catalog.vectors import directions

        assert self._usual is not None
        seen = directions(self._encode(asked.texts), self._usual[0])
        if isinstance(self._embedder, Turning):
            seen = self._embedder.turned(seen)
        with self._change:
            asked.vectors = dict(zip(asked.texts, seen, strict=True))
            self._recent.update(asked.vectors)
            while len(self._recent) > _REMEMBERED:
                self._recent.popitem(last=False)
        asked.answered.set()

    def _fulfil(self, wish: Wish) -> None:
        import numpy

        anew = self._begun is not wish
        if anew:
            self._begun, self._texts = wish, wish.texts()
        texts = self._texts
        missing = [key for key in texts if key not in self._known]
        total = len(texts)
        if anew and missing and len(missing) * 2 <= total:
            wish.ready(self._known)
        saved = time.monotonic()
        missing.sort(key=lambda key: len(texts[key]))
        for begin in range(0, len(missing), _AT_ONCE):
            self.state = f"{total - len(missing) + begin} of {total} tools are encoded"
            some = missing[begin : begin + _AT_ONCE]
            for key, row in zip(some, self._encode([texts[key] for key in some]), strict=True):
                self._known[key] = row.astype(numpy.float16)
            self._unsaved = True
            if self._progress is not None:
                self._progress(total - len(missing) + begin + len(some), total)
            if time.monotonic() - saved > _SAVE_EVERY_S:
                self._save()
                saved = time.monotonic()
            with self._change:
                if self._closed or self._wish is not wish:
                    return
                if self._asked:
                    return  # the rest after the request is answered
        if missing:
            self._save()
        wish.ready(self._known)
        self.state = ""
        with self._change:
            if self._wish is wish:
                self._wish = None
            self._change.notify_all()

    def _save(self) -> None:
        """Keep what is in use; what is not goes first when there is too much of it."""
        if self._cache is None:
            return
        used = {*self._texts, *(key_of(text) for text in (*REQUESTS, *TOOLS))}
        spare = [key for key in self._known if key not in used][-max(2_000, len(used)) :]
        self._known = {key: self._known[key] for key in (*spare, *used) if key in self._known}
        self._cache.keep_vectors(self._embedder.fingerprint, self._known)
        self._unsaved = False
