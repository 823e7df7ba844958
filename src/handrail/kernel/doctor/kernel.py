"""The whole check-up of a workspace: machine, folders, holder, configuration and tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from handrail import config as configuration
from handrail.contract.agent import AgentManifest, CheckedAgent
from handrail.contract.errors import Fault, LoadError, StartError, UsageError
from handrail.contract.generation import IN_PROCESS, Entry, Generation
from handrail.contract.sandbox import Sandbox
from handrail.contract.tool.native import AT_PROVIDER
from handrail.kernel.agents import appoint, as_configured, equipped, sources_of
from handrail.kernel.assembly import configured_rules, parse_rules
from handrail.kernel.doctor.check import Check, alone
from handrail.kernel.doctor.confinement import of_opt_outs
from handrail.kernel.doctor.holder import of_holder
from handrail.kernel.doctor.machine import of_machine
from handrail.kernel.doctor.place import of_place
from handrail.kernel.doctor.tokens import of_tokens
from handrail.kernel.doctor.upstreams import of_configured, of_servers
from handrail.kernel.sandbox import provider_of, sandbox_of
from handrail.policy.rules.modes import MEANINGS
from handrail.registry.sources.executables import Confinement
from handrail.sandbox import tiers
from handrail.store.folders import Folders, locate

if TYPE_CHECKING:
    from handrail.config import Configuration
    from handrail.kernel.kernel import Kernel


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
