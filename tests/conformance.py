"""Generate ``docs/conformance.md``: the tests that prove each requirement, read from their source.

Run ``python -m tests.conformance`` to write all generated pages: this one, the drawing of the rooms, ``docs/llms.txt`` and the
generated references of ``docs/reference/``. ``--check`` compares them. For this one nothing is imported or run: marks are found in the syntax, so the answer does not depend on which tests a machine can run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tests.requirements import ROWS

TESTS = Path(__file__).parent
ROOT = TESTS.parent
TABLE = ROOT / "docs" / "conformance.md"
ROW_ID = re.compile(r"[A-Z]-\d{2}[a-z]?\Z")

ROOMS = {
    "K": "The contract",
    "R": "Registry and sources",
    "D": "Discovery",
    "P": "Permission",
    "S": "Sandbox",
    "L": "Arbiter and locks",
    "X": "Modes and jobs",
    "O": "Output",
    "G": "Record",
    "A": "Agent",
    "F": "Frontends",
    "T": "Tools",
    "N": "Scale",
}


@dataclass(frozen=True, slots=True)
class Proof:
    """One test that claims one row."""

    row: str
    file: str
    line: int
    test: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.test}"


class UnreadableMark(ValueError):
    """A ``proves`` mark that shows nothing: its ids are not plain strings, or it is not on a test that pytest collects and runs."""


def proofs(folder: Path = TESTS, root: Path = ROOT) -> list[Proof]:
    """Every claim under ``folder``, in the order of files and lines.

    :raises UnreadableMark: when a mark's ids are not string literals, or when a mark is on something that is not a test
    """
    found: list[Proof] = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "proves" in text:
            found += _File(path.relative_to(root).as_posix(), ast.parse(text, filename=str(path))).proofs()
    return found


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class _File:
    """The marks of one file of Python."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name = name
        self.tree = tree
        self.read: set[ast.AST] = set()
        """The marks that were found on a test, a class or the file."""

    def proofs(self) -> list[Proof]:
        marks = [
            node.value
            for node in self.tree.body
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
        ]
        rows = self.rows(marks)
        ends = [node.value for node in self.tree.body if isinstance(node, ast.Expr) and _ends_it(node)]
        found = list(self.claims(self.tree.body, rows, never_runs([*marks, *ends])))
        if rows and not found:
            raise self.refusal(marks[0], "the file has no test that runs")
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and node.attr == "proves" and node not in self.read:
                raise self.refusal(node, "it is not a decorator of a test, and not in the file's pytestmark")
        if found and not re.fullmatch(r"test_.*\.py", Path(self.name).name):
            raise self.refusal(self.tree.body[0], "pytest collects tests from files named test_*.py only")
        return found

    def claims(self, body: list[ast.stmt], inherited: tuple[str, ...], skipped: str | None) -> Iterator[Proof]:
        for place, node in enumerate(body):
            if not isinstance(node, _Definition):
                continue
            own = self.rows(node.decorator_list)
            problem = skipped or never_runs(node.decorator_list) or _not_collected(node, body[place + 1 :])
            rows = tuple(dict.fromkeys(inherited + own))
            found: list[Proof] = []
            if isinstance(node, ast.ClassDef):
                found += self.claims(node.body, rows, problem)
                problem = problem or "the class has no test that runs"
            elif problem is None:
                found += (Proof(row, self.name, node.lineno, node.name) for row in rows)
            if own and not found:
                raise self.refusal(node, f"{node.name} shows nothing: {problem}")
            yield from found

    def rows(self, marks: list[ast.expr]) -> tuple[str, ...]:
        return tuple(row for mark in marks for row in self._rows(mark))

    def _rows(self, mark: ast.expr) -> Iterator[str]:
        for node in ast.walk(mark):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "proves":
                self.read.add(node.func)
                for argument in node.args:
                    if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                        raise self.refusal(node, "it takes row ids as plain strings")
                    yield argument.value

    def refusal(self, node: ast.AST, problem: str) -> UnreadableMark:
        return UnreadableMark(
            f"{self.name}:{getattr(node, 'lineno', 1)}: a proves(…) mark cannot be counted: {problem}. "
            "Put the mark on a test that runs, or remove it"
        )


