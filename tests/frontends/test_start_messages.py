"""Messages at the start of a program: all faults in one report, interrupted calls, withheld tools, missing extras."""

from __future__ import annotations

import gc
import json
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.conftest import Here, Program, SleepingCommand

from handrail.frontends.cli.commands.mcp import defer_garbage_collection
from handrail.origins.installed_package import build_extra_install_command
from handrail.sandbox.start.spawn import find_bubblewrap_programs


def put_tool(folder: Path, name: str, **views: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    llm: dict[str, Any] = {"name": name, "description": "Does it.", "parameters": parameters} | views.get("llm", {})
    (folder / f"{name}.json").write_text(json.dumps({"llm": llm, "runtime": views.get("runtime", {})}))
    (folder / name).write_text("#!/bin/sh\necho '{}'\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def config(handrail: Program) -> Path:
    """A configuration folder of the test's own; give ``--config`` its file."""
    handrail.config.mkdir()
    (handrail.config / "handrail.toml").write_text("")
    return handrail.config


@pytest.mark.proves("R-01", "R-05")
@pytest.mark.parametrize("name", ["call", "tools", "mcp", "run", "explain"])
def test_all_faults_of_tools_and_rules_are_listed_together_with_exit_code_5(
    here: Here, config: Path, name: str
) -> None:
    everybody, agents = config / "tools", config / "agents" / "default" / "tools"
    put_tool(everybody, "one", runtime={"locks": ["file"], "timeout_ms": "long"})
    put_tool(everybody, "two", llm={"parameters": {"type": "object", "properties": {"a": {"type": "text"}}}})
    put_tool(everybody, "email.send")
    put_tool(agents, "read")
    put_tool(agents, "email__send", llm={"name": "email__send"})
    (everybody / "gone.json").write_text(
        '{"llm": {"name": "gone", "description": "x", "parameters": {"type": "object"}}}'
    )
    (everybody / "broken.json").write_text("{")
    (config / "handrail.toml").write_text('rules = ["permit bash *", "allow bash git *"]\n')
    arguments = {
        "call": ["read", "{}"],
        "explain": ["read", "{}"],
        "run": ["a task", "--model", f"script:{config / 'script.json'}"],
    }
    (config / "script.json").write_text('{"turns": [{"text": "hello"}]}')
    done = here(name, *arguments.get(name, []), "--config", str(config / "handrail.toml"))
    assert done.code == 5 and "Traceback" not in done.err
    for told in (
        *("runtime.locks[0]", "runtime.timeout_ms", "llm.parameters", "'read' is a locked id", "email__send", "gone"),
        *("broken.json", "'permit bash *'"),
    ):
        assert told in done.err, told
    assert "allow bash git" not in done.err


@pytest.mark.proves("G-05", "S-05")
def test_a_killed_call_is_reported_at_the_next_start_and_in_the_log(handrail: Program) -> None:
    sleeper = SleepingCommand(handrail)
    command = handrail.cold("call", "bash", sleeper.arguments, "--rule", sleeper.rule)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        sleeper.wait_until_it_runs()
        process.send_signal(signal.SIGKILL)
    sleeper.wait_until_it_is_gone()  # it dies with the kernel, whatever ended that
    following = handrail("call", "read", '{"path": "note.txt"}')
    assert following.code == 0 and "(bash) was interrupted" in following.err and "unknown" in following.err
    rows = [json.loads(line) for line in handrail("log", "--json").out.splitlines()]
    assert [(row["tool"], row["state"]) for row in rows] == [("bash", "interrupted"), ("read", "output")]
    assert "interrupted" in handrail("log").out
    assert handrail("call", "read", '{"path": "note.txt"}').err == ""  # told once
    assert handrail("log", "verify").code == 0


@pytest.mark.proves("R-01", "S-08")
def test_an_unavailable_tool_is_listed_and_refused_with_its_reason(here: Here, config: Path) -> None:
    put_tool(config / "tools", "weather", runtime={"mode": "stateful"})
    put_tool(config / "tools", "billing", runtime={"secrets": ["BILLING_KEY"]})
    chosen = ("--config", str(config / "handrail.toml"))
    shown = here("tools", *chosen).out
    assert "stateful" in shown and "BILLING_KEY" in shown
    for name, word in (("weather", "stateful"), ("billing", "BILLING_KEY")):
        done = here("call", name, "{}", *chosen, "--rule", "allow *")
        assert done.code == 1 and done.err.startswith("unavailable: ") and word in done.err
    assert here("explain", "weather", "{}", *chosen).code == 1


_WITHOUT = """
import sys
sys.modules |= dict.fromkeys(("mcp", "mcp_types", "openai", "anthropic"))  # as where they are not installed
from handrail.frontends.cli.command_group import run_command_line as run
from handrail.sandbox.start.spawn import find_bubblewrap_programs
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.proves("F-02a")
@pytest.mark.parametrize(
    ("name", "arguments", "extra"),
    [
        ("mcp", (), "mcp"),
        ("run", ("a task", "--model", "openai:some", "--base-url", "http://127.0.0.1:1/v1"), "openai"),
        ("run", ("a task", "--model", "anthropic:some", "--base-url", "http://127.0.0.1:1"), "anthropic"),
    ],
)
def test_a_command_with_a_missing_extra_names_it_and_others_still_work(
    handrail: Program, name: str, arguments: tuple[str, ...], extra: str
) -> None:
    def without(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _WITHOUT, command[0], *handrail.common, *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    done = without(name, *arguments)
    assert done.returncode in (2, 5) and build_extra_install_command(extra) in done.stderr
    assert "Traceback" not in done.stderr
    if name == "mcp":  # all three are missing each time
        assert without("call", "read", '{"path": "note.txt"}').returncode == 0


def _damaged(database: Path) -> None:
    content = bytearray(database.read_bytes())
    content[100:4000] = b"\xff" * 3900
    database.write_bytes(content)


def _changed(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute(
            "UPDATE record SET at_ns = at_ns + 1 WHERE sequence = "
            "(SELECT sequence FROM record ORDER BY sequence DESC LIMIT 1 OFFSET 1)"
        )
        connection.commit()


@pytest.mark.proves("G-02", "F-02a")
@pytest.mark.parametrize("harm", [_damaged, _changed])
def test_no_call_runs_over_a_corrupt_log_and_each_command_reports_the_damage(
    here: Here, handrail: Program, harm: Callable[[Path], None]
) -> None:
    here("call", "read", '{"path": "note.txt"}')
    (database,) = handrail.state.rglob("handrail.db")
    harm(database)
    done = here("call", "read", '{"path": "note.txt"}')
    assert done.code == 5 and done.out == "" and "damaged" in done.err and "copy" in done.err
    verified = here("log", "verify")
    assert verified.code == 1 and "not intact" in verified.err
    shown = here("log")
    assert shown.code == (0 if harm is _changed else 5) and "defect" not in shown.err
    doctor = here("doctor")
    assert doctor.code == 5 and "damaged" in doctor.out


@pytest.mark.skipif(
    next(find_bubblewrap_programs(), None) is None, reason="needs a file system that even root cannot write"
)
def test_a_read_only_state_folder_is_reported_with_the_option_to_use(handrail: Program) -> None:
    handrail.state.mkdir(mode=0o700)
    frozen = [
        next(find_bubblewrap_programs()),
        "--dev-bind",
        "/",
        "/",
        "--ro-bind",
        str(handrail.state),
        str(handrail.state),
        "--",
    ]
    for command in (handrail.cold("call", "read", '{"path": "note.txt"}'), handrail.cold("mcp")):
        done = subprocess.run([*frozen, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 5 and done.stdout == ""
        assert "cannot be written" in done.stderr and "--state" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_collection_pauses_during_an_mcp_server_start_and_resumes_afterwards(fails: bool) -> None:
    before = gc.get_freeze_count()
    try:
        with defer_garbage_collection() as started:
            assert not gc.isenabled()
            if fails:
                raise KeyboardInterrupt
            started()
            assert gc.isenabled() and gc.get_freeze_count() > before, (
                "what is there by then is not looked through again"
            )
    except KeyboardInterrupt:
        pass
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_an_occupied_address_is_reported_in_one_line(here: Here) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        done = here("mcp", "--http", place)
    assert done.code == 5
    assert done.err == f"handrail: Could not listen on {place}: another program uses it. Pass another HOST:PORT.\n"
