"""Moving, deleting and creating files and folders: nothing is overwritten, and everything is checked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import RecordingAccessCheck

from handrail.contract.errors import ToolError
from handrail.runtime.files import entry_moves
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes


async def refused(doing: Any, kind: str, text: str | None = None) -> None:
    with pytest.raises(ToolError, match=text) as caught:
        await doing
    assert caught.value.kind == kind, caught.value


async def test_a_file_moves_into_new_folders_and_stays_known_to_the_session(
    files: RootedFiles, workspace: Path, seen: SeenFileHashes
) -> None:
    (workspace / "a.txt").write_text("one")
    await files.read_lines("a.txt")
    moved = await files.move("a.txt", "src/new/b.txt")
    assert (moved.path, moved.kind, moved.entries, moved.size) == ("src/new/b.txt", "file", 1, 3)
    assert not (workspace / "a.txt").exists() and (workspace / "src/new/b.txt").read_text() == "one"
    assert await files.read_for_edit("src/new/b.txt") == b"one"
    assert seen.find_seen_hash(str(workspace / "a.txt")) is None


async def test_a_folder_moves_with_all_its_entries(files: RootedFiles, workspace: Path) -> None:
    (workspace / "src/deep").mkdir(parents=True)
    (workspace / "src/a.py").write_text("a")
    (workspace / "src/deep/b.py").write_text("bb")
    (workspace / "src/link").symlink_to("../elsewhere")
    moved = await files.move("src", "lib/src2")
    assert (moved.kind, moved.entries, moved.size) == ("directory", 5, 3)
    assert (workspace / "lib/src2/deep/b.py").read_text() == "bb" and not (workspace / "src").exists()
    assert os.readlink(workspace / "lib/src2/link") == "../elsewhere"


async def test_a_move_never_replaces_an_existing_file(files: RootedFiles, workspace: Path) -> None:
    (workspace / "a").write_text("a")
    (workspace / "b").write_text("b")
    (workspace / "d").mkdir()
    for target in ("b", "d", "a", "a/c"):
        with pytest.raises(ToolError):
            await files.move("a", target)
    await refused(files.move("d", "d/e"), "invalid_input", "is inside it")
    assert (workspace / "a").read_text() == "a" and (workspace / "b").read_text() == "b"
    await refused(files.move("missing", "c"), "failed", "does not exist")


async def test_files_and_empty_folders_are_deleted_and_full_folders_only_recursively(
    files: RootedFiles, workspace: Path
) -> None:
    (workspace / "a").write_text("a")
    assert (await files.delete("a")).kind == "file" and not (workspace / "a").exists()
    (workspace / "e").mkdir()
    assert (await files.delete("e")).entries == 1 and not (workspace / "e").exists()
    (workspace / "d/e").mkdir(parents=True)
    (workspace / "d/e/f").write_text("x")
    (workspace / "keep").write_text("kept")
    (workspace / "d/link").symlink_to("../keep")
    await refused(files.delete("d"), "conflict", "with 3 entries")
    assert (await files.delete("d", recursive=True)).entries == 4
    assert sorted(os.listdir(workspace)) == ["keep"] and (workspace / "keep").read_text() == "kept"
    await refused(files.delete("d"), "failed", "does not exist")


async def test_a_file_that_changed_since_it_was_read_is_not_deleted(files: RootedFiles, workspace: Path) -> None:
    (workspace / "a").write_text("a")
    await files.read_lines("a")
    (workspace / "a").write_text("theirs")
    await refused(files.delete("a"), "conflict", "changed since")
    assert (workspace / "a").read_text() == "theirs"


async def test_missing_folders_are_made_and_a_file_or_protected_path_is_not_replaced(
    files: RootedFiles, workspace: Path
) -> None:
    assert (await files.make_folder("a/b/c")).kind == "directory"
    assert (await files.make_folder("a/b/c")).path == "a/b/c" and (workspace / "a/b/c").is_dir()
    (workspace / "f").write_text("x")
    await refused(files.make_folder("f"), "conflict", "not a folder")
    await refused(files.make_folder(".git/hooks"), "denied")


@pytest.mark.parametrize("path", ["../ws_secret", "../ws_secret/key", "/etc/hosts"])
async def test_file_operations_across_the_workspace_boundary_are_denied(
    files: RootedFiles, workspace: Path, path: str
) -> None:
    (workspace / "a").write_text("a")
    for doing in (
        files.move("a", path),
        files.move(path, "b"),
        files.delete(path, recursive=True),
        files.make_folder(path),
    ):
        await refused(doing, "denied")
    assert (workspace.parent / "ws_secret/key").read_text() == "TOP-SECRET"


@pytest.mark.parametrize("path", [".", "sub/..", ""])
async def test_a_root_folder_is_neither_moved_nor_deleted(files: RootedFiles, workspace: Path, path: str) -> None:
    (workspace / "sub").mkdir()
    await refused(files.delete(path, recursive=True), "invalid_input")
    await refused(files.move(path, "new"), "invalid_input")
    assert workspace.is_dir()


async def test_a_symbolic_link_is_not_moved_or_deleted_in_place_of_its_target(
    files: RootedFiles, workspace: Path
) -> None:
    (workspace / "real").mkdir()
    (workspace / "real/f").write_text("x")
    (workspace / "link").symlink_to("real")
    (workspace / "real/out").symlink_to("../../ws_secret")
    for path in ("link", "link/"):
        await refused(files.delete(path, recursive=True), "invalid_input", "symbolic link")
        await refused(files.move(path, "moved"), "invalid_input", "symbolic link")
    assert (await files.delete("link/f")).path == "real/f"  # a link on the way is followed, as for every file tool
    await refused(files.delete("real/out"), "denied")
    assert (await files.delete("real", recursive=True)).entries == 2
    assert (workspace.parent / "ws_secret/key").exists()


@pytest.mark.parametrize(
    "path", [".git/config", ".git", ".vscode/tasks.json", "sub/.git/hooks/pre-commit", "handrail.toml", ".bashrc"]
)
async def test_a_protected_path_cannot_be_moved_deleted_or_created_by_a_move(
    files: RootedFiles, workspace: Path, path: str
) -> None:
    place = workspace / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("theirs")
    (workspace / "mine").write_text("mine")
    await refused(files.delete(path), "denied")
    await refused(files.move(path, "other"), "denied")
    place.unlink()
    await refused(files.move("mine", path), "denied")
    assert (workspace / "mine").read_text() == "mine"


async def test_each_entry_of_a_moved_folder_is_checked_under_both_paths(
    files: RootedFiles, workspace: Path, judge: RecordingAccessCheck
) -> None:
    (workspace / "x/sub").mkdir(parents=True)
    (workspace / "x/fish").mkdir()
    (workspace / "x/fish/config.fish").write_text("evil")
    await refused(files.move("x", ".config"), "denied", "config.fish")
    shutil.rmtree(workspace / "x/fish")
    (workspace / "x/sub/.env").write_text("KEY=1")
    judge.refuse[str(workspace / "x/sub/.env")] = "No rule allows .env."
    for doing in (files.move("x", "y"), files.delete("x", recursive=True)):
        await refused(doing, "denied", r"\.env")
    judge.refuse.clear()
    judge.refuse[str(workspace / "y/sub/.env")] = "No rule allows y."
    await refused(files.move("x", "y"), "denied", "y")
    assert (workspace / "x/sub/.env").exists() and not (workspace / "y").exists()
    (workspace / "r/.git").mkdir(parents=True)
    (workspace / "r/.git/HEAD").write_text("ref: refs/heads/main\n")
    await refused(files.delete("r", recursive=True), "denied")


async def test_a_private_key_is_not_moved_and_a_moved_file_needs_read_permission(
    files: RootedFiles, workspace: Path, judge: RecordingAccessCheck
) -> None:
    (workspace / "id_rsa").write_text("-----BEGIN OPENSSH PRIVATE KEY-----")
    await refused(files.move("id_rsa", "notes.txt"), "denied")
    (workspace / ".env").write_text("KEY=1")
    asked: list[tuple[str, str]] = judge.asked
    await files.move(".env", "env.txt")
    assert ("fs.read", str(workspace / ".env")) in asked and ("fs.write", str(workspace / "env.txt")) in asked


async def test_a_move_cannot_complete_a_git_directory(files: RootedFiles, workspace: Path) -> None:
    (workspace / "x").write_text("ref: refs/heads/main\n")
    await refused(files.move("x", "bare/HEAD"), "denied", "git")
    (workspace / "bare/refs").mkdir(parents=True)
    (workspace / "bare/HEAD").write_text("ref: refs/heads/main\n")
    (workspace / "o").mkdir()
    await refused(files.move("o", "bare/objects"), "denied")


async def test_a_tree_that_changes_during_a_move_or_delete_keeps_its_place(
    files: RootedFiles, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = entry_moves.atomic_write.rename_without_overwriting

    def adding_first(parent: int, old: str, new: str, new_parent: int) -> None:
        if (workspace / "d").exists():
            (workspace / "d/late").write_text("x")
        rename(parent, old, new, new_parent)

    monkeypatch.setattr(entry_moves.atomic_write, "rename_without_overwriting", adding_first)
    for doing in (lambda: files.move("d", "e"), lambda: files.delete("d", recursive=True)):
        shutil.rmtree(workspace / "d", ignore_errors=True)
        (workspace / "d").mkdir()
        await refused(doing(), "conflict", "changed meanwhile")
        assert sorted(os.listdir(workspace)) == ["d"] and os.listdir(workspace / "d") == ["late"]


async def test_trees_with_too_many_entries_levels_or_special_files_are_refused(
    files: RootedFiles, workspace: Path
) -> None:
    (workspace / "many").mkdir()
    for number in range(entry_moves.MAX_TREE_ENTRIES):
        (workspace / f"many/{number}").touch()
    await refused(files.delete("many", recursive=True), "limit", "more than 1000 entries")
    deep = workspace / "deep"
    deep.joinpath(*["d"] * (entry_moves.MAX_TREE_DEPTH + 2)).mkdir(parents=True)
    await refused(files.move("deep", "other"), "limit", "levels")
    (workspace / "p").mkdir()
    os.mkfifo(workspace / "p/fifo")
    await refused(files.delete("p", recursive=True), "denied", "FIFO")
    assert len(os.listdir(workspace / "many")) == entry_moves.MAX_TREE_ENTRIES
