"""Verification of the whole chain: every record and body is compared with its hash."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from handrail.contract.errors import StartError
from handrail.contract.struct import Struct
from handrail.record.hash_chain import SALT_BYTES, ChainVerifier
from handrail.record.log_reader import LogReader
from handrail.store.json_fallback_encoding import decode_json_with_fallback


class LogVerification(Struct, frozen=True):
    """The result of a verification.

    :param ok: whether the log is intact
    :param records: the number of checked records
    :param head: the hash of the newest record, hexadecimal
    :param redacted: the number of bodies that recorded redactions removed
    :param dropped: the number of records that the log reports as lost
    :param first_invalid: the sequence of the first changed, missing or added record, or None; if only the group is known, the
        first record of that group
    :param problem: the description for the user
    """

    ok: bool
    records: int
    head: str
    redacted: int = 0
    dropped: int = 0
    first_invalid: int | None = None
    problem: str | None = None

    def __str__(self) -> str:
        if not self.ok:
            return f"not intact: {self.problem}"
        count = "1 record" if self.records == 1 else f"{self.records:,} records"
        notes = f", {self.redacted:,} of them redacted" if self.redacted else ""
        notes += f", {self.dropped:,} reported as lost" if self.dropped else ""
        return f"intact: {count}{notes}, head {self.head}"


def verify_log(
    reader: LogReader, head: str | None = None, written: Callable[[], tuple[int, bytes] | None] = lambda: None
) -> LogVerification:
    """Check every record against the chain, and every body against its commitment.

    If records were cut off the end, the shorter chain is still valid. Only ``head`` and ``written`` reveal the cut.

    :param head: a hash that you noted earlier; the log must still contain that record
    :param written: returns the last record that was written, from outside the log; see
        :mod:`handrail.store.database.journal`
    """
    try:
        known = written()  # first, because the log may grow meanwhile
        found = _verify(reader.connection, head.strip().lower() if head else None)
        if found.ok and (missing := reader.describe_missing_records(known)) is not None:
            problem = f"{missing}: the database was replaced by an older copy, or cut"
            return replace(found, ok=False, first_invalid=found.records + 1, problem=problem)
        return found
    except StartError as error:
        return LogVerification(False, 0, "", problem=str(error))
    except sqlite3.DatabaseError as error:
        return LogVerification(False, 0, "", problem=f"the database file is damaged: {error}")


def _verify(connection: sqlite3.Connection, head: str | None) -> LogVerification:
    connection.execute("BEGIN")  # a snapshot of a log that may be growing
    try:
        return _check(connection, head)
    finally:
        connection.execute("ROLLBACK")


def _check(connection: sqlite3.Connection, head: str | None) -> LogVerification:
    walk = ChainVerifier()
    lost = redacted = 0
    found_head = head == walk.head.hex()
    # The missing bodies are compared with the recorded redactions at the end, since a redaction comes after the records
    # that it names.
    bodiless: list[tuple[int, int]] = []
    recorded: list[tuple[int, int]] = []

    def bad(sequence: int, problem: str) -> LogVerification:
        return LogVerification(False, walk.sequence, walk.head.hex(), redacted, lost, sequence, problem)

    rows = connection.execute(
        "SELECT sequence, at_ns, kinds, session, call, seal, body FROM record NOT INDEXED ORDER BY sequence"
    )
    try:
        for row in rows:
            if fault := walk.check_entry(row):
                return bad(fault.sequence, str(fault))
            sequence, kinds, body = row[0], row[2], row[6]
            if body is None:
                redacted += walk.sequence - sequence + 1
                _extend_runs(bodiless, sequence, walk.sequence)
            elif kinds == "redacted":
                recorded += _read_redacted_runs(body)
            elif kinds == "records-dropped":
                lost += _read_count(body)
            # The noted head may be an older one: the log has grown since, and every earlier end is a head as well.
            found_head = found_head or walk.head.hex() == head
    except sqlite3.DatabaseError as error:
        unread = walk.sequence + 1
        return bad(unread, f"record {unread} cannot be read, the database file is damaged: {error}")
    if fault := walk.check_unfinished_group():
        return bad(fault.sequence, str(fault))
    if head is not None and not found_head:
        return bad(
            walk.sequence + 1,
            f"no record has the hash {head}: the log was cut or rewritten since that head was noted; "
            f"it ends at record {walk.sequence}",
        )
    if (first := _first_not_covered(bodiless, recorded)) is not None:
        return bad(first, f"record {first}: its body was removed without a recorded redaction")
    # The chain covers the table of records. Damage in an index would not show there.
    (integrity,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if integrity != "ok":
        return LogVerification(
            False,
            walk.sequence,
            walk.head.hex(),
            redacted,
            lost,
            problem=f"the records are intact, but the database file is damaged: {integrity}",
        )
    return LogVerification(True, walk.sequence, walk.head.hex(), redacted, lost)


def _extend_runs(runs: list[tuple[int, int]], first: int, last: int) -> None:
    """Add the numbers from ``first`` to ``last`` to the last run, or start a new run."""
    if runs and runs[-1][1] == first - 1:
        runs[-1] = (runs[-1][0], last)
    else:
        runs.append((first, last))


def _read_redacted_runs(body: object) -> list[tuple[int, int]]:
    """Return the runs of sequences that a redaction names. Values of another form are skipped."""
    listed = _read_field(body, "sequences")
    found: list[tuple[int, int]] = []
    for run in cast("list[Any]", listed) if isinstance(listed, list) else ():
        match run:
            case [int(first), int(last)]:
                found.append((first, last))
            case _:
                pass
    return found


def _first_not_covered(runs: list[tuple[int, int]], cover: list[tuple[int, int]]) -> int | None:
    """Return the first number in ascending ``runs`` that no run of ``cover`` contains."""
    ordered = iter(sorted(cover))
    begin, end = next(ordered, (0, -1))
    for first, last in runs:
        while first <= last:
            while end < first and (following := next(ordered, None)) is not None:
                begin, end = following
            if not begin <= first <= end:
                return first
            first = end + 1  # noqa: PLW2901 - the rest of the run
    return None


def _read_count(body: object) -> int:
    number = _read_field(body, "records")
    return number if isinstance(number, int) else 0


def _read_field(body: object, name: str) -> object:
    try:
        decoded: Any = decode_json_with_fallback(body[SALT_BYTES:]) if isinstance(body, bytes) else None
    except (ValueError, RecursionError):
        return None
    fields: object = cast("list[Any]", decoded)[0] if isinstance(decoded, list) and decoded else None
    return cast("dict[str, Any]", fields).get(name) if isinstance(fields, dict) else None
