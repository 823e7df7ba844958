"""A pseudo-terminal as a sandbox's stdin, stdout and stderr (pty(7)): the program has one end, the holder the other.

The holder's end is the only other one: a program cannot get at the terminal that the holder itself was started from, and
the seccomp filter keeps it from typing into its own (TIOCSTI). The launcher makes it the program's controlling terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
from pathlib import Path

from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Process, TerminalSize
from handrail.sandbox.start.delegating import Delegating
from handrail.sandbox.start.process import Confined

_LOCAL = 3
_OUTPUT = 1
"""Where termios has them in a list."""
_TIOCGSID = 0x5429
"""Asks for the leader of the terminal's session."""
_TIOCGPTPEER = 0x5441
"""Opens the program's end (ioctl_tty(2)), of which only its own unread input can be asked."""


def opened(size: TerminalSize) -> tuple[int, int]:
    """Both ends: the holder's and the program's. Lines end as in a file: nothing puts a carriage return before a newline.

    :raises ToolError: ``unavailable`` where the machine has no more terminals, or none at all
    """
    try:
        ours, theirs = os.openpty()
    except OSError as error:
        raise ToolError(f"this machine gives no terminal: {error.strerror or error}", kind="unavailable") from None
    try:
        settings = termios.tcgetattr(theirs)
        settings[_OUTPUT] &= ~termios.ONLCR
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        _resize(ours, size)
    except BaseException:
        os.close(ours)
        os.close(theirs)
        raise
    return ours, theirs


def _resize(descriptor: int, size: TerminalSize) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))


def _number(descriptor: int, request: int) -> int:
    return struct.unpack("i", fcntl.ioctl(descriptor, request, bytes(4)))[0]


class Terminal(Delegating):
    """Implements :class:`handrail.contract.sandbox.TerminalProcess` on a process that was just started with one."""

    def __init__(self, process: Confined) -> None:
        super().__init__(process)
        self._confined = process
        self._descriptor = os.dup(process.typed_into)
        process.when_gone(self._close)

    def around(self, process: Process) -> Terminal:
        """The same, where there is something else around its process."""
        self._process = process
        return self

    def resize(self, size: TerminalSize) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                _resize(self._descriptor, size)

    def reads_lines(self) -> bool:
        if self._descriptor < 0:
            return False
        try:
            return bool(termios.tcgetattr(self._descriptor)[_LOCAL] & termios.ICANON)
        except termios.error:
            return False

    def at_prompt(self) -> bool:
        if self._descriptor < 0 or self.reads_lines():
            return False
        try:
            if os.tcgetpgrp(self._descriptor) != _number(self._descriptor, _TIOCGSID):
                return False
            theirs = fcntl.ioctl(self._descriptor, _TIOCGPTPEER, os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                return _number(theirs, termios.FIONREAD) == 0
            finally:
                os.close(theirs)
        except OSError:
            return False

    def folders(self) -> tuple[str, ...]:
        if self._descriptor < 0:
            return ()
        found: list[str] = []
        with contextlib.suppress(OSError):
            for process in (_number(self._descriptor, _TIOCGSID), os.tcgetpgrp(self._descriptor)):
                with contextlib.suppress(OSError):
                    found.append(str(Path(f"/proc/{process}/cwd").readlink()))
        return tuple(dict.fromkeys(found))

    def give_up(self) -> int:
        return self._confined.give_up()

    def rest(self, max_bytes: int) -> bytes:
        return self._confined.rest(max_bytes)

    def hang_up(self) -> None:
        self._close()
        self._confined.let_go_of_pipes()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
