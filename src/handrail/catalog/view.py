"""One generation of tools as the models of one agent see it: core tools, and categories for the rest.

A view is made once for each generation and never changes. :mod:`handrail.catalog.interaction` tracks the tools that an
interaction has loaded in addition to the core.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from handrail.contract.agent import AGENT_TOOL, tool_matches
from handrail.contract.doors.agents import MAX_DEPTH
from handrail.contract.doors.jobs import Category
from handrail.contract.generation import AGENTS, BUILT_IN, Entry, Generation
from handrail.contract.tool.names import OFFER_IDS
from handrail.contract.tool.native import AT_PROVIDER
from handrail.contract.tool.spec import ToolSpec

# Categories: each tool is in exactly one, with a text for models.
#
# The text of each of the seven shipped categories is composed from fixed words, and promises only the abilities of its tools.
# A third-party source is one category under the name and text that its operator gave it: nothing that a server says about
# itself or its tools moves them to another.


@dataclass(frozen=True, slots=True)
class Topic:
    """The subject of a shipped category.

    :param about: what belongs in it
    :param offers: what its tools do, each in a few words with the ids of the tools that do it. An id that ends in ``.*``
        means every tool below
    """

    about: str
    offers: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def text(self, ids: Collection[str]) -> str:
        """The text that models read of the category if its tools are ``ids``: it promises nothing without a tool."""
        offers = [words for words, doing in self.offers if any(_is_one_of(tool_id, doing) for tool_id in ids)]
        return f"{self.about}: {', '.join(offers)}." if offers else f"{self.about}."

    def has(self, tool_id: str) -> bool:
        """Whether the tool is one of those that ship in this category."""
        return any(_is_one_of(tool_id, doing) for _, doing in self.offers)


SHIPPED: Mapping[str, Topic] = MappingProxyType(
    {
        "git": Topic(
            "Version control with git",
            (
                ("status", ("git.status",)),
                ("history", ("git.log", "git.show")),
                ("differences", ("git.diff",)),
                ("authors of lines", ("git.blame",)),
                ("branches", ("git.branches", "git.create_branch", "git.checkout")),
                ("commits", ("git.add", "git.commit")),
                ("merges", ("git.merge",)),
                ("stashes", ("git.stash",)),
                ("new repositories and clones", ("git.init", "git.clone")),
                ("push", ("git.push",)),
            ),
        ),
        "project": Topic("Projects and workspaces"),
        "agent": Topic(
            "Other agents",
            (
                ("tasks for an agent by its name", ("agent.*",)),
                ("messages over channels", ("send_message", "wait_channel")),
            ),
        ),
        "hooks": Topic(
            "Triggers that notify you later",
            (
                ("timers", ("add_timer",)),
                ("schedules", ("add_schedule",)),
                ("watched channels", ("watch_channel",)),
                ("their list and removal", ("list_triggers", "remove_trigger")),
            ),
        ),
        "memory": Topic(
            "Notes and memory",
            (
                ("notes of this session", ("scratchpad",)),
                ("search of the conversation", ("search_memory",)),
                ("stored outputs of its calls", ("artifact.read",)),
                ("compaction of the conversation", ("memory.compact",)),
            ),
        ),
        "files": Topic(
            "Files of the workspace",
            (
                ("several edits at once", ("multi_edit",)),
                ("changes by line number", ("file.patch",)),
                ("folder trees", ("tree",)),
                ("values in JSON files", ("json_read", "json_write")),
            ),
        ),
        "system": Topic(
            "Programs and this session",
            (
                ("Python code", ("python",)),
                ("background jobs", ("jobs", "read_job", "wait", "stop_task")),
                ("terminals", ("terminal.*",)),
                ("steps of stateful tools", ("tool.step", "tool.close")),
                ("resources", ("resource.*",)),
                ("prompts", ("prompt.*",)),
            ),
        ),
    }
)
"""By name, in the order in which they are shown."""

CORE = "core"
"""What a core tool has in place of a category."""
OWN = "own"
"""The category of operators' tools that say none, and whose ids have no first part to go by."""
_OWN_TEXT = "Tools of this installation."
MAX_NAME = 64
MAX_TEXT = 200
"""Characters of a text that an operator gave."""
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def category_of(entry: Entry) -> str:
    """The name of the category that ``entry`` is in, unless it is core.

    A foreign tool's is its source's. An operator's tool may name one; else the first part of its id does
    (``email`` of ``email.send``).
    """
    if entry.foreign is not None:
        name = _name(entry.foreign.name) or "foreign"
        return f"{name}-source" if name.lower() in (*SHIPPED, CORE, OWN) else name
    spec = entry.spec
    name = _name(spec.category or "") or (_name(spec.id.partition(".")[0]) if "." in spec.id else OWN)
    return f"{name}-tools" if name == CORE else name


