"""Every change, removal and insertion in the log is detected."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.places import Place

from handrail.contract.errors import StartError
from handrail.record.commit_log import CommitLog, Record
from handrail.record.hash_chain import GENESIS, MAX_GROUP, EntryHeader, hash_group
from handrail.record.log_reader import LogReader
from handrail.record.verification import LogVerification, verify_log

pytestmark = pytest.mark.proves("G-02")

GROUPS = (1, 2, 3, 5, 1, 8, 13, 7)
"""How many records were written at once, each time."""
COUNT = sum(GROUPS)
REDACTED = 9
STARTS = {
    number: first
    for first, last in pairwise((*accumulate(GROUPS, initial=1), COUNT + 2))
    for number in range(first, last)
}
"""The first record of each record's group; the last group is the redaction's record."""
ENDS = sorted({STARTS[n] - 1 for n in STARTS if STARTS[n] > 1} | {COUNT + 1})
COLUMNS = ("sequence", "at_ns", "kinds", "session", "call", "seal", "body")
Row = list[Any]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Return the rows of a valid log of some calls, one of them redacted."""
    place = Place.beneath(tmp_path_factory.mktemp("honest"))

    async def write() -> list[Row]:
        store = place.open()
        log = CommitLog(store.database)
        numbers = iter(range(COUNT))
        for size in GROUPS:
            await log.commit(
                [
                    Record("committed", "ses_1", f"ses_1/{n}", {"result": {"type": "output", "data": n}})
                    if n % 2
                    else Record("proposed", "ses_1", f"ses_1/{n}", {"tool": "read", "arguments": {"n": n}})
                    for n in islice(numbers, size)
                ]
            )
        await log.redact_record_bodies([REDACTED], reason="test")
        found = [list(r) for r in log.reader.connection.execute(f"SELECT {', '.join(COLUMNS)} FROM record")]
        await store.aclose()
        return found

    return asyncio.run(write())


def head_of(rows: Sequence[Row]) -> str:
    """The hash in the last record's seal."""
    assert len(rows[-1][5]) == 64
    return rows[-1][5][32:].hex()


