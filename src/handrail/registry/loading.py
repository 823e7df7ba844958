"""Loading of sources into a generation: in order, checked whole, with every fault at once.

A later source never takes a name from an earlier one, with one exception: an agent's folder overrides a tool of the global
folder with the same id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import Fault, LoadError, ToolError
from handrail.contract.generation import (
    IN_PROCESS,
    UNCONFINED,
    Entry,
    Foreign,
    Found,
    Generation,
    Loaded,
    Rank,
    Source,
    Status,
    Unheard,
    foreign_origin,
)
from handrail.contract.sandbox import Tier
from handrail.contract.schema.locked_shapes import LOCKED_SHAPES
from handrail.contract.tool.decorator import yields
from handrail.contract.tool.names import FACE_IDS, LOCKED_IDS, fault_in_id, is_session_internal, nearest, wire_name
from handrail.contract.tool.native import AT_PROVIDER
from handrail.contract.tool.settings import SettingsLayer, in_force, line_to_add
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool, checked
from handrail.registry.pins import NO_PINS, Definition, Pins, review
from handrail.registry.sources.code import NativeTool
from handrail.registry.sources.executables import ExecutableTool
from handrail.runtime.secrets import NO_SECRETS, SecretStore, secret_settings

# Availability of a sound tool here: its status, and the reason if it is withheld.


class Reason(NamedTuple):
    """Why a tool is off, and the status that gives it."""

    status: Status
    text: str


NOT_BUILT = "its executable is not built, and no start builds one: run handrail build AGENT, and start from the folder that it writes"
PROVIDER = "the model's provider"
"""``Entry.confined_by`` of what it carries out itself."""
_GRAVEST: tuple[Status, ...] = ("disabled", "quarantined", "offline", "error", "available")


def verdict(spec: ToolSpec, foreign: Foreign | None, reasons: Iterable[Reason]) -> tuple[str | None, Status]:
    """What keeps a tool from running here, as ``Entry.withheld`` says it, and the status that follows.

    Without anything in its way it is ``connected`` where somebody had to give it something first, else ``system``.
    """
    found = sorted(reasons, key=lambda reason: _GRAVEST.index(reason.status))
    if found:
        texts = [f"available, but {one.text}" if one.status == "available" else one.text for one in found]
        return "; ".join(texts), found[0].status
    if spec.provider_support:
        return AT_PROVIDER, "connected"
    given = foreign is not None or bool(spec.secrets or spec.config)
    return None, "connected" if given else "system"


def confinement_of(tool: Tool, tier: Tier) -> str:
    """Who holds a tool back, as every result says it: ``runtime``, the tier, or both for Python that runs programs."""
    if tool.spec.provider_support:
        return PROVIDER
    holder = UNCONFINED if tool.spec.id in tier.unconfined else tier.name
    if not tool.trusted:
        return holder
    return f"{IN_PROCESS}+{holder}" if tool.spec.requires.shell else IN_PROCESS


def reasons_to_withhold(
    tool: Tool, tier: Tier, spec: ToolSpec | None = None, *, secrets: SecretStore = NO_SECRETS
) -> list[Reason]:
    """Why this kernel must not run a sound tool, each in a sentence for its operator; none where it may.

    What cannot be enforced or served is refused; nothing runs with less than it declares, or less confined.

    :param spec: what is asked of the tool, where that is more than its own
    """
    spec = spec or tool.spec
    reasons = [*_reasons_by_configuration(tool, spec, secrets)]
    starts_programs = spec.id not in tier.unconfined and (not tool.trusted or bool(spec.requires.shell))
    if spec.requires.net.hosts and starts_programs and tier.confines and not tier.opens_hosts:
        hosts = ", ".join(spec.requires.net.hosts)
        why = "; ".join(f"{one.detail} ({one.remedy})" for one in tier.mechanisms if one.name == "hosts")
        text = f"it starts programs and requires hosts ({hosts}), and no sandbox here opens the network to single hosts"
        reasons.append(Reason("error", f"{text}: {why}" if why else text))
    reasons += _reasons_by_kind(tool, spec)
    if not tier.confines and starts_programs:
        remedy = f" ({tier.remedy})" if tier.remedy else ""
        text = f"it starts programs, which cannot be confined on this machine: {tier.detail}{remedy}"
        reasons.append(Reason("error", text))
    return reasons


def _reasons_by_configuration(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> Iterator[Reason]:
    """Yield the reasons that its operator does away with by giving the tool something."""
    if unknown := _unknown_secrets(tool, spec, secrets):
        yield Reason("available", f"needs configuration: it declares secrets that are not known here: {unknown}")
    if unset := _unset_secrets(tool, spec, secrets):
        yield Reason("available", f"needs configuration: it has secret settings without a value: {unset}")
    needed = (key for key, one in spec.config.items() if one.required and one.default is None and not one.secret)
    if unset := [f"{key} ({spec.config[key].description}; add {line_to_add(spec.id, key)})" for key in needed]:
        text = f"needs configuration: it has settings without a value: {', '.join(unset)}"
        yield Reason("available", f"{text}. A program gives them with open_kernel(tool_config=…)")
    if isinstance(tool, ExecutableTool) and tool.unbuilt:
        yield Reason("available", NOT_BUILT)


def _reasons_by_kind(tool: Tool, spec: ToolSpec) -> Iterator[Reason]:
    """Yield the reasons in what it declares and no tool of its kind is given."""
    if spec.mode == "stateful" and not tool.trusted:
        text = f"its mode is {spec.mode!r}, which only Python tools can have: an executable that keeps something between calls is persistent"
        yield Reason("error", text)
    if tool.trusted and spec.cancellable == "process":
        yield Reason("error", "it asks for a worker process of its own, and functions run in this process only")


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
        return ", ".join(
            f"{key} (the process that brought the tool has not set it; add {line_to_add(spec.id, key, secret=True)} there)"
            for key in needed
            if key not in tool.own_secrets
        )
    return ", ".join(why for key in needed if (why := secrets.reason_unset(spec, key)) is not None)


_LOCKED = frozenset(LOCKED_IDS)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What decides whether the tools of a generation can be used, beside their own declarations.

    :param tier: what this machine can enforce; what it cannot confine is withheld with the reason
    :param secrets: what tools may be given; one that declares another is withheld
    :param settings: what the operator sets for single tools, the weakest layer first
    """

    tier: Tier
    secrets: SecretStore = NO_SECRETS
    settings: tuple[SettingsLayer, ...] = ()

    def of(self, tool_id: str) -> tuple[SettingsLayer, ...]:
        """The layers that set anything for a tool."""
        return tuple(layer for layer in self.settings if tool_id in layer.tools) if self.settings else ()


