"""The system calls that a sandboxed program may make, as a seccomp filter (classic BPF, seccomp(2)).

A call fails with an error if a namespace does not confine it, or if it opens parts of the kernel that no build or test
needs: new namespaces and mounts, tracing others, kernel keys, modules, clocks, handles, terminal injection, every
socket family but the internet's and pairs, kernel memory that no other limit counts (System V queues, long segments
and large semaphore sets, longer pipes), and Linux AIO, whose requests share one limit on the whole machine. The same holds
for each call that is newer than this table. A program for another architecture (32-bit or x32 on x86-64) is killed or gets
ENOSYS, since its numbers mean other calls.

The filter is assembled by hand: bubblewrap takes exactly these bytes, and no library is needed.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

# The numbers of the system calls that the filter names.
#
# From the kernel's own tables: ``arch/x86/entry/syscalls/syscall_64.tbl`` and, for arm64, ``scripts/syscall.tbl``.

LAST_KNOWN = 469
"""The newest call that was looked at (file_setattr, Linux 6.17), the same everywhere since all machines count alike."""

# fmt: off
X86_64: Mapping[str, int] = MappingProxyType(
    {
        "open": 2, "ioctl": 16, "shmget": 29, "socket": 41, "socketpair": 53, "clone": 56, "semget": 64, "msgget": 68,
        "fcntl": 72, "creat": 85, "chmod": 90, "fchmod": 91,
        "ptrace": 101, "syslog": 103, "mknod": 133, "uselib": 134, "personality": 135, "ustat": 136, "sysfs": 139,
        "vhangup": 153, "modify_ldt": 154, "pivot_root": 155, "_sysctl": 156, "adjtimex": 159, "chroot": 161,
        "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
        "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174,
        "init_module": 175, "delete_module": 176, "get_kernel_syms": 177, "query_module": 178, "quotactl": 179,
        "nfsservctl": 180, "io_setup": 206, "lookup_dcookie": 212, "clock_settime": 227, "mbind": 237, "set_mempolicy": 238,
        "get_mempolicy": 239, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
        "migrate_pages": 256, "openat": 257, "mknodat": 259, "fchmodat": 268, "unshare": 272, "move_pages": 279,
        "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304,
        "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430,
        "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "openat2": 437, "pidfd_getfd": 438,
        "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447,
        "set_mempolicy_home_node": 450, "fchmodat2": 452, "statmount": 457, "listmount": 458, "lsm_set_self_attr": 460, "open_tree_attr": 467,
    }
)

AARCH64: Mapping[str, int] = MappingProxyType(
    {
        "io_setup": 0, "lookup_dcookie": 18, "fcntl": 25, "ioctl": 29, "mknodat": 33, "umount2": 39, "mount": 40, "pivot_root": 41,
        "nfsservctl": 42, "chroot": 51, "fchmod": 52, "fchmodat": 53, "openat": 56, "vhangup": 58, "quotactl": 60,
        "acct": 89, "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
        "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162,
        "settimeofday": 170, "adjtimex": 171, "msgget": 186, "semget": 190, "shmget": 194, "socket": 198, "socketpair": 199, "add_key": 217, "request_key": 218,
        "keyctl": 219, "clone": 220, "swapon": 224, "swapoff": 225, "mbind": 235, "get_mempolicy": 236,
        "set_mempolicy": 237, "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280,
        "userfaultfd": 282, "kexec_file_load": 294, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
        "fspick": 433, "clone3": 435, "openat2": 437, "pidfd_getfd": 438, "process_madvise": 440,
        "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "set_mempolicy_home_node": 450, "fchmodat2": 452,
        "statmount": 457,
        "listmount": 458, "lsm_set_self_attr": 460, "open_tree_attr": 467,
    }
)
# fmt: on


Machine = Literal["x86_64", "aarch64"]

_AUDIT: Mapping[Machine, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS: Mapping[Machine, Mapping[str, int]] = MappingProxyType({"x86_64": X86_64, "aarch64": AARCH64})
"""The number of every call that the filter names, by machine; missing calls are left out."""

ALLOW, KILL, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000

NOT_PERMITTED = (
    # namespaces and mounts
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree", "open_tree_attr", "move_mount"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "listmount", "statmount"),
    # other processes
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp"),
    # parts of the kernel with much code and no use in a build or a test
    *("bpf", "perf_event_open", "userfaultfd", "fanotify_init", "lookup_dcookie", "modify_ldt", "lsm_set_self_attr"),
    *("mbind", "set_mempolicy", "get_mempolicy", "set_mempolicy_home_node", "migrate_pages", "move_pages"),
    # its keys, which no namespace separates
    *("add_key", "request_key", "keyctl"),
    # the machine
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "create_module"),
    *("query_module", "get_kernel_syms", "reboot", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "syslog"),
    *("settimeofday", "clock_settime", "adjtimex", "clock_adjtime", "sethostname", "setdomainname", "vhangup"),
    *("iopl", "ioperm", "_sysctl", "uselib", "ustat", "sysfs", "nfsservctl"),
    # files by handle, which bypass every mount
    *("open_by_handle_at", "name_to_handle_at"),
)
"""Answered with EPERM."""

NOT_IMPLEMENTED = (
    *("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "openat2"),
    # requests that share one limit on the whole machine, such as 65,536
    "io_setup",
    # memory that no limit of a call counts
    *("msgget", "memfd_secret"),
)
"""Calls that return ENOSYS, so that libraries fall back to calls that the filter can inspect."""

MAX_SEGMENT_BYTES = 64 * 1024
"""The limit of a System V segment, in bytes. PostgreSQL needs a page. A namespace has 4,096 segments: as much as /tmp.
"""
HUGE_PAGES = 0o4000
"""SHM_HUGETLB: the segment uses whole huge pages, however short it is."""
MAX_SEMAPHORES = 16
"""The limit of one System V set. A namespace has 32,000 sets, and each semaphore uses 64 bytes or more."""
SET_PIPE_SIZE, MAX_PIPE_BYTES = 1031, 64 * 1024
"""F_SETPIPE_SZ of fcntl(2), and the default length of a pipe. All pipes of a user share one limit."""

NEW_NAMESPACES = 0x7E02_0000
"""Every CLONE_NEW* flag that clone(2) takes."""
PERSONALITIES = (0x0, 0x8, 0x2_0000, 0x2_0008, 0xFFFF_FFFF)
TERMINAL_COMMANDS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX type for the user; TIOCSETD loads line disciplines."""
SET_ID_BITS = 0o6000
CREATE_FLAGS = 0x40_0040
"""O_CREAT and the bit of O_TMPFILE: open(2) has a mode only with one of them."""
MODE_ARGUMENTS: Mapping[str, int] = MappingProxyType(
    {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mknod": 1, "mknodat": 2}
)
"""Calls that set a file's mode. They are denied set-uid and set-gid bits, which would also hold outside."""
OPEN_CALLS: Mapping[str, tuple[int, int]] = MappingProxyType({"open": (1, 2), "openat": (2, 3)})
"""Calls that may create a file: the positions of their flags and mode."""
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
SOCKET_TYPES = (1, 2)
"""SOCK_STREAM and SOCK_DGRAM."""
PROTOCOLS = (0, 6, 17)
"""The default of the family, TCP and UDP."""
NETLINK_ROUTE = 0
"""The only permitted netlink protocol, which getifaddrs(3) uses."""


def get_supported_architecture() -> Machine | None:
    """Return this machine's architecture if a filter for it exists; else None."""
    found = os.uname().machine
    return found if found in ("x86_64", "aarch64") else None


@lru_cache(maxsize=8)
def build_filter(name: Machine | None = None, *, unix_sockets: bool = False) -> bytes:
    """Return the filter as an array of ``struct sock_filter``, the form that ``bwrap --seccomp FD`` reads.

    :param name: the architecture; this machine's by default
    :param unix_sockets: whether programs may make Unix sockets, with which they reach any server that listens in a
        folder they see
    :raises ValueError: if there is no filter for this machine
    """
    chosen = name or get_supported_architecture()
    if chosen is None:
        raise ValueError(f"No system call filter exists for {os.uname().machine}. Use x86_64 or aarch64.")
    return _assemble(_build_steps(chosen, unix_sockets=unix_sockets))


class BpfInstruction(NamedTuple):
    """One instruction. Jumps name labels; ``""`` is the next instruction. A negative code marks a label."""

    code: int
    k: int = 0
    yes: str = ""
    no: str = ""
    label: str = ""


_LOAD, _AND, _RETURN, _JUMP = 0x20, 0x54, 0x06, 0x05
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16


def _deny(number: int) -> BpfInstruction:
    return BpfInstruction(_RETURN, _ERRNO | number)


def _load_argument(index: int) -> BpfInstruction:
    """Load the lower half of an argument, the only part that the kernel uses where these are read."""
    return BpfInstruction(_LOAD, _ARGUMENTS_AT + 8 * index)


def _load_upper_half(index: int) -> BpfInstruction:
    return BpfInstruction(_LOAD, _ARGUMENTS_AT + 8 * index + 4)


def _label(name: str) -> BpfInstruction:
    return BpfInstruction(-1, label=name)


def _build_steps(name: Machine, *, unix_sockets: bool) -> list[BpfInstruction]:
    numbers = NUMBERS[name]
    leaves: dict[int, BpfInstruction] = {}
    for call in NOT_PERMITTED:
        if call in numbers:
            leaves[numbers[call]] = _deny(errno.EPERM)
    for call in NOT_IMPLEMENTED:
        leaves[numbers[call]] = _deny(errno.ENOSYS)
    sections: list[BpfInstruction] = []
    for call, steps in _build_argument_checks(unix_sockets=unix_sockets).items():
        if call in numbers:
            leaves[numbers[call]] = BpfInstruction(_JUMP, yes=call)
            sections += [_label(call), *steps]
    # x32 calls have bit 30 set, so they are beyond the last too.
    bounds: dict[int, BpfInstruction] = {LAST_KNOWN + 1: _deny(errno.ENOSYS)}
    allowed = BpfInstruction(_RETURN, ALLOW)
    for number, leaf in leaves.items():
        bounds[number] = leaf
        if number + 1 not in leaves and number < LAST_KNOWN:
            bounds[number + 1] = allowed
    bounds.setdefault(0, allowed)
    return [
        BpfInstruction(_LOAD, _MACHINE_AT),
        BpfInstruction(_EQUAL, _AUDIT[name], yes="native"),
        BpfInstruction(_RETURN, KILL),
        _label("native"),
        BpfInstruction(_LOAD, _NUMBER_AT),
        *_build_syscall_search(sorted(bounds.items())),
        *sections,
        _label("allow"),
        allowed,
        _label("refuse"),
        _deny(errno.EPERM),
        _label("family"),
        _deny(errno.EAFNOSUPPORT),
        _label("protocol"),
        _deny(errno.EPROTONOSUPPORT),
    ]


def _build_syscall_search(bounds: Sequence[tuple[int, BpfInstruction]]) -> list[BpfInstruction]:
    """Return a binary search: the leaf of each bound applies to the numbers from it up to the next bound."""
    if len(bounds) == 1:
        return [bounds[0][1]]
    middle = len(bounds) // 2
    upper = f"from {bounds[middle][0]}"
    return [
        BpfInstruction(_AT_LEAST, bounds[middle][0], yes=upper),
        *_build_syscall_search(bounds[:middle]),
        _label(upper),
        *_build_syscall_search(bounds[middle:]),
    ]


def _build_argument_checks(*, unix_sockets: bool) -> dict[str, list[BpfInstruction]]:
    """Return the instructions for the calls that are decided by their arguments."""
    found: dict[str, list[BpfInstruction]] = {
        "clone": [_load_argument(0), BpfInstruction(_ANY_BIT, NEW_NAMESPACES, yes="refuse", no="allow")],
        "personality": [_load_argument(0), *_jump_if_any(PERSONALITIES, "allow", "refuse")],
        "ioctl": [_load_argument(1), *_jump_if_any(TERMINAL_COMMANDS, "refuse", "allow")],
        "shmget": [
            _load_upper_half(1),
            BpfInstruction(_EQUAL, 0, no="refuse"),
            _load_argument(1),
            BpfInstruction(_AT_LEAST, MAX_SEGMENT_BYTES + 1, yes="refuse"),
            _load_argument(2),
            BpfInstruction(_ANY_BIT, HUGE_PAGES, yes="refuse", no="allow"),
        ],
        "semget": [_load_argument(1), BpfInstruction(_AT_LEAST, MAX_SEMAPHORES + 1, yes="refuse", no="allow")],
        "fcntl": [
            _load_argument(1),
            BpfInstruction(_EQUAL, SET_PIPE_SIZE, yes="", no="allow"),
            _load_argument(2),
            BpfInstruction(_AT_LEAST, MAX_PIPE_BYTES + 1, yes="refuse", no="allow"),
        ],
        "socketpair": [_load_argument(0), BpfInstruction(_EQUAL, AF_UNIX, yes="allow", no="family")],
        "socket": [
            _load_argument(0),
            BpfInstruction(_EQUAL, AF_UNIX, yes="allow" if unix_sockets else "family"),
            BpfInstruction(_EQUAL, AF_NETLINK, yes="netlink"),
            *_jump_if_any((AF_INET, AF_INET6), "internet", "family"),
            _label("netlink"),
            _load_argument(2),
            BpfInstruction(_EQUAL, NETLINK_ROUTE, yes="allow", no="protocol"),
            _label("internet"),
            _load_argument(1),
            BpfInstruction(_AND, 0xF),  # without SOCK_CLOEXEC and SOCK_NONBLOCK
            *_jump_if_any(SOCKET_TYPES, "kind", "refuse"),
            _label("kind"),
            _load_argument(2),
            *_jump_if_any(PROTOCOLS, "allow", "protocol"),
        ],
    }
    for call, mode in MODE_ARGUMENTS.items():
        found[call] = [_load_argument(mode), BpfInstruction(_ANY_BIT, SET_ID_BITS, yes="refuse", no="allow")]
    for call, (flags, mode) in OPEN_CALLS.items():
        found[call] = [
            _load_argument(flags),
            BpfInstruction(_ANY_BIT, CREATE_FLAGS, yes="", no="allow"),
            _load_argument(mode),
            BpfInstruction(_ANY_BIT, SET_ID_BITS, yes="refuse", no="allow"),
        ]
    return found


def _jump_if_any(values: Sequence[int], yes: str, no: str) -> list[BpfInstruction]:
    return [
        *(BpfInstruction(_EQUAL, value, yes=yes) for value in values[:-1]),
        BpfInstruction(_EQUAL, values[-1], yes=yes, no=no),
    ]


def _assemble(steps: Sequence[BpfInstruction]) -> bytes:
    places: dict[str, int] = {}
    real: list[BpfInstruction] = []
    for step in steps:
        if step.code < 0:
            places[step.label] = len(real)
        else:
            real.append(step)
    out = bytearray()
    for here, step in enumerate(real, 1):
        yes, no = (places[label] - here if label else 0 for label in (step.yes, step.no))
        if step.code == _JUMP:
            out += struct.pack("<HBBI", step.code, 0, 0, yes)
        else:
            out += struct.pack("<HBBI", step.code, yes, no, step.k)  # refuses a distance over 255
    return bytes(out)
