"""Documents and an embedder for search tests without a model or network."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from handrail.catalog.embedders.embedder_protocol import EmbedderError
from handrail.catalog.search.lexical_index import SearchableTool
from handrail.catalog.search.word_analysis import extract_stemmed_terms

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder_protocol import Vectors


def tool(name: str, description: str = "", **parameters: str) -> SearchableTool:
    """A document whose parameters are strings with these descriptions."""
    properties = {each: {"type": "string", "description": text} for each, text in parameters.items()}
    return SearchableTool(name, description, {"type": "object", "properties": properties})


WEATHER = tool("get_weather", "Current weather and forecast for a place.", city="The city.")
MAIL = tool("email.send", "Sends an e-mail to one or more recipients.", to="Who gets it.", subject="Its subject.")
STOCK = tool("stockPrice", "Latest price of a share by its symbol.", symbol="Ticker of the company.")
HOTEL = tool("book_hotel", "Reserves a room in a hotel.", city="Where.", nights="How many nights.")
ALL = (WEATHER, MAIL, STOCK, HOTEL)


class HashEmbedder:
    """A small real embedder: each term has a direction derived from its hash.

    :param until: waited for before each encoding, where given
    """

    width = 64

    def __init__(self, until: threading.Event | None = None, name: str = "directions") -> None:
        self.fingerprint = name
        self.encoded: list[str] = []
        self.until = until
        self.entered = threading.Event()
        self.broken = ""

    def load(self) -> None:
        pass

    def encode(self, texts: Sequence[str]) -> Vectors:
        self.entered.set()
        if self.until is not None:
            self.until.wait()
        if self.broken:
            raise EmbedderError(self.broken)
        self.encoded.extend(texts)
        out = numpy.stack([self._of(text) for text in texts])
        return (out / numpy.maximum(numpy.linalg.norm(out, axis=1, keepdims=True), 1e-9)).astype(numpy.float32)

    def _of(self, text: str) -> Any:
        total = numpy.full(self.width, 0.1)
        for term in extract_stemmed_terms(text):
            seed = int.from_bytes(hashlib.sha256(term.encode()).digest()[:8])
            total = total + numpy.random.default_rng(seed).standard_normal(self.width)
        return total
