"""Step 3, authorise: capabilities and rules, then watchdogs, then the user. Each can only narrow the decision."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from handrail.arbiter.approvals.approval_broker import ApprovalBroker
from handrail.arbiter.approvals.approval_flow import ApprovalFlow, find_typed_command
from handrail.arbiter.call_state import Call, CallRejection, Lane
from handrail.arbiter.lock_table import LockResolver, make_file_locks_shared
from handrail.arbiter.output.shaper import OutputShaper
from handrail.arbiter.resource_access import make_read_only_spec, resolve_evaluated_target
from handrail.contract.services.file_services import ResolvedPath
from handrail.contract.tool.requires import CapabilitySet
from handrail.policy.call_evaluation import PolicyVerdict
from handrail.policy.findings import TraceStep as PolicyStep
from handrail.policy.stored_paths import PrintedRepository, load_and_check_repository_histories
from handrail.record.commit_log import encode_record_body


class CallAuthorisation:
    """The authorisation of calls by capabilities, rules, watchdogs and users."""

    def __init__(self, broker: ApprovalBroker, shaper: OutputShaper, lock_resolver: LockResolver) -> None:
        self._shaper = shaper
        self.approval_flow = ApprovalFlow(broker, shaper, lock_resolver, self.evaluate, self._apply_watchdogs)

    def authorise_call(self, call: Call) -> Awaitable[None] | None:
        """Decide at once if rules alone decide; otherwise return an awaitable that decides.

        :raises CallRejection: ``denied``, by a rule, a watchdog or a user, or because the session has no user to ask
        :raises CallSuspended: if a user must approve and cannot answer now
        """
        lane, looked = call.lane, call.prevalidated
        call.rules = lane.rules
        if looked is not None and looked.rules is lane.rules and looked.layer is lane.authority.own_capability_layer:
            verdict = looked.verdict
        else:
            verdict = self.evaluate(call, call.resolved_paths)
        call.resolved_paths = None
        if verdict.action != "deny" and lane.authority.list_repositories_with_unread_history(verdict):
            return self._read_histories_and_authorise(call)
        return self._authorise(call, verdict)

    async def _read_histories_and_authorise(self, call: Call) -> None:
        """Decide a call that may print stored files, after the stored paths are known."""

        def list_unread() -> Sequence[PrintedRepository]:
            return call.lane.authority.list_repositories_with_unread_history(self.evaluate(call))

        await call.await_interruptible("authorise", lambda: load_and_check_repository_histories(list_unread))
        if (rest := self._authorise(call, self.evaluate(call))) is not None:
            await rest

    def _authorise(self, call: Call, verdict: PolicyVerdict) -> Awaitable[None] | None:
        lane = call.lane
        if verdict.action == "ask" or (verdict.action == "allow" and self._may_still_be_stopped(call, lane)):
            return self._apply_watchdogs_and_ask(call, verdict)
        self._conclude(call, verdict)
        if verdict.prepared.spec.single_command:
            self._narrow_sandbox(call)
        return None

    @staticmethod
    def _may_still_be_stopped(call: Call, lane: Lane) -> bool:
        """Return whether a watchdog or a question may still stop a call that the rules allow."""
        entry = call.entry
        assert entry is not None
        if call.resumed or lane.authority.list_watchdogs_for(entry.spec, lane.failed_calls is not None):
            return True
        return lane.approval_handler is not None and entry.has_questions and call.parent is None

    async def _apply_watchdogs_and_ask(self, call: Call, verdict: PolicyVerdict) -> None:
        """Apply watchdogs and, if necessary, ask the user."""
        if call.session_step is not None and call.session_step.kind == "close":
            self._conclude(call, verdict)  # an open tool session may always end
            return
        assert call.entry is not None
        await call.wait_until_proposal_durable()
        verdict = await self._apply_watchdogs(call, verdict)
        if verdict.action == "ask":
            call.verdict = verdict
            await self.approval_flow.request_permission(call)
        else:
            if call.resumed:
                await self.approval_flow.enforce_earlier_rejection(call)
            self._conclude(call, verdict)
        attended = call.lane.approval_handler is not None or call.resumed
        if attended and call.parent is None and call.entry.has_questions:
            await self.approval_flow.ask_questions_before_run(call)
        self._narrow_sandbox(call)

    @staticmethod
    def _narrow_sandbox(call: Call) -> None:
        """Narrow the sandbox of a call that changes nothing, or that a rule with ``{confined}`` allows.

        A command that is proved to change nothing runs read-only: no writes, no network, shared locks.
        """
        if (verdict := call.verdict) is None or not verdict.prepared.spec.single_command:
            return
        call.confinement = verdict.confinement
        if verdict.is_read_only:
            call.read_only = True
            call.required_locks = make_file_locks_shared(call.required_locks)
            verdict.capabilities = verdict.capabilities.without_writes_or_network()

    def _conclude(self, call: Call, verdict: PolicyVerdict) -> None:
        call.verdict = verdict
        if verdict.action == "deny":
            raise CallRejection("authorise", "denied", verdict.reason)
        if call.redactor.active:
            call.queue_log_record("authorised", verdict.approval_record)
            return
        if (encoded := verdict.encoded_approval_record) is None:
            encoded = verdict.encoded_approval_record = encode_record_body(verdict.approval_record)
        call.queue_encoded_record("authorised", encoded)

    async def _apply_watchdogs(self, call: Call, verdict: PolicyVerdict) -> PolicyVerdict:
        assert call.entry is not None and call.arguments is not None
        spec, arguments, lane = call.entry.spec, call.arguments, call.lane
        if verdict.action == "deny" or not lane.authority.list_watchdogs_for(spec, lane.failed_calls is not None):
            return verdict
        call.copy_arguments()
        failed = (
            (0, 0)
            if lane.failed_calls is None
            else lane.failed_calls.get_failure_counts(spec.id, self._shaper.hash_canonical_json(call.arguments))
        )
        call.submit_queued_records()
        return await call.await_interruptible(
            "authorise",
            lambda: lane.authority.ask_watchdogs(
                verdict,
                spec,
                arguments,
                lane.session_id,
                call_id=call.id,
                failed=failed,
                redact=self._shaper.redactor.redact_text,
            ),
        )

    def reevaluate_call_with_changed_rules(self, call: Call) -> None:
        """Evaluate the call again after the session's rules changed: a new *deny* counts, an approval stays.

        :raises CallRejection: ``denied``
        """
        verdict = self.evaluate(call)
        if verdict.action == "deny":
            raise CallRejection("intend", "denied", verdict.reason)

    def evaluate(self, call: Call, located: dict[str, ResolvedPath] | None = None) -> PolicyVerdict:
        """Return the verdict of rules and capabilities. Changes nothing else.

        :param located: paths that were resolved in the same loop turn; None resolves all of them
        """
        assert call.entry is not None and call.arguments is not None
        lane, caller, tool, spec = call.lane, call.parent, call.entry.tool, call.entry.spec
        origin = tool.origin
        if call.session_step is not None and call.is_tool_session_step:
            return self._evaluate_step(call)
        if tool.types_input and (typed := find_typed_command(call)) is not None:
            parent = None if caller is None or caller.verdict is None else caller.verdict.capabilities
            return lane.authority.evaluate_running_shell_input(
                spec, call.arguments, typed, rules=lane.rules, parent=parent
            )
        if tool.source_request is not None or tool.state_arguments is not None:
            spec, origin, call.requested_source = resolve_evaluated_target(call.entry, call.arguments, call.generation)
        return lane.authority.evaluate(
            spec,
            call.arguments,
            rules=lane.rules,
            roots=lane.environment.roots,
            located=located,
            parent=None if caller is None or caller.verdict is None else caller.verdict.capabilities,
            origin=origin,
            substitute=call.entry.answering_spec,
        )

    def _evaluate_step(self, call: Call) -> PolicyVerdict:
        """Evaluate a step as a call of the tool whose session is open.

        The rules for the step tool apply as well. A tool session can always be closed, without capabilities if a rule denies it.
        """
        going, entry, lane, caller = call.session_step, call.entry, call.lane, call.parent
        assert going is not None and going.step_tool is not None and entry is not None and call.arguments is not None
        handed = None if caller is None or caller.verdict is None else caller.verdict.capabilities
        rules, roots = lane.rules, lane.environment.roots
        asked = {"id": going.id, "input": going.step_input} if going.kind == "step" else {"id": going.id}
        own = lane.authority.evaluate(
            make_read_only_spec(going.step_tool.spec), asked, rules=rules, roots=roots, parent=handed
        )
        if own.action == "deny":
            return own
        verdict = lane.authority.evaluate(entry.spec, call.arguments, rules=rules, roots=roots, parent=handed)
        if going.kind == "step":
            if own.action == "ask" and verdict.action == "allow":
                return verdict.narrow("ask", own.reason, PolicyStep("rule", "ask", own.reason))
            return verdict
        if verdict.action != "deny":
            return verdict
        ends = verdict.with_trace_note(
            PolicyStep("rule", "allow", "closing an open tool session requires no capability")
        )
        ends.action, ends.capabilities = "allow", CapabilitySet()
        return ends
