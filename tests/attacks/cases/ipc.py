"""Access to other programs and the kernel: service sockets, socket families, and rare system calls."""

from __future__ import annotations

import platform

from tests.attacks.case import Case, python, shell

_ARM = platform.machine() == "aarch64"
_NUMBERS = {  # x86_64, aarch64
    "unshare": (272, 97),
    "mount": (165, 40),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "perf_event_open": (298, 241),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "open_by_handle_at": (304, 265),
    "swapon": (167, 224),
    "acct": (163, 89),
    "clock_settime": (227, 112),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "move_mount": (429, 429),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "sethostname": (170, 161),
}


def _number(name: str) -> int:
    return _NUMBERS[name][_ARM]


_STRUCT = "room = ctypes.create_string_buffer(4096)\n"


def _syscall(id: str, name: str, arguments: str, source: str, *, control: bool = False) -> Case:
    return python(
        id,
        "ipc",
        source,
        f"{name} is refused",
        f"{_STRUCT}syscall({name!r}, {_number(name)}, {arguments})\n",
        control=control,
    )


def _service(id: str, address: str, source: str) -> Case:
    code = f"""
def connect():
    with socket.socket(socket.AF_UNIX) as one:
        one.connect({address!r})
attempt({id!r}, connect)
"""
    return python(id, "ipc", source, "there is no such socket inside", code)


