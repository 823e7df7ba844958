"""Fixtures: one workspace and its policy."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.policy.desk import AuthorizerFixture


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> AuthorizerFixture:
    workspace: Path = tmp_path_factory.mktemp("policy") / "ws"
    (workspace / "src").mkdir(parents=True)
    (workspace / "src" / "a.py").write_text("a = 1\n")
    (workspace / ".env").write_text("TOKEN=x\n")
    (workspace / "way-out").symlink_to("/etc")
    return AuthorizerFixture(workspace)
