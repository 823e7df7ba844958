"""The demo of four front ends: each edit is there or reported after each kill, and a missing one is noticed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from demos.doors import accounts
from demos.doors.journal import Attempt, Journal
from demos.doors.opened import Crew
from demos.doors.place import Place, make
from demos.tour.effects import survivors
from demos.tour.watching import View
from tests.frontends.conftest import Terminals

from handrail.frontends.cli.command_group import run_command_line
from handrail.record.log_reader import LogReader
from handrail.sandbox import tier_probe
from handrail.store.state_folders import locate_folders

ROOT = str(Path(__file__).parents[2])

DOORS = (sys.executable, "-m", "demos.doors", "--edits", "3")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="joining needs Linux")
needs_sandbox = pytest.mark.skipif(
    not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine"
)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """An environment with a temporary folder, as on a build machine without a user."""
    (tmp_path / "tmp").mkdir()
    apart = ("GIT_", "HANDRAIL_", "XDG_", "COLUMNS", "LINES")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(apart)} | {"PYTHONPATH": ROOT}
    return {**kept, "TMPDIR": str(tmp_path / "tmp"), "CI": "1"}


def run_doors(places: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DOORS, *arguments], env=dict(places), capture_output=True, text=True)


@needs_sandbox
@pytest.mark.proves("L-07")
def test_every_edit_of_four_processes_is_present_or_reported_after_one_is_killed(
    on_a_terminal: Terminals, places: dict[str, str]
) -> None:
    """Watched on a terminal, where no line may be wider than it."""
    where = {**places, "NO_COLOR": "", "COLUMNS": "80", "TERM": "xterm"}
    terminal = on_a_terminal(*DOORS, "--keep", environment=where)
    assert terminal.end() == 0, terminal.shown
    assert "\x1b[1;36m" in terminal.shown
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", terminal.shown)
    (kept,) = Path(places["TMPDIR"]).iterdir()
    assert [line for line in shown.splitlines() if len(line) > 80 and str(kept) not in line] == []
    assert "All 10 effects are there." in shown and shown.count("   ✓ ") >= 10
    assert "kill -9" in shown

    # Looked up here once more, without the show's own accounting.
    board = (kept / "project" / "BOARD.md").read_text()
    boxes = re.findall(r"^- \[(.)\] (\S+)$", board, re.MULTILINE)
    assert len(boxes) == len({box for _, box in boxes}) == 3 + 2 + 3 + 1 + 3 + 2
    ticked = {box for mark, box in boxes if mark == "x"}
    assert {"one-1", "one-2", "one-3", "one-4", "two-4", "terminal-1", "terminal-2"} <= ticked and "one-5" not in ticked
    folders = locate_folders(kept / "project", kept / "state")
    with LogReader.open_database(folders.database_file) as reader:
        calls = reader.calls(limit=10_000)
        wrote = [call for call in calls if call.tool in ("edit", "bash")]
        about = {call.call_id: str((reader.find_proposal(call.call_id) or calls).body) for call in wrote}  # type: ignore[union-attr]
        for mark, box in boxes:
            states = {call.state for call in wrote if re.search(rf"\b{box}\b", about[call.call_id])}
            assert states, f"{box}: no call speaks of it"
            assert ("output" in states) <= (mark == "x")
            assert mark == " " or states & {"output", "interrupted", "error"}, f"{box} is ticked, and nobody says so"
        (killed,) = [call for call in calls if call.state == "interrupted"]
        assert "./tick-slowly one-4 one-5" in about[killed.call_id]
    head = re.search(r"head\s+([0-9a-f]{64})", shown)
    where = ["--workspace", str(kept / "project"), "--state", str(kept / "state")]
    assert head is not None and run_command_line(["log", "verify", *where, "--head", head[1]]) == 0
    assert survivors(kept) == []


def test_the_demo_exits_with_5_when_git_is_missing(places: dict[str, str], tmp_path: Path) -> None:
    done = run_doors({**places, "PATH": str(tmp_path)})
    assert done.returncode == 5 and done.stderr.startswith("doors: ") and "Traceback" not in done.stderr
    assert os.listdir(places["TMPDIR"]) == []


@pytest.mark.parametrize("number", ["0", "2", "101"])
def test_an_edit_count_out_of_range_is_a_usage_error(places: dict[str, str], number: str) -> None:
    done = run_doors(places, "--edits", number)
    assert done.returncode == 2 and f"--edits {number}: a number from 3 to 100 was expected" in done.stderr


# ── what is not accounted for would be noticed ─────────────────────────────────────────────────────


@pytest.fixture
def board(tmp_path: Path) -> Place:
    return make(tmp_path / "place", 3)


def _account(place: Place, *attempts: Attempt) -> accounts.Account:
    journal = Journal(place, Crew(place), View())
    journal.attempts = {attempt.call_id: attempt for attempt in attempts}
    return accounts.of(place, journal)[0]


def _attempt(box: str, state: str, kind: str = "", call_id: str = "c") -> Attempt:
    return Attempt("one", [box], "edit", call_id, state=state, kind=kind)


@pytest.mark.parametrize(
    ("there", "attempts", "column"),
    [
        (True, [("landed", "")], "landed"),
        (False, [("landed", "")], "unaccounted"),  # a lost edit
        (True, [("rejected", "conflict")], "unaccounted"),  # made by nobody
        (True, [], "unaccounted"),
        (False, [], "unaccounted"),
        (False, [("running", "")], "unaccounted"),
        (False, [("rejected", "conflict")], "reported"),
        (False, [("interrupted", "interrupted")], "reported"),
        (True, [("interrupted", "interrupted")], "stopped"),
        (True, [("rejected", "conflict"), ("landed", "")], "landed"),
    ],
)
def test_an_edit_that_is_neither_present_nor_reported_is_unaccounted_for(
    board: Place, there: bool, attempts: list[tuple[str, str]], column: str
) -> None:
    board.board.write_text(board.text(["one-1"] if there else []))
    account = _account(board, *(_attempt("one-1", *how, call_id=str(n)) for n, how in enumerate(attempts)))
    found = {name for name in ("landed", "reported", "unaccounted", "stopped") if "one-1" in getattr(account, name)}
    assert found == ({"landed", "stopped"} if column == "stopped" else {column})
