"""Provider-specific features: reasoning, hosted tools, numbering of calls, and refusals."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.agent.provider_bench import bench

from handrail.agent.model_protocol import CallBlockClosed, CallBlockOpened
from handrail.agent.providers.responses import _ItemReader  # pyright: ignore[reportPrivateUsage]
from handrail.agent.run_events import ProviderToolUsed
from handrail.testing.provider_request_checks import ServerToolUse
from handrail.testing.provider_servers import ErrorReply, ReplyCall, ScriptedReply, StreamError, ThinkingBlock


async def test_encrypted_reasoning_of_the_responses_api_is_sent_back_unchanged() -> None:
    async with bench(
        "openai-responses", ScriptedReply(ThinkingBlock("hmm", "gAAAA=="), ReplyCall("echo")), ScriptedReply("ok")
    ) as b:
        assert (await b.run()).ok
        b.accepted()
    sent = b.server.requests[1].body["input"]
    assert [item.get("type") for item in sent] == [None, "reasoning", "function_call", "function_call_output"]
    assert sent[1]["encrypted_content"] == "gAAAA=="


async def test_a_generated_image_is_stored_and_not_sent_again() -> None:
    picture = base64.b64encode(b"picture").decode()
    made = ServerToolUse("image_generation", {}, {"status": "completed", "output_format": "webp", "result": picture})
    async with bench("openai-responses", ScriptedReply(made, ReplyCall("echo")), ScriptedReply("ok")) as b:
        events = [event async for event in b.agent().run("draw")]
        b.accepted()
    (used,) = (event for event in events if isinstance(event, ProviderToolUsed))
    assert used.name == "image_generation"
    assert picture not in json.dumps(b.server.requests[1].body)


def test_a_call_repeated_by_the_responses_api_is_opened_once() -> None:
    def told(kind: str, call_id: str) -> Any:
        item = SimpleNamespace(type="function_call", call_id=call_id, name="echo", arguments="{}")
        return SimpleNamespace(type=f"response.output_item.{kind}", output_index=0, item=item)

    reader = _ItemReader()
    events = [told(kind, call) for call in ("a", "b") for kind in ("added", "done", "done", "added", "done")]
    blocks = [block for event in events for block in reader.read(event)]
    assert [block.provider_id for block in blocks if isinstance(block, CallBlockOpened)] == ["a", "b"]
    assert sum(isinstance(block, CallBlockClosed) for block in blocks) == 2


async def test_a_gemini_signature_is_sent_back_with_the_part_that_it_signed() -> None:
    async with bench(
        "gemini",
        ScriptedReply("First.", ThinkingBlock("hmm", "sig"), ReplyCall("echo"), ReplyCall("echo")),
        ScriptedReply("ok"),
    ) as b:
        assert (await b.run()).ok
        b.accepted()
    parts = b.server.requests[1].body["contents"][1]["parts"]
    assert [base64.b64decode(part.get("thoughtSignature", "")) for part in parts] == [b"", b"sig", b""]


async def test_a_malformed_function_call_of_gemini_is_requested_again() -> None:
    async with bench("gemini", ScriptedReply("Hm.", finish="MALFORMED_FUNCTION_CALL"), ScriptedReply("ok")) as b:
        assert (await b.run()).text == "ok"
        b.accepted()


async def test_a_run_that_gemini_blocks_ends_as_refused() -> None:
    async with bench("gemini", ScriptedReply("", finish="SAFETY")) as b:
        assert (await b.run()).status == "refused"
    async with bench("gemini", ScriptedReply(b'{"promptFeedback": {"blockReason": "SAFETY"}}', ended=False)) as b:
        assert (await b.run()).status == "refused"


async def test_two_calls_with_index_0_are_read_as_separate_calls() -> None:
    calls = [ReplyCall("echo", {"n": n}, id=f"c{n}", index=0) for n in (1, 2)]
    async with bench("openai", ScriptedReply(*calls), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [call.arguments for call in b.session.ran] == ['{"n": 1}', '{"n": 2}']


async def test_an_input_sent_complete_at_the_block_start_is_read() -> None:
    start = b'{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t","name":"echo","input":{"n":5}}}'
    stop = b'{"type":"content_block_stop","index":0}'
    async with bench("anthropic", ScriptedReply(start, stop, finish="tool_use"), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert b.session.ran[0].arguments == '{"n": 5}'


async def test_signed_reasoning_is_sent_back_unchanged() -> None:
    async with bench(
        "anthropic", ScriptedReply(ThinkingBlock("hmm, let me see", "sig=="), ReplyCall("echo")), ScriptedReply("ok")
    ) as b:
        assert (await b.run()).ok
        b.accepted()
    assistant = b.server.requests[1].body["messages"][1]["content"]
    assert assistant[0] == {"type": "thinking", "thinking": "hmm, let me see", "signature": "sig=="}
    assert assistant[1]["type"] == "tool_use"


def _openai_calls(*fragments: dict[str, Any]) -> list[bytes]:
    """Chunks of a chat completion, each with one fragment of a call."""
    return [_openai_chunk({"tool_calls": [fragment]}) for fragment in fragments]


def _openai_chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    whole = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return json.dumps(whole).encode()


async def test_interleaved_argument_fragments_are_assembled_for_the_right_call() -> None:
    fragments = _openai_calls(
        {"index": 0, "id": "a", "function": {"name": "echo", "arguments": ""}},
        {"index": 1, "id": "b", "function": {"name": "echo", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"n":'}},
        {"index": 1, "function": {"arguments": '{"n":'}},
        {"index": 0, "function": {"arguments": "1}"}},
        {"index": 1, "function": {"arguments": "2}"}},
    )
    ended = _openai_chunk({}, "tool_calls")
    async with bench("openai", ScriptedReply(*fragments, ended, ended=False), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [call.arguments for call in b.session.ran] == ['{"n":1}', '{"n":2}']


async def test_a_late_piece_of_an_earlier_call_does_not_become_another_call() -> None:
    fragments = _openai_calls(
        {"index": 0, "id": "a", "function": {"name": "echo", "arguments": '{"n"'}},
        {"index": 1, "id": "b", "function": {"name": "echo", "arguments": '{"n":2}'}},
        {"index": 0, "function": {"arguments": ":1}"}},
    )
    ended = _openai_chunk({}, "tool_calls")
    async with bench("openai", ScriptedReply(*fragments, ended, ended=False), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert len(b.results(1)) == 2


@pytest.mark.parametrize("written", [{"n": 1}, '{"n": 1}'])
async def test_arguments_may_arrive_as_a_json_object(written: object) -> None:
    fragment = {"index": 0, "id": "a", "function": {"name": "echo", "arguments": written}}
    ended = _openai_chunk({}, "tool_calls")
    async with bench("openai", ScriptedReply(*_openai_calls(fragment), ended, ended=False), ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert b.results(1)[0][1] == '{"type":"output","data":{"n":1}}'


@pytest.mark.parametrize("finish", ["abort", "error", "insufficient_system_resource"])
async def test_a_finish_reason_for_a_server_failure_cuts_the_reply(finish: str) -> None:
    reply = ScriptedReply(ReplyCall("echo"), ReplyCall("mail__send", ""), finish=finish)
    async with bench("openai", reply, ScriptedReply("half", finish=finish), ScriptedReply("ok")) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert [call.name for call in b.session.ran] == ["echo"]


async def test_an_unknown_finish_reason_runs_complete_calls_but_not_one_without_arguments() -> None:
    reply = ScriptedReply(ReplyCall("echo", '{"n":1}'), ReplyCall("mail__send", ""), finish="done")
    async with bench("openai", reply, ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [call.name for call in b.session.ran] == ["echo"]


@pytest.mark.parametrize("finish", ["max_tokens", "model_length"])
async def test_a_reply_that_the_server_reports_as_cut_does_not_run_its_last_call(finish: str) -> None:
    reply = ScriptedReply(ReplyCall("echo"), ReplyCall("mail__send", '{"to":"a"}'), finish=finish)
    async with bench("openai", reply, ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [call.name for call in b.session.ran] == ["echo"]


async def test_an_empty_call_at_which_a_refusal_ended_the_reply_does_not_run() -> None:
    reply = ScriptedReply(ReplyCall("echo"), ReplyCall("mail__send", ""), finish="refusal")
    async with bench("anthropic", reply, ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [call.name for call in b.session.ran] == ["echo"]


async def test_a_responses_api_reply_that_ends_with_an_error_is_retried() -> None:
    broken = ScriptedReply("half", StreamError("server_error", "down"))
    async with bench("openai-responses", broken, ScriptedReply("ok")) as b:
        assert (await b.run()).text == "ok"
        b.accepted()


async def test_gemini_is_retried_after_the_delay_in_its_reply() -> None:
    info = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "37.5s"}
    busy = ErrorReply(429, "out of quota", "RESOURCE_EXHAUSTED", details=(info,))
    strange = ErrorReply(
        429, "out of quota", "RESOURCE_EXHAUSTED", details=({"@type": "x.RetryInfo", "retryDelay": 3},)
    )
    async with bench("gemini", busy, strange, ScriptedReply("ok")) as b:
        assert (await b.run()).ok
        b.accepted()
    assert b.naps[0] == 37.5 and b.naps[1] >= 1
