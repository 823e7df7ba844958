"""Executable tools that stay up between calls, which saves their start-up on each call.

The protocol: one JSON object per line, in both directions, one call at a time. While a call waits for a client's answer,
others go to further processes of the same tool.

- to stdin: ``{"id": "…", "arguments": {…}}``
- from stdout: ``{"id": "…", "result": …}``, or ``{"id": "…", "error": "…"}`` with a text or
  ``{"text": "…", "kind": "failed", "data": …}``
- before that any number of messages, described above :class:`Midway`

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

from handrail.contract.doors.peer import ASK_KINDS, CAPABILITY_OF, LOG_LEVELS, Ask, AskMethod
from handrail.contract.doors.runtime import Runtime
from handrail.contract.envelopes import from_envelope
from handrail.contract.errors import ToolError
from handrail.contract.sandbox import Attempt, Process, Profile, Program
from handrail.contract.text.json import ArgumentText, parse_object
from handrail.contract.tool.spec import ToolSpec
from handrail.registry.sources.executables import (
    MAX_ANSWER_BYTES,
    MAX_ANSWER_DEPTH,
    Confinement,
    ExecutableTool,
    as_json,
    ending,
)
from handrail.runtime.guard.guard import GuardedProcess, Vetoed

# Messages to and from a persistent tool during a call: one JSON object per line.
#
# From the program, each with the call's id:
#
# - ``{"id": "…", "progress": {"done", "total", "fraction", "message"}}``, the known ones of these
# - ``{"id": "…", "log": {"level", "data", "logger"?}}``
# - ``{"id": "…", "ask": {KEY: {"method", "params"}, …}}`` of the frontend's client; the program waits for the next line
# - ``{"id": "…", "let_go": true}``: the client may close its connection
#
# To the program: ``{"id": "…", "answers": {KEY: …}}``, or ``{"id": "…", "refused": "why"}``.
#
# If the tool's manifest requires any, the call itself lists under ``offers`` the requests that its client answers.

MOST_SAID = 100_000
"""Messages in the middle of one call."""
MAX_SAID_BYTES = 64 * 1024 * 1024
"""Of all of them together."""
_A_TURN = 64
"""Messages after which others have their turn on the event loop."""
_FIGURES = ("done", "total", "fraction")
_OF_CLIENTS = frozenset(CAPABILITY_OF.values())
WAYS = ("progress", "log", "ask", "let_go")


class Midway:
    """One call's messages before its answer.

    :param exit: ends when the program does, whose client is then asked no more
    """

    def __init__(self, runtime: Runtime, exit: asyncio.Future[int]) -> None:
        self._runtime = runtime
        self._exit = exit
        self._said = 0
        self._bytes = 0
        self.has_asked = False
        """What it asked was answered by somebody, who is not asked the same again."""

    async def heard(self, message: Mapping[str, Any], size: int) -> dict[str, Any] | None:
        """Heed one message. Gives what the program is told, where it waits for that; None too where it has ended meanwhile.

        :param size: of it, in bytes
        :raises ToolError: ``limit`` for too many, ``backend`` for what is none
        """
        self._said += 1
        self._bytes += size
        if self._said > MOST_SAID or self._bytes > MAX_SAID_BYTES:
            raise ToolError(
                f"it said more than {MOST_SAID:,} things, or {MAX_SAID_BYTES:,} bytes, in the middle of one call",
                kind="limit",
            )
        if not self._said % _A_TURN:
            await asyncio.sleep(0)
        if "ask" in message:
            return await self._asked(message["ask"])
        if "progress" in message:
            self._progress(_an_object(message["progress"], "progress"))
        elif "log" in message:
            self._log(_an_object(message["log"], "log"))
        elif message["let_go"] is True:
            self._runtime.peer.let_go()
        return None

    def _progress(self, told: Mapping[str, Any]) -> None:
        figures: dict[str, Any] = {name: told.get(name) for name in _FIGURES}
        said: Any = told.get("message", "")
        if not isinstance(said, str) or any(
            one is not None and (isinstance(one, bool) or not isinstance(one, (int, float))) for one in figures.values()
        ):
            raise _odd("progress has done, total and fraction as numbers, and message as text")
        self._runtime.progress(said, **figures)

    def _log(self, told: Mapping[str, Any]) -> None:
        level: Any = told.get("level")
        logger: Any = told.get("logger")
        if level not in LOG_LEVELS or "data" not in told or not (logger is None or isinstance(logger, str)):
            raise _odd(f"log has a level ({', '.join(LOG_LEVELS)}), data, and logger as text if any")
        self._runtime.log(level, told["data"], logger)

    async def _asked(self, asks: object) -> dict[str, Any] | None:
        try:
            put = _asks(asks)
        except ToolError as error:
            return {"refused": error.text}
        self.has_asked = True
        asking = asyncio.ensure_future(self._runtime.peer.ask(put))
        try:
            await asyncio.wait((asking, self._exit), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return None
            return {"answers": dict(asking.result())}
        except ToolError as error:
            return {"refused": error.text}
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait((asking,))


def offered_to(spec: ToolSpec, runtime: Runtime) -> list[AskMethod] | None:
    """Which requests a tool may make, and its client answers; None for a tool that makes none."""
    if _OF_CLIENTS.isdisjoint(spec.requires.capabilities):
        return None
    peer = runtime.peer
    return list(dict.fromkeys(method for method, params in ASK_KINDS.values() if peer.offers(method, params)))


def _asks(asks: object) -> dict[str, Ask]:
    """:raises ToolError: for what are no requests; how many and how large is judged where they are made"""
    if not isinstance(asks, Mapping):
        raise _odd("ask is an object: a request under each key")
    found: dict[str, Ask] = {}
    for key, one in cast("Mapping[str, Any]", asks).items():
        told = _an_object(one, "a request")
        method: Any = told.get("method")
        params: Any = told.get("params", {})
        if not isinstance(method, str) or method not in CAPABILITY_OF or not isinstance(params, Mapping):
            raise ToolError(f"{key[:80]!r} is no request: a method ({', '.join(CAPABILITY_OF)}) and its params")
        found[key] = Ask(cast("AskMethod", method), cast("Mapping[str, Any]", params))
    return found


def _an_object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _odd(f"{what} is an object")
    return cast("Mapping[str, Any]", value)


def _odd(expected: str) -> ToolError:
    return ToolError(f"it said what cannot be read in the middle of its call: {expected}", kind="backend")


BACKOFF_MS: Sequence[int] = (0, 100, 500, 2_000, 5_000)
"""How long a start waits after so many in a row that never answered a call; the last holds from there on."""
MOST_BESIDE = 16
"""Further processes of one tool, while the calls of others wait for a client."""
_REAPING_S = 0.5
_MOST_SHOWN = 8
_WAYS = ("result", "error", *WAYS)


class _Crashed(Exception):
    """The process ended while it had a call.

    :param may_repeat: nobody was asked anything on the call's behalf
    """

    def __init__(self, how: str, *, may_repeat: bool = True) -> None:
        super().__init__(how)
        self.may_repeat = may_repeat


class PersistentTool(ExecutableTool):
    """A program that is kept running and given one call after another."""

    def __init__(
        self,
        spec: ToolSpec,
        executable: str,
        folder: str,
        confinement: Confinement,
        *,
        backoff_ms: Sequence[int] = BACKOFF_MS,
        digest: bytes | None = None,
    ) -> None:
        super().__init__(spec, executable, folder, confinement)
        self._digest = digest
        self._backoff_ms = backoff_ms
        self._beside: list[PersistentTool] | None = []
        """Further processes of the same, for calls that come while this one waits for a client; None for one of these."""
        self._begin_anew()

    def same_as(self, other: PersistentTool) -> bool:
        """Whether its processes are as good as those of ``other`` would be."""
        return (
            type(self) is type(other)
            and not self._closed
            and self._digest is not None
            and self._digest == other._digest
            and self.spec == other.spec
            and (self.executable, self.folder) == (other.executable, other.folder)
            and self.confinement is other.confinement
        )

    def _begin_anew(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._asking = asyncio.Event()
        """Set while its call waits for a client, and nobody knows for how long."""
        self._process: Process | None = None
        self._exit: asyncio.Task[int] | None = None
        self._fruitless = 0
        self._closed = False
        self._behalf: Profile | None = None
        """The profile of the call that it has now."""

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        """As the base class says; a crash in the middle is ``interrupted`` (nobody knows what was done),
        except that a reading or idempotent tool is tried once more."""
        if (other := await self._free()) is not self:
            return await other.execute(args, runtime)
        try:
            self._behalf = self.confinement.profile_for(runtime)
            return await self._attempted(args, runtime)
        finally:
            self._behalf = None
            self._one_at_a_time.release()

    async def _free(self) -> PersistentTool:
        """Whoever takes the next call: this one, whose turn it is then, unless the call that it has waits for a client."""
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
                self._one_at_a_time.release()  # it came, and nobody is there to take it
            turn.cancel()
        return self if mine else self._another(self._beside)

    def _another(self, beside: list[PersistentTool]) -> PersistentTool:
        for other in beside:
            if not other._one_at_a_time.locked():
                return other
        if len(beside) == MOST_BESIDE:
            beside.append(beside.pop(0))
            return beside[-1]
        other = copy.copy(self)
        other._beside = None
        other._begin_anew()
        beside.append(other)
        return other

    async def _attempted(self, args: dict[str, Any], runtime: Runtime) -> object:
        given = self.payload(args, runtime)
        try:
            return await self._exchange(runtime, given)
        except _Crashed as crash:
            if not (crash.may_repeat and (self.spec.idempotent or self.spec.side_effect == "read")):
                raise ToolError(
                    f"{crash} in the middle of this call; what it had done by then is unknown. "
                    "Look at the state of things before you call it again",
                    kind="interrupted",
                ) from None
        try:
            return await self._exchange(runtime, given)
        except _Crashed as crash:
            raise ToolError(f"{crash} twice while it had this call", kind="backend") from None

    async def aclose(self) -> None:
        self._closed = True
        await asyncio.gather(self._end(), *(other.aclose() for other in self._beside or ()))

    async def _exchange(self, runtime: Runtime, args: dict[str, Any]) -> object:
        process = await self._running(runtime.config)
        assert self._exit is not None
        call_id = runtime.call_id
        sent: dict[str, Any] = {"id": call_id, "arguments": args}
        if (offered := offered_to(self.spec, runtime)) is not None:
            sent["offers"] = offered
        kept = False
        guarded = process if isinstance(process, GuardedProcess) else None
        if guarded is not None and (appeared := await guarded.begin(call_id)):
            raise ToolError(
                f"nothing was called: since the last call of {self.spec.id}, which stays up between its calls, something was made "
                f"or changed where no program may write: {'; '.join(appeared[:_MOST_SHOWN])}. The tool did that, or somebody else. "
                "Have a person look at it; the next call takes things as they are then",
                kind="conflict",
            )
        try:
            await process.write(as_json(sent) + b"\n")
            answer = await self._answered(process, call_id, Midway(runtime, self._exit))
            if guarded is not None:
                await _settled(guarded, answer)
            kept = True
        finally:
            if not kept:
                await self._end()
        self._fruitless = 0
        if "error" in answer:
            return from_envelope(_as_error_envelope(answer["error"]))
        found: Any = answer["result"]
        return self.recognised(cast("dict[str, Any]", found)) if isinstance(found, dict) else found

    async def _answered(self, process: Process, call_id: str, midway: Midway) -> dict[str, Any]:
        """Read the answer to a call, and meet what the process wants on the way to it."""
        while True:
            line = await process.read_line(MAX_ANSWER_BYTES)
            if not line.endswith(b"\n"):
                raise _Crashed(await self._ending(), may_repeat=not midway.has_asked)
            answer = _answer(line, call_id)
            if "result" in answer or "error" in answer:
                return answer
            if "ask" in answer:
                self._asking.set()
            try:
                told = await midway.heard(answer, len(line))
            finally:
                self._asking.clear()
            if told is not None:
                await process.write(as_json({"id": call_id, **told}) + b"\n")

    async def _running(self, config: Mapping[str, str]) -> Process:
        if self._closed:
            raise ToolError(f"{self.spec.id} has been closed with its source", kind="unavailable")
        if self._process is not None and self._exit is not None and not self._exit.done():
            return self._process
        await self._end()
        delay_ms = self._backoff_ms[min(self._fruitless, len(self._backoff_ms) - 1)]
        if delay_ms:
            await asyncio.sleep(delay_ms / 1000)
        capabilities, profile = self.confinement.own(self.spec)
        callers = () if self._behalf is None else self._behalf.callers
        profile = replace(profile, gate=self._judged, on_attempt=self._told, callers=callers)
        self._fruitless += 1  # until a call has been answered
        process = await self.confinement.sandbox.start(
            capabilities, self.around(profile, {}, config), Program(self.command)
        )
        self._process = process
        self._exit = asyncio.create_task(process.wait(), name=f"{self.spec.id}: exit")
        return process

    def _judged(self, host: str, port: int) -> str | None:
        """Judged for the call that it has now: the process is nobody's own."""
        behalf = self._behalf
        if behalf is None:
            return f"{self.spec.id} has no call now, and reaches hosts only on behalf of one."
        if behalf.gate is None:
            return f"the call that {self.spec.id} has now may reach no hosts."
        return behalf.gate(host, port)

    def _told(self, attempt: Attempt) -> None:
        if self._behalf is not None and self._behalf.on_attempt is not None:
            self._behalf.on_attempt(attempt)

    async def _ending(self) -> str:
        """What became of a process that closed its stdout."""
        assert self._exit is not None
        done, _ = await asyncio.wait({self._exit}, timeout=_REAPING_S)
        return ending(self._exit.result()) if done else "it closed its stdout"

    async def _end(self) -> None:
        process, exit_, self._process, self._exit = self._process, self._exit, None, None
        if process is not None:
            await process.kill()
        if exit_ is not None:
            exit_.cancel()
            with contextlib.suppress(asyncio.CancelledError, ToolError):
                await exit_


