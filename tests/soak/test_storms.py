"""The long storm of calls; the short one is in the tests of the session."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from tests.session.storm import RULES, SETTINGS, TOOLS, storm

from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("error")
async def test_ten_thousand_randomly_interrupted_calls_leave_no_objects_in_memory(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=RULES, settings=SETTINGS) as kernel:
        sizes: list[int] = []
        for seed in range(10):
            found = await storm(kernel, seed, calls=1_000)
            assert found.made >= 1_000
            for session in found.sessions:
                await session.close()
            del found
            kernel.own_context.authority._prepared.clear()  # pyright: ignore[reportPrivateUsage] - bounded, and not yet full
            gc.collect()
            sizes.append(len(gc.get_objects()))
        assert sizes[-1] < sizes[2] + 2_000, sizes
