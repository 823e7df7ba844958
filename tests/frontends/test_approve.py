"""``handrail approve``: requests are shown completely, answered from any front end, and used only by their call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.conftest import Here, Program, Terminals

from handrail.store.state_folders import prepare_folders

WRITE = json.dumps({"path": "new.txt", "content": "one\ntwo\n"})


@pytest.fixture(autouse=True)
def somebody_may_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("HANDRAIL_HEADLESS", raising=False)


def parked(here: Here, arguments: str = WRITE, tool: str = "write") -> str:
    """The id under which a call waits that was made without a terminal."""
    done = here("call", tool, arguments)
    assert done.code == 4, done
    return done.out.strip()


def listed(here: Here) -> list[dict[str, Any]]:
    return json.loads(here("approve", "--json").out)


@pytest.mark.proves("P-09")
def test_a_call_without_a_terminal_is_parked_and_runs_once_when_resumed(here: Here, handrail: Program) -> None:
    new = handrail.workspace / "new.txt"
    approval = parked(here)
    assert approval.startswith("apr_") and not new.exists()
    still = here("call", "--resume", approval)
    assert still.code == 4 and approval in still.err
    answered = here("approve", approval, "--once")
    assert answered.code == 0 and "once" in answered.out and not new.exists()
    done = here("call", "--resume", approval)
    assert done.code == 0 and new.read_text() == "one\ntwo\n"
    new.unlink()
    again = here("call", "--resume", approval)
    assert not new.exists() and again.code != 4
    late = here("approve", approval, "--reject")
    assert late.code == 1 and "conflict" in late.err
    assert here("log", "verify").code == 0


def test_a_headless_call_is_rejected_without_being_parked(here: Here) -> None:
    done = here("call", "write", WRITE, "--headless")
    assert done.code == 3 and listed(here) == []


@pytest.mark.proves("P-09")
def test_pending_requests_are_listed_in_full_with_visible_control_characters(here: Here) -> None:
    content = "x" * 5_000 + "\x1b[2J\u202eend"
    approval = parked(here, json.dumps({"path": "new.txt", "content": content}))
    shown = here("approve").out
    assert approval in shown and "x" * 5_000 + "\\e[2J\\u{202e}end" in shown
    assert "\x1b" not in shown and "\u202e" not in shown
    assert "store the rule  allow write new.txt" in shown and "deny write new.txt" in shown
    (row,) = listed(here)
    assert row["id"] == approval and row["arguments"]["content"] == content


@pytest.mark.parametrize(
    ("tool", "arguments", "diff"),
    [
        ("edit", {"path": "note.txt", "old": "second", "new": "2nd"}, ["-second line", "+2nd line", " first line"]),
        ("write", {"path": "note.txt", "content": "first line\n"}, ["-second line"]),
        ("write", {"path": "fresh.txt", "content": "hello\n"}, ["--- /dev/null", "+hello"]),
        (
            "file.patch",
            {"path": "note.txt", "operations": [{"op": "append", "content": "third line"}]},
            ["+third line"],
        ),
        (
            "edit",
            {"path": "note.txt", "old": "nowhere", "new": "x"},
            ["this call would fail: `old` was not found in note.txt"],
        ),
        ("write", {"path": "../../out.txt", "content": "x"}, ["this call would fail"]),
    ],
)
def test_an_edit_is_shown_as_a_diff_against_the_current_file(
    here: Here, handrail: Program, tool: str, arguments: dict[str, Any], diff: Sequence[str]
) -> None:
    before = (handrail.workspace / "note.txt").read_text()
    done = here("call", tool, json.dumps(arguments))
    if done.code != 4:  # refused before anybody is asked
        assert "out.txt" in str(arguments) and done.code in (1, 3)
        return
    shown = here("approve", done.out.strip()).out
    for line in diff:
        assert line in shown
    assert (handrail.workspace / "note.txt").read_text() == before


@pytest.mark.proves("P-07")
def test_a_rejection_reaches_the_caller_with_its_message(here: Here, handrail: Program) -> None:
    approval = parked(here)
    assert here("approve", approval, "--reject", "--message", "not there").code == 0
    done = here("call", "--resume", approval)
    assert done.code == 3 and "not there" in done.err
    assert not (handrail.workspace / "new.txt").exists()


@pytest.mark.proves("P-07", "P-08")
def test_a_project_rule_is_listed_and_can_be_revoked(here: Here) -> None:
    answered = here("approve", parked(here), "--project")
    assert "stored rule  allow write new.txt" in answered.out
    assert here("call", "write", WRITE).code == 0
    (rule,) = json.loads(here("approve", "--rules", "--json").out)
    assert rule["text"] == "allow write new.txt" and rule["id"] in here("approve", "--rules").out
    assert here("approve", "--revoke", rule["id"]).code == 0
    assert here("call", "write", WRITE).code == 4
    assert here("approve", "--revoke", rule["id"]).code == 1


@pytest.mark.proves("P-09")
def test_changed_arguments_are_passed_as_json_and_validated(here: Here, handrail: Program) -> None:
    approval = parked(here)
    bad = here("approve", approval, "--arguments", '{"path": 3, "content": "x"}')
    assert bad.code == 1 and "invalid_input" in bad.err
    assert here("approve", approval, "--once", "--arguments", "[1]").code == 2
    file = handrail.workspace.parent / "changed.json"
    file.write_text('{"path": "other.txt", "content": "x"}')
    assert here("approve", approval, "--arguments", f"@{file}").code == 0
    assert here("call", "--resume", approval).code == 0
    assert (handrail.workspace / "other.txt").read_text() == "x" and not (handrail.workspace / "new.txt").exists()


def test_questions_are_answered_with_one_answer_option_each(here: Here) -> None:
    asked = {
        "questions": [{"question": "Which?", "options": [{"label": "x"}], "multi_select": True}, {"question": "Why?"}]
    }
    approval = parked(here, json.dumps(asked), "question")
    shown = here("approve", approval).out
    assert "Which?" in shown and "1  x" in shown and "Why?" in shown
    assert here("approve", approval, "--answer", "x").code == 1
    assert here("approve", approval, "--once").code == 1
    assert here("approve", approval, "--answer", '["x", "y"]', "--answer", "[because").code == 0
    done = here("call", "--resume", approval, "--json")
    assert json.loads(done.out)["data"] == {"answers": [["x", "y"], ["[because"]]}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--once"], 2, "ID of the request is missing"),
        (["apr_x", "--message", "no"], 2, "`--message` is only for rejections"),
        (["apr_x", "--session", "--arguments", "{}"], 2, "Pass `--once`"),
        (["apr_x", "--once", "--answer", "x"], 2, "`--answer` is for questions"),
        (["apr_nothing"], 1, "does not exist in this workspace"),
        (["apr_\udc80\x1b[2J"], 1, "does not exist in this workspace"),
        (["apr_nothing", "--once"], 1, "does not exist in this workspace"),
        ([], 0, "No request is open"),
        (["--rules"], 0, "No rules are stored"),
        (["--revoke", "rul_nothing"], 1, "does not exist"),
    ],
)
def test_a_command_that_cannot_be_carried_out_is_explained_in_one_line(
    here: Here, arguments: Sequence[str], code: int, said: str
) -> None:
    done = here("approve", *arguments)
    assert done.code == code and said in done.err and "Traceback" not in done.err


@pytest.mark.proves("P-07")
def test_a_terminal_asks_about_all_waiting_calls_one_after_another(
    here: Here, handrail: Program, on_a_terminal: Terminals
) -> None:
    ids = [parked(here, json.dumps({"path": f"{name}.txt", "content": name})) for name in "abc"]
    terminal = on_a_terminal(*handrail.command("approve"))
    for approval, keys in zip(ids, ("o", "defer", "r no"), strict=True):
        seen = terminal.wait_for("> ")
        assert "write requires approval" in seen and f" of 3  {approval}" in seen
        terminal.type(f"{keys}\n")
    assert terminal.end() == 0
    assert [row["id"] for row in listed(here)] == [ids[1]]
    assert not (handrail.workspace / "a.txt").exists()
    assert here("call", "--resume", ids[0]).code == 0 and (handrail.workspace / "a.txt").exists()
    assert here("call", "--resume", ids[2]).code == 3


@pytest.mark.proves("P-09", "X-13")
def test_a_call_killed_while_waiting_still_awaits_approval_and_can_be_resumed(here: Here, handrail: Program) -> None:
    command = handrail.cold("call", "write", WRITE, "--wait")
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.readline().decode()
        os.kill(process.pid, signal.SIGKILL)
    approval = said.split()[0]
    assert approval.startswith("apr_")
    assert [row["id"] for row in listed(here)] == [approval]
    (call,) = [json.loads(line) for line in here("log", "--json").out.splitlines()]
    assert call["state"] in ("awaiting-approval", "suspended")
    assert here("approve", approval, "--once").code == 0
    assert here("call", "--resume", approval).code == 0
    assert (handrail.workspace / "new.txt").read_text() == "one\ntwo\n"
    assert here("log", "verify").code == 0


@pytest.mark.proves("P-09")
def test_an_answer_from_another_process_wakes_a_waiting_call(here: Here, handrail: Program) -> None:
    command = handrail.command("call", "write", WRITE, "--wait")
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        approval = process.stderr.readline().decode().split()[0]
        assert here("approve", approval, "--once").code == 0
        assert process.wait(60) == 0
    assert (handrail.workspace / "new.txt").exists() and listed(here) == []


@pytest.mark.parametrize("state", ["used", "new", "being made"])
def test_approve_wait_returns_with_the_next_request(here: Here, handrail: Program, state: str) -> None:
    if state == "used":
        assert here("call", "read", '{"path": "note.txt"}').code == 0
    if state == "being made":  # another process has begun with it
        prepare_folders(handrail.workspace, handrail.state).database_file.touch(0o600)
    command = handrail.command("approve", "--wait", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None and waiting.stderr is not None
        assert b"Waiting for a request" in waiting.stderr.readline()
        approval = parked(here)
        assert [row["id"] for row in json.loads(waiting.stdout.read())] == [approval]
        assert waiting.wait(60) == 0


def test_an_unused_workspace_has_no_waiting_requests(here: Here, handrail: Program, tmp_path: Path) -> None:
    done = here("approve", "--json")
    assert done.code == 0 and json.loads(done.out) == []


HOLDER = """
import asyncio, sys
from handrail import open_kernel

