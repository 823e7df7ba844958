"""Tools that installed Python packages offer by the entry point group ``handrail.tools``.

An entry point names a tool, a class of a tool, a module of tools, or a list or tuple of these. Packages are
found as they are installed; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import cast

from handrail.contract.errors import Fault
from handrail.registry.sources.python import tools_among
from handrail.registry.sources.source import Found, Loaded, Rank
from handrail.store.installed import entry_points as of_group

GROUP = "handrail.tools"


def installed() -> Iterable[metadata.EntryPoint]:
    """The entry points of the packages in this environment."""
    return of_group(GROUP)


@dataclass(frozen=True, slots=True)
class PluginSource:
    """Every entry point of :data:`GROUP`, in order of name and package."""

    entry_points: Callable[[], Iterable[metadata.EntryPoint]] = installed
    rank: Rank = "package"
    foreign: bool = False

    def load(self) -> Loaded:
        tools: list[Found] = []
        faults: list[Fault] = []
        for point in sorted(self.entry_points(), key=lambda p: (p.name, _package(p), p.value)):
            place = f"entry point {point.name} of {_package(point)}"
            try:
                offered: object = point.load()
            except (Exception, SystemExit) as error:
                faults.append(Fault(place, point.value, f"cannot be imported: {type(error).__name__}: {error}"))
                continue
            several = cast("Iterable[object]", offered) if isinstance(offered, (list, tuple)) else (offered,)
            loaded = tools_among(several, place)
            tools += loaded.tools
            faults += loaded.faults
        return Loaded(tuple(tools), tuple(faults))


def _package(point: metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unnamed package"
