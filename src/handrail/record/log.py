"""The commit log: append-only, hash-chained, durable when a call depends on it.

The arbiter defines the bodies, except for the names that readers rely on:

- ``proposed``: ``tool`` (id), ``arguments``; ``topic``, if its session has one
- ``refused``, ``committed``: ``result``, the wire form of a :class:`~handrail.contract.call.Result`; a ``committed``
  with ``late`` only adds how work ended whose call was already answered
- ``detached``: ``job``; ``result``, the answer to its proposer
- ``interrupted``: ``tool``, ``intended`` (sequence of the record that was left without an outcome)
- ``provided``: ``provider``, ``name``, ``tool`` (id or ""), ``arguments``, ``failed``, ``artifacts``, ``topic``; of no call
- ``redacted``: ``sequences``, runs ``[first, last]`` of the records whose bodies were removed
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import urandom
from pathlib import Path
from time import time_ns
from typing import Any, Literal, NamedTuple, TypeVar, cast

from handrail.contract.errors import StartError, UsageError
from handrail.record.chain import GENESIS, MAX_GROUP, SALT_BYTES, Header, hash_of, new_commitment
from handrail.record.reading import LoggedRecord, LogReader
from handrail.store.database.connection import journalled, readable
from handrail.store.database.database import Database, Statement, Value, Work
from handrail.store.database.journal import journals, outstanding, unreadable, written
from handrail.store.database.writer import Promised, SinkUnavailable, Written
from handrail.store.encoding import decode, encode

T = TypeVar("T")

Kind = Literal[
    "session-opened",
    "session-closed",
    "generation",
    "proposed",
    "refused",
    "approval-requested",
    "approval-responded",
    "resumed",  # a call that waited for a person when its process ended goes on, under its own id
    "authorised",
    "detached",  # it was answered with a job, and goes on in the background: what its proposer was told
    "intended",
    "committed",
    "interrupted",
    "state-ended",  # what a stateful tool had open ended without a call: its time, its session, its tool
    "client-asked",  # a running tool asks something of the client at the face: by which methods, on whose behalf
    "compacted",  # older messages are left out of what the model of a session is sent: how many, and how many are kept
    "provided",  # a model's provider carried out a tool of its own
    "instructions-read",  # a project's instruction files above the workspace, for its model: which, and what was in them
    "redacted",
    "lost",  # so many appended records could not be kept while the log was unable to write
]

_ENDS = frozenset({"committed", "refused", "interrupted"})
"""Kinds that end what was intended."""
_SETTLED_EVERY = 4096
_NOTED_AS = "record"
"""What the table of records is called in the journal."""


class Record(NamedTuple):
    """Something that happened. It is encoded later, in the writer's thread: do not change ``body`` afterwards.

    :param session_id: or ``""`` for what concerns the workspace
    :param call_id: or ``""`` for what concerns no call
    :param body: JSON-able; what is not, is recorded in a form that says so
    """

    kind: Kind
    session_id: str
    call_id: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A call that had begun when the last process ended; nobody knows whether it took effect."""

    session_id: str
    call_id: str
    tool: str | None
    intended: int
    """Sequence of its ``intended`` record."""


