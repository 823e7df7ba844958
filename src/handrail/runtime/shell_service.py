"""The shell service of the runtime: one program or script in the sandbox of its call. Terminals of a session.

Nothing that a program starts outlives its call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from handrail.contract.errors import ToolError, decode_text
from handrail.contract.sandbox_protocol import (
    SHELL_ARGV,
    CompletedProcess,
    ConnectionAttempt,
    Process,
    ProgramSpec,
    Sandbox,
    SandboxProfile,
    TerminalProcess,
    TerminalSize,
)
from handrail.contract.services.job_and_tool_services import KEYS, TypedInputResult
from handrail.contract.struct import Struct, field
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.requires import AccessCheck, CapabilitySet
from handrail.origins.program_lookup import ProgramRefused, find_enclosing_folder, find_program
from handrail.runtime.files.session_roots import SessionRoots, find_lost_root_error, is_beneath
from handrail.runtime.guard.guarded_sandbox import GuardedProcess, ProtectedPathViolation
from handrail.runtime.guard.refusal_notes import ProgramTermination, explain_sandbox_denials
from handrail.sandbox.filters.resource_limits import infer_reached_limit
from handrail.sandbox.view import toolchains

_FEW_PATHS = 200
"""Up to this number of paths are checked on the event loop, each in about 25 µs."""
MAX_OUTPUT_BYTES = 64 * 1024 * 1024
"""The maximum output kept of one run. The rest is read and counted, so the program does not block."""

TAIL_BYTES = 512 * 1024
"""The maximum size of the end that is kept of a longer output."""

_MOST_ATTEMPTS = 20
_SH = ("/bin/sh", "-c")
_REDIRECTING = frozenset("<>")
_VARIABLE = compile_regex_lazily(r"[A-Za-z_][A-Za-z0-9_]*")
_FIXED_VARIABLES = frozenset(("PATH", "HOME", "TMPDIR", "SHELL", "IFS", "ENV", "NODE_USE_ENV_PROXY"))
_FIXED_PREFIXES = ("LD_", "BASH", "HANDRAIL", "DYLD_")


class SandboxedShell:
    """A shell service that implements :class:`handrail.contract.services.tool_runtime.ShellService` on a sandbox.

    :param profile: the session's folders; each run has its own working directory in them
    :param may: evaluates ``shell.run`` for a shell text as one string, or for a program with arguments as a sequence
    :param as_argv: returns the program and arguments that a shell text stands for; None if it needs a shell
    """

    def __init__(
        self,
        sandbox: Sandbox,
        profile: SandboxProfile,
        capabilities: CapabilitySet,
        roots: SessionRoots,
        may: AccessCheck,
        as_argv: Callable[[str], Sequence[str] | None] | None = None,
    ) -> None:
        self._sandbox = sandbox
        self._profile = profile
        self.capabilities = capabilities
        self._roots = roots
        self._may = may
        self._as_argv = as_argv

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        separate_stderr: bool = False,
        trusted_program: bool = False,
        on_output: Callable[[bytes], None] | None = None,
        keep_bytes: int | None = None,
    ) -> CompletedProcess:
        attempts: list[ConnectionAttempt] = []
        process = await self.start_authorized_program(
            command, cwd=cwd, environment=environment, apart=separate_stderr, trusted=trusted_program, attempts=attempts
        )
        capture = _OutputCapture(on_output, keep_bytes)
        watch = None if on_output is None else _EditorWatch(process, capture.receive_output)
        try:
            output, errors, dropped = await process.communicate(
                stdin, capture.keep_bytes, capture.receive_output if watch is None else watch.receive_output
            )
            try:
                code = await process.wait()
            except ProtectedPathViolation as veto:
                output_text = await asyncio.to_thread(
                    decode_text, capture.join_head_and_tail(output) + errors, "replace"
                )
                raise ToolError(
                    veto.text, kind="denied", data={"exit_code": veto.exit_code, "output": output_text}
                ) from None
            except ToolError as error:
                output_text = await asyncio.to_thread(
                    decode_text, capture.join_head_and_tail(output) + errors, "replace"
                )
                raise ToolError(
                    error.text, kind=error.kind, data={"output": output_text} if output_text else None
                ) from None
        except asyncio.CancelledError:
            await kill_process_despite_cancellation(process)
            if on_output is not None and isinstance(process, GuardedProcess) and process.violation is not None:
                on_output(f"\n[handrail: {process.violation.text}]\n".encode())
            raise
        finally:
            if watch is not None:
                watch.stop()
            await kill_process_despite_cancellation(process)
        output_text = errors or capture.get_output_tail() or output
        bound = None if self._profile.tool in self._sandbox.tier.unconfined else infer_reached_limit(code, output_text)
        limit = bound.text if bound else None
        shown = command if isinstance(command, str) else " ".join(command)
        notes = explain_sandbox_denials(
            process, ProgramTermination(shown, code, output_text, self.capabilities, attempts)
        )
        if watch is not None and watch.ended_editor:
            notes = (
                f"`{watch.ended_editor}` waited for a terminal, which programs of this call do not have, so Handrail stopped it. Use edit "
                "or write to change a file, an option such as git commit -m for a message, or terminal.start for an interactive "
                "program.",
                *notes,
            )
        dropped -= capture.count_forwarded_bytes(len(output))
        tail = b"" if keep_bytes is None else capture.get_output_tail()
        return CompletedProcess(code, output, dropped, -code if code < 0 else None, limit, notes, errors, tail)

    async def start_authorized_program(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        apart: bool = False,
        trusted: bool = False,
        terminal: TerminalSize | None = None,
        attempts: list[ConnectionAttempt] | None = None,
    ) -> Process:
        """Authorise and start a program, as :meth:`run` does. The caller must end it.

        :param terminal: the size of the program's terminal, if it is to have one
        :param attempts: gets the hosts that the program wants to reach, each once
        """
        given = _check_given_variables(command, environment or {})
        argv = self._build_argv(command)
        folder = self._resolve_folder(cwd, further=trusted)
        if isinstance(command, str) and folder != self._profile.workspace and not _REDIRECTING.isdisjoint(command):
            raise ToolError(
                "A shell command with '<' or '>' runs only in the workspace folder. Leave `cwd` out and name "
                "files from there, or pass an argv list.",
                kind="denied",
            )
        if trusted:
            argv, given = self._resolve_trusted_program(argv, given)
        profile = dataclasses.replace(self._profile, cwd=folder, environment={**self._profile.environment, **given})
        if attempts is not None and profile.on_attempt is not None:
            profile = dataclasses.replace(profile, on_attempt=_combine_with_recorder(attempts, profile.on_attempt))
        program = ProgramSpec(argv, merge_stderr=not apart, terminal=terminal)
        return await self._sandbox.start(self.capabilities, profile, program)

    async def list_hidden_paths(self, paths: Sequence[str]) -> Sequence[str]:
        if len(paths) > _FEW_PATHS:
            return await asyncio.to_thread(self._find_hidden, paths)
        return self._find_hidden(paths)

    def _find_hidden(self, paths: Sequence[str]) -> Sequence[str]:
        denials = self._profile.denials
        found: list[str] = []
        for path in paths:
            absolute = self._roots.resolve_exact_path(path).absolute
            if (denials is not None and denials.is_hidden(absolute)) or self._may("fs.read", absolute) is not None:
                found.append(path)
        return found

    def _build_argv(self, command: str | Sequence[str]) -> Sequence[str]:
        if not self.capabilities.may_allow_any_target("shell.run"):
            layer = self.capabilities.find_denying_layer("shell.run", ("",))
            owner = layer.owner if layer else "nothing"
            raise ToolError(
                f"Running programs is not allowed in this call (limited by {owner}). Use another tool, or ask the "
                "user.",
                kind="denied",
            )
        if isinstance(command, str):
            if not command.strip():
                raise ToolError("`command` is empty. Pass a shell command or an argv list.", kind="invalid_input")
            if "\0" in command:
                raise ToolError("`command` contains a NUL character. Remove it.", kind="invalid_input")
            self._authorize(command)
            return (self._as_argv(command) if self._as_argv is not None else None) or (*_find_shell(), command)
        if not (argv := tuple(command)) or not argv[0]:
            raise ToolError("The argv list is empty. Pass a program and its arguments.", kind="invalid_input")
        if self.capabilities.find_denying_layer("shell.run", argv) is not None:
            raise ToolError(
                f"`{escape_terminal_controls(argv[0])}` with these arguments is not allowed in this call. Use another tool, or ask "
                "the user.",
                kind="denied",
            )
        self._authorize(argv)
        return argv

    def _resolve_trusted_program(
        self, argv: Sequence[str], given: Mapping[str, str]
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the argv with a program from outside the workspace, and variables with such a PATH."""
        workspace = self._profile.workspace
        folders = [
            one
            for one in toolchains.find_toolchains(workspace).path
            if find_enclosing_folder(one, (workspace,)) is None
        ]
        try:
            program = find_program(argv[0], outside=(workspace,), path=folders)
        except ProgramRefused as error:
            raise ToolError(str(error), kind="unavailable") from None
        return (program, *argv[1:]), {**given, "PATH": ":".join(folders)}

    def _authorize(self, command: str | tuple[str, ...]) -> None:
        if (refusal := self._may("shell.run", command)) is not None:
            raise ToolError(refusal, kind="denied")

    def _resolve_folder(self, cwd: str | None, *, further: bool = False) -> str:
        """Return the canonical working directory.

        :param further: whether it may lie in another root than the workspace
        """
        if (lost := find_lost_root_error(self._profile.workspace)) is not None:
            raise lost
        if cwd is None:
            return self._profile.cwd or self._profile.workspace
        located = self._roots.resolve_path(cwd)
        if not is_beneath(located.absolute, self._profile.workspace) and not (further and located.is_inside):
            raise ToolError(
                f"The working directory `{located.display_path}` is outside the workspace "
                f"{escape_terminal_controls(self._profile.workspace)}. Use a folder inside it.",
                kind="denied",
            )
        if not Path(located.absolute).is_dir():
            raise ToolError(
                f"The working directory `{located.display_path}` is not a folder. Use an existing folder.",
                kind="failed",
            )
        return located.absolute


