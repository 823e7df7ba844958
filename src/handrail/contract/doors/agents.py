"""Sub-agents: the available agents, a delegated task, and the Protocol of the runner that carries it out.

A sub-agent works in a child session of the session whose call started it. Its calls may touch only those things that the
host's ceiling, its parent and its own manifest all allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from handrail.contract.call import Result
from handrail.contract.tool.spec import ToolSpec

if TYPE_CHECKING:
    pass

MAX_DEPTH = 5
"""How many levels of sub-agents there may be below a session that a person or program began."""
NO_MODEL = (
    "no model is attached to this session, so nobody can do a sub-agent's work; do it yourself, with your own tools"
)


@dataclass(frozen=True, slots=True)
class AgentType:
    """An agent that takes work of others, as the model of one that hands it over is told of it."""

    id: str
    description: str


@dataclass(frozen=True, slots=True)
class Delegation:
    """Work for a sub-agent.

    :param agent: the id of its type
    :param task: all that it is told
    :param description: a few words for people
    :param metadata: JSON-able, kept with its session
    """

    agent: str
    task: str
    description: str = ""
    metadata: Mapping[str, Any] | None = None


class Agents(Protocol):
    """Sub-agents, for one call. Each works in a child session; what the call waits for is its answer."""

    async def types(self) -> Sequence[AgentType]:
        """Those that work may be handed to here."""
        ...

    async def run(self, delegation: Delegation) -> Result:
        """What came of it: its last message, or why there is none, each with its session's id.

        :raises ToolError: ``invalid_input`` for an agent that there is not, naming those there are; ``limit`` too many
            levels down; ``unavailable`` where no model is attached to the session, or the agent cannot be used
        """
        ...

    async def compact(self) -> Result:
        """Ask the session's own agent to leave older messages of its conversation out; see :meth:`Delegates.compact`.

        :raises ToolError: ``unavailable`` where no model is attached to the session
        """
        ...


class Delegates(Protocol):
    """Whoever has a model for sub-agents. The agent that works through a session sets itself there."""

    async def compact(self) -> Result:
        """Leave older messages of the agent's conversation out of what its model is sent: before its next request where it is at
        work, now where it is not.

        :return: how many messages are left out and how many are kept, or that there is nothing to leave out
        """
        ...

    async def run(self, call_id: str, delegation: Delegation) -> Result:
        """See :meth:`Agents.run`. Cancelling it ends the sub-agent and waits until its calls are on record.

        :param call_id: of the session, and in flight
        """
        ...


class Handed(NamedTuple):
    """Which agent a call handed work to, and the session that it was done in."""

    agent: str
    session_id: str


class Tree(Protocol):
    """Which sessions are of sub-agents, and whose, as it is kept.

    :raises LogUnavailable: by each, when the database cannot be read
    """

    def is_below(self, session_id: str) -> bool:
        """Whether a session is a sub-agent's, so that nobody goes on with it."""
        ...

    def begun_by(self, session_id: str, call_id: str) -> Sequence[Handed]:
        """Whom a call of a session handed work to, in the order in which they began."""
        ...


def usable(specs: list[ToolSpec], delegates: Delegates | None) -> list[ToolSpec]:
    """Those of ``specs`` that can do anything: without a model, nobody does a sub-agent's work."""
    if delegates is not None:
        return specs
    return [spec for spec in specs if "agents" not in spec.requires.capabilities]