def _not_collected(node: _Definition, later: list[ast.stmt]) -> str | None:
    """Why pytest does not run a definition as a test or a class of tests, or why its run shows nothing."""
    if node.name in {name for other in later for name in _bound(other)}:
        return "the same name is defined again below"
    if isinstance(node, ast.ClassDef):
        names = {name for part in node.body for name in _bound(part)}
        if not node.name.startswith("Test"):
            return "the name of a class of tests begins with Test"
        if "__init__" in names or "__new__" in names:
            return "pytest does not collect a class with a constructor"
        return "__test__ is set" if "__test__" in names else None
    if any(_name(part).endswith("fixture") for part in node.decorator_list):
        return "it is a fixture"
    if not node.name.startswith("test"):
        return "the name of a test begins with test"
    rest = [part for part in node.body if not isinstance(part, ast.Pass) and not _is_constant(part)]
    if not rest:
        return "it has no statement"
    return "its first statement ends it" if _ends_it(rest[0]) else None


def never_runs(marks: list[ast.expr]) -> str | None:
    """Why pytest never runs, or never counts, what has these marks."""
    each = [one.elts if isinstance(one, ast.List | ast.Tuple) else [one] for one in marks]
    for mark in chain.from_iterable(each):
        name, call = _name(mark), mark if isinstance(mark, ast.Call) else None
        conditions = [*call.args] if call else []
        if name.endswith(".skip"):
            return "it is always skipped"
        if name.endswith(".skipif") and conditions and all(_is_true(one) for one in conditions):
            return "it is always skipped"
        if name.endswith(".xfail") and all(_is_true(one) for one in conditions):
            return "it is expected to fail"
        if name.endswith(".parametrize") and len(conditions) > 1:
            values = conditions[1]
            if isinstance(values, ast.List | ast.Tuple | ast.Set) and not values.elts:
                return "it is parametrized with no value"
    return None


def _ends_it(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and _name(node.value) in ("pytest.skip", "pytest.xfail")


def _name(node: ast.expr) -> str:
    """The dotted name of a mark or of what is called, ``pytest.mark.skip`` for ``pytest.mark.skip(reason="…")``."""
    while isinstance(node, ast.Call):
        node = node.func
    return ast.unparse(node)


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and bool(node.value)


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement defines or assigns."""
    if isinstance(node, _Definition):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def render(rows: dict[str, str], claims: list[Proof]) -> str:
    """The table as Markdown."""
    tests: defaultdict[str, list[Proof]] = defaultdict(list)
    for claim in claims:
        tests[claim.row].append(claim)
    lines = [
        "# Requirements and the tests that show them",
        "",
        "Written by `make docs` from `tests/requirements.py` and the tests' `proves` marks; `make lint` fails when it",
        "is out of date. A letter after a number marks a part of a requirement; the other parts are not done.",
    ]
    for letter, title in ROOMS.items():
        ids = sorted(row for row in rows if row.startswith(f"{letter}-"))
        if ids:
            lines += ["", f"## {letter} · {title}", "", "| row | requirement | tests |", "|---|---|---|"]
        for row in ids:
            shown = "<br>".join(f"`{claim.file}` {_sentence(claim.test)}" for claim in tests[row])
            lines.append(f"| {row} | {rows[row].replace('|', '&#124;')} | {shown} |")
    return "\n".join(lines) + "\n"


def _sentence(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def pages() -> dict[Path, str]:
    """Return the text of every generated file."""
    from tests import (  # import the package, which the table of proofs does not
        api_reference,
        cli_reference,
        house_drawing,
        kind_reference,
        protected_names,
        setting_reference,
        site_index,
        tool_reference,
    )

    found = {
        TABLE: render(ROWS, proofs()),
        tool_reference.TABLE: tool_reference.render(),
        tool_reference.OUTPUT_SCHEMAS: tool_reference.render_output_schemas(),
        cli_reference.PAGE: cli_reference.render(),
        setting_reference.PAGE: setting_reference.render(),
        **kind_reference.pages(),
        **api_reference.pages(),
        protected_names.TABLE: protected_names.render(),
        house_drawing.DRAWING: house_drawing.render(),
    }
    return found | {site_index.INDEX: site_index.render(found)}


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        old = [page for page, text in pages().items() if not page.exists() or page.read_text(encoding="utf-8") != text]
        for page in old:
            print(f"{page.relative_to(ROOT)} is out of date; run: make docs", file=sys.stderr)
        return 1 if old else 0
    if arguments:
        print(f"unknown argument {arguments[0]!r}; there is only --check", file=sys.stderr)
        return 2
    for page, text in pages().items():
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
