"""The arbiter: it carries out one call in nine steps, and the calls of one reply in their order.

:meth:`Arbiter.carry_out` reads like the list in the README. Each step is one short method below it. A step rejects a call
by raising :class:`~handrail.arbiter.call_state.CallRejection`, and the call is answered exactly once in every case. A step that
seldom has to wait returns an awaitable or None: a coroutine that never waits costs as much as the step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import orjson

from handrail.arbiter.approvals.approval_broker import ApprovalBroker, ApprovalLifetimes
from handrail.arbiter.approvals.approval_flow import CallSuspended
from handrail.arbiter.call_arguments import (
    ArgumentCheckRunner,
    IdempotencyKeyLookup,
    parse_proposed_arguments,
    redact_arguments_for_record,
    redact_rejected_arguments,
)
from handrail.arbiter.call_authorisation import CallAuthorisation
from handrail.arbiter.call_locks import CallLockManager, set_required_locks
from handrail.arbiter.call_state import Call, CallApprovals, CallRejection, Lane, PrevalidationResult
from handrail.arbiter.jobs.background_jobs import BackgroundJobManager, JobLimits, JobRecovery
from handrail.arbiter.jobs.job_views import JobView
from handrail.arbiter.lock_table import LockResolver, LockTable, RequiredLock, format_locks
from handrail.arbiter.output.shaper import (
    AudienceOutputs,
    OutputShaper,
    make_call_end_event_data,
    shape_recorded_result,
)
from handrail.arbiter.stoppable_execution import (
    StoppableTaskRunner,
    WorkTransferred,
    await_deferring_cancellation,
    start_eager_task,
    wait_until_records_written,
)
from handrail.arbiter.subagent_delegation import check_subagent_can_start
from handrail.arbiter.tool_runner import ToolRunner, check_session_mode
from handrail.arbiter.tool_sessions import ToolSessionLimits, ToolSessionManager
from handrail.catalog.loaded_tools import DOCUMENTATION_TOOL
from handrail.contract.approval_requests import Approval
from handrail.contract.calls_and_results import CallAnswer, ProposedCall
from handrail.contract.errors import LogUnavailable, ToolError
from handrail.contract.schema.argument_validation import ArgumentCheckBudgetError
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.struct import Struct, field
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import wire_name
from handrail.contract.tool_generation import Generation
from handrail.record.commit_log import CommitLog, InterruptedCall, encode_record_body
from handrail.store.database.group_writer import QueuedWrite
from handrail.store.lease import WorkspaceLease
from handrail.store.tables.approval_tables import ApprovalTable
from handrail.store.tables.job_tables import JobTable, ToolSessionTable

# Prevalidation: the checks of a call, made while its block is still open in the model's stream.
#
# The block closes a moment after the last piece of its arguments, and from then on each step adds to the delay of the call.
# Parsing the arguments, checking them, finding the locks and evaluating the rules have no side effects, so they run in that
# moment. The call still takes all its steps in order. It finds these answers ready, and the disk awake for its first record.


def prevalidate_call(
    call: Call, lock_resolver: LockResolver, authorisation: CallAuthorisation
) -> PrevalidationResult | None:
    """Prevalidate a call as it will be if its block closes now, and wake the disk for its first record.

    :param call: a call that is not used afterwards
    :return: None if the checks take long, fail or do not apply; the call then reports errors when it is proposed
    """
    try:
        looked = _prevalidate(call, lock_resolver, authorisation)
    except Exception:  # wrong arguments, or a defect: the call itself reports them
        return None
    entry = call.entry
    # Only a call that will write needs its intent on the disk first, so only for it is the writer woken.
    if looked is not None and looked.verdict.action == "allow" and entry and entry.spec.side_effect != "read":
        call.log.wake_writer()
    return looked


def _prevalidate(
    call: Call, lock_resolver: LockResolver, authorisation: CallAuthorisation
) -> PrevalidationResult | None:
    entry, proposed = call.generation.resolve_tool_name(call.proposed.name), call.proposed
    if entry is None or entry.unavailable_reason is not None:
        return None
    if not isinstance(proposed.arguments, (str, bytes)):  # the caller may still change the object
        return None
    spec, tool = entry.spec, entry.tool
    if spec.mode != "direct" or spec.background_argument is not None or tool.types_input:
        return None
    if tool.source_request is not None or tool.state_arguments is not None or tool.job_argument is not None:
        return None
    if tool.session_modes:
        return None
    given, compact, _, repairs = parse_proposed_arguments(proposed)
    if given is None:
        return None
    lane, call.entry = call.lane, entry
    call.arguments = entry.validate_arguments(given, parsed=True, repairs=repairs)
    located: dict[str, ResolvedPath] = {}
    wants = lock_resolver.resolve(spec, call.arguments, lane.environment.roots, located)
    verdict = authorisation.evaluate(call, located)
    return PrevalidationResult(
        proposed,
        given,
        compact,
        call.arguments,
        repairs,
        wants,
        lane.authority.own_capability_layer,
        lane.rules,
        verdict,
    )


# Calls to tools whose schema the model has not seen, and the help in the error about wrong arguments.
#
# A call is allowed or denied in the same way whether or not its tool is loaded. But the error about guessed arguments
# includes the tool's schema, and a tool with required reading does not run before the model has read its manual.

MAX_SCHEMA_BYTES = 32 * 1024
"""Bytes of JSON. For a larger schema the error only names the call that shows it."""


def format_similar_tool_suggestion(call: Call) -> str:
    """Return which tools a call with an unknown name may have meant, as a sentence."""
    catalog, name = call.lane.catalog, call.proposed.name
    if awaited := call.generation.describe_unlisted_sources(name):
        return awaited
    if close := catalog.find_tools_for_unknown_name(call.generation, name):
        return f"Did you mean {' or '.join(f'`{one}`' for one in close)}?"
    return (
        call.generation.describe_unlisted_sources(name, include_unprefixed=True)
        or "No tool has a similar name. Use a tool from your list."
    )


def load_unseen_tool_schema(call: Call) -> dict[str, Any]:
    """Load a tool that the model has not seen, and return its schema for the error about its arguments.

    :return: details for the refusal; empty if the model has seen the tool
    """
    entry, catalog = call.entry, call.lane.catalog
    assert entry is not None
    if call.parent is not None or call.proposed.problem is not None:
        return {}
    # A model that has seen the schema made a plain mistake. The schema again would only fill its context.
    if catalog.was_schema_shown(call.generation, entry.id):
        return {}
    catalog.load_tools(call.generation, (entry.id,))
    fields: dict[str, Any] = {"tool": entry.id, "description": entry.spec.description}
    if len(orjson.dumps(entry.spec.parameters, default=str)) <= MAX_SCHEMA_BYTES:
        fields["parameters"] = dict(entry.spec.parameters)
    else:
        fields["manual"] = f"The schema is too long for this error. To read it, {_documentation_hint(entry.id)}."
    details: dict[str, Any] = {"data": call.redactor.redact_json(fields) if call.redactor.active else fields}
    if entry.untrusted_source:
        details["untrusted_source"] = entry.untrusted_source
    return details


async def require_documentation_read(call: Call) -> None:
    """Require that the session has read the documentation of the tool. Nested calls are exempt.

    :raises CallRejection: ``conflict``, with the call that reads it, or with the documentation if the agent cannot read it
    :raises LogUnavailable: if it is unknown what the session has read
    """
    entry, catalog = call.entry, call.lane.catalog
    assert entry is not None
    if (
        catalog.documentation_reads is None
        or call.parent is not None
        or await catalog.documentation_reads.has_read_documentation(entry)
    ):
        return
    reader = call.generation.resolve_tool_name(DOCUMENTATION_TOOL)
    if reader is not None and reader.unavailable_reason is None:
        text = (
            f"`{entry.id}` requires that you read its documentation first: {_documentation_hint(entry.id)}. Then repeat this call. "
            "Nothing was run."
        )
        raise CallRejection("validate", "conflict", text, documentation_required=entry.id)
    await catalog.documentation_reads.mark_documentation_read(entry)
    text = (
        f"`{entry.id}` requires that you read its documentation first. The documentation is in this result. "
        "Read it, then repeat the call. Nothing was run."
    )
    raise CallRejection(
        "validate", "conflict", text, data={"manual": call.redactor.redact_text(entry.spec.documentation)}
    )


def _documentation_hint(tool_id: str) -> str:
    return f'call {wire_name(DOCUMENTATION_TOOL)} with {{"tool": "{tool_id}"}}'


_MAX_LOGGED_PROVIDER_ID = 200
"""The characters of a provider's call id in the log. Some proxies put signatures into it."""
_LOOK_AGAIN_S = 0.02
_tuple: Any = tuple
_new_answer: Callable[..., CallAnswer] = _tuple.__new__
"""Create a ``CallAnswer`` in half the time of its own constructor."""


