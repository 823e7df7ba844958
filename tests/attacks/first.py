"""The first program in the outer sandbox: sees that it is one, makes its network, gives every right away, goes on.

Started with ``python -I`` by :mod:`tests.attacks.outer`; needs nothing but the standard library. It stays as the fake
internet of what it starts.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import socket
import struct
import sys
from typing import Any

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
_CLONE_NEWUSER = 0x10000000
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 38, 47
_AMBIENT_CLEAR_ALL = 4
_MS_NOSUID_NODEV_NOEXEC = 0x2 | 0x4 | 0x8
_PROCESSES, _FILE_BYTES = 800, 1 << 41
_libc = ctypes.CDLL(None, use_errno=True)

INTERNET = ("93.184.216.34", "93.184.216.35")
"""Addresses of the real internet, here on the loopback interface, so that nothing that is sent leaves the sandbox."""
METADATA = "169.254.169.254"
PRIVATE = "10.11.12.13"


def main() -> int:
    plan = json.loads(sys.argv[1])
    # In the root's way the namespace of users comes last; it is looked at again before anything is tried.
    same = [n for n in NAMESPACES if n != "user" and os.readlink(f"/proc/self/ns/{n}") == plan["host"][n]]
    if same:
        print(f"refused: the namespaces {', '.join(same)} are the machine's own", file=sys.stderr)
        return 3
    if plan["as_root"]:
        _check(_libc.mount(b"proc", b"/proc", b"proc", _MS_NOSUID_NODEV_NOEXEC, None))
    sockets = _network()
    for folder in (plan["home"], "/run"):
        if plan["as_root"]:
            os.chown(folder, plan["uid"], plan["gid"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    _give_away(plan)
    again = [n for n in NAMESPACES if os.readlink(f"/proc/self/ns/{n}") == plan["host"][n]]
    if again:
        print(f"refused: the namespaces {', '.join(again)} are the machine's own", file=sys.stderr)
        return 3
    child = os.fork()
    if child == 0:
        for one in sockets.values():
            one.close()
        resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESSES, _PROCESSES))
        os.execve(sys.executable, [sys.executable, "-m", "tests.attacks.inside", sys.argv[1]], dict(os.environ))
    sys.path.insert(0, os.environ["PYTHONPATH"])
    from tests.attacks.internet import serve

    serve(sockets)
    _, status = os.waitpid(child, 0)
    sys.stdout.flush()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _network() -> dict[str, socket.socket]:
    """Further addresses on the loopback interface, and servers' sockets on them. Empty where that is not allowed."""
    found: dict[str, socket.socket] = {}
    try:
        for address in (*INTERNET, METADATA, PRIVATE):
            _add_address(address)
        wanted = {
            "web": (socket.SOCK_STREAM, ("0.0.0.0", 80)),
            "tls": (socket.SOCK_STREAM, ("0.0.0.0", 443)),
            "other": (socket.SOCK_STREAM, ("0.0.0.0", 8022)),
            "names": (socket.SOCK_DGRAM, ("0.0.0.0", 53)),
        }
        for name, (kind, address) in wanted.items():
            found[name] = one = socket.socket(socket.AF_INET, kind)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen(64)
    except OSError as error:
        print(f"no fake internet: {error}", file=sys.stderr)
        for one in found.values():
            one.close()
        return {}
    return found


def _add_address(address: str) -> None:
    """RTM_NEWADDR by netlink, as ``ip address add ADDRESS/32 dev lo`` does."""
    raw = socket.inet_aton(address)
    index = socket.if_nametoindex("lo")
    attributes = b"".join(struct.pack("HH", 8, kind) + raw for kind in (1, 2))  # IFA_ADDRESS, IFA_LOCAL
    message = struct.pack("BBBBI", socket.AF_INET, 32, 0, 0, index) + attributes
    header = struct.pack("IHHII", 16 + len(message), 20, 0x1 | 0x4 | 0x400, 1, 0)  # request, ack, create
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.send(header + message)
        answer = link.recv(4096)
    code = struct.unpack_from("i", answer, 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))


def _give_away(plan: dict[str, Any]) -> None:
    """No identity, no capability and no way back to one."""
    if plan["as_root"]:
        os.setgroups([])
        os.setresgid(plan["gid"], plan["gid"], plan["gid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
        _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))
        _check(_libc.unshare(_CLONE_NEWUSER))
        shown = 0 if plan["mode"] == "mapped root" else plan["uid"]
        _put("/proc/self/setgroups", "deny")
        _put("/proc/self/uid_map", f"{shown} {plan['uid']} 1")
        _put("/proc/self/gid_map", f"{shown if plan['mode'] == 'mapped root' else plan['gid']} {plan['gid']} 1")
    _check(_libc.prctl(_PR_CAP_AMBIENT, _AMBIENT_CLEAR_ALL, 0, 0, 0))
    if plan["mode"] == "user":  # who is called root keeps what it has in its own namespace, as in a container
        header = struct.pack("Ii", 0x20080522, 0)
        _check(_libc.capset(header, struct.pack("6I", *(0,) * 6)))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _put(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(number: int) -> None:
    if number:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


if __name__ == "__main__":
    sys.exit(main())
