"""Sources into a generation: in order, checked whole, with every fault listed at once.

A later source never takes a name from an earlier one. The one exception is resolved here: an agent's folder
overrides a tool of the global folder by the same id.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from handrail.contract.errors import Fault, LoadError
from handrail.contract.names import LOCKED_IDS, fault_in_id, is_session_internal, nearest, wire_name
from handrail.contract.sandbox import Tier
from handrail.contract.spec import ToolSpec
from handrail.contract.tool import Tool
from handrail.registry.checking import checked
from handrail.registry.generation import Entry, Foreign, Generation, foreign_origin
from handrail.registry.pins import NO_PINS, Pins, reviews
from handrail.registry.sources.native import NativeTool
from handrail.registry.sources.source import Found, Loaded, Rank, Source
from handrail.registry.withholding import Reason, confinement_of, judged, reasons_to_withhold
from handrail.runtime.secrets import NO_SECRETS, SecretStore


def load_generation(
    sources: Sequence[Source],
    *,
    tier: Tier,
    number: int = 1,
    aliases: Mapping[str, str] | None = None,
    strict: bool = False,
    secrets: SecretStore = NO_SECRETS,
    pins: Pins = NO_PINS,
    disabled: Collection[str] = (),
) -> Generation:
    """Build a generation of what ``sources`` have, in their order: built-ins, global, agent, code, packages.

    :param tier: what this machine can enforce; what it cannot confine is withheld with the reason
    :param aliases: an operator's further names, alias to id
    :param strict: whether faults of foreign sources are fatal too
    :param secrets: what tools may be given; one that declares another is withheld
    :param pins: which definitions of foreign tools a person has approved; the others are off until one has
    :param disabled: ids that the operator has put out
    :raises LoadError: with all faults of the operator's own sources
    """
    table = _Table(tier, secrets, pins, frozenset(disabled))
    for source in sources:
        fatal = strict or not source.foreign
        loaded = _loaded(source)
        if source.rank == "built-in":
            table.shipped.update(loaded.aliases)
        (table.faults if fatal else table.quarantined).extend(loaded.faults)
        foreign = Foreign(loaded.name, loaded.about) if source.foreign else None
        for found in loaded.tools:
            problems = table.take(found, source.rank, foreign)
            (table.faults if fatal else table.quarantined).extend(problems)
    table.faults += table.faults_in_aliases(aliases or {})
    if table.faults:
        raise LoadError(table.faults)
    names = {**table.shipped, **(aliases or {})}
    return Generation(number, (row.entry for row in table.rows.values()), names, table.quarantined)


def _loaded(source: Source) -> Loaded:
    """What a source has. One that is not the operator's own keeps nobody from starting, whatever it does."""
    if not source.foreign:
        return source.load()
    try:
        return source.load()
    except Exception as error:
        name = str(getattr(source, "name", type(source).__name__))
        problem = f"cannot be looked through: {type(error).__name__}: {error}"
        return Loaded(faults=(Fault(name, "", problem),), name=name)


@dataclass(frozen=True, slots=True)
class _Row:
    entry: Entry
    rank: Rank


