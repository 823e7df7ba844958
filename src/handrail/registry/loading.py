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

# Availability: the status of a valid tool on this machine, and the reason if it is unavailable.


class Reason(NamedTuple):
    """A reason why a tool is unavailable, and the resulting status."""

    status: Status
    text: str


NOT_BUILT = "its executable is not built; run handrail build AGENT, and start Handrail with the folder that it writes"
PROVIDER = "the model's provider"
"""``Entry.confined_by`` of a tool that the model's provider carries out."""
_GRAVEST: tuple[Status, ...] = ("disabled", "quarantined", "offline", "error", "available")


def verdict(spec: ToolSpec, foreign: Foreign | None, reasons: Iterable[Reason]) -> tuple[str | None, Status]:
    """Return the text for ``Entry.withheld`` (None if the tool can run) and the status of a tool.

    A tool that can run is ``connected`` if the user configured or approved it, else ``system``.
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
    """Return the confinement of a tool: ``runtime``, the tier, or both for Python that runs programs."""
    if tool.spec.provider_support:
        return PROVIDER
    holder = UNCONFINED if tool.spec.id in tier.unconfined else tier.name
    if not tool.trusted:
        return holder
    return f"{IN_PROCESS}+{holder}" if tool.spec.requires.shell else IN_PROCESS


def reasons_to_withhold(
    tool: Tool, tier: Tier, spec: ToolSpec | None = None, *, secrets: SecretStore = NO_SECRETS
) -> list[Reason]:
    """Return the reasons why this kernel must not run a valid tool; empty if it may.

    Each reason is a sentence for the operator. The kernel refuses a tool if it cannot enforce or provide all that the tool
    declares.

    :param spec: the requirements, if they exceed those of the tool itself
    """
    spec = spec or tool.spec
    reasons = [*_reasons_by_configuration(tool, spec, secrets)]
    starts_programs = spec.id not in tier.unconfined and (not tool.trusted or bool(spec.requires.shell))
    if spec.requires.net.hosts and starts_programs and tier.confines and not tier.opens_hosts:
        hosts = ", ".join(spec.requires.net.hosts)
        why = "; ".join(f"{one.detail} ({one.remedy})" for one in tier.mechanisms if one.name == "hosts")
        text = (
            f"it starts programs and requires hosts ({hosts}), and no sandbox here can open the network to single hosts"
        )
        reasons.append(Reason("error", f"{text}: {why}" if why else text))
    reasons += _reasons_by_kind(tool, spec)
    if not tier.confines and starts_programs:
        remedy = f" ({tier.remedy})" if tier.remedy else ""
        text = f"it starts programs, which cannot be confined on this machine: {tier.detail}{remedy}"
        reasons.append(Reason("error", text))
    return reasons


def _reasons_by_configuration(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> Iterator[Reason]:
    """Yield the reasons that the operator can remove by configuration."""
    if unknown := _unknown_secrets(tool, spec, secrets):
        yield Reason("available", f"needs configuration: it declares secrets that are not known here: {unknown}")
    if unset := _unset_secrets(tool, spec, secrets):
        yield Reason("available", f"needs configuration: it has secret settings without a value: {unset}")
    needed = (key for key, one in spec.config.items() if one.required and one.default is None and not one.secret)
    if unset := [f"{key} ({spec.config[key].description}; add {line_to_add(spec.id, key)})" for key in needed]:
        text = f"needs configuration: it has settings without a value: {', '.join(unset)}"
        yield Reason("available", f"{text}. A program passes them with open_kernel(tool_config=…)")
    if isinstance(tool, ExecutableTool) and tool.unbuilt:
        yield Reason("available", NOT_BUILT)


def _reasons_by_kind(tool: Tool, spec: ToolSpec) -> Iterator[Reason]:
    """Yield the reasons that follow from declarations that no tool of this kind supports."""
    if spec.mode == "stateful" and not tool.trusted:
        text = (
            f"its mode is {spec.mode!r}, which only Python tools support; declare an executable that keeps a "
            "state as persistent"
        )
        yield Reason("error", text)
    if tool.trusted and spec.cancellable == "process":
        yield Reason("error", "it requests a worker process, and functions run only in this process")


def _unknown_secrets(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> str:
    """Return the secrets that are not available, each with the operator's next step."""
    if tool.own_secrets is not None:
        return ", ".join(
            f"{name} (the client process that registered the tool has no secret of this name)"
            for name in spec.secrets
            if name not in tool.own_secrets
        )
    return ", ".join(why for name in spec.secrets if (why := secrets.reason_missing(name)) is not None)


