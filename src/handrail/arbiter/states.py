"""The open states of stateful tools. A state ends with its last step, ``tool.close``, a time-out, or its session.

A step is a call like any other. The code here finds the state that the step continues. From then on the step *is* a call of
the open tool: authorised, locked, timed and recorded as such, by the arguments of the opening call and the value it sends.
"""

from __future__ import annotations

import asyncio
import copy
import secrets as randomness
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from handrail.arbiter.call import Call, Going, OpenState, Refusal
from handrail.arbiter.generators import OVER, NotEnding, Steps
from handrail.contract.call import Result
from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ErrorKind, ToolError
from handrail.contract.generation import Entry
from handrail.contract.schema.schema import Schema
from handrail.contract.tool.decorator import FunctionTool, steps_of
from handrail.contract.tool.names import STATE_IDS, wire_name
from handrail.contract.tool.spec import STEP_INPUT, StateEnd
from handrail.contract.tool.tool import Tool, checked
from handrail.record.log import CommitLog, Record
from handrail.store.tables.jobs import StateRow, StateTable

_MOST_NAMED = 10
_RETIRED_EVERY = 64
_MOST_REMEMBERED = 256

_HOW: Mapping[StateEnd, str] = {
    "done": "it gave its last step",
    "closed": "it was closed",
    "expired": "no step came in time",
    "failed": "a step of it failed",
    "timeout": "a step of it took too long",
    "cancelled": "a step of it was stopped",
    "suspended": "its session, or Handrail, ended meanwhile",
    "changed": "its tool is no longer the one that opened it",
    "interrupted": "Handrail ended while it was open, and nobody knows how far a step that ran then came; look at what it did",
}


@dataclass(frozen=True, slots=True)
class StateLimits:
    """Bounds of what stateful tools have open.

    :param most: of one session
    :param idle_s: for how long one may wait for its next step
    :param grace_s: how long its end may take
    """

    most: int = 32
    idle_s: float = 900.0
    grace_s: float = 5.0


