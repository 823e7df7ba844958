"""The loop: request → text or structured calls → answers → again, until text alone, a budget or a stop ends it.

Only the structured channel counts: text is never searched for calls. Every call that a reply opened is
proposed to the session exactly once and answered, whichever outcome the run comes to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from handrail.agent.budget import Budget, BudgetKind, Spent
from handrail.agent.conversation import Conversation
from handrail.agent.dispatch import AfterReply, Dispatch, Session, StopKind, Turn
from handrail.agent.events import (
    BudgetSpent,
    CallAnswered,
    CallProposed,
    LoopEvent,
    ReplyCut,
    RunFinished,
    RunOutcome,
    RunStatus,
    TurnStarted,
)
from handrail.agent.model import (
    AssistantMessage,
    Message,
    Model,
    ModelRequest,
    NativeGiven,
    ProviderError,
    StreamCut,
    TextDelta,
)
from handrail.agent.native import Natives
from handrail.agent.prompt import system_prompt
from handrail.agent.pump import OutOfTime, ReplyPump, StoppedReading
from handrail.agent.retry import Delayed, RetryPolicy
from handrail.agent.stream import Reply, ReplyAssembly, ReplyTooLong
from handrail.catalog.fitting import forms_to_restore
from handrail.contract.call import Answer, ProposedCall, call_id
from handrail.contract.errors import ErrorKind, LogUnavailable, UsageError

T = TypeVar("T")

MAX_CUTS = 3
"""Replies in a row that may break off before the run gives up."""
_STOPPED: dict[StopKind, str] = {"user": "the user stopped the run", "shutdown": "the kernel is shutting down"}


@dataclass(slots=True)
class _Run:
    """The state of one run."""

    spent: Spent
    began: float
    deadline: float | None
    stopped: StopKind | None = None
    """Set once, by a stop or the deadline: nothing starts any more."""
    pump: ReplyPump | None = None
    calling: bool = False
    cuts: int = 0
    error: ProviderError | None = None
    """Why the last reply is not whole."""
    text: str = ""
    parked: list[str] = field(default_factory=list[str])
    """What people are asked about calls, by the ids of the requests."""
    lost: str | None = None
    """Why the conversation cannot be kept."""
    ended: tuple[RunStatus, str, BudgetKind | None] | None = None

    def end(self, status: RunStatus, detail: str = "", budget: BudgetKind | None = None) -> None:
        """Decide how the run ends; the first reason counts."""
        if self.ended is None:
            self.ended = (status, detail, budget)

    def stop_text(self) -> str:
        assert self.stopped is not None
        return _STOPPED.get(self.stopped) or self.spent.out_of_time()


class Agent:
    """One model working through one session.

    The conversation goes on from run to run, and with that of an agent that worked through the same session before, in
    this process or another. One run at a time.

    :param session: where calls go
    :param model: see :func:`handrail.agent.providers.open_model`; the caller closes it
    :param system: the system text; None builds it from ``workspace`` and the tools in view at the first run
    :param workspace: the path that the built system text names
    :param instructions: the operator's, the last section of the built system text; an agent manifest's ``prompt``
    :param budget: bounds of each run
    :param retry: how patiently a busy provider is asked again
    :param max_output_tokens: bound of each reply; None leaves the provider's default
    """

    def __init__(
        self,
        session: Session,
        model: Model,
        *,
        system: str | None = None,
        workspace: str | None = None,
        instructions: str = "",
        budget: Budget | None = None,
        retry: RetryPolicy | None = None,
        max_output_tokens: int | None = None,
    ) -> None:
        self.session = session
        self.model = model
        self.budget = budget or Budget()
        self._system = system
        self._instructions = instructions
        self._workspace = workspace
        self._retry = retry or RetryPolicy()
        self._max_output_tokens = max_output_tokens
        self._conversation = Conversation(session.history)
        self._natives = Natives(model, session.history)
        self._run: _Run | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The history so far, from the first run on: whole exchanges only."""
        return self._conversation.messages

    def cancel(self, reason: StopKind = "user") -> None:
        """Stop the run that is under way: reading ends, calls in flight are stopped, and all are answered.

        The run then ends with the status ``cancelled``. Without a run, nothing happens.
        """
        if self._run is not None:
            self._stop(self._run, reason)

    async def complete(self, task: str | None) -> RunOutcome:
        """:meth:`run` for a caller who wants the outcome only."""
        outcome: RunOutcome | None = None
        async with aclosing(self.run(task)) as events:
            async for event in events:
                if isinstance(event, RunFinished):
                    outcome = event.outcome
        assert outcome is not None, "RunFinished is always the last event"
        return outcome

    async def run(self, task: str | None) -> AsyncGenerator[LoopEvent, None]:
        """Work on ``task`` until the model answers without calls, or a budget, a stop, a call that waits for a person,
        or the provider ends it.

        What a run before left without an answer is answered first: from the log, by the person's decision, or as
        interrupted. None as the task goes on from there.

        Closing the generator (``contextlib.aclosing``) or cancelling its task stops the run: calls in flight
        are stopped and recorded, what was not yet proposed is dropped, and the history stays whole. To have
        every call of a half-read reply answered too, use :meth:`cancel`.

        :raises UsageError: when a run of this agent is under way, or there is nothing to go on with
        :raises LogUnavailable: when what was said before cannot be read, or the task cannot be kept
        """
        if self._run is not None:
            raise UsageError("this agent is already running a task; wait for it, or give each task an agent of its own")
        began = asyncio.get_running_loop().time()
        seconds = self.budget.seconds
        run = self._run = _Run(Spent(self.budget), began, None if seconds is None else began + seconds)
        try:
            await self._conversation.load()
            async with aclosing(self._settle(run)) as settled:
                async for answered in settled:
                    yield answered
            if run.ended is None:
                await self._ask(run, task)
            while run.ended is None:
                async with aclosing(self._turn(run)) as events:
                    async for event in events:
                        yield event
            yield RunFinished(_outcome(run))
        finally:
            self._run = None

    async def _settle(self, run: _Run) -> AsyncGenerator[LoopEvent, None]:
        """Have the calls answered that a run before left open, if there are any."""
        exchange = self._conversation.open
        if exchange is None:
            return
        answers: dict[int, Answer] = {}
        for position, part, known_as in exchange.missing:
            if run.stopped is not None:
                break
            answer = await self._carried_out(run, self.session.recall(known_as), lambda _: None)
            if parked := answer.result.metadata.get("parked"):
                run.parked.append(str(parked))
            else:
                answers[position] = answer
            self._heed(run, answer)
            yield CallAnswered(position, ProposedCall(part.name, part.arguments), answer)
        self._conversation.answer(answers)
        await self._save(run)
        self._end_where_calls_wait(run)
        if run.stopped is not None and self._conversation.open is not None:
            run.end("cancelled", run.stop_text())

    async def _ask(self, run: _Run, task: str | None) -> None:
        if task is not None:
            self._conversation.ask(task)
            await self._conversation.save()
            try:
                await self.session.begin(task)
            except UsageError as closed:  # somebody stopped the session, or left it
                run.end("cancelled", str(closed))
            return
        messages = self._conversation.messages
        if not messages or isinstance(messages[-1], AssistantMessage):
            raise UsageError("there is nothing to go on with: the last run ended with an answer; give a task")

    async def _turn(self, run: _Run) -> AsyncGenerator[LoopEvent, None]:
        """One request, its calls, and their answers; or the decision that there is no further one."""
        if run.deadline is not None and asyncio.get_running_loop().time() >= run.deadline:
            self._stop(run, "timeout")
        if run.stopped is None and run.spent.out_of_turns() is None:
            try:
                turn = self.session.turn()
            except UsageError as closed:  # somebody stopped the session, or left it
                run.end("cancelled", str(closed))
                return
            for withheld in self._natives.choose(turn.native, (spec.llm_view()["name"] for spec in turn.specs)):
                yield withheld
            request = self._request(turn)
            dispatch = AfterReply(turn)
            yield TurnStarted(run.spent.turns + 1)

            assembly = ReplyAssembly(forms_to_restore(request.tools, self.model.dialect))
            async with aclosing(self._read(run, request, assembly, dispatch)) as events:
                async for event in events:
                    yield event
            reply = assembly.finish(None if assembly.reason and run.error is None else self._why_cut(run))
            run.spent.add(request, reply)
            run.text = reply.text
            run.cuts = 0 if run.error is None else run.cuts + 1

            reply, refused = _within_budget(run, reply)
            if run.error is not None:
                again = isinstance(run.error, StreamCut) and run.cuts < MAX_CUTS and run.stopped is None
                yield ReplyCut(str(run.error), again and not reply.calls)
                if not again:
                    run.end("failed", str(run.error))
            for position, call in enumerate(reply.calls):
                yield CallProposed(position, call)
            answers = await self._answers(run, turn, dispatch, reply)
            for position, (call, answer) in enumerate(zip(reply.calls, answers, strict=True)):
                self._heed(run, answer)
                yield CallAnswered(position, call, answer)
            self._end_where_calls_wait(run)
            _judge(run, reply, refused)
        elif run.stopped is None:
            run.end("budget", run.spent.out_of_turns() or "", "turns")
        if run.stopped is not None:
            budget: BudgetKind | None = "seconds" if run.stopped == "timeout" else None
            run.end("budget" if budget else "cancelled", run.stop_text(), budget)
        if run.ended is not None and run.ended[2] is not None:
            yield BudgetSpent(run.ended[2], run.ended[1])

    def _heed(self, run: _Run, answer: Answer) -> None:
        """A person who was asked about a call may have stopped the whole session."""
        if answer.result.metadata.get("session_stopped"):
            self._stop(run, "user")

    def _request(self, turn: Turn) -> ModelRequest:
        specs = turn.specs
        if self._system is None:  # kept from the first run on, so that providers can cache it
            self._system = system_prompt(
                self._workspace, specs, index=turn.index, native=self._natives.offered, instructions=self._instructions
            )
        views = [spec.llm_view() for spec in specs]
        return ModelRequest(self._system, self.messages, views, self._max_output_tokens, self._natives.forms)

    async def _read(
        self, run: _Run, request: ModelRequest, assembly: ReplyAssembly, dispatch: Dispatch
    ) -> AsyncGenerator[LoopEvent, None]:
        """Read one reply into ``assembly`` as far as it goes; what cuts it short is left in ``run``."""
        run.error = None
        pump = run.pump = ReplyPump(self.model, request, self._retry, run.deadline)
        try:
            async with aclosing(pump.events()) as events:
                async for event in events:
                    if isinstance(event, Delayed):
                        yield event
                        continue
                    if isinstance(event, NativeGiven):
                        used, event = await self._natives.take(event)  # noqa: PLW2901 - with what is kept of it
                        yield used
                    news = assembly.feed(event)
                    if isinstance(news, str):
                        yield TextDelta(news)
                    elif news is not None:
                        dispatch.closed(news, assembly.closed_call(news))
            if assembly.reason is None:
                run.error = StreamCut("the reply ended without the provider's closing sign")
        except ReplyTooLong as error:
            run.error = StreamCut(str(error))
        except ProviderError as error:
            if assembly.reason is None:  # what goes wrong after the closing sign takes nothing from the reply
                run.error = error
        except OutOfTime:
            run.stopped = run.stopped or "timeout"
        except StoppedReading:
            assert run.stopped is not None
        finally:
            run.pump = None
            await pump.aclose()

    def _why_cut(self, run: _Run) -> str:
        """What the model reads of it: never the operator's text."""
        if run.stopped is not None:
            return run.stop_text()
        return "the connection to the provider was lost"

    async def _answers(self, run: _Run, turn: Turn, dispatch: Dispatch, reply: Reply) -> Sequence[Answer]:
        """Have the calls answered, and add the exchange to the history.

        The reply is kept before its calls are proposed: whatever happens from then on, a run that goes on from here
        knows which calls there were.
        """
        if not reply.calls and run.error is not None:
            return []
        self._conversation.propose(reply, [call_id(self.session.id, turn.number, n) for n in range(len(reply.calls))])
        await self._save(run)
        if not reply.calls:
            return []
        if run.lost is not None:
            reply = _refuse(reply, 0, "unavailable", f"the conversation cannot be kept ({run.lost})")

        def told(answers: Sequence[Answer]) -> None:
            waiting = {n: asked for n, a in enumerate(answers) if (asked := a.result.metadata.get("parked"))}
            run.parked += map(str, waiting.values())
            self._conversation.answer({n: answer for n, answer in enumerate(answers) if n not in waiting})

        answers = await self._carried_out(run, dispatch.answers(reply.calls), told)
        await self._save(run)
        return answers

    async def _carried_out(self, run: _Run, calls: Awaitable[T], then: Callable[[T], None]) -> T:
        """Wait for calls within the run's time. When this task is cancelled it still waits until they are on record."""
        work = asyncio.ensure_future(calls)
        overdue = None
        if run.deadline is not None and run.stopped is None:
            overdue = asyncio.get_running_loop().call_at(run.deadline, self._stop, run, "timeout")
        run.calling = True
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            self._stop(run, "user")
            await asyncio.wait({work})  # the arbiter's grace period bounds it; calls must be on record first
            raise
        finally:
            run.calling = False
            if overdue is not None:
                overdue.cancel()
            if not work.done():  # cancelled a second time: nobody waits any more
                work.cancel()
            elif not work.cancelled() and work.exception() is None:
                then(work.result())
        return work.result()

    async def _save(self, run: _Run) -> None:
        """Keep what was said. A conversation that cannot be kept goes no further."""
        try:
            await self._conversation.save()
        except LogUnavailable as error:
            run.lost = str(error)
            run.end("failed", f"the conversation cannot be kept: {error}")

    def _end_where_calls_wait(self, run: _Run) -> None:
        if run.parked:
            count = "a call waits" if len(run.parked) == 1 else f"{len(run.parked)} calls wait"
            run.end("parked", f"{count} for a person: {', '.join(run.parked)}")

    def _stop(self, run: _Run, reason: StopKind) -> None:
        if run.stopped is not None:
            return
        run.stopped = reason
        if run.pump is not None:
            run.pump.stop()
        if run.calling:
            self.session.cancel(reason)


