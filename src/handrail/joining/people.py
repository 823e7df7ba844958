"""The people at a process that joined, as the holder asks them."""

from __future__ import annotations

from collections.abc import Sequence

from handrail.contract.people import ApprovalAnswer, ApprovalRequest
from handrail.contract.runtime import Question
from handrail.joining import mirror
from handrail.joining.requests import a_decision, some_answers
from handrail.joining.wire import Connection, ConnectionLost


class RemotePerson:
    """Whoever sits at a process that joined. When that is gone, nobody is here now: what was asked is parked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        try:
            return a_decision(await self._connection.request("approve", mirror.of_request(request)))
        except ConnectionLost:
            return ApprovalAnswer("later")

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        body = {"session": session_id, "questions": [mirror.of_question(question) for question in questions]}
        try:
            said = some_answers(await self._connection.request("answer", body))
        except ConnectionLost:
            return None
        return None if said is None else [list(one) for one in said]