class ArbiterLimits(Struct, frozen=True):
    """Budgets of every call. The time-out of a tool is in its spec."""

    lock_wait_ms: int = 60_000
    grace_ms: int = 5_000
    """How long work that was asked to stop may continue before its caller is answered without it."""
    tool_session_idle_ms: int = 900_000
    """How long an open tool session waits for its next step."""
    open_tool_sessions: int = 32
    """Per session."""
    job_output_mib: int = 1024
    """Disk space for the outputs of all jobs together."""
    output_files_mib: int = 1024
    """Disk space for the full text of all truncated outputs together."""
    max_log_backlog: int = 20_000
    """Records that may wait for the disk before further calls wait."""
    approval_lifetimes: ApprovalLifetimes = field(default_factory=ApprovalLifetimes)
    """How long approval requests stay open, and how long an approval stays valid."""


class Arbiter:
    """The arbiter: the only code that runs tool calls."""

    def __init__(
        self,
        log: CommitLog,
        lease: WorkspaceLease,
        locks: LockTable,
        lock_resolver: LockResolver,
        shaper: OutputShaper,
        limits: ArbiterLimits,
    ) -> None:
        self.log = log
        self.lease = lease
        self.locks = locks
        self.lock_resolver = lock_resolver
        self.shaper = shaper
        self.limits = limits
        self.approval_broker = ApprovalBroker(ApprovalTable(log.database), log, shaper, limits.approval_lifetimes)
        self.authorisation = CallAuthorisation(self.approval_broker, shaper, lock_resolver)
        self.call_locks = CallLockManager(locks, limits.lock_wait_ms)
        self.idempotency = IdempotencyKeyLookup(log, shaper)
        self.bounded_checks = ArgumentCheckRunner()
        bounds = JobLimits(grace_s=limits.grace_ms / 1000, output_bytes=limits.job_output_mib * 1024 * 1024)
        self.jobs = BackgroundJobManager(JobTable(log.database), log, shaper, lock_resolver, self.carry_out, bounds)
        self.job_recovery = JobRecovery(self.jobs, self.approval_broker, partial(self.create_call, resumed=()))
        self.tool_runner = ToolRunner(
            locks, self.authorisation.approval_flow, self.jobs, self._create_nested, self.carry_out
        )
        of_states = ToolSessionLimits(
            limits.open_tool_sessions, limits.tool_session_idle_ms / 1000, limits.grace_ms / 1000
        )
        self.tool_sessions = ToolSessionManager(
            ToolSessionTable(log.database), log, of_states, self.tool_runner.track_task_until_shutdown
        )
        self.tool_runner.tool_sessions = self.tool_sessions

    async def recover_unfinished_work(self, interrupted: Iterable[InterruptedCall]) -> None:
        """Settle what the former process left unfinished: jobs, approval requests and tool sessions. Call it at start.

        :param interrupted: the calls that had started
        :raises LogUnavailable: if the log cannot be read or takes no records
        """
        await self.job_recovery.settle_former_jobs(interrupted)
        await self.tool_sessions.mark_former_sessions_interrupted()

    async def carry_out(self, call: Call, predecessors: Sequence[Call] = ()) -> CallAnswer:
        """Carry out one call and return exactly one answer.

        Refusals are recorded like outcomes.

        :param predecessors: the earlier calls of the same model reply, in its order
        :raises asyncio.CancelledError: if the awaiting task was cancelled, after the call is recorded
        """
        call.lane.running_calls.setdefault(call.id, call)  # the same key may run already, as a job
        try:
            try:
                if (job := call.job) is None or not job.authorised:  # the turn of a job took its first steps
                    if call.replayable and (recorded := await self.idempotency.find_recorded_answer(call)) is not None:
                        return recorded
                    self._resolve(call)  # 1
                    try:
                        spec = self._validate(call)  # 2
                    except ArgumentCheckBudgetError as unfinished:
                        spec = await self._validate_in_process(call, unfinished)
                    # This comes before the rules: the user must not be asked about a call that will not run.
                    if spec.documentation_required:
                        await require_documentation_read(call)
                        call.resolved_paths = None
                    if waits := self.authorisation.authorise_call(call):  # 3
                        await waits
                    if call.background and call.job is None:
                        return await self.jobs.start_call_as_job(call, predecessors)
                if not call.started:  # a call that became a job while its tool ran continues there
                    if waits := self.call_locks.acquire(call, predecessors):  # 4
                        await waits
                    if waits := self._record_intent(call):  # 5
                        await waits
                value = await self.tool_runner.run(call)  # 6
                shaped = self._shape_small(call, value) or await self._shape(call, value)  # 7
                if waits := self._record_outcome(call, shaped):  # 8
                    await waits
            # The call has become a job while its tool ran. The job continues it, with its locks.
            except WorkTransferred:
                return self.jobs.start_job_for_moved_call(call)
            except CallRejection as refusal:
                shaped = self._refuse(call, refusal)
            except CallSuspended as parked:
                shaped = self._suspend(call, parked.approval_id)
            except LogUnavailable as error:
                text = f"The commit log cannot be written, so no call can run: {str(error).rstrip('.')}. Ask the user to fix it."
                shaped = self._refuse(call, CallRejection("intend", "unavailable", text))
            except Exception as defect:
                shaped = self._report_defect(call, defect)
            finally:
                if (job := call.job) is None or not job.backgrounded:
                    self.call_locks.release(call)  # 9
        finally:
            lane = call.lane
            if (job := call.job) is None or not job.backgrounded:
                if call.queued is not None:
                    call.mark_lock_queued()
                if lane.running_calls.get(call.id) is call:
                    del lane.running_calls[call.id]
            if lane.call_ended is not None:
                lane.call_ended.set()
        if call.execution.owed_cancellation is not None:
            raise call.execution.owed_cancellation  # the same object: structured concurrency recognises its cancellations by it
        if lane.failed_calls is not None or shaped.result.type == "error":
            lane.update_failure_counts(call, shaped.result, self.shaper.hash_canonical_json)
        if call.listeners:
            call.emit("finished", make_call_end_event_data(shaped.result))
        return _new_answer(CallAnswer, (call.id, call.tool_id, shaped.result, shaped.model))

    # ── 1 resolve ────────────────────────────────────────────────────────────────────────────────

    def _resolve(self, call: Call) -> None:
        proposed, generation = call.proposed, call.generation
        entry = generation.resolve_tool_name(proposed.name)
        call.entry = entry
        if entry is None:
            self._propose(call, redact_rejected_arguments(proposed.arguments, self.shaper.redactor))
            if proposed.problem is not None:
                raise CallRejection("resolve", proposed.problem_kind, proposed.problem)
            name = self.shaper.redactor.redact_text_head(proposed.name, 80)
            text = (
                f"Tool `{escape_terminal_controls(name)}` does not exist. {format_similar_tool_suggestion(call)}"
                if name
                else "The call has no tool name. Name one of your tools."
            )
            raise CallRejection("resolve", "unknown_tool", text)
        call.tool_id = entry.id
        if entry.unavailable_reason is not None:
            self._propose(call, redact_rejected_arguments(proposed.arguments, self.shaper.redactor))
            raise CallRejection("resolve", "unavailable", entry.unavailable_error_text)
        # The calls of a tool must not keep tools loaded that the model never used.
        if call.parent is None:
            call.lane.catalog.pin_called_tool(entry.id)

    # ── 2 validate ───────────────────────────────────────────────────────────────────────────────

    def _validate(self, call: Call) -> ToolSpec:
        assert call.entry is not None
        spec = call.entry.spec
        if (looked := call.prevalidated) is not None:
            if fault := self._propose(call, looked.sent_arguments, looked.arguments_json):
                raise CallRejection("validate", "invalid_input", f"{spec.id}: {fault}", **load_unseen_tool_schema(call))
            call.arguments, call.required_locks = looked.arguments, looked.required_locks
            call.argument_repairs = looked.repairs
            return spec
        entry = call.entry
        arguments, compact, fault, repairs = parse_proposed_arguments(call.proposed)
        # A step belongs to the tool session that it names, and its proposal is recorded with that session.
        if spec.mode == "stateful":
            self.tool_sessions.bind_call_to_tool_session(call, arguments)
        proposed = (
            redact_rejected_arguments(call.proposed.arguments, self.shaper.redactor) if arguments is None else arguments
        )
        fault = self._propose(call, proposed, compact) or fault
        if arguments is None or fault:
            kind = call.proposed.problem_kind if call.proposed.problem is not None else "invalid_input"
            raise CallRejection("validate", kind, f"{spec.id}: {fault}", **load_unseen_tool_schema(call))
        try:
            parsed = isinstance(call.proposed.arguments, (str, bytes))
            call.argument_repairs = repairs  # also for the further check of arguments beyond the budget
            arguments = entry.validate_arguments(arguments, parsed=parsed, repairs=repairs)
        except ArgumentCheckBudgetError:
            raise
        except ToolError as error:
            raise CallRejection("validate", error.kind, error.text, **load_unseen_tool_schema(call)) from None
        return self._take_arguments(call, arguments)

    async def _validate_in_process(self, call: Call, unfinished: ArgumentCheckBudgetError) -> ToolSpec:
        """Complete step 2 in a separate process, if the check is too expensive for the event loop."""
        entry = call.entry
        assert entry is not None
        shared = not isinstance(call.proposed.arguments, (str, bytes))
        try:
            check = partial(self.bounded_checks.check_arguments_in_subprocess, entry, unfinished, shared=shared)
            arguments = await call.await_interruptible("validate", check)
        except ToolError as error:
            raise CallRejection("validate", error.kind, error.text, **load_unseen_tool_schema(call)) from None
        call.owns_arguments = True
        return self._take_arguments(call, arguments)

    def _take_arguments(self, call: Call, arguments: dict[str, Any]) -> ToolSpec:
        """Store valid arguments and find their locks."""
        assert call.entry is not None
        spec = call.entry.spec
        call.arguments = arguments
        if spec.background_argument is None and spec.mode == "direct":  # nearly every call
            if call.entry.tool.session_modes and not call.resumed:  # an answer counts, whatever the mode is by now
                check_session_mode(call, call.entry.tool.session_modes)
            try:
                if (of_job := call.entry.tool.job_argument) is not None:
                    JobView(self.jobs, call.session_id).check_named_job_exists(of_job, arguments[of_job.argument])
                located: dict[str, ResolvedPath] = {}
                call.resolved_paths = located
                call.required_locks = self.lock_resolver.resolve(spec, arguments, call.lane.environment.roots, located)
                call.same_looking_paths = [one for where in located.values() for one in where.same_looking]
            except ToolError as error:
                raise CallRejection("validate", error.kind, error.text) from None
        else:
            if call.session_step is not None:
                self.tool_sessions.redirect_to_stateful_tool(call)
            set_required_locks(call, self.lock_resolver)
            check_subagent_can_start(call)
        return spec

    def _propose(self, call: Call, arguments: Any, compact: bytes | None = None) -> str | None:
        """Record the proposal.

        :return: what is wrong if the arguments are larger than a call may carry
        """
        if call.resumed:
            attempt = {} if call.job is None else {"job_id": call.job.row.id, "attempt": call.job.row.job.attempt}
            asked = {"approval": [row.id for row in call.approvals.requests], "generation": call.generation.number}
            call.queue_log_record("resumed", {**asked, **attempt})
            return None
        recorded, fault = redact_arguments_for_record(arguments, compact, self.shaper.redactor)
        entry, topic = call.entry, call.lane.environment.topic
        body: dict[str, Any] = {}
        if call.replayable:
            body["key_hash"] = self.idempotency.key_hash(call)
        if entry is not None and entry.answering_spec is not None:
            body["answered_by"] = entry.answering_spec.id
        if call.proposed.provider_id is not None:
            body["provider_id"] = call.proposed.provider_id[:_MAX_LOGGED_PROVIDER_ID]
        if topic is not None:
            body["topic"] = topic
        if call.parent is not None:
            body["parent"] = call.parent.id
        if call.session_step is not None:
            body |= call.session_step.proposal_record_fields
        if body or entry is None or call.redactor.active or type(recorded) is not bytes:
            body |= {"tool": call.tool_id, "generation": call.generation.number}
            if entry is not None:
                body["side_effect"] = entry.spec.side_effect
            recorded = orjson.Fragment(recorded) if type(recorded) is bytes else recorded
            call.queue_log_record("proposed", body, redacted={"arguments": recorded})
        else:  # nearly every call
            number, effect = call.generation.number, entry.spec.side_effect
            head = _encode_proposal_head(call.tool_id, number, effect)
            call.queue_encoded_record("proposed", b"%b%b}" % (head, recorded))
        if call.listeners:
            call.emit("proposed", {"arguments": call.copy_arguments_for_event(arguments)})
        return fault

    # ── 5 intend ─────────────────────────────────────────────────────────────────────────────────

    def _record_intent(self, call: Call) -> Awaitable[None] | None:
        """Check the decision again and record that the call is about to start.

        With side effects, the record is durable first. The record of a read is written soon after the read first waits, or with its
        outcome.
        """
        assert call.entry is not None
        # Another call may have added a rule while this one waited for a lock or an answer.
        if call.rules is not call.lane.rules:
            self.authorisation.reevaluate_call_with_changed_rules(call)
        if granted := call.approvals.granted:
            self.authorisation.approval_flow.check_definition_unchanged(call)
        if call.lock_wait_ms or call.redactor.active:
            waited = {"lock_wait_ms": round(call.lock_wait_ms, 3)} if call.lock_wait_ms else {}
            call.queue_log_record("intended", {"locks": format_locks(call.required_locks), **waited})
        else:
            call.queue_encoded_record("intended", _encode_intent(call.required_locks))
        # An approval is used up together with the intent, so a read with an approval waits for the disk too.
        if call.entry.spec.side_effect != "read" or granted or not self.log.accepts_more(self.limits.max_log_backlog):
            return self._record_intent_of_call(call)
        self._mark_started(call)
        return None

    async def _record_intent_of_call(self, call: Call) -> None:
        assert call.entry is not None
        granted = call.approvals.granted
        if call.entry.spec.side_effect == "read" and not granted:
            await call.await_interruptible("intend", lambda: self.log.wait_for_backlog(self.limits.max_log_backlog))
            if self.log.unavailable_reason is not None:
                raise LogUnavailable(self.log.unavailable_reason)
        else:
            # The caller gets control at the first await, and may change its object.
            call.copy_arguments()
            records, call.records = call.records, []
            try:
                if granted:
                    await self.authorisation.approval_flow.check_approved_files_unchanged(call)
                    await await_deferring_cancellation(
                        self.authorisation.approval_flow.consume_approvals(call, records), call.execution
                    )
                else:
                    await wait_until_records_written(self.log.start_journalled_commit(records), call.execution)
            except ToolError as error:  # an approval that is no longer valid
                call.records = [record for record in records if record.kind != "intended"]
                raise CallRejection("intend", error.kind, error.text) from None
            except LogUnavailable:
                # None of the records was written. The proposal and the decision are still true; the intent is not.
                call.records = [record for record in records if record.kind != "intended"]
                raise
            await call.wait_until_proposal_durable()  # its write was queued earlier
            # The machine may have slept. Another process may have taken the workspace in that time.
            if not self.lease.is_valid:
                await call.await_interruptible("intend", self._confirm_lease_after_pause)
        self._mark_started(call)

    async def _confirm_lease_after_pause(self) -> None:
        """Wait after a pause until it is certain that no other process holds the lease.

        :raises CallRejection: ``unavailable``, if another process has it
        """
        while not self.lease.is_valid:
            if (taken := self.lease.lost_reason) is not None:
                raise CallRejection("intend", "unavailable", f"Nothing was run: {taken}")
            await asyncio.sleep(_LOOK_AGAIN_S)  # the lease's own thread finds out

    def _mark_started(self, call: Call) -> None:
        # The last moment at which a stop means that nothing was run.
        if call.execution.reason is not None or call.execution.owed_cancellation is not None:
            raise call.make_stop_rejection("intend", call.execution.reason or "user")
        call.started = True
        if call.job is not None:
            self.jobs.mark_job_running(call)
        if call.listeners:
            call.emit("started")

    # ── 6 execute ────────────────────────────────────────────────────────────────────────────────

    def _create_nested(self, parent: Call, tool_id: str, arguments: Mapping[str, Any], fault: str | None) -> Call:
        parent.nested_count += 1
        return self.create_call(
            f"{parent.id}.{parent.nested_count}",
            ProposedCall(tool_id, arguments, problem=fault, problem_kind="cancelled"),
            parent.lane,
            parent.generation,
            parent=parent,
        )

    # ── 7 shape ──────────────────────────────────────────────────────────────────────────────────

    def _shape_small(self, call: Call, value: object) -> AudienceOutputs | None:
        assert call.entry is not None
        return (
            None if call.artifacts else self.shaper.try_shape_small_output(call.entry.spec, value, self._metadata(call))
        )

    async def _shape(self, call: Call, value: object) -> AudienceOutputs:
        assert call.entry is not None
        spec, session_id, nested = call.entry.spec, call.lane.session_id, call.artifacts
        work = self.shaper.shape_output(
            spec, value, self._metadata(call), call_id=call.id, session_id=session_id, nested=nested
        )
        return await await_deferring_cancellation(work, call.execution)

    def _metadata(self, call: Call) -> dict[str, Any]:
        assert call.entry is not None
        metadata: dict[str, Any] = {"duration_ms": call.elapsed_ms, "sandbox": call.entry.sandbox}
        if call.argument_repairs:
            metadata["arguments_read_as"] = dict(call.argument_repairs)
        if call.read_only:
            metadata["read_only"] = True
        if call.network_attempts or call.entry.spec.requires.net.by_rule:
            metadata |= call.make_network_metadata()
        if call.confinement is not None:
            metadata["confined"] = True
        if call.entry.untrusted_source:
            metadata["untrusted_source"] = call.entry.untrusted_source
        if call.unsupported_requests:
            metadata["unsupported_client_requests"] = sorted(call.unsupported_requests)
        if call.same_looking_paths:
            metadata["same_looking_paths"] = call.same_looking_paths
        if call.lock_wait_ms:
            metadata["lock_wait_ms"] = round(call.lock_wait_ms, 3)
        if call.job is not None:
            metadata |= self.jobs.make_job_metadata(call.job)
        return metadata

    # ── 8 commit ─────────────────────────────────────────────────────────────────────────────────

    def _record_outcome(self, call: Call, shaped: AudienceOutputs) -> Awaitable[None] | None:
        """Record the outcome.

        The record is durable before the locks are released if the call has side effects or its answer delivers notifications.
        """
        assert call.entry is not None
        call.queue_log_record("committed", shaped.logged)
        if call.entry.spec.side_effect != "read" or call.replayable or call.delivered_notifications:
            return self._record_outcome_of_call(call, shaped)
        call.submit_queued_records()
        return None

    async def _record_outcome_of_call(self, call: Call, shaped: AudienceOutputs) -> None:
        records, call.records = call.records, []
        try:
            if call.delivered_notifications and shaped.result.ok:
                await await_deferring_cancellation(
                    self.jobs.record_call_end_and_delivery(call, records), call.execution
                )
            else:
                await wait_until_records_written(self.log.start_commit(records), call.execution)
        except LogUnavailable as error:
            # It ran, and the answer says what is known. The record is still true, so it is tried again later; if
            # that fails too, the open intent makes the call 'interrupted' at the next start, never run again.
            self.log.record_soon(records)
            shaped.result = shaped.result.with_metadata(log_error=str(error))

    def _refuse(self, call: Call, refusal: CallRejection) -> AudienceOutputs:
        asked, granted, _ = call.approvals
        if asked:
            again = call.job is None or call.job.row.arguments is not None  # else its job has ended
            undecided = asked if refusal.details.get("stopped_by") == "shutdown" else ()  # resumed, not asked yet
            waiting = granted or undecided
            # The user's answer is stored. A shutdown must not throw it away.
            if waiting and call.execution.reason == "shutdown" and again and not call.is_tool_session_step:
                return self._suspend(call, waiting[0].id)  # it may still run when its session is resumed
            self.authorisation.approval_flow.withdraw_unused_requests(asked)
        details = refusal.details if call.job is None else {**refusal.details, **self.jobs.make_job_metadata(call.job)}
        result = call.make_error_result(refusal.kind, self.shaper.redactor.redact_text(refusal.text), **details)
        call.queue_log_record("rejected", {"step": refusal.step, "result": result.to_dict()})
        call.emit("rejected", {"step": refusal.step, "kind": refusal.kind, "text": result.error_text})
        call.submit_queued_records()
        return shape_recorded_result(result)

    def _suspend(self, call: Call, approval_id: str) -> AudienceOutputs:
        """Answer the caller and leave the call without an outcome, until its session is resumed."""
        if call.is_tool_session_step:
            text = (
                f"`{call.tool_id}` requires approval, and no user can answer now. A step of a tool session cannot be "
                "resumed later. Nothing was run. Repeat the step when the user is available."
            )
            return self._refuse(call, CallRejection("authorise", "unavailable", text))
        text = (
            f"`{call.tool_id}` is awaiting approval ({approval_id}). Nothing was run yet. The call continues when a user "
            "has answered and the session is resumed. Do not repeat it."
        )
        result = call.make_error_result("unavailable", text, awaiting_approval=approval_id)
        call.submit_queued_records()
        call.emit("awaiting-approval", {"approval": approval_id})
        return AudienceOutputs(result, result, {})

    def _report_defect(self, call: Call, defect: Exception) -> AudienceOutputs:
        """Answer with an error that reports a defect of Handrail and says whether the call had started."""
        self.authorisation.approval_flow.withdraw_unused_requests(call.approvals.requests)
        effect = "The effect is unknown. Check it before you repeat the call." if call.started else "Nothing was run."
        shown = f"{type(defect).__name__}: {self.shaper.redactor.redact_text_head(str(defect), 300)}"
        text = f"Handrail failed while it ran `{call.tool_id}`. {effect} The error is {shown}"
        result = call.make_error_result("backend", text)
        call.queue_log_record("committed" if call.started else "rejected", {"result": result.to_dict(), "defect": True})
        call.submit_queued_records()
        return shape_recorded_result(result)

    # ── around the steps ─────────────────────────────────────────────────────────────────────────

    def prevalidate(
        self, call_id: str, proposed: ProposedCall, lane: Lane, generation: Generation
    ) -> PrevalidationResult | None:
        """Prevalidate a proposed call; see :func:`prevalidate_call`."""
        return prevalidate_call(
            self.create_call(call_id, proposed, lane, generation), self.lock_resolver, self.authorisation
        )

    def create_call(
        self,
        call_id: str,
        proposed: ProposedCall,
        lane: Lane,
        generation: Generation,
        *,
        parent: Call | None = None,
        replayable: bool = False,
        resumed: Sequence[Approval] | None = None,
        preceding_message: QueuedWrite | None = None,
        prevalidated: PrevalidationResult | None = None,
    ) -> Call:
        """Create a call that has not taken a step yet.

        :param resumed: its approval requests, if its proposal is already recorded
        :param preceding_message: the write of the latest message before its proposal
        :param prevalidated: the results of the prevalidation, which are used if the proposal is the same
        """
        execution = StoppableTaskRunner(asyncio.get_running_loop(), self.limits.grace_ms / 1000)
        call = Call(call_id, proposed, lane, generation, execution, self.log, self.shaper.redactor)
        if parent is not None:
            call.parent = parent
        if replayable:
            call.replayable = True
        if resumed is not None:
            call.resumed, call.approvals = True, CallApprovals(tuple(resumed))
        if preceding_message is not None:
            call.preceding_message = preceding_message
        # A provider may send more pieces after the prevalidation. Then its results belong to other arguments.
        if prevalidated is not None and prevalidated.proposed == proposed:
            call.prevalidated = prevalidated
        return call


