"""Tools that a model's provider carries out itself, as a source: those that an agent's manifest names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import ToolError
from handrail.contract.tool.native import AT_PROVIDER, NATIVE, Chosen, native_spec
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.registry.sources.source import Found, Loaded, Rank

SOURCE = "native"
"""``Entry.source`` of them."""


class NativeTool(Tool):
    """Stands for a tool of providers. It is never run."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        raise ToolError(f"{self.spec.id} is not run here: {AT_PROVIDER}", kind="unavailable")


@dataclass(frozen=True, slots=True)
class NativeSource:
    """:param chosen: ``[native]`` of the manifest; what is faulty there is said with the manifest's other faults"""

    chosen: Chosen = field(default_factory=dict[str, Any])
    rank: Rank = "built-in"
    foreign: bool = False

    def load(self) -> Loaded:
        return Loaded(
            tuple(
                Found(NativeTool(native_spec(name, given)), SOURCE)
                for name, given in self.chosen.items()
                if name in NATIVE
            )
        )
