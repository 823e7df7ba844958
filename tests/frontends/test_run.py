"""``handrail run``: output, approvals, and the end of a run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from tests.frontends.conftest import Here, Program, SleepingCommand, Terminals


def test_an_unavailable_model_is_reported_before_the_run_starts(here: Here) -> None:
    done = here("run", "a task", "--model", "openai:gpt-5")
    assert done.code == 5 and "OPENAI_API_KEY" in done.err
    assert here("run", "a task", "--model", "gpt-5").code == 2


SCRIPT = """
[[turns]]
text = "I look at the note."
[[turns.calls]]
name = "read"
arguments = { path = "note.txt" }
[[turns.calls]]
name = "write"
arguments = { path = "new.txt", content = "x" }

[[turns]]
text = "The note has two lines."
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.toml"
    path.write_text(SCRIPT)
    return f"script:{path}"


def test_a_run_executes_the_models_calls_and_prints_its_answer(here: Here, script: str) -> None:
    done = here("run", "look at the note", "--model", script, "--headless")
    assert done.code == 0
    assert done.out == "I look at the note.\nThe note has two lines.\n"
    assert "→ read" in done.err and "✓ read" in done.err and "✗ write  denied" in done.err


def test_a_run_in_json_prints_one_event_per_line_and_the_outcome_last(here: Here, script: str) -> None:
    events = [
        json.loads(line) for line in here("run", "look", "--model", script, "--json", "--headless").out.splitlines()
    ]
    kinds = [event["event"] for event in events]
    assert kinds.count("call") == kinds.count("result") == 2 and kinds[-1] == "finished"
    results = [event["result"] for event in events if event["event"] == "result"]
    assert [result["type"] for result in results] == ["output", "error"]
    assert events[-1]["status"] == "answered" and events[-1]["calls"] == 2


@pytest.mark.proves("A-08")
def test_a_run_without_an_answer_exits_with_1_and_gives_the_reason(here: Here, script: str) -> None:
    done = here("run", "look", "--model", script, "--max-turns", "1", "--headless")
    assert done.code == 1 and "budget: " in done.err
    done = here("run", "look", "--model", script, "--max-calls", "1", "--rule", "allow write")
    assert done.code == 1 and "budget: " in done.err


@pytest.mark.proves("A-08")
@pytest.mark.parametrize(
    ("option", "least", "budget"), [("--max-tokens", "1", "tokens"), ("--max-seconds", "1e-9", "seconds")]
)
def test_a_token_or_time_budget_ends_a_run_before_its_calls(
    here: Here, script: str, option: str, least: str, budget: str
) -> None:
    done = here("run", "look", "--model", script, option, least, "--json")
    events = [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 1
    assert (events[-1]["event"], events[-1]["status"], events[-1]["budget"]) == ("finished", "budget", budget)
    assert all(event["result"]["type"] == "error" for event in events if event["event"] == "result")


def test_the_terminal_user_approves_a_call_of_a_run(handrail: Program, script: str, on_a_terminal: Terminals) -> None:
    terminal = on_a_terminal(*handrail.command("run", "look", "--model", script))
    terminal.wait_for("write requires approval")
    terminal.wait_for("> ")
    terminal.type("o\n")
    assert terminal.end() == 0 and "two lines" in terminal.shown
    assert (handrail.workspace / "new.txt").read_text() == "x"


def test_ctrl_c_exits_a_run_with_130_and_cancels_its_call(
    handrail: Program, tmp_path: Path, on_a_terminal: Terminals
) -> None:
    sleeper = SleepingCommand(handrail)
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"turns": [{"calls": [{"name": "bash", "arguments": json.loads(sleeper.arguments)}]}]}))
    terminal = on_a_terminal(*handrail.command("run", "wait", "--model", f"script:{path}", "--rule", sleeper.rule))
    sleeper.wait_until_it_runs()
    terminal.type("\x03")
    assert terminal.end() == 130 and "Traceback" not in terminal.shown
    assert sleeper.left_over() == []
    rows = [json.loads(line) for line in handrail("log", "--json").out.splitlines()]
    (row,) = (one for one in rows if one["state"] != "turn-finished")
    assert (row["state"], row["error_kind"]) == ("error", "cancelled")


TWO_QUESTIONS = SCRIPT.replace(
    'name = "read"\narguments = { path = "note.txt" }', 'name = "write"\narguments = { path = "a", content = "x" }'
)


def test_a_waiting_run_prints_a_command_that_answers_its_request(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDRAIL_HEADLESS", "0")
    for text, several in ((SCRIPT, False), (TWO_QUESTIONS, True)):
        (tmp_path / "asks.toml").write_text(text)
        done = here("run", "a task", "--model", f"script:{tmp_path / 'asks.toml'}")
        assert done.code == 4
        (line,) = [line for line in done.err.splitlines() if line.startswith("to answer: handrail approve")]
        assert len(line.split()) == (4 if several else 5)
        assert here(*line.split()[3:]).code == 0


def test_a_stopped_run_names_the_command_that_resumes_it_with_the_same_model(here: Here, script: str) -> None:
    stopped = here("run", "look", "--model", script, "--max-turns", "1", "--headless")
    (line,) = [line for line in stopped.err.splitlines() if line.startswith("to resume: handrail ")]
    done = here(*shlex.split(line)[3:], "--headless")
    assert done.code == 0 and "two lines" in done.out


LONG = "".join(
    f'[[turns]]\ntext = "Step {n}."\n[[turns.calls]]\nname = "read"\narguments = {{ path = "note.txt" }}\n\n'
    for n in range(4)
)


@pytest.mark.proves("A-08")
def test_run_compacts_a_session_and_reports_removed_and_kept_messages(here: Here, tmp_path: Path) -> None:
    (script := tmp_path / "long.toml").write_text(f'{LONG}[[turns]]\ntext = "Done."\n')
    model = f"script:{script}"
    begun = here("run", "read it", "--model", model, "--headless", "--json")
    session = json.loads(begun.out.splitlines()[0])["id"]
    assert here("run", "read it", "--compact", "--model", model).code == 2
    done = here("run", "--resume", session, "--compact", "--model", model, "--json")
    assert done.code == 0
    _, made = map(json.loads, done.out.splitlines())
    assert (made["event"], made["removed_messages"], made["kept_messages"], made["was_requested"]) == (
        "compacted",
        9,
        1,
        True,
    )
    again = here("run", "--resume", session, "--compact", "--model", model)
    assert again.code == 0 and "Nothing to compact: all 2 messages" in again.err
    row = next(line for line in here("log", "--session", session).out.splitlines() if "compacted" in line)
    assert row.endswith("9 messages removed, 1 kept")
