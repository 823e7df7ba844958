"""The learned adjustment from requests to tools: similar requests find similar tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from handrail.catalog.search.vector_index import LabelledToolRequests, RequestVectorAdapter

WIDTH = 6


def unit(*at: int) -> Any:
    return numpy.eye(WIDTH, dtype=numpy.float32)[list(at)]


def plain() -> Any:
    """An adapter that leaves every request as it is."""
    rows = numpy.zeros((3, WIDTH), numpy.float32)
    rows[0, 0] = 1
    return rows


def test_an_adapted_request_vector_moves_towards_tools_that_served_similar_requests() -> None:
    turn = RequestVectorAdapter(plain(), [LabelledToolRequests(unit(0, 1), unit(3, 4), numpy.array([0, 1]))])
    turned = turn(unit(0))
    assert numpy.linalg.norm(turned) == pytest.approx(1)
    assert turned[0, 0] > turned[0, 3] > 0.4
    assert turned[0, 4] == pytest.approx(0, abs=1e-6)


def test_a_request_vector_unlike_all_known_requests_stays_unchanged() -> None:
    turn = RequestVectorAdapter(plain(), [LabelledToolRequests(unit(0, 1), unit(3, 4), numpy.array([0, 1]))])
    assert turn(unit(2)) == pytest.approx(unit(2))
    assert turn(-unit(0)) == pytest.approx(-unit(0))


def test_a_saved_request_adapter_loads_with_nearly_equal_results(tmp_path: Path) -> None:
    choose = numpy.random.default_rng(1)
    rows = choose.standard_normal((7, WIDTH)).astype(numpy.float32)
    rows /= numpy.linalg.norm(rows, axis=1, keepdims=True)
    turn = RequestVectorAdapter(
        plain(),
        [
            LabelledToolRequests(rows, unit(3, 4), choose.integers(0, 2, 7)),
            LabelledToolRequests(unit(1), unit(5), numpy.array([0])),
        ],
    )
    turn.save(tmp_path / "turn.npz")
    again = RequestVectorAdapter.load(tmp_path / "turn.npz")
    assert (again(rows) * turn(rows)).sum(axis=1).min() > 0.999


def test_the_shipped_adapter_keeps_the_shape_of_request_vectors() -> None:
    turn = RequestVectorAdapter.load_shipped()
    asked = turn.served[1].requests[:5]
    assert len(turn.served) == 2 and turn(asked).shape == asked.shape
