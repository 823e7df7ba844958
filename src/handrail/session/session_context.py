"""The context of a session's calls: its agent, tools and rules, the limits of child sessions, and session opening.

One arbiter, one lock table and one log serve any number of contexts. The contexts of one agent share their generations of
tools, except if a process registered client tools: these belong to its sessions alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from handrail.catalog.view import CatalogOptions, get_view
from handrail.config.operator_settings import CatalogSettings
from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.approval_requests import ApprovalAnswer, ApprovalHandler, ApprovalRequest
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.permission_modes import Mode
from handrail.contract.rule_forms import RuleLike, RuleWithExamples, normalise_rules
from handrail.contract.services.client_services import ClientHandler
from handrail.contract.services.tool_runtime import UserContext, UserQuestion
from handrail.contract.session_protocols import ClientInfo
from handrail.contract.struct import Struct
from handrail.contract.tool.operator_tool_settings import ToolConfig, ToolSettings
from handrail.contract.tool.requires import CapabilityLayer
from handrail.contract.tool.resource_provider import ResourceProvider
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import Generation, GenerationDiff, ToolSource
from handrail.policy.call_authorizer import CallAuthorizer
from handrail.policy.rules.rules_and_modes import RuleBook
from handrail.policy.watchdogs.api import Watchdog
from handrail.registry.generation_lifecycle import GenerationLifecycle, GenerationRecorder
from handrail.registry.sources.tool_sources import AgentToolSources
from handrail.runtime.files.session_roots import NO_FURTHER_ROOTS, FurtherRoots
from handrail.runtime.secret_store import NO_SECRETS, SecretStore
from handrail.session.local_session import ParentRef
from handrail.store.tables.session_tables import SessionRow

if TYPE_CHECKING:
    from handrail.session.local_session import LocalSession


@dataclass(frozen=True, slots=True)
class ClientProcessRegistrations:
    """The settings, tools, rules and secrets that a process registers for the sessions that it opens.

    Sessions of other processes see none of them. The secrets are redacted everywhere.
    """

    frontend: str = "library"
    agent: str | None = None
    """The agent's id; None for the configured one."""
    tools: tuple[Tool, ...] = ()
    rules: tuple[str | RuleWithExamples, ...] = ()
    secrets: Mapping[str, str] | None = field(default=None, repr=False)
    watchdogs: tuple[Watchdog, ...] = ()
    offerings: tuple[ResourceProvider, ...] = ()
    settings: tuple[str, ...] = ()
    mode: Mode | None = None
    """None for the mode of the agent or of the configuration."""
    tool_config: ToolConfig = field(default_factory=dict[str, Mapping[str, str]])
    agents: tuple[AgentManifest, ...] = ()
    """Agents that the process passes in code. They replace those of the configuration with the same id."""
    builtins: bool = True
    """Whether its sessions have the built-in tools."""

    tool_settings: Mapping[str, ToolSettings] = field(default_factory=dict[str, ToolSettings])
    """Settings of tools from command-line flags."""
    catalog: CatalogSettings | None = None
    """Catalog settings from command-line flags; None for those of the process that holds the workspace."""
    configured_mode: Mode | None = None
    """The mode in the process's configuration files; None for that of the process that holds the workspace."""


