"""The command line of the preforked ``handrail`` program."""

from __future__ import annotations

import atexit
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

COLD = (sys.executable, "-m", "handrail")
"""The program started from nothing: where its very start is the subject, where it is looked at or killed by its process
id, and within a sandbox."""

_HERE = Path(__file__).parent


@cache
def handrail() -> tuple[str, ...]:
    """The program, forked from a process that has loaded it already and that ends with this one."""
    if sys.platform != "linux":
        return COLD
    from tests.prefork.launch import place

    folder = tempfile.mkdtemp(prefix="handrail-prefork-")  # nobody else's to connect to
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"{folder}/socket")
        listening.listen(64)
        argv = [sys.executable, "-P", str(_HERE / "server.py"), str(listening.fileno()), folder]
        atexit.register(_end, subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[listening.fileno()]))
    return (sys.executable, "-I", "-S", str(_HERE / "launch.py"), f"{folder}/socket", place())


def _end(server: subprocess.Popen[bytes]) -> None:
    server.communicate()


def python(script: Path) -> tuple[str, ...]:
    """A program in Python that uses Handrail, started in the same way."""
    if sys.platform != "linux":
        return (sys.executable, str(script))
    return (*handrail(), "--script", str(script))
