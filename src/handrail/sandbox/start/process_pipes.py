"""The holder's ends of a process's stdin, stdout and stderr, on the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from handrail.contract.errors import ToolError

PEEK_BYTES = 1 << 16
"""How much of an output that nobody collects is kept, in bytes."""
_READ = 1 << 16
_READS_PER_TURN = 16
_TURN_S = 0.002
"""The time after which no more pieces are read in one turn of the loop."""


class InputPipe:
    """The writing end of stdin. Data that the other side no longer reads is dropped silently."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop, self._fd = loop, descriptor
        self._rest = memoryview(b"")
        self._watched = False
        self._then_close = False
        self._done: asyncio.Future[None] | None = None

    @property
    def descriptor(self) -> int:
        return self._fd

    async def write(self, data: bytes) -> None:
        # One piece at a time: a second writer would overwrite the rest of the first.
        if self._done is not None:
            # Shielded, since several writers may wait for one future, and a cancelled one must not fail the others.
            await asyncio.shield(self._done)
        if self._fd < 0:
            return
        self._rest = memoryview(data)
        self._push()
        if self._rest and self._fd >= 0:
            self._done = self._loop.create_future()
            self._watch()
            await asyncio.shield(self._done)

    def write_all_and_close(self, data: bytes) -> None:
        """Write all of ``data`` as the other side reads it, then close."""
        self._then_close = True
        self._rest = memoryview(data)
        self._push()
        if self._rest and self._fd >= 0:
            self._watch()

    def _push(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            return
        except OSError:  # the reader has closed it
            # Closing follows the last byte, not this call: the program must get its whole input before the end of file.
            self._then_close = True
            self._rest = memoryview(b"")
        if self._then_close:
            self.close()
            return
        self._unwatch()
        self._resolve_write()

    def _watch(self) -> None:
        self._watched = True
        self._loop.add_writer(self._fd, self._push)

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_writer(self._fd)

    def _resolve_write(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
        self._done = None

    def close(self) -> None:
        if self._fd >= 0:
            self._unwatch()
            os.close(self._fd)
            self._fd = -1
        self._rest = memoryview(b"")
        self._resolve_write()

    def stop_writing(self) -> int:
        """Stop writing, and return how many bytes were not read."""
        left = len(self._rest)
        self._rest = memoryview(b"")
        self._unwatch()
        self._resolve_write()
        return left


class OutputPipe:
    """The reading end of stdout or stderr: collected up to a limit, or read with back-pressure."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop, self._fd = loop, descriptor
        self._buffer = bytearray()
        self._searched = 0
        self._cap: int | None = None
        self._on_output: Callable[[bytes], None] | None = None
        self._dropped = 0
        self._drained = False
        self._more: asyncio.Future[None] | None = None

    def start_collecting_output(self, cap: int, on_output: Callable[[bytes], None] | None = None) -> None:
        """Keep the first ``cap`` bytes from now on, and count the rest. ``on_output`` gets all pieces."""
        if self._cap is None and self._fd >= 0:
            self._loop.add_reader(self._fd, self._read_pieces, _READS_PER_TURN)
        self._cap = cap
        self._on_output = on_output

    async def read_line(self, max_bytes: int) -> bytes:
        while True:
            end = self._buffer.find(b"\n", self._searched)
            # The limit also holds for a line without an end, or one program could fill the memory of the kernel.
            if end >= max_bytes or (end < 0 and len(self._buffer) >= max_bytes):
                raise ToolError(
                    f"A line of output is longer than {max_bytes} bytes. Shorter lines were expected. Redirect the output to a file, or make the program print shorter lines.",
                    kind="limit",
                )
            if end >= 0 or self._fd < 0:
                line = bytes(self._buffer[: end + 1]) if end >= 0 else bytes(self._buffer)
                del self._buffer[: len(line)]
                self._searched = 0
                return line
            # The next search begins behind the known part, or a long line would be searched again for each piece.
            self._searched = len(self._buffer)
            await self._wait_readable()

    async def read_some(self, max_bytes: int) -> bytes:
        if not self._buffer and self._fd >= 0:
            await self._wait_readable()
        piece = bytes(self._buffer[:max_bytes])
        del self._buffer[:max_bytes]
        self._searched = 0
        return piece

    async def _wait_readable(self) -> None:
        """Wait for one more piece. The descriptor is watched only meanwhile, so an unread program blocks."""
        self._more = self._loop.create_future()
        self._loop.add_reader(self._fd, self._read_pieces, 1)
        try:
            await self._more
        finally:
            self._more = None
            if self._fd >= 0 and self._cap is None:
                self._loop.remove_reader(self._fd)

    def _read_pieces(self, times: int) -> bool:
        """Read at most ``times`` pieces; return whether more may follow.

        The limits keep one process from blocking the loop.
        """
        if self._drained:
            self.close()
            return False
        more, until = True, self._loop.time() + _TURN_S
        for _ in range(times):
            try:
                part = os.read(self._fd, _READ)
            except BlockingIOError:
                more = False
                break
            except OSError:  # of a terminal whose other end is closed
                part = b""
            if not part:
                self.close()
                more = False
                break
            # The pipe is read to its end even beyond the cap. A program that blocks on a full pipe would never end.
            kept = part if self._cap is None else part[: max(0, self._cap - len(self._buffer))]
            self._buffer += kept
            self._dropped += len(part) - len(kept)
            if self._on_output is not None:
                self._on_output(part)
                # A consumer that is slow must not keep the loop from other programs.
                if self._loop.time() > until:
                    break
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
        return more

    def read_rest_after_end(self) -> None:
        """Read the rest of the pipe after all writers have ended. :meth:`close_if_fully_read` closes it."""
        if self._fd >= 0 and self._cap is not None and not self._drained:
            # No writer is left, so this ends after what the kernel's buffer of the pipe contains.
            while self._read_pieces(_READS_PER_TURN):
                pass
            self._drained = True

    def close_if_fully_read(self) -> None:
        """Close the pipe if :meth:`read_rest_after_end` has read everything."""
        if self._drained:
            self.close()

    def peek_ended_output(self) -> bytes:
        """Return the output of an ended process without consuming it."""
        if self._fd >= 0:
            self.start_collecting_output(PEEK_BYTES)
            self.read_rest_after_end()
            self.close_if_fully_read()
        return bytes(self._buffer)

    def take_unread_output(self, max_bytes: int) -> bytes:
        """Return the unread output after all writers have ended."""
        if self._fd >= 0:
            self._cap = max_bytes
            self.read_rest_after_end()
            self.close_if_fully_read()
        return bytes(self._buffer[:max_bytes])

    def get_collected(self) -> tuple[bytes, int]:
        return bytes(self._buffer), self._dropped

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


class PipedProcess:
    """A process with three pipes: the stream methods of :class:`handrail.contract.sandbox_protocol.Process`.

    A subclass calls :meth:`_resolve_exit` once no writer is left. Owns the descriptors.

    :param stderr: None if it was merged into stdout
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, stdin: int, stdout: int, stderr: int | None) -> None:
        self._loop = loop
        self._exit_code: asyncio.Future[int] = loop.create_future()
        self._waiters: list[asyncio.Future[None]] = []
        self._input = InputPipe(loop, stdin)
        self._stdout = OutputPipe(loop, stdout)
        self._stderr = None if stderr is None else OutputPipe(loop, stderr)

    async def write(self, data: bytes) -> None:
        await self._input.write(data)

    async def close_stdin(self) -> None:
        self._input.close()

    async def read_line(self, max_bytes: int) -> bytes:
        if self._stderr is not None:
            self._stderr.start_collecting_output(PEEK_BYTES)  # the process must not block on a full, unread pipe
        return await self._stdout.read_line(max_bytes)

    async def read(self, max_bytes: int) -> bytes:
        if self._stderr is not None:
            self._stderr.start_collecting_output(PEEK_BYTES)
        return await self._stdout.read_some(max_bytes)

    async def communicate(
        self, stdin: bytes, max_bytes: int, on_output: Callable[[bytes], None] | None = None
    ) -> tuple[bytes, bytes, int]:
        self._stdout.start_collecting_output(max_bytes, on_output)
        if self._stderr is not None:
            self._stderr.start_collecting_output(max_bytes)
        self._input.write_all_and_close(stdin)
        try:
            await self._wait_until_no_writer()
        finally:
            if self._exit_code.done():
                self._drain()  # it may have ended before the collecting began
                self._loop.call_soon(self._close)  # after the waiting callers
        return self.get_collected()

    def get_collected(self) -> tuple[bytes, bytes, int]:
        """Return the stdout, stderr and number of dropped bytes so far, also after a cancellation."""
        out, dropped = self._stdout.get_collected()
        if self._stderr is None:
            return out, b"", dropped
        errors, more = self._stderr.get_collected()
        return out, errors, dropped + more

    @property
    def stdin_descriptor(self) -> int:
        """The descriptor of its stdin."""
        return self._input.descriptor

    def discard_pending_input(self) -> int:
        """Stop writing, and return how many bytes of the last piece were not read."""
        return self._input.stop_writing()

    def read_rest(self, max_bytes: int) -> bytes:
        """Return the unread output once the process has ended."""
        return self._stdout.take_unread_output(max_bytes)

    def close_all_pipes(self) -> None:
        """Close all pipes."""
        self._close()

    async def _wait_until_no_writer(self) -> None:
        """Wait until no writer is left.

        :raises ToolError: if the program never ran
        """
        await self._wait_for_exit()

    async def _wait_for_exit(self) -> int:
        """Wait for the exit code. A cancelled caller does not end the process.

        A shield would do the same, but take another turn of the loop, which is a good part of a short program's time.
        """
        if not self._exit_code.done():
            waiting = self._loop.create_future()
            self._waiters.append(waiting)
            try:
                await waiting
            finally:
                if waiting in self._waiters:
                    self._waiters.remove(waiting)
        return self._exit_code.result()

    def _resolve_exit(self, code: int) -> None:
        if self._exit_code.done():
            return
        waiting, self._waiters = self._waiters, []
        for one in waiting:  # before the callbacks
            if not one.done():
                one.set_result(None)
        self._exit_code.set_result(code)
        self._loop.call_soon(self._release_after_exit)

    def _release_after_exit(self) -> None:
        """Release what is no longer needed, after waiting callers got their answer."""
        self._input.close()
        self._stdout.close_if_fully_read()
        if self._stderr is not None:
            self._stderr.close_if_fully_read()

    def _drain(self) -> None:
        self._stdout.read_rest_after_end()
        if self._stderr is not None:
            self._stderr.read_rest_after_end()

    def _close(self) -> None:
        self._input.close()
        self._stdout.close()
        if self._stderr is not None:
            self._stderr.close()
