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
"""The characters of one reply that may be stored again while it grows. Calls of a longer reply start at its end."""


class Dispatch:
    """A dispatcher that starts the calls of one reply in order, while the reply is still being streamed.

    A call starts when its block is closed and later parts of the reply cannot change it. The reply so far is queued for
    storage before a call of it is proposed, so that a later run knows which calls existed. The session lets no call take
    effect before that is durable, so the dispatcher does not wait for it.

    :param admit: counts a call that is about to start, and adds a fault if it may not start
    :param may_be_over: returns whether a budget may be used up, which only the end of the reply shows
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
        """The calls that were started, as they were then."""
        self._answers: list[asyncio.Future[Answer]] = []

    @property
    def in_flight(self) -> bool:
        """Whether a started call has no answer yet."""
        return any(not answer.done() for answer in self._answers)

    def go_on(self) -> Sequence[tuple[int, ProposedCall]]:
        """Start the calls that can start before the reply ends, and return them with their positions."""
        first = len(self.calls)
        until = self._assembly.ready(first)
        if until == first and (coming := self._assembly.coming(first)) is not None:
            self._turn.look_ahead(coming.calls[first])
            self._conversation.draft(*self._proposal(coming))
        if until == first or self._weight > MAX_KEPT_AGAIN or self._may_be_over():
            return ()
        return self._start(self._assembly.so_far(until))

    def finish(self, reply: Reply) -> Sequence[tuple[int, ProposedCall]]:
        """Start the remaining calls of the complete reply. Faulty calls are recorded and answered too."""
        return self._start(reply)

    def give_up(self) -> None:
        """Answer the calls that are stored, because the reply is no longer read. Other calls are dropped."""
        if self._kept:
            self._start(self._assembly.so_far(self._kept))

    async def answers(self) -> list[Answer]:
        """Wait for the answers to all started calls, and return them in call order."""
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
        """Return the reply with the ids of its calls. Started calls stay unchanged."""
        if self.calls:
            calls = (*self.calls, *reply.calls[len(self.calls) :])
            reply = Reply(reply.parts, calls, reply.reason, reply.usage)
        return reply, [call_id(self._session_id, self._turn.number, position) for position in range(len(reply.calls))]


Task = str | UserMessage | None
"""The task of a run; None continues with the conversation."""
_STOPPED: dict[StopReason, str] = {
    "user": "The user stopped the run.",
    "shutdown": "The kernel is shutting down.",
    "parent": "The parent agent stopped the run.",
}


@dataclass(slots=True)
class Run:
    """The state of one run."""

    spent: Spent
    stopped: StopReason | None = None
    """Set once, by a stop or at the deadline. No call starts afterwards."""
    pump: ReplyPump[LoopEvent] | None = None
    dispatch: Dispatch | None = None
    """The dispatcher of the last reply."""
    reading: ReplyAssembly | None = None
    """A reply that is not counted yet."""
    asked: int = 0
    """The estimated tokens of the current request."""
    calling: bool = False
    waiting: asyncio.Future[bool] | None = None
    """The wait for running jobs, which report their end."""
    paused: bool = False
    """Whether the provider needs the same request again to continue with one of its tools."""
    cuts: int = 0
    error: ProviderError | None = None
    """Why the last reply is incomplete."""
    over: tuple[BudgetKind, str] | None = None
    """The limit that left no room for a call, and why."""
    text: str = ""
    parked: list[str] = field(default_factory=list[str])
    """The ids of the approval requests that calls await."""
    lost: str | None = None
    """Why the conversation cannot be stored."""
    ended: tuple[RunStatus, str, BudgetKind | None] | None = None

    @property
    def deadline(self) -> float | None:
        """The time when the run ends, on the running loop's clock."""
        return self.spent.deadline

    def end(self, status: RunStatus, detail: str = "", budget: BudgetKind | None = None) -> None:
        """Decide how the run ends. The first reason counts."""
        if self.ended is None:
            self.ended = (status, detail, budget)

    def has_room(self, *, taking: bool = False) -> bool:
        """Return whether a further request may be sent. If the budget has no room, the run ends.

        :param taking: whether to count a request, because it is sent now
        """
        if self.stopped is None and self.ended is None:
            full = self.spent.take_turn() if taking else self.spent.full()
            if full is not None:
                self.end("budget", full[1], full[0])
        return self.stopped is None and self.ended is None

    def end_stopped(self) -> None:
        """End the run with the reason of its stop."""
        budget: BudgetKind | None = "seconds" if self.stopped == "budget" else None
        self.end("budget" if budget else "cancelled", self.stop_text(), budget)

    def stop_text(self) -> str:
        assert self.stopped is not None
        return _STOPPED.get(self.stopped) or self.spent.out_of_time()

    def why_cut(self) -> str:
        """Return why the reply is incomplete, for the model. The text never contains operator details."""
        return "The connection to the provider was lost." if self.stopped is None else self.stop_text()

    def count(self, reply: Reply) -> None:
        """Count the tokens of the request and its reply."""
        self.spent.count_tokens(self.asked, reply)
        self.reading = None

    def may_be_over(self) -> bool:
        """Return whether the current reply may have used up the tokens. Its calls then wait for its end."""
        reading = self.reading
        if reading is None or not self.spent.bounds_tokens:
            return False
        return self.spent.out_of_tokens(reading.usage or Usage(self.asked, 0)) is not None

    def admitted(self, call: ProposedCall) -> ProposedCall:
        """Count a call and return it, with a fault if it may not start."""
        usage = None if self.reading is None else self.reading.usage
        room = self.spent.take_calls(1)
        if self.stopped is not None:
            return _refused(call, "limit" if self.stopped == "budget" else "cancelled", self.stop_text())
        if self.lost is not None:
            return _refused(call, "unavailable", f"The conversation cannot be stored ({self.lost}).")
        if (why := self.spent.out_of_tokens(usage)) is not None:
            self.over = self.over or ("tokens", why)
        elif not room:
            why = self.spent.out_of_calls()
            self.over = self.over or ("calls", why)
        return call if why is None else _refused(call, "limit", why)

    def end_where_calls_wait(self) -> None:
        if self.parked:
            count = "1 call awaits" if len(self.parked) == 1 else f"{len(self.parked)} calls await"
            self.end("parked", f"{count} approval: {', '.join(self.parked)}.")

    def judge(self, reply: Reply) -> None:
        """Decide whether the run ends with this reply, and how."""
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
                "length",
                "The reply reached the model's output limit. Ask for less at once, or allow more output tokens.",
            )
        elif reply.reason == "refused":
            self.end("refused", "The model or its provider declined to answer.")
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
    return call._replace(fault=f"The call was not run. {why}", fault_kind=kind) if call.fault is None else call


