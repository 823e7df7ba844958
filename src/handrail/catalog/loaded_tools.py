"""The loaded tools of one interaction, and the service by which tools search and load others.

A session has one interaction at a time. Loading has no effect on permissions: rules decide about a call in the same way
whether or not its tool is loaded.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

from handrail.catalog.tool_prompt import estimate_llm_view_tokens, format_unloaded_tool_index
from handrail.catalog.view import (
    CORE_CATEGORY,
    FOUND_MARK,
    MAX_ACTIVE_TOOLS,
    REMOVED_MARK,
    SHIPPED_CATEGORIES,
    CatalogOptions,
    CatalogView,
    LoadedToolSet,
    get_view,
)
from handrail.contract.errors import HandrailError, ToolError
from handrail.contract.services.job_and_tool_services import (
    UNLISTED_PREFIX,
    ToolCategory,
    ToolDocumentation,
    ToolLoadResult,
    ToolSearchResult,
)
from handrail.contract.session_protocols import SessionValueStore
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import guess_intended_tool_id, nearest_names, wire_name
from handrail.contract.tool_generation import Generation, ToolEntry

if TYPE_CHECKING:
    from handrail.catalog.search.search_indexes import KernelSearchIndexes

# The manual of a tool, and the manuals that a session has read.

DOCUMENTATION_TOOL = "info"
"""The tool that reads manuals. A session stores under this name which ones it has read."""
_KEY = "manuals"
_MAX_DEPTH = 6


class DocumentationReadTracker:
    """The manuals that one session has read, stored with the session.

    A manual belongs to a definition. If a tool changes, its manual has to be read again.
    """

    def __init__(self, session_id: str, values: SessionValueStore) -> None:
        self._session_id = session_id
        self._values = values
        self._known: dict[str, str] | None = None

    async def has_read_documentation(self, entry: ToolEntry) -> bool:
        """Return whether the session has read the manual of this definition.

        :raises LogUnavailable: if the state cannot be read
        """
        return (await self._read()).get(entry.id) == entry.definition_hash

    async def mark_documentation_read(self, entry: ToolEntry) -> None:
        """Mark the manual of this definition as read.

        :raises LogUnavailable: if the mark cannot be stored
        """
        known = await self._read()
        if known.get(entry.id) != entry.definition_hash:
            known[entry.id] = entry.definition_hash
            await self._values.put(self._session_id, DOCUMENTATION_TOOL, _KEY, dict(known))

    async def _read(self) -> dict[str, str]:
        if self._known is None:
            kept = await self._values.get(self._session_id, DOCUMENTATION_TOOL, _KEY)
            if self._known is None:
                self._known = dict(cast("dict[str, str]", kept)) if isinstance(kept, dict) else {}
        return self._known


def make_tool_documentation(entry: ToolEntry, view: CatalogView) -> ToolDocumentation:
    """Return the manual of ``entry``.

    It lists its fields one by one, so that no other field of the runtime view reaches a model.
    """
    spec = entry.spec
    return ToolDocumentation(
        id=spec.id,
        name=wire_name(spec.id),
        category=view.find_category_by_tool_id(spec.id),
        description=spec.description,
        parameters=spec.parameters,
        documentation=spec.documentation.strip(),
        guidance=spec.guidance.strip(),
        example=make_example_arguments(entry),
        source="" if entry.third_party is None else view.find_category_by_tool_id(spec.id),
    )


def make_example_arguments(entry: ToolEntry) -> dict[str, Any] | None:
    """Return minimal arguments that the tool accepts, or None.

    They are the required ones, each with the first value of its schema. If the tool does not accept these alone, they are the
    required ones and another one.
    """
    schema = entry.spec.parameters
    made = _example(schema, schema, 0)
    if not isinstance(made, dict):
        return None
    required = cast("dict[str, Any]", made)
    properties = cast("Mapping[str, Any]", schema.get("properties") or {})
    more = ({name: _example(of, schema, 1, name)} for name, of in properties.items() if name not in required)
    for one in ({}, *more):
        with suppress(ToolError):
            entry.validate_arguments(arguments := {**required, **one})
            return arguments
    return None


def _example(schema: object, root: Mapping[str, Any], depth: int, name: str = "text") -> Any:
    """Return a value for ``schema``, or None.

    :param name: the name of the argument
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    node = cast("Mapping[str, Any]", schema)
    if isinstance(node.get("$ref"), str):
        return _example(_resolve_reference(node["$ref"], root), root, depth + 1, name)
    if stated := _list_stated_values(node):
        return stated[0]
    if parts := _alternatives(node):
        return _example(parts[0], root, depth + 1, name)
    if (kind := _kind(node)) == "object":
        properties = cast("Mapping[str, Any]", node.get("properties") or {})
        required = cast("list[str]", node.get("required") or [])
        return {inner: _example(properties.get(inner), root, depth + 1, inner) for inner in required}
    if kind == "array":
        count = node.get("minItems", 0)
        return [_example(node.get("items"), root, depth + 1, name)] * min(count, 5) if isinstance(count, int) else []
    return _simple_example(kind, node, name)


