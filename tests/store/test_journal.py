"""The journal: what was noted is found again, whole and once, whatever a power cut leaves of the last note."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import StartError
from handrail.store.database import journal
from handrail.store.database.journal import CAPACITY, Journal, left_behind, notes_of, set_aside

pytestmark = pytest.mark.proves("G-01")

STEPS = st.lists(st.one_of(st.binary(max_size=60), st.none()), max_size=12)
"""Notes, and None where the database has caught up."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journals")


@given(steps=STEPS, last=st.binary(min_size=1, max_size=60), torn=st.floats(0, 1), wiped=st.booleans())
def test_what_stands_in_it_is_what_the_database_has_not_got(
    folder: Path, steps: list[bytes | None], last: bytes, torn: float, wiped: bool
) -> None:
    made = Journal(folder, 1)
    marked = 0
    """Up to this number, the database has the notes."""

    def found() -> list[tuple[int, bytes]]:
        return [(number, content) for number, content in notes_of(made.path) if number > marked]

    try:
        live: list[bytes] = []
        for step in steps:
            if step is None:
                made.erase() if wiped else made.reuse()
                live.clear()
                marked = made.last
            else:
                assert made.note(step)
                live.append(step)
        noted = list(enumerate(live, marked + 1))
        assert found() == noted
        before = made.path.read_bytes()
        assert made.note(last)
        after = made.path.read_bytes()
        changed = [at for at in range(CAPACITY) if before[at] != after[at]]
        cut = changed[int(torn * (len(changed) - 1))]
        made.path.write_bytes(after[:cut] + before[cut:])  # the disk kept a part of the last write only
        assert found() == noted
        made.path.write_bytes(after)
        assert found() == [*noted, (made.last, last)]
    finally:
        made.remove()
    assert not made.path.exists()


def test_what_does_not_fit_is_not_noted(tmp_path: Path) -> None:
    made = Journal(tmp_path, 1)
    assert not made.note(bytes(CAPACITY))
    size = CAPACITY // 3
    assert [made.note(bytes([n]) * size) for n in range(4)] == [True, True, False, False]
    assert made.last == 2
    made.reuse()
    assert made.note(b"again") and list(notes_of(made.path)) == [(3, b"again")]
    assert made.path.stat().st_size == CAPACITY
    made.remove()


def test_a_holder_whose_journal_was_put_aside_notes_nothing_more_that_counts(tmp_path: Path) -> None:
    former = Journal(tmp_path, 4)
    assert former.note(b"counts")
    set_aside(tmp_path)
    assert not former.note(b"too late")
    ((token, path),) = left_behind(tmp_path)
    assert token == 4 and next(iter(notes_of(path))) == (1, b"counts")
    successor = Journal(tmp_path, 5)
    assert successor.note(b"its own") and list(notes_of(successor.path)) == [(1, b"its own")]
    former.close()
    assert [token for token, _ in left_behind(tmp_path)] == [4]
    set_aside(tmp_path)
    assert [token for token, _ in left_behind(tmp_path)] == [4, 5]
    successor.close()


def test_a_journal_of_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    made = Journal(tmp_path, 1)
    made.note(b"x")
    content = made.path.read_bytes()
    made.path.write_bytes(b"HRJ9" + content[4:])
    with pytest.raises(StartError, match=r"another version of Handrail.*move the file away"):
        list(notes_of(made.path))
    made.remove()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"HRJ1" + bytes(100))
    (tmp_path / "journal-1.left").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StartError, match=rf"journal-1\.left cannot be read: {os.strerror(errno.ELOOP)}.*move it away"):
        list(notes_of(tmp_path / "journal-1.left"))
    (tmp_path / "journal-2").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        Journal(tmp_path, 2)


def test_to_rouse_it_leaves_its_notes_as_they_are(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    journal.rouse()
    assert list(notes_of(journal.path)) == []
    assert journal.note(b"one")
    journal.rouse()
    assert journal.note(b"two")
    journal.rouse()
    journal.close()
    assert list(notes_of(journal.path)) == [(1, b"one"), (2, b"two")]


def test_near_a_full_disk_the_database_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Journal(tmp_path, 1)
    monkeypatch.setattr(journal, "SPARE", 2**62)
    assert not made.note(b"x") and made.last == 0
    made.remove()
