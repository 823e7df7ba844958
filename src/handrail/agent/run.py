"""One run of an agent: its usage, the dispatch of its calls, its reading of replies and its end.

An agent that stays alive has many runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from handrail.agent.budget import BudgetKind, Spent
from handrail.agent.conversation import Conversation
from handrail.agent.events import AgentIdle, LoopEvent, RunFinished, RunOutcome, RunStatus
from handrail.agent.model import Model, ModelRequest, ProviderError, StreamCut, Usage, UserMessage
from handrail.agent.pump import Heed, OutOfTime, ReplyPump, RetryPolicy, StoppedReading
from handrail.agent.stream import Reply, ReplyAssembly, ReplyTooLong
from handrail.contract.call import Answer, ProposedCall, call_id
from handrail.contract.errors import ErrorKind
from handrail.contract.session import Session, StopReason, Turn

# The dispatch of the calls of a reply to the session: the order, and the start of each.

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


Task = str | UserMessage | None
"""What a run is to work on; None is what is there already."""
_STOPPED: dict[StopReason, str] = {
    "user": "the user stopped the run",
    "shutdown": "the kernel is shutting down",
    "parent": "aborted by parent",
}


@dataclass(slots=True)
class Run:
    """The state of one run."""

    spent: Spent
    stopped: StopReason | None = None
    """Set once, by a stop or the deadline: nothing starts any more."""
    pump: ReplyPump[LoopEvent] | None = None
    dispatch: Dispatch | None = None
    """Of the last reply."""
    reading: ReplyAssembly | None = None
    """A reply that is not counted yet."""
    asked: int = 0
    """About how many tokens the request has that it answers."""
    calling: bool = False
    waiting: asyncio.Future[bool] | None = None
    """For what still runs and will tell of its end."""
    paused: bool = False
    """The provider has to be asked again, as it is, to go on with a tool of its own."""
    cuts: int = 0
    error: ProviderError | None = None
    """Why the last reply is not whole."""
    over: tuple[BudgetKind, str] | None = None
    """The budget that left no room for a call, and why."""
    text: str = ""
    parked: list[str] = field(default_factory=list[str])
    """What people are asked about calls, by the ids of the requests."""
    lost: str | None = None
    """Why the conversation cannot be kept."""
    ended: tuple[RunStatus, str, BudgetKind | None] | None = None

    @property
    def deadline(self) -> float | None:
        """When its time is used up, on the running loop's clock."""
        return self.spent.deadline

    def end(self, status: RunStatus, detail: str = "", budget: BudgetKind | None = None) -> None:
        """Decide how the run ends; the first reason counts."""
        if self.ended is None:
            self.ended = (status, detail, budget)

    def has_room(self, *, taking: bool = False) -> bool:
        """Whether there may be a further request. Where the budget has no room for one, the run ends.

        :param taking: it is made now, and counted
        """
        if self.stopped is None and self.ended is None:
            full = self.spent.take_turn() if taking else self.spent.full()
            if full is not None:
                self.end("budget", full[1], full[0])
        return self.stopped is None and self.ended is None

    def end_stopped(self) -> None:
        """End it as it was stopped."""
        budget: BudgetKind | None = "seconds" if self.stopped == "budget" else None
        self.end("budget" if budget else "cancelled", self.stop_text(), budget)

    def stop_text(self) -> str:
        assert self.stopped is not None
        return _STOPPED.get(self.stopped) or self.spent.out_of_time()

    def why_cut(self) -> str:
        """Why there is no more of a reply, as the model reads it: never the operator's text."""
        return "the connection to the provider was lost" if self.stopped is None else self.stop_text()

    def count(self, reply: Reply) -> None:
        """Count what the request and its reply took; that it was made is counted."""
        self.spent.count_tokens(self.asked, reply)
        self.reading = None

    def may_be_over(self) -> bool:
        """Whether the reply that is read may have used up the tokens: then its calls wait for its end, which tells."""
        reading = self.reading
        if reading is None or not self.spent.bounds_tokens:
            return False
        return self.spent.out_of_tokens(reading.usage or Usage(self.asked, 0)) is not None

    def admitted(self, call: ProposedCall) -> ProposedCall:
        """``call``, counted; with a fault where it may not start any more."""
        usage = None if self.reading is None else self.reading.usage
        room = self.spent.take_calls(1)
        if self.stopped is not None:
            return _refused(call, "limit" if self.stopped == "budget" else "cancelled", self.stop_text())
        if self.lost is not None:
            return _refused(call, "unavailable", f"the conversation cannot be kept ({self.lost})")
        if (why := self.spent.out_of_tokens(usage)) is not None:
            self.over = self.over or ("tokens", why)
        elif not room:
            why = self.spent.out_of_calls()
            self.over = self.over or ("calls", why)
        return call if why is None else _refused(call, "limit", why)

    def end_where_calls_wait(self) -> None:
        if self.parked:
            count = "a call waits" if len(self.parked) == 1 else f"{len(self.parked)} calls wait"
            self.end("parked", f"{count} for a person: {', '.join(self.parked)}")

    def judge(self, reply: Reply) -> None:
        """Whether the run ends with this reply, and how."""
        self.paused = reply.reason == "paused" and not reply.calls
        if reply.calls and self.over is None and (why := self.spent.out_of_tokens()) is not None:
            self.over = ("tokens", why)
        if self.over is not None:
            self.end("budget", self.over[1], self.over[0])
        if reply.calls or self.error is not None or self.stopped is not None or self.ended is not None:
            return
        if self.paused:
            return
        if reply.reason == "length":
            self.end(
                "length", "the reply met the model's output limit; ask for less at once, or allow more output tokens"
            )
        elif reply.reason == "refused":
            self.end("refused", "the model or its provider declined to answer")
        else:
            self.end("answered")

    def outcome(self) -> RunOutcome:
        assert self.ended is not None
        status, detail, budget = self.ended
        spent = self.spent
        return RunOutcome(
            status=status,
            text=self.text,
            detail=detail,
            turns=spent.turns,
            calls=spent.calls,
            input_tokens=spent.input_tokens,
            output_tokens=spent.output_tokens,
            tokens_estimated=spent.tokens_estimated,
            seconds=asyncio.get_running_loop().time() - spent.began,
            budget=budget,
            parked=tuple(self.parked),
        )


