"""Resources and prompts of several sources in one session: their sources, the rules, and changes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import Opens, by_both_doors
from tests.registry.test_operator_resources import OFFERING, put_offering

from handrail import Event, Kernel, Runtime, Tool, ToolError, ToolSpec, open_kernel, tool
from handrail.arbiter import session_subscriptions
from handrail.contract.services.resource_services import PromptSpec, ResourceSpec, ResourceTemplate, SourceRequestSpec
from handrail.contract.tool.requires import Requires
from handrail.testing.scripted_kernel import temporary_kernel

kernel_in = by_both_doors()


class ThirdPartySource:
    """A source that is not the operator's."""

    is_third_party = True
    templates = (ResourceTemplate("far:{id}", "far"),)
    prompts = (PromptSpec("far_review"), PromptSpec("greet"))

    def __init__(self, source: str = "far", gives: Any = None) -> None:
        self.source = source
        self.gives = gives
        self.resources = (ResourceSpec("note:1", "the same"), ResourceSpec("far:1", "one"))
        self.updated: list[Callable[[str], None]] = []
        self.stopped = asyncio.Event()

    def has_resource(self, uri: str) -> bool:
        return uri == "note:1" or uri.startswith("far:")

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        return self.gives or {"contents": [{"uri": uri, "text": f"{self.source} says"}]}

    async def get_prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        return {"messages": [{"role": "user", "content": {"type": "text", "text": self.source}}]}

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        return {"values": [str(n) for n in range(150)]}

    async def subscribe(self, uri: str, on_update: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        self.updated.append(on_update)

        async def stop() -> None:
            self.stopped.set()

        return stop


def opened(
    place: Path, *sources: ThirdPartySource, rules: tuple[str, ...] = (), **options: Any
) -> AbstractAsyncContextManager[Kernel]:
    put_offering(place)
    (place / "ws").mkdir(exist_ok=True)
    (place / "config" / "handrail.toml").write_text("")
    return open_kernel(
        place / "ws",
        state=place / "state",
        config=place / "config" / "handrail.toml",
        resources=sources,
        rules=rules,
        **options,
    )


async def test_content_of_an_upstream_server_requires_approval_and_own_content_does_not(tmp_path: Path) -> None:
    async with opened(tmp_path, ThirdPartySource()) as kernel:
        session = await kernel.session()
        own = await session.call("resource.read", {"uri": "note:1"})
        assert own.data["contents"][0]["text"] == "A note." and "untrusted_source" not in own.metadata
        for uri in ("far:1", "mcp+far:note:1"):
            assert (await session.call("resource.read", {"uri": uri})).error_kind == "denied"
        assert (await session.call("prompt.get", {"name": "far_review"})).error_kind == "denied"
        assert (await session.call("resource.subscribe", {"uri": "far:1"})).error_kind == "denied"
        complete = {"ref": {"type": "ref/prompt", "name": "far_review"}, "argument": {"name": "a", "value": ""}}
        assert (await session.call("prompt.complete", complete)).error_kind == "denied"
        for uri in ("mcp+none:note:1", "mcp+far:", "mcp+:note:1"):
            assert (await session.call("resource.read", {"uri": uri})).error_kind == "invalid_input"


@pytest.mark.proves("P-02", "O-05")
async def test_a_rule_names_a_server_its_request_and_the_uri_or_name(tmp_path: Path) -> None:
    rules = (
        "allow mcp:far:resources/read far:*",
        "deny mcp:far:resources/read far:secret*",
        "allow mcp:far:prompts/get far_*",
    )
    async with opened(tmp_path, ThirdPartySource(), rules=rules) as kernel:
        session = await kernel.session()
        read = await session.call("resource.read", {"uri": "far:1"})
        assert read.data["contents"][0]["text"] == "far says" and read.metadata["untrusted_source"] == "far"
        assert (await session.call("resource.read", {"uri": "mcp+far:far:1"})).ok
        for uri in ("far:secret/1", "mcp+far:far:secret", "mcp+far:note:1"):
            assert (await session.call("resource.read", {"uri": uri})).error_kind == "denied"
        assert (await session.call("prompt.get", {"name": "far_review"})).ok
        assert (await session.call("prompt.get", {"name": "mcp+far:greet"})).error_kind == "denied"
        plan = await kernel.session(mode="plan")
        assert (await plan.call("resource.read", {"uri": "note:1"})).ok  # one's own is only read
        assert (await plan.call("resource.read", {"uri": "far:1"})).error_kind == "denied"


@pytest.mark.proves("P-13")
async def test_a_session_rule_for_a_servers_resource_does_not_cover_another_server(tmp_path: Path) -> None:
    async with opened(tmp_path, ThirdPartySource(), ThirdPartySource("other")) as kernel:
        told = await kernel.explain_call("resource.read", {"uri": "far:1"})
        assert "allow mcp:far:resources/read far:1" in str(told)
        await kernel.session(rules=["allow mcp:far:resources/read far:1"])
        session = await kernel.session(rules=["allow mcp:far:resources/read far:1"])
        assert (await session.call("resource.read", {"uri": "far:1"})).ok
        assert (await session.call("resource.read", {"uri": "mcp+other:far:1"})).error_kind == "denied"


async def test_resource_lists_name_each_source_and_give_shadowed_resources_a_prefixed_uri(tmp_path: Path) -> None:
    async with opened(tmp_path, ThirdPartySource()) as kernel:
        session = await kernel.session()
        listed = await session.call("resource.list", {})
        assert [(one["uri"], one.get("source")) for one in listed.data["resources"]][-2:] == [
            ("mcp+far:note:1", "far"),
            ("far:1", "far"),
        ]
        assert "far" in listed.metadata["untrusted_source"]
        assert {"uriTemplate": "far:{id}", "name": "far", "source": "far"} in listed.data["resourceTemplates"]
        prompts = await session.call("prompt.list", {"source": "far"})
        assert [one["name"] for one in prompts.data["prompts"]] == ["far_review", "greet"]
        assert (await session.call("prompt.list", {"source": "none"})).error_kind == "invalid_input"


async def test_an_invalid_answer_of_a_source_returns_a_backend_error(tmp_path: Path) -> None:
    async with opened(tmp_path, ThirdPartySource(gives={"contents": "much"}), rules=("allow mcp:far:*",)) as kernel:
        session = await kernel.session()
        assert (await session.call("resource.read", {"uri": "far:1"})).error_kind == "backend"
        complete = {"ref": {"type": "ref/prompt", "name": "far_review"}, "argument": {"name": "a", "value": ""}}
        told = (await session.call("prompt.complete", complete)).data
        assert len(told["values"]) == 100 and told["total"] == 150 and told["hasMore"] is True


@pytest.mark.proves("K-11d", "P-01")
async def test_a_tool_reads_a_servers_resources_only_through_a_call_under_the_rules(tmp_path: Path) -> None:
    @tool(id="test.reach", side_effect="read", locks=[], requires=Requires(capabilities=("resources", "call")))
    async def reach(uri: str, runtime: Runtime) -> object:
        """Try both ways."""
        with pytest.raises(ToolError, match=r"runtime\.call"):
            await runtime.resources.read(uri)
        result = await runtime.call("resource.read", {"uri": uri})
        return result.data if result.ok else result.error_kind

    async with opened(tmp_path, ThirdPartySource(), rules=("allow test.reach",), tools=[reach]) as kernel:
        session = await kernel.session()
        assert (await session.call("test.reach", {"uri": "far:1"})).data == "denied"


class ReadsAnother(Tool):
    """Is judged by the resource that its argument names, and asks for another one."""

    source_request = SourceRequestSpec("resources/read", "uri")
    spec = ToolSpec(
        id="test.sly",
        description="Read a resource.",
        parameters={"type": "object", "properties": {"uri": {"type": "string"}}, "required": ["uri"]},
        requires=Requires(capabilities=("resources",)),
        side_effect="external",
        locks=(),
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        with pytest.raises(ToolError, match="is not authorised for"):
            await runtime.resources.read("far:2")
        return (await runtime.resources.read(args["uri"])).data["contents"]


@pytest.mark.proves("K-11d", "P-01")
async def test_a_tool_gets_only_the_resource_that_its_call_was_authorised_for(tmp_path: Path) -> None:
    rules = ("allow test.sly", "allow mcp:far:*")
    async with opened(tmp_path, ThirdPartySource(), rules=rules, tools=[ReadsAnother()]) as kernel:
        result = await (await kernel.session()).call("test.sly", {"uri": "far:1"})
        assert result.ok and result.data[0]["uri"] == "far:1", result.error_text


async def test_subscription_updates_are_bounded_and_end_with_the_session(tmp_path: Path) -> None:
    far = ThirdPartySource()
    async with opened(tmp_path, far, rules=("allow mcp:far:*",)) as kernel:
        session, seen, again = await kernel.session(), list[Event](), asyncio.Event()

        def heard(event: Event) -> None:
            if event.kind == "resource-updated":
                seen.append(event)
            if len(seen) == 2:
                again.set()

        session.watch_events(heard)
        for _ in range(2):
            assert (await session.call("resource.subscribe", {"uri": "mcp+far:note:1"})).ok
        assert len(far.updated) == 1
        for _ in range(10_000):
            far.updated[0]("note:1")
        await again.wait()
        assert {event.data["uri"] for event in seen} == {"mcp+far:note:1"} and len(seen) == 2
        assert all((event.call_id, event.tool_id) == ("", "") for event in seen)
        await session.close()
        assert far.stopped.is_set()


async def test_watchers_get_events_when_tools_or_resources_change(tmp_path: Path, kernel_in: Opens) -> None:
    folder = put_offering(tmp_path)
    async with kernel_in(tmp_path) as kernel:
        session, seen = await kernel.session(), list[str]()
        offers, updated = asyncio.Event(), asyncio.Event()

        def heard(event: Event) -> None:
            seen.append(event.kind)
            {"list-changed": offers, "resource-updated": updated}.get(event.kind, asyncio.Event()).set()

        session.watch_events(heard)
        assert (await session.call("resource.subscribe", {"uri": "note:file"})).ok
        assert (await session.call("load_tools", {"category": "git"})).ok
        await offers.wait()
        offers.clear()
        (folder / "notes" / "a.md").write_text("other\n")
        (folder / "resources.json").write_text(json.dumps({**OFFERING, "prompts": []}))
        await kernel.reload_tools()
        await offers.wait()
        await updated.wait()
        assert [len(one.prompts) for one in kernel.generation.resource_providers] == [0]
        assert kernel.generation.resource_providers[0].resources[0].uri == "note:1"
        assert seen.count("resource-updated") == 1


async def test_a_subscriber_is_notified_of_file_changes_and_files_are_polled_only_while_subscribed(
    tmp_path: Path, kernel_in: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_subscriptions, "POLL_INTERVAL_S", 0.005)
    folder = put_offering(tmp_path)

    def looking() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("poll the offered")]

    async with kernel_in(tmp_path) as kernel:
        session, seen = await kernel.session(), asyncio.Queue[str]()

        def heard(event: Event) -> None:
            if event.kind == "resource-updated":
                seen.put_nowait(event.data["uri"])

        session.watch_events(heard)
        assert (await session.call("resource.subscribe", {"uri": "note:1"})).ok
        assert looking() == [], "what stands in the offering itself changes with that"
        assert (await session.call("resource.subscribe", {"uri": "note:file"})).ok and len(looking()) == 1
        file = folder / "notes" / "a.md"
        for change in (lambda: file.write_text("other\n"), file.unlink, lambda: file.write_text("again\n")):
            change()
            assert await seen.get() == "note:file"
        os.utime(file, ns=(1, 1))  # looked at, and found the same
        assert (await session.call("resource.unsubscribe", {"uri": "note:file"})).ok
        while looking():
            await asyncio.sleep(0)
        assert seen.empty()
        assert (await session.call("resource.subscribe", {"uri": "note:file"})).ok and len(looking()) == 1
    assert looking() == []


async def test_resource_tools_are_hidden_from_models_when_no_source_offers_resources(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path / "without") as kernel:
        session = await kernel.session()
        found = (await session.call("find_tools", {"query": "read a resource by its uri"})).data
        assert "resource.read" not in str(found) and not any("resource" in spec.id for spec in session.active_tools)
        assert (await session.call("resource.list", {})).data == {"resources": [], "resourceTemplates": []}
    put_offering(tmp_path / "with")
    async with temporary_kernel(tmp_path / "with") as kernel:
        session = await kernel.session()
        found = (await session.call("find_tools", {"query": "read a resource by its uri"})).data
        assert "resource.read" in str(found)
