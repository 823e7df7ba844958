"""An agent in one workspace: its manifest, roots, rules and tools, checked together so that all faults are one list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from handrail.config import FILE_NAME, MergedConfiguration
from handrail.contract.agent_manifest import AGENT_TOOL_PREFIX, AgentManifest, CheckedAgentManifest
from handrail.contract.errors import Diagnostic, UsageError
from handrail.contract.sandbox_protocol import Sandbox
from handrail.contract.struct import Struct
from handrail.contract.tool.operator_tool_settings import (
    NamedSecretReference,
    ToolSettingsLayer,
    build_tool_settings_layer,
)
from handrail.contract.tool.provider_tools import make_provider_tool_id
from handrail.contract.tool.requires import PathVariables
from handrail.contract.tool.resource_provider import ResourceProvider
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import Generation, ToolSource
from handrail.origins import program_lookup
from handrail.policy.rules.rules_and_modes import Rule, build_default_rules
from handrail.policy.rules.validation import extract_tool_specs, parse_agent_rules
from handrail.registry.agent_folders import load_agent_manifest, load_agent_manifests
from handrail.registry.definition_pins import StoredPins
from handrail.registry.sources.code_sources import BuiltinSource, find_entry_point_sources
from handrail.registry.sources.executable_tools import ToolConfinement
from handrail.registry.sources.tool_folder_source import ToolFolderSource
from handrail.registry.sources.tool_sources import AgentToolSources
from handrail.runtime.files.secure_open import resolve_further_roots
from handrail.runtime.files.session_roots import FurtherRoots
from handrail.runtime.secret_store import SecretStore
from handrail.store.state_folders import StateFolders, default_config_folder
from handrail.upstream.upstream_registry import list_cached_sources


class LoadedAgent(Struct, frozen=True):
    """An agent loaded for one workspace: its manifest, roots and rules, but not yet its tools.

    :param checked_agent: the manifest, with the faults of its roots
    :param further_roots: its additional folders
    """

    checked_agent: CheckedAgentManifest
    further_roots: FurtherRoots

    @property
    def manifest(self) -> AgentManifest:
        return self.checked_agent.manifest

    def get_requirement_variables(self, of_workspace: PathVariables) -> PathVariables:
        """Return the values of variables such as ``{workspace}`` in the requirements of its tools."""
        workspace = (*of_workspace.workspace, *self.further_roots.writable)
        return replace(of_workspace, workspace=workspace, readable=self.further_roots.readable)

    def make_default_rules(self) -> tuple[Rule, ...]:
        """Return the default rules, which cover the workspace and the agent's additional folders."""
        return build_default_rules((*self.further_roots.readable, *self.further_roots.writable))

    def parse_manifest_rules(
        self, known: Collection[str] | None, beyond: Collection[str] = (), generation: Generation | None = None
    ) -> tuple[list[Rule], list[Diagnostic]]:
        """Return the rules of its manifest, and the faults of invalid rules and rules that never match.

        :param known: the ids of its tools; None if they are unknown
        :param beyond: the ids of tools that it does not have
        :param generation: its tools, if they are known
        """
        checked = self.checked_agent
        specs = None if generation is None else extract_tool_specs(generation.entries)
        rules, problems = parse_agent_rules(checked.manifest, checked.source, known, beyond, specs)
        return rules, list(checked.with_added_faults(problems).faults[len(checked.faults) :])


def load_agent(
    config: MergedConfiguration, agent: str, folders: StateFolders, given: Iterable[AgentManifest] = ()
) -> LoadedAgent:
    """Return an agent by its id, with its faults so far. Loading its tools raises all of them.

    :param given: the agents that a program passes in code
    :raises UsageError: if the agent does not exist; the text names the existing ones
    """
    found = _resolve_roots(load_agent_manifest(config.folder, agent, (str(folders.workspace),), given), config, folders)
    program_lookup.register_workspaces_until_exit(
        found.further_roots.writable
    )  # never load a program or module of the kernel from there
    return found


def iterate_agents(config: MergedConfiguration, folders: StateFolders) -> Iterator[LoadedAgent]:
    """Yield all agents, the default one first."""
    for checked in load_agent_manifests(config.folder, (str(folders.workspace),)).values():
        yield _resolve_roots(checked, config, folders)


class ValidatedAgent(Struct, frozen=True):
    """An agent with the result of its validation in this workspace.

    :param generation: its tools; None if they have faults
    :param faults: all reasons why it cannot be used
    """

    loaded_agent: LoadedAgent
    generation: Generation | None
    faults: tuple[Diagnostic, ...]

    @property
    def tool_count(self) -> int | None:
        """The number of its tools; None if there are faults."""
        return None if self.faults or self.generation is None else len(self.generation)


def validate_agents(config: MergedConfiguration, folders: StateFolders, sandbox: Sandbox) -> Iterator[ValidatedAgent]:
    """Yield all agents with their validated tools.

    It starts nothing, and does not know tools that are passed in code.
    """
    confinement = ToolConfinement(sandbox, _refuse_to_run, _refuse_to_run)
    for loaded in iterate_agents(config, folders):
        sources = make_tool_sources(
            config, loaded.checked_agent, folders, confinement, make_placeholder_secrets(config)
        )
        generation, _, faults = load_tools_and_rules(sources, 1, loaded)
        yield ValidatedAgent(loaded, generation, tuple(faults))


