"""The complete check of a workspace: machine, folders, lease holder, configuration, servers, tools, agents' capabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from handrail import config as configuration
from handrail.config import Configuration
from handrail.contract.agent import AgentManifest, CheckedAgent
from handrail.contract.errors import Fault, LoadError, StartError, UsageError
from handrail.contract.generation import IN_PROCESS, Entry, Generation
from handrail.contract.sandbox import Sandbox
from handrail.contract.tool.native import AT_PROVIDER
from handrail.contract.tool.requires import AnyArgument, ArgumentPattern, Layer, ShellRequires, expand, union
from handrail.kernel.agents import appoint, as_configured, equipped, sources_of
from handrail.kernel.assembly import configured_rules, parse_rules
from handrail.kernel.doctor.machine import Check, alone, of_machine, of_opt_outs, of_tokens
from handrail.kernel.doctor.place import of_holder, of_place
from handrail.kernel.sandbox import provider_of, sandbox_of
from handrail.policy.rules.rules import MEANINGS
from handrail.policy.targets import ceiling_layer
from handrail.registry.sources.executables import Confinement
from handrail.sandbox import tiers
from handrail.store.folders import Folders, locate

if TYPE_CHECKING:
    from handrail.config import Configuration
    from handrail.kernel.kernel import Kernel
    from handrail.kernel.servers import ServerStatus
    from handrail.store.folders import Folders


# Upstream MCP servers: their commands or addresses, and the reasons why they cannot be used.


def of_servers(servers: Iterable[ServerStatus]) -> Iterator[Check]:
    """Check each upstream MCP server."""
    for server in servers:
        known = "not connected yet" if server.tools is None else f"{server.tools} tools"
        spoken = f", {server.protocol}" if server.protocol else ""
        about = f"{server.transport} {server.where}: {server.state}{spoken}, {known}"
        name = f"mcp server {server.name}"
        if server.reason:
            remedy = f"see [mcp.servers.{server.name}]"
            for sign in ("handrail mcp install", "handrail mcp login"):
                if sign in server.reason:
                    remedy = f"{sign} {server.name}"
            yield Check(name, "problem", f"{about}; {server.reason}", remedy)
        else:
            yield Check(name, "ok", about)


def of_configured(config: Configuration, folders: Folders) -> Iterator[Check]:
    """Check the servers of a configuration, without connecting to them."""
    from handrail.kernel.agents import as_configured
    from handrail.kernel.servers import status_of
    from handrail.upstream.configured import configured
    from handrail.upstream.source import McpSource

    found = configured(config, as_configured(config))
    yield from of_servers(status_of(McpSource(one, folders.state, str(folders.workspace))) for one in found)


def check_up(
    workspace: str | Path,
    state: str | Path | None = None,
    config: str | Path | None = None,
    *,
    flags: Iterable[str] = (),
    allow_home: bool = False,
) -> list[Check]:
    """Run all checks that do not need an open kernel.

    :param config: the configuration file instead of the platform's
    :param flags: settings as ``KEY=VALUE``, which override every file
    """
    checks = of_machine(str(workspace), lambda: _provider(workspace, state, config, tuple(flags)))
    try:
        folders: Folders | None = locate(workspace, state, allow_home=allow_home)
    except StartError as error:
        folders = None
        checks.append(Check("workspace", "problem", str(error)))
    if folders is not None:
        checks += [*of_place(folders), *of_holder(folders)]
    checks += alone("configuration", lambda: _configured(folders, config, tuple(flags)))
    return checks


def _provider(
    workspace: str | Path, state: str | Path | None, file: str | Path | None, flags: tuple[str, ...]
) -> Sandbox:
    """Return the configured sandbox; if the configuration cannot be read, the one of this machine."""
    try:
        return provider_of(configuration.load(file, folders=locate(workspace, state, allow_home=True), flags=flags))
    except (LoadError, UsageError, StartError):
        return tiers.choose()


def check_kernel(kernel: Kernel) -> list[Check]:
    """Check this machine and an open kernel, with a remedy for each problem."""
    return [*of_machine(kernel.workdir), *of_kernel(kernel)]


def of_kernel(kernel: Kernel) -> list[Check]:
    """Check an open kernel: its folders, its log, its tools and their sandboxes."""
    own = Path(kernel.state_folder)
    folders = Folders(Path(kernel.workdir), own.parent.parent, own.name)
    checks = [*of_place(folders), *of_holder(folders), *_files(kernel.config)]
    checks += _tools(kernel.generation.entries.values())
    checks += of_servers(kernel.mcp.servers)
    checks += of_tokens(kernel.generation, kernel.config, kernel.agent)
    checks += _settings_of_tools(kernel.config, kernel.generation.entries.values())
    if kernel.interrupted:
        ids = ", ".join(one.call_id for one in kernel.interrupted)
        about = f"{ids}: started before the last stop, outcome unknown; they are not run again"
        checks.append(Check("interrupted calls", "warning", about, "handrail explain CALL_ID"))
    return checks


def _configured(folders: Folders | None, file: str | Path | None, flags: tuple[str, ...]) -> Iterator[Check]:
    try:
        found = configuration.load(file, folders=folders, flags=flags)
        if folders is not None:
            configuration.check_apart(found, folders.workspace)
    except LoadError as error:
        yield Check("configuration", "problem", str(error), "show each setting and its origin with handrail config")
        return
    yield from _files(found)
    yield from of_opt_outs(found)
    yield from alone("sandbox provider", lambda: _provider_is_there(found))
    if folders is not None:
        yield from alone("mcp servers", lambda: of_configured(found, folders))
        yield from alone("tools", lambda: _known(found, list(_loaded(found, folders))))
        yield from alone("agent", lambda: _of_agent(found, folders))


def _provider_is_there(found: Configuration) -> Iterator[Check]:
    provider_of(found)
    yield from ()


def _known(found: Configuration, entries: list[Entry]) -> Iterator[Check]:
    yield from _tools(entries)
    yield from of_tokens(Generation(1, entries), found, AgentManifest())
    unknown = sorted({*found.settings.sandbox.unconfined} - {entry.id for entry in entries})
    if unknown:
        about = f"unknown tools: {', '.join(unknown)}"
        yield Check("sandbox.unconfined", "warning", about, "list the tool ids with handrail tools")
    yield from _settings_of_tools(found, entries)


def _settings_of_tools(found: Configuration, entries: Iterable[Entry]) -> Iterator[Check]:
    """Check for settings of unknown tools; another agent may have such a tool, or get it later."""
    known = {entry.id for entry in entries}
    for tool in found.settings.tools.keys() - known:
        yield Check(f"tools.{tool}", "warning", f"unknown tool: {tool}", "list the tool ids with handrail tools")


def _files(found: Configuration) -> Iterator[Check]:
    yield Check("configuration", "ok", str(found.file or f"no file (looked in {found.folder})"))
    yield Check("mode", "ok", f"{found.settings.mode}: {MEANINGS[found.settings.mode]}")
    if found.workspace is not None:
        if (remark := found.remark) is not None:
            yield Check("workspace file", "warning", remark, "handrail trust")
        else:
            yield Check("workspace file", "ok", str(found.workspace.path))


def _loaded(found: Configuration, folders: Folders) -> Iterable[Entry]:
    """Load the tools of the configured agent, without running them."""
    whole = CheckedAgent(AgentManifest(id=found.settings.agent))
    confinement = Confinement(sandbox_of(found), _never, _never)
    return sources_of(found, whole, folders, confinement, as_configured(found)).load(1).entries.values()


def _of_agent(found: Configuration, folders: Folders) -> Iterator[Check]:
    """Check the configured agent for faults that prevent its start, and the rules for unknown tools."""
    appointed = appoint(found, found.settings.agent, folders)
    confinement = Confinement(sandbox_of(found), _never, _never)
    sources = sources_of(found, appointed.checked, folders, confinement, as_configured(found))
    generation, _, faults = equipped(sources, 1, appointed)
    if own := [fault for fault in faults if fault.source == str(appointed.checked.source)]:
        remedy = "list the agents with their faults with handrail agents"
        yield Check(f"agent {found.settings.agent}", "problem", str(LoadError(own)), remedy)
    if of_rules := faults_of_rules(found, generation):
        remedy = "fix them there; a rule names a tool id, a glob or a capability"
        yield Check("rules", "problem", str(LoadError(of_rules)), remedy)


def faults_of_rules(config: Configuration, generation: Generation | None) -> tuple[Fault, ...]:
    """Return the faults of the configuration's rules that prevent a start with these tools."""
    try:
        parse_rules(configured_rules(config, ()), generation)
    except LoadError as error:
        return error.faults
    return ()


