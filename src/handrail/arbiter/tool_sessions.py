"""The open tool sessions of stateful tools. One ends with its last step, ``tool.close``, a time-out, or its session.

A step is a call like any other. The code here finds the tool session that the step continues. From then on the step *is* a
call of the open tool: authorised, locked, timed and recorded as such, by the arguments of the opening call and the value that
it sends.
"""

from __future__ import annotations

import asyncio
import copy
import secrets as randomness
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from handrail.arbiter.call_state import Call, CallRejection, LiveToolSession, ToolSessionStep
from handrail.arbiter.generator_steps import END_OF_STEPS, GeneratorIgnoredClose, GeneratorSteps
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ErrorKind, ToolError
from handrail.contract.schema.argument_repair import repair_arguments
from handrail.contract.schema.argument_validation import ParametersSchema
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.struct import Struct
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.decorator import FunctionTool, iterate_generator_steps
from handrail.contract.tool.spec import STEP_INPUT, StateEnd
from handrail.contract.tool.tool_ids_and_wire_names import STATE_IDS, wire_name
from handrail.contract.tool.tool_protocol import Tool, check_spec
from handrail.contract.tool_generation import ToolEntry
from handrail.record.commit_log import CommitLog, Record
from handrail.store.tables.job_tables import ToolSessionRow, ToolSessionTable

_MOST_NAMED = 10
_RETIRED_EVERY = 64
_MOST_REMEMBERED = 256

_HOW: Mapping[StateEnd, str] = {
    "done": "it returned its last step",
    "closed": "it was closed",
    "expired": "no step came in time",
    "failed": "one of its steps failed",
    "timeout": "one of its steps timed out",
    "cancelled": "one of its steps was stopped",
    "suspended": "its session or Handrail ended",
    "changed": "the definition of its tool has changed",
    "interrupted": "Handrail ended while it was open, so the outcome of its last step is unknown. Check its effect",
}


class ToolSessionLimits(Struct, frozen=True):
    """Limits of tool sessions.

    :param max_open: open tool sessions of one session
    :param idle_s: how long one may wait for its next step
    :param grace_s: how long its end may take
    """

    max_open: int = 32
    idle_s: float = 900.0
    grace_s: float = 5.0


