"""Agents in the configuration folder, ``agents/<id>/agent.toml``, the tools of each, and the seal of a bundle.

The folder is read like a tool folder: only if no one but the operator can write there. A faulty agent does not affect
others.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from handrail.contract.agent_manifest import (
    DEFAULT_AGENT,
    MAX_AGENT_BYTES,
    AgentManifest,
    CheckedAgentManifest,
    check_agent_manifest_table,
    find_agent_id_fault,
    matches_tool_pattern,
    parse_agent_manifest,
)
from handrail.contract.errors import Diagnostic, LoadError, UsageError
from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.schema.argument_validation import format_json_path
from handrail.contract.schema.locked_tool_shapes import LOCKED_SHAPES
from handrail.contract.struct import Struct
from handrail.contract.text.glob_patterns import has_wildcard
from handrail.contract.text.strict_json import InvalidJsonTextError, parse_json_object
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names, wire_name
from handrail.contract.tool_generation import (
    Generation,
    SourceContents,
    SourceRank,
    ToolEntry,
    describe_untrusted_origin,
)
from handrail.registry.generation_loader import UnavailableReason, find_unavailable_reasons, resolve_status
from handrail.registry.sources.tool_folder_source import (
    explain_unsafe_permissions,
    find_folder_tampering_risk,
    read_file_within_limit,
)
from handrail.runtime.secret_store import NO_SECRETS, SecretStore

AGENT_FILE = "agent.toml"


def load_agent_manifests(
    config: Path, workspaces: Iterable[str] = (), given: Iterable[AgentManifest] = ()
) -> dict[str, CheckedAgentManifest]:
    """Return every agent by id, the default one first, each with the faults of its manifest.

    :param config: the configuration folder
    :param workspaces: the folders that a model can write to; an agent's folder that overlaps one of them is refused
    :param given: checked manifests that a program passes in code, which replace agents of the same id
    """
    found = _find_agents_in_folder(config, workspaces)
    return found | {one.id: CheckedAgentManifest(one, f"agent {one.id!r} of open_kernel") for one in given}


def parse_agent_tables(tables: Iterable[Mapping[str, Any]]) -> tuple[AgentManifest, ...]:
    """Return the manifests of agents that a program passes in code, with the keys of an ``agent.toml``.

    :raises UsageError: if one is not a mapping with an id, or two have the same id
    :raises LoadError: with the faults of all of them
    """
    found: dict[str, CheckedAgentManifest] = {}
    for table in tables:
        agent = _check_given_agent(table)
        if agent.manifest.id in found:
            raise UsageError(f"Two agents have the id {agent.manifest.id!r}. Use each id once.")
        found[agent.manifest.id] = agent
    if faults := [fault for agent in found.values() for fault in agent.faults]:
        raise LoadError(faults)
    return tuple(agent.manifest for agent in found.values())


def _check_given_agent(table: object) -> CheckedAgentManifest:
    expected = 'Expected a mapping with the keys of agent.toml, such as {"id": "helper", "tools": ["read"]}.'
    if not isinstance(table, Mapping):
        raise UsageError(f"Invalid agent: {table!r:.80}. {expected}")
    try:
        data: dict[str, Any] = json.loads(
            json.dumps(dict(cast("Mapping[str, Any]", table)), ensure_ascii=False).encode()
        )
    except (TypeError, ValueError, RecursionError) as error:  # a value that is not JSON, or half a surrogate pair
        raise UsageError(
            f"Invalid agent: {table!r:.80}. It contains a value that is not JSON: {error}. {expected}"
        ) from None
    name = data.get("id")
    if not isinstance(name, str) or find_agent_id_fault(name) is not None:
        raise UsageError(f"Invalid `id` of an agent: {name!r:.80}. Expected letters, digits, '_' and '-'. {expected}")
    return check_agent_manifest_table(data, f"agent {name!r} of open_kernel", name)


def _find_agents_in_folder(config: Path, workspaces: Iterable[str]) -> dict[str, CheckedAgentManifest]:
    folder, apart = config / "agents", tuple(workspaces)
    found = {DEFAULT_AGENT: CheckedAgentManifest(AgentManifest())}
    try:
        entries = sorted(folder.iterdir(), key=lambda entry: (entry.name != DEFAULT_AGENT, entry.name))
    except FileNotFoundError:
        return found
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        return {
            DEFAULT_AGENT: CheckedAgentManifest(AgentManifest(), str(folder), (Diagnostic(str(folder), "", problem),))
        }
    for entry in entries:
        if not entry.name.startswith(".") and (entry.is_dir() or entry.is_symlink()):
            found[entry.name] = _read_agent(entry, apart)
    return found


def load_agent_manifest(
    config: Path, agent: str, workspaces: Iterable[str] = (), given: Iterable[AgentManifest] = ()
) -> CheckedAgentManifest:
    """Return one agent by its id; see :func:`load_agent_manifests`.

    :raises UsageError: if no such agent exists, with the ids of all agents
    """
    if (problem := find_agent_id_fault(agent)) is not None:
        raise UsageError(f"Invalid agent id: {problem}. `handrail agents` lists the agents.")
    agents = load_agent_manifests(config, workspaces, given)
    if agent not in agents:
        close = nearest_names(agent, agents, 1)
        hint = (
            f"Did you mean {close[0]!r}?"
            if close
            else f"Its manifest would be {config / 'agents' / agent / AGENT_FILE}."
        )
        raise UsageError(f"Agent {agent!r} does not exist. {hint} Agents: {', '.join(agents)}.")
    return agents[agent]


def find_unknown_tool_names(agent: AgentManifest, all_tools: Generation) -> Iterator[tuple[str, str]]:
    """Yield ``(place, problem)`` for each name of a tool that does not exist.

    :param all_tools: all tools that the agent could have, including those of its own folder
    """
    sound = [pattern for pattern in agent.tools if _matches_any_tool(pattern, all_tools) is not None]
    known = all_tools.entries
    for index, pattern in enumerate(agent.tools):
        if _matches_any_tool(pattern, all_tools) is False:
            yield f"tools[{index}]", _describe_unknown_tool(pattern, known)
    narrowed = agent.model_copy(update={"tools": sound if len(sound) == len(agent.tools) else ("*",)})
    for place, tool_id in _list_named_ids(agent):
        if tool_id not in known:
            yield place, _describe_unknown_tool(tool_id, known)
        elif not narrowed.has_tool(tool_id):
            yield place, f"{tool_id!r} is not in this agent's tools; add it to tools, or remove it here"
    for alias in agent.aliases:
        if (other := all_tools.resolve_tool_name(alias)) is not None:
            yield (
                format_json_path(("aliases", alias)),
                f"is already the name of the tool {other.id!r}; choose another alias",
            )


def _list_named_ids(agent: AgentManifest) -> Iterator[tuple[str, str]]:
    """Yield ``(place, id)`` for each tool that the manifest names by its full id."""
    yield from ((f"core[{index}]", tool_id) for index, tool_id in enumerate(agent.core))
    yield from ((format_json_path(("requires", "tools", tool_id)), tool_id) for tool_id in agent.requires.tools)
    yield from ((format_json_path(("tool_config", tool_id)), tool_id) for tool_id in agent.tool_config)
    yield from ((format_json_path(("aliases", alias)), tool_id) for alias, tool_id in agent.aliases.items())


def select_tools_of_agent(
    agent: AgentManifest,
    all_tools: Generation,
    tier: SandboxTier,
    secrets: SecretStore = NO_SECRETS,
    other_agents_tools: Collection[str] = (),
) -> Generation:
    """Return the part of ``all_tools`` that a valid agent has, with its aliases.

    A tool to which the agent gives hosts requires them, and is unavailable if they cannot be enforced.

    :param other_agents_tools: ids of tools that only other agents have
    """
    if "*" in agent.tools and not agent.aliases and not agent.requires.tools and not other_agents_tools:
        return all_tools
    entries = [
        _add_required_hosts(agent, entry, tier, secrets)
        for tool_id, entry in all_tools.entries.items()
        if agent.has_tool(tool_id)
    ]
    lacking = (tool_id for tool_id in all_tools.entries if not agent.has_tool(tool_id))
    beyond = {*lacking, *other_agents_tools}.difference(entry.tool.spec.id for entry in entries)
    shipped = {alias: tool_id for alias, tool_id in all_tools.aliases.items() if agent.has_tool(tool_id)}
    names = {**shipped, **agent.aliases}
    more = all_tools.resource_providers, all_tools.unlisted_sources
    return Generation(all_tools.number, entries, names, all_tools.quarantined, beyond, *more)


def _read_agent(folder: Path, workspaces: tuple[str, ...]) -> CheckedAgentManifest:
    file = folder / AGENT_FILE
    nothing = AgentManifest(id=folder.name)
    if problem := find_folder_tampering_risk(Path(os.path.realpath(folder)), workspaces) or explain_unsafe_permissions(
        folder.parent
    ):
        return CheckedAgentManifest(nothing, str(file), (Diagnostic(str(folder), "", problem),))
    if not os.path.lexists(file):
        if folder.name == DEFAULT_AGENT:
            return CheckedAgentManifest(nothing)
        return CheckedAgentManifest(
            nothing, str(file), (Diagnostic(str(file), "", "is missing; an agent folder must have one"),)
        )
    try:
        content = read_file_within_limit(file, MAX_AGENT_BYTES)
    except LoadError as error:
        return CheckedAgentManifest(nothing, str(file), error.diagnostics)
    return parse_agent_manifest(content, str(file), folder.name)


def _add_required_hosts(agent: AgentManifest, entry: ToolEntry, tier: SandboxTier, secrets: SecretStore) -> ToolEntry:
    addition = agent.requires.tools.get(entry.id)
    if (
        addition is None
        or not addition.net.hosts
        or (entry.id in LOCKED_SHAPES and entry.unavailable_reason is not None)
    ):
        return entry
    requires, behind = entry.spec.requires, entry.answered_by
    hosts = tuple(dict.fromkeys((*requires.net.hosts, *addition.net.hosts)))
    more = requires.model_copy(update={"net": requires.net.model_copy(update={"hosts": hosts})})
    spec = replace(entry.spec, requires=more)
    if behind is not None:
        behind = replace(behind, spec=replace(behind.spec, requires=more))
    reasons = find_unavailable_reasons(entry.tool, tier, spec if behind is None else behind.spec, secrets=secrets)
    if entry.unavailable_reason is not None and entry.status in ("disabled", "quarantined", "offline"):
        reasons.append(UnavailableReason(entry.status, entry.unavailable_reason))
    unavailable_reason, status = resolve_status(spec, entry.third_party, reasons)
    declared = replace(entry.declared or entry.spec, requires=more)
    return replace(
        entry,
        spec=spec,
        definition_hash=declared.definition_hash
        if behind is None
        else LOCKED_SHAPES[entry.id].definition_hash(entry.id, declared),
        answered_by=behind,
        untrusted_source=describe_untrusted_origin(spec, entry.source, third_party=entry.third_party is not None),
        unavailable_reason=unavailable_reason,
        status=entry.status if behind is not None and unavailable_reason is None else status,
    )


def _matches_any_tool(pattern: str, all_tools: Generation) -> bool | None:
    """Return whether an item of ``tools`` matches any tool, or None for an invalid pattern."""
    try:
        return pattern == "*" or any(matches_tool_pattern(pattern, tool_id) for tool_id in all_tools.entries)
    except ValueError:
        return None


def _describe_unknown_tool(name: str, known: Mapping[str, ToolEntry]) -> str:
    if has_wildcard(name):
        return f"{name!r} matches no tool"
    same_wire = [tool_id for tool_id in known if wire_name(tool_id) == name]
    close = same_wire or nearest_names(name, known)
    return f"tool {name!r} does not exist" + (f"; did you mean {' or '.join(close)}?" if close else "")


# Bundles: a frozen configuration folder with an agent and its tools, every file by its hash.
#
# ``bundle.json`` in a configuration folder lists its files with their hashes. With it, nothing loads that differs: a file
# that was changed, added, removed or made executable is a fault and stops start-up.

BUNDLE_FILE = "bundle.json"
BUNDLE_FORMAT = 1
MAX_BUNDLE_BYTES = 16 * 1024 * 1024
_BUNDLED_NAMES = ("handrail.toml", "tools", "agents", "skills")
"""The entries of a configuration folder that Handrail reads."""


class SealedFile(Struct, frozen=True):
    """A file of a bundle: the SHA-256 of its content, in hexadecimal, and whether it is executable."""

    sha256: str
    executable: bool


class BundleSealSource(Struct, frozen=True):
    """A source without tools that checks the seal of a configuration folder before any other source loads."""

    folder: Path
    rank: SourceRank = "built-in"
    is_third_party: bool = False

    def load(self) -> SourceContents:
        path = self.folder / BUNDLE_FILE
        if not os.path.lexists(path):
            return SourceContents()
        try:
            return SourceContents(
                faults=tuple(Diagnostic(str(path), where, problem) for where, problem in _faults(path))
            )
        except LoadError as error:
            return SourceContents(faults=tuple(error.diagnostics))


def hash_file_for_seal(path: Path) -> SealedFile:
    """Return the hash and the executable bit of a file.

    :raises OSError: if it cannot be read, or is not a regular file
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(0, "is not a regular file")
        return SealedFile(hashlib.file_digest(file, "sha256").hexdigest(), bool(found.st_mode & 0o111))


