"""Search by meaning: which tools' vectors point where a request's does.

Up to a few thousand tools are compared one by one, which a CPU does in half a millisecond. Above that each vector
is first compared by the signs of its components (one bit each, 48 bytes a tool), and the best few hundred exactly: on
10,000 real definitions that found for 750 real requests what comparing all of them finds, in a fourth of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from handrail.catalog.search.lexical import Scores, highest

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder import Vectors

EXACT_UP_TO = 5_000
"""Documents that are compared one by one."""

_RESCORED = 400
"""Documents whose signs agree best, which are compared exactly."""

_SAMPLE = 2_000
"""Documents by which it is judged how much similarities to a request differ, where not all are compared."""

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
        seen = (self._seen(rows, begin, center, drawn) for begin in range(0, len(rows), _CHUNK))
        self._held = (_OneByOne if len(rows) <= exact_up_to else _BySigns)(rows.shape, seen)

    def _seen(self, rows: Vectors, begin: int, center: Vectors, drawn: Callable[[Vectors], Vectors] | None) -> Vectors:
        """Some documents' directions to search in; as they are they are kept beside, a byte a component."""
        plain = directions(rows[begin : begin + _CHUNK], center)
        if drawn is None:
            return plain
        most = numpy.maximum(numpy.abs(plain).max(axis=1, keepdims=True), 1e-9)
        self._plain[begin : begin + _CHUNK] = numpy.rint(plain * (127 / most))
        return drawn(plain)

    def scores(self, request: Vectors, pool: int, asked: Sequence[int] = ()) -> Scores:
        """The similarity of every document to ``request`` (a direction), with the ``pool`` best ones.

        :param asked: documents whose score will be asked for, besides the best ones
        """
        return self._held.scores(request, pool, asked)

    def beside(self, numbers: Sequence[int], requests: Vectors) -> tuple[Vectors, Vectors]:
        """How near each of these documents is by itself, drawn nowhere, to each request, and to each of the documents."""
        several = list(numbers)
        rows: Any = self._held.rows(several) if self._plain is None else self._plain[several].astype(numpy.float32)
        rows /= numpy.maximum(numpy.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
        return numpy.einsum("ij,kj->ik", rows, requests), numpy.einsum("ij,kj->ik", rows, rows)

    def elsewhere(self, requests: Vectors) -> Vectors:
        """How near the nearest of the tools that others have lie to each request, whether or not such are here: a soft maximum,
        in which their number plays no part."""
        near: Any = numpy.einsum("ij,kj->ik", requests, self._elsewhere)
        most = near.max(axis=1, keepdims=True)
        return most[:, 0] + numpy.log(numpy.exp((near - most) * _SHARP).mean(axis=1)) / _SHARP


class _OneByOne:
    """Directions that are all compared with a request.

    :param shape: how many there are, and of how many components
    :param chunks: the directions, some at a time
    """

    def __init__(self, shape: tuple[int, ...], chunks: Iterable[Vectors]) -> None:
        self._rows: Any = numpy.empty(shape, numpy.float32)
        begin = 0
        for rows in chunks:
            self._rows[begin : begin + len(rows)] = rows
            begin += len(rows)

    def rows(self, numbers: Any) -> Any:
        """The directions of some documents."""
        return self._rows[numbers]

    def scores(self, request: Vectors, pool: int, _asked: Sequence[int]) -> Scores:
        """See :meth:`Vicinity.scores`."""
        # by numpy itself, not by BLAS: its threads wait for each other on a busy machine
        total = numpy.einsum("ij,j->i", self._rows, request)
        best = highest(numpy, total, pool)
        return Scores(best, float(total.mean()), float(total.std()), lambda number: float(total[number]))


class _BySigns:
    """Directions of which only those are compared with a request whose components have most signs in common with its own.

    Of each component the upper half of a 32-bit float is kept: as much room as a 16-bit one takes, and read ten times as fast.
    """

    def __init__(self, shape: tuple[int, ...], chunks: Iterable[Vectors]) -> None:
        """See :class:`_OneByOne`."""
        count, width = shape
        self._halves: Any = numpy.empty(shape, numpy.uint16)
        self._codes: Any = numpy.empty((-(-width // 64), count), numpy.uint64)
        """A word of signs of every document, then the next word of each."""
        total: Any = numpy.zeros(width)
        begin = 0
        for rows in chunks:
            end = begin + len(rows)
            self._halves[begin:end] = (rows.view(numpy.uint32) + 0x8000) >> 16  # to the nearest
            self._codes[:, begin:end] = self._signs(rows).T
            total += rows.sum(axis=0, dtype=numpy.float64)
            begin = end
        self._mean: Any = (total / count).astype(numpy.float32)
        sample = self.rows(numpy.arange(0, count, max(1, count // _SAMPLE)))
        about: Any = (sample - sample.mean(axis=0)) / math.sqrt(len(sample))
        self._spread: Any = numpy.linalg.qr(about, mode="r")
        """The triangular matrix that gives a request's direction the length by which similarities to it differ."""

    def rows(self, numbers: Any) -> Any:
        """The directions of some documents."""
        whole = self._halves.take(numbers, axis=0).astype(numpy.uint32)
        whole <<= 16
        return whole.view(numpy.float32)

    def scores(self, request: Vectors, pool: int, asked: Sequence[int]) -> Scores:
        """See :meth:`Vicinity.scores`; how much the scores differ is judged by a sample."""
        count = self._halves.shape[0]
        mean, deviation = float(self._mean @ request), float(numpy.linalg.norm(self._spread @ request))
        if pool >= count:
            chunks = [self._near(numpy.arange(at, min(at + _CHUNK, count)), request) for at in range(0, count, _CHUNK)]
            total = numpy.concatenate(chunks)
            return Scores(highest(numpy, total, pool), mean, deviation, lambda number: float(total[number]))
        numbers = numpy.concatenate((self._likely(request), numpy.array(asked, numpy.intp)))
        near = self._near(numbers, request)
        order = numpy.lexsort((numbers, -near))[: pool + len(asked)]  # what is asked for may be among the likely, too
        known: dict[int, float] = dict(zip(numbers[order].tolist(), near[order].tolist(), strict=True))
        best = list(known)[:pool]
        known.update(zip(asked, near[len(near) - len(asked) :].tolist(), strict=True))

        def score(number: int) -> float:
            found = known.get(number)
            return float(self._near([number], request)[0]) if found is None else found

        return Scores(best, mean, deviation, score)

    def _near(self, numbers: Any, request: Vectors) -> Any:
        return numpy.einsum("ij,j->i", self.rows(numbers), request)

    def _likely(self, request: Vectors) -> Any:
        apart = numpy.zeros(self._codes.shape[1], numpy.int16)
        for held, word in zip(self._codes, self._signs(request[None])[0], strict=True):
            apart += numpy.bitwise_count(held ^ word)
        several = min(_RESCORED, len(apart))
        return numpy.argpartition(apart, several - 1)[:several]

    def _signs(self, rows: Vectors) -> Any:
        """One bit for each component, in words of 64, of which the last one is filled up."""
        packed = numpy.zeros((len(rows), 8 * len(self._codes)), numpy.uint8)
        bits = numpy.packbits(rows > 0, axis=1)
        packed[:, : bits.shape[1]] = bits
        return packed.view(numpy.uint64)
