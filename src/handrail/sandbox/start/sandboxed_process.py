"""A confined process: its input, output, end and terminal. Ending it ends everything that it started.

The first process of the sandbox's pid namespace is the launcher. When its program has ended, even if other processes still
hold its pipes, the launcher ends all others and reports. If the launcher itself is killed, the kernel ends them with it,
before bubblewrap's outer process learns of it. So no process is left once either is reported. The empty namespaces are taken
down later, and no caller waits for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import termios
from collections.abc import Callable
from pathlib import Path

import orjson

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import Process, TerminalSize
from handrail.contract.struct import Struct
from handrail.sandbox.start import launcher_messages
from handrail.sandbox.start.process_pipes import PipedProcess
from handrail.sandbox.start.spawn import ProcessWrapper
from handrail.sandbox.view import mount_comparison
from handrail.sandbox.view.cached_folder_tree import raise_if_resource_shortage
from handrail.sandbox.view.mount_comparison import ExpectedMounts

_READ = 1 << 16
_SHORT_READ = 1 << 13
"""For the launcher, which sends little: a larger buffer would be fresh memory each time."""
_MAX_KEPT_LETTER = 1 << 16
"""A letter up to this size stays open until its program has ended: closing it frees its memory, which takes time."""
_SETUP_S = 5.0
"""How long a kill waits for bubblewrap to end by itself before it has reported its first process."""
DISMANTLING_S = 10.0
"""How long :func:`wait_until_sandboxes_dismantled` waits at most."""

_VANISHED_PATH = re.compile(
    r"bwrap: Can't (?!exec).*(?:Unable to (?:find|remount).*"
    r"|: (?:No such file or directory|Not a directory|Is a directory|File exists|Too many levels of symbolic links))\s*$"
)
"""bubblewrap's messages for a path that has changed since the sandbox was planned."""

_LIFELINES: set[int] = set()
_UNREAPED: set[SandboxedProcess] = set()
"""Sandboxes whose outer process is still to be reaped, although no other process is left."""


def _close_lifelines_after_fork() -> None:
    """Close the lifelines in a forked copy of this process, where they would keep sandboxes alive."""
    for descriptor in _LIFELINES:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _LIFELINES.clear()


os.register_at_fork(after_in_child=_close_lifelines_after_fork)


class HolderDescriptors(Struct, frozen=True):
    """The holder's descriptors of a sandbox, all non-blocking.

    :param stderr: None if it was merged into stdout
    :param status: where bubblewrap writes its ``--json-status-fd`` lines
    :param channel: a socket, like ``lifeline``; see :mod:`handrail.sandbox.start.launcher_messages` for these and ``letter``
    :param secrets: a file in memory for the call's secrets, if it has any
    """

    stdin: int
    stdout: int
    stderr: int | None
    status: int
    channel: int
    letter: int
    lifeline: int
    secrets: int | None = None


