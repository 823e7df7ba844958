"""Upstream MCP servers with scripted misbehaviour: a program over stdin and stdout, and a server on loopback.

::

    server = Program(tmp_path, tools=[ECHO])
    async with temporary_kernel(tmp_path, settings=server.settings("t"), rules=["allow mcp:t:*"]) as kernel:
        await approved(kernel, "t")
        await (await kernel.session()).call("t_echo", {"text": "hi"})
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from handrail.kernel.local_kernel import LocalKernel
from handrail.registry.definition_pins import StoredPins, ThirdPartyDefinition

ANYTHING: Mapping[str, Any] = {"type": "object", "additionalProperties": True}
_PROGRAM = Path(__file__).with_name("scripted_mcp_program.py")


def make_tool_entry(name: str, description: str = "", **more: Any) -> dict[str, Any]:
    """Return a tool in the form of a server's listing.

    The program implements tools such as ``echo``, ``die``, ``hang`` and ``huge``.
    """
    return {"name": name, "description": description or f"Does {name}.", "inputSchema": dict(ANYTHING), **more}


class StdioServerProgram:
    """An upstream MCP server over stdin and stdout, in a separate folder.

    :param plan: the listed ``tools``, ``resources``, ``templates`` and ``prompts``; ``mute`` for a server that never answers;
        ``dies_at_start`` for one that ends at once
    """

    def __init__(self, folder: Path, tools: Iterable[str | Mapping[str, Any]] = ("echo",), **plan: Any) -> None:
        self.folder = folder / "upstream"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "server.py"
        self.path.write_bytes(_PROGRAM.read_bytes())
        self._plan = self.folder / "plan.json"
        self.set_plan(tools, **plan)

    def set_plan(self, tools: Iterable[str | Mapping[str, Any]] = ("echo",), **plan: Any) -> None:
        """Set the behavior of the server from its next message on."""
        whole = {"tools": [make_tool_entry(one) if isinstance(one, str) else dict(one) for one in tools], **plan}
        fresh = self._plan.with_suffix(".new")
        fresh.write_text(json.dumps(whole))
        fresh.replace(self._plan)

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-I", str(self.path), str(self._plan)]

    def make_connect_arguments(self, **more: Any) -> dict[str, Any]:
        """Return the server as arguments for ``kernel.mcp_servers.connect``."""
        command, *args = self.argv
        return {"command": command, "args": tuple(args), "folders": (str(self.folder),), **more}

    def settings_toml(self, name: str, more: str = "") -> str:
        """Return the server as a table of ``handrail.toml``."""
        command, *args = self.argv
        folders = json.dumps([str(self.folder)])
        return f"[mcp.servers.{name}]\ncommand = {json.dumps(command)}\nargs = {json.dumps(args)}\nfolders = {folders}\n{more}\n"


async def approve_server_tools(kernel: LocalKernel, name: str) -> None:
    """Approve the current definitions of a configured server's tools."""
    upstreams, pins = kernel.components.upstreams, StoredPins(kernel.components.store.folders.state)
    await upstreams[name].ensure_listing_known()
    (source,) = (one for one in upstreams.sources if one.name == name)
    await kernel.components.publish_source_tools(source)
    entries = [
        one
        for one in kernel.generation.entries.values()
        if one.third_party is not None and one.third_party.name == name
    ]
    pins.approve(name, [ThirdPartyDefinition.from_spec(entry.spec) for entry in entries])
    await kernel.components.publish_source_tools(source)


