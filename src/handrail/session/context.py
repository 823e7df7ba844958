"""The context of a session's calls: its agent, tools and rules, the limits of child sessions, and session opening.

One arbiter, one lock table and one log serve any number of contexts. The contexts of one agent share their generations of
tools, except if a process registered client tools: these belong to its sessions alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from handrail.catalog.view import CatalogOptions, view_of
from handrail.config.settings import CatalogSettings
from handrail.contract.agent import AgentManifest
from handrail.contract.approvals import ApprovalAnswer, ApprovalRequest, Attendant
from handrail.contract.doors.peer import Peer
from handrail.contract.doors.runtime import ClientContext, Question
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.generation import Difference, Generation, Source
from handrail.contract.modes import Mode
from handrail.contract.rules import AnyRule, RuleEntry, rule_texts
from handrail.contract.tool.offering import Offering
from handrail.contract.tool.requires import Layer
from handrail.contract.tool.settings import ToolConfig, ToolSettings
from handrail.contract.tool.tool import Tool
from handrail.policy.authority import Authority
from handrail.policy.rules.rules import RuleBook
from handrail.policy.watchdogs.watchdog import Watchdog
from handrail.registry.generations import Chronicle, Succession
from handrail.registry.sources.all import ToolSources
from handrail.runtime.files.roots import NO_FURTHER, FurtherRoots
from handrail.runtime.secrets import NO_SECRETS, SecretStore
from handrail.session.session import Under
from handrail.store.tables.sessions import SessionRow

if TYPE_CHECKING:
    from handrail.session.session import HeldSession


@dataclass(frozen=True, slots=True)
class Brought:
    """What a process brings for the sessions that it opens itself; nobody else's see any of it.

    Its secrets are redacted everywhere.
    """

    face: str = "library"
    agent: str | None = None
    """None: the configured one."""
    tools: tuple[Tool, ...] = ()
    rules: tuple[str | RuleEntry, ...] = ()
    secrets: Mapping[str, str] | None = field(default=None, repr=False)
    watchdogs: tuple[Watchdog, ...] = ()
    offerings: tuple[Offering, ...] = ()
    settings: tuple[str, ...] = ()
    mode: Mode | None = None
    """None: the agent's, or the configured one."""
    tool_config: ToolConfig = field(default_factory=dict[str, Mapping[str, str]])

    tool_settings: Mapping[str, ToolSettings] = field(default_factory=dict[str, ToolSettings])
    """What its flags set for tools."""
    catalog: CatalogSettings | None = None
    """What its flags set for models' views; None for that of the process that holds the workspace."""
    configured_mode: Mode | None = None
    """The mode that its files name; None for that of the process that holds the workspace."""


class Shelf:
    """The generations of tools of one agent, made from the same sources."""

    def __init__(
        self,
        sources: ToolSources,
        succession: Succession,
        layer: Callable[[Iterable[Generation]], Layer],
        numbers: Callable[[], int],
        publish: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """
        :param sources: those of the current generation
        :param layer: what the agent has, with the tools of these generations
        :param numbers: gives the number of the next generation, whichever shelf it is for
        :param publish: puts on record what is told of a new generation
        """
        self.sources = sources
        self.succession = succession
        self._layer = layer
        self._numbers = numbers
        self._publish = publish
        self._chronicle = Chronicle()
        self.is_on_record = False
        """Whether a session has worked with it, so that its generations are recorded."""
        self.authorities: list[Authority] = []
        """The authorities that judge by what the agent's tools require."""
        self._reloading = asyncio.Lock()
        self._changed: list[Source] = []
        self._next: asyncio.Task[Difference] | None = None
        """The task that looks through changed sources, once it is its turn."""
        self.options: set[CatalogOptions] = set()
        """The ways in which its tools are arranged for models."""
        self.watchers: list[Callable[[Generation], None]] = []
        """Called with each new generation."""

    def begin(self) -> None:
        """Record its generations from now on, because a session works with it. Only looking at tools leaves no record."""
        if not self.is_on_record:
            self.is_on_record = True
            self._publish(self._chronicle.told(self.succession.current))

    async def reload(self, given: Iterable[Tool] | None = None) -> Difference:
        """Look through the sources again, in a thread, and publish what they have as the next generation, in one step.
        Calls go on meanwhile.

        :param given: instead of the tools given in code before; None leaves those as they are
        :raises LoadError: with every fault; the current generation stays
        :raises UsageError: when the kernel was closed meanwhile
        """
        tools = None if given is None else tuple(given)
        async with self._reloading:  # one after the other, so that the numbers rise
            sources = self.sources if tools is None else replace(self.sources, given=tools)
            return await self._load(sources)

    async def refresh(self, changed: Iterable[Source]) -> Difference:
        """The same of single sources, which are not the operator's own; all others stay as they were found last.

        What changes while others are looked through waits, and is then looked through together.

        :return: what became of all tools, also of those for which somebody else waited too
        """
        self._changed.extend(source for source in changed if not any(source is one for one in self._changed))
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._refresh())
        return await asyncio.shield(self._next)

    async def _refresh(self) -> Difference:
        async with self._reloading:
            self._next, changed, self._changed = None, self._changed, []
            return await self._load(self.sources, changed)

    async def _load(self, sources: ToolSources, only: Collection[Source] | None = None) -> Difference:
        number, living = self._numbers(), self.succession.living
        generation, layer = await asyncio.to_thread(self._look, sources, only, number, living)
        return self._follow(sources, generation, layer)

    def _look(
        self, sources: ToolSources, only: Collection[Source] | None, number: int, living: Iterable[Generation]
    ) -> tuple[Generation, Layer]:
        generation = sources.load(number, only)
        for options in tuple(self.options):
            view_of(generation, options)  # here, so that the first turn with it does not keep others waiting
        return generation, self._layer((generation, *living))

    def _follow(self, sources: ToolSources, generation: Generation, layer: Layer) -> Difference:
        if self.succession.closed:
            raise UsageError("the kernel was closed while its tools were looked through; open it anew")
        difference = self.succession.publish(generation)
        self.sources = sources
        for authority in self.authorities:
            authority.renew(layer)
        if self.is_on_record:
            self._publish(self._chronicle.told(generation, difference))
        for told in tuple(self.watchers):
            told(generation)
        return difference


