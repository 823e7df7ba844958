"""Watchdogs: the operator's hooks that check every call before it runs. They only narrow, and a failure means deny."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, Literal, cast

from handrail.contract.struct import Struct
from handrail.origins.program_lookup import ProgramNotFoundError, build_program_environment, resolve_command_program
from handrail.policy.call_evaluation import PolicyVerdict
from handrail.policy.findings import TraceStep
from handrail.policy.rules.rules_and_modes import ACTIONS, STRICTNESS, Action

# The input of a watchdog, and its possible answers.

DEFAULT_TIMEOUT_MS = 5_000


class WatchdogCall(Struct, frozen=True):
    """A call as a watchdog sees it.

    :param agent: the agent's manifest, as data
    :param tool: the tool's runtime view
    :param decision: the decision of capabilities and rules: ``allow`` or ``ask``
    :param targets: what the call would access, as capability and canonical value: a path, ``host[:port]`` or a command
    :param previous_failures: how often exactly this call has failed in the session since the last change by any call
    :param consecutive_failures: how many of these failures came after the last success of any other call
    """

    tool_id: str
    arguments: Mapping[str, Any]
    agent: Mapping[str, Any]
    tool: Mapping[str, Any]
    session_id: str
    call_id: str = ""
    decision: Action = "allow"
    targets: Sequence[tuple[str, str]] = ()
    previous_failures: int = 0
    consecutive_failures: int = 0


class WatchdogDecision(Struct, frozen=True):
    """The decision of a watchdog.

    :param reason: read by the model if the action is deny, and by the user if it is ask
    """

    action: Action
    reason: str = ""


def allow() -> WatchdogDecision:
    """Return a decision without an objection."""
    return WatchdogDecision("allow")


def deny(reason: str) -> WatchdogDecision:
    """Return a decision that makes the call fail. The model reads the reason."""
    return WatchdogDecision("deny", reason)


def ask(reason: str) -> WatchdogDecision:
    """Return a decision that requires approval by the user. A headless session denies the call."""
    return WatchdogDecision("ask", reason)


def serialize_watchdog_call(call: WatchdogCall) -> dict[str, Any]:
    """Return the call as the JSON object that an external watchdog reads."""
    return asdict(call)


# Watchdogs that are commands: the call as JSON on stdin, the answer as JSON on stdout.

MAX_ANSWER_BYTES = 64 * 1024
_DRAIN_S = 0.2
_FORM = '{"decision": "allow" | "deny" | "ask", "reason": "…"}'
_MARK = "HANDRAIL_WATCHDOG"


class ExternalWatchdog:
    """A watchdog that runs a command for each call.

    The command is the operator's own program. It runs unsandboxed, in its own process group and with a small environment. When
    its time is up, it is killed with everything that it started.

    It reads one JSON object ``{tool_id, arguments, agent, tool, session_id, call_id, decision}`` and writes
    ``{"decision": "allow" | "deny" | "ask", "reason": "…"}``. Any other output, and any exit code but 0, is a deny.

    :param environment: variables to add
    :param cwd: the working directory; default ``/``
    :raises ValueError: for an empty argv
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        environment: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> None:
        if not argv or not argv[0]:
            raise ValueError(
                "An external watchdog needs a command. Write it as a list, as in ['/usr/local/bin/check']."
            )
        self.argv = tuple(argv)
        self.timeout_ms = timeout_ms
        self.name = Path(argv[0]).name
        self._environment = dict(environment or {})
        self._cwd = cwd or "/"
        self._command: tuple[str, ...] | None = None

    def resolve_program(self) -> None:
        """Resolve the program once, outside every open workspace. Until this succeeds, each call tries again.

        :raises ProgramRefused: if a call could change the program
        """
        if self._command is None:
            with contextlib.suppress(ProgramNotFoundError):
                self._command = resolve_command_program(self.argv)

    async def __call__(self, call: WatchdogCall) -> WatchdogDecision:
        question = json.dumps(serialize_watchdog_call(call), ensure_ascii=True, default=str).encode() + b"\n"
        mark = secrets.token_hex(16)
        command = self._command = self._command or resolve_command_program(self.argv)
        # Own descriptors, because wait() with asyncio's pipes also waits for every process that holds them open.
        reader, writer = os.pipe()
        try:
            with _make_input_file(question) as stdin:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=stdin,
                    stdout=writer,
                    stderr=asyncio.subprocess.DEVNULL,
                    env={**build_program_environment(), **self._environment, _MARK: mark},
                    cwd=self._cwd,
                    start_new_session=True,
                )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            answer = await _read_until_exit(process, reader)
            code = await process.wait()
        finally:
            await _end_process(process, mark)
        return _parse_answer(answer, code)


