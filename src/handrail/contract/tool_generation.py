"""One generation of the registry: an immutable set of tools. A turn keeps its generation to the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from handrail.contract.errors import Diagnostic, ToolError
from handrail.contract.schema.argument_repair import list_corrections, repair_arguments
from handrail.contract.schema.argument_validation import (
    ArgumentCheckBudgetError,
    CoarseProblemList,
    ParametersSchema,
)
from handrail.contract.struct import Struct, field
from handrail.contract.tool.resource_provider import ResourceProvider
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_ids_and_wire_names import guess_intended_tool_id, nearest_names, wire_name
from handrail.contract.tool.tool_protocol import Tool

IN_PROCESS = "runtime"
"""``ToolEntry.sandbox`` of the operator's own Python: the checks of the runtime confine it, not the operating system."""

BUILT_IN = "built-in"
"""``ToolEntry.source`` of what ships with Handrail."""

AGENT_SOURCE = "agents"
"""``ToolEntry.source`` of agents that another agent has as tools."""

UNCONFINED = "none: the operator listed this tool in [sandbox] unconfined"
"""``ToolEntry.sandbox`` of programs that run without a sandbox."""

_MAX_UNLISTED_NAMED = 3
"""How many sources one text names."""

ToolState = Literal["system", "connected", "available", "disabled", "offline", "error", "quarantined"]
"""The status of a tool.

``system``: ready without configuration. ``connected``: ready after configuration or approval. ``available``: needs
configuration. ``disabled``: turned off by the operator. ``offline``: its source cannot be reached. ``error``: cannot
run here. ``quarantined``: awaits review by a user.
"""


class ThirdPartySourceInfo(Struct, frozen=True):
    """A third-party source, as the operator knows it.

    :param name: the operator's name of the source
    :param description: the operator's text about it, or ``""``
    """

    name: str
    description: str = ""


