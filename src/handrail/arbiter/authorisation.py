"""Step 3, authorise: capabilities and rules, then watchdogs, then a person. Each can only narrow the decision."""

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
    """Decides calls by the authority of their lane, and asks where it says ask."""

    def __init__(self, approvals: Approvals, shaper: Shaper, resources: Resources) -> None:
        self._shaper = shaper
        self.asking = Asking(approvals, shaper, resources, self.judged, self._watched)

    def decide(self, call: Call) -> Awaitable[None] | None:
        """Decide at once where rules alone do; otherwise give back what there is to wait for.

        :raises Refusal: ``denied``, by a rule, a watchdog, a person, or for want of one
        :raises Parked: when a person has to be asked and is not there now
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
        """Whether a call that the rules allow is looked at by somebody all the same."""
        entry = call.entry
        assert entry is not None
        if call.resumed or lane.authority.watchers(entry.spec, lane.failed is not None):
            return True
        return lane.attendant is not None and entry.asks_first and call.parent is None

    async def _narrow(self, call: Call, verdict: Verdict) -> None:
        """What watchdogs and people make of it."""
        if call.going is not None and call.going.kind == "close":
            self._conclude(call, verdict)  # what was allowed to be opened may end
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
        """Where its command is proved to change nothing it runs so: nothing to write, no network, a shared lock."""
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
        """The verdict as watchdogs leave it."""
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
        """The session's rules changed while the call waited: a new deny counts, an answered ask stays answered.

        :raises Refusal: ``denied``
        """
        verdict = self.judged(call)
        if verdict.action == "deny":
            raise Refusal("intend", "denied", verdict.reason)

    def judged(self, call: Call, located: dict[str, Located] | None = None) -> Verdict:
        """What rules and capabilities say of it. Changes nothing.

        :param located: paths that were resolved in this very moment; None resolves all anew
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
        """A step is judged as a call of the tool that is open, and its own tool may be ruled out beside it. A state can
        always be closed: what is denied by now, its end cannot touch either."""
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
        ends = verdict.noted(PolicyStep("rule", "allow", "what is open may end, without touching anything"))
        ends.action, ends.capabilities = "allow", CapabilitySet()
        return ends