@lru_cache(maxsize=1024)
def _encode_proposal_head(tool: str, generation: int, side_effect: str) -> bytes:
    """Return the body of a ``proposed`` record as JSON, up to the arguments.

    The record of the generation has the definition of the tool, so that it is not repeated with each call.
    """
    fields = {"tool": tool, "generation": generation, "side_effect": side_effect}
    return orjson.dumps(fields)[:-1] + b',"arguments":'


@lru_cache(maxsize=1024)
def _encode_intent(wants: tuple[RequiredLock, ...]) -> bytes:
    """Return the body of an ``intended`` record as JSON."""
    return encode_record_body({"locks": format_locks(wants)})


# The calls of one model reply: started in its order, run in parallel as far as locks allow, answered in order.


class ReplyCallRunner:
    """Carries out the calls of one model reply, each from the moment its block closes.

    A call with side effects enters the lock queue after all earlier calls have entered it or were refused, so a pending
    approval delays later side effects. A read waits for an earlier call only if their locks conflict.
    """

    __slots__ = ("_arbiter", "_calls", "_make", "_tasks")

    def __init__(self, arbiter: Arbiter, make: Callable[[ProposedCall], Call]) -> None:
        self._arbiter = arbiter
        self._make = make
        self._calls: list[Call] = []
        self._tasks: list[asyncio.Task[CallAnswer]] = []

    def start_next_call(self, proposed: ProposedCall) -> asyncio.Task[CallAnswer]:
        """Start ``proposed`` as the next call of the reply. On return it has run up to its first wait."""
        call = self._make(proposed)
        loop = asyncio.get_running_loop()
        call.queued = loop.create_future()
        # A copy: calls that start later are not predecessors of this one.
        predecessors = tuple(self._calls)
        self._calls.append(call)
        return start_eager_task(loop, self._arbiter.carry_out(call, predecessors), self._tasks.append)

    async def wait_for_answers(self) -> list[CallAnswer]:
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
