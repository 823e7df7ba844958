"""A source of somebody else's tools, whose definitions a test can change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from handrail.contract.errors import Fault
from handrail.contract.tool.tool import Tool
from handrail.registry.sources.source import Found, Loaded, Rank


@dataclass(slots=True)
class ForeignSource:
    """Tools of somebody else: faulty ones are quarantined, and none runs before a person has approved what it says.

    :param name: what the operator calls it
    :param about: the operator's text on it
    :param faults: what is wrong with the source itself
    :param broken: raised when it is looked through, as a server does that is gone
    """

    name: str
    tools: list[Tool] = field(default_factory=list[Tool])
    about: str = ""
    faults: list[Fault] = field(default_factory=list[Fault])
    broken: Exception | None = None
    rank: Rank = "package"
    foreign: bool = True

    def offer(self, *tools: Tool) -> None:
        """Have these from now on, in place of those of the same ids."""
        self.tools = [*(old for old in self.tools if old.spec.id not in {new.spec.id for new in tools}), *tools]

    def withdraw(self, *tool_ids: str) -> None:
        self.tools = [tool for tool in self.tools if tool.spec.id not in tool_ids]

    def load(self) -> Loaded:
        if self.broken is not None:
            raise self.broken
        return Loaded(self._found(self.tools), tuple(self.faults), self.name, self.about)

    def _found(self, tools: Iterable[Tool]) -> tuple[Found, ...]:
        return tuple(Found(tool, f"{self.name}: {tool.spec.id}") for tool in tools)