def _within_budget(run: _Run, reply: Reply) -> tuple[Reply, tuple[BudgetKind, str] | None]:
    """The reply with a fault on every call that may not start, and the budget that left no room, if one did."""
    room = run.spent.take_calls(len(reply.calls))
    if run.stopped is not None:
        kind: ErrorKind = "limit" if run.stopped == "timeout" else "cancelled"
        return _refuse(reply, 0, kind, run.stop_text()), None
    if reply.calls and (why := run.spent.out_of_tokens()) is not None:
        return _refuse(reply, 0, "limit", why), ("tokens", why)
    if room < len(reply.calls):
        why = run.spent.out_of_calls()
        return _refuse(reply, room, "limit", why), ("calls", why)
    return reply, None


def _refuse(reply: Reply, first: int, kind: ErrorKind, why: str) -> Reply:
    def refused(call: ProposedCall) -> ProposedCall:
        return call._replace(fault=f"{why}; nothing was run", fault_kind=kind) if call.fault is None else call

    return replace(reply, calls=(*reply.calls[:first], *(refused(call) for call in reply.calls[first:])))


def _judge(run: _Run, reply: Reply, refused: tuple[BudgetKind, str] | None) -> None:
    """Whether the run ends with this reply, and how."""
    if refused is not None:
        run.end("budget", refused[1], refused[0])
    if reply.calls or run.error is not None or run.stopped is not None or run.ended is not None:
        return
    if reply.reason == "paused":  # the provider goes on with its own tool when it is asked again
        return
    if reply.reason == "length":
        run.end("length", "the reply met the model's output limit; ask for less at once, or allow more output tokens")
    elif reply.reason == "refused":
        run.end("refused", "the model or its provider declined to answer")
    else:
        run.end("answered")


def _outcome(run: _Run) -> RunOutcome:
    assert run.ended is not None
    status, detail, budget = run.ended
    spent = run.spent
    return RunOutcome(
        status=status,
        text=run.text,
        detail=detail,
        turns=spent.turns,
        calls=spent.calls,
        input_tokens=spent.input_tokens,
        output_tokens=spent.output_tokens,
        tokens_estimated=spent.tokens_estimated,
        seconds=asyncio.get_running_loop().time() - run.began,
        budget=budget,
        parked=tuple(run.parked),
    )