class SandboxedProcess(PipedProcess):
    """A process in a bubblewrap sandbox: :class:`handrail.contract.sandbox_protocol.Process`.

    Its program begins with :meth:`begin_program`; until then the sandbox waits. Owns the descriptors of ``ends``.

    :param table: what its mounts must be, compared before its program begins
    """

    def __init__(self, pid: int, ends: HolderDescriptors, table: ExpectedMounts) -> None:
        loop = asyncio.get_running_loop()
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)  # first: if that fails, the caller still owns the ends
        super().__init__(loop, ends.stdin, ends.stdout, ends.stderr)
        # A closed loop no longer reports the end of these, so they would stay zombies until the end of this process.
        for left in [one for one in _UNREAPED if one.loop.is_closed()]:
            left._reap()
        self._inner = -1
        self._inner_pid = 0
        self._status_fd = ends.status
        self._status = b""
        self._channel = ends.channel
        self._answer = b""
        self._table: ExpectedMounts | None = table
        self._letter = ends.letter
        self._begun = False
        self._go_byte = b""
        self._lifeline = ends.lifeline
        _LIFELINES.add(ends.lifeline)
        self._secrets = ends.secrets
        self._killed = False
        self._no_route: NoRouteCounter | None = None
        self.unreachable_count = 0
        """How often a program tried to reach an address outside of its sandbox without a proxy; known after the exit."""
        self._setup_error: ToolError | None = None
        self._limit_error: ToolError | None = None
        self._watched: set[int] = set()
        self._known: asyncio.Future[None] = self._loop.create_future()
        self._ready: asyncio.Future[bool] | None = None
        self._dismantled: asyncio.Future[None] = self._loop.create_future()
        self._watch(self._pidfd, self._handle_outer_exit)
        self._watch(self._status_fd, self._read_bubblewrap_status)
        self._watch(self._lifeline, self._handle_launcher_report)
        self._watch(self._channel, self._read_launcher_messages)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it was started on."""
        return self._loop

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def first_process_pid(self) -> int:
        """The process id of the sandbox's first process on this machine; 0 while it is unknown."""
        return self._inner_pid

    @property
    def has_checked_mounts(self) -> bool:
        """Whether its mounts have been made and compared."""
        return self._table is None

    @property
    def is_waiting(self) -> bool:
        """Whether the sandbox is ready and its program has not begun."""
        return not self._begun and self._pidfd >= 0 and not self._killed and not self._exit_code.done()

    async def wait_until_pid_known(self) -> bool:
        """Wait until :attr:`first_process_pid` is known; return False if the sandbox ended instead."""
        await asyncio.wait({self._known, self._exit_code}, return_when=asyncio.FIRST_COMPLETED)
        return self._inner_pid > 0 and not self._exit_code.done()

    async def wait_until_ready(self) -> bool:
        """Wait until the launcher waits for its call; return False if the sandbox ended instead."""
        if self._exit_code.done():
            return False
        # The channel is watched again, since after the comparison of the mounts there was no reader for it.
        if self._ready is None:
            self._ready = self._loop.create_future()
            self._watch(self._channel, self._read_launcher_messages)
            self._read_launcher_messages()
        await asyncio.wait({self._ready, self._exit_code}, return_when=asyncio.FIRST_COMPLETED)
        return self._ready.done() and self._ready.result() and not self._exit_code.done()

    def begin_program(self, call: bytes, secrets: bytes = b"") -> None:
        """Let the program begin, once the mounts have been compared.

        :param call: the byte for the channel, followed by the letter's second part
        :param secrets: the content of the file for secrets
        """
        if self._begun or self._letter < 0:
            return  # it has already ended and was released: wait() reports that
        self._begun = True
        # The secrets are written only now: a ready sandbox that is never used must not contain any.
        if self._secrets is not None:
            _append_to_shared_file(self._secrets, secrets)
            os.close(self._secrets)
            self._secrets = None
        _append_to_shared_file(self._letter, call[1:])
        # The first byte goes over the channel, after the comparison of the mounts. The rest can be written at once.
        self._go_byte = call[:1]
        if self._table is None:
            self._send_go()
        # A large letter would keep its memory for as long as the program runs.
        if len(call) > _MAX_KEPT_LETTER:
            os.close(self._letter)
            self._letter = -1

    def close_lifeline(self) -> None:
        """Close the lifeline, as the end of this process would."""
        self._cut_lifeline()

    def end_for_reached_limit(self, bound: ToolError) -> None:
        """End the process for a limit that it reached; :meth:`wait` then raises this error."""
        if not self._exit_code.done():
            # The error is set before the signal, so that the end of the process is never reported as a plain exit code.
            self._limit_error = bound
            self._cut_lifeline()
            self._signal_all()

    def add_sandbox_empty_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once no process is left in the sandbox."""
        self._exit_code.add_done_callback(lambda gone: callback())

    async def wait(self) -> int:
        code = await self._wait_for_exit()
        if (error := self._setup_error or self._limit_error) is not None:
            raise error
        return code

    async def _wait_until_no_writer(self) -> None:
        await super()._wait_until_no_writer()
        if self._setup_error is not None:
            raise self._setup_error

    async def wait_until_namespaces_ended(self) -> None:
        """Wait until its namespaces have ended too, after its own end."""
        await asyncio.shield(self._dismantled)

    async def kill(self) -> None:
        if not self._exit_code.done():
            self._killed = True
            self._cut_lifeline()
            if self._inner < 0:
                # Killing bubblewrap's outer process now could leave a child that waits forever: let both continue
                # to the point where the launcher finds its lifeline closed.
                awaited = {self._exit_code} if self._known.done() else {self._known, self._exit_code}
                await asyncio.wait(awaited, timeout=_SETUP_S, return_when=asyncio.FIRST_COMPLETED)
            self._signal_all()
            await self._wait_for_exit()
        self._loop.call_soon(self._close)  # in this turn of the loop, like everything else

    def _watch(self, descriptor: int, callback: Callable[..., object], *arguments: object) -> None:
        self._watched.add(descriptor)
        self._loop.add_reader(descriptor, callback, *arguments)

    def _unwatch(self, descriptor: int) -> None:
        if descriptor in self._watched:  # the loop is slow for a descriptor that it does not watch
            self._watched.discard(descriptor)
            self._loop.remove_reader(descriptor)

    def _read_launcher_messages(self) -> None:
        """Read the launcher's messages while its program has not begun."""
        over = False
        try:
            self._answer += (part := os.read(self._channel, _SHORT_READ))
            over = not part
        except BlockingIOError:
            pass
        except OSError:
            over = True
        if self._table is not None:
            self._compare_mounts(self._table)
        # No caller waits for more: the mounts are compared, and the launcher has answered or no caller asked for its
        # answer.
        if over or (self._table is None and (self._answer or self._ready is None)):
            self._unwatch(self._channel)
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(self._answer.startswith(b"r"))

    def _compare_mounts(self, table: ExpectedMounts) -> None:
        """Compare the mounts with the table once the launcher has described them, then let the program begin."""
        described = launcher_messages.split_mount_report(self._answer)
        if described is None:
            return
        mounts, self._answer = described
        wrong = mount_comparison.find_first_mount_mismatch(table, mounts)
        # The program has not begun yet, so a replaced folder costs one start and nothing else.
        if wrong is not None:
            # The cached mounts of the machine may be the reason for the difference.
            mount_comparison.host_mounts.forget()
            self._read_bubblewrap_status()
            self._setup_error = mount_comparison.make_replaced_mount_error(wrong)
            self._cut_lifeline()
            self._signal_all()
            return
        self._table = None
        if self._begun:
            self._send_go()

    def _send_go(self) -> None:
        self._no_route = NoRouteCounter.open(self._inner_pid)
        with contextlib.suppress(OSError):  # it has ended: wait() reports that
            os.write(self._channel, self._go_byte)

    def _read_bubblewrap_status(self) -> None:
        """Read bubblewrap's status, and open the inner process as soon as it is known."""
        try:
            while part := os.read(self._status_fd, _READ):
                self._status += part
            self._unwatch(self._status_fd)
        except BlockingIOError:
            pass
        # The first process cannot change. Its report comes once, even if the status has further lines.
        if self._known.done():
            return
        child = self._find_status("child-pid")
        if child is not None:
            try:
                # A descriptor keeps meaning this process, while its number can be given to another one after its end.
                self._inner = _open_first_process(child)
            except ToolError as short:  # it cannot be opened: the launcher ends it
                self._setup_error = short
                self._cut_lifeline()
            self._inner_pid = child if self._inner >= 0 else 0
            self._unwatch(self._status_fd)
            self._known.set_result(None)

    def _find_status(self, key: str) -> int | None:
        for line in self._status.splitlines():
            try:
                value = orjson.loads(line).get(key)
            # The last line may be incomplete while bubblewrap still writes it.
            except (orjson.JSONDecodeError, AttributeError):
                continue
            if isinstance(value, int):
                return value
        return None

    def _cut_lifeline(self) -> None:
        """Close the lifeline, which ends the sandbox."""
        if self._lifeline >= 0:
            self._unwatch(self._lifeline)
            _LIFELINES.discard(self._lifeline)
            os.close(self._lifeline)
            self._lifeline = -1

    def _signal_all(self) -> None:
        # The first process of the namespace first: the kernel then ends all others in it.
        for descriptor in (self._inner, self._pidfd):
            if descriptor >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)

    def _handle_launcher_report(self) -> None:
        """Handle the launcher's report that its program or a mount has ended and no other process is left."""
        try:
            report = os.read(self._lifeline, _READ)
        except BlockingIOError:
            return
        except OSError:
            report = b""
        if not report:
            self._unwatch(self._lifeline)
            return
        if not self._known.done():
            self._read_bubblewrap_status()
        _UNREAPED.add(self)
        # Replacing a file over which something is mounted removes the mount, and with it the protection. The launcher
        # then ends the program.
        if mount_point := report[1:]:
            mount_comparison.host_mounts.forget()
            self._limit_error = mount_comparison.make_ended_mount_error(os.fsdecode(mount_point))
        self._finish(report[0])

    def _handle_outer_exit(self) -> None:
        """Handle the end of bubblewrap's outer process; if it was killed, end all other processes."""
        self._unwatch(self._pidfd)
        code = self._reap()
        if self._exit_code.done():
            return
        self._read_bubblewrap_status()
        # An embedding program may reap all children of the process, so bubblewrap's own report is the second source.
        if code is None:
            code = self._find_status("exit-code")
            code = 255 if code is None else code
        self._cut_lifeline()
        self._signal_all()
        # The outer process may end first. The call must not return while a program can still write in the workspace.
        if self._inner < 0 or _has_ended(self._inner):
            self._finish(code)
        else:
            self._watch(self._inner, self._finish, code)

    def _reap(self) -> int | None:
        """Return the outer process's exit code; None if an embedding program has reaped it."""
        _UNREAPED.discard(self)
        try:
            code = os.waitstatus_to_exitcode(os.waitpid(self._pid, os.WNOHANG)[1])
        except ChildProcessError:
            code = None
        os.close(self._pidfd)
        self._pidfd = -1
        if not self._loop.is_closed() and not self._dismantled.done():
            self._dismantled.set_result(None)
        return code

    def _finish(self, code: int) -> None:
        if self._exit_code.done():
            return
        self._drain_channel()
        self._drain()
        if self._no_route is not None:
            self.unreachable_count = self._no_route.count()
        # The order of the signals decides which process ends first, so its exit code says nothing about the program.
        if self._killed:
            code = -signal.SIGKILL
        elif self._setup_error is None and self._limit_error is None:
            self._setup_error = self._explain_setup_failure(code)
        self._resolve_exit(code)

    def _release_after_exit(self) -> None:
        super()._release_after_exit()
        self._cut_lifeline()
        for descriptor in (self._inner, self._status_fd, self._channel, self._letter, self._secrets):
            if descriptor is not None and descriptor >= 0:
                self._unwatch(descriptor)
                os.close(descriptor)
        self._inner = self._status_fd = self._channel = self._letter = -1
        self._secrets = None
        if self._no_route is not None:
            self._no_route.close()
            self._no_route = None

    def _drain_channel(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._answer += (part := os.read(self._channel, _READ))
                if len(part) < _READ:  # no writer is left
                    break

    def _explain_setup_failure(self, code: int) -> ToolError | None:
        """Return why the program did not run; None if it ran."""
        described = launcher_messages.split_mount_report(self._answer)
        message = (self._answer if described is None else described[1]).removeprefix(b"r")
        if message.startswith(b"xL"):
            return ToolError(
                "The arguments are too long for the system. Put the data into a file, or pass it on stdin.",
                kind="limit",
            )
        # The launcher's last sign before the program: whatever the exit code says, it comes from the program itself.
        if message.startswith(b"x"):
            return None
        # Without a report of the launcher, bubblewrap itself failed, and its own message is on the program's stderr.
        text = message.removeprefix(b"E").decode("utf-8", "replace")
        if not text:
            output = self._stdout if self._stderr is None else self._stderr
            text = (
                output.peek_ended_output().decode("utf-8", "replace").strip() or f"exit code {code} without a message"
            )
        # The paths of the plan existed a moment ago, so another start will probably succeed.
        if _VANISHED_PATH.match(text):
            mount_comparison.host_mounts.forget()
            return ToolError(
                f"A file or folder was replaced while the sandbox was prepared: {text[:2000]}. Try again.",
                kind="conflict",
            )
        return ToolError(f"The sandbox could not be set up: {text[:2000]}. Try again.", kind="backend")


class NoRouteCounter:
    """A counter of what the system could not send out of a network namespace, because no route leads anywhere.

    Lookups of names count too, if the machine has a name server elsewhere. The files stay readable after the last process.
    """

    def __init__(self, descriptors: tuple[int, ...]) -> None:
        self._descriptors = descriptors
        self._before = self._read_total()

    @classmethod
    def open(cls, pid: int) -> NoRouteCounter | None:
        """Begin to count in the namespace of a process; None if its files cannot be opened."""
        opened: list[int] = []
        try:
            for name in ("snmp", "snmp6"):
                opened.append(os.open(f"/proc/{pid}/net/{name}", os.O_RDONLY | os.O_CLOEXEC))
            return cls(tuple(opened))
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            return None

    def count(self) -> int:
        """Return how often there was no route since the beginning."""
        with contextlib.suppress(OSError):
            return self._read_total() - self._before
        return 0

    def close(self) -> None:
        """Close the files, which keep the namespace."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()

    def _read_total(self) -> int:
        older, newer = (os.pread(descriptor, _READ, 0).splitlines() for descriptor in self._descriptors)
        try:
            names, values = (line.split() for line in older if line.startswith(b"Ip: "))
            found = [value for name, value in zip(names, values, strict=True) if name == b"OutNoRoutes"]
            found += [line.split()[1] for line in newer if line.startswith(b"Ip6OutNoRoutes")]
            return sum(map(int, found))
        except (ValueError, IndexError):  # not every kernel writes these files in this form
            return 0


async def wait_until_sandboxes_dismantled() -> None:
    """Wait until all ended sandboxes of this event loop have no namespaces left, up to a limit."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISMANTLING_S):
            await asyncio.gather(*(one.wait_until_namespaces_ended() for one in list(_UNREAPED) if one.loop is loop))
    await asyncio.sleep(0)  # processes that have just ended are released in this turn


def _append_to_shared_file(descriptor: int, data: bytes) -> None:
    """Append data to a file without moving the position at which the other side reads."""
    # Both sides share one file position. A plain write would move it, and the launcher would read from behind the data.
    place, rest = os.fstat(descriptor).st_size, memoryview(data)
    while rest:
        count = os.pwrite(descriptor, rest, place)
        place, rest = place + count, rest[count:]


def _open_first_process(pid: int) -> int:
    """Open a descriptor of the sandbox's first process; -1 if it has ended.

    Its number may belong to another process by then.

    :raises ToolError: ``unavailable`` if the system is short of a resource
    """
    path, descriptor, numbers = f"/proc/{pid}/status", -1, []
    try:
        descriptor = os.pidfd_open(pid)
        with Path(path).open("rb") as file:
            numbers = next((line for line in file if line.startswith(b"NSpid:")), b"").split()
    except OSError as error:
        raise_if_resource_shortage(error, path)
    finally:
        # Another process may have taken its number on this machine. Only the first process is number 1 in its namespace.
        first = len(numbers) > 2 and numbers[-1] == b"1"
        if descriptor >= 0 and not first:
            os.close(descriptor)
    return descriptor if first else -1


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


# A pseudo-terminal as a sandbox's stdin, stdout and stderr (pty(7)): the program has one end, the holder the
# other.
#
# A program cannot reach the terminal that the holder itself was started from, and the seccomp filter keeps it from
# typing into its own (TIOCSTI). The launcher makes this one the program's controlling terminal.

_LFLAG_INDEX = 3
_OFLAG_INDEX = 1
"""The positions in the list of termios."""
_TIOCGSID = 0x5429
"""Asks for the leader of the terminal's session."""
_TIOCGPTPEER = 0x5441
"""Opens the program's end (ioctl_tty(2)), which alone shows the unread input of the program."""


def open_terminal_pair(size: TerminalSize) -> tuple[int, int]:
    """Open a terminal and return the holder's end and the program's end.

    Lines end as in a file: no carriage return comes before a newline.

    :raises ToolError: ``unavailable`` if the machine has no more terminals, or none at all
    """
    try:
        ours, theirs = os.openpty()
    except OSError as error:
        raise ToolError(
            f"No terminal could be opened: {error.strerror or error}. Run the command without a terminal.",
            kind="unavailable",
        ) from None
    try:
        settings = termios.tcgetattr(theirs)
        # A model reads the output as text, where a carriage return before each newline is noise.
        settings[_OFLAG_INDEX] &= ~termios.ONLCR
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        _resize(ours, size)
    except BaseException:
        os.close(ours)
        os.close(theirs)
        raise
    return ours, theirs


def _resize(descriptor: int, size: TerminalSize) -> None:
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", size.rows, size.columns, 0, 0))


def _read_ioctl_int(descriptor: int, request: int) -> int:
    return struct.unpack("i", fcntl.ioctl(descriptor, request, bytes(4)))[0]


class SandboxTerminal(ProcessWrapper):
    """A sandboxed process with a terminal: :class:`handrail.contract.sandbox_protocol.TerminalProcess`."""

    def __init__(self, process: SandboxedProcess) -> None:
        super().__init__(process)
        self._confined = process
        self._descriptor = os.dup(process.stdin_descriptor)
        process.add_sandbox_empty_callback(self._close)

    def replace_wrapped_process(self, process: Process) -> SandboxTerminal:
        """Use another wrapper around its process, and return this terminal."""
        self._process = process
        return self

    def resize(self, size: TerminalSize) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                _resize(self._descriptor, size)

    def is_line_buffered(self) -> bool:
        if self._descriptor < 0:
            return False
        try:
            return bool(termios.tcgetattr(self._descriptor)[_LFLAG_INDEX] & termios.ICANON)
        except termios.error:
            return False

    def is_at_prompt(self) -> bool:
        if self._descriptor < 0 or self.is_line_buffered():
            return False
        try:
            # The shell is at its prompt only if it is in the foreground itself, and no program that it started.
            if os.tcgetpgrp(self._descriptor) != _read_ioctl_int(self._descriptor, _TIOCGSID):
                return False
            theirs = fcntl.ioctl(self._descriptor, _TIOCGPTPEER, os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                return _read_ioctl_int(theirs, termios.FIONREAD) == 0
            finally:
                os.close(theirs)
        except OSError:
            return False

    def current_folders(self) -> tuple[str, ...]:
        if self._descriptor < 0:
            return ()
        found: list[str] = []
        with contextlib.suppress(OSError):
            for process in (_read_ioctl_int(self._descriptor, _TIOCGSID), os.tcgetpgrp(self._descriptor)):
                with contextlib.suppress(OSError):
                    found.append(str(Path(f"/proc/{process}/cwd").readlink()))
        return tuple(dict.fromkeys(found))

    def discard_pending_input(self) -> int:
        return self._confined.discard_pending_input()

    def read_rest(self, max_bytes: int) -> bytes:
        return self._confined.read_rest(max_bytes)

    def hang_up(self) -> None:
        self._close()
        self._confined.close_all_pipes()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
