"""An open workspace, as a program sees it, in whichever process its calls are carried out.

The first process that opens a workspace *holds* it: :mod:`handrail.kernel.held` puts the rooms together there. Every
further one of the same user *joins* it over a socket. Both have a :class:`Kernel`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from handrail.config import Configuration
from handrail.contract.agent import AgentManifest
from handrail.contract.approvals import ApprovalDesk
from handrail.contract.doors.jobs import Findings, WorkspaceJobs
from handrail.contract.generation import Difference, Generation, ToolStatus
from handrail.contract.rules import AnyRule
from handrail.contract.sandbox import Tier
from handrail.contract.session import Session
from handrail.contract.tool.tool import Tool
from handrail.policy.rules.rules import RuleBook
from handrail.record.log import Interrupted
from handrail.record.reading import LogReader
from handrail.session.context import SessionOptions

if TYPE_CHECKING:
    from handrail.kernel.servers import McpServers
    from handrail.policy.explain import Explanation

Folder = str | Path


class LogDoor(Protocol):
    """What there is of the commit log for those who only look."""

    @property
    def reader(self) -> LogReader:
        """Reads what is durable."""
        ...

    @property
    def refusal(self) -> str | None:
        """Why the log takes no records just now, or None."""
        ...

    async def flush(self) -> None:
        """Return when everything recorded so far is durable.

        :raises LogUnavailable: when it cannot be
        """
        ...


class Kernel(ABC):
    """An open workspace: its tools, its log, its sessions. Made by :func:`~handrail.kernel.opening.open_kernel`; bound to
    one event loop."""

    @property
    @abstractmethod
    def workdir(self) -> str:
        """The workspace's canonical folder."""

    @property
    @abstractmethod
    def jobs(self) -> WorkspaceJobs:
        """The calls that outlive their turn, of every session and process, and those that could."""

    @property
    @abstractmethod
    def approvals(self) -> ApprovalDesk:
        """What waits for a person, of every session and process, and the way to answer it."""

    @property
    @abstractmethod
    def state_folder(self) -> str:
        """Where this workspace's log and database are."""

    @property
    @abstractmethod
    def config(self) -> Configuration:
        """What is configured, as this process reads it."""

    @property
    @abstractmethod
    def tier(self) -> Tier:
        """What holds the programs that calls start."""

    @property
    @abstractmethod
    def agent(self) -> AgentManifest:
        """Whose sessions this process opens unless they name another."""

    @property
    @abstractmethod
    def generation(self) -> Generation:
        """The tools there are now for the sessions of this process. A turn keeps those there were when it began."""

    @property
    @abstractmethod
    def rules(self) -> RuleBook:
        """The rules that every session of this process starts with."""

    @property
    @abstractmethod
    def log(self) -> LogDoor:
        """The workspace's record."""

    @property
    @abstractmethod
    def interrupted(self) -> Sequence[Interrupted]:
        """Calls that had begun when the last holder ended: their outcome is unknown and they are not run again."""

    @abstractmethod
    async def reload(self, tools: Iterable[Tool] | None = None) -> Difference:
        """Look through the sources of tools again and publish what they have as the next generation, in one step.

        Turns and calls that have begun go on with the tools they began with. The log names the new generation.

        :param tools: instead of the tools given in code before; None leaves those as they are
        :raises LoadError: with every fault; the current generation stays
        """

    @abstractmethod
    async def explain(
        self, tool: str, arguments: Mapping[str, Any], *, rules: Iterable[AnyRule] = (), headless: bool = True
    ) -> Explanation:
        """How a call would be decided in a new session, by what, and what would change it. Runs and records nothing.

        :raises ToolError: ``unknown_tool``, ``unavailable`` or ``invalid_input``, as the call itself would be answered
        """

    @abstractmethod
    async def find(
        self, query: str, *, limit: int = 10, patience_s: float | None = None, by_words: bool = False
    ) -> Findings:
        """Which of this process's tools fit a need, by words and, where that is installed, by meaning. Runs nothing and
        brings nothing into anybody's view.

        :param patience_s: how long to wait where a search by meaning is not possible yet; None for as long as loading usually
            takes, at most 20 seconds
        :param by_words: load no model for it
        :raises ToolError: ``invalid_input`` for a query without words
        """

    @abstractmethod
    async def tool_statuses(self) -> Sequence[ToolStatus]:
        """The status of each tool of :attr:`generation` with the reason why it is not ready, and of what foreign sources offer
        beside them: tools that could not be taken, and servers that nobody can reach."""

    @abstractmethod
    async def session(self, id: str | None = None, **options: Unpack[SessionOptions]) -> Session:
        """Open a session, or one that was open before, by its ``id``: what was said in it, its tools' state, what was
        answered for it and its folders come back. One that ends with its process or is left by
        :meth:`~handrail.contract.session.Session.suspend` can be opened again; ``close`` is for good.

        :param agent: another agent than this kernel's
        :param headless: nobody can be asked; ignored when there is an ``attendant``
        :param attendant: how to reach the person who can be asked
        :param peer: the client at the face, where it can do more than call: what ``runtime.peer`` of its tools reaches
        :param rules: further rules of this session only, as long as it is open
        :param mode: another mode than this kernel's, as long as it is open
        :param topic: what it is about, for its record
        :param client: where the person who talks to it is, and when
        :raises UsageError: when it is open already, or another agent's
        """

    @abstractmethod
    async def fork(self, id: str) -> str:
        """Begin another session with a copy of what was said in one, of its tools' state and of what it has read of
        files. Grants, answered rules and folders are not copied. Gives the new one's id, to be opened by.

        :raises UsageError: when there is no such session, or it was closed
        """

    @abstractmethod
    async def close_session(self, id: str) -> None:
        """Close a suspended session for good: its messages, its tools' state and its folders are removed.

        :raises UsageError: when there is no such session, or it is open or closed
        """

    @property
    @abstractmethod
    def mcp(self) -> McpServers:
        """The upstream MCP servers, and the way to connect more."""