def _kind(node: Mapping[str, Any]) -> str:
    kind = node.get("type", "object" if "properties" in node else "string")
    if isinstance(kind, list):
        kind = cast("list[Any]", kind)[0] if kind else "null"
    return str(kind)


def _list_stated_values(node: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema itself states, the best first."""
    for key in ("examples", "enum"):
        if isinstance(node.get(key), list) and node[key]:
            return node[key]
    return [node[key] for key in ("const", "default") if key in node]


def _alternatives(node: Mapping[str, Any]) -> list[Any]:
    """Return the alternatives of a schema without properties."""
    for key in ("oneOf", "anyOf", "allOf"):
        if isinstance(node.get(key), list) and node[key] and "properties" not in node:
            return node[key]
    return []


def _simple_example(kind: str, node: Mapping[str, Any], name: str) -> Any:
    if kind == "string":
        return _TEXTS.get(str(node.get("format")), name if "pattern" in node else f"<{name}>")
    if kind in ("integer", "number"):
        least = node.get("minimum", 1)
        return least if isinstance(least, (int, float)) else 1
    return True if kind == "boolean" else None


_TEXTS = {
    "path": "notes.md",
    "uri": "https://example.org/",
    "host": "example.org",
    "command": "git status",
    "patch": "*** Begin Patch\n*** Update File: notes.md\n@@\n unchanged line\n-old line\n+new line\n*** End Patch",
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "email": "name@example.org",
}


def _resolve_reference(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for step in reference.removeprefix("#/").split("/"):
        if not isinstance(found, Mapping):
            return None
        found = cast("Mapping[str, object]", found).get(step.replace("~1", "/").replace("~0", "~"))
    return found


_Kind = Literal["category", "tool"]
"""The kind of thing that a name is for."""

_SEARCH_TOOLS = ("find_tools", "tool_search")
"""The tools that search."""
_ACTIVE_SET_KEY = ("load_tools", "in_view")
"""The tool and the key under which a session stores its loaded tools."""
_MAX_SIMILAR = 4
_MAX_NAMED = 30
"""The maximum number of categories that an error names."""


ActiveState = tuple[LoadedToolSet, int]
"""An active set, and the number of its steps that count."""
ChangeCallback = Callable[[tuple[str, ...], bool], None]
"""A callback for steps of the active set. The second argument: whether they change which tools are loaded."""


class InteractionLoadedTools:
    """The tools that are loaded in the current interaction of one session.

    :param values: the store for the session's state
    :param finder: the search, or None if there is none
    """

    def __init__(
        self,
        session_id: str,
        options: CatalogOptions,
        values: SessionValueStore | None = None,
        finder: KernelSearchIndexes | None = None,
    ) -> None:
        self.options = options
        self.active = LoadedToolSet()
        self.interaction_number = 0
        """The number of the interaction, counted since the session was opened."""
        self.turn_state: ActiveState = (self.active, 0)
        """The active set at the start of the last turn."""
        self.documentation_reads = None if values is None else DocumentationReadTracker(session_id, values)
        self._session_id = session_id
        self._values = values
        self._kept: tuple[str, ...] = ()
        self.on_change: ChangeCallback | None = None
        self._finder = finder
        self._last: weakref.ref[Generation] | None = None
        self._view: CatalogView | None = None

    def start_next_interaction(self, number: int | None = None, loaded: Iterable[str] = ()) -> None:
        """Start another interaction, without the tools that the last one has loaded.

        :param number: the number of the interaction, if another process counts; default: the next one
        :param loaded: the steps of the active set to start with, if another process had the session
        """
        self.interaction_number = self.interaction_number + 1 if number is None else number
        self.active = LoadedToolSet(loaded)
        self.turn_state = (self.active, 0)
        self._last = None

    async def restore_loaded_tools(self) -> None:
        """Load the tools that were loaded when the session was last open.

        A run that waited for an approval continues the same interaction.

        :raises LogUnavailable: if the state cannot be read
        """
        kept: object = None if self._values is None else await self._values.get(self._session_id, *_ACTIVE_SET_KEY)
        if isinstance(kept, list):
            self._kept = tuple(str(tool_id) for tool_id in cast("list[object]", kept))
            self.active.apply_loading_steps(self._kept)

    async def store_loaded_tools(self) -> None:
        """Store the loaded tools with the session. A failure is ignored."""
        steps = self.active.build_minimal_loading_steps()
        if self._values is not None and steps != self._kept:
            with contextlib.suppress(HandrailError):
                await self._values.put(self._session_id, *_ACTIVE_SET_KEY, list(steps))
                self._kept = steps

    def replace_catalog_options(self, options: CatalogOptions) -> None:
        """Use other options from now on."""
        self.options, self._last = options, None

    async def preload_matching_tools(self, generation: Generation, text: str) -> None:
        """Load the tools that match the user's ``text`` best, if the options enable it."""
        options, view = self.options, self.get_view(generation)
        if options.preload <= 0 or view.is_fully_active or self._finder is None or not text.strip():
            return
        try:
            found = await self.find(generation, text, limit=options.preload)
        except ToolError:  # a text without any words
            return
        left = options.preload_tokens
        for hit in () if found.no_match else found.matches:
            left -= estimate_llm_view_tokens(view.available_tools[hit.tool_id].spec)
            if left < 0:
                break
            if not hit.is_weak:
                self.load_tools(generation, (hit.tool_id,), found=True)
        await self.store_loaded_tools()

    def get_view(self, generation: Generation) -> CatalogView:
        """Return the view of ``generation``.

        A tool that is loaded from the start stays loaded if the generation grows.
        """
        if self._view is None or self._last is None or self._last() is not generation:
            self._view, self._last = get_view(generation, self.options), weakref.ref(generation)
            self.active.apply_loading_steps(
                tool_id for tool_id in self._view.available_tools if tool_id in self._view.initially_active
            )
        return self._view

    def preload_index(self, generation: Generation) -> None:
        """Schedule the loading of the search, unless all tools of this generation are loaded."""
        view = self.get_view(generation)
        if (
            self._finder is not None
            and not view.is_fully_active
            and not view.available_tools.keys().isdisjoint(_SEARCH_TOOLS)
        ):
            self._finder.preload_index(generation)

    def begin_turn(self, generation: Generation) -> ActiveState:
        """Start a turn. Return its loaded tools, for :meth:`loaded_tool_specs`."""
        self.preload_index(generation)
        self.active = self.active.with_compacted_steps()
        self.turn_state = self.active, len(self.active)
        return self.turn_state

    def loaded_tool_specs(self, generation: Generation, in_view: ActiveState | None = None) -> list[ToolSpec]:
        """Return the loaded tools, in order.

        :param in_view: the result of :meth:`begin_turn`; None for the tools that are loaded now
        """
        view = self.get_view(generation)
        active, count = in_view or (self.active, None)
        return view.loaded_tool_specs(active.list_loaded_ids_at_step(count))

    def provider_tools(self, generation: Generation) -> tuple[ToolSpec, ...]:
        return self.get_view(generation).provider_tools

    def format_deferred_tool_index(self, generation: Generation) -> str:
        """Return the list of the tools that are not loaded, for the system text."""
        return format_unloaded_tool_index(self.get_view(generation), self.options.index_tokens)

    def was_schema_shown(self, generation: Generation, tool_id: str) -> bool:
        """Return whether the model of the last turn has seen this tool's schema."""
        active, count = self.turn_state
        return tool_id in self.get_view(generation).core_tools or tool_id in active.list_loaded_ids_at_step(count)

    def load_tools(
        self, generation: Generation, ids: Iterable[str], *, found: bool = False, keep: Collection[str] = ()
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Load tools for the next turn. If a provider accepts no more, other tools are unloaded.

        :param found: whether a search found them: they may be unloaded later if no call uses them
        :param keep: the tools that may not be unloaded
        :returns: the newly loaded tools, and the unloaded ones
        """
        view, active = self.get_view(generation), self.active
        wanted = [i for i in dict.fromkeys(ids) if i in view.available_tools and i not in view.core_tools]
        added = tuple(i for i in wanted if i not in active)
        left: tuple[str, ...] = ()
        if (
            added
            and (over := len(view.loaded_tool_specs(active.list_loaded_ids_at_step())) + len(added) - MAX_ACTIVE_TOOLS)
            > 0
        ):
            left = self.list_evictable_tools(generation, {*wanted, *keep})[:over]
        steps = active.apply_loading_steps(
            (*(REMOVED_MARK + i for i in left), *(FOUND_MARK + i if found else i for i in wanted))
        )
        if steps and self.on_change is not None:
            self.on_change(steps, bool(added or left))
        return added, left

    def list_evictable_tools(self, generation: Generation, keep: Collection[str]) -> tuple[str, ...]:
        """Return the loaded tools that may be unloaded, the oldest first.

        A search found them, and no call has used them.

        :param keep: those that may not be unloaded
        """
        view = self.get_view(generation)
        return tuple(
            i
            for i in self.active.evictable_tools
            if i in view.available_tools and i not in view.core_tools and i not in keep
        )

    def pin_called_tool(self, tool_id: str) -> None:
        """Keep a tool loaded because a model has called it: the call is in the history."""
        if (
            self.active.loaded.get(tool_id)
            and (steps := self.active.apply_loading_steps((tool_id,)))
            and self.on_change is not None
        ):
            self.on_change(steps, False)

    def make_call_catalog(self, generation: Generation) -> CallCatalog:
        return CallCatalog(self, generation)

    async def find(
        self,
        generation: Generation,
        query: str,
        *,
        limit: int,
        extensions_only: bool = False,
        patience_s: float | None = None,
        by_words: bool = False,
    ) -> ToolSearchResult:
        """Return the tools that match ``query``, without loading any.

        :raises ToolError: ``invalid_input`` for a query without any words; ``unavailable`` if there is no search
        """
        if self._finder is None:
            raise ToolError(
                "Tool search is not available in this session. Use browse_tools to list the categories.",
                kind="unavailable",
            )
        view = self.get_view(generation)

        def source(entry: ToolEntry) -> str:
            return "" if entry.third_party is None else view.find_category_by_tool_id(entry.id)

        found = await self._finder.find(
            generation,
            query,
            limit=limit,
            extensions_only=extensions_only,
            source=source,
            patience_s=patience_s,
            by_words=by_words,
        )
        if not view.barred_agents:
            return found
        hits = tuple(hit for hit in found.matches if hit.tool_id not in view.barred_agents)
        return replace(found, matches=hits, no_match=found.no_match or all(hit.is_below_threshold for hit in hits))

    def find_tools_for_unknown_name(self, generation: Generation, name: str) -> list[str]:
        """Return the few tools that an unknown name may mean: by its spelling, then by its words."""
        near = generation.nearest_names(name)
        is_meant = guess_intended_tool_id(name, near) is not None
        spoken = [] if self._finder is None or is_meant else self._finder.find_tools_for_unknown_name(generation, name)
        close, barred = dict.fromkeys([*near, *spoken]), self.get_view(generation).barred_agents
        return [tool_id for tool_id in close if tool_id not in barred][:_MAX_SIMILAR]


class CallCatalog:
    """The catalog service of one call: it lists, searches and loads tools, and reads their documentation."""

    __slots__ = ("_found", "_generation", "_of")

    def __init__(self, of: InteractionLoadedTools, generation: Generation) -> None:
        self._of = of
        self._generation = generation
        self._found: set[str] = set()
        """The tools that this call has found. It does not unload them for further ones."""

    async def list_active(self) -> Sequence[str]:
        return [spec.id for spec in self._of.loaded_tool_specs(self._generation)]

    async def list_categories(self) -> Sequence[ToolCategory]:
        unheard = [
            ToolCategory(f"{UNLISTED_PREFIX}{one.name}", f"{one.describe_status()}.", 0)
            for one in self._generation.unlisted_sources
        ]
        return [*self._of.get_view(self._generation).list_categories(), *unheard]

    async def load(self, name: str, *, kind: _Kind | None = None) -> ToolLoadResult:
        view = self._of.get_view(self._generation)
        if kind != "tool" and _is_category(name, view):
            if name == CORE_CATEGORY:
                return ToolLoadResult(CORE_CATEGORY, "category", tuple(view.core_tools), (), is_core=True)
            ids = view.category_members.get(name, ())
            self._check_provider_limit(name, ids)
            added, left = await self._load_tools(ids)
            return ToolLoadResult(name, "category", tuple(ids), added, unloaded=left)
        entry = None if kind == "category" else self._generation.resolve_tool_name(name)
        if entry is None:
            raise ToolError(self._unknown_name_text(name, view, kind), kind="invalid_input")
        self._check_callable(entry, view)
        if entry.id in view.core_tools:
            return ToolLoadResult(entry.id, "tool", (entry.id,), (), is_core=True)
        self._check_provider_limit(entry.id, (entry.id,))
        added, left = await self._load_tools((entry.id,))
        return ToolLoadResult(entry.id, "tool", (entry.id,), added, unloaded=left)

    async def search_and_load(self, query: str, *, limit: int = 5, extensions_only: bool = False) -> ToolSearchResult:
        found = await self._of.find(self._generation, query, limit=limit, extensions_only=extensions_only)
        if not found.no_match:
            there = {spec.id for spec in self._of.loaded_tool_specs(self._generation)}
            hits = [hit for hit in found.matches if not hit.is_below_threshold]
            new = [hit.tool_id for hit in hits if hit.tool_id not in there]
            self._found.update(hit.tool_id for hit in hits)
            room = MAX_ACTIVE_TOOLS - len(there) + len(self._of.list_evictable_tools(self._generation, self._found))
            fit = there.union(new[: max(0, room)])  # the best ones, if not all fit
            found = replace(found, matches=tuple(hit for hit in hits if hit.tool_id in fit))
            if not found.matches:
                self._check_provider_limit("The search result", new)
            _, left = await self._load_tools([hit.tool_id for hit in found.matches], found=True)
            found = replace(found, unloaded=left)
        return found

    async def read_documentation(self, tool: str) -> ToolDocumentation:
        if (entry := self._generation.resolve_tool_name(tool)) is None:
            close = self._of.find_tools_for_unknown_name(self._generation, tool)
            hint = f"Did you mean {' or '.join(close)}?" if close else "Use find_tools to search by capability."
            hint = self._generation.describe_unlisted_sources(tool) or hint
            raise ToolError(f"Tool {tool[:80]!r} does not exist. {hint}", kind="unknown_tool")
        self._check_callable(entry, self._of.get_view(self._generation))
        if self._of.documentation_reads is not None:
            await self._of.documentation_reads.mark_documentation_read(entry)
        return make_tool_documentation(entry, self._of.get_view(self._generation))

    @staticmethod
    def _check_callable(entry: ToolEntry, view: CatalogView) -> None:
        """Check that a tool can be called in this session.

        :raises ToolError: ``unavailable``, with the reason
        """
        if entry.unavailable_reason is not None:
            raise ToolError(entry.unavailable_error_text, kind="unavailable")
        if entry.id in view.barred_agents:
            text = (
                f"Tool {entry.id} cannot be used here: a parent agent may not delegate to this agent, or the maximum depth of "
                "sub-agents is reached. Use another agent, or do the work yourself."
            )
            raise ToolError(text, kind="unavailable")

    def _check_provider_limit(self, what: str, ids: Collection[str]) -> None:
        """Check that a provider accepts the loaded tools together with these.

        :param what: the subject of the error
        :raises ToolError: ``conflict``
        """
        there = {spec.id for spec in self._of.loaded_tool_specs(self._generation)}
        new = [tool_id for tool_id in ids if tool_id not in there]
        stay = len(there) - len(self._of.list_evictable_tools(self._generation, {*ids, *self._found}))
        if new and stay + len(new) > MAX_ACTIVE_TOOLS:
            count = f"{len(new)} tools" if len(new) > 1 else "1 tool"
            raise ToolError(
                f"{what} would load {count}, in addition to {stay} that stay loaded. The maximum is {MAX_ACTIVE_TOOLS} loaded tools, so "
                "nothing was loaded. Use find_tools for the few that you need, or load_tools with `tool` for one. Loaded tools are "
                "unloaded when you have answered the user.",
                kind="conflict",
            )

    async def _load_tools(self, ids: Iterable[str], *, found: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
        loaded = self._of.load_tools(self._generation, ids, found=found, keep=self._found)
        await self._of.store_loaded_tools()
        return loaded

    def _other_kind_hint(self, name: str, view: CatalogView, kind: _Kind | None) -> str | None:
        if kind == "tool" and _is_category(name, view):
            return f'A category has this name. Use {{"category": "{name}"}} to load all of its tools.'
        if kind == "category" and (entry := self._generation.resolve_tool_name(name)) is not None:
            return f'A tool has this name. Use {{"tool": "{entry.id}"}} to load it.'
        return None

    def _unknown_name_text(self, name: str, view: CatalogView, kind: _Kind | None) -> str:
        text = f"No {kind or 'category or tool'} has the name {name[:80]!r}."
        if awaited := self._generation.describe_unlisted_sources(name):
            return f"{text} {awaited}"
        if other := self._other_kind_hint(name, view, kind):
            return f"{text} {other}"
        names = list(view.category_members)
        tools = (
            []
            if kind == "category"
            else [i for i in self._generation.nearest_names(name, 2) if i not in view.barred_agents]
        )
        close = tools if kind == "tool" else [*nearest_names(name, names, 1), *tools]
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        if kind == "tool":
            return text + (hint or " Use find_tools to search by capability.")
        there = ", ".join(names[:_MAX_NAMED]) or "none"
        more = f" and {len(names) - _MAX_NAMED} more, which browse_tools lists" if len(names) > _MAX_NAMED else ""
        return f"{text}{hint} The categories are: {there}{more}."


def _is_category(name: str, view: CatalogView) -> bool:
    return name == CORE_CATEGORY or name in view.category_members or name in SHIPPED_CATEGORIES
