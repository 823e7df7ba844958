"""One generation of the registry: an immutable set of tools, which a turn keeps from its first call to its last."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from handrail.contract.errors import Fault, ToolError
from handrail.contract.schema.schema import CoarseProblems, Schema, UnfinishedCheck
from handrail.contract.tool.names import nearest, wire_name
from handrail.contract.tool.offering import Offering
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool import Tool

IN_PROCESS = "runtime"
"""``Entry.confined_by`` of the operator's own Python: the runtime's checks hold it, not the operating system."""

BUILT_IN = "built-in"
"""``Entry.source`` of what ships with Handrail."""

AGENTS = "agents"
"""``Entry.source`` of the agents that another agent has among its tools."""

UNCONFINED = "nothing: its operator has named it in [sandbox] unconfined"
"""The same of programs that run without a sandbox."""

_MOST_AWAITED = 3
"""How many sources one text names."""

Status = Literal["system", "connected", "available", "disabled", "offline", "error", "quarantined"]
"""``system``: ready without configuration. ``connected``: ready, after somebody configured or approved it. ``available``: it
needs configuration. ``disabled``: its operator turned it off. ``offline``: its source cannot be reached. ``error``: it cannot
run here. ``quarantined``: a person has to review it first."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A source that is not the operator's own, as the operator knows it.

    :param name: what it is called
    :param about: the operator's text on it; ``""`` where there is none
    """

    name: str
    about: str = ""


class ToolStatus(NamedTuple):
    """The status of one tool, or of a source as a whole.

    :param tool: its id; empty where the row is about all that the source has
    :param reason: why it is not ready; empty where it is
    :param source: where it comes from
    """

    tool: str
    status: Status
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One tool of a generation.

    :param source: the file, module or entry point it came from, as the operator knows it
    :param withheld: why it may not run here and is not shown to models, or None
    :param confined_by: the sandbox tier that holds it, :data:`IN_PROCESS`, or both; stated in every result
    :param untrusted: where what it gives comes from, where that is not the operator's: a foreign source, the network
    :param blocking: its code holds a thread, which a cancellation does not end
    :param foreign: whose words its description and schema are, where those are not the operator's
    :param declared: the declaration that ``spec`` was made of, with what the operator set; None where only ``spec`` is known
    :param answered_by: of a locked id that no built-in tool answers, the tool that its operator named; it runs as itself
    :ivar inline: its code is short enough to be awaited in its caller's own task: a read that is stopped where it waits
    :ivar behind: the declaration of the tool that answers for a locked id, with whose settings, secrets and state a call runs
    """

    spec: ToolSpec
    tool: Tool
    schema: Schema
    source: str
    definition_hash: str
    withheld: str | None = None
    confined_by: str = IN_PROCESS
    blocking: bool = False
    untrusted: str = ""
    foreign: Foreign | None = None
    status: Status = "system"
    declared: ToolSpec | None = None
    answered_by: Entry | None = None
    id: str = field(init=False)
    wire_name: str = field(init=False)
    asks_first: bool = field(init=False)
    """Whether people may have to be asked questions before it runs."""
    inline: bool = field(init=False)
    """Whether it can be awaited in its caller's own task; see the class."""
    behind: ToolSpec | None = field(init=False)
    checks: bool = field(init=False)
    """Whether the tool itself checks arguments that fit its schema."""

    def __post_init__(self) -> None:  # here, once: generations of ten thousand share their entries
        object.__setattr__(self, "id", self.spec.id)
        object.__setattr__(self, "wire_name", wire_name(self.spec.id))
        object.__setattr__(self, "asks_first", type(self.tool).questions is not Tool.questions)
        spec = self.spec
        reads = spec.side_effect == "read" and not spec.promotable and spec.mode != "stateful"
        object.__setattr__(self, "inline", reads and not self.blocking)
        object.__setattr__(self, "behind", None if self.answered_by is None else self.answered_by.spec)
        object.__setattr__(self, "checks", type(self.tool).check is not Tool.check)

    def admitted(
        self, arguments: dict[str, Any], *, parsed: bool = False, judged: Mapping[Schema, Sequence[str]] | None = None
    ) -> dict[str, Any]:
        """``arguments`` as the tool gets them: they fit its schema, with whole numbers as integers, and have passed its
        own look at them.

        :param parsed: they came from JSON text
        :param judged: what is wrong with them by schemas that they have been checked by already
        :raises UnfinishedCheck: if the check is beyond the budget
        :raises ToolError: ``invalid_input`` with what is wrong with them; ``backend`` where that look failed by itself
        """
        schema = self.schema
        problems = judged[schema] if judged and schema in judged else schema.problems(arguments, parsed=parsed)
        if problems:
            text = f"{self.spec.id}: {'; '.join(problems)}"
            if isinstance(problems, CoarseProblems):
                raise UnfinishedCheck(text, schema, arguments, problems)
            raise ToolError(text, kind="invalid_input")
        whole = self.schema.whole(arguments)
        try:
            if self.answered_by is not None:
                return self.answered_by.admitted(whole, judged=judged)
            if self.checks:
                self.tool.check(whole)
        except UnfinishedCheck:
            raise
        except ToolError as error:
            raise ToolError(f"{self.spec.id}: {error.text}", kind=error.kind) from None
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # a tool's sys.exit() would end the kernel
            text = f"{self.spec.id}: its check of these arguments failed: {type(error).__name__}: {str(error)[:300]}"
            raise ToolError(text, kind="backend") from error
        return whole


