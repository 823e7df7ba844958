"""The budget of a sub-agent: also limited by the rest of its parent's, unless configured otherwise."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.kernel.test_sub_agents import READER, WRITES, answers, kernel_of, models, task

from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import TokenUsage
from handrail.agent.run_budget import Budget
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, call_reply, text_reply


@pytest.mark.proves("A-03")
async def test_a_sub_agents_turns_count_towards_its_parent_only_with_a_shared_budget(tmp_path: Path) -> None:
    own = f"{READER}\n[budgets]\nshared = false\nturns = 3"
    for manifest, status in ((READER, "budget"), (own, "answered")):
        folder = tmp_path / status
        folder.mkdir()
        async with kernel_of(folder, {"reader": manifest}) as kernel:
            reads = [call_reply(("read", {"path": "nothing"})) for _ in range(2)]
            reader = PlaybackModel(*reads, text_reply("done"))
            top = PlaybackModel(call_reply(task("reader")), text_reply("end"))
            agent = Agent(await kernel.session(), top, budget=Budget(turns=3), models=models(reader=reader))
            assert (await agent.complete("Go.")).status == status
            assert len(reader.requests) == (2 if status == "budget" else 3)


@pytest.mark.proves("A-03")
async def test_concurrent_sub_agents_use_at_most_the_turns_that_their_parent_has_left(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"reader": READER}) as kernel:
        pauses = [ReplyPause() for _ in range(4)]
        reader = PlaybackModel(*([pause, *text_reply("done")] for pause in pauses))
        top = PlaybackModel(call_reply(*(task("reader") for _ in range(4))), text_reply("end"))
        agent = Agent(await kernel.session(), top, budget=Budget(turns=3), models=models(reader=reader))
        run = asyncio.ensure_future(answers(agent))
        for pause in pauses[:2]:
            await pause.reached.wait()
        for pause in pauses:
            pause.proceed.set()
        found = await run
        assert [result.ok for result in found].count(True) == 2, "one turn of three was its own"
        assert all("The budget of 3 turns is used up" in str(result.error_text) for result in found if not result.ok)
        assert (len(top.requests), len(reader.requests)) == (1, 2)


@pytest.mark.proves("A-03", "A-08")
async def test_sub_agent_calls_do_not_start_when_their_reply_exhausts_the_parents_tokens(tmp_path: Path) -> None:
    async with kernel_of(tmp_path, {"writer": WRITES}) as kernel:
        write = call_reply(("write", {"path": "a", "content": "x"}))
        writer = PlaybackModel([*write[:-1], TokenUsage(90, 10), write[-1]])
        top = PlaybackModel([TokenUsage(10, 1), *call_reply(task("writer"))])
        agent = Agent(
            await kernel.session(), top, budget=Budget(tokens=100, context=None), models=models(writer=writer)
        )
        assert (await agent.complete("Go.")).budget == "tokens" and writer.requests
        assert not (tmp_path / "ws" / "a").exists()


@pytest.mark.proves("A-03", "A-08")
@pytest.mark.parametrize("shared", [True, False])
async def test_the_time_budget_of_a_run_limits_background_sub_agents_that_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    async with kernel_of(tmp_path, {"reader": f"{READER}\n[budgets]\nshared = {str(shared).lower()}"}) as kernel:
        pause = ReplyPause()
        top = PlaybackModel(call_reply(task("reader", background=True)), text_reply("Begun."))
        session = await kernel.session()
        reader = PlaybackModel([pause, *text_reply("Read.")])
        agent = Agent(session, top, budget=Budget(seconds=3600), models=models(reader=reader))
        assert (await agent.complete("Go.")).text == "Begun."
        await pause.reached.wait()
        (job,) = await session.jobs.list()
        loop, now = asyncio.get_running_loop(), asyncio.get_running_loop().time
        monkeypatch.setattr(loop, "time", lambda: now() + 3600)
        if not shared:
            pause.proceed.set()
        result = await session.jobs.wait(job.id, timeout_ms=30_000)
        assert result is not None
        if shared:
            assert result.error_kind == "limit"
            assert "Sub-agent reader did not finish. The budget of 3600 seconds is used up" in str(result.error_text)
        else:
            assert result.data["text"] == "Read."


@pytest.mark.proves("A-03", "A-08")
async def test_a_background_task_of_the_last_turn_has_no_budget_left(
    tmp_path: Path,
) -> None:
    async with kernel_of(tmp_path, {"reader": READER}) as kernel:
        session = await kernel.session()
        reader = PlaybackModel(text_reply("Read."), text_reply("Read."))
        top = PlaybackModel(call_reply(task("reader", background=True)))
        agent = Agent(session, top, budget=Budget(turns=1), models=models(reader=reader))
        assert (await agent.complete("Go.")).status == "budget"
        (job,) = await session.jobs.list()
        result = await session.jobs.wait(job.id, timeout_ms=30_000)
        assert result is not None and result.error_kind == "limit" and not reader.requests
        assert (await session.call(*task("reader"))).data["text"] == "Read.", "what no run of its has begun is nobody's"
