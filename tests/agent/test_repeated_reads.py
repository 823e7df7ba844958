"""A second read of an unchanged file is not repeated while its text is complete in the conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from handrail import Agent
from handrail.agent.conversation import Conversation
from handrail.agent.model_protocol import CallResultsMessage
from handrail.agent.reply_assembly import ModelReply
from handrail.agent.run_budget import Budget
from handrail.agent.run_events import CallAnswered, ConversationCompacted
from handrail.contract.agent_manifest import AgentBudgets
from handrail.contract.calls_and_results import CallAnswer, ProposedCall, Result
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import temporary_kernel

LONG = "".join(f"line {number} of a long file\n" for number in range(100))
AGAIN = {"path": "long.txt"}


def list_call_results(model: PlaybackModel) -> list[dict[str, Any]]:
    """Return the results in the last request of the model, in order."""
    messages = model.requests[-1].messages
    return [json.loads(one.text) for each in messages if isinstance(each, CallResultsMessage) for one in each.results]


def put(folder: Path, name: str = "long.txt", text: str = LONG) -> None:
    (folder / "ws").mkdir(exist_ok=True)
    (folder / "ws" / name).write_text(text)


def reads(*calls: dict[str, Any]) -> PlaybackModel:
    return PlaybackModel(*(call_reply(("read", one)) for one in calls), text_reply("Done."))


def is_whole(answer: dict[str, Any]) -> bool:
    assert ("text" in answer["data"]) is not answer.get("metadata", {}).get("unchanged", False)
    return "text" in answer["data"]


@pytest.mark.proves("A-08")
async def test_a_repeated_read_of_an_unchanged_long_file_returns_a_notice(tmp_path: Path) -> None:
    put(tmp_path)
    put(tmp_path, "short.txt", "Short.\n")
    ranged = {"path": "long.txt", "offset": 2, "limit": 80}
    bytes_of = {"path": "long.txt", "unit": "bytes"}
    model = reads(
        AGAIN, {"path": "./long.txt"}, ranged, ranged, bytes_of, bytes_of, {"path": "short.txt"}, {"path": "short.txt"}
    )
    async with temporary_kernel(tmp_path) as kernel:
        events = [event async for event in Agent(await kernel.session(), model).run("Read.")]
    assert [is_whole(one) for one in list_call_results(model)] == [True, False, True, False, True, False, True, True]
    second = list_call_results(model)[1]
    assert second["metadata"] == {"unchanged": True} and "same as in your earlier read" in second["data"]["message"]
    assert {key: second["data"][key] for key in ("path", "first_line", "last_line", "next")} == {
        "path": "long.txt",
        "first_line": 1,
        "last_line": 100,
        "next": None,
    }
    answers = [event.answer.result.data["text"] for event in events if isinstance(event, CallAnswered)]
    assert answers[0] == answers[1], "people and the log have all of it"


@pytest.mark.proves("A-08")
async def test_a_changed_file_is_read_in_full_even_with_the_same_size_and_time(tmp_path: Path) -> None:
    put(tmp_path)
    model = reads(AGAIN, AGAIN, AGAIN, AGAIN)
    async with temporary_kernel(tmp_path) as kernel:
        async for event in Agent(await kernel.session(), model).run("Read."):
            if isinstance(event, CallAnswered) and len(model.requests) == 2:
                put(tmp_path, text=LONG.replace("line 7 ", "LINE 7 "))
    assert [is_whole(one) for one in list_call_results(model)] == [True, False, True, False]
    assert "LINE 7 " in list_call_results(model)[2]["data"]["text"]


@pytest.mark.proves("A-08")
async def test_a_file_is_read_in_full_after_a_new_message_and_in_another_session(tmp_path: Path) -> None:
    put(tmp_path)
    async with temporary_kernel(tmp_path) as kernel:
        model = PlaybackModel(
            *(call_reply(("read", AGAIN)) if n in (0, 2, 3) else text_reply("Done.") for n in range(5))
        )
        agent = Agent(session := await kernel.session(), model)
        await agent.complete("Read.")
        await agent.complete("Read it again.")
        assert [is_whole(one) for one in list_call_results(model)] == [True, True, False]
        fork = await kernel.session(await kernel.fork_session(session.id))
        await Agent(fork, other := reads(AGAIN)).complete("Read.")
        assert is_whole(list_call_results(other)[-1]), "a fork is another conversation"
        await Agent(session, later := reads(AGAIN)).complete("Read.")
        assert is_whole(list_call_results(later)[-1]), (
            "an agent that takes the session up does not know what was given whole"
        )
        for _ in range(2):
            assert (await session.call("read", AGAIN)).data["text"] == LONG.removesuffix("\n"), "a program is no model"


@pytest.mark.proves("A-08")
async def test_a_file_is_read_in_full_again_after_compaction(tmp_path: Path) -> None:
    put(tmp_path)
    filling = {"content": "x" * 6_000, "path": "other.txt"}
    model = PlaybackModel(
        call_reply(("read", AGAIN)),
        *(call_reply(("write", {**filling, "path": f"other{n}.txt"})) for n in range(3)),
        call_reply(("read", AGAIN)),
        text_reply("Done."),
    )
    async with temporary_kernel(tmp_path, rules=["allow *"]) as kernel:
        agent = Agent(await kernel.session(), model, budget=Budget(context=4_000))
        events = [event async for event in agent.run("Read.")]
    assert any(isinstance(event, ConversationCompacted) for event in events)
    whole = [
        is_whole(one) for one in list_call_results(model) if "path" in one["data"] and one["data"]["path"] == "long.txt"
    ]
    assert whole == [True], "the earlier read is no longer there"


@pytest.mark.proves("A-08")
async def test_a_setting_returns_the_text_on_every_read(tmp_path: Path) -> None:
    put(tmp_path)
    model = reads(AGAIN, AGAIN)
    wanted = Budget.combine_limits(AgentBudgets.model_validate({"repeat_reads": True}))
    async with temporary_kernel(tmp_path) as kernel:
        await Agent(await kernel.session(), model, budget=wanted).complete("Read.")
    assert [is_whole(one) for one in list_call_results(model)] == [True, True]
    assert not Budget.combine_limits(AgentBudgets()).repeat_reads


@pytest.mark.parametrize(
    ("tool", "result"),
    [
        ("read", Result.output({"path": "a", "text": LONG}, truncated=True)),
        ("read", Result.error("failed", LONG)),
        ("read", Result.output(LONG)),
        ("mine", Result.output({"path": "a", "text": LONG})),
    ],
)
def test_repeated_results_of_other_kinds_are_kept_whole(tool: str, result: Result) -> None:
    conversation = Conversation(repeat_reads=False)
    conversation.add_user_message("go")
    for number in range(2):
        calls = (ProposedCall(tool, {}),)
        conversation.add_reply(ModelReply((0,), calls, None, None), [f"s/{number}.0"])
        conversation.add_call_answers({0: CallAnswer(f"s/{number}.0", tool, result, result)})
    first, second = [one.results[0].text for one in conversation.messages if isinstance(one, CallResultsMessage)]
    assert first == second and "line 99" in second
