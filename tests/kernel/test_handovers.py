"""The lease holder is killed repeatedly under load: no acknowledged effect is lost or repeated."""

from __future__ import annotations

import os
from itertools import cycle
from pathlib import Path

import pytest
from tests.kernel.handovers import handovers

KILLS = int(os.environ.get("HANDRAIL_SOAK_KILLS", "1000"))
"""Of the long form. Read here, before tests are given an environment of their own."""


async def storm(folder: Path, *, kills: int, others_every: int, verify_every: int, seed: int) -> None:
    async with handovers(folder, seed=seed) as shared:
        others = cycle((shared.leave, shared.pause, shared.leave, shared.pause_in_a_write))
        for number in range(1, kills + 1):
            await shared.kill()
            if number % others_every == 0:
                await next(others)()
            if number % verify_every == 0:
                shared.verify()
        await shared.finish()
        print(f"{kills} kills; {shared.told()}")


@pytest.mark.proves("L-07", "G-05")
async def test_eight_kills_of_the_holder_lose_no_call_and_repeat_none(tmp_path: Path) -> None:
    await storm(tmp_path / "storm", kills=8, others_every=2, verify_every=1, seed=7)


@pytest.mark.slow
@pytest.mark.timeout(max(3600, 8 * KILLS))
async def test_a_thousand_kills_of_the_holder_lose_no_call_and_repeat_none(tmp_path: Path) -> None:
    for part in range(-(-KILLS // 100)):  # so that what is looked through stays small
        await storm(
            tmp_path / str(part), kills=min(100, KILLS - 100 * part), others_every=5, verify_every=20, seed=part
        )
