"""A tool with a scripted body, its files, and its rules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from handrail import Runtime, tool
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool

EVERYTHING = {
    "fs": {"read": ["{workspace}"], "write": ["{workspace}"]},
    "shell": [{"cmd": "*"}],
    "capabilities": ["state", "call"],
}

Script = Callable[[Runtime], Awaitable[object]]


class ScriptedTool(Tool):
    """A tool whose inside is written in the test; the same object runs in the holder and in the other process."""

    def __init__(self, script: Script, **spec: Any) -> None:
        options: dict[str, Any] = {"requires": EVERYTHING, "locks": (), "side_effect": "external", **spec}
        adapted = tool(id="t.script", description="Runs a script.", **options)(_nothing)
        self.spec: ToolSpec = adapted.spec
        self.script = script

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await self.script(runtime)


async def _nothing() -> None: ...


RULES = ["allow fs.read *", "allow fs.write *", "allow shell.run *", "deny fs.read secret/**", "deny shell.run rm *"]


def files_in(folder: Path) -> Path:
    made = folder / "ws"
    made.mkdir(parents=True)
    (made / "a.txt").write_text("one\ntwo\nthree\n")
    (made / "b.bin").write_bytes(b"\x00\xff\xfe")
    (made / "secret").mkdir()
    (made / "secret" / "key").write_text("k")
    return made


@tool(id="t.other", side_effect="read", locks=[])
async def other(n: int) -> dict[str, int]:
    """Another tool."""
    return {"n": n + 1}
