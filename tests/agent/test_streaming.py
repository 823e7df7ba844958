"""Calls that start while their reply is still arriving: timing, order, exactly once, and crashes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tests.agent.sessions import RecordingSession
from tests.agent.test_providers import Kind, bench, each_provider
from tests.agent.test_resumed_runs import KeptHere
from tests.kernel.guests import joined_kernel
from tests.session.crashing import die_by_itself

from handrail import ApprovalAnswer, tool
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import (
    AssistantMessage,
    CallArgumentsDelta,
    CallBlockClosed,
    CallBlockOpened,
    CallResultsMessage,
    ReplyFinished,
    ReplyStreamCut,
    TextDelta,
    TokenUsage,
    UserMessage,
)
from handrail.agent.run_budget import Budget
from handrail.agent.run_events import AgentEvent, CallAnswered, CallProposed, RunFinished
from handrail.record.verification import verify_log
from handrail.testing.provider_request_checks import PlaybackModel, ReplyPause, Step, call_reply, text_reply
from handrail.testing.provider_servers import ReplyCall, ScriptedReply
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel


def call(index: int, name: str, arguments: str = "{}") -> list[Step]:
    return [CallBlockOpened(index, None, name), CallArgumentsDelta(index, arguments), CallBlockClosed(index)]


@pytest.mark.proves("X-09")
async def test_a_call_finishes_while_its_reply_still_streams_and_is_answered_once(tmp_path: Path) -> None:
    ran: list[int] = []
    done, pause = asyncio.Event(), ReplyPause()

    @tool(id="test.mark", side_effect="external", locks=[])
    async def mark(n: int) -> int:
        """Have an effect."""
        ran.append(n)
        done.set()
        return n

    async with temporary_kernel(tmp_path, tools=[mark], rules=["allow test.mark"]) as kernel:
        session = await kernel.session()
        steps = [*call(0, "test__mark", '{"n":1}'), TextDelta("and"), pause, *call(1, "test__mark", '{"n":2}')]
        model = PlaybackModel([*steps, ReplyFinished("calls")], text_reply("done"))
        run = asyncio.create_task(Agent(session, model).complete("go"))
        await asyncio.gather(done.wait(), pause.reached.wait())
        assert ran == [1], "before the reply has ended"
        assert session.history is not None
        rows = await session.history.read_stored_messages()
        assert rows[-1][1]["parts"] == [
            {"call": "hr0000001", "name": "test__mark", "arguments": {"n": 1}, "id": f"{session.id}/1.0"}
        ], "what there was of the reply is kept before"
        pause.proceed.set()
        assert (await run).ok and ran == [1, 2]
        assert [len(rows) for rows in (await session.history.read_stored_messages(), kernel.log.reader.calls())] == [
            4,
            2,
        ]
        assert verify_log(kernel.log.reader).ok


@pytest.mark.parametrize("promotable", [False, True])
async def test_a_tool_that_stops_its_run_is_cancelled_with_the_run(tmp_path: Path, promotable: bool) -> None:
    agents: list[Agent] = []

    @tool(id="test.end", side_effect="read", locks=[], promotable=promotable)
    async def end() -> None:
        """Stop the run, and wait."""
        agents[0].cancel()
        await asyncio.Event().wait()

    async with temporary_kernel(tmp_path, tools=[end], rules=["allow test.end"]) as kernel:
        model = PlaybackModel([*call(0, "test__end"), ReplyPause(), ReplyFinished("calls")], text_reply("never"))
        agents.append(Agent(await kernel.session(), model))
        outcome = await agents[0].complete("go")
        assert outcome.status == "cancelled" and model.open_streams == 0
        told = agents[0].messages[-1]
        assert isinstance(told, CallResultsMessage) and '"error_kind":"cancelled"' in told.results[0].text


async def test_a_call_starts_before_its_proposal_event(tmp_path: Path) -> None:
    seen: list[str] = []

    @tool(id="test.mark", side_effect="read", promotable=True)
    async def mark() -> None:
        """Say that it runs, in a task of its own."""
        seen.append("runs")

    async with temporary_kernel(tmp_path, tools=[mark], rules=["allow test.mark"]) as kernel:
        pause = ReplyPause()
        model = PlaybackModel([*call(0, "test__mark"), pause, ReplyFinished("calls")], text_reply("done"))
        async with aclosing(Agent(await kernel.session(), model).run("go")) as events:
            async for event in events:
                if isinstance(event, CallProposed):
                    seen.append("told")
                    pause.proceed.set()
    assert seen == ["runs", "told"]


@pytest.mark.proves("X-09")
async def test_a_call_in_an_unclosed_block_does_not_run() -> None:
    session, pause = RecordingSession(), ReplyPause()
    steps: list[Step] = [CallBlockOpened(0, None, "mail.send"), CallArgumentsDelta(0, '{"n":1}'), TextDelta("x"), pause]
    model = PlaybackModel([*steps, *call(1, "echo"), ReplyStreamCut("gone")], text_reply("ok"))
    agent = Agent(session, model)
    run = asyncio.create_task(agent.complete("go"))
    await pause.reached.wait()
    assert session.calls == []
    pause.proceed.set()
    assert (await run).ok
    assert [(one.name, one.problem is None) for one in session.calls] == [("mail.send", False), ("echo", True)]


@pytest.mark.proves("X-09")
@pytest.mark.parametrize("arguments", ["", '{"n":'])
async def test_a_last_call_that_a_limit_may_have_cut_waits_for_the_next_event(arguments: str) -> None:
    session, pause = RecordingSession(), ReplyPause()
    steps: list[Step] = [*call(0, "echo", arguments), pause]
    model = PlaybackModel(
        [*steps, ReplyFinished("length")], [*steps[:-1], TextDelta(" "), ReplyFinished("calls")], text_reply("ok")
    )
    run = asyncio.create_task(Agent(session, model).complete("go"))
    await pause.reached.wait()
    assert session.calls == []
    pause.proceed.set()
    assert (await run).ok
    assert session.calls[0].problem is not None and "output limit" in session.calls[0].problem
    assert session.calls[1].problem is None, "what came after it says that it was not the last"


async def test_late_argument_pieces_do_not_change_a_started_call() -> None:
    session = RecordingSession()
    late = [*call(0, "echo", '{"n":1}'), CallArgumentsDelta(0, '{"n":2}'), ReplyFinished("calls")]
    agent = Agent(session, PlaybackModel(late, text_reply("ok")))
    assert (await agent.complete("go")).ok
    assert [(one.arguments, one.problem) for one in session.calls] == [('{"n":1}', None)]
    results = agent.messages[2]
    assert isinstance(results, CallResultsMessage) and results.results[0].text == '{"type":"output","data":{"n":1}}'


async def test_started_calls_finish_and_are_answered_in_order_after_the_stream_is_interrupted() -> None:
    session = RecordingSession()
    session.hold()
    model = PlaybackModel(
        [*call(0, "echo", '{"n":1}'), *call(1, "echo", '{"n":2}'), ReplyStreamCut("gone")], text_reply("ok")
    )
    agent = Agent(session, model)
    events: list[AgentEvent] = []
    async with aclosing(agent.run("go")) as run:
        async for event in run:
            events.append(event)
            if type(event).__name__ == "ReplyInterrupted":
                session.release.set()
    told = [(type(e).__name__, e.position) for e in events if isinstance(e, (CallProposed, CallAnswered))]
    assert told == [("CallProposed", 0), ("CallProposed", 1), ("CallAnswered", 0), ("CallAnswered", 1)]
    assert isinstance(events[-1], RunFinished) and events[-1].outcome.ok


async def test_a_call_counts_against_the_budget_when_it_starts() -> None:
    session, pause = RecordingSession(), ReplyPause()
    model = PlaybackModel([*call(0, "echo"), *call(1, "echo"), pause, ReplyFinished("calls")])
    run = asyncio.create_task(Agent(session, model, budget=Budget(calls=1)).complete("go"))
    await pause.reached.wait()
    while len(session.calls) < 2:
        await asyncio.sleep(0)
    assert [one.problem_kind for one in session.calls if one.problem] == ["limit"]
    pause.proceed.set()
    assert (await run).budget == "calls"
    spent = PlaybackModel([TokenUsage(90, 10), *call(0, "mail.send"), ReplyFinished("calls")])
    outcome = await Agent(session, spent, budget=Budget(tokens=100)).complete("go")
    assert outcome.budget == "tokens" and len(session.ran) == 1


async def test_an_open_approval_request_delays_later_side_effects_and_no_reads(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    person.may_answer.clear()
    async with temporary_kernel(tmp_path, rules=["ask write a", "allow write b"]) as kernel:
        (tmp_path / "ws" / "c").write_text("there")
        session = await kernel.session(approval_handler=person)
        finished: list[str] = []
        session.watch_events(lambda event: finished.append(event.call_id[-1]) if event.kind == "finished" else None)
        pause = ReplyPause()
        written = [call(n, "write", f'{{"path":"{path}","content":"x"}}') for n, path in enumerate("ab")]
        steps = [*written[0], *written[1], *call(2, "read", '{"path":"c"}'), pause, ReplyFinished("calls")]
        run = asyncio.create_task(Agent(session, PlaybackModel(steps, text_reply("ok"))).complete("go"))
        await person.request_received.wait()
        while not finished:
            await asyncio.sleep(0)
        assert finished == ["2"] and not (tmp_path / "ws" / "b").exists()
        pause.proceed.set()
        person.may_answer.set()
        assert (await run).ok and finished[0] == "2" and (tmp_path / "ws" / "b").exists()


async def test_a_very_large_reply_is_not_stored_again_for_each_call() -> None:
    class Counting(KeptHere):
        kept = 0

        def store_messages(self, entries: Any) -> Awaitable[None]:
            self.kept += sum(len(str(data)) for _, data in entries)
            return super().store_messages(entries)

    history = Counting()
    session = RecordingSession(history=history)
    big = '{"t":"' + "x" * 400_000 + '"}'
    model = PlaybackModel(
        [*(step for n in range(40) for step in call(n, "echo", big)), ReplyFinished("calls")], text_reply("ok")
    )
    assert (await Agent(session, model).complete("go")).ok
    assert len(session.ran) == 40 and history.kept < 90_000_000, "40 × 16 MB would be 320 MB"


@pytest.mark.proves("X-09", "G-10")
@pytest.mark.parametrize("joins", [False, True])
async def test_a_call_does_not_run_if_its_reply_cannot_be_stored(tmp_path: Path, joins: bool) -> None:
    ran: list[str] = []

    @tool(id="test.act", side_effect="write", locks=[])
    async def act() -> None:
        """Have an effect."""
        ran.append("act")

    @tool(id="test.ask", side_effect="write", locks=[])
    async def ask() -> None:
        """Have an effect that a person allows."""
        ran.append("ask")

    person = ScriptedApprovalHandler([ApprovalAnswer("once")])
    opened: dict[str, Any] = {"tools": [act, ask], "rules": ["allow test.act"]}
    async with temporary_kernel(tmp_path, **({} if joins else opened)) as held, contextlib.AsyncExitStack() as stack:
        kernel: Any = await stack.enter_async_context(joined_kernel(tmp_path, **opened)) if joins else held
        session = await kernel.session(approval_handler=person)
        last = 2**62 - 1 if joins else 2**63 - 1  # a place after which there is none, which what the user says takes
        await held.components.store.messages.queue_message_writes(session.id, [(last - 1, {})], 1)
        steps = [*call(0, "test__act"), TextDelta("and"), *call(1, "test__ask"), ReplyFinished("calls")]
        outcome = await Agent(session, PlaybackModel(steps, text_reply("never asked"))).complete("go")
        assert outcome.status == "failed" and "The conversation cannot be stored" in outcome.detail
        assert ran == [] and not person.requests
        await held.log.flush()
        kinds = [record.kind for record in held.log.reader.records(call=f"{session.id}/1.0")]
        assert kinds == ([] if joins else ["proposed", "authorised", "intended", "rejected"])
        assert verify_log(held.log.reader).ok


@each_provider
@pytest.mark.proves("X-09")
async def test_a_call_starts_at_its_providers_closing_event_while_the_reply_continues(kind: Kind) -> None:
    pause = ReplyPause()
    calls = (ReplyCall("echo", {"n": 1}), ReplyCall("echo", {"n": 2}), pause, ReplyCall("echo", {"n": 3}))
    async with bench(kind, ScriptedReply("Look: ", *calls), ScriptedReply("ok")) as b:
        run = asyncio.create_task(b.run())
        await b.session.started.wait()  # nothing else lets the reply go on
        assert len(b.session.calls) < 3
        pause.proceed.set()
        outcome = await run
        b.accepted()
    assert outcome.ok and [call.problem for call in b.session.calls] == [None, None, None]
    assert [text for _, text in b.results(1)] == [f'{{"type":"output","data":{{"n":{n}}}}}' for n in (1, 2, 3)]


KILLED = """
import asyncio, os, sys
from pathlib import Path
from handrail import tool
from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import CallArgumentsDelta, CallBlockClosed, CallBlockOpened
from handrail.contract.services.channels_and_triggers import Notification
from handrail.testing.scripted_kernel import temporary_kernel
from handrail.testing.provider_request_checks import ReplyPause, PlaybackModel

