"""Generations with many small tools of every origin, for tests of the catalog."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from handrail.contract.schema.argument_validation import compile_schema
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import BUILT_IN, Generation, ThirdPartySourceInfo, ToolEntry


class IdleTool(Tool):
    """A tool that does nothing."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return None


def entry(
    tool_id: str,
    *,
    source: str = "here",
    withheld: str | None = None,
    foreign: ThirdPartySourceInfo | None = None,
    **declared: Any,
) -> ToolEntry:
    given: dict[str, Any] = {"description": f"Does {tool_id}.", "side_effect": "read", "locks": (), **declared}
    spec = ToolSpec(id=tool_id, **given)
    return ToolEntry(
        spec,
        IdleTool(spec),
        compile_schema(spec.parameters),
        source,
        spec.definition_hash,
        withheld,
        third_party=foreign,
        untrusted_source="" if foreign is None else source,
    )


def built_in(tool_id: str, *, core: bool = False, **declared: Any) -> ToolEntry:
    given: dict[str, Any] = {"category": "system", "tier": "core" if core else None, **declared}
    return entry(tool_id, source=BUILT_IN, **given)


CORE = tuple(built_in(name, core=True) for name in ("read", "bash", "browse_tools", "load_tools", "find_tools"))


def many(count: int, category: str = "reports", **declared: Any) -> list[ToolEntry]:
    return [entry(f"{category}.t{number:04d}", category=category, **declared) for number in range(count)]


def generation(*entries: ToolEntry | Iterable[ToolEntry], number: int = 1) -> Generation:
    flat = [one for given in entries for one in ([given] if isinstance(given, ToolEntry) else given)]
    return Generation(number, flat)
