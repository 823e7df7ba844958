"""Tools from Python: passed in code, built in, of a provider, agents as tools, and from installed packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import ModuleType
from typing import Any, cast

from handrail.contract.agent import AGENT_TOOL, AgentManifest, tool_matches
from handrail.contract.doors.runtime import Runtime
from handrail.contract.errors import Fault, ToolError
from handrail.contract.generation import AGENTS, BUILT_IN, Found, Loaded, Rank, Source
from handrail.contract.tool.native import AT_PROVIDER, NATIVE, Chosen, native_spec
from handrail.contract.tool.offering import Offering
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.store.installed import entry_points as of_group


@dataclass(frozen=True, slots=True)
class PythonSource:
    """The tools that were passed to ``open_kernel(tools=…)``, in order.

    :param given: tools, classes of tools, or modules, of which every tool counts
    """

    given: tuple[object, ...]
    rank: Rank = "code"
    foreign: bool = False

    def load(self) -> Loaded:
        return tools_among(self.given)


@dataclass(frozen=True, slots=True)
class GivenOffering:
    """The resources and prompts of one provider that was passed to ``open_kernel(offerings=…)``."""

    offering: Offering
    rank: Rank = "code"
    foreign: bool = False

    def load(self) -> Loaded:
        return Loaded(offering=self.offering)


def tools_among(given: Iterable[object], place: str | None = None) -> Loaded:
    """Sort objects into tools and faults.

    :param place: their origin; by default the module of each object
    """
    found: list[Found] = []
    faults: list[Fault] = []
    places: dict[type, str] = {}
    for item in given:
        kind = type(item)
        if kind in places and isinstance(getattr(item, "spec", None), ToolSpec):  # there may be thousands of one class
            found.append(Found(cast("Tool", item), places[kind]))
            continue
        members = tuple(_tools_of(item)) if isinstance(item, ModuleType) else (item,)
        if not members:
            faults.append(
                Fault(place or _name_of(item), "", "this module has no tool; decorate its functions with @tool")
            )
        for member in members:
            where = place or _name_of(member)
            tool = _as_tool(member)
            if isinstance(tool, str):
                faults.append(Fault(where, "", tool))
            else:
                found.append(Found(tool, where))
                if tool is item:
                    places[kind] = where
    return Loaded(tuple(found), tuple(faults))


def _tools_of(module: ModuleType) -> Iterator[Tool]:
    seen: set[int] = set()
    for value in vars(module).values():
        if isinstance(value, Tool) and id(value) not in seen:
            seen.add(id(value))
            yield value


def _as_tool(item: object) -> Tool | str:
    """Return a usable tool, or the text of its fault."""
    if inspect.isclass(item) and issubclass(item, Tool):
        if inspect.isabstract(item):
            return f"{item.__name__} has no execute method; write async def execute(self, args, runtime)"
        try:
            item = item()
        except Exception as error:
            return f"{item.__name__}() failed ({type(error).__name__}: {error}); pass an object instead of the class"
    if isinstance(item, Tool):
        spec: Any = getattr(item, "spec", None)
        if not isinstance(spec, ToolSpec):
            return f"its spec is {type(spec).__name__}; expected spec = ToolSpec(id=…, description=…, parameters={{…}})"
        return item
    if inspect.isroutine(item):
        return "is a plain function; decorate it with @tool, which reads its signature and docstring"
    return f"is a {type(item).__name__}; expected a function with @tool, a Tool, or a module with tools"


def _name_of(item: object) -> str:
    if isinstance(item, ModuleType):
        return item.__name__
    module = getattr(item, "__module__", None) or type(item).__module__
    name = getattr(item, "__qualname__", None) or type(item).__qualname__
    return f"{module}.{name}"


# The built-in tools as a source.


@dataclass(frozen=True, slots=True)
class BuiltinSource:
    """A source of the built-in tools, in their catalog order."""

    rank: Rank = "built-in"
    foreign: bool = False

    def load(self) -> Loaded:
        from handrail.tools import ALIASES, BUILTINS  # here, so that they load only when a kernel opens

        return Loaded(tuple(Found(tool, BUILT_IN) for tool in BUILTINS), aliases=ALIASES)


# Provider tools as a source: the tools in an agent's manifest that a model's provider carries out itself.

SOURCE = "native"
"""``Entry.source`` of provider tools."""


class NativeTool(Tool):
    """A placeholder for a provider tool. It never runs."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        raise ToolError(
            f"Tool {self.spec.id} was not called: {AT_PROVIDER}. Use it in your reply as the provider documents it.",
            kind="unavailable",
        )


@dataclass(frozen=True, slots=True)
class NativeSource:
    """A source of the provider tools in an agent's manifest.

    :param chosen: ``[native]`` of the manifest, whose faults are reported with those of the manifest
    """

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


# Agents as tools, as a source: the agents that another agent's manifest lists among its tools.


@dataclass(frozen=True, slots=True)
class AgentSource:
    """A source of the agents that are tools of another agent.

    :param of: the agent that has the tools
    :param others: every agent with a valid manifest; an agent that accepts tasks from ``of`` can be a tool
    """

    of: AgentManifest
    others: Sequence[AgentManifest] = ()
    rank: Rank = "built-in"
    foreign: bool = False

    def load(self) -> Loaded:
        from handrail.tools.agents import AgentTool

        # A pattern for all tools does not include agents.
        patterns = [pattern for pattern in self.of.tools if pattern.startswith(AGENT_TOOL)]
        chosen = (
            one
            for one in self.others
            if one.takes_work_of(self.of) and any(tool_matches(pattern, AGENT_TOOL + one.id) for pattern in patterns)
        )
        return Loaded(tuple(Found(AgentTool(one.id, one.description), AGENTS) for one in chosen))


# Tools of installed Python packages, from the entry point group ``handrail.tools``.
#
# An entry point names a tool, a tool class, a module of tools, or a list or tuple of these. Only installed packages count;
# nothing is fetched.

TOOLS_GROUP = "handrail.tools"


def installed_tools() -> Iterable[metadata.EntryPoint]:
    """Return the entry points of this environment that name tools."""
    return of_group(TOOLS_GROUP)


@dataclass(frozen=True, slots=True)
class PluginSource:
    """Every entry point of :data:`TOOLS_GROUP`, in order of name and package."""

    entry_points: Callable[[], Iterable[metadata.EntryPoint]] = installed_tools
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


# Tool sources of installed Python packages, from the entry point group ``handrail.sources``.
#
# An entry point names a :class:`~handrail.contract.generation.Source`, or a function without arguments that makes one. The
# operator identifies it by the entry point's name. Its tools are third-party: faulty ones are quarantined, and a tool is
# unavailable until the user approves its definition.

SOURCES_GROUP = "handrail.sources"


def installed_sources() -> Iterable[metadata.EntryPoint]:
    """Return the entry points of this environment that name sources of tools."""
    return of_group(SOURCES_GROUP)


@dataclass(frozen=True, slots=True)
class OfferedSource:
    """A source from one entry point. The first load imports it, and its faults are never fatal."""

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
        return replace(loaded, name=self.name, about="")  # the operator provides the description of a source


def offered_sources(
    entry_points: Callable[[], Iterable[metadata.EntryPoint]] = installed_sources,
) -> list[OfferedSource]:
    """Return the sources of :data:`SOURCES_GROUP`, in order of name and value, without duplicates."""
    found: dict[str, OfferedSource] = {}
    for point in sorted(entry_points(), key=lambda one: (one.name, one.value)):
        found.setdefault(point.name, OfferedSource(point))
    return list(found.values())