def checked(rows: Sequence[Row], head: str | None = None) -> LogVerification:
    """Return the verdict on a database with exactly these rows."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute(f"CREATE TABLE record ({', '.join(COLUMNS)})")
    connection.execute("CREATE INDEX record_by_call ON record (call)")
    connection.executemany("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    try:
        return verify_log(LogReader(connection), head)
    finally:
        connection.close()


def copied(rows: Sequence[Row]) -> list[Row]:
    return [list(row) for row in rows]


def test_an_intact_log_verifies_and_counts_its_redacted_records(rows: list[Row]) -> None:
    assert [row[0] for row in rows if len(row[5]) == 64] == ENDS
    found = checked(rows, head_of(rows))
    assert found.ok and found.records == COUNT + 1 and found.redacted == 1 and found.head == head_of(rows)
    assert checked([]).ok and checked([], GENESIS.hex()).ok


@given(data=st.data())
def test_verification_finds_any_changed_bit_at_its_record_or_group(rows: list[Row], data: st.DataObject) -> None:
    changed = copied(rows)
    row = data.draw(st.sampled_from(changed))
    column = data.draw(st.sampled_from([n for n in range(1, 7) if row[n] != "" and row[n] is not None]))
    value = row[column]
    if isinstance(value, int):
        row[column] = value ^ (1 << data.draw(st.integers(0, 61)))
    else:
        raw = bytearray(value.encode() if isinstance(value, str) else value)
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] ^= 1 << data.draw(st.integers(0, 6 if isinstance(value, str) else 7))
        row[column] = raw.decode("utf-8") if isinstance(value, str) else bytes(raw)
    found = checked(changed)
    assert not found.ok and found.first_invalid == (row[0] if column == 6 else found.first_invalid)
    assert found.first_invalid is not None and STARTS[row[0]] <= found.first_invalid <= row[0]


@given(data=st.data())
def test_verification_finds_any_replaced_value(rows: list[Row], data: st.DataObject) -> None:
    changed = copied(rows)
    row = data.draw(st.sampled_from(changed))
    column = data.draw(st.sampled_from(range(1, 7)))
    before = row[column]
    other = data.draw(st.sampled_from(rows))
    row[column] = data.draw(
        st.none()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text(max_size=90)
        | st.binary(max_size=90)
        | st.binary(min_size=32, max_size=32)
        | st.binary(min_size=64, max_size=64)
        | st.just(other[column])
    )
    if row[column] == before and type(row[column]) is type(before):
        return
    found = checked(changed)
    assert not found.ok and found.first_invalid is not None
    if row[0] == COUNT + 1 and column == 6 and row[6] is None:
        assert found.first_invalid == REDACTED  # what proved its redaction is gone
    else:
        assert STARTS[row[0]] <= found.first_invalid <= row[0]


@given(data=st.data())
def test_verification_finds_an_inserted_group_border(rows: list[Row], data: st.DataObject) -> None:
    changed = copied(rows)
    row = data.draw(st.sampled_from([r for r in changed if len(r[5]) == 32]))
    first, here = STARTS[row[0]], row[0]
    before = bytes.fromhex(head_of(rows[: first - 1])) if first > 1 else GENESIS
    right = sealed(rows[first - 1 : here], before)  # what it would be, had the group ended here
    row[5] += data.draw(st.just(right) | st.binary(min_size=32, max_size=32) | st.just(before))
    found = checked(changed)
    assert not found.ok and found.first_invalid == (here + 1 if row[5].endswith(right) else first)


@given(end=st.sampled_from(ENDS))
def test_verification_finds_a_removed_group_border(rows: list[Row], end: int) -> None:
    changed = copied(rows)
    changed[end - 1][5] = changed[end - 1][5][:32]
    found = checked(changed)
    assert not found.ok and found.first_invalid == STARTS[end]


@given(data=st.data())
def test_verification_finds_a_moved_group_border(rows: list[Row], data: st.DataObject) -> None:
    changed = copied(rows)
    end = data.draw(st.sampled_from([n for n in ENDS if n <= COUNT]))
    to = data.draw(st.integers(1, COUNT + 1).filter(lambda n: len(rows[n - 1][5]) == 32))
    moved = changed[end - 1][5][32:]
    changed[end - 1][5] = changed[end - 1][5][:32]
    changed[to - 1][5] += moved
    found = checked(changed)
    assert not found.ok and found.first_invalid == min(STARTS[end], STARTS[to])


def test_a_log_resealed_with_other_boundaries_fails_verification_against_the_known_head(rows: list[Row]) -> None:
    anew = copied(rows)
    before = GENESIS
    for row in anew:
        before = sealed([row], before)
        row[5] = row[5][:32] + before
    assert checked(anew).ok
    assert not checked(anew, head_of(rows)).ok and not checked(anew, head_of(rows[: ENDS[2]])).ok


def sealed(rows: Sequence[Row], previous: bytes) -> bytes:
    """The hash of these rows as one group."""
    headers: list[EntryHeader] = [(row[1], row[2], row[3], row[4]) for row in rows]
    return hash_group(rows[0][0], previous, headers, [row[5][:32] for row in rows])


@given(data=st.data())
def test_verification_finds_removed_records_at_the_first_missing_one(rows: list[Row], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, COUNT - 1))
    last = data.draw(st.integers(first, COUNT - 1))
    found = checked(rows[:first] + rows[last + 1 :])
    assert not found.ok and found.first_invalid == first + 1 and "missing" in str(found)


@given(data=st.data())
def test_verification_finds_a_removed_record_after_renumbering(rows: list[Row], data: st.DataObject) -> None:
    first = data.draw(st.integers(0, COUNT - 1))
    left = copied([*rows[:first], *rows[first + 1 :]])
    for number, row in enumerate(left, 1):
        row[0] = number
    found = checked(left)
    assert not found.ok and found.first_invalid == STARTS[first + 1]


@given(data=st.data())
def test_verification_finds_an_inserted_record(rows: list[Row], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, COUNT))
    model = list(data.draw(st.sampled_from(rows)))
    more = copied([*rows[:place], model, *rows[place:]])
    for number, row in enumerate(more, 1):
        row[0] = number
    found = checked(more)
    assert not found.ok and found.first_invalid is not None and found.first_invalid <= place + 2
    assert checked([[0, *model[1:]], *rows]).first_invalid == 0
    assert not checked([*rows, [COUNT + 2, *model[1:]]]).ok


@given(data=st.data())
def test_verification_finds_exchanged_records(rows: list[Row], data: st.DataObject) -> None:
    one, other = sorted(data.draw(st.lists(st.integers(0, COUNT), min_size=2, max_size=2, unique=True)))
    changed = copied(rows)
    changed[one], changed[other] = changed[other], changed[one]
    changed[one][0], changed[other][0] = one + 1, other + 1
    found = checked(changed)
    assert not found.ok and found.first_invalid == STARTS[one + 1]


@given(left=st.integers(0, COUNT))
def test_verification_finds_a_truncated_log_by_a_noted_head_or_an_incomplete_group(rows: list[Row], left: int) -> None:
    found = checked(rows[:left], head_of(rows))
    if left in (0, *ENDS):
        assert checked(rows[:left]).ok == (left < REDACTED)  # behind it, what proves the redaction is cut too
        assert not found.ok and found.first_invalid == left + 1 and "cut or rewritten" in str(found)
    else:
        assert found == checked(rows[:left])
        assert not found.ok and found.first_invalid == STARTS[left] and "end of their group" in str(found)


@given(noted=st.sampled_from(ENDS))
def test_an_older_noted_head_still_verifies_a_log_that_has_grown(rows: list[Row], noted: int) -> None:
    assert checked(rows, f" {head_of(rows[:noted]).upper()} ").ok


def test_verification_with_a_noted_head_finds_a_rewritten_log(rows: list[Row], tmp_path: Path) -> None:
    place = Place.beneath(tmp_path)

    async def forge() -> LogVerification:
        store = place.open()
        log = CommitLog(store.database)
        await log.commit([Record("committed", "ses_1", "c", {"forged": n}) for n in range(COUNT + 1)])
        assert verify_log(log.reader).ok
        found = verify_log(log.reader, head_of(rows))
        await store.aclose()
        return found

    assert not asyncio.run(forge()).ok


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database file of a log of 200 records."""
    place = Place.beneath(tmp_path_factory.mktemp("written"))

    async def write() -> None:
        store = place.open()
        log = CommitLog(store.database)
        await log.commit(
            [Record("committed", "ses_1", f"ses_1/{n}", {"mark": f"<{n:04}>", "text": "x" * 300}) for n in range(200)]
        )
        await store.aclose()

    asyncio.run(write())
    return place.folders.database_file


