"""Break one line of each requirement's implementation, and check that one of its tests fails: ``make mutants``.

Run ``python -m tests.mutants`` for every row, or name rows: ``python -m tests.mutants K-04 S-11``. Each mutation of
``tests/mutations.toml`` is made by itself, in a copy of the checkout with a copy of its virtual environment. The tests with the row's
``proves`` mark run until one fails or takes too long. At the end all tests that failed run once without any mutation: one that fails anyway
counts for nothing, and what it noticed is judged again without it. A mutation that no test notices survives: the run fails, unless the
mutation gives a reason.

``--tree FOLDER`` makes the copy there and leaves it, so that the next run only copies what changed.

pytest loads this file as a plugin too, which chooses the tests and writes down those that fail.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
from tests.conformance import ROOT, Proof, proofs

LIST = ROOT / "tests" / "mutations.toml"
TIME_LIMIT_S = 1_200
PLUGINS = ("tests.mutants", "pytest_asyncio.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""Those that the tests need: to load all that are installed takes longer than most rows."""

State = Literal["killed", "survived", "cannot be judged"]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one file that breaks what a row says.

    :param file: the path, from the root of the checkout
    :param text: what is replaced
    :param becomes: what it is replaced with
    :param reason: why no test of the row can notice it; ``""`` where one has to
    """

    row: str
    file: str
    text: str
    becomes: str
    reason: str = ""

    def applied_to(self, source: str) -> str:
        """The file's text with the change.

        :raises ValueError: when what is replaced is not there exactly once
        """
        if (count := source.count(self.text)) != 1:
            raise ValueError(
                f"{self}: {self.text!r} is in the file {count} times; expected once. Name a line that is there now"
            )
        return source.replace(self.text, self.becomes)

    def __str__(self) -> str:
        return f"{self.row} {self.file}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a row's tests for one mutation.

    :param detail: the test that noticed it, or why nothing can be said
    """

    mutation: Mutation
    state: State
    detail: str

    @property
    def is_expected(self) -> bool:
        """Killed, or a survivor with a reason; a reason for a mutation that is killed is out of date."""
        return self.state == ("survived" if self.mutation.reason else "killed")


