"""Hand-written wire forms: tools and their generations, calls and their answers, rules, errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, NoReturn, cast

from handrail.config.operator_settings import CatalogSettings
from handrail.contract.calls_and_results import CallAnswer, ProposedCall, Result
from handrail.contract.errors import (
    Diagnostic,
    HandrailError,
    LoadError,
    LogUnavailable,
    StartError,
    ToolError,
    UsageError,
)
from handrail.contract.json_codec import MalformedDataError, reader_of, write
from handrail.contract.permission_modes import Mode
from handrail.contract.rule_forms import RuleWithExamples
from handrail.contract.schema.argument_validation import compile_schema
from handrail.contract.services.resource_services import (
    PromptSpec,
    ResourceSpec,
    ResourceTemplate,
    SourceRequestSpec,
    SourceResources,
)
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.struct import Struct, field
from handrail.contract.tool.decorator import FunctionTool
from handrail.contract.tool.operator_tool_settings import ToolConfig, ToolSettings
from handrail.contract.tool.spec import ToolSessionArgumentNames, ToolSpec
from handrail.contract.tool.tool_protocol import SpecValueCache, Tool
from handrail.contract.tool.trigger_tools import TriggerTool
from handrail.contract.tool_generation import DiscoveredTool, Generation, ThirdPartySourceInfo, ToolEntry
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import RemoteRequestError
from handrail.policy.rules.rules_and_modes import RuleBook, parse_rule
from handrail.registry.sources.code_sources import sort_tools_and_faults
from handrail.registry.sources.operator_resources import parse_uri_template_shape
from handrail.runtime.secret_store import NO_SECRETS, SecretStore, list_secret_setting_keys
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback

_spec_data: SpecValueCache[dict[str, Any]] = SpecValueCache(lambda spec: write(ToolSpec, spec))
"""Encoded specs, cached by spec, because most tools of a generation were in the previous one."""

_tuple: Any = tuple
_new_answer: Callable[..., CallAnswer] = _tuple.__new__
"""Create a ``CallAnswer`` in half the time of its constructor."""

_ERROR_CLASSES: Mapping[str, type[HandrailError]] = {
    error.__name__: error for error in (UsageError, LogUnavailable, StartError)
}


class ToolStub(Tool):
    """A tool in a client process, without its code. The lease holder runs its calls."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        raise UsageError(
            f"Cannot run `{self.spec.id}` in this process: the process that holds the workspace runs it. "
            "Call it through a session."
        )


# ── tools ────────────────────────────────────────────────────────────────────────────────────────

TriggerMode = Literal["", "wait", "time"]
"""The kind of trigger class that a tool is: none, one that waits, or one with times."""
_MAX_SOURCE = 300


class ClientToolDescription(Struct, frozen=True):
    """The description of a tool that a client process registers.

    :param source: the place that the tool comes from, as that process names it
    :param takes_runtime: whether the tool uses its runtime
    :param has_questions: whether it may have questions for the user before it runs
    :param trigger: the kind of trigger class
    :param adds_itself: whether a trigger class has its own ``execute``, which runs in that process
    :param settings: the keys of its secret settings that are set in that process
    """

    spec: ToolSpec
    definition: str
    source: str
    takes_runtime: bool
    has_questions: bool
    trigger: TriggerMode
    adds_itself: bool
    source_request: SourceRequestSpec | None
    state_arguments: ToolSessionArgumentNames | None
    settings: tuple[str, ...]


def collect_tools_from_objects(tools: Iterable[object]) -> tuple[DiscoveredTool, ...]:
    """Return the tools in a list of tools, tool classes and modules.

    :raises LoadError: with all faults
    """
    loaded = sort_tools_and_faults(tools)
    if loaded.faults:
        raise LoadError(loaded.faults)
    return loaded.tools


