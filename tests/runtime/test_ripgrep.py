"""The choice of the ripgrep program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from handrail.contract.errors import ToolError
from handrail.runtime import ripgrep
from handrail.runtime.ripgrep import find_ripgrep

pytestmark = pytest.mark.proves("T-08")


def test_a_ripgrep_outside_the_workspace_is_preferred_to_one_inside(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_other = find_ripgrep(str(workspace), confined=True)
    planted, placed = workspace / "bin" / "rg", tmp_path / "elsewhere" / "rg"
    for copy in (planted, placed):
        copy.parent.mkdir()
        shutil.copy(any_other, copy)
    real = str(placed)
    monkeypatch.setenv("PATH", f"{planted.parent}:{placed.parent}")
    assert find_ripgrep(str(workspace), confined=False) == real
    assert find_ripgrep(str(workspace), confined=True) == real


def test_the_packaged_ripgrep_runs_when_path_has_none(
    tmp_path: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    found = find_ripgrep(str(workspace), confined=True)
    assert subprocess.run([found, "--version"], capture_output=True, check=True).stdout.startswith(b"ripgrep ")
    monkeypatch.setattr(ripgrep, "_PROGRAM_NAME", "no-such-program")
    with pytest.raises(ToolError, match="install ripgrep"):
        find_ripgrep(str(workspace), confined=True)
