"""The runtime service by which one call hands work to sub-agents, and its checks before the call runs."""

from __future__ import annotations

from collections.abc import Sequence

from handrail.arbiter.call_state import Call, CallRejection
from handrail.arbiter.client_requests import pause_timeouts
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.contract.services.subagent_services import (
    NO_MODEL,
    DelegatedSession,
    SubagentRunner,
    SubagentTask,
    SubagentType,
)
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names


def add_subagent_sessions_to_error(result: Result, handed: Sequence[DelegatedSession]) -> Result:
    """Add the sessions of sub-agents to the error of a call that was cut short.

    Those sessions contain the work of the sub-agents so far.
    """
    if not handed or result.ok:
        return result
    several = len(handed) > 1
    sessions = ", ".join(f"{one.session_id} ({one.agent})" for one in handed)
    text = (
        f"{(result.error_text or '').rstrip('.')}. The work of its sub-agent{'s' if several else ''} is in session"
        f"{'s' if several else ''} {sessions}. Fork a session to continue that work."
    )
    data: object = [one._asdict() for one in handed] if several else handed[0]._asdict()
    return Result(result.type, data if result.data is None else result.data, text, result.metadata)


class CallSubagentService:
    """The sub-agents of one call (:class:`~handrail.contract.services.subagent_services.SubagentService`).

    A sub-agent has its own budget, so the time-out of the call pauses meanwhile.
    """

    __slots__ = ("_of",)

    def __init__(self, of: Call) -> None:
        self._of = of

    async def list_types(self) -> Sequence[SubagentType]:
        return self._of.lane.agent_types()

    async def run(self, delegation: SubagentTask) -> Result:
        lane = self._of.lane
        delegates = find_subagent_runner(self._of, delegation.agent)
        lane.delegating_calls[self._of.id] = self._of
        self._of.working_subagents += 1
        try:
            with pause_timeouts(self._of):
                return await delegates.run(self._of.id, delegation)
        finally:
            self._of.working_subagents -= 1
            if not self._of.working_subagents:
                del lane.delegating_calls[self._of.id]

    async def compact_conversation(self) -> Result:
        return await _get_runner(
            self._of, "This session has no model, so it has no conversation to compact. Continue without compaction."
        ).compact_conversation()


def add_subagent_to_result(call: Call, to: DelegatedSession) -> None:
    """Add a sub-agent that works for ``call`` to its result."""
    call.subagents = (*call.subagents, to)


def check_subagent_can_start(call: Call) -> None:
    """Check, before a call runs or becomes a job, that its sub-agent can start.

    :raises CallRejection: with the error of :meth:`~handrail.contract.services.subagent_services.SubagentService.run`
    """
    assert call.entry is not None and call.arguments is not None
    if (agent := call.entry.tool.delegation_target(call.arguments)) is None:
        return
    try:
        find_subagent_runner(call, agent)
    except ToolError as error:
        raise CallRejection("validate", error.kind, error.text) from None


def find_subagent_runner(call: Call, agent: str) -> SubagentRunner:
    """Return the runner of the sub-agent that ``call`` delegates to.

    :raises ToolError: if the agent is unknown or faulty, no model is attached, or no further level is allowed
    """
    lane = call.lane
    check_delegation_target(agent, lane.agent_types())
    delegates = _get_runner(call)
    lane.load_agent(agent)
    return delegates


def _get_runner(call: Call, without: str = NO_MODEL) -> SubagentRunner:
    """Return the runner of the call's sub-agents.

    :raises ToolError: ``unavailable`` with the text ``without``, if no model is attached
    """
    first = call
    while first.parent is not None:
        first = first.parent
    own = None if first.job is None else first.job.subagent_runner
    if (delegates := own or call.lane.subagent_runner) is None:
        raise ToolError(without, kind="unavailable")
    return delegates


def check_delegation_target(agent: str, types: Sequence[SubagentType]) -> None:
    """Check that work can be delegated to ``agent``.

    :raises ToolError: ``invalid_input`` with the available agents, if it cannot
    """
    ids = [one.id for one in types]
    if agent in ids:
        return
    close = nearest_names(agent, ids, 1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    there = f"Available agents: {', '.join(ids)}." if ids else "No agent is available. Do the work yourself."
    raise ToolError(
        f"Agent `{escape_terminal_controls(agent[:80])}` is not available for delegation.{hint} {there}",
        kind="invalid_input",
    )