def describe_client_tools(tools: Sequence[object], secrets: SecretStore = NO_SECRETS) -> list[Message]:
    """Describe tools that were passed in code for the lease holder, as JSON values.

    :param secrets: the secrets that the tools receive in this process
    :raises LoadError: with all faults
    """
    described: list[Message] = []
    faults: list[Diagnostic] = []
    for found in collect_tools_from_objects(tools):
        tool, spec, kind = found.tool, found.tool.spec, type(found.tool)
        trigger: TriggerMode = "" if not isinstance(tool, TriggerTool) else "time" if tool.is_scheduled else "wait"
        try:
            described.append(
                {
                    "spec": write(ToolSpec, spec),
                    "definition": spec.definition_hash,
                    "source": found.location,
                    "takes_runtime": tool.takes_runtime if isinstance(tool, FunctionTool) else True,
                    "has_questions": kind.questions is not Tool.questions,
                    "trigger": trigger,
                    "adds_itself": bool(trigger) and kind.execute is not TriggerTool.execute,
                    "source_request": tool.source_request,
                    "state_arguments": tool.state_arguments,
                    "settings": [
                        key
                        for key in list_secret_setting_keys(spec)
                        if secrets.explain_unset_secret_setting(spec, key) is None
                    ],
                }
            )
        except (ValueError, TypeError, RecursionError, AttributeError) as error:
            faults.append(
                Diagnostic(found.location, "spec", f"The spec cannot be written as JSON: {str(error)[:300]}.")
            )
    if faults:
        raise LoadError(faults)
    return decode_json_with_fallback(
        encode_json_with_fallback(described, 1 << 62)
    )  # the same values that the lease holder will receive


def decode_tool_descriptions(descriptions: object, process: str) -> list[ClientToolDescription]:
    """Read the descriptions of the tools that a client process registers.

    :param process: the name of the process in faults
    :raises LoadError: with all faults
    """
    if not isinstance(descriptions, list):
        raise LoadError([Diagnostic(process, "tools", f"Expected a list, not {type(descriptions).__name__}.")])
    read: list[ClientToolDescription] = []
    faults: list[Diagnostic] = []
    for index, item in enumerate(cast("list[object]", descriptions)):
        try:
            one = reader_of(ClientToolDescription)(item)
            if one.spec.definition_hash != one.definition:
                raise MalformedDataError(
                    f"The definition of {one.spec.id[:80]!r} changed in transit. Use the same Handrail version for all processes."
                )
            read.append(replace(one, source="".join(c if c.isprintable() else "?" for c in one.source[:_MAX_SOURCE])))
        except (ValueError, RecursionError) as error:
            faults.append(Diagnostic(process, f"tools[{index}]", str(error)[:500] or type(error).__name__))
    if faults:
        raise LoadError(faults)
    return read


