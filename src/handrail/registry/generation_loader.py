"""Loading of sources into a generation: in order, checked whole, with every fault at once.

A later source never takes a name from an earlier one, with one exception: an agent's folder overrides a tool of the global
folder with the same id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from handrail.contract.errors import Diagnostic, LoadError, ToolError
from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.schema.locked_tool_shapes import LOCKED_SHAPES
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.struct import Struct, field
from handrail.contract.tool.decorator import is_generator_tool
from handrail.contract.tool.operator_tool_settings import (
    ToolSettingsLayer,
    apply_tool_settings,
    format_tool_setting_line,
)
from handrail.contract.tool.provider_tools import PROVIDER_ONLY_TEXT
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import (
    FRONTEND_IDS,
    LOCKED_IDS,
    find_tool_id_fault,
    is_session_internal_tool,
    nearest_names,
    wire_name,
)
from handrail.contract.tool.tool_protocol import Tool, check_spec
from handrail.contract.tool_generation import (
    IN_PROCESS,
    UNCONFINED,
    DiscoveredTool,
    Generation,
    SourceContents,
    SourceRank,
    ThirdPartySourceInfo,
    ToolEntry,
    ToolSource,
    ToolState,
    UnlistedSource,
    describe_untrusted_origin,
)
from handrail.registry.definition_pins import NO_PINS, DefinitionPins, ThirdPartyDefinition, find_required_review
from handrail.registry.sources.code_sources import ProviderToolPlaceholder
from handrail.registry.sources.executable_tools import PerCallExecutableTool
from handrail.runtime.secret_store import NO_SECRETS, SecretStore, list_secret_setting_keys

# Availability: the status of a valid tool on this machine, and the reason if it is unavailable.


class UnavailableReason(NamedTuple):
    """A reason why a tool is unavailable, and the resulting status."""

    status: ToolState
    text: str


NOT_BUILT = "its executable is not built; run handrail build AGENT, and start Handrail with the folder that it writes"
PROVIDER_CONFINEMENT = "the model's provider"
"""``ToolEntry.sandbox`` of a tool that the model's provider carries out."""
_STATUSES_BY_SEVERITY: tuple[ToolState, ...] = ("disabled", "quarantined", "offline", "error", "available")


def resolve_status(
    spec: ToolSpec, foreign: ThirdPartySourceInfo | None, reasons: Iterable[UnavailableReason]
) -> tuple[str | None, ToolState]:
    """Return the text for ``ToolEntry.unavailable_reason`` (None if the tool can run) and the status of a tool.

    A tool that can run is ``connected`` if the user configured or approved it, else ``system``.
    """
    found = sorted(reasons, key=lambda reason: _STATUSES_BY_SEVERITY.index(reason.status))
    if found:
        return "; ".join(one.text for one in found), found[0].status
    if spec.provider_support:
        return PROVIDER_ONLY_TEXT, "connected"
    given = foreign is not None or bool(spec.secrets or spec.config)
    return None, "connected" if given else "system"


def describe_confinement(tool: Tool, tier: SandboxTier) -> str:
    """Return the confinement of a tool: ``runtime``, the tier, or both for Python that runs programs."""
    if tool.spec.provider_support:
        return PROVIDER_CONFINEMENT
    holder = UNCONFINED if tool.spec.id in tier.unconfined else tier.name
    if not tool.trusted:
        return holder
    return f"{IN_PROCESS}+{holder}" if tool.spec.requires.shell else IN_PROCESS


def _find_confinement_gap(spec: ToolSpec, tier: SandboxTier) -> str:
    """Return why no rule with ``{confined}`` holds for calls of a tool on this machine; empty if one may."""
    if spec.id in tier.unconfined:
        return f"{spec.id} runs without a sandbox, because the operator listed it in [sandbox] unconfined"
    if not tier.is_confining:
        return f"programs cannot be confined on this machine: {tier.detail}"
    return (
        f"the sandbox of this machine lacks {' and '.join(tier.missing_confinement_layers)}"
        if tier.missing_confinement_layers
        else ""
    )


