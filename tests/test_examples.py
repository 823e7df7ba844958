"""Run each program of ``examples/`` and compare its output with the end of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest
from tests.snippets import ROOT, Folder
from tests.test_public import beyond

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def documented_output(text: str) -> str:
    """Return the output that an example's docstring promises."""
    docstring = ast.get_docstring(ast.parse(text)) or ""
    return dedent(docstring.partition("Output::\n\n")[2]).strip()


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_prints_the_output_in_its_docstring(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    folder = Folder(tmp_path)
    folder.prepare("")
    done = folder.program(text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == documented_output(text) != ""


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_imports_public_names_only(path: Path) -> None:
    assert not list(beyond(path.read_text(encoding="utf-8")))


def test_the_readme_of_the_examples_lists_each_one() -> None:
    shown = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert EXAMPLES and all(f"[{path.name}]({path.name})" in shown for path in EXAMPLES)
