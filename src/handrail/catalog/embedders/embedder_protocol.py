"""The Protocol of an embedder, which turns texts into vectors, and checks of its output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Vectors = NDArray[numpy.float32]
    """One ``float32`` row for each text."""


class EmbedderError(Exception):
    """The embedder does not work now. The text says why and what to do. A search then uses words only."""


class EmbeddingTextsRejected(EmbedderError):
    """The embedder refuses these texts, because one is too long or there are too many. Otherwise it works."""


class Embedder(Protocol):
    """A model that encodes texts as vectors. May be called from any thread, one call at a time.

    ``fingerprint`` names the model and everything else that determines its vectors. Vectors with different fingerprints are never
    compared, and never share a cache.
    """

    @property
    def fingerprint(self) -> str: ...

    def load(self) -> None:
        """Prepare for encoding, if that takes time.

        :raises EmbedderError: if that fails
        """

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one row of length 1 for each text, in order.

        :raises EmbeddingTextsRejected: if it refuses these texts
        :raises EmbedderError: if it does not work now
        """
        ...


def disable_onnx_telemetry() -> None:
    """Disable the telemetry of ONNX Runtime, unless the user has set its variable.

    Otherwise ONNX Runtime sends usage data to its maker, and writes an identifier of the machine to the user's cache. It reads
    the variable at import, so call this before.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def check_and_normalise_rows(rows: Vectors, texts: int) -> Vectors:
    """Return the rows of an embedder, normalized to length 1, after a check.

    An invalid row would spoil every comparison.

    :param texts: the expected number of rows
    :raises EmbeddingTextsRejected: for a row with a value that is not a finite number
    :raises EmbedderError: for any other number of rows
    """
    import numpy

    given = numpy.asarray(rows, numpy.float64)
    if given.ndim != 2 or len(given) != texts or not given.shape[1]:
        shape = " by ".join(map(str, given.shape))
        raise EmbedderError(f"the embedder returned {shape} numbers for {texts} texts; expected one row for each text")
    largest = abs(given).max(axis=1, keepdims=True)
    if not numpy.isfinite(largest).all():
        raise EmbeddingTextsRejected("the embedder returned a value that is not a number")
    largest[largest == 0.0] = 1.0
    given /= largest  # so that no square overflows
    lengths = numpy.linalg.norm(given, axis=1, keepdims=True)
    return (given / numpy.maximum(lengths, 1e-9)).astype(numpy.float32)


@runtime_checkable
class MonolingualEmbedder(Protocol):
    """An embedder that reads one language. Others are assumed to read every language."""

    @property
    def language(self) -> str:
        """The English name of the language."""
        ...


@runtime_checkable
class AdaptiveEmbedder(Protocol):
    """An embedder that has learned how requests relate to the tools that serve them."""

    def adapt_tool_vectors(self, tools: Vectors) -> Vectors:
        """Return directions of tools, each moved a little towards requests for similar tools."""
        ...

    def compute_common_tool_vectors(self) -> Vectors:
        """Return vectors of common tools, whether or not a catalogue has similar ones."""
        ...

    def adapt_request_vectors(self, requests: Vectors) -> Vectors:
        """Return directions of requests, each moved to where its tools are more likely to be."""
        ...