def find_unavailable_reasons(
    tool: Tool, tier: SandboxTier, spec: ToolSpec | None = None, *, secrets: SecretStore = NO_SECRETS
) -> list[UnavailableReason]:
    """Return the reasons why this kernel must not run a valid tool; empty if it may.

    Each reason is a sentence for the operator. The kernel refuses a tool if it cannot enforce or provide all that the tool
    declares.

    :param spec: the requirements, if they exceed those of the tool itself
    """
    spec = spec or tool.spec
    reasons = [*_reasons_by_configuration(tool, spec, secrets)]
    starts_programs = spec.id not in tier.unconfined and (not tool.trusted or bool(spec.requires.shell))
    if spec.requires.net.hosts and starts_programs and tier.is_confining and not tier.supports_per_host_network:
        hosts = ", ".join(spec.requires.net.hosts)
        why = "; ".join(f"{one.detail} ({one.remedy})" for one in tier.mechanisms if one.name == "hosts")
        text = (
            f"it starts programs and requires hosts ({hosts}), and no sandbox here can open the network to single hosts"
        )
        reasons.append(UnavailableReason("error", f"{text}: {why}" if why else text))
    reasons += _reasons_by_kind(tool, spec)
    if not tier.is_confining and starts_programs:
        remedy = f" ({tier.remedy})" if tier.remedy else ""
        text = f"it starts programs, which cannot be confined on this machine: {tier.detail}{remedy}"
        reasons.append(UnavailableReason("error", text))
    return reasons


