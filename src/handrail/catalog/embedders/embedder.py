"""The Protocol of an embedder, which turns texts into vectors, and checks of its output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    Vectors = NDArray[numpy.float32]
    """One row a text, ``float32``."""


class EmbedderError(Exception):
    """The embedder cannot work now; the text says why and what to do. A search goes on with words alone."""


class TextsRefused(EmbedderError):
    """What it was given cannot be encoded, for a text that is too long or texts that are too many; it works otherwise."""


class Embedder(Protocol):
    """Encodes texts for one model. May be called from any thread, one call at a time.

    ``fingerprint`` names the model and whatever else its vectors depend on: vectors of two fingerprints are never
    compared, nor read from one another's cache.
    """

    @property
    def fingerprint(self) -> str: ...

    def load(self) -> None:
        """Make ready to encode, where that takes time.

        :raises EmbedderError: it cannot be done now
        """
        ...

    def encode(self, texts: Sequence[str]) -> Vectors:
        """One row of length 1 for each text, in order.

        :raises TextsRefused: not of these texts
        :raises EmbedderError: it cannot be done now
        """
        ...


def disable_telemetry() -> None:
    """Keep ONNX Runtime from sending usage data to its maker and from writing an identifier of the machine to the user's
    cache. It reads the variable when it is imported, so this comes before. A value that the user has set holds."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def sound(rows: Vectors, texts: int) -> Vectors:
    """The rows that an embedder gave, each of length 1: one row that is none would spoil every comparison.

    :raises TextsRefused: for some text there is no vector, only what is no number
    :raises EmbedderError: they are not one row for each of so many ``texts``
    """
    import numpy

    given = numpy.asarray(rows, numpy.float64)
    if given.ndim != 2 or len(given) != texts or not given.shape[1]:
        shape = " by ".join(map(str, given.shape))
        raise EmbedderError(f"the embedder gave {shape} numbers for {texts} texts; it has to give one row for each")
    largest = abs(given).max(axis=1, keepdims=True)
    if not numpy.isfinite(largest).all():
        raise TextsRefused("the embedder gave what is no number")
    largest[largest == 0.0] = 1.0
    given /= largest  # so that no square is beyond a float
    lengths = numpy.linalg.norm(given, axis=1, keepdims=True)
    return (given / numpy.maximum(lengths, 1e-9)).astype(numpy.float32)


@runtime_checkable
class Reading(Protocol):
    """An embedder that reads one language. Of others it is taken that they read what is asked."""

    @property
    def reads(self) -> str:
        """The language, by its English name."""
        ...


@runtime_checkable
class Turning(Protocol):
    """An embedder that knows how requests lie to the tools that serve them."""

    def drawn(self, tools: Vectors) -> Vectors:
        """Directions of tools, each drawn a little to what is asked of tools like it."""
        ...

    def elsewhere(self) -> Vectors:
        """Vectors of tools as there are everywhere, whether or not a catalogue has any like them."""
        ...

    def turned(self, requests: Vectors) -> Vectors:
        """Directions of requests, each turned to where the tools for it are more likely to be."""
        ...