class ToolSessionManager:
    """The open tool sessions of one workspace, in the process that holds it. Use it on the kernel's event loop.

    :param left: called with a task that continues although everything was asked to end
    :param clock: wall-clock time in nanoseconds
    """

    def __init__(
        self,
        table: ToolSessionTable,
        log: CommitLog,
        limits: ToolSessionLimits,
        left: Callable[[asyncio.Task[Any], str], None],
        *,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.table = table
        self.open_sessions: dict[str, LiveToolSession] = {}
        self.limits = limits
        self._log = log
        self._track_task = left
        self._clock = clock
        self._ended = 0
        self._last: dict[tuple[str, str], StateEnd] = {}
        """How the latest ones ended, by session and id, since their rows are written a moment later."""
        self._opening: dict[str, str] = {}
        """Calls whose first step is not taken yet, with their sessions."""
        self._closing: set[asyncio.Task[None]] = set()

    def list_open_tool_sessions(self, session_id: str) -> list[LiveToolSession]:
        """Return the open tool sessions of a session, the oldest first."""
        return [state for state in self.open_sessions.values() if state.session_id == session_id]

    # ── which state a call is about ──────────────────────────────────────────────────────────────

    def bind_call_to_tool_session(self, call: Call, arguments: Mapping[str, Any] | None) -> None:
        """Find the tool session that a call opens, continues or closes, before the call is recorded.

        :param arguments: the proposed arguments if they are an object
        """
        entry = call.entry
        assert entry is not None
        if (goes_on := entry.tool.state_arguments) is None:
            call.session_step = ToolSessionStep("open", self._new_id(entry))
            call.entry = replace(entry, tool=SessionOpeningTool(entry.tool, call, self), is_blocking=False)
            return
        named: object = (arguments or {}).get(goes_on.argument)
        state_id = named if isinstance(named, str) else ""
        given = None if goes_on.input is None else (arguments or {}).get(goes_on.input)
        step = call.session_step = ToolSessionStep(
            "close" if goes_on.input is None else "step", state_id, step_tool=entry, step_input=given
        )
        state = self.open_sessions.get(state_id)
        # A tool session of another session does not exist for this one, as if the id were wrong.
        if state is not None and state.session_id == call.session_id:
            step.session = state
            call.entry = replace(
                state.entry, tool=entry.tool, schema=EditedStepArgumentsSchema(state), is_blocking=False
            )
            call.tool_id = state.entry.id

    def redirect_to_stateful_tool(self, call: Call) -> None:
        """Turn a valid call into a call of the tool whose session is open.

        :raises CallRejection: if the tool session does not exist, or its tool does not accept the input
        """
        going, entry = call.session_step, call.entry
        assert going is not None and entry is not None and call.arguments is not None
        if going.kind == "open":
            if STEP_INPUT in call.arguments:  # a step that was awaiting approval when the process ended
                raise CallRejection(
                    "validate",
                    "interrupted",
                    f"The tool session of this step {explain_ended_tool_session('interrupted')} Nothing was run.",
                )
            if (full := self._limit_reached(call.session_id)) is not None:
                raise CallRejection("validate", "limit", full)
            return
        if (state := going.session) is None:
            self._check_ended(call, going)
            return
        now = call.generation.resolve_tool_name(state.entry.id)
        # The open generator runs the old code. A step of it would be evaluated by a definition that no longer exists.
        if now is None or now.unavailable_reason is not None or now.definition_hash != entry.definition_hash:
            self.end_tool_session_without_call(state, "changed")
            if going.kind == "step":
                raise make_ended_session_rejection(going.id, "changed")
            going.session, going.ended, call.entry = None, "changed", going.step_tool
            call.tool_id = going.step_tool.id if going.step_tool is not None else call.tool_id
            return
        # The rules evaluate a step by the arguments that opened the session, which its author cannot change later.
        call.arguments = dict(state.arguments)
        if going.kind == "step":
            sent = call.arguments[STEP_INPUT] = going.step_input
            if (step := check_spec(state.entry.spec).step) is not None:
                if problems := step.list_problems({"input": sent}):
                    repaired = repair_arguments(step, {"input": sent})
                    if repaired is None or "input" not in repaired[0]:
                        raise CallRejection("validate", "invalid_input", f"`{entry.id}`: " + "; ".join(problems))
                    sent = repaired[0]["input"]
                    call.argument_repairs = {**call.argument_repairs, **repaired[1]}
                call.arguments[STEP_INPUT] = step.coerce_integers({"input": sent})["input"]

    def _check_ended(self, call: Call, step: ToolSessionStep) -> None:
        ended = self._last.get((call.session_id, step.id))
        # The row is from an earlier process, or its end is not written yet.
        if ended is None and (row := self.table.get(step.id, call.session_id)) is not None:
            ended = row.ended or "suspended"
        if ended is None:
            text = f"Tool session `{escape_terminal_controls(step.id[:80])}` does not exist. {self._describe_open(call.session_id)}"
            raise CallRejection("validate", "invalid_input", text)
        step.ended = ended
        if step.kind == "step":
            raise make_ended_session_rejection(step.id, ended)

    def _describe_open(self, session_id: str) -> str:
        named = ", ".join(state.id for state in self.list_open_tool_sessions(session_id)[-_MOST_NAMED:])
        return f"This session has open: {named}." if named else "This session has no open tool session."

    def _limit_reached(self, session_id: str) -> str | None:
        """Return the error text if a session can open no further tool session; otherwise None."""
        most, there = self.limits.max_open, self.list_open_tool_sessions(session_id)
        # Sessions whose first step still runs count too, or parallel calls could exceed the limit.
        if len(there) + [*self._opening.values()].count(session_id) < most:
            return None
        return make_session_limit_error_text(most, self._describe_open(session_id) if there else "")

    def _new_id(self, entry: ToolEntry) -> str:
        while (made := f"{wire_name(entry.id)}_{randomness.token_hex(4)}") in self.open_sessions:
            pass
        return made

    # ── what a call does ─────────────────────────────────────────────────────────────────────────

    async def open_session(self, call: Call, tool: Tool, runtime: Runtime) -> object:
        """Start a stateful tool, and return its first step with the id of the tool session, or that it took no step."""
        step, entry = call.session_step, call.entry
        assert step is not None and entry is not None and call.arguments is not None
        if (full := self._limit_reached(call.session_id)) is not None:  # other calls of the same reply opened some
            raise ToolError(full, kind="limit")
        # The generator may change the object, and the next step is compared with the original.
        arguments = copy.deepcopy(call.arguments)
        none = f"No step of `{step.id}` is running. `{entry.id}` can use its runtime only during a step."
        steps = GeneratorSteps(lambda of: iterate_generator_steps(tool, call.arguments or {}, of), entry.id, none)
        own = replace(entry, tool=tool)
        state = LiveToolSession(step.id, call.id, call.lane, own, arguments, steps, call.generation)
        self._opening[call.id] = call.session_id
        try:
            value = await self._take_step_or_end(state, call, runtime)
            if value is END_OF_STEPS:
                return {"done": True}
            answer = self._step_result(state, tool, value, first=True)
            await self.table.add(ToolSessionRow(step.id, call.session_id, call.id, entry.id, self._clock()))
        except BaseException:
            self.table.end(step.id, "cancelled", self._clock())
            self._abandon(state)
            raise
        finally:
            del self._opening[call.id]
        # The session was closed while the first step ran. No call can continue this tool session.
        if call.lane.closed_reason is not None:
            self.table.end(step.id, "suspended", self._clock())
            self._abandon(state)
            raise ToolError(call.lane.closed_reason, kind="cancelled")
        self.open_sessions[state.id] = state
        self._start_idle_timer(state)
        # The model needs tool.step now, which is not loaded at the start.
        call.lane.catalog.load_tools(call.generation, STATE_IDS)
        return answer

    async def take_step(self, call: Call, runtime: Runtime) -> object:
        state, step = self._get_target(call)
        # A generator can take one step at a time.
        if state.is_busy:
            raise ToolError(
                f"Another step of `{state.id}` is running. Wait for it, then repeat the call.", kind="conflict"
            )
        if state.end is not None:  # while this step waited
            raise ToolError(
                f"Tool session `{state.id}` {explain_ended_tool_session(state.end)}",
                kind=get_session_end_error_kind(state.end),
            )
        assert call.arguments is not None
        value = await self._take_step_or_end(state, call, runtime, call.arguments.get(STEP_INPUT, step.step_input))
        if value is END_OF_STEPS:
            self._remove(state, "done")
            return {"state_id": state.id, "done": True}
        try:
            answer = self._step_result(state, state.entry.tool, value)
        except ToolError as error:  # the value is not JSON
            self._remove(state, "failed")
            self._abandon(state)
            text = f"{error.text.removesuffix('.')}. {make_session_failure_text(state.id)}"
            raise ToolError(text, kind=error.kind, data=error.data) from None
        self._start_idle_timer(state)
        return answer

    async def close_session(self, call: Call, runtime: Runtime) -> object:
        step = call.session_step
        assert step is not None
        state = step.session
        ended = step.ended if state is None else state.end
        answer: dict[str, object] = {"state_id": step.id, "closed": True}
        if state is None or ended is not None:
            return {
                **answer,
                "note": f"The tool session had already ended: {describe_tool_session_end(ended or 'suspended')}.",
            }
        if state.is_busy:
            raise ToolError(
                f"A step of `{state.id}` is still running. Wait until it ends, then close the tool session.",
                kind="conflict",
            )
        self._remove(state, "closed")
        try:
            await state.steps.close(runtime)
        except GeneratorIgnoredClose:
            text = f"`{step.id}` is closed, but `{state.entry.id}` ignored the request to end (GeneratorExit)."
            raise ToolError(f"{text} Report this defect to the user.", kind="backend") from None
        except ToolError as error:
            raise ToolError(
                f"`{step.id}` is closed, but closing it failed: {error.text}", kind=error.kind, data=error.data
            ) from None
        except Exception as error:
            message = call.redactor.redact_text(f"{type(error).__name__}: {error}")[:500]
            raise ToolError(
                f"`{step.id}` is closed, but closing it failed: {message}. Check its effect.", kind="backend"
            ) from None
        return answer

    async def _take_step_or_end(
        self, state: LiveToolSession, call: Call, runtime: Runtime, sent: object = None
    ) -> object:
        """Take one step. A step that fails ends the tool session."""

        def end_session_early() -> None:  # at once, so that other calls see the end while the step still runs
            self._remove(state, "timeout" if call.execution.reason == "timeout" else "cancelled")

        state.is_busy = True
        state.steps.on_cancelled = end_session_early
        self._stop_idle_timer(state)
        try:
            return await state.steps.take_step(runtime, sent)
        except ToolError as error:
            self._remove(state, "failed")
            if call.session_step is None or call.session_step.kind == "open":
                raise
            text = f"{error.text.removesuffix('.')}. {make_session_failure_text(state.id)}"
            raise ToolError(text, kind=error.kind, data=error.data) from None
        except Exception as error:
            self._remove(state, "failed")
            if call.execution.reason is not None or call.session_step is None or call.session_step.kind == "open":
                raise
            message = call.redactor.redact_text(f"{type(error).__name__}: {error}")[:500]  # redacted first, then cut
            text = f"`{state.entry.id}` failed unexpectedly: {message}. {make_session_failure_text(state.id)}"
            raise ToolError(text, kind="backend") from None
        finally:
            state.is_busy = False

    @staticmethod
    def _get_target(call: Call) -> tuple[LiveToolSession, ToolSessionStep]:
        step = call.session_step
        assert step is not None and step.session is not None
        return step.session, step

    def _step_result(self, state: LiveToolSession, tool: Tool, value: object, *, first: bool = False) -> object:
        answer: dict[str, object] = {"state_id": state.id}
        result = value if isinstance(value, Result) else None
        if result is not None and not result.ok:
            return result.with_metadata(state_id=state.id)
        data = value if result is None else result.data
        answer["step"] = tool.convert_return_value_to_json(data) if isinstance(tool, FunctionTool) else data
        if first:
            spec = state.entry.spec
            answer["note"] = make_first_step_note(self.limits.idle_s)
            if spec.step_parameters is not None:
                answer["input"] = dict(spec.step_parameters)
        return answer if result is None else Result("output", answer, None, result.metadata)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────

    def _start_idle_timer(self, state: LiveToolSession) -> None:
        """Start the time-out for the next step."""
        self._stop_idle_timer(state)
        if state.end is None:
            loop = asyncio.get_running_loop()
            state.timer = loop.call_later(self.limits.idle_s, self._expire, state)

    @staticmethod
    def _stop_idle_timer(state: LiveToolSession) -> None:
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None

    def _expire(self, state: LiveToolSession) -> None:
        on_the_way = any(
            call.session_step is not None and call.session_step.session is state
            for call in state.lane.running_calls.values()
        )
        if on_the_way:  # a step waits for a lock or an approval
            self._start_idle_timer(state)
        else:
            self.end_tool_session_without_call(state, "expired")

    def end_tool_session_without_call(self, state: LiveToolSession, ended: StateEnd) -> asyncio.Task[None] | None:
        """End a tool session without a call, on record and without access to the runtime.

        :return: the task that ends it; None if it has already ended
        """
        if state.end is not None:
            return None
        self._remove(state, ended)
        fields = {"tool": state.entry.id, "state": state.id, "ended": ended}
        self._log.record_soon([Record("tool-session-closed", state.session_id, state.call_id, fields)])
        return self._abandon(state)

    def _abandon(self, state: LiveToolSession) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._close_quietly(state))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close_quietly(self, state: LiveToolSession) -> None:
        closing = asyncio.ensure_future(state.steps.close())
        done, _ = await asyncio.wait((closing,), timeout=self.limits.grace_s)
        if not done:
            state.steps.task.cancel()
            await asyncio.wait((closing,), timeout=self.limits.grace_s)
        if closing.done():
            if not closing.cancelled():
                closing.exception()  # retrieved, since no caller is left
        else:
            self._track_task(state.steps.task, f"{state.entry.id} ({state.id})")

    def _remove(self, state: LiveToolSession, ended: StateEnd) -> None:
        if state.end is not None:
            return
        state.end = ended
        self._stop_idle_timer(state)
        # A session whose first step failed was never open, and has no row to end.
        if self.open_sessions.pop(state.id, None) is not None:
            self.table.end(state.id, ended, self._clock())
            self._last[state.session_id, state.id] = ended
            # Only ends that are younger than their rows are needed here.
            if len(self._last) > _MOST_REMEMBERED:
                del self._last[next(iter(self._last))]
            self._ended += 1
            if self._ended % _RETIRED_EVERY == 0:
                self.table.remove_old(self._clock())

    async def end_tool_sessions_of_session(self, session_id: str) -> None:
        """End all tool sessions of a session that takes no more calls, and wait for that within a limit."""
        for state in self.list_open_tool_sessions(session_id):
            self.end_tool_session_without_call(state, "suspended")
        if waiting := tuple(self._closing):
            await asyncio.wait(waiting)

    async def mark_former_sessions_interrupted(self) -> None:
        """Mark the tool sessions of a former process as interrupted. Call it at start.

        :raises LogUnavailable: if that cannot be made durable
        """
        await self.table.mark_open_sessions_interrupted(self._clock())


