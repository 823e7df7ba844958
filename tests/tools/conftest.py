"""The desk that the built-in tools are tried at."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tools.desk import Desk, Memory
from tests.tools.repositories import Repo, made

from handrail.runtime.files.roots import Roots
from handrail.runtime.guard.guard import Guarded
from handrail.runtime.surface import Surroundings
from handrail.sandbox.tiers import choose


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    place = tmp_path.resolve()
    for name in ("ws", "scratch", "output"):
        (place / name).mkdir()
    return Desk(
        Surroundings(
            session_id="session-1",
            agent="default",
            workdir=str(place / "ws"),
            scratch=str(place / "scratch"),
            roots=Roots(place / "ws", [place / "output"]),
            sandbox=choose(),
            values=Memory(),
        )
    )


@pytest.fixture
def confined(desk: Desk) -> Desk:
    """The same where programs can be confined."""
    if not desk.around.sandbox.tier.confines:
        pytest.skip(desk.around.sandbox.tier.detail)
    return desk


@pytest.fixture
def repo(confined: Desk) -> Repo:
    """The workspace as a repository, where programs are kept from what is protected."""
    confined.around.sandbox = Guarded(confined.around.sandbox)
    confined.around.quarantine = str(confined.workspace.parent / "quarantine")
    return made(confined.workspace)
