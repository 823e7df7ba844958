"""The tools in the model's view during one interaction, and the service by which tools search and load others.

A session has one interaction at a time. The view has no effect on permission: rules decide about a call in the same way
whether or not its tool is in view.
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

# A tool's manual, and the manuals that a session has read.

READER = "info"
"""The tool that reads manuals, under whose name a session keeps which it has read."""
_KEY = "manuals"
_MAX_DEPTH = 6


class ManualsRead:
    """Of one session; kept with it. What was read is a definition: a tool that has changed is read again."""

    def __init__(self, session_id: str, values: Values) -> None:
        self._session_id = session_id
        self._values = values
        self._known: dict[str, str] | None = None

    async def has(self, entry: Entry) -> bool:
        """:raises LogUnavailable: when it cannot be told"""
        return (await self._read()).get(entry.id) == entry.definition_hash

    async def note(self, entry: Entry) -> None:
        """It has been read.

        :raises LogUnavailable: when that cannot be kept
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
    """The manual of ``entry``. It lists what goes in, so that no other field of the runtime view reaches a model."""
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
    """Arguments of the least kind that the tool takes: those that are required, each as its schema says first, and one more
    where it does not take these alone."""
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
    """A value for ``schema``, which belongs to ``name``, or None where none can be made up."""
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
    """The values that a schema itself gives, the best first."""
    for key in ("examples", "enum"):
        if isinstance(node.get(key), list) and node[key]:
            return node[key]
    return [node[key] for key in ("const", "default") if key in node]


def _parts(node: Mapping[str, Any]) -> list[Any]:
    """The schemas that a schema is made of, where it has no properties of its own to go by."""
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
    "email": "somebody@example.org",
}


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    found: object = root
    for step in reference.removeprefix("#/").split("/"):
        if not isinstance(found, Mapping):
            return None
        found = cast("Mapping[str, object]", found).get(step.replace("~1", "/").replace("~0", "~"))
    return found


_Kind = Literal["category", "tool"]
"""What a name is of."""

_SEARCHING = ("find_tools", "tool_search")
"""The tools that search."""
_KEPT = ("load_tools", "in_view")
"""The tool and the key by which a session keeps what was brought into view."""
_MOST_NEAR = 4
_MOST_NAMED = 30
"""How many categories an error names."""


class Finder(Protocol):
    """Searches the tools of a generation."""

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
        """The tools that fit ``query``, among those that can be called.

        :param source: whose text a tool's description is, where that is not the operator's
        :param patience_s: how long to wait where a search by meaning is not possible yet; None for as long as loading
            usually takes
        :param by_words: load no model for it
        :raises ToolError: ``invalid_input`` for a query without any words
        """
        ...

    def load_ahead(self, generation: Generation) -> None:
        """Begin soon to load what a search in ``generation`` needs."""
        ...

    def near(self, generation: Generation, name: str, count: int = 2) -> list[str]:
        """Tools that share words with an unknown name, if they can be found without waiting."""
        ...


InView = tuple[ActiveSet, int]
"""An active set, and after how many of its steps."""
Changed = Callable[[tuple[str, ...], bool], None]
"""Told of steps of the active set, and whether they change what is in view."""


