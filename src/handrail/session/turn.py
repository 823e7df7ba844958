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
    """One model request with its calls; it pins one generation of the registry."""

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
        """Of what may become the next call."""
        self._submitted: Reply | None = None

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools that the model sees: those in view when the turn began."""
        return usable(self._catalog.specs(self.generation, self._in_view), self._lane.delegates)

    @property
    def index(self) -> str:
        """The index of the tools beyond :attr:`specs`, for the system text."""
        return self._catalog.index(self.generation)

    @property
    def native(self) -> list[NativeOffer]:
        """What the model's provider may carry out itself; a rule that denies the tool rules it out."""
        return [
            ruled(spec, self._lane.rules, self._lane.named_hosts_of) for spec in self._catalog.native(self.generation)
        ]

    @property
    def proposed(self) -> int:
        """How many calls it has made."""
        return self._calls

    def look_ahead(self, call: Proposal) -> None:
        """The next call of a reply may become this one, whose block is still open: work out what is the same whenever it is
        submitted. It changes nothing, is on no record, and is of no account if another call comes."""
        known_as = call_id(self._lane.session_id, self.number, self._calls)
        self._ahead = self._arbiter.look_ahead(known_as, as_proposed(call), self._lane, self.generation)

    def submit(self, call: Proposal) -> asyncio.Task[Answer]:
        """Begin the next call of a reply that is still being streamed. It has no side effect before the conversation so far is
        durable, and none if that cannot be stored."""
        if self._submitted is None:
            self._submitted = Reply(self._arbiter, self._make_behind)
        return self._submitted.submit(as_proposed(call))

    async def call_all(self, calls: Iterable[Proposal]) -> Sequence[Answer]:
        """Carry out the calls of a whole reply: exactly one answer each, in order."""
        proposals = [as_proposed(call) for call in calls]
        if len(proposals) == 1:  # the common case needs no task of its own
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
    """:raises UsageError: for what is no call"""
    if isinstance(call, ProposedCall):
        return call
    try:
        tool, arguments = call
    except ValueError:
        raise UsageError(
            f"{call!r:.80} is no call; expected (tool, arguments), as in ('read', {{'path': 'a.txt'}})"
        ) from None
    return ProposedCall(tool, arguments)
