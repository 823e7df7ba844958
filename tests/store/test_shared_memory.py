"""A process that cuts the shared memory of a database ends no other process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store.places import Place

pytestmark = pytest.mark.proves("G-09a")
PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from handrail.contract.errors import StartError
from handrail.store.database.sqlite_connection import open_reader
from handrail.testing.scripted_kernel import temporary_kernel


def cut(kept):
    names = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if line.rstrip().endswith("-shm")}
    for name in names:
        os.truncate(name, kept)
    return [Path(name.removesuffix("-shm")) for name in sorted(names)]


async def main(place, when, kept):
    async with temporary_kernel(Path(place), rules=["allow write"]) as kernel:
        session = await kernel.session()
        assert (await session.call("write", {"path": "a.txt", "content": "1"})).ok
        files = cut(kept)
        assert {file.name for file in files} == {"handrail.db", "undo.db"}
        log = next(file for file in files if file.name == "handrail.db")
        if when == "before a read":
            try:
                open_reader(log)
            except StartError as error:
                assert "-shm" in str(error)
            else:
                raise AssertionError("the read was not refused")
        if when != "before the end":
            assert (await session.call("write", {"path": "b.txt", "content": "1"})).ok
            reader = open_reader(log)
            assert reader.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            reader.close()
    print("done")


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell what is mapped")
@pytest.mark.parametrize("kept", [0, 100])
@pytest.mark.parametrize("when", ["before a read", "before a write", "before the end"])
def test_a_cut_shared_memory_file_does_not_end_the_kernel(tmp_path: Path, when: str, kept: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), when, str(kept)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


REPEATED = """
import asyncio, os, sys
from pathlib import Path
from handrail.record.commit_log import CommitLog, Record
from handrail.store.workspace_store import WorkspaceStore


async def main(workspace, state):
    store = WorkspaceStore.open(workspace, state)
    log = CommitLog(store.database)
    shared = f"{store.folders.database_file}-shm"
    for number in range(6):
        os.truncate(shared, 0)
        await log.start_journalled_commit([Record("intended", "ses_1", f"call{number}", {"locks": []})])
    await log.flush()
    assert log.reader.head().sequence == 6
    await store.aclose()
    print("done")


asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell what is mapped")
def test_a_file_that_is_cut_again_before_the_next_write_is_restored_again(place: Place) -> None:
    assert place.finished(REPEATED) == "done\n"


TAKEOVER = """
import asyncio, os, sys
from handrail.store.database.sqlite_connection import open_reader
from handrail.store.workspace_store import WorkspaceStore


async def main(workspace, state):
    first = WorkspaceStore.open(workspace, state)
    reader = open_reader(first.folders.database_file)
    await first.aclose()
    os.truncate(f"{first.folders.database_file}-shm", 0)
    second = WorkspaceStore.open(workspace, state)
    assert second.lease.token == first.lease.token + 1
    assert reader.execute("SELECT count(*) FROM record").fetchone() == (0,)
    await second.aclose()
    reader.close()
    print("done")


asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell what is mapped")
def test_a_process_that_reads_takes_over_after_the_file_was_cut(place: Place) -> None:
    assert place.finished(TAKEOVER) == "done\n"
