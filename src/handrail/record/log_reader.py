"""Queries on the commit log: records by filter, one row for each call, and lookups by call.

They work on any connection, even while another process writes. Models and tools wrote the content of bodies, so readers do
not trust it: a value of an unexpected form counts as absent.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from handrail.contract.struct import Struct
from handrail.record.hash_chain import (
    CLOSING_SEAL_BYTES,
    GENESIS,
    SALT_BYTES,
    ChainVerifier,
    count_entry_records,
    extract_group_hash,
)
from handrail.store.database.group_writer import SinkUnavailable
from handrail.store.database.sqlite_connection import make_database_start_error, open_reader
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback

CallState = Literal[
    "proposed",
    "awaiting-approval",
    "suspended",
    "authorised",
    "running",
    "output",
    "error",
    "rejected",
    "interrupted",
    "not-run",
    "redacted",
]
"""The state of a call.

``awaiting-approval``: it waits for the user. ``suspended``: its process ended while it waited for the user; it continues when its session
is opened again. ``not-run``: its process ended before it started, or its approval request was removed. ``redacted``: it ended,
and its outcome was removed from the log."""

_COLUMNS = "sequence, at_ns, kinds, session, call, seal, body"
"""The columns that `ChainVerifier.check_entry` and `_read_entry` expect."""
_ENDS = ("committed", "rejected", "interrupted")
_FROM = "sequence >= ifnull((SELECT max(sequence) FROM record WHERE sequence <= ?), 0)"
"""The condition on the entries from the one that contains a record."""
IS_PROPOSAL = "substr(kinds, 1, 8) = 'proposed'"
"""The condition on the entries that begin with a proposal, as their index has it. No proposal is later in an entry."""
_ALONE = ("session-opened", "turn-finished", "generation")
"""Indexed kinds of records that belong to no call, so that each is an entry alone."""
_CHECKED_ENTRIES = 16
_MAX_TIME_NS = 2**62
"""In nanoseconds, in the year 2116: no record is later."""


class LogHead(Struct, frozen=True):
    """The newest record: its sequence (0 for an empty log) and hash in hexadecimal."""

    sequence: int
    hash: str


class LoggedRecord(Struct, frozen=True):
    """One record of the log. ``body`` is None if it was redacted.

    :param hash: the hash of the group that this record ends, hexadecimal; empty within a group
    """

    sequence: int
    at_ns: int
    kind: str
    session_id: str
    call_id: str
    hash: str
    body: Mapping[str, Any] | None

    @property
    def tool(self) -> str | None:
        """The tool id in the body, or None."""
        return _text((self.body or {}).get("tool"))


class CallPermission(Struct, frozen=True):
    """Who or what allowed a call.

    :param by: ``rules`` or ``person``
    :param rule: the rule that decided; None if a user did, or if it is not recorded
    :param scope: the scope of the rule: ``manifest``, ``project``, ``session``, ``mode`` or ``default``
    :param source: where an operator finds the rule: a file, an option, a mode, or an earlier answer
    :param choice: the answer of the user
    :param approval: the id of the approval request
    :param answered_by: the frontend in which the user answered
    """

    by: str
    rule: str | None = None
    scope: str | None = None
    source: str | None = None
    choice: str | None = None
    approval: str | None = None
    answered_by: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        """Describe the permission in a few words."""
        if self.by == "person":
            elsewhere = self.answered_by not in (None, "approval_handler")  # its own client, which the session names
            where = f", in {self.answered_by}" if elsewhere else ""
            return f"allowed by the user ({self.choice or 'answered'}{where})"
        if self.rule is None:
            return "allowed by the rules"
        where = f"{self.scope} scope" + (f", {self.source}" if self.source and self.scope != "default" else "")
        return f"allowed by '{self.rule}' ({where})"


class SessionOpener(Struct, frozen=True):
    """Who opened a session.

    :param client: the name of the client, as it introduces itself; the frontend for one that does not
    :param client_version: the version that it states, or ``""``
    """

    sequence: int
    frontend: str
    client: str
    client_version: str
    agent: str
    mode: str

    def __str__(self) -> str:
        """Describe the client in a few words."""
        named = f"{self.client} {self.client_version}".strip()
        return named if self.client == self.frontend else f"{named} over {self.frontend}"


class ModelUsage(Struct, frozen=True):
    """What the requests of a session to one model used.

    :param requests: the number of requests, with those for summaries
    :param cost: the price as the provider reports it, in its unit; None if it reports none
    """

    provider: str
    model: str
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cost: float | None = None

    def __str__(self) -> str:
        """Describe the usage in a few words."""
        tokens = f"{self.input_tokens:,} tokens in, {self.output_tokens:,} out"
        if not self.input_tokens and not self.output_tokens:
            tokens = f"{self.requests:,} request{'' if self.requests == 1 else 's'}, tokens not reported"
        cached = f", {self.cache_read_tokens:,} cached" if self.cache_read_tokens else ""
        return f"{self.provider}:{self.model}: {tokens}{cached}{format_cost(self.cost)}"


def format_cost(cost: float | None) -> str:
    """Return a cost that a provider reported, for the end of a list; ``""`` if it reported none."""
    return "" if cost is None else f", cost {cost:.4f}"


class LoggedCallSummary(Struct, frozen=True):
    """The summary of one call. Times are wall-clock nanoseconds; None if the step did not happen.

    :param tool: the tool id; None if the record was redacted or names no tool
    :param started_ns: when its intent was recorded
    :param ended_ns: when it was committed, refused or marked as interrupted
    :param error_kind: the error kind of its result, if the state is ``error`` or ``rejected``
    :param topic: the topic of its session when it was proposed
    """

    call_id: str
    session_id: str
    tool: str | None
    state: CallState
    proposed_ns: int
    started_ns: int | None = None
    ended_ns: int | None = None
    error_kind: str | None = None
    error_text: str | None = None
    first: int = 0
    """The sequence of its first record."""
    topic: str | None = None
    arguments: Mapping[str, Any] | None = None
    """The proposed arguments, without registered secrets; None if they were removed or are no object."""
    permission: CallPermission | None = None
    """Who or what allowed it; None if nothing did, or that was removed."""
    opener: SessionOpener | None = None
    """Who had opened its session."""


class LogReader:
    """A reader of the log through one connection.

    :raises StartError: from :meth:`open_database`, if the log cannot be read or is damaged
    :raises sqlite3.Error: from every other method, if the file is damaged
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @staticmethod
    @contextmanager
    def open_database(database: Path) -> Generator[LogReader]:
        """Open a database file (``StateFolders.database_file``), also one that another process writes."""
        connection = open_reader(database)
        try:
            yield LogReader(connection)
        except sqlite3.Error as error:
            raise make_database_start_error(database, error) from None
        finally:
            connection.close()

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection that it reads through."""
        return self._connection

    def head(self) -> LogHead:
        """Return the newest record.

        If you note its hash elsewhere, ``verify`` can later detect that records were cut off.
        """
        sql = "SELECT sequence, kinds, seal FROM record ORDER BY sequence DESC LIMIT 1"
        if (row := self._connection.execute(sql).fetchone()) is None:
            return LogHead(0, GENESIS.hex())
        return LogHead(_last_record(*row[:2]), (extract_group_hash(row[2]) or b"").hex())

    def has_record(self, sequence: int, digest: bytes) -> bool:
        """Return whether record ``sequence`` has this hash; sequence 0 is the start of the log."""
        if sequence == 0:
            return digest == GENESIS
        sql = "SELECT sequence, kinds, seal FROM record WHERE sequence <= ? ORDER BY sequence DESC LIMIT 1"
        row = self._connection.execute(sql, (sequence,)).fetchone()
        return row is not None and _last_record(*row[:2]) == sequence and extract_group_hash(row[2]) == digest

    def describe_missing_records(self, written: tuple[int, bytes] | None) -> str | None:
        """Describe the missing part of the log, or return None if nothing is missing.

        :param written: the number and hash of the last record that was written; None if unknown
        """
        if written is None or self.has_record(*written):
            return None
        sequence, last = written[0], self.head().sequence
        if last < sequence:
            return f"it ends at record {last}, but record {sequence} was written"
        return f"record {sequence} differs from the one that was written"

    def check_last_records(self) -> LogHead:
        """Check the last few records and return the head, so that nothing is chained to a damaged end.

        :raises SinkUnavailable: if the end is damaged
        """
        # Start at the end of the last group before the checked entries; length() reads no body.
        before = self._connection.execute(
            "SELECT sequence, kinds, seal FROM record WHERE sequence <= "
            "(SELECT sequence FROM record ORDER BY sequence DESC LIMIT 1 OFFSET ?) AND length(seal) = ? "
            "ORDER BY sequence DESC LIMIT 1",
            (_CHECKED_ENTRIES, CLOSING_SEAL_BYTES),
        ).fetchone()
        walk = ChainVerifier()
        if before is not None:
            walk = ChainVerifier(_last_record(*before[:2]), extract_group_hash(before[2]) or b"")
        fault = None
        for row in self._connection.execute(
            f"SELECT {_COLUMNS} FROM record WHERE sequence > ? ORDER BY sequence",  # noqa: S608
            (walk.sequence,),
        ):
            if fault := walk.check_entry(row):
                break
        if fault := fault or walk.check_unfinished_group():
            file = self._connection.execute("PRAGMA database_list").fetchone()[2]
            raise SinkUnavailable(
                f"The log {file} is damaged near its end, at record {fault.sequence}. Run handrail log verify. "
                "To start a new log, keep a copy of the file and move it away."
            )
        return LogHead(walk.sequence, walk.head.hex())

    def read_log_boundary(self, key: Literal["settled", "began"]) -> int:
        """Return a sequence of the log: where the settled records end, or where its present part began."""
        row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row is not None and isinstance(row[0], int) else 0

    def get_record(self, sequence: int) -> LoggedRecord | None:
        """Return one record by its sequence, or None."""
        found = self._read("WHERE sequence <= ? ORDER BY sequence DESC LIMIT 1", (sequence,))
        return next((record for record in found if record.sequence == sequence), None)

    def find_missing_sequence(self, first: int, last: int) -> int | None:
        """Return the first sequence of a run that is not in the log, or None."""
        newest = self.head().sequence
        if first >= 1 and last <= newest:
            return None
        return max(first, newest + 1) if first >= 1 else first  # the log has no gaps: missing records are after its end

    def widen_range_to_entries(self, first: int, last: int) -> tuple[int, int]:
        """Return the run of all records in the entries that contain a run of records."""
        sql = "SELECT sequence, kinds FROM record WHERE sequence <= ? ORDER BY sequence DESC LIMIT 1"
        (begin, _), (final, kinds) = (self._connection.execute(sql, (number,)).fetchone() for number in (first, last))
        return begin, _last_record(final, kinds)

    def find_redaction_record(self, first: int, last: int) -> int | None:
        """Return the first record in a run that documents a redaction, or None."""
        sql = "SELECT min(sequence) FROM record WHERE sequence BETWEEN ? AND ? AND kinds = 'redacted'"
        (found,) = self._connection.execute(sql, (first, last)).fetchone()
        return found

    def records(
        self,
        *,
        session: str | None = None,
        call: str | None = None,
        kind: str | None = None,
        since: int = 0,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> Iterator[LoggedRecord]:
        """Yield records in order.

        :param since: yield only records with a greater sequence
        :param limit: the maximum number of records; with ``newest_first`` the latest ones
        """
        wheres, values = [_FROM], cast("list[str | int]", [since + 1])
        for column, wanted in (("session", session), ("call", call)):
            if wanted is not None:
                wheres.append(f"{column} = ?")
                values.append(wanted)
        # Redundant conditions, so that SQLite uses its partial indexes.
        if call:
            wheres.append("call <> ''")
        if kind in _ALONE:
            wheres.append(f"kinds = '{kind}'")
        elif kind == "proposed":
            wheres.append(IS_PROPOSAL)
        elif kind is not None:
            wheres.append(build_record_kind_condition("kinds", kind))
        order = "DESC" if newest_first else "ASC"
        rows = f"WHERE {' AND '.join(wheres)} ORDER BY sequence {order}"
        found = self._read(rows, values, newest_first=newest_first)
        chosen = (record for record in found if record.sequence > since and kind in (None, record.kind))
        yield from islice(chosen, limit)

    def calls(
        self, *, session: str | None = None, call: str | None = None, since: int = 0, limit: int = 1000
    ) -> list[LoggedCallSummary]:
        """Return the newest ``limit`` calls, in the order of their proposals."""
        began = self.read_log_boundary("began")
        proposals = list(
            self.records(session=session, call=call, kind="proposed", since=since, limit=limit, newest_first=True)
        )
        rows: list[LoggedCallSummary] = []
        seen: set[str] = set()
        openers: dict[str, list[SessionOpener]] = {}
        for proposal in reversed(proposals):
            if proposal.call_id not in seen:
                seen.add(proposal.call_id)
                # With a damaged index, the query may not even find the proposal again.
                row = _summarize_call(list(self.records(call=proposal.call_id)) or [proposal], began)
                if row.session_id not in openers:
                    openers[row.session_id] = self.list_session_openers(row.session_id)
                row = replace(row, opener=find_session_opener(openers[row.session_id], row.first))
                rows.append(
                    row
                    if row.state != "suspended" or self._is_awaiting_approval(row)
                    else replace(row, state="not-run")
                )
        return rows

    def list_session_openers(self, session_id: str) -> list[SessionOpener]:
        """Return who opened a session, the first time and each time that it was resumed."""
        return [_read_opener(entry) for entry in self._records_about(session_id, "session-opened")]

    def read_session_model_usage(self, session_id: str) -> list[ModelUsage]:
        """Return what a session used of each model, without its sub-agents."""
        found: dict[tuple[str, str], ModelUsage] = {}
        for entry in self._records_about(session_id, "turn-finished"):
            used = parse_turn_usage(entry)
            key = used.provider, used.model
            found[key] = _add_usage(found[key], used) if key in found else used
        return list(found.values())

    def _records_about(self, session_id: str, kind: Literal["session-opened", "turn-finished"]) -> list[LoggedRecord]:
        where = (
            "WHERE session = ? AND kinds = ? "
            "AND kinds IN ('session-opened', 'turn-finished') ORDER BY sequence"  # the condition of its index
        )
        return list(self._read(where, (session_id, kind)))

    def _is_awaiting_approval(self, row: LoggedCallSummary) -> bool:
        """Return whether the approval request of a call still exists.

        A purge removes it, and the call never continues.
        """
        sql = "SELECT 1 FROM approval WHERE session = ? AND call = ? AND answered = 0 LIMIT 1"
        return self._connection.execute(sql, (row.session_id, row.call_id)).fetchone() is not None

    def find_outcome(self, call_id: str) -> LoggedRecord | None:
        """Return the record that ended the latest run of a call, or None.

        Its kind is ``committed``, ``rejected`` or ``interrupted``.
        """
        found: LoggedRecord | None = None
        for entry in self.records(call=call_id) if call_id else ():
            if entry.kind == "intended":
                found = None
            elif found is None and entry.kind in _ENDS and not _is_late(entry):
                found = entry
        return found

    def search_committed_records(
        self, session_id: str, text: str, *, until_ns: int = _MAX_TIME_NS
    ) -> Iterator[LoggedRecord]:
        """Yield the ``committed`` records of a session whose bodies contain ``text``, the latest first.

        :param until_ns: skip later records
        """
        wanted = text.encode()
        sql = (
            "SELECT o.sequence, o.at_ns, o.kinds, o.session, o.call, o.seal, o.body FROM record AS p "  # noqa: S608
            "JOIN record AS o ON o.call = p.call AND o.call <> '' "
            "WHERE p.session = ? AND substr(p.kinds, 1, 8) = 'proposed' "
            f"AND {build_record_kind_condition('o.kinds', 'committed')} AND o.at_ns <= ? AND instr(o.body, ?) > 0 ORDER BY o.sequence DESC"
        )
        for row in self._connection.execute(sql, (session_id, until_ns, wanted)):
            for record in _read_entry(row):
                if record.kind == "committed" and wanted in encode_json_with_fallback(record.body):
                    yield record

    def find_proposal(self, call_id: str) -> LoggedRecord | None:
        """Return the first ``proposed`` record of a call, or None."""
        where = f"WHERE call = ? AND call <> '' AND {IS_PROPOSAL} ORDER BY sequence LIMIT 1"
        return next(self._read(where, (call_id,)), None)

    def generations(self, *, before: int, limit: int) -> Iterator[Mapping[str, Any]]:
        """Yield the recorded generations of the registry before a record, the latest first."""
        where = "WHERE kinds = 'generation' AND sequence < ? ORDER BY sequence DESC LIMIT ?"
        for record in self._read(where, (before, limit)):
            if record.body is not None:
                yield record.body

    def list_nested_call_ids(self, call_id: str) -> list[str]:
        """Return the ids of the calls that a call's tool made, in order."""
        sql = f"SELECT call FROM record WHERE call > ? AND call < ? AND call <> '' AND {IS_PROPOSAL} ORDER BY sequence"  # noqa: S608
        return [str(row[0]) for row in self._connection.execute(sql, (f"{call_id}.", f"{call_id}/"))]

    def describe_session(self, session_id: str) -> dict[str, Any]:
        """Return ``agent``, ``frontend`` and ``topic`` of a session; empty if the session is unknown."""
        row = self._connection.execute(
            "SELECT agent, frontend, topic FROM session WHERE id = ?", (session_id,)
        ).fetchone()
        return {} if row is None else dict(zip(("agent", "frontend", "topic"), row, strict=True))

    def find_last_turn(self, session: str) -> int:
        """Return the highest turn number of a session's calls (``session/turn.index``); 0 if it has none."""
        sql = f"SELECT max(CAST(substr(call, ?) AS INTEGER)) FROM record WHERE session = ? AND {IS_PROPOSAL}"  # noqa: S608
        (turn,) = self._connection.execute(sql, (len(session) + 2, session)).fetchone()
        return turn or 0

    def list_unfinished_intents(self) -> list[LoggedRecord]:
        """Return the ``intended`` record of every call that has started and not ended."""
        later = " OR ".join(build_record_kind_condition("o.kinds", kind) for kind in ("intended", *_ENDS))
        where = (
            f"AS i WHERE {_FROM} AND {build_record_kind_condition('kinds', 'intended')} AND call <> '' "  # noqa: S608
            "AND NOT EXISTS (SELECT 1 FROM record AS o WHERE o.call = i.call AND o.call <> '' "
            f"AND o.sequence > i.sequence AND ({later})) ORDER BY sequence"
        )
        found: dict[str, LoggedRecord] = {}
        for record in self._read(where, (self.read_log_boundary("settled") + 1,)):
            if record.kind == "intended":
                found[record.call_id] = record
            elif record.kind in _ENDS:
                found.pop(record.call_id, None)
        return [one if one.tool else _with_tool(one, self.find_proposal(one.call_id)) for one in found.values()]

    def _read(self, where: str, values: Sequence[str | int], *, newest_first: bool = False) -> Iterator[LoggedRecord]:
        """Yield all records of the entries that ``where`` selects."""
        for row in self._connection.execute(f"SELECT {_COLUMNS} FROM record {where}", values):  # noqa: S608
            records = _read_entry(row)
            yield from reversed(records) if newest_first else records


