"""One model request with its calls, in the process that carries them out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from handrail.arbiter.arbiter import Arbiter, Reply
from handrail.arbiter.call import Call, Lane, LookedAhead
from handrail.catalog.interaction import Interaction
from handrail.contract.call import Answer, ProposedCall, call_id
from handrail.contract.doors.agents import usable
from handrail.contract.errors import UsageError
from handrail.contract.generation import Generation
from handrail.contract.session import Proposal
from handrail.contract.tool.native import NativeOffer
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.authority import ruled
from handrail.store.database.writer import Taken


class HeldTurn:
    """A model request with its calls, in the process that runs them. It pins one generation of tools."""

    __slots__ = ("_ahead", "_arbiter", "_calls", "_catalog", "_in_view", "_lane", "_submitted", "generation", "number")

    def __init__(self, arbiter: Arbiter, lane: Lane, generation: Generation, number: int, catalog: Interaction) -> None:
        self._arbiter = arbiter
        self._catalog = catalog
        self._in_view = catalog.turn(generation)
        self._lane = lane
        self.generation = generation
        self.number = number
        self._calls = 0
        self._ahead: LookedAhead | None = None
        """The validation of the call that may become the next one."""
        self._submitted: Reply | None = None

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools that the model sees: those that were loaded when the turn started."""
        return usable(self._catalog.specs(self.generation, self._in_view), self._lane.delegates)

    @property
    def index(self) -> str:
        """The index of the tools that are not loaded, for the system text."""
        return self._catalog.index(self.generation)

    @property
    def native(self) -> list[NativeOffer]:
        """The tools that the model's provider may run itself. Denied tools come with the reason."""
        return [
            ruled(spec, self._lane.rules, self._lane.named_hosts_of) for spec in self._catalog.native(self.generation)
        ]

    @property
    def proposed(self) -> int:
        """The number of calls that the turn has made."""
        return self._calls

    def look_ahead(self, call: Proposal) -> None:
        """Validate a call whose block is still open, so that it starts sooner when it is submitted.

        This has no effect and leaves no record. If another call is submitted next, the result is dropped.
        """
        known_as = call_id(self._lane.session_id, self.number, self._calls)
        self._ahead = self._arbiter.look_ahead(known_as, as_proposed(call), self._lane, self.generation)

    def submit(self, call: Proposal) -> asyncio.Task[Answer]:
        """Start the next call of a reply that is still being streamed.

        It has no side effects before the conversation so far is durable, and none if the conversation cannot be stored.
        """
        if self._submitted is None:
            self._submitted = Reply(self._arbiter, self._make_behind)
        return self._submitted.submit(as_proposed(call))

    async def call_all(self, calls: Iterable[Proposal]) -> Sequence[Answer]:
        """Run the calls of a whole reply and return exactly one answer each, in order."""
        proposals = [as_proposed(call) for call in calls]
        if len(proposals) == 1:  # the common case needs no separate task
            return [await self._arbiter.carry_out(self._make(proposals[0]))]
        reply = Reply(self._arbiter, self._make)
        for proposal in proposals:
            reply.submit(proposal)
        return await reply.answers()

    def _make_behind(self, proposed: ProposedCall) -> Call:
        ahead, self._ahead = self._ahead, None
        return self._make(proposed, self._lane.kept, ahead)

    def _make(self, proposed: ProposedCall, behind: Taken | None = None, looked: LookedAhead | None = None) -> Call:
        if self._lane.closed is not None:
            proposed = proposed._replace(fault=self._lane.closed, fault_kind="cancelled")
        known_as = call_id(self._lane.session_id, self.number, self._calls)
        self._calls += 1
        return self._arbiter.call(known_as, proposed, self._lane, self.generation, behind=behind, looked=looked)


def as_proposed(call: Proposal) -> ProposedCall:
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
