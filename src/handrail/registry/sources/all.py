"""All sources of one agent's tools, in their loading order, and what the agent takes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from handrail.contract.agent import AgentManifest, CheckedAgent
from handrail.contract.errors import LoadError
from handrail.contract.tool import Tool
from handrail.registry.agents import faults_in_names, generation_of
from handrail.registry.generation import Generation
from handrail.registry.loading import load_generation
from handrail.registry.sources.builtin import BuiltinSource
from handrail.registry.sources.executables import Confinement
from handrail.registry.sources.folders import FolderSource
from handrail.registry.sources.plugins import PluginSource
from handrail.registry.sources.python import PythonSource
from handrail.registry.sources.source import Source


@dataclass(frozen=True, slots=True)
class ToolSources:
    """Where tools come from. The folders are read anew with each :meth:`load`.

    :param everybody: the folder of tools for all agents
    :param agent: the folder of this agent's
    :param given: tools given in code
    :param manifest: which of all these the agent has
    """

    everybody: Path
    agent: Path
    workspace: str
    confinement: Confinement
    given: tuple[Tool, ...] = ()
    manifest: CheckedAgent = CheckedAgent(AgentManifest())  # noqa: RUF009 - both are immutable

    def load(self, number: int) -> Generation:
        """What the agent has of all of them, as generation ``number``.

        :raises LoadError: with every fault of every source and of the agent's manifest
        """
        checked = self.manifest
        try:
            everything = self._everything(number)
        except LoadError as error:
            raise LoadError([*checked.faults, *error.faults]) from None
        checked = checked.with_faults(faults_in_names(checked.manifest, everything))
        if checked.faults:
            raise LoadError(checked.faults)
        return generation_of(checked.manifest, everything, self.confinement.sandbox.tier)

    def _everything(self, number: int) -> Generation:
        sources: list[Source] = [
            BuiltinSource(),
            FolderSource(self.everybody, "global", self.confinement, (self.workspace,)),
            FolderSource(self.agent, "agent", self.confinement, (self.workspace,)),
            PythonSource(self.given),
            PluginSource(),
        ]
        return load_generation(sources, tier=self.confinement.sandbox.tier, number=number)