def format_bundle_json(agent: str, version: str, files: dict[str, SealedFile], tools: dict[str, dict[str, str]]) -> str:
    """Return the text of ``bundle.json``, which depends only on the files.

    :param files: the files, by path in the bundle
    :param tools: by agent id, the definition hash of every tool it has, by tool id
    """
    listed = {name: {"sha256": one.sha256, "executable": one.executable} for name, one in sorted(files.items())}
    whole = {
        "format": BUNDLE_FORMAT,
        "agent": agent,
        "handrail": version,
        "files": listed,
        "tools": {name: dict(sorted(of.items())) for name, of in sorted(tools.items())},
    }
    return json.dumps(whole, indent=1) + "\n"


def list_sealable_files(folder: Path) -> Iterator[str]:
    """Yield the path of each file that Handrail may read in a configuration folder, including links."""
    for top in _BUNDLED_NAMES:
        start = folder / top
        if start.is_dir() and not start.is_symlink():
            for parent, folders, names in os.walk(start):
                linked = [name for name in folders if (Path(parent) / name).is_symlink()]
                for name in (*names, *linked):
                    yield str((Path(parent) / name).relative_to(folder))
        elif os.path.lexists(start):
            yield top


def _faults(path: Path) -> Iterator[tuple[str, str]]:
    content = read_file_within_limit(path, MAX_BUNDLE_BYTES)
    try:
        whole = parse_json_object(content, what="the bundle's contents", max_bytes=MAX_BUNDLE_BYTES)
    except InvalidJsonTextError as error:
        yield "", f"{error}; rebuild the bundle with handrail build"
        return
    if whole.get("format") != BUNDLE_FORMAT:
        yield (
            "format",
            f"is {whole.get('format')!r}, and this Handrail reads {BUNDLE_FORMAT}; rebuild the bundle with handrail build",
        )
        return
    given: Any = whole.get("files")
    listed = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    folder = path.parent
    for name in sorted(listed.keys() | set(list_sealable_files(folder))):
        if name not in listed:
            yield f"files.{name}", "is not part of the bundle; remove it, or rebuild the bundle"
            continue
        try:
            found = hash_file_for_seal(folder / name)
        except FileNotFoundError:
            yield f"files.{name}", "is missing; rebuild the bundle"
            continue
        except OSError as error:
            yield f"files.{name}", f"cannot be read: {error.strerror or error}"
            continue
        if found.sha256 != listed[name].get("sha256"):
            yield f"files.{name}", "was changed after the bundle was built; restore it, or rebuild the bundle"
        elif found.executable != listed[name].get("executable"):
            how = "was made executable" if found.executable else "is no longer executable"
            yield f"files.{name}", f"{how} after the bundle was built; restore its mode, or rebuild the bundle"