async def _settled(process: GuardedProcess, answer: dict[str, Any]) -> None:
    """
    :raises ToolError: ``denied`` for what it made during this call under a protected name; its answer is in the data
    """
    try:
        await process.settle()
    except Vetoed as veto:
        raise ToolError(veto.text, kind="denied", data={"answer": answer.get("result", answer.get("error"))}) from None


def _answer(line: bytes, call_id: str) -> dict[str, Any]:
    try:
        answer = parse_object(
            line, what="the contents of its answer", max_bytes=MAX_ANSWER_BYTES, max_depth=MAX_ANSWER_DEPTH
        )
    except ArgumentText as error:
        raise ToolError(f"{error}; it answers one JSON object per line, and logs to stderr", kind="backend") from None
    if answer.get("id") != call_id or len(answer) != 2 or not any(way in answer for way in _WAYS):
        raise ToolError(
            'it answered something other than {"id": <the call\'s>, "result": …} or {"id": …, "error": …}, or one of '
            f"{', '.join(WAYS)} before that",
            kind="backend",
        )
    return answer


def _as_error_envelope(error: object) -> dict[str, Any]:
    if not isinstance(error, Mapping):
        return {"type": "error", "error_text": error}
    said = cast("Mapping[str, Any]", error)
    return {
        "type": "error",
        "error_text": said.get("text", said.get("message")),
        "data": said.get("data"),
        "metadata": {"error_kind": said.get("kind")},
    }


