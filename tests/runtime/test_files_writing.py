"""Writing: only over read content, atomic, and never over another edit."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import RecordingAccessCheck

from handrail.contract.errors import ToolError
from handrail.runtime.files import atomic_write
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots

pytestmark = pytest.mark.proves("T-07")


async def test_a_new_file_is_created_with_its_folders(files: RootedFiles, workspace: Path) -> None:
    written = await files.write("a/b/c.txt", b"hello")
    assert (written.path, written.created, written.size, written.previous_content) == ("a/b/c.txt", True, 5, None)
    assert written.sha256 == hashlib.sha256(b"hello").hexdigest()
    assert (workspace / "a/b/c.txt").read_bytes() == b"hello"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((workspace / "a/b/c.txt").stat().st_mode) == 0o666 & ~umask
    assert os.listdir(workspace / "a/b") == ["c.txt"]


def test_an_attribute_that_cannot_be_read_loses_no_other_one(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lister(_: int) -> list[str]:
        return names

    def read(_: int, name: str) -> bytes:
        if name == "user.gone":
            raise OSError(errno.ENODATA, "gone")
        return name.encode()

    names = ["user.gone", "user.there", "system.posix_acl_access", "security.other"]
    monkeypatch.setattr(os, "listxattr", lister)
    monkeypatch.setattr(os, "getxattr", read)
    with (workspace / "f").open("w") as file:
        found = atomic_write.OwnerAndPermissions.read(file.fileno())
    assert found.attributes == {name: name.encode() for name in names[1:3]}


def test_a_failed_write_removes_no_folder_behind_a_link(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs" / "b").mkdir(parents=True)
    located = SessionRoots(workspace).resolve_path("a/b/c.txt")
    with pytest.raises(RuntimeError), atomic_write.open_or_create_parent(located, "a/b"):
        (workspace / "a").rename(workspace / "moved")
        (workspace / "a").symlink_to(tmp_path / "theirs")
        raise RuntimeError
    assert (tmp_path / "theirs" / "b").is_dir()


async def test_a_file_that_was_never_read_is_not_overwritten(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").write_text("theirs")
    for door in (files.write("f", b"mine"), files.read_for_edit("f")):
        with pytest.raises(ToolError, match="has not been read") as caught:
            await door
        assert caught.value.kind == "conflict"
    assert (workspace / "f").read_text() == "theirs"


async def test_a_file_that_was_read_can_be_overwritten_repeatedly(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").write_text("one")
    await files.read_lines("f", count=1)
    assert (await files.write("f", b"two")).previous_content == b"one"
    assert await files.read_for_edit("f") == b"two"
    assert (await files.write("f", b"three")).created is False
    assert (workspace / "f").read_text() == "three"


async def test_a_partial_read_allows_an_edit_of_the_complete_file(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").write_bytes(b"x" * 300_000)
    await files.read_bytes("f", start=5, max_bytes=10)
    assert len(await files.read_for_edit("f")) == 300_000


async def test_a_change_that_keeps_size_and_time_is_detected_before_a_write(
    files: RootedFiles, workspace: Path
) -> None:
    target = workspace / "f"
    target.write_text("aaaa")
    before = target.stat()
    await files.read_bytes("f")
    target.write_text("bbbb")
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert target.stat().st_mtime_ns == before.st_mtime_ns
    for door in (files.write("f", b"mine"), files.read_for_edit("f"), files.write("f", b"mine", expected=b"aaaa")):
        with pytest.raises(ToolError, match="changed") as caught:
            await door
        assert caught.value.kind == "conflict"
    assert target.read_text() == "bbbb"


async def test_a_write_checks_the_expected_state_of_the_file(files: RootedFiles, workspace: Path) -> None:
    (workspace / "f").write_text("here")
    with pytest.raises(ToolError, match="already exists"):
        await files.write("f", b"x", expected="new")
    with pytest.raises(ToolError, match="no longer exists"):
        await files.write("absent", b"x", expected=b"was here")
    await files.write("f", b"exact", expected=b"here")
    assert (workspace / "f").read_text() == "exact"
    with pytest.raises(ToolError) as caught:
        await files.write(".", b"x")
    assert caught.value.kind == "invalid_input"


async def test_a_file_read_in_one_session_counts_as_unread_in_another(
    workspace: Path, judge: RecordingAccessCheck
) -> None:
    (workspace / "f").write_text("x")
    first, second = (RootedFiles(SessionRoots(workspace), SeenFileHashes(), judge) for _ in range(2))
    await first.read_bytes("f")
    await first.read_for_edit("f")
    with pytest.raises(ToolError):
        await second.read_for_edit("f")


async def test_one_of_fifty_parallel_writes_succeeds_and_the_others_get_a_conflict(
    files: RootedFiles, workspace: Path, judge: RecordingAccessCheck
) -> None:
    (workspace / "f").write_text("start")
    await files.read_bytes("f")
    many = [RootedFiles(SessionRoots(workspace), SeenFileHashes(), judge) for _ in range(50)]
    results = await asyncio.gather(
        *(one.write("f", f"writer {n}".encode(), expected=b"start") for n, one in enumerate(many)),
        return_exceptions=True,
    )
    landed = [n for n, result in enumerate(results) if not isinstance(result, BaseException)]
    assert len(landed) == 1
    assert all(isinstance(r, ToolError) and r.kind == "conflict" for n, r in enumerate(results) if n not in landed)
    assert (workspace / "f").read_text() == f"writer {landed[0]}"
    assert os.listdir(workspace) == ["f"]


async def test_fifty_parallel_edits_that_retry_on_conflict_all_succeed(
    workspace: Path, judge: RecordingAccessCheck
) -> None:
    (workspace / "f").write_bytes(b"")

    async def append(number: int) -> int:
        files = RootedFiles(SessionRoots(workspace), SeenFileHashes(), judge)
        tries = 0
        while True:
            tries += 1
            await files.read_bytes("f")
            try:
                old = await files.read_for_edit("f")
                await files.write("f", old + b"%d\n" % number, expected=old)
            except ToolError as error:
                assert error.kind == "conflict"
            else:
                return tries

    await asyncio.gather(*(append(n) for n in range(50)))
    assert sorted(map(int, (workspace / "f").read_text().split())) == list(range(50))


async def test_a_concurrent_write_just_before_the_rename_is_kept(
    files: RootedFiles, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other writer strikes between the last look and the exchange of names."""
    target = workspace / "f"
    target.write_text("old")
    await files.read_bytes("f")
    exchange = atomic_write._rename  # pyright: ignore[reportPrivateUsage]
    struck: list[bool] = []

    def strike(parent: int, old: str, new: str, flags: int) -> bool:
        if not struck:
            struck.append(True)
            (workspace / "other").write_text("somebody else's")
            (workspace / "other").replace(target)
        return exchange(parent, old, new, flags)

    monkeypatch.setattr(atomic_write, "_rename", strike)
    with pytest.raises(ToolError) as caught:
        await files.write("f", b"mine")
    assert caught.value.kind == "conflict"
    assert target.read_text() == "somebody else's"
    assert os.listdir(workspace) == ["f"]


