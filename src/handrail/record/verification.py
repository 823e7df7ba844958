"""Verification of the whole chain: every record and body is compared with its hash."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from handrail.contract.errors import StartError
from handrail.record.chain import SALT_BYTES, Walk
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
    :param first_bad: sequence of the first record that is changed, missing or added, or None; where only the group of
        records that were written together tells, the first of that group
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


def verify(
    reader: LogReader, head: str | None = None, written: Callable[[], tuple[int, bytes] | None] = lambda: None
) -> Verification:
    """Check every record against the chain, and every body against its commitment.

    Records cut off the end leave a shorter chain that is intact in itself; only ``head`` and ``written`` can tell.

    :param head: a hash noted earlier: that record must still be there, so nothing up to it was cut or rewritten
    :param written: gives how far the log was written, as it is kept apart from it; see :mod:`handrail.store.database.journal`
    """
    try:
        known = written()  # looked at first: what is written meanwhile is in the log, and not in this
        found = _verify(reader.connection, head.strip().lower() if head else None)
        if found.ok and (missing := reader.missing(known)) is not None:
            problem = f"{missing}: the database was replaced by an older copy, or cut"
            return replace(found, ok=False, first_bad=found.records + 1, problem=problem)
        return found
    except StartError as error:
        return Verification(False, 0, "", problem=str(error))
    except sqlite3.DatabaseError as error:
        return Verification(False, 0, "", problem=f"the database file itself is damaged: {error}")


def _verify(connection: sqlite3.Connection, head: str | None) -> Verification:
    connection.execute("BEGIN")  # one moment of a log that may be growing
    try:
        return _check(connection, head)
    finally:
        connection.execute("ROLLBACK")


def _check(connection: sqlite3.Connection, head: str | None) -> Verification:
    walk = Walk()
    lost = redacted = 0
    found_head = head == walk.head.hex()
    bodiless: list[tuple[int, int]] = []
    recorded: list[tuple[int, int]] = []

    def bad(sequence: int, problem: str) -> Verification:
        return Verification(False, walk.sequence, walk.head.hex(), redacted, lost, sequence, problem)

    rows = connection.execute(
        "SELECT sequence, at_ns, kind, session, call, seal, body FROM record NOT INDEXED ORDER BY sequence"
    )
    try:
        for row in rows:
            if fault := walk.step(row):
                return bad(fault.sequence, str(fault))
            sequence, kind, body = row[0], row[2], row[6]
            if body is None:
                redacted += 1
                _extend(bodiless, sequence)
            elif kind == "redacted":
                recorded += _runs(body)
            elif kind == "lost":
                lost += _count(body)
            found_head = found_head or walk.head.hex() == head
    except sqlite3.DatabaseError as error:
        unread = walk.sequence + 1
        return bad(unread, f"record {unread} cannot be read, the database file is damaged: {error}")
    if fault := walk.end():
        return bad(fault.sequence, str(fault))
    if head is not None and not found_head:
        return bad(
            walk.sequence + 1,
            f"no record has the hash {head}: the log was cut or rewritten since that head was noted; "
            f"it ends at record {walk.sequence}",
        )
    if (first := _first_outside(bodiless, recorded)) is not None:
        return bad(first, f"record {first}: its body was removed, and no redaction is recorded for it")
    (integrity,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if integrity != "ok":
        return Verification(
            False,
            walk.sequence,
            walk.head.hex(),
            redacted,
            lost,
            problem=f"the records hold, but the file is damaged: {integrity}",
        )
    return Verification(True, walk.sequence, walk.head.hex(), redacted, lost)


def _extend(runs: list[tuple[int, int]], sequence: int) -> None:
    """Add a number to the last run of numbers, or begin one with it."""
    if runs and runs[-1][1] == sequence - 1:
        runs[-1] = (runs[-1][0], sequence)
    else:
        runs.append((sequence, sequence))


def _runs(body: object) -> list[tuple[int, int]]:
    """The runs of sequences that a redaction names; whatever does not look like one names nothing."""
    listed = _field(body, "sequences")
    found: list[tuple[int, int]] = []
    for run in cast("list[Any]", listed) if isinstance(listed, list) else ():
        match run:
            case [int(first), int(last)]:
                found.append((first, last))
            case _:
                pass
    return found


def _first_outside(runs: list[tuple[int, int]], cover: list[tuple[int, int]]) -> int | None:
    """The first number of ascending ``runs`` that lies in no run of ``cover``."""
    ordered = iter(sorted(cover))
    begin, end = next(ordered, (0, -1))
    for first, last in runs:
        while first <= last:
            while end < first and (following := next(ordered, None)) is not None:
                begin, end = following
            if not begin <= first <= end:
                return first
            first = end + 1  # noqa: PLW2901 - what is left of the run
    return None


def _count(body: object) -> int:
    number = _field(body, "records")
    return number if isinstance(number, int) else 0


def _field(body: object, name: str) -> object:
    try:
        decoded: Any = decode(body[SALT_BYTES:]) if isinstance(body, bytes) else None
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", decoded).get(name) if isinstance(decoded, dict) else None
