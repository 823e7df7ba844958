"""Recovery of earlier calls: a lost answer is read from the log, and calls that wait for approval are resumed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from handrail.arbiter.approvals.desk import Approvals
from handrail.arbiter.arbiter import Arbiter, Reply
from handrail.arbiter.arguments import recorded_result
from handrail.arbiter.call import Call, Lane
from handrail.arbiter.delegating import naming
from handrail.arbiter.execution import StopReason
from handrail.arbiter.output.exposure import views
from handrail.arbiter.output.shaper import Shaper
from handrail.contract.approvals import Approval
from handrail.contract.call import Answer, ProposedCall, Result
from handrail.contract.doors.agents import Tree
from handrail.contract.errors import LogUnavailable
from handrail.contract.generation import Generation
from handrail.policy.rules.rules import Rule, parse_rule
from handrail.policy.suggestions import NEVER, PROJECT
from handrail.record.log import CommitLog

# The result of a call whose answer was lost, read from the log. Nothing runs again.

_INTERRUPTED = (
    "Handrail ended while this call was running, and nobody knows how far it came; it is not run again. "
    "Look at what it did before you do anything like it"
)
_NOT_BEGUN = "Handrail ended before this call began, so it had no effect; call again if that is still wanted"
_NO_RECORD = (
    "Handrail ended before anything about this call was on record: as far as is known it did not run. "
    "Look before you call again"
)
_REMOVED = "what this call gave has been removed from the log, or is damaged there; call again if it is still needed"
_ANOTHERS = (
    "this call was proposed in the session that this one was forked from, and has no answer there yet; here it is not run. "
    "Call again if that is wanted"
)
_TOOL_GONE = "this call has ended, but its tool is not there any more, and so nobody can tell what may be shown of it"


async def recalled(
    log: CommitLog, shaper: Shaper, generation: Generation, session_id: str, call_id: str, tree: Tree | None = None
) -> Answer:
    """The answer to a call by what is on record.

    :param session_id: whose history it is part of
    :param generation: has the tool, which says what its model may see of a result
    :param tree: knows whom it handed work to
    :raises LogUnavailable: when the log cannot tell
    """
    proposal = await log.proposal_of(call_id)
    # A job is what its proposer was answered, whatever has become of it since.
    outcome = await log.detachment_of(call_id) or await log.outcome_of(call_id)
    tool = (proposal.tool if proposal is not None else None) or ""
    if outcome is None and proposal is not None and proposal.session_id != session_id:
        result = Result.error("cancelled", _ANOTHERS, recorded=True)
    elif outcome is None:
        # A call with side effects does not begin before its intent is durable, so what is only proposed had none. Where
        # nothing at all is on record, records may also have been purged.
        result = _ended(_NO_RECORD) if proposal is None else Result.error("cancelled", _NOT_BEGUN, recorded=True)
    elif outcome.kind == "interrupted":
        result = naming(_ended(_INTERRUPTED), () if tree is None else tree.begun_by(session_id, call_id))
    elif (recorded := recorded_result(outcome)) is None:
        result = Result.error("unavailable", _REMOVED, recorded=True)
    else:
        found = recorded.with_metadata(recorded=True)
        if outcome.kind in ("refused", "detached"):  # its text is the kernel's own
            return Answer(call_id, tool, found, found)
        entry = generation.resolve(tool)
        if entry is not None:
            return Answer(call_id, tool, *views(entry.spec, found))
        return Answer(call_id, tool, found, Result.error("unavailable", _TOOL_GONE, recorded=True))
    return Answer(call_id, tool, result, result)


def _ended(text: str) -> Result:
    return Result.error("interrupted", text, recorded=True)


# Parked calls, which wait for a person across a restart: resumed under their own ids after the answer.

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
    return arbiter.call(request.call_id, proposed, lane, generation, resumed=rows)


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


class TakingUp:
    """The earlier calls of one session.

    :param generation: gives the tools that they are resolved by now
    """

    def __init__(self, arbiter: Arbiter, lane: Lane, generation: Callable[[], Generation]) -> None:
        self._arbiter = arbiter
        self._lane = lane
        self._generation = generation
        self._under_way: list[_Stopped] = []

    async def waiting(self) -> list[Call]:
        """Those that are parked, in the order in which they were asked about; none is taken up.

        :raises LogUnavailable: when the log cannot tell
        """
        return await parked_calls(self._arbiter, self._lane, self._generation())

    async def resume(self) -> list[Answer]:
        """See :meth:`handrail.contract.session.Session.resume_parked`."""
        stopped = self._begin()
        try:
            return await self._carried_out(await self.waiting(), stopped)
        finally:
            self._under_way.remove(stopped)

    async def answers(self, call_ids: Sequence[str]) -> list[Answer]:
        """See :meth:`handrail.contract.session.Session.recall_all`."""
        stopped = self._begin()
        try:
            arbiter, lane, generation = self._arbiter, self._lane, self._generation()
            parked = {call.id: call for call in await parked_calls(arbiter, lane, generation, call_ids)}
            # Read before anything runs: a log that cannot be read leaves every call as it is.
            found = {
                known_as: await recalled(
                    arbiter.log, arbiter.shaper, generation, lane.session_id, known_as, arbiter.jobs.tree
                )
                for known_as in call_ids
                if known_as not in parked
            }
            in_order = [parked[known_as] for known_as in dict.fromkeys(call_ids) if known_as in parked]
            found |= {answer.call_id: answer for answer in await self._carried_out(in_order, stopped)}
            return [found[known_as] for known_as in call_ids]
        finally:
            self._under_way.remove(stopped)

    def stop(self, reason: StopReason) -> None:
        """Stop those that are not in flight yet because they are still looked up."""
        for stopped in self._under_way:
            stopped.reason = stopped.reason or reason

    def _begin(self) -> _Stopped:
        stopped = _Stopped()
        self._under_way.append(stopped)
        return stopped

    async def _carried_out(self, calls: Sequence[Call], stopped: _Stopped) -> list[Answer]:
        if not calls:
            return []
        reason = stopped.reason if self._lane.closed is None else "shutdown"  # they go on waiting
        following = iter(calls)
        reply = Reply(self._arbiter, lambda _: next(following))
        for call in calls:
            if reason is not None:
                call.execution.stop(reason)
            self._lane.running.setdefault(call.id, call)  # so that what is stopped from here on reaches it
            reply.submit(call.proposed)
        return await reply.answers()


class _Stopped:
    """Why calls are not to run that are still looked up; None while they are."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason: StopReason | None = None