def _refused(call: ProposedCall, kind: ErrorKind, why: str) -> ProposedCall:
    return call._replace(fault=f"{why}; nothing was run", fault_kind=kind) if call.fault is None else call


# Reading one reply of a model, to its end or to the point where it breaks off. The run records how it ended.


async def read_reply(
    run: Run,
    assembly: ReplyAssembly,
    model: Model,
    request: ModelRequest,
    retry: RetryPolicy,
    heed: Heed[LoopEvent],
) -> AsyncGenerator[LoopEvent, None]:
    """Read one reply and tell of it; what cuts it short is left in ``run``.

    :param heed: puts each event into ``assembly``, whether or not anybody watches
    """
    run.error = None
    if run.stopped is not None:  # since the turn began, or while a watcher was told of it: nothing is asked any more
        return
    pump = run.pump = ReplyPump(model, request, retry, run.deadline, heed)
    try:
        async with aclosing(pump.events()) as events:
            async for event in events:
                yield event
        if assembly.reason is None:
            run.error = StreamCut("the reply ended without the provider's closing sign")
    except ReplyTooLong as error:
        run.error = StreamCut(str(error))
    except ProviderError as error:
        if assembly.reason is None:  # what goes wrong after the closing sign takes nothing from the reply
            run.error = error
    except OutOfTime:
        run.stopped = run.stopped or "budget"
    except StoppedReading:
        assert run.stopped is not None
    finally:
        run.pump = None
        await pump.aclose()


# An agent that stays alive: it waits for jobs that end, triggers that fire and messages from its user, and works on each.

