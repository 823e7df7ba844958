"""Executable tools that stay up between calls: no start-up per call.

The protocol: one JSON object per line, both ways, one call at a time. While a call waits for a client's answer, others go to
further processes of the same.

- to stdin: ``{"id": "…", "arguments": {…}}``
- from stdout: ``{"id": "…", "result": …}``, or ``{"id": "…", "error": "…"}`` where the error is a text or
  ``{"text": "…", "kind": "failed", "data": …}``
- before that as many messages as it has: :mod:`handrail.registry.sources.persistent.midway`

The process is started for the first call, in a sandbox of the tool's own set that belongs to the source, and
ends when no generation has it any more: one that is the same, with the same files, goes on in the next. It reaches hosts only while it has a call, and only those that this call may reach. A call
that is cancelled, or an answer that breaks the protocol, ends the process; the next call starts another. Where starts answer no call, the next one waits a little longer, up to a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

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
from handrail.registry.sources.persistent.midway import WAYS, Midway, offered_to
from handrail.runtime.guard.guard import GuardedProcess, Vetoed

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
        call_id, midway = runtime.call_id, Midway(runtime, self._exit)
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
            while True:
                line = await process.read_line(MAX_ANSWER_BYTES)
                if not line.endswith(b"\n"):
                    raise _Crashed(await self._ending(), may_repeat=not midway.has_asked)
                answer = _answer(line, call_id)
                if "result" in answer or "error" in answer:
                    break
                if "ask" in answer:
                    self._asking.set()
                try:
                    told = await midway.heard(answer, len(line))
                finally:
                    self._asking.clear()
                if told is not None:
                    await process.write(as_json({"id": call_id, **told}) + b"\n")
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
