"""The index with an embedder whose vectors were adjusted to requests, and its fallbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.catalog.texts_of import HOTEL, MAIL, STOCK, HashEmbedder

from handrail.catalog.search.encoder_thread import EncoderThread
from handrail.catalog.search.tool_search_index import ToolIndex

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder_protocol import Vectors


class RotatedEmbedder(HashEmbedder):
    """As the local model, one that knows how requests lie to tools."""

    def adapt_request_vectors(self, requests: Vectors) -> Vectors:
        return requests

    def adapt_tool_vectors(self, tools: Vectors) -> Vectors:
        return tools

    def compute_common_tool_vectors(self) -> Vectors:
        return self.encode(["another thing"])


class Elsewhere(RotatedEmbedder):
    """One that knows a tool which the catalogue has not."""

    def compute_common_tool_vectors(self) -> Vectors:
        return self.encode(["weather"])


def test_a_request_for_tools_outside_the_catalog_gets_a_lower_fit_probability() -> None:
    told: list[float] = []
    for embedder in (RotatedEmbedder(), Elsewhere()):
        encoder = EncoderThread(embedder)
        index = ToolIndex([MAIL, STOCK, HOTEL], encoder=encoder)
        assert index.wait_until_complete(60)
        told.append(index.search("the weather for my stock", patience_s=60).fit_probability)
        encoder.close(10)
    assert told[1] < told[0] / 2


@pytest.mark.parametrize(("embedder", "also"), [(RotatedEmbedder(), True), (HashEmbedder(), False)])
def test_only_a_measured_embedder_also_encodes_the_request_without_filler(embedder: HashEmbedder, also: bool) -> None:
    encoder = EncoderThread(embedder)
    found = encoder.encode_query(["could you tell me whether it will rain"], 100)
    encoder.close(10)
    assert found is not None
    assert ("whether rain" in embedder.encoded) == also
