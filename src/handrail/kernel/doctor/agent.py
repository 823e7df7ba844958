"""An agent's capability set: what its manifest says, and what each of its tools adds to it and to no other tool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from handrail.config import Configuration
from handrail.contract.errors import LoadError
from handrail.contract.generation import Entry
from handrail.contract.tool.requires import (
    AnyArgument,
    ArgumentPattern,
    Layer,
    ShellRequires,
    expand,
    union,
)
from handrail.kernel.agents import appoint, as_configured, equipped, sources_of
from handrail.kernel.sandbox import sandbox_of
from handrail.policy.capabilities import ceiling_layer
from handrail.registry.sources.executables import Confinement
from handrail.store.folders import Folders


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
