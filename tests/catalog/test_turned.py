"""What the index makes of an embedder that knows how requests lie to tools, and what there is elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.catalog.texts_of import HOTEL, MAIL, STOCK, Directions

from handrail.catalog.search.encoder_thread import EncoderThread
from handrail.catalog.search.tool_search_index import ToolIndex

if TYPE_CHECKING:
    from handrail.catalog.embedders.embedder_protocol import Vectors


class Turned(Directions):
    """As the local model, one that knows how requests lie to tools."""

    def adapt_request_vectors(self, requests: Vectors) -> Vectors:
        return requests

    def adapt_tool_vectors(self, tools: Vectors) -> Vectors:
        return tools

    def compute_common_tool_vectors(self) -> Vectors:
        return self.encode(["another thing"])


class Elsewhere(Turned):
    """One that knows a tool which the catalogue has not."""

    def compute_common_tool_vectors(self) -> Vectors:
        return self.encode(["weather"])


def test_a_request_for_what_others_have_and_this_catalogue_has_not_is_less_likely_to_be_served() -> None:
    told: list[float] = []
    for embedder in (Turned(), Elsewhere()):
        encoder = EncoderThread(embedder)
        index = ToolIndex([MAIL, STOCK, HOTEL], encoder=encoder)
        assert index.wait_until_complete(60)
        told.append(index.search("the weather for my stock", patience_s=60).fit_probability)
        encoder.close(10)
    assert told[1] < told[0] / 2


@pytest.mark.parametrize(("embedder", "also"), [(Turned(), True), (Directions(), False)])
def test_requests_are_read_by_their_telling_words_too_where_that_was_measured(embedder: Directions, also: bool) -> None:
    encoder = EncoderThread(embedder)
    found = encoder.encode_query(["could you tell me whether it will rain"], 100)
    encoder.close(10)
    assert found is not None
    assert ("whether rain" in embedder.encoded) == also
