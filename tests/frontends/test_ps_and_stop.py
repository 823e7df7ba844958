"""``handrail ps`` and ``handrail stop``: all work is listed, stopped from another process, and recorded."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.frontends.conftest import Here, Program, SleepingCommand

Started = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def started() -> Iterator[Started]:
    """Start ``handrail run`` with a model that makes one long call and then says something."""
    running: list[subprocess.Popen[str]] = []

    def start(handrail: Program, sleeper: SleepingCommand, *options: str) -> subprocess.Popen[str]:
        script = handrail.state.parent / f"script-{len(running)}.json"
        call = {"name": "bash", "arguments": json.loads(sleeper.arguments)}
        script.write_text(json.dumps({"turns": [{"calls": [call]}, {"text": "Then I go on."}]}))
        command = handrail.command("run", "sleep", "--model", f"script:{script}", "--rule", sleeper.rule, *options)
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        sleeper.wait_until_it_runs()
        return running[-1]

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def list_processes(here: Here, *arguments: str) -> list[dict[str, Any]]:
    return json.loads(here("ps", "--json", *arguments).out)


def records(here: Here, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in here("log", "--records", "--json", "--limit", "500").out.splitlines()]
    return [row for row in rows if row["kind"] == kind]


def test_ps_shows_a_call_of_another_process_and_stop_ends_only_the_call(
    handrail: Program, here: Here, started: Started
) -> None:
    sleeper = SleepingCommand(handrail)
    run = started(handrail, sleeper)
    (one,) = list_processes(here)
    assert one["workspace"] == str(handrail.workspace) and one["holder"]["frontend"] == "cli"
    (session,) = one["sessions"]
    (call,) = session["calls"]
    assert (session["task"], session["opener"]["client"], call["tool"]) == ("sleep", "cli", "bash")
    shown = here("ps").out
    assert "held by handrail cli, pid" in shown and "▸ bash  ./sleeper.sh" in shown and call["call_id"] in shown
    done = here("stop", call["call_id"])
    assert (done.code, done.out) == (0, f"stopped  call {call['call_id']}\n"), done.err
    out, err = run.communicate()
    assert run.returncode == 0 and "✗ bash  cancelled" in err and out == "Then I go on.\n"
    assert sleeper.left_over() == []
    (record,) = records(here, "stop-requested")
    assert record["session_id"] == session["id"]
    body = {"target": call["call_id"], "by": "handrail stop", "sessions": [], "calls": [call["call_id"]], "jobs": []}
    assert record["body"] == body
    assert list_processes(here) == [] and "Nothing runs" in here("ps").err


def test_a_stopped_session_ends_its_run_and_can_be_resumed(handrail: Program, here: Here, started: Started) -> None:
    sleeper = SleepingCommand(handrail)
    run = started(handrail, sleeper)
    ((session,),) = (one["sessions"] for one in list_processes(here))
    assert here("stop", session["id"]).code == 0
    out, err = run.communicate()
    assert run.returncode == 1 and "cancelled: " in err and f"--resume {session['id']}" in err and "go on" not in out
    assert sleeper.left_over() == []
    (script := handrail.state.parent / "again.json").write_text(json.dumps({"turns": [{"text": "Back."}]}))
    assert here("run", "--resume", session["id"], "go on", "--model", f"script:{script}").out == "Back.\n"


def test_stop_all_stops_the_runs_of_every_workspace(
    handrail: Program, here: Here, started: Started, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Program(tmp_path / "other", handrail.state, handrail.config)
    both = [(program, SleepingCommand(program)) for program in (handrail, other)]
    runs = [started(program, sleeper) for program, sleeper in both]
    command = [*other.command("ps")[: -len(other.common)], "--state", str(handrail.state), "--json"]
    everywhere = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {one["workspace"] for one in everywhere} == {str(handrail.workspace), str(other.workspace)}
    assert [one["workspace"] for one in list_processes(here)] == [str(handrail.workspace)]
    command = [*other.command("stop")[: -len(other.common)], "--state", str(handrail.state), "--all", "--json"]
    stopped = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(stopped) == 2 and all(len(one["sessions"]) == 1 == len(one["calls"]) for one in stopped)
    for run, (_, sleeper) in zip(runs, both, strict=True):
        run.communicate()
        assert run.returncode == 1 and sleeper.left_over() == []


def test_stopping_a_session_of_a_joined_process_ends_only_its_run(
    handrail: Program, here: Here, started: Started
) -> None:
    sleeper = SleepingCommand(handrail)
    holder = started(handrail, sleeper)
    script = handrail.state.parent / "joined.json"
    call = {"name": "bash", "arguments": {"command": "./sleeper.sh second"}}
    script.write_text(json.dumps({"turns": [{"calls": [call]}, {"text": "Then I go on."}]}))
    command = handrail.command("run", "wait", "--model", f"script:{script}", "--rule", sleeper.rule)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as joined:
        waiting: list[str] = []
        while not waiting:
            sessions = [session for one in list_processes(here) for session in one["sessions"]]
            waiting = [one["id"] for one in sessions if any(not call["is_running"] for call in one["calls"])]
        assert "waits for locks" in here("ps").out
        assert here("stop", waiting[0]).code == 0
        out, err = joined.communicate()
    assert joined.returncode == 1 and "cancelled: " in err and "go on" not in out
    assert sleeper.left_over() != [] and holder.poll() is None
    assert here("stop", "--all").code == 0
    holder.communicate()
    assert sleeper.left_over() == []


def test_ps_shows_a_background_job_and_stop_ends_it(handrail: Program, here: Here, started: Started) -> None:
    sleeper = SleepingCommand(handrail)
    script = handrail.state.parent / "job.json"
    arguments = {**json.loads(sleeper.arguments), "background": True}
    turns = [{"calls": [{"name": "bash", "arguments": arguments}]}, {"text": "Started."}, {"text": "It has ended."}]
    script.write_text(json.dumps({"turns": turns}))
    command = handrail.command("run", "sleep", "--model", f"script:{script}", "--rule", sleeper.rule)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        sleeper.wait_until_it_runs()
        (one,) = list_processes(here)
        (job,) = one["jobs"]
        assert f"↻ bash  {job['summary']}" in " ".join(here("ps").out.split("\n")) or job["id"] in here("ps").out
        assert here("stop", job["id"]).out == f"stopped  job {job['id']}\n"
        out, _ = run.communicate()
    assert out.endswith("It has ended.\n") and sleeper.left_over() == []


def test_stop_names_the_running_sessions_when_its_target_does_not_run(
    handrail: Program, here: Here, started: Started
) -> None:
    assert here("stop").code == 2 and here("stop", "x", "--all").code == 2
    nothing = here("stop", "ses_x")
    assert nothing.code == 1 and "does not run: no process holds a workspace here" in nothing.err
    assert here("call", "write", '{"path": "a", "content": "x"}').code in (3, 4)
    unheld = here("stop", "ses_x/1.0")
    assert unheld.code == 1
    assert here("stop", "--all").code == 0
    sleeper = SleepingCommand(handrail)
    run = started(handrail, sleeper)
    wrong = here("stop", "ses_\x1b[2Jx")
    assert (
        wrong.code == 1 and "does not run in this workspace. Running now: ses_" in wrong.err and "\x1b" not in wrong.err
    )
    assert here("stop", "--all").code == 0
    run.communicate()


def test_a_paused_process_is_shown_as_paused(handrail: Program, here: Here, started: Started) -> None:
    sleeper = SleepingCommand(handrail)
    started(handrail, sleeper)
    pid = list_processes(here)[0]["holder"]["pid"]
    os.kill(pid, 19)
    try:
        while (one := list_processes(here)[0])["holder"]["state"] != "paused":
            pass
        assert one["sessions"] and "(paused)" in here("ps").out
        done = here("stop", "--all")
        assert done.code == 1 and f"{pid}" in done.err
    finally:
        os.kill(pid, 18)


class _EndlessModel(ThreadingHTTPServer):
    """A provider whose replies begin and never end. It counts the readers that it has, and that have left."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _EndlessReply)
        self.begun, self.left = threading.Semaphore(0), threading.Semaphore(0)


