"""The choice of the embedder for semantic search: the local model, an endpoint, fastembed, one of a package, or none."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from handrail.catalog.embedders.embedder_protocol import EmbedderError, EmbeddingTextsRejected, disable_onnx_telemetry
from handrail.contract.struct import Struct
from handrail.origins.import_guard import can_import_module
from handrail.store.entry_point_cache import list_entry_points_outside_workspaces as of_group

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder_protocol import Embedder, Vectors
    from handrail.catalog.search.cache import SearchCache
    from handrail.catalog.search.encoder_thread import EncoderThread


ENTRY_POINT_GROUP = "handrail.embedders"
"""The group of entry points. Each is an :class:`~handrail.catalog.embedders.embedder_protocol.Embedder`, or makes one without arguments."""
LOCAL, NONE, ENDPOINT, FASTEMBED = "local", "none", "endpoint", "fastembed"
SHIPPED_EMBEDDERS = (LOCAL, NONE, ENDPOINT, FASTEMBED)

_ENDPOINT_HANG_S = 5.0
"""The maximum wait for an answer from an endpoint at shutdown, in seconds."""


class EmbedderSettings(Struct, frozen=True):
    """The operator's choice of an embedder.

    :param name: one of :data:`SHIPPED_EMBEDDERS`, or an entry point of :data:`ENTRY_POINT_GROUP`
    :param url: the URL of the endpoint
    :param model: the model of the endpoint or of fastembed
    :param key: the API key of the endpoint
    :param why_none: the reason to report if the name is :data:`NONE`
    """

    name: str = LOCAL
    url: str = ""
    model: str = ""
    key: str | None = None
    why_none: str = "semantic search is turned off by embedder = 'none' in [search]"

    def __repr__(self) -> str:
        return f"<embedder {self.name}>"


def list_installed_entry_points() -> Iterable[metadata.EntryPoint]:
    """Return the entry points of the packages in this environment."""
    return of_group(ENTRY_POINT_GROUP)


def make_encoder_factory(
    chosen: EmbedderSettings, entry_points: Callable[[], Iterable[metadata.EntryPoint]] = list_installed_entry_points
) -> Callable[[SearchCache | None], tuple[EncoderThread | None, str]]:
    """Return a function that makes the encoder for the first index, or returns why there is none."""

    def made(cache: SearchCache | None) -> tuple[EncoderThread | None, str]:
        try:
            embedder, why = make_embedder(chosen, entry_points)
        except EmbedderError as error:
            return None, str(error)
        if embedder is None:
            return None, why
        from handrail.catalog.search.encoder_thread import HANGS_S, EncoderThread

        return EncoderThread(embedder, cache, hangs_s=_ENDPOINT_HANG_S if chosen.name == ENDPOINT else HANGS_S), ""

    return made


def make_embedder(
    chosen: EmbedderSettings, entry_points: Callable[[], Iterable[metadata.EntryPoint]] = list_installed_entry_points
) -> tuple[Embedder | None, str]:
    """Return the chosen embedder, or the reason why there is none.

    :raises EmbedderError: if it cannot be made
    """
    match chosen.name:
        case "none":
            return None, chosen.why_none
        case "local":
            from handrail.catalog.embedders import minilm

            return (
                (None, why)
                if (why := minilm.explain_model_unavailable()) is not None
                else (minilm.MiniLMEmbedder(), "")
            )
        case "endpoint":
            return EndpointEmbedder(chosen.url, chosen.model, key=chosen.key), ""
        case "fastembed":
            return FastEmbedEmbedder(chosen.model) if chosen.model else FastEmbedEmbedder(), ""
        case name:
            return _load_package_embedder(name, entry_points)


def _load_package_embedder(
    name: str, entry_points: Callable[[], Iterable[metadata.EntryPoint]]
) -> tuple[Embedder | None, str]:
    points = {point.name: point for point in sorted(entry_points(), key=lambda one: one.value, reverse=True)}
    if name not in points:
        there = ", ".join((*SHIPPED_EMBEDDERS, *sorted(points)))
        return None, f"unknown embedder {name!r}; the value of embedder in [search] is one of {there}"
    try:
        found: Any = points[name].load()
        if isinstance(found, type) or not hasattr(found, "encode"):
            found = found()
    except Exception as error:
        return None, f"the embedder {name!r} failed to load: {type(error).__name__}: {error}"
    if not (callable(getattr(found, "encode", None)) and isinstance(getattr(found, "fingerprint", None), str)):
        return None, f"the embedder {name!r} is a {type(found).__name__}; expected fingerprint, load() and encode()"
    return found, ""


# Embeddings from any endpoint that speaks OpenAI's ``POST /embeddings``: a provider, Ollama, vLLM, llama.cpp.
#
# The texts of tools and the search requests leave the machine for that endpoint; nothing else does.

_AT_ONCE = 64
_LARGEST = 64 << 20
_LONGEST = 8_000
"""The maximum characters of one text in a request."""
_REFUSALS = (400, 413, 422, 500)
"""The status codes for a text beyond the model's length, or for too many texts at once; 500 is from llama.cpp."""
_BEGINNING = 400
"""Texts that differ within this many characters certainly look different to a model."""


