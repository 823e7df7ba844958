"""Fixtures: a separate workspace and state folder for each test."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.store.places import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.beneath(tmp_path)
