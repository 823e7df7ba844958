"""A confined process: fed, read, waited for, and ended with everything it started.

bubblewrap's outer process ends when the program ends, not when the last holder of a pipe does; the first
process of the sandbox's pid namespace is then killed, and the kernel kills all others in it before that one is
gone. Waiting for *that* is what lets :meth:`Confined.kill` say that nobody is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
from collections.abc import Callable
from pathlib import Path

import orjson

from handrail.contract.errors import ToolError

_READ = 1 << 16
_READS_A_TURN = 16
_SETUP_S = 5.0
"""How long a kill waits for bubblewrap to say whom it started, before it is killed as it is."""
_STDERR_KEPT = 1 << 16
_NOT_STARTED = re.compile(rb"bwrap: execvp (.*): (No such file or directory|Permission denied|Exec format error)\s*\Z")


class Confined:
    """Implements :class:`handrail.contract.sandbox.Process` on a started bubblewrap.

    Owns the descriptors it is given, all non-blocking.

    :param status: where bubblewrap writes its ``--json-status-fd`` lines
    :param stderr: None where it was merged into stdout
    """

    def __init__(self, pid: int, stdin: int, stdout: int, stderr: int | None, status: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._inner = -1
        self._status_fd = status
        self._status = b""
        self._killed = False
        self._setup_error: ToolError | None = None
        self._known: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[int] = self._loop.create_future()
        self._input = _Input(self._loop, stdin)
        self._stdout = _Output(self._loop, stdout)
        self._stderr = None if stderr is None else _Output(self._loop, stderr)
        self._loop.add_reader(self._pidfd, self._exited)
        self._loop.add_reader(self._status_fd, self._read_status)

    @property
    def pid(self) -> int:
        return self._pid

    async def write(self, data: bytes) -> None:
        await self._input.write(data)

    async def close_stdin(self) -> None:
        self._input.close()

    async def read_line(self, max_bytes: int) -> bytes:
        if self._stderr is not None:
            self._stderr.collect(_STDERR_KEPT)  # it must not block on a full pipe that nobody reads
        return await self._stdout.line(max_bytes)

    async def read(self, max_bytes: int) -> bytes:
        if self._stderr is not None:
            self._stderr.collect(_STDERR_KEPT)
        return await self._stdout.some(max_bytes)

    async def communicate(
        self, stdin: bytes, max_bytes: int, on_output: Callable[[bytes], None] | None = None
    ) -> tuple[bytes, bytes, int]:
        self._stdout.collect(max_bytes, on_output)
        if self._stderr is not None:
            self._stderr.collect(max_bytes)
        self._input.feed(stdin)
        try:
            await self.wait()
        finally:
            if self._gone.done():
                self._close()
        return self.collected()

    def collected(self) -> tuple[bytes, bytes, int]:
        """What :meth:`communicate` has so far: stdout, stderr, bytes dropped. Also after it was cancelled."""
        out, dropped = self._stdout.taken()
        if self._stderr is None:
            return out, b"", dropped
        errors, more = self._stderr.taken()
        return out, errors, dropped + more

    async def wait(self) -> int:
        code = await asyncio.shield(self._gone)
        if self._setup_error is not None:
            raise self._setup_error
        return code

    async def kill(self) -> None:
        if not self._gone.done():
            self._killed = True
            # Killed before it has said whom it started, bubblewrap could leave a child that waits for it for ever.
            await asyncio.wait({self._known, self._gone}, timeout=_SETUP_S, return_when=asyncio.FIRST_COMPLETED)
            self._signal_all()
            await asyncio.shield(self._gone)
        self._close()

    def _read_status(self) -> None:
        """Take what bubblewrap has said, and hold on to the inner process as soon as it is known."""
        try:
            while part := os.read(self._status_fd, _READ):
                self._status += part
            self._loop.remove_reader(self._status_fd)
        except BlockingIOError:
            pass
        if self._known.done():
            return
        child = self._said("child-pid")
        if child is not None:
            self._inner = _first_of_namespace(child)
            self._known.set_result(None)

    def _said(self, key: str) -> int | None:
        for line in self._status.splitlines():
            try:
                value = orjson.loads(line).get(key)
            except (orjson.JSONDecodeError, AttributeError):
                continue
            if isinstance(value, int):
                return value
        return None

    def _signal_all(self) -> None:
        for descriptor in (self._inner, self._pidfd):
            if descriptor >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def _exited(self) -> None:
        """bubblewrap's outer process has ended, so the program has; now end what it left behind."""
        self._loop.remove_reader(self._pidfd)
        try:
            _, status = os.waitpid(self._pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # an embedding program reaps all children itself
            code = 255
        os.close(self._pidfd)
        self._pidfd = -1
        self._read_status()
        self._signal_all()
        if self._inner < 0 or _has_ended(self._inner):
            self._all_gone(code)
        else:
            self._loop.add_reader(self._inner, self._all_gone, code)

    def _all_gone(self, code: int) -> None:
        if self._inner >= 0:
            self._loop.remove_reader(self._inner)
            os.close(self._inner)
            self._inner = -1
        self._loop.remove_reader(self._status_fd)
        os.close(self._status_fd)
        self._input.close()
        self._stdout.drain()
        if self._stderr is not None:
            self._stderr.drain()
        if self._killed:
            code = -signal.SIGKILL
        elif self._said("exit-code") is None and code >= 0:
            code = self._not_started(code)
        if not self._gone.done():
            self._gone.set_result(code)

    def _not_started(self, code: int) -> int:
        """The program never ran: as a shell says it where it is missing, else the sandbox's own failure."""
        output = self._stdout if self._stderr is None else self._stderr
        said = output.peek()
        missing = _NOT_STARTED.search(said)
        if missing:
            why = {b"N": b"command not found", b"P": b"permission denied", b"E": b"not a program"}[missing[2][:1]]
            output.put_instead(missing[1] + b": " + why + b"\n")
            return 127 if missing[2].startswith(b"N") else 126
        text = said.decode("utf-8", "replace").strip() or f"bubblewrap ended with {code} and said nothing"
        self._setup_error = ToolError(f"the sandbox could not be set up: {text[:2000]}", kind="backend")
        return code

    def _close(self) -> None:
        self._input.close()
        self._stdout.close()
        if self._stderr is not None:
            self._stderr.close()


class _Input:
    """The writing end of stdin. What the other side no longer reads is dropped quietly."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop, self._fd = loop, descriptor
        self._rest = memoryview(b"")
        self._then_close = False
        self._done: asyncio.Future[None] | None = None

    async def write(self, data: bytes) -> None:
        if self._done is not None:
            await asyncio.shield(self._done)
        if self._fd < 0:
            return
        self._rest = memoryview(data)
        self._push()
        if self._rest and self._fd >= 0:
            self._done = self._loop.create_future()
            self._loop.add_writer(self._fd, self._push)
            await asyncio.shield(self._done)

    def feed(self, data: bytes) -> None:
        """Write all of ``data`` as it is taken, then close."""
        self._then_close = True
        self._rest = memoryview(data)
        self._push()
        if self._rest and self._fd >= 0:
            self._loop.add_writer(self._fd, self._push)

    def _push(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            return
        except OSError:  # the reader is gone
            self._then_close = True
            self._rest = memoryview(b"")
        if self._then_close:
            self.close()
            return
        self._loop.remove_writer(self._fd)
        self._finished()

    def _finished(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
        self._done = None

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._rest = memoryview(b"")
        self._finished()


class _Output:
    """The reading end of stdout or stderr: collected up to a cap, or taken line by line with back-pressure."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self._loop, self._fd = loop, descriptor
        self._buffer = bytearray()
        self._searched = 0
        self._cap: int | None = None
        self._on_output: Callable[[bytes], None] | None = None
        self._dropped = 0
        self._more: asyncio.Future[None] | None = None

    def collect(self, cap: int, on_output: Callable[[bytes], None] | None = None) -> None:
        """From now on keep the first ``cap`` bytes and count the rest."""
        if self._cap is None and self._fd >= 0:
            self._loop.add_reader(self._fd, self._read_some, _READS_A_TURN)
        self._cap = cap
        self._on_output = on_output

    async def line(self, max_bytes: int) -> bytes:
        while True:
            end = self._buffer.find(b"\n", self._searched)
            if end >= max_bytes or (end < 0 and len(self._buffer) >= max_bytes):
                raise ToolError(f"a line of output is longer than {max_bytes} bytes", kind="limit")
            if end >= 0 or self._fd < 0:
                line = bytes(self._buffer[: end + 1]) if end >= 0 else bytes(self._buffer)
                del self._buffer[: len(line)]
                self._searched = 0
                return line
            self._searched = len(self._buffer)
            await self._next()

    async def some(self, max_bytes: int) -> bytes:
        if not self._buffer and self._fd >= 0:
            await self._next()
        piece = bytes(self._buffer[:max_bytes])
        del self._buffer[:max_bytes]
        self._searched = 0
        return piece

    async def _next(self) -> None:
        """Wait for one more piece. The descriptor is watched only meanwhile: who is not read from is held up."""
        self._more = self._loop.create_future()
        self._loop.add_reader(self._fd, self._read_some, 1)
        try:
            await self._more
        finally:
            self._more = None
            if self._fd >= 0 and self._cap is None:
                self._loop.remove_reader(self._fd)

    def _read_some(self, times: int) -> bool:
        """Read what is there, at most ``times`` pieces so that one process cannot hold the loop. False: no more now."""
        more = True
        for _ in range(times):
            try:
                part = os.read(self._fd, _READ)
            except BlockingIOError:
                more = False
                break
            if not part:
                self.close()
                more = False
                break
            kept = part if self._cap is None else part[: max(0, self._cap - len(self._buffer))]
            self._buffer += kept
            self._dropped += len(part) - len(kept)
            if kept and self._on_output is not None:
                self._on_output(kept)
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
        return more

    def drain(self) -> None:
        """All writers have ended: take what the pipe still holds."""
        if self._fd >= 0 and self._cap is not None:
            while self._read_some(_READS_A_TURN):
                pass
            self.close()

    def peek(self) -> bytes:
        """What was said by a process that has ended, whoever was to read it."""
        if self._fd >= 0:
            self.collect(_STDERR_KEPT)
            self.drain()
        return bytes(self._buffer)

    def put_instead(self, data: bytes) -> None:
        self._buffer[:] = data

    def taken(self) -> tuple[bytes, int]:
        return bytes(self._buffer), self._dropped

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


def _first_of_namespace(pid: int) -> int:
    """A descriptor of the sandbox's first process; -1 if it has ended (and its number perhaps been given away)."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return -1
    try:
        with Path(f"/proc/{pid}/status").open("rb") as file:
            numbers = next((line for line in file if line.startswith(b"NSpid:")), b"").split()
    except OSError:
        numbers = []
    if len(numbers) > 2 and numbers[-1] == b"1":
        return descriptor
    os.close(descriptor)
    return -1


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