async def main():
    async with open_kernel(sys.argv[1], state=sys.argv[2]):
        print("HOLDS", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.proves("P-09", "X-13")
@pytest.mark.skipif(sys.platform != "linux", reason="joining needs Linux")
def test_a_waiting_call_survives_the_death_of_the_process_that_carried_it(here: Here, handrail: Program) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(handrail.workspace), str(handrail.state)], stdout=subprocess.PIPE
    )
    command = handrail.command("call", "write", WRITE, "--wait")
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"HOLDS\n"
        waiting = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with waiting:
            assert waiting.stderr is not None
            approval = waiting.stderr.readline().decode().split()[0]
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
            assert waiting.stderr.readline().decode().split()[0] == approval  # asked again, under the same id
            assert here("approve", approval, "--once").code == 0
            assert waiting.wait(60) == 0, waiting.stderr.read()
    assert (handrail.workspace / "new.txt").read_text() == "one\ntwo\n"
    (call,) = [json.loads(line) for line in here("log", "--json").out.splitlines()]
    kinds = [json.loads(line)["kind"] for line in here("log", "--call", call["call_id"], "--json").out.splitlines()]
    assert kinds.count("intended") == kinds.count("committed") == kinds.count("approval-requested") == 1
    assert here("log", "verify").code == 0


