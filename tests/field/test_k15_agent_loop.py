"""Reports about the agent loop: arguments, empty replies, instruction files, and the provider's cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agent.provider_bench import Kind, bench, each_provider
from tests.agent.sessions import RecordingSession
from tests.field.openai_chunks import chunk, streamed

from handrail.agent.agent_loop import EMPTY_REPLY, Agent
from handrail.agent.model_protocol import ReplyFinished
from handrail.contract.text.strict_json import (
    InvalidJsonTextError,
    parse_arguments,
    parse_arguments_fast,
    parse_json_object,
)
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.provider_servers import ReplyCall, ScriptedReply
from handrail.testing.scripted_kernel import temporary_kernel

OK = ScriptedReply("ok")


@pytest.mark.parametrize("kind", ["openai", "openai-responses", "anthropic"])
async def test_a_raw_line_feed_in_an_argument_string_is_accepted(kind: Kind) -> None:
    raw = '{"text": "one\ntwo\tthree\r\nfour"}'
    async with bench(kind, ScriptedReply(ReplyCall("echo", raw)), OK) as b:
        assert (await b.run()).ok
        b.accepted()
    assert json.loads(b.results(1)[0][1])["data"] == {"text": "one\ntwo\tthree\r\nfour"}


@given(st.text(max_size=40))
def test_raw_control_characters_in_argument_strings_are_read_like_their_escapes(text: str) -> None:
    if any("\ud800" <= one <= "\udfff" for one in text):
        return
    escaped = json.dumps({"a": text}, ensure_ascii=False)
    raw = '{{"a": "{}"}}'.format(text.replace("\\", "\\\\").replace('"', '\\"'))
    assert parse_arguments(raw) == parse_arguments_fast(raw) == parse_arguments(escaped) == {"a": text}


def test_raw_control_characters_outside_call_argument_strings_are_refused() -> None:
    with pytest.raises(InvalidJsonTextError, match="Invalid control character at line 1, column 9"):
        parse_json_object('{"a": "x\n"}')
    with pytest.raises(InvalidJsonTextError):
        parse_arguments('{"a"\x00: 1}')


@each_provider
@pytest.mark.parametrize("text", ["", " \n"])
async def test_an_empty_reply_makes_the_agent_ask_the_model_again(kind: Kind, text: str) -> None:
    async with bench(kind, ScriptedReply(text), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert "[Handrail]" in json.dumps(b.server.requests[1].body)


@each_provider
async def test_a_run_ends_with_status_empty_when_the_model_stays_silent(kind: Kind) -> None:
    async with bench(kind, ScriptedReply(ReplyCall("echo")), ScriptedReply(), ScriptedReply(), OK, OK) as b:
        agent = b.agent()
        outcome = await agent.complete("go")
        assert (outcome.status, outcome.ok, outcome.turns) == ("empty", False, 3) and outcome.detail
        assert (await agent.complete("again")).text == "ok"  # the conversation goes on, and a new run has a new nudge


async def test_the_model_is_asked_again_after_a_reply_with_only_reasoning() -> None:
    silent = streamed(chunk({"reasoning_content": "I should answer."}), finish="stop")
    async with bench("openai", silent, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()


async def test_a_nudge_after_an_empty_reply_is_stored_and_not_repeated(tmp_path: Path) -> None:
    model = PlaybackModel([ReplyFinished("end")], text_reply("ok"), text_reply("again"))
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        assert (await Agent(session, model).complete("go")).text == "ok"
        assert session.history is not None
        rows = [data for _, data in await session.history.read_stored_messages()]
        assert [row.get("notices") for row in rows if row.get("text") == EMPTY_REPLY] == [[]]
        await session.suspend()
        session = await kernel.session(session.id)
        assert (await Agent(session, model).complete("and now?")).text == "again"
        await session.suspend()
    assert str(model.requests[2].messages).count("was empty") == 1


async def test_a_run_with_two_empty_replies_ends_with_the_status_empty() -> None:
    model = PlaybackModel(call_reply(("echo", {})), [ReplyFinished("end")], [ReplyFinished("end")])
    outcome = await Agent(RecordingSession(), model).complete("go")
    assert outcome.status == "empty" and outcome.calls == 1


async def _system_text(tmp_path: Path) -> str:
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        model = PlaybackModel(text_reply("ok"))
        assert (await Agent(session, model, workspace=session.workdir).complete("go")).ok
        await session.suspend()
    return model.requests[0].system


async def test_an_instruction_file_that_links_inside_the_workspace_is_read_once(tmp_path: Path) -> None:
    workspace = tmp_path / "ws"
    (workspace / "docs").mkdir(parents=True)
    (workspace / "docs" / "agents.txt").write_text("Use tabs.")
    (workspace / "AGENTS.md").symlink_to("docs/agents.txt")
    (workspace / "CLAUDE.md").symlink_to("AGENTS.md")
    system = await _system_text(tmp_path)
    assert system.count("> Use tabs.") == 1 and "## AGENTS.md" in system


@pytest.mark.parametrize("target", ["../secret.txt", "/etc/passwd", "AGENTS.md", "nowhere", "docs", ".env"])
async def test_an_instruction_file_that_links_to_an_outside_or_unsuitable_target_is_not_read(
    target: str, tmp_path: Path
) -> None:
    workspace = tmp_path / "ws"
    (workspace / "docs").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("root: secret words")
    (workspace / ".env").write_text("root: secret words")
    (workspace / "AGENTS.md").symlink_to(target)
    system = await _system_text(tmp_path)
    assert "root:" not in system and "## AGENTS.md" not in system
    leads_out = target in ("../secret.txt", "/etc/passwd")
    assert ("it is a link that leads out of the workspace: AGENTS.md." in system) == leads_out


def _marked(blocks: list[dict[str, Any]]) -> list[int]:
    return [n for n, block in enumerate(blocks) if "cache_control" in block]


async def test_cache_marks_stay_within_the_lookback_after_fourteen_parallel_calls() -> None:
    turns = [ScriptedReply(*(ReplyCall("echo", {"n": n}) for n in range(14))) for _ in range(3)]
    async with bench("anthropic", *turns, OK) as b:
        assert (await b.run()).ok
        b.accepted()
    ends: list[int] = []
    for request in b.server.requests:
        blocks = [block for message in request.body["messages"] for block in message["content"]]
        marks = _marked(blocks)
        assert len(marks) + len(_marked(request.body["system"])) <= 4
        assert marks[-1] == len(blocks) - 1
        if ends:  # the end of the request before is found from a mark
            assert any(0 <= mark - ends[-1] < 20 for mark in marks)
        ends.append(len(blocks) - 1)
