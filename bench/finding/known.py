"""The local model for benches: it remembers what it encoded, and takes another turn than the one that ships."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from handrail.catalog.embedders.minilm import DIMENSION, MiniLMEmbedder
from handrail.catalog.search.vector_index import RequestVectorAdapter


class Known(MiniLMEmbedder):
    """:param file: where vectors are kept between two runs"""

    def __init__(self, file: Path | None = None) -> None:
        super().__init__()
        self._file = file
        self._held: dict[bytes, Any] = {}
        if file is not None and file.is_file():
            with numpy.load(file, allow_pickle=False) as kept:
                keys, rows = kept["keys"], kept["rows"]
            self._held = {key.tobytes(): row for key, row in zip(keys, rows, strict=True)}
        self._kept = len(self._held)

    def encode(self, texts: Sequence[str]) -> Any:
        keys = [hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest() for text in texts]
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._held}
        several = sorted(missing, key=lambda key: len(missing[key]))
        for begin in range(0, len(several), 256):
            some = several[begin : begin + 256]
            rows = super().encode([missing[key] for key in some])
            self._held.update(zip(some, rows.astype(numpy.float16), strict=True))
        if not keys:
            return numpy.zeros((0, DIMENSION), numpy.float32)
        return numpy.stack([self._held[key] for key in keys]).astype(numpy.float32)

    def with_turn(self, turn: RequestVectorAdapter) -> Known:
        """The same with another ``turn``; what either encodes both remember."""
        other = Known()
        other._held, other._turn = self._held, turn
        return other

    def keep(self) -> None:
        """Write the file."""
        if self._file is not None and len(self._held) > self._kept:
            keys = numpy.frombuffer(b"".join(self._held), numpy.uint8).reshape(-1, 16)
            numpy.savez(self._file, keys=keys, rows=numpy.stack(list(self._held.values())))
            self._kept = len(self._held)