@dataclass(slots=True)
class Memory:
    """The result of the last look through an agent's sources, so that only what is new is checked.

    :ivar found: each source with what it had, in order
    :ivar entries: what became of them, by id
    :ivar approved: by foreign source, the definitions that were approved
    """

    conditions: Conditions | None = None
    found: tuple[tuple[Source, Loaded], ...] = ()
    entries: Mapping[str, Entry] = field(default_factory=dict[str, Entry])
    approved: dict[str, Mapping[str, Definition]] = field(default_factory=dict[str, Mapping[str, Definition]])


def load_generation(
    sources: Sequence[Source],
    *,
    tier: Tier,
    number: int = 1,
    aliases: Mapping[str, str] | None = None,
    strict: bool = False,
    secrets: SecretStore = NO_SECRETS,
    pins: Pins = NO_PINS,
    settings: Sequence[SettingsLayer] = (),
    memory: Memory | None = None,
    only: Collection[Source] | None = None,
) -> Generation:
    """Build a generation of what ``sources`` have, in their order: built-ins, global, agent, code, packages.

    :param tier: see :class:`Conditions`, as for ``secrets`` and ``settings``
    :param aliases: an operator's further names, alias to id
    :param strict: whether faults of foreign sources are fatal too
    :param pins: which definitions of foreign tools a person has approved; the others are off until one has
    :param memory: of the last time. Tools that are the same objects keep their entries; it is brought up to date
    :param only: the sources among ``sources`` that are looked through anew, where the others are those of the last time
    :raises LoadError: with all faults of the operator's own sources; the memory stays as it was
    """
    table = _Table(Conditions(tier, secrets, tuple(settings)), pins, memory or Memory())
    every: list[tuple[Source, Loaded]] = []
    for source, loaded in _looked_through(sources, table.before, only):
        every.append((source, loaded))
        table.take_source(source, loaded, strict=strict)
    table.refuse_unfit_settings()
    unheard = [loaded.unheard for _, loaded in every if loaded.unheard is not None]
    table.answer_locked_ids(unheard)
    table.faults += table.faults_in_aliases(aliases or {})
    if table.faults:
        raise LoadError(table.faults)
    names = {**table.shipped, **(aliases or {})}
    by_rank = sorted(every, key=lambda one: one[0].rank != "agent")  # an agent's own stand before everybody's
    offerings = [loaded.offering for _, loaded in by_rank if loaded.offering is not None]
    rows = table.rows.values()
    generation = Generation(number, rows, names, table.quarantined, offerings=offerings, unheard=unheard)
    if memory is not None:
        memory.conditions, memory.found = table.conditions, tuple(every)
        memory.entries, memory.approved = table.rows, table.approved
    return generation


