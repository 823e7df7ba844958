"""Requests and notifications to an MCP client during a call, in both eras of the protocol."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mcp.types as types
import pytest
from mcp import MCPError
from mcp.client.subscriptions import ToolsListChanged
from tests.frontends.mcp_clients import (
    ALLOWED,
    ERAS,
    TOOLS,
    Era,
    FormUser,
    about,
    count,
    filled,
    forge,
    join_text_content,
    paint,
    ran,
    relay,
    roots,
    sample,
    serving,
)

from handrail import tool
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.calls_and_results import CallAnswer, Result
from handrail.contract.tool.tool_protocol import Tool
from handrail.frontends.mcp.client_call import McpClientCall, OpenClientRequest
from handrail.frontends.mcp.tool_listing import MAX_GUIDANCE, McpFrontendSettings
from handrail.sandbox import tier_probe


@ERAS
@pytest.mark.proves("F-03")
async def test_an_approval_request_is_a_form_that_shows_the_complete_call(tmp_path: Path, era: Era) -> None:
    person = FormUser([filled(decision="once"), types.ElicitResult(action="decline"), filled(decision="session")])
    async with serving(tmp_path) as (_, _, client), client(era, person) as one:
        assert "kite" in join_text_content(await one.call_tool("launch", {"what": "a\u202ekite"}))
        shown = person.seen[0]
        assert isinstance(shown, types.ElicitRequestFormParams)
        assert "launch" in shown.message and "kite" in shown.message and "\u202e" not in shown.message
        refused = await one.call_tool("launch", {"what": "b"})
        assert refused.is_error and about(refused, "awaiting_approval") and "declined" in join_text_content(refused)
        for _ in range(2):  # the second time by the rule that was stored for the session
            assert join_text_content(await one.call_tool("launch", {"what": "c"})) == "launched c"
    assert len(person.seen) == 3


@ERAS
@pytest.mark.skipif(not tier_probe.probe_tier().is_confining, reason="programs cannot be confined on this machine")
async def test_a_host_request_of_a_program_is_a_form_while_the_program_waits(tmp_path: Path, era: Era) -> None:
    person = FormUser([filled(decision="once"), filled(decision="reject", message="no mirrors")])
    (tmp_path / "ws").mkdir()
    fetch = "".join(f"curl -sS http://{host}.invalid/\n" for host in ("one", "two", "two"))
    (tmp_path / "ws" / "fetch.sh").write_text(f"{fetch}exit 3\n")
    async with serving(tmp_path, rules=("allow bash bash fetch.sh",)) as (_, _, client), client(era, person) as one:
        told = join_text_content(await one.call_tool("bash", {"command": "bash fetch.sh"}))
    messages = [form.message for form in person.seen]
    assert len(messages) == 2 and "one.invalid" in messages[0] and "two.invalid" in messages[1]
    assert "allow net.fetch one.invalid" in messages[0] and "bash fetch.sh" in messages[0]
    assert "one.invalid could not be resolved" in told, "it was allowed, and leads nowhere"
    assert "no mirrors" in told


@ERAS
async def test_a_headless_server_denies_a_call_that_requires_approval(tmp_path: Path, era: Era) -> None:
    async with serving(tmp_path, McpFrontendSettings(headless=True)) as (_, _, client), client(era) as one:
        refused = await one.call_tool("launch", {"what": "a"})
        assert (
            refused.is_error
            and about(refused, "error_kind") == "denied"
            and "This session has no user to ask" in join_text_content(refused)
        )


@ERAS
async def test_a_headless_server_never_asks_the_client(tmp_path: Path, era: Era) -> None:
    person = FormUser([filled(decision="once")])
    async with serving(tmp_path, McpFrontendSettings(headless=True)) as (_, _, client), client(era, person) as one:
        assert (await one.call_tool("launch", {"what": "a"})).is_error and not person.seen


@ERAS
@pytest.mark.proves("F-03")
async def test_questions_are_one_form_with_a_field_for_each(tmp_path: Path, era: Era) -> None:
    asked = [
        {"question": "Which?", "header": "Colour", "options": [{"label": "red"}, {"label": "blue"}]},
        {"question": "Some?", "options": [{"label": "a"}, {"label": "b"}, {"label": "c"}], "multi_select": True},
        {"question": "Why?"},
    ]
    person = FormUser([filled(q1="blue", q2=["a", "c"], q3="because"), types.ElicitResult(action="cancel")])
    async with serving(tmp_path) as (kernel, _, client), client(era, person) as one:
        result = await one.call_tool("question", {"questions": asked})
        assert result.structured_content == {"answers": [["blue"], ["a", "c"], ["because"]]}
        parked = await one.call_tool("question", {"questions": asked})
        (waiting,) = kernel.approvals.list_pending()
        assert about(parked, "awaiting_approval") == waiting.id and "repeat the call" in join_text_content(parked)


@ERAS
@pytest.mark.proves("F-03", "T-06p")
async def test_a_form_decides_on_a_plan_and_the_users_comment_reaches_the_model(tmp_path: Path, era: Era) -> None:
    person = FormUser(
        [
            filled(q1="Enter plan mode"),
            filled(q1="Keep planning", q1_text="Use the other parser."),
            types.ElicitResult(action="decline"),
            filled(q1="Carry out, and accept edits"),
        ]
    )
    async with serving(tmp_path) as (_, _, client), client(era, person) as one:
        assert (await one.call_tool("plan", {})).structured_content["mode"] == "plan"  # type: ignore
        kept = (await one.call_tool("plan_exit", {"plan": "1. Mend it."})).structured_content
        assert kept is not None and (kept["mode"], kept["reason"]) == ("plan", "Use the other parser.")
        assert (await one.call_tool("plan_exit", {"plan": "2. Mend it."})).is_error
        denied = await one.call_tool("write", {"path": "a.txt", "content": "x"})
        assert denied.is_error and "(mode scope)" in join_text_content(denied)
        done = (await one.call_tool("plan_exit", {"plan": "3. Mend it."})).structured_content
        assert done is not None and (done["mode"], done["approved"]) == ("accept-edits", True)
        assert not (await one.call_tool("write", {"path": "a.txt", "content": "x"})).is_error
    assert "3. Mend it." in str(person.seen[-1])


@ERAS
@pytest.mark.proves("F-03")
async def test_a_tool_asks_the_client_for_several_inputs_at_once_and_again(tmp_path: Path, era: Era) -> None:
    person = FormUser([filled(name="Ann"), filled(name="yes")])
    async with serving(tmp_path) as (_, _, client):
        everything = client(era, person, sampling_callback=sample, list_roots_callback=roots)
        async with everything as one:
            assert join_text_content(await one.call_tool("interview", {})) == "Ann, rain, file:///here, yes"


@ERAS
@pytest.mark.proves("F-03")
async def test_progress_and_logs_reach_the_call_that_produced_them(tmp_path: Path, era: Era) -> None:
    heard: list[Any] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, total, message))

    async def log(params: types.LoggingMessageNotificationParams) -> None:
        heard.append((params.level, params.data, params.logger))

    async with serving(tmp_path) as (_, _, client), client(era, logging_callback=log, log_level="info") as one:
        assert join_text_content(await one.call_tool("work", {}, progress_callback=on_progress)) == "done"
        while len(heard) < 3:
            await asyncio.sleep(0)
    assert (1, 2, "half") in heard and (2, 2, "whole") in heard and ("warning", {"odd": True}, "worker") in heard
    assert len(heard) == 3, "what is less grave than was asked for is not told"


@ERAS
@pytest.mark.proves("F-03")
async def test_a_repeated_call_uses_an_approval_given_after_its_request_once(tmp_path: Path, era: Era) -> None:
    person = FormUser([types.ElicitResult(action="cancel")])
    ran.clear()
    async with serving(tmp_path) as (kernel, _, client), client(era, person) as one:
        parked = await one.call_tool("launch", {"what": "later"})
        waiting = about(parked, "awaiting_approval")
        assert (
            parked.is_error
            and f"requires approval {waiting}" in join_text_content(parked)
            and "repeat the call" in join_text_content(parked)
        )
        await kernel.approvals.decide(waiting, ApprovalAnswer("once"), by="test")
        assert join_text_content(await one.call_tool("launch", {"what": "later"})) == "launched later" and ran == [
            "later"
        ]
        person.says.append(types.ElicitResult(action="decline"))
        assert (await one.call_tool("launch", {"what": "later"})).is_error, "collected once, and then asked anew"
    assert ran == ["later"]


async def test_a_request_without_an_answer_in_time_awaits_approval(tmp_path: Path) -> None:
    person = FormUser()
    async with (
        serving(tmp_path, McpFrontendSettings(wait_s=0.05)) as (kernel, _, client),
        client("legacy", person) as one,
    ):
        parked = await one.call_tool("launch", {"what": "later"})
        assert about(parked, "awaiting_approval") == kernel.approvals.list_pending()[0].id and person.seen


@pytest.mark.proves("F-03")
async def test_a_later_call_uses_the_approval_that_an_absent_client_left_open(tmp_path: Path) -> None:
    """In the stateless era: the response contained the question, and the client did not continue."""
    async with serving(tmp_path, McpFrontendSettings(hold_s=0.05)) as (kernel, house, client):
        patient = client("auto", FormUser())
        async with patient as one:
            asked = await one.session.call_tool("launch", {"what": "later"}, allow_input_required=True)
            assert isinstance(asked, types.InputRequiredResult)
            while not (rows := kernel.approvals.list_pending()):
                await asyncio.sleep(0)
            (visit,) = house.clients
            while visit.client.calls:
                await asyncio.sleep(0.001)
            with pytest.raises(MCPError, match="requestState"):
                await one.session.call_tool("launch", {"what": "later"}, request_state=asked.request_state)
            await kernel.approvals.decide(rows[0].id, ApprovalAnswer("once"), by="test")
            collected = await one.session.call_tool("launch", {"what": "later"})
            assert isinstance(collected, types.CallToolResult) and join_text_content(collected) == "launched later"


@ERAS
@pytest.mark.proves("F-03")
async def test_a_truncated_output_is_marked_and_available_in_full_as_a_resource(tmp_path: Path, era: Era) -> None:
    async with serving(tmp_path) as (_, _, client), client(era) as one:
        result = await one.call_tool("flood", {})
        head, note, link = result.content
        assert isinstance(head, types.TextContent) and head.text.startswith("line\nline\n")
        assert isinstance(note, types.TextContent) and "only the beginning" in note.text
        assert isinstance(link, types.ResourceLink) and about(result, "truncated") is True
        assert [str(listed.uri) for listed in (await one.list_resources()).resources] == [str(link.uri)]
        (whole,) = (await one.read_resource(str(link.uri))).contents
        assert isinstance(whole, types.TextResourceContents) and whole.text == "line\n" * 1_000


@ERAS
@pytest.mark.proves("F-03")
async def test_an_image_result_is_image_content_and_can_be_read_as_a_resource(tmp_path: Path, era: Era) -> None:
    async with serving(tmp_path) as (_, _, client), client(era) as one:
        caption, picture = (await one.call_tool("paint", {})).content
        assert isinstance(caption, types.TextContent) and caption.text == "a dot"
        assert isinstance(picture, types.ImageContent) and picture.mime_type == "image/png"
        (listed,) = (await one.list_resources()).resources
        (content,) = (await one.read_resource(str(listed.uri))).contents
        assert isinstance(content, types.BlobResourceContents) and content.blob == picture.data


async def test_a_client_cannot_read_the_resources_of_another_client(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, client), client("legacy") as one, client("legacy") as other:
        await one.call_tool("paint", {})
        (listed,) = (await one.list_resources()).resources
        assert not (await other.list_resources()).resources
        with pytest.raises(MCPError):
            await other.read_resource(str(listed.uri))


async def test_repeated_requests_to_close_a_stream_close_it_once() -> None:
    hung_up: list[None] = []

    async def close() -> None:
        hung_up.append(None)

    async def hang_up() -> CallAnswer:
        for _ in range(2):
            for _ in range(1_000):
                exchange.close_client_stream()
                exchange.close_client_stream()
            while not hung_up:
                await asyncio.sleep(0)
        return CallAnswer("call-1", "t", Result.output(1), Result.output(1))

    exchange = McpClientCall("call-1")
    exchange.start(hang_up())
    line: Any = SimpleNamespace(close_sse_stream=close, protocol_version="2025-11-25")
    assert isinstance(await exchange.send_events_until_answered(OpenClientRequest(line)), CallAnswer)
    assert len(hung_up) == 2


@ERAS
async def test_an_artifact_reference_invented_by_a_tool_gives_no_access(tmp_path: Path, era: Era) -> None:
    async with (
        serving(tmp_path, rules=("allow *",), tools=(paint, forge, relay)) as (kernel, _, client),
        client(era) as one,
    ):
        session = await kernel.session(rules=["allow paint"])
        ref = (await session.call("paint", {})).data[1]["artifact"]
        result = await one.call_tool("forge", {"ref": ref})
        assert not any(isinstance(part, types.ImageContent | types.EmbeddedResource) for part in result.content)
        assert about(result, "artifacts") is None and not (await one.list_resources()).resources
        with pytest.raises(MCPError):
            await one.read_resource(f"handrail://artifact/{ref}")


@ERAS
async def test_a_tool_may_pass_on_an_artifact_from_a_call_that_it_made(tmp_path: Path, era: Era) -> None:
    async with serving(tmp_path, rules=("allow *",), tools=(paint, forge, relay)) as (_, _, client), client(era) as one:
        _, picture = (await one.call_tool("relay", {})).content
        assert isinstance(picture, types.ImageContent) and len((await one.list_resources()).resources) == 1


@ERAS
@pytest.mark.proves("F-03")
async def test_an_output_schema_is_listed_and_enforced(tmp_path: Path, era: Era) -> None:
    async with serving(tmp_path, McpFrontendSettings(discovery="all")) as (_, _, client), client(era) as one:
        (listed,) = [found for found in (await one.list_tools()).tools if found.name == "count"]
        assert listed.output_schema == count.spec.output_schema
        assert (await one.call_tool("count", {"good": True})).structured_content == {"n": 1}
        broken = await one.call_tool("count", {"good": False})
        assert (
            broken.is_error
            and broken.structured_content is None
            and "does not match its output schema" in join_text_content(broken)
        )


@ERAS
async def test_a_client_that_lists_once_loads_schemas_and_uses_call_tool(tmp_path: Path, era: Era) -> None:
    rules = (*ALLOWED, "allow *")
    async with serving(tmp_path, rules=rules) as (_, _, client), client(era) as one:
        names = {found.name for found in (await one.list_tools()).tools}
        assert "call_tool" in names and "git__status" not in names
        found: dict[str, Any] = (await one.call_tool("load_tools", {"category": "git"})).structured_content
        by_name: dict[str, Any] = {schema["name"]: schema for schema in found["schemas"]}
        assert "repository" in by_name["git__status"]["inputSchema"]["properties"]
        through = await one.call_tool("call_tool", {"name": "work", "arguments": {}})
        assert join_text_content(through) == "done"
        denied = await one.call_tool("call_tool", {"name": "call_tool", "arguments": {"name": "work"}})
        assert denied.is_error and about(denied, "error_kind") == "unknown_tool"
        with pytest.raises(MCPError, match="Invalid arguments of call_tool"):
            await one.call_tool("call_tool", {"arguments": {}})


@ERAS
async def test_all_tools_are_listed_with_the_discovery_setting_all(tmp_path: Path, era: Era) -> None:
    async with serving(tmp_path, McpFrontendSettings(discovery="all")) as (kernel, _, client), client(era) as one:
        names = {found.name for found in (await one.list_tools()).tools}
        assert {"git__status", "launch", "read"} <= names and "call_tool" not in names
        ready = [entry for entry in kernel.generation.entries.values() if entry.unavailable_reason is None]
        assert len(names) <= len(ready)


async def test_a_subscriber_is_notified_when_a_call_on_another_connection_loads_tools(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, client), client("auto") as one, client("auto") as other:
        listening = other.listen(tools_list_changed=True)
        async with listening as changes:
            await one.call_tool("load_tools", {"category": "git"})
            assert isinstance(await anext(aiter(changes)), ToolsListChanged)


async def test_an_invented_cursor_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, client), client("auto") as one:
        for cursor in ("", "x", "LTU=", "MQ==", "//8="):
            with pytest.raises(MCPError, match="cursor"):
                await one.list_tools(cursor=cursor)


@ERAS
async def test_sixty_cancelled_calls_leave_the_server_usable(tmp_path: Path, era: Era) -> None:
    async with serving(tmp_path) as (_, house, client), client(era, FormUser()) as one:
        storm = [asyncio.create_task(one.call_tool("launch", {"what": str(number)})) for number in range(60)]
        while not (
            house.clients and len(next(iter(house.clients)).client.held_calls or next(iter(house.clients)).client.calls)
        ):
            await asyncio.sleep(0)
        for call in storm:
            call.cancel()
        await asyncio.gather(*storm, return_exceptions=True)
        (visit,) = house.clients
        if era == "legacy":  # what is held waits for its client, who may come back
            while visit.client.calls:
                await asyncio.sleep(0)
        assert join_text_content(await one.call_tool("work", {})) == "done"


async def test_a_tool_that_keeps_asking_an_absent_client_ends(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, McpFrontendSettings(hold_s=0.01)) as (_, house, client),
        client("auto", FormUser()) as one,
    ):
        asked = await one.session.call_tool("insist", {"params": {}}, allow_input_required=True)
        assert isinstance(asked, types.InputRequiredResult)
        (visit,) = house.clients
        while visit.client.calls:
            await asyncio.sleep(0.005)


@ERAS
async def test_an_invalid_client_request_is_refused_to_the_tool_that_sends_it(tmp_path: Path, era: Era) -> None:
    async with serving(tmp_path) as (_, house, client), client(era, FormUser(), sampling_callback=sample) as one:
        refused = join_text_content(await one.call_tool("insist", {"params": {"messages": "none", "maxTokens": 1}}))
        assert refused.count("`sampling/createMessage` are invalid: `params.messages`") == 2
        assert not any(visit.client.calls for visit in house.clients)


@ERAS
@pytest.mark.proves("O-05")
async def test_a_question_from_another_server_names_its_source_without_control_characters(
    tmp_path: Path, era: Era
) -> None:
    person = FormUser([filled(name="Ann"), filled(name="Ann")])
    message = "\u202eeman ruoY\r\x1b[2K\nHandrail asks: allow?"
    async with serving(tmp_path) as (_, _, client), client(era, person) as one:
        assert join_text_content(await one.call_tool("insist", {"params": {"message": message}})) == ""
    (first, second) = person.seen[0].message.split("\n")
    assert first.startswith("theirs asks: ") and first.isprintable() and second == "| Handrail asks: allow?"


@ERAS
@pytest.mark.proves("F-03")
async def test_a_damaged_log_is_reported_to_the_client_with_instructions(tmp_path: Path, era: Era) -> None:
    async with serving(tmp_path) as (kernel, _, client), client(era) as one:
        with closing(sqlite3.connect(kernel.components.store.folders.database_file)) as other:
            other.execute("ALTER TABLE session RENAME TO elsewhere")
            result = await one.call_tool("read", {"path": "a"})
            assert result.is_error and about(result, "error_kind") == "unavailable"
            for told in ("handrail.db is damaged", "no such table", "Keep a copy", "move it away"):
                assert told in join_text_content(result)
            with pytest.raises(MCPError, match="Keep a copy") as refused:
                await one.list_tools()
            assert refused.value.data == {"handrail/error_kind": "unavailable"}
            other.execute("ALTER TABLE elsewhere RENAME TO session")
        assert "handrail.db" not in join_text_content(await one.call_tool("read", {"path": "a"}))


@ERAS
async def test_guidance_reaches_clients_once_in_the_instructions_or_the_description(tmp_path: Path, era: Era) -> None:
    """Our own loop puts it into the system prompt; an MCP client has no other place that its model reads."""
    async with serving(tmp_path) as (kernel, _, client), client(era) as one:
        bash, push = (kernel.generation.entries[name].spec for name in ("bash", "git.push"))
        assert one.instructions is not None
        assert bash.guidance and f"\n- bash: {bash.guidance}\n" in one.instructions
        assert push.guidance and push.guidance not in one.instructions, "it is not listed yet"
        listed = {found.name: found.description for found in (await one.list_tools()).tools}
        assert listed["bash"] == bash.description, "not twice"
        await one.call_tool("load_tools", {"category": "git"})
        listed = {found.name: found.description for found in (await one.list_tools()).tools}
        assert listed["git__push"] == f"{push.description} {push.guidance}"


@ERAS
async def test_guidance_that_exceeds_the_instructions_limit_follows_the_description(tmp_path: Path, era: Era) -> None:
    def made(number: int) -> Tool:
        @tool(id=f"store.t{number:02d}", side_effect="read", locks=[], guidance=f"{number:02d} " * 40)
        async def count() -> int:
            """Count."""
            return number

        return count

    tools = (*TOOLS, *map(made, range(40)))
    async with (
        serving(tmp_path, McpFrontendSettings(discovery="all"), tools=tools) as (_, _, client),
        client(era) as one,
    ):
        told = [line for line in (one.instructions or "").splitlines() if line.startswith("- ")]
        assert sum(map(len, told)) < MAX_GUIDANCE and told[-1].startswith("- store__t0")
        listed = {found.name: found.description or "" for found in (await one.list_tools()).tools}
    for number in range(40):
        beside = f"{number:02d} {number:02d}" in listed[f"store__t{number:02d}"]
        assert beside != any(line.startswith(f"- store__t{number:02d}: ") for line in told), "exactly once"


async def test_a_client_that_lists_once_receives_guidance_with_loaded_schemas(tmp_path: Path) -> None:
    async with serving(tmp_path) as (kernel, _, client), client("auto") as one:
        answer: dict[str, Any] = (await one.call_tool("load_tools", {"tool": "git.push"})).structured_content or {}
    assert answer["schemas"][0]["guidance"] == kernel.generation.entries["git.push"].spec.guidance