class _OutputCapture:
    """The parts of a run's stdout that are not kept whole: the pieces for the caller, and the end.

    :param keep_bytes: how many bytes the caller keeps in the result; None for all
    """

    def __init__(self, on_output: Callable[[bytes], None] | None, keep_bytes: int | None) -> None:
        self.keep_bytes = MAX_OUTPUT_BYTES if keep_bytes is None else min(keep_bytes, MAX_OUTPUT_BYTES)
        self._on_output = on_output
        self._most = MAX_OUTPUT_BYTES if keep_bytes is None else max(self.keep_bytes, MAX_OUTPUT_BYTES - TAIL_BYTES)
        self._announces = keep_bytes is None
        self._total = 0
        self._ends: deque[bytes] = deque()
        self._ends_bytes = 0

    def receive_output(self, piece: bytes) -> None:
        """Pass on a piece up to the limit, and keep the last ones."""
        room = self._most - self._total
        self._total += len(piece)
        if self._on_output is not None and room > 0:
            self._on_output(piece[:room])
        if self._on_output is not None and 0 <= room < len(piece) and self._announces:
            # Without a note, the kept part would look like the whole output.
            self._on_output(f"\n[the output continues; its first {self._most:,} bytes are kept]\n".encode())
        self._ends.append(piece)
        self._ends_bytes += len(piece)
        while self._ends_bytes - len(self._ends[0]) >= TAIL_BYTES:
            self._ends_bytes -= len(self._ends.popleft())

    def get_output_tail(self) -> bytes:
        """Return the end of an output that is longer than the kept part; else nothing."""
        beyond = min(self._total - self.keep_bytes, TAIL_BYTES)
        return b"".join(self._ends)[-beyond:] if beyond > 0 else b""

    def join_head_and_tail(self, output: bytes) -> bytes:
        """Return the kept part with the end, and a note about what is between them."""
        tail = self.get_output_tail()
        left_out = self._total - len(output) - len(tail)
        note = f"\n[{left_out:,} bytes are left out here]\n".encode() if left_out > 0 else b""
        return output + note + tail if tail else output

    def count_forwarded_bytes(self, kept: int) -> int:
        """Return how many bytes were passed on in addition to the kept part."""
        return max(0, min(self._total, self._most) - kept)


