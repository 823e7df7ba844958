"""``kernel.mcp``: the upstream MCP servers of an open kernel, and sign-in at one.

A program can also connect a server::

    async with kernel.mcp.connect("files", command="mcp-server-filesystem", args=["/data"]) as server:
        await server.approve()
        result = await session.call("files_read_file", {"path": "/data/notes.txt"})
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from handrail.config import Configuration
from handrail.config.mcp import McpServer
from handrail.config.secrets import resolve
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.tool.requires import Variables
from handrail.kernel.sandbox import sandbox_of
from handrail.policy.rules.rules import RuleBook
from handrail.policy.targets import ceiling_layer
from handrail.registry.pins import Definition, StoredPins
from handrail.runtime.guard.guard import Guarded
from handrail.store.folders import Folders, prepare
from handrail.upstream.configured import configured, definition_of
from handrail.upstream.oauth import Prompt, Tokens
from handrail.upstream.servers import Ground, Upstreams

if TYPE_CHECKING:
    from handrail.config import Configuration
    from handrail.contract.generation import Generation
    from handrail.kernel.assembly import Rooms
    from handrail.runtime.secrets import SecretStore
    from handrail.store.folders import Folders
    from handrail.upstream.definition import Listing
    from handrail.upstream.oauth import Prompt
    from handrail.upstream.source import McpSource


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One server as it is now.

    :param where: how it is reached, without any secret
    :param state: ``idle`` (nobody has used it yet), ``connecting``, ``connected``, ``waiting`` (for the next attempt),
        ``closed``
    :param reason: why it is not connected where it should be
    :param protocol: the version spoken with it, now or the last time; empty where nobody knows
    :param tools: how many it listed, or None where nobody was ever connected to it
    """

    name: str
    transport: Literal["stdio", "http", "sse"]
    where: str
    state: Literal["idle", "connecting", "connected", "waiting", "closed"]
    reason: str
    protocol: str
    tools: int | None


class ConnectedServer:
    """A server that :meth:`McpServers.connect` has connected."""

    def __init__(self, generation: Callable[[], Generation], source: McpSource, pins: StoredPins, again: Any) -> None:
        self._generation = generation
        self._source = source
        self._pins = pins
        self._again = again

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def listing(self) -> Listing:
        """What the server says that it has, in its own words."""
        found = self._source.listing
        assert found is not None
        return found

    @property
    def tools(self) -> dict[str, str | None]:
        """The ids of its tools, and why each is off, if it is."""
        entries = self._generation().entries.values()
        return {
            entry.id: entry.withheld
            for entry in entries
            if entry.foreign is not None and entry.foreign.name == self.name
        }

    async def approve(self, tools: Iterable[str] | None = None) -> None:
        """Approve what these tools say of themselves now, as a person does with ``handrail sources approve``.

        :param tools: their ids; None for all of them
        :raises StartError: when the state folder cannot be written
        """
        wanted = None if tools is None else set(tools)
        entries = self._generation().entries
        found = [tool_id for tool_id in self.tools if wanted is None or tool_id in wanted]
        self._pins.approve(self.name, [Definition.of(entries[tool_id].spec) for tool_id in found])
        await self._again(self._source)


class McpServers(ABC):
    """The servers of one kernel."""

    @property
    @abstractmethod
    def servers(self) -> Sequence[ServerStatus]:
        """All of them as they are now."""

    @abstractmethod
    def connect(
        self,
        name: str,
        *,
        command: str | None = None,
        url: str | None = None,
        prompt: Prompt | None = None,
        **settings: Any,
    ) -> AbstractAsyncContextManager[ConnectedServer]:
        """Have one more server, until the block ends. Its tools are there for every session of this workspace, under the
        ids ``<name>_<tool>``; none runs before somebody has approved what it says of itself.

        :param command: of a server that is started here, in a sandbox; or
        :param url: of one that is reached over HTTP
        :param prompt: how a person signs in where the server asks for it
        :param settings: any setting of ``[mcp.servers.NAME]``: ``args``, ``env``, ``read``, ``hosts``, ``elicitation``, …
        :raises UsageError: for settings that are none, and a name that there is; in a process that joined
        :raises ToolError: ``unavailable`` where the server cannot be reached
        """


class HeldServers(McpServers):
    """In the process that holds the workspace."""

    def __init__(self, generation: Callable[[], Generation], rooms: Rooms, secrets: SecretStore) -> None:
        """:param generation: the one that the kernel is at"""
        self._generation = generation
        self._rooms = rooms
        self._secrets = secrets

    @property
    def servers(self) -> Sequence[ServerStatus]:
        return [status_of(source) for source in self._rooms.upstreams.sources]

    @asynccontextmanager
    async def connect(
        self,
        name: str,
        *,
        command: str | None = None,
        url: str | None = None,
        prompt: Prompt | None = None,
        **settings: Any,
    ) -> AsyncGenerator[ConnectedServer]:
        rooms = self._rooms
        server = _settings(name, command=command, url=url, **settings)
        definition = definition_of(name, server, "Kernel.mcp.connect", self._secrets, rooms.upstreams.learn)
        source = rooms.upstreams.add(definition, prompt)
        upstream = rooms.upstreams[name]
        try:
            await upstream.connected()
            await rooms.look_again(source)
            yield ConnectedServer(self._generation, source, StoredPins(rooms.store.folders.state), rooms.look_again)
        finally:
            await rooms.upstreams.remove(name)


class JoinedServers(McpServers):
    """In a process that joined: the holder has the servers, and everybody has their tools."""

    def __init__(self, folders: Folders, config: Configuration) -> None:
        self._folders = folders
        self._config = config

    @property
    def servers(self) -> Sequence[ServerStatus]:
        from handrail.kernel.agents import as_configured
        from handrail.upstream.configured import configured
        from handrail.upstream.source import McpSource

        folders = self._folders
        found = configured(self._config, as_configured(self._config))
        return [status_of(McpSource(one, folders.state, str(folders.workspace))) for one in found]

    def connect(
        self,
        name: str,
        *,
        command: str | None = None,
        url: str | None = None,
        prompt: Prompt | None = None,
        **settings: Any,
    ) -> AbstractAsyncContextManager[ConnectedServer]:
        raise UsageError(
            f"{name!r} cannot be connected here: another process holds this workspace, and keeps all connections to "
            f"servers. Configure it under [mcp.servers.{name}], or open this workspace first"
        )


def _settings(name: str, **settings: Any) -> McpServer:
    """
    :raises UsageError: for what is none
    """
    import re

    from handrail.config.mcp import NAME

    if re.fullmatch(NAME, name) is None:
        raise UsageError(
            f"{name[:60]!r} is no name of a server: letters, digits, '-' and '_', a letter first, at most 40"
        )
    given = {key: value for key, value in settings.items() if value is not None}
    if not {"command", "url"} & given.keys():
        raise UsageError(f"say how {name} is reached: command=… or url=…")
    try:
        return McpServer.model_validate(given)
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise UsageError(f"{name} cannot be connected: {problems}") from None


def status_of(source: McpSource) -> ServerStatus:
    """A server as it is now."""
    definition, upstream, listing = source.definition, source.upstream, source.listing
    protocol = upstream.protocol if upstream is not None else ""
    return ServerStatus(
        definition.name,
        definition.transport,
        definition.where,
        upstream.state if upstream is not None else "idle",
        (upstream.reason if upstream is not None else "") or source.fault(),
        protocol or (listing.protocol if listing is not None else ""),
        None if listing is None else len(listing.tools),
    )


# Connection of a server without a kernel, for a person to sign in with a browser or to list its content.

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