# A fingerprint of a persistent program, to tell whether a start now would run another one.

MOST_FILES = 1_000
MOST_BYTES = 64 * 1024 * 1024
_PIECE = 1 << 20


class _TooMuch(Exception):
    """More than is looked through each time."""


def digest_of(executable: Path, folder: Path, *, own: bool) -> bytes | None:
    """A hash of the program and of the files that it may load, or None where nobody can tell, which is never the same.

    :param folder: the canonical folder that the program sees
    :param own: that folder is this tool's alone, so that all in it counts; else, what lies beside the program and is neither
        a manifest nor a program
    """
    found, left = hashlib.sha256(), MOST_BYTES
    try:
        for number, path in enumerate((executable, *(_within(folder) if own else _beside(folder)))):
            if number > MOST_FILES:
                raise _TooMuch
            found.update(os.fsencode(path) + b"\0")
            left -= _taken_in(found, path, left)
    except (OSError, _TooMuch):
        return None
    return found.digest()


def _within(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        linked = (name for name in folders if Path(parent, name).is_symlink())
        yield from (Path(parent, name) for name in sorted((*files, *linked)))


def _beside(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(".") and path.suffix != ".json":
            mode = path.lstat().st_mode
            if stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and not mode & 0o111):
                yield path


def _taken_in(found: hashlib._Hash, path: Path, most: int) -> int:  # pyright: ignore[reportPrivateUsage]
    """Of a file its content, of a link where it leads; the size, in bytes."""
    if path.is_symlink():
        found.update(os.fsencode(path.readlink()) + b"\0")
        return 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if not stat.S_ISREG(os.fstat(descriptor).st_mode) or size > most:
            raise _TooMuch
        found.update(f"{size}\0".encode())
        read = 0
        while piece := file.read(_PIECE):
            read += len(piece)
            if read > most:
                raise _TooMuch
            found.update(piece)
    return read
