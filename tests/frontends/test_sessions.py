"""Sessions on the command line: listed, shown, resumed after a crash, forked and closed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.conftest import PATIENCE_S, Here, Program, SleepingCommand

from handrail.agent.conversation import restore_conversation
from handrail.agent.model_protocol import CallResultsMessage, ModelRequest
from handrail.agent.providers.openai import _messages  # pyright: ignore[reportPrivateUsage]
from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log
from handrail.testing.provider_request_checks import find_chat_completions_faults


def script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"version = 1\n{text}")
    return f"script:{path}"


ANSWER = '[[turns]]\ntext = "The note has two lines."\n'
GO_ON = """
[[turns]]
text = "Then I go on."
[turns.expect]
task = "go on"
"""


def listed(here: Here, *more: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in here("sessions", "--json", *more).out.splitlines()]


@pytest.fixture
def talked(here: Here, tmp_path: Path) -> str:
    """A session in which a task was answered; its id."""
    done = here("run", "count the lines", "--model", script(tmp_path, "answer.toml", ANSWER), "--json")
    assert done.code == 0
    return json.loads(done.out.splitlines()[0])["id"]


@pytest.mark.proves("A-10", "F-02a")
def test_a_session_is_listed_shown_and_resumed(here: Here, tmp_path: Path, talked: str) -> None:
    (facts,) = listed(here)
    assert (facts["id"], facts["state"], facts["messages"], facts["task"]) == (
        talked,
        "suspended",
        2,
        "count the lines",
    )
    table = here("sessions").out
    assert talked in table and "suspended" in table and "count the lines" in table
    go_on = script(tmp_path, "on.toml", GO_ON)
    assert here("run", "go on", "--resume", talked, "--model", go_on).out == "Then I go on.\n"
    assert here("run", "--resume", "go on", "--model", go_on).out == "Then I go on.\n"
    assert here("run", "go on", "--model", go_on, "--resume").out == "Then I go on.\n"
    shown = here("sessions", "show", talked).out
    assert shown.count("> go on") == 3 and "> count the lines" in shown and "The note has two lines." in shown
    whole = json.loads(here("sessions", "show", talked, "--json").out)
    assert whole["session"]["messages"] == len(whole["messages"]) == 8
    assert len(listed(here)) == 1


@pytest.mark.proves("A-10")
def test_a_fork_is_a_separate_session_and_a_closed_session_stays_closed(
    here: Here, tmp_path: Path, talked: str
) -> None:
    go_on = script(tmp_path, "on.toml", GO_ON)
    assert here("run", "go on", "--fork", talked, "--model", go_on).code == 0
    forked = here("sessions", "fork", talked).out.strip()
    by_id = {facts["id"]: facts for facts in listed(here)}
    assert len(by_id) == 3 and by_id[forked]["forked_from"] == talked
    assert sorted(facts["messages"] for facts in by_id.values()) == [2, 2, 4]
    assert here("sessions", "close", talked, forked).code == 0
    assert {facts["id"]: facts["state"] for facts in listed(here, "--all")}[talked] == "closed"
    assert {facts["id"] for facts in listed(here)} == by_id.keys() - {talked, forked}
    done = here("run", "go on", "--resume", talked, "--model", go_on)
    assert done.code == 2 and "its messages were removed" in done.err
    assert here("sessions", "close", "--unused-for", "0").code == 0
    assert {facts["state"] for facts in listed(here, "--all")} == {"closed"}
    assert "--all" in here("sessions").err
    done = here("run", "go on", "--resume", "--model", go_on)
    assert done.code == 2 and "No session can be resumed" in done.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "--model", "script:x"), "TASK"),
        (("run", "t", "--resume", "ses_1", "--fork", "ses_1", "--model", "script:x"), "one of them"),
        (("sessions", "show"), "Expected exactly one session"),
        (("sessions", "close"), "--unused-for"),
        (("sessions", "show", "x", "--unused-for", "3"), "option of `close`"),
        (("sessions", "revoke", "x"), "revoke"),
    ],
)
def test_a_contradictory_command_is_refused_with_advice(here: Here, arguments: tuple[str, ...], told: str) -> None:
    done = here(*arguments)
    assert done.code == 2 and told in done.err


def test_an_unknown_session_is_refused_with_the_nearest_id(here: Here, tmp_path: Path, talked: str) -> None:
    wrong = talked[:-1] + ("0" if talked[-1] != "0" else "1")
    for command in (("sessions", "show", wrong), ("sessions", "close", wrong)):
        done = here(*command)
        assert done.code == 2 and f"Did you mean {talked}?" in done.err
    done = here("run", "x", "--resume", wrong, "--model", script(tmp_path, "on.toml", GO_ON))
    assert done.code == 2 and talked in done.err


MID_RUN = """
[[turns]]
text = "I write, and then I sleep."
[[turns.calls]]
name = "write"
arguments = { path = "made.txt", content = "once" }
[[turns.calls]]
name = "bash"
arguments = %s
[[turns.calls]]
name = "write"
arguments = { path = "later.txt", content = "never" }
"""
AFTER_THE_KILL = """
[[turns]]
text = "I saw what became of it."
"""


@pytest.mark.proves("A-10")
def test_a_run_killed_during_its_calls_resumes_with_their_known_results(
    handrail: Program, here: Here, tmp_path: Path
) -> None:
    sleeper = SleepingCommand(handrail)
    arguments = json.loads(sleeper.arguments)
    model = script(tmp_path, "mid.toml", MID_RUN % ("{ command = " + json.dumps(arguments["command"]) + " }"))
    rules = ["--rule", "allow write", "--rule", "allow fs.write", "--rule", sleeper.rule]
    running = subprocess.Popen(
        handrail.cold("run", "work", "--model", model, "--json", *rules),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        sleeper.wait_until_it_runs()
        assert (handrail.workspace / "made.txt").read_text() == "once"
    finally:
        os.kill(running.pid, signal.SIGKILL)
        running.wait(PATIENCE_S)
        assert running.stdout is not None
        running.stdout.close()
    sleeper.wait_until_it_is_gone()

    (facts,) = listed(here)
    assert facts["state"] == "suspended" and facts["messages"] == 2
    done = here("run", "--resume", "--model", script(tmp_path, "after.toml", AFTER_THE_KILL), "--json", *rules)
    events = [json.loads(line) for line in done.out.splitlines()]
    assert done.code == 0 and events[0] == {"event": "session", "id": facts["id"]}
    results = [event["result"] for event in events if event["event"] == "result"]
    assert results[0]["type"] == "output" and results[0]["metadata"]["replayed"]
    assert [result["metadata"].get("error_kind") for result in results[1:]] == ["interrupted", "interrupted"] or [
        result["metadata"].get("error_kind") for result in results[1:]
    ] == ["interrupted", "cancelled"]
    assert not (handrail.workspace / "later.txt").exists()
    assert (handrail.workspace / "made.txt").read_text() == "once"
    (facts,) = listed(here)
    assert facts["messages"] == 4
    with LogReader.open_database(next(handrail.state.rglob("handrail.db"))) as reader:
        assert verify_log(reader).ok
        assert len(reader.calls()) <= 3, "nothing was proposed again"


EVERYWHERE = """
[[turns]]
text = "First I look."
[[turns.calls]]
name = "read"
arguments = { path = "note.txt" }
[[turns.calls]]
name = "write"
arguments = { path = "a.txt", content = "a" }

