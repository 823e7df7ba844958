"""The complete check of a workspace: machine, folders, lease holder, configuration, servers, tools, agents' capabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from handrail import config as configuration
from handrail.config import MergedConfiguration
from handrail.contract.agent_manifest import AgentManifest, CheckedAgentManifest
from handrail.contract.errors import Diagnostic, LoadError, StartError, ToolError, UsageError
from handrail.contract.sandbox_protocol import Sandbox
from handrail.contract.struct import Struct
from handrail.contract.tool.provider_tools import PROVIDER_ONLY_TEXT
from handrail.contract.tool.requires import (
    AnyArgumentPattern,
    ArgumentPattern,
    CapabilityLayer,
    ShellRequires,
    expand_requires,
    unite_capability_layers,
)
from handrail.contract.tool_generation import IN_PROCESS, Generation, ToolEntry
from handrail.kernel.agent_loading import load_agent, load_tools_and_rules, make_placeholder_secrets, make_tool_sources
from handrail.kernel.doctor.machine_checks import (
    DoctorCheck,
    check_disabled_protections,
    check_machine,
    check_token_costs,
    run_check_isolated,
)
from handrail.kernel.doctor.storage_checks import check_file_name_aliasing, check_lease_holder, check_storage
from handrail.kernel.kernel_assembly import collect_process_rules, parse_rule_texts
from handrail.kernel.sandbox_selection import choose_unlimited_sandbox, make_limited_sandbox
from handrail.origins.import_guard import can_import_module
from handrail.origins.installed_package import build_extra_install_command
from handrail.policy.call_targets import build_ceiling_capability_layer
from handrail.policy.rules.rules_and_modes import MODE_DESCRIPTIONS
from handrail.policy.rules.validation import iterate_missing_tool_warnings
from handrail.registry.sources.executable_tools import ToolConfinement
from handrail.sandbox import tier_probe
from handrail.store.state_folders import StateFolders, locate_folders
from handrail.upstream.server_config_loader import list_general_config_faults, load_enabled_servers

if TYPE_CHECKING:
    from handrail.kernel.kernel_interface import Kernel
    from handrail.kernel.upstream_mcp_servers import McpServerStatus


# Upstream MCP servers: their commands or addresses, and the reasons why they cannot be used.


def check_mcp_servers(servers: Iterable[McpServerStatus]) -> Iterator[DoctorCheck]:
    for server in servers:
        known = "not connected yet" if server.tools is None else f"{server.tools} tools"
        spoken = f", {server.protocol}" if server.protocol else ""
        about = (
            f"{server.transport} {server.where}: {server.state}{spoken}, {known}" if server.where else "cannot be used"
        )
        name = f"mcp server {server.name}"
        if server.reason:
            remedy = f"see [mcp.servers.{server.name}]"
            for sign in ("handrail mcp install", "handrail mcp login"):
                if sign in server.reason:
                    remedy = f"{sign} {server.name}"
            yield DoctorCheck(name, "problem", f"{about}; {server.reason}", remedy)
        else:
            yield DoctorCheck(name, "ok", about)


def _check_unlisted_servers(config: MergedConfiguration) -> Iterator[DoctorCheck]:
    """Check the files of other programs, and the names of servers."""
    for fault in list_general_config_faults(config):
        yield DoctorCheck("mcp servers", "problem", str(fault), "correct it, or remove it from [mcp] of handrail.toml")


def check_configured_mcp_servers(config: MergedConfiguration, folders: StateFolders) -> Iterator[DoctorCheck]:
    """Check the servers of a configuration, without connecting to them."""
    yield from _check_unlisted_servers(config)
    if not (found := load_enabled_servers(config, make_placeholder_secrets(config))):
        return
    if not can_import_module("httpx2"):
        names = ", ".join(one.name for one in found)
        yield DoctorCheck(
            "mcp servers",
            "problem",
            f"{names}: configured, but the extra mcp is not installed",
            build_extra_install_command("mcp"),
        )
        return
    from handrail.kernel.upstream_mcp_servers import get_server_status
    from handrail.upstream.mcp_source import McpSource

    yield from check_mcp_servers(
        get_server_status(McpSource(one, folders.state, str(folders.workspace))) for one in found
    )


def check_language_servers(config: MergedConfiguration, workspace: str) -> Iterator[DoctorCheck]:
    """Check which languages have a server for ``lsp``, in one line. A server that the operator named has to be there."""
    from handrail.runtime.language_servers.server_programs import (
        ConfiguredServer,
        find_server_program,
        merge_configured_languages,
    )

    configured = {name: ConfiguredServer(**one.model_dump()) for name, one in config.settings.language_servers.items()}
    found: list[str] = []
    missing: list[str] = []
    for definition in merge_configured_languages(configured):
        try:
            found.append(f"{definition.language} ({find_server_program(definition, workspace).argv[0]})")
        except ToolError as error:
            missing.append(definition.language)
            if configured.get(definition.language, ConfiguredServer()).command:
                remedy = f"see [language_servers.{definition.language}]"
                yield DoctorCheck(f"language server {definition.language}", "problem", error.text, remedy)
    about = f"{', '.join(found) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    yield DoctorCheck("language servers", "ok", about)


def run_doctor_checks(
    workspace: str | Path,
    state: str | Path | None = None,
    config: str | Path | None = None,
    *,
    flags: Iterable[str] = (),
    allow_home: bool = False,
) -> list[DoctorCheck]:
    """Run all checks that do not need an open kernel.

    :param config: the configuration file instead of the platform's
    :param flags: settings as ``KEY=VALUE``, which override every file
    """
    checks = check_machine(str(workspace), lambda: _choose_sandbox(workspace, state, config, tuple(flags)))
    try:
        folders: StateFolders | None = locate_folders(workspace, state, allow_home=allow_home)
    except StartError as error:
        folders = None
        checks.append(DoctorCheck("workspace", "problem", str(error)))
    if folders is not None:
        checks += [*check_storage(folders), *check_lease_holder(folders)]
    checks += run_check_isolated("configuration", lambda: _check_configuration(folders, config, tuple(flags)))
    return checks


def _choose_sandbox(
    workspace: str | Path, state: str | Path | None, file: str | Path | None, flags: tuple[str, ...]
) -> Sandbox:
    """Return the configured sandbox; if the configuration cannot be read, the one of this machine."""
    try:
        return choose_unlimited_sandbox(
            configuration.load_configuration(
                file, folders=locate_folders(workspace, state, allow_home=True), flags=flags
            )
        )
    except (LoadError, UsageError, StartError):
        return tier_probe.choose_sandbox()


def check_kernel(kernel: Kernel) -> list[DoctorCheck]:
    """Check this machine and an open kernel, with a remedy for each problem."""
    return [*check_machine(kernel.workdir), *check_open_kernel(kernel)]


def check_open_kernel(kernel: Kernel) -> list[DoctorCheck]:
    """Check an open kernel: its folders, its log, its tools and their sandboxes."""
    own = Path(kernel.state_folder)
    folders = StateFolders(Path(kernel.workdir), own.parent.parent, own.name)
    checks = [*check_storage(folders), *check_lease_holder(folders), *_check_files(kernel.config)]
    checks += _check_tools(kernel.generation.entries.values())
    checks += _check_unlisted_servers(kernel.config)
    checks += check_mcp_servers(kernel.mcp_servers.server_statuses)
    checks += check_token_costs(kernel.generation, kernel.config, kernel.default_agent)
    checks += _check_tool_settings(kernel.config, kernel.generation.entries.values())
    if kernel.interrupted_calls:
        ids = ", ".join(one.call_id for one in kernel.interrupted_calls)
        about = f"{ids}: started before the last stop, outcome unknown; they are not run again"
        checks.append(DoctorCheck("interrupted calls", "warning", about, "handrail explain CALL_ID"))
    return checks


def _check_configuration(
    folders: StateFolders | None, file: str | Path | None, flags: tuple[str, ...]
) -> Iterator[DoctorCheck]:
    try:
        found = configuration.load_configuration(file, folders=folders, flags=flags)
        if folders is not None:
            configuration.check_outside_workspace(found, folders.workspace)
    except LoadError as error:
        yield DoctorCheck(
            "configuration", "problem", str(error), "show each setting and its origin with handrail config"
        )
        return
    yield from _check_files(found)
    yield from check_disabled_protections(found)
    yield from run_check_isolated("sandbox provider", lambda: _check_provider(found))
    if folders is not None:
        yield from run_check_isolated("mcp servers", lambda: check_configured_mcp_servers(found, folders))
        workspace = str(folders.workspace)
        yield from run_check_isolated("language servers", lambda: check_language_servers(found, workspace))
        yield from run_check_isolated("tools", lambda: _check_known_tools(found, list(_load_entries(found, folders))))
        yield from run_check_isolated("agent", lambda: _check_agent(found, folders))


def _check_provider(found: MergedConfiguration) -> Iterator[DoctorCheck]:
    choose_unlimited_sandbox(found)
    yield from ()


def _check_known_tools(found: MergedConfiguration, entries: list[ToolEntry]) -> Iterator[DoctorCheck]:
    yield from _check_tools(entries)
    yield from check_token_costs(Generation(1, entries), found, AgentManifest())
    if unknown := sorted({*found.settings.sandbox.unconfined} - {entry.id for entry in entries}):
        about = f"unknown tools: {', '.join(unknown)}"
        yield DoctorCheck("sandbox.unconfined", "warning", about, "list the tool ids with handrail tools")
    yield from _check_tool_settings(found, entries)


def _check_tool_settings(found: MergedConfiguration, entries: Iterable[ToolEntry]) -> Iterator[DoctorCheck]:
    """Check for settings of unknown tools; another agent may have such a tool, or get it later."""
    known = {entry.id for entry in entries}
    for tool in found.settings.tools.keys() - known:
        yield DoctorCheck(f"tools.{tool}", "warning", f"unknown tool: {tool}", "list the tool ids with handrail tools")


def _check_files(found: MergedConfiguration) -> Iterator[DoctorCheck]:
    yield DoctorCheck("configuration", "ok", str(found.file or f"no file (looked in {found.folder})"))
    yield DoctorCheck("mode", "ok", f"{found.settings.mode}: {MODE_DESCRIPTIONS[found.settings.mode]}")
    if found.workspace is not None:
        if (remark := found.untrusted_workspace_warning) is not None:
            yield DoctorCheck("workspace file", "warning", remark, "handrail trust")
        else:
            yield DoctorCheck("workspace file", "ok", str(found.workspace.path))


def _load_entries(found: MergedConfiguration, folders: StateFolders) -> Iterable[ToolEntry]:
    """Load the tools of the configured agent, without running them."""
    whole = CheckedAgentManifest(AgentManifest(id=found.settings.agent))
    confinement = ToolConfinement(make_limited_sandbox(found), _refuse_to_run, _refuse_to_run)
    return (
        make_tool_sources(found, whole, folders, confinement, make_placeholder_secrets(found))
        .load_generation_of_agent(1)
        .entries.values()
    )


def _check_agent(found: MergedConfiguration, folders: StateFolders) -> Iterator[DoctorCheck]:
    """Check the configured agent for faults that prevent its start, and the rules for unknown tools."""
    loaded = load_agent(found, found.settings.agent, folders)
    for folder in (*loaded.further_roots.readable, *loaded.further_roots.writable):
        yield from check_file_name_aliasing(folder)
    confinement = ToolConfinement(make_limited_sandbox(found), _refuse_to_run, _refuse_to_run)
    sources = make_tool_sources(found, loaded.checked_agent, folders, confinement, make_placeholder_secrets(found))
    generation, _, faults = load_tools_and_rules(sources, 1, loaded)
    if own := [fault for fault in faults if fault.source == str(loaded.checked_agent.source)]:
        remedy = "list the agents with their faults with handrail agents"
        yield DoctorCheck(f"agent {found.settings.agent}", "problem", str(LoadError(own)), remedy)
    if of_rules := find_config_rule_faults(found, generation):
        remedy = "fix them there; a rule names a tool id, a glob or a capability"
        yield DoctorCheck("rules", "problem", str(LoadError(of_rules)), remedy)
    elif generation is not None:
        yield from _check_rules_without_tools(found, generation)


def _check_rules_without_tools(found: MergedConfiguration, generation: Generation) -> Iterator[DoctorCheck]:
    try:
        servers = [one.name for one in load_enabled_servers(found, make_placeholder_secrets(found))]
    except LoadError:
        return  # which the check of the servers says
    rules = parse_rule_texts(collect_process_rules(found, ()), generation)
    if idle := list(iterate_missing_tool_warnings(rules, {*generation.entries, *generation.other_tool_ids}, servers)):
        remedy = (
            "correct the name, unless its tool or server comes later; handrail tools and handrail mcp list show them"
        )
        yield DoctorCheck("rules", "warning", " ".join(idle), remedy)


def find_config_rule_faults(config: MergedConfiguration, generation: Generation | None) -> tuple[Diagnostic, ...]:
    """Return the faults of the configuration's rules that prevent a start with these tools."""
    try:
        parse_rule_texts(collect_process_rules(config, ()), generation)
    except LoadError as error:
        return error.diagnostics
    return ()


