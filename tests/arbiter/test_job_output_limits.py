"""The outputs of all jobs together: limited, the oldest are removed, and each reader is notified."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from tests.arbiter.test_job_output_file import small

from handrail import Runtime, Session, tool
from handrail.arbiter.jobs.output_stream import (
    JobOutputFile,
    measure_disk_usage,
    read_output_from_cursor,
    read_output_lines,
)
from handrail.arbiter.output.output_files import REMOVED_SUFFIX, JobOutputQuota, delete_outputs_and_notes
from handrail.testing.scripted_kernel import temporary_kernel

KIB = 1024


def written(folder: Path, room: JobOutputQuota, name: str, *sizes: int, ring: bool = False, ends: bool = True) -> str:
    with closing(JobOutputFile(folder / name, room, ring=ring)) as output:
        for size in sizes:
            output.append_piece("x" * (size - 1) + "\n")
        if ends:
            output.mark_output_complete()
    return str(folder / name)


def on_disk(folder: Path) -> int:
    return sum(measure_disk_usage(str(file)) for file in folder.iterdir())


def test_the_oldest_output_is_removed_to_free_space_and_its_readers_are_notified(tmp_path: Path) -> None:
    room = JobOutputQuota(100 * KIB)
    first, second = [written(tmp_path, room, name, 40 * KIB) for name in ("first", "second")]
    third = written(tmp_path, room, "third", 40 * KIB)
    found = read_output_from_cursor(first, 100, 1000, grows=False)
    assert (
        found.text.startswith("[this output of 40,960 bytes was removed to free space") and "0.09766 MiB" in found.text
    )
    assert (found.cursor, found.has_more, found.skipped_bytes) == (40 * KIB, False, 40 * KIB - 100)
    assert read_output_lines(first, -1, 1, grows=False).text == found.text
    after = read_output_from_cursor(first, 40 * KIB, 1000, grows=False)
    assert (after.text, after.skipped_bytes) == ("", 0), "who has read all of it has missed nothing"
    assert all(read_output_from_cursor(path, 0, 10, grows=False).text == "x" * 10 for path in (second, third))
    assert on_disk(tmp_path) <= 81 * KIB
    delete_outputs_and_notes([first, second, third, ""])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sizes", [(60 * KIB, 20 * KIB, 20 * KIB), (90 * KIB,)])
def test_job_output_beyond_the_limit_for_all_jobs_is_dropped_with_a_note(tmp_path: Path, sizes: Sequence[int]) -> None:
    room = JobOutputQuota(100 * KIB)
    written(tmp_path, room, "lives", 30 * KIB, ends=False)
    ended = written(tmp_path, room, "ended", 5 * KIB)
    cut = written(tmp_path, room, "cut", *sizes, 1, ends=False)
    text = read_output_from_cursor(cut, 0, 1 << 20, grows=False).text
    kept = 60 * KIB if len(sizes) > 1 else 0
    assert text[:kept] == "x" * (kept - 1) + "\n" * bool(kept)
    assert text[kept:].startswith("\n[more output follows; it is not stored: the limit for the outputs of all jobs is")
    assert text.endswith("]\n") and on_disk(tmp_path) <= 96 * KIB
    assert read_output_from_cursor(ended, 0, 5, grows=False).text == "xxxxx", "nothing is removed in vain"


def test_space_freed_by_a_ring_output_is_available_to_other_outputs(tmp_path: Path) -> None:
    room = JobOutputQuota(400 * KIB)
    with small():
        ring = written(tmp_path, room, "ring", *[50 * KIB] * 40, ring=True, ends=False)
    beside = written(tmp_path, room, "beside", 150 * KIB, ends=False)
    assert "[more output follows" not in read_output_lines(ring, -1, 1, grows=False).text
    assert "[more output follows" not in read_output_lines(beside, -1, 1, grows=False).text
    assert on_disk(tmp_path) <= 400 * KIB


def test_an_output_that_cannot_be_removed_stays_counted_and_a_missing_one_does_not(tmp_path: Path) -> None:
    room = JobOutputQuota(100 * KIB)
    gone, firm = [written(tmp_path, room, name, 40 * KIB) for name in ("gone", "firm")]
    os.unlink(gone)
    assert room.reserve(50 * KIB) and not Path(f"{gone}{REMOVED_SUFFIX}").exists(), (
        "of what others removed nothing is told"
    )
    os.unlink(firm)
    os.mkdir(firm)  # as root nothing else fails
    assert not room.reserve(20 * KIB) and room.reserve(10 * KIB)


# ── with a kernel ────────────────────────────────────────────────────────────────────────────────


@tool(id="job.fill", side_effect="external", mode="background", locks=[])
async def fill(kib: int, runtime: Runtime) -> str:
    """Write so much."""
    for _ in range(kib):
        runtime.write_output("x" * (KIB - 1) + "\n")
    return "full"


@tool(id="job.stay", side_effect="external", mode="background", locks=[])
async def stay(kib: int, runtime: Runtime) -> None:
    """Write so much, and stay."""
    for _ in range(kib):
        runtime.write_output("x" * (KIB - 1) + "\n")
    await asyncio.Event().wait()


def opened(folder: Path):
    settings = "[limits]\njob_output_mib = 1\ngrace_ms = 20\n"
    return temporary_kernel(folder, tools=[fill, stay], rules=["allow job.*"], settings=settings)


async def filled(session: Session, kib: int) -> str:
    job_id = str((await session.call("job.fill", {"kib": kib})).data["job_id"])
    assert await session.jobs.wait(job_id, timeout_ms=30_000) is not None
    return job_id


async def beginning(session: Session, job_id: str) -> str:
    answer = await session.call("read_job", {"job_id": job_id, "lines": 1})
    assert answer.ok and answer.data["state"] == "done"
    return answer.data["text"][:20]


@pytest.mark.proves("X-05")
async def test_the_outputs_of_all_sessions_share_one_limit_also_after_a_restart(tmp_path: Path) -> None:
    removed = "[this output of 614,"
    async with opened(tmp_path) as kernel:
        session, other = await kernel.session("ses_1"), await kernel.session("ses_2")
        first = await filled(session, 600)
        second = await filled(other, 600)
        assert await beginning(session, first) == removed and await beginning(other, second) == "x" * 20
        read = (await session.call("read_job", {"job_id": first})).data
        assert (read["dropped_bytes"], read["has_more"]) == (600 * KIB, False)
        assert (await session.call("wait", {"job_id": first})).data["result"]["data"] == "full", "its result is kept"
    async with opened(tmp_path) as kernel:
        session, other = await kernel.session("ses_1"), await kernel.session("ses_2")
        third = await filled(session, 300)
        assert await beginning(other, second) == "x" * 20
        fourth = await filled(session, 200)
        assert await beginning(other, second) == removed, "what was there before counts, and goes first"
        assert await beginning(session, third) == await beginning(session, fourth) == "x" * 20
        assert await beginning(session, first) == removed


async def test_a_closed_session_frees_its_output_space_for_others(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session, other = await kernel.session("ses_1"), await kernel.session("ses_2")
        first = await filled(other, 400)
        await filled(session, 500)
        await session.close()
        await filled(other, 500)
        assert await beginning(other, first) == "x" * 20


async def test_the_output_of_a_stopped_job_can_be_removed_to_free_space(tmp_path: Path) -> None:
    async with opened(tmp_path) as kernel:
        session = await kernel.session()
        stays = str((await session.call("job.stay", {"kib": 600})).data["job_id"])
        while (await session.jobs.get(stays)).output_bytes < 600 * KIB:
            await asyncio.sleep(0)
        cut = await filled(session, 600)
        last = (await session.jobs.read_line_range(cut, offset=-1)).text
        assert "it is not stored" in last and "1 MiB (limits.job_output_mib)" in last
        assert (await session.jobs.stop(stays)).state == "cancelled"
        await filled(session, 600)
        assert (await session.jobs.read_line_range(stays)).text.startswith("[this output of 614,")