def _never(_: object) -> NoReturn:
    raise RuntimeError("the doctor must not run a tool")


def _tools(entries: Iterable[Entry]) -> Iterator[Check]:
    every = list(entries)
    every = [entry for entry in every if entry.withheld != AT_PROVIDER]
    withheld = [entry for entry in every if entry.withheld is not None]
    yield Check("tools", "ok", f"{len(every) - len(withheld)} ready, {len(withheld)} unavailable")
    for entry in withheld:
        yield Check(f"tool {entry.id}", "problem", f"unavailable: {entry.withheld}")
    trusted = [entry.id for entry in every if entry.confined_by.startswith(IN_PROCESS) and entry.source != "built-in"]
    if trusted:
        about = "code of the operator, confined by the checks of the runtime, not by the operating system"
        yield Check("in-process Python", "warning", f"{', '.join(trusted)}: {about}")


# An agent's capability set: the capabilities of its manifest, and those that each of its tools adds for itself.


@dataclass(frozen=True, slots=True)
class ToolShare:
    """The capabilities of one tool of an agent.

    :param has: the maximum capabilities of its calls
    :param adds: the capabilities that the agent has only because of this tool
    """

    id: str
    has: tuple[str, ...]
    adds: tuple[str, ...]
    confined_by: str
    withheld: str | None