_WAITS_FOR_TERMINAL = b"Input is not from a terminal"
"""The line that vi prints before it waits forever. Other editors, pagers and prompts end by themselves without a terminal."""
_EDITOR_WAIT_S = 3.0
_EDITORS = compile_regex_lazily(r"(?:r|n|g)?vi(?:m|ew|mdiff)?(?:\.[a-z0-9]+)?|ex")


class _EditorWatch:
    """A watch over the output of a program that ends it if an editor in it waits for a terminal."""

    def __init__(self, process: Process, on_output: Callable[[bytes], None]) -> None:
        self._process = process
        self._on_output = on_output
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._said = b""
        self.ended_editor = ""

    def receive_output(self, piece: bytes) -> None:
        self._on_output(piece)
        self._said = self._said[-len(_WAITS_FOR_TERMINAL) :] + piece
        if self._timer is not None or _WAITS_FOR_TERMINAL in self._said:
            self.stop()
            self._timer = asyncio.get_running_loop().call_later(_EDITOR_WAIT_S, self._end_editor)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end_editor(self) -> None:
        names = (_read_program_name(pid) for pid in _list_descendants(self._process.pid))
        self.ended_editor = next((name for name in names if _EDITORS.fullmatch(name) is not None), "")
        if self.ended_editor:
            self._ending = asyncio.ensure_future(self._process.kill())


