"""All sources of one agent's tools, in their loading order, and the selection that the agent's manifest makes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from handrail.contract.agent_manifest import AgentManifest, CheckedAgentManifest
from handrail.contract.errors import Diagnostic, LoadError
from handrail.contract.struct import Struct
from handrail.contract.tool.operator_tool_settings import ToolSettingsLayer
from handrail.contract.tool.resource_provider import ResourceProvider
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import Generation, ToolSource
from handrail.registry.agent_folders import BundleSealSource, find_unknown_tool_names, select_tools_of_agent
from handrail.registry.definition_pins import NO_PINS, DefinitionPins
from handrail.registry.generation_loader import LoadCache, load_generation
from handrail.registry.sources.code_sources import (
    BuiltinSource,
    PassedResourcesSource,
    PassedToolsSource,
    ProviderToolSource,
    SubagentToolSource,
    ToolEntryPointsSource,
    find_entry_point_sources,
)
from handrail.registry.sources.executable_tools import ToolConfinement
from handrail.registry.sources.tool_folder_source import ToolFolderSource
from handrail.runtime.secret_store import NO_SECRETS, SecretStore


class SourceLoadResult(Struct, frozen=True):
    """The result of loading the sources: a generation, or faults.

    :param known: the ids that the agent's rules may name; every id if the manifest is faulty, None if unknown
    :param excluded: the ids of tools that the agent does not have
    """

    generation: Generation | None
    known: frozenset[str] | None
    excluded: frozenset[str]
    faults: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class AgentToolSources:
    """The sources of one agent's tools.

    Each :meth:`load_generation_of_agent` reads the folders again, but checks only tools that changed.

    :param global_folder: the folder of tools for all agents
    :param agent_folder: the folder of tools for this agent
    :param tools: tools passed in code
    :param offerings: resources and prompts passed in code
    :param manifest: the agent's manifest, which selects among all tools
    :param secrets: the secrets that tools may receive
    :param pins: the approved definitions of third-party tools
    :param settings: the operator's settings for single tools, the weakest layer first
    :param agents: the agents that may be tools of this one
    :param extra_sources: returns the third-party sources
    :param other_agents_tools: returns the ids of tools that only other agents have, which rules may name
    :param builtins: whether the built-in tools are among them
    """

    global_folder: Path
    agent_folder: Path
    workspace: str
    confinement: ToolConfinement
    tools: tuple[Tool, ...] = ()
    manifest: CheckedAgentManifest = CheckedAgentManifest(AgentManifest())  # noqa: RUF009 - both are immutable
    secrets: SecretStore = NO_SECRETS
    pins: DefinitionPins = NO_PINS
    settings: tuple[ToolSettingsLayer, ...] = ()
    offerings: tuple[ResourceProvider, ...] = ()
    agents: tuple[AgentManifest, ...] = ()
    extra_sources: Callable[[], Sequence[ToolSource]] = find_entry_point_sources
    other_agents_tools: Callable[[], Collection[str]] = tuple
    builtins: bool = True
    cache: LoadCache = field(default_factory=LoadCache, compare=False, repr=False)

    def load_generation_of_agent(self, number: int, only: Collection[ToolSource] | None = None) -> Generation:
        """Return generation ``number`` of the agent's tools.

        :param only: the sources that have changed; the others keep their last result
        :raises LoadError: with every fault of every source and of the agent's manifest
        """
        looked = self.try_load_generation(number, only)
        if looked.generation is None:
            raise LoadError(looked.faults)
        return looked.generation

    def try_load_generation(self, number: int, only: Collection[ToolSource] | None = None) -> SourceLoadResult:
        """Load as :meth:`load_generation_of_agent` does, and return faults instead of raising them."""
        checked = self.manifest
        try:
            everything = self._load_all_tools(number, only)
        except LoadError as error:
            return SourceLoadResult(None, None, frozenset(), (*checked.faults, *error.diagnostics))
        checked = checked.with_added_faults(find_unknown_tool_names(checked.manifest, everything))
        faults = (*checked.faults, *self._find_settings_of_no_tool(everything))
        if faults:
            return SourceLoadResult(None, frozenset(everything.entries), frozenset(), faults)
        tier = self.confinement.sandbox.tier
        generation = select_tools_of_agent(checked.manifest, everything, tier, self.secrets, self.other_agents_tools())
        return SourceLoadResult(generation, frozenset(generation.entries), generation.other_tool_ids, ())

    def _load_all_tools(self, number: int, only: Collection[ToolSource] | None) -> Generation:
        before = tuple(source for source, _ in self.cache.found if not _is_closed(source))
        if only is not None and before:
            new = (source for source in only if not any(source is one for one in before))
            sources = [*before, *(source for source in new if not _is_closed(source))]
        else:
            sources, only = self._all(), None
        return load_generation(
            sources,
            tier=self.confinement.sandbox.tier,
            number=number,
            secrets=self.secrets,
            pins=self.pins,
            settings=self.settings,
            cache=self.cache,
            only=only,
        )

    def _find_settings_of_no_tool(self, everything: Generation) -> Iterator[Diagnostic]:
        """Yield a fault for each tool with settings that must exist, if no agent has it."""
        for layer in self.settings:
            unknown = [tool_id for tool_id in layer.tools if layer.known and tool_id not in everything.entries]
            others = frozenset(self.other_agents_tools()) if unknown else frozenset[str]()
            for tool_id in unknown:
                if tool_id not in others:
                    close = nearest_names(tool_id, everything.entries, 1)
                    hint = f"did you mean {close[0]!r}?" if close else "handrail tools lists the ids"
                    yield layer.build_setting_fault(tool_id, f"tool {tool_id!r} does not exist; {hint}")

    def _find_previous_tool(self, tool_id: str) -> Tool | None:
        entry = self.cache.entries.get(tool_id)
        return None if entry is None else entry.tool

    def _all(self) -> list[ToolSource]:
        return [
            BundleSealSource(self.global_folder.parent),
            *((BuiltinSource(self.manifest.manifest.profile),) if self.builtins else ()),
            ProviderToolSource(self.manifest.manifest.native),
            SubagentToolSource(self.manifest.manifest, self.agents),
            ToolFolderSource(
                self.global_folder,
                "global",
                self.confinement,
                (self.workspace,),
                find_previous_tool=self._find_previous_tool,
            ),
            ToolFolderSource(
                self.agent_folder,
                "agent",
                self.confinement,
                (self.workspace,),
                find_previous_tool=self._find_previous_tool,
            ),
            PassedToolsSource(self.tools),
            *map(PassedResourcesSource, self.offerings),
            ToolEntryPointsSource(),
            *self.extra_sources(),
        ]


def _is_closed(source: ToolSource) -> bool:
    """Return whether a source was temporary, such as a server that a client connected, and is closed."""
    return getattr(source, "gone", False) is True
