"""Tools from Python: passed in code, built in, of a provider, agents as tools, and from installed packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from types import ModuleType
from typing import Any, cast

from handrail.contract.agent_manifest import AGENT_TOOL_PREFIX, AgentManifest, ToolProfile, matches_tool_pattern
from handrail.contract.errors import Diagnostic, ToolError
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.struct import Struct, field
from handrail.contract.tool.provider_tools import (
    PROVIDER_ONLY_TEXT,
    PROVIDER_TOOLS,
    ProviderToolOptions,
    make_provider_tool_spec,
)
from handrail.contract.tool.resource_provider import ResourceProvider
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import (
    AGENT_SOURCE,
    BUILT_IN,
    DiscoveredTool,
    SourceContents,
    SourceRank,
    ToolSource,
)
from handrail.store.entry_point_cache import list_entry_points_outside_workspaces as of_group


class PassedToolsSource(Struct, frozen=True):
    """The tools that were passed to ``open_kernel(tools=…)``, in order.

    :param objects: tools, classes of tools, or modules, of which every tool counts
    """

    objects: tuple[object, ...]
    rank: SourceRank = "code"
    is_third_party: bool = False

    def load(self) -> SourceContents:
        return sort_tools_and_faults(self.objects)


class PassedResourcesSource(Struct, frozen=True):
    """The resources and prompts of one provider that was passed to ``open_kernel(resources=…)``."""

    provider: ResourceProvider
    rank: SourceRank = "code"
    is_third_party: bool = False

    def load(self) -> SourceContents:
        return SourceContents(resource_provider=self.provider)


def sort_tools_and_faults(objects: Iterable[object], place: str | None = None) -> SourceContents:
    """Sort objects into tools and faults.

    :param place: their origin; by default the module of each object
    """
    found: list[DiscoveredTool] = []
    faults: list[Diagnostic] = []
    places: dict[type, str] = {}
    for item in objects:
        kind = type(item)
        if kind in places and isinstance(getattr(item, "spec", None), ToolSpec):  # there may be thousands of one class
            found.append(DiscoveredTool(cast("Tool", item), places[kind]))
            continue
        members = tuple(_tools_of(item)) if isinstance(item, ModuleType) else (item,)
        if not members:
            faults.append(
                Diagnostic(place or _name_of(item), "", "this module has no tool; decorate its functions with @tool")
            )
        for member in members:
            where = place or _name_of(member)
            tool = _as_tool(member)
            if isinstance(tool, str):
                faults.append(Diagnostic(where, "", tool))
            else:
                found.append(DiscoveredTool(tool, where))
                if tool is item:
                    places[kind] = where
    return SourceContents(tuple(found), tuple(faults))


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


class BuiltinSource(Struct, frozen=True):
    """A source of the built-in tools, in their catalog order.

    :param profile: adds the tools that exist in this profile only
    """

    profile: ToolProfile | None = None
    rank: SourceRank = "built-in"
    is_third_party: bool = False

    def load(self) -> SourceContents:
        from handrail.tools import ALIASES, BUILTINS, PROFILE_BUILTINS  # here, so that they load only with a kernel

        tools = (*BUILTINS, *(PROFILE_BUILTINS.get(self.profile, ()) if self.profile else ()))
        return SourceContents(tuple(DiscoveredTool(tool, BUILT_IN) for tool in tools), aliases=ALIASES)


# Provider tools as a source: the tools in an agent's manifest that a model's provider carries out itself.

PROVIDER_SOURCE = "native"
"""``ToolEntry.source`` of provider tools."""


class ProviderToolPlaceholder(Tool):
    """A placeholder for a provider tool. It never runs."""

    def __init__(self, spec: ToolSpec) -> None:
        self.spec = spec

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        raise ToolError(
            f"Tool {self.spec.id} was not called: {PROVIDER_ONLY_TEXT}. Use it in your reply as the provider documents it.",
            kind="unavailable",
        )


class ProviderToolSource(Struct, frozen=True):
    """A source of the provider tools in an agent's manifest.

    :param chosen: ``[native]`` of the manifest, whose faults are reported with those of the manifest
    """

    chosen: ProviderToolOptions = field(default_factory=dict[str, Any])
    rank: SourceRank = "built-in"
    is_third_party: bool = False

    def load(self) -> SourceContents:
        return SourceContents(
            tuple(
                DiscoveredTool(ProviderToolPlaceholder(make_provider_tool_spec(name, given)), PROVIDER_SOURCE)
                for name, given in self.chosen.items()
                if name in PROVIDER_TOOLS
            )
        )


# Agents as tools, as a source: the agents that another agent's manifest lists among its tools.


class SubagentToolSource(Struct, frozen=True):
    """A source of the agents that are tools of another agent.

    :param agent: the agent that has the tools
    :param others: every agent with a valid manifest; an agent that accepts tasks from ``of`` can be a tool
    """

    agent: AgentManifest
    others: Sequence[AgentManifest] = ()
    rank: SourceRank = "built-in"
    is_third_party: bool = False

    def load(self) -> SourceContents:
        from handrail.tools.delegation_tools import AgentDelegationTool

        # A pattern for all tools does not include agents.
        patterns = [pattern for pattern in self.agent.tools if pattern.startswith(AGENT_TOOL_PREFIX)]
        chosen = (
            one
            for one in self.others
            if one.accepts_delegation_from(self.agent)
            and any(matches_tool_pattern(pattern, AGENT_TOOL_PREFIX + one.id) for pattern in patterns)
        )
        return SourceContents(
            tuple(DiscoveredTool(AgentDelegationTool(one.id, one.description), AGENT_SOURCE) for one in chosen)
        )


# Tools of installed Python packages, from the entry point group ``handrail.tools``.
#
# An entry point names a tool, a tool class, a module of tools, or a list or tuple of these. Only installed packages count;
# nothing is fetched.

TOOLS_GROUP = "handrail.tools"


def list_tool_entry_points() -> Iterable[metadata.EntryPoint]:
    """Return the entry points of this environment that name tools."""
    return of_group(TOOLS_GROUP)


class ToolEntryPointsSource(Struct, frozen=True):
    """Every entry point of :data:`TOOLS_GROUP`, in order of name and package."""

    entry_points: Callable[[], Iterable[metadata.EntryPoint]] = list_tool_entry_points
    rank: SourceRank = "package"
    is_third_party: bool = False

    def load(self) -> SourceContents:
        tools: list[DiscoveredTool] = []
        faults: list[Diagnostic] = []
        for point in sorted(self.entry_points(), key=lambda p: (p.name, _package(p), p.value)):
            place = f"entry point {point.name} of {_package(point)}"
            try:
                offered: object = point.load()
            except (Exception, SystemExit) as error:
                faults.append(Diagnostic(place, point.value, f"cannot be imported: {type(error).__name__}: {error}"))
                continue
            several = cast("Iterable[object]", offered) if isinstance(offered, (list, tuple)) else (offered,)
            loaded = sort_tools_and_faults(several, place)
            tools += loaded.tools
            faults += loaded.faults
        return SourceContents(tuple(tools), tuple(faults))


def _package(point: metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unnamed package"


# Tool sources of installed Python packages, from the entry point group ``handrail.sources``.
#
# An entry point names a :class:`~handrail.contract.tool_generation.ToolSource`, or a function without arguments that makes one. The
# operator identifies it by the entry point's name. Its tools are third-party: faulty ones are quarantined, and a tool is
# unavailable until the user approves its definition.

SOURCES_GROUP = "handrail.sources"


def list_source_entry_points() -> Iterable[metadata.EntryPoint]:
    """Return the entry points of this environment that name sources of tools."""
    return of_group(SOURCES_GROUP)


class CustomEntryPointSource(Struct, frozen=True):
    """A source from one entry point. The first load imports it, and its faults are never fatal."""

    point: metadata.EntryPoint
    rank: SourceRank = "package"
    is_third_party: bool = True

    @property
    def name(self) -> str:
        return self.point.name

    def load(self) -> SourceContents:
        made: Any = self.point.load()
        source: Any = made() if callable(made) else made
        if not callable(getattr(source, "load", None)):
            problem = f"is a {type(made).__name__}; expected a Source, or a function that makes one"
            return SourceContents(
                faults=(Diagnostic(f"entry point {self.name}", self.point.value, problem),), name=self.name
            )
        loaded = cast("ToolSource", source).load()
        return replace(loaded, name=self.name, description="")  # the operator provides the description of a source


def find_entry_point_sources(
    entry_points: Callable[[], Iterable[metadata.EntryPoint]] = list_source_entry_points,
) -> list[CustomEntryPointSource]:
    """Return the sources of :data:`SOURCES_GROUP`, in order of name and value, without duplicates."""
    found: dict[str, CustomEntryPointSource] = {}
    for point in sorted(entry_points(), key=lambda one: (one.name, one.value)):
        found.setdefault(point.name, CustomEntryPointSource(point))
    return list(found.values())