def build_record_kind_condition(column: str, kind: str) -> str:
    """Return the condition on the entries that contain a record of a kind."""
    return f"instr(' ' || {column} || ' ', ' {kind} ') > 0"


def _last_record(sequence: int, kinds: object) -> int:
    """Return the sequence of the last record in an entry."""
    return sequence + count_entry_records(str(kinds)) - 1


def _read_entry(row: tuple[Any, ...]) -> list[LoggedRecord]:
    sequence, at_ns, joined, session, call, seal, encoded = row
    kinds = str(joined).split(" ")
    bodies: Sequence[Mapping[str, Any] | None] = [None] * len(kinds)
    if isinstance(encoded, bytes):
        try:
            decoded: Any = decode_json_with_fallback(encoded[SALT_BYTES:])
        except (ValueError, RecursionError):
            decoded = None
        listed = cast("list[Any]", decoded) if isinstance(decoded, list) else []
        if len(listed) == len(kinds):
            bodies = [cast("dict[str, Any]", one) if isinstance(one, dict) else {"value": one} for one in listed]
        else:
            bodies = [{"$damaged": len(encoded)}] * len(kinds)
    time = at_ns if isinstance(at_ns, int) and 0 <= at_ns < _MAX_TIME_NS else 0
    digests = [""] * (len(kinds) - 1) + [(extract_group_hash(seal) or b"").hex()]
    return [
        LoggedRecord(sequence + place, time, kind, str(session), str(call), digest, body)
        for place, (kind, digest, body) in enumerate(zip(kinds, digests, bodies, strict=True))
    ]