folder = Path(sys.argv[1])
effects = os.open(folder / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
holds = asyncio.Event()

@tool(id="crash.write", side_effect="external", locks=[])
async def write(name: str) -> str:
    "Have an effect, and stay where that is asked."
    os.write(effects, (name + "\\n").encode())
    if name == "held":
        holds.set()
        await asyncio.Event().wait()
    return name

async def main():
    async with temporary_kernel(folder, tools=[write], rules=["allow crash.*"]) as kernel:
        session = await kernel.session("ses_midreply")
        await kernel.inbound_services.notifications.store_notification(Notification("n1", session.id, "job", "bash_1", "it is done", 1))
        pause, steps = ReplyPause(), []
        for n, name in enumerate(("done", "held", "partial")):
            steps += [CallBlockOpened(n, None, "crash__write"), CallArgumentsDelta(n, '{"name":"%s"}' % name), CallBlockClosed(n)]
        run = asyncio.ensure_future(Agent(session, PlaybackModel([*steps[:-1], pause])).complete(None))
        done = asyncio.Event()
        session.watch_events(lambda event: done.set() if event.kind == "finished" else None)
        await asyncio.gather(pause.reached.wait(), holds.wait(), done.wait())
        await kernel.log.flush()
        DIE
        await run

asyncio.run(main())
"""


@pytest.mark.proves("X-09", "G-05", "A-10")
async def test_calls_started_before_a_crash_in_a_reply_are_answered_and_not_repeated(
    tmp_path: Path,
) -> None:
    die_by_itself(tmp_path, KILLED)

    @tool(id="crash.write", side_effect="external", locks=[])
    async def write(name: str) -> str:
        """Never run again."""
        raise AssertionError(name)

    async with temporary_kernel(tmp_path, tools=[write], rules=["allow crash.*"]) as kernel:
        session = await kernel.session("ses_midreply")
        model = PlaybackModel(text_reply("so be it"))
        agent = Agent(session, model)
        assert (await agent.complete(None)).ok
        heard, said, results, _ = agent.messages
        assert isinstance(heard, UserMessage) and heard.text.count("it is done") == 1, "told once"
        assert isinstance(said, AssistantMessage)
        assert [part.arguments["name"] for part in said.calls] == ["done", "held"], "not what was never closed"
        assert isinstance(results, CallResultsMessage)
        first, second = results.results
        assert '"data":"done"' in first.text and '"error_kind":"interrupted"' in second.text
        assert session.notifications is not None and not await session.notifications.list_pending()
        forked = await kernel.session(await kernel.fork_session(session.id))
        again = Agent(forked, PlaybackModel(call_reply(("crash.write", {"name": "x"})), text_reply("no")))
        assert (await again.complete("go on")).ok and again.messages[:4] == agent.messages
        assert verify_log(kernel.log.reader).ok
    assert (tmp_path / "effects").read_text().split() == ["done", "held"]


async def test_a_burst_of_reply_events_does_not_block_the_event_loop(tmp_path: Path) -> None:
    turns = 0

    def counted() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(counted)

    async with temporary_kernel(tmp_path) as kernel:
        model = PlaybackModel([*[TextDelta("a ")] * 6_400, ReplyFinished("end")])
        async with aclosing(Agent(await kernel.session(), model).run("go")) as events:
            first = await anext(aiter(events))
            counted()
            told = [first, *[event async for event in events]]
    assert isinstance(told[-1], RunFinished) and turns > 500
