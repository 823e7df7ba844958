"""Step 3, authorise: capabilities and rules, then watchdogs, then the user. Each can only narrow the decision."""

from __future__ import annotations

from collections.abc import Awaitable

from handrail.arbiter.approvals.asking import Asking, typed_into
from handrail.arbiter.approvals.desk import Approvals
from handrail.arbiter.call import Call, Lane, Refusal
from handrail.arbiter.locks import Resources, shared
from handrail.arbiter.offers import judged_as, reading
from handrail.arbiter.output.shaper import Shaper
from handrail.contract.doors.files import Located
from handrail.contract.tool.requires import CapabilitySet
from handrail.policy.questions import Step as PolicyStep
from handrail.policy.questions import Verdict


class Authorisation:
    """The authorisation of calls by capabilities, rules, watchdogs and users."""

    def __init__(self, approvals: Approvals, shaper: Shaper, resources: Resources) -> None:
        self._shaper = shaper
        self.asking = Asking(approvals, shaper, resources, self.judged, self._watched)

    def decide(self, call: Call) -> Awaitable[None] | None:
        """Decide at once if rules alone decide; otherwise return an awaitable that decides.

        :raises Refusal: ``denied``, by a rule, a watchdog or a user, or because the session has no user to ask
        :raises Parked: if a user must approve and cannot answer now
        """
        lane, looked = call.lane, call.looked
        call.rules = lane.rules
        if looked is not None and looked.rules is lane.rules and looked.layer is lane.authority.layer:
            verdict = looked.verdict
        else:
            verdict = self.judged(call, call.located)
        call.located = None
        if verdict.action == "ask" or (verdict.action == "allow" and self._has_to_wait(call, lane)):
            return self._narrow(call, verdict)
        self._conclude(call, verdict)
        if verdict.prepared.spec.only_its_command:
            self._read_only(call)
        return None

    @staticmethod
    def _has_to_wait(call: Call, lane: Lane) -> bool:
        """Return whether a watchdog or a question may still stop a call that the rules allow."""
        entry = call.entry
        assert entry is not None
        if call.resumed or lane.authority.watchers(entry.spec, lane.failed is not None):
            return True
        return lane.attendant is not None and entry.asks_first and call.parent is None

    async def _narrow(self, call: Call, verdict: Verdict) -> None:
        """Apply watchdogs and, if necessary, ask the user."""
        if call.going is not None and call.going.kind == "close":
            self._conclude(call, verdict)  # an open tool session may always end
            return
        assert call.entry is not None
        await call.known()
        verdict = await self._watched(call, verdict)
        if verdict.action == "ask":
            call.verdict = verdict
            await self.asking.permission(call)
        else:
            if call.resumed:
                await self.asking.not_needed(call)
            self._conclude(call, verdict)
        attended = call.lane.attendant is not None or call.resumed
        if attended and call.parent is None and call.entry.asks_first:
            await self.asking.questions(call)
        self._read_only(call)

    @staticmethod
    def _read_only(call: Call) -> None:
        """Run a command that is proved to change nothing read-only: no writes, no network, shared locks."""
        verdict = call.verdict
        if verdict is not None and verdict.prepared.spec.only_its_command and verdict.reads_only:
            call.read_only = True
            call.wants = shared(call.wants)
            verdict.capabilities = verdict.capabilities.reading()

    def _conclude(self, call: Call, verdict: Verdict) -> None:
        call.verdict = verdict
        if verdict.action == "deny":
            raise Refusal("authorise", "denied", verdict.reason)
        call.note("authorised", verdict.by_rules)

    async def _watched(self, call: Call, verdict: Verdict) -> Verdict:
        """Return the verdict after the watchdogs."""
        assert call.entry is not None and call.arguments is not None
        spec, arguments, lane = call.entry.spec, call.arguments, call.lane
        if verdict.action == "deny" or not lane.authority.watchers(spec, lane.failed is not None):
            return verdict
        call.own_arguments()
        failed = (0, 0) if lane.failed is None else lane.failed.before(spec.id, self._shaper.hash(call.arguments))
        call.flush()
        return await call.interruptible(
            "authorise",
            lambda: lane.authority.watch(
                verdict,
                spec,
                arguments,
                lane.session_id,
                call_id=call.id,
                failed=failed,
                redact=self._shaper.redactor.text,
            ),
        )

    def again(self, call: Call) -> None:
        """Evaluate the call again after the session's rules changed: a new *deny* counts, an approval stays.

        :raises Refusal: ``denied``
        """
        verdict = self.judged(call)
        if verdict.action == "deny":
            raise Refusal("intend", "denied", verdict.reason)

    def judged(self, call: Call, located: dict[str, Located] | None = None) -> Verdict:
        """Return the verdict of rules and capabilities. Changes nothing else.

        :param located: paths that were resolved in the same loop turn; None resolves all of them
        """
        assert call.entry is not None and call.arguments is not None
        lane, caller, tool, spec = call.lane, call.parent, call.entry.tool, call.entry.spec
        origin = tool.origin
        if call.going is not None and call.steps:
            return self._judged_in_its_place(call)
        if tool.types and (typed := typed_into(call)) is not None:
            parent = None if caller is None or caller.verdict is None else caller.verdict.capabilities
            return lane.authority.judge_typed(spec, call.arguments, typed, rules=lane.rules, parent=parent)
        if tool.asks_source is not None or tool.goes_on is not None:
            spec, origin, call.at_source = judged_as(call.entry, call.arguments, call.generation)
        return lane.authority.judge(
            spec,
            call.arguments,
            rules=lane.rules,
            roots=lane.around.roots,
            located=located,
            parent=None if caller is None or caller.verdict is None else caller.verdict.capabilities,
            origin=origin,
            behind=call.entry.behind,
        )

    def _judged_in_its_place(self, call: Call) -> Verdict:
        """Evaluate a step as a call of the tool whose session is open.

        The rules for the step tool apply as well. A tool session can always be closed, without capabilities if a rule denies it.
        """
        going, entry, lane, caller = call.going, call.entry, call.lane, call.parent
        assert going is not None and going.by is not None and entry is not None and call.arguments is not None
        handed = None if caller is None or caller.verdict is None else caller.verdict.capabilities
        rules, roots = lane.rules, lane.around.roots
        asked = {"id": going.id, "input": going.sent} if going.kind == "step" else {"id": going.id}
        own = lane.authority.judge(reading(going.by.spec), asked, rules=rules, roots=roots, parent=handed)
        if own.action == "deny":
            return own
        verdict = lane.authority.judge(entry.spec, call.arguments, rules=rules, roots=roots, parent=handed)
        if going.kind == "step":
            if own.action == "ask" and verdict.action == "allow":
                return verdict.narrowed("ask", own.reason, PolicyStep("rule", "ask", own.reason))
            return verdict
        if verdict.action != "deny":
            return verdict
        ends = verdict.noted(PolicyStep("rule", "allow", "an open tool session may end, without any capability"))
        ends.action, ends.capabilities = "allow", CapabilitySet()
        return ends
