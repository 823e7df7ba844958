"""The benches stay runnable: each loads, names only what there is, and says how it is used.

None is carried out here: that takes minutes, and the systems that some compare with are not installed for tests.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
SCRIPTS = sorted(
    path.relative_to(BENCH).as_posix() for part in (".", "finding") for path in (BENCH / part).glob("*.py")
)
WITH_OPTIONS = [name for name in SCRIPTS if "ArgumentParser(" in (BENCH / name).read_text(encoding="utf-8")]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a bench finds the files beside it; what it loads of them is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])  # some add to it themselves
    yield
    for name in set(sys.modules) - before:
        place = getattr(sys.modules[name], "__file__", None)
        if place is not None and Path(place).is_relative_to(BENCH):
            del sys.modules[name]


def imported(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Module and name of everything of Handrail's and of the tests' that is imported, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found: list[tuple[str, str | None]] = [(one.name, None) for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found = [(node.module, one.name) for one in node.names]
        else:
            continue
        yield from ((module, name) for module, name in found if module.split(".")[0] == "handrail")


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_loads_and_names_only_what_there_is(script: str, beside: None) -> None:
    path = BENCH / script
    for module, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        there = importlib.import_module(module)
        assert name is None or hasattr(there, name) or importlib.util.find_spec(f"{module}.{name}"), (module, name)
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look themselves up
    spec.loader.exec_module(loaded)
    assert loaded.__doc__, "the first lines say what it measures"


@pytest.mark.parametrize("script", WITH_OPTIONS)
def test_it_says_how_it_is_used(
    script: str, beside: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / script), run_name="__main__")
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out
