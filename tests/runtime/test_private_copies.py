"""Files with hard links outside the workspace are not written by programs in it."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.runtime.test_guard import GuardFixture, ground

from handrail.contract.sandbox_protocol import ProgramSpec
from handrail.runtime.files import atomic_write
from handrail.runtime.guard import guarded_sandbox
from handrail.sandbox.view import cached_folder_tree as module
from handrail.sandbox.view.cached_folder_tree import FolderTree

pytestmark = pytest.mark.proves("S-07")
__all__ = ["ground"]

WRITE = (
    "for f in $(find . -type f -not -path './.git/*'); do chmod u+w $f; echo evil >> $f; truncate -s 0 $f; done; true"
)


def linked(ground: GuardFixture, *names: str, content: str = "the store's") -> Path:
    """A store outside the workspace, whose files have these names in it, too."""
    store = ground.place / "store"
    store.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        (store / str(number)).write_text(content)
        (store / str(number)).chmod(0o444)
        there = ground.workspace / name
        there.parent.mkdir(parents=True, exist_ok=True)
        os.link(store / str(number), there)
    return store


def untouched(store: Path, content: str = "the store's") -> bool:
    return {(file.read_text(), file.stat().st_mode & 0o777) for file in store.iterdir()} == {(content, 0o444)}


async def test_a_program_writes_a_private_copy_of_a_hard_linked_file(ground: GuardFixture) -> None:
    store = linked(ground, "node_modules/.pnpm/a@1/index.js", "a.txt", "b/c/d")
    before = (ground.workspace / "a.txt").stat()
    assert (await ground.run("cat a.txt"))[1] == "the store's"
    after = (ground.workspace / "a.txt").stat()
    assert after.st_nlink == 1 and (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    assert (await ground.run(WRITE))[0] == 0
    assert untouched(store) and (ground.workspace / "a.txt").read_text() == ""
    assert list(ground.workspace.rglob(".handrail-*")) == []


async def test_files_beyond_the_copy_limit_are_read_only_and_copied_later(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "MAX_COPIED_FILES", 2)
    store = linked(ground, *(f"node_modules/.pnpm/p{number}/f" for number in range(5)))
    done = await ground.shell().run(WRITE)
    assert untouched(store) and any("hard links" in note for note in done.notes), done
    assert sum(path.stat().st_nlink > 1 for path in ground.workspace.rglob("f")) == 3
    for _ in range(2):
        await ground.run(WRITE)
    assert untouched(store)
    assert {path.read_text() for path in ground.workspace.rglob("f")} == {""}


async def test_private_copies_are_made_outside_the_event_loop_thread(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    make = atomic_write.replace_hard_links_by_copies

    def noted(root: str, files: Iterable[tuple[str, tuple[int, int]]]) -> set[str]:
        threads.append(threading.get_ident())
        return make(root, files)

    monkeypatch.setattr(guarded_sandbox, "replace_hard_links_by_copies", noted)
    assert (await ground.run("echo looked"))[1] == "looked\n"
    linked(ground, "a.txt")
    assert (await ground.run("cat a.txt"))[1] == "the store's"
    assert (ground.workspace / "a.txt").stat().st_nlink == 1
    assert threads and threading.get_ident() not in threads


async def test_a_hard_linked_file_too_large_to_copy_is_read_only(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "MAX_COPIED_BYTES", 5)
    store = linked(ground, "large")
    await ground.run(WRITE)
    assert untouched(store) and (ground.workspace / "large").read_text() == "the store's"


async def test_hard_linked_files_beyond_the_copy_limit_are_read_only_by_folder(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "MAX_COPIED_FILES", 0)
    store = linked(ground, *(f"node_modules/.pnpm/p{number // 10}/f{number}" for number in range(3_000)))
    (ground.workspace / "src").mkdir()
    (ground.workspace / "src" / "mine").write_text("mine")
    code, output = await ground.run(f"({WRITE}) 2> /dev/null; echo x > src/new; echo worked")
    assert (code, output) == (0, "worked\n") and untouched(store)
    assert (ground.workspace / "src" / "mine").read_text() == "" and (ground.workspace / "src" / "new").exists()


async def test_hard_links_within_the_workspace_stay_links(ground: GuardFixture) -> None:
    (ground.workspace / "a").write_text("one")
    os.link(ground.workspace / "a", ground.workspace / "b")
    assert (await ground.run("ln a c; echo two > c; cat b"))[1] == "two\n"
    assert (ground.workspace / "a").stat().st_nlink == 3
    assert (await ground.run("echo three > a; cat b"))[1] == "three\n"


async def test_hard_links_between_two_writable_folders_are_not_outside_links(ground: GuardFixture) -> None:
    other = ground.place / "other"
    (ground.workspace / "a").write_text("one")
    os.link(ground.workspace / "a", other / "a")
    trees = [FolderTree(str(ground.workspace)), FolderTree(str(other)), FolderTree(str(ground.workspace))]
    for tree in trees:
        tree.refresh()
    assert atomic_write.find_outside_hard_links(trees) == {}
    assert list(atomic_write.find_outside_hard_links([*trees[:1], *trees[2:]])) == [str(ground.workspace / "a")]


async def test_a_hard_link_made_later_elsewhere_is_found_at_the_next_count(
    ground: GuardFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ground.workspace / "a.txt").write_text("the store's")
    (ground.workspace / "a.txt").chmod(0o444)
    assert (await ground.run("echo looked"))[1] == "looked\n"
    (ground.place / "backup").mkdir()
    os.link(ground.workspace / "a.txt", ground.place / "backup" / "a.txt")
    monkeypatch.setattr(module, "RECOUNT_NS", -1)
    await ground.run(WRITE)
    assert untouched(ground.place / "backup")


async def test_a_program_with_a_read_only_workspace_leaves_hard_links_unchanged(ground: GuardFixture) -> None:
    linked(ground, "a.txt")
    profile = dataclasses.replace(ground.profile, workspace_writable=False)
    process = await ground.sandbox.start(
        ground.capabilities, profile, ProgramSpec(["/bin/bash", "-c", "echo x >> a.txt"])
    )
    assert await process.wait() != 0
    await process.kill()
    assert (ground.workspace / "a.txt").stat().st_nlink == 2


def test_a_name_that_gets_another_file_during_copying_keeps_that_file(tmp_path: Path) -> None:
    root = tmp_path.resolve()
    (root / "store").write_text("the store's")
    (root / "ws").mkdir()
    os.link(root / "store", root / "ws" / "a")
    file = (root / "store").stat().st_dev, (root / "store").stat().st_ino

    def files() -> Iterator[tuple[str, tuple[int, int]]]:
        yield str(root / "ws" / "a"), file
        # Its copy is made, and has not taken the name.
        (root / "edit").write_text("a person's")
        (root / "edit").rename(root / "ws" / "a")

    assert atomic_write.replace_hard_links_by_copies(str(root / "ws"), files()) == set()
    assert (root / "ws" / "a").read_text() == "a person's" and os.listdir(root / "ws") == ["a"]
