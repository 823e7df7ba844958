"""Which test proves which requirement row: read from the tests' source, written to ``docs/conformance.md``.

Run ``python -m tests.conformance`` to write the generated pages, this one and those of :mod:`tests.tool_reference` and :mod:`tests.protected_names`, and
``--check`` to compare them. For this one nothing is imported or run: marks are found in the syntax, so the answer does not depend on which tests a machine can run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
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
    "F": "Faces",
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
    """A ``proves`` mark whose ids are not plain strings, so that nobody can find them by reading."""


def proofs(folder: Path = TESTS, root: Path = ROOT) -> list[Proof]:
    """Every claim under ``folder``, in the order of files and lines.

    :raises UnreadableMark: when a mark's ids are not string literals
    """
    found: list[Proof] = []
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        file = path.relative_to(root).as_posix()
        whole_file = [
            row
            for node in tree.body
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
            for row in _rows(ast.walk(node.value), file)
        ]
        found += _claims(tree.body, file, tuple(whole_file))
    return found


def _claims(body: list[ast.stmt], file: str, inherited: tuple[str, ...]) -> Iterator[Proof]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        own = tuple(_rows((part for mark in node.decorator_list for part in ast.walk(mark)), file))
        if isinstance(node, ast.ClassDef):
            yield from _claims(node.body, file, inherited + own)
        elif node.name.startswith("test"):
            for row in dict.fromkeys(inherited + own):
                yield Proof(row, file, node.lineno, node.name)


def _rows(nodes: Iterator[ast.AST], file: str) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "proves":
            for argument in node.args:
                if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
                    raise UnreadableMark(f"{file}:{node.lineno}: proves(…) takes row ids as plain strings")
                yield argument.value


def render(rows: dict[str, str], claims: list[Proof]) -> str:
    """The table as Markdown."""
    tests: defaultdict[str, list[Proof]] = defaultdict(list)
    for claim in claims:
        tests[claim.row].append(claim)
    lines = [
        "# What works, and which test shows it",
        "",
        "Written by `make docs` from `tests/requirements.py` and the tests' `proves` marks; `make lint` fails when it",
        "is out of date. A letter after a number marks a row of which only the part described is done.",
    ]
    for letter, title in ROOMS.items():
        ids = sorted(row for row in rows if row.startswith(f"{letter}-"))
        if ids:
            lines += ["", f"## {letter} · {title}", "", "| row | what holds | shown by |", "|---|---|---|"]
        for row in ids:
            shown = "<br>".join(f"`{claim.file}` {_sentence(claim.test)}" for claim in tests[row])
            lines.append(f"| {row} | {rows[row].replace('|', '&#124;')} | {shown} |")
    return "\n".join(lines) + "\n"


def _sentence(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def main(arguments: list[str]) -> int:
    from tests import protected_names, tool_reference  # import the tools, which the table of proofs does not

    pages = {
        TABLE: render(ROWS, proofs()),
        tool_reference.TABLE: tool_reference.render(),
        protected_names.TABLE: protected_names.render(),
    }
    if arguments == ["--check"]:
        old = [page for page, text in pages.items() if not page.exists() or page.read_text(encoding="utf-8") != text]
        for page in old:
            print(f"{page.relative_to(ROOT)} is out of date; run: make docs", file=sys.stderr)
        return 1 if old else 0
    if arguments:
        print(f"unknown argument {arguments[0]!r}; there is only --check", file=sys.stderr)
        return 2
    TABLE.parent.mkdir(exist_ok=True)
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
