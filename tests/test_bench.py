"""The benchmarks run: each loads, has help, uses existing names, and completes its smallest round.

What they find here says nothing: counts are the smallest, and the systems that some compare with are left out where they
are not installed.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import json
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.prefork import command as prefork

from handrail.catalog.embedders.minilm import explain_model_unavailable
from handrail.session.inbound import trigger_scheduler
from handrail.testing import temporary_kernel

BENCH = Path(__file__).parent.parent / "bench"
SCRIPTS = sorted(
    path.relative_to(BENCH).as_posix() for part in (".", "finding") for path in (BENCH / part).glob("*.py")
)
WITH_OPTIONS = [name for name in SCRIPTS if "ArgumentParser(" in (BENCH / name).read_text(encoding="utf-8")]


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import files next to a benchmark as it does, and remove them afterwards."""
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


def loaded(script: str) -> ModuleType:
    path = BENCH / script
    spec = importlib.util.spec_from_file_location(f"bench_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look themselves up
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_loads_and_imports_only_existing_names(script: str, beside: None) -> None:
    path = BENCH / script
    for module, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        there = importlib.import_module(module)
        assert name is None or hasattr(there, name) or importlib.util.find_spec(f"{module}.{name}"), (module, name)
    assert loaded(script).__doc__, "the first lines say what it measures"


@pytest.mark.parametrize("script", WITH_OPTIONS)
def test_a_benchmark_prints_its_usage(
    script: str, beside: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH / script), run_name="__main__")
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


def _first_four_calls(bench: ModuleType) -> Any:
    return bench.SESSION[:4]


@dataclass(frozen=True)
class Least:
    """The least that a bench can measure.

    :param constants: of its module, in place of its own; a function is given the module
    :param arguments: on its command line; ``{folder}`` is one of the test's
    :param says: what it prints of Handrail's own figures
    :param handrail: its constant of what starts the program; ``python``: of what starts Python with this script
    """

    says: str
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arguments: tuple[str, ...] = ()
    handrail: str = ""
    python: str = ""


def short_reply(bench: Any) -> object:
    return bench.Recorded(45, 50, "a", 5), bench.Recorded(55, 60, "a", 5)


