"""``search_memory`` finds messages and calls of the session, also after compaction, and nothing else."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail import tool
from handrail.agent.agent_loop import Agent
from handrail.agent.run_budget import Budget
from handrail.contract.services.tool_runtime import Runtime
from handrail.contract.session_protocols import Session
from handrail.session.memory import transcript_index as indexing
from handrail.session.memory.transcript_index import cut_excerpt
from handrail.store.memory.passage_index import CREATE_INDEX, find_passages, parse_query, rank_passages
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("T-03b")


@tool(id="notes.look", side_effect="read", locks=[])
def look(about: str) -> dict[str, Any]:
    """Look something up."""
    if about == "nothing":
        raise ValueError("there is no such note: Überraschung")
    return {"note": f'about {about}: "the Answer" is\nforty-two', "key": "key-5d0c1f7ab2e94c63"}


async def search_transcript(session: Session, query: str, **more: Any) -> list[dict[str, Any]]:
    result = await session.call("search_memory", {"query": query, **more})
    assert result.ok, result.error_text
    return result.data["hits"]


async def test_a_search_finds_messages_calls_and_results_by_words_and_phrases(tmp_path: Path) -> None:
    model = PlaybackModel(
        call_reply(("notes__look", {"about": "planets"}), text="I look at the zebra file."),
        text_reply("It says forty-two."),
    )
    async with temporary_kernel(tmp_path, tools=[look], rules=["allow notes.look"]) as kernel:
        session = await kernel.session()
        await Agent(session, model).complete("What is known of Pluto and the planets?")
        (asked, call) = await search_transcript(session, "PLANETS")
        assert {asked["kind"], call["kind"]} == {"user", "call"}
        call = (await search_transcript(session, '"the answer" is'))[0]
        assert (call["tool"], call["kind"]) == ("notes__look", "call") and call["id"].startswith(session.id)
        assert '"the Answer" is\nforty-two' in call["text"]
        assert [hit["text"] for hit in await search_transcript(session, "zebra")] == ["I look at the zebra file."]
        assert [hit["kind"] for hit in await search_transcript(session, "forty-two", kind="assistant")] == ["assistant"]
        whole = (await session.call("search_memory", {"id": call["id"]})).data
        assert "about: planets" in whole["text"] and whole["next"] is None
        part = (await session.call("search_memory", {"id": call["id"], "offset": len(whole["text"]) - 3})).data
        assert part["text"] == whole["text"][-3:]
        assert await search_transcript(session, "search_memory") == []  # its own calls are no part of it
        for wrong in ({}, {"query": "x", "id": "y"}, {"query": "x", "offset": 1}, {"query": '. ,"'}, {"id": "z"}):
            assert (await session.call("search_memory", wrong)).error_kind == "invalid_input", wrong


async def test_a_search_finds_calls_without_a_conversation_and_none_of_another_session(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look], rules=["allow notes.look"]) as kernel:
        one, other = await kernel.session(), await kernel.session()
        await one.call("notes.look", {"about": "planets"})
        await one.call("notes.look", {"about": "nothing"})
        await other.call("notes.look", {"about": "comets"})
        assert [hit["tool"] for hit in await search_transcript(one, "planets")] == ["notes.look"]
        assert [hit["text"].count("Überraschung") for hit in await search_transcript(one, "überraschung")] == [1]
        (comet,) = await search_transcript(other, "comets")
        assert await search_transcript(one, "comets") == [] and await search_transcript(other, "planets") == []
        assert (await one.call("search_memory", {"id": comet["id"]})).error_kind == "invalid_input"


async def test_a_search_finds_messages_removed_from_the_context_but_no_secrets(tmp_path: Path) -> None:
    replies = [text_reply(f"Answer {n}. " + "word " * 300) for n in range(12)]
    async with temporary_kernel(
        tmp_path, tools=[look], rules=["allow notes.look"], secrets={"k": "key-5d0c1f7ab2e94c63"}
    ) as kernel:
        session = await kernel.session()
        agent = Agent(session, PlaybackModel(*replies), budget=Budget(context=2_000))
        for number in range(12):
            assert (await agent.complete(f"Question {number} of the xylophone.")).ok
        assert "Question 1 of" not in str(agent.messages[1:])
        hits = await search_transcript(session, '"question 1 of"')
        assert [hit["text"] for hit in hits] == ["Question 1 of the xylophone."]
        await session.call("notes.look", {"about": "keys"})
        assert (
            "5d0c1f7" not in json.dumps(await search_transcript(session, "keys"))
            and await search_transcript(session, "5d0c1f7ab2e94c63") == []
        )


async def test_results_hidden_from_the_model_are_not_found_by_a_search(tmp_path: Path) -> None:
    @tool(id="notes.audited", exposure="none")
    def audited() -> dict[str, Any]:
        """Look at it for the log alone."""
        return {"seen": "xylophone"}

    @tool(id="notes.masked", prompt_mask=True)
    def masked() -> dict[str, Any]:
        """Look at it without a word."""
        return {"seen": "xylophone"}

    @tool(id="notes.shown", exposure="edge", side_effect="read", locks=[], requires={"capabilities": ["call"]})
    async def shown(runtime: Runtime) -> object:
        """Look at it for the user."""
        return (await runtime.call("notes.look", {"about": "planets"})).data

    async with temporary_kernel(tmp_path, tools=[look, audited, masked, shown], rules=["allow notes.*"]) as kernel:
        session = await kernel.session()
        for name in ("audited", "masked", "shown"):
            assert (await session.call(f"notes.{name}", {})).ok
        assert await search_transcript(session, "xylophone") == await search_transcript(session, "planets") == []
        kept = await search_transcript(session, '"kept from the model"')
        assert {hit["tool"] for hit in kept} == {"notes.audited", "notes.masked", "notes.shown"}
        whole = [(await session.call("search_memory", {"id": hit["id"]})).data["text"] for hit in kept]
        assert "xylophone" not in str(whole)


async def test_a_search_is_bounded_and_reports_that_older_calls_were_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "MOST_CALLS", 3)
    async with temporary_kernel(tmp_path, tools=[look], rules=["allow notes.look"]) as kernel:
        session = await kernel.session()
        for number in range(5):
            await session.call("notes.look", {"about": f"planet {number}"})
        answer = (await session.call("search_memory", {"query": "planet", "limit": 2})).data
        assert (answer["found"], answer["searched"], answer["older_not_searched"]) == (3, 3, True)
        assert ["planet 4" in answer["hits"][0]["text"], "planet 3" in answer["hits"][1]["text"]] == [True, True]


@settings(max_examples=40)
@given(st.text(max_size=60), st.lists(st.text(max_size=600), max_size=5))
def test_any_query_over_any_text_finds_every_passage_with_one_of_its_terms(query: str, texts: list[str]) -> None:
    terms = parse_query(query)
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(CREATE_INDEX)
        connection.executemany("INSERT INTO passage (text, context) VALUES (?, '')", [(text,) for text in texts])
        found = rank_passages(find_passages(connection, terms), terms)
        assert len({one.number for one in found}) == len(found)
        whole = {
            number + 1 for number, text in enumerate(texts) if set(terms.words) & set(re.findall(r"[a-z0-9]+", text))
        }
        assert not any(word.isascii() for word in terms.words) or whole <= {one.number for one in found}
        assert all(len(cut_excerpt(text, terms.texts)) <= indexing.EXCERPT_CHARACTERS + 2 for text in texts)


async def test_a_search_matches_other_word_forms_and_returns_the_surrounding_messages(tmp_path: Path) -> None:
    model = PlaybackModel(text_reply("Which one?"), text_reply("Noted."), text_reply("Fine."))
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        for text in (
            "I am painting the kitchen of my sister.",
            "The yellow one in the cellar.",
            "Unrelated: the build is red.",
        ):
            await Agent(session, model).complete(text)
        assert (await search_transcript(session, "Who paints kitchens?"))[0]["text"].startswith("I am painting")
        texts = [hit["text"] for hit in await search_transcript(session, "which kitchen was painted?")]
        assert texts[:2] == ["I am painting the kitchen of my sister.", "Which one?"], (
            "the answer has it as its context"
        )


async def test_a_memory_search_includes_new_messages_and_calls(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[look], rules=["allow notes.look"]) as kernel:
        session = await kernel.session()
        model = PlaybackModel(*(text_reply(f"Answer {n} of pelican.") for n in range(3)))
        for number in range(3):
            await Agent(session, model).complete(f"Question {number} of pelican.")
            assert len(await search_transcript(session, "pelican")) == 2 * number + 2
        await session.call("notes.look", {"about": "pelican"})
        assert len(await search_transcript(session, "pelican")) == 7
        assert [hit["tool"] for hit in await search_transcript(session, "pelica", kind="call")] == ["notes.look"], (
            "a part of a word"
        )
