"""Fixture: the server and SDK of one provider, and the records of a run through them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest
from tests.agent.sessions import RecordingSession

from handrail.agent.agent_loop import Agent
from handrail.agent.model_protocol import Model
from handrail.agent.providers import SERVICES, open_model
from handrail.agent.reply_stream import RetryPolicy
from handrail.agent.run_budget import Budget
from handrail.agent.run_events import RunOutcome
from handrail.testing.provider_servers import (
    AnthropicServer,
    ErrorReply,
    GeminiServer,
    OpenAIServer,
    ProviderServer,
    RawReply,
    ResponsesServer,
    ScriptedReply,
)

Kind = Literal["openai", "openai-responses", "anthropic", "gemini"]
SERVERS: Mapping[Kind, type[ProviderServer]] = {
    "openai": OpenAIServer,
    "openai-responses": ResponsesServer,
    "anthropic": AnthropicServer,
    "gemini": GeminiServer,
}
each_provider = pytest.mark.parametrize("kind", SERVERS)
in_pieces = pytest.mark.parametrize("kind", ["openai", "openai-responses", "anthropic"])
"""Those whose calls come in pieces, so that a call can come in part; Gemini's are whole or not there."""


class ProviderFixture:
    """One provider's server and SDK, and what a run through them left."""

    def __init__(self, kind: Kind, server: ProviderServer, model: Model) -> None:
        self.kind = kind
        self.server = server
        self.model = model
        self.session = RecordingSession()
        self.naps: list[float] = []

    async def _sleep(self, seconds: float) -> None:
        self.naps.append(seconds)

    def agent(self, budget: Budget | None = None) -> Agent:
        return Agent(self.session, self.model, budget=budget, retry=RetryPolicy(sleep=self._sleep))

    async def run(self) -> RunOutcome:
        return await self.agent().complete("go")

    def accepted(self) -> None:
        """Every request was one that the provider takes, and every reply was played."""
        assert [request.faults for request in self.server.requests if request.faults] == []
        assert self.server.remaining_replies == 0

    def results(self, request: int) -> list[tuple[str, str]]:
        """``(call id, text)`` of the results at the end of a request."""
        body: dict[str, Any] = self.server.requests[request].body
        match self.kind:
            case "openai":
                return [(m["tool_call_id"], m["content"]) for m in body["messages"] if m["role"] == "tool"]
            case "openai-responses":
                items = [item for item in body["input"] if item.get("type") == "function_call_output"]
                return [(item["call_id"], item["output"]) for item in items]
            case "anthropic":
                blocks = [b for m in body["messages"] if m["role"] == "user" for b in m["content"]]
                return [(b["tool_use_id"], b["content"]) for b in blocks if b["type"] == "tool_result"]
            case _:
                parts = [part for content in body["contents"] for part in content["parts"]]
                given = [part["functionResponse"] for part in parts if "functionResponse" in part]
                return [
                    (one["id"], json.dumps(one["response"], separators=(",", ":"), ensure_ascii=False)) for one in given
                ]


@asynccontextmanager
async def bench(kind: Kind, *replies: ScriptedReply | ErrorReply | RawReply) -> AsyncGenerator[ProviderFixture, None]:
    async with SERVERS[kind](*replies) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SERVICES[kind][0], server.key)
            model = open_model(f"{kind}:some-model", base_url=server.base_url)
        try:
            yield ProviderFixture(kind, server, model)
        finally:
            await model.aclose()
