"""The victim of the attacks: a home with keys, services and a project, and a Handrail that works on it.

All of it is made in the outer sandbox, and only there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.attacks.outer import NAMESPACES, Mode, NotApplicable

from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest
from handrail.contract.calls_and_results import CallAnswer, Result
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.contract.session_protocols import Session
from handrail.contract.tool.tool_protocol import Tool
from handrail.kernel.kernel_interface import Kernel
from handrail.kernel.workspace_opening import open_kernel
from handrail.policy.watchdogs.api import Watchdog

SECRET = "TOP-SECRET"
"""Stands in everything that must not be read: in a breach it is seen."""
REACHED = "REACHED"
"""Printed by a probe that got where it must not get."""
TRIED = "TRIED-TO-ITS-END"

_POISON = {
    "LD_PRELOAD": "/home/victim/evil.so",
    "LD_AUDIT": "/home/victim/evil.so",
    "BASH_ENV": "/home/victim/evil.sh",
    "ENV": "/home/victim/evil.sh",
    "PROMPT_COMMAND": "touch /home/victim/evil",
    "PYTHONSTARTUP": "/home/victim/evil.py",
    "PYTHONHOME_": "/home/victim",
    "NODE_OPTIONS": "--require=/home/victim/evil.js",
    "PERL5OPT": "-Mevil",
    "RUBYOPT": "-revil",
    "GIT_SSH_COMMAND": "touch /home/victim/evil",
    "GIT_EXTERNAL_DIFF": "/home/victim/evil.sh",
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "/home/victim/evil.sh",
    "SERVICE_API_TOKEN": f"{SECRET}-TOKEN",
    "AWS_SECRET_ACCESS_KEY": f"{SECRET}-AWS",
    "SSH_AUTH_SOCK": "/run/agent.sock",
    "DOCKER_HOST": "unix:///run/docker.sock",
    "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/bus",
    "DISPLAY": ":0",
    "WAYLAND_DISPLAY": "/run/wayland-0",
    "HTTPS_PROXY": "http://93.184.216.35:8022",
}
"""What Handrail's own environment holds, when it is started from a shell that an attacker, or life, has been at."""


class AgreeingUser:
    """A user who approves everything, as the attacker hopes, and records the requests."""

    def __init__(self) -> None:
        self.requests: list[ApprovalRequest] = []

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        self.requests.append(request)
        return ApprovalAnswer("once")

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]]:
        return [["yes"]] * len(questions)