class AgentGenerations:
    """The generations of tools of one agent, made from the same sources."""

    def __init__(
        self,
        sources: AgentToolSources,
        succession: GenerationLifecycle,
        layer: Callable[[Iterable[Generation]], CapabilityLayer],
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
        self._chronicle = GenerationRecorder()
        self.is_on_record = False
        """Whether a session has used these generations, so that they are recorded."""
        self.authorities: list[CallAuthorizer] = []
        """The authorities that use the capabilities of the agent's tools."""
        self._reload_lock = asyncio.Lock()
        self._changed: list[ToolSource] = []
        self._next: asyncio.Task[GenerationDiff] | None = None
        """The task that waits to look through the changed sources."""
        self.catalog_options: set[CatalogOptions] = set()
        """The catalog options of the contexts that use these generations."""
        self.watchers: list[Callable[[Generation], None]] = []
        """Called with each new generation."""

    def start_recording_generations(self) -> None:
        """Record the generations from now on, because a session uses them."""
        if not self.is_on_record:
            self.is_on_record = True
            self._publish(self._chronicle.build_generation_record_body(self.succession.current))

    async def reload_all_sources(self, given: Iterable[Tool] | None = None) -> GenerationDiff:
        """Load all sources again, in a thread, and publish the result as the next generation.

        Calls continue meanwhile.

        :param given: replaces the tools that the program registered; None keeps them
        :raises LoadError: with every fault; the current generation stays
        :raises UsageError: if the kernel was closed meanwhile
        """
        tools = None if given is None else tuple(given)
        async with self._reload_lock:  # one at a time, so that the numbers increase
            sources = self.sources if tools is None else replace(self.sources, tools=tools)
            return await self._load(sources)

    async def reload_changed_sources(self, changed: Iterable[ToolSource]) -> GenerationDiff:
        """Load single sources again, which are not the operator's own; all others keep their last result.

        Changes during a refresh are collected and loaded together afterwards.

        :return: the difference of all tools, including those that other callers asked for
        """
        self._changed.extend(source for source in changed if not any(source is one for one in self._changed))
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._refresh())
        return await asyncio.shield(self._next)

    async def _refresh(self) -> GenerationDiff:
        async with self._reload_lock:
            self._next, changed, self._changed = None, self._changed, []
            return await self._load(self.sources, changed)

    async def _load(self, sources: AgentToolSources, only: Collection[ToolSource] | None = None) -> GenerationDiff:
        number, living = self._numbers(), self.succession.generations_in_use
        generation, layer = await asyncio.to_thread(self._load_in_thread, sources, only, number, living)
        return self._publish_generation(sources, generation, layer)

    def _load_in_thread(
        self, sources: AgentToolSources, only: Collection[ToolSource] | None, number: int, living: Iterable[Generation]
    ) -> tuple[Generation, CapabilityLayer]:
        generation = sources.load_generation_of_agent(number, only)
        for options in tuple(self.catalog_options):
            get_view(generation, options)  # here, so that the first turn does not block the event loop
        return generation, self._layer((generation, *living))

    def _publish_generation(
        self, sources: AgentToolSources, generation: Generation, layer: CapabilityLayer
    ) -> GenerationDiff:
        if self.succession.closed:
            raise UsageError("The kernel was closed while its tools were loaded. Open a new kernel.")
        difference = self.succession.publish(generation)
        self.sources = sources
        for authority in self.authorities:
            authority.replace_capability_layer(layer)
        if self.is_on_record:
            self._publish(self._chronicle.build_generation_record_body(generation, difference))
        for watcher in tuple(self.watchers):
            watcher(generation)
        return difference


