"""Fixtures: a workspace and the operator's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.config.places import Layers


@pytest.fixture
def layers(tmp_path: Path) -> Layers:
    return Layers.beneath(tmp_path)
