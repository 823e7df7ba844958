"""Detection of the enforceable layers, and the advice if one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sandbox.conftest import SandboxFolders

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Sandbox
from handrail.origins import program_lookup
from handrail.sandbox import bubblewrap, tier_probe
from handrail.sandbox.start import spawn


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    """Choose again here and after this test: no other test may use a cached choice."""
    tier_probe.choose_sandbox.cache_clear()
    yield
    tier_probe.choose_sandbox.cache_clear()


def program(place: Path, text: str) -> str:
    path = place / "bwrap"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_sandbox_tier_of_this_machine_comes_from_a_probe(sandbox: Sandbox) -> None:
    tier = tier_probe.probe_tier()
    assert (tier.name, tier.is_confining) == ("bubblewrap", True)
    assert tier == sandbox.tier


def test_a_bubblewrap_that_confines_nothing_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that only runs its program, in the machine's own namespaces."""
    fake = program(tmp_path, 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    monkeypatch.setattr(tier_probe, "find_bubblewrap_programs", lambda: iter([fake]))
    tier = tier_probe.probe_tier()
    assert tier.name == "none"
    assert "it shares the mnt namespace of this machine" in tier.detail


def test_a_bubblewrap_that_fails_is_skipped_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox: Sandbox
) -> None:
    real = list(spawn.find_bubblewrap_programs())
    fake = program(tmp_path, "echo bwrap: setting up uid map: Permission denied >&2; exit 1")
    monkeypatch.setattr(tier_probe, "find_bubblewrap_programs", lambda: iter([fake, *real]))
    assert tier_probe.probe_tier().detail == sandbox.tier.detail
    tier_probe.choose_sandbox.cache_clear()
    monkeypatch.setattr(tier_probe, "find_bubblewrap_programs", lambda: iter([fake]))
    tier = tier_probe.probe_tier()
    assert (tier.name, "uid map" in tier.detail, bool(tier.remedy)) == ("none", True, True)


def test_the_probe_names_the_package_to_install_when_bubblewrap_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_probe, "find_bubblewrap_programs", lambda: iter([]))
    tier = tier_probe.probe_tier()
    assert (tier.name, tier.is_confining) == ("none", False)
    assert "apt install bubblewrap" in tier.remedy


def test_both_shipped_bubblewrap_programs_confine(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for binary in spawn.find_bubblewrap_programs():
        tier_probe.choose_sandbox.cache_clear()
        monkeypatch.setattr(tier_probe, "find_bubblewrap_programs", lambda binary=binary: iter([binary]))
        assert tier_probe.probe_tier().name == "bubblewrap", binary


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces"),
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor"),
    ],
)
def test_the_remedy_names_the_setting(tmp_path: Path, setting: str, value: str, wanted: str) -> None:
    (tmp_path / setting).parent.mkdir()
    (tmp_path / setting).write_text(value + "\n")
    assert wanted in tier_probe.suggest_bubblewrap_remedy("Permission denied", tmp_path, system_bwrap=True)


def test_an_old_bubblewrap_gets_the_remedy_to_install_a_newer_one(tmp_path: Path) -> None:
    assert "0.8 or newer" in tier_probe.suggest_bubblewrap_remedy(
        "bwrap: Unknown option --disable-userns", tmp_path, system_bwrap=True
    )


async def test_a_bubblewrap_in_an_open_workspace_is_neither_chosen_nor_started(
    ground: SandboxFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be the sandbox, and a program in the sandbox could put another in its place."""
    marker = ground.workspace.parent / "marker"
    planted = program(ground.workspace, f": > {marker}; exit 1")
    monkeypatch.setattr(spawn, "SYSTEM_BWRAP", planted)
    assert planted in list(spawn.find_bubblewrap_programs())
    with program_lookup.register_open_workspaces(ground.workspace):
        assert planted not in list(spawn.find_bubblewrap_programs())
        ground.sandbox = bubblewrap.BubblewrapSandbox(planted, tier_probe.SandboxTier("bubblewrap", ""))
        with pytest.raises(ToolError, match="is in an open workspace"):
            await ground.bash("true")
    assert not marker.exists()
