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
    """The settings, tools, rules and secrets that a process registers for the sessions that it opens.

    Sessions of other processes see none of them. The secrets are redacted everywhere.
    """

    face: str = "library"
    agent: str | None = None
    """The agent's id; None for the configured one."""
    tools: tuple[Tool, ...] = ()
    rules: tuple[str | RuleEntry, ...] = ()
    secrets: Mapping[str, str] | None = field(default=None, repr=False)
    watchdogs: tuple[Watchdog, ...] = ()
    offerings: tuple[Offering, ...] = ()
    settings: tuple[str, ...] = ()
    mode: Mode | None = None
    """None for the mode of the agent or of the configuration."""
    tool_config: ToolConfig = field(default_factory=dict[str, Mapping[str, str]])

    tool_settings: Mapping[str, ToolSettings] = field(default_factory=dict[str, ToolSettings])
    """Settings of tools from command-line flags."""
    catalog: CatalogSettings | None = None
    """Catalog settings from command-line flags; None for those of the process that holds the workspace."""
    configured_mode: Mode | None = None
    """The mode in the process's configuration files; None for that of the process that holds the workspace."""


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
        """Create the generations of an agent.

        :param sources: the sources of the current generation
        :param layer: returns the agent's capabilities, given the tools of these generations
        :param numbers: returns the number of the next generation of any agent
        :param publish: records a change of the tools
        """
        self.sources = sources
        self.succession = succession
        self._layer = layer
        self._numbers = numbers
        self._publish = publish
        self._chronicle = Chronicle()
        self.is_on_record = False
        """Whether a session has used these generations, so that they are recorded."""
        self.authorities: list[Authority] = []
        """The authorities that use the capabilities of the agent's tools."""
        self._reloading = asyncio.Lock()
        self._changed: list[Source] = []
        self._next: asyncio.Task[Difference] | None = None
        """The task that waits to look through the changed sources."""
        self.options: set[CatalogOptions] = set()
        """The catalog options of the contexts that use these generations."""
        self.watchers: list[Callable[[Generation], None]] = []
        """Called with each new generation."""

    def begin(self) -> None:
        """Record the generations from now on, because a session uses them."""
        if not self.is_on_record:
            self.is_on_record = True
            self._publish(self._chronicle.told(self.succession.current))

    async def reload(self, given: Iterable[Tool] | None = None) -> Difference:
        """Load all sources again, in a thread, and publish the result as the next generation.

        Calls continue meanwhile.

        :param given: replaces the tools that the program registered; None keeps them
        :raises LoadError: with every fault; the current generation stays
        :raises UsageError: if the kernel was closed meanwhile
        """
        tools = None if given is None else tuple(given)
        async with self._reloading:  # one at a time, so that the numbers increase
            sources = self.sources if tools is None else replace(self.sources, given=tools)
            return await self._load(sources)

    async def refresh(self, changed: Iterable[Source]) -> Difference:
        """Load single sources again, which are not the operator's own; all others keep their last result.

        Changes during a refresh are collected and loaded together afterwards.

        :return: the difference of all tools, including those that other callers asked for
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
            view_of(
                generation, options
            )  # computed in this thread, so that the first turn does not block the event loop
        return generation, self._layer((generation, *living))

    def _follow(self, sources: ToolSources, generation: Generation, layer: Layer) -> Difference:
        if self.succession.closed:
            raise UsageError("The kernel was closed while its tools were loaded. Open a new kernel.")
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
    """One agent in the sessions of one process.

    :ivar further: the agent's additional root folders
    :ivar rules: the rules with which every session starts
    :ivar secrets: the secrets that its tools may use
    :ivar catalog: the catalog options of its sessions
    :ivar shared: whether other contexts use the same generations, so that closing this context leaves them open
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
        """Called with each new generation that its sessions use."""
        shelf.watchers.append(self._published)

    @property
    def agent(self) -> str:
        """The agent's id."""
        return self.manifest.id

    @property
    def generation(self) -> Generation:
        """The current tools. A turn keeps the tools with which it started."""
        return self.shelf.succession.current

    def part(self, own: Context) -> None:
        """Replace the generations by those of ``own``, also in open sessions. No other context uses them."""
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
        """Release the generations. No sessions may be opened with the context afterwards."""
        self.shelf.authorities.remove(self.authority)
        self.shelf.watchers.remove(self._published)
        if not self.shared:
            await self.shelf.succession.aclose()


# Parent and child sessions: the limits that a parent sets for its sub-agents, and the answers of the parent's user.

