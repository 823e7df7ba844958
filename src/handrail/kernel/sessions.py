"""The open sessions in the lease holder: opening, suspending, forking and closing them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from handrail.arbiter.call import Call, Lane
from handrail.arbiter.delegating import check_type
from handrail.arbiter.output.redaction import RedactedValues
from handrail.catalog.interaction import Interaction
from handrail.contract.agent import DEFAULT_AGENT, AgentManifest
from handrail.contract.doors.agents import AgentType, Delegation
from handrail.contract.errors import HandrailError, ToolError, UsageError
from handrail.contract.rules import rule_texts
from handrail.contract.session import Child
from handrail.kernel.assembly import Rooms, given_rules, parse_rules
from handrail.policy.authority import HiddenNow
from handrail.policy.rules.rules import Rule, given, in_mode, read_mode, reading, reading_as_in_workspace, within
from handrail.record.log import Record
from handrail.registry.agents import find_agents
from handrail.runtime.files.roots import FurtherRoots, Roots
from handrail.runtime.surface import Surroundings
from handrail.session.arrivals.triggers import Arrivals, SessionArrivals
from handrail.session.context import Context, Opening, named_hosts_of, origin_of, secrets_for
from handrail.session.lasting import Lasting
from handrail.session.session import GIVEN, Family, HeldSession, Under, above, editor_of, new_session_id
from handrail.session.skills import SessionSkills
from handrail.session.taking_up import project_rules
from handrail.store.tables.sessions import SessionRow

# Construction of a session's lane: its environment, its rules, and the limits of a sub-agent.

_ANYTHING = "A copy of this agent with its own conversation, for parts of the work whose details you do not need."
"""The description of the default agent for the models of other agents, if its manifest has none."""


def lane_of(
    rooms: Rooms,
    lasting: Lasting,
    opening: Opening,
    row: SessionRow,
    arrivals: SessionArrivals,
    appoint: Callable[[str], object],
) -> Lane:
    """Return the complete lane of a session that is stored as ``row``.

    :param appoint: see :class:`~handrail.arbiter.call.Lane`
    :raises LoadError: if a rule is invalid
    :raises LogUnavailable: if the stored state of the session cannot be read
    """
    context, options, under, folders = opening.context, opening.options, opening.under, rooms.store.folders
    workdir, session_id = str(folders.workspace), row.id
    output, scratch = folders.output(session_id), folders.scratch(session_id)
    further, kept, shipped = context.further, str(folders.user_data), list[Rule]()
    if context.authority.names(kept):
        folders.make_user_data()
        further = FurtherRoots(further.readable, (*further.writable, kept))
        shipped = reading_as_in_workspace(kept)
    around = Surroundings(
        session_id=session_id,
        agent=context.agent,
        workdir=workdir,
        scratch=str(scratch),
        roots=Roots(workdir, (str(output),), further),
        sandbox=rooms.sandbox,
        values=RedactedValues(rooms.store.state, rooms.arbiter.shaper.redactor),
        attendant=opening.people,
        peer=options.get("peer") if under is None else editor_of(under),
        topic=row.topic,
        client=options.get("client"),
        seen=lasting.seen(session_id),
        hidden=(str(folders.state),),
        secrets=context.secrets if under is None else secrets_for(context.secrets, under),
        denials=lambda: hidden.of(lane.rules),
        home_of=folders.home_of,
        quarantine=str(output / "quarantine"),
        transcript=arrivals.transcript,
    )
    own = parse_rules(given_rules(rule_texts(options.get("rules", ())), GIVEN), context.generation)
    own += [*lasting.rules(session_id), *project_rules(rooms.arbiter.approvals)]
    book = context.rules.with_rules(reading(str(output)), *shipped, *own)
    if (wanted := given(options.get("mode"))) is not None:
        book = in_mode(book, wanted)
    authority, own_mode = context.authority, None
    if under is not None:
        parent = under.parent.lane
        own_mode, book = read_mode(book.mode), within(book, parent.rules)
        authority = authority.within(parent.authority.passes_on(under.parent.family.manifest))
    view = replace(context.catalog, above=tuple(one.delegable.agents for one in above(under)))
    hidden = HiddenNow(workdir)
    lane = Lane(
        around=around,
        authority=authority,
        rules=book,
        current=partial(
            getattr, context.shelf.succession, "current"
        ),  # every call uses it; a lambda would cost a frame
        catalog=Interaction(session_id, view, around.values, rooms.finder),
        skills=SessionSkills(session_id, workdir, rooms.config.folder, around.values),
        channels=arrivals.channels,
        triggers=arrivals.triggers,
        notices=arrivals.notices,
        agent_types=lambda: agent_types(rooms, context.manifest, *above(opening.under)),
        appoint=appoint,
        mode=own_mode,
        origin="" if under is None else origin_of(context.agent, under),
        named_hosts_of=None if under is None else named_hosts_of(under),
        attendant=opening.people,
    )
    return lane


def agent_types(rooms: Rooms, of: AgentManifest, *above: AgentManifest) -> Sequence[AgentType]:
    """Return the agents that an agent may delegate to, without those with faulty manifests.

    :param above: its parent agents, up to the root
    """
    found = find_agents(rooms.config.folder, (str(rooms.store.folders.workspace),)).values()
    return tuple(
        AgentType(one.manifest.id, one.manifest.description.strip() or _described(one.manifest))
        for one in found
        if not one.faults and one.manifest.takes_work_of(of, *above)
    )


def _described(manifest: AgentManifest) -> str:
    return _ANYTHING if manifest.id == DEFAULT_AGENT else ""


def parent_of(row: SessionRow) -> dict[str, Any]:
    """Return the origin of a session, for its record."""
    if row.under is not None:
        return {"under": row.under, "under_call": row.under_call}
    return {"parent": row.details["parent"]} if "parent" in row.details else {}


class HeldSessions:
    """The open sessions of this process and of its client processes, bound to one event loop.

    :param context_of: returns the context of an agent, with the registrations of this process
    :param face: the frontend of this process
    """

    def __init__(self, rooms: Rooms, context_of: Callable[[str], Context], face: str) -> None:
        self._rooms = rooms
        self._context_of = context_of
        self._face = face
        self._open: dict[str, HeldSession] = {}
        self._resting: dict[str, HeldSession] = {}
        """The suspended sessions whose jobs are still running."""
        self._closing: set[str] = set()
        self.lasting = Lasting(rooms.store, rooms.arbiter.shaper.redactor, rooms.log)
        self.arrivals = Arrivals(rooms.store, rooms.arbiter.shaper.redactor)
        self._outputs = rooms.arbiter.shaper.room
        self._outputs.in_use = lambda session_id: session_id in self._open or session_id in self._closing

    @property
    def by_id(self) -> Mapping[str, HeldSession]:
        """The open sessions by id."""
        return self._open

    @property
    def closing(self) -> frozenset[str]:
        """The ids of the sessions whose folders are being removed."""
        return frozenset(self._closing)

    def lane(self, session_id: str) -> Lane | None:
        """Return the lane of a session; None if it is not open."""
        session = self._open.get(session_id)
        return None if session is None else session.lane

    def lanes(self) -> Iterable[Lane]:
        """Return the lanes of open sessions, and of suspended ones that limit the sub-agents of their jobs."""
        return [session.lane for session in (*self._open.values(), *self._resting.values())]

    async def suspend_all(self) -> None:
        """Suspend all open sessions.

        :raises LogUnavailable: if it cannot be recorded
        """
        await asyncio.gather(*map(self.lasting.suspend, tuple(self._open)))

    async def open(self, opening: Opening, id: str | None = None) -> HeldSession:
        """Open a session in the context of ``opening``.

        :param id: the id of the session to reopen; None for a new one
        :raises UsageError: if it is already open
        """
        if id is not None and (id in self._open or id in self._closing):
            raise UsageError(f"Session {id!r} is already open. Close or suspend it first.")
        session_id = new_session_id() if id is None else id
        rooms, lasting, context = self._rooms, self.lasting, opening.context
        row = lasting.row(opening.row(session_id, time.time_ns()))
        # Call ids stay unique when a session continues.
        turns = 0 if id is None else lasting.last_turn(session_id, rooms.log.last_turn(session_id))
        family = Family(context.manifest, self._open_child, opening.under)
        workdir, top = str(rooms.store.folders.workspace), family.top(session_id)
        arrivals = self.arrivals.of(session_id, top, context.agent, workdir, lambda: context.generation)
        try:
            appoint = partial(self._appointed, family, opening.context_of)
            lane = lane_of(rooms, lasting, opening, row, arrivals, appoint)
        except BaseException:
            self.arrivals.leave(session_id)
            raise
        history = lasting.history(session_id, lane)
        session = HeldSession(rooms.arbiter, lane, self._closed, self._suspended, turns, family, history)
        session.news.follow(context.watchers)
        self._open[session_id] = session
        family.enter(session)
        try:
            await rooms.store.sessions.open(row)
            await self.arrivals.enter(arrivals.triggers)
            await session.catalog.restore()
            await rooms.arbiter.restarts.take_up(lane)
        except BaseException:
            session.news.end()
            self._forget(session)
            rooms.store.sessions.abandon(session_id, time.time_ns())
            raise
        if (before := self._resting.pop(session_id, None)) is not None:
            family.take_over(session, before)
        opened = {"agent": context.agent, "face": opening.face, "headless": row.headless, "mode": lane.rules.mode}
        if row.topic is not None:
            opened["topic"] = row.topic
        context.shelf.begin()
        rooms.log.append([Record("session-opened", session_id, "", {**opened, **parent_of(row)})])
        return session

    async def _open_child(self, parent: HeldSession, call: Call, delegation: Delegation) -> Child:
        """Open the session of a sub-agent, in the context of its agent with the registrations of this process."""
        session = await self.open_child(self._context_of, Under(parent, call, delegation), self._face)
        return Child(session, session.family.manifest)

    async def open_child(
        self, context_of: Callable[[str], Context], under: Under, face: str, id: str | None = None
    ) -> HeldSession:
        """Open the session of a sub-agent.

        :param context_of: returns the context of an agent, with the registrations of the parent's process
        :raises ToolError: if the parent cannot delegate to that agent
        """
        known = under.parent.id  # the current object: the parent may have been reopened since the job started
        under.parent = self._resting.get(known) or self._open.get(known) or under.parent
        above, agent = under.parent.lane, under.delegation.agent
        check_type(agent, above.agent_types())
        context, around = self._appointed(under.parent.family, context_of, agent), above.around
        opening = Opening(context, context_of, face, {"topic": around.topic, "client": around.client}, under)
        return await self.open(opening, id)

    @staticmethod
    def _appointed(family: Family, context_of: Callable[[str], Context], agent: str) -> Context:
        """Return the context of a sub-agent in ``family``.

        :raises ToolError: if the maximum depth is reached, or the agent cannot be used
        """
        family.check_depth()
        try:
            return context_of(agent)
        except HandrailError as error:
            text = f"Agent `{agent}` cannot be used: {error}\nUse another agent, do the work yourself, or ask the user to fix it."
            raise ToolError(text, kind="unavailable") from None

    async def fork(self, id: str, forked: str) -> str:
        """Copy a session, and return the id of the copy.

        :param forked: the id of the copy; repeating the call with the same id has no effect
        """
        await self.lasting.fork(id, forked, face=self._face)
        return forked

    async def close(self, id: str) -> None:
        """Close a suspended session permanently.

        :raises UsageError: if it is open or does not exist
        """
        if id in self._open or id in self._closing:
            raise UsageError(f"Session {id} is open. Close it in the process that has it open.")
        self.lasting.existing(id)
        await self._discard(id)

    async def _suspended(self, session: HeldSession) -> None:
        """Record that a session was suspended. Its data stays."""
        approvals = self._rooms.arbiter.approvals
        try:
            if session.family.under is not None:  # no process can reopen it, so its requests and jobs end, too
                await approvals.close_session(session.id, "its sub-agent ended", "parent")
                await asyncio.gather(self._rooms.arbiter.jobs.end("parent", session.id), self.arrivals.end(session.id))
            await self.lasting.suspend(session.id)
        finally:
            self._forget(session)
            self._rest(session)

    def _rest(self, session: HeldSession) -> None:
        """Keep suspended sessions while they limit the sub-agents of running jobs."""
        if session.family.under is None:
            self._resting[session.id] = session
        at_work = {live.row.job.session_id for live in self._rooms.arbiter.jobs.live.values()}
        self._resting = {id: resting for id, resting in self._resting.items() if id in at_work}

    async def _closed(self, session: HeldSession) -> None:
        """Delete a closed session.

        It leaves the list last, because it cannot be reopened until its folders are removed.
        """
        try:
            await self._discard(session.id)
        finally:
            self._forget(session)

    def _forget(self, session: HeldSession) -> None:
        self.arrivals.leave(session.id)
        self._open.pop(session.id, None)
        session.family.leave(session)

    async def _discard(self, session_id: str) -> None:
        store, approvals = self._rooms.store, self._rooms.arbiter.approvals
        self._closing.add(session_id)
        try:
            if (resting := self._resting.get(session_id)) is not None:
                await resting.family.end()
            await self._rooms.arbiter.jobs.end("user", session_id)
            for child in store.sessions.under(session_id):
                await self._discard(child.id)
            await approvals.close_session(session_id)
            await self.arrivals.discard(session_id)
            await self._rooms.programs.release(str(store.folders.scratch(session_id)))
            self._rooms.log.append([Record("session-closed", session_id, "", {})])
            try:
                await store.sessions.close(session_id, time.time_ns())
            finally:
                await asyncio.to_thread(store.folders.discard, session_id)
                self._rooms.arbiter.jobs.outputs.forget_in(store.folders.outputs / session_id)
        finally:
            self._resting.pop(session_id, None)
            self._closing.discard(session_id)
            self._outputs.changed()