@dataclass(frozen=True, slots=True)
class AgentSet:
    """The capabilities of an agent.

    :param own: the requirements of its manifest, without its tools
    :param whole: the requirements of its manifest and its tools
    :param ceiling: the limit for everything on this machine; None if the operator set none
    """

    agent: str
    own: tuple[str, ...]
    whole: tuple[str, ...]
    ceiling: tuple[str, ...] | None
    tools: tuple[ToolShare, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def set_of(config: Configuration, folders: Folders, agent: str) -> AgentSet:
    """Return the capabilities that a kernel would give an agent now, without running anything.

    :raises UsageError: if the agent does not exist; the text names the existing ones
    :raises LoadError: with all faults of its manifest and its tools
    """
    appointed = appoint(config, agent, folders)
    confinement = Confinement(sandbox_of(config), _nothing_runs, _nothing_runs)
    sources = sources_of(config, appointed.checked, folders, confinement, as_configured(config))
    generation, _, faults = equipped(sources, 1, appointed)
    if generation is None or faults:
        raise LoadError(faults)
    variables = appointed.variables(folders.variables)
    own = expand(appointed.manifest.requires, variables, agent)
    ceiling = ceiling_layer(config.settings.ceiling, variables)
    entries = list(generation.entries.values())
    layers = [expand(entry.spec.requires, variables, entry.id) for entry in entries]
    return AgentSet(
        appointed.manifest.id,
        tuple(lines(own)),
        tuple(lines(union(agent, [own, *layers]))),
        None if ceiling is None else tuple(lines(ceiling)),
        tuple(_shares(own, entries, layers)),
    )


def _shares(own: Layer, entries: list[Entry], layers: list[Layer]) -> Iterator[ToolShare]:
    told = [tuple(lines(layer)) for layer in layers]
    counts = Counter(line for one in (*told, tuple(lines(own))) for line in one)
    for entry, has in zip(entries, told, strict=True):
        adds = tuple(line for line in has if counts[line] == 1)
        yield ToolShare(entry.id, has, adds, entry.confined_by, entry.withheld)


def lines(layer: Layer) -> Iterator[str]:
    """Yield the permissions of a layer, one per line, sorted."""
    yield from (f"fs.read {pattern}" for pattern in sorted(layer.fs_read))
    yield from (f"fs.write {pattern}" for pattern in sorted(layer.fs_write))
    yield from (f"net.fetch {host}" for host in sorted(layer.hosts))
    yield from (f"shell.run {text}" for text in sorted(map(_command, layer.shell)))
    yield from sorted(layer.capabilities)


def _command(one: ShellRequires) -> str:
    if one.args is None:
        return "any program" if one.cmd == "*" else f"{one.cmd} with any arguments"
    return " ".join((one.cmd, *map(_word, one.args)))


def _word(pattern: ArgumentPattern) -> str:
    if isinstance(pattern, str):
        return pattern
    return "*" if isinstance(pattern, AnyArgument) else f"{pattern.prefix}…"


def _nothing_runs(_: object) -> NoReturn:
    raise RuntimeError("the doctor must not run a tool")
