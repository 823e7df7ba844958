"""Python programs of the kernel that run in a process with limits, since a hostile input can make their work endless.

The kernel writes the input to such a process. The process sets its limits and prints one JSON value a line. The system ends
it at a limit, so lines may be missing. The process imports this module first: it imports nothing large itself.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence


def set_process_limits(cpu_s: int, memory_mib: int) -> None:
    """Limit this process: processor time, address space, no core file, and no file that it writes.

    :param cpu_s: processor time, start-up included
    """
    import resource  # the kernel imports this module also on systems without it

    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_mib * 1024 * 1024,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
    }
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))


async def run_bounded_program(argv: Sequence[str], data: bytes, output: bytearray, *, max_bytes: int) -> None:
    """Run a program with an empty environment until its output ends, and end it if the caller is cancelled.

    :param data: its standard input; the program may end before it has read everything
    :param output: receives what the program prints, also if the caller's time is over
    :param max_bytes: end the program after this much output
    :raises OSError, ValueError: if it cannot be started
    """
    import asyncio

    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    writing = asyncio.ensure_future(_write_input(process.stdin, data))
    try:
        while len(output) < max_bytes and (piece := await process.stdout.read(1 << 16)):
            output += piece
    finally:
        writing.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(process.wait())


async def _write_input(stdin: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stdin.write(data)
        await stdin.drain()
        stdin.close()


def parse_json_lines(output: bytes | bytearray) -> list[Any]:
    """Return the values of the lines that are complete."""
    values: list[Any] = []
    for line in output.splitlines():
        try:
            values.append(json.loads(line))
        except ValueError:  # the process ended in the middle of a line
            break
    return values
