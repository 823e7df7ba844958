"""Parked calls, which wait for a person across a restart: resumed under their own ids once answered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from handrail.arbiter.approvals.binding import RunFiles
from handrail.arbiter.approvals.desk import Approvals
from handrail.arbiter.approvals.requests import check_changed, rule_of
from handrail.arbiter.arbiter import Arbiter
from handrail.arbiter.calls.call import Call, Lane
from handrail.contract.approvals import Approval, StoredRule
from handrail.contract.call import ProposedCall
from handrail.contract.errors import LogUnavailable
from handrail.contract.generation import Generation
from handrail.policy.authority import Authority
from handrail.policy.rules.rules import Rule, RuleBook, parse_rule
from handrail.policy.suggestions import NEVER, PROJECT
from handrail.runtime.files.roots import Roots

_NOT_WHOLE = "its arguments held a registered secret, which is never stored, so it cannot be taken up; propose it again"


async def parked_calls(
    arbiter: Arbiter, lane: Lane, generation: Generation, call_ids: Collection[str] | None = None
) -> list[Call]:
    """The calls of a session that have no outcome and nobody carries, in the order in which they were asked about.

    :param call_ids: these only
    :raises LogUnavailable: when the log cannot tell
    """
    approvals = arbiter.approvals
    await approvals.sweep()
    rows: dict[str, list[Approval]] = {}
    for row in approvals.unanswered(lane.session_id):
        call_id = row.request.call_id
        if (call_ids is None or call_id in call_ids) and call_id not in lane.running:
            rows.setdefault(call_id, []).append(row)
    calls: list[Call] = []
    for asked in rows.values():
        if await arbiter.log.outcome_of(asked[0].request.call_id) is None:
            calls.append(_resumed(arbiter, lane, generation, asked))
        else:  # its process ended between its answer and this note
            for row in asked:
                approvals.let_go(row)
    return calls


def _resumed(arbiter: Arbiter, lane: Lane, generation: Generation, rows: list[Approval]) -> Call:
    request = rows[0].request
    if arbiter.approvals.is_whole(rows[0].id):
        proposed = ProposedCall(request.tool_id, request.arguments)
    else:
        proposed = ProposedCall(request.tool_id, {}, fault=_NOT_WHOLE, fault_kind="conflict")
    call = arbiter.call(request.call_id, proposed, lane, generation)
    call.resumed = True
    call.asked = tuple(rows)
    return call


def project_rules(approvals: Approvals) -> list[Rule]:
    """The rules that people's answers stored for this workspace, in the project's scope.

    :raises LogUnavailable: when they cannot be read, or one of them is no rule and may have been one that denies
    """
    found: list[Rule] = []
    for stored in approvals.rules():
        source = PROJECT if stored.text.startswith("allow") else NEVER
        try:
            found.append(parse_rule(stored.text, scope="project", source=source))
        except ValueError as error:
            if not stored.text.startswith("allow "):
                raise LogUnavailable(
                    f"the stored rule {stored.id} of this workspace cannot be read: {error}. "
                    "handrail approve --rules lists it; forget it there, and answer anew"
                ) from None
    return found


class Heeding:
    """What an answer changes beside its own call: the rules of sessions that are open, and whether one goes on.

    :param lane: of an open session, by its id
    :param lanes: of all that are open
    :param judged_by: what a parked call of no open session would be judged by
    """

    def __init__(
        self,
        approvals: Approvals,
        lane: Callable[[str], Lane | None],
        lanes: Callable[[], Iterable[Lane]],
        judged_by: Callable[[], tuple[Generation, Authority, RuleBook, Roots]],
    ) -> None:
        self._lane = lane
        self._lanes = lanes
        self._judged_by = judged_by
        approvals.watch(self._heard)
        approvals.forgotten = self._forgotten
        approvals.check_parked = self._check

    def _heard(self, row: Approval) -> None:
        if row.choice is None or row.state not in ("approved", "rejected"):
            return
        lane = self._lane(row.request.session_id)
        rule = rule_of(row)
        if rule is not None:
            for concerned in self._lanes() if rule.scope == "project" else (lane,):
                if concerned is not None and rule not in concerned.rules.rules:
                    concerned.rule_by(concerned.rules.with_rules(rule))
        if row.choice == "stop" and lane is not None:
            lane.closed = lane.closed or f"session {lane.session_id} was stopped by the user"
            for call in tuple(lane.running.values()):
                if call.id != row.request.call_id:  # which hears of it by itself
                    call.execution.stop("user")

    def _forgotten(self, stored: StoredRule) -> None:
        for lane in self._lanes():
            kept = tuple(r for r in lane.rules if r.text != stored.text or r.source not in (PROJECT, NEVER))
            if len(kept) < len(lane.rules):
                lane.rule_by(lane.rules.of(*kept))

    def _check(self, row: Approval, given: Mapping[str, Any]) -> Mapping[str, str]:
        generation, authority, rules, roots = self._judged_by()
        lane = self._lane(row.request.session_id)
        if lane is not None:
            authority, rules, roots = lane.authority, lane.rules, lane.around.roots
            generation = generation if lane.current is None else lane.current()
        entry = generation.resolve(row.request.tool_id)
        if entry is None:  # it is refused when it is taken up
            return {}
        verdict = check_changed(entry, given, authority, rules, roots)
        return RunFiles(roots, None if lane is None else lane.around.scratch).of(verdict.targets, given)
