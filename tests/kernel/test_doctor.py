"""The checks of ``handrail doctor``: faults and remedies, also while Handrail runs and with damaged state."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import time
import tomllib
from pathlib import Path

import pytest
from tests.store.places import Place

from handrail.agent.providers import SERVICES
from handrail.contract.errors import StartError
from handrail.kernel.doctor import DoctorCheck, check_kernel, run_doctor_checks
from handrail.kernel.doctor.machine_checks import run_check_isolated
from handrail.kernel.doctor.storage_checks import check_wall_clock
from handrail.record.commit_log import CommitLog, Record
from handrail.store.database.schema_migrations import VERSION
from handrail.testing.scripted_kernel import temporary_kernel

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
HOUR = 3_600_000_000_000
HOLDS = """
import asyncio, sys
from handrail.record.commit_log import CommitLog, Record
from handrail.store.workspace_store import WorkspaceStore
store = WorkspaceStore.open(sys.argv[1], sys.argv[2], frontend="mcp", socket=sys.argv[3])
log = CommitLog(store.database)
asyncio.run(log.commit([Record("intended", "ses_1", "ses_1/1.0", {"tool": "bash"})]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place.beneath(tmp_path)


def checked(place: Place, config: Path | None = None) -> dict[str, DoctorCheck]:
    return {check.name: check for check in run_doctor_checks(place.workspace, place.state, config)}


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files but those by which SQLite's readers and writers agree, which hold nothing."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


async def used(place: Place) -> Place:
    """A log with one call that was left without an outcome."""
    store = place.open()
    await CommitLog(store.database).commit([Record("intended", "ses_1", "ses_1/1.0", {"tool": "bash"})])
    await store.aclose()
    return place


def test_doctor_finds_no_problem_in_an_unused_workspace_and_creates_no_state(place: Place) -> None:
    found = checked(place)
    assert {found[name].state for name in ("workspace", "state", "state disk", "log", "holder", "clock")} == {"ok"}
    assert found["log"].detail == "no records yet" and not place.state.exists()
    assert found["tools"].detail.endswith("unavailable") and found["configuration"].state == "ok"


async def test_doctor_reports_size_mode_and_schema_of_the_state_and_writes_nothing(place: Place) -> None:
    await used(place)
    before = contents(place.state)
    found = checked(place)
    assert "mode 0700" in found["state"].detail and "MiB for this workspace" in found["state"].detail
    assert f"schema {VERSION} of {VERSION}" in found["log"].detail and found["log"].detail.startswith("1 records")
    assert found["interrupted calls"].state == "warning" and "ses_1/1.0" in found["interrupted calls"].detail
    assert contents(place.state) == before


@pytest.mark.proves("F-02a")
def test_doctor_names_a_running_holder_and_does_not_disturb_it(place: Place) -> None:
    with place.process(HOLDS, "") as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        found = checked(place)
        assert found["holder"].state == "ok"
        assert f"handrail mcp, pid {holder.pid}, since " in found["holder"].detail and "alive" in found["holder"].detail
        assert "interrupted calls" not in found  # it may be running
        assert found["log"].state == "ok"
        assert holder.poll() is None and checked(place)["holder"].detail == found["holder"].detail
    assert checked(place)["holder"].detail == "no process holds the workspace"
    assert "interrupted calls" in checked(place)


def test_doctor_distinguishes_a_paused_holder_from_a_running_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("handrail.store.lease.STALE_NS", 0)
    with place.process(HOLDS, "") as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
        found = checked(place)["holder"]
        assert found.state == "warning" and "paused" in found.detail and f"kill -CONT {holder.pid}" in found.remedy
        os.kill(holder.pid, signal.SIGCONT)


def test_doctor_tries_the_socket_and_reports_a_missing_or_unresponsive_one(place: Place) -> None:
    with place.process(HOLDS, "kernel-1.sock") as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        path = place.folders.workspace_state_folder / "kernel-1.sock"
        assert checked(place)["socket"].state == "problem" and "does not exist" in checked(place)["socket"].detail
        path.write_text("not a socket")
        assert "is not a socket of this user" in checked(place)["socket"].detail
        path.unlink()
        folder = os.open(path.parent, os.O_RDONLY)  # an address has no room for the whole path
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"/proc/self/fd/{folder}/{path.name}")
            os.close(folder)
            assert "refused" in checked(place)["socket"].detail
            door.listen()
            assert checked(place)["socket"].state == "ok"


@pytest.mark.parametrize("content", [b"", b"x" * 5000, b"SQLite format 3\0" + b"\xff" * 4000])
async def test_damaged_state_is_one_problem_and_all_other_checks_still_run(place: Place, content: bytes) -> None:
    await used(place)
    whole = set(checked(place)) - {"interrupted calls"}
    database = place.folders.database_file
    for leftover in database.parent.glob("handrail.db-*"):
        leftover.unlink()
    database.write_bytes(content)
    found = checked(place)
    assert found["log"].state == ("problem") and set(found) - {"interrupted calls"} == whole
    assert "Traceback" not in found["log"].detail


async def test_doctor_names_the_version_that_newer_state_requires(place: Place) -> None:
    await used(place)
    with sqlite3.connect(place.folders.database_file) as connection:
        connection.execute(f"PRAGMA user_version = {VERSION + 1}")
        connection.execute("UPDATE meta SET value = '9.9.9' WHERE key = 'written_by'")
    connection.close()
    found = checked(place)
    assert found["log"].state == "problem" and "Upgrade to handrail 9.9.9 or later" in found["log"].detail
    assert found["tools"].state == "ok"


async def test_folders_open_to_other_users_are_problems_with_a_remedy(place: Place) -> None:
    await used(place)
    place.folders.workspace_state_folder.chmod(0o755)
    found = checked(place)["state"]
    assert found.state == "problem" and "mode 0755" in found.detail and "chmod 700" in found.remedy
    place.folders.workspace_state_folder.chmod(0o700)
    place.state.chmod(0o777)
    assert any(
        check.state == "problem" for check in run_doctor_checks(place.workspace, place.state) if check.name == "state"
    )


def test_a_missing_workspace_is_a_problem_and_other_checks_still_run(place: Place) -> None:
    place.workspace.rmdir()
    found = checked(place)
    assert found["workspace"].state == "problem" and "cannot be opened" in found["workspace"].detail
    assert found["python"].state == found["configuration"].state == "ok"


def test_a_faulty_configuration_is_one_problem_with_every_fault(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "handrail.toml"
    file.write_text("rulez = []\nlimits = { grace_ms = 0 }\n")
    found = checked(place, file)
    assert found["configuration"].state == "problem" and "tools" not in found
    assert "rulez" in found["configuration"].detail and "grace_ms" in found["configuration"].detail


def test_a_rule_that_prevents_a_kernel_start_is_a_problem(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "config" / "handrail.toml"
    file.parent.mkdir()
    file.write_text('rules = ["allow raed", "allow read"]\n')
    found = checked(place, file)
    assert found["configuration"].state == "ok" and found["rules"].state == "problem"
    assert "'raed'" in found["rules"].detail and "Did you mean 'read'?" in found["rules"].detail
    assert f"{file}:1" in found["rules"].detail


def test_a_rule_that_matches_no_tool_or_server_is_a_warning_with_advice(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "config" / "handrail.toml"
    file.parent.mkdir()
    servers = '[mcp.servers.github]\ncommand = "server"\n'
    for rule, named in (
        ("allow mcp:githb:*", "Did you mean 'mcp:github:*'?"),
        ("deny mcp:githb:push", "Did you mean 'mcp:github:push'?"),
        ("allow gti.*", "Did you mean 'git"),
        ("ask wirte*", "Did you mean 'write*'?"),
        ("allow mcp:quite-another:*", "does not name an MCP server that is configured"),
    ):
        file.write_text(
            f'rules = ["{rule}", "allow mcp:github:*", "allow mcp:*:push", "deny git.*", "ask *"]\n{servers}'
        )
        found = checked(place, file)["rules"]
        assert found.state == "warning" and named in found.detail and rule in found.detail, found
        assert found.detail.count("matches no call now") == 1, found
    file.write_text(f'rules = ["allow mcp:github:*", "deny git.*"]\n{servers}')
    assert "rules" not in checked(place, file)


def test_an_agent_that_cannot_start_is_a_problem_if_it_is_the_configured_agent(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "config" / "handrail.toml"
    folder = file.parent / "agents" / "broken"
    folder.mkdir(parents=True)
    (folder / "agent.toml").write_text('id = "broken"\ntools = ["raed"]\n')
    file.write_text("")
    assert not [name for name in checked(place, file) if name.startswith("agent")]
    file.write_text('agent = "broken"\n')
    found = checked(place, file)
    assert found["agent broken"].state == "problem" and "'raed'" in found["agent broken"].detail
    assert found["tools"].state == "ok" and "rules" not in found
    file.write_text('agent = "nobody"\n')
    assert "'nobody' does not exist" in checked(place, file)["agent"].detail


def test_doctor_warns_about_untrusted_allow_rules_of_a_workspace_file(place: Place) -> None:
    (place.workspace / "handrail.toml").write_text('rules = ["allow bash make *"]\n')
    found = checked(place)["workspace file"]
    assert found.state == "warning" and "1 allow rule" in found.detail and found.remedy == "handrail trust"


def test_a_clock_set_back_behind_the_log_is_a_warning(place: Place) -> None:
    asyncio.run(_recorded(place, time.time_ns()))
    (now,) = check_wall_clock(place.folders, time.time_ns())
    assert now.state == "ok"
    (back,) = check_wall_clock(place.folders, time.time_ns() - 3 * HOUR - HOUR // 2)
    assert back.state == "warning" and "3 hours later" in back.detail and "set back" in back.detail


async def _recorded(place: Place, at_ns: int) -> None:
    store = place.open()
    await CommitLog(store.database, clock=lambda: at_ns).commit([Record("session-opened", "ses_1", "", {})])
    await store.aclose()


async def test_doctor_detects_a_clock_that_was_set_while_a_process_holds_the_workspace(place: Place) -> None:
    store = place.open()
    try:
        now = time.time_ns()
        (right,) = check_wall_clock(place.folders, now)
        (forward,) = check_wall_clock(place.folders, now + 1000 * HOUR)
        (back,) = check_wall_clock(place.folders, now - 1000 * HOUR)
    finally:
        await store.aclose()
    assert right.state == "ok"
    assert forward.state == "warning" and "set forward by 41 days" in forward.detail
    assert back.state == "warning" and "set back by 41 days" in back.detail


def test_doctor_reports_that_keys_are_set_and_never_shows_them(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    found = checked(place)
    assert found["key OPENAI_API_KEY"].state == "ok" and found["key ANTHROPIC_API_KEY"].state == "warning"
    assert "very-secret" not in json.dumps([check.to_dict() for check in found.values()])


def test_the_doctor_checks_every_model_provider_key_and_every_extra(place: Place) -> None:
    found = checked(place)
    assert {f"key {variable}" for variable, _ in SERVICES.values()} <= found.keys()
    declared = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert {f"extra {name}" for name in declared if name != "all"} == {one for one in found if one.startswith("extra ")}


def test_a_failing_check_is_reported_as_a_result() -> None:
    def failing() -> list[DoctorCheck]:
        raise PermissionError(13, "Permission denied")

    def refused() -> list[DoctorCheck]:
        raise StartError("what is wrong, and what to do")

    assert [c.detail for c in run_check_isolated("a", failing)] == ["check failed: PermissionError: Permission denied"]
    assert [c.detail for c in run_check_isolated("b", refused)] == ["what is wrong, and what to do"]


async def test_an_open_kernel_reports_the_same_checks() -> None:
    async with temporary_kernel() as kernel:
        found = {check.name: check for check in check_kernel(kernel)}
    assert "(this process)" in found["holder"].detail
    assert {found[name].state for name in ("workspace", "state", "log", "tools", "clock")} == {"ok"}


def test_doctor_counts_workspace_files_with_hard_links_outside_the_workspace(place: Place) -> None:
    place.workspace.mkdir(parents=True, exist_ok=True)
    assert checked(place)["hard links"].detail.startswith("no file")
    store = place.workspace.parent / "elsewhere"
    store.mkdir()
    for number in range(3):
        (store / f"{number}").write_text("x" * 1000)
        os.link(store / f"{number}", place.workspace / f"{number}")
    os.link(place.workspace / "0", place.workspace / "again")
    found = checked(place)["hard links"]
    assert found.state == "ok" and "4 files of the workspace" in found.detail and "copies" in found.detail