class CommitLog:
    """The workspace's one log, written by the process that holds the lease.

    :param clock: wall-clock time in nanoseconds
    :param acknowledged: a person knows that the log ends earlier than it was written
    :raises StartError: when the log's end is damaged, or the database is older than what was written
    """

    def __init__(self, database: Database, *, clock: Callable[[], int] = time_ns, acknowledged: bool = False) -> None:
        self._database = database
        self._writer = database.writer
        self._clock = clock
        self._table = _RecordTable(database, clock)
        database.attach(self._table)
        if not acknowledged:
            self._check_whole()
        self._post = database.writer.append
        self.takes_more = database.writer.takes
        """Whether the log takes records now and fewer than this many appends wait to be written."""

    def _check_whole(self) -> None:
        """:raises StartError: where the database does not hold what is known to have been written"""
        with readable(self._database.path):
            missing = self.reader.missing(written(self._database.folders))
        if missing is not None:
            raise StartError(
                f"the log {self._database.path} was replaced by an older copy, or cut: {missing}. Put the newer database back; "
                "or, if you know why, go on with what there is: handrail log acknowledge"
            )

    @property
    def database(self) -> Database:
        """Where it is kept, for what has to be durable together with its records."""
        return self._database

    @property
    def refusal(self) -> str | None:
        """Why the log takes no records just now, or None. While it is set, calls are refused; the log tries again by
        itself with every :meth:`commit` and :meth:`flush`, and each second while appended records wait."""
        return self._writer.refusal

    @property
    def reader(self) -> LogReader:
        """Reads what is durable."""
        return LogReader(self._database.reading)

    def append(self, records: Sequence[Record]) -> None:
        """Record soon, in order, without waiting: for what no side effect depends on."""
        self._post((self._table, _new_entry(_Entry, (self._clock(), records))))

    def commit(self, records: Sequence[Record]) -> Coroutine[Any, Any, None]:
        """Record now: on return these records and all before them are durable and can be read.

        Cancelling the wait does not take the records back. A record that could not be committed is not written
        later; append it again if it is true nevertheless (an outcome is, an intent is not).

        :raises LogUnavailable: when they could not be written
        """
        return self._writer.commit((self._table, _new_entry(_Entry, (self._clock(), records))))

    def begin(self, records: Sequence[Record]) -> Written:
        """As :meth:`commit`, for a caller who may not go on, or be cancelled, before it is known whether they are durable."""
        return self._writer.begin((self._table, _new_entry(_Entry, (self._clock(), records))))

    def promise(self, records: Sequence[Record]) -> Promised:
        """As :meth:`begin`, for what is to be durable as soon as can be, and is read a moment later or after a crash."""
        return self._writer.promise((self._table, _new_entry(_Entry, (self._clock(), records))))

    def rouse(self) -> None:
        """A promise may follow soon (see :meth:`Writer.rouse <handrail.store.database.writer.Writer.rouse>`)."""
        self._writer.rouse()

    def work(self, records: Sequence[Record]) -> Work:
        """The records as one of several works that are written whole or not at all
        (:meth:`~handrail.store.database.database.Database.commit_together`)."""
        return self._table, _Entry(self._clock(), records)

    async def flush(self) -> None:
        """Return when everything appended so far is durable.

        :raises LogUnavailable: when it cannot be
        """
        await self._writer.flush()

    async def backlog_below(self, count: int) -> None:
        """Hold a producer back until fewer than ``count`` appends wait to be written."""
        await self._writer.backlog_below(count)

    async def outcome_of(self, call_id: str) -> LoggedRecord | None:
        """The record that ended a call (``committed``, ``refused`` or ``interrupted``), or None.

        :raises LogUnavailable: when records that could tell are not durable
        """
        await self._writer.flush()
        return self._read(lambda reader: reader.outcome_of(call_id))

    async def detachment_of(self, call_id: str) -> LoggedRecord | None:
        """The record of how a call went on as a job, with what its proposer was answered, or None; see :meth:`outcome_of`."""
        await self._writer.flush()
        return self._read(lambda reader: next(reader.records(call=call_id, kind="detached", limit=1), None))

    async def proposal_of(self, call_id: str) -> LoggedRecord | None:
        """The record of how a call was proposed, or None; see :meth:`outcome_of`."""
        await self._writer.flush()
        return self._read(lambda reader: reader.proposal_of(call_id))

    def last_turn(self, session_id: str) -> int:
        """The highest turn that a call of the session was proposed in, 0 without one, by what is durable.

        :raises LogUnavailable: when the log cannot be read
        """
        return self._read(lambda reader: reader.last_turn(session_id))

    async def recover(self) -> list[Interrupted]:
        """At start: give every call that has an intent and no outcome the record ``interrupted``, and return them.

        They are not run again. Calls that had not come as far as an intent did not run, and are shown so.

        :raises LogUnavailable: when the log cannot take the records
        """
        await self._database.catch_up()
        await self._writer.flush()
        found, head = self._read(lambda reader: (reader.unfinished(), reader.head()))
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
        await self._writer.commit((self._table, _Mark(began)))
        return [Interrupted(c.session_id, c.call_id, c.tool, c.sequence) for c in found]

    async def redact(self, sequences: Iterable[int], *, reason: str, session_id: str = "") -> None:
        """Remove the bodies of records for good and record that it was done; the chain still verifies, and says so.

        All of them go in one transaction, and are named in the record as runs of sequences, ``[first, last]``.

        :raises UsageError: for a sequence that is not in the log or is itself the record of a redaction
        :raises LogUnavailable: when it cannot be made durable
        """
        runs = runs_of(sorted(set(sequences)))
        await self._writer.flush()
        for first, last in runs:
            if (absent := self._read(lambda reader, a=first, b=last: reader.absent(a, b))) is not None:
                raise UsageError(f"the log has no record {absent}; see handrail log for those there are")
            if (proof := self._read(lambda reader, a=first, b=last: reader.redaction_in(a, b))) is not None:
                raise UsageError(f"record {proof} is itself the record of a redaction and must stay")
        if runs:
            records = [Record("redacted", session_id, "", {"sequences": runs, "reason": reason})]
            await self._writer.commit((self._table, _Redaction(tuple(runs), self._clock(), records)))

    def _read(self, look: Callable[[LogReader], T]) -> T:
        with readable(self._database.path):
            return look(self.reader)


