"""Fixtures for the built-in tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tools.desk import BuiltinToolFixture, SessionValues
from tests.tools.repositories import Repo, create_repository

from handrail.runtime.call_runtime import SessionSharedServices
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.guard.guarded_sandbox import GuardedSandbox
from handrail.sandbox.tier_probe import choose_sandbox


@pytest.fixture
def desk(tmp_path: Path) -> BuiltinToolFixture:
    place = tmp_path.resolve()
    for name in ("ws", "scratch", "output"):
        (place / name).mkdir()
    return BuiltinToolFixture(
        SessionSharedServices(
            session_id="session-1",
            agent="default",
            workdir=str(place / "ws"),
            scratch=str(place / "scratch"),
            roots=SessionRoots(place / "ws", [place / "output"]),
            sandbox=choose_sandbox(),
            values=SessionValues(),
        )
    )


@pytest.fixture
def confined(desk: BuiltinToolFixture) -> BuiltinToolFixture:
    """The same where programs can be confined."""
    if not desk.around.sandbox.tier.is_confining:
        pytest.skip(desk.around.sandbox.tier.detail)
    return desk


@pytest.fixture
def repo(confined: BuiltinToolFixture) -> Repo:
    """The workspace as a repository, where programs are kept from what is protected."""
    confined.around.sandbox = GuardedSandbox(confined.around.sandbox)
    confined.around.quarantine = str(confined.workspace.parent / "quarantine")
    return create_repository(confined.workspace)
