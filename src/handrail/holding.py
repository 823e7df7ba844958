"""The kernel in the process that holds the workspace."""

from __future__ import annotations

import asyncio
import contextlib
import secrets as randomness
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from handrail import config as configuration
from handrail.arbiter.approvals import Approvals
from handrail.arbiter.call import Lane
from handrail.arbiter.delegating import check_type
from handrail.arbiter.logs import redacted_logs
from handrail.arbiter.looking import WorkspaceView
from handrail.arbiter.offers import judged_as
from handrail.assembly import Rooms, assemble, given_rules, parse_rules
from handrail.catalog.interaction import Interaction
from handrail.config import Configuration
from handrail.contract.agent import AgentManifest
from handrail.contract.delegation import Child, Delegation
from handrail.contract.doors import Findings
from handrail.contract.errors import HandrailError, LogUnavailable, ToolError, UsageError
from handrail.contract.peer import Peer
from handrail.contract.people import Attendant
from handrail.contract.rule_texts import RuleEntry
from handrail.contract.runtime import ClientContext
from handrail.contract.sandbox import Tier
from handrail.contract.tool import Tool
from handrail.joining import approvals, jobs, mirror
from handrail.joining.handshake import PROTOCOL
from handrail.joining.server import Server
from handrail.kernel import AnyRule, Brought, Folder, Kernel, rule_texts
from handrail.lanes import lane_of, parent_of
from handrail.policy.authority import Authority
from handrail.policy.modes import Mode
from handrail.policy.rules import RuleBook
from handrail.record.log import CommitLog, Interrupted, Record
from handrail.registry.generation import Difference, Generation
from handrail.runtime.roots import Roots
from handrail.session.arrivals import Arrivals
from handrail.session.context import Context
from handrail.session.family import Family, Under
from handrail.session.lasting import Lasting
from handrail.session.opening import Opening
from handrail.session.parked import Heeding, project_rules
from handrail.session.session import ENDED, HeldSession, new_session_id
from handrail.store.folders import locate
from handrail.store.opening import Store

if TYPE_CHECKING:
    from handrail.policy.explain import Explanation


