"""Fixtures: a workspace next to inaccessible folders, and its file service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from handrail.contract.tool.requires import Capability
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots


@dataclass
class RecordingAccessCheck:
    """Allows everything but what a test refuses, and remembers what it was asked."""

    refuse: dict[str, str] = field(default_factory=dict[str, str])
    asked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def __call__(self, capability: Capability, target: str | Sequence[str]) -> str | None:
        assert isinstance(target, str)
        self.asked.append((capability, target))
        return self.refuse.get(target)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """``ws`` next to a folder of secrets with a similar name."""
    folder = tmp_path.resolve() / "ws"
    folder.mkdir()
    secret = tmp_path / "ws_secret"
    secret.mkdir()
    (secret / "key").write_text("TOP-SECRET")
    return folder


@pytest.fixture
def judge() -> RecordingAccessCheck:
    return RecordingAccessCheck()


@pytest.fixture
def seen() -> SeenFileHashes:
    return SeenFileHashes()


@pytest.fixture
def files(workspace: Path, judge: RecordingAccessCheck, seen: SeenFileHashes) -> RootedFiles:
    return RootedFiles(SessionRoots(workspace), seen, judge)