def _reasons_by_configuration(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> Iterator[UnavailableReason]:
    """Yield the reasons that the operator can remove by configuration."""
    if unknown := _unknown_secrets(tool, spec, secrets):
        yield UnavailableReason("available", f"it needs configuration; secrets that are not known here: {unknown}")
    if unset := _unset_secrets(tool, spec, secrets):
        yield UnavailableReason("available", f"it needs configuration; secret settings without a value: {unset}")
    needed = (key for key, one in spec.config.items() if one.required and one.default is None and not one.secret)
    if unset := [
        f"{key} ({spec.config[key].description}; add {format_tool_setting_line(spec.id, key)})" for key in needed
    ]:
        text = f"it needs configuration; settings without a value: {', '.join(unset)}"
        yield UnavailableReason("available", f"{text}. A program passes them with open_kernel(tool_config=…)")
    if isinstance(tool, PerCallExecutableTool) and tool.unbuilt:
        yield UnavailableReason("available", NOT_BUILT)


def _reasons_by_kind(tool: Tool, spec: ToolSpec) -> Iterator[UnavailableReason]:
    """Yield the reasons that follow from declarations that no tool of this kind supports."""
    if spec.mode == "stateful" and not tool.trusted:
        text = f"its mode is {spec.mode!r}, which only Python tools support; declare an executable that keeps state as persistent"
        yield UnavailableReason("error", text)
    if tool.trusted and spec.cancellable == "process":
        yield UnavailableReason("error", "it requests a worker process, and functions run only in this process")


def _unknown_secrets(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> str:
    """Return the secrets that are not available, each with the operator's next step."""
    if tool.own_secrets is not None:
        return ", ".join(
            f"{name} (the client process that registered the tool has no secret of this name)"
            for name in spec.secrets
            if name not in tool.own_secrets
        )
    return ", ".join(why for name in spec.secrets if (why := secrets.explain_missing_secret(name)) is not None)


def _unset_secrets(tool: Tool, spec: ToolSpec, secrets: SecretStore) -> str:
    """Return the required secret settings without a value, each with the operator's next step."""
    needed = [key for key in list_secret_setting_keys(spec) if spec.config[key].required]
    if tool.own_secrets is not None:
        return ", ".join(
            f"{key} (the client process that registered the tool has not set it; add "
            f"{format_tool_setting_line(spec.id, key, secret=True)} there)"
            for key in needed
            if key not in tool.own_secrets
        )
    return ", ".join(why for key in needed if (why := secrets.explain_unset_secret_setting(spec, key)) is not None)


_LOCKED = frozenset(LOCKED_IDS)


class LoadConditions(Struct, frozen=True):
    """The conditions, in addition to its own declaration, that decide whether a tool is available.

    :param tier: the confinement that this machine can enforce; a tool that needs more is unavailable
    :param secrets: the secrets that tools may receive; a tool that declares others is unavailable
    :param settings: the operator's settings for single tools, the weakest layer first
    """

    tier: SandboxTier
    secrets: SecretStore = NO_SECRETS
    settings: tuple[ToolSettingsLayer, ...] = ()

    def settings_of(self, tool_id: str) -> tuple[ToolSettingsLayer, ...]:
        """Return the layers that set a value for a tool."""
        return tuple(layer for layer in self.settings if tool_id in layer.tools) if self.settings else ()


class LoadCache(Struct):
    """The result of the last load of an agent's sources, so that the next load checks only new tools.

    :ivar found: each source with its result, in order
    :ivar entries: the resulting entries, by tool id
    :ivar approved: the approved definitions, by third-party source
    """

    conditions: LoadConditions | None = None
    found: tuple[tuple[ToolSource, SourceContents], ...] = ()
    entries: Mapping[str, ToolEntry] = field(default_factory=dict[str, ToolEntry])
    approved: dict[str, Mapping[str, ThirdPartyDefinition]] = field(
        default_factory=dict[str, Mapping[str, ThirdPartyDefinition]]
    )


def load_generation(
    sources: Sequence[ToolSource],
    *,
    tier: SandboxTier,
    number: int = 1,
    aliases: Mapping[str, str] | None = None,
    strict: bool = False,
    secrets: SecretStore = NO_SECRETS,
    pins: DefinitionPins = NO_PINS,
    settings: Sequence[ToolSettingsLayer] = (),
    cache: LoadCache | None = None,
    only: Collection[ToolSource] | None = None,
) -> Generation:
    """Build a generation from ``sources``, in this order: built-ins, global, agent, code, packages.

    :param tier: see :class:`LoadConditions`, as for ``secrets`` and ``settings``
    :param aliases: the operator's additional names, alias to id
    :param strict: whether faults of third-party sources are fatal too
    :param pins: the approved definitions of third-party tools; the other tools stay off until the user approves them
    :param cache: the result of the last load; unchanged tools keep their entries. Updated on success
    :param only: the sources to load again; the others keep their last result
    :raises LoadError: with all faults of the operator's own sources
    """
    table = _GenerationBuilder(LoadConditions(tier, secrets, tuple(settings)), pins, cache or LoadCache())
    every: list[tuple[ToolSource, SourceContents]] = []
    for source, loaded in _load_sources(sources, table.before, only):
        every.append((source, loaded))
        table.add_source(source, loaded, strict=strict)
    table.report_unaccepted_tool_settings()
    unheard = [loaded.unlisted for _, loaded in every if loaded.unlisted is not None]
    table.resolve_answered_locked_ids(unheard)
    table.faults += table.find_alias_faults(aliases or {})
    if table.faults:
        raise LoadError(table.faults)
    names = {**table.shipped, **(aliases or {})}
    by_rank = sorted(every, key=lambda one: one[0].rank != "agent")  # an agent's own resources come first
    offerings = [loaded.resource_provider for _, loaded in by_rank if loaded.resource_provider is not None]
    rows = table.rows.values()
    generation = Generation(number, rows, names, table.quarantined, offerings=offerings, unheard=unheard)
    if cache is not None:
        cache.conditions, cache.found = table.conditions, tuple(every)
        cache.entries, cache.approved = table.rows, table.approved
    return generation


def _load_sources(
    sources: Iterable[ToolSource], previous: LoadCache, only: Collection[ToolSource] | None
) -> Iterator[tuple[ToolSource, SourceContents]]:
    """Yield each source with its content, for :func:`load_generation`."""
    known: dict[int, SourceContents] = {}
    if only is not None:
        fresh = {id(source) for source in only}
        known = {id(source): loaded for source, loaded in previous.found if id(source) not in fresh}
    for source in sources:
        kept = known.get(id(source))
        yield source, _load_source(source) if kept is None else kept


def _load_source(source: ToolSource) -> SourceContents:
    """Load one source. An error of a third-party source becomes a fault, so it does not stop the start."""
    if not source.is_third_party:
        return source.load()
    try:
        return source.load()
    except Exception as error:
        name = str(getattr(source, "name", type(source).__name__))
        problem = f"cannot be loaded: {type(error).__name__}: {error}"
        return SourceContents(faults=(Diagnostic(name, "", problem),), name=name)


class _GenerationBuilder:
    """The tools of the generation so far, by id and by wire name."""

    def __init__(self, conditions: LoadConditions, pins: DefinitionPins, before: LoadCache) -> None:
        self.conditions = conditions
        self.pins = pins
        self.before = before
        self.rows: dict[str, ToolEntry] = {}
        self.ranks: dict[str, SourceRank] = {}
        self.ids_by_wire: dict[str, str] = {}
        self.approved: dict[str, Mapping[str, ThirdPartyDefinition]] = {}
        self.shipped: dict[str, str] = {}
        """Aliases of built-in tools."""
        self.unfit: dict[str, tuple[Tool, list[Diagnostic]]] = {}
        """By tool id, the settings that one of the operator's own tools does not accept."""
        self.faults: list[Diagnostic] = []
        self.quarantined: list[Diagnostic] = []

    def add_source(self, source: ToolSource, loaded: SourceContents, *, strict: bool) -> None:
        """Add the tools and the faults of one source.

        :param strict: whether faults of a third-party source are fatal too
        """
        if source.rank == "built-in":
            self.shipped.update(loaded.aliases)
        problems = (*loaded.faults, *self.add_tools_of_source(loaded, source))
        if source.is_third_party:
            problems = tuple(replace(fault, third_party=loaded.name) for fault in problems)
        (self.faults if strict or not source.is_third_party else self.quarantined).extend(problems)

    def report_unaccepted_tool_settings(self) -> None:
        """Report settings that tools do not accept, except for a tool that an agent's tool overrides."""
        for tool_id, (tool, unfit) in self.unfit.items():
            if (row := self.rows.get(tool_id)) is not None and row.tool is tool:
                self.faults += unfit

    def add_tools_of_source(self, loaded: SourceContents, source: ToolSource) -> list[Diagnostic]:
        """Add the tools of one source and return the faults of those that are rejected."""
        rank, foreign = (
            source.rank,
            ThirdPartySourceInfo(loaded.name, loaded.description) if source.is_third_party else None,
        )
        nothing: Mapping[str, ToolEntry] = {}
        before = self.before.entries if self.conditions == self.before.conditions else nothing
        if foreign is not None:
            self.approved[foreign.name] = approved = self.pins.approved_definitions(foreign.name)
            if approved is not self.before.approved.get(foreign.name):
                before = nothing
        problems: list[Diagnostic] = []
        for found in loaded.tools:
            tool = found.tool
            entry = before.get(tool.spec.id)
            if entry is None or not _is_entry_of(entry, found, foreign):
                entry = self._build_entry(found, foreign, problems)
            tool_id, wire = (entry.id, entry.wire_name) if entry else (tool.spec.id, wire_name(tool.spec.id))
            if clash := self._find_clash(tool_id, wire, rank, foreign=source.is_third_party):
                problems.append(
                    Diagnostic(found.location, "llm.name", clash, tool=tool_id if source.is_third_party else "")
                )
            elif entry is not None:
                self.rows[tool_id], self.ranks[tool_id], self.ids_by_wire[wire] = entry, rank, tool_id
        return problems

    def _build_entry(
        self, found: DiscoveredTool, foreign: ThirdPartySourceInfo | None, problems: list[Diagnostic]
    ) -> ToolEntry | None:
        """Return the entry of one tool, or None if it has faults, which are added to ``problems``."""
        tool, place, tier = found.tool, found.location, self.conditions.tier
        spec = tool.spec
        known = check_spec(spec)
        faults = (*known.problems, *_faults_in_tool(tool))
        about = spec.id if foreign is not None else ""  # the operator knows their own tools by place
        problems += [Diagnostic(place, where, problem, tool=about) for where, problem in faults]
        if faults or known.schema is None:
            return None
        spec, unfit = apply_tool_settings(spec, self.conditions.settings_of(spec.id))
        if unfit and foreign is not None:
            problems += [replace(fault, tool=about) for fault in unfit]
            return None
        if unfit:
            self.unfit[spec.id] = (tool, unfit)
        if spec.single_command and (gap := _find_confinement_gap(spec, tier)):
            # An unconfined program may do more than the command proves.
            spec = replace(spec, single_command=spec.id not in tier.unconfined, confinement_gap=gap)
        unavailable_reason, status = resolve_status(spec, foreign, self._list_unavailable_reasons(tool, spec, foreign))
        return ToolEntry(
            spec,
            tool,
            known.schema,
            place,
            known.definition_hash,
            unavailable_reason,
            sandbox=describe_confinement(tool, tier),
            is_blocking=bool(getattr(tool, "blocking", False)),
            untrusted_source=describe_untrusted_origin(spec, place, third_party=foreign is not None),
            third_party=foreign,
            status=status,
            declared=tool.spec,
        )

    def _list_unavailable_reasons(
        self, tool: Tool, spec: ToolSpec, foreign: ThirdPartySourceInfo | None
    ) -> list[UnavailableReason]:
        """Return the reasons why a tool is unavailable; empty if it is available."""
        reasons = find_unavailable_reasons(tool, self.conditions.tier, spec, secrets=self.conditions.secrets)
        enabled = [layer.tools[spec.id].enabled for layer in self.conditions.settings_of(spec.id)]
        if not all(enabled):
            reasons.append(
                UnavailableReason("disabled", f'the operator has disabled it: [tools."{spec.id}"] enabled = false')
            )
        if foreign is not None and (found := find_required_review(spec, self.approved[foreign.name])) is not None:
            how = f"review it with: handrail sources review {foreign.name}"
            reasons.append(UnavailableReason("quarantined", f"{found.disabled_reason}; {how}"))
        return reasons

    def resolve_answered_locked_ids(self, unheard: Sequence[UnlistedSource]) -> None:
        """Add the locked ids for which the operator has named an answering tool.

        If a tool of the operator's own cannot answer, that is a fault. If a third-party tool cannot, or no such tool exists,
        the locked id is unavailable with the reason.

        :param unheard: the sources that have not listed their tools yet
        """
        for layer in self.conditions.settings:
            for tool_id, settings in layer.tools.items():
                if settings.answered_by is not None and tool_id in LOCKED_SHAPES:
                    self._add_answering_tool(tool_id, settings.answered_by, layer, unheard)

    def _add_answering_tool(
        self, tool_id: str, by: str, layer: ToolSettingsLayer, unheard: Sequence[UnlistedSource]
    ) -> None:
        if (entry := self.rows.get(by)) is None:
            self._add_unanswered_locked_id(tool_id, by, layer, unheard)
            return
        shape = LOCKED_SHAPES[tool_id]
        problems = list(shape.find_tool_incompatibilities(tool_id, entry.spec, entry.schema))
        text = f"{by} cannot answer for {tool_id}: {'; '.join(problems)}"
        if problems and entry.third_party is None:
            self.faults.append(layer.build_setting_fault(tool_id, text))
            return
        reasons = [UnavailableReason("error", text)] if problems else []
        if entry.unavailable_reason is not None:
            reasons.append(
                UnavailableReason(entry.status, f"{by} answers for it and is unavailable: {entry.unavailable_reason}")
            )
        made = self._build_locked_entry(
            entry.tool, shape.build_locked_spec(tool_id, entry.spec), f"{by} ({entry.source})", entry.sandbox, reasons
        )
        self.rows[tool_id] = replace(
            made,
            definition_hash=shape.definition_hash(tool_id, entry.declared or entry.spec),
            is_blocking=entry.is_blocking,
            untrusted_source=entry.untrusted_source,
            answered_by=replace(entry, spec=replace(entry.spec, max_output=made.spec.max_output)),
        )
        self.ids_by_wire[tool_id] = tool_id

    def _add_unanswered_locked_id(
        self, tool_id: str, by: str, layer: ToolSettingsLayer, unheard: Sequence[UnlistedSource]
    ) -> None:
        """Add a locked id whose answering tool does not exist."""
        known = Generation(0, (), unheard=unheard).describe_unlisted_sources(by)
        close = nearest_names(by, [one for one in self.rows if one not in _LOCKED], 1)
        hint = known or (f"did you mean {close[0]}?" if close else "handrail tools lists the ids")
        text = f"the tool {by} that should answer for it does not exist; {hint}"
        reasons = [UnavailableReason("offline" if known else "error", text)]
        absent = _AbsentTool(tool_id)
        self.rows[tool_id] = self._build_locked_entry(absent, absent.spec, layer.source, IN_PROCESS, reasons)
        self.ids_by_wire[tool_id] = tool_id

    def _build_locked_entry(
        self, answering: Tool, declared: ToolSpec, source: str, sandbox: str, reasons: list[UnavailableReason]
    ) -> ToolEntry:
        """Return the entry of a locked id that another tool answers for, with the operator's settings applied."""
        tool_id = declared.id
        layers = self.conditions.settings_of(tool_id)
        spec, unfit = apply_tool_settings(replace(declared, config={}), layers)
        self.faults += unfit
        if not all(one.tools[tool_id].enabled for one in layers):
            reasons.append(
                UnavailableReason("disabled", f'the operator has disabled it: [tools."{tool_id}"] enabled = false')
            )
        unavailable_reason, status = resolve_status(spec, None, reasons)
        known = check_spec(spec)
        assert known.schema is not None, "the shape of a locked id is sound"
        return ToolEntry(
            spec,
            answering,
            known.schema,
            source,
            known.definition_hash,
            unavailable_reason,
            sandbox=sandbox,
            status="connected" if unavailable_reason is None else status,
            declared=answering.spec,
        )

    def _find_clash(self, tool_id: str, wire: str, rank: SourceRank, *, foreign: bool) -> str | None:
        if foreign and (tool_id in FRONTEND_IDS or wire in FRONTEND_IDS):
            return (
                f"{tool_id!r} is reserved for clients that call tools by this name; rename this tool, or set a "
                "prefix for its server"
            )
        if rank != "built-in":
            if tool_id in _LOCKED:
                return f"{tool_id!r} is a locked id, which is reserved for the built-in tool; rename this tool"
            if is_session_internal_tool(tool_id):
                return (
                    f"{tool_id!r} is reserved for a built-in session tool, which requires no approval; rename this tool"
                )
            if tool_id in self.shipped:
                return f"{tool_id!r} is an alias of the built-in tool {self.shipped[tool_id]!r}; rename this tool"
        if (same_wire := self.ids_by_wire.get(wire)) is None:
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

    def find_alias_faults(self, aliases: Mapping[str, str]) -> list[Diagnostic]:
        found: list[Diagnostic] = []
        for alias, tool_id in aliases.items():
            if problem := find_tool_id_fault(alias):
                found.append(Diagnostic("aliases", alias, problem))
            elif alias in LOCKED_IDS or alias in self.rows or alias in self.ids_by_wire or alias in self.shipped:
                found.append(Diagnostic("aliases", alias, "is already the name of a tool; choose another alias"))
            if tool_id not in self.rows:
                close = nearest_names(tool_id, self.rows)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                found.append(Diagnostic("aliases", alias, f"tool {tool_id!r} does not exist{hint}"))
        return found


def _is_entry_of(entry: ToolEntry, found: DiscoveredTool, foreign: ThirdPartySourceInfo | None) -> bool:
    """Return whether an entry was built from this tool of this source."""
    return (
        entry.tool is found.tool
        and entry.declared is found.tool.spec
        and entry.source == found.location
        and entry.third_party == foreign
    )


class _AbsentTool(Tool):
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
    if tool.spec.provider_support and not isinstance(tool, ProviderToolPlaceholder):
        found.append(("provider_support", "only an agent's manifest can declare provider tools; remove this field"))
    if tool.trusted:
        found += _faults_of_executable_fields(tool.spec)
        if (fault := _fault_in_steps(tool)) is not None:
            found.append(("runtime.mode", fault))
    return found


def _fault_in_steps(tool: Tool) -> str | None:
    """Return the fault if a tool's mode does not match its implementation."""
    if tool.state_arguments is not None:
        return None
    if tool.spec.mode == "stateful":
        return (
            None
            if is_generator_tool(tool)
            else "is 'stateful', but its execute does not yield; make it an async generator"
        )
    return (
        'its execute yields; declare the mode "stateful" if each step should be a separate call'
        if is_generator_tool(tool)
        else None
    )


def _faults_of_executable_fields(spec: ToolSpec) -> list[tuple[str, str]]:
    """Return the faults for fields that only executables support, so that no field is silently ignored."""
    found: list[tuple[str, str]] = []
    if spec.persistent:
        found.append(("runtime.persistent", "only an executable can stay running between calls; remove this field"))
    if spec.build:
        found.append(("runtime.build", "only the executable of a tool folder can be built; remove this field"))
    if spec.exec_path is not None:
        found.append(("runtime.exec_path", "only a tool in a tool folder has an executable; remove this field"))
    return found
