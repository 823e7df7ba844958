"""Choice of the embedder, and the message if it is unavailable."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
from tests.catalog.texts_of import ALL, STOCK, HashEmbedder

from handrail.catalog.embedders.embedder_selection import ENTRY_POINT_GROUP, EmbedderSettings, make_encoder_factory
from handrail.catalog.search.cache import SearchCache
from handrail.catalog.search.encoder_thread import EncoderThread
from handrail.catalog.search.lexical_index import make_embedding_text
from handrail.catalog.search.tool_search_index import ToolIndex


class LetterEmbedder:
    """Counts letters: enough of an embedder to be one."""

    fingerprint = "letters/1"

    def load(self) -> None:
        return None

    def encode(self, texts: Sequence[str]) -> Any:
        rows = numpy.array([[text.count(letter) + 0.1 for letter in "abc"] for text in texts], dtype=numpy.float32)
        return rows / numpy.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    module = ModuleType("handrail_test_embedders")
    module.letters = LetterEmbedder()  # type: ignore[attr-defined]
    module.Letters = LetterEmbedder  # type: ignore[attr-defined]
    module.wrong = lambda: 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "handrail_test_embedders", module)
    values = {"ready": "letters", "made": "Letters", "odd": "wrong", "gone": "nothing"}
    return [EntryPoint(name, f"handrail_test_embedders:{value}", ENTRY_POINT_GROUP) for name, value in values.items()]


@pytest.mark.proves("R-09", "D-07")
@pytest.mark.parametrize("name", ["ready", "made"])
def test_packages_add_embedders_by_entry_points(points: list[EntryPoint], name: str) -> None:
    encoder, why = make_encoder_factory(EmbedderSettings(name), lambda: points)(None)
    assert encoder is not None and why == ""
    try:
        (vector,) = encoder.encode_query(["aab"], 60) or []
        assert vector.shape == (3,)
    finally:
        encoder.close()


@pytest.mark.proves("D-07")
@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        (EmbedderSettings("none"), "turned off"),
        (EmbedderSettings("none", why_none="the key is not known"), "the key is not known"),
        (
            EmbedderSettings("nobodys"),
            "unknown embedder 'nobodys'; the value of embedder in [search] is one of local, none, endpoint",
        ),
        (EmbedderSettings("odd"), "is a int; expected fingerprint, load() and encode()"),
        (EmbedderSettings("gone"), "failed to load: AttributeError"),
        (EmbedderSettings("endpoint", url="ftp://x", model="m"), "is not a valid endpoint URL"),
        (EmbedderSettings("endpoint", url="http://me:key@x/v1", model="m"), "set the key separately"),
        (EmbedderSettings("fastembed"), "fastembed is not installed"),
    ],
)
def test_a_missing_embedder_leaves_a_lexical_search_with_the_reason(
    points: list[EntryPoint], chosen: EmbedderSettings, why: str
) -> None:
    encoder, told = make_encoder_factory(chosen, lambda: points)(None)
    assert encoder is None and why in told


def test_the_repr_of_an_embedder_choice_hides_its_key() -> None:
    assert "hunter2" not in repr(EmbedderSettings("endpoint", "https://x", "m", "hunter2"))


class FaultyEmbedder(HashEmbedder):
    """Gives of one tool its vector times ``factor``, and vectors of ``wide`` numbers, the first few ``missing``."""

    def __init__(self, factor: float = 1.0, wide: int = 64, missing: int = 0) -> None:
        super().__init__(name="faulty")
        self.factor, self.width, self.missing = factor, wide, missing

    def encode(self, texts: Sequence[str]) -> Any:
        rows = super().encode(texts)
        rows[[make_embedding_text(STOCK).startswith(text) for text in texts]] *= self.factor
        return rows[self.missing :]


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.proves("D-07")
def test_a_tool_with_an_invalid_vector_is_searched_by_words_without_affecting_others(factor: float) -> None:
    index = ToolIndex(ALL, encoder=EncoderThread(FaultyEmbedder(factor)))
    assert index.wait_until_complete(60)
    found = index.search("hotel room")
    assert (found.search_method, found.hits[0].id, found.nothing_fits) == ("lexical and meaning", "book_hotel", False)
    assert "1 tool is searched by words only" in found.note


@pytest.mark.proves("D-07")
def test_vectors_are_compared_by_direction_and_not_by_length() -> None:
    found = [ToolIndex(ALL, encoder=EncoderThread(FaultyEmbedder(factor))) for factor in (1.0, 1e30)]
    assert all(index.wait_until_complete(60) for index in found)
    one, other = (index.search("price of a share").hits for index in found)
    assert [hit.id for hit in one] == [hit.id for hit in other]


@pytest.mark.proves("D-07")
def test_an_embedder_that_returns_too_few_vectors_is_reported() -> None:
    index = ToolIndex(ALL, encoder=EncoderThread(FaultyEmbedder(missing=1)))
    assert not index.wait_until_complete()
    assert "expected one row for each text" in index.search("hotel room").note


@pytest.mark.proves("D-07")
def test_a_changed_model_under_the_same_name_is_reported_and_encoded_at_next_start(tmp_path: Path) -> None:
    def notes(wide: int) -> str:
        encoder = EncoderThread(FaultyEmbedder(wide=wide), SearchCache(tmp_path))
        index = ToolIndex(ALL, encoder=encoder)
        index.wait_until_complete(60)
        found = index.search("hotel room")
        encoder.close(60)
        return found.note

    assert notes(64) == ""
    assert "vectors of 32 numbers instead of 64" in notes(32)
    assert notes(32) == ""
