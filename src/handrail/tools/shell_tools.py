"""bash and python: one command text, or one program, in the sandbox. terminal.*: programs with typed input."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO, cast

from handrail.contract.calls_and_results import LargeText
from handrail.contract.errors import ToolError, decode_text
from handrail.contract.sandbox_protocol import CompletedProcess
from handrail.contract.services.job_and_tool_services import DEFAULT_COMMAND, TERMINAL_START_ID, Job, parse_key_names
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.neutralisation import find_escapes
from handrail.contract.tool.requires import NetRequires, Requires, ShellRequires
from handrail.contract.tool.spec import JobArgumentSpec, LockSpec, ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.job_tools import describe_stopped_job
from handrail.tools.tool_declarations import MAX_OUTPUT, WORKSPACE, make_closed_object_schema

MAX_TIMEOUT_MS = 600_000
_SHORT_OUTPUT = 64 * 1024
_IN_MEMORY = 1024 * 1024
"""The bytes of an output that are kept in memory. A longer output goes to a file."""
_ON_DISK = "/var/tmp"  # noqa: S108 - only files without names are made there
_HOSTS = NetRequires(by_rule=True)
_TIMEOUT = {
    "type": "integer",
    "minimum": 1,
    "maximum": MAX_TIMEOUT_MS,
    "description": f"Timeout in milliseconds. Default: {MAX_TIMEOUT_MS}, unless the operator set another",
}


class PythonTool(Tool):
    spec = ToolSpec(
        id="python",
        description=(
            "Run Python code (python3), e.g. to compute something, in the workspace, in a sandbox that reaches only "
            "the hosts that the user allows. Each call is a new process: print what you want to see. Returns exit_code and "
            "output, stdout and stderr together."
        ),
        parameters=make_closed_object_schema(
            {
                "code": {"type": "string", "minLength": 1, "description": "Complete program"},
                "timeout_ms": _TIMEOUT,
            },
            ["code"],
        ),
        requires=Requires(fs=WORKSPACE, net=_HOSTS, shell=(ShellRequires(cmd="python3", args=("-",)),)),  # noqa: S604 - a declaration, nothing is run
        side_effect="external",
        locks=(LockSpec("workspace", "X"),),
        single_command=True,
        timeout_ms=MAX_TIMEOUT_MS,
        timeout_argument="timeout_ms",
        max_output=MAX_OUTPUT,
        category="system",
        kind="execute",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await run_program(runtime, ("python3", "-"), stdin=args["code"].encode())


class BashTool(Tool):
    spec = ToolSpec(
        id="bash",
        description=(
            "Run a shell command in the workspace root, in a sandbox that reaches only the hosts that the user allows. "
            "Each call starts a new shell: `cd`, variables and background processes do not persist. No interactive "
            "commands. Returns exit_code and output, stdout and stderr together, up to 200 KB. Of a "
            "longer output, head and tail have the ends, and the file output_path has all. A non-zero exit code is not an error."
        ),
        parameters=make_closed_object_schema(
            {
                "command": {
                    "type": "string",
                    "format": "command",
                    "minLength": 1,
                    "maxLength": 100_000,
                    "description": "Command, as for bash -c",
                },
                "timeout_ms": _TIMEOUT,
                "background": {
                    "type": "boolean",
                    "description": (
                        "Run as a background job: return its job_id at once, do not lock the workspace. Default: false"
                    ),
                },
            },
            ["command"],
        ),
        requires=Requires(fs=WORKSPACE, net=_HOSTS, shell=(ShellRequires(cmd="*"),)),  # noqa: S604 - a declaration, nothing is run
        side_effect="external",
        locks=(LockSpec("workspace", "X"),),
        targets={"shell.run": "{command}"},
        single_command=True,
        timeout_ms=MAX_TIMEOUT_MS,
        timeout_argument="timeout_ms",
        background_argument="background",
        promotable=True,
        max_output=MAX_OUTPUT,
        category="system",
        tier="core",
        kind="execute",
        guidance=(
            "Use read, glob, grep and edit instead of cat, find, grep and sed. Prefer simple commands: a text "
            "that cannot be analyzed may need the user's approval. Run git directly, not in a script. Run long "
            "commands with background, and use wait instead of sleep."
        ),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await run_program(runtime, args["command"])


async def run_program(runtime: Runtime, command: str | Sequence[str], stdin: bytes = b"") -> dict[str, object]:
    """Run a program and return its exit code and output.

    If the call is stopped, the output so far becomes its partial result.
    """
    collector = _OutputCollector(runtime)
    try:
        done = await runtime.shell.run(command, stdin=stdin, on_output=collector.add, keep_bytes=_IN_MEMORY)
    except BaseException as error:
        collector.close()
        if isinstance(error, asyncio.CancelledError):
            runtime.set_partial_result({"output": collector.head})
        raise
    large = collector.take_large_text(done)
    answer: dict[str, object] = {"exit_code": done.exit_code, "output": large or await _output_text(done.output)}
    if done.signal is not None:
        answer["signal"] = done.signal
    if done.exceeded_limit is not None:
        answer["limit"] = done.exceeded_limit
    if large is not None and large.omitted_byte_count:
        answer["dropped_bytes"] = large.omitted_byte_count
    notes = [*done.notes, *_explain_escapes(stdin.decode() if stdin else "".join(command))]
    if notes:
        answer["notes"] = notes
    return answer


def _explain_escapes(text: str) -> Iterator[str]:
    """Yield a note if a text for a program contains escapes, which no program restores."""
    if escapes := find_escapes(text):
        more = f" and {len(escapes) - 3} more" if len(escapes) > 3 else ""
        yield (
            f"The program got {', '.join(escapes[:3])}{more} literally, as text. In results, it stands for a character. If you "
            "mean that character, use write, edit or file.move, which restore it, or write its code, as in $'\\u200b'."
        )


async def _output_text(output: bytes) -> str:
    if len(output) <= _SHORT_OUTPUT:
        return output.decode("utf-8", "replace")
    return await asyncio.to_thread(decode_text, output, "replace")


class _OutputCollector:
    """The output of a command while it runs: the beginning in memory, and a long output in a file without a name."""

    def __init__(self, runtime: Runtime) -> None:
        self._begin = bytearray()
        self._show = runtime.write_output
        self._most_shown = runtime.max_output_bytes
        self._size = 0
        self._file: BinaryIO | None = None
        self._is_complete = True
        """Whether the file has all pieces so far."""

    def add(self, piece: bytes) -> None:
        self._show(piece)
        room = _IN_MEMORY - len(self._begin)
        if room > 0:
            self._begin += piece[:room]
        self._size += len(piece)
        if len(piece) > room and self._is_complete:
            self._store(piece[max(0, room) :])

    def _store(self, piece: bytes) -> None:
        try:
            if self._file is None:
                self._file = _open_unnamed_file()
                _write_whole(self._file, self._begin)
            _write_whole(self._file, piece)
        except OSError:  # a full disk, as a rule
            self._is_complete = False
            self.close()

    def take_large_text(self, done: CompletedProcess) -> LargeText | None:
        """Return an output that is longer than what is kept in memory; else None."""
        if self._size <= _IN_MEMORY:
            return None
        total, file = self._size + done.dropped_bytes, self._file
        if file is None:
            return LargeText(io.BytesIO(self._begin), total - len(self._begin), done.tail)
        self._file = None
        return LargeText(file, done.dropped_bytes, done.tail)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    @property
    def head(self) -> str:
        return self._begin[: self._most_shown].decode("utf-8", "replace")


def _write_whole(file: BinaryIO, data: bytes | bytearray) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _open_unnamed_file() -> BinaryIO:
    """Open a file that ends with its last descriptor, on a disk: /tmp is often in memory."""
    try:
        return cast("BinaryIO", tempfile.TemporaryFile(buffering=0, dir=_ON_DISK))
    except OSError:
        return cast("BinaryIO", tempfile.TemporaryFile(buffering=0))


# terminal.start, send, read, resize and stop: programs with typed input, each a job of its session.

MAX_TERMINAL_MS = 24 * 3_600_000
MAX_WAIT_MS = 60_000
DEFAULT_WAIT_MS = 2_000
MOST_TEXT = 16 * 1024
MOST_BYTES = 100_000
MOST_LINES = 1_000
_QUIET_S = 0.15
"""The seconds without output after which a terminal counts as quiet."""
_ENDING_MS = 10_000
_COLUMNS = {"type": "integer", "minimum": 20, "maximum": 500, "description": "Width in columns"}
_ROWS = {"type": "integer", "minimum": 5, "maximum": 200, "description": "Height in rows"}
_ID = {
    "type": "string",
    "minLength": 1,
    "maxLength": 200,
    "description": "ID of the terminal: the job_id from terminal.start",
}
_SHELL = (ShellRequires(cmd="*"),)
_spec = partial(ToolSpec, requires=Requires(capabilities=("jobs", "terminals")), locks=(), category="system")
"""Declares a tool for a terminal that exists already."""


class TerminalStartTool(Tool):
    spec = ToolSpec(
        id=TERMINAL_START_ID,
        description=(
            "Start an interactive program, such as a shell, a debugger or a REPL, in a new terminal session, "
            "in a sandbox that reaches only the hosts that the user allows. Returns its job_id at once, which is the ID of the "
            "terminal. Then use terminal.read, terminal.send and terminal.stop. For a single command use "
            "bash."
        ),
        parameters=make_closed_object_schema(
            {
                "command": {
                    "type": "string",
                    "format": "command",
                    "minLength": 1,
                    "maxLength": 100_000,
                    "default": DEFAULT_COMMAND,
                    "description": "Program to run",
                },
                "cwd": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": 4096,
                    "description": "Folder of the workspace to start in. Default: the workspace",
                },
                "columns": {**_COLUMNS, "default": 160},
                "rows": {**_ROWS, "default": 40},
                "name": {
                    "type": "string",
                    "maxLength": 80,
                    "description": "Purpose, shown in lists of jobs. Default: none",
                },
            }
        ),
        requires=Requires(fs=WORKSPACE, net=_HOSTS, shell=_SHELL, capabilities=("terminals",)),
        side_effect="external",
        locks=(LockSpec("workspace", "X"),),
        targets={"shell.run": "{command}"},
        mode="background",
        long_running=True,
        timeout_ms=MAX_TERMINAL_MS,
        category="system",
        kind="execute",
    )
    types_input = True

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        command = args.get("command", DEFAULT_COMMAND)
        columns, rows = args.get("columns", 160), args.get("rows", 40)
        done = await runtime.terminals.run(command, cwd=args.get("cwd"), columns=columns, rows=rows)
        answer: dict[str, object] = {"exit_code": done.exit_code}
        if done.signal is not None:
            answer["signal"] = done.signal
        if done.notes:
            answer["notes"] = list(done.notes)
        return answer


class TerminalSendTool(Tool):
    job_argument = JobArgumentSpec("id", TERMINAL_START_ID, running=True)
    spec = _spec(
        id="terminal.send",
        description=(
            "Type into a terminal session: text, then keys (keystrokes), e.g. to enter a command or answer a "
            "prompt. End a line with a newline or the key enter. terminal.read shows the output."
        ),
        parameters={
            **make_closed_object_schema(
                {
                    "id": _ID,
                    "text": {
                        "type": "string",
                        "minLength": 1,
                        "maxLength": MOST_TEXT,
                        "pattern": "^[^\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f]*$",
                        "description": "Text to type, without control characters. Required unless `keys` is given",
                    },
                    "keys": {
                        "type": "string",
                        "minLength": 1,
                        "maxLength": 1000,
                        "description": (
                            "Key names, separated by spaces, e.g. 'up enter': enter, tab, space, escape, backspace, delete, "
                            "insert, up, down, left, right, home, end, page-up, page-down, ctrl-a to ctrl-z, ctrl-backslash. Names of tmux work, too: 'C-c Enter'. "
                            "Default: none"
                        ),
                    },
                },
                ["id"],
            ),
            "anyOf": [{"required": ["text"]}, {"required": ["keys"]}],
        },
        requires=Requires(fs=WORKSPACE, shell=_SHELL, capabilities=("jobs", "terminals")),
        side_effect="external",
        kind="execute",
    )
    types_input = True

    def check(self, args: dict[str, Any]) -> None:
        parse_key_names(args.get("keys", ""))

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        job = await runtime.jobs.get(args["id"])
        if not await _wait_until_open(runtime, job):
            raise await _ended_error(runtime, job)
        typed = await runtime.terminals.type_input(job.id, args.get("text", ""), parse_key_names(args.get("keys", "")))
        answer: dict[str, object] = {"id": job.id, "sent_bytes": typed.sent_bytes}
        if typed.unsent_bytes:
            answer["note"] = (
                f"The program is not reading input, so the last {typed.unsent_bytes} bytes were not typed. "
                "Check its output with terminal.read."
            )
        return answer


class TerminalReadTool(Tool):
    job_argument = JobArgumentSpec("id", TERMINAL_START_ID)
    spec = _spec(
        id="terminal.read",
        description=(
            "Read the output (screen) of a terminal session: what is new since the last read, from a cursor, "
            "or the last lines. Waits until output arrives and pauses, or the program ends. The "
            "terminal is plain (TERM=dumb)."
        ),
        parameters={
            **make_closed_object_schema(
                {
                    "id": _ID,
                    "cursor": {
                        "type": "integer",
                        "minimum": 0,
                        "description": "Position in bytes, as returned by a previous read. Default: the end of the last read",
                    },
                    "wait_ms": {
                        "type": "integer",
                        "minimum": 0,
                        "description": f"Maximum wait in milliseconds, at most {MAX_WAIT_MS}. Default: {DEFAULT_WAIT_MS}",
                    },
                    "lines": {
                        "type": "integer",
                        "minimum": 1,
                        "maximum": MOST_LINES,
                        "description": "Number of last lines to read. Default: all new output",
                    },
                },
                ["id"],
            ),
            "not": {"required": ["cursor", "lines"]},
        },
        side_effect="read",
        timeout_ms=MAX_WAIT_MS + 30_000,
        max_output=2 * MOST_BYTES,
        kind="read",
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        job = await runtime.jobs.get(args["id"])
        start = args["cursor"] if "cursor" in args else await runtime.terminals.track_read_position(job.id)
        await _wait_until_quiet(runtime, job, start, min(args.get("wait_ms", DEFAULT_WAIT_MS), MAX_WAIT_MS) / 1000)
        if (lines := args.get("lines")) is not None:
            found = await runtime.jobs.read_line_range(job.id, offset=-lines, count=lines)
        else:
            found = await runtime.jobs.read_output_bytes(job.id, cursor=start, max_bytes=MOST_BYTES)
        await runtime.terminals.track_read_position(job.id, found.cursor)
        answer: dict[str, object] = {"id": job.id, "text": found.text, "cursor": found.cursor}
        if found.skipped_bytes:
            answer["dropped_bytes"] = found.skipped_bytes
        if notes := await runtime.terminals.explain_failures(job.id, found.text):
            answer["notes"] = list(notes)
        job = await runtime.jobs.get(job.id)
        answer["state"] = job.state
        answer["has_more"] = found.cursor < job.output_bytes
        if job.has_ended:
            answer |= await _end_data(runtime, job)
        return answer


class TerminalResizeTool(Tool):
    job_argument = JobArgumentSpec("id", TERMINAL_START_ID, running=True)
    spec = _spec(
        id="terminal.resize",
        description="Change the width and height of a terminal session. The program in it is notified.",
        parameters=make_closed_object_schema(
            {"id": _ID, "columns": _COLUMNS, "rows": _ROWS}, ["id", "columns", "rows"]
        ),
        side_effect="write",
        idempotent=True,
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        job = await runtime.jobs.get(args["id"])
        if not await _wait_until_open(runtime, job):
            raise await _ended_error(runtime, job)
        await runtime.terminals.resize(job.id, args["columns"], args["rows"])
        return {"id": job.id, "columns": args["columns"], "rows": args["rows"]}


class TerminalStopTool(Tool):
    job_argument = JobArgumentSpec("id", TERMINAL_START_ID)
    spec = _spec(
        id="terminal.stop",
        description=(
            "Close a terminal session and end all programs in it. Returns its state; a terminal that has "
            "already ended is unchanged."
        ),
        parameters=make_closed_object_schema({"id": _ID}, ["id"]),
        side_effect="write",
        idempotent=True,
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        before = await runtime.jobs.get(args["id"])
        job = await runtime.jobs.stop(before.id)
        answer = {"id": job.id, **describe_stopped_job(before, job)}
        return answer | await _end_data(runtime, job) if before.has_ended else answer


async def _wait_until_open(runtime: Runtime, job: Job) -> bool:
    """Return whether a terminal is open. Waits for one that is about to open."""
    terminals = runtime.terminals
    while not await terminals.is_open(job.id):
        changes = await terminals.change_count()
        job = await runtime.jobs.get(job.id)
        if job.has_ended or job.is_suspended or await terminals.has_existed(job.id):
            return False
        await terminals.wait_for_change(changes, 0.05)  # the job may also end before a terminal opens
    return True


async def _wait_until_quiet(runtime: Runtime, job: Job, start: int, seconds: float) -> None:
    """Wait until a terminal has new output beyond ``start`` and pauses, or has ended.

    :param seconds: the longest wait
    """
    until, terminals = time.monotonic() + seconds, runtime.terminals
    while True:
        changes = await terminals.change_count()
        job = await runtime.jobs.get(job.id)
        if job.has_ended:
            return
        if await terminals.has_existed(job.id) and not await terminals.is_open(job.id):
            await runtime.jobs.wait(job.id, timeout_ms=_ENDING_MS)  # its result is being recorded
            return
        left = until - time.monotonic()
        if left <= 0:
            return
        if job.output_bytes <= start:
            await terminals.wait_for_change(changes, left if await terminals.is_open(job.id) else min(left, 0.05))
        elif not await terminals.wait_for_change(changes, min(left, _QUIET_S)):
            return


async def _ended_error(runtime: Runtime, job: Job) -> ToolError:
    job = await runtime.jobs.get(job.id)
    end = await _end_data(runtime, job)
    how = end.get("error") or f"exit code {end.get('exit_code')}"
    text = f"Terminal {job.id} has ended ({job.state}: {how}). Start another with {TERMINAL_START_ID}."
    return ToolError(text, kind="conflict")


async def _end_data(runtime: Runtime, job: Job) -> dict[str, object]:
    """Return how a terminal has ended."""
    result = await runtime.jobs.wait(job.id, timeout_ms=_ENDING_MS)
    if result is None:
        return {}
    if not result.ok:
        return {"error": result.error_text}
    given: Any = result.data
    return cast("dict[str, object]", given) if isinstance(given, dict) else {}


TERMINAL_TOOLS: tuple[Tool, ...] = (
    TerminalStartTool(),
    TerminalSendTool(),
    TerminalReadTool(),
    TerminalResizeTool(),
    TerminalStopTool(),
)
