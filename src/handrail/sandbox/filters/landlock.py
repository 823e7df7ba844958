"""The Landlock ruleset of a sandbox, as plain data, which the launcher inside puts into force.

It repeats the mounts in a second way that does not depend on them: reading and starting programs in the mounted folders,
writing only in those mounted writable, no abstract socket and no signal beyond the sandbox. A read-only call has no TCP
except to the proxy. Others have their own loopback, where tests start servers: Landlock knows ports and no addresses, and
the launcher makes sure that only a loopback exists before it restricts. Bubblewrap cannot start under Landlock, so the
launcher restricts itself.

Follows linux/landlock.h. Rights that an older kernel does not know are left out of the handled ones, and a rule never
carries more than the handled ones.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Literal

from handrail.contract.struct import Struct

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""The system call numbers, which are the same on every architecture."""

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REMOVE_DIR, REMOVE_FILE = 1 << 4, 1 << 5
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
BIND_TCP, CONNECT_TCP = 1 << 0, 1 << 1
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1 << 0, 1 << 1

FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""The rights that a rule for something other than a folder may have. The kernel refuses more."""
READ_RIGHTS = READ_FILE | READ_DIR | EXECUTE
WRITE_RIGHTS = (
    READ_RIGHTS
    | (WRITE_FILE | TRUNCATE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM)
    | REFER
)
"""Everything except making device nodes and talking to devices."""
DEVICE_RIGHTS = READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV

_SYSTEM = ("/usr", "/etc", "/run", "/var")
_OF_USR = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Links into ``/usr`` on current systems, which its rule already covers."""
_PRIVATE = ("/tmp", "/dev/shm")  # noqa: S108 - the sandbox's own


class LandlockRuleset(Struct, frozen=True):
    """The Landlock ruleset that the launcher passes to the kernel.

    :param attributes: ``struct landlock_ruleset_attr``, as long as this kernel's version
    :param folders: path and rights; for a path that is not a folder, the launcher removes the rights of folders
    :param ports: TCP port and rights
    """

    attributes: bytes
    folders: tuple[tuple[str, int], ...]
    ports: tuple[tuple[int, int], ...] = ()


@lru_cache(maxsize=1)
def probe_abi() -> int:
    """Return the Landlock version that this kernel enforces; 0 for none."""
    found = ctypes.CDLL(None, use_errno=True).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(0, int(found))


def compute_ruleset(
    version: int, folders: Mapping[str, Literal["ro", "rw"]], *, tcp: bool = False, connect: Iterable[int] = ()
) -> LandlockRuleset:
    """Return the ruleset for a sandbox with these mounts.

    :param version: of this kernel, at least 1
    :param folders: the folders mounted in addition to the system, with their access
    :param tcp: whether to leave TCP in the sandbox's own network namespace unrestricted
    :param connect: the ports that may be connected to without ``tcp``
    """
    files = get_handled_file_rights(version)
    rights = [
        ("/", READ_DIR),
        *((path, READ_RIGHTS) for path in (*_SYSTEM, *_find_folders_beside_usr())),
        ("/proc", READ_FILE | READ_DIR),
    ]
    rights += [("/dev", DEVICE_RIGHTS), *((path, WRITE_RIGHTS) for path in _PRIVATE)]
    rights += ((path, WRITE_RIGHTS if access == "rw" else READ_RIGHTS) for path, access in folders.items())
    numbers = [files]
    if version >= 4:
        numbers.append(0 if tcp else BIND_TCP | CONNECT_TCP)
    if version >= 6:
        numbers.append(SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS)
    return LandlockRuleset(
        struct.pack(f"={len(numbers)}Q", *numbers),
        tuple((path, wanted & files) for path, wanted in rights),
        tuple((port, CONNECT_TCP) for port in connect) if version >= 4 and not tcp else (),
    )


@lru_cache(maxsize=1)
def _find_folders_beside_usr() -> tuple[str, ...]:
    return tuple(path for path in _OF_USR if os.path.isdir(path) and not os.path.islink(path))  # noqa: PTH112, PTH114


def get_handled_file_rights(version: int) -> int:
    """Return the rights on files that a kernel of this version can restrict."""
    bits = 13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16
    return (1 << bits) - 1
