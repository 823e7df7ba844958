"""Fixtures: a kernel to attack, and a runner for probes that first checks the namespaces."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.attacks.outer import NAMESPACES
from tests.attacks.victim import AgreeingUser

from handrail.contract.session_protocols import Session
from handrail.kernel.kernel_interface import Kernel
from handrail.sandbox import tier_probe
from handrail.testing.scripted_kernel import temporary_kernel


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The folder of ``ws``, ``state`` and ``config``, next to a secret."""
    folder = tmp_path.resolve()
    (folder / "ws").mkdir()
    (folder / "beside").mkdir()
    (folder / "beside" / "key").write_text("TOP-SECRET")
    return folder


@pytest.fixture
async def kernel(place: Path) -> AsyncIterator[Kernel]:
    """A kernel whose commands ask, so that the approved ones meet the whole sandbox, and not the narrow one of confined calls."""
    async with temporary_kernel(place, rules=["ask effect:external"]) as opened:
        yield opened


@pytest.fixture
async def session(kernel: Kernel) -> Session:
    return await kernel.session(approval_handler=AgreeingUser())


@pytest.fixture
def confining() -> None:
    """For what runs programs: elsewhere they are withheld, and nothing is put to the test."""
    tier = tier_probe.probe_tier()
    if not tier.is_confining:
        pytest.skip(f"this machine cannot confine programs: {tier.detail[:200]}")


Probe = Callable[[str], Awaitable[str]]


@pytest.fixture
async def probe(confining: None, session: Session) -> Probe:
    """Run a command with the bash tool in a session that approves all calls, and return its output."""

    async def run(command: str) -> str:
        result = await session.call("bash", {"command": command, "timeout_ms": 60_000})
        assert result.ok, result.error_text
        return str(result.data["output"])

    inside = (await run("readlink " + " ".join(f"/proc/self/ns/{name}" for name in NAMESPACES))).split()
    outside = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    assert len(inside) == len(outside)
    assert not set(inside) & set(outside), "the probe would run on the machine itself"
    return run
