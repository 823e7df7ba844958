"""Reports about sessions that every resume sent to the provider in the same invalid form."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.agent.provider_bench import Kind, bench, each_provider
from tests.agent.sessions import RecordingSession

from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import ContextOverflow, RequestRejected
from handrail.agent.providers import open_model
from handrail.agent.providers.provider_errors import make_reported_error
from handrail.agent.run_budget import Budget
from handrail.agent.run_events import ConversationCompacted, RunFinished
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply
from handrail.testing.provider_servers import ErrorReply, ReplyCall, ScriptedReply, StreamError, ThinkingBlock
from handrail.testing.scripted_kernel import temporary_kernel

OK = ScriptedReply("ok")
LONG = "The quick brown fox jumps over the lazy dog. " * 400

REFUSALS: dict[str, tuple[int, object, int | None]] = {
    "OpenAI": (400, {"code": "context_length_exceeded", "type": "invalid_request_error", "message": "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens. Please reduce the length of the messages."}, 8192),
    "OpenAI responses": (400, {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model. Please adjust your input and try again."}, None),
    "OpenAI rate": (429, {"code": "rate_limit_exceeded", "type": "tokens", "message": "Request too large for gpt-4o in organization org on tokens per min (TPM): Limit 30000, Requested 45000. The input or output tokens must be reduced in order to run successfully."}, 30000),
    "OpenAI string": (400, {"code": "string_above_max_length", "message": "Invalid 'messages[1].content': string too long. Expected a string with maximum length 1048576, but got a string with length 2000000 instead."}, None),
    "Anthropic": (400, {"type": "invalid_request_error", "message": "prompt is too long: 210000 tokens > 200000 maximum"}, 200000),
    "Anthropic limit": (400, {"type": "invalid_request_error", "message": "input length and `max_tokens` exceed context limit: 190000 + 16384 > 200000, decrease input length or `max_tokens` and try again"}, 200000),
    "Anthropic size": (413, {"type": "request_too_large", "message": "Request exceeds the maximum size"}, None),
    "Bedrock": (400, {"message": "Input is too long for requested model."}, None),
    "Gemini": (400, {"status": "INVALID_ARGUMENT", "message": "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."}, 1048576),
    "vLLM": (400, {"object": "error", "type": "BadRequestError", "code": 400, "message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens (4500 in the messages, 500 in the completion). Please reduce the length of the messages or completion."}, 4096),
    "vLLM decoder": (400, {"type": "BadRequestError", "message": "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure that `max_model_len` is no smaller than the number of text tokens."}, 4096),
    "llama.cpp": (400, {"code": 400, "type": "exceed_context_size_error", "message": "the request exceeds the available context size, try increasing it", "n_prompt_tokens": 9000, "n_ctx": 4096}, 4096),
    "llama.cpp old": (500, {"code": 500, "type": "server_error", "message": "Context size has been exceeded."}, None),
    "Ollama": (400, "input length exceeds the context length", None),
    "Ollama prompt": (400, {"message": "prompt too long; exceeded max context length by 500 tokens"}, None),
    "LM Studio": (400, "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded with context length of only 4096 tokens, which is not enough.", 4096),
    "SGLang": (400, {"message": "The input (5000 tokens) is longer than the model's context length (4096 tokens)."}, 4096),
    "SGLang total": (400, {"message": "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5000 tokens"}, 4096),
    "TGI": (422, {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097. Given: 5000 `inputs` tokens and 512 `max_new_tokens`"}, 4097),
    "DeepSeek": (400, {"code": "invalid_request_error", "message": "This model's maximum context length is 65536 tokens. However, you requested 70000 tokens"}, 65536),
    "Mistral": (400, {"object": "error", "code": 3051, "message": "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length"}, 32768),
    "OpenRouter": (400, {"code": 400, "message": "This endpoint's maximum context length is 131072 tokens. However, you requested about 150000 tokens (140000 of text input). Please reduce the length of either one."}, 131072),
    "Groq": (413, {"code": "rate_limit_exceeded", "type": "tokens", "message": "Request too large for model `llama` on tokens per minute (TPM): Limit 6000, Requested 8000, please reduce your message size and try again."}, 6000),
    "Cerebras": (400, {"code": "context_length_exceeded", "message": "Please reduce the length of the messages or completion. Current length is 8500 while limit is 8192"}, 8192),
    "xAI": (400, {"error": "This model's maximum prompt length is 131072 but the request contains 150000 tokens."}, 131072),
    "Cohere": (400, {"message": "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 5000."}, 4081),
    "Qwen": (400, {"code": "invalid_parameter_error", "message": "Range of input length should be [1, 30720]"}, 30720),
    "Qwen code": (400, {"code": "InvalidParameter", "message": "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 129024]"}, 129024),
    "Kimi": (400, {"type": "invalid_request_error", "message": "Invalid request: Your request exceeded model token limit: 131072 (requested: 140000)"}, 131072),
    "GLM": (400, {"code": "1261", "message": "Prompt exceeds max length"}, None),
    "MiniMax": (400, {"type": "bad_request_error", "message": "invalid params, context window exceeds limit (2013)"}, None),
    "Fireworks": (400, {"message": "The prompt is too long: 140000, model maximum context length: 131071"}, 131071),
    "LiteLLM": (400, {"type": None, "code": "400", "message": "litellm.ContextWindowExceededError: litellm.BadRequestError: ContextWindowExceededError: too long"}, None),
    "Copilot": (400, {"code": "model_max_prompt_tokens_exceeded", "message": "prompt token count of 130000 exceeds the limit of 128000"}, 128000),
    "GitHub Models": (413, {"code": "tokens_limit_reached", "message": "Request body too large for gpt-4o model. Max size: 8000 tokens."}, 8000),
    "Together": (422, {"message": "Input validation error: the total number of tokens exceeds the model's limit of 8193"}, 8193),
    "model that supports less": (400, {"message": "Your request contains 9000 tokens, but this model supports at most 8192 tokens."}, 8192),
    "Vertex": (400, {"message": "Unable to submit request because the input token count is 40000 but model only supports up to 32768. Reduce the input token count and try again."}, 32768),
    "a comparison": (400, {"message": "Total tokens 9000 > 8192"}, 8192),
    "a field": (400, {"message": "input_tokens (9000) must be less than 8192"}, 8192),
    "an input length": (422, {"detail": "Input length 9000 exceeds maximum allowed token size 8192"}, None),
    "a maximum input": (400, {"message": "Maximum input length of 8192 tokens exceeded"}, 8192),
    "a conversation": (400, {"message": "Conversation too long. Please start a new one."}, None),
    "Chinese": (400, {"message": "输入过长，超出模型上下文限制"}, None),
    "a code": (400, {"code": "prompt_too_long", "message": "refused"}, None),
    "llama-cpp-python": (500, {"message": "Requested tokens (2076) exceed context window of 2048", "type": "internal_server_error"}, 2048),
    "a number in a prompt": (400, {"message": "The number of tokens in your prompt 9000 is greater than the 8192 allowed"}, None),
    "vLLM with pictures": (400, {"message": "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure that `max_model_len` is no smaller than the number of text tokens plus multimodal tokens. For image inputs, the number of image tokens depends on the number of images"}, 4096),
    "vLLM below zero": (400, {"message": "max_tokens must be at least 1, got -1234.", "type": "BadRequestError"}, None),
    "Gemini size": (400, {"status": "INVALID_ARGUMENT", "message": "Request payload size exceeds the limit: 20971520 bytes."}, 0),
    "Kimi size": (400, {"message": "Invalid request: total message size 5000000 exceeds limit 4194304"}, 0),
    "TGI inputs": (422, {"error": "Input validation error: `inputs` must have less than 4096 tokens. Given: 9000"}, 4096),
    "LM Studio n_keep": (400, {"error": "The number of tokens to keep from the initial prompt is greater than the context length (n_keep: 6221>= n_ctx: 4096)."}, 4096),
    "GLM without a space": (400, {"code": "1210", "message": "Prompt超长"}, None),
    "Chinese tokens": (400, {"message": "tokens 超过模型最大长度限制"}, None),
    "a mention of tools": (400, {"message": "This model's maximum context length is 8192 tokens. However, you requested 9100 tokens. Please reduce the length of the messages or tools[0]."}, 8192),
    "a place in tools": (400, {"message": "tools.0: prompt is too long: 210000 tokens > 200000 maximum"}, 200000),
    "a number before the limit": (400, {"error": "Prompt length 9000 exceeds model's max position embeddings 8192"}, 8192),
    "Cloudflare": (400, {"errors": [{"message": "AiError: The estimated number of input and maximum output tokens (9000) exceeded this model context window limit (7968).", "code": 5021}], "success": False}, 7968),
    "Bedrock Nova": (400, {"message": "Input Tokens Exceeded: Number of input tokens exceeds maximum length."}, None),
    "Bedrock Cohere": (400, {"message": "Too many input tokens. Max input tokens: 128000, request input token count: 140000"}, 128000),
    "behind OpenRouter": (400, {"message": "Provider returned error", "code": 400, "metadata": {"raw": '{"error":{"message":"prompt is too long: 210000 tokens > 200000 maximum"}}'}}, 200000),
    "a place in messages": (400, {"code": "string_above_max_length", "message": "Invalid 'messages[3].content[0].text': string too long. Expected a string with maximum length 10485760, but got a string with length 11000000 instead."}, 0),
    "an output": (400, {"code": "string_above_max_length", "message": "Invalid 'input[12].output': string too long. Expected a string with maximum length 10485760, but got a string with length 10946028 instead."}, 0),
    "nginx": (413, "<html><head><title>413 Request Entity Too Large</title></head></html>", None),
}  # fmt: skip


@pytest.mark.parametrize("who", REFUSALS)
def test_a_refusal_for_length_is_recognised_as_a_context_overflow(who: str) -> None:
    status, body, limit = REFUSALS[who]
    error = make_reported_error("openai:x", "KEY", body, status)
    assert isinstance(error, ContextOverflow), error
    assert limit is None or error.max_tokens == (limit or None)  # 0: it counts no tokens


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"message": "Invalid schema for function 'x': maximum 100 properties"}),
        (400, {"message": "max_tokens is too large: 100000. This model supports at most 16384 completion tokens"}),
        (
            400,
            {
                "message": "messages.0.content.0.image.source.base64: image exceeds 5 MB maximum: 6000000 bytes > 5242880 bytes"
            },
        ),
        (400, {"message": "Invalid 'tools': array too long. Expected an array with maximum length 128, but got 200"}),
        (404, {"message": "model not found: context-1"}),
        (429, {"message": "Rate limit reached on tokens per min (TPM): Limit 30000, Used 29000, Requested 2000"}),
        (400, {"message": "No tool output found for function call call_1."}),
        (401, {"message": "Incorrect API key provided"}),
        (
            400,
            {
                "code": "string_above_max_length",
                "message": "Invalid 'tools[0].function.name': string too long. Expected a string with maximum length 64.",
            },
        ),
        (
            400,
            {
                "message": "max_completion_tokens is too large: 200000. This model supports at most 128000 completion tokens."
            },
        ),
        (429, {"message": "This request would exceed your rate limit of 30,000 input tokens per minute"}),
        (400, {"code": "string_above_max_length", "message": "Invalid 'messages[2].tool_calls[0].id': string too long. Expected a string with maximum length 40"}),
        (400, {"code": "string_above_max_length", "message": "Invalid 'tools[3].function.description': string too long. Expected a string with maximum length 1024"}),
        (400, {"message": "The maximum tokens you requested exceeds the model limit of 8192. Try again with a lower maximum tokens value."}),
    ],
)  # fmt: skip
def test_other_refusals_are_not_mistaken_for_a_context_overflow(status: int, body: object) -> None:
    assert not isinstance(make_reported_error("openai:x", "KEY", body, status), ContextOverflow)


def _refusal(kind: Kind, limit: int = 4096) -> ErrorReply:
    words = {
        "anthropic": ("invalid_request_error", f"prompt is too long: 9000 tokens > {limit} maximum"),
        "gemini": (
            "INVALID_ARGUMENT",
            f"The input token count (9000) exceeds the maximum number of tokens allowed ({limit}).",
        ),
    }
    code, said = words.get(kind, ("context_length_exceeded", f"This model's maximum context length is {limit} tokens."))
    return ErrorReply(400, said, code)


@each_provider
async def test_a_conversation_is_compacted_when_the_real_window_is_smaller_than_estimated(kind: Kind) -> None:
    turns = [ScriptedReply(ReplyCall("echo", {"text": f"{n} {LONG}"}), usage=(2_000 * n, 5)) for n in range(1, 4)]
    async with bench(kind, *turns, _refusal(kind, 12_000), OK) as b:
        events = [event async for event in b.agent().run("Count the foxes.")]
        b.accepted()
    assert isinstance(events[-1], RunFinished) and events[-1].outcome.text == "ok"
    (made,) = (event for event in events if isinstance(event, ConversationCompacted))
    assert made.removed_messages and made.tokens_after < made.tokens_before / 2
    before, after = (len(json.dumps(b.server.requests[n].body)) for n in (3, 4))
    assert after < before / 2 and "Count the foxes." in json.dumps(b.server.requests[4].body)


@each_provider
async def test_a_request_that_stays_too_long_after_one_compaction_fails(kind: Kind) -> None:
    turns = [ScriptedReply(ReplyCall("echo", {"text": LONG})) for _ in range(3)]
    async with bench(kind, *turns, _refusal(kind), _refusal(kind)) as b:
        outcome = await b.run()
        b.accepted()
    assert outcome.status == "failed" and "longer than the model's context" in outcome.detail
    assert len(b.server.requests) == 5


@pytest.mark.parametrize("kind", ["openai", "openai-responses"])
async def test_a_context_overflow_reported_inside_the_stream_causes_compaction(kind: Kind) -> None:
    turns = [ScriptedReply(ReplyCall("echo", {"text": LONG})) for _ in range(3)]
    refused = ScriptedReply(
        StreamError("context_length_exceeded", "Your input exceeds the context window of this model.")
    )
    async with bench(kind, *turns, refused, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()


async def test_a_result_longer_than_the_window_is_left_out_and_the_session_continues(tmp_path: Path) -> None:
    tmp_path.joinpath("ws").mkdir()
    (tmp_path / "ws" / "long.txt").write_text("\n".join(f"line {n} {'x' * 60}" for n in range(2_000)))
    too_long = ContextOverflow("too long", max_tokens=8_000)
    model = PlaybackModel(call_reply(("read", {"path": "long.txt"})), [too_long], text_reply("ok"), text_reply("again"))
    async with temporary_kernel(tmp_path) as kernel:
        session = await kernel.session()
        assert (await Agent(session, model).complete("read it")).text == "ok"
        await session.suspend()
        session = await kernel.session(session.id)
        assert (await Agent(session, model).complete("and now?")).text == "again"
        await session.suspend()
    sizes = [sum(len(str(message)) for message in request.messages) for request in model.requests]
    assert sizes[1] > 100_000 and sizes[2] < 20_000 and sizes[3] < 20_000
    assert "left out to free up your context" in str(model.requests[2].messages)


async def test_a_message_that_was_too_long_is_not_resent_in_full_with_later_messages() -> None:
    model = PlaybackModel([ContextOverflow("too long")], [ContextOverflow("too long")], text_reply("Hello."))
    agent = Agent(RecordingSession(), model)
    assert (await agent.complete(LONG * 20)).status == "failed"
    assert (await agent.complete("hello?")).text == "Hello."
    assert len(str(model.requests[-1].messages)) < 10_000


@pytest.mark.parametrize("compaction", ["outline", "summary"])
async def test_a_request_refused_for_length_is_compacted_in_both_compaction_modes(compaction: Any) -> None:
    calls = [call_reply(("echo", {"text": LONG})) for _ in range(4)]
    more = [text_reply("They counted foxes.")] if compaction == "summary" else []
    model = PlaybackModel(*calls, [ContextOverflow("too long")], *more, text_reply("ok"))
    agent = Agent(RecordingSession(), model, budget=Budget(compaction=compaction))
    assert (await agent.complete("go")).text == "ok"


async def test_a_refusal_of_another_kind_does_not_compact_a_conversation_that_fits() -> None:
    model = PlaybackModel(*(call_reply(("echo", {"text": LONG})) for _ in range(3)), [RequestRejected("bad schema")])
    events = [event async for event in Agent(RecordingSession(), model).run("go")]
    assert isinstance(events[-1], RunFinished) and events[-1].outcome.status == "failed"
    assert not any(isinstance(event, ConversationCompacted) for event in events)
    assert len(model.requests) == 4


@pytest.mark.parametrize("kind", ["anthropic", "openai-responses", "gemini"])
async def test_thinking_is_sent_only_to_the_model_that_made_it(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "test-key")
    monkeypatch.setenv("OPENAI_API_KEY", "test-key")
    monkeypatch.setenv("GEMINI_API_KEY", "test-key")
    thinks = ScriptedReply(ThinkingBlock("hmm", "c2VjcmV0"), ReplyCall("echo", {"n": 1}))
    async with temporary_kernel(tmp_path) as kernel, bench(kind, thinks, OK, OK, OK) as b:
        session = await kernel.session()
        models = [b.model, b.model, open_model(f"{kind}:another", base_url=b.server.base_url)]
        for model in models:
            assert (await Agent(session, model).complete("go")).ok
            await session.suspend()
            session = await kernel.session(session.id)
        await session.suspend()
        b.accepted()
    sent = ["c2Vjcm" in body or "thoughtSignature" in body for body in (json.dumps(r.body) for r in b.server.requests)]
    assert sent == [False, True, True, False]  # to itself again, also after a restart, and not to another


@pytest.mark.parametrize("kind", ["anthropic", "openai-responses"])
@pytest.mark.parametrize(
    "said",
    ["messages.1.content.0: Invalid `signature` in `thinking` block", "The encrypted content gAAA could not be verified.",
     "Expected `thinking` block, but found `text`", "bad request"],
)  # fmt: skip
async def test_thinking_blocks_that_their_own_provider_refuses_are_left_out_of_later_requests(
    kind: Kind, said: str
) -> None:
    thinks = ScriptedReply(ThinkingBlock("hmm", "c2VjcmV0"), ReplyCall("echo", {"n": 1}))
    refusal = ErrorReply(400, said, "invalid_request_error")
    async with bench(kind, thinks, refusal, ScriptedReply(ReplyCall("echo", {"n": 2})), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert ["c2Vjcm" in json.dumps(request.body) for request in b.server.requests] == [False, True, False, False]


async def test_a_reasoning_item_that_its_provider_lost_is_left_out() -> None:
    thinks = ScriptedReply(ThinkingBlock("hmm", "c2VjcmV0"), ReplyCall("echo", {"n": 1}))
    refusal = ErrorReply(404, "Item with id 'rs_68' not found. Items are not persisted when `store` is set to false.")
    async with bench("openai-responses", thinks, refusal, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert ["c2Vjcm" in json.dumps(request.body) for request in b.server.requests] == [False, True, False]


async def test_left_out_thinking_blocks_are_sent_again_if_their_removal_did_not_help() -> None:
    thinks = ScriptedReply(ThinkingBlock("hmm", "c2VjcmV0"), ReplyCall("echo", {"n": 1}))
    refusal = ErrorReply(400, "no such parameter", "invalid_request_error")
    async with bench("anthropic", thinks, refusal, refusal, OK) as b:
        agent = b.agent()
        assert (await agent.complete("go")).status == "failed"
        assert (await agent.complete("again")).ok
    assert ["c2Vjcm" in json.dumps(request.body) for request in b.server.requests] == [False, True, False, True]


@pytest.mark.parametrize(("model", "is_signed"), [("gemini-3-pro-preview", True), ("gemini-2.5-pro", False)])
async def test_calls_of_another_model_get_the_signature_that_gemini_3_requires(
    model: str, is_signed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMINI_API_KEY", "test-key")
    first = ScriptedReply(ReplyCall("echo", {"n": 1}), ReplyCall("echo", {"n": 2}))
    async with temporary_kernel(tmp_path) as kernel, bench("openai", first, OK) as one, bench("gemini", OK) as other:
        session = await kernel.session()
        assert (await Agent(session, one.model).complete("go")).ok
        await session.suspend()
        session = await kernel.session(session.id)
        opened = open_model(f"gemini:{model}", base_url=other.server.base_url)
        assert (await Agent(session, opened).complete("go on")).ok
        await session.suspend()
        other.accepted()
    parts = other.server.requests[0].body["contents"][1]["parts"]
    assert [("thoughtSignature" in part) for part in parts] == [is_signed, False]


async def test_a_provider_without_a_stated_limit_gets_shorter_and_shorter_requests() -> None:
    calls = [call_reply(("echo", {"text": f"{n} {LONG}"})) for n in range(16)]
    refused = [[ContextOverflow("too long")] for _ in range(3)]
    model = PlaybackModel(*calls, *refused, text_reply("ok"))
    assert (await Agent(RecordingSession(), model).complete("go")).text == "ok"
    sizes = [sum(len(str(message)) for message in request.messages) for request in model.requests[-4:]]
    assert all(after < before * 0.6 for before, after in pairwise(sizes))
    model = PlaybackModel(*calls, *refused, [ContextOverflow("too long")], text_reply("never"))
    assert (await Agent(RecordingSession(), model).complete("go")).status == "failed"


async def test_an_implausible_token_count_is_ignored_when_compacting() -> None:
    turns = [ScriptedReply(ReplyCall("echo", {"text": f"{n} {LONG}"}), usage=(10, 5)) for n in range(8)]
    refused = ErrorReply(400, "Your input exceeds the context window of this model.", "context_length_exceeded")
    async with bench("openai", *turns, refused, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    kept = [text for _, text in b.results(9)]
    assert 3 <= len(kept) <= 4 and all(len(text) > len(LONG) for text in kept)
