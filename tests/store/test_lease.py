"""The lease: one process per workspace, a clear message for the second, and a certain holder."""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import sys
import threading
from pathlib import Path

import pytest
from tests.store.leases import ManualClock, abandon, acquire_lease, file_of, first_line, left_alone
from tests.store.places import Place

from handrail.contract.errors import LogUnavailable, StartError
from handrail.store.lease import (
    STALE_NS,
    VALID_NS,
    LeaseHolder,
    WorkspaceAlreadyHeld,
    WorkspaceLease,
    find_lease_holder,
)
from handrail.store.state_folders import StateFolders, prepare_folders
from handrail.store.tables.session_tables import SessionRow

HOLD = """
import sys
from handrail.store.workspace_store import WorkspaceStore
store = WorkspaceStore.open(sys.argv[1], sys.argv[2], frontend="mcp")
print(store.lease.token, flush=True)
sys.stdin.readline()
"""
TRY = """
import sys
from handrail.contract.errors import StartError
from handrail.store.workspace_store import WorkspaceStore
try:
    WorkspaceStore.open(sys.argv[1], sys.argv[2])
except StartError as error:
    print(error)
"""


@pytest.fixture
def folders(place: Place) -> StateFolders:
    return prepare_folders(place.workspace, place.state)


@pytest.fixture
def time() -> ManualClock:
    return ManualClock()


@pytest.mark.proves("L-07")
def test_a_second_process_gets_one_line_that_names_the_lease_holder(place: Place) -> None:
    with place.process(HOLD) as holder:
        assert first_line(holder.stdout).strip() == "1"
        said = place.finished(TRY).strip()
    assert "\n" not in said
    assert re.search(rf"in use by handrail mcp, pid {holder.pid}, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d", said), said
    assert "Stop that process" in said


@pytest.mark.proves("L-07")
async def test_a_killed_holder_frees_the_workspace_and_the_next_token_is_higher(place: Place) -> None:
    with place.process(HOLD) as holder:
        assert first_line(holder.stdout).strip() == "1"
        holder.kill()
        holder.wait(timeout=300)
        store = place.open()
    assert store.lease.token == store.database.token == 2
    await store.aclose()
    again = place.open()
    assert again.lease.token == 3
    await again.aclose()


async def test_the_same_process_cannot_hold_a_workspace_twice(place: Place) -> None:
    store = place.open(frontend="cli")
    with pytest.raises(WorkspaceAlreadyHeld, match=rf"handrail cli, pid {os.getpid()} \(this process\)") as held:
        place.open()
    assert held.value.holder.token == 1 and held.value.holder.state == "alive"
    await store.aclose()
    assert not store.lease.is_held and not store.lease.is_valid
    await place.open().aclose()