class VictimHome:
    """One victim.

    :param path: the home folder; the workspace is the folder ``project`` in it
    """

    def __init__(self, path: str, mode: Mode) -> None:
        self.path = Path(path)
        self.mode: Mode = mode
        self.workspace = self.path / "project"
        self.state = self.path / ".local" / "state" / "handrail"
        self.config = self.path / ".config" / "handrail" / "handrail.toml"
        self.canary = self.path / "evil"
        """Made by whatever an attack brings to run outside Handrail's sandbox."""
        self.connected: list[str] = []
        """The sockets of the home's services that somebody has connected to."""
        self._session: Session | None = None
        self._number = 0

    def make(self) -> VictimHome:
        """Build it on empty folders."""
        put(self.path / ".ssh" / "id_ed25519", f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}-SSH\n")
        put(self.path / ".ssh" / "authorized_keys", "ssh-ed25519 AAAA victim\n")
        put(self.path / ".aws" / "credentials", f"aws_secret_access_key = {SECRET}-AWS\n")
        put(self.path / ".bashrc", f"export LEAK={SECRET}-BASHRC\n")
        put(self.path / ".gnupg" / "secring.gpg", f"{SECRET}-GPG\n")
        put(self.path / "project_secret" / "key", f"{SECRET}-BESIDE\n")
        put(self.path / "evil.sh", f"touch {self.canary}; echo {REACHED}-BY-START-UP-FILE\n")
        (self.path / "evil.sh").chmod(0o755)
        put(self.path / "evil.py", f"open({str(self.canary)!r}, 'w'); print('{REACHED}-BY-START-UP-FILE')\n")
        put(self.workspace / "README.md", "# A project\n")
        put(self.workspace / "src" / "a.py", "a = 1\n")
        put(self.workspace / ".env", f"API_TOKEN={SECRET}-ENV\n")
        put(self.workspace / "deploy" / "server.pem", f"{SECRET}-PEM\n")
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.parent.chmod(0o700)
        for arguments in (["init", "-q", "-b", "main"], ["add", "README.md", "src"], ["commit", "-q", "-m", "first"]):
            self.git(*arguments)
        return self

    def git(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run git as the victim, without its configuration."""
        quiet = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(self.path)}
        who = {f"GIT_{role}_{what}": "victim@example" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        done = subprocess.run(
            ["git", *arguments],
            cwd=cwd or self.workspace,
            env={"PATH": os.environ["PATH"], **quiet, **who},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Open Handrail with its services and environment, and a session that approves everything."""
        os.environ.update(_POISON)
        async with AsyncExitStack() as stack:
            for name in ("/run/docker.sock", "/run/agent.sock", "/run/bus", "/run/wayland-0", "\0handrail-victim"):
                self._listen(name)
            session = await stack.enter_async_context(self.session())
            self._session = session
            inside = (await self.shell("readlink " + " ".join(f"/proc/self/ns/{n}" for n in NAMESPACES))).split()
            here = {os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
            if len([line for line in inside if line.endswith("]")]) != len(NAMESPACES) or here & set(inside):
                raise RuntimeError(f"the sandbox that is to be attacked has not got namespaces of its own: {inside}")
            yield

    @asynccontextmanager
    async def kernel(
        self,
        *,
        workspace: Path | None = None,
        rules: Iterable[str] = (),
        asked: Iterable[str] = ("ask effect:external",),
        tools: Iterable[Tool] = (),
        watchdogs: Iterable[Watchdog] = (),
        secrets: Mapping[str, str] | None = None,
        settings: str = "",
        agent: str = "",
        name: str = "handrail",
    ) -> AsyncGenerator[Kernel]:
        """Handrail on the project (or another folder), as the victim starts it.

        :param asked: rules that bring questions about confined commands back, so that an attack meets the approval, or the whole
            sandbox that an approved call has, and not the narrow one; empty for the default
        :param agent: the text of an agent's manifest, whose sessions it then opens; its id is ``guest``
        :param name: another one of its configuration and state, for a second kernel beside the first
        """
        config = self.config.parent.parent / name / "handrail.toml"
        config.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        config.write_text(settings)
        if agent:
            put(config.parent / "agents" / "guest" / "agent.toml", f'id = "guest"\n{agent}')
            for folder in (config.parent / "agents", config.parent / "agents" / "guest"):
                folder.chmod(0o700)
        async with open_kernel(
            workspace or self.workspace,
            rules=[*asked, *rules],
            tools=tools,
            watchdogs=watchdogs,
            secrets=secrets,
            state=self.state.parent / name,
            config=config,
            agent="guest" if agent else None,
        ) as kernel:
            yield kernel

    @asynccontextmanager
    async def session(self, **options: Any) -> AsyncGenerator[Session]:
        """Open a session of :meth:`kernel` that approves everything."""
        async with self.kernel(**options) as kernel:
            yield await kernel.session(approval_handler=AgreeingUser())

    @asynccontextmanager
    async def elsewhere(self, **options: Any) -> AsyncGenerator[tuple[Session, Path]]:
        """A session in a temporary workspace, and that workspace."""
        self._number += 1
        workspace = self.path / f"elsewhere-{self._number}"
        workspace.mkdir()
        try:
            async with self.session(workspace=workspace, name=f"other-{self._number}", **options) as session:
                yield session, workspace
        finally:
            shutil.rmtree(workspace, ignore_errors=True)

    async def call(self, tool: str, /, **arguments: Any) -> Result:
        """A call in the session where everything is agreed to."""
        assert self._session is not None
        return await self._session.call(tool, arguments)

    async def call_all(self, *calls: tuple[str, dict[str, Any]]) -> Sequence[CallAnswer]:
        """Calls of one reply in that session, with what a model is shown of each."""
        assert self._session is not None
        return await self._session.start_turn().call_all(calls)

    async def shell(self, text: str, timeout_ms: int = 60_000) -> str:
        """Return the output of a command in Handrail's sandbox, both streams, also if it failed."""
        return said_by(await self.call("bash", command=text, timeout_ms=timeout_ms))

    async def python(self, code: str, timeout_ms: int = 60_000) -> str:
        """Return the output of a Python program in Handrail's sandbox."""
        name = self.probe(code)
        return await self.shell(f"/usr/bin/env python3 {name}", timeout_ms)

    def probe(self, code: str) -> str:
        """A program in the workspace, by its name there."""
        put(self.workspace / ".probes" / "probe.py", code)
        return ".probes/probe.py"

    def unconfined(self, text: str) -> str:
        """Return the output of the same command in the outer sandbox only, for controls.

        With the environment that Handrail was started in, as a careless runner would hand it on.
        """
        done = subprocess.run(
            ["bash", "-c", text],
            cwd=self.workspace,
            env={**os.environ, "LD_PRELOAD": "", "LD_AUDIT": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        )
        return done.stdout.decode("utf-8", "replace")

    def _listen(self, name: str) -> None:
        server = socket.socket(socket.AF_UNIX)
        try:
            server.bind(name)
        except OSError as error:
            raise NotApplicable(f"{name!r} cannot be listened on: {error}") from None
        server.listen()

        def accept() -> None:
            while True:
                connection, _ = server.accept()
                self.connected.append(name)
                connection.close()

        threading.Thread(target=accept, daemon=True).start()


def said_by(result: Result) -> str:
    """Return the output or error text of a call."""
    data: object = result.data
    output = data.get("output", "") if isinstance(data, dict) else ""  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return f"{output}\n{result.error_text or ''}".strip("\n")


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


async def soon(condition: asyncio.Event, what: str, seconds: float = 30.0) -> str | None:
    """Wait for an event; what did not happen, if it did not."""
    try:
        async with asyncio.timeout(seconds):
            await condition.wait()
    except TimeoutError:
        return f"{what} did not happen within {seconds:g} s"
    return None


def robbed_home(path: str, mode: Mode) -> VictimHome:
    return VictimHome(path, mode).make()
