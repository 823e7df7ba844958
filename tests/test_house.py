"""The structure of the code: downward imports, no import cycles, and sizes of folders and files.

Each list of exceptions may only become shorter: a test fails as well where an entry is no longer needed.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import grimp
import pytest
from tests.house import CIRCLES, FULL, LONG, SMALL

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "handrail"
MOST_LINES = 800
MOST_FILES = 15
COMMANDS = "frontends/cli/commands"
"""One file a command, loaded by its name: nobody reads this folder as a whole."""
FEW_LINES = 120


@cache
def arrows() -> dict[str, frozenset[str]]:
    """Module to the modules that it imports: at its top, in functions, and for types."""
    graph = grimp.build_graph("handrail", cache_dir=None)
    return {module: frozenset(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def circles(of: dict[str, frozenset[str]]) -> set[frozenset[str]]:
    """The sets of modules of which each leads to every other."""
    order: list[str] = []
    seen: set[str] = set()
    for start in of:
        path = [(start, iter(of[start]))] if start not in seen else []
        seen.add(start)
        while path:
            module, further = path[-1]
            following = next((one for one in further if one not in seen), None)
            if following is None:
                order.append(path.pop()[0])
                continue
            seen.add(following)
            path.append((following, iter(of[following])))
    back: dict[str, set[str]] = {module: set() for module in of}
    for module, imported in of.items():
        for one in imported:
            back[one].add(module)
    found: set[frozenset[str]] = set()
    placed: set[str] = set()
    for start in reversed(order):
        together: set[str] = set()
        waiting = [start]
        while waiting:
            if (module := waiting.pop()) not in placed:
                placed.add(module)
                together.add(module)
                waiting += back[module]
        if len(together) > 1:
            found.add(frozenset(together))
    return found


def test_an_import_cycle_of_any_length_is_found() -> None:
    of = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles({module: frozenset(ones) for module, ones in of.items()}) == {frozenset("abc"), frozenset("de")}


def test_only_the_listed_files_import_each_other_in_a_circle() -> None:
    found = circles(arrows())
    assert found == {frozenset(f"handrail.{one}" for one in circle) for circle in CIRCLES}


def test_the_top_folder_of_the_package_holds_no_modules_but_init_and_main() -> None:
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_no_source_folder_exceeds_the_file_limit_without_an_exception() -> None:
    counts = Counter(str(path.parent.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
    full = {folder for folder, count in counts.items() if count > MOST_FILES and folder != COMMANDS}
    assert full == FULL, f"more than {MOST_FILES} files: which concept among them has a sub-folder to itself?"


@pytest.mark.parametrize("folder", ["src", "demos", "tests", "bench"])
def test_only_the_listed_files_exceed_the_maximum_number_of_lines(folder: str) -> None:
    files = [path for path in (ROOT / folder).rglob("*.py") if ".venv" not in path.parts]
    long = {str(path.relative_to(ROOT)) for path in files if path.read_bytes().count(b"\n") > MOST_LINES}
    assert long == {path for path in LONG if path.startswith(f"{folder}/")}, f"more than {MOST_LINES} lines"


def test_a_small_file_is_not_imported_by_one_neighbour_only() -> None:
    users: dict[str, set[str]] = {module: set() for module in arrows()}
    for module, imported in arrows().items():
        for one in imported:
            users[one].add(module)
    small: set[str] = set()
    for module, of in users.items():
        path = SOURCE.parent / f"{module.replace('.', '/')}.py"
        if len(of) == 1 and path.is_file() and path.read_bytes().count(b"\n") < FEW_LINES:
            (user,) = of
            if user.rpartition(".")[0] == module.rpartition(".")[0]:
                small.add(module.removeprefix("handrail."))
    assert small == SMALL, "a file that one neighbour imports is a part of that neighbour"