def make_tool_sources(
    config: MergedConfiguration,
    checked: CheckedAgentManifest,
    folders: StateFolders,
    confinement: ToolConfinement,
    secrets: SecretStore,
    given: tuple[Tool, ...] = (),
    providers: tuple[ResourceProvider, ...] = (),
    upstreams: Callable[[], Iterable[ToolSource]] | None = None,
    values: Iterable[ToolSettingsLayer] = (),
    agents: Sequence[AgentManifest] = (),
    builtins: bool = True,
) -> AgentToolSources:
    """Return the sources of an agent's tools.

    :param secrets: the secrets that the tools may receive
    :param given: tools that were passed in code
    :param providers: resources and prompts that were passed in code
    :param upstreams: returns the MCP servers; None: the last listing of each, for reading only
    :param values: tool settings of one process, which override those of the agent and of files
    :param agents: agents that were passed in code
    :param builtins: whether the agent can have built-in tools
    """
    looked_at = upstreams or (lambda: list_cached_sources(config, folders))
    (_, everybody), (_, of_agent) = config.list_tool_folders(checked.manifest.id)
    return AgentToolSources(
        everybody,
        of_agent,
        str(folders.workspace),
        confinement,
        given,
        checked,
        secrets,
        StoredPins(folders.state),
        (*config.tool_setting_layers, build_tool_settings_layer(checked.source, checked.manifest.tool_config), *values),
        providers,
        _list_agents_as_tools(checked.manifest, config, folders, agents),
        lambda: [*find_entry_point_sources(), *looked_at()],
        lambda: tuple(_iterate_other_tool_ids(checked.manifest, config, folders, confinement, agents, builtins)),
        builtins,
    )


def _iterate_other_tool_ids(
    of: AgentManifest,
    config: MergedConfiguration,
    folders: StateFolders,
    confinement: ToolConfinement,
    agents: Sequence[AgentManifest],
    builtins: bool,
) -> Iterator[str]:
    """Yield the ids of tools that other agents have by their own folders, and of all agents as tools.

    A rule of the project or of a session applies to every agent, so it may name any of these. It may also name a built-in
    tool that the sessions of one process do not have.
    """
    if not builtins:
        yield from (found.tool.spec.id for found in BuiltinSource().load().tools)
    for agent in load_agent_manifests(config.folder, (str(folders.workspace),), agents).values():
        manifest = agent.manifest
        yield AGENT_TOOL_PREFIX + manifest.id
        if manifest.id != of.id:
            yield from map(make_provider_tool_id, manifest.native)
            folder = ToolFolderSource(
                config.list_tool_folders(manifest.id)[1][1], "agent", confinement, (str(folders.workspace),)
            )
            yield from (found.tool.spec.id for found in folder.load().tools)


def _list_agents_as_tools(
    of: AgentManifest, config: MergedConfiguration, folders: StateFolders, agents: Sequence[AgentManifest]
) -> tuple[AgentManifest, ...]:
    """Return the other agents, if the agent lists any as a tool."""
    if not any(pattern.startswith(AGENT_TOOL_PREFIX) for pattern in of.tools):
        return ()
    found = load_agent_manifests(config.folder, (str(folders.workspace),), agents).values()
    return tuple(one.manifest for one in found if not one.faults)


def load_tools_and_rules(
    sources: AgentToolSources, number: int, agent: LoadedAgent
) -> tuple[Generation | None, list[Rule], list[Diagnostic]]:
    """Return an agent's tools, the rules of its manifest, and all faults. Faulty tools give no generation."""
    looked = sources.try_load_generation(number)
    rules, faults = agent.parse_manifest_rules(looked.known, looked.excluded, looked.generation)
    return looked.generation, rules, [*looked.faults, *faults]


def make_placeholder_secrets(config: MergedConfiguration) -> SecretStore:
    """Return the configured secret names with empty values, for checks of tools that need no values."""
    return SecretStore(dict.fromkeys(config.settings.secrets, "")).with_secret_settings(map_settings_to_secrets(config))


def map_settings_to_secrets(config: MergedConfiguration) -> dict[str, dict[str, str]]:
    """Return the secret name of each tool setting in the configuration, by tool id."""
    return {
        tool: {key: given.secret for key, given in own.config.items() if isinstance(given, NamedSecretReference)}
        for tool, own in config.settings.tools.items()
    }


def _refuse_to_run(_: object) -> NoReturn:
    raise UsageError("Tools are only checked here. Open a kernel to run one.")


def _resolve_roots(checked: CheckedAgentManifest, config: MergedConfiguration, folders: StateFolders) -> LoadedAgent:
    apart: list[Path] = [folders.state]
    for place in {config.folder, default_config_folder()}:
        apart += [place / "agents", place / "tools", place / FILE_NAME]
    if config.file is not None:
        apart.append(config.file)
    further, problems = resolve_further_roots(checked.manifest.roots, str(folders.workspace), apart)
    return LoadedAgent(checked.with_added_faults(problems), further)