def _make_input_file(data: bytes) -> IO[bytes]:
    """Return ``data`` as an anonymous file. A program may read as much of it as it likes."""
    if hasattr(os, "memfd_create"):
        file: IO[bytes] = os.fdopen(os.memfd_create("watchdog"), "w+b")
    else:  # not on every platform
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(data)
    file.seek(0)
    return file


async def _read_until_exit(process: asyncio.subprocess.Process, descriptor: int) -> bytes:
    """Return the output of a process until it *exits*.

    A child that keeps the pipe open does not delay this.
    """
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
                # The process has exited and its output is in the pipe. Kill the group members that hold the pipe open.
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


async def _end_process(process: asyncio.subprocess.Process, mark: str) -> None:
    """Kill the process group. If the process was still running, also kill what has left its group."""
    _kill_group(process.pid)
    if process.returncode is not None:
        return
    for pid in _find_marked_processes(mark):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    await asyncio.shield(process.wait())


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _find_marked_processes(mark: str) -> list[int]:
    """Return the processes that were started with this mark in their environment.

    The mark is the only trace of a daemon that has left its process group.
    """
    wanted = f"{_MARK}={mark}".encode()
    found: list[int] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
    return found


def _parse_answer(answer: bytes, code: int) -> WatchdogDecision:
    if len(answer) > MAX_ANSWER_BYTES:  # the rest was not read, which may be why the program failed
        return WatchdogDecision("deny", f"the answer of the program is longer than {MAX_ANSWER_BYTES} bytes")
    if code != 0:
        return WatchdogDecision("deny", f"the program ended with exit code {code}")
    try:
        # As pairs, because in a dict the later of two equal keys would win silently.
        parsed: object = json.loads(answer, object_pairs_hook=tuple)
        pairs = dict(cast("tuple[tuple[str, object], ...]", parsed)) if isinstance(parsed, tuple) else {}
        whole = isinstance(parsed, tuple) and len(pairs) == len(cast("tuple[object, ...]", parsed))
    except (ValueError, TypeError, RecursionError):
        return WatchdogDecision("deny", f"the answer of the program is not JSON; expected {_FORM}")
    decision, reason = pairs.get("decision"), pairs.get("reason", "")
    if whole and set(pairs) <= {"decision", "reason"} and decision in ACTIONS and isinstance(reason, str):
        return WatchdogDecision(decision, reason)
    return WatchdogDecision("deny", f"the answer of the program is not of the form {_FORM}")


WatchdogAnswer = WatchdogDecision | Literal["allow"]
Watchdog = Callable[[WatchdogCall], WatchdogAnswer | Awaitable[WatchdogAnswer]]
"""A function, sync (run in a thread) or async, or an object such as :class:`ExternalWatchdog`.

An async watchdog runs on the kernel's event loop. If it computes or blocks without awaiting, it stops every call of the
process, and its own time-out. Write such a watchdog as a plain function.

A watchdog gets a copy of the arguments, so it cannot change them. Optional attributes:

- ``timeout_ms`` replaces the default of 5 s.
- ``concerns(spec)`` returns whether the watchdog checks calls of a tool. It is called once for each tool.
- ``after_failures``, if true, limits the watchdog to calls that have failed before.
"""


