"""The saved outputs of all sessions together: limited, and each removal is reported."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from handrail import Session, tool
from handrail.arbiter.output import output_files
from handrail.arbiter.output.output_files import NOTE_SUFFIX, OutputFileQuota
from handrail.contract.calls_and_results import Result
from handrail.testing.scripted_kernel import temporary_kernel

KIB = 1024
MOST = 100 * KIB
REMOVED = "[this output of 40,960 bytes was removed to free space"


class SessionFolders:
    """Session folders with a room of 100 KiB, as one process after the other has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.room = OutputFileQuota(folder, MOST)
        self.count = 0

    def at_work(self, *names: str) -> None:
        self.room.in_use = lambda session: session in names

    def another_process(self) -> None:
        self.room = OutputFileQuota(self.folder, MOST)

    def wrote(self, session: str, kib: int = 40) -> Path:
        """Write a newer output of this many KiB."""
        self.count += 1
        (self.folder / session).mkdir(exist_ok=True)
        path, kept = output_files.write_output_file(
            self.room, self.folder / session, f"call{self.count}", [b"x" * KIB * kib]
        )
        assert kept == KIB * kib
        os.utime(path, ns=(self.count, self.count))
        return path

    def refused(self, session: str, kib: int = 40) -> None:
        """It has no room, and leaves nothing."""
        before = self.files()
        with pytest.raises(OSError, match=r"0\.09766 MiB \(limits\.output_files_mib\).*Request less"):
            self.wrote(session, kib)
        assert self.files() == before

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def taken(self, but: Collection[Path] = ()) -> int:
        return sum(len(content) for path, content in self.files().items() if path not in but)


@pytest.fixture
def sessions(tmp_path: Path) -> SessionFolders:
    return SessionFolders(tmp_path)


def whole(path: Path) -> bool:
    return set(path.read_text()) == {"x"}


@pytest.mark.proves("O-01")
def test_output_files_of_closed_sessions_make_room_oldest_first_and_leave_a_note(sessions: SessionFolders) -> None:
    sessions.at_work("new")
    first, second = sessions.wrote("old"), sessions.wrote("older")
    third = sessions.wrote("new")
    assert first.read_text().startswith(REMOVED) and whole(second) and whole(third)
    sessions.wrote("new")
    assert second.read_text().startswith(REMOVED) and whole(third)
    assert sessions.taken() <= MOST


@pytest.mark.proves("O-01")
def test_output_files_of_an_open_session_stay_until_it_closes(sessions: SessionFolders) -> None:
    sessions.at_work("one", "other")
    kept = [sessions.wrote("one"), sessions.wrote("other")]
    sessions.refused("one")
    sessions.refused("other")
    assert whole(sessions.wrote("one", kib=10)), "what fits is kept"
    sessions.at_work("other")
    assert whole(sessions.wrote("other"))
    assert kept[0].read_text().startswith(REMOVED) and whole(kept[1])


def test_no_output_file_is_removed_if_that_frees_too_little(sessions: SessionFolders) -> None:
    sessions.at_work("one")
    old, _ = sessions.wrote("old", kib=20), sessions.wrote("one", kib=70)
    sessions.refused("one", kib=40)
    sessions.refused("one", kib=101)
    assert whole(old)


def test_no_output_file_is_removed_before_the_open_sessions_are_known(sessions: SessionFolders) -> None:
    kept = [sessions.wrote("one"), sessions.wrote("one")]
    sessions.another_process()
    sessions.refused("one")
    assert all(map(whole, kept))


def test_output_files_of_an_earlier_process_count_but_job_outputs_do_not(sessions: SessionFolders) -> None:
    left = sessions.wrote("left", kib=80)
    for name in ("bash_1.job.txt", "bash_2.job.txt.removed"):
        (left.parent / name).write_bytes(b"x" * MOST)
    sessions.another_process()
    sessions.at_work("left")
    sessions.refused("left")
    assert whole(sessions.wrote("left", kib=20))
    sessions.at_work()
    sessions.wrote("left")
    assert left.read_text().startswith("[this output of 81,920 bytes")
    assert (left.parent / "bash_1.job.txt").stat().st_size == MOST