# Reading one reply of a model, to its end or to the point where it breaks off. The run records how it ended.


async def read_reply(
    run: Run,
    assembly: ReplyAssembly,
    model: Model,
    request: ModelRequest,
    retry: RetryPolicy,
    heed: Heed[LoopEvent],
) -> AsyncGenerator[LoopEvent, None]:
    """Read one reply and yield its events. An interruption is recorded in ``run``.

    :param heed: adds each event to ``assembly``, even if no reader takes the events
    """
    run.error = None
    if run.stopped is not None:  # stopped since the turn started, or by a watcher of its event
        return
    pump = run.pump = ReplyPump(model, request, retry, run.deadline, heed)
    try:
        async with aclosing(pump.events()) as events:
            async for event in events:
                yield event
        if assembly.reason is None:
            run.error = StreamCut("The reply ended without the provider's end marker.")
    except ReplyTooLong as error:
        run.error = StreamCut(str(error))
    except ProviderError as error:
        if assembly.reason is None:  # the reply is complete, so a later failure does not matter
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
"""The longest pause between attempts while the provider is unavailable or calls await approval."""
LONGEST_AGAIN_S = 3600.0
"""The longest time until a request without a complete reply is sent again. Each request may cost money."""


class Worker(Protocol):
    """The part of an agent that :class:`Life` needs."""

    @property
    def session(self) -> Session: ...

    def run(self, task: str | None) -> AsyncGenerator[LoopEvent, None]: ...

    async def unanswered(self) -> bool: ...

    def cancel(self, reason: StopReason = "user") -> None: ...


class Life:
    """The loop of an agent that serves until it is stopped.

    Each piece of work is a run with a separate budget.
    """

    def __init__(self, agent: Worker) -> None:
        self._agent = agent
        self._said: list[str] = []
        self._heard = asyncio.Event()
        self._stopped = False

    def say(self, text: str) -> None:
        """Queue a user message. The current run finishes first."""
        self._said.append(text)
        self._heard.set()

    def stop(self, reason: StopReason) -> None:
        """Stop the current run and end the loop."""
        self._stopped = True
        self._heard.set()
        self._agent.cancel(reason)

    async def events(self, task: str | None, ended: Callable[[], None]) -> AsyncGenerator[LoopEvent, None]:
        """Work on ``task`` and then on whatever arrives, and yield the events. Call ``ended`` at the end."""
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
        owed = await self._agent.unanswered()  # notifications that an earlier process delivered and did not work on
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
        """Wait until there is work: at once if work is pending, later if the last attempts failed.

        :param again_s: seconds until the failed work is tried again; None for never
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
        """Wait for a user message, ``arrival`` or the end of the time, and return whether a message came."""
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
    """Return the seconds to wait after ``in_vain`` failed attempts."""
    return min(2.0 ** min(in_vain - 1, 32), LONGEST_PAUSE_S) if in_vain else 0.0


def _again_s(in_vain: int, why: RunStatus | None) -> float:
    """Return the seconds until unfinished work is tried again; looking for an approval costs nothing."""
    return _pause_s(in_vain) if why == "parked" else min(2.0 ** min(in_vain - 1, 32), LONGEST_AGAIN_S)