@pytest.mark.proves("P-09", "X-13")
@pytest.mark.skipif(sys.platform != "linux", reason="joining needs Linux")
def test_a_user_at_a_terminal_is_asked_again_when_the_holder_is_killed(
    here: Here, handrail: Program, on_a_terminal: Terminals
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(handrail.workspace), str(handrail.state)], stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"HOLDS\n"
        terminal = on_a_terminal(*handrail.command("call", "write", WRITE))
        terminal.wait_for("\n> ")
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        terminal.wait_for("no longer needs an answer here")
        terminal.wait_for("\n> ")
        terminal.type("o\n")
        assert terminal.end() == 0, terminal.shown
    assert (handrail.workspace / "new.txt").read_text() == "one\ntwo\n" and listed(here) == []
    assert here("log", "verify").code == 0


ALONE = """
import sys
from handrail.frontends.cli.command_group import run_command_line

code = run_command_line(sys.argv[1:])
print(*sorted(name for name in sys.modules if name.startswith("handrail.")), sep="\\n")
raise SystemExit(code)
"""


def loaded_for(handrail: Program, *arguments: str) -> tuple[str, set[str]]:
    """Return the output of a command in its own process, and the Handrail modules it loads."""
    command = [sys.executable, "-c", ALONE, "approve", *handrail.common, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    loaded = {line.removeprefix("handrail.") for line in lines if line.startswith("handrail.")}
    return done.stdout, loaded


@pytest.mark.skipif(sys.platform != "linux", reason="joining needs Linux")
def test_an_answer_uses_one_connection_if_another_process_holds_the_workspace(here: Here, handrail: Program) -> None:
    approval = parked(here)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(handrail.workspace), str(handrail.state)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    with holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"HOLDS\n"
            said, loaded = loaded_for(handrail, approval, "--project")
            assert "stored rule  allow write new.txt" in said
            rooms = {name.partition(".")[0] for name in loaded}
            assert not rooms & {"agent", "arbiter", "catalog", "config", "policy", "registry", "runtime", "sandbox"}
            assert len(loaded) < 80
            late = here("approve", approval, "--once")
            assert late.code == 1 and "conflict" in late.err and "project" in late.err
            denied = here("approve", parked(here, '{"path": "b", "content": ""}'), "--arguments", "{}")
            assert denied.code == 1 and "invalid_input" in denied.err
            (rule,) = json.loads(here("approve", "--rules", "--json").out)
            assert here("approve", "--revoke", rule["id"]).code == 0
            gone = here("approve", "--revoke", rule["id"])
            assert gone.code == 1 and "does not exist. List stored rules" in gone.err
            fixed = here("approve", approval, "--once", "--set", "limits.lock_wait_ms=1")
            assert fixed.code == 2 and "Cannot set " in fixed.err
        finally:
            holder.kill()


def test_an_answer_loads_no_kernel_if_no_process_holds_the_workspace(here: Here, handrail: Program) -> None:
    approval = parked(here)
    _, loaded = loaded_for(handrail, approval, "--once")
    rooms = {
        "kernel.held",
        "kernel.kernel_assembly",
        "arbiter.arbiter",
        "registry.generation_lifecycle",
        "sandbox.tier_probe",
        "kernel.sessions",
    }
    assert "store.lease" in loaded and not rooms & loaded
    assert here("call", "--resume", approval).code == 0 and (handrail.workspace / "new.txt").exists()
    assert here("log", "verify").code == 0


def test_a_message_of_the_user_is_kept_without_secrets(
    here: Here, handrail: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    approval = parked(here)
    monkeypatch.setenv("THE_TOKEN", "s3cr3t-value")
    handrail.config.mkdir()
    (file := handrail.config / "handrail.toml").write_text('[secrets]\ntoken = { env = "THE_TOKEN" }\n')
    said = here("approve", approval, "--reject", "--message", "not with s3cr3t-value", "--config", str(file))
    assert said.code == 0
    done = here("call", "--resume", approval)
    assert done.code == 3 and "not with" in done.err and "s3cr3t" not in done.err


def test_a_request_shows_its_expiry_and_a_question_how_to_answer_it(here: Here) -> None:
    shown = here("approve", parked(here)).out
    assert "requested a moment ago, expires in 7 days" in shown and "--answer" not in shown
    question = json.dumps({"questions": [{"question": "Which?", "header": "Colour"}]})
    assert "  to answer: --answer TEXT\n" in here("approve", parked(here, question, "question")).out


@pytest.mark.proves("T-06p")
def test_the_command_line_shows_the_complete_plan_and_takes_an_answer(here: Here) -> None:
    plan = "1. Read the parser.\n2. Mend it."
    refused = here("call", "plan_exit", json.dumps({"plan": plan}), "--headless", "--mode", "plan")
    assert refused.code == 1 and "The plan was not shown: no user is attached to this session." in refused.err
    done = here("call", "plan_exit", json.dumps({"plan": plan}), "--mode", "plan")
    assert done.code == 4
    approval = done.out.strip()
    shown = here("approve", approval).out
    assert "1. Read the parser." in shown and "2. Mend it." in shown and "Carry out, and accept edits" in shown
    none = here("approve", approval, "--answer", "9")
    assert none.code == 2 and "a number from 1 to 4" in none.err
    assert here("approve", approval, "--answer", '["Keep planning", "Look at the tests first."]').code == 0
    answer = json.loads(here("call", "--resume", approval, "--json").out)["data"]
    assert (answer["approved"], answer["mode"], answer["reason"]) == (False, "plan", "Look at the tests first.")


def test_an_answer_can_be_the_number_of_an_option(here: Here) -> None:
    done = here("call", "plan_exit", json.dumps({"plan": "1. Mend it."}), "--mode", "plan")
    approval = done.out.strip()
    assert "--answer NUMBER|TEXT" in here("approve", approval).out
    assert here("approve", approval, "--answer", "2").code == 0
    answer = json.loads(here("call", "--resume", approval, "--json").out)["data"]
    assert (answer["approved"], answer["mode"]) == (True, "accept-edits") and "reason" not in answer
    several = {"questions": [{"question": "Which?", "options": [{"label": "x"}, {"label": "y"}], "multi_select": True}]}
    approval = parked(here, json.dumps(several), "question")
    assert here("approve", approval, "--answer", "2, 1").code == 0
    assert json.loads(here("call", "--resume", approval, "--json").out)["data"] == {"answers": [["y", "x"]]}
