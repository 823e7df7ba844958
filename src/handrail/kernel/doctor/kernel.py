"""The whole check of a workspace: machine, folders, holder, configuration, servers, tools, and agents' capabilities."""

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


# Upstream MCP servers: how each is reached, and the reason why one cannot be used.


def of_servers(servers: Iterable[ServerStatus]) -> Iterator[Check]:
    """One line for each."""
    for server in servers:
        known = "never connected yet" if server.tools is None else f"{server.tools} tools"
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
    """Those of a configuration, without connecting anybody."""
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
    """Everything there is to say without opening a kernel.

    :param config: the configuration file instead of the platform's
    :param flags: settings as ``KEY=VALUE``, which are stronger than any file
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
    """Whoever would confine programs here; where the configuration cannot be read, what this machine has itself."""
    try:
        return provider_of(configuration.load(file, folders=locate(workspace, state, allow_home=True), flags=flags))
    except (LoadError, UsageError, StartError):
        return tiers.choose()


def check_kernel(kernel: Kernel) -> list[Check]:
    """Check this machine and an open kernel: what works, what is withheld, and the remedies."""
    return [*of_machine(kernel.workdir), *of_kernel(kernel)]


def of_kernel(kernel: Kernel) -> list[Check]:
    """What an open kernel has: its folders, whether its log takes records, its tools and who confines them."""
    own = Path(kernel.state_folder)
    folders = Folders(Path(kernel.workdir), own.parent.parent, own.name)
    checks = [*of_place(folders), *of_holder(folders), *_files(kernel.config)]
    checks += _tools(kernel.generation.entries.values())
    checks += of_servers(kernel.mcp.servers)
    checks += of_tokens(kernel.generation, kernel.config, kernel.agent)
    checks += _settings_of_tools(kernel.config, kernel.generation.entries.values())
    if kernel.interrupted:
        ids = ", ".join(one.call_id for one in kernel.interrupted)
        about = f"{ids}: begun before the last stop, outcome unknown, not run again"
        checks.append(Check("interrupted calls", "warning", about, "handrail explain CALL_ID"))
    return checks


def _configured(folders: Folders | None, file: str | Path | None, flags: tuple[str, ...]) -> Iterator[Check]:
    try:
        found = configuration.load(file, folders=folders, flags=flags)
        if folders is not None:
            configuration.check_apart(found, folders.workspace)
    except LoadError as error:
        yield Check(
            "configuration", "problem", str(error), "handrail config shows each setting and where it comes from"
        )
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
        about = f"there is no tool of that id: {', '.join(unknown)}"
        yield Check("sandbox.unconfined", "warning", about, "handrail tools lists the ids")
    yield from _settings_of_tools(found, entries)


def _settings_of_tools(found: Configuration, entries: Iterable[Entry]) -> Iterator[Check]:
    """The settings of tools that are not there; another agent may have one, or bring it later."""
    known = {entry.id for entry in entries}
    for tool in found.settings.tools.keys() - known:
        yield Check(f"tools.{tool}", "warning", f"there is no tool {tool}", "handrail tools lists the ids")


def _files(found: Configuration) -> Iterator[Check]:
    yield Check("configuration", "ok", str(found.file or f"no file (looked in {found.folder})"))
    yield Check("mode", "ok", f"{found.settings.mode}: {MEANINGS[found.settings.mode]}")
    if found.workspace is not None:
        if (remark := found.remark) is not None:
            yield Check("workspace file", "warning", remark, "handrail trust")
        else:
            yield Check("workspace file", "ok", str(found.workspace.path))


def _loaded(found: Configuration, folders: Folders) -> Iterable[Entry]:
    """The tools that a start would have, none of which is run."""
    whole = CheckedAgent(AgentManifest(id=found.settings.agent))
    confinement = Confinement(sandbox_of(found), _never, _never)
    return sources_of(found, whole, folders, confinement, as_configured(found)).load(1).entries.values()


def _of_agent(found: Configuration, folders: Folders) -> Iterator[Check]:
    """What keeps the configured agent from starting though the files can be read: its own faults, and rules that name
    tools which are not there."""
    appointed = appoint(found, found.settings.agent, folders)
    confinement = Confinement(sandbox_of(found), _never, _never)
    sources = sources_of(found, appointed.checked, folders, confinement, as_configured(found))
    generation, _, faults = equipped(sources, 1, appointed)
    if own := [fault for fault in faults if fault.source == str(appointed.checked.source)]:
        remedy = "handrail agents lists every agent with its faults"
        yield Check(f"agent {found.settings.agent}", "problem", str(LoadError(own)), remedy)
    if of_rules := faults_of_rules(found, generation):
        remedy = "mend them there; a rule names a tool's id, a glob or a capability"
        yield Check("rules", "problem", str(LoadError(of_rules)), remedy)


def faults_of_rules(config: Configuration, generation: Generation | None) -> tuple[Fault, ...]:
    """What is wrong with the configuration's own rules, so that nothing starts with these tools."""
    try:
        parse_rules(configured_rules(config, ()), generation)
    except LoadError as error:
        return error.faults
    return ()


def _never(_: object) -> NoReturn:
    raise RuntimeError("a check-up runs no tool")


def _tools(entries: Iterable[Entry]) -> Iterator[Check]:
    every = list(entries)
    every = [entry for entry in every if entry.withheld != AT_PROVIDER]
    withheld = [entry for entry in every if entry.withheld is not None]
    yield Check("tools", "ok", f"{len(every) - len(withheld)} ready, {len(withheld)} withheld")
    for entry in withheld:
        yield Check(f"tool {entry.id}", "problem", f"withheld: {entry.withheld}")
    trusted = [entry.id for entry in every if entry.confined_by.startswith(IN_PROCESS) and entry.source != "built-in"]
    if trusted:
        about = "the operator's own code, held by the runtime's checks, not by the operating system"
        yield Check("in-process Python", "warning", f"{', '.join(trusted)}: {about}")


# An agent's capability set: the part of its manifest, and the part that each of its tools adds for that tool alone.


@dataclass(frozen=True, slots=True)
class ToolShare:
    """One tool's part in its agent's set.

    :param has: all that its calls can have at most
    :param adds: what of it the agent has for this tool alone
    """

    id: str
    has: tuple[str, ...]
    adds: tuple[str, ...]
    confined_by: str
    withheld: str | None


@dataclass(frozen=True, slots=True)
class AgentSet:
    """What an agent has.

    :param own: what its manifest requires, beside its tools
    :param whole: that and all that its tools require
    :param ceiling: what nothing on this machine may exceed, whatever it has; None where the operator set no bound
    """

    agent: str
    own: tuple[str, ...]
    whole: tuple[str, ...]
    ceiling: tuple[str, ...] | None
    tools: tuple[ToolShare, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def set_of(config: Configuration, folders: Folders, agent: str) -> AgentSet:
    """The set of an agent as a kernel would give it now; nothing is run.

    :raises UsageError: when there is no such agent, naming those there are
    :raises LoadError: with every fault of its manifest and its tools
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
    """What a layer allows, one thing on each line, in one order."""
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
    raise RuntimeError("a check-up runs no tool")
