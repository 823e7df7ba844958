"""The requirements manifest and the tests agree, in both directions."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from tests.conformance import ROW_ID, TABLE, Proof, UnreadableMark, proofs, render
from tests.requirements import ROWS

pytestmark = pytest.mark.xdist_group("requirements")  # all tests are read once


@cache
def claims() -> tuple[Proof, ...]:
    return tuple(proofs())


def test_every_listed_row_has_a_test_that_proves_it() -> None:
    shown = {claim.row for claim in claims()}
    missing = sorted(set(ROWS) - shown)
    assert not missing, f"rows without a test: {', '.join(missing)}"


def test_no_test_names_a_row_that_is_not_listed() -> None:
    strangers = [claim for claim in claims() if claim.row not in ROWS]
    ids = sorted({claim.row for claim in strangers})
    assert not strangers, (
        f"{len(ids)} ids are named by tests and missing in tests/requirements.py: {', '.join(ids)}\n"
        + "\n".join(f"  {claim.row}  {claim}" for claim in strangers)
    )


def test_each_row_is_an_id_and_one_sentence() -> None:
    for row, sentence in ROWS.items():
        assert ROW_ID.match(row), f"{row!r} is not an id like K-07 or P-05a"
        assert sentence.strip() == sentence and len(sentence) > 20 and sentence.endswith("."), row


def test_the_published_table_is_up_to_date() -> None:
    assert TABLE.read_text(encoding="utf-8") == render(ROWS, [*claims()]), "run: make docs"


def test_marks_are_found_on_functions_classes_and_whole_files(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        'pytestmark = [pytest.mark.slow, pytest.mark.proves("K-01")]\n'
        '@pytest.mark.proves("L-02", "L-03")\n'
        "async def test_one(): ...\n"
        '@pytest.mark.proves("X-01")\n'
        "class TestMore:\n"
        "    def test_two(self): ...\n"
        "    def no_test(self): ...\n"
    )
    assert proofs(tmp_path, tmp_path) == [
        Proof("K-01", "test_some.py", 4, "test_one"),
        Proof("L-02", "test_some.py", 4, "test_one"),
        Proof("L-03", "test_some.py", 4, "test_one"),
        Proof("K-01", "test_some.py", 7, "test_two"),
        Proof("X-01", "test_some.py", 7, "test_two"),
    ]


def test_a_mark_that_cannot_be_read_without_running_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("@pytest.mark.proves(*IDS)\ndef test_one(): ...\n")
    with pytest.raises(UnreadableMark, match=r"test_some\.py:1"):
        proofs(tmp_path, tmp_path)
