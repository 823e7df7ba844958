"""Calls of every kind with random stops and cancellations: one answer each, complete records, nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.session.storm import RULES, SETTINGS, TOOLS, storm

from handrail.testing.scripted_kernel import temporary_kernel


@pytest.mark.proves("L-01", "L-06", "X-08")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_every_call_is_answered_once_under_random_stops_and_cancellations(tmp_path: Path, seed: int) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES, settings=SETTINGS) as kernel:
        found = await storm(kernel, seed, calls=300)
        assert {"output", "timeout", "invalid_input", "unknown_tool"} <= set(found.kinds)
        assert found.cancelled > 0