LONGEST_PAUSE_S = 60.0
"""Pauses between attempts to go on, while the provider is away or calls wait for a person."""
LONGEST_AGAIN_S = 3600.0
"""Where nothing new has come, until the provider is asked again for what it gave no whole answer to: that may cost each time."""


class Worker(Protocol):
    """The part of an agent that a :class:`Life` needs."""

    @property
    def session(self) -> Session: ...

    def run(self, task: str | None) -> AsyncGenerator[LoopEvent, None]: ...

    async def unanswered(self) -> bool: ...

    def cancel(self, reason: StopReason = "user") -> None: ...


class Life:
    """The life of one agent, until it is stopped. Each piece of work is a run with a budget of its own."""

    def __init__(self, agent: Worker) -> None:
        self._agent = agent
        self._said: list[str] = []
        self._heard = asyncio.Event()
        self._stopped = False

    def say(self, text: str) -> None:
        """Take a user's message. The work under way is finished first."""
        self._said.append(text)
        self._heard.set()

    def stop(self, reason: StopReason) -> None:
        """Stop the work under way, and end."""
        self._stopped = True
        self._heard.set()
        self._agent.cancel(reason)

    async def events(self, task: str | None, ended: Callable[[], None]) -> AsyncGenerator[LoopEvent, None]:
        """Work on ``task``, then wait, and work on whatever comes; call ``ended`` at the end."""
        if task is not None:
            self._said.insert(0, task)
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield event
        finally:
            ended()

    async def _events(self) -> AsyncGenerator[LoopEvent, None]:
        in_vain, why = 0, None
        owed = await self._agent.unanswered()  # what a process before heard, and did not come to
        while not self._stopped:
            if not self._said and (in_vain or not owed):
                yield AgentIdle()
                await self._comes(in_vain, _again_s(in_vain, why) if owed else None)
                if self._stopped:
                    return
            if not self._said and not owed and not await self._is_told():
                continue
            text = self._said.pop(0) if self._said else None
            async with aclosing(self._agent.run(text)) as events:
                async for event in events:
                    yield event
                    if isinstance(event, RunFinished):
                        why = event.outcome.status
            in_vain = 0 if why == "answered" else in_vain + 1
            owed = why in ("failed", "parked") and await self._agent.unanswered()

    async def _is_told(self) -> bool:
        notices = self._agent.session.notices
        return notices is not None and bool(await notices.pending())

    async def _comes(self, in_vain: int, again_s: float | None) -> None:
        """Return when there is something to do: at once if something waits, later if the last attempts failed.

        :param again_s: seconds until what they left is tried again; None for never
        """
        self._heard.clear()
        if self._said or self._stopped:
            return
        pause_s = _pause_s(in_vain)
        if in_vain and await self._until(None, pause_s):
            return
        if again_s is not None and again_s <= pause_s:
            return
        notices = self._agent.session.notices
        left_s = None if again_s is None else again_s - pause_s
        await self._until(None if notices is None else notices.arrived(), left_s)

    async def _until(self, arrival: Coroutine[Any, Any, None] | None, seconds: float | None) -> bool:
        """Wait for a user's message, ``arrival``, or the time to pass. Gives whether it was a message."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._heard.wait())]
        if arrival is not None:
            waits.append(asyncio.ensure_future(arrival))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if len(waits) > 1 and waits[1].done():
                waits[1].result()
            return self._heard.is_set()
        finally:
            for wait in waits:
                wait.cancel()


def _pause_s(in_vain: int) -> float:
    """Seconds without any further attempt, after so many that failed."""
    return min(2.0 ** min(in_vain - 1, 32), LONGEST_PAUSE_S) if in_vain else 0.0


def _again_s(in_vain: int, why: RunStatus | None) -> float:
    """Seconds until what they left is tried again. Whether a person has answered costs nothing to look up."""
    return _pause_s(in_vain) if why == "parked" else min(2.0 ** min(in_vain - 1, 32), LONGEST_AGAIN_S)
