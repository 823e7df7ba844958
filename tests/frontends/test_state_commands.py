"""``handrail state``: adopt a moved folder, back up, restore, and export sessions."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.conftest import Here, Program, Terminals

from handrail import Kernel, StartError, UsageError, open_kernel
from handrail.record.log_reader import LogReader
from handrail.record.session_export import format_line
from handrail.record.state_backup import back_up_state, restore_state
from handrail.record.verification import verify_log
from handrail.store.operator_decisions import trust_workspace_content
from handrail.store.project_identity import read_project_record
from handrail.store.state_adoption import adopt_state, find_adoptable_states, select_adoptable_state
from handrail.store.state_folders import StateFolders, compute_workspace_key, find_state_key, locate_folders
from handrail.testing import ScriptedApprovalHandler


@pytest.fixture
def program(here: Here, handrail: Program) -> Program:
    """A workspace with a session, an artifact, an output file and a stored answer."""
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    return handrail


def folders_of(program: Program) -> StateFolders:
    return locate_folders(program.workspace, program.state)


def moved(program: Program, name: str = "moved") -> Program:
    there = program.workspace.with_name(name)
    program.workspace.rename(there)
    return replace(program, workspace=there)


def ok(program: Program, *arguments: str) -> Any:
    done = program(*arguments, "--json")
    assert done.code == 0, done
    return json.loads(done.out) if done.out.strip() else None


def intact(program: Program) -> tuple[int, str]:
    found = ok(program, "log", "verify")
    assert found["ok"], found
    return found["records"], found["head"]


# ── adopting ─────────────────────────────────────────────────────────────────────────────────────


def test_a_moved_workspace_is_recognised_and_keeps_its_log(program: Program) -> None:
    before, key = intact(program), folders_of(program).key
    there = moved(program)
    listing = there("state")
    assert "no longer exists" in listing.out and f"handrail state adopt {key}" in listing.err
    assert ok(there, "state", "adopt", "--yes") == {
        "dry_run": False,
        "workspace": str(there.workspace),
        "key": key,
        "recognised": True,
        "rules": [],
    }
    assert intact(there) == before and folders_of(there).key == key
    assert there("call", "read", '{"path": "note.txt"}').code == 0 and intact(there)[0] > before[0]
    assert str(there.workspace) in there("state").out and "no longer exists" not in there("state").out


def test_the_user_of_a_moved_folder_is_offered_its_state(program: Program, on_a_terminal: Terminals) -> None:
    key, there = folders_of(program).key, moved(program)
    terminal = on_a_terminal(*there.command("call", "read", '{"path": "note.txt"}'))
    terminal.wait_for("Continue with them here?")
    terminal.type("y\n")
    assert terminal.end() == 0 and folders_of(there).key == key
    third = moved(there, "third")
    told = third("call", "read", '{"path": "note.txt"}')
    assert told.code == 0 and str(there.workspace) in told.err and "handrail state adopt" in told.err
    assert "handrail state adopt" not in third("call", "read", '{"path": "note.txt"}').err, "it has state now"


def test_a_new_folder_at_the_old_path_shares_no_state_with_the_moved_folder(program: Program) -> None:
    key, there = folders_of(program).key, moved(program)
    ok(there, "state", "adopt", "--yes")
    program.workspace.mkdir()
    assert folders_of(program).key not in (key, compute_workspace_key(program.workspace))
    assert program("call", "glob", '{"pattern": "*"}').code == 0
    assert len(json.loads(there("state", "--json").out)) == 2
    third = moved(there, "third")
    ok(third, "state", "adopt", "--yes")
    assert folders_of(third).key == key != find_state_key(program.state, there.workspace)
    shutil.rmtree(program.workspace)
    ok(program, "state", "remove", "--orphans", "--yes")
    back = moved(third, program.workspace.name)
    ok(back, "state", "adopt", key, "--yes")
    assert folders_of(back).key == key == compute_workspace_key(back.workspace)


async def test_adoption_moves_sessions_and_stored_rules_and_a_dry_run_shows_the_rules(tmp_path: Path) -> None:
    (workspace := tmp_path / "ws").mkdir()
    state = tmp_path / "state"
    (config := tmp_path / "handrail.toml").write_text('[search]\nembedder = "none"\n')
    async with open_kernel(workspace, state=state, config=config) as kernel:
        session = await kernel.session(approval_handler=ScriptedApprovalHandler([await_always()]))
        assert (await session.call("write", {"path": "kept/a.txt", "content": "a"})).ok
        await session.suspend()
    program = Program(workspace, state, tmp_path)
    (stored,) = stored_rules(program)
    there = moved(program)
    shown = there("state", "adopt", "--dry-run")
    assert f"stored answer that will apply here: {stored}" in shown.out
    assert folders_of(there).key == compute_workspace_key(there.workspace), "a dry run changes nothing"
    assert ok(there, "state", "adopt", "--yes")["rules"] == [stored]
    async with open_kernel(there.workspace, state=state, config=config) as kernel:
        again = await kernel.session(session.id)
        assert (await again.call("read", {"path": "kept/a.txt"})).ok
        assert [rule.text for rule in kernel.approvals.list_rules()] == [stored]


def await_always() -> Any:
    from handrail import ApprovalAnswer

    return ApprovalAnswer("project")


def stored_rules(program: Program) -> list[str]:
    with closing(sqlite3.connect(folders_of(program).database_file)) as connection:
        return [text for (text,) in connection.execute("SELECT text FROM project_rule")]


def test_a_copied_folder_does_not_pass_for_the_original(program: Program, tmp_path: Path) -> None:
    """A copy has every file of the project, also its version control and configuration, and is another folder."""
    there = moved(program)
    shutil.copytree(there.workspace, copy := tmp_path / "copy", symlinks=True)
    shutil.rmtree(there.workspace)
    hostile = replace(program, workspace=copy)
    assert "adopt" not in hostile("state").err
    refused = hostile("state", "adopt", "--yes")
    assert refused.code == 2 and "No state belongs to the folder" in refused.err
    by_key = hostile("state", "adopt", compute_workspace_key(program.workspace), "--dry-run")
    assert by_key.code == 0 and "is not recognised as the folder of this state" in by_key.err
    assert hostile("state", "adopt", compute_workspace_key(program.workspace)).code == 2, "no person agreed"


def test_a_later_folder_with_the_same_inode_number_is_not_recognised(program: Program) -> None:
    folders = folders_of(program)
    record = read_project_record(folders.workspace_state_folder)
    assert record is not None
    if record.identity.birth_ns is None:
        pytest.skip("this file system does not record when a folder was made")
    path = folders.workspace_state_folder / "project.json"
    path.write_text(path.read_text().replace(str(record.identity.birth_ns), str(record.identity.birth_ns - 1)))
    assert find_adoptable_states(folders_of(moved(program))) == []


def test_state_whose_workspace_still_exists_cannot_be_adopted(program: Program, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = replace(program, workspace=tmp_path / "other")
    refused = other("state", "adopt", folders_of(program).key, "--yes")
    assert refused.code == 2 and "still exists" in refused.err
    for key, text in (("nokey", "Unknown key"), ("user-data", "Unknown key"), (folders_of(other).key, "already")):
        assert text in other("state", "adopt", key, "--yes").err
    assert "Pass one KEY" in other("state", "adopt", "a", "b").err


def test_adoption_is_refused_while_the_new_path_has_state(program: Program) -> None:
    key, there = folders_of(program).key, moved(program)
    assert there("call", "glob", '{"pattern": "*"}').code == 0
    refused = there("state", "adopt", "--yes")
    assert refused.code == 2 and f"handrail state remove {folders_of(there).key}" in refused.err
    ok(there, "state", "remove", folders_of(there).key, "--yes")
    assert ok(there, "state", "adopt", "--yes")["key"] == key


def test_a_command_that_runs_no_call_at_the_new_path_is_no_obstacle(program: Program) -> None:
    before, there = intact(program), moved(program)
    assert "handrail state adopt" in there("log").err
    for words in (("explain", "read", '{"path": "note.txt"}'), ("undo",), ("tools",)):
        there(*words)
    assert "handrail state adopt" in there("explain", "read", '{"path": "note.txt"}').err
    third = moved(there, "third")
    third("explain", "read", '{"path": "note.txt"}')
    ok(third, "state", "adopt", "--yes")
    assert intact(third) == before


async def test_state_in_use_is_not_adopted(tmp_path: Path) -> None:
    (workspace := tmp_path / "ws").mkdir()
    async with opened(tmp_path, workspace):
        folders = locate_folders(workspace, tmp_path / "state")
        workspace.rename(tmp_path / "moved")
        there = locate_folders(tmp_path / "moved", tmp_path / "state")
        with pytest.raises(StartError, match="in use by"):
            select_adoptable_state(there, folders.key)
        (tmp_path / "moved").rename(workspace)


def opened(tmp_path: Path, workspace: Path) -> Any:
    (config := tmp_path / "handrail.toml").write_text('[search]\nembedder = "none"\n')
    return open_kernel(workspace, state=tmp_path / "state", config=config, rules=["allow write"])


@pytest.mark.parametrize("content", [b"", b"x" * 24, b"../../../../etc/passwd..", b"0" * 25])
def test_an_invalid_adoption_record_is_not_followed(program: Program, content: bytes) -> None:
    there = moved(program)
    ok(there, "state", "adopt", "--yes")
    path = program.state / "moved" / compute_workspace_key(there.workspace)
    path.write_bytes(content)
    assert "contains no key" in there("log").err
    path.write_text(compute_workspace_key(program.workspace))
    path.chmod(0o644)
    assert "other users can access it" in there("log").err
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert "cannot be used" in there("log").err


def test_an_interrupted_adoption_can_be_repeated(program: Program) -> None:
    key, there = folders_of(program).key, moved(program)
    folders = folders_of(there)
    chosen = select_adoptable_state(folders, None)
    (program.state / "moved").mkdir(mode=0o700)
    former = program.state / "moved" / compute_workspace_key(program.workspace)
    former.write_text("0" * 24)  # the first step was done, and then the process ended
    former.chmod(0o600)
    again = select_adoptable_state(folders, None)
    assert again.stored.key == chosen.stored.key and again.stored.workspace is None
    adopt_state(folders, again)
    assert find_state_key(program.state, there.workspace) == key and intact(there)


# ── backup and restore ───────────────────────────────────────────────────────────────────────────


async def filled(kernel: Kernel, count: int = 3) -> None:
    session = await kernel.session()
    for number in range(count):
        assert (await session.call("write", {"path": f"{session.id}-{number}.txt", "content": "x"})).ok
    await kernel.log.flush()


def put_files(folders: StateFolders) -> dict[str, bytes]:
    """An artifact and an output file, as calls store them."""
    made = {
        folders.artifact_folder / "ab" / "cdef": b"artifact",
        folders.session_outputs_folder / "ses_1/out.txt": b"output",
    }
    for path, content in made.items():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(content)
    return {str(path): content for path, content in made.items()}


async def test_a_backup_is_made_while_the_state_is_in_use(tmp_path: Path) -> None:
    (workspace := tmp_path / "ws").mkdir()
    async with opened(tmp_path, workspace) as kernel:
        await filled(kernel)
        folders = locate_folders(workspace, tmp_path / "state")
        shown: list[tuple[str, int, int]] = []
        files = put_files(folders)
        found = back_up_state(
            folders, tmp_path / "backup", 1, lambda what, done, total: shown.append((what, done, total))
        )
        with LogReader.open_database(tmp_path / "backup/handrail.db") as reader:
            copied = verify_log(reader)
        assert copied.ok and (copied.records, copied.head) == (found.records, found.head)
        assert shown[-1][0] == "output" and all(0 <= done <= total for _, done, total in shown)
        await filled(kernel, 2)  # the log goes on
        later = back_up_state(folders, tmp_path / "backup", 2)
        assert later.records > found.records and later.files == 2
    for path in (tmp_path / "backup", *(tmp_path / "backup").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    shutil.rmtree(tmp_path / "state")
    restore_state(locate_folders(workspace, tmp_path / "state"), tmp_path / "backup")
    with LogReader.open_database(folders.database_file) as reader:
        assert (found := verify_log(reader)).ok and (found.records, found.head) == (later.records, later.head)
    assert {path: Path(path).read_bytes() for path in files} == files
    async with opened(tmp_path, workspace) as kernel:
        await filled(kernel, 1)
    program = Program(workspace, tmp_path / "state", tmp_path)
    assert intact(program)[0] > later.records


def test_a_repeated_backup_copies_only_new_files_and_drops_removed_ones(program: Program, tmp_path: Path) -> None:
    folders, target = folders_of(program), tmp_path / "backup"
    put_files(folders)
    assert ok(program, "state", "backup", str(target))["files"] == 2
    kept = (target / "artifacts/ab/cdef").stat()
    (folders.session_outputs_folder / "ses_1/out.txt").unlink()
    (folders.artifact_folder / "ab" / "new").write_bytes(b"new")
    assert ok(program, "state", "backup", str(target))["files"] == 2
    assert (target / "artifacts/ab/cdef").stat().st_ino == kept.st_ino, "it was not copied again"
    assert (target / "artifacts/ab/new").exists() and not (target / "output").exists()


def test_a_backup_does_not_follow_links(program: Program, tmp_path: Path) -> None:
    folders = folders_of(program)
    (folders.session_outputs_folder / "ses_1").mkdir(parents=True)
    (folders.session_outputs_folder / "ses_1/out.txt").symlink_to("/etc/passwd")
    assert ok(program, "state", "backup", str(tmp_path / "backup"))["files"] == 0


def test_an_interrupted_backup_is_unusable_until_it_is_completed(program: Program, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    ok(program, "state", "backup", str(target))
    (target / "backup.json").unlink()
    (target / "handrail.db.partial").write_bytes(b"half")
    refused = program("state", "restore", str(target), "--replace", "--yes")
    assert refused.code == 2 and "is not complete" in refused.err
    assert ok(program, "state", "backup", str(target))["records"] == intact(program)[0]
    assert ok(program, "state", "restore", str(target), "--replace", "--yes")


@pytest.mark.parametrize("place", ["workspace/backup", "state/backup", "state", "full"])
def test_a_backup_into_a_used_folder_is_refused(program: Program, tmp_path: Path, place: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    refused = program("state", "backup", str(tmp_path / place))
    assert refused.code == 2 and "Choose a" in refused.err
    assert (tmp_path / "full/mine.txt").read_text() == "mine"


def test_a_backup_of_another_workspace_is_not_overwritten(program: Program, tmp_path: Path) -> None:
    ok(program, "state", "backup", str(tmp_path / "backup"))
    (tmp_path / "other").mkdir()
    other = replace(program, workspace=tmp_path / "other")
    assert "does not exist yet" in other("state", "backup", str(tmp_path / "new")).err
    assert other("call", "glob", '{"pattern": "*"}').code == 0
    assert "has a backup of" in other("state", "backup", str(tmp_path / "backup")).err


def damaged(target: Path) -> None:
    content = bytearray((target / "handrail.db").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (target / "handrail.db").write_bytes(content)


def emptied(target: Path) -> None:
    (target / "backup.json").write_text("{}")


def removed(target: Path) -> None:
    shutil.rmtree(target)


def described(**changed: Any) -> Callable[[Path], None]:
    def change(target: Path) -> None:
        found = json.loads((target / "backup.json").read_text())
        (target / "backup.json").write_text(json.dumps({**found, **changed}))

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (damaged, "changed or is damaged"),
        (described(format=2), "has format 2"),
        (described(schema=99, handrail="9.0"), "has schema 99"),
        (described(records=1), "is not the one that the backup describes"),
        (described(records="1"), "wrong type"),
        (emptied, "cannot be read"),
        (removed, "is not a backup"),
    ],
)
def test_a_restore_of_an_invalid_backup_changes_no_state(
    program: Program, tmp_path: Path, change: Callable[[Path], None], problem: str
) -> None:
    before, target = intact(program), tmp_path / "backup"
    ok(program, "state", "backup", str(target))
    change(target)
    refused = program("state", "restore", str(target), "--replace", "--yes")
    assert refused.code == 2 and problem in refused.err, refused
    assert intact(program) == before
    assert not [path for path in program.state.rglob("*") if path.name.startswith(".restored")]


def test_a_restore_replaces_present_state_only_with_the_replace_option(program: Program, tmp_path: Path) -> None:
    older = ok(program, "state", "backup", str(tmp_path / "backup"))["records"]
    assert program("call", "glob", '{"pattern": "*"}').code == 0
    refused = program("state", "restore", str(tmp_path / "backup"))
    assert refused.code == 2 and "--replace" in refused.err and intact(program)[0] > older
    assert program("state", "restore", str(tmp_path / "backup"), "--replace").code == 2, "no person agreed"
    ok(program, "state", "restore", str(tmp_path / "backup"), "--replace", "--yes")
    assert intact(program)[0] == older, "an older log that was restored passes for whole"


async def test_state_in_use_is_not_overwritten_by_a_restore(tmp_path: Path) -> None:
    (workspace := tmp_path / "ws").mkdir()
    async with opened(tmp_path, workspace) as kernel:
        await filled(kernel)
        folders = locate_folders(workspace, tmp_path / "state")
        back_up_state(folders, tmp_path / "backup", 1)
        with pytest.raises(StartError, match="in use by"):
            restore_state(folders, tmp_path / "backup", replace=True)
        await filled(kernel)


def test_a_restored_workspace_must_be_trusted_again(program: Program, tmp_path: Path) -> None:
    trust_workspace_content(folders_of(program), "0" * 64, clock=lambda: 1)
    ok(program, "state", "backup", str(tmp_path / "backup"))
    assert "trust.json" not in os.listdir(tmp_path / "backup")
    ok(program, "state", "restore", str(tmp_path / "backup"), "--replace", "--yes")
    assert not (folders_of(program).workspace_state_folder / "trust.json").exists()


# ── exporting ────────────────────────────────────────────────────────────────────────────────────


def test_an_export_is_json_lines_with_a_header_and_an_end_line(program: Program, tmp_path: Path) -> None:
    assert program("call", "glob", '{"pattern": "*"}').code == 0
    lines = [json.loads(line) for line in program("state", "export").out.splitlines()]
    assert lines[0]["type"] == "export" and lines[-1] == {"type": "end", "lines": len(lines)}
    assert lines[0]["workspace"] == str(program.workspace)
    records = [line for line in lines if line["type"] == "record"]
    assert [one["sequence"] for one in records] == list(range(1, intact(program)[0] + 1))
    sessions = [line["session"] for line in lines if line["type"] == "session"]
    assert len(sessions) == 2
    one = [json.loads(line) for line in program("state", "export", sessions[1]).out.splitlines()]
    assert {line["session"] for line in one[1:-1]} == {sessions[1]} and one[-1]["lines"] == len(one)

    done = program("state", "export", "--out", str(tmp_path / "all.jsonl"))
    assert done.code == 0 and len((tmp_path / "all.jsonl").read_text().splitlines()) == len(lines)
    assert (tmp_path / "all.jsonl").stat().st_mode & 0o077 == 0
    again = program("state", "export", "--out", str(tmp_path / "all.jsonl"))
    assert again.code == 2 and "Choose a new file name" in again.err


def test_an_export_of_an_unknown_session_creates_no_file(program: Program, tmp_path: Path) -> None:
    refused = program("state", "export", "ses_no", "--out", str(tmp_path / "x.jsonl"))
    assert refused.code == 2 and "Unknown session" in refused.err and not (tmp_path / "x.jsonl").exists()


def test_a_formatted_line_stays_one_line_for_any_text() -> None:
    line = format_line({"text": "a\u2028b\u2029c\x85d\ud800\n\r\x0b"})
    assert line.splitlines() == [line] and json.loads(line)["text"].startswith("a\u2028b\u2029c\x85d")
    line.encode()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["backup"], "The folder is missing"),
        (["restore", "a", "b"], "Pass one FOLDER"),
        (["export", "--yes"], "`--yes` cannot be used with `export`"),
        (["backup", "x", "--all"], "`--all` cannot be used"),
        (["--yes"], "cannot be used with `state`"),
        (["adopt", "--replace"], "`--replace` cannot be used"),
    ],
)
def test_invalid_combinations_of_state_arguments_are_refused(
    handrail: Program, arguments: list[str], problem: str
) -> None:
    refused = handrail("state", *arguments)
    assert refused.code == 2 and problem in refused.err


def test_backup_and_export_without_state_are_errors(handrail: Program, tmp_path: Path) -> None:
    for arguments in (["backup", str(tmp_path / "b")], ["export"]):
        done = handrail("state", *arguments)
        assert done.code != 0 and "does not exist yet" in done.err
    assert not (tmp_path / "b").exists()
    with pytest.raises(UsageError, match="is not a backup"):
        restore_state(folders_of(handrail), tmp_path / "b")
