"""The built-in tools as a source."""

from __future__ import annotations

from dataclasses import dataclass

from handrail.contract.generation import BUILT_IN
from handrail.registry.sources.source import Found, Loaded, Rank


@dataclass(frozen=True, slots=True)
class BuiltinSource:
    """What Handrail ships, in the order in which a catalog shows it."""

    rank: Rank = "built-in"
    foreign: bool = False

    def load(self) -> Loaded:
        from handrail.tools import ALIASES, BUILTINS  # here, so that nothing pays for them before a kernel opens

        return Loaded(tuple(Found(tool, BUILT_IN) for tool in BUILTINS), aliases=ALIASES)
