"""A state with hostile names, paths, titles and errors: no output controls a terminal or forges a line."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import os
import re
import sqlite3
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from tests.frontends.conftest import Ended, Here, Program
from tests.prefork import command as prefork

import handrail
from handrail.frontends.cli.command_group import run_command_line
from handrail.record.commit_log import CommitLog, Record
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback
from handrail.store.workspace_store import WorkspaceStore

SOURCE = Path(handrail.__file__).parent
DEMOS = Path(__file__).parents[2] / "demos"
FORGED = "✓ FORGED"
PLAIN_LINES = f"x\n{FORGED}\n\t{FORGED}\r{FORGED}"
SPELLS = (
    "\x1b]8;;http://evil.example\x07link\x1b]8;;\x07\x1b]52;c;QUFB\x07\x1b[2J\x9b2J\x9d0;title\x9c\x90q\x9c\x00\x08\x7f\x85"
    "\u202eesrever\u2066\u061c\u200b\u2060\ufeff\u2028\u2029\xad\u034f\U000e0041\U000e0042\u180e\U0001d173"
)
FLOOD = "Z" + "\u0301" * 400 + "\u0e47" * 400
HOSTILE = PLAIN_LINES + SPELLS + FLOOD + "A" * 3_000
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def faults(shown: str) -> list[str]:
    """Return what in ``shown`` controls a terminal or imitates a line of Handrail."""
    found = sorted({f"U+{ord(c):04X}" for c in shown if c != "\n" and unicodedata.category(c) in _UNSEEN})
    found += [line for line in shown.split("\n") if re.match(f" ?{FORGED}", line)]
    marks = 0
    for character in shown:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if marks > 8:
            return [*found, "a pile of marks"]
    return found


def texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in cast("dict[str, object]", value).items():
            yield key
            yield from texts(entry)
    elif isinstance(value, list):
        for entry in cast("list[object]", value):
            yield from texts(entry)


_KEPT = frozenset(
    ("kind", "state", "choice", "role", "type", "error_kind", "frontend", "side_effect", "category", "mode", "exposure")
)


def poisoned(value: Any, name: str = "") -> Any:
    """``value`` with every text in it made hostile, but for the words of a closed table."""
    if isinstance(value, dict):
        return {key: poisoned(entry, key) for key, entry in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [poisoned(entry, name) for entry in cast("list[Any]", value)]
    return value + HOSTILE if isinstance(value, str) and name not in _KEPT else value


@pytest.fixture
def state(handrail: Program, here: Here) -> Program:
    """A workspace whose log, sessions, approvals, jobs, rules, skills, agents and configuration are hostile."""
    assert here("call", "write", json.dumps({"path": "a.txt", "content": HOSTILE})).code == 4
    store = WorkspaceStore.open(handrail.workspace, handrail.state, frontend="test")
    try:
        proposed = {"tool": HOSTILE, "arguments": {HOSTILE: HOSTILE}, "generation": 1, "parent": HOSTILE}
        ending = {"type": "error", "error_text": HOSTILE, "metadata": {"error_kind": "not_found"}}
        about: dict[str, Any] = {"provider": HOSTILE, "name": HOSTILE, "arguments": {"q": HOSTILE}, "failed": True}
        records = [
            Record("proposed", "ses_h", "ses_h/1.0", proposed),
            Record("rejected", "ses_h", "ses_h/1.0", {"step": HOSTILE, "result": ending}),
            Record("provider-tool-used", "ses_h", "", about),
            Record("instructions-read", "ses_h", "", {"files": [{"path": HOSTILE, "skipped_by": HOSTILE}]}),
        ]
        asyncio.run(CommitLog(store.database).commit(records))
        path = store.folders.database_file
    finally:
        store.database.close()
        store.lease.release()
    connection = sqlite3.connect(path)
    with connection:
        for rowid, request in connection.execute("SELECT rowid, request FROM approval").fetchall():
            connection.execute(
                "UPDATE approval SET request = ? WHERE rowid = ?",
                (encode_json_with_fallback(poisoned(decode_json_with_fallback(request))), rowid),
            )
        connection.execute("UPDATE session SET topic = ?, agent = ?, frontend = ?", (HOSTILE, HOSTILE, HOSTILE))
        connection.execute(
            "INSERT INTO session SELECT 'ses_' || ?, opened_ns, NULL, agent, topic, frontend, headless, details, used_ns, NULL, id, ?"
            " FROM session LIMIT 1",
            (HOSTILE, HOSTILE),
        )
        said = {"role": "user", "text": HOSTILE}
        connection.execute(
            "INSERT INTO message SELECT id, 1, 1, ? FROM session LIMIT 1", (encode_json_with_fallback(said),)
        )
        connection.execute("INSERT INTO project_rule VALUES ('rul_1', ?, 1, ?)", (f"deny bash {HOSTILE}", HOSTILE))
        texts_of_a_job = dict.fromkeys(("about", "definition", "output", "untrusted"), HOSTILE)
        job = {**texts_of_a_job, "arguments": None, "exposure": "both", "prompt_mask": False, "given_up": False}
        connection.execute(
            "INSERT INTO job SELECT 'job_h', id, 'ses_h/1.0', ?, 'failed', 1, 2, 1, 1, ? FROM session LIMIT 1",
            (HOSTILE, encode_json_with_fallback(job)),
        )
    connection.close()
    skill = handrail.workspace / ".agents" / "skills" / "deploy"
    skill.mkdir(parents=True)
    (skill / "SKILL.md").write_text(
        f"---\nname: deploy\ndescription: {json.dumps(HOSTILE[:900])}\n---\n{HOSTILE}", encoding="utf-8"
    )
    (handrail.workspace / "handrail.toml").write_text(f"rules = [{json.dumps('deny bash ' + HOSTILE)}]\n")
    agent = handrail.config / "agents" / "reviewer"
    agent.mkdir(parents=True, mode=0o755)
    for folder in (handrail.config, agent.parent, agent):
        folder.chmod(0o755)
    (agent / "agent.toml").write_text(
        f'id = "reviewer"\ndescription = {json.dumps(HOSTILE)}\ntools = [{json.dumps(HOSTILE)}]\n{json.dumps(HOSTILE)} = 1\n'
    )
    (handrail.config / "handrail.toml").write_text("")
    tools = handrail.workspace / "tools"
    tools.mkdir()
    manifest = {"id": HOSTILE, "description": HOSTILE, HOSTILE: HOSTILE, "parameters": {"type": HOSTILE}}
    (tools / "t.json").write_text(json.dumps(manifest))
    servers = {HOSTILE: {"command": HOSTILE}, "ok": {"command": "prog", "args": [HOSTILE], HOSTILE: 1}}
    (handrail.workspace / ".mcp.json").write_text(json.dumps({"mcpServers": servers}))
    return handrail


Listing = Callable[[Program], tuple[str, ...]]
LISTINGS: dict[str, Listing] = {
    "log": lambda _: ("log",),
    "log of records": lambda _: ("log", "--records"),
    "log of a call": lambda _: ("log", "--call", "ses_h/1.0"),
    "log of no session": lambda _: ("log", "--session", HOSTILE),
    "log verify": lambda _: ("log", "verify"),
    "log purge": lambda _: ("log", "purge", "--before", "0", "--dry-run"),
    "sessions": lambda _: ("sessions", "--all"),
    "a session": lambda place: ("sessions", "show", _session(place)),
    "no session": lambda _: ("sessions", "show", HOSTILE.replace("\0", "")),
    "approvals": lambda _: ("approve", "list"),
    "no approval": lambda _: ("approve", HOSTILE, "--once"),
    "rules": lambda _: ("approve", "--rules"),
    "explain a call": lambda _: ("explain", "ses_h/1.0"),
    "explain no call": lambda _: ("explain", "x/" + HOSTILE),
    "explain a tool": lambda _: ("explain", "bash", json.dumps({"command": HOSTILE})),
    "explain no tool": lambda _: ("explain", HOSTILE.replace("/", ""), "{}"),
    "call of no tool": lambda _: ("call", HOSTILE, "{}"),
    "call of a file that is not there": lambda _: ("call", "read", json.dumps({"path": HOSTILE})),
    "skills": lambda _: ("skills",),
    "no skill": lambda _: ("skills", HOSTILE),
    "agents": lambda place: ("agents", "--config", str(place.config / "handrail.toml")),
    "lint": lambda place: ("lint", str(place.workspace / "tools" / "t.json")),
    "lint of all": lambda place: ("lint", "--config", str(place.config / "handrail.toml")),
    "config": lambda _: ("config",),
    "trust": lambda _: ("trust",),
    "doctor": lambda _: ("doctor",),
    "find": lambda _: ("find", HOSTILE[:200], "--keywords-only"),
    "tools": lambda _: ("tools",),
    "no category": lambda _: ("tools", "--category", HOSTILE),
    "sources": lambda _: ("sources",),
    "no source": lambda _: ("sources", "review", HOSTILE),
    "jobs": lambda _: ("jobs",),
    "no job": lambda _: ("jobs", "read", HOSTILE),
    "a job": lambda _: ("jobs", "wait", "job_h", "--timeout", "0"),
    "mcp import of what": lambda _: ("mcp", "import"),
    "mcp import": lambda place: ("mcp", "import", str(place.workspace / ".mcp.json"), "--name", "ok"),
    "mcp import of no server": lambda place: ("mcp", "import", str(place.workspace / ".mcp.json"), "--name", HOSTILE),
    "mcp list": lambda _: ("mcp", "list"),
    "state": lambda _: ("state",),
    "no state": lambda _: ("state", "remove", HOSTILE, "--dry-run"),
    "no command": lambda _: (HOSTILE,),
    "no option": lambda _: ("log", "--" + HOSTILE),
}


def _session(place: Program) -> str:
    """The id of the session that the command line made."""
    (path,) = place.state.glob("ws/*/handrail.db")
    connection = sqlite3.connect(path)
    (name,) = connection.execute("SELECT id FROM session ORDER BY length(id) LIMIT 1").fetchone()
    connection.close()
    return str(name)


def carried_out(state: Program, words: tuple[str, ...], capfd: pytest.CaptureFixture[str], *further: str) -> Ended:
    capfd.readouterr()
    code = run_command_line([*words, *state.common, *further])
    sys.stdout.flush()
    sys.stderr.flush()
    shown = capfd.readouterr()
    return Ended(code, shown.out, shown.err)


@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS.keys())
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_no_listing_or_error_sends_control_characters_to_a_terminal(
    state: Program, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, listing: Listing, terminal: bool
) -> None:
    if terminal:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "400")
        monkeypatch.setenv("TERM", "xterm")
    done = carried_out(state, listing(state), capfd)
    assert done.out + done.err, "a test of nothing"
    assert not faults(_STYLE.sub("", done.out)), ascii(done.out[:3_000])
    assert not faults(_STYLE.sub("", done.err)), ascii(done.err[:3_000])
    assert "internal error" not in done.err


@pytest.mark.parametrize("listing", LISTINGS.values(), ids=LISTINGS.keys())
def test_json_output_is_inert_on_a_terminal(
    state: Program, capfd: pytest.CaptureFixture[str], listing: Listing
) -> None:
    done = carried_out(state, listing(state), capfd, "--json")
    assert not faults(done.out), ascii(done.out[:3_000])
    for line in done.out.splitlines():
        json.loads(line)


def test_json_output_has_the_exact_text(state: Program, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in carried_out(state, ("log",), capfd, "--json").out.splitlines()]
    assert {HOSTILE} <= {row.get("tool") for row in rows} & {row.get("error_text") for row in rows}
    (asked,) = json.loads(carried_out(state, ("approve",), capfd, "--json").out)
    assert asked["arguments"]["content"] == HOSTILE * 2


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_the_output_of_a_run_is_inert(
    handrail: Program,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    terminal: bool,
) -> None:
    calls = [{"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}, {"name": "read", "arguments": {"path": HOSTILE}}]
    turns = [{"text": f"I look.\n{SPELLS}\n", "calls": calls}, {"text": SPELLS}]
    (script := tmp_path / "script.json").write_text(json.dumps({"version": 1, "turns": turns}))
    if terminal:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    done = carried_out(handrail, ("run", HOSTILE, "--model", f"script:{script}", "--headless"), capfd)
    assert done.code == 0 and done.err.count("✗") >= 2
    assert not faults(_STYLE.sub("", done.err)), ascii(done.err[:3_000])
    assert not faults(done.out) if terminal else SPELLS in done.out
    done = carried_out(handrail, ("run", "x", "--model", f"script:{script}", "--headless", "--json"), capfd)
    events = [json.loads(line) for line in done.out.splitlines()]
    assert not faults(done.out) and any(SPELLS in text for event in events for text in texts(event))


def test_a_payload_is_exact_in_a_pipe_and_inert_on_a_terminal(
    handrail: Program, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (handrail.workspace / "note.txt").write_text(f"\x9b2J{HOSTILE}")
    words = ("skills", "tools-by-hand")
    skill = handrail.workspace / ".agents" / "skills" / words[1]
    skill.mkdir(parents=True)
    body = f"One.\n{SPELLS}".replace("\0", "")
    (skill / "SKILL.md").write_text(f"---\nname: {words[1]}\ndescription: x\n---\n{body}", encoding="utf-8", newline="")
    assert carried_out(handrail, words, capfd).out.rstrip("\n") == body
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert not faults(carried_out(handrail, words, capfd).out)
    assert not faults(carried_out(handrail, ("call", "read", '{"path": "note.txt"}'), capfd).out)


def test_completions_offer_no_hostile_names(state: Program) -> None:
    own = {"_HANDRAIL_COMPLETE": "zsh_complete", "COMP_WORDS": "handrail sessions show ", "COMP_CWORD": "3"}
    done = subprocess.run(
        prefork.handrail(),
        env={**os.environ, **own, "HANDRAIL_STATE": str(state.state)},
        cwd=state.workspace,
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("ses_") == 1 and not faults(done.stdout) and not done.stderr


def test_a_hostile_folder_name_is_escaped_in_all_output(
    tmp_path: Path, handrail: Program, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / (PLAIN_LINES + "\x1b[2J\x9b\u202e\udcff").replace("/", "")).mkdir()
    place = replace(handrail, workspace=folder)
    for words in (("call", "glob", '{"pattern": "*"}'), ("state",), ("config",), ("doctor",), ("trust", "list")):
        done = carried_out(place, words, capfd)
        assert not faults(done.out) and not faults(done.err) and "internal error" not in done.err, (words, done)


def test_tracebacks_and_library_warnings_are_inert(
    handrail: Program, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> int:
        logging.getLogger("of.a.library").warning("%s", HOSTILE)
        logging.getLogger("handrail").warning("%s", HOSTILE)
        raise ZeroDivisionError(HOSTILE)

    monkeypatch.setattr("handrail.frontends.cli.commands.find._find", broken)
    for debugged in ("0", "1"):
        monkeypatch.setenv("HANDRAIL_DEBUG", debugged)
        done = carried_out(handrail, ("find", "x"), capfd)
        assert done.code == 1 and "ZeroDivisionError" in done.err and done.err.count("FORGED") >= 6
        assert not {fault for fault in faults(done.err) if fault.startswith("U+")}


WRITERS = {
    "frontends/cli/terminal_output.py": "the writer itself",
    "demos/demonstration.py": "its one error makes what it shows visible",
    "frontends/cli/renderer.py": "the renderer, which hands each piece to the writer's escaping",
    "frontends/mcp/startup_answers.py": "messages of a protocol to a program, which JSON encodes",
    "frontends/acp/terminal_viewer.py": "the program behind an editor's terminal: its pipe is a call's output, byte by byte",
    "registry/sources/module_worker.py": "a program in the sandbox: its stderr is a pipe of Handrail's",
    "origins/bounded_program.py": "a process that checks arguments or extracts text: its stdout is a pipe of Handrail's",
    "sandbox/start/launcher_python.py": "the child that becomes a program in the sandbox, with that program's stderr",
}
"""The modules that may write to a terminal, and why."""
_STREAMS = {"sys.stdout.write", "sys.stderr.write", "sys.stdout.writelines", "sys.stderr.writelines"}
_OF_CLICK = {f"click.{name}" for name in ("echo", "secho", "confirm", "prompt", "style", "echo_via_pager", "pause")}
_OTHERS = {"print", "Console", "console", "logging.basicConfig", "logging.StreamHandler", "os.write(1", "os.write(2"}
_TRACEBACKS = {f"traceback.print_{name}" for name in ("exc", "exception", "stack", "tb", "last")}
_FORBIDDEN = (
    _STREAMS | _OF_CLICK | _OTHERS | {"input", "getpass.getpass", "sys.displayhook", "pprint.pprint", "rich.print"}
)


def test_only_the_listed_writer_modules_write_to_a_terminal() -> None:
    """Every other module hands its texts to ``frontends/cli/terminal_output.py``, which makes them inert."""
    found: list[str] = []
    for path in sorted([*SOURCE.rglob("*.py"), *DEMOS.rglob("*.py")]):
        name = path.relative_to(SOURCE if SOURCE in path.parents else DEMOS.parent).as_posix()
        if name in WRITERS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called == "os.write" and node.args:
                    called += f"({ast.unparse(node.args[0])}"
                if called in _FORBIDDEN:
                    found.append(f"{name}:{node.lineno} calls {called}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", WRITERS)
def test_each_listed_writer_module_does_write(name: str) -> None:
    assert re.search(
        r"\.write\(|os\.write\(|\.print\(|print_exc\(",
        (DEMOS.parent / name if name.startswith("demos/") else SOURCE / name).read_text(encoding="utf-8"),
    )
