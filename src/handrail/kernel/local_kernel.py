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
from handrail.arbiter.approvals.approval_broker import ApprovalBroker, OpenSessionAccess
from handrail.arbiter.jobs.job_views import JobView, WorkspaceJobView
from handrail.arbiter.output.secret_redaction import redact_logs
from handrail.arbiter.resource_access import resolve_evaluated_target
from handrail.catalog.loaded_tools import InteractionLoadedTools
from handrail.config import MergedConfiguration
from handrail.config.layers import LayerValue
from handrail.config.operator_settings import split_setting_key
from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.approval_requests import ApprovalService
from handrail.contract.errors import HandrailError, LogUnavailable, ToolError, UsageError
from handrail.contract.rule_forms import RuleLike, normalise_rules
from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.schema.argument_validation import ArgumentCheckBudgetError
from handrail.contract.services.job_and_tool_services import Job, JobService, ToolSearchResult, WorkspaceJobService
from handrail.contract.session_protocols import StoppedWork
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import Generation, GenerationDiff, ToolStatus
from handrail.contract.undo_reports import UndoReport
from handrail.ipc.client.remote_session import APPROVALS_PREFIX
from handrail.ipc.codec.protocol_rpc import (
    WIRE_CODEC,
    WORKSPACE_JOBS_PREFIX,
    RequestHandler,
    make_protocol_handlers,
    make_request_handler,
)
from handrail.ipc.server.client_process import ClientProcess
from handrail.ipc.server.ipc_server import IpcServer
from handrail.ipc.wire.socket_handshake import PROTOCOL_VERSION
from handrail.kernel.agent_loading import iterate_agents
from handrail.kernel.kernel_assembly import (
    KernelComponents,
    assemble_components,
    make_session_rule_texts,
    parse_rule_texts,
)
from handrail.kernel.kernel_interface import FolderPath, Kernel
from handrail.kernel.session_manager import SessionManager
from handrail.origins import program_lookup
from handrail.policy.call_authorizer import CallAuthorizer
from handrail.policy.decision_explanation import explain
from handrail.policy.rules.rules_and_modes import RuleBook
from handrail.record.commit_log import CommitLog, InterruptedCall
from handrail.runtime.files.session_roots import SessionRoots
from handrail.session.call_recovery import load_project_rules
from handrail.session.inbound.trigger_scheduler import WorkspaceInboundServices
from handrail.session.local_session import ENDED, LocalSession, ParentRef, generate_session_id
from handrail.session.session_context import (
    AgentContext,
    ClientProcessRegistrations,
    SessionOpenParameters,
    SessionOptions,
    normalise_session_options,
)
from handrail.store.lease import LeaseHolder, WorkspaceAlreadyHeld, find_lease_holder
from handrail.store.state_folders import locate_folders
from handrail.store.workspace_store import WorkspaceStore

if TYPE_CHECKING:
    from handrail.kernel.upstream_mcp_servers import LocalMcpServerManager, McpServerManager
    from handrail.policy.decision_explanation import PolicyExplanation


logger = logging.getLogger("handrail.ipc")


OpenLocal = Callable[[ClientProcessRegistrations], AbstractAsyncContextManager[Kernel]]
"""Holds the workspace in this process; see :func:`open_local_kernel`."""

OpenRemote = Callable[[WorkspaceAlreadyHeld, ClientProcessRegistrations], AbstractAsyncContextManager[Kernel]]
"""Connects to the process that holds a workspace; see :func:`handrail.kernel.remote_kernel.open_remote_kernel`."""