T = TypeVar("T")

NOT_NOW = "No user is available now, and a sub-agent's call cannot wait for one. Continue without it and say what you left out."


def secrets_for(child: SecretStore, under: Under) -> SecretStore:
    """Return the secrets of a child session: those that its parent has and delegates."""
    parent = under.parent
    names = parent.lane.around.secrets.names & set(parent.family.manifest.delegable.secrets)
    return child.only(names, f"the agent {parent.family.manifest.id} does not delegate it to its sub-agents")


def attendant_for(under: Under) -> Attendant | None:
    """Return the approval handler of a child session, or None if its parent does not delegate it."""
    if under.parent.lane.attendant is None or not under.parent.family.manifest.delegable.presence:
        return None
    return _AskedFromBelow(under)


def named_hosts_of(under: Under) -> str | None:
    """Return the id of the nearest parent agent that delegates hosts by name only, or None."""
    parent = under.parent.family.manifest
    hosts = parent.delegable.net.hosts
    return under.parent.lane.named_hosts_of if hosts is None or "*" in hosts else parent.id


def origin_of(agent: str, under: Under) -> str:
    """Describe the sub-agent that asks, for the user of the session at the top."""
    is_top = under.parent.family.under is None
    of = f"session {under.parent.id}" if is_top else under.parent.lane.origin
    about = f" ({' '.join(under.delegation.description.split())[:80]})" if under.delegation.description.strip() else ""
    return f"sub-agent {agent}{about} of {of}"


@dataclass(frozen=True, slots=True)
class _AskedFromBelow:
    """An approval handler of a sub-agent that asks the user of the session at the top of the tree.

    The sub-agent's calls are not suspended, because they could not be resumed. A call in the background waits while the
    top session is suspended or its user defers the answer. Other approval frontends can answer meanwhile, and the user is
    asked again when the top session is opened again.
    """

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
        """Return the user's answer, or None if no user is available and the call does not wait."""
        waits = False
        while True:
            top = self.under.top
            people = None if top.closed else top.people
            if people is not None and (answer := await _unless_left(ask(people), top)) is not None:
                return answer
            alone = people is None and not top.closed and not waits  # the session was headless when the call asked
            if alone or not self.under.in_background:
                return None
            waits = True
            await top.family.taken_up.wait()


async def _unless_left(asking: Awaitable[T | None], session: HeldSession) -> T | None:
    """Return the answer, or None if the session whose user is asked ends first."""
    asked = asyncio.ensure_future(asking)
    left = asyncio.ensure_future(session.family.left.wait())
    try:
        await asyncio.wait((asked, left), return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if not left.done() else None
    finally:
        left.cancel()
        if not asked.cancel() and not asked.cancelled():
            asked.exception()  # retrieved, so that asyncio does not report it


# The opening of a session, for every caller.


class SessionOptions(TypedDict, total=False):
    """The options of a session that a program opens. :meth:`Kernel.session` describes each."""

    agent: str | None
    headless: bool
    attendant: Attendant | None
    peer: Peer | None
    rules: Iterable[AnyRule]
    mode: str | None
    topic: str | None
    client: ClientContext | None


def checked(options: SessionOptions) -> SessionOptions:
    """Return the options with their rules as texts.

    :raises TypeError: if an option does not exist
    :raises UsageError: if a session that is not headless has no approval handler, or a rule has no valid form
    """
    if unknown := sorted(options.keys() - SessionOptions.__annotations__.keys()):
        raise TypeError(f"session() got an unexpected keyword argument {unknown[0]!r}")
    if options.get("attendant") is None and not options.get("headless", True):
        raise UsageError(
            "The session is not headless and has no approval handler. Pass `attendant` or `headless=True`."
        )
    return {**options, "rules": rule_texts(options.get("rules", ()))}


@dataclass(frozen=True, slots=True)
class Opening:
    """The parameters of one session that is about to be opened.

    :param context_of: returns the context of another agent, with the registrations of the process that opens it
    :param options: the session's options; a sub-agent's session uses its parent's approval handler, if that is delegated
    :param under: the parent and its call, for a sub-agent's session
    """

    context: Context
    context_of: Callable[[str], Context]
    face: str
    options: SessionOptions
    under: Under | None = None

    @property
    def people(self) -> Attendant | None:
        """The approval handler of the session."""
        return self.options.get("attendant") if self.under is None else attendant_for(self.under)

    def row(self, session_id: str, now_ns: int) -> SessionRow:
        """Return the row by which the session is stored."""
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