async def apply_watchdogs(
    verdict: PolicyVerdict, watchdogs: Sequence[Watchdog], call: WatchdogCall, redact: Callable[[str], str] = str
) -> PolicyVerdict:
    """Ask each watchdog in order until one denies. The strictest decision counts.

    The verdict's own decision is one of them.

    :param redact: removes secrets from a text before it is cut, because a secret that is cut is not found
    """
    for watchdog in watchdogs:
        name = watchdog_name(watchdog)
        opinion = await _ask_within_timeout(watchdog, call, redact)
        reason = opinion.reason.strip()
        step = TraceStep("watchdog", opinion.action, f"{name}: {reason}" if reason else name)
        if STRICTNESS[opinion.action] <= STRICTNESS[verdict.action]:
            verdict = verdict.with_trace_note(step)
            continue
        verb = "denied this call of" if opinion.action == "deny" else "requires approval for this call of"
        text = f"The watchdog {name} {verb} {call.tool_id}: {reason.rstrip('.') or 'no reason given'}."
        verdict = verdict.narrow(opinion.action, text, step)
        if opinion.action == "deny":
            break
    return verdict


def watchdog_name(watchdog: Watchdog) -> str:
    """Return the name of a watchdog for messages."""
    name: object = getattr(watchdog, "name", None) or getattr(watchdog, "__name__", None)
    return str(name) if name else type(watchdog).__name__


async def _ask_within_timeout(watchdog: Watchdog, call: WatchdogCall, redact: Callable[[str], str]) -> WatchdogDecision:
    timeout_ms = float(getattr(watchdog, "timeout_ms", DEFAULT_TIMEOUT_MS))
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            return await ask_watchdog_without_timeout(watchdog, call, redact)
    except TimeoutError:
        return deny(f"the watchdog did not answer within {timeout_ms:g} ms")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return deny("the watchdog cancelled itself")
    except (Exception, SystemExit) as error:  # any failure of a watchdog is a deny
        return deny(f"the watchdog failed ({type(error).__name__}: {redact(str(error))[:300]})")


async def ask_watchdog_without_timeout(
    watchdog: Watchdog, call: WatchdogCall, redact: Callable[[str], str] = str
) -> WatchdogDecision:
    """Ask one watchdog, without a time limit. Exceptions propagate; an invalid answer is a deny."""
    own = replace(call, arguments=copy.deepcopy(dict(call.arguments)))
    return _validate_watchdog_answer(await _call_watchdog(watchdog, own), watchdog_name(watchdog), redact)


async def _call_watchdog(watchdog: Watchdog, call: WatchdogCall) -> object:
    function = watchdog if inspect.isroutine(watchdog) else cast("Any", watchdog).__call__
    if inspect.iscoroutinefunction(function):
        return await cast("Awaitable[object]", watchdog(call))
    answer = await _call_in_thread(watchdog, call)
    return await answer if inspect.isawaitable(answer) else answer


async def _call_in_thread(watchdog: Watchdog, call: WatchdogCall) -> object:
    """Call a watchdog in its own thread.

    A watchdog that never returns takes no worker from others and does not delay the shutdown.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[object] = loop.create_future()

    def settle(answer: object, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(answer) if error is None else done.set_exception(error)

    def run() -> None:
        answer: object = None
        failure: BaseException | None = None
        try:
            answer = watchdog(call)
        except BaseException as error:  # the waiting task turns it into a deny
            failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the loop has ended, so no task waits any more
            loop.call_soon_threadsafe(settle, answer, failure)

    threading.Thread(target=run, name=f"watchdog {watchdog_name(watchdog)}", daemon=True).start()
    return await done


def _validate_watchdog_answer(answer: object, name: str, redact: Callable[[str], str]) -> WatchdogDecision:
    """Return the answer if it is valid. Any other value, None included, is a deny."""
    if answer == "allow":
        return allow()
    if (
        isinstance(answer, WatchdogDecision)
        and answer.action in STRICTNESS
        and isinstance(cast("object", answer.reason), str)
    ):
        return answer
    shown = repr(redact(answer)) if isinstance(answer, str) else redact(repr(answer))
    return deny(f"{name} answered {shown[:200]}; expected one of allow(), deny(reason), ask(reason)")


__all__ = [
    "ExternalWatchdog",
    "Watchdog",
    "WatchdogAnswer",
    "WatchdogCall",
    "WatchdogDecision",
    "allow",
    "apply_watchdogs",
    "ask",
    "ask_watchdog_without_timeout",
    "deny",
    "watchdog_name",
]