def _looked_through(
    sources: Iterable[Source], before: Memory, only: Collection[Source] | None
) -> Iterator[tuple[Source, Loaded]]:
    """Yield each source with what it has, for :func:`load_generation`."""
    known: dict[int, Loaded] = {}
    if only is not None:
        fresh = {id(source) for source in only}
        known = {id(source): loaded for source, loaded in before.found if id(source) not in fresh}
    for source in sources:
        kept = known.get(id(source))
        yield source, _loaded(source) if kept is None else kept


def _loaded(source: Source) -> Loaded:
    """What a source has. One that is not the operator's own cannot keep the kernel from starting, whatever it does."""
    if not source.foreign:
        return source.load()
    try:
        return source.load()
    except Exception as error:
        name = str(getattr(source, "name", type(source).__name__))
        problem = f"cannot be looked through: {type(error).__name__}: {error}"
        return Loaded(faults=(Fault(name, "", problem),), name=name)


class _Table:
    """The tools taken so far, by id, and by wire name."""

    def __init__(self, conditions: Conditions, pins: Pins, before: Memory) -> None:
        self.conditions = conditions
        self.pins = pins
        self.before = before
        self.rows: dict[str, Entry] = {}
        self.ranks: dict[str, Rank] = {}
        self.ids_by_wire: dict[str, str] = {}
        self.approved: dict[str, Mapping[str, Definition]] = {}
        self.shipped: dict[str, str] = {}
        """Aliases of built-in tools."""
        self.unfit: dict[str, tuple[Tool, list[Fault]]] = {}
        """Of the operator's own tools, by id, what is set for each and that it does not take."""
        self.faults: list[Fault] = []
        self.quarantined: list[Fault] = []

    def take_source(self, source: Source, loaded: Loaded, *, strict: bool) -> None:
        """Add what one source has, and its faults.

        :param strict: whether faults of a foreign source are fatal too
        """
        if source.rank == "built-in":
            self.shipped.update(loaded.aliases)
        problems = (*loaded.faults, *self.take_all(loaded, source))
        if source.foreign:
            problems = tuple(replace(fault, foreign=loaded.name) for fault in problems)
        (self.faults if strict or not source.foreign else self.quarantined).extend(problems)

    def refuse_unfit_settings(self) -> None:
        """Make faults of the settings that tools do not take; not for a tool that an agent's overrides."""
        for tool_id, (tool, unfit) in self.unfit.items():
            row = self.rows.get(tool_id)
            if row is not None and row.tool is tool:
                self.faults += unfit

    def take_all(self, loaded: Loaded, source: Source) -> list[Fault]:
        """Add the tools of one source, or say everything that is wrong with those that cannot be."""
        rank, foreign = source.rank, Foreign(loaded.name, loaded.about) if source.foreign else None
        nothing: Mapping[str, Entry] = {}
        before = self.before.entries if self.conditions == self.before.conditions else nothing
        if foreign is not None:
            self.approved[foreign.name] = approved = self.pins.approved(foreign.name)
            if approved is not self.before.approved.get(foreign.name):
                before = nothing
        problems: list[Fault] = []
        for found in loaded.tools:
            tool = found.tool
            entry = before.get(tool.spec.id)
            if entry is None or not _is_of(entry, found, foreign):
                entry = self._judged(found, foreign, problems)
            tool_id, wire = (entry.id, entry.wire_name) if entry else (tool.spec.id, wire_name(tool.spec.id))
            if clash := self._clash(tool_id, wire, rank, foreign=source.foreign):
                problems.append(Fault(found.place, "llm.name", clash, tool=tool_id if source.foreign else ""))
            elif entry is not None:
                self.rows[tool_id], self.ranks[tool_id], self.ids_by_wire[wire] = entry, rank, tool_id
        return problems

    def _judged(self, found: Found, foreign: Foreign | None, problems: list[Fault]) -> Entry | None:
        """One tool as it can be had here; None for one with faults, which are added to ``problems``."""
        tool, place, tier = found.tool, found.place, self.conditions.tier
        spec = tool.spec
        known = checked(spec)
        faults = (*known.problems, *_faults_in_tool(tool))
        about = spec.id if foreign is not None else ""  # the operator's own are known by their places
        problems += [Fault(place, where, problem, tool=about) for where, problem in faults]
        if faults or known.schema is None:
            return None
        spec, unfit = in_force(spec, self.conditions.of(spec.id))
        if unfit and foreign is not None:
            problems += [replace(fault, tool=about) for fault in unfit]
            return None
        if unfit:
            self.unfit[spec.id] = (tool, unfit)
        if spec.only_its_command and spec.id in tier.unconfined:
            spec = replace(spec, only_its_command=False)  # nothing holds its programs to what was proved of the command
        withheld, status = verdict(spec, foreign, self._reasons(tool, spec, foreign))
        return Entry(
            spec,
            tool,
            known.schema,
            place,
            known.definition_hash,
            withheld,
            confined_by=confinement_of(tool, tier),
            blocking=bool(getattr(tool, "blocking", False)),
            untrusted=foreign_origin(spec, place, foreign=foreign is not None),
            foreign=foreign,
            status=status,
            declared=tool.spec,
        )

    def _reasons(self, tool: Tool, spec: ToolSpec, foreign: Foreign | None) -> list[Reason]:
        """The reasons why it is withheld; empty if it is not."""
        reasons = reasons_to_withhold(tool, self.conditions.tier, spec, secrets=self.conditions.secrets)
        enabled = [layer.tools[spec.id].enabled for layer in self.conditions.of(spec.id)]
        if not all(enabled):
            reasons.append(Reason("disabled", f'its operator has put it out: [tools."{spec.id}"] enabled = false'))
        if foreign is not None and (found := review(spec, self.approved[foreign.name])) is not None:
            how = f"look at it with: handrail sources review {foreign.name}"
            reasons.append(Reason("quarantined", f"{found.reason}; {how}"))
        return reasons

    def answer_locked_ids(self, unheard: Sequence[Unheard]) -> None:
        """Add the locked ids for which the operator has named a tool that answers.

        A tool of the operator's own that cannot answer is a fault. A foreign one, or one that is not there, withholds
        the locked id with the reason.

        :param unheard: the sources that have not said yet what they have
        """
        for layer in self.conditions.settings:
            for tool_id, settings in layer.tools.items():
                if settings.answered_by is not None and tool_id in LOCKED_SHAPES and tool_id not in self.rows:
                    self._answer(tool_id, settings.answered_by, layer, unheard)

    def _answer(self, tool_id: str, by: str, layer: SettingsLayer, unheard: Sequence[Unheard]) -> None:
        entry = self.rows.get(by)
        if entry is None:
            self._withhold_unanswered(tool_id, by, layer, unheard)
            return
        shape = LOCKED_SHAPES[tool_id]
        problems = list(shape.problems(tool_id, entry.spec, entry.schema))
        text = f"{by} cannot answer for {tool_id}: {'; '.join(problems)}"
        if problems and entry.foreign is None:
            self.faults.append(layer.fault(tool_id, text))
            return
        reasons = [Reason("error", text)] if problems else []
        if entry.withheld is not None:
            reasons.append(Reason(entry.status, f"{by} answers for it, and that tool is withheld: {entry.withheld}"))
        made = self._locked(
            entry.tool, shape.declared(tool_id, entry.spec), f"{by} ({entry.source})", entry.confined_by, reasons
        )
        self.rows[tool_id] = replace(
            made,
            definition_hash=shape.definition_of(tool_id, entry.declared or entry.spec),
            blocking=entry.blocking,
            untrusted=entry.untrusted,
            answered_by=replace(entry, spec=replace(entry.spec, max_output=made.spec.max_output)),
        )
        self.ids_by_wire[tool_id] = tool_id

    def _withhold_unanswered(self, tool_id: str, by: str, layer: SettingsLayer, unheard: Sequence[Unheard]) -> None:
        """Add a locked id for which a tool is to answer that is not there."""
        known = Generation(0, (), unheard=unheard).awaited(by)
        close = nearest(by, [one for one in self.rows if one not in _LOCKED], 1)
        hint = known or (f"did you mean {close[0]}?" if close else "handrail tools lists the ids")
        text = f"{by} is to answer for it, and there is no such tool; {hint}"
        reasons = [Reason("offline" if known else "error", text)]
        absent = _Absent(tool_id)
        self.rows[tool_id] = self._locked(absent, absent.spec, layer.source, IN_PROCESS, reasons)
        self.ids_by_wire[tool_id] = tool_id

    def _locked(
        self, answering: Tool, declared: ToolSpec, source: str, confined_by: str, reasons: list[Reason]
    ) -> Entry:
        """The entry of a locked id that another tool answers for, in force as its operator has set it."""
        tool_id = declared.id
        layers = self.conditions.of(tool_id)
        spec, unfit = in_force(replace(declared, config={}), layers)
        self.faults += unfit
        if not all(one.tools[tool_id].enabled for one in layers):
            reasons.append(Reason("disabled", f'its operator has put it out: [tools."{tool_id}"] enabled = false'))
        withheld, status = verdict(spec, None, reasons)
        known = checked(spec)
        assert known.schema is not None, "the shape of a locked id is sound"
        return Entry(
            spec,
            answering,
            known.schema,
            source,
            known.definition_hash,
            withheld,
            confined_by=confined_by,
            status="connected" if withheld is None else status,
            declared=answering.spec,
        )

    def _clash(self, tool_id: str, wire: str, rank: Rank, *, foreign: bool) -> str | None:
        if foreign and (tool_id in FACE_IDS or wire in FACE_IDS):
            return (
                f"{tool_id!r} is kept for clients that call tools by it; rename this one, or give its server a prefix"
            )
        if rank != "built-in":
            if tool_id in _LOCKED:
                return f"{tool_id!r} is a locked id, which only the built-in tool may have; rename this one"
            if is_session_internal(tool_id):
                return f"{tool_id!r} is kept for a built-in tool of the session itself, which runs unasked; rename this one"
            if tool_id in self.shipped:
                return f"{tool_id!r} is another name of the built-in tool {self.shipped[tool_id]!r}; rename this one"
        same_wire = self.ids_by_wire.get(wire)
        if same_wire is None:
            return None
        other, before = self.rows[same_wire], self.ranks[same_wire]
        if same_wire != tool_id:
            return f"{tool_id!r} and {same_wire!r} from {other.source} would both be {wire!r} to a model; rename one of the two"
        if before == "built-in" and rank != "built-in":
            return f"{tool_id!r} is a built-in tool, and nothing may override one; rename this one"
        if before == "global" and rank == "agent":
            return None
        return f"{tool_id!r} is already the id of the tool from {other.source}; rename one of the two"

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


