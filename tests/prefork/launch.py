"""A replacement for ``python -m handrail``: the program runs in a fork of a process that has loaded it.

Run as ``python -I -S launch.py SOCKET PLACE ARGUMENTS``, it imports only what costs next to nothing, and so begins in a
hundredth of a second. It hands over its standard streams, environment, folder and limits, passes signals on, and ends
as the program did. Where it is killed itself, so is the program, a moment later.
"""

from __future__ import annotations

import _socket
import marshal
import os
import resource
import signal
import sys
from types import FrameType

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE)


def place() -> str:
    """The namespaces and user, which a fork cannot receive later."""
    names = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "net", "pid", "user", "ipc", "uts"))
    return " ".join((*names, str(os.getresuid()), str(os.getresgid())))


def main() -> None:
    if place() != sys.argv[2]:
        sys.exit("launch.py: started in other namespaces or by another user than the tests; use prefork.COLD")
    door = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    door.connect(sys.argv[1])
    limits = [(kind, *resource.getrlimit(kind)) for kind in LIMITS]
    request = marshal.dumps((sys.argv[3:], os.getcwd(), {**os.environ}, limits))
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    door.sendmsg([len(request).to_bytes(8, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    door.sendall(request)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # the program alone holds the ends of its pipes
        os.dup2(nowhere, number)
    process = _number(door)

    def pass_on(number: int, _: FrameType | None) -> None:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            pass  # it ends just now

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    code = _number(door)
    if code < 0:
        if -code != signal.SIGKILL:  # which is never anything else
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _number(door: _socket.socket) -> int:
    told = door.recv(8)
    if len(told) != 8:
        os.abort()  # the process that forks is gone
    return int.from_bytes(told, "big", signed=True)


if __name__ == "__main__":
    main()
