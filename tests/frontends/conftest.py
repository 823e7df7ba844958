"""Fixtures: real processes with pipes or a terminal, as users and programs start them."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.prefork import command as prefork

from handrail.frontends.cli.command_group import run_command_line

PATIENCE_S = 300
"""When a program that says nothing is taken for stuck; no assertion hangs on it."""


class OnATerminal:
    """A program on a pseudo-terminal: what it shows can be waited for, and keys be typed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=dict(environment),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=_take_the_terminal,  # noqa: PLW1509 - one call to the system, no locks taken
        )
        os.close(slave)
        self.shown = ""
        self._seen = 0

    def wait_for(self, text: str) -> str:
        """Read until ``text`` is shown after what was waited for before; gives everything up to and with it."""
        while (found := self.shown.find(text, self._seen)) < 0:
            if not self._read():
                raise AssertionError(f"it ended without showing {text!r}; it showed:\n{self.shown}")
        began, self._seen = self._seen, found + len(text)
        return self.shown[began : self._seen]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Read to the end; gives the exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._master)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], PATIENCE_S)
        if not ready:
            raise AssertionError(f"it said nothing for {PATIENCE_S} s; it showed:\n{self.shown}")
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux: the last holder of the other end is gone
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


def _take_the_terminal() -> None:
    """In the child: make its stdin the controlling terminal, so that Ctrl-C is a signal."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


Terminals = Callable[..., OnATerminal]


@pytest.fixture(autouse=True)
def at_a_desk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody can be asked, also where a build machine runs the test."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("HANDRAIL_HEADLESS", raising=False)


@pytest.fixture
def on_a_terminal(tmp_path: Path) -> Iterator[Terminals]:
    """Start a program on a new terminal; it ends with the test."""
    running: list[OnATerminal] = []

    def start(*command: str, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> OnATerminal:
        terminal = OnATerminal(
            command, {**os.environ, "TERM": "xterm", "CI": "", **(environment or {})}, cwd or tmp_path
        )
        running.append(terminal)
        return terminal

    yield start
    for terminal in running:
        terminal.close()


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Program:
    """The ``handrail`` program with its own workspace, state and configuration."""

    workspace: Path
    state: Path
    config: Path

    @property
    def common(self) -> list[str]:
        return ["--workspace", str(self.workspace), "--state", str(self.state)]

    def command(self, name: str, *arguments: str) -> list[str]:
        return [*prefork.handrail(), name, *self.common, *arguments]

    def cold(self, name: str, *arguments: str) -> list[str]:
        """Where the process itself matters: it is killed, measured, or within a sandbox."""
        return [*prefork.COLD, name, *self.common, *arguments]

    def __call__(self, name: str, *arguments: str, stdin: bytes = b"", cwd: Path | None = None) -> Ended:
        done = subprocess.run(
            self.command(name, *arguments), input=stdin, capture_output=True, cwd=cwd, timeout=PATIENCE_S * 2
        )
        return Ended(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


@pytest.fixture
def handrail(tmp_path: Path) -> Program:
    """``handrail(command, *arguments)`` in a small workspace with a ``note.txt``."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "note.txt").write_text("first line\nsecond line\n")
    return Program(workspace, tmp_path / "state", tmp_path / "config")


class SleepingCommand:
    """A command for ``bash`` that says when it runs and then sleeps for good, with a child that does the same."""

    def __init__(self, handrail: Program) -> None:
        self._mark = uuid.uuid4().hex
        self._started = handrail.workspace / "started"
        os.mkfifo(self._started)
        script = handrail.workspace / "sleeper.sh"
        script.write_text("#!/bin/sh\nsleep infinity &\necho up > started\nwait\n")
        script.chmod(0o755)
        self.rule = "allow bash ./sleeper.sh *"
        self.arguments = json.dumps({"command": f"./sleeper.sh {self._mark}"})

    def wait_until_it_runs(self) -> None:
        """:raises AssertionError: when it never began"""
        descriptor = os.open(self._started, os.O_RDONLY | os.O_NONBLOCK)
        try:
            ready, _, _ = select.select([descriptor], [], [], PATIENCE_S)
            assert ready and os.read(descriptor, 16), "the command did not begin to run"
        finally:
            os.close(descriptor)

    def wait_until_it_is_gone(self) -> None:
        """:raises AssertionError: if a part of it continues"""
        until = time.monotonic() + PATIENCE_S
        while self.left_over():
            assert time.monotonic() < until, self.left_over()

    def left_over(self) -> list[str]:
        """Command lines of what still runs of it."""
        found: list[str] = []
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it ended meanwhile
                continue
            if self._mark in line and "handrail" not in line:
                found.append(line)
        return found


Here = Callable[..., Ended]


@pytest.fixture
def here(handrail: Program, capfd: pytest.CaptureFixture[str]) -> Here:
    """A command carried out in this process: the same code, without the start of another one."""

    def carried_out(name: str, *arguments: str) -> Ended:
        code = run_command_line([name, *handrail.common, *arguments])
        sys.stderr.flush()
        shown = capfd.readouterr()
        return Ended(code, shown.out, shown.err)

    return carried_out