class _Entry(NamedTuple):
    """Records as they were handed over, and when."""

    at_ns: int
    records: Sequence[Record]


_tuple: Any = tuple
_new_entry: Callable[..., _Entry] = _tuple.__new__
"""Makes an ``_Entry`` in half the time of its own constructor, for each call."""


class _Mark(NamedTuple):
    """Up to here a former process wrote."""

    began: int


class _Redaction(NamedTuple):
    runs: tuple[tuple[int, int], ...]
    at_ns: int
    records: list[Record]


class _RecordTable:
    """Encodes, salts, hashes and inserts, in the writer's thread."""

    journalled_as = _NOTED_AS

    def __init__(self, database: Database, clock: Callable[[], int]) -> None:
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

    def opened(self, connection: sqlite3.Connection) -> None:
        reader = LogReader(connection)
        head = reader.checked_end()
        if self._was_read and not reader.holds(*self._durable):
            raise SinkUnavailable(
                f"the log no longer holds record {self._durable[0]} as this process wrote it: something else changed it. "
                "Stop, and run handrail log verify"
            )
        self._sequence = head.sequence
        self._previous = bytes.fromhex(head.hash)
        self._open = {call.call_id: call.sequence for call in reader.unfinished()}
        self._settled = reader.mark("settled")
        self._durable = (self._sequence, self._previous)
        self._reported_lost = self._confirmed_lost
        self._was_read = True

    def head(self) -> tuple[int, bytes]:
        return self._sequence, self._previous

    def head_is_in(self, connection: sqlite3.Connection) -> bool:
        return LogReader(connection).holds(self._sequence, self._previous)

    def packed(self, payload: _Entry | _Mark | _Redaction) -> Any:
        if not isinstance(payload, _Entry):
            return None
        records = [tuple(record) for record in payload.records]
        sound = all(isinstance(text, str) for record in records for text in record[:3])
        return [payload.at_ns, records] if sound else None  # others fail by themselves when they are written

    def unpacked(self, packed: Any) -> _Entry:
        at_ns, records = packed
        return _Entry(at_ns, [_record(*parts) for parts in records])

    def statements(self, batch: Sequence[_Entry | _Mark | _Redaction]) -> Iterable[Statement]:
        statements: list[Statement] = []
        entries: list[_Entry] = []
        # The last batch held, or `opened` would have been called since.
        self._durable = (self._sequence, self._previous)
        self._confirmed_lost = self._reported_lost
        lost = self._writer.lost
        if lost > self._reported_lost:
            entries.append(_Entry(self._clock(), [Record("lost", "", "", {"records": lost - self._reported_lost})]))
            self._reported_lost = lost
        for item in batch:
            if isinstance(item, _Entry):
                entries.append(item)
            elif isinstance(item, _Mark):
                statements.append(("UPDATE meta SET value = ? WHERE key = 'began'", (item.began,)))
            else:
                entries.append(_Entry(item.at_ns, item.records))
                erase = "UPDATE record SET body = NULL WHERE sequence BETWEEN ? AND ?"
                statements += [(erase, run) for run in item.runs]
                statements.append(("PRAGMA wal_checkpoint(TRUNCATE)", ()))  # the old pages stand there as well
        inserts = list(self._inserting(entries))
        settled = min(self._open.values(), default=self._sequence + 1) - 1
        if settled - self._settled >= _SETTLED_EVERY:
            self._settled = settled
            statements.append(("UPDATE meta SET value = ? WHERE key = 'settled'", (settled,)))
        return inserts + statements

    def _inserting(self, entries: Sequence[_Entry]) -> Iterator[Statement]:
        """One statement for each group of the chain."""
        records = [(at_ns, record) for at_ns, records in entries for record in records]
        for start in range(0, len(records), MAX_GROUP):
            yield self._group(records[start : start + MAX_GROUP])

    def _group(self, records: Sequence[tuple[int, Record]]) -> Statement:
        """Many rows in one statement: each statement hands the interpreter's lock over and back. Few values in a row,
        and bytearrays instead of bytes: sqlite3 asks bytes, value by value, whether they have an adapter."""
        sequence = self._sequence
        headers: list[Header] = []
        commitments: list[bytes] = []
        values: list[Value] = [sequence + 1]
        salts = bytearray(urandom(SALT_BYTES * len(records)))
        offset = 0
        for at_ns, (kind, session, call, body) in records:
            sequence += 1
            salted = salts[offset : offset + SALT_BYTES] + encode(body)
            offset += SALT_BYTES
            hashing = new_commitment()
            hashing.update(salted)
            commitment = hashing.digest()
            if not (session.isascii() and call.isascii()):
                session, call = _storable(session), _storable(call)  # noqa: PLW2901 - as they are stored
            headers.append((at_ns, kind, session, call))
            commitments.append(commitment)
            values += (at_ns, kind, session, call, bytearray(commitment), salted)
            if kind == "intended":
                self._open[call] = sequence
            elif kind in _ENDS:
                self._open.pop(call, None)
        previous = hash_of(self._sequence + 1, self._previous, headers, commitments)
        values[-2] = bytearray(commitments[-1] + previous)
        self._sequence, self._previous = sequence, previous
        return self._insert(len(records)), values

    def _insert(self, rows: int) -> str:
        sql = self._inserts.get(rows)
        if sql is None:
            at_ns = self._database.fenced("?2")  # fails as a whole once another process holds the workspace
            places = [f"(?1, {at_ns}, ?3, ?4, ?5, ?6, ?7)"]
            places += [f"(?1 + {row}, ?, ?, ?, ?, ?, ?)" for row in range(1, rows)]
            columns = "sequence, at_ns, kind, session, call, seal, body"
            sql = f"INSERT INTO record ({columns}) VALUES {', '.join(places)}"  # noqa: S608
            self._inserts[rows] = sql
        return sql


