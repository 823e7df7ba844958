"""An agent in one workspace: its manifest, roots, rules and tools, checked together so that all faults are one list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from handrail.config import FILE_NAME, Configuration, default_folder
from handrail.contract.agent import AGENT_TOOL, AgentManifest, CheckedAgent
from handrail.contract.errors import Fault, UsageError
from handrail.contract.generation import Generation, Source
from handrail.contract.sandbox import Sandbox
from handrail.contract.tool.native import native_id
from handrail.contract.tool.offering import Offering
from handrail.contract.tool.requires import Variables
from handrail.contract.tool.settings import NamedSecret, SettingsLayer, given_layer
from handrail.contract.tool.tool import Tool
from handrail.origins import programs
from handrail.policy.rules.checking import rules_of_agent, specs_of
from handrail.policy.rules.rules import Rule, default_rules
from handrail.registry.agents import find_agent, find_agents
from handrail.registry.pins import StoredPins
from handrail.registry.sources.all import ToolSources
from handrail.registry.sources.code import offered_sources
from handrail.registry.sources.executables import Confinement
from handrail.registry.sources.folders import FolderSource
from handrail.runtime.files.beneath import further_roots
from handrail.runtime.files.roots import FurtherRoots
from handrail.runtime.secrets import SecretStore
from handrail.store.folders import Folders
from handrail.upstream.servers import listed_sources


@dataclass(frozen=True, slots=True)
class Appointed:
    """An agent for one workspace, without its tools.

    :param checked: the manifest, with the faults of its roots
    :param further: its additional folders
    """

    checked: CheckedAgent
    further: FurtherRoots

    @property
    def manifest(self) -> AgentManifest:
        return self.checked.manifest

    def variables(self, of_workspace: Variables) -> Variables:
        """Return the values of variables such as ``{workspace}`` in the requirements of its tools."""
        workspace = (*of_workspace.workspace, *self.further.writable)
        return replace(of_workspace, workspace=workspace, readable=self.further.readable)

    def shipped_rules(self) -> tuple[Rule, ...]:
        """Return the default rules, which cover the workspace and the agent's additional folders."""
        return default_rules((*self.further.readable, *self.further.writable))

    def rules(
        self, known: Collection[str] | None, beyond: Collection[str] = (), generation: Generation | None = None
    ) -> tuple[list[Rule], list[Fault]]:
        """Return the rules of its manifest, and the faults of invalid rules and rules that never match.

        :param known: the ids of its tools; None if they are unknown
        :param beyond: the ids of tools that it does not have
        :param generation: its tools, if they are known
        """
        checked = self.checked
        specs = None if generation is None else specs_of(generation.entries)
        rules, problems = rules_of_agent(checked.manifest, checked.source, known, beyond, specs)
        return rules, list(checked.with_faults(problems).faults[len(checked.faults) :])


def appoint(config: Configuration, agent: str, folders: Folders) -> Appointed:
    """Return an agent by its id, with its faults so far. Loading its tools raises all of them.

    :raises UsageError: if the agent does not exist; the text names the existing ones
    """
    found = _for_workspace(find_agent(config.folder, agent, (str(folders.workspace),)), config, folders)
    programs.add(found.further.writable)  # never load a program or module of the kernel from there
    return found


def all_agents(config: Configuration, folders: Folders) -> Iterator[Appointed]:
    """Yield all agents, the default one first."""
    for checked in find_agents(config.folder, (str(folders.workspace),)).values():
        yield _for_workspace(checked, config, folders)


@dataclass(frozen=True, slots=True)
class Surveyed:
    """An agent with the result of its validation in this workspace.

    :param generation: its tools; None if they have faults
    :param faults: all reasons why it cannot be used
    """

    appointed: Appointed
    generation: Generation | None
    faults: tuple[Fault, ...]

    @property
    def tools(self) -> int | None:
        """The number of its tools; None if there are faults."""
        return None if self.faults or self.generation is None else len(self.generation)


def survey(config: Configuration, folders: Folders, sandbox: Sandbox) -> Iterator[Surveyed]:
    """Yield all agents with their validated tools.

    It starts nothing, and does not know tools that are passed in code.
    """
    confinement = Confinement(sandbox, _nothing_runs, _nothing_runs)
    for appointed in all_agents(config, folders):
        sources = sources_of(config, appointed.checked, folders, confinement, as_configured(config))
        generation, _, faults = equipped(sources, 1, appointed)
        yield Surveyed(appointed, generation, tuple(faults))