def test_an_output_file_shared_with_a_fork_counts_once_and_stays(sessions: SessionFolders) -> None:
    shared, own = sessions.wrote("one"), sessions.wrote("one")
    (sessions.folder / "fork").mkdir()
    its = sessions.folder / "fork" / shared.name
    its.hardlink_to(shared)
    sessions.another_process()
    sessions.at_work("fork")
    assert whole(sessions.wrote("fork", kib=15))
    sessions.wrote("fork")
    assert own.read_text().startswith(REMOVED) and whole(shared) and whole(its)
    assert sessions.taken(but=[its]) <= MOST
    sessions.refused("fork")


def test_an_output_file_that_a_fork_linked_after_the_scan_stays(sessions: SessionFolders) -> None:
    sessions.at_work("two")
    first, second = sessions.wrote("one"), sessions.wrote("one")
    sessions.wrote("two")  # looks, and takes the first
    (sessions.folder / "fork").mkdir()
    (sessions.folder / "fork" / second.name).hardlink_to(second)
    sessions.refused("two")
    assert first.read_text().startswith(REMOVED) and whole(second)


def test_an_output_file_that_could_not_be_written_takes_no_space(sessions: SessionFolders) -> None:
    with pytest.raises(FileNotFoundError):
        output_files.write_output_file(sessions.room, sessions.folder / "none", "call", [b"x" * MOST])
    assert whole(sessions.wrote("one", kib=100))


def test_a_leftover_link_in_place_of_a_note_does_not_block_later_removals(
    sessions: SessionFolders, tmp_path_factory: pytest.TempPathFactory
) -> None:
    victim = tmp_path_factory.mktemp("elsewhere") / "victim"
    sessions.at_work()
    old, _ = sessions.wrote("old"), sessions.wrote("new")
    note = old.with_name(f"{old.name}{NOTE_SUFFIX}")
    note.symlink_to(victim)
    sessions.wrote("new")
    assert old.read_text().startswith(REMOVED) and not old.is_symlink()
    assert not note.is_symlink() and not note.exists() and not victim.exists()


@pytest.mark.parametrize("step", ["open", "replace"])
def test_an_output_file_stays_if_its_removal_note_cannot_be_written(
    sessions: SessionFolders, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    sessions.at_work()
    old, _ = sessions.wrote("old"), sessions.wrote("new")
    if step == "open":
        old.with_name(f"{old.name}{NOTE_SUFFIX}").mkdir()
    else:

        def full(path: Path, target: Path) -> Path:
            raise OSError("the disk is full")

        monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="output_files_mib"):
        sessions.wrote("new", kib=60)
    assert whole(old) and not [path for path in sessions.files() if path.name.endswith(NOTE_SUFFIX)]


@tool(id="long.text", side_effect="read", locks=[])
async def long_text(kib: int) -> str:
    """So much text."""
    return "x" * kib * KIB


async def cut(session: Session, kib: int) -> Result:
    result = await session.call("long.text", {"kib": kib})
    assert result.ok and result.metadata["truncated"] and result.data["head"].startswith("xxx")
    return result


async def read_back(session: Session, result: Result) -> str:
    read = await session.call("read", {"path": result.metadata["output_path"], "unit": "bytes", "limit": 100})
    assert read.ok, read.error_text
    return read.data["text"]


@pytest.mark.proves("O-01")
async def test_a_result_reports_an_unsaved_output_and_a_resumed_session_finds_a_removal_note(tmp_path: Path) -> None:
    settings = "[limits]\noutput_files_mib = 1\n"
    async with temporary_kernel(tmp_path, tools=[long_text], rules=["allow long.*"], settings=settings) as kernel:
        one, other = await kernel.session("ses_1"), await kernel.session("ses_2")
        first = await cut(one, 600)
        lost = await cut(other, 600)
        assert "output_path" not in lost.metadata and lost.metadata["omitted_bytes"] > 0
        assert lost.metadata["output_save_error"].startswith(
            "The full output could not be saved: the limit for truncated outputs"
        )
        assert (await read_back(one, first)).startswith("xxx"), "what an open session has been told of is there"
        await one.suspend()
        second = await cut(other, 600)
        assert (await read_back(other, second)).startswith("xxx")
        one = await kernel.session("ses_1")
        assert (await read_back(one, first)).startswith("[this output of 614,400 bytes was removed to free space")
    async with temporary_kernel(tmp_path, tools=[long_text], rules=["allow long.*"], settings=settings) as kernel:
        one, other = await kernel.session("ses_1"), await kernel.session("ses_2")
        assert "output_save_error" in (await cut(one, 600)).metadata, "what was there before counts"
        await other.close()
        assert "output_path" in (await cut(one, 600)).metadata, "one that is closed leaves its room to others"
