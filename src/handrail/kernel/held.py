"""The kernel in the process that holds the workspace: it carries out its own calls and those of joined processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets as randomness
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, cast

from handrail import config as configuration
from handrail.arbiter.approvals.desk import Approvals, OpenSessions
from handrail.arbiter.jobs.views import JobView, WorkspaceView
from handrail.arbiter.offers import judged_as
from handrail.arbiter.output.redaction import redacted_logs
from handrail.catalog.interaction import Interaction
from handrail.config import Configuration
from handrail.config.layers import Value
from handrail.config.settings import path_of
from handrail.contract.agent import AgentManifest
from handrail.contract.approvals import ApprovalDesk
from handrail.contract.doors.jobs import Findings, Job, Jobs, WorkspaceJobs
from handrail.contract.errors import HandrailError, LogUnavailable, ToolError, UsageError
from handrail.contract.generation import Difference, Generation, ToolStatus
from handrail.contract.rules import AnyRule, rule_texts
from handrail.contract.sandbox import Tier
from handrail.contract.schema.schema import UnfinishedCheck
from handrail.contract.tool.tool import Tool
from handrail.ipc.codec.interfaces import WIRE, WORKSPACE_JOBS, Request, request, served
from handrail.ipc.holder.guest import Guest
from handrail.ipc.holder.server import Server
from handrail.ipc.joiner.session import APPROVALS
from handrail.ipc.wire.meeting import PROTOCOL
from handrail.kernel.agents import all_agents
from handrail.kernel.assembly import Rooms, assemble, given_rules, parse_rules
from handrail.kernel.kernel import Folder, Kernel
from handrail.kernel.sessions import HeldSessions
from handrail.origins import programs
from handrail.policy.authority import Authority
from handrail.policy.rules.rules import RuleBook
from handrail.record.log import CommitLog, Interrupted
from handrail.runtime.files.roots import Roots
from handrail.session.arrivals.triggers import Arrivals
from handrail.session.context import Brought, Context, Opening, SessionOptions, checked
from handrail.session.session import ENDED, HeldSession, Under, new_session_id
from handrail.session.taking_up import project_rules
from handrail.store.folders import locate
from handrail.store.lease import Holder, WorkspaceHeld, holder_of
from handrail.store.opening import Store

if TYPE_CHECKING:
    from handrail.kernel.servers import HeldServers, McpServers
    from handrail.policy.explain import Explanation


logger = logging.getLogger("handrail.ipc")


Hold = Callable[[Brought], AbstractAsyncContextManager[Kernel]]
"""Holds the workspace in this process; see :func:`hold`."""

Join = Callable[[WorkspaceHeld, Brought], AbstractAsyncContextManager[Kernel]]
"""Joins the process that holds a workspace; see :func:`handrail.kernel.joined.join`."""


class HeldKernel(Kernel):
    """Carries the calls out. Its own sessions work in one context, those of processes that joined in theirs."""

    def __init__(
        self,
        rooms: Rooms,
        own: Context,
        face: str,
        brought: Brought,
        joining: Callable[[tuple[Tool, ...]], AbstractAsyncContextManager[Kernel]],
    ) -> None:
        """:param joining: joins whoever has taken the workspace over from this process, with the tools that it brings now"""
        self.rooms = rooms
        self.own = own
        self._brought = brought
        self._face = face
        self._others: dict[str, Context] = {}
        """Of further agents that sessions of this process name."""
        self._appointing = asyncio.Lock()
        """Held while a thread makes one of these."""
        self._joining = joining
        self._next = AsyncExitStack()
        self.successor: Kernel | None = None
        """What this kernel goes on as, once another process has taken the workspace over and this one has joined it."""
        self._leaving: asyncio.Task[None] | None = None
        self.sessions = HeldSessions(rooms, self._context, face)
        self._servers: HeldServers | None = None
        self.server = Server(self)
        opened = OpenSessions(self.sessions.lane, self.sessions.lanes, self._judged_by)
        self.rooms.arbiter.approvals.attach(opened)

    @property
    def workdir(self) -> str:
        return str(self.rooms.store.folders.workspace)

    @property
    def state_folder(self) -> str:
        return str(self.rooms.store.folders.own)

    @property
    def config(self) -> Configuration:
        return self.rooms.config

    @property
    def tier(self) -> Tier:
        return self.rooms.sandbox.tier

    @property
    def agent(self) -> AgentManifest:
        return self.own.manifest

    @property
    def generation(self) -> Generation:
        return self.own.generation

    @property
    def rules(self) -> RuleBook:
        return self.own.rules

    @property
    def approvals(self) -> Approvals:
        """Those of this process. Once another has taken the workspace over, that one's, as far as :class:`ApprovalDesk` goes."""
        if self.successor is not None:
            return cast("Approvals", self.successor.approvals)
        return self.rooms.arbiter.approvals

    @property
    def jobs(self) -> WorkspaceJobs:
        if self.successor is not None:
            return self.successor.jobs
        return self._view_of_jobs

    @property
    def _view_of_jobs(self) -> WorkspaceView:
        return WorkspaceView(self.rooms.arbiter.jobs, self.sessions.lanes, self.rooms.arbiter.shaper)

    @property
    def arrivals(self) -> Arrivals:
        """What comes for sessions while no turn of theirs is under way."""
        return self.sessions.arrivals

    @property
    def log(self) -> CommitLog:
        return self.rooms.log

    @property
    def interrupted(self) -> Sequence[Interrupted]:
        return self.rooms.interrupted

    @property
    def mcp(self) -> McpServers:
        from handrail.kernel.servers import HeldServers

        if self.successor is not None:
            return self.successor.mcp
        if self._servers is None:
            self._servers = HeldServers(lambda: self.generation, self.rooms, self.own.secrets)
        return self._servers

    async def reload(self, tools: Iterable[Tool] | None = None) -> Difference:
        if self.successor is not None:
            return await self.successor.reload(tools)
        given = None if tools is None else tuple(tools)
        for context in tuple(self._others.values()):
            await context.shelf.reload(given)
        difference = await self.own.shelf.reload(given)
        if given is not None:
            self._brought = replace(self._brought, tools=given)
        return difference

    async def explain(
        self, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[AnyRule] = (), headless: bool = True
    ) -> Explanation:
        if self.successor is not None:
            return await self.successor.explain(tool, arguments, rules=rules, headless=headless)
        return await self.explain_in(self.own, tool, arguments, rules=rules, headless=headless)

    async def explain_in(
        self, context: Context, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[AnyRule], headless: bool
    ) -> Explanation:
        """As :meth:`Kernel.explain`, for the sessions of ``context``."""
        from handrail.policy.explain import explain

        generation = context.generation
        entry = generation.resolve(tool)
        if entry is None:
            nearest = " or ".join(generation.nearest(tool))
            hint = generation.awaited(tool) or (f"did you mean {nearest}?" if nearest else "")
            raise ToolError(f"there is no tool {tool[:80]!r}" + (f"; {hint}" if hint else ""), kind="unknown_tool")
        if entry.withheld is not None:
            raise ToolError(f"{entry.id} is withheld: {entry.withheld}", kind="unavailable")
        try:
            entry.admitted(dict(arguments))
        except UnfinishedCheck as unfinished:
            await self.rooms.arbiter.checks.admitted(entry, unfinished, shared=False)
        further = parse_rules(given_rules(rule_texts(rules), "session"), generation)
        spec, origin, _ = judged_as(entry, arguments, generation)
        return await explain(
            context.authority,
            spec,
            arguments,
            rules=context.rules.with_rules(*project_rules(self.rooms.arbiter.approvals), *further),
            roots=Roots(self.workdir, (), context.further),
            headless=headless,
            origin=origin,
            behind=entry.behind,
        )

    async def find(
        self, query: str, *, limit: int = 10, patience_s: float | None = None, by_words: bool = False
    ) -> Findings:
        if self.successor is not None:
            return await self.successor.find(query, limit=limit, patience_s=patience_s, by_words=by_words)
        return await self.find_in(self.own, query, limit=limit, patience_s=patience_s, by_words=by_words)

    async def find_in(self, context: Context, query: str, **how: Any) -> Findings:
        """As :meth:`Kernel.find`, among the tools of ``context``."""
        return await Interaction("", context.catalog, finder=self.rooms.finder).find(context.generation, query, **how)

    async def tool_statuses(self) -> Sequence[ToolStatus]:
        if self.successor is not None:
            return await self.successor.tool_statuses()
        return self.statuses_in(self.own)

    def statuses_in(self, context: Context) -> Sequence[ToolStatus]:
        """As :meth:`Kernel.tool_statuses`, of the tools of ``context``."""
        found = {source.name: source.unreachable() for source in self.rooms.upstreams.sources}
        return context.generation.statuses({name: reason for name, reason in found.items() if reason})

    async def session(self, id: str | None = None, **options: Unpack[SessionOptions]) -> HeldSession:
        """See :meth:`Kernel.session`. Once another process has taken the workspace over, the session is one of that process,
        as far as :class:`~handrail.contract.session.Session` goes."""
        if self.successor is not None:
            return cast("HeldSession", await self.successor.session(id, **options))
        options = checked(options)
        agent = options.get("agent")
        if agent is not None and agent != self.own.agent and agent not in self._others:
            async with self._appointing:
                await asyncio.to_thread(self._context, agent)
        opening = Opening(self._context(agent), self._context, self._face, options)
        return await self.sessions.open(opening, id)

    def _context(self, agent: str | None) -> Context:
        """The context of ``agent`` with what this process brought, made when the agent is first named."""
        if agent is None or agent == self.own.agent:
            return self.own
        context = self._others.get(agent)
        if context is None:
            context = self._others[agent] = self.rooms.context(agent, self._brought)
        return context

    async def fork(self, id: str) -> str:
        if self.successor is not None:
            return await self.successor.fork(id)
        return await self.sessions.fork(id, new_session_id())

    async def close_session(self, id: str) -> None:
        if self.successor is not None:
            await self.successor.close_session(id)
            return
        await self.sessions.close(id)

    def _judged_by(self) -> tuple[Generation, Authority, RuleBook, Roots]:
        rules = self.own.rules.with_rules(*project_rules(self.rooms.arbiter.approvals))
        return self.own.generation, self.own.authority, rules, Roots(self.workdir, (), self.own.further)

    # ── what processes that joined need of it ────────────────────────────────────────────────────

    def welcome(self) -> dict[str, Any]:
        tier = WIRE.write(Tier, self.tier)
        return {"workspace": self.workdir, "token": self.rooms.store.lease.token, "tier": tier}

    def context_of(self, agent: str, brought: Brought) -> Context:
        return self.rooms.context(agent, brought)

    async def open_session(self, opening: Opening, id: str | None = None) -> HeldSession:
        return await self.sessions.open(opening, id)

    async def open_child(
        self, context_of: Callable[[str], Context], under: Under, face: str, id: str | None = None
    ) -> HeldSession:
        return await self.sessions.open_child(context_of, under, face, id)

    def learn(self, secrets: Mapping[str, str]) -> None:
        self.rooms.arbiter.shaper.redactor.learn(secrets)

    def further_requests(self, guest: Guest) -> Mapping[str, Request]:
        from handrail.kernel.servers import ServersOfGuest

        return {
            **served(ApprovalDesk, APPROVALS, self._approval_desk),
            **served(Jobs, "jobs.", self._jobs_of),
            **served(WorkspaceJobs, WORKSPACE_JOBS, self._every_job),
            **ServersOfGuest(self.rooms, guest).requests,
            "promote": request(self._promote),
            "fork": request(self.sessions.fork),
            "close-session": request(self.sessions.close),
        }

    def _approval_desk(self) -> ApprovalDesk:
        return self.rooms.arbiter.approvals

    def _every_job(self) -> WorkspaceJobs:
        return self._view_of_jobs

    def _jobs_of(self, session: str) -> Jobs:
        return JobView(self.rooms.arbiter.jobs, session)

    async def _promote(self, session: str, call: str) -> Job:
        if (lane := self.sessions.lane(session)) is None:
            raise UsageError(f"session {session[:80]!r} is not open")
        return await self.rooms.arbiter.jobs.promote(lane, call)

    def replaced(self) -> None:
        """Another process has taken over: what runs here is stopped, those who joined find the other, and so does this one."""
        self.server.leaving = True
        for session in tuple(self.sessions.by_id.values()):
            session.cancel("shutdown")
        self.rooms.arbiter.jobs.stop_all("shutdown")
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        """Join who has taken over, and go on there with every session of this process."""
        others = {session.id for guest in self.server.guests for session in guest.sessions}
        own = [one for one in self.sessions.by_id.values() if one.family.under is None and one.id not in others]
        await self.server.aclose()
        try:
            kernel = await self._next.enter_async_context(self._joining(self._brought.tools))
        except HandrailError as error:
            logger.warning("this process was replaced, and cannot join the one that holds the workspace now: %s", error)
            return
        if self._servers is not None:
            await self._servers.follow(kernel.mcp)
        for session in own:
            around, agent = session.lane.around, session.family.manifest.id
            how: SessionOptions = {"attendant": session.people, "headless": session.people is None}
            how |= {"peer": around.peer, "client": around.client, "agent": None if agent == self.own.agent else agent}
            try:
                await session.follow(partial(kernel.session, session.id, **how))
            except HandrailError as error:
                logger.warning("session %s does not go on with the next holder: %s", session.id, error)
        self.successor = kernel

    async def _leave_next(self) -> None:
        if self._leaving is not None and not self._leaving.done():
            self._leaving.cancel()
            await asyncio.wait((self._leaving,))
        await self._next.aclose()

    async def shut_down(self) -> None:
        """Stop what runs, wait for its answers, write what is left. Sessions are suspended, not closed.

        Every step is taken, whatever goes wrong in those before it or cancels them: what was left out would outlive
        this kernel.
        """
        async with AsyncExitStack() as steps:  # taken from the last to the first
            steps.callback(self.rooms.arbiter.shaper.close)
            steps.push_async_callback(self._write_what_is_left)
            steps.push_async_callback(self.rooms.aclose)
            for context in (self.own, *reversed(self._others.values())):
                steps.push_async_callback(context.aclose)
            steps.push_async_callback(self.rooms.arbiter.runs.settled)
            steps.push_async_callback(self.server.aclose)  # before that, which tools of others could make long
            steps.callback(self.rooms.arbiter.approvals.close)
            steps.push_async_callback(self._suspend_all)
            steps.push_async_callback(self.rooms.arbiter.jobs.end, "shutdown")
            steps.push_async_callback(self._end_all)
            steps.push_async_callback(self._end_own)
            steps.push_async_callback(self.sessions.arrivals.aclose)
            steps.push_async_callback(self._leave_next)

    async def _end_own(self) -> None:
        """The sessions of this process. Those of others may come to their end meanwhile."""
        others = {session.id for guest in self.server.guests for session in guest.sessions}
        own = [session for session in self.sessions.by_id.values() if session.id not in others]
        await asyncio.gather(*(session.end("shutdown", ENDED) for session in own), self.server.drain())

    async def _end_all(self) -> None:
        await asyncio.gather(*(session.end("shutdown", ENDED) for session in tuple(self.sessions.by_id.values())))

    async def _suspend_all(self) -> None:
        with contextlib.suppress(LogUnavailable):  # the end of this process suspends them, too
            await self.sessions.suspend_all()

    async def _write_what_is_left(self) -> None:
        try:
            await self.log.flush()
        except LogUnavailable:
            if self.rooms.store.lease.lost is None:
                raise