def _list_descendants(pid: int) -> Sequence[int]:
    """Return the processes that a process and its children started."""
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found[1:]


def _read_program_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _combine_with_recorder(
    attempts: list[ConnectionAttempt], report: Callable[[ConnectionAttempt], None]
) -> Callable[[ConnectionAttempt], None]:
    def reported(attempt: ConnectionAttempt) -> None:
        report(attempt)
        if len(attempts) < _MOST_ATTEMPTS and attempt not in attempts:
            attempts.append(attempt)

    return reported


def _check_given_variables(command: str | Sequence[str], given: Mapping[str, str]) -> Mapping[str, str]:
    """Check the environment variables that a tool sets.

    :raises ToolError: ``invalid_input`` for an invalid variable, or one that a tool must not set
    """
    if given and isinstance(command, str):
        raise ToolError(
            "A shell command cannot have extra environment variables. Pass an argv list instead.",
            kind="invalid_input",
        )
    for name, value in given.items():
        if _VARIABLE.fullmatch(name) is None:
            raise ToolError(
                f"{escape_terminal_controls(name)!r} is not a valid name of a variable. Use letters, digits and underscores.",
                kind="invalid_input",
            )
        if name in _FIXED_VARIABLES or name.startswith(_FIXED_PREFIXES) or name.lower().endswith("_proxy"):
            raise ToolError(
                f"The variable `{name}` is set by the sandbox. Leave it out of `environment`.", kind="invalid_input"
            )
        if "\0" in value:
            raise ToolError(
                f"The value of the variable `{name}` contains a NUL character. Remove it.", kind="invalid_input"
            )
    return given


def _find_shell() -> tuple[str, ...]:
    return SHELL_ARGV if Path(SHELL_ARGV[0]).exists() else _SH


async def kill_process_despite_cancellation(process: Process) -> None:
    """End the process and everything it started, even if the current task is being cancelled."""
    ending = asyncio.ensure_future(process.kill())
    cancelled: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError as error:
            cancelled = error
    ending.result()
    if cancelled is not None:
        raise cancelled


# Terminals of one session: its calls open them and type into them, and their output is that of their jobs.

MAX_TERMINALS = 16
"""The maximum number of open terminals in one session."""
MAX_LINE_BYTES = 4095
"""The longest line, in bytes, that a terminal passes to a program that reads lines. The kernel drops the rest (n_tty).
"""
TYPING_TIMEOUT_S = 5.0
"""How long typing waits for the program to read the text."""
_HANG_UP_S = 0.5
"""How long a program may take to end after its terminal was closed, before it is killed."""
_READ = 1 << 16
_BURST, _PAUSE_S = 256 * 1024, 0.05
"""After this many bytes, a program with much output is paused, so that other tasks get a turn."""
_TAIL_BYTES = 8 * 1024
"""How much of the end of a terminal's output is kept to explain how its program ended."""
_DELIVERY_S = 0.1
"""How long the system may take to pass on typed text."""
_COMMANDS_WITHOUT_INPUT = frozenset(
    ("", "echo", "printf", "true", "false", ":", "pwd", "cd", "ls", "date", "sleep", "stty")
)
_MOST_REMEMBERED = 1_000
ENTER_KEYS = frozenset(("enter", "ctrl-j", "ctrl-m"))
_SUBMIT_KEYS = ENTER_KEYS | {"ctrl-c"}
_QUOTE_KEYS = frozenset(("ctrl-v", "ctrl-q"))
"""The key after one of these is inserted literally."""
_KEEP_LINE_KEYS = frozenset(("ctrl-d", "ctrl-l", "ctrl-z", "ctrl-backslash"))
_EDIT_KEYS = frozenset(
    (
        "tab",
        "space",
        "backspace",
        "delete",
        "insert",
        "up",
        "down",
        "left",
        "right",
        "home",
        "end",
        "page-up",
        "page-down",
    )
) | {f"ctrl-{letter}" for letter in "abefghknptuwy"}
"""Keys that change the line of a shell and run nothing."""


