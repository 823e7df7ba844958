"""``handrail state``: list and remove the stored state."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.frontends.conftest import Here, Program, Terminals

pytestmark = pytest.mark.proves("F-12")


@pytest.fixture
def used(here: Here) -> Here:
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    return here


def listed(here: Here) -> list[dict[str, object]]:
    return json.loads(here("state", "--json").out)


def test_stored_state_is_listed_with_size_and_last_use(used: Here, handrail: Program) -> None:
    done = used("state")
    assert done.code == 0 and str(handrail.workspace) in done.out and "KiB" in done.out
    (one,) = listed(used)
    assert one["workspace"] == str(handrail.workspace) and str(one["key"]) in done.out and not one["workspace_missing"]


def test_missing_state_is_not_an_error(here: Here, handrail: Program) -> None:
    assert "No state is stored yet" in here("state").err and not handrail.state.exists()
    assert "Nothing to remove" in here("state", "remove", "--yes").err


def test_the_state_of_this_workspace_is_removed_after_confirmation(
    used: Here, handrail: Program, on_a_terminal: Terminals
) -> None:
    assert used("state", "remove", "--dry-run").code == 0 and listed(used)
    refused = handrail("state", "remove")
    assert refused.code == 2 and "--yes" in refused.err and listed(used)
    terminal = on_a_terminal(*handrail.command("state", "remove"))
    terminal.wait_for("Remove this permanently")
    terminal.type("y\n")
    assert terminal.end() == 0 and listed(used) == []
    assert used("call", "read", '{"path": "note.txt"}').code == 0


def test_the_orphans_option_removes_state_whose_workspace_no_longer_exists(
    used: Here, handrail: Program, tmp_path: Path
) -> None:
    gone = replace(handrail, workspace=tmp_path / "gone")
    gone.workspace.mkdir()
    assert gone("call", "glob", '{"pattern": "*"}').code == 0
    assert json.loads(used("state", "remove", "--orphans", "--yes", "--json").out)["removed"] == []
    gone.workspace.rmdir()
    assert "no longer exists" in used("state").out
    done = json.loads(used("state", "remove", "--orphans", "--yes", "--json").out)
    assert [one["workspace"] for one in done["removed"]] == [str(gone.workspace)]
    assert [one["workspace"] for one in listed(used)] == [str(handrail.workspace)]


def test_the_state_of_a_missing_workspace_is_removed_by_its_key(used: Here, handrail: Program) -> None:
    (one,) = listed(used)
    handrail.workspace.rename(handrail.workspace.with_name("moved"))
    assert "cannot be opened" in used("state", "remove", "--yes").err
    assert used("state", "remove", str(one["key"]), "--yes").code == 0 and listed(used) == []


def test_remove_all_keeps_state_in_use_and_names_its_holder(used: Here, handrail: Program, tmp_path: Path) -> None:
    from handrail.store.workspace_store import WorkspaceStore

    other = tmp_path / "other"
    other.mkdir()
    store = WorkspaceStore.open(other, handrail.state, frontend="mcp")
    try:
        done = used("state", "remove", "--all", "--yes")
    finally:
        store.database.close()
        store.lease.release()
    assert done.code == 1 and "removed 1 of 2" in done.out and "in use by handrail mcp" in done.err
    assert [one["workspace"] for one in listed(used)] == [str(other)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--yes",), "cannot be used with `state`"),
        (("remove", "--all", "--orphans"), "only one of them"),
        (("remove", "abc", "--all"), "only one of them"),
        (("remove", "../..", "--yes"), "Unknown keys"),
        (("rewrite",), "'remove'"),
    ],
)
def test_a_wrong_state_command_is_refused_in_one_line(used: Here, arguments: tuple[str, ...], said: str) -> None:
    done = used("state", *arguments)
    assert done.code == 2 and said in done.err and listed(used)


@pytest.mark.proves("K-09", "F-12")
def test_doctor_and_state_list_the_user_data_folder_and_state_removes_it(here: Here, handrail: Program) -> None:
    assert here("call", "glob", '{"pattern": "*"}').code == 0
    assert "user-data" not in here("state").out and "{user-data}" not in here("doctor").out
    place = handrail.state / "user-data"
    place.mkdir(mode=0o700)
    (place / "a").write_text("12345")
    line = next(line for line in here("state").out.splitlines() if line.startswith("user-data"))
    assert "5 bytes" in line and "data that tools store for you" in line
    assert "{user-data}" in here("doctor").out
    assert here("state", "remove", "user-data", "--yes").code == 0
    assert not place.exists() and here("log").out
