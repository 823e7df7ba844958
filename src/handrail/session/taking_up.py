"""Earlier calls whose answers were not heard: told by what is on record, or taken up where they are parked, as one reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from handrail.arbiter.arbiter import Arbiter
from handrail.arbiter.calls.call import Call, Lane
from handrail.arbiter.calls.reply import Reply
from handrail.arbiter.execution import StopReason
from handrail.contract.call import Answer
from handrail.contract.generation import Generation
from handrail.session.parked import parked_calls
from handrail.session.recalling import recalled


class TakingUp:
    """The earlier calls of one session.

    :param generation: gives the tools that they are resolved by now
    """

    def __init__(self, arbiter: Arbiter, lane: Lane, generation: Callable[[], Generation]) -> None:
        self._arbiter = arbiter
        self._lane = lane
        self._generation = generation
        self._under_way: list[_Stopped] = []

    async def waiting(self) -> list[Call]:
        """Those that are parked, in the order in which they were asked about; none is taken up.

        :raises LogUnavailable: when the log cannot tell
        """
        return await parked_calls(self._arbiter, self._lane, self._generation())

    async def resume(self) -> list[Answer]:
        """See :meth:`handrail.contract.session.Session.resume_parked`."""
        stopped = self._begin()
        try:
            return await self._carried_out(await self.waiting(), stopped)
        finally:
            self._under_way.remove(stopped)

    async def answers(self, call_ids: Sequence[str]) -> list[Answer]:
        """See :meth:`handrail.contract.session.Session.recall_all`."""
        stopped = self._begin()
        try:
            arbiter, lane, generation = self._arbiter, self._lane, self._generation()
            parked = {call.id: call for call in await parked_calls(arbiter, lane, generation, call_ids)}
            # Read before anything runs: a log that cannot be read leaves every call as it is.
            found = {
                known_as: await recalled(
                    arbiter.log, arbiter.shaper, generation, lane.session_id, known_as, arbiter.jobs.tree
                )
                for known_as in call_ids
                if known_as not in parked
            }
            in_order = [parked[known_as] for known_as in dict.fromkeys(call_ids) if known_as in parked]
            found |= {answer.call_id: answer for answer in await self._carried_out(in_order, stopped)}
            return [found[known_as] for known_as in call_ids]
        finally:
            self._under_way.remove(stopped)

    def stop(self, reason: StopReason) -> None:
        """Stop those that are not in flight yet because they are still looked up."""
        for stopped in self._under_way:
            stopped.reason = stopped.reason or reason

    def _begin(self) -> _Stopped:
        stopped = _Stopped()
        self._under_way.append(stopped)
        return stopped

    async def _carried_out(self, calls: Sequence[Call], stopped: _Stopped) -> list[Answer]:
        if not calls:
            return []
        reason = stopped.reason if self._lane.closed is None else "shutdown"  # they go on waiting
        following = iter(calls)
        reply = Reply(self._arbiter, lambda _: next(following))
        for call in calls:
            if reason is not None:
                call.execution.stop(reason)
            self._lane.running.setdefault(call.id, call)  # so that what is stopped from here on reaches it
            reply.submit(call.proposed)
        return await reply.answers()


class _Stopped:
    """Why calls are not to run that are still looked up; None while they are."""

    __slots__ = ("reason",)

    def __init__(self) -> None:
        self.reason: StopReason | None = None
