"""Terminals as a model uses them: started, typed into, read, resized and stopped, in a real sandbox."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.guests import joined_kernel
from tests.kernel.test_agents import confined
from tests.tools.test_jobs import left_over

from handrail import Kernel, Session
from handrail.arbiter.jobs import output_stream
from handrail.contract.calls_and_results import Result
from handrail.runtime import shell_service
from handrail.runtime.shell_service import MAX_TERMINALS
from handrail.testing.scripted_kernel import temporary_kernel

PYTHON = "python3 -q"
SHELL = "bash --noprofile --norc"
RULES = [
    *(f"allow terminal.start {command}" for command in (PYTHON, SHELL, "cat", "yes", "./program.sh *")),
    "allow terminal.send",
    "allow bash *",
    "allow terminal.start cd *",
]


@pytest.fixture
async def kernel(tmp_path: Path) -> AsyncGenerator[Kernel]:
    async with temporary_kernel(tmp_path, rules=RULES) as kernel:
        yield kernel


@pytest.fixture
async def session(kernel: Kernel) -> Session:
    return await kernel.session()


async def data(session: Session, name: str, /, **arguments: Any) -> dict[str, Any]:
    result = await session.call(f"terminal.{name}", arguments)
    assert result.ok, result.error_text
    return result.data


async def refused(session: Session, name: str, /, **arguments: Any) -> Result:
    result = await session.call(f"terminal.{name}", arguments)
    assert not result.ok, result.data
    return result


async def read_until_mark(session: Session, terminal: str, mark: str) -> str:
    """Return its output since the last read, up to ``write_marker_file``."""
    text = ""
    while mark not in text:
        read = await data(session, "read", id=terminal)
        text += read["text"]
        assert read["state"] == "running" or mark in text, (text, read)
    return text


async def ended(session: Session, terminal: str) -> dict[str, Any]:
    read = await data(session, "read", id=terminal)
    while read["state"] == "running":
        read = await data(session, "read", id=terminal)
    return read


def program(tmp_path: Path, text: str) -> None:
    script = tmp_path / "ws" / "program.sh"
    script.write_text(f"#!/bin/bash\n{text}\n")
    script.chmod(0o755)


@confined
@pytest.mark.proves("X-11", "X-12")
async def test_an_interpreter_in_a_terminal_accepts_input_interrupts_and_exit(session: Session) -> None:
    answered = await data(session, "start", command=PYTHON, name="a python")
    terminal = answered["job_id"]
    assert answered["state"] == "running" and "workspace:X" in answered["note"]
    await read_until_mark(session, terminal, ">>> ")
    assert (await data(session, "send", id=terminal, text="kept = 6 * 7\n"))["sent_bytes"] == 13
    await read_until_mark(session, terminal, ">>> ")
    await data(session, "send", id=terminal, text="print(kept)", keys="enter")
    assert "\n42\n" in await read_until_mark(session, terminal, ">>> ")
    await data(session, "send", id=terminal, text="import time; time.sleep(1000)\n")
    await data(session, "send", id=terminal, keys="ctrl-c")
    assert "KeyboardInterrupt" in await read_until_mark(session, terminal, ">>> ")
    (job,) = (await session.call("jobs", {})).data["jobs"]
    assert job["job_id"] == terminal and "a python" in job["about"]
    await data(session, "send", id=terminal, text="raise SystemExit(7)\n")
    end = await ended(session, terminal)
    assert (end["state"], end["exit_code"], end["has_more"]) == ("done", 7, False)
    assert session.notifications is not None and not await session.notifications.list_pending(), (
        "its end was told by the look"
    )
    gone = await refused(session, "send", id=terminal, text="x\n")
    assert gone.error_kind == "conflict" and "has ended (done)" in str(gone.error_text)
    assert "has ended" in str((await refused(session, "resize", id=terminal, columns=80, rows=24)).error_text)
    assert (await data(session, "stop", id=terminal))["note"] == "The job had ended before: done."
    assert "42" in (await data(session, "read", id=terminal, cursor=0))["text"]
    assert (await data(session, "read", id=terminal, lines=1))["text"].endswith("SystemExit(7)\n")


@confined
@pytest.mark.proves("X-11")
async def test_a_shell_in_a_terminal_keeps_its_state_and_receives_size_changes(
    session: Session, tmp_path: Path
) -> None:
    (tmp_path / "ws" / "deep").mkdir()
    terminal = (await data(session, "start", cwd="deep", columns=100, rows=30, command=SHELL))["job_id"]
    await data(session, "send", id=terminal, text="pwd\nstty size\n")
    assert "deep\n" in (text := await read_until_mark(session, terminal, "30 100")) and text
    assert session.notifications is not None
    assert not await session.notifications.wait_for_next(), "an agent that works until it is idle does not wait for it"
    await data(session, "resize", id=terminal, columns=90, rows=20)
    await data(session, "send", id=terminal, text="stty size\n")
    await read_until_mark(session, terminal, "20 90")
    await data(session, "send", id=terminal, keys="ctrl-d")
    assert (await ended(session, terminal))["exit_code"] == 0


@confined
async def test_an_invalid_terminal_id_or_argument_is_refused_with_the_reason(kernel: Kernel, session: Session) -> None:
    other = await kernel.session()
    theirs = (await data(other, "start", command="cat"))["job_id"]
    for name in ("send", "read", "resize", "stop"):
        more = {"send": {"keys": "enter"}, "resize": {"columns": 80, "rows": 24}}.get(name, {})
        for unknown in (theirs, "terminal__start_00000000"):
            told = await refused(session, name, id=unknown, **more)
            assert told.error_kind == "invalid_input" and "does not exist" in str(told.error_text)
    assert (await data(other, "stop", id=theirs))["state"] == "cancelled"
    no_terminal = (await session.call("bash", {"command": "echo x", "background": True})).data["job_id"]
    assert "not to `terminal.start`" in str((await refused(session, "read", id=no_terminal)).error_text)
    for wrong in ({"columns": 19}, {"rows": 201}, {"columns": 10**9}, {"command": ""}):
        assert (await refused(session, "start", **wrong)).error_kind == "invalid_input"
    for wrong in ({}, {"text": "\x03"}, {"text": "\x1b[A"}, {"keys": "ctrl-1"}, {"keys": "enter " * 65}, {"text": ""}):
        assert (await refused(session, "send", id="x", **wrong)).error_kind == "invalid_input", wrong
    assert (await refused(session, "read", id="x", cursor=1, lines=1)).error_kind == "invalid_input"
    outside = (await data(session, "start", command="cat", cwd=".."))["job_id"]
    end = await ended(session, outside)
    assert end["state"] == "failed" and "outside" in end["error"]


async def notes_after(session: Session, terminal: str, text: str) -> str:
    """Type a line, and return the notes of the reads up to its end."""
    await data(session, "send", id=terminal, text=f'{text}; echo al"l"-2\n')
    shown, notes = "", list[str]()
    while "all-2" not in shown:
        read = await data(session, "read", id=terminal)
        shown, notes = shown + read["text"], notes + read.get("notes", [])
    return "\n".join(notes)


@confined
@pytest.mark.proves("S-08")
async def test_a_terminal_reports_failures_that_the_sandbox_causes(session: Session) -> None:
    started = await data(session, "start", command=SHELL)
    terminal = started["job_id"]
    assert await notes_after(session, terminal, "ls /etc/gone") == ""
    assert "write only in the workspace" in await notes_after(session, terminal, "touch /usr/x")
    assert "192.0.2.1:80 was refused" in (notes := await notes_after(session, terminal, "curl -s http://192.0.2.1/"))
    assert "192.0.2.1" not in await notes_after(session, terminal, "touch /usr/y"), notes
    await data(session, "send", id=terminal, text="touch /usr/x; exit 3\n")
    assert "write only in the workspace" in "\n".join((await ended(session, terminal))["notes"])


@confined
@pytest.mark.proves("X-11", "O-01")
async def test_a_terminal_flood_is_bounded_reported_and_interruptible(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_stream, "MIN_RETAINED_BYTES", 256 * 1024)
    monkeypatch.setattr(output_stream, "PUNCH_INTERVAL_BYTES", 128 * 1024)
    terminal = (await data(session, "start", command="yes"))["job_id"]
    first = await data(session, "read", id=terminal)
    assert first["text"].startswith("y\ny\n")
    while (job := await session.jobs.get(terminal)).output_bytes < 800 * 1024:
        await asyncio.sleep(0.01)
    read = await data(session, "read", id=terminal, cursor=0, wait_ms=0)
    assert read["dropped_bytes"] >= 256 * 1024 and read["text"].strip("y\n") == "" and read["has_more"]
    assert read["cursor"] == read["dropped_bytes"] + len(read["text"])
    assert (await session.call("read_job", {"job_id": terminal})).data["dropped_bytes"] >= read["dropped_bytes"]
    (kept,) = (tmp_path / "state").rglob(f"{job.id}*.job.txt")
    assert os.stat(kept).st_blocks * 512 < 768 * 1024
    await data(session, "send", id=terminal, keys="ctrl-c")
    assert (await ended(session, terminal))["exit_code"] == 130


@confined
@pytest.mark.proves("S-05", "X-08")
async def test_no_process_of_a_terminal_survives_its_stop_or_its_session(session: Session, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    program(tmp_path, "trap '' HUP TERM INT QUIT TSTP\nsetsid sleep infinity &\necho up\nwhile :; do sleep 1000; done")
    deaf = (await data(session, "start", command=f"./program.sh {mark}"))["job_id"]
    await read_until_mark(session, deaf, "up\n")
    waiting = asyncio.create_task(session.call("terminal.read", {"id": deaf, "wait_ms": 10**9}))
    await data(session, "send", id=deaf, keys="ctrl-c ctrl-backslash")
    assert left_over(mark)
    assert (await data(session, "stop", id=deaf))["state"] == "cancelled"
    assert (await waiting).ok and left_over(mark) == []
    last = (await data(session, "start", command=f"./program.sh {mark}"))["job_id"]
    await read_until_mark(session, last, "up\n")
    await session.close()
    assert left_over(mark) == []


@confined
@pytest.mark.proves("O-07", "S-06", "O-04")
async def test_terminal_output_has_whole_characters_no_secrets_and_no_control_sequences(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=RULES, secrets={"TOKEN": "s3cr3t-t0k3n"}) as kernel:
        session = await kernel.session()
        program(
            tmp_path,
            r"stty raw -echo; printf 's3cr3t-'; read -rn1; printf 't0k3n \xe2\x82'; read -rn1; printf '\xac \xff\x00 \x1b[31mred|'; env; read -rn1",
        )
        terminal = (await data(session, "start", command="./program.sh x"))["job_id"]
        assert (await data(session, "read", id=terminal, wait_ms=300))["text"] == "", "it may be a secret's beginning"
        await data(session, "send", id=terminal, keys="enter")
        text = await read_until_mark(session, terminal, " ")
        await data(session, "send", id=terminal, keys="enter")
        text += await read_until_mark(session, terminal, "TERM=")
        assert "s3cr3t" not in text and "t0k3n" not in text and "\u20ac \ufffd" in text and "TERM=dumb" in text
        (answer,) = await session.start_turn().call_all([("terminal.read", {"id": terminal, "cursor": 0})])
        assert "\x1b" not in str(answer.model.data), "a model sees no control sequence"
        await data(session, "stop", id=terminal)


@confined
async def test_open_terminals_and_typed_input_are_bounded(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "stty raw -echo; echo up; sleep infinity")
    blocked = (await data(session, "start", command="./program.sh x"))["job_id"]
    cats = [(await data(session, "start", command="cat"))["job_id"] for _ in range(MAX_TERMINALS - 1)]
    await asyncio.gather(*(data(session, "resize", id=cat, columns=80, rows=24) for cat in cats))
    await read_until_mark(session, blocked, "up")
    end = await ended(session, (await data(session, "start", command="cat"))["job_id"])
    assert end["state"] == "failed" and f"{MAX_TERMINALS} open terminals" in end["error"]
    too_long = await refused(session, "send", id=cats[0], text="x" * 4096 + "\n")
    assert "4,095" in str(too_long.error_text)
    await data(session, "send", id=cats[0], text="x" * 4094 + "\n")
    assert (await read_until_mark(session, cats[0], "x\n" + "x" * 4094)).count("x") == 2 * 4094
    monkeypatch.setattr(shell_service, "TYPING_TIMEOUT_S", 0.02)
    while "note" not in (told := await data(session, "send", id=blocked, text="x" * 16_384)):
        assert told["sent_bytes"] == 16_384
    assert told["sent_bytes"] < 16_384 and "were not typed" in told["note"]


@confined
@pytest.mark.proves("S-07")
async def test_a_protected_file_made_in_a_terminal_fails_it_and_is_moved_away(session: Session, tmp_path: Path) -> None:
    program(tmp_path, "mkdir -p .vscode && echo '{}' > .vscode/tasks.json && echo made; exit 0")
    end = await ended(session, (await data(session, "start", command="./program.sh x"))["job_id"])
    assert end["state"] == "failed" and ".vscode" in end["error"] and "made" in end["text"]
    assert not (tmp_path / "ws" / ".vscode").exists()


@confined
@pytest.mark.proves("X-11")
async def test_a_session_of_a_joined_process_uses_terminals_and_continues_them_after_reopening(
    kernel: Kernel, tmp_path: Path
) -> None:
    async with joined_kernel(tmp_path, rules=RULES) as joined:
        there = await joined.session()
        terminal = (await data(there, "start", command="cat"))["job_id"]
        await data(there, "send", id=terminal, text="before\n")
        await read_until_mark(there, terminal, "before\nbefore\n")
    again = await kernel.session(there.id)
    await data(again, "send", id=terminal, text="after\n")
    assert "before" not in await read_until_mark(again, terminal, "after\nafter\n"), (
        "it is read on from where that was left"
    )
    assert (await data(again, "stop", id=terminal))["state"] == "cancelled"


KILLED = """
import asyncio, sys
from pathlib import Path
from handrail.testing.scripted_kernel import temporary_kernel

