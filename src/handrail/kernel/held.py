"""The kernel in the lease holder: it executes its own calls and those of client processes."""

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
from handrail.contract.text.neutral import visible
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
"""Connects to the process that holds a workspace; see :func:`handrail.kernel.joined.join`."""


class HeldKernel(Kernel):
    """A kernel that executes calls.

    Its own sessions share one context; client processes have their own contexts.
    """

    def __init__(
        self,
        rooms: Rooms,
        own: Context,
        face: str,
        brought: Brought,
        joining: Callable[[tuple[Tool, ...]], AbstractAsyncContextManager[Kernel]],
    ) -> None:
        """Create a kernel from assembled components.

        :param own: the context of the default agent
        :param joining: connects to the process that has taken the workspace over, with the current tools of this process
        """
        self.rooms = rooms
        self.own = own
        self._brought = brought
        self._face = face
        self._others: dict[str, Context] = {}
        """The contexts of further agents that sessions of this process use."""
        self._appointing = asyncio.Lock()
        """Locked while a thread creates one of these contexts."""
        self._joining = joining
        self._next = AsyncExitStack()
        self.successor: Kernel | None = None
        """The kernel that replaces this one after another process has taken the workspace over."""
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
        """The approvals of this process or of its successor.

        A successor has only the methods of :class:`ApprovalDesk`.
        """
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
        """The inbound events of sessions between their turns."""
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
        """Explain a call in the sessions of ``context``; see :meth:`Kernel.explain`."""
        from handrail.policy.explain import explain

        generation = context.generation
        entry = generation.resolve(tool)
        if entry is None:
            nearest = " or ".join(generation.nearest(tool))
            hint = generation.awaited(tool) or (
                f"Did you mean {nearest}?" if nearest else "No tool has a similar name."
            )
            raise ToolError(f"Tool `{visible(tool[:80])}` does not exist. {hint}", kind="unknown_tool")
        if entry.withheld is not None:
            raise ToolError(f"Tool `{entry.id}` is unavailable: {entry.withheld}", kind="unavailable")
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
        """Search the tools of ``context``; see :meth:`Kernel.find`."""
        return await Interaction("", context.catalog, finder=self.rooms.finder).find(context.generation, query, **how)

    async def tool_statuses(self) -> Sequence[ToolStatus]:
        if self.successor is not None:
            return await self.successor.tool_statuses()
        return self.statuses_in(self.own)

    def statuses_in(self, context: Context) -> Sequence[ToolStatus]:
        """Return the statuses of the tools of ``context``; see :meth:`Kernel.tool_statuses`."""
        found = {source.name: source.unreachable() for source in self.rooms.upstreams.sources}
        return context.generation.statuses({name: reason for name, reason in found.items() if reason})

    async def session(self, id: str | None = None, **options: Unpack[SessionOptions]) -> HeldSession:
        """Open a session; see :meth:`Kernel.session`.

        After another process has taken the workspace over, the session belongs to that process, and has only the methods of
        :class:`~handrail.contract.session.Session`.
        """
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
        """Return the context of ``agent`` with the registrations of this process, created at its first use."""
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

    # ── the services for client processes ────────────────────────────────────────────────────────

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
            raise UsageError(f"Session {session[:80]!r} is not open. Open it first.")
        return await self.rooms.arbiter.jobs.promote(lane, call)

    def replaced(self) -> None:
        """Stop all calls because another process has taken over.

        This process and its clients connect to that process.
        """
        self.server.leaving = True
        for session in tuple(self.sessions.by_id.values()):
            session.cancel("shutdown")
        self.rooms.arbiter.jobs.stop_all("shutdown")
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        """Connect to the process that has taken over, and continue all sessions of this process there."""
        others = {session.id for guest in self.server.guests for session in guest.sessions}
        own = [one for one in self.sessions.by_id.values() if one.family.under is None and one.id not in others]
        await self.server.aclose()
        try:
            kernel = await self._next.enter_async_context(self._joining(self._brought.tools))
        except HandrailError as error:
            logger.warning("another process holds the workspace now, and this one cannot connect to it: %s", error)
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
                logger.warning("session %s cannot continue with the next lease holder: %s", session.id, error)
        self.successor = kernel

    async def _leave_next(self) -> None:
        if self._leaving is not None and not self._leaving.done():
            self._leaving.cancel()
            await asyncio.wait((self._leaving,))
        await self._next.aclose()

    async def shut_down(self) -> None:
        """Stop all calls, wait for their answers, and flush the log. Sessions are suspended, not closed.

        Every step runs, even if an earlier one fails or is cancelled: a skipped step would leave things that outlive this
        kernel.
        """
        async with AsyncExitStack() as steps:  # run from the last to the first
            steps.callback(self.rooms.arbiter.shaper.close)
            steps.push_async_callback(self._write_what_is_left)
            steps.push_async_callback(self.rooms.aclose)
            for context in (self.own, *reversed(self._others.values())):
                steps.push_async_callback(context.aclose)
            steps.push_async_callback(self.rooms.arbiter.runs.settled)
            steps.push_async_callback(self.server.aclose)  # before `settled`, which tools of clients could delay
            steps.callback(self.rooms.arbiter.approvals.close)
            steps.push_async_callback(self._suspend_all)
            steps.push_async_callback(self.rooms.arbiter.jobs.end, "shutdown")
            steps.push_async_callback(self._end_all)
            steps.push_async_callback(self._end_own)
            steps.push_async_callback(self.sessions.arrivals.aclose)
            steps.push_async_callback(self._leave_next)

    async def _end_own(self) -> None:
        """End the sessions of this process. The calls of client processes may finish meanwhile."""
        others = {session.id for guest in self.server.guests for session in guest.sessions}
        own = [session for session in self.sessions.by_id.values() if session.id not in others]
        await asyncio.gather(*(session.end("shutdown", ENDED) for session in own), self.server.drain())

    async def _end_all(self) -> None:
        await asyncio.gather(*(session.end("shutdown", ENDED) for session in tuple(self.sessions.by_id.values())))

    async def _suspend_all(self) -> None:
        with contextlib.suppress(LogUnavailable):  # the end of this process suspends them as well
            await self.sessions.suspend_all()

    async def _write_what_is_left(self) -> None:
        try:
            await self.log.flush()
        except LogUnavailable:
            if self.rooms.store.lease.lost is None:
                raise


