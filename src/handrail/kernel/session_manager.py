"""The open sessions in the lease holder: opening, suspending, forking and closing them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from handrail.arbiter.call_state import Call, Lane
from handrail.arbiter.output.secret_redaction import RedactingSessionValueStore
from handrail.arbiter.subagent_delegation import check_delegation_target
from handrail.catalog.loaded_tools import InteractionLoadedTools
from handrail.contract.agent_manifest import DEFAULT_AGENT, AgentManifest
from handrail.contract.errors import HandrailError, StartError, ToolError, UsageError
from handrail.contract.permission_modes import MODES, Mode
from handrail.contract.rule_forms import normalise_rules
from handrail.contract.services.subagent_services import SubagentTask, SubagentType
from handrail.contract.session_protocols import ChildSession, StoppedWork
from handrail.kernel.kernel_assembly import KernelComponents, make_session_rule_texts, parse_rule_texts
from handrail.policy.path_denials import HiddenPathRulesCache
from handrail.policy.rules.rules_and_modes import (
    Rule,
    build_folder_limited_reading_rules,
    limit_to_parent,
    make_folder_reading_rule,
    parse_mode,
    parse_optional_mode,
    with_mode,
)
from handrail.record.commit_log import Record
from handrail.registry.agent_folders import load_agent_manifests
from handrail.runtime.call_runtime import SessionSharedServices
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.repository_index import RepositoryWordIndex
from handrail.runtime.secret_store import read_passthrough_variables
from handrail.session.call_recovery import load_project_rules
from handrail.session.inbound.trigger_scheduler import SessionInboundServices, WorkspaceInboundServices
from handrail.session.local_session import (
    SESSION_RULE_SOURCE,
    LocalSession,
    ParentRef,
    SessionTreeNode,
    find_parent_editor_client,
    generate_session_id,
    list_parent_manifests,
)
from handrail.session.memory.session_memory import SessionMemoryFactory
from handrail.session.session_context import (
    AgentContext,
    SessionOpenParameters,
    describe_requesting_subagent,
    find_host_limiting_parent,
    select_delegated_secrets,
)
from handrail.session.session_skills import SessionSkills
from handrail.session.session_store import SessionStore
from handrail.session.undo_service import UndoService
from handrail.session.workspace_tasks import WorkspaceTasks
from handrail.store.state_folders import StateFolders
from handrail.store.tables.session_tables import SessionRow

# Construction of a session's lane: its environment, its rules, and the limits of a sub-agent.

_DEFAULT_DESCRIPTION = (
    "A copy of this agent with its own conversation, for parts of the work whose details you do not need."
)
"""The description of the default agent for the models of other agents, if its manifest has none."""


def make_session_lane(
    components: KernelComponents,
    session_store: SessionStore,
    opening: SessionOpenParameters,
    row: SessionRow,
    arrivals: SessionInboundServices,
    appoint: Callable[[str], object],
) -> Lane:
    """Return the complete lane of a session that is stored as ``row``.

    :param appoint: see :class:`~handrail.arbiter.call_state.Lane`
    :raises LoadError: if a rule is invalid
    :raises LogUnavailable: if the stored state of the session cannot be read
    """
    context, options, under, folders = opening.context, opening.options, opening.parent_ref, components.store.folders
    workdir, session_id = str(folders.workspace), row.id
    output, scratch = folders.locate_session_output(session_id), folders.locate_session_scratch(session_id)
    further, kept, shipped = context.further_roots, str(folders.user_data_folder), list[Rule]()
    if context.authority.requires_folder(kept):
        folders.prepare_user_data_folder()
        further = replace(further, writable=(*further.writable, kept))
        shipped = build_folder_limited_reading_rules(kept)
    around = SessionSharedServices(
        session_id=session_id,
        agent=context.agent,
        workdir=workdir,
        scratch=str(scratch),
        prepare_folders=partial(_prepare_session_folders, folders, session_id),
        roots=SessionRoots(workdir, (str(output),), further),
        sandbox=components.sandbox,
        values=RedactingSessionValueStore(components.store.session_values, components.arbiter.shaper.redactor),
        approval_handler=opening.approval_handler,
        client=options.get("client") if under is None else find_parent_editor_client(under),
        topic=row.topic,
        user_context=options.get("user_context"),
        seen_files=session_store.load_seen_files(session_id),
        hidden=(str(folders.state),),
        secrets=context.secrets if under is None else select_delegated_secrets(context.secrets, under),
        denials=lambda: hidden.get_hidden_path_rules(lane.rules),
        find_tool_home=folders.prepare_tool_home,
        passed_environment=read_passthrough_variables(
            components.config.settings.env.passed_variable_names, components.arbiter.shaper.redactor.redact_text
        ),
        quarantine=str(output / "quarantine"),
        transcript=arrivals.transcript,
        get_server_pool=components.get_server_pool,
        memory=SessionMemoryFactory(
            session_id,
            context.agent,
            folders.workspace,
            components.knowledge,
            arrivals.transcript,
            RedactingSessionValueStore(components.store.session_values, components.arbiter.shaper.redactor),
            components.store.database,
            components.arbiter.shaper.redactor,
            components.comparer,
            context.manifest.prompt,
        ),
        snapshots=components.snapshots,
        change_journal=components.change_journal,
        route=components.route,
    )
    own = parse_rule_texts(
        make_session_rule_texts(normalise_rules(options.get("rules", ())), SESSION_RULE_SOURCE), context.generation
    )
    own += [
        *session_store.load_session_rules(session_id),
        *load_project_rules(components.arbiter.approval_broker, folders),
    ]
    book = context.rules.with_rules(*shipped, *own)
    if (wanted := parse_optional_mode(options.get("mode"))) is not None:
        book = with_mode(book, wanted)
    elif (stored := _stored_mode(row, "mode")) and MODES.index(stored) < MODES.index(parse_mode(book.mode)):
        book = with_mode(book, stored)  # a reopened session gets no wider mode than it had
    authority, own_mode = context.authority, None
    if under is not None:
        parent = under.parent.lane
        own_mode, book = parse_mode(book.mode), limit_to_parent(book, parent.rules)
        authority = authority.restrict_to_delegation(
            parent.authority.compute_delegable_capabilities(under.parent.tree_node.manifest)
        )
    book = book.with_folder_rule(make_folder_reading_rule(str(output)))
    view = replace(context.catalog, above=tuple(one.delegation.agents for one in list_parent_manifests(under)))
    hidden = HiddenPathRulesCache(workdir)
    lane = Lane(
        environment=around,
        authority=authority,
        rules=book,
        current_generation=partial(
            getattr, context.generations.succession, "current"
        ),  # every call uses it; a lambda would cost a frame
        catalog=InteractionLoadedTools(session_id, view, around.values, components.finder),
        skills=SessionSkills(session_id, workdir, components.config.folder, around.values),
        channels=arrivals.channels,
        triggers=arrivals.triggers,
        notifications=arrivals.notifications,
        agent_types=lambda: list_delegable_agents(components, context, *list_parent_manifests(opening.parent_ref)),
        load_agent=appoint,
        mode=own_mode,
        origin="" if under is None else describe_requesting_subagent(context.agent, under),
        named_hosts_of=None if under is None else find_host_limiting_parent(under),
        approval_handler=opening.approval_handler,
    )
    lane.previous_mode = _stored_mode(row, "previous_mode")
    return lane


def _prepare_session_folders(folders: StateFolders, session_id: str) -> None:
    """Create the folders of a session, for its first program.

    :raises ToolError: ``unavailable`` if they cannot be created or are not private
    """
    try:
        folders.prepare_session_output(session_id)
        folders.prepare_session_scratch(session_id)
    except StartError as error:
        raise ToolError(str(error), kind="unavailable") from None


def _stored_mode(row: SessionRow, key: str) -> Mode | None:
    stored = row.details.get(key)
    return next((mode for mode in MODES if mode == stored), None)


def list_delegable_agents(
    components: KernelComponents, of: AgentContext, *above: AgentManifest
) -> Sequence[SubagentType]:
    """Return the agents that an agent may delegate to, without those with faulty manifests.

    :param of: the context of the agent
    :param above: its parent agents, up to the root
    """
    workspace = str(components.store.folders.workspace)
    found = load_agent_manifests(components.config.folder, (workspace,), of.given_agents).values()
    return tuple(
        SubagentType(one.manifest.id, one.manifest.description.strip() or _describe_default(one.manifest))
        for one in found
        if not one.faults and one.manifest.accepts_delegation_from(of.manifest, *above)
    )


def _describe_default(manifest: AgentManifest) -> str:
    return _DEFAULT_DESCRIPTION if manifest.id == DEFAULT_AGENT else ""


def describe_session_origin(row: SessionRow) -> dict[str, Any]:
    if row.parent_session is not None:
        return {"parent_session": row.parent_session, "parent_call": row.parent_call}
    return {"parent": row.details["parent"]} if "parent" in row.details else {}


_MOST_NAMED = 10
_STOP_POLL_S = 0.02


class SessionManager:
    """The open sessions of this process and of its client processes, bound to one event loop.

    :param context_of: returns the context of an agent, with the registrations of this process
    :param frontend: the frontend of this process
    """

    def __init__(self, components: KernelComponents, context_of: Callable[[str], AgentContext], frontend: str) -> None:
        self._components = components
        self._context_of = context_of
        self._frontend = frontend
        self.sessions_by_id: dict[str, LocalSession] = {}
        self._resting: dict[str, LocalSession] = {}
        """The suspended sessions whose jobs are still running."""
        self._closing: set[str] = set()
        self.session_store = SessionStore(components.store, components.arbiter.shaper.redactor, components.log)
        self.arrivals = WorkspaceInboundServices(
            components.store, components.arbiter.shaper.redactor, comparer=components.comparer
        )
        self.file_index = RepositoryWordIndex()
        self.tasks = WorkspaceTasks(components.store.tasks, components.arbiter.shaper.redactor)
        self.undo_service = UndoService(components.arbiter, components.snapshots, components.store.sessions)
        self._outputs = components.arbiter.shaper.room
        self._outputs.in_use = lambda session_id: session_id in self.sessions_by_id or session_id in self._closing

    @property
    def closing_session_ids(self) -> frozenset[str]:
        """The ids of the sessions whose folders are being removed."""
        return frozenset(self._closing)

    def find_lane(self, session_id: str) -> Lane | None:
        """Return the lane of a session; None if it is not open."""
        return None if (session := self.sessions_by_id.get(session_id)) is None else session.lane

    def list_lanes(self) -> Iterable[Lane]:
        """Return the lanes of open sessions, and of suspended ones that limit the sub-agents of their jobs."""
        return [session.lane for session in (*self.sessions_by_id.values(), *self._resting.values())]

    async def record_all_sessions_suspended(self) -> None:
        """Suspend all open sessions.

        :raises LogUnavailable: if it cannot be recorded
        """
        await asyncio.gather(*map(self.session_store.record_suspended, tuple(self.sessions_by_id)))

    async def open_session_in_context(self, opening: SessionOpenParameters, id: str | None = None) -> LocalSession:
        """Open a session in the context of ``opening``.

        :param id: the id of the session to reopen; None for a new one
        :raises UsageError: if it is already open
        """
        if id is not None and (id in self.sessions_by_id or id in self._closing):
            raise UsageError(f"Session {id!r} is already open. Close or suspend it first.")
        session_id = generate_session_id() if id is None else id
        rooms, lasting, context = self._components, self.session_store, opening.context
        row = lasting.merge_row(opening.to_row(session_id, time.time_ns()))
        # Call ids stay unique when a session continues.
        turns = 0 if id is None else lasting.find_last_turn(session_id, rooms.log.find_last_turn(session_id))
        family = SessionTreeNode(context.manifest, self._open_child, opening.parent_ref)
        workdir, top = str(rooms.store.folders.workspace), family.root_id(session_id)
        arrivals = self.arrivals.for_session(session_id, top, context.agent, workdir, lambda: context.generation)
        try:
            appoint = partial(self._find_subagent_context, family, opening.context_of)
            lane = make_session_lane(rooms, lasting, opening, row, arrivals, appoint)
        except BaseException:
            self.arrivals.release_session(session_id)
            raise
        lane.environment.file_index = self.file_index
        lane.tasks = self.tasks.for_session(session_id)
        history = lasting.open_history(session_id, lane)
        session = LocalSession(
            rooms.arbiter, lane, self._handle_closed, self._handle_suspended, turns, family, history, self.undo_service
        )
        session.change_notifier.watch_new_generations(context.watchers)
        session.change_notifier.record_mode = partial(lasting.record_mode, session_id)
        session.client_info = opening.options.get("client_info")
        self.sessions_by_id[session_id] = session
        family.add_to_parent(session)
        try:
            await rooms.store.sessions.record_opened(row)
            await self.arrivals.resume_session(arrivals.triggers)
            await session.catalog.restore_loaded_tools()
            await rooms.arbiter.job_recovery.resume_session(lane)
        except BaseException:
            session.change_notifier.end()
            self._remove(session)
            rooms.store.sessions.record_opening_interrupted(session_id, time.time_ns())
            raise
        if (before := self._resting.pop(session_id, None)) is not None:
            family.move_child_sessions(session, before)
        opened = {
            "agent": context.agent,
            "frontend": opening.frontend,
            "headless": row.headless,
            "mode": lane.rules.mode,
        }
        if row.topic is not None:
            opened["topic"] = row.topic
        if "client" in row.details:
            opened["client"] = row.details["client"]
        context.generations.start_recording_generations()
        rooms.log.record_soon([Record("session-opened", session_id, "", {**opened, **describe_session_origin(row)})])
        return session

    async def _open_child(self, parent: LocalSession, call: Call, delegation: SubagentTask) -> ChildSession:
        """Open the session of a sub-agent, in the context of its agent with the registrations of this process."""
        session = await self.open_child_session(self._context_of, ParentRef(parent, call, delegation), self._frontend)
        return ChildSession(session, session.tree_node.manifest)

    async def open_child_session(
        self, context_of: Callable[[str], AgentContext], under: ParentRef, frontend: str, id: str | None = None
    ) -> LocalSession:
        """Open the session of a sub-agent.

        :param context_of: returns the context of an agent, with the registrations of the parent's process
        :raises ToolError: if the parent cannot delegate to that agent
        """
        known = under.parent.id  # the current object: the parent may have been reopened since the job started
        under.parent = self._resting.get(known) or self.sessions_by_id.get(known) or under.parent
        above, agent = under.parent.lane, under.delegation.agent
        check_delegation_target(agent, above.agent_types())
        context, around = self._find_subagent_context(under.parent.tree_node, context_of, agent), above.environment
        opening = SessionOpenParameters(
            context, context_of, frontend, {"topic": around.topic, "user_context": around.user_context}, under
        )
        return await self.open_session_in_context(opening, id)

    @staticmethod
    def _find_subagent_context(
        family: SessionTreeNode, context_of: Callable[[str], AgentContext], agent: str
    ) -> AgentContext:
        """Return the context of a sub-agent in ``family``.

        :raises ToolError: if the maximum depth is reached, or the agent cannot be used
        """
        family.check_subagent_depth()
        try:
            return context_of(agent)
        except HandrailError as error:
            text = f"Agent `{agent}` cannot be used: {error}\nUse another agent, do the work yourself, or ask the user to fix it."
            raise ToolError(text, kind="unavailable") from None

    async def fork_stored_session(self, id: str, forked: str) -> str:
        """Copy a session, and return the id of the copy.

        :param forked: the id of the copy; repeating the call with the same id has no effect
        """
        await self.session_store.fork(id, forked, frontend=self._frontend)
        return forked

    async def close_suspended_session(self, id: str) -> None:
        """Close a suspended session permanently.

        :raises UsageError: if it is open or does not exist
        """
        if id in self.sessions_by_id or id in self._closing:
            raise UsageError(f"Session {id} is open. Close it in the process that has it open.")
        self.session_store.require_unclosed_session(id)
        await self._delete(id)

    async def stop_work(self, target: str, by: str) -> StoppedWork:
        """Stop work because a user asks for it, and record that. Each call still gets its result.

        A stopped session accepts no further calls until it is resumed.

        :param target: the id of a call, a job or a session; ``""`` for all sessions
        :param by: the frontend in which the user asks
        :raises ToolError: ``invalid_input`` if nothing of that name runs here
        """
        jobs = self._components.arbiter.jobs
        sessions = self._find_session_tree(target) if target in self.sessions_by_id else []
        sessions = [*self.sessions_by_id.values()] if not target else sessions
        concerned = {session.id for session in sessions}
        stopped = [live for live in jobs.running.values() if not target or live.row.job.session_id in concerned]
        stopped += [live for live in jobs.running.values() if target and target in (live.row.id, live.row.job.call_id)]
        calls = [call for session in sessions for call in session.lane.awaited_calls]
        if not concerned and not stopped:
            calls = [call for lane in self.list_lanes() if (call := lane.running_calls.get(target)) is not None]
        if target and not (concerned or stopped or calls):
            known = [
                *self.sessions_by_id,
                *jobs.running,
                *(id for lane in self.list_lanes() for id in lane.running_calls),
            ]
            there = f"Running now: {', '.join(known[:_MOST_NAMED])}." if known else "Nothing is running."
            raise ToolError(f"{target[:80]!r} does not run in this workspace. {there}", kind="invalid_input")
        found = StoppedWork(tuple(concerned), tuple(call.id for call in calls), tuple(live.row.id for live in stopped))
        about = calls[0].session_id if calls else stopped[0].row.job.session_id if stopped else ""
        body = {
            "target": target,
            "by": by,
            "sessions": [*found.sessions],
            "calls": [*found.calls],
            "jobs": [*found.jobs],
        }
        self._components.log.record_soon(
            [Record("stop-requested", target if concerned and target else about, "", body)]
        )
        for session in sessions:
            session.stop_by_user()
        for call in calls:
            call.execution.stop("user")
        await asyncio.gather(*(jobs.stop(live, "user") for live in stopped))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1 + 3 * self._components.arbiter.limits.grace_ms / 1000):
                await asyncio.gather(*(session.lane.wait_until_idle() for session in sessions))
                while any(call.id in call.lane.running_calls for call in calls):  # noqa: ASYNC110 - bounded, and rare
                    await asyncio.sleep(_STOP_POLL_S)
        return found

    def _find_session_tree(self, session_id: str) -> list[LocalSession]:
        """Return a session and the sessions of its sub-agents."""
        session = self.sessions_by_id[session_id]
        below = (one for child in session.tree_node.children for one in self._find_session_tree(child.id))
        return [session, *below]

    async def _handle_suspended(self, session: LocalSession) -> None:
        """Record that a session was suspended. Its data stays."""
        approvals = self._components.arbiter.approval_broker
        try:
            if session.tree_node.parent_ref is not None:  # no process can reopen it, so its requests and jobs end, too
                await approvals.reject_requests_of_session(session.id, "its sub-agent ended", "parent")
                await asyncio.gather(
                    self._components.arbiter.jobs.stop_jobs_and_wait("parent", session.id),
                    self.arrivals.remove_triggers_of_subagent(session.id),
                )
            await self.session_store.record_suspended(session.id)
        finally:
            self._remove(session)
            self._keep_limiting_sessions(session)

    def _keep_limiting_sessions(self, session: LocalSession) -> None:
        """Keep suspended sessions while they limit the sub-agents of running jobs."""
        if session.tree_node.parent_ref is None:
            self._resting[session.id] = session
        at_work = {live.row.job.session_id for live in self._components.arbiter.jobs.running.values()}
        self._resting = {id: resting for id, resting in self._resting.items() if id in at_work}

    async def _handle_closed(self, session: LocalSession) -> None:
        """Delete a closed session.

        It leaves the list last, because it cannot be reopened until its folders are removed.
        """
        try:
            await self._delete(session.id)
        finally:
            self._remove(session)

    def _remove(self, session: LocalSession) -> None:
        self.arrivals.release_session(session.id)
        self.sessions_by_id.pop(session.id, None)
        session.tree_node.remove_from_parent(session)

    async def _delete(self, session_id: str) -> None:
        store, approvals = self._components.store, self._components.arbiter.approval_broker
        self._closing.add(session_id)
        try:
            if (resting := self._resting.get(session_id)) is not None:
                await resting.tree_node.suspend_child_sessions()
            await self._components.arbiter.jobs.stop_jobs_and_wait("user", session_id)
            for child in store.sessions.list_open_subagent_sessions(session_id):
                await self._delete(child.id)
            await approvals.reject_requests_of_session(session_id)
            await self.arrivals.remove_triggers_and_channels(session_id)
            await self._components.program_sandbox.end_ready_sandboxes(
                str(store.folders.locate_session_scratch(session_id))
            )
            self._components.log.record_soon([Record("session-closed", session_id, "", {})])
            try:
                await store.sessions.close(session_id, time.time_ns())
            finally:
                await asyncio.to_thread(store.folders.remove_session_files, session_id)
                self._components.arbiter.jobs.outputs.release_bytes_of_folder(
                    store.folders.session_outputs_folder / session_id
                )
        finally:
            self._resting.pop(session_id, None)
            self._closing.discard(session_id)
            self._outputs.mark_usage_outdated()
