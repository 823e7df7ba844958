"""The command line: the output and exit code of each command."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.frontends.conftest import Here, Program, SleepingCommand, Terminals
from tests.prefork import command as prefork

from handrail.frontends.cli.command_group import COMMANDS, run_command_line

CALLING = ("call", "run", "explain", "mcp")
LOOKING = ("log", "state", "doctor", "completion", "sessions", "jobs", "approve")
"""Commands that make no calls: rules and people are nothing to them."""

# --- without a kernel ------------------------------------------------------------------------------------------


@pytest.mark.proves("F-02a")
def test_help_lists_every_command_without_loading_any() -> None:
    code = (
        "import sys\nfrom handrail.frontends.cli.command_group import run_command_line\ncode = run_command_line(['--help'])\n"
        "loaded = {m for m in sys.modules if m.startswith('handrail.') and not m.startswith('handrail.frontends')}\n"
        "loaded = sorted(loaded - {'handrail.contract'})\n"
        "print('LOADED', code, loaded, [m for m in ('asyncio', 'pydantic', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert done.stdout.endswith("LOADED 0 [] []\n")


@pytest.mark.proves("F-02a")
def test_the_command_also_runs_with_python_m() -> None:
    done = subprocess.run([sys.executable, "-m", "handrail", "cal"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "Did you mean 'call'?" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_lists_the_options_that_apply_to_it(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line([name, "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--workspace", "--state", "--json"):
        assert (option in shown) == (name not in ("completion", "new"))
    for option in ("--rule ", "--headless "):
        assert name not in CALLING or option in shown
        assert name not in LOOKING or option not in shown


@pytest.mark.proves("F-02a")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cal"], "Did you mean 'call'?"),
        (["frobnicate"], "The commands are: run, chat"),
        (["call"], "TOOL is missing"),
        (["call", "read", "{}", "more"], "unexpected extra argument"),
        (["tools", "--no-such-option"], "No such option"),
        (["call", "read", "@no-such-file"], "Could not read 'no-such-file'"),
        (["run", "a task"], "--model openai:NAME"),
        (["run", "a task", "--model", "script:x", "--max-turns", "0"], "--max-turns"),
        (["log", "--head", "abc"], "handrail log verify --head"),
        (["log", "rewrite"], "verify"),
        (["log", "verify", "--head", "abc"], "64 hexadecimal digits"),
    ],
)
def test_a_wrong_command_line_is_explained_briefly_and_exits_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.out == ""
    assert len(shown.err.splitlines()) <= 3 and "Traceback" not in shown.err


def test_a_missing_command_shows_the_help_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line([]) == 2
    assert "Work with agents:" in capsys.readouterr().err


def test_a_missing_workspace_exits_with_5(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in (["call", "read"], ["tools"], ["log"], ["explain", "read", "{}"]):
        assert run_command_line([*command, "--workspace", str(tmp_path / "nowhere")]) == 5
        assert "nowhere" in capsys.readouterr().err


def test_an_internal_error_is_one_line_and_shows_a_traceback_only_in_debug_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> int:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("handrail.frontends.cli.command_group.handrail.main", broken)
    assert run_command_line(["tools"]) == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: by zero" in shown and "HANDRAIL_DEBUG=1" in shown and "Traceback" not in shown
    monkeypatch.setenv("HANDRAIL_DEBUG", "1")
    assert run_command_line(["tools"]) == 1
    assert "Traceback" in (shown := capsys.readouterr().err) and "ZeroDivisionError: by zero" in shown


# --- call ------------------------------------------------------------------------------------------------------


def test_a_call_prints_its_data_and_exits_with_0(here: Here) -> None:
    done = here("call", "read", '{"path": "note.txt"}')
    assert done.code == 0 and "second line" in done.out and done.err == ""


@pytest.mark.proves("K-07")
def test_json_output_has_the_result_type_and_metadata(here: Here) -> None:
    done = here("call", "read", '{"path": "note.txt"}', "--json")
    result = json.loads(done.out)
    assert result["type"] == "output" and result["metadata"]["duration_ms"] >= 0


def test_an_error_result_is_printed_on_stderr_and_exits_with_1(here: Here) -> None:
    done = here("call", "read", '{"path": "absent.txt"}')
    assert done.code == 1 and done.out == "" and "absent.txt" in done.err and "Traceback" not in done.err


@pytest.mark.proves("P-10", "F-02a")
def test_a_headless_call_without_permission_is_denied_and_exits_with_3(here: Here, handrail: Program) -> None:
    done = here("call", "write", '{"path": "new.txt", "content": "x"}', "--headless")
    assert done.code == 3 and done.err.startswith("denied: ")
    assert "handrail explain" in done.err
    assert not (handrail.workspace / "new.txt").exists()


def test_a_rule_option_allows_a_call_for_this_command_only(here: Here, handrail: Program) -> None:
    done = here("call", "write", '{"path": "new.txt", "content": "x"}', "--rule", "allow write new.txt")
    assert done.code == 0 and (handrail.workspace / "new.txt").read_text() == "x"
    other = '{"path": "other.txt", "content": "x"}'
    assert here("call", "write", other, "--rule", "allow write new.txt", "--headless").code == 3
    assert here("call", "write", '{"path": "new.txt", "content": "y"}', "--headless").code == 3


def test_all_invalid_rules_are_reported_at_once(here: Here) -> None:
    done = here("call", "read", "--rule", "permit read", "--rule", "allow")
    assert done.code == 2 and "permit read" in done.err and "'allow'" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("not json", "not JSON"),
        ("[1]", "array"),
        ('{"path": "a", "path": "b"}', "duplicate keys"),
        ('{"path": NaN}', "NaN"),
        ('{"path": ' + "[" * 10_000 + "]" * 10_000 + "}", "nested deeper"),
        ('{"path": 7}', "path"),
        ('{"path": "note.txt", "colour": "red"}', "colour"),
    ],
)
@pytest.mark.proves("K-05")
def test_bad_arguments_are_an_error_result_that_names_the_problem(here: Here, arguments: str, said: str) -> None:
    done = here("call", "read", arguments, "--json")
    result = json.loads(done.out)
    assert done.code == 1 and result["metadata"]["error_kind"] == "invalid_input" and said in result["error_text"]


def test_bad_arguments_say_which_command_shows_the_arguments(here: Here) -> None:
    for arguments in ("note.txt", "{}", '{"pth": "note.txt"}'):
        shown = here("call", "read", arguments).err
        assert """To see them, run: handrail call info '{"tool": "read"}'""" in shown
    assert "handrail call info" not in here("call", "read", '{"path": "none.txt"}').err
    assert here("call", "info", '{"tool": "read"}').code == 0


def test_an_unknown_tool_error_names_the_nearest_tool(here: Here) -> None:
    done = here("call", "raed", "{}")
    assert done.code == 1 and done.err.startswith("unknown_tool: ") and "read" in done.err


def test_arguments_come_from_stdin_or_a_file(handrail: Program, tmp_path: Path) -> None:
    arguments = tmp_path / "arguments.json"
    arguments.write_text('{"path": "note.txt"}')
    assert "second line" in handrail("call", "read", f"@{arguments}").out
    assert "second line" in handrail("call", "read", "-", stdin=arguments.read_bytes()).out


def test_a_hundred_megabytes_of_arguments_are_refused_with_a_short_error(handrail: Program, tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.write(b'{"path": "')
        file.seek(100 * 1024 * 1024)
        file.write(b'"}')
    done = handrail("call", "read", f"@{huge}")
    assert done.code == 1 and done.err.startswith("invalid_input: ") and len(done.err) < 500


def test_arguments_that_are_not_text_are_refused(handrail: Program) -> None:
    done = handrail("call", "read", "-", stdin=b'{"path": "\xff\xfe"}')
    assert done.code == 1 and "UTF-8" in done.err


def test_output_is_exact_in_a_pipe_and_inert_on_a_terminal(handrail: Program, on_a_terminal: Terminals) -> None:
    (handrail.workspace / "hostile.txt").write_text("red \x1b[31m text\n")
    piped = handrail("call", "read", '{"path": "hostile.txt"}')
    assert "\x1b[31m" in piped.out
    terminal = on_a_terminal(*handrail.command("call", "read", '{"path": "hostile.txt"}'))
    assert terminal.end() == 0
    assert "\\e[31m" in terminal.shown and "\x1b[31m" not in terminal.shown


def test_a_closed_output_pipe_causes_no_traceback(handrail: Program) -> None:
    (handrail.workspace / "long.txt").write_text("line\n" * 40_000)
    command = handrail.cold("call", "read", '{"path": "long.txt"}')
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read() and b"Exception" not in process.stderr.read()


def test_output_that_cannot_be_written_is_a_readable_error(handrail: Program) -> None:
    for command in (handrail.command("call", "read", '{"path": "note.txt"}'), [*prefork.handrail(), "--help"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
        assert done.returncode == 1 and done.stderr == (
            "handrail: Could not write the output: No space left on device. Check the target of the output.\n"
        )


def test_the_exit_code_stays_the_same_when_no_message_can_be_printed(handrail: Program) -> None:
    refused = handrail.cold("call", "write", '{"path": "new.txt", "content": ""}', "--headless")
    with open("/dev/full", "wb") as full:
        assert subprocess.run(refused, stderr=full, stdout=full).returncode == 3
    command = shlex.join(handrail.cold("call", "read", '{"path": "note.txt"}'))
    assert subprocess.run(["sh", "-c", f"{command} >&- 2>&-"]).returncode == 0


def test_a_result_is_written_in_one_piece_even_with_unbuffered_python(handrail: Program) -> None:
    ours, theirs = os.pipe2(os.O_DIRECT)  # one packet for each write
    with open(ours, "rb", buffering=0) as reader:
        command = handrail.cold("call", "read", '{"path": "note.txt"}')
        with subprocess.Popen(command, stdout=theirs, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
            os.close(theirs)
            said = reader.read(65536)
        assert process.returncode == 0
        assert b"first line" in said and said.endswith(b"\n") and reader.read(65536) == b""


# --- asking and interrupting -----------------------------------------------------------------------------------


@pytest.mark.proves("P-07")
def test_a_terminal_user_is_asked_and_the_call_runs_when_allowed(handrail: Program, on_a_terminal: Terminals) -> None:
    terminal = on_a_terminal(*handrail.command("call", "write", '{"path": "new.txt", "content": "hello"}'))
    seen = terminal.wait_for("> ")
    assert "write requires approval" in seen and "new.txt" in seen and "hello" in seen
    assert not (handrail.workspace / "new.txt").exists()
    terminal.type("o\n")
    assert terminal.end() == 0
    assert (handrail.workspace / "new.txt").read_text() == "hello"


def test_a_rejection_exits_with_3_and_its_message_reaches_the_result(
    handrail: Program, on_a_terminal: Terminals
) -> None:
    terminal = on_a_terminal(*handrail.command("call", "write", '{"path": "new.txt", "content": "hello"}'))
    terminal.wait_for("> ")
    terminal.type("r use another name\n")
    assert terminal.end() == 3
    assert "use another name" in terminal.shown.split("> r use another name", 1)[1]
    assert not (handrail.workspace / "new.txt").exists()


def test_a_headless_command_on_a_terminal_does_not_ask_the_user(handrail: Program, on_a_terminal: Terminals) -> None:
    terminal = on_a_terminal(*handrail.command("call", "write", '{"path": "new.txt", "content": "x"}', "--headless"))
    assert terminal.end() == 3 and "o  once" not in terminal.shown and "has no user to ask" in terminal.shown


@pytest.mark.proves("A-05")
def test_a_question_is_asked_at_the_terminal(handrail: Program, on_a_terminal: Terminals) -> None:
    asked = '{"questions": [{"question": "Which colour?", "header": "Colour", "options": [{"label": "red", "description": ""}, {"label": "green", "description": ""}]}]}'
    terminal = on_a_terminal(*handrail.command("call", "question", asked))
    terminal.wait_for("Which colour?")
    terminal.wait_for("> ")
    terminal.type("2\n")
    assert terminal.end() == 0 and "green" in terminal.shown.rsplit("> 2", 1)[1]


def test_ctrl_c_at_a_prompt_ends_the_call_and_exits_with_130(handrail: Program, on_a_terminal: Terminals) -> None:
    terminal = on_a_terminal(*handrail.command("call", "write", '{"path": "new.txt", "content": "x"}'))
    terminal.wait_for("> ")
    terminal.type("\x03")
    assert terminal.end() == 130
    assert "Traceback" not in terminal.shown and not (handrail.workspace / "new.txt").exists()
    assert handrail("log", "verify").code == 0


@pytest.mark.proves("X-08")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all_processes_of_a_call_and_leaves_the_log_intact(
    handrail: Program, number: signal.Signals
) -> None:
    sleeper = SleepingCommand(handrail)
    command = handrail.command("call", "bash", sleeper.arguments, "--rule", sleeper.rule)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        sleeper.wait_until_it_runs()
        process.send_signal(number)
        _, said = process.communicate()
    assert process.returncode == 130
    assert said.startswith("cancelled: ") and "Traceback" not in said
    assert sleeper.left_over() == []
    verified = handrail("log", "verify")
    assert verified.code == 0 and verified.out.startswith("intact")
    (row,) = handrail("log", "--json").out.splitlines()
    assert json.loads(row)["error_kind"] == "cancelled"


# --- the other commands ----------------------------------------------------------------------------------------


def test_the_tools_command_lists_one_tool_per_line(here: Here) -> None:
    shown = here("tools")
    ids = {line.split()[0] for line in shown.out.splitlines() if line}
    assert shown.err == "" and here("tools", "list").out == shown.out
    assert {"read", "write", "edit", "glob", "grep", "bash", "todo", "question", "file.patch"} <= ids


def test_tools_json_contains_the_initial_mode_of_a_session(here: Here) -> None:
    assert json.loads(here("tools", "--set", "mode=accept-edits", "--json").out)["mode"] == "accept-edits"


@pytest.mark.proves("K-02")
def test_the_tools_command_shows_both_views_in_json(here: Here) -> None:
    listed = json.loads(here("tools", "--json").out)
    (read,) = [tool for tool in listed["tools"] if tool["id"] == "read"]
    assert set(read["llm"]) == {"name", "description", "parameters"}
    assert read["runtime"]["side_effect"] == "read"


@pytest.mark.proves("P-13")
def test_explain_names_the_deciding_rule_and_runs_nothing(here: Here, handrail: Program) -> None:
    done = here("explain", "write", '{"path": "new.txt", "content": "x"}', "--rule", "deny write new.txt")
    assert "deny write new.txt" in done.out and done.code in (0, 3)
    assert not (handrail.workspace / "new.txt").exists()


@pytest.mark.proves("G-02")
def test_log_verify_prints_a_head_that_a_later_verification_can_check(here: Here) -> None:
    here("call", "read", '{"path": "note.txt"}')
    head = json.loads(here("log", "verify", "--json").out)["head"]
    here("call", "read", '{"path": "note.txt"}')
    assert here("log", "verify", "--head", head).code == 0
    assert here("log", "verify", "--head", "f" * 64).code == 1


def test_the_log_groups_calls_by_session_and_shows_every_record_of_one_call(here: Here) -> None:
    here("call", "read", '{"path": "note.txt"}')
    here("call", "write", '{"path": "new.txt", "content": "x"}', "--headless")
    read, write = (json.loads(line) for line in here("log", "--json").out.splitlines())
    assert (read["tool"], read["state"], read["arguments"]) == ("read", "output", {"path": "note.txt"})
    assert (read["permission"]["rule"], read["permission"]["scope"]) == ("allow fs.read **", "default")
    assert (write["tool"], write["state"], write["error_kind"]) == ("write", "rejected", "denied")
    assert write["permission"] is None and write["opener"]["client"] == "cli"
    first, second = here("log").out.split("\n\n")
    assert first.startswith(f"{read['session_id']}  cli, agent default, mode ask\n") and read["call_id"] in first
    assert "  ✓ read  note.txt" in first and "    allowed by 'allow fs.read **' (default scope)" in first
    assert "  ✗ write  new.txt  content=x  rejected" in second and "    denied: " in second
    kinds = [json.loads(line)["kind"] for line in here("log", "--call", write["call_id"], "--json").out.splitlines()]
    assert kinds[0] == "proposed" and kinds[-1] == "rejected"


def test_log_on_a_terminal_wraps_at_words_and_uses_color_unless_disabled(
    handrail: Program, on_a_terminal: Terminals
) -> None:
    handrail("call", "write", '{"path": "new.txt", "content": "x"}', "--headless")
    shown: list[str] = []
    for arguments, variables in (((), {}), (("--no-color",), {}), ((), {"NO_COLOR": "1"}), ((), {"TERM": "dumb"})):
        terminal = on_a_terminal(
            *handrail.command("log", *arguments), environment={"COLUMNS": "60", "NO_COLOR": "", **variables}
        )
        assert terminal.end() == 0
        shown.append(terminal.shown)
    assert "\x1b[31m✗" in shown[0] and shown[1] == shown[2] == shown[3] and "\x1b" not in shown[1]
    assert max(map(len, shown[1].splitlines())) <= 60
    assert "has no user to ask, so the call is denied." in " ".join(shown[1].split())


def test_log_of_an_unused_workspace_reports_that_it_has_no_records(here: Here) -> None:
    for arguments in ((), ("--records",), ("verify",)):
        done = here("log", *arguments)
        assert (done.code, done.out) == (0, "") and "has no records of the workspace" in done.err
    # Unless somebody has noted that there was one.
    done = here("log", "verify", "--head", "ab" * 32)
    assert done.code == 1 and "not intact" in done.err
    assert json.loads(here("log", "verify", "--json").out)["ok"]


def test_a_second_process_in_the_same_workspace_joins_the_first(handrail: Program, on_a_terminal: Terminals) -> None:
    first = on_a_terminal(*handrail.command("call", "write", '{"path": "new.txt", "content": "x"}'))
    first.wait_for("> ")
    second = handrail("call", "read", '{"path": "note.txt"}')
    assert second.code == 0 and second.err == ""
    assert handrail("log", "--json").code == 0
    first.type("r\n")
    assert first.end() == 3


def test_a_faulty_configuration_exits_with_5_and_every_fault_is_listed(here: Here, tmp_path: Path) -> None:
    config = tmp_path / "handrail.toml"
    config.write_text('rulez = []\n[limits]\nlock_wait_ms = "long"\n')
    done = here("call", "read", "{}", "--config", str(config))
    assert done.code == 5 and "rulez" in done.err and "lock_wait_ms" in done.err


@pytest.mark.proves("S-08")
def test_doctor_reports_which_protections_this_machine_can_enforce(here: Here) -> None:
    done = here("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.out)}
    assert {"sandbox", "ripgrep", "state", "tools"} <= set(checks)
    assert done.code == (5 if checks["sandbox"]["state"] == "problem" else 0)
    shown = " ".join(here("doctor").out.split())
    assert all(name in shown for name in checks)
    assert all(
        " ".join(checks[name]["detail"].split()) in shown for name in ("python", "sandbox", "tools", "configuration")
    )


@pytest.mark.proves("K-10")
def test_doctor_shows_what_each_tool_adds_to_an_agents_set(here: Here) -> None:
    shown = here("doctor", "--agent", "default")
    assert shown.code == 0 and "capabilities of agent default" in shown.out
    assert "  bash, sandbox: " in shown.out and "    adds  shell.run python3 -" in shown.out
    whole = json.loads(here("doctor", "--agent", "default", "--json").out)
    assert {tool["id"] for tool in whole["tools"]} >= {"read", "bash"} and whole["ceiling"] is None
    unknown = here("doctor", "--agent", "nobody")
    assert unknown.code == 2 and "'nobody' does not exist" in unknown.err
    assert here("doctor", "--agent", "default", "--self-check").code == 2


@pytest.mark.proves("S-11")
def test_doctor_self_check_tests_the_sandbox(here: Here) -> None:
    done = here("doctor", "--self-check", "--json")
    told = json.loads(done.out)
    assert sum(told["counts"].values()) == len(told["checks"])
    assert done.code == (5 if told["counts"]["open"] else 0)
    nothing = here("doctor", "--self-check", "--set", "sandbox.provider=nosuch")
    assert nothing.code == 5 and "Unknown sandbox provider: 'nosuch'" in nothing.err


def test_doctor_reports_the_sandbox_even_with_a_faulty_configuration(here: Here, tmp_path: Path) -> None:
    config = tmp_path / "handrail.toml"
    config.write_text("rulez = []\n")
    done = here("doctor", "--config", str(config))
    assert done.code == 5 and "rulez" in done.out and "sandbox" in done.out
