"""The first program in the outer sandbox: checks it, creates its network, and drops its privileges.

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
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 38, 47
_AMBIENT_CLEAR_ALL = 4
_MS_NOSUID_NODEV_NOEXEC = 0x2 | 0x4 | 0x8
_PROCESSES, _FILE_BYTES = 800, 1 << 41
_libc = ctypes.CDLL(None, use_errno=True)

INTERNET = ("93.184.216.34", "93.184.216.35")
"""Addresses of the real internet, which in the outer sandbox are those of the program that plays it: nothing that is
sent leaves the sandbox."""
GATEWAY, NAMES, MACHINE = "93.184.216.1", "93.184.216.53", "93.184.216.2"
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
    for folder in (plan["home"], "/run"):
        if plan["as_root"]:
            os.chown(folder, plan["uid"], plan["gid"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    ready, told = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        return _machine(plan, ready, told)
    os.close(ready[1])
    os.close(told[0])
    sockets: dict[str, socket.socket] = {}
    if os.read(ready[0], 1):
        try:
            _make_wire(child)
            sockets = _serving_sockets()
        except OSError as error:
            print(f"no fake internet: {error}", file=sys.stderr)
            sockets = {}
    os.write(told[1], b"1" if sockets else b"0")
    _give_away(plan)
    if sockets:
        sys.path.insert(0, os.environ["PYTHONPATH"])
        from tests.attacks.internet import serve

        serve(sockets)
    _, status = os.waitpid(child, 0)
    sys.stdout.flush()
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _machine(plan: dict[str, Any], ready: tuple[int, int], told: tuple[int, int]) -> int:
    """The machine with Handrail: in its own network, with a link to the internet."""
    apart = _libc.unshare(_CLONE_NEWNET) == 0
    os.close(told[1])
    os.write(ready[1], b"1") if apart else None
    os.close(ready[1])
    wired = os.read(told[0], 1) == b"1"
    if wired:
        _connect_machine()
    elif apart:
        _link_up("lo")
    _give_away(plan)
    again = [n for n in NAMESPACES if os.readlink(f"/proc/self/ns/{n}") == plan["host"][n]]
    if again:
        print(f"refused: the namespaces {', '.join(again)} are the machine's own", file=sys.stderr)
        return 3
    resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESSES, _PROCESSES))
    os.environ["OUTER_INTERNET"] = "1" if wired else ""
    return os.execve(sys.executable, [sys.executable, "-m", "tests.attacks.inside", sys.argv[1]], dict(os.environ))


def _serving_sockets() -> dict[str, socket.socket]:
    """The internet's end: its addresses, and servers' sockets on them."""
    _link_up("lo")
    for address in (GATEWAY, NAMES, *INTERNET):
        _add_address("internet", address, 24)
    for address in (METADATA, PRIVATE):
        _add_address("internet", address, 32)
    _link_up("internet")
    found: dict[str, socket.socket] = {}
    wanted = {
        "web": (socket.SOCK_STREAM, 80),
        "tls": (socket.SOCK_STREAM, 443),
        "other": (socket.SOCK_STREAM, 8022),
        "names": (socket.SOCK_DGRAM, 53),
    }
    for name, (kind, port) in wanted.items():
        found[name] = one = socket.socket(socket.AF_INET, kind)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((NAMES if name == "names" else "0.0.0.0", port))  # answers come from where they were asked
        if kind == socket.SOCK_STREAM:
            one.listen(64)
    return found


def _connect_machine() -> None:
    """The machine's end: an address, and a way to all others."""
    _link_up("lo")
    _add_address("eth0", MACHINE, 24)
    _link_up("eth0")
    route = struct.pack("BBBBBBBBI", socket.AF_INET, 0, 0, 0, 254, 3, 0, 1, 0)  # main table, boot, universe, unicast
    _netlink(24, 0x400, route + _attribute(5, socket.inet_aton(GATEWAY)))


def _make_wire(pid: int) -> None:
    """A pair of virtual devices, one end here and one in the network namespace of ``pid``."""
    peer = _link_head(0) + _attribute(3, b"eth0\0") + _attribute(19, struct.pack("I", pid))
    kind = _attribute(1, b"veth") + _attribute(2, _attribute(1, peer))
    _netlink(16, 0x400 | 0x200, _link_head(0) + _attribute(3, b"internet\0") + _attribute(18, kind))


def _link_head(index: int, flags: int = 0) -> bytes:
    return struct.pack("BBHiII", 0, 0, 0, index, flags, flags)


def _link_up(name: str) -> None:
    _netlink(16, 0, _link_head(socket.if_nametoindex(name), 1))


def _add_address(device: str, address: str, bits: int) -> None:
    raw = socket.inet_aton(address)
    head = struct.pack("BBBBI", socket.AF_INET, bits, 0, 0, socket.if_nametoindex(device))
    _netlink(20, 0x400, head + _attribute(1, raw) + _attribute(2, raw))


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _netlink(kind: int, flags: int, message: bytes) -> None:
    """One request to the kernel's own configuration of networks, acknowledged.

    :raises OSError: when it is refused
    """
    header = struct.pack("IHHII", 16 + len(message), kind, 0x1 | 0x4 | flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.send(header + message)
        answer = link.recv(4096)
    code = struct.unpack_from("i", answer, 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))


def _give_away(plan: dict[str, Any]) -> None:
    """No identity, no capability and no way back to one."""
    uid, gid = (plan["uid"], plan["gid"]) if plan["as_root"] else (0, 0)
    if plan["as_root"]:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))
    _check(_libc.unshare(_CLONE_NEWUSER))
    as_user = plan["mode"] == "user"
    _put("/proc/self/setgroups", "deny")
    _put("/proc/self/uid_map", f"{plan['uid'] if as_user else 0} {uid} 1")
    _put("/proc/self/gid_map", f"{plan['gid'] if as_user else 0} {gid} 1")
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
