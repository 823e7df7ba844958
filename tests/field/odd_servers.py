"""Raw MCP servers over stdio, each with one odd behaviour of public servers.

An odd server is the plain program with some Python in addition, which replaces an answer or prints more.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.upstream.scripted_mcp_servers import approve_server_tools

from handrail.contract.session_protocols import Session
from handrail.kernel.local_kernel import LocalKernel
from handrail.testing.scripted_kernel import temporary_kernel

PLAIN = """
import json, os, sys, time

def put(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

def put_bytes(data):
    sys.stdout.buffer.write(data + b"\\n")
    sys.stdout.buffer.flush()

def answer(number, result):
    put(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}))

def fail(number, code, message="no", data=None):
    put(json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message, "data": data}}))

def text(said):
    return {"content": [{"type": "text", "text": said}]}

CAPABILITIES = {"tools": {}}
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = [{"name": "echo", "description": "Return the text.", "inputSchema": SCHEMA}]

def discover(number, params):
    fail(number, -32601)

def initialize(number, params):
    info = {"name": "odd", "version": "1"}
    answer(number, {"protocolVersion": "2025-06-18", "capabilities": CAPABILITIES, "serverInfo": info})

def list_tools(number, params):
    answer(number, {"tools": TOOLS})

def result(name, args):
    return text("said " + str(args.get("text", "")))

def call(number, params):
    answer(number, result(params["name"], params.get("arguments") or {}))

def other(number, method, params):
    if number is not None:
        fail(number, -32601)

def before(message):
    pass
"""
MAIN = """
for line in sys.stdin:
    message = json.loads(line)
    number, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    before(message)
    if method == "server/discover":
        discover(number, params)
    elif method == "initialize":
        initialize(number, params)
    elif method == "tools/list":
        list_tools(number, params)
    elif method == "tools/call":
        call(number, params)
    else:
        other(number, method, params)
"""


@dataclass(frozen=True, slots=True)
class OddServer:
    """An odd server, and a call of one of its tools.

    :param habit: Python in addition to the plain program
    :param expected: a part of the result as JSON
    """

    name: str
    habit: str
    tool: str = "echo"
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"text": "hi"})
    expected: str = "said hi"

    def write(self, folder: Path) -> list[str]:
        """Write the program, and return its command."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.py"
        path.write_text(PLAIN + self.habit + MAIN)
        return [sys.executable, "-I", str(path)]

    def settings_toml(self, folder: Path, more: str = "") -> str:
        """Write the program, and return its table in ``handrail.toml``."""
        command, *args = self.write(folder)
        return (
            f"[mcp.servers.{self.name}]\ncommand = {json.dumps(command)}\nargs = {json.dumps(args)}\n"
            f"folders = {json.dumps([str(folder)])}\n{more}\n"
        )


@asynccontextmanager
async def odd_server(
    folder: Path, habit: str, more: str = "", *, approve: bool = True, rules: Sequence[str] = ()
) -> AsyncGenerator[tuple[LocalKernel, Session]]:
    """A kernel with one odd server ``t``, whose tools are approved, and a session that may call them."""
    settings = f"rules = {json.dumps(list(rules))}\n" + OddServer("t", habit).settings_toml(folder / "upstream", more)
    async with temporary_kernel(folder, settings=settings, rules=["allow mcp:t:*"]) as kernel:
        if approve:
            await approve_server_tools(kernel, "t")
        yield kernel, await kernel.session()


def faults_of(kernel: LocalKernel) -> list[str]:
    """Return the faults of the server's tools as shown to users."""
    return [str(one) for one in kernel.generation.quarantined]
