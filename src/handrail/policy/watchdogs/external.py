"""Watchdogs that are commands: the call as JSON on stdin, the answer as JSON on stdout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, cast

from handrail.origins.programs import ProgramMissing, find_command, program_environment
from handrail.policy.rules.rules import ACTIONS
from handrail.policy.watchdogs.opinions import DEFAULT_TIMEOUT_MS, Opinion, WatchdogCall, call_as_json

MAX_ANSWER_BYTES = 64 * 1024
_DRAIN_S = 0.2
_FORM = '{"decision": "allow" | "deny" | "ask", "reason": "…"}'
_MARK = "HANDRAIL_WATCHDOG"


class ExternalWatchdog:
    """Runs ``argv`` for each call. It is the operator's own program: not sandboxed, in a process group of its own,
    with a small environment, and ended with all it started when its time is up.

    It reads one JSON object ``{tool_id, arguments, agent, tool, session_id, call_id, decision}`` and writes
    ``{"decision": "allow" | "deny" | "ask", "reason": "…"}``. Anything else, and any exit code but 0, is a deny.

    :param environment: variables to add
    :param cwd: the folder that it is started in; ``/`` where none is given
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        """:raises ValueError: for an empty argv"""
        if not argv or not argv[0]:
            raise ValueError("an external watchdog needs a command; write it as a list, as in ['/usr/local/bin/check']")
        self.argv = tuple(argv)
        self.timeout_ms = timeout_ms
        self.name = Path(argv[0]).name
        self._environment = dict(environment or {})
        self._cwd = cwd or "/"
        self._command: tuple[str, ...] | None = None

    def find(self) -> None:
        """Look its program up, once, outside of every open workspace. Each call does this again as long as there is none.

        :raises ProgramRefused: where it is a program that a call could change
        """
        if self._command is None:
            with contextlib.suppress(ProgramMissing):
                self._command = find_command(self.argv)

    async def __call__(self, call: WatchdogCall) -> Opinion:
        question = json.dumps(call_as_json(call), ensure_ascii=True, default=str).encode() + b"\n"
        mark = secrets.token_hex(16)
        command = self._command = self._command or find_command(self.argv)
        # Descriptors of our own rather than asyncio's pipes, whose wait() also waits for whoever still holds them.
        reader, writer = os.pipe()
        try:
            with _at_its_start(question) as stdin:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=stdin,
                    stdout=writer,
                    stderr=asyncio.subprocess.DEVNULL,
                    env={**program_environment(), **self._environment, _MARK: mark},
                    cwd=self._cwd,
                    start_new_session=True,
                )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            answer = await _read(process, reader)
            code = await process.wait()
        finally:
            await _end(process, mark)
        return _parsed(answer, code)


def _at_its_start(data: bytes) -> IO[bytes]:
    """``data`` as a file that has no name; a program may read as much of it as it likes."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("watchdog"), "w+b")
    else:  # not on every platform
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(data)
    file.seek(0)
    return file


async def _read(process: asyncio.subprocess.Process, descriptor: int) -> bytes:
    """Its output until it *exits*; a child that keeps the pipe open does not delay the answer."""
    stream = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    try:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    except BaseException:
        pipe.close()
        raise
    taken = bytearray()
    gone = asyncio.ensure_future(process.wait())
    reading: asyncio.Future[bytes] | None = None
    try:
        while len(taken) <= MAX_ANSWER_BYTES:
            reading = asyncio.ensure_future(stream.read(MAX_ANSWER_BYTES))
            await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                # It has exited: what it wrote is in the pipe, and a member of its group that holds it open goes too.
                _kill_group(process.pid)
                await asyncio.wait({reading}, timeout=_DRAIN_S)
            if not reading.done() or not (data := reading.result()):
                break
            taken += data
    finally:
        gone.cancel()
        if reading is not None:
            reading.cancel()
        transport.close()
    return bytes(taken)


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """Nothing of its group goes on. One that had to be stopped is searched for what left its group, too."""
    _kill_group(process.pid)
    if process.returncode is not None:
        return
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    await asyncio.shield(process.wait())


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _marked(mark: str) -> list[int]:
    """Processes started with this mark in their environment; the only trace a daemon that left its group still has."""
    wanted = f"{_MARK}={mark}".encode()
    found: list[int] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
    return found


def _parsed(answer: bytes, code: int) -> Opinion:
    if len(answer) > MAX_ANSWER_BYTES:  # nobody read the rest, which may be why it failed
        return Opinion("deny", f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
    if code != 0:
        return Opinion("deny", f"it ended with exit code {code}")
    try:
        # As pairs, since of two keys of one name the later would win unseen.
        said: object = json.loads(answer, object_pairs_hook=tuple)
        pairs = dict(cast("tuple[tuple[str, object], ...]", said)) if isinstance(said, tuple) else {}
        whole = isinstance(said, tuple) and len(pairs) == len(cast("tuple[object, ...]", said))
    except (ValueError, TypeError, RecursionError):
        return Opinion("deny", f"its answer is not JSON; expected {_FORM}")
    decision, reason = pairs.get("decision"), pairs.get("reason", "")
    if whole and set(pairs) <= {"decision", "reason"} and decision in ACTIONS and isinstance(reason, str):
        return Opinion(decision, reason)
    return Opinion("deny", f"its answer is not of the form {_FORM}")
