"""Processes with one kernel each, controlled by lines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

PROGRAM = '''
import asyncio, json, os, sys
from pathlib import Path
from handrail import open_kernel, tool
from handrail.contract.services.resource_services import ResourceSpec
from handrail.policy.watchdogs.api import allow, deny
from handrail.kernel.local_kernel import LocalKernel

folder = Path(sys.argv[1])

@tool(id="test.pid", side_effect="external", locks=["account:S"])
async def pid(name: str) -> int:
    """Leave a trace, and say which process ran it."""
    with (folder / "effects").open("a") as file:
        file.write(name + "\\n")
    return os.getpid()

@tool(id="test.hang", side_effect="external", locks=["account:S"])
async def hang(name: str) -> str:
    """Leave a trace, and never return."""
    with (folder / "effects").open("a") as file:
        file.write(name + "\\n")
    os.mkfifo(folder / f"begun-{name}")
    await asyncio.Event().wait()
    return ""

async def look(call):
    """A watchdog that keeps one file from being written."""
    return deny("it is barred") if call.arguments.get("path") == "barred.txt" else allow()

class Note:
    """An offering of one note."""
    source, is_third_party = "", False
    resources = (ResourceSpec("note:1", "a note"),)
    templates = prompts = ()
    def has_resource(self, uri):
        return uri == "note:1"
    async def read(self, uri, runtime):
        return {"contents": [{"uri": uri, "text": f"by {os.getpid()}"}]}

def say(number, **told):
    print(json.dumps({"number": number, **told}), flush=True)

async def main():
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    tools = [pid, hang] if "tools" in sys.argv else []
    rules = ["allow test.*", "allow write", "allow edit"]
    options = {"state": folder / "state", "config": folder / "config" / "handrail.toml", "rules": rules, "tools": tools}
    options["settings"] = ["limits.grace_ms=900"] if "settings" in sys.argv else []
    options["watchdogs"] = [look] if "watchdogs" in sys.argv else []
    options["resources"] = [Note()] if "offerings" in sys.argv else []
    async with open_kernel(folder / "ws", **options) as kernel:
        sessions, running = {}, set()
        say(0, holds=isinstance(kernel, LocalKernel), pid=os.getpid())

        async def carry_out(order):
            number, session_id = order["number"], order.get("session")
            try:
                if session_id not in sessions:
                    sessions[session_id] = await kernel.session(session_id, rules=order.get("rules", ()))
                session = sessions[session_id]
                session.add_rules(*order.get("further", ()))
                result = await session.call(order["tool"], order["arguments"], key=order.get("key"))
                say(number, session=session.id, result=result.to_dict())
            except Exception as error:
                say(number, error=f"{type(error).__name__}: {error}")

        while line := await lines.readline():
            order = json.loads(line)
            if order.get("interrupted"):
                say(order["number"], interrupted=[lost.call_id for lost in kernel.interrupted_calls])
                continue
            task = asyncio.create_task(carry_out(order))
            running.add(task)
            task.add_done_callback(running.discard)

asyncio.run(main())
'''


class Member:
    """One such process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.hello: dict[str, Any] = {}
        self.waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.count = 0
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            told = json.loads(line)
            self.waiting.pop(told["number"]).set_result(told)
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(EOFError("the process has ended"))
                future.exception()

    def order(self, **what: Any) -> asyncio.Future[dict[str, Any]]:
        assert self.process.stdin is not None
        self.count += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.waiting[self.count] = answer
        self.process.stdin.write(json.dumps({"number": self.count, **what}).encode() + b"\n")
        return answer

    def call(self, tool: str, arguments: dict[str, Any], **more: Any) -> asyncio.Future[dict[str, Any]]:
        return self.order(tool=tool, arguments=arguments, **more)

    def kill(self) -> None:
        self.process.kill()

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    async def leave(self) -> None:
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            await self.process.wait()
        await self._reading


async def member(folder: Path, *options: str) -> Member:
    """Start one, and wait until its kernel is open."""
    (folder / "ws").mkdir(exist_ok=True)
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / "handrail.toml").touch()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        str(folder),
        *options,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    one = Member(process)
    greeting: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    one.waiting[0] = greeting
    one.hello = await greeting
    return one


@asynccontextmanager
async def members(folder: Path, *options: tuple[str, ...]) -> AsyncGenerator[list[Member]]:
    """Start several in sequence, so that the first holds the workspace, and end the rest afterwards."""
    found: list[Member] = []
    try:
        for each in options:
            found.append(await member(folder, *each))
        yield found
    finally:
        for one in found:
            if one.process.returncode is None:
                one.process.kill()
                await one.process.wait()
