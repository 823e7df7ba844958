"""Fixtures: a kernel with the test tools, and an output shaper with real folders."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from tests.arbiter.shaping import ShaperFixture
from tests.arbiter.toolbox import ALLOW, TOOLS, gate

from handrail import Kernel, Session
from handrail.testing.scripted_kernel import temporary_kernel


@pytest.fixture(autouse=True)
def a_fresh_gate() -> None:
    gate.__init__()


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncGenerator[Kernel]:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=ALLOW, settings="[limits]\ngrace_ms = 20\n") as opened:
        yield opened


@pytest.fixture
async def session(kernel: Kernel) -> Session:
    return await kernel.session()


@pytest.fixture
def room(tmp_path: Path) -> ShaperFixture:
    return ShaperFixture(tmp_path)


@pytest.fixture
def new_room(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ShaperFixture]:
    def new(**secrets: str) -> ShaperFixture:
        return ShaperFixture(tmp_path_factory.mktemp("room"), **secrets)

    return new