class Context:
    """One agent in one process's sessions.

    :ivar further: the agent's roots beside the workspace
    :ivar rules: those that every session of it starts with
    :ivar secrets: what its sessions' tools may be given
    :ivar catalog: how its sessions' models see the tools
    :ivar shared: whether other contexts see the same generations, so that they do not end with this one
    """

    def __init__(
        self,
        manifest: AgentManifest,
        shelf: Shelf,
        authority: Authority,
        rules: RuleBook,
        further: FurtherRoots = NO_FURTHER,
        *,
        shared: bool,
        secrets: SecretStore = NO_SECRETS,
        catalog: CatalogOptions | None = None,
    ) -> None:
        self.manifest = manifest
        self.catalog = catalog or CatalogOptions(core=manifest.core)
        self.further = further
        self.shelf = shelf
        self.authority = authority
        self.rules = rules
        self.shared = shared
        self.secrets = secrets
        shelf.authorities.append(authority)
        shelf.options.add(self.catalog)
        self.watchers: list[Callable[[Generation], None]] = []
        """Told of each new generation that its sessions work with."""
        shelf.watchers.append(self._published)

    @property
    def agent(self) -> str:
        """The agent's id."""
        return self.manifest.id

    @property
    def generation(self) -> Generation:
        """The tools there are now. A turn keeps those there were when it began."""
        return self.shelf.succession.current

    def part(self, own: Context) -> None:
        """Go on, in sessions that are open as well, with the tools of ``own``, which nobody else has or will have."""
        before = self.shelf
        before.authorities.remove(self.authority)
        before.watchers.remove(self._published)
        own.shelf.authorities[:] = [self.authority]
        own.shelf.options.add(self.catalog)
        own.shelf.watchers[:] = [self._published]
        self.authority.renew(own.authority.agent_layer)
        self.shelf, self.shared = own.shelf, own.shared
        if before.is_on_record:
            own.shelf.begin()
        self._published(self.generation)

    def _published(self, generation: Generation) -> None:
        for told in tuple(self.watchers):
            told(generation)

    async def aclose(self) -> None:
        """Nobody opens sessions of it any more."""
        self.shelf.authorities.remove(self.authority)
        self.shelf.watchers.remove(self._published)
        if not self.shared:
            await self.shelf.succession.aclose()


# Parent and child sessions: the limits that a parent sets for the sessions of its sub-agents, and the answers that these
# get from the parent's user.

T = TypeVar("T")

NOT_NOW = "nobody is there now, and a sub-agent's call cannot wait for them"


def secrets_for(child: SecretStore, under: Under) -> SecretStore:
    """The secrets of a child: those that its parent has and passes on."""
    parent = under.parent
    names = parent.lane.around.secrets.names & set(parent.family.manifest.delegable.secrets)
    return child.only(names, f"the agent {parent.family.manifest.id} does not pass it on to its sub-agents")


def attendant_for(under: Under) -> Attendant | None:
    """The people of the parent, where it passes them on."""
    if under.parent.lane.attendant is None or not under.parent.family.manifest.delegable.presence:
        return None
    return _AskedFromBelow(under)


