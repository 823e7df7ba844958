"""Reports about clients in use: reachable features, answers of users, and final messages."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mcp.types as types
import pytest
from jsonschema import Draft202012Validator
from tests.field.test_clients_odd_messages import hello
from tests.frontends.conftest import Program
from tests.frontends.mcp_clients import ERAS, TOOLS, Era, FormUser, about, filled, join_text_content, ran, serving

from handrail import tool
from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.services.client_services import RequestToClient
from handrail.frontends.mcp.approval_forms import DECISION
from handrail.frontends.mcp.client_call import parse_client_answer
from handrail.frontends.mcp.tool_listing import McpFrontendSettings

FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uuid"}
DECLINE = types.ElicitResult(action="decline")


def workspace(folder: Path) -> Path:
    """The workspace of a kernel in this folder."""
    made = folder / "ws"
    made.mkdir(exist_ok=True)
    return made


# ── what a client lists and calls ────────────────────────────────────────────────────────────────


@ERAS
async def test_a_client_that_lists_tools_once_can_call_every_tool_by_its_returned_name(
    tmp_path: Path, era: Era
) -> None:
    async with serving(tmp_path, rules=("allow *",)) as (kernel, _, client), client(era) as one:
        assert "call_tool" in {found.name for found in (await one.list_tools()).tools}
        for finder, arguments in (
            ("load_tools", {"category": "git"}),
            ("load_tools", {"category": "git"}),  # loaded before
            ("load_tools", {"tool": "git.status"}),
            ("find_tools", {"query": "show what git has recorded"}),
        ):
            found: Any = (await one.call_tool(finder, arguments)).structured_content
            text = json.dumps({key: value for key, value in found.items() if key not in ("schemas", "tools")})
            assert "git." not in text and "call_tool" in found["how_to_call"]
            by_name = {schema["name"]: schema for schema in found["schemas"]}
            assert by_name and all(name.startswith("git__") for name in by_name if name != "grep")
            for name in by_name:
                entry = kernel.generation.resolve_tool_name(name)
                assert entry is not None and entry.wire_name == name
                assert by_name[name]["inputSchema"]["properties"].keys() == entry.spec.parameters["properties"].keys()
        result = await one.call_tool("call_tool", {"name": "git__init", "arguments": {"path": "."}})
        assert "unknown" not in join_text_content(result)


@ERAS
@pytest.mark.parametrize("discovery", ["core", "all"])
async def test_every_listed_tool_has_a_title_and_an_output_schema_and_only_known_formats(
    tmp_path: Path, era: Era, discovery: Any
) -> None:
    settings = McpFrontendSettings(discovery=discovery)
    async with serving(tmp_path, settings) as (_, _, client), client(era) as one:
        listed = (await one.list_tools()).tools
        own = {each.spec.id for each in TOOLS}
        for found in listed:
            sent = found.model_dump(by_alias=True, exclude_none=True)
            assert sent["title"] and sent["title"] != found.name
            assert "outputSchema" in sent or found.name in own or found.name == "call_tool", found.name
            assert set(formats(sent)) <= FORMATS, found.name
            meta = sent["_meta"]
            assert meta.get("anthropic/alwaysLoad") or meta["anthropic/searchHint"], found.name
        read = next(found for found in listed if found.name == "read")
        assert read.meta == {"anthropic/alwaysLoad": True}


def formats(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        members: Mapping[str, Any] = schema  # pyright: ignore[reportUnknownVariableType]
        if isinstance(members.get("format"), str):
            yield members["format"]
        for value in members.values():
            yield from formats(value)
    elif isinstance(schema, list):
        several: list[Any] = schema  # pyright: ignore[reportUnknownVariableType]
        for value in several:
            yield from formats(value)


@tool(side_effect="read", locks=[], output_schema={"type": "object", "properties": {"n": {"type": "integer"}}})
async def tally(fails: bool) -> dict[str, Any]:
    """Count, or fail with data of another form."""
    if fails:
        from handrail import ToolError

        raise ToolError("it is full", data={"n": "many"})
    return {"n": 1, "more": "than promised"}


async def test_structured_content_of_errors_and_long_results_matches_the_listed_schema(tmp_path: Path) -> None:
    rules = ("allow *",)
    async with serving(tmp_path, rules=rules, tools=(tally,)) as (_, _, client), client("legacy") as one:
        (workspace(tmp_path) / "long.txt").write_text("line\n" * 100_000)
        schemas = {found.name: found.output_schema for found in (await one.list_tools()).tools}
        for name, arguments in (
            ("read", {"path": "absent.txt"}),
            ("read", {"colour": "red"}),
            ("read", {"path": "long.txt"}),
            ("write", {"path": "new.txt", "content": "x"}),
            ("glob", {"pattern": "*"}),
            ("bash", {"command": "seq 100000"}),
            ("bash", {"command": "true", "background": True}),
            ("todo", {}),
            ("load_tools", {"category": "git"}),
            ("tally", {"fails": False}),
            ("tally", {"fails": True}),
        ):
            result = await one.call_tool(name, arguments)
            schema = schemas[name]
            assert schema is not None
            if result.structured_content is None:
                assert result.is_error, name
            else:
                validator: Any = Draft202012Validator(schema)
                assert not list(validator.iter_errors(result.structured_content)), name
        assert result.is_error and "it is full" in join_text_content(result)


@pytest.mark.parametrize("through", [False, True])
async def test_arguments_that_a_client_adds_to_every_call_are_removed_and_named(tmp_path: Path, through: bool) -> None:
    added = {"toolCallId": "c1", "sessionId": "s1", "action": "sendMessage", "chatInput": "hi"}
    async with serving(tmp_path) as (_, _, client), client("legacy") as one:
        (workspace(tmp_path) / "note.txt").write_text("a note\n")
        name, arguments = "read", {"path": "note.txt", **added}
        if through:
            name, arguments = "call_tool", {"name": "read", "arguments": arguments, **added}
        result = await one.call_tool(name, arguments)
        assert not result.is_error and about(result, "removed_arguments") == sorted(added)
        wrong = await one.call_tool("read", {"path": "note.txt", "colour": "red", **added})
        assert wrong.is_error and "colour" in join_text_content(wrong), "what no client adds is still an error"
        alone = await one.call_tool("read", {"path": "note.txt", "action": "x"})
        assert alone.is_error and "action" in join_text_content(alone)


# ── what its user answers ────────────────────────────────────────────────────────────────────────


@ERAS
async def test_an_approval_form_has_one_field_with_at_most_four_distinct_options(tmp_path: Path, era: Era) -> None:
    person = FormUser([filled(decision="once")])
    async with serving(tmp_path, rules=()) as (_, _, client), client(era, person) as one:
        await one.call_tool("write", {"path": "docs/a.txt", "content": "x"})
    (shown,) = person.seen
    assert isinstance(shown, types.ElicitRequestFormParams)
    schema: Any = shown.model_dump(by_alias=True)["requestedSchema"]
    assert list(schema["properties"]) == [DECISION] and schema["required"] == [DECISION]
    field = schema["properties"][DECISION]
    titles = [option["title"] for option in field["oneOf"]] if "oneOf" in field else field["enumNames"]
    assert 2 <= len(titles) <= 4 and len({title[:4] for title in titles}) == len(titles)
    assert "allow write docs/a.txt" in "\n".join(shown.message.splitlines()[:3])


@ERAS
async def test_a_client_may_answer_with_the_title_of_an_option(tmp_path: Path, era: Era) -> None:
    ran.clear()
    person = FormUser([filled(decision="Once: only this call", more="x"), filled(decision="Reject")])
    async with serving(tmp_path, McpFrontendSettings()) as (_, _, client), client(era, person) as one:
        assert join_text_content(await one.call_tool("launch", {"what": "kite"})) == "launched kite"
        refused = await one.call_tool("launch", {"what": "drone"})
        assert refused.is_error and "rejected" in join_text_content(refused) and ran == ["kite"]


def test_a_title_of_two_options_is_no_answer() -> None:
    options = [{"const": "a", "title": "Same"}, {"const": "b", "title": "Same"}, {"const": "c", "title": "Other"}]
    schema = {"type": "object", "properties": {"x": {"type": "string", "oneOf": options}}}
    ask = RequestToClient("elicitation/create", {"message": "Which?", "requestedSchema": schema})
    assert parse_client_answer(ask, {"action": "accept", "content": {"x": "Same"}}) is None
    other = parse_client_answer(ask, {"action": "accept", "content": {"x": "Other"}})
    assert other is not None and other["content"] == {"x": "c"}


@ERAS
async def test_a_call_that_a_client_declines_automatically_waits_for_a_user_approval(tmp_path: Path, era: Era) -> None:
    ran.clear()
    person = FormUser([DECLINE])
    async with serving(tmp_path) as (kernel, _, client), client(era, person) as one:
        declined = await one.call_tool("launch", {"what": "kite"})
        text, waiting = join_text_content(declined), about(declined, "awaiting_approval")
        assert declined.is_error and "rejected" not in text and "The client declined" in text
        assert f"handrail approve {waiting}" in text
        await kernel.approvals.decide(waiting, ApprovalAnswer("once"), by="test")
        assert join_text_content(await one.call_tool("launch", {"what": "kite"})) == "launched kite" and ran == ["kite"]


@ERAS
async def test_a_call_is_parked_with_its_reason_where_the_client_cannot_ask(tmp_path: Path, era: Era) -> None:
    ran.clear()
    async with serving(tmp_path) as (kernel, _, client), client(era) as one:
        texts = [
            join_text_content(parked := await one.call_tool("launch", {"what": "kite", "toolCallId": n})) for n in "123"
        ]
        waiting = about(parked, "awaiting_approval")
        (row,) = kernel.approvals.list_pending()
        assert row.id == waiting and parked.is_error and ran == []
        assert all(f"handrail approve {waiting}" in text and row.request.reason in text for text in texts)
        assert "Do not repeat" in texts[-1], "a model that has no user must not loop"
        await kernel.approvals.decide(waiting, ApprovalAnswer("once"), by="test")
        assert join_text_content(await one.call_tool("launch", {"what": "kite"})) == "launched kite" and ran == ["kite"]
        asked = await one.call_tool("question", {"questions": [{"question": "Why?"}]})
        assert asked.is_error and "in your reply" in join_text_content(asked)


async def test_a_parked_call_of_a_program_runs_after_an_approval_on_the_command_line(handrail: Program) -> None:
    process = await asyncio.create_subprocess_exec(
        *handrail.command("mcp"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    write = {"name": "write", "arguments": {"path": "new.txt", "content": "x"}}
    call = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": write}
    process.stdin.write(f"{hello('2025-06-18')}\n{json.dumps(call)}\n".encode())
    answers = [json.loads(await process.stdout.readline()) for _ in range(2)]
    waiting = answers[1]["result"]["_meta"]["handrail/awaiting_approval"]
    done = await asyncio.to_thread(handrail, "approve", waiting, "--once")
    assert done.code == 0, done.err
    process.stdin.write(f"{json.dumps({**call, 'id': 6})}\n".encode())
    collected = json.loads(await process.stdout.readline())
    assert collected["id"] == 6 and "isError" not in collected["result"]
    assert (handrail.workspace / "new.txt").read_text() == "x"
    process.stdin.close()
    assert await process.wait() == 0 and await process.stderr.read() == b""


# ── the end ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
async def test_a_client_that_disconnects_after_the_tool_list_gets_no_more_output(
    handrail: Program, version: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        *handrail.command("mcp"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, limit=2**24
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    ready = '{"jsonrpc": "2.0", "method": "notifications/initialized"}'
    process.stdin.write(f'{hello(version)}\n{ready}\n{{"jsonrpc": "2.0", "id": 2, "method": "tools/list"}}\n'.encode())
    answers = [json.loads(await process.stdout.readline()) for _ in range(2)]
    assert [one["id"] for one in answers] == ["hello", 2]
    process.stdin.close()
    assert await process.stdout.read() == b"" and await process.stderr.read() == b""
    assert await process.wait() == 0


async def test_a_client_that_disconnects_during_a_call_gets_no_more_output(handrail: Program) -> None:
    signal = handrail.workspace / "signal"
    os.mkfifo(signal)
    process = await asyncio.create_subprocess_exec(
        *handrail.command("mcp", "--rule", "allow bash"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        limit=2**24,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    bash = {"name": "bash", "arguments": {"command": "cat signal && tail -f /dev/null"}, "_meta": {"progressToken": 1}}
    call = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": bash}
    process.stdin.write(f"{hello('2025-06-18')}\n{json.dumps(call)}\n".encode())
    assert json.loads(await process.stdout.readline())["id"] == "hello"
    (await asyncio.to_thread(open, signal, "w")).close()  # the program runs when it has opened its end
    process.stdin.close()
    assert await process.stdout.read() == b"" and await process.wait() == 0
