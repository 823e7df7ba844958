"""How one call is carried out: nine steps, in one place, in this order.

:meth:`Arbiter.carry_out` reads like the list in the README. Each step is one short method below it; a step
says no by raising :class:`~handrail.arbiter.call.Refusal`, and whatever happens the call is answered once.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import orjson

from handrail.arbiter.call import Call, Lane, Refusal, Step
from handrail.arbiter.execution import STOPPED_TEXT, Execution, StillRunning, Stopped, StopReason, uninterrupted
from handrail.arbiter.locks import Grant, LockTable, LockTimeout, Want, conflict
from handrail.arbiter.output import Shaped, Shaper
from handrail.arbiter.resources import Resources
from handrail.contract.call import Answer, ProposedCall
from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.jsontext import ArgumentText, parse_arguments
from handrail.contract.people import ApprovalRequest
from handrail.contract.result import Result
from handrail.policy.authority import Authority
from handrail.policy.rules import parse_rule
from handrail.policy.verdict import Verdict
from handrail.record.log import CommitLog
from handrail.registry.generation import Generation
from handrail.runtime.roots import May
from handrail.runtime.surface import CallRuntime


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets that hold for every call; a tool's own time-out is in its spec."""

    lock_wait_ms: int = 60_000
    grace_ms: int = 5_000
    """How long work that was told to end may take to do so before its caller is answered without it."""
    max_backlog: int = 20_000
    """Records waiting for the disk before further calls wait for them."""


