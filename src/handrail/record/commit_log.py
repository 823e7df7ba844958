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

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count, groupby
from os import urandom
from pathlib import Path
from time import time_ns
from typing import Any, Literal, NamedTuple, TypeVar, cast

import orjson

from handrail.contract.errors import StartError, UsageError
from handrail.contract.struct import Struct
from handrail.record.hash_chain import (
    GENESIS,
    MAX_GROUP,
    SALT_BYTES,
    EntryHeader,
    count_entry_records,
    hash_group,
    new_commitment,
)
from handrail.record.log_reader import LoggedRecord, LogReader
from handrail.store.database.group_writer import PromisedWriteFuture, SinkUnavailable, UncancellableWriteFuture
from handrail.store.database.journal import (
    describe_unreadable_journal,
    iterate_unwritten_entries,
    list_journals,
    read_log_head,
)
from handrail.store.database.sqlite_connection import map_to_log_unavailable, read_last_written_journal_entry
from handrail.store.database.workspace_database import SqlValue, Statement, TableWork, WorkspaceDatabase
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback

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
_SPACE = ord(" ")
_TICK_S = 0.01
"""A call may run for up to two ticks before the log has the record of its start."""
_ONE_ENTRY = 5
"""The values of one entry: its time, session, call, kinds and body."""
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
    return bytes(memoryview(encode_json_with_fallback(body)))