class _Table:
    """The tools taken so far, by id, and by wire name."""

    def __init__(self, tier: Tier, secrets: SecretStore, pins: Pins, disabled: frozenset[str]) -> None:
        self.tier = tier
        self.secrets = secrets
        self.pins = pins
        self.disabled = disabled
        self.rows: dict[str, _Row] = {}
        self.ids_by_wire: dict[str, str] = {}
        self.shipped: dict[str, str] = {}
        """Aliases of built-in tools."""
        self.faults: list[Fault] = []
        self.quarantined: list[Fault] = []

    def take(self, found: Found, rank: Rank, foreign: Foreign | None = None) -> list[Fault]:
        """Add one tool, or say everything that is wrong with it."""
        tool, place = found.tool, found.place
        spec = tool.spec
        known = checked(spec)
        faults = (*known.problems, *_faults_in_tool(tool))
        problems = [Fault(place, where, problem) for where, problem in faults]
        if clash := self._clash(spec.id, rank, place):
            problems.append(Fault(place, "llm.name", clash))
        if problems or known.schema is None:
            return problems
        if spec.only_its_command and spec.id in self.tier.unconfined:
            spec = replace(spec, only_its_command=False)  # nothing holds its programs to what was proved of the command
        entry = Entry(
            spec,
            tool,
            known.schema,
            place,
            known.definition_hash,
            confined_by=confinement_of(tool, self.tier),
            blocking=bool(getattr(tool, "blocking", False)),
            untrusted=foreign_origin(spec, place, foreign=foreign is not None),
            foreign=foreign,
        )
        self.rows[spec.id] = _Row(judged(entry, self._reasons(entry)), rank)
        self.ids_by_wire[wire_name(spec.id)] = spec.id
        return []

    def _reasons(self, entry: Entry) -> list[Reason]:
        """Why it is off, if it is."""
        reasons = reasons_to_withhold(entry.tool, self.tier, secrets=self.secrets)
        if entry.id in self.disabled:
            reasons.append(Reason("disabled", f'its operator has put it out: [tools."{entry.id}"] enabled = false'))
        if entry.foreign is not None:
            name = entry.foreign.name
            reasons += [
                Reason("quarantined", f"{review.reason}; look at it with: handrail sources review {name}")
                for review in reviews(name, [entry.spec], self.pins).values()
            ]
        return reasons

    def _clash(self, tool_id: str, rank: Rank, place: str) -> str | None:
        if tool_id in LOCKED_IDS and rank != "built-in":
            return f"{tool_id!r} is a locked id, which only the built-in tool may have; rename this one"
        if rank != "built-in" and is_session_internal(tool_id):
            return f"{tool_id!r} is kept for a built-in tool of the session itself, which runs unasked; rename this one"
        if rank != "built-in" and tool_id in self.shipped:
            return f"{tool_id!r} is another name of the built-in tool {self.shipped[tool_id]!r}; rename this one"
        other = self.rows.get(tool_id)
        if other is not None:
            if other.rank == "built-in" and rank != "built-in":
                return f"{tool_id!r} is a built-in tool, and nothing may override one; rename this one"
            if other.rank == "global" and rank == "agent":
                return None
            return f"{tool_id!r} is already the id of the tool from {other.entry.source}; rename one of the two"
        same_wire = self.ids_by_wire.get(wire_name(tool_id))
        if same_wire is not None:
            return (
                f"{tool_id!r} and {same_wire!r} from {self.rows[same_wire].entry.source} would both be "
                f"{wire_name(tool_id)!r} to a model; rename one of the two"
            )
        return None

    def faults_in_aliases(self, aliases: Mapping[str, str]) -> list[Fault]:
        found: list[Fault] = []
        for alias, tool_id in aliases.items():
            if problem := fault_in_id(alias):
                found.append(Fault("aliases", alias, problem))
            elif alias in LOCKED_IDS or alias in self.rows or alias in self.ids_by_wire or alias in self.shipped:
                found.append(Fault("aliases", alias, "is the name of a tool already; choose another alias"))
            if tool_id not in self.rows:
                close = nearest(tool_id, self.rows)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                found.append(Fault("aliases", alias, f"there is no tool {tool_id!r}{hint}"))
        return found


def _faults_in_tool(tool: Tool) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if tool.spec.provider_support and not isinstance(tool, NativeTool):
        found.append(("provider_support", "only an agent's manifest names what a provider carries out; leave it out"))
    if tool.trusted:
        found += _faults_of_python(tool.spec)
    return found


def _faults_of_python(spec: ToolSpec) -> list[tuple[str, str]]:
    """Fields that only an executable can honour; none is silently ignored."""
    found: list[tuple[str, str]] = []
    if spec.persistent:
        found.append(("runtime.persistent", "only an executable is kept running between calls; leave it out"))
    if spec.exec_path is not None:
        found.append(("runtime.exec_path", "only a tool in a tool folder has an executable; leave it out"))
    return found