def _unset_secrets(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> str:
    """Return the required secret settings without a value, each with the operator's next step."""
    needed = [key for key in secret_settings(spec) if spec.config[key].required]
    if tool.own_secrets is not None:
        return ", ".join(
            f"{key} (the client process that registered the tool has not set it; add "
            f"{line_to_add(spec.id, key, secret=True)} there)"
            for key in needed
            if key not in tool.own_secrets
        )
    return ", ".join(why for key in needed if (why := secrets.reason_unset(spec, key)) is not None)


_LOCKED = frozenset(LOCKED_IDS)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions, in addition to its own declaration, that decide whether a tool is available.

    :param tier: the confinement that this machine can enforce; a tool that needs more is unavailable
    :param secrets: the secrets that tools may receive; a tool that declares others is unavailable
    :param settings: the operator's settings for single tools, the weakest layer first
    """

    tier: Tier
    secrets: SecretStore = NO_SECRETS
    settings: tuple[SettingsLayer, ...] = ()

    def of(self, tool_id: str) -> tuple[SettingsLayer, ...]:
        """Return the layers that set a value for a tool."""
        return tuple(layer for layer in self.settings if tool_id in layer.tools) if self.settings else ()


@dataclass(slots=True)
class Memory:
    """The result of the last load of an agent's sources, so that the next load checks only new tools.

    :ivar found: each source with its result, in order
    :ivar entries: the resulting entries, by tool id
    :ivar approved: the approved definitions, by third-party source
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
    """Build a generation from ``sources``, in this order: built-ins, global, agent, code, packages.

    :param tier: see :class:`Conditions`, as for ``secrets`` and ``settings``
    :param aliases: the operator's additional names, alias to id
    :param strict: whether faults of third-party sources are fatal too
    :param pins: the approved definitions of third-party tools; the other tools stay off until the user approves them
    :param memory: the result of the last load; unchanged tools keep their entries. Updated on success
    :param only: the sources to load again; the others keep their last result
    :raises LoadError: with all faults of the operator's own sources
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
    by_rank = sorted(every, key=lambda one: one[0].rank != "agent")  # an agent's own resources come first
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
    """Yield each source with its content, for :func:`load_generation`."""
    known: dict[int, Loaded] = {}
    if only is not None:
        fresh = {id(source) for source in only}
        known = {id(source): loaded for source, loaded in before.found if id(source) not in fresh}
    for source in sources:
        kept = known.get(id(source))
        yield source, _loaded(source) if kept is None else kept


def _loaded(source: Source) -> Loaded:
    """Load one source. An error of a third-party source becomes a fault, so it does not stop the start."""
    if not source.foreign:
        return source.load()
    try:
        return source.load()
    except Exception as error:
        name = str(getattr(source, "name", type(source).__name__))
        problem = f"cannot be loaded: {type(error).__name__}: {error}"
        return Loaded(faults=(Fault(name, "", problem),), name=name)


class _Table:
    """The tools of the generation so far, by id and by wire name."""

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
        """By tool id, the settings that one of the operator's own tools does not accept."""
        self.faults: list[Fault] = []
        self.quarantined: list[Fault] = []

    def take_source(self, source: Source, loaded: Loaded, *, strict: bool) -> None:
        """Add the tools and the faults of one source.

        :param strict: whether faults of a third-party source are fatal too
        """
        if source.rank == "built-in":
            self.shipped.update(loaded.aliases)
        problems = (*loaded.faults, *self.take_all(loaded, source))
        if source.foreign:
            problems = tuple(replace(fault, foreign=loaded.name) for fault in problems)
        (self.faults if strict or not source.foreign else self.quarantined).extend(problems)

    def refuse_unfit_settings(self) -> None:
        """Report settings that tools do not accept, except for a tool that an agent's tool overrides."""
        for tool_id, (tool, unfit) in self.unfit.items():
            row = self.rows.get(tool_id)
            if row is not None and row.tool is tool:
                self.faults += unfit

    def take_all(self, loaded: Loaded, source: Source) -> list[Fault]:
        """Add the tools of one source and return the faults of those that are rejected."""
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
        """Return the entry of one tool, or None if it has faults, which are added to ``problems``."""
        tool, place, tier = found.tool, found.place, self.conditions.tier
        spec = tool.spec
        known = checked(spec)
        faults = (*known.problems, *_faults_in_tool(tool))
        about = spec.id if foreign is not None else ""  # the operator knows their own tools by place
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
            spec = replace(spec, only_its_command=False)  # its programs may do more than the command proves
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
        """Return the reasons why a tool is unavailable; empty if it is available."""
        reasons = reasons_to_withhold(tool, self.conditions.tier, spec, secrets=self.conditions.secrets)
        enabled = [layer.tools[spec.id].enabled for layer in self.conditions.of(spec.id)]
        if not all(enabled):
            reasons.append(Reason("disabled", f'the operator has disabled it: [tools."{spec.id}"] enabled = false'))
        if foreign is not None and (found := review(spec, self.approved[foreign.name])) is not None:
            how = f"review it with: handrail sources review {foreign.name}"
            reasons.append(Reason("quarantined", f"{found.reason}; {how}"))
        return reasons

    def answer_locked_ids(self, unheard: Sequence[Unheard]) -> None:
        """Add the locked ids for which the operator has named an answering tool.

        If a tool of the operator's own cannot answer, that is a fault. If a third-party tool cannot, or no such tool exists,
        the locked id is unavailable with the reason.

        :param unheard: the sources that have not listed their tools yet
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
            reasons.append(Reason(entry.status, f"{by} answers for it and is unavailable: {entry.withheld}"))
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
        """Add a locked id whose answering tool does not exist."""
        known = Generation(0, (), unheard=unheard).awaited(by)
        close = nearest(by, [one for one in self.rows if one not in _LOCKED], 1)
        hint = known or (f"did you mean {close[0]}?" if close else "handrail tools lists the ids")
        text = f"the tool {by} that should answer for it does not exist; {hint}"
        reasons = [Reason("offline" if known else "error", text)]
        absent = _Absent(tool_id)
        self.rows[tool_id] = self._locked(absent, absent.spec, layer.source, IN_PROCESS, reasons)
        self.ids_by_wire[tool_id] = tool_id

    def _locked(
        self, answering: Tool, declared: ToolSpec, source: str, confined_by: str, reasons: list[Reason]
    ) -> Entry:
        """Return the entry of a locked id that another tool answers for, with the operator's settings applied."""
        tool_id = declared.id
        layers = self.conditions.of(tool_id)
        spec, unfit = in_force(replace(declared, config={}), layers)
        self.faults += unfit
        if not all(one.tools[tool_id].enabled for one in layers):
            reasons.append(Reason("disabled", f'the operator has disabled it: [tools."{tool_id}"] enabled = false'))
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
                f"{tool_id!r} is reserved for clients that call tools by this name; rename this tool, or set a "
                "prefix for its server"
            )
        if rank != "built-in":
            if tool_id in _LOCKED:
                return f"{tool_id!r} is a locked id, which is reserved for the built-in tool; rename this tool"
            if is_session_internal(tool_id):
                return (
                    f"{tool_id!r} is reserved for a built-in session tool, which requires no approval; rename this tool"
                )
            if tool_id in self.shipped:
                return f"{tool_id!r} is an alias of the built-in tool {self.shipped[tool_id]!r}; rename this tool"
        same_wire = self.ids_by_wire.get(wire)
        if same_wire is None:
            return None
        other, before = self.rows[same_wire], self.ranks[same_wire]
        if same_wire != tool_id:
            return (
                f"{tool_id!r} and {same_wire!r} from {other.source} would have the same wire name {wire!r}; "
                "rename one of them"
            )
        if before == "built-in" and rank != "built-in":
            return f"{tool_id!r} is a built-in tool, which no tool may override; rename this tool"
        if before == "global" and rank == "agent":
            return None
        return f"{tool_id!r} is already the id of the tool from {other.source}; rename one of them"

    def faults_in_aliases(self, aliases: Mapping[str, str]) -> list[Fault]:
        found: list[Fault] = []
        for alias, tool_id in aliases.items():
            if problem := fault_in_id(alias):
                found.append(Fault("aliases", alias, problem))
            elif alias in LOCKED_IDS or alias in self.rows or alias in self.ids_by_wire or alias in self.shipped:
                found.append(Fault("aliases", alias, "is already the name of a tool; choose another alias"))
            if tool_id not in self.rows:
                close = nearest(tool_id, self.rows)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                found.append(Fault("aliases", alias, f"tool {tool_id!r} does not exist{hint}"))
        return found