class ResourceProviderListing(Struct, frozen=True):
    """The listing of an :class:`~handrail.contract.tool.resource_provider.ResourceProvider`, without its content."""

    source: str
    is_third_party: bool
    resources: tuple[ResourceSpec, ...]
    templates: tuple[ResourceTemplate, ...]
    prompts: tuple[PromptSpec, ...]

    def has_resource(self, uri: str) -> bool:
        """Return whether it lists the URI, or one of its templates matches it."""
        if any(one.uri == uri for one in self.resources):
            return True
        shapes = (parse_uri_template_shape(one.uri_template) for one in self.templates)
        return any(shape is not None and shape.can_produce_uri(uri) for shape in shapes)

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        self._refuse()

    async def get_prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        self._refuse()

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        self._refuse()

    async def subscribe(self, uri: str, on_update: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        # A program has no runtime of a call in any process: reading content is a call.
        raise UsageError(
            "Resources and prompts can only be read by a call. Use: session.call('resource.read', {'uri': …})"
        )


def snapshot_source_resources(one: SourceResources) -> ResourceProviderListing:
    return ResourceProviderListing(
        one.source, one.is_third_party, tuple(one.resources), tuple(one.templates), tuple(one.prompts)
    )


_Listings = tuple[ResourceProviderListing, ...]


# ── the registrations of a client process ────────────────────────────────────────────────────────


class ResourceProviderDescription(Struct, frozen=True):
    """The description of a client process's resources and prompts.

    :param is_pollable: whether changes are found by polling, because the source does not report them
    """

    listing: ResourceProviderListing
    is_pollable: bool


class ClientWatchdogDescription(Struct, frozen=True):
    """The description of a watchdog in a client process.

    :param after_failures: whether it checks only calls that have failed before
    :param has_filter: whether it selects the tools whose calls it checks
    """

    name: str
    timeout_ms: float
    after_failures: bool
    has_filter: bool


class ClientGreeting(Struct, frozen=True):
    """The greeting of a client process, without its version.

    :param configured_mode: the mode from its configuration files
    :param tool_settings: the tool settings from its flags and variables that can apply to its sessions only
    :param catalog: the catalog settings from its flags and variables; None if they set none
    :param tools: each is read as a :class:`ClientToolDescription` later, so that all faults are reported together
    :param agents: the agents that it passes in code
    :param builtins: whether its sessions have the built-in tools
    """

    face: str
    agent: str
    rules: Sequence[str | RuleWithExamples] = ()
    mode: Mode | None = None
    configured_mode: Mode | None = None
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    tool_config: ToolConfig = field(default_factory=dict[str, Mapping[str, str]])
    tool_settings: Mapping[str, ToolSettings] = field(default_factory=dict[str, ToolSettings])
    catalog: CatalogSettings | None = None
    tools: Sequence[Any] = ()
    offerings: Sequence[ResourceProviderDescription] = ()
    watchdogs: Sequence[ClientWatchdogDescription] = ()
    agents: Sequence[Mapping[str, Any]] = ()
    builtins: bool = True


def parse_client_greeting(fields: Message) -> ClientGreeting:
    """Read a greeting.

    :raises RemoteRequestError: if a field is invalid; the text names it
    """
    try:
        return reader_of(ClientGreeting)({name: one for name, one in fields.items() if name not in _VERSION_FIELDS})
    except MalformedDataError as error:
        raise RemoteRequestError(
            "StartError", f"Invalid greeting: {error}. Use the same Handrail version for all processes."
        ) from None


_VERSION_FIELDS = ("handrail", "protocol")
"""The fields of a greeting that belong to the handshake; see :mod:`handrail.ipc.wire.socket_handshake`."""


def encode_generation(generation: Generation) -> dict[str, Any]:
    entries = [_write_entry(entry) for entry in generation.entries.values()]
    return {
        "number": generation.number,
        "entries": entries,
        "aliases": dict(generation.aliases),
        "quarantined": [asdict(fault) for fault in generation.quarantined],
        "beyond": sorted(generation.other_tool_ids),
        "offerings": write(_Listings, tuple(map(snapshot_source_resources, generation.resource_providers))),
    }


def _write_entry(entry: ToolEntry) -> dict[str, Any]:
    return {
        "spec": _spec_data(entry.spec),
        "definition": entry.definition_hash,
        "source": entry.source,
        "unavailable_reason": entry.unavailable_reason,
        "sandbox": entry.sandbox,
        "blocking": entry.is_blocking,
        "status": entry.status,
        "foreign": None if entry.third_party is None else [entry.third_party.name, entry.third_party.description],
        "answered_by": None if entry.answered_by is None else _write_entry(entry.answered_by),
    }


def decode_generation(data: Mapping[str, Any], before: Generation | None = None) -> Generation:
    """Decode a generation; its tools are stubs.

    :param before: a generation whose unchanged tools are reused
    """
    known: Mapping[str, ToolEntry] = {} if before is None else before.entries
    entries = [_read_entry(told, known.get(told["spec"]["id"])) for told in data["entries"]]
    quarantined = [Diagnostic(**fault) for fault in data["quarantined"]]
    offerings = reader_of(_Listings)(data["offerings"])
    return Generation(data["number"], entries, data["aliases"], quarantined, data["beyond"], offerings)


def _read_entry(fields: Mapping[str, Any], before: ToolEntry | None) -> ToolEntry:
    foreign = None if fields["foreign"] is None else ThirdPartySourceInfo(*fields["foreign"])
    state = (
        fields["source"],
        fields["unavailable_reason"],
        fields["sandbox"],
        fields["blocking"],
        foreign,
        fields["status"],
    )
    if before is not None and before.definition_hash == fields["definition"]:
        same = (
            before.source,
            before.unavailable_reason,
            before.sandbox,
            before.is_blocking,
            before.third_party,
            before.status,
        )
        if state == same:
            return before
        spec, tool, schema = before.spec, before.tool, before.schema
    else:
        spec = reader_of(ToolSpec)(fields["spec"])
        tool, schema = ToolStub(spec), compile_schema(spec.parameters)
    source, unavailable_reason, sandbox, blocking, _, status = state
    return ToolEntry(
        spec,
        tool,
        schema,
        source,
        fields["definition"],
        unavailable_reason,
        sandbox,
        blocking,
        third_party=foreign,
        status=status,
        answered_by=None if fields["answered_by"] is None else _read_entry(fields["answered_by"], None),
    )


def encode_rule_book(rules: RuleBook) -> dict[str, Any]:
    items = [[rule.text, rule.scope, rule.source, rule.narrows, rule.any_case] for rule in rules]
    return {"mode": rules.mode, "rules": items}


def decode_rule_book(data: Any) -> RuleBook:
    """Decode rules that :func:`encode_rule_book` encoded."""
    return RuleBook(
        tuple(
            replace(parse_rule(text, scope=scope, source=source), narrows=narrows, any_case=any_case)
            for text, scope, source, narrows, any_case in data["rules"]
        ),
        data["mode"],
    )


def encode_proposed_call(call: ProposedCall) -> list[Any]:
    """Encode a call.

    Arguments are sent as text, so that the lease holder reads them as strictly as a model's.
    """
    arguments, fault = call.arguments, call.problem
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
    return [call.name, text, call.provider_id, fault, call.problem_kind, call.client_meta]


def decode_proposed_call(data: Any) -> ProposedCall:
    name, text, provider_id, fault, fault_kind, client_meta = data
    try:
        arguments: str | bytes = text
        text.encode()
    except UnicodeEncodeError:  # invalid UTF-8, or half a character: kept unchanged
        arguments = text.encode("utf-8", "surrogateescape") if _is_escaped(text) else text
    return ProposedCall(name, arguments, provider_id, fault, fault_kind, client_meta)


def _is_escaped(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def encode_call_answer(answer: CallAnswer) -> list[Any]:
    model = None if answer.model is answer.result else answer.model.to_dict()
    return [answer.call_id, answer.tool_id, answer.result.to_dict(), model]


def decode_call_answer(data: Any) -> CallAnswer:
    call_id, tool_id, result, model = data
    whole = Result.from_dict(result)
    return _new_answer(CallAnswer, (call_id, tool_id, whole, whole if model is None else Result.from_dict(model)))


def convert_to_remote_error(error: HandrailError) -> RemoteRequestError:
    """Convert an error into a refusal. The faults of a LoadError are included."""
    if isinstance(error, LoadError):
        return RemoteRequestError("LoadError", json.dumps([asdict(fault) for fault in error.diagnostics]))
    if isinstance(error, ToolError):
        return RemoteRequestError("ToolError", json.dumps([error.text, error.kind, error.data]))
    return RemoteRequestError(type(error).__name__, str(error))


def restore_error(refused: RemoteRequestError) -> HandrailError:
    """Convert a refusal back into the error it was made from, or return ``refused`` for any other error."""
    try:
        if refused.kind == "LoadError":
            return LoadError([Diagnostic(**fault) for fault in json.loads(refused.text)])
        if refused.kind == "ToolError":
            text, error_kind, data = json.loads(refused.text)
            return ToolError(text, kind=error_kind, data=data)
    except (ValueError, TypeError):  # truncated in transit
        return StartError(refused.text)
    kind = _ERROR_CLASSES.get(refused.kind)
    return refused if kind is None else kind(refused.text)
