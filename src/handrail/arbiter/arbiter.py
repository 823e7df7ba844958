"""The arbiter: it carries out one call in nine steps, and the calls of one reply in their order.

:meth:`Arbiter.carry_out` reads like the list in the README. Each step is one short method below it. A step rejects a call
by raising :class:`~handrail.arbiter.call.Refusal`, and the call is answered exactly once in every case. A step that
seldom has to wait returns an awaitable or None: a coroutine that never waits costs as much as the step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import orjson

from handrail.arbiter.approvals.asking import Parked
from handrail.arbiter.approvals.desk import Approvals, Lifetimes
from handrail.arbiter.arguments import BoundedChecks, Repeats, arguments_of, for_the_record, unrun
from handrail.arbiter.authorisation import Authorisation
from handrail.arbiter.call import AskedPeople, Call, Lane, LookedAhead, Refusal
from handrail.arbiter.delegating import check_handing
from handrail.arbiter.execution import Execution, HandedOver, begin_at_once, uninterrupted, until_known
from handrail.arbiter.jobs.jobs import DetachedCalls, JobLimits, Restarts
from handrail.arbiter.jobs.views import JobView
from handrail.arbiter.locking import Locking, choose_locks
from handrail.arbiter.locks import LockTable, Resources, Want, lock_names
from handrail.arbiter.output.shaper import Shaped, Shaper, said, told_at_the_end
from handrail.arbiter.running import ToolRuns
from handrail.arbiter.states import StateLimits, States
from handrail.catalog.interaction import READER
from handrail.contract.approvals import Approval
from handrail.contract.call import Answer, ProposedCall
from handrail.contract.doors.files import Located
from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.generation import Generation
from handrail.contract.schema.schema import UnfinishedCheck
from handrail.contract.text.neutral import visible
from handrail.contract.tool.names import wire_name
from handrail.contract.tool.spec import ToolSpec
from handrail.record.log import CommitLog, Interrupted
from handrail.store.database.writer import Taken
from handrail.store.lease import Lease
from handrail.store.tables.approvals import ApprovalTable
from handrail.store.tables.jobs import JobTable, StateTable

# Prevalidation: the checks of a call, made while its block is still open in the model's stream.
#
# The block closes a moment after the last piece of its arguments, and from then on each step adds to the delay of the call.
# Parsing the arguments, checking them, finding the locks and evaluating the rules have no side effects, so they run in that
# moment. The call still takes all its steps in order. It finds these answers ready, and the disk awake for its first record.


def look_ahead(call: Call, resources: Resources, authorisation: Authorisation) -> LookedAhead | None:
    """Prevalidate a call as it will be if its block closes now, and wake the disk for its first record.

    :param call: a call that is not used afterwards
    :return: None if the checks take long, fail or do not apply; the call then reports errors when it is proposed
    """
    try:
        looked = _looked_at(call, resources, authorisation)
    except Exception:  # wrong arguments, or a defect: the call itself reports them
        return None
    entry = call.entry
    if looked is not None and looked.verdict.action == "allow" and entry and entry.spec.side_effect != "read":
        call.log.rouse()
    return looked


def _looked_at(call: Call, resources: Resources, authorisation: Authorisation) -> LookedAhead | None:
    entry, proposed = call.generation.resolve(call.proposed.name), call.proposed
    if entry is None or entry.withheld is not None:
        return None
    if not isinstance(proposed.arguments, (str, bytes)):  # the caller may still change the object
        return None
    spec, tool = entry.spec, entry.tool
    if spec.mode != "direct" or spec.background_argument is not None or tool.types:
        return None
    if tool.asks_source is not None or tool.goes_on is not None or tool.of_job is not None:
        return None
    given, compact, _ = arguments_of(proposed)
    if given is None:
        return None
    lane, call.entry, call.arguments = call.lane, entry, entry.admitted(given, parsed=True)
    located: dict[str, Located] = {}
    wants = resources.wants(spec, call.arguments, lane.around.roots, located)
    verdict = authorisation.judged(call, located)
    return LookedAhead(proposed, given, compact, call.arguments, wants, lane.authority.layer, lane.rules, verdict)


# Calls to tools whose schema the model has not seen, and the help in the error about wrong arguments.
#
# A call is allowed or denied in the same way whether or not its tool is loaded. But the error about guessed arguments
# includes the tool's schema, and a tool with required reading does not run before the model has read its manual.

MAX_SCHEMA = 32 * 1024
"""Bytes of JSON. For a larger schema the error only names the call that shows it."""


def near(call: Call) -> str:
    """Return which tools a call with an unknown name may have meant, as a sentence."""
    catalog, name = call.lane.catalog, call.proposed.name
    if awaited := call.generation.awaited(name):
        return awaited
    if close := catalog.near(call.generation, name):
        return f"Did you mean {' or '.join(f'`{one}`' for one in close)}?"
    return call.generation.awaited(name, else_any=True) or "No tool has a similar name. Use a tool from your list."


def unseen(call: Call) -> dict[str, Any]:
    """Load a tool that the model has not seen, and return its schema for the error about its arguments.

    :return: details for the refusal; empty if the model has seen the tool
    """
    entry, catalog = call.entry, call.lane.catalog
    assert entry is not None
    if call.parent is not None or call.proposed.fault is not None:
        return {}
    if catalog.was_shown(call.generation, entry.id):
        return {}
    catalog.bring(call.generation, (entry.id,))
    told: dict[str, Any] = {"tool": entry.id, "description": entry.spec.description}
    if len(orjson.dumps(entry.spec.parameters, default=str)) <= MAX_SCHEMA:
        told["parameters"] = dict(entry.spec.parameters)
    else:
        told["manual"] = f"The schema is too long for this error. To read it, {_reading(entry.id)}."
    details: dict[str, Any] = {"data": call.redactor.value(told) if call.redactor.active else told}
    if entry.untrusted:
        details["untrusted"] = f"it comes from {entry.untrusted}"
    return details


async def read_first(call: Call) -> None:
    """Require that the session has read the documentation of the tool. Nested calls are exempt.

    :raises Refusal: ``conflict``, with the call that reads it, or with the documentation if the agent cannot read it
    :raises LogUnavailable: if it is unknown what the session has read
    """
    entry, catalog = call.entry, call.lane.catalog
    assert entry is not None
    if catalog.manuals is None or call.parent is not None or await catalog.manuals.has(entry):
        return
    reader = call.generation.resolve(READER)
    if reader is not None and reader.withheld is None:
        text = (
            f"`{entry.id}` requires that you read its documentation first: {_reading(entry.id)}. Then repeat this call. "
            "Nothing was run."
        )
        raise Refusal("validate", "conflict", text, manual_first=entry.id)
    await catalog.manuals.note(entry)
    text = (
        f"`{entry.id}` requires that you read its documentation first. The documentation is in this result. "
        "Read it, then repeat the call. Nothing was run."
    )
    raise Refusal("validate", "conflict", text, data={"manual": call.redactor.text(entry.spec.documentation)})


def _reading(tool_id: str) -> str:
    return f'call {wire_name(READER)} with {{"tool": "{tool_id}"}}'


_LOOK_AGAIN_S = 0.02
_tuple: Any = tuple
_new_answer: Callable[..., Answer] = _tuple.__new__
"""Makes an ``Answer`` in half the time of its own constructor."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets of every call. The time-out of a tool is in its spec."""

    lock_wait_ms: int = 60_000
    grace_ms: int = 5_000
    """How long work that was asked to stop may continue before its caller is answered without it."""
    state_idle_ms: int = 900_000
    """How long an open tool session waits for its next step."""
    open_states: int = 32
    """Per session."""
    job_output_mib: int = 1024
    """Disk space for the outputs of all jobs together."""
    cut_output_mib: int = 1024
    """Disk space for the full text of all truncated outputs together."""
    max_backlog: int = 20_000
    """Records that may wait for the disk before further calls wait."""
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    """How long approval requests stay open, and how long an approval stays valid."""


