"""What those who let processes in, and serve them, need of the kernel that holds the workspace."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from handrail.contract.approvals import ApprovalDesk
from handrail.contract.doors.jobs import Findings
from handrail.contract.generation import ToolStatus
from handrail.contract.rules import Mode, RuleEntry
from handrail.ipc.wire.framing import Message
from handrail.policy.explain import Explanation
from handrail.record.log import CommitLog
from handrail.session.context import Brought, Context, Opening
from handrail.session.session import HeldSession, Under

Handler = Callable[..., Awaitable[Any]]
"""Takes the fields of a request by name."""


class Host(Protocol):
    """What is needed of the kernel that holds the workspace."""

    @property
    def log(self) -> CommitLog: ...

    @property
    def approvals(self) -> ApprovalDesk: ...

    def welcome(self) -> Message:
        """What a process that joins is told of this kernel."""
        ...

    def context_of(self, agent: str, brought: Brought, configured: Mode | None) -> Context:
        """:raises LoadError: with every fault"""
        ...

    def learn(self, secrets: Mapping[str, str]) -> None:
        """:raises ValueError: for a value that cannot be redacted"""
        ...

    async def open_session(self, opening: Opening, id: str | None = None) -> HeldSession: ...

    async def open_child(
        self, context_of: Callable[[str], Context], under: Under, face: str, id: str | None = None
    ) -> HeldSession:
        """A sub-agent's session; see :meth:`handrail.contract.session.Session.child`."""
        ...

    async def explain_in(
        self,
        context: Context,
        tool: str,
        arguments: Mapping[str, Any],
        *,
        rules: Iterable[str | RuleEntry],
        headless: bool,
    ) -> Explanation: ...

    def statuses_in(self, context: Context) -> Sequence[ToolStatus]: ...

    async def find_in(self, context: Context, query: str, **how: Any) -> Findings: ...

    def further_operations(self) -> Mapping[str, Handler]:
        """What else every process that joined may ask for, by its name among the requests."""
        ...
