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
from typing import Any, Literal, Protocol, cast

from handrail.catalog.prompt import index_of, of_spec
from handrail.catalog.view import CORE, FOUND, LEFT, MOST_GIVEN, SHIPPED, ActiveSet, CatalogOptions, View, view_of
from handrail.contract.doors.jobs import NOT_HEARD, BroughtIn, Category, Findings, Manual
from handrail.contract.errors import HandrailError, ToolError
from handrail.contract.generation import Entry, Generation
from handrail.contract.session import Values
from handrail.contract.tool.names import nearest, wire_name
from handrail.contract.tool.spec import ToolSpec

# The manual of a tool, and the manuals that a session has read.

READER = "info"
"""The tool that reads manuals. A session stores under this name which ones it has read."""
_KEY = "manuals"
_MAX_DEPTH = 6


class ManualsRead:
    """The manuals that one session has read, stored with the session.

    A manual belongs to a definition. If a tool changes, its manual has to be read again.
    """

    def __init__(self, session_id: str, values: Values) -> None:
        self._session_id = session_id
        self._values = values
        self._known: dict[str, str] | None = None

    async def has(self, entry: Entry) -> bool:
        """Return whether the session has read the manual of this definition.

        :raises LogUnavailable: if the state cannot be read
        """
        return (await self._read()).get(entry.id) == entry.definition_hash

    async def note(self, entry: Entry) -> None:
        """Mark the manual of this definition as read.

        :raises LogUnavailable: if the mark cannot be stored
        """
        known = await self._read()
        if known.get(entry.id) != entry.definition_hash:
            known[entry.id] = entry.definition_hash
            await self._values.put(self._session_id, READER, _KEY, dict(known))

    async def _read(self) -> dict[str, str]:
        if self._known is None:
            kept = await self._values.get(self._session_id, READER, _KEY)
            if self._known is None:
                self._known = dict(cast("dict[str, str]", kept)) if isinstance(kept, dict) else {}
        return self._known


def manual_of(entry: Entry, view: View) -> Manual:
    """Return the manual of ``entry``.

    It lists its fields one by one, so that no other field of the runtime view reaches a model.
    """
    spec = entry.spec
    return Manual(
        id=spec.id,
        name=wire_name(spec.id),
        category=view.category(spec.id),
        description=spec.description,
        parameters=spec.parameters,
        documentation=spec.documentation.strip(),
        guidance=spec.guidance.strip(),
        example=example_of(entry),
        source="" if entry.foreign is None else view.category(spec.id),
    )


def example_of(entry: Entry) -> dict[str, Any] | None:
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
            entry.admitted(arguments := {**required, **one})
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
        return _example(_referred(node["$ref"], root), root, depth + 1, name)
    if stated := _stated(node):
        return stated[0]
    if parts := _parts(node):
        return _example(parts[0], root, depth + 1, name)
    kind = _kind(node)
    if kind == "object":
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


def _stated(node: Mapping[str, Any]) -> list[Any]:
    """Return the values that a schema itself states, the best first."""
    for key in ("examples", "enum"):
        if isinstance(node.get(key), list) and node[key]:
            return node[key]
    return [node[key] for key in ("const", "default") if key in node]


def _parts(node: Mapping[str, Any]) -> list[Any]:
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
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "email": "name@example.org",
}


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for step in reference.removeprefix("#/").split("/"):
        if not isinstance(found, Mapping):
            return None
        found = cast("Mapping[str, object]", found).get(step.replace("~1", "/").replace("~0", "~"))
    return found


_Kind = Literal["category", "tool"]
"""The kind of thing that a name is for."""

_SEARCHING = ("find_tools", "tool_search")
"""The tools that search."""
_KEPT = ("load_tools", "in_view")
"""The tool and the key under which a session stores its loaded tools."""
_MOST_NEAR = 4
_MOST_NAMED = 30
"""The maximum number of categories that an error names."""


class Finder(Protocol):
    """A search over the tools of a generation."""

    async def find(
        self,
        generation: Generation,
        query: str,
        *,
        limit: int,
        extensions_only: bool = False,
        source: Callable[[Entry], str],
        patience_s: float | None = None,
        by_words: bool = False,
    ) -> Findings:
        """Return the tools that match ``query``, among those that can be called.

        :param source: returns the third-party source of a tool's description, or ``""``
        :param patience_s: the maximum wait if semantic search is not ready yet; None for the usual time of loading
        :param by_words: do not load a model for this search
        :raises ToolError: ``invalid_input`` for a query without any words
        """
        ...

    def load_ahead(self, generation: Generation) -> None:
        """Schedule the loading of what a search in ``generation`` needs."""
        ...

    def near(self, generation: Generation, name: str, count: int = 2) -> list[str]:
        """Return tools that share words with an unknown name, if this needs no waiting."""
        ...


