"""Step 3, authorise: capabilities and rules, then watchdogs, then a person; each can only narrow."""

from __future__ import annotations

from collections.abc import Awaitable

from handrail.arbiter.call import Call, Refusal
from handrail.arbiter.output import Shaper
from handrail.contract.people import ApprovalAnswer, ApprovalRequest, Attendant
from handrail.policy.rules import parse_rule
from handrail.policy.verdict import Verdict


class Authorisation:
    """Decides calls by the authority of their lane, and asks where it says ask."""

    def __init__(self, shaper: Shaper) -> None:
        self._shaper = shaper

    def decide(self, call: Call) -> Awaitable[None] | None:
        """Decide at once where rules alone do; otherwise give back what there is to wait for.

        :raises Refusal: ``denied``, by a rule, a watchdog, a person, or for want of one
        """
        lane = call.lane
        call.rules = lane.rules
        verdict = self._judged(call)
        if verdict.action == "ask" or (lane.authority.watchdogs and verdict.action == "allow"):
            return self._narrow(call, verdict)
        self._conclude(call, verdict)
        return None

    async def _narrow(self, call: Call, verdict: Verdict) -> None:
        """What watchdogs and people make of it."""
        if call.lane.authority.watchdogs:
            verdict = await self._watch(call, verdict)
        if verdict.action == "ask":
            call.verdict = verdict
            await self._ask(call)
        else:
            self._conclude(call, verdict)

    def _conclude(self, call: Call, verdict: Verdict) -> None:
        call.verdict = verdict
        if verdict.action == "deny":
            raise Refusal("authorise", "denied", verdict.reason)
        call.note("authorised", verdict.by_rules)

    async def _watch(self, call: Call, verdict: Verdict) -> Verdict:
        assert call.entry is not None and call.arguments is not None
        call.own_arguments()
        spec, arguments, lane = call.entry.spec, call.arguments, call.lane
        call.flush()
        return await call.interruptible(
            "authorise",
            lambda: lane.authority.watch(verdict, spec, arguments, lane.session_id, call_id=call.id),
        )

    async def _ask(self, call: Call) -> None:
        """Put the call to a person. No locks are held and no time-out runs while they think.

        What they see is a copy, with the names of registered secrets in the secrets' places; what runs is what the
        hash was made of.
        """
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
        call.own_arguments()
        arguments_hash = self._shaper.hash(call.arguments)
        reason = self._shaper.redact(verdict.reason)
        always = verdict.always
        if always is not None and self._shaper.redact(always) != always:
            always = None  # a rule is stored and shown as it is
        request = ApprovalRequest(
            call_id=call.id,
            session_id=lane.session_id,
            tool_id=call.entry.spec.id,
            arguments=self._shaper.redact(call.arguments),
            arguments_hash=arguments_hash,
            definition_hash=call.entry.definition_hash,
            reason=reason,
            always=always,
        )
        call.note("approval-requested", {"reason": reason, "arguments_hash": arguments_hash, "always": always})
        call.flush()
        call.emit("asking", {"reason": reason, "always": always})
        answer = await self._answer(call, attendant, request)
        call.note(
            "approval-responded", {"choice": answer.choice, "message": answer.message, "arguments_hash": arguments_hash}
        )
        if answer.choice == "reject":
            said = f": {answer.message}" if answer.message else "."
            raise Refusal("authorise", "denied", f"the user rejected this call{said}")
        if answer.choice == "session" and always is not None:
            lane.rules = lane.rules.with_rules(parse_rule(always, scope="session", source="answered for this session"))
        call.rules = lane.rules
        call.note("authorised", {"by": "person", "choice": answer.choice, "arguments_hash": arguments_hash})
        call.emit("approved", {"choice": answer.choice})

    async def _answer(self, call: Call, attendant: Attendant, request: ApprovalRequest) -> ApprovalAnswer:
        """The person's answer; a face that cannot get one is a no."""
        try:
            answer: object = await call.interruptible("authorise", lambda: attendant.approve(request))
            if isinstance(answer, ApprovalAnswer):
                return answer
            said = f"its answer was a {type(answer).__name__}"
        except Refusal:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {str(error)[:300]}"
        raise Refusal("authorise", "denied", f"{request.reason} The user could not be asked ({said}), so it is denied.")

    def again(self, call: Call) -> None:
        """The session's rules changed while the call waited: a new deny counts, an answered ask stays answered.

        :raises Refusal: ``denied``
        """
        verdict = self._judged(call)
        if verdict.action == "deny":
            raise Refusal("intend", "denied", verdict.reason)

    def _judged(self, call: Call) -> Verdict:
        assert call.entry is not None and call.arguments is not None
        lane, caller = call.lane, call.parent
        return lane.authority.judge(
            call.entry.spec,
            call.arguments,
            rules=lane.rules,
            roots=lane.around.roots,
            parent=None if caller is None or caller.verdict is None else caller.verdict.capabilities,
        )