def _is_of(entry: Entry, found: Found, foreign: Foreign | None) -> bool:
    """Return whether an entry was built from this tool of this source."""
    return (
        entry.tool is found.tool
        and entry.declared is found.tool.spec
        and entry.source == found.place
        and entry.foreign == foreign
    )


class _Absent(Tool):
    """A placeholder for a locked id whose answering tool does not exist. It never runs."""

    def __init__(self, tool_id: str) -> None:
        shape = LOCKED_SHAPES[tool_id]
        self.spec = ToolSpec(tool_id, shape.description, shape.parameters, kind=shape.kind, targets=shape.targets)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        raise ToolError(
            f"Tool {self.spec.id} is not available: the tool that should answer for it does not exist. Ask "
            "the user to correct `answered_by` in the settings.",
            kind="unavailable",
        )


def _faults_in_tool(tool: Tool) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if tool.spec.provider_support and not isinstance(tool, NativeTool):
        found.append(("provider_support", "only an agent's manifest can declare provider tools; remove this field"))
    if tool.trusted:
        found += _faults_of_python(tool.spec)
        if (fault := _fault_in_steps(tool)) is not None:
            found.append(("runtime.mode", fault))
    return found


def _fault_in_steps(tool: Tool) -> str | None:
    """Return the fault if a tool's mode does not match its implementation."""
    if tool.goes_on is not None:
        return None
    if tool.spec.mode == "stateful":
        return None if yields(tool) else "is 'stateful', but its execute does not yield; make it an async generator"
    return (
        'its execute yields; declare the mode "stateful" if each step should be a separate call'
        if yields(tool)
        else None
    )


def _faults_of_python(spec: ToolSpec) -> list[tuple[str, str]]:
    """Return the faults for fields that only executables support, so that no field is silently ignored."""
    found: list[tuple[str, str]] = []
    if spec.persistent:
        found.append(("runtime.persistent", "only an executable can stay running between calls; remove this field"))
    if spec.build:
        found.append(("runtime.build", "only the executable of a tool folder can be built; remove this field"))
    if spec.exec_path is not None:
        found.append(("runtime.exec_path", "only a tool in a tool folder has an executable; remove this field"))
    return found
