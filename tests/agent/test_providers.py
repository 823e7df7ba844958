"""The SDKs of the providers against servers that refuse what the real ones refuse."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from tests.agent.provider_bench import Kind, bench, each_provider, in_pieces

from handrail.agent.agent_loop import Agent
from handrail.agent.providers import SERVICES, open_model
from handrail.agent.reply_stream import RetryPolicy
from handrail.contract.errors import StartError, UsageError
from handrail.contract.tool.spec import ToolSpec
from handrail.testing.provider_request_checks import ReplyPause
from handrail.testing.provider_servers import (
    ConnectionCut,
    ErrorReply,
    ReplyCall,
    ScriptedReply,
    StreamError,
)


@each_provider
@pytest.mark.proves("A-01", "A-02")
async def test_a_run_of_text_and_parallel_calls_succeeds_with_each_provider(kind: Kind) -> None:
    async with bench(
        kind,
        ScriptedReply("Let me look. ", ReplyCall("echo", {"n": 1}), ReplyCall("mail__send"), usage=(100, 20)),
        ScriptedReply("Done.", usage=(150, 5)),
    ) as b:
        outcome = await b.run()
        b.accepted()
    assert outcome.ok and outcome.text == "Done."
    assert (outcome.input_tokens, outcome.output_tokens) == (250, 25)
    assert [call.name for call in b.session.ran] == ["echo", "mail__send"]
    assert [text for _, text in b.results(1)] == ['{"type":"output","data":{"n":1}}', '{"type":"output","data":{}}']
    assert "some-model" in (b.server.requests[0].body.get("model") or b.server.requests[0].path)


@each_provider
async def test_arguments_arrive_complete_in_any_number_of_fragments(kind: Kind) -> None:
    async with bench(
        kind, ScriptedReply(ReplyCall("echo", {"text": "ä😀" * 20}, pieces=1000)), ScriptedReply("ok")
    ) as b:
        assert (await b.run()).ok
        b.accepted()
    assert ("ä😀" * 20) in b.results(1)[0][1]


@each_provider
async def test_two_calls_with_the_same_id_get_separate_answers_in_a_valid_history(kind: Kind) -> None:
    calls = [ReplyCall("echo", {"n": n}, id="same") for n in (1, 2)]
    async with bench(kind, ScriptedReply(*calls), ScriptedReply(*calls), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    ids = [call_id for call_id, _ in b.results(2)]
    assert len(set(ids)) == 4
    assert ids[0] == "same"


@each_provider
@pytest.mark.parametrize("name", [None, ""])
async def test_a_call_without_a_tool_name_is_answered_in_a_valid_history(kind: Kind, name: str | None) -> None:
    async with bench(kind, ScriptedReply(ReplyCall(name), ReplyCall("echo")), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [bool(call.problem) for call in b.session.calls] == [True, False]
    assert "has no tool name" in b.results(1)[0][1]


@each_provider
async def test_a_call_without_an_id_is_answered_in_a_valid_history(kind: Kind) -> None:
    async with bench(kind, ScriptedReply(ReplyCall("echo", id=""), ReplyCall("echo", id="")), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert len(b.session.ran) == 2


@each_provider
async def test_an_invalid_tool_name_is_answered_in_a_history_that_the_provider_accepts(kind: Kind) -> None:
    async with bench(kind, ScriptedReply(ReplyCall("rm -rf / && " * 20)), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert b.session.calls[0].name.startswith("rm -rf /")


@in_pieces
@pytest.mark.parametrize("arguments", ['{"n": ', "[]", '{"n": NaN}', '{"n":1,"n":2}', "[" * 5000])
async def test_non_object_arguments_get_an_error_and_the_provider_accepts_the_history(
    kind: Kind, arguments: str
) -> None:
    async with bench(kind, ScriptedReply(ReplyCall("echo", arguments)), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert "invalid_input" in b.results(1)[0][1]


@in_pieces
async def test_an_interrupted_stream_runs_its_complete_calls_and_answers_the_incomplete_one(kind: Kind) -> None:
    async with bench(
        kind, ScriptedReply(ReplyCall("echo", {"n": 1}), ReplyCall("mail__send", {}, cut_after=2)), ScriptedReply("ok")
    ) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [call.name for call in b.session.ran] == ["echo"]
    assert "interrupted during the call" in b.results(1)[1][1]


@in_pieces
async def test_a_stream_without_a_finish_event_counts_as_interrupted(kind: Kind) -> None:
    async with bench(
        kind,
        ScriptedReply(ReplyCall("echo"), ReplyCall("mail__send", is_closed=False), ended=False),
        ScriptedReply("ok"),
    ) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [call.name for call in b.session.ran] == ["echo"]
    assert len(b.results(1)) == 2


@in_pieces
async def test_a_call_cut_by_the_output_limit_does_not_run(kind: Kind) -> None:
    finish = {"openai": "length", "openai-responses": "max_output_tokens", "anthropic": "max_tokens"}[kind]
    async with bench(
        kind, ScriptedReply(ReplyCall("echo"), ReplyCall("mail__send", ""), finish=finish), ScriptedReply("ok")
    ) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [call.name for call in b.session.ran] == ["echo"]
    assert "output limit" in b.results(1)[1][1]


@each_provider
async def test_an_interrupted_text_is_requested_again(kind: Kind) -> None:
    async with bench(kind, ScriptedReply("Half an ans", ConnectionCut()), ScriptedReply("A whole one.")) as b:
        outcome = await b.run()
        b.accepted()
    assert outcome.text == "A whole one."


@in_pieces
async def test_an_error_event_in_the_stream_cuts_the_reply(kind: Kind) -> None:
    async with bench(
        kind, ScriptedReply(ReplyCall("echo"), ReplyCall("echo", is_closed=False), StreamError("server_error", "boom"))
    ) as b:
        b.server.remaining_replies  # noqa: B018 - the run ends or goes on, but what was whole ran once
        await b.run()
    assert len(b.session.ran) == 1 and len(b.session.calls) == 2


@each_provider
async def test_an_event_that_is_not_json_cuts_the_reply(kind: Kind) -> None:
    async with bench(kind, ScriptedReply("x", b"{not json"), ScriptedReply("ok")) as b:
        outcome = await b.run()
        b.accepted()
    assert outcome.text == "ok"


@each_provider
async def test_unknown_events_are_ignored(kind: Kind) -> None:
    odd = [b"{}", b'{"type": "new_thing", "index": "x"}', b'{"choices": [{}]}', b'{"choices": 3, "usage": []}', b"[]"]
    odd += [b'{"type": "content_block_start"}', b'{"type":"content_block_delta","index":0,"delta":null}']
    odd += [b'{"choices":[{"delta":{"tool_calls":[null, {}, {"index": 3, "function": 3}]}}]}']
    async with bench(kind, ScriptedReply(*odd, "ok")) as b:
        outcome = await b.run()
    assert outcome.text == "ok", outcome.detail
    assert b.session.calls == []


@each_provider
async def test_a_rate_limited_request_is_retried_after_the_delay_that_the_provider_asks_for(kind: Kind) -> None:
    busy = ErrorReply(429, "slow down", "rate_limit_error", {"retry-after": "7"})
    async with bench(
        kind, busy, ErrorReply(529, "overloaded", "overloaded_error"), ErrorReply(500), ScriptedReply("ok")
    ) as b:
        assert (await b.run()).ok
        b.accepted()
    assert b.naps[0] == 7 and len(b.naps) == 3
    assert len(b.server.requests) == 4


@each_provider
@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_permanently_rejected_request_is_sent_once(kind: Kind, status: int) -> None:
    async with bench(kind, ErrorReply(status, "no such thing", "invalid_request_error")) as b:
        outcome = await b.run()
    assert outcome.status == "failed" and "no such thing" in outcome.detail
    assert f"{kind}:some-model" in outcome.detail
    assert b.naps == []


@each_provider
async def test_a_wrong_key_error_names_the_variable_and_not_the_key(kind: Kind) -> None:
    async with bench(kind, ScriptedReply("never")) as b:
        b.server.key = "another"
        outcome = await b.run()
    assert outcome.status == "failed"
    assert SERVICES[kind][0] in outcome.detail and "test-key" not in outcome.detail
    assert b.naps == []


async def test_a_used_up_quota_ends_the_run_without_a_retry() -> None:
    async with bench("openai", ErrorReply(429, "no money", "insufficient_quota")) as b:
        outcome = await b.run()
    assert outcome.status == "failed" and "quota is used up" in outcome.detail
    assert b.naps == []


@each_provider
async def test_an_unreachable_server_is_named_after_a_limited_number_of_attempts(kind: Kind) -> None:
    async with bench(kind) as b:
        address = b.server.address
        await b.server.__aexit__()
        outcome = await b.run()
    assert outcome.status == "failed" and address in outcome.detail
    assert len(b.naps) == RetryPolicy().attempts - 1


@each_provider
async def test_a_stop_during_a_slow_stream_cancels_the_run(kind: Kind) -> None:
    pause = ReplyPause()
    async with bench(kind, ScriptedReply(ReplyCall("echo"), "text", pause, ReplyCall("mail__send"))) as b:
        agent = b.agent()
        run = asyncio.create_task(agent.complete("go"))
        await pause.reached.wait()
        agent.cancel()
        outcome = await run
    assert outcome.status == "cancelled"
    assert [call.name for call in b.session.ran if call.name != "echo"] == []


@each_provider
async def test_a_provider_accepts_the_history_of_a_stopped_run(kind: Kind) -> None:
    session_pause = ReplyPause()
    async with bench(
        kind, ScriptedReply(ReplyCall("echo")), ScriptedReply("Half", session_pause), ScriptedReply("ok")
    ) as b:
        agent = b.agent()
        run = asyncio.create_task(agent.complete("go"))
        await session_pause.reached.wait()
        agent.cancel()
        assert (await run).status == "cancelled"
        assert (await agent.complete("go on")).ok
        b.accepted()


@each_provider
async def test_a_model_request_has_only_the_name_description_and_schema_of_a_tool(kind: Kind) -> None:
    async with bench(kind, ScriptedReply("ok")) as b:
        assert (await b.run()).ok
    tools = b.server.requests[0].body["tools"]
    sent = {"openai": lambda: tools[0]["function"], "gemini": lambda: tools[0]["functionDeclarations"][0]}
    told: dict[str, Any] = sent.get(kind, lambda: tools[0])()
    schema = {"anthropic": "input_schema", "gemini": "parameters_json_schema"}.get(kind, "parameters")
    assert set(told) - {"type", "strict"} == {"name", "description", schema}


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.proves("D-11")
async def test_a_tool_schema_is_sent_without_alternatives_at_its_root(kind: Kind) -> None:
    async with bench(kind, ScriptedReply("ok")) as b:
        ways = [{"properties": {name: {"type": "string"}}, "required": [name]} for name in ("path", "url")]
        b.session.specs = [ToolSpec(id="get", description="Get.", parameters={"type": "object", "oneOf": ways})]
        assert (await b.run()).ok
    tools = b.server.requests[0].body["tools"]
    sent = tools[0]["function"]["parameters"] if kind == "openai" else tools[0]["input_schema"]
    assert "oneOf" not in sent and set(sent["properties"]) == {"path", "url"}


@pytest.mark.parametrize("spec", ["", "gpt", "openai:", "mistral:x", "script:"])
def test_an_invalid_model_name_is_refused_with_the_valid_forms(spec: str) -> None:
    with pytest.raises(
        UsageError, match="openai:NAME, openai-responses:NAME, anthropic:NAME, gemini:NAME or script:FILE"
    ):
        open_model(spec)


@each_provider
def test_the_error_for_a_missing_key_names_the_environment_variable(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SERVICES[kind][0], raising=False)
    with pytest.raises(StartError, match=SERVICES[kind][0]):
        open_model(f"{kind}:x")


@each_provider
def test_the_error_for_a_missing_sdk_names_the_extra_to_install(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, SERVICES[kind][1], None)
    with pytest.raises(StartError, match=rf"pip install .*\[{kind.partition('-')[0]}\]'"):
        open_model(f"{kind}:x", base_url="http://127.0.0.1:1/v1")


@pytest.mark.parametrize("kind", SERVICES)
@pytest.mark.parametrize(
    "url", ["localhost:8080", "127.0.0.1:8080/v1", "htp://x/v1", "https://", "http://[::1", "/v1", "http://a b/v1", ""]
)
def test_an_invalid_base_url_is_refused_before_a_request(kind: str, url: str) -> None:
    with pytest.raises(UsageError, match="base URL is invalid") as caught:
        open_model(f"{kind}:x", base_url=url, api_key="k")
    assert "http://HOST:PORT" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "end"),
    [("openai", "/chat/completions"), ("openai-responses", "/responses/"), ("openai-responses", "/chat/completions"),
     ("openai", "/responses"), ("anthropic", "/v1/messages"), ("anthropic", "/v1/"),
     ("gemini", "/v1beta")],
)  # fmt: skip
async def test_a_base_url_with_the_end_of_its_api_is_accepted(kind: Kind, end: str) -> None:
    async with bench(kind, ScriptedReply("ok")) as b:
        model = open_model(f"{kind}:x", base_url=b.server.base_url.rstrip("/") + end, api_key=b.server.key)
        assert (await Agent(b.session, model).complete("go")).text == "ok"
        await model.aclose()


@pytest.mark.parametrize("key", ["k\u00e9y", "k\ny", "k\u2026"])
def test_a_key_with_impossible_characters_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(UsageError, match="OPENAI_API_KEY") as caught:
        open_model("openai:x", api_key=key)
    assert key not in str(caught.value)


def test_a_scripted_model_refuses_a_base_url() -> None:
    with pytest.raises(UsageError, match="does not use a server"):
        open_model("script:x.toml", base_url="http://127.0.0.1:1")


@pytest.mark.parametrize("finish", ["length", "content_filter"])
async def test_a_call_left_open_by_an_early_finish_reason_does_not_run(finish: str) -> None:
    async with bench(
        "openai", ScriptedReply(ReplyCall("echo"), ReplyCall("mail__send", "{}"), finish=finish), ScriptedReply("ok")
    ) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [call.name for call in b.session.ran] == ["echo"]


@each_provider
async def test_an_empty_stream_is_retried_like_a_busy_provider(kind: Kind) -> None:
    async with bench(kind, ScriptedReply(ended=False), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert len(b.naps) == 1
