"""The models of sub-agents: by default at the provider of their parent's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kernel.test_sub_agents import kernel_of, task

from handrail.agent.agent_loop import Agent
from handrail.agent.providers import open_model, open_subagent_model
from handrail.agent.run_events import CallAnswered
from handrail.contract.agent_manifest import parse_agent_manifest
from handrail.contract.errors import StartError
from handrail.testing.provider_servers import OpenAIServer, ReplyCall, ScriptedReply

SUB = 'role = "all"\ntools = ["task"]\n'


def list_requested_models(server: OpenAIServer) -> list[Any]:
    assert [request.faults for request in server.requests if request.faults] == []
    return [request.body["model"] for request in server.requests]


@pytest.mark.proves("A-03")
async def test_a_sub_agents_model_of_the_same_provider_uses_its_parents_base_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "test-key")
    async with OpenAIServer(ScriptedReply("From elsewhere.")) as elsewhere:
        script = tmp_path / "between.toml"
        script.write_text(
            'version = 1\n[[turns]]\n[[turns.calls]]\nname = "task"\n'
            'arguments = { subagent_type = "small", prompt = "Go." }\n[[turns]]\ntext = "${0.data.text}"\n'
        )
        agents = {
            "small": f'{SUB}model = "openai:small"',
            "other": f'{SUB}model = "openai:other"\nbase_url = "{elsewhere.base_url}"',
            "between": f'{SUB}model = "script:{script}"',
        }
        handed = [ReplyCall(*task(agent)) for agent in ("small", "other", "between")]
        replies = [ScriptedReply(call) for call in handed]
        async with (
            OpenAIServer(
                replies[0],
                ScriptedReply("Small."),
                *replies[1:],
                ScriptedReply("Below a script."),
                ScriptedReply("Done."),
            ) as here,
            kernel_of(tmp_path, agents) as kernel,
        ):
            model = open_model("openai:top", base_url=here.base_url)
            try:
                agent = Agent(await kernel.session(), model)
                answers = [event.answer.result async for event in agent.run("Go.") if isinstance(event, CallAnswered)]
            finally:
                await model.aclose()
            texts = [answer.ok and answer.data["text"] for answer in answers]
            assert texts == ["Small.", "From elsewhere.", "Below a script."]
            assert list_requested_models(here) == ["top", "small", "top", "top", "small", "top"]
        assert list_requested_models(elsewhere) == ["other"]


async def test_a_sub_agent_model_inherits_the_parents_server_unless_its_manifest_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    model = open_model("openai:top", base_url="http://127.0.0.1:1/v1", text_calls="xml")
    beside = open_subagent_model(model, "openai-responses:small")
    below = open_subagent_model(beside, "openai:smaller")
    assert beside.dialect is below.dialect is model.dialect
    with pytest.raises(StartError, match="needs a key"):
        open_subagent_model(below, "openai:theirs", "")
    for one in (model, beside, below):
        await one.aclose()


@pytest.mark.parametrize("url", ["ftp://x", "localhost:8000", "https://a b", "https://x\\n"])
def test_an_invalid_base_url_is_a_fault_of_the_manifest(url: str) -> None:
    checked = parse_agent_manifest(f'id = "a"\nbase_url = "{url}"'.encode(), "agent.toml", "a")
    assert [fault.location for fault in checked.faults] == ["base_url"]
