"""The commit log: append-only, hash-chained, durable when a call depends on it.

The arbiter defines the bodies, except for the names that readers rely on:

- ``proposed``: ``tool`` (id), ``arguments``; ``topic``, if its session has one
- ``rejected``, ``committed``: ``result``, the wire form of a :class:`~handrail.contract.calls_and_results.Result`; a ``committed``
  with ``late`` only adds the end of work whose call was already answered
- ``backgrounded``: ``job``; ``result``, the answer to its proposer
- ``interrupted``: ``tool``, ``intended`` (sequence of the record without an outcome)
- ``provider-tool-used``: ``provider``, ``name``, ``tool`` (id or ""), ``arguments``, ``failed``, ``artifacts``, ``topic``; without a call
- ``redacted``: ``sequences``, runs ``[first, last]`` of the records whose bodies were removed
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from os import urandom
from pathlib import Path
from time import time_ns
from typing import Any, Literal, NamedTuple, TypeVar, cast

import orjson

from handrail.contract.errors import StartError, UsageError
from handrail.record.hash_chain import GENESIS, MAX_GROUP, SALT_BYTES, RecordHeader, hash_group, new_commitment
from handrail.record.log_reader import LoggedRecord, LogReader
from handrail.store.database.group_writer import PromisedWriteFuture, SinkUnavailable, UncancellableWriteFuture
from handrail.store.database.journal import list_journals, read_log_head, skip_written_notes, unreadable_text
from handrail.store.database.sqlite_connection import map_to_log_unavailable, read_written_journal_note
from handrail.store.database.workspace_database import SqlValue, Statement, TableWork, WorkspaceDatabase
from handrail.store.json_fallback_encoding import decode_any_json, encode_any_json

T = TypeVar("T")

RecordKind = Literal[
    "session-opened",
    "session-closed",
    "generation",
    "proposed",
    "rejected",
    "approval-requested",
    "approval-responded",
    "resumed",  # a call that was awaiting approval when its process ended continues under its own id
    "authorised",
    "backgrounded",  # the call continues in the background: its proposer received a job
    "intended",
    "committed",
    "interrupted",
    "tool-session-closed",  # a tool session of a stateful tool ended without a call
    "client-request",  # a running tool sends a request to the client: its methods and its origin
    "stop-requested",  # a user stops a call, a job, a session or everything: the name, who, and what was running
    "turn-finished",  # a request to a model has ended: the model, its tokens, and the cost if the provider reports it
    "compacted",  # older messages are no longer sent to the model: how many, and how many remain
    "mode-changed",  # a user or an answer of a user switched the session to another mode
    "provider-tool-used",  # a model's provider executed one of its own tools
    "instructions-read",  # instruction files above the workspace were read for the model: their names and content
    "undo-intended",  # a user undoes calls: which calls, and what is about to happen to which paths
    "undone",  # what became of these paths
    "redacted",
    "records-dropped",  # the number of appended records that were lost while the log could not write
]

_ENDS = frozenset({"committed", "rejected", "interrupted"})
"""The kinds that end a call."""
_SETTLED_INTERVAL = 4096
_JOURNAL_NAME = "record"
"""The name of the table of records in the journal."""


class Record(NamedTuple):
    """One record of the log.

    :param session_id: ``""`` if the record concerns the workspace
    :param call_id: ``""`` if the record concerns no call
    :param body: JSON values, or their JSON from :func:`encode_record_body`; any other value is recorded in a form that says so
    """

    kind: RecordKind
    session_id: str
    call_id: str
    body: Mapping[str, Any] | bytes


def encode_record_body(body: Mapping[str, Any]) -> bytes:
    """Return the body of a record as JSON. It is a copy: the bytes of orjson keep a buffer of 4 KB alive."""
    return bytes(memoryview(encode_any_json(body)))


@dataclass(frozen=True, slots=True)
class InterruptedCall:
    """A call that was running when the last process ended. It is unknown whether it took effect."""

    session_id: str
    call_id: str
    tool: str | None
    intended: int
    """The sequence of its ``intended`` record."""


class CommitLog:
    """The only log of the workspace, which the lease holder writes.

    :param clock: wall-clock time in nanoseconds
    :param acknowledged: the user accepts that the log ends earlier than it was written
    :raises StartError: if the end of the log is damaged, or the database is older than the records that were written
    """

    def __init__(
        self, database: WorkspaceDatabase, *, clock: Callable[[], int] = time_ns, acknowledged: bool = False
    ) -> None:
        self._database = database
        self._writer = database.writer
        self._clock = clock
        self._table = _RecordTable(database, clock)
        database.attach_table(self._table)
        if not acknowledged:
            self._check_nothing_missing()
        self._post = database.writer.queue_without_waiting
        self.accepts_more = database.writer.has_room_below
        """Whether the log takes records now and fewer than this many appends wait to be written."""

    def _check_nothing_missing(self) -> None:
        """Check that the database contains all records that are known to have been written.

        :raises StartError: if it does not
        """
        with map_to_log_unavailable(self._database.path):
            missing = self.reader.describe_missing_records(read_log_head(self._database.folders))
        if missing is not None:
            raise StartError(
                f"The log {self._database.path} was replaced by an older copy, or cut: {missing}. Restore the newer database. "
                "If you know the reason, continue with the existing records: handrail log acknowledge"
            )

    @property
    def database(self) -> WorkspaceDatabase:
        """The database of the log, for data that must become durable together with its records."""
        return self._database

    @property
    def unavailable_reason(self) -> str | None:
        """The reason why the log takes no records at the moment, or None.

        While it is set, calls are rejected. The log tries again with every :meth:`commit` and :meth:`flush`, and once a
        second while appended records wait.
        """
        return self._writer.unavailable_reason

    @property
    def reader(self) -> LogReader:
        """A reader of the durable records."""
        return LogReader(self._database.read_connection)

    def record_soon(self, records: Sequence[Record]) -> None:
        """Record soon, in order, without waiting: for records that no side effect depends on."""
        self._post(_make_entry(self._clock(), records))

    def record_encoded_soon(self, records: Sequence[Record]) -> None:
        """Record soon, as :meth:`record_soon` does, records whose bodies are JSON already."""
        self._post((self._clock(), *chain.from_iterable(records)))

    def commit(self, records: Sequence[Record]) -> Coroutine[Any, Any, None]:
        """Record now: on return these records and all earlier ones are durable and readable.

        Cancelling the wait does not withdraw the records. A record that could not be committed is not written later.
        Append it again if it is still true: an outcome is, an intent is not.

        :raises LogUnavailable: if the records could not be written
        """
        return self._writer.commit(_make_entry(self._clock(), records))

    def start_commit(self, records: Sequence[Record]) -> UncancellableWriteFuture:
        """Start a commit for a caller that may be cancelled before the end; see :meth:`commit`."""
        return self._writer.start_commit(_make_entry(self._clock(), records))

    def start_journalled_commit(self, records: Sequence[Record]) -> PromisedWriteFuture:
        """Start a commit whose result is needed a moment later, or only after a crash; see :meth:`start_commit`."""
        return self._writer.start_journalled_write(_make_entry(self._clock(), records))

    def wake_writer(self) -> None:
        """Wake the writer because a promise may follow soon.

        See :meth:`handrail.store.database.group_writer.GroupWriter.warm_up`.
        """
        self._writer.warm_up()

    def make_atomic_work(self, records: Sequence[Record]) -> TableWork:
        """Return the records as work that is written atomically with other work.

        See :meth:`~handrail.store.database.workspace_database.WorkspaceDatabase.write_works_atomically`.
        """
        return self._table, _make_entry(self._clock(), records)

    async def flush(self) -> None:
        """Wait until all records that were appended so far are durable.

        :raises LogUnavailable: if they cannot be written
        """
        await self._writer.flush()

    async def wait_for_backlog(self, count: int) -> None:
        """Wait until fewer than ``count`` appends are waiting to be written."""
        await self._writer.wait_for_backlog(count)

    async def find_outcome(self, call_id: str) -> LoggedRecord | None:
        """Return the record that ended a call (``committed``, ``rejected`` or ``interrupted``), or None.

        :raises LogUnavailable: if recent records cannot be made durable
        """
        await self._writer.flush()
        return self._read(lambda reader: reader.find_outcome(call_id))

    async def find_move_to_background(self, call_id: str) -> LoggedRecord | None:
        """Return the record of a call's move to the background, with its answer, or None.

        :raises LogUnavailable: if recent records cannot be made durable
        """
        await self._writer.flush()
        return self._read(lambda reader: next(reader.records(call=call_id, kind="backgrounded", limit=1), None))

    async def find_proposal(self, call_id: str) -> LoggedRecord | None:
        """Return the record of a call's proposal, or None.

        :raises LogUnavailable: if recent records cannot be made durable
        """
        await self._writer.flush()
        return self._read(lambda reader: reader.find_proposal(call_id))

    def find_last_turn(self, session_id: str) -> int:
        """Return the highest turn number of a session's durable calls; 0 if it has none.

        :raises LogUnavailable: if the log cannot be read
        """
        return self._read(lambda reader: reader.find_last_turn(session_id))

    async def record_interrupted_calls(self) -> list[InterruptedCall]:
        """Record ``interrupted`` for every call with an intent and no outcome, and return these calls.

        Call it at start. The calls are not run again. A call without an intent did not run, and the log shows it so.

        :raises LogUnavailable: if the log cannot take the records
        """
        await self._database.write_former_journal_notes()
        await self._writer.flush()
        found, head = self._read(lambda reader: (reader.list_unfinished_intents(), reader.head()))
        began = head.sequence
        if found:
            await self.commit(
                [
                    Record(
                        "interrupted",
                        call.session_id,
                        call.call_id,
                        {
                            "tool": call.tool,
                            "intended": call.sequence,
                            "outcome": "unknown",
                            "reason": "the process ended while the call was running",
                        },
                    )
                    for call in found
                ]
            )
        await self._writer.commit((self._table, _StartMark(began)))
        return [InterruptedCall(c.session_id, c.call_id, c.tool, c.sequence) for c in found]

    async def redact_record_bodies(self, sequences: Iterable[int], *, reason: str, session_id: str = "") -> None:
        """Remove the bodies of records permanently, and record the redaction.

        The chain still verifies and reports the redaction. One transaction removes all bodies. The record names them as runs
        of sequences, ``[first, last]``.

        :raises UsageError: if a sequence is not in the log, or belongs to the record of a redaction
        :raises LogUnavailable: if the redaction cannot be made durable
        """
        runs = group_into_runs(sorted(set(sequences)))
        await self._writer.flush()
        for first, last in runs:
            if (absent := self._read(lambda reader, a=first, b=last: reader.find_absent(a, b))) is not None:
                raise UsageError(f"The log has no record {absent}. List the records with: handrail log --records")
            if (proof := self._read(lambda reader, a=first, b=last: reader.find_redaction(a, b))) is not None:
                raise UsageError(f"Record {proof} documents a redaction and cannot be removed. Leave it out.")
        if runs:
            records = [Record("redacted", session_id, "", {"sequences": runs, "reason": reason})]
            await self._writer.commit((self._table, _RedactionEntry(tuple(runs), self._clock(), records)))

    def _read(self, look: Callable[[LogReader], T]) -> T:
        with map_to_log_unavailable(self._database.path):
            return look(self.reader)


_Entry = tuple[Any, ...]
"""Records that are written together, as one flat value: their time, then kind, session, call and JSON body of each.

