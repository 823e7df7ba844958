"""A promised record is in the log after a crash, a pause, a redaction or a disk error."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.store.places import Place
from tests.store.test_engines import offers  # noqa: F401 # pyright: ignore[reportUnusedImport]

from handrail.contract.errors import LogUnavailable, StartError
from handrail.frontends.cli.command_group import ERROR, OUTPUT, run_command_line
from handrail.kernel.doctor import run_doctor_checks
from handrail.record.commit_log import CommitLog, Record, decode_journaled_records, read_unwritten_records
from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log
from handrail.store.database import journal, workspace_database
from handrail.store.database.workspace_database import TableWork
from handrail.store.json_fallback_encoding import encode_json_with_fallback
from handrail.store.workspace_store import WorkspaceStore

pytestmark = pytest.mark.proves("G-01")

BEGUN = """
import asyncio, sqlite3, sys
from handrail.record.commit_log import CommitLog, Record
from handrail.store.workspace_store import WorkspaceStore

async def main():
    store = WorkspaceStore.open(sys.argv[1], sys.argv[2])
    log = CommitLog(store.database)
    await log.record_interrupted_calls()
    await log.start_journalled_commit([Record("intended", "ses_1", "first", {"locks": []})])  # makes no journal yet
    await log.start_journalled_commit([])
    await log.flush()
    other = sqlite3.connect(store.folders.database_file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # from here on the database has nothing more
    said = {"role": "assistant", "parts": [{"text": "I begin"}]}
    kept = store.messages.queue_message_writes("ses_1", [(0, said)], 1)
    log.record_soon([Record("proposed", "ses_1", "ses_1/2.0", {"tool": "write", "arguments": {"path": "a\\ud800"}})])
    await log.start_journalled_commit([Record("intended", "ses_1", "ses_1/2.0", {"locks": ["a"]})])
    await log.start_journalled_commit([Record("intended", "ses_1", "third", {"locks": []})])
    assert kept.is_durable
    print("begun", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
"""Begins three calls, of which the database gets to know one."""

FORGED: list[object] = [
    {"$oversized": 1},
    [["record", [1, [["intended", 5, None, {}]]]]],
    [["record", [2**70, [["intended", "s", "c", {}]]]]],
    [["message", ["s", 1, [[2**70, {}]]]]],
]


def journals(place: Place) -> list[str]:
    return sorted(path.name for path in place.folders.workspace_state_folder.glob("journal-*"))


def intents(place: Place) -> list[str]:
    with LogReader.open_database(place.folders.database_file) as reader:
        assert verify_log(reader).ok
        return [entry.call_id for entry in reader.records() if entry.kind == "intended"]


def intended(call: str) -> list[Record]:
    return [Record("intended", "ses_1", call, {"text": f"what {call} is about"})]


def killed(place: Place) -> None:
    with place.process(BEGUN) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.kill()
        process.wait(timeout=300)


@pytest.mark.proves("G-05")
async def test_records_held_only_by_the_journal_enter_the_log_after_a_crash(place: Place) -> None:
    killed(place)
    assert intents(place) == ["first"] and journals(place) == ["journal-1"]
    store = place.open()
    log = CommitLog(store.database)
    assert [call.call_id for call in await log.record_interrupted_calls()] == ["first", "ses_1/2.0", "third"]
    proposal = await log.find_proposal("ses_1/2.0")
    assert proposal is not None and proposal.body == {"tool": "write", "arguments": {"path": "a\ud800"}}
    said = await store.messages.read("ses_1")
    assert said == [(0, {"role": "assistant", "parts": [{"text": "I begin"}]})]
    assert journals(place) == []
    await store.aclose()
    assert intents(place) == ["first", "ses_1/2.0", "third"]


@pytest.mark.proves("G-05")
@pytest.mark.parametrize("at", ["before it is in the database", "before the journal is removed"])
async def test_a_crash_during_recovery_duplicates_no_record(
    place: Place, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    killed(place)
    unlink = Path.unlink

    def cut(path: Path, missing_ok: bool = False) -> None:
        if not path.name.endswith(".left"):
            return unlink(path, missing_ok)
        raise OSError("the power is cut")

    store = place.open()
    if at == "before it is in the database":
        await store.aclose()  # nobody has caught up
    else:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "unlink", cut)
            with pytest.raises(LogUnavailable, match="the power is cut"):
                await CommitLog(store.database).record_interrupted_calls()
        await store.aclose()
    assert journals(place) == ["journal-1.left"]
    store = place.open()
    log = CommitLog(store.database)
    await log.record_interrupted_calls()
    await store.aclose()
    assert intents(place) == ["first", "ses_1/2.0", "third"] and journals(place) == []


async def test_read_only_commands_warn_of_records_that_are_not_in_the_log_yet(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    killed(place)
    with LogReader.open_database(place.folders.database_file) as reader:
        missing = read_unwritten_records(reader.connection, place.folders.workspace_state_folder)
    assert [(record.kind, record.call_id) for record in missing] == [
        ("proposed", "ses_1/2.0"),
        ("intended", "ses_1/2.0"),
        ("intended", "third"),
    ]
    (told,) = (check for check in run_doctor_checks(place.workspace, place.state) if check.name == "interrupted calls")
    assert told.detail.startswith("first, ses_1/2.0, third: started before the last stop")
    where = ["--workspace", str(place.workspace), "--state", str(place.state)]
    for command in (["log"], ["log", "verify"]):
        assert run_command_line([*command, *where]) == OUTPUT
        assert "3 records are not in the log yet (ses_1/2.0, third)" in capsys.readouterr().err
    assert run_command_line(["explain", "ses_1/2.0", *where]) == ERROR
    told = capsys.readouterr().err
    assert "handrail explain: 3 records are not in the log yet" in told and "Call 'ses_1/2.0' is not" in told
    await place.open().aclose()
    (place.folders.workspace_state_folder / "journal-1.left").write_bytes(b"HRJ9")
    assert run_command_line(["log", *where]) == OUTPUT and "another version of Handrail" in capsys.readouterr().err
    (told,) = (check for check in run_doctor_checks(place.workspace, place.state) if check.name == "interrupted calls")
    assert told.state == "problem" and "another version of Handrail" in told.detail


async def test_a_new_lease_holder_writes_the_former_holders_records_first(place: Place) -> None:
    killed(place)
    store = place.open()
    log = CommitLog(store.database)
    await asyncio.gather(
        log.start_journalled_commit(intended("fourth")), log.start_journalled_commit(intended("fifth"))
    )
    await store.aclose()
    assert intents(place) == ["first", "ses_1/2.0", "third", "fourth", "fifth"] and journals(place) == []


async def test_an_unreadable_journal_blocks_commits_until_it_is_readable(place: Place) -> None:
    killed(place)
    path = place.folders.workspace_state_folder / "journal-1"
    content = path.read_bytes()
    path.write_bytes(b"HRJ9" + content[4:])
    store = place.open()
    log = CommitLog(store.database)
    with pytest.raises(LogUnavailable, match=r"journal-1\.left was written by another version of Handrail"):
        await log.record_interrupted_calls()
    with pytest.raises(LogUnavailable):
        await log.commit(intended("fourth"))
    (place.folders.workspace_state_folder / "journal-1.left").write_bytes(content)
    await log.record_interrupted_calls()
    await store.aclose()
    assert intents(place) == ["first", "ses_1/2.0", "third"]


async def test_messages_held_only_by_the_journal_are_read_back(place: Place) -> None:
    store = place.open()
    log = CommitLog(store.database)
    for call in ("first", "ses_1/2.0"):
        await log.start_journalled_commit(intended(call))
    said = [(0, {"role": "user", "parts": [{"text": "begin"}]})]
    kept = store.messages.queue_message_writes("ses_1", said, 1)
    await log.start_journalled_commit(intended("third"))  # of another session, say
    assert kept.is_durable
    assert await store.messages.read("ses_1") == said  # what it did not see it would write over
    await store.aclose()


@pytest.mark.proves("F-12")
async def test_a_purge_removes_records_that_exist_only_in_the_journal(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    await place.open().aclose()
    former = journal.Journal(place.folders.workspace_state_folder, 1)
    assert former.append_journal_entry(
        encode_json_with_fallback(
            [["record", [1, [[session, call, kind, [body]] for kind, session, call, body in intended("secret")]]]]
        )
    )
    former.close()
    where = ["--workspace", str(place.workspace), "--state", str(place.state)]
    await asyncio.to_thread(run_command_line, ["log", "purge", "--session", "ses_1", "--yes", *where])
    assert "1 records are not in the log yet" in capsys.readouterr().err
    assert journals(place) == [] and intents(place) == ["secret"]
    for path in place.folders.workspace_state_folder.glob("handrail.db*"):
        assert b"what secret is about" not in path.read_bytes()


@pytest.mark.parametrize("note", FORGED, ids=["no note", "no texts", "no time", "no position"])
async def test_an_invalid_journal_note_blocks_commits_and_the_error_names_the_file(
    place: Place, note: object, capsys: pytest.CaptureFixture[str]
) -> None:
    await place.open().aclose()
    forged = journal.Journal(place.folders.workspace_state_folder, 1)
    assert forged.append_journal_entry(encode_json_with_fallback(note))
    forged.close()
    assert run_command_line(["log", "--workspace", str(place.workspace), "--state", str(place.state)]) == OUTPUT
    assert "Traceback" not in capsys.readouterr().err
    store = place.open()
    log = CommitLog(store.database)
    with pytest.raises(LogUnavailable, match=r"journal-1\.left was written by another version.*move the file away"):
        await log.record_interrupted_calls()
    log.record_soon(intended("kept"))
    with pytest.raises(LogUnavailable, match="move the file away"):
        await log.commit(intended("refused"))
    (place.folders.workspace_state_folder / "journal-1.left").unlink()
    await log.record_interrupted_calls()
    await store.aclose()
    assert intents(place) == ["kept"]


async def test_a_write_refused_by_the_database_does_not_lose_promised_records(place: Place) -> None:
    store = place.open()
    log = CommitLog(store.database)
    for call in ("first", "ses_1/2.0"):
        await log.start_journalled_commit(intended(call))
    kept = store.messages.queue_message_writes("ses_1", [(2**63, {})], 1)
    await log.start_journalled_commit(intended("third"))
    with pytest.raises(LogUnavailable, match="cannot be written"):
        await kept
    nobody: Any = None
    log.record_soon([Record("intended", nobody, "faulty", {})])
    await log.start_journalled_commit(intended("fourth"))
    await store.aclose()
    assert intents(place) == ["first", "ses_1/2.0", "third", "fourth"]


async def test_a_superseded_lease_holder_cannot_promise_records(place: Place) -> None:
    store = place.open()
    log = CommitLog(store.database)
    for call in ("first", "ses_1/2.0"):
        await log.start_journalled_commit(intended(call))
    assert journals(place) == ["journal-1"]
    journal.mark_journals_orphaned(
        place.folders.workspace_state_folder
    )  # as somebody does who is about to count a token
    connection = sqlite3.connect(place.folders.database_file)
    connection.execute("UPDATE meta SET value = 2 WHERE key = 'token'")
    connection.commit()
    connection.close()
    with pytest.raises(LogUnavailable, match="has taken over this workspace"):
        await log.start_journalled_commit(intended("third"))
    await store.aclose()
    assert intents(place) == ["first"] and journals(place) == ["journal-1.left"]
    successor = place.open()
    await CommitLog(successor.database).record_interrupted_calls()
    await successor.aclose()
    assert intents(place)[:2] == ["first", "ses_1/2.0"]


async def test_a_lease_holder_superseded_before_its_first_note_creates_no_journal(place: Place) -> None:
    store = place.open()
    log = CommitLog(store.database)
    await log.start_journalled_commit(intended("first"))
    assert journals(place) == []
    connection = sqlite3.connect(place.folders.database_file, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    journal.mark_journals_orphaned(
        place.folders.workspace_state_folder
    )  # there is none yet, and nobody comes back to look
    connection.execute("UPDATE meta SET value = 2 WHERE key = 'token'")
    connection.execute("COMMIT")
    connection.close()
    with pytest.raises(LogUnavailable, match="has taken over this workspace"):
        await log.start_journalled_commit(intended("ses_1/2.0"))
    assert journals(place) == []
    await store.aclose()


async def test_the_database_is_locked_while_a_journal_is_created(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store = place.open()
    log = CommitLog(store.database)
    await log.start_journalled_commit(intended("first"))
    other = sqlite3.connect(place.folders.database_file, isolation_level=None, timeout=0, check_same_thread=False)
    refused: list[str] = []

    def made(folder: Path, token: int) -> journal.Journal:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            refused.append(str(error))
        return journal.Journal(folder, token)

    monkeypatch.setattr(workspace_database, "Journal", made)
    await log.start_journalled_commit(intended("ses_1/2.0"))
    assert refused == ["database is locked"] and journals(place) == ["journal-1"]
    other.close()
    await store.aclose()


async def test_a_redaction_also_erases_the_body_from_the_journal(place: Place) -> None:
    store = place.open()
    log = CommitLog(store.database)
    for call in ("first", "secret"):
        await log.start_journalled_commit(intended(call))
    path = place.folders.workspace_state_folder / "journal-1"
    assert b"what secret is about" in path.read_bytes()
    await log.flush()
    await log.redact_record_bodies([2], reason="asked for")
    assert b"secret" not in path.read_bytes()
    await log.start_journalled_commit(intended("third"))
    assert b"what third is about" in path.read_bytes()
    await store.aclose()
    assert journals(place) == [] and intents(place) == ["first", "secret", "third"]


async def test_a_redaction_that_cannot_erase_the_journal_deletes_it_without_duplicate_records(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = place.open()
    log = CommitLog(store.database)
    for call in ("first", "secret"):
        await log.start_journalled_commit(intended(call))
    await log.flush()

    def failing(_: journal.Journal) -> None:
        raise OSError("a bad sector")

    def in_company(item: TableWork) -> Coroutine[Any, Any, None]:
        log.record_soon(intended("third"))
        return commit(item)

    commit = store.database.writer.commit
    monkeypatch.setattr(journal.Journal, "erase", failing)
    with monkeypatch.context() as patched:
        patched.setattr(store.database.writer, "commit", in_company)
        await log.redact_record_bodies([2], reason="asked for")
    assert journals(place) == []
    await log.start_journalled_commit(intended("fourth"))
    assert intents(place) == ["first", "secret", "third", "fourth"]
    await store.aclose()


async def test_records_are_written_once_to_the_database_if_the_journal_fails(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = place.open()
    log = CommitLog(store.database)
    for call in ("first", "ses_1/2.0"):
        await log.start_journalled_commit(intended(call))

    def failing(descriptor: int) -> None:
        raise OSError("a bad sector")

    monkeypatch.setattr(journal, "_sync", failing)
    for call in ("third", "fourth"):
        await log.start_journalled_commit(intended(call))
        assert intents(place)[-1] == call  # it was not only promised
    noted = [content for _, content in journal.read_journal_entries(place.folders.workspace_state_folder / "journal-1")]
    assert b"third" in noted[-1]  # though nobody was told so
    left = tmp_path / "left"
    left.write_bytes((place.folders.workspace_state_folder / "journal-1").read_bytes())
    await store.aclose()
    (place.folders.workspace_state_folder / "journal-1.left").write_bytes(left.read_bytes())
    store = place.open()
    await CommitLog(store.database).record_interrupted_calls()
    await store.aclose()
    assert intents(place) == ["first", "ses_1/2.0", "third", "fourth"]


class Odd(Mapping[str, object]):
    """No JSON, and what is asked of it fails."""

    def __getitem__(self, key: str) -> object:
        raise RuntimeError("changed meanwhile")

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("changed meanwhile")

    def __len__(self) -> int:
        return 1


async def test_a_record_too_long_for_a_journal_note_is_written_to_the_database(place: Place) -> None:
    store = place.open()
    log = CommitLog(store.database)
    for call in ("first", "ses_1/2.0"):
        await log.start_journalled_commit(intended(call))
    long = {"arguments": "a" * 700_000}
    await log.start_journalled_commit([Record("proposed", "ses_1", "third", long), *intended("third")])
    assert intents(place)[-1] == "third"  # it was not only promised
    await store.aclose()


@pytest.mark.parametrize("odd", [Odd(), {"n": 2**200}, {"half": "\ud800"}, {"data": b"\xff"}, "a"])
async def test_a_journal_note_decodes_to_the_records_that_the_log_stores(place: Place, odd: object) -> None:
    store = place.open()
    log = CommitLog(store.database)
    records = [Record("proposed", "ses_1", "third", {"arguments": odd}), *intended("third")]
    table, payload = log.build_record_insert_work(records)
    noted = decode_journaled_records(encode_json_with_fallback([("record", table.pack(payload))]))
    await log.commit(records)
    assert [(one.kind, one.body) for one in noted] == [(one.kind, one.body) for one in log.reader.records(call="third")]
    await store.aclose()


async def test_the_garbage_collector_does_not_track_queued_records(place: Place) -> None:
    store = place.open()
    log = CommitLog(store.database)
    queued: list[object] = []
    log._post = queued.append  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue] - what the writer would take
    log.record_soon(
        [Record("proposed", "ses_1", "first", {"arguments": {"deep": [{"a": [1, 2]}]}}), *intended("first")]
    )
    gc.collect()
    assert len(queued) == 1 and not gc.is_tracked(queued[0])
    await store.aclose()


async def test_the_large_engine_commits_without_a_journal(place: Place) -> None:
    store = WorkspaceStore.open(place.workspace, place.state, engine="large")
    log = CommitLog(store.database)
    for call in ("first", "ses_1/2.0", "third"):
        await log.start_journalled_commit(intended(call))
        assert intents(place)[-1] == call
    assert journals(place) == []
    await store.aclose()


async def test_records_are_written_to_the_database_if_no_journal_can_be_created(place: Place) -> None:
    store = place.open()
    log = CommitLog(store.database)
    (place.folders.workspace_state_folder / "journal-1").symlink_to(os.devnull)
    for call in ("first", "ses_1/2.0", "third"):
        await log.start_journalled_commit(intended(call))
        assert intents(place)[-1] == call
    await store.aclose()


async def test_the_store_refuses_to_open_if_a_former_journal_cannot_be_renamed(place: Place) -> None:
    await place.open().aclose()
    (place.folders.workspace_state_folder / "journal-1.left").mkdir()
    (place.folders.workspace_state_folder / "journal-1").mkdir()
    (place.folders.workspace_state_folder / "journal-1.left" / "full").touch()
    with pytest.raises(
        StartError, match=r"journal-1 of a former process cannot be renamed to journal-1\.left.*move the file away"
    ):
        place.open()
