"""How a session is opened, whoever opens it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from handrail.contract.approvals import Attendant
from handrail.contract.doors.peer import Peer
from handrail.contract.doors.runtime import ClientContext
from handrail.contract.rules import RuleEntry
from handrail.session.context import Context
from handrail.session.family import attendant_for
from handrail.session.session import Under
from handrail.store.tables.sessions import SessionRow


@dataclass(frozen=True, slots=True)
class Opening:
    """
    :param context_of: that of another agent, with what the process brought that opens it
    :param attendant: the person who can be asked; a sub-agent's session uses its parent's, if they are passed on
    :param under: the parent and its call, for a sub-agent's session
    """

    context: Context
    context_of: Callable[[str], Context]
    face: str
    attendant: Attendant | None = None
    peer: Peer | None = None
    rules: Iterable[str | RuleEntry] = ()
    mode: str | None = None
    topic: str | None = None
    client: ClientContext | None = None
    under: Under | None = None

    @property
    def people(self) -> Attendant | None:
        return self.attendant if self.under is None else attendant_for(self.under)

    def row(self, session_id: str, now_ns: int) -> SessionRow:
        """The row by which it is stored."""
        row = SessionRow(
            session_id,
            now_ns,
            agent=self.context.agent,
            topic=self.topic,
            face=self.face,
            headless=self.people is None,
        )
        if self.under is None:
            return row
        told = self.under.delegation
        details: dict[str, Any] = {"description": told.description} if told.description else {}
        if told.metadata is not None:
            details["metadata"] = dict(told.metadata)
        return replace(row, details=details, under=self.under.parent.id, under_call=self.under.call.id)