class EndpointEmbedder:
    """An :class:`~handrail.catalog.embedders.embedder_protocol.Embedder` over HTTP.

    :param url: the URL without ``/embeddings``: ``http://localhost:11434/v1``
    :param model: the endpoint's name of the model
    :param key: sent as a bearer token; never part of a message
    :param timeout_s: the maximum time for a whole answer. A search waits less (a few seconds at most), and then uses words only
    :raises EmbedderError: if the URL is invalid, or ``httpx2`` is not installed
    """

    def __init__(self, url: str, model: str, *, key: str | None = None, timeout_s: float = 20.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EmbedderError(f"{url!r} is not a valid endpoint URL; write http://host[:port]/path")
        if parts.username is not None or parts.password is not None:
            raise EmbedderError("the endpoint URL contains credentials; set the key separately")
        if not can_import_module("httpx2"):
            raise EmbedderError("an embedding endpoint needs httpx2: pip install httpx2")
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
            rows.append(self._encode_batch([text[:_LONGEST] or " " for text in texts[begin : begin + _AT_ONCE]]))
        widths = {each.shape[1] for each in rows}
        if len(widths) > 1:
            raise EmbedderError(f"{self._url} returned vectors of different lengths: {sorted(widths)}")
        out = numpy.concatenate(rows)
        largest = abs(out).max(axis=1, keepdims=True)
        if not largest.all():
            raise EmbedderError(
                f"{self._url} returned a vector of zeros; check that {self._model!r} is an embedding model"
            )
        out /= largest  # so that no square overflows
        out = (out / numpy.linalg.norm(out, axis=1, keepdims=True)).astype(numpy.float32)
        different = {" ".join(text[:_BEGINNING].casefold().split()) for text in texts}
        if len(different) > 1 and numpy.allclose(out, out[0], atol=1e-6):
            raise EmbedderError(
                f"{self._url} returned the same vector for {len(different)} different texts; check that {self._model!r} is an "
                "embedding model"
            )
        return out

    def _encode_batch(self, texts: Sequence[str]) -> Any:
        import numpy
        import orjson

        try:
            answer = orjson.loads(self._post({"model": self._model, "input": list(texts), "encoding_format": "float"}))
            data = sorted(answer["data"], key=lambda each: each["index"])
            out = numpy.array([each["embedding"] for each in data], numpy.float64)
        except (ValueError, TypeError, KeyError) as error:
            raise EmbedderError(f"{self._url} returned no embeddings: {type(error).__name__}") from None
        if out.ndim != 2 or len(out) != len(texts) or not out.shape[1] or not math.isfinite(float(abs(out).sum())):
            raise EmbedderError(f"{self._url} returned {len(out)} embeddings for {len(texts)} texts, or invalid ones")
        return out

    def _post(self, body: dict[str, Any]) -> bytes:
        """Return the bytes of the answer. The time-out covers the whole answer, not only the pauses in it."""
        import httpx2

        until = time.monotonic() + self._timeout_s
        content = bytearray()
        try:
            with self._client.stream("POST", f"{self._url}/embeddings", json=body) as response:
                if response.status_code != 200:
                    kind = EmbeddingTextsRejected if response.status_code in _REFUSALS else EmbedderError
                    raise kind(f"{self._url} answered with status {response.status_code}")
                for piece in response.iter_bytes():
                    content += piece
                    if len(content) > _LARGEST:
                        raise EmbedderError(f"{self._url} answered with more than {_LARGEST >> 20} MiB")
                    if time.monotonic() > until:
                        raise EmbedderError(f"{self._url} did not complete its answer within {self._timeout_s:g} s")
        except cast(Any, httpx2).TimeoutException:
            raise EmbedderError(f"{self._url} did not answer within {self._timeout_s:g} s") from None
        except cast(Any, httpx2).HTTPError as error:
            raise EmbedderError(f"{self._url} cannot be reached: {type(error).__name__}") from None
        return bytes(content)


# Any model of the library ``fastembed``, which has its own runtime and downloads the model at first use.

_BATCH = 8


class FastEmbedEmbedder:
    """An :class:`~handrail.catalog.embedders.embedder_protocol.Embedder` over ``fastembed.TextEmbedding``.

    :param model: fastembed's name of the model
    :param threads: the threads of its runtime
    :raises EmbedderError: if fastembed is not installed
    """

    def __init__(self, model: str = "BAAI/bge-small-en-v1.5", *, threads: int = 1) -> None:
        if not can_import_module("fastembed"):
            raise EmbedderError("fastembed is not installed: pip install fastembed")
        self._model, self._threads = model, threads
        self._held: Any = None

    @property
    def fingerprint(self) -> str:
        return f"fastembed/{self._model}"

    def load(self) -> None:
        if self._held is None:
            disable_onnx_telemetry()  # it is built on ONNX Runtime
            try:
                self._held = import_module("fastembed").TextEmbedding(self._model, threads=self._threads)
            except Exception as error:
                raise EmbedderError(f"fastembed cannot load {self._model}: {error}") from error

    def encode(self, texts: Sequence[str]) -> Vectors:
        self.load()
        import numpy

        out = numpy.stack(list(self._held.embed(list(texts), batch_size=_BATCH))).astype(numpy.float32)
        return out / numpy.maximum(numpy.linalg.norm(out, axis=1, keepdims=True), 1e-12)
