"""A process that is another one with something around it: what is not overridden is the other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from handrail.contract.sandbox import Process, TerminalProcess, TerminalSize


class Delegating:
    """Implements :class:`handrail.contract.sandbox.Process` on another one, and
    :class:`handrail.contract.sandbox.TerminalProcess` on one that has a terminal."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

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

    def reads_lines(self) -> bool:
        return self._with_terminal.reads_lines()

    def at_prompt(self) -> bool:
        return self._with_terminal.at_prompt()

    def folders(self) -> tuple[str, ...]:
        return self._with_terminal.folders()

    def give_up(self) -> int:
        return self._with_terminal.give_up()

    def rest(self, max_bytes: int) -> bytes:
        return self._with_terminal.rest(max_bytes)

    def hang_up(self) -> None:
        self._with_terminal.hang_up()

    @property
    def _with_terminal(self) -> TerminalProcess:
        return cast("TerminalProcess", self._process)
