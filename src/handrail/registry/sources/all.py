"""All sources of one agent's tools, in their loading order, and the selection that the agent's manifest makes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from handrail.contract.agent import AgentManifest, CheckedAgent
from handrail.contract.errors import Fault, LoadError
from handrail.contract.generation import Generation, Source
from handrail.contract.tool.names import nearest
from handrail.contract.tool.offering import Offering
from handrail.contract.tool.settings import SettingsLayer
from handrail.contract.tool.tool import Tool
from handrail.registry.agents import BundleSource, faults_in_names, generation_of
from handrail.registry.loading import Memory, load_generation
from handrail.registry.pins import NO_PINS, Pins
from handrail.registry.sources.code import (
    AgentSource,
    BuiltinSource,
    GivenOffering,
    NativeSource,
    PluginSource,
    PythonSource,
    offered_sources,
)
from handrail.registry.sources.executables import Confinement
from handrail.registry.sources.folders import FolderSource
from handrail.runtime.secrets import NO_SECRETS, SecretStore


@dataclass(frozen=True, slots=True)
class Looked:
    """The result of loading the sources: a generation, or faults.

    :param known: the ids that the agent's rules may name; every id if the manifest is faulty, None if unknown
    :param beyond: the ids of tools that the agent does not have
    """

    generation: Generation | None
    known: frozenset[str] | None
    beyond: frozenset[str]
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class ToolSources:
    """The sources of one agent's tools.

    Each :meth:`load` reads the folders again, but checks only tools that changed.

    :param everybody: the folder of tools for all agents
    :param agent: the folder of tools for this agent
    :param given: tools passed in code
    :param offerings: resources and prompts passed in code
    :param manifest: the agent's manifest, which selects among all tools
    :param secrets: the secrets that tools may receive
    :param pins: the approved definitions of third-party tools
    :param settings: the operator's settings for single tools, the weakest layer first
    :param agents: the agents that may be tools of this one
    :param further: returns the third-party sources
    :param elsewhere: returns the ids of tools that only other agents have, which rules may name
    """

    everybody: Path
    agent: Path
    workspace: str
    confinement: Confinement
    given: tuple[Tool, ...] = ()
    manifest: CheckedAgent = CheckedAgent(AgentManifest())  # noqa: RUF009 - both are immutable
    secrets: SecretStore = NO_SECRETS
    pins: Pins = NO_PINS
    settings: tuple[SettingsLayer, ...] = ()
    offerings: tuple[Offering, ...] = ()
    agents: tuple[AgentManifest, ...] = ()
    further: Callable[[], Sequence[Source]] = offered_sources
    elsewhere: Callable[[], Collection[str]] = tuple
    memory: Memory = field(default_factory=Memory, compare=False, repr=False)

    def load(self, number: int, only: Collection[Source] | None = None) -> Generation:
        """Return generation ``number`` of the agent's tools.

        :param only: the ``further`` sources that have changed; the others keep their last result
        :raises LoadError: with every fault of every source and of the agent's manifest
        """
        looked = self.look(number, only)
        if looked.generation is None:
            raise LoadError(looked.faults)
        return looked.generation

    def look(self, number: int, only: Collection[Source] | None = None) -> Looked:
        """Load as :meth:`load` does, and return faults instead of raising them."""
        checked = self.manifest
        try:
            everything = self._everything(number, only)
        except LoadError as error:
            return Looked(None, None, frozenset(), (*checked.faults, *error.faults))
        checked = checked.with_faults(faults_in_names(checked.manifest, everything))
        faults = (*checked.faults, *self._unknown(everything))
        if faults:
            return Looked(None, frozenset(everything.entries), frozenset(), faults)
        tier = self.confinement.sandbox.tier
        generation = generation_of(checked.manifest, everything, tier, self.secrets, self.elsewhere())
        return Looked(generation, frozenset(generation.entries), generation.beyond, ())

    def _everything(self, number: int, only: Collection[Source] | None) -> Generation:
        before = tuple(source for source, _ in self.memory.found if not _is_gone(source))
        if only is not None and before:
            new = (source for source in only if not any(source is one for one in before))
            sources = [*before, *(source for source in new if not _is_gone(source))]
        else:
            sources, only = self._all(), None
        return load_generation(
            sources,
            tier=self.confinement.sandbox.tier,
            number=number,
            secrets=self.secrets,
            pins=self.pins,
            settings=self.settings,
            memory=self.memory,
            only=only,
        )

    def _unknown(self, everything: Generation) -> Iterator[Fault]:
        """Yield a fault for each tool with settings that must exist, if no agent has it."""
        for layer in self.settings:
            unknown = [tool_id for tool_id in layer.tools if layer.known and tool_id not in everything.entries]
            others = frozenset(self.elsewhere()) if unknown else frozenset[str]()
            for tool_id in unknown:
                if tool_id not in others:
                    close = nearest(tool_id, everything.entries, 1)
                    hint = f"did you mean {close[0]!r}?" if close else "handrail tools lists the ids"
                    yield layer.fault(tool_id, f"tool {tool_id!r} does not exist; {hint}")

    def _kept(self, tool_id: str) -> Tool | None:
        entry = self.memory.entries.get(tool_id)
        return None if entry is None else entry.tool

    def _all(self) -> list[Source]:
        return [
            BundleSource(self.everybody.parent),
            BuiltinSource(),
            NativeSource(self.manifest.manifest.native),
            AgentSource(self.manifest.manifest, self.agents),
            FolderSource(self.everybody, "global", self.confinement, (self.workspace,), kept=self._kept),
            FolderSource(self.agent, "agent", self.confinement, (self.workspace,), kept=self._kept),
            PythonSource(self.given),
            *map(GivenOffering, self.offerings),
            PluginSource(),
            *self.further(),
        ]


def _is_gone(source: Source) -> bool:
    """Return whether a source was temporary, such as a server that a client connected, and is closed."""
    return getattr(source, "gone", False) is True
