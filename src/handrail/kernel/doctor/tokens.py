"""About how many tokens the tools take in a model's context."""

from __future__ import annotations

from collections.abc import Iterator

from handrail.catalog.costs import Costs, costs_of
from handrail.catalog.view import view_of
from handrail.config import Configuration
from handrail.contract.agent import AgentManifest
from handrail.contract.generation import Generation
from handrail.kernel.doctor.check import Check


def costs_for(generation: Generation, found: Configuration, agent: AgentManifest) -> Costs:
    """What an agent's tools cost at the start of a turn, and in all."""
    given = found.settings.catalog
    return costs_of(view_of(generation, given.options(agent.core)), given.index_tokens)


def of_tokens(generation: Generation, found: Configuration, agent: AgentManifest) -> Iterator[Check]:
    """The same as one line."""
    costs = costs_for(generation, found, agent)
    about = f"about {costs.in_view:,} tokens in view at the start of a turn, {costs.whole:,} with every tool in view"
    yield Check("tokens of tools", "ok", about)