class LocalKernel(Kernel):
    """A kernel that executes calls.

    Its own sessions share one context; client processes have their own contexts.
    """

    def __init__(
        self,
        components: KernelComponents,
        own_context: AgentContext,
        frontend: str,
        registrations: ClientProcessRegistrations,
        connect_next: Callable[[tuple[Tool, ...]], AbstractAsyncContextManager[Kernel]],
    ) -> None:
        """Create a kernel from assembled components.

        :param own_context: the context of the default agent
        :param connect_next: connects to the process that has taken the workspace over, with the current tools of this process
        """
        self.components = components
        self.own_context = own_context
        self._registrations = registrations
        self._frontend = frontend
        self._other_contexts: dict[str, AgentContext] = {}
        """The contexts of further agents that sessions of this process use."""
        self._context_lock = asyncio.Lock()
        """Locked while a thread creates one of these contexts."""
        self._connect_next = connect_next
        self._next = AsyncExitStack()
        self.successor: Kernel | None = None
        """The kernel that replaces this one after another process has taken the workspace over."""
        self._takeover_task: asyncio.Task[None] | None = None
        self.sessions = SessionManager(components, self._get_context, frontend)
        self._servers: LocalMcpServerManager | None = None
        self.server = IpcServer(self)
        opened = OpenSessionAccess(self.sessions.find_lane, self.sessions.list_lanes, self._evaluation_inputs)
        self.components.arbiter.approval_broker.attach_open_sessions(opened)

    @property
    def workdir(self) -> str:
        return str(self.components.store.folders.workspace)

    @property
    def state_folder(self) -> str:
        return str(self.components.store.folders.workspace_state_folder)

    @property
    def config(self) -> MergedConfiguration:
        return self.components.config

    @property
    def sandbox_tier(self) -> SandboxTier:
        return self.components.sandbox.tier

    @property
    def default_agent(self) -> AgentManifest:
        return self.own_context.manifest

    @property
    def generation(self) -> Generation:
        return self.own_context.generation

    @property
    def initial_rules(self) -> RuleBook:
        return self.own_context.rules

    @property
    def approvals(self) -> ApprovalBroker:
        """The approvals of this process or of its successor.

        A successor has only the methods of :class:`ApprovalService`.
        """
        if self.successor is not None:
            return cast("ApprovalBroker", self.successor.approvals)
        return self.components.arbiter.approval_broker

    @property
    def jobs(self) -> WorkspaceJobService:
        if self.successor is not None:
            return self.successor.jobs
        return self._job_view

    @property
    def _job_view(self) -> WorkspaceJobView:
        return WorkspaceJobView(self.components.arbiter.jobs, self.sessions.list_lanes, self.components.arbiter.shaper)

    @property
    def inbound_services(self) -> WorkspaceInboundServices:
        """The inbound events of sessions between their turns."""
        return self.sessions.arrivals

    @property
    def log(self) -> CommitLog:
        return self.components.log

    @property
    def interrupted_calls(self) -> Sequence[InterruptedCall]:
        return self.components.interrupted_calls

    @property
    def mcp_servers(self) -> McpServerManager:
        from handrail.kernel.upstream_mcp_servers import LocalMcpServerManager

        if self.successor is not None:
            return self.successor.mcp_servers
        if self._servers is None:
            self._servers = LocalMcpServerManager(lambda: self.generation, self.components, self.own_context.secrets)
        return self._servers

    async def reload_tools(self, tools: Iterable[Tool] | None = None) -> GenerationDiff:
        if self.successor is not None:
            return await self.successor.reload_tools(tools)
        given = None if tools is None else tuple(tools)
        for context in tuple(self._other_contexts.values()):
            await context.generations.reload_all_sources(given)
        difference = await self.own_context.generations.reload_all_sources(given)
        if given is not None:
            self._registrations = replace(self._registrations, tools=given)
        return difference

    async def explain_call(
        self, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[RuleLike] = (), headless: bool = True
    ) -> PolicyExplanation:
        if self.successor is not None:
            return await self.successor.explain_call(tool, arguments, rules=rules, headless=headless)
        return await self.explain_call_in_context(self.own_context, tool, arguments, rules=rules, headless=headless)

    async def explain_call_in_context(
        self,
        context: AgentContext,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        rules: Iterable[RuleLike],
        headless: bool,
    ) -> PolicyExplanation:
        """Explain a call in the sessions of ``context``; see :meth:`Kernel.explain_call`."""
        generation = context.generation
        if (entry := generation.resolve_tool_name(tool)) is None:
            nearest = " or ".join(generation.nearest_names(tool))
            hint = generation.describe_unlisted_sources(tool) or (
                f"Did you mean {nearest}?" if nearest else "No tool has a similar name."
            )
            raise ToolError(f"Tool `{escape_terminal_controls(tool[:80])}` does not exist. {hint}", kind="unknown_tool")
        if entry.unavailable_reason is not None:
            raise ToolError(entry.unavailable_error_text, kind="unavailable")
        try:
            entry.validate_arguments(dict(arguments))
        except ArgumentCheckBudgetError as unfinished:
            await self.components.arbiter.bounded_checks.check_arguments_in_subprocess(entry, unfinished, shared=False)
        further = parse_rule_texts(make_session_rule_texts(normalise_rules(rules), "session"), generation)
        spec, origin, _ = resolve_evaluated_target(entry, arguments, generation)
        return await explain(
            context.authority,
            spec,
            arguments,
            rules=context.rules.with_rules(
                *load_project_rules(self.components.arbiter.approval_broker, self.components.store.folders), *further
            ),
            roots=SessionRoots(self.workdir, (), context.further_roots),
            headless=headless,
            origin=origin,
            substitute=entry.answering_spec,
        )

    async def find_tools(
        self, query: str, *, limit: int = 10, timeout_s: float | None = None, keywords_only: bool = False
    ) -> ToolSearchResult:
        if self.successor is not None:
            return await self.successor.find_tools(query, limit=limit, timeout_s=timeout_s, keywords_only=keywords_only)
        return await self.find_tools_in_context(
            self.own_context, query, limit=limit, patience_s=timeout_s, by_words=keywords_only
        )

    async def find_tools_in_context(self, context: AgentContext, query: str, **how: Any) -> ToolSearchResult:
        """Search the tools of ``context``; see :meth:`Kernel.find_tools`."""
        return await InteractionLoadedTools("", context.catalog, finder=self.components.finder).find(
            context.generation, query, **how
        )

    async def tool_statuses(self) -> Sequence[ToolStatus]:
        if self.successor is not None:
            return await self.successor.tool_statuses()
        return self.list_statuses_in_context(self.own_context)

    def list_statuses_in_context(self, context: AgentContext) -> Sequence[ToolStatus]:
        """Return the statuses of the tools of ``context``; see :meth:`Kernel.tool_statuses`."""
        found = {source.name: source.explain_unreachable() for source in self.components.upstreams.sources}
        return context.generation.tool_statuses({name: reason for name, reason in found.items() if reason})

    async def session(self, id: str | None = None, **options: Unpack[SessionOptions]) -> LocalSession:
        """Open a session; see :meth:`Kernel.session`.

        After another process has taken the workspace over, the session belongs to that process, and has only the methods of
        :class:`~handrail.contract.session_protocols.Session`.
        """
        if self.successor is not None:
            return cast("LocalSession", await self.successor.session(id, **options))
        options = normalise_session_options(options)
        agent = options.get("agent")
        if agent is not None and agent != self.own_context.agent and agent not in self._other_contexts:
            async with self._context_lock:
                await asyncio.to_thread(self._get_context, agent)
        opening = SessionOpenParameters(self._get_context(agent), self._get_context, self._frontend, options)
        return await self.sessions.open_session_in_context(opening, id)

    def _get_context(self, agent: str | None) -> AgentContext:
        """Return the context of ``agent`` with the registrations of this process, created at its first use."""
        if agent is None or agent == self.own_context.agent:
            return self.own_context
        if (context := self._other_contexts.get(agent)) is None:
            context = self._other_contexts[agent] = self.components.create_agent_environment(agent, self._registrations)
        return context

    async def fork_session(self, id: str) -> str:
        if self.successor is not None:
            return await self.successor.fork_session(id)
        return await self.sessions.fork_stored_session(id, generate_session_id())

    async def undo(
        self, call: str | None = None, session: str | None = None, *, dry_run: bool = False, overwrite: bool = False
    ) -> UndoReport:
        if self.successor is not None:
            return await self.successor.undo(call, session, dry_run=dry_run, overwrite=overwrite)
        return await self.sessions.undo_service.undo(call, session, dry_run=dry_run, overwrite=overwrite)

    async def close_session(self, id: str) -> None:
        if self.successor is not None:
            await self.successor.close_session(id)
            return
        await self.sessions.close_suspended_session(id)

    def _evaluation_inputs(self) -> tuple[Generation, CallAuthorizer, RuleBook, SessionRoots]:
        rules = self.own_context.rules.with_rules(
            *load_project_rules(self.components.arbiter.approval_broker, self.components.store.folders)
        )
        return (
            self.own_context.generation,
            self.own_context.authority,
            rules,
            SessionRoots(self.workdir, (), self.own_context.further_roots),
        )

    # ── the services for client processes ────────────────────────────────────────────────────────

    def describe_kernel(self) -> dict[str, Any]:
        tier = WIRE_CODEC.encode_value(SandboxTier, self.sandbox_tier)
        return {"workspace": self.workdir, "token": self.components.store.lease.token, "tier": tier}

    def create_agent_environment(self, agent: str, registrations: ClientProcessRegistrations) -> AgentContext:
        return self.components.create_agent_environment(agent, registrations)

    async def open_session(self, opening: SessionOpenParameters, id: str | None = None) -> LocalSession:
        return await self.sessions.open_session_in_context(opening, id)

    async def open_child_session(
        self, context_of: Callable[[str], AgentContext], under: ParentRef, frontend: str, id: str | None = None
    ) -> LocalSession:
        return await self.sessions.open_child_session(context_of, under, frontend, id)

    def redact_secrets(self, secrets: Mapping[str, str]) -> None:
        self.components.arbiter.shaper.redactor.register_secrets(secrets)

    def make_client_operations(self, client: ClientProcess) -> Mapping[str, RequestHandler]:
        from handrail.kernel.upstream_mcp_servers import ClientMcpServerManager

        return {
            **make_protocol_handlers(ApprovalService, APPROVALS_PREFIX, self._approval_desk),
            **make_protocol_handlers(JobService, "jobs.", self._session_jobs),
            **make_protocol_handlers(WorkspaceJobService, WORKSPACE_JOBS_PREFIX, self._workspace_jobs),
            **ClientMcpServerManager(self.components, client).requests,
            "promote": make_request_handler(self._promote),
            "fork": make_request_handler(self.sessions.fork_stored_session),
            "undo": make_request_handler(self.sessions.undo_service.undo),
            "close-session": make_request_handler(self.sessions.close_suspended_session),
        }

    def _approval_desk(self) -> ApprovalService:
        return self.components.arbiter.approval_broker

    def _workspace_jobs(self) -> WorkspaceJobService:
        return self._job_view

    def _session_jobs(self, session: str) -> JobService:
        return JobView(self.components.arbiter.jobs, session)

    async def _promote(self, session: str, call: str) -> Job:
        if (lane := self.sessions.find_lane(session)) is None:
            raise UsageError(f"Session {session[:80]!r} is not open. Open it first.")
        return await self.components.arbiter.jobs.move_to_background(lane, call)

    async def stop_work(self, target: str, by: str) -> StoppedWork:
        return await self.sessions.stop_work(target, by)

    def handle_takeover(self) -> None:
        """Stop all calls because another process has taken over.

        This process and its clients connect to that process.
        """
        self.server.is_shutting_down = True
        for session in tuple(self.sessions.sessions_by_id.values()):
            session.cancel_running_calls("shutdown")
        self.components.arbiter.jobs.request_stop_of_jobs("shutdown")
        if self._takeover_task is None:
            self._takeover_task = asyncio.get_running_loop().create_task(self._connect_to_new_holder())

    async def _connect_to_new_holder(self) -> None:
        """Connect to the process that has taken over, and continue all sessions of this process there."""
        others = {session.id for client in self.server.clients for session in client.sessions}
        own = [
            one
            for one in self.sessions.sessions_by_id.values()
            if one.tree_node.parent_ref is None and one.id not in others
        ]
        await self.server.aclose()
        try:
            kernel = await self._next.enter_async_context(self._connect_next(self._registrations.tools))
        except HandrailError as error:
            logger.warning("another process holds the workspace now, and this one cannot connect to it: %s", error)
            return
        if self._servers is not None:
            await self._servers.transfer_servers_to(kernel.mcp_servers)
        for session in own:
            around, agent = session.lane.environment, session.tree_node.manifest.id
            how: SessionOptions = {
                "approval_handler": session.approval_handler,
                "headless": session.approval_handler is None,
            }
            how |= {
                "client": around.client,
                "client_info": session.client_info,
                "user_context": around.user_context,
                "agent": None if agent == self.own_context.agent else agent,
            }
            try:
                await session.continue_in_new_holder(partial(kernel.session, session.id, **how))
            except HandrailError as error:
                logger.warning("session %s cannot continue with the next lease holder: %s", session.id, error)
        self.successor = kernel

    async def _close_successor(self) -> None:
        if self._takeover_task is not None and not self._takeover_task.done():
            self._takeover_task.cancel()
            await asyncio.wait((self._takeover_task,))
        await self._next.aclose()

    async def shut_down(self) -> None:
        """Stop all calls, wait for their answers, and flush the log. Sessions are suspended, not closed.

        Every step runs, even if an earlier one fails or is cancelled: a skipped step would leave things that outlive this
        kernel.
        """
        async with AsyncExitStack() as steps:  # run from the last to the first
            steps.callback(self.components.arbiter.shaper.close)
            steps.push_async_callback(self._flush_log)
            steps.push_async_callback(self.components.aclose)
            for context in (self.own_context, *reversed(self._other_contexts.values())):
                steps.push_async_callback(context.aclose)
            steps.push_async_callback(self.components.arbiter.tool_runner.wait_for_late_work)
            steps.push_async_callback(self.server.aclose)  # before `settled`, which tools of clients could delay
            steps.callback(self.components.arbiter.approval_broker.close)
            steps.push_async_callback(self._suspend_all)
            steps.push_async_callback(self.components.arbiter.jobs.stop_jobs_and_wait, "shutdown")
            steps.push_async_callback(self._end_all)
            steps.push_async_callback(self._end_own_sessions)
            steps.push_async_callback(self.sessions.arrivals.aclose)
            steps.push_async_callback(self._close_successor)

    async def _end_own_sessions(self) -> None:
        """End the sessions of this process. The calls of client processes may finish meanwhile."""
        others = {session.id for client in self.server.clients for session in client.sessions}
        own = [session for session in self.sessions.sessions_by_id.values() if session.id not in others]
        await asyncio.gather(
            *(session.stop_and_refuse_calls("shutdown", ENDED) for session in own), self.server.drain_running_calls()
        )

    async def _end_all(self) -> None:
        await asyncio.gather(
            *(
                session.stop_and_refuse_calls("shutdown", ENDED)
                for session in tuple(self.sessions.sessions_by_id.values())
            )
        )

    async def _suspend_all(self) -> None:
        with contextlib.suppress(LogUnavailable):  # the end of this process suspends them as well
            await self.sessions.record_all_sessions_suspended()

    async def _flush_log(self) -> None:
        try:
            await self.log.flush()
        except LogUnavailable:
            if self.components.store.lease.lost_reason is None:
                raise