def set_for_holding(settings: Configuration) -> list[str]:
    """Return the keys that were set for this process by flags but apply only in the lease holder.

    Limits, the ceiling, the sandbox and the storage are common to all calls of a workspace. A client process could not enforce
    other values for its sessions. Ignoring them silently would weaken the settings of its operator.
    """
    flags = [value for value in settings.values if value.origin.kind == "flag" and not is_brought(value)]
    return sorted({value.key for value in flags})


def is_brought(value: Value) -> bool:
    """Return whether a client process can use this setting for its own sessions."""
    table, given = path_of(value.key)[0], value.value
    if table == "tools":
        return not isinstance(given, Mapping)  # only the lease holder sets secrets
    if table == "watchdogs":  # a built-in watchdog checks all calls with the settings of the lease holder
        return isinstance(given, Mapping) and "command" in given
    return table in ("rules", "agent", "mode", "catalog")


@asynccontextmanager
async def hold(
    workspace: Folder, state: Folder | None, config: Folder | None, brought: Brought, join: Join, *, allow_home: bool
) -> AsyncGenerator[HeldKernel]:
    """Hold ``workspace`` until the block ends, and accept client processes.

    See :func:`~handrail.kernel.opening.open_kernel`.

    :param join: connects to the process that takes the workspace over from this one
    :raises WorkspaceHeld: if another process holds it
    """
    folders, given = locate(workspace, state, allow_home=allow_home), brought

    def joining(tools: tuple[Tool, ...]) -> AbstractAsyncContextManager[Kernel]:
        held = WorkspaceHeld(folders, holder_of(folders) or Holder())
        return join(held, replace(given, tools=tools))

    # In threads, because the time depends on the size of the configuration, and a program may embed this kernel in its loop.
    settings = await asyncio.to_thread(configuration.load, config, folders=folders, flags=brought.settings)
    brought = replace(
        brought,
        rules=(*(rule.entry for rule in settings.process_rules), *brought.rules),
        mode=brought.mode or settings.given_mode,
    )
    # This includes agents that only a later session will use.
    for one in await asyncio.to_thread(lambda: [*all_agents(settings, folders)]):
        programs.add(one.further.writable)
    joinable = sys.platform == "linux"
    # Each lease holder has its own socket name, because a paused one still listens on its socket.
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
            why = f"{keys} can only be set in the process that holds the workspace; set it in handrail.toml instead"
            store.lease.remedy = f"it cannot connect to the process that holds the workspace, because {why}. End that process, and start this one again"
        store.lease.when_lost(replaced)
        if joinable:
            store.folders.clear_sockets(socket)
            await kernel.server.open(store.folders.own, socket)
        yield kernel