def _with_tool(entry: LoggedRecord, proposal: LoggedRecord | None) -> LoggedRecord:
    if proposal is None or proposal.tool is None:
        return entry
    body = {**(entry.body or {}), "tool": proposal.tool}
    return LoggedRecord(entry.sequence, entry.at_ns, entry.kind, entry.session_id, entry.call_id, entry.hash, body)


def _summarize_call(records: list[LoggedRecord], began: int) -> LoggedCallSummary:
    """Fold a call's records, which are in order and begin with its proposal, into one row."""
    first = records[0]
    tool: str | None = None
    state: CallState = "proposed"
    started = ended = None
    error_kind = error_text = None
    asked = False
    permission: CallPermission | None = None
    answered_by: str | None = None
    carried = first.sequence
    for entry in records:
        tool = tool or entry.tool
        match entry.kind:
            case "resumed":
                carried = entry.sequence
            case "approval-requested":
                state, asked = "awaiting-approval", asked or started is None
            case "approval-responded":
                state = "proposed" if started is None else "running"
                answered_by = _text((entry.body or {}).get("by"))
            case "authorised":
                state = "authorised"
                permission = _read_permission(entry.body or {}, answered_by)
            case "intended":
                state, started, ended = "running", entry.at_ns, None
                error_kind = error_text = None
            case "interrupted":
                state, ended, error_kind = "interrupted", entry.at_ns, "interrupted"
            case "committed" | "rejected" if ended is None and not _is_late(entry):
                ended = entry.at_ns
                state, error_kind, error_text = _read_final_state(entry)
            case _:
                pass
    if carried <= began:  # a process that has ended carried it
        state = _state_after_exit(state, asked=asked)
    return LoggedCallSummary(
        first.call_id,
        first.session_id,
        tool,
        state,
        first.at_ns,
        started,
        ended,
        error_kind,
        error_text,
        first.sequence,
        _text((first.body or {}).get("topic")),
        _mapping(first.body.get("arguments")) if first.body is not None else None,
        permission,
    )