class Arbiter:
    """The only code that runs calls."""

    def __init__(
        self,
        log: CommitLog,
        lease: Lease,
        locks: LockTable,
        resources: Resources,
        shaper: Shaper,
        limits: Limits,
    ) -> None:
        self.log = log
        self.lease = lease
        self.locks = locks
        self.resources = resources
        self.shaper = shaper
        self.limits = limits
        self.approvals = Approvals(ApprovalTable(log.database), log, shaper, limits.lifetimes)
        self.authorisation = Authorisation(self.approvals, shaper, resources)
        self.locking = Locking(locks, limits.lock_wait_ms)
        self.repeats = Repeats(log, shaper)
        self.checks = BoundedChecks()
        bounds = JobLimits(grace_s=limits.grace_ms / 1000, output_bytes=limits.job_output_mib * 1024 * 1024)
        self.jobs = DetachedCalls(JobTable(log.database), log, shaper, resources, self.carry_out, bounds)
        self.restarts = Restarts(self.jobs, self.approvals, partial(self.call, resumed=()))
        self.runs = ToolRuns(locks, self.authorisation.asking, self.jobs, self._nested, self.carry_out)
        of_states = StateLimits(limits.open_states, limits.state_idle_ms / 1000, limits.grace_ms / 1000)
        self.states = States(StateTable(log.database), log, of_states, self.runs.wait_for)
        self.runs.states = self.states

    async def recover(self, interrupted: Iterable[Interrupted]) -> None:
        """Settle what the former process left unfinished: jobs, approval requests and tool sessions. Call it at start.

        :param interrupted: the calls that had started
        :raises LogUnavailable: if the log cannot be read or takes no records
        """
        await self.restarts.recover(interrupted)
        await self.states.recover()

    async def carry_out(self, call: Call, predecessors: Sequence[Call] = ()) -> Answer:
        """Carry out one call and return exactly one answer.

        Refusals are recorded like outcomes.

        :param predecessors: the earlier calls of the same model reply, in its order
        :raises asyncio.CancelledError: if the awaiting task was cancelled, after the call is recorded
        """
        call.lane.running.setdefault(call.id, call)  # the same key may run already, as a job
        try:
            try:
                if (job := call.job) is None or not job.decided:  # the turn of a job took its first steps
                    if call.replayable and (recorded := await self.repeats.answer_to(call)) is not None:
                        return recorded
                    self._resolve(call)  # 1
                    try:
                        spec = self._validate(call)  # 2
                    except UnfinishedCheck as unfinished:
                        spec = await self._validate_in_process(call, unfinished)
                    if spec.manual_first:
                        await read_first(call)
                        call.located = None
                    if waits := self.authorisation.decide(call):  # 3
                        await waits
                    if call.background and call.job is None:
                        return await self.jobs.detach(call, predecessors)
                if not call.begun:  # a call that became a job while its tool ran continues there
                    if waits := self.locking.lock(call, predecessors):  # 4
                        await waits
                    if waits := self._intend(call):  # 5
                        await waits
                value = await self.runs.run(call)  # 6
                shaped = self._shape_small(call, value) or await self._shape(call, value)  # 7
                if waits := self._commit(call, shaped):  # 8
                    await waits
            except HandedOver:
                return self.jobs.took_over(call)
            except Refusal as refusal:
                shaped = self._refuse(call, refusal)
            except Parked as parked:
                shaped = self._park(call, parked.approval_id)
            except LogUnavailable as error:
                text = f"The commit log cannot be written, so no call can run: {error}. Ask the user to fix it."
                shaped = self._refuse(call, Refusal("intend", "unavailable", text))
            except Exception as defect:
                shaped = self._admit(call, defect)
            finally:
                if (job := call.job) is None or not job.detached:
                    self.locking.release(call)  # 9
        finally:
            lane = call.lane
            if (job := call.job) is None or not job.detached:
                if call.entered is not None:
                    call.has_entered()
                if lane.running.get(call.id) is call:
                    del lane.running[call.id]
            if lane.emptied is not None:
                lane.emptied.set()
        if call.execution.owed is not None:
            raise call.execution.owed  # the same object: structured concurrency recognises its cancellations by it
        if lane.failed is not None or shaped.result.type == "error":
            lane.heed(call, shaped.result, self.shaper.hash)
        if call.watched:
            call.emit("finished", told_at_the_end(shaped.result))
        return _new_answer(Answer, (call.id, call.tool_id, shaped.result, shaped.model))

    # ── 1 resolve ────────────────────────────────────────────────────────────────────────────────

    def _resolve(self, call: Call) -> None:
        proposed, generation = call.proposed, call.generation
        entry = generation.resolve(proposed.name)
        call.entry = entry
        if entry is None:
            self._propose(call, unrun(proposed.arguments, self.shaper.redactor))
            if proposed.fault is not None:
                raise Refusal("resolve", proposed.fault_kind, proposed.fault)
            name = self.shaper.redactor.head(proposed.name, 80)
            text = (
                f"Tool `{visible(name)}` does not exist. {near(call)}"
                if name
                else "The call names no tool. Give a tool's name."
            )
            raise Refusal("resolve", "unknown_tool", text)
        call.tool_id = entry.id
        if entry.withheld is not None:
            self._propose(call, unrun(proposed.arguments, self.shaper.redactor))
            raise Refusal("resolve", "unavailable", f"Tool `{entry.spec.id}` is unavailable: {entry.withheld}")
        if call.parent is None:
            call.lane.catalog.called(entry.id)

    # ── 2 validate ───────────────────────────────────────────────────────────────────────────────

    def _validate(self, call: Call) -> ToolSpec:
        assert call.entry is not None
        spec = call.entry.spec
        if (looked := call.looked) is not None:
            if fault := self._propose(call, looked.given, looked.compact):
                raise Refusal("validate", "invalid_input", f"{spec.id}: {fault}", **unseen(call))
            call.arguments, call.wants = looked.arguments, looked.wants
            return spec
        entry = call.entry
        arguments, compact, fault = arguments_of(call.proposed)
        if spec.mode == "stateful":
            self.states.look(call, arguments)
        proposed = unrun(call.proposed.arguments, self.shaper.redactor) if arguments is None else arguments
        fault = self._propose(call, proposed, compact) or fault
        if arguments is None or fault:
            kind = call.proposed.fault_kind if call.proposed.fault is not None else "invalid_input"
            raise Refusal("validate", kind, f"{spec.id}: {fault}", **unseen(call))
        try:
            arguments = entry.admitted(arguments, parsed=isinstance(call.proposed.arguments, (str, bytes)))
        except UnfinishedCheck:
            raise
        except ToolError as error:
            raise Refusal("validate", error.kind, error.text, **unseen(call)) from None
        return self._take_arguments(call, arguments)

    async def _validate_in_process(self, call: Call, unfinished: UnfinishedCheck) -> ToolSpec:
        """Complete step 2 in a separate process, if the check is too expensive for the event loop."""
        entry = call.entry
        assert entry is not None
        shared = not isinstance(call.proposed.arguments, (str, bytes))
        try:
            check = partial(self.checks.admitted, entry, unfinished, shared=shared)
            arguments = await call.interruptible("validate", check)
        except ToolError as error:
            raise Refusal("validate", error.kind, error.text, **unseen(call)) from None
        call.owns_arguments = True
        return self._take_arguments(call, arguments)

    def _take_arguments(self, call: Call, arguments: dict[str, Any]) -> ToolSpec:
        """Store valid arguments and find their locks."""
        assert call.entry is not None
        spec = call.entry.spec
        call.arguments = arguments
        if spec.background_argument is None and spec.mode == "direct":  # nearly every call
            try:
                if (of_job := call.entry.tool.of_job) is not None:
                    JobView(self.jobs, call.session_id).check(of_job, arguments[of_job.argument])
                located: dict[str, Located] = {}
                call.located = located
                call.wants = self.resources.wants(spec, arguments, call.lane.around.roots, located)
            except ToolError as error:
                raise Refusal("validate", error.kind, error.text) from None
        else:
            if call.going is not None:
                self.states.take(call)
            choose_locks(call, self.resources)
            check_handing(call)
        return spec

    def _propose(self, call: Call, arguments: Any, compact: bytes | None = None) -> str | None:
        """Record the proposal.

        :return: what is wrong if the arguments are larger than a call may carry
        """
        if call.resumed:
            attempt = {} if call.job is None else {"job": call.job.row.id, "attempt": call.job.row.job.attempt}
            asked = {"approval": [row.id for row in call.people.asked], "generation": call.generation.number}
            call.note("resumed", {**asked, **attempt})
            return None
        recorded, fault = for_the_record(arguments, compact, self.shaper.redactor)
        body: dict[str, Any] = {"tool": call.tool_id, "generation": call.generation.number}
        if call.replayable:
            body["key_hash"] = self.repeats.key_hash(call)
        if (entry := call.entry) is not None:
            body["definition"] = entry.definition_hash
            body["side_effect"] = entry.spec.side_effect
            if entry.behind is not None:
                body["answered_by"] = entry.behind.id
        if call.proposed.provider_id is not None:
            body["provider_id"] = call.proposed.provider_id
        if (topic := call.lane.around.topic) is not None:
            body["topic"] = topic
        if call.parent is not None:
            body["parent"] = call.parent.id
        if call.going is not None:
            body |= call.going.told
        call.note("proposed", body, redacted={"arguments": recorded})
        if call.watched:
            call.emit("proposed", {"arguments": call.to_tell(arguments)})
        return fault

    # ── 5 intend ─────────────────────────────────────────────────────────────────────────────────

    def _intend(self, call: Call) -> Awaitable[None] | None:
        """Check the decision again and record that the call is about to start.

        With side effects, the record is durable first. The record of a read is written when the read first waits, or with its
        outcome.
        """
        assert call.entry is not None
        if call.rules is not call.lane.rules:
            self.authorisation.again(call)
        granted = call.people.granted
        if granted:
            self.authorisation.asking.check_definition(call)
        intent = _intent_to_hold(call.wants)
        if call.lock_wait_ms:
            intent = {**intent, "lock_wait_ms": round(call.lock_wait_ms, 3)}
        call.note("intended", intent)
        if call.entry.spec.side_effect != "read" or granted or not self.log.takes_more(self.limits.max_backlog):
            return self._intend_on_record(call)
        self._begin(call)
        return None

    async def _intend_on_record(self, call: Call) -> None:
        assert call.entry is not None
        granted = call.people.granted
        if call.entry.spec.side_effect == "read" and not granted:
            await call.interruptible("intend", lambda: self.log.backlog_below(self.limits.max_backlog))
            if self.log.refusal is not None:
                raise LogUnavailable(self.log.refusal)
        else:
            call.own_arguments()
            records, call.records = call.records, []
            try:
                if granted:
                    await self.authorisation.asking.check_files(call)
                    await uninterrupted(self.authorisation.asking.use(call, records), call.execution)
                else:
                    await until_known(self.log.promise(records), call.execution)
            except ToolError as error:  # an approval that is no longer valid
                call.records = [record for record in records if record.kind != "intended"]
                raise Refusal("intend", error.kind, error.text) from None
            except LogUnavailable:
                # None of the records was written. The proposal and the decision are still true; the intent is not.
                call.records = [record for record in records if record.kind != "intended"]
                raise
            await call.known()  # its write was queued earlier
            if not self.lease.valid:
                await call.interruptible("intend", self._still_held)
        self._begin(call)

    async def _still_held(self) -> None:
        """Wait after a pause until it is certain that no other process holds the lease.

        :raises Refusal: ``unavailable``, if another process has it
        """
        while not self.lease.valid:
            if (taken := self.lease.lost) is not None:
                raise Refusal("intend", "unavailable", f"Nothing was run: {taken}")
            await asyncio.sleep(_LOOK_AGAIN_S)  # the lease's own thread finds out

    def _begin(self, call: Call) -> None:
        if call.execution.reason is not None or call.execution.owed is not None:
            raise call.stopped("intend", call.execution.reason or "user")
        call.begun = True
        if call.job is not None:
            self.jobs.begun(call)
        if call.watched:
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

    def _shape_small(self, call: Call, value: object) -> Shaped | None:
        assert call.entry is not None
        return None if call.artifacts else self.shaper.shape_small(call.entry.spec, value, self._metadata(call))

    async def _shape(self, call: Call, value: object) -> Shaped:
        assert call.entry is not None
        spec, session_id, nested = call.entry.spec, call.lane.session_id, call.artifacts
        work = self.shaper.shape(
            spec, value, self._metadata(call), call_id=call.id, session_id=session_id, nested=nested
        )
        return await uninterrupted(work, call.execution)

    def _metadata(self, call: Call) -> dict[str, Any]:
        assert call.entry is not None
        metadata: dict[str, Any] = {"duration_ms": call.elapsed_ms, "confined_by": call.entry.confined_by}
        if call.read_only:
            metadata["read_only"] = True
        if call.entry.untrusted:
            metadata["untrusted"] = f"it comes from {call.entry.untrusted}"
        if call.lock_wait_ms:
            metadata["lock_wait_ms"] = round(call.lock_wait_ms, 3)
        if call.reached:
            metadata["network"] = call.network()
        if call.job is not None:
            metadata |= self.jobs.said_of(call.job)
        return metadata

    # ── 8 commit ─────────────────────────────────────────────────────────────────────────────────

    def _commit(self, call: Call, shaped: Shaped) -> Awaitable[None] | None:
        """Record the outcome.

        The record is durable before the locks are released if the call has side effects or its answer delivers notifications.
        """
        assert call.entry is not None
        call.note("committed", shaped.logged)
        if call.entry.spec.side_effect != "read" or call.replayable or call.heard_of:
            return self._commit_on_record(call, shaped)
        call.flush()
        return None

    async def _commit_on_record(self, call: Call, shaped: Shaped) -> None:
        records, call.records = call.records, []
        try:
            if call.heard_of and shaped.result.ok:
                await uninterrupted(self.jobs.record_telling(call, records), call.execution)
            else:
                await until_known(self.log.begin(records), call.execution)
        except LogUnavailable as error:
            # It ran, and the answer says what is known. The record is still true, so it is tried again later; if
            # that fails too, the open intent makes the call 'interrupted' at the next start, never run again.
            self.log.append(records)
            shaped.result = shaped.result.with_metadata(unrecorded=str(error))

    def _refuse(self, call: Call, refusal: Refusal) -> Shaped:
        asked, granted, _ = call.people
        if asked:
            again = call.job is None or call.job.row.arguments is not None  # else its job has ended
            undecided = asked if refusal.details.get("stopped_by") == "shutdown" else ()  # resumed, not asked yet
            waiting = granted or undecided
            if waiting and call.execution.reason == "shutdown" and again and not call.steps:
                return self._park(call, waiting[0].id)  # it may still run when its session is resumed
            self.authorisation.asking.let_go(asked)
        details = refusal.details if call.job is None else {**refusal.details, **self.jobs.said_of(call.job)}
        result = call.answer_error(refusal.kind, self.shaper.redactor.text(refusal.text), **details)
        call.note("refused", {"step": refusal.step, "result": result.to_dict()})
        call.emit("refused", {"step": refusal.step, "kind": refusal.kind, "text": result.error_text})
        call.flush()
        return said(result)

    def _park(self, call: Call, approval_id: str) -> Shaped:
        """Answer the caller and leave the call without an outcome, until its session is resumed."""
        if call.steps:
            text = (
                f"`{call.tool_id}` requires approval, and no user can answer now. A step of a tool session cannot be "
                "resumed later. Nothing was run. Repeat the step when the user is available."
            )
            return self._refuse(call, Refusal("authorise", "unavailable", text))
        text = (
            f"`{call.tool_id}` is awaiting approval ({approval_id}). Nothing was run yet. The call continues when a user "
            "has answered and the session is resumed. Do not repeat it."
        )
        result = call.answer_error("unavailable", text, parked=approval_id)
        call.flush()
        call.emit("parked", {"approval": approval_id})
        return Shaped(result, result, {})

    def _admit(self, call: Call, defect: Exception) -> Shaped:
        """Answer with an error that reports a defect of Handrail and says whether the call had started."""
        self.authorisation.asking.let_go(call.people.asked)
        effect = "The effect is unknown. Check it before you repeat the call." if call.begun else "Nothing was run."
        said = f"{type(defect).__name__}: {self.shaper.redactor.head(str(defect), 300)}"
        text = f"Handrail failed while it carried out `{call.tool_id}`. {effect} The error is {said}"
        result = call.answer_error("backend", text)
        call.note("committed" if call.begun else "refused", {"result": result.to_dict(), "defect": True})
        call.flush()
        return said(result)

    # ── around the steps ─────────────────────────────────────────────────────────────────────────

    def look_ahead(
        self, call_id: str, proposed: ProposedCall, lane: Lane, generation: Generation
    ) -> LookedAhead | None:
        """Prevalidate a proposed call; see :func:`look_ahead`."""
        return look_ahead(self.call(call_id, proposed, lane, generation), self.resources, self.authorisation)

    def call(
        self,
        call_id: str,
        proposed: ProposedCall,
        lane: Lane,
        generation: Generation,
        *,
        parent: Call | None = None,
        replayable: bool = False,
        resumed: Sequence[Approval] | None = None,
        behind: Taken | None = None,
        looked: LookedAhead | None = None,
    ) -> Call:
        """Create a call that has not taken a step yet.

        :param resumed: its approval requests, if its proposal is already recorded
        :param behind: the write of the latest message before its proposal
        :param looked: the results of the prevalidation, which are used if the proposal is the same
        """
        execution = Execution(asyncio.get_running_loop(), self.limits.grace_ms / 1000)
        call = Call(call_id, proposed, lane, generation, execution, self.log, self.shaper.redactor)
        if parent is not None:
            call.parent = parent
        if replayable:
            call.replayable = True
        if resumed is not None:
            call.resumed, call.people = True, AskedPeople(tuple(resumed))
        if behind is not None:
            call.behind = behind
        if looked is not None and looked.proposed == proposed:
            call.looked = looked
        return call


