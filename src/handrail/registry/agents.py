"""Agents in the configuration folder, ``agents/<id>/agent.toml``, and the tools that each of them has.

Read like a tool folder: only from where nobody but the operator can write. A faulty agent keeps no other from
being used.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from handrail.contract.agent import (
    DEFAULT_AGENT,
    MAX_AGENT_BYTES,
    AgentManifest,
    CheckedAgent,
    fault_in_agent_id,
    parse_agent,
    tool_matches,
)
from handrail.contract.errors import Fault, LoadError, UsageError
from handrail.contract.generation import Entry, Generation, foreign_origin
from handrail.contract.sandbox import Tier
from handrail.contract.schema.locked_shapes import LOCKED_SHAPES
from handrail.contract.schema.schema import path_text
from handrail.contract.text.patterns import has_wildcard
from handrail.contract.tool.names import nearest, wire_name
from handrail.registry.sources.folders import content_of, loose, problem_with_folder
from handrail.registry.withholding import Reason, reasons_to_withhold, verdict
from handrail.runtime.secrets import NO_SECRETS, SecretStore

AGENT_FILE = "agent.toml"


def find_agents(config: Path, workspaces: Iterable[str] = ()) -> dict[str, CheckedAgent]:
    """Every agent there is, by id, the default one first; faults of its form stand with each.

    :param config: the configuration folder
    :param workspaces: the roots that a model can write to; an agent's folder that meets one of them is refused
    """
    folder, apart = config / "agents", tuple(workspaces)
    found = {DEFAULT_AGENT: CheckedAgent(AgentManifest())}
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: (entry.name != DEFAULT_AGENT, entry.name))
    except FileNotFoundError:
        return found
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        return {DEFAULT_AGENT: CheckedAgent(AgentManifest(), str(folder), (Fault(str(folder), "", problem),))}
    for entry in entries:
        if not entry.name.startswith(".") and (entry.is_dir() or entry.is_symlink()):
            found[entry.name] = _read(entry, apart)
    return found


def find_agent(config: Path, agent: str, workspaces: Iterable[str] = ()) -> CheckedAgent:
    """One agent by its id.

    :raises UsageError: when there is none, naming those there are
    """
    if (problem := fault_in_agent_id(agent)) is not None:
        raise UsageError(f"there is no such agent: {problem}")
    agents = find_agents(config, workspaces)
    if agent not in agents:
        close = nearest(agent, agents, 1)
        hint = (
            f"did you mean {close[0]!r}?"
            if close
            else f"its manifest would be {config / 'agents' / agent / AGENT_FILE}."
        )
        raise UsageError(f"there is no agent {agent!r}; {hint} There are: {', '.join(agents)}")
    return agents[agent]


def faults_in_names(agent: AgentManifest, everything: Generation) -> Iterator[tuple[str, str]]:
    """``(place, problem)`` for each tool that is named and not there.

    :param everything: all tools that the agent could have, its own folder's included
    """
    sound = [pattern for pattern in agent.tools if _names_any(pattern, everything) is not None]
    known = everything.entries
    for index, pattern in enumerate(agent.tools):
        if _names_any(pattern, everything) is False:
            yield f"tools[{index}]", _no_tool(pattern, known)
    narrowed = agent.model_copy(update={"tools": sound if len(sound) == len(agent.tools) else ("*",)})
    named = [
        *((f"core[{index}]", tool_id) for index, tool_id in enumerate(agent.core)),
        *((path_text(("requires", "tools", tool_id)), tool_id) for tool_id in agent.requires.tools),
        *((path_text(("tool_config", tool_id)), tool_id) for tool_id in agent.tool_config),
        *((path_text(("aliases", alias)), tool_id) for alias, tool_id in agent.aliases.items()),
    ]
    for place, tool_id in named:
        if tool_id not in known:
            yield place, _no_tool(tool_id, known)
        elif not narrowed.has_tool(tool_id):
            yield place, f"{tool_id!r} is not among this agent's tools; add it to tools, or leave it out here"
    for alias in agent.aliases:
        other = everything.resolve(alias)
        if other is not None:
            yield path_text(("aliases", alias)), f"is the name of the tool {other.id!r} already; choose another alias"


def generation_of(
    agent: AgentManifest,
    everything: Generation,
    tier: Tier,
    secrets: SecretStore = NO_SECRETS,
    elsewhere: Collection[str] = (),
) -> Generation:
    """Return the part of ``everything`` that an agent without faults has, under its aliases too.

    A tool that it gives hosts to requires them here, and is withheld where they cannot be enforced.

    :param elsewhere: ids of tools that only other agents have
    """
    if "*" in agent.tools and not agent.aliases and not agent.requires.tools and not elsewhere:
        return everything
    entries = [
        _with_additions(agent, entry, tier, secrets)
        for tool_id, entry in everything.entries.items()
        if agent.has_tool(tool_id)
    ]
    lacking = (tool_id for tool_id in everything.entries if not agent.has_tool(tool_id))
    beyond = {*lacking, *elsewhere}.difference(entry.tool.spec.id for entry in entries)
    shipped = {alias: tool_id for alias, tool_id in everything.aliases.items() if agent.has_tool(tool_id)}
    names = {**shipped, **agent.aliases}
    more = everything.offerings, everything.unheard
    return Generation(everything.number, entries, names, everything.quarantined, beyond, *more)


def _read(folder: Path, workspaces: tuple[str, ...]) -> CheckedAgent:
    file = folder / AGENT_FILE
    nothing = AgentManifest(id=folder.name)
    if problem := problem_with_folder(Path(os.path.realpath(folder)), workspaces) or loose(folder.parent):
        return CheckedAgent(nothing, str(file), (Fault(str(folder), "", problem),))
    if not os.path.lexists(file):
        if folder.name == DEFAULT_AGENT:
            return CheckedAgent(nothing)
        return CheckedAgent(nothing, str(file), (Fault(str(file), "", "is not there; an agent's folder holds one"),))
    try:
        content = content_of(file, MAX_AGENT_BYTES)
    except LoadError as error:
        return CheckedAgent(nothing, str(file), error.faults)
    return parse_agent(content, str(file), folder.name)


def _with_additions(agent: AgentManifest, entry: Entry, tier: Tier, secrets: SecretStore) -> Entry:
    addition = agent.requires.tools.get(entry.id)
    if addition is None or not addition.net.hosts or (entry.id in LOCKED_SHAPES and entry.withheld is not None):
        return entry
    requires, behind = entry.spec.requires, entry.answered_by
    hosts = tuple(dict.fromkeys((*requires.net.hosts, *addition.net.hosts)))
    more = requires.model_copy(update={"net": addition.net.model_copy(update={"hosts": hosts})})
    spec = replace(entry.spec, requires=more)
    if behind is not None:
        behind = replace(behind, spec=replace(behind.spec, requires=more))
    reasons = reasons_to_withhold(entry.tool, tier, spec if behind is None else behind.spec, secrets=secrets)
    if entry.withheld is not None and entry.status in ("disabled", "quarantined", "offline"):
        reasons.append(Reason(entry.status, entry.withheld))
    withheld, status = verdict(spec, entry.foreign, reasons)
    declared = replace(entry.declared or entry.spec, requires=more)
    return replace(
        entry,
        spec=spec,
        definition_hash=declared.definition_hash
        if behind is None
        else LOCKED_SHAPES[entry.id].definition_of(entry.id, declared),
        answered_by=behind,
        untrusted=foreign_origin(spec, entry.source, foreign=entry.foreign is not None),
        withheld=withheld,
        status=entry.status if behind is not None and withheld is None else status,
    )


def _names_any(pattern: str, everything: Generation) -> bool | None:
    """Whether an item of ``tools`` names any tool; None for one that is no pattern."""
    try:
        return pattern == "*" or any(tool_matches(pattern, tool_id) for tool_id in everything.entries)
    except ValueError:
        return None


def _no_tool(name: str, known: Mapping[str, Entry]) -> str:
    if has_wildcard(name):
        return f"{name!r} matches no tool there is"
    same_wire = [tool_id for tool_id in known if wire_name(tool_id) == name]
    close = same_wire or nearest(name, known)
    return f"there is no tool {name!r}" + (f"; did you mean {' or '.join(close)}?" if close else "")
