"""Which embedder is chosen, and what is said where it cannot be had."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import numpy
import pytest

from handrail.catalog.embedders import GROUP, Chosen, encoder_of


class Letters:
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
    module.letters = Letters()  # type: ignore[attr-defined]
    module.Letters = Letters  # type: ignore[attr-defined]
    module.wrong = lambda: 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "handrail_test_embedders", module)
    values = {"ready": "letters", "made": "Letters", "odd": "wrong", "gone": "nothing"}
    return [EntryPoint(name, f"handrail_test_embedders:{value}", GROUP) for name, value in values.items()]


@pytest.mark.proves("R-09", "D-07")
@pytest.mark.parametrize("name", ["ready", "made"])
def test_packages_add_embedders_by_entry_points(points: list[EntryPoint], name: str) -> None:
    encoder, why = encoder_of(Chosen(name), lambda: points)(None)
    assert encoder is not None and why == ""
    try:
        (vector,) = encoder.request(["aab"], 60) or []
        assert vector.shape == (3,)
    finally:
        encoder.close()


@pytest.mark.proves("D-07")
@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        (Chosen("none"), "turned off"),
        (Chosen("none", why_none="the key is not known"), "the key is not known"),
        (Chosen("nobodys"), "there is no embedder 'nobodys'; embedder under [search] is one of local, none, endpoint"),
        (Chosen("odd"), "is a int; expected fingerprint, load() and encode()"),
        (Chosen("gone"), "cannot be made: AttributeError"),
        (Chosen("endpoint", url="ftp://x", model="m"), "is no address of an endpoint"),
        (Chosen("endpoint", url="http://me:key@x/v1", model="m"), "not inside its address"),
        (Chosen("fastembed"), "fastembed is not installed"),
    ],
)
def test_one_that_cannot_be_had_leaves_a_search_by_words_and_says_why(
    points: list[EntryPoint], chosen: Chosen, why: str
) -> None:
    encoder, told = encoder_of(chosen, lambda: points)(None)
    assert encoder is None and why in told


def test_a_key_is_in_no_representation() -> None:
    assert "hunter2" not in repr(Chosen("endpoint", "https://x", "m", "hunter2"))