async def main(place, mark):
    async with temporary_kernel(Path(place), rules=["allow terminal.start ./program.sh *"]) as kernel:
        session = await kernel.session()
        job = (await session.call("terminal.start", {"command": f"./program.sh {mark}"})).data["job_id"]
        while "up" not in (await session.call("terminal.read", {"id": job})).data["text"]:
            pass
        print(session.id, job, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@confined
@pytest.mark.proves("S-05", "X-06", "G-05")
async def test_a_killed_kernel_leaves_no_processes_and_its_terminal_is_interrupted(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    (tmp_path / "ws").mkdir()
    program(tmp_path, "trap '' HUP TERM INT\nsetsid sleep infinity &\necho up\nwhile :; do sleep 1000; done")
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, str(tmp_path), mark, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    session_id, job_id = (await holder.stdout.readline()).decode().split()
    holder.kill()
    await holder.wait()
    while left_over(mark):
        await asyncio.sleep(0.01)
    async with temporary_kernel(tmp_path, rules=RULES) as kernel:
        session = await kernel.session(session_id)
        read = await data(session, "read", id=job_id, cursor=0)
        assert read["state"] == "interrupted" and "up" in read["text"] and "outcome is unknown" in read["error"]
        told = await refused(session, "send", id=job_id, keys="enter")
        assert told.error_kind == "conflict" and "interrupted" in str(told.error_text)
