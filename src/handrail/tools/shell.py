"""bash and python: one command text, or one program, in the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from handrail.contract.doors.runtime import Runtime
from handrail.contract.tool.requires import Requires, ShellRequires
from handrail.contract.tool.spec import LockSpec, ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.tools.declaring import MAX_OUTPUT, WORKSPACE, object_schema

LONGEST_MS = 600_000
_TIMEOUT = {
    "type": "integer",
    "minimum": 1,
    "maximum": LONGEST_MS,
    "description": f"Stop it after this many milliseconds; {LONGEST_MS} by default, unless the operator set another time",
}


class Python(Tool):
    spec = ToolSpec(
        id="python",
        description=(
            "Run Python code in the workspace, with the python3 that is found there, in a sandbox without network. Each call is a "
            "process of its own: print what you want to see. Returns exit_code and the output, stdout and stderr together."
        ),
        parameters=object_schema(
            {
                "code": {"type": "string", "minLength": 1, "description": "A whole program"},
                "timeout_ms": _TIMEOUT,
            },
            ["code"],
        ),
        requires=Requires(fs=WORKSPACE, shell=(ShellRequires(cmd="python3", args=("-",)),)),  # noqa: S604 - a declaration, nothing is run
        side_effect="external",
        locks=(LockSpec("workspace", "X"),),
        timeout_ms=LONGEST_MS,
        timeout_argument="timeout_ms",
        max_output=MAX_OUTPUT,
        category="system",
        kind="execute",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await ran(runtime, ("python3", "-"), stdin=args["code"].encode())


class Bash(Tool):
    spec = ToolSpec(
        id="bash",
        description=(
            "Run one shell command in the workspace, in a sandbox without network. Each call is a shell of its own: "
            "no state but files is kept, and nothing it starts goes on after it. Returns exit_code and the output, "
            "stdout and stderr together; an exit code other than 0 is a result, not an error."
        ),
        parameters=object_schema(
            {
                "command": {
                    "type": "string",
                    "format": "command",
                    "minLength": 1,
                    "maxLength": 100_000,
                    "description": "The command, as for bash -c",
                },
                "timeout_ms": _TIMEOUT,
                "background": {
                    "type": "boolean",
                    "description": "Answer at once with a job_id, and go on without the lock on the workspace",
                },
            },
            ["command"],
        ),
        requires=Requires(fs=WORKSPACE, shell=(ShellRequires(cmd="*"),)),  # noqa: S604 - a declaration, nothing is run
        side_effect="external",
        locks=(LockSpec("workspace", "X"),),
        targets={"shell.run": "{command}"},
        only_its_command=True,
        timeout_ms=LONGEST_MS,
        timeout_argument="timeout_ms",
        background_argument="background",
        promotable=True,
        max_output=MAX_OUTPUT,
        category="system",
        tier="core",
        kind="execute",
        guidance=(
            "Use read, glob, grep and edit rather than cat, find, grep and sed. "
            "Keep commands simple: each one is judged by itself, and what cannot be judged needs a person. "
            "Run what takes long with background, and use wait on its job instead of sleep."
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await ran(runtime, args["command"])


async def ran(runtime: Runtime, command: str | Sequence[str], stdin: bytes = b"") -> dict[str, object]:
    """Run a program, and say how it ended and what it wrote; stopped in the middle, what it had written by then is kept."""
    heard = _Heard(runtime)
    try:
        done = await runtime.shell.run(command, stdin=stdin, on_output=heard.more)
    except asyncio.CancelledError:
        runtime.partial({"output": heard.text})
        raise
    answer: dict[str, object] = {
        "exit_code": done.exit_code,
        "output": done.output.decode("utf-8", "replace"),
    }
    if done.signal is not None:
        answer["signal"] = done.signal
    if done.limit is not None:
        answer["limit"] = done.limit
    if done.dropped:
        answer["dropped_bytes"] = done.dropped
    if done.notes:
        answer["notes"] = list(done.notes)
    return answer


class _Heard:
    """The beginning of what a command wrote, for when it does not come to its end."""

    def __init__(self, runtime: Runtime) -> None:
        self._kept = bytearray()
        self._show = runtime.output
        self._most = runtime.max_output

    def more(self, piece: bytes) -> None:
        self._show(piece)
        room = self._most - len(self._kept)
        if room > 0:
            self._kept += piece[:room]

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")