LEAST = {
    "approvals.py": Least("answer one", {"PENDING": 8, "ROUNDS": 2}),
    "call.py": Least(
        "handrail, nine steps", {"ROUNDS": 1, "CALLS": 2, "SUSTAINED": 10, "CALLERS": 2, "CALLS_OF_EACH": 100}
    ),
    "catalog.py": Least("published:", {"TOKENS_TOOLS": 40, "PUBLISHED": 40, "ROUNDS": 2, "SOURCES": 2, "EACH": 6}),
    "jobs.py": Least("all ended and on record", {"JOBS": 2, "IDLE_S": 0.01, "STOPS": 1}),
    "joining.py": Least("ours, a handler that waits once", {"ROUNDS": 1, "CALLS": 2}, python="STARTED"),
    "language_server.py": Least("servers left", {}, ("--symbols", "0", "--edits", "2", "--sessions", "1")),
    "locks.py": Least("4 waiters", {"CALLS": 4, "ROUNDS": 1, "SIZES": (2, 4)}),
    "log_writer.py": Least(
        "in the caller", {}, ("--callers", "2", "--rounds", "1", "--calls", "8", "--appends", "100")
    ),
    "many.py": Least("memory:", {"SESSIONS": 2, "TOOLS": 3, "ROUNDS": 1, "CALLS": 4, "MANY_TOOLS": 20}),
    "mcp_http.py": Least("no call failed", {"CLIENTS": 2, "CALLS": 2}, python="STARTED"),
    "mcp_stdio.py": Least("handrail:", {"ROUNDS": 1, "CALLS": 2, "SERVERS": ("handrail",)}, python="STARTED"),
    "memory.py": Least("made-up dialogues", {}, ("--words",)),
    "patches.py": Least("last hunk wrong", {}, ("--commits", "1")),
    "policy.py": Least("shell: three commands", {"CALLS": 2, "ROUNDS": 1}),
    "extraction.py": Least("docs", {}, ("--data", "{folder}")),
    "questions.py": Least("accept-edits", {}, ("--first", "1")),
    "repository_overview.py": Least("20 files: first call", {}, ("--files", "20", "--repeats", "1")),
    "retrieval.py": Least(
        "shipped, unseen", {"SIZES": ()}, ("--data", "{folder}", "--limit", "2", "--speed", "--shipped")
    ),
    "real_tools.py": Least("1 MB printed", {"ROUNDS": 2, "REPLIES": 1, "PRINTED_MB": 1}),
    "sandbox.py": Least("2 calls at once", {"PAUSE_S": 0, "ROW": 2, "AT_ONCE": 2, "BURSTS": 1}, ("1",)),
    "search.py": Least("handrail, unconfined", {"FILES": 20, "BYTES": 8_000, "FOLDERS": 2, "ROUNDS": 1, "PAUSE_S": 0}),
    "session_questions.py": Least("@developer", {"MODES": ("ask",), "SESSION": _first_four_calls}),
    "sessions.py": Least("handrail", {}, ("--messages", "9", "--rounds", "1")),
    "side_effects.py": Least("share of the file", {"CALLERS": 2, "CALLS": 4, "ROUNDS": 1}),
    "startup.py": Least("handrail --help:", {"ROUNDS": 1, "WARMING": 0}),
    "streaming.py": Least(
        "one with side effects", {"ROUNDS": 1, "DELAYS": 2, "STREAM_MS": 100.0, "REPLY": short_reply}
    ),
    "triggers.py": Least(
        "firings over",
        {"SESSIONS": 1, "EACH": 100, "JOBS": 2, "IDLE_S": 0.01, "FIRINGS": 3, "SOONEST_MS": 5, "APART_MS": 1},
    ),
    "undo.py": Least("rename", {"ROUNDS": 2}, ("50",)),
}
IN_A_PROCESS = {
    "joined_calls.py": ("--rounds", "1", "--seconds", "0.1", "--clients", "2"),
}
"""Those that fork."""
MANY_PROCESSES = {
    "find.py": Least("by words and meaning", {}, ("--data", "{folder}/one", "--limit", "3", "a song"), "HANDRAIL"),
    "mcp_gateway.py": Least(
        "handrail mcp,",
        {"ROUNDS": 1, "CALLS": 1, "STARTS": 1, "UPSTREAMS": 2, "TOOLS": 2, "MANY": "handrail mcp, 2 x 2 tools"},
    ),
}
"""Those that start so many that they belong to the slow tests."""
CORPORA = {
    "one": {
        "songs.find": "Find a song by a line of its text.",
        "weather.now": "Tell the weather of a town.",
        "sum": "Add.",
    },
    "two": {
        "flights.book": "Book a flight to a town.",
        "mail.send": "Send a letter to somebody.",
        "trains.of": "Trains.",
    },
}


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what a benchmark sets for the whole process."""
    disabled = logging.root.manager.disable
    monkeypatch.setattr(gc, "freeze", lambda: None)
    yield
    logging.disable(disabled)


def corpora(folder: Path) -> None:
    for name, tools in CORPORA.items():
        (folder / name).mkdir()
        rows: list[dict[str, Any]] = [
            {"id": id, "name": id, "description": told, "parameters": {}} for id, told in tools.items()
        ]
        asked = [{"query": told, "gold": [id]} for id, told in tools.items()]
        (folder / name / "tools.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / name / "queries.jsonl").write_text("\n".join(map(json.dumps, asked)))


def carried_out(module: ModuleType) -> object:
    """Run the code under ``if __name__ == "__main__"`` with the current constants.

    :return: the exit code
    """
    assert module.__file__ is not None
    last = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body[-1]
    assert isinstance(last, ast.If) and "__main__" in ast.unparse(last.test)
    try:
        exec(compile(ast.Module(last.body, []), module.__file__, "exec"), vars(module))
    except SystemExit as ended:
        return ended.code
    return None


def test_every_benchmark_has_a_smallest_round() -> None:
    assert {*LEAST, *IN_A_PROCESS, *MANY_PROCESSES} == {script for script in SCRIPTS if "/" not in script}


@pytest.mark.parametrize(
    "script", [*LEAST, *(pytest.param(script, marks=pytest.mark.slow) for script in MANY_PROCESSES)]
)
def test_a_benchmark_completes_its_smallest_round(
    script: str,
    beside: None,
    as_before: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    least = {**LEAST, **MANY_PROCESSES}[script]
    if "{folder}" in "".join(least.arguments):
        if why := explain_model_unavailable():
            pytest.skip(why)
        corpora(tmp_path)
    module = loaded(script)
    for name, value in least.constants.items():
        monkeypatch.setattr(module, name, value(module) if callable(value) else value)
    if least.handrail:
        monkeypatch.setattr(module, least.handrail, prefork.handrail())
    if least.python:
        monkeypatch.setattr(module, least.python, prefork.python(BENCH / script))
    monkeypatch.setattr(sys, "argv", [script, *(each.format(folder=tmp_path) for each in least.arguments)])
    monkeypatch.setattr(os, "sync", lambda: None)  # the whole machine's disks
    monkeypatch.setattr(trigger_scheduler, "MIN_INTERVAL_MS", 1)
    monkeypatch.chdir(tmp_path)
    code = carried_out(module)
    said = capfd.readouterr().out
    assert (code in (None, 0, 1) and least.says in said) or (code == 5 and "withheld" in said), (code, said)


@pytest.mark.proves("P-18")
@pytest.mark.parametrize("mode", ["ask", "accept-edits", "auto"])
async def test_the_developer_rule_set_asks_no_questions_about_reading_or_testing(
    mode: str, beside: None, tmp_path: Path
) -> None:
    bench = loaded("session_questions.py")
    (tmp_path / "ws").mkdir()
    bench.make_repository(tmp_path / "ws")
    async with temporary_kernel(tmp_path, rules=["@developer"], settings=f'mode = "{mode}"\n') as kernel:
        asked = [
            (tool, arguments, kind)
            for tool, arguments, kind in bench.SESSION
            if (await kernel.explain_call(tool, arguments)).action == "ask"
        ]
    assert 0 < len(asked) <= bench.MOST_QUESTIONS
    assert [each for each in asked if each[2] in (bench.READING, bench.TESTING)] == []


@pytest.mark.parametrize("script", IN_A_PROCESS)
def test_a_benchmark_completes_its_smallest_round_in_a_separate_process(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / script), *IN_A_PROCESS[script]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    assert "over the socket: bound" in done.stdout and "calls lost: 0 (bound 0): met" in done.stdout
