"""One generation of tools as one agent's models see it: what is core, which categories the rest is in.

Made once for each generation and never changed. Which tools of it an interaction has in view beside the core ones is
the interaction's own matter (:mod:`handrail.catalog.interaction`).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from handrail.catalog.categories import CORE, SHIPPED, about, about_empty, category_of
from handrail.contract.agent import AGENT_TOOL, tool_matches
from handrail.contract.doors.agents import MAX_DEPTH
from handrail.contract.doors.jobs import Category
from handrail.contract.generation import AGENTS, BUILT_IN, Entry, Generation
from handrail.contract.tool.names import OFFER_IDS
from handrail.contract.tool.native import AT_PROVIDER
from handrail.contract.tool.spec import ToolSpec

MOST_GIVEN = 128
"""Tools that are in view at most, however many are brought: OpenAI refuses a request that has more."""

MOST_IN_VIEW = 20
"""An agent with at most this many tools has all of them in view from the start."""
FINDERS = ("browse_tools", "load_tools", "find_tools", "tool_search")
"""The ways to a tool that is not in view."""
Standing = Literal["core", "in view", "to be loaded", "withheld"]


@dataclass(frozen=True, slots=True)
class CatalogOptions:
    """What an operator and an agent say of a catalog.

    :param core: the ids that the agent's manifest names, beside those that are core anyway
    :param texts: what models are told of categories that do not ship, as ``(name, text)``
    :param index_tokens: about how many tokens the list of names in the system text may take
    :param preload: how many tools are brought into view by a user's text, at the beginning of each interaction
    :param preload_tokens: about how many tokens these may take together
    :param above: of each agent above a sub-agent, the nearest first, patterns of those that it may hand work to
    """

    core: tuple[str, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    index_tokens: int = 1_000
    preload: int = 0
    preload_tokens: int = 2_000
    above: tuple[tuple[str, ...], ...] = ()


class View:
    """See the module. Withheld tools are nowhere in it.

    :ivar core: the core tools, built-in ones first, then in the order in which the agent names them
    :ivar ready: every tool that can be called, by id
    :ivar members: by category, in the order in which they are shown, the ids of its tools; no core tool among them
    :ivar texts: by category, what models are told of it
    :ivar empty: by category that ships and has no member, what models are told of it
    :ivar native: those that a model's provider carries out itself, which are none of these
    :ivar whole: everything is in view from the start
    :ivar first: the ids that are in view from the start beside the core: all, or the operator's own few
    :ivar barred: the ids of agents as tools that may not be handed work here: the model is told of none, as if they were not there
    """

    __slots__ = (
        "__weakref__",
        "_category",
        "barred",
        "core",
        "empty",
        "first",
        "members",
        "native",
        "ready",
        "texts",
        "whole",
    )

    def __init__(self, generation: Generation, options: CatalogOptions) -> None:
        idle = idle_in(generation)
        self.barred = frozenset(_barred(generation, options.above))
        ready = {
            tool_id: entry
            for tool_id, entry in generation.entries.items()
            if entry.withheld is None and tool_id not in idle and tool_id not in self.barred
        }
        self.ready: Mapping[str, Entry] = MappingProxyType(ready)
        every = generation.entries.values()
        self.native = tuple(one.spec for one in every if one.spec.provider_support and one.withheld == AT_PROVIDER)
        core = [tool_id for tool_id, entry in ready.items() if _is_core(entry)]
        core += [tool_id for tool_id in options.core if tool_id in ready]
        self.core: Mapping[str, Entry] = MappingProxyType({tool_id: ready[tool_id] for tool_id in dict.fromkeys(core)})
        # An agent that has no way to what is not in view sees all that it has.
        self.whole = len(ready) <= MOST_IN_VIEW or not any(finder in ready for finder in FINDERS)
        others = [tool_id for tool_id in ready if tool_id not in self.core]
        own = [tool_id for tool_id in others if is_extension(ready[tool_id]) and ready[tool_id].foreign is None]
        # Who gives a model a few tools of their own wants it to have them, however many ship.
        few = own if len(self.core) + len(own) <= MOST_IN_VIEW else []
        self.first = frozenset(others if self.whole else few)
        members: dict[str, list[str]] = {}
        named: dict[tuple[str, str | None], list[str]] = {}
        for tool_id in sorted(others, key=lambda tool_id: ready[tool_id].foreign is not None):
            entry = ready[tool_id]
            key = category_of(entry), None if entry.foreign is None else entry.foreign.name
            if (ids := named.get(key)) is None:
                ids = named[key] = members.setdefault(_apart(key[0], entry, members, ready), [])
            ids.append(tool_id)
        ordered = [*(name for name in SHIPPED if name in members), *sorted(members.keys() - SHIPPED.keys())]
        given = dict(options.texts)
        self.members: Mapping[str, tuple[str, ...]] = MappingProxyType({n: tuple(members[n]) for n in ordered})
        self.texts: Mapping[str, str] = MappingProxyType(
            {n: about(n, members[n], ready[members[n][0]], given) for n in ordered}
        )
        withheld = [
            one for one in every if one.withheld is not None and not one.spec.provider_support and not _is_core(one)
        ]
        self.empty: Mapping[str, str] = MappingProxyType(
            {
                name: about_empty(name, [one for one in withheld if category_of(one) == name], generation.beyond)
                for name in SHIPPED
                if name not in members
            }
        )
        self._category = {tool_id: name for name, ids in members.items() for tool_id in ids}

    def category(self, tool_id: str) -> str:
        """The one category of a tool that can be called; :data:`~handrail.catalog.categories.CORE` for a core tool."""
        return self._category.get(tool_id, CORE)

    def category_of(self, entry: Entry) -> str:
        """The category of any tool of the generation, withheld or not."""
        if entry.id in self.ready:
            return self.category(entry.id)
        return CORE if _is_core(entry) else category_of(entry)

    def categories(self) -> list[Category]:
        """The categories that have tools, in order, and behind them those that ship and have none."""
        filled = [Category(name, self.texts[name], len(ids)) for name, ids in self.members.items()]
        return [*filled, *(Category(name, text, 0) for name, text in self.empty.items())]

    def shown(self, brought: Iterable[str]) -> list[ToolSpec]:
        """The tools in view: the core tools, then those of ``brought``, in their order."""
        core, ready = self.core, self.ready
        shown = [entry.spec for entry in core.values()]
        shown += [ready[tool_id].spec for tool_id in brought if tool_id in ready and tool_id not in core]
        return shown

    def standing(self, entry: Entry) -> Standing:
        """How a tool stands at the start of an interaction."""
        if entry.withheld is not None:
            return "withheld"
        if entry.id in self.core:
            return "core"
        return "in view" if entry.id in self.first else "to be loaded"


_views: weakref.WeakKeyDictionary[Generation, dict[CatalogOptions, View]] = weakref.WeakKeyDictionary()


def idle_in(generation: Generation) -> Collection[str]:
    """Tools that are of no use, and no model is told of: those for offerings, where no source has anything beside tools."""
    return () if generation.offerings else OFFER_IDS


def _barred(generation: Generation, above: Sequence[Sequence[str]]) -> Iterable[str]:
    """Agents as tools that an agent with these above it may not hand work to, or that would be a level too many."""
    if not above:
        return
    for tool_id, entry in generation.entries.items():
        if entry.source == AGENTS:
            agent = tool_id.removeprefix(AGENT_TOOL)
            allowed = all(any(tool_matches(pattern, agent) for pattern in each) for each in above)
            if not allowed or len(above) >= MAX_DEPTH:
                yield tool_id


def view_of(generation: Generation, options: CatalogOptions) -> View:
    """The view of ``generation``, made when it is first asked for."""
    views = _views.setdefault(generation, {})
    view = views.get(options)
    if view is None:
        view = views[options] = View(generation, options)
    return view


def _is_core(entry: Entry) -> bool:
    """A foreign source does not say so of its tools."""
    return entry.spec.tier == CORE and entry.foreign is None


def _apart(name: str, entry: Entry, members: Mapping[str, list[str]], ready: Mapping[str, Entry]) -> str:
    """``name``, or another for a foreign tool where the operator's own tools have that one already, or the other way
    round: whose text a category has is never in doubt."""
    mine = None if entry.foreign is None else entry.foreign.name
    candidate, number = name, 2
    while (ids := members.get(candidate)) is not None:
        other = ready[ids[0]].foreign
        if (None if other is None else other.name) == mine:
            break
        candidate, number = f"{name}-{number}", number + 1
    return candidate


def is_extension(entry: Entry) -> bool:
    """Whether a tool came from anywhere but Handrail itself."""
    return entry.source != BUILT_IN