class Interaction:
    """The interactions of one session, one after the other.

    :param values: where the session keeps which manuals were read
    :param finder: None where nothing can be searched
    """

    def __init__(
        self, session_id: str, options: CatalogOptions, values: Values | None = None, finder: Finder | None = None
    ) -> None:
        self.options = options
        self.active = ActiveSet()
        self.number = 0
        """The interaction's number, counted from the session's opening."""
        self.shown: InView = (self.active, 0)
        """What the last turn began with."""
        self.manuals = None if values is None else ManualsRead(session_id, values)
        self._session_id = session_id
        self._values = values
        self._kept: tuple[str, ...] = ()
        self.changed: Changed | None = None
        self._finder = finder
        self._last: weakref.ref[Generation] | None = None
        self._view: View | None = None

    def begin(self, number: int | None = None, brought: Iterable[str] = ()) -> None:
        """Another interaction: what was brought into view is gone.

        :param number: as counted by whoever counts elsewhere
        :param brought: what it starts with, where it goes on with another holder
        """
        self.number = self.number + 1 if number is None else number
        self.active = ActiveSet(brought)
        self.shown = (self.active, 0)
        self._last = None

    async def restore(self) -> None:
        """Go on with what was in view when the session was open last: a run that waited for a person is still one interaction.

        :raises LogUnavailable: when it cannot be read
        """
        kept: object = None if self._values is None else await self._values.get(self._session_id, *_KEPT)
        if isinstance(kept, list):
            self._kept = tuple(str(tool_id) for tool_id in cast("list[object]", kept))
            self.active.take(self._kept)

    async def keep(self) -> None:
        """Keep what was brought into view with the session. It is no loss where that cannot be kept."""
        steps = self.active.steps()
        if self._values is not None and steps != self._kept:
            with contextlib.suppress(HandrailError):
                await self._values.put(self._session_id, *_KEPT, list(steps))
                self._kept = steps

    def arrange(self, options: CatalogOptions) -> None:
        """From now on tools are arranged by these."""
        self.options, self._last = options, None

    async def preload(self, generation: Generation, text: str) -> None:
        """Bring into view what serves a user's ``text`` best, if that is wanted."""
        options, view = self.options, self.look(generation)
        if options.preload <= 0 or view.whole or self._finder is None or not text.strip():
            return
        try:
            found = await self.find(generation, text, limit=options.preload)
        except ToolError:  # a text that nothing can be looked for by
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
        """How ``generation`` is arranged. What is in view from the start stays so, also when there come to be more tools."""
        if self._view is None or self._last is None or self._last() is not generation:
            self._view, self._last = view_of(generation, self.options), weakref.ref(generation)
            self.active.take(tool_id for tool_id in self._view.ready if tool_id in self._view.first)
        return self._view

    def load_ahead(self, generation: Generation) -> None:
        """A model is shown this: have what a search needs loaded soon, where there is more than is in view."""
        view = self.look(generation)
        if self._finder is not None and not view.whole and not view.ready.keys().isdisjoint(_SEARCHING):
            self._finder.load_ahead(generation)

    def turn(self, generation: Generation) -> InView:
        """A turn begins: what it has in view, for :meth:`specs`."""
        self.load_ahead(generation)
        self.active = self.active.shortened()
        self.shown = self.active, len(self.active)
        return self.shown

    def specs(self, generation: Generation, in_view: InView | None = None) -> list[ToolSpec]:
        """The tools in view, in order.

        :param in_view: as a turn began with it; None for what is in view now
        """
        view = self.look(generation)
        active, count = in_view or (self.active, None)
        return view.shown(active.first(count))

    def native(self, generation: Generation) -> tuple[ToolSpec, ...]:
        """What a model's provider may carry out itself."""
        return self.look(generation).native

    def index(self, generation: Generation) -> str:
        """What there is beside what is in view from the start, for the system text."""
        return index_of(self.look(generation), self.options.index_tokens)

    def was_shown(self, generation: Generation, tool_id: str) -> bool:
        """Whether the last turn's model has seen this tool's schema."""
        active, count = self.shown
        return tool_id in self.look(generation).core or tool_id in active.first(count)

    def bring(
        self, generation: Generation, ids: Iterable[str], *, found: bool = False, keep: Collection[str] = ()
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Bring tools into view, from the next turn on. Where more would be there than a provider takes, others make room.

        :param found: by a search: they make room in their turn, as long as nobody calls them
        :param keep: what makes no room
        :returns: those that were not in view, and those that made room
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
        """The tools in view that may make room: searches found them, and nobody has called them. What was found longest ago
        comes first.

        :param keep: those that may not
        """
        view = self.look(generation)
        return tuple(i for i in self.active.loose if i in view.ready and i not in view.core and i not in keep)

    def called(self, tool_id: str) -> None:
        """A model has called this tool, which stays in view then: the call is in its history."""
        if self.active.in_view.get(tool_id) and (steps := self.active.take((tool_id,))) and self.changed is not None:
            self.changed(steps, False)

    def door(self, generation: Generation) -> InteractionCatalog:
        """The catalog for a call on ``generation``."""
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
        """What fits ``query``. Nothing is brought into view.

        :raises ToolError: ``invalid_input`` for a query without any words; ``unavailable`` where nothing can be searched
        """
        if self._finder is None:
            raise ToolError("nothing can be searched here; browse_tools lists the categories", kind="unavailable")
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
        """The few tools that an unknown name may mean: by its spelling, then by its words."""
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
        """What was found by it makes no room for what else is."""

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
            fit = there.union(new[: max(0, room)])  # the best of them, where not all do
            found = replace(found, hits=tuple(hit for hit in hits if hit.tool_id in fit))
            if not found.hits:
                self._check_room("what was found", new)
            _, left = await self._bring([hit.tool_id for hit in found.hits], found=True)
            found = replace(found, left=left)
        return found

    async def manual(self, tool: str) -> Manual:
        entry = self._generation.resolve(tool)
        if entry is None:
            close = self._of.near(self._generation, tool)
            hint = f"did you mean {' or '.join(close)}?" if close else "find_tools looks for one by what it does"
            hint = self._generation.awaited(tool) or hint
            raise ToolError(f"there is no tool {tool[:80]!r}; {hint}", kind="unknown_tool")
        self._check_callable(entry, self._of.look(self._generation))
        if self._of.manuals is not None:
            await self._of.manuals.note(entry)
        return manual_of(entry, self._of.look(self._generation))

    @staticmethod
    def _check_callable(entry: Entry, view: View) -> None:
        """:raises ToolError: ``unavailable`` for a tool that is of no use here, with why"""
        if entry.withheld is not None:
            raise ToolError(f"{entry.id} is withheld: {entry.withheld}", kind="unavailable")
        if entry.id in view.barred:
            text = f"{entry.id} cannot be used here: the agents above may not hand work to it, or no further level is allowed"
            raise ToolError(text, kind="unavailable")

    def _check_room(self, what: str, ids: Collection[str]) -> None:
        """:raises ToolError: ``conflict`` where more would be in view than a provider takes"""
        there = {spec.id for spec in self._of.specs(self._generation)}
        new = [tool_id for tool_id in ids if tool_id not in there]
        stay = len(there) - len(self._of.leaving(self._generation, {*ids, *self._found}))
        if new and stay + len(new) > MOST_GIVEN:
            count = f"{len(new)} tools" if len(new) > 1 else "1 tool"
            raise ToolError(
                f"{what} would load {count}, in addition to {stay} that stay loaded; a model is given at most {MOST_GIVEN}. "
                "Nothing was loaded. Use find_tools for the few that you need, or load_tools with tool for one. Loaded tools are "
                "unloaded when the user is answered",
                kind="conflict",
            )

    async def _bring(self, ids: Iterable[str], *, found: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
        brought = self._of.bring(self._generation, ids, found=found, keep=self._found)
        await self._of.keep()
        return brought

    def _of_other_kind(self, name: str, view: View, kind: _Kind | None) -> str | None:
        if kind == "tool" and _is_category(name, view):
            return f'there is a category of that name: {{"category": "{name}"}} loads all of it'
        if kind == "category" and (entry := self._generation.resolve(name)) is not None:
            return f'there is a tool of that name: {{"tool": "{entry.id}"}} loads it'
        return None

    def _unknown(self, name: str, view: View, kind: _Kind | None) -> str:
        told = f"there is no {kind or 'category and no tool'} {name[:80]!r}"
        if awaited := self._generation.awaited(name):
            return f"{told}; {awaited}"
        if other := self._of_other_kind(name, view, kind):
            return f"{told}; {other}"
        names = list(view.members)
        tools = [] if kind == "category" else [i for i in self._generation.nearest(name, 2) if i not in view.barred]
        close = tools if kind == "tool" else [*nearest(name, names, 1), *tools]
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        if kind == "tool":
            return told + (hint or "; find_tools looks for one by what it does")
        there = ", ".join(names[:_MOST_NAMED]) or "none"
        more = f" and {len(names) - _MOST_NAMED} more, which browse_tools lists" if len(names) > _MOST_NAMED else ""
        return f"{told}{hint or '.'} The categories are: {there}{more}"


def _is_category(name: str, view: View) -> bool:
    return name == CORE or name in view.members or name in SHIPPED
