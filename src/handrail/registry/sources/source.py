"""What the registry asks of a source of tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from handrail.contract.errors import Fault
from handrail.contract.generation import Unheard
from handrail.contract.tool.offering import Offering
from handrail.contract.tool.tool import Tool

Rank = Literal["built-in", "global", "agent", "code", "package"]
"""Who a source speaks for. Only a built-in may have a locked id; only ``agent`` may override, and only ``global``."""


@dataclass(frozen=True, slots=True)
class Found:
    """One tool, and where it was found, as the operator knows it."""

    tool: Tool
    place: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that a source has, and all that is wrong with it.

    :param name: what the operator calls the source, where it is a foreign one; its tools are one category of that name
    :param about: the operator's text on it, for models. Never the source's own
    :param aliases: further names of its tools, alias to id; those of the built-ins count
    :param offering: its resources and prompts, where it has some; the same object as long as those are the same
    :param unheard: where nobody knows yet what it has
    """

    tools: tuple[Found, ...] = ()
    faults: tuple[Fault, ...] = ()
    name: str = ""
    about: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    offering: Offering | None = None
    unheard: Unheard | None = None


class Source(Protocol):
    """Where tools come from. Loading reads and checks; it starts nothing, fetches nothing, installs nothing."""

    @property
    def rank(self) -> Rank: ...

    @property
    def foreign(self) -> bool:
        """Not the operator's own: what is faulty is quarantined tool by tool, and stops nothing."""
        ...

    def load(self) -> Loaded:
        """Everything at once; a fault is data here, never an exception."""
        ...
