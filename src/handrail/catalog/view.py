"""One generation of tools as the models of one agent see it: core tools, and categories for the rest.

A view is made once for each generation and never changes. :mod:`handrail.catalog.loaded_tools` tracks the tools that an
interaction has loaded in addition to the core.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from handrail.contract.agent_manifest import AGENT_TOOL_PREFIX, matches_tool_pattern
from handrail.contract.services.job_and_tool_services import ToolCategory
from handrail.contract.services.subagent_services import MAX_DEPTH
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.provider_tools import PROVIDER_ONLY_TEXT
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import RESOURCE_IDS
from handrail.contract.tool_generation import AGENT_SOURCE, BUILT_IN, Generation, ToolEntry

# Categories: each tool is in exactly one, with a text for models.
#
# The text of each of the seven shipped categories is composed from fixed words, and promises only the abilities of its tools.
# A third-party source is one category under the name and text that its operator gave it: nothing that a server says about
# itself or its tools moves them to another.


class ShippedCategoryTopic(Struct, frozen=True):
    """The subject of a shipped category.

    :param about: the subject in a few words
    :param abilities: what its tools do, each in a few words with the ids of the tools. An id that ends in ``.*`` means every tool
        below it
    """

    about: str
    abilities: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def describe(self, ids: Collection[str]) -> str:
        """Return the text of the category for models if its tools are ``ids``.

        It promises only what these tools do.
        """
        offers = [words for words, doing in self.abilities if any(_is_one_of(tool_id, doing) for tool_id in ids)]
        return f"{self.about}: {', '.join(offers)}." if offers else f"{self.about}."

    def has_shipped_tool(self, tool_id: str) -> bool:
        """Return whether the tool is one of those that ship in this category."""
        return any(_is_one_of(tool_id, doing) for _, doing in self.abilities)


SHIPPED_CATEGORIES: Mapping[str, ShippedCategoryTopic] = MappingProxyType(
    {
        "git": ShippedCategoryTopic(
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
                ("pull requests", ("git.pr",)),
            ),
        ),
        "project": ShippedCategoryTopic(
            "Projects and workspaces",
            (
                ("overview of a repository", ("repo_overview",)),
                ("tasks that all sessions share", ("create_task", "list_tasks", "edit_task", "get_task")),
            ),
        ),
        "agent": ShippedCategoryTopic(
            "Other agents",
            (
                ("tasks for an agent by its name", ("agent.*",)),
                ("messages over channels", ("send_message", "wait_channel")),
            ),
        ),
        "hooks": ShippedCategoryTopic(
            "Triggers that notify you later",
            (
                ("timers", ("add_timer",)),
                ("schedules", ("add_schedule",)),
                ("watched channels", ("watch_channel",)),
                ("their list and removal", ("list_triggers", "remove_trigger")),
            ),
        ),
        "memory": ShippedCategoryTopic(
            "Notes and memory",
            (
                ("notes of this session", ("scratchpad",)),
                ("search of the conversation", ("search_memory",)),
                ("stored outputs of its calls", ("artifact.read",)),
                ("facts from all sessions", ("memory.query", "memory.upsert")),
                ("compaction of the conversation", ("memory.compact",)),
            ),
        ),
        "files": ShippedCategoryTopic(
            "Files of the workspace",
            (
                ("several edits at once", ("multi_edit",)),
                ("patches of several files", ("apply_patch",)),
                ("changes by line number", ("file.patch",)),
                ("moves and deletions", ("file.move", "file.delete")),
                ("folder trees", ("tree",)),
                ("uses and errors of code", ("lsp",)),
                ("values in JSON files", ("json_read", "json_write")),
            ),
        ),
        "system": ShippedCategoryTopic(
            "Programs and this session",
            (
                ("Python code", ("python",)),
                ("background jobs", ("jobs", "read_job", "wait", "stop_task")),
                ("terminals", ("terminal.*",)),
                ("requests to HTTP services", ("http.post",)),
                ("plans that the user decides on", ("plan", "plan_exit")),
                ("steps of stateful tools", ("tool.step", "tool.close")),
                ("resources", ("resource.*",)),
                ("prompts", ("prompt.*",)),
            ),
        ),
    }
)
"""The shipped categories by name, in the order of display."""

CORE_CATEGORY = "core"
"""The value of a core tool in place of a category."""
OWN_CATEGORY = "own"
"""The category of operators' tools that name none and have an id without parts."""
_OWN_TEXT = "Tools of this installation."
MAX_CATEGORY_NAME = 64
MAX_CATEGORY_TEXT = 200
"""The maximum characters of a text from an operator."""
_NOT_IN_A_NAME = compile_regex_lazily(r"[^A-Za-z0-9_.-]+")