async def test_a_file_is_replaced_without_support_for_atomic_exchange(
    files: RootedFiles, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> bool:
        return False

    monkeypatch.setattr(atomic_write, "_rename", unknown)
    await files.write("f", b"one", expected="new")
    with pytest.raises(ToolError):
        await files.write("f", b"two", expected="new")
    await files.write("f", b"two")
    assert (workspace / "f").read_text() == "two"
    assert os.listdir(workspace) == ["f"]


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
async def test_a_new_file_has_the_mode_that_the_umask_allows(files: RootedFiles, workspace: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        await files.write("f", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((workspace / "f").stat().st_mode) == 0o666 & ~umask


def _refuse(number: int, only: str = "") -> Any:
    def refused(descriptor: int, *_: Any) -> None:
        if not only or stat.S_ISDIR(os.fstat(descriptor).st_mode) == (only == "folder"):
            raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("existing", [True, False])
async def test_a_file_is_written_without_fsync_chmod_hard_links_or_rename_flags(
    files: RootedFiles, workspace: Path, monkeypatch: pytest.MonkeyPatch, number: int, existing: bool
) -> None:
    """Without a sync of folders, permissions, hard links and the flags of a rename."""
    if existing:
        (workspace / "f").write_text("old")
        await files.read_lines("f", count=1)

    def no_rename(*_: Any) -> bool:
        return False

    def no_link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fsync", _refuse(number))
    monkeypatch.setattr(os, "fchmod", _refuse(errno.EPERM))
    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(atomic_write, "_rename", no_rename)
    written = await files.write("f", b"new")
    assert written.created is not existing
    assert (workspace / "f").read_bytes() == b"new"
    assert os.listdir(workspace) == ["f"]


async def test_a_failed_folder_sync_is_reported_with_the_file_that_was_written(
    files: RootedFiles, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", _refuse(errno.EIO, "folder"))
    with pytest.raises(ToolError, match="was written, but its folder could not be made durable") as told:
        await files.write("f", b"new")
    assert told.value.kind == "backend"
    assert (workspace / "f").read_bytes() == b"new"


async def test_a_replaced_file_keeps_its_mode(files: RootedFiles, workspace: Path) -> None:
    target = workspace / "run.sh"
    target.write_text("#!/bin/sh\n")
    target.chmod(0o751)
    await files.read_bytes("run.sh")
    await files.write("run.sh", b"#!/bin/sh\nexit\n")
    assert stat.S_IMODE(target.stat().st_mode) == 0o751


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
async def test_files_written_by_root_belong_to_the_owner_of_the_workspace(files: RootedFiles, workspace: Path) -> None:
    os.chown(workspace, 12345, 12345)
    await files.write("d/new", b"x")
    for path in (workspace / "d", workspace / "d" / "new"):
        assert path.stat().st_uid == 12345


async def test_a_process_killed_during_a_write_leaves_the_old_content(workspace: Path) -> None:
    (workspace / "f").write_text("old and whole")
    script = textwrap.dedent(
        """
        import asyncio, os, signal, sys
        from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
        from handrail.runtime.files.session_roots import SessionRoots

        async def main():
            files = RootedFiles(SessionRoots(sys.argv[1]), SeenFileHashes(), lambda *_: None)
            await files.read_bytes("f")
            os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
            await files.write("f", b"new " * 100_000)

        asyncio.run(main())
        """
    )
    done = subprocess.run([sys.executable, "-c", script, str(workspace)], check=False)
    assert done.returncode == -9
    assert (workspace / "f").read_text() == "old and whole"


async def test_a_full_disk_changes_nothing(
    files: RootedFiles, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "f").write_text("old")
    await files.read_bytes("f")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ToolError, match="No space left") as caught:
        await files.write("f", b"new")
    assert caught.value.kind == "limit"
    assert (workspace / "f").read_text() == "old"
    assert os.listdir(workspace) == ["f"]


async def test_a_cancelled_write_ends_before_the_caller_sees_the_cancellation(
    files: RootedFiles, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    inside, order = asyncio.Event(), list[str]()
    real = os.fsync

    def slow(descriptor: int) -> None:
        loop.call_soon_threadsafe(inside.set)
        real(descriptor)
        order.append("synced")

    monkeypatch.setattr(os, "fsync", slow)
    writing = asyncio.create_task(files.write("f", b"new"))
    await inside.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    order.append("told")
    assert order[-1] == "told"
    assert (workspace / "f").read_bytes() == b"new"


async def test_a_file_above_the_edit_limit_is_read_and_not_edited(files: RootedFiles, workspace: Path) -> None:
    with (workspace / "big").open("wb") as out:
        out.truncate(atomic_write.MAX_EDIT_BYTES + 1)
    assert (await files.read_bytes("big", max_bytes=4)).data == b"\0" * 4
    for door in (files.read_for_edit("big"), files.write("big", b"x")):
        with pytest.raises(ToolError) as caught:
            await door
        assert caught.value.kind == "limit"


def test_a_session_forgets_the_least_recently_used_file() -> None:
    seen = SeenFileHashes(max_files=2)
    for name in ("a", "b", "a", "c"):
        seen.record(name, name * 2)
    assert [seen.find_seen_hash(name) for name in ("a", "b", "c")] == ["aa", None, "cc"]
    seen.forget("a")
    assert seen.find_seen_hash("a") is None
