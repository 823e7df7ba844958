"""Any model of the library ``fastembed``, which brings its own run time and downloads the model at first use."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from handrail.catalog.embedders.embedder import EmbedderError, disable_telemetry
from handrail.origins.imports import is_installed

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder import Vectors

_BATCH = 8


class FastEmbed:
    """An :class:`~handrail.catalog.embedders.embedder.Embedder` over ``fastembed.TextEmbedding``.

    :param model: as fastembed names it
    :param threads: of its run time
    :raises EmbedderError: fastembed is not installed
    """

    def __init__(self, model: str = "BAAI/bge-small-en-v1.5", *, threads: int = 1) -> None:
        if not is_installed("fastembed"):
            raise EmbedderError("fastembed is not installed: pip install fastembed")
        self._model, self._threads = model, threads
        self._held: Any = None

    @property
    def fingerprint(self) -> str:
        return f"fastembed/{self._model}"

    def load(self) -> None:
        if self._held is None:
            disable_telemetry()  # it is built on ONNX Runtime
            try:
                self._held = import_module("fastembed").TextEmbedding(self._model, threads=self._threads)
            except Exception as error:
                raise EmbedderError(f"fastembed cannot load {self._model}: {error}") from error

    def encode(self, texts: Sequence[str]) -> Vectors:
        self.load()
        import numpy

        out = numpy.stack(list(self._held.embed(list(texts), batch_size=_BATCH))).astype(numpy.float32)
        return out / numpy.maximum(numpy.linalg.norm(out, axis=1, keepdims=True), 1e-12)
