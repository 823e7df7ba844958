"""The runtime service by which one call hands work to sub-agents, and its checks before the call runs."""

from __future__ import annotations

from collections.abc import Sequence

from handrail.arbiter.call import Call, Refusal
from handrail.arbiter.peers import not_counted
from handrail.contract.call import Result
from handrail.contract.doors.agents import NO_MODEL, AgentType, Delegates, Delegation, Handed
from handrail.contract.errors import ToolError
from handrail.contract.text.neutral import visible
from handrail.contract.tool.names import nearest


def naming(result: Result, handed: Sequence[Handed]) -> Result:
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


class CallAgents:
    """The sub-agents of one call (:class:`~handrail.contract.doors.agents.Agents`).

    A sub-agent has its own budget, so the time-out of the call pauses meanwhile.
    """

    __slots__ = ("_of",)

    def __init__(self, of: Call) -> None:
        self._of = of

    async def types(self) -> Sequence[AgentType]:
        return self._of.lane.agent_types()

    async def run(self, delegation: Delegation) -> Result:
        lane = self._of.lane
        delegates = ready(self._of, delegation.agent)
        lane.delegating[self._of.id] = self._of
        self._of.hands_over += 1
        try:
            with not_counted(self._of):
                return await delegates.run(self._of.id, delegation)
        finally:
            self._of.hands_over -= 1
            if not self._of.hands_over:
                del lane.delegating[self._of.id]

    async def compact(self) -> Result:
        return await _attached(
            self._of, "This session has no model, so it has no conversation to compact. Continue without compaction."
        ).compact()


def note_handed(call: Call, to: Handed) -> None:
    """Add a sub-agent that works for ``call`` to its result."""
    call.handed = (*call.handed, to)


def check_handing(call: Call) -> None:
    """Check, before a call runs or becomes a job, that its sub-agent can start.

    :raises Refusal: with the error of :meth:`~handrail.contract.doors.agents.Agents.run`
    """
    assert call.entry is not None and call.arguments is not None
    agent = call.entry.tool.hands_to(call.arguments)
    if agent is None:
        return
    try:
        ready(call, agent)
    except ToolError as error:
        raise Refusal("validate", error.kind, error.text) from None


def ready(call: Call, agent: str) -> Delegates:
    """Return the runner of the sub-agent that ``call`` delegates to.

    :raises ToolError: if the agent is unknown or faulty, no model is attached, or no further level is allowed
    """
    lane = call.lane
    check_type(agent, lane.agent_types())
    delegates = _attached(call)
    lane.appoint(agent)
    return delegates


def _attached(call: Call, without: str = NO_MODEL) -> Delegates:
    """Return the runner of the call's sub-agents.

    :raises ToolError: ``unavailable`` with the text ``without``, if no model is attached
    """
    first = call
    while first.parent is not None:
        first = first.parent
    own = None if first.job is None else first.job.delegates
    if (delegates := own or call.lane.delegates) is None:
        raise ToolError(without, kind="unavailable")
    return delegates


def check_type(agent: str, types: Sequence[AgentType]) -> None:
    """Check that work can be delegated to ``agent``.

    :raises ToolError: ``invalid_input`` with the available agents, if it cannot
    """
    ids = [one.id for one in types]
    if agent in ids:
        return
    close = nearest(agent, ids, 1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    there = f"Available agents: {', '.join(ids)}." if ids else "No agent is available. Do the work yourself."
    raise ToolError(
        f"Agent `{visible(agent[:80])}` is not available for delegation.{hint} {there}", kind="invalid_input"
    )