class Arbiter:
    """The only code that runs calls."""

    def __init__(
        self,
        log: CommitLog,
        authority: Authority,
        locks: LockTable,
        resources: Resources,
        shaper: Shaper,
        limits: Limits,
    ) -> None:
        self.log = log
        self.authority = authority
        self.locks = locks
        self.resources = resources
        self.shaper = shaper
        self.limits = limits
        self._late: set[asyncio.Task[Any]] = set()

    async def carry_out(self, call: Call, predecessors: Sequence[Call] = ()) -> Answer:
        """The way of one call. Always returns exactly one answer; refusals are recorded like outcomes.

        :param predecessors: the earlier calls of the same model reply, in its order
        :raises asyncio.CancelledError: if the awaiting task was cancelled, once the call is on record
        """
        call.lane.running[call.id] = call
        try:
            try:
                if (recorded := await self._recorded(call)) is not None:
                    return recorded
                self._resolve(call)  # 1
                self._validate(call)  # 2
                await self._authorise(call)  # 3
                await self._lock(call, predecessors)  # 4
                await self._intend(call)  # 5
                value = await self._execute(call)  # 6
                shaped = await self._shape(call, value)  # 7
                await self._commit(call, shaped)  # 8
            except Refusal as refusal:
                shaped = await self._refuse(call, refusal)
            finally:
                self._release(call)  # 9
        finally:
            call.has_entered()
            del call.lane.running[call.id]
        if call.execution.caller_cancelled:
            raise asyncio.CancelledError
        call.emit("finished", {"type": shaped.result.type, "error_kind": shaped.result.error_kind})
        return Answer(call.id, call.tool_id, shaped.result, shaped.model)

    # ── 1 resolve ────────────────────────────────────────────────────────────────────────────────

    def _resolve(self, call: Call) -> None:
        proposed, generation = call.proposed, call.generation
        entry = generation.resolve(proposed.name)
        call.entry = entry
        if entry is None:
            self._propose(call, proposed.arguments)
            if proposed.fault is not None:
                raise Refusal("resolve", proposed.fault_kind, proposed.fault)
            nearest = generation.nearest(proposed.name)
            hint = f"did you mean {' or '.join(nearest)}?" if nearest else "no tool has a name like it."
            name = proposed.name[:80]
            raise Refusal(
                "resolve", "unknown_tool", f"there is no tool {name!r}; {hint}" if name else "the call names no tool."
            )
        if entry.withheld is not None:
            self._propose(call, proposed.arguments)
            raise Refusal("resolve", "unavailable", f"{entry.spec.id} is withheld: {entry.withheld}")

    # ── 2 validate ───────────────────────────────────────────────────────────────────────────────

    def _validate(self, call: Call) -> None:
        assert call.entry is not None
        spec = call.entry.spec
        arguments, fault = _arguments(call.proposed)
        self._propose(call, call.proposed.arguments if arguments is None else arguments)
        problems = [fault] if arguments is None else call.entry.schema.problems(arguments)
        if arguments is None or problems:
            kind = call.proposed.fault_kind if call.proposed.fault is not None else "invalid_input"
            raise Refusal("validate", kind, f"{spec.id}: " + "; ".join(problems))
        call.arguments = arguments
        try:
            call.wants = self.resources.wants(spec, arguments, call.lane.around.roots)
        except ToolError as error:
            raise Refusal("validate", error.kind, error.text) from None

    def _propose(self, call: Call, arguments: Any) -> None:
        if isinstance(arguments, (str, bytes)):  # not JSON: keep the head, as text, for whoever asks what was sent
            head = arguments[:2_000]
            arguments = {"unparsed": head if isinstance(head, str) else head.decode("utf-8", "replace")}
        body = {
            "tool": call.tool_id,
            "arguments": self._frozen(arguments),
            "generation": call.generation.number,
        }
        if call.replayable:
            body["key_hash"] = self._key_hash(call)
        if call.entry is not None:
            body["definition"] = call.entry.definition_hash
            body["side_effect"] = call.entry.spec.side_effect
        if call.proposed.provider_id is not None:
            body["provider_id"] = call.proposed.provider_id
        if call.parent is not None:
            body["parent"] = call.parent.id
        call.note("proposed", body)
        call.emit("proposed", {"arguments": arguments})

    # ── 3 authorise ──────────────────────────────────────────────────────────────────────────────

    async def _authorise(self, call: Call) -> None:
        assert call.entry is not None and call.arguments is not None
        lane = call.lane
        call.rules = lane.rules
        verdict = self.authority.judge(
            call.entry.spec,
            call.arguments,
            rules=lane.rules,
            roots=lane.around.roots,
            parent=None if call.parent is None or call.parent.verdict is None else call.parent.verdict.capabilities,
        )
        if self.authority.watchdogs and verdict.action != "deny":
            verdict = await self._watch(call, verdict)
        call.verdict = verdict
        if verdict.action == "deny":
            raise Refusal("authorise", "denied", verdict.reason)
        if verdict.action == "ask":
            await self._ask(call)
        else:
            call.note("authorised", {"by": "rules", "reason": verdict.reason})

    async def _watch(self, call: Call, verdict: Verdict) -> Verdict:
        assert call.entry is not None and call.arguments is not None
        spec, arguments, lane = call.entry.spec, call.arguments, call.lane
        self._flush(call)
        return await self._interruptible(
            call,
            "authorise",
            lambda: self.authority.watch(verdict, spec, arguments, lane.session_id, call_id=call.id),
        )

    async def _ask(self, call: Call) -> None:
        """Put the call to a person. No locks are held and no time-out runs while they think."""
        assert call.entry is not None and call.arguments is not None and call.verdict is not None
        verdict, lane = call.verdict, call.lane
        if call.parent is not None:
            raise Refusal(
                "authorise", "denied", f"{verdict.reason} A call made by a tool cannot ask: its caller holds locks."
            )
        attendant = lane.attendant
        if attendant is None:
            raise Refusal(
                "authorise",
                "denied",
                f"{verdict.reason} Nobody is attached to this session who could be asked, so it is denied.",
            )
        arguments_hash = canonical_hash(call.arguments)
        request = ApprovalRequest(
            call_id=call.id,
            session_id=lane.session_id,
            tool_id=call.entry.spec.id,
            arguments=call.arguments,
            arguments_hash=arguments_hash,
            definition_hash=call.entry.definition_hash,
            reason=verdict.reason,
            always=verdict.always,
        )
        call.note(
            "approval-requested", {"reason": verdict.reason, "arguments_hash": arguments_hash, "always": verdict.always}
        )
        self._flush(call)
        call.emit("asking", {"reason": verdict.reason, "always": verdict.always})
        answer = await self._interruptible(call, "authorise", lambda: attendant.approve(request))
        call.note(
            "approval-responded", {"choice": answer.choice, "message": answer.message, "arguments_hash": arguments_hash}
        )
        if answer.choice == "reject":
            said = f": {answer.message}" if answer.message else "."
            raise Refusal("authorise", "denied", f"the user rejected this call{said}")
        if answer.choice == "session" and verdict.always is not None:
            lane.rules = lane.rules.with_rules(
                parse_rule(verdict.always, scope="session", source="answered for this session")
            )
        call.rules = lane.rules
        call.note("authorised", {"by": "person", "choice": answer.choice, "arguments_hash": arguments_hash})
        call.emit("approved", {"choice": answer.choice})

    # ── 4 lock ───────────────────────────────────────────────────────────────────────────────────

    async def _lock(self, call: Call, predecessors: Sequence[Call]) -> None:
        assert call.entry is not None
        if call.parent is not None:
            self._borrow(call, call.parent)
            return
        for earlier in predecessors:
            if (
                earlier.entered is not None
                and not earlier.entered.done()
                and (call.entry.spec.side_effect != "read" or conflict(call.wants, earlier.wants))
            ):
                await self._interruptible(call, "lock", partial(_until, earlier.entered))
        if not call.wants:
            call.has_entered()
            return
        call.grant = self.locks.try_acquire(call.wants, call.id)
        if call.grant is not None:
            call.has_entered()
            return
        self._flush(call)
        began = time.monotonic_ns()
        request = self.locks.enqueue(call.wants, call.id)
        call.has_entered()
        call.emit("waiting", {"for": self.locks.waiting_for(request)})
        try:
            budget_s = self.limits.lock_wait_ms / 1000
            call.grant = await self._interruptible(call, "lock", lambda: request.granted(budget_s))
        except LockTimeout as error:
            raise Refusal(
                "lock",
                "timeout",
                f"waited {self.limits.lock_wait_ms} ms for {error}; nothing was run. Try again later.",
            ) from None
        finally:
            if call.grant is None:
                request.withdraw()
            call.lock_wait_ms = (time.monotonic_ns() - began) / 1e6

    def _borrow(self, call: Call, parent: Call) -> None:
        """A call made by a tool runs under its caller's locks, and cannot widen them (so no cycle can form)."""
        holder: Call | None = parent
        while holder is not None and holder.grant is None:
            holder = holder.parent
        if call.wants and (holder is None or holder.grant is None or not holder.grant.covers(call.wants)):
            needed = ", ".join(_lock_names(call.wants))
            raise Refusal(
                "lock",
                "conflict",
                f"{call.tool_id} needs the locks {needed}, which its caller {parent.tool_id} does not hold; its author declares them in 'locks'",
            )

    # ── 5 intend ─────────────────────────────────────────────────────────────────────────────────

    async def _intend(self, call: Call) -> None:
        """The last look before anything happens, and the record that it is about to."""
        assert call.entry is not None and call.verdict is not None
        if call.rules is not call.lane.rules:
            self._judge_again(call)
        intent: dict[str, Any] = {"locks": _lock_names(call.wants)}
        if call.lock_wait_ms:
            intent["lock_wait_ms"] = round(call.lock_wait_ms, 3)
        call.note("intended", intent)
        try:
            if call.entry.spec.side_effect == "read":
                if self.log.refusal is not None:
                    raise LogUnavailable(self.log.refusal)
                self._flush(call)
                if self.log.backlog > self.limits.max_backlog:
                    await self._interruptible(call, "intend", lambda: self.log.backlog_below(self.limits.max_backlog))
            else:
                records, call.records = call.records, []
                await uninterrupted(self.log.commit(records), call.execution)
        except LogUnavailable as error:
            raise Refusal(
                "intend", "unavailable", f"the commit log takes no records, so nothing may run: {error}"
            ) from None
        if call.execution.reason is not None or call.execution.caller_cancelled:
            raise self._stopped(call, "intend", call.execution.reason or "user")
        call.emit("started")

    def _judge_again(self, call: Call) -> None:
        """The session's rules changed while the call waited: a new deny counts, an answered ask stays answered."""
        assert call.entry is not None and call.arguments is not None
        lane = call.lane
        verdict = self.authority.judge(call.entry.spec, call.arguments, rules=lane.rules, roots=lane.around.roots)
        if verdict.action == "deny":
            raise Refusal("intend", "denied", verdict.reason)

    # ── 6 execute ────────────────────────────────────────────────────────────────────────────────

    async def _execute(self, call: Call) -> object:
        """Run the tool and give back what it returned, or the error result its failure stands for."""
        entry, verdict, arguments = call.entry, call.verdict, call.arguments
        assert entry is not None and verdict is not None and arguments is not None
        spec, execution = entry.spec, call.execution
        budget_ms = spec.timeout_ms
        if spec.timeout_argument is not None:
            budget_ms = min(budget_ms, arguments.get(spec.timeout_argument, budget_ms))
        runtime = CallRuntime(spec, call.id, call.lane.around, verdict.capabilities, _Doors(self, call))
        call.started_ns = time.monotonic_ns()
        work = entry.tool.execute(arguments, runtime)
        try:
            if spec.side_effect == "read" and not spec.promotable and not entry.blocking:
                return await execution.inline(work, budget_ms / 1000)
            return await execution.apart(work, budget_ms / 1000, cancellable=not entry.blocking)
        except StillRunning as still:
            self._leave_behind(call, still)
            return self._stop_result(call, still.reason, budget_ms, runtime.kept, still_running=True)
        except Stopped as stopped:
            return self._stop_result(call, stopped.reason, budget_ms, runtime.kept)
        except ToolError as error:
            return Result.of(error)
        except Exception as error:  # a defect in the tool: its class and text help, its traceback would not
            return Result.error("backend", f"{spec.id} failed unexpectedly: {type(error).__name__}: {str(error)[:500]}")

    def _stop_result(self, call: Call, reason: StopReason, budget_ms: float, kept: Any, **metadata: Any) -> Result:
        assert call.entry is not None
        spec = call.entry.spec
        if reason != "timeout":
            return Result.error(
                "cancelled", f"{spec.id} was {STOPPED_TEXT[reason]}", kept, stopped_by=reason, **metadata
            )
        if metadata:
            step = "it is still running and keeps its locks until it ends"
        elif spec.timeout_argument is not None and budget_ms < spec.timeout_ms:
            step = f"ask for less at once, or allow more with {spec.timeout_argument} (at most {spec.timeout_ms})"
        else:
            step = "ask for less at once"
        return Result.error(
            "timeout", f"{spec.id} was ended after its time-out of {budget_ms:g} ms; {step}", kept, **metadata
        )

    def _leave_behind(self, call: Call, still: StillRunning) -> None:
        """Keep the locks of work that goes on after its answer, and record when it ends."""
        call.late = True
        grant, call.grant = call.grant, None
        self._late.add(still.task)

        def over(task: asyncio.Task[Any]) -> None:
            self._late.discard(task)
            failure = None if task.cancelled() else task.exception()
            ended = (
                "cancelled"
                if task.cancelled()
                else "returned"
                if failure is None
                else f"failed: {type(failure).__name__}"
            )
            call.note("committed", {"late": True, "ended": ended})
            self._flush(call)
            if grant is not None:
                self.locks.release(grant)

        still.task.add_done_callback(over)

    async def nested(self, parent: Call, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        parent.children += 1
        child = self.call(
            f"{parent.id}.{parent.children}",
            ProposedCall(tool_id, arguments),
            parent.lane,
            parent.generation,
            parent=parent,
        )
        return (await self.carry_out(child)).result

    # ── 7 shape ──────────────────────────────────────────────────────────────────────────────────

    async def _shape(self, call: Call, value: object) -> Shaped:
        assert call.entry is not None
        metadata: dict[str, Any] = {"duration_ms": round(call.elapsed_ms, 3), "confined_by": call.entry.confined_by}
        if call.lock_wait_ms:
            metadata["lock_wait_ms"] = round(call.lock_wait_ms, 3)
        small = self.shaper.shape_small(call.entry.spec, value, metadata)
        if small is not None:
            return small
        return await self.shaper.shape(
            call.entry.spec, value, metadata, call_id=call.id, session_id=call.lane.session_id
        )

    # ── 8 commit ─────────────────────────────────────────────────────────────────────────────────

    async def _commit(self, call: Call, shaped: Shaped) -> None:
        """Record the outcome; with side effects it is durable before the locks go."""
        assert call.entry is not None
        call.note("committed", shaped.logged)
        if call.entry.spec.side_effect == "read" and not call.replayable:
            self._flush(call)
            return
        records, call.records = call.records, []
        try:
            await uninterrupted(self.log.commit(records), call.execution)
        except LogUnavailable as error:
            # It ran, and the answer says what is known. The record is still true, so it is tried again later; if
            # that fails too, the open intent makes the call 'interrupted' at the next start, never run again.
            self.log.append(records)
            shaped.result = shaped.result.with_metadata(unrecorded=str(error))

    async def _refuse(self, call: Call, refusal: Refusal) -> Shaped:
        result = call.answer_error(refusal.kind, self.shaper.redactor.text(refusal.text), **refusal.details)
        call.note("refused", {"step": refusal.step, "result": result.to_dict()})
        call.emit("refused", {"step": refusal.step, "kind": refusal.kind, "text": result.error_text})
        self._flush(call)
        return Shaped(result, result, {})

    # ── 9 release ────────────────────────────────────────────────────────────────────────────────

    def _release(self, call: Call) -> None:
        grant: Grant | None = call.grant
        if grant is not None:
            call.grant = None
            self.locks.release(grant)

    # ── around the steps ─────────────────────────────────────────────────────────────────────────

    def call(
        self,
        call_id: str,
        proposed: ProposedCall,
        lane: Lane,
        generation: Generation,
        *,
        parent: Call | None = None,
        replayable: bool = False,
    ) -> Call:
        """A call at the start of its way."""
        execution = Execution(asyncio.get_running_loop(), self.limits.grace_ms / 1000)
        return Call(call_id, proposed, lane, generation, execution, parent=parent, replayable=replayable)

    async def settled(self) -> None:
        """Wait for work that was left behind."""
        while self._late:
            await asyncio.wait(tuple(self._late))

    async def _recorded(self, call: Call) -> Answer | None:
        """What was answered before under this call's durable id, so that nothing runs twice."""
        if not call.replayable:
            return None
        before, outcome = await self.log.proposal_of(call.id), await self.log.outcome_of(call.id)
        if before is None or outcome is None:
            return None  # never proposed, or proposed and not begun
        body = outcome.body
        if before.body is not None and before.body.get("key_hash") != self._key_hash(call):
            kind, text = "conflict", "was used before with another tool or arguments; use a new key"
        elif outcome.kind == "interrupted":
            kind, text = (
                "interrupted",
                "was begun before and nobody knows how it ended; it is not run again. Look at what it did, then use a new key",
            )
        elif body is None:
            kind, text = (
                "unavailable",
                "was answered before and its result has been removed from the log; use a new key",
            )
        else:
            result = Result.from_dict(body["result"]).with_metadata(recorded=True)
            return Answer(call.id, call.proposed.name, result, result)
        result = call.answer_error(kind, f"the key of call {call.id} {text}")
        return Answer(call.id, call.proposed.name, result, result)

    def _key_hash(self, call: Call) -> str:
        proposed = call.proposed
        entry = call.generation.resolve(proposed.name)
        return canonical_hash([entry.spec.id if entry else proposed.name, proposed.arguments])

    def _frozen(self, arguments: Any) -> Any:
        """The arguments as they go on record: redacted, and out of reach of a tool that changes its own."""
        if self.shaper.redactor.active:
            return self.shaper.redactor.value(arguments)
        try:
            return orjson.Fragment(orjson.dumps(arguments))
        except TypeError:  # half surrogate pairs, huge integers: the log keeps what it can of them
            return copy.deepcopy(arguments)

    def _flush(self, call: Call) -> None:
        if call.records:
            records, call.records = call.records, []
            self.log.append(records)

    async def _interruptible(self, call: Call, step: Step, work: Callable[[], Awaitable[Any]]) -> Any:
        """Await something that a user stop or shutdown may end."""
        try:
            return await call.execution.inline(_run(work))
        except Stopped as stopped:
            raise self._stopped(call, step, stopped.reason) from None

    def _stopped(self, call: Call, step: Step, reason: StopReason) -> Refusal:
        return Refusal(
            step,
            "cancelled",
            f"{call.tool_id} was {STOPPED_TEXT[reason]} before it began; nothing was run",
            stopped_by=reason,
        )


@dataclass(frozen=True, slots=True)
class _Doors:
    """The arbiter as the runtime of one call sees it."""

    arbiter: Arbiter
    of: Call

    @property
    def cancellation(self) -> Execution:
        return self.of.execution

    def may(self) -> May:
        call = self.of
        assert call.verdict is not None and call.entry is not None
        around = call.lane.around
        return self.arbiter.authority.may(call.verdict, call.entry.spec, rules=call.lane.rules, roots=around.roots)

    def tell(self, message: str, fraction: float | None) -> None:
        emit = partial(self.of.emit, "progress", {"message": message, "fraction": fraction})
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # a tool's thread: whoever watches lives on the event loop
            self.of.execution.loop.call_soon_threadsafe(emit)
        else:
            emit()

    async def call_tool(self, tool_id: str, arguments: Mapping[str, Any]) -> Result:
        return await self.arbiter.nested(self.of, tool_id, arguments)


@lru_cache(maxsize=1024)
def _lock_names(wants: tuple[Want, ...]) -> tuple[str, ...]:
    """Locks as people read them: ``workspace/src/a.py:X``."""
    return tuple(f"{'/'.join(resource)}:{mode}" for resource, mode in wants)


def _arguments(proposed: ProposedCall) -> tuple[dict[str, Any] | None, str]:
    """The arguments as an object, or None and why they are not one."""
    given = proposed.arguments
    if proposed.fault is not None:
        return None, proposed.fault
    if isinstance(given, (str, bytes)):
        try:
            return parse_arguments(given), ""
        except ArgumentText as error:
            return None, str(error)
    return (cast("dict[str, Any]", given) if type(given) is dict else dict(given)), ""


def canonical_hash(value: Any) -> str:
    """SHA-256 over ``value`` as JSON with sorted keys: what an approval or a key is bound to."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


async def _run(work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


async def _until(entered: asyncio.Future[None]) -> None:
    await asyncio.shield(entered)
