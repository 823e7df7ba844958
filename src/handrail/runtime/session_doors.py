"""What a call reaches of its session through its runtime: the values that its tool keeps, and the people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from handrail.contract.doors.runtime import Question
from handrail.contract.errors import ToolError

if TYPE_CHECKING:
    from handrail.runtime.surface import Doors, Surroundings

NOBODY_TO_ASK = "question is unavailable: no user is attached to this session"
"""The one fixed text of a headless session's ``question``."""


@dataclass(frozen=True, slots=True)
class ToolState:
    """One tool's values in one session."""

    around: Surroundings
    tool_id: str

    async def get(self, key: str) -> Any:
        return await self.around.values.get(self.around.session_id, self.tool_id, key)

    async def put(self, key: str, value: Any) -> None:
        await self.around.values.put(self.around.session_id, self.tool_id, key, value)


@dataclass(frozen=True, slots=True)
class SessionPeople:
    around: Surroundings
    doors: Doors

    async def answer(self, questions: Sequence[Question]) -> list[list[str]]:
        if (known := self.doors.answered(questions)) is not None:
            return known
        if self.around.attendant is None:
            raise ToolError(NOBODY_TO_ASK, kind="unavailable")
        return await self.doors.ask(questions)
