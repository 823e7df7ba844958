"""Checks of arguments that are beyond the event loop's budget, each in a process of limited time and memory.

The estimate of :mod:`handrail.contract.schema.effort` is an upper bound. Many real schemas are far cheaper than theirs, and only
the check itself shows that. A process that the system ends at a bound can make it without holding up anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import sys
from pathlib import Path
from typing import Any, cast

from handrail.contract.generation import Entry
from handrail.contract.schema.bounded_check import CPU_SECONDS, MEMORY_MIB
from handrail.contract.schema.schema import UnfinishedCheck
from handrail.origins.places import folder_around, workspaces
from handrail.origins.programs import ProgramRefused, own_interpreter

_TIMEOUT_S = 20.0
"""Wall time; the processor time has a bound that a busy machine does not reach sooner."""
_AT_ONCE = 2
_MOST_WAITING = 32
_MODULE = "handrail.contract.schema.bounded_check"
_START = f"import sys; sys.path[:0] = sys.argv[1:]; from {_MODULE} import main; main()"
_BOUNDS = f"a separate process did not finish the check within {CPU_SECONDS} s and {MEMORY_MIB} MiB"
_TOO_LARGE = "the arguments do not fit their schema, which is too large to say why; look at the schema"


class BoundedChecks:
    """Starts a process for each check; none exists otherwise. Use it from one event loop."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._there = 0

    async def admitted(self, entry: Entry, unfinished: UnfinishedCheck, *, shared: bool) -> dict[str, Any]:
        """Return what :meth:`Entry.admitted` returns, after a check in a process.

        :param shared: the caller of the kernel still holds the object of the arguments, so it is copied
        :raises ToolError: as :meth:`Entry.admitted`; :class:`UnfinishedCheck` if the process did not finish the check
        """
        arguments = copy.deepcopy(unfinished.arguments) if shared else unfinished.arguments
        problems = await self._problems(unfinished, arguments)
        return entry.admitted(arguments, parsed=True, judged={unfinished.schema: problems})

    async def _problems(self, unfinished: UnfinishedCheck, arguments: dict[str, Any]) -> list[str]:
        coarse = unfinished.problems
        if self._there >= _MOST_WAITING:
            return coarse
        self._there += 1
        try:
            async with self._slots:
                lines = await _answer({"parameters": unfinished.schema.parameters, "arguments": arguments})
        finally:
            self._there -= 1
        if lines is None:
            return coarse
        if not lines:
            return [*coarse, _BOUNDS]
        if lines[0] is True:
            return []
        if len(lines) == 1:
            return coarse if coarse.checked else [_TOO_LARGE]
        return cast("list[str]", lines[1])


async def _answer(question: object) -> list[object] | None:
    """The lines that the process printed, as far as it came; None if it cannot be started."""
    try:
        text = json.dumps(question).encode()
        process = await asyncio.create_subprocess_exec(
            *(own_interpreter(), "-I", "-S", "-c", _START, *_import_path()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
    except (ProgramRefused, OSError, ValueError, TypeError, RecursionError):
        return None
    output = b""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                output, _ = await process.communicate(text)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())
    lines: list[object] = []
    for line in output.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the process ended in the middle of a line
            break
    return lines


def _import_path() -> list[str]:
    """The import path of the process: that of this one without open workspaces, where a call could have written."""
    folders = workspaces()
    wanted = dict.fromkeys((str(Path(__file__).parents[2]), *sys.path))
    return [one for one in wanted if one.startswith("/") and folder_around(one, folders) is None]
