"""Load the ``handrail`` program once and fork for each start; end with stdin, including all forks.

Each fork is a process of its own as every other: its arguments, environment, folder and standard streams are those of
the launcher. What it saves is the loading before its first line, and the unloading after its last.
"""

from __future__ import annotations

import atexit
import gc
import io
import marshal
import os
import resource
import selectors
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from runpy import run_path
from shutil import rmtree
from typing import BinaryIO, TextIO, cast

COMMON = (
    "handrail.kernel.local_kernel",
    "handrail.kernel.remote_kernel",
    "handrail.policy.decision_explanation",
    "handrail.sandbox.tier_probe",
    "handrail.store.operator_decisions",
    "handrail.tools",
    "platformdirs.unix",
)
SCRIPT = "--script"
"""Before a file: the program is that file, as for Python itself."""

ALONE = {"mcp": ("handrail.frontends.mcp.mcp_server",)}
"""What a command loads that takes as long as everything else together: before its first fork only."""


@dataclass(frozen=True, slots=True)
class Start:
    """A program to run, as the launcher asked for it."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    limits: list[tuple[int, int, int]]
    streams: list[int]


def main(listening: socket.socket, folder: str) -> Start | None:
    """Fork for whoever connects. Gives what to run in each fork, and None in the end."""
    _load()
    doors: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select()[:1]:  # what is done about one may be the end of the next
                if key.fd == 0:
                    for process, _ in doors.values():
                        os.kill(process, signal.SIGKILL)
                    rmtree(folder)
                    return None
                if key.fd == listening.fileno():
                    door, _ = listening.accept()
                    start = _asked(door)
                    if start is None:
                        door.close()
                        continue
                    for module in ALONE.get(start.arguments[0] if start.arguments else "", ()):
                        import_module(module)
                    if (process := os.fork()) == 0:
                        listening.close()
                        door.close()
                        for _, other in doors.values():
                            other.close()
                        for watched in doors:
                            os.close(watched)
                        return start
                    for stream in start.streams:
                        os.close(stream)
                    ended = os.pidfd_open(process)
                    doors[ended] = process, door
                    selector.register(ended, selectors.EVENT_READ)
                    selector.register(door, selectors.EVENT_READ, ended)
                    _tell(door, process)
                elif key.data is not None:  # a launcher that was killed: so is what it stood for
                    selector.unregister(key.fileobj)
                    os.kill(doors[key.data][0], signal.SIGKILL)
                else:
                    process, door = doors.pop(key.fd)
                    selector.unregister(key.fd)
                    if door in selector.get_map():
                        selector.unregister(door)
                    os.close(key.fd)
                    _tell(door, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
                    door.close()


def _load() -> None:
    import handrail.frontends.cli as program

    for module in iter_modules(program.__path__, "handrail.frontends.cli."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    for name in COMMON:
        import_module(name)
    gc.collect()
    gc.freeze()


def _asked(door: socket.socket) -> Start | None:
    """Return the request, or None from a launcher that was killed before it had sent all."""
    head, streams, _, _ = socket.recv_fds(door, 8, 3)
    text = b""
    size = int.from_bytes(head, "big")
    while len(text) < size and (piece := door.recv(size - len(text))):
        text += piece
    if len(streams) != 3 or len(text) < size:
        for stream in streams:
            os.close(stream)
        return None
    return Start(*marshal.loads(text), streams=streams)


def _tell(door: socket.socket, number: int) -> None:
    try:
        door.sendall(number.to_bytes(8, "big", signed=True))
    except OSError:
        pass  # the launcher was killed


def become(start: Start) -> None:
    """In the fork: take over the launcher's descriptors, folder and arguments."""
    for number, stream in enumerate(start.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)
    for kind, soft, hard in start.limits:
        resource.setrlimit(kind, (soft, hard))
    sys.argv = ["handrail", *start.arguments]
    sys.path.insert(0, start.folder)
    unbuffered = bool(start.environment.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, encoding=sys.stdin.encoding, errors=sys.stdin.errors, closefd=False)  # noqa: SIM115
    sys.stdout = _writer(1, sys.stdout, unbuffered=unbuffered, lines=os.isatty(1))
    sys.stderr = _writer(2, sys.stderr, unbuffered=unbuffered, lines=True)


def _writer(number: int, like: TextIO, *, unbuffered: bool, lines: bool) -> TextIO:
    """A stream as the interpreter opens it. The one that this process began with knows what its file was then."""
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(
        cast(BinaryIO, raw) if unbuffered else io.BufferedWriter(raw),
        encoding=like.encoding,
        errors=like.errors,
        newline="\n",
        line_buffering=lines,
        write_through=unbuffered,
    )


def program() -> int | str | None:
    """Return the exit code that the interpreter would use."""
    from handrail.frontends.cli import main

    try:
        if sys.argv[1:2] == [SCRIPT]:
            sys.argv = sys.argv[2:]
            run_path(sys.argv[0], run_name="__main__")
        else:
            main()
    except SystemExit as ended:
        return ended.code
    return 0


def end(code: int | str | None) -> None:
    """As the interpreter ends, without taking apart what the other forks share: that costs more than most commands."""
    if threading.active_count() > 1 or not isinstance(code, int):
        sys.exit(code)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


started = main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
if started is not None:
    become(started)
    end(program())
