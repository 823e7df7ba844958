"""Hand-written wire forms: tools and their generations, calls and their answers, rules, errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NoReturn, cast

from handrail.config.settings import CatalogSettings
from handrail.contract.call import Answer, ProposedCall, Result
from handrail.contract.codec import Malformed, reader_of, write
from handrail.contract.doors.offers import Listing, PromptSpec, ResourceSpec, ResourceTemplate, SourceRequest
from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import Fault, HandrailError, LoadError, LogUnavailable, StartError, ToolError, UsageError
from handrail.contract.generation import Entry, Foreign, Found, Generation
from handrail.contract.modes import Mode
from handrail.contract.rules import RuleEntry
from handrail.contract.schema.schema import compile_schema
from handrail.contract.tool.decorator import FunctionTool
from handrail.contract.tool.settings import ToolConfig, ToolSettings
from handrail.contract.tool.spec import GoesOn, ToolSpec
from handrail.contract.tool.tool import OfSpecs, Tool
from handrail.contract.tool.triggers import TriggerTool
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Refused
from handrail.policy.rules.rules import RuleBook, parse_rule
from handrail.registry.sources.code import tools_among
from handrail.registry.sources.offerings import shape_of
from handrail.runtime.secrets import NO_SECRETS, SecretStore, secret_settings
from handrail.store.encoding import decode, encode

_dumped: OfSpecs[dict[str, Any]] = OfSpecs(lambda spec: write(ToolSpec, spec))
"""Encoded specs, cached by spec, because most tools of a generation were in the previous one."""

_tuple: Any = tuple
_new_answer: Callable[..., Answer] = _tuple.__new__
"""Create an ``Answer`` in half the time of its constructor."""

_ERRORS: Mapping[str, type[HandrailError]] = {
    error.__name__: error for error in (UsageError, LogUnavailable, StartError)
}


class Shown(Tool):
    """A tool in a client process, without its code. The lease holder runs its calls."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        raise UsageError(
            f"Cannot run `{self.spec.id}` in this process: the process that holds the workspace runs it. "
            "Call it through a session."
        )


# ── tools ────────────────────────────────────────────────────────────────────────────────────────