[[turns]]
text = "Then I write."
[[turns.calls]]
name = "write"
arguments = { path = "b.txt", content = "b" }
[[turns.calls]]
name = "nothing.like.it"

[[turns]]
text = "Done."
"""
LINES = 14
"""Lines of JSON that the whole run prints."""


def killed_after(handrail: Program, model: str, lines: int) -> int:
    """Start a run, kill it with -9 after this many lines, and return how many it printed."""
    command = handrail.cold("run", "work", "--model", model, "--json", "--rule", "allow write")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    ) as running:
        assert running.stdout is not None
        seen = 0
        while seen < lines and running.stdout.readline():
            seen += 1
        os.kill(running.pid, signal.SIGKILL)
        return seen


def check_gone_on_with(handrail: Program, here: Here, model: str, session_id: str) -> None:
    """Go on with a session that was killed: its history is one that a provider takes, and no effect comes twice."""
    before = {name: (handrail.workspace / name).exists() for name in ("a.txt", "b.txt")}
    done = here("run", "go on", "--resume", session_id, "--model", model)
    assert done.code == 0 and done.out == "Then I go on.\n", done.err
    whole = json.loads(here("sessions", "show", session_id, "--json").out)
    messages: list[dict[str, Any]] = whole["messages"]
    found = restore_conversation(enumerate(messages))
    assert found.open is None
    request = ModelRequest("", found.messages, [])
    assert find_chat_completions_faults({"messages": list(_messages(request))}) == []
    assert {name: (handrail.workspace / name).exists() for name in before} == before
    calls = [row["call_id"] for row in whole["calls"]]
    assert len(calls) == len(set(calls)) <= 4
    answers = [r for m in found.messages if isinstance(m, CallResultsMessage) for r in m.results]
    for row in whole["calls"]:
        if row["tool"] == "write" and row["state"] == "output":
            assert sum('"created":true' in answer.text for answer in answers) >= 1
    with LogReader.open_database(next(handrail.state.rglob("handrail.db"))) as reader:
        assert verify_log(reader).ok


@pytest.mark.proves("A-10")
@pytest.mark.parametrize("lines", [1, 3, 4, 6, 8, 10])
def test_a_run_killed_after_any_printed_line_can_be_resumed(
    handrail: Program, here: Here, tmp_path: Path, lines: int
) -> None:
    killed_after(handrail, script(tmp_path, "all.toml", EVERYWHERE), lines)
    go_on = script(tmp_path, "on.toml", GO_ON)
    for facts in listed(here):
        assert facts["state"] == "suspended"
        check_gone_on_with(handrail, here, go_on, facts["id"])
    assert len(listed(here)) == 1


@pytest.mark.slow
def test_a_hundred_runs_killed_at_any_point_can_each_be_resumed(handrail: Program, here: Here, tmp_path: Path) -> None:
    model, go_on = script(tmp_path, "all.toml", EVERYWHERE), script(tmp_path, "on.toml", GO_ON)
    for round_ in range(100):
        for name in ("a.txt", "b.txt"):
            (handrail.workspace / name).unlink(missing_ok=True)
        killed_after(handrail, model, 1 + round_ % LINES)
        latest = max(listed(here), key=lambda facts: facts["opened_ns"])
        check_gone_on_with(handrail, here, go_on, latest["id"])


@pytest.mark.proves("A-10")
def test_a_call_awaiting_approval_runs_once_when_its_session_resumes(
    handrail: Program, here: Here, tmp_path: Path
) -> None:
    model = script(tmp_path, "all.toml", EVERYWHERE)
    done = here("run", "work", "--model", model, "--json")
    outcome = json.loads(done.out.splitlines()[-1])
    assert done.code == 4 and outcome["status"] == "awaiting_approval"
    (asked,) = outcome["pending_approvals"]
    assert not (handrail.workspace / "a.txt").exists()
    go_on = script(tmp_path, "on.toml", '[[turns]]\ntext = "It is written."\n')
    still = here("run", "--resume", "--model", go_on)
    assert still.code == 4 and f"handrail approve {asked}" in still.err
    (facts,) = listed(here)
    assert facts["awaiting_approval"] == [asked] and asked in here("sessions").out
    assert here("approve", asked, "--once").code == 0
    assert not (handrail.workspace / "a.txt").exists(), "an approval runs nothing"
    done = here("run", "--resume", facts["id"], "--model", go_on)
    assert done.code == 0 and done.out == "It is written.\n" and "✓ write" in done.err
    assert (handrail.workspace / "a.txt").read_text() == "a"
    (handrail.workspace / "a.txt").unlink()
    assert here("run", "again", "--resume", facts["id"], "--model", go_on).code == 0
    assert not (handrail.workspace / "a.txt").exists()


def test_an_unused_workspace_has_no_sessions(here: Here) -> None:
    assert here("sessions").err == "No sessions.\n"
    assert (here("sessions", "--json").code, here("sessions", "--json").out) == (0, "")
    for action in ("show", "close"):
        done = here("sessions", action, "ses_1")
        assert done.code == 2 and "Session 'ses_1' does not exist" in done.err
    assert here("sessions", "close", "--unused-for", "1").code == 0
