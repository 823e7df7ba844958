"""What a search keeps between two starts: vectors by the text they are of, and the words of the whole catalogue."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from handrail.catalog import sealed
from handrail.catalog.lexical import WEIGHTS, Lexical

KEY = 16
"""Bytes of a text's key."""

_MOST_VECTORS = 300_000
_FORM = 2
"""Counted up when what is kept is made in another way."""

Tell = Callable[[str], None]
"""Told what was wrong with a file that is made again."""


def key_of(text: str) -> bytes:
    """The key of one text."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=KEY).digest()


class Cache:
    """One folder of the state. Nothing in it is missed: what is gone or no good is made again.

    :param tell: told in one sentence when a file was thrown away
    """

    def __init__(self, folder: Path, tell: Tell | None = None) -> None:
        self._folder = folder
        self._tell: Tell = tell or _silent

    def vectors(self, fingerprint: str) -> dict[bytes, Any]:
        """Every vector that was kept of this embedder, by the key of its text (rows of 16-bit floats)."""
        import numpy

        found = self._read(self._vectors(fingerprint), {"kind": "vectors", "form": _FORM, "embedder": fingerprint})
        if found is None:
            return {}
        head, blocks = found
        width = head.get("width")
        if len(blocks) != 2 or not isinstance(width, int) or width < 1:
            return {}
        keys, content = blocks
        if len(keys) % KEY or len(content) != len(keys) // KEY * width * 2:
            return {}
        rows = numpy.frombuffer(content, numpy.float16).reshape(-1, width)
        return {bytes(keys[at * KEY : at * KEY + KEY]): rows[at] for at in range(len(rows))}

    def keep_vectors(self, fingerprint: str, vectors: Mapping[bytes, Any]) -> None:
        """Keep ``vectors``, and no others, for the next start."""
        import numpy

        held = list(vectors.items())[-_MOST_VECTORS:]
        if not held:
            return
        rows = numpy.stack([row for _, row in held]).astype(numpy.float16)
        head = {"kind": "vectors", "form": _FORM, "embedder": fingerprint, "width": rows.shape[1]}
        self._write(self._vectors(fingerprint), head, [b"".join(key for key, _ in held), rows.tobytes()])

    def lexical(self, documents: Sequence[str]) -> Lexical | None:
        """The words of exactly these documents (their keys, in order), where they were kept."""
        found = self._read(self._folder / "words", self._words_head(documents), quiet="documents")
        if found is None:
            return None
        _, blocks = found
        if len(blocks) != 5:
            return None
        names = cast(list[str], json.loads(bytes(blocks[0])))
        starts, numbers, weights, lengths = array("i"), array("i"), array("f"), array("f")
        for each, block in zip((starts, numbers, weights, lengths), blocks[1:], strict=True):
            each.frombytes(block)
        return Lexical({name: place for place, name in enumerate(names)}, starts, numbers, weights, lengths)

    def keep_lexical(self, documents: Sequence[str], found: Lexical) -> None:
        """Keep the words of these documents for the next start."""
        names = json.dumps(list(found.terms), ensure_ascii=False).encode("utf-8", "surrogatepass")
        blocks = [names, *(each.tobytes() for each in (found.starts, found.documents, found.weights, found.lengths))]
        self._write(self._folder / "words", self._words_head(documents), blocks)

    def _words_head(self, documents: Sequence[str]) -> dict[str, Any]:
        digest = hashlib.blake2b("\n".join(documents).encode("utf-8", "replace"), digest_size=KEY).hexdigest()
        weights = ",".join(f"{name}={weight}" for name, weight in WEIGHTS.items())
        return {"kind": "words", "form": _FORM, "order": sys.byteorder, "weights": weights, "documents": digest}

    def _vectors(self, fingerprint: str) -> Path:
        return self._folder / f"vectors-{key_of(fingerprint).hex()[:12]}"

    def _read(
        self, path: Path, head: Mapping[str, Any], quiet: str = ""
    ) -> tuple[Mapping[str, Any], list[memoryview]] | None:
        """:param quiet: the head's entry that may well be another, without anything being wrong"""
        try:
            return sealed.read(path, head)
        except sealed.Unusable as reason:
            if not quiet or str(reason) != f"is of another {quiet}":
                self._tell(f"{path} {reason}: it is made again")
            return None

    def _write(self, path: Path, head: Mapping[str, Any], blocks: Sequence[bytes]) -> None:
        try:
            sealed.write(path, head, blocks)
        except OSError as error:
            self._tell(
                f"{path} cannot be written ({error.strerror}): what it would hold is made again at the next start"
            )


def _silent(text: str) -> None:
    """Nobody wants to be told."""
