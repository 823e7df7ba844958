"""Commands where the disk is full or read-only, or where a newer version wrote the state."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Sequence

import pytest
from tests.frontends.conftest import Here, Program

from handrail.sandbox.start.spawn import find_bubblewrap_programs
from handrail.store.database.schema_migrations import VERSION

pytestmark = pytest.mark.proves("F-12")

FULL = """
import resource, sys
from handrail.frontends.cli.command_group import run_command_line as run
from handrail.sandbox.start.spawn import find_bubblewrap_programs
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
sys.exit(run(sys.argv[2:]))
"""


@pytest.fixture
def call(here: Here) -> str:
    """The id of a call that is on record."""
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    return json.loads(here("log", "--json").out.splitlines()[-1])["call_id"]


def ended(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert "Traceback" not in said and "internal error" not in said, said
    return done.returncode, said


@pytest.mark.skipif(
    next(find_bubblewrap_programs(), None) is None, reason="nothing here makes a folder read-only for root too"
)
def test_a_read_only_disk_allows_reading_and_refuses_removal_with_a_reason(
    handrail: Program, here: Here, call: str
) -> None:
    frozen = [
        next(find_bubblewrap_programs()),
        "--dev-bind",
        "/",
        "/",
        "--ro-bind",
        str(handrail.state),
        str(handrail.state),
        "--",
    ]

    def tried(*arguments: str) -> tuple[int, str]:
        return ended([*frozen, *handrail.cold(*arguments)])

    code, said = tried("explain", call)
    assert code == 0 and "read: output" in said
    assert tried("state")[0] == 0
    code, said = tried("doctor")
    shown = " ".join(said.split())  # its lines are wrapped
    assert code == 5 and "mounted read-only" in shown and "mount it writable" in shown
    code, said = tried("log", "purge", "--before", "0", "--yes")
    assert code == 5 and str(handrail.state) in said and "--state DIR" in said
    code, said = tried("state", "remove", "--yes")
    assert code == 1 and "Read-only file system" in said and "removed 0 of 1" in said
    assert here("explain", call).code == 0


@pytest.mark.parametrize("size", [0, 4096, 40_000, 10_000_000])
def test_a_purge_on_a_full_disk_removes_records_or_gives_a_reason(
    handrail: Program, here: Here, call: str, size: int
) -> None:
    arguments = ["log", *handrail.common, "purge", "--before", "0", "--yes"]
    code, said = ended([sys.executable, "-c", FULL, str(size), *arguments])
    assert (code == 0 and "intact: " in said) or (code in (1, 5) and str(handrail.state) in said), said
    assert here("log", "verify").code == 0
    assert here("log", "purge", "--before", "0", "--yes").code == 0
    assert "redacted" in here("log", "verify").out


def test_state_of_a_newer_version_is_refused_with_advice_and_can_be_removed(
    handrail: Program, here: Here, call: str
) -> None:
    (database,) = handrail.state.glob("ws/*/handrail.db")
    connection = sqlite3.connect(database)
    with connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
        connection.execute("UPDATE meta SET value = '9.9.9' WHERE key = 'written_by'")
    connection.close()
    for arguments in (
        ("log",),
        ("log", "verify"),
        ("log", "purge", "--before", "0", "--yes"),
        ("explain", call),
        ("doctor",),
    ):
        done = here(*arguments)
        assert done.code == 5 and "Upgrade to handrail 9.9.9 or later" in " ".join((done.out + done.err).split()), (
            arguments
        )
    assert here("state").code == 0
    assert here("state", "remove", "--yes").code == 0
    assert here("call", "read", '{"path": "note.txt"}').code == 0
