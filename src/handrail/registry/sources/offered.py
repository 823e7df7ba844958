"""Sources of tools that installed Python packages add by the entry point group ``handrail.sources``.

An entry point names a :class:`~handrail.registry.sources.source.Source`, or a function without arguments that makes one. The
operator knows it by the entry point's name. What it offers is somebody else's: faulty tools are quarantined, and none is
there before a person has approved what it says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, cast

from handrail.contract.errors import Fault
from handrail.registry.sources.source import Loaded, Rank, Source
from handrail.store.installed import entry_points as of_group

GROUP = "handrail.sources"


def installed() -> Iterable[metadata.EntryPoint]:
    """The entry points of the packages in this environment."""
    return of_group(GROUP)


@dataclass(frozen=True, slots=True)
class OfferedSource:
    """One entry point. It is loaded with its first look, and its faults are never fatal."""

    point: metadata.EntryPoint
    rank: Rank = "package"
    foreign: bool = True

    @property
    def name(self) -> str:
        return self.point.name

    def load(self) -> Loaded:
        made: Any = self.point.load()
        source: Any = made() if callable(made) else made
        if not callable(getattr(source, "load", None)):
            problem = f"is a {type(made).__name__}; expected a Source, or a function that makes one"
            return Loaded(faults=(Fault(f"entry point {self.name}", self.point.value, problem),), name=self.name)
        loaded = cast("Source", source).load()
        return replace(loaded, name=self.name, about="")  # what is said of a source is its operator's


def offered_sources(entry_points: Callable[[], Iterable[metadata.EntryPoint]] = installed) -> list[OfferedSource]:
    """Every entry point of :data:`GROUP`, in order of name and value; of one name the first counts."""
    found: dict[str, OfferedSource] = {}
    for point in sorted(entry_points(), key=lambda one: (one.name, one.value)):
        found.setdefault(point.name, OfferedSource(point))
    return list(found.values())
