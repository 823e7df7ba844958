"""Running sub-agents: each delegated task gets a child session with a separate conversation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from handrail.agent.budget import Budget, Spent
from handrail.agent.events import RunOutcome
from handrail.agent.model import Model, Usage
from handrail.agent.stream import Reply
from handrail.contract.agent import AgentManifest
from handrail.contract.call import Result
from handrail.contract.doors.agents import Delegation
from handrail.contract.errors import ErrorKind, HandrailError, ToolError
from handrail.contract.session import Session

logger = logging.getLogger("handrail.agent")

OpenModel = Callable[[str], Model]
"""Opens a model by its name; see :func:`handrail.agent.providers.open_model`."""

Counted = Callable[[Budget, float], Spent]
"""Counts what a run uses of its budget, from when it began."""

Work = Callable[[Any, AgentManifest, Model, Counted, str], Awaitable[RunOutcome]]
"""Runs another agent on a task in a child session, with a model. Cancelling it stops that agent, and waits for it."""

ROLE = (
    "You work for another agent, which gave you this task and reads only your last message. You cannot ask it questions. "
    "End with one message that contains everything it needs: what you found or did, and what you could not do."
)
_KINDS: dict[str, ErrorKind] = {
    "budget": "limit",
    "cancelled": "cancelled",
    "failed": "backend",
    "parked": "unavailable",
}


class SharedSpent(Spent):
    """What a sub-agent uses of its own budget and, as well, of what is left of the agent's above it."""

    def __init__(self, budget: Budget, began: float, above: Spent) -> None:
        super().__init__(budget, began)
        self._above = above
        self._cut = above.deadline is not None and (self.deadline is None or above.deadline < self.deadline)
        """Whether the time of the agent above is the first to be used up."""
        if self._cut:
            self.deadline = above.deadline

    @property
    def bounds_tokens(self) -> bool:
        return super().bounds_tokens or self._above.bounds_tokens

    def count_turn(self) -> None:
        super().count_turn()
        self._above.count_turn()

    def count_tokens(self, asked: int, reply: Reply) -> None:
        super().count_tokens(asked, reply)
        self._above.count_tokens(asked, reply)

    def out_of_turns(self) -> str | None:
        return super().out_of_turns() or self._above.out_of_turns()

    def out_of_tokens(self, usage: Usage | None = None) -> str | None:
        return super().out_of_tokens(usage) or self._above.out_of_tokens(usage)

    def take_calls(self, count: int) -> int:
        return min(super().take_calls(count), self._above.take_calls(count))

    def out_of_calls(self) -> str:
        limit = self.budget.calls
        return super().out_of_calls() if limit is not None and self.calls > limit else self._above.out_of_calls()

    def out_of_time(self) -> str:
        return self._above.out_of_time() if self._cut else super().out_of_time()


class Subagents:
    """Implements :class:`~handrail.contract.doors.agents.Delegates` for one agent.

    :param session: whose calls hand work over
    :param model: what they work with, where their manifest names no other
    :param spent_on: what the run has used that a call belongs to, whose budget they share
    :param work: does a task in a session, to its end
    :param compact: compacts the agent's conversation as a call of its session asks for it
    :param models: opens the others
    """

    def __init__(
        self,
        session: Session,
        model: Model,
        spent_on: Callable[[str], Spent | None],
        work: Work,
        compact: Callable[[], Awaitable[Result]],
        models: OpenModel | None = None,
    ) -> None:
        self._session = session
        self._model = model
        self._spent_on = spent_on
        self._work = work
        self._compact = compact
        self._models = models
        self._at_work = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def at_work(self) -> bool:
        """Whether any works now, also after the session was suspended: its model is not to be closed yet."""
        return self._at_work > 0

    async def idle(self) -> None:
        """Return when none works."""
        await self._idle.wait()

    async def compact(self) -> Result:
        """See :meth:`handrail.contract.doors.agents.Delegates.compact`."""
        return await self._compact()

    async def run(self, call_id: str, delegation: Delegation) -> Result:
        """See :meth:`handrail.contract.doors.agents.Delegates.run`."""
        self._at_work += 1
        self._idle.clear()
        try:
            return await self._run(call_id, delegation)
        finally:
            self._at_work -= 1
            if not self._at_work:
                self._idle.set()

    async def _run(self, call_id: str, delegation: Delegation) -> Result:
        above = self._spent_on(call_id)  # first: the run that begins this may end any time
        session, manifest = await self._session.child(call_id, delegation)
        own: Model | None = None
        try:
            own = self._own_model(manifest)
            counted = _counted(above if manifest.budgets.shared else None)
            outcome = await self._work(session, manifest, own or self._model, counted, delegation.task)
        finally:
            try:
                if own is not None:
                    await own.aclose()
            finally:
                await session.suspend()
        return _result(delegation.agent, session.id, outcome)

    def _own_model(self, manifest: AgentManifest) -> Model | None:
        """The manifest's, where that is another than the one above.

        :raises ToolError: ``unavailable`` where it cannot be had
        """
        if manifest.model is None or (manifest.model == self._model.name and manifest.base_url is None):
            return None
        try:
            if self._models is not None:
                return self._models(manifest.model)
            from handrail.agent.providers import open_beside

            return open_beside(self._model, manifest.model, manifest.base_url)
        except HandrailError as error:
            logger.warning("the model of the agent %s cannot be had: %s", manifest.id, error)
            raise ToolError(
                f"the model of the agent {manifest.id!r} cannot be had here; its operator was told why. Hand the work to "
                "another agent, or do it yourself",
                kind="unavailable",
            ) from None


def _counted(above: Spent | None) -> Counted:
    def counted(budget: Budget, began: float) -> Spent:
        return Spent(budget, began) if above is None else SharedSpent(budget, began, above)

    return counted


def _result(agent: str, session_id: str, outcome: RunOutcome) -> Result:
    """As the model of the agent above reads it. What is the operator's to know is said to the operator."""
    told: dict[str, Any] = {
        "agent": agent,
        "session_id": session_id,
        "text": outcome.text,
        "turns": outcome.turns,
        "calls": outcome.calls,
    }
    if outcome.ok:
        return Result.output(told)
    why = outcome.detail
    if outcome.status == "failed":
        logger.warning("the sub-agent %s in session %s came to no end: %s", agent, session_id, outcome.detail)
        why = "its model gave no whole reply; its operator was told why"
    text = f"the sub-agent {agent} did not finish: {why}. What it said last is in 'text'"
    return Result.error(_KINDS.get(outcome.status, "failed"), text, told)