class InterruptedCall(Struct, frozen=True):
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
    :raises LogUnavailable: by every method that reads or writes, if the database fails
    """

    def __init__(
        self, database: WorkspaceDatabase, *, clock: Callable[[], int] = time_ns, acknowledged: bool = False
    ) -> None:
        self.database = database
        self._writer = database.writer
        self._clock = clock
        self._table = _RecordTable(database, clock)
        database.attach_table(self._table)
        # This comes before any record is written: a new record on top of a cut log would hide the cut.
        if not acknowledged:
            self._check_nothing_missing()
        self._post = database.writer.queue_without_waiting
        self._started_calls: dict[str, Callable[[], None]] = {}
        self._waiting_calls: dict[str, Callable[[], None]] = {}
        """Started calls whose records are handed over at the next tick, by call id; the others are newer."""
        self._ticks = False
        self.accepts_more = database.writer.has_backlog_below
        """Whether the log takes records now and fewer than this many appends wait to be written."""

    def _check_nothing_missing(self) -> None:
        """Check that the database contains all records that are known to have been written.

        :raises StartError: if it does not
        """
        with map_to_log_unavailable(self.database.path):
            missing = self.reader.describe_missing_records(read_log_head(self.database.folders))
        if missing is not None:
            raise StartError(
                f"The log {self.database.path} was replaced by an older copy, or cut: {missing}. Restore the newer database. "
                "If you know the reason, continue with the existing records: handrail log acknowledge"
            )

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
        return LogReader(self.database.shared_read_connection)

    def record_soon(self, records: Sequence[Record]) -> None:
        """Record soon, in order, without waiting: for records that no side effect depends on."""
        self._post(_make_entries(self._clock(), records))

    def record_call_soon(self, session_id: str, call_id: str, kinds: str, body: bytes) -> None:
        """Record soon, as :meth:`record_soon` does, records of one call in their stored form.

        :param kinds: their kinds, separated by spaces
        :param body: the JSON array of their bodies, from :func:`join_record_bodies`
        """
        # The call has ended, and its records come together with its outcome. The tick must not write the start again.
        if self._ticks and self._started_calls.pop(call_id, None) is None:
            self._waiting_calls.pop(call_id, None)
        self._post((self._clock(), session_id, call_id, kinds, body))

    def record_started_call(self, call_id: str, pass_records: Callable[[], None]) -> None:
        """Record soon that a call has started, unless its end is recorded first.

        A short read then has all its records in one entry.

        :param pass_records: hands over the records of the call that the log does not have yet, by :meth:`record_call_soon`. It is
            called before a later record is committed, and otherwise after a moment
        """
        if not self._ticks:
            self._ticks = True
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        # A call that ends within a tick never appears as started, which saves one write for most reads.
        self._started_calls[call_id] = pass_records

    def _tick(self) -> None:
        """Record the calls that had started before the last tick."""
        waiting, self._waiting_calls, self._started_calls = self._waiting_calls, self._started_calls, {}
        for pass_records in waiting.values():
            pass_records()
        self._ticks = bool(self._waiting_calls)
        if self._ticks:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _record_started_calls(self) -> None:
        for calls in (self._waiting_calls, self._started_calls):
            for pass_records in tuple(calls.values()):
                pass_records()

    def commit(self, records: Sequence[Record]) -> Coroutine[Any, Any, None]:
        """Record now: on return these records and all earlier ones are durable and readable.

        Cancelling the wait does not withdraw the records. A record that could not be committed is not written later.
        Append it again if it is still true: an outcome is, an intent is not.
        """
        self._record_started_calls()
        return self._writer.commit(_make_entries(self._clock(), records))

    def start_commit(self, records: Sequence[Record]) -> UncancellableWriteFuture:
        """Start a commit for a caller that may be cancelled before the end; see :meth:`commit`."""
        self._record_started_calls()
        return self._writer.start_commit(_make_entries(self._clock(), records))

    def start_journalled_commit(self, records: Sequence[Record]) -> PromisedWriteFuture:
        """Start a commit whose result is needed a moment later, or only after a crash; see :meth:`start_commit`."""
        self._record_started_calls()
        return self._writer.start_journalled_write(_make_entries(self._clock(), records))

    def wake_writer(self) -> None:
        """Wake the writer because a promise may follow soon.

        See :meth:`handrail.store.database.group_writer.GroupWriter.warm_up`.
        """
        self._writer.warm_up()

    def build_record_insert_work(self, records: Sequence[Record]) -> TableWork:
        """Return the records as work that is written atomically with other work.

        See :meth:`~handrail.store.database.workspace_database.WorkspaceDatabase.write_works_atomically`.
        """
        self._record_started_calls()
        return self._table, _make_entries(self._clock(), records)

    async def flush(self) -> None:
        """Wait until all records that were appended so far are durable."""
        self._record_started_calls()
        await self._writer.flush()

    async def wait_for_backlog(self, count: int) -> None:
        """Wait until fewer than ``count`` appends are waiting to be written."""
        await self._writer.wait_for_backlog(count)

    async def find_outcome(self, call_id: str) -> LoggedRecord | None:
        """Return the record that ended a call (``committed``, ``rejected`` or ``interrupted``), or None."""
        await self.flush()
        return self._read(lambda reader: reader.find_outcome(call_id))

    async def find_move_to_background(self, call_id: str) -> LoggedRecord | None:
        """Return the record of a call's move to the background, with its answer, or None."""
        await self.flush()
        return self._read(lambda reader: next(reader.records(call=call_id, kind="backgrounded", limit=1), None))

    async def find_proposal(self, call_id: str) -> LoggedRecord | None:
        """Return the record of a call's proposal, or None."""
        await self.flush()
        return self._read(lambda reader: reader.find_proposal(call_id))

    def find_last_turn(self, session_id: str) -> int:
        """Return the highest turn number of a session's durable calls; 0 if it has none."""
        return self._read(lambda reader: reader.find_last_turn(session_id))

    async def record_interrupted_calls(self) -> list[InterruptedCall]:
        """Record ``interrupted`` for every call with an intent and no outcome, and return these calls.

        Call it at start. The calls are not run again. A call without an intent did not run, and the log shows it so.
        """
        # The journal may have records of calls that are not in the database yet. Without them, a call that ran would
        # look as if it had not.
        await self.database.replay_orphaned_journals()
        await self._writer.flush()
        # An intent is durable before a call with side effects starts, so an intent without an outcome may have had an
        # effect.
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

        The chain still verifies and reports the redaction. One transaction removes all bodies, with those of the same calls that
        were written at once with them. The record names them as runs of sequences, ``[first, last]``.

        :raises UsageError: if a sequence is not in the log, or belongs to the record of a redaction
        """
        runs = group_consecutive_numbers(sorted(set(sequences)))
        await self._writer.flush()
        for first, last in runs:
            if (absent := self._read(lambda reader, a=first, b=last: reader.find_missing_sequence(a, b))) is not None:
                raise UsageError(f"The log has no record {absent}. List the records with: handrail log --records")
            if (proof := self._read(lambda reader, a=first, b=last: reader.find_redaction_record(a, b))) is not None:
                raise UsageError(f"Record {proof} documents a redaction and cannot be removed. Leave it out.")
        if runs:
            # An entry has one body for several records. Its other records lose their content too, and the redaction
            # must name them.
            runs = _merge_runs(self._read(lambda reader: [reader.widen_range_to_entries(*run) for run in runs]))
            records = [Record("redacted", session_id, "", {"sequences": runs, "reason": reason})]
            await self._writer.commit((self._table, _RedactionEntry(tuple(runs), self._clock(), records)))

    def _read(self, look: Callable[[LogReader], T]) -> T:
        with map_to_log_unavailable(self.database.path):
            return look(self.reader)


_Entries = tuple[Any, ...]
"""Entries that are written together, as one flat value: their time, then session, call, kinds and JSON body of each.

