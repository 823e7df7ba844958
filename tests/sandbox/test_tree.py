"""A scan of a folder, and that a second scan misses no change."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from handrail.sandbox.view.cached_folder_tree import FolderScanTooLong, FolderTree

pytestmark = pytest.mark.proves("S-07")


def names(tree: FolderTree) -> set[str]:
    return {os.path.relpath(path, tree.root) for path in tree.get_protected_entries()}


def test_protected_names_are_found_in_any_folder(tmp_path: Path) -> None:
    for name in (
        *(
            ".git/hooks/pre-commit",
            ".git/config",
            ".git/HEAD",
            ".git/refs/heads/config",
            ".vscode/tasks.json",
            "src/a.py",
        ),
        *("lib/.git/config", ".git/modules/lib/config", "bare.git/HEAD", "bare.git/config", "bare.git/objects/x"),
        *("bare.git/refs/x", "bare.git/hooks/x", "plain/config", "plain/HEAD", "a/.envrc", "handrail.toml"),
        *("src/handrail.toml", "tree/.git", "gone/HEAD", "gone/commondir", "gone/config"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".mcp.json").symlink_to("src/a.py")
    tree = FolderTree(str(tmp_path))
    tree.refresh()
    assert names(tree) == {
        *(".git/hooks", ".git/config", ".vscode", "lib/.git/config", ".git/modules/lib/config", "bare.git/config"),
        *("bare.git/hooks", "a/.envrc", "handrail.toml", "tree/.git", "gone/config", "gone/commondir", ".mcp.json"),
    }
    assert {os.path.relpath(path, tmp_path) for path in tree.list_git_directories()} >= {
        ".git",
        "lib/.git",
        "bare.git",
        "gone",
    }


def test_a_second_scan_finds_a_change_within_the_same_clock_tick(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    tree = FolderTree(str(tmp_path))
    version = tree.refresh()
    for number in range(20):
        (tmp_path / "d" / f".envrc{number % 2}").write_text("x")
        (tmp_path / "d" / ".envrc").write_text("x")
        version, before = tree.refresh(), version
        assert version != before and names(tree) == {"d/.envrc"}
        (tmp_path / "d" / ".envrc").unlink()
        version, before = tree.refresh(), version
        assert version != before and names(tree) == set()


@pytest.mark.parametrize("folders", [["d"], ["d", "e"], ["."]])
def test_a_scan_that_stops_at_too_many_files_is_completed_by_the_next_scan(tmp_path: Path, folders: list[str]) -> None:
    tree = FolderTree(str(tmp_path))
    before = tree.refresh()
    for number in range(12):
        folder = tmp_path / folders[number % len(folders)]
        folder.mkdir(exist_ok=True)
        (folder / f".envrc{number or ''}").touch()
    tree.max_files = 10
    for _ in range(2):
        with pytest.raises(FolderScanTooLong):
            tree.refresh()
    tree.max_files = 12
    assert tree.refresh() > before and tree.file_count == 12
    assert names(tree) == {os.path.normpath(f"{folders[0]}/.envrc")}
    (tmp_path / folders[0] / "more").touch()
    with pytest.raises(FolderScanTooLong):
        tree.refresh()
    tree.max_files = 13
    assert tree.refresh() > before and tree.file_count == 13


def test_an_unchanged_folder_is_not_read_again() -> None:
    tree = FolderTree(str(Path(os.__file__).resolve().parent / "email"))  # nobody has changed it just now
    version = tree.refresh()
    folders = list(map(id, tree.order))
    assert tree.refresh() == version and list(map(id, tree.order)) == folders


def test_the_tree_lists_a_folder_that_it_cannot_read(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(140):
        deep = deep / "d"
    deep.mkdir(parents=True)
    tree = FolderTree(str(tmp_path))
    tree.refresh()
    assert len(tree.list_unreadable_folders()) == 1 and len(tree.order) < 140


class Looking(RuleBasedStateMachine):
    """Whatever is made, moved and removed between looks: the next one knows what a fresh one would."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="handrail-tree-")).resolve()
        self.tree = FolderTree(str(self.root))

    places = st.lists(st.sampled_from(["a", "b", ".git", "modules"]), max_size=3)
    ends = st.sampled_from(["x", "config", "hooks", ".envrc", "HEAD", "objects", "refs", ".vscode"])

    @rule(place=places, name=ends, kind=st.sampled_from(["file", "folder", "link"]))
    def make(self, place: list[str], name: str, kind: str) -> None:
        folder = self.root.joinpath(*place)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if kind == "file":
                (folder / name).write_text("x")
            elif kind == "folder":
                (folder / name).mkdir()
            else:
                (folder / name).symlink_to("x")
        except OSError:
            pass

    @rule(place=places, name=ends)
    def remove(self, place: list[str], name: str) -> None:
        path = self.root.joinpath(*place, name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True) if path.parent.is_dir() else None

    @rule(source=places, place=places)
    def move(self, source: list[str], place: list[str]) -> None:
        try:
            self.root.joinpath(*source).rename(self.root.joinpath(*place, "moved"))
        except OSError:
            pass

    @invariant()
    def knows_what_a_fresh_look_finds(self) -> None:
        self.tree.refresh()
        fresh = FolderTree(str(self.root))
        fresh.refresh()
        assert self.tree.get_protected_entries() == fresh.get_protected_entries()
        assert self.tree.list_git_directories() == fresh.list_git_directories()
        assert [f.path for f in self.tree.order] == [f.path for f in fresh.order]

    def teardown(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


TestLooking = Looking.TestCase
TestLooking.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)


def test_a_fifo_with_the_reused_inode_number_of_a_file_is_detected(tmp_path: Path) -> None:
    file = tmp_path / "HEAD"
    file.write_text("x")
    number = file.stat().st_ino
    tree = FolderTree(str(tmp_path))
    tree.refresh()
    for _ in range(20):
        file.unlink()
        os.mkfifo(file)
        if file.stat().st_ino == number:  # ext4 gives the lowest free number
            break
    tree.refresh()
    assert tree.order[0].pipes == ("HEAD",)


def test_a_link_with_a_new_target_counts_as_a_change(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    tree = FolderTree(str(tmp_path))
    before = tree.refresh()
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("b")
    assert tree.refresh() > before