async def test_two_workspaces_are_held_independently(place: Place, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    one, two = place.open(), Place(other, place.state).open()
    await one.aclose()
    await two.aclose()


@pytest.mark.parametrize("note", [b"", b"not json", b"[1]", b'{"pid": "x", "face": "\\u001b[31m", "since_ns": -1}'])
def test_an_unreadable_lease_note_still_gives_a_clear_error(
    folders: StateFolders, time: ManualClock, note: bytes
) -> None:
    lease = acquire_lease(folders, time)
    path = file_of(lease, folders)
    whole = path.read_bytes()
    for content in (whole[:64] + note, note):
        path.write_bytes(content)
        with pytest.raises(WorkspaceAlreadyHeld, match=r"is in use by another handrail process\. Stop that process"):
            acquire_lease(folders, time)
        time.now += 10 * STALE_NS * (len(content) < 64)  # without a beat it counts as alive while it lives
    lease.release()


async def test_a_lease_is_released_when_the_database_cannot_be_opened(place: Place) -> None:
    await place.open().aclose()
    path = place.folders.database_file
    whole = path.read_bytes()
    path.write_bytes(b"no database at all, but long enough to be looked at" * 20)
    with pytest.raises(StartError):
        place.open()
    assert find_lease_holder(place.folders) is None
    path.write_bytes(whole)
    await place.open().aclose()


def test_the_lease_holder_can_be_looked_up_without_changing_any_file(folders: StateFolders, time: ManualClock) -> None:
    assert find_lease_holder(folders, time) is None
    lease = WorkspaceLease.acquire(
        folders, frontend="mcp", clock=lambda: 77, monotonic=time, protocol=3, socket="s-1", renewing=False
    )
    before = sorted(folders.workspace_state_folder.iterdir())
    assert find_lease_holder(folders, time) == LeaseHolder(os.getpid(), "mcp", 77, 1, 3, "s-1", "alive") == lease.holder
    assert sorted(folders.workspace_state_folder.iterdir()) == before
    time.now += STALE_NS
    found = find_lease_holder(folders, time)
    assert found is not None and found.state == "hung" and found.pid == os.getpid()
    lease.release()
    assert find_lease_holder(folders, time) is None
    assert not [path for path in folders.workspace_state_folder.iterdir() if path.name.startswith("holder")]


def test_a_renewed_lease_lasts_and_an_unrenewed_lease_lapses_before_another_process_takes_it(
    folders: StateFolders, time: ManualClock
) -> None:
    lease = acquire_lease(folders, time)
    for _ in range(10):
        time.now += VALID_NS - 1
        assert lease.is_valid
        with pytest.raises(WorkspaceAlreadyHeld):
            acquire_lease(folders, time)
        lease.renew()
    time.now += VALID_NS
    assert not lease.is_valid and lease.is_held
    with pytest.raises(WorkspaceAlreadyHeld):
        acquire_lease(folders, time)
    time.now += STALE_NS - VALID_NS - 1
    with pytest.raises(WorkspaceAlreadyHeld):
        acquire_lease(folders, time)
    time.now += 1
    other = acquire_lease(folders, time)
    assert other.is_valid and other.token == lease.token + 1
    other.release()
    lease.release()


def test_an_unused_pause_ends_when_the_database_confirms_the_lease(folders: StateFolders, time: ManualClock) -> None:
    lease = acquire_lease(folders, time)
    time.now += 3600 * 10**9
    assert not lease.is_valid
    lease.renew()
    assert lease.is_valid and lease.lost_reason is None
    with pytest.raises(WorkspaceAlreadyHeld):
        acquire_lease(folders, time)
    lease.release()


def test_a_lapsed_lease_stays_lapsed_until_the_database_confirms_its_renewal(
    folders: StateFolders, time: ManualClock
) -> None:
    lease = acquire_lease(folders, time)
    time.now += STALE_NS
    other = sqlite3.connect(folders.database_file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    lease.renew()
    assert not lease.is_valid and lease.is_held
    other.execute("ROLLBACK")
    other.close()
    lease.renew()
    assert lease.is_valid
    lease.release()


@pytest.mark.proves("L-07")
def test_a_replaced_lease_holder_stays_invalid_and_learns_which_process_replaced_it(
    folders: StateFolders, time: ManualClock
) -> None:
    told: list[str | None] = []
    lease = acquire_lease(folders, time)
    lease.add_lost_callback(lambda: told.append(lease.lost_reason))
    time.now += STALE_NS
    other = acquire_lease(folders, time, "mcp")
    assert not lease.is_valid
    lease.renew()
    lease.renew()
    assert not lease.is_valid and not lease.is_held
    assert lease.lost_reason is not None
    assert (
        f"Another process (handrail mcp, pid {os.getpid()}" in lease.lost_reason
        and "taken over this workspace" in lease.lost_reason
    )
    lease.add_lost_callback(lambda: told.append("late"))
    assert told == [lease.lost_reason, "late"]
    lease.release()
    assert other.is_valid and file_of(other, folders).exists()
    other.release()
    lease.renew()
    assert not lease.is_valid


def test_a_callback_of_a_closed_event_loop_does_not_affect_other_callbacks(
    folders: StateFolders, time: ManualClock
) -> None:
    told: list[int] = []
    lease = acquire_lease(folders, time)
    loop = asyncio.new_event_loop()
    loop.close()
    lease.add_lost_callback(lambda: loop.call_soon_threadsafe(told.append, 0) and None)
    lease.add_lost_callback(lambda: told.append(1))
    time.now += STALE_NS
    with acquire_lease(folders, time):
        lease.renew()
    assert told == [1]
    lease.release()


@pytest.mark.parametrize("removes", [True, False])
def test_a_renewal_paused_before_its_write_does_not_restore_the_lease(
    folders: StateFolders, time: ManualClock, removes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = acquire_lease(folders, time)
    if not removes:  # as if the next holder had not come that far yet
        monkeypatch.setattr("handrail.store.lease.remove_former_holder_files", left_alone)
    others: list[WorkspaceLease] = []

    def paused() -> None:
        time.now += STALE_NS
        others.append(acquire_lease(folders, time, "two"))

    time.now += VALID_NS - 1
    time.then = paused
    lease.renew()
    assert not lease.is_valid and lease.lost_reason is not None and others[0].is_valid
    lease.release()
    others[0].release()


def test_a_holder_loses_its_lease_when_its_file_is_removed(folders: StateFolders, time: ManualClock) -> None:
    lease = acquire_lease(folders, time)
    file_of(lease, folders).unlink()
    lease.renew()
    assert not lease.is_valid and lease.lost_reason is not None
    with acquire_lease(folders, time) as other:
        assert other.token == 2
    lease.release()


def test_a_slowly_acquired_lease_is_valid(folders: StateFolders, time: ManualClock) -> None:
    """The first beat is written before the commit, which may take as long as the disk likes."""

    def slow() -> None:
        time.now += 10 * STALE_NS

    time.then = slow  # within the look at the clock that the first beat is of
    lease = acquire_lease(folders, time)
    assert lease.is_valid
    with pytest.raises(WorkspaceAlreadyHeld):
        acquire_lease(folders, time)
    lease.release()


def test_files_of_former_lease_holders_are_removed_and_other_files_are_kept(
    folders: StateFolders, time: ManualClock
) -> None:
    abandon(acquire_lease(folders, time))
    (folders.workspace_state_folder / "holder-0").write_bytes(b"")
    (folders.workspace_state_folder / "holder-9").write_bytes(b"the rest of an attempt")
    (folders.workspace_state_folder / "holder-2").write_bytes(b"the rest of an attempt at the next token")
    (folders.workspace_state_folder / "holder-x").write_bytes(b"somebody's")
    lease = acquire_lease(folders, time)
    assert {path.name for path in folders.workspace_state_folder.glob("holder-*")} == {"holder-2", "holder-x"}
    lease.release()


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_an_unexpected_object_in_place_of_the_holder_file_is_named_and_left_unchanged(
    folders: StateFolders, time: ManualClock, tmp_path: Path, kind: str
) -> None:
    lease = acquire_lease(folders, time)
    token = lease.token
    lease.release()
    target = tmp_path / "target"
    target.write_bytes(b"mine")
    for path in (
        folders.workspace_state_folder / f"holder-{token}",
        folders.workspace_state_folder / f"holder-{token + 1}",
    ):
        if kind == "link":
            path.symlink_to(target)
        elif kind == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
        with pytest.raises(StartError, match=rf"{path} should be the holder file .*Check who created it"):
            acquire_lease(folders, time)
        with pytest.raises(StartError, match="should be the holder file"):
            find_lease_holder(folders, time)
        path.rmdir() if kind == "folder" else path.unlink()
    assert target.read_bytes() == b"mine"
    acquire_lease(folders, time).release()


def test_a_link_in_place_of_the_database_is_named_and_not_followed(
    folders: StateFolders, time: ManualClock, tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere"
    folders.database_file.symlink_to(target)
    with pytest.raises(StartError, match=r"handrail\.db should be the log, but is a link"):
        acquire_lease(folders, time)
    assert not target.exists()


def test_a_damaged_fencing_token_stops_the_start(folders: StateFolders, time: ManualClock) -> None:
    acquire_lease(folders, time).release()
    connection = sqlite3.connect(folders.database_file)
    for token in ("many", -1, 2**62, None):
        with connection:
            connection.execute("UPDATE meta SET value = ? WHERE key = 'token'", (token,))
        with pytest.raises(StartError, match="damaged: the fencing token is not a number"):
            acquire_lease(folders, time)
    connection.close()
    assert not list(folders.workspace_state_folder.glob("holder-*"))


def test_a_forked_process_does_not_release_the_lease_of_its_parent(folders: StateFolders, time: ManualClock) -> None:
    lease = acquire_lease(folders, time)
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        lease.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(WorkspaceAlreadyHeld):
        acquire_lease(folders, time)
    lease.renew()
    assert lease.is_valid and lease.lost_reason is None
    lease.release()


async def test_a_wait_for_a_workspace_ends_when_its_holder_releases_it(place: Place) -> None:
    store = place.open()
    waiting = asyncio.ensure_future(WorkspaceLease.wait_until_free(place.folders, interval_s=0.001))
    await asyncio.sleep(0)
    assert not waiting.done()
    await store.aclose()
    await asyncio.wait_for(waiting, 300)


async def test_a_thread_renews_the_lease(place: Place) -> None:
    store = place.open()
    path = file_of(store.lease, place.folders)
    beat = path.read_bytes()[:24]
    async with asyncio.timeout(300):
        while path.read_bytes()[:24] == beat:
            await asyncio.sleep(0.01)
    assert store.lease.is_valid
    await store.aclose()


@pytest.mark.parametrize("steps", ["one", "several"])
@pytest.mark.proves("L-07")
async def test_the_writer_of_a_replaced_lease_holder_refuses_permanently_and_drops_its_queue(
    place: Place, steps: str
) -> None:
    """The token is increased without the lease: the database alone must detect it."""
    store = place.open()
    await store.sessions.record_opened(SessionRow("ses_1", 5))
    other = sqlite3.connect(place.folders.database_file)
    with other:
        other.execute("UPDATE meta SET value = value + 1 WHERE key = 'token'")
    for _ in range(2):
        with pytest.raises(LogUnavailable, match="taken over this workspace"):
            if steps == "one":
                await store.sessions.record_opened(SessionRow("ses_2", 6))
            else:
                await asyncio.gather(*(store.sessions.record_opened(SessionRow(f"ses_{n}", n)) for n in range(2, 9)))
        assert store.database.writer.unavailable_reason == store.lease.lost_reason
    assert not store.lease.is_valid
    with other:  # also when the token comes back: it is not believed again
        other.execute("UPDATE meta SET value = value - 1 WHERE key = 'token'")
    with pytest.raises(LogUnavailable, match="taken over this workspace"):
        await store.sessions.record_opened(SessionRow("ses_2", 6))
    assert other.execute("SELECT id FROM session").fetchall() == [("ses_1",)]
    other.close()
    await store.aclose()
    assert store.database.writer.backlog == 0


def test_a_visible_lease_holder_always_has_its_pid_and_socket(folders: StateFolders, time: ManualClock) -> None:
    ended = threading.Event()

    def come_and_go() -> None:
        try:
            for _ in range(100):
                WorkspaceLease.acquire(
                    folders, frontend="cli", clock=time, protocol=1, socket="a.sock", renewing=False
                ).release()
        finally:
            ended.set()

    coming = threading.Thread(target=come_and_go)
    seen: set[tuple[int | None, str]] = set()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that one looks between any two steps of the other
    try:
        coming.start()
        while not ended.is_set():
            if (holder := find_lease_holder(folders)) is not None:
                seen.add((holder.pid, holder.socket))
    finally:
        sys.setswitchinterval(interval)
        coming.join()
    assert seen == {(os.getpid(), "a.sock")}


def test_a_wall_clock_jump_does_not_change_the_holder_of_a_workspace(folders: StateFolders, time: ManualClock) -> None:
    century = 100 * 365 * 86400 * 10**9
    for wall in (0, century, 1):  # what each process in turn takes for the time of day
        lease = WorkspaceLease.acquire(
            folders, frontend="one", clock=lambda wall=wall: wall, monotonic=time, renewing=False
        )
        for other in (0, century):
            with pytest.raises(WorkspaceAlreadyHeld):
                WorkspaceLease.acquire(
                    folders, frontend="two", clock=lambda other=other: other, monotonic=time, renewing=False
                )
        time.now += STALE_NS // 4
        lease.renew()
        assert lease.is_valid and lease.holder.since_ns == wall
        lease.release()
