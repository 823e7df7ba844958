"""Terminals of a session: programs that are typed to, by tools that ask for them with the capability ``terminals``."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from handrail.contract.sandbox import Completed

KEYS: Mapping[str, str] = MappingProxyType(
    {
        "enter": "\r",
        "tab": "\t",
        "space": " ",
        "escape": "\x1b",
        "backspace": "\x7f",
        "up": "\x1b[A",
        "down": "\x1b[B",
        "right": "\x1b[C",
        "left": "\x1b[D",
        "home": "\x1b[H",
        "end": "\x1b[F",
        "insert": "\x1b[2~",
        "delete": "\x1b[3~",
        "page-up": "\x1b[5~",
        "page-down": "\x1b[6~",
        "ctrl-backslash": "\x1c",
        **{f"ctrl-{letter}": chr(ord(letter) - 96) for letter in string.ascii_lowercase},
    }
)
"""What each key sends, as terminals of the VT100 family do."""
MOST_KEYS = 64
START = "terminal.start"
"""The tool that opens one."""
DEFAULT_COMMAND = "bash --noprofile --norc"
"""What a terminal runs where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Typed:
    """What became of what was typed.

    :param sent: bytes that its program's terminal has taken
    :param left: those that it has not, within the time there was; they are not typed any more
    """

    sent: int
    left: int = 0


class Terminals(Protocol):
    """The terminals of one session, each by the id of its job. One that has ended, or is not there, is a
    :class:`~handrail.contract.errors.ToolError`."""

    async def run(self, command: str, *, cwd: str | None = None, columns: int, rows: int) -> Completed:
        """Run a shell text in a new terminal, which is this call's job, until it ends. What it shows is the job's output.

        :raises ToolError: as :meth:`handrail.contract.doors.runtime.Shell.run`; ``limit`` where the session has too many
        """
        ...

    async def type(self, terminal_id: str, text: str, keys: tuple[str, ...]) -> Typed:
        """Type ``text``, and then press ``keys``.

        :raises ToolError: ``invalid_input`` for a line that the terminal would cut; ``conflict`` where it is not what this
            call was judged for
        """
        ...

    async def resize(self, terminal_id: str, columns: int, rows: int) -> None: ...

    def is_open(self, terminal_id: str) -> bool: ...

    def was_open(self, terminal_id: str) -> bool:
        """Whether it is, or has been."""
        ...

    @property
    def changes(self) -> int:
        """How often a terminal of the session was opened, has shown something, or has ended."""
        ...

    async def changed(self, since: int, timeout_s: float) -> bool:
        """Wait until there was a change after the first ``since``. False: there was none in time."""
        ...

    def read_up_to(self, terminal_id: str, cursor: int | None = None) -> int:
        """Where in its output the last look has ended; ``cursor``: that it ends there now."""
        ...
