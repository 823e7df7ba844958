"""Checking the whole chain: is the log still what was written?"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any, cast

from handrail.record.chain import GENESIS, fault_in, hash_in
from handrail.record.reading import LogReader
from handrail.store.encoding import decode


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found.

    :param ok: nothing is wrong
    :param records: how many were checked
    :param head: hash of the newest record, hexadecimal
    :param redacted: how many bodies were removed by recorded redactions
    :param lost: how many records the log itself says it could not keep
    :param first_bad: sequence of the first record that is changed, missing or added, or None
    :param problem: what is wrong with it, for a person
    """

    ok: bool
    records: int
    head: str
    redacted: int = 0
    lost: int = 0
    first_bad: int | None = None
    problem: str | None = None

    def __str__(self) -> str:
        if not self.ok:
            return f"not intact: {self.problem}"
        count = "1 record" if self.records == 1 else f"{self.records:,} records"
        notes = f", {self.redacted:,} of them redacted" if self.redacted else ""
        notes += f", {self.lost:,} reported as lost" if self.lost else ""
        return f"intact: {count}{notes}, head {self.head}"


def verify(reader: LogReader, head: str | None = None) -> Verification:
    """Check every record against the chain, and every body against its commitment.

    Records cut off the end leave a shorter chain that is intact in itself; only ``head`` can tell.

    :param head: a hash noted earlier: that record must still be there, so nothing up to it was cut or rewritten
    """
    try:
        return _verify(reader.connection, head.strip().lower() if head else None)
    except sqlite3.DatabaseError as error:
        return Verification(False, 0, "", problem=f"the database file itself is damaged: {error}")


def _verify(connection: sqlite3.Connection, head: str | None) -> Verification:
    connection.execute("BEGIN")  # one moment of a log that may be growing
    try:
        return _check(connection, head)
    finally:
        connection.execute("ROLLBACK")


def _check(connection: sqlite3.Connection, head: str | None) -> Verification:
    previous, expected, count, lost = GENESIS, 1, 0, 0
    found_head = head == GENESIS.hex()
    bodiless: set[int] = set()
    recorded: set[int] = set()

    def bad(sequence: int, problem: str) -> Verification:
        return Verification(False, count, previous.hex(), len(bodiless), lost, sequence, problem)

    rows = connection.execute(
        "SELECT sequence, at_ns, kind, session, call, seal, body FROM record NOT INDEXED ORDER BY sequence"
    )
    try:
        for row in rows:
            sequence: int = row[0]
            if sequence > expected:
                which = f"record {expected}" if sequence == expected + 1 else f"records {expected} to {sequence - 1}"
                return bad(expected, f"{which} missing: record {sequence} follows record {expected - 1}")
            if sequence < expected:
                return bad(sequence, f"record {sequence} was added: the log begins with record 1")
            if problem := fault_in(row, previous):
                return bad(sequence, f"record {sequence}: {problem}")
            kind, body = row[2], row[6]
            if body is None:
                bodiless.add(sequence)
            elif kind == "redacted":
                recorded |= _sequences(body)
            elif kind == "lost":
                lost += _count(body)
            previous = hash_in(row[5]) or b""
            found_head = found_head or previous.hex() == head
            expected += 1
            count += 1
    except sqlite3.DatabaseError as error:
        return bad(expected, f"record {expected} cannot be read, the database file is damaged: {error}")
    if head is not None and not found_head:
        return bad(
            expected,
            f"no record has the hash {head}: the log was cut or rewritten since that head was noted; "
            f"it ends at record {expected - 1}",
        )
    if unrecorded := bodiless - recorded:
        first = min(unrecorded)
        return bad(first, f"record {first}: its body was removed, and no redaction is recorded for it")
    (integrity,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if integrity != "ok":
        return Verification(
            False,
            count,
            previous.hex(),
            len(bodiless),
            lost,
            problem=f"the records hold, but the file is damaged: {integrity}",
        )
    return Verification(True, count, previous.hex(), len(bodiless), lost)


def _sequences(body: object) -> set[int]:
    listed = _field(body, "sequences")
    return {n for n in cast("list[Any]", listed) if isinstance(n, int)} if isinstance(listed, list) else set()


def _count(body: object) -> int:
    number = _field(body, "records")
    return number if isinstance(number, int) else 0


def _field(body: object, name: str) -> object:
    try:
        decoded: Any = decode(body) if isinstance(body, bytes) else None
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", decoded).get(name) if isinstance(decoded, dict) else None
