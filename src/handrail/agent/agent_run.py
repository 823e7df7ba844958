"""One run of an agent: its usage, the dispatch of its calls, its reading of replies and its end.

An agent that stays alive has many runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from handrail.agent.conversation import Conversation
from handrail.agent.model_protocol import (
    Model,
    ModelRequest,
    ProviderBlock,
    ProviderError,
    ReplyStreamCut,
    TokenUsage,
    UserMessage,
)
from handrail.agent.reply_assembly import ModelReply, ReplyAssembler, ReplyTooLong
from handrail.agent.reply_stream import (
    EventHandler,
    ReplyDeadlineExceeded,
    ReplyReadingStopped,
    ReplyStreamTask,
    RetryPolicy,
)
from handrail.agent.run_budget import BudgetKind, RunUsage
from handrail.agent.run_events import AgentEvent, AgentIdle, RunFinished, RunOutcome, RunStatus
from handrail.contract.calls_and_results import CallAnswer, ProposedCall, make_call_id
from handrail.contract.errors import ErrorKind
from handrail.contract.session_protocols import Session, StopReason, Turn
from handrail.contract.struct import Struct, field

# The dispatch of the calls of a reply to the session: the order, and the start of each.

MAX_KEPT_AGAIN = 16 * 1024 * 1024
"""The characters of one reply that may be stored again while it grows. Calls of a longer reply start at its end."""


class ReplyCallDispatcher:
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
        assembly: ReplyAssembler,
        admit: Callable[[ProposedCall], ProposedCall],
        may_be_over: Callable[[], bool],
    ) -> None:
        self._turn = turn
        self._session_id = session_id
        self._conversation = conversation
        self._assembly = assembly
        self._admit = admit
        self._may_exceed_budget = may_be_over
        self._stored_count = 0
        self._weight = 0
        self.calls: list[ProposedCall] = []
        """The calls that were started, as they were then."""
        self._answers: list[asyncio.Future[CallAnswer]] = []

    @property
    def has_unanswered_calls(self) -> bool:
        """Whether a started call has no answer yet."""
        return any(not answer.done() for answer in self._answers)

    def start_ready_calls(self) -> Sequence[tuple[int, ProposedCall]]:
        """Start the calls that can start before the reply ends, and return them with their positions."""
        first = len(self.calls)
        until = self._assembly.find_startable_call_end(first)
        if until == first and (coming := self._assembly.predict_reply_until_call(first)) is not None:
            # The checks of the call run while its last bytes are on their way. They have no effect, so a wrong guess
            # costs only time.
            self._turn.prepare_likely_call(coming.calls[first])
            self._conversation.prepare_reply_draft(*self._make_proposal(coming))
        # The reply is stored again before each call. For a long reply, that would write more than the calls are worth.
        if until == first or self._weight > MAX_KEPT_AGAIN or self._may_exceed_budget():
            return ()
        return self._start_calls(self._assembly.get_reply_until_call(until))

    def start_remaining_calls(self, reply: ModelReply) -> Sequence[tuple[int, ProposedCall]]:
        """Start the remaining calls of the complete reply. Faulty calls are recorded and answered too."""
        return self._start_calls(reply)

    def start_stored_calls(self) -> None:
        """Answer the calls that are stored, because the reply is no longer read. Other calls are dropped."""
        # A later run would find these calls without an answer, so each gets one now.
        if self._stored_count:
            self._start_calls(self._assembly.get_reply_until_call(self._stored_count))

    async def wait_and_collect_answers(self) -> list[CallAnswer]:
        """Wait for the answers to all started calls, and return them in call order."""
        if self._answers:
            await asyncio.wait(self._answers)
        return [answer.result() for answer in self._answers]

    def _start_calls(self, reply: ModelReply) -> Sequence[tuple[int, ProposedCall]]:
        first = len(self.calls)
        reply, ids = self._make_proposal(reply)
        self._conversation.add_reply(reply, ids)
        self._stored_count = max(self._stored_count, len(reply.calls))
        self._weight += self._assembly.reply_length_units
        # The reply is stored before its calls are proposed: after a crash, the log must not have calls that no reply
        # contains.
        self._conversation.queue_messages_for_storage()
        for proposed in reply.calls[first:]:
            call = self._admit(proposed)
            self.calls.append(call)
            self._answers.append(asyncio.ensure_future(self._turn.start_streamed_call(call)))
        return [*enumerate(self.calls)][first:]

    def _make_proposal(self, reply: ModelReply) -> tuple[ModelReply, Sequence[str]]:
        """Return the reply with the ids of its calls. Started calls stay unchanged."""
        if self.calls:
            calls = (*self.calls, *reply.calls[len(self.calls) :])
            reply = ModelReply(reply.parts, calls, reply.reason, reply.usage)
        return reply, [
            make_call_id(self._session_id, self._turn.number, position) for position in range(len(reply.calls))
        ]


RunTask = str | UserMessage | None
"""The task of a run; None continues with the conversation."""
_STOP_TEXTS: dict[StopReason, str] = {
    "user": "The user stopped the run.",
    "shutdown": "The kernel is shutting down.",
    "parent": "The parent agent stopped the run.",
}


class AgentRunState(Struct):
    """The state of one run."""

    usage: RunUsage
    stopped: StopReason | None = None
    """Set once, by a stop or at the deadline. No call starts afterwards."""
    stream: ReplyStreamTask[AgentEvent] | None = None
    dispatch: ReplyCallDispatcher | None = None
    """The dispatcher of the last reply."""
    reading: ReplyAssembler | None = None
    """A reply that is not counted yet."""
    request_tokens: int = 0
    """The estimated tokens of the current request."""
    sent_at: float = 0.0
    """The time when the current request was sent, on the running loop's clock."""
    first_token_at: float | None = None
    """The time of the first part of its reply."""
    calling: bool = False
    waiting: asyncio.Future[bool] | None = None
    """The wait for running jobs, which report their end."""
    is_empty_reply_nudged: bool = False
    """Whether the last reply was empty, and the model is asked once more."""
    paused: bool = False
    """Whether the provider needs the same request again to continue with one of its tools."""
    cuts: int = 0
    error: ProviderError | None = None
    """Why the last reply is incomplete."""
    exhausted: tuple[BudgetKind, str] | None = None
    """The limit that left no room for a call, and why."""
    text: str = ""
    awaiting_approval: list[str] = field(default_factory=list[str])
    """The ids of the approval requests that calls await."""
    storage_error: str | None = None
    """Why the conversation cannot be stored."""
    end_reason: tuple[RunStatus, str, BudgetKind | None] | None = None

    @property
    def deadline(self) -> float | None:
        """The time when the run ends, on the running loop's clock."""
        return self.usage.deadline

    def end_run(self, status: RunStatus, detail: str = "", budget: BudgetKind | None = None) -> None:
        """Decide how the run ends. The first reason counts."""
        if self.end_reason is None:
            self.end_reason = (status, detail, budget)

    def check_budget_or_end_run(self, *, taking: bool = False) -> bool:
        """Return whether a further request may be sent. If the budget has no room, the run ends.

        :param taking: whether to count a request, because it is sent now
        """
        if self.stopped is None and self.end_reason is None:
            full = self.usage.reserve_turn_in_budget() if taking else self.usage.find_exhausted_limit()
            if full is not None:
                self.end_run("budget", full[1], full[0])
        return self.stopped is None and self.end_reason is None

    def end_with_stop_reason(self) -> None:
        budget: BudgetKind | None = "seconds" if self.stopped == "budget" else None
        self.end_run("budget" if budget else "cancelled", self.format_stop_text(), budget)

    def format_stop_text(self) -> str:
        assert self.stopped is not None
        return _STOP_TEXTS.get(self.stopped) or self.usage.explain_spent_time()

    def explain_cut_reply(self) -> str:
        """Return why the reply is incomplete, for the model. The text never contains operator details."""
        return "The connection to the provider was lost." if self.stopped is None else self.format_stop_text()

    def count_reply_tokens(self, reply: ModelReply) -> None:
        self.usage.count_tokens(self.request_tokens, reply)
        self.reading = None

    def build_usage_record(self, model: Model, reply: ModelReply, **about: Any) -> dict[str, Any] | None:
        """Return what a request used, for its record; None if nothing came back.

        :param about: the number of the turn, or the purpose of a request that is not a turn
        """
        if reply.usage is None and reply.reason is None and not reply.parts:
            return None
        provider, _, name = model.name.partition(":")
        usage_fields: dict[str, Any] = {**about, "provider": provider, "model": name}
        if (used := reply.usage) is not None:
            usage_fields |= {"input_tokens": used.input_tokens, "output_tokens": used.output_tokens}
            usage_fields |= {"cache_read_tokens": used.cache_read_tokens, "cache_write_tokens": used.cache_write_tokens}
            if used.cost is not None:
                usage_fields["cost"] = used.cost
        now = asyncio.get_running_loop().time()
        usage_fields |= {"finish_reason": reply.reason, "duration_ms": round((now - self.sent_at) * 1000)}
        if self.first_token_at is not None:
            usage_fields["first_token_ms"] = round((self.first_token_at - self.sent_at) * 1000)
        return usage_fields

    def may_have_exhausted_tokens(self) -> bool:
        """Return whether the current reply may have used up the tokens. Its calls then wait for its end."""
        reading = self.reading
        # Without a limit, calls need not wait for the end of the reply.
        if reading is None or not self.usage.has_token_limit:
            return False
        return self.usage.explain_spent_tokens(reading.usage or TokenUsage(self.request_tokens, 0)) is not None

    def count_and_check_call(self, call: ProposedCall) -> ProposedCall:
        """Count a call and return it, with a fault if it may not start."""
        usage = None if self.reading is None else self.reading.usage
        accepted_count = self.usage.count_proposed_calls(1)
        if self.stopped is not None:
            return _with_fault(call, "limit" if self.stopped == "budget" else "cancelled", self.format_stop_text())
        if self.storage_error is not None:
            return _with_fault(call, "unavailable", f"The conversation cannot be stored ({self.storage_error}).")
        if (why := self.usage.explain_spent_tokens(usage)) is not None:
            self.exhausted = self.exhausted or ("tokens", why)
        elif not accepted_count:
            why = self.usage.explain_spent_calls()
            self.exhausted = self.exhausted or ("calls", why)
        return call if why is None else _with_fault(call, "limit", why)

    def end_if_awaiting_approval(self) -> None:
        if self.awaiting_approval:
            count = (
                "1 call awaits" if len(self.awaiting_approval) == 1 else f"{len(self.awaiting_approval)} calls await"
            )
            self.end_run("awaiting_approval", f"{count} approval: {', '.join(self.awaiting_approval)}.")

    def decide_end_after_reply(self, reply: ModelReply) -> None:
        """Decide whether the run ends with this reply, and how."""
        self.paused = reply.reason == "paused" and not reply.calls
        if reply.calls and self.exhausted is None and (why := self.usage.explain_spent_tokens()) is not None:
            self.exhausted = ("tokens", why)
        if self.exhausted is not None:
            self.end_run("budget", self.exhausted[1], self.exhausted[0])
        if reply.calls or self.error is not None or self.stopped is not None or self.end_reason is not None:
            return
        # The provider pauses one of its long tools. The same request continues it, so the run is not over.
        if self.paused:
            return
        if reply.reason == "length":
            self.end_run(
                "length",
                "The reply reached the model's output limit. Request less at a time, or allow more output tokens.",
            )
        elif reply.reason == "refused":
            self.end_run("refused", "The model or its provider declined to answer.")
        elif is_empty_reply(reply):
            if self.is_empty_reply_nudged:
                self.end_run(
                    "empty", "The model returned an empty reply twice. Send the task again, or use another model."
                )
            # Some models stop after a tool result without a word. One reminder usually makes them continue.
            self.is_empty_reply_nudged = True
        else:
            self.end_run("answered")

    def outcome(self) -> RunOutcome:
        assert self.end_reason is not None
        status, detail, budget = self.end_reason
        spent = self.usage
        return RunOutcome(
            status=status,
            text=self.text,
            detail=detail,
            turns=spent.turns,
            calls=spent.calls,
            input_tokens=spent.input_tokens,
            output_tokens=spent.output_tokens,
            tokens_estimated=spent.tokens_estimated,
            seconds=asyncio.get_running_loop().time() - spent.started_at,
            budget=budget,
            pending_approvals=tuple(self.awaiting_approval),
            cost=spent.cost,
        )


