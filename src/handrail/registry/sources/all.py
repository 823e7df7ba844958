"""All sources of one kernel, in their loading order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from handrail.contract.tool import Tool
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
    """

    everybody: Path
    agent: Path
    workspace: str
    confinement: Confinement
    given: tuple[Tool, ...] = ()

    def load(self, number: int) -> Generation:
        """What all of them have, as generation ``number``.

        :raises LoadError: with every fault of every source
        """
        sources: list[Source] = [
            BuiltinSource(),
            FolderSource(self.everybody, "global", self.confinement, (self.workspace,)),
            FolderSource(self.agent, "agent", self.confinement, (self.workspace,)),
            PythonSource(self.given),
            PluginSource(),
        ]
        return load_generation(sources, tier=self.confinement.sandbox.tier, number=number)
