"""``handrail log purge``: shown, confirmed, removed, and the log still verifies."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta, timezone

import click
import pytest
from tests.frontends.conftest import Here, Program, Terminals

from handrail.frontends.cli.commands.log import parse_time_or_days
from handrail.store.state_folders import locate_folders

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone(timedelta(hours=2)))


@pytest.fixture
def used(here: Here) -> Here:
    """A workspace in which a file was read."""
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    return here


@pytest.mark.proves("F-12")
def test_a_purge_previews_the_records_and_removes_them_on_confirmation(used: Here, handrail: Program) -> None:
    whole = used("log", "--json", "--records").out
    assert "first line" in whole
    looked = used("log", "purge", "--before", "0", "--dry-run")
    assert looked.code == 0 and "1 calls" in looked.out and used("log", "--json", "--records").out == whole
    done = used("log", "purge", "--before", "0", "--yes")
    assert done.code == 0 and "removed " in done.out and "intact: " in done.out and "redacted" in done.out
    assert "first line" not in used("log", "--json", "--records").out
    assert not [path for path in handrail.state.rglob("*") if path.is_file() and b"first line" in path.read_bytes()]
    verified = json.loads(used("log", "verify", "--json").out)
    assert verified["ok"] and verified["redacted"] > 3
    assert "Nothing to remove" in used("log", "purge", "--before", "0", "--yes").err


def test_a_purge_removes_nothing_without_confirmation(used: Here, handrail: Program, on_a_terminal: Terminals) -> None:
    before = used("log", "--json", "--records").out
    done = handrail("log", "purge", "--before", "0")
    assert done.code == 2 and "Nothing was removed" in done.err and "--yes" in done.err
    terminal = on_a_terminal(*handrail.command("log", "purge", "--before", "0"))
    terminal.wait_for("Remove this permanently?")
    terminal.type("n\n")
    assert terminal.end() == 130
    assert used("log", "--json", "--records").out == before


def test_a_purge_at_a_terminal_asks_for_confirmation(used: Here, handrail: Program, on_a_terminal: Terminals) -> None:
    terminal = on_a_terminal(*handrail.command("log", "purge", "--before", "0"))
    terminal.wait_for("Remove this permanently?")
    terminal.type("y\n")
    terminal.wait_for("intact: ")
    assert terminal.end() == 0


def test_a_purge_reports_its_plan_and_outcome_in_json(used: Here) -> None:
    looked = json.loads(used("log", "purge", "--before", "0", "--dry-run", "--json").out)
    assert looked["dry_run"] and looked["calls"] == 1 and len(looked["sessions"]) == 1
    done = json.loads(used("log", "purge", "--session", looked["sessions"][0], "--yes", "--json").out)
    assert not done["dry_run"] and done["records"] > 3 and done["sessions"] == 1 and done["verification"]["ok"]
    assert json.loads(used("log", "purge", "--session", "ses_none", "--yes", "--json").out)["records"] == 0


def test_a_purge_is_refused_while_another_process_holds_the_workspace(used: Here, handrail: Program) -> None:
    from handrail.store.workspace_store import WorkspaceStore

    store = WorkspaceStore.open(handrail.workspace, handrail.state, frontend="mcp")
    try:
        done = handrail("log", "purge", "--before", "0", "--yes")
        asked = handrail("log", "purge", "--before", "0")
        looked = handrail("log", "purge", "--before", "0", "--dry-run")
    finally:
        store.database.close()
        store.lease.release()
    assert done.code == 5 and "in use by handrail mcp" in done.err and f"(kill {os.getpid()})" in done.err
    assert done.err == asked.err and "--workspace" not in done.err  # told before anybody is asked
    assert looked.code == 0 and "1 calls" in looked.out
    assert used("log", "--json").out


def test_a_workspace_without_a_log_has_nothing_to_purge(here: Here, handrail: Program) -> None:
    assert "Nothing to remove" in here("log", "purge", "--before", "30", "--yes").err
    assert not locate_folders(handrail.workspace, handrail.state).database_file.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("purge",), "`--before 30` (days)"),
        (("purge", "--before", "yesterday"), "Invalid value for `--before`"),
        (("purge", "--before", "-3"), "Invalid value for `--before`"),
        (("purge", "--before", "99999999999"), "Invalid value for `--before`"),
        (("purge", "--before", "2999-01-01"), "in the future"),
        (("purge", "--session", "../x"), "Invalid session id"),
        (("purge", "--before", "1", "--call", "x"), "are not options of `purge`"),
        (("--before", "1"), "options of `purge`"),
        (("verify", "--yes"), "options of `purge`"),
    ],
)
def test_an_invalid_purge_is_refused_in_one_line(here: Here, arguments: tuple[str, ...], said: str) -> None:
    done = here("log", *arguments)
    assert done.code == 2 and said in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("0", NOW),
        ("30", NOW - timedelta(days=30)),
        ("30d", NOW - timedelta(days=30)),
        ("2026-01-31T18:00+02:00", datetime(2026, 1, 31, 18, tzinfo=NOW.tzinfo)),
        ("2026-01-31T18:00:00.000001Z", datetime(2026, 1, 31, 18, 0, 0, 1, tzinfo=UTC)),
    ],
)
def test_a_purge_time_is_a_number_of_days_or_a_date(text: str, then: datetime) -> None:
    assert parse_time_or_days(text, NOW) == int(then.timestamp()) * 1_000_000_000 + then.microsecond * 1000


def test_a_date_without_an_offset_is_in_local_time() -> None:
    assert parse_time_or_days("2026-01-31", NOW) == int(datetime(2026, 1, 31).astimezone().timestamp()) * 1_000_000_000
    with pytest.raises(click.UsageError, match="in the future"):
        parse_time_or_days("2026-03-02T00:00+02:00", NOW)
