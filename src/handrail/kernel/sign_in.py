"""Connecting an upstream MCP server without a kernel, to let a person sign in with a browser or to list what it has."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from handrail.config import Configuration
from handrail.config.secrets import resolve
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.tool.requires import Variables
from handrail.kernel.sandbox import sandbox_of
from handrail.policy.capabilities import ceiling_layer
from handrail.policy.rules.rules import RuleBook
from handrail.runtime.guard.guard import Guarded
from handrail.store.folders import Folders, prepare
from handrail.upstream.configured.configured import configured
from handrail.upstream.oauth import Prompt, Tokens
from handrail.upstream.servers import Ground, Upstreams

PATIENCE_S = 300.0
_MAX_HEAD = 16 * 1024
_HEAD_S = 10.0
"""How long a browser may take to send its request."""
_MOST_CONNECTIONS = 32
_DONE = b"You are signed in. You can close this page and go back to the terminal."


async def sign_in(config: Configuration, folders: Folders, name: str, show: Callable[[str], None]) -> int:
    """Connect a configured server, with a person to sign in where it asks. What it gives is kept for all later starts.

    :param show: brings the person to an address
    :return: how many tools the server has
    :raises UsageError: when there is no such server, it is none with a url, or it does not let anybody in
    """
    async with _callback(show) as prompt:
        tools = await look_at(config, folders, name, prompt)
    if tools is None:
        raise UsageError(f"there is no MCP server {name!r} with a url in the configuration; see: handrail mcp list")
    return tools


async def look_at(config: Configuration, folders: Folders, name: str, prompt: Prompt | None = None) -> int | None:
    """Connect a configured server once, to know what it has: its listing is kept.

    :param prompt: how a person signs in; only servers with a url are looked at then
    :return: how many tools it has; None where there is no such server
    :raises UsageError: where it cannot be reached
    """
    known = await resolve(config.settings.secrets, os.environ)
    definition = next((one for one in configured(config, known) if one.name == name), None)
    if definition is None or (prompt is not None and not definition.url):
        return None
    folders = prepare(folders.workspace, folders.state, allow_home=True)  # which was judged when they were found
    variables = Variables(workspace=(str(folders.workspace),))
    ceiling = ceiling_layer(config.settings.ceiling, variables)
    upstreams = Upstreams(Ground(folders, Guarded(sandbox_of(config)), variables, ceiling, RuleBook()))
    upstreams.add(definition, prompt)
    try:
        await upstreams[name].connected()
        return len((await upstreams[name].listed()).tools)
    except ToolError as error:
        raise UsageError(error.text) from None
    finally:
        await upstreams.aclose()


def sign_out(config: Configuration, folders: Folders, name: str) -> bool:
    """Forget what a server was signed in with. Whether there was anything.

    :raises UsageError: when there is no such server
    """
    names = [one for one in configured(config) if one.name == name]
    if not names:
        raise UsageError(f"there is no MCP server {name!r} in the configuration; see: handrail mcp list")
    return Tokens(names[0], folders.state).forget()


@asynccontextmanager
async def _callback(show: Callable[[str], None]) -> AsyncGenerator[Prompt]:
    """A page on this machine's loopback that the person is sent back to."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[str] = loop.create_future()
    open_now = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        try:
            if open_now <= _MOST_CONNECTIONS:
                await answered(reader, writer)
        finally:
            open_now -= 1
            writer.close()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        faults = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)
        with contextlib.suppress(*faults):
            async with asyncio.timeout(_HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
            known = method == "GET" and target.startswith("/callback?")
            body = _DONE if known else b"There is nothing here."
            status = b"200 OK" if known else b"404 Not Found"
            writer.write(
                b"HTTP/1.1 %s\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
                % (status, len(body), body)
            )
            await writer.drain()
            if known and not came.done():
                came.set_result(target)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=_MAX_HEAD)
    origin = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def visit(address: str) -> str:
        show(address)
        async with asyncio.timeout(PATIENCE_S):
            return origin + await came

    try:
        yield Prompt(f"{origin}/callback", visit)
    finally:
        server.close()