class CallToolSession:
    """The tool session of one call (:class:`~handrail.contract.tool.spec.ToolSession`)."""

    __slots__ = ("_call", "_runtime", "_states")

    def __init__(self, call: Call, states: ToolSessionManager, runtime: Runtime) -> None:
        if call.session_step is None or call.session_step.kind == "open":
            raise ToolError(
                f"`{call.tool_id}` does not continue a tool session. Only a step of a stateful tool can use it.",
                kind="denied",
            )
        self._call = call
        self._states = states
        self._runtime = runtime

    async def step(self) -> object:
        return await self._states.take_step(self._call, self._runtime)

    async def close(self) -> object:
        return await self._states.close_session(self._call, self._runtime)


class SessionOpeningTool(Tool):
    """A stateful tool, as the call that opens its tool session runs it."""

    def __init__(self, tool: Tool, call: Call, states: ToolSessionManager) -> None:
        self.spec = tool.spec
        self.origin = tool.origin
        self._tool = tool
        self._call = call
        self._states = states

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await self._states.open_session(self._call, self._tool, runtime)

    def check(self, args: dict[str, Any]) -> None:
        self._tool.check(args)

    def questions(self, args: dict[str, Any]) -> Any:
        return self._tool.questions(args)


class EditedStepArgumentsSchema(ParametersSchema):
    """A schema of the arguments that a user may give instead of those of a step: only the input may differ."""

    __slots__ = ("_state",)

    def __init__(self, state: LiveToolSession) -> None:
        self.parameters = state.entry.spec.parameters
        self._state = state

    def list_problems(self, arguments: dict[str, Any], *, parsed: bool = False) -> list[str]:
        given = dict(arguments)
        sent = given.pop(STEP_INPUT, None)
        # The approval of a step covers the session's own arguments. Others would be a different session.
        if given != self._state.arguments:
            return [f"a step keeps the arguments of its tool session; only {STEP_INPUT} may differ"]
        step = check_spec(self._state.entry.spec).step
        return [] if step is None else step.list_problems({"input": sent}, parsed=parsed)

    def coerce_integers(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if (step := check_spec(self._state.entry.spec).step) is None or STEP_INPUT not in arguments:
            return arguments
        return {**arguments, STEP_INPUT: step.coerce_integers({"input": arguments[STEP_INPUT]})["input"]}


def describe_tool_session_end(ended: StateEnd) -> str:
    """Return how a tool session ended, as the end of a sentence."""
    return _HOW[ended]


def explain_ended_tool_session(ended: StateEnd) -> str:
    """Return the end of an error text about a tool session that has ended."""
    return f"has ended: {_HOW[ended]}. Open a new one if you still need it."


def make_first_step_note(idle_s: float) -> str:
    """Return the note with the first step."""
    after = f"{idle_s / 60:.3g} min" if idle_s >= 60 else f"{idle_s:.3g} s"
    return f"Continue with tool.step, and end with tool.close. Without a step, the tool session ends after {after}."


def make_session_limit_error_text(most: int, named: str) -> str:
    """Return the error text for a session with too many tool sessions.

    :param named: a sentence that names the open ones
    """
    text = f"This session has reached the limit of {most} open tool sessions. Nothing was run."
    return f"{text} {named + ' ' if named else ''}Close one with tool.close, then repeat the call."


def make_session_failure_text(state_id: str) -> str:
    """Return the sentence that follows a failure which ended a tool session."""
    return f"The tool session `{state_id}` has ended."


def get_session_end_error_kind(ended: StateEnd) -> ErrorKind:
    return "interrupted" if ended == "interrupted" else "conflict"


def make_ended_session_rejection(state_id: str, ended: StateEnd) -> CallRejection:
    """Return the refusal of a step of a tool session that has ended."""
    return CallRejection(
        "validate", get_session_end_error_kind(ended), f"Tool session `{state_id}` {explain_ended_tool_session(ended)}"
    )