def _read_permission(body: Mapping[str, Any], answered_by: str | None) -> CallPermission:
    by = _text(body.get("by")) or "rules"
    fields = {name: _text(body.get(name)) for name in ("rule", "scope", "source", "choice", "approval", "reason")}
    return CallPermission(by, **fields, answered_by=answered_by if by == "person" else None)


def _read_opener(entry: LoggedRecord) -> SessionOpener:
    body = entry.body or {}
    frontend, agent, mode = (_text(body.get(name)) or "" for name in ("frontend", "agent", "mode"))
    client = _mapping(body.get("client"))
    name, version = _text(client.get("name")), _text(client.get("version"))
    return SessionOpener(entry.sequence, frontend, name or frontend, version or "", agent, mode)


def find_session_opener(openers: Sequence[SessionOpener], sequence: int) -> SessionOpener | None:
    """Return who had opened a session at a record of it."""
    return next((one for one in reversed(openers) if one.sequence <= sequence), openers[0] if openers else None)


def parse_turn_usage(entry: LoggedRecord) -> ModelUsage:
    """Return what the request of a ``turn-finished`` record used."""
    body = entry.body or {}
    counts = [_count(body.get(f"{name}_tokens")) for name in ("input", "output", "cache_read", "cache_write")]
    cost: object = body.get("cost")
    known = float(cost) if isinstance(cost, int | float) and not isinstance(cost, bool) else None
    return ModelUsage(_text(body.get("provider")) or "?", _text(body.get("model")) or "?", 1, *counts, cost=known)