def named_hosts_of(under: Under) -> str | None:
    """The nearest agent above a child that passes on hosts by their names alone; None where none does."""
    parent = under.parent.family.manifest
    hosts = parent.delegable.net.hosts
    return under.parent.lane.named_hosts_of if hosts is None or "*" in hosts else parent.id


def origin_of(agent: str, under: Under) -> str:
    """Who asks, for the people of the session at the top."""
    is_top = under.parent.family.under is None
    of = f"session {under.parent.id}" if is_top else under.parent.lane.origin
    about = f" ({' '.join(under.delegation.description.split())[:80]})" if under.delegation.description.strip() else ""
    return f"sub-agent {agent}{about} of {of}"


@dataclass(frozen=True, slots=True)
class _AskedFromBelow:
    """The people of the session at the top of the tree, asked by one below. Its calls are not parked: nobody would take them up
    again. Those that are made in the background wait where they are while that session is suspended or its people put them
    off. Every other door can answer them meanwhile, and whoever opens the session again is asked."""

    under: Under

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        async def asked(people: Attendant) -> ApprovalAnswer | None:
            answer = await people.approve(request)
            return None if answer.choice == "later" else answer

        return await self._answered(asked) or ApprovalAnswer("reject", NOT_NOW)

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        answers = await self._answered(lambda people: people.answer(session_id, questions))
        if answers is None:
            raise ToolError(NOT_NOW, kind="unavailable")
        return answers

    async def _answered(self, ask: Callable[[Attendant], Awaitable[T | None]]) -> T | None:
        """What they answer; None where nobody is there now, and none is waited for."""
        waits = False
        while True:
            top = self.under.top
            people = None if top.closed else top.people
            if people is not None and (answer := await _unless_left(ask(people), top)) is not None:
                return answer
            alone = people is None and not top.closed and not waits  # it was headless when this was asked
            if alone or not self.under.in_background:
                return None
            waits = True
            await top.family.taken_up.wait()


async def _unless_left(asking: Awaitable[T | None], session: HeldSession) -> T | None:
    """What is answered, unless the session whose people are asked ends before: a yes that comes too late is none."""
    asked = asyncio.ensure_future(asking)
    left = asyncio.ensure_future(session.family.left.wait())
    try:
        await asyncio.wait((asked, left), return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if not left.done() else None
    finally:
        left.cancel()
        if not asked.cancel() and not asked.cancelled():
            asked.exception()  # looked at


# The opening of a session, for every caller.


class SessionOptions(TypedDict, total=False):
    """What a program says of a session that it opens. The kernel's ``session`` says what each means."""

    agent: str | None
    headless: bool
    attendant: Attendant | None
    peer: Peer | None
    rules: Iterable[AnyRule]
    mode: str | None
    topic: str | None
    client: ClientContext | None


def checked(options: SessionOptions) -> SessionOptions:
    """The options of a program, with its rules as they are now.

    :raises TypeError: for a name that is none of theirs
    :raises UsageError: when nobody can be asked in a session that is not headless, and for what is no rule's form
    """
    if unknown := sorted(options.keys() - SessionOptions.__annotations__.keys()):
        raise TypeError(f"session() got an unexpected keyword argument {unknown[0]!r}")
    if options.get("attendant") is None and not options.get("headless", True):
        raise UsageError("a session that is not headless needs an attendant=… who can be asked")
    return {**options, "rules": rule_texts(options.get("rules", ()))}


@dataclass(frozen=True, slots=True)
class Opening:
    """
    :param context_of: that of another agent, with what the process brought that opens it
    :param options: the session's own; a sub-agent's session uses its parent's attendant, if they are passed on
    :param under: the parent and its call, for a sub-agent's session
    """

    context: Context
    context_of: Callable[[str], Context]
    face: str
    options: SessionOptions
    under: Under | None = None

    @property
    def people(self) -> Attendant | None:
        """The person who can be asked."""
        return self.options.get("attendant") if self.under is None else attendant_for(self.under)

    def row(self, session_id: str, now_ns: int) -> SessionRow:
        """The row by which it is stored."""
        row = SessionRow(
            session_id,
            now_ns,
            agent=self.context.agent,
            topic=self.options.get("topic"),
            face=self.face,
            headless=self.people is None,
        )
        if self.under is None:
            return row
        told = self.under.delegation
        details: dict[str, Any] = {"description": told.description} if told.description else {}
        if told.metadata is not None:
            details["metadata"] = dict(told.metadata)
        return replace(row, details=details, under=self.under.parent.id, under_call=self.under.call.id)
