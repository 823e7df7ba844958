"""The loopback servers refuse what the providers refuse."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from handrail.testing.provider_request_checks import find_anthropic_faults, find_chat_completions_faults
from handrail.testing.provider_servers import (
    AnthropicServer,
    ErrorReply,
    OpenAIServer,
    ProviderServer,
    ReplyCall,
    ScriptedReply,
)

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "read", "description": "d", "parameters": {"type": "object"}},
}


TEXT: dict[str, Any] = {"type": "text", "text": "hi"}
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def openai_call(call_id: str, name: str = "read", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def openai_request(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "stream": True, "messages": [{"role": "user", "content": "go"}, *messages], **more}


def asking(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def make_tool_message(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "ok"}


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([asking(openai_call("a")), make_tool_message("a")], None),
        ([asking(openai_call("a"), openai_call("b")), make_tool_message("b"), make_tool_message("a")], None),
        ([asking(openai_call("a"))], "no response messages: a"),
        (
            [asking(openai_call("a"), openai_call("b")), make_tool_message("a"), {"role": "user", "content": "x"}],
            "before it: b",
        ),
        ([asking(openai_call("a")), make_tool_message("a"), make_tool_message("a")], "answers no open call"),
        ([make_tool_message("a")], "answers no open call"),
        (
            [asking(openai_call("a")), make_tool_message("a"), asking(openai_call("a")), make_tool_message("a")],
            "must be unique",
        ),
        ([asking(openai_call("a", "a b")), make_tool_message("a")], "does not match"),
        ([asking(openai_call("a", "")), make_tool_message("a")], "does not match"),
        ([asking(openai_call("a", "read", "{")), make_tool_message("a")], "not the JSON text of an object"),
        ([asking()], "tool_calls is empty"),
        ([{"role": "assistant", "content": ""}], "without content and tool_calls"),
        ([{"role": "assistant", "content": "hi"}], None),
        ([{"role": "robot", "content": "hi"}], "role 'robot'"),
        ([{"role": "system", "content": [TEXT, TEXT]}, {"role": "user", "content": [TEXT, IMAGE]}], None),
        ([asking(openai_call("a")), {**make_tool_message("a"), "content": [TEXT]}], None),
        ([{"role": "assistant", "content": [TEXT, {"type": "refusal", "refusal": "no"}]}], None),
        ([{"role": "system", "content": [IMAGE]}], "'image_url' in a message of role system"),
        ([asking(openai_call("a")), {**make_tool_message("a"), "content": [IMAGE]}], "of role tool"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without its text"),
        ([{"role": "user", "content": ["x"]}], "part of type None"),
        ([{"role": "user", "content": list[Any]()}], "neither text nor"),
        ([{"role": "user", "content": None}], "neither text nor"),
    ],
)
def test_the_openai_server_checks_a_history_like_the_provider(
    messages: list[dict[str, Any]], fault: str | None
) -> None:
    found = find_chat_completions_faults(openai_request(*messages))
    assert found == [] if fault is None else fault in "; ".join(found)


def test_the_openai_server_checks_the_tools_of_a_request() -> None:
    assert find_chat_completions_faults(openai_request(tools=[TOOL])) == []
    assert "twice" in find_chat_completions_faults(openai_request(tools=[TOOL, TOOL]))[0]
    strict: dict[str, Any] = {"type": "function", "function": {"name": "now", "strict": True}}
    assert find_chat_completions_faults(openai_request(tools=[TOOL, strict])) == []
    typeless: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": {}}}
    assert "not the schema" in find_chat_completions_faults(openai_request(tools=[typeless]))[0]
    leaky: dict[str, Any] = {"type": "function", "function": {**TOOL["function"], "locks": ["workspace:X"]}}
    assert "locks" in find_chat_completions_faults(openai_request(tools=[leaky]))[0]


def use(call_id: str, name: str = "read", value: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {} if value is None else value}


def result(call_id: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": "ok"}


def make_text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


ANTHROPIC_HISTORIES: list[tuple[list[list[dict[str, Any]]], str | None]] = [
    ([[use("a")], [result("a")]], None),
    ([[make_text_part("hm"), use("a"), use("b")], [result("b"), result("a"), make_text_part("and")]], None),
    ([[use("a")]], "no tool_result blocks: a"),
    ([[use("a"), use("b")], [result("a")]], "immediately after: b"),
    ([[use("a")], [make_text_part("and"), result("a")]], "must come first"),
    ([[make_text_part("hm")], [result("a")]], "unexpected tool_use_id 'a'"),
    ([[use("a")], [result("a"), result("a")]], "unexpected tool_use_id 'a'"),
    ([[use("a")], [result("a")], [use("a")], [result("a")]], "must be unique"),
    ([[use("a.b")], [result("a.b")]], "is not a call ID"),
    ([[use("a", "")], [result("a")]], "does not match"),
    ([[use("a", "read", "{}")], [result("a")]], "not an object"),
    ([[make_text_part("  ")]], "non-whitespace"),
    ([[]], "content is empty"),
]


@pytest.mark.parametrize(("contents", "fault"), ANTHROPIC_HISTORIES)
def test_the_anthropic_server_checks_a_history_like_the_provider(contents: list[Any], fault: str | None) -> None:
    roles = ["assistant", "user"] * 2
    messages = [{"role": "user", "content": "go"}]
    messages += [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    found = find_anthropic_faults({"max_tokens": 1, "messages": messages})
    assert found == [] if fault is None else fault in "; ".join(found)


def test_the_anthropic_server_requires_alternating_roles_and_an_output_limit() -> None:
    twice = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    found = "; ".join(find_anthropic_faults(twice))
    assert "must alternate" in found and "max_tokens" in found


async def post(server: ProviderServer, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
    """Send one request by hand, without an SDK."""
    port = int(server.address.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(raw)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer


async def test_a_server_rejects_a_faulty_request_and_keeps_its_reply_for_a_valid_one() -> None:
    async with OpenAIServer(ScriptedReply("hello")) as server:
        key = f"Bearer {server.key}"
        path = "/v1/chat/completions"
        status, answer = await post(server, path, openai_request(make_tool_message("a")), authorization=key)
        assert status == 400 and b"answers no open call" in answer
        assert server.remaining_replies == 1
        status, answer = await post(server, path, openai_request(), authorization=key)
        assert status == 200 and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        status, _ = await post(server, path, openai_request(), authorization=key)
        assert status == 400
    assert [bool(request.faults) for request in server.requests] == [True, False, False]


async def test_a_server_requires_its_key_and_its_path() -> None:
    async with AnthropicServer(ScriptedReply("hello")) as server:
        body = {"max_tokens": 1, "stream": True, "messages": [{"role": "user", "content": "go"}]}
        right = {"x_api_key": server.key, "anthropic_version": "2023-06-01"}
        assert (await post(server, "/v1/messages", body, x_api_key="no", anthropic_version="x"))[0] == 401
        assert (await post(server, "/v1/messages", body, x_api_key=server.key))[0] == 401
        assert (await post(server, "/v1/else", body, **right))[0] == 404
        status, answer = await post(server, "/v1/messages", body, **right)
        assert status == 200 and b"event: message_stop" in answer


async def test_a_truncated_reply_breaks_the_connection_before_the_body_ends() -> None:
    async with OpenAIServer(ScriptedReply(ReplyCall("read", {"path": "x"}, cut_after=3))) as server:
        _, answer = await post(server, "/v1/chat/completions", openai_request(), authorization=f"Bearer {server.key}")
    assert b'"arguments": "{\\""' in answer and b"[DONE]" not in answer
    assert not answer.endswith(b"0\r\n\r\n")


async def test_an_error_reply_includes_its_headers() -> None:
    async with OpenAIServer(ErrorReply(429, headers={"retry-after": "7"})) as server:
        status, answer = await post(
            server, "/v1/chat/completions", openai_request(), authorization=f"Bearer {server.key}"
        )
    assert status == 429 and b"retry-after: 7" in answer
