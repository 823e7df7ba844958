"""The loop: request → text or structured calls → answers → again, until text alone, a budget or a stop ends it.

Only the structured channel counts: text is never searched for calls. Every call that a reply opened is
proposed to the session exactly once and answered, whichever outcome the run comes to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from handrail.agent.budget import Budget, BudgetKind, Spent
from handrail.agent.conversation import Conversation
from handrail.agent.dispatch import Dispatch, Session, StopKind, Turn
from handrail.agent.events import (
    BudgetSpent,
    CallAnswered,
    CallProposed,
    LoopEvent,
    ReplyCut,
    RunFinished,
    RunOutcome,
    TurnStarted,
)
from handrail.agent.model import (
    AssistantMessage,
    BlockEvent,
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
from handrail.agent.run import Run
from handrail.agent.stream import ReplyAssembly, ReplyTooLong
from handrail.agent.subagents import OpenModel, Subagents
from handrail.catalog.fitting import forms_to_restore
from handrail.contract.call import Answer, ProposedCall
from handrail.contract.errors import LogUnavailable, UsageError

T = TypeVar("T")

MAX_CUTS = 3
"""Replies in a row that may break off before the run gives up."""


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
    :param models: opens the models that sub-agents' manifests name
    :param counted: what a run uses of its budget; a sub-agent's may count for its parent, too
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
        models: OpenModel | None = None,
        counted: Callable[[Budget], Spent] = Spent,
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
        self._counted = counted
        session.delegate_to(Subagents(self, models))
        self._run: Run | None = None

    @property
    def messages(self) -> tuple[Message, ...]:
        """The history so far, from the first run on: whole exchanges only."""
        return self._conversation.messages

    @property
    def spent(self) -> Spent | None:
        """What the run under way has used."""
        return None if self._run is None else self._run.spent

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
        run = self._run = Run(self._counted(self.budget), began, None if seconds is None else began + seconds)
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
            yield RunFinished(run.outcome())
        finally:
            self._run = None

    async def _settle(self, run: Run) -> AsyncGenerator[LoopEvent, None]:
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
        run.end_where_calls_wait()
        if run.stopped is not None and self._conversation.open is not None:
            run.end("cancelled", run.stop_text())

    async def _ask(self, run: Run, task: str | None) -> None:
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

    async def _turn(self, run: Run) -> AsyncGenerator[LoopEvent, None]:
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
            assembly = ReplyAssembly(forms_to_restore(request.tools, self.model.dialect))
            saved = partial(self._save, run)
            dispatch = run.dispatch = Dispatch(turn, self.session.id, self._conversation, assembly, saved, run.admitted)
            run.reading, answered = assembly, False
            yield TurnStarted(run.spent.turns + 1)
            try:
                async with aclosing(self._read(run, request, assembly, dispatch)) as events:
                    async for event in events:
                        yield event
                reply = assembly.finish(None if assembly.reason and run.error is None else run.why_cut())
                run.count(request, reply)
                run.text = reply.text
                run.cuts = 0 if run.error is None else run.cuts + 1
                if run.error is not None:
                    again = isinstance(run.error, StreamCut) and run.cuts < MAX_CUTS and run.stopped is None
                    yield ReplyCut(str(run.error), again and not reply.calls)
                    if not again:
                        run.end("failed", str(run.error))
                if reply.calls or run.error is None:
                    for position, call in await dispatch.finish(reply):
                        yield CallProposed(position, call)
                answers = await self._answers(run, dispatch)
                answered = True
            finally:
                if not answered:
                    await self._give_up(run, dispatch)
            for position, (call, answer) in enumerate(zip(dispatch.calls, answers, strict=True)):
                self._heed(run, answer)
                yield CallAnswered(position, call, answer)
            run.end_where_calls_wait()
            run.judge(reply)
        elif run.stopped is None:
            run.end("budget", run.spent.out_of_turns() or "", "turns")
        if run.stopped is not None:
            budget: BudgetKind | None = "seconds" if run.stopped == "timeout" else None
            run.end("budget" if budget else "cancelled", run.stop_text(), budget)
        if run.ended is not None and run.ended[2] is not None:
            yield BudgetSpent(run.ended[2], run.ended[1])

    def _heed(self, run: Run, answer: Answer) -> None:
        """A person who was asked about a call may have stopped the whole session."""
        if answer.result.metadata.get("session_stopped"):
            self._stop(run, "user")

    def _request(self, turn: Turn) -> ModelRequest:
        specs = turn.specs
        if self._system is None:  # kept from the first run on, so that providers can cache it
            self._system = system_prompt(
                self._workspace,
                specs,
                index=turn.index,
                native=self._natives.offered,
                skills=self.session.skills,
                agents=self.session.agents,
                instructions=self._instructions,
            )
        views = [spec.llm_view() for spec in specs]
        return ModelRequest(self._system, self.messages, views, self._max_output_tokens, self._natives.forms)

    async def _read(
        self, run: Run, request: ModelRequest, assembly: ReplyAssembly, dispatch: Dispatch
    ) -> AsyncGenerator[LoopEvent, None]:
        """Read one reply into ``assembly`` as far as it goes, and start its calls; what cuts it short is left in ``run``."""
        run.error = None

        async def heed(event: BlockEvent | Delayed) -> Sequence[LoopEvent]:
            if isinstance(event, Delayed):
                return (event,)
            told: list[LoopEvent] = []
            if isinstance(event, NativeGiven):
                used, event = await self._natives.take(event)  # with what is kept of it
                told.append(used)
            if isinstance(news := assembly.feed(event), str):
                told.append(TextDelta(news))
            told += [CallProposed(position, call) for position, call in await dispatch.go_on()]
            return told

        pump = run.pump = ReplyPump(self.model, request, self._retry, run.deadline, heed)
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
            self._stop(run, "timeout")
        except StoppedReading:
            assert run.stopped is not None
        finally:
            run.pump = None
            await pump.aclose()

    async def _answers(self, run: Run, dispatch: Dispatch) -> Sequence[Answer]:
        """Wait for the answers to the calls of a reply, and add the exchange to the history."""
        if not dispatch.calls:
            return []

        def told(answers: Sequence[Answer]) -> None:
            waiting = {n: asked for n, a in enumerate(answers) if (asked := a.result.metadata.get("parked"))}
            run.parked += map(str, waiting.values())
            self._conversation.answer({n: answer for n, answer in enumerate(answers) if n not in waiting})

        answers = await self._carried_out(run, dispatch.answers(), told)
        await self._save(run)
        return answers

    async def _give_up(self, run: Run, dispatch: Dispatch) -> None:
        """Nobody watches any more: what was started is stopped, recorded and answered."""
        self._stop(run, "user")
        await dispatch.give_up()
        await self._answers(run, dispatch)

    async def _carried_out(self, run: Run, calls: Awaitable[T], then: Callable[[T], None]) -> T:
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

    async def _save(self, run: Run) -> None:
        """Keep what was said. A conversation that cannot be kept goes no further."""
        try:
            await self._conversation.save()
        except LogUnavailable as error:
            run.lost = str(error)
            run.end("failed", f"the conversation cannot be kept: {error}")

    def _stop(self, run: Run, reason: StopKind) -> None:
        if run.stopped is not None:
            return
        run.stopped = reason
        if run.pump is not None:
            run.pump.stop()
        if run.calling or (run.dispatch is not None and run.dispatch.in_flight):
            self.session.cancel(reason)
