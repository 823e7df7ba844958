"""What waits for a person, in a process that joined: read from the database, answered by whoever holds the workspace."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from handrail.contract.approvals import Approval, ApprovalAnswer, ApprovalDesk, Choice, StoredRule
from handrail.contract.errors import ToolError
from handrail.ipc.wire.connection import ConnectionLost
from handrail.ipc.wire.operations import Asks
from handrail.store.tables.approvals import ApprovalReader


class JoinedApprovals:
    """Implements :class:`~handrail.contract.approvals.ApprovalDesk`.

    :param reader: reads the holder's database, which shows what is durable
    """

    def __init__(
        self, reader: Callable[[], ApprovalReader], holder: Asks, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._reader = reader
        self._holder = holder
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
        body = {"id": approval_id, "answer": asdict(answer), "by": by}
        return await self._answered("approvals.decide", body, approval_id, answer.choice)

    async def answer(self, approval_id: str, answers: Sequence[Sequence[str]], *, by: str) -> Approval:
        body = {"id": approval_id, "answers": [list(answer) for answer in answers], "by": by}
        return await self._answered("approvals.answer", body, approval_id, None)

    async def _answered(self, op: str, body: Mapping[str, Any], approval_id: str, choice: Choice | None) -> Approval:
        """A request is answered once. Where the holder went before it said so, the answer may be on record already."""
        try:
            return Approval.from_dict(await self._holder.request(op, body))
        except ConnectionLost:
            pass
        try:
            return Approval.from_dict(await self._holder.request(op, body, repeatable=True))
        except ToolError:
            found = self.get(approval_id)
            if found.pending or found.decided_by != body["by"] or found.choice != choice:
                raise
            return found

    def rules(self) -> list[StoredRule]:
        return self._reader().rules()

    async def forget_rule(self, rule_id: str) -> StoredRule:
        known = next((rule for rule in self.rules() if rule.id == rule_id), None)
        body = {"id": rule_id}
        try:
            return StoredRule(**await self._holder.request("approvals.forget", body))
        except ConnectionLost:
            pass
        try:
            return StoredRule(**await self._holder.request("approvals.forget", body, repeatable=True))
        except ToolError:
            if known is None or any(rule.id == rule_id for rule in self.rules()):
                raise
            return known  # the one that went had forgotten it


def handlers(desk: ApprovalDesk) -> Mapping[str, Callable[..., Awaitable[Any]]]:
    """What the holder does for those that joined, by its name among :data:`~handrail.ipc.holder.requests.REQUESTS`."""

    async def decide(id: str, answer: ApprovalAnswer, by: str) -> Any:
        return (await desk.decide(id, answer, by=by)).to_dict()

    async def answer(id: str, answers: Sequence[Sequence[str]], by: str) -> Any:
        return (await desk.answer(id, answers, by=by)).to_dict()

    async def forget(id: str) -> Any:
        return asdict(await desk.forget_rule(id))

    return {"approvals.decide": decide, "approvals.answer": answer, "approvals.forget": forget}
