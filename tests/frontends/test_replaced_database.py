"""A database that is removed or replaced by an older one while a process holds it."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tests.frontends.conftest import Here, Program

from handrail import Kernel, open_kernel
from handrail.contract.errors import LogUnavailable, StartError
from handrail.record.log_reader import LogReader
from handrail.record.verification import LogVerification, verify_log
from handrail.store.database.journal import LogHeadFile, read_log_head
from handrail.store.state_folders import StateFolders, locate_folders


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[], AbstractAsyncContextManager[Kernel]]:
    (tmp_path / "ws").mkdir()
    (config := tmp_path / "handrail.toml").write_text("")

    def again() -> AbstractAsyncContextManager[Kernel]:
        return open_kernel(tmp_path / "ws", state=tmp_path / "state", config=config, rules=["allow write"])

    return again


@pytest.fixture
def folders(tmp_path: Path, opened: object) -> StateFolders:
    return locate_folders(tmp_path / "ws", tmp_path / "state")


Opened = Callable[[], AbstractAsyncContextManager[Kernel]]


async def write(kernel: Kernel, count: int = 1) -> list[str | None]:
    """Return how this many calls with a side effect end: each recorded or refused."""
    session = await kernel.session()
    ends: list[str | None] = []
    for number in range(count):
        result = await session.call("write", {"path": f"{session.id}-{number}.txt", "content": "x"})
        ends.append(result.error_kind)
        if not result.ok:
            assert "was removed, renamed or replaced" in (result.error_text or ""), result
    return ends


def removed(folders: StateFolders, aside: Path) -> Callable[[], object]:
    folders.database_file.rename(aside)
    return lambda: aside.rename(folders.database_file)


def replaced(folders: StateFolders, aside: Path) -> Callable[[], object]:
    copy = aside.with_name("copy")
    shutil.copy(folders.database_file, copy)
    folders.database_file.rename(aside)
    copy.rename(folders.database_file)
    return lambda: aside.rename(folders.database_file)


def without_its_log(folders: StateFolders, aside: Path) -> Callable[[], object]:
    beside = Path(f"{folders.database_file}-wal")
    beside.rename(aside)
    return lambda: aside.rename(beside)


def linked(folders: StateFolders, aside: Path) -> Callable[[], object]:
    """A link to a copy, as who wants to read and change it elsewhere would put there."""
    shutil.copy(folders.database_file, elsewhere := aside.with_name("elsewhere"))
    folders.database_file.rename(aside)
    folders.database_file.symlink_to(elsewhere)
    return lambda: aside.rename(folders.database_file)


WAYS = [removed, replaced, without_its_log, linked]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", [1, 5], ids=["the first writes", "writes that are promised"])
async def test_calls_are_refused_while_the_database_is_missing_or_replaced(
    tmp_path: Path,
    opened: Opened,
    folders: StateFolders,
    way: Callable[[StateFolders, Path], Callable[[], object]],
    before: int,
) -> None:
    async with opened() as kernel:
        assert await write(kernel, before) == [None] * before
        session = await kernel.session()
        await kernel.log.flush()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        back = way(folders, tmp_path / "aside")
        found = [await session.call("write", {"path": f"lost-{number}.txt", "content": "x"}) for number in range(3)]
        assert [result.error_kind for result in found] == ["unavailable"] * 3, found
        assert "was removed, renamed or replaced" in (found[0].error_text or "")
        assert not list((tmp_path / "ws").glob("lost-*")), "nothing was run that is in no log"
        back()
        assert (await session.call("write", {"path": "after.txt", "content": "x"})).ok
    checked = verified(folders)
    assert checked.ok and checked.records > 5 * before


def cut(files: dict[Path, bytes]) -> dict[Path, bytes]:
    return {file: b"" if file.suffix == ".db" else content for file, content in files.items()}


def halved(files: dict[Path, bytes]) -> dict[Path, bytes]:
    return {file: content[: len(content) // 2] for file, content in files.items()}


def without_what_is_new(files: dict[Path, bytes]) -> dict[Path, bytes]:
    return {file: b"" if file.name.endswith("-wal") else content for file, content in files.items()}


def overwritten(files: dict[Path, bytes]) -> dict[Path, bytes]:
    return {file: b"\xff" * len(content) for file, content in files.items()}


def written_over(files: dict[Path, bytes]) -> None:
    """Write contents into files in place, as ``cp`` does."""
    for file, content in files.items():
        with file.open("r+b") as there:
            there.write(content)
            there.truncate()


def contents(folders: StateFolders) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in (folders.database_file, Path(f"{folders.database_file}-wal"))}


async def settled(kernel: Kernel) -> None:
    await kernel.log.flush()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


IN_PLACE = [cut, halved, without_what_is_new, overwritten]


@pytest.mark.parametrize("change", [*IN_PLACE, None], ids=lambda change: getattr(change, "__name__", "older"))
@pytest.mark.parametrize("before", [1, 5], ids=["the first writes", "writes that are promised"])
async def test_calls_are_refused_while_the_database_is_overwritten_in_place(
    tmp_path: Path,
    opened: Opened,
    folders: StateFolders,
    change: Callable[[dict[Path, bytes]], dict[Path, bytes]] | None,
    before: int,
) -> None:
    async with opened() as kernel:
        assert await write(kernel) == [None]
        await settled(kernel)
        older = contents(folders)
        assert await write(kernel, before) == [None] * before
        session = await kernel.session()
        await settled(kernel)
        whole = contents(folders)
        written_over(older if change is None else change(whole))
        found = [await session.call("write", {"path": f"lost-{number}.txt", "content": "x"}) for number in range(3)]
        assert [result.error_kind for result in found] == ["unavailable"] * 3, found
        assert "Another process changed the database" in (found[0].error_text or "")
        assert "handrail log verify" in (found[0].error_text or "")
        assert not list((tmp_path / "ws").glob("lost-*")), "nothing was run that is in no log"
        written_over(whole)
        assert (await session.call("write", {"path": "after.txt", "content": "x"})).ok
    checked = verified(folders)
    assert checked.ok and checked.records > 5 * before


async def test_a_database_written_by_another_process_is_not_overwritten(
    tmp_path: Path, opened: Opened, folders: StateFolders
) -> None:
    async with opened() as kernel:
        await write(kernel)
    older = folders.database_file.read_bytes()
    with pytest.raises(LogUnavailable, match="Another process changed"):
        await changed_and_closed(opened, folders, older)
    assert folders.database_file.read_bytes() == older, "no page of the newer log was written into it"


async def changed_and_closed(opened: Opened, folders: StateFolders, older: bytes) -> None:
    async with opened() as kernel:
        await write(kernel, 3)
        session = await kernel.session()
        await settled(kernel)
        written_over({folders.database_file: older, Path(f"{folders.database_file}-wal"): b""})
        assert (await session.call("write", {"path": "lost.txt", "content": "x"})).error_kind == "unavailable"


async def test_a_checkpoint_or_identical_rewrite_of_the_database_refuses_no_call(
    opened: Opened, folders: StateFolders
) -> None:
    async with opened() as kernel:
        await write(kernel, 3)
        await settled(kernel)
        with sqlite3.connect(folders.database_file) as other:  # as a program for copies does
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        other.close()
        written_over(contents(folders))
        assert await write(kernel, 3) == [None] * 3
    assert verified(folders).ok


def test_truncated_database_files_refuse_calls_without_crashing_the_process(
    tmp_path: Path, folders: StateFolders
) -> None:
    """In another process, which the operating system ends where this fails."""
    program = """
