"""The doors: the processes through which somebody reaches the kernel, each driven as its user would."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from demos.demonstration import Stuck
from demos.doors.place import BOARD, BOX, EDIT, EDITOR, Place, ticking
from handrail import StartError
from handrail.sandbox import build_program_environment

PATIENCE_S = 60.0
"""When a door that says nothing is taken for stuck."""
TRIES = 20
"""How often a door tries again what was none of its own fault."""
AGAIN = ("conflict",)
"""Somebody else was faster."""
PROMPT = "\n> "
YES = "o\n"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(slots=True)
class Heard:
    """What a door was told of its edits: for each box whether it is ticked, by the answers to the calls."""

    landed: dict[str, bool] = field(default_factory=dict[str, bool])

    def note(self, arguments: object, ok: bool) -> None:
        for box in BOX.findall(json.dumps(arguments)):
            self.landed[box] = ok


@dataclass(slots=True)
class Crew:
    """The processes there have been, so that they can be named, and none is left."""

    place: Place
    pids: dict[int, str] = field(default_factory=dict[int, str])
    processes: list[asyncio.subprocess.Process] = field(default_factory=list[asyncio.subprocess.Process])

    @property
    def complaints(self) -> Path:
        """What the doors without a terminal said on stderr."""
        return self.place.folder / "stderr"

    @contextmanager
    def complaining(self) -> Generator[TextIO]:
        with self.complaints.open("a", encoding="utf-8") as file:
            yield file

    async def start(self, door: str, *arguments: str, stdio: int | None = None) -> asyncio.subprocess.Process:
        """``handrail ARGUMENTS``: on the terminal ``stdio``, or with its output in a pipe and without one."""
        name, *rest = arguments
        with self.complaining() as complaints:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "handrail", name, *self.place.common, *rest),
                cwd=self.place.folder,
                env=surroundings(self.place),
                stdin=asyncio.subprocess.DEVNULL if stdio is None else stdio,
                stdout=asyncio.subprocess.PIPE if stdio is None else stdio,
                stderr=complaints if stdio is None else stdio,
                limit=16 * 1024 * 1024,
                start_new_session=True,
            )
        self.pids[process.pid] = door
        self.processes.append(process)
        return process

    async def end(self) -> None:
        """End what is left of them."""
        for process in self.processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()


def surroundings(place: Place) -> dict[str, str]:
    """An environment in which somebody can be asked, whatever this machine is, and nothing else is set."""
    kept = build_program_environment(("SSL_CERT_FILE", "PYTHONDONTWRITEBYTECODE", "NO_COLOR"))
    return {**kept, "HANDRAIL_HEADLESS": "0", "HOME": str(place.folder), "TERM": "dumb", "COLUMNS": "200"}


class AgentDoor:
    """``handrail run`` with a script, and without a terminal: what has to be asked is parked."""

    def __init__(self, process: asyncio.subprocess.Process, took_up: Mapping[str, str] | None) -> None:
        self.process = process
        self.heard = Heard()
        self.session = ""
        self.parked: list[str] = []
        self._took_up = took_up
        self._calls: dict[int, object] = {}
        self._reading = asyncio.create_task(self._read())

    @staticmethod
    async def open(
        crew: Crew, name: str, script: Path, *options: str, took_up: Mapping[str, str] | None = None
    ) -> AgentDoor:
        """
        :param took_up: the arguments of the call that it goes on with, which it does not make again
        """
        told = ("--json", "--model", f"script:{script}", *options)
        return AgentDoor(await crew.start(name, "run", *told), took_up)

    async def ended(self) -> int:
        """Its exit code, once all it said was read."""
        async with asyncio.timeout(PATIENCE_S):
            await self._reading
            return await self.process.wait()

    def kill(self) -> None:
        """As ``kill -9`` does: this process alone."""
        self.process.kill()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            with suppress(ValueError):  # half a line, from one that was killed
                self._note(json.loads(line))

    def _note(self, told: dict[str, Any]) -> None:
        match told.get("event"):
            case "session":
                self.session = told["id"]
            case "call":
                self._calls[told["position"]] = told["arguments"]
            case "result":
                if told["tool"] in ("edit", "bash") and "awaiting_approval" not in told["result"]["metadata"]:
                    self.heard.note(
                        self._calls.get(told["position"], self._took_up), told["result"]["type"] == "output"
                    )
            case "finished":
                self.parked = list(told["pending_approvals"])
            case _:
                pass


class TerminalDoor:
    """Commands on a pseudo-terminal: what is shown can be waited for, and keys be typed."""

    def __init__(self, crew: Crew) -> None:
        self.heard = Heard()
        self._crew = crew

    @asynccontextmanager
    async def command(self, door: str, *arguments: str) -> AsyncGenerator[Typing]:
        """Start a command, and end with it."""
        master, slave = pty.openpty()
        try:
            try:
                process = await self._crew.start(door, *arguments, stdio=slave)
            finally:
                os.close(slave)
            typing = Typing(master, process)
            try:
                yield typing
            finally:
                typing.close()
        finally:
            os.close(master)


class Typing:
    """One command on a terminal."""

    def __init__(self, master: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.shown = ""
        self._seen = 0
        self._master = master
        self._news = asyncio.Event()
        self._over = False
        os.set_blocking(master, False)
        asyncio.get_running_loop().add_reader(master, self._read)

    async def wait_for(self, text: str) -> None:
        """Until ``text`` is shown, after what was waited for before.

        :raises Stuck: when it ends or says nothing instead
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (found := self.shown.find(text, self._seen)) < 0:
                    if self._over:
                        raise Stuck(f"a command on the terminal ended without {text!r}:\n{self.shown}")
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise Stuck(f"a command on the terminal did not show {text!r}:\n{self.shown}") from None
        self._seen = found + len(text)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def ended(self, yes: str = "") -> int:
        """Its exit code.

        :param yes: what is typed at each prompt until then: whoever takes over a call asks anew
        """
        async with asyncio.timeout(PATIENCE_S):
            while yes and not self._over:
                if (found := self.shown.find(PROMPT, self._seen)) >= 0:
                    self._seen = found + len(PROMPT)
                    self.type(yes)
                    continue
                self._news.clear()
                await self._news.wait()
            return await self.process.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except BlockingIOError:
            return
        except OSError:  # Linux: the last holder of the other end is gone
            data = b""
        if not data:
            self._over = True
            asyncio.get_running_loop().remove_reader(self._master)
        self.shown += _ESCAPES.sub("", data.decode(errors="replace")).replace("\r", "")
        self._news.set()