def find_ineffective_setting_keys(settings: MergedConfiguration) -> list[str]:
    """Return the keys that were set for this process by flags but apply only in the lease holder.

    Limits, the ceiling, the sandbox and the storage are common to all calls of a workspace. A client process could not enforce
    other values for its sessions. Ignoring them silently would weaken the settings of its operator.
    """
    flags = [value for value in settings.values if value.origin.kind == "flag" and not is_client_setting(value)]
    return sorted({value.key for value in flags})


def is_client_setting(value: LayerValue) -> bool:
    """Return whether a client process can use this setting for its own sessions."""
    table, given = split_setting_key(value.key)[0], value.value
    if table == "tools":
        return not isinstance(given, Mapping)  # only the lease holder sets secrets
    if table == "watchdogs":  # a built-in watchdog checks all calls with the settings of the lease holder
        return isinstance(given, Mapping) and "command" in given
    return table in ("rules", "agent", "mode", "catalog")


@asynccontextmanager
async def open_local_kernel(
    workspace: FolderPath,
    state: FolderPath | None,
    config: FolderPath | None,
    registrations: ClientProcessRegistrations,
    open_remote: OpenRemote,
    *,
    allow_home: bool,
) -> AsyncGenerator[LocalKernel]:
    """Hold ``workspace`` until the block ends, and accept client processes.

    See :func:`~handrail.kernel.workspace_opening.open_kernel`.

    :param open_remote: connects to the process that takes the workspace over from this one
    :raises WorkspaceAlreadyHeld: if another process holds it
    """
    folders, given = locate_folders(workspace, state, allow_home=allow_home), registrations

    def joining(tools: tuple[Tool, ...]) -> AbstractAsyncContextManager[Kernel]:
        held = WorkspaceAlreadyHeld(folders, find_lease_holder(folders) or LeaseHolder())
        return open_remote(held, replace(given, tools=tools))

    # In threads, because the time depends on the size of the configuration, and a program may embed this kernel in its loop.
    settings = await asyncio.to_thread(
        configuration.load_configuration, config, folders=folders, flags=registrations.settings
    )
    registrations = replace(
        registrations,
        rules=(*(rule.entry for rule in settings.process_wide_rules), *registrations.rules),
        mode=registrations.mode or settings.process_wide_mode,
    )
    # This includes agents that only a later session will use.
    for one in await asyncio.to_thread(lambda: [*iterate_agents(settings, folders)]):
        program_lookup.register_workspaces_until_exit(one.further_roots.writable)
    joinable = sys.platform == "linux"
    # Each lease holder has its own socket name, because a paused one still listens on its socket.
    socket = f"kernel-{randomness.token_hex(4)}.sock" if joinable else ""
    async with AsyncExitStack() as stack:
        store = WorkspaceStore.open(
            workspace,
            state,
            frontend=registrations.frontend,
            allow_home=allow_home,
            protocol=PROTOCOL_VERSION if joinable else 0,
            socket=socket,
            engine=settings.settings.state.store,
        )
        stack.push_async_callback(store.aclose)
        configuration.check_outside_workspace(settings, store.folders.workspace)
        rooms = await assemble_components(store, settings, registrations.secrets or {})
        await rooms.arbiter.recover_unfinished_work(rooms.interrupted_calls)
        stack.enter_context(redact_logs(rooms.arbiter.shaper.redactor))
        agent = registrations.agent or settings.settings.agent
        own = await asyncio.to_thread(rooms.create_agent_environment, agent, registrations)
        kernel = LocalKernel(rooms, own, registrations.frontend, registrations, joining)
        stack.push_async_callback(kernel.shut_down)
        loop = asyncio.get_running_loop()

        def replaced() -> None:
            loop.call_soon_threadsafe(kernel.handle_takeover)

        if keys := ", ".join(find_ineffective_setting_keys(settings)):
            why = f"{keys} can only be set in the process that holds the workspace; set it in handrail.toml instead"
            store.lease.remedy = f"it cannot connect to the process that holds the workspace, because {why}. End that process, and start this one again"
        store.lease.add_lost_callback(replaced)
        if joinable:
            store.folders.remove_sockets_except(socket)
            await kernel.server.start_listening(store.folders.workspace_state_folder, socket)
        yield kernel
