"""Tools as a process tells of them when it brings them, and as the holder reads that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import pydantic

from handrail.contract.errors import Fault, LoadError
from handrail.contract.generation import Found
from handrail.contract.schema.schema import path_text
from handrail.contract.tool.decorator import FunctionTool
from handrail.contract.tool.requires import CapabilitySet
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.ipc.codec.adapters import adapter
from handrail.ipc.codec.values import Malformed, an_object, flag, text
from handrail.ipc.triggering import TriggerKind, a_kind, kind_of
from handrail.ipc.wire.framing import Message
from handrail.registry.sources.code import tools_among

_SPEC_FIELDS = frozenset(field.name for field in fields(ToolSpec))
_MAX_SOURCE = 300


@dataclass(frozen=True, slots=True)
class Description:
    """A tool that another process has.

    :param source: where it is from, as that process knows it
    :param takes_runtime: whether it looks at its runtime at all
    :param asks_first: whether people may have to be asked before it runs
    :param trigger: which kind of class of triggers it is
    """

    spec: ToolSpec
    definition: str
    source: str
    takes_runtime: bool
    asks_first: bool
    trigger: TriggerKind = ""


def usable(tools: Iterable[object]) -> tuple[Found, ...]:
    """The tools among what was given in code: tools, classes of tools, modules.

    :raises LoadError: with every fault
    """
    loaded = tools_among(tools)
    if loaded.faults:
        raise LoadError(loaded.faults)
    return loaded.tools


def describe(tools: Sequence[object]) -> list[Message]:
    """Tools given in code, for whoever holds the workspace; JSON.

    :raises LoadError: with every fault
    """
    described: list[Message] = []
    faults: list[Fault] = []
    for found in usable(tools):
        tool = found.tool
        try:
            spec = adapter(ToolSpec).dump_python(tool.spec, mode="json")
            definition = tool.spec.definition_hash
        except (ValueError, TypeError, RecursionError, pydantic.PydanticSchemaGenerationError) as error:
            faults.append(Fault(found.place, "spec", f"is not JSON: {str(error)[:300]}"))
            continue
        described.append(
            {
                "spec": spec,
                "definition": definition,
                "source": found.place,
                "takes_runtime": _takes_runtime(tool),
                "asks_first": type(tool).questions is not Tool.questions,
                "trigger": kind_of(tool),
            }
        )
    if faults:
        raise LoadError(faults)
    return described


def _takes_runtime(tool: Tool) -> bool:
    return tool.takes_runtime if isinstance(tool, FunctionTool) else True


def read_descriptions(told: object, process: str) -> list[Description]:
    """What a process says of the tools that it brings.

    :param process: how to call it
    :raises LoadError: with every fault
    """
    if not isinstance(told, list):
        raise LoadError([Fault(process, "tools", f"is a {type(told).__name__}; expected a list")])
    read: list[Description] = []
    faults: list[Fault] = []
    for index, item in enumerate(cast("list[object]", told)):
        try:
            read.append(_description(item))
        except (ValueError, RecursionError) as error:
            faults.append(Fault(process, f"tools[{index}]", _shown(error)))
    if faults:
        raise LoadError(faults)
    return read


def _description(told: object) -> Description:
    given = an_object(told)
    spec_fields = an_object(given.get("spec"))
    if unknown := spec_fields.keys() - _SPEC_FIELDS:
        raise Malformed(
            f"its spec has the unknown fields {', '.join(sorted(unknown))[:200]}; use one version of Handrail"
        )
    spec = adapter(ToolSpec).validate_python(spec_fields)
    definition = spec.definition_hash
    if definition != given.get("definition"):
        raise Malformed(f"{spec.id[:80]!r} does not arrive as it was declared; use one version of Handrail")
    source = "".join(c if c.isprintable() else "?" for c in text(given.get("source"))[:_MAX_SOURCE])
    takes, asks, trigger = (given.get(key) for key in ("takes_runtime", "asks_first", "trigger"))
    return Description(spec, definition, source, flag(takes), flag(asks), a_kind(trigger))


def _shown(error: Exception) -> str:
    if not isinstance(error, pydantic.ValidationError):
        return str(error)[:500] or type(error).__name__
    return "; ".join(f"{path_text(f['loc'])}: {f['msg']}" for f in error.errors(include_input=False))[:500]


def of_capabilities(capabilities: CapabilitySet) -> Any:
    """A capability set as JSON."""
    return adapter(CapabilitySet).dump_python(capabilities, mode="json")


def capabilities_of(told: object) -> CapabilitySet:
    """The inverse of :func:`of_capabilities`.

    :raises ValueError: for what is none
    """
    return adapter(CapabilitySet).validate_python(told)
