"""The commit log: committed records are durable and in order, whatever they contain."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from itertools import cycle
from typing import Any

import pytest
from tests.store.places import Place

from handrail.contract.errors import LogUnavailable, UsageError
from handrail.record.commit_log import CommitLog, Record
from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log
from handrail.store.workspace_store import WorkspaceStore


def proposed(call: str, session: str = "ses_1", **body: Any) -> Record:
    return Record("proposed", session, call, {"tool": "read", "arguments": {"path": "a"}, **body})


def make_committed_record(call: str, session: str = "ses_1", kind: str = "output", **metadata: Any) -> Record:
    result = {"type": kind, "data": 1, "metadata": metadata}
    return Record("committed", session, call, {"result": result})


READ_BACK = """
import sys
from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log
from handrail.store.state_folders import locate_folders
with LogReader.open_database(locate_folders(sys.argv[1], sys.argv[2]).database_file) as reader:
    print([(r.sequence, r.kind, r.call_id) for r in reader.records()], verify_log(reader).ok)
"""


@pytest.mark.proves("G-01")
async def test_another_process_sees_committed_records_at_once(log: CommitLog, place: Place) -> None:
    log.record_soon([proposed("c1"), Record("authorised", "ses_1", "c1", {})])
    await log.commit([Record("intended", "ses_1", "c1", {})])
    expected = "[(1, 'proposed', 'c1'), (2, 'authorised', 'c1'), (3, 'intended', 'c1')] True\n"
    assert place.finished(READ_BACK) == expected


async def test_appended_records_are_in_the_log_after_the_store_closes(
    log: CommitLog, store: WorkspaceStore, place: Place
) -> None:
    for number in range(300):
        log.record_soon([proposed(f"c{number}")])
    await store.aclose()
    with LogReader.open_database(place.folders.database_file) as reader:
        assert [r.call_id for r in reader.records()] == [f"c{n}" for n in range(300)]
        assert verify_log(reader).ok


async def test_concurrent_commits_share_transactions(log: CommitLog, store: WorkspaceStore) -> None:
    async def caller(name: int) -> None:
        for number in range(20):
            await log.commit([proposed(f"{name}.{number}"), make_committed_record(f"{name}.{number}")])

    await asyncio.gather(*(caller(n) for n in range(64)))
    writer = store.database.writer
    assert writer.commits == 64 * 20
    assert writer.transactions < writer.commits / 8
    found = verify_log(log.reader)
    assert found.ok and found.records == 64 * 20 * 2
    for name in range(64):
        calls = [r.call_id for r in log.reader.records(kind="committed") if r.call_id.startswith(f"{name}.")]
        assert calls == [f"{name}.{n}" for n in range(20)]


@pytest.mark.parametrize(
    "body",
    [
        {"text": "half \ud800"},
        {"n": 2**200},
        {"x": float("nan")},
        {"data": b"\xff"},
        {"\udfff": {1: object()}},
        {"deep": [[[[[0]]]]] * 3},
    ],
)
async def test_an_unencodable_value_breaks_neither_its_record_nor_the_chain(
    log: CommitLog, body: dict[str, Any]
) -> None:
    await log.commit([proposed("c1"), Record("committed", "ses\ud800", "c\0\udfff", body), proposed("c2")])
    assert [r.sequence for r in log.reader.records()] == [1, 2, 3]
    assert verify_log(log.reader).ok
    entry = log.reader.get_record(2)
    assert entry is not None and entry.session_id == "ses\\ud800" and entry.call_id == "c\0\\udfff"
    assert entry.body is not None and len(entry.body) == 1


async def test_the_hash_chain_continues_across_restarts(place: Place) -> None:
    hashes: list[str] = []
    for number in range(3):
        store = place.open()
        log = CommitLog(store.database)
        await log.commit([proposed(f"c{number}")])
        hashes.append(log.reader.head().hash)
        await store.aclose()
    with LogReader.open_database(place.folders.database_file) as reader:
        assert [r.hash for r in reader.records()] == hashes
        assert verify_log(reader, hashes[0]).ok


async def test_a_reader_filters_records_by_session_call_kind_and_sequence(log: CommitLog) -> None:
    for session in ("ses_1", "ses_2"):
        for call in ("a", "b"):
            await log.commit(
                [proposed(f"{session}/{call}", session), make_committed_record(f"{session}/{call}", session)]
            )
    reader = log.reader
    assert [r.sequence for r in reader.records(session="ses_2")] == [5, 6, 7, 8]
    assert [r.sequence for r in reader.records(session="ses_2", kind="proposed")] == [5, 7]
    assert [r.sequence for r in reader.records(call="ses_1/b")] == [3, 4]
    assert [r.sequence for r in reader.records(since=6, limit=1)] == [7]
    assert [r.sequence for r in reader.records(kind="proposed", limit=2, newest_first=True)] == [7, 5]
    assert list(reader.records(call="nobody")) == []
    assert [c.call_id for c in reader.calls(limit=3)] == ["ses_1/b", "ses_2/a", "ses_2/b"]
    assert [c.call_id for c in reader.calls(session="ses_1")] == ["ses_1/a", "ses_1/b"]


async def test_a_call_is_one_row_with_its_current_state(log: CommitLog) -> None:
    def step(kind: Any, call: str, **body: Any) -> Record:
        return Record(kind, "ses_1", call, body)

    refusal = {"type": "error", "error_text": "no", "metadata": {"error_kind": "denied"}}
    steps: dict[str, list[Record]] = {
        "proposed": [],
        "awaiting-approval": [step("approval-requested", "awaiting-approval")],
        "authorised": [step("authorised", "authorised")],
        "running": [step("authorised", "running"), step("intended", "running")],
        "output": [step("intended", "output"), make_committed_record("output")],
        "error": [step("intended", "error"), step("committed", "error", result=refusal)],
        "rejected": [step("approval-requested", "rejected"), step("rejected", "rejected", result=refusal)],
    }
    for state, records in steps.items():
        await log.commit([proposed(state), *records])
    rows = {row.call_id: row for row in log.reader.calls()}
    assert {call: row.state for call, row in rows.items()} == {state: state for state in steps}
    assert rows["output"].tool == "read" and rows["output"].session_id == "ses_1"
    assert rows["rejected"].error_kind == "denied" and rows["rejected"].error_text == "no"
    done = rows["output"]
    assert done.started_ns is not None and done.ended_ns is not None
    assert done.proposed_ns <= done.started_ns <= done.ended_ns
    assert rows["rejected"].started_ns is None and rows["running"].ended_ns is None


@pytest.mark.proves("L-10")
async def test_the_log_finds_the_outcome_and_proposal_of_a_call_by_its_id(log: CommitLog) -> None:
    log.record_soon([proposed("c1", arguments={"path": "x"}), make_committed_record("c1", mark=7), proposed("c2")])
    outcome, proposal = await log.find_outcome("c1"), await log.find_proposal("c1")
    assert outcome is not None and outcome.body is not None and outcome.body["result"]["metadata"] == {"mark": 7}
    assert proposal is not None and proposal.body is not None and proposal.body["arguments"] == {"path": "x"}
    assert await log.find_outcome("c2") is None
    assert await log.find_outcome("c3") is None and await log.find_proposal("c3") is None
    assert await log.find_outcome("") is None


async def test_a_late_record_does_not_replace_the_recorded_result_of_a_call(log: CommitLog) -> None:
    late = Record("committed", "ses_1", "c1", {"late": True, "ended": "returned"})
    timeout = Record("committed", "ses_1", "c1", {"result": {"type": "error", "metadata": {"error_kind": "timeout"}}})
    for order in ([timeout, late], [late, timeout]):
        await log.commit([proposed("c1"), Record("intended", "ses_1", "c1", {}), *order])
        outcome = await log.find_outcome("c1")
        assert outcome is not None and outcome.body is not None and "result" in outcome.body
        assert [(row.state, row.error_kind) for row in log.reader.calls()] == [("error", "timeout")]


@pytest.mark.proves("G-02")
async def test_a_redaction_removes_the_body_from_disk_and_keeps_the_chain_valid(log: CommitLog, place: Place) -> None:
    secret = "correct-horse-battery-staple" * 200
    await log.commit([proposed("c1"), proposed("c2", arguments={"password": secret}), proposed("c3")])
    head = log.reader.head().hash
    await log.redact_record_bodies([2, 2], reason="a password", session_id="ses_1")
    entry = log.reader.get_record(2)
    assert entry is not None and entry.body is None and entry.tool is None
    found = verify_log(log.reader, head)
    assert found.ok and found.redacted == 1 and "1 of them redacted" in str(found)
    last = log.reader.get_record(4)
    assert last is not None and last.body == {"sequences": [[2, 2]], "reason": "a password"}
    for file in place.folders.workspace_state_folder.rglob("*"):
        assert file.is_dir() or b"correct-horse" not in file.read_bytes(), file


async def test_the_record_of_a_redaction_cannot_be_redacted(log: CommitLog) -> None:
    await log.commit([proposed("c1")])
    await log.redact_record_bodies([1], reason="x")
    with pytest.raises(UsageError, match="Record 2 documents a redaction"):
        await log.redact_record_bodies([2], reason="x")
    with pytest.raises(UsageError, match="no record 99"):
        await log.redact_record_bodies([1, 99], reason="x")
    assert verify_log(log.reader).records == 2


async def test_a_body_removed_outside_the_log_does_not_count_as_a_redaction(
    log: CommitLog, store: WorkspaceStore
) -> None:
    await log.commit([proposed("c1"), proposed("c2")])
    outside = sqlite3.connect(store.database.path)
    outside.execute("UPDATE record SET body = NULL WHERE sequence = 1")
    outside.commit()
    outside.close()
    found = verify_log(log.reader)
    assert not found.ok and found.first_invalid == 1 and "without a recorded redaction" in str(found)


async def test_a_log_that_another_program_wrote_to_refuses_new_records(log: CommitLog, store: WorkspaceStore) -> None:
    await log.commit([proposed("c1"), proposed("c2")])
    outside = sqlite3.connect(store.database.path)
    outside.execute("INSERT INTO record VALUES (3, 1, 'committed', '', '', zeroblob(64), x'7b7d')")
    outside.commit()
    outside.close()
    with pytest.raises(LogUnavailable, match="damaged"):
        await log.commit([proposed("c3")])
    assert log.unavailable_reason is not None and "handrail log verify" in log.unavailable_reason


async def test_a_clock_that_jumps_changes_neither_the_order_nor_the_chain(
    store: WorkspaceStore,
) -> None:
    century = 100 * 365 * 86400 * 10**9
    given = cycle([century, 1_000, 2 * century, 0])
    log = CommitLog(store.database, clock=lambda: next(given))
    for number in range(5):
        await log.commit([proposed(f"c{number}"), make_committed_record(f"c{number}")])
    found = list(log.reader.records())
    assert [record.sequence for record in found] == list(range(1, 11))
    assert [record.call_id for record in found] == [f"c{n}" for n in range(5) for _ in range(2)]
    times = [record.at_ns for record in found]
    assert times != sorted(times)
    assert verify_log(log.reader).ok
    assert [row.state for row in log.reader.calls()] == ["output"] * 5


def steps(call: str, *kinds: Any) -> list[Record]:
    return [Record(kind, "ses_1", call, {"step": kind, "of": call}) for kind in kinds]


@pytest.mark.proves("G-02")
async def test_records_written_together_are_each_found_by_sequence_kind_and_call(
    log: CommitLog,
) -> None:
    a = steps("ses_1/1.0", "proposed", "authorised", "intended", "committed")
    b = steps("ses_1/1.1", "proposed", "authorised", "intended")
    await log.commit([*a, Record("turn-finished", "ses_1", "", {"n": 1}), *b])
    await log.commit([*steps("ses_1/1.1", "committed")])
    told = [(record.kind, record.call_id) for record in (*a, Record("turn-finished", "ses_1", "", {}), *b)]
    told.append(("committed", "ses_1/1.1"))
    records = list(log.reader.records())
    assert [(one.sequence, one.kind, one.call_id) for one in records] == [(n, *one) for n, one in enumerate(told, 1)]
    assert all(one.body == {"step": one.kind, "of": one.call_id} for one in records if one.call_id)
    (rows,) = log.reader.connection.execute("SELECT count(*) FROM record").fetchone()
    assert rows == 4
    assert [log.reader.get_record(n) for n in range(11)] == [None, *records, None]
    assert [one.sequence for one in log.reader.records(since=2, limit=3)] == [3, 4, 5]
    assert [one.sequence for one in log.reader.records(newest_first=True, limit=4)] == [9, 8, 7, 6]
    assert [one.sequence for one in log.reader.records(kind="intended", newest_first=True)] == [8, 3]
    assert [one.sequence for one in log.reader.records(call="ses_1/1.1", since=6)] == [7, 8, 9]
    assert log.reader.head().sequence == 9 and verify_log(log.reader).records == 9
    assert log.reader.list_unfinished_intents() == []


async def test_the_log_finds_an_unfinished_intent_at_any_position_in_its_entry(log: CommitLog) -> None:
    for number, kinds in enumerate(
        (("proposed", "intended"), ("proposed", "intended", "client-request"), ("intended", "committed", "intended"))
    ):
        await log.commit(steps(f"ses_1/1.{number}", *kinds))
    await log.commit(steps("ses_1/1.3", "proposed", "intended", "committed"))
    assert [one.sequence for one in log.reader.list_unfinished_intents()] == [2, 4, 8]
    lost = await log.record_interrupted_calls()
    assert [one.call_id for one in lost] == ["ses_1/1.0", "ses_1/1.1", "ses_1/1.2"]
    assert log.reader.list_unfinished_intents() == [] and verify_log(log.reader).ok


async def test_a_redaction_includes_records_written_together_and_lists_them_all(log: CommitLog) -> None:
    await log.commit([*steps("ses_1/1.0", "proposed", "authorised"), *steps("ses_1/1.1", "proposed", "authorised")])
    await log.redact_record_bodies([3], reason="x")
    assert [one.body is None for one in log.reader.records()] == [False, False, True, True, False]
    proof = log.reader.get_record(5)
    assert proof is not None and proof.body is not None and proof.body["sequences"] == [[3, 4]]
    found = verify_log(log.reader)
    assert found.ok and found.redacted == 2


@pytest.mark.parametrize("odd", ["half \ud800 pair", 2**80, ', {"a', "]"])
async def test_an_unusual_body_does_not_affect_other_records_of_its_entry(
    log: CommitLog, store: WorkspaceStore, odd: Any
) -> None:
    call = [proposed("c1"), Record("authorised", "ses_1", "c1", {"odd": odd}), make_committed_record("c1")]
    await log.commit(call)
    await log.start_journalled_commit([Record(kind, "ses_1", "c2", body) for kind, _, _, body in call])
    await log.flush()
    for name in ("c1", "c2"):
        first, odd_one, last = log.reader.records(call=name)
        assert first.body == call[0].body and last.body == call[2].body
        assert odd_one.body is not None and list(odd_one.body) == ["odd"]
    assert verify_log(log.reader).ok


@pytest.mark.proves("G-02")
async def test_verification_reports_a_changed_body_with_all_records_that_share_it(
    log: CommitLog, store: WorkspaceStore
) -> None:
    await log.commit([*steps("ses_1/1.0", "proposed"), *steps("ses_1/1.1", "proposed", "authorised", "intended")])
    with closing(sqlite3.connect(store.database.path)) as outside, outside:
        outside.execute(
            "UPDATE record SET body = CAST(replace(body, 'authorised', 'authorisee') AS BLOB) WHERE sequence = 2"
        )
    found = verify_log(log.reader)
    assert not found.ok and found.first_invalid == 2 and "records 2 to 4: a body" in str(found)


async def test_a_started_call_is_recorded_with_its_end_or_before_any_later_record(log: CommitLog) -> None:
    left: dict[str, list[str]] = {}

    def start(call: str) -> None:
        left[call] = ["proposed", "intended"]
        log.record_started_call(call, lambda: hand_over(call))

    def hand_over(call: str) -> None:
        kinds, left[call] = left[call], []
        if kinds:
            log.record_call_soon("ses_1", call, " ".join(kinds), b"[%b]" % b",".join([b"{}"] * len(kinds)))

    start("short")
    left["short"].append("committed")
    hand_over("short")
    start("long")
    await log.commit([proposed("later")])
    start("longest")
    while left["longest"]:
        await asyncio.sleep(0.001)
    await log.flush()
    rows = log.reader.connection.execute("SELECT kinds, call FROM record").fetchall()
    assert rows == [
        ("proposed intended committed", "short"),
        ("proposed intended", "long"),
        ("proposed", "later"),
        ("proposed intended", "longest"),
    ]
