"""The people at a process that joined, as the holder asks them."""

from __future__ import annotations

from collections.abc import Sequence

from handrail.contract.approvals import ApprovalAnswer, ApprovalRequest
from handrail.contract.doors.runtime import Question
from handrail.ipc.codec import mirror
from handrail.ipc.holder.requests import a_decision, some_answers
from handrail.ipc.wire.connection import Connection, ConnectionLost


class RemotePerson:
    """Whoever sits at a process that joined. When that is gone, nobody is here now: what was asked is parked.

    :param session_id: of the session that it opened; the calls of its sub-agents are asked about by another's id
    :param shared: several clients share that session
    """

    def __init__(self, connection: Connection, session_id: str, *, shared: bool = False) -> None:
        self.shared = shared
        self._connection = connection
        self._session_id = session_id

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        try:
            body = {**mirror.of_request(request), "people_of": self._session_id}
            return a_decision(await self._connection.request("approve", body))
        except ConnectionLost:
            return ApprovalAnswer("later")

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        asked = [mirror.of_question(question) for question in questions]
        body = {"session": session_id, "questions": asked, "people_of": self._session_id}
        try:
            said = some_answers(await self._connection.request("answer", body))
        except ConnectionLost:
            return None
        return None if said is None else [list(one) for one in said]