def find_non_core_category_name(entry: ToolEntry) -> str:
    """Return the name of the category of ``entry``, for an entry that is not core.

    A third-party tool has the name of its source. An operator's tool may name a category. Otherwise it has the first part of
    its id (``email`` of ``email.send``).
    """
    if entry.third_party is not None:
        name = _name(entry.third_party.name) or "foreign"
        return f"{name}-source" if name.lower() in (*SHIPPED_CATEGORIES, CORE_CATEGORY, OWN_CATEGORY) else name
    spec = entry.spec
    name = _name(spec.category or "") or (_name(spec.id.partition(".")[0]) if "." in spec.id else OWN_CATEGORY)
    return f"{name}-tools" if name == CORE_CATEGORY else name


def describe_category(name: str, ids: Collection[str], entry: ToolEntry, texts: Mapping[str, str]) -> str:
    """Return the text of the category ``name`` for models.

    :param ids: the tools in it
    :param entry: any of these tools
    :param texts: the operator's texts, by name; those of shipped categories are fixed
    """
    if (topic := SHIPPED_CATEGORIES.get(name)) is not None:
        return topic.describe(ids)
    given = texts.get(name) or (entry.third_party.description if entry.third_party is not None else "")
    if line := " ".join(given.split()):
        return line if len(line) <= MAX_CATEGORY_TEXT else f"{line[: MAX_CATEGORY_TEXT - 1]}…"
    if entry.third_party is not None:
        return f"Tools of {name}, a third-party source."
    return _OWN_TEXT if name == OWN_CATEGORY else f"Tools of this installation for {name}."


def describe_empty_category(name: str, unavailable: Iterable[ToolEntry], beyond: Iterable[str]) -> str:
    """Return the text of a shipped category without tools, for models.

    It says what belongs in the category, and how it gets tools.

    :param unavailable: the unavailable tools of this category
    :param beyond: the ids of tools that only other agents have
    """
    topic, without = SHIPPED_CATEGORIES[name], list(unavailable)
    if without:
        line = " ".join(str(without[0].unavailable_reason).split())
        reason = line if len(line) <= MAX_CATEGORY_TEXT else f"{line[: MAX_CATEGORY_TEXT - 1]}…"
        how = f"its {len(without)} tools are unavailable" if len(without) > 1 else "its tool is unavailable"
        return f"{topic.about}. Empty, because {how}: {reason}"
    if any(topic.has_shipped_tool(tool_id) for tool_id in beyond):
        return f"{topic.about}. Empty, because this agent has none of its tools. The user can add them to `tools` of the agent's manifest."
    return f'{topic.about}. Empty. The user can add a tool with the category "{name}".'


def _is_one_of(tool_id: str, patterns: Iterable[str]) -> bool:
    return any(tool_id.startswith(one[:-1]) if one.endswith(".*") else tool_id == one for one in patterns)


@lru_cache(maxsize=4_096)
def _name(text: str) -> str:
    return _NOT_IN_A_NAME.sub("-", text.strip())[:MAX_CATEGORY_NAME].strip("-._")


MAX_ACTIVE_TOOLS = 128
"""The maximum number of loaded tools. OpenAI refuses a request with more."""