TriggerKind = Literal["", "wait", "time"]
"""The kind of trigger class that a tool is: none, one that waits, or one with times."""
_MAX_SOURCE = 300


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a tool that a client process registers.

    :param source: the place that the tool comes from, as that process names it
    :param takes_runtime: whether the tool uses its runtime
    :param asks_first: whether it may have questions for the user before it runs
    :param trigger: the kind of trigger class
    :param adds_itself: whether a trigger class has its own ``execute``, which runs in that process
    :param settings: the keys of its secret settings that are set in that process
    """

    spec: ToolSpec
    definition: str
    source: str
    takes_runtime: bool
    asks_first: bool
    trigger: TriggerKind
    adds_itself: bool
    asks_source: SourceRequest | None
    goes_on: GoesOn | None
    settings: tuple[str, ...]


def usable(tools: Iterable[object]) -> tuple[Found, ...]:
    """Return the tools in a list of tools, tool classes and modules.

    :raises LoadError: with all faults
    """
    loaded = tools_among(tools)
    if loaded.faults:
        raise LoadError(loaded.faults)
    return loaded.tools


def describe(tools: Sequence[object], secrets: SecretStore = NO_SECRETS) -> list[Message]:
    """Describe tools that were passed in code for the lease holder, as JSON values.

    :param secrets: the secrets that the tools receive in this process
    :raises LoadError: with all faults
    """
    described: list[Message] = []
    faults: list[Fault] = []
    for found in usable(tools):
        tool, spec, kind = found.tool, found.tool.spec, type(found.tool)
        trigger: TriggerKind = "" if not isinstance(tool, TriggerTool) else "time" if tool.by_time else "wait"
        try:
            described.append(
                {
                    "spec": write(ToolSpec, spec),
                    "definition": spec.definition_hash,
                    "source": found.place,
                    "takes_runtime": tool.takes_runtime if isinstance(tool, FunctionTool) else True,
                    "asks_first": kind.questions is not Tool.questions,
                    "trigger": trigger,
                    "adds_itself": bool(trigger) and kind.execute is not TriggerTool.execute,
                    "asks_source": tool.asks_source,
                    "goes_on": tool.goes_on,
                    "settings": [key for key in secret_settings(spec) if secrets.reason_unset(spec, key) is None],
                }
            )
        except (ValueError, TypeError, RecursionError, AttributeError) as error:
            faults.append(Fault(found.place, "spec", f"The spec cannot be written as JSON: {str(error)[:300]}."))
    if faults:
        raise LoadError(faults)
    return decode(encode(described, 1 << 62))  # the same values that the lease holder will receive


def read_descriptions(told: object, process: str) -> list[Description]:
    """Read the descriptions of the tools that a client process registers.

    :param process: the name of the process in faults
    :raises LoadError: with all faults
    """
    if not isinstance(told, list):
        raise LoadError([Fault(process, "tools", f"Expected a list, not {type(told).__name__}.")])
    read: list[Description] = []
    faults: list[Fault] = []
    for index, item in enumerate(cast("list[object]", told)):
        try:
            one = reader_of(Description)(item)
            if one.spec.definition_hash != one.definition:
                raise Malformed(
                    f"The definition of {one.spec.id[:80]!r} changed in transit. Use the same Handrail version for all processes."
                )
            read.append(replace(one, source="".join(c if c.isprintable() else "?" for c in one.source[:_MAX_SOURCE])))
        except (ValueError, RecursionError) as error:
            faults.append(Fault(process, f"tools[{index}]", str(error)[:500] or type(error).__name__))
    if faults:
        raise LoadError(faults)
    return read


@dataclass(frozen=True, slots=True)
class ShownOffering:
    """The listing of an :class:`~handrail.contract.tool.offering.Offering`, without its content."""

    source: str
    foreign: bool
    resources: tuple[ResourceSpec, ...]
    templates: tuple[ResourceTemplate, ...]
    prompts: tuple[PromptSpec, ...]

    def has(self, uri: str) -> bool:
        """Return whether it lists the URI, or one of its templates matches it."""
        if any(one.uri == uri for one in self.resources):
            return True
        shapes = (shape_of(one.uri_template) for one in self.templates)
        return any(shape is not None and shape.makes(uri) for shape in shapes)

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        self._refuse()

    async def prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        self._refuse()

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        self._refuse()

    async def subscribe(self, uri: str, updated: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        # A program has no runtime of a call in any process: reading content is a call.
        raise UsageError(
            "Resources and prompts can only be read by a call. Use: session.call('resource.read', {'uri': …})"
        )


def shown(one: Listing) -> ShownOffering:
    """Return a snapshot of the listing of a source."""
    return ShownOffering(one.source, one.foreign, tuple(one.resources), tuple(one.templates), tuple(one.prompts))


_Offerings = tuple[ShownOffering, ...]


# ── the registrations of a client process ────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ToldOffering:
    """The description of a client process's resources and prompts.

    :param stamped: whether changes are found by polling, because the source does not report them
    """

    lists: ShownOffering
    stamped: bool


@dataclass(frozen=True, slots=True)
class ToldWatchdog:
    """The description of a watchdog in a client process.

    :param after_failures: whether it checks only calls that have failed before
    :param chooses: whether it selects the tools whose calls it checks
    """

    name: str
    timeout_ms: float
    after_failures: bool
    chooses: bool


@dataclass(frozen=True, slots=True)
class Hello:
    """The greeting of a client process, without its version.

    :param configured_mode: the mode from its configuration files
    :param tool_settings: the tool settings from its flags and variables that can apply to its sessions only
    :param catalog: the catalog settings from its flags and variables; None if they set none
    :param tools: each is read as a :class:`Description` later, so that all faults are reported together
    """

    face: str
    agent: str
    rules: Sequence[str | RuleEntry] = ()
    mode: Mode | None = None
    configured_mode: Mode | None = None
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    tool_config: ToolConfig = field(default_factory=dict[str, Mapping[str, str]])
    tool_settings: Mapping[str, ToolSettings] = field(default_factory=dict[str, ToolSettings])
    catalog: CatalogSettings | None = None
    tools: Sequence[Any] = ()
    offerings: Sequence[ToldOffering] = ()
    watchdogs: Sequence[ToldWatchdog] = ()


def hello_of(told: Message) -> Hello:
    """Read a greeting.

    :raises Refused: if a field is invalid; the text names it
    """
    try:
        return reader_of(Hello)({name: one for name, one in told.items() if name not in _OF_THE_WIRE})
    except Malformed as error:
        raise Refused(
            "StartError", f"Invalid greeting: {error}. Use the same Handrail version for all processes."
        ) from None


_OF_THE_WIRE = ("handrail", "protocol")
"""The fields of a greeting that belong to the handshake; see :mod:`handrail.ipc.wire.meeting`."""


def of_generation(generation: Generation) -> dict[str, Any]:
    """Encode a generation."""
    entries = [_of_entry(entry) for entry in generation.entries.values()]
    return {
        "number": generation.number,
        "entries": entries,
        "aliases": dict(generation.aliases),
        "quarantined": [asdict(fault) for fault in generation.quarantined],
        "beyond": sorted(generation.beyond),
        "offerings": write(_Offerings, tuple(map(shown, generation.offerings))),
    }


def _of_entry(entry: Entry) -> dict[str, Any]:
    return {
        "spec": _dumped(entry.spec),
        "definition": entry.definition_hash,
        "source": entry.source,
        "withheld": entry.withheld,
        "confined_by": entry.confined_by,
        "blocking": entry.blocking,
        "status": entry.status,
        "foreign": None if entry.foreign is None else [entry.foreign.name, entry.foreign.about],
        "answered_by": None if entry.answered_by is None else _of_entry(entry.answered_by),
    }


def generation_of(data: Mapping[str, Any], before: Generation | None = None) -> Generation:
    """Decode a generation; its tools are stubs.

    :param before: a generation whose unchanged tools are reused
    """
    known: Mapping[str, Entry] = {} if before is None else before.entries
    entries = [_entry_of(told, known.get(told["spec"]["id"])) for told in data["entries"]]
    quarantined = [Fault(**fault) for fault in data["quarantined"]]
    offerings = reader_of(_Offerings)(data["offerings"])
    return Generation(data["number"], entries, data["aliases"], quarantined, data["beyond"], offerings)


def _entry_of(told: Mapping[str, Any], before: Entry | None) -> Entry:
    foreign = None if told["foreign"] is None else Foreign(*told["foreign"])
    state = (told["source"], told["withheld"], told["confined_by"], told["blocking"], foreign, told["status"])
    if before is not None and before.definition_hash == told["definition"]:
        same = (before.source, before.withheld, before.confined_by, before.blocking, before.foreign, before.status)
        if state == same:
            return before
        spec, tool, schema = before.spec, before.tool, before.schema
    else:
        spec = reader_of(ToolSpec)(told["spec"])
        tool, schema = Shown(spec), compile_schema(spec.parameters)
    source, withheld, confined_by, blocking, _, status = state
    return Entry(
        spec,
        tool,
        schema,
        source,
        told["definition"],
        withheld,
        confined_by,
        blocking,
        foreign=foreign,
        status=status,
        answered_by=None if told["answered_by"] is None else _entry_of(told["answered_by"], None),
    )


def of_rules(rules: RuleBook) -> dict[str, Any]:
    told = [[rule.text, rule.scope, rule.source, rule.narrows, rule.any_case] for rule in rules]
    return {"mode": rules.mode, "rules": told}


def rules_of(data: Any) -> RuleBook:
    """Decode rules that :func:`of_rules` encoded."""
    return RuleBook(
        tuple(
            replace(parse_rule(text, scope=scope, source=source), narrows=narrows, any_case=any_case)
            for text, scope, source, narrows, any_case in data["rules"]
        ),
        data["mode"],
    )


def of_call(call: ProposedCall) -> list[Any]:
    """Encode a call.

    Arguments are sent as text, so that the lease holder reads them as strictly as a model's.
    """
    arguments, fault = call.arguments, call.fault
    if isinstance(arguments, str):
        text = arguments
    elif isinstance(arguments, bytes):
        text = arguments.decode("utf-8", "surrogateescape")
    else:
        try:
            text = json.dumps(arguments if isinstance(arguments, dict) else dict(arguments))
        except (TypeError, ValueError, RecursionError) as error:
            text = "{}"
            fault = fault or f"the arguments are not JSON values: {str(error)[:200]}"
    return [call.name, text, call.provider_id, fault, call.fault_kind]


def call_of(data: Any) -> ProposedCall:
    name, text, provider_id, fault, fault_kind = data
    try:
        arguments: str | bytes = text
        text.encode()
    except UnicodeEncodeError:  # invalid UTF-8, or half a character: kept unchanged
        arguments = text.encode("utf-8", "surrogateescape") if _is_escaped(text) else text
    return ProposedCall(name, arguments, provider_id, fault, fault_kind)


def _is_escaped(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def of_answer(answer: Answer) -> list[Any]:
    model = None if answer.model is answer.result else answer.model.to_dict()
    return [answer.call_id, answer.tool_id, answer.result.to_dict(), model]


def answer_of(data: Any) -> Answer:
    call_id, tool_id, result, model = data
    whole = Result.from_dict(result)
    return _new_answer(Answer, (call_id, tool_id, whole, whole if model is None else Result.from_dict(model)))


def refusal_of(error: HandrailError) -> Refused:
    """Convert an error into a refusal. The faults of a LoadError are included."""
    if isinstance(error, LoadError):
        return Refused("LoadError", json.dumps([asdict(fault) for fault in error.faults]))
    if isinstance(error, ToolError):
        return Refused("ToolError", json.dumps([error.text, error.kind, error.data]))
    return Refused(type(error).__name__, str(error))


def error_of(refused: Refused) -> HandrailError:
    """Convert a refusal back into the error it was made from, or return ``refused`` for any other error."""
    try:
        if refused.kind == "LoadError":
            return LoadError([Fault(**fault) for fault in json.loads(refused.text)])
        if refused.kind == "ToolError":
            text, error_kind, data = json.loads(refused.text)
            return ToolError(text, kind=error_kind, data=data)
    except (ValueError, TypeError):  # truncated in transit
        return StartError(refused.text)
    kind = _ERRORS.get(refused.kind)
    return refused if kind is None else kind(refused.text)