class AgentContext:
    """One agent in the sessions of one process.

    :ivar further_roots: the agent's additional root folders
    :ivar rules: the rules with which every session starts
    :ivar secrets: the secrets that its tools may use
    :ivar catalog: the catalog options of its sessions
    :ivar shared: whether other contexts use the same generations, so that closing this context leaves them open
    :ivar given_agents: the agents that the process passed in code
    """

    def __init__(
        self,
        manifest: AgentManifest,
        generations: AgentGenerations,
        authority: CallAuthorizer,
        rules: RuleBook,
        further_roots: FurtherRoots = NO_FURTHER_ROOTS,
        *,
        shared: bool,
        secrets: SecretStore = NO_SECRETS,
        catalog: CatalogOptions | None = None,
        given_agents: tuple[AgentManifest, ...] = (),
    ) -> None:
        self.manifest = manifest
        self.given_agents = given_agents
        self.catalog = catalog or CatalogOptions(core=manifest.core_tools)
        self.further_roots = further_roots
        self.generations = generations
        self.authority = authority
        self.rules = rules
        self.shared = shared
        self.secrets = secrets
        generations.authorities.append(authority)
        generations.catalog_options.add(self.catalog)
        self.watchers: list[Callable[[Generation], None]] = []
        """Called with each new generation that its sessions use."""
        generations.watchers.append(self._notify_watchers)

    @property
    def agent(self) -> str:
        """The agent's id."""
        return self.manifest.id

    @property
    def generation(self) -> Generation:
        """The current tools. A turn keeps the tools with which it started."""
        return self.generations.succession.current

    def replace_generations(self, own: AgentContext) -> None:
        """Replace the generations by those of ``own``, also in open sessions. No other context uses them."""
        before = self.generations
        before.authorities.remove(self.authority)
        before.watchers.remove(self._notify_watchers)
        own.generations.authorities[:] = [self.authority]
        own.generations.catalog_options.add(self.catalog)
        own.generations.watchers[:] = [self._notify_watchers]
        self.authority.replace_capability_layer(own.authority.agent_layer)
        self.generations, self.shared = own.generations, own.shared
        if before.is_on_record:
            own.generations.start_recording_generations()
        self._notify_watchers(self.generation)

    def _notify_watchers(self, generation: Generation) -> None:
        for watcher in tuple(self.watchers):
            watcher(generation)

    async def aclose(self) -> None:
        """Release the generations. No sessions may be opened with the context afterwards."""
        self.generations.authorities.remove(self.authority)
        self.generations.watchers.remove(self._notify_watchers)
        if not self.shared:
            await self.generations.succession.aclose()


# Parent and child sessions: the limits that a parent sets for its sub-agents, and the answers of the parent's user.

T = TypeVar("T")

USER_UNAVAILABLE = "No user is available now, and a sub-agent's call cannot wait for one. Continue without it and say what you left out."


def select_delegated_secrets(child: SecretStore, parent_ref: ParentRef) -> SecretStore:
    """Return the secrets of a child session: those that its parent has and delegates."""
    parent = parent_ref.parent
    names = parent.lane.environment.secrets.names & set(parent.tree_node.manifest.delegation.secrets)
    return child.restrict_to(names, f"the agent {parent.tree_node.manifest.id} does not delegate it to its sub-agents")


def get_delegated_approval_handler(parent_ref: ParentRef) -> ApprovalHandler | None:
    """Return the approval handler of a child session, or None if its parent does not delegate it."""
    if (
        parent_ref.parent.lane.approval_handler is None
        or not parent_ref.parent.tree_node.manifest.delegation.can_ask_user
    ):
        return None
    return _RootApprovalHandler(parent_ref)


def find_host_limiting_parent(parent_ref: ParentRef) -> str | None:
    """Return the id of the nearest parent agent that delegates hosts by name only, or None."""
    parent = parent_ref.parent.tree_node.manifest
    hosts = parent.delegation.net.hosts
    return parent_ref.parent.lane.named_hosts_of if hosts is None or "*" in hosts else parent.id


def describe_requesting_subagent(agent: str, parent_ref: ParentRef) -> str:
    """Describe the sub-agent that asks, for the user of the session at the top."""
    is_top = parent_ref.parent.tree_node.parent_ref is None
    of = f"session {parent_ref.parent.id}" if is_top else parent_ref.parent.lane.origin
    about = (
        f" ({' '.join(parent_ref.delegation.description.split())[:80]})"
        if parent_ref.delegation.description.strip()
        else ""
    )
    return f"sub-agent {agent}{about} of {of}"


