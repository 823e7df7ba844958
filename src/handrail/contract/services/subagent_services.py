"""Sub-agents: the available agents, a delegated task, and the Protocol of the runner that runs it.

A sub-agent works in a child session of the session whose call started it. Its calls may touch only those things that
the host's ceiling, its parent and its own manifest all allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from handrail.contract.calls_and_results import Result
from handrail.contract.struct import Struct
from handrail.contract.tool.spec import ToolSpec

if TYPE_CHECKING:
    pass

MAX_DEPTH = 5
"""How many levels of sub-agents there may be below a session that a person or program began."""
NO_MODEL = "This session has no model for sub-agents. Do the work yourself with your own tools."


class SubagentType(Struct, frozen=True):
    """An agent that accepts delegated tasks, as shown to the models of other agents."""

    id: str
    description: str


class SubagentTask(Struct, frozen=True):
    """A task for a sub-agent.

    :param agent: the id of the agent
    :param task: the whole text that the sub-agent receives
    :param description: a few words for people
    :param metadata: JSON-able data, stored with the child session
    """

    agent: str
    task: str
    description: str = ""
    metadata: Mapping[str, Any] | None = None


class SubagentService(Protocol):
    """The sub-agents that one call can start. Each works in a child session, and the call waits for its answer."""

    async def list_types(self) -> Sequence[SubagentType]:
        """Return the agents to which the call may delegate."""
        ...

    async def run(self, delegation: SubagentTask) -> Result:
        """Run a task and return the sub-agent's last message, or the reason why there is none.

        The result names the child session.

        :raises ToolError: ``invalid_input`` for an unknown agent, with the available ones; ``limit`` if the levels
            are exhausted; ``unavailable`` if the session has no model, or the agent cannot be used
        """
        ...

    async def compact_conversation(self) -> Result:
        """Ask the session's own agent to compact its conversation; see :meth:`SubagentRunner.compact_conversation`.

        :raises ToolError: ``unavailable`` if the session has no model
        """
        ...


class SubagentRunner(Protocol):
    """The runner of sub-agents, which has a model for them.

    The agent that works through a session registers itself there.
    """

    async def compact_conversation(self) -> Result:
        """Leave older messages out of what the agent's model receives.

        A working agent compacts before its next request, an idle agent now.

        :return: how many messages are left out and how many are kept, or that there is nothing to leave out
        """
        ...

    async def run(self, call_id: str, delegation: SubagentTask) -> Result:
        """Run a sub-agent; see :meth:`SubagentService.run`.

        A cancellation ends the sub-agent and waits until its calls are on record.

        :param call_id: a running call of the session
        """
        ...


class DelegatedSession(NamedTuple):
    """The agent to which a call delegated a task, and the child session."""

    agent: str
    session_id: str


class SubagentSessionStore(Protocol):
    """The stored relations between sessions and the sessions of their sub-agents.

    :raises LogUnavailable: by each method, if the database cannot be read
    """

    def is_subagent(self, session_id: str) -> bool:
        """Return whether a session belongs to a sub-agent, so that no client may resume it."""
        ...

    def list_delegated_by_call(self, session_id: str, call_id: str) -> Sequence[DelegatedSession]:
        """Return the tasks that a call delegated, in the order of their start."""
        ...


def drop_delegation_tools(specs: list[ToolSpec], delegates: SubagentRunner | None) -> list[ToolSpec]:
    """Return ``specs`` without the tools that need a runner of sub-agents, if there is none."""
    if delegates is not None:
        return specs
    return [spec for spec in specs if "agents" not in spec.requires.capabilities]
