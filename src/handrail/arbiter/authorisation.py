"""Step 3, authorise: capabilities and rules, then watchdogs, then a person; each can only narrow."""

from __future__ import annotations

from collections.abc import Awaitable

from handrail.arbiter.approvals import Approvals
from handrail.arbiter.asking import Asking
from handrail.arbiter.call import Call, Lane, Refusal
from handrail.arbiter.offers import judged_as
from handrail.arbiter.output import Shaper
from handrail.arbiter.resources import Resources, shared
from handrail.policy.verdict import Verdict


class Authorisation:
    """Decides calls by the authority of their lane, and asks where it says ask."""

    def __init__(self, approvals: Approvals, shaper: Shaper, resources: Resources) -> None:
        self._shaper = shaper
        self.asking = Asking(approvals, shaper, resources, self._judged, self._watched)

    def decide(self, call: Call) -> Awaitable[None] | None:
        """Decide at once where rules alone do; otherwise give back what there is to wait for.

        :raises Refusal: ``denied``, by a rule, a watchdog, a person, or for want of one
        :raises Parked: when a person has to be asked and is not there now
        """
        lane = call.lane
        call.rules = lane.rules
        verdict = self._judged(call)
        if verdict.action == "ask" or (verdict.action == "allow" and self._has_to_wait(call, lane)):
            return self._narrow(call, verdict)
        self._conclude(call, verdict)
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
        assert call.entry is not None
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
        verdict = self._judged(call)
        if verdict.action == "deny":
            raise Refusal("intend", "denied", verdict.reason)

    def _judged(self, call: Call) -> Verdict:
        assert call.entry is not None and call.arguments is not None
        lane, caller, tool, spec = call.lane, call.parent, call.entry.tool, call.entry.spec
        origin = tool.origin
        if tool.asks_source is not None:
            spec, origin, call.at_source = judged_as(call.entry, call.arguments, call.generation)
        return lane.authority.judge(
            spec,
            call.arguments,
            rules=lane.rules,
            roots=lane.around.roots,
            parent=None if caller is None or caller.verdict is None else caller.verdict.capabilities,
            origin=origin,
        )
