"""A purge removes records from the disk, and the rest still verifies and can be referenced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.places import Place

from handrail.contract.errors import UsageError
from handrail.record.artifacts import ArtifactStore
from handrail.record.commit_log import CommitLog, Record, group_consecutive_numbers
from handrail.record.log_reader import LogReader
from handrail.record.record_purge import PurgeResult, PurgeSelection, plan_purge, purge_records
from handrail.record.verification import verify_log
from handrail.store.database.sqlite_connection import compact
from handrail.store.tables.session_tables import SessionRow
from handrail.store.workspace_store import WorkspaceStore

pytestmark = pytest.mark.proves("F-12")

HOUR = 3_600_000_000_000


@dataclass
class BackdatedLog:
    """A log whose records were made at hours of the test's choosing."""

    place: Place
    store: WorkspaceStore
    hour: int = 1
    log: CommitLog = field(init=False)
    artifacts: ArtifactStore = field(init=False)

    def __post_init__(self) -> None:
        self.log = CommitLog(self.store.database, clock=lambda: self.hour * HOUR)
        self.artifacts = ArtifactStore(self.store.folders.artifact_folder)

    async def call(self, session: str, number: int, text: str, **result: object) -> str:
        """A whole call, on disk."""
        call_id = f"{session}/{number}.0"
        whole = {"type": "output", "data": text, "metadata": result}
        await self.log.commit(
            [
                Record("proposed", session, call_id, {"tool": "read", "arguments": {"path": text}}),
                Record("intended", session, call_id, {"locks": []}),
                Record("committed", session, call_id, {"result": whole}),
            ]
        )
        return call_id

    async def session(self, session_id: str) -> None:
        await self.store.sessions.record_opened(SessionRow(session_id, self.hour * HOUR))

    async def purge(self, selection: PurgeSelection) -> PurgeResult:
        return await purge_records(self.log, self.store.database, self.store.folders, selection, reason="test")


@pytest.fixture
async def past(place: Place) -> AsyncIterator[BackdatedLog]:
    opened = place.open()
    yield BackdatedLog(place, opened)
    await opened.aclose()


