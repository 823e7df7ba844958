"""An open workspace from the view of a program, independent of the process that executes its calls.

The first process that opens a workspace *holds* it: :mod:`handrail.kernel.local_kernel` assembles the rooms there. Every further
process of the same user connects to it over a socket. Both have a :class:`Kernel`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from handrail.config import MergedConfiguration
from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.approval_requests import ApprovalService
from handrail.contract.rule_forms import RuleLike
from handrail.contract.sandbox_protocol import SandboxTier
from handrail.contract.services.job_and_tool_services import ToolSearchResult, WorkspaceJobService
from handrail.contract.session_protocols import Session
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import Generation, GenerationDiff, ToolStatus
from handrail.contract.undo_reports import UndoReport
from handrail.policy.rules.rules_and_modes import RuleBook
from handrail.record.commit_log import InterruptedCall
from handrail.record.log_reader import LogReader
from handrail.session.session_context import SessionOptions

if TYPE_CHECKING:
    from handrail.kernel.upstream_mcp_servers import McpServerManager
    from handrail.policy.decision_explanation import PolicyExplanation

FolderPath = str | Path


class CommitLogReadService(Protocol):
    """Read access to the commit log."""

    @property
    def reader(self) -> LogReader:
        """A reader of the durable records."""
        ...

    @property
    def unavailable_reason(self) -> str | None:
        """The reason why the log takes no records at the moment, or None."""
        ...

    async def flush(self) -> None:
        """Wait until all records so far are durable.

        :raises LogUnavailable: if they cannot be written
        """


class Kernel(ABC):
    """An open workspace: its tools, its log and its sessions.

    :func:`~handrail.kernel.workspace_opening.open_kernel` creates it. It is bound to one event loop.
    """

    @property
    @abstractmethod
    def workdir(self) -> str:
        """The canonical path of the workspace."""

    @property
    @abstractmethod
    def jobs(self) -> WorkspaceJobService:
        """The background jobs of all sessions and processes, and the calls that can become jobs."""

    @property
    @abstractmethod
    def approvals(self) -> ApprovalService:
        """The approval requests of all sessions and processes, and the methods that answer them."""

    @property
    @abstractmethod
    def state_folder(self) -> str:
        """The folder with the log and the database of this workspace."""

    @property
    @abstractmethod
    def config(self) -> MergedConfiguration:
        """The configuration as this process reads it."""

    @property
    @abstractmethod
    def sandbox_tier(self) -> SandboxTier:
        """The sandbox tier of the programs that calls start."""

    @property
    @abstractmethod
    def default_agent(self) -> AgentManifest:
        """The default agent of the sessions that this process opens."""

    @property
    @abstractmethod
    def generation(self) -> Generation:
        """The current tools for the sessions of this process. A turn keeps the tools with which it started."""

    @property
    @abstractmethod
    def initial_rules(self) -> RuleBook:
        """The initial rules of every session of this process."""

    @property
    @abstractmethod
    def log(self) -> CommitLogReadService:
        """The commit log of the workspace."""

    @property
    @abstractmethod
    def interrupted_calls(self) -> Sequence[InterruptedCall]:
        """The calls that were running when the last lease holder ended.

        Their outcome is unknown; they are not run again.
        """

    @abstractmethod
    async def reload_tools(self, tools: Iterable[Tool] | None = None) -> GenerationDiff:
        """Load the sources of tools again, and publish their tools as the next generation in one step.

        Running turns and calls continue with their tools. The log records the new generation.

        :param tools: replace the tools that were passed in code; None keeps them
        :raises LoadError: with all faults; the current generation stays
        """

    @abstractmethod
    async def explain_call(
        self, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[RuleLike] = (), headless: bool = True
    ) -> PolicyExplanation:
        """Explain how a call would be decided in a new session, and what would change the decision.

        It runs and records nothing.

        :param rules: further rules of the session
        :param headless: whether the session has no user who can be asked
        :raises ToolError: ``unknown_tool``, ``unavailable`` or ``invalid_input``, like the answer to the call itself
        """

    @abstractmethod
    async def find_tools(
        self, query: str, *, limit: int = 10, timeout_s: float | None = None, keywords_only: bool = False
    ) -> ToolSearchResult:
        """Search the tools of this process by keywords and, if installed, by meaning.

        It runs and loads no tool.

        :param limit: the maximum number of results
        :param timeout_s: the maximum wait in seconds until a search by meaning is possible; None: the usual time to load the
            model, at most 20 seconds
        :param keywords_only: search by keywords only, and load no model
        :raises ToolError: ``invalid_input`` if the query has no words
        """

    @abstractmethod
    async def tool_statuses(self) -> Sequence[ToolStatus]:
        """Return the status of each tool of :attr:`generation`, with the reason if it is not ready.

        The list includes rejected tools of third-party sources and unreachable servers.
        """

    @abstractmethod
    async def session(self, id: str | None = None, **options: Unpack[SessionOptions]) -> Session:
        """Open a new session, or reopen an earlier one.

        A reopened session has its conversation, its tools' state, its approvals and its folders. A session that ended with its
        process, or by :meth:`~handrail.contract.session_protocols.Session.suspend`, can be reopened. ``close`` is permanent.

        :param id: the id of the session to reopen; None for a new one
        :param agent: the agent of the session instead of this kernel's
        :param headless: deny what requires approval; ignored if there is an ``approval_handler``
        :param approval_handler: asks the user for approvals and answers
        :param client: the client, if it supports requests: ``runtime.client`` of the session's tools sends them to it
        :param client_info: the client's name and version, for the record
        :param rules: further rules of this session, while it is open
        :param mode: the mode instead of this kernel's, while it is open
        :param topic: the topic of the session, for its record
        :param user_context: the location, time and device of the user
        :raises UsageError: if it is already open, or belongs to another agent
        """

    @abstractmethod
    async def fork_session(self, id: str) -> str:
        """Copy a session, and return the id of the copy, which is not opened.

        The copy has the conversation, the tools' state and the list of read files. Grants, answered rules and folders are not
        copied.

        :raises UsageError: if the session does not exist or is closed
        """

    @abstractmethod
    async def undo(
        self, call: str | None = None, session: str | None = None, *, dry_run: bool = False, overwrite: bool = False
    ) -> UndoReport:
        """Give back what a call or a session changed in the workspace; without either, the last call.

        A path that has changed since is a conflict and stays as it is. An undo has an id and can itself be undone.

        :param call: the id of a call, of a job, or of an earlier undo
        :param session: the id of a session; its sub-agents are included
        :param dry_run: only report what would happen
        :param overwrite: whether paths that have changed since are given back, too
        :raises ToolError: ``unavailable`` if nothing was kept, ``invalid_input`` for an unknown id, ``conflict`` if the call
            still runs, ``timeout`` if other calls hold the workspace
        :raises LogUnavailable: if the undo cannot be recorded
        """

    @abstractmethod
    async def close_session(self, id: str) -> None:
        """Close a suspended session permanently, and remove its messages, its tools' state and its folders.

        :raises UsageError: if the session does not exist, or is open or closed
        """

    @property
    @abstractmethod
    def mcp_servers(self) -> McpServerManager:
        """The upstream MCP servers, and the method that connects further ones."""
