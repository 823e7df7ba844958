"""Reports about servers that speak the APIs of Anthropic, OpenAI (responses) and Gemini in their own way."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
from tests.agent.provider_bench import Kind, bench

from handrail.agent.model_protocol import ProviderBlock
from handrail.agent.providers.anthropic import _EventReader  # pyright: ignore[reportPrivateUsage]
from handrail.contract.text.strict_json import parse_arguments
from handrail.contract.tool.spec import ToolSpec
from handrail.testing.provider_servers import ErrorReply, RawReply, ReplyCall, ScriptedReply

OK = ScriptedReply("ok")
Event = dict[str, Any]


def events(*sent: Event, end: bytes = b"") -> RawReply:
    """Return a stream of these events."""
    return RawReply(b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in sent) + end)


def start(block: Event, index: int = 0) -> Event:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(change: Event, index: int = 0) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": change}


def stop(index: int = 0) -> Event:
    return {"type": "content_block_stop", "index": index}


def ended(reason: str | None = "tool_use") -> Event:
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": 3}}


BEGIN: Event = {
    "type": "message_start",
    "message": {"id": "m", "role": "assistant", "content": [], "usage": {"input_tokens": 7}},
}
END: Event = {"type": "message_stop"}
USE: Event = {"type": "tool_use", "id": "c", "name": "echo", "input": {}}
PIECE = delta({"type": "input_json_delta", "partial_json": '{"n":1}'})
ANTHROPIC_CALLS: dict[str, RawReply] = {
    "no last event": events(BEGIN, start(USE), PIECE, stop(), ended()),
    "the stop reason of OpenAI": events(BEGIN, start(USE), PIECE, ended("tool_calls"), END),
    "a stop reason in capitals": events(BEGIN, start(USE), PIECE, ended("TOOL_USE"), END),
    "arguments as an object": events(BEGIN, start(USE), delta({"type": "input_json_delta", "partial_json": {"n": 1}}), stop(), ended(), END),
    "arguments at the start": events(BEGIN, start({**USE, "input": {"n": 1}}), stop(), ended(), END),
    "arguments as text at the start": events(BEGIN, start({**USE, "input": '{"n":1}'}), stop(), ended(), END),
    "an empty object first": events(BEGIN, start(USE), delta({"type": "input_json_delta", "partial_json": ""}), PIECE, stop(), ended(), END),
    "no usage": events({"type": "message_start", "message": {}}, start(USE), PIECE, stop(), {"type": "message_delta", "delta": {"stop_reason": "tool_use"}}, END),
    "an end mark": events(BEGIN, start(USE), PIECE, stop(), ended(), END, end=b"data: [DONE]\n\n"),
    "without numbers": events(*({k: v for k, v in one.items() if k != "index"} for one in (BEGIN, start(USE), PIECE, stop(), ended(), END))),
    "a piece without a type": events(BEGIN, start(USE), delta({"partial_json": '{"n":1}'}), stop(), ended(), END),
    "labelled as text": RawReply(events(BEGIN, start(USE), PIECE, stop(), ended(), END).body, "text/plain"),
}  # fmt: skip


@pytest.mark.parametrize("form", ANTHROPIC_CALLS)
async def test_a_call_of_an_anthropic_server_is_run_once(form: str) -> None:
    async with bench("anthropic", ANTHROPIC_CALLS[form], OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert [parse_arguments(str(call.arguments)) for call in b.session.ran] == [{"n": 1}] and not b.naps


@pytest.mark.parametrize(
    ("reason", "status"),
    [("length", "length"), ("max_output_tokens", "length"), ("model_context_window_exceeded", "length"),
     ("content_filter", "refused"), ("refusal", "refused"), ("stop", "answered"), ("end_turn", "answered"),
     ("maxTokens", "length"), ("content-filter", "refused"), ("endTurn", "answered")],
)  # fmt: skip
async def test_a_stop_reason_of_an_anthropic_server_ends_the_run_with_its_status(reason: str, status: str) -> None:
    text = start({"type": "text", "text": ""})
    said = delta({"type": "text_delta", "text": "hello"})
    async with bench("anthropic", events(BEGIN, text, said, stop(), ended(reason), END)) as b:
        outcome = await b.run()
    assert (outcome.status, outcome.text) == (status, "hello")


@pytest.mark.parametrize("closed", [True, False])
async def test_thinking_of_an_anthropic_server_is_returned_in_its_place_with_all_fields(closed: bool) -> None:
    block = {"type": "thinking", "thinking": "", "signature": "", "format": "x-1"}
    thinks = [start(block), delta({"type": "thinking_delta", "thinking": "Hm."})]
    thinks += [delta({"type": "signature_delta", "signature": "c2ln"}), *([stop()] if closed else [])]
    call = [start(USE, 1), delta({"type": "input_json_delta", "partial_json": "{}"}, 1), stop(1)]
    async with bench("anthropic", events(BEGIN, *thinks, *call, ended(), END), OK) as b:
        assert (await b.run()).ok
        b.accepted()
    sent = b.server.requests[1].body["messages"][1]["content"]
    assert sent[0] == {"type": "thinking", "thinking": "Hm.", "signature": "c2ln", "format": "x-1"}
    assert sent[1]["type"] == "tool_use"


async def test_an_anthropic_answer_without_a_stream_and_with_text_as_content_arrives() -> None:
    body = {"role": "assistant", "content": "hello", "stop_reason": "end_turn"}
    async with bench("anthropic", RawReply(json.dumps(body).encode(), "application/json")) as b:
        assert (await b.run()).text == "hello"


async def test_a_signature_with_the_letters_of_urls_is_returned_to_gemini() -> None:
    signed = chunk({**function_call({"n": 1}), "thoughtSignature": "_-8="}, finish="STOP")
    async with bench("gemini", events(signed), OK) as b:
        assert (await b.run()).text == "ok"
    sent = b.server.requests[1].body["contents"][1]["parts"][0]["thoughtSignature"]
    assert sent.translate(str.maketrans("+/", "-_")) == "_-8="


async def test_redacted_thinking_is_returned_unchanged() -> None:
    block = {"type": "redacted_thinking", "data": "QUJD"}
    reply = events(BEGIN, start(block), stop(), start(USE, 1), stop(1), ended(), END)
    async with bench("anthropic", reply, OK) as b:
        assert (await b.run()).ok
    assert b.server.requests[1].body["messages"][1]["content"][0] == block


async def test_thinking_in_a_form_of_no_api_ends_no_reply() -> None:
    begun = start({"type": "redacted_thinking", "data": "QUJD", "thinking": 5})
    reply = events(BEGIN, begun, delta({"thinking": "Hm."}), stop(), start(USE, 1), stop(1), ended(), END)
    async with bench("anthropic", reply, OK) as b:
        assert (await b.run()).ok and not b.naps


@pytest.mark.timeout(20)
def test_a_long_thinking_is_read_in_one_pass() -> None:
    reader, piece = _EventReader(), cast("Any", delta({"type": "thinking_delta", "thinking": "word"}))
    sent = (cast("Any", start({"type": "thinking", "thinking": "a "})), *[piece] * 300_000, cast("Any", stop()))
    (block,) = (found for event in sent for found in reader.read(event))
    assert isinstance(block, ProviderBlock) and block.block["thinking"] == "a " + "word" * 300_000


@pytest.mark.timeout(20)
def test_a_long_input_of_a_server_tool_is_read_in_one_pass() -> None:
    reader, code = _EventReader(), "x" * 120_000
    use = start({"type": "server_tool_use", "id": "s", "name": "code_execution", "input": {}})
    pieces = [delta({"type": "input_json_delta", "partial_json": one}) for one in ('{"code":"', *code, '"}')]
    (block,) = (found for event in (use, *pieces, stop()) for found in reader.read(cast("Any", event)))
    assert isinstance(block, ProviderBlock) and block.block["input"] == {"code": code}


async def test_a_search_without_a_result_leaves_no_empty_message_in_the_history() -> None:
    search = start({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}})
    async with bench("anthropic", events(BEGIN, search, stop(), ended("end_turn"), END), OK) as b:
        agent = b.agent()
        await agent.complete("go")
        await agent.complete("again")
    messages = b.server.requests[-1].body["messages"]
    assert all(message["content"] for message in messages)
    assert all(one["role"] != other["role"] for one, other in pairwise(messages))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"type": "error", "error": {"type": "authentication_error", "message": "no"}}, "rejected the key"),
        ({"error": {"type": "invalid_request_error", "message": "bad schema"}}, "bad schema"),
    ],
)
async def test_an_error_event_of_an_anthropic_server_is_not_retried(error: Event, words: str) -> None:
    async with bench("anthropic", events(error)) as b:
        outcome = await b.run()
    assert outcome.status == "failed" and words in outcome.detail and not b.naps


ANTHROPIC_FORMS: dict[str, Callable[[Event], bool]] = {
    "tools.0.cache_control: Extra inputs are not permitted": lambda body: "cache_control" not in json.dumps(body),
    "system: Input should be a valid string": lambda body: isinstance(body["system"], str),
    "max_tokens: 16384 > 8192, which is the maximum allowed number of output tokens for m": lambda b: b["max_tokens"] <= 8192,
}  # fmt: skip


@pytest.mark.parametrize("said", ANTHROPIC_FORMS)
async def test_a_request_that_an_anthropic_server_refuses_for_its_form_is_resent_in_another_form(said: str) -> None:
    is_kept = ANTHROPIC_FORMS[said]
    first, refusal = ScriptedReply(ReplyCall("echo")), ErrorReply(400, said, "invalid_request_error")
    async with bench("anthropic", first, refusal, OK, OK) as b:
        agent = b.agent()
        assert (await agent.complete("go")).text == "ok"
        assert (await agent.complete("again")).text == "ok"
        b.accepted()
    assert [bool(is_kept(request.body)) for request in b.server.requests] == [False, False, True, True]


def added(call: str, index: Any = 0, **more: Any) -> Event:
    item = {"type": "function_call", "id": f"f{call}", "call_id": call, "name": "echo", "arguments": "", **more}
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def piece(text: Any, call: str, index: Any = 0) -> Event:
    kind = "response.function_call_arguments.delta"
    return {"type": kind, "output_index": index, "item_id": f"f{call}", "delta": text}


def done(call: str, arguments: Any, index: Any = 0) -> Event:
    return {**added(call, index, arguments=arguments, status="completed"), "type": "response.output_item.done"}


def completed(kind: str = "completed", **more: Any) -> Event:
    return {"type": f"response.{kind}", "response": {"id": "r", "status": "completed", "output": [], **more}}


def text_event(kind: str, **more: Any) -> Event:
    return {"type": f"response.{kind}", "output_index": 0, "content_index": 0, **more}


RESPONSES_CALLS: dict[str, tuple[RawReply, list[Any]]] = {
    "all numbered 0, interleaved": (
        events(added("a"), added("b"), piece('{"n":', "a"), piece('{"n":', "b"), piece("1}", "a"), piece("2}", "b"),
               done("a", '{"n":1}'), done("b", '{"n":2}'), completed()), [{"n": 1}, {"n": 2}]),
    "a name at the end": (events(added("a", name=None), piece('{"n":', "a"), done("a", '{"n":1}'), completed()), [{"n": 1}]),
    "all numbered 0": (
        events(added("a"), piece('{"n":1}', "a"), done("a", '{"n":1}'), added("b"), piece('{"n":2}', "b"), done("b", '{"n":2}'), completed()),
        [{"n": 1}, {"n": 2}]),
    "without numbers": (events(added("a", None), piece('{"n":1}', "a", None), done("a", '{"n":1}', None), completed()), [{"n": 1}]),
    "another id with every event": (events(added("a"), piece('{"n":', "x"), piece("1}", "y"), done("a", '{"n":1}'), completed()), [{"n": 1}]),
    "another call id at the end": (events(added("a"), piece('{"n":1}', "a"), done("b", '{"n":1}'), completed()), [{"n": 1}]),
    "lists as numbers": (events(added("a", [0]), piece('{"n":1}', "a", [0]), done("a", '{"n":1}', [0]), completed()), [{"n": 1}]),
    "pieces as an object": (events(added("a"), piece({"n": 1}, "a"), done("a", {"n": 1}), completed()), [{"n": 1}]),
    "arguments at the start": (events(added("a", arguments='{"n":1}'), completed()), [{"n": 1}]),
    "ended by done": (events(added("a"), done("a", '{"n":1}'), completed("done")), [{"n": 1}]),
    "ended by the end mark": (events(added("a"), done("a", '{"n":1}'), end=b"data: [DONE]\n\n"), [{"n": 1}]),
    "only in the last event": (events(completed(output=[done("a", '{"n":1}')["item"], done("b", '{"n":2}')["item"]])), [{"n": 1}, {"n": 2}]),
    "not streamed, without its type": (
        RawReply(json.dumps({"id": "r", "status": "completed", "output": [done("a", '{"n":1}')["item"]]}).encode(), "application/json"), [{"n": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("form", RESPONSES_CALLS)
async def test_calls_of_a_responses_server_are_run_once(form: str) -> None:
    reply, expected = RESPONSES_CALLS[form]
    async with bench("openai-responses", reply, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert [parse_arguments(str(call.arguments)) for call in b.session.ran] == expected and not b.naps


async def test_a_call_of_a_responses_server_whose_arguments_never_came_is_not_run() -> None:
    async with bench("openai-responses", events(added("a"), completed()), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert not b.session.ran and "incomplete" in b.results(1)[0][1]


MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hello"}]}
RESPONSES_TEXTS: dict[str, RawReply] = {
    "only at the end of the item": events({"type": "response.output_item.done", "output_index": 0, "item": MESSAGE}, completed()),
    "only at the end of the text": events(text_event("output_text.done", text="hello"), completed()),
    "at both ends": events(text_event("output_text.done", text="hello"), {"type": "response.output_item.done", "output_index": 0, "item": MESSAGE}, completed(output=[MESSAGE])),
    "pieces of a part": events(text_event("content_part.delta", delta="hel"), text_event("content_part.delta", delta={"type": "output_text", "text": "lo"}), completed("done")),
    "in pieces and at the ends": events(text_event("output_text.delta", delta="hello"), text_event("output_text.done", text="hello"), completed(output=[MESSAGE])),
    "content as text": events({"type": "response.output_item.done", "output_index": 0, "item": {**MESSAGE, "content": "hello"}}, completed()),
    "a refusal": events(text_event("refusal.done", refusal="hello"), completed()),
    "ended by the end mark": events(text_event("output_text.delta", delta="hello"), end=b"data: [DONE]\n\n"),
}  # fmt: skip


@pytest.mark.parametrize("form", RESPONSES_TEXTS)
async def test_a_text_of_a_responses_server_arrives_once(form: str) -> None:
    async with bench("openai-responses", RESPONSES_TEXTS[form]) as b:
        assert (await b.run()).text == "hello"
        b.accepted()
    assert not b.naps


@pytest.mark.parametrize(
    ("reason", "status"), [("max_output_tokens", "length"), ("max_tokens", "length"), ("content_filter", "refused")]
)
async def test_an_incomplete_response_ends_the_run_with_its_status(reason: str, status: str) -> None:
    end = completed("incomplete", status="incomplete", incomplete_details={"reason": reason})
    async with bench("openai-responses", events(text_event("output_text.delta", delta="hello"), end)) as b:
        assert (await b.run()).status == status


@pytest.mark.parametrize("kind", ["done", "cancelled"])
async def test_a_cancelled_response_is_not_an_answer(kind: str) -> None:
    end = completed(kind, status="cancelled")
    async with bench("openai-responses", events(text_event("output_text.delta", delta="half"), end)) as b:
        assert (await b.run()).status == "failed"
    body = {"object": "response", "status": "cancelled", "output": [MESSAGE]}
    async with bench("openai-responses", RawReply(json.dumps(body).encode(), "application/json"), OK) as b:
        assert (await b.run()).text == "ok"


async def test_a_model_that_refuses_encrypted_reasoning_is_asked_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = ErrorReply(400, "Encrypted content is not supported with this model.", "invalid_request_error")
    async with bench("openai-responses", refusal, OK, OK) as b:
        monkeypatch.setattr(b.model, "_model", "openai/gpt-5-chat-latest")
        agent = b.agent()
        assert (await agent.complete("go")).text == "ok"
        assert (await agent.complete("again")).text == "ok"
        b.accepted()
    assert ["include" in request.body for request in b.server.requests] == [True, False, False]


async def test_an_error_object_of_a_responses_server_is_reported() -> None:
    async with bench("openai-responses", events({"code": "InvalidParameter", "message": "bad schema"})) as b:
        outcome = await b.run()
    assert outcome.status == "failed" and "bad schema" in outcome.detail and not b.naps


def chunk(*parts: Event | None, finish: str | None = None, **more: Any) -> Event:
    candidate = {"content": {"role": "model", "parts": list(parts)}, **({"finishReason": finish} if finish else {})}
    return {"candidates": [candidate], **more}


def function_call(args: Any) -> Event:
    return {"functionCall": {"name": "echo", "args": args}}


GEMINI_CALLS: dict[str, RawReply] = {
    "arguments as text": events(chunk(function_call('{"n":1}'), finish="STOP")),
    "arguments as text, not streamed": RawReply(json.dumps(chunk(function_call('{"n":1}'), finish="STOP")).encode(), "application/json"),
    "a list of chunks": RawReply(json.dumps([chunk({"text": "x"}), chunk(function_call({"n": 1}), finish="STOP")]).encode(), "application/json"),
    "a finish reason with each chunk": events(chunk({"text": "x"}, finish="STOP"), chunk(function_call({"n": 1}), finish="STOP")),
    "an unspecified finish reason": events(chunk({"text": "x"}, finish="FINISH_REASON_UNSPECIFIED"), chunk(function_call({"n": 1}), finish="STOP")),
    "one part without a list": events({"candidates": [{"content": {"parts": function_call({"n": 1})}, "finishReason": "STOP"}]}),
    "an empty part": events(chunk(None, function_call({"n": 1}), finish="STOP")),
    "a signature that is none": events(chunk({**function_call({"n": 1}), "thoughtSignature": "no!!"}, finish="STOP")),
    "a signature of no length": events(chunk({**function_call({"n": 1}), "thoughtSignature": "abcde"}, finish="STOP")),
    "a number as signature": events(chunk({**function_call({"n": 1}), "thoughtSignature": 5}, finish="STOP")),
    "a thought as text": events(chunk({"text": "x", "thought": "Hm."}, function_call({"n": 1}), finish="STOP")),
    "parts of tokens": events(chunk(function_call({"n": 1}), finish="STOP", usageMetadata={"promptTokenCount": 7.5})),
    "tokens without end": events(chunk(function_call({"n": 1}), finish="STOP", usageMetadata={"promptTokenCount": float("-inf")})),
    "too many calls": events(chunk(function_call({"n": 1}), finish="TOO_MANY_TOOL_CALLS")),
    "an end mark": events(chunk(function_call({"n": 1}), finish="STOP"), end=b"data: [DONE]\n\n"),
    "unknown fields": events({**chunk({"text": "x", "extra": 1}, function_call({"n": 1}), finish="STOP"), "extra": {}}),
}  # fmt: skip


@pytest.mark.parametrize("form", GEMINI_CALLS)
async def test_a_call_of_a_gemini_server_is_run_once(form: str) -> None:
    async with bench("gemini", GEMINI_CALLS[form], OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert [parse_arguments(str(call.arguments)) for call in b.session.ran] == [{"n": 1}] and not b.naps


@pytest.mark.parametrize("args", [{"$unparsed": 5}, {"$unparsed": "{}", "n": 1}, ""], ids=str)
async def test_arguments_of_a_gemini_model_with_any_name_arrive_unchanged(args: Any) -> None:
    async with bench("gemini", events(chunk(function_call(args), finish="STOP")), OK) as b:
        assert (await b.run()).text == "ok"
    assert [parse_arguments(str(call.arguments)) for call in b.session.ran] == [args or {}]


@pytest.mark.parametrize("args", ["{", [1], 5])
async def test_arguments_of_a_gemini_server_that_are_no_object_are_refused(args: Any) -> None:
    async with bench("gemini", events(chunk(function_call(args), finish="STOP")), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert "invalid_input" in b.results(1)[0][1]


@pytest.mark.parametrize(
    ("finish", "status"),
    [("PROHIBITED_CONTENT", "refused"), ("IMAGE_SAFETY", "refused"), ("MAX_TOKENS", "length"), ("OTHER", "answered")],
)
async def test_a_finish_reason_of_gemini_ends_the_run_with_its_status(finish: str, status: str) -> None:
    async with bench("gemini", events(chunk({"text": "x"}), chunk(finish=finish))) as b:
        assert (await b.run()).status == status


@pytest.mark.parametrize(
    "error", ["overloaded", {"message": "The model is overloaded", "status": "UNAVAILABLE"}, {"code": "503", "message": "x"}], ids=str
)  # fmt: skip
async def test_an_error_of_any_form_inside_a_gemini_stream_is_retried(error: Any) -> None:
    async with bench("gemini", events({"error": error}), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert len(b.naps) == 1


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        ("gemini", 400, "API key expired. Please renew the API key."),
        ("gemini", 400, "API key not valid. Please pass a valid API key."),
        ("openai", 400, "Incorrect API key provided: xx***yy."),
    ],
)
async def test_a_key_that_is_refused_with_another_status_is_named(kind: Kind, status: int, said: str) -> None:
    async with bench(kind, ErrorReply(status, said, "INVALID_ARGUMENT")) as b:
        outcome = await b.run()
    assert "rejected the key" in outcome.detail and "xx***yy" not in outcome.detail and not b.naps


async def test_a_gemini_model_without_system_instructions_gets_them_as_a_message() -> None:
    refusal = ErrorReply(400, "Developer instruction is not enabled for models/gemma-3-27b-it", "INVALID_ARGUMENT")
    async with bench("gemini", refusal, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    before, after = (request.body for request in b.server.requests)
    system = before["systemInstruction"]["parts"][0]["text"]
    assert "systemInstruction" not in after and after["contents"][0]["parts"][0]["text"] == system


async def test_calls_without_a_signature_get_one_after_a_gemini_server_refuses_them() -> None:
    refusal = ErrorReply(400, "Function call is missing a thought_signature in functionCall parts.", "INVALID_ARGUMENT")
    async with bench("gemini", ScriptedReply(ReplyCall("echo")), refusal, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    signed = ["thoughtSignature" in json.dumps(request.body) for request in b.server.requests]
    assert signed == [False, False, True]


RICH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/word"}]},
        "at": {"type": "string", "format": "date-time"},
        "map": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "$defs": {"word": {"type": "string", "pattern": "^a+$"}},
    "additionalProperties": False,
}
SCHEMA_REFUSALS = (
    "Invalid schema for function 'echo': In context=('properties', 'n'), 'anyOf' is not permitted.",
    "tools.0.custom.input_schema: JSON schema is invalid. It must match JSON Schema draft 2020-12",
    "tools.function.parameters is not a valid moonshot flavored json schema",
    "unsupported keyword '$ref' in tools[0]",
    "Unknown name \"additionalProperties\" at 'tools[0].function_declarations[0].parameters': Cannot find field.",
)


@pytest.mark.parametrize("kind", ["openai", "openai-responses", "anthropic"])
@pytest.mark.parametrize("said", SCHEMA_REFUSALS)
async def test_a_server_that_refuses_a_schema_gets_a_plain_one(kind: Kind, said: str) -> None:
    async with bench(
        kind, ErrorReply(400, said, "invalid_request_error"), ScriptedReply(ReplyCall("echo", {"n": 1})), OK
    ) as b:
        b.session.specs = [ToolSpec(id="echo", description="x", parameters=RICH, side_effect="read", locks=())]
        assert (await b.run()).text == "ok"
        b.accepted()
    words = [f'"{keyword}":' for keyword in ("anyOf", "$ref", "$defs", "additionalProperties", "format", "pattern")]
    sent = [json.dumps(request.body["tools"]) for request in b.server.requests]
    assert [any(word in tools for word in words) for tools in sent] == [True, False, False]
    assert all('"at"' in tools and '"map"' in tools for tools in sent)
    assert [parse_arguments(str(call.arguments)) for call in b.session.ran] == [{"n": 1}]
