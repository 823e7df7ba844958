"""Sources into a generation: in order, checked whole, with every fault listed at once.

A later source never takes a name from an earlier one. The one exception is resolved here: an agent's folder
overrides a tool of the global folder by the same id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from handrail.contract.errors import Fault, LoadError
from handrail.contract.names import LOCKED_IDS, fault_in_id, is_session_internal, nearest, wire_name
from handrail.contract.sandbox import Tier
from handrail.contract.schema import InvalidSchema, Schema, compile_schema
from handrail.contract.spec import ToolSpec, faults_in
from handrail.contract.tool import Tool
from handrail.registry.generation import IN_PROCESS, UNCONFINED, Entry, Foreign, Generation, foreign_origin
from handrail.registry.sources.source import Found, Rank, Source
from handrail.runtime.secrets import NO_SECRETS, SecretStore, secret_settings


def load_generation(
    sources: Sequence[Source],
    *,
    tier: Tier,
    number: int = 1,
    aliases: Mapping[str, str] | None = None,
    strict: bool = False,
    secrets: SecretStore = NO_SECRETS,
) -> Generation:
    """Build a generation of what ``sources`` have, in their order: built-ins, global, agent, code, packages.

    :param tier: what this machine can enforce; what it cannot confine is withheld with the reason
    :param aliases: an operator's further names, alias to id
    :param strict: whether faults of foreign sources are fatal too
    :param secrets: what tools may be given; one that declares another is withheld
    :raises LoadError: with all faults of the operator's own sources
    """
    table = _Table(tier, secrets)
    for source in sources:
        fatal = strict or not source.foreign
        loaded = source.load()
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


@dataclass(frozen=True, slots=True)
class _Row:
    entry: Entry
    rank: Rank


class _Table:
    """The tools taken so far, by id, and by wire name."""

    def __init__(self, tier: Tier, secrets: SecretStore) -> None:
        self.tier = tier
        self.secrets = secrets
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
        problems = [Fault(place, where, problem) for where, problem in _faults_in_tool(tool)]
        schema: Schema | None = None
        try:
            schema = compile_schema(spec.parameters)
        except InvalidSchema as error:
            problems += [
                Fault(place, f"llm.parameters.{where}".rstrip("."), problem) for where, problem in error.problems
            ]
        if clash := self._clash(spec.id, rank, place):
            problems.append(Fault(place, "llm.name", clash))
        if problems or schema is None:
            return problems
        definition_hash = spec.definition_hash
        if spec.only_its_command and spec.id in self.tier.unconfined:
            spec = replace(spec, only_its_command=False)  # nothing holds its programs to what was proved of the command
        entry = Entry(
            spec,
            tool,
            schema,
            place,
            definition_hash,
            withheld=reason_to_withhold(tool, self.tier, secrets=self.secrets),
            confined_by=confinement_of(tool, self.tier),
            blocking=bool(getattr(tool, "blocking", False)),
            untrusted=foreign_origin(spec, place, foreign=foreign is not None),
            foreign=foreign,
        )
        self.rows[spec.id] = _Row(entry, rank)
        self.ids_by_wire[wire_name(spec.id)] = spec.id
        return []

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


def confinement_of(tool: Tool, tier: Tier) -> str:
    """Who holds a tool back, as every result says it: ``runtime``, the tier, or both for Python that runs programs."""
    holder = UNCONFINED if tool.spec.id in tier.unconfined else tier.name
    if not tool.trusted:
        return holder
    return f"{IN_PROCESS}+{holder}" if tool.spec.requires.shell else IN_PROCESS


def reason_to_withhold(
    tool: Tool, tier: Tier, spec: ToolSpec | None = None, *, secrets: SecretStore = NO_SECRETS
) -> str | None:
    """Why this kernel must not run a sound tool, in a sentence for its operator, or None.

    What cannot be enforced or served is refused; nothing runs with less than it declares, or less confined.

    :param spec: what is asked of the tool, where that is more than its own
    """
    spec = spec or tool.spec
    reasons: list[str] = []
    if unknown := _unknown_secrets(tool, spec, secrets):
        reasons.append(f"available, but needs configuration: it declares secrets that are not known here: {unknown}")
    if unset := _unset_secrets(tool, spec, secrets):
        reasons.append(f"available, but needs configuration: it has secret settings without a value: {unset}")
    needed = (key for key, one in spec.config.items() if one.required and one.default is None and not one.secret)
    if unset := tuple(needed):
        reasons.append(
            f"it needs settings that have no default ({', '.join(unset)}), and nobody can give a tool any yet"
        )
    starts_programs = spec.id not in tier.unconfined and (not tool.trusted or bool(spec.requires.shell))
    if spec.requires.net.hosts and starts_programs and tier.confines and not tier.opens_hosts:
        hosts = ", ".join(spec.requires.net.hosts)
        why = "; ".join(f"{one.detail} ({one.remedy})" for one in tier.mechanisms if one.name == "hosts")
        reasons.append(
            f"it starts programs and requires hosts ({hosts}), and no sandbox here opens the network to single hosts"
            + (f": {why}" if why else "")
        )
    if spec.mode != "direct":
        reasons.append(f"its mode is {spec.mode!r}, and only direct tools are carried out")
    if tool.trusted and spec.cancellable == "process":
        reasons.append("it asks for a worker process of its own, and functions run in this process only")
    if not tier.confines and starts_programs:
        remedy = f" ({tier.remedy})" if tier.remedy else ""
        reasons.append(f"it starts programs, which cannot be confined on this machine: {tier.detail}{remedy}")
    return "; ".join(reasons) or None


def _unknown_secrets(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> str:
    """The secrets that cannot be handed over, each with what its operator does about it."""
    if tool.own_secrets is not None:
        return ", ".join(
            f"{name} (the process that brought the tool gave none of this name)"
            for name in spec.secrets
            if name not in tool.own_secrets
        )
    return ", ".join(why for name in spec.secrets if (why := secrets.reason_missing(name)) is not None)


def _unset_secrets(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> str:
    """The same for settings that are secret and that it cannot do without."""
    needed = [key for key in secret_settings(spec) if spec.config[key].required]
    if tool.own_secrets is not None:
        return ", ".join(f"{key} (a tool that another process brought is given none)" for key in needed)
    return ", ".join(why for key in needed if (why := secrets.reason_unset(spec, key)) is not None)


def _faults_in_tool(tool: Tool) -> list[tuple[str, str]]:
    found = faults_in(tool.spec)
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
