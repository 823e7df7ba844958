"""The door by which one call hands work to sub-agents."""

from __future__ import annotations

from collections.abc import Sequence

from handrail.arbiter.call import Call
from handrail.arbiter.peers import not_counted
from handrail.contract.delegation import NO_MODEL, AgentType, Delegation
from handrail.contract.errors import ToolError
from handrail.contract.names import nearest
from handrail.contract.result import Result


class CallAgents:
    """Implements :class:`~handrail.contract.delegation.Agents` for one call. What a sub-agent may use is its budget's to
    say, so the call's own time does not count meanwhile."""

    __slots__ = ("_of",)

    def __init__(self, of: Call) -> None:
        self._of = of

    async def types(self) -> Sequence[AgentType]:
        return self._of.lane.agent_types()

    async def run(self, delegation: Delegation) -> Result:
        lane = self._of.lane
        check_type(delegation.agent, lane.agent_types())
        if lane.delegates is None:
            raise ToolError(NO_MODEL, kind="unavailable")
        lane.delegating[self._of.id] = self._of
        self._of.hands_over += 1
        try:
            with not_counted(self._of):
                return await lane.delegates.run(self._of.id, delegation)
        finally:
            self._of.hands_over -= 1
            if not self._of.hands_over:
                del lane.delegating[self._of.id]


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
