"""What a person is asked before a call may run, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from handrail.contract.runtime import Question


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """Shown whole: nobody approves what they cannot see.

    ``always`` is the rule that "for this session" would store, literals escaped, ready to show; None where
    no safe rule can be suggested.
    """

    call_id: str
    session_id: str
    tool_id: str
    arguments: Mapping[str, Any]
    arguments_hash: str
    definition_hash: str
    reason: str
    always: str | None = None


@dataclass(frozen=True, slots=True)
class ApprovalAnswer:
    """``once`` runs this call; ``session`` stores the shown rule for this session and runs it; ``reject`` tells the model ``message``."""

    choice: Literal["once", "session", "reject"]
    message: str = ""


class Attendant(Protocol):
    """A face's way to reach whoever can answer. A face without one is headless."""

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer: ...

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]]: ...