@lru_cache(maxsize=1024)
def _intent_to_hold(wants: tuple[Want, ...]) -> dict[str, Any]:
    """Return the body of an ``intended`` record. One object per set of locks, which is never changed."""
    return {"locks": lock_names(wants)}


# The calls of one model reply: started in its order, run in parallel as far as locks allow, answered in order.


class Reply:
    """Carries out the calls of one model reply, each from the moment its block closes.

    A call with side effects enters the lock queue after all earlier calls have entered it or were refused, so a pending
    approval delays later side effects. A read waits for an earlier call only if their locks conflict.
    """

    __slots__ = ("_arbiter", "_calls", "_make", "_tasks")

    def __init__(self, arbiter: Arbiter, make: Callable[[ProposedCall], Call]) -> None:
        self._arbiter = arbiter
        self._make = make
        self._calls: list[Call] = []
        self._tasks: list[asyncio.Task[Answer]] = []

    def submit(self, proposed: ProposedCall) -> asyncio.Task[Answer]:
        """Start ``proposed`` as the next call of the reply. On return it has run up to its first wait."""
        call = self._make(proposed)
        loop = asyncio.get_running_loop()
        call.entered = loop.create_future()
        predecessors = tuple(self._calls)
        self._calls.append(call)
        return begin_at_once(loop, self._arbiter.carry_out(call, predecessors), self._tasks.append)

    async def answers(self) -> list[Answer]:
        """Return all answers, in call order, once every call has one.

        :raises asyncio.CancelledError: if cancelled, after every call was stopped and recorded
        """
        owed: asyncio.CancelledError | None = None
        while pending := [task for task in self._tasks if not task.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError as cancellation:
                owed = cancellation
                for call in self._calls:
                    if call.job is None:  # jobs outlive their turn
                        call.execution.stop("user")
        if owed is not None:
            raise owed
        return [task.result() for task in self._tasks]
