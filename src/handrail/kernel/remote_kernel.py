"""The kernel in a client process: the same interface, with the current lease holder behind it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, Unpack

from handrail import config as configuration
from handrail.arbiter.output.secret_redaction import create_redactor, redact_logs
from handrail.config import MergedConfiguration, WatchdogSettings
from handrail.config.operator_settings import split_setting_key
from handrail.config.secret_references import resolve_secrets
from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.calls_and_results import Event
from handrail.contract.errors import UsageError
from handrail.contract.rule_forms import RuleLike, normalise_rules, rule_to_json_data
from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.services.job_and_tool_services import ToolSearchResult, WorkspaceJobService
from handrail.contract.tool.operator_tool_settings import ToolConfig
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import Generation, GenerationDiff, ToolStatus
from handrail.contract.undo_reports import UndoReport
from handrail.ipc.client.reconnecting_client import ReconnectingClient
from handrail.ipc.client.remote_session import RemoteApprovalService, RemoteSession, request_undo
from handrail.ipc.client.tool_host import SessionRequestHandlers, ToolHost
from handrail.ipc.codec import wire_encoding
from handrail.ipc.codec.protocol_rpc import (
    WIRE_CODEC,
    WORKSPACE_JOBS_PREFIX,
    make_lease_holder_caller,
    make_protocol_proxy,
)
from handrail.ipc.codec.wire_encoding import collect_tools_from_objects, describe_client_tools
from handrail.ipc.wire.message_frames import Message
from handrail.ipc.wire.operation_dispatch import OperationTable
from handrail.ipc.wire.peer_connection import ConnectionLost, IpcConnection
from handrail.kernel.agent_loading import map_settings_to_secrets
from handrail.kernel.kernel_interface import FolderPath, Kernel
from handrail.kernel.local_kernel import OpenLocal, find_ineffective_setting_keys, is_client_setting
from handrail.kernel.upstream_mcp_servers import RemoteMcpServerManager
from handrail.policy.decision_explanation import PolicyExplanation
from handrail.policy.rules.rules_and_modes import RuleBook
from handrail.policy.watchdogs.api import ExternalWatchdog
from handrail.record.commit_log import InterruptedCall
from handrail.record.log_reader import LogReader
from handrail.runtime.secret_store import SecretStore
from handrail.session.local_session import generate_session_id
from handrail.session.session_context import ClientProcessRegistrations, SessionOptions, normalise_session_options
from handrail.store.database.workspace_database import open_reader
from handrail.store.lease import WorkspaceAlreadyHeld
from handrail.store.state_folders import StateFolders
from handrail.store.tables.approval_tables import ApprovalReader
from handrail.store.tables.session_tables import select_session_rows


class RemoteKernel(Kernel):
    """A kernel in a client process, created by :func:`open_remote_kernel`."""

    def __init__(
        self,
        folders: StateFolders,
        config: MergedConfiguration,
        registrations: ClientProcessRegistrations,
        successor: TakeoverCandidate,
    ) -> None:
        self._folders = folders
        self._config = config
        self._registrations = registrations
        self._successor = successor
        tools, secrets = (
            [found.tool for found in collect_tools_from_objects(registrations.tools)],
            registrations.secrets or {},
        )
        redactor = create_redactor(secrets)
        self._secrets = SecretStore(secrets).with_secret_settings(map_settings_to_secrets(config))
        self._tool_host = ToolHost(
            tools, self._secrets, registrations.offerings, registrations.watchdogs, redactor.redact_text
        )
        self._described_tools = describe_client_tools(tools, self._secrets)
        self._sessions: dict[str, RemoteSession] = {}
        self._opening: dict[str, RemoteSession] = {}
        self._agent_id = registrations.agent or config.settings.agent
        self._agent = AgentManifest()
        self._generation: Generation | None = None
        self._rules = RuleBook()
        self._tier = SandboxTier("none", "")
        own = [one for one in config.values if one.origin.kind in ("environment", "flag") and is_client_setting(one)]
        self._tool_settings: dict[str, Any] = {}
        for layer in replace(config, values=tuple(own)).tool_setting_layers:
            for tool, one in layer.tools.items():
                before = self._tool_settings.setdefault(tool, {})
                fields = one.model_dump(mode="json", exclude_unset=True)
                before |= {**fields, "config": {**before.get("config", {}), **fields.get("config", {})}}
        of_catalog = any(split_setting_key(one.key)[0] == "catalog" for one in own)
        self._catalog = config.settings.catalog.model_dump(mode="json") if of_catalog else None
        serving = SessionRequestHandlers(lambda id: self._sessions.get(id) or self._opening.get(id))
        self._servers = servers = RemoteMcpServerManager(
            folders, config, lambda: self.ipc_client, lambda: self.generation
        )
        operations = OperationTable(
            {**self._tool_host.requests, **serving.requests, **servers.requests},
            {
                "event": self._receive_event,
                "loaded_tools": self._receive_loaded_tools,
                "mode": self._receive_mode,
                "stopped": self._receive_stop,
                "generation": self._receive_generation,
                **self._tool_host.notifications,
                **serving.notifications,
            },
        )
        self.ipc_client = ReconnectingClient(folders, successor.take_over, self._make_greeting, operations)
        self.ipc_client.on_connected.append(self._handle_connected)
        self._log = ClientLogService(folders, self.ipc_client)
        self._approvals = RemoteApprovalService(lambda: ApprovalReader(self._log.read_only_connection), self.ipc_client)

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    def _make_greeting(self) -> Message:
        registrations = self._registrations
        return {
            "face": registrations.frontend,
            "agent": self._agent_id,
            "rules": [rule_to_json_data(rule) for rule in registrations.rules],
            "mode": registrations.mode,
            "configured_mode": self._config.settings.mode,
            "secrets": dict(registrations.secrets or {}),
            "tool_config": {tool: dict(config) for tool, config in registrations.tool_config.items()},
            "tool_settings": self._tool_settings,
            "catalog": self._catalog,
            "agents": [one.model_dump(mode="json", exclude_unset=True) for one in registrations.agents],
            "builtins": registrations.builtins,
            "tools": self._described_tools,
            "offerings": self._tool_host.provider_descriptions,
            "watchdogs": self._tool_host.watchdog_descriptions,
        }

    async def _handle_connected(self, connection: IpcConnection) -> None:
        greeting = connection.peer_greeting
        self._tier = WIRE_CODEC.get_type_reader(SandboxTier)(greeting["tier"])
        self._agent = AgentManifest.model_validate(greeting["agent"])
        self._generation = wire_encoding.decode_generation(greeting["generation"])
        self._rules = wire_encoding.decode_rule_book(greeting["rules"])
        self._tool_host.attach_connection(connection)
        for session in tuple(self._sessions.values()):
            await session.reopen(connection)
        self._servers.reconnect_all_servers()

    def _receive_generation(self, message: Any) -> None:
        generation = wire_encoding.decode_generation(message["generation"], self._generation)
        if message["agent"] == self._agent_id:
            self._generation = generation
        for session in self._sessions.values():
            session.update_agent_generation(message["agent"], generation)

    def _receive_event(self, message: Any) -> None:
        if (session := self._sessions.get(message["session_id"])) is not None:
            session.dispatch_event(Event(**message))

    def _receive_loaded_tools(self, message: Any) -> None:
        if (session := self._sessions.get(message["session_id"])) is not None:
            session.update_loaded_tools(message["interaction"], message["steps"])

    def _receive_mode(self, body: Any) -> None:
        if (session := self._sessions.get(body["session_id"])) is not None:
            session.apply_mode_change(body["mode"])

    def _receive_stop(self, body: Any) -> None:
        session = self._sessions.get(body["session_id"])
        for listener in () if session is None else tuple(session.stop_listeners):
            listener()

    # ── the kernel ───────────────────────────────────────────────────────────────────────────────

    @property
    def workdir(self) -> str:
        return str(self._folders.workspace)

    @property
    def state_folder(self) -> str:
        return str(self._folders.workspace_state_folder)

    @property
    def config(self) -> MergedConfiguration:
        return self._config

    @property
    def sandbox_tier(self) -> SandboxTier:
        return self._tier

    @property
    def default_agent(self) -> AgentManifest:
        return self._agent

    @property
    def generation(self) -> Generation:
        assert self._generation is not None, "the lease holder sent its tools in the handshake"
        return self._generation

    @property
    def initial_rules(self) -> RuleBook:
        return self._rules

    @property
    def log(self) -> ClientLogService:
        return self._log

    @property
    def jobs(self) -> WorkspaceJobService:
        return make_protocol_proxy(
            WorkspaceJobService, WORKSPACE_JOBS_PREFIX, make_lease_holder_caller(self.ipc_client)
        )

    @property
    def approvals(self) -> RemoteApprovalService:
        return self._approvals

    @property
    def interrupted_calls(self) -> Sequence[InterruptedCall]:
        """The interrupted calls that this process found when it took over.

        Before that, only the lease holder knows them.
        """
        return self._successor.interrupted

    @property
    def mcp_servers(self) -> RemoteMcpServerManager:
        return self._servers

    async def reload_tools(self, tools: Iterable[Tool] | None = None) -> GenerationDiff:
        described = None
        if tools is not None:
            given = [found.tool for found in collect_tools_from_objects(tools)]
            described = describe_client_tools(given, self._secrets)
            self._tool_host.add_tools(given)
        body = {"tools": described, "offerings": self._tool_host.provider_descriptions}
        difference = WIRE_CODEC.get_type_reader(GenerationDiff)(
            await self.ipc_client.request("reload", body, repeatable=True)
        )
        if described is not None:
            self._described_tools = described
        return difference

    async def explain_call(
        self, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[RuleLike] = (), headless: bool = True
    ) -> PolicyExplanation:
        body = {
            "tool": tool,
            "arguments": dict(arguments),
            "rules": [rule_to_json_data(rule) for rule in normalise_rules(rules)],
            "headless": headless,
        }
        return WIRE_CODEC.get_type_reader(PolicyExplanation)(
            await self.ipc_client.request("explain", body, repeatable=True)
        )

    async def find_tools(
        self, query: str, *, limit: int = 10, timeout_s: float | None = None, keywords_only: bool = False
    ) -> ToolSearchResult:
        body: dict[str, Any] = {"query": query, "limit": limit, "by_words": keywords_only}
        body["patience_ms"] = None if timeout_s is None else round(timeout_s * 1000)
        return WIRE_CODEC.get_type_reader(ToolSearchResult)(
            await self.ipc_client.request("find", body, repeatable=True)
        )

    async def tool_statuses(self) -> Sequence[ToolStatus]:
        answer = await self.ipc_client.request("statuses", {}, repeatable=True)
        return WIRE_CODEC.get_type_codec(Sequence[ToolStatus]).read(answer)

    async def session(self, id: str | None = None, **options: Unpack[SessionOptions]) -> RemoteSession:
        options = normalise_session_options(options)
        if id is not None and (id in self._sessions or id in self._opening):
            raise UsageError(f"Session {id!r} is already open. Close or suspend it first.")
        session = RemoteSession(
            generate_session_id() if id is None else id,
            self.ipc_client,
            lambda: self.generation,
            options,
            self.workdir,
            self._remove_session,
        )
        self._opening[session.id] = session  # the lease holder may request approvals before it is open here
        try:
            await session.open()
        finally:
            del self._opening[session.id]
        self._add_session(session)
        session.on_child_opened = self._add_session
        return session

    def _add_session(self, session: RemoteSession) -> None:
        self._sessions[session.id] = session

    async def fork_session(self, id: str) -> str:
        # The id is chosen here, so that a repeated request creates only one session.
        return await self.ipc_client.request("fork", {"id": id, "forked": generate_session_id()}, repeatable=True)

    async def undo(
        self, call: str | None = None, session: str | None = None, *, dry_run: bool = False, overwrite: bool = False
    ) -> UndoReport:
        return await request_undo(self.ipc_client, call, session, dry_run=dry_run, overwrite=overwrite)

    async def close_session(self, id: str) -> None:
        asked = {"id": id}
        try:
            await self.ipc_client.request("close-session", asked)
        except ConnectionLost:
            try:
                await self.ipc_client.request("close-session", asked, repeatable=True)
            except UsageError:
                rows = select_session_rows(self._log.read_only_connection, "WHERE id = ?", (id,))
                if not rows or rows[0].closed_ns is None:  # otherwise the previous lease holder had closed it
                    raise

    def _remove_session(self, session: RemoteSession) -> None:
        self._sessions.pop(session.id, None)

    async def shut_down(self) -> None:
        """Suspend the sessions of this process, and disconnect."""
        try:
            await asyncio.gather(*(session.suspend_at_shutdown() for session in tuple(self._sessions.values())))
        finally:
            try:
                await self.ipc_client.aclose()
            finally:
                self._log.close()
                await self._tool_host.aclose()


class ClientLogService:
    """The commit log in a client process, which does not write it."""

    def __init__(self, folders: StateFolders, ipc_client: ReconnectingClient) -> None:
        self._folders = folders
        self._ipc_client = ipc_client
        self._connection: sqlite3.Connection | None = None

    @property
    def read_only_connection(self) -> sqlite3.Connection:
        """A connection that reads the records that the lease holder has made durable."""
        if self._connection is None:
            self._connection = open_reader(self._folders.database_file)
        return self._connection

    @property
    def reader(self) -> LogReader:
        return LogReader(self.read_only_connection)

    @property
    def unavailable_reason(self) -> str | None:
        return None  # the lease holder reports it in its answers

    async def flush(self) -> None:
        await self._ipc_client.request("flush", {}, repeatable=True)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class TakeoverCandidate:
    """A candidate for the lease, which holds the workspace in this process after it has taken over."""

    def __init__(self, open_local: OpenLocal, registrations: ClientProcessRegistrations) -> None:
        self._hold = open_local
        self._brought = registrations
        self._exit_stack = AsyncExitStack()
        self._ending: asyncio.Task[None] | None = None
        self.interrupted: Sequence[InterruptedCall] = ()

    async def take_over(self) -> bool:
        """Try to hold the workspace in this process, and return whether it does now.

        :raises StartError: if no process can hold it, for example because the state cannot be written
        """
        await self.aclose()  # of an earlier lease that another process has ended by taking over
        try:
            kernel = await self._exit_stack.enter_async_context(self._hold(self._brought))
        except WorkspaceAlreadyHeld:
            return False
        self.interrupted = kernel.interrupted_calls
        return True

    async def aclose(self) -> None:
        """Release the workspace if this process holds it.

        Cancelling the wait does not stop the release: it continues, and the next caller waits for it.
        """
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._exit_stack.aclose())
        ending = self._ending
        try:
            await asyncio.shield(ending)
        finally:
            if ending.done():
                self._ending = None


async def _collect_tool_secrets(
    registrations: ClientProcessRegistrations, settings: MergedConfiguration
) -> Mapping[str, str]:
    """Return the secrets for the registered tools.

    These are the secrets that were passed, and the configured ones that the tools declare or use in settings.
    """
    given, settings_of = dict(registrations.secrets or {}), map_settings_to_secrets(settings)
    specs = [found.tool.spec for found in collect_tools_from_objects(registrations.tools)]
    declared = {
        name for spec in specs for name in (*spec.secrets, *settings_of.get(spec.id, {}).values())
    } - given.keys()
    configured = settings.settings.secrets
    known = await resolve_secrets({name: configured[name] for name in sorted(declared & configured.keys())}, os.environ)
    return {**known.select(known.names), **given}


def _merge_tool_config(registrations: ClientProcessRegistrations, settings: MergedConfiguration) -> ToolConfig:
    """Return the tool settings that were passed, and the configured ones of the registered tools."""
    tools = {found.tool.spec.id for found in collect_tools_from_objects(registrations.tools)}
    merged: dict[str, dict[str, str]] = {}
    for tool in tools & settings.settings.tools.keys():
        config = settings.settings.tools[tool].config
        merged[tool] = {key: given for key, given in config.items() if isinstance(given, str)}
    for tool, config in registrations.tool_config.items():
        merged[tool] = {**merged.get(tool, {}), **config}
    return {tool: config for tool, config in merged.items() if config}


@asynccontextmanager
async def open_remote_kernel(
    held: WorkspaceAlreadyHeld,
    config: FolderPath | None,
    registrations: ClientProcessRegistrations,
    open_local: OpenLocal,
) -> AsyncGenerator[RemoteKernel]:
    """Connect to the lease holder until the block ends; see :func:`~handrail.kernel.workspace_opening.open_kernel`.

    :param held: the error with which this process failed to hold the workspace
    :param open_local: holds the workspace in this process if no other process does
    """
    settings = await asyncio.to_thread(
        configuration.load_configuration, config, folders=held.folders, flags=registrations.settings
    )
    if beyond := find_ineffective_setting_keys(settings):
        raise UsageError(
            f"Cannot set {', '.join(beyond)} in this process: {held.holder} holds this workspace, and its settings apply. "
            "Set the keys in handrail.toml, or start this process first."
        )
    registrations = replace(
        registrations,
        rules=(*(rule.entry for rule in settings.client_registration_rules), *registrations.rules),
        mode=registrations.mode or settings.process_wide_mode,
    )
    commands = [
        WatchdogSettings.model_validate(one.value)
        for one in settings.values
        if one.key == "watchdogs" and one.origin.kind == "flag"
    ]
    watchdogs = [ExternalWatchdog(one.command or (), timeout_ms=one.timeout_ms) for one in commands]
    for one in watchdogs:
        one.resolve_program()
    registrations = replace(registrations, watchdogs=(*registrations.watchdogs, *watchdogs))
    registrations = replace(
        registrations,
        secrets=await _collect_tool_secrets(registrations, settings),
        tool_config=_merge_tool_config(registrations, settings),
    )
    successor = TakeoverCandidate(
        open_local, ClientProcessRegistrations(registrations.frontend)
    )  # the lease holder receives everything else, even if it is this process
    with redact_logs(create_redactor(registrations.secrets)):
        kernel = RemoteKernel(held.folders, settings, registrations, successor)
        try:
            await kernel.ipc_client.wait_for_connection()
            yield kernel
        finally:
            try:
                await asyncio.shield(kernel.shut_down())
            finally:
                await successor.aclose()
