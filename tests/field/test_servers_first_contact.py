"""Servers that crash at the first request, answer it oddly, or list only some tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.field.odd_servers import OddServer, faults_of, odd_server
from tests.upstream.scripted_mcp_servers import (
    HttpResponseWriter,
    ReceivedHttpRequest,
    make_tool_entry,
    run_upstream_http_server,
)

from handrail import config
from handrail.kernel.upstream_mcp_servers import fetch_and_store_tool_list
from handrail.store.state_folders import locate_folders
from handrail.testing.scripted_kernel import temporary_kernel

PROBED = {
    "ends": "sys.exit(1)",
    "ends without an error": "sys.exit(0)",
    "crashes": "raise RuntimeError('unknown method')",
    "answers and ends": "fail(number, -32601); sys.exit(0)",
    "answers null": "answer(number, None)",
    "answers something else": "answer(number, {'methods': []})",
    "answers a text": "put(json.dumps({'jsonrpc': '2.0', 'id': number, 'error': 'boom'}))",
    "answers without a number": "put(json.dumps({'jsonrpc': '2.0', 'id': None, 'error': {'code': -32600, 'message': 'no'}}))",
    **{
        f"answers {code}": f"fail(number, {code})"
        for code in (-32700, -32600, -32601, -32602, -32603, -32000, -32001, -32002, -32022, 0, 404)
    },
    "answers that it is not initialized, and stays so": """
    fail(number, -32002, "not initialized")
    global initialize
    def initialize(number, params):
        fail(number, -32002, "not initialized")""",
}


@pytest.mark.parametrize("answered", PROBED.values(), ids=PROBED)
async def test_a_server_that_fails_the_first_request_is_initialized_in_the_first_attempt(
    tmp_path: Path, answered: str
) -> None:
    async with odd_server(tmp_path, f"def discover(number, params):\n    {answered.strip()}\n") as (kernel, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        assert kernel.components.upstreams["t"].attempts == 1


@pytest.mark.parametrize("hangs", ["time.sleep(3600)", "pass"], ids=["for ever", "on this request"])
async def test_a_server_that_hangs_on_the_first_request_is_initialized_on_another_connection(
    tmp_path: Path, hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.upstream.client.upstream_session.PROBE_S", 0.5)
    async with odd_server(tmp_path, f"def discover(number, params):\n    {hangs}\n") as (_, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"


async def test_a_review_waits_for_the_second_connection_to_a_server(tmp_path: Path) -> None:
    """As `handrail sources review` does."""
    server = OddServer("t", "def discover(number, params):\n    sys.exit(1)\n")
    (tmp_path / "ws").mkdir()
    settings = tmp_path / "config.toml"
    settings.write_text(server.settings_toml(tmp_path / "upstream"))
    configured = config.load_configuration(settings)
    folders = locate_folders(tmp_path / "ws", tmp_path / "state")
    assert await fetch_and_store_tool_list(configured, folders, "t") == 1


SILENT = "def other(number, method, params):\n    pass\n"
REFUSING = "def other(number, method, params):\n    fail(number, -32603, 'not today')\n"


async def test_a_server_keeps_its_tools_when_another_list_gets_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("handrail.upstream.upstream_connection.LIST_TIMEOUT_S", 0.5)
    announced = "CAPABILITIES = {'tools': {}, 'resources': {}, 'prompts': {}}\n"
    async with odd_server(tmp_path, announced + SILENT) as (kernel, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        told = " ".join(faults_of(kernel))
        assert "resources/list got no answer within 0.5 s" in told and "prompts/list got no answer" in told


async def test_a_server_keeps_its_tools_when_another_list_is_refused(tmp_path: Path) -> None:
    announced = "CAPABILITIES = {'tools': {}, 'resources': {}, 'prompts': {}}\n"
    async with odd_server(tmp_path, announced + REFUSING) as (kernel, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        assert "prompts/list failed: not today" in " ".join(faults_of(kernel))


@pytest.mark.parametrize("capabilities", ["{}", "None", "[]", "{'tools': None}", "{'logging': {}}", "{'prompts': {}}"])
async def test_tools_are_listed_for_any_announced_capabilities(tmp_path: Path, capabilities: str) -> None:
    async with odd_server(tmp_path, f"CAPABILITIES = {capabilities}\n") as (kernel, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        assert not faults_of(kernel)


async def test_a_call_to_a_server_whose_tool_list_failed_gets_the_reason(tmp_path: Path) -> None:
    habit = "def list_tools(number, params):\n    fail(number, -32603, 'database is down')\n"
    async with odd_server(tmp_path, habit, approve=False) as (kernel, session):
        await kernel.components.upstreams.wait_for_unlisted_servers()
        result = await session.call("t_echo", {"text": "hi"})
        assert "refused to list its tools: database is down" in str(result.error_text)


async def test_a_server_over_http_that_fails_on_the_first_request_is_initialized(tmp_path: Path) -> None:
    async with (
        run_upstream_http_server(tools=[make_tool_entry("echo")]) as http,
        temporary_kernel(tmp_path, rules=["allow mcp:h:*"]) as kernel,
    ):

        async def breaks(asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> bool:
            return asked.rpc_method == "server/discover"  # and closes the connection without an answer

        http.any_request = breaks
        async with kernel.mcp_servers.connect("h", url=http.url) as connected:
            await connected.approve_tool_definitions()
            assert (await (await kernel.session()).call("h_echo", {"text": "x"})).data == "x"


async def test_a_failed_page_of_the_tool_list_loses_only_its_own_tools(tmp_path: Path) -> None:
    habit = """