class _EndlessReply(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        delta = {"role": "assistant", "content": "And so on.\n"}
        piece = {"id": "1", "object": "chat.completion.chunk", "model": "m", "choices": [{"index": 0, "delta": delta}]}
        self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        assert isinstance(self.server, _EndlessModel)
        self.server.begun.release()
        self.connection.recv(1)  # returns when the client has left
        self.server.left.release()


@pytest.mark.parametrize("target", ["session", "--all"])
def test_a_stop_ends_the_reply_of_a_model_also_of_a_connected_process(
    handrail: Program, here: Here, target: str
) -> None:
    with _EndlessModel() as model:
        threading.Thread(target=model.serve_forever, daemon=True).start()
        options = ("--model", "openai:m", "--base-url", f"http://127.0.0.1:{model.server_port}/v1")
        running: list[subprocess.Popen[str]] = []
        for task in ("first", "second"):
            command = handrail.command("run", task, *options)
            environment = {**os.environ, "OPENAI_API_KEY": "k"}
            running.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
            )
            assert model.begun.acquire(timeout=60)
        sessions = [session["id"] for one in list_processes(here) for session in one["sessions"]]
        assert len(sessions) == 2
        for words in [(target,)] if target == "--all" else [(one,) for one in sessions]:
            assert here("stop", *words).code == 0
        for run in running:
            assert model.left.acquire(timeout=60)
            _, err = run.communicate()
            assert run.returncode == 1 and "cancelled: The user stopped the run." in err
        model.shutdown()