def _add_usage(one: ModelUsage, other: ModelUsage) -> ModelUsage:
    return replace(
        one,
        requests=one.requests + other.requests,
        input_tokens=one.input_tokens + other.input_tokens,
        output_tokens=one.output_tokens + other.output_tokens,
        cache_read_tokens=one.cache_read_tokens + other.cache_read_tokens,
        cache_write_tokens=one.cache_write_tokens + other.cache_write_tokens,
        cost=one.cost if other.cost is None else (one.cost or 0.0) + other.cost,
    )


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _read_final_state(entry: LoggedRecord) -> tuple[CallState, str | None, str | None]:
    """Return the final state of a call, with the kind and the text of its error."""
    result = _mapping((entry.body or {}).get("result"))
    state: CallState = "error" if result.get("type") == "error" else "output"
    if entry.kind == "rejected":
        state = "rejected"
    elif entry.body is None:
        state = "redacted"
    return state, _text(_mapping(result.get("metadata")).get("error_kind")), _text(result.get("error_text"))


def _state_after_exit(state: CallState, *, asked: bool) -> CallState:
    """Return the state of a call whose process has ended."""
    if state not in ("proposed", "awaiting-approval", "authorised"):
        return state
    return "suspended" if asked else "not-run"


def _is_late(entry: LoggedRecord) -> bool:
    return entry.kind == "committed" and (entry.body or {}).get("late") is True


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
