"""How one call is carried out: nine steps, in one place, in this order.

:meth:`Arbiter.carry_out` reads like the list in the README. Each step is one short method below it; a step
says no by raising :class:`~handrail.arbiter.call.Refusal`, and whatever happens the call is answered once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import orjson

from handrail.arbiter.authorisation import Authorisation
from handrail.arbiter.call import Call, Lane, Refusal
from handrail.arbiter.execution import Execution, uninterrupted
from handrail.arbiter.locks import Grant, LockTable, LockTimeout, Want, conflict
from handrail.arbiter.output import Shaped, Shaper
from handrail.arbiter.repeats import Repeats
from handrail.arbiter.resources import Resources
from handrail.arbiter.running import ToolRuns
from handrail.contract.call import Answer, ProposedCall
from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.jsontext import MAX_ARGUMENT_BYTES, ArgumentText, json_type, parse_arguments
from handrail.policy.authority import Authority
from handrail.record.log import CommitLog
from handrail.registry.generation import Generation
from handrail.store.encoding import decode, encode


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
        self.locks = locks
        self.resources = resources
        self.shaper = shaper
        self.limits = limits
        self.authorisation = Authorisation(authority, shaper)
        self.runs = ToolRuns(authority, locks, self._nested, self.carry_out)
        self.repeats = Repeats(log, shaper)

    async def carry_out(self, call: Call, predecessors: Sequence[Call] = ()) -> Answer:
        """The way of one call. Always returns exactly one answer; refusals are recorded like outcomes.

        :param predecessors: the earlier calls of the same model reply, in its order
        :raises asyncio.CancelledError: if the awaiting task was cancelled, once the call is on record
        """
        call.lane.running[call.id] = call
        try:
            try:
                if call.replayable and (recorded := await self.repeats.answer_to(call)) is not None:
                    return recorded
                self._resolve(call)  # 1
                self._validate(call)  # 2
                await self.authorisation.decide(call)  # 3
                await self._lock(call, predecessors)  # 4
                await self._intend(call)  # 5
                value = await self.runs.run(call)  # 6
                shaped = await self._shape(call, value)  # 7
                await self._commit(call, shaped)  # 8
            except Refusal as refusal:
                shaped = self._refuse(call, refusal)
            except LogUnavailable as error:
                text = f"the commit log takes no records, so nothing may run: {error}"
                shaped = self._refuse(call, Refusal("intend", "unavailable", text))
            except Exception as defect:
                shaped = self._admit(call, defect)
            finally:
                self._release(call)  # 9
        finally:
            call.has_entered()
            lane = call.lane
            del lane.running[call.id]
            if lane.emptied is not None and not lane.running:
                lane.emptied.set()
        if call.execution.owed is not None:
            raise call.execution.owed  # the very one: structured concurrency tells its own cancellations by it
        if call.watched:
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
        fault = self._propose(call, call.proposed.arguments if arguments is None else arguments) or fault
        problems = [fault] if fault or arguments is None else call.entry.schema.problems(arguments)
        if arguments is None or problems:
            kind = call.proposed.fault_kind if call.proposed.fault is not None else "invalid_input"
            raise Refusal("validate", kind, f"{spec.id}: " + "; ".join(problems))
        call.arguments = arguments
        try:
            call.wants = self.resources.wants(spec, arguments, call.lane.around.roots)
        except ToolError as error:
            raise Refusal("validate", error.kind, error.text) from None

    def _propose(self, call: Call, arguments: Any) -> str | None:
        """Record the proposal. Gives what is wrong with arguments that are more than a call may carry."""
        if isinstance(arguments, (str, bytes)):  # not JSON: keep the head, as text, for whoever asks what was sent
            head = arguments[:2_000]
            arguments = {"unparsed": head if isinstance(head, str) else head.decode("utf-8", "replace")}
        recorded, fault = self._frozen(arguments)
        body = {
            "tool": call.tool_id,
            "arguments": recorded,
            "generation": call.generation.number,
        }
        if call.replayable:
            body["key_hash"] = self.repeats.key_hash(call)
        if call.entry is not None:
            body["definition"] = call.entry.definition_hash
            body["side_effect"] = call.entry.spec.side_effect
        if call.proposed.provider_id is not None:
            body["provider_id"] = call.proposed.provider_id
        if call.parent is not None:
            body["parent"] = call.parent.id
        call.note("proposed", body)
        if call.watched:
            call.emit("proposed", {"arguments": arguments})
        return fault

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
                call.own_arguments()
                await call.interruptible("lock", partial(_until, earlier.entered))
        if not call.wants:
            call.has_entered()
            return
        call.grant = self.locks.try_acquire(call.wants, call.id)
        if call.grant is not None:
            call.has_entered()
            return
        call.own_arguments()
        call.flush()
        began = time.monotonic_ns()
        request = self.locks.enqueue(call.wants, call.id)
        call.has_entered()
        call.emit("waiting", {"for": self.locks.waiting_for(request)})
        try:
            budget_s = self.limits.lock_wait_ms / 1000
            call.grant = await call.interruptible("lock", lambda: request.granted(budget_s))
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
        """The last look before anything happens, and the record that it is about to.

        With side effects that record is durable first. A read's goes out when the read first waits for something, or
        with its outcome, whichever comes first.
        """
        assert call.entry is not None and call.verdict is not None
        if call.rules is not call.lane.rules:
            self.authorisation.again(call)
        intent: dict[str, Any] = {"locks": _lock_names(call.wants)}
        if call.lock_wait_ms:
            intent["lock_wait_ms"] = round(call.lock_wait_ms, 3)
        call.note("intended", intent)
        if call.entry.spec.side_effect == "read":
            if not self.log.takes_more(self.limits.max_backlog):
                await call.interruptible("intend", lambda: self.log.backlog_below(self.limits.max_backlog))
                if self.log.refusal is not None:
                    raise LogUnavailable(self.log.refusal)
        else:
            call.own_arguments()
            records, call.records = call.records, []
            try:
                await uninterrupted(self.log.commit(records), call.execution)
            except LogUnavailable:
                # Nothing of it was written. What was proposed and decided is still true; the intent is not.
                call.records = [record for record in records if record.kind != "intended"]
                raise
        if call.execution.reason is not None or call.execution.owed is not None:
            raise call.stopped("intend", call.execution.reason or "user")
        call.begun = True
        call.emit("started")

    # ── 6 execute ────────────────────────────────────────────────────────────────────────────────

    def _nested(self, parent: Call, tool_id: str, arguments: Mapping[str, Any], fault: str | None) -> Call:
        parent.children += 1
        return self.call(
            f"{parent.id}.{parent.children}",
            ProposedCall(tool_id, arguments, fault=fault, fault_kind="cancelled"),
            parent.lane,
            parent.generation,
            parent=parent,
        )

    # ── 7 shape ──────────────────────────────────────────────────────────────────────────────────

    async def _shape(self, call: Call, value: object) -> Shaped:
        assert call.entry is not None
        metadata: dict[str, Any] = {"duration_ms": call.elapsed_ms, "confined_by": call.entry.confined_by}
        if call.lock_wait_ms:
            metadata["lock_wait_ms"] = round(call.lock_wait_ms, 3)
        small = self.shaper.shape_small(call.entry.spec, value, metadata)
        if small is not None:
            return small
        spec, lane = call.entry.spec, call.lane
        return await uninterrupted(
            self.shaper.shape(spec, value, metadata, call_id=call.id, session_id=lane.session_id), call.execution
        )

    # ── 8 commit ─────────────────────────────────────────────────────────────────────────────────

    async def _commit(self, call: Call, shaped: Shaped) -> None:
        """Record the outcome; with side effects it is durable before the locks go."""
        assert call.entry is not None
        call.note("committed", shaped.logged)
        if call.entry.spec.side_effect == "read" and not call.replayable:
            call.flush()
            return
        records, call.records = call.records, []
        try:
            await uninterrupted(self.log.commit(records), call.execution)
        except LogUnavailable as error:
            # It ran, and the answer says what is known. The record is still true, so it is tried again later; if
            # that fails too, the open intent makes the call 'interrupted' at the next start, never run again.
            self.log.append(records)
            shaped.result = shaped.result.with_metadata(unrecorded=str(error))

    def _refuse(self, call: Call, refusal: Refusal) -> Shaped:
        result = call.answer_error(refusal.kind, self.shaper.redactor.text(refusal.text), **refusal.details)
        call.note("refused", {"step": refusal.step, "result": result.to_dict()})
        call.emit("refused", {"step": refusal.step, "kind": refusal.kind, "text": result.error_text})
        call.flush()
        return Shaped(result, result, {})

    def _admit(self, call: Call, defect: Exception) -> Shaped:
        """A defect of our own is an answer too, and says what is not known."""
        text = f"Handrail itself failed while carrying out {call.tool_id} ({type(defect).__name__}); "
        text += "whether it took effect is not known" if call.begun else "it was not begun"
        result = call.answer_error("backend", self.shaper.redactor.text(f"{text}: {str(defect)[:300]}"))
        call.note("committed" if call.begun else "refused", {"result": result.to_dict(), "defect": True})
        call.flush()
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
        redactor = self.shaper.redactor
        return Call(
            call_id, proposed, lane, generation, execution, self.log, redactor, parent=parent, replayable=replayable
        )

    def _frozen(self, arguments: Any) -> tuple[Any, str | None]:
        """The arguments as they go on record, redacted and out of reach of a tool that changes its own; and what is
        wrong where they are too much to be kept whole."""
        try:
            encoded, plain = orjson.dumps(arguments), True
        except TypeError:  # half surrogate pairs, huge integers, depth, cycles: the log keeps what it can of them
            encoded, plain = encode(arguments, max_bytes=2**62), False
        if len(encoded) > MAX_ARGUMENT_BYTES:
            size = f"{len(encoded):,} bytes of JSON; at most {MAX_ARGUMENT_BYTES:,} are taken"
            return {"$oversized": len(encoded)}, f"the arguments are {size}. Pass a path to a file instead"
        if not plain:
            arguments = decode(encoded)
        if self.shaper.redactor.active:
            return self.shaper.redactor.value(arguments), None
        return (orjson.Fragment(encoded) if plain else arguments), None


@lru_cache(maxsize=1024)
def _lock_names(wants: tuple[Want, ...]) -> tuple[str, ...]:
    """Locks as people read them: ``workspace/src/a.py:X``."""
    return tuple(f"{'/'.join(resource)}:{mode}" for resource, mode in wants)


def _arguments(proposed: ProposedCall) -> tuple[dict[str, Any] | None, str]:
    """The arguments as an object, or None and why they are not one."""
    given: Any = proposed.arguments
    if proposed.fault is not None:
        return None, proposed.fault
    if isinstance(given, (str, bytes)):
        try:
            return parse_arguments(given), ""
        except ArgumentText as error:
            return None, str(error)
    if isinstance(given, dict):
        return given, ""  # pyright: ignore[reportUnknownVariableType]
    if isinstance(given, Mapping):
        return dict(given), ""  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return None, f"the arguments are a JSON {json_type(given)}; expected an object"


async def _until(entered: asyncio.Future[None]) -> None:
    await asyncio.shield(entered)