class EditorDoor:
    """An MCP client that has started ``handrail mcp``. Nobody can be asked there: a rule allows its edits."""

    def __init__(self, client: Any) -> None:
        self.heard = Heard()
        self._client = client

    @staticmethod
    @asynccontextmanager
    async def open(crew: Crew) -> AsyncGenerator[EditorDoor]:
        """:raises StartError: where the SDK is not installed"""
        try:
            from mcp import Client, StdioServerParameters
            from mcp.client.stdio import stdio_client
        except ImportError:
            raise StartError("the editor's door needs the extra 'mcp': pip install '.[mcp]'") from None
        words = ["-P", "-m", "handrail", "mcp", *crew.place.common, "--rule", EDIT]
        server = StdioServerParameters(command=sys.executable, args=words, env=surroundings(crew.place))
        with crew.complaining() as complaints:
            async with Client(stdio_client(server, errlog=complaints)) as client:
                yield EditorDoor(client)

    async def tick(self, boxes: Sequence[str]) -> None:
        """Tick each. Where somebody else was faster, or a holder left meanwhile, look and try again."""
        for box in boxes:
            for _ in range(TRIES):
                arguments = ticking(box)
                seen = await self._call("read", {"path": BOARD})
                if seen["type"] == "output" and arguments["old"].strip() not in seen["data"]["text"].splitlines():
                    break  # a call that was stopped had done it
                result = await self._call("edit", arguments)
                self.heard.note(arguments, result["type"] == "output")
                if result["metadata"].get("error_kind") not in AGAIN:
                    break

    async def _call(self, tool: str, arguments: dict[str, str]) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            result = await self._client.call_tool(tool, arguments)
        meta = cast("dict[str, Any]", result.meta or {})
        said = {key.removeprefix("handrail/"): value for key, value in meta.items()}
        data = cast("dict[str, Any]", result.structured_content or {})
        return {"type": "error" if result.is_error else "output", "data": data, "metadata": said}


def door_of(pid: int | None, crew: Crew) -> str:
    """Whose process this is. The editor's is the one that its client has started."""
    return crew.pids.get(pid or 0, EDITOR)
