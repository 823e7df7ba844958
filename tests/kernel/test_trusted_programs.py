"""Programs that the kernel starts while a virtual environment of the workspace is active: none comes from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from handrail import LoadError, StartError, open_kernel, tool
from handrail.frontends.cli.commands import mcp
from handrail.policy.watchdogs.api import ExternalWatchdog
from handrail.sandbox.view import toolchains
from handrail.testing.scripted_kernel import temporary_kernel

NAMES = (
    *("git", "rg", "bwrap", "perl", "python", "python3", "node", "npm", "npx", "uv", "pip", "xdg-open", "open", "sh"),
    *("systemd-run", "ssh", "gpg", "pass", "env", "uname", "ldconfig", "gcc", "file", "lsb_release", "gcloud", "less"),
    *("vi", "editor", "espeak", "sensible-browser", "www-browser", "tput", "stty", "locale", "ifconfig", "newuidmap"),
)
"""Programs that something in the kernel, or a library that it uses, may think of starting."""


@dataclass(frozen=True)
class ActivatedEnvironment:
    """A workspace whose environment is activated, with a planted program for every name.

    :param marks: a folder outside, where a program that runs unconfined leaves its name
    """

    folder: Path
    marks: Path

    @property
    def workspace(self) -> Path:
        return self.folder / "ws"

    @property
    def programs(self) -> Path:
        return self.workspace / ".venv" / "bin"

    def ran(self) -> list[str]:
        """The planted programs that have run: unconfined, or in a sandbox that may write in the workspace."""
        inside = self.workspace / "marks"
        return sorted(one.name for place in (self.marks, inside) if place.is_dir() for one in place.iterdir())

    def command_line(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        where = ("--workspace", str(self.workspace), "--state", str(self.folder / "state"))
        return subprocess.run(
            [sys.executable, "-P", "-m", "handrail", *arguments, *where],
            cwd=self.workspace,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def activated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ActivatedEnvironment:
    found = ActivatedEnvironment(tmp_path.resolve(), tmp_path.resolve() / "marks")
    for folder in (found.marks, found.programs, found.workspace / "marks"):
        folder.mkdir(parents=True)
    for name in NAMES:
        text = f"#!/bin/sh\n/bin/touch {found.marks}/{name}\n/bin/touch {found.workspace}/marks/{name}\nexit 1\n"
        (found.programs / name).write_text(text)
        (found.programs / name).chmod(0o755)
    subprocess.run(["git", "init", "-q", str(found.workspace)], check=True)
    (found.workspace / "note.txt").write_text("a needle\n")
    for name in [name for name in os.environ if name.startswith(("GIT_AUTHOR", "GIT_COMMITTER"))]:
        monkeypatch.delenv(name)  # so that git is asked
    monkeypatch.setenv("PATH", f"{found.programs}::.:.venv/bin:{os.environ['PATH']}")
    monkeypatch.setenv("VIRTUAL_ENV", str(found.programs.parent))
    monkeypatch.chdir(found.workspace)
    toolchains.read_git_identity.cache_clear()
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ("tools",),
        ("doctor",),
        ("agents",),
        ("call", "grep", '{"pattern": "needle"}'),
        ("call", "glob", '{"pattern": "*"}'),
        ("call", "git.status", "{}"),
        ("call", "bash", '{"command": "true"}', "--rule", "allow bash true"),
    ],
    ids=" ".join,
)
def test_commands_of_handrail_start_no_program_of_the_workspace(
    activated: ActivatedEnvironment, arguments: Sequence[str]
) -> None:
    done = activated.command_line(*arguments)
    assert done.returncode == 0 or arguments == ("doctor",), done.stderr
    assert activated.ran() == []


def test_bash_still_runs_a_program_of_the_workspace_in_the_sandbox(activated: ActivatedEnvironment) -> None:
    arguments = json.dumps({"command": "uv"})
    done = activated.command_line("call", "bash", arguments, "--rule", "allow bash uv")
    assert list(activated.marks.iterdir()) == [], done.stdout
    assert activated.ran() == ["uv"], done.stdout + done.stderr


async def test_git_tools_do_not_run_a_git_program_of_the_workspace(activated: ActivatedEnvironment) -> None:
    """A rule allows them without asking; a planted git could answer what it likes, with the call's rights."""
    async with temporary_kernel(activated.folder) as kernel:
        session = await kernel.session()
        answer = await session.call("git.status", {})
        assert answer.ok and "note.txt" in str(answer.data)
    assert activated.ran() == []


async def test_git_tools_are_unavailable_when_git_exists_only_in_the_workspace(
    activated: ActivatedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchains, "_SYSTEM_PATH", ())
    monkeypatch.setenv("PATH", str(activated.programs))
    async with temporary_kernel(activated.folder) as kernel:
        session = await kernel.session()
        answer = await session.call("git.status", {})
    assert answer.error_kind == "unavailable" and "Program git was not found" in str(answer.error_text)
    assert activated.ran() == []


