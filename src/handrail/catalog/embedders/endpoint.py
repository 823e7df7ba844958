"""Embeddings from any endpoint that speaks OpenAI's ``POST /embeddings``: a provider, Ollama, vLLM, llama.cpp.

The texts of tools and the requests put to the search leave the machine for that endpoint; nothing else does.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from handrail.catalog.embedders.embedder import EmbedderError, TextsRefused
from handrail.origins.imports import is_installed

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder import Vectors

_AT_ONCE = 64
_LARGEST = 64 << 20
_LONGEST = 8_000
"""Characters of one text that are sent."""
_REFUSALS = (400, 413, 422, 500)
"""What servers answer to a text beyond their model's length, or to more texts than they take at once; llama.cpp's says 500."""
_BEGINNING = 400
"""Characters by which texts differ for it to be certain that a model read them as different."""


class Endpoint:
    """An :class:`~handrail.catalog.embedders.embedder.Embedder` over HTTP.

    :param url: up to and without ``/embeddings``: ``http://localhost:11434/v1``
    :param model: as the endpoint names it
    :param key: sent as a bearer token; never part of a message
    :param timeout_s: for one answer, whole; a search waits less (``patience_s``) and goes by words then
    :raises EmbedderError: the address is none, or ``httpx2`` is not installed
    """

    def __init__(self, url: str, model: str, *, key: str | None = None, timeout_s: float = 20.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EmbedderError(f"{url!r} is no address of an endpoint: http://host[:port]/path is expected")
        if parts.username is not None or parts.password is not None:
            raise EmbedderError("an endpoint's key is given as such, not inside its address")
        if not is_installed("httpx2"):
            raise EmbedderError("an endpoint for embeddings needs httpx2: pip install httpx2")
        self._url, self._model, self._key, self._timeout_s = url.rstrip("/"), model, key, timeout_s
        self._client: Any = None

    @property
    def fingerprint(self) -> str:
        return f"endpoint/{hashlib.sha256(self._url.encode()).hexdigest()[:16]}/{self._model}"

    def load(self) -> None:
        import httpx2

        if self._client is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._client = cast(Any, httpx2).Client(timeout=self._timeout_s, headers=headers, follow_redirects=False)

    def encode(self, texts: Sequence[str]) -> Vectors:
        self.load()
        import numpy

        rows: list[Any] = []
        for begin in range(0, len(texts), _AT_ONCE):
            rows.append(self._some([text[:_LONGEST] or " " for text in texts[begin : begin + _AT_ONCE]]))
        widths = {each.shape[1] for each in rows}
        if len(widths) > 1:
            raise EmbedderError(f"{self._url} gave vectors of different lengths: {sorted(widths)}")
        out = numpy.concatenate(rows)
        largest = abs(out).max(axis=1, keepdims=True)
        if not largest.all():
            raise EmbedderError(
                f"{self._url} gave a vector of zeros, which points nowhere; is {self._model!r} a model for embeddings?"
            )
        out /= largest  # so that no square is beyond a float
        out = (out / numpy.linalg.norm(out, axis=1, keepdims=True)).astype(numpy.float32)
        different = {" ".join(text[:_BEGINNING].casefold().split()) for text in texts}
        if len(different) > 1 and numpy.allclose(out, out[0], atol=1e-6):
            raise EmbedderError(
                f"{self._url} gave one and the same vector for {len(different)} different texts; is {self._model!r} a model "
                "for embeddings?"
            )
        return out

    def _some(self, texts: Sequence[str]) -> Any:
        import numpy
        import orjson

        try:
            answer = orjson.loads(self._post({"model": self._model, "input": list(texts), "encoding_format": "float"}))
            data = sorted(answer["data"], key=lambda each: each["index"])
            out = numpy.array([each["embedding"] for each in data], numpy.float64)
        except (ValueError, TypeError, KeyError) as error:
            raise EmbedderError(f"{self._url} gave no embeddings: {type(error).__name__}") from None
        if out.ndim != 2 or len(out) != len(texts) or not out.shape[1] or not math.isfinite(float(abs(out).sum())):
            raise EmbedderError(f"{self._url} gave {len(out)} embeddings for {len(texts)} texts, or some that are none")
        return out

    def _post(self, body: dict[str, Any]) -> bytes:
        """The answer's bytes; its whole time is bounded, not only the time between two pieces of it."""
        import httpx2

        until = time.monotonic() + self._timeout_s
        content = bytearray()
        try:
            with self._client.stream("POST", f"{self._url}/embeddings", json=body) as response:
                if response.status_code != 200:
                    kind = TextsRefused if response.status_code in _REFUSALS else EmbedderError
                    raise kind(f"{self._url} answered {response.status_code}")
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) > _LARGEST:
                        raise EmbedderError(f"{self._url} answered with more than {_LARGEST >> 20} MiB")
                    if time.monotonic() > until:
                        raise EmbedderError(f"{self._url} gave no whole answer within {self._timeout_s:g} s")
        except cast(Any, httpx2).TimeoutException:
            raise EmbedderError(f"{self._url} gave no answer within {self._timeout_s:g} s") from None
        except cast(Any, httpx2).HTTPError as error:
            raise EmbedderError(f"{self._url} cannot be reached: {type(error).__name__}") from None
        return bytes(content)
