"""bash: one command text in the sandbox."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.requires import FsRequires, Requires, ShellRequires
from handrail.contract.runtime import Runtime
from handrail.contract.spec import LockSpec, ToolSpec
from handrail.contract.tool import Tool

MAX_OUTPUT = 200 * 1024
LONGEST_MS = 600_000
LONGEST_PURE_WAIT_S = 10
_MARGIN_MS = 5_000
"""Between the command's own longest time and the call's: so that it is the command that is stopped, and reported."""
_WORKSPACE = FsRequires(read=("{workspace}",), write=("{workspace}",))
"""What the sandbox mounts for the programs that a command runs: without it they would see no workspace at all."""
_SEPARATOR = re.compile(r"&&|\|\||[;&\n]")
_SLEEP = re.compile(r"\s*(?:command\s+|builtin\s+)?(?:/usr)?(?:/bin/)?sleep((?:\s+(?:\d+\.?\d*|\.\d+)[smhd]?)+)\s*\Z")
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class Bash(Tool):
    spec = ToolSpec(
        id="bash",
        description=(
            "Run one shell command in the workspace, in a sandbox without network. Each call is a shell of its own: "
            "no state but files is kept, and nothing it starts goes on after it. Returns exit_code and the output, "
            "stdout and stderr together; an exit code other than 0 is a result, not an error."
        ),
        parameters={
            "type": "object",
            "properties": {
                "command": {
                    "type": "string",
                    "format": "command",
                    "minLength": 1,
                    "description": "The command, as for bash -c",
                },
                "timeout_ms": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": LONGEST_MS,
                    "description": f"Stop it after this many milliseconds; {LONGEST_MS} if left out",
                },
            },
            "required": ["command"],
            "additionalProperties": False,
        },
        requires=Requires(fs=_WORKSPACE, shell=(ShellRequires(cmd="*"),)),  # noqa: S604 - a declaration, nothing is run
        side_effect="external",
        locks=(LockSpec("workspace", "X"),),
        targets={"shell.run": "{command}"},
        timeout_ms=LONGEST_MS + _MARGIN_MS,
        max_output=MAX_OUTPUT,
        category="system",
        tier="core",
        kind="execute",
        guidance=(
            "Use read, glob, grep and edit rather than cat, find, grep and sed. "
            "Keep commands simple: each one is judged by itself, and what cannot be judged needs a person."
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        command: str = args["command"]
        refuse_pure_wait(command)
        budget_ms: int = args.get("timeout_ms", LONGEST_MS)
        heard = _Heard()
        try:
            async with asyncio.timeout(budget_ms / 1000):
                done = await runtime.shell.run(command, on_output=heard.more)
        except TimeoutError:
            raise ToolError(
                f"the command was stopped after {budget_ms} ms, with all it had started; what it wrote until then is kept. "
                f"Give it more time with timeout_ms (at most {LONGEST_MS}), or make it do less",
                kind="timeout",
                data={"output": heard.text},
            ) from None
        except asyncio.CancelledError:
            runtime.partial({"output": heard.text})
            raise
        answer: dict[str, object] = {
            "exit_code": done.exit_code,
            "output": done.output.decode("utf-8", "replace"),
        }
        if done.signal is not None:
            answer["signal"] = done.signal
        if done.dropped:
            answer["dropped_bytes"] = done.dropped
        return answer


class _Heard:
    """The beginning of what a command wrote, for when it does not come to its end."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def more(self, piece: bytes) -> None:
        room = MAX_OUTPUT - len(self._kept)
        if room > 0:
            self._kept += piece[:room]

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


def refuse_pure_wait(command: str) -> None:
    """A command that only sleeps, for long, holds the workspace and learns nothing.

    :raises ToolError: ``invalid_input``, with what to do instead
    """
    parts = [part for part in _SEPARATOR.split(command) if part.strip()]
    waits = [_SLEEP.match(part) for part in parts]
    if not waits or not all(waits):
        return
    total = sum(
        float(time.rstrip("smhd")) * _SECONDS.get(time[-1], 1)
        for wait in waits
        if wait is not None
        for time in wait.group(1).split()
    )
    if total > LONGEST_PURE_WAIT_S:
        raise ToolError(
            f"this command only waits ({total:g} s) and holds the workspace meanwhile. Nothing runs on after a call, so "
            "there is nothing to wait for: run the command whose end you want, and it answers when it has ended; "
            f"to give something time to change, sleep at most {LONGEST_PURE_WAIT_S} s and look at it in the same command",
            kind="invalid_input",
        )
