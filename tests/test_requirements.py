"""The list of requirements and the tests agree, in both directions."""

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


def test_every_requirement_has_a_test_that_proves_it() -> None:
    shown = {claim.row for claim in claims()}
    missing = sorted(set(ROWS) - shown)
    assert not missing, f"rows without a test: {', '.join(missing)}"


def test_no_test_names_an_unlisted_requirement() -> None:
    strangers = [claim for claim in claims() if claim.row not in ROWS]
    ids = sorted({claim.row for claim in strangers})
    assert not strangers, (
        f"{len(ids)} ids are named by tests and missing in tests/requirements.py: {', '.join(ids)}\n"
        + "\n".join(f"  {claim.row}  {claim}" for claim in strangers)
    )


def test_every_requirement_is_an_id_and_a_sentence() -> None:
    for row, sentence in ROWS.items():
        assert ROW_ID.match(row), f"{row!r} is not an id like K-07 or P-05a"
        assert sentence.strip() == sentence and len(sentence) > 20 and sentence.endswith("."), row


def test_the_published_table_of_requirements_is_up_to_date() -> None:
    assert TABLE.read_text(encoding="utf-8") == render(ROWS, [*claims()]), "run: make docs"


def test_proof_marks_are_found_on_functions_classes_and_files(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        'pytestmark = [pytest.mark.slow, pytest.mark.proves("K-01")]\n'
        '@pytest.mark.proves("L-02", "L-03")\n'
        "async def test_one(): assert one()\n"
        '@pytest.mark.proves("X-01")\n'
        "class TestMore:\n"
        "    def test_two(self): assert two()\n"
        "    def no_test(self): ...\n"
        "@pytest.mark.skip\n"
        "def test_three(): assert three()\n"
    )
    assert proofs(tmp_path, tmp_path) == [
        Proof("K-01", "test_some.py", 4, "test_one"),
        Proof("L-02", "test_some.py", 4, "test_one"),
        Proof("L-03", "test_some.py", 4, "test_one"),
        Proof("K-01", "test_some.py", 7, "test_two"),
        Proof("X-01", "test_some.py", 7, "test_two"),
    ]


def test_a_proof_mark_that_cannot_be_read_without_running_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("@pytest.mark.proves(*IDS)\ndef test_one(): assert one()\n")
    with pytest.raises(UnreadableMark, match=r"test_some\.py:1"):
        proofs(tmp_path, tmp_path)


MARK = '@pytest.mark.proves("K-01")\n'
NO_TESTS = {
    "a helper": f"{MARK}def helper(): assert one()\n",
    "a fixture": f"{MARK}@pytest.fixture\ndef test_data(): return one()\n",
    "a fixture with arguments": f'{MARK}@pytest.fixture(scope="session")\ndef test_data(): return one()\n',
    "a class without tests": f"{MARK}class TestOne:\n    def helper(self): assert one()\n",
    "a class of another name": f"{MARK}class One:\n    def test_one(self): assert one()\n",
    "a class with a constructor": f"{MARK}class TestOne:\n    def __init__(self): ...\n    def test_one(self): assert one()\n",
    "a class that is switched off": f"{MARK}class TestOne:\n    __test__ = False\n    def test_one(self): assert one()\n",
    "a class of skipped tests": f"{MARK}class TestOne:\n    @pytest.mark.skip\n    def test_one(self): assert one()\n",
    "a test in a class of another name": f"class One:\n    {MARK}    def test_one(self): assert one()\n",
    "a test in a function": f"def test_all():\n    {MARK}    def test_one(): assert one()\n",
    "a test in a branch": f"if one():\n    {MARK}    def test_one(): assert one()\n",
    "a name that is used again": f"{MARK}def test_one(): assert one()\ndef test_one(): ...\n",
    "a name that is assigned": f"{MARK}def test_one(): assert one()\ntest_one = None\n",
    "a mark that is called": 'TestOne = pytest.mark.proves("K-01")(One.TestCase)\n',
    "a mark of one value": 'VALUES = [pytest.param(1, marks=pytest.mark.proves("K-01"))]\n',
    "a skipped test": f"{MARK}@pytest.mark.skip(reason='later')\ndef test_one(): assert one()\n",
    "a test that is always skipped": f"{MARK}@pytest.mark.skipif(True, reason='later')\ndef test_one(): assert one()\n",
    "a test that is expected to fail": f"{MARK}@pytest.mark.xfail\ndef test_one(): assert one()\n",
    "a test for no value": f"{MARK}@pytest.mark.parametrize('n', [])\ndef test_one(n): assert one()\n",
    "a test that skips itself": f"{MARK}def test_one():\n    'Later.'\n    pytest.skip('later')\n    assert one()\n",
    "an empty test": f"{MARK}def test_one():\n    'Later.'\n    ...\n",
    "a skipped file": 'pytestmark = [pytest.mark.proves("K-01"), pytest.mark.skip]\ndef test_one(): assert one()\n',
    "a file that skips itself": f"pytest.skip('later', allow_module_level=True)\n{MARK}def test_one(): assert one()\n",
    "a file without tests": 'pytestmark = pytest.mark.proves("K-01")\ndef helper(): assert one()\n',
}


@pytest.mark.parametrize("text", NO_TESTS.values(), ids=NO_TESTS)
def test_a_proof_mark_on_code_that_is_not_a_test_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(text)
    with pytest.raises(
        UnreadableMark, match=r"test_some\.py:\d+: a proves\(…\) mark cannot be counted: .*Put the mark on"
    ):
        proofs(tmp_path, tmp_path)


def test_a_proof_mark_in_a_file_that_pytest_does_not_collect_is_refused(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text(f"{MARK}def test_one(): assert one()\n")
    with pytest.raises(UnreadableMark, match=r"helpers\.py:\d+: .*named test_"):
        proofs(tmp_path, tmp_path)


def test_a_conditionally_skipped_test_still_counts_as_a_proof(tmp_path: Path) -> None:
    text = f'{MARK}@pytest.mark.skipif(os.name == "nt", reason="POSIX")\ndef test_one(): assert one()\n'
    (tmp_path / "test_some.py").write_text(text)
    assert [claim.test for claim in proofs(tmp_path, tmp_path)] == ["test_one"]