def set_for_holding(settings: Configuration) -> list[str]:
    """The keys that this process was given values for on its own, and that only count in the process that holds the workspace.

    Limits, the ceiling, the sandbox and how state is kept are one for all calls of a workspace. A process that joined could not hold
    its sessions to others, and leaving them out without a word would weaken what its operator asked for.
    """
    flags = [value for value in settings.values if value.origin.kind == "flag" and not is_brought(value)]
    return sorted({value.key for value in flags})


def is_brought(value: Value) -> bool:
    """Whether a process that joins can have this value for its own sessions."""
    table, given = path_of(value.key)[0], value.value
    if table == "tools":
        return not isinstance(given, Mapping)  # the value of a secret is the holder's
    if table == "watchdogs":  # one that ships looks at all calls as the holder has it
        return isinstance(given, Mapping) and "command" in given
    return table in ("rules", "agent", "mode", "catalog")


@asynccontextmanager
async def hold(
    workspace: Folder, state: Folder | None, config: Folder | None, brought: Brought, join: Join, *, allow_home: bool
) -> AsyncGenerator[HeldKernel]:
    """Hold ``workspace`` until the block ends, and let others join; see :func:`~handrail.kernel.opening.open_kernel`.

    :param join: joins whoever takes the workspace over from this process
    :raises WorkspaceHeld: when another process holds it
    """
    folders, given = locate(workspace, state, allow_home=allow_home), brought

    def joining(tools: tuple[Tool, ...]) -> AbstractAsyncContextManager[Kernel]:
        held = WorkspaceHeld(folders, holder_of(folders) or Holder())
        return join(held, replace(given, tools=tools))

    # In threads, as all that takes longer the more there is: the loop may be that of a program that embeds this.
    settings = await asyncio.to_thread(configuration.load, config, folders=folders, flags=brought.settings)
    brought = replace(
        brought,
        rules=(*(rule.entry for rule in settings.process_rules), *brought.rules),
        mode=brought.mode or settings.given_mode,
    )
    # Also of agents that only a later session works as.
    for one in await asyncio.to_thread(lambda: [*all_agents(settings, folders)]):
        programs.add(one.further.writable)
    joinable = sys.platform == "linux"
    # A name of its own for each holder: one that was paused still listens at its.
    socket = f"kernel-{randomness.token_hex(4)}.sock" if joinable else ""
    async with AsyncExitStack() as stack:
        store = Store.open(
            workspace,
            state,
            face=brought.face,
            allow_home=allow_home,
            protocol=PROTOCOL if joinable else 0,
            socket=socket,
            engine=settings.settings.state.store,
        )
        stack.push_async_callback(store.aclose)
        configuration.check_apart(settings, store.folders.workspace)
        rooms = await assemble(store, settings, brought.secrets or {})
        await rooms.arbiter.recover(rooms.interrupted)
        stack.enter_context(redacted_logs(rooms.arbiter.shaper.redactor))
        agent = brought.agent or settings.settings.agent
        own = await asyncio.to_thread(rooms.context, agent, brought)
        kernel = HeldKernel(rooms, own, brought.face, brought, joining)
        stack.push_async_callback(kernel.shut_down)
        loop = asyncio.get_running_loop()

        def replaced() -> None:
            loop.call_soon_threadsafe(kernel.replaced)

        if keys := ", ".join(set_for_holding(settings)):
            why = f"{keys} can only be set where it is held; set it in handrail.toml instead"
            store.lease.remedy = f"it cannot join the process that holds the workspace, since {why}. End that process, and start this one again"
        store.lease.when_lost(replaced)
        if joinable:
            store.folders.clear_sockets(socket)
            await kernel.server.open(store.folders.own, socket)
        yield kernel