class _RootApprovalHandler(Struct, frozen=True):
    """An approval handler of a sub-agent that asks the user of the session at the top of the tree.

    The sub-agent's calls are not suspended, because they could not be resumed. A call in the background waits while the
    top session is suspended or its user defers the answer. Other approval frontends can answer meanwhile, and the user is
    asked again when the top session is opened again.
    """

    parent_ref: ParentRef

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        async def asked(people: ApprovalHandler) -> ApprovalAnswer | None:
            answer = await people.approve(request)
            return None if answer.choice == "defer" else answer

        return await self._ask_root(asked) or ApprovalAnswer("reject", USER_UNAVAILABLE)

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        answers = await self._ask_root(lambda people: people.answer_questions(session_id, questions))
        if answers is None:
            raise ToolError(USER_UNAVAILABLE, kind="unavailable")
        return answers

    async def _ask_root(self, ask: Callable[[ApprovalHandler], Awaitable[T | None]]) -> T | None:
        """Return the user's answer, or None if no user is available and the call does not wait."""
        waits = False
        while True:
            top = self.parent_ref.root_session
            people = None if top.is_closed else top.approval_handler
            if people is not None and (answer := await _answer_unless_ended(ask(people), top)) is not None:
                return answer
            alone = people is None and not top.is_closed and not waits  # the session was headless when the call asked
            if alone or not self.parent_ref.is_for_background_job:
                return None
            waits = True
            await top.tree_node.resumed.wait()


async def _answer_unless_ended(asking: Awaitable[T | None], session: LocalSession) -> T | None:
    """Return the answer, or None if the session whose user is asked ends first."""
    asked = asyncio.ensure_future(asking)
    left = asyncio.ensure_future(session.tree_node.ended.wait())
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
    approval_handler: ApprovalHandler | None
    client: ClientHandler | None
    client_info: ClientInfo | None
    rules: Iterable[RuleLike]
    mode: str | None
    topic: str | None
    user_context: UserContext | None


def normalise_session_options(options: SessionOptions) -> SessionOptions:
    """Return the options with their rules as texts.

    :raises TypeError: if an option does not exist
    :raises UsageError: if a session that is not headless has no approval handler, or a rule has no valid form
    """
    if unknown := sorted(options.keys() - SessionOptions.__annotations__.keys()):
        raise TypeError(f"session() got an unexpected keyword argument {unknown[0]!r}")
    if options.get("approval_handler") is None and not options.get("headless", True):
        raise UsageError(
            "The session is not headless and has no approval handler. Pass `approval_handler` or `headless=True`."
        )
    return {**options, "rules": normalise_rules(options.get("rules", ()))}


_MAX_CLIENT_CHARACTERS = 80


def truncate_client_info(info: ClientInfo) -> dict[str, str]:
    """Return what a client says about itself, cut to a bounded length, for the session's record."""
    given = {"name": info.name[:_MAX_CLIENT_CHARACTERS], "version": info.version[:_MAX_CLIENT_CHARACTERS]}
    return {key: value for key, value in given.items() if value}


class SessionOpenParameters(Struct, frozen=True):
    """The parameters of one session that is about to be opened.

    :param context_of: returns the context of another agent, with the registrations of the process that opens it
    :param options: the session's options; a sub-agent's session uses its parent's approval handler, if that is delegated
    :param parent_ref: the parent and its call, for a sub-agent's session
    """

    context: AgentContext
    context_of: Callable[[str], AgentContext]
    frontend: str
    options: SessionOptions
    parent_ref: ParentRef | None = None

    @property
    def approval_handler(self) -> ApprovalHandler | None:
        return (
            self.options.get("approval_handler")
            if self.parent_ref is None
            else get_delegated_approval_handler(self.parent_ref)
        )

    def to_row(self, session_id: str, now_ns: int) -> SessionRow:
        row = SessionRow(
            session_id,
            now_ns,
            agent=self.context.agent,
            topic=self.options.get("topic"),
            frontend=self.frontend,
            headless=self.approval_handler is None,
        )
        if self.parent_ref is None:
            info = self.options.get("client_info")
            return row if info is None else replace(row, details={"client": truncate_client_info(info)})
        delegation = self.parent_ref.delegation
        details: dict[str, Any] = {"description": delegation.description} if delegation.description else {}
        if delegation.metadata is not None:
            details["metadata"] = dict(delegation.metadata)
        return replace(
            row, details=details, parent_session=self.parent_ref.parent.id, parent_call=self.parent_ref.call.id
        )
