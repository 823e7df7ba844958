"""Running sub-agents: each delegated task gets a child session with a separate conversation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from handrail.agent.model_protocol import Model, TokenUsage
from handrail.agent.reply_assembly import ModelReply
from handrail.agent.run_budget import Budget, RunUsage
from handrail.agent.run_events import RunOutcome
from handrail.contract.agent_manifest import AgentManifest
from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ErrorKind, HandrailError, ToolError
from handrail.contract.services.subagent_services import SubagentTask
from handrail.contract.session_protocols import Session

logger = logging.getLogger("handrail.agent")

OpenModel = Callable[[str], Model]
"""Opens a model by its name; see :func:`handrail.agent.providers.open_model`."""

MakeUsage = Callable[[Budget, float], RunUsage]
"""Creates the usage counter of a run, given its budget and its start time."""

RunSubagent = Callable[[Any, AgentManifest, Model, MakeUsage, str], Awaitable[RunOutcome]]
"""Runs another agent on a task in a child session. Cancelling it stops that agent and waits for it."""

ROLE = (
    "You work for another agent, which gave you this task and reads only your last message. You cannot ask it questions. "
    "End with one message that contains everything it needs: what you found or did, and what you could not do."
)
_KINDS: dict[str, ErrorKind] = {
    "budget": "limit",
    "cancelled": "cancelled",
    "failed": "backend",
    "empty": "backend",
    "awaiting_approval": "unavailable",
}


class SubagentRunUsage(RunUsage):
    """The usage of a sub-agent, counted both for its own budget and for the budget of its parent agent."""

    def __init__(self, budget: Budget, started_at: float, above: RunUsage) -> None:
        super().__init__(budget, started_at)
        self._above = above
        self._cut = above.deadline is not None and (self.deadline is None or above.deadline < self.deadline)
        """Whether the deadline of the parent agent comes first."""
        if self._cut:
            self.deadline = above.deadline

    @property
    def has_token_limit(self) -> bool:
        return super().has_token_limit or self._above.has_token_limit

    def count_turn(self) -> None:
        super().count_turn()
        self._above.count_turn()

    def count_tokens(self, asked: int, reply: ModelReply) -> None:
        super().count_tokens(asked, reply)
        self._above.count_tokens(asked, reply)

    def explain_spent_turns(self) -> str | None:
        return super().explain_spent_turns() or self._above.explain_spent_turns()

    def explain_spent_tokens(self, usage: TokenUsage | None = None) -> str | None:
        return super().explain_spent_tokens(usage) or self._above.explain_spent_tokens(usage)

    def count_proposed_calls(self, count: int) -> int:
        return min(super().count_proposed_calls(count), self._above.count_proposed_calls(count))

    def explain_spent_calls(self) -> str:
        limit = self.budget.calls
        return (
            super().explain_spent_calls()
            if limit is not None and self.calls > limit
            else self._above.explain_spent_calls()
        )

    def explain_spent_time(self) -> str:
        return self._above.explain_spent_time() if self._cut else super().explain_spent_time()


class SubagentDispatcher:
    """The sub-agents of one agent.

    Implements :class:`~handrail.contract.services.subagent_services.SubagentRunner`.

    :param session: the session whose calls delegate
    :param model: the model of sub-agents whose manifest names none
    :param usage_of_call: returns the usage of the run to which a call belongs, whose budget the sub-agent shares
    :param run_subagent: runs a task in a session to its end
    :param compact: compacts the agent's conversation for a call of its session
    :param models: opens the models that manifests name
    """

    def __init__(
        self,
        session: Session,
        model: Model,
        usage_of_call: Callable[[str], RunUsage | None],
        run_subagent: RunSubagent,
        compact: Callable[[], Awaitable[Result]],
        models: OpenModel | None = None,
    ) -> None:
        self._session = session
        self._model = model
        self._usage_of_call = usage_of_call
        self._run_subagent = run_subagent
        self._compact = compact
        self._models = models
        self._at_work = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_busy(self) -> bool:
        """Whether a sub-agent works now, even if the session was suspended.

        The model must not be closed before.
        """
        return self._at_work > 0

    async def wait_until_idle(self) -> None:
        """Wait until no sub-agent works."""
        await self._idle.wait()

    async def compact_conversation(self) -> Result:
        """Compact the agent's conversation."""
        return await self._compact()

    async def run(self, call_id: str, delegation: SubagentTask) -> Result:
        """Run a sub-agent for a call and return its result.

        :param call_id: the id of the call that delegates
        :raises ToolError: if the agent or its model is not available
        """
        self._at_work += 1
        self._idle.clear()
        try:
            return await self._run(call_id, delegation)
        finally:
            self._at_work -= 1
            if not self._at_work:
                self._idle.set()

    async def _run(self, call_id: str, delegation: SubagentTask) -> Result:
        above = self._usage_of_call(call_id)  # first, because the run may end at any time
        session, manifest = await self._session.open_child(call_id, delegation)
        own: Model | None = None
        try:
            own = self._open_own_model(manifest)
            counted = _usage_factory(above if manifest.budgets.shared else None)
            outcome = await self._run_subagent(session, manifest, own or self._model, counted, delegation.task)
        finally:
            try:
                if own is not None:
                    await own.aclose()
            finally:
                await session.suspend()
        return _outcome_to_result(delegation.agent, session.id, outcome)

    def _open_own_model(self, manifest: AgentManifest) -> Model | None:
        """Open the model of a manifest, or return None if the parent's model is used.

        :raises ToolError: ``unavailable`` if the model cannot be opened
        """
        if manifest.model is None or (manifest.model == self._model.name and manifest.base_url is None):
            return None
        try:
            if self._models is not None:
                return self._models(manifest.model)
            from handrail.agent.providers import open_subagent_model

            return open_subagent_model(self._model, manifest.model, manifest.base_url)
        except HandrailError as error:
            logger.warning("The model of agent %s cannot be opened: %s", manifest.id, error)
            raise ToolError(
                f"The model of agent {manifest.id!r} is not available. Use another agent, or do the work yourself.",
                kind="unavailable",
            ) from None


def _usage_factory(above: RunUsage | None) -> MakeUsage:
    def counted(budget: Budget, began: float) -> RunUsage:
        return RunUsage(budget, began) if above is None else SubagentRunUsage(budget, began, above)

    return counted


def _outcome_to_result(agent: str, session_id: str, outcome: RunOutcome) -> Result:
    """Return an outcome as the result for the parent agent's model. Details for the operator are logged."""
    fields: dict[str, Any] = {
        "agent": agent,
        "session_id": session_id,
        "text": outcome.text,
        "turns": outcome.turns,
        "calls": outcome.calls,
    }
    if outcome.ok:
        return Result.output(fields)
    why = outcome.detail
    if outcome.status == "failed":
        logger.warning("Sub-agent %s in session %s failed: %s", agent, session_id, outcome.detail)
        why = "Its model returned no complete reply."
    text = f"Sub-agent {agent} did not finish. {why} `text` has its last message. Continue from there, or do the work yourself."
    return Result.error(_KINDS.get(outcome.status, "failed"), text, fields)
