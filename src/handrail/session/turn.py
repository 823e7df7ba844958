"""One model request with its calls, in the process that carries them out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from handrail.arbiter.arbiter import Arbiter, ReplyCallRunner
from handrail.arbiter.call_state import Call, Lane, PrevalidationResult
from handrail.catalog.loaded_tools import InteractionLoadedTools
from handrail.contract.calls_and_results import CallAnswer, ProposedCall, make_call_id
from handrail.contract.errors import UsageError
from handrail.contract.services.subagent_services import drop_delegation_tools
from handrail.contract.session_protocols import CallProposal
from handrail.contract.tool.provider_tools import ProviderToolOffer
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool_generation import Generation
from handrail.policy.call_authorizer import build_provider_tool_offer
from handrail.store.database.group_writer import QueuedWrite


class LocalTurn:
    """A model request with its calls, in the process that runs them. It pins one generation of tools."""

    __slots__ = (
        "_active_tools",
        "_arbiter",
        "_calls",
        "_catalog",
        "_lane",
        "_prevalidated",
        "_reply",
        "generation",
        "number",
    )

    def __init__(
        self, arbiter: Arbiter, lane: Lane, generation: Generation, number: int, catalog: InteractionLoadedTools
    ) -> None:
        self._arbiter = arbiter
        self._catalog = catalog
        self._active_tools = catalog.begin_turn(generation)
        self._lane = lane
        self.generation = generation
        self.number = number
        self._calls = 0
        self._prevalidated: PrevalidationResult | None = None
        """The validation of the call that may become the next one."""
        self._reply: ReplyCallRunner | None = None

    @property
    def tool_specs(self) -> list[ToolSpec]:
        """The tools that the model sees: those that were loaded when the turn started."""
        return drop_delegation_tools(
            self._catalog.loaded_tool_specs(self.generation, self._active_tools), self._lane.subagent_runner
        )

    @property
    def tool_index(self) -> str:
        """The index of the tools that are not loaded, for the system text."""
        return self._catalog.format_deferred_tool_index(self.generation)

    @property
    def provider_tools(self) -> list[ProviderToolOffer]:
        """The tools that the model's provider may run itself. Denied tools come with the reason."""
        return [
            build_provider_tool_offer(spec, self._lane.rules, self._lane.named_hosts_of)
            for spec in self._catalog.provider_tools(self.generation)
        ]

    @property
    def proposed_call_count(self) -> int:
        """The number of calls that the turn has made."""
        return self._calls

    def prepare_likely_call(self, call: CallProposal) -> None:
        """Validate a call whose block is still open, so that it starts sooner when it is submitted.

        This has no effect and leaves no record. If another call is submitted next, the result is dropped.
        """
        known_as = make_call_id(self._lane.session_id, self.number, self._calls)
        self._prevalidated = self._arbiter.prevalidate(known_as, to_proposed_call(call), self._lane, self.generation)

    def start_streamed_call(self, call: CallProposal) -> asyncio.Task[CallAnswer]:
        """Start the next call of a reply that is still being streamed.

        It has no side effects before the conversation so far is durable, and none if the conversation cannot be stored.
        """
        if self._reply is None:
            self._reply = ReplyCallRunner(self._arbiter, self._make_after_messages)
        return self._reply.start_next_call(to_proposed_call(call))

    async def call_all(self, calls: Iterable[CallProposal]) -> Sequence[CallAnswer]:
        """Run the calls of a whole reply and return exactly one answer each, in order."""
        proposals = [to_proposed_call(call) for call in calls]
        if len(proposals) == 1:  # the common case needs no separate task
            return [await self._arbiter.carry_out(self._make(proposals[0]))]
        reply = ReplyCallRunner(self._arbiter, self._make)
        for proposal in proposals:
            reply.start_next_call(proposal)
        return await reply.wait_for_answers()

    def _make_after_messages(self, proposed: ProposedCall) -> Call:
        ahead, self._prevalidated = self._prevalidated, None
        return self._make(proposed, self._lane.last_message_write, ahead)

    def _make(
        self, proposed: ProposedCall, behind: QueuedWrite | None = None, looked: PrevalidationResult | None = None
    ) -> Call:
        if self._lane.closed_reason is not None:
            proposed = proposed._replace(problem=self._lane.closed_reason, problem_kind="cancelled")
        known_as = make_call_id(self._lane.session_id, self.number, self._calls)
        self._calls += 1
        return self._arbiter.create_call(
            known_as, proposed, self._lane, self.generation, preceding_message=behind, prevalidated=looked
        )


def to_proposed_call(call: CallProposal) -> ProposedCall:
    """Return a proposal as a :class:`ProposedCall`.

    :raises UsageError: if it is not a call
    """
    if isinstance(call, ProposedCall):
        return call
    try:
        tool, arguments = call
    except ValueError:
        raise UsageError(
            f"A call is invalid: {call!r:.80}. Expected (tool, arguments), such as ('read', {{'path': 'a.txt'}})."
        ) from None
    return ProposedCall(tool, arguments)