class States:
    """Those of one workspace in the process that holds it. Bound to its event loop.

    :param left: told of work that goes on when everything has ended
    :param clock: wall-clock time in nanoseconds
    """

    def __init__(
        self,
        table: StateTable,
        log: CommitLog,
        limits: StateLimits,
        left: Callable[[asyncio.Task[Any], str], None],
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.table = table
        self.live: dict[str, OpenState] = {}
        self.limits = limits
        self._log = log
        self._left = left
        self._clock = clock
        self._ended = 0
        self._last: dict[tuple[str, str], StateEnd] = {}
        """How the last ones ended, by session and id: their rows are written soon."""
        self._opening: dict[str, str] = {}
        """Calls whose first step is not taken yet, with their sessions."""
        self._closing: set[asyncio.Task[None]] = set()

    def of_session(self, session_id: str) -> list[OpenState]:
        """Those that are open, the oldest first."""
        return [state for state in self.live.values() if state.session_id == session_id]

    # ── which state a call is about ──────────────────────────────────────────────────────────────

    def look(self, call: Call, arguments: Mapping[str, Any] | None) -> None:
        """Find out what a call opens or goes on with, before it is recorded.

        :param arguments: as they were proposed, where they are an object
        """
        entry = call.entry
        assert entry is not None
        goes_on = entry.tool.goes_on
        if goes_on is None:
            call.going = Going("open", self._new_id(entry))
            call.entry = replace(entry, tool=Opening(entry.tool, call, self), blocking=False)
            return
        named: object = (arguments or {}).get(goes_on.argument)
        state_id = named if isinstance(named, str) else ""
        given = None if goes_on.input is None else (arguments or {}).get(goes_on.input)
        going = call.going = Going("close" if goes_on.input is None else "step", state_id, by=entry, sent=given)
        state = self.live.get(state_id)
        if state is not None and state.session_id == call.session_id:
            going.state = state
            call.entry = replace(state.entry, tool=entry.tool, schema=SameArguments(state), blocking=False)
            call.tool_id = state.entry.id

    def take(self, call: Call) -> None:
        """Let a call that is valid go on as one of the tool that is open.

        :raises Refusal: where there is no such state, or its tool takes no such input
        """
        going, entry = call.going, call.entry
        assert going is not None and entry is not None and call.arguments is not None
        if going.kind == "open":
            if STEP_INPUT in call.arguments:  # a step that waited for a person when the process ended
                raise Refusal(
                    "validate", "interrupted", f"it was to be a step of a state that {has_ended('interrupted')}"
                )
            if (full := self._full(call.session_id)) is not None:
                raise Refusal("validate", "limit", full)
            return
        state = going.state
        if state is None:
            self._ended_or_unknown(call, going)
            return
        now = call.generation.resolve(state.entry.id)
        if now is None or now.withheld is not None or now.definition_hash != entry.definition_hash:
            self.end(state, "changed")
            if going.kind == "step":
                raise refusal(going.id, "changed")
            going.state, going.ended, call.entry = None, "changed", going.by
            call.tool_id = going.by.id if going.by is not None else call.tool_id
            return
        call.arguments = dict(state.arguments)
        if going.kind == "step":
            sent = call.arguments[STEP_INPUT] = going.sent
            step = checked(state.entry.spec).step
            if step is not None:
                if problems := step.problems({"input": sent}):
                    raise Refusal("validate", "invalid_input", f"{entry.id}: " + "; ".join(problems))
                call.arguments[STEP_INPUT] = step.whole({"input": sent})["input"]

    def _ended_or_unknown(self, call: Call, going: Going) -> None:
        ended = self._last.get((call.session_id, going.id))
        if ended is None and (row := self.table.get(going.id, call.session_id)) is not None:
            ended = row.ended or "suspended"
        if ended is None:
            there = self._those_there_are(call.session_id)
            raise Refusal("validate", "invalid_input", f"no state {going.id[:80]!r} is open in this session{there}")
        going.ended = ended
        if going.kind == "step":
            raise refusal(going.id, ended)

    def _those_there_are(self, session_id: str) -> str:
        named = ", ".join(state.id for state in self.of_session(session_id)[-_MOST_NAMED:])
        return f"; open are {named}" if named else "; none is"

    def _full(self, session_id: str) -> str | None:
        """Why a session opens no further one; None where it may."""
        most, there = self.limits.most, self.of_session(session_id)
        if len(there) + [*self._opening.values()].count(session_id) < most:
            return None
        return full(most, self._those_there_are(session_id) if there else "")

    def _new_id(self, entry: Entry) -> str:
        while (made := f"{wire_name(entry.id)}_{randomness.token_hex(4)}") in self.live:
            pass
        return made

    # ── what a call does ─────────────────────────────────────────────────────────────────────────

    async def open(self, call: Call, tool: Tool, runtime: Runtime) -> object:
        """Begin what a stateful tool does; gives the first step with the state's id, or that there is none."""
        going, entry = call.going, call.entry
        assert going is not None and entry is not None and call.arguments is not None
        if (full := self._full(call.session_id)) is not None:  # by others of the same reply
            raise ToolError(full, kind="limit")
        arguments = copy.deepcopy(call.arguments)
        none = f"no step of {going.id} runs: {entry.id} touches things only while one does"
        steps = Steps(lambda of: steps_of(tool, call.arguments or {}, of), entry.id, none)
        own = replace(entry, tool=tool)
        state = OpenState(going.id, call.id, call.lane, own, arguments, steps, call.generation)
        self._opening[call.id] = call.session_id
        try:
            value = await self._next(state, call, runtime)
            if value is OVER:
                return {"done": True}
            answer = self._answer(state, tool, value, first=True)
            await self.table.add(StateRow(going.id, call.session_id, call.id, entry.id, self._clock()))
        except BaseException:
            self.table.end(going.id, "cancelled", self._clock())
            self._give_up(state)
            raise
        finally:
            del self._opening[call.id]
        if call.lane.closed is not None:
            self.table.end(going.id, "suspended", self._clock())
            self._give_up(state)
            raise ToolError(call.lane.closed, kind="cancelled")
        self.live[state.id] = state
        self._rest(state)
        call.lane.catalog.bring(call.generation, STATE_IDS)
        return answer

    async def step(self, call: Call, runtime: Runtime) -> object:
        state, going = self._going(call)
        if state.busy:
            raise ToolError(f"another step of {state.id} runs; wait for it", kind="conflict")
        if state.ended is not None:  # while this one waited
            raise ToolError(f"the state {state.id} {has_ended(state.ended)}", kind=kind_of(state.ended))
        assert call.arguments is not None
        value = await self._next(state, call, runtime, call.arguments.get(STEP_INPUT, going.sent))
        if value is OVER:
            self._forget(state, "done")
            return {"state_id": state.id, "done": True}
        try:
            answer = self._answer(state, state.entry.tool, value)
        except ToolError as error:  # it is no JSON
            self._forget(state, "failed")
            self._give_up(state)
            raise ToolError(f"{error.text}. {over_now(state.id)}", kind=error.kind, data=error.data) from None
        self._rest(state)
        return answer

    async def close(self, call: Call, runtime: Runtime) -> object:
        going = call.going
        assert going is not None
        state = going.state
        ended = going.ended if state is None else state.ended
        answer: dict[str, object] = {"state_id": going.id, "closed": True}
        if state is None or ended is not None:
            return {**answer, "note": f"it had ended before: {how(ended or 'suspended')}"}
        if state.busy:
            raise ToolError(f"a step of {state.id} runs; wait for it, then close", kind="conflict")
        self._forget(state, "closed")
        try:
            await state.steps.close(runtime)
        except NotEnding:
            text = (
                f"{going.id} is closed, but {state.entry.id} went on when it was told to end (it ignores GeneratorExit)"
            )
            raise ToolError(f"{text}; its author lets it end there", kind="backend") from None
        except ToolError as error:
            raise ToolError(
                f"{going.id} is closed, and ending it failed: {error.text}", kind=error.kind, data=error.data
            ) from None
        except Exception as error:
            said = call.redactor.text(f"{type(error).__name__}: {error}")[:500]
            raise ToolError(f"{going.id} is closed, and ending it failed: {said}", kind="backend") from None
        return answer

    async def _next(self, state: OpenState, call: Call, runtime: Runtime, sent: object = None) -> object:
        """Take one step. A state does not outlive a step that goes wrong."""

        def struck() -> None:  # at once: whoever asks for it while it does not heed that is told so
            self._forget(state, "timeout" if call.execution.reason == "timeout" else "cancelled")

        state.busy = True
        state.steps.when_struck = struck
        self._awake(state)
        try:
            return await state.steps.next(runtime, sent)
        except ToolError as error:
            self._forget(state, "failed")
            if call.going is None or call.going.kind == "open":
                raise
            raise ToolError(f"{error.text} {over_now(state.id)}", kind=error.kind, data=error.data) from None
        except Exception as error:
            self._forget(state, "failed")
            if call.execution.reason is not None or call.going is None or call.going.kind == "open":
                raise
            said = call.redactor.text(f"{type(error).__name__}: {error}")[:500]  # a cut secret would not be found
            text = f"{state.entry.id} failed unexpectedly: {said}. {over_now(state.id)}"
            raise ToolError(text, kind="backend") from None
        finally:
            state.busy = False

    @staticmethod
    def _going(call: Call) -> tuple[OpenState, Going]:
        going = call.going
        assert going is not None and going.state is not None
        return going.state, going

    def _answer(self, state: OpenState, tool: Tool, value: object, *, first: bool = False) -> object:
        answer: dict[str, object] = {"state_id": state.id}
        result = value if isinstance(value, Result) else None
        if result is not None and not result.ok:
            return result.with_metadata(state_id=state.id)
        data = value if result is None else result.data
        answer["step"] = tool.finished(data) if isinstance(tool, FunctionTool) else data
        if first:
            spec = state.entry.spec
            answer["note"] = how_to_go_on(self.limits.idle_s)
            if spec.step_parameters is not None:
                answer["input"] = dict(spec.step_parameters)
        return answer if result is None else Result("output", answer, None, result.metadata)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _rest(self, state: OpenState) -> None:
        """Wait for the next step, for so long."""
        self._awake(state)
        if state.ended is None:
            loop = asyncio.get_running_loop()
            state.timer = loop.call_later(self.limits.idle_s, self._expire, state)

    @staticmethod
    def _awake(state: OpenState) -> None:
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None

    def _expire(self, state: OpenState) -> None:
        on_the_way = any(call.going is not None and call.going.state is state for call in state.lane.running.values())
        if on_the_way:  # it waits for a lock, or for a person
            self._rest(state)
        else:
            self.end(state, "expired")

    def end(self, state: OpenState, ended: StateEnd) -> asyncio.Task[None] | None:
        """End one that no call ends: on record, without anything that its tool could touch by its runtime.

        :return: what ends it
        """
        if state.ended is not None:
            return None
        self._forget(state, ended)
        told = {"tool": state.entry.id, "state": state.id, "ended": ended}
        self._log.append([Record("state-ended", state.session_id, state.call_id, told)])
        return self._give_up(state)

    def _give_up(self, state: OpenState) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._close_quietly(state))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close_quietly(self, state: OpenState) -> None:
        closing = asyncio.ensure_future(state.steps.close())
        done, _ = await asyncio.wait((closing,), timeout=self.limits.grace_s)
        if not done:
            state.steps.task.cancel()
            await asyncio.wait((closing,), timeout=self.limits.grace_s)
        if closing.done():
            if not closing.cancelled():
                closing.exception()  # nobody is left to be told
        else:
            self._left(state.steps.task, f"{state.entry.id} ({state.id})")

    def _forget(self, state: OpenState, ended: StateEnd) -> None:
        if state.ended is not None:
            return
        state.ended = ended
        self._awake(state)
        if self.live.pop(state.id, None) is not None:
            self.table.end(state.id, ended, self._clock())
            self._last[state.session_id, state.id] = ended
            if len(self._last) > _MOST_REMEMBERED:
                del self._last[next(iter(self._last))]
            self._ended += 1
            if self._ended % _RETIRED_EVERY == 0:
                self.table.retire(self._clock())

    async def end_session(self, session_id: str) -> None:
        """End those of a session that takes no more calls, and wait for that; not for ever."""
        for state in self.of_session(session_id):
            self.end(state, "suspended")
        if waiting := tuple(self._closing):
            await asyncio.wait(waiting)

    async def recover(self) -> None:
        """At start: those that a former process had open are interrupted.

        :raises LogUnavailable: when that cannot be made durable
        """
        await self.table.recover(self._clock())