def records_noted(note: bytes) -> list[Record]:
    """The records in a note of the journal.

    :raises ValueError, TypeError, LookupError: when it is no such note
    """
    return [_record(*parts) for name, packed in decode(note) if name == _NOTED_AS for parts in packed[1]]


def _record(kind: Kind, session_id: str, call_id: str, body: Mapping[str, Any]) -> Record:
    if not all(isinstance(text, str) for text in cast("tuple[object, ...]", (kind, session_id, call_id))):
        raise TypeError("a record names no kind, session or call")
    return Record(kind, session_id, call_id, body)


def runs_of(sequences: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs, first and last."""
    runs: list[tuple[int, int]] = []
    for sequence in sequences:
        if runs and runs[-1][1] == sequence - 1:
            runs[-1] = (runs[-1][0], sequence)
        else:
            runs.append((sequence, sequence))
    return runs


def _storable(text: str) -> str:
    """Half surrogate pairs, which no database stores, are written out readably."""
    return text.encode("utf-8", "backslashreplace").decode()


# Records that only the journal has: of calls that had just begun when their process ended, or that begin at this moment.


def noted(connection: sqlite3.Connection, folder: Path) -> list[Record]:
    """Records that the log has not got and calls may rest on, in order. Whoever opens the workspace next puts them there.

    :param folder: the workspace's private one
    :raises sqlite3.Error: when the database cannot be read
    :raises OSError: when the folder cannot be read
    :raises StartError: when a journal cannot be read
    """
    before = journals(folder)  # looked at first: what the database gets meanwhile is no longer missing
    records: list[Record] = []
    for path, note in outstanding(before, journalled(connection)):
        try:
            records += records_noted(note)
        except (LookupError, TypeError, ValueError):
            raise StartError(unreadable(path)) from None
    return records