MAX_INITIALLY_ACTIVE = 20
"""The maximum number of tools of an agent for which all are loaded from the start."""
DISCOVERY_TOOLS = ("browse_tools", "load_tools", "find_tools", "tool_search")
"""The tools by which a model reaches a tool that is not loaded."""
ToolStatus = Literal["core", "active", "deferred", "unavailable"]


class CatalogOptions(Struct, frozen=True):
    """The options of an operator and an agent for a catalog.

    :param core: the core tools that the agent's manifest names, in addition to the default ones
    :param texts: the texts of categories that do not ship, as ``(name, text)``
    :param index_tokens: the approximate budget, in tokens, of the list of tools in the system text
    :param preload: the number of tools to load for a user's text at the start of each interaction
    :param preload_tokens: the approximate maximum tokens of these tools
    :param above: for each agent above a sub-agent, the nearest first: patterns of the agents that it may delegate to
    """

    core: tuple[str, ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    index_tokens: int = 1_000
    preload: int = 0
    preload_tokens: int = 2_000
    above: tuple[tuple[str, ...], ...] = ()


class CatalogView:
    """One generation of tools as the models of one agent see it. It has no unavailable tools.

    :ivar core_tools: the core tools, built-in ones first, then in the order of the agent's manifest
    :ivar available_tools: every tool that can be called, by id
    :ivar category_members: by category, in the order of display, the ids of its tools without core tools
    :ivar category_texts: by category, its text for models
    :ivar empty_categories: by shipped category without tools, its text for models
    :ivar provider_tools: the provider tools, which are in none of the others
    :ivar is_fully_active: whether all tools are loaded from the start
    :ivar initially_active: the ids that are loaded from the start besides the core: all, or the operator's own few
    :ivar barred_agents: the ids of agent tools that may not be used here. They are hidden from the model
    """

    __slots__ = (
        "__weakref__",
        "_category",
        "available_tools",
        "barred_agents",
        "category_members",
        "category_texts",
        "core_tools",
        "empty_categories",
        "initially_active",
        "is_fully_active",
        "provider_tools",
    )

    def __init__(self, generation: Generation, options: CatalogOptions) -> None:
        idle = list_unusable_resource_tools(generation)
        self.barred_agents = frozenset(_iterate_excluded_agent_tools(generation, options.above))
        ready = {
            tool_id: entry
            for tool_id, entry in generation.entries.items()
            if entry.unavailable_reason is None and tool_id not in idle and tool_id not in self.barred_agents
        }
        self.available_tools: Mapping[str, ToolEntry] = MappingProxyType(ready)
        every = generation.entries.values()
        self.provider_tools = tuple(
            one.spec for one in every if one.spec.provider_support and one.unavailable_reason == PROVIDER_ONLY_TEXT
        )
        core = [tool_id for tool_id, entry in ready.items() if _is_core(entry)]
        named_core = (generation.aliases.get(name, name) for name in options.core)
        core += [tool_id for tool_id in named_core if tool_id in ready]
        self.core_tools: Mapping[str, ToolEntry] = MappingProxyType(
            {tool_id: ready[tool_id] for tool_id in dict.fromkeys(core)}
        )
        # An agent without a tool to load others gets all of its tools.
        self.is_fully_active = len(ready) <= MAX_INITIALLY_ACTIVE or not any(
            finder in ready for finder in DISCOVERY_TOOLS
        )
        others = [tool_id for tool_id in ready if tool_id not in self.core_tools]
        own = [
            tool_id for tool_id in others if is_non_builtin_tool(ready[tool_id]) and ready[tool_id].third_party is None
        ]
        # An operator who adds a few tools wants the model to have them, however many tools ship.
        few = own if len(self.core_tools) + len(own) <= MAX_INITIALLY_ACTIVE else []
        self.initially_active = frozenset(others if self.is_fully_active else few)
        members: dict[str, list[str]] = {}
        named: dict[tuple[str, str | None], list[str]] = {}
        for tool_id in sorted(others, key=lambda tool_id: ready[tool_id].third_party is not None):
            entry = ready[tool_id]
            key = find_non_core_category_name(entry), None if entry.third_party is None else entry.third_party.name
            if (ids := named.get(key)) is None:
                ids = named[key] = members.setdefault(_unique_category_name(key[0], entry, members, ready), [])
            ids.append(tool_id)
        ordered = [
            *(name for name in SHIPPED_CATEGORIES if name in members),
            *sorted(members.keys() - SHIPPED_CATEGORIES.keys()),
        ]
        given = dict(options.texts)
        self.category_members: Mapping[str, tuple[str, ...]] = MappingProxyType({n: tuple(members[n]) for n in ordered})
        self.category_texts: Mapping[str, str] = MappingProxyType(
            {n: describe_category(n, members[n], ready[members[n][0]], given) for n in ordered}
        )
        unavailable = [
            one
            for one in every
            if one.unavailable_reason is not None and not one.spec.provider_support and not _is_core(one)
        ]
        self.empty_categories: Mapping[str, str] = MappingProxyType(
            {
                name: describe_empty_category(
                    name,
                    [one for one in unavailable if find_non_core_category_name(one) == name],
                    generation.other_tool_ids,
                )
                for name in SHIPPED_CATEGORIES
                if name not in members
            }
        )
        self._category = {tool_id: name for name, ids in members.items() for tool_id in ids}

    def find_category_by_tool_id(self, tool_id: str) -> str:
        """Return the category of a tool that can be called.

        :returns: :data:`~handrail.catalog.view.CORE_CATEGORY` for a core tool
        """
        return self._category.get(tool_id, CORE_CATEGORY)

    def find_category_of_entry(self, entry: ToolEntry) -> str:
        """Return the category of any tool of the generation, even if it is unavailable."""
        if entry.id in self.available_tools:
            return self.find_category_by_tool_id(entry.id)
        return CORE_CATEGORY if _is_core(entry) else find_non_core_category_name(entry)

    def list_categories(self) -> list[ToolCategory]:
        """Return the categories with tools, in order, followed by the empty shipped ones."""
        filled = [
            ToolCategory(name, self.category_texts[name], len(ids)) for name, ids in self.category_members.items()
        ]
        return [*filled, *(ToolCategory(name, text, 0) for name, text in self.empty_categories.items())]

    def loaded_tool_specs(self, loaded: Iterable[str]) -> list[ToolSpec]:
        """Return the loaded tools: the core tools, then those of ``loaded``, in their order."""
        core, ready = self.core_tools, self.available_tools
        shown = [entry.spec for entry in core.values()]
        shown += [ready[tool_id].spec for tool_id in loaded if tool_id in ready and tool_id not in core]
        return shown

    def get_tool_status(self, entry: ToolEntry) -> ToolStatus:
        """Return the status of a tool at the start of an interaction."""
        if entry.unavailable_reason is not None:
            return "unavailable"
        if entry.id in self.core_tools:
            return "core"
        return "active" if entry.id in self.initially_active else "deferred"


_views: weakref.WeakKeyDictionary[Generation, dict[CatalogOptions, CatalogView]] = weakref.WeakKeyDictionary()


def list_unusable_resource_tools(generation: Generation) -> Collection[str]:
    """Return the ids of tools that are useless here and hidden from models.

    They are the tools for resources and prompts, if no source has any.
    """
    return () if generation.resource_providers else RESOURCE_IDS


def _iterate_excluded_agent_tools(generation: Generation, above: Sequence[Sequence[str]]) -> Iterable[str]:
    """Yield agent tools that a parent agent may not delegate to, or that would exceed the maximum depth."""
    if not above:
        return
    for tool_id, entry in generation.entries.items():
        if entry.source == AGENT_SOURCE:
            agent = tool_id.removeprefix(AGENT_TOOL_PREFIX)
            allowed = all(any(matches_tool_pattern(pattern, agent) for pattern in each) for each in above)
            if not allowed or len(above) >= MAX_DEPTH:
                yield tool_id


def get_view(generation: Generation, options: CatalogOptions) -> CatalogView:
    """Return the view of ``generation``. The first call makes it."""
    views = _views.setdefault(generation, {})
    if (view := views.get(options)) is None:
        view = views[options] = CatalogView(generation, options)
    return view


def _is_core(entry: ToolEntry) -> bool:
    """Return whether a tool is core. A third-party source cannot make its tools core."""
    return entry.spec.tier == CORE_CATEGORY and entry.third_party is None


def _unique_category_name(
    name: str, entry: ToolEntry, members: Mapping[str, list[str]], ready: Mapping[str, ToolEntry]
) -> str:
    """Return ``name``, or a variant of it that no other source uses.

    This keeps a third-party source and the operator's tools in separate categories, each with its own text.
    """
    mine = None if entry.third_party is None else entry.third_party.name
    candidate, number = name, 2
    while (ids := members.get(candidate)) is not None:
        other = ready[ids[0]].third_party
        if (None if other is None else other.name) == mine:
            break
        candidate, number = f"{name}-{number}", number + 1
    return candidate


def is_non_builtin_tool(entry: ToolEntry) -> bool:
    """Return whether a tool is not one of Handrail's own."""
    return entry.source != BUILT_IN


# The active set of one interaction: the loaded tools, in loading order.
#
# It is stored as a list of steps that only grows. So a length identifies a state, and a process with a copy needs only the new
# steps. A step is a text:
#
# - ``ID``: loaded, and stays loaded; also for a loaded tool that might have been unloaded before
# - ``?ID``: found by a search; may be unloaded for others until a call uses it
# - ``-ID``: unloaded to make room

FOUND_MARK, REMOVED_MARK = "?", "-"
_MANY = 1_000
"""The number of steps from which an active set is shortened."""


class LoadedToolSet:
    """The set of loaded tools, as ids in loading order."""

    __slots__ = ("_steps", "loaded")

    def __init__(self, steps: Iterable[str] = ()) -> None:
        self._steps: list[str] = []
        self.loaded: dict[str, bool] = {}
        """The loaded tools, each with whether it may be unloaded for others."""
        self.apply_loading_steps(steps)

    def __len__(self) -> int:
        """Return the number of steps that led to this set."""
        return len(self._steps)

    def __contains__(self, tool_id: object) -> bool:
        return tool_id in self.loaded

    def apply_loading_steps(self, steps: Iterable[str]) -> tuple[str, ...]:
        """Apply ``steps``. Return those that changed something."""
        taken = tuple(step for step in steps if _apply_step(self.loaded, step))
        self._steps += taken
        return taken

    @property
    def evictable_tools(self) -> tuple[str, ...]:
        """The tools that may be unloaded, the one that was found longest ago first."""
        return tuple(tool_id for tool_id, loose in self.loaded.items() if loose)

    def list_loaded_ids_at_step(self, count: int | None = None) -> tuple[str, ...]:
        """Return the tools that were loaded after ``count`` steps, in order; default: now."""
        if count is None or count >= len(self._steps):
            return tuple(self.loaded)
        found: dict[str, bool] = {}
        for step in self._steps[:count]:
            _apply_step(found, step)
        return tuple(found)

    def build_minimal_loading_steps(self) -> tuple[str, ...]:
        """Return the fewest steps that lead to the current set."""
        return tuple(f"{FOUND_MARK}{tool_id}" if loose else tool_id for tool_id, loose in self.loaded.items())

    def with_compacted_steps(self) -> LoadedToolSet:
        """Return an equal set with few steps if this one has very many, else this one.

        A length counts the steps of the returned set.
        """
        return (
            LoadedToolSet(self.build_minimal_loading_steps())
            if len(self._steps) > _MANY + 2 * len(self.loaded)
            else self
        )


def _apply_step(in_view: dict[str, bool], step: str) -> bool:
    """Apply one step. Return whether it changed something."""
    if step.startswith(REMOVED_MARK):
        return in_view.pop(step[1:], None) is not None
    if step.startswith(FOUND_MARK):
        if step[1:] in in_view:
            return False
        in_view[step[1:]] = True
    elif in_view.get(step) is False:
        return False
    else:
        in_view[step] = False
    return True
