"""The agent loop: requests, proposed calls, and the end of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from tests.agent.sessions import RecordingSession

from handrail.agent.agent_loop import MAX_CUTS, Agent
from handrail.agent.model_protocol import (
    AssistantMessage,
    CallArgumentsDelta,
    CallBlockOpened,
    CallResultsMessage,
    ProviderBusy,
    ProviderDenied,
    ReplyFinished,
    ReplyStreamCut,
    TextDelta,
    TokenUsage,
    UserMessage,
)
from handrail.agent.reply_stream import RetryDelayed, RetryPolicy
from handrail.agent.run_budget import Budget
from handrail.agent.run_events import (
    AgentEvent,
    BudgetExhausted,
    CallAnswered,
    CallProposed,
    ReplyInterrupted,
    RunFinished,
    TurnStarted,
)
from handrail.contract.agent_manifest import AgentBudgets
from handrail.contract.calls_and_results import ProposedCall, Result
from handrail.contract.errors import UsageError
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, call_reply, text_reply


async def events_of(agent: Agent, task: str = "go") -> list[AgentEvent]:
    async with aclosing(agent.run(task)) as events:
        return [event async for event in events]


def sleeper(naps: list[float]) -> Callable[[float], Awaitable[None]]:
    async def sleep(seconds: float) -> None:
        naps.append(seconds)

    return sleep


@pytest.mark.proves("A-01")
async def test_the_agent_answers_calls_and_sends_requests_until_a_reply_has_only_text() -> None:
    session = RecordingSession()
    model = PlaybackModel(call_reply(("echo", {"n": 1}), ("echo", {"n": 2}), text="Looking."), text_reply("Two."))
    events = await events_of(Agent(session, model))
    assert [type(event) for event in events] == [
        TurnStarted,
        TextDelta,
        CallProposed,
        CallProposed,
        CallAnswered,
        CallAnswered,
        TurnStarted,
        TextDelta,
        RunFinished,
    ]
    outcome = events[-1].outcome if isinstance(events[-1], RunFinished) else None
    assert outcome is not None and outcome.ok
    assert (outcome.text, outcome.turns, outcome.calls) == ("Two.", 2, 2)
    user, assistant, results = model.requests[1].messages
    assert user == UserMessage("go")
    assert isinstance(assistant, AssistantMessage) and isinstance(results, CallResultsMessage)
    assert assistant.text == "Looking."
    assert [call.wire_id for call in assistant.calls] == [result.wire_id for result in results.results]
    assert [result.text for result in results.results] == [
        '{"type":"output","data":{"n":1}}',
        '{"type":"output","data":{"n":2}}',
    ]
    assert session.turns == 2


@pytest.mark.proves("A-01")
async def test_text_that_looks_like_a_call_is_only_text() -> None:
    session = RecordingSession()
    said = '<tool_call>{"name": "echo", "arguments": {"n": 1}}</tool_call> [/bash]@@command=ls [bash/]'
    outcome = await Agent(session, PlaybackModel(text_reply(said))).complete("go")
    assert outcome.ok and outcome.text == said
    assert session.calls == []


async def test_a_model_is_shown_the_llm_view_of_each_tool_and_nothing_else() -> None:
    model = PlaybackModel(text_reply("ok"))
    await Agent(RecordingSession(), model, workspace="/w").complete("go")
    request = model.requests[0]
    assert [set(view) for view in request.tools] == [{"name", "description", "parameters"}] * 2
    assert [view["name"] for view in request.tools] == ["echo", "mail__send"]
    assert "/w" in request.system and "Use echo to hear yourself." in request.system


@pytest.mark.proves("D-12")
async def test_a_change_of_the_tools_leaves_the_system_text_unchanged() -> None:
    session = RecordingSession()
    model = PlaybackModel(text_reply("a"), text_reply("b"))
    agent = Agent(session, model)
    await agent.complete("one")
    session.specs = session.specs[:1]
    await agent.complete("two")
    assert model.requests[0].system == model.requests[1].system
    assert len(model.requests[1].tools) == 1


async def test_the_conversation_continues_from_run_to_run() -> None:
    model = PlaybackModel(text_reply("a"), text_reply("b"))
    agent = Agent(RecordingSession(), model)
    await agent.complete("one")
    await agent.complete("two")
    assert [type(m) for m in model.requests[1].messages] == [UserMessage, AssistantMessage, UserMessage]


async def test_repeated_call_ids_become_unique_in_the_history() -> None:
    def reply() -> list[Any]:
        same = call_reply(("echo", {}), ("echo", {}))
        return [CallBlockOpened(e.index, "call_0", e.name) if isinstance(e, CallBlockOpened) else e for e in same]

    session = RecordingSession()
    model = PlaybackModel(reply(), reply(), text_reply("ok"))
    await Agent(session, model).complete("go")
    ids = [c.wire_id for m in model.requests[2].messages if isinstance(m, AssistantMessage) for c in m.calls]
    assert len(set(ids)) == 4
    assert [call.provider_id for call in session.calls] == ["call_0"] * 4


async def test_an_interrupted_reply_runs_its_complete_calls_and_answers_the_incomplete_one() -> None:
    session = RecordingSession()
    cut = [*call_reply(("echo", {"n": 1}))[:-1], CallBlockOpened(1, "b", "mail.send"), CallArgumentsDelta(1, "{}")]
    model = PlaybackModel([*cut, ReplyStreamCut("gone")], text_reply("ok"))
    events = await events_of(Agent(session, model))
    assert ReplyInterrupted("gone", will_retry=False) in events
    assert [call.name for call in session.ran] == ["echo"]
    results = model.requests[1].messages[-1]
    assert isinstance(results, CallResultsMessage)
    assert [result.is_error for result in results.results] == [False, True]
    assert "interrupted during the call" in results.results[1].text
    assert "gone" not in results.results[1].text


async def test_an_interrupted_text_is_requested_again_and_leaves_no_trace_in_the_history() -> None:
    model = PlaybackModel([TextDelta("Hal"), ReplyStreamCut("gone")], text_reply("Hello"))
    events = await events_of(Agent(RecordingSession(), model))
    assert ReplyInterrupted("gone", will_retry=True) in events
    assert model.requests[0].messages == model.requests[1].messages
    assert isinstance(events[-1], RunFinished) and events[-1].outcome.text == "Hello"


async def test_a_stream_that_ends_without_a_finish_event_counts_as_interrupted() -> None:
    model = PlaybackModel([TextDelta("Hal")], text_reply("Hello"))
    events = await events_of(Agent(RecordingSession(), model))
    assert [event.will_retry for event in events if isinstance(event, ReplyInterrupted)] == [True]


async def test_repeatedly_interrupted_replies_end_the_run() -> None:
    session = RecordingSession()
    cut = [*call_reply(("echo", {}))[:-1], ReplyStreamCut("gone")]
    model = PlaybackModel(*[list(cut) for _ in range(MAX_CUTS + 1)])
    outcome = await Agent(session, model).complete("go")
    assert outcome.status == "failed" and outcome.detail == "gone"
    assert len(session.ran) == MAX_CUTS


@pytest.mark.proves("A-02")
async def test_retries_of_a_busy_provider_wait_longer_each_time_and_follow_its_retry_delay() -> None:
    naps: list[float] = []
    model = PlaybackModel(
        [ProviderBusy("slow down", retry_after_s=7)], [ProviderBusy("x")], [ProviderBusy("x")], text_reply("ok")
    )
    events = await events_of(Agent(RecordingSession(), model, retry=RetryPolicy(sleep=sleeper(naps))))
    assert [event.delay_s for event in events if isinstance(event, RetryDelayed)] == naps
    assert naps[0] == 7
    assert 2 <= naps[1] <= 2.5 and 4 <= naps[2] <= 5
    assert isinstance(events[-1], RunFinished) and events[-1].outcome.ok


async def test_a_provider_that_stays_busy_ends_the_run_after_a_bounded_number_of_requests() -> None:
    model = PlaybackModel(*[[ProviderBusy("overloaded")] for _ in range(9)])
    outcome = await Agent(RecordingSession(), model, retry=RetryPolicy(attempts=3, sleep=sleeper([]))).complete("go")
    assert outcome.status == "failed"
    assert "overloaded. All 3 attempts failed. Resume" in outcome.detail
    assert len(model.requests) == 3


async def test_a_provider_failure_after_a_complete_call_does_not_repeat_the_reply() -> None:
    session = RecordingSession()
    model = PlaybackModel([*call_reply(("echo", {}))[:-1], ProviderBusy("overloaded")], text_reply("ok"))
    outcome = await Agent(session, model, retry=RetryPolicy(sleep=sleeper([]))).complete("go")
    assert outcome.ok
    assert len(session.ran) == 1
    assert len(model.requests[1].messages) == 3


async def test_a_rejected_key_ends_the_run_immediately_with_a_text_for_the_operator() -> None:
    model = PlaybackModel([ProviderDenied("check OPENAI_API_KEY")])
    outcome = await Agent(RecordingSession(), model).complete("go")
    assert (outcome.status, outcome.detail) == ("failed", "check OPENAI_API_KEY")
    assert len(model.requests) == 1


async def test_an_adapter_exception_ends_the_run_with_its_name_and_answered_calls() -> None:
    session = RecordingSession()
    model = PlaybackModel([*call_reply(("echo", {}))[:-1], ZeroDivisionError("oops")])
    agent = Agent(session, model)
    outcome = await agent.complete("go")
    assert outcome.status == "failed" and "ZeroDivisionError: oops" in outcome.detail
    assert len(agent.messages) == 3


async def test_a_stream_error_after_the_end_of_a_reply_is_ignored() -> None:
    model = PlaybackModel([*text_reply("ok"), ReplyStreamCut("late")])
    outcome = await Agent(RecordingSession(), model).complete("go")
    assert outcome.ok and outcome.text == "ok"


@pytest.mark.parametrize(("reason", "status"), [("length", "length"), ("refused", "refused"), ("other", "answered")])
async def test_a_text_ended_by_a_limit_or_refusal_does_not_count_as_answered(reason: Any, status: str) -> None:
    outcome = await Agent(RecordingSession(), PlaybackModel([TextDelta("x"), ReplyFinished(reason)])).complete("go")
    assert outcome.status == status


# --- budgets ------------------------------------------------------------------------------------------------


@pytest.mark.proves("A-08")
async def test_the_turn_budget_ends_the_run_after_the_last_turns_calls() -> None:
    session = RecordingSession()
    model = PlaybackModel(*[call_reply(("echo", {})) for _ in range(9)])
    events = await events_of(Agent(session, model, budget=Budget(turns=3)))
    assert isinstance(events[-1], RunFinished) and isinstance(events[-2], BudgetExhausted)
    assert (events[-1].outcome.status, events[-1].outcome.budget) == ("budget", "turns")
    assert events[-2].text == "The budget of 3 turns is used up."
    assert len(session.ran) == 3 == len(model.requests)


@pytest.mark.proves("A-08")
async def test_calls_beyond_the_call_budget_are_answered_without_running() -> None:
    session = RecordingSession()
    model = PlaybackModel(call_reply(("echo", {})), call_reply(("echo", {"n": 2}), ("echo", {"n": 3})))
    agent = Agent(session, model, budget=Budget(calls=2))
    outcome = await agent.complete("go")
    assert (outcome.status, outcome.budget) == ("budget", "calls")
    assert len(session.ran) == 2 and len(session.calls) == 3
    assert session.calls[-1].problem_kind == "limit"
    last = agent.messages[-1]
    assert isinstance(last, CallResultsMessage)
    assert '"error_kind":"limit"' in last.results[1].text


async def test_a_model_that_keeps_to_the_call_budget_may_still_answer() -> None:
    model = PlaybackModel(call_reply(("echo", {})), text_reply("ok"))
    outcome = await Agent(RecordingSession(), model, budget=Budget(calls=1)).complete("go")
    assert outcome.ok


@pytest.mark.proves("A-08")
async def test_no_call_starts_once_the_token_budget_is_used_up() -> None:
    session = RecordingSession()
    model = PlaybackModel([TokenUsage(90, 10), *call_reply(("mail.send", {}))])
    outcome = await Agent(session, model, budget=Budget(tokens=100)).complete("go")
    assert (outcome.status, outcome.budget) == ("budget", "tokens")
    assert "100 of 100 tokens" in outcome.detail
    assert session.ran == [] and len(session.calls) == 1
    assert (outcome.input_tokens, outcome.output_tokens, outcome.tokens_estimated) == (90, 10, False)


async def test_tokens_are_estimated_where_the_provider_does_not_count_them() -> None:
    outcome = await Agent(RecordingSession(), PlaybackModel(text_reply("x" * 400)), system="s" * 40).complete("g" * 40)
    assert (outcome.input_tokens, outcome.output_tokens, outcome.tokens_estimated) == (20, 100, True)


@pytest.mark.proves("A-08")
async def test_the_time_budget_ends_a_run_whose_reply_does_not_arrive() -> None:
    session, pause = RecordingSession(), ReplyPause()
    model = PlaybackModel([*call_reply(("mail.send", {}))[:-1], pause])
    agent = Agent(session, model, budget=Budget(seconds=0.5))
    events = await events_of(agent)
    assert isinstance(events[-1], RunFinished) and isinstance(events[-2], BudgetExhausted)
    assert events[-1].outcome.budget == "seconds"
    assert model.open_streams == 0
    assert len(session.ran) == 1, "its block was closed"
    assert isinstance(agent.messages[-1], CallResultsMessage)


@pytest.mark.proves("A-08")
async def test_the_time_budget_stops_calls_in_flight_and_they_are_answered() -> None:
    session = RecordingSession()
    session.hold()
    agent = Agent(session, PlaybackModel(call_reply(("echo", {}))), budget=Budget(seconds=0.5))
    outcome = await agent.complete("go")
    assert (outcome.status, outcome.budget) == ("budget", "seconds")
    assert session.cancelled == ["budget"]
    assert isinstance(agent.messages[-1], CallResultsMessage)


@pytest.mark.parametrize("bad", [{"turns": 0}, {"tokens": -1}, {"seconds": float("nan")}, {"calls": 0}])
def test_an_invalid_budget_limit_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of a budget is invalid"):
        Budget(**bad)


# --- stopping -----------------------------------------------------------------------------------------------


async def test_a_stop_during_a_reply_closes_the_stream_and_answers_the_proposed_calls() -> None:
    session, pause = RecordingSession(), ReplyPause()
    model = PlaybackModel([*call_reply(("echo", {}))[:-1], CallBlockOpened(1, "b", "mail.send"), pause])
    agent = Agent(session, model)
    run = asyncio.create_task(agent.complete("go"))
    await pause.reached.wait()
    agent.cancel()
    outcome = await run
    assert (outcome.status, outcome.detail) == ("cancelled", "The user stopped the run.")
    assert model.open_streams == 0
    assert [call.name for call in session.ran] == ["echo"], "the other's block was never closed"
    assert [call.problem_kind for call in session.calls if call.problem] == ["invalid_input"]
    results = agent.messages[-1]
    assert isinstance(results, CallResultsMessage) and "The user stopped the run." in results.results[1].text


async def test_a_stop_while_calls_run_stops_them_and_keeps_their_answers() -> None:
    session = RecordingSession()
    session.hold()
    agent = Agent(session, PlaybackModel(call_reply(("echo", {}))))
    run = asyncio.create_task(agent.complete("go"))
    await session.started.wait()
    agent.cancel("shutdown")
    outcome = await run
    assert (outcome.status, outcome.detail) == ("cancelled", "The kernel is shutting down.")
    assert session.cancelled == ["shutdown"]
    results = agent.messages[-1]
    assert isinstance(results, CallResultsMessage) and '"error_kind":"cancelled"' in results.results[0].text


async def test_a_stop_between_turns_sends_no_further_model_request() -> None:
    model = PlaybackModel(call_reply(("echo", {})), text_reply("never"))
    agent = Agent(RecordingSession(), model)
    async with aclosing(agent.run("go")) as events:
        seen: list[AgentEvent] = []
        async for event in events:
            seen.append(event)
            if isinstance(event, CallAnswered):
                agent.cancel()
    assert isinstance(seen[-1], RunFinished) and seen[-1].outcome.status == "cancelled"
    assert len(model.requests) == 1


async def test_cancelling_the_task_stops_running_calls_and_leaves_a_valid_history() -> None:
    session = RecordingSession()
    session.hold()
    model = PlaybackModel(call_reply(("echo", {})), text_reply("ok"))
    agent = Agent(session, model)
    run = asyncio.create_task(agent.complete("go"))
    await session.started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert session.cancelled == ["user"]
    assert [type(m) for m in agent.messages] == [UserMessage, AssistantMessage, CallResultsMessage]
    session.cancelled.clear()
    assert (await agent.complete("again")).ok


async def test_a_watcher_that_leaves_during_a_reply_leaves_no_open_stream() -> None:
    session = RecordingSession()
    model = PlaybackModel([TextDelta("a"), ReplyPause()], text_reply("ok"))
    agent = Agent(session, model)
    async with aclosing(agent.run("go")) as events:
        async for event in events:
            if isinstance(event, TextDelta):
                break
    assert model.open_streams == 0
    assert (await agent.complete("again")).ok


async def test_a_started_call_is_stopped_and_answered_when_its_watcher_leaves() -> None:
    session, pause = RecordingSession(), ReplyPause()
    session.hold()
    agent = Agent(session, PlaybackModel([*call_reply(("mail.send", {}))[:-1], CallBlockOpened(1, "b", "echo"), pause]))
    async with aclosing(agent.run("go")) as events:
        async for event in events:
            if isinstance(event, CallProposed):
                break
    assert session.cancelled == ["user"] and len(session.calls) == 1
    _, said, results = agent.messages
    assert isinstance(said, AssistantMessage) and [call.name for call in said.calls] == ["mail__send"]
    assert isinstance(results, CallResultsMessage) and '"error_kind":"cancelled"' in results.results[0].text


async def test_one_agent_runs_one_task_at_a_time() -> None:
    pause = ReplyPause()
    agent = Agent(RecordingSession(), PlaybackModel([pause, *text_reply("ok")]))
    first = asyncio.create_task(agent.complete("one"))
    await pause.reached.wait()
    with pytest.raises(UsageError, match="is running a task"):
        await agent.complete("two")
    pause.proceed.set()
    assert (await first).ok


async def test_a_stop_without_a_run_does_nothing() -> None:
    agent = Agent(RecordingSession(), PlaybackModel(text_reply("ok")))
    agent.cancel()
    assert (await agent.complete("go")).ok


async def test_the_model_reads_the_error_of_a_tool_and_the_run_continues() -> None:
    def fail(call: ProposedCall, arguments: dict[str, Any]) -> Result:
        return Result.error("denied", "no rule allows it")

    model = PlaybackModel(call_reply(("mail.send", {})), text_reply("I may not."))
    outcome = await Agent(RecordingSession(fail), model).complete("go")
    assert outcome.ok
    results = model.requests[1].messages[-1]
    assert isinstance(results, CallResultsMessage) and results.results[0].is_error


async def test_an_agents_prompt_is_the_last_section_of_its_system_text() -> None:
    model = PlaybackModel(text_reply("done"))
    await Agent(RecordingSession(), model, workspace="/w", instructions="Speak Dutch.").complete("go")
    assert model.requests[0].system.endswith("# Instructions\n\nSpeak Dutch.\n")


def test_a_budget_takes_limits_from_the_run_then_the_agent_then_the_defaults() -> None:
    budgets = AgentBudgets(turns=7, seconds=2.5)
    assert Budget.combine_limits(budgets, turns=3, calls=9) == Budget(turns=3, tokens=None, seconds=2.5, calls=9)
    assert Budget.combine_limits(budgets) == Budget(turns=7, seconds=2.5)
    assert Budget.combine_limits(AgentBudgets()) == Budget()
