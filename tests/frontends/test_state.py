"""``handrail state`` as a person uses it: a list, and removing what it shows."""

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


def test_what_is_kept_is_listed_with_its_size_and_last_use(used: Here, handrail: Program) -> None:
    done = used("state")
    assert done.code == 0 and str(handrail.workspace) in done.out and "KiB" in done.out
    (one,) = listed(used)
    assert one["workspace"] == str(handrail.workspace) and str(one["key"]) in done.out and not one["workspace_missing"]


def test_nothing_kept_yet_is_no_failure(here: Here, handrail: Program) -> None:
    assert "No state is stored yet" in here("state").err and not handrail.state.exists()
    assert "Nothing to remove" in here("state", "remove", "--yes").err


def test_this_workspaces_state_is_removed_when_agreed(used: Here, handrail: Program, on_a_terminal: Terminals) -> None:
    assert used("state", "remove", "--dry-run").code == 0 and listed(used)
    refused = handrail("state", "remove")
    assert refused.code == 2 and "--yes" in refused.err and listed(used)
    terminal = on_a_terminal(*handrail.command("state", "remove"))
    terminal.wait_for("Remove this permanently")
    terminal.type("y\n")
    assert terminal.end() == 0 and listed(used) == []
    assert used("call", "read", '{"path": "note.txt"}').code == 0


def test_orphans_are_those_whose_workspace_is_not_there_any_more(used: Here, handrail: Program, tmp_path: Path) -> None:
    gone = replace(handrail, workspace=tmp_path / "gone")
    gone.workspace.mkdir()
    assert gone("call", "glob", '{"pattern": "*"}').code == 0
    assert json.loads(used("state", "remove", "--orphans", "--yes", "--json").out)["removed"] == []
    gone.workspace.rmdir()
    assert "no longer exists" in used("state").out
    done = json.loads(used("state", "remove", "--orphans", "--yes", "--json").out)
    assert [one["workspace"] for one in done["removed"]] == [str(gone.workspace)]
    assert [one["workspace"] for one in listed(used)] == [str(handrail.workspace)]


def test_the_state_of_a_workspace_that_is_gone_is_removed_by_its_key(used: Here, handrail: Program) -> None:
    (one,) = listed(used)
    handrail.workspace.rename(handrail.workspace.with_name("moved"))
    assert "cannot be opened" in used("state", "remove", "--yes").err
    assert used("state", "remove", str(one["key"]), "--yes").code == 0 and listed(used) == []


def test_all_removes_what_is_free_and_says_what_is_held(used: Here, handrail: Program, tmp_path: Path) -> None:
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
def test_a_wrong_command_line_is_told_in_a_line(used: Here, arguments: tuple[str, ...], said: str) -> None:
    done = used("state", *arguments)
    assert done.code == 2 and said in done.err and listed(used)


@pytest.mark.proves("K-09", "F-12")
def test_doctor_and_state_list_it_and_it_can_be_removed(here: Here, handrail: Program) -> None:
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
