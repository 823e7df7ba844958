"""The state of one run: what it has used, why it stops, and how it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from handrail.agent.budget import BudgetKind, Spent, tokens_of
from handrail.agent.dispatch import Dispatch
from handrail.agent.events import LoopEvent, RunOutcome, RunStatus
from handrail.agent.model import ModelRequest, ProviderError, Usage, UserMessage
from handrail.agent.streaming.pump import ReplyPump
from handrail.agent.streaming.stream import Reply, ReplyAssembly
from handrail.contract.call import ProposedCall
from handrail.contract.errors import ErrorKind
from handrail.contract.session import StopReason

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
    request: ModelRequest | None = None
    """What it answers."""
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

    def count(self, request: ModelRequest, reply: Reply) -> None:
        """Count what a request and its reply took; that it was made is counted."""
        self.spent.count_tokens(request, reply)
        self.reading = None

    def may_be_over(self) -> bool:
        """Whether the reply that is read may have used up the tokens: then its calls wait for its end, which tells."""
        reading, request = self.reading, self.request
        if reading is None or request is None or not self.spent.bounds_tokens:
            return False
        return self.spent.out_of_tokens(reading.usage or Usage(tokens_of(request), 0)) is not None

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