It has no containers, so the garbage collector stops tracking it. Records that wait for the writer therefore cause no
collections of what the program has loaded.
"""


def _make_entry(at_ns: int, records: Iterable[Record]) -> _Entry:
    flat: list[Any] = [at_ns]
    for kind, session, call, body in records:
        flat += (
            kind,
            session,
            call,
            body if type(body) is bytes else encode_record_body(cast("Mapping[str, Any]", body)),
        )
    return tuple(flat)


class _StartMark(NamedTuple):
    """The last sequence that a former process wrote."""

    began: int


class _RedactionEntry(NamedTuple):
    runs: tuple[tuple[int, int], ...]
    at_ns: int
    records: list[Record]


class _RecordTable:
    """The table of records. It encodes, salts, hashes and inserts in the writer's thread."""

    journalled_as = _JOURNAL_NAME

    def __init__(self, database: WorkspaceDatabase, clock: Callable[[], int]) -> None:
        self._database = database
        self._writer = database.writer
        self._clock = clock
        self._sequence = 0
        self._previous = GENESIS
        self._durable = (0, GENESIS)
        self._was_read = False
        self._open: dict[str, int] = {}
        self._settled = 0
        self._reported_lost = 0
        self._confirmed_lost = 0
        self._inserts: dict[int, str] = {}

    def load(self, connection: sqlite3.Connection) -> None:
        reader = LogReader(connection)
        head = reader.check_last_records()
        if self._was_read and not reader.has_record(*self._durable):
            raise SinkUnavailable(
                f"The log no longer contains record {self._durable[0]} as this process wrote it: another program changed it. "
                "Stop this process, and run: handrail log verify"
            )
        self._sequence = head.sequence
        self._previous = bytes.fromhex(head.hash)
        self._open = {call.call_id: call.sequence for call in reader.list_unfinished_intents()}
        self._settled = reader.read_mark("settled")
        self._durable = (self._sequence, self._previous)
        self._reported_lost = self._confirmed_lost
        self._was_read = True

    def head(self) -> tuple[int, bytes]:
        return self._sequence, self._previous

    def is_head_in(self, connection: sqlite3.Connection) -> bool:
        return LogReader(connection).has_record(self._sequence, self._previous)

    def pack(self, payload: _Entry | _StartMark | _RedactionEntry) -> Any:
        if type(payload) is not tuple:
            return None
        records = [[*payload[at : at + 3], _as_fragment(payload[at + 3])] for at in range(1, len(payload), 4)]
        sound = all(isinstance(text, str) for record in records for text in record[:3])
        return [payload[0], records] if sound else None  # the write itself reports the others

    def unpack(self, packed: Any) -> _Entry:
        at_ns, records = packed
        return _make_entry(at_ns, [_make_record(*parts) for parts in records])

    def build_statements(self, batch: Sequence[_Entry | _StartMark | _RedactionEntry]) -> Iterable[Statement]:
        statements: list[Statement] = []
        entries: list[_Entry] = []
        # The last batch is durable; otherwise `opened` would have been called.
        self._durable = (self._sequence, self._previous)
        self._confirmed_lost = self._reported_lost
        lost = self._writer.lost
        if lost > self._reported_lost:
            entries.append(
                _make_entry(self._clock(), [Record("records-dropped", "", "", {"records": lost - self._reported_lost})])
            )
            self._reported_lost = lost
        for item in batch:
            if isinstance(item, _StartMark):
                statements.append(("UPDATE meta SET value = ? WHERE key = 'began'", (item.began,)))
            elif not isinstance(item, _RedactionEntry):
                entries.append(item)
            else:
                entries.append(_make_entry(item.at_ns, item.records))
                erase = "UPDATE record SET body = NULL WHERE sequence BETWEEN ? AND ?"
                statements += [(erase, run) for run in item.runs]
                statements.append(("PRAGMA wal_checkpoint(TRUNCATE)", ()))  # it still contains the old pages
        inserts = list(self._make_group_inserts(entries))
        settled = min(self._open.values(), default=self._sequence + 1) - 1
        if settled - self._settled >= _SETTLED_INTERVAL:
            self._settled = settled
            statements.append(("UPDATE meta SET value = ? WHERE key = 'settled'", (settled,)))
        return inserts + statements

    def _make_group_inserts(self, entries: Sequence[_Entry]) -> Iterator[Statement]:
        """Yield one statement for each group of the chain."""
        flat: list[Any] = []
        for entry in entries:
            at_ns = entry[0]
            for at in range(1, len(entry), 4):
                flat += (at_ns, *entry[at : at + 4])
        size = 5 * MAX_GROUP
        for start in range(0, len(flat), size):
            yield self._insert_group(flat[start : start + size])

    def _insert_group(self, flat: Sequence[Any]) -> Statement:
        """Insert one group with one statement.

        Each statement releases and takes the interpreter's lock, so one statement inserts many rows. Rows have few values, and
        use bytearrays: sqlite3 searches an adapter for each value of type bytes.
        """
        sequence = self._sequence
        headers: list[RecordHeader] = []
        commitments: list[bytes] = []
        values: list[SqlValue] = [sequence + 1]
        rows = len(flat) // 5
        salts = bytearray(urandom(SALT_BYTES * rows))
        offset = 0
        fields = iter(flat)
        for at_ns, kind, session, call, body in zip(fields, fields, fields, fields, fields, strict=True):
            sequence += 1
            salted = salts[offset : offset + SALT_BYTES] + body
            offset += SALT_BYTES
            hashing = new_commitment()
            hashing.update(salted)
            commitment = hashing.digest()
            if not (session.isascii() and call.isascii()):
                session, call = _escape_half_surrogates(session), _escape_half_surrogates(call)  # noqa: PLW2901 - the stored form
            headers.append((at_ns, kind, session, call))
            commitments.append(commitment)
            values += (at_ns, kind, session, call, bytearray(commitment), salted)
            if kind == "intended":
                self._open[call] = sequence
            elif kind in _ENDS:
                self._open.pop(call, None)
        previous = hash_group(self._sequence + 1, self._previous, headers, commitments)
        values[-2] = bytearray(commitments[-1] + previous)
        self._sequence, self._previous = sequence, previous
        return self._insert_sql(rows), values

    def _insert_sql(self, rows: int) -> str:
        sql = self._inserts.get(rows)
        if sql is None:
            at_ns = self._database.fence_value("?2")  # the statement fails if another process holds the workspace
            places = [f"(?1, {at_ns}, ?3, ?4, ?5, ?6, ?7)"]
            places += [f"(?1 + {row}, ?, ?, ?, ?, ?, ?)" for row in range(1, rows)]
            columns = "sequence, at_ns, kind, session, call, seal, body"
            sql = f"INSERT INTO record ({columns}) VALUES {', '.join(places)}"  # noqa: S608
            self._inserts[rows] = sql
        return sql


