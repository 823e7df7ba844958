"""The dispatch of the calls of a reply to the session: the order, and the start of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from handrail.agent.conversation import Conversation
from handrail.agent.stream import Reply, ReplyAssembly
from handrail.contract.call import Answer, ProposedCall, call_id
from handrail.contract.session import Turn

MAX_KEPT_AGAIN = 16 * 1024 * 1024
"""Characters of one reply that are kept again and again while it grows; from there on its calls wait for its end."""


class Dispatch:
    """Starts the calls of one reply in their order, each when its block is closed and nothing that may still come makes it
    another; what is left at the reply's end, then.

    What there is of the reply is handed on to be kept before a call of it is proposed: whatever happens from then on, a run
    that goes on from here knows which calls there were. The session has no call take effect before that is durable, so
    nothing waits for it here.

    :param admit: counts a call that is about to start, and puts a fault on one that may not
    :param may_be_over: whether a budget may be used up, which the reply's end tells
    """

    def __init__(
        self,
        turn: Turn,
        session_id: str,
        conversation: Conversation,
        assembly: ReplyAssembly,
        admit: Callable[[ProposedCall], ProposedCall],
        may_be_over: Callable[[], bool],
    ) -> None:
        self._turn = turn
        self._session_id = session_id
        self._conversation = conversation
        self._assembly = assembly
        self._admit = admit
        self._may_be_over = may_be_over
        self._kept = 0
        self._weight = 0
        self.calls: list[ProposedCall] = []
        """Those that were handed on, as they were."""
        self._answers: list[asyncio.Future[Answer]] = []

    @property
    def in_flight(self) -> bool:
        """Whether a call that was handed on has no answer yet."""
        return any(not answer.done() for answer in self._answers)

    def go_on(self) -> Sequence[tuple[int, ProposedCall]]:
        """Start what can be started while the reply goes on. Gives it, with its positions."""
        first = len(self.calls)
        until = self._assembly.ready(first)
        if until == first and (coming := self._assembly.coming(first)) is not None:
            self._turn.look_ahead(coming.calls[first])
            self._conversation.draft(*self._proposal(coming))
        if until == first or self._weight > MAX_KEPT_AGAIN or self._may_be_over():
            return ()
        return self._start(self._assembly.so_far(until))

    def finish(self, reply: Reply) -> Sequence[tuple[int, ProposedCall]]:
        """The reply has ended. Start what is left of it; faulty calls are recorded and answered too."""
        return self._start(reply)

    def give_up(self) -> None:
        """Nobody reads the reply any more: of what was kept of it, no call stays without an answer. What was not kept is
        dropped."""
        if self._kept:
            self._start(self._assembly.so_far(self._kept))

    async def answers(self) -> list[Answer]:
        """The answers to all that was handed on, in call order, once each has one."""
        if self._answers:
            await asyncio.wait(self._answers)
        return [answer.result() for answer in self._answers]

    def _start(self, reply: Reply) -> Sequence[tuple[int, ProposedCall]]:
        first = len(self.calls)
        reply, ids = self._proposal(reply)
        self._conversation.propose(reply, ids)
        self._kept = max(self._kept, len(reply.calls))
        self._weight += self._assembly.units
        self._conversation.begin_to_save()
        for proposed in reply.calls[first:]:
            call = self._admit(proposed)
            self.calls.append(call)
            self._answers.append(asyncio.ensure_future(self._turn.submit(call)))
        return [*enumerate(self.calls)][first:]

    def _proposal(self, reply: Reply) -> tuple[Reply, Sequence[str]]:
        """The reply, with the ids of its calls. What has been started stays what it was, whatever the stream brought after its
        block was closed."""
        if self.calls:
            calls = (*self.calls, *reply.calls[len(self.calls) :])
            reply = Reply(reply.parts, calls, reply.reason, reply.usage)
        return reply, [call_id(self._session_id, self._turn.number, position) for position in range(len(reply.calls))]
