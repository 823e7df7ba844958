"""Reports about file systems that lack operations: shared folders of a host, FUSE, vfat, and disks that are full."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.field.folding_disk import mounted
from tests.kernel.test_agents import confined

from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.session_protocols import Session
from handrail.kernel.local_kernel import LocalKernel
from handrail.record.artifacts import ArtifactStore
from handrail.sandbox.view.cached_folder_tree import FolderTree
from handrail.store.state_folders import remove_tree
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel

DISKS = {
    "no folder sync": {"fsyncdir": "EINVAL", "fsync": "EINVAL"},
    "folder sync not supported": {"fsyncdir": "EOPNOTSUPP"},
    "folder sync refused": {"fsyncdir": "EBADF"},
    "no replaced names": {"replace": "EEXIST", "flags": "EINVAL", "link": "EPERM"},
    "replaced names refused": {"replace": "EACCES", "flags": "EINVAL", "link": "EOPNOTSUPP"},
    "links refused": {"flags": "EINVAL", "link": "EACCES"},
    "no permissions": {"chmod": "EOPNOTSUPP", "chown": "EINVAL"},
    "of another user": {"chmod": "EPERM", "chown": "EINVAL", "owner": "1234"},
    "vfat": {"chmod": "EPERM", "chown": "EPERM", "modes": "755", "times": "2", "link": "EPERM", "flags": "EINVAL"},
    "numbers by path": {"numbers": "path"},
    "numbers by spelling": {"numbers": "many"},
}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes owners")


@asynccontextmanager
async def opened(folder: Path) -> AsyncGenerator[tuple[LocalKernel, Session]]:
    handler = ScriptedApprovalHandler([ApprovalAnswer("once")] * 9)
    async with temporary_kernel(folder, rules=["allow *", "allow bash *"]) as kernel:
        yield kernel, await kernel.session(approval_handler=handler)


async def call(session: Session, tool: str, **arguments: object) -> None:
    result = await session.call(tool, arguments)
    assert result.ok, (tool, arguments, result.error_text)


@pytest.mark.parametrize("habits", DISKS.values(), ids=DISKS.keys())
async def test_files_are_written_moved_and_deleted_on_a_disk_that_lacks_operations(
    habits: dict[str, str], tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", tmp_path / "ws", "exact", **habits) as disk:
        (disk / "old.txt").write_text("one\ntwo\n")
        (disk / "gone.txt").write_text("gone\n")
        (disk / "d").mkdir()
        (disk / "d" / "x").write_text("x\n")
        async with opened(tmp_path) as (kernel, session):
            await call(session, "write", path="new/deep/a.txt", content="a\n")
            await call(session, "read", path="old.txt")
            await call(session, "edit", path="old.txt", old="one", new="ONE")
            await call(session, "write", path="old.txt", content="ONE\ntwo\nthree\n")
            patch = (
                "*** Update File: old.txt\n@@\n-two\n+zwei\n*** Add File: added.txt\n+hi\n*** Delete File: gone.txt\n"
            )
            await call(session, "apply_patch", patch=f"*** Begin Patch\n{patch}*** End Patch\n")
            assert (disk / "old.txt").read_text() == "ONE\nzwei\nthree\n" and not (disk / "gone.txt").exists()
            await call(session, "file.move", path="d", to="e/f")
            await call(session, "file.move", path="added.txt", to="moved.txt")
            assert (disk / "e" / "f" / "x").read_text() == "x\n" and (disk / "moved.txt").read_text() == "hi\n"
            await call(session, "file.delete", path="moved.txt")
            await call(session, "file.delete", path="e", recursive=True)
            assert sorted(os.listdir(disk)) == ["new", "old.txt"]
            report = await kernel.undo(session=session.id)
            assert report.is_complete, report
            assert (disk / "old.txt").read_text() == "one\ntwo\n" and (disk / "gone.txt").read_text() == "gone\n"
            assert sorted(os.listdir(disk)) == ["d", "gone.txt", "old.txt"] and (disk / "d" / "x").exists()


async def test_a_failed_write_leaves_no_new_folders(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", tmp_path / "ws", "exact", space="100") as disk:
        (disk / "old.txt").write_text("old\n")
        async with opened(tmp_path) as (_, session):
            result = await session.call("write", {"path": "a/b/c.txt", "content": "x" * 5_000})
            assert result.error_kind == "limit" and "Nothing was changed" in str(result.error_text)
            await call(session, "read", path="old.txt")
            result = await session.call("edit", {"path": "old.txt", "old": "old", "new": "new" * 500})
            assert result.error_kind == "limit" and "No space left" in str(result.error_text)
            patch = f"*** Begin Patch\n*** Add File: n/m.txt\n+{'y' * 900}\n*** End Patch\n"
            result = await session.call("apply_patch", {"patch": patch})
            assert result.error_kind == "limit", result
        assert os.listdir(disk) == ["old.txt"] and (disk / "old.txt").read_text() == "old\n"


@pytest.mark.parametrize(
    ("number", "text"), [("EROFS", "read-only"), ("EDQUOT", "Disk quota exceeded"), ("EACCES", "Permission denied")]
)
async def test_a_folder_that_cannot_be_made_is_reported_by_each_tool(number: str, text: str, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", tmp_path / "ws", "exact", mkdir=number, create=number) as disk:
        async with opened(tmp_path) as (_, session):
            for tool, arguments in (
                ("write", {"path": "a/b.txt", "content": "x"}),
                ("write", {"path": "b.txt", "content": "x"}),
                ("apply_patch", {"patch": "*** Begin Patch\n*** Add File: c/d\n+x\n*** End Patch\n"}),
            ):
                result = await session.call(tool, arguments)
                assert not result.ok and text in str(result.error_text), (tool, result)
        assert os.listdir(disk) == []


async def test_a_moved_file_reports_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", tmp_path / "ws", "exact", mkdir="EDQUOT") as disk:
        (disk / "a.txt").write_text("a")
        async with opened(tmp_path) as (_, session):
            result = await session.call("file.move", {"path": "a.txt", "to": "b/a.txt"})
        assert result.error_kind == "limit" and "Disk quota exceeded" in str(result.error_text)
        assert os.listdir(disk) == ["a.txt"]


async def test_a_broken_disk_is_reported_with_the_change_that_was_made(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", tmp_path / "ws", "exact", fsyncdir="EIO") as disk:
        (disk / "a.txt").write_text("a")
        async with opened(tmp_path) as (kernel, session):
            result = await session.call("file.move", {"path": "a.txt", "to": "b.txt"})
            assert "`b.txt` was moved, but its folder could not be made durable" in str(result.error_text)
            result = await session.call("file.delete", {"path": "b.txt"})
            assert "`b.txt` was deleted, but" in str(result.error_text)
            assert os.listdir(disk) == []
            report = await kernel.undo(session=session.id)
            assert report.is_complete and os.listdir(disk) == ["a.txt"], report


def test_saved_state_needs_no_sync_of_folders(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", tmp_path / "state", "exact", fsyncdir="EINVAL") as disk:
        assert ArtifactStore(disk).put(b"data").startswith("sha256:")


def test_a_tree_is_removed_where_a_folder_is_listed_as_it_was_when_opened(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", tmp_path / "m", "exact", chmod="EPERM") as disk:
        for name in ("a/b/c", "a/d", "e"):
            (disk / "top" / name).mkdir(parents=True)
            (disk / "top" / name / "file").write_text("x")
        remove_tree(disk / "top")
        assert os.listdir(disk) == []


def test_new_entries_are_seen_where_the_times_of_folders_stay_the_same(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", tmp_path / "m", "exact", times="1000000000") as disk:
        (disk / "a").mkdir()
        tree = FolderTree(str(disk))
        tree.refresh()
        (disk / "a" / ".git").mkdir()
        (disk / "a" / ".git" / "config").write_text("x")
        before = tree.version
        assert tree.refresh() > before and tree.file_count == 1


@confined
async def test_a_repository_made_by_a_program_is_found_where_the_times_of_folders_stay_the_same(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", tmp_path / "ws", "exact", times="1000000000") as disk:
        (disk / "a").mkdir()
        async with opened(tmp_path) as (_, session):
            await call(session, "bash", command="ls")
            result = await session.call("bash", {"command": "mkdir -p a/.git/hooks; touch a/.git/hooks/pre-commit"})
            assert result.error_kind == "denied" and "a/.git" in str(result.error_text), result
        assert not (disk / "a" / ".git" / "hooks").exists()


async def test_a_replaced_file_keeps_its_attributes_and_access_list(tmp_path: Path) -> None:
    file = tmp_path / "ws" / "a.txt"
    async with opened(tmp_path) as (_, session):
        file.write_text("old\n")
        entries = ((1, 6, 0xFFFFFFFF), (2, 6, 12345), (4, 4, 0xFFFFFFFF), (16, 6, 0xFFFFFFFF), (32, 4, 0xFFFFFFFF))
        given = (2).to_bytes(4, "little") + b"".join(
            tag.to_bytes(2, "little") + bits.to_bytes(2, "little") + who.to_bytes(4, "little")
            for tag, bits, who in entries
        )
        try:
            os.setxattr(file, "user.origin", b"here")
            os.setxattr(file, "system.posix_acl_access", given)
        except OSError as error:
            pytest.skip(f"no attributes here: {error.strerror}")
        await call(session, "read", path="a.txt")
        await call(session, "edit", path="a.txt", old="old", new="new")
    assert file.read_text() == "new\n" and os.getxattr(file, "user.origin") == b"here"
    assert os.getxattr(file, "system.posix_acl_access") == given


@as_root
async def test_a_replaced_file_keeps_owner_and_group_in_a_folder_of_another_group(tmp_path: Path) -> None:
    folder = tmp_path / "ws" / "shared"
    async with opened(tmp_path) as (_, session):
        folder.mkdir()
        os.chown(folder, 0, 12345)
        folder.chmod(0o2775)
        (folder / "a.txt").write_text("old\n")
        os.chown(folder / "a.txt", 12346, 12347)
        (folder / "a.txt").chmod(0o664)
        await call(session, "read", path="shared/a.txt")
        await call(session, "edit", path="shared/a.txt", old="old", new="new")
        await call(session, "write", path="shared/inner/b.txt", content="b\n")
    found = (folder / "a.txt").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12346, 12347, 0o664)
    assert (folder / "inner" / "b.txt").stat().st_gid == 12345
    assert (folder / "inner").stat().st_mode & stat.S_ISGID


@as_root
@confined
async def test_root_runs_programs_in_a_workspace_of_a_user_who_can_read_saved_outputs(tmp_path: Path) -> None:
    async with opened(tmp_path) as (_, session):
        os.chown(session.workdir, 1234, 1234)
        first = await session.call("bash", {"command": "id -u; seq 1 200000"})
        assert first.ok and first.metadata["output_path"], first.error_text
        second = await session.call("bash", {"command": f"tail -n 1 {first.metadata['output_path']}; touch made"})
        assert second.data["output"] == "200000\n", second
        assert Path(session.workdir, "made").stat().st_uid == 1234
