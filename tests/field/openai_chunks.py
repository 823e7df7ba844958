"""Chunks of chat completions, as servers send them."""

from __future__ import annotations

import json
from typing import Any

from handrail.testing.provider_servers import RawReply, ScriptedReply


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **choice: Any) -> bytes:
    """Return the data of one chunk."""
    told: dict[str, Any] = {"index": 0, "finish_reason": finish, **choice}
    if delta is not None:
        told["delta"] = delta
    return json.dumps(
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [told]}
    ).encode()


def calls(*fragments: dict[str, Any]) -> bytes:
    """Return a chunk with fragments of calls."""
    return chunk({"tool_calls": list(fragments)})


def streamed(*chunks: bytes, finish: str | None = "tool_calls") -> ScriptedReply:
    """Return a reply of these chunks."""
    return ScriptedReply(*chunks, *([chunk({}, finish)] if finish else []), ended=False)


def whole(message: dict[str, Any], finish: str = "stop", **more: Any) -> RawReply:
    """Return an answer of a server that does not stream."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **more}
    return RawReply(json.dumps(body).encode(), "application/json")


ECHO: dict[str, Any] = {"index": 0, "id": "a", "type": "function", "function": {"name": "echo", "arguments": '{"n":1}'}}
"""A whole call in one fragment."""
