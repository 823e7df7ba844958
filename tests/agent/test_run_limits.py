"""Runs that send no further request: the token budget is used up, or the run was stopped."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest
from tests.agent.sessions import RecordingSession

from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import ReplyFinished, ReplyStreamCut, TextDelta, TokenUsage
from handrail.agent.run_budget import Budget
from handrail.agent.run_events import AgentEvent, RunFinished, TurnStarted
from handrail.testing.provider_request_checks import PlaybackModel, text_reply


@pytest.mark.proves("A-08")
@pytest.mark.parametrize(
    "first",
    [
        [TokenUsage(90, 10), TextDelta("I look it up"), ReplyFinished("paused")],
        [TokenUsage(90, 10), TextDelta("I look"), ReplyStreamCut("gone")],
    ],
    ids=["paused", "cut"],
)
async def test_the_model_is_not_asked_again_once_the_tokens_are_used_up(first: list[Any]) -> None:
    model = PlaybackModel(first, text_reply("found"))
    outcome = await Agent(RecordingSession(), model, budget=Budget(tokens=100)).complete("go")
    assert (outcome.status, outcome.budget, len(model.requests)) == ("budget", "tokens", 1)


@pytest.mark.proves("A-10")
async def test_a_run_stopped_at_the_start_of_a_turn_sends_no_model_request() -> None:
    model = PlaybackModel(text_reply("too late"))
    agent = Agent(RecordingSession(), model)
    events: list[AgentEvent] = []
    async with aclosing(agent.run("go")) as running:
        async for event in running:
            events.append(event)
            if isinstance(event, TurnStarted):
                agent.cancel()
    assert isinstance(events[-1], RunFinished)
    assert (events[-1].outcome.status, model.requests) == ("cancelled", [])


@pytest.mark.proves("A-10")
async def test_a_run_ends_when_it_is_stopped_at_any_point() -> None:
    for moment in range(40):
        agent = Agent(RecordingSession(), PlaybackModel(text_reply("said")))
        run = asyncio.ensure_future(agent.complete("go"))
        for _ in range(moment):
            await asyncio.sleep(0)
        agent.cancel()
        assert (await run).status in ("answered", "cancelled"), moment