It has no containers, so the garbage collector stops tracking it. Entries that wait for the writer therefore cause no
collections of what the program has loaded.
"""


def _make_entries(at_ns: int, records: Iterable[Record]) -> _Entries:
    """Return records in their stored form. Consecutive records of one call are one entry."""
    flat: list[Any] = [at_ns]
    for _, group in groupby(records, _entry_key(count())):
        several = list(group)
        bodies = [
            one.body if type(one.body) is bytes else encode_record_body(cast("Mapping[str, Any]", one.body))
            for one in several
        ]
        flat += (
            several[0].session_id,
            several[0].call_id,
            " ".join([one.kind for one in several]),
            join_record_bodies(bodies),
        )
    return tuple(flat)


def _entry_key(numbers: Iterator[int]) -> Callable[[Record], object]:
    """Return a function that is equal for the records of one call. A record of no call is an entry alone."""
    return lambda record: (record.session_id, record.call_id) if record.call_id else next(numbers)


def join_record_bodies(bodies: Sequence[bytes]) -> bytes:
    """Return the bodies of several records, from :func:`encode_record_body`, as one JSON array."""
    first = b"["
    for body in bodies:
        if body[0] == _SPACE:  # a mark for `decode_json_with_fallback`, which is then for the whole array
            first = b" ["
    return first + b",".join(bodies) + b"]"


@lru_cache(maxsize=256)
def _read_kinds(kinds: str) -> tuple[int, int | None, bool]:
    """Return the number of records in an entry, the place of its intent without an end, and whether its call has ended."""
    intent, is_end = None, False
    for place, kind in enumerate(kinds.split(" ")):
        if kind == "intended":
            intent, is_end = place, False
        elif kind in _ENDS:
            intent, is_end = None, True
    return count_entry_records(kinds), intent, is_end


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
        # The hash of the last record that this process wrote must still be there. Otherwise the chain would continue
        # from a forged record.
        if self._was_read and not reader.has_record(*self._durable):
            raise SinkUnavailable(
                f"The log no longer contains record {self._durable[0]} as this process wrote it: another program changed it. "
                "Stop this process, and run: handrail log verify"
            )
        self._sequence = head.sequence
        self._previous = bytes.fromhex(head.hash)
        self._open = {call.call_id: call.sequence for call in reader.list_unfinished_intents()}
        self._settled = reader.read_log_boundary("settled")
        self._durable = (self._sequence, self._previous)
        # The last report may have been in a transaction that failed, so it is made again.
        self._reported_lost = self._confirmed_lost
        self._was_read = True

    def head(self) -> tuple[int, bytes]:
        return self._sequence, self._previous

    def is_head_in(self, connection: sqlite3.Connection) -> bool:
        return LogReader(connection).has_record(self._sequence, self._previous)

    def pack(self, payload: _Entries | _StartMark | _RedactionEntry) -> Any:
        if type(payload) is not tuple:
            return None
        entries = [[*payload[at : at + 3], _as_fragment(payload[at + 3])] for at in range(1, len(payload), 4)]
        sound = all(isinstance(text, str) for entry in entries for text in entry[:3])
        return [payload[0], entries] if sound else None  # the write itself reports the others

    def unpack(self, packed: Any) -> _Entries:
        at_ns, entries = packed
        return _make_entries(at_ns, [record for parts in entries for record in _read_noted_records(*parts)])

    def build_statements(self, batch: Sequence[_Entries | _StartMark | _RedactionEntry]) -> Iterator[Statement]:
        statements: list[Statement] = []
        entries: list[_Entries] = []
        # The last batch is durable; otherwise `load` would have been called.
        self._durable = (self._sequence, self._previous)
        self._confirmed_lost = self._reported_lost
        lost = self._writer.lost
        # The loss is recorded in the chain itself, so that a verification counts these records.
        if lost > self._reported_lost:
            entries.append(
                _make_entries(
                    self._clock(), [Record("records-dropped", "", "", {"records": lost - self._reported_lost})]
                )
            )
            self._reported_lost = lost
        for item in batch:
            if isinstance(item, _StartMark):
                statements.append(("UPDATE meta SET value = ? WHERE key = 'began'", (item.began,)))
            elif not isinstance(item, _RedactionEntry):
                entries.append(item)
            else:
                entries.append(_make_entries(item.at_ns, item.records))
                erase = "UPDATE record SET body = NULL WHERE sequence BETWEEN ? AND ?"
                statements += [(erase, run) for run in item.runs]
                statements.append(("PRAGMA wal_checkpoint(TRUNCATE)", ()))  # it still contains the old pages
        yield from self._make_group_inserts(entries)
        # The next start searches for open intents only behind this point.
        settled = min(self._open.values(), default=self._sequence + 1) - 1
        if settled - self._settled >= _SETTLED_INTERVAL:
            self._settled = settled
            statements.append(("UPDATE meta SET value = ? WHERE key = 'settled'", (settled,)))
        yield from statements

    def _make_group_inserts(self, batch: Sequence[_Entries]) -> Iterator[Statement]:
        """Yield one statement for each group of the chain."""
        flat: list[Any] = []
        for entries in batch:
            if len(entries) == _ONE_ENTRY:
                flat += entries
            else:
                for at in range(1, len(entries), 4):
                    flat += (entries[0], *entries[at : at + 4])
        size = _ONE_ENTRY * MAX_GROUP
        for start in range(0, len(flat), size):
            yield self._insert_group(flat[start : start + size])

    def _insert_group(self, flat: Sequence[Any]) -> Statement:
        """Insert one group with one statement.

        Each statement releases and takes the interpreter's lock, so one statement inserts many rows. Rows have few values, and
        use bytearrays: sqlite3 searches an adapter for each value of type bytes.
        """
        sequence = self._sequence + 1
        headers: list[EntryHeader] = []
        commitments: list[bytes] = []
        values: list[SqlValue] = []
        rows = len(flat) // _ONE_ENTRY
        salts = bytearray(urandom(SALT_BYTES * rows))
        offset = 0
        fields = iter(flat)
        for at_ns, session, call, kinds, body in zip(fields, fields, fields, fields, fields, strict=True):
            # The salt keeps a removed body secret: without it, a short body could be guessed from its commitment.
            salted = salts[offset : offset + SALT_BYTES] + body
            offset += SALT_BYTES
            hashing = new_commitment()
            hashing.update(salted)
            commitment = hashing.digest()
            if not (session.isascii() and call.isascii()):
                session, call = _escape_half_surrogates(session), _escape_half_surrogates(call)  # noqa: PLW2901 - the stored form
            headers.append((at_ns, kinds, session, call))
            commitments.append(commitment)
            values += (sequence, at_ns, kinds, session, call, bytearray(commitment), salted)
            records, intent, is_end = _read_kinds(kinds)
            if intent is not None:
                self._open[call] = sequence + intent
            elif is_end:
                self._open.pop(call, None)
            sequence += records
        previous = hash_group(self._sequence + 1, self._previous, headers, commitments)
        values[-2] = bytearray(commitments[-1] + previous)
        self._sequence, self._previous = sequence - 1, previous
        return self._insert_sql(rows), values

    def _insert_sql(self, rows: int) -> str:
        if (sql := self._inserts.get(rows)) is None:
            at_ns = self._database.build_fenced_value_sql(
                "?2"
            )  # the statement fails if another process holds the workspace
            places = [f"(?1, {at_ns}, ?3, ?4, ?5, ?6, ?7)"] + ["(?, ?, ?, ?, ?, ?, ?)"] * (rows - 1)
            columns = "sequence, at_ns, kinds, session, call, seal, body"
            sql = f"INSERT INTO record ({columns}) VALUES {', '.join(places)}"  # noqa: S608
            self._inserts[rows] = sql
        return sql


def _as_fragment(body: bytes) -> object:
    """Return an encoded body as part of a larger JSON value."""
    return decode_json_with_fallback(body) if body[:1] == b" " else orjson.Fragment(body)


def decode_journaled_records(note: bytes) -> list[Record]:
    """Return the records in a note of the journal.

    :raises ValueError, TypeError, LookupError: if the note has another form
    """
    return [
        record
        for name, packed in decode_json_with_fallback(note)
        if name == _JOURNAL_NAME
        for parts in packed[1]
        for record in _read_noted_records(*parts)
    ]


def _read_noted_records(session_id: str, call_id: str, kinds: str, bodies: list[Mapping[str, Any]]) -> list[Record]:
    texts, listed = cast("tuple[object, ...]", (kinds, session_id, call_id)), cast("object", bodies)
    if not all(isinstance(text, str) for text in texts) or not isinstance(listed, list):
        raise TypeError("Invalid entry: kinds, session and call must be texts, and the bodies a list.")
    return [
        Record(cast("RecordKind", kind), session_id, call_id, body)
        for kind, body in zip(kinds.split(" "), bodies, strict=True)
    ]


def _merge_runs(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ascending runs, of which several may be the same or overlap, without overlaps."""
    return group_consecutive_numbers(sorted({number for first, last in runs for number in range(first, last + 1)}))


def group_consecutive_numbers(sequences: Iterable[int]) -> list[tuple[int, int]]:
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
    for path, note in iterate_unwritten_entries(before, read_last_written_journal_entry(connection)):
        try:
            records += decode_journaled_records(note)
        except (LookupError, TypeError, ValueError):
            raise StartError(describe_unreadable_journal(path)) from None
    return records
