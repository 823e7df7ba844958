"""Executable tools that stay up between calls, which saves their start-up on each call.

The protocol: one JSON object per line, in both directions, one call at a time. While a call waits for a client's answer,
others go to further processes of the same tool.

- to stdin: ``{"id": "…", "arguments": {…}}``
- from stdout: ``{"id": "…", "result": …}``, or ``{"id": "…", "error": "…"}`` with a text or
  ``{"text": "…", "kind": "failed", "data": …}``
- before that any number of messages, described above :class:`ProgramCallMessages`

The process is started for the first call, in a sandbox of the tool's own set that belongs to the source. It ends when no
generation contains the tool any more; the same tool with the same files continues in the next generation. It reaches hosts
only during a call, and only those that this call may reach. A cancelled call, or an answer that breaks the protocol, ends the
process, and the next call starts another. If starts answer no call, the next one waits a little longer, up to a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from handrail.contract.errors import ToolError
from handrail.contract.result_conversions import convert_envelope_to_result
from handrail.contract.sandbox_protocol import ConnectionAttempt, Process, ProgramSpec, SandboxProfile
from handrail.contract.services.client_services import (
    CLIENT_REQUEST_KINDS,
    LOG_LEVELS,
    METHOD_CAPABILITIES,
    ClientMethod,
    RequestToClient,
)
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.text.strict_json import InvalidJsonTextError, parse_json_object
from handrail.contract.tool.spec import ToolSpec
from handrail.registry.sources.executable_tools import (
    MAX_ANSWER_BYTES,
    MAX_ANSWER_DEPTH,
    PerCallExecutableTool,
    ToolConfinement,
    describe_exit,
    encode_json_line,
    spell_paths_as_on_disk,
)
from handrail.runtime.guard.guarded_sandbox import GuardedProcess, ProtectedPathViolation

# Messages to and from a persistent tool during a call: one JSON object per line.
#
# From the program, each with the call's id:
#
# - ``{"id": "…", "progress": {"done", "total", "fraction", "message"}}``, each of them optional
# - ``{"id": "…", "log": {"level", "data", "logger"?}}``
# - ``{"id": "…", "ask": {KEY: {"method", "params"}, …}}``, requests to the client; the program waits for the next line
# - ``{"id": "…", "detach": true}``: the client may close its connection
#
# To the program: ``{"id": "…", "answers": {KEY: …}}``, or ``{"id": "…", "rejected": "why"}``.
#
# If the tool's manifest requires any, the call itself lists under ``offers`` the requests that its client answers.

MAX_CALL_MESSAGES = 100_000
"""The most messages of one call."""
MAX_CALL_MESSAGE_BYTES = 64 * 1024 * 1024
"""The most bytes of all messages of one call."""
_MESSAGES_PER_TURN = 64
"""The number of messages after which other tasks of the event loop get a turn."""
_FIGURES = ("done", "total", "fraction")
_CLIENT_CAPABILITIES = frozenset(METHOD_CAPABILITIES.values())
MESSAGE_KINDS = ("progress", "log", "ask", "detach")


class ProgramCallMessages:
    """The messages of one call before its answer.

    :param exit: done when the program ends, which stops pending requests to the client
    """

    def __init__(self, runtime: Runtime, exit: asyncio.Future[int]) -> None:
        self._runtime = runtime
        self._exit = exit
        self._said = 0
        self._bytes = 0
        self.has_asked = False
        """Whether the client received a request of this call. Such a call is not run again after a crash."""

    async def handle(self, message: Mapping[str, Any], size: int) -> dict[str, Any] | None:
        """Handle one message and return the reply to the program, if it waits for one.

        The reply is None too if the program has ended meanwhile.

        :param size: the size of the message in bytes
        :raises ToolError: ``limit`` for too many messages, ``backend`` for an invalid one
        """
        self._said += 1
        self._bytes += size
        if self._said > MAX_CALL_MESSAGES or self._bytes > MAX_CALL_MESSAGE_BYTES:
            raise ToolError(
                f"The tool sent too many messages during one call. The limit is {MAX_CALL_MESSAGES:,} messages or "
                f"{MAX_CALL_MESSAGE_BYTES:,} bytes. Call it with a smaller task, or ask the user to fix the tool.",
                kind="limit",
            )
        if not self._said % _MESSAGES_PER_TURN:
            await asyncio.sleep(0)
        if "ask" in message:
            return await self._ask_client(message["ask"])
        if "progress" in message:
            self._progress(_require_object(message["progress"], "progress"))
        elif "log" in message:
            self._log(_require_object(message["log"], "log"))
        elif message["detach"] is True:
            self._runtime.client.detach()
        return None

    def _progress(self, fields: Mapping[str, Any]) -> None:
        figures: dict[str, Any] = {name: fields.get(name) for name in _FIGURES}
        message: Any = fields.get("message", "")
        if not isinstance(message, str) or any(
            one is not None and (isinstance(one, bool) or not isinstance(one, (int, float))) for one in figures.values()
        ):
            raise _invalid_message(
                "`progress` has numbers in `done`, `total` and `fraction`, and a string in `message`"
            )
        self._runtime.report_progress(message, **figures)

    def _log(self, fields: Mapping[str, Any]) -> None:
        level: Any = fields.get("level")
        logger: Any = fields.get("logger")
        if level not in LOG_LEVELS or "data" not in fields or not (logger is None or isinstance(logger, str)):
            raise _invalid_message(
                f"`log` has a `level` ({', '.join(LOG_LEVELS)}), `data`, and optionally a string in `logger`"
            )
        self._runtime.log(level, fields["data"], logger)

    async def _ask_client(self, asks: object) -> dict[str, Any] | None:
        try:
            put = _parse_asked_requests(asks)
        except ToolError as error:
            return {"rejected": error.text}
        self.has_asked = True
        asking = asyncio.ensure_future(self._runtime.client.send_requests(put))
        try:
            await asyncio.wait((asking, self._exit), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return None
            return {"answers": dict(asking.result())}
        except ToolError as error:
            return {"rejected": error.text}
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait((asking,))


def list_supported_client_requests(spec: ToolSpec, runtime: Runtime) -> list[ClientMethod] | None:
    """Return the requests that a tool may send and its client answers; None for a tool that sends none."""
    if _CLIENT_CAPABILITIES.isdisjoint(spec.requires.capabilities):
        return None
    peer = runtime.client
    return list(
        dict.fromkeys(method for method, params in CLIENT_REQUEST_KINDS.values() if peer.supports(method, params))
    )


def _parse_asked_requests(asks: object) -> dict[str, RequestToClient]:
    """Return the requests in the ``ask`` of a message.

    :raises ToolError: if they are invalid; their number and size are checked later
    """
    if not isinstance(asks, Mapping):
        raise _invalid_message("`ask` is an object with one request under each key")
    found: dict[str, RequestToClient] = {}
    for key, one in cast("Mapping[str, Any]", asks).items():
        request_fields = _require_object(one, "a request in `ask`")
        method: Any = request_fields.get("method")
        params: Any = request_fields.get("params", {})
        if not isinstance(method, str) or method not in METHOD_CAPABILITIES or not isinstance(params, Mapping):
            raise ToolError(
                f"Request {key[:80]!r} is invalid. Expected a `method` ({', '.join(METHOD_CAPABILITIES)}) and an "
                "object `params`."
            )
        found[key] = RequestToClient(cast("ClientMethod", method), cast("Mapping[str, Any]", params))
    return found


def _require_object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _invalid_message(f"{what} is an object")
    return cast("Mapping[str, Any]", value)


def _invalid_message(expected: str) -> ToolError:
    return ToolError(
        f"The tool sent an invalid message during the call. Expected: {expected}. Continue without "
        "this tool, or ask the user to fix it.",
        kind="backend",
    )


BACKOFF_MS: Sequence[int] = (0, 100, 500, 2_000, 5_000)
"""The delay before a start, by the number of starts in a row that answered no call; the last value repeats."""
MAX_EXTRA_PROCESSES = 16
"""The most additional processes of one tool, for calls that arrive while others wait for a client."""
_REAPING_S = 0.5
_MOST_SHOWN = 8
_LINE_KINDS = ("result", "error", *MESSAGE_KINDS)


class _ProcessCrashed(Exception):
    """The process ended during a call.

    :param may_repeat: whether the client received no request of this call
    """

    def __init__(self, how: str, *, may_repeat: bool = True) -> None:
        super().__init__(how)
        self.may_repeat = may_repeat


class PersistentProcessTool(PerCallExecutableTool):
    """A program that stays running and receives one call after another."""

    def __init__(
        self,
        spec: ToolSpec,
        executable: str,
        folder: str,
        confinement: ToolConfinement,
        *,
        backoff_ms: Sequence[int] = BACKOFF_MS,
        digest: bytes | None = None,
    ) -> None:
        super().__init__(spec, executable, folder, confinement)
        self._digest = digest
        self._backoff_ms = backoff_ms
        self._beside: list[PersistentProcessTool] | None = []
        """Additional processes, for calls that arrive while this one waits for a client; None in such a process."""
        self._reset()

    def has_equivalent_process(self, other: PersistentProcessTool) -> bool:
        """Return whether the processes of both tools are interchangeable."""
        return (
            type(self) is type(other)
            and not self._closed
            and self._digest is not None
            and self._digest == other._digest
            and self.spec == other.spec
            and (self.executable, self.folder) == (other.executable, other.folder)
            and self.confinement is other.confinement
        )

    def _reset(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._asking = asyncio.Event()
        """Set while the call of this process waits for a client, for an unknown time."""
        self._process: Process | None = None
        self._exit: asyncio.Task[int] | None = None
        self._fruitless = 0
        self._closed = False
        self._behalf: SandboxProfile | None = None
        """The profile of the present call."""

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        """Run the tool in its process and return the result.

        If the process crashes during the call, a reading or idempotent tool is tried once more.

        :raises ToolError: ``interrupted`` if the process crashed and the effect of the call is unknown
        """
        if (other := await self._choose_instance()) is not self:
            return await other.execute(args, runtime)
        try:
            self._behalf = self.confinement.profile_for(runtime)
            return await self._attempt_call(args, runtime)
        finally:
            self._behalf = None
            self._one_at_a_time.release()

    async def _choose_instance(self) -> PersistentProcessTool:
        """Return the process for the next call: this one, unless its present call waits for a client."""
        if not self._one_at_a_time.locked() or self._beside is None:
            await self._one_at_a_time.acquire()
            return self
        turn = asyncio.ensure_future(self._one_at_a_time.acquire())
        asking = asyncio.ensure_future(self._asking.wait())
        mine = False
        try:
            await asyncio.wait((turn, asking), return_when=asyncio.FIRST_COMPLETED)
            mine = turn.done()
        finally:
            asking.cancel()
            if not mine and turn.done() and not turn.cancelled():
                self._one_at_a_time.release()  # granted too late, since this caller was cancelled
            turn.cancel()
        return self if mine else self._add_instance(self._beside)

    def _add_instance(self, beside: list[PersistentProcessTool]) -> PersistentProcessTool:
        for other in beside:
            if not other._one_at_a_time.locked():
                return other
        if len(beside) == MAX_EXTRA_PROCESSES:
            beside.append(beside.pop(0))
            return beside[-1]
        other = copy.copy(self)
        other._beside = None
        other._reset()
        beside.append(other)
        return other

    async def _attempt_call(self, args: dict[str, Any], runtime: Runtime) -> object:
        given = self.build_program_input(await spell_paths_as_on_disk(self.spec, args, runtime), runtime)
        try:
            return await self._exchange(runtime, given)
        except _ProcessCrashed as crash:
            if not (crash.may_repeat and (self.spec.idempotent or self.spec.side_effect == "read")):
                raise ToolError(
                    f"The tool stopped during this call: {crash}. The effect of the call is unknown. Check the "
                    "current state before you call the tool again.",
                    kind="interrupted",
                ) from None
        try:
            return await self._exchange(runtime, given)
        except _ProcessCrashed as crash:
            raise ToolError(
                f"The tool stopped twice during this call: {crash}. Do not call it again with these "
                "arguments. Ask the user to check the tool.",
                kind="backend",
            ) from None

    async def aclose(self) -> None:
        self._closed = True
        await asyncio.gather(self._stop_process(), *(other.aclose() for other in self._beside or ()))

    async def _exchange(self, runtime: Runtime, args: dict[str, Any]) -> object:
        process = await self._ensure_process(runtime.config)
        assert self._exit is not None
        call_id = runtime.call_id
        sent: dict[str, Any] = {"id": call_id, "arguments": args}
        if (offered := list_supported_client_requests(self.spec, runtime)) is not None:
            sent["client_requests"] = offered
        kept = False
        guarded = process if isinstance(process, GuardedProcess) else None
        if guarded is not None and (appeared := await guarded.begin_call(call_id)):
            raise ToolError(
                f"{self.spec.id} was not called. Since its last call, files were created or changed where no program can "
                f"write: {'; '.join(appeared[:_MOST_SHOWN])}. The tool or another program did that. Ask the user to check "
                "them; the next call accepts the current state.",
                kind="conflict",
            )
        try:
            await process.write(encode_json_line(sent) + b"\n")
            answer = await self._read_answer(process, call_id, ProgramCallMessages(runtime, self._exit))
            if guarded is not None:
                await _raise_for_changed_names(guarded, answer)
            kept = True
        finally:
            if not kept:
                await self._stop_process()
        self._fruitless = 0
        if "error" in answer:
            return convert_envelope_to_result(_to_error_envelope(answer["error"]))
        found: Any = answer["result"]
        return self.parse_program_answer(cast("dict[str, Any]", found)) if isinstance(found, dict) else found

    async def _read_answer(self, process: Process, call_id: str, midway: ProgramCallMessages) -> dict[str, Any]:
        """Read the answer to a call, and handle the messages before it."""
        while True:
            line = await process.read_line(MAX_ANSWER_BYTES)
            if not line.endswith(b"\n"):
                raise _ProcessCrashed(await self._describe_ending(), may_repeat=not midway.has_asked)
            answer = _parse_answer(line, call_id)
            if "result" in answer or "error" in answer:
                return answer
            if "ask" in answer:
                self._asking.set()
            try:
                handled = await midway.handle(answer, len(line))
            finally:
                self._asking.clear()
            if handled is not None:
                await process.write(encode_json_line({"id": call_id, **handled}) + b"\n")

    async def _ensure_process(self, config: Mapping[str, str]) -> Process:
        if self._closed:
            raise ToolError(
                f"{self.spec.id} is no longer available: its source was closed. Continue without it.",
                kind="unavailable",
            )
        if self._process is not None and self._exit is not None and not self._exit.done():
            return self._process
        await self._stop_process()
        delay_ms = self._backoff_ms[min(self._fruitless, len(self._backoff_ms) - 1)]
        if delay_ms:
            await asyncio.sleep(delay_ms / 1000)
        capabilities, profile = self.confinement.tool_profile(self.spec)
        callers = () if self._behalf is None else self._behalf.callers
        profile = replace(profile, check_host=self._check_connection, on_attempt=self._report_attempt, callers=callers)
        self._fruitless += 1  # reset when a call is answered
        process = await self.confinement.sandbox.start(
            capabilities, self.adapt_profile(profile, {}, config), ProgramSpec(self.command)
        )
        self._process = process
        self._exit = asyncio.create_task(process.wait(), name=f"{self.spec.id}: exit")
        return process

    def _check_connection(self, host: str, port: int) -> str | None:
        """Return the reason why the present call may not reach a host, or None."""
        behalf = self._behalf
        if behalf is None:
            return f"{self.spec.id} is not running a call, and can reach hosts only during a call."
        if behalf.check_host is None:
            return f"The current call of {self.spec.id} cannot reach any host."
        return behalf.check_host(host, port)

    def _report_attempt(self, attempt: ConnectionAttempt) -> None:
        if self._behalf is not None and self._behalf.on_attempt is not None:
            self._behalf.on_attempt(attempt)

    async def _describe_ending(self) -> str:
        """Return how a process ended that closed its stdout."""
        assert self._exit is not None
        done, _ = await asyncio.wait({self._exit}, timeout=_REAPING_S)
        return describe_exit(self._exit.result()) if done else "the program closed its stdout"

    async def _stop_process(self) -> None:
        process, exit_, self._process, self._exit = self._process, self._exit, None, None
        if process is not None:
            await process.kill()
        if exit_ is not None:
            exit_.cancel()
            with contextlib.suppress(asyncio.CancelledError, ToolError):
                await exit_


async def _raise_for_changed_names(process: GuardedProcess, answer: dict[str, Any]) -> None:
    """Check the protected names after a call.

    :raises ToolError: ``denied`` if the call changed a protected name; the data has the answer
    """
    try:
        await process.end_call()
    except ProtectedPathViolation as veto:
        raise ToolError(veto.text, kind="denied", data={"answer": answer.get("result", answer.get("error"))}) from None


def _parse_answer(line: bytes, call_id: str) -> dict[str, Any]:
    try:
        answer = parse_json_object(
            line, what="the contents of its answer", max_bytes=MAX_ANSWER_BYTES, max_depth=MAX_ANSWER_DEPTH
        )
    except InvalidJsonTextError as error:
        raise ToolError(
            f"The tool sent an invalid answer: {error}. Expected one JSON object per line on stdout, and "
            "log lines on stderr. Ask the user to fix the tool.",
            kind="backend",
        ) from None
    if answer.get("id") != call_id or len(answer) != 2 or not any(way in answer for way in _LINE_KINDS):
        raise ToolError(
            'The tool sent an invalid answer. Expected {"id": <the id of the call>, "result": …} or '
            f'{{"id": …, "error": …}}, after messages with {", ".join(MESSAGE_KINDS)} if any. Ask the user to '
            "repair the tool.",
            kind="backend",
        )
    return answer


def _to_error_envelope(error: object) -> dict[str, Any]:
    if not isinstance(error, Mapping):
        return {"type": "error", "error_text": error}
    fields = cast("Mapping[str, Any]", error)
    return {
        "type": "error",
        "error_text": fields.get("text", fields.get("message")),
        "data": fields.get("data"),
        "metadata": {"error_kind": fields.get("kind")},
    }


# A fingerprint of a persistent program, which shows whether a start now would run a different program.

MAX_DIGEST_FILES = 1_000
MAX_DIGEST_BYTES = 64 * 1024 * 1024
_PIECE = 1 << 20


class _DigestLimitExceeded(Exception):
    """The files exceed the limits of a fingerprint."""


def fingerprint_program_files(executable: Path, folder: Path, *, own: bool) -> bytes | None:
    """Return a hash of the program and the files that it may load, or None if that is not possible.

    :param folder: the canonical folder that the program sees
    :param own: whether this tool alone uses the folder, so that every file in it counts; otherwise, only files next to the
        program count that are neither manifests nor programs
    """
    found, left = hashlib.sha256(), MAX_DIGEST_BYTES
    try:
        for number, path in enumerate((executable, *(_walk_tool_folder(folder) if own else _list_neighbours(folder)))):
            if number > MAX_DIGEST_FILES:
                raise _DigestLimitExceeded
            found.update(os.fsencode(path) + b"\0")
            left -= _hash_file_or_link(found, path, left)
    except (OSError, _DigestLimitExceeded):
        return None
    return found.digest()


def _walk_tool_folder(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        linked = (name for name in folders if Path(parent, name).is_symlink())
        yield from (Path(parent, name) for name in sorted((*files, *linked)))


def _list_neighbours(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(".") and path.suffix != ".json":
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and not mode & 0o111):
                yield path


def _hash_file_or_link(found: hashlib._Hash, path: Path, most: int) -> int:  # pyright: ignore[reportPrivateUsage]
    """Add the content of a file, or the target of a link, to a hash, and return the size in bytes."""
    if path.is_symlink():
        found.update(os.fsencode(path.readlink()) + b"\0")
        return 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or size > most:
            raise _DigestLimitExceeded
        found.update(f"{size}\0".encode())
        read = 0
        while piece := file.read(_PIECE):
            read += len(piece)
            if read > most:
                raise _DigestLimitExceeded
            found.update(piece)
    return read