def _as_fragment(body: bytes) -> object:
    """Return an encoded body as part of a larger JSON value."""
    return decode_any_json(body) if body[:1] == b" " else orjson.Fragment(body)


def decode_journal_note(note: bytes) -> list[Record]:
    """Return the records in a note of the journal.

    :raises ValueError, TypeError, LookupError: if the note has another form
    """
    return [
        _make_record(*parts) for name, packed in decode_any_json(note) if name == _JOURNAL_NAME for parts in packed[1]
    ]


def _make_record(kind: RecordKind, session_id: str, call_id: str, body: Mapping[str, Any]) -> Record:
    if not all(isinstance(text, str) for text in cast("tuple[object, ...]", (kind, session_id, call_id))):
        raise TypeError("Invalid record: kind, session and call must be texts.")
    return Record(kind, session_id, call_id, body)


def group_into_runs(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """Group ascending numbers into runs of first and last."""
    runs: list[tuple[int, int]] = []
    for sequence in sequences:
        if runs and runs[-1][1] == sequence - 1:
            runs[-1] = (runs[-1][0], sequence)
        else:
            runs.append((sequence, sequence))
    return runs


def _escape_half_surrogates(text: str) -> str:
    """Escape half surrogate pairs, which no database stores."""
    return text.encode("utf-8", "backslashreplace").decode()


# Records that are only in the journal: their calls had just started when the process ended, or are starting now.


def read_unwritten_records(connection: sqlite3.Connection, folder: Path) -> list[Record]:
    """Return the records that are in the journal and not yet in the log, in order.

    Calls may depend on them. The next process that opens the workspace adds them to the log.

    :param folder: the private folder of the workspace
    :raises sqlite3.Error: if the database cannot be read
    :raises OSError: if the folder cannot be read
    :raises StartError: if a journal cannot be read
    """
    before = list_journals(folder)  # first, because records that reach the database meanwhile are not missing
    records: list[Record] = []
    for path, note in skip_written_notes(before, read_written_journal_note(connection)):
        try:
            records += decode_journal_note(note)
        except (LookupError, TypeError, ValueError):
            raise StartError(unreadable_text(path)) from None
    return records