def is_empty_reply(reply: ModelReply) -> bool:
    """Return whether a reply has neither text nor calls nor output of the provider's tools."""
    has_output = any(isinstance(part, ProviderBlock) and part.said for part in reply.parts)
    return not reply.calls and not has_output and not reply.text.strip()


def _with_fault(call: ProposedCall, kind: ErrorKind, why: str) -> ProposedCall:
    return call._replace(problem=f"The call was not run. {why}", problem_kind=kind) if call.problem is None else call


# Reading one reply of a model, to its end or to the point where it breaks off. The run records how it ended.


async def stream_reply_events(
    run: AgentRunState,
    assembly: ReplyAssembler,
    model: Model,
    request: ModelRequest,
    retry: RetryPolicy,
    handle: EventHandler[AgentEvent],
) -> AsyncGenerator[AgentEvent, None]:
    """Read one reply and yield its events. An interruption is recorded in ``run``.

    :param handle: adds each event to ``assembly``, even if no reader takes the events
    """
    run.error = None
    run.sent_at, run.first_token_at = asyncio.get_running_loop().time(), None
    if run.stopped is not None:  # stopped since the turn started, or by a watcher of its event
        return
    pump = run.stream = ReplyStreamTask(model, request, retry, run.deadline, handle)
    try:
        async with aclosing(pump.iterate_results()) as events:
            async for event in events:
                yield event
        # Without the end marker, the last call may be incomplete, so the reply does not count as complete.
        if assembly.reason is None:
            run.error = ReplyStreamCut(
                "The reply ended without the provider's end marker. Resume the run to ask again."
            )
    except ReplyTooLong as error:
        run.error = ReplyStreamCut(str(error))
    except ProviderError as error:
        if assembly.reason is None:  # the reply is complete, so a later failure does not matter
            run.error = error
    except ReplyDeadlineExceeded:
        run.stopped = run.stopped or "budget"
    except ReplyReadingStopped:
        assert run.stopped is not None
    finally:
        run.stream = None
        await pump.aclose()


