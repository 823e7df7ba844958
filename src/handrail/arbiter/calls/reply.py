"""The calls of one model reply: entered in its order, run side by side where locks allow, answered in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from handrail.arbiter.arbiter import Arbiter
from handrail.arbiter.calls.call import Call
from handrail.arbiter.eager import begin_at_once
from handrail.contract.call import Answer, ProposedCall


class Reply:
    """Takes calls as they are known, so that a stream may submit each one when its block closes.

    A call with side effects takes its place in the lock queue only after all earlier ones have taken theirs or
    were refused: an open question to a person holds later side effects back. A read waits for an earlier call
    only where the two conflict.
    """

    __slots__ = ("_arbiter", "_calls", "_make", "_tasks")

    def __init__(self, arbiter: Arbiter, make: Callable[[ProposedCall], Call]) -> None:
        self._arbiter = arbiter
        self._make = make
        self._calls: list[Call] = []
        self._tasks: list[asyncio.Task[Answer]] = []

    def submit(self, proposed: ProposedCall) -> asyncio.Task[Answer]:
        """Begin ``proposed`` as the next call of the reply: on return it has gone as far as it comes without a wait."""
        call = self._make(proposed)
        loop = asyncio.get_running_loop()
        call.entered = loop.create_future()
        predecessors = tuple(self._calls)
        self._calls.append(call)
        return begin_at_once(loop, self._arbiter.carry_out(call, predecessors), self._tasks.append)

    async def answers(self) -> list[Answer]:
        """All answers, in call order, once every call has one.

        :raises asyncio.CancelledError: if cancelled, after every call was stopped and is on record
        """
        owed: asyncio.CancelledError | None = None
        while pending := [task for task in self._tasks if not task.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError as cancellation:
                owed = cancellation
                for call in self._calls:
                    if call.job is None:  # jobs outlive their turn
                        call.execution.stop("user")
        if owed is not None:
            raise owed
        return [task.result() for task in self._tasks]