def _is_of(entry: Entry, found: Found, foreign: Foreign | None) -> bool:
    """Whether an entry was made of the very tool that was found, of the same source."""
    return (
        entry.tool is found.tool
        and entry.declared is found.tool.spec
        and entry.source == found.place
        and entry.foreign == foreign
    )


class _Absent(Tool):
    """Stands behind a locked id for which a tool is to answer that is not there. It is withheld, so it is never run."""

    def __init__(self, tool_id: str) -> None:
        shape = LOCKED_SHAPES[tool_id]
        self.spec = ToolSpec(tool_id, shape.description, shape.parameters, kind=shape.kind, targets=shape.targets)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        raise ToolError(f"no tool answers for {self.spec.id} here", kind="unavailable")


def _faults_in_tool(tool: Tool) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if tool.spec.provider_support and not isinstance(tool, NativeTool):
        found.append(("provider_support", "only an agent's manifest names what a provider carries out; leave it out"))
    if tool.trusted:
        found += _faults_of_python(tool.spec)
        if (fault := _fault_in_steps(tool)) is not None:
            found.append(("runtime.mode", fault))
    return found


def _fault_in_steps(tool: Tool) -> str | None:
    """What a tool does and what its mode says have to agree."""
    if tool.goes_on is not None:
        return None
    if tool.spec.mode == "stateful":
        return None if yields(tool) else "is 'stateful', and its execute does not yield; make it an async generator"
    return 'its execute yields; say "stateful" where each step is to be a call of its own' if yields(tool) else None


def _faults_of_python(spec: ToolSpec) -> list[tuple[str, str]]:
    """Fields that only an executable can honour; none is silently ignored."""
    found: list[tuple[str, str]] = []
    if spec.persistent:
        found.append(("runtime.persistent", "only an executable is kept running between calls; leave it out"))
    if spec.build:
        found.append(("runtime.build", "only the executable of a tool folder is built; leave it out"))
    if spec.exec_path is not None:
        found.append(("runtime.exec_path", "only a tool in a tool folder has an executable; leave it out"))
    return found
