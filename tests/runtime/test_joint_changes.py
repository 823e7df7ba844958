"""Several files change together or not at all: after errors, kills, and concurrent changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.runtime.kill_points import CHANGES, NEW, OLD, allow_all, fill, read_tree

from handrail.contract.errors import ToolError
from handrail.contract.services.file_services import FileChange
from handrail.runtime.files.joint_changes import MultiFileChangeJournal
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots

ROOT = Path(__file__).parents[2]


def run_program(folder: Path, count: int) -> str:
    words = [sys.executable, "-m", "tests.runtime.kill_points", str(folder), str(count)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def kill_many(folder: Path, count: int) -> Counter[str]:
    lines, outcomes = json.loads(run_program(folder, count))
    assert lines > 100
    return Counter(outcomes)


@pytest.mark.proves("T-06a")
def test_a_kill_at_any_point_leaves_all_files_old_or_all_new(tmp_path: Path) -> None:
    outcomes = kill_many(tmp_path, 24)
    assert outcomes.keys() == {"old", "new"} and outcomes["old"] > 2 < outcomes["new"], outcomes


@pytest.mark.slow
def test_two_hundred_kills_leave_all_files_old_or_all_new(tmp_path: Path) -> None:
    outcomes = kill_many(tmp_path, 200)
    assert outcomes.keys() == {"old", "new"}, outcomes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    os.umask(0o022)
    fill(tmp_path / "ws")
    return tmp_path / "ws"


def open_files(root: Path) -> RootedFiles:
    journal = MultiFileChangeJournal(root.parent / "journal")
    return RootedFiles(SessionRoots(root), SeenFileHashes(), allow_all, journal=journal)


async def test_several_files_change_together_and_the_journal_is_emptied(root: Path) -> None:
    shown = await open_files(root).change_atomically(CHANGES)
    assert read_tree(root) == NEW and list(shown) == [one.path for one in CHANGES]
    assert os.listdir(root.parent / "journal") == []


@pytest.mark.parametrize(
    "wrong",
    [
        FileChange("last.txt", b"other", b"x"),
        FileChange("moved.sh/inner", None, b"x"),
        FileChange("gone.txt/inner", None, b"x"),
        FileChange("new", None, b"a file where a folder is made"),
        FileChange("sub", None, b"x"),
        FileChange("sub/last.txt", b"x", None),
    ],
)
async def test_one_impossible_change_prevents_all_joint_changes(root: Path, wrong: FileChange) -> None:
    (root / "last.txt").write_text("last")
    before = read_tree(root)
    with pytest.raises(ToolError):
        await open_files(root).change_atomically((*CHANGES, wrong))
    assert read_tree(root) == before and sorted(os.listdir(root)) == [
        "a.txt",
        "gone.txt",
        "last.txt",
        "moved.sh",
        "sub",
    ]
    assert not list((root.parent / "journal").glob("*"))


def leave_half(root: Path) -> Path:
    """Kill a process while it gives names, and return its journal."""
    run_program(root.parent, 0)
    (file,) = (root.parent / "journal").glob("*.json")
    return file


async def test_the_next_change_finishes_the_change_of_a_killed_process(root: Path) -> None:
    leave_half(root)
    await open_files(root).change_atomically([FileChange("other.txt", None, b"o\n")])
    assert read_tree(root) == {**NEW, "other.txt": (0o644, b"o\n")}


def test_a_file_that_changed_after_a_kill_rolls_the_other_files_back(root: Path) -> None:
    leave_half(root)
    (root / "sub/b.txt").write_text("mine")
    MultiFileChangeJournal(root.parent / "journal").recover()
    assert read_tree(root) == {**OLD, "sub/b.txt": (0o600, b"mine")}


KILLED_BEFORE_THE_DECISION = """
import os, sys
from pathlib import Path
from handrail.runtime.files.joint_changes import MultiFileChangeJournal, MultiFileChange
from handrail.runtime.files.session_roots import SessionRoots

located = SessionRoots(sys.argv[1]).resolve_path("a.txt")
change = MultiFileChange(located, b"a\\n", b"never decided", None, None, lambda before, after: os._exit(0))
MultiFileChangeJournal(Path(sys.argv[2])).change_atomically([change])
sys.exit(1)
"""


def test_a_file_deleted_after_a_kill_before_the_commit_is_not_recreated(root: Path) -> None:
    journal = root.parent / "journal"
    subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_DECISION, str(root), str(journal)], cwd=ROOT, check=True)
    (root / "a.txt").unlink()
    assert MultiFileChangeJournal(journal).recover() == 1
    assert read_tree(root) == {name: content for name, content in OLD.items() if name != "a.txt"}
    assert sorted(os.listdir(root)) == ["gone.txt", "moved.sh", "sub"] and os.listdir(journal) == []


def test_a_damaged_journal_entry_is_removed_and_one_of_a_missing_workspace_is_kept(root: Path) -> None:
    file = leave_half(root)
    other = file.with_name("0.json")
    other.write_text("{")
    root.rename(root.parent / "elsewhere")
    assert MultiFileChangeJournal(file.parent).recover() == 0 and file.exists() and not other.exists()
    (root.parent / "elsewhere").rename(root)
    assert MultiFileChangeJournal(file.parent).recover() == 1 and read_tree(root) == NEW


async def test_several_files_are_not_changed_together_without_a_journal(root: Path) -> None:
    files = RootedFiles(SessionRoots(root), SeenFileHashes(), allow_all)
    with pytest.raises(ToolError, match="one at a time"):
        await files.change_atomically(CHANGES)
    assert read_tree(root) == OLD