class ToolStatus(NamedTuple):
    """The status of one tool, or of a source as a whole.

    :param tool: the id of the tool; empty for a whole source
    :param reason: why it is not ready; empty if it is
    :param source: the origin of the tool
    """

    tool: str
    status: ToolState
    reason: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class ToolEntry:
    """One tool of a generation.

    :param source: the file, module or entry point that the tool came from, as the operator knows it
    :param unavailable_reason: why the tool is unavailable here and hidden from models, or None
    :param sandbox: the sandbox tier that confines it, :data:`IN_PROCESS`, or both; every result states it
    :param untrusted_source: the origin of its output, if that is not the operator: a third-party source, the network
    :param is_blocking: whether its code blocks a thread, which a cancellation does not end
    :param third_party: the third-party author of its description and schema, or None
    :param declared: the declaration that ``spec`` was made from, with the operator's settings; None if only ``spec``
        is known
    :param answered_by: for a locked id without a built-in tool: the tool that the operator chose; it runs as itself
    :ivar is_inline: whether its code is short enough to run in the caller's own task, and a stopped call is a read
    :ivar answering_spec: the declaration of the tool that answers for a locked id; a call runs with its settings, secrets and
        state
    """

    spec: ToolSpec
    tool: Tool
    schema: ParametersSchema
    source: str
    definition_hash: str
    unavailable_reason: str | None = None
    sandbox: str = IN_PROCESS
    is_blocking: bool = False
    untrusted_source: str = ""
    third_party: ThirdPartySourceInfo | None = None
    status: ToolState = "system"
    declared: ToolSpec | None = None
    answered_by: ToolEntry | None = None
    id: str = dataclasses.field(init=False)
    wire_name: str = dataclasses.field(init=False)
    has_questions: bool = dataclasses.field(init=False)
    """Whether it may have to ask the user questions before it runs."""
    is_inline: bool = dataclasses.field(init=False)
    """Whether it can run in the caller's own task; see the class."""
    answering_spec: ToolSpec | None = dataclasses.field(init=False)
    has_check: bool = dataclasses.field(init=False)
    """Whether the tool itself checks arguments that match its schema."""

    def __post_init__(self) -> None:  # here, once: generations of ten thousand share their entries
        object.__setattr__(self, "id", self.spec.id)
        object.__setattr__(self, "wire_name", wire_name(self.spec.id))
        object.__setattr__(self, "has_questions", type(self.tool).questions is not Tool.questions)
        spec = self.spec
        reads = spec.side_effect == "read" and not spec.promotable and spec.mode != "stateful"
        object.__setattr__(self, "is_inline", reads and not self.is_blocking)
        object.__setattr__(self, "answering_spec", None if self.answered_by is None else self.answered_by.spec)
        object.__setattr__(self, "has_check", type(self.tool).check is not Tool.check)

    @property
    def unavailable_error_text(self) -> str:
        """The error text for a call of this tool while it is unavailable."""
        reason = (self.unavailable_reason or "").rstrip(".")
        return f"Tool `{self.id}` is unavailable: {reason}. Use another tool, or ask the user to correct this."

    def validate_arguments(
        self,
        arguments: dict[str, Any],
        *,
        parsed: bool = False,
        known_problems: Mapping[ParametersSchema, Sequence[str]] | None = None,
        repairs: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Validate ``arguments`` and return them in the form for the tool, with whole numbers as integers.

        They match the schema and have passed the tool's own check.

        :param parsed: whether they came from JSON text
        :param known_problems: the known problems of these arguments, by schema
        :param repairs: receives, by path, what was read differently from how it was sent
            (:mod:`handrail.contract.schema.argument_repair`); None: nothing is
        :raises ArgumentCheckBudgetError: if the check exceeds the budget
        :raises ToolError: ``invalid_input`` with the problems; ``backend`` if the tool's check failed itself
        """
        schema = self.schema
        problems = (
            known_problems[schema]
            if known_problems and schema in known_problems
            else schema.list_problems(arguments, parsed=parsed)
        )
        if problems:
            text = f"{self.spec.id}: {'; '.join(problems)}"
            if isinstance(problems, CoarseProblemList):
                raise ArgumentCheckBudgetError(text, schema, arguments, problems)
            repaired = None if repairs is None else repair_arguments(schema, arguments)
            if repaired is None or repairs is None:
                corrections = [] if repairs is None else list_corrections(schema, arguments, problems)
                raise ToolError("; ".join([text, *corrections]), kind="invalid_input")
            arguments = repaired[0]
            repairs |= repaired[1]
        whole = self.schema.coerce_integers(arguments)
        try:
            if self.answered_by is not None:
                return self.answered_by.validate_arguments(whole, known_problems=known_problems)
            if self.has_check:
                self.tool.check(whole)
        except ArgumentCheckBudgetError:
            raise
        except ToolError as error:
            raise ToolError(f"{self.spec.id}: {error.text}", kind=error.kind) from None
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # sys.exit() of a tool would end the kernel
            text = (
                f"{self.spec.id}: The tool's check of the arguments failed: {type(error).__name__}: {str(error)[:300]}."
            )
            raise ToolError(text, kind="backend") from error
        return whole


class GenerationDiff(Struct, frozen=True):
    """The difference between the tools of two generations, as ids in order.

    A tool that moved or became unavailable counts as changed.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


class Generation:
    """All tools at one time, by id, alias and wire name.

    :param number: 1 for the first of a kernel, then one more each
    :param aliases: alias to id
    :param quarantined: definitions of third-party sources that were rejected, with the reasons
    :param beyond: ids of existing tools that this agent does not have; a rule may name them
    :param offerings: the resources and prompts of the sources, in their order
    :param unheard: the sources that have not listed their tools yet
    :raises ValueError: if two tools, aliases or wire names are equal
    """

    __slots__ = (
        "__weakref__",
        "_by_name",
        "aliases",
        "entries",
        "number",
        "other_tool_ids",
        "quarantined",
        "resource_providers",
        "unlisted_sources",
    )

    def __init__(
        self,
        number: int,
        entries: Iterable[ToolEntry],
        aliases: Mapping[str, str] | None = None,
        quarantined: Iterable[Diagnostic] = (),
        beyond: Iterable[str] = (),
        offerings: Iterable[ResourceProvider] = (),
        unheard: Iterable[UnlistedSource] = (),
    ) -> None:
        given = tuple(entries)
        by_id = {entry.id: entry for entry in given}
        by_wire = {entry.wire_name: entry for entry in given}
        if len(by_wire) < len(given):  # an id that equals another wire name is its own wire name too
            raise ValueError(_describe_duplicate(given))
        by_name = {**by_wire, **by_id}
        for alias, tool_id in (aliases or {}).items():
            if tool_id not in by_id:
                raise ValueError(f"The alias {alias!r} names the unknown tool {tool_id!r}.")
            if alias in by_name:
                raise ValueError(f"The alias {alias!r} is already a name of {by_name[alias].id!r}.")
            by_name[alias] = by_id[tool_id]
        self.number = number
        self.entries: Mapping[str, ToolEntry] = MappingProxyType(by_id)
        self.aliases: Mapping[str, str] = MappingProxyType(dict(aliases or {}))
        self.quarantined = tuple(quarantined)
        self.other_tool_ids = frozenset(beyond)
        self.resource_providers = tuple(offerings)
        self.unlisted_sources = tuple(unheard)
        self._by_name = by_name

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"<generation {self.number}: {len(self.entries)} tools>"

    def tool_statuses(self, unreachable: Mapping[str, str]) -> list[ToolStatus]:
        """Return the status of each tool, then of the rejected definitions and third-party sources.

        :param unreachable: the third-party sources that cannot be reached now, by name, each with the reason
        """
        found = [_status_of(entry, unreachable) for entry in self.entries.values()]
        found += [
            ToolStatus(one.tool, "quarantined", one.problem, one.third_party) for one in self.quarantined if one.tool
        ]
        at_all = {one.third_party or one.source: one.problem for one in self.quarantined if not one.tool}
        unheard = {one.name: one.describe_status() for one in self.unlisted_sources}
        for name, reason in {**at_all, **unheard}.items():
            found.append(ToolStatus("", "offline" if name in unheard or name in unreachable else "error", reason, name))
        return found

    def resolve_tool_name(self, name: str) -> ToolEntry | None:
        """Return the tool with this id, alias or wire name, available or not; None if there is none."""
        return self._by_name.get(name)

    def nearest_names(self, name: str, count: int = 3) -> list[str]:
        """Return the known names most similar to an unknown one, best first, of available tools only."""
        known = [tool_id for tool_id, entry in self.entries.items() if entry.unavailable_reason is None]
        known += [alias for alias, tool_id in self.aliases.items() if self.entries[tool_id].unavailable_reason is None]
        near = nearest_names(name.replace("__", "."), known, count)
        if (meant := guess_intended_tool_id(name, known)) is None:
            return near
        last = name.replace("__", ".").rpartition(".")[2]
        same = [] if meant.rpartition(".")[2] == last else [one for one in near if one.rpartition(".")[2] == last]
        return [meant, *same][:count]  # such as `github.search_code` besides `grep` for `search_code`

    def describe_unlisted_sources(self, name: str, *, include_unprefixed: bool = False) -> str:
        """Describe the unlisted sources that may have a tool of an unknown name; empty if there are none.

        :param include_unprefixed: if none matches, include the sources whose tools may have any name
        """
        if not self.unlisted_sources:
            return ""
        message = name.removeprefix("mcp:").replace(":", "_")
        found = [
            one
            for one in self.unlisted_sources
            if message == one.name or (one.prefix and _has_source_prefix(message, one.prefix))
        ]
        if not found and include_unprefixed:
            found = [one for one in self.unlisted_sources if not one.prefix]
        return " ".join(f"{one.describe_status()}." for one in found[:_MAX_UNLISTED_NAMED])

    def compute_diff_from(self, older: Generation) -> GenerationDiff:
        """Return the difference from an ``older`` generation to this one."""
        mine, theirs = self.entries, older.entries
        other = [entry for entry in mine.values() if theirs.get(entry.id) is not entry]  # most entries are identical
        return GenerationDiff(
            tuple(entry.id for entry in other if entry.id not in theirs),
            tuple(tool_id for tool_id in theirs if tool_id not in mine),
            tuple(entry.id for entry in other if entry.id in theirs and _has_changed(entry, theirs[entry.id])),
        )


def describe_untrusted_origin(spec: ToolSpec, place: str, *, third_party: bool) -> str:
    """Describe the untrusted origin of a tool's output; empty for the operator's own code and files.

    :param place: where the tool was found
    :param third_party: whether that is a third-party source
    """
    hosts = spec.requires.net.hosts
    shown = ", ".join(hosts[:5]) + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")
    return " and ".join([*([place] if third_party else []), *([f"the network ({shown})"] if hosts else [])])


def _describe_duplicate(entries: Iterable[ToolEntry]) -> str:
    by_wire: dict[str, ToolEntry] = {}
    for entry in entries:
        if (other := by_wire.get(entry.wire_name)) is not None:
            return f"The tools {other.id!r} and {entry.id!r} have the same wire name {entry.wire_name!r}."
        by_wire[entry.wire_name] = entry
    raise AssertionError("no two have one name")


def _has_source_prefix(name: str, prefix: str) -> bool:
    """Return whether ``name`` looks like the id of a source's tool.

    ``git__log`` is the wire name of ``git.log``.
    """
    return name == prefix or (name.startswith(f"{prefix}_") and not name.startswith(f"{prefix}__"))


def _has_changed(new: ToolEntry, old: ToolEntry) -> bool:
    return _comparison_key(new) != _comparison_key(old)


def _comparison_key(entry: ToolEntry) -> tuple[str | None, ...]:
    return entry.definition_hash, entry.source, entry.unavailable_reason, entry.sandbox


class UnlistedSource(Protocol):
    """A source that has not listed its tools yet, such as a server that was never reached."""

    @property
    def name(self) -> str:
        """The operator's name of the source."""
        ...

    @property
    def prefix(self) -> str:
        """The prefix of the ids of its tools; empty if they can be anything."""
        ...

    def describe_status(self) -> str:
        """Describe its state, the next step and who takes it, in one or two sentences."""
        ...


# The Protocol of a tool source, and the results of loading it.

SourceRank = Literal["built-in", "global", "agent", "code", "package"]
"""Whose authority a source has. Only a built-in may have a locked id. Only ``agent`` may override other tools, and
only those of ``global``."""


class DiscoveredTool(Struct, frozen=True):
    """One tool and the place where it was found, as the operator knows it."""

    tool: Tool
    location: str


class SourceContents(Struct, frozen=True):
    """All tools of a source, and all its faults.

    :param name: the operator's name of a third-party source; its tools are one category of that name
    :param description: the operator's text about it, for models; never the source's own
    :param aliases: further names of its tools, alias to id; only those of built-in tools count
    :param resource_provider: its resources and prompts, if it has some; the same object as long as they are unchanged
    :param unlisted: set if the source has not listed its tools yet
    """

    tools: tuple[DiscoveredTool, ...] = ()
    faults: tuple[Diagnostic, ...] = ()
    name: str = ""
    description: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    resource_provider: ResourceProvider | None = None
    unlisted: UnlistedSource | None = None


class ToolSource(Protocol):
    """A source of tools. Loading reads and checks; it starts, fetches and installs nothing."""

    @property
    def rank(self) -> SourceRank:
        """Whose authority the source has."""
        ...

    @property
    def is_third_party(self) -> bool:
        """Whether the source is third-party.

        Its faulty tools are quarantined one by one and stop nothing.
        """
        ...

    def load(self) -> SourceContents:
        """Load everything at once. Faults are data in the result, never an exception."""
        ...


def _status_of(entry: ToolEntry, unreachable: Mapping[str, str]) -> ToolStatus:
    answers = entry.answered_by or entry
    if entry.unavailable_reason is None and answers.third_party is not None and answers.third_party.name in unreachable:
        return ToolStatus(entry.id, "offline", unreachable[answers.third_party.name], entry.source)
    return ToolStatus(entry.id, entry.status, entry.unavailable_reason or "", entry.source)
