"""The list of mutations names existing lines for every requirement, and its runner reports survivors."""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conformance import ROOT
from tests.mutants import Mutation, Outcome, Tree, files_of, mutations
from tests.requirements import ROWS

EVERY = mutations()


def test_every_requirement_has_a_mutation_and_every_mutation_a_requirement() -> None:
    rows = {one.row for one in EVERY}
    assert not set(ROWS) - rows, f"rows without a mutation in tests/mutations.toml: {sorted(set(ROWS) - rows)}"
    assert not rows - set(ROWS), (
        f"mutations of rows that tests/requirements.py does not list: {sorted(rows - set(ROWS))}"
    )


def test_every_mutation_matches_its_file_and_the_mutated_file_still_compiles() -> None:
    faults: list[str] = []
    for mutation in EVERY:
        before = (ROOT / mutation.file).read_text(encoding="utf-8") if (ROOT / mutation.file).is_file() else ""
        try:
            after = mutation.applied_to(before)
            ast.parse(after)
        except (ValueError, SyntaxError) as error:
            faults.append(f"{mutation}: {error}" if isinstance(error, SyntaxError) else str(error))
        else:
            faults += [f"{mutation}: {mutation.becomes!r} changes nothing"] if after == before else []
    assert not faults, "\n".join(faults)


def test_a_mutation_whose_text_is_missing_or_repeated_is_refused() -> None:
    mutation = Mutation("K-01", "src/some.py", "return 1", "return 2")
    assert mutation.applied_to("def one():\n    return 1\n") == "def one():\n    return 2\n"
    for text in ("def one():\n    return 3\n", "def one():\n    return 1\ndef other():\n    return 1\n"):
        with pytest.raises(ValueError, match=r"K-01 src/some\.py: 'return 1' is in the file \d times; expected once"):
            mutation.applied_to(text)


CODE = """\
def sum_of(one, other):
    return one + other


def name():
    return "sum"
"""
TESTS = """\
import pytest
from some import name, sum_of

pytestmark = pytest.mark.proves("K-01")

def test_sum():
    assert sum_of(2, 3) == 5

class TestName:
    @pytest.mark.parametrize("end", ["m", "a"])
    def test_end(self, end):
        assert name().endswith(end) or end == "a"
"""
FAILING = """\
import pytest
from some import name

@pytest.mark.proves("K-01")
def test_that_always_fails():
    assert name() == "another"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A project of one file of code, with tests of it."""
    for name, text in {"src/some.py": CODE, "checks/test_some.py": TESTS, "conftest.py": ""}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = src\nmarkers = proves(*ids): rows\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return Tree(tmp_path, Path(sys.executable), "checks", environment)


ADDS = Mutation("K-01", "src/some.py", "return one + other", "return one - other")


def test_a_mutation_that_fails_a_test_is_killed_and_undone_and_any_other_survives(tree: Tree) -> None:
    named = replace(ADDS, text='"sum"', becomes='"product"')
    survivor = replace(ADDS, becomes="return other + one")
    assert tree.judge_all([ADDS, named, survivor]) == [
        Outcome(ADDS, "killed", "checks/test_some.py::test_sum"),
        Outcome(named, "killed", "checks/test_some.py::TestName::test_end[m]"),
        Outcome(survivor, "survived", "1 files of tests, none failed"),
    ]
    assert (tree.root / "src/some.py").read_text() == CODE


def test_a_test_that_never_ends_kills_the_mutation(tree: Tree) -> None:
    waits = replace(ADDS, becomes="while True: pass")
    assert replace(tree, test_limit_s=2).judge(waits) == Outcome(waits, "killed", "checks/test_some.py::test_sum")


def test_a_surviving_mutation_needs_a_reason_and_a_killed_one_has_none() -> None:
    with_reason = replace(ADDS, reason="both orders are the same sum")
    assert Outcome(ADDS, "killed", "").is_expected and not Outcome(ADDS, "survived", "").is_expected
    assert Outcome(with_reason, "survived", "").is_expected and not Outcome(with_reason, "killed", "").is_expected
    assert not Outcome(with_reason, "cannot be judged", "").is_expected


def test_a_test_that_fails_without_the_mutation_does_not_kill_it(tree: Tree) -> None:
    (tree.root / "checks" / "test_another.py").write_text(FAILING)
    survivor = replace(ADDS, becomes="return other + one")
    assert [one.state for one in tree.judge_all([survivor, ADDS])] == ["survived", "killed"]


def test_a_mutation_that_breaks_imports_cannot_be_judged(tree: Tree) -> None:
    assert tree.judge(replace(ADDS, text="def sum_of(", becomes="def sum(")).state == "cannot be judged"
    assert tree.judge(replace(ADDS, row="K-02")).state == "cannot be judged", "no test has that mark"


def test_the_tests_closest_to_the_mutated_file_run_first() -> None:
    files = files_of(Mutation("L-02", "src/handrail/arbiter/lock_table.py", "", ""), ROOT)
    assert files[0] == "tests/arbiter/test_locks.py" and "tests/kernel/test_joined.py" in files
