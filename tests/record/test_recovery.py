"""After a crash: started calls are interrupted, others are shown as not run, and nothing runs again."""

from __future__ import annotations

import sqlite3

import pytest
from tests.store.places import Place

from handrail.record.commit_log import CommitLog, Record
from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log

pytestmark = pytest.mark.proves("G-05")

CRASH = """
import asyncio, os, signal, sys
from pathlib import Path
from handrail.record.commit_log import CommitLog, Record
from handrail.store.workspace_store import WorkspaceStore

def record(kind, call, **body):
    return Record(kind, "ses_1", call, body)

async def main():
    store = WorkspaceStore.open(sys.argv[1], sys.argv[2])
    log = CommitLog(store.database)
    await log.record_interrupted_calls()
    for call in ("done", "rejected", "begun", "waiting", "authorised", "proposed"):
        log.record_soon([record("proposed", call, tool="write")])
    log.record_soon([record("authorised", "done"), record("intended", "done")])
    log.record_soon([record("committed", "done", result={"type": "output", "data": 1})])
    log.record_soon([record("rejected", "rejected", result={"type": "error"})])
    log.record_soon([record("approval-requested", "waiting")])
    log.record_soon([record("authorised", "authorised"), record("authorised", "begun")])
    await log.commit([record("intended", "begun")])
    Path(sys.argv[1], "effect").write_text("half")
    print("in the middle", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def killed_in_the_middle(place: Place) -> None:
    with place.process(CRASH) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the middle\n"
        process.kill()
        process.wait(timeout=300)


async def test_a_call_killed_while_it_runs_is_interrupted_with_an_unknown_outcome(place: Place) -> None:
    killed_in_the_middle(place)
    store = place.open()
    log = CommitLog(store.database)
    found = await log.record_interrupted_calls()
    assert [(call.call_id, call.session_id, call.tool) for call in found] == [("begun", "ses_1", "write")]
    outcome = await log.find_outcome("begun")
    assert outcome is not None and outcome.kind == "interrupted" and outcome.body is not None
    assert outcome.body["outcome"] == "unknown" and outcome.body["intended"] == found[0].intended
    assert verify_log(log.reader).ok
    await store.aclose()


async def test_calls_that_had_not_begun_are_not_recorded_as_started(place: Place) -> None:
    killed_in_the_middle(place)
    store = place.open()
    log = CommitLog(store.database)
    await log.record_interrupted_calls()
    with sqlite3.connect(place.folders.database_file) as connection:
        connection.execute(
            "INSERT INTO approval (id, kind, session, call, state, created_ns, expires_ns, exact_arguments, request) "
            "VALUES ('apr_1', 'approval', 'ses_1', 'waiting', 'pending', 1, 2, 1, x'7b7d')"
        )
    rows = {row.call_id: row for row in log.reader.calls()}
    assert {call: row.state for call, row in rows.items()} == {
        "done": "output",
        "rejected": "rejected",
        "begun": "interrupted",
        "waiting": "suspended",
        "authorised": "not-run",
        "proposed": "not-run",
    }
    assert all(rows[call].started_ns is None for call in ("rejected", "waiting", "authorised", "proposed"))
    await log.commit([Record("proposed", "ses_2", "new", {"tool": "read"})])
    assert [row.state for row in log.reader.calls(session="ses_2")] == ["proposed"]
    with sqlite3.connect(place.folders.database_file) as connection:
        connection.execute("DELETE FROM approval")  # as a purge does: nobody can answer, and it never goes on
    assert [row.state for row in log.reader.calls(call="waiting")] == ["not-run"]
    await store.aclose()


async def test_a_repeated_recovery_finds_no_further_interrupted_call(place: Place) -> None:
    killed_in_the_middle(place)
    for expected in (1, 0, 0):
        store = place.open()
        log = CommitLog(store.database)
        assert len(await log.record_interrupted_calls()) == expected
        assert len(await log.record_interrupted_calls()) == 0
        await store.aclose()
    with LogReader.open_database(place.folders.database_file) as reader:
        assert len(list(reader.records(kind="interrupted"))) == 1


async def test_a_second_killed_attempt_is_recorded_as_interrupted_again(place: Place) -> None:
    for _ in range(2):
        store = place.open()
        log = CommitLog(store.database)
        await log.commit([Record("intended", "ses_1", "job", {"tool": "fetch"})])
        await store.aclose()
        store = place.open()
        log = CommitLog(store.database)
        assert [call.call_id for call in await log.record_interrupted_calls()] == ["job"]
        await store.aclose()


async def test_recovery_finds_an_old_open_call_after_many_settled_calls(place: Place) -> None:
    store = place.open()
    log = CommitLog(store.database)
    await log.commit([Record("intended", "ses_1", "old", {"tool": "x"})])
    for number in range(5000):
        call = f"c{number}"
        log.record_soon([Record("intended", "ses_1", call, {}), Record("committed", "ses_1", call, {})])
    await log.flush()
    assert log.reader.read_log_boundary("settled") == 0
    assert [call.call_id for call in await log.record_interrupted_calls()] == ["old"]
    for number in range(5000):
        log.record_soon([Record("rejected", "ses_1", f"d{number}", {})])
    await log.flush()
    await log.commit([Record("rejected", "ses_1", "last", {})])
    assert log.reader.read_log_boundary("settled") > 10_000
    await log.commit([Record("intended", "ses_1", "new", {"tool": "x"})])
    assert [call.call_id for call in await log.record_interrupted_calls()] == ["new"]
    await store.aclose()