class OpenTerminal(Struct, eq=False):
    """A terminal whose program has not ended.

    :param command: the command that it was started with
    :param attempts: gets the hosts that its programs want to reach, each once
    :ivar tail: the end of its output
    :ivar line_open: whether the input line contains text that was not entered
    :ivar quoting: whether the next key is inserted literally
    :ivar may_take_input: whether a line was typed that may have started a program that reads the next input
    """

    id: str
    command: str
    process: TerminalProcess
    capabilities: CapabilitySet
    attempts: list[ConnectionAttempt]
    tail: bytes = b""
    line_open: bool = False
    quoting: bool = False
    may_take_input: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def append_to_tail(self, piece: bytes) -> None:
        """Add output to the end that is kept."""
        self.tail = (self.tail + piece)[-_TAIL_BYTES:]

    def explain_failures(self, output: bytes, exit_code: int = 1) -> tuple[str, ...]:
        """Return notes on failures in ``output``. An open terminal has no exit code, so its output alone counts.

        Each host that was refused is named once.
        """
        attempts, self.attempts[:] = tuple(self.attempts), ()
        end = ProgramTermination(self.command, exit_code, output, self.capabilities, attempts)
        return explain_sandbox_denials(self.process, end)

    @property
    def has_uncertain_input_target(self) -> bool:
        """Whether typed text may go to a program other than the shell, or continue an open line."""
        return self.line_open or (self.may_take_input and not self.process.is_at_prompt())

    def update_input_line_state(self, text: str, keys: Sequence[str]) -> None:
        """Update the state of the input line after typing."""
        if text:
            self.may_take_input = may_read_typed_input(text) or (
                self.may_take_input and self.has_uncertain_input_target
            )
            self.line_open = self.quoting or not text.endswith("\n")
            self.quoting = False
        if do_keys_submit_unknown_line(text, keys, self.line_open):
            self.may_take_input = True
        for key in keys:
            self.line_open = self.quoting or (self.line_open if key in _KEEP_LINE_KEYS else key not in _SUBMIT_KEYS)
            self.quoting = not self.quoting and key in _QUOTE_KEYS


class SessionTerminals:
    """The terminals of one session, shared by its calls."""

    def __init__(self) -> None:
        self.open: dict[str, OpenTerminal] = {}
        self.starting: set[str] = set()
        """Jobs that are about to open a terminal."""
        self.non_shells: set[str] = set()
        """Terminals that run something other than a shell. Text for all others is evaluated as a shell command."""
        self.change_count = 0
        """How often a terminal was opened, showed output or ended."""
        self._change_event = asyncio.Event()
        self.read_up_to: dict[str, int] = {}

    def find(self, terminal_id: str) -> OpenTerminal | None:
        return self.open.get(terminal_id)

    def notify_change_waiters(self) -> None:
        """Count a change, and wake the tasks that wait for one."""
        self.change_count += 1
        self._change_event.set()
        self._change_event = asyncio.Event()

    async def wait_for_change(self, since: int) -> None:
        """Wait until ``changes`` is greater than ``since``."""
        while self.change_count == since:
            await self._change_event.wait()