def sources_of(
    config: Configuration,
    checked: CheckedAgent,
    folders: Folders,
    confinement: Confinement,
    secrets: SecretStore,
    given: tuple[Tool, ...] = (),
    offerings: tuple[Offering, ...] = (),
    upstreams: Callable[[], Iterable[Source]] | None = None,
    values: Iterable[SettingsLayer] = (),
) -> ToolSources:
    """Return the sources of an agent's tools.

    :param secrets: the secrets that the tools may receive
    :param given: tools that were passed in code
    :param offerings: resources and prompts that were passed in code
    :param upstreams: returns the MCP servers; None: the last listing of each, for reading only
    :param values: tool settings of one process, which override those of the agent and of files
    """
    looked_at = upstreams or (lambda: listed_sources(config, folders))
    (_, everybody), (_, of_agent) = config.tool_folders(checked.manifest.id)
    return ToolSources(
        everybody,
        of_agent,
        str(folders.workspace),
        confinement,
        given,
        checked,
        secrets,
        StoredPins(folders.state),
        (
            *config.tool_settings,
            given_layer(checked.source, checked.manifest.tool_config),
            *values,
        ),
        offerings,
        _agent_tools(checked.manifest, config, folders),
        lambda: [*offered_sources(), *looked_at()],
        lambda: tuple(_tools_elsewhere(checked.manifest, config, folders, confinement)),
    )


def _tools_elsewhere(
    of: AgentManifest, config: Configuration, folders: Folders, confinement: Confinement
) -> Iterator[str]:
    """Yield the ids of tools that other agents have by their own folders, and of all agents as tools.

    A rule of the project or of a session holds for every agent, so it may name any of these.
    """
    for agent in find_agents(config.folder, (str(folders.workspace),)).values():
        manifest = agent.manifest
        yield AGENT_TOOL + manifest.id
        if manifest.id != of.id:
            yield from map(native_id, manifest.native)
            folder = FolderSource(
                config.tool_folders(manifest.id)[1][1], "agent", confinement, (str(folders.workspace),)
            )
            yield from (found.tool.spec.id for found in folder.load().tools)


def _agent_tools(of: AgentManifest, config: Configuration, folders: Folders) -> tuple[AgentManifest, ...]:
    """Return the other agents, if the agent lists any as a tool."""
    if not any(pattern.startswith(AGENT_TOOL) for pattern in of.tools):
        return ()
    found = find_agents(config.folder, (str(folders.workspace),)).values()
    return tuple(one.manifest for one in found if not one.faults)


def equipped(
    sources: ToolSources, number: int, appointed: Appointed
) -> tuple[Generation | None, list[Rule], list[Fault]]:
    """Return an agent's tools, the rules of its manifest, and all faults. Faulty tools give no generation."""
    looked = sources.look(number)
    rules, faults = appointed.rules(looked.known, looked.beyond, looked.generation)
    return looked.generation, rules, [*looked.faults, *faults]


def as_configured(config: Configuration) -> SecretStore:
    """Return the configured secret names with empty values, for checks of tools that need no values."""
    return SecretStore(dict.fromkeys(config.settings.secrets, "")).with_settings(named_secrets(config))


def named_secrets(config: Configuration) -> dict[str, dict[str, str]]:
    """Return the secret name of each tool setting in the configuration, by tool id."""
    return {
        tool: {key: given.secret for key, given in own.config.items() if isinstance(given, NamedSecret)}
        for tool, own in config.settings.tools.items()
    }


def _nothing_runs(_: object) -> NoReturn:
    raise UsageError("Tools are only checked here. Open a kernel to run one.")


def _for_workspace(checked: CheckedAgent, config: Configuration, folders: Folders) -> Appointed:
    apart: list[Path] = [folders.state]
    for place in {config.folder, default_folder()}:
        apart += [place / "agents", place / "tools", place / FILE_NAME]
    if config.file is not None:
        apart.append(config.file)
    further, problems = further_roots(checked.manifest.roots, str(folders.workspace), apart)
    return Appointed(checked.with_faults(problems), further)