def _refuse_to_run(_: object) -> NoReturn:
    raise RuntimeError("the doctor must not run a tool")


def _check_tools(entries: Iterable[ToolEntry]) -> Iterator[DoctorCheck]:
    every = list(entries)
    every = [entry for entry in every if entry.unavailable_reason != PROVIDER_ONLY_TEXT]
    unavailable = [entry for entry in every if entry.unavailable_reason is not None]
    yield DoctorCheck("tools", "ok", f"{len(every) - len(unavailable)} ready, {len(unavailable)} unavailable")
    by_reason: dict[str, list[str]] = {}
    for entry in unavailable:
        by_reason.setdefault(entry.unavailable_reason or "", []).append(entry.id)
    for reason, ids in by_reason.items():
        if len(ids) == 1:
            yield DoctorCheck(f"tool {ids[0]}", "problem", f"unavailable: {reason}")
        else:
            yield DoctorCheck(f"{len(ids)} tools", "problem", f"unavailable: {', '.join(ids)}: {reason}")
    trusted = [entry.id for entry in every if entry.sandbox.startswith(IN_PROCESS) and entry.source != "built-in"]
    if trusted:
        about = "code of the operator, confined by the checks of the runtime, not by the operating system"
        yield DoctorCheck("in-process Python", "warning", f"{', '.join(trusted)}: {about}")


