"""The runtime service by which one call hands work to sub-agents, and its checks before the call runs."""

from __future__ import annotations

from collections.abc import Sequence

from handrail.arbiter.call import Call, Refusal
from handrail.arbiter.peers import not_counted
from handrail.contract.call import Result
from handrail.contract.doors.agents import NO_MODEL, AgentType, Delegates, Delegation, Handed
from handrail.contract.errors import ToolError
from handrail.contract.tool.names import nearest


def naming(result: Result, handed: Sequence[Handed]) -> Result:
    """``result`` of a call that was cut short, with the sessions of the sub-agents that it handed work to: what they did
    stands there."""
    if not handed or result.ok:
        return result
    several = len(handed) > 1
    sessions = ", ".join(f"{one.session_id} ({one.agent})" for one in handed)
    text = (
        f"{(result.error_text or '').rstrip('.')}. What its sub-agent{'s' if several else ''} did stands in session{'s' if several else ''} "
        f"{sessions}; a fork of it goes on with that"
    )
    data: object = [one._asdict() for one in handed] if several else handed[0]._asdict()
    return Result(result.type, data if result.data is None else result.data, text, result.metadata)


class CallAgents:
    """Implements :class:`~handrail.contract.doors.agents.Agents` for one call. What a sub-agent may use is its budget's to
    say, so the call's own time does not count meanwhile."""

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
            self._of, "no model is attached to this session, so it has no conversation to compact"
        ).compact()


def note_handed(call: Call, to: Handed) -> None:
    """Keep for its result that a sub-agent works for ``call``."""
    call.handed = (*call.handed, to)


def check_handing(call: Call) -> None:
    """Look, before a call may run or become a job, whether the work that it hands over can be begun at all.

    :raises Refusal: as :meth:`~handrail.contract.doors.agents.Agents.run` fails
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
    """Whoever runs the sub-agent that ``call`` hands work to.

    :raises ToolError: where it cannot be begun: there is no such agent for it, no model, no further level, or it is faulty
    """
    lane = call.lane
    check_type(agent, lane.agent_types())
    delegates = _attached(call)
    lane.appoint(agent)
    return delegates


def _attached(call: Call, without: str = NO_MODEL) -> Delegates:
    """:raises ToolError: ``unavailable`` where no model is attached, with the text ``without``"""
    first = call
    while first.parent is not None:
        first = first.parent
    own = None if first.job is None else first.job.delegates
    if (delegates := own or call.lane.delegates) is None:
        raise ToolError(without, kind="unavailable")
    return delegates


def check_type(agent: str, types: Sequence[AgentType]) -> None:
    """:raises ToolError: ``invalid_input`` where work cannot be handed to ``agent``, naming whom it can be handed to"""
    ids = [one.id for one in types]
    if agent in ids:
        return
    close = nearest(agent, ids, 1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    there = ", ".join(ids) or "none"
    raise ToolError(
        f"there is no agent {agent[:80]!r} that takes work here{hint} There are: {there}", kind="invalid_input"
    )
