"""A session and those of the sub-agents that its calls begin: what bounds a child, what ends with its parent, and what goes on
until that is opened again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from handrail.contract.approvals import ApprovalAnswer, ApprovalRequest, Attendant
from handrail.contract.doors.runtime import Question
from handrail.contract.errors import ToolError
from handrail.runtime.secrets import SecretStore
from handrail.session.session import Under

if TYPE_CHECKING:
    from handrail.session.session import HeldSession

T = TypeVar("T")

NOT_NOW = "nobody is there now, and a sub-agent's call cannot wait for them"


def secrets_for(child: SecretStore, under: Under) -> SecretStore:
    """The secrets of a child: those that its parent has and passes on."""
    parent = under.parent
    names = parent.lane.around.secrets.names & set(parent.family.manifest.delegable.secrets)
    return child.only(names, f"the agent {parent.family.manifest.id} does not pass it on to its sub-agents")


def attendant_for(under: Under) -> Attendant | None:
    """The people of the parent, where it passes them on."""
    if under.parent.lane.attendant is None or not under.parent.family.manifest.delegable.presence:
        return None
    return _AskedFromBelow(under)


def named_hosts_of(under: Under) -> str | None:
    """The nearest agent above a child that passes on hosts by their names alone; None where none does."""
    parent = under.parent.family.manifest
    hosts = parent.delegable.net.hosts
    return under.parent.lane.named_hosts_of if hosts is None or "*" in hosts else parent.id


def origin_of(agent: str, under: Under) -> str:
    """Who asks, for the people of the session at the top."""
    is_top = under.parent.family.under is None
    of = f"session {under.parent.id}" if is_top else under.parent.lane.origin
    about = f" ({' '.join(under.delegation.description.split())[:80]})" if under.delegation.description.strip() else ""
    return f"sub-agent {agent}{about} of {of}"


@dataclass(frozen=True, slots=True)
class _AskedFromBelow:
    """The people of the session at the top of the tree, asked by one below. Its calls are not parked: nobody would take them up
    again. Those that are made in the background wait where they are while that session is suspended or its people put them
    off. Every other door can answer them meanwhile, and whoever opens the session again is asked."""

    under: Under

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        async def asked(people: Attendant) -> ApprovalAnswer | None:
            answer = await people.approve(request)
            return None if answer.choice == "later" else answer

        return await self._answered(asked) or ApprovalAnswer("reject", NOT_NOW)

    async def answer(self, session_id: str, questions: Sequence[Question]) -> list[list[str]] | None:
        answers = await self._answered(lambda people: people.answer(session_id, questions))
        if answers is None:
            raise ToolError(NOT_NOW, kind="unavailable")
        return answers

    async def _answered(self, ask: Callable[[Attendant], Awaitable[T | None]]) -> T | None:
        """What they answer; None where nobody is there now, and none is waited for."""
        waits = False
        while True:
            top = self.under.top
            people = None if top.closed else top.people
            if people is not None and (answer := await _unless_left(ask(people), top)) is not None:
                return answer
            alone = people is None and not top.closed and not waits  # it was headless when this was asked
            if alone or not self.under.in_background:
                return None
            waits = True
            await top.family.taken_up.wait()


async def _unless_left(asking: Awaitable[T | None], session: HeldSession) -> T | None:
    """What is answered, unless the session whose people are asked ends before: a yes that comes too late is none."""
    asked = asyncio.ensure_future(asking)
    left = asyncio.ensure_future(session.family.left.wait())
    try:
        await asyncio.wait((asked, left), return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if not left.done() else None
    finally:
        left.cancel()
        if not asked.cancel() and not asked.cancelled():
            asked.exception()  # looked at