@dataclass(frozen=True, slots=True)
class Difference:
    """How the tools of two generations differ: ids, in order. A tool that was moved or withheld counts as changed."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


class Generation:
    """All tools at one time, by id, alias and wire name.

    :param number: 1 for the first of a kernel's life, then one more each
    :param aliases: alias to id
    :param quarantined: what foreign sources offered and could not be taken, with the reasons
    :param beyond: ids of tools that there are and that this agent does not have; a rule may name them
    :param offerings: what the sources have beside tools, in their order
    :param unheard: the sources that have not said yet what they have
    :raises ValueError: when two tools, aliases or wire names are the same
    """

    __slots__ = (
        "__weakref__",
        "_by_name",
        "aliases",
        "beyond",
        "entries",
        "number",
        "offerings",
        "quarantined",
        "unheard",
    )

    def __init__(
        self,
        number: int,
        entries: Iterable[Entry],
        aliases: Mapping[str, str] | None = None,
        quarantined: Iterable[Fault] = (),
        beyond: Iterable[str] = (),
        offerings: Iterable[Offering] = (),
        unheard: Iterable[Unheard] = (),
    ) -> None:
        given = tuple(entries)
        by_id = {entry.id: entry for entry in given}
        by_wire = {entry.wire_name: entry for entry in given}
        if len(by_wire) < len(given):  # an id that is another's wire name is its own wire name too
            raise ValueError(_both_named(given))
        by_name = {**by_wire, **by_id}
        for alias, tool_id in (aliases or {}).items():
            if tool_id not in by_id:
                raise ValueError(f"the alias {alias!r} is for {tool_id!r}, which is not a tool")
            if alias in by_name:
                raise ValueError(f"the alias {alias!r} is also a name of {by_name[alias].id!r}")
            by_name[alias] = by_id[tool_id]
        self.number = number
        self.entries: Mapping[str, Entry] = MappingProxyType(by_id)
        self.aliases: Mapping[str, str] = MappingProxyType(dict(aliases or {}))
        self.quarantined = tuple(quarantined)
        self.beyond = frozenset(beyond)
        self.offerings = tuple(offerings)
        self.unheard = tuple(unheard)
        self._by_name = by_name

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        return f"<generation {self.number}: {len(self.entries)} tools>"

    def statuses(self, unreachable: Mapping[str, str]) -> list[ToolStatus]:
        """The status of each tool, then of what foreign sources offer and is not among them.

        :param unreachable: the foreign sources that cannot be reached now, by name, each with the reason
        """
        found = [_status_of(entry, unreachable) for entry in self.entries.values()]
        found += [ToolStatus(one.tool, "quarantined", one.problem, one.foreign) for one in self.quarantined if one.tool]
        at_all = {one.foreign or one.source: one.problem for one in self.quarantined if not one.tool}
        unheard = {one.name: one.standing() for one in self.unheard}
        for name, reason in {**at_all, **unheard}.items():
            found.append(ToolStatus("", "offline" if name in unheard or name in unreachable else "error", reason, name))
        return found

    def resolve(self, name: str) -> Entry | None:
        """The tool of that id, alias or wire name, withheld or not."""
        return self._by_name.get(name)

    def nearest(self, name: str, count: int = 3) -> list[str]:
        """The few names most like an unknown one, best first; only of tools that can be called."""
        known = [tool_id for tool_id, entry in self.entries.items() if entry.withheld is None]
        known += [alias for alias, tool_id in self.aliases.items() if self.entries[tool_id].withheld is None]
        return nearest(name.replace("__", "."), known, count)

    def awaited(self, name: str, *, else_any: bool = False) -> str:
        """Where the sources stand that an unknown name may be a tool of, once they have said what they have; empty where
        there are none.

        :param else_any: those too whose tools may have any name
        """
        if not self.unheard:
            return ""
        said = name.removeprefix("mcp:").replace(":", "_")
        found = [one for one in self.unheard if said == one.name or (one.prefix and _is_beneath(said, one.prefix))]
        if not found and else_any:
            found = [one for one in self.unheard if not one.prefix]
        return " ".join(f"{one.standing()}." for one in found[:_MOST_AWAITED])

    def difference(self, older: Generation) -> Difference:
        """What this generation has that ``older`` had not, and the other way round."""
        mine, theirs = self.entries, older.entries
        other = [entry for entry in mine.values() if theirs.get(entry.id) is not entry]  # most are the very same
        return Difference(
            tuple(entry.id for entry in other if entry.id not in theirs),
            tuple(tool_id for tool_id in theirs if tool_id not in mine),
            tuple(entry.id for entry in other if entry.id in theirs and _is_other(entry, theirs[entry.id])),
        )


def foreign_origin(spec: ToolSpec, place: str, *, foreign: bool) -> str:
    """Where the outputs of a tool come from, if not from the operator's own code and files.

    :param place: where the tool was found
    :param foreign: whether that is a source of somebody else
    """
    hosts = spec.requires.net.hosts
    shown = ", ".join(hosts[:5]) + (f" and {len(hosts) - 5} more" if len(hosts) > 5 else "")
    return " and ".join([*([place] if foreign else []), *([f"the network ({shown})"] if hosts else [])])


def _both_named(entries: Iterable[Entry]) -> str:
    by_wire: dict[str, Entry] = {}
    for entry in entries:
        if (other := by_wire.get(entry.wire_name)) is not None:
            return f"{other.id!r} and {entry.id!r} are both named {entry.wire_name!r}"
        by_wire[entry.wire_name] = entry
    raise AssertionError("no two have one name")


def _is_beneath(name: str, prefix: str) -> bool:
    """Whether it is like the id of a source's tool; ``git__log`` is the wire name of ``git.log``."""
    return name == prefix or (name.startswith(f"{prefix}_") and not name.startswith(f"{prefix}__"))


