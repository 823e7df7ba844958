"""Compaction on request, by the model's tool or the library, between and within runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kernel.guests import joined_kernel

from handrail import Session, UsageError, tool
from handrail.agent.agent_loop import Agent
from handrail.agent.compaction import INTRO
from handrail.agent.model_protocol import ReplyFinished, TextDelta, UserMessage
from handrail.agent.run_budget import Budget
from handrail.agent.run_events import CallAnswered, ConversationCompacted
from handrail.contract.calls_and_results import Result
from handrail.kernel.kernel_interface import Kernel
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("A-08")


@tool(id="big.look", side_effect="read", locks=[])
async def look(n: int) -> str:
    """Look at something large."""
    return f"part {n} " + "x" * 2_000


RULES = ["allow big.look"]
LOOKS = [call_reply(("big__look", {"n": n}), text=f"step {n}") for n in range(4)]


async def run_four_looks(session: Session, *more: Any, **budget: Any) -> tuple[Agent, PlaybackModel]:
    """Return an agent with a session of eight messages and four calls."""
    model = PlaybackModel(*LOOKS, text_reply("Looked."), *more)
    agent = Agent(session, model, budget=Budget(**budget))
    assert (await agent.complete("Look four times.")).ok
    return agent, model


async def compactions(kernel: Kernel, session: Session) -> list[dict[str, Any]]:
    await kernel.log.flush()
    return [dict(one.body or {}) for one in kernel.log.reader.records(session=session.id, kind="compacted")]


async def test_the_library_compacts_a_conversation_between_runs_and_records_it(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look], rules=RULES) as kernel:
        session = await kernel.session()
        agent, model = await run_four_looks(session, text_reply("Yes."))
        assert len(agent.messages) == 10
        made = await agent.compact()
        assert (made.removed_messages, made.kept_messages, made.was_requested, made.is_summarised) == (
            9,
            1,
            True,
            False,
        )
        assert made.tokens_after < made.tokens_before and "9 older messages are left out and 1 are kept" in str(made)
        (recorded,) = await compactions(kernel, session)
        assert (recorded["removed_messages"], recorded["kept_messages"], recorded["was_requested"]) == (9, 1, True)
        nothing = await agent.compact()
        assert (nothing.removed_messages, nothing.kept_messages) == (0, 2) and "Nothing to compact" in str(nothing)
        assert len(await compactions(kernel, session)) == 1
        assert (await agent.complete("Did you look?")).ok
        first = model.requests[-1].messages[0]
        assert isinstance(first, UserMessage) and first.text.startswith(INTRO)
        assert "- the user said: Look four times." in first.text and '- you called big__look {"n": 3}: ok' in first.text
        again = Agent(session, PlaybackModel(text_reply(".")))
        await again.complete("On.")
        assert again.messages[: len(agent.messages)] == agent.messages, "and so for the next agent of the session"


async def test_a_compact_call_of_the_model_shortens_its_next_request(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look], rules=RULES) as kernel:
        session = await kernel.session()
        asks = call_reply(("memory__compact", {}), ("big__look", {"n": 9}))
        model = PlaybackModel(*LOOKS, asks, text_reply("Done."))
        told: list[ConversationCompacted] = []
        answers: list[Result] = []
        async for event in Agent(session, model).run("Look four times."):
            if isinstance(event, ConversationCompacted):
                told.append(event)
            elif isinstance(event, CallAnswered) and event.answer.tool_id == "memory.compact":
                answers.append(event.answer.model)
        (answer,), (made,) = answers, told
        assert answer.data["removed_messages"] == made.removed_messages == 7
        assert answer.data["kept_messages"] == 2 and made.kept_messages == 4, (
            "with the reply that asked, and its answers"
        )
        assert "Before your next reply" in answer.data["note"]
        before, after = model.requests[-2].messages, model.requests[-1].messages
        assert len(before) == 9 and len(after) == 5
        assert isinstance(after[0], UserMessage) and after[0].text.startswith(INTRO)
        assert "part 9" in str(after) and "part 0" not in str(after)
        assert len(await compactions(kernel, session)) == 1


async def test_the_compact_tool_reports_that_there_is_nothing_to_compact(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        model = PlaybackModel(call_reply(("memory__compact", {})), text_reply("."))
        events = [event async for event in Agent(session, model).run("Compact.")]
        (answer,) = [event.answer.model for event in events if isinstance(event, CallAnswered)]
        assert answer.data["removed_messages"] == 0 and answer.data["note"].startswith("Nothing to compact")
        assert not [event for event in events if isinstance(event, ConversationCompacted)]
        assert await compactions(kernel, session) == []


async def test_a_session_without_a_model_has_no_conversation_to_compact(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        assert "memory.compact" not in [spec.id for spec in session.active_tools]
        answer = await session.call("memory.compact", {"store": "working"})
        assert answer.error_kind == "unavailable" and "no conversation to compact" in str(answer.error_text)
        both = await session.call("memory.compact", {})
        assert both.ok and both.data["replaced_facts"] == 0 and "no conversation to compact" in both.data["note"]


async def test_a_compact_call_between_two_runs_takes_effect_immediately(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look], rules=RULES) as kernel:
        session = await kernel.session()
        agent, _ = await run_four_looks(session)
        answer = await session.call("memory.compact", {})
        assert (answer.data["removed_messages"], answer.data["kept_messages"]) == (9, 1)
        assert len(agent.messages) == 2


async def test_a_budget_with_summary_compaction_asks_the_model_for_a_summary(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look], rules=RULES) as kernel:
        session = await kernel.session()
        said = [TextDelta("looked at four parts"), ReplyFinished("end")]
        agent, model = await run_four_looks(session, said, compaction="summary", context=None)
        made = await agent.compact()
        assert made.is_summarised and "looked at four parts" in str(agent.messages[0])
        assert model.requests[-1].tools == ()


async def test_compaction_is_refused_during_a_run(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look], rules=RULES) as kernel:
        session = await kernel.session()
        agent = Agent(session, PlaybackModel(*LOOKS, text_reply(".")))
        events = agent.run("Look.")
        await anext(events)
        with pytest.raises(UsageError, match=r"memory\.compact"):
            await agent.compact()
        await events.aclose()


@pytest.mark.proves("L-07")
async def test_an_agent_in_a_connected_process_compacts_its_conversation(tmp_path: Path) -> None:
    holding = temporary_kernel(tmp_path)
    async with holding, joined_kernel(tmp_path, tools=[look], rules=RULES) as kernel:
        session = await kernel.session()
        model = PlaybackModel(*LOOKS, call_reply(("memory__compact", {})), text_reply("Done."))
        agent = Agent(session, model)
        assert (await agent.complete("Look four times.")).ok
        assert str(model.requests[-1].messages[0]).count(INTRO) == 1 and len(model.requests[-1].messages) == 5
        assert (await agent.compact()).removed_messages > 0