class HeldKernel(Kernel):
    """Carries the calls out. Its own sessions work in one context, those of processes that joined in theirs."""

    def __init__(self, rooms: Rooms, own: Context, face: str, brought: Brought) -> None:
        self.rooms = rooms
        self.own = own
        self._brought = brought
        self._face = face
        self._others: dict[str, Context] = {}
        """Of further agents that sessions of this process name."""
        self._sessions: dict[str, HeldSession] = {}
        self._closing: set[str] = set()
        self._leaving: asyncio.Task[None] | None = None
        self.lasting = Lasting(rooms.store, rooms.arbiter.shaper.redactor, rooms.log)
        self.arrivals = Arrivals(rooms.store, rooms.arbiter.shaper.redactor)
        self.server = Server(self)
        Heeding(self.approvals, self._lane, self._lanes, self._judged_by)

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
        return self.rooms.arbiter.approvals

    @property
    def jobs(self) -> WorkspaceView:
        return WorkspaceView(self.rooms.arbiter.jobs, self._lanes, self.rooms.arbiter.shaper)

    @property
    def log(self) -> CommitLog:
        return self.rooms.log

    @property
    def interrupted(self) -> Sequence[Interrupted]:
        return self.rooms.interrupted

    async def reload(self, tools: Iterable[Tool] | None = None) -> Difference:
        given = None if tools is None else tuple(tools)
        for context in tuple(self._others.values()):
            await context.shelf.reload(given)
        return await self.own.shelf.reload(given)

    async def explain(
        self, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[AnyRule] = (), headless: bool = True
    ) -> Explanation:
        return await self.explain_in(self.own, tool, arguments, rules=rules, headless=headless)

    async def explain_in(
        self, context: Context, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[AnyRule], headless: bool
    ) -> Explanation:
        """See :meth:`Kernel.explain`."""
        from handrail.policy.explain import explain

        generation = context.generation
        entry = generation.resolve(tool)
        if entry is None:
            nearest = " or ".join(generation.nearest(tool))
            hint = generation.awaited(tool) or (f"did you mean {nearest}?" if nearest else "")
            raise ToolError(f"there is no tool {tool[:80]!r}" + (f"; {hint}" if hint else ""), kind="unknown_tool")
        if entry.withheld is not None:
            raise ToolError(f"{entry.id} is withheld: {entry.withheld}", kind="unavailable")
        if problems := entry.schema.problems(dict(arguments)):
            raise ToolError(f"{entry.id}: " + "; ".join(problems), kind="invalid_input")
        further = parse_rules(given_rules(rule_texts(rules), "session"), generation)
        spec, origin, _ = judged_as(entry, arguments, generation)
        return await explain(
            context.authority,
            spec,
            arguments,
            rules=context.rules.with_rules(*project_rules(self.approvals), *further),
            roots=Roots(self.workdir, (), context.further),
            headless=headless,
            origin=origin,
        )

    async def find(self, query: str, *, limit: int = 10, patience_s: float = 0.0, by_words: bool = False) -> Findings:
        return await self.find_in(self.own, query, limit=limit, patience_s=patience_s, by_words=by_words)

    async def find_in(self, context: Context, query: str, **how: Any) -> Findings:
        """See :meth:`Kernel.find`."""
        return await Interaction("", context.catalog, finder=self.rooms.finder).find(context.generation, query, **how)

    async def session(
        self,
        id: str | None = None,
        *,
        agent: str | None = None,
        headless: bool = True,
        attendant: Attendant | None = None,
        peer: Peer | None = None,
        rules: Iterable[AnyRule] = (),
        mode: str | None = None,
        topic: str | None = None,
        client: ClientContext | None = None,
    ) -> HeldSession:
        if attendant is None and not headless:
            raise UsageError("a session that is not headless needs an attendant=… who can be asked")
        opening = Opening(
            self._context(agent),
            self._face,
            attendant=attendant,
            peer=peer,
            rules=rule_texts(rules),
            mode=mode,
            topic=topic,
            client=client,
        )
        return await self.open_session(opening, id)

    def _context(self, agent: str | None) -> Context:
        """That of ``agent`` with what this process brought; made when it is first named."""
        if agent is None or agent == self.own.agent:
            return self.own
        context = self._others.get(agent)
        if context is None:
            brought = self._brought
            context = self._others[agent] = self.rooms.context(agent, **brought.for_context())
        return context

    async def open_session(self, opening: Opening, id: str | None = None) -> HeldSession:
        """A session of whichever process works in the context of ``opening``."""
        if id is not None and (id in self._sessions or id in self._closing):
            raise UsageError(f"session {id!r} is open already")
        session_id = new_session_id() if id is None else id
        rooms, lasting, context = self.rooms, self.lasting, opening.context
        row = lasting.row(opening.row(session_id, time.time_ns()))
        lane = lane_of(rooms, lasting, opening, row)
        # Call ids stay unique when a session goes on.
        turns = 0 if id is None else lasting.last_turn(session_id, self.log.last_turn(session_id))
        family = Family(context.manifest, self._open_child, opening.under)
        session = HeldSession(
            rooms.arbiter, lane, lambda: context.shelf.succession.current, self._closed, self._suspended, turns, family
        )
        session.history = lasting.history(session_id, lane)
        session.news.follow(context.watchers)
        self._sessions[session_id] = session
        family.enter(session)
        try:
            await rooms.store.sessions.open(row)
            await self.arrivals.enter(session, lane, family.top(session))
            await session.catalog.restore()
            await rooms.arbiter.restarts.take_up(lane)
        except BaseException:
            session.news.end()
            self._forget(session)
            raise
        opened = {"agent": context.agent, "face": opening.face, "headless": row.headless, "mode": lane.rules.mode}
        context.shelf.begin()
        self.log.append([Record("session-opened", session_id, "", {**opened, **parent_of(row)})])
        return session

    async def _open_child(self, parent: HeldSession, call_id: str, delegation: Delegation) -> Child:
        """A session of a sub-agent, in the context of its own agent with what this process brought."""
        session = await self.open_child(self._context, Under(parent, call_id, delegation), self._face)
        return Child(session, session.family.manifest)

    async def open_child(
        self, context_of: Callable[[str], Context], under: Under, face: str, id: str | None = None
    ) -> HeldSession:
        """
        :param context_of: that of an agent, with what the process brought whose session the parent is
        :raises ToolError: where work cannot be handed to that agent
        """
        above, agent = under.parent.lane, under.delegation.agent
        check_type(agent, above.agent_types())
        try:
            context = context_of(agent)
        except HandrailError:
            text = f"the agent {agent!r} cannot be used: its manifest or a tool of it is faulty. handrail agents says why, to its operator"
            raise ToolError(text, kind="unavailable") from None
        around = above.around
        return await self.open_session(
            Opening(context, face, topic=around.topic, client=around.client, under=under), id
        )

    async def fork(self, id: str) -> str:
        return await self._fork(id, new_session_id())

    async def _fork(self, id: str, forked: str) -> str:
        """:param forked: the id of the fork; the same again changes nothing"""
        await self.lasting.fork(id, forked, face=self._face)
        return forked

    async def close_session(self, id: str) -> None:
        if id in self._sessions or id in self._closing:
            raise UsageError(f"session {id} is open; whoever has it open closes it, or ends")
        self.lasting.existing(id)
        await self._discard(id)

    async def _suspended(self, session: HeldSession) -> None:
        """Nobody has it open any more; what belongs to it stays."""
        try:
            if session.family.under is not None:  # nobody goes on with it, so what belongs to it ends, too
                await self.approvals.close_session(session.id, "its sub-agent ended", "parent")
                await asyncio.gather(self.rooms.arbiter.jobs.end("parent", session.id), self.arrivals.end(session.id))
            await self.lasting.suspend(session.id)
        finally:
            self._forget(session)

    async def _closed(self, session: HeldSession) -> None:
        """Taken from the list last: until its folders are gone nobody may open it again."""
        try:
            await self._discard(session.id)
        finally:
            self._forget(session)

    def _forget(self, session: HeldSession) -> None:
        self.arrivals.leave(session.id)
        self._sessions.pop(session.id, None)
        session.family.leave(session)

    async def _discard(self, session_id: str) -> None:
        store = self.rooms.store
        self._closing.add(session_id)
        try:
            await self.rooms.arbiter.jobs.end("user", session_id)
            for child in store.sessions.under(session_id):
                await self._discard(child.id)
            await self.approvals.close_session(session_id)
            await self.arrivals.discard(session_id)
            await self.rooms.programs.release(str(store.folders.scratch(session_id)))
            self.log.append([Record("session-closed", session_id, "", {})])
            try:
                await store.sessions.close(session_id, time.time_ns())
            finally:
                await asyncio.to_thread(store.folders.discard, session_id)
        finally:
            self._closing.discard(session_id)

    def _lane(self, session_id: str) -> Lane | None:
        session = self._sessions.get(session_id)
        return None if session is None else session.lane

    def _lanes(self) -> Iterable[Lane]:
        return (session.lane for session in tuple(self._sessions.values()))

    def _judged_by(self) -> tuple[Generation, Authority, RuleBook, Roots]:
        rules = self.own.rules.with_rules(*project_rules(self.approvals))
        return self.own.generation, self.own.authority, rules, Roots(self.workdir, (), self.own.further)

    # ── what processes that joined need of it ────────────────────────────────────────────────────

    def welcome(self) -> dict[str, Any]:
        tier = mirror.of_tier(self.tier)
        return {"workspace": self.workdir, "token": self.rooms.store.lease.token, "tier": tier}

    def context_of(
        self,
        agent: str,
        tools: Iterable[Tool],
        rules: Iterable[str | RuleEntry],
        mode: Mode | None,
        configured: Mode | None,
    ) -> Context:
        return self.rooms.context(agent, tools=tools, rules=rules, mode=mode, configured=configured)

    def learn(self, secrets: Mapping[str, str]) -> None:
        self.rooms.arbiter.shaper.redactor.learn(secrets)

    def further_operations(self) -> Mapping[str, Callable[..., Awaitable[Any]]]:
        of_jobs = jobs.handlers(self.rooms.arbiter.jobs, self._lane, self.jobs)
        return {
            **approvals.handlers(self.approvals),
            **of_jobs,
            "fork": self._fork,
            "close-session": self.close_session,
        }

    def replaced(self) -> None:
        """Another process has taken over: what runs here is stopped, and those who joined find the other."""
        self.server.leaving = True
        for session in tuple(self._sessions.values()):
            session.cancel("shutdown")
        self.rooms.arbiter.jobs.stop_all("shutdown")
        self._leaving = asyncio.get_running_loop().create_task(self.server.aclose())

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
            steps.callback(self.approvals.close)
            steps.push_async_callback(self._suspend_all)
            steps.push_async_callback(self.rooms.arbiter.jobs.end, "shutdown")
            steps.push_async_callback(self._end_all)
            steps.push_async_callback(self._end_own)
            steps.push_async_callback(self.arrivals.aclose)

    async def _end_own(self) -> None:
        """The sessions of this process. Those of others may come to their end meanwhile."""
        others = {session.id for guest in self.server.guests for session in guest.sessions}
        own = [session for session in self._sessions.values() if session.id not in others]
        await asyncio.gather(*(session.end("shutdown", ENDED) for session in own), self.server.drain())

    async def _end_all(self) -> None:
        await asyncio.gather(*(session.end("shutdown", ENDED) for session in tuple(self._sessions.values())))

    async def _suspend_all(self) -> None:
        with contextlib.suppress(LogUnavailable):  # the end of this process suspends them, too
            await asyncio.gather(*map(self.lasting.suspend, tuple(self._sessions)))

    async def _write_what_is_left(self) -> None:
        try:
            await self.log.flush()
        except LogUnavailable:
            if self.rooms.store.lease.lost is None:
                raise


@asynccontextmanager
async def hold(
    workspace: Folder, state: Folder | None, config: Folder | None, brought: Brought, *, allow_home: bool
) -> AsyncGenerator[HeldKernel]:
    """Hold ``workspace`` until the block ends, and let others join; see :meth:`Kernel.open`.

    :raises WorkspaceHeld: when another process holds it
    """
    folders = locate(workspace, state, allow_home=allow_home)
    settings = configuration.load(config, folders=folders, flags=brought.settings)
    brought = replace(
        brought,
        rules=(*(rule.entry for rule in settings.process_rules), *brought.rules),
        mode=brought.mode or settings.given_mode,
    )
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
        own = rooms.context(agent, **brought.for_context())
        kernel = HeldKernel(rooms, own, brought.face, brought)
        stack.push_async_callback(kernel.shut_down)
        loop = asyncio.get_running_loop()

        def replaced() -> None:
            loop.call_soon_threadsafe(kernel.replaced)

        store.lease.when_lost(replaced)
        if joinable:
            store.folders.clear_sockets(socket)
            await kernel.server.open(store.folders.own, socket)
        yield kernel