def list_tools(number, params):
    if params.get("cursor"):
        fail(number, -32603, "no more")
    else:
        answer(number, {"tools": TOOLS, "nextCursor": "2"})
"""
    async with odd_server(tmp_path, habit) as (kernel, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        assert "tools/list failed after 1 items: no more" in " ".join(faults_of(kernel))


@pytest.mark.parametrize("tools", ["None", "{}", "'none'"])
async def test_an_answer_without_a_list_of_tools_is_reported(tmp_path: Path, tools: str) -> None:
    habit = f"def list_tools(number, params):\n    answer(number, {{'tools': {tools}}})\n"
    async with odd_server(tmp_path, habit) as (kernel, _):
        assert "tools/list was answered without a list of tools" in " ".join(faults_of(kernel))


@pytest.mark.parametrize("version", ["None", "'2024-10-07'", "'2024-11-05'"])
async def test_a_server_of_an_early_version_or_of_none_is_used(tmp_path: Path, version: str) -> None:
    habit = f"""
def initialize(number, params):
    found = {{"protocolVersion": {version}, "capabilities": {{}}}}
    answer(number, {{key: value for key, value in found.items() if value is not None}})
"""
    async with odd_server(tmp_path, habit) as (_, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"


@pytest.mark.parametrize("version", ["None", "20241105", "[]", "{}"])
async def test_a_server_whose_version_is_no_text_is_used(tmp_path: Path, version: str) -> None:
    habit = f"""
def initialize(number, params):
    answer(number, {{"protocolVersion": {version}, "capabilities": {{"tools": {{}}}}, "serverInfo": None}})
"""
    async with odd_server(tmp_path, habit) as (_, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"


NO_ID = "put(json.dumps({'jsonrpc': '2.0', 'id': None, 'error': {'code': -32700, 'message': 'cannot read that'}}))"


async def test_an_error_without_a_number_before_the_first_answer_costs_only_itself(tmp_path: Path) -> None:
    habit = f"""
def before(message):
    if message.get("method") in ("initialize", "tools/list"):
        {NO_ID}
"""
    async with odd_server(tmp_path, habit) as (kernel, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        assert kernel.components.upstreams["t"].attempts == 1


async def test_a_server_that_answers_the_handshake_only_with_such_an_error_is_refused_with_it(tmp_path: Path) -> None:
    habit = f"def initialize(number, params):\n    {NO_ID}\n"
    async with odd_server(tmp_path, habit, approve=False) as (kernel, session):
        await kernel.components.upstreams.wait_for_unlisted_servers()
        assert "cannot read that" in str((await session.call("t_echo", {"text": "hi"})).error_text)


PAGES = {
    "an empty cursor": """
def list_tools(number, params):
    answer(number, {"tools": TOOLS, "nextCursor": ""})
""",
    "a number for a cursor": """
def list_tools(number, params):
    if params.get("cursor") == 2:
        answer(number, {"tools": TOOLS})
    else:
        answer(number, {"tools": [], "nextCursor": 2})
""",
    "the same cursor again": """
def list_tools(number, params):
    answer(number, {"tools": [] if params.get("cursor") else TOOLS, "nextCursor": "x"})
""",
    "tools by name": """
def list_tools(number, params):
    answer(number, {"tools": {"echo": {"description": "Return the text.", "inputSchema": SCHEMA}}})
""",
    "a schema as an empty list": """
TOOLS[0]["inputSchema"] = []
""",
    "an announcement of null": """
CAPABILITIES = {"tools": None, "resources": None, "prompts": False}
""",
}


@pytest.mark.parametrize("habit", PAGES.values(), ids=PAGES)
async def test_an_oddly_written_list_of_tools_is_read_whole_and_once(tmp_path: Path, habit: str) -> None:
    async with odd_server(tmp_path, habit) as (kernel, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        assert not faults_of(kernel)


DISCOVERED = {
    "as the protocol says": '{"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}, "resultType": "complete"}',
    "next to older ones": '{"supportedVersions": ["2025-11-25", "2026-07-28", None], "capabilities": {"tools": {}}}',
    "one version as a text": '{"supportedVersions": "2026-07-28", "capabilities": {"tools": {}}}',
    "under the older name": '{"protocolVersion": "2026-07-28", "capabilities": None, "serverInfo": "odd"}',
    "without capabilities": '{"supportedVersions": ["2026-07-28"], "_meta": None, "instructions": 5, "ttlMs": "x"}',
}


@pytest.mark.parametrize("answered", DISCOVERED.values(), ids=DISCOVERED)
async def test_a_server_of_the_newest_version_only_is_used(tmp_path: Path, answered: str) -> None:
    habit = f"""
def discover(number, params):
    answer(number, {answered})
def initialize(number, params):
    fail(number, -32601)
def call(number, params):
    assert params["_meta"]["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"
    answer(number, text("said hi"))
"""
    async with odd_server(tmp_path, habit) as (kernel, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
        assert kernel.components.upstreams["t"].protocol_version == "2026-07-28"


async def test_a_list_that_is_not_in_an_object_is_taken(tmp_path: Path) -> None:
    habit = "def list_tools(number, params):\n    answer(number, TOOLS)\n"
    async with odd_server(tmp_path, habit) as (_, session):
        assert (await session.call("t_echo", {"text": "hi"})).data == "said hi"
