"""Entry points of packages are read again only after an installation, change or removal."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest

from handrail.store.entry_point_cache import list_entry_points_outside_workspaces

GROUP = "handrail.test_entry_points"


def _install(place: Path, name: str, *points: str) -> None:
    folder = place / f"{name}-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\n" + "".join(f"{point} = {name}:x\n" for point in points))


def _names() -> list[str]:
    return sorted(point.name for point in list_entry_points_outside_workspaces(GROUP))


def test_an_installed_package_is_listed_until_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert _names() == []
    _install(tmp_path, "one", "a")
    assert _names() == ["a"]
    _install(tmp_path, "two", "b")
    assert _names() == ["a", "b"]
    _install(tmp_path, "one", "a", "c")
    assert _names() == ["a", "b", "c"]
    shutil.rmtree(tmp_path / "two-1.0.dist-info")
    assert _names() == ["a", "c"]
    os.rename(tmp_path / "one-1.0.dist-info", tmp_path / "one")
    assert _names() == []


def test_entry_points_follow_changes_of_the_python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "one", "a")
    assert _names() == []
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert _names() == ["a"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path[:-1]])
    assert _names() == ["a"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert _names() == []


def test_unchanged_entry_points_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    _install(tmp_path, "one", "a")
    assert _names() == ["a"]
    monkeypatch.setattr(metadata, "entry_points", None)
    assert _names() == ["a"]
    assert list_entry_points_outside_workspaces(f"{GROUP}.others") == ()
