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
    """What a look through the sources found: a generation, or faults.

    :param known: the ids that the agent's rules may name; all there are where the manifest is faulty, None where
        nobody can tell
    :param beyond: the ids of tools that the agent does not have
    """

    generation: Generation | None
    known: frozenset[str] | None
    beyond: frozenset[str]
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class ToolSources:
    """Where tools come from. The folders are read anew with each :meth:`load`; of what is the same as the last time nothing
    is judged again.

    :param everybody: the folder of tools for all agents
    :param agent: the folder of this agent's
    :param given: tools given in code
    :param offerings: given in code
    :param manifest: which of all these the agent has
    :param secrets: what they may be given
    :param pins: which definitions of foreign tools a person has approved
    :param settings: what the operator sets for single tools, the weakest layer first
    :param agents: which of them can be tools of this one
    :param further: sources that are not the operator's own
    :param elsewhere: gives the ids of tools that other agents have, which rules may name
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
        """What the agent has of all of them, as generation ``number``.

        :param only: of the ``further`` ones, those that have changed; all others are as they were looked through last
        :raises LoadError: with every fault of every source and of the agent's manifest
        """
        looked = self.look(number, only)
        if looked.generation is None:
            raise LoadError(looked.faults)
        return looked.generation

    def look(self, number: int, only: Collection[Source] | None = None) -> Looked:
        """As :meth:`load`, with the faults in what it gives."""
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
        """Each tool that a layer must know and that neither this agent nor another one has."""
        for layer in self.settings:
            unknown = [tool_id for tool_id in layer.tools if layer.known and tool_id not in everything.entries]
            others = frozenset(self.elsewhere()) if unknown else frozenset[str]()
            for tool_id in unknown:
                if tool_id not in others:
                    close = nearest(tool_id, everything.entries, 1)
                    hint = f"did you mean {close[0]!r}?" if close else "handrail tools lists the ids"
                    yield layer.fault(tool_id, f"there is no tool {tool_id!r}; {hint}")

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
    """Whether it was there for a while only, as a server that a program had connected, and is not kept any longer."""
    return getattr(source, "gone", False) is True
