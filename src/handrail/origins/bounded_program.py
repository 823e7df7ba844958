"""Python programs of the kernel that run in a process with limits, since a hostile input can make their work endless.

Such a program is a module with a function ``compute_values(question, data)`` that yields JSON values. Its process gets the question
as a line of JSON, and then the data, as its input. It prints one value a line. The system ends it at a limit, so lines may be
missing. The process imports this module first, which therefore imports nothing large.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence


_START = "import sys; sys.path[:0] = sys.argv[4:]; from handrail.origins.bounded_program import main; main()"
"""The code that Python runs. Its arguments are the module, the limits, and the folders to import from."""


def main() -> None:
    """Answer the question on the standard input. The arguments are the module and the limits, see :func:`make_argv`."""
    _set_process_limits(int(sys.argv[2]), int(sys.argv[3]))
    logging.disable(logging.CRITICAL)  # a hostile document causes any number of warnings
    try:
        question = json.loads(sys.stdin.buffer.readline())
        for value in import_module(sys.argv[1]).compute_values(question, sys.stdin.buffer.read()):
            _print_value(value)
    except ImportError:
        _print_value({"error": "missing"})
    except (MemoryError, RecursionError):
        _print_value({"error": "limit"})
    except Exception as error:
        _print_value({"error": "failed", "text": f"{type(error).__name__}: {error}"[:300]})


def _print_value(value: object) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


def _set_process_limits(cpu_s: int, memory_mib: int) -> None:
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


def make_argv(python: str, module: str, cpu_s: int, memory_mib: int, folders: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs a program.

    :param module: the module with ``compute_values``
    :param cpu_s: processor time, start-up included
    :param memory_mib: address space
    :param folders: the folders to import from, first
    """
    return (python, "-I", "-S", "-c", _START, module, str(cpu_s), str(memory_mib), *folders)


def encode_input(question: object, data: bytes = b"") -> bytes:
    """Return the input of a program.

    :raises TypeError, ValueError, RecursionError: if the question is not JSON
    """
    return b"".join((json.dumps(question).encode(), b"\n", data))


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
