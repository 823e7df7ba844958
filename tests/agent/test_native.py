"""Tools that the provider runs: offered in its form, never run here, and stored unchanged."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.agent.sessions import RecordingSession
from tests.kernel.guests import joined_kernel

from handrail import tool
from handrail.agent.agent_loop import Agent
from handrail.agent.providers.anthropic import AnthropicModel
from handrail.agent.providers.openai import OpenAIModel
from handrail.agent.run_events import AgentEvent, CallAnswered, ProviderToolUnavailable, ProviderToolUsed, RunFinished
from handrail.catalog.provider_dialects import DIALECTS, format_provider_tool
from handrail.contract.agent_manifest import parse_agent_manifest
from handrail.contract.errors import LoadError
from handrail.contract.tool.provider_tools import PROVIDER_TOOLS, ProviderToolOffer, make_provider_tool_spec
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.kernel.kernel_interface import Kernel
from handrail.kernel.local_kernel import LocalKernel
from handrail.record.artifacts import ArtifactStore
from handrail.testing.provider_request_checks import ScriptedSearchCitations, ServerToolUse
from handrail.testing.provider_servers import (
    AnthropicServer,
    ConnectionCut,
    OpenAIServer,
    ProviderServer,
    ReplyCall,
    ScriptedReply,
)
from handrail.testing.scripted_kernel import temporary_kernel

SEARCH = """
[native.web_search.anthropic]
max_uses = 3
user_location = {city = "Graz"}
"""
FOUND = [
    {
        "type": "web_search_result",
        "url": "https://example.org/",
        "title": "An example",
        "encrypted_content": "Ab==",
        "page_age": None,
    }
]
PIXEL = b"\x89PNG\r\n\x1a\n a pixel"


def appoint(folder: Path, native: str) -> Path:
    manifest = folder / "config" / "agents" / "default" / "agent.toml"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(f'id = "default"\n{native}', encoding="utf-8")
    for place in (folder / "config", folder / "config" / "agents", manifest.parent):
        place.chmod(0o700)
    return folder


@asynccontextmanager
async def kernel_with(folder: Path, native: str, **options: Any) -> AsyncGenerator[LocalKernel]:
    async with temporary_kernel(appoint(folder, native), **options) as kernel:
        yield kernel


async def run(agent: Agent, task: str | None = "go") -> list[AgentEvent]:
    async with aclosing(agent.run(task)) as events:
        return [event async for event in events]


def of_anthropic(server: ProviderServer) -> AnthropicModel:
    return AnthropicModel("some-model", api_key=server.key, base_url=server.base_url)


def accepted(server: ProviderServer) -> None:
    assert [request.faults for request in server.requests if request.faults] == []
    assert server.remaining_replies == 0


def read_stored_artifacts(kernel: Kernel, event: ProviderToolUsed) -> list[tuple[str, bytes]]:
    artifacts = ArtifactStore(Path(kernel.state_folder) / "artifacts")
    return [(found.media_type, found.data) for found in map(artifacts.get, event.artifacts)]


def used(events: list[AgentEvent]) -> list[ProviderToolUsed]:
    return [event for event in events if isinstance(event, ProviderToolUsed)]


def ended_with_success(events: list[AgentEvent]) -> bool:
    return isinstance(last := events[-1], RunFinished) and last.outcome.ok


@pytest.mark.proves("R-10")
async def test_a_provider_search_is_offered_in_its_own_form_recorded_and_sent_back(
    tmp_path: Path,
) -> None:
    replies = (
        ScriptedReply("Let me look. ", ServerToolUse("web_search", {"query": "handrails"}, FOUND), "Found."),
        ScriptedReply("Still so."),
    )
    async with kernel_with(tmp_path, SEARCH) as kernel, AnthropicServer(*replies) as server:
        entry = kernel.generation.entries["native.web_search"]
        assert entry.source == "native" and set(entry.spec.provider_support) == {"anthropic"}
        assert entry.status == "connected" and entry.sandbox == "the model's provider"
        model = of_anthropic(server)
        session = await kernel.session()
        agent = Agent(session, model)
        events = await run(agent)
        assert ended_with_success(events) and not [event for event in events if isinstance(event, CallAnswered)]
        (event,) = used(events)
        assert (event.name, event.tool_id, event.arguments) == (
            "web_search",
            "native.web_search",
            {"query": "handrails"},
        )
        ((media_type, whole),) = read_stored_artifacts(kernel, event)
        assert media_type == "application/json" and json.loads(whole) == FOUND
        await kernel.log.flush()
        (record,) = kernel.log.reader.records(kind="provider-tool-used")
        assert record.session_id == session.id and record.body is not None
        assert record.body["artifacts"] == list(event.artifacts) and record.body["tool"] == "native.web_search"
        assert ended_with_success(await run(agent, "and now?"))
        accepted(server)
        await model.aclose()
    first, second = (request.body for request in server.requests)
    (form,) = [offer for offer in first["tools"] if "type" in offer]
    assert form == {
        "type": "web_search_20250305",
        "name": "web_search",
        "max_uses": 3,
        "user_location": {"type": "approximate", "city": "Graz"},
    }
    assert {"read", "bash"} <= {offer["name"] for offer in first["tools"]}
    assert not any(offer["name"].startswith("native") for offer in first["tools"])
    assert "# Tools of your provider" in first["system"][0]["text"] and "- web_search: " in first["system"][0]["text"]
    said = [block for block in second["messages"][1]["content"] if block["type"] != "text"]
    assert [block["type"] for block in said] == ["server_tool_use", "web_search_tool_result"]
    assert said[0]["input"] == {"query": "handrails"} and said[1]["content"] == FOUND


@pytest.mark.proves("R-10")
async def test_a_provider_tool_is_never_run_by_the_kernel(tmp_path: Path) -> None:
    replies = (
        ScriptedReply(ReplyCall("native__web_search", {"query": "x"}), ReplyCall("native.web_search")),
        ScriptedReply("I see."),
    )
    async with kernel_with(tmp_path, SEARCH, rules=["allow *"]) as kernel, AnthropicServer(*replies) as server:
        model = of_anthropic(server)
        session = await kernel.session()
        events = await run(Agent(session, model))
        results = [event.answer.result for event in events if isinstance(event, CallAnswered)]
        assert [result.error_kind for result in results] == ["unavailable"] * 2
        assert all("The provider of the model runs this tool" in str(result.error_text) for result in results)
        assert "native.web_search" not in {spec.id for spec in session.active_tools}
        accepted(server)
        await model.aclose()
        found = await kernel.find_tools("search the web and give what was found")
        assert "native.web_search" not in {hit.tool_id for hit in found.matches}


@pytest.mark.proves("R-10")
async def test_a_paused_reply_is_continued_and_becomes_one_message(tmp_path: Path) -> None:
    replies = (
        ScriptedReply("One moment. ", ServerToolUse("web_search", {"query": "x"}), finish="pause_turn"),
        ScriptedReply(ServerToolUse("web_search", content=FOUND, is_used=False), "Here it is."),
        ScriptedReply("Yes."),
    )
    async with kernel_with(tmp_path, SEARCH) as kernel, AnthropicServer(*replies) as server:
        model = of_anthropic(server)
        agent = Agent(await kernel.session(), model)
        events = await run(agent)
        assert ended_with_success(events) and [event.name for event in used(events)] == ["web_search"]
        assert server.requests[1].body["messages"][-1]["role"] == "assistant"
        assert ended_with_success(await run(agent, "sure?"))
        accepted(server)
        await model.aclose()


@pytest.mark.proves("R-10")
async def test_a_reply_with_only_a_provider_tool_use_survives_into_a_new_kernel(
    tmp_path: Path,
) -> None:
    replies = ScriptedReply(ServerToolUse("web_search", {"query": "x"}, FOUND)), ScriptedReply("Yes.")
    async with AnthropicServer(*replies) as server:
        model = of_anthropic(server)
        async with kernel_with(tmp_path, SEARCH) as kernel:
            session = await kernel.session()
            (event,) = used(await run(Agent(session, model)))
            session_id = session.id
            await session.suspend()
        async with temporary_kernel(tmp_path) as kernel:
            agent = Agent(await kernel.session(session_id), model)
            assert ended_with_success(await run(agent, "sure?"))
            assert read_stored_artifacts(kernel, event)
            row = next(data for _, data in await kernel_rows(kernel, session_id) if data["role"] == "assistant")
            assert [part.get("artifacts") for part in row["parts"]] == [[], list(event.artifacts)]
        accepted(server)
        await model.aclose()
    said = server.requests[1].body["messages"][1]["content"]
    assert [block["type"] for block in said] == ["server_tool_use", "web_search_tool_result"]


async def kernel_rows(kernel: LocalKernel, session_id: str) -> list[tuple[int, Mapping[str, Any]]]:
    return list(await kernel.sessions.session_store.open_history(session_id).read_stored_messages())


@pytest.mark.proves("R-10")
async def test_a_provider_tool_use_without_a_result_leaves_a_history_that_the_provider_accepts() -> None:
    """A reply that breaks off in the middle of a use, with a call that was whole before."""
    session = RecordingSession()
    replies = (
        ScriptedReply(ReplyCall("echo", {"n": 1}), ServerToolUse("web_search", {"query": "x"}), ConnectionCut()),
        ScriptedReply(ServerToolUse("web_search", content=FOUND, is_used=False), "ok"),
        ScriptedReply("done"),
    )
    async with AnthropicServer(*replies) as server:
        model = of_anthropic(server)
        agent = Agent(session, model)
        await run(agent)
        assert ended_with_success(await run(agent, "again"))
        accepted(server)
        await model.aclose()


@pytest.mark.proves("R-10")
async def test_images_of_a_provider_tool_are_stored_separately_and_secrets_are_redacted(tmp_path: Path) -> None:
    code = {
        "type": "code_execution_result",
        "stdout": "the word is hunter2hunter2",
        "stderr": "",
        "return_code": 0,
        "content": [
            {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PIXEL).decode()},
            f"data:image/gif;base64,{base64.b64encode(b'GIF89a').decode()}",
        ],
    }
    error = {"type": "code_execution_tool_result_error", "error_code": "unavailable"}
    replies = ScriptedReply(
        ServerToolUse("code_execution", {"code": "print()"}, code),
        ServerToolUse("code_execution", {"code": "x"}, error, id="srvtoolu_2"),
        "Done.",
    )
    async with (
        kernel_with(tmp_path, "[native.code_execution]\n", secrets={"WORD": "hunter2hunter2"}) as kernel,
        AnthropicServer(replies) as server,
    ):
        model = of_anthropic(server)
        events = await run(Agent(await kernel.session(), model))
        first, second = used(events)
        (json_type, whole), image, other = read_stored_artifacts(kernel, first)
        assert json_type == "application/json" and b"hunter2" not in whole and b"WORD" in whole
        assert image == ("image/png", PIXEL) and other == ("image/gif", b"GIF89a")
        assert json.loads(whole)["content"][0] == {"file": 1, "media_type": "image/png", "bytes": len(PIXEL)}
        assert not first.failed and second.failed
        await model.aclose()


@pytest.mark.proves("R-10")
async def test_chat_completions_offer_search_only_to_search_models_and_report_unavailable_provider_tools(
    tmp_path: Path,
) -> None:
    native = '[native.web_search.openai-chat]\nsearch_context_size = "low"\n[native.image_generation]\n'
    replies = [
        ScriptedReply(
            "It is so",
            ScriptedSearchCitations(["https://example.org/a"]),
            ScriptedSearchCitations(["https://example.org/b"]),
            ".",
        )
    ]
    async with kernel_with(tmp_path, native) as kernel, OpenAIServer(*replies, ScriptedReply("hm")) as server:
        searching = OpenAIModel("some-search-model", api_key=server.key, base_url=server.base_url)
        plain = OpenAIModel("some-model", api_key=server.key, base_url=server.base_url)
        events = await run(Agent(await kernel.session(), searching))
        (event,) = used(events)
        assert event.tool_id == "native.web_search"
        ((_, whole),) = read_stored_artifacts(kernel, event)
        assert [source["url"] for source in json.loads(whole)] == ["https://example.org/a", "https://example.org/b"]
        reasons = {one.tool_id: one.reason for one in events if isinstance(one, ProviderToolUnavailable)}
        assert reasons == {
            "native.image_generation": "The tool image_generation is not available in the chat completions API, only in the responses API."
        }
        others = {
            one.tool_id: one.reason
            for one in await run(Agent(await kernel.session(), plain))
            if isinstance(one, ProviderToolUnavailable)
        }
        assert "only models with 'search' in their name have it" in others["native.web_search"]
        accepted(server)
        await searching.aclose()
        await plain.aclose()
    first, second = (request.body for request in server.requests)
    assert first["web_search_options"] == {"search_context_size": "low"} and "web_search_options" not in second
    assert "image_generation" not in first["messages"][0]["content"]
    assert "provider" not in second["messages"][0]["content"]


@pytest.mark.proves("R-10")
async def test_a_deny_rule_plan_mode_or_a_disabled_setting_makes_a_provider_tool_unavailable(
    tmp_path: Path,
) -> None:
    async with kernel_with(
        tmp_path, SEARCH + "[native.code_execution]\n", settings='[tools."native.code_execution"]\nenabled = false\n'
    ) as kernel:
        free = await kernel.session()
        assert [(offer.spec.id, offer.unavailable_reason) for offer in free.start_turn().provider_tools] == [
            ("native.web_search", None)
        ]
        for rules in (["deny native.web_search"], ["deny net.fetch"], ["deny *"]):
            (offer,) = (await kernel.session(rules=rules)).start_turn().provider_tools
            assert offer.unavailable_reason is not None and "den" in offer.unavailable_reason
        (offer,) = (await kernel.session(mode="plan")).start_turn().provider_tools
        assert offer.unavailable_reason is not None


@pytest.mark.proves("R-10")
async def test_a_connected_process_offers_a_provider_tool_as_the_lease_holder_decides(tmp_path: Path) -> None:
    async with kernel_with(tmp_path, SEARCH), joined_kernel(tmp_path) as other:
        denied = await other.session(rules=["deny net.fetch"])
        assert "denies tools that reach the network" in (denied.start_turn().provider_tools[0].unavailable_reason or "")
        session = await other.session()
        assert [(offer.spec.id, offer.unavailable_reason) for offer in session.start_turn().provider_tools] == [
            ("native.web_search", None)
        ]
        session.add_rules("deny native.web_search")
        assert "again at the start of the next one" in (
            session.start_turn().provider_tools[0].unavailable_reason or ""
        ), "not judged by these yet"
        await session.start_interaction()
        assert "deny native.web_search" in (session.start_turn().provider_tools[0].unavailable_reason or "")


@pytest.mark.proves("R-10")
async def test_a_denied_provider_tool_is_reported_once_with_its_reason_and_not_offered() -> None:
    session = RecordingSession()
    spec = make_provider_tool_spec("web_search", {})
    session.native = [ProviderToolOffer(spec, "a rule denies it")]
    async with AnthropicServer(ScriptedReply(ReplyCall("echo", {"n": 1})), ScriptedReply("ok")) as server:
        model = of_anthropic(server)
        events = await run(Agent(session, model))
        assert [event for event in events if isinstance(event, ProviderToolUnavailable)] == [
            ProviderToolUnavailable("native.web_search", "a rule denies it")
        ]
        accepted(server)
        await model.aclose()
    assert all("type" not in offer for request in server.requests for offer in request.body["tools"])


@pytest.mark.proves("R-10")
async def test_a_provider_tool_is_withheld_when_a_loaded_tool_has_its_name() -> None:
    session = RecordingSession()
    session.specs = [*session.specs, ToolSpec(id="web_search", description="Ours.", side_effect="read", locks=())]
    session.native = [ProviderToolOffer(make_provider_tool_spec("web_search", {}))]
    async with AnthropicServer(ScriptedReply("ok")) as server:
        model = of_anthropic(server)
        (withheld,) = [e for e in await run(Agent(session, model)) if isinstance(e, ProviderToolUnavailable)]
        assert "another loaded tool" in withheld.reason
        accepted(server)
        await model.aclose()


@pytest.mark.proves("R-10")
async def test_a_connected_process_stores_provider_tool_results_with_the_lease_holder(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path) as kernel, joined_kernel(tmp_path) as other:
        session = await other.session()
        assert session.history is not None
        (reference,) = await session.history.record_provider_tool_use({"name": "web_search"}, {"text": "found"})
        await kernel.log.flush()
        (record,) = kernel.log.reader.records(kind="provider-tool-used")
        assert record.body is not None and record.body["artifacts"] == [reference]


@pytest.mark.proves("R-10")
@pytest.mark.parametrize(
    ("native", "said"),
    [
        ("[native.wbe_search]", "did you mean 'web_search'?"),
        (
            "[native.web_search.nobody]",
            "web_search is not available from 'nobody'; the providers with it are anthropic",
        ),
        ("[native.web_search.anthropic]\nmax_use = 1", "unknown argument `max_use` (did you mean"),
        ("[native.web_search.anthropic]\nmax_uses = 0", "`max_uses`: expected at least 1, got integer"),
        ('[native.web_fetch.anthropic]\nallowed_domains = ["a.b"]\nblocked_domains = ["c.d"]', "exclude each other"),
        ("[native.code_execution.anthropic]\ntimeout = 1", "unknown argument `timeout`"),
    ],
)
def test_unknown_provider_tools_and_options_are_faults_of_the_manifest(native: str, said: str) -> None:
    checked = parse_agent_manifest(f'id = "a"\n{native}\n'.encode(), "agent.toml", "a")
    (fault,) = checked.faults
    assert fault.location.startswith("native.") and said in fault.problem, fault


@pytest.mark.proves("R-10")
def test_each_provider_tool_is_formatted_for_each_supported_provider() -> None:
    for name, native in PROVIDER_TOOLS.items():
        for provider, support in native.support.items():
            given = {key: value["enum"][0] for key, value in support.options.items() if "enum" in value}
            assert support.find_option_problems(given) == []
            form = format_provider_tool(
                make_provider_tool_spec(name, {provider: given}), DIALECTS[provider], "a-search-model"
            )
            assert isinstance(form, dict)
            assert form.get("type") == support.type or f"{support.type}_options" in form
    place = {"openai-responses": {"user_location": {"city": "Graz"}, "allowed_domains": ["a.org"]}}
    assert format_provider_tool(make_provider_tool_spec("web_search", place), DIALECTS["openai-responses"], "m") == {
        "type": "web_search",
        "user_location": {"type": "approximate", "city": "Graz"},
        "filters": {"allowed_domains": ["a.org"]},
    }
    assert format_provider_tool(make_provider_tool_spec("code_execution", {}), DIALECTS["openai-responses"], "m") == {
        "type": "code_interpreter",
        "container": {"type": "auto"},
    }
    assert "gemini" not in PROVIDER_TOOLS["web_search"].support
    assert "The tool web_search is not available in the Gemini API" in str(
        format_provider_tool(make_provider_tool_spec("web_search", {}), DIALECTS["gemini"], "m")
    )
    only = format_provider_tool(make_provider_tool_spec("web_search", {"openai-chat": {}}), DIALECTS["anthropic"], "m")
    assert only == "The agent's manifest enables it for openai-chat only."


@pytest.mark.proves("R-10")
async def test_a_tool_given_in_code_cannot_declare_itself_a_provider_tool() -> None:
    @tool(side_effect="read", locks=[])
    def lookup(name: str) -> str:
        """Look a name up."""
        return name

    class Pretender(Tool):
        spec = make_provider_tool_spec("web_search", {})

        async def execute(self, args: dict[str, Any], runtime: Any) -> object:
            return None

    with pytest.raises(LoadError, match="only an agent's manifest can declare provider tools"):
        async with temporary_kernel(tools=[lookup, Pretender()]):
            pass