def on_disk(folder: Path, text: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


async def test_a_purge_removes_older_sessions_and_keeps_newer_sessions(past: BackdatedLog) -> None:
    await past.session("ses_old")
    await past.call("ses_old", 1, "an old secret of somebody")
    past.hour = 5
    await past.session("ses_new")
    await past.call("ses_new", 1, "news")
    chosen = PurgeSelection(before_ns=3 * HOUR)
    assert (found := plan_purge(past.log.reader, past.store.folders, chosen)).sessions == ("ses_old",)
    assert (found.records, found.calls, found.oldest_ns, found.newest_ns) == (3, 1, HOUR, HOUR)
    done = await past.purge(chosen)
    assert (done.records, done.sessions, done.problems) == (3, 1, ())
    verified = verify_log(past.log.reader)
    assert verified.ok and verified.redacted == 3 and "3 of them redacted" in str(verified)
    assert not on_disk(past.store.folders.state, b"an old secret")
    assert on_disk(past.store.folders.state, b"news")
    assert [row.id for row in past.store.sessions.list_latest()] == ["ses_new"]
    old, new = past.log.reader.calls()
    assert (old.state, old.tool, new.state) == ("redacted", None, "output")
    assert plan_purge(past.log.reader, past.store.folders, chosen).is_empty


async def test_purging_a_session_removes_its_tool_values_output_and_scratch_files(past: BackdatedLog) -> None:
    folders = past.store.folders
    for session in ("ses_a", "ses_b"):
        await past.session(session)
        await past.store.session_values.put(session, "todo", "list", f"remembered by {session}")
        sidecar = folders.prepare_session_output(session) / "1_0.txt"
        sidecar.write_text(f"output of {session}")
        (folders.prepare_session_scratch(session) / "cache").write_text(f"scratch of {session}")
        await past.call(session, 1, f"said in {session}", output_path=str(sidecar))
    done = await past.purge(PurgeSelection(session_id="ses_a"))
    assert (done.records, done.sessions, done.files, done.problems) == (3, 1, 2, ())
    assert not on_disk(folders.state, b"of ses_a") and not on_disk(folders.state, b"said in ses_a")
    assert not on_disk(folders.state, b"remembered by ses_a")
    assert len(on_disk(folders.state, b"of ses_b")) == 2 and on_disk(folders.state, b"remembered by ses_b")
    assert verify_log(past.log.reader).ok


async def test_a_purge_keeps_artifacts_and_output_files_that_a_record_or_value_references(past: BackdatedLog) -> None:
    folders = past.store.folders
    await past.session("ses_1")
    only_old, shared, remembered = (past.artifacts.put(text) for text in (b"only old", b"shared", b"remembered"))
    old, new = folders.prepare_session_output("ses_1") / "old.txt", folders.prepare_session_output("ses_1") / "new.txt"
    notes = [Path(f"{file}.removed") for file in (old, new)]
    """As stand in the place of outputs that made room for others."""
    for file in (old, new, *notes):
        file.write_text("whole output")
    (folders.artifact_folder / "ab").mkdir(exist_ok=True)
    (folders.artifact_folder / "ab" / ".new-half").write_bytes(b"of a write that was killed")
    await past.call("ses_1", 1, "x", output_path=str(old), artifacts=[only_old, shared, remembered])
    past.hour = 5
    await past.call("ses_1", 2, "y", output_path=str(new), artifacts=[shared])
    await past.store.session_values.put("ses_1", "notes", "last", {"see": remembered})
    chosen = PurgeSelection(before_ns=3 * HOUR)
    named = plan_purge(past.log.reader, folders, chosen).orphans.files
    assert (await past.purge(chosen)).sessions == 0
    assert {file.exists() for file in named} == {False} and not old.exists() and new.exists()
    assert [note.exists() for note in notes] == [False, True]
    kept = {ref for ref in (only_old, shared, remembered) if stored(past, ref)}
    assert kept == {shared, remembered}
    assert not (folders.artifact_folder / "ab" / ".new-half").exists()


def stored(past: BackdatedLog, ref: str) -> bool:
    return (past.store.folders.artifact_folder / ref[7:9] / ref[9:]).exists()


async def test_a_purge_never_follows_a_link_in_the_state_folder(past: BackdatedLog, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("not ours")
    folders = past.store.folders
    (folders.artifact_folder / "ab").symlink_to(outside, target_is_directory=True)
    folders.prepare_session_output("ses_1")
    (folders.session_outputs_folder / "ses_2").symlink_to(outside, target_is_directory=True)
    (folders.session_outputs_folder / "ses_1" / "file").symlink_to(outside / "file")
    await past.purge(PurgeSelection(before_ns=HOUR))
    assert (outside / "file").read_text() == "not ours"


async def test_a_purge_removes_folders_of_deleted_sessions_but_not_folders_of_tools(past: BackdatedLog) -> None:
    folders = past.store.folders
    await past.session("ses_1")
    for name in ("ses_1", "ses_gone", "tool-indexer"):
        (folders.prepare_session_scratch(name) / "file").write_text("x")
    await past.purge(PurgeSelection(before_ns=1))
    assert sorted(path.name for path in (folders.state / "scratch" / folders.key).iterdir()) == [
        "ses_1",
        "tool-indexer",
    ]


async def test_a_purge_keeps_the_generation_records_that_later_calls_need(past: BackdatedLog) -> None:
    past.log.record_soon([Record("generation", "", "", {"number": 1})])
    past.hour = 2
    past.log.record_soon([Record("generation", "", "", {"number": 2})])
    await past.log.flush()
    past.hour = 5
    await past.call("ses_1", 1, "x")
    await past.purge(PurgeSelection(before_ns=3 * HOUR))
    bodies = [entry.body for entry in past.log.reader.records(kind="generation")]
    assert bodies == [None, {"number": 2}]


async def test_a_purge_keeps_the_full_generation_record_that_kept_differences_refer_to(past: BackdatedLog) -> None:
    told: list[dict[str, Any]] = [{"number": 1}, {"number": 2}, {"number": 3, "after": 2}, {"number": 4, "after": 3}]
    past.log.record_soon([Record("generation", "", "", one) for one in told])
    await past.log.flush()
    past.hour = 5
    await past.purge(PurgeSelection(before_ns=3 * HOUR))
    assert [entry.body for entry in past.log.reader.records(kind="generation")] == [None, *told[1:]]


async def test_a_repeated_purge_keeps_the_redaction_records(past: BackdatedLog) -> None:
    await past.call("ses_1", 1, "x")
    for _ in range(3):
        await past.purge(PurgeSelection(before_ns=9 * HOUR))
    assert (verified := verify_log(past.log.reader)).ok and verified.redacted == 3
    assert [entry.kind for entry in past.log.reader.records() if entry.body is not None] == ["redacted"]


async def test_a_purged_call_with_a_key_still_has_a_recorded_outcome(past: BackdatedLog) -> None:
    call_id = await past.call("ses_1", 1, "x")
    await past.purge(PurgeSelection(before_ns=9 * HOUR))
    assert (outcome := await past.log.find_outcome(call_id)) is not None and outcome.body is None


async def test_a_large_purge_runs_in_batches_that_are_each_recorded(
    past: BackdatedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.record.record_purge._MAX_BATCH_RECORDS", 10)
    for number in range(20):
        await past.call("ses_1", number, "x" * 500)
    assert (await past.purge(PurgeSelection(before_ns=9 * HOUR))).records == 60
    proofs = list(past.log.reader.records(kind="redacted"))
    assert [entry.body and entry.body["sequences"] for entry in proofs] == [[[n, n + 11]] for n in range(1, 60, 12)]
    assert verify_log(past.log.reader).ok


async def test_compaction_frees_disk_space_and_reports_a_reader_that_blocks_it(
    past: BackdatedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.store.database.sqlite_connection._COMPACTION_PATIENCE_S", 0)
    monkeypatch.setattr("handrail.store.database.sqlite_connection._LITTLE", 0)
    for number in range(50):
        await past.call("ses_1", number, f"large {number} " + "x" * 20_000)
    await past.purge(PurgeSelection(before_ns=9 * HOUR))
    path = past.store.folders.database_file
    await asyncio.to_thread(past.store.database.close)
    with LogReader.open_database(path) as reader:
        reader.connection.execute("BEGIN")
        reader.head()
        found = compact(path)
        assert found.problem is not None and "Another process is reading" in found.problem
    done = compact(path)
    assert done.problem is None and done.after < 200_000
    assert not path.with_name(f"{path.name}-wal").exists() or not path.with_name(f"{path.name}-wal").stat().st_size
    with LogReader.open_database(path) as reader:
        assert verify_log(reader).ok


async def test_redacting_a_missing_record_raises_a_usage_error(past: BackdatedLog) -> None:
    await past.call("ses_1", 1, "x")
    for sequences in ([0], [3, 4], [99], [-1]):
        with pytest.raises(UsageError, match="has no record"):
            await past.log.redact_record_bodies(sequences, reason="x")


@given(st.sets(st.integers(0, 60)))
def test_sequence_runs_contain_exactly_the_numbers_they_were_built_from(numbers: set[int]) -> None:
    runs = group_consecutive_numbers(sorted(numbers))
    assert [n for first, last in runs for n in range(first, last + 1)] == sorted(numbers)
    assert all(later[0] > earlier[1] + 1 for earlier, later in pairwise(runs))


@pytest.mark.parametrize(
    "claim", [[[1, 2]], [[1, 1], [3, 3]], [[2, 3]], [1, 2, 3], [], "all", [[1, 3, 5]], [["1", "3"]], [[3, 1]]]
)
async def test_a_redaction_record_covers_only_the_sequences_that_it_names(past: BackdatedLog, claim: object) -> None:
    await past.call("ses_1", 1, "x")
    await past.log.commit([Record("redacted", "", "", {"sequences": claim, "reason": "x"})])
    await asyncio.to_thread(past.store.database.close)
    rewrite(past.store.folders.database_file, "UPDATE record SET body = NULL WHERE sequence <= 3")
    with LogReader.open_database(past.store.folders.database_file) as reader:
        found = verify_log(reader)
    assert not found.ok and found.problem is not None and "without a recorded redaction" in found.problem


@pytest.mark.parametrize("claim", [[[1, 3]], [[-5, 2**62]], [[1, 2], [2, 3]], [[3, 3], [1, 1], [2, 2], [1, 1]]])
async def test_the_runs_of_a_redaction_record_may_overlap_in_any_order(past: BackdatedLog, claim: object) -> None:
    await past.call("ses_1", 1, "x")
    await past.log.commit([Record("redacted", "", "", {"sequences": claim, "reason": "x"})])
    await asyncio.to_thread(past.store.database.close)
    rewrite(past.store.folders.database_file, "UPDATE record SET body = NULL WHERE sequence <= 3")
    with LogReader.open_database(past.store.folders.database_file) as reader:
        assert verify_log(reader).ok


def rewrite(path: Path, sql: str) -> None:
    import sqlite3

    connection = sqlite3.connect(path)
    with connection:
        connection.execute(sql)
    connection.close()