def _is_other(new: Entry, old: Entry) -> bool:
    return _state_of(new) != _state_of(old)


def _state_of(entry: Entry) -> tuple[str | None, ...]:
    return entry.definition_hash, entry.source, entry.withheld, entry.confined_by


class Unheard(Protocol):
    """A source that has not said yet what it has, such as a server that nobody has ever reached."""

    @property
    def name(self) -> str: ...

    @property
    def prefix(self) -> str:
        """What the ids of its tools begin with; empty where that can be anything."""
        ...

    def standing(self) -> str:
        """Where it stands now, what comes next, and who does it: a sentence or two for whoever wants a tool of it."""
        ...


# The Protocol of a tool source, and the results of loading it.

Rank = Literal["built-in", "global", "agent", "code", "package"]
"""Who a source speaks for. Only a built-in may have a locked id; only ``agent`` may override, and only ``global``."""


@dataclass(frozen=True, slots=True)
class Found:
    """One tool, and where it was found, as the operator knows it."""

    tool: Tool
    place: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """All that a source has, and all that is wrong with it.

    :param name: what the operator calls the source, where it is a foreign one; its tools are one category of that name
    :param about: the operator's text on it, for models. Never the source's own
    :param aliases: further names of its tools, alias to id; those of the built-ins count
    :param offering: its resources and prompts, where it has some; the same object as long as those are the same
    :param unheard: where nobody knows yet what it has
    """

    tools: tuple[Found, ...] = ()
    faults: tuple[Fault, ...] = ()
    name: str = ""
    about: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    offering: Offering | None = None
    unheard: Unheard | None = None


class Source(Protocol):
    """Where tools come from. Loading reads and checks; it starts nothing, fetches nothing, installs nothing."""

    @property
    def rank(self) -> Rank: ...

    @property
    def foreign(self) -> bool:
        """Not the operator's own: what is faulty is quarantined tool by tool, and stops nothing."""
        ...

    def load(self) -> Loaded:
        """Everything at once; a fault is data here, never an exception."""
        ...


def _status_of(entry: Entry, unreachable: Mapping[str, str]) -> ToolStatus:
    answers = entry.answered_by or entry
    if entry.withheld is None and answers.foreign is not None and answers.foreign.name in unreachable:
        return ToolStatus(entry.id, "offline", unreachable[answers.foreign.name], entry.source)
    return ToolStatus(entry.id, entry.status, entry.withheld or "", entry.source)
