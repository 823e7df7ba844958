"""What waits for a person, in a process that joined: read from the database, answered by whoever holds the workspace."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from handrail.contract.approvals import Approval, ApprovalAnswer, ApprovalDesk, Choice, StoredRule
from handrail.contract.errors import ToolError
from handrail.ipc.codec.interfaces import Holder, asking, proxy
from handrail.ipc.wire.connection import ConnectionLost
from handrail.store.tables.approvals import ApprovalReader

APPROVALS = "approvals."
"""Before the names of the methods of :class:`ApprovalDesk` that are asked of the holder."""


class JoinedApprovals:
    """Implements :class:`~handrail.contract.approvals.ApprovalDesk`.

    :param reader: reads the holder's database, which shows what is durable
    """

    def __init__(
        self, reader: Callable[[], ApprovalReader], holder: Holder, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._reader = reader
        self._once = proxy(ApprovalDesk, APPROVALS, asking(holder, repeatable=False))
        self._again = proxy(ApprovalDesk, APPROVALS, asking(holder))
        self._clock = clock

    def pending(self, session_id: str | None = None) -> list[Approval]:
        return self._reader().pending(self._clock(), session_id=session_id)

    def get(self, approval_id: str) -> Approval:
        found = self._reader().get(approval_id)
        if found is None:
            raise ToolError(
                f"there is no request {approval_id[:40]!r} in this workspace; handrail approve lists those that wait",
                kind="invalid_input",
            )
        return found

    async def decide(self, approval_id: str, answer: ApprovalAnswer, *, by: str) -> Approval:
        return await self._answered(
            lambda desk: desk.decide(approval_id, answer, by=by), approval_id, by, answer.choice
        )

    async def answer(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        return await self._answered(lambda desk: desk.answer(approval_id, answers, by=by), approval_id, by, None)

    async def _answered(
        self, ask: Callable[[ApprovalDesk], Awaitable[Approval]], approval_id: str, by: str, choice: Choice | None
    ) -> Approval:
        """A request is answered once. Where the holder went before it said so, the answer may be on record already."""
        try:
            return await ask(self._once)
        except ConnectionLost:
            pass
        try:
            return await ask(self._again)
        except ToolError:
            found = self.get(approval_id)
            if found.pending or found.decided_by != by or found.choice != choice:
                raise
            return found

    def rules(self) -> list[StoredRule]:
        return self._reader().rules()

    async def forget_rule(self, rule_id: str) -> StoredRule:
        known = next((rule for rule in self.rules() if rule.id == rule_id), None)
        try:
            return await self._once.forget_rule(rule_id)
        except ConnectionLost:
            pass
        try:
            return await self._again.forget_rule(rule_id)
        except ToolError:
            if known is None or any(rule.id == rule_id for rule in self.rules()):
                raise
            return known  # the one that went had forgotten it
