"""What crosses the wire as data: generations of tools, calls and their answers, events, decisions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from handrail.catalog.view import CatalogOptions
from handrail.contract.approvals import ApprovalAnswer, ApprovalRequest
from handrail.contract.call import Answer, Event, ProposedCall, Result
from handrail.contract.doors.runtime import Question, Runtime
from handrail.contract.errors import Fault, HandrailError, LoadError, LogUnavailable, StartError, ToolError, UsageError
from handrail.contract.generation import Difference, Entry, Foreign, Generation, ToolStatus
from handrail.contract.sandbox import Tier
from handrail.contract.schema.schema import compile_schema
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import OfSpecs, Tool
from handrail.ipc.codec.adapters import adapter
from handrail.ipc.offerings import of_offerings, offerings_of
from handrail.ipc.wire.operations import Refused
from handrail.policy.explain import Explanation
from handrail.policy.rules.rules import RuleBook, parse_rule

_dumped: OfSpecs[dict[str, Any]] = OfSpecs(lambda spec: adapter(ToolSpec).dump_python(spec, mode="json"))
"""Specs as data, kept by spec, since most tools of a generation were in the one before."""

_tuple: Any = tuple
_new_answer: Callable[..., Answer] = _tuple.__new__
"""Makes an ``Answer`` in half the time of its own constructor."""

_ERRORS: Mapping[str, type[HandrailError]] = {
    error.__name__: error for error in (UsageError, LogUnavailable, StartError)
}


class Shown(Tool):
    """A tool as a process that joined sees it. Its calls run in the holder."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        raise UsageError(f"{self.spec.id} is carried out by the process that holds the workspace, never here")


def of_tier(tier: Tier) -> dict[str, Any]:
    return adapter(Tier).dump_python(tier, mode="json")


def tier_of(data: Mapping[str, Any]) -> Tier:
    return adapter(Tier).validate_python(data)


def of_generation(generation: Generation) -> dict[str, Any]:
    entries = [_of_entry(entry) for entry in generation.entries.values()]
    return {
        "number": generation.number,
        "entries": entries,
        "aliases": dict(generation.aliases),
        "quarantined": [asdict(fault) for fault in generation.quarantined],
        "beyond": sorted(generation.beyond),
        "offerings": of_offerings(generation.offerings),
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
    """The inverse of :func:`of_generation`, of tools that only show themselves.

    :param before: whose tools need not be read again, where they are the same
    """
    known: Mapping[str, Entry] = {} if before is None else before.entries
    entries = [_entry_of(told, known.get(told["spec"]["id"])) for told in data["entries"]]
    quarantined = [Fault(**fault) for fault in data["quarantined"]]
    offerings = offerings_of(data["offerings"])
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
        spec = adapter(ToolSpec).validate_python(told["spec"])
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


def of_catalog_options(options: CatalogOptions) -> dict[str, Any]:
    return asdict(options)


def catalog_options_of(data: Any) -> CatalogOptions:
    """The inverse of :func:`of_catalog_options`."""
    return adapter(CatalogOptions).validate_python(data)


def of_rules(rules: RuleBook) -> dict[str, Any]:
    told = [[rule.text, rule.scope, rule.source, rule.narrows, rule.any_case] for rule in rules]
    return {"mode": rules.mode, "rules": told}


def rules_of(data: Any) -> RuleBook:
    """The inverse of :func:`of_rules`."""
    return RuleBook(
        tuple(
            replace(parse_rule(text, scope=scope, source=source), narrows=narrows, any_case=any_case)
            for text, scope, source, narrows, any_case in data["rules"]
        ),
        data["mode"],
    )


def of_call(call: ProposedCall) -> list[Any]:
    """Arguments go as text, so that the holder reads them as strictly as a model's."""
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
    except UnicodeEncodeError:  # bytes that are no UTF-8, or half a character: told as what they are
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


def of_event(event: Event) -> dict[str, Any]:
    return asdict(event)


def event_of(data: Mapping[str, Any]) -> Event:
    return Event(**data)


def of_request(request: ApprovalRequest) -> dict[str, Any]:
    return asdict(request)


def request_of(data: Mapping[str, Any]) -> ApprovalRequest:
    fields: dict[str, Any] = {**data, "targets": tuple(data["targets"])}
    return ApprovalRequest(**fields)


def of_question(question: Question) -> dict[str, Any]:
    return asdict(question)


def of_decision(answer: ApprovalAnswer) -> dict[str, Any]:
    return asdict(answer)


def of_explanation(explanation: Explanation) -> Any:
    return adapter(Explanation).dump_python(explanation, mode="json")


def explanation_of(data: Any) -> Explanation:
    return adapter(Explanation).validate_python(data)


def of_difference(difference: Difference) -> Any:
    return adapter(Difference).dump_python(difference, mode="json")


def difference_of(data: Any) -> Difference:
    return adapter(Difference).validate_python(data)


def statuses_of(data: Any) -> list[ToolStatus]:
    """The status of each tool, as the holder reports it."""
    return adapter(list[ToolStatus]).validate_python(data)


def refusal_of(error: HandrailError) -> Refused:
    """An error of the holder as data. Faults are included whole."""
    if isinstance(error, LoadError):
        return Refused("LoadError", json.dumps([asdict(fault) for fault in error.faults]))
    if isinstance(error, ToolError):
        return Refused("ToolError", json.dumps([error.text, error.kind, error.data]))
    return Refused(type(error).__name__, str(error))


def error_of(refused: Refused) -> HandrailError:
    """The holder's error as one of this side; ``refused`` itself if it is not one of ours."""
    try:
        if refused.kind == "LoadError":
            return LoadError([Fault(**fault) for fault in json.loads(refused.text)])
        if refused.kind == "ToolError":
            text, error_kind, data = json.loads(refused.text)
            return ToolError(text, kind=error_kind, data=data)
    except (ValueError, TypeError):  # cut on its way
        return StartError(refused.text)
    kind = _ERRORS.get(refused.kind)
    return refused if kind is None else kind(refused.text)