def about(name: str, ids: Collection[str], entry: Entry, texts: Mapping[str, str]) -> str:
    """What models are told of the category ``name``.

    :param ids: of the tools in it
    :param entry: any of them
    :param texts: the operator's, by name; those of the categories that ship are fixed
    """
    if (topic := SHIPPED.get(name)) is not None:
        return topic.text(ids)
    given = texts.get(name) or (entry.foreign.about if entry.foreign is not None else "")
    line = " ".join(given.split())
    if line:
        return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
    if entry.foreign is not None:
        return f"Tools of {name}, a source outside this installation."
    return _OWN_TEXT if name == OWN else f"Tools of this installation for {name}."


def about_empty(name: str, withheld: Iterable[Entry], beyond: Iterable[str]) -> str:
    """What models are told of a category that ships and has no tools here: what belongs in it, and how it gets tools.

    :param withheld: the tools of it that cannot be called
    :param beyond: ids of the tools that only other agents have
    """
    topic, without = SHIPPED[name], list(withheld)
    if without:
        line = " ".join(str(without[0].withheld).split())
        reason = line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 1]}…"
        how = f"its {len(without)} tools are withheld" if len(without) > 1 else "its tool is withheld"
        return f"{topic.about}. Empty here, because {how}: {reason}"
    if any(topic.has(tool_id) for tool_id in beyond):
        return f"{topic.about}. Empty here, because this agent has none of its tools. The user can name them in `tools` of its manifest."
    return f'{topic.about}. Empty here. The user can add a tool to it: one whose definition says category "{name}".'


def _is_one_of(tool_id: str, patterns: Iterable[str]) -> bool:
    return any(tool_id.startswith(one[:-1]) if one.endswith(".*") else tool_id == one for one in patterns)


@lru_cache(maxsize=4_096)
def _name(text: str) -> str:
    return _NOT_IN_A_NAME.sub("-", text.strip())[:MAX_NAME].strip("-._")


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
        """The one category of a tool that can be called; :data:`~handrail.catalog.view.CORE` for a core tool."""
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


# The active set of one interaction: the tools loaded into a model's view, in loading order.
#
# It is kept as steps that are only appended, so a length identifies a state, and the holder of a copy needs only the new
# steps. A step is one text:
#
# - ``ID``: in view, and stays there; also for a tool that was there already, and might have had to make room
# - ``?ID``: found by a search; it makes room for others until a call uses it
# - ``-ID``: removed to make room

FOUND, LEFT = "?", "-"
_MANY = 1_000
"""Steps of which most may be without a trace."""


class ActiveSet:
    """Ids, each once."""

    __slots__ = ("_steps", "in_view")

    def __init__(self, steps: Iterable[str] = ()) -> None:
        self._steps: list[str] = []
        self.in_view: dict[str, bool] = {}
        """What is there now, and whether it makes room for others."""
        self.take(steps)

    def __len__(self) -> int:
        """How many steps led here."""
        return len(self._steps)

    def __contains__(self, tool_id: object) -> bool:
        return tool_id in self.in_view

    def take(self, steps: Iterable[str]) -> tuple[str, ...]:
        """Go on by ``steps``. Gives those that changed anything."""
        taken = tuple(step for step in steps if _go(self.in_view, step))
        self._steps += taken
        return taken

    @property
    def loose(self) -> tuple[str, ...]:
        """What makes room for others, what was found longest ago first."""
        return tuple(tool_id for tool_id, loose in self.in_view.items() if loose)

    def first(self, count: int | None = None) -> tuple[str, ...]:
        """What was in view after ``count`` steps, in order; now by default."""
        if count is None or count >= len(self._steps):
            return tuple(self.in_view)
        found: dict[str, bool] = {}
        for step in self._steps[:count]:
            _go(found, step)
        return tuple(found)

    def steps(self) -> tuple[str, ...]:
        """The fewest that lead to what is in view now."""
        return tuple(f"{FOUND}{tool_id}" if loose else tool_id for tool_id, loose in self.in_view.items())

    def shortened(self) -> ActiveSet:
        """Another one with the same in view where this one has very many steps, else itself. Lengths are of this one."""
        return ActiveSet(self.steps()) if len(self._steps) > _MANY + 2 * len(self.in_view) else self


def _go(in_view: dict[str, bool], step: str) -> bool:
    """Change what is in view by one step. Gives whether that changed anything."""
    if step.startswith(LEFT):
        return in_view.pop(step[1:], None) is not None
    if step.startswith(FOUND):
        if step[1:] in in_view:
            return False
        in_view[step[1:]] = True
    elif in_view.get(step) is False:
        return False
    else:
        in_view[step] = False
    return True