CASES: list[Case] = [
    _service("docker socket", "/run/docker.sock", "a container engine's socket is root on the machine"),
    _service("docker socket, other path", "/var/run/docker.sock", "the same under its old name"),
    _service("ssh-agent socket", "/run/agent.sock", "an agent signs for whoever can connect"),
    _service("dbus socket", "/run/bus", "systemd-run by way of the session's bus"),
    _service("wayland socket", "/run/wayland-0", "a display server reads keys and screens"),
    _service("abstract socket", "\0handrail-victim", "abstract names ignore the file system"),
    shell(
        "X11 sockets",
        "ipc",
        "X11 lets every client type for the others",
        "neither the socket's folder nor an abstract name is there",
        "ls /tmp/.X11-unix 2>/dev/null && echo REACHED; grep -e '@/tmp/.X11' /proc/net/unix && echo REACHED",
        control=False,
    ),
    shell(
        "abstract names are not even listed",
        "ipc",
        "the table of the namespace tells what there is to connect to",
        "the list of sockets holds none of the outside",
        "grep -e '@handrail' /proc/net/unix && echo REACHED",
    ),
    python(
        "vsock",
        "ipc",
        "a virtual machine's channel to its host is in no namespace",
        "the family is refused",
        "attempt('vsock', lambda: socket.socket(40, socket.SOCK_STREAM))\n",
        control=False,
    ),
    python(
        "AF_ALG",
        "ipc",
        "the kernel's crypto interface has had one hole after another",
        "the family is refused",
        "attempt('alg', lambda: socket.socket(38, socket.SOCK_SEQPACKET))\n",
        control=False,
    ),
    python(
        "packet and raw sockets",
        "ipc",
        "raw packets pass by every filter on ports",
        "they are refused",
        "attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))\n"
        "attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))\n",
        control=False,
    ),
    python(
        "rare families of sockets",
        "ipc",
        "old protocols are where kernel holes are found: rds, tipc, can, ax25, x25, bluetooth, nfc, kcm, xdp",
        "each family is refused",
        "for family in (21, 30, 29, 3, 9, 31, 39, 41, 44, 37, 33, 15):\n"
        "    attempt(f'family {family}', lambda: socket.socket(family, socket.SOCK_DGRAM))\n"
        "    attempt(f'family {family}', lambda: socket.socket(family, socket.SOCK_SEQPACKET))\n",
        control=False,
    ),
    python(
        "netlink",
        "ipc",
        "netlink configures the machine's network, and reports its devices",
        "nothing but an own, empty network can be asked about; the kernel's other subsystems not at all",
        """
import json
for protocol in (6, 7, 9, 12, 15, 18):  # xfrm, selinux, audit, netfilter, uevents, crypto
    def multicast():
        one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        one.bind((0, 1))
        one.setsockopt(270, 1, 1)
        return 'joined'
    attempt(f'netlink {protocol}', multicast)
names = [name for _, name in socket.if_nameindex() if name != 'lo'] if hasattr(socket, 'if_nameindex') else []
print('REACHED interfaces', names) if names else print('only lo')
""",
        control=False,
    ),
    _syscall("io_uring", "io_uring_setup", "1, room", "io_uring does what system call filters do not see"),
    _syscall("bpf", "bpf", "0, room, 64", "programs in the kernel"),
    _syscall("userfaultfd", "userfaultfd", "1", "holds the kernel up in the middle of a copy: races won at leisure"),
    _syscall("keyctl", "keyctl", "0, -3, 0", "the session's keyring is in no namespace", control=True),
    _syscall("add_key", "add_key", "b'user', b'handrail-probe', b'x', 1, -3", "keys shared with whoever started us"),
    _syscall("request_key", "request_key", "b'user', b'handrail-probe', None, -3", "starts a program of the machine"),
    _syscall("perf_event_open", "perf_event_open", "room, 0, -1, -1, 0", "counters read other programs' secrets"),
    _syscall("unshare", "unshare", "0x10000000", "a further user namespace brings every capability back", control=True),
    _syscall("mount", "mount", "b't', b'/tmp', b'tmpfs', 0, None", "a mount uncovers what was covered"),
    _syscall("mount by the new interface", "fsopen", "b'tmpfs', 0", "filters that know only the old system call"),
    _syscall("open_tree", "open_tree", "-100, b'/', 1", "a detached copy of a mount has no covers"),
    _syscall("move_mount", "move_mount", "-100, b'/', -100, b'/tmp', 0", "moves a cover away"),
    _syscall("pivot_root", "pivot_root", "b'/', b'/'", "the old root comes back"),
    _syscall("chroot", "chroot", "b'/tmp'", "chroot and climb out"),
    _syscall("setns", "setns", "0, 0", "into the namespaces of others"),
    _syscall("open_by_handle_at", "open_by_handle_at", "-100, room, 0", "opens files by number, whatever is mounted"),
    _syscall("kexec_load", "kexec_load", "0, 0, None, 0", "another kernel"),
    _syscall("init_module", "init_module", "None, 0, b''", "code in the kernel"),
    _syscall("finit_module", "finit_module", "-1, b'', 0", "code in the kernel"),
    _syscall("swapon", "swapon", "b'/tmp/x', 0", "memory of others on a file of one's own"),
    _syscall("acct", "acct", "b'/tmp/x'", "a record of everything that anybody runs"),
    _syscall("clock_settime", "clock_settime", "0, room", "the clock that certificates and logs go by"),
    _syscall("sethostname", "sethostname", "b'x', 1", "settings of the machine"),
    shell(
        "nsenter and unshare",
        "ipc",
        "programs that leave a sandbox in one word",
        "none of them works",
        "unshare -Ur echo REACHED; unshare -r -m echo REACHED; nsenter -t 1 -a echo REACHED; "
        "bwrap --ro-bind / / echo REACHED",
        control=True,
    ),
    python(
        "shared memory and message queues",
        "ipc",
        "System V memory of other programs by guessing its number",
        "the namespace of these is an own one and empty",
        "lines = open('/proc/sysvipc/shm').read().splitlines() + open('/proc/sysvipc/msg').read().splitlines()\n"
        "print('REACHED', lines) if len(lines) > 2 else print('none')\n",
        control=False,
    ),
    shell(
        "setuid programs",
        "ipc",
        "sudo, su and mount are root's for everybody",
        "no new privileges, no capability, in the bounding set neither",
        "grep -q 'NoNewPrivs:.1' /proc/self/status || echo REACHED; "
        "grep -E 'Cap(Prm|Eff|Inh|Amb):.*[1-9a-f]' /proc/self/status && echo REACHED",
        control=False,
        harmless=True,
    ),
    shell(
        "devices",
        "ipc",
        "mknod makes a way to the disk",
        "no device can be made, and none but the harmless ones is there",
        "mknod /tmp/d b 8 0 && echo REACHED; mknod /tmp/k c 1 1 && echo REACHED; "
        "ls /dev | grep -v -x -e core -e fd -e full -e null -e ptmx -e pts -e random -e shm -e stderr -e stdin "
        "-e stdout -e tty -e urandom -e zero -e console && echo REACHED",
        control=False,
        harmless=True,
    ),
]
