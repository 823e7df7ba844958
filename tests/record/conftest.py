"""Fixture: a separate log for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.store.places import Place

from handrail.record.commit_log import CommitLog
from handrail.store.workspace_store import WorkspaceStore


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.beneath(tmp_path)


@pytest.fixture
async def store(place: Place) -> AsyncIterator[WorkspaceStore]:
    opened = place.open()
    yield opened
    await opened.aclose()


@pytest.fixture
def log(store: WorkspaceStore) -> CommitLog:
    ticks = iter(range(1_000, 10_000_000))
    return CommitLog(store.database, clock=lambda: next(ticks))