@dataclass(slots=True)
class ReceivedHttpRequest:
    """One received HTTP request."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any

    @property
    def rpc_method(self) -> str:
        """The JSON-RPC method of its message."""
        return self.body.get("method", "") if isinstance(self.body, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


ReplyHandler = Callable[[ReceivedHttpRequest, "HttpResponseWriter"], Awaitable[bool]]
"""Answers a request in place of the server. It returns False to leave the request to the server."""


class HttpResponseWriter:
    """The writer of the response to one request."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def send_response(
        self, status: int, body: bytes = b"", kind: str = "application/json", **headers: str
    ) -> None:
        """Send a complete response."""
        lines = [
            f"HTTP/1.1 {status} Said",
            f"content-length: {len(body)}",
            f"content-type: {kind}",
            "connection: close",
        ]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self._writer.drain()

    async def result(self, asked: ReceivedHttpRequest, result: Mapping[str, Any], **headers: str) -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": asked.body["id"], "result": result}).encode()
        await self.send_response(200, body, **headers)

    async def start_event_stream(self, **headers: str) -> None:
        """Send the head of an event stream, which ends with the connection."""
        lines = ["HTTP/1.1 200 OK", "content-type: text/event-stream", "connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        await self._writer.drain()

    async def event(
        self, message: Mapping[str, Any] | str, id: str = "", retry: int | None = None, name: str = ""
    ) -> None:
        data = message if isinstance(message, str) else json.dumps(message)
        text = (f"event: {name}\n" if name else "") + (f"id: {id}\n" if id else "")
        text += (f"retry: {retry}\n" if retry is not None else "") + f"data: {data}\n\n"
        self._writer.write(text.encode())
        await self._writer.drain()

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()


@dataclass(slots=True)
class UpstreamHttpServer:
    """An upstream MCP server on loopback, with protocol version 2025-11-25 and scripted answers."""

    tools: list[dict[str, Any]] = field(default_factory=lambda: [make_tool_entry("echo")])
    replies: deque[ReplyHandler] = field(default_factory=deque[ReplyHandler])
    """The handlers of the next tool calls, in order."""
    any_request: ReplyHandler | None = None
    token: str = ""
    """The required bearer token; empty for none. Other requests get 401."""
    requests: list[ReceivedHttpRequest] = field(default_factory=list[ReceivedHttpRequest])
    sessions: set[str] = field(default_factory=set[str])
    port: int = 0
    listening: asyncio.Server | None = None
    _began: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def close_port(self) -> None:
        """Close the port, like a server that has stopped."""
        assert self.listening is not None
        self.listening.close()

    def forget_sessions(self) -> None:
        """Forget all sessions, like a server that was restarted."""
        self.sessions.clear()

    async def answer(self, asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> None:
        if self.any_request is not None and await self.any_request(asked, answering):
            return
        if self.token and asked.headers.get("authorization") != f"Bearer {self.token}":
            await answering.send_response(401, www_authenticate='Bearer error="invalid_token"')
        elif asked.method == "GET":
            await answering.send_response(405)
        elif asked.method == "DELETE":
            self.sessions.discard(asked.headers.get("mcp-session-id", ""))
            await answering.send_response(200)
        elif asked.rpc_method == "initialize":
            self._began += 1
            session = f"session-{self._began}"
            self.sessions.add(session)
            given = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {"listChanged": True}}}
            await answering.result(
                asked, {**given, "serverInfo": {"name": "h", "version": "1"}}, mcp_session_id=session
            )
        elif asked.rpc_method == "server/discover":
            await answering.send_response(
                400, b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"no session"}}'
            )
        elif asked.headers.get("mcp-session-id", "") not in self.sessions:
            await answering.send_response(404)
        elif "id" not in asked.body or "method" not in asked.body:
            await answering.send_response(202)
        elif asked.rpc_method == "tools/list":
            await answering.result(asked, {"tools": self.tools})
        elif asked.rpc_method == "tools/call":
            await self._answer_call(asked, answering)
        else:
            await answering.result(asked, {})

    async def _answer_call(self, asked: ReceivedHttpRequest, answering: HttpResponseWriter) -> None:
        if self.replies and await self.replies.popleft()(asked, answering):
            return
        message = str(asked.body["params"]["arguments"].get("text"))
        await answering.result(asked, {"content": [{"type": "text", "text": message}]})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ")
            fields = {
                key.lower(): value.strip() for key, _, value in (line.partition(":") for line in head[1:] if line)
            }
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            asked = ReceivedHttpRequest(
                method, path, fields, json.loads(body) if body[:1] in (b"{", b"[") else body.decode()
            )
            self.requests.append(asked)
            await self.answer(asked, HttpResponseWriter(writer))
        writer.close()


@asynccontextmanager
async def run_upstream_http_server(**given: Any) -> AsyncGenerator[UpstreamHttpServer]:
    """Run an upstream server on loopback until the block ends, then close its port."""
    server = UpstreamHttpServer(**given)
    listening = await asyncio.start_server(server._serve, "127.0.0.1", 0)  # pyright: ignore[reportPrivateUsage]
    server.listening = listening
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