@dataclass(slots=True)
class Tree:
    """A copy of a checkout in which single lines are broken.

    :param root: the copy's folder
    :param python: an interpreter that imports the package from the copy
    :param tests: the folder of its tests, beneath ``root``
    :param test_limit_s: a test that takes longer fails: it waits for what the mutation keeps from it
    """

    root: Path
    python: Path
    tests: str = "tests"
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    test_limit_s: int = 120

    def judge(self, mutation: Mutation, left_out: Collection[str] = ()) -> Outcome:
        """Run the row's tests on the mutated tree, the nearest file's first, until one fails.

        :param left_out: the tests that fail without the mutation too
        """
        files = files_of(mutation, self.root, self.tests)
        ran = False
        with self.mutated(mutation):
            for some in (files[:1], files[1:]):
                if not some:
                    continue
                code, failed, said = self.run(some, row=mutation.row, left_out=left_out)
                if code == pytest.ExitCode.TESTS_FAILED and failed:
                    return Outcome(mutation, "killed", failed[0])
                if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                    return Outcome(mutation, "cannot be judged", said)
                ran = ran or code == pytest.ExitCode.OK
        if not ran:
            return Outcome(mutation, "cannot be judged", "no test of its row runs here")
        return Outcome(mutation, "survived", f"{len(files)} files of tests, none failed")

    def judge_all(self, wanted: Sequence[Mutation], tell: Callable[[Outcome], None] = lambda _: None) -> list[Outcome]:
        """Judge each mutation. Whatever a failing test says of one counts only if it passes without any.

        :param tell: is given each outcome as it comes
        """
        outcomes: dict[Mutation, Outcome] = {}
        failing: set[str] = set()
        left = list(wanted)
        while left:
            for mutation in left:
                tell(outcome := self.judge(mutation, failing))
                outcomes[mutation] = outcome
            noticed = {one.detail for one in outcomes.values() if one.state == "killed"} - failing
            files = sorted({test.partition("::")[0] for test in noticed})
            more = set(self.run(files, only=noticed)[1]) if files else set[str]()
            failing |= more
            left = [mutation for mutation, one in outcomes.items() if one.state == "killed" and one.detail in more]
        return [outcomes[mutation] for mutation in wanted]

    @contextmanager
    def mutated(self, mutation: Mutation) -> Generator[None]:
        """The tree with the one change, which is undone afterwards.

        :raises ValueError: when the text is not there, or more than once
        """
        path = self.root / mutation.file
        before = path.read_text(encoding="utf-8")
        stamp = int(path.stat().st_mtime)
        path.write_text(mutation.applied_to(before), encoding="utf-8")
        os.utime(path, (stamp + 10, stamp + 10))  # compiled code is kept by size and whole seconds
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")
            os.utime(path, (stamp + 20, stamp + 20))

    def run(
        self, files: Sequence[str], *, row: str = "", left_out: Collection[str] = (), only: Collection[str] = ()
    ) -> tuple[int, list[str], str]:
        """
        :param row: run the tests of this row until one fails
        :param only: or exactly these, whatever becomes of them
        :returns: pytest's exit code, the tests that failed, and the end of what pytest wrote
        """
        with tempfile.TemporaryDirectory() as folder:
            chosen, told = Path(folder) / "chosen", Path(folder) / "failed"
            chosen.write_text(json.dumps({"row": row, "left_out": [*left_out], "only": [*only]}))
            told.touch()
            command = [
                *(self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"-p{name}" for name in PLUGINS)),
                *("--chosen", chosen, "--failed", told, f"--basetemp={folder}/work"),
                *(f"--timeout={self.test_limit_s}", "--timeout-method=signal", *(["-x"] if row else []), *files),
            ]
            try:
                done = subprocess.run(
                    command,
                    cwd=self.root,
                    env={**self.environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=TIME_LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return -1, [], f"its tests took more than {TIME_LIMIT_S} s"
            said = done.stdout.decode("utf-8", "replace").strip()[-2_000:]
            return done.returncode, told.read_text().splitlines(), said


def mutations(path: Path = LIST) -> list[Mutation]:
    """The list, in the order of its file."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Mutation(row, **each) for row, several in rows.items() for each in several]


def files_of(mutation: Mutation, root: Path, tests: str = "tests") -> list[str]:
    """The files with tests of a mutation's row, those of the mutated module's room first."""
    files = dict.fromkeys(claim.file for claim in _claims(root, tests) if claim.row == mutation.row)
    rooms = Path(mutation.file).with_suffix("").parts[1:]

    def distance(file: str) -> int:
        stem = Path(file).stem.removeprefix("test_")
        return -sum((rooms[-1] in stem or stem in rooms[-1], *(room in Path(file).parts for room in rooms[:-1])))

    return sorted(files, key=distance)


@cache
def _claims(root: Path, tests: str) -> list[Proof]:
    """Read once: that takes as long as the tests of a row."""
    return proofs(root / tests, root)


def copied(root: Path, tree: Path) -> Tree:
    """Copy what git knows of a checkout, and its virtual environment, to ``tree``; only what differs is written.

    :raises RuntimeError: when the copy does not import the package from itself
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name and (root / os.fsdecode(name)).is_file()}
    for name in sorted(names):
        source, target = root / name, tree / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for folder in ("src", "tests"):
        for path in (tree / folder).rglob("*.py"):
            if str(path.relative_to(tree)) not in names:
                path.unlink()
    if not (tree / ".venv").exists():
        shutil.copytree(root / ".venv", tree / ".venv", symlinks=True)
        for path in [*(tree / ".venv" / "bin").iterdir(), *(tree / ".venv").rglob("*.pth")]:
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            if b"\0" not in content and os.fsencode(root) in content:
                path.write_bytes(content.replace(os.fsencode(root), os.fsencode(tree)))
    python = tree / ".venv" / "bin" / "python"
    subprocess.run([python, "-m", "compileall", "-q", "src"], cwd=tree, check=False)  # what tests start writes none
    asked = [python, "-c", "import handrail; print(handrail.__file__)"]
    found = Path(subprocess.run(asked, capture_output=True, text=True, check=True, cwd=tree).stdout.strip())
    if not found.is_relative_to(tree):
        raise RuntimeError(f"the copy in {tree} imports {found}; remove {tree}, and run make setup in {root} again")
    return Tree(tree, python)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants", description="Break one line of each row, and run its tests.")
    parser.add_argument("--tree", type=Path, help="where to make the copy, and leave it; by default a temporary folder")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="only these rows; by default all")
    given = parser.parse_args(arguments)
    every = mutations()
    if unknown := sorted(set(given.rows) - {one.row for one in every}):
        print(f"there is no mutation of {', '.join(unknown)}", file=sys.stderr)
        return 2
    wanted = [one for one in every if not given.rows or one.row in given.rows]
    with tempfile.TemporaryDirectory(prefix="handrail-mutants-") as temporary:
        tree = copied(ROOT, Path(os.path.realpath(given.tree or temporary)))
        outcomes = tree.judge_all(wanted, lambda one: print(f"{one.state:16} {one.mutation}: {one.detail}", flush=True))
    bad = [one for one in outcomes if not one.is_expected]
    killed = sum(one.state == "killed" for one in outcomes)
    print(f"{len(outcomes)} mutations, {killed} killed, {len(outcomes) - killed - len(bad)} survive for a reason")
    for one in bad:
        print(f"{one.state}: {one.mutation}\n    {one.mutation.text!r}\n    {one.mutation.becomes!r}")
    return 1 if bad else 0


# ── the plugin ───────────────────────────────────────────────────────────────────────────────────────


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chosen", required=True, help="JSON that says which tests run")
    parser.addoption(
        "--failed", type=Path, required=True, help="a file for the ids of the tests that fail, a line each"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = json.loads(Path(str(config.getoption("--chosen"))).read_text())

    def is_chosen(item: pytest.Item) -> bool:
        if not chosen["row"]:
            return item.nodeid in chosen["only"]
        if item.get_closest_marker("slow") is not None:
            return False  # each has a small form
        proves = any(chosen["row"] in mark.args for mark in item.iter_markers("proves"))
        return proves and item.nodeid not in chosen["left_out"]

    items[:] = [item for item in items if is_chosen(item)]


class _Failures:
    def __init__(self, told: Path) -> None:
        self.told = told

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.told.open("a") as file:
                file.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Failures(Path(str(config.getoption("--failed")))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
