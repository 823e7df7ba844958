"""Reports about providers that are temporarily overloaded, in many forms."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from tests.agent.provider_bench import Kind, bench, each_provider
from tests.field.openai_chunks import chunk, streamed

from handrail.agent.providers.provider_errors import extract_html_page_text, make_reported_error, parse_retry_after_s
from handrail.testing.provider_servers import ErrorReply, RawReply, ScriptedReply, StreamError

OK = ScriptedReply("ok")
PAGE = b"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body><center><h1>502 Bad Gateway</h1></center></body></html>"


@pytest.mark.parametrize(
    "error",
    [
        {"code": 502, "message": "Provider returned error"},
        {"code": "502", "message": "Upstream error from Provider"},
        {"code": 429, "message": "Rate limited", "metadata": {"provider_name": "X", "raw": "slow down"}},
        {"code": 529, "message": "overloaded"},
        {"message": "Overloaded", "type": "overloaded_error"},
        {"message": "The engine is currently overloaded", "type": "engine_overloaded_error"},
        {"message": "Internal server error", "type": "InternalServerError", "code": 500},
        {"message": "something odd"},
        "model is overloaded, please try again",
        "upstream connect error",
    ],
    ids=str,
)
async def test_a_temporary_error_object_inside_the_stream_is_retried(error: object) -> None:
    data = json.dumps({"id": "gen-1", "error": error}).encode()
    in_choice = chunk({"content": ""}, "error", error=error if isinstance(error, dict) else {"message": error})
    whole = RawReply(data, "application/json")
    for reply in (ScriptedReply(data, ended=False), ScriptedReply(in_choice, ended=False), whole):
        async with bench("openai", reply, OK) as b:
            assert (await b.run()).text == "ok"
            b.accepted()
        assert len(b.naps) == 1


@each_provider
async def test_an_overload_error_in_the_middle_of_a_reply_is_retried(kind: Kind) -> None:
    async with bench(kind, ScriptedReply("Half a", StreamError("overloaded_error", "Overloaded")), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ({"code": 401, "message": "User not found."}, "rejected the key"),
        ({"code": 402, "message": "Insufficient credits"}, "quota is used up"),
        ({"code": 400, "message": "bad schema"}, "rejected the request (400: bad schema)"),
        ({"message": "bad schema", "type": "invalid_request_error"}, "rejected the request"),
    ],
)
async def test_a_permanent_error_inside_the_stream_is_not_retried(error: dict[str, Any], words: str) -> None:
    async with bench("openai", ScriptedReply(json.dumps({"error": error}).encode(), ended=False)) as b:
        outcome = await b.run()
    assert outcome.status == "failed" and words in outcome.detail
    assert not b.naps


@each_provider
async def test_a_retry_waits_the_five_minutes_that_the_provider_asks_for(kind: Kind) -> None:
    busy = ErrorReply(429, "slow down", "rate_limit_error", {"retry-after": "300"})
    async with bench(kind, busy, OK) as b:
        assert (await b.run()).ok
    assert b.naps == [300]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("value", ["1" * 200_000 + "x", "; r=0" * 50_000, "1m" * 100_000 + "?"])
def test_a_hostile_header_about_a_wait_is_read_within_bounds(value: str) -> None:
    names = ("Retry-After", "RateLimit", "x-ratelimit-reset-requests")
    assert parse_retry_after_s({**dict.fromkeys(names, value), "x-ratelimit-remaining-requests": "0"}) in (
        None,
        30000.0,
    )


@each_provider
@pytest.mark.parametrize("status", [500, 502, 503, 504, 520, 522, 524, 529, 408, 409, 425, 429])
async def test_an_html_error_page_of_a_proxy_appears_as_text_in_the_retry_reason(kind: Kind, status: int) -> None:
    async with bench(kind, RawReply(PAGE, "text/html", status), OK) as b:
        agent = b.agent()
        told = [str(getattr(event, "reason", "")) async for event in agent.run("go")]
        b.accepted()
    assert len(b.naps) == 1
    assert any("502 Bad Gateway" in reason for reason in told) and "<h" not in "".join(told)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": {"code": "1302", "message": "rate limit reached"}, "retry_after": 42}),
        (400, {"error": {"code": "Throttling", "message": "slow down"}, "retry_after_ms": 42_000}),
        (403, {"error": {"message": "Rate limit exceeded"}, "retry_after": 42}),
        (498, {"error": {"message": "flex capacity exceeded"}, "estimated_time": 42}),
        (503, {"error": "Model x is currently loading", "estimated_time": 42.0}),
    ],
)
async def test_a_busy_server_with_an_unusual_status_ends_the_run(status: int, body: dict[str, Any]) -> None:
    async with bench("openai", RawReply(json.dumps(body).encode(), "application/json", status), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert b.naps == [42]


PERMANENT: dict[str, tuple[int, object, str]] = {
    "Ollama without tools": (400, {"message": "registry.ollama.ai/library/gemma:2b does not support tools", "type": "api_error"}, "--text-tool-calls"),
    "llama.cpp without tools": (500, {"code": 500, "message": "tools param requires --jinja flag", "type": "server_error"}, "--text-tool-calls"),
    "vLLM without tools": (400, {"message": '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'}, "--text-tool-calls"),
    "not implemented": (501, {"message": "This server does not support chat completions.", "type": "not_supported_error"}, "rejected the request"),
    "xAI credits": (403, {"code": "x", "error": "Your team has either used all available credits or reached its monthly spending limit."}, "quota is used up"),
    "SiliconFlow balance": (403, {"code": 30001, "message": "Sorry, your account balance is insufficient"}, "quota is used up"),
    "GLM balance": (429, {"code": "1113", "message": "余额不足或无可用资源包,请充值。"}, "quota is used up"),
    "DashScope arrears": (400, {"code": "Arrearage", "message": "Access denied, please make sure your account is in good standing."}, "quota is used up"),
    "DashScope free tier": (403, {"code": "AllocationQuota.FreeTierOnly", "message": "The free tier of the model has been exhausted."}, "quota is used up"),
    "OpenAI inactive": (429, {"code": "billing_not_active", "message": "Your account is not active, please check your billing details."}, "quota is used up"),
    "Anthropic limit": (400, {"message": "You have reached your specified API usage limits. You will regain access on 2026-12-01."}, "quota is used up"),
    "Groq limit": (400, {"code": "blocked_api_access", "message": "Your organization has reached its spend limit"}, "quota is used up"),
    "an OpenRouter key": (403, {"error": {"message": "Key limit exceeded (total limit).", "code": 403}}, "quota is used up"),
    "a LiteLLM budget": (400, {"error": {"message": "Budget has been exceeded! Current cost: 1.0", "type": "budget_exceeded", "code": "400"}}, "quota is used up"),
    "a region": (403, {"code": "unsupported_country_region_territory", "message": "Country, region, or territory not supported"}, "region, or territory"),
    "a moderation": (403, {"code": 403, "message": "Your input was flagged for violence."}, "flagged for violence"),
    "a page": (403, "<!DOCTYPE html><html><head><title>Just a moment...</title></head></html>", "Just a moment..."),
    "a key": (403, {"message": "The key sk-1234567890 has no access"}, "rejected the key (403)."),
    "a MiniMax key": (200, {"base_resp": {"status_code": 1004, "status_msg": "login fail: Please carry the API secret key"}}, "rejected the key"),
    "a DashScope key": (200, {"code": "InvalidApiKey", "message": "Invalid API-key provided."}, "rejected the key"),
    "a status in the error": (200, {"error": {"message": "bad schema", "status_code": 400}}, "rejected the request (400: bad schema)"),
    "an unsupported picture": (200, {"error": "Model does not support images. Please use a model that does."}, "rejected the request"),
}  # fmt: skip


@pytest.mark.parametrize("who", PERMANENT)
async def test_a_permanent_refusal_ends_the_run_with_its_reason_and_without_a_retry(who: str) -> None:
    status, body, words = PERMANENT[who]
    sent = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    async with bench(
        "openai", RawReply(sent, "text/html" if isinstance(body, str) else "application/json", status)
    ) as b:
        outcome = await b.run()
    assert outcome.status == "failed" and words in outcome.detail and not b.naps
    assert "sk-1234567890" not in outcome.detail


TEMPORARY: dict[str, tuple[int, object]] = {
    "a failed call of Groq": (400, {"error": {"code": "tool_use_failed", "type": "invalid_request_error", "message": "Failed to call a function.", "failed_generation": "<function=echo>"}}),
    "a failed reply of Groq": (400, {"error": {"code": "output_parse_failed", "message": "Parsing failed. See 'failed_generation' for more details."}}),
    "a failed dependency": (424, {"message": "The model returned the following errors: try it later"}),
    "a closed request": (499, {"error": {"code": 499, "message": "The operation was cancelled.", "status": "CANCELLED"}}),
    "a limit of MiniMax": (200, {"id": "x", "choices": None, "base_resp": {"status_code": 1002, "status_msg": "rate limit"}}),
    "a limit of DashScope": (200, {"code": "Throttling.RateQuota", "message": "Requests rate limit exceeded, please try again later."}),
    "an overload as a bad request": (400, {"error": {"message": "The server is overloaded, please try again later", "type": "invalid_request_error"}}),
    "an overload in Chinese": (400, {"error": {"code": "1305", "message": "该模型当前访问量过大,请您稍后再试"}}),
    "a limit of Bedrock": (400, {"detail": "An error occurred (ThrottlingException): Too many tokens, please wait before trying again."}),
    "a problem": (503, {"type": "about:blank", "title": "Service Unavailable", "status": 503}),
    "an error of Cloudflare": (429, {"errors": [{"code": 3040, "message": "Capacity temporarily exceeded, please try again."}]}),
}  # fmt: skip


@pytest.mark.parametrize("who", TEMPORARY)
async def test_a_temporary_refusal_of_any_form_is_retried(who: str) -> None:
    status, body = TEMPORARY[who]
    async with bench("openai", RawReply(json.dumps(body).encode(), "application/json", status), OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert len(b.naps) == 1


async def test_a_retry_time_of_zero_seconds_still_waits() -> None:
    busy = ErrorReply(429, "slow down", "rate_limit_error", {"retry-after": "0"})
    async with bench("openai", busy, busy, OK) as b:
        assert (await b.run()).text == "ok"
    assert len(b.naps) == 2 and 0 < b.naps[0] < b.naps[1]


@pytest.mark.parametrize("named", [b"event: error\n", b""])
async def test_an_error_event_without_an_error_member_is_understood(named: bytes) -> None:
    busy = named + b'data: {"message":"Please try again in 42s","code":429}\n\n'
    async with bench("openai", RawReply(busy), OK) as b:
        assert (await b.run()).text == "ok"
    assert b.naps == [42]
    denied = named + b'data: {"message":"bad schema","type":"invalid_request_error"}\n\n'
    async with bench("openai", RawReply(denied)) as b:
        assert "bad schema" in (await b.run()).detail
    assert not b.naps


@pytest.mark.parametrize("status", [400, 429])
async def test_an_account_without_credit_is_asked_again(status: int) -> None:
    async with bench("openai", ErrorReply(status, "Your credit balance is too low", "invalid_request_error")) as b:
        outcome = await b.run()
    assert outcome.status == "failed" and "quota is used up" in outcome.detail and not b.naps


async def test_a_retry_delay_of_one_day_fails_the_run_and_the_error_names_it() -> None:
    busy = ErrorReply(429, "daily limit", "rate_limit_exceeded", {"retry-after": "86400"})
    async with bench("openai", busy) as b:
        outcome = await b.run()
    assert outcome.status == "failed" and "86,400 seconds" in outcome.detail and not b.naps


def test_the_retry_time_is_read_from_many_forms() -> None:
    soon = datetime.now(UTC) + timedelta(seconds=90)
    epoch_ms = str(int(soon.timestamp() * 1000))
    exact: list[tuple[dict[str, str], str, float]] = [
        ({"retry-after": "7"}, "", 7),
        ({"Retry-After": " 1.5 "}, "", 1.5),
        ({"retry-after-ms": "250", "retry-after": "1"}, "", 0.25),
        ({"retry-after": "20s"}, "", 20),
        ({"retry-after": "20, 20"}, "", 20),
        ({"x-retry-after": "20"}, "", 20),
        ({"ratelimit": '"default";r=0;t=20'}, "", 20),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1m30s"}, "", 90),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "60ms"}, "", 0.06),
        ({"x-ratelimit-remaining-requests": "9", "x-ratelimit-reset-requests": "6m0s",
          "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "2s"}, "", 2),
        ({"ratelimit-remaining": "0", "ratelimit-reset": "12"}, "", 12),
        ({"x-ratelimit-remaining-requests-day": "0", "x-ratelimit-reset-requests-day": "33011.38"}, "", 33011.38),
        ({}, "Rate limit of 50 per 86400s exceeded. Please wait 41234 seconds before retrying.", 41234),
        ({}, "Rate limit reached for gpt-4o. Please try again in 1.242s.", 1.242),
        ({}, "Limit 100000. Please try again in 7m12.5s. Visit …", 432.5),
        ({}, "Please retry in 547ms", 0.547),
        ({}, "Try again after 2 minutes", 120),
        ({}, "please wait 30 seconds", 30),
    ]  # fmt: skip
    for headers, said, seconds in exact:
        assert parse_retry_after_s(headers, said) == pytest.approx(seconds), (headers, said)
    for headers in (
        {"retry-after": format_datetime(soon, usegmt=True)},
        {"x-ratelimit-remaining": "0", "x-ratelimit-reset": epoch_ms},
        {"anthropic-ratelimit-tokens-remaining": "0", "anthropic-ratelimit-tokens-reset": soon.isoformat()},
    ):
        found = parse_retry_after_s(headers)
        assert found is not None and 30 < found <= 90, headers
    assert parse_retry_after_s({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}) in (None, 0)
    large = [f"Mon, 01 Jan 2020 {'9' * 30}:00:00 GMT", f"Mon, 01 Jan {'9' * 30} 00:00:00 GMT"]
    for odd in ("", "soon", "-5", "nan", "inf", "1e400", "Wed, 99 Foo 2015", *large):
        assert parse_retry_after_s({"retry-after": odd}) is None, odd
    assert parse_retry_after_s({}, "Nothing about times; 30 seconds of video") is None


async def test_a_retry_time_inside_the_stream_is_honoured() -> None:
    for error in (
        {"code": 429, "message": "x", "metadata": {"headers": {"Retry-After": "42"}}},
        {"code": 429, "message": "Please try again in 42s"},
        {"code": 503, "message": "x", "retry_after": 42},
        {"code": 503, "message": "x", "retryAfter": "42"},
        {"code": 429, "message": "x", "details": [{"@type": "google.rpc.RetryInfo", "retryDelay": "42s"}]},
        {"code": 503, "message": "Model x is currently loading", "estimated_time": 42.0},
        {"code": "rate_limit", "message": "x", "retry_after_ms": 42_000},
    ):
        async with bench("openai", ScriptedReply(json.dumps({"error": error}).encode(), ended=False), OK) as b:
            assert (await b.run()).ok
        assert b.naps == [42]


@pytest.mark.parametrize(
    "body",
    [{"detail": "Model is loading"}, {"message": "busy", "code": "x"}, [{"error": {"code": 503, "message": "busy"}}], "busy",
     {"error": "busy"}, {"error": {"error": {"message": "busy"}}}, {"object": "error", "message": "busy"}, None, 3, []],
)  # fmt: skip
def test_an_error_of_any_form_contains_the_message_of_the_server(body: object) -> None:
    said = str(make_reported_error("openai:x", "KEY", body, 503))
    assert "busy" in said or "loading" in said


async def test_a_reply_that_has_only_keep_alive_comments_is_retried() -> None:
    async with bench(
        "openai", RawReply(b": PROCESSING\n\n" * 50), streamed(chunk({"content": "ok"}), finish="stop")
    ) as b:
        assert (await b.run()).text == "ok"
    assert len(b.naps) == 1


async def test_an_overload_in_the_middle_of_a_reply_is_retried_after_the_given_time() -> None:
    error = {"code": 429, "message": "Please try again in 42s"}
    cut = ScriptedReply("Half a", json.dumps({"error": error}).encode(), ended=False)
    async with bench("openai", cut, OK) as b:
        assert (await b.run()).text == "ok"
        b.accepted()
    assert b.naps == [42]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", [" " * 100_000 + "x", " \ufeff" + " " * 100_000, "<!--" * 20_000, "1" * 100_000])
def test_a_page_in_the_place_of_an_error_is_read_in_one_pass(text: str) -> None:
    assert extract_html_page_text(text) == text
