"""Thirty-five raw MCP servers with odd behaviour of public servers, all behind one gateway.

``make upstreams`` runs them before the public servers, and ``tests/field`` runs them as a test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from tests.field.odd_servers import OddServer
from tests.upstream.scripted_mcp_servers import approve_server_tools

from handrail.testing.scripted_kernel import temporary_kernel


def _answering(expression: str) -> str:
    return f"def call(number, params):\n    answer(number, {expression})\n"


def _schema(**words: object) -> str:
    return f"TOOLS[0]['inputSchema'] = {words!r}\n"


SERVERS: Sequence[OddServer] = (
    OddServer("banner", "put('=====\\n  My Server v1.0\\n=====')\n"),
    OddServer("log", "def before(message):\n    put('[db] Connected')\n"),
    OddServer("json-log", "def before(message):\n    put(json.dumps({'level': 'info', 'id': message.get('id')}))\n"),
    OddServer("blank", "def before(message):\n    put('\\n\\n')\n"),
    OddServer("no-version", "def before(message):\n    put(json.dumps({'id': message.get('id'), 'result': {}}))\n"),
    OddServer("prefix", "plain_put = put\ndef put(text):\n    plain_put('log: ' + text)\n"),
    OddServer("huge", "put('x' * (17 << 20))\n"),
    OddServer("probe-exit", "def discover(number, params):\n    sys.exit(1)\n"),
    OddServer("probe-crash", "def discover(number, params):\n    raise ValueError(params)\n"),
    OddServer("probe-null", "def discover(number, params):\n    answer(number, None)\n"),
    OddServer("probe-version", "def discover(number, params):\n    fail(number, -32022)\n"),
    OddServer("probe-silent", "def discover(number, params):\n    pass\n"),
    OddServer("surrogate", _answering("text('said hi \\ud83d')"), expected="said hi \\ufffd"),
    OddServer(
        "bytes",
        'def call(number, params):\n    put_bytes(b\'{"jsonrpc":"2.0","id":%d,"result":{"content":"said hi \\xff"}}\' % number)\n',
    ),
    OddServer("nan", _answering("{'content': 'said hi', '_meta': {'x': float('nan')}}")),
    OddServer("chinese", "sys.stdout.reconfigure(encoding='utf-8')\nTOOLS[0]['name'] = '查询'\n", tool="u67e5_u8be2"),
    OddServer("dots", "TOOLS[0]['name'] = 'echo.text'\n", tool="echo_text"),
    OddServer("long", "TOOLS[0]['name'] = 'echo' * 50\n", tool=""),
    OddServer("draft4", _schema(**{"$schema": "https://json-schema.org/draft-04/schema#", "type": "object"})),
    OddServer("object", _schema(type="object")),
    OddServer("no-schema", "del TOOLS[0]['inputSchema']\n"),
    OddServer(
        "php",
        "SCHEMA['required'] = None\nTOOLS.append({'name': 'none', 'inputSchema': {'type': 'object', 'properties': []}})\n",
    ),
    OddServer(
        "nullable",
        "SCHEMA['properties']['n'] = {'type': 'int', 'nullable': True}\n",
        arguments={"text": "hi", "n": None},
    ),
    OddServer(
        "far-ref",
        "TOOLS.append({'name': 'far', 'inputSchema': {'type': 'object', 'properties': {'a': {'$ref': 'https://x.org/a'}}}})\n",
    ),
    OddServer("unannounced", "CAPABILITIES = {}\n"),
    OddServer(
        "mute-lists",
        "CAPABILITIES = {'tools': {}, 'resources': {}, 'prompts': {}}\ndef other(number, method, params):\n    pass\n",
    ),
    OddServer("no-lists", "CAPABILITIES = {'tools': {}, 'resources': {}, 'prompts': {}}\n"),
    OddServer("text-content", _answering("{'content': 'said hi'}")),
    OddServer("dict-content", _answering("{'content': {'type': 'text', 'text': 'said hi'}}")),
    OddServer("bare-result", _answering("'said hi'")),
    OddServer("no-content", _answering("{}"), expected="without content"),
    OddServer(
        "url-base64",
        _answering("{'content': [{'type': 'image', 'data': '-_8', 'mimeType': 'image/png'}]}"),
        expected="image/png",
    ),
    OddServer(
        "data-head",
        _answering("{'content': [{'type': 'image', 'data': 'data:image/gif;base64,AAAA'}]}"),
        expected="image/gif",
    ),
    OddServer("id-text", "def call(number, params):\n    answer(str(number), text('said hi'))\n"),
    OddServer("loopback", "import socket\nserved = socket.create_server(('127.0.0.1', 0))\n"),
)


async def call_odd_servers(folder: Path) -> list[str]:
    """Start all of them behind one gateway, call a tool of each, and return what went wrong."""
    programs = folder / "odd"
    settings = "\n".join(one.settings_toml(programs) for one in SERVERS)
    wrong: list[str] = []
    async with temporary_kernel(folder, settings=settings, rules=["allow mcp:*:*"]) as kernel:
        session = await kernel.session()

        async def call(one: OddServer) -> None:
            try:
                await approve_server_tools(kernel, one.name)
                ids = [tool_id for tool_id in kernel.generation.entries if tool_id.startswith(f"{one.name}_")]
                tool_id = f"{one.name}_{one.tool}" if one.tool else ids[0]
                result = await session.call(tool_id, dict(one.arguments))
                said = json.dumps(result.data, default=str) if result.ok else str(result.error_text)
                if not result.ok or one.expected not in said:
                    wrong.append(f"{one.name}: {said[:300]}")
            except Exception as error:  # each is one line of the report
                wrong.append(f"{one.name}: {error}")

        for start in range(0, len(SERVERS), 8):
            await asyncio.gather(*map(call, SERVERS[start : start + 8]))
    return wrong