# An agent that stays alive: it waits for jobs that end, triggers that fire and messages from its user, and works on each.

MAX_PAUSE_S = 60.0
"""The longest pause between attempts while the provider is unavailable or calls await approval."""
MAX_RETRY_S = 3600.0
"""The longest time until a request without a complete reply is sent again. Each request may cost money."""


class ServableAgent(Protocol):
    """The part of an agent that :class:`ServeLoop` needs."""

    @property
    def session(self) -> Session: ...

    def run(self, task: str | None) -> AsyncGenerator[AgentEvent, None]: ...

    async def has_unanswered(self) -> bool: ...

    def cancel(self, reason: StopReason = "user") -> None: ...


class ServeLoop:
    """The loop of an agent that serves until it is stopped.

    Each piece of work is a run with a separate budget.
    """

    def __init__(self, agent: ServableAgent) -> None:
        self._agent = agent
        self._messages: list[str] = []
        self._wakeup = asyncio.Event()
        self._stopped = False

    def queue_user_message(self, text: str) -> None:
        """Queue a user message. The current run finishes first."""
        self._messages.append(text)
        self._wakeup.set()

    def stop_serving(self, reason: StopReason) -> None:
        """Stop the current run and end the loop."""
        self._stopped = True
        self._wakeup.set()
        self._agent.cancel(reason)

    async def serve_events(self, task: str | None, on_end: Callable[[], None]) -> AsyncGenerator[AgentEvent, None]:
        """Work on ``task`` and then on whatever arrives, and yield the events. Call ``on_end`` at the end."""
        if task is not None:
            self._messages.insert(0, task)
        try:
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield event
        finally:
            on_end()

    async def _events(self) -> AsyncGenerator[AgentEvent, None]:
        in_vain, why = 0, None
        owed = await self._agent.has_unanswered()  # notifications that an earlier process delivered and did not work on
        while not self._stopped:
            if not self._messages and (in_vain or not owed):
                yield AgentIdle()
                await self._wait_for_work(in_vain, _retry_s(in_vain, why) if owed else None)
                if self._stopped:
                    return
            if not self._messages and not owed and not await self._has_notifications():
                continue
            text = self._messages.pop(0) if self._messages else None
            async with aclosing(self._agent.run(text)) as events:
                async for event in events:
                    yield event
                    if isinstance(event, RunFinished):
                        why = event.outcome.status
            # Failures lengthen the pause, so that an unavailable provider is not asked in a tight loop.
            in_vain = 0 if why == "answered" else in_vain + 1
            owed = why in ("failed", "awaiting_approval") and await self._agent.has_unanswered()

    async def _has_notifications(self) -> bool:
        notices = self._agent.session.notifications
        return notices is not None and bool(await notices.list_pending())

    async def _wait_for_work(self, in_vain: int, again_s: float | None) -> None:
        """Wait until there is work: at once if work is pending, later if the last attempts failed.

        :param again_s: seconds until the failed work is tried again; None for never
        """
        self._wakeup.clear()
        if self._messages or self._stopped:
            return
        pause_s = _pause_s(in_vain)
        if in_vain and await self._wait_for_message(None, pause_s):
            return
        if again_s is not None and again_s <= pause_s:
            return
        notices = self._agent.session.notifications
        left_s = None if again_s is None else again_s - pause_s
        await self._wait_for_message(None if notices is None else notices.wait_until_pending(), left_s)

    async def _wait_for_message(self, arrival: Coroutine[Any, Any, None] | None, seconds: float | None) -> bool:
        """Wait for a user message, ``arrival`` or the end of the time, and return whether a message came."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._wakeup.wait())]
        if arrival is not None:
            waits.append(asyncio.ensure_future(arrival))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if len(waits) > 1 and waits[1].done():
                waits[1].result()
            return self._wakeup.is_set()
        finally:
            for wait in waits:
                wait.cancel()


def _pause_s(in_vain: int) -> float:
    """Return the seconds to wait after ``in_vain`` failed attempts."""
    return min(2.0 ** min(in_vain - 1, 32), MAX_PAUSE_S) if in_vain else 0.0


def _retry_s(in_vain: int, why: RunStatus | None) -> float:
    """Return the seconds until unfinished work is tried again; looking for an approval costs nothing."""
    return _pause_s(in_vain) if why == "awaiting_approval" else min(2.0 ** min(in_vain - 1, 32), MAX_RETRY_S)