import asyncio, os, sys
from pathlib import Path
from handrail import Kernel, open_kernel
from handrail.contract.errors import LogUnavailable

async def main(here):
    opened = open_kernel(here / "ws", state=here / "state", config=here / "handrail.toml", rules=["allow write"])
    async with opened as kernel:
        session = await kernel.session()
        for name in ("a", "b"):
            assert (await session.call("write", {"path": name, "content": "x"})).ok
        await kernel.log.flush()
        for file in (here / "state").rglob("handrail.db*"):
            os.truncate(file, 0)
        result = await session.call("write", {"path": "lost", "content": "x"})
        assert result.error_kind == "unavailable", result

try:
    asyncio.run(main(Path(sys.argv[1])))
except LogUnavailable:
    sys.exit(3)
"""
    ran = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=False)
    assert ran.returncode == 3, (ran.returncode, ran.stderr)
    assert not (folders.workspace / "lost").exists()


async def test_calls_are_refused_while_the_state_folder_is_moved_away(
    tmp_path: Path, opened: Opened, folders: StateFolders
) -> None:
    async with opened() as kernel:
        assert await write(kernel, 3) == [None] * 3
        session = await kernel.session()
        folders.workspace_state_folder.rename(tmp_path / "aside")
        found = [await session.call("write", {"path": f"lost-{number}.txt", "content": "x"}) for number in range(3)]
        assert {result.error_kind for result in found} == {"unavailable"}
        assert not list((tmp_path / "ws").glob("lost-*"))
        (tmp_path / "aside").rename(folders.workspace_state_folder)


def verified(folders: StateFolders) -> LogVerification:
    with LogReader.open_database(folders.database_file) as reader:
        return verify_log(reader, written=lambda: read_log_head(folders))


def copied(folders: StateFolders, to: Path) -> None:
    to.mkdir()
    for file in folders.workspace_state_folder.glob("handrail.db*"):
        shutil.copy(file, to / file.name)


def put_back(folders: StateFolders, copy: Path) -> None:
    for file in folders.workspace_state_folder.glob("handrail.db*"):
        file.unlink()
    for file in copy.iterdir():
        shutil.copy(file, folders.workspace_state_folder / file.name)


async def test_an_older_copy_of_the_database_fails_verification_and_prevents_a_start(
    tmp_path: Path, opened: Opened, folders: StateFolders
) -> None:
    async with opened() as kernel:
        await write(kernel)
    copied(folders, tmp_path / "copy")
    assert verified(folders).ok
    before = verified(folders).records
    async with opened() as kernel:
        await write(kernel, 2)
    after = verified(folders).records
    put_back(folders, tmp_path / "copy")
    found = verified(folders)
    assert not found.ok and f"it ends at record {before}, but record {after} was written" in (found.problem or "")
    with pytest.raises(StartError, match=rf"record {after} was written.*handrail log acknowledge"):
        async with opened():
            pass
    assert not verified(folders).ok, "a start that was refused changes nothing"


async def test_an_older_copy_that_was_continued_elsewhere_fails_verification(
    tmp_path: Path, opened: Opened, folders: StateFolders
) -> None:
    async with opened() as kernel:
        await write(kernel)
    copied(folders, tmp_path / "copy")
    async with opened() as kernel:
        await write(kernel)
    head = folders.log_head_file.read_bytes()
    put_back(folders, tmp_path / "copy")
    folders.log_head_file.unlink()
    async with opened() as kernel:
        await write(kernel, 4)
    folders.log_head_file.write_bytes(head)
    assert "differs from the one that was written" in (verified(folders).problem or "")


async def test_verification_detects_records_cut_from_the_end(
    tmp_path: Path, opened: Opened, folders: StateFolders
) -> None:
    async with opened() as kernel:
        await write(kernel, 2)
    connection = sqlite3.connect(folders.database_file)
    ends = [n for (n,) in connection.execute("SELECT sequence FROM record WHERE length(seal) = 64 ORDER BY sequence")]
    with connection:
        connection.execute("DELETE FROM record WHERE sequence > ?", (ends[-2],))
    connection.close()
    with LogReader.open_database(folders.database_file) as reader:
        assert verify_log(reader).ok, "intact in itself"
    assert not verified(folders).ok


async def test_verification_detects_a_removed_log(
    tmp_path: Path, opened: Opened, folders: StateFolders, capsys: pytest.CaptureFixture[str]
) -> None:
    from handrail.frontends.cli.command_group import run_command_line

    async with opened() as kernel:
        await write(kernel)
    shutil.rmtree(folders.workspace_state_folder)
    place = ("--workspace", str(tmp_path / "ws"), "--state", str(tmp_path / "state"))
    assert await asyncio.to_thread(run_command_line, ["log", "verify", *place]) == 1
    assert "not intact: record" in capsys.readouterr().err
    with pytest.raises(StartError, match="it ends at record 0"):
        async with opened():
            pass


def test_log_verify_reports_the_dropped_records_after_a_user_acknowledges_them(
    here: Here, handrail: Program, tmp_path: Path
) -> None:
    read = ("call", "read", '{"path": "note.txt"}')
    folders = locate_folders(handrail.workspace, handrail.state)
    assert here(*read).code == 0
    copied(folders, tmp_path / "copy")
    assert here("log", "acknowledge", "--yes").err.strip().endswith("Nothing to acknowledge.")
    assert here(*read).code == 0
    put_back(folders, tmp_path / "copy")
    assert here("log", "verify").code == 1 and here(*read).code == 5
    assert here("log", "acknowledge").code == 2, "nobody can be asked"
    done = here("log", "acknowledge", "--yes", "--json")
    assert done.code == 0 and json.loads(done.out)["records"] > 0, done
    assert here(*read).code == 0
    checked = json.loads(here("log", "verify", "--json").out)
    assert checked["ok"] and checked["dropped"] == json.loads(done.out)["records"]


def test_records_removed_by_a_purge_are_not_reported_as_missing(here: Here, handrail: Program) -> None:
    assert here("call", "read", '{"path": "note.txt"}').code == 0
    assert here("log", "purge", "--before", "0", "--yes").code == 0
    assert here("log", "verify").code == 0 and here("call", "read", '{"path": "note.txt"}').code == 0
    assert here("state", "remove", "--yes").code == 0
    assert here("call", "read", '{"path": "note.txt"}').code == 0, "a state that Handrail removed begins anew"


def test_the_log_head_never_moves_back_to_an_earlier_record(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    folders = locate_folders(tmp_path / "ws", tmp_path / "state")
    (tmp_path / "state").mkdir()
    files = [LogHeadFile(folders), LogHeadFile(folders)]
    files[0].advance(7, b"7" * 32)
    files[1].advance(5, b"5" * 32)  # of a holder that was paused between its write and this
    assert read_log_head(folders) == (7, b"7" * 32)
    folders.log_head_file.unlink()
    files[0].advance(8, b"8" * 32)
    assert read_log_head(folders) == (8, b"8" * 32)
    for file in files:
        file.close()
    folders.log_head_file.write_bytes(b"x" * 60)
    with pytest.raises(StartError, match="handrail log acknowledge"):
        read_log_head(folders)
