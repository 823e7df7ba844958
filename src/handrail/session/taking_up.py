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
    "Handrail stopped while this call was running. The outcome is unknown, and the call is not run again. "
    "Check its effects before you repeat it."
)
_NOT_BEGUN = "Handrail stopped before this call started, so it had no effect. Call again if you still need it."
_NO_RECORD = (
    "Handrail stopped before it recorded anything about this call. The call probably did not run. "
    "Check that before you call again."
)
_REMOVED = "The result of this call is no longer in the log, or is damaged there. Call again if you still need it."
_ANOTHERS = (
    "This call belongs to the session that this session was forked from, and has no answer there yet. "
    "It is not run here. Call again if you need it."
)
_TOOL_GONE = (
    "This call has ended, but its tool is no longer available, so its result cannot be shown. "
    "Use another tool, or ask the user to make the tool available again."
)


async def recalled(
    log: CommitLog, shaper: Shaper, generation: Generation, session_id: str, call_id: str, tree: Tree | None = None
) -> Answer:
    """Return the answer to an earlier call from the log. Nothing runs again.

    :param session_id: the session in whose history the call is
    :param generation: the tools; the call's tool decides what the model may see of the result
    :param tree: knows the sub-agents that the call started
    :raises LogUnavailable: if the log cannot be read
    """
    proposal = await log.proposal_of(call_id)
    # If the call moved to the background, its answer was the job, even if the job has ended since.
    outcome = await log.detachment_of(call_id) or await log.outcome_of(call_id)
    tool = (proposal.tool if proposal is not None else None) or ""
    if outcome is None and proposal is not None and proposal.session_id != session_id:
        result = Result.error("cancelled", _ANOTHERS, recorded=True)
    elif outcome is None:
        # A call with side effects does not start before its intent is durable, so a call that is only proposed had none.
        # If nothing is on record, the records may also have been purged.
        result = _ended(_NO_RECORD) if proposal is None else Result.error("cancelled", _NOT_BEGUN, recorded=True)
    elif outcome.kind == "interrupted":
        result = naming(_ended(_INTERRUPTED), () if tree is None else tree.begun_by(session_id, call_id))
    elif (recorded := recorded_result(outcome)) is None:
        result = Result.error("unavailable", _REMOVED, recorded=True)
    else:
        found = recorded.with_metadata(recorded=True)
        if outcome.kind in ("refused", "detached"):  # the text comes from the kernel, not from a tool
            return Answer(call_id, tool, found, found)
        entry = generation.resolve(tool)
        if entry is not None:
            return Answer(call_id, tool, *views(entry.spec, found))
        return Answer(call_id, tool, found, Result.error("unavailable", _TOOL_GONE, recorded=True))
    return Answer(call_id, tool, result, result)


def _ended(text: str) -> Result:
    return Result.error("interrupted", text, recorded=True)


# Suspended calls, which await approval across a restart. After the answer they are resumed under their own ids.

_NOT_WHOLE = (
    "The call cannot be resumed: its arguments contained a registered secret, which is never stored. Propose it again."
)


async def parked_calls(
    arbiter: Arbiter, lane: Lane, generation: Generation, call_ids: Collection[str] | None = None
) -> list[Call]:
    """Return the calls of a session that await approval, in the order of their requests.

    :param call_ids: considers only these calls
    :raises LogUnavailable: if the log cannot be read
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
        else:  # the process ended between the call's answer and this step
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
    """Return the rules of the project scope that users' answers stored for this workspace.

    :raises LogUnavailable: if the rules cannot be read, or an unreadable rule may be one that denies
    """
    found: list[Rule] = []
    for stored in approvals.rules():
        source = PROJECT if stored.text.startswith("allow") else NEVER
        try:
            found.append(parse_rule(stored.text, scope="project", source=source))
        except ValueError as error:
            if not stored.text.startswith("allow "):
                raise LogUnavailable(
                    f"The stored rule {stored.id} of this workspace cannot be read: {error}. "
                    "Remove it with `handrail approve` (`--rules` lists it), and answer again."
                ) from None
    return found


class TakingUp:
    """A resolver of the earlier calls of one session: it recovers answers and resumes suspended calls.

    :param generation: returns the current tools
    """

    def __init__(self, arbiter: Arbiter, lane: Lane, generation: Callable[[], Generation]) -> None:
        self._arbiter = arbiter
        self._lane = lane
        self._generation = generation
        self._under_way: list[_Stopped] = []

    async def waiting(self) -> list[Call]:
        """Return the calls that await approval, in the order of their requests. None is resumed.

        :raises LogUnavailable: if the log cannot be read
        """
        return await parked_calls(self._arbiter, self._lane, self._generation())

    async def resume(self) -> list[Answer]:
        """Resume all calls that await approval and return their answers; see ``Session.resume_parked``."""
        stopped = self._begin()
        try:
            return await self._carried_out(await self.waiting(), stopped)
        finally:
            self._under_way.remove(stopped)

    async def answers(self, call_ids: Sequence[str]) -> list[Answer]:
        """Return the answers to earlier calls, in order; see ``Session.recall_all``."""
        stopped = self._begin()
        try:
            arbiter, lane, generation = self._arbiter, self._lane, self._generation()
            parked = {call.id: call for call in await parked_calls(arbiter, lane, generation, call_ids)}
            # Read before anything runs: if the log cannot be read, no call is resumed.
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
        """Stop the calls that are still looked up and so are not in flight yet."""
        for stopped in self._under_way:
            stopped.reason = stopped.reason or reason

    def _begin(self) -> _Stopped:
        stopped = _Stopped()
        self._under_way.append(stopped)
        return stopped

    async def _carried_out(self, calls: Sequence[Call], stopped: _Stopped) -> list[Answer]:
        if not calls:
            return []
        reason = stopped.reason if self._lane.closed is None else "shutdown"  # they continue to await approval
        following = iter(calls)
        reply = Reply(self._arbiter, lambda _: next(following))
        for call in calls:
            if reason is not None:
                call.execution.stop(reason)
            self._lane.running.setdefault(call.id, call)  # so that a stop from here on reaches it
            reply.submit(call.proposed)
        return await reply.answers()


class _Stopped:
    """The reason to stop calls that are still looked up; None while they may run."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason: StopReason | None = None
