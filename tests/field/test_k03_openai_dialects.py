"""Reports about servers with their own variant of the chat completions API."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agent.provider_bench import ProviderFixture, bench
from tests.field.openai_chunks import ECHO, calls, chunk, streamed, whole

from handrail.agent.agent_loop import Agent
from handrail.agent.conversation import Conversation, adapt_history_to_model, encode_message, restore_conversation
from handrail.agent.model_protocol import ModelRequest, TokenUsage
from handrail.agent.providers import open_model
from handrail.agent.providers.openai import (
    _ChunkReader,  # pyright: ignore[reportPrivateUsage]
    _messages,  # pyright: ignore[reportPrivateUsage]
)
from handrail.agent.reply_assembly import ReplyAssembler
from handrail.contract.calls_and_results import CallAnswer, Result
from handrail.contract.text.strict_json import parse_arguments
from handrail.testing.provider_request_checks import find_chat_completions_faults
from handrail.testing.provider_servers import ErrorReply, RawReply, ReplyCall, ScriptedReply
from handrail.testing.scripted_kernel import temporary_kernel

OK = ScriptedReply("ok")


def assistant(b: ProviderFixture, request: int = 1) -> dict[str, Any]:
    """The first message of the assistant in a request."""
    messages: list[dict[str, Any]] = b.server.requests[request].body["messages"]
    return next(message for message in messages if message["role"] == "assistant")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking", "thought"])
async def test_reasoning_of_a_reply_is_sent_with_the_next_request_in_its_field(field: str) -> None:
    reply = streamed(
        chunk({"role": "assistant", "content": None, field: "First "}), chunk({field: "look."}), calls(ECHO)
    )
    async with bench("openai", reply, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    sent = assistant(b)
    assert sent[field] == "First look." and sent["tool_calls"][0]["id"] == "a"


async def test_reasoning_details_of_openrouter_are_returned_with_their_signature() -> None:
    text = {"type": "reasoning.text", "format": "anthropic-claude-v1", "index": 0}
    locked = {"type": "reasoning.encrypted", "data": "QUJD", "id": "rs_1", "format": "openai-responses-v1", "index": 1}
    reply = streamed(
        chunk({"reasoning": "a", "reasoning_details": [{**text, "text": "a"}]}),
        chunk({"reasoning": "b", "reasoning_details": [{**text, "text": "b"}]}),
        chunk({"reasoning_details": [{**text, "signature": "sig=="}]}),
        chunk({"reasoning_details": [locked]}),
        calls(ECHO),
    )
    async with bench("openai", reply, OK) as b:
        assert (await b.run()).ok
        b.accepted()
    assert assistant(b)["reasoning"] == "ab"
    assert assistant(b)["reasoning_details"] == [{**text, "text": "ab", "signature": "sig=="}, locked]


async def test_the_thought_signature_of_each_gemini_call_is_returned_to_the_server() -> None:
    signed: dict[str, Any] = {**ECHO, "extra_content": {"google": {"thought_signature": "c2ln"}}}
    inner: dict[str, Any] = {**ECHO, "index": 1, "id": "b"}
    inner["function"] = {**inner["function"], "provider_specific_fields": {"thought_signature": "x"}}
    async with bench("openai", streamed(calls(signed), calls(inner)), OK) as b:
        assert (await b.run()).ok
        b.accepted()
    first, second = assistant(b)["tool_calls"]
    assert first["extra_content"] == {"google": {"thought_signature": "c2ln"}}
    assert second["function"]["provider_specific_fields"] == {"thought_signature": "x"}


async def test_thinking_parts_in_mistral_content_are_returned_to_the_server() -> None:
    thinking = [{"type": "thinking", "thinking": [{"type": "text", "text": piece}]} for piece in ("Hm, ", "yes.")]
    reply = streamed(
        *(chunk({"content": [part]}) for part in thinking),
        chunk({"content": [{"type": "text", "text": "Let me look."}]}),
        calls(ECHO),
    )
    async with bench("openai", reply, OK) as b:
        assert (await b.run()).ok
    thought, said = assistant(b)["content"]
    assert "".join(part["text"] for part in thought["thinking"]) == "Hm, yes."
    assert said == {"type": "text", "text": "Let me look."}


async def test_reasoning_is_not_sent_to_another_model_or_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test-key")
    reply = streamed(chunk({"reasoning_content": "secret plan"}), calls({**ECHO, "id": "functions.echo:0"}))
    async with (
        temporary_kernel(tmp_path) as kernel,
        bench("openai", reply, OK) as one,
        bench("openai", OK, OK) as other,
    ):
        session = await kernel.session()
        assert (await Agent(session, one.model).complete("go")).ok
        await session.suspend()
        for model in (other.model, open_model("openai:another", base_url=other.server.base_url)):
            session = await kernel.session(session.id)
            assert (await Agent(session, model).complete("and now?")).ok
            await session.suspend()
        other.accepted()
    assert "secret plan" in json.dumps(one.server.requests[1].body)
    for request in other.server.requests:
        assert "secret plan" not in json.dumps(request.body)
        asked = next(m for m in request.body["messages"] if m.get("tool_calls"))["tool_calls"][0]["id"]
        assert asked.isalnum() and len(asked) == 9  # the form that every provider takes


@pytest.mark.parametrize(
    "name", ["functions.read:0", "functions.echo:12", "a|fc_1", "call." + "x" * 90, "call_1__thought__" + "A" * 900]
)
async def test_call_ids_of_the_same_model_are_returned_unchanged(name: str) -> None:
    async with bench("openai", streamed(calls({**ECHO, "id": name})), OK) as b:
        assert (await b.run()).ok
        b.accepted()
    assert assistant(b)["tool_calls"][0]["id"] == name
    assert [call_id for call_id, _ in b.results(1)] == [name]


async def test_reasoning_and_call_ids_are_kept_after_a_restart(tmp_path: Path) -> None:
    reply = streamed(chunk({"reasoning_content": "plan"}), calls({**ECHO, "id": "functions.echo:0"}))
    async with bench("openai", reply, OK, OK) as b:
        known = None
        for task in ("go", "and now?"):
            async with temporary_kernel(tmp_path) as kernel:
                session = await kernel.session(known)
                known = session.id
                assert (await Agent(session, b.model).complete(task)).ok
                await session.suspend()
        b.accepted()
    sent = assistant(b, 2)
    assert sent["reasoning_content"] == "plan" and sent["tool_calls"][0]["id"] == "functions.echo:0"
    assert b.results(2)[0][0] == "functions.echo:0"


async def test_consecutive_user_messages_are_merged_into_one() -> None:
    async with bench("openai", ErrorReply(400, "no such thing", "invalid_request_error"), OK) as b:
        agent = b.agent()
        assert (await agent.complete("first")).status == "failed"
        assert (await agent.complete("second")).ok
    roles = [message["role"] for message in b.server.requests[1].body["messages"]]
    assert roles == ["system", "user"]
    said = b.server.requests[1].body["messages"][1]["content"]
    assert "first" in said and "second" in said


WHOLE_CALL = {k: v for k, v in ECHO.items() if k != "index"}


@pytest.mark.parametrize(
    "reply",
    [
        whole({"content": "x", "tool_calls": [WHOLE_CALL]}, "tool_calls"),
        streamed(chunk(None, message={"role": "assistant", "content": "x", "tool_calls": [WHOLE_CALL]})),
        streamed(chunk({}, "tool_calls", message={"content": "x", "tool_calls": [WHOLE_CALL]}), finish=None),
        streamed(chunk({"content": "x"}), calls(ECHO), chunk({}, message={"content": "x", "tool_calls": [WHOLE_CALL]})),
        streamed(chunk({"content": "x"}), calls(ECHO), calls(ECHO)),
        streamed(chunk({"content": "x"}), calls(ECHO), finish="stop"),
        streamed(chunk({"content": "x"}), calls(ECHO), finish="function_call"),
        streamed(chunk({"content": "x", "tool_calls": ECHO})),
        streamed(
            chunk({"content": "x", "function_call": {"name": "echo", "arguments": '{"n":1}'}}), finish="function_call"
        ),
        streamed(
            chunk({"content": "x", "function_call": {"name": "echo", "arguments": ""}}),
            chunk({"function_call": {"arguments": '{"n"'}}),
            chunk({"function_call": {"arguments": ":1}"}}),
            finish="function_call",
        ),
        streamed(chunk({"content": [{"type": "text", "text": "x"}]}), calls({**ECHO, "index": 1})),
        streamed(chunk({"content": "x"}), calls({k: v for k, v in ECHO.items() if k not in ("index", "id")})),
        streamed(chunk({"content": "x"}), calls({**ECHO, "function": {"name": "echo", "arguments": {"n": 1}}})),
        streamed(chunk({"content": "x"}), calls({**ECHO, "index": "0"})),
    ],
    ids=[
        "not streamed",
        "in message",
        "in the message of the end",
        "streamed and in message",
        "sent twice",
        "ended by stop",
        "ended by function_call",
        "not in a list",
        "legacy",
        "legacy in pieces",
        "numbered from 1",
        "without number and id",
        "arguments as object",
        "number as text",
    ],
)
async def test_a_call_in_an_unusual_place_of_a_reply_is_run(reply: ScriptedReply | RawReply) -> None:
    async with bench("openai", reply, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert [json.loads(str(call.arguments)) for call in b.session.ran] == [{"n": 1}]
    assert assistant(b)["content"] == "x"


@pytest.mark.parametrize(
    "fragments",
    [
        [{"name": "ec"}, {"name": "ho"}, {"arguments": '{"n":1}'}],
        [{"name": "echo"}, {"name": "echo", "arguments": '{"n"'}, {"name": "echo", "arguments": ":1}"}],
        [{"name": "e"}, {"name": "echo"}, {"arguments": '{"n":1}'}],
        [{"name": "echo", "arguments": {}}, {"arguments": '{"n":1}'}],
        [{"name": "ec", "arguments": ""}, {"name": "ho", "arguments": '{"n":1}'}],
    ],
    ids=["in two pieces", "repeated", "growing", "begins with an empty object", "with empty arguments"],
)
async def test_a_tool_name_streamed_in_pieces_is_joined(fragments: list[dict[str, Any]]) -> None:
    parts = [calls({"index": 0, **({} if n else {"id": "a"}), "function": part}) for n, part in enumerate(fragments)]
    async with bench("openai", streamed(*parts), OK) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [(call.name, json.loads(str(call.arguments))) for call in b.session.ran] == [("echo", {"n": 1})]


async def test_several_calls_without_numbers_in_one_chunk_are_kept_apart() -> None:
    def numbered(n: int, **more: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "echo", "arguments": f'{{"n":{n}}}'}, **more}

    for reply in (
        streamed(calls(numbered(1), numbered(2))),
        streamed(calls(numbered(1)), calls(numbered(2))),
        streamed(calls(numbered(1, index=0)), calls(numbered(2, index=0))),
        streamed(calls(numbered(1, index=0, id="a"), numbered(2, index=1, id="b"))),
        whole({"content": None, "tool_calls": [numbered(1), numbered(2)]}, "tool_calls"),
    ):
        async with bench("openai", reply, OK) as b:
            assert (await b.run()).ok
            b.accepted()
        assert [json.loads(str(call.arguments))["n"] for call in b.session.ran] == [1, 2]


def part(name: str | None = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    """A fragment of a call."""
    function = {"name": name, "arguments": arguments}
    return {**more, "function": {key: value for key, value in function.items() if value is not None}}


FLAT: dict[str, Any] = {"index": 0, "id": "a", "name": "echo", "arguments": {"n": 1}}
END_MARK = b"data: [DONE]\n\n"


def events(*chunks: bytes, end: bytes = END_MARK) -> RawReply:
    return RawReply(b"".join(b"data: %s\n\n" % one for one in chunks) + end, "text/event-stream")


CALLS_IN_PIECES: dict[str, list[bytes]] = {
    "another id with every piece": [calls(part("echo", "", index=0, id="a")), calls(part(None, '{"n":', index=0, id="b")), calls(part(None, "1}", index=0, id="c"))],
    "name after the arguments": [calls(part(None, '{"n":', index=0, id="a")), calls(part("echo", "1}", index=0))],
    "all arguments again": [calls(part("echo", '{"n":', index=0, id="a")), calls(part(None, "1}", index=0)), calls(part(None, '{"n":1}', index=0))],
    "the name again": [calls(ECHO), calls(part("echo", "", index=0, id="a"))],
    "an empty object first": [calls(part("echo", "{}", index=0, id="a")), calls(part(None, '{"n":1}', index=0))],
    "null first": [calls(part("echo", "null", index=0, id="a")), calls(part(None, '{"n":1}', index=0))],
    "without an object in between": [calls(FLAT)],
    "parameters": [calls({"index": 0, "id": "a", "function": {"name": "echo", "parameters": {"n": 1}}})],
    "keyed by number": [chunk({"tool_calls": {"0": {"id": "a", "function": {"name": "echo", "arguments": '{"n":1}'}}}})],
    "in the choice": [json.dumps({"choices": [{"index": 0, "delta": {}, "tool_calls": [ECHO]}]}).encode()],
    "after the finish reason": [chunk({}, "tool_calls"), calls(ECHO)],
    "a finish reason with every piece": [chunk({"tool_calls": [part("echo", '{"n":', index=0, id="a")]}, "tool_calls"), chunk({"tool_calls": [part(None, "1}", index=0)]}, "tool_calls")],
    "spaces around the name": [calls(part(" echo\n", '{"n":1}', index=0, id="a"))],
    "spaces after the arguments": [calls(ECHO), calls(part(None, "\n ", index=0))],
    "each piece with all arguments so far": [calls(part("echo", '{"n"', index=0, id="a")), calls(part(None, '{"n":1', index=0)), calls(part(None, '{"n":1}', index=0))],
    "an empty list first": [calls(part("echo", [], index=0, id="a")), calls(part(None, '{"n":1}', index=0))],
    "an id that is a number": [calls(part("echo", '{"n":', index=0, id=7)), calls(part(None, "1}", index=0, id=7))],
    "a finish reason with a hyphen": [calls({**part("echo", None, index=0, id="a")}), calls(part(None, '{"n":1}', index=0)), chunk({}, "tool-calls")],
    "an unknown finish reason": [chunk({"tool_calls": [ECHO]}, "because")],
    "a finish reason with a prefix": [calls(ECHO), chunk({}, "FinishReason.STOP")],
    "an unfinished finish reason": [calls(part("echo", '{"n":', index=0, id="a")), chunk({}, "FINISH_REASON_UNSPECIFIED"), calls(part(None, "1}", index=0))],
    "in tool_call": [chunk({"tool_call": ECHO})],
    "in toolCalls": [chunk({"toolCalls": [ECHO]})],
    "in args": [calls({"index": 0, "id": "a", "function": {"name": "echo", "args": {"n": 1}}})],
    "in a second choice": [json.dumps({"choices": [{"index": 0, "message": {"content": "x"}}, {"index": 1, "message": {"tool_calls": [ECHO]}}]}).encode()],
    "arguments encoded twice": [calls(part("echo", '"{\\"n\\":1}"', index=0, id="a"))],
}  # fmt: skip


@pytest.mark.parametrize("form", CALLS_IN_PIECES)
async def test_the_pieces_of_one_call_are_not_recognized(form: str) -> None:
    async with bench("openai", streamed(*CALLS_IN_PIECES[form]), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert [(call.name, parse_arguments(str(call.arguments))) for call in b.session.ran] == [("echo", {"n": 1})]


TWO_CALLS: dict[str, list[bytes]] = {
    "interleaved": [calls(part("echo", '{"n":', index=0, id="a")), calls(part("echo", '{"n":', index=1, id="b")), calls(part(None, "1}", index=0)), calls(part(None, "2}", index=1))],
    "interleaved by id": [calls(part("echo", '{"n":', id="a"), part("echo", '{"n":', id="b")), calls(part(None, "1}", id="a"), part(None, "2}", id="b"))],
    "interleaved by id, numbered 0": [calls(part("echo", '{"n":', index=0, id="a"), part("echo", '{"n":', index=0, id="b")), calls(part(None, "1}", index=0, id="a"), part(None, "2}", index=0, id="b"))],
    "one id and number for both": [calls(part("echo", '{"n":1}', index=0, id="c")), calls(part("echo", '{"n":2}', index=0, id="c"))],
    "one id and no number": [calls(part("echo", '{"n":1}', id="c"), part("echo", '{"n":2}', id="c"))],
    "numbers as floats": [calls(part("echo", '{"n":', index=0.0, id="a")), calls(part("echo", '{"n":', index=1.0, id="b")), calls(part(None, "1}", index=0.0)), calls(part(None, "2}", index=1.0))],
    "another id with every piece": [calls(part("echo", "", index=0, id="a")), calls(part(None, '{"n":1}', index=0, id="b")), calls(part("echo", "", index=1, id="c")), calls(part(None, '{"n":2}', index=1, id="d"))],
    "equal, without id and number": [calls(part("echo", '{"n":1}'), part("echo", '{"n":1}'))],
    "an object in an object, as it grows": [calls(part("echo", '{"a":', index=0, id="a")), calls(part(None, '{"a":1}', index=0)), calls(part(None, "}", index=0))],
    "a finish reason after each": [chunk({"tool_calls": [part("echo", '{"n":1}', index=0, id="a")]}, "tool_calls"), chunk({"tool_calls": [part("echo", '{"n":2}', index=1, id="b")]}, "tool_calls")],
}  # fmt: skip


@pytest.mark.parametrize("form", TWO_CALLS)
async def test_two_calls_are_mixed_up(form: str) -> None:
    async with bench("openai", streamed(*TWO_CALLS[form]), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    expected = {
        "equal, without id and number": [{"n": 1}, {"n": 1}],
        "an object in an object, as it grows": [{"a": {"a": 1}}],
    }
    assert [json.loads(str(call.arguments)) for call in b.session.ran] == expected.get(form, [{"n": 1}, {"n": 2}])


HELLO = chunk({"content": "hello"})
TOLD: dict[str, ScriptedReply | RawReply] = {
    "content as an object": streamed(chunk({"content": {"type": "text", "text": "hello"}}), finish="stop"),
    "a text with a value": streamed(chunk({"content": [{"type": "text", "text": {"value": "hello"}}]}), finish="stop"),
    "a part with content": streamed(chunk({"content": [{"type": "text", "content": "hello"}]}), finish="stop"),
    "a part that refuses": streamed(chunk({"content": [{"type": "refusal", "refusal": "hello"}]}), finish="stop"),
    "reasoning in the content": streamed(chunk({"content": [{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "hello"}]}), finish="stop"),
    "a whole answer labelled as events": RawReply(b'{\n "choices": [\n  {"message": {"content": "hello"}, "finish_reason": "stop"}\n ]\n}\n'),
    "the name of the field twice": RawReply(b"data: data: %s\n\ndata: data: [DONE]\n\n" % HELLO),
    "a choice without a list": events(b'{"choices":{"delta":{"content":"hello"},"finish_reason":"stop"}}'),
    "a delta that is text": events(b'{"choices":[{"delta":"hello","finish_reason":"stop"}]}'),
    "in a wrapper": RawReply(b'{"code":0,"data":{"choices":[{"message":{"content":"hello"}}]}}', "application/json"),
    "an end mark in quotes": RawReply(b'data: %s\n\ndata: "[DONE]"\n\n' % HELLO),
    "an end mark alone": RawReply(b"data: %s\n\n[done]\n\n" % HELLO),
    "an end mark without brackets": RawReply(b"data: %s\n\ndata: DONE\n\n" % HELLO),
    "with the status 201": RawReply(b'{"choices":[{"message":{"content":"hello"}}]}', "application/json", 201),
    "usage after the end mark": RawReply(b'data: %s\n\ndata: [DONE]\n\ndata: {"choices":[],"usage":{"prompt_tokens":3}}\n\n' % HELLO),
    "the end mark without a space": RawReply(b"data:%s\n\ndata:[DONE]\n\n" % HELLO),
    "in two choices": RawReply(b'{"choices":[{"message":{"content":"hello"},"finish_reason":"stop"},{"message":{"content":"hello"}}]}', "application/json"),
    "text in the choice": streamed(b'{"choices":[{"text":"hello"}]}', finish="stop"),
    "text in the delta": streamed(chunk({"text": "hello"}), finish="stop"),
    "after an empty choice": streamed(b'{"choices":[null,{"delta":{"content":"hello"}}]}', finish="stop"),
    "no finish reason": events(HELLO),
    "no finish reason, usage last": events(HELLO, b'{"choices":[],"usage":{"prompt_tokens":3}}'),
    "not streamed, no finish reason": RawReply(b'{"choices":[{"message":{"content":"hello"},"finish_reason":null}]}', "application/json"),
    "text after the finish reason": streamed(chunk({"content": "hel"}, "stop"), chunk({"content": "lo"}, "stop")),
    "the word null as finish reason": streamed(chunk({"content": "hel"}, "null"), chunk({"content": "lo"}), finish="stop"),
    "finish reason as an object": events(HELLO, b'{"choices":[{"delta":{},"finish_reason":{"type":"stop"}}]}', end=b""),
    "finish reason in capitals": streamed(HELLO, finish="STOP"),
    "lines of JSON": RawReply(HELLO + b"\n" + chunk({}, "stop") + b"\n", "application/x-ndjson"),
    "lines of JSON with an end mark": RawReply(HELLO + b"\ndata: " + chunk({}, "stop") + b"\n[DONE]\n", "application/x-ndjson"),
    "events without data": events(b"", HELLO, b"", chunk({}, "stop")),
    "no line between events": RawReply(b"data: %s\ndata: %s\ndata: [DONE]\n" % (HELLO, chunk({}, "stop")), "text/event-stream"),
    "data in two lines": RawReply(b'data: {"choices":\ndata: [{"delta":{"content":"hello"},"finish_reason":"stop"}]}\n\n', "text/event-stream"),
}  # fmt: skip


@pytest.mark.parametrize("form", TOLD)
async def test_a_reply_in_an_unusual_form_is_read_once(form: str) -> None:
    async with bench("openai", TOLD[form]) as b:
        assert (await b.run()).text == "hello"
        b.accepted()
    assert not b.naps


async def test_a_call_that_the_end_mark_cut_is_not_run() -> None:
    reply = events(chunk({"content": "x"}), calls(ECHO), calls({**ECHO, **part("echo", '{"n":', index=1, id="b")}))
    async with bench("openai", reply, OK) as b:
        assert (await b.run()).text == "ok"
    assert [json.loads(str(call.arguments)) for call in b.session.ran] == [{"n": 1}]
    assert "not run" in b.results(1)[1][1]


@pytest.mark.parametrize("reason", ["MAX_TOKENS", "SAFETY", "network_error"])
async def test_a_reply_that_was_cut_counts_as_an_answer(reason: str) -> None:
    async with bench("openai", streamed(chunk({"content": "half"}), finish=reason), OK) as b:
        outcome = await b.run()
    assert (outcome.status, outcome.text) != ("answered", "half")


@pytest.mark.parametrize("field", ["analysis", "cot", "deliberation"])
async def test_reasoning_of_an_unknown_name_loses_all_but_its_last_piece(field: str) -> None:
    once = {"channel": "x", "tag": "same"}
    reply = streamed(chunk({field: "First ", **once}), chunk({field: "look.", **once}), calls(ECHO))
    async with bench("openai", reply, OK) as b:
        assert (await b.run()).ok
    assert {name: assistant(b)[name] for name in (field, *once)} == {field: "First look.", **once}


async def test_reasoning_that_repeats_itself_with_each_piece_is_returned_once() -> None:
    reply = streamed(
        *(chunk({"reasoning_content": text}) for text in ("I look", "I look at", "I look at it.")), calls(ECHO)
    )
    async with bench("openai", reply, OK) as b:
        assert (await b.run()).ok
    assert assistant(b)["reasoning_content"] == "I look at it."


async def test_a_field_that_comes_again_unchanged_is_returned_once() -> None:
    again = [chunk({"reasoning_text": text, "reasoning_opaque": "QUFBQkJC"}) for text in ("a", "b")]
    async with bench("openai", streamed(*again, calls(ECHO)), OK) as b:
        assert (await b.run()).ok
    assert (assistant(b)["reasoning_text"], assistant(b)["reasoning_opaque"]) == ("ab", "QUFBQkJC")


async def test_a_signature_that_comes_after_its_call_is_returned_with_it() -> None:
    signature = {"google": {"thought_signature": "c2ln"}}
    async with bench("openai", streamed(calls(ECHO), calls({"index": 0, "extra_content": signature})), OK) as b:
        assert (await b.run()).ok
    assert assistant(b)["tool_calls"][0]["extra_content"] == signature


@pytest.mark.parametrize(
    "empty", [{"type": "text", "text": ""}, {"text": ""}, {"type": "refusal", "refusal": None}], ids=str
)
async def test_an_empty_part_of_a_text_is_not_returned(empty: dict[str, Any]) -> None:
    reply = streamed(chunk({"content": [{"type": "text", "text": "x"}]}), chunk({"content": [empty]}), calls(ECHO))
    async with bench("openai", reply, OK) as b:
        assert (await b.run()).ok
    assert assistant(b)["content"] == "x"


async def test_a_text_part_in_another_form_is_returned_once() -> None:
    reply = streamed(chunk({"content": [{"type": "text", "text": {"value": "x"}}]}), calls(ECHO))
    async with bench("openai", reply, OK) as b:
        assert (await b.run()).ok
    assert assistant(b)["content"] == "x"


@pytest.mark.parametrize(
    ("finish", "status"),
    [("model_context_window_exceeded", "length"), ("max_new_tokens", "length"), ("guardrail_intervened", "refused"),
     ("PROHIBITED_CONTENT", "refused"), ("ERROR_LIMIT", "length"), ("because", "answered"), ("max-tokens", "length"),
     ("maxTokens", "length"), ("content-filter", "refused")],
)  # fmt: skip
async def test_a_finish_reason_of_another_provider_ends_the_run_with_its_status(finish: str, status: str) -> None:
    async with bench("openai", streamed(HELLO, finish=finish)) as b:
        assert (await b.run()).status == status


@pytest.mark.parametrize(
    "finish", ["malformed_tool_use", "MALFORMED_FUNCTION_CALL", "engine_error", "canceled", "failed"]
)
async def test_a_finish_reason_of_a_failure_is_retried(finish: str) -> None:
    async with bench("openai", streamed(calls(ECHO), finish=finish), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()


async def test_cached_tokens_are_counted_by_the_names_of_other_servers() -> None:
    for usage in (
        {"prompt_cache_hit_tokens": 4},
        {"cached_tokens": 4},
        {"prompt_tokens_details": {"cached_tokens": 4}},
    ):
        reader = _ChunkReader()
        sent: Any = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1, **usage}}
        assert [event.cache_read_tokens for event in reader.read(sent) if isinstance(event, TokenUsage)] == [4]


USAGE: dict[str, list[dict[str, Any]]] = {
    "of Groq": [{"x_groq": {"usage": {"prompt_tokens": 7, "completion_tokens": 3}}}],
    "in the choice": [{"choices": [{"delta": {}, "usage": {"prompt_tokens": 7, "completion_tokens": 3}}]}],
    "other names": [{"usage": {"input_tokens": 7, "output_tokens": 3}}],
    "floats": [{"usage": {"prompt_tokens": 7.0, "completion_tokens": 3.0}}],
    "texts": [{"usage": {"prompt_tokens": "7", "completion_tokens": "3"}}],
    "in two halves": [{"usage": {"prompt_tokens": 7}}, {"usage": {"completion_tokens": 3}}],
    "with the total": [{"usage": {"prompt_tokens": 7, "total_tokens": 10}}],
    "after the end mark": [{"usage": None}],
    "growing, then null": [{"usage": {"prompt_tokens": 7, "completion_tokens": n}} for n in (1, 3)] + [{"usage": None}],
}  # fmt: skip


@pytest.mark.parametrize("form", USAGE)
async def test_the_tokens_are_estimated_although_the_server_counts_them(form: str) -> None:
    counted = [json.dumps({"choices": [], **one}).encode() for one in USAGE[form]]
    after = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    end = END_MARK + (after if form == "after the end mark" else b"")
    async with bench("openai", events(HELLO, chunk({}, "stop"), *counted, end=end)) as b:
        outcome = await b.run()
    assert (outcome.input_tokens, outcome.output_tokens) == (7, 3)


@pytest.mark.parametrize(
    "reply",
    [
        whole({"content": "hello"}),
        whole({"content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}),
        streamed(chunk(None, message={"role": "assistant", "content": "hello"}), finish="stop"),
        streamed(
            chunk({"content": "hel"}), chunk({"content": "lo"}), chunk({}, message={"content": "hello"}), finish="stop"
        ),
        streamed(
            b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}',
            chunk({"content": "hello"}),
            finish="stop",
        ),
        streamed(chunk({"content": "hello", "reasoning_content": None, "tool_calls": None}), finish="stop"),
        streamed(chunk({"content": "hello", "tool_calls": []}), finish="stop"),
    ],
    ids=[
        "not streamed",
        "not streamed, in parts",
        "in message",
        "streamed and in message",
        "usage first",
        "nulls",
        "no calls",
    ],
)
async def test_a_reply_in_an_unusual_form_still_arrives(reply: ScriptedReply | RawReply) -> None:
    async with bench("openai", reply) as b:
        assert (await b.run()).text == "hello"
        b.accepted()


@pytest.mark.parametrize(
    ("start", "line", "end"),
    [
        (b"", b"data: %s\n\n", b"data: [DONE]\n\n"),
        (b"", b"data:%s\n\n", b"data:[DONE]\n\n"),
        (b"", b"data: %s\r\n\r\n", b"data: [DONE]\r\n\r\n"),
        (b"\xef\xbb\xbf", b"data: %s\n\n", b""),
        (b": OPENROUTER PROCESSING\n\n", b": keep-alive\n\ndata: %s\n\n", b": bye\n\n"),
        (b"retry: 10\n", b"id: 1\nevent: message\ndata: %s\n\n", b""),
        (b"", b"event: ping\ndata: {}\n\ndata: %s\n\n", b""),
    ],
    ids=["usual", "no space", "CRLF", "byte order mark, no end", "comments", "other fields", "pings"],
)
@pytest.mark.parametrize("content_type", ["text/event-stream; charset=utf-8", "", "application/json", "text/plain"])
async def test_an_event_stream_in_an_unusual_form_is_read_completely(
    start: bytes, line: bytes, end: bytes, content_type: str
) -> None:
    body = (
        start
        + b"".join(line % one for one in (chunk({"content": "hé"}), chunk({"content": "llo"}), chunk({}, "stop")))
        + end
    )
    async with bench("openai", RawReply(body, content_type)) as b:
        assert (await b.run()).text == "héllo"
        b.accepted()
    assert not b.naps


async def test_an_html_page_from_a_wrong_base_url_fails_without_a_retry() -> None:
    page = RawReply(b"<!doctype html><html><head><title>Welcome to Open WebUI</title></head></html>", "text/html")
    async with bench("openai", page) as b:
        outcome = await b.run()
    assert (
        outcome.status == "failed"
        and "Welcome to Open WebUI" in outcome.detail
        and "Check the base URL" in outcome.detail
    )
    assert not b.naps


@pytest.mark.parametrize("kind", ["openai-responses", "anthropic", "gemini"])
async def test_replies_of_other_apis_without_a_stream_are_understood(kind: Any) -> None:
    usage = {"input_tokens": 7, "output_tokens": 3, "promptTokenCount": 7, "candidatesTokenCount": 3}
    first: dict[str, Any] = {
        "openai-responses": {
            "object": "response", "status": "completed", "usage": usage,
            "output": [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "echo", "arguments": '{"n":1}', "status": "completed"},
            ],
        },
        "anthropic": {
            "type": "message", "role": "assistant", "stop_reason": "tool_use", "usage": usage,
            "content": [{"type": "text", "text": "x"}, {"type": "tool_use", "id": "c", "name": "echo", "input": {"n": 1}}],
        },
        "gemini": {
            "candidates": [
                {"content": {"role": "model", "parts": [{"text": "x"}, {"functionCall": {"name": "echo", "args": {"n": 1}}}]},
                 "finishReason": "STOP"},
            ],
            "usageMetadata": usage,
        },
    }[kind]  # fmt: skip
    async with bench(kind, RawReply(json.dumps(first).encode(), "application/json"), OK) as b:
        outcome = await b.run()
        b.accepted()
    assert outcome.text == "ok" and outcome.input_tokens == 17
    assert [json.loads(str(call.arguments)) for call in b.session.ran] == [{"n": 1}]


async def test_reasoning_is_left_out_after_a_server_refuses_it() -> None:
    refusal = ErrorReply(400, "'messages.2': property 'reasoning' is unsupported", "invalid_request_error")
    reply = streamed(chunk({"reasoning": "plan"}), calls(ECHO))
    async with bench("openai", reply, refusal, ScriptedReply(ReplyCall("echo")), OK) as b:
        assert (await b.run()).ok
    assert [("plan" in json.dumps(request.body)) for request in b.server.requests] == [False, True, False, False]


def _has_reasoning(body: dict[str, Any]) -> bool:
    return all(m.get("reasoning_content") for m in body["messages"] if m["role"] == "assistant")


FORMS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "Extra inputs are not permitted: stream_options": lambda body: "stream_options" not in body,
    "Unsupported parameter: 'max_completion_tokens'": lambda body: body.get("max_tokens") == 500,
    "Missing `reasoning_content` field in the assistant message at message index 2": _has_reasoning,
    "reasoning_content is missing in assistant tool call message at index 2": _has_reasoning,
    "messages[2].content: expected a string, received null": lambda b: all(
        m["content"] is not None for m in b["messages"]
    ),
    "System role not supported": lambda body: body["messages"][0]["role"] == "user",
    "Unsupported value: 'messages[0].role' does not support 'system' with this model.": lambda b: b["messages"][0]["role"] == "user",
    "Developer instructions are not enabled for models/gemma-3-27b-it": lambda body: body["messages"][0]["role"] == "user",
    "messages[2]: missing field `content` at line 1 column 900": lambda b: all(m["content"] is not None for m in b["messages"]),
    "[json.exception.type_error.302] type must be string, but is null": lambda b: all(m["content"] is not None for m in b["messages"]),
    "The content field is a required field.": lambda b: all(m["content"] is not None for m in b["messages"]),
    "Invalid request: message at position 2 with role 'assistant' must not be empty": lambda b: all(m["content"] for m in b["messages"]),
    "messages: text content blocks must be non-empty": lambda b: all(m["content"] for m in b["messages"]),
    "Function call is missing a thought_signature in functionCall parts.": lambda body: all(
"thought_signature" in json.dumps(m["tool_calls"][0]) for m in body["messages"] if m.get("tool_calls")
    ),
}  # fmt: skip


@pytest.mark.parametrize("said", FORMS)
async def test_a_request_that_a_server_refuses_for_its_form_is_resent_in_another_form(said: str) -> None:
    is_kept = FORMS[said]
    refusal = ErrorReply(400, said, "invalid_request_error")
    first = ScriptedReply(ReplyCall("echo"))
    async with bench("openai", first, refusal, ScriptedReply(ReplyCall("echo")), OK) as b:
        agent = Agent(b.session, b.model, max_output_tokens=500, system="Be brief.")
        assert (await agent.complete("go")).text == "ok"
        b.accepted()
    assert not is_kept(b.server.requests[1].body)
    assert is_kept(b.server.requests[2].body) and is_kept(b.server.requests[3].body)


async def test_a_server_that_refuses_two_forms_gets_both_others() -> None:
    refusals = [
        ErrorReply(400, said, "invalid_request_error") for said in ("messages[2].content is null", "content is empty")
    ]
    async with bench("openai", ScriptedReply(ReplyCall("echo")), *refusals, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert [assistant(b, n)["content"] for n in (1, 2, 3)] == [None, "", "(calls)"]


async def test_an_assistant_message_separates_a_result_from_a_user_message_after_a_refusal() -> None:
    refusal = ErrorReply(400, "Unexpected role 'user' after role 'tool'", "invalid_request_message_order")
    async with bench("openai", ScriptedReply(ReplyCall("echo")), ErrorReply(400, "odd"), refusal, OK) as b:
        agent = b.agent()
        assert (await agent.complete("go")).status == "failed"
        assert (await agent.complete("go on")).ok
    roles = [message["role"] for message in b.server.requests[-1].body["messages"]]
    assert roles[-4:] == ["assistant", "tool", "assistant", "user"]


async def test_a_template_that_demands_alternating_roles_gets_them() -> None:
    refusal = ErrorReply(500, "Conversation roles must alternate user/assistant/user/assistant/...", "server_error")
    async with bench("openai", ScriptedReply(ReplyCall("echo")), ErrorReply(400, "odd"), refusal, OK) as b:
        agent = b.agent()
        assert (await agent.complete("go")).status == "failed"
        assert (await agent.complete("go on")).ok
    roles = [message["role"] for message in b.server.requests[-1].body["messages"]]
    assert roles[-4:] == ["assistant", "tool", "assistant", "user"] and not b.naps


async def test_a_request_form_that_does_not_help_is_not_kept() -> None:
    refusal = ErrorReply(400, "stream_options is odd", "invalid_request_error")
    async with bench("openai", refusal, refusal, OK) as b:
        agent = b.agent()
        assert (await agent.complete("go")).status == "failed"
        assert (await agent.complete("again")).ok
    assert ["stream_options" in request.body for request in b.server.requests] == [True, False, True]


BLOCK: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "echo", "input": {}}
ANTHROPIC: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"id": "m", "role": "assistant", "content": []}},
    {"type": "content_block_start", "index": 0, "content_block": BLOCK},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"n":1}'}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
]
ITEM = {"type": "function_call", "id": "f", "call_id": "c", "name": "echo", "arguments": ""}
RESPONSES: list[dict[str, Any]] = [
    {"type": "response.output_item.added", "output_index": 0, "item": ITEM},
    {"type": "response.function_call_arguments.done", "output_index": 0, "item_id": "f", "arguments": '{"n":1}'},
    {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": []}},
]


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("anthropic", ANTHROPIC),
        ("anthropic", [one for one in ANTHROPIC if one["type"] != "content_block_stop"]),
        ("openai-responses", RESPONSES),
    ],
    ids=["events without names", "a block that is not closed", "arguments only at their end"],
)
async def test_calls_of_servers_that_speak_another_api_in_their_own_way(kind: Any, sent: list[dict[str, Any]]) -> None:
    async with bench(kind, events(*(json.dumps(one).encode() for one in sent), end=b""), OK) as b:
        assert (await b.run()).text == "ok"
    assert [json.loads(str(call.arguments)) for call in b.session.ran] == [{"n": 1}] and not b.naps


@pytest.mark.parametrize("body", [b"", b'{"choices": [{"mess', b"[]"])
async def test_a_truncated_reply_is_requested_again(body: bytes) -> None:
    async with bench("openai", RawReply(body, "application/json"), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert len(b.naps) == 1


async def test_arguments_interleaved_with_text_and_reasoning_are_assembled() -> None:
    reply = streamed(
        chunk({"reasoning_content": "a"}),
        chunk({"content": "One. "}),
        calls({"index": 1, "id": "x", "function": {"name": "echo", "arguments": '{"n":'}}),
        chunk({"reasoning_content": "b"}),
        calls({"index": 1, "function": {"arguments": "1}"}}),
        chunk({"content": "Two."}),
        calls({"index": 2, "id": "y", "function": {"name": "echo", "arguments": '{"n":2}'}}),
    )
    async with bench("openai", reply, OK) as b:
        assert (await b.run()).ok
        b.accepted()
    assert [json.loads(str(call.arguments))["n"] for call in b.session.ran] == [1, 2]
    assert assistant(b)["content"] == "One. Two." and assistant(b)["reasoning_content"] == "ab"


async def test_reasoning_over_the_size_limit_is_not_sent_back_in_part() -> None:
    piece = chunk({"reasoning_content": "x" * 500_000})
    async with bench("openai", streamed(*[piece] * 12, calls(ECHO)), OK) as b:
        assert (await b.run()).ok
    assert "reasoning_content" not in assistant(b)


async def test_reasoning_of_one_agent_is_not_sent_in_another_conversation() -> None:
    reply = streamed(chunk({"reasoning_content": "plan"}), chunk({"content": "done"}), finish="stop")
    async with bench("openai", reply, OK, OK) as b:
        assert (await b.run()).text == "done"
        assert (await b.agent().complete("other")).text == "ok"
    assert "plan" not in json.dumps(b.server.requests[1].body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=6) | st.sampled_from(["echo", "{}", '{"n":1}', "stop"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["content", "tool_calls", "function_call", "index", "id", "type", "function", "name", "arguments", "text",
             "reasoning_content", "reasoning_details", "signature", "extra_content", "thinking", "role"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.lists(st.tuples(st.sampled_from(["delta", "message"]), JSON, JSON), max_size=5))
def test_the_chunk_reader_accepts_chunks_of_any_shape(given_chunks: list[tuple[str, Any, Any]]) -> None:
    reader = _ChunkReader(["echo"])
    assembly = ReplyAssembler()
    chunks: list[Any] = [{"choices": [{place: value, "finish_reason": end}]} for place, value, end in given_chunks]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    for one in chunks:
        for event in reader.read(one):
            assembly.feed_event(event)
    conversation = Conversation(origin="openai:x")
    conversation.add_user_message("go")
    reply = assembly.get_reply_so_far()
    conversation.add_reply(reply, [f"c{n}" for n in range(len(reply.calls))])
    answer = Result.output({})
    conversation.add_call_answers({n: CallAnswer(f"c{n}", "echo", answer, answer) for n in range(len(reply.calls))})
    messages = adapt_history_to_model(conversation.messages, "openai:x")
    sent = json.loads(json.dumps(list(_messages(ModelRequest("", messages, [])))))
    assert not find_chat_completions_faults({"messages": sent}) or any(
        "thinking" in str(m) or "type" in str(m) for m in sent
    )
    stored = [(n, json.loads(json.dumps(encode_message(m, ["c"] * 99)))) for n, m in enumerate(conversation.messages)]
    assert adapt_history_to_model(restore_conversation(stored).messages, "openai:x") == messages