@pytest.mark.parametrize(
    "command",
    [
        ["pass"],
        ["./.venv/bin/pass"],
        ["{programs}/pass"],
        ["{link}/pass"],
        ["/bin/sh", "{programs}/pass"],
        ["/bin/sh", "-c", "{programs}/pass"],
        ["/bin/sh", "note"],
        ["/bin/sh", "-c", "pass"],
        ["{script}"],
        ["{pinned}"],
    ],
    ids=" ".join,
)
async def test_a_secret_command_runs_no_program_of_the_workspace(
    activated: ActivatedEnvironment, command: list[str]
) -> None:
    (activated.folder / "link").symlink_to(activated.programs)
    (activated.workspace / "note").write_text(f": > {activated.marks}/note\n")
    for name, first in (("script", "#!/usr/bin/env python3"), ("pinned", f"#!{activated.programs}/python")):
        (activated.folder / name).write_text(f"{first}\nprint('sesame')\n")
        (activated.folder / name).chmod(0o755)
    places = {name: str(activated.folder / name) for name in ("link", "script", "pinned")}
    words = [word.format(programs=activated.programs, **places) for word in command]

    @tool(id="ask.key", secrets=["KEY"])
    async def ask(runtime: object) -> str:
        """Ask for the key."""
        return "asked"

    settings = f"[secrets]\nKEY = {{ command = {json.dumps(words)} }}\n"
    async with temporary_kernel(activated.folder, tools=[ask], settings=settings) as kernel:
        (entry,) = [entry for entry in kernel.generation.entries.values() if entry.id == "ask.key"]
    assert bool(entry.unavailable_reason) is (command != ["{script}"]), "its interpreter is the one outside"
    assert activated.ran() == []


@pytest.mark.parametrize(
    "command", [["pass"], ["./.venv/bin/pass"], ["{programs}/pass"], ["/bin/sh", "{programs}/pass"]]
)
async def test_a_watchdog_program_inside_the_workspace_is_refused_when_the_kernel_opens(
    activated: ActivatedEnvironment, command: list[str]
) -> None:
    words = [word.format(programs=activated.programs) for word in command]
    with pytest.raises((StartError, LoadError), match=r"absolute path|Move (it|the file) elsewhere"):
        async with temporary_kernel(activated.folder, settings=f"[[watchdogs]]\ncommand = {json.dumps(words)}\n"):
            pass
    with pytest.raises(StartError):
        async with temporary_kernel(activated.folder, watchdogs=[ExternalWatchdog(words)]):
            pass
    assert activated.ran() == []


async def test_a_watchdog_starts_outside_the_workspace_with_a_path_variable_free_of_it(
    activated: ActivatedEnvironment,
) -> None:
    seen = activated.folder / "seen"
    check = activated.folder / "check"
    check.write_text(
        f'#!/usr/bin/env sh\necho "$PATH" > {seen}; pwd >> {seen}; env >> {seen}\ngit --version > /dev/null\n'
        'echo \'{"decision": "allow"}\'\n'
    )
    check.chmod(0o755)
    async with temporary_kernel(activated.folder, watchdogs=[ExternalWatchdog([str(check)])]) as kernel:
        session = await kernel.session()
        assert (await session.call("read", {"path": "note.txt"})).ok
    lines = seen.read_text().splitlines()
    assert lines[1] == "/"
    assert not [line for line in lines if str(activated.workspace) in line]
    assert activated.ran() == []


async def test_a_git_program_planted_while_the_kernel_runs_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder on PATH was harmless when the kernel opened; a call then writes into it."""
    marks = tmp_path / "marks"
    (programs := tmp_path / "ws" / "bin").mkdir(parents=True)
    marks.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith(("GIT_AUTHOR", "GIT_COMMITTER"))]:
        monkeypatch.delenv(name)
    toolchains.read_git_identity.cache_clear()
    async with temporary_kernel(tmp_path, rules=["allow write", "allow bash true"]) as kernel:
        session = await kernel.session()
        text = f"#!/bin/sh\n: > {marks}/git\n"
        assert (await session.call("write", {"path": "bin/git", "content": text})).ok
        (programs / "git").chmod(0o755)  # as a program in the sandbox may
        assert (await session.call("bash", {"command": "true"})).ok
    assert list(marks.iterdir()) == []


def test_a_browser_program_of_the_workspace_is_not_started(
    activated: ActivatedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = activated.folder / "real"
    real.mkdir()
    os.mkfifo(activated.folder / "opened")
    (real / "xdg-open").write_text(f'#!/bin/sh\necho "$1" "$PATH" > {activated.folder}/opened\n')
    (real / "xdg-open").chmod(0o755)
    first, _, others = os.environ["PATH"].partition(":")
    monkeypatch.setenv("PATH", f"{first}:{real}:{others}")  # before what a desktop has
    mcp.open_browser("https://example.org/")
    said = (activated.folder / "opened").read_text()
    assert said.startswith("https://example.org/ ") and str(activated.workspace) not in said
    assert activated.ran() == []


async def test_a_program_in_any_folder_that_an_agent_may_write_is_not_started(
    activated: ActivatedEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls may write outside the workspace, too."""
    further = activated.folder / "further"
    (activated.programs).rename(further)
    monkeypatch.setenv("PATH", f"{further}:{os.environ['PATH']}")
    agents = activated.folder / "config" / "agents" / "wide"
    agents.mkdir(parents=True)
    (agents / "agent.toml").write_text(f'id = "wide"\n[[roots]]\npath = {json.dumps(str(further))}\naccess = "write"\n')
    (activated.folder / "config" / "handrail.toml").write_text("")
    async with open_kernel(
        activated.workspace,
        state=activated.folder / "state",
        config=activated.folder / "config" / "handrail.toml",
        agent="wide",
    ) as kernel:
        session = await kernel.session()
        assert (await session.call("git.status", {})).ok
    assert "git" not in activated.ran()
