"""Agents as tools of their own, as a source: those that another agent's manifest lists among its tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from handrail.contract.agent import AGENT_TOOL, AgentManifest, tool_matches
from handrail.contract.generation import AGENTS
from handrail.registry.sources.source import Found, Loaded, Rank


@dataclass(frozen=True, slots=True)
class AgentSource:
    """
    :param of: whose tools they are
    :param others: every agent whose manifest is sound; those that take work of ``of`` can be a tool
    """

    of: AgentManifest
    others: Sequence[AgentManifest] = ()
    rank: Rank = "built-in"
    foreign: bool = False

    def load(self) -> Loaded:
        from handrail.tools.agents import AgentTool

        # A pattern that is for everything means the tools there are, not another one for each agent.
        patterns = [pattern for pattern in self.of.tools if pattern.startswith(AGENT_TOOL)]
        chosen = (
            one
            for one in self.others
            if one.takes_work_of(self.of) and any(tool_matches(pattern, AGENT_TOOL + one.id) for pattern in patterns)
        )
        return Loaded(tuple(Found(AgentTool(one.id, one.description), AGENTS) for one in chosen))