class CallOpened:
    """Implements :class:`~handrail.contract.tool.spec.Opened` for one call."""

    __slots__ = ("_call", "_runtime", "_states")

    def __init__(self, call: Call, states: States, runtime: Runtime) -> None:
        if call.going is None or call.going.kind == "open":
            raise ToolError(f"{call.tool_id} goes on with no state", kind="denied")
        self._call = call
        self._states = states
        self._runtime = runtime

    async def step(self) -> object:
        return await self._states.step(self._call, self._runtime)

    async def close(self) -> object:
        return await self._states.close(self._call, self._runtime)


class Opening(Tool):
    """A stateful tool, as the call runs it that opens it."""

    def __init__(self, tool: Tool, call: Call, states: States) -> None:
        self.spec = tool.spec
        self.origin = tool.origin
        self._tool = tool
        self._call = call
        self._states = states

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await self._states.open(self._call, self._tool, runtime)

    def check(self, args: dict[str, Any]) -> None:
        self._tool.check(args)

    def questions(self, args: dict[str, Any]) -> Any:
        return self._tool.questions(args)


class SameArguments(Schema):
    """What a person may put in the place of a step's arguments: what it is sent, and nothing else."""

    __slots__ = ("_state",)

    def __init__(self, state: OpenState) -> None:
        self.parameters = state.entry.spec.parameters
        self._state = state

    def problems(self, arguments: dict[str, Any], *, parsed: bool = False) -> list[str]:
        given = dict(arguments)
        sent = given.pop(STEP_INPUT, None)
        if given != self._state.arguments:
            return [f"a step keeps the arguments that its state was opened with; only {STEP_INPUT} may be another"]
        step = checked(self._state.entry.spec).step
        return [] if step is None else step.problems({"input": sent}, parsed=parsed)

    def whole(self, arguments: dict[str, Any]) -> dict[str, Any]:
        step = checked(self._state.entry.spec).step
        if step is None or STEP_INPUT not in arguments:
            return arguments
        return {**arguments, STEP_INPUT: step.whole({"input": arguments[STEP_INPUT]})["input"]}


def how(ended: StateEnd) -> str:
    """How one ended, as the end of a sentence."""
    return _HOW[ended]


def has_ended(ended: StateEnd) -> str:
    """What follows the name of one that has."""
    return f"has ended: {_HOW[ended]}. Open another where it is still needed"


def how_to_go_on(idle_s: float) -> str:
    """With the first step of one."""
    after = f"{idle_s / 60:.3g} min" if idle_s >= 60 else f"{idle_s:.3g} s"
    return f"Go on by tool.step, end it by tool.close; without a step it ends after {after}."


def full(most: int, named: str) -> str:
    """
    :param named: those that are open, as the end of a part of a sentence
    """
    return f"a session has at most {most} states open or being opened{named}; close one by tool.close. Nothing was run"


def over_now(state_id: str) -> str:
    """What follows the text of a failure that ended one."""
    return f"The state {state_id} has ended with that"


def kind_of(ended: StateEnd) -> ErrorKind:
    return "interrupted" if ended == "interrupted" else "conflict"


def refusal(state_id: str, ended: StateEnd) -> Refusal:
    """Of a step of one that has ended."""
    return Refusal("validate", kind_of(ended), f"the state {state_id} {has_ended(ended)}")
