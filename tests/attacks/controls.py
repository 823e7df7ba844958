"""Control experiments: each probe succeeds where nothing confines it.

In the outer sandbox, like everything else here. A probe that sees nothing there would see nothing anywhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from tests.attacks.case import Case
from tests.attacks.victim import VictimHome


def controls(cases: Iterable[Case]) -> list[Case]:
    """Return a case for each one with a control: it passes if the probe succeeds."""
    return [replace(case, tried=_control_of(case), harmless=False) for case in cases if case.control is not None]


def _control_of(case: Case):
    async def tried(home: VictimHome) -> str | None:
        assert case.control is not None
        said = await asyncio.to_thread(home.unconfined, case.control)
        return None if case.sign in said else f"unconfined it did not reach its aim either: {said[-800:]!r}"

    return tried