# An agent's capability set: the capabilities of its manifest, and those that each of its tools adds for itself.


class ToolCapabilities(Struct, frozen=True):
    """The capabilities of one tool of an agent.

    :param has: the maximum capabilities of its calls
    :param adds: the capabilities that the agent has only because of this tool
    """

    id: str
    has: tuple[str, ...]
    adds: tuple[str, ...]
    sandbox: str
    unavailable_reason: str | None


class CapabilityReport(Struct, frozen=True):
    """The capabilities of an agent.

    :param own: the requirements of its manifest, without its tools
    :param whole: the requirements of its manifest and its tools
    :param ceiling: the limit for everything on this machine; None if the operator set none
    """

    agent: str
    own: tuple[str, ...]
    whole: tuple[str, ...]
    ceiling: tuple[str, ...] | None
    tools: tuple[ToolCapabilities, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compute_agent_capabilities(config: MergedConfiguration, folders: StateFolders, agent: str) -> CapabilityReport:
    """Return the capabilities that a kernel would give an agent now, without running anything.

    :raises UsageError: if the agent does not exist; the text names the existing ones
    :raises LoadError: with all faults of its manifest and its tools
    """
    loaded = load_agent(config, agent, folders)
    confinement = ToolConfinement(make_limited_sandbox(config), _refuse_to_execute, _refuse_to_execute)
    sources = make_tool_sources(config, loaded.checked_agent, folders, confinement, make_placeholder_secrets(config))
    generation, _, faults = load_tools_and_rules(sources, 1, loaded)
    if generation is None or faults:
        raise LoadError(faults)
    variables = loaded.get_requirement_variables(folders.requirement_path_variables)
    own = expand_requires(loaded.manifest.requires, variables, agent)
    ceiling = build_ceiling_capability_layer(config.settings.ceiling, variables)
    entries = list(generation.entries.values())
    layers = [expand_requires(entry.spec.requires, variables, entry.id) for entry in entries]
    return CapabilityReport(
        loaded.manifest.id,
        tuple(format_capability_layer(own)),
        tuple(format_capability_layer(unite_capability_layers(agent, [own, *layers]))),
        None if ceiling is None else tuple(format_capability_layer(ceiling)),
        tuple(_compute_shares(own, entries, layers)),
    )


def _compute_shares(
    own: CapabilityLayer, entries: list[ToolEntry], layers: list[CapabilityLayer]
) -> Iterator[ToolCapabilities]:
    items = [tuple(format_capability_layer(layer)) for layer in layers]
    counts = Counter(line for one in (*items, tuple(format_capability_layer(own))) for line in one)
    for entry, has in zip(entries, items, strict=True):
        adds = tuple(line for line in has if counts[line] == 1)
        yield ToolCapabilities(entry.id, has, adds, entry.sandbox, entry.unavailable_reason)


def format_capability_layer(layer: CapabilityLayer) -> Iterator[str]:
    """Yield the permissions of a layer, one per line, sorted."""
    yield from (f"fs.read {pattern}" for pattern in sorted(layer.fs_read))
    yield from (f"fs.write {pattern}" for pattern in sorted(layer.fs_write))
    yield from (f"net.fetch {host}" for host in sorted(layer.hosts))
    yield from (f"shell.run {text}" for text in sorted(map(_format_command, layer.shell)))
    yield from sorted(layer.capabilities)


def _format_command(one: ShellRequires) -> str:
    if one.args is None:
        return "any program" if one.cmd == "*" else f"{one.cmd} with any arguments"
    return " ".join((one.cmd, *map(_format_pattern, one.args)))


def _format_pattern(pattern: ArgumentPattern) -> str:
    if isinstance(pattern, str):
        return pattern
    return "*" if isinstance(pattern, AnyArgumentPattern) else f"{pattern.prefix}…"


def _refuse_to_execute(_: object) -> NoReturn:
    raise RuntimeError("the doctor must not run a tool")
