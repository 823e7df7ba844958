"""Tools given in code: decorated functions, tool objects, tool classes, and modules that hold them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from handrail.contract.errors import Fault
from handrail.contract.tool.offering import Offering
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool
from handrail.registry.sources.source import Found, Loaded, Rank


@dataclass(frozen=True, slots=True)
class PythonSource:
    """The tools that were passed to ``open_kernel(tools=…)``, in order.

    :param given: tools, classes of tools, or modules whose tools are all meant
    """

    given: tuple[object, ...]
    rank: Rank = "code"
    foreign: bool = False

    def load(self) -> Loaded:
        return tools_among(self.given)


@dataclass(frozen=True, slots=True)
class GivenOffering:
    """One of what was passed to ``open_kernel(offerings=…)``."""

    offering: Offering
    rank: Rank = "code"
    foreign: bool = False

    def load(self) -> Loaded:
        return Loaded(offering=self.offering)


def tools_among(given: Iterable[object], place: str | None = None) -> Loaded:
    """Sort objects into tools and faults.

    :param place: where they come from; by default each names its own module
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
                Fault(place or _name_of(item), "", "this module holds no tool; decorate its functions with @tool")
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
    """A usable tool, or what is wrong."""
    if inspect.isclass(item) and issubclass(item, Tool):
        if inspect.isabstract(item):
            return f"{item.__name__} has no execute method; write async def execute(self, args, runtime)"
        try:
            item = item()
        except Exception as error:
            return (
                f"{item.__name__}() failed ({type(error).__name__}: {error}); pass a made object instead of the class"
            )
    if isinstance(item, Tool):
        spec: Any = getattr(item, "spec", None)
        if not isinstance(spec, ToolSpec):
            return f"its spec is {type(spec).__name__}; expected spec = ToolSpec(id=…, description=…, parameters={{…}})"
        return item
    if inspect.isroutine(item):
        return "is a plain function; put @tool above it, which reads its signature and docstring"
    return f"is a {type(item).__name__}; expected a function under @tool, a Tool, or a module of such"


def _name_of(item: object) -> str:
    if isinstance(item, ModuleType):
        return item.__name__
    module = getattr(item, "__module__", None) or type(item).__module__
    name = getattr(item, "__qualname__", None) or type(item).__qualname__
    return f"{module}.{name}"