InView = tuple[ActiveSet, int]
"""An active set, and the number of its steps that count."""
Changed = Callable[[tuple[str, ...], bool], None]
"""A callback for steps of the active set. The second argument: whether they change which tools are loaded."""


class Interaction:
    """The tools that are loaded in the current interaction of one session.

    :param values: the store for the session's state
    :param finder: the search, or None if there is none
    """

    def __init__(
        self, session_id: str, options: CatalogOptions, values: Values | None = None, finder: Finder | None = None
    ) -> None:
        self.options = options
        self.active = ActiveSet()
        self.number = 0
        """The number of the interaction, counted since the session was opened."""
        self.shown: InView = (self.active, 0)
        """The active set at the start of the last turn."""
        self.manuals = None if values is None else ManualsRead(session_id, values)
        self._session_id = session_id
        self._values = values
        self._kept: tuple[str, ...] = ()
        self.changed: Changed | None = None
        self._finder = finder
        self._last: weakref.ref[Generation] | None = None
        self._view: View | None = None

    def begin(self, number: int | None = None, brought: Iterable[str] = ()) -> None:
        """Start another interaction, without the tools that the last one has loaded.

        :param number: the number of the interaction, if another process counts; default: the next one
        :param brought: the steps of the active set to start with, if another process had the session
        """
        self.number = self.number + 1 if number is None else number
        self.active = ActiveSet(brought)
        self.shown = (self.active, 0)
        self._last = None

    async def restore(self) -> None:
        """Load the tools that were loaded when the session was last open.

        A run that waited for an approval continues the same interaction.

        :raises LogUnavailable: if the state cannot be read
        """
        kept: object = None if self._values is None else await self._values.get(self._session_id, *_KEPT)
        if isinstance(kept, list):
            self._kept = tuple(str(tool_id) for tool_id in cast("list[object]", kept))
            self.active.take(self._kept)

    async def keep(self) -> None:
        """Store the loaded tools with the session. A failure is ignored."""
        steps = self.active.steps()
        if self._values is not None and steps != self._kept:
            with contextlib.suppress(HandrailError):
                await self._values.put(self._session_id, *_KEPT, list(steps))
                self._kept = steps

    def arrange(self, options: CatalogOptions) -> None:
        """Use other options from now on."""
        self.options, self._last = options, None

    async def preload(self, generation: Generation, text: str) -> None:
        """Load the tools that match the user's ``text`` best, if the options enable it."""
        options, view = self.options, self.look(generation)
        if options.preload <= 0 or view.whole or self._finder is None or not text.strip():
            return
        try:
            found = await self.find(generation, text, limit=options.preload)
        except ToolError:  # a text without any words
            return
        left = options.preload_tokens
        for hit in () if found.nothing_fits else found.hits:
            left -= of_spec(view.ready[hit.tool_id].spec)
            if left < 0:
                break
            if not hit.weak:
                self.bring(generation, (hit.tool_id,), found=True)
        await self.keep()

    def look(self, generation: Generation) -> View:
        """Return the view of ``generation``.

        A tool that is loaded from the start stays loaded if the generation grows.
        """
        if self._view is None or self._last is None or self._last() is not generation:
            self._view, self._last = view_of(generation, self.options), weakref.ref(generation)
            self.active.take(tool_id for tool_id in self._view.ready if tool_id in self._view.first)
        return self._view

    def load_ahead(self, generation: Generation) -> None:
        """Schedule the loading of the search, unless all tools of this generation are loaded."""
        view = self.look(generation)
        if self._finder is not None and not view.whole and not view.ready.keys().isdisjoint(_SEARCHING):
            self._finder.load_ahead(generation)

    def turn(self, generation: Generation) -> InView:
        """Start a turn. Return its loaded tools, for :meth:`specs`."""
        self.load_ahead(generation)
        self.active = self.active.shortened()
        self.shown = self.active, len(self.active)
        return self.shown

    def specs(self, generation: Generation, in_view: InView | None = None) -> list[ToolSpec]:
        """Return the loaded tools, in order.

        :param in_view: the result of :meth:`turn`; None for the tools that are loaded now
        """
        view = self.look(generation)
        active, count = in_view or (self.active, None)
        return view.shown(active.first(count))

    def native(self, generation: Generation) -> tuple[ToolSpec, ...]:
        """Return the provider tools."""
        return self.look(generation).native

    def index(self, generation: Generation) -> str:
        """Return the list of the tools that are not loaded, for the system text."""
        return index_of(self.look(generation), self.options.index_tokens)

    def was_shown(self, generation: Generation, tool_id: str) -> bool:
        """Return whether the model of the last turn has seen this tool's schema."""
        active, count = self.shown
        return tool_id in self.look(generation).core or tool_id in active.first(count)

    def bring(
        self, generation: Generation, ids: Iterable[str], *, found: bool = False, keep: Collection[str] = ()
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Load tools for the next turn. If a provider accepts no more, other tools are unloaded.

        :param found: whether a search found them: they may be unloaded later if no call uses them
        :param keep: the tools that may not be unloaded
        :returns: the newly loaded tools, and the unloaded ones
        """
        view, active = self.look(generation), self.active
        wanted = [i for i in dict.fromkeys(ids) if i in view.ready and i not in view.core]
        added = tuple(i for i in wanted if i not in active)
        left: tuple[str, ...] = ()
        if added and (over := len(view.shown(active.first())) + len(added) - MOST_GIVEN) > 0:
            left = self.leaving(generation, {*wanted, *keep})[:over]
        steps = active.take((*(LEFT + i for i in left), *(FOUND + i if found else i for i in wanted)))
        if steps and self.changed is not None:
            self.changed(steps, bool(added or left))
        return added, left

    def leaving(self, generation: Generation, keep: Collection[str]) -> tuple[str, ...]:
        """Return the loaded tools that may be unloaded, the oldest first.

        A search found them, and no call has used them.

        :param keep: those that may not be unloaded
        """
        view = self.look(generation)
        return tuple(i for i in self.active.loose if i in view.ready and i not in view.core and i not in keep)

    def called(self, tool_id: str) -> None:
        """Keep a tool loaded because a model has called it: the call is in the history."""
        if self.active.in_view.get(tool_id) and (steps := self.active.take((tool_id,))) and self.changed is not None:
            self.changed(steps, False)

    def door(self, generation: Generation) -> InteractionCatalog:
        """Return the catalog for a call on ``generation``."""
        return InteractionCatalog(self, generation)

    async def find(
        self,
        generation: Generation,
        query: str,
        *,
        limit: int,
        extensions_only: bool = False,
        patience_s: float | None = None,
        by_words: bool = False,
    ) -> Findings:
        """Return the tools that match ``query``, without loading any.

        :raises ToolError: ``invalid_input`` for a query without any words; ``unavailable`` if there is no search
        """
        if self._finder is None:
            raise ToolError(
                "Tool search is not available in this session. Use browse_tools to list the categories.",
                kind="unavailable",
            )
        view = self.look(generation)

        def source(entry: Entry) -> str:
            return "" if entry.foreign is None else view.category(entry.id)

        found = await self._finder.find(
            generation,
            query,
            limit=limit,
            extensions_only=extensions_only,
            source=source,
            patience_s=patience_s,
            by_words=by_words,
        )
        if not view.barred:
            return found
        hits = tuple(hit for hit in found.hits if hit.tool_id not in view.barred)
        return replace(found, hits=hits, nothing_fits=found.nothing_fits or all(hit.tail for hit in hits))

    def near(self, generation: Generation, name: str) -> list[str]:
        """Return the few tools that an unknown name may mean: by its spelling, then by its words."""
        spoken = [] if self._finder is None else self._finder.near(generation, name)
        close, barred = dict.fromkeys([*generation.nearest(name), *spoken]), self.look(generation).barred
        return [tool_id for tool_id in close if tool_id not in barred][:_MOST_NEAR]


class InteractionCatalog:
    """Implements :class:`~handrail.contract.doors.jobs.Catalog` for one call."""

    __slots__ = ("_found", "_generation", "_of")

    def __init__(self, of: Interaction, generation: Generation) -> None:
        self._of = of
        self._generation = generation
        self._found: set[str] = set()
        """The tools that this call has found. It does not unload them for further ones."""

    async def active(self) -> Sequence[str]:
        return [spec.id for spec in self._of.specs(self._generation)]

    async def categories(self) -> Sequence[Category]:
        unheard = [Category(f"{NOT_HEARD}{one.name}", f"{one.standing()}.", 0) for one in self._generation.unheard]
        return [*self._of.look(self._generation).categories(), *unheard]

    async def load(self, name: str, *, kind: _Kind | None = None) -> BroughtIn:
        view = self._of.look(self._generation)
        if kind != "tool" and _is_category(name, view):
            if name == CORE:
                return BroughtIn(CORE, "category", tuple(view.core), (), core=True)
            ids = view.members.get(name, ())
            self._check_room(name, ids)
            added, left = await self._bring(ids)
            return BroughtIn(name, "category", tuple(ids), added, left=left)
        entry = None if kind == "category" else self._generation.resolve(name)
        if entry is None:
            raise ToolError(self._unknown(name, view, kind), kind="invalid_input")
        self._check_callable(entry, view)
        if entry.id in view.core:
            return BroughtIn(entry.id, "tool", (entry.id,), (), core=True)
        self._check_room(entry.id, (entry.id,))
        added, left = await self._bring((entry.id,))
        return BroughtIn(entry.id, "tool", (entry.id,), added, left=left)

    async def search(self, query: str, *, limit: int = 5, extensions_only: bool = False) -> Findings:
        found = await self._of.find(self._generation, query, limit=limit, extensions_only=extensions_only)
        if not found.nothing_fits:
            there = {spec.id for spec in self._of.specs(self._generation)}
            hits = [hit for hit in found.hits if not hit.tail]
            new = [hit.tool_id for hit in hits if hit.tool_id not in there]
            self._found.update(hit.tool_id for hit in hits)
            room = MOST_GIVEN - len(there) + len(self._of.leaving(self._generation, self._found))
            fit = there.union(new[: max(0, room)])  # the best ones, if not all fit
            found = replace(found, hits=tuple(hit for hit in hits if hit.tool_id in fit))
            if not found.hits:
                self._check_room("The search result", new)
            _, left = await self._bring([hit.tool_id for hit in found.hits], found=True)
            found = replace(found, left=left)
        return found

    async def manual(self, tool: str) -> Manual:
        entry = self._generation.resolve(tool)
        if entry is None:
            close = self._of.near(self._generation, tool)
            hint = f"Did you mean {' or '.join(close)}?" if close else "Use find_tools to search by capability."
            hint = self._generation.awaited(tool) or hint
            raise ToolError(f"Tool {tool[:80]!r} does not exist. {hint}", kind="unknown_tool")
        self._check_callable(entry, self._of.look(self._generation))
        if self._of.manuals is not None:
            await self._of.manuals.note(entry)
        return manual_of(entry, self._of.look(self._generation))

    @staticmethod
    def _check_callable(entry: Entry, view: View) -> None:
        """Check that a tool can be called in this session.

        :raises ToolError: ``unavailable``, with the reason
        """
        if entry.withheld is not None:
            raise ToolError(f"Tool {entry.id} is not available: {entry.withheld}", kind="unavailable")
        if entry.id in view.barred:
            text = (
                f"Tool {entry.id} cannot be used here: a parent agent may not delegate to this agent, or the maximum depth of "
                "sub-agents is reached. Use another agent, or do the work yourself."
            )
            raise ToolError(text, kind="unavailable")

    def _check_room(self, what: str, ids: Collection[str]) -> None:
        """Check that a provider accepts the loaded tools together with these.

        :param what: the subject of the error
        :raises ToolError: ``conflict``
        """
        there = {spec.id for spec in self._of.specs(self._generation)}
        new = [tool_id for tool_id in ids if tool_id not in there]
        stay = len(there) - len(self._of.leaving(self._generation, {*ids, *self._found}))
        if new and stay + len(new) > MOST_GIVEN:
            count = f"{len(new)} tools" if len(new) > 1 else "1 tool"
            raise ToolError(
                f"{what} would load {count}, in addition to {stay} that stay loaded. The maximum is {MOST_GIVEN} loaded tools, so "
                "nothing was loaded. Use find_tools for the few that you need, or load_tools with `tool` for one. Loaded tools are "
                "unloaded when you have answered the user.",
                kind="conflict",
            )

    async def _bring(self, ids: Iterable[str], *, found: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
        brought = self._of.bring(self._generation, ids, found=found, keep=self._found)
        await self._of.keep()
        return brought

    def _of_other_kind(self, name: str, view: View, kind: _Kind | None) -> str | None:
        if kind == "tool" and _is_category(name, view):
            return f'A category has this name. Use {{"category": "{name}"}} to load all of its tools.'
        if kind == "category" and (entry := self._generation.resolve(name)) is not None:
            return f'A tool has this name. Use {{"tool": "{entry.id}"}} to load it.'
        return None

    def _unknown(self, name: str, view: View, kind: _Kind | None) -> str:
        told = f"No {kind or 'category or tool'} has the name {name[:80]!r}."
        if awaited := self._generation.awaited(name):
            return f"{told} {awaited}"
        if other := self._of_other_kind(name, view, kind):
            return f"{told} {other}"
        names = list(view.members)
        tools = [] if kind == "category" else [i for i in self._generation.nearest(name, 2) if i not in view.barred]
        close = tools if kind == "tool" else [*nearest(name, names, 1), *tools]
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        if kind == "tool":
            return told + (hint or " Use find_tools to search by capability.")
        there = ", ".join(names[:_MOST_NAMED]) or "none"
        more = f" and {len(names) - _MOST_NAMED} more, which browse_tools lists" if len(names) > _MOST_NAMED else ""
        return f"{told}{hint} The categories are: {there}{more}."


def _is_category(name: str, view: View) -> bool:
    return name == CORE or name in view.members or name in SHIPPED
