"""Recovery of earlier calls: a lost answer is read from the log, and calls that wait for approval are resumed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress

from handrail.arbiter.approvals.approval_broker import ApprovalBroker
from handrail.arbiter.arbiter import Arbiter, ReplyCallRunner
from handrail.arbiter.call_arguments import parse_recorded_result
from handrail.arbiter.call_state import Call, Lane
from handrail.arbiter.output.audience_views import make_audience_results
from handrail.arbiter.output.shaper import OutputShaper
from handrail.arbiter.stoppable_execution import StopReason
from handrail.arbiter.subagent_delegation import add_subagent_sessions_to_error
from handrail.contract.approval_requests import Approval, StoredProjectRule
from handrail.contract.calls_and_results import CallAnswer, ProposedCall, Result
from handrail.contract.errors import LogUnavailable, StartError
from handrail.contract.services.subagent_services import SubagentSessionStore
from handrail.contract.tool_generation import Generation
from handrail.policy.rule_suggestions import PROJECT_SOURCE, REJECTION_SOURCE
from handrail.policy.rules.rules_and_modes import Rule, parse_rule
from handrail.record.commit_log import CommitLog
from handrail.store.database.sqlite_connection import open_reader
from handrail.store.project_identity import is_recorded_project_folder, list_workspaces_sharing_grants
from handrail.store.state_folders import StateFolders
from handrail.store.tables.approval_tables import ApprovalReader

# The result of a call whose answer was lost, read from the log. Nothing runs again.

_INTERRUPTED = (
    "Handrail stopped while this call was running. The outcome is unknown, and the call is not run again. "
    "Check its effects before you repeat it."
)
_NOT_STARTED = "Handrail stopped before this call started, so it had no effect. Call again if you still need it."
_NO_RECORD = (
    "Handrail stopped before it recorded anything about this call. The call probably did not run. "
    "Check that before you call again."
)
_REMOVED = "The result of this call is no longer in the log, or is damaged there. Call again if you still need it."
_OTHER_SESSION = (
    "This call belongs to the session that this session was forked from, and has no answer there yet. "
    "It is not run here. Call again if you need it."
)
_TOOL_GONE = (
    "This call has ended, but its tool is no longer available, so its result cannot be shown. "
    "Use another tool, or ask the user to make the tool available again."
)


async def read_answer_from_log(
    log: CommitLog,
    shaper: OutputShaper,
    generation: Generation,
    session_id: str,
    call_id: str,
    tree: SubagentSessionStore | None = None,
) -> CallAnswer:
    """Return the answer to an earlier call from the log. Nothing runs again.

    :param session_id: the session in whose history the call is
    :param generation: the tools; the call's tool decides what the model may see of the result
    :param tree: knows the sub-agents that the call started
    :raises LogUnavailable: if the log cannot be read
    """
    proposal = await log.find_proposal(call_id)
    # If the call moved to the background, its answer was the job, even if the job has ended since.
    outcome = await log.find_move_to_background(call_id) or await log.find_outcome(call_id)
    tool = (proposal.tool if proposal is not None else None) or ""
    if outcome is None and proposal is not None and proposal.session_id != session_id:
        result = Result.error("cancelled", _OTHER_SESSION, replayed=True)
    elif outcome is None:
        # A call with side effects does not start before its intent is durable, so a call that is only proposed had none.
        # If nothing is on record, the records may also have been purged.
        result = (
            _interrupted_result(_NO_RECORD)
            if proposal is None
            else Result.error("cancelled", _NOT_STARTED, replayed=True)
        )
    elif outcome.kind == "interrupted":
        result = add_subagent_sessions_to_error(
            _interrupted_result(_INTERRUPTED), () if tree is None else tree.list_delegated_by_call(session_id, call_id)
        )
    elif (recorded := parse_recorded_result(outcome)) is None:
        result = Result.error("unavailable", _REMOVED, replayed=True)
    else:
        found = recorded.with_metadata(replayed=True)
        if outcome.kind in ("rejected", "backgrounded"):  # the text comes from the kernel, not from a tool
            return CallAnswer(call_id, tool, found, found)
        if (entry := generation.resolve_tool_name(tool)) is not None:
            return CallAnswer(call_id, tool, *make_audience_results(entry.spec, found))
        return CallAnswer(call_id, tool, found, Result.error("unavailable", _TOOL_GONE, replayed=True))
    return CallAnswer(call_id, tool, result, result)


def _interrupted_result(text: str) -> Result:
    return Result.error("interrupted", text, replayed=True)


# Suspended calls, which await approval across a restart. After the answer they are resumed under their own ids.

_ARGUMENTS_NOT_STORED = (
    "The call cannot be resumed: its arguments contained a registered secret, which is never stored. Propose it again."
)


async def find_suspended_calls(
    arbiter: Arbiter, lane: Lane, generation: Generation, call_ids: Collection[str] | None = None
) -> list[Call]:
    """Return the calls of a session that await approval, in the order of their requests.

    :param call_ids: considers only these calls
    :raises LogUnavailable: if the log cannot be read
    """
    approvals = arbiter.approval_broker
    await approvals.expire_overdue_requests()
    rows: dict[str, list[Approval]] = {}
    for row in approvals.list_unresolved_requests(lane.session_id):
        call_id = row.request.call_id
        if (call_ids is None or call_id in call_ids) and call_id not in lane.running_calls:
            rows.setdefault(call_id, []).append(row)
    calls: list[Call] = []
    for asked in rows.values():
        if await arbiter.log.find_outcome(asked[0].request.call_id) is None:
            calls.append(_resume_call(arbiter, lane, generation, asked))
        else:  # the process ended between the call's answer and this step
            for row in asked:
                approvals.withdraw(row)
    return calls


def _resume_call(arbiter: Arbiter, lane: Lane, generation: Generation, rows: list[Approval]) -> Call:
    request = rows[0].request
    if arbiter.approval_broker.are_arguments_unredacted(rows[0].id):
        proposed = ProposedCall(request.tool_id, request.arguments)
    else:
        proposed = ProposedCall(request.tool_id, {}, problem=_ARGUMENTS_NOT_STORED, problem_kind="conflict")
    return arbiter.create_call(request.call_id, proposed, lane, generation, resumed=rows)


def load_project_rules(approvals: ApprovalBroker, folders: StateFolders) -> list[Rule]:
    """Return the rules of the project scope that users' answers stored for this workspace, and for those that it shares with.

    If another folder has taken the path of the workspace, only the rules that deny hold: no answer was given for this folder.

    :raises LogUnavailable: if the rules cannot be read, or an unreadable rule may be one that denies
    """
    own = _parse_stored_rules(approvals.list_rules(), "")
    if not is_recorded_project_folder(folders):
        return [rule for rule in own if rule.action == "deny"]
    for path, state in list_workspaces_sharing_grants(folders):
        with suppress(StartError), closing(open_reader(state / folders.database_file.name)) as connection:
            own += _parse_stored_rules(ApprovalReader(connection).list_rules(), f", in {path}")
    return list(dict.fromkeys(own))


def _parse_stored_rules(rules: Iterable[StoredProjectRule], place: str) -> list[Rule]:
    found: list[Rule] = []
    for stored in rules:
        source = PROJECT_SOURCE if stored.text.startswith("allow") else REJECTION_SOURCE
        try:
            found.append(parse_rule(stored.text, scope="project", source=f"{source}{place}"))
        except ValueError as error:
            if not stored.text.startswith("allow "):
                raise LogUnavailable(
                    f"The stored rule {stored.id} of this workspace cannot be read: {error}. "
                    "Remove it with `handrail approve` (`--rules` lists it), and answer again."
                ) from None
    return found


class EarlierCallRecovery:
    """A resolver of the earlier calls of one session: it recovers answers and resumes suspended calls.

    :param generation: returns the current tools
    """

    def __init__(self, arbiter: Arbiter, lane: Lane, generation: Callable[[], Generation]) -> None:
        self._arbiter = arbiter
        self._lane = lane
        self._generation = generation
        self._lookups: list[_LookupStop] = []

    async def find_calls_awaiting_approval(self) -> list[Call]:
        """Return the calls that await approval, in the order of their requests. None is resumed.

        :raises LogUnavailable: if the log cannot be read
        """
        return await find_suspended_calls(self._arbiter, self._lane, self._generation())

    async def resume_awaiting_calls(self) -> list[CallAnswer]:
        """Resume all calls that await approval and return their answers; see ``LocalSession.resume_suspended_calls``."""
        stopped = self._start_lookup()
        try:
            return await self._carry_out(await self.find_calls_awaiting_approval(), stopped)
        finally:
            self._lookups.remove(stopped)

    async def resume_or_read_answers(self, call_ids: Sequence[str]) -> list[CallAnswer]:
        """Return the answers to earlier calls, in order; see ``Session.recover_results``."""
        stopped = self._start_lookup()
        try:
            arbiter, lane, generation = self._arbiter, self._lane, self._generation()
            suspended = {call.id: call for call in await find_suspended_calls(arbiter, lane, generation, call_ids)}
            # Read before anything runs: if the log cannot be read, no call is resumed.
            found = {
                known_as: await read_answer_from_log(
                    arbiter.log, arbiter.shaper, generation, lane.session_id, known_as, arbiter.jobs.tree
                )
                for known_as in call_ids
                if known_as not in suspended
            }
            in_order = [suspended[known_as] for known_as in dict.fromkeys(call_ids) if known_as in suspended]
            found |= {answer.call_id: answer for answer in await self._carry_out(in_order, stopped)}
            return [found[known_as] for known_as in call_ids]
        finally:
            self._lookups.remove(stopped)

    def stop_calls_in_lookup(self, reason: StopReason) -> None:
        """Stop the calls that are still looked up and so are not in flight yet."""
        for stopped in self._lookups:
            stopped.reason = stopped.reason or reason

    def _start_lookup(self) -> _LookupStop:
        stopped = _LookupStop()
        self._lookups.append(stopped)
        return stopped

    async def _carry_out(self, calls: Sequence[Call], stopped: _LookupStop) -> list[CallAnswer]:
        if not calls:
            return []
        reason = stopped.reason if self._lane.closed_reason is None else "shutdown"  # they continue to await approval
        following = iter(calls)
        reply = ReplyCallRunner(self._arbiter, lambda _: next(following))
        for call in calls:
            if reason is not None:
                call.execution.stop(reason)
            self._lane.running_calls.setdefault(call.id, call)  # so that a stop from here on reaches it
            reply.start_next_call(call.proposed)
        return await reply.wait_for_answers()


class _LookupStop:
    """The reason to stop calls that are still looked up; None while they may run."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason: StopReason | None = None
