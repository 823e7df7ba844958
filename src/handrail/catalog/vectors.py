"""Search by meaning: which tools' vectors point where a request's does.

Up to twenty thousand tools are compared one by one, which a CPU does in a millisecond or two. Above that each vector
is first compared by the signs of its components (one bit each, 48 bytes a tool), and the best few hundred exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy

from handrail.catalog.lexical import Scores, highest

if TYPE_CHECKING:
    from handrail.catalog.embedder import Vectors

EXACT_UP_TO = 20_000
"""Documents that are compared one by one."""

_RESCORED = 400
"""Documents whose signs agree best, which are compared exactly."""

_SAMPLE = 2_000
"""Documents from which the usual similarity to a request is judged, where not all are compared."""

_CHUNK = 8_192

_SHARP = 11.0
"""By how much of a cosine (one part in so many) a tool elsewhere lies further for it to count e times less."""


def directions(rows: Vectors, center: Vectors) -> Vectors:
    """``rows`` as seen from ``center``, each of length 1; a row of zeros (no vector yet) stays zeros."""
    out = rows - center
    out[~rows.any(axis=1)] = 0
    norms = numpy.linalg.norm(out, axis=1, keepdims=True)
    return (out / numpy.maximum(norms, 1e-9)).astype(numpy.float32)


def center_of(rows: Vectors, usual: Vectors) -> Vectors:
    """Where texts of this kind lie: the mean of ``rows`` and of ``usual`` ones, which steady it while rows are few."""
    known = rows[rows.any(axis=1)].sum(axis=0, dtype=numpy.float64)
    count = int(rows.any(axis=1).sum())
    return ((known + usual.sum(axis=0)) / (count + len(usual))).astype(numpy.float32)


class Vicinity:
    """The vectors of all documents, ready to be compared with a request's.

    :param rows: one a document, of length 1; zeros where a document has no vector yet
    :param usual: vectors of texts as tools commonly have them; what all tools have in common tells none from another
    :param elsewhere: vectors of tools as others have them; the usual ones where it is not given
    :param drawn: turns directions of tools to where requests for them lie
    :param exact_up_to: documents up to which each is compared
    """

    def __init__(
        self,
        rows: Vectors,
        usual: Vectors,
        *,
        elsewhere: Vectors | None = None,
        drawn: Callable[[Vectors], Vectors] | None = None,
        exact_up_to: int = EXACT_UP_TO,
    ) -> None:
        center = center_of(rows, usual)
        self._elsewhere = directions(usual if elsewhere is None else elsewhere, center)
        self._plain: Any = None if drawn is None else numpy.empty(rows.shape, numpy.int8)
        self._codes: Any = None
        if len(rows) <= exact_up_to:
            self._rows: Any = numpy.empty(rows.shape, numpy.float32)
            for begin in range(0, len(rows), _CHUNK):
                self._rows[begin : begin + _CHUNK] = self._seen(rows, begin, center, drawn)
            return
        width = -(-rows.shape[1] // 64) * 8
        self._rows = numpy.empty(rows.shape, numpy.float16)
        codes = numpy.zeros((len(rows), width), numpy.uint8)
        for begin in range(0, len(rows), _CHUNK):
            seen = self._seen(rows, begin, center, drawn)
            self._rows[begin : begin + _CHUNK] = seen
            packed = numpy.packbits(seen > 0, axis=1)
            codes[begin : begin + _CHUNK, : packed.shape[1]] = packed
        self._codes = codes.view(numpy.uint64)

    def _seen(self, rows: Vectors, begin: int, center: Vectors, drawn: Callable[[Vectors], Vectors] | None) -> Vectors:
        """Some documents' directions to search in; as they are they are kept beside, a byte a component."""
        plain = directions(rows[begin : begin + _CHUNK], center)
        if drawn is None:
            return plain
        most = numpy.maximum(numpy.abs(plain).max(axis=1, keepdims=True), 1e-9)
        self._plain[begin : begin + _CHUNK] = numpy.rint(plain * (127 / most))
        return drawn(plain)

    def __len__(self) -> int:
        return len(self._rows)

    def scores(self, request: Vectors, pool: int) -> Scores:
        """The similarity of every document to ``request`` (a direction), with the ``pool`` best ones."""
        rows: Any = self._rows
        if self._codes is None:
            total = numpy.einsum("ij,j->i", rows, request)  # by itself, not by BLAS: its threads wait on a busy machine
            best = highest(numpy, total, pool)
            return Scores(best, float(total.mean()), float(total.std()), lambda number: float(total[number]))
        likely = self._likely(request)
        near = numpy.einsum("ij,j->i", rows[likely].astype(numpy.float32), request)
        usual = numpy.einsum("ij,j->i", self._sampled, request)
        order = numpy.lexsort((likely, -near))[:pool]

        def score(number: int) -> float:
            return float(rows[number].astype(numpy.float32) @ request)

        return Scores(likely[order].tolist(), float(usual.mean()), float(usual.std()), score)

    def similarity(self, numbers: Sequence[int], requests: Sequence[Vectors]) -> Vectors:
        """How near each of these documents is by itself, drawn nowhere, to each request."""
        return numpy.einsum("ij,kj->ik", self._as_they_are(numbers), numpy.stack(requests))

    def elsewhere(self, requests: Sequence[Vectors]) -> Vectors:
        """How near the nearest of the tools that others have lie to each request, whether or not such are here: a soft maximum,
        in which their number plays no part."""
        near: Any = numpy.einsum("ij,kj->ik", numpy.stack(requests), self._elsewhere)
        most = near.max(axis=1, keepdims=True)
        return most[:, 0] + numpy.log(numpy.exp((near - most) * _SHARP).mean(axis=1)) / _SHARP

    def likeness(self, numbers: Sequence[int]) -> Vectors:
        """How near each of these documents is to each."""
        rows = self._as_they_are(numbers)
        return numpy.einsum("ij,kj->ik", rows, rows)

    def _as_they_are(self, numbers: Sequence[int]) -> Any:
        rows: Any = (self._rows if self._plain is None else self._plain)[list(numbers)].astype(numpy.float32)
        return rows / numpy.maximum(numpy.linalg.norm(rows, axis=1, keepdims=True), 1e-9)

    @cached_property
    def _sampled(self) -> Any:
        step = max(1, len(self) // _SAMPLE)
        return self._rows[::step].astype(numpy.float32)

    def _likely(self, request: Vectors) -> Any:
        packed = numpy.packbits(request > 0)
        code = numpy.zeros(self._codes.shape[1] * 8, numpy.uint8)
        code[: len(packed)] = packed
        apart = numpy.zeros(len(self), numpy.int16)
        for column, word in enumerate(code.view(numpy.uint64)):
            apart += numpy.bitwise_count(self._codes[:, column] ^ word)
        several = min(_RESCORED, len(apart))
        return numpy.argpartition(apart, several - 1)[:several]
