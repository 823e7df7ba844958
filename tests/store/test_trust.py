"""The user's trust decisions: private to the user, and ignored if replaced."""

from __future__ import annotations

import json
import os
import shutil
import stat

import pytest
from tests.store.places import Place

from handrail.contract.errors import StartError, UsageError
from handrail.store import operator_decisions
from handrail.store.state_folders import prepare_folders

HASH = "ab" * 32
pytestmark = pytest.mark.proves("F-11")


def test_trust_in_a_workspace_lasts_until_it_is_replaced_or_revoked(place: Place) -> None:
    folders = prepare_folders(place.workspace, place.state)
    assert operator_decisions.read_workspace_trust(folders) is None
    operator_decisions.trust_workspace_content(folders, HASH, clock=lambda: 7)
    assert operator_decisions.read_workspace_trust(folders) == operator_decisions.WorkspaceTrust(
        str(folders.workspace), HASH, 7
    )
    operator_decisions.trust_workspace_content(folders, "cd" * 32, clock=lambda: 8)
    found = operator_decisions.read_workspace_trust(folders)
    assert found is not None and found.sha256 == "cd" * 32
    assert operator_decisions.list_trusted_workspaces(place.state) == [found]
    assert operator_decisions.revoke_workspace_trust(folders) and not operator_decisions.revoke_workspace_trust(folders)
    assert (
        operator_decisions.read_workspace_trust(folders) is None
        and operator_decisions.list_trusted_workspaces(place.state) == []
    )


def test_the_trust_file_is_private_and_outside_the_workspace(place: Place) -> None:
    folders = prepare_folders(place.workspace, place.state)
    operator_decisions.trust_workspace_content(folders, HASH, clock=lambda: 7)
    (file,) = place.state.rglob("trust.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and not file.is_relative_to(place.workspace)
    assert [path.name for path in file.parent.iterdir() if "trust" in path.name] == ["trust.json"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "[" * 10_000, '{"version": 1}', "x" * 20_000),
        json.dumps({"version": 2, "workspace": "WS", "sha256": HASH, "at_ns": 1}),
        json.dumps({"version": 1, "workspace": "WS", "sha256": HASH.upper(), "at_ns": 1}),
        json.dumps({"version": 1, "workspace": "WS", "sha256": HASH[:10], "at_ns": 1}),
        json.dumps({"version": 1, "workspace": "/elsewhere", "sha256": HASH, "at_ns": 1}),
        json.dumps({"version": 1, "workspace": ["WS"], "sha256": HASH, "at_ns": 1}),
        json.dumps({"version": 1, "workspace": "WS", "sha256": HASH, "at_ns": "1"}),
    ],
)
def test_an_invalid_trust_record_trusts_nothing(place: Place, text: str) -> None:
    folders = prepare_folders(place.workspace, place.state)
    operator_decisions.trust_workspace_content(folders, HASH, clock=lambda: 7)
    (file,) = place.state.rglob("trust.json")
    file.write_text(text.replace("WS", str(folders.workspace)))
    assert operator_decisions.read_workspace_trust(folders) is None


def test_a_trust_file_that_is_a_link_or_writable_by_others_is_ignored(place: Place) -> None:
    folders = prepare_folders(place.workspace, place.state)
    operator_decisions.trust_workspace_content(folders, HASH, clock=lambda: 7)
    (file,) = place.state.rglob("trust.json")
    file.chmod(0o660)
    assert operator_decisions.read_workspace_trust(folders) is None
    file.chmod(0o600)
    assert operator_decisions.read_workspace_trust(folders) is not None
    moved = file.rename(place.workspace / "trust.json")
    file.symlink_to(moved)
    assert operator_decisions.read_workspace_trust(folders) is None
    file.unlink()
    os.mkfifo(file, 0o600)
    assert operator_decisions.read_workspace_trust(folders) is None  # and nobody waits


def test_only_a_hash_can_be_trusted_and_an_unwritable_state_folder_is_reported(place: Place) -> None:
    folders = prepare_folders(place.workspace, place.state)
    for text in ("", "abc", HASH[:-1] + "g", HASH + "\n"):
        with pytest.raises(UsageError, match="64 hexadecimal digits"):
            operator_decisions.trust_workspace_content(folders, text, clock=lambda: 7)
    shutil.rmtree(folders.workspace_state_folder)
    with pytest.raises(StartError, match="cannot be written"):
        operator_decisions.trust_workspace_content(folders, HASH, clock=lambda: 7)