class CallTerminals:
    """A terminal service for one call: :class:`handrail.contract.services.job_and_tool_services.TerminalService`.

    :param shell: returns the shell service of the call; raises if its tool did not declare one
    :param may: evaluates the rules for typed text
    :param output: called with the output of a terminal
    :param job_id: the job that the call is; None for a direct call
    """

    def __init__(
        self,
        shared: SessionTerminals,
        shell: Callable[[], SandboxedShell],
        may: AccessCheck,
        output: Callable[[bytes], None],
        job_id: str | None,
    ) -> None:
        self._shared = shared
        self._shell = shell
        self._may = may
        self._output = output
        self._job_id = job_id

    async def run(self, command: str, *, cwd: str | None = None, columns: int, rows: int) -> CompletedProcess:
        if self._job_id is None:
            raise ToolError("A terminal runs as a background job. Open it with terminal.start.", kind="unavailable")
        shared, terminal_id = self._shared, self._job_id
        if len(shared.open) + len(shared.starting) >= MAX_TERMINALS:
            raise ToolError(
                f"This session has {MAX_TERMINALS} open terminals, which is the maximum. End one with "
                "terminal.stop first.",
                kind="limit",
            )
        shared.starting.add(terminal_id)
        shell, attempts = self._shell(), list[ConnectionAttempt]()
        try:
            started = await shell.start_authorized_program(
                command, cwd=cwd, terminal=TerminalSize(columns, rows), attempts=attempts
            )
        except BaseException:
            shared.non_shells.discard(terminal_id)
            raise
        finally:
            shared.starting.discard(terminal_id)
            shared.notify_change_waiters()
        process = cast("TerminalProcess", started)
        terminal = OpenTerminal(terminal_id, command, process, shell.capabilities, attempts)
        shared.open[terminal_id] = terminal
        terminal.may_take_input = any(sign in command for sign in ";&|\n$`(<")
        await self.track_read_position(terminal_id, 0)
        shared.notify_change_waiters()
        reading = asyncio.ensure_future(self._forward_output(terminal))
        try:
            code = await self._wait_until_ended(terminal)
        except asyncio.CancelledError:
            await self._hang_up_and_wait(process)
            await kill_process_despite_cancellation(process)
            if isinstance(process, GuardedProcess) and process.violation is not None:
                self._output(f"\n[handrail: {process.violation.text}]\n".encode())
            raise
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            if rest := process.read_rest(_BURST):
                self._output(rest)
                terminal.append_to_tail(rest)
            del shared.open[terminal_id]
            shared.non_shells.discard(terminal_id)
            shared.notify_change_waiters()
            await kill_process_despite_cancellation(process)
        notes = terminal.explain_failures(terminal.tail, code)
        return CompletedProcess(code, b"", signal=-code if code < 0 else None, notes=notes)

    async def _wait_until_ended(self, terminal: OpenTerminal) -> int:
        try:
            return await terminal.process.wait()
        except ProtectedPathViolation as veto:
            raise ToolError(veto.text, kind="denied", data={"exit_code": veto.exit_code}) from None

    async def _forward_output(self, terminal: OpenTerminal) -> None:
        """Pass on the output of a terminal as it arrives."""
        passed = 0
        while piece := await terminal.process.read(_READ):
            self._output(piece)
            terminal.append_to_tail(piece)
            self._shared.notify_change_waiters()
            passed += len(piece)
            if passed >= _BURST:
                passed = 0
                await asyncio.sleep(_PAUSE_S)

    @staticmethod
    async def _hang_up_and_wait(process: TerminalProcess) -> None:
        """Close the terminal as a lost connection does, and wait: most programs end then."""
        process.hang_up()
        with contextlib.suppress(TimeoutError, ToolError):
            async with asyncio.timeout(_HANG_UP_S):
                await process.wait()

    async def type_input(self, terminal_id: str, text: str, keys: tuple[str, ...]) -> TypedInputResult:
        self._shell()
        terminal = self._get_open(terminal_id)
        async with terminal.lock:
            if self._shared.find(terminal_id) is not terminal:
                raise self._not_open_error(terminal_id)
            self._authorize_typed_input(terminal, text, keys)
            data = text.encode("utf-8", "replace") + "".join(KEYS[key] for key in keys).encode()
            terminal.update_input_line_state(text, keys)
            shell = terminal_id not in self._shared.non_shells
            left, writing = 0, asyncio.ensure_future(terminal.process.write(data))
            try:
                await asyncio.wait({writing}, timeout=TYPING_TIMEOUT_S)
            finally:  # also if the call is stopped: nothing is typed after its end
                if not writing.done():
                    left = terminal.process.discard_pending_input()
                await writing
            if shell and terminal.may_take_input:
                await asyncio.sleep(_DELIVERY_S)  # while the lock is held: the next text must find the shell busy
        return TypedInputResult(len(data) - left, left)

    def _authorize_typed_input(self, terminal: OpenTerminal, text: str, keys: Sequence[str]) -> None:
        if terminal.process.is_line_buffered() and any(
            len(line.encode("utf-8", "replace")) > MAX_LINE_BYTES for line in text.split("\n")
        ):
            raise ToolError(
                f"A line of `text` is longer than {MAX_LINE_BYTES:,} bytes, and the terminal would cut it. Put the "
                "data into a file, and let the program read the file.",
                kind="invalid_input",
            )
        if terminal.id in self._shared.non_shells:
            return
        hidden = do_keys_submit_unknown_line(text, keys, terminal.line_open)
        if not text and not hidden:
            return
        # The rules were evaluated for this text on an empty line, or on an open one. The line must still be in that
        # state.
        refusal = self._may(
            "shell.run", normalise_shell_text_for_rules(text, open_line=terminal.has_uncertain_input_target or hidden)
        )
        if refusal is not None:
            raise ToolError(
                "Nothing was typed: the input line of the terminal changed after this call was checked. Check it with terminal.read, then send the text again."
                f" {refusal}",
                kind="conflict",
            )

    async def resize(self, terminal_id: str, columns: int, rows: int) -> None:
        self._get_open(terminal_id).process.resize(TerminalSize(columns, rows))

    async def is_open(self, terminal_id: str) -> bool:
        return terminal_id in self._shared.open

    async def has_existed(self, terminal_id: str) -> bool:
        return terminal_id in self._shared.read_up_to

    async def change_count(self) -> int:
        return self._shared.change_count

    async def wait_for_change(self, since: int, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._shared.wait_for_change(since)
        except TimeoutError:
            return False
        return True

    async def explain_failures(self, terminal_id: str, text: str) -> Sequence[str]:
        if (terminal := self._shared.find(terminal_id)) is None:
            return ()
        return await asyncio.to_thread(terminal.explain_failures, text.encode("utf-8", "replace"))

    async def track_read_position(self, terminal_id: str, cursor: int | None = None) -> int:
        known = self._shared.read_up_to
        if cursor is not None:
            known.pop(terminal_id, None)
            known[terminal_id] = cursor
            while len(known) > _MOST_REMEMBERED:
                del known[next(iter(known))]
        return known.get(terminal_id, 0)

    def _get_open(self, terminal_id: str) -> OpenTerminal:
        if (terminal := self._shared.find(terminal_id)) is None:
            raise self._not_open_error(terminal_id)
        return terminal

    def _not_open_error(self, terminal_id: str) -> ToolError:
        there = ", ".join(self._shared.open) or "none"
        return ToolError(
            f"Terminal {terminal_id[:80]!r} is not open. Open terminals: {there}. terminal.read shows how a "
            "terminal ended.",
            kind="conflict",
        )


def may_read_typed_input(text: str) -> bool:
    """Return whether a shell text may run a program that reads the input typed after it.

    This is assumed of everything but a few simple commands.
    """
    commands = (part.split(maxsplit=1) for part in re.split(r"[;&|\n]", text))
    return any(sign in text for sign in "$`(<") or any(c and c[0] not in _COMMANDS_WITHOUT_INPUT for c in commands)


def do_keys_submit_unknown_line(text: str, keys: Sequence[str], line_open: bool) -> bool:
    """Return whether ``keys`` run a line in a shell that was typed by keys, so its text is unknown here."""
    if text:
        line_open = not text.endswith("\n")
        if line_open and keys[:1] and keys[0] in ENTER_KEYS:
            line_open, keys = False, keys[1:]
    for key in keys:
        if key in ENTER_KEYS:
            if line_open:
                return True
        elif key == "ctrl-c":
            line_open = False
        elif key in _EDIT_KEYS:
            line_open = True
        elif key not in _KEEP_LINE_KEYS:
            return True
    return False


def normalise_shell_text_for_rules(text: str, *, open_line: bool) -> str:
    """Return a shell text in the form in which the rules are evaluated.

    Text that continues an open line is not a command by itself. It gets a prefix that no rule can allow.
    """
    return f"$(…){text}" if open_line else text
