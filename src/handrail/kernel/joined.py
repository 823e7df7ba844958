"""The kernel in a client process: the same interface, with the current lease holder behind it."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from handrail import config as configuration
from handrail.arbiter.output.redaction import redacted_logs, redactor_of
from handrail.config import Configuration, WatchdogSettings
from handrail.config.secrets import resolve
from handrail.config.settings import path_of
from handrail.contract.agent import AgentManifest
from handrail.contract.call import Event
from handrail.contract.doors.jobs import Findings, WorkspaceJobs
from handrail.contract.errors import UsageError
from handrail.contract.generation import Difference, Generation, ToolStatus
from handrail.contract.rules import AnyRule, as_data, rule_texts
from handrail.contract.sandbox import Tier
from handrail.contract.tool.settings import ToolConfig
from handrail.contract.tool.tool import Tool
from handrail.ipc.codec import mirror
from handrail.ipc.codec.interfaces import WIRE, WORKSPACE_JOBS, asking, proxy
from handrail.ipc.codec.mirror import describe, usable
from handrail.ipc.joiner.executing import Bench, Serving
from handrail.ipc.joiner.membership import Membership
from handrail.ipc.joiner.session import JoinedApprovals, JoinedSession
from handrail.ipc.wire.connection import Connection, ConnectionLost
from handrail.ipc.wire.framing import Message
from handrail.ipc.wire.operations import Operations
from handrail.kernel.agents import named_secrets
from handrail.kernel.held import Hold, is_brought, set_for_holding
from handrail.kernel.kernel import Folder, Kernel
from handrail.kernel.servers import JoinedServers
from handrail.policy.rules.rules import RuleBook
from handrail.policy.watchdogs.watchdog import ExternalWatchdog
from handrail.record.log import Interrupted
from handrail.record.reading import LogReader
from handrail.runtime.secrets import SecretStore
from handrail.session.context import Brought, SessionOptions, checked
from handrail.session.session import new_session_id
from handrail.store.database.database import open_reader
from handrail.store.folders import Folders
from handrail.store.lease import WorkspaceHeld
from handrail.store.tables.approvals import ApprovalReader
from handrail.store.tables.sessions import session_rows

if TYPE_CHECKING:
    from handrail.policy.explain import Explanation


class JoinedKernel(Kernel):
    """A kernel in a client process, created by :func:`join`."""

    def __init__(self, folders: Folders, config: Configuration, brought: Brought, successor: Successor) -> None:
        self._folders = folders
        self._config = config
        self._brought = brought
        self._successor = successor
        tools, secrets = [found.tool for found in usable(brought.tools)], brought.secrets or {}
        redactor = redactor_of(secrets)
        self._secrets = SecretStore(secrets).with_settings(named_secrets(config))
        self._bench = Bench(tools, self._secrets, brought.offerings, brought.watchdogs, redactor.text)
        self._described = describe(tools, self._secrets)
        self._sessions: dict[str, JoinedSession] = {}
        self._opening: dict[str, JoinedSession] = {}
        self._agent_named = brought.agent or config.settings.agent
        self._agent = AgentManifest()
        self._generation: Generation | None = None
        self._rules = RuleBook()
        self._tier = Tier("none", "")
        own = [one for one in config.values if one.origin.kind in ("environment", "flag") and is_brought(one)]
        self._tool_settings: dict[str, Any] = {}
        for layer in replace(config, values=tuple(own)).tool_settings:
            for tool, one in layer.tools.items():
                before = self._tool_settings.setdefault(tool, {})
                told = one.model_dump(mode="json", exclude_unset=True)
                before |= {**told, "config": {**before.get("config", {}), **told.get("config", {})}}
        of_catalog = any(path_of(one.key)[0] == "catalog" for one in own)
        self._catalog = config.settings.catalog.model_dump(mode="json") if of_catalog else None
        serving = Serving(lambda id: self._sessions.get(id) or self._opening.get(id))
        self._servers = servers = JoinedServers(folders, config, lambda: self.membership, lambda: self.generation)
        operations = Operations(
            {**self._bench.requests, **serving.requests, **servers.requests},
            {
                "event": self._event,
                "brought": self._brought_in,
                "generation": self._published,
                **self._bench.notices,
                **serving.notices,
            },
        )
        self.membership = Membership(folders, successor.take_over, self._hello, operations)
        self.membership.joined.append(self._joined)
        self._log = JoinedLog(folders, self.membership)
        self._approvals = JoinedApprovals(lambda: ApprovalReader(self._log.reading), self.membership)

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    def _hello(self) -> Message:
        brought = self._brought
        return {
            "face": brought.face,
            "agent": self._agent_named,
            "rules": [as_data(rule) for rule in brought.rules],
            "mode": brought.mode,
            "configured_mode": self._config.settings.mode,
            "secrets": dict(brought.secrets or {}),
            "tool_config": {tool: dict(config) for tool, config in brought.tool_config.items()},
            "tool_settings": self._tool_settings,
            "catalog": self._catalog,
            "tools": self._described,
            "offerings": self._bench.told_offerings,
            "watchdogs": self._bench.told_watchdogs,
        }

    async def _joined(self, connection: Connection) -> None:
        told = connection.about
        self._tier = WIRE.reader_of(Tier)(told["tier"])
        self._agent = AgentManifest.model_validate(told["agent"])
        self._generation = mirror.generation_of(told["generation"])
        self._rules = mirror.rules_of(told["rules"])
        self._bench.attach(connection)
        for session in tuple(self._sessions.values()):
            await session.open_again(connection)
        self._servers.connect_again()

    def _published(self, told: Any) -> None:
        generation = mirror.generation_of(told["generation"], self._generation)
        if told["agent"] == self._agent_named:
            self._generation = generation
        for session in self._sessions.values():
            session.published(told["agent"], generation)

    def _event(self, told: Any) -> None:
        session = self._sessions.get(told["session_id"])
        if session is not None:
            session.happened(Event(**told))

    def _brought_in(self, told: Any) -> None:
        session = self._sessions.get(told["session_id"])
        if session is not None:
            session.brought_in(told["interaction"], told["steps"])

    # ── the kernel ───────────────────────────────────────────────────────────────────────────────

    @property
    def workdir(self) -> str:
        return str(self._folders.workspace)

    @property
    def state_folder(self) -> str:
        return str(self._folders.own)

    @property
    def config(self) -> Configuration:
        return self._config

    @property
    def tier(self) -> Tier:
        return self._tier

    @property
    def agent(self) -> AgentManifest:
        return self._agent

    @property
    def generation(self) -> Generation:
        assert self._generation is not None, "the lease holder sent its tools in the handshake"
        return self._generation

    @property
    def rules(self) -> RuleBook:
        return self._rules

    @property
    def log(self) -> JoinedLog:
        return self._log

    @property
    def jobs(self) -> WorkspaceJobs:
        return proxy(WorkspaceJobs, WORKSPACE_JOBS, asking(self.membership))

    @property
    def approvals(self) -> JoinedApprovals:
        return self._approvals

    @property
    def interrupted(self) -> Sequence[Interrupted]:
        """The interrupted calls that this process found when it took over.

        Before that, only the lease holder knows them.
        """
        return self._successor.interrupted

    @property
    def mcp(self) -> JoinedServers:
        return self._servers

    async def reload(self, tools: Iterable[Tool] | None = None) -> Difference:
        described = None
        if tools is not None:
            given = [found.tool for found in usable(tools)]
            described = describe(given, self._secrets)
            self._bench.bring(given)
        body = {"tools": described, "offerings": self._bench.told_offerings}
        difference = WIRE.reader_of(Difference)(await self.membership.request("reload", body, repeatable=True))
        if described is not None:
            self._described = described
        return difference

    async def explain(
        self, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[AnyRule] = (), headless: bool = True
    ) -> Explanation:
        from handrail.policy.explain import Explanation

        body = {
            "tool": tool,
            "arguments": dict(arguments),
            "rules": [as_data(rule) for rule in rule_texts(rules)],
            "headless": headless,
        }
        return WIRE.reader_of(Explanation)(await self.membership.request("explain", body, repeatable=True))

    async def find(
        self, query: str, *, limit: int = 10, patience_s: float | None = None, by_words: bool = False
    ) -> Findings:
        body: dict[str, Any] = {"query": query, "limit": limit, "by_words": by_words}
        body["patience_ms"] = None if patience_s is None else round(patience_s * 1000)
        return WIRE.reader_of(Findings)(await self.membership.request("find", body, repeatable=True))

    async def tool_statuses(self) -> Sequence[ToolStatus]:
        told = await self.membership.request("statuses", {}, repeatable=True)
        return WIRE.form_of(Sequence[ToolStatus]).read(told)

    async def session(self, id: str | None = None, **options: Unpack[SessionOptions]) -> JoinedSession:
        options = checked(options)
        if id is not None and (id in self._sessions or id in self._opening):
            raise UsageError(f"Session {id!r} is already open. Close or suspend it first.")
        session = JoinedSession(
            new_session_id() if id is None else id,
            self.membership,
            lambda: self.generation,
            options,
            self.workdir,
            self._forget,
        )
        self._opening[session.id] = session  # the lease holder may request approvals before it is open here
        try:
            await session.open()
        finally:
            del self._opening[session.id]
        self._adopt(session)
        session.adopted = self._adopt
        return session

    def _adopt(self, session: JoinedSession) -> None:
        self._sessions[session.id] = session

    async def fork(self, id: str) -> str:
        # The id is chosen here, so that a repeated request creates only one session.
        return await self.membership.request("fork", {"id": id, "forked": new_session_id()}, repeatable=True)

    async def close_session(self, id: str) -> None:
        asked = {"id": id}
        try:
            await self.membership.request("close-session", asked)
        except ConnectionLost:
            try:
                await self.membership.request("close-session", asked, repeatable=True)
            except UsageError:
                rows = session_rows(self._log.reading, "WHERE id = ?", (id,))
                if not rows or rows[0].closed_ns is None:  # otherwise the previous lease holder had closed it
                    raise

    def _forget(self, session: JoinedSession) -> None:
        self._sessions.pop(session.id, None)

    async def shut_down(self) -> None:
        """Suspend the sessions of this process, and disconnect."""
        try:
            await asyncio.gather(*(session.end_with_kernel() for session in tuple(self._sessions.values())))
        finally:
            try:
                await self.membership.aclose()
            finally:
                self._log.close()
                await self._bench.aclose()


class JoinedLog:
    """The commit log in a client process, which does not write it."""

    def __init__(self, folders: Folders, membership: Membership) -> None:
        self._folders = folders
        self._membership = membership
        self._reading: sqlite3.Connection | None = None

    @property
    def reading(self) -> sqlite3.Connection:
        """A connection that reads the records that the lease holder has made durable."""
        if self._reading is None:
            self._reading = open_reader(self._folders.database)
        return self._reading

    @property
    def reader(self) -> LogReader:
        return LogReader(self.reading)

    @property
    def refusal(self) -> str | None:
        return None  # the lease holder reports it in its answers

    async def flush(self) -> None:
        await self._membership.request("flush", {}, repeatable=True)

    def close(self) -> None:
        if self._reading is not None:
            self._reading.close()


class Successor:
    """A candidate for the lease, which holds the workspace in this process after it has taken over."""

    def __init__(self, hold: Hold, brought: Brought) -> None:
        self._hold = hold
        self._brought = brought
        self._held = AsyncExitStack()
        self._ending: asyncio.Task[None] | None = None
        self.interrupted: Sequence[Interrupted] = ()

    async def take_over(self) -> bool:
        """Try to hold the workspace in this process, and return whether it does now.

        :raises StartError: if no process can hold it, for example because the state cannot be written
        """
        await self.aclose()  # of an earlier lease that another process has ended by taking over
        try:
            kernel = await self._held.enter_async_context(self._hold(self._brought))
        except WorkspaceHeld:
            return False
        self.interrupted = kernel.interrupted
        return True

    async def aclose(self) -> None:
        """Release the workspace if this process holds it.

        Cancelling the wait does not stop the release: it continues, and the next caller waits for it.
        """
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._held.aclose())
        ending = self._ending
        try:
            await asyncio.shield(ending)
        finally:
            if ending.done():
                self._ending = None


async def _secrets_of(brought: Brought, settings: Configuration) -> Mapping[str, str]:
    """Return the secrets for the registered tools.

    These are the secrets that were passed, and the configured ones that the tools declare or use in settings.
    """
    given, settings_of = dict(brought.secrets or {}), named_secrets(settings)
    specs = [found.tool.spec for found in usable(brought.tools)]
    declared = {
        name for spec in specs for name in (*spec.secrets, *settings_of.get(spec.id, {}).values())
    } - given.keys()
    configured = settings.settings.secrets
    known = await resolve({name: configured[name] for name in sorted(declared & configured.keys())}, os.environ)
    return {**known.chosen(known.names), **given}


def _config_of(brought: Brought, settings: Configuration) -> ToolConfig:
    """Return the tool settings that were passed, and the configured ones of the registered tools."""
    tools = {found.tool.spec.id for found in usable(brought.tools)}
    merged: dict[str, dict[str, str]] = {}
    for tool in tools & settings.settings.tools.keys():
        config = settings.settings.tools[tool].config
        merged[tool] = {key: given for key, given in config.items() if isinstance(given, str)}
    for tool, config in brought.tool_config.items():
        merged[tool] = {**merged.get(tool, {}), **config}
    return {tool: config for tool, config in merged.items() if config}


@asynccontextmanager
async def join(
    held: WorkspaceHeld, config: Folder | None, brought: Brought, hold: Hold
) -> AsyncGenerator[JoinedKernel]:
    """Connect to the lease holder until the block ends; see :func:`~handrail.kernel.opening.open_kernel`.

    :param held: the error with which this process failed to hold the workspace
    :param hold: holds the workspace in this process if no other process does
    """
    settings = await asyncio.to_thread(configuration.load, config, folders=held.folders, flags=brought.settings)
    if beyond := set_for_holding(settings):
        raise UsageError(
            f"Cannot set {', '.join(beyond)}: {held.holder} holds this workspace, and its settings apply. "
            "Set it in handrail.toml, or start this process first."
        )
    brought = replace(
        brought,
        rules=(*(rule.entry for rule in settings.brought_rules), *brought.rules),
        mode=brought.mode or settings.given_mode,
    )
    commands = [
        WatchdogSettings.model_validate(one.value)
        for one in settings.values
        if one.key == "watchdogs" and one.origin.kind == "flag"
    ]
    watchdogs = [ExternalWatchdog(one.command or (), timeout_ms=one.timeout_ms) for one in commands]
    for one in watchdogs:
        one.find()
    brought = replace(brought, watchdogs=(*brought.watchdogs, *watchdogs))
    brought = replace(brought, secrets=await _secrets_of(brought, settings), tool_config=_config_of(brought, settings))
    successor = Successor(
        hold, Brought(brought.face)
    )  # the lease holder receives everything else, even if it is this process
    with redacted_logs(redactor_of(brought.secrets)):
        kernel = JoinedKernel(held.folders, settings, brought, successor)
        try:
            await kernel.membership.connection()
            yield kernel
        finally:
            try:
                await asyncio.shield(kernel.shut_down())
            finally:
                await successor.aclose()
