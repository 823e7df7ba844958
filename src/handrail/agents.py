"""An agent in one workspace: its manifest, roots and rules, found out together so that their faults are one list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from handrail.config import FILE_NAME, Configuration, default_folder
from handrail.contract.agent import AgentManifest, CheckedAgent
from handrail.contract.errors import Fault
from handrail.contract.requires import Variables
from handrail.policy.agent_rules import rules_of_agent
from handrail.policy.defaults import default_rules
from handrail.policy.rules import Rule
from handrail.registry.agents import find_agent, find_agents
from handrail.registry.generation import Generation
from handrail.runtime.further_roots import further_roots
from handrail.runtime.roots import FurtherRoots
from handrail.store.folders import Folders


@dataclass(frozen=True, slots=True)
class Appointed:
    """An agent for one workspace, its tools not looked at yet.

    :param checked: the manifest, with the faults of its roots
    """

    checked: CheckedAgent
    further: FurtherRoots

    @property
    def manifest(self) -> AgentManifest:
        return self.checked.manifest

    def variables(self, of_workspace: Variables) -> Variables:
        """What ``{workspace}`` and the like stand for in what its tools require."""
        workspace = (*of_workspace.workspace, *self.further.writable)
        return replace(of_workspace, workspace=workspace, readable=self.further.readable)

    def shipped_rules(self) -> tuple[Rule, ...]:
        """What answers where no other rule speaks: as in the workspace, so in its further roots."""
        return default_rules((*self.further.readable, *self.further.writable))

    def rules(self, generation: Generation | None) -> tuple[list[Rule], list[Fault]]:
        """Its manifest's rules, and what is wrong with those that are none or could never match.

        :param generation: the tools that it has; None where nobody knows them
        """
        checked = self.checked
        known, beyond = (None, ()) if generation is None else (generation.entries, generation.beyond)
        rules, problems = rules_of_agent(checked.manifest, checked.source, known, beyond)
        return rules, list(checked.with_faults(problems).faults[len(checked.faults) :])


def appoint(config: Configuration, agent: str, folders: Folders) -> Appointed:
    """An agent by its id. Its faults so far are in what this gives; loading its tools raises all of them.

    :raises UsageError: when there is no such agent, naming those there are
    """
    return _for_workspace(find_agent(config.folder, agent, (str(folders.workspace),)), config, folders)


def all_agents(config: Configuration, folders: Folders) -> Iterator[Appointed]:
    """Every agent there is, the default one first."""
    for checked in find_agents(config.folder, (str(folders.workspace),)).values():
        yield _for_workspace(checked, config, folders)


def _for_workspace(checked: CheckedAgent, config: Configuration, folders: Folders) -> Appointed:
    apart: list[Path] = [folders.state]
    for place in {config.folder, default_folder()}:
        apart += [place / "agents", place / "tools", place / FILE_NAME]
    if config.file is not None:
        apart.append(config.file)
    further, problems = further_roots(checked.manifest.roots, str(folders.workspace), apart)
    return Appointed(checked.with_faults(problems), further)