@given(data=st.data())
def test_verification_finds_a_damaged_byte_in_any_record_on_disk(written: Path, data: st.DataObject) -> None:
    content = bytearray(written.read_bytes())
    number = data.draw(st.integers(0, 199))
    place = content.index(f"<{number:04}>".encode()) + data.draw(st.integers(-8, 250))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    copy = written.with_name("copy.db")
    copy.write_bytes(content)
    with LogReader.open_database(copy) as reader:
        found = verify_log(reader)
    assert not found.ok and found.first_invalid is not None
    assert number - number % MAX_GROUP < found.first_invalid <= number + 1


@pytest.mark.parametrize("torn", ["cut in half", "overwritten"])
def test_a_torn_database_file_is_reported_as_damaged(written: Path, torn: str) -> None:
    content = written.read_bytes()
    copy = written.with_name("torn.db")
    if torn == "cut in half":
        copy.write_bytes(content[: len(content) // 2])
    else:
        copy.write_bytes(content[:8192] + b"\xff" * (len(content) - 8192))
    try:
        with LogReader.open_database(copy) as reader:
            found = verify_log(reader)
    except StartError as error:
        assert "damaged" in str(error)
    else:
        assert not found.ok and "damaged" in str(found)


def test_a_log_with_a_damaged_end_refuses_to_open(written: Path, tmp_path: Path) -> None:
    place = Place.beneath(tmp_path)
    store = place.open()
    asyncio.run(store.aclose())
    content = bytearray(written.read_bytes())
    content[content.index(b"<0199>")] ^= 1
    place.folders.database_file.write_bytes(content)
    store = place.open()
    with pytest.raises(StartError, match=r"damaged near its end, at record 200.*handrail log verify"):
        CommitLog(store.database)
    asyncio.run(store.aclose())
    shutil.copy(written, place.folders.database_file)
    store = place.open()
    CommitLog(store.database)
    asyncio.run(store.aclose())
