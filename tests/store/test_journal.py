"""The journal: entries are recovered complete and once, whatever a power failure leaves of the last one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import StartError
from handrail.store.database import journal
from handrail.store.database.journal import (
    CAPACITY_BYTES,
    Journal,
    list_orphaned_journals,
    mark_journals_orphaned,
    read_journal_entries,
)

pytestmark = pytest.mark.proves("G-01")

STEPS = st.lists(st.one_of(st.binary(max_size=60), st.none()), max_size=12)
"""Notes, and None where the database has caught up."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journals")


@given(steps=STEPS, last=st.binary(min_size=1, max_size=60), torn=st.floats(0, 1), wiped=st.booleans())
def test_the_journal_holds_exactly_the_notes_that_the_database_lacks(
    folder: Path, steps: list[bytes | None], last: bytes, torn: float, wiped: bool
) -> None:
    made = Journal(folder, 1)
    marked = 0
    """Up to this number, the database has the notes."""

    def found() -> list[tuple[int, bytes]]:
        return [(number, content) for number, content in read_journal_entries(made.path) if number > marked]

    try:
        live: list[bytes] = []
        for step in steps:
            if step is None:
                made.erase() if wiped else made.rewind_to_start()
                live.clear()
                marked = made.last
            else:
                assert made.append_journal_entry(step)
                live.append(step)
        noted = list(enumerate(live, marked + 1))
        assert found() == noted
        before = made.path.read_bytes()
        assert made.append_journal_entry(last)
        after = made.path.read_bytes()
        changed = [at for at in range(CAPACITY_BYTES) if before[at] != after[at]]
        cut = changed[int(torn * (len(changed) - 1))]
        made.path.write_bytes(after[:cut] + before[cut:])  # the disk kept a part of the last write only
        assert found() == noted
        made.path.write_bytes(after)
        assert found() == [*noted, (made.last, last)]
    finally:
        made.close_and_delete()
    assert not made.path.exists()


def test_a_note_that_does_not_fit_is_not_written(tmp_path: Path) -> None:
    made = Journal(tmp_path, 1)
    assert not made.append_journal_entry(bytes(CAPACITY_BYTES))
    size = CAPACITY_BYTES // 3
    assert [made.append_journal_entry(bytes([n]) * size) for n in range(4)] == [True, True, False, False]
    assert made.last == 2
    made.rewind_to_start()
    assert made.append_journal_entry(b"again") and list(read_journal_entries(made.path)) == [(3, b"again")]
    assert made.path.stat().st_size == CAPACITY_BYTES
    made.close_and_delete()


def test_a_former_holder_cannot_write_to_its_orphaned_journal(tmp_path: Path) -> None:
    former = Journal(tmp_path, 4)
    assert former.append_journal_entry(b"counts")
    mark_journals_orphaned(tmp_path)
    assert not former.append_journal_entry(b"too late")
    ((token, path),) = list_orphaned_journals(tmp_path)
    assert token == 4 and next(iter(read_journal_entries(path))) == (1, b"counts")
    successor = Journal(tmp_path, 5)
    assert successor.append_journal_entry(b"its own") and list(read_journal_entries(successor.path)) == [
        (1, b"its own")
    ]
    former.close()
    assert [token for token, _ in list_orphaned_journals(tmp_path)] == [4]
    mark_journals_orphaned(tmp_path)
    assert [token for token, _ in list_orphaned_journals(tmp_path)] == [4, 5]
    successor.close()


def test_a_journal_of_another_version_is_refused_with_the_next_step(tmp_path: Path) -> None:
    made = Journal(tmp_path, 1)
    made.append_journal_entry(b"x")
    content = made.path.read_bytes()
    made.path.write_bytes(b"HRJ9" + content[4:])
    with pytest.raises(StartError, match=r"another version of Handrail.*move the file away"):
        list(read_journal_entries(made.path))
    made.close_and_delete()


def test_a_link_in_place_of_a_journal_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"HRJ1" + bytes(100))
    (tmp_path / "journal-1.left").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match=rf"journal-1\.left cannot be read: {os.strerror(errno.ELOOP)}.*move it away"):
        list(read_journal_entries(tmp_path / "journal-1.left"))
    (tmp_path / "journal-2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        Journal(tmp_path, 2)


def test_a_disk_wake_up_leaves_the_notes_of_the_journal_unchanged(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    journal.wake_disk()
    assert list(read_journal_entries(journal.path)) == []
    assert journal.append_journal_entry(b"one")
    journal.wake_disk()
    assert journal.append_journal_entry(b"two")
    journal.wake_disk()
    journal.close()
    assert list(read_journal_entries(journal.path)) == [(1, b"one"), (2, b"two")]


def test_the_journal_refuses_notes_when_the_disk_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Journal(tmp_path, 1)
    monkeypatch.setattr(journal, "MIN_FREE_BYTES", 2**62)
    assert not made.append_journal_entry(b"x") and made.last == 0
    made.close_and_delete()
